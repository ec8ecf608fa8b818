"""Checkpoints: atomic saving, reading without executing code, the last N and the best, averaging, the folder's lock."""

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import files
from common.errors import RunError, UsageError, cannot_write, first_line

FORMAT = "speech-recipes checkpoint 1"


class Damaged(UsageError):
    """A truncated or corrupted checkpoint file."""


def lock_folder(folder: Path):
    """Locks the folder for this process, so that two runs cannot delete each other's checkpoints. The lock holds as
    long as the returned object exists. Raises `RunError` if another run has it."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115
    except OSError as error:
        raise cannot_write(folder, error, "--checkpoint_dir") from None
    try:
        # Data workers do not inherit a record lock, so it ends together with a killed run and not seconds later.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        user = f"another run (process {lock.read().strip() or 'unknown'})"
        raise RunError(f"{folder} is in use by {user}: wait for it, or choose another --checkpoint_dir") from None
    except OSError:  # the file system has no locks
        return lock
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    for stale in folder.glob("*.tmp"):  # from a run that was killed while saving
        stale.unlink(missing_ok=True)
    return lock


def save(folder: Path, step: int, content: dict, keep_last: int) -> Path:
    """Writes `checkpoint_step_XXXXXXXX.pt` and removes all but the newest `keep_last` checkpoints. `content` consists
    of tensors, lists, dicts, numbers and strings, so that `weights_only=True` can read it. Raises `RunError`."""
    path = folder / f"checkpoint_step_{step:08d}.pt"

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)

    files.save(path, write)
    for old in list_checkpoints(folder)[keep_last:]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, newest first."""
    return sorted(folder.glob("checkpoint_step_????????.pt"), reverse=True)


