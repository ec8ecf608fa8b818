"""The hours of speech that a manifest has, for the preset scripts.

    python speech/data/hours.py MANIFEST|FOLDER ... [--audio_root DIR] [--max_samples N] [--tier NAME ...]

Prints the scripts' word for so much speech, and the hours: "small_data 1.5". FOLDER is one of Morse
recordings. Durations that the manifest does not give come from the headers of the audio files.
Reading ends where the last word is certain. The exit status is 1, without a message, if the hours
cannot be told: the recipe will say why. Torch is not imported, because that takes seconds."""

import contextlib
import itertools
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder

from common.errors import Failure
from speech.data.columns import Rejections
from speech.data.fields import row_fields
from speech.data.finding import find_all
from speech.data.headers import probe_all
from speech.data.manifest import LATER, LEAST_MILLISECONDS, parse

WORDS = {"small_data": 2.0, "medium_data": 20.0, "large_data": math.inf}  # hours, less than
PART = 1024  # rows whose audio files are looked at together


def seconds_of(rows: list[dict], folder: str, audio_root: str | None) -> float:
    """The length of usable rows. Times that reach beyond their file are in milliseconds."""
    total = 0.0
    names = []
    durations = []
    for row in rows:
        with contextlib.suppress(ValueError):
            fields = row_fields(row, "")
            seconds = fields.duration * (fields.unit or 1.0)
            if 0 < seconds < LEAST_MILLISECONDS:
                total += seconds
            else:
                names.append(fields.audio)
                durations.append(seconds or math.nan)
    lengths, _ = probe_all(find_all(names, folder, audio_root), None)
    stated = np.array(durations)
    stated = np.where(stated > lengths + LATER, stated / 1000, stated)
    lengths = np.where(np.isnan(stated), lengths, stated)
    return total + float(lengths[lengths > 0].sum())


def hours_of(
    path: str | Path,
    audio_root: str | None = None,
    max_samples: int = -1,
    enough: float = math.inf,
    tiers: Sequence[str] = (),
) -> float:
    """The hours of speech in a manifest, or in `max_samples` average rows of it (-1: in all rows).
    `tiers`: those that are taken of files of annotations. Reading stops at `enough` hours.
    Raises `UsageError` and `DataError`."""
    path = Path(path)
    tables = [path / "splits/train.csv", path / "metadata.csv"]  # speech/morse/recordings.py
    if table := next(filter(Path.exists, tables), None):
        audio_root = audio_root or str(path)
        path = table
    numbered = parse(path, Rejections(), tiers, audio_root)
    parsed = (row for _, row in numbered if isinstance(row, dict))
    seconds = 0.0
    count = 0
    while seconds < 3600 * enough and (rows := list(itertools.islice(parsed, PART))):
        seconds += seconds_of(rows, str(path.parent), audio_root)
        count += len(rows)
    share = max_samples / count if 0 < max_samples < count else 1.0
    return share * seconds / 3600


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("manifest", nargs="+")
    parser.add_argument("--audio_root")
    parser.add_argument("--max_samples", type=int, default=-1, metavar="N")
    parser.add_argument("--tier", nargs="+", default=[], metavar="NAME")
    args = parser.parse_args()
    enough = WORDS["medium_data"]
    try:
        hours = 0.0
        for path in args.manifest:
            hours += hours_of(path, args.audio_root, args.max_samples, enough, args.tier)
    except (Failure, OSError, ValueError):
        sys.exit(1)
    if not hours:
        sys.exit(1)
    word = next(word for word, most in WORDS.items() if hours < most)
    print(word, f"{hours:.2g}" if hours < enough else f"{enough:g} or more")


if __name__ == "__main__":
    main()
