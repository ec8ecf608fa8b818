"""Do the stock programs read the recipes' exports, and write the same texts? A table of every
recipe, every form of its export and every program.

    python benchmarks/handover.py                                     # trains all of MODELS
    python benchmarks/handover.py parakeet_tdt --updates 600          # one of them, longer
    python benchmarks/handover.py --run parakeet_tdt=runs/parakeet_tdt    # a run that is there
    python benchmarks/handover.py --whisper_cpp whisper.cpp           # with its scripts of conversion
    python benchmarks/handover.py --python nemo-toolkit=nemo/bin/python   # a program elsewhere

Each model is trained on its demo's corpus (XTTS, which has none, on Matcha's words) and exported, then held-out clips of the demo go through
--transcribe and through each program, as the files are. A Whisper hears windows of 30 s there, so
here as well, in one greedy pass over what is exported, or with a beam of five: with silence after
the clip, or with zeros for features where the program fills its window with these, as
faster-whisper does. XTTS speaks held-out sentences by --synthesize and
by each program, and the waveforms are compared; both take the likeliest code. A program that is not
installed has a row that says so. Each reads in a separate process, because some end the process
if a file displeases them.

Two models begin with folders that are written here, as released ones. XTTS's has random weights.
whisper_released, for whisper.cpp, is whisper_vietnamese's
model with OpenAI's vocabulary; it is not trained, and its texts are no Vietnamese.

A new row is a function that takes an export and files and returns texts, and a line of `ROWS`."""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import soundfile
import torch

from common import checkpoint
from common.errors import RunError, UsageError, exit_with_one_line, first_line
from speech.morse.synthesis import Choice, Synthetic
from speech.signal.audio import SAMPLE_RATE, int16, read_audio, write_wav

ANSWER = "texts: "  # begins the line that a reading process prints
SECONDS = 1800  # of a process
# What our --transcribe gets, so that it decodes as the programs do.
DECODING = {"konkani_conformer": "--decoding greedy"}
GREEDY = "--top_k 1 --top_p 1 --repetition_penalty 1"  # of XTTS
RELEASED_TOKENS = 51_864  # at least, of Whisper's released vocabularies
SAME_SPEECH = 0.01  # of the loudest sample, that two waveforms may differ by
QUIET = 0.05  # of the loudest sample, after the end of speech
WORD = re.compile("Ġ[a-z]{4,}")  # a token that is a whole word


@dataclass(frozen=True)
class Row:
    """`model` is a key of MODELS, `form` are the flags of the export, `package` is the program's
    distribution, and `read` takes the exported folder and files. Of a Whisper, how ours is read
    beside it: with `zeros` for features after a clip, and by which `method`."""

    model: str
    form: str
    program: str
    package: str
    read: Callable[[Path, list[Path]], list[str]]
    zeros: bool = False
    method: str = "greedy"


def samples_of(path: Path) -> np.ndarray:
    return np.asarray(read_audio(str(path), SAMPLE_RATE), dtype=np.float32)


# --- the programs ---------------------------------------------------------------------------------


def pipeline(folder: Path, files: list[Path], **generating) -> list[str]:
    from transformers import pipeline

    recogniser = pipeline("automatic-speech-recognition", str(folder), device="cpu")
    return [
        recogniser({"raw": samples_of(path), "sampling_rate": SAMPLE_RATE}, **generating)["text"]
        for path in files
    ]


def whisper_pipeline(folder: Path, files: list[Path]) -> list[str]:
    """Greedily; the pipeline's own way is a beam of five."""
    return pipeline(folder, files, generate_kwargs={"num_beams": 1})


def nemo(folder: Path, files: list[Path]) -> list[str]:
    from nemo.collections.asr.models import ASRModel

    model = ASRModel.restore_from(str(folder / "model.nemo"), map_location="cpu")
    return [result.text for result in model.transcribe([str(path) for path in files])]


def sherpa(folder: Path, files: list[Path], kind: str = "") -> list[str]:
    import sherpa_onnx

    parts = {part: str(folder / f"{part}{kind}.onnx") for part in ("encoder", "decoder", "joiner")}
    recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(
        **parts, tokens=str(folder / "tokens.txt"), model_type="nemo_transducer"
    )
    return sherpa_texts(recognizer, files)


def sherpa_texts(recognizer, files: list[Path]) -> list[str]:
    texts = []
    for path in files:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, samples_of(path))
        recognizer.decode_stream(stream)
        texts.append(stream.result.text)
    return texts


