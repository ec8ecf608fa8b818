"""What a small Parakeet forgets of its first language while it learns a second one, with and
without replay.

    python benchmarks/forgetting.py

A model is trained on Konkani, exported, and fine-tuned on Vietnamese: synthetic speech of both, as
in the recipes' demos. Its vocabulary gets the letters that it lacks. The table has the error rates
of both languages' test sets. Everything is kept in --dir, and a run that has ended is not made
again. The model is small and its speech synthetic: compare the rows with each other only."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.new_language import run_command
from common import files
from common.errors import RunError, exit_with_one_line
from speech import demo

NEW_SIZES = {"train": 1500, "val": 100, "test": 200}  # of Vietnamese
NEW_STEPS = 800
RATE = 5e-4  # a released model needs less; this one is small
SHARES = (0.0, 0.1, 0.3)  # of replay


def run(folder: Path, flags: list, log: Path) -> None:
    """Runs the recipe with this output folder. Raises `RunError`."""
    command = [sys.executable, "recipes/parakeet_tdt.py", *flags, "--output_dir", folder]
    status, _ = run_command(command, ROOT, log)
    if status:
        raise RunError(f"{' '.join(map(str, command))} ended with {status}: see {log}")


def letters(manifests: dict[str, str], path: Path) -> None:
    """Writes the characters of a corpus to a file, one a line."""
    found: set[str] = set()
    for line in files.read_text(manifests["train"]).splitlines():
        found.update(json.loads(line)["text"])
    files.write_text(path, "".join(f"{letter}\n" for letter in sorted(found - {" "})))


def split_flags(manifests: dict[str, str]) -> list[str]:
    return [word for name in manifests for word in (f"--{name}_manifest", manifests[name])]


def evaluated(folder: Path, model: list, manifest: Path) -> dict:
    """The rates of results.json of a model on a test set."""
    results = folder / "logs" / "results.json"
    if not results.is_file():
        flags = ["--evaluate", *model, "--test_manifest", manifest]
        run(folder, flags, folder.with_suffix(".log"))
    return files.read_json(results)["rates"]


def cer(rates: dict) -> str:
    return f"{100 * next(iter(rates.values()))['cer']['rate']:.1f} %"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    new = demo.speech_corpus(
        folder / "vietnamese", demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES, NEW_SIZES
    )
    konkani = folder / "konkani"
    if not konkani.is_dir():
        run(folder / "konkani_run", ["--export", konkani], folder / "konkani.log")  # the demo
    old = folder / "konkani_run" / "data" / "konkani_demo"
    letters(new, folder / "letters.txt")
    before = evaluated(folder / "before", ["--model_dir", konkani], old / "test.json")
    print(f"| | Konkani | Vietnamese |\n|---|---|---|\n| before | {cer(before)} | |", flush=True)
    for share in SHARES:
        name = f"replay_{share:g}"
        best = folder / name / "checkpoints" / "best.safetensors"
        results = folder / name / "logs" / "results.json"
        if not results.is_file():
            flags = ["--model_dir", konkani, *split_flags(new), "--max_steps", NEW_STEPS]
            flags += ["--add_tokens", folder / "letters.txt", "--learning_rate", RATE]
            flags += ["--watch_manifest", old / "val.json", "--resume", "auto"]
            if share:
                flags += ["--replay_manifest", old / "train.json", "--replay_share", share]
            run(folder / name, flags, folder / f"{name}.log")
        after = evaluated(folder / f"{name}_old", ["--resume", best], old / "test.json")
        learned = files.read_json(results)["rates"]
        print(f"| replay {share:g} | {cer(after)} | {cer(learned)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/forgetting"), help="kept files")
    exit_with_one_line(lambda: main(parser.parse_args().dir))
