"""Texts that somebody corrects: those of a table in --runs, and the file beside it that has them.

A corrected table is a manifest with a row for each text. Beside what every manifest has, a row has
its "number", which stays when others are split or joined; "edited", which is DONE or LEFT_OUT, when
somebody said so; and "from", if its table was several files of annotations. A text that is left out
of a training is kept as "left_out", and "text" is empty."""

import hashlib
import json
import math
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from common import records
from common.errors import DataError, UsageError, cannot_write, first_line
from common.files import TEXT_BYTES, write_text
from speech.data.annotations.rows import UnclearTier, files_of
from speech.data.columns import Rejections
from speech.data.fields import columns_of, row_fields
from speech.data.finding import find_all
from speech.data.manifest import parse
from webui.places import CORRECTED, DRAFT, Places

DONE, LEFT_OUT = "done", "left out"
PIECES = {"pieces": [{"start": (float, int), "end": (float, int), "text": str}]}  # of a draft
PARTS_OF_ROW = ("pieces", "words", "segments", "seconds", "tokens")  # of a draft, as it was heard
_writing = threading.Lock()  # the file is read, changed and written by one request at a time


def _is_time(value) -> bool:
    return isinstance(value, float | int) and 0 <= value < math.inf


FIELDS = {"text?": str, "edited?": {"", DONE, LEFT_OUT}, "offset?": _is_time, "duration?": _is_time}
CHANGE = {"numbers": [int], "known": [[str]], "rows": [FIELDS]}


@dataclass(frozen=True)
class Table:
    """A table of texts, or files of annotations by a pattern, of which `tier` is taken."""

    path: Path
    tier: str = ""

    @property
    def corrected(self) -> Path:
        """The file with its corrected texts: CORRECTED for a draft, t.csv.CORRECTED for any other.
        A corrected table is its own."""
        name = self.path.name
        if name == CORRECTED or name.endswith(f".{CORRECTED}"):
            return self.path
        if name == DRAFT:
            return self.path.with_name(CORRECTED)
        parts = [name.replace("*", "all")]
        if self.tier:
            digest = hashlib.blake2b(self.tier.encode(), digest_size=4).hexdigest()
            parts.append(re.sub(r"[^\w-]", "_", self.tier)[:40] + f"-{digest}")
        return self.path.with_name(".".join([*parts, CORRECTED]))

    @property
    def latest(self) -> Path:
        """The corrected texts if somebody has begun, otherwise the table."""
        return self.corrected if self.corrected.is_file() else self.path


def texts_of(table: Table, places: Places) -> tuple[list[dict], str]:
    """The rows of the corrected table, or those that it begins with; and what had to be left out,
    or "". Raises `UsageError` and `DataError`."""
    if table.corrected.is_file():
        return _read(table.corrected), ""
    rejected = Rejections()
    found = []
    files = files_of(table.path)
    for path in files if len(files) > 1 else [table.path]:
        try:
            rows = list(_rows(path, table, rejected))
        except UnclearTier:
            raise
        except (DataError, UsageError) as failure:
            if len(files) < 2:
                raise
            rejected.add("file of annotations cannot be used", first_line(failure))
            continue
        found += [{**row, "from": places.own_name(path)} if len(files) > 1 else row for row in rows]
    if not found:
        raise UsageError(f"{places.name(table.path)} has no texts to correct")
    reasons = [f"{reason} ({', '.join(where)})" for reason, where in rejected.examples.items()]
    return [{**row, "number": i} for i, row in enumerate(found)], "; ".join(reasons)


def replace(places: Places, table: Table, changes: list[dict]) -> list[dict]:
    """Makes changes and writes the corrected table; the table itself stays as it is. A change puts
    `rows`, of which fields that are missing stay, in the place of those with some `numbers`: one
    for one is an edit, two for one a split, one for two a join. It is refused where a text is none
    of those that its sender has `known` of it, unless it is a mark alone.

    Returns {"rows"} that are there now for each change, with "refused" where it was not made.
    Raises `UsageError` for a table that is only read, and for changes that are none, and
    `RunError`."""
    check_writable(places, table)
    with _writing:
        rows, _ = texts_of(table, places)
        answers = [_change(rows, change) for change in changes]
        if not all("refused" in each for each in answers):
            _write(table.corrected, rows)
    return answers


def check_writable(places: Places, table: Table) -> None:
    """Raises `UsageError` for a table that is only read."""
    if not table.path.is_relative_to(places.runs):
        raise UsageError(
            f"{places.name(table.path)}: the page only reads this folder; drop the table and its"
            " audio on the Data tab, and correct the copy"
        )


