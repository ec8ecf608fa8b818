"""Texts to take home: those of a table as files for ELAN, Praat, players and spreadsheets, one for
each recording, under the name that the recording has for its owner."""

import csv
import io
import itertools
import os
import re
import zipfile
from collections import Counter
from pathlib import Path

from common.errors import Failure, UsageError
from speech.data.annotations import adding, elan, writing
from speech.data.annotations.document import UTTERANCES
from speech.data.annotations.rows import audio_of, files_of
from speech.data.headers import probe
from webui import corrections
from webui.corrections import Table
from webui.places import CORRECTED, Places

FORMS = (".eaf", ".TextGrid", ".srt", ".csv")
COLUMNS = ("file", "begin", "end", "speaker", "text", "edited")


def taken(places: Places, table: Table, form: str) -> tuple[str, bytes]:
    """(name of the file, its content) of the latest texts of a table: a .csv of all, or a file for
    each recording, in a .zip if there are several. An .eaf from ELAN keeps all that it has. Texts
    that are left out of a training are in them. Raises `UsageError` and `DataError`."""
    if form not in FORMS:
        raise UsageError(f"the forms are {', '.join(FORMS)}")
    rows, _ = corrections.texts_of(table, places)
    source = _source(table.path)
    if form == ".eaf" and (copies := _copies(places, source, rows)):
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
        table_name = Path(places.own_name(source).replace("*", "all")).stem
        return f"{table_name}.csv", _csv({names[path]: part for path, part in timed.items()})
    files = {}
    for path, part in timed.items():
        own = Path(names[path])
        is_upload = places.own_name(path) != path.name
        audio = own if is_upload else path  # an upload lies beside its file at home
        target = audio.with_suffix(form)
        text = writing.content(target, part, audio, lengths[path])
        files[str(own.with_suffix(form))] = text.encode("utf-8", "replace")
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


def _source(path: Path) -> Path:
    """The .eaf, or the pattern of such, that somebody corrected in this table; else the table."""
    if made := re.fullmatch(rf"(.+\.eaf)(\..+)?\.{re.escape(CORRECTED)}", path.name, re.IGNORECASE):
        single = path.with_name(made[1])
        if single.is_file():
            return single
        if single.name == "all.eaf":
            return path.with_name("*.eaf")
    return path


def _copies(places: Places, source: Path, rows: list[dict]) -> dict[str, bytes]:
    """Copies of the .eaf that a table was made of, by their owner's names, with the texts in tiers
    beside all others. Nothing for other tables, nor for files that have no tiers but those of
    `writing`: they are written anew."""
    documents = {}
    for path in files_of(source):
        own = places.own_name(path)  # another one in each file of a folder
        part = [_timed(row) for row in rows if row.get("from", own) == own]
        if path.suffix.lower() != ".eaf" or not part:
            continue
        documents[path] = elan.read(path), part
    tiers = [tier for document, _ in documents.values() for tier in document.tiers]
    if all(tier.kind in writing.TYPES for tier in tiers):
        return {}
    copies = {}
    for path, (document, part) in documents.items():
        _, origin = audio_of(path, document.media)
        for row in part:
            row["start"] -= origin
            row["end"] -= origin
        tracks = [track for track in writing.tracks_of(part) if track.kind == UTTERANCES]
        copies[places.own_name(path)] = adding.with_tiers(path.read_bytes(), path, path, (), tracks)
    return copies


def _names(places: Places, paths) -> dict[Path, str]:
    """The recordings' own names, with their folders where several have one name; a number is added
    where that is not enough."""
    owned = {path: Path(places.own_name(path)) for path in paths}
    counts = Counter(own.stem.casefold() for own in owned.values())
    names: dict[Path, str] = {}
    taken = set()
    for path, own in owned.items():
        if counts[own.stem.casefold()] > 1 and own.name == path.name:
            own = Path(places.name(path))
        numbered = (own.with_stem(f"{own.stem}-{number}") for number in itertools.count(2))
        free = (each for each in itertools.chain([own], numbered) if _key(each) not in taken)
        names[path] = str(found := next(free))
        taken.add(_key(found))
    return names


def _key(name: Path) -> str:
    """A name without its suffix, as systems compare it that take no heed of capitals."""
    return str(name.with_suffix("")).casefold()


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
