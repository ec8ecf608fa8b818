"""The peaks that dry_run predicts against those that CUDA's allocator counted, for steps of a
commit whose memory was measured.

    git worktree add ../measured dde72d3
    python benchmarks/dry_run_agreement.py --worktree ../measured [--cases whisper]

Recipes and models are those of the worktree, the prediction is this checkout's. Measured was
torch.cuda.max_memory_allocated() of two updates with CUDA's real allocator, dispatch and autocast,
30 s an utterance, without workspaces of cuDNN. Letters after a size: R gradient checkpointing, F
frozen encoder, 8 optimizer states in 8 bits, H on the host; x N: the micro-batch. The exit status
is 1 if a prediction is not within 3 %."""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

CUBLAS = 2 * 8.1 * 2**20  # bytes of its workspaces, which the allocator counts
TOLERANCE = 0.03
SECONDS = 30  # of an utterance
CHARACTERS = 200
TOKENS = 120
KONKANI = {"minimal": (128, 6, 3), "optimized": (192, 8, 4), "original": (256, 12, 6)}
AMPERE = (8, 0)
TURING = (7, 5)


@dataclass(frozen=True)
class Case:
    """`measured` is in GiB; `options` are the letters of the table."""

    recipe: str
    size: str
    clips: int
    measured: float
    options: str = ""
    accumulation: int = 2
    capability: tuple[int, int] = AMPERE

    @property
    def name(self) -> str:
        return " ".join([self.recipe, self.size, *self.options, f"x {self.clips}"])


CASES = [
    Case("konkani", "minimal", 2, 0.214, capability=TURING),
    Case("konkani", "optimized", 2, 0.430, capability=TURING),
    Case("konkani", "original", 2, 0.910, capability=TURING),
    Case("konkani", "minimal", 4, 0.361),
    Case("konkani", "optimized", 4, 0.694),
    Case("konkani", "original", 4, 1.404),
    Case("konkani", "minimal", 8, 0.639, accumulation=1),
    Case("konkani", "optimized", 8, 1.176, accumulation=1),
    Case("konkani", "original", 8, 2.282, accumulation=1),
    Case("konkani", "original", 1, 0.677),
    Case("konkani", "original", 1, 0.452, "R"),
    Case("whisper", "small", 1, 3.07, "R8"),
    Case("whisper", "small", 1, 2.39, "RH"),
    Case("whisper", "small", 1, 4.18, "R"),
    Case("whisper", "large-v3", 1, 13.0, "RF8"),
    Case("whisper", "large-v3", 1, 10.9, "RFH"),
    Case("whisper", "turbo", 24, 6.06, "RF"),
]


@dataclass(frozen=True)
class Step:
    """The ingredients of a recipe's step."""

    model: torch.nn.Module
    compute_loss: Callable
    loss_weights: dict[str, float]
    batch: dict
    layers: tuple  # recomputed by gradient checkpointing


def state_bytes(model: torch.nn.Module, options: str) -> int:
    """Bytes of AdamW's states on the GPU."""
    from common.optim import BLOCK

    if "H" in options:
        return 0
    modules = model.modules()
    embeddings = {module.weight for module in modules if isinstance(module, torch.nn.Embedding)}
    total = 0
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if "8" in options and p not in embeddings and p.numel() >= 4096:
            total += 2 * (p.numel() + 4 * math.ceil(p.numel() / BLOCK))
        else:
            total += 8 * p.numel()
    return total


def konkani(case: Case) -> Step:
    from recipes import konkani_conformer as recipe

    width, encoder, decoder = KONKANI[case.size]
    shape = {
        "d_model": width,
        "encoder_layers": encoder,
        "decoder_layers": decoder,
        "vocabulary": 60,
    }
    tokens = torch.arange(CHARACTERS) % 50
    item = {
        "audio": torch.zeros(SECONDS * 16_000),
        "tokens": tokens,
        "targets": len(tokens),
        "labels": torch.cat([tokens, tokens[:1]]),
        "text": "",
        "name": "",
        "index": 0,
    }
    model = recipe.Conformer({**recipe.SHAPE, **shape})
    batch = recipe.collate([item] * case.clips)
    return Step(model, recipe.compute_loss, recipe.LOSS_WEIGHTS, batch, recipe.CHECKPOINTED)


def whisper(case: Case) -> Step:
    from common.whisper_files import SIZES

    from common import whisper

    config = SIZES[case.size]
    log_mel = whisper.LogMel(config["num_mel_bins"], config["max_source_positions"] * whisper.FRAME)
    # The filters are computed from values, which the device "meta" does not have.
    with mock.patch.object(whisper, "LogMel", lambda *_: log_mel), torch.device("meta"):
        model = whisper.Whisper(config)
    if "F" in case.options:
        model.freeze_encoder()
    samples = SECONDS * whisper.SAMPLE_RATE
    lengths = torch.full((case.clips,), TOKENS)
    tokens = torch.zeros(case.clips, TOKENS, dtype=torch.long)
    batch = {
        "audio": torch.zeros(case.clips, samples),
        "audio_lengths": torch.full((case.clips,), samples),
        "tokens": tokens,
        "labels": tokens,
        "labels_lengths": lengths,
        "tokens_lengths": lengths,
        "counts": {"attention": case.clips * TOKENS},
    }

    def compute_loss(model: torch.nn.Module, batch: dict) -> dict[str, torch.Tensor]:
        return {"attention": whisper.token_loss(model, batch, *model.encode(batch))}

    layers = (whisper.EncoderLayer, whisper.DecoderLayer)
    return Step(model, compute_loss, {"attention": 1.0}, batch, layers)


def predict(case: Case):
    """The `Peak` of a case."""
    from common import memory
    from common.device import Setup
    from common.loop import run_window  # as that commit called `run_global_batch`
    from dry_run.plan import Plan

    made = konkani(case) if case.recipe == "konkani" else whisper(case)
    made.model.train()
    if "R" in case.options:
        memory.checkpoint_layers(made.model, made.layers)
    setup = Setup(dtype=torch.bfloat16 if case.capability >= AMPERE else torch.float16)

    def step(batches: list[dict]):
        totals = made.batch["counts"]
        run_window(made.model, batches, totals, made.compute_loss, made.loss_weights, setup)

    plan = Plan(case.capability, made.model)
    states = state_bytes(made.model, case.options)
    return plan.measure(step, [made.batch] * case.accumulation, states)


def main(args) -> int:
    sys.path.insert(0, str(args.worktree.resolve()))
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import common

    if Path(common.__file__).resolve().parents[1] != args.worktree.resolve():
        raise SystemExit(f"--worktree {args.worktree}: there is no package common in it")
    print(f"torch {torch.__version__}\n")
    print(
        "| case | measured, GiB | predicted, GiB | ratio | peak in | s |\n|---|---|---|---|---|---|"
    )
    status = 0
    for case in CASES:
        if not case.name.startswith(tuple(args.cases)):
            continue
        started = time.perf_counter()
        peak = predict(case)
        predicted = (peak.total + CUBLAS) / 2**30
        ratio = predicted / case.measured
        status |= abs(ratio - 1) > TOLERANCE
        place = f"{peak.phase}, {peak.module or 'outside any module'}"
        print(
            f"| {case.name} | {case.measured} | {predicted:.3f} | {ratio:.3f} | {place} |"
            f" {time.perf_counter() - started:.1f} |",
            flush=True,
        )
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worktree",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkout of the measured commit, dde72d3",
    )
    parser.add_argument(
        "--cases", nargs="+", default=[""], metavar="NAME", help="beginnings of names (all)"
    )
    sys.exit(main(parser.parse_args()))
