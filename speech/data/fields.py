"""What the columns of a manifest's rows hold: audio, texts, labels, speakers, times and their
units, segments. Where a table can be read in two ways, the command asks."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

from common.errors import UsageError
from speech.data.columns import printable
from speech.data.finding import comparable

# The names of columns by what they hold: the first that a row has, whatever its cell holds.
AUDIO_KEYS = (
    "audio_filepath audio_file file_name path audio wav filename wav_filename file id".split()
)
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("target_lang", "lang", "language", "locale")
DRAFTED = "drafted"  # true: a recogniser wrote the text, see `speech.data.drafts`
CHANNEL_KEYS = ("channel_selector", "channel")
# Those of times, also with a unit, such as start_ms or "Start Time [s]".
START_KEYS = ("offset", "start", "starttime", "begin", "begintime", "segmentstart", "tmin")
END_KEYS = ("end", "endtime", "stop", "stoptime", "segmentend", "tmax")
DURATION_KEYS = ("duration", "dur")
UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3}
IN_SECONDS = re.compile(r" - (hh:mm:ss\.ms|ss\.msec)$")  # of ELAN's columns
MOST_COLUMNS = 30  # that a line names
SAMPLE = 60  # characters of a cell in a question
SEGMENT_OVERLAP = 1e-3  # seconds by which the rounded times of consecutive segments may overlap
NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
TIMES = ("start", "end", "duration")
EMPTY = -1.0  # the duration of a row in a table with columns of times, whose cells are empty
CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:[.,]\d+)?)", re.ASCII)  # 01:02:03.45, 2:03


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
    """The fields of a row that are used."""

    audio: str
    text: str
    label: str  # in JSON
    offset: float  # NaN: the row does not say that it is a part
    duration: float  # NaN: to the end of the file; EMPTY
    unit: float | None  # of both times, in seconds; None: they are in seconds or milliseconds
    channel: int  # -1: the average
    speaker: str
    language: str
    drafted: bool  # by a recogniser


class Table:
    """The columns of a manifest's rows, and which are used. `chunked`: segments are, too."""

    def __init__(self, path: str, needs: str, text_column: str | None, chunked: bool):
        self.path = path
        self.text_column = text_column
        self.also = {"pieces", DRAFTED, needs, *(["segments"] if chunked else [])}
        self.counts: dict[tuple[str, ...], int] = {}
        self.columns: dict[tuple[str, ...], Columns] = {}

    def columns_of(self, row) -> Columns:
        """The columns of a row, which is counted. Raises `UsageError`, `ValueError` for no row."""
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
            flag = f"--text_column {self.text_column}"
            raise UsageError(f"{flag}: manifest {self.path} has no such column, but {named(every)}")
        rest = [name for name in every if name not in used]
        return f"columns used: {named(used.values())}; not used: {named(rest)}"

    def times(self) -> str:
        """The columns of times, for messages."""
        names = [getattr(each, name) for each in self.columns.values() for name in TIMES]
        return named(dict.fromkeys(filter(None, names)))


def named(names: Iterable[str]) -> str:
    names = [printable(name[:SAMPLE]) for name in names]
    more = [f"{len(names) - MOST_COLUMNS} more"] if len(names) > MOST_COLUMNS else []
    return ", ".join([*names[:MOST_COLUMNS], *more]) or "none"


def columns_of(keys: Sequence[str]) -> Columns:
    """The columns that are used of a row with these, if --text_column names none. Raises
    `ValueError` for times in different units."""

    def first(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in keys), None)

    timed: dict[str, tuple[str, float | None]] = {}  # by their names without unit
    shown = {key: IN_SECONDS.sub("", key.lower()) for key in reversed(keys)}
    plain = {re.sub(r"[\W_]", "", name): key for key, name in shown.items()}
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
    units = {unit for name, unit in (start, end, duration) if name}
    if len(units) > 1:
        used = " and ".join(name for name, _ in (start, end, duration) if name)
        raise ValueError(
            f"{used} have different units: write the times in one, as start_ms, end_ms"
        )
    return Columns(
        audio=first(AUDIO_KEYS),
        texts=tuple(name for name in TEXT_KEYS if name in keys),
        speaker=first(SPEAKER_KEYS),
        language=first(LANGUAGE_KEYS),
        channel=first(CHANNEL_KEYS),
        start=start[0],
        end=end[0],
        duration=duration[0],
        unit=units.pop() if units else None,
    )


