"""Predicts the GPU memory of every row of the preset scripts, without a GPU, for tiers.json and the
recipes' pages.

    python benchmarks/tiers.py [SCRIPT ...] [--changed] [--jobs N]
    python benchmarks/tiers.py --largest SCRIPT SIZE CARD [LETTERS ...]

A row is planned on its tier's card by the command that the script prints, with --dry_run and the
settings of a released model. The exit status is 1 if a row does not fit, is tight or cannot be
planned. --changed leaves out the rows that tiers.json has. --largest prints the row with the
largest micro-batch that fits on a card (12gb, 11.5) or on each of several that share the update
(2x16gb), for letters such as R R8 RF8, S for --sharded, or -: none; without LETTERS for the usual
ones."""

import argparse
import bisect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import tier_tables
from common.preset import LETTERS
from dry_run.cards import split_count

FLAGS = {**LETTERS, "S": ["--sharded"], "L": ["--lora", "32"]}
USUAL = ("-", "R", "8", "R8", "H", "RH", "G", "RG", "W", "RW")
FROZEN = ("F", "RF", "F8", "RF8", "FH", "RFH")
GIB = {"MiB": 1 / 1024, "GiB": 1.0}


class NoPlan(Exception):
    """A row that cannot be planned. The message says why, in one line."""


def command_of(script: str, tier: str, size: str, card: str, *more: str) -> list[str]:
    """The words of the recipe's command that a script prints for a plan, without the interpreter.
    `size`: perhaps with an L behind it. Raises `NoPlan`."""
    size, *letters = size.split()
    flags = tier_tables.SCRIPTS[script].flags.split()
    flags += [flag for letter in letters for flag in FLAGS[letter]]
    words = [str(tier_tables.ROOT / script), tier, size, *flags, *more]
    words += ["--dry_run", card, "--print"]
    printed = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "GPUS": "1"})
    if printed.returncode:
        raise NoPlan(last_line(printed.stderr.splitlines()))
    return shlex.split(printed.stdout)[1:]


def last_line(lines: list[str]) -> str:
    return lines[-1] if lines else "no message"


