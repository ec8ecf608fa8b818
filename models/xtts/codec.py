"""Waveforms to XTTS's codes and back: mel spectrograms, the discrete VAE, Griffin-Lim.

The tensors of the DVAE have the names of Coqui's dvae.pth. Its design is that of Tortoise (Betker
2023)."""

import torch
from torch import Tensor, nn

from common.device import full_fp32, upcast
from speech.signal import spectra
from speech.signal.spectra import MelSpectrogram, mel_filters

SAMPLE_RATE = 22_050
WINDOW = 1024  # samples of a frame
HOP = 256  # samples between frames
HIGHEST = 8_000  # Hz, the upper edge of the last mel band
FLOOR = 1e-5  # least power of a mel band
N_FFT = {"dvae": 1024, "conditioning": 2048}
FRAMES_PER_CODE = 4
SAMPLES_PER_CODE = FRAMES_PER_CODE * HOP
RESIDUAL_BLOCKS = 3  # of the DVAE, on each side
GRIFFIN_LIM_STEPS = 60


def code_count(samples: int) -> int:
    """The number of codes in training of a clip of `samples` samples at 22.05 kHz. `DVAE.codes`
    returns one more if `samples` is a multiple of 1,024, because the last frame is centred on the
    sample after the end."""
    return -(-samples // SAMPLES_PER_CODE)


@torch.no_grad()
def griffin_lim(mel: Tensor, mel_stats: Tensor) -> Tensor:
    """The waveform (256 F,) at 22.05 kHz of "dvae" mel features (M, F), F > 2, without a vocoder
    and without random phases: Griffin and Lim's algorithm (1984) with the momentum of Perraudin et
    al. (2013)."""
    with torch.autocast(mel.device.type, enabled=False), full_fp32(mel.device):
        # F + 1 frames have F hops between their centres
        mel = nn.functional.pad(upcast(mel), (0, 1), "replicate")
        features = Mel("dvae", mel_stats).to(mel)
        power = spectra.linear_spectrum(
            (mel * features.mel_stats[:, None]).exp(), features.power.mel_scale.fb
        )
        window = features.power.spectrogram.window
        return spectra.griffin_lim(power, window, HOP, GRIFFIN_LIM_STEPS, momentum=0.99)


class Mel(nn.Module):
    """Waveforms (B, T) at 22.05 kHz to log-mel features (B, M, T // 256 + 1), divided by
    `mel_stats` (M,), in fp32 or better also under autocast. `kind` is "dvae", which needs T > 512,
    or "conditioning", which needs T > 1024."""

    def __init__(self, kind: str, mel_stats: Tensor):
        super().__init__()
        n_fft = N_FFT[kind]
        filters = mel_filters(
            n_fft // 2 + 1, HIGHEST, len(mel_stats), SAMPLE_RATE, has_equal_area=True
        )
        with torch.device("cpu"):
            self.power = MelSpectrogram(n_fft, HOP, torch.hann_window(WINDOW), filters)
        self.register_buffer("mel_stats", mel_stats)

    def forward(self, waveforms: Tensor) -> Tensor:
        with torch.autocast(waveforms.device.type, enabled=False), full_fp32(waveforms.device):
            return self.power(upcast(waveforms)).clamp_min(FLOOR).log() / self.mel_stats[:, None]


class DVAE(nn.Module):
    """The discrete VAE between mel features (B, M, F) and the codes (B, ceil(F / 4)) of a codebook.

    `config` gives "mel_channels" (M), "dvae_hidden" (width of the first layer; the second is twice
    as wide), "codes" (size of the codebook) and "code_dim". It is never trained here."""

    def __init__(self, config: dict):
        super().__init__()
        bands = config["mel_channels"]
        inner = config["dvae_hidden"]
        width = 2 * inner
        code_dim = config["code_dim"]
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv1d(bands, inner, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(inner, width, 3, stride=2, padding=1), nn.ReLU()),
            *(ResidualBlock(width) for _ in range(RESIDUAL_BLOCKS)),
            nn.Conv1d(width, code_dim, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv1d(code_dim, width, 1),
            *(ResidualBlock(width) for _ in range(RESIDUAL_BLOCKS)),
            nn.Sequential(UpsampledConv(width, width), nn.ReLU()),
            nn.Sequential(UpsampledConv(width, inner), nn.ReLU()),
            nn.Conv1d(inner, bands, 1),
        )
        self.codebook = Codebook(code_dim, config["codes"])

    @torch.no_grad()
    def codes(self, mel: Tensor) -> Tensor:
        """Codes (B, ceil(F / 4)), int64, of mel features (B, M, F), computed in fp32 or better."""
        with torch.autocast(mel.device.type, enabled=False), full_fp32(mel.device):
            return self.codebook.nearest(self.encoder(upcast(mel)).transpose(1, 2))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Mel features (B, M, 4 N) of codes (B, N), computed in fp32 or better."""
        with torch.autocast(codes.device.type, enabled=False), full_fp32(codes.device):
            return self.decoder(self.codebook.vectors(codes).transpose(1, 2))


class ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class UpsampledConv(nn.Module):
    """Repeats every frame, then smooths: (B, C, T) to (B, D, 2 T)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.repeat_interleave(2, dim=2))


class Codebook(nn.Module):
    """K vectors of width D, `embed` (D, K). The released ones were trained by moving averages:
    `cluster_size` (K,) is the number of vectors nearest to each code, `embed_avg` (D, K) their
    sum."""

    def __init__(self, code_dim: int, codes: int):
        super().__init__()
        embed = torch.randn(code_dim, codes)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", embed.clone())

    def nearest(self, vectors: Tensor) -> Tensor:
        """The codes (B, N) nearest to vectors (B, N, D); of equally near ones, the first."""
        # The order of the terms decides how near ties are rounded. This is the released model's.
        flat = vectors.flatten(0, 1)
        distance = flat.square().sum(1, keepdim=True) - 2 * flat @ self.embed
        distance = distance + self.embed.square().sum(0)
        return distance.argmin(1).view(vectors.shape[:-1])

    def vectors(self, codes: Tensor) -> Tensor:
        """The vectors (..., D) of codes (...)."""
        return nn.functional.embedding(codes, self.embed.t())
