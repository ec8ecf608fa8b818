"""Mixed-precision training loop with exact gradient accumulation, recovery from out-of-memory errors, and a checkpoint on
SIGINT or SIGTERM.

    task = Task(RECIPE, compute_loss, loss_weights, evaluate, metadata)   # all that the loop knows of a recipe
    run = begin(args, RECIPE)                                             # device, lock, checkpoint to resume from
    train(args, run, model, task, windows, eval_batches)
    finish(args, run, model, task, eval_batches, report_results)

An update's batch is a window: batch_size x gradient_accumulation_steps x ranks utterances, in micro-batches. The targets
of every loss term are counted before the first forward, and the loop back-propagates the sum over terms of
weight * (sum over the window) / (count in the window), so the gradient does not depend on how the window is cut."""

import itertools
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from common import checkpoint, compiling, device, gpu, memory, optim, options
from common.batches import EvalBatches, Window, Windows, split_batch, to_device
from common.device import Setup, rng_state, set_rng_state
from common.errors import Failure, RunError, Stopped
from common.report import Report, check_folder

# The status of a rank after a pass over a window. The highest of all ranks decides.
DONE, AGAIN, STOP, CANNOT_FIT = range(4)

BUCKET_RATIO = 1.2  # utterances whose lengths differ by less than 20 % share a limit of the micro-batch size
TRIES_OF_ONE = 3  # for an utterance alone in its micro-batch: another process may have taken the memory for a moment


@dataclass(frozen=True)
class Task:
    """All that the loop knows of a recipe.

    `compute_loss(model, batch)` returns {term: sum over the batch}; a term without an entry in `loss_weights` is not
    trained. `evaluate(model, batches)` returns {name: (numerator, denominator)}, so that the results of several ranks add
    up; the weights with the lowest `metric` are kept as best.safetensors. `metadata` is what it takes to rebuild the
    model; it is saved with all weights. `learning_rate` is the peak rate unless --learning_rate is given. `checkpointed`
    and `compiled` are the layer types for --gradient_checkpointing and --torch_compile."""

    name: str
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]]
    loss_weights: dict[str, float]
    evaluate: Callable[[torch.nn.Module, Iterable[dict]], dict[str, tuple[float, float]]]
    metadata: dict
    metric: str = "cer"
    learning_rate: float | None = None
    checkpointed: tuple[type, ...] = ()
    compiled: tuple[type, ...] = ()


@dataclass(frozen=True)
class Run:
    """A run that has begun: where it computes, the content of the checkpoint that it resumes (or None), and the weights
    of --init_from (or None). `lock` holds the checkpoint folder as long as it exists."""

    setup: Setup
    resumed: dict | None = None
    initial: dict | None = None
    lock: object = None


def begin(args, name: str) -> Run:
    """Starts a run: device, precision and ranks, the lock on its folder, the checkpoint to resume from. From here on
    `args` is read-only. Raises `UsageError` and `RunError`."""
    setup = device.setup(args)
    lock = checkpoint.lock_folder(args.checkpoint_dir) if setup.ranks.first else None
    check_folder(args.log_dir)
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, name)
    initial = checkpoint.read_weights(args.init_from, name)[0] if args.init_from else None
    options.freeze(args)
    return Run(setup, resumed, initial, lock)


