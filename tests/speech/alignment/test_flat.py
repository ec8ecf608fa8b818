"""Aligning by lengths: against brute force, and on simulated readings whose places are known."""

import functools
import itertools
import math

import numpy as np
import pytest

from common.errors import DataError
from speech.alignment import flat
from speech.alignment.emissions import ENERGY_FRAME
from speech.alignment.flat import Reading
from speech.alignment.sentences import Piece

RATE = 0.07  # seconds a letter
LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def price(seconds, letters, reading, first, last, start, end) -> float:
    """Of one match."""
    if start == end:
        return flat.NOT_IN_TEXT + reading.ends[first]
    if first == last:
        return flat.NOT_READ
    expected = reading.rate * letters[start:end].sum()
    deviation = math.hypot(reading.spread * expected, flat.SPREAD_SECONDS)
    z = (seconds[first:last].sum() - expected) / deviation
    density = 0.5 * z * z + math.log(deviation * math.sqrt(2 * math.pi))
    return density + (end - start - 1) * flat.JOINED + reading.ends[last - 1]


def least(seconds, letters, reading) -> float:
    """The price of the best path, of all that there are."""

    @functools.cache
    def rest(row: int, column: int) -> float:
        if (row, column) == (len(seconds), len(letters)):
            return 0.0
        steps = [(1, 0), (0, 1)]
        steps += [(a, b) for a in range(1, flat.STRETCHES + 1) for b in range(1, flat.PIECES + 1)]
        totals = [
            price(seconds, letters, reading, row, row + a, column, column + b)
            + rest(row + a, column + b)
            for a, b in steps
            if row + a <= len(seconds) and column + b <= len(letters)
        ]
        return min(totals)

    return rest(0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_path_is_that_of_brute_force(seed):
    random = np.random.default_rng(seed)
    seconds = random.uniform(0.1, 3.0, random.integers(1, 8))
    letters = random.integers(1, 40, random.integers(1, 8))
    reading = Reading(RATE, random.uniform(0.05, 0.3), random.uniform(-4, 4, len(seconds)))
    found = flat.best_matches(seconds, letters, reading)
    # They follow each other from the first stretch and piece to the last.
    ends = [(0, 0), *((each.last, each.end) for each in found)]
    assert ends[:-1] == [(each.first, each.start) for each in found]
    assert ends[-1] == (len(seconds), len(letters))
    places = [(each.first, each.last, each.start, each.end) for each in found]
    total = sum(price(seconds, letters, reading, *place) for place in places)
    assert total == pytest.approx(least(seconds, letters, reading))


def test_a_narrow_band(monkeypatch):
    """Also where a stretch is longer than all others together."""
    monkeypatch.setattr(flat, "BAND", 5)
    letters = np.full(100, 20)
    for seconds in (np.full(100, 1.4), np.append(np.full(50, 1.4), 300.0), np.full(3, 1.4)):
        reading = Reading(RATE, 0.1, np.zeros(len(seconds)))
        found = flat.best_matches(seconds, letters, reading)
        assert found[-1].end == 100 and found[-1].last == len(seconds)
        assert all((a.last, a.end) == (b.first, b.start) for a, b in itertools.pairwise(found))


def reading_of(
    random, count: int, missing: float
) -> tuple[list[Piece], np.ndarray, list[tuple[float, float] | None]]:
    """Pieces, the energy of a reading of them in which a share is `missing`, and where each is. A
    piece has pauses within it, too, and some follow the one before without a pause."""
    levels = [np.full(100, -60.0)]
    pieces, places = [], []
    now = 1.0
    for _ in range(count):
        words = [
            "".join(random.choice(LETTERS, random.integers(2, 9)))
            for _ in range(int(random.integers(2, 16)))
        ]
        pieces.append(Piece(" ".join(words), True))
        if random.random() < missing:
            places.append(None)
            continue
        pace = RATE * random.normal(1, 0.1)
        start = now
        for word in words:
            sound = np.full(round(len(word) * pace / ENERGY_FRAME), -20.0)
            pause = random.uniform(0.15, 0.4) if random.random() < 0.15 else 0.0
            levels += [sound, np.full(round(pause / ENERGY_FRAME), -60.0)]
            now += (len(levels[-1]) + len(sound)) * ENERGY_FRAME
        places.append((start, now - len(levels[-1]) * ENERGY_FRAME))
        pause = random.uniform(0.3, 0.9) if random.random() < 0.97 else 0.0
        levels.append(np.full(round(pause / ENERGY_FRAME), -60.0))
        now += len(levels[-1]) * ENERGY_FRAME
    energy = np.concatenate(levels)
    return pieces, energy + random.normal(0, 2, len(energy)), places


@pytest.mark.parametrize("missing, most_wrong", [(0.0, 0.02), (0.05, 0.1)])
def test_utterances_of_a_simulated_reading(missing, most_wrong):
    random = np.random.default_rng(2)
    pieces, energy, places = reading_of(random, 400, missing)
    cuts = flat.align(pieces, energy)
    numbers = {piece.text: number for number, piece in enumerate(pieces)}
    right = []
    for row in cuts.utterances:
        first = next(n for text, n in numbers.items() if row["text"].startswith(text))
        last = next(n for text, n in numbers.items() if row["text"].endswith(text))
        ends = places[first], places[last]
        edges = (row["offset"], row["offset"] + row["duration"])
        right.append(
            all(ends) and abs(edges[0] - ends[0][0]) < 0.1 and abs(edges[1] - ends[1][1]) < 0.1
        )
        assert row["confidence"] <= 0 and "error_rate" not in row
    assert np.mean(right) >= 1 - most_wrong
    total = sum(place[1] - place[0] for place in places if place)
    kept = sum(row["duration"] for row in cuts.utterances)
    assert 0.35 * total < kept < 0.65 * total
    assert {row["reason"] for row in cuts.texts} >= {flat.cutting.UNCERTAIN}


@pytest.mark.parametrize("more", [[], [Piece("a" * 100_000, True)]])
def test_a_text_that_is_far_too_long_is_refused(more):
    pieces, energy, _ = reading_of(np.random.default_rng(3), 40, 0.0)
    with pytest.raises(DataError, match=r"the text is too long: 0\.0"):
        flat.align(more or pieces * 20, energy)
