"""Runs: start, stop, find and read them. All that is known of a run is in its folder RUNS/NAME:

    run.json        its settings, its command, and its place in the queue
    run.log         what it has printed; a line with the time and the command begins each attempt
    .lock           held by webui/launch.py as long as the run lasts, with what it does
    ended.json      how it has ended
    checkpoints/    logs/    the recipe's own; it holds checkpoints/.lock while it trains

So any number of pages can look at the runs, and a page that was killed finds them again. If only
launch.py is killed, the recipe's own lock still tells that it runs. A folder that a command line has
trained is a run, too: it can be looked at and stopped."""

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common import files, records
from common.checkpoint import list_checkpoints, step_of
from common.errors import Failure, RunError, UsageError, cannot_write
from common.report import shown
from webui import commands, launch
from webui.commands import Recipe
from webui.places import UPLOADS, Places

LOG = "run.log"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
ASIDE = re.compile(r"(earlier|abandoned)-\d+")  # what the loop moves aside
# run.json, as a schema of `records.mismatch`.
SETTINGS = {"recipe": str, "tier?": str, "size?": str, "values?": dict}
CONTENT = {"settings": SETTINGS, "words": [str], "created": (float, int)}
START_SECONDS = 20.0  # until launch.py holds its lock, on a busy machine
LOG_BYTES = 1 << 18  # of the end of a log that are read
STATE_BYTES = 1 << 13  # of the same, to tell how far a run is
LINE = 2000  # characters of a line that are shown
POINTS = 1000  # of the curves of training, at least, if there are more
ROWS = 5000  # of transcripts.jsonl
ROW_BYTES = 1 << 20  # of a line in it, and in metrics.jsonl
MISSING_WORDS = "the run has no command of this project"

BEGAN = re.compile(r"^=== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d === .*$", re.MULTILINE)
LENGTH = re.compile(r"^length: (\d+) updates", re.MULTILINE)
PROGRESS = re.compile(
    r"^step (?P<step>\d+)/(?P<total>\d+)  loss (?P<loss>\S+)  lr (?P<rate>\S+)"
    r"  (?P<speed>\S+) utterances/s  (?P<memory>\S+) GiB  waiting (?P<waiting>\d+)%"
    r"(?:  GPU (?P<gpu>\d+)%)?  (?P<minutes>\d+) min left$",
    re.MULTILINE,
)
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Run:
    """A run. `settings` are what `commands.command` takes, {} for a run from a command line;
    `words` its last command; `created` its time. `fault` says why its run.json is not used, or is
    ""."""

    name: str
    folder: Path
    recipe: str
    settings: dict
    words: list[str]
    created: float
    device: str = ""  # on which it was queued last
    fault: str = ""


@dataclass(frozen=True)
class State:
    """`word`: waiting, starting, running, stopping, finished, stopped, failed, killed or untouched.
    `detail`: a line for people."""

    word: str
    detail: str


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
    run = None
    with contextlib.suppress(OSError, ValueError):
        if "/" not in name and (runs / name).is_dir() and not (runs / name).is_symlink():
            run = _read(runs, name)
    if run is None:
        raise UsageError(f"there is no run {name[:60]!r}")
    return run


def _read(runs: Path, name: str) -> Run | None:
    """The run in a folder, None if it is not one."""
    folder = runs / name
    if name.startswith(".") or name == UPLOADS:
        return None
    try:
        changed = folder.stat().st_mtime
        if not os.path.lexists(folder / launch.RUN):
            is_run = (folder / CHECKPOINTS).is_dir() or (folder / "logs" / METRICS).is_file()
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
    device = str(content.get("device", ""))
    created = content["created"]
    return Run(name, folder, settings["recipe"], settings, content["words"], created, device)


def _recipe_of(folder: Path) -> str:
    """The recipe that has saved the best weights in a folder, "" if it is not known."""
    try:
        path = files.require_file(folder / CHECKPOINTS / "best.safetensors")
        with safe_open(path, framework="np") as file:
            return (file.metadata() or {}).get("recipe", "")
    except (UsageError, OSError, SafetensorError):
        return ""


