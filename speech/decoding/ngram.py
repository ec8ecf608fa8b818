"""A language model of plain text: an n-gram over token ids, such as a model's characters, by
interpolated modified Kneser-Ney smoothing (Chen and Goodman 1999).

The text is one circular stream, in which a mark (the space, where a vocabulary has one) stands
between sentences. So a sentence begins after a mark and ends with one, an n-gram has the same
meaning everywhere, and a piece of a long recording can begin anywhere."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

# Of a language model beside CTC. They were measured on four acoustic models with 34 to 64 % CER:
# for each, the WER is within 3 % of what the best weights for it reach.
LM_WEIGHT = 0.6
LM_BONUS = 1.0
ORDER = 6
FALLBACK = (0.5, 1.0, 1.5)  # discounts of a text that is too short to tell them, as lmplz has them


class NGram:
    """The model of token sequences below `size`, with this `mark` between them. A state stands for
    the last tokens, as many as the text has in this order; `start` is the one after a mark."""

    def __init__(self, texts: Iterable[list[int]], size: int, mark: int, order: int = ORDER):
        stream = [token for text in texts for token in (mark, *text)] or [mark]
        self.size = size
        self.mark = mark
        self.order = order
        self._count(np.array(stream, dtype=np.int64))
        _, self.start = self.step(0, mark)

    def _count(self, stream: np.ndarray) -> None:
        """Makes the arrays. Nodes are the empty sequence, then all sequences of one token, of two,
        up to order - 1. Of each n-gram: `keys`, which are node * size + next token, in ascending
        order; `probabilities`, as logarithms; `following`, the node after it. Of each node:
        `back_off`, the logarithm of the weight of shorter contexts; `shorter`, the node without the
        first token."""
        count = len(stream)
        wrapped = np.resize(stream, count + self.order)
        places = np.zeros(count, dtype=np.int64)  # the number of the n-gram that begins at a place
        levels = []
        for n in range(1, self.order + 1):
            keys = places * self.size + wrapped[n - 1 : n - 1 + count]
            suffixes = np.roll(places, -1)
            keys, first, places = np.unique(keys, return_index=True, return_inverse=True)
            levels.append((keys, suffixes[first]))
        # Of the highest order count the n-grams, of the others the tokens that come before them.
        counts = [np.bincount(suffixes) for _, suffixes in levels[1:]] + [np.bincount(places)]

        sizes = [1, *(len(keys) for keys, _ in levels)]
        offsets = np.cumsum([0, *sizes]).tolist()  # of the nodes of each order
        lower = np.array([1.0 / self.size])
        self.keys, self.following, log_probs = [], [], []
        self.shorter, back_off = [np.zeros(1, dtype=np.int64)], []
        for n, ((keys, suffixes), seen) in enumerate(zip(levels, counts, strict=True), start=1):
            contexts = keys // self.size
            discounts = discounts_of(seen)[np.minimum(seen, 3)]
            total = np.bincount(contexts, seen)
            weights = np.bincount(contexts, discounts) / total
            lower = (seen - discounts) / total[contexts] + weights[contexts] * lower[suffixes]
            self.keys.append(keys + offsets[n - 1] * self.size)
            log_probs.append(np.log(lower))
            back_off.append(np.log(np.maximum(weights, 1e-30)))
            if n < self.order:
                self.following.append(offsets[n] + np.arange(len(keys)))
                self.shorter.append(offsets[n - 1] + suffixes)
            else:
                self.following.append(offsets[n - 1] + suffixes)
        self.keys = np.concatenate(self.keys)
        self.following = np.concatenate(self.following)
        self.probabilities = np.concatenate(log_probs)
        self.shorter = np.concatenate(self.shorter)
        self.back_off = np.concatenate(back_off)

    @functools.lru_cache(maxsize=100_000)  # noqa: B019  a command has one or two of these objects
    def step(self, state: int, token: int) -> tuple[float, int]:
        """The log-probability of a token after a state, and the state after it."""
        key = state * self.size + token
        place = int(np.searchsorted(self.keys, key))
        if place < len(self.keys) and self.keys[place] == key:
            return float(self.probabilities[place]), int(self.following[place])
        weight = float(self.back_off[state])
        if state == 0:
            return weight - math.log(self.size), 0
        log_prob, following = self.step(int(self.shorter[state]), token)
        return weight + log_prob, following

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def log_probs(self, state: int) -> np.ndarray:
        """(size,) the log-probabilities of all tokens after a state."""
        if state:
            values = self.back_off[state] + self.log_probs(int(self.shorter[state]))
        else:
            values = np.full(self.size, self.back_off[0] - math.log(self.size))
        first, last = np.searchsorted(self.keys, [state * self.size, (state + 1) * self.size])
        values[self.keys[first:last] - state * self.size] = self.probabilities[first:last]
        return values

    def end(self, state: int) -> float:
        """The log-probability that a sentence ends after a state: 0 where it has just ended."""
        return 0.0 if state == self.start else self.step(state, self.mark)[0]

    def arpa(self, names: dict[int, str]) -> Iterator[str]:
        """The lines of an ARPA file, the form that other programs read, of the tokens that have
        names. There <s> and </s> stand for a mark at the beginning and at the end of a sentence,
        also of a mark that has no name."""
        grams = [()]  # of each node
        lines: list[list[str]] = [[] for _ in range(self.order)]
        contexts, tokens = np.divmod(self.keys, self.size)
        for place, (context, token) in enumerate(
            zip(contexts.tolist(), tokens.tolist(), strict=True)
        ):
            gram = (*grams[context], token)
            if len(gram) < self.order:
                grams.append(gram)
            log_prob = f"{self.probabilities[place] / math.log(10):.6f}"
            back_off = ""
            if len(gram) < self.order:
                back_off = f"\t{self.back_off[place + 1] / math.log(10):.6f}"
            for words, is_end in self._written(gram, names):
                first = "-99" if words == "<s>" else log_prob
                lines[len(gram) - 1].append(f"{first}\t{words}{'' if is_end else back_off}")
        unseen = f"{(self.back_off[0] - math.log(self.size)) / math.log(10):.6f}"
        seen = set(tokens[contexts == 0].tolist())
        lines[0] += [f"{unseen}\t{name}\t0" for token, name in names.items() if token not in seen]
        lines[0].append(f"{unseen}\t<unk>")
        yield "\\data\\"
        yield from (f"ngram {n}={len(rows)}" for n, rows in enumerate(lines, start=1))
        for n, rows in enumerate(lines, start=1):
            yield f"\n\\{n}-grams:"
            yield from rows
        yield "\n\\end\\"

    def _written(self, gram: tuple[int, ...], names: dict[int, str]) -> Iterator[tuple[str, bool]]:
        """The forms of an n-gram in an ARPA file, and whether a sentence ends with it."""
        words = [[names[token]] if token in names else [] for token in gram]
        if gram[0] == self.mark:
            words[0].append("<s>")
        if gram[-1] == self.mark:
            words[-1].append("</s>")
        for form in itertools.product(*words):
            yield " ".join(form), form[-1] == "</s>"


@dataclass(frozen=True)
class Fusion:
    """A language model in a beam search: its `model`, the `weight` of its log-probabilities beside
    CTC's, and the `bonus` of every token, without which it would prefer short texts."""

    model: NGram
    weight: float = LM_WEIGHT
    bonus: float = LM_BONUS

    def step(self, state: int, token: int) -> tuple[float, int]:
        """What a token adds to the score of a hypothesis, and the state after it."""
        log_prob, following = self.model.step(state, token)
        return self.weight * log_prob + self.bonus, following

    @property
    def start(self) -> int:
        """The state in which a sentence begins."""
        return self.model.start

    def end(self, state: int) -> float:
        """What the end of a sentence adds to the score of a hypothesis."""
        return self.weight * self.model.end(state)

    def labels(self, state: int, weight: float, size: int) -> np.ndarray:
        """(size,) what each token adds where a search chooses one at a time, and the number of
        tokens is not the language model's to decide: its log-probabilities with this `weight`."""
        return weight * self.model.log_probs(state)[:size]


def discounts_of(counts: np.ndarray) -> np.ndarray:
    """(4,) what is taken from n-grams that were counted 0, once, twice, and three times or more."""
    once, twice, thrice, four = (int((counts == number).sum()) for number in range(1, 5))
    if not (once and twice and thrice):
        return np.array([0.0, *FALLBACK])
    share = once / (once + 2 * twice)
    found = [
        1 - 2 * share * twice / once,
        2 - 3 * share * thrice / twice,
        3 - 4 * share * four / thrice,
    ]
    if any(not 0 <= discount <= number for number, discount in enumerate(found, start=1)):
        return np.array([0.0, *FALLBACK])
    return np.array([0.0, *found])
