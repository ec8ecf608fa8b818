"""Writes the tables of the preset scripts into the recipes' pages, between the two markers below.

    python benchmarks/tier_tables.py [--check]

The rows are what each script prints with --rows; common/preset.py describes their form. Their
memory is in tiers.json, which benchmarks/tiers.py writes. --check writes nothing and fails if a
page is not up to date."""

import itertools
import json
import subprocess
import sys
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common import preset

PREDICTIONS = ROOT / "benchmarks/tiers.json"
BEGIN = "<!-- tiers: begin -->"
END = "<!-- tiers: end -->"
CARDS = {"16gb": "RTX 4080", "a100": "80 GB"}
LETTERS = {
    "R": "gradient checkpointing",
    "F": "frozen encoder (needs pretrained weights)",
    "8": "8-bit AdamW",
    "H": "optimizer states in host memory (8 bytes a trained weight)",
    "G": "optimizer states and gradients in host memory (12 bytes a trained weight)",
    "W": "optimizer states, gradients and fp32 weights in host memory (16 bytes a trained weight)",
}


@dataclass(frozen=True)
class Script:
    """A preset script: its page and its longest utterances."""

    page: str  # the recipe's, where its table is written
    longest: str  # the utterances that its rows are planned for
    flags: str = ""  # with these a plan without weights and data is that of a released model


WHISPER = "--from_scratch --pad_to_30s --ctc_weight 0"
SCRIPTS = {
    "run_training_memory_optimized.sh": Script(
        "recipes/konkani_conformer.md",
        "utterances of 33.3 s (30 s at 0.9 times the speed)",
    ),
    "run_whisper_vietnamese.sh": Script(
        "recipes/whisper_vietnamese.md", "clips that are padded to 30 s", WHISPER
    ),
    "run_whisper_morse.sh": Script(
        "recipes/whisper_morse.md",
        "clips that are padded to 30 s",
        f"{WHISPER} --alignment_weight 0 --clips_per_epoch 96",
    ),
    "run_parakeet_tdt.sh": Script(
        "recipes/parakeet_tdt.md",
        "utterances of 22.2 s (20 s at 0.9 times the speed)",
        "--from_scratch",
    ),
    "run_wav2vec2_ctc.sh": Script(
        "recipes/wav2vec2_ctc.md",
        "utterances of 22.2 s (20 s at 0.9 times the speed)",
        "--from_scratch --no_train_extractor --layer_drop 0.1",
    ),
    "run_matcha_voice.sh": Script("recipes/matcha_voice.md", "utterances of 15 s"),
    "run_xtts_amharic.sh": Script("recipes/xtts_amharic.md", "utterances of 11.6 s"),
}


class Outdated(Exception):
    """A row without a prediction, or that does not fit. The message says what to do."""


# --- rows and predictions -------------------------------------------------------------------------


def read_rows(script: str) -> list[list[str]]:
    """The words of each row of a script's table, without comments."""
    result = subprocess.run([ROOT / script, "--rows"], check=True, capture_output=True, text=True)
    return preset.read_rows(result.stdout)


def predictions() -> dict:
    """The content of tiers.json: {"torch": {script: version}, "script tier size": {"row": cell,
    "gib": at the peak, "verdict": text}}; an L behind the size: with --lora."""
    return json.loads(PREDICTIONS.read_text(encoding="utf-8"))


def sizes_of(rows: list[list[str]]) -> list[str]:
    """The sizes of a table, without the demo, whose row is the same in every tier."""
    return [size for size in preset.names(rows, 1) if size != "demo"]


def row_of(rows: list[list[str]], tier: str, size: str) -> list[str]:
    """The row that counts without --sharded and --lora, as common/preset.py's `find_row` has it."""
    for row in rows:
        if row[0] in (tier, "*") and row[1] in (size, "*") and row[2] not in ("+", "S", "L"):
            return row
    raise LookupError(f"no row of tier {tier} and size {size}")


def cell(row: list[str]) -> str:
    """A row as a cell of a table, such as "8 x 12 R"; a dash if the size does not fit."""
    if row[2] == "!":
        return "-"
    letters = itertools.takewhile(lambda word: not word.startswith("--"), row[4:])
    return " ".join([row[2], "x", row[3], *letters])


