"""The best path of CTC, with and without skips, against brute force and a plain table."""

import itertools
import math

import numpy as np
import pytest

from speech.alignment.viterbi import Skips, align


def random_log_probs(random, frames: int, size: int) -> np.ndarray:
    scores = random.normal(size=(frames, size)) * 2
    return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)


def collapsed(labels, blank: int) -> list[int]:
    return [label for label, _ in itertools.groupby(labels) if label != blank]


def tokens_of(path, tokens) -> list[int]:
    """The tokens that a path's states go through, each once."""
    return [tokens[state // 2] for state, _ in itertools.groupby(path.states) if state % 2]


def emitted(path, log_probs, tokens, blank: int) -> float:
    columns = [tokens[state // 2] if state % 2 else blank for state in path.states]
    return float(log_probs[np.arange(len(log_probs)), columns].sum())


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 1], [2, 1, 2], [1, 1, 1]])
def test_the_best_of_all_labellings(tokens):
    random = np.random.default_rng(len(tokens))
    for frames in (len(tokens) + 1, 6):
        log_probs = random_log_probs(random, frames, 3)
        scores = [
            sum(log_probs[t, label] for t, label in enumerate(labels))
            for labels in itertools.product(range(3), repeat=frames)
            if collapsed(labels, 0) == tokens
        ]
        path = align(log_probs, np.array(tokens, int), 0)
        if not scores:
            assert path is None
            continue
        assert math.isclose(path.score, max(scores))
        assert math.isclose(path.score, emitted(path, log_probs, tokens, 0))
        assert tokens_of(path, tokens) == tokens


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_ways_to_skip(seed):
    """Each part between two stops is read or left out at its price: the best of all 2^3 texts."""
    random = np.random.default_rng(seed)
    log_probs = random_log_probs(random, 40, 6)
    star = 5
    parts = [random.integers(1, 5, size).tolist() for size in (6, 9, 4)]
    prices = random.uniform(1, 25, 3)
    tokens = [star]
    stops = [0]
    for part in parts:
        tokens += [*part, star]
        stops.append(len(tokens) - 1)
    best = -math.inf
    for kept in itertools.product((True, False), repeat=3):
        # A stop that is reached by a hop shares the frames of the stop before.
        text = [star]
        for part, keeps in zip(parts, kept, strict=True):
            text += [*part, star] if keeps else []
        path = align(log_probs, np.array(text), 0)
        price = sum(p for p, keeps in zip(prices, kept, strict=True) if not keeps)
        if path and path.score - price > best:
            best, wanted = path.score - price, kept
    found = align(log_probs, np.array(tokens), 0, Skips(np.array(stops), prices))
    assert math.isclose(found.score, best)
    visited = set((found.states[found.states % 2 == 1] // 2).tolist())
    read = tuple(set(range(a + 1, b)) <= visited for a, b in itertools.pairwise(stops))
    assert read == wanted
