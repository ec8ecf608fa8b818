"""Manifest formats, read into columns: JSON Lines, CSV and TSV with a header, LJSpeech."""

import csv
import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import NamedTuple, TextIO

import numpy as np

from common.errors import DataError, UsageError
from speech.columns import Codes, Corpus, Rejections, Segments, Strings
from speech.headers import in_threads

AUDIO_KEYS = ("audio_filepath", "audio_file", "file_name", "path", "audio", "wav", "filename")
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("lang", "language", "locale")
SEGMENT_OVERLAP = 1e-3  # seconds by which the rounded times of consecutive segments may overlap


class Fields(NamedTuple):
    """The fields of a row that are used; `offset` and `duration` in seconds (duration NaN: to the end of the file)."""

    audio: str
    text: str
    offset: float
    duration: float
    speaker: str
    language: str


def parse(path: Path, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    """(line number, row) of a manifest in any format, which is recognised by extension and header. Lines that cannot be
    parsed are added to `rejected`. Raises `UsageError` if the file cannot be read, `DataError` if it is not a
    manifest."""
    try:
        with open(path, "rb") as binary:
            start = binary.read(4096)
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}") from None
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"manifest {path} is UTF-16: save it as UTF-8")
    if start[:4] == b"PK\3\4" or b"\0" in start:
        raise DataError(f"manifest {path} is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)")
    # Read line by line: as one string, a manifest of millions of lines would take gigabytes.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        first = next((line for line in file if line.strip()), "").strip()
        file.seek(0)
        if first.startswith("["):
            try:
                rows = json.load(file)
            except (ValueError, RecursionError) as error:
                raise DataError(f"manifest {path} is not valid JSON: {error}") from None
            yield from enumerate(rows, 1)
        elif first.startswith("{") or path.suffix in (".json", ".jsonl"):
            yield from _parse_json_lines(path, file, rejected)
        elif first:
            yield from _parse_table(path, file, first, rejected)


def _parse_json_lines(path: Path, file: TextIO, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            rejected.add("line is not valid JSON", f"{path}:{number}: {getattr(error, 'msg', error)}")


def _parse_table(path: Path, file: TextIO, first: str, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    csv.field_size_limit(1 << 24)
    header, delimiter = _find_header(first)
    if not header and "|" not in first:
        names = ", ".join(AUDIO_KEYS)
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of {names}); it has: {first[:100]!r}"
        )
    reader, is_first = csv.reader(file, **_dialect(delimiter)), True
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            rejected.add("line is not valid CSV", f"{path}:{number}: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header and is_first:
            is_first = False
        elif header:
            yield number, dict(zip(header, cells, strict=False))
        elif len(cells) >= 2:  # LJSpeech: name | text | normalised text
            name = cells[0] if re.search(r"\.[A-Za-z]\w{1,3}$", cells[0]) else cells[0] + ".wav"
            yield number, {"audio_file": name, "text": cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]}
        else:
            rejected.add("line has too few columns", f"{path}:{number}")


def _dialect(delimiter: str) -> dict:
    """Only commas come with quotes. `strict`: an unclosed quote must not swallow the following lines unnoticed."""
    return {
        "delimiter": delimiter,
        "quoting": csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE,
        "strict": True,
    }


def _find_header(first: str) -> tuple[list[str], str]:
    """(column names, delimiter) of a table's first line; no names if none is an audio column. (Counting delimiters is
    not enough: LJSpeech's sentences have more commas than its lines have bars.)"""
    header: list[str] = []
    best = "|"
    for delimiter in "|\t,":
        try:
            names = [cell.strip().lower() for cell in next(csv.reader([first], **_dialect(delimiter)), [])]
        except csv.Error:
            continue
        if len(names) > len(header) and any(key in names for key in AUDIO_KEYS):
            header, best = names, delimiter
    return header, best


def find_audio(name: str, folder: str, audio_root: str | None = None) -> str:
    """The path of a manifest's audio file: absolute, or relative to `audio_root` or the manifest's `folder` (or to
    clips/ or wavs/ in it, as in Common Voice and LJSpeech).

    With `audio_root`, an absolute path of another machine (with Windows' separators, too) is looked up by its last
    components. If no file exists, the path to name in a message."""
    base = audio_root or folder
    path = os.path.join(base, name)  # an absolute name replaces `base`
    if os.path.exists(path):  # (pathlib's `exists` raises for a name that is too long)
        return path
    posix = PureWindowsPath(name).as_posix() if "\\" in name else name
    parts = [part for part in posix.split("/") if part]
    is_absolute = posix.startswith("/") or posix[1:3] == ":/"
    if is_absolute and not audio_root:
        return name
    if is_absolute:
        candidates = [os.path.join(base, *parts[start:]) for start in range(len(parts))] or [name]
    else:
        candidates = [os.path.join(base, inside, *parts) for inside in ("clips", "wavs", "audio", "")]
    return next(filter(os.path.exists, candidates), candidates[-1])