class SignalWatch:
    """Records SIGTERM and SIGINT, so that the run can save itself. A second SIGINT interrupts at once."""

    def __enter__(self):
        self.caught: int | None = None
        try:
            self.before = {number: signal.signal(number, self._catch) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not in the main thread, where Python delivers no signals
            self.before = {}
        return self

    def _catch(self, number, frame):
        if self.caught is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Interrupted(Exception):
    """A signal arrived during an evaluation, whose results are discarded."""


@dataclass
class Outcome:
    """The result of one pass over a window's micro-batches. `sums`: one value per loss term, on the device."""

    sums: torch.Tensor | None = None
    failed: dict | None = None  # the micro-batch that did not fit
    reason: str = ""
    stopped: bool = False


def run_window(
    model: torch.nn.Module,
    micro_batches: list[dict],
    totals: dict[str, float],
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]],
    loss_weights: dict[str, float],
    setup: Setup,
    scaler: torch.amp.GradScaler | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Forward and backward of a window. Gradients add up in the parameters. A pure function of its arguments, which the
    benchmarks call too.

    `totals`: the number of targets of each term in the whole window, on all ranks. `compute_loss(model, batch)` returns
    the sum of each term over the micro-batch; a term without a weight is not trained. If a micro-batch runs out of
    memory, the outcome says so; any other error passes through."""
    sums = None
    batches = to_device(micro_batches, setup.device)
    for number in range(len(micro_batches)):
        failure = None
        try:
            batch = next(batches)
            with setup.autocast():
                terms = compute_loss(model, batch)
                loss = sum(loss_weights[name] * term / totals[name] for name, term in terms.items() if totals.get(name))
            (scaler.scale(loss) if scaler else loss).backward()
            detached = torch.stack([terms[name].detach() for name in loss_weights])
            sums = detached if sums is None else sums + detached
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            failure = str(error).strip().split("\n")[0]
        # Here, outside the handler, the traceback no longer keeps the failed step's tensors alive.
        batch = terms = loss = detached = None
        if failure is not None:
            batches.close()
            return Outcome(failed=micro_batches[number], reason=failure)
        if stop():
            batches.close()
            return Outcome(stopped=True)
    return Outcome(sums=sums)


def length_bucket(batch: dict) -> int:
    """The length bucket of a batch's longest utterance."""
    return math.ceil(math.log(max(0.1, *batch["seconds"])) / math.log(BUCKET_RATIO))


def cut_to_fit(micro_batches: list[dict], limits: dict[int, int]) -> list[dict]:
    """Cuts micro-batches down to the sizes that are known to fit. `limits` maps a length bucket to a size, which also
    limits longer utterances."""
    pieces = []
    for batch in micro_batches:
        bucket = length_bucket(batch)
        limit = min((size for known, size in limits.items() if known <= bucket), default=len(batch["names"]))
        pieces += split_batch(batch, limit) if limit < len(batch["names"]) else [batch]
    return pieces


def start_progress(resumed: dict | None = None) -> dict:
    """The progress of a run: plain numbers and lists, saved with every checkpoint."""
    progress = {
        "step": 0, "epoch": 0, "window": 0, "done": [], "window_size": 0, "data": "",
        "utterances": 0, "best": None, "best_step": 0, "last_evaluation": 0, "evaluations": [], "evaluations_without_gain": 0,
        "bad_windows": 0, "bad_in_a_row": 0, "skipped_files": 0, "limits": {},
    }  # fmt: skip
    return {**progress, **(resumed["progress"] if resumed else {})}


def place_in_data(progress: dict, window_size: int, data: str) -> None:
    """Sets the position for this run's data and window size. If the data have changed, the epoch starts from its
    beginning. If the window size has changed, the rest of the epoch is cut into new windows; no utterance is repeated or
    left out."""
    epoch = f"epoch {progress['epoch'] + 1}"
    if progress["data"] not in ("", data):
        print(f"the training data have changed since the checkpoint: {epoch} starts from its beginning")
        progress.update(window=0, done=[])
    elif progress["window"] and progress["window_size"] != window_size:
        print(
            f"an update had {progress['window_size']} utterances and now has {window_size}: the rest of {epoch} is cut anew"
        )
        progress.update(done=[*progress["done"], [progress["window_size"], progress["window"]]], window=0)
    progress.update(data=data, window_size=window_size)


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
    eval_batches: EvalBatches
    progress: dict
    report: Report
    watch: SignalWatch
    utilisation: gpu.GpuUtilisation
    last_saved: int = -1
    skipped: set[str] = field(default_factory=set)  # files
    said: set[str] = field(default_factory=set)  # messages that are printed once
    # Since the last report: when it was, seconds spent waiting for data, utterances, micro-batches since empty_cache.
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    utterances: int = 0
    micro_batches: int = 0


