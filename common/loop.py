"""Mixed-precision training loop with exact gradient accumulation, recovery from out-of-memory
errors, and a checkpoint on SIGINT or SIGTERM.

    run = begin(args, RECIPE)             # device, locks, checkpoint to resume from
    with run.model_device():
        model = ...
    task = Task(RECIPE, compute_loss, loss_weights, evaluate, model_info, run_info, metric="cer")
    train(args, run, model, task, global_batches, eval_batches)
    finish(args, run, model, task, eval_batches, report_results)

An update's batch is a global batch: batch_size x gradient_accumulation_steps x ranks utterances, in
micro-batches. Every loss term is divided by its count in the whole global batch, so the gradient does not
depend on how the global batch is cut."""

import contextlib
import functools
import itertools
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

import torch

from common import checkpoint, compiling, device, errors, gpu, memory, optim, options, preflight
from common.batches import EvalBatches, GlobalBatch, GlobalBatches, split_batch, to_device
from common.device import Setup, rng_state, set_rng_state
from common.errors import DataError, Failure, RunError, Stopped, UsageError
from common.report import Report, check_folder

# The status of a rank after a pass over a global batch. The highest of all ranks decides.
DONE, AGAIN, STOP, CANNOT_FIT = range(4)

BUCKET_RATIO = (
    1.2  # utterances whose lengths differ by less than 20 % share a limit of the micro-batch size
)
# for an utterance alone in its micro-batch: another process may have taken the memory for a moment
TRIES_OF_ONE = 3


