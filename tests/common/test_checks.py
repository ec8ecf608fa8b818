"""The checks of a recipe: its batches, what `evaluate` returns, and that its loss is a sum."""

import types

import numpy as np
import pytest
import torch

from common import checks
from common.errors import DataError, RunError, UsageError
from recipes import template
from tests import small

COLLATE = small.collate  # before a test replaces it


def dataset(collate, count: int = 5):
    return types.SimpleNamespace(data=small.Waveforms(count), collate=collate)


def changed(change):
    """A `collate` whose batches are changed by `change(batch, items)`."""

    def collate(items: list[dict]) -> dict:
        batch = COLLATE(items)
        change(batch, items)
        return batch

    return collate


def without(key: str):
    return changed(lambda batch, items: batch.pop(key))


def with_value(key: str, value):
    return changed(lambda batch, items: batch.update({key: value}))


@pytest.mark.parametrize(
    "collate, reason",
    [
        (with_value("counts", {"first": 2}), "batch['counts'] lacks 'ctc'"),
        (with_value("weights", torch.ones(3)), "batch['weights'] must be a tensor or a list"),
        (with_value("scale", torch.tensor(2.0)), "batch['scale'] must be a tensor or a list"),
        (with_value("table", np.ones(2)), "batch['table'] must be a tensor or a list"),
        (without("tokens_lengths"), "batch['tokens'] is padded, so the batch must have"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_one_line(tmp_path, monkeypatch, collate, reason):
    monkeypatch.setattr(small, "collate", collate)
    with pytest.raises(UsageError) as refused:
        small.run(small.make_args(tmp_path), compute_loss=lambda *_: pytest.fail("it trains"))
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("*.pt"))


def test_utterances_that_cannot_be_read_are_left_out():
    class Damaged(small.Waveforms):
        def item(self, index, epoch):
            if index % 2:
                raise DataError("damaged")
            return super().item(index, epoch)

    items = checks.sample_items(types.SimpleNamespace(data=Damaged(9)))
    assert len({len(item["audio"]) for item in items}) == 2
    assert all(item["index"] % 2 == 0 for item in items)
    Damaged.item = lambda *_: (_ for _ in ()).throw(DataError("damaged"))
    checks.check_collate(types.SimpleNamespace(data=Damaged(9)), {})
    checks.check_collate(types.SimpleNamespace(data=small.Waveforms(0)), {})


def test_results():
    task = small.task()
    checks.check_results(task, {"first": (1.0, 2), "ctc": (torch.tensor(1.0), 2)})
    checks.check_results(small.task(metric="loss"), {"first": (1.0, 2), "ctc": (1.0, 2)})
    for results, reason in (
        ({}, "evaluate returns no 'ctc', .* it returns nothing"),
        ({"cer": (0, 1)}, "evaluate returns no 'ctc', .* it returns cer"),
        ({"ctc": 0.5}, r"the result 'ctc' is 0.5; it must be \(numerator, denominator\)"),
        ({"ctc": (1, 2, 3)}, r"the result 'ctc' is \(1, 2, 3\)"),
    ):
        with pytest.raises(UsageError, match=reason):
            checks.check_results(task, results)


# --- the loss of a batch is the sum of the losses of its utterances -------------------------------


def unmasked(monkeypatch):
    forward = template.Layer.forward
    monkeypatch.setattr(
        template.Layer, "forward", lambda self, x, padding: forward(self, x, padding & False)
    )
    return small.compute_loss


def mean_of_utterances(monkeypatch):
    def compute_loss(model, batch):
        terms = small.compute_loss(model, batch)
        return {"first": terms["first"], "ctc": terms["ctc"] / len(batch["names"])}

    return compute_loss


def mean_of_frames(monkeypatch):
    def compute_loss(model, batch):
        log_probs, _ = model(batch)
        return {"frames": -log_probs[..., 0].mean()}

    return compute_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_of_the_template_is_a_sum(dtype):
    torch.manual_seed(0)
    model = small.Network(dropout=0.5).to(dtype)
    before = small.weights(model)
    checks.check_loss(model, template.collate(small.Waveforms(6)), template.compute_loss)
    checks.check_loss(model, small.collate(small.Waveforms(6)), small.compute_loss)
    assert model.training and torch.equal(small.weights(model), before)
    assert next(model.parameters()).dtype is dtype


@pytest.mark.parametrize("fault", [unmasked, mean_of_utterances, mean_of_frames])
def test_a_missing_mask_and_a_mean_are_found(monkeypatch, fault):
    torch.manual_seed(0)
    batch = small.collate(small.Waveforms(6))
    with pytest.raises(RunError) as found:
        checks.check_loss(small.Network(), batch, fault(monkeypatch))
    name = "frames" if fault is mean_of_frames else "ctc"
    assert name in str(found.value) or fault is unmasked
    assert "of a batch of 6 utterances is" in str(found.value)


# --- what is silent is one line before the first update -------------------------------------------


def tried(tmp_path, reason: str, **changes) -> None:
    """Asserts that a run ends with one line that has this `reason`, before its first update."""
    with pytest.raises((RunError, UsageError)) as refused:
        small.run(small.make_args(tmp_path), trial=True, **changes)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_loss_without_a_gradient(tmp_path):
    def compute_loss(model, batch):
        return {name: value.item() for name, value in small.compute_loss(model, batch).items()}

    tried(tmp_path, "compute_loss: 'first', a term of loss_weights, is", compute_loss=compute_loss)


@pytest.mark.parametrize(
    "counts, reason",
    [
        ({"first": 0, "ctc": 0}, "all of batch['counts'] are 0"),
        ({"first": 2, "ctc": 0}, "batch['counts']['ctc'] is 0, so 'ctc' would not be trained"),
        ({"first": 1, "ctc": 5}, "batch['counts']['first'] of 2 utterances is 1"),
    ],
)
def test_wrong_counts(tmp_path, monkeypatch, counts, reason):
    def collate(items):
        per_utterance = {"first": len(items)} if counts["first"] == 2 else {}
        return {**COLLATE(items), "counts": {**counts, **per_utterance}}

    monkeypatch.setattr(small, "collate", collate)
    tried(tmp_path, reason)


def test_random_items(tmp_path):
    class Noisy(small.Waveforms):
        def item(self, index, epoch):
            item = self[index]
            return {**item, "audio": item["audio"] + torch.randn(len(item["audio"]))}

    tried(tmp_path, "item: 'audio' is another one", data=Noisy())


def test_the_trial_leaves_everything_as_it_was_and_names_unused_parameters(capsys):
    torch.manual_seed(0)
    model = small.Network(dropout=0.5)
    model.unused = torch.nn.Linear(2, 2)
    model.layers[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    checks.try_loss(model, small.task(), list(small.Waveforms(2)), small.collate)
    assert "does not depend on 2 of" in capsys.readouterr().out
    assert model.training and not model.layers[0].training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_with_random_numbers_is_not_compared():
    def compute_loss(model, batch):
        terms = small.compute_loss(model, batch)
        return {name: value * torch.rand(()) for name, value in terms.items()}

    task = small.task(compute_loss=compute_loss)
    checks.try_loss(small.Network(), task, list(small.Waveforms(2)), small.collate)
