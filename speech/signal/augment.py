"""Speech as people record it: silence before and after the words, background noise, other levels.
For training utterances it is drawn by (seed, epoch, index) alone."""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import DataError, UsageError
from speech.data.columns import printable
from speech.data.headers import THREADS
from speech.signal.audio import SAMPLE_RATE, audio_files, read_at_its_rate, read_audio

# Seconds of silence at an end, by a number from [0, 1): none at six ends of ten, much at one.
SILENCE = ((0.0, 0.6, 0.9, 1.0), (0.0, 0.0, 0.6, 3.0))
QUIET = 1024  # samples, 64 ms: the quietest of a recording are what its silence sounds like
PAUSES = 0.03  # share of training utterances of which only the silence is left
NOISY = 0.5  # share of training utterances with noise
SNR = (10.0, 40.0)  # dB
GAIN = (-12.0, 6.0)  # dB, less if the peak would be above 1


# --- what is drawn --------------------------------------------------------------------------------


def silences(uniform: np.ndarray) -> np.ndarray:
    """Numbers from [0, 1), of any shape, to seconds of silence by SILENCE."""
    return np.interp(uniform, *SILENCE)


def room_tone(random: np.random.Generator, recording: np.ndarray, samples: int) -> np.ndarray:
    """(samples,) float32 noise with the level and the spectrum of the quietest part of a recording
    (T,): white noise that is filtered by that part. Zeros if the recording is shorter than it."""
    count = len(recording) // QUIET
    if not (count and samples):
        return np.zeros(samples, np.float32)
    parts = recording[: count * QUIET].reshape(count, QUIET)
    quietest = parts[np.square(parts).sum(axis=1).argmin()]
    size = 1 << (samples + QUIET).bit_length()  # for which an FFT is fast
    white = np.fft.rfft(random.standard_normal(size, dtype=np.float32))
    tone = np.fft.irfft(white * np.fft.rfft(quietest, size), size)
    return (tone[:samples] / np.sqrt(QUIET)).astype(np.float32)


def drawn_noise(random: np.random.Generator, samples: int) -> np.ndarray:
    """(samples,) float32 noise of any level, between white and pink."""
    size = 1 << max(1, (samples - 1).bit_length())  # for which an FFT is fast
    bins = size // 2 + 1
    spectrum = random.standard_normal((bins, 2), dtype=np.float32).view(np.complex64)[:, 0]
    slope = random.uniform(0, 1)
    spectrum[0] = 0  # a recording has no constant part
    spectrum[1:] *= np.arange(1, bins, dtype=np.float32) ** np.float32(-slope / 2)
    return np.fft.irfft(spectrum, size)[:samples].astype(np.float32)


def power(waveform: np.ndarray) -> float:
    """Mean square of (T,)."""
    return float(np.square(waveform, dtype=np.float64).mean()) if len(waveform) else 0.0


def at_snr(noise: np.ndarray, speech_power: float, snr_db: float) -> np.ndarray:
    """The noise (T,) `snr_db` below speech of this power. Silent noise stays silent."""
    noise_power = power(noise)
    if noise_power == 0.0:
        return noise
    wanted = speech_power / 10 ** (snr_db / 10)
    return noise * np.float32(np.sqrt(wanted / noise_power))


# --- noise from files -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Noises:
    """Files of noise, sorted, and their lengths in seconds."""

    paths: list[str]
    seconds: list[float]

    def draw(self, random: np.random.Generator, samples: int) -> np.ndarray:
        """(samples,) float32 at 16 kHz from a random place of a file, repeated if it is shorter."""
        number = int(random.integers(len(self.paths)))
        needed = samples / SAMPLE_RATE
        offset = random.random() * max(0.0, self.seconds[number] - needed)
        part = read_audio(self.paths[number], SAMPLE_RATE, offset, needed)
        return np.resize(part.numpy(), samples)


def _length(path: str) -> float | str:
    """Seconds of a file of noise, or why it cannot be used. It is decoded, because training would
    find what is damaged or silent hours later."""
    try:
        waveform, rate = read_at_its_rate(path)
    except DataError as error:
        return str(error)
    if not float(waveform.abs().max()) > 0:
        return f"{printable(path)} is silent"
    return len(waveform) / rate


