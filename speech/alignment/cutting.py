"""Utterances to train on, cut at sentence ends and pauses, and lists of what is left out."""

import itertools
import statistics
from dataclasses import dataclass

import numpy as np

from speech.alignment.emissions import ENERGY_FRAME, Emissions
from speech.alignment.matching import Heard, Placed
from speech.alignment.sentences import Piece, join

SHORT, LONGEST = 2.0, 20.0  # seconds of an utterance
SHORTEST = 0.8  # seconds of one between others that cannot be used
# What is certain: limits around the medians of what is placed in the recording, and absolute ones.
MOST_ERRORS = 0.5
ERRORS_ABOVE = 0.25
MORE_BETWEEN = 0.15
FEWEST = 4  # letters
CONFIDENCE_BELOW = 40.0  # log-probability a second; of a recogniser that hardly errs:
CONFIDENCE_BELOW_TWICE = 15.0  # below twice the median
MARGIN = 0.04  # seconds of silence that an utterance keeps, at most
QUIET = 0.1  # seconds: shorter silences are closures of plosives
NEAR = 0.6  # seconds beside a letter in which its silence is looked for
# Silence: the lowest share of the way from the quietest place to speech, in dB, and all that is so
# many dB below speech: noise, beside a pause that somebody has cleared.
LOUDNESS = 0.3
NOISE_BELOW = 28.0
SILENCE_BELOW = 10.0  # dB below speech
PAUSE = 0.15  # seconds at which to cut rather than elsewhere
LONGEST_PAUSE = 1.5  # seconds within an utterance
# Costs of a cut: at a sentence's end or elsewhere, in a pause or in speech; of an utterance that is
# short, or cannot be used; the gain of another utterance.
CUTS = {(True, True): 0.0, (False, True): 1.0, (True, False): 3.0, (False, False): 10.0}
SHORT_COST = 10.0
UNUSABLE = 50.0
ANOTHER = 0.5
# Sound that is reported: letters heard, seconds
HEARD_LETTERS = 5
HEARD_SECONDS = 1.0
NUMBER_LETTERS = 2  # heard where a number is read
NUMBER_SECONDS = 3.0  # how far from a piece a number may be

NOT_FOUND = "not found in the recording"
UNCERTAIN = "uncertain"
TOO_SHORT = f"shorter than {SHORTEST:g} s between others"
NO_PAUSE = "no pause between it and other speech"
TOO_LONG = f"longer than {LONGEST:g} s without a pause"


Silence = tuple[float, float]  # (start, end), seconds


@dataclass(frozen=True)
class Cuts:
    """Utterances and what is in none of them, in order of time."""

    utterances: list[dict]  # {"offset", "duration", "text", "confidence", "error_rate"}
    texts: list[dict]  # {"text", "reason"}, some with where they may be, "offset" and "duration"
    sounds: list[dict]  # letters heard in no utterance {"offset", "duration", "heard"}


@dataclass(frozen=True)
class _Span:
    """Piece `number` from `start` to `end` in seconds, and whether it is silent on each side."""

    number: int
    start: float
    end: float
    after_pause: bool
    before_pause: bool


