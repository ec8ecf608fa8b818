"""How long a run is, how often it is evaluated, and when it stops early."""

import math
from dataclasses import dataclass

from common.batches import GlobalBatches
from common.progress import Progress

# Updates of a fine-tuning: at least, and from an hour of speech on. A task may know better. With
# 300 updates of an hour, AdamW moves no weight far enough for a new language.
UPDATES = (300, 2000)
FINE_TUNING_EPOCHS = 10  # at least
EPOCHS = 100  # from scratch
EVALUATION_UPDATES = 100  # between evaluations, at least
SHORT_RUN = 1000  # updates of a fine-tuning that is evaluated twice as often
PATIENCE = 5  # evaluations without a better result, at least: a third of a fine-tuning


@dataclass(frozen=True)
class RunLength:
    """A run ends at `max_steps`, `num_epochs` or `patience`, whichever comes first; None or 0:
    never. It also ends if a further set says so (`Progress.stop`)."""

    max_steps: int | None  # updates
    num_epochs: int | None
    total: int  # the updates that it makes if it does not stop early
    eval_every: int  # updates between evaluations; 0: at the end of each epoch
    patience: int  # evaluations without a better result

    def has_ended(self, progress: Progress) -> bool:
        """Whether no update follows."""
        reached = (
            (progress.step, self.max_steps),
            (progress.epoch, self.num_epochs),
            (progress.evaluations_without_gain, self.patience),
        )
        return progress.stop or any(end and value >= end for value, end in reached)


def choose(
    args,
    global_batches: GlobalBatches,
    fine_tunes: bool,
    progress: Progress | None = None,
    updates: tuple[int, int] = UPDATES,
) -> RunLength:
    """The length that the flags ask for or, without them, the usual one. If the model began from
    released weights (`fine_tunes`), the usual one follows the hours of speech: `updates` are the
    fewest, and those from an hour on. `progress`: of a run that is resumed."""
    progress = progress or Progress()
    step, epoch = progress.origin
    per_epoch = global_batches.per_epoch
    max_steps = args.max_steps
    num_epochs = args.num_epochs
    if not (max_steps or num_epochs) and fine_tunes:
        fewest, usual = updates
        wanted = max(fewest, round(usual * min(1.0, global_batches.hours)))
        if FINE_TUNING_EPOCHS * per_epoch >= wanted:
            num_epochs = epoch + FINE_TUNING_EPOCHS
        else:
            max_steps = step + wanted
    elif not (max_steps or num_epochs):
        num_epochs = EPOCHS
    by_epochs = math.inf
    if num_epochs:
        step, epoch = progress.counted or progress.origin
        by_epochs = step + global_batches.count(epoch, num_epochs)
    total = int(min(by_epochs, max_steps or math.inf))
    every = args.eval_every
    if every is None:
        is_short = fine_tunes and total < SHORT_RUN
        every = max(EVALUATION_UPDATES // 2 if is_short else EVALUATION_UPDATES, per_epoch)
    patience = args.early_stopping_patience
    if patience is None and fine_tunes:
        patience = max(PATIENCE, math.ceil(total / (every or per_epoch) / 3))
    return RunLength(max_steps, num_epochs, total, every, patience or 0)


def describe(length: RunLength, global_batches: GlobalBatches) -> str:
    """The line that says what was chosen."""
    hours = global_batches.hours
    data = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
    epochs = length.total / global_batches.per_epoch
    text = f"length: {length.total} updates of {global_batches.global_batch_size}, {epochs:.1f}"
    text += f" epochs of {data} (--max_steps, --num_epochs){global_batches.described()}"
    every = f"every {length.eval_every} updates" if length.eval_every else "after each epoch"
    text += f"; evaluated {every} (--eval_every)"
    if length.patience:
        text += f"; ends after {length.patience} evaluations without a better result or a lower"
        text += " loss (--early_stopping_patience)"
    return text
