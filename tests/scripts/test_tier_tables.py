"""The tables in the recipes' pages are those of the preset scripts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tier_tables as tables

ROOT = Path(__file__).resolve().parents[2]
COMMAND, PREDICTIONS = "benchmarks/tier_tables.py", "benchmarks/tiers.json"
SCRIPTS = {
    "konkani_conformer": "run_training_memory_optimized.sh",
    "whisper_vietnamese": "run_whisper_vietnamese.sh",
    "whisper_morse": "run_whisper_morse.sh",
    "parakeet_tdt": "run_parakeet_tdt.sh",
    "xtts_amharic": "run_xtts_amharic.sh",
}
KONKANI_SIZES = ("minimal", "optimized", "original")
PAGE = "# Title\n\n<!-- tiers: begin -->\nold\n<!-- tiers: end -->\n\nThe end.\n"
LETTERS = {
    "R": ["--gradient_checkpointing"],
    "F": ["--freeze_encoder"],
    "8": ["--optimizer", "adamw_8bit"],
    "H": ["--use_cpu_offload"],
}


def tier_tables(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(root / COMMAND), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A copy of the scripts, made-up pages and predictions, with their tables written."""
    root = tmp_path_factory.mktemp("project")
    for name in [COMMAND, "common/env.sh", *SCRIPTS.values()]:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "recipes").mkdir()
    for name in SCRIPTS:
        (root / "recipes" / f"{name}.md").write_text(PAGE, encoding="utf-8")
    entries = {"torch": "3.1.4"}
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
    return json.loads((root / PREDICTIONS).read_text(encoding="utf-8"))[f"{script} {tier} {size}"][
        "gib"
    ]


