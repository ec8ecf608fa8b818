"""The advised flags: they fit, nothing cheaper does, few plans are made, and their savings add
up."""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from dry_run.advice import SLOWER, Measures, PlannedSettings, advise
from dry_run.cards import CONTEXT, MIB, Card, workspace
from dry_run.peak import PARTS, Peak
from dry_run.report import needed, size, verdict

EVERYTHING = {"checkpointing", "optimizer", "weights", "frozen"}
SHARDS = 3
BYTES = {"adamw": 8, "adamw_8bit": 2.03125, "states": 0, "gradients": 0, "weights": 0}
MOST_PLANS = 60


class Step:
    """A model of a step's memory, linear in the batch size. `plans`: those that are not one of
    before with another optimizer, which takes no time; `evaluated`: bytes of an utterance in
    evaluation."""

    def __init__(self, draw: random.Random, kinked: bool = False, states_off: float = 1.0):
        self.plans = set()
        self.evaluated = draw.choice([0, draw.randrange(1, 400) * MIB])
        self.weights = draw.randrange(20, 3000) * MIB
        self.trained = draw.uniform(0.3, 0.9)  # share of the weights that a frozen encoder leaves
        self.per_utterance = draw.randrange(1, 400) * MIB
        # Shares of activations, with checkpointing and with a frozen encoder.
        self.kept = (draw.uniform(0.1, 0.8), draw.uniform(0.3, 0.9))
        self.update = draw.randrange(0, 3000) * MIB if kinked else 0
        self.states_off = (
            states_off  # by this factor the 8-bit states are larger than the rule says
        )

    def measure(self, settings: PlannedSettings) -> Peak:
        shape = settings.batch_size, settings.checkpointing, settings.frozen, settings.level
        self.plans.add((*shape, settings.sharded, settings.accumulation > 1))
        trained = self.weights * (self.trained if settings.frozen else 1)
        activations = settings.batch_size * self.per_utterance
        activations *= self.kept[0] if settings.checkpointing else 1
        activations *= self.kept[1] if settings.frozen else 1
        states = trained * BYTES[settings.optimizer] / 4
        states *= self.states_off if settings.optimizer == "adamw_8bit" else 1
        parts = dict.fromkeys(PARTS, 0) | {
            "weights": self.weights // (2 if settings.level == "weights" else 1),
            "gradients": int(trained) if settings.accumulation > 1 and not settings.level else 0,
            "activations": max(int(activations), self.update),
            "optimizer states": int(states),
            "batch": 4 * MIB * settings.batch_size,
        }
        if settings.sharded:
            for name in ("weights", "gradients", "optimizer states"):
                parts[name] //= SHARDS
        return Peak(parts, 2 * MIB * settings.batch_size, "", "backward", 0)

    def measure_evaluation(self, settings: PlannedSettings) -> Peak:
        shape = settings.eval_batch_size, settings.frozen, settings.level, settings.sharded
        self.plans.add(shape)
        activations = self.evaluated * settings.eval_batch_size
        parts = self.measure(settings).parts
        parts |= {"gradients": 0, "activations": activations, "batch": 0}
        return Peak(parts, 0, "", "forward", stage="evaluation")

    def largest(self, settings: PlannedSettings) -> Peak:
        return Measures(self.measure, self.measure_evaluation).largest(settings)

    def advice(self, given: PlannedSettings, can: set[str], card: Card) -> str:
        self.plans.clear()
        text = advise(Measures(self.measure, self.measure_evaluation), given, can, card)
        assert len(self.plans) <= MOST_PLANS * (2 if "sharded" in can else 1)
        return text


def price(settings: PlannedSettings, given: PlannedSettings) -> tuple[bool, bool, float]:
    halvings = math.log2(given.batch_size / settings.batch_size)
    time = SLOWER[settings.optimizer] / SLOWER[given.optimizer] * 1.04**halvings
    utterances = {"gradients": 2, "weights": 1}
    time *= 1 + utterances.get(settings.optimizer, 0) / settings.batch_size
    time /= 1 + utterances.get(given.optimizer, 0) / given.batch_size
    time *= 1.33 if settings.checkpointing > given.checkpointing else 1
    return settings.frozen > given.frozen, settings.sharded, time


