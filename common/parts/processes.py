"""The processes of a job that torchrun starts: joining it, adding up, agreeing, and not waiting for
ever for one that is gone."""

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from common import checkpoint, files
from common.errors import RunError, UsageError, first_line
from common.limits import lower_limits
from common.ranks import LostRank, Ranks, torchrun

# Seconds that a rank waits for the others where nobody knows how long they take: while they read
# their data, evaluate, or save.
LONG = 2 * 3600
MARGIN = 120  # seconds that a rank waits for the others beyond the longest update
# Of NCCL, and of gloo in its place: their collectives begin when all ranks have agreed on
# something.
DEVICE_LIMIT = timedelta(minutes=10)
# A rank that waits for so many seconds after a signal ends. torchrun kills it after 30.
AFTER_SIGNAL = 20
LOST = "another rank has ended or cannot be reached: see its message"


class Job(Ranks):
    """The ranks of a torchrun job. gloo reduces numbers, the device's backend gradients. Every
    method raises `LostRank` if another rank has ended, or after `limit` seconds; for tensors on a
    GPU, and in a pass over a sharded model, after `DEVICE_LIMIT`."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.host_group = None
        self.limit: float = LONG
        self.longest = 0.0  # seconds of an update
        self.waits = 0  # how often this rank has begun or ceased to wait for others
        self.depth = 0  # above 0 while it waits

    def note_update(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        self.limit = MARGIN + self.longest

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Waits up to LONG for the other ranks."""
        before = self.limit
        self.limit = LONG
        try:
            yield
        finally:
            self.limit = before

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for others, or may do so inside of a pass over a sharded model. Errors of
        the connection become `LostRank`."""
        self.waits += 1
        self.depth += 1
        try:
            yield
        except RuntimeError as error:
            if is_lost(error):
                raise LostRank(f"{LOST} ({first_line(error)[:150]})") from None
            raise
        finally:
            self.waits += 1
            self.depth -= 1

    def finish(self, transfers: list) -> None:
        """Waits for what gloo does."""
        with self.waiting():
            for transfer in transfers:
                transfer.wait(timedelta(seconds=self.limit))

    def reduce(self, values, op: str = "sum") -> list:
        dtype = torch.float64 if any(isinstance(value, float) for value in values) else torch.int64
        tensor = torch.tensor(values, dtype=dtype)
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        with self.waiting():
            transfer = dist.all_reduce(tensor, op=kind, group=self.host_group, async_op=True)
        self.finish([transfer])
        return tensor.tolist()

    def gather(self, value) -> list:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [0] * self.size
        sizes[self.rank] = len(content)
        sizes = self.reduce(sizes)
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(content)] = content
        every = [torch.empty_like(own) for _ in sizes]
        with self.waiting():
            transfer = dist.all_gather(every, own, group=self.host_group, async_op=True)
        self.finish([transfer])
        contents = zip(every, sizes, strict=True)
        return [pickle.loads(content[:size].numpy().tobytes()) for content, size in contents]

    def agree(self, values: dict[str, object]) -> None:
        """Raises `RunError`, on every rank, unless all ranks have the same values by name."""
        every = self.gather(values)
        for rank, others in enumerate(every):
            for name in [*every[0], *others]:
                value, first = others.get(name), every[0].get(name)
                if value != first:
                    raise RunError(
                        f"rank {rank} differs from rank 0 in {name} ({str(value)[:40]},"
                        f" {str(first)[:40]}): start the same command with the same data on every"
                        " machine"
                    )

    def sum_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Sums each tensor over the ranks, in place: by the GPU's backend, on the host by gloo."""
        self._in_place(tensors, [dist.all_reduce] * len(tensors))

    def share_tensors(self, tensors: list[torch.Tensor], owners: list[int]) -> None:
        """Sets each tensor to its values on the rank that owns it, by the same backends."""
        self._in_place(tensors, [partial(dist.broadcast, src=owner) for owner in owners])

    def _in_place(self, tensors: list[torch.Tensor], collectives: list[Callable]) -> None:
        """Starts a collective on each tensor, and waits for all of them."""
        # What belongs to a channels_last convolution is not contiguous, so a copy is transferred.
        copies = [tensor.contiguous() for tensor in tensors]
        on_host = []
        on_device = []
        with self.waiting():
            for tensor, collective in zip(copies, collectives, strict=True):
                group = None if tensor.is_cuda else self.host_group
                transfer = collective(tensor, group=group, async_op=True)
                (on_device if tensor.is_cuda else on_host).append(transfer)
        self.finish(on_host)
        for transfer in on_device:
            transfer.wait()
        for tensor, copied in zip(tensors, copies, strict=True):
            if copied is not tensor:
                tensor.copy_(copied)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends a tensor on the host to another rank, which calls `receive`."""
        with self.waiting():
            transfer = dist.isend(tensor.contiguous(), to, group=self.host_group)
        self.finish([transfer])

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills a contiguous tensor on the host with what another rank sends."""
        with self.waiting():
            transfer = dist.irecv(tensor, source, group=self.host_group)
        self.finish([transfer])


