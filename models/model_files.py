"""Weights of released models: Hugging Face folders are read and checked, and exports are
written."""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import checkpoint, files
from common.errors import UsageError, cannot_write, first_line
from speech.data.folders import require_replaceable, write_folder

MODELS = ("model_dir", "model_file")  # flags that name released weights
CARD = "README.md"
EXPORTED = "speech-recipes"  # in config.json of an export
EXPORT = "the model to be exported"  # for messages
MADE_BY = {"exported_by": EXPORTED}  # in its made_from.json
POINTER = b"version https://git-lfs"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# --- reading --------------------------------------------------------------------------------------


def require_room(parameters: int) -> None:
    """Raises `UsageError` if a model of so many fp32 parameters cannot be made on this machine."""
    if torch.get_default_device().type == "meta":  # a planned run's model takes no memory
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * parameters > total:
        size = f"{parameters / 1e9:.1f} billion parameters take {4 * parameters / 2**30:.0f} GiB"
        raise UsageError(
            f"the model is too large for this machine: {size}, and it has {total / 2**30:.0f}"
        )


def refuse_pointer(file: Path) -> None:
    """Raises `UsageError` for a Git LFS pointer, which a clone without Git LFS has in place of a
    large file, and for anything but a regular file."""
    with open(files.require_file(file), "rb") as opened:
        beginning = opened.read(len(POINTER))
    if beginning == POINTER:
        raise UsageError(
            f"{file} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
        )


def read_json(file: Path) -> dict:
    """The object in a model's JSON file. Raises `UsageError`."""
    refuse_pointer(file)
    return files.read_json(file)


def read_description(folder: Path, *model_types: str) -> dict:
    """A Hugging Face folder's config.json. Raises `UsageError` for a model of other types."""
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    content = read_json(file)
    if content.get("model_type") not in model_types:
        kind = str(content.get("model_type"))[:40]
        raise UsageError(
            f"{file} describes a model of type {kind!r}; this recipe takes"
            f" {' or '.join(model_types)}"
        )
    return content


def read_folder(folder: Path, counters: str = "") -> dict[str, Tensor]:
    """A Hugging Face folder's weights, safetensors preferred, as `floats` returns them. Raises
    `UsageError`."""
    weights = {}
    for file in _weight_files(folder):
        weights |= floats(read_tensors(file), file, counters)
    return weights


def _weight_files(folder: Path) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    raise UsageError(
        f"{folder} holds no weights that can be read: it needs model.safetensors or"
        " pytorch_model.bin"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UsageError(f"{index} lists no files of that folder")
    shards = [index.parent / name for name in dict.fromkeys(sorted(names))]
    for shard in shards:
        if not os.path.isfile(shard):
            raise UsageError(
                f"{index.parent} lacks {shard.name[:60]!r}, which {index.name} lists: fetch it, too"
            )
    return shards


def read_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        return read_pickle(file)
    refuse_pointer(file)
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{file} is damaged or cut short ({first_line(error)}): fetch it again"
        ) from None


def read_pickle(file: Path):
    """The content of a file that torch.save wrote, mapped, so that converting to fp32 does not hold
    the model twice. No code in it is run. Raises `UsageError`."""
    refuse_pointer(file)
    if file.suffix == ".safetensors":
        raise UsageError(f"{file}: give the folder that holds it and config.json, not the file")
    return checkpoint.load(file)


def _refuse_shared(tensors: Iterable, path: Path) -> None:
    """Raises `UsageError` if names share data, so that their copies could be without limit: a
    matrix may have two names, as Whisper's embedding has."""
    used: Counter[int] = Counter()
    sizes = {}
    for tensor in filter(checkpoint.is_dense, tensors):
        data = tensor.untyped_storage()
        sizes[data.data_ptr()] = data.nbytes()
        used[data.data_ptr()] += min(tensor.numel() * tensor.itemsize, data.nbytes())
    if any(used[place] > 2 * size for place, size in sizes.items()):
        raise UsageError(f"{path} is damaged: its tensors share their data")


def with_weights(
    make: Callable[[], torch.nn.Module], weights: dict[str, Tensor] | None
) -> torch.nn.Module:
    """The network of `make()` with these weights, which become its parameters, or random ones."""
    if weights is None:
        return make()
    with torch.device("meta"):
        network = make()
    network.load_state_dict(weights, assign=True)
    return network


