"""Lean chains: the values and gradients of the plain layers, and less that is kept for backward."""

import pytest
import torch
import torch.nn.functional as F

from common import layers
from common.errors import UsageError
from common.parts import lora
from tests.peers import assert_rounded


@pytest.fixture
def everywhere(monkeypatch):
    """Recomputes in lean chains of any size."""
    monkeypatch.setattr(layers, "SMALL", 0)


class Fp32Norm(torch.nn.LayerNorm):
    """As CUDA's autocast computes it."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def plain_chain(x, *steps):
    for step in steps:
        x = step(x)
    return x


def chains(dtype: torch.dtype = torch.float64) -> dict[str, list]:
    torch.manual_seed(0)
    norm, square = Fp32Norm(16), torch.nn.Linear(16, 16)
    widen, narrow = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
    unbiased, narrowed = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 16, bias=False)
    for module in (norm, widen, narrow, square, unbiased, narrowed):
        torch.nn.init.normal_(module.weight.data, std=0.5)
        module.to(dtype)
    return {
        "feed-forward, GELU": [norm, widen, F.gelu, narrow],
        "feed-forward, SiLU": [norm, widen, F.silu, narrow],
        "norm": [norm, square],
        "activation": [F.gelu, square],
        "norm and activation": [norm, F.silu, square],
        "norm between": [widen, F.silu, narrow, norm, square],
        "without biases": [norm, unbiased, F.silu, narrowed],
        "one bias": [norm, unbiased, F.silu, narrow],
    }


EVERY_CHAIN = pytest.mark.parametrize("kind", chains())
EVERY_TYPE = pytest.mark.parametrize(
    "dtype, half",
    [
        (torch.float64, None),
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)


def parameters(steps: list) -> list[torch.nn.Parameter]:
    return [p for step in steps if isinstance(step, torch.nn.Module) for p in step.parameters()]


def chain_results(
    run, steps: list, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The output of a chain that is used twice, and all gradients."""
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
        once = x + run(x, *steps)
        transposed = once.transpose(0, 1).contiguous().transpose(0, 1)  # as after a convolution
        y = once + run(transposed, *steps)
    (y * y).sum().backward()
    results = [y.detach(), x.grad, *(p.grad for p in parameters(steps))]
    for p in parameters(steps):
        p.grad = None
    return results


def plain_and_lean(steps: list, dtype: torch.dtype, half: torch.dtype | None) -> list[list]:
    return [chain_results(run, steps, dtype, half) for run in (plain_chain, layers.lean_chain)]


@EVERY_CHAIN
@EVERY_TYPE
def test_a_lean_chain_is_the_plain_one(everywhere, kind, dtype, half):
    plain, lean = plain_and_lean(chains(dtype)[kind], dtype, half)
    assert len(lean) >= 4
    assert_rounded(lean, plain, half)


def adapted(kind: str, dtype: torch.dtype, low: torch.dtype | None) -> list:
    """A chain whose linear layers have adapters that are not zero, and frozen weights of `low`."""
    steps = chains(dtype)[kind]
    model = torch.nn.ModuleList([step for step in steps if isinstance(step, torch.nn.Module)])
    names = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    settings = lora.LoraSettings(4, 8.0, "linear")
    lora.attach(model, lora.Adapters(settings, lora.Layers(names), "", ""), seed=0)
    for name in names:
        layer = model.get_submodule(name)
        torch.nn.init.normal_(layer.lora_B, std=0.5)
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.to(dtype), layer.lora_B.to(dtype)
    if low:
        lora.lower(model, low)
    return steps


@EVERY_CHAIN
@EVERY_TYPE
def test_a_lean_chain_with_adapters_is_the_plain_one(everywhere, kind, dtype, half):
    steps = adapted(kind, dtype, half)
    plain, lean = plain_and_lean(steps, dtype, half)
    assert_rounded(lean, plain, half)
    trained = [p for p in parameters(steps) if p.requires_grad]
    grads = dict(zip(parameters(steps), lean[2:], strict=True))
    assert len(trained) == 2 * sum(isinstance(step, torch.nn.Linear) for step in steps)
    assert all(grads[p].abs().sum() > 0 and grads[p].dtype == dtype for p in trained)


