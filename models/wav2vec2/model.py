"""The wav2vec 2.0 network with a CTC head: convolutions over the waveform, a convolution for
positions, and transformer layers.

It is the network of omniASR, XLS-R, MMS, wav2vec 2.0 and HuBERT. `config` has the keys of
transformers' config.json. Weights are named as in transformers' Wav2Vec2ForCTC, without the prefix
`wav2vec2.`.
Sources: wav2vec 2.0 (Baevski et al. 2020); LayerDrop (Fan et al. 2020, "Reducing Transformer Depth
on Demand with Structured Dropout"); language adapters (Pratap et al. 2023, "Scaling Speech
Technology to 1,000+ Languages")."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.device import upcast
from common.layers import downcast, lean_chain, quieten_branches
from speech.signal.features import valid_mask

BRANCH_OUTPUTS = (".out_proj", ".output_dense")


def frames(samples, config: dict):
    """The frames of so many samples at 16 kHz, an int or a tensor; at least 1."""
    for kernel, stride in zip(config["conv_kernel"], config["conv_stride"], strict=True):
        samples = (samples - kernel) // stride + 1
    return samples.clamp_min(1) if isinstance(samples, Tensor) else max(1, samples)


def frame_samples(config: dict) -> int:
    """The samples between the beginnings of two frames."""
    return math.prod(config["conv_stride"])


def shortest(config: dict) -> int:
    """The samples that the first frame sees: 400 in all released models."""
    samples = 1
    for kernel, stride in zip(
        config["conv_kernel"][::-1], config["conv_stride"][::-1], strict=True
    ):
        samples = (samples - 1) * stride + kernel
    return samples


def normalised(audio: Tensor, lengths: Tensor, epsilon: float) -> Tensor:
    """Waveforms (B, T) with lengths (B,), each with a mean of 0 and a variance of 1, then zeros."""
    valid = valid_mask(lengths, audio.shape[1])
    counts = lengths[:, None].to(audio.dtype)
    centred = audio - (audio * valid).sum(1, keepdim=True) / counts
    centred = centred * valid
    variance = centred.square().sum(1, keepdim=True) / counts
    return centred * (variance + epsilon).rsqrt()


class ChannelNorm(nn.GroupNorm):
    """Normalises each channel of (B, C, T) over the valid frames of its utterance. Padding would
    change the statistics, and with them an utterance's result."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = valid_mask(lengths, x.shape[2])[:, None]
        counts = lengths[:, None, None].to(x.dtype)
        x = (x - (x * valid).sum(2, keepdim=True) / counts) * valid
        variance = x.square().sum(2, keepdim=True) / counts
        return x * (variance + self.eps).rsqrt() * self.weight[:, None] + self.bias[:, None]