def create(runs: Path, name: str, settings: dict, words: list[str]) -> Run:
    """Makes the folder of a run that has these `settings` and this command, with its output there.
    Raises `UsageError` for a name that is taken or has other characters, and `RunError`."""
    if not NAME.fullmatch(name) or name == UPLOADS:
        raise UsageError(
            f"the name {name[:60]!r} cannot be used: take at most 60 of the characters a-z, A-Z,"
            f" 0-9, _ and -, and not {UPLOADS!r}"
        )
    folder = runs / name
    _check_words(words, folder)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"there is a run {name!r} already: take another name") from None
    except OSError as error:
        raise cannot_write(runs, error, "--runs") from None
    run = Run(name, folder, settings["recipe"], settings, words, time.time())
    _write(run)
    return run


def _write(run: Run, **more) -> None:
    content = {
        "settings": run.settings,
        "words": run.words,
        "created": run.created,
        "device": run.device,
        **more,
    }
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        files.write_text(run.folder / launch.RUN, text)
    except OSError as error:
        raise cannot_write(run.folder, error, "--runs") from None


def _check_words(words: list[str], folder: Path) -> None:
    """Raises `UsageError` unless the words run a recipe of this project by this Python, with its
    output in `folder`: run.json may come from elsewhere."""
    if len(words) < 2 or words[0] != sys.executable:
        raise UsageError(f"{folder.name}: {MISSING_WORDS}")
    script = Path(words[1])
    if script.parent != commands.ROOT / "recipes" or script.suffix != ".py":
        raise UsageError(f"{folder.name}: {MISSING_WORDS}")
    outputs = [word.partition("=")[2] for word in words if word.startswith("--output_dir=")]
    if not outputs or Path(outputs[-1]) != folder:
        raise UsageError(f"{folder.name}: its command writes to another folder")


# --- start and stop -------------------------------------------------------------------------------


