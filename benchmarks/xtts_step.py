"""One training step of XTTS's GPT, from waveforms to updated weights: time and peak memory with
each memory option off and on, and of packed against padded rows.

    python benchmarks/xtts_step.py [--layers 4] [--clips 2] [--seconds 8] [--threads 1] [--runs 3]
    python benchmarks/xtts_step.py --device cuda --layers 30 --clips 8 --seconds 11.6       # the allocator's peak

The GPT has the width of XTTS-v2, --layers layers and random weights, as the frozen DVAE. The
baseline is fp32 with all attention scores in memory and AdamW's states in fp32. Every measurement
runs in a separate process; its first step is not timed. Padded rows have gaps between the text and
the codes, as Coqui's have; the clips and texts of a batch differ in length."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import steps
from common import memory, optim
from common.device import Setup
from common.loop import run_global_batch
from recipes import xtts_amharic as recipe
from speech.xtts import formats, start
from speech.xtts.codec import SAMPLE_RATE, code_count

TEXT_TOKENS_A_SECOND = 12
ROWS = {  # what is measured: the first is the reference
    "baseline": (),
    "+ gradient checkpointing": ("checkpoint",),
    "+ SDPA": ("sdpa",),
    "+ mixed precision (bf16)": ("bf16",),
    "+ 8-bit AdamW": ("8bit",),
    "SDPA, mixed precision": ("sdpa", "bf16"),
    "all": ("checkpoint", "sdpa", "bf16", "8bit"),
    "SDPA, padded rows": ("sdpa", "padded"),
}


def make_clips(args) -> list[dict]:
    """Clips of noise with random texts: short clips have long texts, so that padded rows have
    gaps."""
    random, items = torch.Generator().manual_seed(1), []
    shortest, longest = start.SLICES["full"]
    for number, seconds in enumerate(
        torch.linspace(args.seconds, args.seconds / 2, args.clips).tolist()
    ):
        waveform = torch.randn(int(seconds * SAMPLE_RATE), generator=random) * 0.1
        count = round((1.5 * args.seconds - seconds) * TEXT_TOKENS_A_SECOND)
        begin = torch.nn.functional.pad(waveform[:shortest], (0, longest))[:longest]
        items.append(
            {
                "audio": waveform,
                "tokens": torch.randint(300, 6000, (count,), generator=random),
                "slice": begin,
                "heard": (0, code_count(len(waveform)) // 2),
                "codes": code_count(len(waveform)),
                "language": "am",
                "name": f"clip {number}",
                "index": number,
            }
        )
    return items


def padded_place(batch: dict, latents: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `recipe.place`, with the text of every row as long as the longest."""
    words, sounds = (
        max(batch["tokens_lengths_host"].tolist()) + 1,
        max(batch["codes"]) + recipe.STOPS,
    )
    longest, chosen = latents + words + sounds, {"text": [], "mel": []}
    for row, (length, codes, (_, last)) in enumerate(
        zip(batch["tokens_lengths_host"].tolist(), batch["codes"], batch["heard"], strict=True)
    ):
        begin, text, speech = (
            row * longest + latents,
            torch.arange(length + 1),
            torch.arange(last, codes + recipe.STOPS),
        )
        chosen["text"].append(torch.stack([text + begin, text + row * words]))
        chosen["mel"].append(torch.stack([speech + begin + words, speech + row * sounds]))
    places = torch.arange(longest).expand(len(batch["codes"]), -1).contiguous()
    return places, {name: torch.cat(pairs, dim=1) for name, pairs in chosen.items()}


def make_step(args, options: tuple[str, ...], where: torch.device):
    """A function that makes an update and returns the loss before it."""
    config = {**formats.SIZES["full"], "layers": args.layers}
    torch.manual_seed(0)
    model = recipe.GPT(config, dropout=0.0).to(where).train()
    frozen = start.frozen_parts(config, start.random_parts({**config, "hifigan": False})).to(where)
    for block in model.gpt.h:
        block.attn.sdpa = "sdpa" in options
    if "checkpoint" in options:
        memory.checkpoint_layers(model, recipe.CHECKPOINTED)
    if "padded" in options:
        recipe.place = padded_place
    kind = "adamw_8bit" if "8bit" in options else "adamw"
    optimizer = optim.make_optimizer(model, 5e-6, kind=kind, betas=recipe.BETAS)
    setup = Setup(where, torch.bfloat16 if "bf16" in options else None)
    batch = recipe.collate(make_clips(args))

    def compute_loss(model, batch):
        return recipe.compute_loss(model, batch, frozen)

    def step() -> float:
        outcome = run_global_batch(
            model, [batch], batch["counts"], compute_loss, recipe.LOSS_WEIGHTS, setup
        )
        if outcome.failed:
            raise SystemExit(f"out of memory: {outcome.reason}")
        optimizer.step()
        optimizer.zero_grad()
        return float(outcome.sums[1]) / batch["counts"]["mel"]

    return step


def child(who: str, args) -> None:
    torch.set_num_threads(args.threads)
    steps.measure(make_step(args, ROWS[who], torch.device(args.device)), args)


def main(args) -> None:
    results = steps.run(ROWS, args)
    is_gpu = torch.device(args.device).type == "cuda"
    where = torch.cuda.get_device_name(args.device) if is_gpu else f"{args.threads} threads"
    print(
        f"torch {torch.__version__}, {where}; {args.layers} layers, {args.clips} clips of"
        f" {args.seconds:g} s and less, median of {args.runs} x {args.steps} steps"
    )
    print(
        "| | processor, s | s by the clock | memory, GiB | of the time | of the memory | mel"
        " loss |\n" + "|---" * 7 + "|"
    )
    reference = None
    for who, runs in results.items():
        if not runs:
            print(f"| {who} | does not fit |")
            continue
        seconds, used, peak = steps.medians(runs)
        time_of = seconds if is_gpu else used
        reference = reference or (time_of, peak)
        print(
            f"| {who} | {used:.2f} | {seconds:.2f} | {peak / 2**30:.2f} |"
            f" {time_of / reference[0]:.2f} | {peak / reference[1]:.2f} | {runs[0]['loss']:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--clips", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    steps.add_arguments(parser, ROWS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
    else:
        main(args)