def cut(
    pieces: list[Piece],
    placed: list[Placed | None],
    emissions: Emissions,
    heard: Heard,
    joins: bool = True,
) -> Cuts:
    """The utterances of a recording in which `pieces` are `placed`; each piece without `joins`."""
    numbers = _in_order(placed)
    spans = _spans(numbers, placed, emissions)
    certain = _certain(numbers, placed, emissions.frame)
    reasons: dict[int, str] = {}
    for number, each in enumerate(placed):
        if each is None or number not in spans:
            reasons[number] = NOT_FOUND
        elif number not in certain:
            reasons[number] = UNCERTAIN
    utterances = []
    numbers_read = _NumbersRead(pieces, numbers, placed, emissions, heard)
    used = [spans[number] for number in numbers if number not in reasons]
    for run in _runs(used) if joins else [[span] for span in used]:
        for part in _best_cuts(run, pieces):
            seconds = part[-1].end - part[0].start
            # In the middle of a run, what is cut off without a pause is in the next utterance.
            begins = part[0].after_pause or part[0] is not run[0]
            ends = part[-1].before_pause or part[-1] is not run[-1]
            if not SHORTEST <= seconds <= LONGEST:
                reason = TOO_SHORT if seconds < SHORTEST else TOO_LONG
            elif not (begins and ends):
                reason = NO_PAUSE
            else:
                texts = numbers_read.of(part)
                if texts:
                    utterances.append(_utterance(part, texts, placed))
                    continue
                reason = UNCERTAIN
            reasons |= dict.fromkeys((span.number for span in part), reason)
    texts = [_left_out(pieces[i].whole(), reasons[i], spans.get(i)) for i in sorted(reasons)]
    return Cuts(utterances, texts, _sounds(utterances, emissions, heard))


def _in_order(placed: list[Placed | None]) -> list[int]:
    """The numbers of the pieces in order of time; of two in the same place the more certain."""
    numbers = [number for number, each in enumerate(placed) if each]
    ordered: list[int] = []
    for number in sorted(numbers, key=lambda number: (placed[number].start, placed[number].end)):
        this = placed[number]
        while ordered and placed[ordered[-1]].end > this.start:
            if placed[ordered[-1]].confidence >= this.confidence:
                break
            ordered.pop()
        if not ordered or placed[ordered[-1]].end <= this.start:
            ordered.append(number)
    return ordered


def _certain(numbers: list[int], placed: list[Placed | None], frame: float) -> set[int]:
    """The numbers of those that are about as good as most: a recogniser that errs often errs
    everywhere. More errors are allowed between two certain neighbours."""
    if not numbers:
        return set()
    errors = statistics.median(placed[number].error_rate for number in numbers)
    confidence = statistics.median(placed[number].confidence for number in numbers)
    most = min(MOST_ERRORS, errors + ERRORS_ABOVE)
    least = max(
        confidence - CONFIDENCE_BELOW * frame, 2 * confidence - CONFIDENCE_BELOW_TWICE * frame
    )

    def passes(number: int, more: float = 0.0) -> bool:
        piece = placed[number]
        return piece.error_rate <= most + more and piece.confidence >= least

    certain = {number for number in numbers if passes(number) and placed[number].letters >= FEWEST}
    neighbours = zip(numbers, numbers[1:], numbers[2:], strict=False)
    between = {
        number
        for before, number, after in neighbours
        if {before, after} <= certain and (before, after) == (number - 1, number + 1)
    }
    return certain | {number for number in between if passes(number, MORE_BETWEEN)}


# --- where sound begins and ends ------------------------------------------------------------------


def _spans(
    numbers: list[int], placed: list[Placed | None], emissions: Emissions
) -> dict[int, _Span]:
    """The span of each piece, from the silence before its first letter to that after its last."""
    frame = emissions.frame
    firsts = [*(placed[number].start * frame for number in numbers), emissions.seconds]
    lasts = [0.0, *(placed[number].end * frame for number in numbers)]
    edges = [
        _pauses(last, first, emissions.energy) for last, first in zip(lasts, firsts, strict=True)
    ]
    spans = {}
    for number, (_, before), (after, _) in zip(numbers, edges, edges[1:], strict=False):
        start = before[1] - min(MARGIN, (before[1] - before[0]) / 2)
        end = after[0] + min(MARGIN, (after[1] - after[0]) / 2)
        after_pause = before[1] - before[0] >= PAUSE or before[0] <= 0
        before_pause = after[1] - after[0] >= PAUSE or after[1] >= emissions.seconds
        spans[number] = _Span(number, start, end, after_pause, before_pause)
    return spans


