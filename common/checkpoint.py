"""Checkpoints: saving under another name first, reading without executing code, the newest and the
best, the lock of a folder."""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import files, records
from common.errors import RunError, UsageError, first_line, writing
from common.progress import Progress

FORMAT = "speech-recipes checkpoint 3"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # of a disk, and of a quota
CHECKPOINT = re.compile(r"checkpoint_step_(\d{8,12})\.pt")
WEIGHTS = ("best.safetensors", "best.json")
LIMITS = "limits_{}.json"  # sizes of micro-batches that fit, by a rank that was out of memory
LOGS = ("metrics.jsonl", "training.png")


# What a checkpoint holds, as a schema of `records.mismatch`.
STATE = {"optimizer": dict, "scaler": (dict, type(None)), "rng": list, "args": dict}
INFOS = {"model_info": dict, "run_info": dict, "adapters": (dict, type(None))}
CONTENT = {"recipe": str, "model": dict, "progress": dict, **INFOS, **STATE}
TEXT = (str, type(None))


def _is_series(value) -> bool:
    """Whether these are the values of a metric by update."""
    return all(type(step) is int and type(each) in (int, float) for step, each in value)


# Of best.json, which somebody else may have written.
NOTES = {
    "step?": int,
    "metric?": TEXT,
    "wer?": (int, float),
    "cer?": (int, float),
    "evaluations?": _is_series,
    "watched?": lambda value: all(map(_is_series, value.values())),
    "made_by?": (
        type(None),
        {
            **{f"{name}?": TEXT for name in ("command", "base", "tier", "device")},
            "versions?": lambda value: all(type(each) is str for each in value.values()),
        },
    ),
}


@dataclass(frozen=True)
class Vocabulary:
    """The meanings of the rows of embeddings and output layers, so that --init_from copies them to
    a model with other tokens by what they mean. A token is its text."""

    names: tuple[str, ...]  # the tensors with a row for each token, or for the first ones
    tokens: Sequence[str]  # what the rows of the new model mean, by number
    saved: Sequence[str]  # and those of the weights that are copied


@dataclass(frozen=True)
class Partial:
    """The part of a model that is saved where another file has the rest, such as adapters beside
    released weights: the attribute `partial` of such a model. `elsewhere`: the names of the tensors
    that are not saved; `record`: what identifies that file, in plain values."""

    elsewhere: frozenset[str]
    record: dict


def partial_of(model: torch.nn.Module) -> Partial | None:
    """The `Partial` of a model; None if all of it is saved."""
    return getattr(model, "partial", None)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model as it is saved."""
    state = model.state_dict()
    partial = partial_of(model)
    if partial is None:
        return state
    return {name: tensor for name, tensor in state.items() if name not in partial.elsewhere}


class Damaged(UsageError):
    """A truncated, corrupted or altered checkpoint file."""


@dataclass(frozen=True)
class Saved:
    """A saved state of a run: a checkpoint, or a .safetensors, without `progress` and `state`."""

    path: Path
    recipe: str
    model_info: dict  # the recipe's records as `asdict` made them, to be read with `records.read`
    run_info: dict
    model: dict[str, torch.Tensor]  # the weights: views of the file
    progress: Progress | None = None
    state: dict | None = None  # "optimizer", "scaler", "rng" and "args"
    adapters: dict | None = None  # the record of a `Partial` whose tensors `model` has

    def forget_values(self) -> None:
        """Drops the weights and the optimizer's states, when all is copied."""
        self.model.clear()
        if self.state:
            self.state.clear()


