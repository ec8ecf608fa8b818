"""Other processes: what they do is waited for; locks that one holds, as launch.py and the recipes
hold theirs."""

import contextlib
import subprocess
import sys
import time
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


def wait_for(ready, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.005)


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
