"""Headers of audio files: their length, and whether the file is complete and read to its end."""

import contextlib
import errno
import hashlib
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile

from common.files import write_file
from speech.signal.marks import CONTINUES, FLAC, BadStream, has_behind

END_TOLERANCE = 0.1  # seconds by which rounded times may miss a file's end
UNKNOWN_LENGTH = 1 << 60  # frames: what libsndfile reports for a FLAC stream that was never closed
# Hz: speech needs more than the first, converters make no more than the second, and to resample
# others takes gigabytes.
RATES = (1_000, 768_000)
CHANNELS = 64  # more than arrays of microphones have
# What libsndfile says about the last page of an Ogg file that was cut.
UNENDED = "lacks an end-of-stream bit"
UNCLOSED = 0x7FFF0000  # bytes: from this size on, a chunk's writer did not know its size
THREADS = 16  # they wait for the disk or the network, not for the processor
# How another FLAC or Ogg begins behind the first.
BEGINNING = {"FLAC": FLAC, "OGG": b"OggS\0\x02"}
# The head of a chunk, name and size, in formats that may have some behind the sound.
CHUNKS = {"WAV": "<4sI", "WAVEX": "<4sI", "RF64": "<4sI", "AIFF": ">4sI", "CAF": ">4sq"}
MANY_FILES = 20_000  # reading more headers than this is announced
# Suffixes by libsndfile's name of the format.
FORMATS = {
    "WAV": ".wav",
    "WAVEX": ".wav",
    "RF64": ".wav",
    "FLAC": ".flac",
    "OGG": ".ogg",
    "MP3": ".mp3",
    "AIFF": ".aiff",
    "AU": ".au",
    "CAF": ".caf",
    "W64": ".w64",
    "NIST": ".sph",
}
# Suffixes by (place, bytes) in files that libsndfile does not know.
BEGINNINGS = {
    (4, b"ftyp"): ".m4a",
    (0, b"\x1a\x45\xdf\xa3"): ".webm",
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"): ".wma",
    (0, b"\xff\xf1"): ".aac",
    (0, b"\xff\xf9"): ".aac",
    (0, b"#!AMR"): ".amr",
}
OTHER_SUFFIXES = (".aif", ".aifc", ".opus", ".oga", ".mp2", ".mka", ".wv", ".w64", ".3ga")
# How names of audio files end, video last.
AUDIO_SUFFIXES = tuple(
    dict.fromkeys(
        [*FORMATS.values(), *BEGINNINGS.values(), *OTHER_SUFFIXES, ".mp4", ".mov", ".mkv", ".3gp"]
    )
)


