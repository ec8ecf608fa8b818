"""The two folders that the page may use: the data, and the runs with what was uploaded."""

import json
import os
import shutil
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from common.errors import Failure, UsageError, cannot_write
from common.files import TEXT_BYTES, require_file
from speech.columns import Rejections, printable
from speech.folders import write_folder
from speech.headers import BEGINNINGS, FORMATS, audio_suffix
from speech.manifest import AUDIO_KEYS, parse

FILE_BYTES = 200 << 20  # of an uploaded file
UPLOADS_BYTES = 10 << 30  # of all uploads
UPLOADS = "uploads"  # the folder in `Places.runs`
MANIFEST = "manifest.jsonl"  # of an upload
UPLOADED_AS = "uploaded_as"  # the key in its rows of a file's own name
NOT_USED = "not_used.txt"  # of an upload: a table of what was left out, as `Rejections` prints it
NOT_AUDIO = "file is not audio that can be read here"
DEPTH = 6  # of folders that are searched
ENTRIES = 100_000  # that a search looks at
CHOICES = 1_000  # that a list offers
TABLE_SUFFIXES = {".json", ".jsonl", ".csv", ".tsv"}  # beside audio files
MODEL_SUFFIXES = {".nemo", ".pt", ".pth", ".safetensors"}
START = 1 << 16  # bytes of a file that tell its kind
AUDIO_SUFFIXES = {*FORMATS.values(), *BEGINNINGS.values(), ".aif", ".opus", ".oga", ".mp4"}
_uploading = threading.Lock()  # two uploads at once could exceed UPLOADS_BYTES


