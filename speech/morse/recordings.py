"""Folders of Morse recordings with metadata.csv: written from the synthesis, read into columns."""

import csv
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import DataError, UsageError, cannot_write
from speech.audio import SAMPLE_RATE, write_wav
from speech.columns import Corpus, Rejections
from speech.corpus import FILE_TOLERANCE, drop, report_rejections
from speech.headers import probe_all
from speech.manifest import find_audio
from speech.morse.alphabet import CALLSIGN, SYMBOLS, normalise, symbols
from speech.morse.synthesis import Conditions, one_of, synthesise

METADATA = "id,audio_file,text,contest_type,sample_type,wpm,condition,duration,is_noise_only".split(",")
MORE_METADATA = ["snr_db", "callsigns", "exchange"]  # columns that other writers' data sets may lack


@dataclass
class Recordings:
    """Clips on disk in columns. What a data set does not say is "" or NaN; `seconds` (N,) is by the files' headers.
    `durations` is NaN where a clip lasts to its file's end."""

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
    seconds: np.ndarray
    offsets: np.ndarray
    durations: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: np.ndarray) -> "Recordings":
        """Those of these numbers."""
        columns = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Recordings(*(c[indices] if isinstance(c, np.ndarray) else [c[i] for i in indices] for c in columns))

    def row(self, index: int, hypothesis: str) -> dict:
        """What `evaluation_tables` wants to know of a clip."""
        return {
            "file": self.paths[index], "reference": self.texts[index], "hypothesis": hypothesis,
            "condition": self.conditions[index], "contest_type": self.contest_types[index],
            "sample_type": self.sample_types[index], "wpm": float(self.wpm[index]), "snr_db": float(self.snr_db[index]),
            "is_noise_only": bool(self.is_noise_only[index]), "callsigns": self.callsigns[index],
            "exchange": self.exchanges[index],
        }  # fmt: skip


def read_dataset(folder: str | Path, cache_dir: Path | None = None, strict: bool = False) -> dict[str, Recordings]:
    """The clips of a folder as `write_dataset` makes it, by split: "train", "validation", "test", those that it has.
    Without splits/*.csv, metadata.csv is divided 80/10/10 by a hash of the id. Only audio_file and text need be there.

    Clips that cannot be used (missing or truncated files, no text, text beyond Morse) are left out and counted by
    reason; raises `DataError` where nothing is left or, if `strict`, anything was left out, and where a table is damaged,
    naming the line; `UsageError` where there is no such table. Headers that were read are kept in `cache_dir`."""
    folder = Path(folder)
    names = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
    tables = {names[path.stem]: path for path in sorted(folder.glob("splits/*.csv")) if path.stem in names}
    if tables:
        rows = {split: _read_table(path) for split, path in tables.items()}
    elif (folder / "metadata.csv").is_file():
        rows = {"train": [], "validation": [], "test": []}
        for row in _read_table(folder / "metadata.csv"):
            share = int.from_bytes(hashlib.blake2b(row["id"].encode(), digest_size=4).digest(), "big") / 2**32
            rows["train" if share < 0.8 else "validation" if share < 0.9 else "test"].append(row)
    else:
        raise UsageError(f"--data_dir {folder}: neither splits/train.csv nor metadata.csv is there")
    name = f"headers-{hashlib.sha1(os.path.abspath(folder).encode()).hexdigest()[:12]}.npz"
    order = [split for split in ("train", "validation", "test") if rows.get(split)]
    paths = [find_audio(row["audio_file"], str(folder)) for split in order for row in rows[split]]
    lengths, reasons = probe_all(paths, cache_dir / name if cache_dir else None)
    files = iter(zip(paths, lengths.tolist(), reasons, strict=True))
    recordings = {}
    for split in order:
        rejected, good = Rejections(), []
        for row in rows[split]:
            row["path"], row["seconds"], reason = next(files)
            if reason := reason or _fault(row):
                rejected.add(reason, f"{row['where']}: {row['audio_file']}")
            else:
                good.append(row)
        recordings[split] = _in_columns(good)
        report_rejections(f"{split} set ({folder})", recordings[split], rejected, strict)
    if not recordings:
        raise DataError(f"{folder}: its tables have no rows")
    return recordings


def _fault(row: dict) -> str:
    """Why a clip whose audio is sound cannot be used, or ""."""
    if row["duration"] - row["seconds"] > FILE_TOLERANCE:
        return "file is shorter than its duration in the table (truncated?)"
    if bool(row["text"]) == row["is_noise_only"]:
        return "noise only, with a text" if row["text"] else "text is empty"
    if not set(symbols(row["text"])).issubset(SYMBOLS):
        return "text holds what Morse has no code for"
    return ""


def _read_table(path: Path) -> list[dict]:
    """A table's rows with every column of ours, numbers as numbers, and "where" it stands. Raises `DataError` naming
    the line of what is damaged."""
    rows = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for column in ("audio_file", "text"):
                if column not in (reader.fieldnames or ()):
                    raise DataError(f"{path}:1: no column {column}")
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{where}: {'more' if None in row else 'fewer'} cells than the header has")
                rows.append(_parse_row(row, where))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}:{reader.reader.line_num}: {error}") from None
    return rows


