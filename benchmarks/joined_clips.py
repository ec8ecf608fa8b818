"""Whether a recogniser reads a recording as well as single clips: the character error rate (CER) of
held-out clips of a demo, each alone and joined with pauses between them.

    ./run_training_memory_optimized.sh cpu                        # a demo, in the current folder
    python benchmarks/joined_clips.py konkani_conformer --run .   # half a minute

Both go through --transcribe, with the demo's best weights. The exit status is 1 if the joined clips
are more than two points worse."""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.errors import UsageError, exit_with_one_line
from speech import metrics, text
from speech.audio import SAMPLE_RATE, int16, read_audio, write_wav
from speech.morse import scores
from speech.morse.clips import DEMO_SECONDS
from speech.morse.synthesis import CONDITIONS, Synthetic

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
PAUSE = 0.35  # seconds between two clips
MOST = 2.0  # points of CER
MORSE_SEED = 40_000  # of clips that no demo trains on


def spoken_clips(run: Path, count: int) -> list[tuple[np.ndarray, str]]:
    """int16 samples at 16 kHz and texts of the first clips of a demo's test set."""
    manifests = sorted(run.glob("data/*_demo/test.json")) + sorted(run.glob("data/*_demo/val.json"))
    if not manifests:
        raise UsageError(f"--run {run}: there is no demo corpus in it")
    lines = manifests[0].read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:count]]
    paths = [str(manifests[0].parent / row["audio_filepath"]) for row in rows]
    waveforms = [int16(read_audio(path, SAMPLE_RATE)) for path in paths]
    return [(waveform, row["text"]) for waveform, row in zip(waveforms, rows, strict=True)]


def morse_clips(count: int) -> list[tuple[np.ndarray, str]]:
    """The same of clips as the demo of Morse is trained on."""
    conditions = dataclasses.replace(CONDITIONS["demo"], longest=DEMO_SECONDS)
    data = Synthetic([conditions], count, MORSE_SEED)
    loaded = [data.load(index, 0) for index in range(count)]
    return [(int16(waveform), transcript) for waveform, transcript, _, _ in loaded]


def transcribe(recipe: str, run: Path, path: Path, flags: list[str]) -> list[str]:
    """The texts that a recipe reads in a file, or in the files of a folder by name."""
    output = path.with_suffix(".jsonl")
    weights = run / "checkpoints" / "best.safetensors"
    command = [RECIPES / f"{recipe}.py", "--resume", weights, "--transcribe", path]
    command = [sys.executable, *map(str, command), "--output", str(output), *flags]
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return [row["text"] for row in sorted(rows, key=lambda row: row["file"])]


def cer(references: list[str], hypotheses: list[str], normalise) -> float:
    """In percent."""
    return 100 * metrics.count_errors(references, hypotheses, "characters", normalise).rate


def compare(args: argparse.Namespace, flags: list[str]) -> bool:
    """Prints both error rates and whether they are close."""
    is_morse = args.recipe == "whisper_morse"
    clips = morse_clips(args.clips) if is_morse else spoken_clips(args.run, args.clips)
    normalise = scores.for_scoring if is_morse else lambda each: text.for_scoring(each).lower()
    texts = [transcript for _, transcript in clips]
    pause = np.zeros(round(PAUSE * SAMPLE_RATE), dtype=np.int16)
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "clips")
        alone.mkdir()
        for number, (samples, _) in enumerate(clips):
            write_wav(alone / f"{number:05}.wav", samples, SAMPLE_RATE)
        joined = Path(folder, "joined.wav")
        parts = [part for samples, _ in clips for part in (samples, pause)]
        samples = np.concatenate(parts[:-1])
        write_wav(joined, samples, SAMPLE_RATE)
        single = cer(texts, transcribe(args.recipe, args.run, alone, flags), normalise)
        whole = [" ".join(filter(None, texts))]
        read = transcribe(args.recipe, args.run, joined, flags)
    together = cer(whole, read, normalise)
    print(f"{len(clips)} clips alone: {single:.2f} % CER")
    print(
        f"joined with {PAUSE:g} s between them, {len(samples) / SAMPLE_RATE:.0f} s:"
        f" {together:.2f} % CER"
    )
    if args.show:
        print(f"{whole[0]}\n{read[0]}")
    return together <= single + MOST


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=[path.stem for path in sorted(RECIPES.glob("*.py"))])
    parser.add_argument(
        "--run", type=Path, required=True, help="the --output_dir of a trained demo"
    )
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--show", action="store_true", help="print both texts of the recording")
    given, recipe_flags = parser.parse_known_args()
    exit_with_one_line(lambda: sys.exit(not compare(given, recipe_flags)))
