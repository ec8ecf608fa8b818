"""Do the stock programs read the recipes' exports, and write the same texts? A table of every recipe,
every form of its export and every program.

    python benchmarks/handover.py                                     # trains a small model of each recipe
    python benchmarks/handover.py parakeet_tdt --updates 600          # one recipe, longer
    python benchmarks/handover.py --run parakeet_tdt=runs/parakeet_tdt    # a run that is there
    python benchmarks/handover.py --whisper_cpp whisper.cpp           # with its scripts of conversion

Each model is trained on its demo's corpus and exported, then held-out clips of the demo go through
--transcribe and through each program. A program that is not installed has a row that says so. Each
reads in a process of its own, because some end the process if a file displeases them.

A new row is a function that takes an export and files and returns texts, and a line of `ROWS`."""

import argparse
import importlib
import importlib.metadata
import json
import os
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

from common.errors import RunError, UsageError, exit_with_one_line, first_line
from speech.audio import SAMPLE_RATE, read_audio

ANSWER = "texts: "  # begins the line that a reading process prints
SECONDS = 1800  # of a process
# What a model is trained with, and what its --transcribe gets: programs decode greedily.
TRAINING = {
    "parakeet_tdt": "--max_steps 500",
    "whisper_vietnamese": "--max_steps 900",  # the end of it in windows of 30 s, as others read
    "konkani_conformer": "--max_steps 400 --features nemo",
}
DECODING = {"konkani_conformer": "--decoding greedy"}


@dataclass(frozen=True)
class Row:
    """`form` are the flags of the export, `package` is the program's distribution, and `read` takes
    the exported folder and audio files."""

    recipe: str
    form: str
    program: str
    package: str
    read: Callable[[Path, list[Path]], list[str]]


def samples_of(path: Path) -> np.ndarray:
    return np.asarray(read_audio(str(path), SAMPLE_RATE), dtype=np.float32)


# --- the programs ---------------------------------------------------------------------------------


def pipeline(folder: Path, files: list[Path]) -> list[str]:
    from transformers import pipeline

    recogniser = pipeline("automatic-speech-recognition", str(folder), device="cpu")
    return [
        recogniser({"raw": samples_of(path), "sampling_rate": SAMPLE_RATE})["text"]
        for path in files
    ]


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


def onnx_asr(folder: Path, files: list[Path], quantization: str | None = None) -> list[str]:
    import onnx_asr

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = onnx_asr.load_model(kind, folder, quantization=quantization)
    return [model.recognize(samples_of(path), sample_rate=SAMPLE_RATE) for path in files]


def onnx_asr_int8(folder: Path, files: list[Path]) -> list[str]:
    return onnx_asr(folder, files, "int8")


