"""Folders are written aside and renamed: a failure leaves the old one, and what others put there is
never replaced."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UsageError
from speech.data import folders

MADE = {"seed": 0}


def fill(text: str):
    def write(folder: Path) -> str:
        (folder / "a").write_text(text)
        (folder / "below").mkdir()
        (folder / "below" / "b").write_text(text)
        return f"filled with {text}"

    return write


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    texts = {str(path.relative_to(folder)): path.read_text() for path in files}
    return {name: text for name, text in texts.items() if name != folders.MADE_FROM}


def test_a_folder_is_written_aside_and_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "parent" / "export"
    assert folders.write_folder(folder, fill("1"), MADE) == "filled with 1"
    assert contents(folder) == {"a": "1", "below/b": "1"}

    def watched(aside: Path) -> str:
        assert contents(folder)["a"] == "1" and aside.parent == folder.parent
        return fill("2")(aside)

    assert folders.write_folder(folder, watched, MADE) == "filled with 2"
    assert contents(folder) == {"a": "2", "below/b": "2"}
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("kind", [{}, {"rows": 1}, {"seed": 0, "made_by": "another"}], ids=str)
def test_a_folder_of_another_kind_is_not_replaced(kind, tmp_path):
    folders.write_folder(tmp_path / "set", fill("1"), MADE)
    with pytest.raises(UsageError, match="it holds what another command wrote"):
        folders.write_folder(tmp_path / "set", fill("2"), kind)
    assert contents(tmp_path / "set")["a"] == "1"


def failing_fill(error: BaseException):
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    ids=repr,
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_cannot_be_filled_leaves_the_old_one(tmp_path, error, exists):
    folder = tmp_path / "export"
    if exists:
        folders.write_folder(folder, fill("1"), {"seed": 1})
    with pytest.raises(type(error)):
        folders.write_folder(folder, failing_fill(error), {"seed": 2})
    assert list(tmp_path.iterdir()) == ([folder] if exists else [])
    assert not exists or (
        contents(folder)["a"] == "1" and folders.read_made_from(folder) == {"seed": 1}
    )


def test_a_folder_says_what_it_was_made_from(tmp_path):
    folder = tmp_path / "a"
    made_from = {"manifest": "हांव.json", "seed": 1, "sizes": [3, 4]}
    assert folders.read_made_from(folder) is None
    folders.write_folder(folder, fill("1"), made_from)
    (folder / "notes.txt").touch()  # a file more does no harm
    assert folders.read_made_from(folder) == made_from
    noted = json.loads((folder / folders.MADE_FROM).read_text(encoding="utf-8"))
    noted["files"]["empty"] = [-1, ""]  # a folder, as earlier versions noted it
    (folder / folders.MADE_FROM).write_text(json.dumps(noted), encoding="utf-8")
    assert folders.read_made_from(folder) == made_from
    (folder / "a").write_text("longer")
    assert folders.read_made_from(folder) is None
    (folder / "a").unlink()
    assert folders.read_made_from(folder) is None
    (folder / folders.MADE_FROM).write_text("{half")
    assert folders.read_made_from(folder) is None


@pytest.mark.parametrize(
    "name, text",
    [
        ("README.md", "mine"),
        ("a", "2"),
        (folders.MADE_FROM, "[" * 100_000),
        (folders.MADE_FROM, '{"made_from": {}, "files": [1]}'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_folder_that_somebody_has_changed_is_not_replaced(tmp_path, name, text):
    folder = tmp_path / "export"
    folders.write_folder(folder, fill("1"), MADE)
    (folder / name).write_text(text)
    before = contents(folder)
    with pytest.raises(UsageError, match=r"files that are not replaced .*take another"):
        folders.write_folder(folder, fill("2"), MADE)
    assert contents(folder) == before and list(tmp_path.iterdir()) == [folder]


def test_a_file_is_not_replaced_and_a_link_stays(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        folders.write_folder(tmp_path / "file", fill("1"), MADE)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    folders.write_folder(tmp_path / "link", fill("1"), MADE)
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "real")["a"] == "1"


def killed_in(folder: Path) -> None:
    """Kills a process that writes `folder`, when it has written a file."""
    code = f"""
import os, signal
from pathlib import Path
from speech.data import folders
def fill(aside):
    (aside / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
folders.write_folder(Path({str(folder)!r}), fill, {MADE})
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False)


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    folder = tmp_path / "export"
    folders.write_folder(folder, fill("1"), MADE)
    killed_in(folder)
    assert len(list(tmp_path.iterdir())) == 2

    def other(aside: Path) -> str:
        assert len(list(tmp_path.iterdir())) == 2  # the half folder has made room
        folders.write_folder(tmp_path / "export2", fill("2"), MADE)
        folders._remove_stale(folder)  # another process
        return fill("3")(aside)

    folders.write_folder(folder, other, MADE)
    assert contents(folder)["a"] == "3" and contents(tmp_path / "export2")["a"] == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "export2"]


def test_a_process_killed_between_two_renames_loses_nothing(tmp_path):
    folder = tmp_path / "export"
    folders.write_folder(folder, fill("1"), MADE)
    folder.rename(tmp_path / ".export.abcdefgh.old")
    with pytest.raises(KeyboardInterrupt):
        folders.write_folder(folder, failing_fill(KeyboardInterrupt()), MADE)
    assert contents(folder)["a"] == "1" and list(tmp_path.iterdir()) == [folder]
