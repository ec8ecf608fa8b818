"""The likeliest path of CTC through a text, exactly, in memory that grows with the square root of
the recording; parts of the text may be skipped."""

import math
from dataclasses import dataclass

import numpy as np

HOPPED = 3  # an arrow; 0, 1 and 2 are the states by which a path advanced


@dataclass(frozen=True)
class Path:
    """`score` is the path's log-probability; `states` (T,) are 2 i for the blank before token i and
    2 i + 1 for token i."""

    score: float
    states: np.ndarray


@dataclass(frozen=True)
class Skips:
    """The text between neighbours of the token positions `stops` (J,) may be left out, at the
    `prices` (J - 1,) in log-probability: a path at one stop is at the next one, too."""

    stops: np.ndarray
    prices: np.ndarray


NO_SKIPS = Skips(np.zeros(0, int), np.zeros(0))


def align(
    log_probs: np.ndarray, tokens: np.ndarray, blank: int, skips: Skips = NO_SKIPS
) -> Path | None:
    """The best path of log-probabilities (T, V) through `tokens` (U,), columns of them, or None if
    there are too few frames. CTC's rules: each token for one frame or more, in order, blanks
    wherever the path likes, and at least one of them between equal tokens.

    The scores of every sqrt(T)-th frame are kept, and the choices between two of these frames are
    computed again when the path is read back."""
    search = _Search(log_probs, tokens, blank, skips)
    frames = len(log_probs)
    every = max(1, math.isqrt(frames))
    kept = []
    for first in range(0, frames, every):
        kept.append(search.scores.copy())
        search.advance(first, min(first + every, frames))
    last = search.scores[2:]
    state = len(last) - 1
    if len(last) > 1 and last[-2] >= last[-1]:
        state -= 1
    score = float(last[state])
    if score == -math.inf:
        return None
    states = np.zeros(frames, np.int32)
    for number in reversed(range(len(kept))):
        first = number * every
        end = min(first + every, frames)
        search.scores = kept[number]
        arrows, sources = search.choices(first, end)
        state = search.read_back(state, states[first:end], arrows, sources)
    return Path(score, states)


class _Search:
    """The forward pass. `scores` (2 + 2 U + 1,) are those of the states, after two that no path is
    in, so that a state's predecessors are a shift of the same array."""

    def __init__(self, log_probs: np.ndarray, tokens: np.ndarray, blank: int, skips: Skips):
        self.log_probs = log_probs
        self.columns = np.full(2 * len(tokens) + 1, blank)
        self.columns[1::2] = tokens
        # What it costs to come from the state before the last one: nothing, or it is impossible.
        self.two_steps = np.full(len(self.columns), -np.inf)
        self.two_steps[3::2] = np.where(self.columns[3::2] != self.columns[1:-2:2], 0.0, -np.inf)
        self.stops = 2 * np.asarray(skips.stops, int) + 1
        self.fares = np.concatenate([[0.0], np.cumsum(skips.prices)])
        self.scores = np.full(len(self.columns) + 2, -np.inf)

    def advance(self, first: int, end: int, arrows=None, sources=None) -> None:
        """Moves the scores from frame `first` to `end`; notes in `arrows` (end - first, S) by how
        many states each path advanced, and in `sources` (end - first, J) where hops began."""
        scores = self.scores
        own, before, two_before = scores[2:], scores[1:-1], scores[:-2]
        best = np.empty_like(own)
        jumped = np.empty_like(own)
        is_better = np.empty(len(own), bool)
        for t in range(first, end):
            if t == 0:
                best[:] = -np.inf
                best[:2] = 0.0
            else:
                np.add(two_before, self.two_steps, out=jumped)
                np.maximum(own, before, out=best)
                np.greater(jumped, best, out=is_better)
                if arrows is not None:
                    row = arrows[t - first]
                    np.greater(before, own, out=row.view(bool))
                    row[is_better] = 2
                np.maximum(best, jumped, out=best)
            best += self.log_probs[t].take(self.columns)
            if len(self.stops) > 1:
                self._hop(best, t - first, arrows, sources)
            own[:] = best

    def _hop(self, best: np.ndarray, row: int, arrows, sources) -> None:
        """Lets the paths that are at a stop be at later ones."""
        there = best[self.stops]
        worth = there + self.fares
        most = np.maximum.accumulate(worth)
        hops = worth < most
        if not hops.any():
            return
        best[self.stops] = np.where(hops, most - self.fares, there)
        if arrows is not None:
            stays = np.where(hops, 0, np.arange(len(there)))
            sources[row] = np.maximum.accumulate(stays)
            arrows[row, self.stops[hops]] = HOPPED

    def choices(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The `arrows` and `sources` of the frames from `first` to `end`."""
        arrows = np.zeros((end - first, len(self.columns)), np.uint8)
        sources = np.zeros((end - first, len(self.stops)), np.int32)
        self.advance(first, end, arrows, sources)
        return arrows, sources

    def read_back(self, state: int, states: np.ndarray, arrows, sources) -> int:
        """Writes the path that ends in `state`, from behind; returns the state before it."""
        for row in reversed(range(len(states))):
            if arrows[row, state] == HOPPED:
                number = int(np.searchsorted(self.stops, state))
                # The stop where the hop began has an arrow of its own.
                state = int(self.stops[sources[row, number]])
            states[row] = state
            state -= int(arrows[row, state])
        return state