@dataclass(frozen=True)
class Task:
    """All that the loop knows of a recipe.

    `compute_loss(model, batch)` returns {term: sum over the batch}; a term without an entry in
    `loss_weights` is not trained. `evaluate(model, batches)` returns {name: (numerator,
    denominator)}, so that the results of several ranks add up. `model_info` and `run_info` are
    dataclasses, which are saved with all weights: what it takes to rebuild the model, and what else
    later commands must know of the run. The weights of the evaluation with the lowest `metric`, or
    the highest with `higher_is_better`, are kept as best.safetensors; of equal ones the first.

    `fit(model, data)` sets what a new model takes from the training data, such as the statistics of
    its features. `train` calls it once, before the model moves to its device and gets the weights
    of --init_from; not for a resumed run, and not in a dry run. `freeze(model)` is what
    --freeze_encoder does, for the advice of a dry run. `learning_rate` is the peak rate unless
    --learning_rate is given. `checkpointed` and `compiled` are the layer types for
    --gradient_checkpointing and --torch_compile. With `evaluate_first`, a new run evaluates the
    model before its first update. Without `decay_embeddings`, embeddings have no weight decay.
    `betas` are AdamW's."""

    name: str
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]]
    loss_weights: dict[str, float]
    evaluate: Callable[[torch.nn.Module, Iterable[dict]], dict[str, tuple[float, float]]]
    model_info: object
    run_info: object
    metric: str
    higher_is_better: bool = False
    fit: Callable[[torch.nn.Module, object], None] | None = None
    freeze: Callable[[torch.nn.Module], None] | None = None
    learning_rate: float | None = None
    checkpointed: tuple[type, ...] = ()
    compiled: tuple[type, ...] = ()
    evaluate_first: bool = False
    decay_embeddings: bool = True
    betas: tuple[float, float] = optim.BETAS

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another one."""
        return value > other if self.higher_is_better else value < other


@dataclass(frozen=True)
class Run:
    """A run that has begun: where it computes, the checkpoint that it resumes (or None), and the
    weights of --init_from (or None); `train` empties both. `locks` hold the folders as long as they
    exist. `planned` is what `planner` returns for --dry_run and --verify_gpu, else None."""

    setup: Setup
    resumed: checkpoint.Saved | None = None
    initial: checkpoint.Saved | None = None
    locks: list = field(default_factory=list)
    planned: tuple | None = None

    def model_device(self) -> contextlib.AbstractContextManager:
        """Make the model, and read released weights, in this context. In a dry run they are on the
        device "meta", where they take neither memory nor time; otherwise on the CPU."""
        return torch.device("meta") if self.planned is not None else contextlib.nullcontext()


def begin(args, name: str) -> Run:
    """Starts a run: device and ranks, the locks on its folders, the checkpoint to resume from. From
    here on `args` is read-only. Raises `UsageError` and `RunError`."""
    planned = planner(args) if options.plans(args) else None
    errors.Output.optional = not planned  # output that cannot be written does not end a training
    setup = Setup(torch.device("meta")) if planned else device.setup(args)
    locks = []
    if setup.ranks.first and not planned:
        check_folder(args.log_dir)
        folders = {args.checkpoint_dir: "--checkpoint_dir", args.log_dir: "--log_dir"}
        locks = [checkpoint.lock_folder(folder, flag) for folder, flag in folders.items()]
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, name)
    initial = None
    if args.init_from:
        initial = checkpoint.read_weights(args.init_from, name, "--init_from")
    options.freeze(args)
    return Run(setup, resumed, initial, locks, planned)


def planner(args) -> tuple:
    """The package dry_run, and the card that is planned for: None if --verify_gpu finds none.
    Raises `UsageError`."""
    import dry_run

    if device.torchrun("WORLD_SIZE", 1) > 1:
        raise UsageError("--dry_run and --verify_gpu plan for one GPU: start them without torchrun")
    return dry_run, dry_run.choose_card(args.dry_run, args.device, UsageError)


@dataclass
class Outcome:
    """The result of one pass over a global batch's micro-batches. `sums`: one value per loss term, on the
    device."""

    sums: torch.Tensor | None = None
    failed: dict | None = None  # the micro-batch that did not fit
    reason: str = ""
    stopped: bool = False


def run_global_batch(
    model: torch.nn.Module,
    micro_batches: list[dict],
    totals: dict[str, float],
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]],
    loss_weights: dict[str, float],
    setup: Setup,
    scaler: torch.amp.GradScaler | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Forward and backward of a global batch, a pure function of its arguments. Gradients add up in the
    parameters.

    `totals`: the number of targets of each term in the whole global batch, on all ranks. `compute_loss`
    and `loss_weights` are those of a `Task`. If a micro-batch runs out of memory, the outcome says
    so; any other error passes through."""
    sums = None
    batches = to_device(micro_batches, setup.device)
    for number in range(len(micro_batches)):
        failure = None
        try:
            batch = next(batches)
            with setup.autocast():
                terms = compute_loss(model, batch)
                loss = sum(
                    loss_weights[name] * term / totals[name]
                    for name, term in terms.items()
                    if totals.get(name)
                )
            if isinstance(loss, torch.Tensor):  # or no term has a target in the whole global batch
                (scaler.scale(loss) if scaler else loss).backward()
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


def length_bucket(batch: dict) -> int:
    """The length bucket of a batch's longest utterance."""
    return math.ceil(math.log(max(0.1, *batch["seconds"])) / math.log(BUCKET_RATIO))


def cut_to_fit(micro_batches: list[dict], limits: dict[int, int]) -> list[dict]:
    """Cuts micro-batches down to the sizes that are known to fit: `limits`, by length bucket, also
    for longer ones."""
    pieces = []
    for batch in micro_batches:
        bucket, size = length_bucket(batch), len(batch["names"])
        limit = min((limit for known, limit in limits.items() if known <= bucket), default=size)
        pieces += split_batch(batch, limit) if limit < size else [batch]
    return pieces


def start_progress(resumed: checkpoint.Saved | None = None) -> dict:
    """The progress of a run: plain numbers and lists, saved with every checkpoint."""
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
        "bad_batches": 0,
        "bad_in_a_row": 0,
        "skipped_files": 0,
        "limits": {},
    }
    return {**progress, **(resumed.state["progress"] if resumed else {})}