@functools.cache
def read_noises(folder: str | None) -> Noises | None:
    """The files below --noise_dir, None without it. Raises `UsageError` and `DataError`."""
    if not folder:
        return None
    try:
        paths = [str(path) for path in audio_files([folder])]
    except UsageError as error:
        raise UsageError(f"--noise_dir: {error}") from None
    with ThreadPoolExecutor(THREADS) as pool:
        lengths = list(pool.map(_length, paths))
    faults = [length for length in lengths if isinstance(length, str)]
    if faults:
        some = f"{len(faults)} of {len(paths)} files"
        raise DataError(f"--noise_dir {folder}: {some} cannot be used, the first: {faults[0]}")
    print(f"noise: {len(paths)} files, {sum(lengths) / 60:.1f} min, in {folder}")
    return Noises(paths, lengths)


# --- training utterances --------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def chosen(seed: int, epoch: int, count: int, share: float) -> np.ndarray:
    """(count,) which of the utterances of an epoch are augmented: a share of them. What is chosen
    for a share is chosen for a larger one, too."""
    return np.random.default_rng([seed, epoch, 0, 4]).random(count, np.float32) < share


@functools.lru_cache(maxsize=2)
def _ends(seed: int, epoch: int, count: int) -> np.ndarray:
    """(count, 2) seconds of silence before and after each utterance of an epoch."""
    return silences(np.random.default_rng([seed, epoch, 0, 2]).random((count, 2), np.float32))


@dataclass(frozen=True)
class Augmentation:
    """--wave_augment: silence at the ends, noise and gain for a training set of `count` utterances.
    The silence sounds like the quietest part of the utterance, because features are often scaled by
    what else is in it: a model that has only met speech writes words into a pause. With silence an
    utterance has at most `longest` seconds; without `noises` noise is drawn."""

    seed: int
    count: int
    longest: float
    noises: Noises | None = None

    def ends(self, seconds: np.ndarray, epoch: int, rows=slice(None)) -> np.ndarray:
        """(N, 2) seconds of silence before and after utterances of `seconds` (N,)."""
        ends = _ends(self.seed, epoch, self.count)[rows]
        room = np.clip(self.longest - seconds, 0, None)
        return ends * np.minimum(1, room / np.maximum(ends.sum(-1), 1e-6))[..., None]

    def lengths(self, seconds: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) seconds of the whole set's utterances with silence."""
        return seconds + self.ends(seconds, epoch).sum(-1)

    def is_pause(self, index: int, epoch: int) -> bool:
        """Whether utterance `index` is a pause without a word in an epoch."""
        return np.random.default_rng([self.seed, epoch, index, 5]).random() < PAUSES

    def pause(self, waveform: torch.Tensor, index: int, epoch: int) -> torch.Tensor:
        """(T,) that sounds like the quietest part of utterance `index` (T,)."""
        random = np.random.default_rng([self.seed, epoch, index, 6])
        return torch.from_numpy(room_tone(random, waveform.numpy(), len(waveform)))

    def apply(self, waveform: torch.Tensor, index: int, epoch: int) -> torch.Tensor:
        """Utterance `index` (T,) as it is in an epoch."""
        speech = waveform.numpy()
        random = np.random.default_rng([self.seed, epoch, index, 1])
        ends = self.ends(len(speech) / SAMPLE_RATE, epoch, index)
        before, after = (ends * SAMPLE_RATE).astype(int).tolist()
        tone = room_tone(random, speech, before + after)
        whole = np.concatenate([tone[:before], speech, tone[before:]])
        gain = random.uniform(*GAIN)
        snr_db = random.uniform(*SNR)
        if random.random() < NOISY:
            draw = self.noises.draw if self.noises else drawn_noise
            noise = draw(random, len(whole))
            whole = whole + at_snr(noise, power(speech), snr_db)
        peak = float(np.abs(whole).max())
        gain = min(10 ** (gain / 20), 1 / max(peak, 1e-6))
        return torch.from_numpy(whole * np.float32(gain))