def read(path: Path, recipe: str) -> dict:
    """The content of a checkpoint, on the CPU. No code in the file is executed. Raises `Damaged` for a truncated or
    corrupted file, `UsageError` for a file that is not a checkpoint of `recipe`."""
    if path.suffix == ".safetensors":
        raise UsageError(f"{path} holds weights only, not the state of a run: start a new run from it with --init_from")
    if path.is_dir() or not path.exists():
        checkpoints = list_checkpoints(path if path.is_dir() else path.parent)
        hint = f"there is {checkpoints[0]}" if checkpoints else "there is no checkpoint in that folder"
        raise UsageError(f"{path}: {'it is a folder' if path.is_dir() else 'no such file'}; {hint}")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # torch.load does not compare the checksums that torch.save wrote
                raise zipfile.BadZipFile
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        with open(path, "rb") as file:
            is_damaged = file.read(2) == b"PK" or path.name.startswith("checkpoint_step_")
        if is_damaged:
            raise Damaged(f"{path} is damaged (truncated or overwritten)") from None
        raise UsageError(f"{path} is not a checkpoint of this project (torch.save does not write such files)") from None
    except Exception as error:  # torch.load raises several types
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise UsageError(f"{path} is refused: it holds Python objects, and loading them could run code") from None
        raise Damaged(f"{path} is damaged ({first_line(error)})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        keys = ", ".join(list(map(str, content))[:5]) if isinstance(content, dict) else type(content).__name__
        raise UsageError(f"{path} is not a checkpoint of this project (it holds: {keys})")
    _check_recipe(path, content["recipe"], recipe)
    return content


def _check_recipe(path: Path, saved_by: str, recipe: str) -> None:
    if saved_by != recipe:
        names = f"recipes/{saved_by}.py, not by recipes/{recipe}.py"
        raise UsageError(f"{path} was saved by {names}; each recipe needs its own --output_dir")


def resume(wanted: str | None, folder: Path, recipe: str) -> dict | None:
    """The content of the checkpoint that `--resume` names; None for a new run. With `auto` it is the newest sound
    checkpoint in `folder`, and damaged ones are reported. Raises `UsageError`."""
    if not wanted:
        return None
    for path in list_checkpoints(folder) if wanted == "auto" else [Path(wanted)]:
        try:
            content = read(path, recipe)
        except Damaged as damage:
            if wanted != "auto":
                raise UsageError(f"{damage}; --resume auto takes the newest sound checkpoint of {folder}") from None
            print(f"warning: {damage}; using the one before it", file=sys.stderr)
            continue
        print(f"resuming from {path} (step {content['progress']['step']})")
        return content
    print(f"--resume auto: no checkpoint in {folder}, starting a new run")
    return None


def continues(resume: str | None, folder: Path) -> bool:
    """Whether `--resume` continues the run in `folder`; a checkpoint from elsewhere starts a new run there."""
    return bool(resume) and (resume == "auto" or Path(resume).resolve().parent == folder.resolve())


def make_room(folder: Path, log_dir: Path) -> None:
    """Moves the checkpoints and logs of an earlier run into subfolders when a new run starts in its folders."""
    earlier = [*list_checkpoints(folder), *folder.glob("best.*"), *folder.glob("averaged.*")]
    logs = [path for name in ("metrics.jsonl", "training.png", "events.*") for path in log_dir.glob(name)]
    number = 1
    while (folder / f"earlier-{number}").exists() or (log_dir / f"earlier-{number}").exists():
        number += 1
    for path in (*earlier, *logs):
        (path.parent / f"earlier-{number}").mkdir(exist_ok=True)
        path.rename(path.parent / f"earlier-{number}" / path.name)
    if earlier:
        print(f"{folder}: an earlier run was moved to earlier-{number}/ (--resume auto would have continued it)")


def save_weights(path: Path, model: torch.nn.Module, metadata: dict, summary: dict) -> None:
    """Writes the weights to `path` (.safetensors), with `metadata` as JSON in the header, so that this file is enough
    to rebuild the model. Writes `summary` beside it (.json). Raises `RunError`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    header = {"format": FORMAT, "metadata": json.dumps(metadata, ensure_ascii=False)}
    files.save(path, lambda temporary: save_file(tensors, temporary, metadata=header))
    text = json.dumps(summary, ensure_ascii=False, indent=1) + "\n"
    files.save(path.with_suffix(".json"), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_weights(path: str | Path, recipe: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights and metadata in a checkpoint or in a `.safetensors` that a run saved. Raises `UsageError`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        content = read(path, recipe)
        return content["model"], content["metadata"]
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} was not saved by this project")
    metadata = json.loads(header["metadata"])
    _check_recipe(path, metadata["recipe"], recipe)
    return tensors, metadata


def weights_to_use(args, recipe: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights and metadata of `--resume` or, without a path, of the best evaluation. Raises `UsageError`."""
    path = Path(args.resume) if args.resume and args.resume != "auto" else args.checkpoint_dir / "best.safetensors"
    if not path.exists():
        raise UsageError(f"no weights at {path}: train first, or name them with --resume")
    return read_weights(path, recipe)


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Loads weights that a run saved. Raises `UsageError` if they do not fit, because the recipe has been changed."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[1].strip()[:150]
        advice = "the recipe has changed since; --init_from loads those that fit"
        raise UsageError(f"the saved weights do not fit this model ({reason}): {advice}") from None


def initialise(model: torch.nn.Module, tensors: dict[str, torch.Tensor], path: str) -> None:
    """Copies the tensors whose name and shape fit into `model`. Raises `UsageError` if none fits."""
    own = model.state_dict()
    fits = {name: tensor for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    if not fits:
        raise UsageError(f"--init_from {path}: none of its {len(tensors)} tensors fits this model")
    model.load_state_dict(fits, strict=False)
    new = sorted(set(own) - set(fits))
    names = ", ".join(new[:5]) + (" ..." if len(new) > 5 else "")
    print(f"initialised {len(fits)} of {len(own)} tensors from {path}" + (f"; new: {names}" if new else ""))


def average(folder: Path, count: int, by: str, recipe: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The mean weights of `count` checkpoints, and their steps: the newest (`by` "last") or, among those in the folder,
    the ones that evaluated best ("best"). Integers are those of the first. Raises `UsageError` if there is none."""
    paths = {int(path.stem.rsplit("_", 1)[1]): path for path in list_checkpoints(folder)}
    steps = list(paths)  # newest first
    if by == "best" and steps:
        errors = dict(map(tuple, read(paths[steps[0]], recipe)["progress"]["evaluations"]))
        steps = sorted((step for step in steps if step in errors), key=errors.get)
    steps = steps[:count]
    if not steps:
        advice = "make --save_every a multiple of --eval_every"
        raise UsageError(f"--average_checkpoints: {folder} keeps no checkpoint that was evaluated; {advice}")
    total: dict[str, torch.Tensor] = {}
    for step in steps:
        weights = read(paths[step], recipe)["model"]
        for name, tensor in weights.items():
            if name not in total:
                total[name] = tensor.double() if tensor.is_floating_point() else tensor
            elif tensor.is_floating_point():
                total[name] += tensor.double()
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            total[name] = (total[name] / len(steps)).to(tensor.dtype)
    return total, steps


def use_best(args, model: torch.nn.Module, name: str, metadata: dict, score: Callable[[], float]) -> str:
    """Loads the weights of the best evaluation or, if --average_checkpoints is given and `score()` is not higher for
    it, the average, which is saved as averaged.safetensors. Puts the model into evaluation mode and returns a
    description of the weights. Call it under `torch.no_grad`."""
    weights, _ = read_weights(args.checkpoint_dir / "best.safetensors", name)
    model.load_state_dict(weights)
    model.eval()
    if not args.average_checkpoints:
        return "weights of the best evaluation"
    best = score()
    mean, steps = average(args.checkpoint_dir, args.average_checkpoints, args.average_by, name)
    model.load_state_dict(mean)
    averaged = score()
    names = ", ".join(map(str, steps))
    print(f"average of the checkpoints of steps {names}: {averaged:.2%}, best evaluation: {best:.2%}")
    if averaged > best:
        model.load_state_dict(weights)
        return "weights of the best evaluation (the average was worse)"
    save_weights(args.checkpoint_dir / "averaged.safetensors", model, metadata, {"steps": steps, "error": averaged})
    return "averaged weights (averaged.safetensors)"
