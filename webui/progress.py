"""The state of a run, how far it is, and how it has ended: texts for people, of the locks on its
folder and of what it has written there."""

import contextlib
import re
import signal
import time
from dataclasses import dataclass

from common import files
from common.checkpoint import list_checkpoints, step_of
from common.errors import UsageError
from common.report import shown
from webui import launch, outputs
from webui.catalogue import labelled
from webui.outputs import CHECKPOINTS
from webui.places import DRAFT
from webui.runs import Run, is_alive, processes

LENGTH = re.compile(r"^length: (\d+) updates", re.MULTILINE)  # `common.run_length` prints it
# The line of `common.report.Report.progress`. The groups have the names of metrics.jsonl.
PROGRESS = re.compile(
    r"^step (?P<step>\d+)/(?P<total>\d+)  loss (?P<loss>\S+)  lr (?P<learning_rate>\S+)"
    r"  (?P<utterances_per_second>\S+) utterances/s  (?P<memory_bytes>\S+) GiB"
    r"  waiting (?P<data_wait_share>\d+)%(?:  GPU (?P<gpu_utilisation>\d+)%)?"
    r"  (?P<minutes>\d+) min left$",
    re.MULTILINE,
)
# The numbers of training that are shown: (name in metrics.jsonl, label, form, factor before it).
NUMBERS = (
    ("loss", "loss", "{:.3f}", 1),
    ("learning_rate", "learning rate", "{:.1e}", 1),
    ("utterances_per_second", "utterances/s", "{:.1f}", 1),
    ("memory_bytes", "memory", "{:.1f} GiB", 2**-30),
    ("data_wait_share", "waiting for data", "{:.0f} %", 100),
    ("gpu_utilisation", "GPU busy", "{:.0f} %", 100),
)
UNITS = {"cer": "letters", "wer": "words"}  # that error rates count
QUIET_SECONDS = 120  # without a line, after which the last one does not tell the time that is left
STOPPED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class State:
    """`word`: waiting, starting, running, stopping, finished, stopped, failed, killed or untouched.
    `detail`: a line for people."""

    word: str
    detail: str


def state(run: Run) -> State:
    """The state of a run, or how it has ended."""
    launcher, recipe = processes(run)
    process = recipe if launcher is None else launcher
    if process is None:
        return _ended(run)
    word, other = launch.read_word(run.folder, process)
    if word == "waiting":
        return State(word, f"waits for {other}")
    if word == "stopping":
        return State(word, "it saves its state and ends")
    if is_draft(run):
        return State("running", "it transcribes")
    if recipe is None and not _has_locked(run):
        return State("starting", "it loads its libraries")
    return State("running", _position(run))


def is_draft(run: Run) -> bool:
    """Whether this run does not train, but transcribes."""
    return "transcribe" in run.settings.get("values", {})


def _has_locked(run: Run) -> bool:
    """Whether the recipe has held its lock, which it gives back before it ends."""
    with contextlib.suppress(OSError):
        begun = (run.folder / launch.LOCK).stat().st_mtime_ns
        return (run.folder / launch.RECIPE_LOCK).stat().st_mtime_ns >= begun
    return False


# --- how far it is --------------------------------------------------------------------------------


def numbers(run: Run) -> dict[str, str]:
    """The last numbers of a run by their labels, as texts. What is not known is left out."""
    now = _last_numbers(run)
    texts = {}
    if stage := outputs.stage(run.folder):
        texts["stage"] = stage
    if "step" in now:
        texts["step"] = f"{now['step']} of {now['total']}" if "total" in now else str(now["step"])
    if "minutes" in now and is_alive(run):
        texts["time"] = _time_left(run, now["minutes"])
    for name, label, form, factor in NUMBERS:
        if name in now:
            texts[label] = form.format(factor * now[name])
    if "evaluation" in now:
        step, values = now["evaluation"]
        texts["evaluation"] = f"{_results(values)} at step {step}"
    return texts


def _position(run: Run) -> str:
    """The stage and the step of a run, and how long it takes."""
    now = _last_numbers(run)
    if "step" not in now:
        place = "it prepares its data; the log below says what it does"
    elif "total" not in now:
        place = f"step {now['step']}"
    else:
        place = f"step {now['step']} of {now['total']}"
        if now["step"] >= now["total"]:
            place += ", the best weights are evaluated"
        elif "minutes" in now:
            place += f", {_time_left(run, now['minutes'])}"
    stage = outputs.stage(run.folder)
    return f"{stage}: {place}" if stage else place


def _time_left(run: Run, minutes: int) -> str:
    with contextlib.suppress(OSError):
        quiet = time.time() - (run.folder / outputs.LOG).stat().st_mtime
        if quiet > QUIET_SECONDS:
            return f"nothing was printed for {quiet / 60:.0f} minutes"
    if minutes < 2:
        return "less than two minutes left"
    if minutes < 120:
        return f"about {minutes} minutes left"
    return f"about {minutes / 60:.0f} hours left"


