"""Dropped files: audio and a table of its texts or files of annotations, alone, in folders or in a
.zip, are copied into a new folder under names of our own."""

import errno
import json
import shutil
import unicodedata
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote

from common.errors import Failure, UsageError, first_line
from common.files import TEXT_BYTES, require_file
from speech.data.annotations.rows import READERS, is_annotations
from speech.data.columns import Rejections, printable
from speech.data.fields import AUDIO_KEYS
from speech.data.headers import audio_suffix
from speech.data.manifest import parse

FILE_BYTES = 200 << 20  # of a dropped file, and of a file in a .zip
ZIP_BYTES = 2 << 30  # of a .zip
ZIP_FILES = 100_000  # in it
MANIFEST = "manifest.jsonl"  # of an upload
UPLOADED_AS = "uploaded_as"  # the key in its rows of a file's own name
NOT_USED = "not_used.txt"  # of an upload: a table of what was left out, as `Rejections` prints it
NOT_AUDIO = "file is not audio that can be read here"
REPLACED = "a later file of this name is used"
UNPACKED = "unpacked"  # folder of the files of a .zip, until they are copied
TABLE_SUFFIXES = {".json", ".jsonl", ".csv", ".tsv"}  # beside audio files
START = 1 << 16  # bytes of a file that tell its kind

Parts = tuple[str, ...]  # of a path, as a table or a browser writes it


@dataclass(frozen=True)
class Sorted:
    """Dropped files: the tables and the files of annotations by the parts of their names, and all
    others by the last part, then by all parts, with the names of their copies: "0001.wav" or, for
    what is not audio, ""."""

    tables: dict[Parts, Path] = field(default_factory=dict)
    annotations: dict[Parts, Path] = field(default_factory=dict)
    copies: dict[str, dict[Parts, str]] = field(default_factory=dict)

    def nearest(self, name: str) -> Parts:
        """The dropped file that a table calls `name`: of all with its last part, the one with the
        most folders in common. Raises `ValueError` if there is none, or if several are as near."""
        wanted = parts_of(name)[::-1]
        shared = {parts: _shared(parts[::-1], wanted) for parts in self.copies.get(wanted[0], ())}
        found = [parts for parts, count in shared.items() if count == max(shared.values())]
        if not found:
            raise ValueError("file was not uploaded")
        if len(found) > 1:
            raise ValueError("several uploaded files have this name")
        if not self.copies[wanted[0]][found[0]]:
            raise ValueError(NOT_AUDIO)
        return found[0]

    def annotated(self, parts: Parts, media: list[str]) -> Parts:
        """The audio of the file of annotations `parts`, by the names of its `media` or by its own.
        Raises `ValueError` if there is none."""
        for name in media:
            with suppress(ValueError):
                return self.nearest(name)
        stem = Path(parts[-1]).stem
        stems = (stem, Path(stem).stem)  # of a.wav, or of talk.wav for talk.en.srt
        same = [
            each for each, copy in self.audio().items() if copy and Path(each[-1]).stem in stems
        ]
        if not same:
            raise ValueError("its audio was not uploaded")
        return max(same, key=lambda each: _shared(each[-2::-1], parts[-2::-1]))

    def audio(self) -> dict[Parts, str]:
        """All that is neither a table nor annotations."""
        return {parts: copy for same in self.copies.values() for parts, copy in same.items()}


def check_size(file: str, name: str) -> int:
    """The bytes of a dropped file. Raises `UsageError` if there are too many."""
    size = require_file(file).stat().st_size
    most = ZIP_BYTES if _is_zip(name) else FILE_BYTES
    if size > most:
        raise UsageError(
            f"{printable(name)} has {size >> 20} MiB, and {most >> 20} are taken: cut it, or put it"
            " into the folder of the data"
        )
    return size