def is_lost(error: RuntimeError) -> bool:
    """Whether an error of torch means that another rank has ended or does not answer."""
    if isinstance(error, dist.DistError):
        return True
    words = ("Connection", "gloo", "ProcessGroup", "imed out", "Broken pipe", "NCCL")
    return any(word in str(error) for word in words)


def join(device: torch.device) -> Job:
    """Joins torchrun's job. Raises `UsageError`, and `LostRank` if other ranks do not come."""
    size = torchrun("WORLD_SIZE", 1)
    ranks = Job(torchrun("RANK", 0), size)
    watch_signals(ranks)
    try:
        with ranks.waiting():
            if not dist.is_initialized():
                backend = "nccl" if device.type == "cuda" else "gloo"
                dist.init_process_group(backend, timeout=DEVICE_LIMIT)
            ranks.host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONG))
    except ValueError as error:  # a scheduler sets WORLD_SIZE alone
        raise UsageError(
            f"WORLD_SIZE is {size}, but {error}: use torchrun, or unset WORLD_SIZE"
        ) from None
    return ranks


def agree_on_run(args, run, model: torch.nn.Module, task, global_batches, eval_batches) -> None:
    """Raises `RunError`, on all ranks, if they have not the same data, model and settings: they
    would wait for each other, or train something else."""
    settings = {"the 16-bit type": str(run.setup.dtype)}
    for name, value in vars(args).items():
        is_number = isinstance(value, int | float) and name != "dataloader_num_workers"
        if is_number or name in ("optimizer", "use_cpu_offload", "lr_schedule"):
            settings[f"--{name}"] = value
    sets = {**global_batches.sets(), "evaluation": eval_batches.dataset.data}
    if task.further:
        for name, batches in task.further.sets.items():
            sets[f"further ({name})"] = batches.dataset.data
    about = {f"the number of {name} utterances": len(data) for name, data in sets.items()}
    run.setup.ranks.agree(
        {
            **settings,
            **about,
            "the lengths of the training utterances": global_batches.order(0),
            "the model": sorted((name, tuple(p.shape)) for name, p in model.named_parameters()),
            "the update that is resumed": run.resumed.progress.step if run.resumed else None,
        }
    )


def share_limits(folder: Path, ranks: Ranks, limits: dict[int, int]) -> None:
    """Adds to the limits of micro-batches what ranks that were out of memory have left in their
    folders (`write_limits`), and makes them those of all ranks."""
    for path in folder.glob(checkpoint.LIMITS.format("*")):
        lower_limits(limits, {int(key): size for key, size in files.read_json(path).items()})
    for other in ranks.gather(limits):
        lower_limits(limits, other)


def write_limits(folder: Path, ranks: Ranks, limits: dict[int, int]) -> None:
    """Writes the limits of this rank beside the checkpoints, for a job that starts anew."""
    path = folder / checkpoint.LIMITS.format(ranks.rank)
    text = json.dumps(limits)
    files.save(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def watch_signals(ranks: Job) -> None:
    """Ends this process if it still waits for other ranks a while after SIGTERM, SIGINT or SIGHUP.
    Python's own handlers do not run as long as torch waits."""
    if threading.current_thread() is not threading.main_thread():
        return  # where no signals arrive
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        number = 0
        while number not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            number = os.read(reading, 1)[0]
        if signal.getsignal(number) is signal.SIG_IGN:
            return
        since = time.monotonic()
        waits = ranks.waits
        while True:
            time.sleep(0.5)
            is_patient = ranks.limit == LONG and ranks.longest
            if ranks.waits != waits or ranks.depth == 0 or is_patient:
                since = time.monotonic()
                waits = ranks.waits
            elif time.monotonic() - since > AFTER_SIGNAL:
                name = signal.Signals(number).name
                text = f"stopped by {name} while waiting for another rank; the last checkpoint"
                os.write(2, f"{text} is where --resume auto continues\n".encode())
                os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()
