"""The process of a run: waits until the run's device is free, runs its command, and notes how it
has ended. The page starts it, and then does not need it: it has a session of its own.

    python -I -S webui/launch.py RUNS/NAME

It holds a lock on RUNS/NAME/.lock, by which the page finds it, and keeps its process number and
what it does in that file. It reads "words", "device" and "queued" of RUNS/NAME/run.json. The recipe
gets this program's streams, which are the log. SIGTERM and SIGINT are passed on to the recipe once,
not to its data workers, which it needs to save. It imports the standard library only, so that it
starts at once and waits in little memory."""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import time

LOCK = ".lock"
QUEUE = ".queue.lock"  # in the folder of the runs; held for milliseconds
RECIPE_LOCK = os.path.join("checkpoints", LOCK)  # the recipe's own
RUN = "run.json"
ENDED = "ended.json"
CPU = "cpu"
TAKEN = 75  # the exit status if the run has a process already
PAUSE = 0.5  # seconds between two looks at the queue
WORD_BYTES = 400  # of the text in .lock: one write replaces it
BEGIN = "=== %Y-%m-%d %H:%M:%S === "  # of the line in the log before a command
STOPS = {signal.SIGTERM, signal.SIGINT}


def holder(path) -> int | None:
    """The process that holds a lock on a file, None if there is none; 0 or less if it is on another
    machine. The lock is only looked at. A process that holds one must not call this for its own
    file: closing it would end the lock."""
    is_mac = sys.platform == "darwin"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if is_mac:
            asked = struct.pack("qqihh", 0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
            _, _, process, kind, _ = struct.unpack("qqihh", fcntl.fcntl(file, fcntl.F_GETLK, asked))
        else:
            asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, process = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:  # the file system has no locks
        return None
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else process


def open_lock(folder) -> int:
    """The descriptor of a folder's .lock. Raises `OSError`."""
    return os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def write_word(lock: int, process: int, word: str, name: str = "") -> None:
    """Writes into a folder's .lock what the process does, and the run that it waits for."""
    text = os.fsencode(f"{process} {word} {name}")
    os.pwrite(lock, text.ljust(WORD_BYTES), 0)


def read_word(folder, process: int) -> tuple[str, str]:
    """What `write_word` wrote for this process, which holds the lock; ("", "") for another."""
    with contextlib.suppress(OSError), open(os.path.join(folder, LOCK), "rb") as file:
        found = os.fsdecode(file.read(WORD_BYTES)).rstrip().split(" ", 2)
        if len(found) > 1 and found[0] == str(process):
            return found[1], "".join(found[2:])
    return "", ""


def read_run(folder) -> dict:
    """The content of run.json; {} if there is none, or it is damaged."""
    try:
        with open(os.path.join(folder, RUN), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def blocker(folder: str) -> str | None:
    """The name of the run that this one waits for: one on the same device that runs, or that waits
    and was queued earlier. One that the page did not start counts as using every GPU. Of several,
    it is the one whose turn was first."""
    runs, name = os.path.split(folder)
    own = read_run(folder)
    with os.scandir(runs) as entries:
        others = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    found = []
    for other in others:
        place = os.path.join(runs, other)
        if other == name:
            continue
        launcher = holder(os.path.join(place, LOCK))
        recipe = holder(os.path.join(place, RECIPE_LOCK))
        if launcher is None and recipe is None:
            continue
        run = read_run(place)
        device = run.get("device")
        if device != own["device"] and (device or own["device"] == CPU):
            continue
        runs_now = recipe is not None or read_word(place, launcher)[0] in ("running", "stopping")
        if runs_now or _place(run, other) < _place(own, name):
            found.append((not runs_now, *_place(run, other)))
    return min(found)[-1] if found else None


def _place(run: dict, name: str) -> tuple:
    return (run.get("queued", 0), name)


def wait(folder: str, lock: int) -> int:
    """Returns 0 as soon as the device is free, or the signal that ends the waiting."""
    said = ""
    while True:
        # Two runs that look at the same time must not both find the device free.
        with open(os.path.join(os.path.dirname(folder), QUEUE), "a") as queue:
            fcntl.lockf(queue, fcntl.LOCK_EX)
            other = blocker(folder)
            if other is None:
                write_word(lock, os.getpid(), "running")
                return 0
            if other != said:
                write_word(lock, os.getpid(), "waiting", other)
                said = other
        time.sleep(PAUSE)
        if caught := signal.sigpending() & STOPS:
            return min(caught)


def run_command(words: list[str], lock: int) -> int:
    """Runs the command and returns its exit status, as a shell has it for the signals that are
    passed on; negative for one that another process has sent."""
    print(time.strftime(BEGIN) + shlex.join(words), flush=True)
    child = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
    )
    sent = 0
    while (status := child.poll()) is None:
        number = signal.sigwait({*STOPS, signal.SIGCHLD})
        if number in STOPS and not sent:
            sent = number
            write_word(lock, os.getpid(), "stopping")
            child.send_signal(number)
    # It had not begun to watch for signals, so there was nothing to save.
    return 128 + sent if sent and status == -sent else status


def note_end(folder: str, status: int) -> None:
    """Writes ended.json."""
    path = os.path.join(folder, ENDED)
    with contextlib.suppress(OSError):  # a full disk: the log tells the page
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"status": status, "ended": time.time()}, file)
        os.replace(f"{path}.tmp", path)


def main(folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is ignored could not be waited for
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for the recipe, too
    lock = open_lock(folder)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        sys.exit(TAKEN)
    except OSError as error:
        sys.exit(f"error: {folder}: no locks on this disk ({error.strerror}): choose other --runs")
    if holder(os.path.join(folder, RECIPE_LOCK)) is not None:  # its launch.py was killed
        sys.exit(TAKEN)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, ENDED))
    number = wait(folder, lock)
    status = 128 + number if number else run_command(read_run(folder)["words"], lock)
    note_end(folder, status)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
