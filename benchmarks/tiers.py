"""Predicts the GPU memory of every row of the preset scripts, without a GPU, for tiers.json and the
recipes' pages.

    python benchmarks/tiers.py [SCRIPT ...] [--changed] [--jobs N]

A row is planned on its tier's card by the command that the script prints, with --dry_run and the
settings of a released model. The exit status is 1 if a row does not fit, is tight or cannot be
planned; of a row that does not fit, the flags that make it fit are printed. --changed leaves out
the rows that tiers.json has."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import tier_tables

ADAPTERS = ["--lora", "32"]  # of a row with an L behind its size
GIB = {"MiB": 1 / 1024, "GiB": 1.0}


class NoPlan(Exception):
    """A row that cannot be planned. The message says why, in one line."""


def command_of(script: str, tier: str, size: str, card: str, *more: str) -> list[str]:
    """The words of the recipe's command that a script prints for a plan, without the interpreter.
    `size`: perhaps with an L behind it. Raises `NoPlan`."""
    size, *is_adapted = size.split()
    flags = tier_tables.SCRIPTS[script].flags.split()
    if is_adapted:
        flags += ADAPTERS
    words = [str(tier_tables.ROOT / script), tier, size, *flags, *more]
    words += ["--dry_run", card, "--print"]
    printed = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "GPUS": "1"})
    if printed.returncode:
        raise NoPlan(last_line(printed.stderr.splitlines()))
    return shlex.split(printed.stdout)[1:]


def last_line(lines: list[str]) -> str:
    return lines[-1] if lines else "no message"


def plan(command: list[str]) -> tuple[dict, list[str]]:
    """The prediction of a recipe's command, {"gib": at the peak, "verdict": text}, and the lines of
    the advice if it does not fit, which take as long as several plans. Raises `NoPlan`."""
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    words = [sys.executable, *command]
    with tempfile.TemporaryDirectory() as folder:  # the current folder may have checkpoints
        ran = subprocess.run(words, cwd=folder, env=environment, **kept)
    lines = ran.stdout.splitlines()
    peak = re.search(r"^Peak: ([\d.]+) ([MG]iB)", ran.stdout, re.MULTILINE)
    verdict = re.search(r"^Verdict: (fits|tight|does not fit)\b", ran.stdout, re.MULTILINE)
    if not peak or not verdict or ran.returncode not in (0, 3):
        raise NoPlan(f"status {ran.returncode}: {last_line(lines)}")
    advice = [line for line in lines if line.startswith(("  --", "Peak with", "These flags"))]
    return {"gib": round(float(peak[1]) * GIB[peak[2]], 2), "verdict": verdict[1]}, advice


def plan_row(script: str, tier: str, size: str, row: str) -> dict | None:
    """The entry of a row, or None without a plan. Prints a line, and advice if it does not fit."""
    started = time.monotonic()
    entry = None
    advice = []
    try:
        planned, advice = plan(command_of(script, tier, size, tier))
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
    tier_tables.PREDICTIONS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    known = list(tier_tables.SCRIPTS)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(known)} (all)")
    parser.add_argument("--changed", action="store_true", help="only rows unlike tiers.json")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="plans at a time (1)")
    args = parser.parse_args()
    scripts = [Path(name).name for name in args.scripts] or known
    for script in scripts:
        if script not in known:
            parser.error(f"{script} is not one of {', '.join(known)}")
    bad = plan_scripts(scripts, args.jobs, args.changed)
    problems = tier_tables.write(scripts)
    if bad:
        sys.exit("\n".join(["these rows do not pass:", *bad]))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
