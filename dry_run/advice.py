"""The cheapest flags with which a run fits on a card. batch_size x accumulation, the utterances of
an update, stays the same."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dry_run.cards import CARDS, Card
from dry_run.peak import Peak
from dry_run.report import needed, on_host, room, size, verdict

# Factors of an update's time. The last three are levels of --use_cpu_offload.
SLOWER = {"adamw": 1.0, "adamw_8bit": 1.05, "states": 1.3, "gradients": 1.3, "weights": 1.3}
RECOMPUTATION = 1.33
HALF_BATCH = 1.04
# The levels with which the gradients of every micro-batch leave for the host, and how many
# utterances could be computed meanwhile: an estimate by 4 bytes a weight at 12 GB/s, or 2, beside
# 6 operations a weight and position, 400 positions an utterance and 15 Tflop/s.
TRANSFER = {"gradients": 2.0, "weights": 1.0}
SHARDED = {"sharded": True, "optimizer": "adamw"}  # other optimizers have no shards


@dataclass(frozen=True)
class PlannedSettings:
    """The flags that memory depends on."""

    batch_size: int
    accumulation: int
    checkpointing: bool
    optimizer: str  # a key of `SLOWER`
    frozen: bool  # the encoder is not trained
    eval_batch_size: int = 8
    sharded: bool = False

    @property
    def level(self) -> str:
        """The level of --use_cpu_offload that decides what a step keeps on the GPU; "" if only the
        states are offloaded, or nothing."""
        return self.optimizer if self.optimizer in TRANSFER else ""

    def resized(self, batch_size: int) -> "PlannedSettings":
        """The same update in micro-batches of another size."""
        return replace(
            self,
            batch_size=batch_size,
            accumulation=self.batch_size * self.accumulation // batch_size,
        )


@dataclass(frozen=True)
class Measures:
    """The functions that plan a step of the training, and an evaluation (None: it is not planned).
    The first plan of settings takes seconds, and further ones nothing."""

    training: Callable[[PlannedSettings], Peak]
    evaluation: Callable[[PlannedSettings], Peak] | None = None

    def stages(self, settings: PlannedSettings) -> list[Peak]:
        evaluations = [self.evaluation(settings)] if self.evaluation else []
        return [self.training(settings), *evaluations]

    def largest(self, settings: PlannedSettings) -> Peak:
        return max(self.stages(settings), key=lambda peak: peak.total)

    def total(self, settings: PlannedSettings) -> int:
        return self.largest(settings).total

    def largest_batch(self, settings: PlannedSettings, sizes: list[int], most: int) -> int:
        """The largest of these micro-batches with which a step takes at most `most` bytes, or 0;
        not a whole update, which needs less: its gradients come later."""
        sizes = [each for each in sizes if settings.resized(each).accumulation > 1]

        def total(size: int) -> int:
            return self.training(settings.resized(size)).total

        if not sizes or total(sizes[0]) > most:
            return 0
        return sizes[bisect.bisect(sizes, most, key=total) - 1]

    def with_evaluation(self, settings: PlannedSettings, most: int) -> PlannedSettings:
        """The settings with smaller batches of evaluations, half as large as often as it takes, as
        long as these are over `most` bytes and need more than the training."""
        most = max(most, self.training(settings).total)
        while settings.eval_batch_size > 1 and self.total(settings) > most:
            settings = replace(settings, eval_batch_size=settings.eval_batch_size // 2)
        return settings


def advise(measures: Measures, given: PlannedSettings, can: set[str], card: Card) -> str:
    """The flags that make a run fit on a card in the least time, each with the memory that it
    saves; the smallest card if there are none. `can`: what the run can vary of "checkpointing",
    "optimizer", "weights" (16-bit copies of them, which a run in fp32 does not have), "sharded"
    (several GPUs), if nothing of these is enough, and "frozen", the last resort, because a frozen
    encoder changes what is learned."""
    update = given.batch_size * given.accumulation
    sizes = [size for size in range(1, given.batch_size + 1) if update % size == 0]
    optimizers = [given.optimizer]
    if "optimizer" in can:
        optimizers = list(SLOWER)[list(SLOWER).index(given.optimizer) :]
        if "weights" not in can and given.optimizer != "weights":
            optimizers.remove("weights")
    checkpointing = sorted({given.checkpointing, given.checkpointing or "checkpointing" in can})
    frozen = sorted({given.frozen, given.frozen or "frozen" in can})
    kinds = [{"optimizer": each} for each in optimizers]
    if "sharded" in can:
        kinds.insert(0, SHARDED)
    options = [
        replace(given.resized(size), checkpointing=is_on, frozen=is_frozen, **kind)
        for size in sizes
        for is_on in checkpointing
        for kind in kinds
        for is_frozen in frozen
    ]
    # The resort comes last, then shards, then what takes longer.
    for option in sorted(options, key=lambda each: (each.frozen, each.sharded, time_of(each))):
        largest = measures.largest_batch(option, sizes, room(card))
        if option.accumulation > 1 and option.batch_size > largest:
            continue
        option = measures.with_evaluation(option, room(card))
        if measures.total(option) <= room(card):
            return answer(measures, given, option, card)
    ends = [options[-1], replace(options[-1], **(SHARDED if "sharded" in can else {}))]
    ends = dict.fromkeys(each.resized(size) for each in ends for size in (1, each.batch_size))
    least = [measures.with_evaluation(each, room(card)) for each in ends]
    return answer(measures, given, min(least, key=measures.total), card)


def time_of(settings: PlannedSettings) -> float:
    """The time of an update beside that of one whole micro-batch with nothing that saves memory."""
    time = SLOWER[settings.optimizer] * RECOMPUTATION**settings.checkpointing
    time *= 1 + TRANSFER.get(settings.level, 0.0) / settings.batch_size
    return time * HALF_BATCH ** -math.log2(settings.batch_size)


def answer(measures: Measures, given: PlannedSettings, chosen: PlannedSettings, card: Card) -> str:
    """Each flag from the given settings to the chosen ones with what it saves, and the verdict."""
    optimizer = f"--optimizer {chosen.optimizer}"
    if chosen.optimizer not in ("adamw", "adamw_8bit"):
        optimizer = "--optimizer adamw " if given.optimizer == "adamw_8bit" else ""
        optimizer += f"--use_cpu_offload {chosen.level}".rstrip()
    shards = "--sharded"
    if given.optimizer == "adamw_8bit":
        shards = f"--optimizer adamw {shards}"
    elif given.optimizer != "adamw":
        shards = f"--no_use_cpu_offload {shards}"
    micro_batch = f"--batch_size {chosen.batch_size}"
    micro_batch += f" --gradient_accumulation_steps {chosen.accumulation}"
    eval_batch_size = {"eval_batch_size": chosen.eval_batch_size}
    flags = {
        shards: SHARDED if chosen.sharded else {},
        optimizer: {"optimizer": chosen.optimizer},
        "--freeze_encoder": {"frozen": chosen.frozen},
        "--gradient_checkpointing": {"checkpointing": chosen.checkpointing},
        micro_batch: {**vars(chosen), "eval_batch_size": given.eval_batch_size},
        f"--eval_batch_size {chosen.eval_batch_size}": eval_batch_size,
    }
    peak = measures.largest(chosen)
    changed_from = given
    lines = []
    for flag, change in flags.items():
        after = replace(changed_from, **change)
        if after != changed_from:
            lines.append(
                f"  {flag}: {size(measures.total(changed_from) - measures.total(after))} less"
            )
        changed_from = after
    result = (
        f"{size(needed(peak, card))} of {size(card.total)} ({card.name}): {verdict(peak, card)[0]}"
    )
    lines.append(f"Peak with {'these' if lines else 'the given'} flags: {result}")
    if peak.host:
        lines.append(on_host(peak, card))
    if peak.total > room(card):
        others = [replace(other, count=card.count) for other in CARDS]
        enough = [other for other in others if peak.total <= room(other)]
        names = [other.name for other in sorted(enough, key=lambda other: other.total)]
        lines.append(
            "These flags are not enough: take a smaller model, or --max_duration. The smallest"
            f" card: {names[0] if names else 'none that is known'}"
        )
    return "\n".join(lines)
