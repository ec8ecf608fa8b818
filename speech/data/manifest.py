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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from common.errors import DataError, UsageError
from common.files import require_file
from speech.data.columns import Codes, Corpus, Rejections, Segments, Strings, printable
from speech.data.fields import (
    AUDIO_KEYS,
    CHANNEL_KEYS,
    DURATION_KEYS,
    LANGUAGE_KEYS,
    SAMPLE,
    SPEAKER_KEYS,
    TEXT_KEYS,
    Fields,
    Table,
    cell_label,
    named,
    row_fields,
    with_segments,
)
from speech.data.finding import TABLES, find_all
from speech.data.headers import probe_all

# Milliseconds are recognised by the files' real lengths, if half of the parts are as long as this.
LEAST_MILLISECONDS = 50
PROBED = 200  # files for that, at most
LATER = 0.5  # seconds by which a part may reach beyond a file there
LOOKED_AT = 1000  # rows of a table without a header, to tell what its third cells are
# Characters: six hours of speech with segment times, even if every letter is a JSON escape.
LINE_LENGTH = 1 << 22
# Delimiters that come with quotes. Spreadsheets write semicolons where numbers have commas.
QUOTED = ",;"
CELL_LINES = 50  # that a quoted cell may take
AUDIO_SUFFIX = re.compile(r"\.[A-Za-z]\w{1,3}$")
WORD = re.compile(r"\b[^\W\d_]+\b")  # without digits
UNREADABLE = f"line is longer than {LINE_LENGTH} characters, or has NUL characters"
# Tables without a header whose third cells are not LJSpeech's are in one of these orders.
NO_TEXTS = (*AUDIO_KEYS, *SPEAKER_KEYS, *LANGUAGE_KEYS, *CHANNEL_KEYS, *DURATION_KEYS)
SPEAKER_FIRST = ("audio_file", "speaker", "text")
MANY_CELLS = ("audio_file", "text", "normalized_text", "speaker")
TEXT_FIRST = ("audio_file", "text", "speaker")

csv.field_size_limit(LINE_LENGTH)

Line = tuple[int, str]  # number, and content with its line end; "" if the line is UNREADABLE
END: Line = (0, "")
Row = tuple[int, str, list[str], str]  # its line, its cells, and why it is not valid CSV or ""
Reject = Callable[..., None]  # (reason, line number, details)


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
        command = f'python -m speech.data.parquet "{path}" FOLDER'
        raise UsageError(f"manifest {path} is Parquet: {command} makes FOLDER/manifest.jsonl of it")
    others = None if _is_table(path) else _other_rows(path, tiers, audio_root, rejected)
    if others:
        yield from others
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
            try:
                entries = _decode_json(file.read())
            except (ValueError, RecursionError) as error:
                raise DataError(f"manifest {path} is not valid JSON: {error}") from None
            yield from enumerate(entries, 1)
        else:
            yield from _parse_json_lines(_lines(file, end), reject)


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES and os.path.isfile(path)


def _other_rows(
    path: Path, tiers: Sequence[str], audio_root: str | None, rejected: Rejections
) -> Iterator[tuple[int, dict]] | None:
    """The rows of what is no table: pairs, or files of annotations. None for other files."""
    from speech.data import pairs
    from speech.data.annotations import rows

    if texts := pairs.texts_of(str(path)):
        return pairs.paired_rows(str(path), texts, audio_root, rejected)
    if files := rows.files_of(path):
        return rows.annotated_rows(files, tiers, audio_root, rejected)
    return None


