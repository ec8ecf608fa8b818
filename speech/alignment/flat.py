"""A flat start: a recording and its text aligned without a model, by how long each sentence takes.

Between pauses are stretches of sound. Runs of stretches are matched with runs of pieces of the text
so that the seconds of a letter are as even as possible (Gale and Church 1993, who matched the
sentences of two languages by their lengths). The text must be read in its order."""

from dataclasses import dataclass

import numpy as np

from common.errors import DataError
from speech.alignment import cutting
from speech.alignment.cutting import Cuts
from speech.alignment.emissions import ENERGY_FRAME, Emissions
from speech.alignment.letters import is_letter
from speech.alignment.matching import Heard, Placed
from speech.alignment.sentences import Piece, join

# Levels of speech and of silence are those of each such part of the recording.
PART = 30.0  # seconds
QUIET, LOUD = 5, 90  # percentiles of its energy
SOFTEST_BELOW = 15.0  # dB: how much softer speech is in a part than in most of the recording
SMOOTHED = 5  # frames
SHORTEST_SOUND = 0.08  # seconds: shorter ones are clicks
STRETCHES = 12  # of a match, at most
PIECES = 3  # that are read without a pause between them, at most
BAND = 400  # pieces on both sides of where a recording that is even would be

# Prices in natural logarithms of a probability, like those of the seconds and the pauses.
JOINED = 3.0  # a piece that follows the one before it without a pause
NOT_READ = 6.0  # a piece
NOT_IN_TEXT = 6.0  # a stretch
PAUSE = 4.0  # of a pause's length, at most
# Of the seconds that a text takes: the spread as a share of them, and seconds beside it.
SPREAD = 0.25  # at first
SPREADS = (0.05, 0.3)  # later, at least and at most
SPREAD_SECONDS = 0.1
ROUNDS = 4  # with the rate, the spread and the pauses of the round before
NEIGHBOURS = 3  # on both sides, of the matches by which one is judged
LEAST = -0.15  # confidence of what is kept; where the text is in disorder, most has less
SLOWEST = 0.4  # seconds of a letter, or the text is that of a small part of the recording
FASTEST = 0.03  # seconds of a letter, or the recording is a small part of the text: 0.05 is hasty
UNMATCHED = 1.0  # what a neighbour that is not read, or not in the text, is counted as


@dataclass(frozen=True)
class Match:
    """The stretches `first` to `last` and the pieces `start` to `end`; one range may be empty."""

    first: int
    last: int
    start: int
    end: int

    @property
    def is_read(self) -> bool:
        return self.last > self.first and self.end > self.start


@dataclass(frozen=True)
class Reading:
    """What is known of a reading: the seconds of a letter, `rate`; their `spread` as a share; and
    `ends` (N,), by how much it is cheaper that no piece ends at the pause after each stretch."""

    rate: float
    spread: float
    ends: np.ndarray


def align(pieces: list[Piece], energy: np.ndarray) -> Cuts:
    """The utterances of a recording whose energy is given in dB for every ENERGY_FRAME: the half
    with the highest confidence, or less. It is minus the mean difference of their letters' seconds,
    and of those around them, from the usual: 0 is perfect, -0.1 is 10 %. Raises `DataError` for a
    text of another length."""
    sounding = stretches(energy)
    letters = np.array([sum(map(is_letter, piece.text)) for piece in pieces])
    matches, reading = match(sounding, letters)
    if reading.rate > SLOWEST:
        raise DataError(
            f"the text is too short: {reading.rate:.1f} s for a letter; give the whole text"
        )
    if len(sounding) and reading.rate < FASTEST:
        raise DataError(
            f"the text is too long: {reading.rate:.4f} s for a letter; give this recording's alone"
        )
    confidences = judge(matches, sounding, letters, reading.rate)
    read = [number for number, matched in enumerate(matches) if matched.is_read]
    least = max(LEAST, np.median([confidences[number] for number in read] or [0.0]))
    texts, placed = [], []
    for matched, confidence in zip(matches, confidences, strict=True):
        part = pieces[matched.start : matched.end]
        if not part:
            continue
        texts.append(Piece(join([piece.text for piece in part]), part[-1].is_end))
        if not matched.is_read:
            placed.append(None)
            continue
        start, end = sounding[matched.first, 0], sounding[matched.last - 1, 1]
        frames = [round(float(time) / ENERGY_FRAME) for time in (start, end)]
        count = int(letters[matched.start : matched.end].sum())
        # What is not certain is marked as an error from beginning to end.
        placed.append(Placed(*frames, confidence, float(confidence < least), count))
    nothing = np.zeros(0, np.int64)
    frames = np.zeros(len(energy))
    recording = Emissions(frames[:, None], {}, frames, frames, ENERGY_FRAME, energy)
    # Sentences are not joined: a model from scratch learns to hear from short utterances first.
    cuts = cutting.cut(texts, placed, recording, Heard(nothing, nothing), joins=False)
    for row in cuts.utterances:
        del row["error_rate"]  # no letters were heard
    return cuts


