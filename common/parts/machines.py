"""The beginning of a job of several ranks, also on several machines. It resumes the newest
checkpoint that any of its machines has, which is sent to the machines that lack it: torchrun by
itself numbers its machines anew when it restarts them, so the first rank may be on another one than
before."""

import hashlib
import os
import secrets
from pathlib import Path

import torch

from common import checkpoint, files, options
from common.checkpoint import Saved
from common.device import Setup
from common.errors import UsageError, writing
from common.ranks import Ranks, torchrun
from common.report import check_folder
from common.task import Run

PIECE = 2**26  # bytes that are sent at a time
BEST = ("best.safetensors", "best.json")
JOB = ".job"  # in a checkpoint folder: the job that uses it
AGENT = ".torchrun"  # in a checkpoint folder: the process that has started the run in it


def begin(args, name: str, setup: Setup) -> Run:
    """`setting_up.begin` of several ranks. Raises `UsageError` and `RunError`."""
    ranks = setup.ranks
    folder = args.checkpoint_dir
    keeps = keeps_folder(folder, ranks)
    locks = []
    if keeps:
        check_folder(args.log_dir)
        locks.append(checkpoint.lock_folder(folder))
    restarted = is_restarted(folder, ranks)
    resumed = resume(args.resume, folder, name, ranks, restarted)
    initial = checkpoint.read_initial(args.init_from, name, resumed)
    options.freeze(args)
    return Run(setup, resumed, initial, locks, keeps_folder=keeps, restarted=restarted)


def keeps_folder(folder: Path, ranks: Ranks) -> bool:
    """Whether this rank looks after its machine's checkpoint folder: the first rank, and the first
    of every other machine whose folder is not the same one on a shared disk. Raises `RunError`."""
    if ranks.machines == 1:
        return ranks.first
    token = secrets.token_hex(8)
    with writing(folder, "--output_dir"):
        if ranks.leader:
            folder.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            (folder / JOB).write_text(token)
        token = ranks.gather(token)[0]
        is_shared = _text(folder / JOB) == token
        ranks.gather(None)  # all have read it
        if ranks.leader and not is_shared:
            (folder / JOB).write_text(token)
    return ranks.leader and (ranks.first or not is_shared)


def is_restarted(folder: Path, ranks: Ranks) -> bool:
    """Whether a machine's folder is of this job: torchrun has started its processes anew."""
    is_own = _text(folder / AGENT) == agent() != ""
    return ranks.reduce([int(is_own)], "max") == [1]


def resume(
    wanted: str | None, folder: Path, recipe: str, ranks: Ranks, restarted: bool
) -> Saved | None:
    """`checkpoint.resume`, agreed on by all ranks; None for a new run. A `restarted` job continues
    at its own newest checkpoint, if it has one. Raises `UsageError`."""
    step, path, problem = -1, "", ""
    if ranks.leader:
        try:
            saved = checkpoint.newest("auto", folder, recipe) if restarted else None
            saved = saved or checkpoint.newest(wanted, folder, recipe)
            if saved:
                step, path = saved.progress.step, str(saved.path)
        except UsageError as error:
            problem = str(error)
    every = ranks.gather((step, path, problem))
    steps = [step for step, _, _ in every]
    if max(steps) < 0:
        if problems := [problem for _, _, problem in every if problem]:
            raise UsageError(problems[0])
        if wanted:
            print(f"--resume auto: no checkpoint in {folder}, starting a new run")
        return None
    source = steps.index(max(steps))
    newest = Path(every[source][1])
    own = Path(every[ranks.rank - torchrun("LOCAL_RANK", 0)][1])
    if ranks.machines > 1:
        own = distribute(newest, own, folder, source, ranks)
    print(f"resuming from {own} (step {steps[source]})")
    return checkpoint.read(own, recipe)


def agent() -> str:
    """The name of the torchrun that has started this process; "" without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    number = os.getppid()
    # In containers the numbers of processes are often the same again.
    return f"{number} {_text(Path(f'/proc/{number}/stat')).rpartition(')')[2].split()[19:20]}"


def mark(folder: Path) -> None:
    """Notes that what is in the folder from now on is this job's."""
    if name := agent():
        (folder / AGENT).write_text(name)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def distribute(newest: Path, own: Path, folder: Path, source: int, ranks: Ranks) -> Path:
    """Sends the checkpoint `newest` of the rank `source` to the machines that have another one or
    none (`own`), where it comes into `folder`, and the best weights to the first rank. Returns its
    path on this machine."""
    digests = ranks.gather(digest_of(own) if ranks.leader else None)
    receivers = [i for i, digest in enumerate(digests) if digest not in (None, digests[source])]
    send(ranks, newest, folder / newest.name, source, receivers)
    if 0 in receivers:
        for name in BEST:
            is_there = ranks.gather((newest.parent / name).is_file())[source]
            if is_there:
                send(ranks, newest.parent / name, folder / name, source, [0])
    ranks.gather(None)  # all files are there
    leader = ranks.rank - torchrun("LOCAL_RANK", 0)
    return folder / newest.name if leader in receivers else own


def send(ranks: Ranks, sent: Path, path: Path, source: int, receivers: list[int]) -> None:
    """Sends the file `sent` of the rank `source` to `receivers`, as `path`. All ranks call it."""
    size = ranks.gather(sent.stat().st_size if ranks.rank == source else 0)[source]
    if ranks.rank == source and receivers:
        with open(sent, "rb") as file:
            while piece := bytearray(file.read(PIECE)):
                for rank in receivers:
                    ranks.send(torch.frombuffer(piece, dtype=torch.uint8), rank)
    elif ranks.rank in receivers:

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                for first in range(0, size, PIECE):
                    piece = torch.empty(min(PIECE, size - first), dtype=torch.uint8)
                    ranks.receive(piece, source)
                    file.write(piece.numpy())

        files.save(path, write)


def digest_of(path: Path) -> str:
    """A hash of a file's content; "" for a file that is not there."""
    if not os.path.isfile(path):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