def has_lines(path: str) -> bool:
    """Whether a manifest is a table, whose rows people find by their lines."""
    if _is_table(Path(path)):
        return True
    from speech.data.annotations.rows import is_annotations

    return os.path.isfile(path) and not is_annotations(Path(path))


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
    header, as in joined files, holds for the lines that follow it. `read()`: all lines."""
    some_lines = [line for _, line in itertools.islice(read(), LOOKED_AT)]
    header, delimiter = _find_header([*filter(None, some_lines)])
    header_line = first[0] if header else 0
    if not header and not _is_row(first[1], delimiter, path, audio_root):
        labels = ", and it is no label of Audacity" if path.suffix.lower() == ".txt" else ""
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of"
            f" {', '.join(AUDIO_KEYS)}), as audio_file,text or audio_file|text do, and does not"
            f" begin with the name of audio that is there{labels}; it has:"
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
            if is_ljspeech and not row.get("normalized_text", "said"):
                row["normalized_text"] = row["text"]
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
    """The rows whose text does not seem to continue in the next line, which has one cell."""
    held = None
    for number, cells in rows:
        is_rest = len(cells) == 1 < len(header) and not AUDIO_SUFFIX.search(cells[0].strip())
        if held and is_rest and header[-1] not in NO_TEXTS and len(held[1]) == len(header):
            reject("the text may continue in the next line (such a text needs quotes)", held[0])
        elif held:
            yield held
        held = (number, cells)
    if held:
        yield held


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
    text's, if texts may have lost their quotes, else 0. Raises `ValueError`."""
    if len(cells) != len(header):
        more = "more" if len(cells) > len(header) else "fewer"
        raise ValueError(f"line has {more} cells than the header")
    if 0 < after < len(cells):
        text, following = cells[after - 1], cells[after]
        if following.startswith(" ") and not text.startswith(" "):
            raise ValueError(
                "the cell after the text begins with a space (a text with commas needs quotes)"
            )
    row = {}
    for place, (name, cell) in enumerate(zip(header, map(str.strip, cells), strict=True)):
        if name:
            row[name] = cell
        elif cell and place:  # (the first one is the index of pandas)
            row[f"column {place + 1}"] = cell
    if "label" in row:
        row["label"] = cell_label(row["label"])
    return row


def _has_csv_quotes(lines: Iterator[Line], delimiter: str, header: list[str]) -> bool:
    """Whether a table has cells in quotes as spreadsheets write them, with quotes inside doubled,
    around what needs them or around all cells of a column. Otherwise quotes are a part of the
    texts, as in Common Voice and LJSpeech."""
    needed = False
    of_excel = delimiter == "\t"  # which quotes cells with commas, too
    wrapped: set[int] = set()
    bare: set[int] = set()
    next(lines)
    for _, content, cells, fault in _quoted_rows(lines, delimiter, header):
        if fault:
            return False
        if '"' in content:
            special = [cell for cell in cells if re.search(rf'["\r\n{delimiter}]', cell)]
            if content.count('"') < sum(2 * cell.count('"') + 2 for cell in special):
                return False
            needed = needed or bool(special)
        for place, cell in enumerate(_plain_cells(content, delimiter)):
            if cell:
                is_wrapped = cell[0] == cell[-1] == '"'
                (wrapped if is_wrapped else bare).add(place)
                of_excel = of_excel and is_wrapped == bool(re.search('[,"]', cell.strip('"')))
    return needed or bool(wrapped and (of_excel or wrapped - bare))


