"""What the headers of audio files say: length, and whether the file is whole."""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile

END_TOLERANCE = 0.1  # seconds by which rounded times may miss a file's end
UNKNOWN_LENGTH = 1 << 60  # frames: what libsndfile reports for a FLAC stream that was never closed
UNCLOSED = 0x7FFF0000  # bytes: from here up a chunk's size means that its writer did not know it
THREADS = 16  # for looking at files: they wait for the disk or the network, not for the processor
MANY_FILES = 20_000  # looking at more of them is announced


def _by_threads(look: Callable[[list], list | np.ndarray], items: list) -> Iterator:
    """`look(part)` for part after part of `items`, in order. In parts: a task for every file would cost more than the
    look at it."""
    size = max(1, min(256, len(items) // (4 * THREADS)))
    parts = (items[i : i + size] for i in range(0, len(items), size))
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(look, parts)


def probe(path: str) -> tuple[float, str]:
    """Length in seconds by the file's header, and why it cannot be used ("" if it can)."""
    try:
        status = os.stat(path)
    except OSError:
        return np.nan, "file is missing"
    except ValueError:
        return np.nan, "no valid path"
    if stat.S_ISDIR(status.st_mode):
        return np.nan, "not a file but a folder"
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        return np.nan, "not a regular file"
    if status.st_size == 0:
        return np.nan, "file is empty"
    try:
        info = soundfile.info(path)
    except (OSError, TypeError, soundfile.LibsndfileError):  # TypeError: .raw, which has no header
        info = None
    if info is None or info.frames >= UNKNOWN_LENGTH:
        return _probe_with_ffmpeg(path)
    reason = "" if info.frames else "audio is empty"
    return info.frames / info.samplerate, "audio is truncated" if missing_seconds(info) > END_TOLERANCE else reason


def missing_seconds(header) -> float:
    """By how much a WAV, AIFF or AU file is shorter than its header says, by libsndfile's log: it reads what is there
    and says nothing. `header`: a `soundfile.SoundFile`, or what `soundfile.info` returns."""
    found = re.search(r"^\s*(?:data|SSND|Data Size)\s*: (\d+) \(should be (\d+)\)", header.extra_info, re.M)
    stated, there = map(int, found.groups()) if found else (0, 0)
    if stated >= UNCLOSED or stated <= there or not there:
        return 0.0
    return header.frames / header.samplerate * (stated / there - 1)


def _probe_with_ffmpeg(path: str) -> tuple[float, str]:
    if not shutil.which("ffprobe"):
        return np.nan, "audio is unreadable (for libsndfile; ffmpeg with ffprobe is not installed)"
    command = ["ffprobe", "-v", "error", "-show_entries", "format=duration", "-of", "csv=p=0", f"file:{path}"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout), ""
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return np.nan, "audio is unreadable (for libsndfile and ffmpeg)"


def probe_all(paths: list[str], cache: Path | None) -> tuple[np.ndarray, list[str]]:
    """`probe` for every path, in parallel. What an earlier run found is kept in `cache` and used for files whose size
    and time are the same."""
    seconds, reasons = np.full(len(paths), np.nan), [""] * len(paths)
    stamps = np.concatenate([np.zeros((0, 3), dtype=np.int64), *_by_threads(_stamps, paths)])
    known, known_seconds = _read_cache(cache)
    is_known = np.zeros(len(paths), dtype=bool)
    if len(known):
        nearest = np.searchsorted(known[:, 0], stamps[:, 0]).clip(max=len(known) - 1)
        is_known = (known[nearest] == stamps).all(axis=1) & (stamps[:, 0] != 0)
        seconds[is_known] = known_seconds[nearest[is_known]]
    todo = np.flatnonzero(~is_known).tolist()
    if len(todo) > MANY_FILES:
        print(f"looking at {len(todo)} audio files (the next run needs not)", flush=True)
    found = _by_threads(lambda rows: [(row, *probe(paths[row])) for row in rows], todo)
    for row, length, reason in (one for part in found for one in part):
        seconds[row], reasons[row] = length, reason
    if cache and todo:
        good = np.flatnonzero(np.array([not reason for reason in reasons]) & (stamps[:, 0] != 0))
        good = good[np.argsort(stamps[good, 0], kind="stable")]
        _write_cache(cache, stamps[good], seconds[good])
    return seconds, reasons


def _stamps(paths: list[str]) -> np.ndarray:
    """(N, 3) hash of the path, size, time in nanoseconds; zeros where there is no such file."""
    stamps = np.zeros((len(paths), 3), dtype=np.int64)
    for row, path in enumerate(paths):
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        name = int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=7).digest(), "big")
        stamps[row] = name, status.st_size, status.st_mtime_ns
    return stamps


def _read_cache(cache: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """(stamps, seconds), sorted by their first column."""
    try:
        with np.load(cache) as content:
            stamps, seconds = content["stamps"], content["seconds"]
        if stamps.shape == (len(seconds), 3):
            return stamps, seconds
    except Exception:  # whatever is wrong with a cache: look again
        pass
    return np.zeros((0, 3), dtype=np.int64), np.zeros(0)


def _write_cache(cache: Path, stamps: np.ndarray, seconds: np.ndarray) -> None:
    temporary = Path(f"{cache}.{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, stamps=stamps, seconds=seconds)
        os.replace(temporary, cache)
    except OSError:  # a cache that cannot be written costs time, nothing else
        with contextlib.suppress(OSError):
            temporary.unlink()