def sherpa_int8(folder: Path, files: list[Path]) -> list[str]:
    return sherpa(folder, files, ".int8")


def sherpa_ctc(folder: Path, files: list[Path]) -> list[str]:
    import sherpa_onnx

    return sherpa_texts(
        sherpa_onnx.OfflineRecognizer.from_nemo_ctc(
            model=str(folder / "model.onnx"), tokens=str(folder / "tokens.txt")
        ),
        files,
    )


def sherpa_omnilingual(folder: Path, files: list[Path], kind: str = "") -> list[str]:
    import sherpa_onnx

    recognizer = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
        model=str(folder / f"model{kind}.onnx"), tokens=str(folder / "tokens.txt")
    )
    return sherpa_texts(recognizer, files)


def sherpa_omnilingual_int8(folder: Path, files: list[Path]) -> list[str]:
    return sherpa_omnilingual(folder, files, ".int8")


def onnx_asr(folder: Path, files: list[Path], quantization: str | None = None) -> list[str]:
    import onnx_asr

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = onnx_asr.load_model(kind, folder, quantization=quantization)
    return [model.recognize(samples_of(path), sample_rate=SAMPLE_RATE) for path in files]


def onnx_asr_int8(folder: Path, files: list[Path]) -> list[str]:
    return onnx_asr(folder, files, "int8")


def faster_whisper_beam(folder: Path, files: list[Path]) -> list[str]:
    """With its own beam and fallback."""
    return faster_whisper(folder, files)


def faster_whisper_greedy(folder: Path, files: list[Path]) -> list[str]:
    return faster_whisper(folder, files, beam_size=1, temperature=0)


def faster_whisper(folder: Path, files: list[Path], **search) -> list[str]:
    from faster_whisper import WhisperModel

    converted = folder.parent / "ct2"
    command = (
        "--model {} --output_dir {} --force --copy_files tokenizer.json preprocessor_config.json"
    )
    words = command.format(folder, converted).split()
    call([sys.executable, "-m", "ctranslate2.converters.transformers", *words])
    model = WhisperModel(str(converted), device="cpu", compute_type="float32")
    # By default it suppresses the first token of " ♪", among others. In a small vocabulary that is
    # the space.
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    suppressed = [-1] if size >= RELEASED_TOKENS else []
    texts = []
    for path in files:
        segments, _ = model.transcribe(
            samples_of(path),
            language=language_of(folder),
            suppress_tokens=suppressed,
            without_timestamps=True,  # which a model from scratch does not have
            **search,
        )
        texts.append("".join(segment.text for segment in segments))
    return texts


def whisper_cpp(folder: Path, files: list[Path], script: str, source: Path) -> list[str]:
    """`script` is one of whisper.cpp's, `source` what it converts. Special tokens follow from the
    size of the vocabulary there."""
    from pywhispercpp.model import Model

    scripts = os.environ.get("WHISPER_CPP")
    if not scripts:
        raise RunError("--whisper_cpp names no folder with whisper.cpp's models/convert-*.py")
    assets = Path(importlib.import_module("whisper").__file__).parents[1]  # of openai-whisper
    call(
        [
            sys.executable,
            str(Path(scripts, "models", script)),
            str(source),
            str(assets),
            str(folder.parent),
        ]
    )
    # With flash attention it attends to rows behind the audio (its pull request 3941).
    model = Model(
        str(folder.parent / "ggml-model.bin"),
        language=language_of(folder),
        context_params={"flash_attn": False},
    )
    plain = {"no_timestamps": True, "temperature_inc": 0.0}
    texts = []
    for path in files:
        segments = model.transcribe(samples_of(path), **plain)
        texts.append(" ".join(segment.text for segment in segments))
    return texts


def whisper_cpp_folder(folder: Path, files: list[Path]) -> list[str]:
    return whisper_cpp(folder, files, "convert-h5-to-ggml.py", folder)


def whisper_cpp_file(folder: Path, files: list[Path]) -> list[str]:
    return whisper_cpp(folder, files, "convert-pt-to-ggml.py", folder / "model.pt")


def language_of(folder: Path) -> str:
    """The language of an exported Whisper, without the marks around it."""
    return json.loads((folder / "generation_config.json").read_text())["language"].strip("<|>")


