"""The preset scripts in one process: what a script declares, and the command that preset.py makes
of it."""

import contextlib
import functools
import io
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from common import preset

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("GPUS", "NODES", "NODE", "HEAD", "CUDA_VISIBLE_DEVICES")
# What a script would start.
DECLARE = """exec() { printf '%s\\0' "$@"; }; . "$0" """


@dataclass(frozen=True)
class Answer:
    """`command`: the words that --print shows, none if they are refused. `said`: the messages."""

    command: list[str]
    said: str
    status: int


@functools.cache
def declared(script: str) -> preset.Script:
    started = subprocess.run(
        ["bash", "-c", DECLARE, ROOT / script], capture_output=True, text=True, check=True
    )
    words = started.stdout.split("\0")
    words = words[words.index(str(ROOT / "common/preset.py")) + 1 : words.index("--")]
    return preset.Script(**dict(word.split("=", 1) for word in words))


def answer(script: str | preset.Script, *words: str, **variables: str) -> Answer:
    """What a script's name or declaration answers, with these variables of the environment."""
    if isinstance(script, str):
        script = declared(script)
    environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    said = io.StringIO()
    command = []
    status = 0
    patched = mock.patch.dict(os.environ, environment | variables, clear=True)
    with patched, contextlib.redirect_stderr(said):
        try:
            command = preset.choose(script, preset.read_user(script, list(words)))[2]
        except SystemExit as end:
            status = end.code
    return Answer(command, said.getvalue(), status)


def flags_of(script: str | preset.Script, *words: str, **variables: str) -> list[str]:
    """The recipe's flags."""
    found = answer(script, *words, **variables)
    assert found.status == 0, found.said
    number = next(i for i, word in enumerate(found.command) if word.endswith(".py"))
    return found.command[number + 1 :]


def error_of(script: str | preset.Script, *words: str, status: int = 2, **variables: str) -> str:
    """The one line of a command that is refused, after messages."""
    found = answer(script, *words, **variables)
    assert found.status == status, found.said
    line = found.said.splitlines()[-1]
    assert line.startswith("error: ") and found.said.count("error: ") == 1
    return line


def value(words: list[str], flag: str) -> str:
    """A flag's value as argparse would see it: the last one wins."""
    return words[len(words) - words[::-1].index(flag)]


def cut_of(words: list[str]) -> tuple[int, int]:
    """Micro-batch and accumulation steps."""
    return int(value(words, "--batch_size")), int(value(words, "--gradient_accumulation_steps"))


def update_of(words: list[str]) -> int:
    batch, accumulation = cut_of(words)
    return batch * accumulation