def _last_numbers(run: Run) -> dict:
    """The last numbers, of metrics.jsonl or of the log, whichever is newer: those of `NUMBERS`, and
    "step", "total", "minutes" and "evaluation", which is (step, values). Those of an earlier
    attempt are not used while the run prepares itself."""
    *earlier, text = outputs.attempts(run.folder)
    lengths = list(LENGTH.finditer(text))
    begun = lengths[-1].end() if lengths else 0
    lines = list(PROGRESS.finditer(text, begun))
    if earlier and not lengths and not lines and is_alive(run):
        return {}
    now = {}
    for row in outputs.last_metrics(run.folder):
        if "step" in row:
            now["step"] = int(row["step"])
        now |= _without("train/", row)
        if results := _without("eval/", row):
            now["evaluation"] = (now.get("step"), results)
    if lengths:
        now["total"] = int(lengths[-1][1])
    if lines:
        line = lines[-1]
        now["total"] = int(line["total"])
        now["minutes"] = int(line["minutes"])
        if int(line["step"]) > now.get("step", -1):
            now["step"] = int(line["step"])
            for name, _, _, factor in NUMBERS:
                if line[name]:
                    now[name] = float(line[name]) / factor
    return now


def _without(prefix: str, row: dict) -> dict:
    """The values whose names begin with `prefix`, under the rest of their names."""
    kept = {name: value for name, value in row.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in kept.items()}


# --- how it has ended -----------------------------------------------------------------------------


def _ended(run: Run) -> State:
    """How a run that does not run has ended, by ended.json or, if launch.py was killed, its log."""
    if run.fault:
        return State("untouched", run.fault)
    status = None
    with contextlib.suppress(UsageError):
        status = files.read_json(run.folder / launch.ENDED).get("status")
    text = "" if status == 0 else outputs.attempts(run.folder)[-1]
    if status is None and not text:
        return _without_log(run)
    if status is None:
        status = _status_in(text)
    if status == 0 and is_draft(run):
        return State("finished", f"its texts are in the table {run.name}/{DRAFT} of the Data tab")
    if status == 0:
        return State("finished", _best(run) or _saved(run))
    if status in STOPPED:
        return State("stopped", _saved(run))
    if not isinstance(status, int) or status < 0 or status in KILLED:
        return State("killed", f"{_killer(status)}; {_saved(run)}")
    errors = [line for line in text.split("\n") if line.startswith("error: ")]
    return State("failed", labelled(errors[-1]) if errors else outputs.last_line(text))


def _status_in(text: str) -> int | None:
    """The exit status by the last lines of a log; None if the run was killed."""
    lines = [line for line in text.split("\n") if line.strip()][-3:]
    if lines[-1].startswith("stopped by "):
        return STOPPED[0]
    if lines[-1].startswith("error: "):
        return 1
    return 0 if any(line.startswith("weights: ") for line in lines) else None


def _killer(status) -> str:
    if status in KILLED:
        return "it was killed (SIGKILL), perhaps because the memory of the computer was full"
    with contextlib.suppress(ValueError, TypeError):
        return f"it was ended by {signal.Signals(-status).name}"
    return "it ended without a word"


def _without_log(run: Run) -> State:
    """A run that was not started here, or never."""
    if run.settings:
        return State("untouched", "it was not started yet")
    checkpoints = list_checkpoints(run.folder / CHECKPOINTS)
    with contextlib.suppress(OSError):
        # Written at the end of a run, after its last checkpoint.
        written = (run.folder / "logs" / outputs.TRANSCRIPTS).stat().st_mtime
        if checkpoints and written >= checkpoints[0].stat().st_mtime:
            return State("finished", _best(run) or _saved(run))
    return State("stopped", f"{_saved(run)} (from a command line)")


def _saved(run: Run) -> str:
    """Which step is saved."""
    stage = outputs.stage(run.folder)
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
    values = {name: value for name, value in best.items() if outputs.is_finite(value)}
    return f"best at step {best.get('step')}: {_results(values)}" if values else ""


def _results(values: dict) -> str:
    """The results of an evaluation in words, error rates first and losses last."""
    kept = {name: value for name, value in values.items() if name not in ("step", "epoch")}
    said = []
    for name, unit in UNITS.items():
        if name in kept:
            rate = kept.pop(name)
            said.append(f"{100 * rate:.0f} of 100 {unit} wrong ({name} {shown(name, rate)})")
    names = sorted(kept, key=lambda name: "loss" in name)[: 4 - len(said)]
    others = ", ".join(f"{name} {shown(name, kept[name])}" for name in names)
    if others and not said:
        others += " (of each, less is better, but your ear decides)"
    return ", ".join(filter(None, [*said, others]))
