"""Morse recordings in columns: of folders with metadata.csv, and of manifests."""

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
from speech.data.loading import FILE_TOLERANCE, MOST_CHARACTERS, Checks
from speech.data.manifest import parse
from speech.data.splits import draw, drop, report_rejections
from speech.morse.alphabet import CALLSIGN, SYMBOLS, normalise, symbols
from speech.morse.scores import TAGS
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.writing.unknown import named

SPLITS = {  # name of a file in splits/: what it is for
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
NO_CODE = "text has characters without a Morse code"


@dataclass(frozen=True)
class Recordings:
    """Clips on disk, and what is known of each: the tags that `scores.evaluation_tables` asks
    for."""

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
        """(waveform (T,), text, name, None: recordings do not say when each symbol is sent). Raises
        `BadAudio`."""
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
    """The clips of `read_dataset` that `checks` lets through, as "train", "val" and "test", if they
    exist; "val" is "test" if there is no other. Raises as `read_dataset` does."""
    names = {"train": "train", "validation": "val", "test": "test"}
    splits = {}
    for split, recordings in read_dataset(folder, checks.cache_dir, checks.strict).items():
        lengths = recordings.seconds(0)
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
            splits[names[split]] = recordings.select(kept)
            splits[names[split]].corpus.cache_audio = checks.cache_audio
    if "val" not in splits and "test" in splits:
        splits["val"] = splits["test"]
    return splits


def read_dataset(
    folder: str | Path, cache_dir: Path | None = None, strict: bool = False
) -> dict[str, Recordings]:
    """The usable clips of a folder, by split: "train", "validation" and "test", as far as they
    exist. Without splits/*.csv, metadata.csv is divided 80/10/10 by a hash of the id. The columns
    audio_file and text are required. The lengths in file headers are kept in `cache_dir`.

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
        recordings[name] = _recordings(usable)
        seconds = recordings[name].seconds(0)
        report_rejections(f"{name} set ({folder})", seconds, rejections[name], strict)
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
    """The columns "id", "audio_file", "text", "duration" and TAGS, numbers as floats. Raises
    `ValueError` that says what is wrong."""
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
    """The clips of a manifest. Texts with other symbols than Morse's are rejected, and reported
    under `name`."""

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
