"""Files and folders are written aside and renamed: a failure leaves the old ones."""

import errno
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError

from common import files
from common.errors import RunError


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def private(path: Path) -> None:
    """As safetensors does: a file that only its owner can read."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))


def full(path: Path) -> None:
    """A part of the file is written before the disk is full."""
    path.write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt(path: Path) -> None:
    path.write_text("half")
    raise KeyboardInterrupt


# --- write_file ------------------------------------------------------------------------------------------------------


def test_a_file_is_written_aside_and_renamed(tmp_path):
    path, places = tmp_path / "a.json", []
    path.write_text("old")

    def write(temporary: Path) -> None:
        places.append(temporary)
        temporary.write_text("new")
        assert path.read_text() == "old"

    files.write_file(path, write)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert places[0].parent == tmp_path and places[0].suffix == ".tmp"


def test_a_files_mode_follows_the_umask(tmp_path, umask):
    files.write_file(tmp_path / "a", private)
    assert mode(tmp_path / "a") == 0o666 & ~umask
    assert os.umask(umask) == umask  # and the umask is as it was


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch, durable):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: calls.append("fsync") or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    files.write_file(tmp_path / "a", Path.touch, durable)
    assert calls == (["fsync", "replace", "fsync"] if durable else ["replace"])  # the file, then its folder


@pytest.mark.parametrize("write, error", [(full, OSError), (interrupt, KeyboardInterrupt)])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, write, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error):
        files.write_file(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_renamed_leaves_nothing_behind(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        files.write_file(tmp_path / "a", Path.touch)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError):
        files.write_file(tmp_path / "missing" / "a", Path.touch)


# --- save ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc] unexpected pos 64\nmore lines"), r"\[enforce fail .* unexpected pos 64"),
        (SafetensorError("Error while serializing: I/O error"), "Error while serializing: I/O error"),
    ],
)  # fmt: skip
def test_a_save_that_fails_is_one_line_with_the_free_space(tmp_path, error, reason):
    path = tmp_path / "checkpoint.pt"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    message = rf"cannot save .*checkpoint\.pt: {reason} \(\d+ MiB free on that disk\); earlier checkpoints are unharmed"
    with pytest.raises(RunError, match=message) as failure:
        files.save(path, write)
    assert "\n" not in str(failure.value)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_save_into_a_folder_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(RunError, match=r"cannot save .*: No such file or directory; earlier"):
        files.save(tmp_path / "gone" / "a.pt", Path.touch)


def test_a_defect_in_a_save_keeps_its_type(tmp_path):
    def write(temporary: Path) -> None:
        raise TypeError("a defect of ours")

    with pytest.raises(TypeError):
        files.save(tmp_path / "a.pt", write)


# --- write_folder ----------------------------------------------------------------------------------------------------


def fill(text: str):
    def write(folder: Path) -> str:
        (folder / "a").write_text(text)
        (folder / "below").mkdir()
        (folder / "below" / "b").write_text(text)
        return f"filled with {text}"

    return write


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_written_aside_and_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "parent" / "export"
    assert files.write_folder(folder, fill("1")) == "filled with 1"
    assert contents(folder) == {"a": "1", "below/b": "1"}
    (folder / "extra").touch()

    def watched(aside: Path) -> str:
        assert contents(folder)["a"] == "1" and aside.parent == folder.parent
        return fill("2")(aside)

    assert files.write_folder(folder, watched) == "filled with 2"
    assert contents(folder) == {"a": "2", "below/b": "2"} and list(folder.parent.iterdir()) == [folder]


def test_a_folders_mode_follows_the_umask(tmp_path, umask):
    files.write_folder(tmp_path / "export", fill("1"), made_from={})
    assert mode(tmp_path / "export") == 0o777 & ~umask
    assert mode(tmp_path / "export" / files.MADE_FROM) == 0o666 & ~umask


def failing_fill(error: BaseException):
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise error

    return write


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("x"), KeyboardInterrupt()], ids=repr)  # fmt: skip
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_cannot_be_filled_leaves_the_old_one(tmp_path, error, exists):
    folder = tmp_path / "export"
    if exists:
        files.write_folder(folder, fill("1"), {"seed": 1})
    with pytest.raises(type(error)):
        files.write_folder(folder, failing_fill(error), {"seed": 2})
    assert list(tmp_path.iterdir()) == ([folder] if exists else [])
    assert not exists or (contents(folder)["a"] == "1" and files.read_made_from(folder) == {"seed": 1})


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path, monkeypatch):
    folder, rename = tmp_path / "export", Path.rename
    files.write_folder(folder, fill("1"))

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        files.write_folder(folder, fill("2"))
    assert contents(folder) == {"a": "1", "below/b": "1"} and list(tmp_path.iterdir()) == [folder]


def test_a_folder_says_what_it_was_made_from(tmp_path):
    made_from = {"manifest": "हांव.json", "seed": 1, "sizes": [3, 4]}
    files.write_folder(tmp_path / "a", fill("1"), made_from)
    assert files.read_made_from(tmp_path / "a") == made_from
    files.write_folder(tmp_path / "a", fill("2"))
    assert files.read_made_from(tmp_path / "a") is None
    assert files.read_made_from(tmp_path / "missing") is None
    (tmp_path / "a" / files.MADE_FROM).write_text("{half")
    assert files.read_made_from(tmp_path / "a") is None
