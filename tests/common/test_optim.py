"""The optimizer kinds: their updates against torch's AdamW, and states that survive a checkpoint
and, among those of 32 bits, a change of kind."""

import copy
import io
import itertools
import sys

import pytest
import torch
from torch import nn

from common import optim
from common.errors import RunError
from common.parts import offload
from common.parts.new_rows import NewRows
from common.ranks import Ranks
from tests import small

KINDS = {
    "adamw": {},
    "8bit": {"kind": "adamw_8bit"},
    "offload": {"on_host": offload.Offload("states")},
    "gradients": {"on_host": offload.Offload("gradients")},
}
FLAGS = {
    "adamw": (),
    "8bit": ("--optimizer", "adamw_8bit"),
    "offload": ("--use_cpu_offload",),
    "gradients": ("--use_cpu_offload", "gradients"),
}
# Kinds whose states have the same form.
IN_32_BITS = ("adamw", "offload", "gradients")
CHANGES = [*itertools.product(IN_32_BITS, IN_32_BITS), ("8bit", "8bit")]


def make(
    model: nn.Module, kind: str = "adamw", learning_rate: float = 1e-3, weight_decay: float = 0.01
):
    return small.optimizer_of(model, learning_rate, weight_decay, **KINDS[kind])


class Model(nn.Module):
    """Parameters of each kind: large and small, with one dimension and without, frozen, and never
    used."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(150, 32)  # 4800 values
        self.large = nn.Linear(70, 90)  # 6300 values: 24 blocks of 256 and a part
        self.filters = nn.Conv1d(6, 10, 3)
        self.norm = nn.LayerNorm(18)  # a float64 bias after it starts at no multiple of 8
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)


def awkward(model: Model) -> Model:
    """With two types, and a weight whose rows are not contiguous."""
    model.norm.bias.data = model.norm.bias.data.double()
    model.filters.weight.data = (
        model.filters.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    )
    return model


def set_gradients(model: nn.Module, step: int, size: float = 1.0) -> None:
    """Random gradients, the same for every model; none for `unused`, and for `norm` at every third
    step."""
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64) * size
        absent = (
            name == "unused" or not p.requires_grad or (name.startswith("norm") and step % 3 == 0)
        )
        p.grad = None
        if not absent:  # with the weight's strides, like autograd's
            p.grad = torch.empty_like(p).copy_(gradient)


def clip(model: nn.Module, limit: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, limit / torch.nn.utils.get_total_norm(gradients))


def leave(model: nn.Module, optimizer) -> None:
    """Hands the gradients that a test has set to an optimizer that takes them in backward."""
    for p in model.parameters():
        if p.grad is not None and p in getattr(optimizer, "sums", ()):
            optimizer.take_gradient(p)


def train(model, optimizer, steps: range, size: float = 1.0, decay: float = 0.9):
    for step in steps:
        set_gradients(model, step, size)
        clip(model, 3.0 * size)
        leave(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * decay**step
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def reference_for(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """torch's plainest AdamW: neither fused nor foreach."""
    groups = optim.parameter_groups(model, weight_decay)
    optimizer = torch.optim.AdamW(
        groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-9, foreach=False, fused=False
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


@pytest.mark.parametrize("kind", ["adamw", "offload"])
@pytest.mark.parametrize("decays", [True, False])
def test_embeddings_may_have_no_weight_decay(kind, decays):
    model = Model()
    model.tied = nn.Linear(32, 150, bias=False)
    model.tied.weight = model.embedding.weight
    names = {p: name for name, p in model.named_parameters()}
    settings = optim.AdamWSettings(decay_embeddings=decays)
    optimizer = small.optimizer_of(model, 1e-3, 0.5, **KINDS[kind], settings=settings)
    decay = {names[p]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    expected = dict.fromkeys(names.values(), 0.0)
    expected |= dict.fromkeys(("large.weight", "filters.weight", "unused"), 0.5)
    expected["embedding.weight"] = 0.5 if decays else 0.0
    del expected["frozen"]
    assert decay == expected
    only = optim.parameter_groups(nn.Embedding(2, 3), 0.5, settings)
    assert [group["weight_decay"] for group in only] == [0.5 if decays else 0.0]


# --- offloaded states -----------------------------------------------------------------------------


class LazyStream:
    """A stream that copies as late as possible: when the host waits for an event, in order, up to
    that event."""

    def __init__(self, monkeypatch):
        self.waiting = []
        self.copy = torch.Tensor.copy_
        copy_of_slot = offload.Slot.copy

        def copy(slot: offload.Slot, target: torch.Tensor, source: torch.Tensor) -> None:
            copy_of_slot(slot, target, source)
            slot.copied = Event(self)

        late = lambda *inputs, **options: self.copy_(*inputs, **options)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "copy_", late)
        monkeypatch.setattr(offload.Slot, "copy", copy)

    def copy_(self, target, source, non_blocking=False):
        if non_blocking:
            self.waiting.append((target, source))
            return target
        return self.copy(target, source)

    def run(self, count: int):
        for target, source in self.waiting[:count]:
            self.copy(target, source)
        del self.waiting[:count]


class Event:
    def __init__(self, stream: LazyStream):
        self.stream = stream
        self.left = [*stream.waiting]

    def synchronize(self):
        while self.stream.waiting and any(self.stream.waiting[0] is item for item in self.left):
            self.stream.run(1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
# Split tensors and rows that fill a slot; whole tensors.
@pytest.mark.parametrize("slot", [1024, offload.SLOT])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["offload", "gradients"])
def test_offload_equals_adamw(monkeypatch, dtype, tolerance, slot, late, kind):
    monkeypatch.setattr(offload, "SLOT", slot)
    models = [awkward(Model().to(dtype)), awkward(Model().to(dtype))]
    optimizer = make(models[0], kind, 1e-2, 0.1)
    stream = LazyStream(monkeypatch) if late else None
    train(models[0], optimizer, range(20))
    if stream:
        assert stream.waiting  # for the last weights nothing has waited
        stream.run(len(stream.waiting))
        monkeypatch.undo()
    train(models[1], reference_for(models[1], 0.1), range(20))
    assert largest_difference(models[0], Model().to(dtype)) > 0.05
    assert largest_difference(*models) < tolerance


def test_offload_keeps_no_copy_of_the_weights_and_little_scratch(monkeypatch):
    def scratch() -> list[int]:
        return [memory.nbytes for slot in optimizer.slots for memory in slot.memory]

    optimizer = make(Model(), "offload")
    assert sum(scratch()) == 4 * offload.SLOT
    for p, state in optimizer.state.items():
        assert all(values.numel() <= p.numel() for values in state.values())
    monkeypatch.setattr(offload, "SLOT", 64)
    wide = awkward(Model())
    wide.unused = nn.Parameter(torch.randn(1, 1001))  # a row larger than a slot
    optimizer = make(wide, "offload")
    assert {*scratch()} == {4004}
    before = wide.unused.detach().clone()
    wide.unused.grad = torch.ones(1, 1001)
    optimizer.step()
    assert bool((wide.unused != before).all())


class Second(Ranks):
    """The second of two ranks. The first one adds 1 to what it owns."""

    def __init__(self):
        super().__init__(1, 2)

    def share_tensors(self, tensors, owners):
        for tensor, owner in zip(tensors, owners, strict=True):
            if owner == 0:
                tensor += 1


@pytest.mark.parametrize("slot", [1024, offload.SLOT])
def test_values_of_another_rank_arrive_in_16_bits(monkeypatch, slot):
    """Also if the copies of its own values are still on their way."""
    monkeypatch.setattr(offload, "SLOT", slot)
    model = Model()
    masters = {p: p.detach().clone() for p in model.parameters() if p.dim() > 1}
    for p in masters:
        p.data = p.data.bfloat16()
    placed = offload.Offload("weights", masters, Second())
    optimizer = small.optimizer_of(model, 1e-2, on_host=placed)
    before = {name: value.clone() for name, value in model.named_parameters()}
    stream = LazyStream(monkeypatch)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.share()
    stream.run(len(stream.waiting))
    monkeypatch.undo()
    owned = 0
    for name, p in model.named_parameters():
        assert torch.equal(p, masters.get(p, p).to(p.dtype)), name
        moved = float((p - before[name]).detach().abs().max())
        if p.requires_grad:
            owned += p in optimizer.state
            assert 0.99 < moved < 1.1 if optimizer.owners[p] == 0 else 0 < moved < 0.1, name
    assert 0 < owned < len(optimizer.owners)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_offload_on_a_gpu(monkeypatch):
    """The model is large enough for copies and updates to overlap. Its weights are read right after
    the last step."""
    monkeypatch.setattr(offload, "SLOT", 2**20)
    models = [nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(12))).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(models[0], "offload", 1e-2), reference_for(models[1], 0.01)]
    assert all(memory.is_pinned() for slot in optimizers[0].slots for memory in slot.memory)
    used = torch.cuda.memory_allocated()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(10))
        assert optimizer is optimizers[1] or torch.cuda.memory_allocated() <= used
    assert largest_difference(*models) < 2e-6


