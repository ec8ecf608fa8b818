"""Initial weights for training Whisper from scratch on little data."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UsageError
from common.layers import quieten_branches
from models.whisper.model import HOP, Attention, Whisper, angular_speeds
from speech.data import splits
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import valid_mask

FIT_UTTERANCES = 32  # to which the initial weights are fitted
BRANCH_OUTPUTS = (".out_proj", ".fc2")  # names of the last layers of residual branches
# Encoder frames: the range of distances that the first layer's heads look at, on either side.
OFFSETS = (1.0, 3.0)
OFFSETS_GROWTH = 1.8  # the offsets grow by this factor from layer to layer
GROWING_LAYERS = 4  # in the first layers
LONGEST_PERIOD = 150  # encoder frames; slower sines do not distinguish neighbours
SHARPNESS = 1.7  # of a head's attention around its offset: its softmax covers about five frames
BAND_WIDTH = 1.0  # mel bands, standard deviation of the filters of the first convolution
CONTRAST = 8.0  # gain of those filters, because a band's features vary by a few tenths
# a filter responds above its band's mean plus this, the spread of noise in a log-mel feature
THRESHOLD = 0.14


def fit(model: Whisper, data, seed: int, initialised: bool) -> None:
    """Initialises a model from scratch for the training set `data`; see `initialise`.
    `initialised`: whether --init_from gives it other weights afterwards. Raises `UsageError` if its
    encoder is frozen and would stay random."""
    if model.encoder_frozen and not initialised:
        raise UsageError(
            "--freeze_encoder: there is no checkpoint to resume, and a random encoder would stay"
            " random"
        )
    items = splits.some_items(data, seed, FIT_UTTERANCES)
    waveforms = [item["audio"][: item["heard"]] for item in items]  # without padding
    initialise(model, waveforms or [torch.zeros(SAMPLE_RATE)])


@torch.no_grad()
def initialise(model: Whisper, waveforms: list[Tensor]) -> None:
    """Initialises a model for training from scratch on little data. `waveforms`: some training
    utterances, each (T,).

    Whisper has no convolutions after its stem and no relative positions. With random weights its
    encoder needs many thousand updates until it attends to neighbouring frames. These initial
    weights need no change of architecture:
    - Each filter of the stem covers one place of the mel axis and responds to what exceeds the
      noise there.
    - Attention heads look at given offsets: queries and keys read the sines and cosines of the
      positions, and the queries are rotated by an offset, so q k is a sum of cosines of the
      distance to that offset. Nothing else is written to the dimensions of those sines.
      (Initialising attention with a pattern that it usually learns is the idea of Trockman and
      Kolter 2023, "Mimetic initialization of self-attention layers".)
    - Residual branches start small, by their number (Zhang et al. 2019, "Fixup")."""
    encoder = model.encoder
    d = model.config["d_model"]
    for layers in (encoder.layers, model.decoder.layers):
        quieten_branches(layers, BRANCH_OUTPUTS)
    for embedding in (model.decoder.embed_tokens, model.decoder.embed_positions):
        nn.init.normal_(embedding.weight, std=d**-0.5)
    _initialise_stem(model, waveforms)
    half = d // 2
    heads = encoder.layers[0].self_attn.heads if len(encoder.layers) else 1
    speeds = angular_speeds(d)
    fast = int((speeds > 2 * math.pi / LONGEST_PERIOD).sum())
    used = torch.linspace(0, fast - 1, min(fast, d // heads // 2)).round().long()
    reserved = torch.cat([used, half + used])
    encoder.conv2.weight[reserved] = 0.0
    encoder.conv2.bias[reserved] = 0.0
    for number, layer in enumerate(encoder.layers):
        growth = OFFSETS_GROWTH ** min(number, GROWING_LAYERS - 1)
        sizes = torch.logspace(
            math.log10(OFFSETS[0] * growth), math.log10(OFFSETS[1] * growth), max(1, heads // 2)
        )
        offsets = [
            int(sizes[head // 2 % len(sizes)].round()) * (-1) ** (head + 1) for head in range(heads)
        ]
        _look_at(layer.self_attn, offsets, used, speeds[used], half)
        layer.self_attn.out_proj.weight[reserved] = 0.0
        layer.fc2.weight[reserved] = 0.0


def _initialise_stem(model: Whisper, waveforms: list[Tensor]) -> None:
    """Fits the two convolutions to the features of these waveforms."""
    first = model.encoder.conv1
    second = model.encoder.conv2
    d = first.out_channels
    n_mels = first.in_channels
    longest = max(map(len, waveforms))
    padded = [
        F.pad(waveform, (0, longest - len(waveform)))[None].to(first.weight.dtype)
        for waveform in waveforms
    ]
    features = torch.cat([model.log_mel(waveform) for waveform in padded])  # (B, M, F)
    frames = torch.tensor([-(-len(w) // HOP) for w in waveforms])
    valid = valid_mask(frames, features.shape[2])[:, None]  # (B, 1, F)
    # The filters' places are denser at the low end of the mel axis, which has the fundamentals of
    # speech and Morse.
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


def _look_at(
    attention: Attention, offsets: list[int], used: Tensor, speeds: Tensor, half: int
) -> None:
    """Makes each head attend to its offset, by the sines and cosines `used` of these speeds."""
    width = attention.q_proj.out_features // len(offsets)
    pair = torch.arange(len(used))
    attention.q_proj.bias.zero_()
    for projection, is_rotated in ((attention.q_proj, True), (attention.k_proj, False)):
        projection.weight *= 0.1
        for head, offset in enumerate(offsets):
            angles = speeds * (offset if is_rotated else 0)
            rows = projection.weight[head * width :]
            # sin(a + b) = sin a cos b + cos a sin b; cos(a + b) = cos a cos b - sin a sin b
            rows[2 * pair, used] += SHARPNESS * angles.cos()
            rows[2 * pair, half + used] += SHARPNESS * angles.sin()
            rows[2 * pair + 1, half + used] += SHARPNESS * angles.cos()
            rows[2 * pair + 1, used] -= SHARPNESS * angles.sin()
