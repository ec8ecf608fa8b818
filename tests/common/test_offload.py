"""The levels of --use_cpu_offload: the bits of a run without it, through an error in backward, an
overflow and clipping; what is cast; what is saved and loaded; the update of two ranks."""

import copy
import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from common import checkpoint, report
from common.device import Setup
from common.options import LEVELS
from common.parts import offload
from common.parts.new_rows import NewRows
from tests import small

CUT = "--batch_size 2 --gradient_accumulation_steps 2 --num_epochs 2 --learning_rate 0.01".split()


def network() -> small.Network:
    torch.manual_seed(0)
    return small.Network(dropout=0.2)


def trained(folder, level: str | None, dtype: torch.dtype | None, *flags, **task) -> dict:
    """The last checkpoint of a short run."""
    level = ["--use_cpu_offload", level] if level else []
    args = small.make_args(folder, *CUT, *level, *flags)
    small.run(args, model=network(), setup=Setup(dtype=dtype), **task)
    return small.newest(folder)


def assert_same_run(a: checkpoint.Saved, b: checkpoint.Saved) -> None:
    assert a.progress.step > 4
    assert all(weight.dtype != torch.bfloat16 for weight in a.model.values())
    small.assert_close(a, b, tolerance=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_level_changes_no_bit(tmp_path, level, dtype):
    """Gradients are clipped at every update, and convolutions have new rows with their own rate."""
    rows = {"layers.0.convolution.weight": [0, 3], "output.weight": [1]}
    changes = {"new_rows": NewRows(rows, 0.1)}
    flags = ["--max_grad_norm", "0.5"]
    plain = trained(tmp_path / "plain", None, dtype, *flags, **changes)
    assert_same_run(plain, trained(tmp_path / level, level, dtype, *flags, **changes))


class FailsOnce(torch.autograd.Function):
    """Runs out of memory in backward, after later layers have their gradients."""

    left = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if FailsOnce.left:
            FailsOnce.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient


@pytest.mark.parametrize("level", ["gradients", "weights"])
def test_out_of_memory_in_backward_loses_and_doubles_nothing(tmp_path, level):
    def failing(model, batch):
        handle = model.layers[0].register_forward_hook(lambda *given: FailsOnce.apply(given[2]))
        with handle:
            return small.compute_loss(model, batch)

    runs = []
    for chosen in (None, level):
        FailsOnce.left = 2
        folder = tmp_path / str(chosen)
        runs.append(trained(folder, chosen, torch.bfloat16, compute_loss=failing))
        assert FailsOnce.left == 0
    assert_same_run(*runs)


def test_gradients_leave_as_soon_as_backward_has_them():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    parameters = list(model.parameters())
    alive = []

    def count(_) -> None:
        alive.append(sum(p.grad is not None for p in parameters))

    for p in parameters:
        p.register_post_accumulate_grad_hook(count)  # before the optimizer's
    optimizer = small.optimizer_of(model, 1e-3, on_host=offload.Offload("gradients"))
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    assert alive == [1] * 24 and all(p.grad is None for p in parameters)
    assert list(optimizer.gradients()) == [
        p for group in optimizer.param_groups for p in group["params"]
    ]
    optimizer.zero_grad()
    assert not optimizer.gradients()


def test_the_host_memory_is_free_after_training(tmp_path):
    """The best weights are read then, which takes as much as the weights."""
    args = small.make_args(tmp_path, *CUT, "--use_cpu_offload", "weights")
    model, _ = small.run(args, network(), setup=Setup(dtype=torch.bfloat16))
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, offload.OffloadedAdamW)]
    assert model.layers[0].convolution.weight.dtype == torch.bfloat16


class Front(small.Layer):
    """One layer of its type."""


