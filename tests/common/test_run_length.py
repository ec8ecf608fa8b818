"""How long a run is, and when it is evaluated and stops, by the hours of its data."""

import numpy as np
import pytest

from common import run_length
from common.batches import GlobalBatches
from common.device import Setup
from common.progress import Progress
from tests import small


class Clips(list):
    """A data set of `count` clips of six seconds."""

    def __init__(self, count: int):
        super().__init__(range(count))

    def seconds(self, epoch: int) -> np.ndarray:
        return np.full(len(self), 6.0)


def length_of(hours: float, update: int, *flags: str, fine_tunes: bool = True, **more):
    args = small.make_args("unused", "--batch_size", str(update), *flags)
    for name, unset in (("num_epochs", None), ("eval_every", None)):
        if f"--{name}" not in flags:
            setattr(args, name, unset)
    args.gradient_accumulation_steps = 1
    batches = GlobalBatches(args, Clips(round(600 * hours)), None, Setup())
    return run_length.choose(args, batches, fine_tunes, **more), batches


@pytest.mark.parametrize("update", [8, 16, 24, 48, 96, 120, 240])
@pytest.mark.parametrize("hours", [1, 1.5, 2, 10, 20, 100, 1000])
def test_from_an_hour_on_fine_tuning_makes_enough_updates_and_epochs(hours, update):
    length, batches = length_of(hours, update)
    assert length.total >= 1500 and length.total >= 10 * batches.per_epoch
    assert length.total == max(2000, 10 * batches.per_epoch)
    assert length.eval_every == max(100, batches.per_epoch)
    assert length.patience * length.eval_every >= length.total / 3
    assert length.patience >= 5


@pytest.mark.parametrize(("minutes", "updates"), [(1, 300), (9, 300), (10, 333), (30, 1000)])
def test_below_an_hour_fine_tuning_makes_fewer_updates(minutes, updates):
    length, _ = length_of(minutes / 60, 16)
    assert (length.total, length.max_steps, length.num_epochs) == (updates, updates, None)
    assert length.eval_every == (50 if updates < 1000 else 100)


@pytest.mark.parametrize(("minutes", "updates"), [(10, 3000), (42, 3500), (60, 5000), (240, 5000)])
def test_a_task_may_ask_for_more_updates(minutes, updates):
    assert length_of(minutes / 60, 16, updates=(3000, 5000))[0].total == updates


def test_a_model_from_scratch_has_epochs_and_no_patience():
    length, batches = length_of(1, 16, fine_tunes=False)
    assert (length.max_steps, length.num_epochs, length.patience) == (None, 100, 0)
    assert length.total == 100 * batches.per_epoch == 3800 and length.eval_every == 100
    assert length_of(10, 16, fine_tunes=False)[0].eval_every == 375


def test_flags_win():
    assert length_of(1, 16, "--num_epochs", "3")[0].total == 3 * 38
    assert length_of(1, 16, "--max_steps", "7")[0].total == 7
    assert length_of(1, 16, "--num_epochs", "3", "--max_steps", "20")[0].total == 20
    assert length_of(1, 16, "--num_epochs", "3", "--max_steps", "2000")[0].total == 3 * 38
    # 5 updates of the first epoch were made with other data, or with another number of utterances.
    for progress in (Progress(origin=[5, 1], counted=[5, 1]), Progress(counted=[5, 1])):
        assert length_of(1, 16, "--num_epochs", "3", progress=progress)[0].total == 5 + 2 * 38
    assert length_of(1, 16, "--eval_every", "0")[0].eval_every == 0
    for patience in (0, 3):
        flags = ("--early_stopping_patience", str(patience))
        assert length_of(1, 16, *flags)[0].patience == patience
        assert length_of(1, 16, *flags, fine_tunes=False)[0].patience == patience


def test_other_data_have_a_length_of_their_own():
    progress = Progress(origin=[1200, 32], counted=[1200, 32])
    assert length_of(1, 16, progress=progress)[0].total == 3200
    length, batches = length_of(100, 16, progress=progress)
    assert length.num_epochs == 42 and length.total == 1200 + 10 * batches.per_epoch


@pytest.mark.parametrize("fine_tunes", [True, False])
def test_a_run_has_the_length_that_it_says(tmp_path, capsys, monkeypatch, fine_tunes):
    """Also when it is resumed without the flags of its start."""
    monkeypatch.setattr(run_length, "FINE_TUNING_EPOCHS", 1)
    monkeypatch.setattr(run_length, "EPOCHS", 3)
    monkeypatch.setattr(run_length, "EVALUATION_UPDATES", 5)
    monkeypatch.setattr(run_length, "SHORT_RUN", 0)
    monkeypatch.setattr(run_length, "PATIENCE", 9)
    total = 12 if fine_tunes else 6
    for flags in ((), ("--resume", "auto")):
        args = small.make_args(tmp_path, *flags)
        args.num_epochs = args.eval_every = None
        args.max_steps = 2 if not flags else None
        assert small.run(args, fine_tunes=fine_tunes, updates=(12, 20))[1].step == (
            args.max_steps or total
        )
        text = capsys.readouterr().out
        ends = "; ends after 9 evaluations" in text
        assert ends == fine_tunes
        assert f"length: {args.max_steps or total} updates of 8, " in text
    lines = small.metrics(args)
    evaluated = [line["step"] for line in lines if any("eval/" in key for key in line)]
    assert evaluated == ([2, 5, 10, 12] if fine_tunes else [2, 5, 6])
