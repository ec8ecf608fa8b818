"""Predicts the GPU memory of every row of the preset scripts, without a GPU, for tiers.json and the
recipes' pages.

    python benchmarks/tiers.py [SCRIPT ...] [--jobs N]
    python benchmarks/tiers.py --largest SCRIPT SIZE CARD [LETTERS ...]

A row is planned on its tier's card by the command that the script prints, with --dry_run and the
settings of a released model. The exit status is 1 if a row does not fit, is tight or cannot be
planned. --largest prints the row with the largest micro-batch that fits on a card (12gb, 11.5), for
letters such as R R8 RF8, or -: none; without LETTERS for the usual ones."""

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
from subprocess import PIPE, STDOUT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import tier_tables

WHISPER = "--from_scratch --pad_to_30s --ctc_weight 0".split()
# What makes a plan without weights and data that of a released model.
SCRIPTS = {
    "run_training_memory_optimized.sh": [],
    "run_whisper_vietnamese.sh": WHISPER,
    "run_whisper_morse.sh": [*WHISPER, "--alignment_weight", "0", "--clips_per_epoch", "64"],
    "run_parakeet_tdt.sh": ["--from_scratch"],
    "run_xtts_amharic.sh": ["--from_scratch"],
}
FLAGS = {
    "R": ["--gradient_checkpointing"],
    "F": ["--freeze_encoder"],
    "8": ["--optimizer", "adamw_8bit"],
    "H": ["--use_cpu_offload"],
}
USUAL, FROZEN = ("-", "R", "8", "R8", "H", "RH"), ("F", "RF", "F8", "RF8", "FH", "RFH")
GIB = {"MiB": 1 / 1024, "GiB": 1.0}


class NoPlan(Exception):
    """A row that cannot be planned. The message says why, in one line."""


def command_of(script: str, tier: str, size: str, card: str, *more: str) -> list[str]:
    """The words of the recipe's command that a script prints for a plan, without the interpreter.
    Raises `NoPlan`."""
    words = [
        str(tier_tables.ROOT / script),
        tier,
        size,
        *SCRIPTS[script],
        *more,
        "--dry_run",
        card,
        "--print",
    ]
    printed = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "GPUS": "1"})
    if printed.returncode:
        raise NoPlan(last_line(printed.stderr.splitlines()))
    return shlex.split(printed.stdout)[1:]


def last_line(lines: list[str]) -> str:
    return lines[-1] if lines else "no message"


def plan(command: list[str], wants_advice: bool = False) -> tuple[dict, list[str]]:
    """The prediction of a recipe's command, {"gib": at the peak, "verdict": text}, and the lines of
    the advice if it does not fit, which take as long as several plans. Raises `NoPlan`."""
    words = [sys.executable, *command]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    peak = verdict = None
    lines = []
    with (
        tempfile.TemporaryDirectory() as folder,  # the current folder may have checkpoints
        subprocess.Popen(
            words, stdout=PIPE, stderr=STDOUT, text=True, cwd=folder, env=environment
        ) as process,
    ):
        for line in process.stdout:
            lines.append(line.rstrip())
            peak = peak or re.match(r"Peak: ([\d.]+) ([MG]iB)", line)
            verdict = verdict or re.match(r"Verdict: (fits|tight|does not fit)\b", line)
            if verdict and not wants_advice:
                process.kill()
    if not peak or not verdict or process.returncode not in (0, 3, -signal.SIGKILL):
        raise NoPlan(f"status {process.returncode}: {last_line(lines)}")
    advice = [line for line in lines if line.startswith(("  --", "Peak with", "These flags"))]
    return {"gib": round(float(peak[1]) * GIB[peak[2]], 2), "verdict": verdict[1]}, advice


def plan_row(script: str, tier: str, size: str, row: str) -> dict | None:
    """The entry of a row, or None if it cannot be planned. Prints a line, and advice if it does not
    fit."""
    started, advice, entry = time.monotonic(), [], None
    try:
        planned, advice = plan(command_of(script, tier, size, tier), wants_advice=True)
        entry = {"row": row, **planned}
        result = f"{entry['gib']:.2f} GiB, {entry['verdict']}"
    except NoPlan as error:
        result = f"not planned: {error}"
    seconds = f"{time.monotonic() - started:.0f} s"
    print(
        "\n    ".join([f"{script} {tier} {size}: {row}: {result}, {seconds}", *advice]), flush=True
    )
    return entry


