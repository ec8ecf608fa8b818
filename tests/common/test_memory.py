"""Activation checkpointing, lean chains, errors that count as out of memory, splitting of batches that do not fit, statistics."""

import re
import types

import pytest
import torch
import torch.nn.functional as F

from common import memory
from common.errors import RunError, UsageError
from tests import toy

CPU = torch.device("cpu")
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
]
OTHER = [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory"), OSError(12, "x")]  # fmt: skip


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *OTHER], ids=repr)
def test_what_counts_as_out_of_memory(error):
    assert memory.is_out_of_memory(error) == (error in OUT_OF_MEMORY)


def test_evaluation_splits_what_does_not_fit_and_names_what_never_does():
    batch, names = toy.collate(toy.Sequences(6)), []

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
    batch = toy.collate(toy.Sequences(3))
    kept, results = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = toy.Network(dropout, layers=6).double()
        if checkpointed:
            memory.checkpoint_layers(model, (toy.Layer,))
        numbers = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numbers: n.append(t.numel()) or t, lambda t: t):
            terms = toy.compute_loss(model, batch)
        kept.append(sum(numbers))
        loss = sum(terms.values())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert kept[1] < kept[0] / 2, "nothing was recomputed"


def test_layers_are_not_recomputed_in_evaluation():
    model, calls = toy.Network(), []
    memory.checkpoint_layers(model, (toy.Layer,))
    model.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    batch = toy.collate(toy.Sequences(3))
    for training, expected in ((True, 2), (False, 1)):
        calls.clear()
        model.train(training)
        sum(toy.compute_loss(model, batch).values()).backward()
        assert len(calls) == expected


def test_checkpointing_a_model_without_layers_is_an_error():
    with pytest.raises(UsageError, match="--gradient_checkpointing: Linear has no layer"):
        memory.checkpoint_layers(torch.nn.Linear(2, 2), (toy.Layer,))


@pytest.fixture
def everywhere(monkeypatch):
    """Recomputes in lean chains of any size."""
    monkeypatch.setattr(memory, "SMALL", 0)


