"""Manifest formats, read into columns: JSON Lines, CSV and TSV, LJSpeech, pairs, annotations."""

import csv
import functools
import itertools
import json
import math
import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

import numpy as np

from common.errors import DataError, UsageError
from common.files import require_file
from speech.data.annotations.rows import annotated_rows, files_of, is_annotations
from speech.data.columns import Codes, Corpus, Rejections, Segments, Strings, printable
from speech.data.finding import comparable, find_all
from speech.data.headers import probe_all
from speech.data.pairs import paired_rows, texts_of

# The names of columns by what they hold: the first that a row has, whatever its cell holds.
AUDIO_KEYS = "audio_filepath audio_file file_name path audio wav filename file id".split()
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("target_lang", "lang", "language", "locale")
CHANNEL_KEYS = ("channel_selector", "channel")
# Those of times, also with a unit, such as start_ms or "Start Time [s]".
START_KEYS = ("offset", "start", "starttime", "begin", "begintime", "segmentstart")
END_KEYS = ("end", "endtime", "stop", "stoptime", "segmentend")
DURATION_KEYS = ("duration", "dur")
UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3}
# Milliseconds are recognised by the files' real lengths, if half of the parts are as long as this.
LEAST_MILLISECONDS = 50
PROBED = 200  # files for that, at most
LATER = 0.5  # seconds by which a part may reach beyond a file there
MOST_COLUMNS = 30  # that a line names
SAMPLE = 60  # characters of a cell in a question
LOOKED_AT = 1000  # rows of a table without a header, to tell what its third cells are
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
# Tables without a header whose third cells are not LJSpeech's are in one of these orders.
SPEAKER_FIRST = ("audio_file", "speaker", "text")
TEXT_FIRST = ("audio_file", "text", "speaker")

TIMES = ("start", "end", "duration")

csv.field_size_limit(LINE_LENGTH)

Line = tuple[int, str]  # number, and content with its line end; "" if the line is UNREADABLE
END: Line = (0, "")
Reject = Callable[..., None]  # (reason, line number, details)


class Columns(NamedTuple):
    """The names of a row's columns that are used, None without one. `texts`: all those of texts;
    `unit`: that of the times in seconds, None if their names do not tell."""

    audio: str | None
    texts: tuple[str, ...]
    speaker: str | None
    language: str | None
    channel: str | None
    start: str | None
    end: str | None
    duration: str | None
    unit: float | None

    @property
    def text(self) -> str | None:
        """The column of the texts; None if there is none, or if it is not known which of several to
        take. LJSpeech has them twice, as they are written and normalised."""
        if self.texts == ("text", "normalized_text"):
            return "normalized_text"
        return self.texts[0] if len(self.texts) == 1 else None


class Fields(NamedTuple):
    """The fields of a row that are used; `offset` and `duration` in seconds or, if their `unit` is
    None, in seconds or milliseconds. `offset` NaN: the row does not say that it is a part;
    `duration` NaN: to the end of the file; `channel` -1: the average."""

    audio: str
    text: str
    label: str  # in JSON
    offset: float
    duration: float
    unit: float | None
    channel: int
    speaker: str
    language: str