def in_threads(
    look: Callable[[list], list | np.ndarray], items: list, threads: int = THREADS
) -> Iterator:
    """`look(part)` for parts of `items`, in order: a task a file would cost more."""
    size = max(1, min(256, len(items) // (4 * threads)))
    parts = (items[i : i + size] for i in range(0, len(items), size))
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(look, parts)


def file_fault(path: str) -> str:
    """Why a path cannot be opened as an audio file, or ""."""
    try:
        status = os.stat(path)
    except PermissionError as error:
        return f"file cannot be read: {error.strerror}"
    except OSError:
        return "file is missing"
    except ValueError:
        return "path is not valid"
    if stat.S_ISDIR(status.st_mode):
        return "not a file but a folder"
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        return "not a regular file"
    if status.st_size == 0:
        return "file is empty"
    return "" if os.access(path, os.R_OK) else f"file cannot be read: {os.strerror(errno.EACCES)}"


class Unusable(Exception):
    """Why an audio file cannot be used."""


def open_sound(path: str):
    """An open SoundFile or `Stream`, which will be read to its end. Raises `Unusable`."""
    fault = file_fault(path)
    if fault:
        raise Unusable(fault)
    descriptor = os.open(path, os.O_RDONLY)
    start = os.pread(descriptor, 3, 0)
    if start == b"ID3" or start[0] == 0xFF:  # libsndfile's decoder of MP3 writes to the terminal
        os.close(descriptor)
        return _open_stream(path)
    try:
        file = soundfile.SoundFile(descriptor)  # which closes it, also if this fails
    except (OSError, soundfile.LibsndfileError):
        return _open_stream(path)
    fault = range_fault(file)
    if UNENDED in file.extra_info or missing_seconds(file) > END_TOLERANCE:
        fault = "audio is truncated"
    if not fault and _reads_all(file, path, descriptor):
        if file.frames:
            return file
        fault = "audio is empty"
    file.close()
    if not fault and file.format in ("MP3", *BEGINNING):
        return _open_stream(path)
    raise Unusable(fault or CONTINUES)


def _open_stream(path: str):
    from speech.signal.streams import Stream  # most data sets need none

    try:
        file = Stream(path)
    except BadStream as error:
        raise Unusable(str(error)) from None
    fault = range_fault(file)
    if fault:
        file.close()
        raise Unusable(fault)
    return file


def _reads_all(file: soundfile.SoundFile, path: str, descriptor: int) -> bool:
    """Whether libsndfile reads a file to its end: it stops where the first header says. An MP3's
    header may say anything. `descriptor` is the open file's."""
    if file.format == "MP3" or file.frames >= UNKNOWN_LENGTH:
        return False
    if file.format in BEGINNING:
        return not has_behind(path, 1, BEGINNING[file.format])
    try:
        file.seek(0, os.SEEK_END)
    except soundfile.LibsndfileError:  # codecs of telephones, which are read from the start alone
        return True
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    file.seek(0)
    size = os.fstat(descriptor).st_size
    if file.frames and size - end < END_TOLERANCE * file.samplerate * end / file.frames:
        return True
    return file.format in CHUNKS and _are_chunks(descriptor, end, size, CHUNKS[file.format])


def _are_chunks(descriptor: int, place: int, size: int, head: str) -> bool:
    """Whether a file has chunks alone from `place` to its end: texts, marks, pictures."""
    length = struct.calcsize(head)
    while place + length <= size:
        name, content = struct.unpack(head, os.pread(descriptor, length, place))
        if name in (b"RIFF", b"RF64", b"FORM") or not re.fullmatch(rb"[ -~]{4}", name):
            return False
        place += length + content + content % 2
        if content < 0 or place > size + 1:
            return False
    return True


def range_fault(header) -> str:
    """Why audio of these channels at this rate cannot be used, or ""."""
    if not RATES[0] <= header.samplerate <= RATES[1]:
        return f"sample rate is not between {RATES[0]} and {RATES[1]} Hz"
    return f"audio has more than {CHANNELS} channels" if header.channels > CHANNELS else ""


def probe(path: str) -> tuple[float, str]:
    """A file's length in seconds, and why it cannot be used ("" if it can)."""
    try:
        with open_sound(path) as file:
            if isinstance(file, soundfile.SoundFile):
                seconds = file.frames / file.samplerate
            else:
                seconds = file.seconds()
    except Unusable as fault:
        return np.nan, str(fault)
    except BadStream as fault:
        return np.nan, f"audio {fault}"
    return seconds, "" if seconds else "audio is empty"


def audio_suffix(path: Path) -> str:
    """The suffix of an audio file's format, by its content; "" if it cannot be read here."""
    try:
        return FORMATS.get(soundfile.info(os.fsencode(path)).format, "")
    except (OSError, TypeError, soundfile.LibsndfileError):  # TypeError: .raw, which has no header
        pass
    with open(path, "rb") as file:
        start = file.read(16)
    for (place, beginning), suffix in BEGINNINGS.items():
        if start[place:].startswith(beginning) and not probe(str(path))[1]:
            return suffix
    return ""


def missing_seconds(file: soundfile.SoundFile) -> float:
    """By how much a WAV, AIFF or AU file is shorter than its header says. libsndfile reads what is
    left without an error and only mentions it in its log."""
    sizes = re.search(
        r"^\s*(?:data|SSND|Data Size)\s*: (\d+) \(should be (\d+)\)", file.extra_info, re.M
    )
    stated, actual = map(int, sizes.groups()) if sizes else (0, 0)
    if stated >= UNCLOSED or stated <= actual or not actual:
        return 0.0
    return file.frames / file.samplerate * (stated / actual - 1)


def probe_all(paths: list[str], cache: Path | None) -> tuple[np.ndarray, list[str]]:
    """`probe` for every path, in parallel, or from the `cache` for the same size and time."""
    reasons = [""] * len(paths)
    stamps = file_stamps(paths)
    seconds = recall(cache, stamps, 1)[:, 0]
    todo = np.flatnonzero(np.isnan(seconds)).tolist()
    if len(todo) > MANY_FILES:
        print(f"reading the headers of {len(todo)} audio files (kept for the next run)", flush=True)

    def look(rows: list[int]) -> list[tuple[int, float, str]]:
        return [(row, *probe(paths[row])) for row in rows]

    for part in in_threads(look, todo):
        for row, length, reason in part:
            seconds[row] = length
            reasons[row] = reason
    if cache and todo:
        has_fault = [reason != "" for reason in reasons]
        remember(cache, stamps, np.where(has_fault, np.nan, seconds)[:, None])
    return seconds, reasons


def file_stamps(paths: list[str]) -> np.ndarray:
    """(N, 3) hash of the path, size, time in nanoseconds; zeros if the file is missing."""
    return np.concatenate([np.zeros((0, 3), dtype=np.int64), *in_threads(_stamps, paths)])


def _stamps(paths: list[str]) -> np.ndarray:
    stamps = np.zeros((len(paths), 3), dtype=np.int64)
    for row, path in enumerate(paths):
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        name = int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=7).digest(), "big")
        stamps[row] = name, status.st_size, status.st_mtime_ns
    return stamps


