"""What a child process of on_gpu.py runs: a program of the project, or a trial of a recipe.

    python benchmarks/gpu/child.py '{"run": ["recipes/template.py", "--max_steps", "2"]}'
    python benchmarks/gpu/child.py '{"recipe": "template", "words": [...], "trial": {...}}'

The process ends with its parent, even if that is killed. {"kill_after": 5} kills a run by SIGKILL
once it has reported its fifth update."""

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder, whose modules have common names

import common

common.spin_briefly()  # before torch is imported


def end_with(parent: int) -> None:
    """Kills this process and its data workers as soon as the process `parent` has ended. They are a
    process group."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def kill_after(update: int) -> None:
    """Makes a run kill itself when it has reported this update."""
    from common.report import Report

    write = Report.write

    def write_and_die(report: Report, step: int, **values) -> None:
        write(report, step, **values)
        if step == update:
            os.kill(os.getpid(), signal.SIGKILL)

    Report.write = write_and_die


def main(asked: dict) -> None:
    end_with(asked.get("parent", os.getppid()))
    if "kill_after" in asked:
        kill_after(asked["kill_after"])
    if "trial" in asked:
        from benchmarks.gpu import trial

        trial.run(asked["recipe"], asked["words"], trial.Wanted(**asked["trial"]))
        return
    sys.argv = asked["run"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
