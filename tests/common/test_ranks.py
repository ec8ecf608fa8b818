"""Several ranks, as torchrun starts them: gloo processes on the CPU."""

import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import checkpoint, checks, ranks, report, update
from common.errors import Failure
from common.parts import processes
from tests import small

ONE = "--batch_size 4 --gradient_accumulation_steps 2 --num_epochs 2 --save_every 1".split()
TWO = ["--batch_size", "2", *ONE[2:]]  # the same global batch on two ranks
DATA = 9  # utterances: a global batch of eight, and one that leaves nothing for the second rank


def work(rank: int, folder: Path, flags: tuple[str, ...], trouble: str) -> None:
    """One of the ranks. It leaves its weights and progress in the folder, or its error. If there
    are several machines, each has its checkpoints."""
    if trouble == "torchrun":
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    elif trouble == "no targets":
        small.collate = without_targets
        checks.check_counts = lambda *counts: None  # it would refuse them
    report.Report.draw = lambda self, metric: None

    def compute_loss(model, batch):
        if rank == 1 and (
            trouble == "never fits" or (trouble == "out of memory" and len(batch["names"]) > 1)
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return small.compute_loss(model, batch)

    try:
        own = folder / f"machine{rank}" if trouble == "machines" and rank else folder
        model, progress = trained(small.make_args(own, *flags), compute_loss)
        torch.save((small.weights(model), asdict(progress)), folder / f"rank{rank}.pt")
    except Failure as error:
        (folder / f"error{rank}.txt").write_text(f"{error.status} {error}")


def without_targets(items: list[dict], collate=small.collate) -> dict:
    """A batch of one utterance counts nothing."""
    batch = collate(items)
    return {**batch, "counts": dict.fromkeys(batch["counts"], 0)} if len(items) == 1 else batch


def trained(args, compute_loss=small.compute_loss) -> tuple[torch.nn.Module, dict]:
    """Trains a network with a part that is frozen and one that is not used."""
    torch.manual_seed(0)
    model = small.Network().double()
    model.unused = torch.nn.Linear(3, 2, dtype=torch.float64)
    next(model.parameters()).requires_grad_(False)
    task = {"compute_loss": compute_loss}
    if "replay_share" in args.given:
        # A set of one, of which the second rank has nothing.
        task |= {"old": small.Waveforms(7, seed=3), "watched": {"old": small.Waveforms(1, seed=4)}}
    return small.run(args, model, small.Waveforms(DATA), trial=True, **task)


@pytest.fixture
def on_ranks(run_ranks):
    """on_ranks(folder, *flags, size=2, trouble="") returns (weights, progress) of each rank
    that ended without an error."""

    def start(folder: Path, *flags: str, size: int = 2, trouble: str = "") -> list:
        folder.mkdir(exist_ok=True)
        run_ranks(work, (folder, flags, trouble), size, machines=trouble == "machines")
        return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank?.pt"))]

    return start


def on_one(folder: Path, *flags: str) -> tuple[torch.Tensor, dict]:
    model, progress = trained(small.make_args(folder, *flags))
    return small.weights(model), progress


def test_two_ranks_of_which_one_is_out_of_memory_give_what_one_process_gives(tmp_path, on_ranks):
    reference, progress = on_one(tmp_path / "one", *ONE)
    (first, reached), (second, _) = on_ranks(tmp_path / "two", *TWO, trouble="out of memory")
    assert torch.equal(first, second)
    assert small.relative(first, reference) < 1e-12
    assert reached["utterances"] == progress.utterances == 18 and reached["step"] == 4
    assert reached["limits"]


def test_two_ranks_replay_and_watch_what_one_process_does(tmp_path, on_ranks):
    more = ("--replay_share", "0.3", "--stop_when_watched_rises", "0.5")
    weights, progress = on_one(tmp_path / "one", *ONE, *more)
    (first, reached), (second, other) = on_ranks(tmp_path / "two", *TWO, *more)
    assert torch.equal(first, second) and small.relative(first, weights) < 1e-9
    assert progress.utterances == reached["utterances"] == other["utterances"] > 2 * DATA
    steps, values = zip(*progress.parts["watched"]["old"], strict=True)
    for each in (reached, other):
        own_steps, own = zip(*each["parts"]["watched"]["old"], strict=True)
        assert own_steps == steps and own == pytest.approx(values, rel=1e-9)


def test_a_job_that_torchrun_starts_anew_continues_and_forgets_earlier_jobs(tmp_path, on_ranks):
    on_one(tmp_path / "before", *ONE, "--max_steps", "1")
    one, several = tmp_path / "one", tmp_path / "several"
    start = ["--init_from", str(small.newest(tmp_path / "before").path)]
    on_one(one, *ONE, *start, "--max_steps", "1")
    on_one(one, *ONE, "--resume", "auto", "--max_steps", "2")
    stale = several / "checkpoints" / checkpoint.LIMITS.format(0)
    stale.parent.mkdir(parents=True)
    stale.write_text('{"-50": 1}')
    for steps in "12":
        on_ranks(several, *TWO, *start, "--max_steps", steps, trouble="torchrun")
    small.assert_close(small.newest(several), small.newest(one))
    assert small.newest(several).progress.limits == {} and not stale.exists()


@pytest.mark.parametrize("flags", [[], ["--sharded", "--batch_size", "1"]])
def test_an_utterance_that_never_fits_on_one_rank_ends_all(tmp_path, on_ranks, flags):
    assert on_ranks(tmp_path, *TWO, *flags, trouble="never fits") == []
    errors = [(tmp_path / f"error{rank}.txt").read_text() for rank in (0, 1)]
    assert "another rank" in errors[0] and "does not fit into memory even alone" in errors[1]
    assert errors[1].startswith("1 ")


# --- a model that is divided between the ranks ----------------------------------------------------


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, ["--sharded", "--gradient_checkpointing"]),
        (4, ["--sharded"]),
        (4, ["--use_cpu_offload", "weights"]),
    ],
)
def test_several_ranks_end_with_the_checkpoint_of_one_process(tmp_path, on_ranks, size, flags):
    on_one(tmp_path / "one", *ONE)
    steps = ["--batch_size", str(4 // size), *ONE[2:], *flags]
    assert len(on_ranks(tmp_path / "several", *steps, size=size)) == size
    small.assert_close(small.newest(tmp_path / "several"), small.newest(tmp_path / "one"))


def test_shards_after_a_global_batch_without_targets(tmp_path, on_ranks, monkeypatch):
    assert len(on_ranks(tmp_path / "sharded", *TWO, "--sharded", trouble="no targets")) == 2
    monkeypatch.setattr(small, "collate", without_targets)
    monkeypatch.setattr(checks, "check_counts", lambda *counts: None)
    on_one(tmp_path / "one", *ONE)
    small.assert_close(small.newest(tmp_path / "sharded"), small.newest(tmp_path / "one"))


def test_a_run_that_goes_from_one_process_to_shards_to_two_machines_and_back(tmp_path, on_ranks):
    one, changing = tmp_path / "one", tmp_path / "changing"

    def lengths():
        for steps in "1234":
            more = ["--max_steps", steps, "--resume", "auto"]
            on_one(one, *ONE, *more)
            yield more

    whole, divided, machines, whole_again = lengths()
    on_one(changing, *ONE, *whole)
    on_ranks(changing, *TWO, "--sharded", *divided)
    on_ranks(changing, *TWO, *machines, trouble="machines")
    assert small.newest(changing / "machine1").progress.step == 2  # what it was sent
    on_one(changing, *ONE, *whole_again)
    small.assert_close(small.newest(changing), small.newest(one))


def test_a_rank_that_is_lost_while_the_host_waits_for_the_sums(monkeypatch):
    """On a GPU the sums over the ranks are waited for only when they are read."""
    job = processes.Job(0, 2)
    depths = []

    def lost(tensor) -> None:
        depths.append(job.depth)  # above 0 a signal does not wait for ever, either
        raise RuntimeError("NCCL communicator was aborted on rank 0")

    engine = SimpleNamespace(sum_gradients=lambda: None, norm=lambda: torch.ones(()))
    training = SimpleNamespace(setup=SimpleNamespace(ranks=job), engine=engine, loss_scale=None)
    monkeypatch.setattr(torch.Tensor, "tolist", lost)
    with pytest.raises(ranks.LostRank, match=r"another rank has ended .* aborted on rank 0"):
        update.reduce_gradients(training, torch.ones(1))
    assert depths == [1] and job.depth == 0


def test_shards_that_do_not_fit_start_anew_with_a_size_that_fits(tmp_path, on_ranks):
    on_one(tmp_path / "one", *ONE)
    folder = tmp_path / "sharded"
    flags = [*TWO, "--sharded", "--resume", "auto"]
    starts = 0
    while not on_ranks(folder, *flags, trouble="out of memory"):
        starts += 1
        errors = [(folder / f"error{rank}.txt").read_text() for rank in (0, 1)]
        assert errors[0].startswith("75 another rank") and errors[1].startswith("75 out of memory")
        assert starts < 5
    assert starts
    small.assert_close(small.newest(folder), small.newest(tmp_path / "one"))
