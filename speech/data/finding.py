"""Audio files: the one that a manifest names, and the one that belongs to a file of annotations."""

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote

from common.errors import DataError
from speech.data.annotations.document import Media
from speech.data.headers import AUDIO_SUFFIXES


def find_audio(name: str, folder: str, audio_root: str | None = None) -> str:
    """The path of a manifest's audio file: absolute, or relative to `audio_root` or the manifest's
    `folder` (or to clips/ or wavs/ in it, as in Common Voice and LJSpeech).

    With `audio_root`, an absolute path of another machine (with Windows' separators, too) is looked
    up by its last components. If no file exists, the path to name in a message."""
    base = audio_root or folder
    path = os.path.join(base, name)  # an absolute name replaces `base`
    # (pathlib's `exists` raises for a name that is too long.)
    if os.path.exists(path):
        return path
    posix = PureWindowsPath(name).as_posix() if "\\" in name else name
    parts = [part for part in posix.split("/") if part]
    is_absolute = posix.startswith("/") or posix[1:3] == ":/"
    if is_absolute and not (audio_root and parts):
        return name
    if is_absolute:
        candidates = [os.path.join(base, *parts[first:]) for first in range(len(parts))]
    else:
        candidates = [os.path.join(base, place, *parts) for place in ("clips", "wavs", "audio", "")]
    for candidate in candidates:
        if os.path.exists(candidate):
            return candidate
    return candidates[-1]


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
    present = _audio_by_stem(audio_root or folder)
    for stem in (path.stem, Path(path.stem).stem):
        if found := present.get(_comparable(stem)):
            return os.path.abspath(min(found, key=_rank)), origin
    names = [each.path.split("/")[-1] for each in media if each.path]
    names = dict.fromkeys([*names, f"{path.stem}.wav (.mp3, .flac ...)"])
    place = audio_root or "its folder, or give the audio's as --audio_root"
    raise DataError(f"{path}: its audio is missing: put {' or '.join(names)[:300]} into {place}")


def _rank(path: str) -> int:
    suffix = os.path.splitext(path)[1].lower()
    return AUDIO_SUFFIXES.index(suffix) if suffix in AUDIO_SUFFIXES else len(AUDIO_SUFFIXES)


def _audio_by_stem(folder: str) -> dict[str, list[str]]:
    """The audio files in a folder by their names without endings."""
    found: dict[str, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in AUDIO_SUFFIXES:
            found.setdefault(_comparable(stem), []).append(os.path.join(folder, name))
    return found


def _comparable(stem: str) -> str:
    """A name as it is compared: some systems write an umlaut as two characters."""
    return unicodedata.normalize("NFC", stem)