def _split(
    lines: Iterator[Line], delimiter: str, quoted: bool, header: list[str], reject: Reject
) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each row. `quoted`: cells may be in quotes."""
    rows: Iterator[Row] = ((*line, _plain_cells(line[1], delimiter), "") for line in lines)
    if quoted:
        rows = _quoted_rows(lines, delimiter, header)
    for number, content, cells, fault in rows:
        if not content:
            reject(UNREADABLE, number)
        elif fault:
            reject("line is not valid CSV", number, fault)
        else:
            yield number, cells


def _plain_cells(content: str, delimiter: str) -> list[str]:
    return content.rstrip("\r\n").split(delimiter)


def _quoted_rows(lines: Iterator[Line], delimiter: str, header: list[str]) -> Iterator[Row]:
    """The rows of which cells may be in quotes, and continue in the next lines."""
    ahead: deque[Line] = deque()  # lines that were read in search of the end of a cell
    while (line := ahead.popleft() if ahead else next(lines, END)) is not END:
        number, content = line
        if '"' not in content:
            yield number, content, _plain_cells(content, delimiter), ""
            continue
        try:
            cells, more = _quoted_cells(content, lines, ahead, header, delimiter)
            content += "".join(ahead.popleft()[1] for _ in range(more))
            yield number, content, cells, ""
        except csv.Error as error:
            yield number, content, [], str(error)


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
    # Some write a space after each delimiter, also before quotes.
    spaced = all(cell.startswith(" ") for cell in _plain_cells(row, delimiter)[1:])
    cells = next(csv.reader([row], delimiter=delimiter, strict=True, skipinitialspace=spaced))
    if is_open or (more and not _is_whole(header, cells, delimiter)):
        raise csv.Error("a quote is not closed")
    return cells, more


def _is_whole(header: list[str], cells: list[str], delimiter: str) -> bool:
    """Whether cells of several lines are a row: what has line breaks has no file names."""
    if len(cells) != len(header):
        return False
    for name, cell in zip(header, cells, strict=True):
        parts = re.split(rf"[{delimiter}\r\n]", cell)
        if not re.search(r"[\r\n]", cell):
            continue
        if name in AUDIO_KEYS or any(AUDIO_SUFFIX.search(part.strip(' "')) for part in parts):
            return False
    return True


def _names_of_ljspeech(path: Path, delimiter: str, rows: list[list[str]]) -> list[str]:
    """The names of the columns of a table without a header that begins with `rows`: a name, a text
    and, perhaps, the text normalised, which most third cells must be. Else raises `DataError`."""
    if 2 * sum(len(cells) > 3 for cells in rows) > len(rows):
        raise DataError(
            f"manifest {path}: it has no header, and its rows have {len(rows[0])} cells. Add a"
            f" first line with their names, such as {delimiter.join(MANY_CELLS)}"
        )
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


def _find_header(lines: list[str]) -> tuple[list[str], str]:
    """(column names, delimiter) of a table that begins with these lines; no names if none in the
    first is an audio column. (Counting them is not enough: LJSpeech's sentences have more commas
    than bars, and a bar can be a mark of a text.)"""
    first = lines[0] if lines else ""
    header: list[str] = []
    tabs, bars = ({line.count(each) for line in lines} for each in "\t|")
    best = "\t" if "\t" in first and ("|" not in first or len(tabs) < len(bars)) else "|"
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
class Checks:
    """How a manifest is read and checked. Durations are in seconds."""

    min_duration: float = 0.1
    max_duration: float = 30.0
    audio_root: str | None = None  # base of audio paths; None: the manifest's folder
    cache_dir: Path | None = None  # of file headers and audio measures; None: no cache
    cache_audio: str | None = None  # folder of decoded audio; None: no cache
    use_chunking: bool = False
    join_segments: bool = True  # if `use_chunking`: as many as fit are one utterance
    drafted: bool = True  # whether texts that a recogniser wrote are used
    max_samples: int | None = None  # of the training set; None: all
    strict: bool = False  # raise `DataError` if anything is rejected
    seed: int = 1  # of the held-out part, and of `max_samples`
    held_out: tuple[str, ...] = ()  # `held_out_keys` of the part that an earlier run held out
    listen: bool = False  # decode all audio once, and check it
    skip_bad_audio: bool = False  # reject what cannot be decoded instead of raising `DataError`
    for_synthesis: bool = False  # if `listen`: trim silence at the ends, reject clipped clips
    needs: str = "text"  # what every row must have, or "label", which is read only then
    tiers: tuple[str, ...] = ()  # names or patterns of those that files of annotations give
    text_column: str | None = None  # of tables; None: the only one that is called like one


class Gathered:
    """The `Fields` of a manifest's rows in columns while it is read."""

    def __init__(self):
        self.audio = Codes()
        self.text = Strings()
        self.label = Strings()
        self.speaker = Codes()
        self.language = Codes()
        self.offset = array("d")
        self.duration = array("d")
        self.unit = array("d")  # NaN if it is not known
        self.channel = array("q")
        self.drafted = array("b")
        self.line = array("q")
        self._appends = [getattr(self, name).append for name in Fields._fields]

    def append(self, fields: Fields, line: int) -> None:
        for append, value in zip(self._appends, fields, strict=True):
            append(value)
        self.line.append(line)


