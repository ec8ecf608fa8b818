"""Activation checkpointing, errors that count as out of memory, splitting of batches that do not
fit, statistics."""

import re
import types

import pytest
import torch

from common import memory
from common.errors import RunError, UsageError
from tests import small

CPU = torch.device("cpu")
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
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

    with pytest.raises(RunError, match="item 0 does not fit"):
        memory.split_on_oom(never, batch, CPU)

    def broken(piece):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        memory.split_on_oom(broken, batch, CPU)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_neither_loss_nor_gradient(dropout):
    batch = small.collate(small.Waveforms(3))
    kept, results = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = small.Network(dropout, width=32, layers=6).double()
        if checkpointed:
            memory.checkpoint_layers(model, (small.Layer,))
        numbers = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, n=numbers: n.append(t.numel()) or t, lambda t: t
        ):
            terms = small.compute_loss(model, batch)
        kept.append(sum(numbers))
        loss = sum(terms.values())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert kept[1] < kept[0] / 2, "nothing was recomputed"


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


def test_the_peak_on_a_cpu_is_resident_memory():
    match = re.fullmatch(
        r"memory: peak (\d+\.\d\d) GiB resident, total (\d+\.\d\d) GiB", memory.peak(CPU)
    )
    peak, total = map(float, match.groups())
    assert 0.1 < peak < total
    assert 2**26 < memory.memory_used(CPU) <= (peak + 0.1) * 2**30


def test_the_peak_on_a_gpu_is_the_allocators(monkeypatch):
    numbers = {
        "get_device_properties": types.SimpleNamespace(total_memory=8 * 2**30),
        "max_memory_allocated": 2**30,
        "max_memory_reserved": 3 * 2**29,
    }
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    device = torch.device("cuda", 0)
    assert (
        memory.peak(device) == "memory: peak 1.00 GiB allocated, 1.50 GiB reserved, total 8.00 GiB"
    )
    assert memory.memory_used(device) == 2**30