def storages_kept(run, steps: list, autocast: torch.dtype | None) -> list[tuple]:
    """Shapes and types of what backward keeps, without parameters."""
    known, kept = {p.data_ptr() for p in parameters(steps)}, {}
    x = torch.randn(2, 9, 16, requires_grad=True)

    def pack(tensor):
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = (tensor.numel(), tensor.dtype)
        return tensor

    casting = torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casting:
        y = run(x, *steps)
    assert y.requires_grad
    return sorted(kept.values(), key=str)


def test_a_lean_chain_keeps_its_input_and_what_its_linear_layers_return(everywhere):
    half = torch.bfloat16
    wide = (2 * 9 * 64, torch.float32)
    weight = (16 * 64, half)
    x = (2 * 9 * 16, torch.float32)
    for kind, autocast, kept in (
        ("feed-forward, GELU", None, [wide, x]),
        ("feed-forward, GELU", half, [(2 * 9 * 64, half), weight, weight, x]),
        ("without biases", None, [wide, x]),
        ("norm and activation", None, [x]),
    ):
        steps = chains(torch.float32)[kind]
        assert storages_kept(layers.lean_chain, steps, autocast) == sorted(kept, key=str)
    steps = chains(torch.float32)["feed-forward, GELU"]
    assert storages_kept(plain_chain, steps, half).count((2 * 9 * 64, half)) == 2


@pytest.mark.parametrize("kind", ["feed-forward, SiLU", "without biases"])
@pytest.mark.parametrize("frozen", ["the input", "the norm", "linear layers", "everything"])
def test_what_is_frozen_in_a_lean_chain_has_no_gradient(everywhere, kind, frozen):
    steps = chains()[kind]
    norm, widen, _, narrow = steps
    norm.requires_grad_(frozen not in ("the norm", "everything"))
    for linear in (widen, narrow):
        linear.requires_grad_(frozen not in ("linear layers", "everything"))
    input_trained, results = frozen not in ("the input", "everything"), []
    for run in (plain_chain, layers.lean_chain):
        x = torch.ones(2, 3, 16, dtype=torch.float64).cumsum(-1).requires_grad_(input_trained)
        y = run(x, *steps)
        if y.requires_grad:
            y.sin().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in parameters(steps))])
        for p in parameters(steps):
            p.grad = None
    plain, lean = results
    assert_rounded(lean, plain)
    assert (lean[1] is not None) == input_trained


@pytest.mark.parametrize("case", ["evaluation", "a small input", "torch.compile"])
def test_a_lean_chain_is_plain_in(everywhere, monkeypatch, case):
    monkeypatch.setattr(layers._LeanChain, "apply", lambda *_: pytest.fail("recomputes"))
    steps, x = chains()["feed-forward, GELU"], torch.ones(3, 5, 16, dtype=torch.float64)
    if case == "a small input":
        monkeypatch.setattr(layers, "SMALL", x.numel() + 1)
    if case == "torch.compile":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.set_grad_enabled(case != "evaluation"):
        assert torch.equal(layers.lean_chain(x, *steps), plain_chain(x, *steps))


@pytest.mark.slow  # importing torch.compile's parts takes seconds
def test_a_compiled_lean_chain_is_one_graph_for_all_lengths(monkeypatch):
    steps, graphs = chains()["feed-forward, GELU"], []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: layers.lean_chain(x, *steps), backend=keep, fullgraph=True, dynamic=True
    )
    for length in (3, 5, 8):
        monkeypatch.setattr(layers, "SMALL", 5 * 2 * 16)  # between them
        x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
        assert_rounded([compiled(x)], [plain_chain(x, *steps)])
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_a_layer_whose_values_overflow_is_found_when_it_is_used_first():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    torch.nn.init.constant_(model[1].weight, 1e38)
    with pytest.raises(UsageError, match="values are not finite"), layers.finite_layers():
        model(torch.full((1, 2), 1e3))
    model(torch.full((1, 2), 1e3))  # outside nobody looks
    with layers.finite_layers():
        model[0](torch.zeros(1, 2))
