"""Writes the tables of the preset scripts into the recipes' pages, between the two markers below.

    python benchmarks/tier_tables.py [--check]

The rows are what each script prints with --rows; common/env.sh describes their form. --check writes nothing and fails if
a page is not up to date."""

import argparse
import functools
import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tiers: begin -->", "<!-- tiers: end -->"
CARDS = {"t4": "T4, 12 GB", "12gb": "also a T4", "16gb": "RTX 4080", "a100": "80 GB"}
# GiB by size and micro-batch, as `python benchmarks/konkani_memory.py` predicts them with torch 2.11.
KONKANI_GIB = {
    "minimal": {2: 0.17, 4: 0.30, 8: 0.56},
    "optimized": {2: 0.35, 4: 0.58, 8: 1.04},
    "original": {2: 0.76, 4: 1.19, 8: 2.06},
}
KONKANI_NOTE = """\
Every size has the same micro-batch x accumulation steps. The other cells are GiB of activations, weights, gradients and
optimizer states, for utterances of 30 s and 200 characters: *predicted* by `python benchmarks/konkani_memory.py` (torch
2.11, bf16 autocast on a CPU), not measured on these GPUs. CUDA's allocator needs 11 to 26 % more than predicted, and
speed perturbation makes 33.3 s of 30 s, which needs another 9 %. The CUDA context, about 0.5 GiB, and the kernels'
workspaces come on top."""
WHISPER_NOTE = """\
Each cell gives micro-batch x accumulation steps. R: gradient checkpointing. 8: 8-bit AdamW. H: optimizer states in host
memory. F: frozen encoder (needs pretrained weights). A dash: does not fit. All rows are *predicted* to fit with
utterances of 30 s, a tenth of the memory and 0.6 GiB left free, by `python benchmarks/whisper_memory.py`, and not
measured on these GPUs."""

PARAKEET_NOTE = """\
Each cell gives micro-batch x accumulation steps. R: gradient checkpointing. 8: 8-bit AdamW. H: optimizer states in host
memory. All rows are *predicted* to fit with utterances of 20 s at 0.9 times the speed, by the arithmetic below, and not
measured on these GPUs."""

XTTS_NOTE = """\
Each cell gives micro-batch x accumulation steps. R: gradient checkpointing. 8: 8-bit AdamW. All rows are *predicted* to
fit with utterances of 11.6 s, a tenth of the memory and 0.6 GiB left free, by the arithmetic below, and not measured on
these GPUs."""


def read_rows(script: str) -> list[list[str]]:
    """The words of each row of a script's table, without comments."""
    result = subprocess.run([ROOT / script, "--rows"], check=True, capture_output=True, text=True)
    lines = [line.split("#")[0].split() for line in result.stdout.splitlines()]
    return [words for words in lines if words]


def names(rows: list[list[str]], column: int) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows if row[column] != "*"))


def row_of(rows: list[list[str]], tier: str, size: str) -> list[str]:
    """The row that counts, as `pick_row` in common/env.sh chooses it."""
    return next(row for row in rows if row[0] in (tier, "*") and row[1] in (size, "*") and row[2] != "+")


def cell(row: list[str]) -> str:
    if row[2] == "!":
        return "-"
    letters = itertools.takewhile(lambda word: not word.startswith("--"), row[4:])
    return " ".join([row[2], "x", row[3], *letters])


def label(tier: str) -> str:
    return f"`{tier}` ({CARDS[tier]})" if tier in CARDS else f"`{tier}`"


def markdown(header: list[str], lines: list[list[str]], note: str) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table) + f"\n\n{note}"


def konkani_table(rows: list[list[str]]) -> str:
    shapes = {row[1]: f"({row[4]}, {row[6]}+{row[8]})" for row in rows if row[2] == "+"}
    lines = []
    for tier in names(rows, 0):
        row, *others = (row_of(rows, tier, size) for size in shapes)
        assert all(other == row for other in others), f"tier {tier}: the sizes have different rows"
        gib = [f"{KONKANI_GIB[size][int(row[2])]:.2f}" for size in shapes]
        lines.append([label(tier), cell(row), *(["fp32"] * len(shapes) if tier == "cpu" else gib)])
    sizes = [f"`{size}` {shape}" for size, shape in shapes.items()]
    return markdown(["tier", "micro-batch x accumulation", *sizes], lines, KONKANI_NOTE)


def table_of_cells(rows: list[list[str]], note: str) -> str:
    sizes = names([row for row in rows if row[0] != "*"], 1)  # the demo is the same in every tier
    lines = [[label(tier), *(cell(row_of(rows, tier, size)) for size in sizes)] for tier in names(rows, 0)]
    header = ["`many` (small)" if size == "many" else f"`{size}`" for size in sizes]
    return markdown(["tier", *header], lines, note)


PAGES = {
    "recipes/konkani_conformer.md": ("run_training_memory_optimized.sh", konkani_table),
    "recipes/whisper_vietnamese.md": (
        "run_whisper_vietnamese.sh",
        functools.partial(table_of_cells, note=WHISPER_NOTE),
    ),
    "recipes/whisper_morse.md": ("run_whisper_morse.sh", functools.partial(table_of_cells, note=WHISPER_NOTE)),
    "recipes/parakeet_tdt.md": ("run_parakeet_tdt.sh", functools.partial(table_of_cells, note=PARAKEET_NOTE)),
    "recipes/xtts_amharic.md": ("run_xtts_amharic.sh", functools.partial(table_of_cells, note=XTTS_NOTE)),
}


def main(check: bool) -> None:
    for name, (script, table) in PAGES.items():
        page = ROOT / name
        if not page.exists():
            print(f"{name}: there is no such page, so its table is not written")
            continue
        text = page.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            sys.exit(f"error: {name}: it needs one line {BEGIN} and below it one line {END}")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        new = f"{before}{BEGIN}\n{table(read_rows(script))}\n{END}{after}"
        if check and new != text:
            sys.exit(f"error: {name}: its table differs from {script}: run python benchmarks/tier_tables.py")
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"{name}: written")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date, and write nothing")
    main(parser.parse_args().check)
