"""The training loop: mixed precision, exact gradient accumulation, recovery from out-of-memory
errors, and a checkpoint on SIGINT or SIGTERM.

    run = begin(args, RECIPE)             # device, locks, checkpoint to resume from
    with run.model_device():
        model = ...
    task = Task(RECIPE, compute_loss, loss_weights, evaluate, model_info, run_info,
                metric="cer", higher_is_better=False, fit=fit)
    train(args, run, model, task, global_batches, eval_batches)
    finish(args, run, model, task, report_results)

The utterances of an update are a global batch: batch_size x gradient_accumulation_steps x ranks of
them, in micro-batches. Every loss term is divided by its count in the whole global batch, so the
gradient does not depend on how the global batch is cut."""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from common import (
    checkpoint,
    checks,
    compiling,
    device,
    errors,
    files,
    gpu,
    lora,
    memory,
    offload,
    optim,
    options,
    preflight,
    records,
    resuming,
    run_length,
    watching,
)
from common.batches import (
    EvalBatches,
    GlobalBatch,
    GlobalBatches,
    join_sets,
    split_batch,
    to_device,
)
from common.device import Setup, rng_state, set_rng_state
from common.errors import DataError, Failure, RunError, Stopped, UsageError
from common.ranks import InPass, LostRank, Ranks, Restart, torchrun
from common.report import Report, check_folder, shown
from common.run_length import RunLength
from common.sharding import Sharded, whole_tensors

# The status of a rank after a pass over a global batch. The highest of all ranks decides.
DONE, AGAIN, STOP, CANNOT_FIT = range(4)

# Utterances whose lengths differ by less than 20 % share a limit of the micro-batch size.
BUCKET_RATIO = 1.2
# For an utterance alone in its micro-batch: another process may have taken the memory for a moment.
MAX_BAD_BATCHES = 10  # in a row, whose loss is not finite
TRIES_OF_ONE = 3