def check_tensors(tensors: dict, path: str | Path) -> dict[str, torch.Tensor]:
    """`tensors`, if they are dense tensors by name whose values are in the file and finite. Copies
    none. Raises `Damaged`."""
    for name, tensor in tensors.items():
        place = f"{path}: the tensor {str(name)[:60]!r}"
        if not isinstance(name, str) or not is_dense(tensor):
            raise Damaged(f"{place} is not a dense tensor, or is one of 8-bit floats")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise Damaged(f"{place} is larger than its data")
        has_floats = tensor.is_floating_point() and tensor.numel() > 0
        if has_floats and not all(map(math.isfinite, tensor.aminmax())):
            raise Damaged(f"{place} has values that are not finite (NaN or infinity)")
    return tensors


def is_dense(tensor) -> bool:
    """Whether this is a tensor with values, of a type that can be copied to others."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized:
        return False
    return not (tensor.is_floating_point() and tensor.itemsize == 1)


def load(path: Path, stand_in: type | None = None):
    """The content of a file that torch.save wrote, mapped if its form allows. No code in it is
    executed, and what is decompressed is not larger than the file. `stand_in`: a class without
    effect, whose objects take the place of all that the file would make with code. Raises
    `Damaged`, and `UsageError` for any other file."""
    files.require_file(path)
    try:
        is_zip = _is_sound_zip(path)
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # about sparse tensors, which are refused later
            if stand_in and is_zip:
                names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
                pairs = [(stand_in, name) for name in names]
                stack.enter_context(torch.serialization.safe_globals(pairs))
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, NotImplementedError):
        raise Damaged(f"{path} is damaged (truncated or overwritten)") from None
    except UsageError:
        raise
    except Exception as error:  # torch.load raises several types
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise UsageError(
                f"{path} is refused: torch.save did not write it, or it holds Python objects, and"
                " loading them could run code"
            ) from None
        raise Damaged(f"{path} is damaged ({first_line(error)[:100]})") from None


def _is_sound_zip(path: Path) -> bool:
    """True for torch.save's zip archive, False for its format before torch 1.6, which cannot be
    mapped. Raises `BadZipFile` for an archive that is damaged or larger than its file, and
    `UsageError` for any other file."""
    with open(path, "rb") as file:
        start = file.read(2)
    if start == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            # torch.load does not compare the checksums.
            if size > path.stat().st_size or archive.testzip():
                raise zipfile.BadZipFile
        return True
    if start == b"PK" or CHECKPOINT.fullmatch(path.name):
        raise zipfile.BadZipFile
    if start != b"\x80\x02":  # also a tar with a zip inside, which passes for a zip
        raise UsageError(f"{path} is not a file of torch.save")
    return False


def lock_folder(folder: Path):
    """Locks the folder for this process, so that two runs cannot delete each other's files. The
    lock holds as long as the returned object exists. Raises `RunError` if another run has it."""
    with writing(folder, "--output_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115  it stays open
    try:
        # Data workers do not inherit a record lock, so it ends together with a killed run and not
        # seconds later.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        user = f"another run (process {lock.read(20).strip() or 'unknown'})"
        raise RunError(
            f"{folder} is in use by {user}: wait for it, or choose another --output_dir"
        ) from None
    except OSError:  # the file system has no locks
        return lock
    with contextlib.suppress(OSError):  # the number is for a message only, and the disk may be full
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
    # Temporary files that a killed run has left.
    files.remove_stale(folder, "|".join((CHECKPOINT.pattern, *WEIGHTS)))
    return lock


def save(folder: Path, step: int, content: dict, keep_last: int) -> Path:
    """Writes `checkpoint_step_XXXXXXXX.pt` and removes all but it and the newest `keep_last` - 1
    others. `content` consists of tensors, lists, dicts, numbers and strings, so that
    `weights_only=True` can read it. Raises `RunError`."""
    path = folder / f"checkpoint_step_{step:08d}.pt"

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)

    others = [other for other in list_checkpoints(folder) if other != path]
    try:
        files.save(path, write)
    except RunError as error:
        if len(others) < 2 or getattr(error.__cause__, "errno", 0) not in NO_ROOM:
            raise
        oldest = others.pop()
        print(f"the disk is full: {oldest} is removed for the new checkpoint", file=sys.stderr)
        with contextlib.suppress(OSError):
            oldest.unlink()
        files.save(path, write)
    for old in others[keep_last - 1 :]:
        old.unlink(missing_ok=True)
    return path


def step_of(path: Path) -> int:
    """The update of a checkpoint, by its name; -1 for other names."""
    match = CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, newest first."""
    own = [path for path in folder.glob("checkpoint_step_*.pt") if step_of(path) >= 0]
    return sorted(own, key=step_of, reverse=True)