def recall(cache: Path | None, stamps: np.ndarray, width: int) -> np.ndarray:
    """The values (N, width) that `remember` kept in `cache` for `stamps` (N, 3); NaN for others."""
    values = np.full((len(stamps), width), np.nan)
    known_stamps, known_values = _read_cache(cache, width)
    if len(known_stamps):
        nearest = np.searchsorted(known_stamps[:, 0], stamps[:, 0]).clip(max=len(known_stamps) - 1)
        is_known = (known_stamps[nearest] == stamps).all(axis=1) & (stamps[:, 0] != 0)
        values[is_known] = known_values[nearest[is_known]]
    return values


def _read_cache(cache: Path | None, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted (stamps (N, 3), values (N, width)); empty without a cache, or if it is damaged."""
    try:
        with np.load(cache) as content:
            stamps, values = content["stamps"], content["values"]
        if stamps.shape == (len(values), 3) and values.shape == (len(values), width):
            return stamps, values
    except Exception:  # a damaged cache is made anew, whatever is wrong with it
        pass
    return np.zeros((0, 3), dtype=np.int64), np.zeros((0, width))


def remember(cache: Path, stamps: np.ndarray, values: np.ndarray) -> None:
    """Adds the finite rows of `values` (N, width) to the file `cache`; its folder is created."""
    good = np.flatnonzero(np.isfinite(values).all(axis=1) & (stamps[:, 0] != 0))
    known_stamps, known_values = _read_cache(cache, values.shape[1])
    others = ~np.isin(known_stamps[:, 0], stamps[:, 0])
    stamps = np.concatenate([stamps[good], known_stamps[others]])
    values = np.concatenate([values[good], known_values[others]])
    order = np.argsort(stamps[:, 0], kind="stable")

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            np.savez(file, stamps=stamps[order], values=values[order])

    with contextlib.suppress(OSError):  # without a cache the next run is only slower
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_file(cache, write, durable=False)
