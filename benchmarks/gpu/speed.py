"""Pieces that measure speed: updates of each recipe's row with and without what saves memory, the
step beside that of transformers, and long runs of the largest models."""

import functools
import importlib.util
import json
import math

from benchmarks.gpu.bench import ROOT, Bench, Failed, Piece, Skipped
from benchmarks.gpu.correctness import DEMOS, trial_flags
from benchmarks.gpu.rows import Row, all_rows
from dry_run.cards import find_card

SECONDS = 15.0  # of updates
WARM_UP = 2  # updates that are not counted
SIZES = {
    "konkani": ("run_training_memory_optimized.sh", "original"),
    "vietnamese": ("run_whisper_vietnamese.sh", "small"),
    "morse": ("run_whisper_morse.sh", "small"),
    "parakeet": ("run_parakeet_tdt.sh", "0.6b"),
    "wav2vec2": ("run_wav2vec2_ctc.sh", "300m"),
    "xtts": ("run_xtts_amharic.sh", "full"),
    "matcha": ("run_matcha_voice.sh", "full"),
}
VARIANTS = {
    "row": [],
    "offload of weights": ["--use_cpu_offload", "weights"],
    "compile": ["--torch_compile"],
    "checkpointing": ["--gradient_checkpointing"],
    "8 bits": ["--optimizer", "adamw_8bit"],
    "offload of states": ["--use_cpu_offload", "states"],
    "offload of gradients": ["--use_cpu_offload", "gradients"],
}
LETTERS = {  # of a row that has it already
    "offload of weights": "W",
    "checkpointing": "R",
    "8 bits": "8",
    "offload of states": "H",
    "offload of gradients": "G",
}
PEERS = {
    "whisper": ("--size small --clips 8", ("transformers, 30 s", "ours, 30 s", "ours")),
    "parakeet": ("--layers 24 --clips 8", ("transformers", "ours")),
}
SMALL_PEERS = {
    "whisper": ("--size tiny --clips 1 --shortest 1 --seconds 1", PEERS["whisper"][1]),
    "parakeet": ("--layers 1 --width 128 --clips 1 --seconds 2", PEERS["parakeet"][1]),
}
LARGEST = {
    "parakeet 0.6b": ("run_parakeet_tdt.sh", "0.6b"),
    "xtts full": ("run_xtts_amharic.sh", "full"),
    "whisper large": ("run_whisper_vietnamese.sh", "large"),
}
LONG = 200  # updates of the largest models
LONG_SECONDS = 60.0
LONG_BATCH = 8


def row_of(bench: Bench, place: tuple[str, str]) -> Row | None:
    """The row of the largest tier that the card can hold."""
    rows = [row for row in all_rows() if (row.script, row.size) == place]
    rows = [row for row in rows if find_card(row.tier).total <= 1.03 * bench.gib * 2**30]
    return max(rows, key=lambda row: find_card(row.tier).total, default=None)


def pieces(bench: Bench) -> dict[str, list[Piece]]:
    """The pieces of each variant."""
    found = {}
    for variant in VARIANTS:
        found[variant] = []
        for name in ["konkani"] if bench.is_small else SIZES:
            run = functools.partial(measure, name=name, variant=variant)
            seconds = 100 if variant == "compile" else 55
            found[variant].append(Piece(f"speed {name}: {variant}", run, seconds, alone=True))
    return found


def measure(bench: Bench, name: str, variant: str) -> dict:
    """Updates of utterances that are read from files, as a run makes them."""
    if bench.is_small:
        recipe, cell = DEMOS[name].recipe, "demo"
        words = [*trial_flags(DEMOS[name]), *VARIANTS[variant]]
    else:
        row = row_of(bench, SIZES[name])
        if row is None:
            raise Skipped("there is no row for this card")
        cell = row.cell
        if LETTERS.get(variant) in cell.split()[3:]:
            raise Skipped(f"the row {cell} has it already")
        recipe, words = row.command(*VARIANTS[variant])
    found = bench.trial(
        recipe,
        words,
        60,
        updates=2 if bench.is_small else 1000,
        most_seconds=SECONDS,
        micro_batches=0,
        flops=variant == "row",
    )
    return {"row": cell, **found, **summary(found)}


def summary(found: dict) -> dict:
    """Utterances a second and the share of waiting after the warm-up, or of the last update."""
    counted = slice(WARM_UP, None) if len(found["seconds"]) > WARM_UP else slice(-1, None)
    seconds = found["seconds"][counted]
    return {
        "updates": len(found["losses"]),
        "utterances a second": found["utterances"] * len(seconds) / sum(seconds),
        "waiting share": sum(found["waited"][counted]) / sum(seconds),
    }


def peer_pieces(bench: Bench) -> list[Piece]:
    return [
        Piece(f"peer {name}", functools.partial(peer, name=name), 90, alone=True) for name in PEERS
    ]


def peer(bench: Bench, name: str) -> dict:
    """The step of step.py, ours and that of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    flags, rows = (SMALL_PEERS if bench.is_small else PEERS)[name]
    words = [str(ROOT / "benchmarks/step.py"), name, *flags.split(), "--device", bench.device]
    words += ["--steps", "1" if bench.is_small else "5"]
    found = {"flags": flags}
    for row in rows:
        with bench.folder() as folder:
            try:
                output = bench.child({"run": [*words, "--child", row]}, folder, 40)
            except Failed as error:
                found[row] = {"failed": str(error).splitlines()[-1]}
                continue
        lines = [line for line in output.splitlines() if line.startswith("{")]
        found[row] = json.loads(lines[-1])
    return found


def long_pieces(bench: Bench) -> list[Piece]:
    found = []
    for name in ["parakeet"] if bench.is_small else LARGEST:
        run = functools.partial(long, name=name)
        found.append(Piece(f"{LONG} updates {name}", run, 130, alone=True))
    return found


def long(bench: Bench, name: str) -> dict:
    """Many updates of one micro-batch: are all losses finite, does memory stay flat?"""
    if bench.is_small:
        recipe, words, cell = DEMOS[name].recipe, trial_flags(DEMOS[name]), "demo"
    else:
        row = row_of(bench, LARGEST[name])
        if row is None:
            raise Skipped("there is no row for this card")
        cell = row.cell
        batch = min(LONG_BATCH, int(cell.split()[0]))
        cut = ["--batch_size", str(batch), "--gradient_accumulation_steps", "1"]
        recipe, words = row.command(*cut)
    updates = 3 if bench.is_small else LONG
    found = bench.trial(
        recipe, words, 130, updates=updates, most_seconds=LONG_SECONDS, micro_batches=0
    )
    settled = found["allocated"][len(found["allocated"]) // 4 :]
    return {
        "row": cell,
        **found,
        **summary(found),
        "finite": all(map(math.isfinite, found["losses"])),
        "memory grew by": max(settled) - settled[0],
    }
