"""Old utterances among the new ones of every update, so that a model does not forget: how many a
global batch has, and which. Several data sets as one."""

import itertools
import math

import numpy as np

from common.errors import UsageError

DRAW = 3  # joins the seed of the order in which old utterances come


def old_among(total, share: float):
    """How many of the first `total` utterances of a run are old: the whole number that is nearest
    to the `share` of them. `total`: a number, or an array of them."""
    return np.floor(share * np.asarray(total) + 0.5).astype(np.int64)


def whole(new: int, share: float) -> int:
    """The utterances of a run, new and old ones, when it has seen `new` new ones."""
    total = max(0, math.floor((new - 1) / (1 - share)) - 1)
    while total - old_among(total, share) < new:
        total += 1
    return total


def count_global_batches(new: int, size: int, share: float, first: int, last: int) -> int:
    """The global batches of `size` in the epochs from `first` to before `last`, each of which has
    `new` new utterances."""
    if not share:
        return (last - first) * math.ceil(new / size)
    ends = [whole(epoch * new, share) for epoch in range(first, last + 1)]
    return sum(math.ceil((end - begin) / size) for begin, end in itertools.pairwise(ends))


def batch_sizes(new: int, size: int, share: float, begin: int) -> np.ndarray:
    """(K, 2): how many new and old utterances are in each of the global batches of `size` with
    which a run goes on after `begin` utterances, until it has seen `new` new ones more. Only the
    last one can be smaller. However many global batches are taken together, their old utterances
    are the `share` of all, rounded."""
    end = whole(begin - int(old_among(begin, share)) + new, share)
    ends = np.minimum(np.arange(begin, end + size, size), end) if new else np.array([begin])
    olds = np.diff(old_among(ends, share))
    return np.stack([np.diff(ends) - olds, olds], axis=1)


def drawn(count: int, seed: int, begin: int, end: int) -> np.ndarray:
    """(end - begin,) old utterances out of `count`: these places of an endless order by the seed
    alone, in which all come once before any comes again."""
    first = begin // count
    rounds = range(first, end // count + 1)
    orders = [np.random.default_rng([seed, each, 0, DRAW]).permutation(count) for each in rounds]
    return np.concatenate(orders)[begin - first * count : end - first * count]


def check_share(share: float, size: int) -> None:
    """Raises `UsageError` if a global batch of `size` with this share of old utterances could lack
    new ones."""
    if size == 1:
        raise UsageError(
            "--replay_manifest: an update of one utterance cannot have old and new ones; raise"
            " --batch_size or --gradient_accumulation_steps"
        )
    if share * size > size - 1:
        raise UsageError(
            f"--replay_share {share:g} leaves no new utterance in an update of {size}: it can be at"
            f" most {math.floor(1000 * (size - 1) / size) / 1000:g} there"
        )


class Joined:
    """Several data sets as one: the utterances of the first, then those of the second, ..."""

    def __init__(self, parts: list):
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        if all(hasattr(part, "text_length") for part in parts):
            self.text_length = self._text_length

    def __len__(self) -> int:
        return int(self.ends[-1])

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        return np.concatenate([part.seconds(epoch) for part in self.parts])

    def item(self, index: int, epoch: int) -> dict:
        part, row = self._place(index)
        return part.item(row, epoch)

    def _text_length(self, index: int) -> int:
        part, row = self._place(index)
        return part.text_length(row)

    def _place(self, index: int) -> tuple[object, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        part = self.parts[number]
        return part, index - int(self.ends[number]) + len(part)
