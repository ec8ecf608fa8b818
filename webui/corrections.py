"""Texts that somebody corrects: those of a table in --runs, and the file beside it with them."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from common import records
from common.errors import UsageError, cannot_write
from common.files import TEXT_BYTES, write_text
from speech.data.columns import Rejections
from speech.data.fields import TEXT_KEYS, Fields, columns_of, row_fields
from speech.data.finding import find_all
from speech.data.manifest import parse
from webui.places import CORRECTED, DRAFT, Places

# A row with timed pieces, as a schema of `records.mismatch`.
PIECES = {"pieces": [{"start": (float, int), "end": (float, int), "text": str}]}


@dataclass(frozen=True)
class Text:
    """A text of a table, and what it is the text of: a part of the file `path`, in seconds. `row`,
    and `piece` of a transcript that has several (or None), say where it stands."""

    text: str
    path: str
    offset: float
    seconds: float | None
    row: int
    piece: int | None


def texts_of(table: Path) -> list[Text]:
    """All texts of a table. Raises `UsageError` and `DataError`."""
    found = []
    rows = _rows(table)
    paths = find_all([fields.audio for _, fields in rows], str(table.parent))
    paths = [os.path.normpath(path) for path in paths]  # --transcribe writes ../audio/a.wav
    for number, ((row, fields), path) in enumerate(zip(rows, paths, strict=True)):
        for piece, part in enumerate(_pieces(row)):
            seconds = part["end"] - part["start"]
            found.append(Text(part["text"], path, part["start"], seconds, number, piece))
        if not _pieces(row):
            seconds = None if math.isnan(fields.duration) else fields.duration
            offset = 0.0 if math.isnan(fields.offset) else fields.offset
            found.append(Text(fields.text, path, offset, seconds, number, None))
    return found


def begun(table: Path) -> Path:
    """The table to correct: the corrected one beside it if somebody has begun."""
    beside = corrected(table)
    return beside if beside.is_file() else table


def corrected(table: Path) -> Path:
    """The file beside a table that has its corrected texts: CORRECTED for a draft, t.csv.CORRECTED
    for any other. A corrected table is its own."""
    if table.name == CORRECTED or table.name.endswith(f".{CORRECTED}"):
        return table
    return table.with_name(CORRECTED if table.name == DRAFT else f"{table.name}.{CORRECTED}")


def correct(places: Places, table: Path, changes: list[tuple[Text, str]]) -> Path:
    """Writes the table with other texts as `corrected` beside it; the table stays as it is. Returns
    this file. Raises `UsageError` for a table that is only read or has changed meanwhile, and
    `RunError`."""
    if not table.is_relative_to(places.runs):
        raise UsageError(
            f"{places.name(table)}: the page only reads this folder; drop the table and its audio"
            " above, and correct the copy"
        )
    found = set(texts_of(table))
    if begun(table) != table or not found.issuperset(before for before, _ in changes):
        raise UsageError(f"{places.name(table)} was changed meanwhile: show its texts again")
    rows = [row for row, _ in _rows(table)]
    for before, text in changes:
        row = rows[before.row]
        text = " ".join(text.split())
        if before.piece is None:
            row[columns_of(tuple(row)).text or TEXT_KEYS[0]] = text
        else:
            row["pieces"][before.piece]["text"] = text
            for times in ("words", "segments"):  # of the text that was there before
                row.pop(times, None)
            row["text"] = " ".join(piece["text"] for piece in row["pieces"] if piece["text"])
    target = corrected(table)
    try:
        write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise cannot_write(target, error, "--runs") from None
    return target


def _rows(table: Path) -> list[tuple[dict, Fields]]:
    if table.stat().st_size > TEXT_BYTES:
        raise UsageError(f"{table.name} is too large to be corrected here: correct the file itself")
    rejected = Rejections()
    try:
        found = [(row, row_fields(row, "")) for _, row in parse(table, rejected)]
    except ValueError as error:
        raise UsageError(f"{table.name} cannot be corrected here: {error}") from None
    if any(row.get("segments") and not _pieces(row) for row, _ in found):
        raise UsageError(f"{table.name} has texts of segments: correct them in the file itself")
    if rejected.total:
        raise UsageError(f"{table.name} cannot be corrected here: it has damaged lines")
    return found


def _pieces(row: dict) -> list[dict]:
    """The timed pieces of a transcript's row."""
    pieces = row.get("pieces") if "file" in row else None
    return [] if records.mismatch({"pieces": pieces}, PIECES, "") else pieces