# --- 8-bit states ---------------------------------------------------------------------------------


def test_8bit_keeps_32_bits_if_8_are_harmful():
    model = Model()
    optimizer = make(model, "8bit")
    for _ in range(2):
        for name, p in model.named_parameters():
            if p.requires_grad:
                is_8bit = optimizer.state[p]["state1"].dtype == torch.uint8
                assert is_8bit == (name == "large.weight"), name
        train(model, optimizer, range(2))


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_made_at_once_and_change_nothing(kind):
    model, untouched = awkward(Model()), awkward(Model())
    optimizer = make(model, kind, weight_decay=0.5)
    assert largest_difference(model, untouched) == 0
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is None for p in model.parameters())
    assert set(optimizer.state) == set(trained)
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    assert all(group["lr"] == group["initial_lr"] == 1e-3 for group in optimizer.param_groups)

    def places() -> list[int]:
        states = [t for p in trained for t in optimizer.state[p].values()]
        return [t.data_ptr() for t in states if torch.is_tensor(t)]

    before = places()
    train(model, optimizer, range(3))
    assert places() == before  # nothing was allocated later
    assert float(optimizer.state[model.large.weight]["step"]) == 3
    assert float(optimizer.state[model.unused]["step"]) == 0


@pytest.mark.parametrize("kind", ["adamw", "8bit"])
def test_states_equal_those_that_the_library_makes(kind):
    model, lazy = Model(), Model()
    model.embedding = lazy.embedding = None
    optimizer = make(model, kind, 1e-2, 0.1)
    other = type(optimizer)(
        optim.parameter_groups(lazy, 0.1),
        lr=1e-2,
        betas=(0.9, 0.98),
        eps=optimizer.defaults["eps"],
        **({"fused": True} if kind == "adamw" else {}),
    )
    for group in other.param_groups:
        group["initial_lr"] = group["lr"]
    train(model, optimizer, range(4))
    train(lazy, other, range(4))
    assert largest_difference(model, lazy) == 0
    for p, same in zip(model.parameters(), lazy.parameters(), strict=True):
        mine = optimizer.state.get(p, {})
        theirs = other.state.get(same, {})
        assert not theirs or list(mine) == list(theirs)
        for key, value in theirs.items():
            assert type(mine[key]) is type(value)
            if torch.is_tensor(value):
                torch.testing.assert_close(mine[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("before, after", CHANGES)
def test_states_survive_a_file_and_a_change_of_the_kind(before, after, dtype):
    model = awkward(Model()).to(dtype)
    optimizer = make(model, before, 1e-2, 0.1)
    train(model, optimizer, range(5), decay=1.0)
    saved = through_a_file(optim.optimizer_state(optimizer, model))
    continued = awkward(Model(seed=9)).to(dtype)
    continued.load_state_dict(model.state_dict())
    other = make(continued, after, 1e-2, 0.1)
    other.param_groups.reverse()
    optim.load_optimizer_state(other, continued, saved)
    again = through_a_file(optim.optimizer_state(other, continued))
    assert list(again) == list(saved)
    start = small.weights(model)
    for name, entry in saved.items():
        assert entry.keys() == again[name].keys()
        assert all(torch.equal(value, again[name][key]) for key, value in entry.items()), name
    train(model, optimizer, range(5, 6), decay=1.0)
    train(continued, other, range(5, 6), decay=1.0)
    if before == after:
        assert torch.equal(small.weights(continued), small.weights(model))
    else:
        difference = small.relative(small.weights(continued) - start, small.weights(model) - start)
        assert difference < 1e-5


@pytest.mark.parametrize("before, after", [("adamw", "8bit"), ("8bit", "offload")])
def test_states_of_other_bits_start_fresh(before, after, capsys):
    model = Model()
    optimizer = make(model, before)
    train(model, optimizer, range(2))
    saved = through_a_file(optim.optimizer_state(optimizer, model))
    other = make(model, after)
    optim.load_optimizer_state(other, model, saved)
    said = capsys.readouterr().out
    assert said.startswith(
        "optimizer: 1 of 9 parameters start with fresh states"
    ) and said.endswith("\n")
    steps = {p: float(state["step"]) for p, state in other.state.items()}
    assert steps.pop(model.large.weight) == 0  # the one that has 8 bits in one of them
    assert steps[model.large.bias] == 2


def test_a_bitsandbytes_that_is_missing_or_does_not_work_is_one_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("\n  CUDA Setup failed: no kernel image\nand much advice")

    library = pytest.importorskip("bitsandbytes")
    with monkeypatch.context() as patch:
        patch.setattr(library.optim.AdamW8bit, "update_step", fail)
        message = r"work on cpu \(CUDA Setup failed: no kernel image\): .*--use_cpu_offload"
        with pytest.raises(RunError, match=message):
            make(Model(), "8bit")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RunError, match=r"adamw_8bit needs the package bitsandbytes.*pip install"):
        make(Model(), "8bit")


def test_a_rank_loads_its_own_states_and_counts_all_that_a_checkpoint_lacks(capsys):
    model = Model()
    saved = optim.optimizer_state(make(model), model)
    for state in saved.values():
        state["step"] = torch.tensor(7.0)
    placed = offload.Offload("states", ranks=Second())
    for lacking in (0, 2):
        optimizer = small.optimizer_of(model, 1e-3, on_host=placed)
        own = optim.optimizer_state(optimizer, model)
        assert 0 < len(own) < 9
        for names in (own.keys(), saved.keys() - own.keys()):
            for name in sorted(names)[: lacking // 2]:
                del saved[name]
        optim.load_optimizer_state(optimizer, model, saved)
        said = capsys.readouterr().out
        if lacking:
            assert said.startswith("optimizer: 2 of 9 parameters start with fresh states")
        else:
            assert said == ""
        loaded = {name: float(state["step"]) for name, state in own.items()}
        assert loaded == {name: 7.0 if name in saved else 0.0 for name in own}


# --- frozen and tied parameters -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_freezing_and_thawing_between_runs(kind, capsys):
    """The state of a frozen parameter is dropped, a thawed one gets a fresh state; both are
    printed. Others keep theirs."""
    model = Model()
    first = make(model, kind)
    train(model, first, range(2))
    saved = optim.optimizer_state(first, model)
    model.large.requires_grad_(False)
    frozen = make(model, kind)
    optim.load_optimizer_state(frozen, model, saved)
    said = "optimizer: 2 parameters with saved states are frozen now: their states are dropped\n"
    assert capsys.readouterr().out == said
    train(model, frozen, range(2, 4))
    saved = optim.optimizer_state(frozen, model)
    model.large.requires_grad_(True)
    thawed = make(model, kind)
    optim.load_optimizer_state(thawed, model, saved)
    assert "optimizer: 2 of 9 parameters start with fresh states" in capsys.readouterr().out
    assert float(thawed.state[model.large.weight]["step"]) == 0
    assert float(thawed.state[model.embedding.weight]["step"]) == 4
    train(model, thawed, range(4, 5))


class Tied(nn.Module):
    """One weight with two names, as in many language models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.embedding.weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_weight_is_one_parameter(kind):
    model = Tied()
    optimizer = make(model, kind)
    assert optim.count_parameters(model) == (72, 72) and len(optimizer.state) == 1
    model.out(model.embedding(torch.arange(4))).sum().backward()
    optimizer.step()
    saved = optim.optimizer_state(optimizer, model)
    assert list(saved) == ["embedding.weight"]
    again = Tied()
    second = make(again, kind)
    optim.load_optimizer_state(second, again, saved)
    assert float(second.state[again.out.weight]["step"]) == 1


# --- rows that were drawn new ---------------------------------------------------------------------

OLD, NEW = 7, 4  # rows
NEW_NUMBERS = (3, 7, 8, 10)  # also among the old ones


class Rows(nn.Module):
    """An embedding, a head and its bias, whose new rows are rows of three weights."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(OLD + NEW, 5)
        self.head = nn.Linear(5, OLD + NEW)
        self.to(dtype)


class Apart(nn.Module):
    """The same weights with the new rows as parameters of their own."""

    def __init__(self, model: Rows):
        super().__init__()
        new = torch.zeros(OLD + NEW, dtype=torch.bool)
        new[list(NEW_NUMBERS)] = True
        for name, p in model.named_parameters():
            for part, rows in (("old", ~new), ("new", new)):
                self.register_parameter(
                    f"{part}_{name.replace('.', '_')}", nn.Parameter(p.detach()[rows].clone())
                )
        self.places = new

    def whole(self, name: str) -> torch.Tensor:
        old, new = (getattr(self, f"{part}_{name.replace('.', '_')}") for part in ("old", "new"))
        joined = old.detach().new_empty(OLD + NEW, *old.shape[1:])
        joined[~self.places], joined[self.places] = old.detach(), new.detach()
        return joined


@pytest.mark.parametrize("kind", ["adamw", "offload"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.float64, 1e-15)], ids=str
)
def test_new_rows_learn_as_parameters_of_their_own(kind, dtype, tolerance):
    model = Rows(dtype)
    apart = Apart(model)
    names = [name for name, _ in model.named_parameters()]
    new_rows = NewRows(dict.fromkeys(names, NEW_NUMBERS), 1e-2)
    optimizer = small.optimizer_of(model, 1e-4, 0.1, **KINDS[kind], rows=new_rows)
    groups = []
    for name, p in apart.named_parameters():
        decay = 0.1 if p.dim() > 1 else 0.0
        rate = 1e-2 if name.startswith("new") else 1e-4
        groups.append({"params": [p], "lr": rate, "weight_decay": decay, "initial_lr": rate})
    peer = torch.optim.AdamW(groups, betas=optim.BETAS, eps=optim.EPSILON, foreach=False)
    for step in range(20):
        for p in model.parameters():  # some rows have no gradient, as most embeddings
            p.grad = torch.randn_like(p) * (torch.rand(p.shape[:1]) < 0.7).view(
                -1, *[1] * (p.dim() - 1)
            )
        if step % 5 == 4:  # without a gradient nothing changes
            model.head.weight.grad = None
        for name, p in model.named_parameters():
            for part, rows in (("old", ~apart.places), ("new", apart.places)):
                other = getattr(apart, f"{part}_{name.replace('.', '_')}")
                other.grad = None if p.grad is None else p.grad[rows]
        for each in (optimizer, peer):
            for group in each.param_groups:
                group["lr"] = group["initial_lr"] * 0.9**step
            each.step()
    for name, p in model.named_parameters():
        assert (p - apart.whole(name)).abs().max() < tolerance, name
    # The rows would have moved by a hundredth of that with the others.
    assert (model.head.bias - Rows(dtype).head.bias)[list(NEW_NUMBERS)].abs().max() > 1e-2


def test_new_rows_in_8_bits_move_by_their_own_rate():
    pytest.importorskip("bitsandbytes")
    moved = {}
    for rate in (None, 1e-3):
        torch.manual_seed(0)
        model = nn.ModuleDict({"embedding": nn.Embedding(90, 64), "head": nn.Linear(64, 90)})
        start = copy.deepcopy(model)
        new_rows = NewRows({"embedding.weight": [89], "head.weight": [0, 5]}, rate or 0.0)
        optimizer = small.optimizer_of(
            model, 1e-5, 0.0, "adamw_8bit", rows=new_rows if rate else None
        )
        assert optimizer.state[model["head"].weight]["state1"].dtype == torch.uint8
        for step in range(5):
            set_gradients(model, step)
            optimizer.step()
        moved[rate] = [
            (new - old).detach()
            for new, old in zip(model.parameters(), start.parameters(), strict=True)
        ]
    for name, rows, number in (("embedding", [89], 0), ("head", [0, 5], 1)):
        plain, fast = moved[None][number], moved[1e-3][number]
        others = [row for row in range(90) if row not in rows]
        assert torch.equal(plain[others], fast[others]), name
        ratio = fast[rows].norm() / plain[rows].norm()
        assert abs(ratio - 100) < 0.1, name


# --- schedules ------------------------------------------------------------------------------------


def schedule_of(kind: str, total: int, warmup: int | None, peak: float = 0.1) -> optim.Schedule:
    return optim.Schedule(small.optimizer_of(nn.Linear(3, 2), peak), kind, total, warmup)


def rates_of(schedule: optim.Schedule, steps: range) -> list[float]:
    """The learning rate of each of these updates."""
    rates = []
    for step in steps:
        schedule.set(step)
        rates.append(schedule.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", ["cosine", "inverse_sqrt", "constant"])
def test_every_schedule_warms_up_to_the_peak(kind):
    values = rates_of(schedule_of(kind, 100, 10, 3e-4), range(100))
    assert values[:10] == pytest.approx([3e-4 * step / 10 for step in range(1, 11)])
    assert max(values) == pytest.approx(3e-4) and min(values) > 0
    assert values[9:] == sorted(values[9:], reverse=True)
    assert rates_of(schedule_of(kind, 5, 0, 1.0), range(1)) == pytest.approx([1.0])


@pytest.mark.parametrize(
    "kind, total, warmup, step, rate",
    [
        ("cosine", 1001, 1, 501, 0.505),
        ("cosine", 1001, 1, 1000, 0.01),
        ("inverse_sqrt", 400, 100, 399, 0.5),
        ("constant", 50, 1, 49, 1.0),
    ],
)
def test_what_follows_the_warm_up(kind, total, warmup, step, rate):
    (found,) = rates_of(schedule_of(kind, total, warmup, 1.0), range(step, step + 1))
    assert found == pytest.approx(rate, rel=1e-2)


@pytest.mark.parametrize("total, warmup", [(5, 1), (300, 30), (10**6, 2000)])
def test_the_usual_warm_up_is_a_tenth_of_all_updates_and_at_most_2000(total, warmup):
    assert schedule_of("cosine", total, None).warmup == warmup


@pytest.mark.parametrize("kind", ["inverse_sqrt", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [None, 40])
@pytest.mark.parametrize(
    "parts",  # (the update at which the run is resumed, its updates from then on)
    [
        [(0, 700), (700, 2100)],
        [(0, 700), (30, 7000)],  # in the first warm-up
        [(0, 700), (700, 2100), (750, 2800)],  # in a later warm-up
        [(0, 2100), (300, 700)],  # shorter
    ],
)
def test_a_resumed_run_of_another_length_warms_up_again_without_a_jump(kind, warmup, parts):
    rates, state, warmups = [], None, []
    ends = [begin for begin, _ in parts[1:]] + [parts[-1][1]]
    for (begin, total), end in zip(parts, ends, strict=True):
        optimizer = small.optimizer_of(nn.Linear(3, 2), 0.1)
        schedule = optim.Schedule(optimizer, kind, total, warmup)
        is_longer = schedule.resume(state, begin)
        assert is_longer == (state is not None and total > state["total"])
        rates += rates_of(schedule, range(begin, end))
        schedule.set(end)
        state = through_a_file(schedule.state())
        warmups.append(schedule.warmup_of(total - begin))
    steps = [abs(after - before) for before, after in itertools.pairwise([0.0, *rates])]
    # A step of a warm-up from zero to the peak is the largest. (The cosine's fall takes longer.)
    assert max(steps) < 1.01 * 0.1 / min(warmups)
    assert min(rates) > 0 and max(rates) <= 0.1 + 1e-12
    begin, total = parts[-1]
    end = begin + warmups[-1]  # from here on the rates are those of the new length
    assert rates[end:] == rates_of(schedule_of(kind, total, warmup), range(end, total))


# --- whole runs -----------------------------------------------------------------------------------

RUN = (
    "--batch_size 2 --gradient_accumulation_steps 2 --lr_schedule constant --eval_every 100".split()
)


def network(dropout: float = 0.0, width: int = 48, seed: int = 0) -> small.Network:
    """With weights that are large enough for 8 bits: in each of six layers, and one in front."""
    torch.manual_seed(seed)
    return small.Network(dropout, width, layers=6)


def run(folder, kind, *flags, **task):
    args = small.make_args(folder, *RUN, *FLAGS[kind], *flags)
    small.run(args, model=network(0.1, seed=5 if args.resume else 0), **task)
    return small.newest(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [None, NewRows({"output.weight": [0, 3]}, 1e-2)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, kind, rows):
    whole = run(tmp_path / "a", kind, "--max_steps", "4", new_rows=rows)
    run(tmp_path / "b", kind, "--max_steps", "2", new_rows=rows)
    # (The checkpoint knows the rows.)
    parts = run(tmp_path / "b", kind, "--max_steps", "4", "--resume", "auto")
    assert whole.progress.step == 4
    small.assert_close(whole, parts, tolerance=0)
    states = whole.state["optimizer"].values()
    in_8_bits = [value.dtype == torch.uint8 for state in states for value in state.values()]
    assert sum(in_8_bits) == (14 if kind == "8bit" else 0)