class Table:
    """The columns of a manifest's rows: how many rows have which, and which are used. `chunked`:
    segments are used, too."""

    def __init__(self, path: str, how: "Reading", chunked: bool):
        self.path = path
        self.text_column = how.text_column
        self.also = {"pieces", how.needs, *(["segments"] if chunked else [])}
        self.counts: dict[tuple[str, ...], int] = {}
        self.columns: dict[tuple[str, ...], Columns] = {}

    def columns_of(self, row) -> Columns:
        """The columns of a row, which is counted. Raises `UsageError` if it is not clear which one
        has its text, `ValueError` if it is no row."""
        if not isinstance(row, dict):
            raise ValueError("line is not an object")
        keys = tuple(row)
        self.counts[keys] = self.counts.get(keys, 0) + 1
        columns = self.columns.get(keys)
        if columns is None:
            columns = columns_of(keys)
            if self.text_column:
                chosen = (self.text_column,) if self.text_column in keys else ()
                columns = columns._replace(texts=chosen)
            elif len(columns.texts) > 1 and not columns.text:
                self.ask({name: repr(row[name])[:SAMPLE] for name in columns.texts})
            self.columns[keys] = columns
        return columns

    def ask(self, texts: dict[str, str]) -> NoReturn:
        """`texts`: columns that may have the texts, and what is in them."""
        readings = " or ".join(f"{name} ({what})" for name, what in texts.items())
        raise UsageError(
            f"manifest {self.path}: which column has the texts, {printable(readings)}? Add"
            f" --text_column {' or --text_column '.join(texts)}"
        )

    def described(self) -> str:
        """Which columns are used and which are not. Raises `UsageError` if the rows have their
        texts in different columns, or none in --text_column."""
        texts: dict[str, int] = {}
        used: dict[str, str] = {}
        every: dict[str, None] = {}
        for keys, columns in self.columns.items():
            every |= dict.fromkeys(filter(None, keys))
            for what in ("audio", "text", "speaker", "language", "channel", *TIMES):
                if name := getattr(columns, what):
                    used[name] = name if name == what else f"{name} ({what})"
            if columns.text:
                texts[columns.text] = texts.get(columns.text, 0) + self.counts[keys]
            elif "segments" in keys:
                used["segments"] = "segments (text)"
            used |= {name: name for name in keys if name in self.also and name not in used}
        if len(texts) > 1:
            self.ask({name: f"{count} rows" for name, count in texts.items()})
        if self.text_column and every and not texts:
            raise UsageError(
                f"--text_column {self.text_column}: manifest {self.path} has no such column, but"
                f" {_named(every)}"
            )
        rest = [name for name in every if name not in used]
        return f"columns used: {_named(used.values())}; not used: {_named(rest)}"

    def times(self) -> str:
        """The columns of times, for messages."""
        names = [getattr(each, name) for each in self.columns.values() for name in TIMES]
        return _named(dict.fromkeys(filter(None, names)))


def _named(names: Iterable[str]) -> str:
    names = [printable(name[:SAMPLE]) for name in names]
    more = [f"{len(names) - MOST_COLUMNS} more"] if len(names) > MOST_COLUMNS else []
    return ", ".join([*names[:MOST_COLUMNS], *more]) or "none"


def columns_of(keys: Sequence[str]) -> Columns:
    """The columns that are used of a row with these, if --text_column names none."""

    def first(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in keys), None)

    timed: dict[str, tuple[str, float | None]] = {}  # by their names without unit
    plain = {re.sub(r"[\W_]", "", key.lower()): key for key in reversed(keys)}
    for unit, seconds in {"": None, **UNITS}.items():
        for name, key in plain.items():
            if name.endswith(unit):
                timed.setdefault(name.removesuffix(unit), (key, seconds))
    times = []
    for names in (START_KEYS, END_KEYS, DURATION_KEYS):
        times.append(next((timed[name] for name in names if name in timed), (None, None)))
    start, end, duration = times
    if not start[0]:
        end = (None, None)
    if end[0]:  # perhaps of the whole recording
        duration = (None, None)
    units = [unit for _, unit in (start, end, duration) if unit]
    return Columns(
        audio=first(AUDIO_KEYS),
        texts=tuple(name for name in TEXT_KEYS if name in keys),
        speaker=first(SPEAKER_KEYS),
        language=first(LANGUAGE_KEYS),
        channel=first(CHANNEL_KEYS),
        start=start[0],
        end=end[0],
        duration=duration[0],
        unit=units[0] if units else None,
    )


