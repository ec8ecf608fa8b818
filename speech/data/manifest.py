"""Manifest formats, read into columns: JSON Lines, CSV and TSV with a header, LJSpeech."""

import csv
import functools
import json
import math
import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from common.errors import DataError, UsageError
from common.files import require_file
from speech.data.annotations.rows import annotated_rows, files_of
from speech.data.columns import Codes, Corpus, Rejections, Segments, Strings
from speech.data.finding import find_audio
from speech.data.headers import in_threads

AUDIO_KEYS = "audio_filepath audio_file file_name path audio wav filename file".split()
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("target_lang", "lang", "language", "locale")  # the first that a row has
OTHER_KEYS = ("offset", "duration", "label", "segments")
SEGMENT_OVERLAP = 1e-3  # seconds by which the rounded times of consecutive segments may overlap
# Characters: six hours of speech with segment times, even if every letter is a JSON escape.
LINE_LENGTH = 1 << 22
LIST_BYTES = 1 << 30  # of a JSON list, because it is read as a whole
# Delimiters that come with quotes. Spreadsheets write semicolons where numbers have commas.
QUOTED = ",;"
CELL_LINES = 50  # that a quoted cell may take
AUDIO_SUFFIX = re.compile(r"\.[A-Za-z]\w{1,3}$")
NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
WORD = re.compile(r"\b[^\W\d_]+\b")  # without digits
UNREADABLE = f"line is longer than {LINE_LENGTH} characters, or has NUL characters"
NOT_NORMALISED = (
    "third cell is not the second, normalised (if it is a speaker, add the line"
    " audio_file|text|speaker)"
)

csv.field_size_limit(LINE_LENGTH)

Line = tuple[int, str]  # number, and content with its line end; "" if the line is UNREADABLE
END: Line = (0, "")
Reject = Callable[..., None]  # (reason, line number, details)


class Fields(NamedTuple):
    """The fields of a row that are used; `offset` and `duration` in seconds (duration NaN: to the
    end of the file)."""

    audio: str
    text: str
    label: str  # in JSON
    offset: float
    duration: float
    speaker: str
    language: str


def parse(
    path: Path,
    rejected: Rejections,
    tiers: Sequence[str] = (),
    audio_root: str | None = None,
    only_tables: bool = False,
) -> Iterator[tuple[int, dict]]:
    """(line number, row) of a manifest in any format, which is recognised by extension and header.
    `path` can also be a file of annotations or a pattern of such names, of which `tiers` are taken
    and counted; only their audio is looked for in `audio_root` here. Every line that is not blank
    and cannot be parsed is added to `rejected`. Raises `UsageError` if the file cannot be read,
    `DataError` if it is not a manifest."""
    if path.suffix.lower() == ".parquet":  # or a pattern of such names
        raise UsageError(
            f'manifest {path} is Parquet: python -m speech.data.parquet "{path}" FOLDER makes audio'
            " files and FOLDER/manifest.jsonl of it"
        )
    if files := files_of(path):
        yield from annotated_rows(files, tiers, audio_root, rejected)
        return
    try:
        with open(require_file(path, "manifest"), "rb") as binary:
            start = binary.read(1 << 16)
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}") from None
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"manifest {path} is UTF-16: save it as UTF-8")
    if start[:4] == b"PK\3\4" or b"\0" in start[:4096]:
        raise DataError(
            f"manifest {path} is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)"
        )

    def reject(reason: str, number: int, details: str = "") -> None:
        place = f"{path}:{number}"
        rejected.add(reason, f"{place}: {details}" if details else place)

    # A carriage return alone ends lines only if nothing else does. Otherwise it is white space.
    end = "\r" if b"\r" in start and b"\n" not in start else "\n"
    # Read line by line: as one string, a manifest of millions of lines would take gigabytes.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline=end) as file:
        first = next((line for line in _lines(file, end) if line[1]), END)
        file.seek(0)
        is_json = first[1].lstrip()[:1] in ("[", "{", "") or path.suffix in (".json", ".jsonl")
        if only_tables or not is_json:
            yield from _parse_table(path, first, _lines(file, end), reject)
        elif first[1].lstrip().startswith("["):
            yield from enumerate(_parse_json_list(path, file), 1)
        else:
            yield from _parse_json_lines(_lines(file, end), reject)


