"""How a program ends: failures are one line and an exit status, bugs keep their traceback."""

import ctypes
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from common import errors
from common.errors import RunError, first_line, require
from common.ranks import LostRank

ROOT = Path(__file__).resolve().parents[2]


def program(body: str, *arguments, **extra) -> subprocess.CompletedProcess:
    """Runs `body` as the `main` of a script."""
    text = f"from common.errors import *\ndef main():\n    {body}\nexit_with_one_line(main)"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **extra}
    return subprocess.run(
        [sys.executable, *arguments, "-c", text], cwd=ROOT, text=True, timeout=60, **streams
    )


@pytest.mark.parametrize(
    "body, status, line",
    [
        ("raise DataError('a.wav is empty')", 1, "error: a.wav is empty\n"),
        ("raise UsageError('give one of them')", 2, "error: give one of them\n"),
        ("raise Stopped('stopped by SIGTERM', 143)", 143, "stopped by SIGTERM\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_failures_are_one_line(body, status, line):
    result = program(body)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", line)


@pytest.mark.parametrize("number, status", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_is_one_line(number, status):
    result = program(f"import os, signal; os.kill(os.getpid(), signal.{number}); print('on')")
    line = "interrupted\n" if number == "SIGINT" else f"stopped by {number}\n"
    assert (result.returncode, result.stdout, result.stderr) == (status, "", line)


def test_a_bug_keeps_its_traceback():
    result = program("{}['x']")
    assert result.returncode == 1 and "Traceback" in result.stderr and "KeyError" in result.stderr


def test_a_locale_without_devanagari_escapes_it():
    result = program("print('हांव')", env={"PYTHONIOENCODING": "latin-1", "PATH": ""})
    assert result.returncode == 0 and result.stdout == "\\u0939\\u093e\\u0902\\u0935\n"


def test_the_first_line_of_an_error():
    assert first_line(RuntimeError("\n  CUDA error \nmore")) == "CUDA error"
    assert first_line(MemoryError()) == "MemoryError"


def test_a_library_that_is_missing_is_named_with_its_package():
    assert require("json", "nothing") is __import__("json")
    with pytest.raises(
        RunError, match=r"the voice needs the package not-there .*pip install not-there$"
    ):
        require("not_there.below", "the voice")
    with pytest.raises(RunError, match=r"pip install one two$"):
        require("not_there", "the voice", "one two")


def test_a_failure_that_stays_ends_torchrun():
    """In place of torchrun is a shell, the parent of the program."""
    for restarts, printed in (("3", "ended\n"), ("0", "")):
        body = "def main(): raise UsageError('no')"
        text = f"from common.errors import *\n{body}\nexit_with_one_line(main)"
        result = subprocess.run(
            ["bash", "-c", 'trap "echo ended" TERM; "$@"; true', "-", sys.executable, "-c", text],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": restarts},
        )
        assert result.stdout == printed and result.stderr == "error: no\n"


def test_only_torchrun_is_ended_and_only_by_a_failure_that_stays(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "kill", lambda number, _: ended.append(number))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    torchrun = os.getppid()
    for status in (0, LostRank.status, 143):
        errors.end_job(status, torchrun)
    errors.end_job(1, torchrun + 1)  # it was killed, and another process is the parent now
    assert ended == []
    errors.end_job(1, torchrun)
    assert ended == [torchrun]


def on_a_terminal(code: str) -> tuple[int, bytes]:
    """The status of a program, and what both of its streams write to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = os.read(ours, 1 << 16)
    os.close(ours)
    return done.returncode, written


def test_names_do_not_command_the_terminal_and_piped_data_stay():
    body = r"print('a\x1b]0;b\x07\u202ec\r\td'); raise UsageError('\x1b[2Jx')"
    text = f"from common.errors import *\ndef main():\n    {body}\nexit_with_one_line(main)"
    status, written = on_a_terminal(text)
    assert status == 2
    assert b"a\\x1b]0;b\\x07\\u202ec\\x0d\td\r\nerror: \\x1b[2Jx" in written
    done = program(body)
    assert done.stderr == "error: \\x1b[2Jx\n"
    assert done.stdout == "a\x1b]0;b\x07\u202ec\n\td\n"  # text mode reads \r as a new line


def test_a_signal_while_a_library_calls_back_is_not_lost():
    def stop(number: int, frame) -> None:
        raise KeyError("stopped")

    callback = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: os.kill(os.getpid(), signal.SIGTERM) or 0)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(KeyError, match="stopped"), errors.signals_afterwards():
            callback()
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
