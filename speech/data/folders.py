"""Folders that this project writes: data sets, exported models, spoken sentences. They are written
aside and renamed, and a folder that holds anything else is never replaced."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from common import files
from common.errors import UsageError

MADE_FROM = "made_from.json"
STALE = r"[a-z0-9_]{8}\.(tmp|old)"  # how temporary names end
READ = 1 << 20  # bytes that are hashed at once


def write_folder(folder: Path, fill: Callable[[Path], object], made_from: dict):
    """Calls `fill(temporary_folder)`, renames that folder to `folder` and returns the result of
    `fill`. `made_from` is stored inside, with the size and the hash of each file. Replaces an empty
    folder, and an earlier one of this kind that nobody has changed. Raises `UsageError` for any
    other folder, `OSError`, and whatever `fill` raises; then the earlier folder is still there."""
    folder = folder.resolve()  # a link to a folder stays
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    require_replaceable(folder, made_from)
    with _temporary(folder) as aside:
        result = fill(aside)
        hashes = {name: (size, _hash(aside / name)) for name, size in _sizes(aside).items()}
        content = {"made_from": made_from, "files": hashes}
        (aside / MADE_FROM).write_text(json.dumps(content), encoding="utf-8")
        require_replaceable(folder, made_from)  # again, because `fill` may have taken hours
        _move(aside, folder)
    return result


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which is removed at the end unless it was renamed. It is locked
    as long as this process lives, so that others know it from what a killed process has left."""
    while True:
        aside = Path(tempfile.mkdtemp(".tmp", files.hidden(folder), folder.parent))
        with locked(aside):
            if not aside.exists():  # another process has removed it before it was locked
                continue
            try:
                aside.chmod(0o777 & ~files.umask())
                yield aside
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            return


@contextlib.contextmanager
def locked(folder: Path, operation: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Whether the folder is locked by this process inside: not if somebody else has locked it, or
    if it cannot be locked, as on some network file systems."""
    with contextlib.ExitStack() as opened:
        is_locked = False
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, operation)
            is_locked = True
        yield is_locked


def _remove_stale(folder: Path) -> None:
    """Removes what a killed process has left. A complete folder may get its name back."""
    name = re.escape(files.hidden(folder)) + STALE
    for path in folder.parent.glob(".*"):
        if not re.fullmatch(name, path.name):
            continue
        with locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_left:
            if is_left and not folder.exists() and _made(path)[1] and not _changes(path):
                path.rename(folder)
            elif is_left:
                shutil.rmtree(path, ignore_errors=True)


def _move(aside: Path, folder: Path) -> None:
    """Renames `aside` to `folder`. An earlier folder is put back if that fails."""
    if not folder.exists():
        aside.rename(folder)
        return
    with locked(folder):  # under any name
        old = Path(tempfile.mkdtemp(".old", files.hidden(folder), folder.parent))
        folder.rename(old)  # onto an empty folder
        try:
            aside.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    shutil.rmtree(old, ignore_errors=True)


def require_replaceable(folder: Path, made_from: dict) -> None:
    """Raises `UsageError` if `write_folder` may not replace `folder`, because it holds anything
    else than what `write_folder` left there: for a `made_from` with some of the same names, so that
    no data set is replaced by a model."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder}: it exists and is not a folder; choose another name")
    changed = _changes(folder)
    if changed:
        names = ", ".join(changed[:3])
        raise UsageError(f"{folder}: it holds files that are not replaced ({names}); take another")
    stored, _ = _made(folder)
    if stored is None:  # empty
        return
    is_same_kind = stored.get("made_by") == made_from.get("made_by")
    if not (is_same_kind and stored.keys() & made_from.keys()):
        raise UsageError(f"{folder}: it holds what another command wrote; choose a new folder")


def is_replaceable(folder: Path) -> bool:
    """Whether `write_folder` may replace what is at this path. Raises `OSError`."""
    return not folder.exists() or (folder.is_dir() and not _changes(folder))


def made_from(folder: Path) -> dict | None:
    """The `made_from` of a folder, whatever has happened to it since; None if there is none."""
    return _made(folder)[0]


def read_made_from(folder: Path) -> dict | None:
    """The `made_from` that `write_folder` stored in the folder; None if there is none, or if files
    are missing or of another size. Other files may be there too. Fast: no file is read."""
    stored, written = _made(folder)
    if not written:
        return None
    present = _sizes(folder)
    is_complete = all(present.get(name) == size for name, (size, _) in written.items())
    return stored if is_complete else None


def _made(folder: Path) -> tuple[dict | None, dict[str, tuple[int, str]]]:
    """The `made_from` of a folder, and the size and the hash of each file that was written."""
    try:
        content = files.read_json(folder / MADE_FROM, "")
        written = {name: (size, digest) for name, (size, digest) in content["files"].items()}
        # Earlier versions noted empty folders, too, with a size of -1.
        written = {name: noted for name, noted in written.items() if noted[0] >= 0}
        return dict(content["made_from"]), written
    except (UsageError, KeyError, TypeError, ValueError, AttributeError):
        return None, {}


def _changes(folder: Path) -> list[str]:
    """The files in which a folder differs from what `write_folder` left, if it did."""
    _, written = _made(folder)
    if not written:
        return sorted(path.name for path in folder.iterdir())
    sizes = _sizes(folder)
    changed = {name for name in sizes if name not in written}
    for name, (size, digest) in written.items():
        if sizes.get(name) != size or _hash(folder / name) != digest:
            changed.add(name)
    return sorted(changed)


def _hash(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(READ):
            digest.update(block)
    return digest.hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of all files below a folder, by their path in it."""
    inside = [path for path in folder.rglob("*") if not path.is_dir()]
    sizes = {str(path.relative_to(folder)): path.lstat().st_size for path in inside}
    sizes.pop(MADE_FROM, None)
    return sizes
