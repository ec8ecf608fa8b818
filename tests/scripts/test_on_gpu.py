"""The measurement on a GPU, as far as it can be seen on a CPU."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import on_gpu, tier_tables, trial
from dry_run.cards import find_card
from tests.recipes import runs

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    *runs.PLAIN,
    *runs.TINY,
    *("--batch_size 4 --gradient_accumulation_steps 2 --max_duration 1 --dropout 0").split(),
    *("--dry_run", "8gb"),
]


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """A function: what a trial of a tiny Konkani model finds."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str, **wanted) -> dict:
        torch.manual_seed(0)
        return trial.run("konkani_conformer", [*WORDS, *flags], trial.Wanted(**wanted))

    return run


def test_a_trial_makes_updates_and_short_memory_changes_no_loss(tried):
    whole = tried(updates=3)
    assert len(whole["losses"]) == len(whole["seconds"]) == 3 and whole["utterances"] == 8
    assert whole["losses"][2] < whole["losses"][0] and whole["smaller"] == 0
    short = tried(updates=3, short_of_memory_at=2)
    assert short["smaller"] == 1
    assert short["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_every_recipe_and_every_script_is_measured():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"template"}
    assert set(on_gpu.DEMOS) == recipes
    assert {demo.script for demo in on_gpu.DEMOS.values()} == {*tier_tables.SCRIPTS}


def test_the_rows_are_those_that_a_card_can_hold_and_the_tightest_come_first():
    rows = on_gpu.rows_for(find_card("8gb").total)
    assert {row.tier for row in rows} == {"4gb", "6gb", "8gb"}
    shares = [row.gib / row.cap for row in rows]
    assert shares == sorted(shares, reverse=True) and shares[-1] > 0
    places = {(row.script, row.size) for row in on_gpu.rows_for(math.inf)}
    assert {(demo.script, demo.size) for demo in on_gpu.DEMOS.values()} <= places


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", on_gpu.DEMOS)
def test_each_recipe_trains_on_a_gpu_with_each_level_of_offloading(name):
    cells = on_gpu.offloaded(name, on_gpu.trial_flags(on_gpu.DEMOS[name]), "cuda")
    assert all(float(cell) < 0.2 for cell in cells), cells


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    ran = subprocess.run(
        [sys.executable, "benchmarks/on_gpu.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 1 and ran.stdout == ""
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", ["rows", "correctness speed --only konkani"])
def test_all_tables_at_a_small_size(words):
    words = ["benchmarks/on_gpu.py", "--device", "cpu", *words.split()]
    ran = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "| run_training" in ran.stdout or ran.stdout.count("| konkani") == 8
    assert "status" not in ran.stdout
