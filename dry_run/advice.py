"""The cheapest flags with which a run fits on a card. batch_size x accumulation, the utterances of
an update, stays the same."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dry_run.cards import CARDS, Card
from dry_run.peak import Peak
from dry_run.report import needed, room, size, verdict

STATES = {
    "adamw": 8.0,
    "adamw_8bit": 2 * (1 + 4 / 256),
    "offload": 0.0,
}  # bytes per weight, with the scales of 8 bits
SLOWER = {
    "adamw": 1.0,
    "adamw_8bit": 1.05,
    "offload": 1.3,
}  # factors of an update's time, like the next two
RECOMPUTATION, HALF_BATCH = 1.33, 1.04


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
    `measure` plans a step, which takes seconds, so it is called seldom."""
    plans = Plans(measure, given, {given: measure(given)})
    optimizers = (
        list(STATES)[list(STATES).index(given.optimizer) :]
        if "optimizer" in can
        else [given.optimizer]
    )
    checkpointing = sorted({given.checkpointing, given.checkpointing or "checkpointing" in can})
    frozen = sorted({given.frozen, given.frozen or "frozen" in can})
    flags = itertools.product(batch_sizes(given), checkpointing, optimizers, frozen)
    options = [
        replace(given.resized(b), checkpointing=c, optimizer=o, frozen=f) for b, c, o, f in flags
    ]
    for option in sorted(options, key=lambda option: cost(option, given)):
        if plans.at_least(option, room(card)) <= room(card) and plans.peak(option).total <= room(
            card
        ):
            return answer(plans, option, card)
    return answer(plans, min(options[-1].resized(1), options[-1], key=plans.total), card)


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
    offload = (
        "--use_cpu_offload"
        if plans.given.optimizer == "adamw"
        else "--optimizer adamw --use_cpu_offload"
    )
    optimizer = offload if chosen.optimizer == "offload" else f"--optimizer {chosen.optimizer}"
    flags = {
        optimizer: {"optimizer": chosen.optimizer},
        "--freeze_encoder": {"frozen": chosen.frozen},
        "--gradient_checkpointing": {"checkpointing": chosen.checkpointing},
        f"--batch_size {chosen.batch_size} --gradient_accumulation_steps {chosen.accumulation}": (
            vars(chosen)
        ),
    }
    peak, before, lines = plans.peak(chosen), plans.given, []
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
        cards = [
            other.name
            for other in sorted(CARDS, key=lambda other: other.total)
            if peak.total <= room(other)
        ]
        smallest = [*cards, "none that is known"][0]
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

    def total(self, settings: Settings) -> int:
        """Bytes at the peak. Another optimizer than the given one changes its states only, which
        needs no plan."""
        if settings in self.peaks or settings.optimizer == self.given.optimizer:
            return self.peak(settings).total
        peak = self.peak(replace(settings, optimizer=self.given.optimizer))
        saved = 1 - STATES[settings.optimizer] / STATES[self.given.optimizer]
        return peak.total - int(saved * peak.parts["optimizer states"])

    def at_least(self, settings: Settings, limit: int) -> int:
        """A lower bound of the bytes at the peak; not the best one if it exceeds `limit`. Each
        moment of a step grows linearly with the batch and the peak is the largest, so it lies above
        a line through two plans, except between them. A batch without accumulation is planned:
        gradients need not exist at its peak."""
        if settings in self.peaks or settings.accumulation == 1:
            return self.total(settings)
        sizes = [
            size for size in batch_sizes(self.given) if settings.resized(size).accumulation > 1
        ]
        if (smallest := self.total(settings.resized(1))) > limit:
            return smallest
        half = max((size for size in sizes if 2 * size <= sizes[-1]), default=1)
        points = [
            (size, self.total(settings.resized(size))) for size in sorted({1, half, sizes[-1]})
        ]
        bounds = [total for size, total in points if size <= settings.batch_size]
        for (left, low), (right, high) in itertools.pairwise(points):
            if not left < settings.batch_size < right:
                bounds.append(low + (high - low) * (settings.batch_size - left) // (right - left))
        return max(bounds)
