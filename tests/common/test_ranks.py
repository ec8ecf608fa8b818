"""Several ranks, as torchrun starts them: two gloo processes on the CPU."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp

from common import checkpoint, device
from common.device import Setup
from common.errors import RunError
from recipes import konkani_conformer as recipe
from tests import tiny

FLAGS = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--num_epochs", "2", "--save_every", "1")
WHOLE = ("--batch_size", "4", "--gradient_accumulation_steps", "2", "--num_epochs", "2", "--save_every", "1")


def work(rank, size, port, folder, flags, trouble, resume):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    args = tiny.make_args(folder, *flags)
    setup = Setup(ranks=device.start_ranks(torch.device("cpu")))
    calls = []

    def compute_loss(model, batch):
        calls.append(1)
        if trouble == "out of memory" and rank == 1 and len(batch["names"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if trouble == "never fits" and rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recipe.compute_loss(model, batch)

    resumed = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE) if resume else None
    try:
        model, progress = tiny.run(args, compute_loss=compute_loss, setup=setup, resumed=resumed)
        torch.save((tiny.weights(model), progress), folder / f"rank{rank}.pt")
    except RunError as error:
        (folder / f"error{rank}.txt").write_text(str(error))
    os._exit(0)  # as errors.exit_with_one_line does, and why


def spawn(folder, flags=FLAGS, trouble="", resume=False, size=2):
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (size, port, folder, flags, trouble, resume), nprocs=size)
    return [
        torch.load(folder / f"rank{rank}.pt", weights_only=True)
        for rank in range(size)
        if (folder / f"rank{rank}.pt").exists()
    ]


@pytest.mark.parametrize("trouble", ["", "out of memory"])
def test_two_ranks_give_what_one_process_gives(tmp_path, trouble):
    reference, progress = tiny.run(tiny.make_args(tmp_path / "one", *WHOLE))
    (first, reached), (second, _) = spawn(tmp_path / "two", trouble=trouble)
    assert torch.equal(first, second)
    assert tiny.relative(first, tiny.weights(reference)) < 1e-10
    assert reached["utterances"] == progress["utterances"] == 26 and reached["step"] == 4
    assert bool(reached["limits"]) == bool(trouble)


def test_resume_with_another_number_of_ranks_goes_on_at_the_same_window(tmp_path):
    spawn(tmp_path / "two", flags=(*FLAGS, "--max_steps", "3"))
    args = tiny.make_args(tmp_path / "two", *WHOLE)
    resumed = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)
    assert (resumed["progress"]["epoch"], resumed["progress"]["window"]) == (1, 1)
    model, _ = tiny.run(args, resumed=resumed)
    # The same with one process throughout.
    lone = tiny.make_args(tmp_path / "three", *WHOLE, "--max_steps", "3")
    tiny.run(lone)
    again, _ = tiny.run(
        tiny.make_args(tmp_path / "three", *WHOLE),
        resumed=checkpoint.resume("auto", lone.checkpoint_dir, recipe.RECIPE),
    )
    assert tiny.relative(tiny.weights(model), tiny.weights(again)) < 1e-10


def test_an_utterance_that_never_fits_on_one_rank_ends_all(tmp_path):
    assert spawn(tmp_path, trouble="never fits") == []
    errors = [(tmp_path / f"error{rank}.txt").read_text() for rank in (0, 1)]
    assert "another rank" in errors[0] and "does not fit into memory even alone" in errors[1]
