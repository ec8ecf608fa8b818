"""WER and CER against an edit distance written here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.metrics import Errors, cer_and_wer, count_errors, error_table, improvement_table, score
from speech.text import for_scoring


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
        ("", "", "characters", Errors()),
        ("", "one two", "words", Errors(insertions=2)),
        ("", "ab c", "characters", Errors(insertions=4)),
        ("one two", "", "words", Errors(deletions=2, length=2)),
        ("ab c", "", "characters", Errors(deletions=4, length=4)),
        ("।?", "one", "words", Errors(insertions=1)),  # nothing but punctuation is empty too
        ("one, two.", "one two", "words", Errors(length=2)),
        ("हांव कोंकणी", "हांव कोंकण", "characters", Errors(deletions=1, length=11)),
        ("हांव कोंकणी", "हव कोंकणी", "words", Errors(substitutions=1, length=2)),
        ("a b c d", "a x c d e", "words", Errors(substitutions=1, insertions=1, length=4)),
    ],
)
def test_examples(reference, hypothesis, unit, expected):
    assert count_errors([reference], [hypothesis], unit) == expected


def test_no_pairs_and_pairs_of_different_number():
    assert count_errors([], [], "words") == Errors() and Errors().rate == 0
    with pytest.raises(ValueError, match="zip"):
        count_errors(["a"], [], "words")


def test_error_table():
    lines = error_table(["a b c d", ""], ["a x c", "y"]).splitlines()
    assert [line.split() for line in lines] == [
        ["%", "errors", "of", "subst.", "delet.", "insert."],
        ["WER", "75.00", "3", "4", "1", "1", "1"],
        ["CER", "57.14", "4", "7", "1", "2", "1"],
    ]
    assert len({len(line) for line in lines}) == 1


def rows(*pairs):
    return [{"reference": reference, "hypothesis": hypothesis} for reference, hypothesis in pairs]


def test_scores_are_the_tables_numbers():
    errors = cer_and_wer(["a b c d", ""], ["a x c", "y"])
    assert score(rows(("a b c d", "a x c"), ("", "y"))) == {"cer": (4, 7), "wer": (3, 4)}
    assert {name: (e.total, e.length) for name, e in errors.items()} == {
        "cer": (4, 7),
        "wer": (3, 4),
    }


def test_improvement_table():
    lines = improvement_table(rows(("a b", "x y")), rows(("a b", "a y"))).splitlines()
    assert [line.split() for line in lines] == [
        ["before", "after", "lower", "by"],
        ["WER", "100.00%", "50.00%", "50.0%"],
        ["CER", "66.67%", "33.33%", "50.0%"],
    ]
    assert improvement_table(rows(("a", "a")), rows(("a", "b"))).splitlines()[1].split() == [
        "WER",
        "0.00%",
        "100.00%",
        "-",
    ]
    assert len({len(line) for line in lines}) == 1
