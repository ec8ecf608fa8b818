"""torch.compile of layers: what it must not change, how many graphs there are, and what is said without a compiler."""

import shutil

import pytest
import torch
from torch import nn

from common import checkpoint, compiling, memory
from common.device import Setup
from common.errors import UsageError
from recipes import konkani_conformer as recipe
from tests import tiny
from tests.recipes.test_konkani import awake, moved

CPU = torch.device("cpu")
EXACT = "aot_eager"  # traces and differentiates as the default backend does, and runs torch's own kernels


@pytest.fixture(autouse=True)
def fresh():
    """Counts, limits and what torch remembers, as in a new process."""
    from torch._dynamo import config

    before = config.recompile_limit, config.accumulated_recompile_limit
    torch._dynamo.reset()
    compiling.graphs.clear()
    compiling.limits.clear()
    yield
    config.recompile_limit, config.accumulated_recompile_limit = before
    compiling.graphs.clear()
    compiling.limits.clear()
    torch._dynamo.reset()


def loss_and_gradients(model, items, setup=None):
    torch.manual_seed(1)
    with (setup or Setup()).autocast():
        loss = sum(recipe.compute_loss(model, moved(items)).values())
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("precision, checkpointed", [("float64", False), ("float64", True), ("bf16", True)])
def test_compiled_layers_give_the_same_loss_and_gradients(precision, checkpointed):
    dtype, setup = (torch.float64, Setup()) if precision == "float64" else (torch.float32, Setup(dtype=torch.bfloat16))
    plain, compiled = awake(tiny.make_model(0.2, dtype)), awake(tiny.make_model(0.2, dtype))
    names = list(compiled.state_dict())
    compiling.compile_layers(compiled, recipe.COMPILED, backend=EXACT)
    if checkpointed:
        memory.checkpoint_layers(compiled, recipe.CHECKPOINTED)
    assert list(compiled.state_dict()) == names == [*plain.state_dict()]
    for count, seed in ((3, 0), (1, 2), (4, 3)):
        items = tiny.make_items(count, seed, dtype)
        for a, b in zip(*(loss_and_gradients(model, items, setup) for model in (plain, compiled)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10 if precision == "float64" else 2e-2, atol=1e-12 if precision == "float64" else 1e-1)  # fmt: skip
    assert set(compiling.graphs) == {kind.__name__ for kind in recipe.COMPILED}
    assert max(compiling.graphs.values()) <= compiling.FEW
    before = compiling.graphs.total()
    with torch.no_grad():  # evaluation runs the layers as they were, whatever the lengths
        plain.eval(), compiled.eval()
        batch = moved(tiny.make_items(2, 7, dtype))
        assert torch.equal(plain.encode(batch)[0], compiled.encode(batch)[0])
    assert compiling.graphs.total() == before


class Layer(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return x + scale * self.linear(x).relu()


class Stack(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        if frozen:
            self.layers[0].requires_grad_(False).eval()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def test_each_length_has_one_graph_for_all_layers_and_more_than_were_announced_run_uncompiled():
    model, plain = Stack(), Stack()
    compiling.compile_layers(model, (Layer,), shapes=2, backend=EXACT)
    assert compiling.summary() == ""
    for length in [*range(1, 7), 1, 2]:
        x = torch.randn(2, length, 4, requires_grad=True)
        assert torch.allclose(model(x), plain(x))
        assert compiling.graphs == {"Layer": length} or (length <= 2 and compiling.graphs == {"Layer": 6})
    assert compiling.summary() == "torch.compile: 6 graphs (6 of Layer)" and compiling.full_kinds() == []
    for length in range(7, 15):  # two lengths of four batch sizes were announced
        x = torch.randn(2, length, 4, requires_grad=True)
        assert torch.allclose(model(x), plain(x))
    assert compiling.graphs == {"Layer": 8} and compiling.full_kinds() == ["Layer"]
    assert compiling.summary().endswith("; no more are kept of Layer: other shapes run uncompiled")


def test_symbolic_lengths_need_few_graphs():
    model = Stack()
    compiling.compile_layers(model, (Layer,), backend=EXACT)
    for length in range(1, 30):
        model(torch.randn(1 + length % 3, length, 4, requires_grad=True)).sum().backward()
    assert compiling.graphs["Layer"] <= 4


def test_frozen_layers_in_evaluation_mode_are_compiled_too():
    model, plain = Stack(frozen=True), Stack(frozen=True)
    compiling.compile_layers(model, (Layer,), shapes=1, backend=EXACT)
    x = torch.randn(2, 5, 4)
    for one in (model, plain):
        one(x).sum().backward()
    assert compiling.graphs["Layer"] == 3  # gradients of nothing, of the weights, of the input too
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.allclose(a.grad, b.grad))


def test_a_run_is_compiled_resumed_and_retried_after_out_of_memory(tmp_path, monkeypatch, capsys):
    flags = ("--batch_size", "4", "--gradient_accumulation_steps", "1", "--num_epochs", "2", "--torch_compile")
    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", *flags))
    failed = []

    def compute_loss(model, batch):
        terms = recipe.compute_loss(model, batch)
        if len(failed) < 2 and len(batch["names"]) > 2:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return terms

    def compiled_model(seed=0):
        model = tiny.make_model(seed=seed)
        compiling.compile_layers(model, recipe.COMPILED, backend=EXACT)
        return model

    args = tiny.make_args(tmp_path / "b", *flags, "--max_steps", "3", "--dataloader_num_workers", "1")
    capsys.readouterr()
    tiny.run(args, model=compiled_model(), compute_loss=compute_loss)
    assert f"torch.compile: {compiling.graphs.total()} graphs" in capsys.readouterr().out
    lines = (args.log_dir / "metrics.jsonl").read_text()
    assert f'"train/compiled_graphs": {compiling.graphs.total()}' in lines and len(failed) == 2
    args = tiny.make_args(tmp_path / "b", *flags)
    resumed = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)
    model, progress = tiny.run(args, model=compiled_model(3), resumed=resumed)
    assert progress["step"] == 8
    assert tiny.relative(tiny.weights(model), tiny.weights(reference)) < 1e-10


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    with pytest.raises(UsageError, match="--torch_compile: Linear has no layer of the kinds it applies to"):
        compiling.compile_layers(nn.Linear(2, 2), (Layer,))
    model = Stack()
    memory.checkpoint_layers(model, (Layer,))
    with pytest.raises(ValueError, match="before checkpoint_layers"):
        compiling.compile_layers(model, (Layer,), backend=EXACT)

    def failing(function, **options):
        def call(*inputs):
            raise RuntimeError("\nNo working C++ compiler found: (None, 'g++')\nSet TORCHDYNAMO_VERBOSE=1")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(UsageError) as error:
        compiling.compile_layers(Stack(), (Layer,))
    assert str(error.value) == (
        "--torch_compile: torch.compile does not work on cpu (No working C++ compiler found: (None, 'g++')); it needs a C++ "
        "compiler: sudo apt install g++; or leave the flag out"
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
    assert problem.startswith("torch.compile does not work on cpu (") and "g++" in problem and "\n" not in problem
    print(problem)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_default_backend_gives_the_same_loss_and_gradients(checkpointed):
    dtype = torch.float32
    plain, compiled = awake(tiny.make_model(0.0, dtype)), awake(tiny.make_model(0.0, dtype))
    compiling.compile_layers(compiled, recipe.COMPILED)
    if checkpointed:
        memory.checkpoint_layers(compiled, recipe.CHECKPOINTED)
    for count, seed in ((3, 0), (2, 1), (1, 2), (4, 3)):
        items = tiny.make_items(count, seed, dtype)
        for a, b in zip(*(loss_and_gradients(model, items) for model in (plain, compiled)), strict=True):
            assert (a - b).norm() <= 1e-4 * a.norm() + 1e-5