def floats(weights, path: Path, counters: str = "") -> dict[str, Tensor]:
    """fp32 copies on the default device, which is "meta" for a planned run; each tensor is released
    before the next is copied. Tensors whose names end in `counters` are int64. Raises `UsageError`
    for anything but dense, finite tensors by name."""
    if not isinstance(weights, dict):
        raise UsageError(f"{path} holds a {type(weights).__name__}, not weights by name")
    _refuse_shared(weights.values(), path)
    for name, tensor in weights.items():
        is_counter = bool(counters) and str(name).endswith(counters)
        types = (torch.int64,) if is_counter else FLOATS
        is_plain = isinstance(tensor, Tensor) and tensor.dtype in types
        if not is_plain or tensor.is_meta or tensor.is_nested:
            kind = "a floating-point tensor; quantised weights cannot be read"
            if is_counter:
                kind = "an int64 tensor"
            raise UsageError(f"{path}: {str(name)[:60]!r} is not {kind}")
        weights[name] = tensor.detach()  # some files hold parameters
    checkpoint.check_tensors(weights, path)
    copies = {}
    for name in list(weights):
        tensor = weights.pop(name)
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        copies[name] = tensor.to(torch.get_default_device(), kind, copy=True).contiguous()
        if tensor.dtype == torch.float64 and not copies[name].is_meta:  # fp32 may be too narrow
            checkpoint.check_tensors({name: copies[name]}, path)
    return copies


def check_shapes(
    weights: dict[str, Tensor], expected: dict[str, tuple[int, ...]], path: str | Path, model: str
) -> None:
    """Raises `UsageError` if tensors are missing, unexpected or of another shape. Nothing may be
    built before: the file's tensors bound the memory that its configuration asks for. `model` is
    its name for messages."""
    missing = []
    wrong = []
    for name, shape in expected.items():
        if name not in weights:
            missing.append(name)
        elif tuple(weights[name].shape) != shape:
            wrong.append(name)
    unexpected = [name for name in weights if name not in expected]
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"{path}: {name} is {tuple(weights[name].shape)}, but its configuration asks for"
            f" {expected[name]} ({len(wrong)} such tensors): weights and configuration belong to"
            " different models"
        )
    for problem, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            shown = ", ".join(repr(name[:60]) for name in names[:3])
            raise UsageError(
                f"{path} {problem} {shown}{more}: it is not a complete, unchanged {model} model"
            )


# --- exporting ------------------------------------------------------------------------------------


def require_export(folder: str | Path) -> None:
    """Raises `UsageError` if `folder` holds anything but an earlier export, `RunError` if it cannot
    be written."""
    folder = Path(folder).absolute()
    try:
        folder.resolve()
        require_replaceable(folder, MADE_BY)
        parent = next(parent for parent in folder.parents if parent.exists())
        if not parent.is_dir():
            raise NotADirectoryError
        if not os.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (UsageError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise UsageError(f"--export {error}") from None
    except OSError as error:
        raise cannot_write(folder, error, "--export") from None


def on_host(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for an export: on the host, in fp32. Raises `UsageError` if they are not finite."""
    tensors = {}
    for name, tensor in weights.items():
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", kind).contiguous()
    return checkpoint.check_tensors(tensors, EXPORT)


def write_export(
    folder: str | Path, fill: Callable[[Path], object], card: str | dict[str, str] = ""
) -> list[str]:
    """Calls `fill(temporary_folder)`, adds the text of a `card`, or texts by the names of their
    files, renames that folder to `folder` and returns the file names. Replaces an empty folder or
    an earlier export that nobody has changed, and refuses any other. Raises `UsageError` and
    `RunError`."""
    folder = Path(folder)
    require_export(folder)

    def fill_with_card(aside: Path) -> None:
        fill(aside)
        texts = {CARD: card} if isinstance(card, str) else card
        for name, text in texts.items():
            if text:
                files.write_text(aside / name, text)

    try:
        write_folder(folder, fill_with_card, MADE_BY)
    except (SafetensorError, RuntimeError) as error:  # safetensors and torch wrap a system's errors
        raise cannot_write(folder, OSError(0, first_line(error)), "--export") from None
    except OSError as error:
        raise cannot_write(folder, error, "--export") from None
    return sorted(path.name for path in folder.iterdir())


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes model.safetensors."""
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o666 & ~files.umask())  # safetensors makes files that only their owner can read
