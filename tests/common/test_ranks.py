"""Several ranks, as torchrun starts them: two gloo processes on the CPU."""

import gc
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from common import checkpoint, report
from common.errors import RunError
from tests import small

ONE = (
    "--batch_size",
    "4",
    "--gradient_accumulation_steps",
    "2",
    "--num_epochs",
    "2",
    "--save_every",
    "1",
)
TWO = ("--batch_size", "2", *ONE[2:])  # the same global batch on two ranks
DATA = 9  # utterances: a global batch of eight, and one that leaves nothing for the second rank


def work(rank: int, port: int, folder: Path, flags: tuple[str, ...], trouble: str) -> None:
    """One of two ranks. It leaves its weights and progress in the folder, or its error."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # or recovery from out of memory copies every page that this process shares with its server
    gc.freeze()
    report.Report.draw = lambda self, metric: None

    def compute_loss(model, batch):
        if rank == 1 and (
            trouble == "never fits" or (trouble == "out of memory" and len(batch["names"]) > 1)
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return small.compute_loss(model, batch)

    try:
        model, progress = small.run(
            small.make_args(folder, *flags), data=small.Waveforms(DATA), compute_loss=compute_loss
        )
        torch.save((small.weights(model), progress), folder / f"rank{rank}.pt")
    except RunError as error:
        (folder / f"error{rank}.txt").write_text(str(error))
    os._exit(0)  # as errors.exit_with_one_line does, and why


@pytest.fixture
def on_two_ranks(in_processes):
    """on_two_ranks(folder, *flags, trouble="") returns (weights, progress) of each rank that ended
    without an error."""

    def start(folder: Path, *flags: str, trouble: str = "") -> list:
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        in_processes(work, (port, folder, flags, trouble), 2)
        return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank?.pt"))]

    return start


def on_one(folder: Path, *flags: str) -> tuple[torch.Tensor, dict]:
    model, progress = small.run(small.make_args(folder, *flags), data=small.Waveforms(DATA))
    return small.weights(model), progress


@pytest.mark.parametrize("trouble", ["", "out of memory"])
@pytest.mark.parametrize("level", [[], ["--use_cpu_offload", "gradients"]])
def test_two_ranks_give_what_one_process_gives(tmp_path, on_two_ranks, trouble, level):
    reference, progress = on_one(tmp_path / "one", *ONE)
    (first, reached), (second, _) = on_two_ranks(tmp_path / "two", *TWO, *level, trouble=trouble)
    assert torch.equal(first, second)
    assert small.relative(first, reference) < 1e-10
    assert reached["utterances"] == progress["utterances"] == 18 and reached["step"] == 4
    assert bool(reached["limits"]) == bool(trouble)


def test_resume_with_another_number_of_ranks_continues_at_the_same_global_batch(
    tmp_path, on_two_ranks
):
    on_two_ranks(tmp_path / "two", *TWO, "--max_steps", "3")
    saved = checkpoint.resume("auto", tmp_path / "two" / "checkpoints", small.RECIPE)
    progress = saved.state["progress"]
    assert (progress["epoch"], progress["global_batch"], len(saved.state["rng"])) == (1, 1, 2)
    weights, _ = on_one(tmp_path / "two", *ONE, "--resume", "auto")
    # The same with one process throughout.
    on_one(tmp_path / "one", *ONE, "--max_steps", "3")
    again, _ = on_one(tmp_path / "one", *ONE, "--resume", "auto")
    assert small.relative(weights, again) < 1e-10


def test_an_utterance_that_never_fits_on_one_rank_ends_all(tmp_path, on_two_ranks):
    assert on_two_ranks(tmp_path, *TWO, trouble="never fits") == []
    errors = [(tmp_path / f"error{rank}.txt").read_text() for rank in (0, 1)]
    assert "another rank" in errors[0] and "does not fit into memory even alone" in errors[1]
