"""Reading audio, planning windows, and the worker processes that prepare them."""

import functools
import itertools
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import batches
from common.errors import DataError, RunError
from speech import audio
from tests.speech.test_audio import bad_file

ROOT = Path(__file__).resolve().parents[2]

# --- planning --------------------------------------------------------------------------------------------------------


def lengths(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(1.5, 0.6, count)


small = st.integers(0, 10**6)


@given(count=st.integers(1, 400), size=st.integers(1, 40), seed=small, epoch=st.integers(0, 100))
def test_every_utterance_once_an_epoch(count, size, seed, epoch):
    seconds = lengths(count, seed)
    plan = batches.plan_epoch(seconds, size, seed, epoch)
    assert sorted(np.concatenate(plan).tolist()) == list(range(count))
    assert len(plan) == math.ceil(count / size)
    assert sorted(map(len, plan))[1:] == [size] * (len(plan) - 1)  # one at most is partial, none is empty
    again = batches.plan_epoch(seconds.copy(), size, seed, epoch)
    assert all(np.array_equal(a, b) for a, b in zip(plan, again, strict=True))
    if epoch == 0:
        assert seconds.argmax() in plan[0]


@given(count=st.integers(1, 300), parts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8)), max_size=4), seed=small, epoch=st.integers(0, 3))  # fmt: skip
def test_what_other_window_sizes_have_seen_is_left_out(count, parts, seed, epoch):
    seconds, seen, done = lengths(count, seed), [], []
    for size, windows in parts:
        plan = batches.plan_epoch(seconds, size, seed, epoch, done)[:windows]
        seen += [index for window in plan for index in window.tolist()]
        done.append([size, len(plan)])
    rest = batches.plan_epoch(seconds, 7, seed, epoch, iter(done))
    assert sorted(seen + [index for window in rest for index in window.tolist()]) == list(range(count))
    assert len(rest) == math.ceil((count - len(seen)) / 7)


def test_seeds_and_epochs_have_their_own_order():
    seconds = lengths(500, 0)
    plans = [
        tuple(np.concatenate(batches.plan_epoch(seconds, 8, seed, epoch))) for seed in (1, 2) for epoch in (0, 1, 2)
    ]
    assert len(set(plans)) == 6


def test_windows_hold_similar_lengths_and_come_in_random_order():
    seconds = lengths(5000, 0)
    plan = batches.plan_epoch(seconds, 8, 1, 1)
    padding = 1 - seconds.sum() / sum(seconds[window].max() * len(window) for window in plan)
    random = np.random.default_rng(0).permutation(5000).reshape(-1, 8)
    assert padding < 0.05 < 0.4 < 1 - seconds.sum() / (8 * seconds[random].max(axis=1).sum())
    means = [seconds[window].mean() for window in plan]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1
    epochs = [frozenset(map(int, window)) for epoch in (1, 2) for window in batches.plan_epoch(seconds, 8, 1, epoch)]
    assert len(set(epochs)) > 0.99 * len(epochs)  # and in new company every epoch


@given(count=st.integers(1, 60), size=st.integers(1, 12), cap=st.none() | st.floats(0.5, 60), ranks=st.integers(1, 5), seed=small)  # fmt: skip
def test_cut_window(count, size, cap, ranks, seed):
    seconds = lengths(100, seed)
    window = np.random.default_rng(seed).permutation(100)[:count]
    shares = [batches.cut_window(window, seconds, size, cap, rank, ranks) for rank in range(ranks)]
    assert sorted(index for share in shares for batch in share for index in batch) == sorted(window.tolist())
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


# --- batches ---------------------------------------------------------------------------------------------------------


def collate(items: list[dict]) -> dict:
    batch = {"names": [item["name"] for item in items], "seconds": [item["seconds"] for item in items]}
    batch["audio"], batch["audio_lengths"] = batches.pad([item["audio"] for item in items])
    batch["labels"], batch["labels_lengths"] = batches.pad([item["labels"] for item in items], -100)
    batch["masks"] = torch.stack([torch.full((2, 2), float(len(item["audio"]))) for item in items])
    batch["counts"] = {"ctc": int(batch["labels_lengths"].sum())}
    return batch


