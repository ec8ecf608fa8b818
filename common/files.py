"""Writing files so that none is ever seen half-written."""

import contextlib
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from common.errors import RunError


def write_atomically(path: Path, write) -> None:
    """Calls `write(temporary_path)`, flushes to disk and renames, so that `path` is never seen half-written. Raises
    `RunError` with the free space where the disk is full; what stood at `path` still stands then."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # safetensors makes files that only their owner can read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # some network file systems cannot flush a directory
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
    except (OSError, RuntimeError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            written = temporary.stat().st_size
            free = shutil.disk_usage(path.parent).free + written
            temporary.unlink()
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
            raise RunError(
                f"cannot save {path}: {reason} ({free / 2**20:.0f} MiB free on that disk); the checkpoints before it are unharmed"
            ) from None
        raise RunError(f"cannot save {path}: {getattr(error, 'strerror', None) or error}") from None