def read(path: Path, recipe: str, flag: str = "--resume") -> Saved:
    """A checkpoint. Its tensors are views of the file, so copy what is kept. No code in the file is
    executed. Raises `Damaged` for a truncated or corrupted file, and `UsageError` for one that is
    not a checkpoint of `recipe`."""
    files.require_file(path, flag)
    if path.suffix == ".safetensors":
        raise UsageError(
            f"{path} holds weights only, not the state of a run: start a new run from it with"
            " --init_from"
        )
    content = load(path)
    _check_format(path, content.get("format") if isinstance(content, dict) else None)
    if reason := records.mismatch(content, CONTENT, "it"):
        raise Damaged(f"{path} is damaged: {reason}")
    values = content["progress"]
    if values.pop("done", None):  # an earlier version could divide an epoch anew
        values["global_batch_size"] = 0  # so that the epoch restarts
    try:
        progress = records.read(Progress, values, path)
    except UsageError as error:
        raise Damaged(f"{error}: the file is damaged") from None
    check_recipe(path, content["recipe"], recipe)
    check_tensors(content["model"], path)
    for states in content["optimizer"].values():
        check_tensors(states, path)
    return Saved(
        path=path,
        recipe=recipe,
        model_info=content["model_info"],
        run_info=content["run_info"],
        model=content["model"],
        progress=progress,
        state={name: content[name] for name in STATE},
        adapters=content["adapters"],
    )


def _check_format(path: Path, saved_format) -> None:
    if saved_format == FORMAT:
        return
    if str(saved_format).startswith(FORMAT.removesuffix("3")):
        raise UsageError(
            f"{path} was saved by another version of this project: use that version, or start a"
            " new run with another --output_dir"
        )
    raise UsageError(f"{path} is not a checkpoint of this project")


def check_recipe(path: Path, saved_by: str, recipe: str) -> None:
    """Raises `UsageError` if another recipe saved the file."""
    if saved_by != recipe:
        names = f"recipes/{saved_by[:60]}.py, not by recipes/{recipe}.py"
        raise UsageError(f"{path} was saved by {names}; each recipe needs its own --output_dir")


def newest(wanted: str | None, folder: Path, recipe: str) -> Saved | None:
    """The checkpoint that `--resume` names; None for a new run. With `auto` it is the newest sound
    checkpoint in `folder`, and damaged ones are reported. Raises `UsageError`."""
    if not wanted:
        return None
    others = list_checkpoints(folder)
    if wanted == "auto":
        for path in others:
            try:
                return read(path, recipe)
            except Damaged as damage:
                print(f"warning: {damage}; using the one before it", file=sys.stderr)
        return None
    advice = f"--resume auto takes the newest sound checkpoint of {folder}"
    if os.path.isdir(wanted):
        raise UsageError(f"--resume {wanted}: it is a folder; name a file in it, or {advice}")
    try:
        saved = read(Path(wanted), recipe)
    except Damaged as damage:
        raise UsageError(f"{damage}; {advice}") from None
    if continues(wanted, folder) and others and step_of(others[0]) > saved.progress.step:
        raise UsageError(
            f"--resume {wanted}: {others[0]} is newer, and the run would replace it; give another"
            " --output_dir, or --resume auto to continue from the newest"
        )
    return saved


