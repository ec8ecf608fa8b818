"""Where the pieces of a text are read in a recording: blocks of it that follow each other in both,
from the anchors, and CTC's best path through each."""

import itertools
from dataclasses import dataclass

import numpy as np

from speech.alignment import anchors, viterbi
from speech.alignment.emissions import Emissions
from speech.alignment.letters import HOLE, Vocabulary, spelt
from speech.writing.metrics import errors_of_each

SPACES = frozenset(" \u2581")  # the second is SentencePiece's

# Prices in log-probability. A letter that a recogniser hears wrongly costs a path about 4.
STAR = 30.0  # a second of sound that is not in the text
HOLE_PRICE = 10.0  # a second of what the vocabulary lacks
LONGEST_HOLE = 2.5  # seconds
SKIPPED = 1.0  # a token that is not read
FARTHEST_TEXT = 4000  # tokens between the anchors of a block
FARTHEST_TIME = 600.0  # seconds
BEYOND = 2  # pieces of the text that are tried on both sides of a block
SLOWEST = 4.0  # times as long as by the recording's pace, for these pieces
SLACK = 2.0  # seconds beside them
PIN_EVERY = 20.0  # seconds between the anchors that a path goes through
# Letters: how far from a pin the anchors are that support it, and by how much they may disagree.
PIN_SUPPORT = (15, 120)
PIN_DRIFT = 8
STRAY = 0.4  # seconds between a letter at the edge of a piece and the others, from which on it is
STRAY_TOKENS = 4  # doubted, and how many such tokens there may be
STRAY_MARGIN = -1.5  # log-probability under which it is not heard there
STRAY_LETTERS = 2  # heard between them: something else is read there
WORST = 1.0  # seconds: confidence is that of the worst so long part


@dataclass(frozen=True)
class Text:
    """Pieces of a text."""

    tokens: np.ndarray  # (U,) one piece after the other
    edges: np.ndarray  # piece i has the tokens from edges[i] to edges[i + 1]
    letters: np.ndarray  # that the tokens spell
    at: np.ndarray  # and the place of the token of each
    is_within: np.ndarray  # (U,) a word, where the vocabulary has spaces

    def piece_of(self, token: int) -> int:
        return int(np.searchsorted(self.edges, token, "right")) - 1


@dataclass(frozen=True)
class Heard:
    """What a recogniser writes by itself: `letters` (H,) and the `frames` (H,) where they begin."""

    letters: np.ndarray
    frames: np.ndarray

    def places(self, start: int, end: int) -> slice:
        """The places of the letters that are heard from frame `start` to frame `end`."""
        return slice(*np.searchsorted(self.frames, [start, end]).tolist())

    def count(self, start: int, end: int) -> int:
        """How many letters these are."""
        return len(self.frames[self.places(start, end)])

    def between(self, start: int, end: int) -> str:
        """What is heard there, without spaces."""
        return "".join(map(chr, self.letters[self.places(start, end)]))


@dataclass(frozen=True)
class Placed:
    """A piece of the text from frame `start` to frame `end`."""

    start: int
    end: int
    # The mean, over the worst second, of the path's log-probability minus that of the best one, for
    # each frame.
    confidence: float
    error_rate: float  # of the letters heard there against the piece's
    letters: int  # of the piece


@dataclass(frozen=True)
class TextBlock:
    """A part of recording and text: `start`, `end` and `anchors` (N, 2) are (frame, token)."""

    start: tuple[int, int]
    end: tuple[int, int]
    anchors: np.ndarray


def text_of(pieces: list[str], vocabulary: Vocabulary) -> Text:
    """The tokens and letters of the pieces of a text."""
    tokens = [_without_edge_holes(vocabulary.encode(piece)) for piece in pieces]
    edges = np.cumsum([0, *map(len, tokens)])
    joined = np.array(list(itertools.chain.from_iterable(tokens)), np.int64)
    spelling = ["" if token == HOLE else vocabulary.spellings[token] for token in joined.tolist()]
    has_space = [SPACES.intersection(each) != set() for each in spelling]
    is_within = ~(np.array(has_space, bool) | np.append(False, has_space[:-1]).astype(bool))
    is_within &= any(has_space)
    return Text(joined, edges, *spelt(joined, vocabulary.spellings), is_within)


