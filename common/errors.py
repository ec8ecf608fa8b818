"""Failures that end a command with one line on stderr and an exit status instead of a traceback."""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator


class Failure(Exception):
    """A failure that the user can act on. Its text says what happened, where, and what to do."""

    status = 1  # the exit status


class UsageError(Failure):
    """A command that cannot be run: contradicting flags, a missing checkpoint or device."""

    status = 2


class DataError(Failure):
    """Data that cannot be used."""


class RunError(Failure):
    """A run that cannot continue: no memory, a full disk, losses that stay non-finite."""


class Stopped(Failure):
    """A signal ended the run after its state was saved; `status` is 128 plus its number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Planned(Failure):
    """The end of a run that is only planned, in place of a training; `status` is the plan's. All
    that there is to say has been printed."""

    def __init__(self, status: int):
        super().__init__("")
        self.status = status


def cannot_write(folder, error: OSError, flag: str) -> RunError:
    """The error for a folder that cannot be written to. `flag` chooses the folder."""
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "a part of that path is a file" if is_file else error.strerror
    return RunError(f"cannot write in {folder}: {reason}; choose another {flag}")


@contextlib.contextmanager
def writing(folder, flag: str) -> Iterator[None]:
    """Inside, an `OSError` becomes `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error, flag) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# Control characters in names of files, and what changes the direction of text, as escapes: a
# terminal would obey them.
ESCAPES = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\t\n"
}


class Escaped:
    """A standard stream in which names of files cannot command the terminal."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        drawn = "\r" * text.startswith("\r")  # a progress bar begins its line again
        self.stream.write(drawn + text[len(drawn) :].translate(ESCAPES))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def exit_with_one_line(main: Callable, *args) -> None:
    """Runs `main(*args)`. A `Failure` becomes one line on stderr and its exit status, as does a
    signal; other exceptions are bugs and keep their tracebacks."""
    parent = os.getppid()
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if hasattr(stream, "reconfigure"):  # a notebook's streams have no such method
            stream.reconfigure(errors="backslashreplace")  # for characters that the locale lacks
    if sys.stdout.isatty():  # a file or another program gets data, such as transcripts, as they are
        sys.stdout = Escaped(sys.stdout)
    sys.stderr = Escaped(sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `... &` ignores it
    try:
        status = _run(main, *args)
    finally:
        sys.stdout, sys.stderr = streams
    if os.environ.get("WORLD_SIZE") not in (None, "", "1"):
        sys.stdout.flush()
        end_job(status, parent)
        # At exit torch.distributed's threads abort one process in ten, which torchrun would report
        # as a failure.
        os._exit(status)
    if status:
        sys.exit(status)


def end_job(status: int | str, parent: int) -> None:
    """Ends torchrun, the `parent` of this process, after a failure that is there again the next
    time: --max_restarts would repeat its message. It may have been killed meanwhile."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if status in (1, 2) and restarts and os.getppid() == parent:
        os.kill(parent, signal.SIGTERM)


def _stop(number: int, frame) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}", 128 + number)


@contextlib.contextmanager
def signals_afterwards() -> Iterator[None]:
    """Handles SIGINT, SIGTERM and SIGHUP after what is inside, which they do not interrupt."""
    caught = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in caught:
        signal.raise_signal(number)


def _run(main: Callable, *args) -> int | str:
    try:
        main(*args)
    except SystemExit as leaving:
        return leaving.code or 0
    except Planned as planned:
        return planned.status
    except Failure as failure:
        sys.stdout.flush()  # a log file has both streams
        print(failure if isinstance(failure, Stopped) else f"error: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def require(module: str, purpose: str, packages: str = ""):
    """Imports and returns a module that only some runs need. Raises `RunError` with the `purpose`
    if it is missing, and the command that installs it, or all `packages`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:  # of the module, or of one that it imports
        package = (error.name or module).split(".")[0].replace("_", "-")
        raise RunError(
            f"{purpose} needs the package {package} ({error}):"
            f" {sys.executable} -m pip install {packages or package}"
        ) from None
