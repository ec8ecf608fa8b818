"""The families of manifests: JSON Lines, CSV and TSV with a header, LJSpeech; read into columns."""

import csv
import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import TextIO

import numpy as np

from common.errors import DataError, UsageError
from speech.columns import Codes, Corpus, Rejections, Segments, Strings
from speech.headers import _by_threads

AUDIO_KEYS = ("audio_filepath", "audio_file", "file_name", "path", "audio", "wav", "filename")
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("lang", "language", "locale")
SEGMENT_OVERLAP = 1e-3  # seconds by which rounded times of a segment may reach back into the one before it


def parse(path: Path, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    """(line number, row) of a manifest, its family told by extension and header: JSON Lines or a JSON list, CSV/TSV
    with a header, LJSpeech. Lines that cannot be read are added to `rejected`."""
    try:
        with open(path, "rb") as binary:
            start = binary.read(4096)
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}") from None
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"manifest {path} is UTF-16: save it as UTF-8")
    if start[:4] == b"PK\3\4" or b"\0" in start:
        raise DataError(f"manifest {path} is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)")
    # Read line by line: a manifest of millions of lines would take gigabytes as one string.
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
    # Only commas come with quotes. `strict`: an unclosed quote must not swallow the lines after it unseen.
    dialects = {
        delimiter: {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE, "strict": True}
        for delimiter in "|\t,"
    }  # fmt: skip
    header, delimiter = _find_header(first, dialects)
    if not header and "|" not in first:
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of {', '.join(AUDIO_KEYS)}); it has: {first[:100]!r}"
        )
    reader, is_first = csv.reader(file, **dialects[delimiter]), True
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            rejected.add("line is not valid CSV", f"{path}:{begin}: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header and is_first:
            is_first = False
        elif header:
            yield begin, dict(zip(header, cells, strict=False))
        elif len(cells) >= 2:  # LJSpeech: name | text | normalised text
            name = cells[0] if re.search(r"\.[A-Za-z]\w{1,3}$", cells[0]) else cells[0] + ".wav"
            yield begin, {"audio_file": name, "text": cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]}
        else:
            rejected.add("line has too few columns", f"{path}:{begin}")


def _find_header(first: str, dialects: dict[str, dict]) -> tuple[list[str], str]:
    """The names in a table's first line and its delimiter; no names where none is an audio column. (Counting
    delimiters would not do: the sentences of LJSpeech hold more commas than its lines bars.)"""
    found: list[str] = []
    best = "|"
    for delimiter, dialect in dialects.items():
        try:
            names = [cell.strip().lower() for cell in next(csv.reader([first], **dialect), [])]
        except csv.Error:
            continue
        if len(names) > len(found) and any(key in names for key in AUDIO_KEYS):
            found, best = names, delimiter
    return found, best


def _first(row: dict, keys: tuple[str, ...]):
    for key in keys:
        value = row.get(key)
        if value is not None and value != "":
            return value
    return None


def find_audio(name: str, folder: str, audio_root: str | None = None) -> str:
    """Where a manifest's audio path leads: absolute, or relative to `audio_root` or the manifest's `folder` (or, as
    Common Voice and LJSpeech have it, to `clips/` or `wavs/` there). With `audio_root`, an absolute path that does not
    exist is looked up by its last components: manifests travel between machines (Windows' separators included)."""
    base, exists = audio_root or folder, os.path.exists  # (pathlib's raises for a name that is too long)
    if exists(found := os.path.join(base, name)):  # an absolute name stays what it is
        return found
    posix = PureWindowsPath(name).as_posix() if "\\" in name else name
    parts = [part for part in posix.split("/") if part]
    is_absolute = posix.startswith("/") or posix[1:3] == ":/"
    if is_absolute and not audio_root:
        return name
    if is_absolute:
        places = [os.path.join(base, *parts[start:]) for start in range(len(parts))] or [name]
    else:
        places = [os.path.join(base, inside, *parts) for inside in ("clips", "wavs", "audio", "")]
    return next(filter(exists, places), places[-1])


