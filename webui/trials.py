"""Trained models are tried: transcripts of recordings, speech with its history, and the utterances
that an evaluation got wrong."""

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common.errors import Failure, UsageError, writing
from common.files import write_file
from speech.data.columns import Rejections, printable
from speech.data.fields import AUDIO_KEYS, SPEAKER_KEYS, START_KEYS, TEXT_KEYS
from speech.data.finding import find_audio
from speech.data.headers import audio_suffix
from speech.data.manifest import parse
from speech.writing import metrics, subtitles
from webui import outputs, runs
from webui.catalogue import Recipe
from webui.commands import words_of
from webui.places import Places
from webui.runs import Run
from webui.use import Models

CPU, GPU = "CPU", "GPU"
RELEASED = ("model_dir", "model_file")  # options that name a released model
# Options with which a released model is read as at the start of a run.
AS_IN_RUN = (*RELEASED, "language", "tokenizer_file")
# The folder of what was said, in a run's folder or, for released models, in --runs.
SPOKEN = "spoken"
HISTORY = "history.jsonl"
VOICES = "voices"  # the folder there for uploaded reference clips
KINDS = ("reference", "resynthesis", "synthesis")  # of clips of a held-out sentence
UNITS = ("words", "characters")
HISTORY_BYTES = 1 << 20  # that are read of a history
SEARCHED = 2_000  # rows of a manifest that voices are looked for in
PER_SPEAKER = 3  # clips of a speaker to choose from
MOST_CLIPS = 60
OFFSET = re.compile(r"(?P<path>.*) at (?P<offset>\d+\.\d\d) s", re.DOTALL)
_speaking = threading.Lock()  # two pages would take the same number


@dataclass(frozen=True)
class Model:
    """A model to try: its recipe, the words that name it, its label, the folder of its speech."""

    recipe: str
    words: tuple[str, ...]
    label: str
    folder: Path


@dataclass(frozen=True)
class Wish:
    """A wish: a text, a voice for a model that has none of its own, how random the speech is."""

    text: str
    voice: Path | None
    temperature: float
    seed: int


# --- which model ----------------------------------------------------------------------------------


def weights_of(run: Run, name: str | None) -> Path:
    """The weights of a run that have this file name. Raises `UsageError`."""
    for path in outputs.weights(run.folder):
        if path.name == name:
            return path
    if not name:
        raise UsageError("choose weights first")
    raise UsageError(f"{run.name} has no weights {printable(name[:60])}: choose others")


def model_of_run(run: Run, weights: str | None) -> Model:
    """The weights of a run that have this file name. Raises `UsageError`."""
    words = ("--resume", str(weights_of(run, weights)))
    return Model(run.recipe, words, f"{run.name}, {weights}", run.folder / SPOKEN)


def released_model(places: Places, recipe: Recipe, path: str, language: str = "") -> Model:
    """The released model in a file or a folder. Raises `UsageError`."""
    name = "model_dir" if places.inside(path).is_dir() else "model_file"
    return _released(places, recipe, {name: path, "language": language.strip()})


def released_before(places: Places, recipe: Recipe, run: Run) -> Model | None:
    """The released model that a run began from, or None. Raises `UsageError`."""
    values = run.settings.get("values", {})
    if not any(values.get(name) for name in RELEASED):
        return None
    return _released(places, recipe, {name: str(values.get(name, "")) for name in AS_IN_RUN})


def _released(places: Places, recipe: Recipe, values: dict[str, str]) -> Model:
    words = []
    for name, value in values.items():
        if value:
            words += words_of(places, recipe.option(name), value, places.runs)
    label = next(values[name] for name in RELEASED if values.get(name))
    return Model(recipe.name, tuple(words), label, places.runs / SPOKEN)


def on_device(model: Model, places: Places, device: str, is_allowed: bool) -> tuple[str, ...]:
    """The words that name a model and where it is loaded. Raises `UsageError` if this is the GPU
    while it trains, unless this `is_allowed`."""
    training = runs.on_gpu(places.runs) if device == GPU else []
    if training and not is_allowed:
        raise UsageError(
            f"{training[0].name} is training on the GPU, and a second model could take the memory"
            " that it needs: choose the CPU, tick the box to use the GPU all the same, or wait"
        )
    return (*model.words, "--device", "cuda" if device == GPU else "cpu")