@dataclass(frozen=True)
class Task:
    """All that the loop knows of a recipe.

    `compute_loss(model, batch)` returns {term: sum over the batch}; a term without an entry in
    `loss_weights` is not trained. `evaluate(model, batches)` returns {name: (numerator,
    denominator)}, so that the results of several ranks add up. `model_info` and `run_info` are
    dataclasses, which are saved with all weights: what it takes to rebuild the model, and what else
    later commands must know of the run. The weights of the evaluation with the lowest `metric`, or
    the highest with `higher_is_better`, are kept as best.safetensors; among equal ones, the first.

    `fit(model, data)` sets what a new model takes from the training data, such as the statistics of
    its features. `train` calls it once, before the model moves to its device and gets the weights
    of --init_from; not for a resumed run, and not in a dry run. `freeze(model)` is what
    --freeze_encoder does, for the advice of a dry run; None if there is no such flag, or if the
    encoder is random and must be trained. `learning_rate` is the peak rate unless --learning_rate
    is given; adapters have another one (`lora.rate`). `checkpointed` and `compiled` are the layer
    types for --gradient_checkpointing and --torch_compile; the weights inside `checkpointed` layers
    get 16-bit copies with --use_cpu_offload weights. `last_steps` is what a dry run plans in place
    of an `evaluate` that takes minutes without values: it makes only the last steps of a long
    search, which need the most memory. With `evaluate_first`, a new run evaluates the model before
    its first update. Without `decay_embeddings`, embeddings have no weight decay. `betas` are
    AdamW's. `new_rows` are those of a new run; a resumed one has them in its checkpoint, and so it
    is with `frozen_first`, unless that says how many updates. With `fine_tunes` the model began
    from released weights: the length of the run, its evaluations and its patience follow the hours
    of speech. `vocabulary`: the tokens of the model and of --init_from; without it, tensors with a
    row for each token are copied by number. With `compares`, another model of this size decodes at
    the end, too, with fp32 weights. `reports` are the files and folders that the recipe writes, by
    their names in the log folder or by their absolute paths; a new run moves an earlier run's
    aside. `adapters(rank)` are those that --lora adds, for the advice of a dry run; None if there
    is no such flag. `watched` are further sets, by name, which are evaluated with the evaluation
    set, before the first update, too."""

    name: str
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]]
    loss_weights: dict[str, float]
    evaluate: Callable[[torch.nn.Module, Iterable[dict]], dict[str, tuple[float, float]]]
    model_info: object
    run_info: object
    metric: str
    higher_is_better: bool
    fit: Callable[[torch.nn.Module, object], None] | None
    freeze: Callable[[torch.nn.Module], None] | None = None
    learning_rate: float | None = None
    checkpointed: tuple[type, ...] = ()
    compiled: tuple[type, ...] = ()
    last_steps: Callable[[torch.nn.Module, Iterable[dict]], dict] | None = None
    evaluate_first: bool = False
    decay_embeddings: bool = True
    betas: tuple[float, float] = optim.BETAS
    fine_tunes: bool = False
    new_rows: optim.NewRows | None = None
    frozen_first: optim.Frozen | None = None
    vocabulary: checkpoint.Vocabulary | None = None
    compares: bool = False
    reports: tuple[str, ...] = ()
    adapters: Callable[[int], lora.Adapters] | None = None
    watched: dict[str, EvalBatches] = field(default_factory=dict)

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another one."""
        return value > other if self.higher_is_better else value < other


@dataclass(frozen=True)
class Run:
    """A run that has begun: where it computes, the checkpoint that it resumes (or None), and the
    weights of --init_from (or None); `train` empties both. `locks` hold the folders as long as they
    exist. `planned` is the result of `planner` for --dry_run and --verify_gpu, else None.
    `keeps_folder`: whether this rank looks after the folders of its machine. `restarted`: whether
    torchrun has started the processes of this run anew."""

    setup: Setup
    resumed: checkpoint.Saved | None = None
    initial: checkpoint.Saved | None = None
    locks: list = field(default_factory=list)
    planned: tuple | None = None
    keeps_folder: bool = True
    restarted: bool = False

    def model_device(self) -> contextlib.AbstractContextManager:
        """Make the model, and read released weights, in this context. In a dry run they are on the
        device "meta", where they take neither memory nor time; otherwise on the CPU."""
        return torch.device("meta") if self.planned is not None else contextlib.nullcontext()


def begin(args, name: str) -> Run:
    """Starts a run: device and ranks, the locks on its folders, the checkpoint to resume from. From
    here on `args` is read-only. Raises `UsageError` and `RunError`."""
    planned = planner(args) if options.plans(args) else None
    setup = Setup(torch.device("meta")) if planned else device.setup(args)
    ranks = setup.ranks
    if args.sharded and ranks.size == 1 and not planned:
        raise UsageError(
            "--sharded divides a model between several GPUs: GPUS=2 in front of the script, or"
            " torchrun --nproc_per_node 2, starts a process for each"
        )
    keeps_folder = resuming.keeps_folder(args.checkpoint_dir, ranks)
    locks = []
    if keeps_folder and not planned:
        check_folder(args.log_dir)
        locks = [checkpoint.lock_folder(args.checkpoint_dir)]
    restarted = resuming.is_restarted(args.checkpoint_dir, ranks)
    resumed = resuming.resume(args.resume, args.checkpoint_dir, name, ranks, restarted)
    initial = None
    if args.init_from and not resumed:
        initial = checkpoint.read_weights(args.init_from, name, "--init_from")
    options.freeze(args)
    if planned and planned[1]:
        setup = replace(setup, ranks=Ranks(size=planned[1].count))
    return Run(setup, resumed, initial, locks, planned, keeps_folder, restarted)


def planner(args) -> tuple:
    """The package dry_run, and the card or cards that are planned for: None if --verify_gpu finds
    none. Raises `UsageError`."""
    import dry_run

    if torchrun("WORLD_SIZE", 1) > 1:
        raise UsageError(
            "--dry_run and --verify_gpu are one process: start them without torchrun; --dry_run"
            " 2x16gb plans for two GPUs"
        )
    if not args.verify_gpu:  # a plan compiles nothing, but torch would make a folder for it
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    card = dry_run.choose_card(args.dry_run, args.device, UsageError)
    if args.sharded and (card is None or card.count == 1):
        raise UsageError("--sharded needs several GPUs: plan for two with --dry_run 2x16gb")
    return dry_run, card


# --- training -------------------------------------------------------------------------------------


def train(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> dict:
    """Trains as long as the flags or `run_length` say, and returns the progress.
    Raises `Stopped` after a signal, `DataError` for a bad file, and `RunError` if the run cannot
    continue; what was reached until then is saved. Raises `UsageError` before the first update if
    the batches, the records of the task, its loss or its results are not what the loop needs."""
    records.check(task.model_info)
    records.check(task.run_info)
    items = checks.check_collate(global_batches.dataset, task.loss_weights)
    if run.planned is not None:
        sys.exit(plan(args, *run.planned, model, task, global_batches, eval_batches))
    eval_items = checks.check_collate(eval_batches.dataset, task.loss_weights)
    preflight.require_disk(args, model)
    agree(args, run, model, task, global_batches, eval_batches)
    if not run.resumed:
        checks.try_loss(model, task, items, global_batches.dataset.collate)
    placed = prepare_model(args, run, model, task, global_batches.data)
    if eval_items and (run.resumed or not evaluates_first(task)):
        try_evaluation(run.setup, placed, task, eval_batches.dataset.collate(eval_items))
    training = begin_training(args, run, task, placed, global_batches, eval_batches)
    for saved in (run.resumed, run.initial):
        # All is copied. Views of a file would keep its disk space after --keep_last has removed it.
        if saved:
            saved.forget_values()
    with watch_signals(training), contextlib.closing(training.report):
        try:
            progress = train_global_batches(training)
        except LostRank:
            save_alone(training)
            raise
    if placed.sharded:
        placed.sharded.end()
    return progress


def evaluates_first(task: Task) -> bool:
    """Whether a new run evaluates the model before its first update: a set is watched to see how
    far its results move from those."""
    return task.evaluate_first or bool(task.watched)


def agree(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> None:
    """Raises `RunError`, on all ranks, if they have not the same data, model and settings: they
    would wait for each other, or train something else."""
    if run.setup.ranks.size == 1:
        return
    settings = {"the 16-bit type": str(run.setup.dtype)}
    for name, value in vars(args).items():
        is_number = isinstance(value, int | float) and name != "dataloader_num_workers"
        if is_number or name in ("optimizer", "use_cpu_offload", "lr_schedule"):
            settings[f"--{name}"] = value
    progress = run.resumed.state["progress"] if run.resumed else {}
    sets = {"training": global_batches.data, "evaluation": eval_batches.dataset.data}
    if global_batches.old is not None:
        sets["old"] = global_batches.old
    for name, batches in task.watched.items():
        sets[f"watched ({name})"] = batches.dataset.data
    about = {f"the number of {name} utterances": len(data) for name, data in sets.items()}
    run.setup.ranks.agree(
        {
            **settings,
            **about,
            "the lengths of the training utterances": global_batches.order(0),
            "the model": sorted((name, tuple(p.shape)) for name, p in model.named_parameters()),
            "the update that is resumed": progress.get("step"),
        }
    )


@dataclass(frozen=True)
class Placed:
    """The recipe's model, ready to train, with what is on the host or on other ranks."""

    model: torch.nn.Module
    on_host: offload.Offload | None = None
    sharded: Sharded | None = None

    @property
    def trained(self) -> torch.nn.Module:
        """The module with the parameters of the optimizer."""
        return self.sharded.inner if self.sharded else self.model

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[torch.nn.Module]:
        """The recipe's model with its values, on its device. All ranks enter it."""
        if self.sharded:
            self.sharded.fill()
        try:
            yield self.model
        finally:
            if self.sharded:
                self.sharded.empty()

    def state(self) -> dict[str, torch.Tensor]:
        """The state of the model, at least on the first rank. All ranks call it."""
        return self.sharded.state() if self.sharded else lora.saved_state(self.model)


def prepare_model(args, run: Run, model: torch.nn.Module, task: Task, data) -> Placed:
    """Fits the model to the training set `data` or loads saved weights, moves it to its device, and
    compiles or checkpoints its layers."""
    if run.resumed:
        checkpoint.load_weights(model, run.resumed.model)
    elif task.fit:
        task.fit(model, data)
        model.cpu()  # a recipe may have fitted it on the GPU; offloading begins on the host
    if run.initial:
        checkpoint.initialise(model, run.initial.model, args.init_from, task.vocabulary)
    if run.setup.ranks.machines > 1:  # whose processors may have other random numbers
        values = [t for t in model.state_dict().values() if t.is_floating_point()]
        run.setup.ranks.share_tensors(values, [0] * len(values))
    lora.lower(model, run.setup.dtype)
    on_host = offload.begin(
        args.use_cpu_offload, model, task.checkpointed, run.setup.dtype, run.setup.ranks
    )
    sharded = Sharded(model, task.checkpointed, run.setup) if args.sharded else None
    placed = Placed(model.to(run.setup.device), on_host, sharded)
    preflight.require_host_memory(model, args.use_cpu_offload, run.setup.ranks)
    if args.torch_compile:
        compiling.compile_layers(placed.trained, task.compiled)
    if args.gradient_checkpointing:
        memory.checkpoint_layers(placed.trained, task.checkpointed)
    return placed


def try_evaluation(setup: Setup, placed: Placed, task: Task, batch: dict) -> None:
    """Evaluates a batch of two short utterances. What `task.evaluate` returns cannot be known otherwise, and a
    metric that is not among it would be noticed hours later, at the first evaluation."""
    with placed.evaluated() as model:
        evaluate(setup, model, task, [batch])


