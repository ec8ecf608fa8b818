"""Morse: its symbols, data sets of recordings on disk, and what counts as right."""

import csv
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import manifest, metrics
from common.errors import DataError, RunError, UsageError

SPEED_BAND, SNR_BAND = 5, 4  # WPM, dB: of the tables
METADATA = "id,audio_file,text,contest_type,sample_type,wpm,condition,duration,is_noise_only".split(",")
MORE_METADATA = ["snr_db", "callsigns", "exchange"]  # columns that other writers' data sets may lack

# Prosigns that sound like a character have its label: AR is +, BT is =, KN is (, and the multiplication sign is X. The
# others have a label that no text contains: <SK> end of work, <AS> wait, <HH> error (eight dits).
MORSE = dict(
    pair.split()
    for pair in """A .-|B -...|C -.-.|D -..|E .|F ..-.|G --.|H ....|I ..|J .---|K -.-|L .-..|M --|N -.|O ---|P .--.|Q --.-
    |R .-.|S ...|T -|U ..-|V ...-|W .--|X -..-|Y -.--|Z --..|É ..-..|0 -----|1 .----|2 ..---|3 ...--|4 ....-|5 .....
    |6 -....|7 --...|8 ---..|9 ----.|. .-.-.-|, --..--|: ---...|? ..--..|' .----.|- -....-|/ -..-.|( -.--.|) -.--.-
    |" .-..-.|= -...-|+ .-.-.|@ .--.-.|<SK> ...-.-|<AS> .-...|<HH> ........""".split("|")
)
SYMBOLS = (" ", *MORSE)  # the labels of everything that can be heard: each is one token
PROSIGNS = {"<AR>": "+", "<BT>": "=", "<KN>": "(", "×": "X"}  # other names of the same sounds
CALLSIGN = re.compile(
    r"(?![A-R]{2}\d\d[A-X]{2}$)(?:[A-Z0-9]{1,4}/)?(?:[A-Z]{1,2}|[A-Z]\d|\d[A-Z])\d{1,3}[A-Z]{1,4}(?:/[A-Z0-9]{1,3})?"
)


def symbols(text: str) -> list[str]:
    """The labels of a text, in order; what is no label comes as single characters."""
    return re.findall(r"<(?:SK|AS|HH)>|.", text)


def normalise(text: str) -> str:
    """A text as this file writes it: upper case, single spaces, one label a sound."""
    text = " ".join(text.upper().split())
    for name, label in PROSIGNS.items():
        text = text.replace(name, label)
    return text


# --- data set on disk ------------------------------------------------------------------------------------------------


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
    paths = [manifest.find_audio(row["audio_file"], str(folder)) for split in order for row in rows[split]]
    lengths, reasons = manifest.probe_all(paths, cache_dir / name if cache_dir else None)
    files = iter(zip(paths, lengths.tolist(), reasons, strict=True))
    recordings = {}
    for split in order:
        rejected, good = manifest.Rejections(), []
        for row in rows[split]:
            row["path"], row["seconds"], reason = next(files)
            if reason := reason or _fault(row):
                rejected.add(reason, f"{row['where']}: {row['audio_file']}")
            else:
                good.append(row)
        recordings[split] = _in_columns(good)
        manifest.report_rejections(f"{split} set ({folder})", recordings[split], rejected, strict)
    if not recordings:
        raise DataError(f"{folder}: its tables have no rows")
    return recordings


def _fault(row: dict) -> str:
    """Why a clip whose audio is sound cannot be used, or ""."""
    if row["duration"] - row["seconds"] > manifest.FILE_TOLERANCE:
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


def from_corpus(corpus: manifest.Corpus, name: str, strict: bool) -> Recordings:
    """The clips of a manifest, whose texts are Morse's symbols; others are rejected, and reported as those of `name`."""
    rejected, keep = manifest.Rejections(), []
    for index in range(len(corpus)):
        if set(symbols(corpus.texts[index])).issubset(SYMBOLS):
            keep.append(index)
        else:
            rejected.add("text holds what Morse has no code for", f"{corpus.where(index)}: {corpus.texts[index][:60]}")
    if rejected.total:
        corpus = corpus.select(np.array(keep, dtype=int))
        manifest.report_rejections(name, corpus, rejected, strict)
    count, texts = len(corpus), [corpus.texts[index] for index in range(len(corpus))]
    where = [corpus.where(index) for index in range(count)]
    calls = [list(filter(CALLSIGN.fullmatch, text.split())) for text in texts]
    unknown, nothing = [""] * count, np.full(count, np.nan)
    return Recordings(
        where, [corpus.paths[index] for index in range(count)], texts, unknown, unknown, unknown, calls, unknown, nothing,
        nothing, np.zeros(count, dtype=bool), corpus.seconds, corpus.offsets, corpus.durations,
    )  # fmt: skip


