"""Simulated tapes, from log-probabilities to utterances: what is found, kept, cut and left out."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from speech.alignment import cutting, emissions, letters, matching
from speech.alignment.sentences import Piece

LETTERS = " abcdefghijklmnoprstuvyz"
BLANK = len(LETTERS)
FRAME = 0.02  # seconds
RATE = 14.0  # letters a second
FAR = 0.75  # seconds: a cut that is further off is wrong
DISORDER = {"missing": 0.1, "added": 0.1, "moved": 0.1}
VOCABULARY = letters.of_characters(
    {letter: i for i, letter in enumerate(LETTERS)}, BLANK, len(LETTERS) + 1
)


# --- what a peaky CTC model with a given letter error rate hears of a text ------------------------


@dataclass
class Tape:
    """A recording until now: the letters that are heard and their `times` in seconds, the `true`
    (piece, start, end) of what is read, and the `texts` that the aligner is given, in their
    order."""

    random: np.random.Generator
    texts: list[str]
    letters: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    true: list[tuple[int, float, float]] = field(default_factory=list)
    now: float = 0.0

    def read(self, text: str) -> tuple[float, float]:
        """Adds a text and a pause; returns when its sound begins and ends."""
        pace = self.random.uniform(0.85, 1.2) / RATE
        start = self.now
        for letter in text:
            self.letters.append(LETTERS.index(letter))
            self.times.append(self.now + 0.5 * pace)
            self.now += pace * self.random.uniform(0.6, 1.4)
        end = self.now
        self.now += self.random.uniform(0.15, 1.2)
        return start, end

    def play_music(self, seconds: float) -> None:
        """Adds sound in which letters are heard now and then."""
        end = self.now + seconds
        while self.now < end:
            self.letters.append(int(self.random.integers(len(LETTERS))))
            self.times.append(self.now)
            self.now += self.random.exponential(0.25) + 0.04
        self.now += 0.5

    def log_probs(self, error_rate: float) -> np.ndarray:
        """(T, V): blanks, and peaks of one or two frames at the letters, of which a share is
        missing, another letter or doubled by one."""
        random = self.random
        frames = int(self.now / FRAME) + 1
        logits = random.normal(0, 1.5, (frames, len(LETTERS) + 1)).astype(np.float32)
        logits[:, BLANK] = random.uniform(6, 10, frames)
        for letter, time in zip(self.letters, self.times, strict=True):
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


def sentences(random: np.random.Generator, count: int) -> list[str]:
    """Sentences of 3 to 18 made-up words, of which few are frequent."""
    syllables = [first + second for first in "bcdfghjklmnprstvz" for second in "aeiouy"]
    lexicon = ["".join(random.choice(syllables, random.integers(1, 5))) for _ in range(3000)]
    shares = 1 / np.arange(3, 3003)
    shares /= shares.sum()
    return [
        " ".join(random.choice(lexicon, random.integers(3, 19), p=shares)) for _ in range(count)
    ]


def made(seed: int, minutes: float, missing=0.0, added=0.0, moved=0.0) -> Tape:
    """A reading of about so many minutes. Shares of the sentences are `missing` in the recording,
    `added` to it, or `moved` in blocks of one to ten; there is an introduction that is not in the
    text, and music, in which letters are heard."""
    random = np.random.default_rng(seed)
    tape = Tape(random, sentences(random, round(minutes * 60 / 5.4)))
    others = iter(sentences(random, len(tape.texts) + 8))
    order = list(range(len(tape.texts)))
    left = round(moved * len(order))
    while left > 0:
        size = min(left, int(random.integers(1, 11)))
        first = int(random.integers(0, len(order) - size + 1))
        block = order[first : first + size]
        del order[first : first + size]
        place = int(random.integers(0, len(order) + 1))
        order[place:place] = block
        left -= size
    tape.play_music(20)
    for _ in range(3):
        tape.read(next(others))
    for number in order:
        if random.random() < missing:
            continue
        tape.true.append((number, *tape.read(tape.texts[number])))
        if random.random() < added:
            tape.read(next(others))
        if random.random() < 0.01:
            tape.play_music(random.uniform(3, 20))
    return tape


def cut(tape: Tape, error_rate: float, texts: list[str] | None = None) -> cutting.Cuts:
    texts = texts or tape.texts
    text = matching.text_of(texts, VOCABULARY)
    windows = np.array_split(tape.log_probs(error_rate), 7)
    found = emissions.collect(windows, FRAME, text.tokens, BLANK)
    placed = matching.place(found, text, VOCABULARY)
    heard = matching.heard_in(found, VOCABULARY)
    return cutting.cut([Piece(each, True) for each in texts], placed, found, heard)


def judged(cuts: cutting.Cuts, tape: Tape, texts: list[str]) -> list[dict]:
    """For each utterance whether it is right, its errors in seconds, and the seconds of the text
    that it covers."""
    true = sorted(tape.true, key=lambda each: each[1])
    starts = np.array([start for _, start, _ in true])
    ends = np.array([end for _, _, end in true])
    rows = []
    for row in cuts.utterances:
        start, end = row["offset"], row["offset"] + row["duration"]
        first = int(np.abs(starts - start).argmin())
        last = max(first, int(np.abs(ends - end).argmin()))
        wanted = " ".join(texts[number] for number, _, _ in true[first : last + 1])
        errors = [abs(start - starts[first]), abs(end - ends[last])]
        seconds = float((ends - starts)[first : last + 1].sum())
        is_right = row["text"] == wanted and max(errors) <= FAR
        rows.append({"right": is_right, "errors": errors, "seconds": seconds})
    return rows


def seconds_read(tape: Tape) -> float:
    return sum(end - start for _, start, end in tape.true)


# --- what is found of it --------------------------------------------------------------------------


@pytest.mark.parametrize("error_rate", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("in_disorder", [False, True])
def test_what_is_kept_is_right(error_rate, in_disorder):
    tape = made(11, 6, **(DISORDER if in_disorder else {}))
    cuts = cut(tape, error_rate)
    rows = judged(cuts, tape, tape.texts)
    assert [row for row in rows if not row["right"]] == []
    assert np.median([row["errors"] for row in rows]) < 0.06
    assert sum(row["seconds"] for row in rows) > 0.9 * seconds_read(tape)
    assert all(0.8 <= row["duration"] <= 20 for row in cuts.utterances)


def test_what_was_not_read_and_what_is_not_in_the_text_are_listed():
    tape = made(12, 5, missing=0.1, added=0.1)
    cuts = cut(tape, 0.1)
    read = {number for number, _, _ in tape.true}
    missing = {text for number, text in enumerate(tape.texts) if number not in read}
    listed = {row["text"] for row in cuts.texts if row["reason"] == cutting.NOT_FOUND}
    assert missing and missing <= listed
    # The introduction is the first sound that is not in the text.
    first = cuts.sounds[0]
    assert first["offset"] == 0 and abs(first["duration"] - tape.true[0][1]) < 0.2
    ends = [row["offset"] + row["duration"] for row in cuts.utterances]
    starts = [row["offset"] for row in cuts.utterances]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_another_text_is_not_forced_onto_a_tape():
    other = sentences(np.random.default_rng(99), 40)
    cuts = cut(made(13, 4), 0.1, other)
    assert cuts.utterances == [] and len(cuts.texts) == 40


def test_numbers_that_the_vocabulary_lacks_do_not_break_a_sentence():
    """They are written as digits and read as words."""
    tape = made(14, 4)
    texts = []
    for text in tape.texts:
        words = text.split()
        middle = len(words) // 2
        texts.append(" ".join([*words[:middle], "1984", *words[middle:][1:]]).capitalize() + "!")
    rows = judged(cut(tape, 0.05, texts), tape, texts)
    right = sum(row["seconds"] for row in rows if row["right"])
    assert right > 0.9 * seconds_read(tape)
    assert sum(not row["right"] for row in rows) <= 1


def test_a_silent_recording():
    silence = Tape(np.random.default_rng(0), ["ba do ki"], now=5.0)
    assert cut(silence, 0.1).utterances == []