def train(args, run: Run, model: torch.nn.Module, task: Task, windows: Windows, eval_batches: EvalBatches) -> dict:
    """Trains until `args.max_steps`, `args.num_epochs` or early stopping, and returns the progress. Moves the model to
    the device, and makes optimizer and schedule.

    Raises `Stopped` after a signal, `DataError` for a bad file, `RunError` if the run cannot continue; what was reached
    until then is saved."""
    setup, ranks, resumed = run.setup, run.setup.ranks, run.resumed
    prepare(args, run, model, task)
    optimizer = optim.make_optimizer(
        model, args.learning_rate or task.learning_rate, args.weight_decay, args.optimizer, args.use_cpu_offload
    )
    schedule = optim.Schedule(optimizer, args.lr_schedule, windows.total_steps(args), args.warmup_steps)
    scaler, progress = setup.grad_scaler(), start_progress(resumed)
    if resumed:
        optim.load_optimizer_state(optimizer, model, resumed["optimizer"])
        if scaler and resumed["scaler"]:
            scaler.load_state_dict(resumed["scaler"])
    place_in_data(progress, windows.window_size, windows.data.fingerprint())
    schedule.set(progress["step"])
    if resumed and len(resumed["rng"]) > ranks.rank:
        set_rng_state(resumed["rng"][ranks.rank], setup.device)
    elif ranks.size > 1:
        torch.manual_seed(args.seed + 1000 * ranks.rank + progress["step"])  # each rank has its own dropout
    if resumed:
        resumed.update(model=None, optimizer=None)  # loaded; they would take gigabytes of host memory until the end
    if not (resumed and checkpoint.continues(args.resume, args.checkpoint_dir)):
        # A new run in this folder: its best weights are found here, at the latest when it ends.
        progress.update(best=None, last_evaluation=-1 if resumed else 0)
        if ranks.first:
            checkpoint.make_room(args.checkpoint_dir, args.log_dir)
    report = Report(args.log_dir, progress["step"], windows.total_steps(args), args.tensorboard, enabled=ranks.first)
    utilisation = gpu.GpuUtilisation(setup.device)
    model.train()
    with SignalWatch() as watch:
        training = Training(
            args=args, setup=setup, task=task, model=model, optimizer=optimizer, schedule=schedule, scaler=scaler,
            eval_batches=eval_batches, progress=progress, report=report, watch=watch, utilisation=utilisation,
            last_saved=progress["step"] if resumed else -1,
        )  # fmt: skip
        try:
            return train_windows(training, windows)
        finally:
            utilisation.close()
            report.close()


def prepare(args, run: Run, model: torch.nn.Module, task: Task) -> None:
    """The model as it will be trained: saved weights, device, compiled and checkpointed layers."""
    if run.resumed:
        checkpoint.load_weights(model, run.resumed["model"])
    elif run.initial:
        checkpoint.initialise(model, run.initial, args.init_from)
    model.to(run.setup.device)
    if args.torch_compile:
        compiling.compile_layers(model, task.compiled)
    if args.gradient_checkpointing:
        memory.checkpoint_layers(model, task.checkpointed)


def train_windows(run: Training, windows: Windows) -> dict:
    """Window after window, with evaluations and checkpoints in between, until the run is finished."""
    progress, ranks = run.progress, run.setup.ranks
    source = windows.iterate(progress["epoch"], progress["window"], progress["done"])
    while True:
        if evaluation_is_due(run):
            evaluate_now(run)
        finished = is_finished(run.args, progress)
        if save_is_due(run, finished):
            save(run)
        if finished:
            return progress
        started, window, error = time.monotonic(), None, None
        try:
            window = next(source)
        except Failure as failure:
            error = failure
        run.waited += time.monotonic() - started
        caught, failed = ranks.reduce([run.watch.caught or 0, int(error is not None)], "max")
        if failed:
            save(run)
            raise error or RunError("another rank could not continue: see its message")
        if caught:
            raise saved_and_stopped(run, caught)
        train_window(run, window)


