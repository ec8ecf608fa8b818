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
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError

from common.errors import RunError, UsageError, first_line

TEXT_BYTES = 1 << 26  # of a text file that is read whole: a vocabulary, a configuration, a table
STALE = r"\.[a-z0-9_]{8}\.tmp"  # how the temporary names of `write_file` end


def require_file(path: str | Path, name: str = "") -> Path:
    """`path`, if it is a regular file, not a pipe to wait for. Raises `UsageError` with `name`."""
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
        raise UsageError(f"{_label(name, path)}: it is not UTF-8; save it as UTF-8") from None


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


def json_text(content) -> str:
    """What a JSON file that people may read holds."""
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def require_output(
    path: str | Path,
    flag: str,
    inputs: Iterable[str | Path | None] = (),
    is_earlier: Callable[[Path], bool] | None = None,
) -> Path:
    """`path`, which `flag` names, if `write_file` may write it: it does not exist in a folder that
    can be written, or `is_earlier(path)` says that the same command wrote it and nobody has changed
    it. Call it before any work. Raises `UsageError` for anything else: a folder, a link, a device
    or a pipe, one of the `inputs` of the command (also by another name), and other files."""
    place = f"{flag} {path}"
    path = Path(path)
    try:
        mode = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
        if not stat.S_ISREG(mode):
            kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link to another place"}
            kind = kinds.get(stat.S_IFMT(mode), "a device or a pipe")
            raise UsageError(f"{place}: it is {kind}; name a file")
        tempfile.TemporaryFile(dir=path.parent).close()
        if not path.exists():
            return path
        for other in inputs:
            if other and os.path.exists(other) and path.samefile(other):
                raise UsageError(f"{place}: this command reads it ({other}); name another file")
        is_own = is_earlier is not None and is_earlier(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{place}: {reason}; name a file in a folder that can be written"
        ) from None
    if not is_own:
        raise UsageError(
            f"{place}: it exists, and this command did not write it or somebody has changed it;"
            " name another file"
        )
    return path


def write_file(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Calls `write` with the name of an empty file and renames this file to `path`. If anything
    fails, the earlier file is still there. `durable`: flush to disk first. Raises `OSError`."""
    if path.exists() and not path.is_file():  # /dev/null, which root would replace
        raise FileExistsError(errno.EEXIST, "it exists and is not a file", str(path))
    handle, name = tempfile.mkstemp(".tmp", hidden(path), path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with contextlib.suppress(OSError):  # some disks have no permissions
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


def hidden(path: Path) -> str:
    """How the temporary names for `path` begin. The file system limits names to 255 bytes."""
    beginning = path.name.encode("utf-8", "ignore")[:200].decode("utf-8", "ignore")
    return f".{beginning}."


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Writes UTF-8 by `write_file`. A path that is not UTF-8 becomes escapes of JSON."""
    write_file(
        path,
        lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"),
        durable,
    )


def move_aside(paths: Iterable[Path], folders: Iterable[Path]) -> str:
    """Moves files, folders, and links as they are, into the first subfolder earlier-N of theirs
    that no folder of theirs, and none of `folders`, has. Returns its name. Raises `OSError`."""
    paths = list(paths)
    folders = {*folders, *(path.parent for path in paths)}
    number = 1
    while any(os.path.lexists(folder / f"earlier-{number}") for folder in folders):
        number += 1
    name = f"earlier-{number}"
    for path in paths:
        if os.path.lexists(path):  # or it was moved already, if two of the folders are the same one
            (path.parent / name).mkdir(exist_ok=True)
            path.rename(path.parent / name / path.name)
    return name


def remove_stale(folder: Path, names: str) -> None:
    """Removes what a killed run left of files whose names match the pattern `names`."""
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
        ) from error


def _label(name: str, path: str | Path) -> str:
    return f"{name} {path}" if name else str(path)


def umask() -> int:
    """The bits that new files do not get."""
    os.umask(mask := os.umask(0))
    return mask
