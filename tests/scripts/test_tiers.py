"""The predictions of the preset scripts' rows: all fit, and one is planned again."""

import importlib
from pathlib import Path

import pytest

from benchmarks import tier_tables, tiers
from common import preset
from tests import presets
from tests.recipes import runs

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_is_known():
    scripts = {path.name for path in ROOT.glob("run_*.sh")} - {"run_tests.sh", "run_webui.sh"}
    assert set(tier_tables.SCRIPTS) == scripts


def test_the_tables_in_the_recipes_pages_are_up_to_date():
    assert tier_tables.write(tier_tables.SCRIPTS, check=True) == []


def test_every_row_is_planned_to_fit():
    """Also those for adapters, which no page shows."""
    entries = tier_tables.predictions()
    entries.pop("torch")
    assert [key for key, entry in entries.items() if entry["verdict"] != "fits"] == []


def test_a_real_plan_agrees_with_the_predictions():
    script = "run_training_memory_optimized.sh"
    planned, _ = tiers.plan(tiers.command_of(script, "4gb", "minimal", "4gb"))
    known = tier_tables.predictions()[f"{script} 4gb minimal"]
    assert planned["verdict"] == "fits"
    assert planned["gib"] == pytest.approx(known["gib"], rel=0.1)


@pytest.mark.parametrize("script", tier_tables.SCRIPTS)
def test_a_row_of_every_size_can_be_planned(script, tmp_path, monkeypatch):
    """Without data and weights, with the flags that tiers.py gives: the recipe reaches the plan."""
    monkeypatch.chdir(tmp_path)
    more = tier_tables.SCRIPTS[script].flags.split()
    declared = presets.declared(script)
    recipe = importlib.import_module(f"recipes.{declared.recipe}")
    rows = tier_tables.planned_rows(preset.read_rows(declared.rows))
    tiers_of = {size: tier for tier, size, _ in rows}
    for size, tier in tiers_of.items():
        plan = runs.planned(recipe, *presets.flags_of(declared, tier, size, *more))
        assert plan.batch["tokens_lengths"].min() > 0, size
