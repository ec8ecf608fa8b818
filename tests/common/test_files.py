"""Files are written aside and renamed: a failure leaves the old ones. What is not a regular,
sensible file is not read."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError

from common import files
from common.errors import RunError, UsageError


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


# --- write_file -----------------------------------------------------------------------------------


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
    # The file, then its folder.
    assert calls == (["fsync", "replace", "fsync"] if durable else ["replace"])


@pytest.mark.parametrize("write, error", [(full, OSError), (interrupt, KeyboardInterrupt)])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, write, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error):
        files.write_file(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# --- save -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RuntimeError, SafetensorError])
def test_a_save_that_fails_is_one_line_with_the_free_space(tmp_path, kind):
    path = tmp_path / "checkpoint.pt"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise kind("unexpected pos 64\nmore lines")

    message = r"cannot save .*checkpoint\.pt: unexpected pos 64 \(\d+ MiB free on that disk\); earl"
    with pytest.raises(RunError, match=message) as failure:
        files.save(path, write)
    assert "\n" not in str(failure.value)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_save_into_a_folder_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(RunError, match=r"cannot save .*: No such file or directory; earlier"):
        files.save(tmp_path / "gone" / "a.pt", Path.touch)


# --- pipes, names of others -----------------------------------------------------------------------


def test_what_a_killed_run_left_is_removed(tmp_path):
    child = os.fork()
    if child == 0:
        files.write_file(tmp_path / "a", lambda path: os._exit(0))
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    (tmp_path / left.name.replace(".a.", ".b.")).mkdir()
    files.remove_stale(tmp_path, "a|b")
    assert [path.is_dir() for path in tmp_path.iterdir()] == [True]


def test_a_text_that_is_not_unicode_is_written_as_escapes(tmp_path):
    files.write_text(tmp_path / "a", '{"path": "x\udcff"}')
    assert (tmp_path / "a").read_bytes() == b'{"path": "x\\udcff"}'


def test_pipes_devices_folders_and_missing_files_are_refused_without_waiting(tmp_path, no_hang):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        for name, reason in [
            ("pipe", "not a regular file"),
            ("s", "not a regular file"),
            (".", "it is a folder"),
            ("missing", "No such file"),
        ]:
            for read in (files.require_file, files.read_text, files.read_json):
                with pytest.raises(UsageError, match=reason) as refused:
                    read(tmp_path / name, "--flag")
                assert str(refused.value).startswith("--flag ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"[" * 100_000, "it is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b"{", "it is not valid JSON"),
        (b"\xff\xfe{", "it is not UTF-8"),
    ],
)
def test_json_that_cannot_be_used_is_named(tmp_path, content, reason):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UsageError, match=reason) as refused:
        files.read_json(tmp_path / "a.json", "--vocab_file")
    assert "a.json" in str(refused.value) and "\n" not in str(refused.value)


def test_a_text_file_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(files.TEXT_BYTES + 1)
    with pytest.raises(UsageError, match=r"64 MiB are too much"):
        files.read_text(tmp_path / "a.json")


# --- require_output -------------------------------------------------------------------------------


def test_an_output_may_be_new_or_an_earlier_one(tmp_path):
    path = tmp_path / "a"
    assert files.require_output(str(path), "--output") == path
    path.write_text("mine")
    assert files.require_output(path, "--output", is_earlier=lambda path: True) == path
    for is_earlier in (None, lambda path: False):
        with pytest.raises(UsageError, match=r"^--output .*a: it exists, and this command did not"):
            files.require_output(path, "--output", is_earlier=is_earlier)


def test_an_output_is_no_input_folder_link_or_pipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("mine")
    Path("hard").hardlink_to("a")
    Path("link").symlink_to("a")
    Path("dangling").symlink_to("nothing")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    reasons = {
        "hard": r"this command reads it \(a\)",
        "folder/../a": r"this command reads it \(a\)",
        "link": "it is a link",
        "dangling": "it is a link",
        "folder": "it is a folder",
        "pipe": "it is a device or a pipe",
        "/dev/full": "it is a device or a pipe",
        "no/a": "No such file or directory",
        "a/b": "Not a directory",
    }
    for name, reason in reasons.items():
        with pytest.raises(UsageError, match=reason):
            files.require_output(name, "--output", [None, "nothing", "a"], lambda path: True)
    assert Path("a").read_text() == "mine" and not Path("nothing").exists()
