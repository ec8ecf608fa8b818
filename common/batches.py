"""From a data set to batches on the device: global batches, worker processes, padding, splitting,
copying.

A batch is a dictionary, which a recipe's `collate` makes of the items of B utterances:

    key              value                                          needed by
    "names"          list of B names of files or utterances         the loop, for messages
    "seconds"        list of B lengths, seconds                     the loop, for out of memory;
                                                                    recogniser.decode_set
    "counts"         {term: number of targets in the batch}         the loop, which divides by them
    "texts"          list of B references, of any type              recogniser.decode_set
    "indices"        list of B positions in the data set            recogniser.decode_set
    "<key>_lengths"  tensor (B,), lengths of the padded tensor      splitting, which trims; models,
                     batch[<key>]                                   also on the host, where it is
                                                                    "<key>_lengths_host"
    all others       tensor or list, whose first dimension is B     compute_loss, evaluate

"counts" has every term of the task's `loss_weights`. A batch that does not fit into memory is split
between utterances, so nothing but "counts" may describe the batch as a whole, and every tensor that
is padded must have its lengths. `checks.check_collate` checks this before the first update."""

import atexit
import functools
import hashlib
import math
import multiprocessing
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common.errors import DataError, RunError
from common.ranks import Ranks

# Global batches that are sorted by length together: more save padding, fewer mix lengths better.
POOL_BATCHES = 64
# torch's message
WORKER_DIED = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)")
MANY_FILES = 65_536  # limit of open files, if the system allows so many


def order_epoch(
    seconds: np.ndarray, global_batch_size: int, seed: int, epoch: int, shortest_first: bool = False
) -> list[np.ndarray]:
    """The global batches of an epoch, in random order or the shortest first: arrays of
    `global_batch_size` indices of utterances of similar length (the last one cut may be smaller). A
    pure function of its arguments. Utterances are shuffled, pools of them sorted by length and cut,
    and what was cut is shuffled; or all are sorted and cut. In the first epoch the global batch
    with the longest utterance comes first, so that a run that does not fit into memory fails at
    once.

    `seconds`: (N,) lengths of the utterances in this epoch."""
    random = np.random.default_rng((seed, epoch, 0))
    shuffled = random.permutation(len(seconds))
    pool_size = len(shuffled) if shortest_first else POOL_BATCHES * global_batch_size
    global_batches = []
    for first in range(0, len(shuffled), max(1, pool_size)):
        pool = shuffled[first : first + pool_size]
        pool = pool[np.argsort(seconds[pool], kind="stable")]
        global_batches += np.split(pool, range(global_batch_size, len(pool), global_batch_size))
    order = random.permutation(len(global_batches))
    if shortest_first:
        order.sort()
    if epoch == 0 and len(order):
        longest = np.array([seconds[global_batches[number]].max() for number in order]).argmax()
        order[: longest + 1] = np.roll(order[: longest + 1], 1)
    return [global_batches[number] for number in order]


def cut_global_batch(
    global_batch: np.ndarray,
    seconds: np.ndarray,
    batch_size: int,
    max_batch_seconds: float | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> list[list[int]]:
    """This rank's micro-batches of a global batch as lists of indices, longest utterance first: at
    most `batch_size` utterances and at most `max_batch_seconds` of padded audio each. A longer
    utterance is alone in its batch."""
    longest_first = global_batch[np.argsort(-seconds[global_batch], kind="stable")]
    most = max_batch_seconds or math.inf
    batches: list[list[int]] = []
    for index in longest_first[rank::ranks].tolist():
        size = len(batches[-1]) if batches else batch_size
        if size >= batch_size or (size + 1) * seconds[batches[-1][0]] > most:
            batches.append([])
        batches[-1].append(index)
    return batches


@dataclass
class GlobalBatch:
    """The micro-batches of one update, on the host. `last`: the last one of the epoch. `skipped`
    lists (file, reason) of samples that cannot be read; `error` is the message of a failure."""

    epoch: int
    number: int
    last: bool
    micro_batches: list[dict]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    error: str | None = None

    def pin_memory(self) -> "GlobalBatch":
        """The loader's pinning thread calls this method."""
        for batch in self.micro_batches:
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    batch[key] = value.pin_memory()
        return self


class _GlobalBatchDataset(torch.utils.data.Dataset):
    """Loads and collates the global batch that the sampler describes, in fp32 also within autocast
    for the CPU. A failure is returned as text, without a traceback."""

    def __init__(self, data, collate: Callable[[list[dict]], dict], skip_bad: bool):
        self.data = data
        self.collate = collate
        self.skip_bad = skip_bad

    @torch.autocast("cpu", enabled=False)
    def __getitem__(self, spec: tuple[int, int, bool, list[list[int]]]) -> GlobalBatch:
        epoch, number, last, batches = spec
        global_batch = GlobalBatch(epoch, number, last, [])
        for indices in batches:
            items = []
            for index in indices:
                try:
                    items.append(self.data.item(index, epoch))
                except RunError as error:
                    global_batch.error = str(error)
                    return global_batch
                except DataError as error:
                    if not self.skip_bad:
                        advice = "fix or remove it, or skip such files with --skip_bad_audio"
                        global_batch.error = f"{error}; {advice}"
                        return global_batch
                    path = getattr(error, "path", f"utterance {index}")
                    global_batch.skipped.append((path, str(error)))
            if items:
                global_batch.micro_batches.append(self.collate(items))
        return global_batch


def _start_worker(worker: int) -> None:
    # Signals reach the whole process group. Only the main process acts on them; it still needs its
    # workers then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


@atexit.register
def _end_workers() -> None:
    """Kills workers that are left at exit because a stored exception keeps their loader alive:
    multiprocessing would send them SIGTERM, which they ignore, and wait forever."""
    for process in multiprocessing.active_children():
        process.kill()


def _loader(
    dataset, specs, workers: int, pin: bool, persistent: bool = False
) -> torch.utils.data.DataLoader:
    if workers:  # a worker's tensor is an open file, and 64 micro-batches exceed the usual 1024
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # Without its own generator the loader would draw from the global one, once more in a run that
    # was resumed.
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=specs,
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=_start_worker,
        generator=torch.Generator().manual_seed(0),
        persistent_workers=persistent and workers > 0,
    )


