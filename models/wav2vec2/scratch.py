"""Initial weights of a wav2vec 2.0 that is trained from scratch on labelled speech alone."""

import math

import torch

from models.wav2vec2.model import Wav2Vec2
from speech.signal.audio import SAMPLE_RATE

LOWEST = 60.0  # Hz
HIGHEST = 7600.0  # Hz
WIDEST = 1 / 6  # deviation of a filter in time, as a share of the kernel
AUDIBLE = 1e-4  # deviation of a filter's output, below which it is not scaled up


def gabor_filters(count: int, kernel: int) -> torch.Tensor:
    """(2 count, kernel): pairs of a cosine and a sine under a Gaussian, at frequencies that are
    even on the mel scale, as wide as their distance allows."""
    lowest, highest = (2595 * math.log10(1 + hertz / 700) for hertz in (LOWEST, HIGHEST))
    mels = torch.linspace(lowest, highest, count + 2)
    hertz = 700 * (10 ** (mels / 2595) - 1)
    bandwidth = (hertz[2:] - hertz[:-2]) / 2
    deviation = (SAMPLE_RATE / (2 * math.pi * bandwidth)).clamp_max(kernel * WIDEST)
    time = torch.arange(kernel) - kernel / 2
    taper = torch.exp(-0.5 * (time / deviation[:, None]).square())
    angle = 2 * math.pi * hertz[1:-1, None] / SAMPLE_RATE * time
    return torch.stack([taper * angle.cos(), taper * angle.sin()], 1).flatten(0, 1)


@torch.no_grad()
def fit_to_data(model: Wav2Vec2, audio: torch.Tensor) -> None:
    """Makes a filter bank of a first convolution that is long enough: each filter has a deviation
    of 1 over `audio` (T,). From random filters, three hours of speech are too few to begin with."""
    conv = model.feature_extractor.conv_layers[0].conv
    channels, _, kernel = conv.weight.shape
    if kernel < SAMPLE_RATE // 100 or channels % 2:
        return
    conv.weight.copy_(gabor_filters(channels // 2, kernel)[:, None])
    conv.bias.zero_()
    audio = (audio - audio.mean()) / audio.std()
    power = conv(audio[None, None])[0].square().mean(1)  # (C,)
    deviation = power.view(-1, 2).mean(1).sqrt().clamp_min(AUDIBLE).repeat_interleave(2)
    conv.weight.div_(deviation[:, None, None])
