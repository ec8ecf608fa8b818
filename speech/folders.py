"""Folders that this project writes: data sets and exported models. They are written aside and
renamed, and a folder that holds anything else is never replaced."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import files
from common.errors import UsageError

MADE_FROM = "made_from.json"


def write_folder(folder: Path, fill: Callable[[Path], object], made_from: dict):
    """Calls `fill(temporary_folder)`, renames that folder to `folder` and returns the result of
    `fill`. `made_from` is stored inside, with the list of files. Replaces an empty folder, and an
    earlier one of `write_folder` that nobody has changed. Raises `UsageError` for any other folder,
    `OSError`, and whatever `fill` raises; then the earlier folder is still there."""
    folder = folder.resolve()  # a link to a folder stays
    require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(".tmp", f".{folder.name[:200]}.", folder.parent))
    try:
        aside.chmod(0o777 & ~files.umask())
        result = fill(aside)
        content = {"made_from": made_from, "files": _sizes(aside)}
        (aside / MADE_FROM).write_text(json.dumps(content), encoding="utf-8")
        require_replaceable(folder)  # again, because `fill` may have taken hours
        _move(aside, folder)
        return result
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move(aside: Path, folder: Path) -> None:
    """Renames `aside` to `folder`. An earlier folder is put back if that fails."""
    if not folder.exists():
        aside.rename(folder)
        return
    old = Path(tempfile.mkdtemp(".old", f".{folder.name[:200]}.", folder.parent))
    folder.rename(old)  # onto an empty folder
    try:
        aside.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def require_replaceable(folder: Path) -> None:
    """Raises `UsageError` if `write_folder` may not replace `folder`, because it holds anything
    else than what `write_folder` left there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder}: it exists and is not a folder; choose another name")
    changed = _changes(folder)
    if changed:
        raise UsageError(
            f"{folder}: it holds files that are not replaced ({', '.join(changed[:3])}); choose a"
            " new folder"
        )


def read_made_from(folder: Path) -> dict | None:
    """The `made_from` that `write_folder` stored in the folder; None if there is none, or if files
    are missing or of another size. Other files may be there too."""
    made_from, sizes = _made(folder)
    if not sizes:
        return None
    present = _sizes(folder)
    is_complete = all(present.get(name) == size for name, size in sizes.items())
    return made_from if is_complete else None


def _made(folder: Path) -> tuple[dict | None, dict]:
    """The `made_from` of a folder, and the sizes of the files that were written."""
    try:
        content = files.read_json(folder / MADE_FROM, "")
        return dict(content["made_from"]), dict(content["files"])
    except (UsageError, KeyError, TypeError, ValueError):
        return None, {}


def _changes(folder: Path) -> list[str]:
    """The files in which a folder differs from what `write_folder` left; all of them if it did not
    write the folder."""
    _, sizes = _made(folder)
    present = _sizes(folder)
    if not sizes:
        return sorted(path.name for path in folder.iterdir())
    written = (folder / MADE_FROM).stat().st_mtime_ns
    changed = {name for name in {**sizes, **present} if sizes.get(name) != present.get(name)}
    for name in present:
        if (folder / name).lstat().st_mtime_ns > written:
            changed.add(name)
    return sorted(changed)


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of all files below a folder, by their path in it. An empty folder inside counts as a
    file of size -1."""
    sizes = {}
    for root, folders, names in os.walk(folder):
        place = os.path.relpath(root, folder)
        for name in names:
            inside = os.path.normpath(os.path.join(place, name))
            sizes[inside] = os.lstat(os.path.join(root, name)).st_size
        if not folders and not names and place != ".":
            sizes[place] = -1
    sizes.pop(MADE_FROM, None)
    return sizes
