"""The two folders that the page may use: the data, and the runs with what was uploaded."""

import functools
import glob
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import Failure, UsageError, writing
from common.files import require_file
from speech.data.annotations.rows import files_of, is_annotations
from speech.data.columns import Rejections, printable
from speech.data.fields import AUDIO_KEYS
from speech.data.folders import write_folder
from speech.data.headers import AUDIO_SUFFIXES
from speech.data.manifest import parse
from webui import uploads
from webui.uploads import NAMES, NOT_USED, START, TABLE_SUFFIXES

UPLOADS_BYTES = 10 << 30  # of all uploads; the guard counts them
UPLOADS = "uploads"  # the folder in `Places.runs`
DRAFT = "draft.jsonl"  # in a run's folder: what it has transcribed
CORRECTED = "corrected.jsonl"  # beside a draft: the same with texts that were corrected
DEPTH = 6  # of folders that are searched
ENTRIES = 100_000  # that a search looks at
CHOICES = 1_000  # that a list offers
MODEL_SUFFIXES = {".nemo", ".pt", ".pth", ".safetensors"}
_uploading = threading.Lock()  # two uploads at once would take the same number


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
        `data` or, if there is no such file, at `runs`; so does a pattern of files in a folder.
        Raises `UsageError`."""
        shown = printable(str(path))
        candidates = [self.data / path, self.runs / path]
        try:
            is_pattern = glob.has_magic(str(path))
            found = [
                place
                for place in candidates
                if os.path.lexists(place) or (is_pattern and place.parent.is_dir())
            ] or candidates
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

    def own_name(self, path: Path) -> str:
        """The name of a file as its owner knows it, who may have uploaded it."""
        if path.parent.parent == self.runs / UPLOADS:
            with suppress(OSError, ValueError, AttributeError):
                names = json.loads((path.parent / NAMES).read_text(encoding="ascii"))
                return str(names.get(path.name, path.name))
        return path.name

    def manifests(self, folder: str = "") -> list[str]:
        """Tables of recordings below the folders, or below one `folder` of them, to choose from;
        also files of annotations, and a pattern for those in one folder. Those of one upload are
        one table."""
        bases = [self.inside(folder)] if folder else [self.data, self.runs / UPLOADS]
        below = list(self._below(bases))
        annotated = [path for path in below if is_annotations(path)]
        patterns = Counter(path.parent / f"*{path.suffix}" for path in annotated)
        tables = [path for path in below if path.suffix.lower() in TABLE_SUFFIXES]
        if not folder:
            tables += self._drafts()
        tables = [path for path in tables if _is_manifest(path)]
        several = {pattern for pattern, count in patterns.items() if count > 1}
        uploads = self.runs / UPLOADS
        for path in annotated:
            if path.parent / f"*{path.suffix}" not in several or path.parent.parent != uploads:
                tables.append(path)
        return self._names([*tables, *several])

    def table(self, path: str | Path) -> Path:
        """`file`, or a pattern of files of annotations that are all inside."""
        real = self.inside(path)
        files = files_of(real)
        for each in files:
            self.file(each)
        return real if files and files != [real] else self.file(real)

    def _drafts(self) -> Iterator[Path]:
        """The transcripts in folders of runs, and what is corrected of them."""
        for entry in _entries(self.runs):
            for name in (DRAFT, CORRECTED):
                path = Path(entry.path, name)
                with suppress(UsageError):  # none, or a link that leads out
                    self.file(path)
                    yield path

    def audio_folders(self) -> list[str]:
        """Folders with audio files, to choose from."""
        return sorted({str(Path(name).parent) for name in self.clips()})

    def models(self) -> list[str]:
        """Folders and files of released models and exports, without the weights of runs."""
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
        """The uploads to choose from."""
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
            place = self.runs / UPLOADS
            numbers = [int(each.name) for each in _entries(place) if each.name.isdecimal()]
            folder = place / str(max(numbers, default=0) + 1)
            with writing(place, "--runs"):
                fill = functools.partial(uploads.fill, files=files, names=names)
                return folder / write_folder(folder, fill, {})

    def not_used(self, upload: str | Path) -> str:
        """What was left out of an upload, as `Rejections` prints it; "" for other files."""
        with suppress(Failure):
            folder = self._upload(upload)
            return (folder / NOT_USED).read_text(encoding="utf-8")
        return ""

    def remove_upload(self, upload: str | Path) -> None:
        """Removes what `save_upload` has returned. Raises `UsageError` for any other path. The
        empty folder stays, whose number a draft may name."""
        folder = self._upload(upload)
        for entry in _entries(folder):
            if entry.name != NOT_USED:  # last: what is left can be removed again
                Path(entry.path).unlink()
        (folder / NOT_USED).unlink()

    def is_corrected(self, upload: str | Path) -> bool:
        """Whether somebody has corrected texts of an upload."""
        return any(self._upload(upload).glob(f"*{CORRECTED}"))

    def _upload(self, path: str | Path) -> Path:
        real = self.inside(path)
        place = self.runs / UPLOADS
        folder = real if real.parent == place else real.parent
        if folder.parent != place or not (folder / NOT_USED).is_file():
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
