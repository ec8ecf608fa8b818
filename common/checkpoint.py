"""Checkpoints: written atomically, read without running anything in them, kept to the last N and the best."""

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import RunError, UsageError, cannot_write
from common.files import write_atomically

FORMAT = "speech-recipes checkpoint 1"


class Damaged(Exception):
    """A file that was a checkpoint once and is not whole any more."""


def lock_folder(folder: Path):
    """Takes the folder for this process until it ends, so that two runs cannot rotate each other's checkpoints away.
    Returns the lock, to be kept alive. Raises `RunError` where another run holds it."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115  held as long as the process lives
    except OSError as error:
        raise cannot_write(folder, error, "--checkpoint_dir") from None
    try:
        # A record lock: data workers do not inherit it, so that it ends with a killed run and not seconds later.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise RunError(
            f"{folder} is in use by another run (process {lock.read().strip() or 'unknown'}): wait for it, or choose another --checkpoint_dir"
        ) from None
    except OSError:  # a file system without locks: better unguarded than unusable
        return lock
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    for stale in folder.glob("*.tmp"):  # of a run that was killed while saving
        stale.unlink(missing_ok=True)
    return lock


def save(folder: Path, step: int, content: dict, keep_last: int) -> Path:
    """Writes `checkpoint_step_XXXXXXXX.pt` and removes all but the newest `keep_last`. `content`: tensors, lists,
    numbers and strings only, so that `weights_only=True` reads it back."""
    path = folder / f"checkpoint_step_{step:08d}.pt"

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)

    write_atomically(path, write)
    for old in list_checkpoints(folder)[keep_last:]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, newest first."""
    return sorted(folder.glob("checkpoint_step_????????.pt"), reverse=True)


