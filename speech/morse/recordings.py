"""Morse recordings in columns: of folders with metadata.csv, and of manifests."""

import bisect
import dataclasses
import hashlib
import math
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from common.errors import DataError, UsageError
from speech.data.columns import Codes, Corpus, Rejections, Strings
from speech.data.fields import check_encoding
from speech.data.finding import find_all
from speech.data.headers import probe_all
from speech.data.loading import FILE_TOLERANCE, MOST_CHARACTERS, Checks, cache_file
from speech.data.manifest import parse
from speech.data.splits import draw, drop, report_rejections
from speech.morse.alphabet import CALLSIGN, SYMBOLS, normalise, symbols
from speech.morse.scores import TAGS
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.writing.unknown import named

SETS = ("train", "val", "test")
# The sets of files in splits/, by their names.
SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}
NO_CODE = "text has characters without a Morse code"


@dataclass(frozen=True)
class Recordings:
    """Clips on disk, and the tags of each that `scores.evaluation_tables` asks for."""

    corpus: Corpus
    tags: list[dict]

    def __len__(self) -> int:
        return len(self.corpus)

    def text_length(self, index: int) -> int:
        return len(self.corpus.texts[index])

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths of the clips, the same in every epoch."""
        return self.corpus.seconds

    def load(self, index: int, epoch: int) -> tuple[Tensor, str, str, None]:
        """(waveform (T,), text, name, None: no times of symbols). Raises `BadAudio`."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        return waveform, self.corpus.texts[index], self.corpus.paths[index], None

    def row(self, index: int, hypothesis: str) -> dict:
        """A row for `scores.evaluation_tables`."""
        texts = {"reference": self.corpus.texts[index], "hypothesis": hypothesis}
        return {"file": self.corpus.paths[index], **texts, **self.tags[index]}

    def fingerprint(self) -> str:
        """Changes when the clips, their texts or their order do."""
        return self.corpus.fingerprint()

    def select(self, indices: np.ndarray) -> "Recordings":
        """The clips at `indices`, in that order."""
        return Recordings(self.corpus.select(indices), [self.tags[index] for index in indices])


# --- reading --------------------------------------------------------------------------------------


def read_splits(folder: str | Path, checks: Checks) -> dict[str, Recordings]:
    """The usable clips of a folder as "train", "val" and "test", as far as they exist; "val" is
    "test" if there is no other. Without splits/*.csv, metadata.csv is divided 80/10/10 by a hash of
    the id. The columns audio_file and text are required.

    Clips are reported by reason if their files are missing, truncated, too short or too long, or
    if they have no text, or one beyond Morse. So are damaged lines; for metadata.csv they are
    reported with the training set. Raises `DataError` if no clip of a table is left, or if
    `checks.strict` and any was rejected, and `UsageError` if there is no table."""
    rejections = defaultdict(Rejections)
    rows = _read_tables(Path(folder), rejections)
    order = [name for name in SETS if rows.get(name) or rejections[name].total]
    if not order:
        raise DataError(f"{folder}: its tables have no rows")
    paths = find_all([row["audio_file"] for name in order for row in rows[name]], str(folder))
    lengths, reasons = probe_all(paths, cache_file(checks, "headers", [str(folder)]))
    probed = iter(zip(paths, lengths.tolist(), reasons, strict=True))
    sets = {}
    for name in order:
        usable = []
        for row in rows[name]:
            row["path"], row["seconds"], unreadable = next(probed)
            reason = unreadable or _fault(row, checks)
            if reason:
                rejections[name].add(reason, f"{row['place']}: {row['audio_file']}")
            else:
                usable.append(row)
        sets[name] = _recordings(usable)
        sets[name].corpus.cache_audio = checks.cache_audio
        seconds = sets[name].seconds(0)
        report_rejections(f"{name} set ({folder})", seconds, rejections[name], checks.strict)
    if "train" in sets:
        sets["train"] = sets["train"].select(draw(len(sets["train"]), checks))
    if "test" in sets:
        sets.setdefault("val", sets["test"])
    return sets


def _read_tables(folder: Path, rejections: dict[str, Rejections]) -> dict[str, list[dict]]:
    """The rows of splits/*.csv or of metadata.csv, by split."""
    files = {name: folder / "splits" / f"{name}.csv" for name in sorted(SPLITS)}
    tables = {SPLITS[name]: path for name, path in files.items() if os.path.exists(path)}
    if tables:
        return {name: _read_table(path, rejections[name]) for name, path in tables.items()}
    metadata = folder / "metadata.csv"
    if not os.path.exists(metadata):
        raise UsageError(f"--data_dir {folder}: neither splits/train.csv nor metadata.csv is there")
    return _divide(_read_table(metadata, rejections["train"]))


