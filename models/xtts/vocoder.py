"""Latents of the GPT to a waveform in a speaker's voice: HiFiGAN and the speaker encoder of
XTTS-v2.

HiFiGAN is Kong et al.'s (2020), the speaker encoder the SE-ResNet of Heo et al. (2020). The tensors
have the names that are below `hifigan_decoder.` in Coqui's model.pth. Nothing here is trained."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, leaky_relu
from torch.nn.utils.parametrizations import weight_norm

from common.device import full_fp32, upcast
from models.xtts.codec import SAMPLE_RATE, SAMPLES_PER_CODE
from speech.signal.spectra import MelSpectrogram, mel_filters

OUTPUT_RATE = 24_000
SPEAKER_RATE = 16_000
SPEAKER_BANDS = 64
PRE_EMPHASIS = 0.97
FLOOR = 1e-6  # power added to every band before the logarithm
KERNELS = (3, 7, 11)  # of HiFiGAN's residual blocks
DILATIONS = (1, 3, 5)
SLOPE = 0.1  # of HiFiGAN's leaky ReLU
LAST_SLOPE = 0.01


def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        SqueezeBlock(channels, width, stride),
        *(SqueezeBlock(width, width, stride=1) for _ in range(blocks - 1)),
    )


class HifiDecoder(nn.Module):
    """Latents (B, T, d) of T codes and speaker vectors (B, `speaker`) to waveforms at 24 kHz."""

    def __init__(
        self,
        d_model: int = 1024,
        channels: int = 512,
        rates: tuple[int, ...] = (8, 8, 2, 2),
        kernels: tuple[int, ...] = (16, 16, 4, 4),
        speaker: int = 512,
        filters: tuple[int, ...] = (32, 64, 128, 256),
        blocks: tuple[int, ...] = (3, 4, 6, 3),
    ):
        super().__init__()
        self.hop = math.prod(rates)
        self.waveform_decoder = WaveformDecoder(d_model, channels, rates, kernels, speaker)
        self.speaker_encoder = SpeakerEncoder(speaker, filters, blocks)

    @torch.no_grad()
    def forward(self, latents: Tensor, speaker: Tensor) -> Tensor:
        """Waveforms (B, samples) between -1 and 1, in fp32, about 1,114 samples per code."""
        with torch.autocast(latents.device.type, enabled=False), full_fp32(latents.device):
            x = upcast(latents).transpose(1, 2)
            # Two steps, each rounded down to whole frames, as the weights were trained.
            x = interpolate(x, scale_factor=SAMPLES_PER_CODE / self.hop, mode="linear")
            x = interpolate(x, scale_factor=OUTPUT_RATE / SAMPLE_RATE, mode="linear")
            return self.waveform_decoder(x, upcast(speaker)[:, :, None]).squeeze(1)

    @torch.no_grad()
    def speaker_vector(self, waveforms: Tensor) -> Tensor:
        """Speaker vectors (B, `speaker`) of length 1 of waveforms (B, T) at 16 kHz, T > 256."""
        with torch.autocast(waveforms.device.type, enabled=False), full_fp32(waveforms.device):
            return self.speaker_encoder(upcast(waveforms))


# --- HiFiGAN --------------------------------------------------------------------------------------


class WaveformDecoder(nn.Module):
    """Frames (B, d, F) and a condition (B, `speaker`, 1) to waveforms (B, 1, F * product of
    `rates`)."""

    def __init__(
        self,
        d_model: int,
        channels: int,
        rates: tuple[int, ...],
        kernels: tuple[int, ...],
        speaker: int,
    ):
        super().__init__()
        self.conv_pre = nn.Conv1d(d_model, channels, 7, padding=3)
        self.cond_layer = nn.Conv1d(speaker, channels, 1)
        self.ups = nn.ModuleList()
        self.conds = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for rate, kernel in zip(rates, kernels, strict=True):
            up = nn.ConvTranspose1d(
                channels, channels // 2, kernel, stride=rate, padding=(kernel - rate) // 2
            )
            channels //= 2
            self.ups.append(weight_norm(up))
            self.conds.append(nn.Conv1d(speaker, channels, 1))
            self.resblocks.extend(DilatedBlock(channels, size) for size in KERNELS)
        self.conv_post = nn.Conv1d(channels, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.conv_pre(x) + self.cond_layer(condition)
        for i, (up, cond) in enumerate(zip(self.ups, self.conds, strict=True)):
            x = up(leaky_relu(x, SLOPE)) + cond(condition)
            blocks = self.resblocks[i * len(KERNELS) : (i + 1) * len(KERNELS)]
            x = sum(block(x) for block in blocks) / len(KERNELS)
        return self.conv_post(leaky_relu(x, LAST_SLOPE)).tanh()


class DilatedBlock(nn.Module):
    """Residual pairs of convolutions, the first of each pair dilated."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()

        def conv(dilation: int) -> nn.Module:
            padding = dilation * (kernel - 1) // 2
            return weight_norm(
                nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=padding)
            )

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in DILATIONS)
        self.convs2 = nn.ModuleList(conv(1) for _ in DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            x = x + plain(leaky_relu(dilated(leaky_relu(x, SLOPE)), SLOPE))
        return x


# --- speaker encoder ------------------------------------------------------------------------------


class SpeakerEncoder(nn.Module):
    """Waveforms (B, T) at 16 kHz to vectors (B, `speaker`) of length 1, never in training."""

    def __init__(self, speaker: int, filters: tuple[int, ...], blocks: tuple[int, ...]):
        super().__init__()
        bank = mel_filters(257, SPEAKER_RATE / 2, SPEAKER_BANDS, SPEAKER_RATE)
        mel = MelSpectrogram(512, 160, torch.hamming_window(400), bank)
        self.torch_spec = nn.Sequential(PreEmphasis(), mel.to(torch.get_default_device()))
        self.conv1 = nn.Conv2d(1, filters[0], 3, padding=1)
        self.bn1 = nn.BatchNorm2d(filters[0])
        self.layer1 = _stage(filters[0], filters[0], blocks[0], stride=1)
        self.layer2 = _stage(filters[0], filters[1], blocks[1], stride=2)
        self.layer3 = _stage(filters[1], filters[2], blocks[2], stride=2)
        self.layer4 = _stage(filters[2], filters[3], blocks[3], stride=2)
        width = filters[3] * SPEAKER_BANDS // 8  # the three strides leave an eighth of the bands
        self.attention = nn.Sequential(
            nn.Conv1d(width, 128, 1),
            nn.ReLU(),
            nn.BatchNorm1d(128),
            nn.Conv1d(128, width, 1),
            nn.Softmax(dim=2),
        )
        self.fc = nn.Linear(2 * width, speaker)
        self.train(False)

    def train(self, mode: bool = True):
        return super().train(False)

    def forward(self, waveforms: Tensor) -> Tensor:
        x = (self.torch_spec(waveforms) + FLOOR).log()  # (B, bands, F)
        x = nn.functional.instance_norm(x)[:, None]
        x = self.bn1(self.conv1(x).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = x.flatten(1, 2)  # (B, width, F / 8)
        weights = self.attention(x)
        mean = (x * weights).sum(2)
        variance = (x.square() * weights).sum(2) - mean.square()
        x = self.fc(torch.cat([mean, variance.clamp_min(1e-5).sqrt()], dim=1))
        return nn.functional.normalize(x, dim=1)


class PreEmphasis(nn.Module):
    """Waveforms (B, T) without 0.97 times the sample before; before the first is the second."""

    def __init__(self):
        super().__init__()
        self.register_buffer("filter", torch.tensor([[[-PRE_EMPHASIS, 1.0]]]))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x[:, None], (1, 0), "reflect")
        return nn.functional.conv1d(x, self.filter)[:, 0]


class SqueezeBlock(nn.Module):
    """A residual block whose channels are weighted by squeeze and excitation (Hu et al. 2018)."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.se = Squeeze(width)
        self.downsample = None
        if stride > 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x).relu())
        return (self.se(self.bn2(self.conv2(x))) + residual).relu()


class Squeeze(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(width, width // 8), nn.ReLU(), nn.Linear(width // 8, width), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3)))[:, :, None, None]
