"""What dry_run predicts against what CUDA's allocator counted, for steps of a commit whose memory
was measured.

    git worktree add ../measured dde72d3
    python benchmarks/dry_run_agreement.py --worktree ../measured [--cases whisper]

Recipes and models are those of the worktree, the prediction is this checkout's. Measured was
torch.cuda.max_memory_allocated() of two updates with CUDA's real allocator, dispatch and autocast,
30 s an utterance, without workspaces of cuDNN. Letters after a size: R gradient checkpointing, F
frozen encoder, 8 optimizer states in 8 bits, H on the host; x N: the micro-batch. The exit status
is 1 if a prediction is not within 3 %."""

import argparse
import functools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

CUBLAS = 2 * 8.1 * 2**20  # bytes of its workspaces, which the allocator counts
TOLERANCE = 0.03
SECONDS, CHARACTERS, TOKENS = 30, 200, 120
UPDATE = 8  # utterances in an update of Konkani's
KONKANI = {"minimal": (128, 6, 3), "optimized": (192, 8, 4), "original": (256, 12, 6)}
AMPERE, TURING = (8, 0), (7, 5)


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
    *(
        Case("konkani", size, 2, gib, capability=TURING)
        for size, gib in zip(KONKANI, (0.214, 0.430, 0.910), strict=True)
    ),
    *(
        Case("konkani", size, 4, gib)
        for size, gib in zip(KONKANI, (0.361, 0.694, 1.404), strict=True)
    ),
    *(
        Case("konkani", size, 8, gib, accumulation=1)
        for size, gib in zip(KONKANI, (0.639, 1.176, 2.282), strict=True)
    ),
    Case("konkani", "original", 1, 0.677),
    Case("konkani", "original", 1, 0.452, "R"),
    Case("whisper", "small", 1, 3.07, "R8"),
    Case("whisper", "small", 1, 2.39, "RH"),
    Case("whisper", "small", 1, 4.18, "R"),
    Case("whisper", "large-v3", 1, 13.0, "RF8"),
    Case("whisper", "large-v3", 1, 10.9, "RFH"),
    Case("whisper", "turbo", 24, 6.06, "RF"),
]


def state_bytes(model: torch.nn.Module, options: str) -> int:
    """Bytes of AdamW's states on the GPU."""
    from common.optim import BLOCK

    embeddings = {
        module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    total = 0
    for p in model.parameters():
        if p.requires_grad and "H" not in options:
            in_8bit = "8" in options and p not in embeddings and p.numel() >= 4096
            total += (
                2 * (p.numel() + 4 * math.ceil(p.numel() / BLOCK)) if in_8bit else 8 * p.numel()
            )
    return total


def konkani(case: Case) -> tuple:
    """The model, its loss, the loss weights, a batch, and the layers to recompute."""
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
        "labels": torch.cat([tokens, tokens[:1]]),
        "text": "",
        "name": "",
        "index": 0,
    }
    batch = recipe.collate([item] * case.clips)
    return (
        recipe.Conformer({**recipe.DEFAULTS, **shape}),
        recipe.compute_loss,
        recipe.LOSS_WEIGHTS,
        batch,
        recipe.CHECKPOINTED,
    )


def whisper(case: Case) -> tuple:
    from common.whisper_files import SIZES

    from common import whisper

    config = SIZES[case.size]
    log_mel = whisper.LogMel(config["num_mel_bins"], config["max_source_positions"] * whisper.FRAME)
    # The filters are computed from values, which the device "meta" does not have.
    with mock.patch.object(whisper, "LogMel", lambda *_: log_mel), torch.device("meta"):
        model = whisper.Whisper(config)
    if "F" in case.options:
        model.freeze_encoder()
    samples, lengths = SECONDS * whisper.SAMPLE_RATE, torch.full((case.clips,), TOKENS)
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

    return (
        model,
        compute_loss,
        {"attention": 1.0},
        batch,
        (whisper.EncoderLayer, whisper.DecoderLayer),
    )


def predict(case: Case):
    """The `Peak` of a case."""
    from common import memory
    from common.device import Setup
    from common.loop import run_global_batch
    from dry_run.plan import Plan

    model, compute_loss, weights, batch, layers = {"konkani": konkani, "whisper": whisper}[
        case.recipe
    ](case)
    model.train()
    if "R" in case.options:
        memory.checkpoint_layers(model, layers)
    states = state_bytes(model, case.options)
    setup = Setup(dtype=torch.bfloat16 if case.capability >= AMPERE else torch.float16)
    step = functools.partial(
        run_global_batch,
        totals=batch["counts"],
        compute_loss=compute_loss,
        loss_weights=weights,
        setup=setup,
    )
    return Plan(case.capability, model).measure(
        lambda batches: step(model, batches), [batch] * case.accumulation, states
    )


def main(args) -> int:
    sys.path.insert(0, str(args.worktree.resolve()))
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import common

    if Path(common.__file__).resolve().parents[1] != args.worktree.resolve():
        raise SystemExit(f"--worktree {args.worktree}: there is no package common in it")
    print(
        f"torch {torch.__version__}\n\n| case | measured, GiB | predicted, GiB | ratio | peak in |"
        " s |\n|---|---|---|---|---|---|"
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