@dataclass
class Training:
    """The state of a run in training, which the functions below act on. `last_saved`: the update
    after which the last checkpoint was saved; `caught`: the number of a signal, or 0; `skipped`:
    files that were reported."""

    args: object
    setup: Setup
    task: Task
    length: RunLength
    placed: Placed
    optimizer: torch.optim.Optimizer
    schedule: optim.Schedule
    loss_scale: device.LossScale | None
    global_batches: GlobalBatches
    eval_batches: EvalBatches
    progress: dict
    report: Report
    utilisation: gpu.GpuUtilisation
    last_saved: int = -1
    caught: int = 0
    skipped: set[str] = field(default_factory=set)
    has_told_problem: bool = False  # that there is no GPU utilisation
    # The time of the last report and, since then, seconds spent waiting for data and utterances.
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    utterances: int = 0
    micro_batches: int = 0  # since the last call of torch.cuda.empty_cache()


def first_optimizer(
    args, task: Task, placed: Placed, progress: dict, saved: dict | None
) -> torch.optim.Optimizer:
    """The optimizer of a new run, or of the one that is resumed with the state `saved`."""
    optimizer = optim.make_optimizer(
        placed.trained,
        args.learning_rate or lora.rate(placed.model, task.learning_rate),
        args.weight_decay,
        args.optimizer,
        placed.on_host,
        task.decay_embeddings,
        task.betas,
        note_new_rows(progress, None if saved else task.new_rows),
    )
    if saved:
        optim.load_optimizer_state(optimizer, placed.trained, saved["optimizer"])
    return optimizer


