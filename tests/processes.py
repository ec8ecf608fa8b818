"""Commands in processes of their own. A server that has imported the libraries forks them, so that
they start in a fraction of a second. Otherwise they do what `python WORDS ...` does."""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).resolve().parents[1]
RECIPES = [f"recipes.{path.stem}" for path in sorted((ROOT / "recipes").glob("*.py"))]
# What a run imports only where it uses it.
LATER = ["torch._dynamo", "matplotlib.pyplot", "espeakng_loader"]


def start_server() -> None:
    """Starts the server, which imports the libraries while other tests run."""
    multiprocessing.set_forkserver_preload(["pytest", "tests.small", *RECIPES, *LATER])
    multiprocessing.forkserver.ensure_running()


class Process:
    """A started command, with the methods of `subprocess.Popen`. It has a session of its own."""

    running: list["Process"] = []  # noqa: RUF012  all that may run

    def __init__(
        self,
        words: list,
        folder: Path,
        environment: dict,
        streams: dict,
        prelude: str,
        ignored: tuple,
    ):
        self.folder = tempfile.TemporaryDirectory()
        kept = {number: os.path.join(self.folder.name, str(number)) for number in (1, 2)}
        streams = {0: os.devnull, **kept, **streams}
        words = [str(word) for word in words]
        arguments = (words, str(folder), environment, streams, prelude, ignored)
        self.process = CONTEXT.Process(target=_command, args=arguments)
        self.process.start()
        self.pid = self.process.pid
        Process.running.append(self)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = 60) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout)
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """What the command wrote to stdout and stderr, as soon as it has ended."""
        self.wait(timeout)
        return self.output(1), self.output(2)

    def output(self, descriptor: int) -> str:
        """What the command has written so far."""
        path = Path(self.folder.name, str(descriptor))
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills the command and its data workers, if they still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join(60)


def start(
    words: list,
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    streams: dict | None = None,
    prelude: str = "",
    ignored: tuple[int, ...] = (),
) -> Process:
    """Starts `python WORDS ...` in `folder`: a script or -c, and its arguments. The `environment`
    is added to this one's. stdout (1) and stderr (2) are kept for `communicate` unless `streams`
    maps them to a path or to the writing end of a `multiprocessing.Pipe`. `prelude` is code that
    runs first. The signals in `ignored` are ignored, as by nohup."""
    start_server()
    return Process(words, folder, environment or {}, streams or {}, prelude, ignored)


def end_all() -> None:
    """Ends all commands that still run."""
    while Process.running:
        Process.running.pop().end()


def wait_until(process: Process, ready: Callable[[], object], pause: float = 0.005) -> None:
    """Returns as soon as `ready()` or the process has ended, at the latest after a minute."""
    deadline = time.monotonic() + 60
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(pause)


def run_ranks(
    function: Callable, arguments: tuple = (), size: int = 2, machines: bool = False
) -> None:
    """Runs `function(rank, *arguments)` in each process of a job on the CPU, as torchrun starts
    them: on one machine, or on a machine each. What they print is dropped, their errors are raised
    here."""
    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work = (function, arguments, size, machines, port)
    torch.multiprocessing.start_processes(_rank, work, nprocs=size, start_method="forkserver")


# --- in the new process ---------------------------------------------------------------------------


def _command(
    words: list[str], folder: str, environment: dict, streams: dict, prelude: str, ignored: tuple
) -> None:
    import torch

    multiprocessing.set_start_method(None, force=True)  # not the server's, for data workers
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    gc.freeze()  # or a collection would copy every page that this process shares with the server
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for descriptor, stream in streams.items():
        _redirect(descriptor, stream)
    sys.stdin = None
    sys.stdout = _text_stream(1, "strict")
    sys.stderr = _text_stream(2, "backslashreplace")
    os._exit(_finish(_run(words, prelude)))


def _rank(
    rank: int, function: Callable, arguments: tuple, size: int, machines: bool, port: int
) -> None:
    import torch

    environment = {
        "RANK": rank,
        "LOCAL_RANK": 0 if machines else rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": 1 if machines else size,
        "GROUP_WORLD_SIZE": size if machines else 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    gc.freeze()  # recovery from out of memory collects garbage, which would copy every page
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    function(rank, *arguments)
    os._exit(0)  # as errors.exit_with_one_line does, and why


def _redirect(descriptor: int, stream) -> None:
    if isinstance(stream, str | Path):
        file = os.open(stream, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    else:
        os.dup2(stream.fileno(), descriptor)
        stream.close()


def _text_stream(descriptor: int, errors: str):
    buffering = 1 if descriptor == 2 else -1  # stderr is written line by line
    return open(descriptor, "w", buffering, encoding="utf-8", errors=errors, closefd=False)


def _run(words: list[str], prelude: str) -> int:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = words if words[0] != "-c" else ["-c", *words[2:]]
    try:
        if words[0] == "-c":
            sys.path.insert(0, "")
            code = compile(words[1], "<string>", "exec")
        else:
            main.__file__ = words[0]
            path = Path(words[0]).resolve()
            sys.path.insert(0, str(path.parent))
            code = compile(path.read_text(encoding="utf-8"), words[0], "exec")
            _import_anew(path.parents[1])
        exec(prelude, {})
        exec(code, main.__dict__)
    except SystemExit as leaving:
        return leaving.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _import_anew(root: Path) -> None:
    """Imports `common` as a recipe does, whose `__main__` is there now; from a copy of the project
    all modules."""
    if root == ROOT:
        importlib.reload(importlib.import_module("common"))
    else:
        for name in list(sys.modules):
            if name.split(".")[0] in ("common", "speech", "recipes"):
                del sys.modules[name]


def _finish(status: int) -> int:
    """What an interpreter does at exit. Returns the exit status."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        return 120
    return status
