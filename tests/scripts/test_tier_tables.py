"""The tables in the recipes' pages are those of the preset scripts."""

from pathlib import Path

import pytest

from benchmarks import tier_tables as tables
from common.preset import LETTERS, names
from tests import presets

SCRIPTS = {Path(known.page).stem: script for script, known in tables.SCRIPTS.items()}
MORSE = "run_whisper_morse.sh"


def table_of(recipe: str) -> tuple[list[str], dict[str, list[str]]]:
    """The cells of the header of a page's table, and those of each tier without its name."""
    page = (tables.ROOT / f"recipes/{recipe}.md").read_text(encoding="utf-8")
    page = page.partition(tables.BEGIN)[2].partition(tables.END)[0]
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


def test_the_recipes_pages_are_up_to_date():
    assert tables.write(tables.SCRIPTS, check=True) == []


@pytest.mark.parametrize(
    "recipe", ["whisper_vietnamese", "whisper_morse", "parakeet_tdt", "xtts_amharic"]
)
def test_every_cell_is_what_the_script_prints(recipe):
    script = SCRIPTS[recipe]
    table = tables.read_rows(script)
    predicted = tables.memory(script, table)
    header, rows = table_of(recipe)
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
            assert gib == ([] if tier == "cpu" else [f"{predicted[tier, size]:.1f}"])
            for letter, flag in LETTERS.items():
                flag_and_next = " ".join([*flag, "--"])  # another flag follows each
                assert (letter in letters) == (flag_and_next in " ".join(words)), (tier, size)


def test_konkanis_table_has_cuts_and_predictions():
    script = SCRIPTS["konkani_conformer"]
    predicted = tables.memory(script, tables.read_rows(script))
    header, tiers = table_of("konkani_conformer")
    shapes = {"minimal": "128, 6+3", "optimized": "192, 8+4", "original": "256, 12+6"}
    assert header[2:] == [f"`{size}` ({shape})" for size, shape in shapes.items()]
    for tier, (cut, *cells) in tiers.items():
        assert cut == cut_of(printed(script, tier))
        if tier == "cpu":
            assert cells == ["fp32"] * 3
        else:
            assert cells == [f"{predicted[tier, size]:.2f}" for size in shapes]