def _lines(file: TextIO, end: str) -> Iterator[Line]:
    """The lines that are not blank."""
    for number, line in enumerate(iter(functools.partial(file.readline, LINE_LENGTH), ""), 1):
        if len(line) == LINE_LENGTH or "\0" in line:
            while len(line) == LINE_LENGTH and line[-1] != end:
                line = file.readline(LINE_LENGTH)
            yield number, ""
            continue
        line = line.lstrip("\ufeff")  # files that begin with byte-order marks may be joined
        if not line.isspace():
            yield number, line


def _parse_json_list(path: Path, file: TextIO) -> list:
    size = os.fstat(file.fileno()).st_size
    if size > LIST_BYTES:
        raise DataError(
            f"manifest {path}: a JSON list of {size >> 20} MiB is not read; write one object per"
            " line"
        )
    try:
        return _decode_json(file.read())
    except (ValueError, RecursionError) as error:
        raise DataError(f"manifest {path} is not valid JSON: {error}") from None


def _parse_json_lines(lines: Iterator[Line], reject: Reject) -> Iterator[tuple[int, dict]]:
    for number, line in lines:
        try:
            yield number, _decode_json(line)
        except (ValueError, RecursionError) as error:
            reason = "line is not valid JSON" if line else UNREADABLE
            reject(reason, number, getattr(error, "msg", str(error)))


def _unique(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):  # the last value of the key would win
        raise ValueError("a key is given twice")
    return row


_decode_json = json.JSONDecoder(object_pairs_hook=_unique).decode


def _parse_table(
    path: Path, first: Line, lines: Iterator[Line], reject: Reject
) -> Iterator[tuple[int, dict]]:
    """The rows that have as many cells as the header, or LJSpeech's without a header. Another
    header, as in joined files, holds for the lines that follow it."""
    header, delimiter = _find_header(first[1])
    if not header and "|" not in first[1]:
        labels = ", and it is no label of Audacity" if path.suffix.lower() == ".txt" else ""
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of"
            f" {', '.join(AUDIO_KEYS)}), as audio_file,text or audio_file|text do{labels}; it has:"
            f" {first[1].strip()[:100]!r}"
        )
    header_line = first[0] if header else 0
    after = 0  # the column after the text's
    for number, cells in _split(lines, delimiter, header, reject):
        if number == header_line or _is_header(cells):
            if number != header_line:
                reject("line is another header", number)
            header[:] = _column_names(cells, f"{path}:{number}")
            after = 1 + min((header.index(key) for key in TEXT_KEYS if key in header), default=-1)
            continue
        try:
            yield number, _table_row(header, cells, delimiter, after)
        except ValueError as error:
            reject(str(error), number)


def _is_header(cells: list[str]) -> bool:
    """Whether a line that is not the first one names columns of audio and of text or labels."""
    names = {cell.strip().lower() for cell in cells}
    return not names.isdisjoint(AUDIO_KEYS) and not names.isdisjoint([*TEXT_KEYS, "label"])


def _column_names(cells: list[str], place: str) -> list[str]:
    names = [cell.strip().lower() for cell in cells]
    for name in names:
        if name and names.count(name) > 1:
            raise DataError(f"manifest {place}: its header has two columns called {name}")
    return names


def _table_row(header: list[str], cells: list[str], delimiter: str, after: int) -> dict:
    """A row of a table. `after`: the column after the text's, 0 if there is none. Raises
    `ValueError` that says what is wrong."""
    if not header:
        return _ljspeech(cells)
    if len(cells) != len(header):
        more = "more" if len(cells) > len(header) else "fewer"
        raise ValueError(f"line has {more} cells than the header")
    if delimiter == "," and 0 < after < len(cells):
        text, following = cells[after - 1], cells[after]
        if following.startswith(" ") and not text.startswith(" "):
            raise ValueError(
                "the cell after the text begins with a space (a text with commas needs quotes)"
            )
    row = dict(zip(header, cells, strict=True))
    if "label" in row:
        row["label"] = _cell_label(row["label"])
    return row


