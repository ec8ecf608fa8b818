"""Saving a run: checkpoints, the best weights, and what a signal does. What the files hold is in
`checkpoint.py`."""

import contextlib
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common import checkpoint, files, optim
from common.device import Setup, rng_state
from common.errors import Failure, RunError, Stopped, writing
from common.memory import size
from common.ranks import Ranks
from common.task import Run
from common.training import Training


@contextlib.contextmanager
def watch_signals(training: Training) -> Iterator[None]:
    """Records SIGTERM, SIGINT and SIGHUP (a closed terminal; ignored under nohup) in
    `training.caught`, so that the run can save itself. A second SIGINT interrupts at once."""

    def catch(number: int, frame) -> None:
        if training.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        training.caught = number

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {}
    with contextlib.suppress(ValueError):  # in another thread, where Python delivers no signals
        handlers = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def saved_and_stopped(training: Training, caught: int) -> Stopped:
    """Saves the run. Returns the error that ends it after the signal `caught`."""
    save(training)
    step = training.progress.step
    place = f"step {step} is saved in {training.args.checkpoint_dir}"
    name = signal.Signals(caught).name
    return Stopped(f"stopped by {name}: {place}; --resume auto continues from there", 128 + caught)


def save(training: Training) -> None:
    """Writes a checkpoint of the run as it is now, with the random state of every rank."""
    progress = training.progress
    ranks = training.setup.ranks
    states = ranks.gather(rng_state(training.setup.device))
    training.last_saved = progress.step
    training.saved_at = time.monotonic()
    progress.order = training.global_batches.order(progress.epoch)
    progress.schedule = training.schedule.state()
    with ranks.patient():
        model = training.engine.state()
        optimizer = training.engine.optimizer_state()
        if ranks.first:
            write_checkpoint(training, states, model, optimizer)
        ranks.gather(None)  # the others wait for the first


def save_alone(training: Training) -> None:
    """Writes a checkpoint without the other ranks, after a failure of this one, or if one of them
    is lost. Their random states are, too. Nothing is written if they have a part of the run's
    state. A failure to write is only said, because another one ends the run."""
    ranks = training.setup.ranks
    has_all = ranks.size == 1 or not training.engine.is_divided
    if ranks.first and has_all and training.progress.step > max(0, training.last_saved):
        training.setup = replace(training.setup, ranks=Ranks())
        try:
            save(training)
        except Failure as failure:
            training.report.say(f"the run could not be saved: {failure}")


def write_checkpoint(training: Training, states: list, model: dict, optimizer: dict) -> None:
    """Writes a checkpoint, with the random `states` of every rank."""
    args = training.args
    progress = training.progress
    flags = {}
    for name, value in vars(args).items():
        if name not in ("given", "rules"):
            flags[name] = value if isinstance(value, int | float | str | None) else str(value)
    content = {
        "recipe": training.task.name,
        "model_info": asdict(training.task.model_info),
        "run_info": asdict(training.task.run_info),
        "adapters": record_of(training),
        "progress": asdict(progress),
        "rng": states,
        "model": model,
        "optimizer": optimizer,
        "scaler": training.loss_scale.state_dict() if training.loss_scale else None,
        "torch": str(torch.__version__),
        "args": flags,
    }
    checkpoint.save(args.checkpoint_dir, progress.step, content, args.keep_last)


def record_of(training: Training) -> dict | None:
    """The record that is saved beside a part of a model (`checkpoint.Partial`)."""
    partial = checkpoint.partial_of(training.engine.model)
    return partial.record if partial else None


def keep_best(training: Training, values: dict[str, float]) -> None:
    """Saves the weights as those of the best evaluation, which has these `values`."""
    args = training.args
    task = training.task
    progress = training.progress
    ranks = training.setup.ranks
    summary = {"step": progress.step, "epoch": progress.epoch, **values}
    summary |= {"metric": task.metric, "evaluations": progress.evaluations}
    if task.further:
        summary[task.further.kind] = progress.parts[task.further.kind]
    summary["made_by"] = made_by(task.name, training.setup, progress.base)
    path = args.checkpoint_dir / "best.safetensors"
    with ranks.patient():
        state = training.engine.state()
        if ranks.first:
            checkpoint.save_weights(path, state, task, summary, record_of(training))
            for name, text in task.beside.items():
                text = with_added_lines(path.with_name(name), text)
                files.save(
                    path.with_name(name),
                    lambda place, text=text: place.write_text(text, encoding="utf-8"),
                )
        ranks.gather(None)  # the others wait for the first


def with_added_lines(path: Path, text: str) -> str:
    """A text for the file `path`, with the lines that somebody has added to the one there."""
    if not path.is_file():
        return text
    own = set(text.splitlines())
    there = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    return text + "".join(f"{line}\n" for line in there if line not in own)


def base_of(args, run: Run) -> str | None:
    """The path of the released weights at the root of this run, or None."""

    def named(flags: dict) -> str | None:
        return flags.get("model_dir") or flags.get("model_file")

    saved = run.resumed or run.initial
    if named(vars(args)) or saved is None:
        return named(vars(args))
    if saved.state:
        return saved.progress.base or named(saved.state["args"])
    return (checkpoint.noted(saved.path).get("made_by") or {}).get("base")


def made_by(recipe: str, setup: Setup, base: str | None) -> dict:
    """How the weights came about, for best.json: the command (None if another program has called
    the recipe), the released weights `base` that it began with, the tier of the preset script, the
    GPU, and versions."""
    command = None
    if os.path.basename(sys.argv[0]) == f"{recipe}.py":
        command = shlex.join(["python", f"recipes/{recipe}.py", *sys.argv[1:]])
    name = "CPU"
    if setup.device.type == "cuda":
        name = torch.cuda.get_device_name(setup.device)
    return {
        "command": command,
        "base": base,
        "tier": os.environ.get("PRESET_TIER"),
        "device": name if setup.ranks.size == 1 else f"{setup.ranks.size} x {name}",
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def disk_space(args, model: torch.nn.Module) -> tuple[bool, str]:
    """Whether `--keep_last` + 1 checkpoints, and the best weights twice, fit on the disk, and the
    sizes as text. What they replace counts as free."""
    folder = args.checkpoint_dir
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return False, f"cannot write in {existing}; choose another --output_dir"
    weights = 4 * sum(tensor.numel() for tensor in checkpoint.state_of(model).values())
    # With the states, also if they are in host memory.
    each = weights + optim.state_bytes(model, args.optimizer)
    needed = (args.keep_last + 1) * each + 2 * weights
    replaced = [*checkpoint.list_checkpoints(folder), *folder.glob("best.safetensors")]
    own = replaced if checkpoint.continues(args.resume, folder) else []
    disk = shutil.disk_usage(existing)
    if not disk.total:  # some network drives do not say
        return True, f"unknown room in {existing}"
    free = disk.free + sum(path.stat().st_size for path in own)
    need = f"{args.keep_last} + 1 checkpoints of {size(each)} and the best weights, {size(needed)}"
    if free < needed:
        advice = "lower --keep_last, or choose another --output_dir"
        return False, f"{size(free)} free for {need}; {advice}"
    return True, f"{size(free)} free for {need}"


def require_disk(args, model: torch.nn.Module) -> None:
    """Raises `RunError` without `disk_space`: a disk must not be full after hours of training."""
    with writing(args.checkpoint_dir, "--output_dir"):
        fits, reason = disk_space(args, model)
    if not fits:
        raise RunError(f"checkpoints in {args.checkpoint_dir}: {reason}")
