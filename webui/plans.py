"""The report of --dry_run in parts, and the GPUs that it can be asked about."""

import functools
import os
import re
import subprocess
from dataclasses import dataclass

from common.errors import UsageError
from webui.catalogue import Recipe
from webui.commands import values_of
from webui.use import error_of

SIZE = r"-?[\d.]+ [GM]iB"
OF_MEMORY = re.compile(rf"  (\S.*?)\s+({SIZE})")
OF_FLAGS = re.compile(rf"  (--\S.*): {SIZE} less")
OF_VERDICT = re.compile(r"Verdict: (.+?) \(.*")
OF_ADVICE = re.compile(rf"Peak with these flags: {SIZE} of {SIZE} \(.+\): (.+)")


@dataclass(frozen=True)
class Verdict:
    """The answer of --dry_run."""

    word: str  # "fits", "tight" or "does not fit"
    memory: list[tuple[str, str]]  # (kind, size)
    lines: list[str]  # all but the advice
    advice: list[str]  # the lines that offer flags
    flags: dict[str, str]  # the values of the options with which it fits, or none
    after: str  # the verdict with them


def verdict(recipe: Recipe, text: str) -> Verdict:
    """Reads what --dry_run has printed. Raises `UsageError` if this is an error, and no plan."""
    words = []
    memory = []
    lines = []
    advice = []
    word = after = ""
    for line in text.splitlines():
        if found := OF_FLAGS.fullmatch(line):
            words += found[1].split()
            advice.append(line.strip())
        elif not word and (found := OF_MEMORY.fullmatch(line)):
            memory.append((found[1], found[2]))
        elif line.startswith("  ") and lines:  # the rest of a long line
            lines[-1] += f" {line.strip()}"
        elif advice or line.startswith("Peak with "):
            advice.append(line)
        else:
            lines.append(line)
        if found := OF_VERDICT.fullmatch(line):
            word = found[1]
        elif found := OF_ADVICE.fullmatch(line):
            after = found[1]
    if not word:
        raise UsageError(error_of(text))
    flags = values_of(recipe, words) if after in ("fits", "tight") else {}
    return Verdict(word, memory, lines, advice, flags, after)


@functools.cache
def this_card() -> str | None:
    """The name of this computer's first NVIDIA GPU, as the driver calls it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if first and not first.startswith("MIG-"):  # a slice is not found by its name
        words += ["-i", first]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = done.stdout.splitlines()
    return names[0].strip() if first and names and done.returncode == 0 else None