def read_manifest(
    path: str, rejected: Rejections, normalise: Callable[[str], str], audio_root: str | None, segments: Segments
) -> Corpus:
    """The rows of a manifest with normalised texts, before their audio is checked: `seconds` is NaN. Adds their
    segments to `segments`, and unusable rows to `rejected`. Raises `UsageError` if the manifest or `audio_root` is
    missing, `DataError` if it is not a manifest or empty."""
    if audio_root and not os.path.isdir(audio_root):
        raise UsageError(f"--audio_root {audio_root}: no such folder")
    audio, texts, speakers, languages = Codes(), Strings(), Codes(), Codes()
    offsets, durations, lines = array("d"), array("d"), array("q")
    for number, row in parse(Path(path), rejected):
        given, parts, problem = _parts(row, segments.wanted, normalise)
        if given and not _has_text(row):
            if problem:
                rejected.add(problem, f"{path}:{number}")
                continue
            if parts:
                row = {**row, "text": " ".join(text for *_, text in parts if text)}
        try:
            fields = _fields(row)
        except ValueError as error:
            rejected.add(str(error), f"{path}:{number}")
            continue
        audio.append(fields.audio)
        texts.append(normalise(fields.text))
        speakers.append(fields.speaker)
        languages.append(fields.language)
        offsets.append(fields.offset)
        durations.append(fields.duration)
        lines.append(number)
        segments.append(given, parts, problem)
    if not lines and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    folder = os.path.dirname(path)
    files: list[str] = []
    for part in in_threads(lambda names: [find_audio(name, folder, audio_root) for name in names], audio.names):
        files += part
    return Corpus(
        paths=Strings(files[code] for code in audio.codes),
        texts=texts,
        seconds=np.full(len(lines), np.nan),
        offsets=np.array(offsets),
        durations=np.array(durations),
        speakers=speakers,
        languages=languages,
        lines=np.array(lines),
    )


def _has_text(row: dict) -> bool:
    return any(key in row for key in TEXT_KEYS)


def _first(row: dict, keys: tuple[str, ...]):
    for key in keys:
        value = row.get(key)
        if value is not None and value != "":
            return value
    return None


def _fields(row) -> Fields:
    """Raises `ValueError` that says what is wrong with the row."""
    if not isinstance(row, dict):
        raise ValueError("line is not an object")
    audio = _first(row, AUDIO_KEYS)
    if not isinstance(audio, str) or "\0" in audio:
        raise ValueError("no audio path")
    text = _text(row, "no text field", "text is not a string")
    speaker, language = (
        "" if name is None else str(name) for name in (_first(row, SPEAKER_KEYS), _first(row, LANGUAGE_KEYS))
    )
    _check_encoding(audio + text + speaker + language)
    offset, duration = row.get("offset"), row.get("duration")
    try:
        offset = float(offset) if offset not in (None, "") else 0.0
        duration = float(duration) if duration not in (None, "") else math.nan
    except (TypeError, ValueError, OverflowError):
        offset = math.nan
    if not math.isfinite(offset) or math.isinf(duration):  # duration NaN: an empty cell, as some tables write it
        raise ValueError("offset or duration is not a number")
    if offset < 0 or duration < 0:
        raise ValueError("offset or duration is negative")
    return Fields(audio, text, offset, duration, speaker, language)


def _text(row: dict, missing: str, wrong: str) -> str:
    """The text of a row or segment, "" if it is null. Raises `ValueError(missing)` without such a field, and
    `ValueError(wrong)` for other types."""
    text = _first(row, TEXT_KEYS)
    if text is None:
        if not _has_text(row):
            raise ValueError(missing)
        return ""
    if not isinstance(text, str | int):
        raise ValueError(wrong)
    return str(text)


def _check_encoding(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 are read as lone surrogates
        raise ValueError("line is not UTF-8") from None


def _parts(row, wanted: bool, normalise: Callable[[str], str]) -> tuple[bool, list[tuple[float, float, str]], str]:
    """(whether the row has segments, the segments with normalised texts, why they cannot be used). They are parsed only
    if they are `wanted`, or if the row has no text but theirs."""
    given = isinstance(row, dict) and bool(row.get("segments"))
    if not given or not (wanted or not _has_text(row)):
        return given, [], ""
    try:
        return given, [(start, stop, normalise(text)) for start, stop, text in _segments(row["segments"])], ""
    except ValueError as error:
        return given, [], str(error)


def _segments(rows) -> list[tuple[float, float, str]]:
    """(start, stop, text) of each of a row's "segments", in seconds, rounded to microseconds, in order and without
    overlap. Raises `ValueError` that says what is wrong."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("segments are not a list of objects")
    segments, before = [], 0.0
    for row in rows:
        text = _text(row, "a segment has no text field", "a segment's text is not a string")
        _check_encoding(text)
        try:
            start = float(row["start"] if "start" in row else row["offset"])
            stop = float(row["end"]) if "end" in row else start + float(row["duration"])
        except KeyError:
            raise ValueError("a segment has no times (start and end, or offset and duration)") from None
        except (TypeError, ValueError, OverflowError):
            start = stop = math.nan
        if not (math.isfinite(start) and math.isfinite(stop)):
            raise ValueError("a segment's time is not a number")
        start, stop = round(start, 6), round(stop, 6)
        if start < 0:
            raise ValueError("a segment's time is negative")
        if stop <= start:
            raise ValueError("a segment ends before it begins")
        if start < before - SEGMENT_OVERLAP or stop <= before:
            raise ValueError("segments overlap, or are not in the order of time")
        segments.append((max(start, before), stop, text))
        before = stop
    return segments
