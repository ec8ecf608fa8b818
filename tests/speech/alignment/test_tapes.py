"""Simulated tapes, from log-probabilities to utterances: what is found, kept, cut and left out."""

import dataclasses

import numpy as np
import pytest

from benchmarks import alignment, simulated_tape
from speech.alignment import cutting, emissions, letters, matching
from speech.alignment.sentences import Piece

SIZE = len(simulated_tape.LETTERS) + 1
BLANK = SIZE - 1
VOCABULARY = letters.of_characters(
    {letter: i for i, letter in enumerate(simulated_tape.LETTERS)}, BLANK, SIZE
)


def cut(tape, texts=None) -> cutting.Cuts:
    texts = texts or tape.texts
    text = matching.text_of(texts, VOCABULARY)
    windows = np.array_split(tape.log_probs, 7)
    found = emissions.collect(windows, simulated_tape.FRAME, text.tokens, BLANK)
    placed = matching.place(found, text, VOCABULARY)
    heard = matching.heard_in(found, VOCABULARY)
    return cutting.cut([Piece(each, True) for each in texts], placed, found, heard)


def as_table(tape) -> dict:
    return dataclasses.asdict(tape)


@pytest.mark.parametrize("error_rate", alignment.ERROR_RATES)
@pytest.mark.parametrize("in_disorder", [False, True])
def test_what_is_kept_is_right(error_rate, in_disorder):
    tape = simulated_tape.tape(11, 6, error_rate, **(alignment.DISORDER if in_disorder else {}))
    cuts = cut(tape)
    segments = [
        (row["text"], row["offset"], row["offset"] + row["duration"], row["confidence"])
        for row in cuts.utterances
    ]
    rows = alignment.judged(segments, as_table(tape))
    assert [row for row in rows if not row["right"]] == []
    assert np.median([row["errors"] for row in rows]) < 0.06
    total = sum(end - start for _, start, end in tape.true)
    assert sum(row["seconds"] for row in rows) > 0.9 * total
    assert all(0.8 <= row["duration"] <= 20 for row in cuts.utterances)


def test_what_was_not_read_and_what_is_not_in_the_text_are_listed():
    tape = simulated_tape.tape(12, 5, 0.1, missing=0.1, added=0.1)
    cuts = cut(tape)
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
    tape = simulated_tape.tape(13, 4, 0.1)
    other = simulated_tape.sentences(np.random.default_rng(99), 40)
    cuts = cut(tape, other)
    assert cuts.utterances == [] and len(cuts.texts) == 40


def test_numbers_that_the_vocabulary_lacks_do_not_break_a_sentence():
    """They are written as digits and read as words."""
    tape = simulated_tape.tape(14, 4, 0.05, music=False)
    texts = []
    for text in tape.texts:
        words = text.split()
        middle = len(words) // 2
        texts.append(" ".join([*words[:middle], "1984", *words[middle + 1 :]]).capitalize() + "!")
    cuts = cut(tape, texts)
    table = {**as_table(tape), "texts": texts}
    segments = [
        (row["text"], row["offset"], row["offset"] + row["duration"], 0.0)
        for row in cuts.utterances
    ]
    rows = alignment.judged(segments, table)
    right = sum(row["seconds"] for row in rows if row["right"])
    assert right > 0.9 * sum(end - start for _, start, end in tape.true)
    assert sum(not row["right"] for row in rows) <= 1


def test_a_silent_or_empty_recording():
    random = np.random.default_rng(0)
    track = simulated_tape._Track(now=5.0)
    silence = simulated_tape.Tape(simulated_tape.emitted(track, 0.1, random), [], ["ba do ki"])
    assert cut(silence).utterances == []