# --- evaluation ------------------------------------------------------------------------------------------------------

_SCORED = {label: chr(0xE000 + number) for number, label in enumerate(MORSE) if len(label) > 1}


def for_scoring(text: str) -> str:
    """A text of one character a symbol, prosigns included; nothing is left out: in Morse ?, /, = and + are sent."""
    return "".join(_SCORED.get(label, label) for label in symbols(normalise(text)))


def measure(rows: list[dict]) -> dict:
    """The figures of some clips; a share of nothing is None. A callsign is right where it is a word of the hypothesis,
    an exchange where its words follow each other there."""
    references, hypotheses = [row["reference"] for row in rows], [normalise(row["hypothesis"]) for row in rows]
    words, characters = (metrics.count_errors(references, hypotheses, u, for_scoring) for u in ("words", "characters"))
    both = list(zip(rows, hypotheses, strict=True))
    right = {
        "perfect": [normalise(row["reference"]) == text for row, text in both if not row["is_noise_only"]],
        "callsigns": [f" {call} " in f" {text} " for row, text in both for call in row["callsigns"]],
        "exchanges": [f" {row['exchange']} " in f" {text} " for row, text in both if row["exchange"]],
        "noise_only": [not text for row, text in both if row["is_noise_only"]],
    }
    return {
        "samples": len(rows), "wer": words.rate if words.length else None,
        "cer": characters.rate if characters.length else None,
        **{f"{name}_right": sum(found) / len(found) if found else None for name, found in right.items()},
        **{f"{name}_count": len(found) for name, found in right.items()},
    }  # fmt: skip


def evaluation_tables(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """{table: {group: figures}} of evaluated clips (as `Recordings.row` has them): all of them, by condition, contest,
    kind of sample, band of speed and band of SNR (in 2,500 Hz). Clips without a station are in no band."""

    def band(name: str, width: int, unit: str) -> Callable[[dict], tuple]:
        def key(row: dict) -> tuple:
            if row["is_noise_only"] or math.isnan(row[name]):
                return ()
            low = math.floor(row[name] / width) * width
            return low, f"{low} to {low + width} {unit}"

        return key

    keys = {
        "all": lambda row: ("all",), "condition": lambda row: (row["condition"],),
        "contest": lambda row: (row["contest_type"],), "sample type": lambda row: (row["sample_type"],),
        "speed": band("wpm", SPEED_BAND, "WPM"), "SNR": band("snr_db", SNR_BAND, "dB"),
    }  # fmt: skip
    tables = {}
    for table, key in keys.items():
        groups: dict[tuple, list[dict]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        tables[table] = {str(group[-1]): measure(groups[group]) for group in sorted(groups) if group and group[-1]}
    return tables


def print_tables(tables: dict[str, dict[str, dict]]) -> None:
    """Prints the figures in per cent, aligned; "-" where there is nothing to count."""
    columns = {
        "WER": "wer", "CER": "cer", "perfect": "perfect_right", "callsigns": "callsigns_right",
        "exchanges": "exchanges_right", "silent on noise": "noise_only_right",
    }  # fmt: skip
    width = max([12, *(len(group) for groups in tables.values() for group in groups)])
    for table, groups in tables.items():
        if not groups:
            continue
        print(
            f"{table if table != 'all' else '%':{width}} {'samples':>7} " + " ".join(f"{name:>9}" for name in columns)
        )
        for group, figures in groups.items():
            shares = [figures[key] for key in columns.values()]
            cells = [
                f"{'-' if share is None else f'{100 * share:.2f}':>{max(9, len(name))}}"
                for name, share in zip(columns, shares, strict=True)
            ]
            print(f"{group:{width}} {figures['samples']:>7} " + " ".join(cells))
        print()


def write_evaluation(tables: dict[str, dict[str, dict]], path: Path) -> None:
    """The tables as JSON, shares from 0 to 1."""
    try:
        path.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
