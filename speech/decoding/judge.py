"""Speech that a synthesis model makes: the files of --output, and held-out sentences that are
spoken and, with --judge, transcribed. The error rate of a recogniser that another recipe has
trained says how well they are understood."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from torch import Tensor

from common import checkpoint, files, options
from common.errors import RunError, UsageError, writing
from common.options import flag
from speech.data.columns import Corpus
from speech.data.folders import is_replaceable, made_from, write_folder
from speech.signal.audio import int16, is_own_speech, write_speech, write_wav
from speech.writing import metrics
from speech.writing.text import NAMES, in_lower_case

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # the judge is one process
HEADER = ("audio_file", "text", "speaker_name")  # of the manifests that are written
KINDS = ("reference", "resynthesis", "synthesis")  # of the clips of a held-out sentence
MADE_BY = {"made_by": "held-out sentences"}  # in the made_from.json of held-out sentences

# Commands that speak no held-out sentences, and rows for common.options: flags that exclude them.
ELSEWHERE = ("synthesize", "show_text", "check_data")
HELD_OUT = "the first is for held-out sentences, after training or with --evaluate"
EXCLUDES = (
    *((flag, command, HELD_OUT) for flag in ("judge", "speak_held_out") for command in ELSEWHERE),
    ("judge", "speak_held_out 0", "there would be nothing to judge; leave one of them out"),
)


@dataclass(frozen=True)
class HeldOut:
    """The held-out sentences that are spoken, as many as usual for None, on `device`."""

    # fmt: off
    speak_held_out: int | None = flag(
        options.COUNT, None, "N",
        "held-out sentences to speak after training, or with --evaluate, in OUTPUT_DIR/speech ()")
    judge: str | None = flag(
        options.path, None, "FILE",
        "weights of a recogniser that another recipe has trained (best.safetensors): print its"
        " error rate on the sentences that are spoken after training, or with --evaluate")
    # fmt: on
    output_dir: str
    device: str
    seed: int


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser, usual: str) -> None:
    """`usual`: how many sentences are spoken unless the flag says it, for the help."""
    counts = f"{usual}; with --evaluate 0, unless there is a judge"
    options.add_record(parser, "held-out sentences", HeldOut, speak_held_out=(None, counts))
    parser.refuse(EXCLUDES)


def resolve(args, exports_only: bool) -> HeldOut:
    """The request of the flags. `exports_only`: this is --export alone. Raises `UsageError`."""
    count = args.speak_held_out
    if (args.judge or count) and exports_only:
        flag = "--judge" if args.judge else "--speak_held_out"
        raise UsageError(f"{flag} is for held-out sentences, and --export alone speaks none")
    if args.judge:
        recogniser_of(args.judge, RECIPES)
    if args.evaluate and count is None and not args.judge:
        count = 0
    return HeldOut(
        speak_held_out=count,
        judge=args.judge,
        output_dir=args.output_dir,
        device=args.device,
        seed=args.seed,
    )


def outputs_of(output: str, count: int, inputs: Sequence[str]) -> list[Path]:
    """The files of `count` texts. `inputs`: what the command reads. Raises `UsageError`."""
    if Path(output).suffix.lower() != ".wav":
        raise UsageError(f"--output {output}: speech is written as .wav; name a file that ends so")
    path = Path(output)
    outputs = [path]
    if count > 1:  # speech_001.wav and so on
        names = [f"{path.stem}_{number:03d}{path.suffix}" for number in range(1, count + 1)]
        outputs = [path.with_name(name) for name in names]
    for path in outputs:
        files.require_output(path, "--output", inputs, is_own_speech)
    return outputs


def write(path: Path, waveform: Tensor, rate: int) -> None:
    """Writes speech (T,) to --output, if it still may. Raises `UsageError` and `RunError`."""
    files.require_output(path, "--output", is_earlier=is_own_speech)
    with writing(path.parent, "--output"):
        write_speech(path, int16(waveform), rate)


# --- held-out sentences ---------------------------------------------------------------------------


def clip_name(index: int, kind: str) -> str:
    """The file of a held-out sentence, one of KINDS."""
    return f"{index + 1:03d}_{kind}.wav"


def folder_of(output_dir: str | Path) -> Path:
    """Where a run speaks held-out sentences: OUTPUT_DIR/speech or, if that is somebody else's
    (recordings, or this project's own code), OUTPUT_DIR/speech-2."""
    folder = Path(output_dir).absolute() / "speech"
    is_own = not folder.is_symlink() and made_from(folder) == MADE_BY
    return folder if is_own or not os.path.lexists(folder) else folder.with_name("speech-2")


def write_corpus(
    folder: Path, corpus: Corpus, made: Sequence[dict[str, tuple[np.ndarray, int]]]
) -> None:
    """Writes in a new `folder` what was `made` of each sentence of a corpus, {kind: (int16 samples,
    Hz)}, and a manifest of each of KINDS. An earlier one is replaced if nobody has changed it, and
    moved to earlier-N/ otherwise. Raises `RunError`."""

    def fill(aside: Path) -> None:
        for kind in KINDS:
            table = ["|".join(HEADER)]
            for index, clips in enumerate(made):
                file = clip_name(index, kind)
                write_wav(aside / file, *clips[kind])
                row = (file, corpus.texts[index], corpus.speakers[index] or "speaker")
                table.append("|".join(" ".join(c.replace("|", " ").split()) for c in row))
            files.write_text(aside / f"{kind}.csv", "\n".join(table) + "\n")

    with writing(folder, "--output_dir"):
        if not is_replaceable(folder):
            name = files.move_aside([folder], [folder.parent])
            print(f"{folder}: what was there was moved to {folder.parent / name}/")
        write_folder(folder, fill, MADE_BY)


def recogniser_of(path: str, recipes: Path) -> Path:
    """The recipe in the folder `recipes` that has saved the weights at `path`. Raises `UsageError`
    if it is not a recogniser's, which has a function `transcribe`."""
    recipe = checkpoint.recipe_of(path, "--judge")
    script = recipes / f"{recipe}.py"
    if not recipe.isidentifier() or not script.is_file():
        raise UsageError(
            f"--judge {path}: there is no recipes/{recipe[:60]}.py, which has saved it"
        )
    if "\ndef transcribe(" not in script.read_text(encoding="utf-8"):
        raise UsageError(f"--judge {path}: recipes/{recipe}.py, its recipe, is not a recogniser")
    return script


def transcripts(path: str, recipes: Path, clips: list[Path], device: str) -> dict[str, str]:
    """The transcript that the recogniser at `path` makes of each clip, by file. `recipes`: their
    folder. A clip without samples has no words. Raises `UsageError` and `RunError`."""
    heard = {str(clip): "" for clip in clips}
    audible = [name for name in heard if soundfile.info(name).frames]
    if not audible:
        return heard
    script = recogniser_of(path, recipes)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "heard.jsonl")
        command = [sys.executable, script, "--transcribe", *audible, "--resume", path]
        command += ["--output", output, "--output_dir", folder, "--device", device]
        environment = {name: text for name, text in os.environ.items() if name not in TORCHRUN}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if ended.returncode:
            reason = (ended.stderr.strip() or f"status {ended.returncode}").splitlines()[-1]
            raise RunError(f"--judge {path}: it could not hear the sentences: {reason}")
        for line in output.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            heard[row["file"]] = row["text"]
    return heard


def judged(path: str, recipes: Path, folder: Path, texts: list[str], device: str) -> str:
    """The CER of the judge on what the family's `speak_corpus` wrote into `folder` for these
    sentences, as lines to print: on the speech, on the recordings made anew from their codes, and
    on the recordings, which shows how good the judge is."""
    clips = {
        kind: [folder.absolute() / clip_name(number, kind) for number in range(len(texts))]
        for kind in KINDS
    }
    every = [clip for each in clips.values() for clip in each]
    heard = transcripts(path, recipes, every, device)
    lines = [f"CER of the judge ({NAMES[in_lower_case]}) with its 95 % interval"]
    for kind in reversed(KINDS):
        hypotheses = [heard[str(clip)] for clip in clips[kind]]
        errors = metrics.errors_of_each(texts, hypotheses, "characters", in_lower_case)
        rate = 100 * sum(errors, metrics.Errors()).rate
        (ends,) = metrics.intervals([errors])
        lines.append(f"  {kind:11} {rate:7.2f} % {metrics.shown(ends).strip()}")
    return "\n".join(lines)