def parse(
    path: Path,
    rejected: Rejections,
    tiers: Sequence[str] = (),
    audio_root: str | None = None,
    only_tables: bool = False,
) -> Iterator[tuple[int, dict]]:
    """(line number, row) of a manifest in any format, which is recognised by extension and header.
    `path` can also be a file of annotations or a pattern of such names, of which `tiers` are taken
    and counted, or a folder of pairs; only their audio is looked for in `audio_root` here. Every
    line that is not blank and cannot be parsed is added to `rejected`. Raises `UsageError` if the
    file cannot be read, `DataError` if it is not a manifest."""
    if path.suffix.lower() == ".parquet":  # or a pattern of such names
        raise UsageError(
            f'manifest {path} is Parquet: python -m speech.data.parquet "{path}" FOLDER makes audio'
            " files and FOLDER/manifest.jsonl of it"
        )
    if texts := texts_of(str(path)):
        yield from paired_rows(str(path), texts, audio_root, rejected)
        return
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

        def read() -> Iterator[Line]:
            file.seek(0)
            return _lines(file, end)

        file.seek(0)
        is_json = first[1].lstrip()[:1] in ("[", "{", "") or path.suffix in (".json", ".jsonl")
        if only_tables or not is_json:
            yield from _parse_table(path, first, read, audio_root, reject)
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
    path: Path,
    first: Line,
    read: Callable[[], Iterator[Line]],
    audio_root: str | None,
    reject: Reject,
) -> Iterator[tuple[int, dict]]:
    """The rows that have as many cells as the header, or LJSpeech's without a header. Another
    header, as in joined files, holds for the lines that follow it. `read()`: the lines, from the
    `first` one on."""
    header, delimiter = _find_header(first[1])
    header_line = first[0] if header else 0
    if not header and not _is_row(first[1], delimiter, path, audio_root):
        labels = ", and it is no label of Audacity" if path.suffix.lower() == ".txt" else ""
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of"
            f" {', '.join(AUDIO_KEYS)}), as audio_file,text or audio_file|text do{labels}; it has:"
            f" {first[1].strip()[:100]!r}"
        )
    quoted = delimiter in QUOTED or _has_csv_quotes(read(), delimiter, header)
    rows = _split(read(), delimiter, quoted, header, reject)
    is_ljspeech = not header
    if is_ljspeech:
        some = list(itertools.islice(rows, LOOKED_AT))
        header += _names_of_ljspeech(path, delimiter, [cells for _, cells in some])
        rows = itertools.chain(some, rows)
    after = 0  # the column after the text's
    for number, cells in _whole(rows, header, reject):
        if number == header_line or _is_header(cells):
            if number != header_line:
                reject("line is another header", number)
            header[:] = _column_names(cells, f"{path}:{number}")
            after = 1 + min((header.index(key) for key in TEXT_KEYS if key in header), default=-1)
            is_ljspeech = False
            continue
        try:
            row = _table_row(header, cells, after if delimiter == "," else 0)
            if is_ljspeech and not _is_normalised(row.get("normalized_text", ""), row["text"]):
                raise ValueError("third cell is not the second, normalised")
            yield number, row
        except ValueError as error:
            reject(str(error), number)


def _is_row(line: str, delimiter: str, path: Path, audio_root: str | None) -> bool:
    """Whether the first line is a row of a table without a header: LJSpeech's have bars. With tabs
    it begins with the name of audio that is there."""
    name, *others = line.split(delimiter)
    if delimiter == "|" or not others or not name.strip():
        return bool(others)
    return os.path.isfile(find_all([name.strip()], str(path.parent), audio_root)[0])


def _whole(
    rows: Iterator[tuple[int, list[str]]], header: list[str], reject: Reject
) -> Iterator[tuple[int, list[str]]]:
    """The rows without those whose text, their last cell, seems to continue in the next line: it
    has one cell, which is no file name."""
    before = None
    for number, cells in rows:
        is_rest = len(cells) == 1 < len(header) and not AUDIO_SUFFIX.search(cells[0].strip())
        if before and is_rest and header[-1] in TEXT_KEYS and len(before[1]) == len(header):
            reject("the text may continue in the next line (such a text needs quotes)", before[0])
        elif before:
            yield before
        before = (number, cells)
    if before:
        yield before


def _is_header(cells: list[str]) -> bool:
    """Whether a line that is not the first one names columns of audio and of text or labels."""
    names = set(map(_column_name, cells))
    return not names.isdisjoint(AUDIO_KEYS) and not names.isdisjoint([*TEXT_KEYS, "label"])


def _column_names(cells: list[str], place: str) -> list[str]:
    names = [_column_name(cell) for cell in cells]
    for name in names:
        if name and names.count(name) > 1:
            raise DataError(f"manifest {place}: its header has two columns called {name}")
    return names


def _column_name(cell: str) -> str:
    return cell.strip(' \t\r\n"').lower()


