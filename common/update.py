"""One update: forward and backward of a global batch until it fits into memory, then the step of
the optimizer.

The utterances of an update are a global batch: batch_size x gradient_accumulation_steps x ranks of
them, in micro-batches. Every loss term is divided by its count in the whole global batch, so the
gradient does not depend on how the global batch is cut."""

import itertools
import math
import time
from collections import Counter

import torch

from common import memory
from common.batches import GlobalBatch
from common.device import rng_state, set_rng_state
from common.errors import RunError, Stopped
from common.limits import cut_to_fit, learn_limit, lower_limits, out_of_memory, too_long
from common.ranks import LostRank
from common.saving import save_alone, saved_and_stopped
from common.training import Training

# The status of a rank after a pass over a global batch. The highest of all ranks decides.
DONE, AGAIN, STOP, CANNOT_FIT = range(4)

MAX_BAD_BATCHES = 10  # in a row, whose loss is not finite
MAX_UNREADABLE = 8  # files in a row: then it is not a file that is damaged, but a disk that is gone


def train_global_batch(training: Training, global_batch: GlobalBatch) -> None:
    """One global batch: both passes until it fits, then the update. The position advances."""
    progress = training.progress
    ranks = training.setup.ranks
    terms = list(training.task.loss_weights)
    own = [sum(batch["counts"][term] for batch in global_batch.micro_batches) for term in terms]
    names = [name for batch in global_batch.micro_batches for name in batch["names"]]
    *counts, utterances, skipped = ranks.reduce([*own, len(names), len(global_batch.skipped)])
    if skipped:
        note_skipped(training, global_batch, skipped)
    training.unreadable = 0 if utterances else training.unreadable + skipped
    if training.unreadable >= MAX_UNREADABLE:  # the position stays before this global batch
        raise RunError(
            f"the last {training.unreadable} files could not be read: is the disk or the network"
            " drive with the audio still there?"
        )
    if utterances:
        totals = dict(zip(terms, counts, strict=True))
        snapshot = StateBefore(training)
        try:
            device_sums = pass_until_it_fits(training, global_batch, totals, snapshot)
            sums, norm = reduce_gradients(training, device_sums)
        except LostRank:
            snapshot.restore(training)
            raise
        except (RunError, Stopped):  # the run is, or will be, saved
            raise
        except Exception:  # of a file, or of a copy's own code
            snapshot.restore(training)
            save_alone(training)
            raise
        if not is_finite(training, sums, norm):
            training.engine.optimizer.zero_grad()
            snapshot.restore_buffers()
            note_bad_batch(training, names, sums, norm)
        else:
            made = apply_update(training, norm)
            progress.bad_in_a_row = 0
            progress.utterances += utterances
            training.utterances += utterances
            if made:
                progress.step += 1
                training.schedule.set(progress.step)
                values = zip(terms, sums, strict=True)
                averages = {term: value / max(1, totals[term]) for term, value in values}
                note_update(training, averages, norm)
    progress.global_batch = global_batch.number + 1
    if global_batch.last:
        progress.epoch = global_batch.epoch + 1
        progress.global_batch = 0
    empty_cache(training, len(global_batch.micro_batches))


def is_finite(training: Training, sums: list[float], norm: float) -> bool:
    """Whether an update can be made. Under loss scaling an infinite gradient lowers the scale."""
    if not all(map(math.isfinite, sums)):
        return False
    return training.loss_scale is not None or math.isfinite(norm)


def empty_cache(training: Training, micro_batches: int) -> None:
    """Gives unused GPU memory back every `--empty_cache_every` micro-batches: it is fragmented."""
    training.micro_batches += micro_batches
    every = training.args.empty_cache_every
    if training.setup.device.type == "cuda" and every and training.micro_batches >= every:
        training.micro_batches = 0
        torch.cuda.empty_cache()


class StateBefore:
    """The state before a pass over a global batch: all that it changes besides gradients."""

    def __init__(self, training: Training):
        self.buffers = [(buffer, buffer.clone()) for buffer in training.engine.network.buffers()]
        self.rng = rng_state(training.setup.device)

    def restore_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)

    def restore(self, training: Training) -> None:
        """Makes everything as it was, without gradients."""
        training.engine.optimizer.zero_grad()
        self.restore_buffers()
        set_rng_state(self.rng, training.setup.device)


def pass_until_it_fits(
    training: Training, global_batch: GlobalBatch, totals: dict, snapshot: StateBefore
) -> torch.Tensor:
    """Forward and backward of the global batch, repeated in smaller micro-batches as long as a rank
    runs out of memory. Returns the sums of the loss terms. Every attempt starts from the same
    gradients, buffers and random state."""
    setup = training.setup
    ranks = setup.ranks
    limits = training.progress.limits
    failures = Counter()

    def stop() -> bool:
        if training.utilisation:
            training.utilisation.sample()
        return training.caught != 0

    while True:
        micro_batches = cut_to_fit(global_batch.micro_batches, limits)
        outcome = training.engine.compute(micro_batches, totals, training.loss_scale, stop, limits)
        status = DONE
        if outcome.stopped:
            status = STOP
        elif outcome.failed is not None:
            status = AGAIN if learn_limit(outcome.failed, limits, failures) else CANNOT_FIT
        worst, caught = ranks.reduce([status, training.caught], "max")
        if worst == DONE:
            zero = torch.zeros(len(training.task.loss_weights), device=setup.device)
            return zero if outcome.sums is None else outcome.sums
        snapshot.restore(training)
        memory.free_memory(setup.device)
        if worst == STOP:
            raise saved_and_stopped(training, caught)
        if worst == CANNOT_FIT:
            reason = "an utterance of another rank does not fit into memory: see its message"
            if status == CANNOT_FIT:
                reason = too_long(outcome.failed, outcome.reason, setup.device)
            raise RunError(reason)
        for other in ranks.gather(limits):  # all ranks keep the same limits
            lower_limits(limits, other)
        if status == AGAIN:
            training.report.say(out_of_memory(outcome.failed, setup.device))


