"""The cheapest flags with which a run fits on a card. batch_size x accumulation, the utterances of
an update, stays the same."""

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dry_run.cards import CARDS, Card
from dry_run.peak import Peak
from dry_run.report import needed, room, size, verdict

# Bytes per weight, with the scales of 8 bits.
STATES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256), "offload": 0.0}
# Factors of an update's time.
SLOWER = {"adamw": 1.0, "adamw_8bit": 1.05, "offload": 1.3}
RECOMPUTATION = 1.33
HALF_BATCH = 1.04


@dataclass(frozen=True)
class Settings:
    """The flags that memory depends on."""

    batch_size: int
    accumulation: int
    checkpointing: bool
    optimizer: str  # a key of `STATES`
    frozen: bool  # the encoder is not trained

    def resized(self, batch_size: int) -> "Settings":
        """The same update in micro-batches of another size."""
        return replace(
            self,
            batch_size=batch_size,
            accumulation=self.batch_size * self.accumulation // batch_size,
        )


def advise(measure: Callable[[Settings], Peak], given: Settings, can: set[str], card: Card) -> str:
    """The flags that make a run fit on a card in the least time, each with the memory that it
    saves; the smallest card if there are none. `can`: what the recipe can vary of "checkpointing",
    "optimizer" and "frozen", the last resort, because a frozen encoder changes what is learned.
    `measure` plans a step, which takes seconds."""
    plans = Plans(measure, given, {given: measure(given)})
    optimizers = [given.optimizer]
    if "optimizer" in can:
        optimizers = list(STATES)[list(STATES).index(given.optimizer) :]
    checkpointing = sorted({given.checkpointing, given.checkpointing or "checkpointing" in can})
    frozen = sorted({given.frozen, given.frozen or "frozen" in can})
    options = [
        replace(given.resized(size), checkpointing=is_on, optimizer=optimizer, frozen=is_frozen)
        for size in batch_sizes(given)
        for is_on in checkpointing
        for optimizer in optimizers
        for is_frozen in frozen
    ]
    for option in sorted(options, key=lambda option: cost(option, given)):
        if option.accumulation > 1 and option.batch_size > plans.largest(option, room(card)):
            continue
        if plans.total(option) <= room(card) and plans.peak(option).total <= room(card):
            return answer(plans, option, card)
    return answer(plans, min(options[-1].resized(1), options[-1], key=plans.total), card)


@functools.cache
def batch_sizes(given: Settings) -> list[int]:
    """The micro-batches that divide an update, up to the given one."""
    return [
        size
        for size in range(1, given.batch_size + 1)
        if given.batch_size * given.accumulation % size == 0
    ]


def cost(option: Settings, given: Settings) -> tuple[bool, float]:
    """A key for sorting: whether the encoder is frozen, then the factor of time beside the given
    settings."""
    factor = SLOWER[option.optimizer] / SLOWER[given.optimizer]
    factor *= RECOMPUTATION ** (option.checkpointing - given.checkpointing)
    return option.frozen, factor * HALF_BATCH ** math.log2(given.batch_size / option.batch_size)


def answer(plans: "Plans", chosen: Settings, card: Card) -> str:
    """Each flag from the given settings to the chosen ones with what it saves after those above it,
    peak and verdict."""
    optimizer = f"--optimizer {chosen.optimizer}"
    if chosen.optimizer == "offload":
        optimizer = "--use_cpu_offload"
        if plans.given.optimizer != "adamw":
            optimizer = "--optimizer adamw --use_cpu_offload"
    micro_batch = f"--batch_size {chosen.batch_size}"
    micro_batch += f" --gradient_accumulation_steps {chosen.accumulation}"
    flags = {
        optimizer: {"optimizer": chosen.optimizer},
        "--freeze_encoder": {"frozen": chosen.frozen},
        "--gradient_checkpointing": {"checkpointing": chosen.checkpointing},
        micro_batch: vars(chosen),
    }
    peak = plans.peak(chosen)
    before = plans.given
    lines = []
    for flag, change in flags.items():
        after = replace(before, **change)
        if after != before:
            lines.append(f"  {flag}: {size(plans.total(before) - plans.total(after))} less")
        before = after
    result = (
        f"{size(needed(peak, card))} of {size(card.total)} ({card.name}): {verdict(peak, card)[0]}"
    )
    lines.append(f"Peak with {'these' if lines else 'the given'} flags: {result}")
    if peak.total > room(card):
        enough = [other for other in CARDS if peak.total <= room(other)]
        smallest = "none that is known"
        if enough:
            smallest = min(enough, key=lambda other: other.total).name
        lines.append(
            "These flags are not enough: take a smaller model, or --max_duration. The smallest"
            f" card: {smallest}"
        )
    return "\n".join(lines)


@dataclass
class Plans:
    """The plans that were made, and what follows from them for other settings."""

    measure: Callable[[Settings], Peak]
    given: Settings
    peaks: dict[Settings, Peak]

    def peak(self, settings: Settings) -> Peak:
        """The plan with these settings."""
        if settings not in self.peaks:
            self.peaks[settings] = self.measure(settings)
        return self.peaks[settings]

    def largest(self, settings: Settings, most: int) -> int:
        """The largest micro-batch with which a plan with these settings takes at most `most` bytes,
        of those that are not a whole update, which needs less: its gradients come later. 0 if there
        is none."""
        sizes = batch_sizes(self.given)
        sizes = [each for each in sizes if settings.resized(each).accumulation > 1]
        count = bisect.bisect(sizes, most, key=lambda each: self.total(settings.resized(each)))
        return sizes[count - 1] if count else 0

    def total(self, settings: Settings) -> int:
        """Bytes at the peak. Another optimizer than the given one changes its states only, which
        needs no plan."""
        if settings in self.peaks or settings.optimizer == self.given.optimizer:
            return self.peak(settings).total
        peak = self.peak(replace(settings, optimizer=self.given.optimizer))
        saved = 1 - STATES[settings.optimizer] / STATES[self.given.optimizer]
        return peak.total - int(saved * peak.parts["optimizer states"])
