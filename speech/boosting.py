"""Names and terms that a recogniser shall write: phrases whose tokens are likelier in greedy
decoding.

A step takes the token with the highest logit, where a token that continues a phrase has the
phrase's weight added; any phrase can begin where a word begins. A token that only its bonus has
made the highest is kept if a phrase that it belongs to is completed: all of its tokens have
followed, and after them a new word, punctuation or the end. Otherwise decoding goes back to this
step and takes the token without any bonus there. So each difference from the usual text is a part
of a whole phrase, and a text in which no phrase is completed is the usual one."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common import options
from common.errors import DataError
from speech.text import normalise

# Rows for common.options.
EXCLUDES = (("boost", "stream", "a stream's words are never taken back; leave one of them out"),)
NEEDS = (("boost", ("transcribe", "evaluate"), ""), ("boost_weight", ("boost",), ""))
WEIGHT = 1.0  # by default, added to a logit: finds more, hardly writes more that nobody said
MOST = 20.0


@dataclass(frozen=True)
class Phrase:
    """A phrase, its weight, and where it was read."""

    text: str
    weight: float
    where: str


def add_arguments(parser) -> None:
    group = parser.add_argument_group("names and terms")
    group.add_argument(
        "--boost",
        type=options.path,
        metavar="FILE",
        help=(
            "make the phrases in this file likelier in --transcribe and --evaluate: UTF-8, one a"
            " line, perhaps a weight after a tab"
        ),
    )
    group.add_argument(
        "--boost_weight",
        type=options.number(float, 0.01, MOST),
        metavar="W",
        help=f"weight of phrases without one, added to the logit of each token ({WEIGHT:g})",
    )


def resolve(args) -> list[Phrase]:
    """The phrases of --boost. Raises `DataError`."""
    return list(read(args.boost, args.boost_weight or WEIGHT)) if args.boost else []


def read(path: str, weight: float) -> Iterator[Phrase]:
    """The phrases in a file; `weight` is that of lines without one. Raises `DataError`."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(f"--boost {path}: {reason}") from None
    for number, line in enumerate(lines, start=1):
        text, tab, given = line.partition("\t")
        where = f"{path}:{number}"
        value = weight
        if tab:
            try:
                value = float(given)
            except ValueError:
                value = math.nan
            if not 0 < value <= MOST:
                raise DataError(
                    f"{where}: {given.strip()!r} is no weight (above 0, at most {MOST:g})"
                )
        if text := normalise(text):
            yield Phrase(text, value, where)


class Trie:
    """The tokens of phrases: for each node its children, {token: (node, bonus)}, and whether a
    phrase ends there. `closes`: the tokens before which a word is over; `spaces`: those that are
    spaces alone, after which one begins."""

    def __init__(
        self, phrases: list[Phrase], tokenizer, begins: Callable[[int], bool], closes: set[int]
    ):
        """`begins(token)`: whether a word begins with the token, wherever it stands. Raises
        `DataError` for a phrase that the tokenizer cannot write."""
        self.children: list[dict[int, tuple[int, float]]] = [{}]
        self.ends = [False]
        self.begins = begins
        self.closes = closes
        self.spaces = tokenizer.spaces
        for phrase in phrases:
            tokens = tokenizer.encode(phrase.text)
            if tokenizer.unknown in tokens:
                raise DataError(
                    f"{phrase.where}: {phrase.text!r} has characters that the model cannot write"
                )
            # As it is written, and as at the beginning of a sentence.
            capital = tokenizer.encode(phrase.text[0].upper() + phrase.text[1:])
            self._add(tokens, phrase.weight)
            if tokenizer.unknown not in capital:
                self._add(capital, phrase.weight)

    def _add(self, tokens: list[int], weight: float) -> None:
        node = 0
        first = next((i for i, token in enumerate(tokens) if token not in self.spaces), None)
        for token in tokens[first:] if first is not None else []:
            following, bonus = self.children[node].get(token, (len(self.ends), 0.0))
            if following == len(self.ends):
                self.children.append({})
                self.ends.append(False)
            self.children[node][token] = (following, max(bonus, weight))
            node = following
        self.ends[node] = node > 0


@dataclass(frozen=True)
class Match:
    """The node that the last tokens lead to, and the numbers of the steps at which only the bonus
    made a token of this match the highest."""

    node: int
    steps: frozenset[int] = frozenset()


@dataclass
class Walk:
    """Where decoding is in the trie. `undecided`: the steps that a later one may take back, each
    with what the decoder needs to go back, and the matches before it."""

    trie: Trie
    matches: list[Match] = field(default_factory=list)
    last: int | None = None  # label
    undecided: dict[int, tuple] = field(default_factory=dict)
    count: int = 0  # steps that were noted

    def bonuses(self) -> dict[int, float]:
        """The bonus of each token that continues or begins a phrase."""
        result: dict[int, float] = {}
        nodes = [match.node for match in self.matches]
        for node in [*nodes, 0]:
            for token, (_, bonus) in self.trie.children[node].items():
                if node or self._may_begin(token):
                    result[token] = max(bonus, result.get(token, 0.0))
        return result

    def _may_begin(self, token: int) -> bool:
        return self.last is None or self.last in self.trie.spaces or self.trie.begins(token)

    def take(self, label: int | None, place: tuple | None = None):
        """Goes on with a label, None for the end. `place`: what to go back to, if the label is the
        highest because of its bonus. Returns the place to go back to if a match has failed."""
        steps: frozenset[int] = frozenset()
        if place is not None:
            self.count += 1
            self.undecided[self.count] = (place, self.matches, self.last)
            steps = frozenset([self.count])
        following = []
        for match in self.matches:
            if self.trie.ends[match.node] and (label is None or label in self.trie.closes):
                for step in match.steps:
                    self.undecided.pop(step, None)
            if label in self.trie.children[match.node]:
                node, _ = self.trie.children[match.node][label]
                following.append(Match(node, match.steps | steps))
        if label in self.trie.children[0] and self._may_begin(label):
            following.append(Match(self.trie.children[0][label][0], steps))
        supported = {step for match in following for step in match.steps}
        failed = [step for step in self.undecided if step not in supported]
        self.matches, self.last = following, label
        if not failed:
            return None
        place, self.matches, self.last = self.undecided[min(failed)]
        self.undecided = {step: kept for step, kept in self.undecided.items() if step < min(failed)}
        return place
