"""Failures that end a command with one line on stderr and an exit status instead of a traceback."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable


class Failure(Exception):
    """A failure that the user can act on. `str(error)` says what happened, where, and what to do."""

    status = 1  # the exit status


class UsageError(Failure):
    """A command that cannot be run: contradicting flags, a missing checkpoint, an unavailable device."""

    status = 2


class DataError(Failure):
    """Data that cannot be used."""


class RunError(Failure):
    """A run that cannot continue: an utterance does not fit into memory, the disk is full, losses stay non-finite."""


class Stopped(Failure):
    """A signal ended the run after its state was saved; `status` is 128 plus the signal's number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def cannot_write(folder, error: OSError, flag: str) -> RunError:
    """The error for a folder that cannot be created or written to. `flag` is the one that chooses the folder."""
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "a part of that path is a file" if is_file else error.strerror
    return RunError(f"cannot write in {folder}: {reason}; choose another {flag}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def exit_with_one_line(main: Callable, *args) -> None:
    """Runs `main(*args)`. A `Failure` becomes one line on stderr and its exit status; other exceptions are bugs and
    keep their tracebacks."""
    status = _run(main, *args)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # At exit torch.distributed's threads abort one process in ten, which torchrun would report as a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


def _run(main: Callable, *args) -> int | str:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams have no such method
            stream.reconfigure(errors="backslashreplace")  # print characters that the locale lacks as escapes
    try:
        main(*args)
        sys.stdout.flush()
    except Failure as failure:
        print(failure if isinstance(failure, Stopped) else f"error: {failure}", file=sys.stderr)
        return failure.status
    except SystemExit as leaving:
        return leaving.code or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # another pipe broke: a bug, or a worker process that died
        # The reader of stdout has gone (`... | head`). Python must not flush the rest into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def require(module: str, purpose: str):
    """Imports and returns a module that only some runs need. Raises `RunError` with the `purpose` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).split(".")[0].replace("_", "-")  # the module, or one that it imports
        raise RunError(f"{purpose} needs the package {package} ({error}): pip install {package}") from None