def read_manifest(
    path: str,
    rejected: Rejections,
    normalise: Callable[[str], str],
    audio_root: str | None = None,
    needs_text: bool = True,
    segments: Segments | None = None,
) -> Corpus:
    """A manifest's rows, texts normalised, audio not looked at yet (`seconds` is NaN); their segments are added to
    `segments`. Raises `UsageError` where the manifest is missing, `DataError` where it is none."""
    if audio_root and not os.path.isdir(audio_root):
        raise UsageError(f"--audio_root {audio_root}: no such folder")
    audio, texts, speakers, languages = Codes(), Strings(), Codes(), Codes()
    offsets, durations, lines = array("d"), array("d"), array("q")
    for number, row in parse(Path(path), rejected):
        given, parts, problem = isinstance(row, dict) and bool(row.get("segments")), [], ""
        if given and segments and (segments.wanted or not any(key in row for key in TEXT_KEYS)):
            try:
                parts = [(*times, normalise(text)) for *times, text in _segments(row["segments"], needs_text)]
            except ValueError as why:
                problem = str(why)
        try:
            if (parts or problem) and not any(key in row for key in TEXT_KEYS):
                if problem:
                    raise ValueError(problem)
                row = {**row, "text": " ".join(text for *_, text in parts if text)}
            name, text, offset, duration, speaker, language = _fields(row, needs_text)
        except ValueError as why:
            rejected.add(str(why), f"{path}:{number}")
            continue
        audio.append(name)
        texts.append(normalise(text))
        speakers.append(speaker)
        languages.append(language)
        offsets.append(offset)
        durations.append(duration)
        lines.append(number)
        if segments:
            segments.append(given, parts, problem)
    if not lines and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    folder = os.path.dirname(path)
    found: list[str] = []
    for part in _by_threads(lambda names: [find_audio(name, folder, audio_root) for name in names], audio.names):
        found += part
    paths = Strings(found[code] for code in audio.codes)
    return Corpus(paths, texts, np.full(len(lines), np.nan), np.array(offsets), np.array(durations), speakers, languages,
                  np.array(lines))  # fmt: skip


def _fields(row, needs_text: bool) -> tuple[str, str, float, float, str, str]:
    """(audio, text, offset, duration, speaker, language) of a row; a duration that is not given is NaN. Raises
    `ValueError` saying what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError("line is not an object")
    audio, text = _first(row, AUDIO_KEYS), _first(row, TEXT_KEYS)
    if not isinstance(audio, str) or "\0" in audio:
        raise ValueError("no audio path")
    if text is None:
        if needs_text and not any(key in row for key in TEXT_KEYS):
            raise ValueError("no text field")
        text = ""
    elif not isinstance(text, str | int):
        raise ValueError("text is no string")
    names = [_first(row, keys) for keys in (SPEAKER_KEYS, LANGUAGE_KEYS)]
    strings = [audio, str(text), *("" if name is None else str(name) for name in names)]
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        raise ValueError("line is not UTF-8") from None
    offset, duration = row.get("offset"), row.get("duration")
    try:
        offset = float(offset) if offset not in (None, "") else 0.0
        duration = float(duration) if duration not in (None, "") else math.nan
    except (TypeError, ValueError, OverflowError):
        offset = math.nan
    if not math.isfinite(offset) or math.isinf(duration):  # a duration of NaN: a table's empty cell, as some write it
        raise ValueError("offset or duration is no number")
    if offset < 0 or duration < 0:
        raise ValueError("offset or duration is negative")
    return strings[0], strings[1], offset, duration, strings[2], strings[3]


def _segments(rows, needs_text: bool) -> list[tuple[float, float, str]]:
    """(start, stop, text) of each of a row's "segments", in seconds from its beginning, to the microsecond: each begins
    where the one before it has ended, or later. Raises `ValueError` saying what is wrong."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("segments are no list of objects")
    found, before = [], 0.0
    for row in rows:
        text = _first(row, TEXT_KEYS)
        if text is None:
            text = ""
            if needs_text and not any(key in row for key in TEXT_KEYS):
                raise ValueError("a segment has no text field")
        if not isinstance(text, str | int):
            raise ValueError("a segment's text is no string")
        try:
            str(text).encode()
        except UnicodeEncodeError:
            raise ValueError("line is not UTF-8") from None
        try:
            start = float(row["start"] if "start" in row else row["offset"])
            stop = float(row["end"]) if "end" in row else start + float(row["duration"])
        except KeyError:
            raise ValueError("a segment has no times (start and end, or offset and duration)") from None
        except (TypeError, ValueError, OverflowError):
            start = stop = math.nan
        if not (math.isfinite(start) and math.isfinite(stop)):
            raise ValueError("a segment's time is no number")
        start, stop = round(start, 6), round(stop, 6)
        if start < 0:
            raise ValueError("a segment's time is negative")
        if stop <= start:
            raise ValueError("a segment ends before it begins")
        if start < before - SEGMENT_OVERLAP or stop <= before:
            raise ValueError("segments overlap, or are not in the order of time")
        found.append((max(start, before), stop, str(text)))
        before = stop
    return found
