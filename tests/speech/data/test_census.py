"""What the check of a recogniser's data says of texts, of sets of made-up rows."""

import numpy as np
import pytest

from speech.data import checks, splits
from speech.data.census import look_alikes, take_census
from speech.data.columns import Corpus, Strings
from tests.speech.data.test_checks import make_corpus

VOWELS = "aeiou"


def spoken(count: int, seed: int = 0) -> list[tuple[str, float, str]]:
    """Texts of 2 to 12 words of 4 letters, said at about 12 letters a second."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = [
            "".join(random.choice([*VOWELS, *"bdgkmn"], 4)) for _ in range(random.integers(2, 13))
        ]
        seconds = len(words) / 3 * random.uniform(0.8, 1.25)
        rows.append((" ".join(words), seconds, ""))
    return rows


def with_texts(rows: list[tuple[str, float, str]], texts: list[str]) -> list:
    return [(text, *row[1:]) for text, row in zip(texts, rows, strict=True)]


def said_of(rows: list, capsys, **sets: Corpus) -> str:
    splits.report_checked({"train": make_corpus(rows), **sets})
    return capsys.readouterr().out.partition("utterances by length")[0]


def test_letters_and_marks_are_counted_with_tone_letters():
    texts = ["aé, ሰላም! 12 e\u0301", "", "12", "ma˥˩ wa꞉", "nω", "ε a", "ωn b", "да"]
    census = take_census(Strings(texts))
    assert census.letters.tolist() == [7, 0, 0, 7, 2, 2, 3, 2]
    assert census.mixed.tolist() == [4, 6]
    latin, none, greek, cyrillic = census.scripts[[0, 1, 5, 7]].tolist()
    assert none == 0 and len({none, latin, greek, cyrillic}) == 4
    assert census.scripts.tolist() == [latin, 0, 0, latin, latin, greek, greek, cyrillic]
    assert census.counts["a"] == 4 and census.counts["ሰ"] == 1


def test_of_clean_texts_one_line_is_said(capsys):
    rows = [(text, 40 * seconds, "") for text, seconds, _ in spoken(400)]
    out = said_of(rows, capsys)
    assert out.startswith("characters: 11 different ones, the rarest: ") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda texts: [*texts[1:], texts[0]], "texts of the lines 1 to 400 fit the length of the"),
        (lambda texts: [texts[-1], *texts[:-1]], "texts of the lines 1 to 400 fit the length of"),
        (lambda texts: [*texts[:200], *texts[201:], "a"], "texts of the lines 201 to 400 fit"),
        (lambda texts: [*np.random.default_rng(0).permutation(texts)], "long texts do not belong to"),
        (lambda texts: ["0."] * 100 + texts[100:], "without words: `0.` x 100: is this what is"),
        (lambda texts: ["0."] * 400, "without words: `0.` x 400: is this"),
        (lambda texts: ["♪", "_", "sp", "sp", *texts[4:]], "`sp` x 2, `_` x 1, `♪` x 1: is this"),
        (lambda texts: ["a <unk>", *texts[1:]], "/data/0.wav: <unk>\n"),
        (lambda texts: ["a " * 300, *texts[1:]], "/data/0.wav: 300 letters in "),
        (lambda texts: ["aɛ", "aaε", *texts[2:]], "ɛ (U+025B) x 1 and ε (U+03B5) x 1: is one of"),
        (lambda texts: ["kа", *texts[1:]], "such as kа: Cyrillic а (U+0430) beside Latin letters"),
        (lambda texts: ["а", *texts[1:]], "the rarest: Cyrillic а (U+0430) x 1, "),
    ],
)  # fmt: skip
def test_what_is_said_of_texts_that_are_not_clean(change, expected, capsys):
    rows = spoken(400)
    assert expected not in said_of(rows, capsys)
    assert expected in said_of(with_texts(rows, change([text for text, *_ in rows])), capsys)


def test_letters_that_one_set_writes_in_another_way_are_found():
    counts = take_census(["k’a", "kʼa", "wa:", "wa꞉"]).counts
    assert look_alikes(counts) == [
        "’ (U+2019) x 1 and ʼ (U+02BC) x 1",
        ": (U+003A) x 1 and ꞉ (U+A789) x 1",
    ]
    assert look_alikes(take_census(["bεέ nω"]).counts) == []  # Mboshi's own letters


@pytest.mark.parametrize(
    ("heard", "others", "expected"),
    [
        (["ann", "bob"], ["ann", "eve"], "1 of its 2 speakers are in the training set, too"),
        (["ann", "bob"], ["eve", "eve"], ""),
        (["ann", "ann"], ["ann", "ann"], ""),
        (["", ""], ["", "ann"], ""),
    ],
)
def test_speakers_of_training_and_test_set(heard, others, expected, capsys):
    train, test = (make_corpus([("a", 2.0, name) for name in each]) for each in (heard, others))
    checks.note_speakers(train, test, "test")
    out = capsys.readouterr().out
    assert expected in out and bool(out) == bool(expected)


@pytest.mark.parametrize(
    ("minutes", "from_scratch", "expected"),
    [
        (22, True, "warning: 22 minutes of training speech are too few for a model from scratch"),
        (22, False, ""),
        (5, False, "warning: 5 minutes of training speech are few"),
        (150, True, ""),
    ],
)
def test_little_speech_for_a_recogniser(minutes, from_scratch, expected, capsys):
    checks.note_little(make_corpus([("a", 60.0 * minutes, "")]), from_scratch)
    out = capsys.readouterr().out
    assert out.startswith(expected) and bool(out) == bool(expected)
