"""Runs: find, make, start, stop and remove them. All that is known of a run is in its folder
RUNS/NAME:

    run.json        its settings, its command, and its place in the queue
    run.log         what it has printed; a line with the time and the command begins each attempt
    .lock           held by webui/launch.py as long as the run lasts, with what it does
    ended.json      how it has ended
    checkpoints/    logs/    the recipe's own; it holds checkpoints/.lock while it trains

So any number of pages can look at the runs, and a page that was killed finds them again. If only
launch.py is killed, the recipe's lock tells that the run lasts; in the seconds before the recipe
has it, such a run looks dead, and one that is started meanwhile is refused by that lock. A folder
that a command line has trained is a run, too: it can be looked at and stopped."""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common import files, records
from common.errors import Failure, RunError, UsageError, cannot_write, writing
from webui import commands, launch, outputs
from webui.catalogue import ROOT, Recipe
from webui.places import CORRECTED, UPLOADS, Places

NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
# run.json, as a schema of `records.mismatch`.
SETTINGS = {"recipe": str, "tier?": str, "size?": str, "values?": dict}
CONTENT = {"settings": SETTINGS, "words": [str], "created": (float, int), "device?": str}
START_SECONDS = 20.0  # until launch.py holds its lock, on a busy machine


@dataclass(frozen=True)
class Run:
    """A run. `settings` are what `commands.command` takes, {} for a run from a command line;
    `words` its last command; `created` its time. `fault`: why its run.json is not used."""

    name: str
    folder: Path
    recipe: str
    settings: dict
    words: list[str]
    created: float
    device: str = ""  # on which it was queued last
    fault: str = ""


# --- finding and making ---------------------------------------------------------------------------


def list_runs(runs: Path) -> list[Run]:
    """All runs, the newest first."""
    try:
        with os.scandir(runs) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # nothing was run yet
        return []
    found = [run for name in names if (run := _read(runs, name))]
    return sorted(found, key=lambda run: (run.created, run.name), reverse=True)


def find(runs: Path, name: str) -> Run:
    """Raises `UsageError` if there is no such run."""
    for run in list_runs(runs):
        if run.name == name:
            return run
    raise UsageError(f"there is no run {name[:60]!r}")


def _read(runs: Path, name: str) -> Run | None:
    """The run in a folder, None if it is not one."""
    folder = runs / name
    if name.startswith(".") or name == UPLOADS:
        return None
    try:
        changed = folder.stat().st_mtime
        if not os.path.lexists(folder / launch.RUN):
            has_metrics = (folder / "logs" / outputs.METRICS).is_file()
            is_run = has_metrics or (folder / outputs.CHECKPOINTS).is_dir()
            return Run(name, folder, _recipe_of(folder), {}, [], changed) if is_run else None
    except OSError:  # it was removed in this moment
        return None
    try:
        content = files.read_json(folder / launch.RUN)
        reason = records.mismatch(content, CONTENT, launch.RUN)
    except UsageError as error:
        reason = str(error)
    if reason:
        return Run(name, folder, "", {}, [], changed, fault=f"it cannot be read: {reason}")
    settings = content["settings"]
    created, device = content["created"], content.get("device", "")
    return Run(name, folder, settings["recipe"], settings, content["words"], created, device)


def _recipe_of(folder: Path) -> str:
    """The recipe that has saved the best weights in a folder, "" if it is not known."""
    try:
        path = files.require_file(folder / outputs.CHECKPOINTS / "best.safetensors")
        with safe_open(path, framework="np") as file:
            return (file.metadata() or {}).get("recipe", "")
    except (UsageError, OSError, SafetensorError):
        return ""


def new_name(runs: Path, kind: str) -> str:
    """The first of kind_1, kind_2, ... that no run has."""
    number = 1
    while os.path.lexists(runs / f"{kind}_{number}"):
        number += 1
    return f"{kind}_{number}"


def create(runs: Path, name: str, settings: dict, words: list[str]) -> Run:
    """Makes the folder of a run that has these `settings` and this command, with its output there.
    Raises `UsageError` for a name that is taken or has other characters, and `RunError`."""
    if not NAME.fullmatch(name) or name == UPLOADS:
        raise UsageError(
            f"the name {name[:60]!r} cannot be used: take at most 60 of the characters a-z, A-Z,"
            f" 0-9, _ and -, and not {UPLOADS!r}"
        )
    folder = runs / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"there is a run {name!r} already: take another name") from None
    except OSError as error:
        raise cannot_write(runs, error, "--runs") from None
    run = Run(name, folder, settings["recipe"], settings, words, time.time())
    _write(run)
    return run


def _write(run: Run, queued: float = 0.0) -> None:
    """Writes run.json. `queued`: when the run has begun to wait for its device."""
    names = ("settings", "words", "created", "device")
    content = {**{name: getattr(run, name) for name in names}, "queued": queued}
    with writing(run.folder, "--runs"):
        files.write_text(run.folder / launch.RUN, files.json_text(content))


# --- start and stop -------------------------------------------------------------------------------


def start(run: Run) -> None:
    """Starts a run that `create` has made; it waits for its device by itself. Raises `UsageError`
    if it runs already, and `RunError` if no process can be started."""
    if is_alive(run):
        raise UsageError(f"{run.name} runs already")
    _write(replace(run, device=device_of(run.words)), queued=time.time())
    words = [sys.executable, "-I", "-S", launch.__file__, str(run.folder)]
    try:
        with open(run.folder / outputs.LOG, "ab") as log:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise RunError(f"{run.name} cannot be started: {error.strerror}") from None
    _await_lock(run, process)
    threading.Thread(target=process.wait, daemon=True).start()  # or a dead one would stay a zombie


