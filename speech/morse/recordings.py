"""Folders of Morse recordings with metadata.csv: written by the synthesis, read into columns."""

import csv
import dataclasses
import hashlib
import json
import math
import multiprocessing.connection
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.errors import DataError, RunError, UsageError, cannot_write
from speech.data.columns import Codes, Corpus, Rejections, Strings
from speech.data.fields import check_encoding
from speech.data.finding import find_all
from speech.data.folders import read_made_from, require_replaceable, write_folder
from speech.data.headers import probe_all
from speech.data.loading import FILE_TOLERANCE, MOST_CHARACTERS, Checks
from speech.data.manifest import parse
from speech.data.splits import draw, drop, report_rejections
from speech.morse.alphabet import CALLSIGN, SYMBOLS, normalise, symbols
from speech.morse.synthesis import Conditions, draw_conditions, synthesise
from speech.signal.audio import SAMPLE_RATE, read_utterance, write_wav
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
# The conditions of a data set that is written.
DATASET_MIX = (
    "clean",
    "contest_good",
    "contest_moderate",
    "contest_poor",
    "dx_expedition",
    "wide",
)
SPLITS = {  # name of a file in splits/: what it is for
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
MADE_BY = "whisper_morse"  # in a folder's made_from.json
MOST_CLIPS = 10_000_000  # of a data set: 2 TB
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
    """The usable clips of a folder as `write_dataset` writes it, by split: "train", "validation"
    and "test", as far as they exist. Without splits/*.csv, metadata.csv is divided 80/10/10 by a
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


# --- writing --------------------------------------------------------------------------------------


def write_dataset(
    folder: str | Path, count: int, seed: int, mix: Sequence[Conditions], workers: int = 1
) -> None:
    """Writes `count` clips with conditions drawn from `mix`: audio/*.wav (16 bits), metadata.csv,
    and splits/ with 80 % of them for training, 10 % for validation and 10 % for the test.

    The content depends on `count`, `seed` and `mix` alone. The same data set is left as it is;
    another one that this function wrote and nobody has changed is replaced. Raises `UsageError` if
    the folder holds anything else, `RunError` if it cannot be written."""
    folder = Path(folder).absolute()
    settings = {
        "made_by": MADE_BY,
        "version": 1,
        "count": count,
        "seed": seed,
        "mix": [dataclasses.asdict(conditions) for conditions in mix],
    }
    settings = json.loads(json.dumps(settings))  # tuples to lists, as they are read back
    try:
        require_replaceable(folder, settings)
        if read_made_from(folder) == settings:
            print(f"data set: {count} clips are already in {folder}")
            return

        def fill(aside: Path) -> list[dict]:
            return _write_clips(aside, count, seed, mix, workers)

        rows = write_folder(folder, fill, settings)
    except UsageError as error:
        raise UsageError(f"--write_dataset {error}") from None
    except OSError as error:
        raise cannot_write(folder, error, "--write_dataset") from None
    hours = sum(row["duration"] for row in rows) / 3600
    print(f"data set: {count} clips, {hours:.2f} h, in {folder}")


def _write_clips(
    folder: Path, count: int, seed: int, mix: Sequence[Conditions], workers: int
) -> list[dict]:
    """Fills an empty folder with clips and tables; returns the rows."""
    (folder / "audio").mkdir()
    (folder / "splits").mkdir()
    clips = [(folder, seed, index, mix) for index in range(count)]
    rows = _in_parallel(clips, workers) if workers > 1 else list(map(_write_clip, clips))
    _write_table(folder / "metadata.csv", rows)
    _write_table(folder / "splits" / "train.csv", [row for i, row in enumerate(rows) if i % 10 < 8])
    _write_table(folder / "splits" / "validation.csv", rows[8::10])
    _write_table(folder / "splits" / "test.csv", rows[9::10])
    return rows


def _in_parallel(clips: list[tuple], workers: int) -> list[dict]:
    """`_write_clip` of all `clips` in so many processes. None of them is left at the end, also if
    it fails. There are no locks, which a signal could leave behind."""
    # A signal reaches the whole process group, but only the main process acts on it: the workers
    # inherit the mask.
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    context = multiprocessing.get_context("fork")
    rows = [{}] * len(clips)
    shares = {}
    processes = []
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        for first in range(workers):
            reader, writer = context.Pipe(duplex=False)
            shares[reader] = slice(first, None, workers)
            process = context.Process(
                target=_write_share, args=(writer, clips[shares[reader]], os.getpid())
            )
            process.start()
            processes.append(process)
            writer.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        while shares:
            for reader in multiprocessing.connection.wait(list(shares)):
                result = reader.recv()
                if isinstance(result, OSError):
                    raise result
                rows[shares.pop(reader)] = result
        return rows
    except EOFError:
        raise RunError(
            "a process that writes clips died (often: too little memory); nothing was written"
        ) from None
    finally:
        for process in processes:
            process.kill()
            process.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _write_share(writer, clips: list[tuple], parent: int) -> None:
    """Sends the rows of some clips, or the `OSError` that prevented them. Ends with its parent."""
    rows = []
    try:
        for clip in clips:
            if os.getppid() != parent:
                return
            rows.append(_write_clip(clip))
        writer.send(rows)
    except OSError as error:
        writer.send(error)


def _write_clip(clip: tuple[Path, int, int, Sequence[Conditions]]) -> dict:
    """Writes the wav of (folder, seed, index, mix); returns its row."""
    folder, seed, index, mix = clip
    sample = synthesise(seed, index, draw_conditions(mix, seed, index))
    name = f"audio/{index:06d}.wav"
    write_wav(folder / name, np.rint(sample.audio * 32768).astype("<i2"), SAMPLE_RATE)
    return {
        "id": f"{index:06d}",
        "audio_file": name,
        "text": sample.text,
        "contest_type": sample.contest_type,
        "sample_type": sample.sample_type,
        "wpm": round(sample.wpm, 2),
        "condition": sample.condition,
        "duration": round(sample.seconds, 3),
        "is_noise_only": sample.is_noise_only,
        "snr_db": "" if sample.is_noise_only else round(sample.snr_db, 2),
        "callsigns": " ".join(sample.callsigns),
        "exchange": sample.exchange,
    }


def _write_table(path: Path, rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, METADATA + MORE_METADATA)
        writer.writeheader()
        writer.writerows(rows)
