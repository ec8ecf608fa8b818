"""Locks that another process holds, as launch.py and the recipes hold theirs."""

import contextlib
import subprocess
import sys
from pathlib import Path

# Holds locks on the files that it is given, and says so.
HOLDER = """
import fcntl, sys, time
files = [open(path, "a+") for path in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def held(*paths: Path):
    """Another process that holds locks on files."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-S", "-c", HOLDER, *map(str, paths)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()