def _parse_row(cells: dict[str, str], where: str) -> dict:
    row = {**dict.fromkeys(METADATA + MORE_METADATA, ""), **cells, "where": where}
    if not row["audio_file"].strip() or "\0" in row["audio_file"]:
        raise DataError(f"{where}: audio_file is empty")
    row["id"] = row["id"] or row["audio_file"]
    for column, low in (("wpm", 0), ("duration", 0), ("snr_db", -math.inf)):
        try:
            row[column] = float(row[column]) if row[column].strip() else math.nan
        except ValueError:
            raise DataError(f"{where}: {column} is no number: {row[column][:40]!r}") from None
        if row[column] < low or math.isinf(row[column]):
            raise DataError(f"{where}: {column} is {row[column]:g}")
    flag = row["is_noise_only"].strip().lower()
    if flag not in ("", "true", "false", "1", "0", "yes", "no"):
        raise DataError(f"{where}: is_noise_only is neither true nor false: {flag[:40]!r}")
    row["is_noise_only"] = flag in ("true", "1", "yes")
    row["text"] = normalise(row["text"])
    words = row["callsigns"] if "callsigns" in cells else " ".join(filter(CALLSIGN.fullmatch, row["text"].split()))
    row["callsigns"] = words.split()
    return row


def _in_columns(rows: list[dict]) -> Recordings:
    names = "id path text contest_type sample_type condition callsigns exchange".split()
    numbers = {"wpm": float, "snr_db": float, "is_noise_only": bool, "seconds": float}
    columns = [[row[name] for row in rows] for name in names]
    columns += [np.array([row[name] for row in rows], dtype=kind) for name, kind in numbers.items()]
    return Recordings(*columns, np.zeros(len(rows)), np.full(len(rows), np.nan))


def from_corpus(corpus: Corpus, name: str, strict: bool) -> Recordings:
    """The clips of a manifest, whose texts are Morse's symbols; others are rejected, and reported as those of `name`."""

    def fault(index: int) -> tuple[str, str] | None:
        if set(symbols(corpus.texts[index])).issubset(SYMBOLS):
            return None
        return "text holds what Morse has no code for", corpus.texts[index][:60]

    corpus = drop(corpus, name, fault, strict)
    count, texts = len(corpus), [corpus.texts[index] for index in range(len(corpus))]
    where = [corpus.where(index) for index in range(count)]
    calls = [list(filter(CALLSIGN.fullmatch, text.split())) for text in texts]
    unknown, nothing = [""] * count, np.full(count, np.nan)
    return Recordings(
        where, [corpus.paths[index] for index in range(count)], texts, unknown, unknown, unknown, calls, unknown, nothing,
        nothing, np.zeros(count, dtype=bool), corpus.seconds, corpus.offsets, corpus.durations,
    )  # fmt: skip


def write_dataset(folder: str | Path, count: int, seed: int, mix: Sequence[Conditions], workers: int = 1) -> None:
    """Writes `count` clips of conditions drawn from `mix`: audio/*.wav (16 bits), metadata.csv, and splits/ with eight
    of ten clips for training, one for validation, one for the test. What is written depends on `count`, `seed` and `mix`
    alone, and is left as it is where it is already there; another data set that was written by this is replaced. Raises
    `UsageError` where the folder holds something else, `RunError` where it cannot be written."""
    folder = Path(folder).absolute()
    made_from = {"made_by": "whisper_morse", "version": 1, "count": count, "seed": seed}
    made_from = json.dumps({**made_from, "mix": [dataclasses.asdict(conditions) for conditions in mix]})
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        before = _made_from(folder)
        if before == made_from:
            print(f"data set: {count} clips are already in {folder}")
            return
        if "whisper_morse" not in before and folder.exists() and any(folder.iterdir()):
            raise UsageError(f"--write_dataset {folder}: the folder holds something else; choose an empty or a new one")
        (aside / "audio").mkdir(parents=True)
        (aside / "splits").mkdir()
        todo = ((aside, seed, index, mix) for index in range(count))
        if workers > 1:
            with multiprocessing.get_context("fork").Pool(workers) as pool:
                rows = list(pool.imap(_write_clip, todo, chunksize=16))
        else:
            rows = [_write_clip(clip) for clip in todo]
        _write_table(aside / "metadata.csv", rows)
        _write_table(aside / "splits" / "train.csv", [row for i, row in enumerate(rows) if i % 10 < 8])
        _write_table(aside / "splits" / "validation.csv", rows[8::10])
        _write_table(aside / "splits" / "test.csv", rows[9::10])
        (aside / "made_from.json").write_text(made_from, encoding="utf-8")
        if before:
            shutil.rmtree(folder)
        os.replace(aside, folder)  # what a kill cut short is not taken for a data set
    except OSError as error:
        raise cannot_write(folder, error, "--write_dataset") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    hours = sum(row["duration"] for row in rows) / 3600
    print(f"data set: {count} clips, {hours:.2f} h, in {folder}")


def _made_from(folder: Path) -> str:
    try:
        return (folder / "made_from.json").read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _write_clip(clip: tuple[Path, int, int, Sequence[Conditions]]) -> dict:
    """Writes the wav of (folder, seed, index, mix); returns its row."""
    folder, seed, index, mix = clip
    sample = synthesise(seed, index, one_of(mix, seed, index))
    name = f"audio/{index:06d}.wav"
    write_wav(folder / name, np.rint(sample.audio * 32768).astype("<i2"), SAMPLE_RATE)
    return {
        "id": f"{index:06d}", "audio_file": name, "text": sample.text, "contest_type": sample.contest_type,
        "sample_type": sample.sample_type, "wpm": round(sample.wpm, 2), "condition": sample.condition,
        "duration": round(sample.seconds, 3), "is_noise_only": sample.is_noise_only,
        "snr_db": "" if sample.is_noise_only else round(sample.snr_db, 2), "callsigns": " ".join(sample.callsigns),
        "exchange": sample.exchange,
    }  # fmt: skip


def _write_table(path: Path, rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, METADATA + MORE_METADATA)
        writer.writeheader()
        writer.writerows(rows)
