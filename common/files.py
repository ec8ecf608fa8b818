"""Files are written under another name and then renamed, and read only if they are regular and of a
sensible size."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from common.errors import RunError, UsageError, first_line

TEXT_BYTES = 1 << 26  # of a text file that is read whole: a vocabulary, a configuration, a table
STALE = r"\.[a-z0-9_]{8}\.tmp"  # how the temporary names of `write_file` end


def require_file(path: str | Path, name: str = "") -> Path:
    """`path`, if it is a regular file, not a pipe to wait for. `name` is for the message. Raises
    `UsageError`."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{_label(name, path)}: {reason}") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"{_label(name, path)}: it is {kind}")
    return path


def read_text(path: str | Path, name: str = "") -> str:
    """The text of a UTF-8 file of at most `TEXT_BYTES`. Raises `UsageError`."""
    path = require_file(path, name)
    size = path.stat().st_size
    if size > TEXT_BYTES:
        raise UsageError(
            f"{_label(name, path)}: its {size / 2**20:.0f} MiB are too much for such a file"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{_label(name, path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{_label(name, path)}: it is not UTF-8") from None


def read_json(path: str | Path, name: str = "") -> dict:
    """The object in a JSON file. Raises `UsageError`."""
    text = read_text(path, name)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{_label(name, path)}: it is not valid JSON ({first_line(error)})"
        ) from None
    if not isinstance(content, dict):
        raise UsageError(f"{_label(name, path)}: it is not a JSON object")
    return content


def write_file(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Calls `write` with the name of an empty file and renames this file to `path`. If anything
    fails, the earlier file is still there. `durable`: flush to disk first. Raises `OSError`."""
    if path.exists() and not path.is_file():  # /dev/null, which root would replace
        raise FileExistsError(errno.EEXIST, "it exists and is not a file", str(path))
    handle, name = tempfile.mkstemp(".tmp", f".{path.name[:200]}.", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o666 & ~umask())  # mkstemp's are for their owner alone
        if durable:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            with contextlib.suppress(OSError):  # some network file systems cannot flush a directory
                directory = os.open(path.parent, os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Writes UTF-8 through `write_file`. A path that is not UTF-8 becomes escapes, which JSON
    understands."""
    write_file(
        path,
        lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"),
        durable,
    )


def remove_stale(folder: Path, names: str) -> None:
    """Removes what a killed run left of the files whose names match the pattern `names`, and
    nothing else."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(rf"\.({names}){STALE}", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def save(path: Path, write: Callable[[Path], object]) -> None:
    """`write_file` for checkpoints: a failure becomes a `RunError` that states the free space."""
    try:
        write_file(path, write)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free on that disk)"
        raise RunError(
            f"cannot save {path}: {reason}{free}; earlier checkpoints are unharmed"
        ) from None


def _label(name: str, path: str | Path) -> str:
    return f"{name} {path}" if name else str(path)


def umask() -> int:
    """The bits that new files do not get."""
    os.umask(mask := os.umask(0))
    return mask
