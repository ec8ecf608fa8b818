"""Error rates on corpora of real speech, by the commands of the pages, as rows for RESULTS.md.

    python benchmarks/real_speech.py mboshi CHECKOUT --script run_training_memory_optimized.sh \\
        --words cpu minimal --max_steps 1100
    python benchmarks/real_speech.py mboshi CHECKOUT --minutes 60 --script ...    # an hour of it
    python benchmarks/real_speech.py kerstin CHECKOUT --manifests manifests       # its tables only

CHECKOUT is a folder that holds the corpus as it is published; nothing of it is kept here:
- mboshi: github.com/besacier/mboshi-french-parallel-corpus, full_corpus_newsplit, with the texts
  .mb, as `mboshi_cleaned` .mb.cleaned, and as `mboshi_french` their translations; the test set is
  its dev, and 250 clips of train evaluate
- kerstin: github.com/rhasspy/dataset-voice-kerstin, verified and metadata.csv
- digits: github.com/Jakobovski/free-spoken-digit-dataset, recordings; the test set is one speaker
"""

import functools
import json
import random
import re
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import common

common.spin_briefly()

HELD_OUT = 250  # clips that evaluate, at most a tenth
DIGITS = "zero one two three four five six seven eight nine".split()


def row(path: Path, text: str, speaker: str) -> dict:
    import soundfile

    seconds = soundfile.info(path).duration
    names = {"audio_filepath": str(path.resolve()), "text": text, "speaker": speaker}
    return {**names, "duration": round(seconds, 3)}


def mboshi(folder: Path, form: str = ".mb") -> dict[str, list[dict]]:
    def clips(part: str) -> Iterator[dict]:
        for path in sorted((folder / "full_corpus_newsplit" / part).glob("*.wav")):
            text = path.with_name(path.stem + form).read_text(encoding="utf-8").strip()
            yield row(path, text, path.stem.partition("_")[0])

    return {"train": [*clips("train")], "test": [*clips("dev")]}


def kerstin(folder: Path) -> dict[str, list[dict]]:
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    names = dict(line.split("|", 1) for line in lines if "|" in line)
    paths = {path.stem: path for path in sorted((folder / "verified").glob("*.flac"))}
    return {"train": [row(paths[name], names[name], "kerstin") for name in paths if name in names]}


def digits(folder: Path) -> dict[str, list[dict]]:
    sets: dict[str, list[dict]] = {"train": [], "test": []}
    for path in sorted((folder / "recordings").glob("*.wav")):
        digit, speaker, _ = path.stem.split("_")
        name = "test" if speaker == "theo" else "train"
        sets[name].append(row(path, DIGITS[int(digit)], speaker))
    return sets


CORPORA: dict[str, Callable[[Path], dict[str, list[dict]]]] = {
    "mboshi": mboshi,
    "mboshi_cleaned": functools.partial(mboshi, form=".mb.cleaned"),
    "mboshi_french": functools.partial(mboshi, form=".fr"),
    "kerstin": kerstin,
    "digits": digits,
}


def write_manifests(sets: dict[str, list[dict]], folder: Path, minutes: float | None) -> list[str]:
    """Writes the manifests, with clips for evaluation taken from the training set, which has so
    many `minutes` at most. Returns the flags that name them."""
    train = sets["train"]
    random.Random(0).shuffle(train)
    held_out = min(HELD_OUT, len(train) // 10)
    sets = {"train": train[held_out:], "val": train[:held_out], "test": sets.get("test")}
    if minutes is not None:
        total = 0.0
        kept = []
        for clip in sets["train"]:
            total += clip["duration"]
            if total > 60 * minutes:
                break
            kept.append(clip)
        sets["train"] = kept
    folder.mkdir(parents=True, exist_ok=True)
    flags = []
    for name, rows in sets.items():
        if rows:
            path = folder / f"{name}.jsonl"
            lines = [json.dumps(clip, ensure_ascii=False) + "\n" for clip in rows]
            path.write_text("".join(lines), encoding="utf-8")
            flags += [f"--{name}_manifest", str(path)]
    return flags


def result_row(output: Path, seconds: float) -> str:
    """A row of a table: WER and CER with their intervals, minutes, memory."""
    results = json.loads((output / "logs/results.json").read_text(encoding="utf-8"))
    rates = next(iter(results["rates"].values()))
    without = next(iter(results["without_lm"].values())) if "without_lm" in results else None
    cells = []
    for name in ("wer", "cer"):
        rate = rates[name]
        cells.append(
            f"{100 * rate['rate']:.1f} ({100 * rate['low']:.1f} to {100 * rate['high']:.1f})"
        )
        cells.append(f"{100 * without[name]['rate']:.1f}" if without else "-")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return f"| {' | '.join(cells)} | {seconds / 60:.0f} | {peak:.1f} |"


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--minutes", type=float, help="of the training set (all)")
    parser.add_argument("--manifests", type=Path, default=Path("runs/real_speech/manifests"))
    parser.add_argument("--output_dir", type=Path, default=Path("runs/real_speech"))
    parser.add_argument("--script", help="a preset script; without it, manifests are all")
    parser.add_argument("--words", nargs="*", default=[], help="its words, such as cpu minimal")
    args, more = parser.parse_known_args()
    flags = write_manifests(CORPORA[args.corpus](args.checkout), args.manifests, args.minutes)
    if not args.script:
        return print(" ".join(flags))
    words = [str(ROOT / args.script), *args.words, *flags, *more]
    started = time.monotonic()
    subprocess.run([*words, "--output_dir", str(args.output_dir)], check=True)
    shown = re.sub(r"\S*/", "", " ".join(words))
    print(f"\n`{shown}`\n")
    print("| WER % (95 %) | without the language model | CER % (95 %) | without | minutes | GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(result_row(args.output_dir, time.monotonic() - started))


if __name__ == "__main__":
    main()
