"""Files and folders are written under another name and then renamed, so that none is ever seen half-written."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from common.errors import RunError, first_line

MADE_FROM = "made_from.json"


def write_file(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Calls `write(temporary_path)` and renames the result to `path`. If anything fails, the earlier file is still
    there. `durable`: flush to disk first. Raises `OSError`, and whatever `write` raises."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # safetensors creates files that only their owner can read
        if durable:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            with contextlib.suppress(OSError):  # some network file systems cannot flush a directory
                directory = os.open(path.parent, os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def save(path: Path, write: Callable[[Path], object]) -> None:
    """`write_file` for checkpoints: a failure becomes a `RunError` that states the free space."""
    try:
        write_file(path, write)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free on that disk)"
        raise RunError(f"cannot save {path}: {reason}{free}; earlier checkpoints are unharmed") from None


def write_folder(folder: Path, fill: Callable[[Path], object], made_from: dict | None = None):
    """Calls `fill(temporary_folder)`, renames that folder to `folder` and returns the result of `fill`. An earlier
    folder is replaced; the caller checks whether it may be. `made_from` is stored inside for `read_made_from`. Raises
    `OSError`, and whatever `fill` raises; then the earlier folder is still there."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        result = fill(aside)
        if made_from is not None:
            (aside / MADE_FROM).write_text(json.dumps(made_from, ensure_ascii=False), encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        try:
            aside.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        return result
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def read_made_from(folder: Path) -> dict | None:
    """The `made_from` that `write_folder` stored in the folder; None if there is none."""
    try:
        return json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
