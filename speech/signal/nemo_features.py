"""NVIDIA's log-mel features, as FastConformer models are trained on (NeMo's
AudioToMelSpectrogramPreprocessor)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.device import full_fp32
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import valid_mask
from speech.signal.spectra import mel_filters

N_FFT = 512  # samples at 16 kHz
WINDOW = 400
HOP = 160
PRE_EMPHASIS = 0.97
FLOOR = 2.0**-24  # power added to every band before the logarithm
EPSILON = 1e-5  # added to the standard deviation


def frames(samples):
    """The number of valid frames of so many samples, an int or a tensor; at least 1."""
    count = samples // HOP
    if isinstance(count, Tensor):
        return count.clamp_min(1)
    return max(1, count)


class MelFeatures(nn.Module):
    """Waveforms (B, T) at 16 kHz and their lengths (B,) to log-mel features (B, F, M), F =
    max(frames(lengths)), in fp32 or better also under autocast. If they are `normalised` (not in a
    stream), they have mean 0 and deviation 1 in every band over the valid frames. Padding becomes
    0."""

    def __init__(self, num_mel_bins: int, normalised: bool = True):
        super().__init__()
        self.normalised = normalised
        filters = mel_filters(
            N_FFT // 2 + 1, SAMPLE_RATE / 2, num_mel_bins, SAMPLE_RATE, "slaney", True
        )
        with torch.device("cpu"):
            window = torch.hann_window(WINDOW, periodic=False)
        self.register_buffer("filters", filters, persistent=False)  # (N_FFT / 2 + 1, M)
        self.register_buffer("window", window, persistent=False)

    def forward(self, waveforms: Tensor, lengths: Tensor, count: int) -> Tensor:
        """`count`: the number of frames to return, that of the longest waveform."""
        with torch.autocast(waveforms.device.type, enabled=False), full_fp32(waveforms.device):
            x = waveforms[:, 1:] - PRE_EMPHASIS * waveforms[:, :-1]
            x = torch.cat([waveforms[:, :1], x], dim=1)
            x = x.masked_fill(~valid_mask(lengths, x.shape[1]), 0.0)
            x = self.of_windows(F.pad(x, (N_FFT // 2, N_FFT // 2)))[:, :count]
            lengths = frames(lengths)
            valid = valid_mask(lengths, count)[:, :, None]
            if not self.normalised:
                return x.masked_fill(~valid, 0.0)
            total = lengths[:, None, None]
            mean = (x * valid).sum(1, keepdim=True) / total
            variance = ((x - mean).square() * valid).sum(1, keepdim=True) / (total - 1).clamp_min(1)
            return ((x - mean) / (variance.sqrt() + EPSILON)).masked_fill(~valid, 0.0)

    def of_windows(self, x: Tensor) -> Tensor:
        """Waveforms after pre-emphasis (B, N_FFT + HOP (F - 1)) to features (B, F, M) that are not
        normalised. A frame sees the WINDOW samples in the middle of its N_FFT."""
        x = torch.stft(x, N_FFT, HOP, WINDOW, self.window, center=False, return_complex=True)
        x = x.abs().square().transpose(1, 2)  # (B, F, N_FFT / 2 + 1)
        return (x @ self.filters + FLOOR).log()

    def step(self, waveform: Tensor, count: int) -> Tensor:
        """Features (1, `count`, M) of a part (T,) of a longer waveform, which begins with the
        sample before the first window. Zeros follow it if it is short."""
        with torch.autocast(waveform.device.type, enabled=False), full_fp32(waveform.device):
            length = WINDOW + HOP * (count - 1)
            x = (waveform[1:] - PRE_EMPHASIS * waveform[:-1])[:length]
            beside = (N_FFT - WINDOW) // 2
            return self.of_windows(F.pad(x[None], (beside, beside + length - len(x))))