def _table_row(header: list[str], cells: list[str], after: int) -> dict:
    """A row of a table, whose cells have no spaces around them. `after`: the column after the
    text's, if texts may have lost their quotes, else 0. Raises `ValueError` that says what is
    wrong."""
    if len(cells) != len(header):
        more = "more" if len(cells) > len(header) else "fewer"
        raise ValueError(f"line has {more} cells than the header")
    if 0 < after < len(cells):
        text, following = cells[after - 1], cells[after]
        if following.startswith(" ") and not text.startswith(" "):
            raise ValueError(
                "the cell after the text begins with a space (a text with commas needs quotes)"
            )
    row = dict(zip(header, map(str.strip, cells), strict=True))
    if "label" in row:
        row["label"] = _cell_label(row["label"])
    return row


def _has_csv_quotes(lines: Iterator[Line], delimiter: str, header: list[str]) -> bool:
    """Whether a table has cells in quotes as spreadsheets write them, with quotes inside doubled,
    around what needs them or around all cells of a column. Otherwise quotes are a part of the
    texts, as in Common Voice and LJSpeech."""
    needed = False
    wrapped: set[int] = set()
    bare: set[int] = set()
    ahead: deque[Line] = deque()
    next(lines)
    while (line := ahead.popleft() if ahead else next(lines, END)) is not END:
        cells = line[1].rstrip("\r\n").split(delimiter)
        if '"' in line[1]:
            try:
                parsed, more = _quoted_cells(line[1], lines, ahead, header, delimiter)
            except csv.Error:
                return False
            content = line[1] + "".join(ahead.popleft()[1] for _ in range(more))
            special = [cell for cell in parsed if re.search(rf'["\r\n{delimiter}]', cell)]
            if content.count('"') < sum(2 * cell.count('"') + 2 for cell in special):
                return False
            needed = needed or bool(special)
        for place, cell in enumerate(cells):
            if cell:
                (wrapped if cell[0] == cell[-1] == '"' else bare).add(place)
    return needed or bool(wrapped - bare)