def begin_training(
    args,
    run: Run,
    task: Task,
    placed: Placed,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> Training:
    """The state of a new run, or of the one that is resumed. Moves an earlier run aside."""
    setup = run.setup
    ranks = setup.ranks
    saved = run.resumed.state if run.resumed else None
    progress = start_progress(saved)
    optimizer = first_optimizer(args, task, placed, progress, saved)
    loss_scale = setup.loss_scale()
    if saved and loss_scale and saved["scaler"]:
        loss_scale.load_state_dict(saved["scaler"])
    place_in_data(progress, global_batches)
    if saved or run.restarted:
        share_limits(args.checkpoint_dir, ranks, progress["limits"])
    length = run_length.choose(args, global_batches, task.fine_tunes, progress["origin"])
    print(run_length.describe(length, global_batches))
    progress["sets_above_limit"] = len(watching.above_limit(task, progress, length.most_rise))
    schedule = optim.Schedule(optimizer, args.lr_schedule, length.total, args.warmup_steps)
    if schedule.resume(progress["schedule"], progress["step"]):
        progress["evaluations_without_gain"] = 0
    schedule.set(progress["step"])
    note_frozen(progress, task.frozen_first, schedule.warmup, is_new=saved is None)
    place_in_random_numbers(args.seed, setup, saved, progress["step"])
    progress["base"] = progress["base"] or base_of(args, run)
    prepare_folders(args, run, progress, task)
    report = Report(args.log_dir, progress["step"], length.total, enabled=ranks.first)
    placed.trained.train()
    return Training(
        args=args,
        setup=setup,
        task=task,
        length=length,
        placed=placed,
        optimizer=optimizer,
        schedule=schedule,
        loss_scale=loss_scale,
        global_batches=global_batches,
        eval_batches=eval_batches,
        progress=progress,
        report=report,
        utilisation=gpu.GpuUtilisation(setup.device),
        last_saved=progress["step"] if saved else -1,
    )


def start_progress(saved: dict | None = None) -> dict:
    """The progress of a run, plain numbers and lists: a new run's, or that of the `state` of a
    checkpoint."""
    progress = {
        "step": 0,
        "epoch": 0,
        "global_batch": 0,
        "done": [],
        "global_batch_size": 0,
        "data": "",
        "order": "",
        "origin": [0, 0],
        "utterances": 0,
        "best": None,
        "best_step": 0,
        "last_evaluation": 0,
        "evaluations": [],
        "evaluations_without_gain": 0,
        "lowest_loss": None,
        "bad_batches": 0,
        "bad_in_a_row": 0,
        "skipped_files": 0,
        "limits": {},
        "watched": {},
        "sets_above_limit": 0,
        "new_rows": None,
        "frozen_first": None,
        "schedule": None,
        "base": None,
    }
    if saved:
        progress.update(saved["progress"])
    return progress


def note_new_rows(progress: dict, first: optim.NewRows | None) -> optim.NewRows | None:
    """The new rows of the run: `first`, with which it begins and which are noted in the progress,
    or those of the checkpoint that it resumes. A task cannot know the latter, which depend on
    --init_from."""
    if first:
        rows = {name: list(map(int, numbers)) for name, numbers in first.rows.items()}
        progress["new_rows"] = {"rows": rows, "learning_rate": first.learning_rate}
    return optim.NewRows(**progress["new_rows"]) if progress["new_rows"] else None


def note_frozen(progress: dict, asked: optim.Frozen | None, warmup: int, is_new: bool) -> None:
    """Notes in the progress which part of the model its first updates leave as it is. A resumed run
    keeps what it began with, unless the task says how many updates."""
    if asked and (is_new or asked.steps is not None):
        steps = warmup if asked.steps is None else asked.steps
        progress["frozen_first"] = {"prefix": asked.prefix, "steps": steps}
    if progress["frozen_first"] and progress["step"] < progress["frozen_first"]["steps"]:
        prefix, steps = progress["frozen_first"].values()
        print(f"the first {steps} updates leave the weights {prefix}* as they are")


@contextlib.contextmanager
def frozen_part(training: Training) -> Iterator[None]:
    """Within it, the part of the model that this update leaves as it is has no gradients. AdamW
    passes over it then: neither weight decay nor its states change."""
    record = training.progress["frozen_first"]
    found = []
    if record and training.progress["step"] < record["steps"]:
        parameters = training.placed.trained.named_parameters()
        found = [p for n, p in parameters if n.startswith(record["prefix"]) and p.requires_grad]
    for p in found:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in found:
            p.requires_grad_(True)


def place_in_random_numbers(seed: int, setup: Setup, saved: dict | None, step: int) -> None:
    """Sets the random state of this rank to that of the `state` of a checkpoint, if it has one."""
    ranks = setup.ranks
    if saved and len(saved["rng"]) > ranks.rank:
        set_rng_state(saved["rng"][ranks.rank], setup.device)
    elif ranks.size > 1:  # each rank has its own dropout
        torch.manual_seed(seed + 1000 * ranks.rank + step)


def place_in_data(progress: dict, global_batches: GlobalBatches) -> None:
    """Sets the position for this run's data and global batch size. If the data or their order have
    changed, the epoch restarts, with a message. If the global batch size has changed, the rest of
    the epoch is cut into new global batches."""
    epoch = f"epoch {progress['epoch'] + 1}"
    data = global_batches.fingerprint()
    size = global_batches.global_batch_size
    changed = ""
    # Another machine may have saved the checkpoint, and have its data in another folder.
    if progress["data"] not in ("", *global_batches.setup.ranks.gather(data)):
        changed = "the training data have"
    elif progress["order"] not in ("", global_batches.order(progress["epoch"])):
        changed = "the seed, or the length of the utterances (speed, padding), has"
    if changed:
        if progress["global_batch"] or progress["done"]:
            print(f"{changed} changed since the checkpoint: {epoch} starts from its beginning")
        progress.update(global_batch=0, done=[], origin=[progress["step"], progress["epoch"]])
    elif progress["global_batch"] and progress["global_batch_size"] != size:
        before = progress["global_batch_size"]
        print(
            f"an update had {before} utterances and now has {size}: the rest of {epoch} is cut anew"
        )
        progress["done"] = [*progress["done"], [before, progress["global_batch"]]]
        progress["global_batch"] = 0
    progress["data"] = data
    progress["global_batch_size"] = size


def share_limits(folder: Path, ranks: Ranks, limits: dict[int, int]) -> None:
    """Adds to the limits of micro-batches what ranks that were out of memory have left in their
    folders (`restart_smaller`), and makes them those of all ranks."""
    if ranks.size > 1:
        for path in folder.glob(checkpoint.LIMITS.format("*")):
            lower_limits(limits, {int(key): size for key, size in files.read_json(path).items()})
        for other in ranks.gather(limits):
            lower_limits(limits, other)


def lower_limits(limits: dict[int, int], others: dict[int, int]) -> None:
    for bucket, size in others.items():
        limits[bucket] = min(size, limits.get(bucket, size))


def prepare_folders(args, run: Run, progress: dict, task: Task) -> None:
    """Moves an earlier run in the folders aside or, if the run continues from an older checkpoint,
    what is newer. A resumed run without best weights in its folder, and a new run with
    `Task.evaluate_first`, evaluate before the first update."""
    has_best = False
    if run.keeps_folder:
        in_log_dir = [name for name in task.reports if not os.path.isabs(name)]
        files.remove_stale(args.log_dir, "|".join((*checkpoint.LOGS, *in_log_dir)))
        try:
            if run.resumed and run.resumed.path.resolve().parent == args.checkpoint_dir.resolve():
                checkpoint.branch(args.checkpoint_dir, args.log_dir, progress["step"])
                has_best = checkpoint.best_step(args.checkpoint_dir) >= progress["best_step"]
            else:
                checkpoint.make_room(args.checkpoint_dir, args.log_dir, task.reports)
            resuming.mark(args.checkpoint_dir)
        except OSError as error:
            raise errors.cannot_write(args.checkpoint_dir, error, "--output_dir") from None
    has_best = run.setup.ranks.gather(has_best)[0]
    if not has_best:
        progress["best"] = None
        progress["last_evaluation"] = -1 if run.resumed or evaluates_first(task) else 0


@contextlib.contextmanager
def watch_signals(training: Training) -> Iterator[None]:
    """Records SIGTERM, SIGINT and SIGHUP (a closed terminal; ignored under nohup) in
    `training.caught`, so that the run can save itself. A second SIGINT interrupts at once."""

    def catch(number: int, frame) -> None:
        if training.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        training.caught = number

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {}
    with contextlib.suppress(ValueError):  # in another thread, where Python delivers no signals
        before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_global_batches(training: Training) -> dict:
    """Trains on one global batch after the other, with evaluations and checkpoints in between,
    until the run is finished. Returns the progress."""
    progress = training.progress
    ranks = training.setup.ranks
    source = training.global_batches.iterate(
        progress["epoch"], progress["global_batch"], progress["done"]
    )
    while True:
        if progress["step"] == 0 and training.length.has_ended(progress):
            raise no_update(progress)
        if evaluation_is_due(training):
            try:
                evaluate_now(training)
            except Exception:
                save_alone(training)
                raise
        finished = training.length.has_ended(progress)
        if checkpoint_is_due(training, finished):
            save(training)
        if finished and training.report.problem:
            raise training.report.problem
        if finished:
            for line in watching.table(training.task, progress):
                training.report.say(line)
            return progress
        error = training.report.problem
        started = time.monotonic()
        try:
            global_batch = next(source)
        except Failure as failure:
            error = failure
        training.waited += time.monotonic() - started
        training.utilisation.sample()
        caught, failed = ranks.reduce([training.caught, int(error is not None)], "max")
        if failed:
            save(training)
            raise error or RunError("another rank could not continue: see its message")
        if caught:
            raise saved_and_stopped(training, caught)
        try:
            train_global_batch(training, global_batch)
        except (LostRank, InPass):
            raise
        except RunError:
            save(training)  # the weights are those from before the global batch
            raise
        ranks.note_update(time.monotonic() - started)


def no_update(progress: dict) -> RunError:
    reasons = (
        f"{progress['bad_batches']} global batches had a non-finite loss,"
        f" {progress['skipped_files']} files were skipped"
    )
    return RunError(f"no update was made: {reasons}; the messages above name the files")


def evaluation_is_due(training: Training) -> bool:
    progress = training.progress
    every = training.length.eval_every
    if progress["last_evaluation"] == progress["step"]:
        return False
    if training.length.has_ended(progress):
        return True
    if every:
        return progress["step"] % every == 0
    return progress["global_batch"] == 0 and not progress["done"]  # an epoch begins


def checkpoint_is_due(training: Training, finished: bool) -> bool:
    step = training.progress["step"]
    every = training.args.save_every
    if step == training.last_saved:
        return False
    return finished or (every > 0 and step > 0 and step % every == 0)


# --- one update -----------------------------------------------------------------------------------


def train_global_batch(training: Training, global_batch: GlobalBatch) -> None:
    """One global batch: forward and backward until it fits, then the update. Then the position
    advances."""
    progress = training.progress
    ranks = training.setup.ranks
    terms = list(training.task.loss_weights)
    own = [sum(batch["counts"][term] for batch in global_batch.micro_batches) for term in terms]
    names = [name for batch in global_batch.micro_batches for name in batch["names"]]
    *counts, utterances, skipped = ranks.reduce([*own, len(names), len(global_batch.skipped)])
    if skipped:
        note_skipped(training, global_batch, skipped)
    if utterances:
        totals = dict(zip(terms, counts, strict=True))
        before = Before(training)
        try:
            with frozen_part(training):
                device_sums = pass_until_it_fits(training, global_batch, totals, before)
            sums, norm = reduce_gradients(training, device_sums)
        except LostRank:
            before.restore(training)
            raise
        except (RunError, Stopped):  # the run is, or will be, saved
            raise
        except Exception:  # of a file, or of a copy's own code
            before.restore(training)
            save_alone(training)
            raise
        if not is_finite(training, sums, norm):
            training.optimizer.zero_grad()
            before.restore_buffers()
            note_bad_batch(training, names, sums, norm)
        else:
            made = apply_update(training, norm)
            progress["bad_in_a_row"] = 0
            progress["utterances"] += utterances
            training.utterances += utterances
            if made:
                progress["step"] += 1
                training.schedule.set(progress["step"])
                values = zip(terms, sums, strict=True)
                averages = {term: value / max(1, totals[term]) for term, value in values}
                note_update(training, averages, norm)
    progress["global_batch"] = global_batch.number + 1
    if global_batch.last:
        progress.update(epoch=global_batch.epoch + 1, global_batch=0, done=[])
    empty_cache(training, len(global_batch.micro_batches))


def is_finite(training: Training, sums: list[float], norm: float) -> bool:
    """Whether an update can be made. Under loss scaling an infinite gradient lowers the scale."""
    if not all(map(math.isfinite, sums)):
        return False
    return training.loss_scale is not None or math.isfinite(norm)


def empty_cache(training: Training, micro_batches: int) -> None:
    """Gives unused GPU memory back every `--empty_cache_every` micro-batches: batches of many
    lengths fragment it."""
    training.micro_batches += micro_batches
    every = training.args.empty_cache_every
    if training.setup.device.type == "cuda" and every and training.micro_batches >= every:
        training.micro_batches = 0
        torch.cuda.empty_cache()


class Before:
    """What a pass over a global batch changes besides gradients, as it was."""

    def __init__(self, training: Training):
        self.buffers = [(buffer, buffer.clone()) for buffer in training.placed.trained.buffers()]
        self.rng = rng_state(training.setup.device)

    def restore_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)

    def restore(self, training: Training) -> None:
        """Makes everything as it was, without gradients."""
        training.optimizer.zero_grad()
        self.restore_buffers()
        set_rng_state(self.rng, training.setup.device)