def reduce_gradients(training: Training, sums: torch.Tensor) -> tuple[list[float], float]:
    """Terms and gradient norm over all ranks: a global batch's only transfer to the host."""
    ranks = training.setup.ranks
    training.engine.sum_gradients()
    with ranks.waiting():
        norm = training.engine.norm()
        # Only here the host waits for the sums over the ranks.
        *terms, norm = torch.cat([sums, norm.to(sums.device).reshape(1)]).tolist()
    scale = training.loss_scale.value if training.loss_scale else 1.0
    return ranks.reduce(terms), norm / scale


def apply_update(training: Training, norm: float) -> bool:
    """Clips the gradient and updates the weights. Returns False if the gradient is not finite under
    fp16's loss scale, which is lowered then."""
    engine = training.engine
    loss_scale = training.loss_scale
    limit = training.args.max_grad_norm
    is_finite = math.isfinite(norm)
    factor = 1.0
    if loss_scale:
        factor /= loss_scale.value
        loss_scale.update(is_finite)
    if limit and norm > limit:
        factor *= limit / norm
    gradients = list(engine.gradients().values())
    if is_finite and gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    if is_finite:
        engine.step()
    engine.optimizer.zero_grad()
    if not is_finite and loss_scale.value < 1:
        raise RunError(
            f"fp16's loss scale fell below 1 at step {training.progress.step}: the gradients"
            " overflow at any scale; use --bf16, --no_mixed_precision or a lower --learning_rate"
        )
    return is_finite


# --- what is reported of an update ----------------------------------------------------------------


def note_update(training: Training, averages: dict[str, float], norm: float) -> None:
    """Updates the progress bar, and writes a line of metrics every `log_every` updates."""
    report = training.report
    step = training.progress.step
    elapsed = max(1e-9, time.monotonic() - training.since)
    values = {
        "loss": sum(training.task.loss_weights[term] * value for term, value in averages.items()),
        **{f"loss_{term}": value for term, value in averages.items()},
        "learning_rate": training.engine.optimizer.param_groups[0]["lr"],
        "gradient_norm": norm,
        "utterances_per_second": training.utterances / elapsed,
        "memory_bytes": memory.memory_used(training.setup.device),
        "data_wait_share": training.waited / elapsed,  # of the time
        "gpu_utilisation": training.utilisation.mean() if training.utilisation else None,
    }
    report.progress(step, values)
    if training.utilisation and (problem := training.utilisation.new_problem()):
        report.say(f"no GPU utilisation in the reports ({problem})")
    if step % training.args.log_every == 0:
        values = {f"train/{name}": value for name, value in values.items() if value is not None}
        report.write(step, epoch=training.progress.epoch, **values)
        training.since = time.monotonic()
        training.waited = 0.0
        training.utterances = 0


def note_skipped(training: Training, global_batch: GlobalBatch, count: int) -> None:
    """Counts `count` skipped files, this rank's and the others', and reports each file once."""
    progress = training.progress
    progress.skipped_files += count
    for name, reason in itertools.chain(*training.setup.ranks.gather(global_batch.skipped)):
        if name not in training.skipped:  # or an earlier epoch has reported it
            training.skipped.add(name)
            training.report.say(f"skipped: {reason}")
            training.report.write(progress.step, event="skipped", file=name, reason=reason)


def note_bad_batch(training: Training, names: list[str], terms: list[float], norm: float) -> None:
    """Counts and lists a global batch whose loss or gradient is not finite. It has not changed the
    weights. Raises `RunError` if there were too many in a row."""
    progress = training.progress
    progress.bad_batches += 1
    progress.bad_in_a_row += 1
    names = list(itertools.chain(*training.setup.ranks.gather(names)))
    values = zip(training.task.loss_weights, terms, strict=True)
    losses = ", ".join(f"{term} {value:g}" for term, value in values)
    text = f"bad global batch {progress.bad_batches}: loss {losses}, gradient norm {norm:g}"
    training.report.say(f"{text}: skipped; its files: {', '.join(names)}")
    terms = [str(value) for value in terms]
    training.report.write(progress.step, event="bad_batch", files=names, terms=terms)
    count = progress.bad_in_a_row
    if count >= MAX_BAD_BATCHES:
        progress.bad_in_a_row = 0
        raise RunError(
            f"{count} global batches in a row had a non-finite loss, and the weights from before"
            " them are saved: try a lower --learning_rate, --bf16 or --no_mixed_precision"
        )
