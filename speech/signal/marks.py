"""Marks in the middle of an audio file, by which joined ones are known; why a file cannot be
used."""

import functools
import mmap
import os

FLAC = b"fLaC\0\0\0\x22"  # how one begins
CONTINUES = (
    "audio continues behind the end that its header states (joined, never closed, or over 4 GiB):"
    " make one new file of it (of a WAV: ffmpeg -ignore_length 1 -i OLD.wav NEW.flac)"
)


class BadStream(Exception):
    """Why a file cannot be used."""


def has_behind(path: str, place: int, *marks: bytes) -> bool:
    """Whether one of these marks is in a file from a place on."""
    status = os.stat(path)
    return _has_behind(path, place, marks, status.st_size, status.st_mtime_ns)


@functools.lru_cache(1024)
def _has_behind(path: str, place: int, marks: tuple, *_) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(mark, place) >= 0 for mark in marks)