def pass_until_it_fits(
    training: Training, global_batch: GlobalBatch, totals: dict, before: Before
) -> torch.Tensor:
    """Forward and backward of the global batch, repeated in smaller micro-batches as long as a rank
    runs out of memory. Returns the sums of the loss terms. Every attempt starts from the same
    gradients, buffers and random state."""
    task = training.task
    setup = training.setup
    ranks = setup.ranks
    limits = training.progress["limits"]
    failures = Counter()
    sharded = training.placed.sharded
    compute_loss = sharded.compute(task.compute_loss) if sharded else task.compute_loss

    def stop() -> bool:
        training.utilisation.sample()
        if sharded:  # all ranks stop after the same micro-batch
            return ranks.reduce([training.caught], "max") != [0]
        return training.caught != 0

    while True:
        micro_batches = cut_to_fit(global_batch.micro_batches, limits)
        if sharded:
            micro_batches = as_many_on_every_rank(micro_batches, ranks)
        with ranks.waiting() if sharded else contextlib.nullcontext():
            outcome = run_global_batch(
                training.placed.trained,
                micro_batches,
                totals,
                compute_loss,
                task.loss_weights,
                setup,
                training.loss_scale,
                stop,
            )
        if sharded and outcome.failed:
            raise restart_smaller(training, outcome)
        if sharded:
            sharded.end_pass()
        status = DONE
        if outcome.stopped:
            status = STOP
        elif outcome.failed is not None:
            status = AGAIN if learn_limit(outcome.failed, limits, failures) else CANNOT_FIT
        worst, caught = ranks.reduce([status, training.caught], "max")
        if worst == DONE:
            zero = torch.zeros(len(task.loss_weights), device=setup.device)
            return zero if outcome.sums is None else outcome.sums
        before.restore(training)
        memory.free_memory(setup.device)
        if worst == STOP:
            raise saved_and_stopped(training, caught)
        if worst == CANNOT_FIT:
            other = "an utterance of another rank does not fit into memory: see its message"
            raise RunError(too_long(outcome) if status == CANNOT_FIT else other)
        for other in ranks.gather(limits):  # all ranks keep the same limits
            lower_limits(limits, other)
        if status == AGAIN:
            training.report.say(out_of_memory(outcome, setup))


def as_many_on_every_rank(micro_batches: list[dict], ranks: Ranks) -> list[dict]:
    """The micro-batches of this rank and, so that all ranks make the same number of passes over a
    sharded model, repetitions of the last one, which count nothing. A rank without any repeats
    another rank's."""
    most, none = ranks.reduce([len(micro_batches), int(not micro_batches)], "max")
    repeated = micro_batches[-1:]
    if none:
        repeated = [batches[0] for batches in ranks.gather(repeated) if batches][:1]
    missing = most - len(micro_batches)
    return micro_batches + [{**batch, "repeated": True} for batch in repeated] * missing


def restart_smaller(training: Training, outcome: "Outcome") -> RunError:
    """The error of a rank that is out of memory while the others wait for its part of the weights:
    the job has to start anew. The micro-batch size that fits is written beside the checkpoints."""
    if len(outcome.failed["names"]) == 1:
        return InPass(too_long(outcome))
    limits = training.progress["limits"]
    learn_limit(outcome.failed, limits, Counter())
    folder = training.args.checkpoint_dir
    path = folder / checkpoint.LIMITS.format(training.setup.ranks.rank)
    text = json.dumps(limits)
    files.save(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return Restart(
        f"{out_of_memory(outcome, training.setup, 'starts anew with')}; torchrun --max_restarts"
        " does so, or --resume auto"
    )


@dataclass
class Outcome:
    """The result of one pass over a global batch's micro-batches. `sums`: one value per loss term,
    on the device; `failed`: the micro-batch that did not fit."""

    sums: torch.Tensor | None = None
    failed: dict | None = None
    reason: str = ""
    stopped: bool = False


def run_global_batch(
    model: torch.nn.Module,
    micro_batches: list[dict],
    totals: dict[str, float],
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]],
    loss_weights: dict[str, float],
    setup: Setup,
    loss_scale: device.LossScale | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Forward and backward of a global batch, a pure function of its arguments. Gradients add up in
    the parameters.

    `totals` is the number of targets of each term in the whole global batch, on all ranks.
    `compute_loss` and `loss_weights` are a `Task`'s. If a micro-batch runs out of memory, the
    outcome says so; any other error passes through."""
    sums = None
    batches = to_device(micro_batches, setup.device)
    for number in range(len(micro_batches)):
        failure = None
        try:
            batch = next(batches)
            with setup.autocast():
                terms = compute_loss(model, batch)
                loss = weighted_loss(terms, totals, loss_weights)
            is_repeated = "repeated" in batch
            if is_repeated:
                loss = 0.0 * loss
            if isinstance(loss, torch.Tensor):  # or no term has a target in the whole global batch
                (loss * loss_scale.value if loss_scale else loss).backward()
            if not is_repeated:
                detached = torch.stack([terms[name].detach() for name in loss_weights])
                sums = detached if sums is None else sums + detached
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            failure = errors.first_line(error)
        # Here, outside the handler, the traceback no longer keeps the failed step's tensors alive.
        batch = terms = loss = detached = None
        if failure is not None:
            return Outcome(failed=micro_batches[number], reason=failure)
        if stop():
            return Outcome(stopped=True)
    return Outcome(sums=sums)


def weighted_loss(
    terms: dict[str, torch.Tensor], totals: dict[str, float], loss_weights: dict[str, float]
) -> torch.Tensor | int:
    """The sum over terms of weight * sum / number of targets. A term that has no weight, or no
    target in the global batch, adds nothing."""
    for name in loss_weights:
        if name not in terms:
            raise UsageError(f"compute_loss returns no {name!r}, a term of loss_weights")
    return sum(
        loss_weights[name] * term / totals[name] for name, term in terms.items() if totals.get(name)
    )


def length_bucket(batch: dict) -> int:
    """The length bucket of a batch's longest utterance."""
    return math.ceil(math.log(max(0.1, *batch["seconds"])) / math.log(BUCKET_RATIO))