def fill(folder: Path, files: list[str], names: list[str], room: int) -> str:
    """Copies the audio among `files`, whose names were `names`, and writes the manifest or copies
    the files of annotations. A .zip is unpacked to at most `room` bytes. Returns the manifest's
    name or a pattern, "" without one. Raises `UsageError` if nothing can be used."""
    rejected = Rejections()
    dropped = []
    for number, (file, name) in enumerate(zip(map(Path, files), names, strict=True)):
        if _is_zip(name):
            unpacked = _unpacked(file, name, folder / UNPACKED / str(number), room)
            room -= sum(each.stat().st_size for each, _ in unpacked)
            dropped += unpacked
        else:
            dropped.append((file, name))
    found = _sort(folder, dropped, rejected)
    if len(found.tables) > 1:
        several = ", ".join(_shown(parts) for parts in found.tables)
        raise UsageError(f"these are several tables: {several}; give one for the audio files")
    audio = found.audio()
    count = sum(map(bool, audio.values()))
    manifest = ""
    if found.tables:
        count = _write_manifest(found, folder / MANIFEST, rejected)
        manifest = MANIFEST
        for parts in found.annotations:
            rejected.add("the table is used, and not this file", _shown(parts))
    elif found.annotations:
        manifest = _copy_annotations(found, folder, rejected)
        count = len(manifest)
    else:
        for parts in (parts for parts, copy in audio.items() if not copy):
            rejected.add(NOT_AUDIO, _shown(parts))
    shutil.rmtree(folder / UNPACKED, ignore_errors=True)
    (folder / NOT_USED).write_text(rejected.table(), encoding="utf-8", errors="backslashreplace")
    if not count:
        reasons = "; ".join(
            f"{reason} ({', '.join(examples)})" for reason, examples in rejected.examples.items()
        )
        raise UsageError(f"nothing of this can be used: {reasons or 'there is no audio file'}")
    return manifest


def is_table(file: str, name: str) -> bool:
    """Whether a dropped file may have texts: it is a table, has annotations, or is a .zip."""
    suffix = Path(name).suffix.lower()
    return suffix in {*TABLE_SUFFIXES, ".zip"} or is_annotations(Path(file), suffix)


def _is_zip(name: str) -> bool:
    return name.lower().endswith(".zip")


def _unpacked(archive: Path, name: str, folder: Path, room: int) -> list[tuple[Path, str]]:
    """The files in a .zip, as (file, name), unpacked into `folder` under numbers. What systems add
    (hidden files, __MACOSX) is left out. Raises `UsageError` if it is damaged, or larger than what
    is taken."""
    folder.mkdir(parents=True)
    unpacked = []
    try:
        with zipfile.ZipFile(archive) as opened:
            if len(opened.infolist()) > ZIP_FILES:
                raise UsageError(f"{printable(name)} has more than {ZIP_FILES} files: divide it")
            for member in opened.infolist():
                parts = parts_of(member.filename)
                if member.is_dir() or parts[-1].startswith(".") or parts[0] == "__MACOSX":
                    continue
                file = folder / str(len(unpacked))
                most = min(FILE_BYTES, room)
                with opened.open(member) as source, open(file, "wb") as target:
                    while block := source.read(1 << 20):
                        target.write(block)
                        if target.tell() > most:
                            raise UsageError(
                                f"{printable(name)}: {_shown(parts)} has more than {most >> 20} MiB"
                            )
                room -= file.stat().st_size
                unpacked.append((file, member.filename))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = printable(first_line(error))
        raise UsageError(f"{printable(name)} cannot be unpacked: {reason}") from None
    return unpacked


def _sort(folder: Path, dropped: list[tuple[Path, str]], rejected: Rejections) -> Sorted:
    """Copies the audio into the folder. Of several files with one name, the last one is used: it
    was dropped to replace the others, which are listed."""
    by_name: dict[Parts, Path] = {}
    for file, name in dropped:
        parts = parts_of(name)
        if parts in by_name:
            rejected.add(REPLACED, _shown(parts))
        by_name[parts] = file
    found = Sorted()
    for number, (parts, file) in enumerate(by_name.items(), 1):
        suffix = audio_suffix(file)
        if not suffix and Path(parts[-1]).suffix.lower() in TABLE_SUFFIXES:
            found.tables[parts] = file
            continue
        if not suffix and is_annotations(file, Path(parts[-1]).suffix):
            found.annotations[parts] = file
            continue
        copy = f"{number:04}{suffix}" if suffix else ""
        found.copies.setdefault(parts[-1], {})[parts] = copy
        if copy:
            shutil.copyfile(file, folder / copy)
    return found


