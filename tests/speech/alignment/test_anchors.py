"""Chains of equal n-grams between what was heard and a text in another order."""

import itertools

import numpy as np

from speech.alignment.anchors import chains


def letters(random, count: int) -> np.ndarray:
    return random.choice(26, count, p=np.arange(1, 27) / 351)


def misheard(random, text: np.ndarray, rate: float) -> np.ndarray:
    """The text with a share of other, missing and additional letters."""
    heard = []
    for letter in text.tolist():
        fate = random.random() / rate
        if fate > 1 / 3:
            heard.append(int(random.integers(26)) if fate < 1 else letter)
        if fate < 2 / 3 and fate > 0.5:
            heard.append(int(random.integers(26)))
    return np.array(heard)


def check(found: list[np.ndarray], heard: np.ndarray, text: np.ndarray) -> None:
    """What holds for all chains."""
    for chain in found:
        assert (heard[chain[:, 0]] == text[chain[:, 1]]).all()
        assert (np.diff(chain, axis=0) > 0).all()
    for axis in range(2):
        ranges = sorted((int(chain[0, axis]), int(chain[-1, axis])) for chain in found)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
    begins = [int(chain[0, 0]) for chain in found]
    assert begins == sorted(begins)


def test_moved_missing_and_added_blocks():
    random = np.random.default_rng(4)
    blocks = [letters(random, 400) for _ in range(8)]
    order = [0, 1, 5, 2, 3, 7, 6]  # block 4 is missing
    other = letters(random, 400)
    heard = np.concatenate([*(misheard(random, blocks[i], 0.1) for i in order), other])
    found = chains(heard, np.concatenate(blocks))
    check(found, heard, np.concatenate(blocks))
    visited = [int(place) // 400 for chain in found for place in chain[:, 1]]
    assert [block for block, _ in itertools.groupby(visited)] == order
    assert max(int(chain[-1, 0]) for chain in found) < len(heard) - 390


def test_nothing_in_common():
    random = np.random.default_rng(5)
    assert chains(letters(random, 2000), letters(random, 2000) + 30) == []
    assert sum(map(len, chains(letters(random, 3000), letters(random, 3000)))) < 30
    assert chains(np.zeros(0, int), letters(random, 50)) == []
    assert chains(letters(random, 50), np.zeros(0, int)) == []
    assert chains(np.zeros(2000, int), np.zeros(2000, int)) == []  # a letter without end
