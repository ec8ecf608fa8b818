"""The tables in the recipes' pages are those of the preset scripts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tier_tables as tables
from common.preset import LETTERS, names
from tests import presets

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "benchmarks/tier_tables.py"
PREDICTIONS = "benchmarks/tiers.json"
SCRIPTS = {Path(known.page).stem: script for script, known in tables.SCRIPTS.items()}
PAGE = "# Title\n\n<!-- tiers: begin -->\nold\n<!-- tiers: end -->\n\nThe end.\n"


def tier_tables(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(root / COMMAND), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A copy of the scripts, made-up pages and predictions, with their tables written."""
    root = tmp_path_factory.mktemp("project")
    for name in [COMMAND, "common/env.sh", "common/preset.py", *SCRIPTS.values()]:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "recipes").mkdir()
    for name in SCRIPTS:
        (root / "recipes" / f"{name}.md").write_text(PAGE, encoding="utf-8")
    entries = {"torch": dict.fromkeys(SCRIPTS.values(), "3.1.4")}
    for script in SCRIPTS.values():
        for tier, size, text in tables.planned_rows(tables.read_rows(script)):
            entries[f"{script} {tier} {size}"] = {
                "row": text,
                "gib": len(entries) + 0.25,
                "verdict": "fits",
            }
    (root / PREDICTIONS).write_text(json.dumps(entries), encoding="utf-8")
    result = tier_tables(root)
    assert result.returncode == 0 and result.stdout.count(": written\n") == len(SCRIPTS), (
        result.stderr
    )
    return root


def predicted(root: Path, script: str, tier: str, size: str) -> float:
    entries = json.loads((root / PREDICTIONS).read_text(encoding="utf-8"))
    return entries[f"{script} {tier} {size}"]["gib"]


def page_of(root: Path, recipe: str) -> str:
    return (root / "recipes" / f"{recipe}.md").read_text(encoding="utf-8")


