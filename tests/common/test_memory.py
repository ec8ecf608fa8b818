"""Activation checkpointing, errors that count as out of memory, splitting of batches that do not
fit, statistics."""

import re
import weakref
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import memory
from common.device import Setup
from common.errors import RunError, UsageError
from tests import small

CPU = torch.device("cpu")
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried"
        " to allocate"
    ),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
]
OTHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("out of memory"),
    OSError(12, "x"),
]


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *OTHER], ids=repr)
def test_what_counts_as_out_of_memory(error):
    assert memory.is_out_of_memory(error) == (error in OUT_OF_MEMORY)


def test_evaluation_splits_what_does_not_fit_and_names_what_never_does():
    batch, names = small.collate(small.Waveforms(6)), []

    def decode(piece):
        if len(piece["names"]) > 2:
            raise OUT_OF_MEMORY[4]
        names.extend(piece["names"])
        return len(piece["names"])

    assert sum(memory.split_on_oom(decode, batch, CPU)) == 6
    assert names == batch["names"]

    def never(piece):
        raise OUT_OF_MEMORY[0]

    model = small.Network(0.0)
    ((whole, results),) = memory.evaluated(decode, model, iter([batch]))
    assert whole is batch and results == [2, 1, 2, 1]

    with pytest.raises(RunError, match="item 0 does not fit"):
        memory.split_on_oom(never, batch, CPU)

    def broken(piece):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        memory.split_on_oom(broken, batch, CPU)


def test_layers_are_not_recomputed_in_evaluation():
    model, calls = small.Network(), []
    memory.checkpoint_layers(model, (small.Layer,))
    model.layers[0].convolution.register_forward_hook(lambda *_: calls.append(1))
    batch = small.collate(small.Waveforms(3))
    for training, expected in ((True, 2), (False, 1)):
        calls.clear()
        model.train(training)
        sum(small.compute_loss(model, batch).values()).backward()
        assert len(calls) == expected


def test_checkpointing_a_model_without_layers_is_an_error():
    with pytest.raises(UsageError, match="--gradient_checkpointing: Linear has no layer"):
        memory.checkpoint_layers(torch.nn.Linear(2, 2), (small.Layer,))


class Placed(torch.nn.Module):
    """A model that says where it is, and how many are on `card`."""

    card = torch.device("meta")
    there: ClassVar[list] = []

    def __init__(self, failure: Exception | None = None):
        super().__init__()
        self.failure = failure

    def parameters(self):
        yield torch.empty(0, device=self.card if self in self.there else CPU)

    def cpu(self) -> None:
        self.there.remove(self)

    def to(self, device: torch.device) -> None:
        assert device == self.card and not self.there
        if self.failure:
            raise self.failure
        self.there.append(self)


def test_one_model_is_replaced_by_another_one_on_its_device(monkeypatch):
    first = Placed()
    second = Placed()
    monkeypatch.setattr(Placed, "there", [first])
    memory.replace_on_device(first, second)
    assert Placed.there == [second]
    with pytest.raises(RunError, match=r"^the model to compare with .* \(CUDA out of memory\. T"):
        memory.replace_on_device(second, Placed(OUT_OF_MEMORY[0]))
    monkeypatch.setattr(Placed, "there", [first])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.replace_on_device(first, Placed(OTHER[0]))


class Casts(TorchDispatchMode):
    """Weak references to the results of casts."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.made.append(weakref.ref(result))
        return result

    def left(self) -> int:
        return sum(cast() is not None for cast in self.made)


def test_autocasts_copies_of_a_model_go_with_it():
    """They would be kept until the context ends, with those of the other model."""
    model = torch.nn.Linear(64, 64)
    setup = Setup(dtype=torch.bfloat16)
    with torch.no_grad(), setup.autocast(), Casts() as casts:
        model(torch.ones(1, 64))
        assert casts.left() == 2  # weight and bias
        memory.replace_on_device(model, torch.nn.Linear(64, 64))
        assert casts.left() == 0


def test_the_peak_on_a_cpu_is_resident_memory():
    match = re.fullmatch(
        r"memory: peak (\d+\.\d\d) GiB resident, total (\d+\.\d\d) GiB", memory.peak(CPU)
    )
    peak, total = map(float, match.groups())
    assert 0.1 < peak < total
    assert 2**26 < memory.memory_used(CPU) <= (peak + 0.1) * 2**30