def every(given: PlannedSettings, can: set[str]) -> list[PlannedSettings]:
    """All settings that the flags can reach."""
    update = given.batch_size * given.accumulation
    optimizers = [given.optimizer]
    if "optimizer" in can:
        optimizers = list(SLOWER)[list(SLOWER).index(given.optimizer) :]
        if "weights" not in can and given.optimizer != "weights":
            optimizers.remove("weights")
    switches = {}
    for name in ("checkpointing", "frozen"):
        switches[name] = {getattr(given, name), name in can or getattr(given, name)}
    choices = itertools.product(
        [size for size in range(1, given.batch_size + 1) if update % size == 0],
        sorted(switches["checkpointing"]),
        optimizers,
        sorted(switches["frozen"]),
        (8, 4, 2, 1),
    )
    settings = [PlannedSettings(choice[0], update // choice[0], *choice[1:]) for choice in choices]
    if "sharded" in can:
        shards = [replace(each, optimizer="adamw", sharded=True) for each in settings]
        settings += dict.fromkeys(shards)
    return settings


def advised(text: str, given: PlannedSettings) -> PlannedSettings:
    """The settings that the flags of the text lead to."""
    flags = re.findall(r"^  (--.*): ", text, re.MULTILINE)
    values = {name: value for name, value in re.findall(r"--(\w+) ?(\w*)", " ".join(flags))}
    optimizer = values.get("optimizer", given.optimizer)
    if "no_use_cpu_offload" in values:
        optimizer = "adamw"
    elif "use_cpu_offload" in values:
        optimizer = values["use_cpu_offload"] or "states"
    return PlannedSettings(
        int(values.get("batch_size", given.batch_size)),
        int(values.get("gradient_accumulation_steps", given.accumulation)),
        "gradient_checkpointing" in values or given.checkpointing,
        optimizer,
        "freeze_encoder" in values or given.frozen,
        int(values.get("eval_batch_size", given.eval_batch_size)),
        "sharded" in values,
    )


def saved(text: str) -> float:
    """The sum of the savings in bytes."""
    unit = {"MiB": MIB, "GiB": 1024 * MIB}
    savings = re.findall(r": (-?[\d.]+) (\wiB) less$", text, re.MULTILINE)
    return sum(float(value) * unit[name] for value, name in savings)


def random_case(seed: int, **step) -> tuple[Step, PlannedSettings, set[str], Card]:
    """A step, settings and a card that is between too small for everything and large enough for the
    settings."""
    draw = random.Random(seed)
    given = PlannedSettings(
        draw.choice([1, 2, 3, 6, 8, 12, 24, 32]),
        draw.choice([1, 1, 2, 3, 4]),
        draw.random() < 0.2,
        draw.choice(["adamw", "adamw", *SLOWER]),
        draw.random() < 0.2,
    )
    can = {name for name in sorted(EVERYTHING) if draw.random() < 0.8}
    if draw.random() < 0.3:
        can.add("sharded")
    model = Step(draw, **step)
    totals = [model.largest(settings).total for settings in every(given, can)]
    capability = draw.choice([(8, 6), (9, 0)])
    extra = CONTEXT + workspace(Card("", 0, capability))
    total = int((draw.uniform(0.95 * min(totals), 1.02 * max(totals)) + extra) / 0.9)
    return model, given, can, Card("some card", total, capability)


@pytest.mark.parametrize("kinked", [False, True])
def test_the_cheapest_settings_that_fit(kinked):
    outcomes = set()
    for seed in range(300):
        step, given, can, card = random_case(seed, kinked=kinked)
        text = step.advice(given, can, card)
        reachable = every(given, can)
        fitting = [each for each in reachable if verdict(step.largest(each), card)[0] == "fits"]
        chosen = advised(text, given)
        peak = step.largest(chosen)
        outcomes.add("fits as it is" if chosen == given else "fits" if fitting else "does not fit")
        if fitting:
            cheapest = min(price(settings, given) for settings in fitting)
            assert chosen in fitting, seed
            assert price(chosen, given) == pytest.approx(cheapest), seed
            assert text.endswith(": fits"), seed
        else:
            assert peak.total == min(step.largest(each).total for each in reachable), seed
            assert "These flags are not enough" in text, seed
        rounding = (text.count("less\n") * 0.0051 + 0.001) * 1024 * MIB
        difference = step.largest(given).total - peak.total
        assert saved(text) == pytest.approx(difference, abs=rounding), seed
    assert len(outcomes) == 3


def test_the_size_of_8_bit_states_is_measured():
    for seed in range(100):
        step, given, can, card = random_case(seed, states_off=1.5)
        text = step.advice(given, can, card)
        peak = step.largest(advised(text, given))
        assert ("not enough" in text) == (verdict(peak, card)[0] != "fits"), seed
        assert f"{size(needed(peak, card))} of " in text, seed


def plain_step(settings: PlannedSettings) -> Peak:
    """100 MiB of weights, of which half are the encoder's, and 400 MiB an utterance."""
    trained = 50 if settings.frozen else 100
    activations = settings.batch_size * (100 if settings.checkpointing else 400)
    states = trained * BYTES[settings.optimizer] / 4
    parts = {"weights": 100, "gradients": trained, "optimizer states": states}
    parts |= {"activations": activations, "temporary": 0, "batch": 0}
    return Peak({name: int(count * MIB) for name, count in parts.items()}, 0, "", "backward", 0)


PLAIN = Measures(plain_step)


def card_with_room(mebibytes: int) -> Card:
    used = mebibytes * MIB + CONTEXT + workspace(Card("", 0, (8, 6)))
    return Card("some card", int(used / 0.9) + 1, (8, 6))


def test_the_flags_and_their_order():
    given = PlannedSettings(4, 2, False, "adamw", False)
    everything = advise(PLAIN, given, EVERYTHING, card_with_room(260)).splitlines()
    assert everything[:4] == [
        "  --use_cpu_offload: 0.20 GiB less",
        "  --freeze_encoder: 50.0 MiB less",
        "  --gradient_checkpointing: 1.17 GiB less",
        "  --batch_size 1 --gradient_accumulation_steps 8: 0.29 GiB less",
    ]
    assert everything[4:] == ["Peak with these flags: 0.79 GiB of 0.89 GiB (some card): fits"]
    eight_bit = advise(PLAIN, given, EVERYTHING, card_with_room(1860)).splitlines()
    assert eight_bit[0] == "  --batch_size 2 --gradient_accumulation_steps 4: 0.78 GiB less"
    fits = advise(PLAIN, given, EVERYTHING, card_with_room(2000))
    assert fits.startswith("Peak with the given flags: ")


@pytest.mark.parametrize(
    "optimizer, can, flags",
    [
        ("adamw_8bit", "optimizer", "--optimizer adamw --use_cpu_offload"),
        ("adamw_8bit", "sharded", "--optimizer adamw --sharded"),
        ("states", "sharded", "--no_use_cpu_offload --sharded"),
    ],
)
def test_what_excludes_a_flag_is_taken_back(optimizer, can, flags):
    step = Step(random.Random(1))
    given = PlannedSettings(1, 8, True, optimizer, False)
    card = card_with_room(step.largest(given).total // MIB - 1)
    assert step.advice(given, {can}, card).startswith(f"  {flags}: ")


def test_what_fits_nowhere_gets_the_smallest_card():
    given = PlannedSettings(4, 2, False, "adamw", False)
    text = advise(PLAIN, given, set(), card_with_room(690))
    assert text.splitlines()[0].startswith("  --batch_size 1 ")
    *_, last = text.splitlines()
    assert last.startswith("These flags are not enough: take a smaller model, or --max_duration.")
    assert last.endswith(" The smallest card: 4gb")

    def huge(settings: PlannedSettings) -> Peak:
        return Peak({"weights": 1 << 40, "optimizer states": 0}, 0, "", "update", 0)

    assert advise(Measures(huge), given, set(), card_with_room(1)).endswith("none that is known")
