"""Speech as people record it: silence before and after the words, background noise, other levels.
Everything here is drawn by the caller's generators."""

import numpy as np

LONGEST_SILENCE = 0.6  # seconds at an end
NO_SILENCE = 0.25  # share of the ends that get none


def silences(uniform: np.ndarray) -> np.ndarray:
    """Numbers from [0, 1), of any shape, to seconds of silence: none for a share of them, the
    others evenly up to LONGEST_SILENCE."""
    return LONGEST_SILENCE * np.clip((uniform - NO_SILENCE) / (1 - NO_SILENCE), 0, None)


def drawn_noise(random: np.random.Generator, samples: int) -> np.ndarray:
    """(samples,) float32 noise between white and pink: its power falls as frequency to the power of
    0 to -1. Its level is arbitrary."""
    size = 1 << (samples - 1).bit_length()  # for which an FFT is fast
    bins = size // 2 + 1
    spectrum = random.standard_normal((bins, 2), dtype=np.float32).view(np.complex64)[:, 0]
    slope = random.uniform(0, 1)
    # Without the frequency 0; below the first one a recording has nothing to hear.
    spectrum[0] = 0
    spectrum[1:] *= np.arange(1, bins, dtype=np.float32) ** np.float32(-slope / 2)
    return np.fft.irfft(spectrum, size)[:samples].astype(np.float32)


def power(waveform: np.ndarray) -> float:
    """Mean square of (T,)."""
    return float(np.square(waveform, dtype=np.float64).mean()) if len(waveform) else 0.0


def at_snr(noise: np.ndarray, speech_power: float, snr_db: float) -> np.ndarray:
    """The noise (T,) at a level of `snr_db` below speech of this power. Silent noise stays."""
    noise_power = power(noise)
    if noise_power == 0.0:
        return noise
    wanted = speech_power / 10 ** (snr_db / 10)
    return noise * np.float32(np.sqrt(wanted / noise_power))
