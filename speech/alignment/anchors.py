"""Places that a recogniser's letters and a text have in common, in whatever order the text was
read: equal n-grams, chained where they follow each other in both."""

import itertools

import numpy as np

SHORTEST, LONGEST = 4, 16  # letters in an n-gram
# Equal n-grams for each letter heard: more are chance, and a longer n-gram has fewer.
MOST_PAIRS = 3.0
MOST_PLACES = 50  # of an n-gram in the text: a refrain is no anchor
LOOKBACK = 64  # earlier pairs that a chain may continue
FARTHEST = 100  # letters between two pairs of a chain
# Letters of the bins in which pairs support each other, in what was heard and off the diagonal.
BIN, DRIFT = 128, 16
SUPPORT = 3  # pairs in neighbouring bins
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def chains(heard: np.ndarray, text: np.ndarray) -> list[np.ndarray]:
    """Chains (N, 2) of places (in `heard`, in `text`) with equal letters, both columns rising, in
    order of what was heard. No two chains share a part of either. Letters are numbers, (H,) and
    (T,)."""
    size, pairs = _pairs(heard, text)
    pairs = pairs[_supported(pairs)]
    if not len(pairs):
        return []
    chosen = []
    free = np.ones(len(heard), bool), np.ones(len(text), bool)
    for chain in _by_score(pairs, size):
        is_free = free[0][chain[:, 0]] & free[1][chain[:, 1]]
        for part in _runs(chain, is_free):
            covered = size + np.minimum(np.diff(part[:, 0]), size).sum()  # letters in n-grams
            if covered < 2 * size:
                continue
            for axis in range(2):
                free[axis][part[0, axis] : part[-1, axis] + size] = False
            chosen.append(part)
    return sorted(chosen, key=lambda chain: int(chain[0, 0]))


def _pairs(heard: np.ndarray, text: np.ndarray) -> tuple[int, np.ndarray]:
    """The size of the n-grams, and the places (P, 2) of equal ones, sorted."""
    for size in range(SHORTEST, LONGEST + 1):
        ours = _hashes(heard, size)
        theirs = _hashes(text, size)
        order = np.argsort(theirs, kind="stable")
        first = np.searchsorted(theirs[order], ours, "left")
        counts = np.searchsorted(theirs[order], ours, "right") - first
        counts[counts > MOST_PLACES] = 0
        if size == LONGEST or counts.sum() <= MOST_PAIRS * len(heard):
            break
    places = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return size, np.stack([places, order[first[places] + within]], axis=1)


def _hashes(letters: np.ndarray, size: int) -> np.ndarray:
    """(N - size + 1,) a number of each n-gram, equal for equal ones."""
    count = max(0, len(letters) - size + 1)
    hashes = np.zeros(count, np.uint64)
    for i in range(size):
        hashes = (hashes + letters[i : i + count].astype(np.uint64) + np.uint64(1)) * MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _supported(pairs: np.ndarray) -> np.ndarray:
    """(P,) whether a pair has others near it and near its diagonal."""
    bins = np.stack([pairs[:, 0] // BIN, (pairs[:, 1] - pairs[:, 0]) // DRIFT], axis=1)
    bins -= bins.min(axis=0, initial=0) - 1
    width = int(bins[:, 1].max(initial=0)) + 2
    keys, counts = np.unique(bins @ [width, 1], return_counts=True)
    total = np.zeros(len(pairs), int)
    for rows, columns in itertools.product((-1, 0, 1), repeat=2):
        wanted = (bins + np.array([rows, columns])) @ [width, 1]
        place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        total += np.where(keys[place] == wanted, counts[place], 0)
    return total >= SUPPORT


def _by_score(pairs: np.ndarray, size: int) -> list[np.ndarray]:
    """Chains of sorted `pairs` (P, 2), the best first: a chain gains a point for each letter that
    it covers, and loses some where it leaves its diagonal (Li 2018, "Minimap2"). They share no
    pair."""
    scores = np.full(len(pairs), float(size))
    previous = np.full(len(pairs), -1)
    for i in range(1, len(pairs)):
        first = max(0, i - LOOKBACK)
        steps = pairs[i] - pairs[first:i]
        least = steps.min(axis=1)
        drift = np.abs(steps[:, 0] - steps[:, 1])
        gains = np.minimum(least, size) - np.minimum(drift, 2 * np.log2(1 + drift))
        gains += scores[first:i]
        gains[(least <= 0) | (steps.max(axis=1) > FARTHEST)] = -np.inf
        best = len(gains) - 1 - int(gains[::-1].argmax())  # the nearest of the best
        if gains[best] > size:
            scores[i] = gains[best]
            previous[i] = first + best
    is_used = np.zeros(len(pairs), bool)
    chains = []
    for end in np.argsort(-scores, kind="stable").tolist():
        chain = []
        place = end
        while place >= 0 and not is_used[place]:
            is_used[place] = True
            chain.append(place)
            place = int(previous[place])
        if chain:
            chains.append(pairs[chain[::-1]])
    return sorted(chains, key=lambda chain: -len(chain))


def _runs(chain: np.ndarray, is_kept: np.ndarray) -> list[np.ndarray]:
    """The parts of a chain between pairs that are not kept, and between those where one side has
    more letters than the other: something else may be read there, or be written."""
    drifts = np.abs(np.diff(chain[:, 0] - chain[:, 1])) > DRIFT
    edges = np.flatnonzero((np.diff(is_kept) != 0) | drifts) + 1
    return [
        part
        for part, kept in zip(np.split(chain, edges), np.split(is_kept, edges), strict=True)
        if len(part) and kept[0]
    ]
