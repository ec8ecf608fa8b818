"""How long torch's waiting CPU threads spin is set before torch is loaded, in every program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("recipes", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
    # These compute nothing.
    and path.stem not in ("tier_tables", "tiers")
]
# Runs a program up to the first import of torch, or to its end.
UNTIL_TORCH = """
import importlib.util, os, runpy, sys
class Finder:
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_loader(name, Finder) if name == "torch" else None
    def create_module(spec):
        print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
        os._exit(0)
    def exec_module(module):
        pass
sys.meta_path.insert(0, Finder)
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
"""


def count_in(program: str, **given: str) -> str:
    """The variable when torch is loaded, or at the end of a program that runs it in others."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    result = subprocess.run(
        [sys.executable, "-c", UNTIL_TORCH, str(ROOT / program)],
        env={**clean, **given},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_sets_it_before_torch_is_loaded(program):
    assert count_in(program) == "1000"


def test_a_users_setting_stays():
    program = "recipes/template.py"
    assert count_in(program, GOMP_SPINCOUNT="7") == "7"
    assert count_in(program, GOMP_SPINCOUNT="") == ""
    assert count_in(program, OMP_WAIT_POLICY="active") == "None"
