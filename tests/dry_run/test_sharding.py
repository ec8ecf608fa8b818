"""What is planned for --sharded, beside what torch's FSDP2 allocates with as many ranks, of which
one is here: the fake process group of torch's own tests sends nothing."""

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from common import memory
from dry_run.fake_tensors import ROUNDING, tensors_in
from dry_run.plan import Plan
from dry_run.sharding import Sharding, shard_bytes, shard_numel


class Layer(nn.Module):
    """Takes a second input, as a decoder's layer does."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x + other))))


class Network(nn.Module):
    """An embedding of 301 rows, four layers, of which the first has the frozen embedding's output
    for its input or a trained one's, and a head."""

    def __init__(self, width: int, is_frozen: bool, recomputes: bool):
        super().__init__()
        self.embedding = nn.Embedding(301, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(4)])
        self.head = nn.Linear(width, 77)
        self.embedding.requires_grad_(not is_frozen)
        if recomputes:
            memory.checkpoint_layers(self, (Layer,))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, other=first)
        return self.head(x).logsumexp(-1).sum()


class Count(TorchDispatchMode):
    """The most bytes of all storages that operators have returned, rounded as CUDA's allocator
    does."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.storages = {}
        self.peak = 0
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = weakref.ref(storage)

    def now(self) -> int:
        alive = [storage() for storage in self.storages.values()]
        return sum(-(-s.nbytes() // ROUNDING) * ROUNDING for s in alive if s is not None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, dist.tensor.DTensor) for kind in types):
            return NotImplemented
        results = function(*args, **kwargs or {})
        for tensor in tensors_in([results]):
            self.note(tensor)
        self.peak = max(self.peak, self.now())
        return results


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def step(model: nn.Module, batches: list[dict]) -> None:
    for batch in batches:
        model(batch["x"]).backward()


def planned(model: nn.Module, ranks: int, batches: list[dict]):
    plan = Plan(None, model)
    with Sharding(plan.fakes, model, (Layer,), ranks).applied():
        return plan.measure(lambda moved: step(model, moved), batches)


@pytest.mark.parametrize(
    ("ranks", "width", "is_frozen", "recomputes", "utterances"),
    [
        (2, 256, False, False, 8),
        (2, 256, True, True, 64),
        (3, 250, False, True, 8),  # 301 rows, 250 and 1000 divided by three
        (8, 512, False, True, 2),
    ],
)
def test_the_peak_is_that_of_fsdp(ranks, width, is_frozen, recomputes, utterances):
    batches = [{"x": torch.zeros(utterances, 50, dtype=torch.long)} for _ in range(2)]
    peak = planned(Network(width, is_frozen, recomputes), ranks, batches)
    real = Network(width, is_frozen, recomputes)
    with fake_ranks(ranks) as mesh:
        for layer in real.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(real, mesh=mesh)
        parameters = [p.to_local() for p in real.parameters()]
        with Count([*parameters, *(batch["x"] for batch in batches)]) as count:
            step(real, batches)
    assert peak.total == pytest.approx(count.peak, rel=0.002)


def test_shards_are_rows_rounded_up():
    for shape, ranks, expected in (((10, 3), 4, 9), ((3,), 8, 1), ((8, 2, 5), 2, 40), ((), 2, 1)):
        assert shard_numel(torch.empty(shape), ranks) == expected
    tensors = [torch.empty(10, 3), torch.empty(4, dtype=torch.bfloat16)]
    assert shard_bytes(tensors, 4) == 4 * 9 + 2
