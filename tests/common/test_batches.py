"""Global batches as a pure function of seed and epoch, the worker processes that prepare them,
padding, splitting."""

import contextlib
import itertools
import math
import multiprocessing
import os
import re
import resource
import signal
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from common import batches
from common.device import Setup
from common.errors import DataError, RunError
from common.ranks import Ranks
from tests import processes, small

ROOT = Path(__file__).resolve().parents[2]


# --- planning -------------------------------------------------------------------------------------


def lengths(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(1.5, 0.6, count)


seeds = st.integers(0, 10**6)


@given(
    count=st.integers(1, 400),
    size=st.integers(1, 40),
    seed=seeds,
    epoch=st.integers(0, 100),
    shortest_first=st.booleans(),
)
def test_every_utterance_once_an_epoch(count, size, seed, epoch, shortest_first):
    seconds = lengths(count, seed)
    plan = batches.order_epoch(seconds, size, seed, epoch, shortest_first)
    assert sorted(np.concatenate(plan).tolist()) == list(range(count))
    assert len(plan) == math.ceil(count / size)
    smallest, *others = sorted(map(len, plan))
    assert 0 < smallest <= size and others == [size] * (len(plan) - 1)
    again = batches.order_epoch(seconds.copy(), size, seed, epoch, shortest_first)
    assert all(np.array_equal(a, b) for a, b in zip(plan, again, strict=True))
    if epoch == 0:
        assert seconds.argmax() in plan[0]
    if shortest_first:  # behind the longest ones, which come first in the first epoch
        ordered = seconds[np.concatenate(plan[1:] if epoch == 0 else plan)] if plan[1:] else []
        assert (np.diff(ordered) >= 0).all()


def test_global_batches_hold_similar_lengths_and_come_in_random_order():
    seconds = lengths(5000, 0)
    plan = batches.order_epoch(seconds, 8, 1, 1)
    padded = sum(seconds[global_batch].max() * len(global_batch) for global_batch in plan)
    random = np.random.default_rng(0).permutation(5000).reshape(-1, 8)
    padded_at_random = 8 * seconds[random].max(axis=1).sum()
    assert padded < 1.05 * seconds.sum() and padded_at_random > 1.6 * seconds.sum()
    means = [seconds[global_batch].mean() for global_batch in plan]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1
    other = batches.order_epoch(seconds, 8, 1, 2)  # another epoch has other global batches
    assert len({frozenset(each.tolist()) for each in [*plan, *other]}) > 0.99 * 2 * len(plan)


@given(
    count=st.integers(1, 60),
    size=st.integers(1, 12),
    cap=st.none() | st.floats(0.5, 60),
    ranks=st.integers(1, 5),
    seed=seeds,
)
def test_cut_global_batch(count, size, cap, ranks, seed):
    seconds = lengths(100, seed)
    global_batch = np.random.default_rng(seed).permutation(100)[:count]
    shares = [
        batches.cut_global_batch(global_batch, seconds, size, cap, rank, ranks)
        for rank in range(ranks)
    ]
    assert sorted(index for share in shares for batch in share for index in batch) == sorted(
        global_batch.tolist()
    )
    counts = [sum(map(len, share)) for share in shares]
    assert max(counts) - min(counts) <= 1
    for share in shares:
        flat = [seconds[index] for batch in share for index in batch]
        assert flat == sorted(flat, reverse=True)
        for batch in share:
            assert 1 <= len(batch) <= size
            assert cap is None or len(batch) == 1 or len(batch) * seconds[batch].max() <= cap
        if cap is None:
            assert len(share) == math.ceil(sum(map(len, share)) / size)


# --- batches --------------------------------------------------------------------------------------


def collate(items: list[dict]) -> dict:
    batch = {
        "names": [item["name"] for item in items],
        "seconds": [item["seconds"] for item in items],
    }
    batch["values"], batch["values_lengths"] = batches.pad([item["values"] for item in items])
    batch["labels"], batch["labels_lengths"] = batches.pad([item["labels"] for item in items], -100)
    batch["masks"] = torch.stack([torch.full((2, 2), float(len(item["values"]))) for item in items])
    batch["counts"] = {"ctc": int(batch["labels_lengths"].sum())}
    return batch


def item(name: str, samples: int, labels: int = 3) -> dict:
    return {
        "name": name,
        "seconds": float(samples),
        "values": torch.full((samples,), 1.0 + samples),
        "labels": torch.arange(labels),
    }


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), most=st.integers(1, 20))
def test_split_batch_keeps_every_row_and_trims(sizes, most):
    batch = collate([item(str(i), samples, 1 + samples % 5) for i, samples in enumerate(sizes)])
    pieces = batches.split_batch(batch, most)
    assert len(pieces) == math.ceil(len(sizes) / most)
    counts = [len(piece["names"]) for piece in pieces]
    assert max(counts) <= most and max(counts) - min(counts) <= 1
    assert [name for piece in pieces for name in piece["names"]] == batch["names"]
    row = 0
    for piece in pieces:
        assert "counts" not in piece
        assert piece["values"].shape == (len(piece["names"]), int(piece["values_lengths"].max()))
        for i in range(len(piece["names"])):
            for key in ("values", "labels"):
                length = int(piece[f"{key}_lengths"][i])
                assert length == batch[f"{key}_lengths"][row]
                assert torch.equal(piece[key][i, :length], batch[key][row, :length])
                assert (piece[key][i, length:] == (0 if key == "values" else -100)).all()
            assert torch.equal(piece["masks"][i], batch["masks"][row])
            assert piece["seconds"][i] == batch["seconds"][row]
            row += 1


class OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU. `users`: the streams that the allocator was told of."""

    is_cuda = True

    def record_stream(self, stream) -> None:
        self.users = [*getattr(self, "users", ()), stream]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is made up, and the list of what happens to its streams."""
    events = []
    computing = types.SimpleNamespace(wait_stream=lambda other: events.append(f"wait for {other}"))

    def new_stream(device: torch.device) -> str:
        events.append("a new stream")
        return "copying"

    def use_stream(name: str) -> contextlib.AbstractContextManager:
        events.append(f"use {name}")
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda value, device, non_blocking: value.as_subclass(OnGpu)
    )
    batches.copying_stream.cache_clear()
    yield torch.device("cuda", 0), events, computing
    batches.copying_stream.cache_clear()


def test_one_stream_copies_the_batches_of_a_whole_run(gpu):
    """The allocator keeps freed memory for the stream on which it was allocated: with a new stream
    for each global batch, copies pile up."""
    device, events, computing = gpu
    made = [collate([item("a", 3), item("b", 5)]), collate([item("c", 2)])]
    for _ in range(40):
        # An iterator, as an evaluation's batches are.
        for batch, before in zip(batches.to_device(iter(made), device), made, strict=True):
            events.append(batch["names"][0])
            assert torch.equal(batch["values"], before["values"])
            assert batch["values"].users == [computing]  # until then it is not overwritten
    first, *others = events
    assert first == "a new stream" and others == 40 * [
        *("use copying", "wait for copying", "use copying", "a"),  # c is copied while a computes
        *("wait for copying", "c"),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_copies_of_batches_take_no_more_memory_the_longer_a_run_is():
    device = torch.device("cuda", 0)
    weight = torch.randn(4096, 4096, device=device)
    reserved = []
    for number in range(40):
        made = [{"values": torch.full((16, 2**17), 2.0 * number + i).pin_memory()} for i in (0, 1)]
        for batch, before in zip(batches.to_device(made, device), made, strict=True):
            weight @ weight  # the next copy is made during this
            assert torch.equal(batch["values"].cpu(), before["values"])
        batch = None
        reserved.append(torch.cuda.memory_reserved(device))
    assert reserved[-1] == reserved[2]


# --- global batches and their workers -------------------------------------------------------------


class Clips:
    """A data set of utterances with the given lengths. Their names are "index/epoch". `trouble`
    maps an index to a function that is called before the utterance is loaded."""

    def __init__(self, seconds: np.ndarray, trouble: dict | None = None):
        self.lengths, self.trouble = seconds, trouble or {}

    def __len__(self) -> int:
        return len(self.lengths)

    def seconds(self, epoch: int) -> np.ndarray:
        return self.lengths

    def item(self, index: int, epoch: int) -> dict:
        if index in self.trouble:
            self.trouble[index]()
        return item(f"{index}/{epoch}", round(self.lengths[index] * 10))


def clips(count: int, trouble: dict | None = None) -> Clips:
    return Clips(lengths(count, 0), trouble)


def everywhere(function) -> dict:
    return dict.fromkeys(range(20), function)


def stumble() -> None:
    raise RuntimeError("a bug")


def refuse() -> None:
    raise DataError("nothing that names a file")


def bad(path: str):
    """A function that fails as the reader of a bad file does: with a `DataError` that has the
    path."""

    def load() -> None:
        error = DataError(f"{path} is truncated")
        error.path = path
        raise error

    return load


def global_batches(
    data: Clips, *flags: str, workers: int = 0, rank: int = 0, ranks: int = 1
) -> batches.GlobalBatches:
    update = ("--batch_size", "2", "--gradient_accumulation_steps", "3")
    args = small.make_args("unused", *update, *flags)
    setup = Setup(ranks=Ranks(rank, ranks), workers=workers)
    return batches.GlobalBatches(args, data, collate, setup)


def names(global_batch: batches.GlobalBatch) -> list[str]:
    return [name for batch in global_batch.micro_batches for name in batch["names"]]


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def take(source, count: int) -> list[batches.GlobalBatch]:
    taken = [global_batch for global_batch, _ in zip(source, range(count), strict=False)]
    source.close()
    return taken


DIED = (
    "a data worker died (often: too little main memory or, in a container, too small a /dev/shm): "
    "try --dataloader_num_workers 0, or fewer workers"
)
ADVICE = "; fix or remove it, or skip such files with --skip_bad_audio"


def exactly(message: str) -> str:
    """A pattern for `match`. (A test that kept the error would keep the loader too, which then
    waits for its workers.)"""
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize("workers", [0, 2])
def test_global_batches_come_in_order_and_continue_from_any_position(workers, no_hang):
    data = clips(20)  # four global batches of six, one of them of two
    made = global_batches(data, workers=workers)
    assert made.per_epoch == 4 and made.global_batch_size == 6
    taken = take(made.iterate(), 8)
    places = [(each.epoch, each.number, each.last) for each in taken]
    assert places == [(epoch, number, number == 3) for epoch in (0, 1) for number in range(4)]
    seen = [*map(names, taken)]
    assert sorted(map(len, seen[:4])) == [2, 6, 6, 6]
    assert sorted(flat(seen[:4])) == sorted(f"{i}/0" for i in range(20))
    assert sorted(flat(seen[4:])) == sorted(f"{i}/1" for i in range(20))
    assert [*map(names, take(made.iterate(0, 3), 3))] == seen[3:6]


@pytest.mark.parametrize(
    ("count", "trouble", "skipped", "workers"),
    [
        (20, {3: bad("three.wav")}, {"three.wav": "three.wav is truncated"}, 0),
        (20, {3: bad("three.wav")}, {"three.wav": "three.wav is truncated"}, 1),
        (4, everywhere(bad("a.wav")), {"a.wav": "a.wav is truncated"}, 0),
        (1, everywhere(refuse), {"utterance 0": "nothing that names a file"}, 0),
    ],
)
def test_bad_files_are_skipped_and_named(no_hang, count, trouble, skipped, workers):
    made = global_batches(clips(count, trouble), "--skip_bad_audio", workers=workers)
    taken = take(made.iterate(), made.per_epoch)
    sound = [f"{i}/0" for i in range(count) if i not in trouble]
    assert sorted(flat(map(names, taken))) == sorted(sound)
    assert [bool(each.micro_batches) for each in taken] == [bool(sound)] * len(taken)
    assert dict(flat(each.skipped for each in taken)) == skipped
    assert sum(len(each.skipped) for each in taken) == count - len(sound)


@pytest.fixture
def watchful(monkeypatch):
    """The loader looks every 0.2 s, not every 5 s, whether a worker has died."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def test_a_worker_that_dies_later_is_noticed_when_its_data_are_needed(no_hang, watchful):
    """Not in the middle of a computation of the main process, as with torch's own signal
    handler."""
    others = multiprocessing.active_children()
    source = global_batches(clips(20), workers=1).iterate()
    next(source)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(50):
        time.sleep(0.01)  # an update, in which nothing may be raised
    with pytest.raises(RunError, match=exactly(DIED)):
        for _ in range(100):
            next(source)


HELD = """
from common.batches import GlobalBatches
from common.device import Setup
from tests import processes, small
source = GlobalBatches(small.make_args("unused"), small.Waveforms(50), small.collate, Setup(workers=1)).iterate()
next(source)
try:
    raise ValueError("the end")
except ValueError as caught:
    error = caught
raise error
"""


def test_an_error_while_workers_run_ends_the_process():
    """Workers ignore SIGTERM, which multiprocessing sends to them at exit before it waits for
    them."""
    process = processes.start(["-c", HELD], ROOT)
    _, err = process.communicate()
    assert process.returncode == 1 and err.endswith("ValueError: the end\n")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bug_keeps_its_traceback(no_hang, workers):
    with pytest.raises(RuntimeError, match="in stumble" if workers else "^a bug$"):
        take(global_batches(clips(20, everywhere(stumble)), workers=workers).iterate(), 1)
    # a reference cycle in torch keeps the loader, which would wait 5 s for its worker
    batches._end_workers()


def test_many_micro_batches_do_not_run_out_of_files(no_hang):
    """12 micro-batches of 7 tensors, several global batches ahead, against a limit of 200 open
    files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        flags = ("--batch_size", "1", "--gradient_accumulation_steps", "12")
        source = global_batches(clips(72), *flags, workers=2).iterate()
        next(source)
        time.sleep(0.3)  # meanwhile the workers fill their queues
        assert len(take(source, 5)) == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- evaluation -----------------------------------------------------------------------------------


def evaluation(
    data: Clips, *flags: str, workers: int = 0, rank: int = 0, ranks: int = 1
) -> batches.EvalBatches:
    args = small.make_args("unused", "--eval_batch_size", "4", *flags)
    setup = Setup(ranks=Ranks(rank, ranks), workers=workers)
    return batches.EvalBatches(args, data, collate, setup)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_covers_everything_every_time(no_hang, workers):
    data, shares = clips(23), []
    for rank in range(2):
        made = evaluation(data, workers=workers, rank=rank, ranks=2)
        first, second = ([batch["names"] for batch in made] for _ in range(2))
        assert first == second and len(first) == 3 and max(map(len, first)) <= 4
        shares.append(flat(first))
    assert sorted(flat(shares)) == sorted(f"{i}/0" for i in range(23))
    assert shares[0][0] == f"{data.lengths.argmax()}/0"
    whole = made.whole()
    longest_first = np.argsort(-data.lengths, kind="stable")
    assert flat(batch["names"] for batch in whole) == [f"{i}/0" for i in longest_first]
    assert whole.whole() is whole


def test_evaluation_skips_files_and_says_so_once(capsys):
    made = evaluation(clips(9, {2: bad("two.wav")}), "--skip_bad_audio")
    for _ in range(2):
        assert sum(len(batch["names"]) for batch in made) == 8
    assert made.skipped == {"two.wav": "two.wav is truncated"}
    assert capsys.readouterr().out == "skipped in evaluation: two.wav is truncated\n"
    with pytest.raises(DataError, match=exactly(f"two.wav is truncated{ADVICE}")):
        list(evaluation(clips(9, {2: bad("two.wav")})))
