"""Steps on fake tensors: nothing is computed, values that code may read stay, and memory is
counted from birth to death."""

import pytest
import torch
from torch import nn

from common import memory
from dry_run.fake_tensors import ROUNDING, SMALL, CannotPlan, FakeTensors
from dry_run.plan import Plan

MIB = 1 << 20


def make(mode: FakeTensors, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return mode.make(shape, torch.empty(shape, device="meta").stride(), dtype)


def total(model: nn.Module, batch: dict) -> torch.Tensor:
    return model(batch["x"]).sum()


def measure(model: nn.Module, batch: dict, loss=total, batches: int = 1):
    """The plan of a model, and the peak of its forward and backward on some micro-batches of the
    same size."""

    def step(moved: list[dict]) -> None:
        for each in moved:
            loss(model, each).backward()

    plan = Plan(None, model)
    return plan, plan.measure(step, [batch] * batches)


def test_nothing_is_computed():
    """100 GB of activations, and weights of 40 GB."""
    with torch.device("meta"):
        linear = nn.Linear(100_000, 100_000, bias=False)
        model = nn.Sequential(linear, nn.GELU(), nn.Linear(100_000, 1))
    _, peak = measure(model, {"x": torch.empty(250_000, 100_000, device="meta")})
    gb = 10**9
    assert peak.parts["weights"] == pytest.approx(40 * gb, rel=1e-4)
    assert peak.parts["batch"] == pytest.approx(100 * gb, rel=1e-4)
    # Input and output of GELU.
    assert peak.parts["activations"] == pytest.approx(200 * gb, rel=1e-4)
    assert peak.guesses == 0


def test_small_integers_keep_their_values():
    mode = FakeTensors()
    x = make(mode, 2, 50, 8)
    with mode:
        lengths = torch.tensor([50, 20])
        frames = (lengths + 1) // 2
        assert frames.tolist() == [25, 10] and int(lengths.max()) == 50
        assert bool((lengths > 10).all())
        valid = torch.arange(50) < lengths[:, None]
        assert valid.sum().item() == 70
        assert x[valid].shape == (70, 8) and x[:, 1][valid[:, 1]].shape == (2, 8)
        assert not mode.guesses
        rows = valid.flatten().nonzero()[:, 0]
        assert x.flatten(0, 1)[rows].shape == (70, 8)
        assert torch.equal(lengths, torch.tensor([50, 20]))


def test_a_value_that_is_not_known_is_a_guess():
    mode = FakeTensors()
    x = make(mode, 100)
    with mode:
        assert x.sum().item() == 1.0 and x.argmax().item() == 1 and bool(x[0] > 0)
        assert mode.guesses == 3
        assert (x > 0).nonzero().shape == (100, 1)  # the most that there can be
        assert torch.equal(x, x) and mode.guesses == 5
        assert x[x > 0].shape == (100,) and mode.guesses == 6
        assert torch.tensor(3).item() == 3 and mode.guesses == 6


def test_what_fake_values_are_written_to_becomes_fake():
    mode = FakeTensors()
    x = make(mode, 10)
    with mode:
        before = mode.now
        total = torch.zeros(10)
        assert total.sum().item() == 0 and not mode.guesses
        total += x
        assert mode.now - before == ROUNDING
        assert total.sum().item() == 1.0 and mode.guesses == 1  # not 0, which it was before
        del total
    assert mode.now == before


def test_gradients_add_up_in_place():
    """A second micro-batch needs no memory for gradients, apart from one weight's at a time."""

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])

    batch, one = {"x": torch.zeros(128, 512)}, 512 * 512 * 4
    peaks = [measure(model(), batch, batches=count)[1] for count in (1, 2, 3)]
    assert peaks[0].parts["gradients"] <= 6 * one and peaks[1].parts["gradients"] == 6 * one
    more = batch["x"].nbytes
    assert peaks[2].total == peaks[1].total + more  # the third batch itself
    assert peaks[1].total <= peaks[0].total + more + 6 * one
    assert peaks[1].parts["temporary"] < 2 * one


