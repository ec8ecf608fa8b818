"""WER and CER against an edit distance written here, and their intervals against statistics."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.decoding.recordings import recordings_table
from speech.writing import metrics
from speech.writing.metrics import Errors, count_errors
from speech.writing.text import for_scoring, in_lower_case


def distance(a: list, b: list) -> int:
    """Levenshtein's, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


texts = st.text(st.sampled_from("abह ाक़é,.- "), max_size=25)
pairs = st.lists(st.tuples(texts, texts), max_size=6)


@given(pairs=pairs, unit=st.sampled_from(["words", "characters"]))
def test_errors_are_the_edit_distance(pairs, unit):
    references, hypotheses = [r for r, _ in pairs], [h for _, h in pairs]
    cut = str.split if unit == "words" else list
    scored = [(cut(for_scoring(r)), cut(for_scoring(h))) for r, h in pairs]
    errors = count_errors(references, hypotheses, unit)
    assert errors.total == sum(distance(r, h) for r, h in scored)
    assert errors.length == sum(len(r) for r, _ in scored)
    assert errors.insertions - errors.deletions == sum(len(h) - len(r) for r, h in scored)
    assert errors.rate == errors.total / max(1, errors.length)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "unit", "expected"),
    [
        ("", "", "words", Errors()),
        ("", "one two", "words", Errors(insertions=2)),
        ("", "ab c", "characters", Errors(insertions=4)),
        ("one two", "", "words", Errors(deletions=2, length=2)),
        ("।?", "one", "words", Errors(insertions=1)),  # nothing but punctuation is empty too
        ("one, two.", "one two", "words", Errors(length=2)),
        ("हांव कोंकणी", "हांव कोंकण", "characters", Errors(deletions=1, length=11)),
        ("a b c d", "a x c d e", "words", Errors(substitutions=1, insertions=1, length=4)),
    ],
)
def test_examples(reference, hypothesis, unit, expected):
    assert count_errors([reference], [hypothesis], unit) == expected


def test_no_pairs_and_pairs_of_different_number():
    assert count_errors([], [], "words") == Errors() and Errors().rate == 0
    with pytest.raises(ValueError, match="zip"):
        count_errors(["a"], [], "words")


def rows(*pairs):
    return [{"reference": reference, "hypothesis": hypothesis} for reference, hypothesis in pairs]


CASED = {"cased": for_scoring}
BOTH = {**CASED, "lower": in_lower_case}


def error_lines(rows, readings=CASED):
    errors = metrics.read_by(rows, readings)
    return metrics.error_table(errors, metrics.rates(errors)).splitlines()


def test_error_table():
    lines = error_lines(rows(("a b c d", "a x c"), ("", "y")))
    assert [line.split() for line in lines] == [
        ["%", "95", "%", "interval", "errors", "of", "wrong", "missing", "extra"],
        ["WER", "75.00", "(50.00", "to", "200.00)", "3", "4", "1", "1", "1"],
        ["CER", "57.14", "(42.86", "to", "200.00)", "4", "7", "1", "2", "1"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert error_lines(rows(("a b", "a")))[1].split()[:3] == ["WER", "50.00", "-"]
    assert [line.split()[1] for line in error_lines([])[1:]] == ["0.00", "0.00"]


def improvement_lines(before, after, readings=CASED):
    both = (metrics.read_by(each, readings) for each in (before, after))
    return metrics.improvement_table(*both).splitlines()


def test_improvement_table():
    before = rows(("a b", "x y"), ("c d", "c d"))
    after = rows(("a b", "a y"), ("c d", "c d"))
    lines = improvement_lines(before, after)
    assert [line.split() for line in lines] == [
        ["before", "after", "points", "95", "%", "interval", "lower", "by"],
        ["WER", "50.00%", "25.00%", "25.00", "(0.00", "to", "50.00)", "50.0%"],
        ["CER", "33.33%", "16.67%", "16.67", "(0.00", "to", "33.33)", "50.0%"],
    ]
    assert len({len(line) for line in lines}) == 1
    alone = improvement_lines(rows(("a", "a")), rows(("a", "b")))[1].split()
    assert alone == ["WER", "0.00%", "100.00%", "-100.00", "-", "-"]
    assert improvement_lines(before, after, BOTH)[-1] == "lower: the same"


# --- intervals ------------------------------------------------------------------------------------


def test_an_interval_is_that_of_a_normal_distribution_where_one_applies():
    """2,000 utterances of ten words, each wrong with probability 0.1."""
    wrong = np.random.default_rng(3).binomial(10, 0.1, 2000)
    errors = [Errors(substitutions=int(count), length=10) for count in wrong]
    low, high = metrics.intervals([errors])[0]
    rate = wrong.mean() / 10
    half = 1.96 * wrong.std() / 10 / math.sqrt(2000)
    assert low == pytest.approx(rate - half, abs=half / 5)
    assert high == pytest.approx(rate + half, abs=half / 5)
    assert metrics.intervals([errors])[0] == (low, high)


def test_an_interval_is_over_utterances_and_weighs_their_lengths():
    """One long utterance has all the errors: the words of one are not independent."""
    errors = [Errors(length=1) for _ in range(99)] + [Errors(substitutions=50, length=100)]
    low, high = metrics.intervals([errors])[0]
    assert low == 0 and high == pytest.approx(150 / 397, abs=0.05)  # drawn three times


def test_the_interval_of_a_difference_is_paired():
    """The utterances differ much, the models by exactly one word in each."""
    random = np.random.default_rng(4).integers(1, 40, 300)
    before = [Errors(substitutions=int(count) + 1, length=50) for count in random]
    after = [Errors(substitutions=int(count), length=50) for count in random]
    (ends,) = metrics.intervals_of_differences([before], [after])
    assert ends == pytest.approx((0.02, 0.02))
    low, high = metrics.intervals([before])[0]
    assert high - low > 0.04
    assert metrics.intervals_of_differences([before[:1]], [after[:1]]) == [None]


# --- whole recordings -----------------------------------------------------------------------------


def recording_lines(reference, hypothesis):
    row = {"file": "a.wav", "seconds": 60.0, "reference": reference, "hypothesis": hypothesis}
    return [line.split() for line in recordings_table([row]).splitlines()]


@pytest.mark.parametrize(
    ("reference", "kept"),
    [
        ("今天天气很好，我们去公园散步。晚上回家吃饭，然后看电影。", 15),
        ("วันนี้อากาศดีมาก เราไปเดินเล่นในสวน ตอนเย็นกลับบ้าน", 17),
    ],
)
def test_passages_of_scripts_without_spaces_are_counted_in_characters(reference, kept):
    lines = recording_lines(reference, reference[:kept])
    assert "characters" in lines[0] and lines[1][4] == "characters"
    whole, lost = ("".join(for_scoring(text).split()) for text in (reference, reference[kept:]))
    assert lines[2] == [*lines[2][:2], str(len(whole)), *[str(len(lost))] * 2, "60.0", "a.wav"]
    assert lines[3][2:] == [*lines[2][2:6], "all"]


def test_passages_of_words():
    lines = recording_lines("a b c d 天 e", "a e")  # one Chinese letter does not decide
    assert "words" in lines[0] and lines[1][4] == "words"
    assert lines[2][2:5] == ["6", "4", "4"] and lines[2][0] == "66.67"
