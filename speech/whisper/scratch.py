"""The initial weights of a Whisper that is trained from scratch on little data."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from speech.features import valid_mask
from speech.whisper.model import HOP, Attention, Whisper, angular_speeds

OFFSETS = (1.0, 3.0)  # encoder frames to which the first layer's heads look at first, before and after
OFFSETS_GROW, OFFSETS_GROW_FOR = 1.8, 4  # from layer to layer, for so many layers
LONGEST_PERIOD = 150  # encoder frames: slower sines say nothing about neighbours
SHARPNESS = 1.7  # of what a head sees around its offset: a softmax over about five frames
BAND_WIDTH = 1.0  # mel bands, standard deviation of what a filter of the first convolution sees
CONTRAST = 8.0  # of those filters: a band's features vary by a few tenths
THRESHOLD = 0.14  # above a band's mean, where its filter begins to answer: the spread of noise in a log-mel feature


@torch.no_grad()
def initialise(model: Whisper, waveforms: list[torch.Tensor]) -> None:
    """Initial weights for training from scratch on little data; `waveforms`: some of it, each (T,).

    Whisper has no convolutions after its stem and no relative positions; with random weights it needs many thousand
    updates until its encoder sees its neighbourhood at all. All of that is reachable within its own architecture:
    - The stem's filters each look at one place of the mel axis and answer to what stands out of the noise there.
    - Attention heads look at given offsets: with queries and keys that read the positions' sines and cosines, the former
      turned by an offset, q k is a sum of cosines of the distance to that offset. (The idea of starting attention from
      what it is found to learn: Trockman and Kolter 2023, "Mimetic initialization of self-attention layers".) Nothing
      else is written to the dimensions that carry those sines.
    - Residual branches begin small, as many as there are (Zhang et al. 2019, "Fixup")."""
    encoder, d = model.encoder, model.config["d_model"]
    for layers in (encoder.layers, model.decoder.layers):
        outputs = [m.out_proj for m in layers.modules() if isinstance(m, Attention)] + [layer.fc2 for layer in layers]
        for output in outputs:
            output.weight /= math.sqrt(len(outputs))
            output.bias.zero_()
    for embedding in (model.decoder.embed_tokens, model.decoder.embed_positions):
        nn.init.normal_(embedding.weight, std=d**-0.5)
    _initialise_stem(model, waveforms)
    half, heads = d // 2, encoder.layers[0].self_attn.heads if len(encoder.layers) else 1
    scales = angular_speeds(d)
    short = int((scales > 2 * math.pi / LONGEST_PERIOD).sum())
    used = torch.linspace(0, short - 1, min(short, d // heads // 2)).round().long()
    reserved = torch.cat([used, half + used])
    encoder.conv2.weight[reserved] = 0.0
    encoder.conv2.bias[reserved] = 0.0
    for number, layer in enumerate(encoder.layers):
        grown = OFFSETS_GROW ** min(number, OFFSETS_GROW_FOR - 1)
        sizes = torch.logspace(math.log10(OFFSETS[0] * grown), math.log10(OFFSETS[1] * grown), max(1, heads // 2))
        offsets = [int(sizes[head // 2 % len(sizes)].round()) * (-1) ** (head + 1) for head in range(heads)]
        _look_at(layer.self_attn, offsets, used, scales[used], half)
        layer.self_attn.out_proj.weight[reserved] = 0.0
        layer.fc2.weight[reserved] = 0.0


def _initialise_stem(model: Whisper, waveforms: list[torch.Tensor]) -> None:
    """The two convolutions, by what these waveforms' features are like."""
    first, second = model.encoder.conv1, model.encoder.conv2
    d, n_mels = first.out_channels, first.in_channels
    longest = max(map(len, waveforms))
    features = torch.cat(
        [model.log_mel(F.pad(w, (0, longest - len(w)))[None].to(first.weight.dtype)) for w in waveforms]
    )
    frames = torch.tensor([-(-len(w) // HOP) for w in waveforms])
    valid = valid_mask(frames, features.shape[2])[:, None]  # (B, 1, F)
    # Places on the mel axis, denser at its low end, where speech and Morse have their fundamentals.
    centres = torch.linspace(0, 1, d) ** 1.5 * (n_mels - 1)
    bands = torch.exp(-0.5 * ((torch.arange(n_mels) - centres[:, None]) / BAND_WIDTH) ** 2)
    bands /= bands.sum(1, keepdim=True)
    first.weight.copy_((CONTRAST / 3 * bands)[:, :, None].expand(-1, -1, 3))
    mean = (features * valid).sum((0, 2)) / valid.sum()  # (M,)
    first.bias.copy_(-CONTRAST * (bands.to(mean) @ mean + THRESHOLD))
    x = F.gelu(first(features))
    nn.init.orthogonal_(second.weight.view(d, -1))
    second.bias.zero_()
    kept = valid[:, :, ::2][:, :, : (x.shape[2] + 1) // 2].transpose(1, 2)[..., 0]  # (B, T)
    x = second(x).transpose(1, 2)[kept]  # (N, D)
    scale = x.std().clamp_min(1e-3)
    second.weight /= scale
    second.bias.copy_(-x.mean(0) / scale)


def _look_at(attention: Attention, offsets: list[int], used: torch.Tensor, scales: torch.Tensor, half: int) -> None:
    """Lets each head look at an offset, by the sines and cosines number `used` with angles `scales` a frame."""
    width, pairs = attention.q_proj.out_features // len(offsets), len(used)
    attention.q_proj.bias.zero_()
    for projection, turned in ((attention.q_proj, True), (attention.k_proj, False)):
        projection.weight *= 0.1
        for head, offset in enumerate(offsets):
            angles = scales * (offset if turned else 0)
            rows = projection.weight[head * width :]
            pair = torch.arange(pairs)
            # sin(a + b) = sin a cos b + cos a sin b; cos(a + b) = cos a cos b - sin a sin b
            rows[2 * pair, used] += SHARPNESS * angles.cos()
            rows[2 * pair, half + used] += SHARPNESS * angles.sin()
            rows[2 * pair + 1, half + used] += SHARPNESS * angles.cos()
            rows[2 * pair + 1, used] -= SHARPNESS * angles.sin()
