"""SIGKILL at random moments, also in the middle of a save: the run ends with the same bits. Run by
hand: ./run_tests.sh -m slow tests/recipes/test_kills.py"""

import random
import time

import pytest

from recipes import konkani_conformer as recipe
from tests.recipes.runs import TINY, assert_same_state, command, kill, newest, ran, start_anew

KILLS = 40
LONG = "--batch_size 2 --gradient_accumulation_steps 2 --max_steps 16 --save_every 1 --eval_every 5".split()


@pytest.fixture(scope="module")
def flags(manifests):
    return [*manifests, *TINY, *LONG, "--resume", "auto"]


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory):
    """The last checkpoint of a run that nothing has stopped, and how many seconds it lasts as a
    process."""
    folder = tmp_path_factory.mktemp("reference")
    ran(recipe, *flags, "--output_dir", folder)
    started = time.monotonic()
    assert finished(flags, tmp_path_factory.mktemp("timing"))
    return newest(folder, recipe), time.monotonic() - started


def finished(flags, folder) -> dict:
    """The last checkpoint of the run in `folder`, which continues to its end in a process of its
    own."""
    process = start_anew(command(recipe, *flags), folder)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return newest(folder, recipe)


@pytest.mark.slow
def test_forty_kills_at_random_moments_and_the_same_bits(reference, flags, tmp_path):
    """Ten runs. Each is killed four times at a random moment of a run's length (while it starts,
    trains, saves or evaluates), and then continues to its end."""
    expected, length = reference
    dice, saving = random.Random(1), 0
    for number in range(KILLS // 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _ in range(4):
            process = start_anew(command(recipe, *flags), folder)
            time.sleep(dice.uniform(0.3, 1.0) * length)
            kill(process, may_have_ended=True)
            saving += bool(list((folder / "checkpoints").glob("*.tmp")))
        assert_same_state(finished(flags, folder), expected)
    print(f"{KILLS} kills, {saving} of them left a half-written file")
