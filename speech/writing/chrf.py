"""chrF2 of translations, as sacrebleu computes it (Popovic 2015): characters that are right, in
runs of one to six, with recall counted twice as much as precision. It suits languages with long
words, and one reference a sentence."""

from collections import Counter

import numpy as np

ORDER = 6  # characters of the longest runs
BETA = 2  # of the F-score


def counts(reference: str, hypothesis: str) -> np.ndarray:
    """(ORDER, 3): the runs of each length, without spaces, in hypothesis, reference, and both."""
    theirs, ours = ("".join(text.split()) for text in (reference, hypothesis))
    rows = []
    for order in range(1, ORDER + 1):
        right, found = runs(theirs, order), runs(ours, order)
        # As sacrebleu does it: a reference without runs of this length says nothing about them.
        number = found.total() if right else 0
        rows.append((number, right.total(), (right & found).total()))
    return np.array(rows, dtype=np.int64)


def runs(text: str, length: int) -> Counter[str]:
    return Counter(text[place : place + length] for place in range(len(text) - length + 1))


def score(counted: np.ndarray) -> float:
    """The score, from 0 to 1, of the sum of `counts`."""
    found, right, both = counted[(counted[:, :2] > 0).all(1)].T
    if not both.any():
        return 0.0
    precision, recall = (both / found).mean(), (both / right).mean()
    return float((1 + BETA**2) * precision * recall / (BETA**2 * precision + recall))


def of_corpus(rows: list[dict]) -> float:
    """The score of decoded rows ({"reference", "hypothesis"}), all together."""
    zeros = np.zeros((ORDER, 3), np.int64)
    return score(sum((counts(row["reference"], row["hypothesis"]) for row in rows), zeros))


def in_evaluation(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """The mean of the rows' scores as {"chrf": (sum, number)}, which can be added up over GPUs."""
    scores = [score(counts(row["reference"], row["hypothesis"])) for row in rows]
    return {"chrf": (sum(scores), len(scores))}