def cut_to_fit(micro_batches: list[dict], limits: dict[int, int]) -> list[dict]:
    """Cuts micro-batches down to the sizes that are known to fit: `limits`, by length bucket. A
    limit holds for longer utterances, too."""
    pieces = []
    for batch in micro_batches:
        bucket = length_bucket(batch)
        size = len(batch["names"])
        limit = min((limit for known, limit in limits.items() if known <= bucket), default=size)
        pieces += split_batch(batch, limit) if limit < size else [batch]
    return pieces


def learn_limit(failed: dict, limits: dict[int, int], failures: Counter) -> bool:
    """Halves the limit for a failed micro-batch's length. False if a single utterance has failed
    `TRIES_OF_ONE` times."""
    size = len(failed["names"])
    if size > 1:
        limits[length_bucket(failed)] = size // 2
        return True
    failures[failed["names"][0]] += 1
    return failures[failed["names"][0]] < TRIES_OF_ONE


def out_of_memory(outcome: Outcome, setup: Setup, what: str = "is repeated in") -> str:
    """The message about a micro-batch that did not fit. `what`: what the global batch does now."""
    size = len(outcome.failed["names"])
    seconds = max(outcome.failed["seconds"])
    text = f"out of memory with {size} x {seconds:.1f} s"
    text += f": the global batch {what} smaller micro-batches"
    others = gpu.gpu_processes() if setup.device.type == "cuda" else ""
    return f"{text}; also on this GPU: {others}" if others else text


def too_long(outcome: Outcome) -> str:
    """The message about an utterance that does not fit alone."""
    name = outcome.failed["names"][0]
    seconds = outcome.failed["seconds"][0]
    problem = f"{name} ({seconds:.1f} s) does not fit into memory even alone ({outcome.reason})"
    advice = (
        "use --gradient_checkpointing or --mixed_precision, reject such utterances with"
        f" --max_duration {0.9 * seconds:.1f}, or take a smaller model"
    )
    if others := gpu.gpu_processes():
        advice += f"; other processes on this GPU: {others}"
    return f"{problem}: {advice}"


def reduce_gradients(training: Training, sums: torch.Tensor) -> tuple[list[float], float]:
    """Sums gradients and loss terms over the ranks. Returns terms and gradient norm: a global
    batch's only transfer to the host."""
    ranks = training.setup.ranks
    optimizer = training.optimizer
    gradients = optim.gradients(optimizer)
    if ranks.size > 1 and not training.placed.sharded:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        present = ranks.reduce([int(p in gradients) for p in parameters], "max")
        used = [p for p, is_there in zip(parameters, present, strict=True) if is_there]
        # A rank without a gradient adds zeros.
        gradients = optim.gradients(optimizer, [p for p in used if p not in gradients])
        ranks.sum_tensors([gradients[p] for p in used])
    with ranks.waiting():
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        if training.placed.sharded and gradients:
            norm = norm.full_tensor()
        # Only here the host waits for the sums over the ranks.
        *terms, norm = torch.cat([sums, norm.to(sums.device).reshape(1)]).tolist()
    scale = training.loss_scale.value if training.loss_scale else 1.0
    return ranks.reduce(terms), norm / scale


def apply_update(training: Training, norm: float) -> bool:
    """Clips the gradient and updates the weights. Returns False if the gradient is not finite under
    fp16's loss scale, which is lowered then."""
    optimizer = training.optimizer
    loss_scale = training.loss_scale
    limit = training.args.max_grad_norm
    is_finite = math.isfinite(norm)
    factor = 1.0
    if loss_scale:
        factor /= loss_scale.value
        loss_scale.update(is_finite)
    if limit and norm > limit:
        factor *= limit / norm
    gradients = list(optim.gradients(optimizer).values())
    if is_finite and gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    if is_finite:
        optimizer.step()
    optimizer.zero_grad()
    if not is_finite and loss_scale.value < 1:
        raise RunError(
            f"fp16's loss scale fell below 1 at step {training.progress['step']}: the gradients"
            " overflow at any scale; use --bf16, --no_mixed_precision or a lower --learning_rate"
        )
    return is_finite


def note_update(training: Training, averages: dict[str, float], norm: float) -> None:
    """Updates the progress bar, and writes a line of metrics every `log_every` updates."""
    report = training.report
    step = training.progress["step"]
    elapsed = max(1e-9, time.monotonic() - training.since)
    loss = sum(training.task.loss_weights[term] * value for term, value in averages.items())
    rate = training.optimizer.param_groups[0]["lr"]
    used = memory.memory_used(training.setup.device)
    speed = training.utterances / elapsed
    waiting = training.waited / elapsed
    utilisation = training.utilisation.mean()
    report.progress(step, loss, rate, speed, used, waiting, utilisation)
    problem = training.utilisation.problem
    if training.setup.device.type == "cuda" and problem and not training.has_told_problem:
        training.has_told_problem = True
        report.say(f"no GPU utilisation in the reports ({problem})")
    if step % training.args.log_every == 0:
        values = {
            "loss": loss,
            **{f"loss_{term}": value for term, value in averages.items()},
            "learning_rate": rate,
            "gradient_norm": norm,
            "utterances_per_second": speed,
            "memory_bytes": used,
            "data_wait_share": waiting,
            "gpu_utilisation": utilisation,
        }
        values = {f"train/{name}": value for name, value in values.items() if value is not None}
        report.write(step, epoch=training.progress["epoch"], **values)
        training.since = time.monotonic()
        training.waited = 0.0
        training.utterances = 0


def note_skipped(training: Training, global_batch: GlobalBatch, count: int) -> None:
    """Counts `count` skipped files, this rank's and the others', and reports each file once."""
    progress = training.progress
    progress["skipped_files"] += count
    for name, reason in itertools.chain(*training.setup.ranks.gather(global_batch.skipped)):
        if name not in training.skipped:  # or an earlier epoch has reported it
            training.skipped.add(name)
            training.report.say(f"skipped: {reason}")
            training.report.write(progress["step"], event="skipped", file=name, reason=reason)


