"""Evaluations of a run: their results, the best weights, and further sets."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator

import torch

from common import checks
from common.batches import EvalBatches
from common.device import Setup, rng_state, set_rng_state
from common.engine import Engine
from common.errors import Stopped
from common.progress import Progress
from common.report import shown
from common.saving import keep_best, saved_and_stopped
from common.task import Task
from common.training import Training


def evaluate(
    setup: Setup, model: torch.nn.Module, task: Task, batches: Iterable[dict]
) -> dict[str, tuple[float, float]]:
    """The results of `task.evaluate`, without gradients. Random state and mode stay as they were.
    Raises `UsageError` if the metric is not among them."""
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


def try_evaluation(engine: Engine, batch: dict) -> None:
    """Evaluates a batch of two short utterances: a metric that is not among what `task.evaluate`
    returns would otherwise be noticed hours later."""
    with engine.evaluated() as model:
        evaluate(engine.setup, model, engine.task, [batch])


def evaluate_set(training: Training, batches: EvalBatches) -> dict[str, float]:
    """The values of `mean_values` of a set, on all ranks. Raises `Stopped` after a signal."""
    task = training.task
    ranks = training.setup.ranks

    def polled() -> Iterator[dict]:
        for batch in batches:
            if training.caught:
                raise Stopped("the results of this evaluation are discarded", 128 + training.caught)
            yield batch

    results = {}
    with contextlib.suppress(Stopped), training.engine.evaluated() as model:
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
    step = progress.step
    started = time.monotonic()
    values = evaluate_set(training, training.eval_batches)
    results = {f"eval/{name}": value for name, value in values.items()}
    lines = []
    if task.further:
        of_sets = {name: evaluate_set(training, each) for name, each in task.further.sets.items()}
        lines = task.further.note(task, progress, of_sets)
        for name, each in of_sets.items():
            results |= {f"{task.further.kind}/{name}/{key}": value for key, value in each.items()}
    improved = note_evaluation(task, progress, values)
    if improved:
        keep_best(training, values)
    if advice := advice_to_begin(training, values):
        lines.append(advice)
    report = training.report
    texts = [f"{name} {shown(name, value)}" for name, value in values.items()]
    if improved:
        texts.append("best so far")
    report.say(f"evaluation at step {step} (epoch {progress.epoch + 1}): {'  '.join(texts)}")
    for line in lines:
        report.say(line)
    report.write(step, **results)
    report.draw(task.metric)
    training.since += time.monotonic() - started  # evaluation does not count as training time


def advice_to_begin(training: Training, values: dict[str, float]) -> str | None:
    """`Task.not_begun`, at the first evaluation after a fifth of the updates."""
    task = training.task
    fifth = training.length.total / 5
    is_first = all(step < fifth for step, _ in training.progress.evaluations[:-1])
    if task.not_begun and training.progress.step >= fifth and is_first:
        return task.not_begun(values.get(task.metric, math.nan))
    return None


def note_evaluation(task: Task, progress: Progress, values: dict[str, float]) -> bool:
    """Notes an evaluation in the progress. Returns whether it is the best so far. A metric without
    a value counts as NaN, than which every number is better. For early stopping a lower loss is a
    gain, too: error rates can rise first while a model learns a new script. An evaluation at which
    a further set ends the run is not the best."""
    value = values.get(task.metric, math.nan)
    best = progress.best
    improved = best is None or math.isnan(best) or task.is_better(value, best)
    improved = improved and not progress.stop
    progress.last_evaluation = progress.step
    progress.evaluations.append([progress.step, value])
    progress.evaluations_without_gain += 1
    if improved:
        progress.evaluations_without_gain = 0
        progress.best = value
        progress.best_step = progress.step
    loss = values.get("loss", math.inf)
    lowest = progress.lowest_loss
    progress.overfits = lowest is not None and lowest < loss < math.inf
    if lowest is None or loss < lowest:
        progress.lowest_loss = loss
        if loss < math.inf:
            progress.evaluations_without_gain = 0
    return improved


def mean_values(task: Task, results: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The values of an evaluation's (numerator, denominator), and the weighted loss if all of its
    terms are there. A denominator of 0 gives no value."""
    values = {name: total / count for name, (total, count) in results.items() if count}
    if task.loss_weights.keys() <= values.keys():
        values["loss"] = sum(weight * values[term] for term, weight in task.loss_weights.items())
    return values