# --- stretches of sound ---------------------------------------------------------------------------


def stretches(energy: np.ndarray) -> np.ndarray:
    """(N, 2) where sound begins and ends between pauses, in seconds."""
    padded = np.pad(energy, SMOOTHED // 2, mode="edge")
    smooth = np.convolve(padded, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")
    least = np.percentile(smooth, LOUD) - SOFTEST_BELOW
    parts = max(1, round(len(energy) * ENERGY_FRAME / PART))
    is_sound = [_is_sound(part, least) for part in np.array_split(smooth, parts)]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], *is_sound, [False]])))
    times = edges.reshape(-1, 2) * ENERGY_FRAME
    times = times[times[:, 1] - times[:, 0] >= SHORTEST_SOUND]
    is_pause = times[1:, 0] - times[:-1, 1] >= cutting.PAUSE
    starts = times[np.append(len(times) > 0, is_pause)[: len(times)], 0]
    ends = times[np.append(is_pause, True)[: len(times)], 1]
    return np.stack([starts, ends], axis=1)


def _is_sound(energy: np.ndarray, least: float) -> np.ndarray:
    """Whether a frame is louder than silence, if speech here has the level `least` or more."""
    floor, speech = np.percentile(energy, [QUIET, LOUD])
    speech = max(speech, least)
    threshold = floor + cutting.LOUDNESS * (speech - floor)
    return energy > max(threshold, speech - cutting.NOISE_BELOW)


# --- matching -------------------------------------------------------------------------------------


def match(sounding: np.ndarray, letters: np.ndarray) -> tuple[list[Match], Reading]:
    """The best matches of stretches (N, 2) and pieces of `letters` (M,), and their reading."""
    seconds = sounding[:, 1] - sounding[:, 0]
    pauses = np.append(sounding[1:, 0] - sounding[:-1, 1], np.inf)[: len(sounding)]
    longest = np.argsort(-pauses)[: len(letters)]
    is_end = np.isin(np.arange(len(pauses)), longest)
    rate = seconds.sum() / max(1, letters.sum())
    reading = Reading(rate, SPREAD, _price_of_ends(pauses, is_end))
    for _ in range(ROUNDS):
        matches = best_matches(seconds, letters, reading)
        reading = _reading(matches, seconds, pauses, letters) or reading
    return matches, reading


def _reading(
    matches: list[Match], seconds: np.ndarray, pauses: np.ndarray, letters: np.ndarray
) -> Reading | None:
    """What the matches show, None if there are none."""
    read = [matched for matched in matches if matched.is_read]
    if not read:
        return None
    rates = _rates(read, seconds, letters)
    rate = float(np.median(rates))
    spread = 1.48 * float(np.median(np.abs(np.log(rates / rate))))  # a normal one's deviation
    is_end = np.zeros(len(pauses), bool)
    is_end[[matched.last - 1 for matched in matches if matched.last > matched.first]] = True
    return Reading(rate, float(np.clip(spread, *SPREADS)), _price_of_ends(pauses, is_end))


def _rates(matches: list[Match], seconds: np.ndarray, letters: np.ndarray) -> np.ndarray:
    """The seconds of a letter in each match."""
    sound, text = _sums(seconds), _sums(letters)
    places = np.array(
        [(matched.first, matched.last, matched.start, matched.end) for matched in matches]
    ).T
    return (sound[places[1]] - sound[places[0]]) / (text[places[3]] - text[places[2]])


def _sums(values: np.ndarray) -> np.ndarray:
    return np.append(0.0, np.cumsum(values))