def _write_manifest(found: Sorted, path: Path, rejected: Rejections) -> int:
    """Writes the rows of the only table in `found` whose audio is there. Returns their number.
    Raises `UsageError` if it is not a table."""
    ((parts, table),) = found.tables.items()
    name = printable(parts[-1])
    if table.stat().st_size > TEXT_BYTES:
        raise UsageError(f"{name}: a table of over {TEXT_BYTES >> 20} MiB is not taken")
    copies = found.audio()
    unused = dict(copies)
    count = 0
    try:
        with open(path, "w", encoding="ascii") as file:
            for line, row in parse(table, rejected):
                key = _audio_key(row)
                if not key:
                    rejected.add("no audio path", f"{table}:{line}")
                    continue
                last = parts_of(row[key])[-1]
                try:
                    audio = found.nearest(row[key])
                except ValueError as error:
                    for same in found.copies.get(last, ()):
                        unused.pop(same, None)
                    rejected.add(str(error), f"{table}:{line}: {last}")
                    continue
                unused.pop(audio, None)
                others = {field: value for field, value in row.items() if field not in AUDIO_KEYS}
                content = {key: copies[audio], **others, UPLOADED_AS: last}
                file.write(json.dumps(content) + "\n")
                count += 1
    except Failure as failure:
        raise UsageError(str(failure).replace(str(table), name)) from None
    for audio, copy in unused.items():
        rejected.add("the table has no line for this file" if copy else NOT_AUDIO, _shown(audio))
    for examples in rejected.examples.values():
        examples[:] = [example.replace(str(table), name) for example in examples]
    return count


def _copy_annotations(found: Sorted, folder: Path, rejected: Rejections) -> str:
    """Copies the files of annotations beside their audio, under its names. Returns a name or a
    pattern that stands for them, "" for none. Raises `UsageError` if they are of several kinds."""
    kinds = {Path(parts[-1]).suffix.lower() for parts in found.annotations}
    if len(kinds) > 1:
        several = ", ".join(_shown(parts) for parts in found.annotations)
        raise UsageError(f"these are annotations in several formats: {several}; give one of them")
    (suffix,) = kinds
    unused = found.audio()
    copied = []
    for number, (parts, file) in enumerate(found.annotations.items()):
        try:
            media = [each.path for each in READERS[suffix](file).media]
            audio = found.annotated(parts, [*media, *map(unquote, media)])
        except (Failure, ValueError) as error:
            reason = str(error).replace(str(file), printable(parts[-1]))
            rejected.add("file of annotations cannot be used", f"{_shown(parts)}: {reason}")
            continue
        unused.pop(audio, None)
        copied.append(f"{Path(found.audio()[audio]).stem}.{number}{suffix}")
        shutil.copyfile(file, folder / copied[-1])
    for audio, copy in unused.items():
        rejected.add("there are no annotations of this file" if copy else NOT_AUDIO, _shown(audio))
    if len(copied) > 1:
        return f"*{suffix}"
    return copied[0] if copied else ""


def _audio_key(row) -> str:
    """The key of a manifest's row that names its audio, "" if there is none."""
    if isinstance(row, dict):
        for key in AUDIO_KEYS:
            if isinstance(row.get(key), str) and row[key]:
                return key
    return ""


def parts_of(name: str) -> Parts:
    """The parts of a path of any system, as they are compared: some systems write an umlaut as two
    characters."""
    return PureWindowsPath(unicodedata.normalize("NFC", name)).parts or ("",)


def _shared(first: Parts, second: Parts) -> int:
    """How many parts are equal from the beginning."""
    equal = [one == other for one, other in zip(first, second, strict=False)]
    return [*equal, False].index(False)


def _shown(parts: Parts) -> str:
    return printable("/".join(parts))