class Shared(nn.Module):
    """Layers, and what must not be cast: a tied embedding, a norm, a free parameter, a front end, a
    layer outside."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(small.Layer(6, 0.0) for _ in range(2))
        self.layers[0].free = nn.Parameter(torch.randn(6, 6))
        self.layers[0].tied = nn.Linear(6, 9)
        self.layers[0].tied.weight = self.embedding.weight
        self.layers[1].normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, bias=False))
        self.layers[1].frozen = nn.Linear(6, 6).requires_grad_(False)
        self.front = Front(6, 0.0)
        self.head = nn.Linear(6, 9)


def test_what_is_cast():
    model = Shared()
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p] for p in offload.castable(model, (small.Layer,))}
    layers = {f"layers.{i}.convolution.{name}" for i in (0, 1) for name in ("weight", "bias")}
    frozen = {"layers.1.frozen.weight", "layers.1.frozen.bias"}
    assert found == layers | frozen | {"layers.0.tied.bias"}


def test_a_state_dict_has_the_fp32_values_and_loading_sets_them():
    model = Shared()
    before = copy.deepcopy(model.state_dict())
    kept = offload.begin("weights", model, (small.Layer,), torch.bfloat16)
    assert model.layers[0].convolution.weight.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and value.dtype == torch.float32, name
    other = {name: value + 0.123 for name, value in before.items()}
    model.load_state_dict(other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name]), name
    convolution = model.layers[0].convolution.weight
    assert torch.equal(convolution, kept.masters[convolution].bfloat16())
    assert offload.begin("weights", Shared(), (small.Layer,), None).masters == {}


def test_16_bit_copies_keep_the_order_in_memory_that_a_convolution_chose():
    """Another order is another kernel, half as fast on a GPU. The host's values are contiguous, as
    the update needs them."""
    models = []
    for level in (None, "weights"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
        model.to(memory_format=torch.channels_last)
        kept = offload.begin(level, model, (nn.Conv2d,), torch.bfloat16)
        optimizer = small.optimizer_of(model, 0.1, on_host=kept)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(2, 3, 8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        models.append(model)
    assert models[1][0].weight.dtype == torch.bfloat16
    weights = [model.state_dict()["0.weight"] for model in models]
    assert torch.equal(*weights) and weights[1].is_contiguous()


# --- two ranks ------------------------------------------------------------------------------------

ONE = "--batch_size 4 --gradient_accumulation_steps 2 --num_epochs 2 --max_grad_norm 0.5".split()
ONE += ["--lr_schedule", "constant"]  # so that a run may be resumed with another length
TWO = ["--batch_size", "2", *ONE[2:]]  # the same global batch
BF16 = ["--use_cpu_offload", "weights", "--bf16"]
RUNS = {level: [*TWO, "--use_cpu_offload", level] for level in LEVELS}
# Two utterances an update, each alone: sums of two, which have no order.
RUNS["16 bits"] = [*BF16, "--batch_size", "1", "--gradient_accumulation_steps", "1"]
BEGUN = [*TWO, "--use_cpu_offload", "--max_steps", "1"]
RESUMED = [*TWO, "--use_cpu_offload", "--resume", "auto"]


def unusual() -> small.Network:
    """With a frozen parameter and one that has no gradient."""
    torch.manual_seed(0)
    model = small.Network()
    model.layers[0].convolution.bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(5, 3))
    return model


def run_unusual(folder: Path, flags: list[str], **task) -> nn.Module:
    """Nine utterances: at the end of an epoch there is nothing for the second rank. Without 16-bit
    types the model has float64."""
    model = unusual() if "--bf16" in flags else unusual().double()
    rows = NewRows({"layers.1.convolution.weight": [0, 3], "output.weight": [1]}, 0.1)
    args = small.make_args(folder, *flags, "--learning_rate", "0.01")
    small.run(args, model, small.Waveforms(9), new_rows=rows, **task)
    return model


def work(rank: int, folder: Path, runs: dict[str, list[str]]) -> None:
    """One of two ranks. It leaves its weights and the sizes of its states after each run. In some
    runs the second rank runs out of memory in the first backward pass."""
    report.Report.draw = lambda self, metric: None
    optimizers = []
    make = offload.Offloaded.make_optimizer

    def compute_loss(model, batch):
        handle = model.layers[0].register_forward_hook(lambda *given: FailsOnce.apply(given[2]))
        with handle:
            return small.compute_loss(model, batch)

    def keep(engine):
        make(engine)
        optimizers.append(engine.optimizer)

    left = {}
    for name, flags in runs.items():
        FailsOnce.left = rank if flags in (RUNS["states"], RUNS["gradients"]) else 0
        with mock.patch.object(offload.Offloaded, "make_optimizer", keep):
            model = run_unusual(folder / name, flags, compute_loss=compute_loss)
        names = {p: name for name, p in model.named_parameters()}
        sizes = {names[p]: p.numel() for p in optimizers.pop().state}
        left[name] = model.state_dict(), dict(model.named_parameters()), sizes
    torch.save(left, folder / f"rank{rank}.pt")


def on_two_ranks(run_ranks, folder: Path, runs: dict) -> list[dict]:
    run_ranks(work, (folder, runs))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_the_largest_parameter_goes_to_the_rank_that_has_least():
    parameters = [nn.Parameter(torch.empty(size)) for size in (3, 10, 4, 4, 1)]
    owners = offload.divide(parameters, 2)
    assert list(owners) == parameters and list(owners.values()) == [1, 0, 1, 1, 0]
    assert list(offload.divide(parameters, 9).values()) == [3, 0, 1, 2, 4]
    assert set(offload.divide(parameters, 1).values()) == {0}


def test_two_ranks_divide_the_update_and_give_what_one_process_gives(tmp_path, run_ranks):
    both = on_two_ranks(run_ranks, tmp_path, {**RUNS, "begun": BEGUN})
    run_unusual(tmp_path / "one", ONE)
    flags = [*RUNS["16 bits"], "--gradient_accumulation_steps", "2"]
    run_unusual(tmp_path / "one in 16 bits", flags)
    for name in RUNS:
        (first, own, sizes), (second, others, other_sizes) = [rank[name] for rank in both]
        for key, value in first.items():
            assert torch.equal(value, second[key]), (name, key)
        for key, value in own.items():
            assert torch.equal(value, others[key]), (name, key)
            assert torch.equal(value, first[key].to(value.dtype)), (name, key)
        assert not sizes.keys() & other_sizes.keys()
        shares = sum(sizes.values()), sum(other_sizes.values())
        assert max(shares) < 1.1 * min(shares)
        saved = small.newest(tmp_path / name)
        assert saved.state["optimizer"].keys() == {**sizes, **other_sizes}.keys()
        is_cast = own["layers.0.convolution.weight"].dtype == torch.bfloat16
        assert is_cast == (name == "16 bits")
        reference = small.newest(tmp_path / ("one in 16 bits" if is_cast else "one"))
        small.assert_close(saved, reference, 1e-7 if is_cast else 1e-12)
        assert saved.progress.step > 3
        assert bool(saved.progress.limits) == (name in ("states", "gradients"))
    # The run that has begun is resumed on one rank, and then on two again.
    run_unusual(tmp_path / "begun", [*ONE, "--resume", "auto", "--max_steps", "3"])
    on_two_ranks(run_ranks, tmp_path, {"begun": RESUMED})
    small.assert_close(small.newest(tmp_path / "begun"), small.newest(tmp_path / "one"))