def _await_lock(run: Run, process: subprocess.Popen) -> None:
    """Returns when launch.py holds its lock, or has ended already."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None:
        if launch.read_word(run.folder, process.pid)[0] or time.monotonic() > deadline:
            return
        time.sleep(0.005)
    if process.returncode == launch.TAKEN:
        raise UsageError(f"{run.name} runs already")
    if process.returncode:
        reason = outputs.last_line(outputs.attempts(run.folder)[-1])
        raise RunError(f"{run.name} cannot be started: {reason}")


def stop(run: Run) -> None:
    """Tells a run to save its state and end, and returns at once; one that waits ends. Raises
    `UsageError` if it does not run, and `RunError`."""
    launcher, recipe = processes(run)
    process = recipe if launcher is None else launcher
    if process is None:
        raise UsageError(f"{run.name} does not run")
    if process <= 0:
        raise RunError(f"{run.name} runs on another machine: stop it there")
    try:
        if launcher is None:  # it was killed, or a command line has started the run
            lock = launch.open_lock(run.folder)
            launch.write_word(lock, process, "stopping")
            os.close(lock)
        os.kill(process, signal.SIGTERM)
    except ProcessLookupError:  # it has ended in this moment
        return
    except OSError as error:
        raise RunError(f"{run.name} cannot be stopped: {error.strerror}") from None


def resume(run: Run, places: Places, recipes: dict[str, Recipe]) -> None:
    """Continues a run from its newest checkpoint, or starts it again if it has none. The words in
    run.json are not used, since they may come from elsewhere: `commands` makes them anew of the
    settings. Raises `UsageError` and `RunError`."""
    if run.fault:
        raise UsageError(f"{run.name}: {run.fault}")
    if not run.settings:
        raise UsageError(
            f"{run.name} was started from a command line: start the same command again, with"
            " --resume auto"
        )
    if run.recipe not in recipes:
        raise UsageError(f"{run.name}: there is no recipe {run.recipe[:60]!r}")
    made = commands.command(places, recipes[run.recipe], run.settings, run.folder)
    start(replace(run, words=commands.resumed(made.words)))


def remove(run: Run, places: Places) -> None:
    """Deletes a run of the page, and the uploads that no other run uses. Raises `UsageError` if it
    runs, was started from a command line, or has corrected texts, and `RunError`."""
    if is_alive(run):
        raise UsageError(f"{run.name} runs: stop it first")
    if not os.path.lexists(run.folder / launch.RUN):
        raise UsageError(
            f"{run.name} was started from a command line: remove its folder {run.folder} there"
        )
    if any(run.folder.glob(f"*{CORRECTED}")):
        raise UsageError(
            f"{run.name} has texts that somebody has corrected: take them home first, then remove"
            f" the folder {run.folder} in a terminal"
        )
    others = (each for each in list_runs(run.folder.parent) if each.name != run.name)
    uploads = _uploads(run).difference(*map(_uploads, others))
    try:
        for path in run.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != launch.RUN:
                path.unlink()
        (run.folder / launch.RUN).unlink()  # last: what is left of a run can be removed again
        run.folder.rmdir()
    except OSError as error:
        raise RunError(f"{run.folder} cannot be removed: {error.strerror}") from None
    for number in uploads:
        upload = run.folder.parent / UPLOADS / number
        with contextlib.suppress(Failure):
            if not places.is_corrected(upload):  # somebody's hours
                places.remove_upload(upload)


def _uploads(run: Run) -> set[str]:
    """The numbers of the uploads that a run uses."""
    base = f"{run.folder.parent / UPLOADS}/"
    paths = [word.partition(base)[2] for word in run.words if base in word]
    return {path.partition("/")[0] for path in paths}


# --- processes and devices ------------------------------------------------------------------------


def processes(run: Run) -> tuple[int | None, int | None]:
    """The process numbers of launch.py and of the recipe, None for one that does not run."""
    return (launch.holder(run.folder / launch.LOCK), launch.holder(run.folder / launch.RECIPE_LOCK))


def is_alive(run: Run) -> bool:
    """Whether a run trains, or waits to."""
    return any(process is not None for process in processes(run))


def device_of(words: list[str]) -> str:
    """The device that a command asks for, "cpu" or "cuda:0". `auto`: the first GPU, if any."""
    device = "auto"
    for before, word in itertools.pairwise(["", *words]):
        if before == "--device":
            device = word
        elif word.startswith("--device="):
            device = word.partition("=")[2]
    if device == "auto":
        device = "cuda" if _has_gpu() else "cpu"
    return "cuda:0" if device == "cuda" else device


@functools.cache
def _has_gpu() -> bool:
    """Whether torch sees a GPU. It only counts them: nothing is allocated there."""
    import torch

    return torch.cuda.device_count() > 0


def on_gpu(runs: Path) -> list[Run]:
    """The runs that use a GPU now. One from a command line counts if there is a GPU."""
    found = []
    for run in list_runs(runs):
        launcher, recipe = processes(run)
        is_waiting = recipe is None and launch.read_word(run.folder, launcher)[0] == "waiting"
        if is_alive(run) and not is_waiting and (run.device or device_of([])) != "cpu":
            found.append(run)
    return found
