"""Old utterances among the new ones of every update, so that a model does not forget: how many a
global batch has, and which. Several data sets as one."""

import itertools
import math
from collections.abc import Callable

import numpy as np

from common.batches import POOL_BATCHES, GlobalBatches
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
    """The global batches of `size` from epoch `first` to before `last`, each of `new` new ones."""
    ends = [whole(epoch * new, share) for epoch in range(first, last + 1)]
    return sum(math.ceil((end - begin) / size) for begin, end in itertools.pairwise(ends))


def batch_sizes(new: int, size: int, share: float, begin: int) -> np.ndarray:
    """(K, 2) new and old utterances of each global batch of `size`, from position `begin` until
    `new` more new ones are used. Only the last one can be smaller. However many global batches are
    taken together, their old utterances are the `share` of all, rounded."""
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
    """Raises `UsageError` if a global batch of `size` with this share could lack new utterances."""
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


class JoinedSets:
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


class ReplayedBatches(GlobalBatches):
    """Global batches with a share of utterances of the set `old`. An epoch is one of `data`."""

    def __init__(self, args, data, old, collate: Callable[[list[dict]], dict], setup):
        self.old = old
        self.share = args.replay_share
        super().__init__(args, data, collate, setup)
        check_share(self.share, self.global_batch_size)

    def whole(self) -> JoinedSets:
        return JoinedSets([self.data, self.old])

    def sets(self) -> dict[str, object]:
        return {**super().sets(), "old": self.old}

    def count(self, first: int, last: int) -> int:
        return count_global_batches(len(self.data), self.global_batch_size, self.share, first, last)

    def epoch_batches(self, epoch: int, seconds: np.ndarray) -> list[np.ndarray]:
        size = self.global_batch_size
        return order_epoch(seconds, len(self.old), self.share, size, (self.seed, epoch))

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.old.fingerprint()} {self.share:g}"

    def described(self) -> str:
        share = f"{100 * self.share:g} % of each update"
        return f"; {share} are old utterances out of {len(self.old)} (--replay_share)"


def make_batches(args, data, collate: Callable, setup, old=None) -> GlobalBatches:
    """The global batches of a training set and, with --replay_manifest, of a set `old`."""
    if old is None:
        return GlobalBatches(args, data, collate, setup)
    return ReplayedBatches(args, data, old, collate, setup)


def order_epoch(
    seconds: np.ndarray, old: int, share: float, global_batch_size: int, key: tuple[int, int]
) -> list[np.ndarray]:
    """`batches.order_epoch` with replay. The last `old` utterances of `seconds` (N,) are old
    material, of which every global batch has a `share` (see `batch_sizes`): the next ones of an
    order of their own. An epoch has every other utterance once. `key`: seed and epoch."""
    seed, epoch = key
    new = len(seconds) - old
    begin = whole(epoch * new, share)  # utterances before
    # An old one can come twice: the places of this epoch's utterances are ordered.
    ends = old_among([begin, whole((epoch + 1) * new, share)], share).tolist()
    places = np.concatenate([np.arange(new), new + drawn(old, seed, *ends)])
    sizes = batch_sizes(new, global_batch_size, share, begin)
    global_batches = cut_epoch(seconds[places], new, sizes, key)
    return [places[global_batch] for global_batch in global_batches]


def cut_epoch(
    seconds: np.ndarray, new: int, sizes: np.ndarray, key: tuple[int, int]
) -> list[np.ndarray]:
    """The global batches of utterances with these lengths, of which the first `new` are new.
    `sizes` (K, 2): how many new ones and how many of the others, which come in this order, are in
    each global batch; `key`: seed and epoch."""
    seed, epoch = key
    random = np.random.default_rng((seed, epoch, 0))
    streams = random.permutation(new), np.arange(new, len(seconds))
    begins = np.cumsum(sizes, axis=0) - sizes
    global_batches = []
    for first in range(0, len(sizes), POOL_BATCHES):
        parts = []
        own = sizes[first : first + POOL_BATCHES]
        for stream, begin, counts in zip(streams, begins[first], own.T, strict=True):
            pool = stream[begin : begin + counts.sum()]
            # Longest first: the one that is smaller stays the last, because the share of old
            # utterances would not be exact otherwise, and so it must not get the longest.
            pool = pool[np.argsort(-seconds[pool], kind="stable")]
            parts.append(np.split(pool, np.cumsum(counts)[:-1]))
        global_batches += [np.concatenate(pair) for pair in zip(*parts, strict=True)]
    # Only global batches with as many new and as many old utterances change places.
    kinds = np.unique(sizes, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.arange(len(sizes))
    for kind in range(kinds.max(initial=-1) + 1):
        places = np.flatnonzero(kinds == kind)
        order[places] = places[random.permutation(len(places))]
    if epoch == 0 and len(order):
        longest = np.array([seconds[global_batches[number]].max() for number in order]).argmax()
        places = np.flatnonzero(kinds[: longest + 1] == kinds[longest])
        order[places] = np.roll(order[places], 1)
    return [global_batches[number] for number in order]