def read_manifest(
    path: str,
    rejected: Rejections,
    normalise: Callable[[str], str],
    segments: Segments,
    checks: Checks,
) -> Corpus:
    """The rows of a manifest with normalised texts, before their audio is checked: `seconds` is
    NaN. Adds their segments to `segments`, and unusable rows to `rejected`, and says there which
    columns are used. Raises `UsageError` if the manifest or the audio root is missing, or if it is
    not clear which column has the texts, `DataError` if it is not a manifest or empty, if several
    files may be meant by a name, or if labels have a wrong type, or times an unknown unit."""
    if checks.audio_root and not os.path.isdir(checks.audio_root):
        raise UsageError(f"--audio_root {checks.audio_root}: no such folder")
    read = Gathered()
    table = Table(path, checks.needs, checks.text_column, segments.wanted)
    for number, row in parse(Path(path), rejected, checks.tiers, checks.audio_root):
        try:
            columns = table.columns_of(row)
            row, columns, parts = with_segments(row, columns, segments.wanted, normalise)
            fields = row_fields(row, checks.needs, columns)
        except TypeError as error:
            raise DataError(f"{path}:{number}: {error}") from None
        except ValueError as error:
            rejected.add(str(error), f"{path}:{number}")
            continue
        text, unit = normalise(fields.text), fields.unit or math.nan
        read.append(fields._replace(text=text, unit=unit), number)
        segments.append(*parts)
    if not read.line and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    said = [rejected.source or table.described()]
    folder = os.path.dirname(path)
    files = find_all(read.audio.names, folder, checks.audio_root)
    if places := _places(read.audio.names, files, checks.audio_root or folder):
        said.append(f"audio found in {places}")
    if _in_milliseconds(read, files, path):
        said.append(f"in milliseconds: {table.times()}")
    rejected.source = "; ".join(said)
    return _corpus(read, files, has_labels=checks.needs == "label")


def _corpus(read: Gathered, files: list[str], has_labels: bool) -> Corpus:
    """What was read as a corpus. `files`: the audio files by the numbers of their names. A row is a
    part of its file if it, or another row of the file, has an offset."""
    codes = np.array(read.audio.codes, dtype=np.int64)
    offsets, durations, units = map(np.array, (read.offset, read.duration, read.unit))
    durations = np.round(durations * units, 6)
    is_whole = ~np.isin(codes, codes[~np.isnan(offsets)])
    durations[is_whole & (durations < 0)] = np.nan
    return Corpus(
        paths=Strings(files[code] for code in read.audio.codes),
        texts=read.text,
        seconds=np.full(len(codes), np.nan),
        offsets=np.nan_to_num(np.round(offsets * units, 6)),
        durations=np.where(is_whole, np.nan, durations),
        stated=np.where(is_whole, durations, np.nan),
        channels=np.array(read.channel, dtype=np.int64),
        speakers=read.speaker,
        languages=read.language,
        lines=np.array(read.line),
        drafted=np.array(read.drafted, dtype=bool),
        labels=read.label if has_labels else None,
    )


def _in_milliseconds(read: Gathered, files: list[str], path: str) -> bool:
    """Whether the times whose columns do not name their unit are in milliseconds: most of them
    reach beyond their files in seconds. Fills in their units. Raises `DataError`."""
    offsets, durations, units = map(np.array, (read.offset, read.duration, read.unit))
    unknown = np.isnan(units)
    rows = np.flatnonzero(unknown & (durations > 0))
    in_milliseconds = False
    # Few are as long in seconds: the files are looked at only then.
    if len(rows) and np.median(durations[rows]) >= LEAST_MILLISECONDS:
        rows = rows[np.linspace(0, len(rows) - 1, min(PROBED, len(rows)), dtype=np.int64)]
        lengths, _ = probe_all([files[read.audio.codes[row]] for row in rows.tolist()], None)
        ends = (np.nan_to_num(offsets) + durations)[rows][lengths > 0]
        lengths = lengths[lengths > 0]
        in_milliseconds = bool(2 * (ends <= lengths + LATER).sum() < len(ends))
        if in_milliseconds and 2 * (ends / 1000 <= lengths + LATER).sum() < len(ends):
            worst = int(np.argmax(ends / lengths))
            raise DataError(
                f"manifest {path}: its times are neither seconds nor milliseconds: {ends[worst]:g}"
                f" in a file of {lengths[worst]:.2f} s; correct them, or rename their columns"
            )
    read.unit = np.where(unknown, 1e-3 if in_milliseconds else 1.0, units)
    return in_milliseconds


def _places(names: list[str], files: list[str], base: str) -> str:
    """The folders in which files were found if that is not where their names lead from `base`."""
    places = set()
    for name, file in zip(names, files, strict=True):
        folder = os.path.dirname(file)
        is_elsewhere = folder != os.path.dirname(os.path.join(base, name))
        if is_elsewhere and not os.path.isabs(name) and os.path.exists(file):
            places.add(os.path.relpath(folder or ".", base or "."))
    return named(f"{place}/" for place in sorted(places)) if places else ""
