"""Morse recordings in columns: of folders with metadata.csv, and of manifests."""

import dataclasses
import hashlib
import math
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.errors import DataError, UsageError
from speech.data.columns import Codes, Corpus, Rejections, Strings
from speech.data.fields import check_encoding
from speech.data.finding import find_all
from speech.data.headers import probe_all
from speech.data.loading import FILE_TOLERANCE, MOST_CHARACTERS, Checks
from speech.data.manifest import parse
from speech.data.splits import draw, drop, report_rejections
from speech.morse.alphabet import CALLSIGN, SYMBOLS, normalise, symbols
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.writing.unknown import named

METADATA = [
    "id",
    "audio_file",
    "text",
    "contest_type",
    "sample_type",
    "wpm",
    "condition",
    "duration",
    "is_noise_only",
]
MORE_METADATA = ["snr_db", "callsigns", "exchange"]  # columns that other data sets may lack
SPLITS = {  # name of a file in splits/: what it is for
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
NO_CODE = "text has characters without a Morse code"


@dataclass
class Recordings:
    """Clips on disk, in columns. Unknown values are "" or NaN. `lengths` (N,) in seconds is what
    the files' headers say, `durations` is NaN for clips that end with their file. `cache_audio`:
    folder for decoded audio."""

    ids: list[str]
    paths: list[str]
    texts: list[str]
    contest_types: list[str]
    sample_types: list[str]
    conditions: list[str]
    callsigns: list[list[str]]
    exchanges: list[str]
    wpm: np.ndarray
    snr_db: np.ndarray
    is_noise_only: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    durations: np.ndarray
    channels: np.ndarray | None = None
    starts: None = None  # clips are not trimmed
    cache_audio: str | None = None
    repeats_texts: bool = True  # short texts of callsigns and numbers

    def __len__(self) -> int:
        return len(self.paths)

    def text_length(self, index: int) -> int:
        return len(self.texts[index])

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths of the clips, the same in every epoch."""
        return self.lengths

    def where(self, index: int) -> str:
        """The file of a clip, for messages."""
        return self.paths[index]

    def load(self, index: int, epoch: int) -> tuple[torch.Tensor, str, str, None]:
        """(waveform (T,), text, name, None: recordings do not say when each symbol is sent). Raises
        `BadAudio`."""
        waveform = read_utterance(self, index, SAMPLE_RATE)
        return waveform, self.texts[index], self.paths[index], None

    def row(self, index: int, hypothesis: str) -> dict:
        """A row for `scores.evaluation_tables`."""
        return {
            "file": self.paths[index],
            "reference": self.texts[index],
            "hypothesis": hypothesis,
            "condition": self.conditions[index],
            "contest_type": self.contest_types[index],
            "sample_type": self.sample_types[index],
            "wpm": float(self.wpm[index]),
            "snr_db": float(self.snr_db[index]),
            "is_noise_only": bool(self.is_noise_only[index]),
            "callsigns": self.callsigns[index],
            "exchange": self.exchanges[index],
        }

    def fingerprint(self) -> str:
        """Changes when the clips, their texts or their order do."""
        digest = hashlib.blake2b(digest_size=16)
        for row in zip(self.paths, self.texts, self.offsets.tolist(), strict=True):
            digest.update(repr(row).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def as_corpus(self) -> Corpus:
        """The clips as a corpus for the report of --check_data, without speakers and languages."""
        count = len(self)
        return Corpus(
            paths=Strings(self.paths),
            texts=Strings(self.texts),
            seconds=self.lengths,
            offsets=self.offsets,
            durations=self.durations,
            speakers=Codes([""] * count),
            languages=Codes([""] * count),
            lines=np.arange(1, count + 1),
            repeats_texts=self.repeats_texts,
        )

    def select(self, indices: np.ndarray) -> "Recordings":
        """The clips at `indices`, in that order."""
        columns = {}
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                columns[field.name] = column[indices]
            elif isinstance(column, list):
                columns[field.name] = [column[i] for i in indices]
        return dataclasses.replace(self, **columns)


# --- reading --------------------------------------------------------------------------------------


def read_splits(folder: str | Path, checks: Checks) -> dict[str, Recordings]:
    """The clips of `read_dataset` that `checks` lets through, as "train", "val" and "test", if they
    exist; "val" is "test" if there is no other. Raises as `read_dataset` does."""
    names = {"train": "train", "validation": "val", "test": "test"}
    splits = {}
    for split, recordings in read_dataset(folder, checks.cache_dir, checks.strict).items():
        lengths = recordings.lengths
        kept = np.flatnonzero((lengths >= checks.min_duration) & (lengths <= checks.max_duration))
        if len(kept) < len(recordings):
            print(
                f"{split} set: {len(recordings) - len(kept)} clips are too short or too long"
                f" (--min_duration {checks.min_duration:g}, --max_duration"
                f" {checks.max_duration:g}) and left out; --use_chunking cuts long recordings, with"
                " --train_manifest"
            )
        if split == "train":
            kept = kept[draw(len(kept), checks)]
        if len(kept):
            splits[names[split]] = dataclasses.replace(
                recordings.select(kept), cache_audio=checks.cache_audio
            )
    if "val" not in splits and "test" in splits:
        splits["val"] = splits["test"]
    return splits


def read_dataset(
    folder: str | Path, cache_dir: Path | None = None, strict: bool = False
) -> dict[str, Recordings]:
    """The usable clips of a folder, by split: "train", "validation" and "test", as far as they
    exist. Without splits/*.csv, metadata.csv is divided 80/10/10 by a
    hash of the id. The columns audio_file and text are required. The lengths in file headers are
    kept in `cache_dir`.

    Clips with missing or truncated files, without text, or with text beyond Morse are reported by
    reason. So are damaged lines; for metadata.csv they are reported with the training set. Raises
    `DataError` if no clip is left, or if `strict` and any was rejected, and `UsageError` if there
    is no table."""
    folder = Path(folder)
    rejections = defaultdict(Rejections)
    rows = _read_tables(folder, rejections)
    names = ("train", "validation", "test")
    order = [name for name in names if rows.get(name) or rejections[name].total]
    paths = find_all([row["audio_file"] for name in order for row in rows[name]], str(folder))
    cache = None
    if cache_dir:
        key = hashlib.sha1(os.fsencode(os.path.abspath(folder))).hexdigest()[:12]
        cache = cache_dir / f"headers-{key}.npz"
    lengths, reasons = probe_all(paths, cache)
    probed = iter(zip(paths, lengths.tolist(), reasons, strict=True))
    recordings = {}
    for name in order:
        usable = []
        for row in rows[name]:
            row["path"], row["seconds"], unreadable = next(probed)
            reason = unreadable or _fault(row)
            if reason:
                rejections[name].add(reason, f"{row['place']}: {row['audio_file']}")
            else:
                usable.append(row)
        columns = _in_columns(usable)
        report_rejections(f"{name} set ({folder})", columns.lengths, rejections[name], strict)
        recordings[name] = columns
    if not recordings:
        raise DataError(f"{folder}: its tables have no rows")
    return recordings


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
    splits = {"train": [], "validation": [], "test": []}
    for row in rows:
        digest = hashlib.blake2b(row["id"].encode(), digest_size=4).digest()
        share = int.from_bytes(digest, "big") / 2**32
        if share < 0.8:
            splits["train"].append(row)
        elif share < 0.9:
            splits["validation"].append(row)
        else:
            splits["test"].append(row)
    return splits


def _fault(row: dict) -> str:
    """Why a clip with readable audio cannot be used, or ""."""
    if row["duration"] - row["seconds"] > FILE_TOLERANCE:
        return "file is shorter than its duration in the table (truncated?)"
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
    """All columns of METADATA and MORE_METADATA, numbers as floats. Raises `ValueError` that says
    what is wrong."""
    check_encoding("".join(cells.values()))
    row = {**dict.fromkeys(METADATA + MORE_METADATA, ""), **cells}
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


def _in_columns(rows: list[dict]) -> Recordings:
    def column(name: str) -> list:
        return [row[name] for row in rows]

    return Recordings(
        ids=column("id"),
        paths=column("path"),
        texts=column("text"),
        contest_types=column("contest_type"),
        sample_types=column("sample_type"),
        conditions=column("condition"),
        callsigns=column("callsigns"),
        exchanges=column("exchange"),
        wpm=np.array(column("wpm"), dtype=float),
        snr_db=np.array(column("snr_db"), dtype=float),
        is_noise_only=np.array(column("is_noise_only"), dtype=bool),
        lengths=np.array(column("seconds"), dtype=float),
        offsets=np.zeros(len(rows)),
        durations=np.full(len(rows), np.nan),
    )


def from_corpus(corpus: Corpus, name: str, strict: bool) -> Recordings:
    """The clips of a manifest. Texts with other symbols than Morse's are rejected, and reported
    under `name`."""

    def fault(index: int) -> tuple[str, str] | None:
        labels = symbols(corpus.texts[index])
        if set(labels).issubset(SYMBOLS):
            return None
        others = Counter(label for label in labels if label not in SYMBOLS)
        return NO_CODE, f"{corpus.texts[index][:60]} ({named(others, 5)})"

    corpus = drop(corpus, name, fault, strict)
    count = len(corpus)
    texts = list(corpus.texts)
    return Recordings(
        ids=[corpus.where(index) for index in range(count)],
        paths=list(corpus.paths),
        texts=texts,
        contest_types=[""] * count,
        sample_types=[""] * count,
        conditions=[""] * count,
        callsigns=[find_callsigns(text) for text in texts],
        exchanges=[""] * count,
        wpm=np.full(count, np.nan),
        snr_db=np.full(count, np.nan),
        is_noise_only=np.zeros(count, dtype=bool),
        lengths=corpus.seconds,
        offsets=corpus.offsets,
        durations=corpus.durations,
        channels=corpus.channels,
        cache_audio=corpus.cache_audio,
    )
