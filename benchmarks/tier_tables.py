"""Writes the tables of the preset scripts into the recipes' pages, between the two markers below.

    python benchmarks/tier_tables.py [--check]

The rows are what each script prints with --rows; common/env.sh describes their form. Their memory
is in tiers.json, which benchmarks/tiers.py writes. --check writes nothing and fails if a page is
not up to date."""

import argparse
import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tiers: begin -->", "<!-- tiers: end -->"
CARDS = {"t4": "T4, 12 GB", "12gb": "also a T4", "16gb": "RTX 4080", "a100": "80 GB"}
LETTERS = {
    "R": "gradient checkpointing",
    "F": "frozen encoder (needs pretrained weights)",
    "8": "8-bit AdamW",
    "H": "optimizer states in host memory",
}


class Outdated(Exception):
    """A row without a prediction, or one that does not fit. The message says what to do, in one
    line."""


def read_rows(script: str) -> list[list[str]]:
    """The words of each row of a script's table, without comments."""
    result = subprocess.run([ROOT / script, "--rows"], check=True, capture_output=True, text=True)
    lines = [line.split("#")[0].split() for line in result.stdout.splitlines()]
    return [words for words in lines if words]


def predictions() -> dict:
    """The content of tiers.json: {"torch": version, "script tier size": {"row": cell, "gib": at the
    peak, "verdict": text}}."""
    path = predictions_file()
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def predictions_file() -> Path:
    return ROOT / "benchmarks/tiers.json"


def names(rows: list[list[str]], column: int) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows if row[column] != "*"))


def sizes_of(rows: list[list[str]]) -> list[str]:
    return [size for size in names(rows, 1) if size != "demo"]  # which is the same in every tier


def row_of(rows: list[list[str]], tier: str, size: str) -> list[str]:
    """The row that counts, as `pick_row` in common/env.sh chooses it."""
    return next(
        row for row in rows if row[0] in (tier, "*") and row[1] in (size, "*") and row[2] != "+"
    )


def planned_rows(rows: list[list[str]]) -> list[tuple[str, str, str]]:
    """Tier, size and text of each row that needs a GPU."""
    cells = [
        (tier, size, cell(row_of(rows, tier, size)))
        for tier in names(rows, 0)
        for size in sizes_of(rows)
    ]
    return [(tier, size, text) for tier, size, text in cells if tier != "cpu" and text != "-"]


def cell(row: list[str]) -> str:
    if row[2] == "!":
        return "-"
    letters = itertools.takewhile(lambda word: not word.startswith("--"), row[4:])
    return " ".join([row[2], "x", row[3], *letters])


def memory(script: str, rows: list[list[str]]) -> dict[tuple[str, str], float]:
    """GiB of each tier and size. Raises `Outdated`."""
    entries, gib = predictions(), {}
    for tier, size, text in planned_rows(rows):
        entry = entries.get(f"{script} {tier} {size}", {})
        if entry.get("row") != text:
            raise Outdated(
                f"tier {tier}, size {size}: {text} is not in tiers.json: run python"
                f" benchmarks/tiers.py {script}"
            )
        if entry["verdict"] != "fits":
            raise Outdated(
                f"tier {tier}, size {size}: {text} is predicted not to fit ({entry['verdict']}):"
                " change the row"
            )
        gib[tier, size] = entry["gib"]
    return gib


def label(tier: str) -> str:
    return f"`{tier}` ({CARDS[tier]})" if tier in CARDS else f"`{tier}`"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def note(rows: list[list[str]], cells: str, longest: str) -> str:
    """The text under a table: what `cells` are, for which `longest` utterances."""
    texts = [
        text
        for tier in names(rows, 0)
        for size in sizes_of(rows)
        for text in [cell(row_of(rows, tier, size))]
    ]
    letters = [
        f"{letter}: {what}."
        for letter, what in LETTERS.items()
        if any(letter in text.split()[3:] for text in texts)
    ]
    torch = ".".join(predictions()["torch"].split(".")[:2])
    return " ".join(
        [
            (
                f"{cells} the GiB that a step allocates at its peak, *predicted* by"
                f" `python~benchmarks/tiers.py` (torch {torch}) for {longest}, not measured on"
                " these GPUs. CUDA's context and libraries take 0.55 GiB more. A row fits if a"
                " tenth of the GPU's memory stays free."
            ),
            *letters,
            *["A dash: does not fit."] * ("-" in texts),
        ]
    )


