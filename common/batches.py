"""From a corpus to batches: reading audio, windows of batches as a pure function of seed and epoch, collating,
splitting, copying to the device."""

import atexit
import functools
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

POOL_WINDOWS = 64  # windows sorted by length together: more saves padding, fewer mixes lengths better
WORKER_DIED = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)")  # torch's words
MANY_FILES = 65_536  # open at once, where the system allows so many


# --- audio -----------------------------------------------------------------------------------------------------------


# --- which utterances when -------------------------------------------------------------------------------------------


def plan_epoch(seconds: np.ndarray, window_size: int, seed: int, epoch: int, done: Iterable = ()) -> list[np.ndarray]:
    """The windows of an epoch: every utterance once, in windows of `window_size` of similar length, in random order;
    the last one may be partial. A pure function of its arguments. In the first epoch the window with the longest
    utterance comes first, so that what cannot fit fails at once. `done` lists [window size, windows done] of earlier
    runs of the same epoch with other window sizes: what those saw is left out."""

    def cut(indices: np.ndarray, size: int, part: int) -> list[np.ndarray]:
        random = np.random.default_rng([seed, epoch, part])
        indices = random.permutation(indices)
        pools = [indices[i : i + size * POOL_WINDOWS] for i in range(0, len(indices), size * POOL_WINDOWS)]
        pools = [pool[np.argsort(seconds[pool], kind="stable")] for pool in pools]
        windows = [pool[i : i + size] for pool in pools for i in range(0, len(pool), size)]
        windows = [windows[i] for i in random.permutation(len(windows))]
        if epoch == 0 and part == 0 and windows:
            longest = max(range(len(windows)), key=lambda i: (seconds[windows[i]].max(), -i))
            windows.insert(0, windows.pop(longest))
        return windows

    left, done = np.arange(len(seconds)), list(done)
    for part, (size, count) in enumerate(done):
        left = np.sort(np.concatenate([*cut(left, size, part)[count:], left[:0]]))
    return cut(left, window_size, len(done))