def row_fields(row, needs: str, columns: Columns | None = None) -> Fields:
    """The fields of a row. `needs`: "text" or "label" if it must have one, or "". Raises
    `ValueError` that says what is wrong with the row, `TypeError` for a label of a wrong type: then
    the whole table is made for something else."""
    if not isinstance(row, dict):
        raise ValueError("line is not an object")
    columns = columns or columns_of(tuple(row))
    audio = row.get(columns.audio)
    if isinstance(audio, dict):  # as Hugging Face's datasets have it
        audio = audio.get("path")
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
    times = offset, duration, columns.unit
    drafted = str(row.get(DRAFTED)).strip().lower() == "true"  # as spreadsheets write it, too
    return Fields(audio.strip(), text, label, *times, channel, speaker, language, drafted)


def _times(row: dict, columns: Columns) -> tuple[float, float]:
    """(offset, duration) of a row in its unit, NaN where it has none, or EMPTY. Raises
    `ValueError`."""
    names = (getattr(columns, name) for name in TIMES)
    start, end, duration = (_time(row, name, columns.unit) for name in names)
    if columns.end:
        if math.isnan(start) != math.isnan(end):
            raise ValueError(f"only one of {columns.start} and {columns.end} is given")
        if end <= start:
            raise ValueError(f"{columns.end} is not after {columns.start}")
        duration = end - start
    if columns.start and row.get(columns.start) == "" and math.isnan(duration):
        duration = EMPTY
    return start, duration


def _time(row: dict, name: str | None, unit: float | None) -> float:
    """The time in a column of this unit, as a number or on a clock, NaN without one. Raises
    `ValueError`."""
    value = row.get(name)
    if value in (None, ""):
        return math.nan
    if isinstance(value, str):
        value = value.strip()
        if (clock := CLOCK.fullmatch(value)) and unit in (None, 1.0):
            hours, minutes, seconds = (
                float((part or "0").replace(",", ".")) for part in clock.groups()
            )
            value = 3600 * hours + 60 * minutes + seconds
        elif re.fullmatch(r"-?\d+,\d+", value, re.ASCII):  # where numbers have commas
            value = value.replace(",", ".")
        elif "_" in value:  # which Python takes as a part of a number
            value = None
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
    """The label in JSON: a number, a string, or a list. Raises `ValueError` or `TypeError`."""
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


def cell_label(cell: str) -> int | float | str:
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


def with_segments(
    row: dict, columns: Columns, wanted: bool, normalise: Callable[[str], str]
) -> tuple[dict, Columns, tuple[bool, list[tuple[float, float, str]], str]]:
    """(row, its columns, what `Segments.append` takes: whether it has segments, these with
    normalised texts, why they cannot be used).

    Segments are parsed if they are `wanted`, if the row has no other text, which is theirs then, or
    if somebody may have corrected them: a transcript's "pieces", without those in which nothing was
    heard. Raises `ValueError` if they cannot be used, and the row has no other text."""
    is_transcript = "pieces" in row
    parts = row.get("segments")
    if "file" in row and isinstance(row.get("pieces"), list):
        parts = [p for p in row["pieces"] if not (isinstance(p, dict) and p.get("text") == "")]
    if not parts:
        return row, columns, (False, [], "")
    if not wanted and columns.text and not is_transcript:
        return row, columns, (True, [], "")
    try:
        segments = [(start, stop, normalise(text)) for start, stop, text in _segments(parts)]
    except ValueError as error:
        if not columns.text:
            raise
        return row, columns, (True, [], str(error))
    if not columns.text or is_transcript:
        text = " ".join(text for *_, text in segments if text)
        before = str(row.get(columns.text))
        if not columns.text or "".join(before.split()) != "".join(text.split()):
            row = {**row, "text": text}
            columns = columns._replace(texts=("text",))
    return row, columns, (True, segments, "")


def _segments(rows) -> list[tuple[float, float, str]]:
    """(start, stop, text) of each of a row's "segments", in seconds, rounded to microseconds, in
    order and without overlap. Raises `ValueError` that says what is wrong."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("segments are not a list of objects")
    segments = []
    end = 0.0
    for row in rows:
        columns = columns_of(tuple(row))
        if len(columns.texts) > 1:
            raise ValueError(f"a segment has several texts: {', '.join(columns.texts)}")
        wrong = "a segment's text is not a string"
        text = _text(row, columns.text, "a segment has no text field", wrong)
        check_encoding(text)
        start, stop = _segment_times(row, columns)
        if start < end - SEGMENT_OVERLAP or stop <= end:
            raise ValueError("segments overlap, or are not in the order of time")
        segments.append((max(start, end), stop, text))
        end = stop
    return segments


def _segment_times(row: dict, columns: Columns) -> tuple[float, float]:
    """Start and end of a segment in seconds. Raises `ValueError` that says what is wrong."""
    try:
        start, duration = _times(row, columns)
    except ValueError as error:
        raise ValueError(f"segment: {error}") from None
    unit = columns.unit or 1.0
    stop = round((start + duration) * unit, 6)
    start = round(start * unit, 6)
    if not stop > start:
        raise ValueError("a segment has no times (start and end, or offset and duration)")
    return start, stop
