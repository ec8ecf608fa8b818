"""Waveforms to features, on the training device: log-mel, normalisation, SpecAugment."""

import numpy as np
import torch
from torch import Tensor, nn

from common.device import full_fp32
from speech.signal.spectra import mel_filters

WINDOW = 0.025  # seconds: length of a frame
HOP = 0.010  # seconds: distance between frames
# Power that is added to mel bands, above 16-bit quantisation noise: digital silence would dominate
# the scale.
FLOOR = 1e-6


def frames(samples, sample_rate: int):
    """The number of whole frames in `samples`, an int or a tensor; at least 1."""
    window = round(WINDOW * sample_rate)
    hop = round(HOP * sample_rate)
    count = (samples - window) // hop + 1
    return count.clamp_min(1) if isinstance(count, Tensor) else max(1, count)


class LogMel(nn.Module):
    """Waveforms (B, T) at `sample_rate` Hz to log-mel features (B, F, n_mels), F = frames(T), in
    fp32 or better also under autocast. Frames are not centred: each sees only samples of its own
    utterance, so padding changes nothing."""

    def __init__(self, sample_rate: int, n_mels: int = 80):
        super().__init__()
        self.window = round(WINDOW * sample_rate)
        self.hop = round(HOP * sample_rate)
        self.n_fft = 1 << (self.window - 1).bit_length()
        filters = mel_filters(self.n_fft // 2 + 1, sample_rate / 2, n_mels, sample_rate)
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer(
            "taper", torch.hann_window(self.window, periodic=False), persistent=False
        )

    def forward(self, waveforms: Tensor) -> Tensor:
        with torch.autocast(waveforms.device.type, enabled=False):
            waveforms = nn.functional.pad(waveforms, (0, max(0, self.window - waveforms.shape[1])))
            windows = waveforms.unfold(1, self.window, self.hop) * self.taper  # (B, F, window)
            power = torch.fft.rfft(windows, self.n_fft).abs().square()  # (B, F, n_fft / 2 + 1)
            with full_fp32(power.device):
                return (power @ self.filters + FLOOR).log()


class FeatureNorm(nn.Module):
    """Normalises features (B, F, M) with lengths (B,) by the mean and deviation of the training
    set, which are part of the weights. Padding becomes 0."""

    def __init__(self, n_mels: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_mels))
        self.register_buffer("std", torch.ones(n_mels))

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        valid = valid_mask(lengths, features.shape[1])[:, :, None]
        return ((features - self.mean) / self.std).masked_fill(~valid, 0.0)

    @torch.no_grad()
    def measure(self, features: list[Tensor]) -> None:
        """Sets the statistics from features (F, M) of training utterances, else 0 and 1."""
        if not features:
            return
        together = torch.cat(features).double()
        self.mean.copy_(together.mean(0))
        # A single frame has no unbiased deviation.
        self.std.copy_(together.std(0, correction=0).clamp_min(1e-3))


def valid_mask(lengths: Tensor, size: int) -> Tensor:
    """(B, size), True at positions below each of `lengths` (B,)."""
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]


def random_masks(random: np.random.Generator, count: int, widest: float) -> Tensor:
    """(count, 2) start and end of SpecAugment masks as shares of an axis, up to `widest`."""
    width = random.uniform(0, widest, count)
    start = random.uniform(0, 1, count) * (1 - width)
    return torch.from_numpy(np.stack([start, start + width], axis=1).astype(np.float32))


def span_mask(random: np.random.Generator, size: int, share: float, span: int) -> Tensor:
    """(size,), True in spans of `span` places at random beginnings, as many as would cover a
    `share` of the places if none overlapped (Baevski et al. 2020, "wav2vec 2.0")."""
    mask = np.zeros(size, dtype=bool)
    count = int(share * size / span + random.random())
    starts = max(1, size - span + 1)
    for first in random.choice(starts, min(count, starts), replace=False):
        mask[first : first + span] = True
    return torch.from_numpy(mask)


def spec_augment(
    features: Tensor, lengths: Tensor, frequency_masks: Tensor, time_masks: Tensor
) -> Tensor:
    """SpecAugment (Park et al. 2019): sets bands and spans of normalised features (B, F, M) to 0.

    Masks (B, N, 2) are shares of the number of bands and of each utterance's own length. They come
    with the batch, drawn from (seed, epoch, utterance), so an utterance's mask does not depend on
    how its global batch is split."""

    def covered(masks: Tensor, size: int, extent: Tensor) -> Tensor:
        edges = (masks * extent[:, None, None]).round()  # (B, N, 2)
        position = torch.arange(size, device=features.device)
        return ((position >= edges[..., :1]) & (position < edges[..., 1:])).any(1)  # (B, size)

    bands = torch.full_like(lengths, features.shape[2])
    time = covered(time_masks, features.shape[1], lengths)[:, :, None]
    frequency = covered(frequency_masks, features.shape[2], bands)[:, None, :]
    return features.masked_fill(time | frequency, 0.0)