def note_bad_batch(training: Training, names: list[str], terms: list[float], norm: float) -> None:
    """Counts and lists a global batch whose loss or gradient is not finite. It has not changed the
    weights. Raises `RunError` if there were too many in a row."""
    progress = training.progress
    progress["bad_batches"] += 1
    progress["bad_in_a_row"] += 1
    names = list(itertools.chain(*training.setup.ranks.gather(names)))
    values = zip(training.task.loss_weights, terms, strict=True)
    losses = ", ".join(f"{term} {value:g}" for term, value in values)
    text = f"bad global batch {progress['bad_batches']}: loss {losses}, gradient norm {norm:g}"
    training.report.say(f"{text}: skipped; its files: {', '.join(names)}")
    terms = [str(value) for value in terms]
    training.report.write(progress["step"], event="bad_batch", files=names, terms=terms)
    count = progress["bad_in_a_row"]
    if count >= MAX_BAD_BATCHES:
        progress["bad_in_a_row"] = 0
        raise RunError(
            f"{count} global batches in a row had a non-finite loss, and the weights from before"
            " them are saved: try a lower --learning_rate, --bf16 or --no_mixed_precision"
        )


# --- evaluation and checkpoints -------------------------------------------------------------------


def evaluate(
    setup: Setup, model: torch.nn.Module, task: Task, batches: Iterable[dict]
) -> dict[str, tuple[float, float]]:
    """What `task.evaluate` returns, without gradients. Random state and mode stay as they were.
    Raises `UsageError` if the metric is not among it."""
    state = rng_state(setup.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), setup.autocast():
            results = task.evaluate(model, batches)
    finally:
        model.train(was_training)
        set_rng_state(state, setup.device)
    checks.check_results(task, results)
    return results


def evaluate_set(training: Training, batches: EvalBatches) -> dict[str, float]:
    """The values of `mean_values` of a set, on all ranks. Raises `Stopped` after a signal, when the
    run is saved."""
    task = training.task
    ranks = training.setup.ranks

    def polled() -> Iterator[dict]:
        for batch in batches:
            if training.caught:
                raise Stopped("the results of this evaluation are discarded", 128 + training.caught)
            yield batch

    results = {}
    with contextlib.suppress(Stopped), training.placed.evaluated() as model:
        results = evaluate(training.setup, model, task, polled())
    with ranks.patient():
        (caught,) = ranks.reduce([training.caught], "max")
    if caught:
        raise saved_and_stopped(training, caught)
    sums = ranks.reduce([float(value) for pair in results.values() for value in pair])
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return mean_values(task, dict(zip(results, pairs, strict=True)))


def evaluate_now(training: Training) -> None:
    """Evaluates, reports the results, and keeps the weights if they are the best."""
    task = training.task
    progress = training.progress
    step = progress["step"]
    started = time.monotonic()
    values = evaluate_set(training, training.eval_batches)
    watched = {name: evaluate_set(training, each) for name, each in task.watched.items()}
    for name, each in watched.items():
        watching.note(progress, name, each.get(task.metric, math.nan))
    above = watching.above_limit(task, progress, training.length.most_rise)
    progress["sets_above_limit"] = len(above)
    improved = note_evaluation(task, progress, values)
    if improved:
        keep_best(training, values)
    report = training.report
    texts = [f"{name} {shown(name, value)}" for name, value in values.items()]
    if improved:
        texts.append("best so far")
    report.say(f"evaluation at step {step} (epoch {progress['epoch'] + 1}): {'  '.join(texts)}")
    results = {f"eval/{name}": value for name, value in values.items()}
    for name, each in watched.items():
        texts = [f"{key} {shown(key, value)}" for key, value in each.items()]
        report.say(f"  watched {name}: {'  '.join(texts)}")
        results |= {f"watched/{name}/{key}": value for key, value in each.items()}
    for line in above:
        report.say(line)
    report.write(step, **results)
    report.draw(task.metric)
    training.since += time.monotonic() - started  # evaluation does not count as training time


def keep_best(training: Training, values: dict[str, float]) -> None:
    """Saves the weights as those of the best evaluation, which has these `values`."""
    args = training.args
    task = training.task
    progress = training.progress
    ranks = training.setup.ranks
    summary = {"step": progress["step"], "epoch": progress["epoch"], **values}
    summary |= {"metric": task.metric, "evaluations": progress["evaluations"]}
    if progress["watched"]:
        summary["watched"] = progress["watched"]
    summary["made_by"] = made_by(task.name, training.setup, progress["base"])
    path = args.checkpoint_dir / "best.safetensors"
    with ranks.patient():
        state = training.placed.state()
        if ranks.first:
            record = lora.record_of(training.placed.model)
            checkpoint.save_weights(path, state, task, summary, record)
        ranks.gather(None)  # the others wait for the first


def base_of(args, run: Run) -> str | None:
    """The released weights with which a run began, as a flag names or named them: of this run, or
    of the one that saved the checkpoint or the weights with which it starts."""

    def named(flags: dict) -> str | None:
        return flags.get("model_dir") or flags.get("model_file")

    saved = run.resumed or run.initial
    if named(vars(args)) or saved is None:
        return named(vars(args))
    if saved.state:
        return saved.state["progress"].get("base") or named(saved.state["args"])
    return (checkpoint.noted(saved.path).get("made_by") or {}).get("base")