def resume(wanted: str | None, folder: Path, recipe: str) -> Saved | None:
    """`newest`, and says what it is."""
    saved = newest(wanted, folder, recipe)
    if saved:
        print(f"resuming from {saved.path} (step {saved.progress.step})")
    elif wanted:
        print(f"--resume auto: no checkpoint in {folder}, starting a new run")
    return saved


def continues(resume: str | None, folder: Path) -> bool:
    """Whether `--resume` continues the run in `folder`, and not one from elsewhere."""
    return bool(resume) and (resume == "auto" or Path(resume).resolve().parent == folder.resolve())


def make_room(
    folder: Path, log_dir: Path, reports: Iterable[str] = (), beside: Iterable[str] = ()
) -> None:
    """Moves all that an earlier run has written into subfolders when a new run starts in its
    folders. `reports`: files and folders of the recipe's, by their names in the log folder or by
    their absolute paths; `beside`: files beside the weights. Raises `RunError`."""
    written = (*WEIGHTS, *beside, LIMITS.format("*"))
    checkpoints = list_checkpoints(folder)
    earlier = [*checkpoints, *_existing(folder, written)]
    logs = _existing(log_dir, (*LOGS, *reports))
    with writing(folder, "--output_dir"):
        name = files.move_aside([*earlier, *logs], (folder, log_dir))
    if earlier:
        hint = " (--resume auto would have continued it)" if checkpoints else ""
        print(f"{folder}: an earlier run was moved to {name}/{hint}")


def best_step(folder: Path) -> int:
    """The update of the best weights in the folder; -1 without them or a sound best.json."""
    weights = folder / "best.safetensors"
    return noted(weights).get("step", -1) if weights.is_file() else -1


def _existing(folder: Path, names: Iterable[str]) -> list[Path]:
    paths = []
    for name in names:
        paths += [Path(name)] if os.path.isabs(name) else folder.glob(name)
    return paths


def save_weights(
    path: Path, state: dict[str, torch.Tensor], task, summary: dict, record: dict | None = None
) -> None:
    """Writes the `state` of a model to `path` (.safetensors), with the records of the loop's `task`
    as JSON in the header, so that this file is enough to rebuild the model, and the `record` of a
    `Partial`. Writes `summary` beside it (.json). Raises `RunError`."""
    tensors = {}
    seen = set()
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors has no tensor under two names, as a copy's own model may.
        is_shared = tensor.numel() and tensor.data_ptr() in seen
        tensors[name] = tensor.clone() if is_shared else tensor
        seen.add(tensor.data_ptr())
    header = {
        "format": FORMAT,
        "recipe": task.name,
        "model_info": json.dumps(asdict(task.model_info)),
        "run_info": json.dumps(asdict(task.run_info)),
    }
    if record:
        header["adapters"] = json.dumps(record)
    files.save(path, lambda temporary: save_file(tensors, temporary, metadata=header))
    text = json.dumps(summary, indent=1) + "\n"
    files.save(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))


@contextlib.contextmanager
def _opened(path: Path, flag: str) -> Iterator[tuple]:
    """A `.safetensors` that a run saved, and its header. Raises `UsageError`."""
    files.require_file(path, flag)
    if path.suffix != ".safetensors":
        raise UsageError(f"{flag} {path}: name best.safetensors of the run")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_format(path, header.get("format"))
            yield file, header
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{flag} {path} cannot be read: {first_line(error)}") from None


def recipe_of(path: str | Path, flag: str = "--resume") -> str:
    """The recipe of a `.safetensors` that a run saved, by its header. Raises `UsageError`."""
    with _opened(Path(path), flag) as (_, header):
        return header.get("recipe", "unknown")