def start(run: Run) -> None:
    """Starts a run that `create` has made; it waits for its device by itself. Raises `UsageError`
    if it runs already, and `RunError` if no process can be started."""
    _check_words(run.words, run.folder)
    if is_alive(run):
        raise UsageError(f"{run.name} runs already")
    device = device_of(run.words)
    _write(Run(**{**vars(run), "device": device}), queued=time.time())
    words = [sys.executable, "-I", "-S", launch.__file__, str(run.folder)]
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        with open(os.open(run.folder / LOG, flags, 0o666), "ab") as log:
            process = subprocess.Popen(
                words,
                cwd=commands.ROOT,
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
        raise RunError(f"{run.name} cannot be started: {_last_line(_attempt(run))}")


def stop(run: Run) -> None:
    """Tells a run to save its state and end, and returns at once; one that waits ends. Raises
    `UsageError` if it does not run, and `RunError`."""
    launcher, recipe = _processes(run)
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
    for name in (CHECKPOINTS, "logs"):
        places.inside(run.folder / name)  # a link could lead out
    made = commands.command(places, recipes[run.recipe], run.settings, run.folder)
    start(Run(**{**vars(run), "words": commands.resumed(made.words)}))


def remove(run: Run, places: Places) -> None:
    """Deletes a run of the page, and the uploads that no other run uses. Raises `UsageError` if it
    runs, or was started from a command line, and `RunError`."""
    if is_alive(run):
        raise UsageError(f"{run.name} runs: stop it first")
    if not os.path.lexists(run.folder / launch.RUN):
        raise UsageError(
            f"{run.name} was started from a command line: remove its folder {run.folder} there"
        )
    uploads = _uploads(run)
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
        with contextlib.suppress(Failure):
            places.remove_upload(run.folder.parent / UPLOADS / number)


def _uploads(run: Run) -> set[str]:
    """The numbers of the uploads that a run uses, and no other."""
    base = f"{run.folder.parent / UPLOADS}/"
    paths = [word[word.find(base) + len(base) :] for word in run.words if base in word]
    own = {path.partition("/")[0] for path in paths}
    for other in list_runs(run.folder.parent):
        if other.name != run.name:
            with contextlib.suppress(OSError), _open(other.folder / launch.RUN) as file:
                text = file.read().decode("utf-8", errors="replace")
                own = {n for n in own if not re.search(rf"\b{UPLOADS}/{re.escape(n)}\b", text)}
    return own


# --- what a run does ------------------------------------------------------------------------------


def _processes(run: Run) -> tuple[int | None, int | None]:
    """The process numbers of launch.py and of the recipe, None for one that does not run."""
    return (
        launch.holder(run.folder / launch.LOCK),
        launch.holder(run.folder / launch.RECIPE_LOCK),
    )


def is_alive(run: Run) -> bool:
    """Whether a run trains, or waits to."""
    return any(process is not None for process in _processes(run))


def state(run: Run) -> State:
    """What a run does now, or how it has ended."""
    launcher, recipe = _processes(run)
    process = recipe if launcher is None else launcher
    if process is None:
        return _ended(run)
    word, other = launch.read_word(run.folder, process)
    if word == "waiting":
        return State(word, f"waits for {other}")
    if word == "stopping":
        return State(word, "it saves its state and ends")
    if recipe is None and not _has_locked(run):
        return State("starting", _last_line(_attempt(run)) or "it loads its libraries")
    return State("running", _position(run))


def _has_locked(run: Run) -> bool:
    """Whether the recipe has held its lock since launch.py has begun. It gives the lock back before
    it ends."""
    with contextlib.suppress(OSError):
        begun = (run.folder / launch.LOCK).stat().st_mtime_ns
        return (run.folder / launch.RECIPE_LOCK).stat().st_mtime_ns >= begun
    return False


def _position(run: Run) -> str:
    """How far a run is, and how long it takes."""
    stage = _stage(run)
    place = _place(run)
    return f"{stage}: {place}" if stage else place


def _place(run: Run) -> str:
    now = _numbers(run)
    if "step" not in now:
        return f"no step yet: {_last_line(_attempt(run)) or 'it prepares its data'}"
    if "total" not in now:
        return f"step {now['step']}"
    place = f"step {now['step']} of {now['total']}"
    if now["step"] >= now["total"]:
        return f"{place}, the best weights are evaluated"
    return f"{place}, {_time_left(now['minutes'])}" if "minutes" in now else place


def _time_left(minutes: int) -> str:
    if minutes < 1:
        return "less than a minute left"
    if minutes == 1:
        return "about a minute left"
    return (
        f"about {minutes} minutes left" if minutes < 120 else f"about {minutes / 60:.0f} hours left"
    )


def _ended(run: Run) -> State:
    """How a run that does not run has ended. Without ended.json the log and the files tell."""
    if run.fault:
        return State("untouched", run.fault)
    status = None
    with contextlib.suppress(UsageError):
        status = files.read_json(run.folder / launch.ENDED).get("status")
    text = "" if status == 0 else _attempt(run)
    if status is None and not text:
        return _without_log(run)
    if status is None:
        status = _status_in(text)
    if status == 0:
        return State("finished", _best(run) or _saved(run))
    if status in (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP):
        return State("stopped", _saved(run))
    if status is None:
        return State("killed", f"it ended without a word; {_saved(run)}")
    if not isinstance(status, int) or status < 0 or status == 128 + signal.SIGKILL:
        return State("killed", f"{_killer(status)}; {_saved(run)}")
    errors = [line for line in text.split("\n") if line.startswith("error: ")]
    return State("failed", errors[-1] if errors else _last_line(text))


def _status_in(text: str) -> int | None:
    """The exit status by the last lines of a log; None if the run was killed."""
    lines = [line for line in text.split("\n") if line.strip()][-3:]
    if lines[-1].startswith("stopped by "):
        return 128 + signal.SIGTERM
    if lines[-1].startswith("error: "):
        return 1
    return 0 if any(line.startswith("weights: ") for line in lines) else None


def _killer(status) -> str:
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "it was killed (SIGKILL), perhaps because the memory of the computer was full"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except (ValueError, TypeError):
        return f"it ended with status {str(status)[:20]}"


def _without_log(run: Run) -> State:
    """A run that was not started here, or never."""
    if run.settings:
        return State("untouched", "it was not started yet")
    checkpoints = list_checkpoints(run.folder / CHECKPOINTS)
    with contextlib.suppress(OSError):
        # Written at the end of a run, after its last checkpoint.
        written = (run.folder / "logs" / "transcripts.jsonl").stat().st_mtime
        if checkpoints and written >= checkpoints[0].stat().st_mtime:
            return State("finished", _best(run) or _saved(run))
    return State("stopped", f"{_saved(run)} (from a command line)")


def _saved(run: Run) -> str:
    """Which step is saved."""
    stage = _stage(run)
    checkpoints = list_checkpoints(run.folder / CHECKPOINTS / stage)
    if not checkpoints:
        return "nothing was saved"
    return f"step {step_of(checkpoints[0])}{stage and f' of the {stage}'} is saved"


def _best(run: Run) -> str:
    """The result of the best evaluation, "" if there is none."""
    try:
        best = files.read_json(run.folder / CHECKPOINTS / "best.json")
    except UsageError:
        return ""
    values = _finite(best)
    return f"best at step {best.get('step')}: {_results(values)}" if values else ""


def _results(values: dict) -> str:
    """The results of an evaluation, error rates first and losses last."""
    kept = {name: value for name, value in values.items() if name not in ("step", "epoch")}
    names = sorted(kept, key=lambda name: (name not in ("cer", "wer"), "loss" in name))
    return ", ".join(f"{name} {shown(name, kept[name])}" for name in names[:4])


def progress(run: Run) -> dict[str, str]:
    """The last numbers of a run by their names, as texts for people. What is not known is left
    out."""
    now = _numbers(run)
    texts = {}
    if stage := _stage(run):
        texts["stage"] = stage
    if "step" in now:
        texts["step"] = f"{now['step']} of {now['total']}" if "total" in now else str(now["step"])
    if "minutes" in now and is_alive(run):
        texts["time"] = _time_left(now["minutes"])
    forms = {
        "loss": ("loss", "{:.3f}", 1),
        "learning_rate": ("learning rate", "{:.1e}", 1),
        "utterances_per_second": ("utterances/s", "{:.1f}", 1),
        "memory_bytes": ("memory", "{:.1f} GiB", 2**-30),
        "data_wait_share": ("waiting for data", "{:.0f} %", 100),
        "gpu_utilisation": ("GPU busy", "{:.0f} %", 100),
    }
    for key, (label, form, scale) in forms.items():
        if key in now:
            texts[label] = form.format(scale * now[key])
    if "evaluation" in now:
        step, values = now["evaluation"]
        texts["evaluation"] = f"{_results(values)} at step {step}"
    return texts


def _numbers(run: Run) -> dict:
    """The last numbers: those of metrics.jsonl under their names there, without "train/", and
    "step", "total", "minutes" and "evaluation", which is (step, values). Those of an earlier attempt
    are not used while the run prepares itself."""
    *earlier, text = BEGAN.split(_tail(run.folder / LOG, STATE_BYTES))
    lengths = list(LENGTH.finditer(text))
    begun = lengths[-1].end() if lengths else 0
    line = next(reversed([*PROGRESS.finditer(text, begun)]), None)
    if earlier and not lengths and not line and is_alive(run):
        return {}
    now = {}
    for row in map(_finite, _last_rows(_logs(run) / METRICS)):
        training = {key[6:]: value for key, value in row.items() if key.startswith("train/")}
        results = {key[5:]: value for key, value in row.items() if key.startswith("eval/")}
        now |= training
        if "step" in row:
            now["step"] = int(row["step"])
            if results:
                now["evaluation"] = (now["step"], results)
    if lengths:
        now["total"] = int(lengths[-1][1])
    if line:
        now["total"] = int(line["total"])
        now["minutes"] = int(line["minutes"])
        if int(line["step"]) > now.get("step", -1):
            now["step"] = int(line["step"])
            now |= _of_line(line)
    return now


def _of_line(line: re.Match) -> dict:
    """The numbers of a progress line under the names of metrics.jsonl."""
    scales = {
        "loss": ("loss", 1),
        "rate": ("learning_rate", 1),
        "speed": ("utterances_per_second", 1),
        "memory": ("memory_bytes", 2**30),
        "waiting": ("data_wait_share", 0.01),
        "gpu": ("gpu_utilisation", 0.01),
    }
    numbers = {}
    for group, (name, scale) in scales.items():
        with contextlib.suppress(TypeError, ValueError):  # it is left out, or damaged
            numbers[name] = scale * float(line[group])
    return numbers


# --- what a run has written -----------------------------------------------------------------------


def _logs(run: Run) -> Path:
    """The folder of the metrics: logs, or that of the stage that was trained last, such as
    logs/dvae."""
    return run.folder / "logs" / _stage(run)


def _stage(run: Run) -> str:
    """The stage of a training in several runs that was trained last, "" for its last one."""
    newest, stage = 0.0, ""
    with contextlib.suppress(OSError), os.scandir(run.folder / "logs") as entries:
        folders = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        for name in ["", *(name for name in folders if not ASIDE.fullmatch(name))]:
            with contextlib.suppress(OSError):
                changed = (run.folder / "logs" / name / METRICS).stat().st_mtime
                if changed > newest:
                    newest, stage = changed, name
    return stage


def log(run: Run, lines: int = 200) -> str:
    """The last lines of a run's log, without control characters. Of a progress bar, which writes a
    line again and again, the last state is shown."""
    text = _tail(run.folder / LOG, LOG_BYTES)
    return "\n".join(text.split("\n")[-lines:])


def _tail(path: Path, size: int) -> str:
    """The end of a text file, without control characters and with shortened lines."""
    text = _last_bytes(path, size).decode("utf-8", errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = ESCAPES.sub("", text)
    lines = text.replace("\r\n", "\n").split("\n")
    if "\r" in text:
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    lines = [line if len(line) <= LINE else line[:LINE] + "..." for line in lines]
    return CONTROL.sub("", "\n".join(lines))


def _last_bytes(path: Path, size: int) -> bytes:
    """The last bytes of a regular file, from the beginning of a line if there is one among them;
    b"" if it cannot be read."""
    try:
        with _open(path) as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(0, length - size))
            data = file.read(size)
    except OSError:
        return b""
    if length > size and b"\n" in data[:-1]:
        data = data[data.index(b"\n") + 1 :]
    return data


def _open(path: Path):
    """A file for reading, not by a link to another place, and without waiting if it is a pipe."""
    if os.path.realpath(path) != os.path.abspath(path):
        raise OSError(errno.ELOOP, "it is a link")
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb")


def _attempt(run: Run) -> str:
    """The end of what a run has printed since its last start, without the line of its command."""
    return BEGAN.split(_tail(run.folder / LOG, STATE_BYTES))[-1].strip("\n")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def _last_rows(path: Path) -> list[dict]:
    """The rows at the end of metrics.jsonl."""
    lines = _last_bytes(path, STATE_BYTES).split(b"\n")
    return [row for row in map(_row, lines) if row]


def _row(line: bytes) -> dict:
    """A line of JSON; {} if it is damaged, or only half written."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _finite(row: dict) -> dict:
    """The numbers of a row, without infinity and NaN."""
    kept = {}
    for name, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer of 400 digits
                if math.isfinite(value):
                    kept[name] = value
    return kept


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file, as far as their length is sensible."""
    with contextlib.suppress(OSError), _open(path) as file:
        while line := file.readline(ROW_BYTES):
            yield line


def metrics(run: Run) -> list[dict]:
    """The rows of metrics.jsonl, of the stage that was trained last, as {"step": 10, "train/loss":
    2.5, ...}, by their order: all evaluations and, if they are many, a part of the others. Values
    that are not finite are left out, and so are rows about events."""
    evaluations, others = [], []
    every = 1
    last = b""
    for number, line in enumerate(_lines(_logs(run) / METRICS)):
        if b'"eval/' in line:
            evaluations.append((number, line))
            continue
        if b'"train/' not in line:
            continue
        last = (number, line)
        if number % every == 0:
            others.append(last)
        if len(others) >= 2 * POINTS:
            every *= 2
            others = [each for each in others if each[0] % every == 0]
    kept = dict([*evaluations, *others, *([last] if last else [])])
    rows = [_finite(_row(kept[number])) for number in sorted(kept)]
    return [row for row in rows if "step" in row and len(row) > 1]


def transcripts(run: Run) -> list[dict]:
    """The rows of transcripts.jsonl, the evaluation set as the best weights read it: "file",
    "reference", "hypothesis"; [] if there are none."""
    rows = []
    for line in _lines(run.folder / "logs" / "transcripts.jsonl"):
        row = _row(line)
        if all(isinstance(row.get(key), str) for key in ("file", "reference", "hypothesis")):
            rows.append(row)
        if len(rows) == ROWS:
            break
    return rows


def weights(run: Run) -> list[Path]:
    """The weights of a run: the best ones, the averaged ones, and its checkpoints, newest first."""
    folder = run.folder / CHECKPOINTS
    found = [
        folder / "best.safetensors",
        folder / "averaged.safetensors",
        *list_checkpoints(folder),
    ]
    return [path for path in found if path.is_file() and not path.is_symlink()]


# --- devices --------------------------------------------------------------------------------------


def device_of(words: list[str]) -> str:
    """The device that a command asks for: "cpu" or "cuda:0". `auto` is the first GPU if torch sees
    one."""
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
        launcher, recipe = _processes(run)
        is_waiting = recipe is None and launch.read_word(run.folder, launcher)[0] == "waiting"
        is_here = (launcher, recipe) != (None, None) and not is_waiting
        if is_here and (run.device or device_of([])) != "cpu":
            found.append(run)
    return found