def _split(
    lines: Iterator[Line], delimiter: str, header: list[str], reject: Reject
) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each row."""
    ahead: deque[Line] = deque()  # lines that were read in search of the end of a cell
    while True:
        line = ahead.popleft() if ahead else next(lines, END)
        if line is END:
            return
        number, content = line
        if not content:
            reject(UNREADABLE, number)
        elif delimiter not in QUOTED or '"' not in content:
            yield number, content.rstrip("\r\n").split(delimiter)
        else:
            try:
                cells, more = _quoted_cells(content, lines, ahead, header, delimiter)
            except csv.Error as error:
                reject("line is not valid CSV", number, str(error))
                continue
            for _ in range(more):
                ahead.popleft()
            yield number, cells


def _quoted_cells(
    row: str, lines: Iterator[Line], ahead: deque[Line], header: list[str], delimiter: str
) -> tuple[list[str], int]:
    """The cells of the row that begins with this line, and how many of `ahead`, which is filled
    from `lines`, belong to it. Raises `csv.Error`.

    A line with an odd number of quotes opens a text that continues in the next lines, up to
    `CELL_LINES`. None of them may look like a row, nor have a file name between delimiters: a
    forgotten quote would swallow all rows up to the next one."""
    is_open = row.count('"') % 2
    more = 0
    while is_open and more < CELL_LINES and len(row) < LINE_LENGTH:
        if more == len(ahead):
            ahead.append(next(lines, END))
        line = ahead[more][1]
        closes = line.count('"') % 2
        inside = line.split('"')[0] if closes else line
        if not line or inside.count(delimiter) >= len(header) - 1:
            break
        row += line
        is_open ^= closes
        more += 1
    cells = next(csv.reader([row], delimiter=delimiter, strict=True))
    if is_open or (more and not _is_whole(header, cells, delimiter)):
        raise csv.Error("a quote is not closed")
    return cells, more


def _is_whole(header: list[str], cells: list[str], delimiter: str) -> bool:
    """Whether cells of several lines are one row: only texts have line breaks, and no parts that
    are file names."""
    if len(cells) != len(header):
        return False
    for name, cell in zip(header, cells, strict=True):
        parts = re.split(rf"[{delimiter}\r\n]", cell)
        if not re.search(r"[\r\n]", cell):
            continue
        if name not in TEXT_KEYS or any(AUDIO_SUFFIX.search(part.strip(' "')) for part in parts):
            return False
    return True


def _ljspeech(cells: list[str]) -> dict:
    """The row of a name, a text and, perhaps, the text normalised. Raises `ValueError` that says
    what is wrong."""
    if not 2 <= len(cells) <= 3:
        raise ValueError("line has neither two nor three cells, as LJSpeech's have")
    name, text, normalised = (*cells, "")[:3]
    has_suffix = AUDIO_SUFFIX.search(name)
    if not normalised.strip():
        normalised = text
    elif not _is_normalised(normalised, text, numerals=not has_suffix):
        raise ValueError(NOT_NORMALISED)
    return {"audio_file": name if has_suffix else name + ".wav", "text": normalised}


def _is_normalised(spoken: str, text: str, numerals: bool) -> bool:
    """Whether `spoken` can be `text` with its numbers and abbreviations spelled out: it has half of
    the words and half of the length. With `numerals`, a text of numbers alone may become any that
    is as long and has none."""
    words = set(WORD.findall(text.casefold()))
    said = spoken.casefold()
    if words:
        shared = words.intersection(WORD.findall(said))
        return 2 * len(shared) >= len(words) and 2 * len(spoken) >= len(text)
    if said.split() == text.casefold().split():
        return True
    is_spelled_out = re.search(r"\d", text) and not re.search(r"\d", spoken)
    return numerals and bool(is_spelled_out) and len(spoken) >= len(text)


def _find_header(first: str) -> tuple[list[str], str]:
    """(column names, delimiter) of a table's first line; no names if none is an audio column.
    (Counting delimiters is not enough: LJSpeech's sentences have more commas than its lines have
    bars.)"""
    header: list[str] = []
    best = "|"
    for delimiter in f"|\t{QUOTED}":
        quoting = csv.QUOTE_MINIMAL if delimiter in QUOTED else csv.QUOTE_NONE
        try:
            cells = next(csv.reader([first], delimiter=delimiter, quoting=quoting, strict=True), [])
        except csv.Error:
            continue
        names = [cell.strip().lower() for cell in cells]
        if len(names) > len(header) and any(key in names for key in AUDIO_KEYS):
            header, best = names, delimiter
    return header, best


def read_manifest(
    path: str,
    rejected: Rejections,
    normalise: Callable[[str], str],
    audio_root: str | None,
    segments: Segments,
    needs: str = "text",
    tiers: Sequence[str] = (),
) -> Corpus:
    """The rows of a manifest with normalised texts, before their audio is checked: `seconds` is
    NaN. Adds their segments to `segments`, and unusable rows to `rejected`. `needs`: the field that
    every row must have, "text" or "label"; labels are read only for the latter. `tiers`: of files
    of annotations (--tier). Raises `UsageError` if the manifest or `audio_root` is missing,
    `DataError` if it is not a manifest or empty, or if a label has a wrong type."""
    if audio_root and not os.path.isdir(audio_root):
        raise UsageError(f"--audio_root {audio_root}: no such folder")
    audio = Codes()
    texts = Strings()
    labels = Strings()
    speakers = Codes()
    languages = Codes()
    offsets = array("d")
    durations = array("d")
    lines = array("q")
    transcribed: set[str] = set()  # names in transcripts, relative to where --transcribe ran
    for number, row in parse(Path(path), rejected, tiers, audio_root):
        try:
            given, parts, problem = _parts(row, segments.wanted, normalise)
            row = _with_text_of_segments(row, given, parts, problem)
            fields = row_fields(row, needs)
        except TypeError as error:
            raise DataError(f"{path}:{number}: {error}") from None
        except ValueError as error:
            rejected.add(str(error), f"{path}:{number}")
            continue
        if fields.audio == row.get("file"):
            transcribed.add(fields.audio)
        audio.append(fields.audio)
        texts.append(normalise(fields.text))
        labels.append(fields.label)
        speakers.append(fields.speaker)
        languages.append(fields.language)
        offsets.append(fields.offset)
        durations.append(fields.duration)
        lines.append(number)
        segments.append(given, parts, problem)
    if not lines and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    files = _find_all(audio.names, os.path.dirname(path), audio_root, transcribed)
    return Corpus(
        paths=Strings(files[code] for code in audio.codes),
        texts=texts,
        seconds=np.full(len(lines), np.nan),
        offsets=np.array(offsets),
        durations=np.array(durations),
        speakers=speakers,
        languages=languages,
        lines=np.array(lines),
        labels=labels if needs == "label" else None,
    )


def _find_all(
    names: list[str], folder: str, audio_root: str | None, transcribed: set[str]
) -> list[str]:
    """`find_audio` for all names, in threads. Names in `transcribed` may also be relative to the
    current folder."""

    def find(name: str) -> str:
        path = find_audio(name, folder, audio_root)
        if name in transcribed and os.path.exists(name) and not os.path.exists(path):
            return name
        return path

    files: list[str] = []
    for part in in_threads(lambda some: [find(name) for name in some], names):
        files += part
    return files


def _has_text(row: dict) -> bool:
    return any(key in row for key in TEXT_KEYS)


def _first(row: dict, keys: Sequence[str]):
    for key in keys:
        value = row.get(key)
        if value is not None and value != "":
            return value
    return None


def row_fields(row, needs: str) -> Fields:
    """The fields of a row. `needs`: "text" or "label" if it must have one, or "". Raises
    `ValueError` that says what is wrong with the row, `TypeError` for a label of a wrong type: then
    the whole table is made for something else."""
    if not isinstance(row, dict):
        raise ValueError("line is not an object")
    audio = _first(row, AUDIO_KEYS)
    if not isinstance(audio, str) or "\0" in audio:
        raise ValueError("no audio path")
    text = label = ""
    if needs == "label":
        label = _label(row)
    if needs == "text" or _has_text(row):
        text = _text(row, "no text field", "text is not a string")
    speaker = _first(row, SPEAKER_KEYS)
    language = _first(row, LANGUAGE_KEYS)
    speaker = "" if speaker is None else str(speaker)
    language = "" if language is None else str(language)
    check_encoding(audio + text + label + speaker + language)
    offset = _seconds(row, "offset", 0.0)
    duration = _seconds(row, "duration", math.nan)
    return Fields(audio, text, label, offset, duration, speaker, language)


def _seconds(row: dict, key: str, default: float) -> float:
    """A time of a row, `default` if it has none: some tables write NaN for an empty cell. Raises
    `ValueError` that says what is wrong with it."""
    value = row.get(key)
    if value in (None, ""):
        return default
    try:
        seconds = math.inf if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.inf
    if math.isinf(seconds) or (math.isnan(seconds) and not math.isnan(default)):
        raise ValueError("offset or duration is not a number")
    if seconds < 0:
        raise ValueError("offset or duration is negative")
    return seconds


def _label(row: dict) -> str:
    """The label of a row in JSON: a number, a string, or a list of these. Raises `ValueError` or
    `TypeError` that says what is wrong with it."""
    label = row.get("label")
    if label is None or label == "":
        raise ValueError("no label field" if "label" not in row else "label is empty")
    items = label if isinstance(label, list) else [label]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, float, str)):
            raise TypeError(
                f"label is {json.dumps(label, ensure_ascii=False)[:60]}: it must be a number, a"
                " string or a list of them (pairs can be one flat list: [0.2, 0.9, 1.8, 2.3])"
            )
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError("label is not finite")
    return json.dumps(label, ensure_ascii=False)


def _cell_label(cell: str) -> int | float | str:
    """The label in a table's cell: a number if it is one."""
    if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", cell, re.ASCII):
        return int(cell)
    if re.fullmatch(NUMBER, cell, re.ASCII) and math.isfinite(float(cell)):
        return float(cell)
    return cell.strip()


