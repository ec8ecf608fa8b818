"""Peak memory of Whisper's training steps, predicted without a GPU, and the largest micro-batch that fits.

    python benchmarks/whisper_memory.py [--sizes tiny base ...] [--seconds 30] [--tokens 120] [--gib 8 16 24 32]

The real model and its real forward and backward pass run on tensors without content (torch's FakeTensorMode) under bf16
autocast; counted are the storages alive at the peak. `--check` runs tiny with content as well and compares. Weights and
gradients are fp32 and there from the start, as in every micro-batch but a window's first. Optimizer states: 8 bytes a
trained weight, or `--optimizer adamw_8bit`'s (embeddings and small tensors in fp32), or none (`--use_cpu_offload`).

A prediction: CUDA's context, its kernels' workspaces and what the allocator cannot use are not in it. The second table
leaves room for them: of a GPU it uses 90 % of what is left after 0.6 GiB. Micro-batches of 1, 16 and 64 clips are
counted and what lies between is drawn on their chords, which are never below it; larger ones are "64+"."""

import argparse
import contextlib
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch
from konkani_memory import LiveStorages
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import memory
from common.optim import BLOCK
from speech.whisper import model as whisper
from speech.whisper.formats import SIZES
from speech.whisper.model import LAYERS, SAMPLE_RATE, token_loss

CONTEXT, USABLE = 0.6, 0.9  # GiB; share of the rest
COUNTED = (1, 16, 64)  # clips
OPTIMIZERS = ("adamw", "adamw_8bit", "offload")
SMALL = 4096  # values: the 8-bit kind keeps smaller tensors' states in fp32


class Lengths(list):
    """Lengths on the host with the two methods of a tensor that the model calls there."""

    def min(self) -> int:
        return min(self)

    def tolist(self) -> list[int]:
        return self


def state_bytes(model: torch.nn.Module, optimizer: str) -> int:
    """Of the optimizer's states on the device, see optim.make_states."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    total = 0
    for p in model.parameters():
        if not p.requires_grad or optimizer == "offload":
            continue
        in_8bit = optimizer == "adamw_8bit" and p not in embeddings and p.numel() >= SMALL
        total += 2 * (p.numel() + 4 * -(-p.numel() // BLOCK)) if in_8bit else 8 * p.numel()
    return total


def predict(
    size: str, clips: int, seconds: float, tokens: int, checkpointing: bool, frozen: bool, fake: bool = True
) -> tuple[int, dict[str, int], int]:
    """Bytes at the peak without optimizer states, bytes of these by kind, and the number of parameters."""
    config, samples = SIZES[size], int(seconds * SAMPLE_RATE)
    log_mel = whisper.LogMel(config["num_mel_bins"], config["max_source_positions"] * whisper.FRAME)
    mode = FakeTensorMode() if fake else contextlib.nullcontext()
    if fake:  # its filters are computed from values
        log_mel.filters, log_mel.taper = mode.from_tensor(log_mel.filters), mode.from_tensor(log_mel.taper)
    live = LiveStorages()
    with mode:
        with mock.patch.object(whisper, "LogMel", lambda *_: log_mel):
            model = whisper.Whisper(config).train()
        model.pad_to_longest = samples == model.longest
        if frozen:
            model.freeze_encoder()
        if checkpointing:
            memory.checkpoint_layers(model, LAYERS)
        for p in model.parameters():
            live.add(p)
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
                live.add(p.grad)
        batch = {
            "audio": torch.zeros(clips, samples), "audio_lengths": torch.full((clips,), samples),
            "audio_lengths_host": Lengths([samples] * clips), "labels_lengths_host": Lengths([tokens] * clips),
            "tokens": torch.zeros(clips, tokens, dtype=torch.long), "labels": torch.zeros(clips, tokens, dtype=torch.long),
        }  # fmt: skip
        with live:
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_loss(model, batch, *model.encode(batch)) / (clips * tokens)
            loss.backward()
    states = {optimizer: state_bytes(model, optimizer) for optimizer in OPTIMIZERS}
    return live.peak, states, sum(p.numel() for p in model.parameters())


def largest(room: float, peaks: list[float]) -> str:
    """How many clips fit into `room`, in the unit of `peaks`, which are those of COUNTED."""
    if room >= peaks[-1]:
        return f"{COUNTED[-1]}+"
    if room < peaks[0]:
        return "-"
    pairs = list(zip(COUNTED, peaks, strict=True))
    (below, low), (above, high) = next(pair for pair in itertools.pairwise(pairs) if room < pair[1][1])
    return str(below + int((room - low) / (high - low) * (above - below)))


def main(args) -> None:
    print(
        f"torch {torch.__version__}, {args.seconds:g} s and {args.tokens} tokens a clip, bf16 autocast; predicted, GiB\n"
    )
    print("| size | parameters | trains | checkpointing | weights, gradients, 1 clip | further clips, each | + AdamW | + 8-bit AdamW |\n"
          "|---|---|---|---|---|---|---|---|")  # fmt: skip
    rows = []
    for size in args.sizes:
        for frozen in (False, True):
            for checkpointing in (False, True):
                found = [predict(size, n, args.seconds, args.tokens, checkpointing, frozen) for n in COUNTED]
                peaks = [peak / 2**30 for peak, *_ in found]
                states = {name: value / 2**30 for name, value in found[0][1].items()}
                what = (size, "decoder" if frozen else "all", "on" if checkpointing else "off")
                rows.append((what, states, peaks))
                each = (peaks[-1] - peaks[-2]) / (COUNTED[-1] - COUNTED[-2])
                print(f"| {size} | {found[0][2] / 1e6:.1f} M | {what[1]} | {what[2]} | {peaks[0]:.2f} | {each:.3f} | {states['adamw']:.2f} | "
                      f"{states['adamw_8bit']:.2f} |", flush=True)  # fmt: skip
    sizes = " | ".join(f"{gib:g} GB" for gib in args.gib)
    print(f"\nlargest micro-batch of {args.seconds:g} s clips: with AdamW / 8-bit AdamW / states on the host\n")
    print(f"| size | trains | checkpointing | {sizes} |\n|---|---|---|{'---|' * len(args.gib)}")
    for what, states, peaks in rows:
        budgets = [USABLE * (gib - CONTEXT) for gib in args.gib]
        cells = [" / ".join(largest(budget - states[kind], peaks) for kind in OPTIMIZERS) for budget in budgets]
        print(f"| {' | '.join(what)} | {' | '.join(cells)} |")


def check(args) -> None:
    for checkpointing in (False, True):
        for frozen in (False, True):
            found = [
                predict("tiny", 2, args.seconds, args.tokens, checkpointing, frozen, fake)[0] for fake in (True, False)
            ]
            print(f"tiny, 2 clips, checkpointing {checkpointing}, frozen encoder {frozen}: {found[0]:,} bytes predicted, "
                  f"{found[1]:,} counted in a step with content", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), metavar="SIZE",
                        default=[size for size in SIZES if size != "large-v2"])  # fmt: skip
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=120, help="of a transcript, with the prompt")
    parser.add_argument("--gib", type=float, nargs="+", default=[8, 16, 24, 32])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    (check if args.check else main)(args)