def planned_rows(rows: list[list[str]]) -> list[tuple[str, str, str]]:
    """Tier, size and cell of each row that needs a GPU."""
    planned = []
    for tier, size in itertools.product(preset.names(rows, 0), sizes_of(rows)):
        text = cell(row_of(rows, tier, size))
        if tier != "cpu" and text != "-":
            planned.append((tier, size, text))
    return planned


def adapter_rows(rows: list[list[str]]) -> list[tuple[str, str, str]]:
    """Tier, size with an L behind it, and cell of each row that counts with --lora."""
    return [
        (tier, f"{size} L", cell([tier, size, *row]))
        for tier, size, mark, *row in rows
        if mark == "L"
    ]


def memory(script: str, rows: list[list[str]]) -> dict[tuple[str, str], float]:
    """GiB of each tier and size. Raises `Outdated`."""
    entries = predictions()
    gib = {}
    for tier, size, text in planned_rows(rows):
        entry = entries.get(f"{script} {tier} {size}", {})
        where = f"tier {tier}, size {size}: {text}"
        if entry.get("row") != text:
            raise Outdated(f"{where} is not in tiers.json: run python benchmarks/tiers.py {script}")
        if entry["verdict"] != "fits":
            raise Outdated(f"{where} is predicted not to fit ({entry['verdict']}): change the row")
        gib[tier, size] = entry["gib"]
    return gib


# --- tables ---------------------------------------------------------------------------------------


def table_of(script: str) -> str:
    """The table of a script in Markdown: each tier's rows and their GiB, with a column for each
    size, and a note under it. Raises `Outdated`."""
    rows = read_rows(script)
    gib = memory(script, rows)
    header = ["tier"]
    for size in sizes_of(rows):
        header.append("`many` (small)" if size == "many" else f"`{size}`")
    lines = []
    for tier in preset.names(rows, 0):
        line = [f"`{tier}` ({CARDS[tier]})" if tier in CARDS else f"`{tier}`"]
        for size in sizes_of(rows):
            text = cell(row_of(rows, tier, size))
            if (tier, size) in gib:
                text += f", {gib[tier, size]:.1f}"
            line.append(text)
        lines.append(line)
    return f"{markdown(header, lines)}\n\n{note(script, rows)}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def note(script: str, rows: list[list[str]]) -> str:
    """The text under a table: what its cells are, and for which utterances."""
    longest = SCRIPTS[script].longest
    cells_of_table = [
        cell(row_of(rows, tier, size))
        for tier, size in itertools.product(preset.names(rows, 0), sizes_of(rows))
    ]
    letters = {letter for text in cells_of_table for letter in text.split()[3:]}
    torch = ".".join(predictions()["torch"][script].split(".")[:2])
    sentences = [
        "Each cell gives micro-batch x accumulation steps, then the GiB that a step allocates at"
        f" its peak, *predicted* by `python~benchmarks/tiers.py` (torch {torch}) for {longest}, not"
        " measured on these GPUs.",
        "CUDA's context and libraries take 0.55 GiB more.",
        "A row fits if a tenth of the GPU's memory stays free.",
    ]
    sentences += [f"{letter}: {what}." for letter, what in LETTERS.items() if letter in letters]
    if "-" in cells_of_table:
        sentences.append("A dash: does not fit.")
    text = " ".join(sentences)
    text = textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)
    return text.replace("~", " ")  # ~ stands for a space at which no line ends


# --- pages ----------------------------------------------------------------------------------------


def write(scripts: Iterable[str], check: bool = False) -> list[str]:
    """Writes the tables of these scripts, or only compares them. Returns a line for each fault."""
    problems = []
    for script in scripts:
        name = SCRIPTS[script].page
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            problems.append(f"error: {name}: it needs one line {BEGIN} and below it one line {END}")
            continue
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        try:
            new = f"{before}{BEGIN}\n{table_of(script)}\n{END}{after}"
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
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="fail if a page is not up to date, and write nothing"
    )
    problems = write(SCRIPTS, parser.parse_args().check)
    if problems:
        sys.exit("\n".join(problems))