def _pauses(end: float, start: float, energy: np.ndarray | None) -> tuple[Silence, Silence]:
    """The silence after a letter that ends at `end` and that before one that begins at `start`, in
    seconds; they are the same one if nothing else is near. The first begins where the sound ends,
    which CTC notes too early, the second ends where it begins again."""
    if energy is None or start - end < 2 * ENERGY_FRAME:
        return ((min(end, start), start),) * 2
    sides = [energy[max(0, _place(end - NEAR)) : _place(end)], energy[_place(start) :]]
    sides[1] = sides[1][: _place(NEAR)]
    speech = float(np.percentile(np.concatenate(sides), 90)) if any(map(len, sides)) else 0.0
    if start - end > 2 * NEAR:
        after = _quiet(end, end + NEAR, energy, speech)
        return after[0], _quiet(start - NEAR, start, energy, speech)[1]
    first, last = _quiet(end, start, energy, speech)
    return (first, last) if first[1] < last[0] else ((first[0], last[1]),) * 2


def _place(seconds: float) -> int:
    return round(seconds / ENERGY_FRAME)


def _quiet(start: float, end: float, energy: np.ndarray, speech: float) -> tuple[Silence, Silence]:
    """The first and the last silence, or the quietest place. `speech`: its level here in dB."""
    part = energy[_place(start) : _place(end)]
    if not len(part):
        return ((start, end),) * 2
    padded = np.pad(part, 1, mode="edge")
    part = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    floor = float(part.min())
    quietest = start + int(part.argmin()) * ENERGY_FRAME
    if speech - floor < SILENCE_BELOW:
        return ((quietest, quietest),) * 2
    is_quiet = part < max(floor + LOUDNESS * (speech - floor), speech - NOISE_BELOW)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_quiet, [False]]))).reshape(-1, 2)
    runs = edges[edges[:, 1] - edges[:, 0] >= QUIET / ENERGY_FRAME]
    if not len(runs):
        return ((quietest, quietest),) * 2
    silences = start + runs[[0, -1]] * ENERGY_FRAME
    return tuple(silences[0].tolist()), tuple(silences[1].tolist())


# --- utterances -----------------------------------------------------------------------------------


def _runs(spans: list[_Span]) -> list[list[_Span]]:
    """Spans that follow each other in text and time, with no long pause between them."""
    runs: list[list[_Span]] = []
    for span in spans:
        last = runs[-1][-1] if runs else None
        follows = last and span.number == last.number + 1
        if follows and span.start - last.end <= LONGEST_PAUSE:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _best_cuts(run: list[_Span], pieces: list[Piece]) -> list[list[_Span]]:
    """The run in parts, cut at the least cost: by dynamic programming over its ends."""
    costs = [0.0]
    cuts = [0]
    for end in range(1, len(run) + 1):
        last = run[end - 1]
        cost = CUTS[pieces[last.number].is_end, last.before_pause]
        choices = []
        for start in reversed(range(end)):
            seconds = last.end - run[start].start
            choices.append((costs[start] + cost + _cost(seconds), start))
            if seconds > LONGEST:
                break
        best, start = min(choices)
        costs.append(best)
        cuts.append(start)
    parts = []
    end = len(run)
    while end:
        parts.append(run[cuts[end] : end])
        end = cuts[end]
    return parts[::-1]


def _cost(seconds: float) -> float:
    """Of an utterance of this length."""
    if not SHORTEST <= seconds <= LONGEST:
        return UNUSABLE
    return SHORT_COST if seconds < SHORT else -ANOTHER