def item(name: str, samples: int, labels: int = 3) -> dict:
    return {"name": name, "seconds": float(samples), "audio": torch.full((samples,), 1.0 + samples), "labels": torch.arange(labels)}  # fmt: skip


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
        assert piece["audio"].shape == (len(piece["names"]), int(piece["audio_lengths"].max()))
        for i in range(len(piece["names"])):
            for key in ("audio", "labels"):
                length = int(piece[f"{key}_lengths"][i])
                assert length == batch[f"{key}_lengths"][row]
                assert torch.equal(piece[key][i, :length], batch[key][row, :length])
                assert (piece[key][i, length:] == (0 if key == "audio" else -100)).all()
            assert torch.equal(piece["masks"][i], batch["masks"][row]) and piece["seconds"][i] == batch["seconds"][row]
            row += 1


@given(
    length=st.integers(0, 480_000),
    step=st.sampled_from([1, 320, 1280]),
    most=st.integers(16_000, 480_000),
    shapes=st.integers(1, 20),
)
def test_quantise_gives_few_lengths_and_wastes_little(length, step, most, shapes):
    grid = sorted({batches.quantise(n, step, most, shapes) for n in range(0, most + 1, max(1, most // 2000))})
    assert len(grid) <= shapes and grid[-1] == -(-most // step) * step
    found = batches.quantise(length, step, most, shapes)
    assert found >= length and found % step == 0 and isinstance(found, int)
    assert batches.quantise(found, step, most, shapes) == found
    if length <= most:
        assert found in grid
    else:
        assert found < length + step or found == grid[-1]
    if shapes >= 12 and most / 16 <= length <= most:
        assert found <= 1.29 * length + step


def test_quantise_on_the_grids_of_whisper():
    seconds = {batches.quantise(n, 320, 480_000) / 16_000 for n in range(1, 480_001, 100)}
    assert len(seconds) == 12 and max(seconds) == 30
    assert {batches.quantise(n, 8, 448) for n in range(1, 449)} == {
        32,
        40,
        48,
        64,
        80,
        104,
        128,
        168,
        216,
        272,
        352,
        448,
    }
    assert {batches.quantise(n, 480_000, 480_000) for n in (1, 480_000)} == {480_000}


def test_to_device_keeps_the_lengths_on_the_host():
    made = [collate([item("a", 3), item("b", 5)]), collate([item("c", 2)])]
    moved = list(batches.to_device(made, torch.device("cpu")))
    assert [batch["names"] for batch in moved] == [["a", "b"], ["c"]]
    assert all(
        batch["audio_lengths_host"] is before["audio_lengths"] for batch, before in zip(moved, made, strict=True)
    )
    assert list(batches.to_device([], torch.device("cpu"))) == []


# --- windows and their workers ---------------------------------------------------------------------------------------


def load(seconds: np.ndarray, index: int, epoch: int) -> dict:
    return {**item(f"{index}", round(seconds[index] * 10)), "name": f"{index}/{epoch}"}


def load_after(seconds: np.ndarray, bad: dict[int, str], index: int, epoch: int) -> dict:
    """`load`, but the utterances in `bad` are read from those files."""
    if index in bad:
        audio.read_audio(bad[index], 16_000)
    return load(seconds, index, epoch)


def die(index: int, epoch: int) -> dict:
    os.kill(os.getpid(), signal.SIGKILL)


def stumble(index: int, epoch: int) -> dict:
    raise RuntimeError("a defect of ours")


def refuse(index: int, epoch: int) -> dict:
    raise DataError("nothing that names a file")


def arguments(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{
        "batch_size": 2, "gradient_accumulation_steps": 3, "max_batch_seconds": None, "seed": 1, "skip_bad_audio": False,
        "dataloader_num_workers": 0, "eval_batch_size": 4, "max_duration": 30.0, "persistent_workers": True, **changes,
    })  # fmt: skip


def setup(rank: int = 0, size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(ranks=SimpleNamespace(rank=rank, size=size), device=torch.device("cpu"))


def windows(seconds: np.ndarray, loader=None, rank: int = 0, ranks: int = 1, **changes) -> batches.Windows:
    loader = loader or functools.partial(load, seconds)
    return batches.Windows(arguments(**changes), lambda epoch: seconds, loader, collate, setup(rank, ranks))


def names(window: batches.Window) -> list[str]:
    return [name for batch in window.micro_batches for name in batch["names"]]


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def take(source, count: int) -> list[batches.Window]:
    found = [window for window, _ in zip(source, range(count), strict=False)]
    source.close()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_come_in_order_and_go_on_from_any_position(workers, no_hang):
    seconds = lengths(20, 0)  # four windows of six, the last of two
    made = windows(seconds, dataloader_num_workers=workers)
    assert made.per_epoch == 4 and made.window_size == 6
    found = take(made.iterate(), 8)
    assert [(w.epoch, w.number, w.last) for w in found] == [(e, n, n == 3) for e in (0, 1) for n in range(4)]
    assert sorted(len(names(window)) for window in found[:4]) == [2, 6, 6, 6]
    for epoch in (0, 1):
        seen = [name for window in found[4 * epoch :][:4] for name in names(window)]
        assert sorted(seen, key=lambda name: int(name.split("/")[0])) == [f"{i}/{epoch}" for i in range(20)]
    assert [names(window) for window in take(made.iterate(0, 3), 3)] == [names(window) for window in found[3:6]]
    smaller = windows(seconds, gradient_accumulation_steps=1, dataloader_num_workers=workers)
    count = (20 - len(flat(map(names, found[:2])))) // 2
    rest = take(smaller.iterate(0, 0, [[6, 2]]), count + 1)
    assert sorted(flat(map(names, found[:2] + rest[:-1]))) == sorted(f"{i}/0" for i in range(20))
    assert (rest[-2].last, rest[-1].epoch, rest[-1].number) == (True, 1, 0)


def test_ranks_share_a_window():
    seconds = lengths(50, 0)
    shares = [take(windows(seconds, rank=rank, ranks=3).iterate(), 3) for rank in range(3)]
    alone = take(windows(seconds, gradient_accumulation_steps=9).iterate(), 3)
    for number in range(3):
        union = flat(names(share[number]) for share in shares)
        assert sorted(union) == sorted(names(alone[number]))


def test_total_steps_and_padding_share():
    seconds = lengths(100, 0)
    made = windows(seconds)
    assert made.total_steps(SimpleNamespace(num_epochs=3, max_steps=None)) == 3 * 17
    assert made.total_steps(SimpleNamespace(num_epochs=3, max_steps=20)) == 20
    real = padded = 0.0
    for window in take(made.iterate(), 17):
        for batch in window.micro_batches:
            ours = [seconds[int(name.split("/")[0])] for name in batch["names"]]
            real, padded = real + sum(ours), padded + len(ours) * max(ours)
    assert made.padding_share() == pytest.approx(1 - real / padded)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_stops_the_run_with_its_name(tmp_path, no_hang, workers):
    seconds, path = lengths(20, 0), bad_file(tmp_path / "my audio", "flac cut")
    made = windows(seconds, functools.partial(load_after, seconds, {7: path}), dataloader_num_workers=workers)
    with pytest.raises(DataError) as error:
        take(made.iterate(), 4)
    assert str(error.value) == (
        f"{path} is truncated or damaged: flac decoder lost sync; fix or remove it, or pass over such files with --skip_bad_audio"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_skipped_counted_and_named(tmp_path, no_hang, no_ffmpeg, workers):
    seconds = lengths(20, 0)
    bad = {3: bad_file(tmp_path / "my audio", "not a number"), 7: bad_file(tmp_path / "my audio", "flac cut")}
    loader = functools.partial(load_after, seconds, bad)
    found = take(windows(seconds, loader, skip_bad_audio=True, dataloader_num_workers=workers).iterate(), 4)
    assert sorted(flat(map(names, found))) == sorted(f"{i}/0" for i in range(20) if i not in bad)
    skipped = dict(flat(window.skipped for window in found))
    assert skipped == {
        bad[3]: f"{bad[3]} holds samples that are not finite (NaN or infinity)",
        bad[7]: f"{bad[7]} is truncated or damaged: flac decoder lost sync",
    }


def test_a_window_of_bad_files_only_is_empty_but_there(tmp_path):
    seconds, path = lengths(4, 0), bad_file(tmp_path, "missing")
    loader = functools.partial(load_after, seconds, dict.fromkeys(range(4), path))
    (window,) = take(windows(seconds, loader, skip_bad_audio=True).iterate(), 1)
    assert window.micro_batches == [] and [name for name, _ in window.skipped] == [path] * 4 and window.last


def test_a_recipe_may_refuse_an_utterance_without_naming_a_file():
    (window,) = take(windows(lengths(1, 0), refuse, skip_bad_audio=True).iterate(), 1)
    assert window.skipped == [("utterance 0", "nothing that names a file")]


DIED = (
    "a data worker died (often: too little main memory or, in a container, too small a /dev/shm): "
    "try --dataloader_num_workers 0, or fewer workers"
)


def test_a_worker_that_dies_is_one_line(no_hang):
    with pytest.raises(RunError) as error:
        take(windows(lengths(20, 0), die, dataloader_num_workers=2).iterate(), 4)
    assert str(error.value) == DIED


def test_a_worker_that_dies_meanwhile_is_noticed_where_data_is_waited_for(no_hang):
    """Not in the middle of whatever the main process computes, as with torch's own signal handler."""
    import multiprocessing

    source = windows(lengths(20, 0), dataloader_num_workers=1).iterate()
    next(source)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(50):
        time.sleep(0.01)  # an update; nothing may be raised here
    with pytest.raises(RunError) as error:
        for _ in range(100):
            next(source)
    assert str(error.value) == DIED


HELD = """
import numpy as np, torch
from tests.common.test_batches import lengths, windows
source = windows(lengths(5000, 0), dataloader_num_workers=1).iterate()
next(source)
try:
    raise ValueError("the end")
except ValueError as caught:
    error = caught
raise error
"""


def test_an_error_while_workers_run_ends_the_process():
    """They ignore SIGTERM, by which multiprocessing would end them at exit, to wait for ever."""
    result = subprocess.run([sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.endswith("ValueError: the end\n")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_defect_of_ours_keeps_its_traceback(no_hang, workers):
    with pytest.raises(RuntimeError, match="a defect of ours") as error:
        take(windows(lengths(20, 0), stumble, dataloader_num_workers=workers).iterate(), 1)
    assert not isinstance(error.value, RunError)


def test_many_micro_batches_do_not_run_out_of_files(no_hang):
    """64 micro-batches of 7 tensors, several windows ahead, against the usual limit of 1024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        made = windows(lengths(640, 0), batch_size=1, gradient_accumulation_steps=64, dataloader_num_workers=2)
        source = made.iterate()
        next(source)
        time.sleep(1)  # the workers fill their queues meanwhile
        assert len(take(source, 9)) == 9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_covers_everything_every_time(no_hang, workers):
    seconds = lengths(23, 0)
    shares = []
    for rank in range(2):
        made = batches.EvalBatches(
            arguments(dataloader_num_workers=workers),
            seconds,
            functools.partial(load, seconds),
            collate,
            setup(rank, 2),
        )
        first, second = ([batch["names"] for batch in made] for _ in range(2))
        assert first == second and len(first) == len(made) and max(map(len, first)) <= 4
        shares.append(flat(first))
    assert sorted(flat(shares)) == sorted(f"{i}/0" for i in range(23))
    assert shares[0][0] == f"{seconds.argmax()}/0"


def test_evaluation_skips_names_and_says_so_once(tmp_path, capsys, no_ffmpeg):
    seconds, path = lengths(9, 0), bad_file(tmp_path / "my audio", "empty")
    loader = functools.partial(load_after, seconds, {2: path})
    made = batches.EvalBatches(arguments(skip_bad_audio=True), seconds, loader, collate, setup())
    for _ in range(2):
        assert sum(len(batch["names"]) for batch in made) == 8
    assert made.skipped == {path: f"{path} is empty"}
    assert capsys.readouterr().out == f"skipped in evaluation: {path} is empty\n"
    strict = batches.EvalBatches(arguments(), seconds, loader, collate, setup())
    with pytest.raises(DataError) as error:
        list(strict)
    assert str(error.value) == f"{path} is empty; fix or remove it, or pass over such files with --skip_bad_audio"