def coqui(folder: Path, files: list[Path], from_clip: bool = False) -> list[str]:
    """Speaks the texts in `files` and returns wav files. The voice is the first of
    speakers_xtts.pth, or that of reference.wav."""
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts

    config = XttsConfig()
    config.load_json(str(folder / "config.json"))
    model = Xtts(config)
    model.load_checkpoint(config, checkpoint_dir=str(folder))
    voice = next(iter(model.speaker_manager.speakers.values())).values()
    if from_clip:
        voice = model.get_conditioning_latents(
            audio_path=[str(folder / "reference.wav")],
            max_ref_length=config.max_ref_len,
            gpt_cond_len=config.gpt_cond_len,
            gpt_cond_chunk_len=config.gpt_cond_chunk_len,
        )
    greedy = {"top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0}
    spoken = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        waveform = model.inference(text, "en", *voice, **greedy)["wav"]
        spoken.append(str(path.with_suffix(".wav")))
        soundfile.write(spoken[-1], np.asarray(waveform), 24_000, subtype="FLOAT")
    return spoken


def coqui_clip(folder: Path, files: list[Path]) -> list[str]:
    return coqui(folder, files, from_clip=True)


ROWS = (
    Row("parakeet_tdt", "--export_format hf", "transformers", "transformers", pipeline),
    Row("parakeet_tdt", "--export_format nemo", "NeMo", "nemo-toolkit", nemo),
    Row("parakeet_tdt", "--export_format onnx", "sherpa-onnx", "sherpa-onnx", sherpa),
    Row("parakeet_tdt", "--export_format onnx", "sherpa-onnx, int8", "sherpa-onnx", sherpa_int8),
    Row("parakeet_tdt", "--export_format onnx", "onnx-asr", "onnx-asr", onnx_asr),
    Row("parakeet_tdt", "--export_format onnx", "onnx-asr, int8", "onnx-asr", onnx_asr_int8),
    Row("wav2vec2_ctc", "--export_format hf", "transformers", "transformers", pipeline),
    Row("wav2vec2_ctc", "--export_format onnx", "sherpa-onnx", "sherpa-onnx", sherpa_omnilingual),
    Row(
        "wav2vec2_ctc",
        "--export_format onnx",
        "sherpa-onnx, int8",
        "sherpa-onnx",
        sherpa_omnilingual_int8,
    ),
    Row("konkani_conformer", "", "sherpa-onnx", "sherpa-onnx", sherpa_ctc),
    Row("konkani_conformer", "", "onnx-asr", "onnx-asr", onnx_asr),
    Row("whisper_vietnamese", "", "transformers", "transformers", whisper_pipeline),
    Row("whisper_vietnamese", "", "faster-whisper", "faster-whisper", faster_whisper_greedy, True),
    Row("whisper_released", "", "transformers", "transformers", whisper_pipeline),
    Row("whisper_released", "", "faster-whisper", "faster-whisper", faster_whisper_greedy, True),
    Row(
        "whisper_released",
        "",
        "faster-whisper, beam of 5",
        "faster-whisper",
        faster_whisper_beam,
        True,
        "beam",
    ),
    Row("whisper_released", "", "whisper.cpp, folder", "pywhispercpp", whisper_cpp_folder),
    Row("whisper_released", "", "whisper.cpp, model.pt", "pywhispercpp", whisper_cpp_file),
    Row("whisper_morse", "", "transformers", "transformers", whisper_pipeline),
    Row("whisper_morse", "", "faster-whisper", "faster-whisper", faster_whisper_greedy, True),
    Row("xtts_amharic", "", "Coqui, speakers_xtts.pth", "coqui-tts", coqui),
    Row("xtts_amharic", "", "Coqui, reference.wav", "coqui-tts", coqui_clip),
)


# --- the models -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model that is trained on a recipe's demo. `begin` writes the folder of --model_dir and
    takes the runs of the models before it; without `training` that is the model."""

    recipe: str
    training: str | None
    begin: Callable[[Path, dict[str, Path]], None] | None = None


def released_whisper(folder: Path, runs: dict[str, Path]) -> None:
    """whisper_vietnamese's model with OpenAI's vocabulary. Its pieces that this lacks become words
    there, and no other token is ever likely, so texts are of other words but decided as well."""
    from models.whisper import formats, tokenizer

    if "whisper_vietnamese" not in runs:
        raise UsageError("whisper_released is made of a whisper_vietnamese run: name that, too")
    best = runs["whisper_vietnamese"] / "checkpoints" / "best.safetensors"
    saved = checkpoint.read_weights(best, "whisper_vietnamese")
    assets = Path(importlib.import_module("whisper").__file__).parent / "assets"
    ours = tokenizer.make_tokenizer(saved.model_info["tokenizer"])
    theirs = tokenizer.read_tokenizer(assets / "multilingual.tiktoken", "vi", 51_865)
    known = theirs.vocab | theirs.specials
    words = (place for token, place in theirs.vocab.items() if WORD.fullmatch(token))
    old = saved.model["decoder.embed_tokens.weight"]
    # No text has this byte, so it is the least likely token.
    rows = 2 * old[ours.vocab["ÿ"]].repeat(theirs.size, 1)
    for token, row in (ours.vocab | ours.specials).items():
        rows[known[token] if token in known else next(words)] = old[row]
    config = {**saved.model_info["config"], "vocab_size": theirs.size}
    weights = {**saved.model, "decoder.embed_tokens.weight": rows}
    formats.export(folder, weights, config, theirs)


def released_xtts(folder: Path, runs: dict[str, Path]) -> None:
    """A small folder in Coqui's form, with random weights."""
    from models.xtts import formats, frozen, texts
    from models.xtts.model import GPT
    from models.xtts.tokenizer import new_vocabulary

    torch.manual_seed(0)
    parts = {"code_dim": 64, "dvae_hidden": 128}
    config = formats.make_config(128, 4, 2, text_tokens=512, codes=512, **parts)
    groups = {"gpt": GPT(config).state_dict(), **frozen.make_frozen(config).groups()}
    vocab = new_vocabulary(texts.CHARACTERS, [texts.CARRIER, "am"], config["text_tokens"])
    formats.export(folder, groups, config, {"config": {}, "vocab": vocab, "licence": False}, {})


MODELS = {
    "parakeet_tdt": Model("parakeet_tdt", "--max_steps 500"),
    "wav2vec2_ctc": Model("wav2vec2_ctc", "--max_steps 800"),
    "konkani_conformer": Model("konkani_conformer", "--max_steps 1200"),
    # The end of it is in windows of 30 s, as others read.
    "whisper_vietnamese": Model("whisper_vietnamese", "--max_steps 900"),
    "whisper_released": Model("whisper_vietnamese", None, released_whisper),
    "whisper_morse": Model("whisper_morse", "--max_steps 1100"),
    "xtts_amharic": Model(
        "xtts_amharic", "--max_steps 200 --learning_rate 1e-3 --speak_held_out 0", released_xtts
    ),
}


# --- the recipes' commands ------------------------------------------------------------------------


def call(command: list[str], **environment: str) -> str:
    """The stdout of a process. Raises `RunError` with the last line of its stderr."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environment}
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise RunError(
            lines[-1].removeprefix("error: ")[:200]
            if lines
            else f"it ended with status {result.returncode}"
        )
    return result.stdout


def recipe_of(name: str, *flags: object) -> str:
    file = ROOT / "recipes" / f"{name}.py"
    return call([sys.executable, str(file), "--device", "cpu", *map(str, flags)])


def made(args, name: str, folder: Path, runs: dict[str, Path]) -> list:
    """Trains a model in `folder`/run, unless there is a run. Returns the flags that name it."""
    model = MODELS[name]
    words = []
    if model.begin and name not in runs:
        model.begin(folder / "start", runs)
        words = ["--model_dir", folder / "start"]
        if model.recipe == "whisper_vietnamese":
            words += ["--language", "vi"]
    if model.training is None:
        return words
    if name not in runs:
        runs[name] = folder / "run"
        words += ["--output_dir", runs[name], *model.training.split()]
        if args.updates:
            words += ["--max_steps", args.updates]
        if model.recipe == "xtts_amharic":
            words += ["--language", "am", *spoken_amharic(runs[name] / "data" / "amharic")]
        recipe_of(model.recipe, *words)
    return ["--resume", runs[name] / "checkpoints" / "best.safetensors"]


def spoken_amharic(folder: Path) -> list[str]:
    """Flags that name a corpus of spoken Amharic, which is written into `folder`."""
    from speech.data import demo

    sizes = {"train": 400, "val": 100}
    made = demo.speech_corpus(folder, demo.AMHARIC_WORDS, demo.AMHARIC_VOICES, sizes)
    return ["--train_manifest", made["train"], "--val_manifest", made["val"]]


def held_out(run: Path, name: str, count: int) -> list[dict]:
    """Rows of a set of the demo that a run made; the paths are whole."""
    manifests = sorted(run.glob(f"data/*/{name}.json"))
    if not manifests:
        raise UsageError(f"{run}: there is no demo corpus in it")
    rows = map(json.loads, manifests[0].read_text(encoding="utf-8").splitlines()[:count])
    return [{**row, "audio_filepath": manifests[0].parent / row["audio_filepath"]} for row in rows]


def clips_of(recipe: str, run: Path, count: int, folder: Path) -> list[Path]:
    """Held-out clips; Morse's demo has no files, so they are made in `folder`."""
    if recipe != "whisper_morse":
        return [row["audio_filepath"] for row in held_out(run, "test", count)]
    clips = Synthetic(Choice(["demo"], clip_seconds=3.0).mix(), count, seed=77)
    files = []
    for index in range(count):
        waveform, *_ = clips.load(index, 0)
        files.append(folder / f"{index:06}.wav")
        write_wav(files[-1], int16(waveform), SAMPLE_RATE)
    return files


def texts_of(recipe: str, weights: list, files: list[Path], folder: Path) -> list[str]:
    """The texts that our --transcribe writes."""
    output = folder / "ours.jsonl"
    flags = [*weights, "--output", output, *DECODING.get(recipe, "").split()]
    recipe_of(recipe, "--transcribe", *files, *flags)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {Path(row["file"]).name: row["text"] for row in rows}
    return [found[path.name] for path in files]


@torch.no_grad()
def window_texts(folder: Path, files: list[Path], zeros: bool, method: str) -> list[str]:
    """The texts that our code writes of clips in windows of 30 s with an exported Whisper; see
    `Row`."""
    from models.whisper import decoding, formats
    from models.whisper.model import HOP, Whisper
    from models.whisper.tokenizer import read_tokenizer

    weights, config, extras = formats.read_model(folder)
    tokenizer = read_tokenizer(extras["tokenizer"], language_of(folder), config["vocab_size"])
    model = Whisper(config).eval()
    checkpoint.load_weights(model, weights)
    model.pad_to_longest = True
    search = decoding.make_search(tokenizer, extras["generation"], config["vocab_size"], method)
    decode = decoding.greedy_texts if method == "greedy" else decoding.texts
    texts = []
    for path in files:
        samples = torch.from_numpy(samples_of(path))[None]
        lengths = torch.tensor([samples.shape[1]])
        batch = {"audio": samples, "audio_lengths": lengths, "audio_lengths_host": lengths}
        if zeros:
            batch["fill_from"] = lengths // HOP
        texts += decode(model, tokenizer, *model.encode(batch), search)
    return texts


def sentences_of(weights: list, texts: list[str], folder: Path) -> list[Path]:
    """Files with a sentence each as Coqui's code takes it: as --show_text prints it, behind the
    token of the language."""
    shown = recipe_of("xtts_amharic", "--show_text", *texts, *weights)
    files = [folder / f"{number:03d}.txt" for number in range(1, len(texts) + 1)]
    for path, line in zip(files, shown.splitlines()[-len(texts) :], strict=True):
        path.write_text(f"[am]{line}", encoding="utf-8")
    return files


def speech_of(weights: list, texts: list[str], voice: Path, folder: Path) -> list[str]:
    """The wav files that our --synthesize writes."""
    flags = ["--speaker_wav", voice, "--output", folder / "ours.wav", *GREEDY.split()]
    recipe_of("xtts_amharic", "--synthesize", *texts, *weights, *flags)
    return [str(path) for path in sorted(folder.glob("ours*.wav"))]


# --- the table ------------------------------------------------------------------------------------


def version_of(package: str, python: str) -> str | None:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    try:
        return call([python, "-c", code]).strip()
    except RunError:
        return None


def read(row: Row, python: str, folder: Path, files: list[Path], whisper_cpp: str) -> list[str]:
    """The texts of a row, read in a separate process."""
    words = [str(ROWS.index(row)), str(folder), *map(str, files)]
    out = call([python, __file__, "--read", *words], WHISPER_CPP=whisper_cpp)
    (line,) = [line for line in out.splitlines() if line.startswith(ANSWER)]
    return json.loads(line.removeprefix(ANSWER))


def compared(texts: list[str], ours: list[str]) -> str:
    """The table's cell for a program's texts."""
    pairs = [
        (" ".join(each.split()), " ".join(our.split()))
        for each, our in zip(texts, ours, strict=True)
    ]
    differing = [(each, our) for each, our in pairs if each != our]
    if not any(ours):
        return "our own texts are empty: train longer (--updates)"
    if not differing:
        return f"the same texts, {len(ours)} of {len(ours)}"
    each, our = differing[0]
    same = len(ours) - len(differing)
    return f"{same} of {len(ours)} the same; {each[:60]!r} for {our[:60]!r}"


def compared_speech(spoken: list[str], ours: list[str]) -> str:
    """The table's cell for a program's waveforms. Ours end with a short fade where they have become
    quiet, so only what is before it is compared, and theirs must be quiet after it."""
    shares = []
    seconds = 0.0
    for each, our in zip(spoken, ours, strict=True):
        (theirs, rate), (made, our_rate) = (soundfile.read(path) for path in (each, our))
        kept = len(made) - rate // 100
        loudest = abs(made).max()
        rest = abs(theirs[len(made) :]).max(initial=0)
        if rate != our_rate or len(theirs) < len(made) or rest > QUIET * loudest:
            lengths = f"{len(theirs) / rate:.2f} s for {len(made) / our_rate:.2f} s"
            return f"{Path(our).name}: another length, {lengths}"
        shares.append(float(abs(theirs[:kept] - made[:kept]).max() / loudest))
        seconds += kept / rate
    same = sum(share < SAME_SPEECH for share in shares)
    return (
        f"the same waveform, {same} of {len(ours)} ({seconds:.1f} s): samples differ by at most"
        f" {100 * max(shares):.2g} % of the loudest"
    )


def results(args, name: str, folder: Path, runs: dict[str, Path]) -> None:
    """Prints the rows of a model."""
    recipe = MODELS[name].recipe
    folder = folder / name
    folder.mkdir()
    weights = made(args, name, folder, runs)
    run = runs.get(name, runs.get(recipe))
    exported = {}
    more = []
    judge = compared
    if recipe == "xtts_amharic":
        rows = held_out(run, "val", args.clips)
        texts, voice = [row["text"] for row in rows], rows[0]["audio_filepath"]
        files = sentences_of(weights, texts, folder)
        ours, judge = speech_of(weights, texts, voice, folder), compared_speech
        more = ["--speaker_wav", voice]
    else:
        files = clips_of(recipe, run, args.clips, folder)
        if recipe.startswith("whisper"):
            exported[""] = folder / "form" / "export"
            recipe_of(recipe, "--export", exported[""], *weights)
        else:
            ours = texts_of(recipe, weights, files, folder)
    for row in (row for row in ROWS if row.model == name):
        python = args.python.get(row.package, sys.executable)
        version = version_of(row.package, python)
        try:
            if row.form not in exported:
                exported[row.form] = folder / f"form{len(exported)}" / "export"
                flags = [*row.form.split(), *weights, *more]
                recipe_of(recipe, "--export", exported[row.form], *flags)
            outcome = "not installed"
            if version:
                found = read(row, python, exported[row.form], files, args.whisper_cpp)
                if recipe.startswith("whisper"):
                    ours = window_texts(exported[""], files, row.zeros, row.method)
                outcome = judge(found, ours)
        except (RunError, subprocess.TimeoutExpired) as error:
            outcome = f"failed: {first_line(error)}"
        form = f"`{row.form or '--export'}`"
        print(f"| {name} | {form} | {row.program} | {version or '-'} | {outcome} |", flush=True)


def main(args) -> None:
    if args.read:
        number, folder, *files = args.read
        texts = ROWS[int(number)].read(Path(folder), [Path(file) for file in files])
        print(ANSWER + json.dumps(texts), flush=True)
        return
    print("| model | form | program | version | result |\n| --- | --- | --- | --- | --- |")
    runs = {name: folder.absolute() for name, folder in args.run.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models or MODELS:
            results(args, name, Path(folder), runs)


def pair_of(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(MODELS)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{names} (all)")
    parser.add_argument("--updates", type=int, help="of the training, instead of the usual ones")
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument(
        "--run", type=pair_of, action="append", default=[], metavar="MODEL=DIR",
        help="the --output_dir of a trained demo, instead of a training",
    )  # fmt: skip
    parser.add_argument(
        "--python", type=pair_of, action="append", default=[], metavar="PACKAGE=FILE",
        help="the Python in which a program is installed, such as nemo-toolkit or coqui-tts",
    )  # fmt: skip
    parser.add_argument("--whisper_cpp", default="", metavar="DIR", help="whisper.cpp's repository")
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.run = {name: Path(folder) for name, folder in given.run}
    given.python = dict(given.python)
    exit_with_one_line(main, given)