def _price_of_ends(pauses: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """(N,) the logarithm of how much likelier each pause is within a piece than at its end, if the
    logarithms of both kinds are normal and have one variance."""
    logs = np.log(pauses)
    known = np.isfinite(logs)
    ends, others = logs[is_end & known], logs[~is_end & known]
    if not len(ends) or not len(others):
        return np.zeros(len(pauses))
    variance = np.concatenate([ends - ends.mean(), others - others.mean()]).var() + 1e-3
    slope = (ends.mean() - others.mean()) / variance
    middle = (ends.mean() + others.mean()) / 2
    price = np.where(known, slope * (middle - np.where(known, logs, 0.0)), -PAUSE)
    return price.clip(-PAUSE, PAUSE)


def best_matches(seconds: np.ndarray, letters: np.ndarray, reading: Reading) -> list[Match]:
    """The matches of stretches of so many `seconds` (N,) and pieces of so many `letters` (M,) with
    the least price, by dynamic programming within BAND."""
    size, width = len(seconds), len(letters)
    if not size:
        return [Match(0, 0, piece, piece + 1) for piece in range(width)]
    prices = [_Prices(letters, count, reading) for count in range(1, PIECES + 1)]
    sound = _sums(seconds)
    centres = np.rint(sound / max(sound[-1], 1e-9) * width).astype(int)
    lows = np.maximum(centres - BAND, 0)
    highs = np.minimum(centres + BAND, width) + 1
    lows[1:] = np.minimum(lows[1:], highs[:-1] - 1)  # after a stretch that is very long
    # The least price of each of the last rows; PIECES columns before the first are never reached.
    best = np.full((STRETCHES + 1, PIECES + width + 1), np.inf)
    unread = NOT_READ * np.arange(width + 1)
    best[0, PIECES : PIECES + highs[0]] = unread[: highs[0]]
    steps = [np.full(highs[0], _step(0, 1), np.uint8)]
    for row in range(1, size + 1):
        low, high = lows[row], highs[row]
        counts = np.arange(1, min(STRETCHES, row) + 1)
        before = best[(row - counts) % len(best)]
        columns = slice(PIECES + low, PIECES + high)
        least = before[0, columns] + NOT_IN_TEXT
        chosen = np.full(high - low, _step(1, 0), np.uint8)
        times = (sound[row] - sound[row - counts])[:, None]
        for count, price in enumerate(prices, start=1):
            moved = before[:, PIECES + low - count : PIECES + high - count]
            totals = moved + price.of(times, slice(low, high))
            index = totals.argmin(axis=0)
            total = totals[index, np.arange(high - low)]
            is_better = total < least
            least = np.where(is_better, total, least)
            chosen = np.where(is_better, _step(1 + index, count), chosen)
        least += reading.ends[row - 1]
        # A piece that is not read: the price of the best column before, and of those between.
        after = np.minimum.accumulate(least - unread[low:high]) + unread[low:high]
        steps.append(np.where(after < least - 1e-9, _step(0, 1), chosen).astype(np.uint8))
        best[row % len(best)] = np.inf
        best[row % len(best), columns] = after
    return _traced(steps, lows, size, width)


class _Prices:
    """The price of reading `count` pieces together that end before each column."""

    def __init__(self, letters: np.ndarray, count: int, reading: Reading):
        text = _sums(letters)
        before = np.concatenate([np.zeros(count), text[: max(0, len(text) - count)]])[: len(text)]
        self.expected = (text - before) * reading.rate
        variance = (reading.spread * self.expected) ** 2 + SPREAD_SECONDS**2
        self.precision = 0.5 / variance
        self.constant = 0.5 * np.log(2 * np.pi * variance) + (count - 1) * JOINED

    def of(self, seconds: np.ndarray, columns: slice) -> np.ndarray:
        """(A, W) of so many `seconds` (A, 1) for some columns."""
        difference = seconds - self.expected[columns]
        return difference**2 * self.precision[columns] + self.constant[columns]


def _step(stretches, pieces: int):
    """A step of the path as one number."""
    return stretches * (PIECES + 1) + pieces


def _traced(steps: list[np.ndarray], lows: np.ndarray, row: int, column: int) -> list[Match]:
    """The path that ends in the last row and column."""
    matches = []
    while row or column:
        stretch, piece = divmod(int(steps[row][column - lows[row]]), PIECES + 1)
        matches.append(Match(row - stretch, row, column - piece, column))
        row -= stretch
        column -= piece
    return matches[::-1]


def judge(
    matches: list[Match], sounding: np.ndarray, letters: np.ndarray, rate: float
) -> list[float]:
    """The confidence of each match."""
    seconds = sounding[:, 1] - sounding[:, 0]
    uneven = np.full(len(matches), UNMATCHED)
    read = [number for number, each in enumerate(matches) if each.is_read]
    if read:
        rates = _rates([matches[number] for number in read], seconds, letters)
        uneven[read] = np.abs(np.log(rates / rate))
    sums = _sums(uneven)
    places = np.arange(len(matches))
    first = np.maximum(places - NEIGHBOURS, 0)
    last = np.minimum(places + NEIGHBOURS + 1, len(matches))
    return (-(sums[last] - sums[first]) / (last - first)).tolist()
