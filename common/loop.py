"""The training loop. It is the loop of nanoGPT's train.py, with six additions:

    while True:
        evaluate if it is time, and keep the best weights
        save a checkpoint if it is time                                             # 1
        leave if the run is finished
        if an epoch begins: augment more if the model writes well enough            # 2
        global_batch = the next utterances, in micro-batches
        if a signal came: save and leave                                            # 3
        until it fits into memory, in smaller and smaller micro-batches:            # 4
            for batch in micro-batches:
                with autocast: terms = compute_loss(model, batch)
                (sum of weight * term / the term's count in the global batch).backward()  # 5
        if loss and gradient are finite:                                            # 6
            clip the gradient; optimizer.step(); set the learning rate; log

1. A checkpoint has the position in the data and all random states: a resumed run ends with the same
   bits.
2. A model that cannot write yet learns from clean and short utterances (`Task.augmented_share`),
   unless it learns these by heart.
3. The state that is saved is the one before the interrupted global batch.
4. No utterance is dropped. Gradients, buffers and random states are reset before each attempt.
5. The gradient does not depend on how the global batch is cut.
6. Otherwise the weights stay as they are, and the files are listed.

A recipe uses it so:

    run = begin(args, RECIPE)             # device, locks, checkpoint to resume from
    with run.model_device():
        model = ...
    task = Task(RECIPE, compute_loss, loss_weights, evaluate, model_info, run_info,
                metric="cer", higher_is_better=False, fit=fit)
    train(args, run, model, task, global_batches, eval_batches)
    finish(args, run, model, task, report_results)

`task.py` has the contract, `setting_up.py` the beginning, `update.py` one update, `engine.py` one
pass over its micro-batches, `evaluation.py` and `saving.py` what comes between updates."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from common import checkpoint, checks, memory, records
from common.batches import EvalBatches, GlobalBatch, GlobalBatches
from common.errors import Failure, Planned, RunError
from common.evaluation import evaluate_now, try_evaluation
from common.progress import Progress
from common.ranks import CannotSave, LostRank
from common.saving import require_disk, save, save_alone, saved_and_stopped, watch_signals
from common.setting_up import begin, begin_training, prepare_model
from common.task import ForPlans, Run, Task
from common.training import Training
from common.update import train_global_batch

SAVE_SECONDS = 1200.0  # between checkpoints, at most: a free notebook ends without a signal

__all__ = ["ForPlans", "Run", "Task", "begin", "finish", "train"]  # what a recipe imports


def train(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> Progress:
    """Trains as long as the flags or `run_length` say, and returns the progress.
    Raises `Planned` if the run is only planned, `Stopped` after a signal, `DataError` for a bad
    file, and `RunError` if the run cannot continue; what was reached until then is saved. Raises
    `UsageError` before the first update if the batches, the records of the task, its loss or its
    results are not what the loop needs."""
    records.check(task.model_info)
    records.check(task.run_info)
    items = checks.check_collate(global_batches.dataset, task.loss_weights)
    if run.is_planned:
        from common.parts import planned

        raise Planned(planned.plan(args, run, model, task, global_batches, eval_batches))
    eval_items = checks.check_collate(eval_batches.dataset, task.loss_weights)
    require_disk(args, model)
    if run.setup.ranks.size > 1:
        from common.parts import processes

        processes.agree_on_run(args, run, model, task, global_batches, eval_batches)
    if not run.resumed:
        checks.try_loss(model, task, items, global_batches.dataset.collate)
    engine = prepare_model(args, run, model, task, global_batches.data)
    if eval_items and (run.resumed or not task.evaluates_first):
        try_evaluation(engine, eval_batches.dataset.collate(eval_items))
    training = begin_training(args, run, task, engine, global_batches, eval_batches)
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
    engine.end()
    return progress


def train_global_batches(training: Training) -> Progress:
    """Trains on one global batch after the other, with evaluations and checkpoints in between,
    until the run is finished. Returns the progress."""
    progress = training.progress
    ranks = training.setup.ranks
    source = batches_from_here(training)
    while True:
        if progress.step == 0 and training.length.has_ended(progress):
            raise RunError(
                f"no update was made: {progress.bad_batches} global batches had a non-finite loss,"
                f" {progress.skipped_files} files were skipped; the messages above name the files"
            )
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
            if training.task.further:
                for line in training.task.further.table(training.task, progress):
                    training.report.say(line)
            return progress
        if augments_more(training):
            source.close()  # its workers have prepared utterances with the old share
            source = batches_from_here(training)
        error = training.report.problem
        started = time.monotonic()
        try:
            global_batch = next(source)
        except Failure as failure:
            error = failure
        except Exception:  # of a copy's own code
            save_alone(training)
            raise
        training.waited += time.monotonic() - started
        if training.utilisation:
            training.utilisation.sample()
        is_late = time.monotonic() - training.saved_at > SAVE_SECONDS
        own = [training.caught, int(error is not None), int(is_late)]
        caught, failed, training.is_late = ranks.reduce(own, "max")
        if failed:
            save(training)
            raise error or RunError("another rank could not continue: see its message")
        if caught:
            raise saved_and_stopped(training, caught)
        try:
            train_global_batch(training, global_batch)
        except CannotSave:
            raise
        except RunError:
            save(training)  # the weights are those from before the global batch
            raise
        ranks.note_update(time.monotonic() - started)


def batches_from_here(training: Training) -> Iterator[GlobalBatch]:
    """The global batches from the run's position in the data."""
    progress = training.progress
    return training.global_batches.iterate(progress.epoch, progress.global_batch)


def augments_more(training: Training) -> bool:
    """Whether an epoch begins in which more utterances are augmented than before, by
    `Task.augmented_share`. With augmentation from the first update on, a model from scratch may
    never begin to learn."""
    progress = training.progress
    is_within = progress.global_batch > 0
    if not training.task.augmented_share or progress.best is None or is_within:
        return False
    share = training.task.augmented_share(
        progress.best, progress.augmented_share, progress.overfits
    )
    if not share > progress.augmented_share:
        return False
    progress.augmented_share = share
    training.global_batches.augment(share)
    training.report.say(
        f"from epoch {progress.epoch + 1} on lengths are mixed, the share of augmentation is"
        f" {share:.0%}"
    )
    return True


def evaluation_is_due(training: Training) -> bool:
    """Whether the weights are evaluated now."""
    progress = training.progress
    every = training.length.eval_every
    if progress.last_evaluation == progress.step:
        return False
    if training.length.has_ended(progress):
        return True
    if every:
        return progress.step % every == 0
    return progress.global_batch == 0  # an epoch begins


def checkpoint_is_due(training: Training, finished: bool) -> bool:
    """Whether a checkpoint is written now."""
    step = training.progress.step
    every = training.args.save_every
    if step == training.last_saved:
        return False
    is_due = step > 0 and every > 0 and (step % every == 0 or bool(training.is_late))
    return finished or is_due


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
    if next(model.parameters()).device.type != run.setup.device.type:  # it was on other GPUs
        model.to(run.setup.device)
    with torch.no_grad():
        best = args.checkpoint_dir / "best.safetensors"
        checkpoint.load_weights(model, checkpoint.read_weights(best, task.name).model)
        model.eval()
        with run.setup.autocast():
            report_results("weights of the best evaluation")
    print(f"weights: {best}; curves and all results: {args.log_dir}")
    print(memory.peak(run.setup.device))
    return best