def made_by(recipe: str, setup: Setup, base: str | None) -> dict:
    """What best.json keeps about how the weights came about: the command (None if another program
    has called the recipe), the released weights `base` that it began with, the tier of the preset
    script, the GPU, and versions."""
    command = None
    if os.path.basename(sys.argv[0]) == f"{recipe}.py":
        command = shlex.join(["python", f"recipes/{recipe}.py", *sys.argv[1:]])
    name = "CPU"
    if setup.device.type == "cuda":
        name = torch.cuda.get_device_name(setup.device)
    return {
        "command": command,
        "base": base,
        "tier": os.environ.get("PRESET_TIER"),
        "device": name if setup.ranks.size == 1 else f"{setup.ranks.size} x {name}",
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def note_evaluation(task: Task, progress: dict, values: dict[str, float]) -> bool:
    """Notes an evaluation in the progress. Returns whether it is the best so far. A metric without
    a value counts as NaN, than which every number is better. For early stopping a lower loss is a
    gain, too: error rates can rise first while a model learns a new script. With a watched set
    above its limit no evaluation is the best."""
    value = values.get(task.metric, math.nan)
    best = progress["best"]
    improved = best is None or math.isnan(best) or task.is_better(value, best)
    improved = improved and not progress["sets_above_limit"]
    progress["last_evaluation"] = progress["step"]
    progress["evaluations"].append([progress["step"], value])
    progress["evaluations_without_gain"] += 1
    if improved:
        progress["evaluations_without_gain"] = 0
        progress["best"] = value
        progress["best_step"] = progress["step"]
    loss = values.get("loss", math.inf)
    if progress["lowest_loss"] is None or loss < progress["lowest_loss"]:
        progress["lowest_loss"] = loss
        if loss < math.inf:
            progress["evaluations_without_gain"] = 0
    return improved


def mean_values(task: Task, results: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The values of an evaluation's (numerator, denominator), and the weighted loss if all of its
    terms are there. A denominator of 0 gives no value."""
    values = {name: total / count for name, (total, count) in results.items() if count}
    if task.loss_weights.keys() <= values.keys():
        values["loss"] = sum(weight * values[term] for term, weight in task.loss_weights.items())
    return values


def save(training: Training) -> None:
    """Writes a checkpoint of the run as it is now, with the random state of every rank."""
    progress = training.progress
    ranks = training.setup.ranks
    states = ranks.gather(rng_state(training.setup.device))
    training.last_saved = progress["step"]
    progress["order"] = training.global_batches.order(progress["epoch"])
    progress["schedule"] = training.schedule.state()
    with ranks.patient():
        model = training.placed.state()
        optimizer = optim.optimizer_state(training.optimizer, training.placed.trained, ranks)
        if training.placed.sharded:
            optimizer = {n: whole_tensors(each, ranks) for n, each in optimizer.items()}
        if ranks.first:
            write_checkpoint(training, states, model, optimizer)
        ranks.gather(None)  # the others wait for the first


def save_alone(training: Training) -> None:
    """Writes a checkpoint without the other ranks, after a failure of this one, or if one of them
    is lost. Their random states are, too. Nothing is written if they have a part of the run's
    state. A failure to write is only said, because another one ends the run."""
    ranks = training.setup.ranks
    has_parts = training.placed.sharded is not None or training.placed.on_host is not None
    has_all = ranks.size == 1 or not has_parts
    if ranks.first and has_all and training.progress["step"] > max(0, training.last_saved):
        training.setup = replace(training.setup, ranks=Ranks())
        try:
            save(training)
        except Failure as failure:
            training.report.say(f"the run could not be saved: {failure}")


def write_checkpoint(training: Training, states: list, model: dict, optimizer: dict) -> None:
    """Writes a checkpoint. `states`: the random state of every rank; `model` and `optimizer`: what
    is saved of them."""
    args = training.args
    progress = training.progress
    flags = {}
    for name, value in vars(args).items():
        if name not in ("given", "commands", "sharded"):  # shards are not in the file
            flags[name] = value if isinstance(value, int | float | str | None) else str(value)
    content = {
        "recipe": training.task.name,
        "model_info": asdict(training.task.model_info),
        "run_info": asdict(training.task.run_info),
        "lora": lora.record_of(training.placed.model),
        "progress": progress,
        "rng": states,
        "model": model,
        "optimizer": optimizer,
        "scaler": training.loss_scale.state_dict() if training.loss_scale else None,
        "torch": str(torch.__version__),
        "args": flags,
    }
    checkpoint.save(args.checkpoint_dir, progress["step"], content, args.keep_last)


def saved_and_stopped(training: Training, caught: int) -> Stopped:
    """Saves the run. Returns the error that ends it after the signal `caught`."""
    save(training)
    step = training.progress["step"]
    place = f"step {step} is saved in {training.args.checkpoint_dir}"
    name = signal.Signals(caught).name
    return Stopped(f"stopped by {name}: {place}; --resume auto continues from there", 128 + caught)


def finish(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    report_results: Callable[[str], None],
) -> Path | None:
    """On the first rank: loads the best weights, calls `report_results(which weights these are)`,
    and prints where the results are and how much memory the run took. Returns the file of the
    weights."""
    if not run.setup.ranks.first:
        return None
    memory.free_memory(run.setup.device)  # the optimizer may be part of a reference cycle
    if args.sharded:
        model.to(run.setup.device)  # from the host
    with torch.no_grad():
        best = checkpoint.use_best(args.checkpoint_dir, model, task.name)
        with run.setup.autocast():
            report_results("weights of the best evaluation")
    print(f"weights: {best}; curves and all results: {args.log_dir}")
    print(memory.peak(run.setup.device))
    return best


# --- a run that is only planned -------------------------------------------------------------------


def plan(
    args,
    dry_run,
    card,
    model: torch.nn.Module,
    task: Task,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> int:
    """--dry_run and --verify_gpu: predicts the peak of GPU memory by `run_global_batch` and
    `evaluate` on tensors without values. Prints the answer and returns the exit status. Raises
    `DataError` and `RunError`."""
    if card is None:
        return preflight.verify(args, model)
    ranks = card.count
    setup = Setup(dtype=device.pick_dtype(args.mixed_precision, card.capability)[0])
    lora.lower(model, setup.dtype)
    length = run_length.choose(args, global_batches, task.fine_tunes)
    epochs = math.ceil(length.total / global_batches.per_epoch)

    def step(batches: list[dict]) -> None:
        outcome = run_global_batch(
            model, batches, batches[0]["counts"], task.compute_loss, task.loss_weights, setup
        )
        if outcome.failed:
            raise dry_run.CannotPlan(outcome.reason)

    def evaluate_planned(batches: list[dict], level: str) -> None:
        on_device = replace(setup, keeps_copies=not level)
        with contextlib.redirect_stdout(io.StringIO()):  # the texts are not the model's
            evaluate(on_device, model, short_task, batches)

    def adapt() -> str:
        lora.attach(model, task.adapters(lora.USUAL_RANK), args.seed)
        lora.lower(model, setup.dtype)
        return f"--lora {lora.USUAL_RANK}"

    evaluated = join_sets([eval_batches.dataset, *(each.dataset for each in task.watched.values())])
    short_task = replace(task, evaluate=task.last_steps or task.evaluate)
    checkpoint_layers = functools.partial(memory.checkpoint_layers, model, task.checkpointed)
    freeze = functools.partial(task.freeze, model) if task.freeze else None
    planned = dry_run.PlannedRun(
        model=model,
        step=step,
        items=dry_run.longest_items(global_batches.dataset, epochs, DataError),
        count=math.ceil(len(global_batches.dataset.data) / ranks),
        states=functools.partial(optim.state_bytes, model),
        host=lambda optimizer: ranks * offload.host_bytes(model, optimizer, ranks),
        checkpoint=checkpoint_layers if task.checkpointed else None,
        freeze=freeze,
        collate=global_batches.dataset.collate,
        parts=(task.compute_loss, task.evaluate),
        evaluation=dry_run.Evaluation(
            evaluate_planned,
            dry_run.longest_items(evaluated, 1, DataError),
            len(evaluated.data),
            evaluated.collate,
        ),
        castable=functools.partial(offload.castable, model, task.checkpointed),
        halves=setup.dtype,
        compares=task.compares,
        ranks=ranks,
        layers=task.checkpointed,
        adapt=adapt if task.adapters and not lora.adapters_of(model) else None,
    )
    if args.verify_gpu:
        return preflight.verify(args, model, lambda: planned.needs(args, card))
    return planned.answer(args, card, str(setup.dtype or torch.float32), RunError)