# --- recordings -----------------------------------------------------------------------------------


def checked_audio(path: str | None, what: str) -> Path:
    """A file that was uploaded or recorded, if it is audio. Raises `UsageError`."""
    if not path:
        raise UsageError(f"there is no {what}: drop a file, or record one")
    if not audio_suffix(Path(path)):
        raise UsageError(f"the {what} is not an audio file that can be read here: use WAV or MP3")
    return Path(path)


def transcribe(
    models: Models, recipe: str, audio: Path, words: tuple[str, ...], extra: Iterable[str] = ()
) -> dict:
    """The transcript of a recording by the model that `words` name: "text", "seconds", and timed
    "pieces" and, for some recipes, "words"; with `extra` flags. Raises `Failure`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "transcript.jsonl"
        models.ask(recipe, ["--transcribe", str(audio), "--output", str(output), *extra], words)
        return json.loads(output.read_text(encoding="utf-8"))


def times_of(recipe: Recipe, model: Model, before: Model | None) -> list[str]:
    """The flags with which a recogniser tells times for subtitles. The time tokens of Whisper are
    those of a released model, or of one that began from it (`before`)."""
    is_released = before is not None or "--resume" not in model.words
    return ["--timestamps"] if is_released and "timestamps" in recipe.names else []


def write_subtitles(rows: list[dict]) -> list[str]:
    """Writes the subtitles of transcripts as "name".srt into gradio's folder. Without times of
    words or segments, the words share the time of their piece. Returns the files."""
    made = []
    for row in rows:
        if "words" not in row:
            row = {"segments": row.get("pieces", []), **row}
        folder = tempfile.mkdtemp(dir=os.environ["GRADIO_TEMP_DIR"])
        name = printable(row["name"]).replace("/", "_")
        file = Path(folder, f"{Path(name).stem[:60]}.srt")  # at most 240 bytes
        file.write_text(subtitles.FORMATS[".srt"].whole(row), encoding="utf-8")
        made.append(str(file))
    return made


# --- speech ---------------------------------------------------------------------------------------


def speak(models: Models, model: Model, wish: Wish, words: tuple[str, ...]) -> dict:
    """Says a text by the model that `words` name, and adds it to the model's history. Returns the
    row of the history. Raises `Failure`."""
    text = " ".join(wish.text.split())
    if not text:
        raise UsageError("there is no text: type what is to be said")
    with _speaking, tempfile.TemporaryDirectory() as folder:
        # A text on the command line could be a flag, or the name of a file to read.
        script = Path(folder) / "text.txt"
        script.write_text(text, encoding="utf-8", errors="replace")
        spoken = Path(folder) / "speech.wav"
        request = ["--synthesize", str(script)]
        if wish.voice:
            request += ["--speaker_wav", str(wish.voice)]
        request += ["--output", str(spoken), "--seed", str(wish.seed)]
        request += ["--temperature", str(wish.temperature)]
        models.ask(model.recipe, request, words)
        with writing(model.folder, "--runs"):
            return _remember(model, wish, text, spoken)


def _remember(model: Model, wish: Wish, text: str, spoken: Path) -> dict:
    model.folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.stem) for path in model.folder.glob("*.wav") if path.stem.isdecimal()]
    row = {
        "file": f"{max(numbers, default=0) + 1:04}.wav",
        "text": text,
        "model": model.label,
        "voice": str(wish.voice or ""),
        "temperature": wish.temperature,
        "seed": wish.seed,
        "time": round(time.time()),
    }
    shutil.copyfile(spoken, model.folder / row["file"])
    with open(model.folder / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def history(folder: Path) -> list[dict]:
    """The speech that was made, the newest first, with the "path" of each file."""
    rows = []
    with suppress(OSError), open(folder / HISTORY, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - HISTORY_BYTES))
        for line in file.read().splitlines():
            with suppress(ValueError):  # of a half line
                row = json.loads(line)
                rows.append({**row, "path": str(folder / row["file"])})
    return rows[::-1]


def keep_voice(model: Model, upload: Path) -> Path:
    """A copy of an uploaded reference clip that stays with what it says. Raises `RunError`."""
    folder = model.folder / VOICES
    name = hashlib.blake2b(upload.read_bytes(), digest_size=8).hexdigest()
    kept = folder / f"{name}{audio_suffix(upload)}"
    with writing(folder, "--runs"):
        folder.mkdir(parents=True, exist_ok=True)
        if not kept.exists():
            write_file(kept, lambda aside: shutil.copyfile(upload, aside), durable=False)
    return kept


def voices(places: Places, run: Run | None, spoken: Path) -> list[tuple[str, str]]:
    """Reference clips to choose from, as (label, path): earlier uploads in the folder `spoken`,
    clips that the run has learned from, all clips of the page's folders."""
    found = {}
    for path in sorted((spoken / VOICES).glob("*")):
        found[str(path)] = f"uploaded: {path.name}"
    if run:
        for path, speaker, text in islice(_training_clips(places, run), MOST_CLIPS):
            found[path] = ": ".join(filter(None, ("training", speaker, text[:60])))
    for name in places.clips():
        found.setdefault(str(places.inside(name)), name)
    return [(label, path) for path, label in found.items()]


