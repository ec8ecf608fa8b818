"""Checkpoints: atomic saving, reading without executing code, the last N and the best, averaging,
the folder's lock."""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
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
CHECKPOINT = re.compile(r"checkpoint_step_(\d{8,12})\.pt")
WEIGHTS = ("best.safetensors", "best.json", "averaged.safetensors", "averaged.json")
LOGS = (
    "metrics.jsonl",
    "training.png",
    "transcripts.jsonl",
    "evaluation.json",
    "events.out.tfevents.*",
)


class Damaged(UsageError):
    """A truncated, corrupted or altered checkpoint file."""


# A schema is a type, a tuple of schemas of which one must fit, a range, a set of values, a function
# that says whether a value fits, [schema] for a list, or {key: schema}. A key with a question mark
# may be missing, and other keys may be there too.
NUMBER = (float, int)
COUNT = range(1 << 53)


def within(value, allowed: range) -> bool:
    """Whether a value is an integer in a range. (`in` alone would walk through the range for other
    types.)"""
    return type(value) is int and value in allowed


RANDOM_STATE = {
    "python": lambda state: (
        len(state) == 3
        and len(state[1]) == 625
        and all(within(n, range(1 << 32)) for n in state[1])
    ),
    "numpy": lambda state: (
        len(state) == 5
        and state[0] == "MT19937"
        and state[1].shape == (624,)
        and within(state[2], range(625))
    ),
    "torch": lambda state: (
        state.dtype == torch.uint8 and state.shape == torch.get_rng_state().shape
    ),
    "cuda?": lambda state: state.dtype == torch.uint8 and state.shape == (16,),
}
PROGRESS = {
    **dict.fromkeys(
        (
            "step",
            "epoch",
            "global_batch",
            "global_batch_size",
            "utterances",
            "best_step",
            "evaluations_without_gain",
        ),
        COUNT,
    ),
    **dict.fromkeys(("bad_batches", "bad_in_a_row", "skipped_files"), COUNT),
    "last_evaluation": range(-1, 1 << 53),
    "best": (NUMBER, type(None)),
    "data": str,
    "done": [[range(1 << 53)]],
    "origin?": lambda pair: len(pair) == 2 and all(within(each, COUNT) for each in pair),
    "evaluations": [
        lambda pair: len(pair) == 2 and within(pair[0], COUNT) and isinstance(pair[1], NUMBER)
    ],
    "limits": lambda limits: all(
        isinstance(key, int) and within(size, COUNT[1:]) for key, size in limits.items()
    ),
}
STATE = {
    "step": lambda step: step.numel() == 1,
    "exp_avg": torch.Tensor,
    "exp_avg_sq": torch.Tensor,
}
CONTENT = {
    "recipe": str, "metadata": dict, "model": dict, "progress": PROGRESS, "args": dict,
    "optimizer": lambda states: isinstance(states, dict) and len(states) > 0,
    "rng": lambda states: len(states) > 0 and mismatch(states, [RANDOM_STATE], "") is None,
    "scaler": (type(None), {"scale": lambda scale: scale > 0, "_growth_tracker": COUNT}),
}  # fmt: skip


def mismatch(value, schema, place: str) -> str | None:
    """The first part of `value` that does not fit the schema, as text with its place; None if all
    fits."""
    if isinstance(schema, tuple):
        reasons = [mismatch(value, each, place) for each in schema]
        return reasons[-1] if all(reasons) else None
    if isinstance(schema, list | dict) and isinstance(value, type(schema)):
        parts = [
            (f"{place}[{number}]", each, schema[0])
            for number, each in enumerate(value)
            if type(schema) is list
        ]
        if type(schema) is dict:
            needed = {
                key: inner for key, inner in schema.items() if key[-1] != "?" or key[:-1] in value
            }
            names = {key.removesuffix("?"): inner for key, inner in needed.items()}
            parts = [
                (f"{place}.{name}", value.get(name, ...), inner) for name, inner in names.items()
            ]
        return next(
            filter(None, (mismatch(each, inner, part) for part, each, inner in parts)), None
        )
    try:
        if isinstance(schema, type):
            fits = isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
        elif isinstance(schema, range):
            fits = within(value, schema)
        elif isinstance(schema, set):
            fits = type(value) in (int, str) and value in schema
        else:
            fits = schema(value)
    except (
        Exception
    ):  # whatever a value of the wrong type raises, and a list or mapping in place of another type
        fits = False
    return None if fits else f"{place} is {'missing' if value is ... else repr(str(value)[:40])}"