def place_in_data(progress: dict, global_batches: GlobalBatches) -> None:
    """Sets the position for this run's data and global batch size. If the data or their order have
    changed, the epoch starts from its beginning, which is said. If the global batch size has changed, the
    rest of the epoch is cut into new global batches."""
    epoch, data, global_batch_size = (
        f"epoch {progress['epoch'] + 1}",
        global_batches.data.fingerprint(),
        global_batches.global_batch_size,
    )
    changed = ""
    if progress["data"] not in ("", data):
        changed = "the training data have"
    elif progress["order"] not in ("", global_batches.order(progress["epoch"])):
        changed = "the seed, or the length of the utterances (speed, padding), has"
    if changed:
        if progress["global_batch"] or progress["done"]:
            print(f"{changed} changed since the checkpoint: {epoch} starts from its beginning")
        progress.update(global_batch=0, done=[], origin=[progress["step"], progress["epoch"]])
    elif progress["global_batch"] and progress["global_batch_size"] != global_batch_size:
        before = progress["global_batch_size"]
        print(
            f"an update had {before} utterances and now has {global_batch_size}: the rest of {epoch} is"
            " cut anew"
        )
        progress.update(
            done=[*progress["done"], [before, progress["global_batch"]]], global_batch=0
        )
    progress.update(data=data, global_batch_size=global_batch_size)


@dataclass
class Training:
    """The state of a run in training, which the functions below act on."""

    args: object
    setup: Setup
    task: Task
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: optim.Schedule
    scaler: torch.amp.GradScaler | None
    global_batches: GlobalBatches
    eval_batches: EvalBatches
    progress: dict
    report: Report
    utilisation: gpu.GpuUtilisation
    last_saved: int = -1
    caught: int = 0  # a signal's number
    skipped: set[str] = field(default_factory=set)  # files
    said: bool = False  # that there is no GPU utilisation
    # Since the last report: when it was, seconds spent waiting for data, utterances, micro-batches
    # since empty_cache.
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    utterances: int = 0
    micro_batches: int = 0