def faster_whisper(folder: Path, files: list[Path]) -> list[str]:
    from faster_whisper import WhisperModel

    converted = folder.parent / "ct2"
    command = (
        "--model {} --output_dir {} --force --copy_files tokenizer.json preprocessor_config.json"
    )
    words = command.format(folder, converted).split()
    call([sys.executable, "-m", "ctranslate2.converters.transformers", *words])
    model = WhisperModel(str(converted), device="cpu", compute_type="float32")
    texts = []
    for path in files:
        segments, _ = model.transcribe(
            samples_of(path),
            language=language_of(folder),
            beam_size=1,
            without_timestamps=True,  # which a model from scratch does not have
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
    if json.loads((folder / "config.json").read_text())["vocab_size"] < 51864:
        raise RunError("only models with a released vocabulary: --run with such a one")
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
    model = Model(str(folder.parent / "ggml-model.bin"), language=language_of(folder))
    texts = []
    for path in files:
        texts.append(" ".join(segment.text for segment in model.transcribe(samples_of(path))))
    return texts


def whisper_cpp_folder(folder: Path, files: list[Path]) -> list[str]:
    return whisper_cpp(folder, files, "convert-h5-to-ggml.py", folder)


def whisper_cpp_file(folder: Path, files: list[Path]) -> list[str]:
    return whisper_cpp(folder, files, "convert-pt-to-ggml.py", folder / "model.pt")


def language_of(folder: Path) -> str:
    """The language of an exported Whisper, without the marks around it."""
    return json.loads((folder / "generation_config.json").read_text())["language"].strip("<|>")


ROWS = (
    Row("parakeet_tdt", "--export_format hf", "transformers", "transformers", pipeline),
    Row("parakeet_tdt", "--export_format nemo", "NeMo", "nemo-toolkit", nemo),
    Row("parakeet_tdt", "--export_format onnx", "sherpa-onnx", "sherpa-onnx", sherpa),
    Row("parakeet_tdt", "--export_format onnx", "sherpa-onnx, int8", "sherpa-onnx", sherpa_int8),
    Row("parakeet_tdt", "--export_format onnx", "onnx-asr", "onnx-asr", onnx_asr),
    Row("parakeet_tdt", "--export_format onnx", "onnx-asr, int8", "onnx-asr", onnx_asr_int8),
    Row("konkani_conformer", "", "sherpa-onnx", "sherpa-onnx", sherpa_ctc),
    Row("konkani_conformer", "", "onnx-asr", "onnx-asr", onnx_asr),
    Row("whisper_vietnamese", "", "transformers", "transformers", pipeline),
    Row("whisper_vietnamese", "", "faster-whisper", "faster-whisper", faster_whisper),
    Row("whisper_vietnamese", "", "whisper.cpp, folder", "pywhispercpp", whisper_cpp_folder),
    Row("whisper_vietnamese", "", "whisper.cpp, model.pt", "pywhispercpp", whisper_cpp_file),
)


# --- the recipes ----------------------------------------------------------------------------------


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


def recipe_of(name: str, *flags: object) -> None:
    file = ROOT / "recipes" / f"{name}.py"
    call([sys.executable, str(file), "--device", "cpu", *map(str, flags)])


def clips_of(run: Path, count: int) -> list[Path]:
    """Held-out clips of the demo that a run made."""
    manifests = sorted(run.glob("data/*_demo/test.json"))
    if not manifests:
        raise UsageError(f"{run}: there is no demo corpus in it")
    lines = manifests[0].read_text(encoding="utf-8").splitlines()[:count]
    return [manifests[0].parent / json.loads(line)["audio_filepath"] for line in lines]


def texts_of(recipe: str, weights: Path, files: list[Path], output: Path) -> list[str]:
    """What our --transcribe writes."""
    flags = ["--resume", weights, "--output", output, *DECODING.get(recipe, "").split()]
    recipe_of(recipe, "--transcribe", *files, *flags)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {Path(row["file"]).name: row["text"] for row in rows}
    return [found[path.name] for path in files]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read(row: Row, folder: Path, files: list[Path], whisper: str) -> list[str]:
    """The texts of a row, read in a process of its own."""
    words = [str(ROWS.index(row)), str(folder), *map(str, files)]
    out = call([sys.executable, __file__, "--read", *words], WHISPER_CPP=whisper)
    (line,) = [line for line in out.splitlines() if line.startswith(ANSWER)]
    return json.loads(line.removeprefix(ANSWER))


def compared(texts: list[str], ours: list[str]) -> str:
    """What the table says of a program's texts."""
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


def results(args, recipe: str, folder: Path) -> list[tuple[Row, str]]:
    """The rows of a recipe with what became of them."""
    run = args.run.get(recipe)
    if run is None:
        run = folder / "run"
        words = ["--output_dir", run, "--no_tensorboard", *TRAINING[recipe].split()]
        if args.updates:
            words += ["--max_steps", args.updates]
        recipe_of(recipe, *words)
    weights = run / "checkpoints" / "best.safetensors"
    files = clips_of(run, args.clips)
    ours = texts_of(recipe, weights, files, folder / "ours.jsonl")
    found = []
    exported = {}
    for row in (row for row in ROWS if row.recipe == recipe):
        try:
            if row.form not in exported:
                exported[row.form] = folder / f"form{len(exported)}" / "export"
                words = ["--export", exported[row.form], *row.form.split(), "--resume", weights]
                recipe_of(recipe, *words)
            if version_of(row.package) is None:
                outcome = "not installed"
            else:
                texts = read(row, exported[row.form], files, args.whisper_cpp)
                outcome = compared(texts, ours)
        except (RunError, subprocess.TimeoutExpired) as error:
            outcome = f"failed: {first_line(error)}"
        found.append((row, outcome))
    return found


def main(args) -> None:
    if args.read:
        number, folder, *files = args.read
        texts = ROWS[int(number)].read(Path(folder), [Path(file) for file in files])
        print(ANSWER + json.dumps(texts), flush=True)
        return
    recipes = args.recipes or list(dict.fromkeys(row.recipe for row in ROWS))
    print("| recipe | form | program | version | result |\n| --- | --- | --- | --- | --- |")
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            for row, outcome in results(args, recipe, Path(folder)):
                form = f"`{row.form}`" if row.form else "`--export`"
                version = version_of(row.package) or "-"
                print(f"| {recipe} | {form} | {row.program} | {version} | {outcome} |", flush=True)


def run_of(text: str) -> tuple[str, Path]:
    recipe, _, folder = text.partition("=")
    return recipe, Path(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({row.recipe for row in ROWS})
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{', '.join(names)} (all)")
    parser.add_argument("--updates", type=int, help="of the training, instead of the usual ones")
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument(
        "--run", type=run_of, action="append", default=[], metavar="RECIPE=DIR",
        help="the --output_dir of a trained demo, instead of a training",
    )  # fmt: skip
    parser.add_argument("--whisper_cpp", default="", metavar="DIR", help="whisper.cpp's repository")
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.run = dict(given.run)
    exit_with_one_line(main, given)