def read(path: Path, recipe: str) -> dict:
    """A checkpoint's content on the CPU. Raises `Damaged` where the file is not whole, `UsageError` where it is
    something else: nothing in it is ever run."""
    if path.suffix == ".safetensors":
        raise UsageError(
            f"{path} holds weights only, no optimizer and no position: --init_from starts a new run from it"
        )
    if path.is_dir() or not path.exists():
        found = list_checkpoints(path.parent) if path.parent.is_dir() else []
        there = f"; there is {found[0]}" if found else "; without --resume a new run starts"
        raise UsageError(f"--resume {path}: {'it is a folder' if path.is_dir() else 'no such file'}{there}")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch.load does not compare the checksums that torch.save wrote
        if broken:
            raise Damaged(f"{path} is damaged (checksum of {broken})")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        with open(path, "rb") as file:
            ours = file.read(2) == b"PK" or path.name.startswith("checkpoint_step_")
        if ours:
            raise Damaged(f"{path} is damaged (truncated or overwritten)") from None
        raise UsageError(f"{path} is no checkpoint of this project (not a file that torch.save writes today)") from None
    except Exception as error:  # torch.load wraps whatever it refuses in several types
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise UsageError(
                f"{path} is refused: it holds Python objects, which loading would run; --init_from takes plain tensors only, too"
            ) from None
        raise Damaged(
            f"{path} is damaged ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        keys = ", ".join(list(map(str, content))[:5]) if isinstance(content, dict) else type(content).__name__
        raise UsageError(
            f"{path} is no checkpoint of this project (it holds: {keys}); --resume takes what a run of recipes/{recipe}.py saved"
        )
    if content["recipe"] != recipe:
        raise UsageError(
            f"{path} was saved by recipes/{content['recipe']}.py, not by recipes/{recipe}.py; a new run goes into another --output_dir"
        )
    return content


def resume(wanted: str | None, folder: Path, recipe: str) -> dict | None:
    """What `--resume` asks for: None where the run starts anew. With `auto` a damaged newest file is reported and the
    one before it is used."""
    if not wanted:
        return None
    if wanted != "auto":
        try:
            content = read(Path(wanted), recipe)
        except Damaged as damage:
            raise UsageError(f"{damage}; --resume auto takes the newest sound checkpoint of {folder}") from None
        print(f"resuming from {wanted} (step {content['progress']['step']})")
        return content
    for path in list_checkpoints(folder):
        try:
            content = read(path, recipe)
        except Damaged as damage:
            print(f"warning: {damage}; using the one before it", file=sys.stderr)
            continue
        print(f"resuming from {path} (step {content['progress']['step']})")
        return content
    print(f"--resume auto: no checkpoint in {folder}, starting anew")
    return None


def continues(resume: str | None, folder: Path) -> bool:
    """Whether a run that `--resume` starts goes on in the folder that it was in; one from elsewhere is new there."""
    return bool(resume) and (resume == "auto" or Path(resume).resolve().parent == folder.resolve())


def make_room(folder: Path, log_dir: Path) -> None:
    """Moves an earlier run's checkpoints and logs aside when a new run starts in its folders, so that neither is lost
    nor mixed with the other's."""
    earlier = [*list_checkpoints(folder), *folder.glob("best.*"), *folder.glob("averaged.*")]
    logs = [p for p in log_dir.glob("*") if p.name in ("metrics.jsonl", "training.png") or p.name.startswith("events.")]
    if not earlier and not logs:
        return
    number = 1
    while (folder / f"earlier-{number}").exists() or (log_dir / f"earlier-{number}").exists():
        number += 1
    for parent, files in ((folder, earlier), (log_dir, logs)):
        for file in files:
            (parent / f"earlier-{number}").mkdir(exist_ok=True)
            file.rename(parent / f"earlier-{number}" / file.name)
    if earlier:
        print(
            f"{folder} held an earlier run: moved to {folder / f'earlier-{number}'} (--resume auto would have continued it)"
        )


def save_weights(path: Path, model: torch.nn.Module, metadata: dict, summary: dict) -> None:
    """Writes `path` (.safetensors: the weights, and `metadata` as JSON in its header, so that the one file is enough to
    rebuild the model) and a readable `summary` beside it (.json)."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    header = {"format": FORMAT, "metadata": json.dumps(metadata, ensure_ascii=False)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=header))
    text = json.dumps(summary, ensure_ascii=False, indent=1)
    write_atomically(path.with_suffix(".json"), lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def read_weights(path: str | Path, recipe: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights and metadata of a `.safetensors` that a run saved, or of a checkpoint. Raises `UsageError`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        try:
            content = read(path, recipe)
        except Damaged as damage:
            raise UsageError(str(damage)) from None
        return content["model"], content["metadata"]
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no dict
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} was not saved by this project")
    metadata = json.loads(header["metadata"])
    if metadata["recipe"] != recipe:
        raise UsageError(f"{path} was saved by recipes/{metadata['recipe']}.py, not by recipes/{recipe}.py")
    return tensors, metadata


def weights_to_use(args, recipe: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights and metadata of `--resume` or, without it, of the best evaluation in the checkpoint folder."""
    path = Path(args.resume) if args.resume and args.resume != "auto" else args.checkpoint_dir / "best.safetensors"
    if not path.exists():
        raise UsageError(f"no weights at {path}: train first, or name them with --resume")
    return read_weights(path, recipe)


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """`load_state_dict`, whose failure is one line: a recipe that was changed no longer reads what it saved before."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[1].strip()
        raise UsageError(
            f"the saved weights do not fit this model ({first[:150]}): the recipe was another version then; "
            "--init_from takes what still fits"
        ) from None


def initialise(model: torch.nn.Module, tensors: dict[str, torch.Tensor], path: str) -> None:
    """Copies into `model` every tensor whose name and shape fit, and says what did not."""
    own = model.state_dict()
    fits = {name: tensor for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    if not fits:
        raise UsageError(f"--init_from {path}: none of its {len(tensors)} tensors fits this model")
    model.load_state_dict(fits, strict=False)
    left = sorted(set(own) - set(fits))
    rest = f"; new: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}" if left else ""
    print(f"initialised {len(fits)} of {len(own)} tensors from {path}{rest}")


def average(folder: Path, count: int, by: str, recipe: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The mean of the weights of `count` checkpoints and their steps: the newest ("last"), or those whose evaluation
    was best among the ones that are kept ("best": evaluate as often as you save). Raises `UsageError` where there is
    none."""
    steps = {int(path.stem.rsplit("_", 1)[1]): path for path in list_checkpoints(folder)}
    if by == "best" and steps:
        values = dict(map(tuple, read(steps[max(steps)], recipe)["progress"]["evaluations"]))
        steps = {
            step: steps[step] for step in sorted(steps, key=lambda s: values.get(s, float("inf"))) if step in values
        }
    chosen = list(steps)[:count]
    if not chosen:
        raise UsageError(
            f"--average_checkpoints: {folder} keeps no checkpoint that was evaluated; set --save_every to a multiple of --eval_every"
        )
    total: dict[str, torch.Tensor] = {}
    for step in chosen:
        for name, tensor in read(steps[step], recipe)["model"].items():
            if name not in total:
                total[name] = tensor.double() if tensor.is_floating_point() else tensor
            elif tensor.is_floating_point():
                total[name] += tensor.double()
    last = read(steps[chosen[0]], recipe)["model"]
    mean = {
        name: (value / len(chosen)).to(last[name].dtype) if last[name].is_floating_point() else value
        for name, value in total.items()
    }
    return mean, chosen


def use_best(
    args, model: torch.nn.Module, recipe: str, metadata: dict, score: Callable[[], float], name: str = "CER"
) -> str:
    """Loads the weights of the best evaluation or, with --average_checkpoints, the average where `score()` of it, in
    evaluation mode and without gradients, is not higher (kept as averaged.safetensors). Returns what was loaded, in
    words."""
    weights, _ = read_weights(args.checkpoint_dir / "best.safetensors", recipe)
    model.load_state_dict(weights)
    model.eval()
    if not args.average_checkpoints:
        return "weights of the best evaluation"
    best = score()
    mean, steps = average(args.checkpoint_dir, args.average_checkpoints, args.average_by, recipe)
    model.load_state_dict(mean)
    averaged = score()
    shown = ", ".join(map(str, steps))
    print(f"average of the checkpoints of steps {shown}: {name} {averaged:.2%}, best evaluation: {best:.2%}")
    if averaged > best:
        model.load_state_dict(weights)
        return "weights of the best evaluation (the average was worse)"
    summary = {"steps": steps, name.lower(): averaged}
    save_weights(args.checkpoint_dir / "averaged.safetensors", model, metadata, summary)
    return "averaged weights (averaged.safetensors)"