def _training_clips(places: Places, run: Run) -> Iterator[tuple[str, str, str]]:
    """(path, speaker, text) of clips that a run was trained on, a few of each speaker."""
    counts: dict[str, int] = {}
    for manifest in _training_manifests(run):
        with suppress(Failure, OSError):
            manifest = places.file(manifest)
            for _, row in islice(parse(manifest, Rejections()), SEARCHED):
                kinds = AUDIO_KEYS, SPEAKER_KEYS, TEXT_KEYS
                name, speaker, text = (_first(row, keys) for keys in kinds)
                if not name or _first(row, START_KEYS) or counts.get(speaker, 0) == PER_SPEAKER:
                    continue
                with suppress(UsageError):  # moved, or outside
                    path = places.file(find_audio(name, str(manifest.parent)))
                    counts[speaker] = counts.get(speaker, 0) + 1
                    yield str(path), speaker, text


def _training_manifests(run: Run) -> list[Path]:
    """The manifests of a run or, without one, of the demo corpus in its folder."""
    with suppress(ValueError):  # a quotation mark is missing
        if named := shlex.split(str(run.settings.get("values", {}).get("train_manifest", ""))):
            return [Path(name) for name in named]
    return sorted((run.folder / "data").glob("*/train.json"))


def _first(row: dict, keys: Iterable[str]) -> str:
    values = (row.get(key) for key in keys) if isinstance(row, dict) else ()
    return next((value for value in values if isinstance(value, str)), "")


def held_out(places: Places, run: Run) -> list[dict]:
    """The sentences that a run has spoken at its end: "text", "speaker", and the paths of the
    "reference", of its "resynthesis" from its codes, and of the "synthesis"."""
    rows: dict[int, dict] = {}
    folder = next((path.parent for path in sorted(run.folder.glob("speech*/synthesis.csv"))), None)
    for kind in KINDS if folder else ():
        with suppress(Failure, OSError, KeyError):
            for number, row in parse(places.file(folder / f"{kind}.csv"), Rejections()):
                about = {"text": row["text"], "speaker": row["speaker_name"]}
                kept = rows.setdefault(number, about)
                kept[kind] = str(folder / row["audio_file"])
    return list(rows.values())


# --- evaluations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Utterance:
    """An utterance of an evaluation set, with its errors by words and by characters."""

    path: str
    offset: float
    seconds: float | None
    reference: str
    hypothesis: str
    words: metrics.Errors
    characters: metrics.Errors


def evaluated(run: Run) -> list[Utterance]:
    """The utterances of a run's last evaluation, the worst first."""
    found = []
    for row in outputs.transcripts(run.folder):
        match = OFFSET.fullmatch(row["file"])
        path, offset = (match["path"], float(match["offset"])) if match else (row["file"], 0.0)
        texts = row["reference"], row["hypothesis"]
        errors = [metrics.count_errors(*([text] for text in texts), unit) for unit in UNITS]
        found.append(Utterance(path, offset, row.get("seconds"), *texts, *errors))
    return sorted(found, key=lambda each: (-each.characters.rate, -each.words.rate))