class GlobalBatches:
    """An endless sequence of training global batches, which worker processes prepare ahead of time.

    `data` is the training set: `len(data)` is the number N of utterances, `data.seconds(epoch)`
    (N,) their lengths in that epoch, `data.item(index, epoch)` one of them, and
    `data.fingerprint()` a string that changes if the data change. It may have
    `data.text_length(index)`, by which a dry run finds the utterance with the longest text, and
    `data.hours()` of speech if `seconds` counts something else, too. `collate(items)` returns a
    batch."""

    def __init__(self, args, data, collate: Callable[[list[dict]], dict], setup):
        self.data = data
        self.setup = setup
        self.batch_size = args.batch_size
        self.max_seconds = args.max_batch_seconds
        self.seed = args.seed
        self.shortest_first = False
        micro_batches = args.gradient_accumulation_steps * setup.ranks.size
        self.global_batch_size = args.batch_size * micro_batches
        self.dataset = _GlobalBatchDataset(self.whole(), collate, args.skip_bad_audio)

    def augment(self, share: float) -> None:
        """From the next `iterate` on, augments this share of the training set. A model for which
        nothing is augmented cannot write yet: it gets the shortest utterances first, in which there
        are few ways to align a text (Amodei et al. 2016, "Deep Speech 2", section 3.3)."""
        self.data.augmented_share = share
        self.shortest_first = share == 0

    @property
    def per_epoch(self) -> int:
        """The global batches of the first epoch."""
        return self.count(0, 1)

    def whole(self):
        """All utterances that the indices of `epoch_batches` are of."""
        return self.data

    def sets(self) -> dict[str, object]:
        """The data sets of which `whole` consists, by name."""
        return {"training": self.data}

    def epoch_batches(self, epoch: int, seconds: np.ndarray) -> list[np.ndarray]:
        """The global batches of an epoch: see `order_epoch`."""
        size = self.global_batch_size
        return order_epoch(seconds, size, self.seed, epoch, self.shortest_first)

    def count(self, first: int, last: int) -> int:
        """The global batches in the epochs from `first` to before `last`."""
        return (last - first) * math.ceil(len(self.data) / self.global_batch_size)

    def specs(self, epoch: int, start: int) -> Iterator[tuple]:
        """Yields (epoch, number, last, micro-batches of indices), without end, from global batch
        `start` of `epoch`."""
        ranks = self.setup.ranks
        while True:
            seconds = self.dataset.data.seconds(epoch)
            global_batches = self.epoch_batches(epoch, seconds)
            for number in range(start, len(global_batches)):
                batches = cut_global_batch(
                    global_batches[number],
                    seconds,
                    self.batch_size,
                    self.max_seconds,
                    ranks.rank,
                    ranks.size,
                )
                yield epoch, number, number == len(global_batches) - 1, batches
            epoch += 1
            start = 0

    def iterate(self, epoch: int = 0, start: int = 0) -> Iterator[GlobalBatch]:
        """Global batches from a position in the data. Raises as `_loaded` does."""
        specs = self.specs(epoch, start)
        pin = self.setup.device.type == "cuda"
        yield from _loaded(_loader(self.dataset, specs, self.setup.workers, pin))

    def order(self, epoch: int) -> str:
        """Changes with what decides in which global batch an utterance is: seed and lengths."""
        content = repr(self.seed).encode() + self.dataset.data.seconds(epoch).tobytes()
        content += b"shortest first" * self.shortest_first
        return hashlib.sha1(content).hexdigest()[:16]

    def fingerprint(self) -> str:
        """Changes with the utterances."""
        return self.data.fingerprint()

    def described(self) -> str:
        """An addition to the line about the length of a run; here none."""
        return ""

    @functools.cached_property
    def hours(self) -> float:
        """The hours of the data."""
        if hasattr(self.data, "hours"):
            return self.data.hours()
        return float(np.sum(self.data.seconds(0))) / 3600


