"""A model of the shape that the replaced project trained, as `step.py konkani` measures it: 100
frames a second straight into the Conformer blocks (no subsampling), attention scores in memory,
BatchNorm, a post-norm Transformer decoder, feed-forwards of 4 d, dropout 0.1."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from speech.signal.features import LogMel

LONGEST = 6000  # frames
DROPOUT = 0.1


class PlainAttention(nn.Module):
    """Attention as formulas have it: scores and weights are tensors (B, H, T, S)."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        self.dropout = nn.Dropout(DROPOUT)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, H, T, D / H)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, causal: bool = False) -> torch.Tensor:
        q = self.split(self.q(x))
        k = self.split(self.k(memory))
        v = self.split(self.v(memory))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if causal:
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -1e9)
        y = self.dropout(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def feed_forward(d: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d, 4 * d),
        nn.SiLU(),
        nn.Dropout(DROPOUT),
        nn.Linear(4 * d, d),
        nn.Dropout(DROPOUT),
    )


class PlainBlock(nn.Module):
    """A Conformer block."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(5))
        self.first = feed_forward(d)
        self.second = feed_forward(d)
        self.attention = PlainAttention(d, heads)
        self.enter = nn.Conv1d(d, 2 * d, 1)
        self.leave = nn.Conv1d(d, d, 1)
        self.depthwise = nn.Conv1d(d, d, 31, padding=15, groups=d)
        self.batch_norm = nn.BatchNorm1d(d)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.first(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.dropout(self.attention(y, y))
        y = F.glu(self.enter(self.norms[2](x).transpose(1, 2)), dim=1)
        y = F.silu(self.batch_norm(self.depthwise(y)))
        x = x + self.dropout(self.leave(y).transpose(1, 2))
        return self.norms[4](x + 0.5 * self.second(self.norms[3](x)))


class PlainDecoderLayer(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.attention = PlainAttention(d, heads)
        self.cross = PlainAttention(d, heads)
        self.feed_forward = feed_forward(d)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](x + self.attention(x, x, causal=True))
        x = self.norms[1](x + self.cross(x, memory))
        return self.norms[2](x + self.feed_forward(x))


class PlainConformer(nn.Module):
    """`config`: as the recipe's. The last of `vocabulary` + 1 outputs is CTC's blank and the
    decoder's start and end."""

    def __init__(self, config: dict, sample_rate: int, mels: int):
        super().__init__()
        d, heads = config["d_model"], config["attention_heads"]
        self.eos = config["vocabulary"]
        self.log_mel = LogMel(sample_rate, mels)
        self.enter = nn.Linear(mels, d)
        self.encoder = nn.ModuleList(PlainBlock(d, heads) for _ in range(config["encoder_layers"]))
        self.decoder = nn.ModuleList(
            PlainDecoderLayer(d, heads) for _ in range(config["decoder_layers"])
        )
        self.embedding = nn.Embedding(self.eos + 1, d)
        self.ctc_head = nn.Linear(d, self.eos + 1)
        self.out = nn.Linear(d, self.eos + 1)
        angles = torch.arange(LONGEST)[:, None] * 10_000 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))


def compute_loss(model: PlainConformer, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of CTC's loss and the decoder's cross-entropy with label smoothing 0.1.
    All clips of the batch are equally long."""
    x = model.enter(model.log_mel(batch["audio"]))
    x = x + model.positions[: x.shape[1]]
    for block in model.encoder:
        x = block(x)
    ctc = F.ctc_loss(
        model.ctc_head(x).log_softmax(-1).transpose(0, 1),
        batch["tokens"],
        [x.shape[1]] * len(x),
        batch["tokens_lengths"].tolist(),
        blank=model.eos,
        reduction="sum",
    )
    y = model.embedding(F.pad(batch["labels"][:, :-1], (1, 0), value=model.eos))
    y = y + model.positions[: y.shape[1]]
    for layer in model.decoder:
        y = layer(y, x)
    logits = model.out(y).flatten(0, 1)
    labels = batch["labels"].flatten()
    attention = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    return {"ctc": ctc, "attention": attention}
