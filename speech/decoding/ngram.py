"""A language model of plain text: an n-gram over token ids, such as a model's characters, by
interpolated modified Kneser-Ney smoothing (Chen and Goodman 1999).

The text is one circular stream, in which a mark (the space, where a vocabulary has one) stands
between sentences. So a sentence begins after a mark and ends with one, an n-gram has the same
meaning everywhere, and a piece of a long recording can begin anywhere."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Of a language model beside CTC: of the weights 0.6 to 1.2 and bonuses 1 to 2.5 the best for
# held-out clips of Mboshi, of an acoustic model with 21 % CER. For four models with 34 to 64 % CER
# and order 6 the WER of 0.6 and 1 was within 3 % of what the best weights for each reach.
LM_WEIGHT = 1.0
LM_BONUS = 2.0
ORDER = 8  # a point of WER better than 6; 10 and 12 are as good
# Of the words of a whole text, beside its characters: on Mboshi a point of WER better than without.
# Weights from 0.4 to 0.8 and order 3 are as good, order 1 is half as good.
WORD_WEIGHT = 0.6
WORD_ORDER = 2
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


class Words:
    """An n-gram of whole words. A word that the texts lack has the probability that smoothing
    leaves for it: it may be written, and is unlikely."""

    def __init__(self, texts: Iterable[str], order: int = WORD_ORDER):
        self.ids: dict[str, int] = {}
        sentences = [
            [self.ids.setdefault(word, len(self.ids) + 1) for word in text.split()]
            for text in texts
        ]
        self.unknown = len(self.ids) + 1
        self.model = NGram(sentences, self.unknown + 1, mark=0, order=order)
        self.start = self.model.start

    def read(self, text: str, state: int) -> tuple[float, int]:
        """The log-probability of the words of a text after a state, and the state after them."""
        total = 0.0
        for word in text.split():
            log_prob, state = self.model.step(state, self.ids.get(word, self.unknown))
            total += log_prob
        return total, state


@dataclass(eq=False)
class Fusion:
    """A language model in a beam search; `words` also order the hypotheses that it ends with."""

    model: NGram
    weight: float = LM_WEIGHT  # of its log-probabilities beside CTC's
    bonus: float = LM_BONUS  # of every token, without which it would prefer short texts
    encode: Callable[[str], list[int]] | None = None  # a text to its tokens
    decode: Callable[[list[int]], str] | None = None  # tokens to their text
    words: Words | None = None
    # tokens that are no part of a text, such as those that name a language
    tags: frozenset[int] = frozenset()

    def __post_init__(self):
        self.restart()

    def restart(self) -> None:
        """The next search begins a recording."""
        self.start = self.model.start
        self.words_start = self.words.start if self.words else 0

    def follow(self, text: str) -> None:
        """The next search begins where a text, the one of the last search, ends."""
        tokens = self.encode(text)
        state = self.start
        for token in (*tokens, self.model.mark) if tokens else ():
            _, state = self.model.step(state, token)
        self.start = state
        if self.words:
            _, self.words_start = self.words.read(text, self.words_start)

    def step(self, state: int, token: int) -> tuple[float, int]:
        """What a token adds to the score of a hypothesis, and the state after it."""
        log_prob, following = self.model.step(state, token)
        return self.weight * log_prob + self.bonus, following

    def end(self, state: int, tokens: Sequence[int] = ()) -> float:
        """What the end of a sentence adds to the score of a hypothesis of these tokens."""
        added = self.weight * self.model.end(state)
        if self.words:
            log_prob, last = self.words.read(self.decode([*tokens]), self.words_start)
            added += WORD_WEIGHT * (log_prob + self.words.model.end(last))
        return added

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
