"""The advised flags: they fit, nothing cheaper does, few plans are made, and their savings add
up."""

import itertools
import math
import random
import re

import pytest

from dry_run.advice import Settings, advise
from dry_run.cards import CONTEXT, MIB, Card, workspace
from dry_run.peak import PARTS, Peak
from dry_run.report import needed, size, verdict

EVERYTHING = {"checkpointing", "optimizer", "frozen"}
TIME = {"adamw": 1.0, "adamw_8bit": 1.05, "offload": 1.3}
BYTES = {"adamw": 8, "adamw_8bit": 2.03125, "offload": 0}


class Step:
    """A model of a step's memory, linear in the batch size: `measure` counts its calls."""

    def __init__(self, draw: random.Random, kinked: bool = False, states_off: float = 1.0):
        self.calls = 0
        self.weights = draw.randrange(20, 3000) * MIB
        self.trained = draw.uniform(0.3, 0.9)  # share of the weights that a frozen encoder leaves
        self.per_utterance = draw.randrange(1, 400) * MIB
        self.kept = (
            draw.uniform(0.1, 0.8),
            draw.uniform(0.3, 0.9),
        )  # shares of activations: checkpointing, frozen
        self.update = draw.randrange(0, 3000) * MIB if kinked else 0
        self.states_off = (
            states_off  # the 8-bit states are larger than the rule says by this factor
        )

    def measure(self, settings: Settings) -> Peak:
        self.calls += 1
        trained = self.weights * (self.trained if settings.frozen else 1)
        activations = settings.batch_size * self.per_utterance
        activations *= (self.kept[0] if settings.checkpointing else 1) * (
            self.kept[1] if settings.frozen else 1
        )
        states = (
            trained
            * BYTES[settings.optimizer]
            / 4
            * (self.states_off if settings.optimizer == "adamw_8bit" else 1)
        )
        parts = dict.fromkeys(PARTS, 0) | {
            "weights": self.weights,
            "gradients": int(trained) if settings.accumulation > 1 else 0,
            "activations": max(int(activations), self.update),
            "optimizer states": int(states),
            "batch": 4 * MIB * settings.batch_size,
        }
        return Peak(parts, 2 * MIB * settings.batch_size, "", "backward", 0)


def price(settings: Settings, given: Settings) -> tuple[bool, float]:
    halvings = math.log2(given.batch_size / settings.batch_size)
    time = TIME[settings.optimizer] / TIME[given.optimizer] * 1.04**halvings
    return settings.frozen > given.frozen, time * (
        1.33 if settings.checkpointing > given.checkpointing else 1
    )