def train(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> dict:
    """Trains until `args.max_steps`, `args.num_epochs` or early stopping, and returns the progress.
    After a signal it raises `Stopped`, for a bad file `DataError`, and `RunError` if the run cannot
    continue; what was reached until then is saved."""
    if run.planned:
        sys.exit(plan(args, *run.planned, model, task, global_batches))
    setup, ranks, resumed = run.setup, run.setup.ranks, run.resumed
    prepare(args, run, model, task, global_batches.data)
    optimizer = optim.make_optimizer(
        model,
        args.learning_rate or task.learning_rate,
        args.weight_decay,
        args.optimizer,
        args.use_cpu_offload,
        task.decay_embeddings,
        task.betas,
    )
    scaler, progress = setup.grad_scaler(), start_progress(resumed)
    if resumed:
        optim.load_optimizer_state(optimizer, model, resumed.state["optimizer"])
        if scaler and resumed.state["scaler"]:
            scaler.load_state_dict(resumed.state["scaler"])
    place_in_data(progress, global_batches)
    steps = global_batches.total_steps(args, progress["origin"])
    schedule = optim.Schedule(optimizer, args.lr_schedule, steps, args.warmup_steps)
    schedule.set(progress["step"])
    if resumed and len(resumed.state["rng"]) > ranks.rank:
        set_rng_state(resumed.state["rng"][ranks.rank], setup.device)
    elif ranks.size > 1:
        torch.manual_seed(
            args.seed + 1000 * ranks.rank + progress["step"]
        )  # each rank has its own dropout
    prepare_folders(args, run, progress, task.evaluate_first)
    report = Report(args.log_dir, progress["step"], steps, args.tensorboard, enabled=ranks.first)
    model.train()
    training = Training(
        args=args,
        setup=setup,
        task=task,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        scaler=scaler,
        global_batches=global_batches,
        eval_batches=eval_batches,
        progress=progress,
        report=report,
        utilisation=gpu.GpuUtilisation(setup.device),
        last_saved=progress["step"] if resumed else -1,
    )
    for saved in (resumed, run.initial):
        # All is copied. Views of a file would keep its disk space after --keep_last has removed it.
        if saved:
            saved.forget_values()
    with watch_signals(training), contextlib.closing(report):
        return train_global_batches(training)


def plan(
    args, dry_run, card, model: torch.nn.Module, task: Task, global_batches: GlobalBatches
) -> int:
    """--dry_run and --verify_gpu: predicts the peak of GPU memory by `run_global_batch` on tensors
    without values. Prints the answer and returns the exit status. Raises `DataError` and
    `RunError`."""
    if card is None:
        return preflight.verify(args, model)
    setup = Setup(dtype=device.pick_dtype(args.mixed_precision, card.capability)[0])
    items = dry_run.longest_items(
        global_batches.dataset,
        math.ceil(global_batches.total_steps(args) / global_batches.per_epoch),
        DataError,
    )

    def step(batches: list[dict]) -> None:
        outcome = run_global_batch(
            model, batches, batches[0]["counts"], task.compute_loss, task.loss_weights, setup
        )
        if outcome.failed:
            raise dry_run.CannotPlan(outcome.reason)

    training = dry_run.Training(
        model,
        step,
        items,
        len(global_batches.data),
        functools.partial(optim.state_bytes, model),
        (
            functools.partial(memory.checkpoint_layers, model, task.checkpointed)
            if task.checkpointed
            else None
        ),
        global_batches.dataset.collate,
        task.compute_loss,
    )
    if args.verify_gpu:
        return preflight.verify(args, model, lambda: training.needs(args, card))
    return training.answer(args, card, str(setup.dtype or torch.float32), RunError)


@contextlib.contextmanager
def watch_signals(run: Training) -> Iterator[None]:
    """Records SIGTERM, SIGINT and SIGHUP (a closed terminal; ignored under nohup) in `run.caught`,
    so that the run can save itself. A second SIGINT interrupts at once."""

    def catch(number: int, frame) -> None:
        if run.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.caught = number

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.pop()
    before = {}
    with contextlib.suppress(
        ValueError
    ):  # not in the main thread, where Python delivers no signals
        before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(args, run: Run, model: torch.nn.Module, task: Task, data) -> None:
    """The model as it will be trained: fitted to the data or with saved weights, on its device,
    with compiled and checkpointed layers."""
    if run.resumed:
        checkpoint.load_weights(model, run.resumed.model)
    elif task.fit:
        task.fit(model, data)
    if run.initial:
        checkpoint.initialise(model, run.initial.model, args.init_from)
    model.to(run.setup.device)
    if args.torch_compile:
        compiling.compile_layers(model, task.compiled)
    if args.gradient_checkpointing:
        memory.checkpoint_layers(model, task.checkpointed)


def prepare_folders(args, run: Run, progress: dict, evaluate_first: bool) -> None:
    """Moves an earlier run in the folders aside or, if the run continues from an older checkpoint,
    what is newer. A resumed run whose best weights are not in the folder evaluates at once, so that
    they are; a new run with `evaluate_first`."""
    has_best = False
    if run.setup.ranks.first:
        try:
            if run.resumed is not None and checkpoint.continues(args.resume, args.checkpoint_dir):
                checkpoint.branch(args.checkpoint_dir, args.log_dir, progress["step"])
                has_best = checkpoint.best_step(args.checkpoint_dir) >= progress["best_step"]
            else:
                checkpoint.make_room(args.checkpoint_dir, args.log_dir)
        except OSError as error:
            raise errors.cannot_write(args.checkpoint_dir, error, "--checkpoint_dir") from None
    (has_best,) = run.setup.ranks.reduce([int(has_best)], "max")
    if not has_best:
        progress.update(best=None, last_evaluation=-1 if run.resumed or evaluate_first else 0)


def train_global_batches(run: Training) -> dict:
    """Window after global batch, with evaluations and checkpoints in between, until the run is
    finished."""
    progress, ranks = run.progress, run.setup.ranks
    source = run.global_batches.iterate(
        progress["epoch"], progress["global_batch"], progress["done"]
    )
    while True:
        if progress["step"] == 0 and is_finished(run.args, progress):
            reasons = (
                f"{progress['bad_batches']} global batches had a non-finite loss,"
                f" {progress['skipped_files']} files were skipped"
            )
            raise RunError(f"no update was made: {reasons}; the messages above name the files")
        if evaluation_is_due(run):
            evaluate_now(run)
        finished, step, every = (
            is_finished(run.args, progress),
            progress["step"],
            run.args.save_every,
        )
        if step != run.last_saved and (finished or (every and step and step % every == 0)):
            save(run)
        if finished and run.report.problem:
            raise run.report.problem
        if finished:
            return progress
        started, error = time.monotonic(), run.report.problem
        try:
            global_batch = next(source)
        except Failure as failure:
            error = failure
        run.waited += time.monotonic() - started
        run.utilisation.sample()
        caught, failed = ranks.reduce([run.caught, int(error is not None)], "max")
        if failed:
            save(run)
            raise error or RunError("another rank could not continue: see its message")
        if caught:
            raise saved_and_stopped(run, caught)
        try:
            train_global_batch(run, global_batch)
        except RunError:
            save(run)  # the weights are those from before the global batch
            raise


def finish(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    eval_batches: EvalBatches,
    report_results: Callable[[str], None],
) -> None:
    """On the first rank: loads the best weights, or the average of checkpoints if that is not
    worse, calls `report_results(which weights these are)`, and prints where the results are and how
    much memory the run took."""
    if not run.setup.ranks.first:
        return

    def score() -> float:
        return mean_values(task, task.evaluate(model, eval_batches.whole()))[task.metric]

    with torch.no_grad(), run.setup.autocast():
        report_results(checkpoint.use_best(args, model, task, score))
    print(
        f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves and all results:"
        f" {args.log_dir}"
    )
    print(memory.peak(run.setup.device))


def is_finished(args, progress: dict) -> bool:
    ends = {
        "step": args.max_steps,
        "epoch": args.num_epochs,
        "evaluations_without_gain": args.early_stopping_patience,
    }
    return any(end and progress[name] >= end for name, end in ends.items())


def evaluation_is_due(run: Training) -> bool:
    progress, every = run.progress, run.args.eval_every
    if progress["last_evaluation"] == progress["step"]:
        return False
    epoch_begins = progress["global_batch"] == 0 and not progress["done"]
    return is_finished(run.args, progress) or (
        progress["step"] % every == 0 if every else epoch_begins
    )


def train_global_batch(run: Training, global_batch: GlobalBatch) -> None:
    """One global batch: forward and backward until it fits, then the update. Then the position
    advances."""
    args, progress, ranks = run.args, run.progress, run.setup.ranks
    names = list(run.task.loss_weights)
    own = [sum(batch["counts"][name] for batch in global_batch.micro_batches) for name in names]
    own_names = [name for batch in global_batch.micro_batches for name in batch["names"]]
    *counts, utterances, skipped = ranks.reduce([*own, len(own_names), len(global_batch.skipped)])
    note_skipped(run, global_batch, skipped)
    if utterances:
        totals = dict(zip(names, counts, strict=True))
        buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
        sums = pass_until_it_fits(run, global_batch, totals, buffers)
        terms, norm = reduce_gradients(run, sums)
        if not all(map(math.isfinite, terms)) or (run.scaler is None and not math.isfinite(norm)):
            run.optimizer.zero_grad()
            restore(buffers)
            note_bad_batch(run, own_names, terms, norm)
        else:
            made = apply_update(run, norm)
            progress["bad_in_a_row"] = 0
            progress["utterances"] += utterances
            run.utterances += utterances
            if made:
                progress["step"] += 1
                run.schedule.set(progress["step"])
                averages = {
                    name: value / max(1, totals[name])
                    for name, value in zip(names, terms, strict=True)
                }
                note_update(run, averages, norm)
    progress["global_batch"] = global_batch.number + 1
    if global_batch.last:
        progress.update(epoch=global_batch.epoch + 1, global_batch=0, done=[])
    run.micro_batches += len(global_batch.micro_batches)
    if (
        run.setup.device.type == "cuda"
        and args.empty_cache_every
        and run.micro_batches >= args.empty_cache_every
    ):
        run.micro_batches = 0
        torch.cuda.empty_cache()


def pass_until_it_fits(
    run: Training, global_batch: GlobalBatch, totals: dict, buffers: list
) -> torch.Tensor:
    """Forward and backward of the global batch, repeated in smaller micro-batches as long as a rank runs
    out of memory. Returns the sums of the loss terms. Every attempt starts from the same gradients,
    buffers and random state."""
    progress, setup, ranks = run.progress, run.setup, run.setup.ranks
    rng, failures = rng_state(setup.device), Counter()

    def stop() -> bool:
        run.utilisation.sample()
        return run.caught != 0

    while True:
        micro_batches = cut_to_fit(global_batch.micro_batches, progress["limits"])
        outcome = run_global_batch(
            run.model,
            micro_batches,
            totals,
            run.task.compute_loss,
            run.task.loss_weights,
            run.setup,
            run.scaler,
            stop,
        )
        status = DONE
        if outcome.stopped:
            status = STOP
        elif outcome.failed is not None:
            status = (
                AGAIN if learn_limit(outcome.failed, progress["limits"], failures) else CANNOT_FIT
            )
        worst, caught = ranks.reduce([status, run.caught], "max")
        if worst == DONE:
            zero = torch.zeros(len(run.task.loss_weights), device=setup.device)
            return zero if outcome.sums is None else outcome.sums
        run.optimizer.zero_grad()
        restore(buffers)
        set_rng_state(rng, setup.device)
        memory.free_memory(setup.device)
        if worst == STOP:
            raise saved_and_stopped(run, caught)
        if worst == CANNOT_FIT:
            other = "an utterance of another rank does not fit into memory: see its message"
            raise RunError(too_long(outcome) if status == CANNOT_FIT else other)
        for other in ranks.gather(progress["limits"]):  # all ranks keep the same limits
            for bucket, size in other.items():
                progress["limits"][bucket] = min(size, progress["limits"].get(bucket, size))
        if status == AGAIN:
            size, seconds = len(outcome.failed["names"]), max(outcome.failed["seconds"])
            others = gpu.gpu_processes() if setup.device.type == "cuda" else ""
            text = (
                f"out of memory with {size} x {seconds:.1f} s: the global batch is repeated in smaller"
                " micro-batches"
            )
            run.report.say(text + (f"; also on this GPU: {others}" if others else ""))


def learn_limit(failed: dict, limits: dict[int, int], failures: Counter) -> bool:
    """Halves the limit for a failed micro-batch's length. False if a single utterance has failed
    `TRIES_OF_ONE` times."""
    size = len(failed["names"])
    if size > 1:
        limits[length_bucket(failed)] = size // 2
        return True
    failures[failed["names"][0]] += 1
    return failures[failed["names"][0]] < TRIES_OF_ONE


def too_long(outcome: Outcome) -> str:
    name, seconds = outcome.failed["names"][0], outcome.failed["seconds"][0]
    others = gpu.gpu_processes()
    advice = (
        f"reject such utterances with --max_duration {0.9 * seconds:.1f}, or take a smaller model"
    )
    if others:
        advice += f"; other processes on this GPU: {others}"
    problem = f"{name} ({seconds:.1f} s) does not fit into memory even alone ({outcome.reason})"
    return f"{problem}: use --gradient_checkpointing or --mixed_precision, {advice}"


def restore(buffers: list) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def reduce_gradients(run: Training, sums: torch.Tensor) -> tuple[list[float], float]:
    """Sums gradients and loss terms over the ranks. Returns terms and gradient norm: a global batch's
    only transfer to the host."""
    ranks = run.setup.ranks
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    if ranks.size > 1:
        ranks.sum_gradients(
            parameters, ranks.reduce([int(p.grad is not None) for p in parameters], "max")
        )
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    *terms, norm = torch.cat([sums, norm.to(sums.device).reshape(1)]).tolist()
    return ranks.reduce(terms), norm / (run.scaler.get_scale() if run.scaler else 1.0)


def apply_update(run: Training, norm: float) -> bool:
    """Clips the gradient and updates the weights. Returns False if fp16's scaler skips the update:
    gradients overflow."""
    optimizer, scaler, limit = run.optimizer, run.scaler, run.args.max_grad_norm
    if scaler:
        scaler.unscale_(optimizer)
    if limit and norm > limit:
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        torch._foreach_mul_(gradients, limit / norm)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < 1:
            reason = (
                "the gradients overflow at any scale; use --bf16, --no_mixed_precision or a lower"
                " --learning_rate"
            )
            raise RunError(
                f"fp16's loss scale fell below 1 at step {run.progress['step']}: {reason}"
            )
    else:
        optimizer.step()
    optimizer.zero_grad()
    return scaler is None or math.isfinite(norm)


def note_update(run: Training, averages: dict[str, float], norm: float) -> None:
    """Updates the progress bar, and writes a line of metrics every `log_every` updates."""
    args, step = run.args, run.progress["step"]
    elapsed = max(1e-9, time.monotonic() - run.since)
    loss = sum(run.task.loss_weights[name] * value for name, value in averages.items())
    rate, used = run.optimizer.param_groups[0]["lr"], memory.memory_used(run.setup.device)
    speed, waiting, utilisation = (
        run.utterances / elapsed,
        run.waited / elapsed,
        run.utilisation.mean(),
    )
    run.report.progress(step, loss, rate, speed, used, waiting, utilisation)
    if run.setup.device.type == "cuda" and run.utilisation.problem and not run.said:
        run.said = True
        run.report.say(f"no GPU utilisation in the reports ({run.utilisation.problem})")
    if step % args.log_every == 0:
        values = {
            "loss": loss,
            **{f"loss_{name}": value for name, value in averages.items()},
            "learning_rate": rate,
            "gradient_norm": norm,
            "utterances_per_second": speed,
            "memory_bytes": used,
            "data_wait_share": waiting,
            "gpu_utilisation": utilisation,
        }
        values = {f"train/{name}": value for name, value in values.items() if value is not None}
        run.report.write(step, epoch=run.progress["epoch"], **values)
        run.since, run.waited, run.utterances = time.monotonic(), 0.0, 0


def note_skipped(run: Training, global_batch: GlobalBatch, skipped: int) -> None:
    run.progress["skipped_files"] += skipped
    for name, reason in (
        itertools.chain(*run.setup.ranks.gather(global_batch.skipped)) if skipped else ()
    ):
        if name not in run.skipped:  # or an earlier epoch has reported it
            run.skipped.add(name)
            run.report.say(f"skipped: {reason}")
            run.report.write(run.progress["step"], event="skipped", file=name, reason=reason)


def note_bad_batch(run: Training, names: list[str], terms: list[float], norm: float) -> None:
    """Counts and lists a global batch whose loss or gradient is not finite. It has not changed the
    weights."""
    progress = run.progress
    progress["bad_batches"] += 1
    progress["bad_in_a_row"] += 1
    names = list(itertools.chain(*run.setup.ranks.gather(names)))
    values = ", ".join(
        f"{name} {value:g}" for name, value in zip(run.task.loss_weights, terms, strict=True)
    )
    text = f"bad global batch {progress['bad_batches']}: loss {values}, gradient norm {norm:g}"
    run.report.say(f"{text}: skipped; its files: {', '.join(names)}")
    run.report.write(
        progress["step"], event="bad_batch", files=names, terms=[str(value) for value in terms]
    )
    if progress["bad_in_a_row"] >= run.args.max_bad_batches:
        count, progress["bad_in_a_row"] = progress["bad_in_a_row"], 0
        reason = (
            f"{count} global batches in a row had a non-finite loss, and the weights from before them are"
            " saved"
        )
        raise RunError(f"{reason}: try a lower --learning_rate, --bf16 or --no_mixed_precision")


def evaluate_now(run: Training) -> None:
    """Evaluates without gradients, and keeps the weights if they are the best. Random state and
    mode stay as they were."""
    args, model, progress, setup = run.args, run.model, run.progress, run.setup

    def polled() -> Iterable[dict]:
        for batch in run.eval_batches:
            if run.caught:
                raise Stopped(
                    "during the evaluation, whose results are discarded", 128 + run.caught
                )
            yield batch

    state, was_training, results = rng_state(setup.device), model.training, {}
    started = time.monotonic()
    model.eval()
    try:
        with contextlib.suppress(Stopped), torch.no_grad(), setup.autocast():
            results = run.task.evaluate(model, polled())
    finally:
        model.train(was_training)
        set_rng_state(state, setup.device)
    (caught,) = setup.ranks.reduce([run.caught], "max")
    if caught:
        raise saved_and_stopped(run, caught)
    sums = setup.ranks.reduce([float(value) for pair in results.values() for value in pair])
    values = mean_values(
        run.task, dict(zip(results, zip(sums[::2], sums[1::2], strict=True), strict=True))
    )
    value, best = values[run.task.metric], progress["best"]
    improved = best is None or run.task.is_better(value, best)
    progress["last_evaluation"] = progress["step"]
    progress["evaluations"].append([progress["step"], values[run.task.metric]])
    progress["evaluations_without_gain"] = (
        0 if improved else progress["evaluations_without_gain"] + 1
    )
    if improved:
        progress.update(best=values[run.task.metric], best_step=progress["step"])
        if setup.ranks.first:
            summary = {"step": progress["step"], "epoch": progress["epoch"], **values}
            checkpoint.save_weights(
                args.checkpoint_dir / "best.safetensors", model, run.task, summary
            )
    shown = [f"{name} {checkpoint.shown(name, value)}" for name, value in values.items()] + [
        "best so far"
    ] * improved
    run.report.say(
        f"evaluation at step {progress['step']} (epoch {progress['epoch'] + 1}): {'  '.join(shown)}"
    )
    run.report.write(progress["step"], **{f"eval/{name}": value for name, value in values.items()})
    run.report.draw(run.task.metric)
    run.since += time.monotonic() - started  # evaluation does not count as training time


def mean_values(task: Task, results: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The values of an evaluation's (numerator, denominator), and the weighted loss if all of its
    terms are there."""
    values = {name: total / max(1.0, count) for name, (total, count) in results.items()}
    if task.loss_weights.keys() <= values.keys():
        values["loss"] = sum(weight * values[name] for name, weight in task.loss_weights.items())
    return values


def save(run: Training) -> None:
    """Writes a checkpoint of the run as it is now, with the random state of every rank."""
    states = run.setup.ranks.gather(rng_state(run.setup.device))
    run.last_saved = run.progress["step"]
    run.progress["order"] = run.global_batches.order(run.progress["epoch"])
    if run.setup.ranks.first:
        flags = {
            name: value
            for name, value in vars(run.args).items()
            if name not in ("given", "commands")
        }
        content = {
            "recipe": run.task.name,
            "model_info": asdict(run.task.model_info),
            "run_info": asdict(run.task.run_info),
            "progress": run.progress,
            "rng": states,
            "model": run.model.state_dict(),
            "optimizer": optim.optimizer_state(run.optimizer, run.model),
            "scaler": run.scaler.state_dict() if run.scaler else None,
            "torch": str(torch.__version__),
            "args": {
                key: value if isinstance(value, int | float | str | None) else str(value)
                for key, value in flags.items()
            },
        }
        checkpoint.save(run.args.checkpoint_dir, run.progress["step"], content, run.args.keep_last)


def saved_and_stopped(run: Training, caught: int) -> Stopped:
    save(run)
    name, step = signal.Signals(caught).name, run.progress["step"]
    text = (
        f"stopped by {name}: step {step} is saved in {run.args.checkpoint_dir}; --resume auto"
        " continues from there"
    )
    return Stopped(text, 128 + caught)