def _divide(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by split, 80/10/10 by a hash of their id."""
    sets = {name: [] for name in SETS}
    for row in rows:
        digest = hashlib.blake2b(row["id"].encode(), digest_size=4).digest()
        share = int.from_bytes(digest, "big") / 2**32
        sets[SETS[bisect.bisect((0.8, 0.9), share)]].append(row)
    return sets


def _fault(row: dict, checks: Checks) -> str:
    """Why a clip with readable audio cannot be used, or ""."""
    if row["duration"] - row["seconds"] > FILE_TOLERANCE:
        return "file is shorter than its duration in the table (truncated?)"
    if row["seconds"] < checks.min_duration:
        return f"shorter than {checks.min_duration:g} s (--min_duration)"
    if row["seconds"] > checks.max_duration:
        return f"longer than {checks.max_duration:g} s (--max_duration)"
    if bool(row["text"]) == row["is_noise_only"]:
        return "noise only, with a text" if row["text"] else "text is empty"
    if not set(symbols(row["text"])).issubset(SYMBOLS):
        return NO_CODE
    return ""


def _read_table(path: Path, rejected: Rejections) -> list[dict]:
    """The rows of a table as `_parse_row` returns them. Raises as `manifest.parse` does."""
    rows = []
    for number, cells in parse(path, rejected, only_tables=True):
        try:
            rows.append({**_parse_row(cells), "place": f"{path}:{number}"})
        except ValueError as error:
            rejected.add(str(error), f"{path}:{number}")
    return rows


def _parse_row(cells: dict[str, str]) -> dict:
    """The columns id, audio_file, text, duration and TAGS. Raises `ValueError`."""
    check_encoding("".join(cells.values()))
    row = {**dict.fromkeys(("id", "duration", *TAGS), ""), **cells}
    for column in ("audio_file", "text"):
        if column not in cells:
            raise ValueError(f"no column {column}")
    if not row["audio_file"].strip():
        raise ValueError("audio_file is empty")
    if len(row["text"]) > MOST_CHARACTERS:
        raise ValueError(f"text is longer than {MOST_CHARACTERS} characters")
    row["id"] = row["id"] or row["audio_file"]
    for column, low in (("wpm", 0), ("duration", 0), ("snr_db", -math.inf)):
        try:
            row[column] = float(row[column]) if row[column].strip() else math.nan
        except ValueError:
            raise ValueError(f"{column} is not a number") from None
        if row[column] < low or math.isinf(row[column]):
            raise ValueError(f"{column} is negative or infinite")
    flag = row["is_noise_only"].strip().lower()
    if flag not in ("", "true", "false", "1", "0", "yes", "no"):
        raise ValueError("is_noise_only is neither true nor false")
    row["is_noise_only"] = flag in ("true", "1", "yes")
    row["text"] = normalise(row["text"])
    if "callsigns" in cells:
        row["callsigns"] = row["callsigns"].split()
    else:
        row["callsigns"] = find_callsigns(row["text"])
    return row


def find_callsigns(text: str) -> list[str]:
    """The words of a text that have the form of a callsign."""
    return [word for word in text.split() if CALLSIGN.fullmatch(word)]


def _recordings(rows: list[dict]) -> Recordings:
    nothing = [""] * len(rows)
    corpus = Corpus(
        paths=Strings(row["path"] for row in rows),
        texts=Strings(row["text"] for row in rows),
        seconds=np.array([row["seconds"] for row in rows], dtype=float),
        offsets=np.zeros(len(rows)),
        durations=np.full(len(rows), np.nan),
        speakers=Codes(nothing),
        languages=Codes(nothing),
        lines=np.arange(1, len(rows) + 1),
        repeats_texts=True,  # short texts of callsigns and numbers
    )
    return Recordings(corpus, [{name: row[name] for name in TAGS} for row in rows])


def from_corpus(corpus: Corpus, name: str, strict: bool) -> Recordings:
    """The clips of a manifest, of which texts beyond Morse are rejected under `name`."""

    def fault(index: int) -> tuple[str, str] | None:
        labels = symbols(corpus.texts[index])
        if set(labels).issubset(SYMBOLS):
            return None
        others = Counter(label for label in labels if label not in SYMBOLS)
        return NO_CODE, f"{corpus.texts[index][:60]} ({named(others, 5)})"

    corpus = drop(corpus, name, fault, strict)
    unknown = dict.fromkeys(TAGS, "") | {"wpm": math.nan, "snr_db": math.nan}
    tags = []
    for text in corpus.texts:
        tags.append({**unknown, "is_noise_only": False, "callsigns": find_callsigns(text)})
    return Recordings(dataclasses.replace(corpus, repeats_texts=True), tags)
