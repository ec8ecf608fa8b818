"""Audio files to waveforms: reading, resampling, speed perturbation, a cache of decoded audio."""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import wave
from fractions import Fraction
from pathlib import Path

import numpy as np
import soundfile
import torch
import torchaudio

from common.errors import DataError, RunError, UsageError
from common.files import write_file
from speech.headers import END_TOLERANCE, UNKNOWN_LENGTH, missing_seconds

SAMPLE_RATE = 16_000  # Hz, of every recogniser
LARGEST_TERM = 1000  # of the ratio of two sample rates: the size of the resampling filter is the product of its terms
AUDIO_SUFFIXES = {".mp3", ".m4a", ".aac", ".opus", ".wma", ".webm", ".mp4", ".oga", ".aif"}  # besides libsndfile's own


class BadAudio(DataError):
    """An audio file that cannot be used; `path` names it."""

    def __init__(self, path: str, problem: str):
        super().__init__(f"{path} {problem}")
        self.path = path


@functools.lru_cache(maxsize=32)
def _resampler(source: int, target: int) -> torchaudio.transforms.Resample:
    return torchaudio.transforms.Resample(source, target)


def resample(waveform: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """(T,) at `source` Hz to (T',) at `target` Hz. The ratio of the rates is rounded to one with small terms, by at
    most 0.05 %: the filter from 7999 to 16000 Hz would take gigabytes."""
    ratio = Fraction(source, target).limit_denominator(LARGEST_TERM)
    return waveform if ratio == 1 else _resampler(ratio.numerator, ratio.denominator)(waveform)


def change_speed(waveform: torch.Tensor, factor: float) -> torch.Tensor:
    """(T,) played `factor` times faster, which raises the pitch as in Kaldi's speed perturbation: (T / factor,)."""
    return resample(waveform, round(factor * 100), 100)


@functools.lru_cache(maxsize=2)
def speed_factors(seed: int, epoch: int, count: int, factors: tuple[float, ...]) -> np.ndarray:
    """(count,) the factor of each utterance of an epoch, one of `factors`."""
    choices = np.random.default_rng([seed, epoch, 7]).integers(0, len(factors), count)
    return np.asarray(factors, dtype=np.float32)[choices]


def read_audio(path: str, sample_rate: int, offset: float = 0.0, duration: float | None = None) -> torch.Tensor:
    """Reads `duration` seconds from `offset` as mono fp32 (T,) at `sample_rate` Hz; channels are averaged. Formats that
    libsndfile does not know are decoded by ffmpeg if it is installed. Raises `BadAudio` if the file is missing,
    truncated, empty or not finite."""
    try:
        file = soundfile.SoundFile(path)
        if file.frames >= UNKNOWN_LENGTH:
            file.close()
            raise OSError("its header states no length")
    except (OSError, TypeError, soundfile.LibsndfileError) as error:  # TypeError: .raw, which has no header
        rate, waveform = sample_rate, _read_with_ffmpeg(path, sample_rate, offset, duration, error)
    else:
        with file:
            rate, waveform = file.samplerate, _read(file, path, offset, duration)
    if len(waveform) == 0:
        raise BadAudio(path, f"is empty{f' from {offset:g} s on' if offset else ''}")
    if not torch.isfinite(waveform).all():
        raise BadAudio(path, "holds samples that are not finite (NaN or infinity)")
    return resample(waveform, rate, sample_rate)


def _read(file: soundfile.SoundFile, path: str, offset: float, duration: float | None) -> torch.Tensor:
    rate, seconds = file.samplerate, file.frames / file.samplerate
    start = min(round(offset * rate), file.frames)
    frames = file.frames - start if duration is None else min(round(duration * rate), file.frames - start)
    try:
        file.seek(start)
        samples = file.read(frames, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise BadAudio(path, f"is truncated or damaged: {_reason(error)}") from None
    except MemoryError:
        raise BadAudio(path, f"does not fit into memory: its header states {seconds / 3600:.0f} h") from None
    missing = missing_seconds(file)
    if missing > END_TOLERANCE:
        raise BadAudio(path, f"is truncated: {seconds:.2f} of {seconds + missing:.2f} s are there")
    if len(samples) < frames - END_TOLERANCE * rate:  # the length of an MP3 may be an estimate
        raise BadAudio(path, f"is truncated: {len(samples) / rate:.2f} of {frames / rate:.2f} s could be read")
    return torch.from_numpy(samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0])


def _read_with_ffmpeg(
    path: str, sample_rate: int, offset: float, duration: float | None, error: Exception
) -> torch.Tensor:
    try:
        with open(path, "rb") as file:
            is_empty = not file.read(1)
    except (OSError, ValueError) as failure:
        raise BadAudio(path, f"cannot be read: {_reason(failure)}") from None
    if is_empty:
        raise BadAudio(path, "is empty")
    if not shutil.which("ffmpeg"):
        raise BadAudio(path, f"cannot be read: {_reason(error)} (and ffmpeg, which may know it, is not installed)")
    command = ["ffmpeg", "-v", "error", "-nostdin", "-ss", str(offset), "-i", f"file:{path}"]
    command += ["-t", str(duration)] if duration is not None else []
    result = subprocess.run([*command, "-f", "f32le", "-ac", "1", "-ar", str(sample_rate), "-"], capture_output=True)
    if result.returncode or result.stderr:  # for a truncated file: a complaint and status 0
        complaints = result.stderr.decode(errors="replace").strip().splitlines() or [_reason(error)]
        complaint = re.sub(r"^(\[[^\]]*\] *)+", "", complaints[0])  # without the part of ffmpeg and its address
        raise BadAudio(path, f"cannot be read: {complaint}")
    return torch.from_numpy(np.frombuffer(result.stdout, dtype="<f4").copy())


def read_cached(
    folder: str | None, path: str, sample_rate: int, offset: float = 0.0, duration: float | None = None
) -> torch.Tensor:
    """`read_audio` through a cache of decoded audio below `folder` (fp32 samples, 230 MB per hour at 16 kHz), with
    bit-identical results. A file that changes is decoded again. Raises `RunError` if the cache cannot be written."""
    if not folder:
        return read_audio(path, sample_rate, offset, duration)
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadAudio(path, f"cannot be read: {_reason(error)}") from None
    key = repr((os.path.abspath(path), status.st_size, status.st_mtime_ns, sample_rate, offset, duration))
    name = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    cached = Path(folder) / name[:2] / f"{name}.npy"
    try:
        return torch.from_numpy(np.array(np.load(cached, mmap_mode="r")))
    except (OSError, ValueError, EOFError):
        pass  # not decoded yet, or truncated by a full disk
    waveform = read_audio(path, sample_rate, offset, duration)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.save(file, waveform.numpy())

    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_file(cached, write, durable=False)
    except OSError as error:
        reason = f"{error.strerror}; leave the flag out, or name another folder"
        raise RunError(f"--cache_audio {folder}: {reason}") from None
    return waveform


def read_utterance(corpus, index: int, sample_rate: int, cache: str | None) -> torch.Tensor:
    """(T,) waveform of utterance `index` through `read_cached`. `corpus`: an object with the columns `paths`, `offsets`
    and `durations` (NaN: to the end of the file)."""
    duration = None if np.isnan(corpus.durations[index]) else float(corpus.durations[index])
    return read_cached(cache, corpus.paths[index], sample_rate, float(corpus.offsets[index]), duration)


def audio_files(paths: list[str]) -> list[Path]:
    """The files among `paths`, and every file with an audio suffix below the folders among them, sorted. Raises
    `UsageError` if a path does not exist, or if there is no audio file in a folder."""
    suffixes = {f".{name.lower()}" for name in soundfile.available_formats()} | AUDIO_SUFFIXES
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
            if not inside:
                raise UsageError(f"no audio file in {path}")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(f"{path}: no such file or folder")
    return files


def _reason(error: Exception) -> str:
    message = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error) or "unknown error"
    return message.splitlines()[0].removeprefix("Error : ").rstrip(".")


def write_wav(path: Path, samples: np.ndarray, sample_rate: int) -> None:
    """Writes int16 samples (T,) as a mono wav."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.tobytes())