def plan(command: list[str], wants_advice: bool = False) -> tuple[dict, list[str]]:
    """The prediction of a recipe's command, {"gib": at the peak, "verdict": text}, and the lines of
    the advice if it does not fit, which take as long as several plans. Raises `NoPlan`."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    lines = []
    with tempfile.TemporaryDirectory() as folder:  # the current folder may have checkpoints
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environment,
        )
        with process:
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith("Verdict: ") and not wants_advice:
                    process.kill()
    output = "\n".join(lines)
    peak = re.search(r"^Peak: ([\d.]+) ([MG]iB)", output, re.MULTILINE)
    verdict = re.search(r"^Verdict: (fits|tight|does not fit)\b", output, re.MULTILINE)
    if not peak or not verdict or process.returncode not in (0, 3, -signal.SIGKILL):
        raise NoPlan(f"status {process.returncode}: {last_line(lines)}")
    advice = [line for line in lines if line.startswith(("  --", "Peak with", "These flags"))]
    return {"gib": round(float(peak[1]) * GIB[peak[2]], 2), "verdict": verdict[1]}, advice


def plan_row(script: str, tier: str, size: str, row: str) -> dict | None:
    """The entry of a row, or None if it cannot be planned. Prints a line, and advice if it does not
    fit."""
    started = time.monotonic()
    entry = None
    advice = []
    try:
        planned, advice = plan(command_of(script, tier, size, tier), wants_advice=True)
        entry = {"row": row, **planned}
        result = f"{entry['gib']:.2f} GiB, {entry['verdict']}"
    except NoPlan as error:
        result = f"not planned: {error}"
    seconds = time.monotonic() - started
    line = f"{script} {tier} {size}: {row}: {result}, {seconds:.0f} s"
    print("\n    ".join([line, *advice]), flush=True)
    return entry


def plan_scripts(scripts: list[str], jobs: int, only_changed: bool = False) -> list[str]:
    """Plans the rows of these scripts, all or those that differ from tiers.json, which it writes
    after each script. Returns the rows that do not pass."""
    torch = version("torch").split("+")[0]
    entries = tier_tables.predictions()
    versions = entries.pop("torch", {})
    bad = []
    for script in scripts:
        table = tier_tables.read_rows(script)
        rows = tier_tables.planned_rows(table) + tier_tables.adapter_rows(table)
        if versions.get(script) != torch:  # a script's rows are all of one version
            entries = {key: entry for key, entry in entries.items() if key.split()[0] != script}
        known = {key: entry for key, entry in entries.items() if key.split()[0] == script}

        def entry_of(row: tuple[str, str, str], script=script, known=known) -> dict | None:
            entry = known.get(f"{script} {row[0]} {row[1]}", {})
            return entry if only_changed and entry.get("row") == row[2] else plan_row(script, *row)

        with ThreadPoolExecutor(jobs) as pool:
            planned = list(pool.map(entry_of, rows))
        entries = {key: entry for key, entry in entries.items() if key not in known}
        for (tier, size, text), entry in zip(rows, planned, strict=True):
            if entry:
                entries[f"{script} {tier} {size}"] = entry
            verdict = entry["verdict"] if entry else "not planned"
            if verdict != "fits":
                bad.append(f"{script} {tier} {size}: {text}: {verdict}")
        versions[script] = torch
        write_predictions(versions, entries)
    return bad


def write_predictions(versions: dict[str, str], entries: dict) -> None:
    """Writes tiers.json, an entry a line. `versions`: of torch, by script."""
    pairs = [("torch", versions), *sorted(entries.items())]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in pairs]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    tier_tables.predictions_file().write_text(text, encoding="utf-8")


def largest(script: str, size: str, card: str, letters: str) -> list[str]:
    """Cells: letters, the row with the largest micro-batch that fits, "-" if none does, and its
    GiB. Raises `NoPlan`."""
    batch, accumulation = tier_tables.row_of(tier_tables.read_rows(script), "cpu", size)[2:4]
    update = int(batch) * int(accumulation) // split_count(card)[0]
    batches = [number for number in range(1, update + 1) if update % number == 0]
    letters = letters.strip("-")
    flags = [flag for letter in letters for flag in FLAGS[letter]]
    if "R" not in letters:
        flags.append("--no_gradient_checkpointing")  # the row of the CPU may have it
    gib = {}

    def is_too_large(batch: int) -> bool:
        cut = ["--batch_size", str(batch), "--gradient_accumulation_steps", str(update // batch)]
        planned, _ = plan(command_of(script, "cpu", size, card, *flags, *cut))
        gib[batch] = planned["gib"]
        result = f"{batch} x {update // batch} {letters}: {planned['gib']:.2f} GiB"
        print(f"{script} {size} {card}: {result}, {planned['verdict']}", file=sys.stderr)
        return planned["verdict"] != "fits"

    fitting = batches[: bisect.bisect_left(batches, True, key=is_too_large)]
    if not fitting:
        return [letters or "-", "-", ""]
    row = " ".join([str(fitting[-1]), "x", str(update // fitting[-1]), *letters])
    return [letters or "-", row, f"{gib[fitting[-1]]:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(tier_tables.SCRIPTS)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(known)} (all)")
    parser.add_argument("--changed", action="store_true", help="only rows unlike tiers.json")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="plans at a time (1)")
    parser.add_argument(
        "--largest", nargs="+", metavar="WORD", help="SCRIPT SIZE CARD [LETTERS ...]"
    )
    args = parser.parse_args()
    words = args.scripts if not args.largest else args.largest[:1]
    scripts = [Path(name).name for name in words] or known
    for script in scripts:
        if script not in known:
            parser.error(f"{script} is not one of {', '.join(known)}")
    if args.largest:
        print_largest(scripts[0], *args.largest[1:])
        return
    bad = plan_scripts(scripts, args.jobs, args.changed)
    problems = tier_tables.write(scripts)
    if bad:
        sys.exit("\n".join(["these rows do not pass:", *bad]))
    if problems:
        sys.exit("\n".join(problems))


def print_largest(script: str, size: str, card: str, *choices: str) -> None:
    """Prints the table of --largest."""
    if not choices:
        choices = USUAL + FROZEN if "whisper" in script else USUAL
    try:
        cells = [largest(script, size, card, letters) for letters in choices]
    except NoPlan as error:
        sys.exit(f"error: {error}")
    print(tier_tables.markdown(["letters", f"`{size}` on {card}", "GiB"], cells))


if __name__ == "__main__":
    main()
