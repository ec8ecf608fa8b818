"""Models in use: a process loads a model once and answers requests to transcribe or to speak.

A request is a list of words for the recipe's own parser, and the process calls the recipe's
`main` for it, so a result is that of the command. It differs from the command in one thing: what
the recipe's function `trained` returned, the loaded model, is kept for the next request.

    python -m webui.use RECIPE  # requests on stdin: {"words": [...]}; answers: {"status", "text"}
"""

import contextlib
import functools
import importlib
import io
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from common import options
from common.errors import RunError, exit_with_one_line, first_line

ROOT = Path(__file__).resolve().parents[1]
IDLE_SECONDS = 300.0  # after which a process ends and gives its memory back
REQUEST_SECONDS = 900.0  # that a request may take
MOST = 2  # processes at once: the model of a run, and the released one beside it
WAIT_SECONDS = 10.0  # for a process that has been told to end


# --- in the server --------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process with the model `key`. `log`: what it printed between requests, and at its end."""

    key: tuple
    process: subprocess.Popen
    log: io.BufferedRandom

    def say(self) -> str:
        """Why the process has ended, in a few words."""
        status = self.process.wait(WAIT_SECONDS)
        if status == -signal.SIGKILL:
            return "it was killed, perhaps because the memory was full"
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {status}"

    def end(self) -> None:
        """Kills the process with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(OSError):
                stream.close()


class Models:
    """Processes that hold models. Requests are served one after the other."""

    def __init__(self):
        self.lock = threading.Lock()
        self.workers: list[Worker] = []  # the one that was used last is the last

    def ask(
        self,
        recipe: str,
        words: list[str],
        model: tuple[str, ...],
        seconds: float = REQUEST_SECONDS,
    ) -> str:
        """The text that `python recipes/RECIPE.py WORDS MODEL` prints. `model` are the words that
        name the model and its device, such as ("--resume", "best.safetensors", "--device", "cpu"):
        requests with the same ones, and the same files, are answered by one process. The first of
        them starts it. The caller has checked all paths. Raises `RunError` with the command's own
        error, after `seconds`, and if the process has ended."""
        with self.lock:
            answer = None
            while answer is None:
                worker, is_new = self._worker(recipe, model)
                answer = self._answer(worker, [*words, *model], seconds)
                if answer is None and (is_new or worker.process.wait(WAIT_SECONDS)):
                    # (A process that has just ended because it was idle has exit status 0.)
                    reason = worker.say()
                    self._end(worker)
                    raise RunError(f"the process with the model has ended: {reason}; try again")
            if answer["ends"]:
                self._end(worker)
        if answer["status"]:
            raise RunError(error_of(answer["text"]))
        return answer["text"]

    def close(self) -> None:
        """Ends all processes."""
        with self.lock:
            while self.workers:
                self._end(self.workers[-1])

    def _worker(self, recipe: str, model: tuple[str, ...]) -> tuple[Worker, bool]:
        """The process for this model, and whether it is a new one."""
        for worker in [each for each in self.workers if each.process.poll() is not None]:
            self._end(worker)
        key = (recipe, *model, *map(stamp, model))
        for worker in self.workers:
            if worker.key == key:
                self.workers.remove(worker)
                self.workers.append(worker)
                return worker, False
        while len(self.workers) >= MOST:
            self._end(self.workers[0])
        log = tempfile.TemporaryFile()  # noqa: SIM115  the worker has it
        process = subprocess.Popen(
            [sys.executable, "-m", "webui.use", recipe],
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for the server, which closes stdin then
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        self.workers.append(Worker(key, process, log))
        return self.workers[-1], True

    def _answer(self, worker: Worker, words: list[str], seconds: float) -> dict | None:
        """The answer to a request; None if the process has ended. Raises `RunError`."""
        line = b""
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.write(json.dumps({"words": words}).encode() + b"\n")
            worker.process.stdin.flush()
            if not select.select([worker.process.stdout], [], [], seconds)[0]:
                self._end(worker)
                raise RunError(
                    f"there was no answer after {seconds:.0f} s, and the process was ended: give"
                    " less at once, or use a faster device"
                )
            line = worker.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def _end(self, worker: Worker) -> None:
        worker.end()
        self.workers.remove(worker)


def stamp(word: str) -> tuple:
    """A value that changes with the file, or with a file in the folder, that a word names: the best
    weights of a run are replaced while it trains."""
    name = word.partition("=")[2] if word.startswith("--") else word
    try:
        folder = os.scandir(name) if os.path.isdir(name) else [Path(name)]
        states = [(Path(each).name, each.stat()) for each in folder]
    except (OSError, ValueError):
        return ()
    return tuple(sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in states))


def error_of(text: str) -> str:
    """The first error in what a command printed."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*errors, *reversed(lines), "the command failed and printed nothing"][0]


# --- in the process -------------------------------------------------------------------------------


def keep_model(recipe: ModuleType) -> None:
    """Lets the recipe's `trained`, if it has this function, load a model once."""
    load = getattr(recipe, "trained", None)
    if load is None:
        return
    kept = []

    @functools.wraps(load)
    def trained(*values):
        if not kept:
            kept.append(load(*values))
        return kept[0]

    recipe.trained = trained


def serve(recipe: ModuleType, requests: Iterator[list[str]]) -> Iterator[dict]:
    """An answer for each request: the exit "status" of the command, all "text" that it printed, and
    whether the process "ends", because an error that no recipe expects may leave a device unusable
    and a model half moved."""
    keep_model(recipe)
    for words in requests:
        ends = False
        printed = io.StringIO()
        status = 0
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                exit_with_one_line(lambda words=words: run(recipe, words))
            except SystemExit as leaving:
                status = leaving.code
            except BaseException as error:
                traceback.print_exc(file=sys.__stderr__)
                print(f"error: {type(error).__name__}: {first_line(error)}")
                status, ends = 1, True
        yield {"status": status, "text": printed.getvalue(), "ends": ends}
        if ends:
            return


def run(recipe: ModuleType, words: list[str]) -> None:
    parser = options.Parser(recipe.__doc__)
    recipe.add_arguments(parser)
    recipe.main(parser.parse_args(words))


def requests_on_stdin(idle_seconds: float) -> Iterator[list[str]]:
    """The words of each request, until there was none for `idle_seconds`. The process ends at once,
    also while it works, when stdin is closed: the server has ended."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while True:
            yield json.loads(lines.get(timeout=idle_seconds))["words"]


def main(recipe: str) -> None:
    # Answers have the stdout of the process for themselves, whatever a library prints.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module = importlib.import_module(f"recipes.{recipe}")
    for answer in serve(module, requests_on_stdin(IDLE_SECONDS)):
        print(json.dumps(answer), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # the thread that reads stdin would hold the interpreter


if __name__ == "__main__":
    main(sys.argv[1])
