"""Audio files: the one that a manifest names, and the one that belongs to a file of annotations."""

import contextlib
import functools
import itertools
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple
from urllib.parse import unquote

from common.errors import DataError
from speech.data.annotations.document import Media
from speech.data.columns import printable
from speech.data.headers import AUDIO_SUFFIXES, in_threads


class Listing(NamedTuple):
    """What lies in some folders, as paths: by comparable names, audio also by comparable names
    without endings, and the folders among it."""

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
    manifest's `folder`, or to a folder in it, such as wavs/. A name may lack the ending of audio,
    and may be in another Unicode form than the file's.

    With `audio_root`, an absolute path of another machine (with Windows' separators, too) is looked
    up by its last components. If no file exists, the path to name in a message. Raises `DataError`
    if several files may be meant."""
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
        is_absolute = posix.startswith("/") or posix[1:3] == ":/"
        if is_absolute and audio_root:
            ways = [((base,), parts[first:]) for first in range(len(parts))]
            missing = os.path.join(base, parts[-1])
        elif is_absolute:
            ways = [(("/",), parts)]
            missing = name
        else:
            missing = os.path.join(base, *parts)
            outside = list(itertools.takewhile("..".__eq__, parts[:-1]))
            ways = [((os.path.join(base, *outside),), parts[len(outside) :])]
            if not outside:
                ways.append((tuple(listing((base,)).folders), parts))
        found = next(filter(None, (within(*way) for way in ways)), [missing])
        if len(found) > 1:
            raise DataError(
                f"which file is {printable(name)}: {printable(' or '.join(found[:3]))}? Write its"
                " folder and ending into the manifest, or give the folder as --audio_root"
            )
        return found[0]

    # An absolute name replaces `base`. (pathlib's `exists` raises for a name that is too long.)
    paths = [os.path.join(base, name) for name in names]
    exist = in_threads(lambda some: [os.path.exists(path) for path in some], paths)
    exist = [each for part in exist for each in part]
    return [
        path if there else search(name)
        for name, path, there in zip(names, paths, exist, strict=True)
    ]


def audio_of(
    path: Path, media: Sequence[Media], audio_root: str | None = None
) -> tuple[str, float]:
    """The absolute path of the audio of the annotations in the file `path`, and the seconds in it
    at which their time begins.

    It is one of the `media` that the file names, sound before video, or a file of the same name
    with another ending (`talk.en.srt` also belongs to `talk.wav`), beside the file or in
    `audio_root`. Raises `DataError` if there is none."""
    folder = str(path.parent)
    for each in sorted(media, key=lambda one: _rank(one.path)):
        last = each.path.split("/")[-1]
        for name in (each.relative, each.path if audio_root else "", last):
            for written in filter(None, (name, unquote(name))):
                found = find_audio(written, folder, audio_root)
                if os.path.isfile(found):
                    return os.path.abspath(found), each.origin
    origin = media[0].origin if media else 0.0
    present = listed([audio_root or folder]).stems
    for stem in (path.stem, Path(path.stem).stem):
        if found := present.get(comparable(stem)):
            return os.path.abspath(min(found, key=_rank)), origin
    names = [each.path.split("/")[-1] for each in media if each.path]
    names = dict.fromkeys([*names, f"{path.stem}.wav (.mp3, .flac ...)"])
    place = audio_root or "its folder, or give the audio's as --audio_root"
    raise DataError(f"{path}: its audio is missing: put {' or '.join(names)[:300]} into {place}")


def _rank(path: str) -> int:
    suffix = os.path.splitext(path)[1].lower()
    return AUDIO_SUFFIXES.index(suffix) if suffix in AUDIO_SUFFIXES else len(AUDIO_SUFFIXES)


def comparable(name: str) -> str:
    """A name as it is compared: some systems write an umlaut as two characters."""
    return unicodedata.normalize("NFC", name)