def _without_edge_holes(tokens: list[int]) -> list[int]:
    """Tokens without what the vocabulary lacks at their ends, where it could reach into any other
    speech."""
    heard = [place for place, token in enumerate(tokens) if token != HOLE]
    return tokens[heard[0] : heard[-1] + 1] if heard else []


def heard_in(emissions: Emissions, vocabulary: Vocabulary) -> Heard:
    """The letters of the best token of every frame, repeats merged and blanks removed."""
    best = emissions.heard
    begins = np.flatnonzero((best != vocabulary.blank) & (np.diff(best, prepend=-1) != 0))
    letters, at = spelt(best[begins], vocabulary.spellings)
    return Heard(letters, begins[at])


def place(emissions: Emissions, text: Text, vocabulary: Vocabulary) -> list[Placed | None]:
    """For each piece of the text where it is read, or None where no anchor or no path leads to it.
    What is placed may be wrong: its confidence says so."""
    heard = heard_in(emissions, vocabulary)
    chains = anchors.chains(heard.letters, text.letters)
    pairs = [_as_frames(chain, heard, text) for chain in chains]
    places: list[Placed | None] = [None] * (len(text.edges) - 1)
    aligner = _Aligner(emissions, text, vocabulary, heard)
    for block in blocks(pairs, text, emissions):
        for number, placed in aligner.of(block):
            if places[number] is None or placed.confidence > places[number].confidence:
                places[number] = placed
    return places


def _as_frames(chain: np.ndarray, heard: Heard, text: Text) -> np.ndarray:
    """A chain of letters as rising (frame, token, whether a path may be pinned there)."""
    sides = ((heard.frames, chain[:, 0]), (text.at, chain[:, 1]))
    can_pin = _are_pins(chain)
    for tokens, places in sides:
        can_pin &= (np.diff(tokens, prepend=-1) != 0)[places]  # a token begins with this letter
    return np.stack([*(tokens[places] for tokens, places in sides), can_pin], axis=1)


def _are_pins(chain: np.ndarray) -> np.ndarray:
    """(N,) whether a pair is inside a run of equal letters, and others before and after it, not of
    the same word, are as far from each other in the text as in what was heard."""
    is_pin = np.append(False, (np.diff(chain, axis=0) == 1).all(axis=1))
    letters = chain[:, 0]
    drift = chain[:, 1] - letters
    near, far = PIN_SUPPORT
    for i in np.flatnonzero(is_pin).tolist():
        edges = letters[i] + [-far, -near, near, far]
        first, before, after, last = np.searchsorted(letters, edges).tolist()
        agree = np.abs(drift[first:last] - drift[i]) <= PIN_DRIFT
        is_pin[i] = agree[: before - first].sum() >= 2 and agree[after - first :].sum() >= 2
    return is_pin


# --- blocks ---------------------------------------------------------------------------------------


def blocks(pairs: list[np.ndarray], text: Text, emissions: Emissions) -> list[TextBlock]:
    """Blocks of neighbouring chains (N, 3), in order of time, that leave out no anchor of the text
    between them; they reach BEYOND their anchors in time and text."""
    groups: list[list[np.ndarray]] = []
    farthest = FARTHEST_TIME / emissions.frame
    begins = sorted(int(chain[0, 1]) for chain in pairs)
    for chain in pairs:
        if groups:
            frame, token, _ = groups[-1][-1][-1].tolist()
            between = np.searchsorted(begins, [token, chain[0, 1]])
            near = chain[0, 0] - frame < farthest and 0 < chain[0, 1] - token < FARTHEST_TEXT
            if near and between[1] - between[0] == 0:
                groups[-1].append(chain)
                continue
        groups.append([chain])
    joined = [np.concatenate(group) for group in groups]
    earliest = [0, *(int(chain[-1, 0]) + 1 for chain in joined)]
    latest = [*(int(chain[0, 0]) for chain in joined), len(emissions.best)]
    # Frames for a token, where the text is read.
    frames, tokens = sum(
        (chain[-1, :2] - chain[0, :2] for chain in pairs), np.zeros(2, int)
    ).tolist()
    pace = frames / max(1, tokens)
    return [
        _extended(chain, (earliest[i], latest[i + 1]), text, pace, SLACK / emissions.frame)
        for i, chain in enumerate(joined)
    ]


