"""Mel frames of Matcha-TTS, which vocoders read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.device import full_fp32, upcast
from speech.signal.spectra import mel_filters

SAMPLE_RATE = 22_050
N_FFT = 1024
HOP = 256  # samples of a frame
BANDS = 80
HIGHEST = 8_000  # Hz, the upper edge of the last band
EDGE = (N_FFT - HOP) // 2  # samples before the first frame and after the last that are mirrored
TINY = 1e-9  # power beside that of a frequency bin
FLOOR = 1e-5  # least magnitude of a band


def frame_count(samples):
    """The number of frames of a clip of so many samples, a number or a tensor."""
    return samples // HOP


def with_edges(waveform: Tensor) -> Tensor:
    """A clip (T,), T > 384, with its mirrored ends, (T + 768,). This is done before clips are
    padded, so that the last frames do not depend on the padding."""
    return F.pad(waveform[None, None], (EDGE, EDGE), mode="reflect")[0, 0]


def log_bands(waveforms: Tensor, window: Tensor, hop: int, filters: Tensor) -> Tensor:
    """The logarithms (B, F, M) of magnitudes in the mel bands of `filters` (N, M), of (B, T)."""
    windows = waveforms.unfold(1, len(window), hop) * window
    magnitude = (torch.fft.rfft(windows).abs().square() + TINY).sqrt()
    return (magnitude @ filters).clamp_min(FLOOR).log()


class LogMel(nn.Module):
    """Waveforms with their mirrored ends (B, T + 768) to the logarithms of magnitudes in mel bands
    (B, F, 80), F = T // 256, in fp32 or better also under autocast."""

    def __init__(self):
        super().__init__()
        filters = mel_filters(N_FFT // 2 + 1, HIGHEST, BANDS, SAMPLE_RATE, "slaney", True)
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer("window", torch.hann_window(N_FFT), persistent=False)

    def forward(self, waveforms: Tensor) -> Tensor:
        with torch.autocast(waveforms.device.type, enabled=False), full_fp32(waveforms.device):
            return log_bands(upcast(waveforms), self.window, HOP, self.filters)
