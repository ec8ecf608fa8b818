"""The Parakeet network: a FastConformer encoder, and after it an LSTM prediction network and a joint
network (TDT, RNN-T), a CTC head, or both.

Weights are named as in transformers' ParakeetForTDT, ForRNNT and ForCTC. A CTC head beside a
transducer, which they lack, is `ctc_head`, too.
Sources: FastConformer (Rekesh et al. 2023); TDT (Xu et al. 2023); relative positions (Dai et al.
2019, "Transformer-XL")."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common.device import upcast
from speech.features import spec_augment, valid_mask
from speech.layers import downcast, lean_chain
from speech.parakeet import features
from speech.parakeet.loss import Lattice, transducer_losses
from speech.parakeet.settings import is_transducer

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
        n_mels = config["num_mel_bins"]
        self.layers = nn.ModuleList([nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU()])
        for _ in range(halvings(config) - 1):
            depthwise = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
            self.layers += [depthwise, nn.Conv2d(channels, channels, 1), nn.ReLU()]
        for _ in range(halvings(config)):
            n_mels = (n_mels - 1) // 2 + 1
        self.linear = nn.Linear(channels * n_mels, config["d_model"])
        self.to(memory_format=torch.channels_last)  # twice as fast as (B, C, F, M) in memory

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        for layer in self.layers:
            if isinstance(layer, nn.ReLU):
                # Masked before ReLU, so that backward keeps one tensor of this size, not two.
                valid = valid_mask(lengths, x.shape[2])
                x = x.masked_fill(~valid[:, None, :, None], 0.0)
            x = layer(x)
            if getattr(layer, "stride", None) == (2, 2):
                lengths = (lengths - 1) // 2 + 1
        return self.linear(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """(B, T, D) to (B, T, D), after the layer's `norm`. The wide hidden layer has no dropout, which
    would be the largest tensor that backward keeps."""

    def __init__(self, config: dict):
        super().__init__()
        self.linear1 = nn.Linear(config["d_model"], config["ffn"], bias=config["biases"])
        self.linear2 = nn.Linear(config["ffn"], config["d_model"], bias=config["biases"])

    def forward(self, x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
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

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """`positions` (2 T - 1, D): as `relative_positions` returns them. `padding` (B, T, 1): True
        beyond an utterance's end; None if all utterances have T frames."""

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(-2, -3)  # (..., H, T, D / H)

        x = downcast(x)  # once for three products
        q = split(self.q_proj(x))
        k = split(self.k_proj(x))
        v = split(self.v_proj(x))
        bias_u = self.bias_u[:, None].to(q.dtype)
        bias_v = self.bias_v[:, None].to(q.dtype)
        distances = split(self.relative_k_proj(positions))  # (H, 2 T - 1, D / H)
        scores = (q + bias_v) / math.sqrt(q.shape[-1]) @ distances.transpose(-1, -2)
        scores = shift(scores)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :, 0], -torch.inf)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q + bias_u, k, v, attn_mask=scores, dropout_p=dropout)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def shift(scores: torch.Tensor) -> torch.Tensor:
    """Scores by distance (B, H, T, 2 T - 1) to scores by key (B, H, T, T). Row i begins with the
    distance T - 1; key j has the distance i - j. So each row is shifted by one more."""
    b, h, t, wide = scores.shape
    scores = F.pad(scores, (1, 0)).view(b, h, wide + 1, t)[:, :, 1:]
    return scores.reshape(b, h, t, wide)[..., :t]


class FrozenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of (B, T, D) with fixed statistics and a trained scale and shift, in fp32.
    Statistics that are trained would depend on padding and on how a global batch is cut, and
    recomputing a layer would count it twice."""

    measures = False  # whether the next input sets the statistics

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        if self.measures:
            frames = x.flatten(0, 1) if padding is None else x[~padding[..., 0]]
            self.running_mean.copy_(frames.mean(0))
            self.running_var.copy_(frames.var(0))
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return ((upcast(x) - self.running_mean) * scale + self.bias).to(x.dtype)


class Convolution(nn.Module):
    """The Conformer's convolution module, (B, T, D) to (B, T, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        kernel = config["kernel"]
        biases = config["biases"]
        self.pointwise_conv1 = nn.Conv1d(d, 2 * d, 1, bias=biases)
        self.depthwise_conv = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d, bias=biases)
        self.norm = FrozenBatchNorm(d)
        self.pointwise_conv2 = nn.Conv1d(d, d, 1, bias=biases)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        def pointwise(layer: nn.Conv1d, y: torch.Tensor) -> torch.Tensor:
            # Of an input that is not contiguous, torch chooses the kernel by whether the weight
            # requires a gradient, which a weight that autocast has cast does not in evaluation.
            return F.linear(y.contiguous(), layer.weight[:, :, 0], layer.bias)

        x = F.glu(pointwise(self.pointwise_conv1, x), dim=-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)  # or the kernel would see what follows the end
        x = self.depthwise_conv(x.transpose(1, 2)).transpose(1, 2)
        return pointwise(self.pointwise_conv2, F.silu(self.norm(x, padding)))


class EncoderLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.feed_forward1 = FeedForward(config)
        self.self_attn = Attention(config, dropout)
        self.conv = Convolution(config)
        self.feed_forward2 = FeedForward(config)
        self.norm_feed_forward1 = nn.LayerNorm(d)
        self.norm_self_att = nn.LayerNorm(d)
        self.norm_conv = nn.LayerNorm(d)
        self.norm_feed_forward2 = nn.LayerNorm(d)
        self.norm_out = nn.LayerNorm(d)
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        def drop(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(y, self.dropout, self.training)

        x = x + 0.5 * drop(self.feed_forward1(x, self.norm_feed_forward1))
        x = x + drop(self.self_attn(self.norm_self_att(x), positions, padding))
        x = x + drop(self.conv(self.norm_conv(x), padding))
        x = x + 0.5 * drop(self.feed_forward2(x, self.norm_feed_forward2))
        return self.norm_out(x)


def relative_positions(count: int, like: torch.Tensor) -> torch.Tensor:
    """(2 T - 1, D): interleaved sines and cosines of the distances T - 1 ... -(T - 1)."""
    d = like.shape[-1]
    options = {"device": like.device, "dtype": torch.float32}
    speeds = 10_000.0 ** (-torch.arange(0, d, 2, **options) / d)
    angles = torch.arange(count - 1, -count, -1, **options)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(like.dtype)


class Encoder(nn.Module):
    """Features (B, F, M) to (B, T, D)."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.scale = math.sqrt(config["d_model"]) if config["scale_input"] else 1.0
        self.dropout = dropout
        self.subsampling = Subsampling(config)
        layers = [EncoderLayer(config, dropout) for _ in range(config["layers"])]
        self.layers = nn.ModuleList(layers)

    def subsample(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.split(AT_ONCE), lengths.split(AT_ONCE), strict=True)
        return torch.cat([self.subsampling(*piece) for piece in pieces]) * self.scale

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, frames: list[int]) -> torch.Tensor:
        """`lengths` (B,): valid frames of the features, on the device; `frames`: valid frames of
        the result, on the host."""
        x = F.dropout(self.subsample(x, lengths), self.dropout, self.training)
        padding = None
        if min(frames) < x.shape[1]:
            counts = torch.tensor(frames).to(x.device, non_blocking=True)
            padding = ~valid_mask(counts, x.shape[1])[:, :, None]
        positions = relative_positions(x.shape[1], x)
        for layer in self.layers:
            x = layer(x, positions, padding)
        return x


class Prediction(nn.Module):
    """The prediction network: the labels so far (B, U) to (B, U, J). It is small and stays in
    fp32."""

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

    def forward(
        self, tokens: torch.Tensor, state: tuple | None = None
    ) -> tuple[torch.Tensor, tuple]:
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

    def forward(
        self, encoded: torch.Tensor, predicted: torch.Tensor, lattice: Lattice
    ) -> torch.Tensor:
        """(B,) losses."""
        return transducer_losses(encoded, predicted, self.head.weight, self.head.bias, lattice)

    def logits(self, encoded: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
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
        self.log_mel = features.MelFeatures(config["num_mel_bins"])
        self.encoder = Encoder(config, dropout)
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

    def mel(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The batch's waveforms to features (B, F, M), their lengths, and the numbers of the
        encoder's frames on the host."""
        counts = features.frames(batch["audio_lengths_host"])
        lengths = features.frames(batch["audio_lengths"])
        x = self.log_mel(batch["audio"], batch["audio_lengths"], int(counts.max()))  # (B, F, M)
        if "time_masks" in batch:
            x = spec_augment(x, lengths, batch["frequency_masks"], batch["time_masks"])
        for _ in range(halvings(self.config)):
            counts = (counts - 1) // 2 + 1
        return x, lengths, counts.tolist()

    def encode(self, batch: dict) -> tuple[torch.Tensor, list[int]]:
        """The batch's waveforms to (B, T, D), and the numbers of valid frames on the host."""
        x, lengths, frames = self.mel(batch)
        return self.encoder(x, lengths, frames), frames

    def ctc_log_probs(self, encoded: torch.Tensor) -> torch.Tensor:
        """The CTC head's log-probabilities (B, T, V + 1) of (B, T, D), the blank last."""
        return upcast(self.ctc_head(encoded.transpose(1, 2))).log_softmax(1).transpose(1, 2)

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        """The prediction network's output (B, U + 1, J) before the first and after every token of
        (B, U)."""
        return self.decoder(F.pad(tokens, (1, 0), value=self.blank))[0]


CHECKPOINTED = (Subsampling, EncoderLayer)  # recomputed by --gradient_checkpointing
COMPILED = (FeedForward, Attention, Convolution)  # compiled by --torch_compile