def every(given: Settings, can: set[str]) -> list[Settings]:
    """All settings that the flags can reach."""
    update = given.batch_size * given.accumulation
    optimizers = list(TIME)
    return [
        Settings(batch_size, update // batch_size, checkpointing, optimizer, frozen)
        for batch_size, checkpointing, optimizer, frozen in itertools.product(
            range(1, given.batch_size + 1), (False, True), optimizers, (False, True)
        )
        if update % batch_size == 0
        and (checkpointing == given.checkpointing or (checkpointing and "checkpointing" in can))
        and (frozen == given.frozen or (frozen and "frozen" in can))
        and (
            optimizer == given.optimizer
            or (
                "optimizer" in can
                and optimizers.index(optimizer) > optimizers.index(given.optimizer)
            )
        )
    ]


def advised(text: str, given: Settings) -> Settings:
    """The settings that the flags of the text lead to."""
    flags = re.findall(r"^  (--.*): ", text, re.MULTILINE)
    values = {name: value for name, value in re.findall(r"--(\w+) ?(\w*)", " ".join(flags))}
    optimizer = (
        "offload" if "use_cpu_offload" in values else values.get("optimizer", given.optimizer)
    )
    return Settings(
        int(values.get("batch_size", given.batch_size)),
        int(values.get("gradient_accumulation_steps", given.accumulation)),
        "gradient_checkpointing" in values or given.checkpointing,
        optimizer,
        "freeze_encoder" in values or given.frozen,
    )


def saved(text: str) -> float:
    """The sum of the savings in bytes."""
    unit = {"MiB": MIB, "GiB": 1024 * MIB}
    return sum(
        float(value) * unit[name]
        for value, name in re.findall(r": (-?[\d.]+) (\wiB) less$", text, re.MULTILINE)
    )


def random_case(seed: int, **step) -> tuple[Step, Settings, set[str], Card]:
    """A step, settings and a card that is between too small for everything and large enough for the
    settings."""
    draw = random.Random(seed)
    given = Settings(
        draw.choice([1, 2, 3, 6, 8, 12, 24, 32]),
        draw.choice([1, 1, 2, 3, 4]),
        draw.random() < 0.2,
        draw.choice(["adamw", "adamw", "adamw_8bit", "offload"]),
        draw.random() < 0.2,
    )
    can = {name for name in sorted(EVERYTHING) if draw.random() < 0.8}
    model = Step(draw, **step)
    totals = [Step.measure(model, settings).total for settings in every(given, can)]
    model.calls = 0
    capability = draw.choice([(8, 6), (9, 0)])
    extra = CONTEXT + workspace(Card("", 0, capability))
    total = int((draw.uniform(0.95 * min(totals), 1.02 * max(totals)) + extra) / 0.9)
    return model, given, can, Card("some card", total, capability)


@pytest.mark.parametrize("kinked", [False, True])
def test_the_cheapest_settings_that_fit(kinked):
    outcomes = set()
    for seed in range(300):
        step, given, can, card = random_case(seed, kinked=kinked)
        text = advise(step.measure, given, can, card)
        assert step.calls <= 40, seed
        fitting = [
            settings
            for settings in every(given, can)
            if verdict(step.measure(settings), card)[0] == "fits"
        ]
        chosen = advised(text, given)
        peak = step.measure(chosen)
        outcomes.add("fits as it is" if chosen == given else "fits" if fitting else "does not fit")
        if fitting:
            assert chosen in fitting, seed
            assert price(chosen, given) == pytest.approx(
                min(price(settings, given) for settings in fitting)
            ), seed
            assert text.endswith(": fits"), seed
        else:
            assert peak.total == min(
                step.measure(settings).total for settings in every(given, can)
            ), seed
            assert "These flags are not enough" in text, seed
        rounding = (text.count("less\n") * 0.0051 + 0.001) * 1024 * MIB
        assert saved(text) == pytest.approx(step.measure(given).total - peak.total, abs=rounding), (
            seed
        )
    assert len(outcomes) == 3


def test_advice_is_verified_if_8_bit_states_are_larger_than_the_rule_says():
    for seed in range(100):
        step, given, can, card = random_case(seed, states_off=1.5)
        text = advise(step.measure, given, can, card)
        assert step.calls <= 40, seed
        peak = step.measure(advised(text, given))
        assert ("not enough" in text) == (verdict(peak, card)[0] != "fits"), seed
        assert f"{size(needed(peak, card))} of " in text, seed


def plain_step(settings: Settings) -> Peak:
    """100 MiB of weights, of which half are the encoder's, and 400 MiB an utterance."""
    trained = 50 if settings.frozen else 100
    activations = settings.batch_size * (100 if settings.checkpointing else 400)
    parts = {
        "weights": 100,
        "gradients": trained,
        "optimizer states": trained * BYTES[settings.optimizer] / 4,
    }
    parts |= {"activations": activations, "temporary": 0, "batch": 0}
    return Peak({name: int(count * MIB) for name, count in parts.items()}, 0, "", "backward", 0)


def card_with_room(mebibytes: int) -> Card:
    return Card(
        "some card",
        int((mebibytes * MIB + CONTEXT + workspace(Card("", 0, (8, 6)))) / 0.9) + 1,
        (8, 6),
    )


def test_the_flags_and_their_order():
    given = Settings(4, 2, False, "adamw", False)
    everything = advise(plain_step, given, EVERYTHING, card_with_room(260)).splitlines()
    assert everything[:4] == [
        "  --use_cpu_offload: 0.20 GiB less",
        "  --freeze_encoder: 50.0 MiB less",
        "  --gradient_checkpointing: 1.17 GiB less",
        "  --batch_size 1 --gradient_accumulation_steps 8: 0.29 GiB less",
    ]
    assert everything[4:] == ["Peak with these flags: 0.79 GiB of 0.89 GiB (some card): fits"]
    eight_bit = advise(plain_step, given, EVERYTHING, card_with_room(1860)).splitlines()
    assert eight_bit[0] == "  --batch_size 2 --gradient_accumulation_steps 4: 0.78 GiB less"
    assert advise(plain_step, given, EVERYTHING, card_with_room(2000)).startswith(
        "Peak with the given flags: "
    )


def test_offloading_takes_back_the_8_bit_optimizer():
    given = Settings(1, 8, True, "adamw_8bit", False)
    text = advise(plain_step, given, {"optimizer"}, card_with_room(320))
    assert text.splitlines()[0] == "  --optimizer adamw --use_cpu_offload: 50.8 MiB less"


def test_what_fits_nowhere_gets_the_smallest_card():
    given = Settings(4, 2, False, "adamw", False)
    text = advise(plain_step, given, set(), card_with_room(690))
    assert text.splitlines()[0].startswith("  --batch_size 1 ")
    assert (
        text.splitlines()[-1]
        == "These flags are not enough: take a smaller model, or --max_duration. The smallest"
        " card: 4gb"
    )

    def huge(settings: Settings) -> Peak:
        return Peak({"weights": 1 << 40, "optimizer states": 0}, 0, "", "update", 0)

    assert advise(huge, given, set(), card_with_room(1)).endswith("none that is known")
