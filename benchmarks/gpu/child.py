"""A child process of on_gpu.py: a program of the project, or a trial of a recipe.

    {"run": ["recipes/template.py", "--max_steps", "2"]}
    {"recipe": "template", "words": [...], "trial": {...}}

It is forked from a process that has imported torch and the recipes, and has not touched CUDA, which
takes a second; to import them takes ten. It ends with on_gpu.py, even if that is killed.
{"kill_after": 5} kills a run by SIGKILL once it has reported its fifth update. Updates of earlier
stages, whose log folders are inside of the run's, do not count."""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import torch

from benchmarks.gpu import trial
from common.report import Report


def end_with_parent() -> None:
    """Kills this process and its data workers, a process group, as soon as on_gpu.py has ended."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def kill_after(update: int) -> None:
    """Makes a run kill itself when it has reported this update."""
    write = Report.write

    def write_and_die(report: Report, step: int, **values) -> None:
        write(report, step, **values)
        if step == update and report.log_dir.name == "logs":
            os.kill(os.getpid(), signal.SIGKILL)

    Report.write = write_and_die


def main(asked: dict, folder: Path, output: Path, threads: int) -> None:
    """Runs what is asked in `folder`, with everything that it prints in the file `output`."""
    os.setsid()
    end_with_parent()
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in a run
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of its own children
    torch.set_num_threads(threads)
    if "kill_after" in asked:
        kill_after(asked["kill_after"])
    try:
        if "trial" in asked:
            trial.run(asked["recipe"], asked["words"], trial.Wanted(**asked["trial"]))
            return
        sys.argv = asked["run"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:  # a forked process waits for its data workers, which ignore SIGTERM
        for worker in multiprocessing.active_children():
            worker.kill()
