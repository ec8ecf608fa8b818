"""The audio files that a manifest names."""

import contextlib
import functools
import glob
import itertools
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from common.errors import DataError
from speech.data.columns import printable
from speech.data.headers import AUDIO_SUFFIXES, in_threads

TABLES = (".csv", ".tsv", ".json", ".jsonl")


class Listing(NamedTuple):
    """Paths in some folders: by comparable names, audio without endings, and folders."""

    names: dict[str, list[str]]
    stems: dict[str, list[str]]
    folders: list[str]


def listed(folders: Sequence[str]) -> Listing:
    """The listing of folders. What cannot be listed is empty."""
    listing = Listing({}, {}, [])
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            for entry in sorted(os.scandir(folder or "."), key=lambda entry: entry.name):
                path = os.path.join(folder, entry.name)
                stem, suffix = os.path.splitext(entry.name)
                listing.names.setdefault(comparable(entry.name), []).append(path)
                if suffix.lower() in AUDIO_SUFFIXES:
                    listing.stems.setdefault(comparable(stem), []).append(path)
                elif not entry.name.startswith(".") and entry.is_dir():
                    listing.folders.append(path)
    return listing


def find_audio(name: str, folder: str, audio_root: str | None = None) -> str:
    """`find_all` of one name."""
    return find_all([name], folder, audio_root)[0]


def find_all(names: Sequence[str], folder: str, audio_root: str | None = None) -> list[str]:
    """The paths of a manifest's audio files: absolute, or relative to `audio_root` or the
    manifest's `folder`, or to a folder in it, such as wavs/. A name may lack the ending, and be in
    another Unicode form.

    With `audio_root`, an absolute path of another machine (with Windows' separators, too) is looked
    up by its last components. If no file exists, the path to name in a message. Raises `DataError`
    if several files may be meant, or if two such paths end at one file."""
    base = audio_root or folder
    listing = functools.cache(listed)

    def within(folders: tuple[str, ...], parts: list[str]) -> list[str]:
        for part in parts[:-1]:
            folders = tuple(listing(folders).names.get(comparable(part), ()))
        last = comparable(parts[-1])
        for found in (listing(folders).names.get(last, []), listing(folders).stems.get(last, [])):
            if files := [path for path in found if not os.path.isdir(path)]:
                return files
        return []

    def search(name: str) -> str:
        posix = PureWindowsPath(name).as_posix() if "\\" in name else name
        parts = [part for part in posix.split("/") if part not in ("", ".")]
        if not parts:
            return os.path.join(base, name)
        if is_absolute(name) and audio_root:
            ways = [((base,), parts[first:]) for first in range(len(parts))]
            missing = os.path.join(base, parts[-1])
        elif is_absolute(name):
            ways = [(("/",), parts)]
            missing = name
        else:
            missing = os.path.join(base, *parts)
            outside = list(itertools.takewhile("..".__eq__, parts[:-1]))
            ways = [((os.path.join(base, *outside),), parts[len(outside) :])]
            if not outside:
                ways.append((tuple(listing((base,)).folders), parts))
        files = next(filter(None, (within(*way) for way in ways)), [missing])
        if len(files) > 1:
            raise DataError(
                f"which file is {printable(name)}: {printable(' or '.join(files[:3]))}? Write its"
                " folder and ending into the manifest, or give the folder as --audio_root"
            )
        return files[0]

    # An absolute name replaces `base`. (pathlib's `exists` raises for a name that is too long.)
    paths = [os.path.join(base, name) for name in names]
    parts = in_threads(lambda some: [os.path.exists(path) for path in some], paths)
    exist = itertools.chain.from_iterable(parts)
    found = zip(names, paths, exist, strict=True)
    files = [path if is_there else search(name) for name, path, is_there in found]
    require_apart(names, files)
    return files


def require_apart(names: Sequence[str], files: Sequence[str]) -> None:
    """Raises `DataError` if two paths of another machine have ended at one of the `files`."""
    named: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        if name == file or not is_absolute(name):
            continue
        other = named.setdefault(file, name)
        if other != name and os.path.exists(file):
            raise DataError(
                f"{printable(name)} and {printable(other)} are both {printable(file)} in"
                " --audio_root: give the folder that has both of them below it"
            )


def is_absolute(name: str) -> bool:
    """Whether a path is absolute, here or on Windows."""
    return name.startswith(("/", "\\")) or name[1:3] in (":/", ":\\")


def matching(path: Path) -> list[Path] | None:
    """The files that a pattern stands for, sorted; None if `path` is a file or no pattern. Its
    folder may have brackets in its name."""
    name, pattern = str(path), str(path)
    if path.parent.is_dir():
        name, pattern = path.name, os.path.join(glob.escape(str(path.parent)), path.name)
    if os.path.exists(path) or not glob.has_magic(name):
        return None
    return [Path(each) for each in sorted(glob.glob(pattern, recursive=True))]


def comparable(name: str) -> str:
    """A name as it is compared: some systems write an umlaut as two characters."""
    return unicodedata.normalize("NFC", name)