def konkani_table(script: str, longest: str) -> str:
    rows = read_rows(script)
    gib, lines = memory(script, rows), []
    shapes = {row[1]: f"({row[4]}, {row[6]}+{row[8]})" for row in rows if row[2] == "+"}
    for tier in names(rows, 0):
        row, *others = (row_of(rows, tier, size) for size in shapes)
        assert all(other == row for other in others), f"tier {tier}: the sizes have different rows"
        lines.append(
            [
                label(tier),
                cell(row),
                *("fp32" if tier == "cpu" else f"{gib[tier, size]:.2f}" for size in shapes),
            ]
        )
    header = [
        "tier",
        "micro-batch x accumulation",
        *(f"`{size}` {shape}" for size, shape in shapes.items()),
    ]
    cells = "Every size has the same micro-batch x accumulation steps. The other cells are"
    return f"{markdown(header, lines)}\n\n{wrapped(note(rows, cells, longest))}"


def table_of_cells(script: str, longest: str) -> str:
    rows = read_rows(script)
    gib = memory(script, rows)

    def full_cell(tier: str, size: str) -> str:
        text = cell(row_of(rows, tier, size))
        return f"{text}, {gib[tier, size]:.1f}" if (tier, size) in gib else text

    lines = [
        [label(tier), *(full_cell(tier, size) for size in sizes_of(rows))]
        for tier in names(rows, 0)
    ]
    header = [
        "tier",
        *("`many` (small)" if size == "many" else f"`{size}`" for size in sizes_of(rows)),
    ]
    return f"{markdown(header, lines)}\n\n{wrapped(note(rows, 'Each cell gives micro-batch x accumulation steps, then', longest))}"


def wrapped(text: str) -> str:
    """Lines of a page; ~ stands for a space at which no line ends."""
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False).replace(
        "~", " "
    )


# The page of each script, how its table is written, and the utterances that its rows are planned
# for.
PAGES = {
    "run_training_memory_optimized.sh": (
        "recipes/konkani_conformer.md",
        konkani_table,
        "utterances of 33.3 s (30 s at 0.9 times the speed)",
    ),
    "run_whisper_vietnamese.sh": (
        "recipes/whisper_vietnamese.md",
        table_of_cells,
        "windows of 30 s",
    ),
    "run_whisper_morse.sh": ("recipes/whisper_morse.md", table_of_cells, "windows of 30 s"),
    "run_parakeet_tdt.sh": (
        "recipes/parakeet_tdt.md",
        table_of_cells,
        "utterances of 22.2 s (20 s at 0.9 times the speed)",
    ),
    "run_xtts_amharic.sh": ("recipes/xtts_amharic.md", table_of_cells, "utterances of 11.6 s"),
}


def write(scripts: Iterable[str], check: bool = False) -> list[str]:
    """Writes the tables of these scripts, or only compares them, and returns what is wrong, a line
    for each page."""
    problems = []
    for script in scripts:
        name, table, longest = PAGES[script]
        page = ROOT / name
        if not page.exists():
            print(f"{name}: there is no such page, so its table is not written")
            continue
        text = page.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            problems.append(f"error: {name}: it needs one line {BEGIN} and below it one line {END}")
            continue
        try:
            new = f"{text.split(BEGIN)[0]}{BEGIN}\n{table(script, longest)}\n{END}{text.split(END)[1]}"
        except Outdated as error:
            problems.append(f"error: {script}: {error}")
            continue
        if check and new != text:
            problems.append(
                f"error: {name}: its table differs from {script}: run python"
                " benchmarks/tier_tables.py"
            )
        elif new != text:
            page.write_text(new, encoding="utf-8")
            print(f"{name}: written")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if a page is not up to date, and write nothing"
    )
    sys.exit("\n".join(write(PAGES, parser.parse_args().check)) or None)