def _text(row: dict, missing: str, wrong: str) -> str:
    """The text of a row or segment, "" if it is null. Raises `ValueError(missing)` without such a
    field, and `ValueError(wrong)` for other types."""
    text = _first(row, TEXT_KEYS)
    if text is None:
        if not _has_text(row):
            raise ValueError(missing)
        return ""
    if not isinstance(text, (str, int)) or isinstance(text, bool):
        raise ValueError(wrong)
    return str(text)


def check_encoding(text: str) -> None:
    """Raises `ValueError` for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 are read as lone surrogates
        raise ValueError("line is not UTF-8") from None


def _parts(
    row, wanted: bool, normalise: Callable[[str], str]
) -> tuple[bool, list[tuple[float, float, str]], str]:
    """(whether the row has segments, the segments with normalised texts, why they cannot be used).
    Segments are parsed if they are `wanted`, if the row has no other text, or if somebody may have
    corrected them."""
    rows = _segment_rows(row) if isinstance(row, dict) else None
    if not rows:
        return False, [], ""
    if not wanted and _has_text(row) and "pieces" not in row:
        return True, [], ""
    try:
        parts = [(start, stop, normalise(text)) for start, stop, text in _segments(rows)]
    except ValueError as error:
        return True, [], str(error)
    return True, parts, ""


def _with_text_of_segments(row, given: bool, parts: list[tuple[float, float, str]], problem: str):
    """The row with the text of its segments, if it has no other text, or if it is a transcript
    whose pieces somebody has corrected. Arguments are the row and what `_parts` returns for it.
    Raises `ValueError` if the segments have a `problem`, and the row has no text without them."""
    if not given:
        return row
    if not _has_text(row):
        if problem:
            raise ValueError(problem)
        return {**row, "text": _joined(parts)} if parts else row
    if parts and "pieces" in row:
        text = _joined(parts)
        if "".join(str(row.get("text")).split()) != "".join(text.split()):
            return {**row, "text": text}
    return row


def _joined(parts: list[tuple[float, float, str]]) -> str:
    return " ".join(text for *_, text in parts if text)


def _segment_rows(row: dict):
    """A row's segments, not checked: "segments", or a transcript's "pieces", without those in which
    nothing was heard."""
    pieces = row.get("pieces") if "file" in row else None
    if not isinstance(pieces, list):
        return row.get("segments")
    return [piece for piece in pieces if not isinstance(piece, dict) or piece.get("text") != ""]


def _segments(rows) -> list[tuple[float, float, str]]:
    """(start, stop, text) of each of a row's "segments", in seconds, rounded to microseconds, in
    order and without overlap. Raises `ValueError` that says what is wrong."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("segments are not a list of objects")
    segments = []
    before = 0.0
    for row in rows:
        text = _text(row, "a segment has no text field", "a segment's text is not a string")
        check_encoding(text)
        start, stop = _segment_times(row)
        if start < before - SEGMENT_OVERLAP or stop <= before:
            raise ValueError("segments overlap, or are not in the order of time")
        segments.append((max(start, before), stop, text))
        before = stop
    return segments


def _segment_times(row: dict) -> tuple[float, float]:
    """Start and end of a segment in seconds. Raises `ValueError` that says what is wrong."""
    try:
        start = float(row["start"] if "start" in row else row["offset"])
        stop = float(row["end"]) if "end" in row else start + float(row["duration"])
    except KeyError:
        raise ValueError("a segment has no times (start and end, or offset and duration)") from None
    except (TypeError, ValueError, OverflowError):
        start = stop = math.nan
    if not (math.isfinite(start) and math.isfinite(stop)):
        raise ValueError("a segment's time is not a number")
    start = round(start, 6)
    stop = round(stop, 6)
    if start < 0:
        raise ValueError("a segment's time is negative")
    if stop <= start:
        raise ValueError("a segment ends before it begins")
    return start, stop
