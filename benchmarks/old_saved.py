"""What each memory saving that changes no result saves and costs: a training step with none of
them, each alone, and all.

    python benchmarks/saved_memory.py konkani [--batch_size 8] [--checkpointing]    # original, 12+6 layers
    python benchmarks/saved_memory.py whisper [--batch_size 1] [--checkpointing]    # small, everything trained
    python benchmarks/saved_memory.py konkani --batch_size 2 --steps 3 [--fp32]     # time in place of memory

Memory: bytes kept for backward (storages, without parameters) and the peak of a step's live
storages (weights, gradients and AdamW's states included), under bf16 autocast on the CPU, with
LayerNorm in fp32 as CUDA's autocast has it. Time: processor time of one thread, the median over
rounds of the ratio to the same round's step without savings."""

import argparse
import functools
import statistics
import sys
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import memory
from common.batches import to_device
from common.device import Setup
from recipes import konkani_conformer as konkani
from speech import layers
from speech.whisper import formats
from speech.whisper import model as whisper

MIB = 2**20
ROUNDING = 512  # bytes: the CUDA allocator's
# Ends of the names of linear layers whose input is recomputed, or a switch of `plain`.
SAVINGS = {
    "konkani": {
        "SiLU of the feed-forwards": (".first.3", ".second.3", ".feed_forward.3"),
        "norm of the feed-forwards": (".first.1", ".second.1", ".feed_forward.1"),
        "norm and SiLU of the convolution": (".leave",),
        "norm before the convolution": (".enter",),
        "norm before self-attention": (".qkv",),
        "v without q and k": ("contiguous",),
        "no cache of autocast": ("cache",),
    },
    "whisper": {
        "GELU": (".fc2",),
        "norm before fc1": (".fc1",),
        "1 << 23 logits at once, not 1 << 24": ("pieces",),
        "no cache of autocast": ("cache",),
    },
}


def make_konkani(args) -> tuple:
    shape = {
        **konkani.DEFAULTS,
        "d_model": 256,
        "encoder_layers": 12,
        "decoder_layers": 6,
        "vocabulary": 60,
    }
    tokens = torch.arange(200) % 50
    item = {
        "audio": torch.randn(int(args.seconds * konkani.SAMPLE_RATE)) * 0.1,
        "tokens": tokens,
        "text": "",
        "name": "x",
        "index": 0,
        "labels": torch.cat([tokens, tokens[:1]]),
    }
    batch = konkani.collate([item] * args.batch_size)
    return (
        konkani.Conformer(shape),
        batch,
        lambda model, b: sum(konkani.compute_loss(model, b).values()),
        konkani,
    )


def make_whisper(args) -> tuple:
    clips, samples = args.batch_size, int(args.seconds * whisper.SAMPLE_RATE)
    batch = {
        "audio": torch.randn(clips, samples) * 0.1,
        "audio_lengths": torch.full((clips,), samples),
        "tokens": torch.zeros(clips, 120, dtype=torch.long),
        "labels": torch.zeros(clips, 120, dtype=torch.long),
        "labels_lengths": torch.full((clips,), 120),
    }
    model = whisper.Whisper(formats.SIZES["small"])
    return model, batch, lambda m, b: whisper.token_loss(m, b, *m.encode(b)), whisper


