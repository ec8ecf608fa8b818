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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


@dataclass(frozen=True)
class Step:
    """What is measured. `module` is where the model's `lean_chain` is looked up, `layers` are those
    that gradient checkpointing recomputes."""

    model: torch.nn.Module
    batch: dict
    compute_loss: Callable
    module: ModuleType
    layers: tuple


def make_konkani(args) -> Step:
    size = {"d_model": 256, "encoder_layers": 12, "decoder_layers": 6, "vocabulary": 60}
    tokens = torch.arange(200) % 50
    item = {
        "audio": torch.randn(int(args.seconds * konkani.SAMPLE_RATE)) * 0.1,
        "tokens": tokens,
        "labels": torch.cat([tokens, tokens[:1]]),
        "text": "",
        "name": "clip",
        "index": 0,
    }
    batch = konkani.collate([item] * args.batch_size)
    model = konkani.Conformer({**konkani.DEFAULTS, **size})

    def compute_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        return sum(konkani.compute_loss(model, batch).values())

    return Step(model, batch, compute_loss, konkani, konkani.CHECKPOINTED)


def make_whisper(args) -> Step:
    clips = args.batch_size
    samples = int(args.seconds * whisper.SAMPLE_RATE)
    batch = {
        "audio": torch.randn(clips, samples) * 0.1,
        "audio_lengths": torch.full((clips,), samples),
        "tokens": torch.zeros(clips, 120, dtype=torch.long),
        "labels": torch.zeros(clips, 120, dtype=torch.long),
        "labels_lengths": torch.full((clips,), 120),
    }
    model = whisper.Whisper(formats.SIZES["small"])

    def compute_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        return whisper.token_loss(model, batch, *model.encode(batch))

    return Step(model, batch, compute_loss, whisper, whisper.LAYERS)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, until they are freed."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, tuple[weakref.ref, int]] = {}  # by address: the storage and its bytes
        self.now = 0
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        reference, freed = self.known.get(key, (lambda: None, 0))
        if reference() is storage:
            return
        self.known[key] = weakref.ref(storage, lambda dead: self.drop(key, dead)), size
        # A freed storage may still be listed when its address is used again.
        self.now += size - freed
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


# --- savings on and off ---------------------------------------------------------------------------


def switch_off(stack: ExitStack, step: Step, used: set[str]) -> None:
    """Switches off every saving that is not in `used`, until the stack is left."""

    def patch(target, name, value):
        stack.enter_context(mock.patch.object(target, name, value))

    names = {module: name for name, module in step.model.named_modules()}
    patch(step.module, "lean_chain", functools.partial(lean_chain, names, used))
    if "contiguous" not in used:
        patch(torch.Tensor, "contiguous", lambda tensor: tensor)
    if "pieces" not in used:
        patch(whisper, "LOGITS_AT_ONCE", 1 << 24)
    if "cache" not in used:
        patch(Setup, "autocast", cached_autocast)
    patch(F, "layer_norm", cuda_layer_norm)


def lean_chain(
    names: dict[torch.nn.Module, str], used: set[str], x: torch.Tensor, *steps
) -> torch.Tensor:
    """As `layers.lean_chain` for the parts of a chain that end with a linear layer in `used`, and
    step by step for the other parts. `names`: those of all modules."""
    part = []
    parts = []
    for one in steps:
        part.append(one)
        if isinstance(one, torch.nn.Linear):
            parts.append(part)
            part = []
    leans = [names[part[-1]].endswith(tuple(used)) for part in parts]
    if all(leans):
        return layers.lean_chain(x, *steps)
    for part, lean in zip(parts, leans, strict=True):
        if lean:
            x = layers.lean_chain(x, *part)
        else:
            for one in part:
                x = one(x)
    return x


def cached_autocast(setup: Setup):
    return torch.autocast("cpu", setup.dtype, enabled=setup.dtype is not None)


def cuda_layer_norm(x: torch.Tensor, *rest) -> torch.Tensor:
    """CUDA's autocast computes it in fp32, the CPU's does not."""
    return torch.layer_norm(x.float() if torch.is_autocast_enabled("cpu") else x, *rest)


# --- measuring ------------------------------------------------------------------------------------


def forward(step: Step, setup: Setup) -> torch.Tensor:
    with setup.autocast():
        batch = next(to_device([step.batch], setup.device))
        return step.compute_loss(step.model, batch) / 1000


def measure(step: Step, setup: Setup) -> tuple[int, int]:
    """Bytes kept for backward, and at the peak of the step."""
    parameters = list(step.model.parameters())
    weights = {p.untyped_storage()._cdata for p in parameters}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    live = LiveStorages()
    for p in parameters:
        p.grad = torch.zeros_like(p)
        live.add(p)
        live.add(p.grad)
    live.now += 8 * sum(p.numel() for p in parameters if p.requires_grad)  # AdamW's states
    with live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(step, setup)
        loss.backward()
    return sum(kept.values()), live.peak


def clock(step: Step, setup: Setup) -> float:
    """Processor seconds of forward and backward."""
    started = time.process_time()
    forward(step, setup).backward()
    return time.process_time() - started


def print_times(rows: dict[str, set[str]], run: Callable, steps: int) -> None:
    """Prints the table of --steps. Each round begins with another row; the first does not count."""
    order = list(rows)
    rounds = []
    for _ in range(steps + 1):
        order.append(order.pop(0))
        rounds.append({name: run(clock, rows[name]) for name in order})
    print("| saving | processor, s | of a step without, % |\n|---|---|---|")
    for name in rows:
        seconds = statistics.median(times[name] for times in rounds[1:])
        ratio = statistics.median(times[name] / times["none"] for times in rounds[1:])
        print(f"| {name} | {seconds:.2f} | {100 * ratio:.1f} |")


def print_memory(rows: dict[str, set[str]], run: Callable) -> None:
    print("| saving | kept for backward, MiB | saved, % | peak, MiB | saved, % |")
    print("|---|---|---|---|---|")
    first = None
    for name, used in rows.items():
        kept, peak = run(measure, used)
        if first is None:
            first = (kept, peak)
        less_kept = 100 * (1 - kept / first[0])
        less_peak = 100 * (1 - peak / first[1])
        print(
            f"| {name} | {kept / MIB:,.0f} | {less_kept:.1f} | {peak / MIB:,.0f} | {less_peak:.1f} |",
            flush=True,
        )


def main(args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = make_konkani(args) if args.model == "konkani" else make_whisper(args)
    if args.checkpointing:
        memory.checkpoint_layers(step.model, step.layers)
    setup = Setup(dtype=None if args.fp32 else torch.bfloat16)
    savings = SAVINGS[args.model]
    rows = {"none": set(), **{name: set(ends) for name, ends in savings.items()}}
    rows["all"] = set().union(*rows.values())

    def run(function: Callable, used: set[str]):
        with ExitStack() as stack:
            switch_off(stack, step, used)
            return function(step, setup)

    settings = [common.spinning(), "fp32" if args.fp32 else "bf16 autocast"]
    if args.checkpointing:
        settings.append("checkpointing")
    clips = f"{args.batch_size} x {args.seconds:g} s"
    print(f"torch {torch.__version__}, {args.model}, {clips}, {', '.join(settings)}\n")
    if args.steps:
        print_times(rows, run, args.steps)
    else:
        print_memory(rows, run)


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