def finish(
    args, run: Run, model: torch.nn.Module, task: Task, eval_batches: EvalBatches, report_results: Callable[[str], None]
) -> None:
    """On the first rank: loads the best weights, or the average of checkpoints if that is not worse, calls
    `report_results(which weights these are)`, and prints where the results are and how much memory the run took."""
    if not run.setup.ranks.first:
        return

    def score() -> float:
        return mean_values(task, task.evaluate(model, eval_batches.whole()))[task.metric]

    with torch.no_grad(), run.setup.autocast():
        weights = checkpoint.use_best(args, model, task.name, task.metadata, score)
        report_results(weights)
    print(f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves and all results: {args.log_dir}")
    print(memory.peak(run.setup.device))


def is_finished(args, progress: dict) -> bool:
    patience = args.early_stopping_patience
    return bool(
        (args.max_steps and progress["step"] >= args.max_steps)
        or (args.num_epochs and progress["epoch"] >= args.num_epochs)
        or (patience and progress["evaluations_without_gain"] >= patience)
    )


def evaluation_is_due(run: Training) -> bool:
    progress, every = run.progress, run.args.eval_every
    if progress["last_evaluation"] == progress["step"]:
        return False
    epoch_begins = progress["window"] == 0 and not progress["done"]
    return is_finished(run.args, progress) or (progress["step"] % every == 0 if every else epoch_begins)


def save_is_due(run: Training, finished: bool) -> bool:
    step, every = run.progress["step"], run.args.save_every
    return run.last_saved != step and bool(finished or (every and step and step % every == 0))


def train_window(run: Training, window: Window) -> None:
    """One window: forward and backward until it fits, then the update. Then the position advances."""
    args, progress, ranks = run.args, run.progress, run.setup.ranks
    names = list(run.task.loss_weights)
    own = [sum(batch["counts"][name] for batch in window.micro_batches) for name in names]
    own_names = [name for batch in window.micro_batches for name in batch["names"]]
    *counts, utterances, skipped = ranks.reduce([*own, len(own_names), len(window.skipped)])
    note_skipped(run, window, skipped)
    if utterances:
        totals = dict(zip(names, counts, strict=True))
        buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
        sums = pass_until_it_fits(run, window, totals, buffers)
        terms, norm = reduce_gradients(run, sums)
        if not all(map(math.isfinite, terms)) or (run.scaler is None and not math.isfinite(norm)):
            run.optimizer.zero_grad()
            restore(buffers)
            note_bad_window(run, own_names, terms, norm)
        else:
            made = apply_update(run, norm)
            progress["bad_in_a_row"] = 0
            progress["utterances"] += utterances
            run.utterances += utterances
            if made:
                progress["step"] += 1
                averages = {name: value / max(1, totals[name]) for name, value in zip(names, terms, strict=True)}
                note_update(run, averages, norm)
    progress["window"] = window.number + 1
    if window.last:
        progress.update(epoch=window.epoch + 1, window=0, done=[])
    run.micro_batches += len(window.micro_batches)
    if run.setup.device.type == "cuda" and args.empty_cache_every and run.micro_batches >= args.empty_cache_every:
        run.micro_batches = 0
        torch.cuda.empty_cache()


def pass_until_it_fits(run: Training, window: Window, totals: dict, buffers: list) -> torch.Tensor:
    """Forward and backward of the window, repeated in smaller micro-batches as long as a rank runs out of memory. Returns
    the sums of the loss terms. Every attempt starts from the same gradients, buffers and random state."""
    progress, setup, ranks = run.progress, run.setup, run.setup.ranks
    rng, failures = rng_state(setup.device), Counter()
    while True:
        micro_batches = cut_to_fit(window.micro_batches, progress["limits"])
        outcome = run_window(run.model, micro_batches, totals, run.task.compute_loss, run.task.loss_weights, run.setup,
                             run.scaler, stop=lambda: run.watch.caught is not None)  # fmt: skip
        status = DONE
        if outcome.stopped:
            status = STOP
        elif outcome.failed is not None:
            status = AGAIN if learn_limit(outcome.failed, progress["limits"], failures) else CANNOT_FIT
        worst, caught = ranks.reduce([status, run.watch.caught or 0], "max")
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
            save(run)
            raise RunError(
                too_long(outcome)
                if status == CANNOT_FIT
                else "an utterance of another rank does not fit into memory: see its message"
            )
        for other in ranks.gather(progress["limits"]):  # all ranks keep the same limits
            for bucket, size in other.items():
                progress["limits"][bucket] = min(size, progress["limits"].get(bucket, size))
        if status == AGAIN:
            size, seconds = len(outcome.failed["names"]), max(outcome.failed["seconds"])
            others = gpu.gpu_processes() if setup.device.type == "cuda" else ""
            run.report.say(
                f"out of memory with {size} x {seconds:.1f} s: the window is repeated in smaller micro-batches"
                + (f"; also on this GPU: {others}" if others else "")
            )


def learn_limit(failed: dict, limits: dict[int, int], failures: Counter) -> bool:
    """Sets the limit for a failed micro-batch's length to half its size. False if a single utterance has failed
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
    return (
        f"{name} ({seconds:.1f} s) does not fit into memory even alone ({outcome.reason}): use --gradient_checkpointing or "
        f"--mixed_precision, reject such utterances with --max_duration {0.9 * seconds:.1f}, or take a smaller model"
        + (f"; other processes on this GPU: {others}" if others else "")
    )


def restore(buffers: list) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def reduce_gradients(run: Training, sums: torch.Tensor) -> tuple[list[float], float]:
    """Sums gradients and loss terms over the ranks. Returns the terms and the gradient norm on the host: the only
    transfer from the device in a window."""
    ranks = run.setup.ranks
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    if ranks.size > 1:
        ranks.sum_gradients(parameters, ranks.reduce([int(p.grad is not None) for p in parameters], "max"))
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    *terms, norm = torch.cat([sums, norm.to(sums.device).reshape(1)]).tolist()
    return ranks.reduce(terms), norm / (run.scaler.get_scale() if run.scaler else 1.0)


def apply_update(run: Training, norm: float) -> bool:
    """Clips the gradient, updates the weights, and advances the schedule if there was an update. With fp16 the scaler
    skips an update whose gradients overflow. Returns whether there was an update."""
    optimizer, scaler, limit = run.optimizer, run.scaler, run.args.max_grad_norm
    if scaler:
        scaler.unscale_(optimizer)
    if limit and norm > limit:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, limit / norm)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < 1:
            raise RunError(
                f"fp16's loss scale fell below 1 at step {run.progress['step']}: the gradients overflow at any scale; "
                "use --bf16, --no_mixed_precision or a lower --learning_rate"
            )
    else:
        optimizer.step()
    optimizer.zero_grad()
    made = scaler is None or math.isfinite(norm)
    if made:
        run.schedule.set(run.progress["step"] + 1)
    return made


def note_update(run: Training, averages: dict[str, float], norm: float) -> None:
    """Updates the progress bar, and writes a line of metrics every `log_every` updates."""
    args, step = run.args, run.progress["step"]
    elapsed = max(1e-9, time.monotonic() - run.since)
    loss = sum(run.task.loss_weights[name] * value for name, value in averages.items())
    rate = run.optimizer.param_groups[0]["lr"]
    used = memory.memory_used(run.setup.device)
    speed, waiting, utilisation = run.utterances / elapsed, run.waited / elapsed, run.utilisation.mean()
    run.report.progress(step, loss, rate, speed, used, waiting, utilisation)
    if run.setup.device.type == "cuda" and run.utilisation.problem:
        say_once(run, f"no GPU utilisation in the reports ({run.utilisation.problem})")
    if step % args.log_every == 0:
        values = {"loss": loss, **{f"loss_{name}": value for name, value in averages.items()}, "learning_rate": rate,
                  "gradient_norm": norm, "utterances_per_second": speed, "memory_bytes": used, "data_wait_share": waiting}  # fmt: skip
        if utilisation is not None:
            values["gpu_utilisation"] = utilisation
        run.report.write(
            step, epoch=run.progress["epoch"], **{f"train/{name}": value for name, value in values.items()}
        )
        run.since, run.waited, run.utterances = time.monotonic(), 0.0, 0
        run.utilisation.reset()


def say_once(run: Training, text: str) -> None:
    if text not in run.said:
        run.said.add(text)
        run.report.say(text)


def note_skipped(run: Training, window: Window, skipped: int) -> None:
    run.progress["skipped_files"] += skipped
    if not skipped:
        return
    for name, reason in itertools.chain(*run.setup.ranks.gather(window.skipped)):
        if name in run.skipped:
            continue  # reported in an earlier epoch
        run.skipped.add(name)
        run.report.say(f"skipped: {reason}")
        run.report.write(run.progress["step"], event="skipped", file=name, reason=reason)


def note_bad_window(run: Training, names: list[str], terms: list[float], norm: float) -> None:
    """Counts and lists a window whose loss or gradient is not finite. It has not changed the weights."""
    progress = run.progress
    progress["bad_windows"] += 1
    progress["bad_in_a_row"] += 1
    names = list(itertools.chain(*run.setup.ranks.gather(names)))
    values = ", ".join(f"{name} {value:g}" for name, value in zip(run.task.loss_weights, terms, strict=True))
    run.report.say(
        f"bad window {progress['bad_windows']}: loss {values}, gradient norm {norm:g}: skipped; its files: {', '.join(names)}"
    )
    run.report.write(progress["step"], event="bad_window", files=names, terms=[str(value) for value in terms])
    if progress["bad_in_a_row"] >= run.args.max_bad_windows:
        raise RunError(
            f"{progress['bad_in_a_row']} windows in a row had a non-finite loss; the last checkpoint in "
            f"{run.args.checkpoint_dir} is from before them: try a lower --learning_rate, --bf16 or --no_mixed_precision"
        )


def evaluate_now(run: Training) -> None:
    """Evaluates without gradients, and keeps the weights if they are the best. Random state and mode stay as they were."""
    args, model, progress, setup = run.args, run.model, run.progress, run.setup

    def polled() -> Iterable[dict]:
        for batch in run.eval_batches:
            if run.watch.caught is not None:
                raise Interrupted
            yield batch

    state, was_training, results = rng_state(setup.device), model.training, {}
    started = time.monotonic()
    model.eval()
    try:
        with torch.no_grad(), setup.autocast(), run.utilisation.rest():
            results = run.task.evaluate(model, polled())
    except Interrupted:
        pass
    finally:
        model.train(was_training)
        set_rng_state(state, setup.device)
    (caught,) = setup.ranks.reduce([run.watch.caught or 0], "max")
    if caught:
        raise saved_and_stopped(run, caught)
    sums = setup.ranks.reduce([float(value) for pair in results.values() for value in pair])
    values = mean_values(run.task, dict(zip(results, zip(sums[::2], sums[1::2], strict=True), strict=True)))
    improved = progress["best"] is None or values[run.task.metric] < progress["best"]
    progress["last_evaluation"] = progress["step"]
    progress["evaluations"].append([progress["step"], values[run.task.metric]])
    progress["evaluations_without_gain"] = 0 if improved else progress["evaluations_without_gain"] + 1
    if improved:
        progress.update(best=values[run.task.metric], best_step=progress["step"])
        if setup.ranks.first:
            summary = {"step": progress["step"], "epoch": progress["epoch"], **values}
            checkpoint.save_weights(args.checkpoint_dir / "best.safetensors", model, run.task.metadata, summary)
    percent = ("cer", "wer")
    shown = "  ".join(f"{n} {100 * v:.2f} %" if n in percent else f"{n} {v:.3f}" for n, v in values.items())
    run.report.say(
        f"evaluation at step {progress['step']} (epoch {progress['epoch'] + 1}): {shown}{'  best so far' if improved else ''}"
    )
    run.report.write(progress["step"], **{f"eval/{name}": value for name, value in values.items()})
    run.report.draw(run.task.metric)
    run.since += time.monotonic() - started  # evaluation does not count as training time


def mean_values(task: Task, results: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The values of an evaluation's (numerator, denominator), and the weighted loss if all of its terms are there."""
    values = {name: total / max(1.0, count) for name, (total, count) in results.items()}
    if task.loss_weights.keys() <= values.keys():
        values["loss"] = sum(weight * values[name] for name, weight in task.loss_weights.items())
    return values


def save(run: Training) -> None:
    """Writes a checkpoint of the run as it is now, with the random state of every rank."""
    states = run.setup.ranks.gather(rng_state(run.setup.device))
    run.last_saved = run.progress["step"]
    if run.setup.ranks.first:
        plain = (int, float, str, bool, type(None))
        flags = {name: value for name, value in vars(run.args).items() if name != "given"}
        content = {
            "recipe": run.task.name,
            "metadata": run.task.metadata,
            "model": run.model.state_dict(),
            "optimizer": optim.optimizer_state(run.optimizer, run.model),
            "scaler": run.scaler.state_dict() if run.scaler else None,
            "rng": states,
            "progress": run.progress,
            "torch": str(torch.__version__),
            "args": {name: value if isinstance(value, plain) else str(value) for name, value in flags.items()},
        }
        checkpoint.save(run.args.checkpoint_dir, run.progress["step"], content, run.args.keep_last)


def saved_and_stopped(run: Training, caught: int) -> Stopped:
    save(run)
    name, step = signal.Signals(caught).name, run.progress["step"]
    return Stopped(
        f"stopped by {name}: step {step} is saved in {run.args.checkpoint_dir}; --resume auto continues from there",
        128 + caught,
    )