def cut_window(
    window: np.ndarray,
    seconds: np.ndarray,
    batch_size: int,
    max_batch_seconds: float | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> list[list[int]]:
    """This rank's micro-batches of a window, longest first: at most `batch_size` utterances and at most
    `max_batch_seconds` of padded audio each (a single longer utterance still makes a batch)."""
    order = window[np.argsort(-seconds[window], kind="stable")][rank::ranks].tolist()
    batches: list[list[int]] = []
    for index in order:
        full = not batches or len(batches[-1]) >= batch_size
        if not full and max_batch_seconds:
            full = (len(batches[-1]) + 1) * seconds[batches[-1][0]] > max_batch_seconds
        if full:
            batches.append([])
        batches[-1].append(index)
    return batches


@dataclass
class Window:
    """What one update needs, on the host. `skipped` lists (file, reason) of samples passed over."""

    epoch: int
    number: int
    last: bool
    micro_batches: list[dict]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    error: str | None = None

    def pin_memory(self) -> "Window":
        """Called by the loader's pinning thread, which knows no dataclasses."""
        for batch in self.micro_batches:
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    batch[key] = value.pin_memory()
        return self


class _WindowDataset(torch.utils.data.Dataset):
    """Loads and collates the window that the sampler describes. Errors travel as text: a worker's traceback is no help
    to somebody whose file is broken."""

    def __init__(self, load: Callable[[int, int], dict], collate: Callable[[list[dict]], dict], skip_bad: bool):
        self.load, self.collate, self.skip_bad = load, collate, skip_bad

    def __getitem__(self, spec: tuple[int, int, bool, list[list[int]]]) -> Window:
        epoch, number, last, batches = spec
        window = Window(epoch, number, last, [])
        for indices in batches:
            items = []
            for index in indices:
                try:
                    items.append(self.load(index, epoch))
                except RunError as error:
                    window.error = str(error)
                    return window
                except DataError as error:
                    if not self.skip_bad:
                        window.error = f"{error}; fix or remove it, or pass over such files with --skip_bad_audio"
                        return window
                    window.skipped.append((getattr(error, "path", f"utterance {index}"), str(error)))
            if items:
                window.micro_batches.append(self.collate(items))
        return window


def _start_worker(worker: int) -> None:
    # Signals reach the whole process group; the main process decides, and a worker that dies would break its save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


@atexit.register
def _end_workers() -> None:
    """Before multiprocessing's own turn at exit: it would send SIGTERM, which they ignore, and wait for them for ever.
    (Usually none is left; but an error that somebody holds on to also holds the loader.)"""
    for process in multiprocessing.active_children():
        process.kill()


def _allow_many_files() -> None:
    """A tensor from a worker is an open file until it is freed: 64 micro-batches ahead of time exceed the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _loader(dataset, specs, workers: int, pin: bool, persistent: bool = False) -> torch.utils.data.DataLoader:
    if workers:
        _allow_many_files()
    # A generator of its own: by default every iteration draws from the global one, and a resumed run draws once more.
    return torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=specs, num_workers=workers, pin_memory=pin,
        worker_init_fn=_start_worker, generator=torch.Generator().manual_seed(0), persistent_workers=persistent and workers > 0,
    )  # fmt: skip


class Windows:
    """Training windows, endlessly, prepared ahead by worker processes.

    `load(index, epoch)` returns one utterance, `collate(items)` a batch, `seconds(epoch)` the utterances' lengths in
    that epoch (speed perturbation changes them)."""

    def __init__(self, args, seconds: Callable[[int], np.ndarray], load, collate, setup):
        self.seconds, self.batch_size, self.cap, self.seed = seconds, args.batch_size, args.max_batch_seconds, args.seed
        self.ranks = setup.ranks
        self.window_size = args.batch_size * args.gradient_accumulation_steps * setup.ranks.size
        self.per_epoch = math.ceil(len(seconds(0)) / self.window_size)
        self.dataset = _WindowDataset(load, collate, args.skip_bad_audio)
        self.workers, self.pin = args.dataloader_num_workers, setup.device.type == "cuda"

    def specs(self, epoch: int, start: int, done: list) -> Iterator[tuple]:
        """(epoch, number, last, micro-batches of indices) from window `start` of `epoch` on, without end."""
        while True:
            seconds = self.seconds(epoch)
            plan = plan_epoch(seconds, self.window_size, self.seed, epoch, done)
            for number in range(start, len(plan)):
                batches = cut_window(plan[number], seconds, self.batch_size, self.cap, self.ranks.rank, self.ranks.size)
                yield epoch, number, number == len(plan) - 1, batches
            epoch, start, done = epoch + 1, 0, []

    def iterate(self, epoch: int = 0, start: int = 0, done: Iterable = ()) -> Iterator[Window]:
        """Windows from a position on. Raises `DataError` where a file is bad and `RunError` where a worker dies."""
        loader = _loader(self.dataset, self.specs(epoch, start, list(done)), self.workers, self.pin)
        for window in _guarded(loader):
            if window.error:
                raise DataError(window.error)
            yield window

    def total_steps(self, args) -> int:
        """Updates that --num_epochs and --max_steps allow."""
        by_epochs = args.num_epochs * self.per_epoch if args.num_epochs else math.inf
        return int(min(by_epochs, args.max_steps or math.inf))

    def padding_share(self) -> float:
        """The share of a training batch that is padding, by the plan of the first epoch."""
        seconds = self.seconds(0)
        real = padded = 0.0
        for window in plan_epoch(seconds, self.window_size, self.seed, 0)[:1000]:
            for batch in cut_window(window, seconds, self.batch_size, self.cap):
                real += float(seconds[batch].sum())
                padded += float(seconds[batch].max()) * len(batch)
        return 1 - real / padded if padded else 0.0


def _guarded(loader: torch.utils.data.DataLoader) -> Iterator:
    """The loader's items; a worker's death becomes one line."""
    try:
        items = iter(loader)
        if loader.num_workers and threading.current_thread() is threading.main_thread():
            # torch's handler would raise in whatever the main process is at. Without it a worker's death is noticed
            # where its data is waited for, within five seconds.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield from items
    except RuntimeError as error:
        if not WORKER_DIED.search(str(error)):
            raise  # in a worker, but a defect of ours: its traceback is needed
        raise RunError(
            "a data worker died (often: too little main memory or, in a container, too small a /dev/shm): "
            "try --dataloader_num_workers 0, or fewer workers"
        ) from None


class EvalBatches:
    """The evaluation set in batches of similar length, longest first, this rank's share of them. `skipped` maps files
    that were passed over to the reason; each is said once."""

    def __init__(self, args, seconds: np.ndarray, load, collate, setup):
        self.arguments, self.ranks = (args, seconds, load, collate, setup), setup.ranks
        order = np.argsort(-seconds, kind="stable")
        batches = cut_window(order, seconds, args.eval_batch_size, args.eval_batch_size * args.max_duration)
        batches = batches[setup.ranks.rank :: setup.ranks.size]
        specs = [(0, number, False, [batch]) for number, batch in enumerate(batches)]
        dataset = _WindowDataset(load, collate, args.skip_bad_audio)
        workers = min(args.dataloader_num_workers, len(specs))
        self.skipped: dict[str, str] = {}
        self.loader = _loader(dataset, specs, workers, setup.device.type == "cuda", args.persistent_workers)

    def whole(self) -> "EvalBatches":
        """All of the set, for what one rank does alone at the end."""
        if self.ranks.size == 1:
            return self
        *arguments, setup = self.arguments
        return EvalBatches(*arguments, replace(setup, ranks=type(setup.ranks)()))

    def __iter__(self) -> Iterator[dict]:
        for window in _guarded(self.loader):
            if window.error:
                raise DataError(window.error)
            for name, reason in window.skipped:
                if name not in self.skipped:
                    print(f"skipped in evaluation: {reason}", flush=True)
                self.skipped[name] = reason
            yield from window.micro_batches

    def __len__(self) -> int:
        return len(self.loader)


# --- batches ---------------------------------------------------------------------------------------------------------
# A batch is a dict. Tensors have the batch first; what is padded has its lengths under "<key>_lengths"; "names" and
# "seconds" say which utterances these are; "counts" holds the number of targets of each loss term.


def quantise(length: int, step: int, most: int, shapes: int = 12) -> int:
    """`length` rounded up to one of at most `shapes` lengths, multiples of `step` the last of which is the first at or
    above `most`: what is padded to them has few shapes, and every new one costs a compilation or a search for kernels.
    In any unit: samples, frames, tokens. A longer one is rounded up to a multiple of `step`: no grid knows it.

    The lengths grow by one factor, from a 16th of `most` (30 s: 1.9, 2.4, 3.1, 4, 5.1, 6.6, 8.5, 11, 14.1, 18.1, 23.3,
    30). So padding adds to whatever is longer than the first at most 29 % and a `step`, 14 % on average; as many steps
    of equal size (2.5 s) would add 67 % to a clip of 3 s, and speech is mostly clips of a few seconds. Shorter than the
    first is cheap however it is padded."""
    return next((size for size in _grid(step, most, shapes) if size >= length), -(-length // step) * step)


@functools.lru_cache(maxsize=64)
def _grid(step: int, most: int, shapes: int) -> tuple[int, ...]:
    shares = [16 ** (number / max(1, shapes - 1) - 1) for number in range(shapes)] if shapes > 1 else [1]
    return tuple(sorted({max(1, math.ceil(most * share / step)) * step for share in shares}))


def pad(tensors: list[torch.Tensor], value: float = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of different length to (B, T, ...) and their lengths (B,)."""
    return pad_sequence(tensors, batch_first=True, padding_value=value), torch.tensor([len(t) for t in tensors])


def gather(items: list[dict], padding: dict[str, float], sample_rate: int) -> dict:
    """What collating is in every recipe: the tensors that `padding` names are padded with its values, masks are stacked,
    names and texts listed, and "seconds" are those of "audio"."""
    batch = {}
    for key, value in padding.items():
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items], value)
    for key in ("frequency_masks", "time_masks"):
        if key in items[0]:
            batch[key] = torch.stack([item[key] for item in items])
    batch["names"], batch["texts"] = [item["name"] for item in items], [item["text"] for item in items]
    batch["seconds"] = [len(item["audio"]) / sample_rate for item in items]
    return batch