def _require(path: Path, value, schema, place: str) -> None:
    if reason := mismatch(value, schema, place):
        raise Damaged(f"{path} is damaged: {reason}")


def check_tensors(tensors: dict, path: str | Path) -> dict[str, torch.Tensor]:
    """`tensors`, if they are dense tensors by name whose values are in the file and finite. Copies
    none. Raises `Damaged`."""
    for name, tensor in tensors.items():
        is_dense = (
            isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and not tensor.is_meta
        )
        if (
            not isinstance(name, str)
            or not is_dense
            or (tensor.is_floating_point() and tensor.itemsize == 1)
        ):
            raise Damaged(
                f"{path}: {str(name)[:60]!r} is not a dense tensor, or is one of 8-bit floats"
            )
        if (
            tensor.is_quantized
            or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()
        ):
            raise Damaged(f"{path}: the tensor {name[:60]!r} is larger than its data")
        if (
            tensor.is_floating_point()
            and tensor.numel()
            and not all(map(math.isfinite, tensor.aminmax()))
        ):
            raise Damaged(
                f"{path}: the tensor {name[:60]!r} has values that are not finite (NaN or infinity)"
            )
    return tensors


def load(path: Path):
    """The content of a file that torch.save wrote, mapped if its form allows. No code in it is
    executed, and what is decompressed is not larger than the file. Raises `Damaged`, and
    `UsageError` for any other file."""
    files.require_file(path)
    try:
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK" or not zipfile.is_zipfile(
            path
        ):  # a tar with a zip inside passes for a zip
            if start == b"PK" or CHECKPOINT.fullmatch(path.name):
                raise zipfile.BadZipFile
            if start != b"\x80\x02":  # of the format before torch 1.6, which cannot be mapped
                raise UsageError(f"{path} is not a file of torch.save")
        else:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
                if (
                    size > path.stat().st_size or archive.testzip()
                ):  # torch.load does not compare the checksums
                    raise zipfile.BadZipFile
        with files.utf8(path) as name:
            return torch.load(name, map_location="cpu", weights_only=True, mmap=start == b"PK")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, NotImplementedError):
        raise Damaged(f"{path} is damaged (truncated or overwritten)") from None
    except UsageError:
        raise
    except Exception as error:  # torch.load raises several types
        if "weights_only" in str(error) or "Unsupported" in str(error):
            reason = (
                "torch.save did not write it, or it holds Python objects, and loading them could"
                " run code"
            )
            raise UsageError(f"{path} is refused: {reason}") from None
        raise Damaged(f"{path} is damaged ({first_line(error)[:100]})") from None


def lock_folder(folder: Path, flag: str):
    """Locks the folder for this process, so that two runs cannot delete each other's files. The
    lock holds as long as the returned object exists. `flag` is the one that chooses the folder.
    Raises `RunError` if another run has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(
            os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+"
        )
    except OSError as error:
        raise cannot_write(folder, error, flag) from None
    try:
        # Data workers do not inherit a record lock, so it ends together with a killed run and not
        # seconds later.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        user = f"another run (process {lock.read(20).strip() or 'unknown'})"
        raise RunError(
            f"{folder} is in use by {user}: wait for it, or choose another {flag}"
        ) from None
    except OSError:  # the file system has no locks
        return lock
    with contextlib.suppress(OSError):  # the number is for a message only, and the disk may be full
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
    files.remove_stale(
        folder, "|".join((CHECKPOINT.pattern, *WEIGHTS, *LOGS[:4]))
    )  # of a run that was killed
    return lock


def save(folder: Path, step: int, content: dict, keep_last: int) -> Path:
    """Writes `checkpoint_step_XXXXXXXX.pt` and removes all but it and the newest `keep_last` - 1
    others. `content` consists of tensors, lists, dicts, numbers and strings, so that
    `weights_only=True` can read it. Raises `RunError`."""
    path = folder / f"checkpoint_step_{step:08d}.pt"

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)

    files.save(path, write)
    for old in [other for other in list_checkpoints(folder) if other != path][keep_last - 1 :]:
        old.unlink(missing_ok=True)
    return path


def step_of(path: Path) -> int:
    """The update of a checkpoint, by its name; -1 for other names."""
    return int(match[1]) if (match := CHECKPOINT.fullmatch(path.name)) else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, newest first."""
    own = [
        path
        for path in folder.glob("checkpoint_step_*.pt")
        if step_of(path) >= 0 and path.is_file()
    ]
    return sorted(own, key=step_of, reverse=True)


