"""The n-gram against its definition, by dictionaries, and its ARPA file as other programs read
it."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from speech.decoding import arpa
from speech.decoding.ngram import NGram, Words, discounts_of

MARK = 0


def some_texts(seed: int, count: int = 40, letters: int = 6) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, letters, random.integers(0, 15)).tolist() for _ in range(count)]


def kneser_ney(texts: list[list[int]], size: int, order: int):
    """The probability of a token after a context, as Chen and Goodman define it."""
    stream = [token for text in texts for token in (MARK, *text)]
    wrapped = [*stream, *itertools.islice(itertools.cycle(stream), order)]
    counts = {order: Counter(tuple(wrapped[i : i + order]) for i in range(len(stream)))}
    for n in range(order - 1, 0, -1):
        longer = {tuple(wrapped[i : i + n + 1]) for i in range(len(stream))}
        counts[n] = Counter(gram[1:] for gram in longer)
    discounts = {n: discounts_of(np.array([*c.values()])) for n, c in counts.items()}
    after = defaultdict(list)
    for grams in counts.values():
        for gram, count in grams.items():
            after[gram[:-1]].append(count)

    def probability(context: tuple, token: int) -> float:
        context = context[-(order - 1) :] if order > 1 else ()
        while context and context not in after:
            context = context[1:]
        n = len(context) + 1
        total = sum(after[context])
        weight = sum(discounts[n][min(count, 3)] for count in after[context]) / total
        count = counts[n][(*context, token)]
        taken = max(count - discounts[n][min(count, 3)], 0.0)
        lower = probability(context[1:], token) if context else 1.0 / size
        return taken / total + weight * lower

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 6])
def test_probabilities_are_those_of_the_definition(order):
    size = 8  # two tokens never occur
    texts = some_texts(order)
    model = NGram(texts, size, MARK, order)
    expected = kneser_ney(texts, size, order)
    random = np.random.default_rng(1)
    for sequence in random.integers(0, size, (20, 12)).tolist() + some_texts(order, 10):
        state, context = model.start, (MARK,)
        for token in sequence:
            log_prob, state = model.step(state, token)
            assert math.exp(log_prob) == pytest.approx(expected(context, token), rel=1e-9)
            context = (*context, token)


@pytest.mark.parametrize("texts", [[], [[]], [[1]], [[1], [1]], some_texts(3), some_texts(4, 3)])
def test_what_follows_any_state_has_probability_one(texts):
    model = NGram(texts, 7, MARK)
    for state in range(len(model.back_off)):
        steps = [model.step(state, token)[0] for token in range(7)]
        assert sum(map(math.exp, steps)) == pytest.approx(1)
        assert model.log_probs(state).tolist() == pytest.approx(steps)


def test_a_sentence_ends_once():
    model = NGram(some_texts(5), 8, MARK)
    log_prob, after_mark = model.step(model.step(model.start, 2)[1], MARK)
    assert model.end(model.step(model.start, 2)[1]) == log_prob
    assert model.end(after_mark) <= 0 and model.end(model.start) == 0


def read_arpa(lines: list[str]) -> dict[tuple[str, ...], tuple[float, float]]:
    """{n-gram: (its log10 probability, its back-off)}"""
    grams = {}
    for line in lines:
        cells = line.split("\t")
        if len(cells) > 1:
            grams[tuple(cells[1].split(" "))] = (float(cells[0]), float([*cells, "0"][2]))
    return grams


@pytest.mark.parametrize("first", ["|", "<s>"])
@pytest.mark.parametrize("mark", ["|", None])
def test_its_arpa_file_is_read_as_the_format_says(first, mark):
    """Sentences begin after a mark, or after <s>, and end with </s>."""
    model = NGram(some_texts(6), 8, MARK, order=6)
    names = {token: name for token, name in enumerate("|abcdefg")}
    if mark is None:
        del names[MARK]
        first = "<s>"
    lines = [line for text in arpa.lines_of(model, names) for line in text.split("\n")]
    assert lines[0] == "\\data\\" and lines[-1] == "\\end\\"
    grams = read_arpa(lines)
    declared = [int(line.split("=")[1]) for line in lines if line.startswith("ngram ")]
    assert declared == [sum(len(gram) == n for gram in grams) for n in range(1, 7)]
    assert all(gram[:-1] in grams and gram[1:] in grams for gram in grams if len(gram) > 1)

    def score(context: tuple, token: str) -> float:
        if (*context, token) in grams:
            return grams[(*context, token)][0]
        back_off = grams.get(context, (0, 0))[1]
        return back_off + score(context[1:], token)

    random = np.random.default_rng(2)
    for sequence in random.integers(MARK if mark else 1, 8, (20, 12)).tolist():
        state, context = model.start, (first,)
        for token in sequence:
            log_prob, state = model.step(state, token)
            assert log_prob / math.log(10) == pytest.approx(score(context, names[token]), abs=1e-4)
            context = (*context, names[token])[-5:]
        end = model.step(state, MARK)[0]
        assert end / math.log(10) == pytest.approx(score(context, "</s>"), abs=1e-4)


def test_words_of_a_text_are_likelier_than_others_and_a_piece_continues_the_one_before():
    words = Words(["a b", "b c  a", "a b", ""])
    known, unknown, seldom = (words.read(text, words.start)[0] for text in ("a b", "a bb", "a a"))
    assert unknown < seldom < known < 0
    whole = words.read("b c a b", words.start)
    log_prob, between = words.read("b c", words.start)
    more, last = words.read("a  b", between)
    assert (log_prob + more, last) == pytest.approx(whole)
    sure = [words.model.step(words.start, token)[0] for token in range(words.unknown + 1)]
    assert sum(map(math.exp, sure)) == pytest.approx(1)
