"""torch.compile of layers: equal results, few compilations, and one line if there is no
compiler."""

import functools
import shutil

import pytest
import torch

from common import memory
from common.errors import UsageError
from common.parts import compiling
from tests import small

CPU = torch.device("cpu")
COMPILE = torch.compile


@pytest.fixture(autouse=True)
def fresh():
    """Resets torch.compile's limits and caches, as in a new process."""
    from torch._dynamo import config

    before = config.recompile_limit, config.accumulated_recompile_limit
    torch._dynamo.reset()
    yield
    config.recompile_limit, config.accumulated_recompile_limit = before
    torch._dynamo.reset()


@pytest.fixture
def exact(monkeypatch):
    """torch.compile traces and differentiates as its default backend does, and runs torch's own
    kernels. No trial."""
    monkeypatch.setattr(compiling, "compile_problem", lambda device: None)
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend="aot_eager"))


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile traces only. Returns the list of the graphs that are compiled; the trial's are
    not in it."""
    compiled = []

    def keep(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(compiling, "compile_problem", lambda device: None)
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=keep))
    return compiled


def network(dropout: float = 0.0, layers: int = 2, dtype=torch.float64) -> small.Network:
    torch.manual_seed(0)
    return small.Network(dropout, layers=layers).to(dtype)


def loss_and_gradients(
    model, items: list[dict], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = sum(small.compute_loss(model, small.collate(items)).values())
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def assert_alike(models: tuple, items: list[dict], dtype=None, **tolerance) -> None:
    for a, b in zip(*(loss_and_gradients(model, items, dtype) for model in models), strict=True):
        torch.testing.assert_close(b, a, **tolerance)


def test_the_trial_compiles_something(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend="aot_eager"))
    assert compiling.compile_problem(CPU) is None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("counts", [(3, 4), (1,)])  # torch compiles again for a dimension of 1
def test_compiled_layers_give_the_same_loss_and_gradients(exact, checkpointed, counts):
    plain, compiled = network(0.2), network(0.2)
    names = list(compiled.state_dict())
    compiling.compile_layers(compiled, (small.Layer,))
    if checkpointed:
        memory.checkpoint_layers(compiled, (small.Layer,))
    assert list(compiled.state_dict()) == names
    for count in counts:
        items = small.Waveforms(count, seed=count)
        assert_alike((plain, compiled), items, rtol=1e-10, atol=1e-12)


def test_compiled_layers_compute_in_16_bits_under_autocast(exact):
    plain, compiled = network(dtype=torch.float32), network(dtype=torch.float32)
    compiling.compile_layers(compiled, (small.Layer,))
    models = plain, compiled
    assert_alike(models, small.Waveforms(3), torch.bfloat16, rtol=2e-2, atol=1e-1)


def test_all_layers_share_a_few_graphs_with_symbolic_lengths(graphs):
    model = network(layers=3)
    compiling.compile_layers(model, (small.Layer,))
    for number in range(29):
        items = small.Waveforms(2 + number % 3, seed=number)
        sum(small.compute_loss(model, small.collate(items)).values()).backward()
    assert 0 < len(graphs) <= 2
    loss_and_gradients(model, small.Waveforms(1))  # torch compiles again for a dimension of 1
    assert len(graphs) <= 4


def test_evaluation_runs_the_layers_uncompiled(graphs):
    plain, compiled = network(), network()
    compiling.compile_layers(compiled, (small.Layer,))
    plain.eval(), compiled.eval()
    batch = small.collate(small.Waveforms(3))
    with torch.no_grad():
        losses = [small.compute_loss(model, batch) for model in (plain, compiled)]
    assert losses[0] == losses[1] and not graphs


def test_frozen_layers_in_evaluation_mode_are_compiled_too(graphs):
    model, plain = network(layers=3), network(layers=3)
    for frozen in (model, plain):
        frozen.input.requires_grad_(False)
        frozen.layers[0].requires_grad_(False).eval()
    compiling.compile_layers(model, (small.Layer,))
    for either in (model, plain):
        sum(small.compute_loss(either, small.collate(small.Waveforms(2))).values()).backward()
    # For gradients of nothing, of the weights, of the weights and the input.
    assert len(graphs) == 3
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad)


def test_a_run_is_compiled_resumed_and_retried_after_out_of_memory(tmp_path, graphs):
    flags = ("--batch_size", "4", "--gradient_accumulation_steps", "1", "--num_epochs", "2")
    flags = (*flags, "--lr_schedule", "constant")  # for the same rates in a run of three updates
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    flags = (*flags, "--torch_compile", "--gradient_checkpointing")
    failed = []

    def compute_loss(model, batch):
        terms = small.compute_loss(model, batch)
        if len(failed) < 2 and len(batch["names"]) > 2:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return terms

    first = ("--max_steps", "3", "--dataloader_num_workers", "1")
    small.run(small.make_args(tmp_path / "b", *flags, *first), compute_loss=compute_loss)
    assert len(failed) == 2 and graphs
    args = small.make_args(tmp_path / "b", *flags, "--resume", "auto")
    model, progress = small.run(args, model=small.Network().double())
    assert progress.step == 8
    assert small.relative(small.weights(model), small.weights(reference)) < 1e-10


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    def failing(function, **options):
        def call(*inputs):
            raise RuntimeError("\nNo working C++ compiler found: (None, 'g++')\nSet TORCHDYNAMO")

        return call

    message = "--torch_compile: Linear has no layer of the kinds it applies to"
    with pytest.raises(UsageError, match=message):
        compiling.compile_layers(torch.nn.Linear(2, 2), (small.Layer,))
    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(UsageError) as error:
        compiling.compile_layers(small.Network(), (small.Layer,))
    assert str(error.value) == (
        "--torch_compile: torch.compile does not work on cpu (No working C++ compiler found:"
        " (None, 'g++')); it needs a C++ compiler: sudo apt install g++; or leave the flag out"
    )


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_without_a_compiler_torch_itself_says_so():
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        problem = compiling.compile_problem(CPU)
    cpp_builder.cpp_compiler_search.cache_clear()
    assert problem.startswith("torch.compile does not work on cpu (")
    assert "g++" in problem and "\n" not in problem


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_default_backend_gives_the_same_loss_and_gradients(checkpointed):
    plain, compiled = network(dtype=torch.float32), network(dtype=torch.float32)
    compiling.compile_layers(compiled, (small.Layer,))
    if checkpointed:
        memory.checkpoint_layers(compiled, (small.Layer,))
    for count, seed in ((3, 0), (2, 1), (1, 2), (4, 3)):
        items = small.Waveforms(count, seed)
        for a, b in zip(
            *(loss_and_gradients(model, items) for model in (plain, compiled)), strict=True
        ):
            assert (a - b).norm() <= 1e-4 * a.norm() + 1e-5
