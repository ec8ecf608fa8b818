"""From a tape and its book to a model: the Konkani demo's clips joined to an hour, as a reading of
a book that is in order, and as one in disorder, in which 10 % of the book is not read, 10 % of what
is read is not in the book, and 10 % is moved.

    python benchmarks/tapes.py tapes                   # makes the tapes, their books and the manifests
    python benchmarks/tapes.py tapes --table NAME ...  # manifests and runs in it, against the truth

The commands between the two are in RESULTS.md. A line of the book is one to three of the demo's
sentences, so a third of the pauses is within a line, and some sentences follow each other without
one. `true.json` has the clips of all that is read and in the book, `weak.json` five minutes of
others; `test.json` are the demo's 200 held-out sentences, which are in no tape.

The table has, for each manifest that is named, its utterances, the share of them that is right (the
text is that of the lines read there, and each end is nearer than 0.75 s to theirs), and the share
of the seconds that are read from the book that the right ones have; for each run the character
error rate on `test.json`."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import soundfile

from benchmarks.alignment import judged
from benchmarks.simulated_tape import reordered
from speech.data import demo

SIZES = {"train": 3000, "val": 100, "test": 200}  # of the recipe's demo
READ, OTHERS, WEAK = 2200, 220, 200  # clips
SHARE = 0.1  # of the lines that are moved
BETWEEN = (0.3, 1.0)  # seconds between lines
WITHIN = (0.1, 0.5)  # and within a line
NO_PAUSE = 0.3  # share of those within a line that are none
NOISE = 10  # of 32,768
SEED = 5

Clip = dict  # a row of a manifest
Line = list[Clip]


def lines_of(clips: list[Clip], random: np.random.Generator) -> list[Line]:
    lines = []
    while clips:
        count = int(random.integers(1, 4))
        lines.append(clips[:count])
        clips = clips[count:]
    return lines


def text_of(line: Line) -> str:
    return " ".join(clip["text"] for clip in line)


def inserted(lines: list[Line], others: list[Line], random: np.random.Generator) -> list[Line]:
    """The lines with the others at any places between them."""
    mixed = list(lines)
    for line in others:
        mixed.insert(int(random.integers(len(mixed) + 1)), line)
    return mixed


def write_tape(folder: Path, name: str, read: list[Line], book: list[Line]) -> None:
    """Writes NAME.wav, NAME.txt, and NAME_true.json with the place of every line that is read."""
    random = np.random.default_rng(SEED)
    parts, places = [], []
    now = 0
    for line in read:
        first = now
        for number, clip in enumerate(line):
            samples, rate = soundfile.read(folder / clip["audio_filepath"], dtype="int16")
            pause = random.uniform(*BETWEEN)
            if number < len(line) - 1:
                pause = random.uniform(*WITHIN) if random.random() >= NO_PAUSE else 0.0
            speech = demo.trim(samples)
            parts += [speech, np.zeros(round(pause * rate), np.int16)]
            last = now + len(speech)
            now = last + len(parts[-1])
        places.append({"text": text_of(line), "start": first / rate, "end": last / rate})
    tape = np.concatenate(parts) + random.normal(0, NOISE, now)
    soundfile.write(folder / f"{name}.wav", tape.clip(-32768, 32767).astype(np.int16), rate)
    (folder / f"{name}.txt").write_text("".join(f"{text_of(line)}\n" for line in book), "utf-8")
    write_rows(folder / f"{name}_true.json", places)
    print(f"{name}.wav: {now / rate / 60:.1f} minutes; {len(read)} lines, {len(book)} in the book")


def write_rows(path: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, "utf-8")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def make(folder: Path) -> None:
    demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, SIZES)
    clips = read_rows(folder / "train.json")
    random = np.random.default_rng(SEED)
    parts = [list(part) for part in np.split(clips, np.cumsum([READ, OTHERS, OTHERS, WEAK]))]
    read, added, unread = (lines_of(part, random) for part in parts[:3])
    write_rows(folder / "true.json", parts[0])
    write_rows(folder / "weak.json", parts[3])
    write_tape(folder, "in_order", read, read)
    order = reordered(list(range(len(read))), SHARE, random)
    moved = inserted([read[number] for number in order], added, random)
    write_tape(folder, "in_disorder", moved, inserted(read, unread, random))


# --- the table ------------------------------------------------------------------------------------


def row_of(path: Path) -> str:
    """A row for a manifest, or for the folder of a run."""
    if path.is_dir():
        results = json.loads((path / "logs" / "results.json").read_text("utf-8"))
        rate = results["rates"]["case kept, no punctuation"]["cer"]["rate"]
        return f"| {path.name} | | | | {100 * rate:.1f} % |"
    rows = read_rows(path)
    tape = Path(rows[0]["audio_filepath"]).stem
    places = read_rows(path.parent / f"{tape}_true.json")
    segments = [
        (row["text"], row["offset"], row["offset"] + row["duration"], row["confidence"])
        for row in rows
    ]
    true = [(number, place["start"], place["end"]) for number, place in enumerate(places)]
    found = judged(segments, {"true": true, "texts": [place["text"] for place in places]})
    right = [row["seconds"] for row in found if row["right"]]
    book = set((path.parent / f"{tape}.txt").read_text("utf-8").splitlines())
    total = sum(place["end"] - place["start"] for place in places if place["text"] in book)
    shares = f"{100 * len(right) / len(found):.1f} % | {100 * sum(right) / total:.1f} %"
    return f"| {path.name} | {len(rows)} | {shares} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", nargs="+", metavar="NAME", help="manifests and runs")
    args = parser.parse_args()
    if not args.table:
        make(args.folder)
        return
    print("| manifest or run | utterances | right | kept | CER |\n" + "| --- " * 5 + "|")
    for name in args.table:
        print(row_of(args.folder / name))


if __name__ == "__main__":
    main()
