"""Pieces that measure memory: the rows of the preset scripts, each under a cap that leaves what its
tier's card has; memory that is short in the middle; the largest micro-batch that fits."""

import functools
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tier_tables, tiers
from benchmarks.gpu.bench import Bench, Piece, Skipped
from benchmarks.gpu.correctness import EXACT, Demo, difference, trial_flags
from dry_run.cards import CONTEXT, find_card

UPDATES = 3
MICRO_BATCHES = 3  # in an update: the second one meets gradients, and the third is ahead
FIRST = 14  # rows, the tightest, that come before the measurements of speed
SHORT_SECONDS = 11.0  # of utterances: what a step takes must be much more than the weights
LARGEST = 16  # times the micro-batch of the row, at most
TOTAL = 1.03  # a card may have a little less memory than its tier's
LANGUAGE = {"nemotron": ("--language", "auto")}  # the noise has none
SMALL_ROWS = (
    ("run_training_memory_optimized.sh", "4gb", "minimal"),
    ("run_training_memory_optimized.sh", "t4", "minimal"),
)
SMALL_FLAGS = "--batch_size 2 --gradient_accumulation_steps 2 --max_duration 2".split()
SEARCHED = (
    ("run_parakeet_tdt.sh", "8gb", "0.6b"),
    ("run_xtts_amharic.sh", "8gb", "full"),
    ("run_whisper_vietnamese.sh", "8gb", "small"),
)


@dataclass(frozen=True)
class Row:
    """A row of a preset script: `cell` is its text in the table, `gib` its predicted peak (None if
    tiers.json has another row)."""

    script: str
    tier: str
    size: str
    cell: str
    gib: float | None

    @property
    def key(self) -> str:
        return f"{self.script} {self.tier} {self.size}"

    @property
    def cap(self) -> int:
        """Bytes that the allocator would have on the tier's card."""
        return find_card(self.tier).total - CONTEXT

    @property
    def share(self) -> float:
        """Of what the allocator would have, predicted."""
        return (self.gib or 0) * 2**30 / self.cap

    def command(self, *more: str) -> tuple[str, list[str]]:
        """The recipe and the words of its plan, as tiers.py plans it. Raises `Skipped`."""
        more = (*more, *LANGUAGE.get(self.size, ()))
        try:
            path, *words = tiers.command_of(self.script, self.tier, self.size, self.tier, *more)
        except tiers.NoPlan as error:
            raise Skipped(str(error)) from None
        return Path(path).stem, words


def all_rows() -> list[Row]:
    predicted = tier_tables.predictions()
    found = []
    for script in tier_tables.SCRIPTS:
        for tier, size, cell in tier_tables.planned_rows(tier_tables.read_rows(script)):
            entry = predicted.get(f"{script} {tier} {size}", {})
            gib = entry["gib"] if entry.get("row") == cell else None
            found.append(Row(script, tier, size, cell, gib))
    return found


def rows_of(bench: Bench) -> list[Row]:
    """The rows that the card can hold, the tightest first; two small ones on a CPU."""
    if bench.is_small:
        return [row for row in all_rows() if (row.script, row.tier, row.size) in SMALL_ROWS]
    total = TOTAL * bench.gib * 2**30
    rows = [row for row in all_rows() if find_card(row.tier).total <= total]
    return sorted(rows, key=lambda row: -row.share)


def pieces(bench: Bench) -> list[Piece]:
    """Rows, the first `FIRST` of which are the tightest."""
    found = []
    for row in rows_of(bench):
        gib = find_card(row.tier).total / 2**30
        seconds = 30 + 2 * (row.gib or 10)
        run = functools.partial(measure, row=row)
        found.append(Piece(f"row {row.key}: {row.cell}", run, seconds, gib))
    return found


def measure(bench: Bench, row: Row) -> dict:
    """Updates of the longest utterances of a row."""
    recipe, words = row.command(*(SMALL_FLAGS if bench.is_small else []))
    cap = 0 if bench.is_small else min(row.cap, int(bench.gib * 2**30) - CONTEXT)
    updates = 2 if bench.is_small else UPDATES
    found = bench.trial(recipe, words, 60, updates=updates, micro_batches=MICRO_BATCHES, cap=cap)
    return {"key": row.key, "row": row.cell, "predicted": row.gib, "cap": cap, **found}


def short_of_memory(bench: Bench, demo: Demo) -> dict:
    """The losses of a run that runs out of memory in the middle, and of one that does not."""
    words = [*trial_flags(demo, 2.0 if bench.is_small else SHORT_SECONDS), *EXACT]
    updates = 3 if bench.is_small else 5
    whole = bench.trial(demo.recipe, words, 20, updates=updates)
    short = bench.trial(demo.recipe, words, 20, updates=updates, short_of_memory_at=2)
    found = {"losses": whole["losses"], "short": short["losses"]}
    found["smaller micro-batches"] = short["short_of_memory"]
    if "failed" in short:
        return {**found, "failed": short["failed"]}
    return {**found, "differs by": difference(short["losses"], whole["losses"])}


def largest_pieces(bench: Bench) -> list[Piece]:
    rows = {(row.script, row.tier, row.size): row for row in rows_of(bench)}
    found = []
    for place in SMALL_ROWS[:1] if bench.is_small else SEARCHED:
        if place in rows:
            run = functools.partial(largest, row=rows[place])
            gib = find_card(place[1]).total / 2**30
            found.append(Piece(f"largest micro-batch {rows[place].key}", run, 75, gib))
    return found


def largest(bench: Bench, row: Row) -> dict:
    """The largest micro-batch of which two fit, beside that of the row."""
    recipe, words = row.command(*(SMALL_FLAGS if bench.is_small else []))
    batch = 2 if bench.is_small else int(row.cell.split()[0])
    most = 2 * batch if bench.is_small else LARGEST * batch
    cap = 0 if bench.is_small else min(row.cap, int(bench.gib * 2**30) - CONTEXT)
    found = bench.trial(
        recipe, words, 75, updates=1, micro_batches=2, cap=cap, largest=most, most_seconds=60.0
    )
    return {"key": row.key, "row": row.cell, **found}