def _loaded(loader: torch.utils.data.DataLoader) -> Iterator[GlobalBatch]:
    """The loader's global batches. Raises `DataError`, and `RunError` if a worker has died."""
    try:
        items = iter(loader)
        if loader.num_workers and threading.current_thread() is threading.main_thread():
            # torch's handler would raise at an arbitrary place. Without it, the loader notices
            # within five seconds.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for global_batch in items:
            if global_batch.error:
                raise DataError(global_batch.error)
            yield global_batch
    except RuntimeError as error:
        if not WORKER_DIED.search(str(error)):
            raise  # a bug, whose traceback is needed
        reason = "often: too little main memory or, in a container, too small a /dev/shm"
        raise RunError(
            f"a data worker died ({reason}): try --dataloader_num_workers 0, or fewer workers"
        ) from None


class EvalBatches:
    """This rank's share of the evaluation set, in batches of similar length, longest first.
    `skipped` maps each file that cannot be read to the reason, which is printed once."""

    def __init__(self, args, data, collate: Callable[[list[dict]], dict], setup):
        self.arguments = args, data, collate, setup
        self.ranks = setup.ranks
        batches = cut_global_batch(np.arange(len(data)), data.seconds(0), args.eval_batch_size)
        batches = batches[setup.ranks.rank :: setup.ranks.size]
        specs = [(0, number, False, [batch]) for number, batch in enumerate(batches)]
        self.skipped: dict[str, str] = {}
        self.dataset = _GlobalBatchDataset(data, collate, args.skip_bad_audio)
        workers = min(setup.workers, len(specs))
        pin = setup.device.type == "cuda"
        self.loader = _loader(self.dataset, specs, workers, pin, args.persistent_workers)

    def whole(self) -> "EvalBatches":
        """The whole set, for the evaluation on the first rank alone at the end."""
        if self.ranks.size == 1:
            return self
        *arguments, setup = self.arguments
        return EvalBatches(*arguments, replace(setup, ranks=Ranks()))

    def __iter__(self) -> Iterator[dict]:
        for global_batch in _loaded(self.loader):
            for name, reason in global_batch.skipped:
                if name not in self.skipped:
                    print(f"skipped in evaluation: {reason}", flush=True)
                self.skipped[name] = reason
            yield from global_batch.micro_batches


def pad(tensors: list[torch.Tensor], value: float = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """B tensors (T_i, ...) as one (B, T, ...), padded with `value`, and their lengths (B,)."""
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    return pad_sequence(tensors, batch_first=True, padding_value=value), lengths


def split_batch(batch: dict, size: int) -> list[dict]:
    """Nearly equal pieces of a batch, of at most `size` utterances, each trimmed to its longest."""
    total = len(batch["names"])
    pieces = []
    for rows in np.array_split(np.arange(total), math.ceil(total / size)):
        first = int(rows[0])
        last = int(rows[-1]) + 1
        piece = {}
        for key, value in batch.items():
            if key == "counts":  # they were added up over the global batch before
                continue
            value = value[first:last]
            if f"{key}_lengths" in batch:
                value = value[:, : int(batch[f"{key}_lengths"][first:last].max())]
            piece[key] = value
        pieces.append(piece)
    return pieces


def to_device(batches: Iterable[dict], device: torch.device) -> Iterator[dict]:
    """Yields the batches on `device`; on CUDA each is copied while the one before it computes. The
    host's copy of each "<key>_lengths" stays under "<key>_lengths_host": reading it from the device
    would wait for the device."""
    if device.type != "cuda":
        yield from (_moved(batch, device) for batch in batches)
        return
    copying = copying_stream(device)

    def copy(batch: dict) -> dict:
        with torch.cuda.stream(copying):
            return _moved(batch, device)

    copies = map(copy, batches)
    ahead = next(copies, None)
    while ahead is not None:
        torch.cuda.current_stream(device).wait_stream(copying)
        batch = ahead
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(torch.cuda.current_stream(device))
        ahead = next(copies, None)
        yield batch


@functools.cache
def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies batches to a device, one for the whole run: the allocator reuses
    memory only on the stream that it was allocated on, and torch hands out 32 streams in turn."""
    return torch.cuda.Stream(device)


def _moved(batch: dict, device: torch.device) -> dict:
    moved = {}
    for key, value in batch.items():
        is_tensor = isinstance(value, torch.Tensor)
        moved[key] = value.to(device, non_blocking=True) if is_tensor else value
        if key.endswith("_lengths"):
            moved[f"{key}_host"] = value
    return moved