def table_of(page: Path) -> tuple[list[str], dict[str, list[str]]]:
    """The cells of the header, and those of each tier without its name."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return header, {row[0].split("`")[1]: row[1:] for row in rows}


def printed(script: str, *words: str) -> list[str] | None:
    """The command of a preset, or None if it is refused."""
    command = [ROOT / script, *words, "--print"]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "GPUS": ""}, timeout=60
    )
    assert result.returncode == 0 or "does not fit" in result.stderr
    return result.stdout.split() if result.returncode == 0 else None


def cut_of(words: list[str]) -> str:
    batch, accumulation = (
        words[words.index(f"--{name}") + 1]
        for name in ("batch_size", "gradient_accumulation_steps")
    )
    return f"{batch} x {accumulation}"


@pytest.mark.parametrize(
    ("recipe", "tiers", "sizes"),
    [
        (
            "whisper_vietnamese",
            "4gb 6gb 8gb 16gb 24gb a100 cpu",
            "tiny base small medium large turbo",
        ),
        (
            "whisper_morse",
            "4gb 6gb 8gb 16gb 24gb 32gb cpu",
            "tiny base small many medium large turbo",
        ),
        ("parakeet_tdt", "8gb 16gb 24gb a100 cpu", "110m 0.6b"),
        ("xtts_amharic", "8gb 12gb 16gb 24gb a100 cpu", "full small_data"),
    ],
)
def test_every_cell_is_what_the_script_prints(written, recipe, tiers, sizes):
    header, rows = table_of(written / "recipes" / f"{recipe}.md")
    assert [cell.split("`")[1] for cell in header[1:]] == sizes.split() and list(
        rows
    ) == tiers.split()
    for tier, cells in rows.items():
        for size, cell in zip(sizes.split(), cells, strict=True):
            words = printed(SCRIPTS[recipe], tier, size, "--model_dir", "model")
            if words is None:
                assert cell == "-"
                continue
            row, *gib = cell.split(", ")
            letters = row.split()[3:]
            assert row == " ".join([cut_of(words), *letters])
            assert gib == (
                [] if tier == "cpu" else [f"{predicted(written, SCRIPTS[recipe], tier, size):.1f}"]
            )
            for letter, flag in LETTERS.items():
                assert (letter in letters) == (" ".join(flag) in " ".join(words)), (tier, size)


def test_konkanis_table_has_cuts_and_predictions(written):
    header, tiers = table_of(written / "recipes/konkani_conformer.md")
    assert header[2:] == [
        "`minimal` (128, 6+3)",
        "`optimized` (192, 8+4)",
        "`original` (256, 12+6)",
    ]
    assert list(tiers) == "4gb 6gb 8gb t4 16gb 24gb a100 cpu".split()
    for tier, (cut, *_) in tiers.items():
        assert cut == cut_of(printed(SCRIPTS["konkani_conformer"], tier))
        if tier != "cpu":
            gib = [
                predicted(written, SCRIPTS["konkani_conformer"], tier, size)
                for size in KONKANI_SIZES
            ]
            assert tiers[tier][1:] == [f"{number:.2f}" for number in gib]
    assert tiers["cpu"][1:] == ["fp32"] * 3


def test_only_the_text_between_the_markers_changes_and_a_second_run_changes_nothing(written):
    pages = [written / "recipes" / f"{name}.md" for name in SCRIPTS]
    before = [page.read_text(encoding="utf-8") for page in pages]
    for text in before:
        assert (
            text.startswith(PAGE.split("old")[0])
            and text.endswith(PAGE.split("old")[1])
            and "\nold\n" not in text
        )
    for arguments in ([], ["--check"]):
        result = tier_tables(written, *arguments)
        assert result.returncode == 0 and not result.stdout + result.stderr
    assert [page.read_text(encoding="utf-8") for page in pages] == before


def test_check_fails_if_a_page_differs_and_a_missing_page_is_named(written, tmp_path):
    root = shutil.copytree(written, tmp_path / "copy")
    page = root / "recipes/whisper_morse.md"
    table = page.read_text(encoding="utf-8")
    page.write_text(table.replace("48 x 2", "47 x 2", 1), encoding="utf-8")
    (root / "recipes/konkani_conformer.md").unlink()
    result = tier_tables(root, "--check")
    assert result.returncode == 1 and "47 x 2" in page.read_text(encoding="utf-8")
    assert (
        result.stderr
        == "error: recipes/whisper_morse.md: its table differs from run_whisper_morse.sh: run"
        " python benchmarks/tier_tables.py\n"
    )
    assert (
        result.stdout
        == "recipes/konkani_conformer.md: there is no such page, so its table is not written\n"
    )
    assert tier_tables(root).returncode == 0 and page.read_text(encoding="utf-8") == table
    assert not (root / "recipes/konkani_conformer.md").exists()
    page.write_text("# No markers\n", encoding="utf-8")
    result = tier_tables(root)
    assert result.returncode == 1 and result.stderr.startswith(
        "error: recipes/whisper_morse.md: it needs one line"
    )


def test_the_note_names_the_letters_of_the_table_the_version_and_the_longest_utterances(written):
    notes = {
        name: (written / "recipes" / f"{name}.md").read_text(encoding="utf-8") for name in SCRIPTS
    }
    letters = {
        "konkani_conformer": "",
        "whisper_vietnamese": "RF8H",
        "parakeet_tdt": "R8",
        "xtts_amharic": "R8",
    }
    for name, expected in letters.items():
        assert [
            letter for letter in "RF8H" if f" {letter}: " in " ".join(notes[name].split())
        ] == list(expected)
    longest = {
        "konkani_conformer": "33.3 s",
        "whisper_morse": "30 s",
        "parakeet_tdt": "22.2 s",
        "xtts_amharic": "11.6 s",
    }
    for name, seconds in longest.items():
        text = " ".join(notes[name].split())
        assert (
            "(torch 3.1) for " in text
            and f" of {seconds}" in text
            and "`python benchmarks/tiers.py`" in notes[name]
        )
    for name, text in notes.items():
        assert ("A dash: does not fit." in text) == ("whisper" in name)
        assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"row": "23 x 4"},
            "{row} is not in tiers.json: run python benchmarks/tiers.py run_whisper_morse.sh",
        ),
        ({"verdict": "tight"}, "{row} is predicted not to fit (tight): change the row"),
    ],
)
def test_a_row_needs_a_prediction_that_it_fits(written, tmp_path, change, message):
    root = shutil.copytree(written, tmp_path / "copy")
    entries = json.loads((root / PREDICTIONS).read_text(encoding="utf-8"))
    row = entries["run_whisper_morse.sh 6gb tiny"]["row"]
    entries["run_whisper_morse.sh 6gb tiny"].update(change)
    (root / PREDICTIONS).write_text(json.dumps(entries), encoding="utf-8")
    for arguments in ([], ["--check"]):
        result = tier_tables(root, *arguments)
        assert result.returncode == 1
        assert (
            result.stderr
            == f"error: run_whisper_morse.sh: tier 6gb, size tiny: {message.format(row=row)}\n"
        )
    for name in SCRIPTS:
        page = f"recipes/{name}.md"
        assert (root / page).read_text(encoding="utf-8") == (written / page).read_text(
            encoding="utf-8"
        )


def test_the_recipes_pages_are_up_to_date():
    result = tier_tables(ROOT, "--check")
    assert result.returncode == 0, result.stderr
