"""Two machines without a shared disk: two torchrun agents with a folder each. One of them is killed
and started again. By hand: ./run_tests.sh -m slow tests/recipes/test_machines.py"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import checkpoint
from recipes import konkani_conformer as recipe
from tests import small
from tests.recipes import runs
from tests.recipes.runs import TINY, newest, ran

pytestmark = pytest.mark.slow
STEPS = "--max_steps 40 --save_every 4 --eval_every 10 --keep_last 30 --dropout 0 --no_spec_augment".split()
ONE = ["--batch_size", "4", "--gradient_accumulation_steps", "1"]
TWO = ["--batch_size", "2", *ONE[2:]]


@pytest.fixture(scope="module")
def flags(manifests):
    return [*manifests, *TINY, *STEPS]


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory) -> checkpoint.Saved:
    """The last checkpoint of one process."""
    folder = tmp_path_factory.mktemp("one")
    ran(recipe, *flags, *ONE, "--output_dir", folder)
    return newest(folder, recipe)


class Machine:
    """A torchrun agent in a folder of its own."""

    def __init__(self, folder: Path, endpoint: str, *flags: str, is_head: bool):
        folder.mkdir(exist_ok=True)
        self.checkpoints = folder / "out" / "checkpoints"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        launch += ["--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "test"]
        launch += ["--rdzv_endpoint", endpoint, "--rdzv_conf", f"is_host={int(is_head)}"]
        words = [*launch, "--max_restarts", "5", *runs.command(recipe, *TWO, *flags)[1:]]
        self.log = open(folder / f"log{len(list(folder.glob('log*')))}", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*map(str, words), "--output_dir", "out"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def lose(self) -> None:
        """Kills the agent and its processes, as a power cut does."""
        family = [self.process.pid]
        for number in family:
            children = Path(f"/proc/{number}/task/{number}/children").read_text()
            family += map(int, children.split())
        for number in family:
            os.kill(number, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.lose()
        self.log.close()


def wait_for_step(machines: list[Machine], step: int) -> None:
    """Waits until one of the machines, the first of the job, has saved this update."""
    end = time.monotonic() + 120
    while True:
        found = [path for machine in machines for path in machine.checkpoints.glob("*.pt")]
        if max(map(checkpoint.step_of, found), default=0) >= step:
            return
        assert time.monotonic() < end and machines[0].process.poll() is None
        time.sleep(0.1)


@pytest.mark.parametrize("way", [[], ["--sharded"], ["--use_cpu_offload"]])
def test_a_machine_is_lost_and_comes_back(flags, reference, way, tmp_path):
    endpoint = f"127.0.0.1:{runs.free_port()}"
    first = Machine(tmp_path / "a", endpoint, *flags, *way, is_head=True)
    second = Machine(tmp_path / "b", endpoint, *flags, *way, is_head=False)
    machines = [first, second]
    try:
        wait_for_step(machines, 12)
        second.lose()
        machines.append(Machine(tmp_path / "b", endpoint, *flags, *way, is_head=False))
        assert first.process.wait(240) == 0 and machines[2].process.wait(60) == 0
    finally:
        for machine in machines:
            machine.end()
    found = [path for each in (first, machines[2]) for path in each.checkpoints.glob("*40.pt")]
    last = checkpoint.read(found[0], recipe.RECIPE)
    assert last.progress.step == reference.progress.step == 40
    ours, others = [
        torch.cat([w.flatten() for w in each.model.values()]) for each in (last, reference)
    ]
    # In fp32: gradients are added in another order, in 40 updates.
    assert small.relative(ours, others) < 5e-4
