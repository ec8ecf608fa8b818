"""Some updates of a recipe for on_gpu.py, as a plan of it would see them, but with values and on a
device.

The command line is that of a plan (--dry_run CARD) of a model with random weights. The recipe's own
`main` makes the model and the data set, which are those of the plan, with noise in place of its
silence; `common` makes the updates. Nothing is evaluated or saved."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from common import device, loop, memory, options, setting_up, update
from common.batches import GlobalBatch, GlobalBatches
from common.errors import DataError, exit_with_one_line
from common.parts import planned
from dry_run.planned_run import longest_items
from speech.data import splits
from speech.data.columns import Strings
from speech.signal.audio import write_wav

NOISES = 8  # different recordings of noise
MICRO_BATCHES = 3  # in an update: the second one meets gradients, and the third is ahead
PEAK_SHARE = 0.75  # of what a step takes beside the states is left to it when memory is short
SKIPS = 20  # updates, at most, that fp16's loss scale skips before it is low enough


@dataclass(frozen=True)
class Wanted:
    """The settings of a trial."""

    updates: int = 3
    most_seconds: float = math.inf  # after which no more updates are made
    longest: bool = True  # updates of the longest utterances; else as a run has them, from files
    cap: int = 0  # bytes that the allocator may take; 0: all
    short_of_memory_at: int = 0  # the update, from 1 on, in which memory is made short; 0: none
    fit: bool = False  # fit the model to the noise, as a new model is fitted to its data
    weights: str = ""  # file for {"before", "after"}: the weights before and after the updates


def make_updates(wanted: Wanted, args, model, task: loop.Task, source: GlobalBatches) -> dict:
    """Makes the updates. Returns the losses; the seconds of each update, and of its waiting for
    data; the bytes that are allocated after it, and at the peak; the utterances of the last one;
    and how many sizes of micro-batches were learned because memory was short."""
    is_cuda = source.setup.device.type == "cuda"
    failures = []  # made by the trial: where there is no GPU, memory is short only in name

    @functools.wraps(task.compute_loss)
    def compute_loss(model, batch):
        if failures:
            raise failures.pop()
        return original(model, batch)

    original = task.compute_loss
    task = dataclasses.replace(
        task,
        compute_loss=original if is_cuda else compute_loss,
        fit=task.fit if wanted.fit else None,
        evaluate_first=False,
        augmented_share=None,
    )
    run = loop.Run(source.setup)
    engine = setting_up.prepare_model(args, run, model, task, source.data)
    training = setting_up.begin_training(args, run, task, engine, source, None)
    start_weights = copy_of_weights(training) if wanted.weights else None
    measured = {"losses": [], "seconds": [], "waited": [], "allocated": []}
    training.report.progress = lambda step, values: measured["losses"].append(values["loss"])
    batches = longest_batches(source) if wanted.longest else batches_of_files(source)
    started = time.monotonic()
    for number in range(1, wanted.updates + SKIPS + 1):
        since = time.monotonic()
        is_late = number > 1 and since - started > wanted.most_seconds
        if is_late or training.progress.step == wanted.updates:
            break
        global_batch = next(batches)
        measured["waited"].append(time.monotonic() - since)
        is_short = number == wanted.short_of_memory_at
        if is_short and is_cuda:
            shorten_memory()
        elif is_short:
            failures.append(torch.OutOfMemoryError("made by the trial"))
        update.train_global_batch(training, global_batch)
        if is_cuda:
            torch.cuda.synchronize()
        if is_short and is_cuda:
            limit_memory(wanted.cap)
        measured["seconds"].append(time.monotonic() - since)
        used = torch.cuda.memory_allocated() if is_cuda else memory.memory_used(source.setup.device)
        measured["allocated"].append(used)
    measured["peak"] = torch.cuda.max_memory_allocated() if is_cuda else max(measured["allocated"])
    measured["reserved"] = torch.cuda.max_memory_reserved() if is_cuda else 0
    measured["utterances"] = sum(len(batch["names"]) for batch in global_batch.micro_batches)
    measured["smaller"] = len(training.progress.limits)
    if wanted.weights:
        torch.save({"before": start_weights, "after": copy_of_weights(training)}, wanted.weights)
    return measured


def longest_batches(source: GlobalBatches) -> Iterator[GlobalBatch]:
    """Global batches of the longest utterances, as the plan chooses them in two epochs."""
    items = itertools.cycle(longest_items(source.dataset, 2, DataError))
    items = list(itertools.islice(items, source.batch_size))
    count = min(MICRO_BATCHES, source.global_batch_size // source.batch_size)
    for number in itertools.count():
        micro_batches = [source.dataset.collate(items) for _ in range(count)]
        global_batch = GlobalBatch(0, number, False, micro_batches)
        yield global_batch.pin_memory() if source.setup.device.type == "cuda" else global_batch


def batches_of_files(source: GlobalBatches) -> Iterator[GlobalBatch]:
    for epoch in itertools.count():
        yield from source.iterate(epoch)


def copy_of_weights(training) -> dict[str, torch.Tensor]:
    """On the host."""
    state = training.engine.model.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def shorten_memory() -> None:
    """Leaves CUDA's allocator what it has between updates, and a share of a step's memory."""
    torch.cuda.empty_cache()
    step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    limit_memory(int(torch.cuda.memory_reserved() + PEAK_SHARE * step))


def limit_memory(limit: int) -> None:
    """Bytes that CUDA's allocator may take; 0: all."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit else 1.0)


def noise(sample_rate: int, stand_in, *arguments, **named) -> dict:
    """The corpora of `splits.stand_in`, with recordings of noise in place of silence."""
    corpora = stand_in(*arguments, **named)
    corpus = corpora["train"]
    folder = Path("noise").resolve()
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(NOISES):
        random = np.random.default_rng(number)
        samples = random.normal(0, 0.1, round(float(corpus.seconds[0]) * sample_rate))
        paths.append(str(folder / f"{number}.wav"))
        write_wav(Path(paths[-1]), samples, sample_rate)
    corpus.paths = Strings(paths[row % NOISES] for row in range(len(corpus)))
    return corpora


def run(name: str, words: list[str], wanted: Wanted) -> dict:
    """The results of a trial of the recipe `name` with the command line `words` of a plan, in the
    current folder. Ends the process if it fails."""
    recipe = importlib.import_module(f"recipes.{name}")
    parser = options.Parser(recipe.__doc__)
    recipe.add_arguments(parser)
    if wanted.cap:
        limit_memory(wanted.cap)
    results = {}

    def try_it(args, run, model, task, global_batches, eval_batches) -> int:
        results.update(make_updates(wanted, args, model, task, global_batches))
        return 0

    def begin(args, name: str) -> loop.Run:
        """A run that is planned, but on a real device."""
        setup = device.setup(args)
        options.freeze(args)
        return loop.Run(setup, is_planned=True)

    stand_in = functools.partial(noise, getattr(recipe, "SAMPLE_RATE", 16_000), splits.stand_in)
    with (
        mock.patch.object(planned, "begin", begin),
        mock.patch.object(loop.Run, "model_device", lambda run: contextlib.nullcontext()),
        mock.patch.object(planned, "plan", try_it),
        mock.patch.object(splits, "stand_in", stand_in),
        contextlib.suppress(SystemExit),
    ):
        exit_with_one_line(lambda: recipe.main(parser.parse_args(words)) and None)
    if not results:
        raise SystemExit(1)
    return results
