"""Dropped files: audio and a table of its texts or files of annotations are copied into a new
folder under names of our own."""

import json
import shutil
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote

from common.errors import Failure, UsageError
from common.files import TEXT_BYTES
from speech.data.annotations.rows import READERS, is_annotations
from speech.data.columns import Rejections, printable
from speech.data.fields import AUDIO_KEYS
from speech.data.headers import audio_suffix
from speech.data.manifest import parse

MANIFEST = "manifest.jsonl"  # of an upload
NAMES = ".names.json"  # of an upload: {copy: the file's own name}
NOT_USED = "not_used.txt"  # of an upload: a table of what was left out, as `Rejections` prints it
NOT_AUDIO = "file is not audio that can be read here"
REPLACED = "a later file of this name is used"
TABLE_SUFFIXES = {".json", ".jsonl", ".csv", ".tsv"}  # beside audio files
START = 1 << 16  # bytes of a file that tell its kind


@dataclass(frozen=True)
class Sorted:
    """Dropped files by name: tables, files of annotations, and for all others the names of their
    copies: "upload-0001.wav" or, for what is not audio, ""."""

    tables: dict[str, Path] = field(default_factory=dict)
    annotations: dict[str, Path] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of the copies, as their owner knows them

    def annotated(self, name: str, media: list[str]) -> str:
        """The audio that the file of annotations `name` is for, by the names of its `media` or by
        its own. Raises `ValueError` if there is none."""
        stem = Path(name).stem
        stems = (stem, Path(stem).stem)  # of a.wav, or of talk.wav for talk.en.srt
        same = [audio for audio in self.copies if Path(audio).stem in stems]
        for audio in (*map(name_of, media), *same):
            if self.copies.get(audio):
                return audio
        raise ValueError("its audio was not uploaded")


def fill(folder: Path, files: list[str], names: list[str]) -> str:
    """Copies the audio among `files`, whose names were `names`, and writes the manifest or copies
    the files of annotations. Returns the manifest's name or a pattern, "" without one. Raises
    `UsageError` if nothing can be used."""
    rejected = Rejections()
    found = _sort(folder, list(zip(map(Path, files), map(name_of, names), strict=True)), rejected)
    if len(found.tables) > 1:
        several = ", ".join(map(printable, found.tables))
        raise UsageError(f"these are several tables: {several}; give one for the audio files")
    count = sum(map(bool, found.copies.values()))
    manifest = ""
    if found.tables:
        count = _write_manifest(found, folder / MANIFEST, rejected)
        manifest = MANIFEST
        for name in found.annotations:
            rejected.add("the table is used, and not this file", printable(name))
    elif found.annotations:
        manifest = _copy_annotations(found, folder, rejected)
        count = len(manifest)
    else:
        for name in (name for name, copy in found.copies.items() if not copy):
            rejected.add(NOT_AUDIO, printable(name))
    (folder / NAMES).write_text(json.dumps(found.names), encoding="ascii")
    (folder / NOT_USED).write_text(rejected.table(), encoding="utf-8", errors="backslashreplace")
    if not count:
        reasons = "; ".join(
            f"{reason} ({', '.join(examples)})" for reason, examples in rejected.examples.items()
        )
        raise UsageError(f"nothing of this can be used: {reasons or 'there is no audio file'}")
    return manifest


def is_table(file: str, name: str) -> bool:
    """Whether a dropped file may have texts: it is a table, or has annotations."""
    suffix = Path(name).suffix.lower()
    return suffix in TABLE_SUFFIXES or is_annotations(Path(file), suffix)