def read_weights(path: str | Path, recipe: str, flag: str = "--resume") -> Saved:
    """A checkpoint, or a `.safetensors` that a run saved. Raises `UsageError`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        return read(path, recipe, flag)
    with _opened(path, flag) as (file, header):
        check_recipe(path, header.get("recipe", "unknown"), recipe)
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    infos = {}
    for name in INFOS:
        try:
            infos[name] = json.loads(header.get(name, "null" if name == "adapters" else ""))
        except (ValueError, RecursionError):
            raise Damaged(f"{path} is damaged: its {name} cannot be read") from None
        if records.mismatch(infos[name], INFOS[name], name):
            raise Damaged(f"{path} is damaged: its {name} is not a record")
    return Saved(path=path, recipe=recipe, model=check_tensors(tensors, path), **infos)


def read_initial(path: str | None, recipe: str, resumed: Saved | None) -> Saved | None:
    """The weights of --init_from, unless the run resumes one that began with them. Raises
    `UsageError`."""
    if not path:
        return None
    if resumed:
        began = resumed.state["args"].get("init_from")
        if not began or os.path.abspath(began) != os.path.abspath(path):
            raise UsageError(
                f"--init_from {path}: {resumed.path} is of a run that did not begin with it: take"
                " another --output_dir, or leave --init_from out to continue that run"
            )
        return None
    return read_weights(path, recipe, "--init_from")


def read_infos(saved: Saved | None, model_info: type, run_info: type) -> tuple:
    """The `ModelInfo` and the `RunInfo` of a checkpoint, given their classes; (None, None) without
    a checkpoint. Raises `UsageError`."""
    if saved is None:
        return None, None
    return (
        records.read(model_info, saved.model_info, saved.path),
        records.read(run_info, saved.run_info, saved.path),
    )


def path_to_use(resume: str | None, checkpoint_dir: Path) -> Path:
    """The file of `weights_to_use`."""
    if resume and resume != "auto":
        return Path(resume)
    return checkpoint_dir / "best.safetensors"


def weights_to_use(resume: str | None, checkpoint_dir: Path, recipe: str) -> Saved:
    """The weights that `--resume` names, or those of the best evaluation. Raises `UsageError`."""
    path = path_to_use(resume, checkpoint_dir)
    if not os.path.exists(path):
        raise UsageError(f"no weights at {path}: train first, or name them with --resume")
    return read_weights(path, recipe)


def shapes_of(make: Callable[[], torch.nn.Module]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are saved of the model that `make()` returns, by name. The
    model is made without values: it takes no memory, and no random numbers are drawn."""
    with torch.device("meta"):
        model = make()
    return {name: tuple(tensor.shape) for name, tensor in state_of(model).items()}


def check_network(saved: Saved | None, make: Callable[[], torch.nn.Module]) -> None:
    """Raises `UsageError` if the weights of a checkpoint are not those of the network that `make()`
    returns. Call it before the network is made, because the infos in a file from elsewhere may
    describe one of any size. Does nothing without a checkpoint."""
    if saved is None:
        return
    if shapes_of(make) != {name: tuple(tensor.shape) for name, tensor in saved.model.items()}:
        raise UsageError(
            f"{saved.path}: its weights are not those of the model that it describes, or the recipe"
            " has changed since; --init_from loads those that fit"
        )


def load_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Loads weights that a run saved: all that `state_of` names. Raises `UsageError` if
    they do not fit, because the recipe has been changed."""
    own = model.state_dict()
    frozen = own.keys() - state_of(model).keys()
    try:
        model.load_state_dict({**{name: own[name] for name in frozen}, **tensors})
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[1].strip()[:150]
        advice = "the recipe has changed since; --init_from loads those that fit"
        raise UsageError(f"the saved weights do not fit this model ({reason}): {advice}") from None


def noted(weights: Path) -> dict:
    """The content of the file that the loop has written beside weights; {} without a sound one."""
    try:
        content = files.read_json(weights.with_suffix(".json"))
    except UsageError:
        return {}
    schema = NOTES
    if content.get("metric") is not None:
        schema = {**NOTES, "step": int, str(content["metric"]): (int, float)}
    return {} if records.mismatch(content, schema, "it") else content