@dataclass(frozen=True)
class Places:
    """The folder `data`, which is only read, and the folder `runs`. Nothing outside is used."""

    data: Path
    runs: Path

    def __post_init__(self):
        object.__setattr__(self, "data", self.data.resolve())
        object.__setattr__(self, "runs", self.runs.resolve())

    def inside(self, path: str | Path) -> Path:
        """`path` without links, if it lies in one of the folders then. A relative path starts at
        `data` or, if there is no such file, at `runs`. Raises `UsageError`."""
        shown = printable(str(path))
        candidates = [self.data / path, self.runs / path]
        try:
            found = [place for place in candidates if os.path.lexists(place)] or candidates
            real = found[0].resolve()
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                real.lstat()
        except (OSError, ValueError, RuntimeError) as error:  # NUL, too long, links in a circle
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{shown}: {reason}") from None
        if not (real.is_relative_to(self.data) or real.is_relative_to(self.runs)):
            raise UsageError(
                f"{shown}: it is outside of the folders of this page ({self.data}, {self.runs});"
                " copy it there"
            )
        return real

    def file(self, path: str | Path) -> Path:
        """`inside` for a file that can be read: not a folder, a pipe or a device."""
        return require_file(self.inside(path))

    def name(self, path: Path) -> str:
        """The shortest text that `inside` understands as this path."""
        for base in (self.data, self.runs):
            if path.is_relative_to(base) and path != base:
                short = str(path.relative_to(base))
                if self.data / short == path or not os.path.lexists(self.data / short):
                    return short
        return str(path)

    def manifests(self, folder: str = "") -> list[str]:
        """Tables of recordings below the folders, or below one `folder` of them, to choose from."""
        bases = [self.inside(folder)] if folder else [self.data, self.runs / UPLOADS]
        tables = (path for path in self._below(bases) if path.suffix.lower() in TABLE_SUFFIXES)
        return self._names(path for path in tables if _is_manifest(path))

    def models(self) -> list[str]:
        """Folders and files of released models and exports, to choose from. The weights of runs are
        chosen by their run."""
        found = {}
        for path in self._below([self.data, self.runs]):
            is_of_run = path.is_relative_to(self.runs) and path.parent.name == "checkpoints"
            if path.suffix.lower() not in MODEL_SUFFIXES or is_of_run:
                continue
            if (path.parent / "config.json").is_file():
                found[path.parent] = True
            elif path.suffix.lower() != ".safetensors":  # which no recipe reads without its folder
                found[path] = True
        return self._names(found)

    def clips(self) -> list[str]:
        """Audio files below the folders, to choose from."""
        files = self._below([self.data, self.runs / UPLOADS])
        return self._names(path for path in files if path.suffix.lower() in AUDIO_SUFFIXES)

    def uploads(self) -> list[str]:
        """What was uploaded, to choose from."""
        folders = [Path(entry.path) for entry in _entries(self.runs / UPLOADS)]
        return self._names(each for each in folders if (each / NOT_USED).is_file())

    def _names(self, paths: Iterable[Path]) -> list[str]:
        names = set()  # one of the folders may be in the other
        for path in paths:
            with suppress(UnicodeEncodeError):  # not UTF-8, which no browser understands
                str(path).encode()
                names.add(self.name(path))
            if len(names) == CHOICES:
                break
        return sorted(names)

    def _below(self, bases: list[Path]) -> Iterator[Path]:
        """Regular files below the folders, those of the upper folders first. Hidden ones, links to
        folders and links that lead out are left out."""
        folders = [(base, 0) for base in bases]
        seen = 0
        for folder, depth in folders:  # grows
            for entry in _entries(folder):
                seen += 1
                if seen > ENTRIES:
                    return
                if entry.name.startswith("."):
                    continue
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    if depth < DEPTH:
                        folders.append((path, depth + 1))
                elif self._is_file(entry):
                    yield path

    def _is_file(self, entry: os.DirEntry) -> bool:
        if not entry.is_symlink():
            return entry.is_file(follow_symlinks=False)
        try:
            return bool(self.file(entry.path))
        except UsageError:
            return False

    def save_upload(self, files: list[str], names: list[str]) -> Path:
        """Copies uploaded `files`, whose names were `names`, into a new folder below `runs`, under
        names of our own. Returns the manifest that is made of the table among them or, without a
        table, the folder. What cannot be used is left out and listed by `not_used`. Raises
        `UsageError` if nothing can be used, and `RunError` if it cannot be written."""
        with _uploading:
            uploads = self.runs / UPLOADS
            total = sum(_size(Path(file), name) for file, name in zip(files, names, strict=True))
            room = UPLOADS_BYTES - sum(path.stat().st_size for path in self._below([uploads]))
            if total > room:
                raise UsageError(
                    f"these files have {total >> 20} MiB, and there is room for"
                    f" {max(0, room) >> 20} MiB more: remove earlier uploads from {uploads}, or put"
                    f" the data into {self.data}"
                )
            numbers = [int(each.name) for each in _entries(uploads) if each.name.isdecimal()]
            folder = uploads / str(max(numbers, default=0) + 1)
            try:
                return folder / write_folder(folder, lambda aside: _fill(aside, files, names), {})
            except OSError as error:
                raise cannot_write(uploads, error, "--runs") from None

    def not_used(self, upload: str | Path) -> str:
        """What was left out of an upload, a table as `Rejections` prints it; "" for other files."""
        with suppress(Failure):
            folder = self._upload(upload)
            return (folder / NOT_USED).read_text(encoding="utf-8")
        return ""

    def remove_upload(self, upload: str | Path) -> None:
        """Removes what `save_upload` has returned. Raises `UsageError` for any other path."""
        shutil.rmtree(self._upload(upload))

    def _upload(self, path: str | Path) -> Path:
        real = self.inside(path)
        uploads = self.runs / UPLOADS
        folder = real if real.parent == uploads else real.parent
        if folder.parent != uploads or not (folder / NOT_USED).is_file():
            raise UsageError(f"{printable(str(path))}: it was not uploaded")
        return folder


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:  # it is not there yet, or belongs to somebody else
        return []


def _is_manifest(path: Path) -> bool:
    """Whether a file looks like a table of recordings."""
    try:
        if path.suffix.lower() in (".json", ".jsonl"):
            with open(path, "rb") as file:
                start = file.read(START)
            return any(f'"{key}"'.encode() in start for key in AUDIO_KEYS)
        return next(parse(path, Rejections()), None) is not None
    except (Failure, OSError):
        return False


