"""What machines without a shared disk agree on: which checkpoint is resumed, and where it is."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from common import checkpoint, ranks
from common.errors import RunError
from common.parts import machines, processes
from tests import small

CPU = torch.device("cpu")


def resume_and_talk(rank: int, folder: Path) -> None:
    job = processes.join(CPU)
    assert job.machines == 2 and job.leader

    def resume(wanted: str | None, where: Path) -> checkpoint.Saved | None:
        restarted = machines.is_restarted(where, job)
        return machines.resume(wanted, where, small.RECIPE, job, restarted)

    shared = folder / "shared"
    own = folder / f"machine{rank}"
    assert machines.keeps_folder(shared, job) == (rank == 0)
    assert machines.keeps_folder(own, job)

    # Nobody has anything; machine 1 has two updates; machine 0 has three, and then both have them.
    assert resume("auto", own) is None
    for step, source in ((2, 1), (3, 0)):
        if rank == source:
            for path in (folder / f"made{step}" / "checkpoints").glob("[bc]*"):
                path.rename(own / path.name)
        saved = resume("auto", own)
        assert saved.progress.step == step
        assert saved.path == own / f"checkpoint_step_{step:08d}.pt"
        assert len(set(job.gather(saved.path.read_bytes()))) == 1
        # The first machine is where a run ends, so it needs the best weights.
        assert job.gather((own / "best.safetensors").exists())[0]
    job.gather(None)

    # Only the torchrun that has started a run resumes it without being asked.
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    assert not machines.is_restarted(own, job) and resume(None, own) is None
    if rank == 1:
        machines.mark(own)
    job.gather(None)
    assert machines.is_restarted(own, job)
    assert resume(None, own).path.name == "checkpoint_step_00000003.pt"
    # Before it has a checkpoint, it begins again where it began.
    empty = folder / f"empty{rank}"
    assert machines.keeps_folder(empty, job)
    machines.mark(empty)
    wanted = own / "checkpoint_step_00000002.pt"
    assert resume(str(wanted), empty).progress.step == 2
    assert resume(None, folder / f"nothing{rank}") is None

    job.agree({"the seed": 1})
    with pytest.raises(RunError, match=r"^rank 1 differs from rank 0 in the seed \(1, 0\)"):
        job.agree({"the size": 5, "the seed": rank})
    with pytest.raises(RunError, match=r"^rank 1 differs from rank 0 in --resume \(auto, None\)"):
        job.agree({"the size": 5, **({"--resume": "auto"} if rank else {})})

    job.note_update(3.0)
    assert job.limit == processes.MARGIN + 3
    job.limit = 0.5
    ended = folder / "ended"
    if rank == 0:
        with pytest.raises(ranks.LostRank, match="another rank"):
            job.reduce([1])
        ended.touch()
    end = time.monotonic() + 60
    while not ended.exists():
        assert time.monotonic() < end  # or the first rank waits as long as this one lives
        time.sleep(0.1)


def test_two_machines(tmp_path, run_ranks):
    for step in (2, 3):
        flags = ["--num_epochs", "2", "--max_steps", str(step)]
        small.run(small.make_args(tmp_path / f"made{step}", *flags))
    run_ranks(resume_and_talk, (tmp_path,), machines=True)


def wait_for_a_stopped_rank(rank: int) -> None:
    job = processes.join(CPU)
    if rank == 1:
        time.sleep(60)
    processes.AFTER_SIGNAL = 0.5
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    job.reduce([1])


def test_a_signal_ends_a_rank_that_waits(run_ranks):
    with pytest.raises(ProcessExitedException) as ended:
        run_ranks(wait_for_a_stopped_rank, machines=True)
    assert ended.value.exit_code == 128 + signal.SIGTERM
