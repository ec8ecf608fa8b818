"""Peak memory of a Konkani training step without a GPU: the storages alive in a real step on the CPU, under bf16
autocast, weights, gradients and optimizer states included. Steps of 1 and 2 utterances are run; larger micro-batches
are drawn on the same line. A prediction: CUDA's kernels, allocator and context are not in it (the context alone is
about 0.5 GiB on a T4).

    python benchmarks/konkani_memory.py [--seconds 30] [--characters 200]
"""

import argparse
import sys
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import memory, optim
from common.device import Setup
from common.loop import run_window
from recipes import konkani_conformer as recipe

SIZES = {"minimal": (128, 6, 3), "optimized": (192, 8, 4), "original": (256, 12, 6)}
ROUNDING = 512  # bytes: the CUDA allocator's


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, until they are freed."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = {}, 0, 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            size = -(-storage.nbytes() // ROUNDING) * ROUNDING
            self.known[key] = weakref.ref(storage, lambda _: self.drop(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def drop(self, key: int, size: int) -> None:
        del self.known[key]
        self.now -= size

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


def predict(size: str, batch_size: int, seconds: float, characters: int, checkpointing: bool) -> int:
    """Bytes at the peak of an update."""
    d, encoder, decoder = SIZES[size]
    config = {"d_model": d, "encoder_layers": encoder, "decoder_layers": decoder, "vocabulary": 60}
    model = recipe.Conformer({**recipe.SHAPE, **config})
    if checkpointing:
        memory.checkpoint_layers(model, recipe.CHECKPOINTED)
    optimizer = optim.make_optimizer(model, learning_rate=1e-3)
    tokens = torch.arange(characters) % 50
    item = {"audio": torch.randn(int(seconds * recipe.SAMPLE_RATE)) * 0.1, "tokens": tokens, "text": "", "name": "x", "index": 0,
            "labels": torch.cat([tokens, tokens[:1]])}  # fmt: skip
    batch = recipe.collate([item] * batch_size)
    live = LiveStorages()
    for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(list(optimizer.state.values()))):
        if isinstance(tensor, torch.Tensor):
            live.add(tensor)
    setup = Setup(dtype=torch.bfloat16)
    with live:
        run_window(model, [batch], batch["counts"], recipe.compute_loss, recipe.LOSS_WEIGHTS, setup)
        optimizer.step()
    return live.peak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--characters", type=int, default=200)
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, {args.seconds:g} s and {args.characters} characters an utterance, bf16 autocast on the CPU"
    )
    print("| size | micro-batch | GiB | with --gradient_checkpointing |\n|---|---|---|---|")
    for size in SIZES:
        pairs = [[predict(size, n, args.seconds, args.characters, on) / 2**30 for n in (1, 2)] for on in (False, True)]
        for batch_size in (1, 2, 4, 8, 32):
            found = [one + (batch_size - 1) * (two - one) for one, two in pairs]
            print(f"| {size} | {batch_size} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)
