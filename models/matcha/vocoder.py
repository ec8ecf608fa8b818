"""Mel frames to waveforms: Griffin and Lim's algorithm, which needs no training, and Vocos (Siuzdak
2024), which predicts a spectrum in one pass.

Vocos's tensors have the names of the released checkpoints. Both make 256 samples of each frame, and
both are programs for `onnx.py` if their Fourier transforms are convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.device import full_fp32, upcast
from models.matcha.mels import BANDS, EDGE, HOP, N_FFT, LogMel
from speech.signal import spectra

BINS = N_FFT // 2 + 1
STEPS = 60  # of Griffin and Lim
MOMENTUM = 0.99
LOUDEST = 100.0  # of Vocos's magnitudes
TINY = 1e-8
SIZES = {"demo": {"width": 128, "layers": 4}, "full": {"width": 512, "layers": 8}}
CONFIG = {"width": range(8, 4097), "layers": range(1, 65)}  # what a checkpoint's record may have


# --- Fourier transforms ---------------------------------------------------------------------------


class Fourier(nn.Module):
    """Spectra of frames, as pairs (B, F, 513) of real and imaginary parts, to waveforms with their
    edges (B, 256 F + 768) by windows that overlap, and back."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT), persistent=False)

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        frames = torch.fft.irfft(torch.complex(real, imaginary)) * self.window
        weights = self.window.square().expand(len(frames), frames.shape[1], -1)
        return self.overlapped(frames) / self.overlapped(weights).clamp_min(TINY)

    def overlapped(self, frames: Tensor) -> Tensor:
        """The sum of frames (B, F, 1024), 256 samples apart."""
        size = (1, HOP * (frames.shape[1] - 1) + N_FFT)
        return F.fold(frames.transpose(1, 2), size, (1, N_FFT), stride=(1, HOP))[:, 0, 0]

    def spectrum(self, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(waveforms.unfold(1, N_FFT, HOP) * self.window)
        return spectrum.real, spectrum.imag


class ConvolutionalFourier(nn.Module):
    """`Fourier` as convolutions, which every ONNX program has."""

    def __init__(self):
        super().__init__()
        window = torch.hann_window(N_FFT, dtype=torch.float64)
        spectrum = torch.fft.rfft(torch.eye(N_FFT, dtype=torch.float64))  # (N_FFT, BINS)
        forward = torch.cat([spectrum.real, spectrum.imag], 1).t() * window
        eye = torch.eye(BINS, dtype=torch.float64)
        nothing = torch.zeros_like(eye)
        inverse = torch.cat([torch.complex(eye, nothing), torch.complex(nothing, eye)])
        inverse = torch.fft.irfft(inverse) * window  # (2 BINS, N_FFT)
        for name, values in (
            ("analysis", forward[:, None]),
            ("synthesis", inverse[:, None]),
            ("weights", window.square()[None, None]),
        ):
            self.register_buffer(name, values.float())

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        spectrum = torch.cat([real, imaginary], 2).transpose(1, 2)
        waveforms = F.conv_transpose1d(spectrum, self.synthesis, stride=HOP)
        ones = torch.ones_like(spectrum[:, :1])
        weights = F.conv_transpose1d(ones, self.weights, stride=HOP).clamp_min(TINY)
        return (waveforms / weights)[:, 0]

    def spectrum(self, waveforms: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = F.conv1d(waveforms[:, None], self.analysis, stride=HOP).transpose(1, 2)
        return spectrum[..., :BINS], spectrum[..., BINS:]


# --- without training -----------------------------------------------------------------------------


class GriffinLim(nn.Module):
    """Mel frames (B, F, 80) to waveforms (B, 256 F) whose frames are near to them in magnitude,
    with the momentum of Perraudin et al. (2013). Phases begin at 0."""

    def __init__(self, steps: int = STEPS):
        super().__init__()
        self.steps = steps
        self.fourier = Fourier()
        # Persistent, or an ONNX program would have a copy for each use.
        filters = LogMel().filters
        self.register_buffer("filters", filters)
        inverse = torch.linalg.pinv(filters.cpu().t()).to(filters.device)
        self.register_buffer("inverse", inverse)

    def forward(self, mels: Tensor) -> Tensor:
        with torch.autocast(mels.device.type, enabled=False), full_fp32(mels.device):
            bands = upcast(mels).exp().transpose(1, 2)
            magnitude = spectra.linear_spectrum(bands, self.filters, self.inverse).transpose(1, 2)
            real, imaginary = magnitude, torch.zeros_like(magnitude)
            previous = torch.zeros_like(magnitude), torch.zeros_like(magnitude)
            for _ in range(self.steps):
                rebuilt = self.fourier.spectrum(self.fourier(real, imaginary))
                real, imaginary = (
                    new - old * (MOMENTUM / (1 + MOMENTUM))
                    for new, old in zip(rebuilt, previous, strict=True)
                )
                scale = magnitude / (real.square() + imaginary.square()).sqrt().clamp_min(TINY)
                real, imaginary = real * scale, imaginary * scale
                previous = rebuilt
            return self.fourier(real, imaginary)[:, EDGE:-EDGE]


# --- Vocos ----------------------------------------------------------------------------------------


class Vocos(nn.Module):
    """Mel frames (B, F, 80) to waveforms (B, 256 F)."""

    def __init__(self, config: dict):
        super().__init__()
        self.backbone = Backbone(config["width"], config["layers"])
        self.head = nn.Module()  # released files have this level
        self.head.out = nn.Linear(config["width"], 2 * BINS)
        self.fourier = Fourier()
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, mels: Tensor) -> Tensor:
        x = upcast(self.head.out(self.backbone(mels)))
        with torch.autocast(mels.device.type, enabled=False), full_fp32(mels.device):
            magnitude = x[..., :BINS].exp().clamp_max(LOUDEST)
            phase = x[..., BINS:]
            waveforms = self.fourier(magnitude * phase.cos(), magnitude * phase.sin())
            return waveforms[:, EDGE:-EDGE]


class Backbone(nn.Module):
    """Mel frames (B, F, 80) to (B, F, width) by ConvNeXt layers (Liu et al. 2022)."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embed = nn.Conv1d(BANDS, width, 7, padding=3)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.convnext = nn.ModuleList(ConvNeXt(width, 1 / layers) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, mels: Tensor) -> Tensor:
        x = self.embed(mels.transpose(1, 2)).transpose(1, 2)
        x = self.norm(x)
        for layer in self.convnext:
            x = layer(x)
        return self.final_layer_norm(x)


class ConvNeXt(nn.Module):
    def __init__(self, width: int, scale: float):
        super().__init__()
        self.dwconv = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 3 * width)
        self.pwconv2 = nn.Linear(3 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x.transpose(1, 2)).transpose(1, 2))
        return x + self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