class Fp32Norm(torch.nn.LayerNorm):
    """As CUDA's autocast computes it."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def plain_chain(x, *steps):
    for step in steps:
        x = step(x)
    return x


def chain(kind: str, dtype: torch.dtype = torch.float64) -> list:
    torch.manual_seed(0)
    norm, widen, narrow, square = Fp32Norm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16), torch.nn.Linear(16, 16)
    for module in (norm, widen, narrow, square):
        torch.nn.init.normal_(module.weight.data, std=0.5)
        module.to(dtype)
    return {
        "feed-forward, GELU": [norm, widen, F.gelu, narrow],
        "feed-forward, SiLU": [norm, widen, F.silu, narrow],
        "norm": [norm, square],
        "activation": [F.gelu, square],
        "norm and activation": [norm, F.silu, square],
    }[kind]


CHAINS = ["feed-forward, GELU", "feed-forward, SiLU", "norm", "activation", "norm and activation"]


def parameters(steps: list) -> list[torch.nn.Parameter]:
    return [p for step in steps if isinstance(step, torch.nn.Module) for p in step.parameters()]


def chain_results(run, steps: list, dtype: torch.dtype, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """The output of a chain that is used twice, and all gradients."""
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
        once = x + run(x, *steps)
        y = once + run(once.transpose(0, 1).contiguous().transpose(0, 1), *steps)  # not contiguous, as after a convolution
    (y * y).sum().backward()
    results = [y.detach(), x.grad, *(p.grad for p in parameters(steps))]
    for p in parameters(steps):
        p.grad = None
    return results


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize(
    "dtype, autocast",
    [(torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_a_lean_chain_is_the_plain_one_to_the_bit(everywhere, kind, dtype, autocast):
    steps = chain(kind, dtype)
    plain, lean = (chain_results(run, steps, dtype, autocast) for run in (plain_chain, memory.lean_chain))
    assert len(lean) >= 4 and all(torch.equal(a, b) for a, b in zip(plain, lean, strict=True))


def storages_kept(run, steps: list, autocast: torch.dtype | None) -> list[tuple]:
    """Shapes and types of what backward keeps, without parameters."""
    known, kept = {p.data_ptr() for p in parameters(steps)}, {}
    x = torch.randn(2, 9, 16, requires_grad=True)

    def pack(tensor):
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = (tensor.numel(), tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            y = run(x, *steps)
    assert y.requires_grad
    return sorted(kept.values(), key=str)


def test_a_lean_chain_keeps_its_input_and_what_its_linear_layers_return(everywhere):
    wide, weight, x = 2 * 9 * 64, 16 * 64, 2 * 9 * 16
    steps, half = chain("feed-forward, GELU", torch.float32), torch.bfloat16
    assert storages_kept(memory.lean_chain, steps, None) == [(wide, torch.float32), (x, torch.float32)]
    assert storages_kept(memory.lean_chain, steps, half) == sorted(
        [(x, torch.float32), (wide, half), (weight, half), (weight, half)], key=str
    )
    assert storages_kept(plain_chain, steps, half).count((wide, half)) == 2
    steps = chain("norm and activation", torch.float32)
    assert storages_kept(memory.lean_chain, steps, None) == [(x, torch.float32)]


@pytest.mark.parametrize("frozen", ["the input", "the norm", "linear layers", "everything"])
def test_what_is_frozen_in_a_lean_chain_has_no_gradient(everywhere, frozen):
    steps = chain("feed-forward, SiLU")
    norm, widen, _, narrow = steps
    for module in {"the norm": [norm], "linear layers": [widen, narrow], "everything": [norm, widen, narrow]}.get(frozen, ()):
        module.requires_grad_(False)
    results = []
    for run in (plain_chain, memory.lean_chain):
        x = torch.ones(2, 3, 16, dtype=torch.float64).cumsum(1).requires_grad_(frozen not in ("the input", "everything"))
        y = run(x, *steps)
        if y.requires_grad:
            y.sin().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in parameters(steps))])
        for p in parameters(steps):
            p.grad = None
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) if a is not None else b is None
    assert (results[0][1] is None) == (frozen in ("the input", "everything"))


@pytest.mark.parametrize("case", ["evaluation", "a small input", "torch.compile"])
def test_a_lean_chain_is_plain_in(everywhere, monkeypatch, case):
    monkeypatch.setattr(memory._LeanChain, "apply", lambda *_: pytest.fail("recomputes"))
    steps, x = chain("feed-forward, GELU"), torch.ones(3, 5, 16, dtype=torch.float64)
    if case == "a small input":
        monkeypatch.setattr(memory, "SMALL", x.numel() + 1)
    if case == "torch.compile":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.set_grad_enabled(case != "evaluation"):
        assert torch.equal(memory.lean_chain(x, *steps), plain_chain(x, *steps))


def test_backward_through_a_lean_chain_twice(everywhere):
    """A second time adds the same gradient; a gradient of the gradient is refused."""
    steps, x = chain("feed-forward, GELU"), torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    loss = memory.lean_chain(x, *steps).square().sum()
    loss.backward(retain_graph=True)
    first = [x.grad.clone(), *(p.grad.clone() for p in parameters(steps))]
    loss.backward(retain_graph=True)
    assert all(torch.equal(2 * a, b.grad) for a, b in zip(first, [x, *parameters(steps)], strict=True))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.slow  # importing torch.compile's parts takes seconds
def test_a_compiled_lean_chain_is_one_graph_for_all_lengths(monkeypatch):
    steps, graphs = chain("feed-forward, GELU"), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: memory.lean_chain(x, *steps), backend=keep, fullgraph=True, dynamic=True)
    for length in (3, 5, 8):
        monkeypatch.setattr(memory, "SMALL", 5 * 2 * 16)  # between them
        x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
        assert torch.equal(compiled(x), plain_chain(x, *steps))
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_the_peak_on_a_cpu_is_resident_memory():
    match = re.fullmatch(r"memory: peak (\d+\.\d\d) GiB resident, total (\d+\.\d\d) GiB", memory.peak(CPU))
    peak, total = map(float, match.groups())
    assert 0.1 < peak < total
    assert 2**26 < memory.memory_used(CPU) <= (peak + 0.1) * 2**30


def test_the_peak_on_a_gpu_is_the_allocators(monkeypatch):
    numbers = {
        "get_device_properties": types.SimpleNamespace(total_memory=8 * 2**30), "max_memory_allocated": 2**30,
        "max_memory_reserved": 3 * 2**29,
    }  # fmt: skip
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    device = torch.device("cuda", 0)
    assert memory.peak(device) == "memory: peak 1.00 GiB allocated, 1.50 GiB reserved, total 8.00 GiB"
    assert memory.memory_used(device) == 2**30