def table_of(page: str) -> tuple[list[str], dict[str, list[str]]]:
    """The cells of the header, and those of each tier without its name."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return header, {row[0].split("`")[1]: row[1:] for row in rows}


def printed(script: str, *words: str) -> list[str] | None:
    """The command of a preset, or None if it is refused."""
    found = presets.answer(script, *words)
    if "does not fit" in found.said:
        return None
    assert found.status == 0
    return found.command


def cut_of(words: list[str]) -> str:
    batch, accumulation = presets.cut_of(words)
    return f"{batch} x {accumulation}"


@pytest.mark.parametrize(
    "recipe", ["whisper_vietnamese", "whisper_morse", "parakeet_tdt", "xtts_amharic"]
)
def test_every_cell_is_what_the_script_prints(written, recipe):
    script = SCRIPTS[recipe]
    table = tables.read_rows(script)
    header, rows = table_of(page_of(written, recipe))
    sizes = [cell.split("`")[1] for cell in header[1:]]
    assert sizes == tables.sizes_of(table) and list(rows) == names(table, 0)
    for tier, cells in rows.items():
        for size, cell in zip(sizes, cells, strict=True):
            words = printed(script, tier, size, "--model_dir", "model")
            if words is None:
                assert cell == "-"
                continue
            row, *gib = cell.split(", ")
            letters = row.split()[3:]
            assert row == " ".join([cut_of(words), *letters])
            if tier == "cpu":
                assert not gib
            else:
                assert gib == [f"{predicted(written, script, tier, size):.1f}"]
            for letter, flag in LETTERS.items():
                flag_and_next = " ".join([*flag, "--"])  # another flag follows each
                assert (letter in letters) == (flag_and_next in " ".join(words)), (tier, size)


def test_konkanis_table_has_cuts_and_predictions(written):
    script = SCRIPTS["konkani_conformer"]
    header, tiers = table_of(page_of(written, "konkani_conformer"))
    shapes = {"minimal": "128, 6+3", "optimized": "192, 8+4", "original": "256, 12+6"}
    assert header[2:] == [f"`{size}` ({shape})" for size, shape in shapes.items()]
    assert list(tiers) == names(tables.read_rows(script), 0)
    for tier, (cut, *cells) in tiers.items():
        assert cut == cut_of(printed(script, tier))
        if tier == "cpu":
            assert cells == ["fp32"] * 3
        else:
            assert cells == [f"{predicted(written, script, tier, size):.2f}" for size in shapes]


def test_only_the_text_between_the_markers_changes_and_a_second_run_changes_nothing(written):
    before = [page_of(written, name) for name in SCRIPTS]
    start, end = PAGE.split("old")
    for text in before:
        assert text.startswith(start) and text.endswith(end) and "\nold\n" not in text
    for arguments in ([], ["--check"]):
        result = tier_tables(written, *arguments)
        assert result.returncode == 0 and not result.stdout + result.stderr
    assert [page_of(written, name) for name in SCRIPTS] == before


def test_check_fails_if_a_page_differs_and_a_missing_page_is_named(written, tmp_path):
    root = shutil.copytree(written, tmp_path / "copy")
    name = "recipes/whisper_morse.md"
    page = root / name
    table = page.read_text(encoding="utf-8")
    page.write_text(table.replace("48 x 2", "47 x 2", 1), encoding="utf-8")
    missing = "recipes/konkani_conformer.md"
    (root / missing).unlink()
    result = tier_tables(root, "--check")
    assert result.returncode == 1 and "47 x 2" in page.read_text(encoding="utf-8")
    differs = f"error: {name}: its table differs from run_whisper_morse.sh"
    assert result.stderr == f"{differs}: run python benchmarks/tier_tables.py\n"
    assert result.stdout == f"{missing}: there is no such page, so its table is not written\n"
    assert tier_tables(root).returncode == 0 and page.read_text(encoding="utf-8") == table
    assert not (root / missing).exists()
    page.write_text("# No markers\n", encoding="utf-8")
    result = tier_tables(root)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {name}: it needs one line")


@pytest.mark.parametrize(
    ("recipe", "letters", "longest"),
    [
        ("konkani_conformer", "", "of 33.3 s"),
        ("whisper_vietnamese", "RF8HGW", "to 30 s"),
        ("whisper_morse", "RF8HGW", "to 30 s"),
        ("parakeet_tdt", "R8GW", "of 22.2 s"),
        ("xtts_amharic", "R8W", "of 11.6 s"),
    ],
)
def test_the_note_names_the_letters_of_the_table_the_version_and_the_longest_utterances(
    written, recipe, letters, longest
):
    page = page_of(written, recipe)
    text = " ".join(page.split())
    assert "".join(letter for letter in LETTERS if f" {letter}: " in text) == letters
    assert "(torch 3.1) for " in text and f" {longest}" in text
    assert "`python benchmarks/tiers.py`" in page  # on one line
    assert ("A dash: does not fit." in text) == ("whisper" in recipe)
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": "23 x 4"}, "is not in tiers.json: run python benchmarks/tiers.py {script}"),
        ({"verdict": "tight"}, "is predicted not to fit (tight): change the row"),
    ],
)
def test_a_row_needs_a_prediction_that_it_fits(written, tmp_path, change, message):
    root = shutil.copytree(written, tmp_path / "copy")
    script = "run_whisper_morse.sh"
    entries = json.loads((root / PREDICTIONS).read_text(encoding="utf-8"))
    row = entries[f"{script} 6gb tiny"]["row"]
    entries[f"{script} 6gb tiny"].update(change)
    (root / PREDICTIONS).write_text(json.dumps(entries), encoding="utf-8")
    problem = f"{row} {message.format(script=script)}"
    for arguments in ([], ["--check"]):
        result = tier_tables(root, *arguments)
        assert result.returncode == 1
        assert result.stderr == f"error: {script}: tier 6gb, size tiny: {problem}\n"
    for name in SCRIPTS:
        assert page_of(root, name) == page_of(written, name)


def test_the_recipes_pages_are_up_to_date():
    result = tier_tables(ROOT, "--check")
    assert result.returncode == 0, result.stderr