def _extended(
    chain: np.ndarray, limits: tuple[int, int], text: Text, pace: float, slack: float
) -> TextBlock:
    """The block of a chain of anchors, with some pieces of the text around it."""
    first = max(0, text.piece_of(int(chain[0, 1])) - BEYOND)
    last = min(len(text.edges) - 2, text.piece_of(int(chain[-1, 1])) + BEYOND)
    begin, end = int(text.edges[first]), int(text.edges[last + 1])
    before = int((chain[0, 1] - begin) * pace * SLOWEST + slack)
    after = int((end - chain[-1, 1]) * pace * SLOWEST + slack)
    start_frame = max(limits[0], int(chain[0, 0]) - before)
    end_frame = min(limits[1], int(chain[-1, 0]) + after)
    return TextBlock((start_frame, begin), (end_frame, end), chain)


# --- the path -------------------------------------------------------------------------------------


class _Aligner:
    """Aligns blocks of a recording. `first` and `last` (U,) are the frames of each token, -1 for
    those that no path goes through; `margins` (T,) the path's log-probability minus the best."""

    def __init__(self, emissions: Emissions, text: Text, vocabulary: Vocabulary, heard: Heard):
        self.emissions = emissions
        self.text = text
        self.heard = heard
        self.spellings = vocabulary.spellings
        size = emissions.log_probs.shape[1]
        self.star, self.hole = size, size + 1  # columns
        self.blank = emissions.column_of[vocabulary.blank]
        columns = {**emissions.column_of, HOLE: self.hole}
        self.columns = np.array([columns[token] for token in text.tokens.tolist()], int)
        self.first = np.full(len(text.tokens), -1)
        self.last = np.full(len(text.tokens), -1)
        self.margins = np.zeros(len(emissions.best), np.float32)
        self.in_hole = np.zeros(len(emissions.best), bool)

    def of(self, block: TextBlock) -> list[tuple[int, Placed]]:
        """The pieces of the text that are placed in a block, by number."""
        self.first[block.start[1] : block.end[1]] = -1
        for start, end in itertools.pairwise(self._pins(block)):
            self._align(start, end)
        first, last = (self.text.piece_of(token) for token in (block.start[1], block.end[1] - 1))
        placed = [(number, self._placed(number)) for number in range(first, last + 1)]
        return [(number, each) for number, each in placed if each]

    def _pins(self, block: TextBlock) -> list[tuple[int, int]]:
        """The ends of a block and anchors between them, PIN_EVERY or more apart."""
        pins = [block.start]
        least = PIN_EVERY / self.emissions.frame
        edges = set(self.text.edges.tolist())
        for frame, token, is_pin in block.anchors.tolist():
            if not is_pin or token in edges or self.columns[token] == self.columns[token - 1]:
                continue
            if frame - pins[-1][0] >= least:
                pins.append((frame, token))
        return [*pins, block.end]

    def _align(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Finds the frames of the tokens from `start` to `end`, (frame, token) each."""
        frames = slice(start[0], end[0])
        best = self.emissions.best[frames].astype(np.float32)
        star = best - STAR * self.emissions.frame
        hole = best - HOLE_PRICE * self.emissions.frame
        log_probs = np.column_stack([self.emissions.log_probs[frames], star, hole])
        sequence, tokens, skips = self._sequence(start[1], end[1])
        path = viterbi.align(log_probs, sequence, self.blank, skips)
        if path is None:
            return
        places = path.states // 2
        is_token = path.states % 2 == 1
        columns = np.full(len(places), self.blank)
        columns[is_token] = sequence[places[is_token]]
        self.margins[frames] = log_probs[np.arange(len(places)), columns] - best
        self.in_hole[frames] = columns == self.hole
        visited = np.flatnonzero(is_token)
        numbers = tokens[places[visited]]
        visited, numbers = visited[numbers >= 0] + start[0], numbers[numbers >= 0]
        self.last[numbers] = visited
        self.first[numbers[::-1]] = visited[::-1]

    def _sequence(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, viterbi.Skips]:
        """The columns of the tokens from `begin` to `end` with a star wherever a piece begins or
        ends, the tokens' numbers (-1 for a star), and what may be skipped between stars."""
        edges = self.text.edges
        places = np.unique(edges[(edges > begin) & (edges <= end)])
        if begin in edges:  # at the block's beginning: no pin is the first token of a piece
            places = np.append(begin, places)
        numbers = np.insert(np.arange(begin, end), places - begin, -1)
        sequence = np.where(numbers < 0, self.star, self.columns[numbers])
        stops = np.flatnonzero(numbers < 0)
        prices = SKIPPED * (np.diff(stops) - 1)
        return sequence, numbers, viterbi.Skips(stops, prices)

    def _placed(self, number: int) -> Placed | None:
        """Where a piece is, if the path goes through all of its tokens."""
        begin, end = self.text.edges[number : number + 2].tolist()
        if begin == end or (self.first[begin:end] < 0).any():
            return None
        is_hole = self.text.tokens[begin:end] == HOLE
        in_holes = (self.last - self.first + 1)[begin:end][is_hole]
        if in_holes.max(initial=0) * self.emissions.frame > LONGEST_HOLE:
            return None
        frames = self._without_strays(begin, end)
        if frames is None:
            return None
        start, stop = frames
        margins = self.margins[start:stop]
        margins = margins[~self.in_hole[start:stop]]
        tokens = self.text.tokens[begin:end]
        letters, _ = spelt(tokens[~is_hole], self.spellings)
        errors = self._error_rate(letters, start, stop)
        return Placed(start, stop, self._worst(margins), errors, len(letters))

    def _without_strays(self, begin: int, end: int) -> tuple[int, int] | None:
        """The frames of the tokens from `begin` to `end`. The path puts tokens at the edge that
        nobody hears anywhere in the pause beside them, or a part of a word beyond it: here they are
        close to their neighbour. None if something else is heard between them and it."""
        first, last = self.first[begin:end], self.last[begin:end]
        is_within = self.text.is_within[begin:end]
        pace = (last[-1] - first[0]) / len(first)
        start, stop = int(first[0]), int(last[-1]) + 1
        gaps = np.flatnonzero((first[1:] - last[:-1]) * self.emissions.frame > STRAY)
        for gap in gaps.tolist():  # behind this token
            before, after = gap + 1, len(first) - 1 - gap  # tokens
            if min(before, after) > STRAY_TOKENS:
                continue
            at_start = before <= after
            strays = first[: gap + 1] if at_start else first[gap + 1 :]
            if is_within[gap + 1] or self.margins[strays].mean() < STRAY_MARGIN:
                if at_start:
                    start = max(start, int(first[gap + 1] - before * pace))
                else:
                    stop = min(stop, int(last[gap] + after * pace) + 1)
            elif self.heard.count(int(last[gap]) + 1, int(first[gap + 1])) >= STRAY_LETTERS:
                return None
        return start, stop

    def _worst(self, margins: np.ndarray) -> float:
        size = min(len(margins), round(WORST / self.emissions.frame))
        if not size:
            return 0.0
        sums = np.cumsum(np.append(0.0, margins))
        return float((sums[size:] - sums[:-size]).min() / size)

    def _error_rate(self, letters: np.ndarray, start: int, stop: int) -> float:
        """Of the letters heard from frame `start` to `stop`, outside holes, against these."""
        first, last = np.searchsorted(self.heard.frames, [start - 1, stop + 1])
        heard = self.heard.letters[first:last][~self.in_hole[self.heard.frames[first:last]]]
        texts = ("".join(map(chr, each)) for each in (letters, heard))
        return errors_of_each(*([each] for each in texts), "characters", str)[0].rate
