"""The Parakeet network: a FastConformer encoder, and after it an LSTM prediction network and a
joint network (TDT, RNN-T), a CTC head, or both.

Weights are named as in transformers' ParakeetForTDT, ForRNNT and ForCTC. A CTC head beside a
transducer, which they lack, is `ctc_head`, too.
Sources: FastConformer (Rekesh et al. 2023); TDT (Xu et al. 2023); relative positions (Dai et al.
2019, "Transformer-XL"); the encoder of streaming models (Noroozi et al. 2023, "Stateful Conformer
with cache-based inference")."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.device import upcast
from common.layers import downcast, lean_chain
from models.parakeet.loss import Lattice, transducer_losses
from models.parakeet.settings import is_transducer
from speech.signal import nemo_features
from speech.signal.features import spec_augment, valid_mask

AT_ONCE = 4  # utterances in a subsampling: with all of them it would be the peak of memory


def halvings(config: dict) -> int:
    """Stages of the subsampling; each halves the number of frames."""
    return config["subsampling"].bit_length() - 1


class Subsampling(nn.Module):
    """Features (B, F, M) to (B, T, D) with F / 8 frames (or F / 4, F / 2): a strided 3x3
    convolution, then depthwise-separable ones. What lies beyond each length is zeroed before every
    convolution, so padding changes nothing."""

    def __init__(self, config: dict):
        super().__init__()
        channels = config["channels"]
        self.stages = halvings(config)
        self.layers = nn.ModuleList([self.strided(1, channels), nn.ReLU()])
        for _ in range(self.stages - 1):
            depthwise = self.strided(channels, channels, groups=channels)
            self.layers += [depthwise, nn.Conv2d(channels, channels, 1), nn.ReLU()]
        bands = self.frames(config["num_mel_bins"])
        self.linear = nn.Linear(channels * bands, config["d_model"])
        self.to(memory_format=torch.channels_last)  # twice as fast as (B, C, F, M) in memory

    @staticmethod
    def strided(inputs: int, outputs: int, **options) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, **options)

    @staticmethod
    def halved(length):
        """The frames or bands that a stage leaves of so many, an int or a tensor."""
        return (length - 1) // 2 + 1

    def frames(self, length):
        """The frames or bands that all stages leave of so many, an int or a tensor."""
        for _ in range(self.stages):
            length = self.halved(length)
        return length

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, None]
        for layer in self.layers:
            if isinstance(layer, nn.ReLU):
                # Masked before ReLU, so that backward keeps one tensor of this size, not two.
                valid = valid_mask(lengths, x.shape[2])
                x = x.masked_fill(~valid[:, None, :, None], 0.0)
            x = layer(x)
            if getattr(layer, "stride", None) == (2, 2):
                lengths = self.halved(lengths)
        return self.linear(x.transpose(1, 2).flatten(2))


class CausalConv2d(nn.Conv2d):
    """A 3x3 convolution of stride 2 that sees no later frame than its own: (B, C, F, M) to (B, C,
    F // 2 + 1, M // 2 + 1). Both axes have 2 zeros before them and 1 after them."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1):
        # With 2 after them an output is added to an odd length, and cut off. So nothing is copied.
        super().__init__(inputs, outputs, 3, stride=2, padding=2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, : x.shape[2] // 2 + 1, : x.shape[3] // 2 + 1]

    def step(self, x: Tensor) -> Tensor:
        """The same without zeros around the frames: (B, C, 2 N + 1, M), which begins with what
        comes before, to (B, C, N, M // 2 + 1)."""
        y = F.conv2d(x, self.weight, self.bias, self.stride, (0, 2), groups=self.groups)
        return y[..., : x.shape[3] // 2 + 1]


class CausalSubsampling(Subsampling):
    """The same for streaming: F / 8 + 1 frames, which see no later features."""

    strided = CausalConv2d

    @staticmethod
    def halved(length):
        return length // 2 + 1


class FeedForward(nn.Module):
    """(B, T, D) to (B, T, D), after the layer's `norm`. The wide hidden layer has no dropout, which
    would be the largest tensor that backward keeps."""

    def __init__(self, config: dict):
        super().__init__()
        self.linear1 = nn.Linear(config["d_model"], config["ffn"], bias=config["biases"])
        self.linear2 = nn.Linear(config["ffn"], config["d_model"], bias=config["biases"])

    def forward(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        return lean_chain(x, norm, self.linear1, F.silu, self.linear2)


class Attention(nn.Module):
    """Self-attention with relative positions (Dai et al. 2019, section 3.3), (B, T, D) to (B, T,
    D): the scores are (q + u) k + (q + v) r, where r is the projected distance. The second term is
    SDPA's bias."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.heads = config["heads"]
        self.dropout = dropout
        self.q_proj = nn.Linear(d, d, bias=config["biases"])
        self.k_proj = nn.Linear(d, d, bias=config["biases"])
        self.v_proj = nn.Linear(d, d, bias=config["biases"])
        self.o_proj = nn.Linear(d, d, bias=config["biases"])
        self.relative_k_proj = nn.Linear(d, d, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(self.heads, d // self.heads))
        self.bias_v = nn.Parameter(torch.zeros(self.heads, d // self.heads))

    def forward(self, x: Tensor, positions: Tensor, hidden: Tensor | None) -> Tensor:
        """`positions` (2 T - 1, D): as `relative_positions` returns them. `hidden` (B, 1, 1 or T,
        T): True where a frame does not see another one; None if all see all."""
        return self.attend(*self.projected(x), self.distances(positions), hidden)

    def _split(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.heads, -1)).transpose(-2, -3)  # (..., H, T, D / H)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, D / H) of (B, T, D)."""
        x = downcast(x)  # once for three products
        return tuple(self._split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))

    def distances(self, positions: Tensor) -> Tensor:
        """(H, N, D / H) of `relative_positions` (N, D)."""
        return self._split(self.relative_k_proj(positions))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, distances: Tensor, hidden: Tensor | None
    ) -> Tensor:
        """(B, T, D) of the queries of T frames. Keys and values are those of S frames, of which
        these are the last. `distances` (H, S + T - 1, D / H), `hidden` (B, 1, 1 or T, S)."""
        bias_u = self.bias_u[:, None].to(q.dtype)
        bias_v = self.bias_v[:, None].to(q.dtype)
        scores = (q + bias_v) / math.sqrt(q.shape[-1]) @ distances.transpose(-1, -2)
        scores = shift(scores)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q + bias_u, k, v, attn_mask=scores, dropout_p=dropout)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def shift(scores: Tensor) -> Tensor:
    """Scores by distance (B, H, T, S + T - 1) to scores by key (B, H, T, S), of queries that are
    the last of S frames. Row i begins with the distance S - 1; key j has the distance S - T + i -
    j. So each row is shifted by one more."""
    b, h, t, wide = scores.shape
    scores = F.pad(scores, (1, 0)).view(b, h, wide + 1, t)[:, :, 1:]
    return scores.reshape(b, h, t, wide)[..., : wide + 1 - t]


class FrozenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of (B, T, D) with fixed statistics and a trained scale and shift, in fp32.
    Statistics that are trained would depend on padding and on how a global batch is cut, and
    recomputing a layer would count it twice."""

    measures = False  # whether the next input sets the statistics

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        if self.measures:
            frames = x.flatten(0, 1) if padding is None else x[~padding[..., 0]]
            self.running_mean.copy_(frames.mean(0))
            self.running_var.copy_(frames.var(0))
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return ((upcast(x) - self.running_mean) * scale + self.bias).to(x.dtype)


class FrameNorm(nn.LayerNorm):
    """LayerNorm of (B, T, D), which replaces BatchNorm in streaming models and has its weights."""

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return super().forward(x).to(x.dtype)


def pointwise(layer: nn.Conv1d, x: Tensor) -> Tensor:
    """A convolution with kernel 1 of (B, T, D)."""
    # Of an input that is not contiguous, torch chooses the kernel by whether the weight requires a
    # gradient, which a weight that autocast has cast does not in evaluation.
    return F.linear(x.contiguous(), layer.weight[:, :, 0], layer.bias)


class Convolution(nn.Module):
    """The Conformer's convolution module, (B, T, D) to (B, T, D)."""

    norm_kind: type[nn.Module] = FrozenBatchNorm

    @staticmethod
    def padding(kernel: int) -> int:
        return kernel // 2

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        kernel = config["kernel"]
        biases = config["biases"]
        self.pointwise_conv1 = nn.Conv1d(d, 2 * d, 1, bias=biases)
        padding = self.padding(kernel)
        self.depthwise_conv = nn.Conv1d(d, d, kernel, padding=padding, groups=d, bias=biases)
        self.norm = self.norm_kind(d)
        self.pointwise_conv2 = nn.Conv1d(d, d, 1, bias=biases)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = self.gated(x)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)  # or the kernel would see what follows the end
        return self.mixed(x, padding)

    def gated(self, x: Tensor) -> Tensor:
        """The gated frames (B, T, D), which the kernel goes over."""
        return F.glu(pointwise(self.pointwise_conv1, x), dim=-1)

    def mixed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """The frames (B, T, D) that kernel, norm and second pointwise layer make of `x`."""
        x = self.depthwise_conv(x.transpose(1, 2)).transpose(1, 2)
        return pointwise(self.pointwise_conv2, F.silu(self.norm(x, padding)))