class _NumbersRead:
    """Which of the numbers beside the pieces of an utterance are read. The recogniser cannot write
    them, so they are not aligned: letters that it hears where a number would be say so. `numbers`:
    of the placed pieces, in order of time."""

    def __init__(
        self,
        pieces: list[Piece],
        numbers: list[int],
        placed: list[Placed | None],
        emissions: Emissions,
        heard: Heard,
    ):
        self.pieces = pieces
        self.placed = placed
        self.frame = emissions.frame
        self.heard = heard
        # Of each piece, where the one before it ends and the one after it starts.
        ends = [0, *(placed[number].end for number in numbers)]
        starts = [*(placed[number].start for number in numbers[1:]), len(emissions.best)]
        self.ends = dict(zip(numbers, ends, strict=False))
        self.starts = dict(zip(numbers, starts, strict=False))

    def of(self, part: list[_Span]) -> list[str] | None:
        """The text of each piece with the numbers that are read. None if sound of a number at an
        end may be outside."""
        first, last = part[0], part[-1]
        before = self._at_start(first.number, round(first.start / self.frame))
        after = self._at_end(last.number, round(last.end / self.frame))
        if before is None or after is None:
            return None
        sides = [before]
        for one, other in itertools.pairwise(part):
            sides += self._between(one.number, other.number)
        sides.append(after)
        triples = zip(part, sides[::2], sides[1::2], strict=True)
        return [self.pieces[span.number].whole(*read) for span, *read in triples]

    def _between(self, one: int, other: int) -> tuple[bool, bool]:
        """Whether a number is read behind piece `one`, and before the `other`, which follows it in
        an utterance. Of two numbers it is the nearer one."""
        start, end = self.placed[one].end, self.placed[other].start
        if not self._is_heard(start, end):
            return False, False
        if not (self.pieces[one].numbers[1] and self.pieces[other].numbers[0]):
            return True, True
        frames = self.heard.frames[self.heard.places(start, end)]
        is_behind = bool(frames[0] - start < end - frames[-1])
        return is_behind, not is_behind

    def _at_start(self, number: int, edge: int) -> bool | None:
        """Whether a number is read before a piece, in an utterance from frame `edge` on. None if
        letters are heard before that, too."""
        if not self.pieces[number].numbers[0]:
            return False
        earliest = max(self.ends[number], edge - round(NUMBER_SECONDS / self.frame))
        if self._is_heard(earliest, edge):
            return None
        return self._is_heard(edge, self.placed[number].start)

    def _at_end(self, number: int, edge: int) -> bool | None:
        """The same of a number behind a piece, in an utterance up to frame `edge`."""
        if not self.pieces[number].numbers[1]:
            return False
        latest = min(self.starts[number], edge + round(NUMBER_SECONDS / self.frame))
        if self._is_heard(edge, latest):
            return None
        return self._is_heard(self.placed[number].end, edge)

    def _is_heard(self, start: int, end: int) -> bool:
        return self.heard.count(start, end) >= NUMBER_LETTERS


def _utterance(part: list[_Span], texts: list[str], placed: list[Placed | None]) -> dict:
    start = round(part[0].start, 3)
    each = [placed[span.number] for span in part]
    return {
        "offset": start,
        "duration": round(part[-1].end - start, 3),
        "text": join(texts),
        "confidence": round(min(one.confidence for one in each), 3),
        "error_rate": round(max(one.error_rate for one in each), 3),
    }


def _left_out(text: str, reason: str, span: _Span | None) -> dict:
    row = {"text": text, "reason": reason}
    if span and reason != NOT_FOUND:
        row |= {"offset": round(span.start, 3), "duration": round(span.end - span.start, 3)}
    return row


def _sounds(utterances: list[dict], emissions: Emissions, heard: Heard) -> list[dict]:
    """What is heard between the utterances."""
    starts = [each["offset"] for each in utterances]
    ends = [each["offset"] + each["duration"] for each in utterances]
    rows = []
    for start, end in zip([0.0, *ends], [*starts, emissions.seconds], strict=True):
        letters = heard.between(round(start / emissions.frame), round(end / emissions.frame))
        if end - start >= HEARD_SECONDS and len(letters) >= HEARD_LETTERS:
            place = {"offset": round(start, 3), "duration": round(end - start, 3)}
            rows.append({**place, "heard": letters})
    return rows