def test_weights_without_memory():
    """A model made on the device "meta", and a part of it that the plan was not told of."""
    with torch.device("meta"):
        model, other = nn.Linear(256, 512), nn.Linear(512, 128, bias=False).requires_grad_(False)
    loss = lambda model, batch: other(model(batch["x"])).sum()  # noqa: E731
    _, peak = measure(model, {"x": torch.zeros(1024, 256)}, loss)
    assert peak.parts["weights"] == 4 * (256 * 512 + 512 + 512 * 128)
    assert model.weight.device.type == "cpu"


class Block(nn.Module):
    """Keeps `kept` times its input for backward, and needs `passing` times its input for a
    moment."""

    def __init__(self, kept: int, passing: int):
        super().__init__()
        self.kept = kept
        self.passing = passing

    def forward(self, x):
        x.detach().expand(-1, self.passing).exp()
        return x.expand(-1, self.kept).exp().sum(1, keepdim=True) + x


class Stack(nn.Module):
    def __init__(self, *blocks: tuple[int, int]):
        super().__init__()
        self.blocks = nn.ModuleList([Block(*block) for block in blocks])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


ROWS = {"x": torch.zeros(MIB // 4, 1)}  # 1 MiB


def stack_loss(model: Stack, batch: dict) -> torch.Tensor:
    return model(batch["x"].detach().requires_grad_())


def test_the_place_of_a_peak_in_forward():
    _, peak = measure(Stack((2, 1), (3, 40), (1, 1)), ROWS, stack_loss)
    assert (peak.module, peak.phase) == ("blocks.1", "forward")
    # What passes, what the first block keeps, and its output.
    assert peak.parts["activations"] == (40 + 2 + 1) * MIB and peak.parts["batch"] == MIB
    assert peak.total == 44 * MIB


def test_the_place_of_a_peak_in_backward():
    _, peak = measure(Stack((20, 1), (10, 1), (20, 1)), ROWS, stack_loss)
    assert (peak.module, peak.phase) == ("blocks.2", "backward")
    # The last block's exponential and its gradient, while all others are there.
    assert peak.parts["activations"] == 50 * MIB + 2 * ROUNDING  # and the loss
    assert 20 * MIB <= peak.parts["temporary"] <= 22 * MIB


def test_the_place_of_a_peak_in_recomputation():
    model = Stack((2, 1), (3, 40), (4, 1))
    memory.checkpoint_layers(model, (Block,))
    _, peak = measure(model, ROWS, stack_loss)
    assert (peak.module, peak.phase) == ("blocks.1", "recomputation")
    assert 42 * MIB <= peak.total <= 44 * MIB


def test_what_no_step_uses_is_not_counted():
    model, used, unused = (nn.Linear(512, 512, bias=False) for _ in range(3))
    plan = Plan(None, model, [used, nn.Sequential(unused)])
    assert plan.fakes.now == MIB
    batch = {"x": torch.zeros(2, 512)}
    for _ in range(2):
        peak = plan.measure(lambda batches: used(model(batches[0]["x"])).sum().backward(), [batch])
        assert peak.parts["weights"] == 2 * MIB == plan.fakes.now
        assert 3 * MIB <= peak.total < 4.1 * MIB


def test_an_operator_without_shapes():
    mode = FakeTensors()
    x = make(mode, 100, 100)
    with mode, pytest.raises(CannotPlan, match=r"aten::_unique2"):
        x.unique()


def test_what_is_small_is_computed():
    mode = FakeTensors()
    with mode:
        assert torch.arange(SMALL)[-1].item() == SMALL - 1 and not mode.guesses
        large = torch.arange(SMALL + 1)
        assert large[-1].item() == 1 and mode.guesses == 1 and mode.now >= large.nbytes
