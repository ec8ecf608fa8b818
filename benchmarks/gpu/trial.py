"""Some updates of a recipe, as a plan of it would see them, but with values and on a device.

The command line is that of a plan (--dry_run CARD) of a model with random weights. The recipe's own
`main` makes the model and the data set, which are those of the plan, with noise in place of its
silence; `common.loop` makes the updates. Nothing is evaluated or saved. What was found is
written to a file after every step, so that nothing is lost if the process is killed."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from common import device, loop, memory, options, setting_up, update
from common.batches import GlobalBatch, GlobalBatches, split_batch
from common.engine import run_global_batch
from common.errors import DataError, exit_with_one_line
from common.parts import planned
from dry_run.planned_run import longest_items
from speech.data import splits
from speech.data.columns import Strings
from speech.signal.audio import write_wav

NOISES = 8  # different recordings of noise
PEAK_SHARE = 0.75  # of what a step takes beside the states is left to it when memory is short
SKIPS = 20  # updates, at most, that fp16's loss scale skips before it is low enough
COUNTED = 4  # utterances at a time whose operations are counted, without gradient checkpointing


@dataclass(frozen=True)
class Wanted:
    """The settings of a trial, and `output`, the JSON file with what it found."""

    output: str
    updates: int = 3
    most_seconds: float = math.inf  # after which no more updates are made
    # Of the longest utterances in an update; 0: global batches as a run has them, read from files.
    micro_batches: int = 3
    cap: int = 0  # bytes that the allocator may take; 0: all
    short_of_memory_at: int = 0  # the update, from 1 on, in which memory is made short; 0: none
    largest: int = 0  # find the largest micro-batch that fits, up to this one; 0: do not
    flops: bool = False  # count the floating-point operations of an update
    fit: bool = False  # fit the model to the noise, as a new model is fitted to its data
    weights: str = ""  # file for {"before", "after"}: the weights before and after the updates


class Trial:
    """The state of a trial. `found` is what the output file says."""

    def __init__(self, wanted: Wanted, args, model, task: loop.Task, source: GlobalBatches):
        self.wanted = wanted
        self.source = source
        self.device = source.setup.device
        self.found = {"losses": [], "seconds": [], "waited": [], "allocated": []}
        fit = task.fit if wanted.fit else None
        task = dataclasses.replace(task, fit=fit, evaluate_first=False, augmented_share=None)
        if wanted.short_of_memory_at and self.device.type != "cuda":
            task = dataclasses.replace(task, compute_loss=self.fails_once(task.compute_loss))
        run = loop.Run(source.setup)
        engine = setting_up.prepare_model(args, run, model, task, source.data)
        self.training = setting_up.begin_training(args, run, task, engine, source, None)
        self.started = time.monotonic()
        self.update = 0

    def fails_once(self, compute_loss):
        """On a CPU: out of memory at the update where memory is to be short."""
        left = [1]

        @functools.wraps(compute_loss)
        def compute(model, batch):
            if self.update == self.wanted.short_of_memory_at and left:
                left.pop()
                raise torch.OutOfMemoryError("made by the trial")
            return compute_loss(model, batch)

        return compute

    def longest_batches(self, size: int, count: int) -> list[dict]:
        """`count` micro-batches of `size` of the longest utterances, again and again."""
        items = list(itertools.islice(itertools.cycle(self.items), size))
        return [self.source.dataset.collate(items) for _ in range(count)]

    @functools.cached_property
    def items(self) -> list[dict]:
        """The longest utterances, as the plan chooses them in two epochs."""
        return longest_items(self.source.dataset, 2, DataError)

    def global_batches(self) -> Iterator[GlobalBatch]:
        if not self.wanted.micro_batches:
            yield from self.source.iterate()
        size = self.source.batch_size
        count = min(self.wanted.micro_batches, self.source.global_batch_size // size)
        self.found["longest"] = round(max(self.longest_batches(1, 1)[0]["seconds"]), 2)
        for number in itertools.count():
            global_batch = GlobalBatch(0, number, False, self.longest_batches(size, count))
            yield global_batch.pin_memory() if self.device.type == "cuda" else global_batch

    def make_updates(self) -> GlobalBatch:
        """Makes the updates that are wanted and returns the last global batch."""
        training = self.training
        source = self.global_batches()
        wanted = self.wanted.updates
        while training.progress.step < wanted and self.update < wanted + SKIPS:
            since = time.monotonic()
            if self.update and since - self.started > self.wanted.most_seconds:
                break
            global_batch = next(source)
            self.found["waited"].append(round(time.monotonic() - since, 4))
            self.update += 1
            with self.short_of_memory():
                update.train_global_batch(training, global_batch)
            self.synchronise()
            self.found["seconds"].append(round(time.monotonic() - since, 4))
            self.note(global_batch)
        return global_batch

    @contextlib.contextmanager
    def short_of_memory(self) -> Iterator[None]:
        """On a GPU, in the update where memory is to be short: the allocator may take what it has
        between updates and a share of what a step takes beside that."""
        if self.update != self.wanted.short_of_memory_at or self.device.type != "cuda":
            yield
            return
        torch.cuda.empty_cache()
        step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        limit_memory(int(torch.cuda.memory_reserved() + PEAK_SHARE * step))
        try:
            yield
        finally:
            limit_memory(self.wanted.cap)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, global_batch: GlobalBatch) -> None:
        """Notes what is known after an update."""
        found = self.found
        lines = (self.training.report.log_dir / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, lines.splitlines()) if "train/loss" in line]
        found["losses"] = [line["train/loss"] for line in lines]
        found["utterances"] = sum(len(batch["names"]) for batch in global_batch.micro_batches)
        found["short_of_memory"] = len(self.training.progress.limits)
        if self.device.type == "cuda":
            found["allocated"].append(torch.cuda.memory_allocated())
            found["peak_allocated"] = torch.cuda.max_memory_allocated()
            found["peak_reserved"] = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            found["driver"] = max(total - free, found.get("driver", 0))
        else:
            found["allocated"].append(memory.memory_used(self.device))
            found["peak_allocated"] = max(found["allocated"])
        self.write()

    def write(self) -> None:
        path = Path(self.wanted.output)
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.found), encoding="utf-8")
        aside.replace(path)

    def passes(self, batches: list[dict], totals: dict[str, float]) -> bool:
        """Whether forward and backward of these micro-batches fit into memory."""
        training = self.training
        terms = training.task.loss_weights
        outcome = run_global_batch(
            training.engine.model,
            batches,
            totals,
            training.task.compute_loss,
            terms,
            training.setup,
            training.loss_scale,
        )
        training.engine.optimizer.zero_grad()
        memory.free_memory(self.device)
        return outcome.failed is None

    def count_flops(self, global_batch: GlobalBatch) -> None:
        """Floating-point operations of an utterance, forward and backward, in the middle
        micro-batch, and the fused attention kernels that they were in (none: scores in memory)."""
        for module in self.training.engine.model.modules():
            vars(module).pop("forward", None)  # what checkpointing repeats does not count
        batch = global_batch.micro_batches[len(global_batch.micro_batches) // 2]
        with FlopCounterMode(display=False) as counter:
            if not self.passes(split_batch(batch, COUNTED), batch["counts"]):
                return
        self.found["flops"] = counter.get_total_flops() / len(batch["names"])
        kernels = {str(kernel) for kernel in counter.get_flop_counts().get("Global", {})}
        self.found["kernels"] = sorted(name for name in kernels if "attention" in name)
        self.write()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights, on the host."""
        state = self.training.engine.model.state_dict()
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def find_largest(self) -> None:
        """The largest micro-batch of the longest utterances of which two fit, beside the states."""
        size = self.source.batch_size
        fits, fails = 0, None
        while (
            size <= self.wanted.largest
            and time.monotonic() - self.started < self.wanted.most_seconds
        ):
            batches = self.longest_batches(size, 2)
            if self.passes(batches, batches[0]["counts"]):
                fits = size
            else:
                fails = size
            self.found.update(largest=fits, too_large=fails)
            self.write()
            if fails is None:
                size *= 2
            elif fails - fits > max(1, fits // 16):
                size = (fits + fails) // 2
            else:
                break


def limit_memory(limit: int) -> None:
    """Bytes that CUDA's allocator may take; 0: all."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit else 1.0)


def noise(wanted_rate: int, stand_in, *arguments, **named) -> dict:
    """The corpora of `splits.stand_in`, with recordings of noise in place of silence."""
    corpora = stand_in(*arguments, **named)
    corpus = corpora["train"]
    folder = Path("noise").resolve()
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(NOISES):
        random = np.random.default_rng(number)
        samples = random.normal(0, 0.1, round(float(corpus.seconds[0]) * wanted_rate))
        paths.append(str(folder / f"{number}.wav"))
        write_wav(Path(paths[-1]), samples, wanted_rate)
    corpus.paths = Strings(paths[row % NOISES] for row in range(len(corpus)))
    return corpora


def run(name: str, words: list[str], wanted: Wanted) -> None:
    """Runs a trial of the recipe `name` with the command line `words` of a plan."""
    recipe = importlib.import_module(f"recipes.{name}")
    parser = options.Parser(recipe.__doc__)
    recipe.add_arguments(parser)
    if wanted.cap:
        limit_memory(wanted.cap)

    def try_it(args, *parts) -> int:
        def part(kind):
            return next(each for each in parts if isinstance(each, kind))

        trial = Trial(wanted, args, part(torch.nn.Module), part(loop.Task), part(GlobalBatches))
        before = trial.weights() if wanted.weights else None
        last = trial.make_updates()
        if wanted.weights:
            torch.save({"before": before, "after": trial.weights()}, wanted.weights)
        if wanted.largest:
            trial.find_largest()
        if wanted.flops:
            trial.count_flops(last)
        return 0

    def begin(args, name: str) -> loop.Run:
        """A run that is planned, but on a real device."""
        setup = device.setup(args)
        locks = setting_up.lock_folders(args)
        options.freeze(args)
        return loop.Run(setup, locks=locks, is_planned=True)

    stand_in = functools.partial(noise, getattr(recipe, "SAMPLE_RATE", 16_000), splits.stand_in)
    with (
        mock.patch.object(planned, "begin", begin),
        mock.patch.object(loop.Run, "model_device", lambda run: contextlib.nullcontext()),
        mock.patch.object(planned, "plan", try_it),
        mock.patch.object(splits, "stand_in", stand_in),
    ):
        exit_with_one_line(lambda: recipe.main(parser.parse_args(words)) and None)
