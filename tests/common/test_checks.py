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


def test_the_batches_of_the_template_are_sound():
    checks.check_collate(dataset(template.collate), template.LOSS_WEIGHTS)
    checks.check_collate(dataset(small.collate), small.LOSS_WEIGHTS)


@pytest.mark.parametrize(
    "collate, reason",
    [
        (without("names"), "the batch has no key 'names'"),
        (without("seconds"), "the batch has no key 'seconds'"),
        (without("counts"), "the batch has no key 'counts'"),
        (with_value("counts", {"first": 2}), "batch['counts'] lacks 'ctc'"),
        (with_value("weights", torch.ones(3)), "batch['weights'] has 3 rows"),
        (with_value("weights", [1.0]), "batch['weights'] has 1 rows"),
        (with_value("scale", torch.tensor(2.0)), "batch['scale'] has Tensor"),
        (with_value("language", "kok"), "batch['language'] has str"),
        (with_value("table", np.ones(2)), "batch['table'] has ndarray"),
        (without("tokens_lengths"), "batch['tokens'] is padded, so the batch must have"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_one_line(tmp_path, monkeypatch, collate, reason):
    monkeypatch.setattr(small, "collate", collate)
    with pytest.raises(UsageError) as refused:
        small.run(small.make_args(tmp_path), compute_loss=lambda *_: pytest.fail("it trains"))
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_tensor_of_the_same_length_for_all_needs_no_lengths():
    masks = changed(lambda batch, items: batch.update(masks=torch.zeros(len(items), 5, 2)))
    checks.check_collate(dataset(masks), small.LOSS_WEIGHTS)


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


def test_one_utterance_is_not_enough():
    with pytest.raises(UsageError, match="two or more utterances"):
        checks.check_loss(small.Network(), small.collate(small.Waveforms(1)), small.compute_loss)


def test_a_layer_whose_values_overflow_is_found_when_it_is_used_first():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    torch.nn.init.constant_(model[1].weight, 1e38)
    with pytest.raises(UsageError, match="values are not finite"), checks.finite_layers():
        model(torch.full((1, 2), 1e3))
    model(torch.full((1, 2), 1e3))  # outside nobody looks
    with checks.finite_layers():
        model[0](torch.zeros(1, 2))
