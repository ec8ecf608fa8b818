"""The failures that are answered with one line and an exit status instead of a traceback."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable


class Failure(Exception):
    """Something the user can act on. `str(error)` says what happened, where, and what to do; `status` is the exit
    status."""

    status = 1


class UsageError(Failure):
    """A command that cannot be meant: contradicting flags, a missing checkpoint, a device that is not there."""

    status = 2


class DataError(Failure):
    """Audio, text or a manifest that cannot be used."""


class RunError(Failure):
    """A run that cannot go on: an utterance that does not fit, a full disk, losses that stay non-finite."""


class Stopped(Failure):
    """A signal ended the run after its state was saved; `status` is 128 plus the signal's number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def cannot_write(folder, error: OSError, flag: str) -> RunError:
    """What to raise where `folder`, which `flag` names, cannot be made or written in."""
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "a part of that path is a file" if is_file else error.strerror
    return RunError(f"cannot write in {folder}: {reason}; choose another {flag}")


def exit_with_one_line(main: Callable, *args) -> None:
    """Runs `main(*args)` and turns a `Failure` into one line on stderr and its exit status; anything else is a defect
    of ours and keeps its traceback."""
    status = 0
    try:
        _run(main, *args)
    except SystemExit as leaving:
        status = leaving.code
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # Unwinding torch.distributed's threads aborts one process in ten at exit, and torchrun would call it a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


def _run(main: Callable, *args) -> None:
    for stream in (sys.stdout, sys.stderr):  # where the locale has no Devanagari, escapes are better than an error
        if hasattr(stream, "reconfigure"):  # a notebook's has none
            stream.reconfigure(errors="backslashreplace")
    try:
        main(*args)
        sys.stdout.flush()
    except Failure as failure:
        print(f"error: {failure}" if not isinstance(failure, Stopped) else str(failure), file=sys.stderr)
        sys.exit(failure.status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # another pipe: a defect, or a worker process that died
        # `... --transcribe folder | head`: what stdout still holds must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def require(module: str, purpose: str):
    """Imports and returns a library that only some runs need. Raises `RunError` naming what it is for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"espeakng_loader": "espeakng-loader"}.get(module.split(".")[0], module.split(".")[0])
        raise RunError(f"{purpose} needs the package {package} ({error}): pip install {package}") from None