def _split(
    lines: Iterator[Line], delimiter: str, quoted: bool, header: list[str], reject: Reject
) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each row. `quoted`: cells may be in quotes."""
    ahead: deque[Line] = deque()  # lines that were read in search of the end of a cell
    while True:
        line = ahead.popleft() if ahead else next(lines, END)
        if line is END:
            return
        number, content = line
        if not content:
            reject(UNREADABLE, number)
        elif not quoted or '"' not in content:
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


def _names_of_ljspeech(path: Path, delimiter: str, rows: list[list[str]]) -> list[str]:
    """The names of the columns of a table without a header that begins with `rows`: a name, a text
    and, perhaps, the text normalised, which most third cells must be. Raises `DataError` if they
    are anything else."""
    whole = [cells for cells in rows if len(cells) == 3 and not _is_header(cells)]
    if 2 * len(whole) <= sum(len(cells) in (2, 3) for cells in rows):
        return ["audio_file", "text"]
    filled = [cells for cells in whole if cells[2].strip()]
    sure = [_is_normalised(spoken, text, numerals=False) for _, text, spoken in filled]
    if not filled:
        return ["audio_file", "text", ""]
    if 2 * sum(sure) >= len(sure):
        return ["audio_file", "text", "normalized_text"]
    second, third = (f"{cell.strip()[:SAMPLE]!r}" for cell in filled[sure.index(False)][1:])
    orders = [delimiter.join(names) for names in (SPEAKER_FIRST, TEXT_FIRST)]
    raise DataError(
        f"manifest {path}: it has no header, and its rows can be read in two ways: the text"
        f" {printable(third)} of the speaker {printable(second)}, or the text {printable(second)}"
        f" of the speaker {printable(third)}. Add a first line: {printable(orders[0])} for the"
        f" former, {printable(orders[1])} for the latter"
    )


def _is_normalised(spoken: str, text: str, numerals: bool = True) -> bool:
    """Whether `spoken` can be `text` with its numbers and abbreviations spelled out, or is empty:
    it has half of the words and half of the length. With `numerals`, a text of numbers alone may
    become any that is as long and has none."""
    words = set(WORD.findall(text.casefold()))
    said = spoken.casefold()
    if not said.strip():
        return True
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
    best = "\t" if "\t" in first and "|" not in first else "|"
    for delimiter in f"|\t{QUOTED}":
        quoting = csv.QUOTE_MINIMAL if delimiter in QUOTED else csv.QUOTE_NONE
        try:
            cells = next(csv.reader([first], delimiter=delimiter, quoting=quoting, strict=True), [])
        except csv.Error:
            continue
        names = list(map(_column_name, cells))
        if len(names) > len(header) and any(key in names for key in AUDIO_KEYS):
            header, best = names, delimiter
    return header, best


@dataclass(frozen=True)
class Reading:
    """How a manifest is read. `needs`: the field that every row must have, "text" or "label";
    labels are read only for the latter. `tiers`: of files of annotations (--tier)."""

    audio_root: str | None = None
    needs: str = "text"
    tiers: Sequence[str] = ()
    text_column: str | None = None


class Gathered:
    """The columns of a manifest while it is read. `units`: of the times, NaN if they are not known;
    `transcribed`: names in transcripts, relative to where an earlier --transcribe ran."""

    def __init__(self):
        self.audio = Codes()
        self.texts = Strings()
        self.labels = Strings()
        self.speakers = Codes()
        self.languages = Codes()
        self.offsets = array("d")
        self.durations = array("d")
        self.units = array("d")
        self.channels = array("q")
        self.lines = array("q")
        self.transcribed: set[str] = set()

    def append(self, fields: Fields, line: int) -> None:
        self.audio.append(fields.audio)
        self.texts.append(fields.text)
        self.labels.append(fields.label)
        self.speakers.append(fields.speaker)
        self.languages.append(fields.language)
        self.offsets.append(fields.offset)
        self.durations.append(fields.duration)
        self.units.append(math.nan if fields.unit is None else fields.unit)
        self.channels.append(fields.channel)
        self.lines.append(line)


def read_manifest(
    path: str,
    rejected: Rejections,
    normalise: Callable[[str], str],
    segments: Segments,
    how: Reading,
) -> Corpus:
    """The rows of a manifest with normalised texts, before their audio is checked: `seconds` is
    NaN. Adds their segments to `segments`, and unusable rows to `rejected`, and says there which
    columns are used. Raises `UsageError` if the manifest or the audio root is missing, or if it is
    not clear which column has the texts, `DataError` if it is not a manifest or empty, if several
    files may be meant by a name, or if labels have a wrong type, or times an unknown unit."""
    if how.audio_root and not os.path.isdir(how.audio_root):
        raise UsageError(f"--audio_root {how.audio_root}: no such folder")
    read = Gathered()
    table = Table(path, how, segments.wanted)
    for number, row in parse(Path(path), rejected, how.tiers, how.audio_root):
        try:
            columns = table.columns_of(row)
            given, parts, problem = _parts(row, columns, segments.wanted, normalise)
            row, columns = _with_text_of_segments(row, columns, given, parts, problem)
            fields = row_fields(row, how.needs, columns)
        except TypeError as error:
            raise DataError(f"{path}:{number}: {error}") from None
        except ValueError as error:
            rejected.add(str(error), f"{path}:{number}")
            continue
        read.append(fields._replace(text=normalise(fields.text)), number)
        if columns.audio == "file":
            read.transcribed.add(fields.audio)
        segments.append(given, parts, problem)
    if not read.lines and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    said = [rejected.source or table.described()]
    folder = os.path.dirname(path)
    files = _find_all(read.audio.names, folder, how.audio_root, read.transcribed)
    if places := _places(read.audio.names, files, how.audio_root or folder):
        said.append(f"audio found in {places}")
    if _in_milliseconds(read, files, path):
        said.append(f"in milliseconds: {table.times()}")
    rejected.source = "; ".join(said)
    return _corpus(read, files, has_labels=how.needs == "label")


def _corpus(read: Gathered, files: list[str], has_labels: bool) -> Corpus:
    """What was read as a corpus. `files`: the audio files by the numbers of their names. A row is a
    part of its file if it, or another row of the file, has an offset."""
    codes = np.array(read.audio.codes, dtype=np.int64)
    offsets, durations, units = map(np.array, (read.offsets, read.durations, read.units))
    durations = np.round(durations * units, 6)
    is_whole = ~np.isin(codes, codes[~np.isnan(offsets)])
    return Corpus(
        paths=Strings(files[code] for code in read.audio.codes),
        texts=read.texts,
        seconds=np.full(len(codes), np.nan),
        offsets=np.nan_to_num(np.round(offsets * units, 6)),
        durations=np.where(is_whole, np.nan, durations),
        stated=np.where(is_whole, durations, np.nan),
        channels=np.array(read.channels, dtype=np.int64),
        speakers=read.speakers,
        languages=read.languages,
        lines=np.array(read.lines),
        labels=read.labels if has_labels else None,
    )


def _in_milliseconds(read: Gathered, files: list[str], path: str) -> bool:
    """Whether the times whose columns do not name their unit are in milliseconds: most of them
    reach beyond their files in seconds. Fills in their units. Raises `DataError` if they are in
    neither."""
    offsets, durations, units = map(np.array, (read.offsets, read.durations, read.units))
    unknown = np.isnan(units)
    rows = np.flatnonzero(unknown & (durations > 0))
    found = False
    # Few are as long in seconds: the files are looked at only then.
    if len(rows) and np.median(durations[rows]) >= LEAST_MILLISECONDS:
        rows = rows[np.linspace(0, len(rows) - 1, min(PROBED, len(rows)), dtype=np.int64)]
        lengths, _ = probe_all([files[read.audio.codes[row]] for row in rows.tolist()], None)
        ends = (np.nan_to_num(offsets) + durations)[rows][lengths > 0]
        lengths = lengths[lengths > 0]
        found = bool(2 * (ends <= lengths + LATER).sum() < len(ends))
        if found and 2 * (ends / 1000 <= lengths + LATER).sum() < len(ends):
            worst = int(np.argmax(ends / lengths))
            raise DataError(
                f"manifest {path}: its times are neither seconds nor milliseconds: {ends[worst]:g}"
                f" in a file of {lengths[worst]:.2f} s; correct them, or rename their columns"
            )
    read.units = np.where(unknown, 1e-3 if found else 1.0, units)
    return found


def _find_all(
    names: list[str], folder: str, audio_root: str | None, transcribed: set[str]
) -> list[str]:
    """`find_all`. Names in `transcribed` may also be relative to the current folder."""
    files = find_all(names, folder, audio_root)
    for place, name in enumerate(names):
        if name in transcribed and os.path.exists(name) and not os.path.exists(files[place]):
            files[place] = name
    return files


def _places(names: list[str], files: list[str], base: str) -> str:
    """The folders in which files were found if that is not where their names lead from `base`."""
    places = set()
    for name, file in zip(names, files, strict=True):
        folder = os.path.dirname(file)
        if folder != os.path.dirname(os.path.join(base, name)) and not os.path.isabs(name):
            places.add(os.path.relpath(folder or ".", base or "."))
    return _named(f"{place}/" for place in sorted(places)) if places else ""


def has_lines(path: str) -> bool:
    """Whether a manifest is a table, whose rows people find by their lines."""
    return os.path.isfile(path) and not is_annotations(Path(path))


def row_fields(row, needs: str, columns: Columns | None = None) -> Fields:
    """The fields of a row. `needs`: "text" or "label" if it must have one, or "". Raises
    `ValueError` that says what is wrong with the row, `TypeError` for a label of a wrong type: then
    the whole table is made for something else."""
    if not isinstance(row, dict):
        raise ValueError("line is not an object")
    columns = columns or columns_of(tuple(row))
    audio = row.get(columns.audio)
    if not isinstance(audio, str) or not audio.strip() or "\0" in audio:
        raise ValueError("no audio path")
    text = label = ""
    if needs == "label":
        label = _label(row)
    if needs == "text" or columns.text:
        text = _text(row, columns.text, "no text field", "text is not a string")
    speaker, language = (row.get(name) for name in (columns.speaker, columns.language))
    # Spaces, and how a system writes an umlaut, make no other speaker.
    speaker = "" if speaker is None else comparable(" ".join(str(speaker).split()))
    language = "" if language is None else str(language).strip()
    check_encoding(audio + text + label + speaker + language)
    offset, duration = _times(row, columns)
    channel = _channel(row.get(columns.channel))
    return Fields(
        audio.strip(), text, label, offset, duration, columns.unit, channel, speaker, language
    )


def _times(row: dict, columns: Columns) -> tuple[float, float]:
    """(offset, duration) of a row in its unit, NaN where it has none. Raises `ValueError` that says
    what is wrong with them."""
    start, end, duration = (_time(row, getattr(columns, name)) for name in TIMES)
    if columns.end:
        if math.isnan(start) != math.isnan(end):
            raise ValueError(f"row has only one of {columns.start} and {columns.end}")
        if end <= start:
            raise ValueError(f"{columns.end} is not after {columns.start}")
        duration = end - start
    return start, duration


def _time(row: dict, name: str | None) -> float:
    """The number in a column of times, NaN without one: some tables write NaN for an empty cell.
    Raises `ValueError`."""
    value = row.get(name)
    if value in (None, ""):
        return math.nan
    try:
        time = math.inf if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        time = math.inf
    if math.isinf(time):
        raise ValueError(f"{name} is not a number")
    if time < 0:
        raise ValueError(f"{name} is negative")
    return time


def _channel(value) -> int:
    """The channel in a cell, from 0 on; -1: the average. Raises `ValueError`."""
    if value in (None, "", "average"):
        return -1
    number = str(value).strip().removesuffix(".0")
    if not re.fullmatch(r"\d{1,3}", number, re.ASCII):
        raise ValueError('channel is neither a number from 0 on nor "average"')
    return int(number)


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


def _text(row: dict, name: str | None, missing: str, wrong: str) -> str:
    """The text of a row or segment in the column `name`, "" if it is null. Raises
    `ValueError(missing)` without such a field, and `ValueError(wrong)` for other types."""
    if not name:
        raise ValueError(missing)
    text = row[name]
    if text is None:
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
    row: dict, columns: Columns, wanted: bool, normalise: Callable[[str], str]
) -> tuple[bool, list[tuple[float, float, str]], str]:
    """(whether the row has segments, the segments with normalised texts, why they cannot be used).
    Segments are parsed if they are `wanted`, if the row has no other text, or if somebody may have
    corrected them."""
    rows = _segment_rows(row)
    if not rows:
        return False, [], ""
    if not wanted and columns.text and "pieces" not in row:
        return True, [], ""
    try:
        parts = [(start, stop, normalise(text)) for start, stop, text in _segments(rows)]
    except ValueError as error:
        return True, [], str(error)
    return True, parts, ""


def _with_text_of_segments(
    row: dict,
    columns: Columns,
    given: bool,
    parts: list[tuple[float, float, str]],
    problem: str,
) -> tuple[dict, Columns]:
    """The row and its columns with the text of its segments, if it has no other text, or if it is a
    transcript whose pieces somebody has corrected. `given`, `parts` and `problem`: what `_parts`
    returns. Raises `ValueError` if the segments have a `problem`, and the row has no text without
    them."""
    if given and not columns.text and problem:
        raise ValueError(problem)
    if parts and (not columns.text or "pieces" in row):
        text = _joined(parts)
        before = row.get(columns.text)
        if "".join(str(before).split()) != "".join(text.split()):
            return {**row, "text": text}, columns._replace(texts=("text",))
    return row, columns


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
        columns = columns_of(tuple(row))
        if len(columns.texts) > 1:
            raise ValueError(f"a segment has several texts: {', '.join(columns.texts)}")
        wrong = "a segment's text is not a string"
        text = _text(row, columns.text, "a segment has no text field", wrong)
        check_encoding(text)
        start, stop = _segment_times(row, columns)
        if start < before - SEGMENT_OVERLAP or stop <= before:
            raise ValueError("segments overlap, or are not in the order of time")
        segments.append((max(start, before), stop, text))
        before = stop
    return segments


def _segment_times(row: dict, columns: Columns) -> tuple[float, float]:
    """Start and end of a segment in seconds. Raises `ValueError` that says what is wrong."""
    if not columns.start or not (columns.end or columns.duration):
        raise ValueError("a segment has no times (start and end, or offset and duration)")
    try:
        start = float(row[columns.start])
        stop = float(row[columns.end]) if columns.end else start + float(row[columns.duration])
    except (TypeError, ValueError, OverflowError):
        start = stop = math.nan
    if not (math.isfinite(start) and math.isfinite(stop)):
        raise ValueError("a segment's time is not a number")
    start = round(start * (columns.unit or 1.0), 6)
    stop = round(stop * (columns.unit or 1.0), 6)
    if start < 0:
        raise ValueError("a segment's time is negative")
    if stop <= start:
        raise ValueError("a segment ends before it begins")
    return start, stop