def _size(path: Path, name: str) -> int:
    """The bytes of an uploaded file. Raises `UsageError` if there are too many."""
    size = require_file(path).stat().st_size
    if size > FILE_BYTES:
        raise UsageError(
            f"{printable(name)} has {size >> 20} MiB, and {FILE_BYTES >> 20} are taken: cut it, or"
            " put it into the folder of the data"
        )
    return size


def _fill(folder: Path, files: list[str], names: list[str]) -> str:
    """Copies the audio, and writes the manifest. Returns the manifest's name, "" without one."""
    rejected = Rejections()
    tables = []
    copies: dict[str, str] = {}  # names here by uploaded names; "" for what is not audio
    for file, name in zip(map(Path, files), map(_last, names), strict=True):
        suffix = audio_suffix(file)
        if not suffix and Path(name).suffix.lower() in TABLE_SUFFIXES:
            tables.append((file, name))
            continue
        if name in copies:
            raise UsageError(f"two files are called {printable(name)}: rename one of them")
        copies[name] = f"{len(copies) + 1:04}{suffix}" if suffix else ""
        if suffix:
            shutil.copyfile(file, folder / copies[name])
    if len(tables) > 1:
        several = ", ".join(printable(name) for _, name in tables)
        raise UsageError(f"these are several tables: {several}; give one for the audio files")
    if tables:
        count = _write_manifest(*tables[0], copies, folder / MANIFEST, rejected)
    else:
        count = sum(map(bool, copies.values()))
        for name in (name for name, copy in copies.items() if not copy):
            rejected.add(NOT_AUDIO, name)
    lines = rejected.table()
    (folder / NOT_USED).write_text(lines, encoding="utf-8", errors="backslashreplace")
    if not count:
        reasons = "; ".join(
            f"{reason} ({', '.join(examples)})" for reason, examples in rejected.examples.items()
        )
        raise UsageError(f"nothing of this can be used: {reasons or 'there is no audio file'}")
    return MANIFEST if tables else ""


def _write_manifest(
    table: Path, name: str, copies: dict[str, str], path: Path, rejected: Rejections
) -> int:
    """Writes the rows of the uploaded `table`, called `name`, whose audio is among `copies`.
    Returns their number. Raises `UsageError` if it is not a table."""
    if table.stat().st_size > TEXT_BYTES:
        raise UsageError(f"{printable(name)}: a table of over {TEXT_BYTES >> 20} MiB is not taken")
    unused = dict(copies)
    count = 0
    try:
        with open(path, "w", encoding="ascii") as file:
            for line, row in parse(table, rejected):
                key = _audio_key(row)
                if not key:
                    rejected.add("no audio path", f"{table}:{line}")
                    continue
                audio = _last(row[key])
                unused.pop(audio, None)
                if not copies.get(audio):
                    reason = NOT_AUDIO if audio in copies else "file was not uploaded"
                    rejected.add(reason, f"{table}:{line}: {audio}")
                    continue
                others = {field: value for field, value in row.items() if field not in AUDIO_KEYS}
                content = {key: copies[audio], **others, UPLOADED_AS: audio}
                file.write(json.dumps(content) + "\n")
                count += 1
    except Failure as failure:
        raise UsageError(str(failure).replace(str(table), printable(name))) from None
    for audio, copy in unused.items():
        rejected.add("the table has no line for this file" if copy else NOT_AUDIO, audio)
    for examples in rejected.examples.values():
        examples[:] = [example.replace(str(table), printable(name)) for example in examples]
    return count


def _audio_key(row) -> str:
    """The key of a manifest's row that names its audio, "" if there is none."""
    if isinstance(row, dict):
        for key in AUDIO_KEYS:
            if isinstance(row.get(key), str) and row[key]:
                return key
    return ""


def _last(name: str) -> str:
    """The last part of a path of any system, as it is compared: some systems write an umlaut as two
    characters."""
    return unicodedata.normalize("NFC", PureWindowsPath(name).name)