def _sort(folder: Path, dropped: list[tuple[Path, str]], rejected: Rejections) -> Sorted:
    """Copies the audio into the folder. Of several files with one name, the last one is used: it
    was dropped to replace the others, which are listed."""
    by_name: dict[str, Path] = {}
    for file, name in dropped:
        if name in by_name:
            rejected.add(REPLACED, printable(name))
        by_name[name] = file
    found = Sorted()
    for number, (name, file) in enumerate(by_name.items(), 1):
        suffix = audio_suffix(file)
        if suffix:
            # Recorders call files 0001.wav, and an .eaf names its recording.
            found.copies[name] = f"upload-{number:04}{suffix}"
            found.names[found.copies[name]] = name
            shutil.copyfile(file, folder / found.copies[name])
        elif Path(name).suffix.lower() in TABLE_SUFFIXES:
            found.tables[name] = file
        elif is_annotations(file, Path(name).suffix):
            found.annotations[name] = file
        else:
            found.copies[name] = ""
    return found


def _write_manifest(found: Sorted, path: Path, rejected: Rejections) -> int:
    """Writes the rows of the only table in `found` whose audio is there. Returns their number.
    Raises `UsageError` if it is not a table."""
    ((name, table),) = found.tables.items()
    name = printable(name)
    if table.stat().st_size > TEXT_BYTES:
        raise UsageError(f"{name}: a table of over {TEXT_BYTES >> 20} MiB is not taken")
    unused = dict(found.copies)
    count = 0
    try:
        with open(path, "w", encoding="ascii") as file:
            for line, row in parse(table, rejected):
                key = _audio_key(row)
                if not key:
                    rejected.add("no audio path", f"{table}:{line}")
                    continue
                audio = name_of(row[key])
                unused.pop(audio, None)
                copy = found.copies.get(audio)
                if not copy:
                    reason = "file was not uploaded" if copy is None else NOT_AUDIO
                    rejected.add(reason, f"{table}:{line}: {audio}")
                    continue
                others = {field: value for field, value in row.items() if field not in AUDIO_KEYS}
                file.write(json.dumps({key: copy, **others}) + "\n")
                count += 1
    except Failure as failure:
        raise UsageError(str(failure).replace(str(table), name)) from None
    _list_unused(unused, "the table has no line for this file", rejected)
    for examples in rejected.examples.values():
        examples[:] = [example.replace(str(table), name) for example in examples]
    return count


def _copy_annotations(found: Sorted, folder: Path, rejected: Rejections) -> str:
    """Copies the files of annotations beside their audio, under its names. Returns a name or a
    pattern that stands for them, "" for none. Raises `UsageError` if they are of several kinds."""
    kinds = {Path(name).suffix.lower() for name in found.annotations}
    if len(kinds) > 1:
        several = ", ".join(map(printable, found.annotations))
        raise UsageError(f"these are annotations in several formats: {several}; give one of them")
    (suffix,) = kinds
    unused = dict(found.copies)
    copied = []
    for number, (name, file) in enumerate(found.annotations.items()):
        try:
            media = [each.path for each in READERS[suffix](file).media]
            audio = found.annotated(name, [*media, *map(unquote, media)])
        except (Failure, ValueError) as error:
            reason = str(error).replace(str(file), printable(name))
            rejected.add("file of annotations cannot be used", f"{printable(name)}: {reason}")
            continue
        unused.pop(audio, None)
        copied.append(f"{Path(found.copies[audio]).stem}.{number}{suffix}")
        found.names[copied[-1]] = name
        shutil.copyfile(file, folder / copied[-1])
    _list_unused(unused, "there are no annotations of this file", rejected)
    if len(copied) > 1:
        return f"*{suffix}"
    return copied[0] if copied else ""


def _list_unused(unused: dict[str, str], reason: str, rejected: Rejections) -> None:
    for name, copy in unused.items():
        rejected.add(reason if copy else NOT_AUDIO, printable(name))


def _audio_key(row) -> str:
    """The key of a manifest's row that names its audio, "" if there is none."""
    if isinstance(row, dict):
        for key in AUDIO_KEYS:
            if isinstance(row.get(key), str) and row[key]:
                return key
    return ""


def name_of(path: str) -> str:
    """The last part of a path of any system, as it is compared, with umlauts in one character."""
    return PureWindowsPath(unicodedata.normalize("NFC", path)).name
