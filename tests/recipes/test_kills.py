"""SIGKILL at random moments, the middle of a save among them: the end is the same to the bit. Run by hand:
./run_tests.sh -m slow tests/test_kills.py"""

import os
import random
import signal
import subprocess
import time

import pytest

from tests.recipes import test_konkani_commands as base

corpus, reference = base.corpus, base.reference  # fixtures
KILLS = 40


@pytest.mark.slow
def test_forty_kills_at_random_moments_and_the_same_bits(reference, corpus, tmp_path):
    """Ten runs, each killed four times at a random moment of a run's length (starting up, training, saving,
    evaluating) and then let go on to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = base.command(corpus, *base.LONG, "--save_every", "1", "--resume", "auto")
    dice, saving = random.Random(1), 0
    started = time.monotonic()
    first = base.run([*arguments, "--output_dir", str(tmp_path / "timing")], tmp_path)
    assert first.returncode == 0, first.stderr
    length = time.monotonic() - started
    for number in range(KILLS // 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _ in range(4):
            process = subprocess.Popen(
                arguments, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(dice.uniform(0.3, 1.0) * length)
            process.send_signal(signal.SIGKILL)
            process.wait()
            saving += bool(list((folder / "checkpoints").glob("*.tmp")))
        result = base.run(arguments, folder)
        assert result.returncode == 0, result.stderr
        state = base.final_state(folder)
        expected = base.final_state(reference[0])
        base.assert_same_state(state, expected)
    print(f"{KILLS} kills, {saving} of them left a half-written file")


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 9))
def test_killed_in_the_middle_of_a_save(reference, corpus, tmp_path, step):
    """Kills as soon as the temporary file of a checkpoint appears."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = base.command(corpus, *base.LONG, "--save_every", "1", "--resume", "auto")
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    temporary = tmp_path / "checkpoints" / f"checkpoint_step_{step:08d}.pt.tmp"
    final = temporary.with_suffix("")
    while process.poll() is None and not (temporary.exists() or final.exists()):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert base.run(arguments, tmp_path).returncode == 0
    base.assert_same_state(base.final_state(tmp_path), base.final_state(reference[0]))