def split_batch(batch: dict, size: int) -> list[dict]:
    """A batch in pieces of at most `size` utterances, as equal as can be, each trimmed to its own longest."""
    total = len(batch["names"])
    pieces = []
    for rows in np.array_split(np.arange(total), math.ceil(total / size)):
        first, last = int(rows[0]), int(rows[-1]) + 1
        piece = {}
        for key, value in batch.items():
            if key == "counts":
                continue  # of the whole window: they stay what they were
            value = value[first:last]
            if f"{key}_lengths" in batch:
                value = value[:, : int(batch[f"{key}_lengths"][first:last].max())]
            piece[key] = value
        pieces.append(piece)
    return pieces


def to_device(batches: list[dict], device: torch.device) -> Iterator[dict]:
    """The batches on `device`, on CUDA each copied while the one before it computes. The host's copy of each
    "<key>_lengths" is kept under "<key>_lengths_host": reading it back from the device would wait for the device."""
    if device.type != "cuda":
        for batch in batches:
            yield _moved(batch, device)
        return
    copying = torch.cuda.Stream(device)

    def copy(batch: dict) -> dict:
        with torch.cuda.stream(copying):
            return _moved(batch, device)

    ahead = copy(batches[0]) if batches else None
    for number in range(len(batches)):
        torch.cuda.current_stream(device).wait_stream(copying)
        batch = ahead
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(torch.cuda.current_stream(device))
        ahead = copy(batches[number + 1]) if number + 1 < len(batches) else None
        yield batch


def _moved(batch: dict, device: torch.device) -> dict:
    moved = {}
    for key, value in batch.items():
        moved[key] = value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        if key.endswith("_lengths"):
            moved[f"{key}_host"] = value
    return moved