def read(path: Path, recipe: str, metadata: dict | None = None, flag: str = "--resume") -> dict:
    """The content of a checkpoint; its tensors are views of the file, so copy what is kept.
    `metadata` is the schema of the recipe's. No code in the file is executed. Raises `Damaged` for
    a truncated, corrupted or altered file, `UsageError` for one that is not a checkpoint of
    `recipe`."""
    exists = os.path.exists(path)  # (pathlib's own raises for a name that is too long)
    if path.suffix == ".safetensors" and exists:
        raise UsageError(
            f"{path} holds weights only, not the state of a run: start a new run from it with"
            " --init_from"
        )
    if not exists or path.is_dir():
        checkpoints = list_checkpoints(path if exists else path.parent)
        hint = (
            f"there is {checkpoints[0]}" if checkpoints else "there is no checkpoint in that folder"
        )
        raise UsageError(f"{flag} {path}: {'it is a folder' if exists else 'no such file'}; {hint}")
    content = load(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        keys = (
            ", ".join(list(map(str, content))[:5])
            if isinstance(content, dict)
            else type(content).__name__
        )
        raise UsageError(f"{path} is not a checkpoint of this project (it holds: {keys[:200]})")
    _require(path, content, CONTENT, "it")
    _check_metadata(path, content["metadata"], content["recipe"], recipe, metadata)
    model = check_tensors(content["model"], path)
    for name, state in content["optimizer"].items():
        _require(path, name, str, "a name")
        _require(path, state, STATE, f"the optimizer's {name[:60]}")
        check_tensors(state, path)
        if not _is_state_of(model.get(name), state):
            raise Damaged(
                f"{path} is damaged: the optimizer's states of {name[:60]!r} do not fit its weights"
            )
    return content


def _is_state_of(weights: torch.Tensor | None, state: dict[str, torch.Tensor]) -> bool:
    """Whether an optimizer's averages have the shape of the weights, and 8-bit ones their scales
    and table."""
    for key in ("exp_avg", "exp_avg_sq"):
        average = state[key]
        if weights is not None and average.shape != weights.shape:
            return False
        if average.dtype == torch.uint8:
            scales, table = state.get(f"{key}_scales"), state.get(f"{key}_table")
            if (
                scales is None
                or table is None
                or table.numel() != 256
                or 256 * scales.numel() < average.numel()
            ):
                return False
    return True


def _check_metadata(
    path: Path, content: dict, saved_by: str, recipe: str, schema: dict | None
) -> None:
    if saved_by != recipe:
        names = f"recipes/{saved_by[:60]}.py, not by recipes/{recipe}.py"
        raise UsageError(f"{path} was saved by {names}; each recipe needs its own --output_dir")
    _require(path, content, schema or {}, "its metadata")


def resume(
    wanted: str | None, folder: Path, recipe: str, metadata: dict | None = None
) -> dict | None:
    """The content of the checkpoint that `--resume` names; None for a new run. With `auto` it is
    the newest sound checkpoint in `folder`, and damaged ones are reported. Raises `UsageError`."""
    if not wanted:
        return None
    for path in list_checkpoints(folder) if wanted == "auto" else [Path(wanted)]:
        try:
            content = read(path, recipe, metadata)
        except Damaged as damage:
            if wanted != "auto":
                raise UsageError(
                    f"{damage}; --resume auto takes the newest sound checkpoint of {folder}"
                ) from None
            print(f"warning: {damage}; using the one before it", file=sys.stderr)
            continue
        print(f"resuming from {path} (step {content['progress']['step']})")
        return content
    print(f"--resume auto: no checkpoint in {folder}, starting a new run")
    return None


def continues(resume: str | None, folder: Path) -> bool:
    """Whether `--resume` continues the run in `folder`; a checkpoint from elsewhere starts a new
    run there."""
    return bool(resume) and (resume == "auto" or Path(resume).resolve().parent == folder.resolve())


def make_room(folder: Path, log_dir: Path) -> None:
    """Moves the checkpoints and logs of an earlier run into subfolders when a new run starts in its
    folders."""
    earlier = [*list_checkpoints(folder), *_existing(folder, WEIGHTS)]
    name = _move(earlier, folder, _existing(log_dir, LOGS), log_dir, "earlier")
    if earlier:
        print(
            f"{folder}: an earlier run was moved to {name}/ (--resume auto would have continued it)"
        )


def branch(folder: Path, log_dir: Path, step: int) -> None:
    """Moves what is newer than `step`, from which the run continues, into subfolders, with a copy
    of the metrics."""
    if not (newer := [path for path in list_checkpoints(folder) if step_of(path) > step]):
        return
    if best_step(folder) > step:
        newer += _existing(folder, WEIGHTS[:2])
    name = _move([*newer, *_existing(folder, WEIGHTS[2:])], folder, [], log_dir, "abandoned")
    for path in _existing(log_dir, LOGS[:1]):
        (log_dir / name).mkdir(exist_ok=True)
        shutil.copy2(path, log_dir / name)
    print(f"{folder}: the run continues from step {step}; what is newer was moved to {name}/")


def best_step(folder: Path) -> int:
    """The update of the best weights in the folder; -1 if there are none, or their best.json is
    damaged."""
    with contextlib.suppress(UsageError):
        summary = files.read_json(folder / "best.json")
        if (
            mismatch(summary, {"step": COUNT}, "it") is None
            and (folder / "best.safetensors").is_file()
        ):
            return summary["step"]
    return -1


def _existing(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [
        path for name in names for path in folder.glob(name) if path.is_file() or path.is_symlink()
    ]


def _move(paths: list[Path], folder: Path, logs: list[Path], log_dir: Path, prefix: str) -> str:
    """Moves files into the first subfolder PREFIX-N that neither folder has, and returns its
    name."""
    number = 1
    while any((parent / f"{prefix}-{number}").exists() for parent in (folder, log_dir)):
        number += 1
    for path in (*paths, *logs):
        (path.parent / f"{prefix}-{number}").mkdir(exist_ok=True)
        path.rename(path.parent / f"{prefix}-{number}" / path.name)
    return f"{prefix}-{number}"


def save_weights(path: Path, model: torch.nn.Module, metadata: dict, summary: dict) -> None:
    """Writes the weights to `path` (.safetensors), with `metadata` as JSON in the header, so that
    this file is enough to rebuild the model. Writes `summary` beside it (.json). Raises
    `RunError`."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    header = {"format": FORMAT, "metadata": json.dumps(metadata)}

    def write(temporary: Path) -> None:
        with files.utf8(temporary) as name:
            save_file(tensors, name, metadata=header)

    files.save(path, write)
    text = json.dumps(summary, ensure_ascii=False, indent=1) + "\n"
    files.save(
        path.with_suffix(".json"), lambda temporary: temporary.write_text(text, encoding="utf-8")
    )


def read_weights(
    path: str | Path, recipe: str, schema: dict | None = None, flag: str = "--resume"
) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights, which are views of the file, and metadata of a checkpoint or of a `.safetensors`
    that a run saved. `schema` is that of the metadata. Raises `UsageError`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        content = read(path, recipe, schema, flag)
        return content["model"], content["metadata"]
    files.require_file(path, flag)
    try:
        with files.utf8(path) as name, safe_open(name, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} was not saved by this project")
    metadata = None
    with contextlib.suppress(ValueError, RecursionError):
        metadata = json.loads(header.get("metadata", ""))
    _require(path, metadata, {"recipe": str}, "its metadata")
    _check_metadata(path, metadata, metadata["recipe"], recipe, schema)
    return check_tensors(tensors, path), metadata


def weights_to_use(
    args, recipe: str, schema: dict | None = None
) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights and metadata of `--resume` or, without a path, of the best evaluation. Raises
    `UsageError`."""
    path = (
        Path(args.resume)
        if args.resume and args.resume != "auto"
        else args.checkpoint_dir / "best.safetensors"
    )
    if not os.path.exists(path):
        raise UsageError(f"no weights at {path}: train first, or name them with --resume")
    return read_weights(path, recipe, schema)


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Loads weights that a run saved. Raises `UsageError` if they do not fit, because the recipe
    has been changed."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[1].strip()[:150]
        advice = "the recipe has changed since; --init_from loads those that fit"
        raise UsageError(f"the saved weights do not fit this model ({reason}): {advice}") from None


def initialise(model: torch.nn.Module, tensors: dict[str, torch.Tensor], path: str) -> None:
    """Copies the tensors whose name and shape fit into `model`. Raises `UsageError` if none
    fits."""
    own = model.state_dict()
    fits = {
        name: tensor
        for name, tensor in tensors.items()
        if name in own and own[name].shape == tensor.shape
    }
    if not fits:
        raise UsageError(f"--init_from {path}: none of its {len(tensors)} tensors fits this model")
    model.load_state_dict(fits, strict=False)
    new = sorted(set(own) - set(fits))
    names = ", ".join(new[:5]) + (" ..." if len(new) > 5 else "")
    print(
        f"initialised {len(fits)} of {len(own)} tensors from {path}"
        + (f"; new: {names}" if new else "")
    )


def average(
    folder: Path, count: int, by: str, recipe: str
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The mean weights of `count` checkpoints, and their steps: the newest (`by` "last") or, among
    those in the folder, the ones that evaluated best ("best"). Integers are those of the first.
    Raises `UsageError` if there is none."""
    paths = {step_of(path): path for path in list_checkpoints(folder)}
    steps = list(paths)  # newest first
    if by == "best" and steps:
        errors = dict(map(tuple, read(paths[steps[0]], recipe)["progress"]["evaluations"]))
        steps = sorted((step for step in steps if step in errors), key=errors.get)
    if not (steps := steps[:count]):
        advice = "make --save_every a multiple of --eval_every"
        raise UsageError(
            f"--average_checkpoints: {folder} keeps no checkpoint that was evaluated; {advice}"
        )
    total: dict[str, torch.Tensor] = {}
    for step in steps:
        weights = read(paths[step], recipe)["model"]
        for name, tensor in weights.items():
            if name not in total:
                total[name] = tensor.to(
                    torch.double if tensor.is_floating_point() else tensor.dtype, copy=True
                )
            elif tensor.is_floating_point():
                total[name] += tensor
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            total[name] = (total[name] / len(steps)).to(tensor.dtype)
    return total, steps


def shown(metric: str, value: float) -> str:
    """The value of a metric as text; error rates in per cent."""
    return f"{100 * value:.2f} %" if metric in ("cer", "wer") else f"{value:.3f}"


def use_best(args, model: torch.nn.Module, task, score: Callable[[], float]) -> str:
    """Loads the weights of the best evaluation or, if --average_checkpoints is given and `score()`
    is not higher for it, the average, which is saved as averaged.safetensors. `task` is the loop's.
    Puts the model into evaluation mode and returns a description of the weights. Call it under
    `torch.no_grad`."""
    folder = args.checkpoint_dir
    best_path, checkpoints = folder / "best.safetensors", list_checkpoints(folder)
    if not best_path.exists() and checkpoints:
        advice = f"the last weights can be evaluated with --evaluate --resume {checkpoints[0]}"
        raise RunError(f"{best_path} is gone: {advice}")
    weights, _ = read_weights(best_path, task.name)
    load_weights(model, weights)
    model.eval()
    if not args.average_checkpoints:
        return "weights of the best evaluation"
    best = score()
    mean, steps = average(folder, args.average_checkpoints, args.average_by, task.name)
    model.load_state_dict(mean)
    averaged = score()
    shown_best, shown_average = (shown(task.metric, value) for value in (best, averaged))
    print(
        f"average of the checkpoints of steps {str(steps)[1:-1]}: {shown_average}, best evaluation:"
        f" {shown_best}"
    )
    if averaged > best:
        model.load_state_dict(weights)
        return "weights of the best evaluation (the average was worse)"
    save_weights(
        folder / "averaged.safetensors", model, task.metadata, {"steps": steps, "error": averaged}
    )
    return "averaged weights (averaged.safetensors)"
