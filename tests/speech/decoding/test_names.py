"""A list of names in a search, against its definition."""

import random

import numpy as np
import pytest

from speech.decoding.names import Names, WithNames
from speech.decoding.ngram import Fusion, NGram
from speech.decoding.search import ctc_prefix_beam

MARK = 0


def definition(names: list[list[int]], mark: int | None, tokens: list[int]) -> int:
    """The number of tokens that get a bonus: from each place where a name can begin, the longest
    name that stands there, and the search continues behind what was its beginning."""
    total = 0
    place = 0
    while place < len(tokens):
        rest = tokens[place:]
        begins = place == 0 or mark is None or tokens[place - 1] == mark
        run = [n for n in range(1, len(rest) + 1) if any(name[:n] == rest[:n] for name in names)]
        if begins and run:
            total += max((n for n in run if rest[:n] in names), default=0)
            place += max(run)
        else:
            place += 1
    return total


@pytest.mark.parametrize("mark", [MARK, None])
def test_the_bonus_is_that_of_the_longest_names_from_where_words_begin(mark):
    draw = random.Random(3)
    for _ in range(400):
        names = [draw.choices(range(4), k=draw.randint(1, 4)) for _ in range(draw.randint(1, 4))]
        tree = Names(names, mark, bonus=1.0)
        tokens = draw.choices(range(4), k=draw.randint(0, 12))
        place, total = 0, 0.0
        for token in tokens:
            added, place = tree.step(place, token)
            total += added
        assert total + tree.end(place) == definition(names, mark, tokens), (names, tokens)


def test_a_name_wins_where_ctc_is_unsure_and_changes_nothing_elsewhere():
    log_probs = np.log(np.array([[0.02, 0.5, 0.45, 0.03], [0.02, 0.03, 0.05, 0.9]]))
    beam = [ctc_prefix_beam(log_probs, 8, 0, with_names)[0][0] for with_names in (None, names([]))]
    assert beam == [(1, 3), (1, 3)]
    assert ctc_prefix_beam(log_probs, 8, 0, names([[2, 3]]))[0][0] == (2, 3)
    assert ctc_prefix_beam(log_probs, 8, 0, names([[2, 2]]))[0][0] == (1, 3)


def names(tree: list[list[int]]) -> WithNames:
    return WithNames(Names(tree, None), None)


def test_names_are_added_to_a_language_model():
    fusion = Fusion(NGram([[1, 2, 3], [2, 2]], 4, 0))
    both = WithNames(Names([[2, 3]], 0, bonus=2.0), fusion)
    state, own = both.start, fusion.start
    for token, added in ((2, 2.0), (3, 2.0), (0, 0.0), (2, 2.0), (1, -2.0)):
        labels = both.labels(state, 0.3, 4) - fusion.labels(own, 0.3, 4)
        assert labels[token] == pytest.approx(max(0.0, added))
        score, state = both.step(state, token)
        expected, own = fusion.step(own, token)
        assert score == pytest.approx(expected + added)
    assert both.end(state) == fusion.end(own)