def _change(rows: list[dict], change: dict) -> dict:
    if records.mismatch(change, CHANGE, "") or not change["numbers"] or not change["rows"]:
        raise UsageError("this is no change of texts")
    places = {row["number"]: place for place, row in enumerate(rows)}
    numbers = change["numbers"]
    if not all(number in places for number in numbers):
        return {"rows": [], "refused": True}
    start = places[numbers[0]]
    old = rows[start : start + len(numbers)]
    texts = [set(map(_plain, known)) for known in change["known"]]
    is_known = [row["number"] for row in old] == numbers and len(texts) == len(old)
    if is_known and any(row.keys() - {"edited"} for row in change["rows"]):
        is_known = all(text_in(row) in known for row, known in zip(old, texts, strict=True))
    if not is_known:
        return {"rows": old, "refused": True}
    new = [_edited(old[0], row) for row in change["rows"]]
    free = max(places) + 1
    for number, row in enumerate(new[1:], free):
        row["number"] = number
    rows[start : start + len(numbers)] = new
    return {"rows": new}


def _edited(row: dict, change: dict) -> dict:
    text = _plain(change.get("text", text_in(row)))
    edited = change.get("edited", row.get("edited", ""))
    row = {key: value for key, value in row.items() if key not in ("edited", "left_out")}
    row |= {key: round(change[key], 3) for key in ("offset", "duration") if key in change}
    row["text"] = "" if edited == LEFT_OUT else text
    if edited:
        row["edited"] = edited
    if edited == LEFT_OUT:
        row["left_out"] = text
    return row


def text_in(row: dict) -> str:
    """The text of a row of a corrected table, also if it is left out, with single spaces."""
    return _plain(row.get("left_out", row["text"]))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _rows(path: Path, table: Table, rejected: Rejections):
    """The texts of a file as rows of the corrected table, without their numbers."""
    if path.is_file() and path.stat().st_size > TEXT_BYTES:
        raise UsageError(f"{path.name} is too large to be corrected here: correct the file itself")
    tiers = [table.tier] if table.tier else []
    read = []
    for number, row in parse(path, rejected, tiers):
        try:
            read.append((row, row_fields(row, "")))
        except ValueError as error:
            rejected.add(str(error), f"line {number}")
    audio = find_all([fields.audio for _, fields in read], str(path.parent))
    for (row, fields), name in zip(read, audio, strict=True):
        columns = columns_of(tuple(row))
        if len(columns.texts) > 1 and not columns.text:
            names = ", ".join(columns.texts)
            raise UsageError(f"{path.name} has several columns of texts: {names}; leave one")
        if row.get("segments") and not _pieces(row):
            raise UsageError(f"{path.name} has texts of segments: correct them in the file itself")
        used = {*filter(None, columns[:1] + columns[2:8]), *columns.texts, *PARTS_OF_ROW}
        others = {key: value for key, value in row.items() if key and key not in used}
        for name_of in ("speaker", "language", "channel"):
            if key := getattr(columns, name_of):
                others[key] = row[key]
        whole = {"audio_filepath": os.path.relpath(name, table.corrected.parent), "text": ""}
        for piece in _pieces(row):
            times = {"offset": piece["start"], "duration": round(piece["end"] - piece["start"], 3)}
            heard = {key: piece[key] for key in ("confidence",) if key in piece}
            yield {**whole, "text": piece["text"], **times, **others, **heard}
        if not _pieces(row):
            unit = fields.unit or 1.0
            times = {"offset": fields.offset, "duration": fields.duration}
            times = {key: round(time * unit, 6) for key, time in times.items() if time == time}
            yield {**whole, "text": fields.text, **times, **others}


def _pieces(row: dict) -> list[dict]:
    """The timed pieces of a transcript's row."""
    pieces = row.get("pieces") if "file" in row else None
    return [] if records.mismatch({"pieces": pieces}, PIECES, "") else pieces


def _read(path: Path) -> list[dict]:
    """The rows of a corrected table. One of an earlier version has no numbers yet."""
    with open(path, encoding="utf-8") as file:
        try:
            rows = [json.loads(line) for line in file]
        except ValueError as error:
            raise DataError(f"{path}: it is damaged: {error}") from None
    if all(isinstance(row, dict) and "number" in row and "text" in row for row in rows):
        return rows
    found = _rows(path, Table(path), Rejections())
    return [{**row, "number": number} for number, row in enumerate(found)]


def _write(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    try:
        write_text(path, "".join(lines), durable=True)
    except OSError as error:
        raise cannot_write(path, error, "--runs") from None
