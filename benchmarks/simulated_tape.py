"""Recordings that are only log-probabilities: what a peaky CTC model with a given letter error rate
hears of a text, with true times, for measurements without a model."""

from dataclasses import dataclass, field

import numpy as np

LETTERS = " abcdefghijklmnoprstuvyz"
BLANK = len(LETTERS)
FRAME = 0.02  # seconds
RATE = 14.0  # letters a second


@dataclass
class Tape:
    """`log_probs` (T, V); the `true` (piece, start, end) of what is read, in seconds, and the
    `texts` that the aligner is given, in their order."""

    log_probs: np.ndarray
    true: list[tuple[int, float, float]]
    texts: list[str]


@dataclass
class _Track:
    letters: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    now: float = 0.0


def sentences(random: np.random.Generator, count: int, words: int = 3000) -> list[str]:
    """Sentences of 3 to 18 made-up words, of which few are frequent."""
    consonants, vowels = "bcdfghjklmnprstvz", "aeiouy"
    lexicon = [
        "".join(
            random.choice(list(consonants)) + random.choice(list(vowels))
            for _ in range(random.integers(1, 5))
        )
        for _ in range(words)
    ]
    shares = 1 / np.arange(3, words + 3)
    shares /= shares.sum()
    return [
        " ".join(lexicon[i] for i in random.choice(words, random.integers(3, 19), p=shares))
        for _ in range(count)
    ]


def read(track: _Track, text: str, random: np.random.Generator) -> tuple[float, float]:
    """Adds the letters of a text to the track; returns when its sound begins and ends."""
    pace = random.uniform(0.85, 1.2) / RATE
    start = track.now
    for letter in text:
        track.letters.append(LETTERS.index(letter))
        track.times.append(track.now + 0.5 * pace)
        track.now += pace * random.uniform(0.6, 1.4)
    return start, track.now


def emitted(track: _Track, error_rate: float, random: np.random.Generator) -> np.ndarray:
    """(T, V) log-probabilities: blanks, and peaks of one or two frames at the letters, of which
    a share is missing, another letter or doubled by one."""
    frames = int(track.now / FRAME) + 1
    size = len(LETTERS) + 1
    logits = random.normal(0, 1.5, (frames, size)).astype(np.float32)
    logits[:, BLANK] = random.uniform(6, 10, frames)
    for letter, time in zip(track.letters, track.times, strict=True):
        frame = int(time / FRAME)
        height = random.uniform(9, 14)
        if random.random() < error_rate:
            kind = random.random()
            logits[frame, letter] = random.uniform(3, 7)
            if kind < 0.25:
                continue
            other = int(random.integers(len(LETTERS)))
            if kind < 0.8:
                letter = other
            elif frame + 2 < frames:
                logits[frame + 2, other] = height
                logits[frame + 2, BLANK] = 4
        logits[frame, letter] = height
        logits[frame, BLANK] = random.uniform(3, 7)
        if random.random() < 0.4 and frame + 1 < frames:
            logits[frame + 1, letter] = height - 1
            logits[frame + 1, BLANK] = random.uniform(4, 9)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def tape(
    seed: int, minutes: float, error_rate: float, missing=0.0, added=0.0, moved=0.0, music=True
) -> Tape:
    """A reading of about so many minutes. Shares of the sentences are `missing` in the recording,
    `added` to it, or `moved` in blocks of one to ten; there is an introduction that is not in the
    text, and `music`, in which letters are heard."""
    random = np.random.default_rng(seed)
    texts = sentences(random, max(8, round(minutes * 60 / 5.4)))
    others = iter(sentences(random, len(texts) + 8))
    order = reordered(list(range(len(texts))), moved, random)
    track = _Track()
    true = []
    if music:
        _noise(track, 20, random)
        for _ in range(3):
            read(track, next(others), random)
            track.now += random.uniform(0.2, 1.2)
    for number in order:
        if random.random() < missing:
            continue
        true.append((number, *read(track, texts[number], random)))
        track.now += random.uniform(0.15, 1.2)
        if random.random() < added:
            read(track, next(others), random)
            track.now += random.uniform(0.15, 1.2)
        if music and random.random() < 0.01:
            _noise(track, random.uniform(3, 20), random)
    return Tape(emitted(track, error_rate, random), true, texts)


def reordered(order: list[int], share: float, random: np.random.Generator) -> list[int]:
    """The order after a share of it was moved, in blocks of one to ten."""
    count = round(share * len(order))
    while count > 0:
        size = min(count, int(random.integers(1, 11)))
        first = int(random.integers(0, len(order) - size + 1))
        block = order[first : first + size]
        del order[first : first + size]
        place = int(random.integers(0, len(order) + 1))
        order[place:place] = block
        count -= size
    return order


def _noise(track: _Track, seconds: float, random: np.random.Generator) -> None:
    """Sound in which letters are heard now and then."""
    end = track.now + seconds
    while track.now < end:
        track.letters.append(int(random.integers(len(LETTERS))))
        track.times.append(track.now)
        track.now += random.exponential(0.25) + 0.04
    track.now += 0.5
