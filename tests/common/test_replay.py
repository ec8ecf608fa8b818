"""Old utterances among the new ones of every global batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.parts import replay
from tests import small
from tests.common.test_loop import cut, watched

seeds = st.integers(0, 10**6)


def plans(new: int, old: int, size: int, share: float, seed: int, epochs: int) -> list[list]:
    """The global batches of each epoch; lengths from 1 to 30 s."""
    seconds = np.random.default_rng(seed).uniform(1, 30, new + old)
    return [replay.order_epoch(seconds, old, share, size, (seed, epoch)) for epoch in range(epochs)]


@given(
    new=st.integers(1, 400),
    old=st.integers(1, 120),
    size=st.integers(2, 24),
    room=st.floats(0.001, 1),
    seed=seeds,
    epochs=st.integers(1, 4),
)
def test_the_share_is_exact_in_every_global_batch(new, old, size, room, seed, epochs):
    share = room * (size - 1) / size
    total = olds = 0
    stream = []
    for plan in plans(new, old, size, share, seed, epochs):
        assert sorted(i for each in plan for i in each if i < new) == list(range(new))
        for each in plan:
            some = int((each >= new).sum())
            assert math.floor(share * len(each)) <= some <= math.ceil(share * len(each))
            assert some < len(each) <= size
        is_smaller = [len(each) < size for each in plan]
        assert sum(is_smaller) <= 1
        if any((each >= new).any() for each in plan):
            assert not any(is_smaller[:-1])
            for each in plan:
                total, olds = total + len(each), olds + int((each >= new).sum())
                assert abs(olds - share * total) <= 0.5 + 1e-6
        else:
            total += new
            assert share * total < olds + 0.5 + 1e-6
        stream += [i - new for each in plan for i in each if i >= new]
    counted = replay.count_global_batches(new, size, share, 0, epochs)
    assert counted == sum(map(len, plans(new, old, size, share, seed, epochs)))
    # All come once before any comes again. (Within a pool they are sorted by length.)
    order = replay.drawn(old, seed, 0, len(stream))
    assert sorted(stream) == sorted(order.tolist())
    for first in range(0, len(order) - old + 1, old):
        assert sorted(order[first : first + old]) == list(range(old))


def test_old_utterances_are_about_as_long_as_those_that_they_join():
    random = np.random.default_rng(0)
    seconds = np.concatenate([random.uniform(1, 20, 6400), random.uniform(3, 12, 3000)])
    plan = replay.order_epoch(seconds, 3000, 0.2, 10, (1, 1))
    padding = 1 - seconds[np.concatenate(plan)].sum() / sum(
        seconds[each].max() * len(each) for each in plan
    )
    assert padding < 0.2
    alike = np.concatenate([seconds[:6400], random.uniform(1, 20, 3000)])
    plan = replay.order_epoch(alike, 3000, 0.2, 10, (1, 1))
    padding = 1 - alike[np.concatenate(plan)].sum() / sum(
        alike[each].max() * len(each) for each in plan
    )
    assert padding < 0.07


@given(new=st.integers(20, 300), old=st.integers(1, 90), seed=seeds, share=st.floats(0.01, 0.5))
def test_the_longest_comes_early(new, old, seed, share):
    seconds = np.random.default_rng(seed).uniform(1, 30, new + old)
    plan = replay.order_epoch(seconds, old, share, 8, (seed, 0))
    longest = max(float(seconds[each].max()) for each in plan)
    first = next(i for i, each in enumerate(plan) if seconds[each].max() == longest)
    kinds = [int((each >= new).sum()) for each in plan]
    assert kinds[first] not in kinds[:first] or first == len(plan) - 1


@pytest.mark.parametrize(
    ("share", "size", "message"),
    [
        (0.1, 1, "an update of one utterance"),
        (1.0, 2, "leaves no new utterance in an update of 2: it can be at most 0.5"),
        (0.8, 4, "leaves no new utterance in an update of 4: it can be at most 0.75"),
    ],
)
def test_a_share_without_room_is_refused(share, size, message):
    with pytest.raises(UsageError, match=message):
        replay.check_share(share, size)
    replay.check_share(0.75, 4)


def test_several_data_sets_as_one():
    parts = [small.Waveforms(3), small.Waveforms(2, seed=1)]
    joined = replay.JoinedSets(parts)
    assert len(joined) == 5 and not hasattr(joined, "text_length")
    items = [joined.item(index, 0) for index in range(5)]
    assert [item["text"] for item in items] == [item["text"] for part in parts for item in part]
    assert joined.seconds(0).tolist() == [len(item["audio"]) / small.SAMPLE_RATE for item in items]


# --- in a run -------------------------------------------------------------------------------------


class Old(small.Waveforms):
    def __init__(self, count: int = 9):
        super().__init__(count, seed=5)
        for item in self:
            item["name"] = f"old {item['name']}"


def test_the_length_of_a_run_is_that_of_its_epochs(tmp_path, capsys):
    names = []
    args = small.make_args(tmp_path, *cut(2, 2), "--replay_share", "0.4", "--num_epochs", "3")
    _, progress = small.run(args, old=Old(), compute_loss=watched(names))
    assert "40 % of each update are old utterances out of 9" in capsys.readouterr().out
    assert progress.epoch == 3 and progress.step == progress.last_evaluation
    assert sum(not name.startswith("old") for name in names) == 3 * 13
    assert sum(name.startswith("old") for name in names) == round(0.4 * len(names))
    total = replay.count_global_batches(13, 4, 0.4, 0, 3)
    assert progress.step == total


@pytest.mark.parametrize("change", ["share", "set"])
def test_another_replay_starts_the_epoch_anew(tmp_path, capsys, change):
    flags = (*cut(2, 2), "--max_steps", "2")
    small.run(small.make_args(tmp_path, *flags, "--replay_share", "0.25"), old=Old())
    share = "0.5" if change == "share" else "0.25"
    args = small.make_args(tmp_path, *cut(2, 2), "--resume", "auto", "--replay_share", share)
    small.run(args, old=Old(9 if change == "share" else 8))
    assert "training data have changed since the checkpoint" in capsys.readouterr().out