def plan_scripts(scripts: list[str], jobs: int) -> list[str]:
    """Plans all rows of these scripts and writes tiers.json after each script. Returns the rows
    that do not pass."""
    torch, bad = version("torch").split("+")[0], []
    entries = tier_tables.predictions()
    if entries.pop("torch", torch) != torch:
        entries = {}  # all are of one version
    for script in scripts:
        rows = [(script, *row) for row in tier_tables.planned_rows(tier_tables.read_rows(script))]
        with ThreadPoolExecutor(jobs) as pool:
            planned = list(pool.map(lambda row: plan_row(*row), rows))
        entries = {key: entry for key, entry in entries.items() if key.split()[0] != script}
        for (_, tier, size, text), entry in zip(rows, planned, strict=True):
            if entry:
                entries[f"{script} {tier} {size}"] = entry
            if not entry or entry["verdict"] != "fits":
                bad.append(
                    f"{script} {tier} {size}: {text}:"
                    f" {entry['verdict'] if entry else 'not planned'}"
                )
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value)}"
            for key, value in [("torch", torch), *sorted(entries.items())]
        ]
        tier_tables.predictions_file().write_text(
            "{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8"
        )
    return bad


def largest(script: str, size: str, card: str, letters: str) -> list[str]:
    """Cells: letters, the row with the largest micro-batch that fits, "-" if none does, and its
    GiB. Raises `NoPlan`."""
    batch, accumulation = tier_tables.row_of(tier_tables.read_rows(script), "cpu", size)[2:4]
    update, gib = int(batch) * int(accumulation), {}
    cuts = [
        f"{number} x {update // number}" for number in range(1, update + 1) if update % number == 0
    ]
    flags = [flag for letter in letters.strip("-") for flag in FLAGS[letter]]
    flags += (
        [] if "R" in letters else ["--no_gradient_checkpointing"]
    )  # the row of the CPU may have it

    def is_too_large(cut: str) -> bool:
        number, _, times = cut.split()
        more = ("--batch_size", number, "--gradient_accumulation_steps", times)
        planned, _ = plan(command_of(script, "cpu", size, card, *flags, *more))
        print(
            f"{script} {size} {card}: {cut} {letters}: {planned['gib']:.2f} GiB,"
            f" {planned['verdict']}",
            file=sys.stderr,
        )
        gib[cut] = f"{planned['gib']:.2f}"
        return planned["verdict"] != "fits"

    fitting = cuts[: bisect.bisect_left(cuts, True, key=is_too_large)]
    return (
        [letters, " ".join([fitting[-1], *letters.strip("-")]), gib[fitting[-1]]]
        if fitting
        else [letters, "-", ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)} (all)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="plans at a time (1)")
    parser.add_argument(
        "--largest", nargs="+", metavar="WORD", help="SCRIPT SIZE CARD [LETTERS ...]"
    )
    args = parser.parse_args()
    scripts = [Path(name).name for name in [*args.scripts, *(args.largest or [])[:1]]]
    if unknown := [name for name in scripts if name not in SCRIPTS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(SCRIPTS)}")
    if args.largest:
        _, size, card, *choices = args.largest
        choices = choices or [*USUAL, *(FROZEN if "whisper" in scripts[0] else ())]
        try:
            cells = [largest(scripts[0], size, card, letters) for letters in choices]
        except NoPlan as error:
            sys.exit(f"error: {error}")
        print(tier_tables.markdown(["letters", f"`{size}` on {card}", "GiB"], cells))
        return
    bad = plan_scripts(scripts or list(SCRIPTS), args.jobs)
    problems = tier_tables.write(scripts or list(SCRIPTS))
    if bad:
        sys.exit("\n".join(["these rows do not pass:", *bad]))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