class CausalConvolution(Convolution):
    """The same for streaming: a frame sees itself and the `before` frames before it."""

    norm_kind = FrameNorm

    def __init__(self, config: dict):
        super().__init__(config)
        self.before = config["kernel"] - 1

    @staticmethod
    def padding(kernel: int) -> int:
        return 0

    def mixed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return super().mixed(F.pad(x, (0, 0, self.before, 0)), padding)

    def step(self, x: Tensor) -> Tensor:
        """`mixed` of (B, `before` + T, D), which begins with the frames before these T."""
        return super().mixed(x, None)


class EncoderLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.feed_forward1 = FeedForward(config)
        self.self_attn = Attention(config, dropout)
        self.conv = parts(config)[1](config)
        self.feed_forward2 = FeedForward(config)
        self.norm_feed_forward1 = nn.LayerNorm(d)
        self.norm_self_att = nn.LayerNorm(d)
        self.norm_conv = nn.LayerNorm(d)
        self.norm_feed_forward2 = nn.LayerNorm(d)
        self.norm_out = nn.LayerNorm(d)
        self.dropout = dropout

    def forward(
        self, x: Tensor, positions: Tensor, padding: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """`positions` and `hidden`: as in `Attention`. `padding` (B, T, 1): True beyond an
        utterance's end; None if all utterances have T frames."""
        return self.around(
            x, lambda y: self.self_attn(y, positions, hidden), lambda y: self.conv(y, padding)
        )

    def around(self, x: Tensor, attend: Callable, convolve: Callable) -> Tensor:
        """The layer with these functions (B, T, D) to (B, T, D) for attention and convolution."""

        def drop(y: Tensor) -> Tensor:
            return F.dropout(y, self.dropout, self.training)

        x = x + 0.5 * drop(self.feed_forward1(x, self.norm_feed_forward1))
        x = x + drop(attend(self.norm_self_att(x)))
        x = x + drop(convolve(self.norm_conv(x)))
        x = x + 0.5 * drop(self.feed_forward2(x, self.norm_feed_forward2))
        return self.norm_out(x)


def parts(config: dict) -> tuple[type[Subsampling], type[Convolution]]:
    """The parts in which the encoder of a streaming model differs from that of others."""
    if "streaming" in config:
        return CausalSubsampling, CausalConvolution
    return Subsampling, Convolution


def encoder_frames(samples: int, config: dict) -> int:
    """The encoder's frames of so many samples."""
    length = nemo_features.frames(samples)
    for _ in range(halvings(config)):
        length = parts(config)[0].halved(length)
    return length


def relative_positions(like: Tensor, queries: int, keys: int) -> Tensor:
    """(S + T - 1, D): interleaved sines and cosines of the distances S - 1 ... -(T - 1), for
    `Attention.attend` with T `queries` and S `keys`."""
    d = like.shape[-1]
    options = {"device": like.device, "dtype": torch.float32}
    speeds = 10_000.0 ** (-torch.arange(0, d, 2, **options) / d)
    angles = torch.arange(keys - 1, -queries, -1, **options)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(like.dtype)


def outside_chunks(lookaheads: Tensor, left: int, padding: Tensor | None, frames: int) -> Tensor:
    """(B, 1, T, T): True where a frame does not see another one. An utterance is divided into
    chunks of as many frames as its `lookaheads` (B,) + 1. A frame sees its own chunk and as many
    before it as fit into `left` frames. `padding` (B, T, 1) is seen by padding alone, which must
    see something."""
    sizes = (lookaheads + 1).to(torch.int32)[:, None]
    chunks = torch.arange(frames, device=sizes.device, dtype=torch.int32) // sizes  # (B, T)
    behind = chunks[:, :, None] - chunks[:, None, :]
    hidden = (behind < 0) | (behind > left // sizes[:, :, None])
    if padding is not None:
        hidden = hidden | (padding[:, None, :, 0] & ~padding)
    return hidden[:, None]


class Encoder(nn.Module):
    """Features (B, F, M) to (B, T, D)."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.scale = math.sqrt(config["d_model"]) if config["scale_input"] else 1.0
        self.dropout = dropout
        self.streaming = config.get("streaming")
        if self.streaming:
            self.lookahead = self.streaming["lookaheads"][0]  # of batches that name none
        self.subsampling = parts(config)[0](config)
        layers = [EncoderLayer(config, dropout) for _ in range(config["layers"])]
        self.layers = nn.ModuleList(layers)

    def subsample(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = zip(x.split(AT_ONCE), lengths.split(AT_ONCE), strict=True)
        return torch.cat([self.subsampling(*piece) for piece in pieces]) * self.scale

    def forward(
        self, x: Tensor, lengths: Tensor, frames: list[int], lookaheads: Tensor | None = None
    ) -> Tensor:
        """`lengths` (B,): valid frames of the features, on the device; `frames`: valid frames of
        the result, on the host; `lookaheads` (B,): those of a streaming model."""
        x = F.dropout(self.subsample(x, lengths), self.dropout, self.training)
        padding = None
        if min(frames) < x.shape[1]:
            counts = torch.tensor(frames).to(x.device, non_blocking=True)
            padding = ~valid_mask(counts, x.shape[1])[:, :, None]
        hidden = self.hidden(lengths, lookaheads, padding, x.shape[1])
        positions = relative_positions(x, x.shape[1], x.shape[1])
        for layer in self.layers:
            x = layer(x, positions, padding, hidden)
        return x

    def hidden(
        self, lengths: Tensor, lookaheads: Tensor | None, padding: Tensor | None, frames: int
    ) -> Tensor | None:
        """Which of the T `frames` do not see each other, as in `Attention`."""
        if self.streaming:
            if lookaheads is None:
                lookaheads = torch.full_like(lengths, self.lookahead)
            return outside_chunks(lookaheads, self.streaming["left"], padding, frames)
        return None if padding is None else padding[:, None, None, :, 0]


class PromptProjector(nn.Module):
    """Tells the encoder's output (B, T, D) which language is spoken: every frame has the number of
    its `prompts` (B,) among the slots as further inputs, of which one is 1 and all others 0."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        width = config["prompts"]["width"]
        self.linear_1 = nn.Linear(d + config["prompts"]["slots"], width)
        self.linear_2 = nn.Linear(width, d)

    def forward(self, x: Tensor, prompts: Tensor) -> Tensor:
        frames, slots = self.linear_1.weight.split([x.shape[-1], self.slots], dim=1)
        column = (slots[:, prompts].T + self.linear_1.bias)[:, None]  # (B, 1, W)
        x = F.linear(x, frames)
        return self.linear_2((x + column.to(x.dtype)).relu())

    @property
    def slots(self) -> int:
        return self.linear_1.in_features - self.linear_2.out_features


class Prediction(nn.Module):
    """The prediction network, in fp32: the labels so far (B, U) to (B, U, J)."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        width = config["prediction_width"]
        blank = config["vocabulary"]
        layers = config["prediction_layers"]
        # The row of blank, which begins a text, stays zero.
        self.embedding = nn.Embedding(blank + 1, width, padding_idx=blank)
        between = dropout if layers > 1 else 0.0  # the LSTM's dropout is between its layers
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.decoder_projector = nn.Linear(width, config["joint_width"])
        self.dropout = dropout

    def forward(self, tokens: Tensor, state: tuple | None = None) -> tuple[Tensor, tuple]:
        with torch.autocast(tokens.device.type, enabled=False):
            x, state = self.lstm(self.embedding(tokens), state)
        return self.decoder_projector(F.dropout(x, self.dropout, self.training)), state


class Joint(nn.Module):
    """The joint network's output layer, and the loss on it, which never holds its whole output."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.durations = tuple(config["durations"])
        self.dropout = dropout
        outputs = config["vocabulary"] + 1 + len(self.durations)
        self.head = nn.Linear(config["joint_width"], outputs)

    def forward(self, encoded: Tensor, predicted: Tensor, lattice: Lattice) -> Tensor:
        """(B,) losses."""
        return transducer_losses(encoded, predicted, self.head.weight, self.head.bias, lattice)

    def logits(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """(B, V + 1 + D) of one cell: tokens, blank, durations if the model has them."""
        return upcast(self.head((encoded + predicted).relu()))


class Parakeet(nn.Module):
    """FastConformer encoder; LSTM prediction network and joint network, a CTC head, or both.
    `config`: see settings.CONFIG. `sigma`, `fastemit`: see loss.Lattice. Attributes: `joint`, which
    is None without a transducer; `ctc_head`, which may be None; `trains_ctc`; `decodes_ctc`."""

    def __init__(
        self,
        config: dict,
        sigma: float = 0.0,
        dropout: float = 0.0,
        joint_dropout: float = 0.0,
        fastemit: float = 0.0,
    ):
        super().__init__()
        self.config = config
        self.blank = config["vocabulary"]
        self.sigma = sigma
        self.fastemit = fastemit
        normalised = "streaming" not in config
        self.log_mel = nemo_features.MelFeatures(config["num_mel_bins"], normalised)
        self.encoder = Encoder(config, dropout)
        self.prompt_projector = None
        if "prompts" in config:
            self.prompt_projector = PromptProjector(config)
            self.prompt = 0  # of batches that name none
        self.joint = None
        if is_transducer(config):
            self.encoder_projector = nn.Linear(config["d_model"], config["joint_width"])
            self.decoder = Prediction(config, joint_dropout)
            self.joint = Joint(config, joint_dropout)
        self.ctc_head = None
        if config["ctc"]:
            self.ctc_head = nn.Conv1d(config["d_model"], self.blank + 1, 1)
        self.trains_ctc = config["ctc"]
        self.decodes_ctc = self.joint is None

    def mel(self, batch: dict) -> tuple[Tensor, Tensor, list[int]]:
        """The batch's waveforms to features (B, F, M), their lengths, and the numbers of the
        encoder's frames on the host."""
        counts = nemo_features.frames(batch["audio_lengths_host"])
        lengths = nemo_features.frames(batch["audio_lengths"])
        x = self.log_mel(batch["audio"], batch["audio_lengths"], int(counts.max()))  # (B, F, M)
        if "time_masks" in batch:
            x = spec_augment(x, lengths, batch["frequency_masks"], batch["time_masks"])
        return x, lengths, self.encoder.subsampling.frames(counts).tolist()

    def encode(self, batch: dict) -> tuple[Tensor, list[int]]:
        """The batch's waveforms to (B, T, D), and the numbers of valid frames on the host."""
        x, lengths, frames = self.mel(batch)
        x = self.encoder(x, lengths, frames, batch.get("lookaheads"))
        if self.prompt_projector is not None:
            prompts = batch.get("prompts", torch.full_like(lengths, self.prompt))
            x = self.prompt_projector(x, prompts)
        return x, frames

    def ctc_log_probs(self, encoded: Tensor) -> Tensor:
        """The CTC head's log-probabilities (B, T, V + 1) of (B, T, D), the blank last."""
        return upcast(self.ctc_head(encoded.transpose(1, 2))).log_softmax(1).transpose(1, 2)

    def predict(self, tokens: Tensor) -> Tensor:
        """The prediction network's output (B, U + 1, J) before and after every token of (B, U)."""
        return self.decoder(F.pad(tokens, (1, 0), value=self.blank))[0]


CHECKPOINTED = (Subsampling, EncoderLayer)  # recomputed by --gradient_checkpointing
COMPILED = (FeedForward, Attention)  # compiled by --torch_compile
