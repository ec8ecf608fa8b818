"""Matcha-TTS (Mehta et al. 2024): text to mel frames by flow matching.

The encoder turns the tokens of a text into one mean mel frame each, and a predictor says how many
frames each token lasts. The decoder, a 1-D U-Net, carries noise to the mel frames of speech along
the flow of an ordinary differential equation. Tensors have the names and shapes of the released
checkpoints. Unlike the published code, attention does not see padding, and GroupNorm takes its
statistics over valid frames only, so an utterance does not depend on what it is padded with."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from common.device import upcast
from speech.signal.features import valid_mask

BANDS = 80  # of the mel frames
ROTARY_BASE = 10_000.0
ROTATED = 0.5  # share of a head's channels that rotary positions turn
NORM_EPSILON = 1e-4  # of the encoder's norms over channels
GROUPS = 8  # of GroupNorm
TIME_SCALE = 1000.0  # of the flow's time in its sinusoids
SPEAKER = 64  # channels of a speaker's vector
DOWNSAMPLING = 2  # frames that the middle of the U-Net takes together
# What a checkpoint's record may have.
CONFIG = {
    "symbols": range(4, 65_537),
    "speakers": range(1, 65_537),
    "width": range(8, 4097),  # of the text encoder
    "layers": range(1, 65),
    "heads": range(1, 65),
    "inner": range(8, 16_385),  # of the encoder's convolutional layers
    "predictor": range(8, 4097),  # of the duration predictor
    "channels": range(8, 4097),  # of the decoder
    "decoder_heads": range(1, 65),
    "decoder_head_dim": range(2, 513),
}
SIZES = {
    "demo": {
        "width": 96, "layers": 3, "heads": 2, "inner": 384, "predictor": 128,
        "channels": 96, "decoder_heads": 2, "decoder_head_dim": 32,
    },
    "full": {
        "width": 192, "layers": 6, "heads": 2, "inner": 768, "predictor": 256,
        "channels": 256, "decoder_heads": 2, "decoder_head_dim": 64,
    },
    "large": {
        "width": 192, "layers": 6, "heads": 2, "inner": 768, "predictor": 256,
        "channels": 512, "decoder_heads": 2, "decoder_head_dim": 128,
    },
}  # fmt: skip


def is_possible(config: dict) -> bool:
    """Whether heads and groups divide the channels that they share."""
    encoder = config["width"] + (SPEAKER if config["speakers"] > 1 else 0)
    return encoder % config["heads"] == 0 and config["channels"] % GROUPS == 0


class Matcha(nn.Module):
    """The network. `config` has the keys of `CONFIG`; with one speaker there are no vectors of
    speakers. `mel_mean` and `mel_std` are those of all bands of the training set's mel frames."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        self.config = config
        has_speakers = config["speakers"] > 1
        speaker = SPEAKER if has_speakers else 0
        if has_speakers:
            self.spk_emb = nn.Embedding(config["speakers"], SPEAKER)
        self.encoder = TextEncoder(config, speaker, dropout)
        self.decoder = nn.Module()  # released files have this level
        self.decoder.estimator = Estimator(config, speaker, dropout / 2)
        self.register_buffer("mel_mean", torch.tensor(0.0))
        self.register_buffer("mel_std", torch.tensor(1.0))

    def encode(
        self, tokens: Tensor, lengths: Tensor, speakers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of tokens (B, U) with lengths (B,) and speakers (B,): their mean frames (B, U, 80), the
        logarithms (B, U) of their predicted frames, and the speakers' vectors (B, 64)."""
        vectors = self.spk_emb(speakers) if self.config["speakers"] > 1 else None
        means, log_frames = self.encoder(tokens, lengths, vectors)
        return means, log_frames, vectors

    def velocity(
        self, noisy: Tensor, means: Tensor, time: Tensor, lengths: Tensor, vectors: Tensor | None
    ) -> Tensor:
        """The flow's velocity (B, F, 80) at the points `noisy` (B, F, 80) and the times (B,), given
        the mean frames (B, F, 80), the numbers of frames (B,) and the speakers' vectors (B, 64)."""
        frames = noisy.shape[1]
        x = torch.cat([noisy, means], dim=2)
        if vectors is not None:
            x = torch.cat([x, vectors[:, None].expand(-1, frames, -1).to(x.dtype)], dim=2)
        x = F.pad(x.transpose(1, 2), (0, -frames % DOWNSAMPLING))
        mask = valid_mask(lengths, x.shape[2])[:, None]
        return self.decoder.estimator(x, mask, time.to(noisy.dtype)).transpose(1, 2)[:, :frames]

    def normalised(self, mels: Tensor) -> Tensor:
        return (mels - self.mel_mean) / self.mel_std

    def denormalised(self, mels: Tensor) -> Tensor:
        return mels * self.mel_std + self.mel_mean


# --- text encoder ---------------------------------------------------------------------------------


class TextEncoder(nn.Module):
    """Tokens (B, U) to their mean frames (B, U, 80) and the logarithms of their lengths (B, U). The
    duration predictor has no part in the gradient of the rest."""

    def __init__(self, config: dict, speaker: int, dropout: float):
        super().__init__()
        width = config["width"]
        self.emb = nn.Embedding(config["symbols"], width)
        nn.init.normal_(self.emb.weight, 0.0, width**-0.5)
        self.prenet = Prenet(width, min(0.5, 5 * dropout))
        channels = width + speaker
        self.encoder = EncoderLayers(config, channels, dropout)
        self.proj_m = nn.Conv1d(channels, BANDS, 1)
        self.proj_w = DurationPredictor(channels, config["predictor"], dropout)

    def forward(
        self, tokens: Tensor, lengths: Tensor, vectors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mask = valid_mask(lengths, tokens.shape[1])[:, None]  # (B, 1, U)
        x = self.emb(tokens).transpose(1, 2) * math.sqrt(self.emb.embedding_dim)
        x = self.prenet(x, mask)
        if vectors is not None:
            x = torch.cat([x, vectors[:, :, None].expand(-1, -1, x.shape[2]).to(x.dtype)], dim=1)
        x = self.encoder(x, mask)
        means = upcast(self.proj_m(x)) * mask
        log_frames = upcast(self.proj_w(x.detach(), mask)) * mask
        return means.transpose(1, 2), log_frames[:, 0]


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (B, C, U), in fp32 or better."""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = upcast(x).transpose(1, 2)
        x = F.layer_norm(x, self.gamma.shape, self.gamma, self.beta, NORM_EPSILON)
        return x.transpose(1, 2)


class Prenet(nn.Module):
    """Three convolutions over five tokens beside a residual connection, which begins as nothing."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.conv_layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.norm_layers = nn.ModuleList(ChannelNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Conv1d(width, width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x
        for convolve, norm in zip(self.conv_layers, self.norm_layers, strict=True):
            y = self.dropout(norm(convolve(y * mask)).relu())
        return (x + self.proj(y)) * mask


class EncoderLayers(nn.Module):
    """Post-norm Transformer layers, (B, C, U) to (B, C, U)."""

    def __init__(self, config: dict, channels: int, dropout: float):
        super().__init__()
        layers = range(config["layers"])
        self.turned = int(ROTATED * channels / config["heads"])  # channels of a head
        self.attn_layers = nn.ModuleList(
            EncoderAttention(channels, config["heads"], dropout) for _ in layers
        )
        self.norm_layers_1 = nn.ModuleList(ChannelNorm(channels) for _ in layers)
        self.ffn_layers = nn.ModuleList(
            ConvolutionalLayer(channels, config["inner"], dropout) for _ in layers
        )
        self.norm_layers_2 = nn.ModuleList(ChannelNorm(channels) for _ in layers)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        angles = rotary_angles(x.shape[2], self.turned, x)
        layers = (self.attn_layers, self.norm_layers_1, self.ffn_layers, self.norm_layers_2)
        for attend, first_norm, convolve, second_norm in zip(*layers, strict=True):
            x = x * mask
            x = first_norm(x + self.dropout(attend(x, mask, angles)))
            x = second_norm(x + self.dropout(convolve(x, mask)))
        return x * mask


class EncoderAttention(nn.Module):
    """Self-attention over the valid tokens of (B, C, U), with rotary positions (Su et al. 2021) in
    half of each head's channels."""

    def __init__(self, channels: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, channels, 1)
        for layer in (self.conv_q, self.conv_k, self.conv_v):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, mask: Tensor, angles: tuple) -> Tensor:
        q, k, v = (
            layer(x).unflatten(1, (self.heads, -1)).transpose(2, 3)  # (B, H, U, C / H)
            for layer in (self.conv_q, self.conv_k, self.conv_v)
        )
        y = F.scaled_dot_product_attention(
            rotated(q, angles),
            rotated(k, angles),
            v.contiguous(),  # torch's fused kernels take no transposed values
            attn_mask=mask[:, None],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.conv_o(y.transpose(2, 3).flatten(1, 2))


def rotary_angles(positions: int, channels: int, like: Tensor) -> tuple:
    """cos and sin (U, D / 2) of the angles by which the positions turn D of a head's channels."""
    pairs = torch.arange(0, channels, 2, device=like.device, dtype=torch.float32)
    places = torch.arange(positions, device=like.device, dtype=torch.float32)
    angles = places[:, None] * ROTARY_BASE ** (-pairs / channels)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys (B, H, U, D), turned by the positions of their tokens: each channel of the
    first half of the rotated part together with one of its second half. The type stays."""
    cos, sin = (each.to(x.dtype) for each in angles)
    half = cos.shape[1]
    a, b, kept = x.split([half, half, x.shape[3] - 2 * half], dim=3)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, kept], dim=3)


class ConvolutionalLayer(nn.Module):
    """The feed-forward part of a layer: two convolutions over three tokens."""

    def __init__(self, channels: int, inner: int, dropout: float):
        super().__init__()
        self.conv_1 = nn.Conv1d(channels, inner, 3, padding=1)
        self.conv_2 = nn.Conv1d(inner, channels, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.conv_1(x * mask).relu())
        return self.conv_2(x * mask) * mask


class DurationPredictor(nn.Module):
    """(B, C, U) to the logarithm (B, 1, U) of each token's number of frames."""

    def __init__(self, channels: int, inner: int, dropout: float):
        super().__init__()
        self.conv_1 = nn.Conv1d(channels, inner, 3, padding=1)
        self.norm_1 = ChannelNorm(inner)
        self.conv_2 = nn.Conv1d(inner, inner, 3, padding=1)
        self.norm_2 = ChannelNorm(inner)
        self.proj = nn.Conv1d(inner, 1, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.norm_1(self.conv_1(x * mask).relu()))
        x = self.dropout(self.norm_2(self.conv_2(x * mask).relu()))
        return self.proj(x * mask)


# --- decoder --------------------------------------------------------------------------------------


class Estimator(nn.Module):
    """The U-Net that estimates the flow's velocity (B, 80, F) from noisy frames, mean frames and
    the speaker's vector, (B, 160 + speaker, F), for the valid frames of a mask (B, 1, F) at the
    times (B,). F is even."""

    def __init__(self, config: dict, speaker: int, dropout: float):
        super().__init__()
        width = config["channels"]
        inputs = 2 * BANDS + speaker
        self.inputs = inputs
        self.time_mlp = TimeEmbedding(inputs, 4 * width)

        def stage(channels: int, *resampling: nn.Module) -> nn.ModuleList:
            transformer = nn.ModuleList([DecoderLayer(config, dropout)])
            return nn.ModuleList([ResnetBlock(channels, width), transformer, *resampling])

        self.down_blocks = nn.ModuleList(
            [stage(inputs, Downsample(width)), stage(width, nn.Conv1d(width, width, 3, padding=1))]
        )
        self.mid_blocks = nn.ModuleList([stage(width), stage(width)])
        self.up_blocks = nn.ModuleList(
            [
                stage(2 * width, Upsample(width)),
                stage(2 * width, nn.Conv1d(width, width, 3, padding=1)),
            ]
        )
        self.final_block = NormedConvolution(width, width)
        self.final_proj = nn.Conv1d(width, BANDS, 1)
        self.apply(initialise)

    def forward(self, x: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        embedded = self.time_mlp(time_sinusoids(time, self.inputs))
        coarse = mask[:, :, ::DOWNSAMPLING].contiguous()  # or attention has no fused kernel
        kept = []
        for (resnet, (layer,), resample), valid in zip(
            self.down_blocks, (mask, coarse), strict=True
        ):
            x = layer(resnet(x, valid, embedded), valid)
            kept.append(x)
            x = resample(x * valid)
        for resnet, (layer,) in self.mid_blocks:
            x = layer(resnet(x, coarse, embedded), coarse)
        for (resnet, (layer,), resample), valid in zip(self.up_blocks, (coarse, mask), strict=True):
            x = torch.cat([x, kept.pop()], dim=1)
            x = layer(resnet(x, valid, embedded), valid)
            x = resample(x * valid)
        return upcast(self.final_proj(self.final_block(x, mask))) * mask


def initialise(module: nn.Module) -> None:
    """Initial values of the decoder's layers (He et al. 2015)."""
    if isinstance(module, nn.Conv1d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def time_sinusoids(time: Tensor, width: int) -> Tensor:
    """Times (B,) between 0 and 1 as sines and cosines (B, width)."""
    half = width // 2
    exponents = torch.arange(half, device=time.device, dtype=torch.float32) / (half - 1)
    angles = TIME_SCALE * time[:, None] * (10_000.0**-exponents).to(time.dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class TimeEmbedding(nn.Module):
    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(inputs, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class Downsample(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, stride=DOWNSAMPLING, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Upsample(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.ConvTranspose1d(width, width, 4, stride=DOWNSAMPLING, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class ResnetBlock(nn.Module):
    """Two convolutions beside a residual connection, with the time added in between."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(4 * width, width))
        self.block1 = NormedConvolution(inputs, width)
        self.block2 = NormedConvolution(width, width)
        self.res_conv = nn.Conv1d(inputs, width, 1)

    def forward(self, x: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        y = self.block1(x, mask) + self.mlp(time)[:, :, None]
        return self.block2(y, mask) + self.res_conv(x * mask)


class NormedConvolution(nn.Module):
    """A convolution over three frames, GroupNorm and Mish, (B, C, F) to (B, width, F)."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(inputs, width, 3, padding=1), nn.GroupNorm(GROUPS, width), nn.Mish()
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        convolve, norm, activation = self.block
        return activation(masked_group_norm(convolve(x * mask), mask, norm)) * mask


def masked_group_norm(x: Tensor, mask: Tensor, norm: nn.GroupNorm) -> Tensor:
    """GroupNorm of (B, C, F) whose statistics are of the valid frames of a mask (B, 1, F), in fp32
    or better. With no padding it is torch's."""
    grouped = upcast(x).unflatten(1, (norm.num_groups, -1))  # (B, groups, C / groups, F)
    mask = mask[:, None]
    values = mask.sum(3, keepdim=True) * grouped.shape[2]
    mean = (grouped * mask).sum((2, 3), keepdim=True) / values
    centred = (grouped - mean) * mask
    variance = centred.square().sum((2, 3), keepdim=True) / values
    normed = (centred * torch.rsqrt(variance + norm.eps)).flatten(1, 2)
    return normed * norm.weight[:, None] + norm.bias[:, None]


class DecoderLayer(nn.Module):
    """A pre-norm Transformer layer over the valid frames of (B, C, F)."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        width = config["channels"]
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = DecoderAttention(
            width, config["decoder_heads"], config["decoder_head_dim"], dropout
        )
        self.norm3 = nn.LayerNorm(width)
        self.ff = nn.Module()  # released files have this level
        self.ff.net = nn.Sequential(
            SnakeLayer(width, 4 * width), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = x + self.attn1(self.norm1(x), mask)
        x = x + self.ff.net(self.norm3(x))
        return x.transpose(1, 2)


class DecoderAttention(nn.Module):
    """Self-attention over the valid frames of (B, F, C)."""

    def __init__(self, width: int, heads: int, head_dim: int, dropout: float):
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_k = nn.Linear(width, inner, bias=False)
        self.to_v = nn.Linear(width, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, width), nn.Dropout(dropout))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, H, F, D)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.to_out(y.transpose(1, 2).flatten(2))


class SnakeLayer(nn.Module):
    """A linear layer and the activation x + sin^2(a x) / b (Ziyin et al. 2020), with a and b of
    each channel by their logarithms. Backward computes the activation again, of which it would keep
    three tensors in fp32."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.proj = nn.Linear(inputs, width)
        self.alpha = nn.Parameter(torch.zeros(width))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        if not torch.is_grad_enabled():
            return self.snake(x)
        return recomputed(self.snake, x, use_reentrant=False, preserve_rng_state=False)

    def snake(self, x: Tensor) -> Tensor:
        return x + (x * self.alpha.exp()).sin().square() / (self.beta.exp() + 1e-9)


CHECKPOINTED = (ResnetBlock, DecoderLayer)
COMPILED = (DecoderLayer,)