class ConvLayer(nn.Module):
    """A convolution with stride, its norm if it has one, and GELU: (B, C, T) to (B, D, T')."""

    def __init__(self, config: dict, number: int):
        super().__init__()
        dims = [1, *config["conv_dim"]]
        self.kernel = config["conv_kernel"][number]
        self.stride = config["conv_stride"][number]
        width = dims[number + 1]
        self.conv = nn.Conv1d(
            dims[number], width, self.kernel, self.stride, bias=config["conv_bias"]
        )
        self.layer_norm = None
        if config["feat_extract_norm"] == "layer":
            self.layer_norm = nn.LayerNorm(width)
        elif number == 0:
            self.layer_norm = ChannelNorm(width, width)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`lengths` (B,): of the input. The result has its own."""
        x = self.conv(x)
        kind = x.dtype
        lengths = (lengths - self.kernel) // self.stride + 1
        if isinstance(self.layer_norm, ChannelNorm):
            x = self.layer_norm(upcast(x), lengths.clamp_min(1)).to(kind)
        elif self.layer_norm is not None:
            x = self.layer_norm(upcast(x).transpose(1, 2)).transpose(1, 2).to(kind)
        return F.gelu(x), lengths


class FeatureExtractor(nn.Module):
    """Waveforms (B, T) to (B, F, C): a frame every 20 ms. A frame sees only samples of its own, so
    valid frames see no padding."""

    def __init__(self, config: dict):
        super().__init__()
        layers = (ConvLayer(config, number) for number in range(len(config["conv_dim"])))
        self.conv_layers = nn.ModuleList(layers)
        self.shortest = shortest(config)

    @property
    def is_trained(self) -> bool:
        return self.conv_layers[0].conv.weight.requires_grad

    def forward(self, audio: Tensor, lengths: Tensor) -> Tensor:
        x = F.pad(audio, (0, max(0, self.shortest - audio.shape[1])))[:, None]
        for layer in self.conv_layers:
            x, lengths = layer(x, lengths)
        return x.transpose(1, 2)

    @torch.no_grad()
    def one_by_one(self, audio: Tensor, lengths: list[int]) -> Tensor:
        """The same for an extractor that is not trained. One utterance after the other needs the
        least memory: the first convolution returns 6 MB a second of speech."""
        rows = []
        for row, length in zip(audio, lengths, strict=True):
            rows.append(self(row[None, :length], torch.full_like(row[:1], length).long())[0])
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class FeatureProjection(nn.Module):
    """(B, T, C) to (B, T, D)."""

    def __init__(self, config: dict):
        super().__init__()
        width = config["conv_dim"][-1]
        self.layer_norm = None
        if config["feat_proj_layer_norm"]:
            self.layer_norm = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.projection = nn.Linear(width, config["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x if self.layer_norm is None else self.layer_norm(x))


class WeightNormConv(nn.Module):
    """A grouped convolution of (B, D, T) whose weight is `weight_v` with the norm `weight_g` at
    each place of the kernel (Salimans and Kingma 2016)."""

    def __init__(self, width: int, kernel: int, groups: int):
        super().__init__()
        self.groups = groups
        self.weight_v = nn.Parameter(torch.empty(width, width // groups, kernel))
        deviation = 2 / math.sqrt(kernel * width)
        nn.init.normal_(self.weight_v, std=deviation)
        with torch.no_grad():
            self.weight_g = nn.Parameter(self.norm())
        self.bias = nn.Parameter(torch.zeros(width))

    def norm(self) -> Tensor:
        """(1, 1, K)"""
        return upcast(self.weight_v).square().sum((0, 1), keepdim=True).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_v * (self.weight_g / self.norm())
        padding = self.weight_v.shape[2] // 2
        return F.conv1d(x, weight, self.bias, padding=padding, groups=self.groups)


class PositionalConvEmbedding(nn.Module):
    """What is added to (B, T, D) so that a frame knows where it is. Padding must be 0."""

    def __init__(self, config: dict):
        super().__init__()
        self.conv = WeightNormConv(
            config["hidden_size"],
            config["num_conv_pos_embeddings"],
            config["num_conv_pos_embedding_groups"],
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[:, :, : x.shape[1]]  # an even kernel returns one more
        return F.gelu(y.transpose(1, 2))


class Attention(nn.Module):
    """Self-attention without positions, (B, T, D) to (B, T, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.q_proj = nn.Linear(d, d)
        self.k_proj = nn.Linear(d, d)
        self.v_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (B, 1, 1, T): True where a frame is seen; None if all are."""
        x = downcast(x)  # once for three products
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """(B, T, D) to (B, T, D), after `norm` if one is given. The wide hidden layer has no dropout,
    which would be the largest tensor that backward keeps."""

    def __init__(self, config: dict):
        super().__init__()
        self.intermediate_dense = nn.Linear(config["hidden_size"], config["intermediate_size"])
        self.output_dense = nn.Linear(config["intermediate_size"], config["hidden_size"])

    def forward(self, x: Tensor, norm: nn.LayerNorm | None = None) -> Tensor:
        first = (norm, self.intermediate_dense) if norm else (self.intermediate_dense,)
        return lean_chain(x, *first, F.gelu, self.output_dense)


class Adapter(nn.Module):
    """A language's small layer in MMS, (B, T, D) to (B, T, D); the residual is the caller's."""

    def __init__(self, config: dict):
        super().__init__()
        self.norm = nn.LayerNorm(config["hidden_size"])
        self.linear_1 = nn.Linear(config["hidden_size"], config["adapter_attn_dim"])
        self.linear_2 = nn.Linear(config["adapter_attn_dim"], config["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.relu(self.linear_1(self.norm(x))))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, with the norm before each of them ("stable") or after."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        epsilon = config["layer_norm_eps"]
        self.attention = Attention(config)
        self.layer_norm = nn.LayerNorm(config["hidden_size"], eps=epsilon)
        self.feed_forward = FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config["hidden_size"], eps=epsilon)
        self.adapter_layer = Adapter(config) if config["adapter_attn_dim"] else None
        self.is_stable = config["do_stable_layer_norm"]
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`mask`: as in `Attention`."""

        def drop(y: Tensor) -> Tensor:
            return F.dropout(y, self.dropout, self.training)

        if not self.is_stable:
            x = self.layer_norm(x + drop(self.attention(x, mask)))
            return self.final_layer_norm(x + drop(self.feed_forward(x)))
        x = x + drop(self.attention(self.layer_norm(x), mask))
        x = x + drop(self.feed_forward(x, self.final_layer_norm))
        return x if self.adapter_layer is None else x + self.adapter_layer(x)


class Encoder(nn.Module):
    """(B, T, D) to (B, T, D)."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.pos_conv_embed = PositionalConvEmbedding(config)
        self.layer_norm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])
        layers = (EncoderLayer(config, dropout) for _ in range(config["num_hidden_layers"]))
        self.layers = nn.ModuleList(layers)
        self.is_stable = config["do_stable_layer_norm"]
        self.dropout = dropout

    def forward(self, x: Tensor, valid: Tensor | None, kept: Tensor | None = None) -> Tensor:
        """`valid` (B, T): frames inside the utterances; None if all have T. `kept` (B, L): True for
        the layers that an utterance goes through; None if it is all of them."""
        mask = None
        if valid is not None:
            x = x.masked_fill(~valid[:, :, None], 0.0)
            mask = valid[:, None, None]
        x = x + self.pos_conv_embed(x)
        if not self.is_stable:
            x = self.layer_norm(x)
        x = F.dropout(x, self.dropout, self.training)
        for number, layer in enumerate(self.layers):
            # Also if no utterance goes through: with --sharded the other ranks wait for this layer.
            y = layer(x, mask)
            x = y if kept is None else torch.where(kept[:, number, None, None], y, x)
        return self.layer_norm(x) if self.is_stable else x


CHECKPOINTED = (EncoderLayer,)  # recomputed by --gradient_checkpointing
COMPILED = (Attention, FeedForward)  # compiled by --torch_compile


class Wav2Vec2(nn.Module):
    """The network, with random weights at first. `config`: see settings.py."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.blank = config["blank"]
        self.feature_extractor = FeatureExtractor(config)
        self.feature_projection = FeatureProjection(config)
        self.masked_spec_embed = nn.Parameter(torch.zeros(config["hidden_size"]))
        self.encoder = Encoder(config, dropout)
        quieten_branches(self.encoder, BRANCH_OUTPUTS)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocabulary"])

    def features(self, batch: dict) -> Tensor:
        """The frames (B, T, C) of the batch's waveforms."""
        audio = batch["audio"]
        if self.config["do_normalize"]:
            audio = normalised(audio, batch["audio_lengths"], self.config["normalize_eps"])
        kind = audio.device.type
        # Half precision is too narrow for the convolutions of models that were trained in fp32.
        narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not narrow):
            if self.feature_extractor.is_trained and torch.is_grad_enabled():
                return self.feature_extractor(audio, batch["audio_lengths"])
            return self.feature_extractor.one_by_one(audio, batch["audio_lengths_host"].tolist())

    def encode(self, batch: dict) -> tuple[Tensor, list[int]]:
        """The batch's waveforms to (B, T, D), and the number of valid frames of each.

        A training batch has masks: time_masks (B, T) and channel_masks (B, D), and layers (B, L),
        those that each utterance goes through."""
        counts = frames(batch["audio_lengths_host"], self.config).tolist()
        x = self.features(batch)[:, : max(counts)]
        x = self.feature_projection(x)
        if "time_masks" in batch:
            time = batch["time_masks"][:, : x.shape[1], None]
            x = torch.where(time, self.masked_spec_embed.to(x.dtype), x)
            x = x.masked_fill(batch["channel_masks"][:, None], 0.0)
        valid = None
        if min(counts) < x.shape[1]:
            valid = valid_mask(frames(batch["audio_lengths"], self.config), x.shape[1])
        return self.encoder(x, valid, batch.get("layers")), counts

    def ctc_log_probs(self, encoded: Tensor) -> Tensor:
        """(B, T, D) to (B, T, V), in fp32 or better."""
        return upcast(self.lm_head(encoded)).log_softmax(-1)
