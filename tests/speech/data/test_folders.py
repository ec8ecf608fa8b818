"""Folders are written aside and renamed: a failure leaves the old one, and what others put there is
never replaced."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UsageError
from speech.data import folders

MADE = {"seed": 0}


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fill(text: str):
    def write(folder: Path) -> str:
        (folder / "a").write_text(text)
        (folder / "below").mkdir()
        (folder / "below" / "b").write_text(text)
        return f"filled with {text}"

    return write


def contents(folder: Path) -> dict[str, str]:
    paths = [
        path for path in folder.rglob("*") if path.is_file() and path.name != folders.MADE_FROM
    ]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_a_folder_is_written_aside_and_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "parent" / "export"
    assert folders.write_folder(folder, fill("1"), MADE) == "filled with 1"
    assert contents(folder) == {"a": "1", "below/b": "1"}

    def watched(aside: Path) -> str:
        assert contents(folder)["a"] == "1" and aside.parent == folder.parent
        return fill("2")(aside)

    assert folders.write_folder(folder, watched, MADE) == "filled with 2"
    assert contents(folder) == {"a": "2", "below/b": "2"} and list(folder.parent.iterdir()) == [
        folder
    ]


@pytest.mark.parametrize("kind", [{}, {"rows": 1}, {"seed": 0, "made_by": "another"}], ids=str)
def test_a_folder_of_another_kind_is_not_replaced(kind, tmp_path):
    folders.write_folder(tmp_path / "set", fill("1"), MADE)
    with pytest.raises(UsageError, match="it holds what another command wrote"):
        folders.write_folder(tmp_path / "set", fill("2"), kind)
    assert contents(tmp_path / "set")["a"] == "1"


def test_a_folders_mode_follows_the_umask(tmp_path, umask):
    folders.write_folder(tmp_path / "export", fill("1"), made_from={})
    assert mode(tmp_path / "export") == 0o777 & ~umask
    assert mode(tmp_path / "export" / folders.MADE_FROM) == 0o666 & ~umask


def failing_fill(error: BaseException):
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), ValueError("x"), KeyboardInterrupt()],
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


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path, monkeypatch):
    folder, rename = tmp_path / "export", Path.rename
    folders.write_folder(folder, fill("1"), MADE)

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        folders.write_folder(folder, fill("2"), MADE)
    assert contents(folder) == {"a": "1", "below/b": "1"} and list(tmp_path.iterdir()) == [folder]


def test_a_folder_says_what_it_was_made_from(tmp_path):
    made_from = {"manifest": "हांव.json", "seed": 1, "sizes": [3, 4]}
    folders.write_folder(tmp_path / "a", fill("1"), made_from)
    assert folders.read_made_from(tmp_path / "a") == made_from
    folders.write_folder(tmp_path / "a", fill("2"), MADE)
    assert folders.read_made_from(tmp_path / "a") == MADE
    assert folders.read_made_from(tmp_path / "missing") is None
    (tmp_path / "a" / folders.MADE_FROM).write_text("{half")
    assert folders.read_made_from(tmp_path / "a") is None
    folders.write_folder(tmp_path / "b", fill("1"), made_from)
    (tmp_path / "b" / "a").write_text("longer")
    assert folders.read_made_from(tmp_path / "b") is None  # it is not complete as it was written
    folders.write_folder(tmp_path / "c", fill("1"), made_from)
    (tmp_path / "c" / "below" / "b").unlink()
    assert folders.read_made_from(tmp_path / "c") is None
    folders.write_folder(tmp_path / "d", fill("1"), made_from)
    (tmp_path / "d" / "notes.txt").touch()
    assert folders.read_made_from(tmp_path / "d") == made_from  # a file more does no harm


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "README.md").write_text("mine"),
        lambda folder: (folder / "below" / "new").mkdir(),
        lambda folder: (folder / "a").write_text("2"),
        lambda folder: (folder / "a").write_text("longer"),
        lambda folder: (folder / folders.MADE_FROM).unlink(),
        lambda folder: (folder / folders.MADE_FROM).write_text("{}"),
        lambda folder: (folder / folders.MADE_FROM).write_text("[" * 100_000),
        lambda folder: (folder / folders.MADE_FROM).write_text('{"made_from": {}, "files": [1]}'),
    ],
    ids=[
        "added",
        "folder",
        "edited",
        "longer",
        "unmarked",
        "empty mark",
        "deep mark",
        "wrong mark",
    ],
)
def test_a_folder_that_somebody_has_changed_is_not_replaced(tmp_path, change):
    folder = tmp_path / "export"
    folders.write_folder(folder, fill("1"), MADE)
    # An edit in the same tick of the clock would be told by its size alone.
    for name in (folders.MADE_FROM, "a", "below/b"):
        os.utime(folder / name, (0, 0))
    change(folder)
    before = contents(folder)
    with pytest.raises(
        UsageError, match=r"holds files that are not replaced .*choose a new folder"
    ):
        folders.write_folder(folder, fill("2"), MADE)
    assert contents(folder) == before and list(tmp_path.iterdir()) == [folder]


def test_a_change_while_the_new_folder_is_filled_is_kept(tmp_path):
    folder = tmp_path / "export"
    folders.write_folder(folder, fill("1"), MADE)
    with pytest.raises(UsageError, match=r"notes\.txt"):
        folders.write_folder(folder, lambda aside: (folder / "notes.txt").write_text("mine"), MADE)
    assert (folder / "notes.txt").read_text() == "mine" and list(tmp_path.iterdir()) == [folder]


def test_an_old_folder_that_cannot_be_put_back_is_not_deleted(tmp_path, monkeypatch):
    folder, rename, renames = tmp_path / "export", Path.rename, []
    folders.write_folder(folder, fill("1"), MADE)

    def fail_after_the_first(path: Path, target: Path) -> Path:
        renames.append(path)
        if len(renames) > 1:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_after_the_first)
    with pytest.raises(OSError):
        folders.write_folder(folder, fill("2"), MADE)
    (kept,) = tmp_path.iterdir()
    assert contents(kept) == {"a": "1", "below/b": "1"}


def test_a_file_is_not_replaced_and_a_link_stays(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        folders.write_folder(tmp_path / "file", fill("1"), MADE)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    folders.write_folder(tmp_path / "link", fill("1"), MADE)
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "real")["a"] == "1"


def test_a_file_of_the_same_size_and_an_older_time_is_told_by_its_content(tmp_path):
    folder = tmp_path / "export"
    folders.write_folder(folder, fill("1"), MADE)
    (folder / "a").write_text("2")
    os.utime(folder / "a", (0, 0))
    with pytest.raises(UsageError, match=r"not replaced \(a\)"):
        folders.write_folder(folder, fill("3"), MADE)
    (folder / "a").write_text("1")  # as it was
    folders.write_folder(folder, fill("3"), MADE)
    (folder / "a").unlink()
    os.mkfifo(folder / "a")
    assert not folders.is_replaceable(folder)  # and nobody waits for a writer


def test_a_folder_of_an_earlier_version_is_known_by_sizes(tmp_path):
    folder = tmp_path / "set"
    folders.write_folder(folder, fill("1"), MADE)
    content = json.loads((folder / folders.MADE_FROM).read_text())
    content["files"] = {name: size for name, (size, _) in content["files"].items()}
    (folder / folders.MADE_FROM).write_text(json.dumps(content))
    assert folders.read_made_from(folder) == MADE
    folders.write_folder(folder, fill("2"), MADE)
    assert contents(folder)["a"] == "2"


def killed_in(folder: Path, prelude: str = "") -> None:
    """Kills a process that writes `folder`, when it has written a file."""
    code = f"""
import os, signal, sys
from pathlib import Path
from speech.data import folders
{prelude}
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
