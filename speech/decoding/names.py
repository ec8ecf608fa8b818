"""A list of names in a search: what continues a name from its beginning is likelier than it would
be. Unlike with a language model, everything else stays as likely as it was."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from speech.decoding.ngram import Fusion

NAME_BONUS = 1.0  # of every token of a name; twice as much invents names
# A file of so many lines at most, all of them this short, is a list of names: nothing can be
# learned from it about the language.
MOST_NAMES = 2_000
NAME_WORDS = 4
NAME_CHARACTERS = 40
WORD_START = 0  # the place where a name can begin
IN_WORD = 1  # inside another word


class Names:
    """The tree of names, as token ids. A place in it stands for what was just written: the
    beginning of a name. `mark`: the token before a word; None if a name can begin anywhere, because
    the tokens themselves say where words begin."""

    def __init__(self, names: Iterable[list[int]], mark: int | None, bonus: float = NAME_BONUS):
        self.mark = mark
        self.bonus = bonus
        self.following: list[dict[int, int]] = [{}, {}]  # of each place: token to place
        self.can_begin = [True, mark is None]  # of each place: whether a name can begin after it
        complete = set()
        for name in names:
            place = WORD_START
            for token in name:
                if token not in self.following[place]:
                    self.following[place][token] = len(self.following)
                    self.following.append({})
                    self.can_begin.append(mark in (None, token))
                place = self.following[place][token]
            complete.add(place)
        # Of each place: the tokens after the last complete name. Their bonus is taken back where
        # the name does not continue. A place comes before those that continue it.
        self.owed = [0] * len(self.following)
        for place, following in enumerate(self.following):
            for after in following.values():
                self.owed[after] = 0 if after in complete else self.owed[place] + 1

    def step(self, place: int, token: int) -> tuple[float, int]:
        """What a token adds to the score of a hypothesis, and the place after it."""
        after = self.following[place].get(token)
        if after is not None:
            return self.bonus, after
        taken_back = -self.bonus * self.owed[place]
        if self.can_begin[place] and token in self.following[WORD_START]:
            return taken_back + self.bonus, self.following[WORD_START][token]
        return taken_back, WORD_START if self.mark in (None, token) else IN_WORD

    def end(self, place: int) -> float:
        """What the end of a sentence adds."""
        return -self.bonus * self.owed[place]

    def labels(self, place: int, size: int) -> np.ndarray:
        """(size,) what each token adds, without what is taken back from all others."""
        added = np.zeros(size)
        if self.can_begin[place]:
            added[[*self.following[WORD_START]]] = self.bonus
        added[[*self.following[place]]] = self.bonus
        return added


@dataclass(frozen=True)
class WithNames:
    """Names in a search, beside a language model (`fusion`) or without one."""

    names: Names
    fusion: Fusion | None

    @property
    def start(self) -> tuple[int, int]:
        """The state in which a sentence begins."""
        return (self.fusion.start if self.fusion else 0, WORD_START)

    def restart(self) -> None:
        """The next search begins a recording."""
        if self.fusion:
            self.fusion.restart()

    def follow(self, text: str) -> None:
        """The next search begins where a text, the one of the last search, ends."""
        if self.fusion:
            self.fusion.follow(text)

    def step(self, state: tuple[int, int], token: int) -> tuple[float, tuple[int, int]]:
        """What a token adds to the score of a hypothesis, and the state after it."""
        number, place = state
        added, place = self.names.step(place, token)
        if self.fusion:
            more, number = self.fusion.step(number, token)
            added += more
        return added, (number, place)

    def end(self, state: tuple[int, int], tokens: Sequence[int] = ()) -> float:
        """What the end of a sentence adds to the score of a hypothesis of these tokens."""
        number, place = state
        added = self.names.end(place)
        return added + self.fusion.end(number, tokens) if self.fusion else added

    def labels(self, state: tuple[int, int], weight: float, size: int) -> np.ndarray:
        """(size,) what each token adds where a search chooses one at a time: see `Fusion`."""
        number, place = state
        added = self.names.labels(place, size)
        return added + self.fusion.labels(number, weight, size) if self.fusion else added


def are_names(lines: list[str]) -> bool:
    """Whether the lines of a file are a list of names, and no text of a language."""
    return len(lines) <= MOST_NAMES and all(
        len(line.split()) <= NAME_WORDS and len(line) <= NAME_CHARACTERS for line in lines
    )
