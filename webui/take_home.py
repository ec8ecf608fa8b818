"""Texts to take home: those of a table as files for ELAN, Praat, players and spreadsheets, one for
each recording, under the name that the recording has for its owner."""

import csv
import io
import os
import zipfile
from pathlib import Path

from common.errors import Failure, UsageError
from speech.data.annotations import adding, elan, writing
from speech.data.annotations.document import OWN_TIER, UTTERANCES
from speech.data.annotations.rows import audio_of, files_of
from speech.data.headers import probe
from webui import corrections
from webui.corrections import Table
from webui.places import Places

FORMS = (".eaf", ".TextGrid", ".srt", ".csv")
COLUMNS = ("file", "begin", "end", "speaker", "text", "edited")


def taken(places: Places, table: Table, form: str) -> tuple[str, bytes]:
    """(name of the file, its content) of the latest texts of a table: a .csv of all, or a file for
    each recording, in a .zip if there are several. An .eaf from ELAN keeps all that it has. Texts
    that are left out of a training are in them. Raises `UsageError` and `DataError`."""
    if form not in FORMS:
        raise UsageError(f"the forms are {', '.join(FORMS)}")
    rows, _ = corrections.texts_of(table, places)
    if form == ".eaf" and (copies := _copies(places, table, rows)):
        return _packed(copies, form)
    tapes: dict[Path, list[dict]] = {}
    for row in rows:
        path = table.corrected.parent / row["audio_filepath"]
        tapes.setdefault(Path(os.path.normpath(path)), []).append(row)
    names = _names(places, tapes)
    timed = {path: list(map(_timed, part)) for path, part in tapes.items()}
    lengths = {path: _length(places, path) for path in tapes}
    for path, part in timed.items():
        for row in part:
            row["end"] = lengths[path] if row["end"] is None else row["end"]
    if form == ".csv":
        table_name = Path(places.own_name(table.path).replace("*", "all")).stem
        return f"{table_name}.csv", _csv({names[path]: part for path, part in timed.items()})
    files = {}
    for path, part in timed.items():
        own = Path(names[path])
        audio = path if own.name == path.name else own  # an upload lies beside its file at home
        target = audio.with_suffix(form)
        text = writing.content(target, part, audio, lengths[path])
        files[own.with_suffix(form).name] = text.encode("utf-8", "replace")
    return _packed(files, form)


def _packed(files: dict[str, bytes], form: str) -> tuple[str, bytes]:
    """The only one of these files, or all in a .zip."""
    if len(files) == 1:
        return next(iter(files.items()))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            archive.writestr(name, file)
    return f"texts{form}.zip", content.getvalue()


def _copies(places: Places, table: Table, rows: list[dict]) -> dict[str, bytes]:
    """Copies of the .eaf that a table consists of, by their owner's names, with the texts in tiers
    beside all others. Nothing for other tables, nor for files that `writing` made: they have the
    texts in tiers of such names, and are written anew."""
    copies = {}
    for path in files_of(table.path):
        own = places.own_name(path)  # another one in each file of a folder
        part = [_timed(row) for row in rows if row.get("from", own) == own]
        if path.suffix.lower() != ".eaf" or not part:
            continue
        document = elan.read(path)
        if any(OWN_TIER.fullmatch(tier.name) for tier in document.tiers):
            return {}
        _, origin = audio_of(path, document.media)
        for row in part:
            row["start"] -= origin
            row["end"] -= origin
        tracks = [track for track in writing.tracks_of(part) if track.kind == UTTERANCES]
        copies[own] = adding.with_tiers(path.read_bytes(), path, path, (), tracks)
    return copies


def _names(places: Places, paths) -> dict[Path, str]:
    """The recordings' own names; a number is added where several have one."""
    names: dict[Path, str] = {}
    stems = set()
    for path in paths:
        own = Path(places.own_name(path))
        stem, number = own.stem, 1
        while stem.casefold() in stems:
            number += 1
            stem = f"{own.stem}-{number}"
        stems.add(stem.casefold())
        names[path] = own.with_stem(stem).name if number > 1 else own.name
    return names


def _timed(row: dict) -> dict:
    """A row as `writing` takes it, whose "end" is None if it is that of its recording."""
    start = row.get("offset", 0.0)
    end = start + row["duration"] if "duration" in row else None
    timed = {"start": start, "end": end, "text": corrections.text_in(row)}
    speaker = str(row.get("speaker") or "")
    sure = row.get("confidence")
    judged = {"confidence": sure} if isinstance(sure, float) and 0 <= sure <= 1 else {}
    return {**timed, "speaker": speaker, "edited": row.get("edited", ""), **judged}


def _length(places: Places, path: Path) -> float:
    """Its seconds; 0 if it cannot be read: its texts can be taken home all the same."""
    try:
        seconds, fault = probe(str(places.file(path)))
    except Failure:
        return 0.0
    return 0.0 if fault else seconds


def _csv(tapes: dict[str, list[dict]]) -> bytes:
    content = io.StringIO()
    writer = csv.writer(content)
    writer.writerow(COLUMNS)
    for name, rows in tapes.items():
        for row in rows:
            times = (f"{row['start']:.3f}", f"{row['end']:.3f}")
            writer.writerow([name, *times, row["speaker"], row["text"], row["edited"]])
    return content.getvalue().encode("utf-8-sig", "replace")  # as spreadsheets know UTF-8
