"""One training step of XTTS's GPT, from waveforms to updated weights: time and peak memory with each memory option off and on,
and of packed against padded rows.

    python benchmarks/xtts_step.py [--layers 4] [--clips 2] [--seconds 8] [--threads 1] [--runs 3]
    python benchmarks/xtts_step.py --device cuda --layers 30 --clips 8 --seconds 11.6       # the allocator's peak

The GPT has the width of XTTS-v2, --layers layers and random weights, as the frozen DVAE. The baseline is fp32 with all
attention scores in memory and AdamW's states in fp32. Every measurement is a process of its own; the first step is not timed.
Padded rows have gaps between the text and the codes, as Coqui's have; the clips and texts of a batch differ in length."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import memory, optim
from common.device import Setup
from common.loop import run_window
from recipes import xtts_amharic as recipe
from speech.xtts import formats, start
from speech.xtts.codec import SAMPLE_RATE, code_count

TEXT_TOKENS_A_SECOND = 12
ROWS = {  # what is measured: the first is the reference
    "baseline": (), "+ gradient checkpointing": ("checkpoint",), "+ SDPA": ("sdpa",), "+ mixed precision (bf16)": ("bf16",),
    "+ 8-bit AdamW": ("8bit",), "SDPA, mixed precision": ("sdpa", "bf16"), "all": ("checkpoint", "sdpa", "bf16", "8bit"),
    "SDPA, padded rows": ("sdpa", "padded"),
}  # fmt: skip


def make_clips(args) -> list[dict]:
    """Clips of noise with random texts: short clips have long texts, so that padded rows have gaps."""
    random, items = torch.Generator().manual_seed(1), []
    shortest, longest = start.SLICES["full"]
    for number, seconds in enumerate(torch.linspace(args.seconds, args.seconds / 2, args.clips).tolist()):
        waveform = torch.randn(int(seconds * SAMPLE_RATE), generator=random) * 0.1
        count = round((1.5 * args.seconds - seconds) * TEXT_TOKENS_A_SECOND)
        begin = torch.nn.functional.pad(waveform[:shortest], (0, longest))[:longest]
        items.append({
            "audio": waveform, "tokens": torch.randint(300, 6000, (count,), generator=random), "slice": begin, "heard": (0, code_count(len(waveform)) // 2),
            "codes": code_count(len(waveform)), "language": "am", "name": f"clip {number}", "index": number,
        })  # fmt: skip
    return items


def padded_place(batch: dict, latents: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `recipe.place`, with the text of every row as long as the longest."""
    words, sounds = max(batch["tokens_lengths_host"].tolist()) + 1, max(batch["codes"]) + recipe.STOPS
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
        outcome = run_window(model, [batch], batch["counts"], compute_loss, recipe.LOSS_WEIGHTS, setup)
        if outcome.failed:
            raise SystemExit(f"out of memory: {outcome.reason}")
        optimizer.step()
        optimizer.zero_grad()
        return float(outcome.sums[1]) / batch["counts"]["mel"]

    return step


def child(who: str, args) -> None:
    """Measures in this process; prints seconds of each step, the peak in bytes, the loss of the first step."""
    torch.set_num_threads(args.threads)
    where = torch.device(args.device)
    is_cuda, step = where.type == "cuda", make_step(args, ROWS[who], where)

    def measured() -> tuple[float, float, float]:
        """Seconds by the clock, by the processor, and the loss."""
        started, used = time.perf_counter(), time.process_time()
        loss = step()
        if is_cuda:
            torch.cuda.synchronize(where)
        return time.perf_counter() - started, time.process_time() - used, loss

    (_, _, loss), *_ = [measured() for _ in range(3 if is_cuda else 1)]
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(where)
    seconds, used, _ = zip(*[measured() for _ in range(args.steps)], strict=True)
    peak = (
        torch.cuda.max_memory_allocated(where) if is_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print(json.dumps({"seconds": seconds, "processor": used, "bytes": peak, "loss": loss}))


def main(args) -> None:
    results = {who: [] for who in ROWS if not args.rows or who in (next(iter(ROWS)), *args.rows)}
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # else waiting for a thread is work, too
    for _ in range(args.runs):
        for who in results:
            ran = subprocess.run(
                [sys.executable, *sys.argv, "--child", who], stdout=subprocess.PIPE, text=True, env=environment
            )
            if ran.returncode == 0:  # else it did not fit into memory
                results[who].append(json.loads(ran.stdout))
    is_gpu = torch.device(args.device).type == "cuda"
    where = torch.cuda.get_device_name(args.device) if is_gpu else f"{args.threads} threads"
    print(f"torch {torch.__version__}, {where}; {args.layers} layers, {args.clips} clips of {args.seconds:g} s and less, "
          f"median of {args.runs} x {args.steps} steps")  # fmt: skip
    print(
        "| | processor, s | s by the clock | memory, GiB | of the time | of the memory | mel loss |\n"
        + "|---" * 7
        + "|"
    )
    reference = None
    for who, runs in results.items():
        if not runs:
            print(f"| {who} | does not fit |")
            continue
        seconds, used = (statistics.median(x for run in runs for x in run[key]) for key in ("seconds", "processor"))
        peak, time_of = statistics.median(run["bytes"] for run in runs), seconds if is_gpu else used
        reference = reference or (time_of, peak)
        print(f"| {who} | {used:.2f} | {seconds:.2f} | {peak / 2**30:.2f} | {time_of / reference[0]:.2f} | "
              f"{peak / reference[1]:.2f} | {runs[0]['loss']:.4f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--clips", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3, help="processes of each row")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each process")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="NAME", help="only these rows, and the first")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
    else:
        main(args)
