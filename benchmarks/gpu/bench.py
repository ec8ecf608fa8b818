"""Pieces of a measurement: in order, as long as there is time, several at a time if they may be."""

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from benchmarks.gpu import child
from benchmarks.gpu.results import Results

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (  # before children are forked
    "benchmarks.gpu.child",
    *(f"recipes.{path.stem}" for path in sorted((ROOT / "recipes").glob("*.py"))),
)
ALLOCATOR = "expandable_segments:True"  # as common/env.sh sets it
HUNG = {"cuda": 5, "cpu": 50}  # times the usual duration on a GPU, after which a child is killed
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
JOBS = max(1, CORES // 3)  # pieces at a time
LAST_LINES = 2000  # characters of a failed child's output that are kept


class Failed(Exception):
    """A child failed. The message is its last line."""


class Skipped(Exception):
    """A piece cannot be measured. The message says why."""


class OutOfTime(Skipped):
    """The time of this call is over. The piece is measured by the next call."""


@dataclass(frozen=True)
class Piece:
    """A part of the measurement, which is flushed and skipped as one. `measure(bench)` returns what
    it found. `seconds`: how long it takes on a GPU, about; it does not begin if less is left.
    `gib`: how much of the card it takes. Pieces with a time or a driver's count to measure are
    `alone`; others run beside each other as far as card and cores allow."""

    name: str
    measure: Callable[["Bench"], dict]
    seconds: float
    gib: float = 2.0
    alone: bool = False


class Bench:
    """The means of a measurement: the device ("cuda" or "cpu"), the time that is left, children.
    `card` is what the first piece found; `gib` is the memory of the card, or of the smaller one
    that is asked for, which has a `cap`: bytes that an allocator may take (0: all)."""

    def __init__(self, device: str, minutes: float):
        self.device = device
        self.is_small = device == "cpu"  # demo sizes, two updates
        self.deadline = time.monotonic() + 60 * minutes
        self.card: dict = {}
        self.gib = 0.0
        self.cap = 0
        self.beside: set[Piece] = set()  # pieces that did not run alone
        self.results: Results | None = None
        self.children: set[multiprocessing.Process] = set()
        self.lock = threading.Lock()
        self.threads = CORES  # of a child

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def folder(self):
        """A folder for one piece, which is removed after it."""
        with tempfile.TemporaryDirectory(prefix="on_gpu_", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def child(self, asked: dict, folder: Path, seconds: float, status: tuple = (0,)) -> str:
        """Runs child.py in `folder` and returns its output. It is killed with its children at the
        end of this call's time, or if it takes much longer than `seconds`. Raises `Failed` and
        `OutOfTime`."""
        limit = max(60, HUNG[self.device] * seconds)
        output = folder / f"output {time.monotonic_ns()}"
        with self.lock:
            process = forks().Process(target=child.main, args=(asked, folder, output, self.threads))
            process.start()
            self.children.add(process)
        process.join(min(limit, max(1, self.left)))
        ended = process.exitcode
        self.end(process)
        if ended in status:
            return output.read_text(errors="replace")
        if self.left <= 1:
            raise OutOfTime("the time was over before it had ended")
        if ended is None:
            raise Failed(f"it took more than {limit:.0f} s and was killed")
        printed = output.read_text(errors="replace") if output.exists() else ""
        raise Failed(f"status {ended}: {printed.strip()[-LAST_LINES:]}")

    def end(self, process: multiprocessing.Process) -> None:
        """Kills a child and its children, such as data workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # if it is not the first of its group yet
        process.join()
        self.children.discard(process)

    def end_all(self) -> None:
        with self.lock:
            self.deadline = 0.0
            for process in list(self.children):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def trial(
        self, recipe: str, words: list, usual: float, device: str | None = None, **wanted
    ) -> dict:
        """The results of trial.py; `usual`: seconds that it takes, about. After a failure, "failed"
        says why and the rest is what was known until then. Raises `Failed` if nothing was, and
        `OutOfTime`."""
        words = [*words, "--device", device or self.device, "--log_every", "1"]
        with self.folder() as folder:
            output = folder / "found.json"
            asked = {
                "recipe": recipe,
                "words": list(map(str, words)),
                "trial": {"output": str(output), "cap": self.cap, **wanted},
            }
            failed = ""
            try:
                self.child(asked, folder, usual)
            except Failed as error:
                failed = str(error)
            found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
        if failed:
            found["failed"] = failed.splitlines()[-1]
        if failed and not found.get("losses"):
            raise Failed(failed)
        return found

    def measure(self, pieces: list[Piece]) -> None:
        """Measures what is not in the results yet, in order."""
        waiting = [piece for piece in pieces if not self.results.has(piece.name)]
        running: dict[Future, Piece] = {}
        with ThreadPoolExecutor(JOBS) as pool:
            try:
                while waiting or running:
                    while waiting and self.may_start(waiting[0], list(running.values())):
                        piece = waiting.pop(0)
                        self.threads = CORES if piece.alone else max(1, CORES // JOBS)
                        running[pool.submit(self.measure_one, piece)] = piece
                        if len(running) > 1:
                            self.beside.update(running.values())
                    finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        running.pop(future)
                        future.result()
            except BaseException:  # a signal; the pool would wait for the children
                self.end_all()
                raise

    def may_start(self, piece: Piece, running: list[Piece]) -> bool:
        if not running:
            return True
        if piece.alone or any(other.alone for other in running):
            return False
        gib = piece.gib + sum(other.gib for other in running)
        return len(running) < JOBS and gib <= self.card["gib"]

    def measure_one(self, piece: Piece) -> None:
        """Measures a piece, notes what it found, and prints a line."""
        started = time.monotonic()
        entry = {}
        try:
            if self.left < (5 if self.is_small else piece.seconds):
                raise OutOfTime(
                    f"it takes about {piece.seconds:.0f} s, and {self.left:.0f} s are left"
                )
            entry = {"status": "done", "found": piece.measure(self)}
        except OutOfTime as reason:
            entry = {"status": "later", "reason": str(reason)}
        except Skipped as reason:
            entry = {"status": "skipped", "reason": str(reason)}
        except Failed as reason:
            entry = {"status": "failed", "reason": str(reason)}
        except Exception:  # a fault of one piece must not cost the others
            entry = {"status": "failed", "reason": traceback.format_exc()[-LAST_LINES:]}
        if piece in self.beside:  # others were counted, too
            entry.get("found", {}).pop("driver", None)
        entry["seconds"] = round(time.monotonic() - started, 1)
        self.results.note(piece.name, entry)
        reason = entry.get("reason", "").strip().split("\n")[-1]
        if entry["status"] == "later":
            return  # a table at the end has them all
        print(f"{piece.name}: {entry['status']}{reason and ': '}{reason}", flush=True)


@functools.cache
def forks() -> multiprocessing.context.BaseContext:
    """Processes that are forked from one that has imported what children need. Their environment:
    the allocator as the preset scripts set it."""
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,
        "PYTORCH_ALLOC_CONF": ALLOCATOR,
        "GPUS": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])]),
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with mock.patch.dict(os.environ, settings):
        multiprocessing.forkserver.ensure_running()
    return context
