"""The predictions of the preset scripts' rows, with a stub for the recipes; one plan is real."""

import importlib
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import tier_tables, tiers
from common import preset
from tests import presets
from tests.recipes import runs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "run_xtts_amharic.sh"
PAGE = "recipes/xtts_amharic.md"
# A micro-batch of N needs N GiB, or N / 4 with checkpointing, and half with adapters. One of 3 fails; so does advice on one
# above 100, after 20 s.
STUB = """
import argparse, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=float)
parser.add_argument("--dry_run")
parser.add_argument("--lora")
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--no_gradient_checkpointing", action="store_false", dest="gradient_checkpointing")
args, others = parser.parse_known_args()
assert os.environ["OMP_NUM_THREADS"] == "1" and not os.listdir()
if args.batch_size == 3:
    print("learning rate: 1")
    sys.exit("error: there is no such row")
gib = args.batch_size / (4 if args.gradient_checkpointing else 1) / (2 if args.lora else 1)
room = float(args.dry_run.split("x")[-1].rstrip("gb").replace("a100", "80"))
print("Dry run: something")
print(f"Peak: {gib:.2f} GiB allocated in training, backward" if gib > 0.3 else f"Peak: {gib * 1024:.1f} MiB allocated")
print("Verdict:", "fits" if gib <= 0.9 * room else "tight" if gib <= room else "does not fit", "(it fits if 10 % stay free)")
if gib > room:
    if args.batch_size > 100:
        sys.exit(time.sleep(20) or 7)
    print("  --gradient_checkpointing: 1.00 GiB less")
    print("Peak with these flags: 1.00 GiB")
    sys.exit(3)
"""


ROWS = """
*     demo       16 1
8gb   full       16 15 R 8
12gb  full       24 10 R
16gb  full       5 48
24gb  full       10 24
a100  full       40 6
cpu   full       4 60 R
8gb   little 8 1 R 8
12gb  little 8 1 R
16gb  little 4 2
24gb  little 8 1
a100  little 8 1
cpu   little 4 2 R
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A copy of the scripts with a stub for XTTS's recipe; `benchmarks` writes there."""
    for name in ["common/env.sh", "common/preset.py", SCRIPT, PAGE]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (tmp_path / SCRIPT).read_text(encoding="utf-8")
    start = text.index("rows='") + len("rows='")
    (tmp_path / SCRIPT).write_text(
        text[:start] + ROWS + text[text.index("'", start) :], encoding="utf-8"
    )
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "recipes/xtts_amharic.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setattr(tier_tables, "ROOT", tmp_path)
    monkeypatch.setenv("GPUS", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def change(project: Path, *pairs: tuple[str, str]) -> None:
    text = (project / SCRIPT).read_text(encoding="utf-8")
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (project / SCRIPT).write_text(text, encoding="utf-8")


def run(monkeypatch, *words: str) -> str | None:
    """What `python benchmarks/tiers.py` ends with: None, or a message."""
    monkeypatch.setattr(sys, "argv", ["tiers.py", *words])
    try:
        return tiers.main()
    except SystemExit as end:
        return end.code


def test_every_row_is_planned_and_written(project, monkeypatch, capsys):
    change(
        project,
        ("a100  full       40 6", "a100  full       1 240 R"),
        ("16gb  full       5 48", "16gb  full       12 20"),
    )
    torch = version("torch").split("+")[0]
    other = "run_parakeet_tdt.sh 8gb 110m"
    known = {"torch": {SCRIPT: torch}, other: {"row": "x"}, f"{SCRIPT} 8gb gone": {}}
    (project / "benchmarks/tiers.json").write_text(json.dumps(known), encoding="utf-8")
    assert run(monkeypatch, SCRIPT) is None
    lines = (project / "benchmarks/tiers.json").read_text(encoding="utf-8").splitlines()
    entries = json.loads("".join(lines))
    assert len(lines) == len(entries) + 2
    assert lines[1:-1] == sorted(lines[1:-1], key=lambda line: ("torch" not in line, line))
    assert entries["torch"] == {SCRIPT: torch}
    assert other in entries and f"{SCRIPT} 8gb gone" not in entries
    assert len(entries) == 2 + 5 * 2  # neither the CPU nor the demo
    assert entries[f"{SCRIPT} 8gb full"] == {"row": "16 x 15 R 8", "gib": 4.0, "verdict": "fits"}
    in_mib = {"row": "1 x 240 R", "gib": 0.25, "verdict": "fits"}
    assert entries[f"{SCRIPT} a100 full"] == in_mib
    output = capsys.readouterr().out
    assert f"{SCRIPT} 12gb little: 8 x 1 R: 2.00 GiB, fits, " in output
    assert f"{PAGE}: written" in output
    page = (project / PAGE).read_text(encoding="utf-8")
    assert "| `16gb` (RTX 4080) | 12 x 20, 12.0 | 4 x 2, 4.0 |" in page


def test_rows_that_do_not_pass_are_listed_and_the_page_stays(project, monkeypatch, capsys):
    change(
        project,
        ("8gb   full       16 15 R 8", "8gb   full       10 24"),
        ("16gb  full       5 48", "16gb  full       15 16"),
        ("24gb  full       10 24", "24gb  full       3 80"),
    )
    page = (project / PAGE).read_text(encoding="utf-8")
    message = run(monkeypatch, SCRIPT, "--jobs", "3")
    assert message.splitlines() == [
        "these rows do not pass:",
        f"{SCRIPT} 8gb full: 10 x 24: does not fit",
        f"{SCRIPT} 16gb full: 15 x 16: tight",
        f"{SCRIPT} 24gb full: 3 x 80: not planned",
    ]
    output = capsys.readouterr().out
    assert "Peak with these flags: 1.00 GiB\n" in output
    assert "24gb full: 3 x 80: not planned: status 1: error: there is no such row, " in output
    entries = tier_tables.predictions()
    expected = {"row": "10 x 24", "gib": 10.0, "verdict": "does not fit"}
    assert entries[f"{SCRIPT} 8gb full"] == expected
    assert f"{SCRIPT} 24gb full" not in entries
    assert (project / PAGE).read_text(encoding="utf-8") == page


def test_only_rows_that_changed_are_planned_again(project, monkeypatch, capsys):
    assert run(monkeypatch, SCRIPT) is None
    assert capsys.readouterr().out.count(" GiB, ") == 10
    change(project, ("8gb   full       16 15 R 8", "8gb   full       12 20 R 8"))
    assert run(monkeypatch, SCRIPT, "--changed") is None
    output = capsys.readouterr().out
    assert f"{SCRIPT} 8gb full: 12 x 20 R 8: 3.00 GiB, fits, " in output
    assert output.count(" GiB, ") == 1 and len(tier_tables.predictions()) == 1 + 10
    assert run(monkeypatch, SCRIPT, "--changed") is None
    assert not capsys.readouterr().out


def test_a_wrong_name_is_an_error(monkeypatch, capsys):
    assert run(monkeypatch, "run_nothing.sh") == 2
    assert "run_nothing.sh is not one of run_" in capsys.readouterr().err


def test_every_script_and_every_letter_is_known():
    scripts = {path.name for path in ROOT.glob("run_*.sh")} - {"run_tests.sh", "run_webui.sh"}
    assert set(tier_tables.SCRIPTS) == scripts
    assert set(preset.LETTERS) == set(tier_tables.LETTERS)


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