def plain(stack: ExitStack, model: torch.nn.Module, module, used: set[str]) -> None:
    """Switches off every saving that is not in `used`."""
    names = {linear: name for name, linear in model.named_modules()}

    def lean_chain(x, *steps):
        ends = [place for place, step in enumerate(steps, 1) if isinstance(step, torch.nn.Linear)]
        parts = [steps[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        leans = [names[part[-1]].endswith(tuple(used)) for part in parts]
        if all(leans):
            return layers.lean_chain(x, *steps)
        for part, lean in zip(parts, leans, strict=True):
            x = (
                layers.lean_chain(x, *part)
                if lean
                else functools.reduce(lambda value, step: step(value), part, x)
            )
        return x

    def patch(target, name, value):
        stack.enter_context(mock.patch.object(target, name, value))

    patch(module, "lean_chain", lean_chain)
    if "contiguous" not in used:
        patch(torch.Tensor, "contiguous", lambda tensor: tensor)
    if "pieces" not in used:
        patch(whisper, "LOGITS_AT_ONCE", 1 << 24)
    if "cache" not in used:
        patch(
            Setup, "autocast", lambda s: torch.autocast("cpu", s.dtype, enabled=s.dtype is not None)
        )


def cuda_layer_norm(x, *rest):
    """CUDA's autocast computes it in fp32, the CPU's does not."""
    return torch.layer_norm(x.float() if torch.is_autocast_enabled("cpu") else x, *rest)


def forward(model, batch, compute_loss, setup) -> torch.Tensor:
    with setup.autocast():
        return compute_loss(model, next(to_device([batch], setup.device))) / 1000


def measure(model, batch, compute_loss, setup) -> tuple[int, int]:
    """Bytes kept for backward, and at the peak of the step."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    live = LiveStorages()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        live.add(p)
        live.add(p.grad)
    live.now += 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)  # AdamW's states
    with live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(model, batch, compute_loss, setup)
        loss.backward()
    return sum(kept.values()), live.peak


def clock(model, batch, compute_loss, setup) -> float:
    started = time.process_time()
    forward(model, batch, compute_loss, setup).backward()
    return time.process_time() - started


def main(args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch, compute_loss, module = (
        make_konkani if args.model == "konkani" else make_whisper
    )(args)
    if args.checkpointing:
        memory.checkpoint_layers(
            model, konkani.CHECKPOINTED if args.model == "konkani" else whisper.LAYERS
        )
    setup = Setup(dtype=None if args.fp32 else torch.bfloat16)
    savings = SAVINGS[args.model]
    every = {end for ends in savings.values() for end in ends}
    rows = {"none": set(), **{name: set(ends) for name, ends in savings.items()}, "all": every}

    def run(function, used: set[str]):
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(F, "layer_norm", cuda_layer_norm))
            plain(stack, model, module, used)
            return function(model, batch, compute_loss, setup)

    options = ("fp32" if args.fp32 else "bf16 autocast") + (
        ", checkpointing" if args.checkpointing else ""
    )
    print(
        f"torch {torch.__version__}, {args.model}, {args.batch_size} x {args.seconds:g} s,"
        f" {options}\n"
    )
    if args.steps:
        order, rounds = list(rows), []
        for _ in range(
            args.steps + 1
        ):  # each round begins with another row; the first is not counted
            order.append(order.pop(0))
            rounds.append({name: run(clock, rows[name]) for name in order})
        rounds = rounds[1:]
        print("| saving | processor, s | of a step without, % |\n|---|---|---|")
        for name in rows:
            ratio = statistics.median(times[name] / times["none"] for times in rounds)
            print(
                f"| {name} | {statistics.median(times[name] for times in rounds):.2f} |"
                f" {100 * ratio:.1f} |"
            )
        return
    print(
        "| saving | kept for backward, MiB | saved, % | peak, MiB | saved, %"
        " |\n|---|---|---|---|---|"
    )
    first = None
    for name, used in rows.items():
        kept, peak = run(measure, used)
        first = first or (kept, peak)
        less = [
            f"{100 * (1 - now / before):.1f}"
            for now, before in zip((kept, peak), first, strict=True)
        ]
        print(
            f"| {name} | {kept / MIB:,.0f} | {less[0]} | {peak / MIB:,.0f} | {less[1]} |",
            flush=True,
        )


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, until they are freed."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, tuple[weakref.ref, int]] = {}  # by address: the storage and its bytes
        self.now, self.peak = 0, 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // ROUNDING) * ROUNDING
        reference, freed = self.known.get(key, (lambda: None, 0))
        if reference() is storage:
            return
        self.known[key] = weakref.ref(storage, lambda dead: self.drop(key, dead)), size
        self.now += (
            size - freed
        )  # a freed storage may still be listed when its address is used again
        self.peak = max(self.peak, self.now)

    def drop(self, key: int, dead: weakref.ref) -> None:
        if key in self.known and self.known[key][0] is dead:
            self.now -= self.known.pop(key)[1]

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SAVINGS))
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument(
        "--steps", type=int, default=0, help="timed steps of each kind (0: memory is measured)"
    )
    main(parser.parse_args())
