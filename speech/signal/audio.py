"""Audio files to waveforms: reading, resampling, speed perturbation, a cache of decoded audio."""

import contextlib
import functools
import hashlib
import io
import math
import os
import struct
import wave
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import soundfile
import torch

from common.errors import DataError, RunError, UsageError, first_line
from common.files import write_file
from speech.data.columns import printable
from speech.data.headers import AUDIO_SUFFIXES, END_TOLERANCE, Unusable, open_sound
from speech.signal import spectra
from speech.signal.marks import BadStream

SAMPLE_RATE = 16_000  # Hz, of every recogniser
# Of the ratio of two sample rates: the size of the resampling filter is the product of its terms.
LARGEST_TERM = 1000
# Amplitude: that of 16-bit integers stored as floats. Statistics over a set would not survive much
# more.
LOUDEST = 32_768.0
AT_ONCE = 60.0  # seconds that are read of a file at a time
SOFTWARE = "speech-recipes --synthesize"  # in the wavs of --output
DIGEST = 32  # hexadecimal digits of the hash there


class BadAudio(DataError):
    """An audio file that cannot be used; `path` names it."""

    def __init__(self, path: str, problem: str):
        super().__init__(f"{printable(path)} {problem}")
        self.path = path


def resample(waveform: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """(T,) at `source` Hz to (T',) at `target` Hz. The ratio of the rates is rounded to one with
    small terms, by less than 0.06 %: the filter from 7999 to 16000 Hz would take gigabytes."""
    return spectra.resample(waveform, *_ratio(source, target))


def _ratio(source: int, target: int) -> tuple[int, int]:
    """The two rates with small terms."""
    ratio = Fraction(min(source, target), max(source, target)).limit_denominator(LARGEST_TERM)
    low, high = ratio.numerator, ratio.denominator
    return (low, high) if source < target else (high, low)


def change_speed(waveform: torch.Tensor, factor: float) -> torch.Tensor:
    """(T,) played `factor` times faster and higher, as Kaldi does: (T / factor,)."""
    return resample(waveform, round(factor * 100), 100)


@functools.lru_cache(maxsize=2)
def speed_factors(seed: int, epoch: int, count: int, factors: tuple[float, ...]) -> np.ndarray:
    """(count,) the factor of each utterance of an epoch, one of `factors`."""
    choices = np.random.default_rng([seed, epoch, 7]).integers(0, len(factors), count)
    return np.asarray(factors, dtype=np.float32)[choices]


def read_audio(
    path: str,
    sample_rate: int,
    offset: float = 0.0,
    duration: float | None = None,
    channel: int | None = None,
) -> torch.Tensor:
    """Reads `duration` seconds from `offset` as mono fp32 (T,) at `sample_rate` Hz: one `channel`,
    counted from 0, or the average of all. Raises `BadAudio` if the file is missing, truncated or
    empty, has no such channel, or values out of range."""
    waveform, rate = read_at_its_rate(path, offset, duration, channel)
    return resample(waveform, rate, sample_rate)


def read_at_its_rate(
    path: str, offset: float = 0.0, duration: float | None = None, channel: int | None = None
) -> tuple[torch.Tensor, int]:
    """The same at the file's own rate, and that rate in Hz."""
    with _open(path) as file:
        rate = file.samplerate
        if channel is not None and channel >= file.channels:
            count = file.channels
            raise BadAudio(path, f"has no channel {channel}: it has {count}, counted from 0")
        pieces = _pieces(file, path, offset, duration, channel, AT_ONCE)
        waveform = torch.cat([torch.zeros(0), *pieces])
    if len(waveform) == 0:
        raise BadAudio(path, f"is empty{f' from {offset:g} s on' if offset else ''}")
    return _checked(path, waveform), rate


def read_in_pieces(path: str, sample_rate: int) -> Iterator[torch.Tensor]:
    """What `read_audio` reads of the whole file, in pieces of about a second."""
    is_empty = True
    with _open(path) as file:
        ratio = _ratio(file.samplerate, sample_rate)
        pieces = (_checked(path, piece) for piece in _pieces(file, path))
        for piece in spectra.resampled(pieces, *ratio):
            is_empty = is_empty and not len(piece)
            yield piece
    if is_empty:
        raise BadAudio(path, "is empty")


def _open(path: str):
    try:
        return open_sound(path)
    except Unusable as fault:
        raise BadAudio(path, f"cannot be used: {fault}") from None


def _checked(path: str, waveform: torch.Tensor) -> torch.Tensor:
    peak = float(waveform.abs().max())
    if not math.isfinite(peak):
        raise BadAudio(path, "holds samples that are not finite (NaN or infinity)")
    if peak > LOUDEST:
        raise BadAudio(path, f"holds samples of up to {peak:.3g}, where 1 is full scale")
    return waveform


def _pieces(
    file,
    path: str,
    offset: float = 0.0,
    duration: float | None = None,
    channel: int | None = None,
    seconds: float = 1.0,
) -> Iterator[torch.Tensor]:
    """The samples of a part of an open file of `open_sound`, about so many seconds at a time."""
    first = round(offset * file.samplerate)
    left = math.inf if duration is None else round(duration * file.samplerate)
    if isinstance(file, soundfile.SoundFile):
        size = int(max(1, min(left, seconds * file.samplerate)))
        pieces = _sound_pieces(file, path, first, channel, size)
    else:
        pieces = file.pieces(first, channel)
    try:
        for samples in pieces:
            yield torch.from_numpy(samples[: min(left, len(samples))])
            left -= len(samples)
            if left <= 0:
                return
    except BadStream as fault:
        raise BadAudio(path, str(fault)) from None
    except soundfile.LibsndfileError as error:
        raise BadAudio(path, f"is truncated or damaged: {_reason(error)}") from None


def _sound_pieces(
    file: soundfile.SoundFile, path: str, first: int, channel: int | None, size: int
) -> Iterator[np.ndarray]:
    """`Stream.pieces` of a file that libsndfile reads."""
    if first:  # codecs of telephones cannot be sought
        file.seek(min(first, file.frames))
    place = first
    while len(samples := file.read(size, dtype="float32", always_2d=True)):
        place += len(samples)
        yield samples.mean(axis=1) if channel is None else samples[:, channel].copy()
    if place < file.frames - END_TOLERANCE * file.samplerate:
        read, whole = place / file.samplerate, file.frames / file.samplerate
        raise BadAudio(path, f"is truncated: {read:.2f} of {whole:.2f} s could be read")


def read_cached(
    folder: str | None,
    path: str,
    sample_rate: int,
    offset: float = 0.0,
    duration: float | None = None,
    channel: int | None = None,
) -> torch.Tensor:
    """`read_audio` through a cache of decoded audio below `folder` (fp32 samples and their
    checksum, 230 MB per hour at 16 kHz), with bit-identical results. A file that changes is decoded
    again, and so is one whose entry is damaged. Raises `RunError` for the cache."""
    if not folder:
        return read_audio(path, sample_rate, offset, duration, channel)
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadAudio(path, f"cannot be read: {_reason(error)}") from None
    stamp = (status.st_size, status.st_mtime_ns)
    part = (offset, duration) if channel is None else (offset, duration, channel)
    key = repr((os.path.abspath(path), *stamp, sample_rate, *part))
    name = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    cached = Path(folder) / name[:2] / f"{name}.f32"
    with contextlib.suppress(OSError):  # not decoded yet
        content = np.fromfile(cached, np.float32)
        samples, checksum = content[:-1], content[-1:].view(np.uint32)
        if len(samples) and checksum == zlib.crc32(samples, zlib.crc32(name.encode())):
            return torch.from_numpy(samples)
    waveform = read_audio(path, sample_rate, offset, duration, channel)
    checksum = zlib.crc32(waveform.numpy(), zlib.crc32(name.encode()))
    content = waveform.numpy().tobytes() + np.uint32(checksum).tobytes()
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_file(cached, lambda temporary: temporary.write_bytes(content), durable=False)
    except OSError as error:
        reason = f"{error.strerror}; leave the flag out, or name another folder"
        raise RunError(f"--cache_audio {folder}: {reason}") from None
    return waveform


def read_utterance(corpus, index: int, sample_rate: int) -> torch.Tensor:
    """(T,) waveform of utterance `index`, through the cache `corpus.cache_audio` if there is one.
    `corpus`: an object with the columns `paths`, `offsets`, `durations` (NaN: to the end of the
    file) and `channels` (None, or -1 in a row: the average). An empty path stands for silence."""
    path = corpus.paths[index]
    if not path:
        return torch.zeros(round(float(corpus.durations[index]) * sample_rate))
    return read_cached(corpus.cache_audio, path, sample_rate, *part_of(corpus, index))


def part_of(corpus, index: int) -> tuple[float, float | None, int | None]:
    """Offset, duration and channel of utterance `index` for `read_audio`."""
    duration = float(corpus.durations[index])
    channel = -1 if corpus.channels is None else int(corpus.channels[index])
    return (
        float(corpus.offsets[index]),
        None if math.isnan(duration) else duration,
        None if channel < 0 else channel,
    )


def audio_files(paths: list[str]) -> list[Path]:
    """The files among `paths`, and every file with an audio suffix below the folders among them,
    sorted; a Mac writes others beside them, which begin with "._". Raises `UsageError` if a path
    or audio in a folder is missing."""
    suffixes = {*AUDIO_SUFFIXES, *(f".{name.lower()}" for name in soundfile.available_formats())}
    files = []
    for path in paths:
        if os.path.isdir(path):
            below = sorted(Path(path).rglob("*"))  # which follows no links: they may lead back
            inside = [each for each in below if each.suffix.lower() in suffixes]
            inside = [e for e in inside if not (e.is_dir() or e.name.startswith("._"))]
            if not inside:
                raise UsageError(f"no audio file in {path}")
            files += inside
        elif os.path.exists(path):
            files.append(Path(path))
        else:
            raise UsageError(f"{path}: no such file or folder")
    return files


def _reason(error: Exception) -> str:
    """The first line of what an exception says."""
    reason = getattr(error, "error_string", None) or getattr(error, "strerror", None)
    return (reason or first_line(error)).removeprefix("Error : ").rstrip(".")


def int16(waveform: torch.Tensor) -> np.ndarray:
    """A waveform (T,) on any device, cut off at -1 and 1, as 16-bit samples (T,)."""
    return (waveform.float().clamp(-1, 1) * 32767).round().to(torch.int16).cpu().numpy()


def write_wav(path: Path, samples: np.ndarray, sample_rate: int) -> None:
    """Writes int16 samples (T,) as a mono wav to a temporary `path`. Raises `OSError`."""
    path.write_bytes(wav(samples, sample_rate))


def write_speech(path: Path, samples: np.ndarray, sample_rate: int) -> None:
    """The same for --output, renamed, with a mark for `is_own_speech`. Raises `OSError`."""
    content = wav(samples, sample_rate)
    size = struct.pack("<I", len(content) + len(_mark(b"")) - 8)
    content = content[:4] + size + content[8:]
    write_file(path, lambda temporary: temporary.write_bytes(content + _mark(content)))


def is_own_speech(path: Path) -> bool:
    """Whether `write_speech` wrote this file and nobody has changed it since. Raises `OSError`."""
    size = len(_mark(b""))
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) < size:
            return False
        file.seek(-size, os.SEEK_END)
        if SOFTWARE.encode() not in file.read():
            return False
    content = path.read_bytes()
    return content[-size:] == _mark(content[:-size])


def wav(samples: np.ndarray, sample_rate: int) -> bytes:
    """The content of a mono wav file with int16 samples (T,)."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def _mark(content: bytes) -> bytes:
    """The chunk of a wav that names the program (LIST INFO ISFT), with a hash of the `content`."""
    digest = hashlib.blake2b(content, digest_size=DIGEST // 2).hexdigest()
    text = f"{SOFTWARE} {digest}".encode() + b"\0"
    text += b"\0" * (len(text) % 2)
    info = b"INFOISFT" + struct.pack("<I", len(text)) + text
    return b"LIST" + struct.pack("<I", len(info)) + info
