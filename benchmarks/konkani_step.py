"""One training step of our Konkani Conformer against a model of the shape that the replaced project
trained: time and peak memory, fp32, on CPU threads, each in a fresh process.

    python benchmarks/konkani_step.py [--seconds 30] [--characters 200] [--batch_size 2] [--threads 2] [--runs 3]

The baseline is written here for the purpose: 100 frames a second straight into the Conformer blocks
(no subsampling), attention weights materialised, BatchNorm, a post-norm Transformer decoder,
feed-forwards of 4 d, dropout 0.1, CTC 0.3 + attention 0.7, AdamW. Features are computed within the
step on both sides."""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import optim
from common.device import Setup
from common.loop import run_global_batch
from recipes import konkani_conformer as recipe
from speech import features

SIZES = {"optimized": (192, 8, 4), "original": (256, 12, 6)}
VOCABULARY = 200


class PlainAttention(nn.Module):
    """Attention as formulas have it: scores and weights are tensors of (B, H, T, T)."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, memory, causal=False):
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e9)
        return self.out((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


def feed_forward(d: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d, 4 * d), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * d, d), nn.Dropout(0.1)
    )


class PlainBlock(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(5))
        self.first, self.second, self.attention = (
            feed_forward(d),
            feed_forward(d),
            PlainAttention(d, heads),
        )
        self.enter, self.leave = nn.Conv1d(d, 2 * d, 1), nn.Conv1d(d, d, 1)
        self.depthwise, self.batch_norm = (
            nn.Conv1d(d, d, 31, padding=15, groups=d),
            nn.BatchNorm1d(d),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + 0.5 * self.first(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.dropout(self.attention(y, y))
        y = F.glu(self.enter(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + self.dropout(self.leave(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2))
        return self.norms[4](x + 0.5 * self.second(self.norms[3](x)))


class PlainDecoderLayer(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.attention, self.cross, self.feed_forward = (
            PlainAttention(d, heads),
            PlainAttention(d, heads),
            feed_forward(d),
        )

    def forward(self, x, memory):
        x = self.norms[0](x + self.attention(x, x, causal=True))
        x = self.norms[1](x + self.cross(x, memory))
        return self.norms[2](x + self.feed_forward(x))


class PlainConformer(nn.Module):
    def __init__(self, d: int, encoder: int, decoder: int, heads: int = 4):
        super().__init__()
        self.log_mel, self.enter = (
            features.LogMel(recipe.SAMPLE_RATE, recipe.N_MELS),
            nn.Linear(recipe.N_MELS, d),
        )
        self.encoder = nn.ModuleList(PlainBlock(d, heads) for _ in range(encoder))
        self.decoder = nn.ModuleList(PlainDecoderLayer(d, heads) for _ in range(decoder))
        self.embedding = nn.Embedding(VOCABULARY + 1, d)
        self.ctc_head, self.out = nn.Linear(d, VOCABULARY + 1), nn.Linear(d, VOCABULARY + 1)
        positions = torch.arange(6000)[:, None] * 10_000 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("positions", torch.cat([positions.sin(), positions.cos()], dim=1))


def plain_loss(model: PlainConformer, batch: dict) -> dict[str, torch.Tensor]:
    x = model.enter(model.log_mel(batch["audio"]))
    x = x + model.positions[: x.shape[1]]
    for block in model.encoder:
        x = block(x)
    log_probs = model.ctc_head(x).log_softmax(-1).transpose(0, 1)
    lengths = [x.shape[1]] * len(x)
    ctc = F.ctc_loss(
        log_probs,
        batch["tokens"],
        lengths,
        batch["tokens_lengths"].tolist(),
        blank=VOCABULARY,
        reduction="sum",
    )
    y = model.embedding(F.pad(batch["labels"][:, :-1], (1, 0), value=VOCABULARY))
    y = y + model.positions[: y.shape[1]]
    for layer in model.decoder:
        y = layer(y, x)
    attention = F.cross_entropy(
        model.out(y).flatten(0, 1), batch["labels"].flatten(), reduction="sum", label_smoothing=0.1
    )
    return {"ctc": ctc, "attention": attention}


def child(who: str, size: str, args) -> None:
    """Measures in this process; prints {"seconds": [...], "bytes": peak above what importing and
    the model took}."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    d, encoder, decoder = SIZES[size]
    if who == "ours":
        config = {
            "d_model": d,
            "encoder_layers": encoder,
            "decoder_layers": decoder,
            "vocabulary": VOCABULARY,
        }
        model, loss = recipe.Conformer({**recipe.DEFAULTS, **config}), recipe.compute_loss
    else:
        model, loss = PlainConformer(d, encoder, decoder), plain_loss
    tokens = torch.randint(0, VOCABULARY, (args.characters,))
    item = {
        "audio": torch.randn(int(args.seconds * recipe.SAMPLE_RATE)) * 0.1,
        "tokens": tokens,
        "text": "",
        "name": "x",
        "index": 0,
        "labels": torch.cat([tokens, torch.tensor([VOCABULARY])]),
    }
    batch = recipe.collate([item] * args.batch_size)
    optimizer, times = optim.make_optimizer(model, learning_rate=1e-4), []
    for _ in range(args.runs + 1):
        started = time.perf_counter()
        run_global_batch(model, [batch], batch["counts"], loss, recipe.LOSS_WEIGHTS, Setup())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    print(
        json.dumps(
            {
                "seconds": times[1:],
                "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--characters", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, args)
        sys.exit()
    print(
        f"torch {torch.__version__}, fp32, {args.threads} threads, {args.batch_size} x"
        f" {args.seconds:g} s, median of {args.runs} steps"
    )
    print("| size | who | parameters | s a step | whole process, GiB |\n|---|---|---|---|---|")
    for size in SIZES:
        found = {}
        for who in ("ours", "baseline"):
            command = [sys.executable, *sys.argv, "--child", who, size]
            found[who] = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            seconds = statistics.median(found[who]["seconds"])
            print(
                f"| {size} | {who} | {found[who]['parameters'] / 1e6:.1f} M | {seconds:.2f} |"
                f" {found[who]['bytes'] / 2**30:.2f} |",
                flush=True,
            )
        ratios = [
            statistics.median(found["baseline"]["seconds"])
            / statistics.median(found["ours"]["seconds"]),
            found["baseline"]["bytes"] / found["ours"]["bytes"],
        ]
        print(f"| {size} | baseline / ours | | {ratios[0]:.1f} | {ratios[1]:.1f} |", flush=True)
