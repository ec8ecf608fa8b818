"""Long recordings: cut at silences, or into overlapping pieces that are joined by the times of what
was recognised, or by their texts where there are no times."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from speech.signal.audio import SAMPLE_RATE

SILENCE_FRAME = 0.02  # seconds: resolution of cuts at silences
# Seconds. A model that was trained on shorter clips has never heard a pause between sentences, nor
# as many words as fit into its longest clip, so its pieces end at the first pause.
SHORT_CLIPS = 10.0
SHORTEST_SHARE = 1 / 4  # of the longest piece, before the first pause
PAUSE = 20.0  # energy: a pause is at most so many times as loud as the quietest place
OVERLAP = 5.0  # seconds shared by neighbouring pieces
# Peak amplitude, three steps of 16 bits: digital silence, in which Whisper hallucinates.
SILENT = 1e-4
# Joining by time, in seconds: how far apart two windows may hear the same; by how much a seam that
# cuts a word in two is worse than one further from the middle, and one between what they hear
# differently.
SAME_TIME = 0.5
WITHIN_WORD = 2.0
UNSURE = 1.0
SKIPPED = 0.7  # cost of a unit that one window alone hears; of one that they hear differently: 1
# Weights of characters, see `_overlap`.
OFF_PLACE = 0.1
MORE_EVIDENCE = 0.09
UNMATCHED = 0.1
# Characters: if words are longer on average, the language is written without spaces.
LONG_WORDS = 15

PARTS = ("words", "segments")  # of a record, with times

Piece = tuple[int, int]  # (start, end), samples
TimedText = tuple[int, int, str]  # (start, end, text), samples
Aligned = tuple[int | None, int | None]  # places in two lists; None: the other list alone has it


@dataclass(frozen=True)
class Unit:
    """A unit that is joined by time: `key` is equal for equal ones, `time` is in seconds of the
    recording, and `begins` says whether a word begins with it."""

    key: object
    time: float
    begins: bool = True


@dataclass(frozen=True)
class JoinedTexts:
    """A recording's text, its pieces' shares of it, and its timed parts as in records."""

    text: str
    pieces: list[TimedText]
    parts: dict[str, list[dict]]


def cut_at_silences(
    waveform: Tensor, sample_rate: int, max_seconds: float, early: bool = False
) -> list[Piece]:
    """Pieces of (T,) of at most `max_seconds`. Each ends at the quietest place of the second half
    of the longest piece that is possible, with `early` at the first pause after a quarter."""
    limit = int(max_seconds * sample_rate)
    frame = min(round(SILENCE_FRAME * sample_rate), limit // 2)
    pieces = []
    start = 0
    while len(waveform) - start > limit:
        first = start + int(limit * (SHORTEST_SHARE if early else 0.5))
        span = waveform[first : start + limit]
        span = span[: len(span) // frame * frame].reshape(-1, frame)
        energy = span.square().mean(1)[None, None]
        # Smoothed over 0.2 s, so that gaps between words win over the closures of plosives.
        energy = nn.functional.avg_pool1d(energy, 11, 1, 5, count_include_pad=False)[0, 0]
        quietest = int(energy.argmin())
        if early:
            quietest = int((energy <= max(PAUSE * float(energy.min()), SILENT**2)).int().argmax())
        cut = first + quietest * frame + frame // 2
        pieces.append((start, cut))
        start = cut
    pieces.append((start, len(waveform)))
    return pieces


def put_together(texts: list[str], pieces: list[Piece]) -> tuple[str, list[TimedText]]:
    """The text of pieces that do not overlap, and the same with their times."""
    timed = [(start, end, text) for (start, end), text in zip(pieces, texts, strict=True)]
    return " ".join(text for text in texts if text), timed


def overlapping_pieces(
    waveform: Tensor, sample_rate: int, max_seconds: float, overlap: float = OVERLAP, step: int = 1
) -> list[Piece]:
    """Pieces of (T,), each at most `max_seconds`, as equal as possible. Neighbours share `overlap`
    seconds, at most a third of `max_seconds`. They begin at multiples of `step`."""
    limit = int(max_seconds * sample_rate)
    total = len(waveform)
    if total <= limit:
        return [(0, total)]
    limit -= step - 1  # a start moves by less than a step
    shared = min(int(overlap * sample_rate), limit // 3)
    count = -(-(total - shared) // (limit - shared))
    edges = [round((total - shared) * i / count) // step * step for i in range(count)]
    edges.append(total - shared)
    return [(start, end + shared) for start, end in itertools.pairwise(edges)]


def seams(windows: list[list[Unit]], edges: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """The range of each window's units that the recording's consist of, for overlapping windows
    with these (start, end) in seconds.

    Units of an overlap come from the window in whose middle they lie: the seam is in the middle of
    the overlap. Times differ a little between windows, so both windows' units are aligned first,
    and the seam goes between two aligned units: none is doubled or lost. It moves away from the
    middle if it would cut a word or touch only what the windows hear differently."""
    firsts, lasts = [0], []
    for left, right, (start, _), (_, end) in zip(
        windows, windows[1:], edges[1:], edges, strict=False
    ):
        keep, drop = _seam(left, right, start, end)
        lasts.append(keep)
        firsts.append(drop)
    lasts.append(len(windows[-1]))
    return list(zip(firsts, lasts, strict=True))


def _seam(left: list[Unit], right: list[Unit], start: float, end: float) -> tuple[int, int]:
    """How many units of `left` to keep and of `right` to drop, sharing `start` to `end`."""
    before = sum(unit.time < start - SAME_TIME for unit in left)
    left = left[before:]
    aligned = _align(left, [unit for unit in right if unit.time <= end + SAME_TIME])
    middle = (start + end) / 2
    times = [-math.inf]
    same = [False]
    for i, j in aligned:
        found = [left[i].time] if i is not None else []
        found += [right[j].time] if j is not None else []
        times.append(sum(found) / len(found))
        same.append(len(found) == 2 and left[i].key == right[j].key)
    times.append(math.inf)
    same.append(False)
    best = (math.inf, 0, 0)
    keep = drop = 0
    for place in range(len(aligned) + 1):
        whole = _ends_word(left, keep) and (drop == len(right) or right[drop].begins)
        cost = max(0.0, times[place] - middle, middle - times[place + 1])
        cost += (not whole) * WITHIN_WORD
        cost += (bool(aligned) and not (same[place] or same[place + 1])) * UNSURE
        best = min(best, (cost, keep, drop))
        if place < len(aligned):
            keep += aligned[place][0] is not None
            drop += aligned[place][1] is not None
    return before + best[1], best[2]


def _ends_word(units: list[Unit], count: int) -> bool:
    """Whether the first `count` units end with a whole word: before a word or a pause."""
    if count == len(units) or units[count].begins:
        return True
    return count > 0 and units[count].time - units[count - 1].time > SAME_TIME


def _align(left: list[Unit], right: list[Unit]) -> list[Aligned]:
    """Pairs of places, in order, at the least cost: SKIPPED for a unit that has no partner, 1 for
    partners with different keys, and up to 1 / 2 for their distance in time."""
    costs = [[SKIPPED * j for j in range(len(right) + 1)]]
    moves: list[list[int]] = []  # 0: partners; 1: left alone; 2: right alone
    for i, a in enumerate(left):
        row = [SKIPPED * (i + 1)]
        chosen = []
        for j, b in enumerate(right):
            distance = abs(a.time - b.time) / SAME_TIME
            pair = math.inf if distance > 1 else costs[i][j] + distance / 2 + (a.key != b.key)
            choices = (pair, costs[i][j + 1] + SKIPPED, row[j] + SKIPPED)
            chosen.append(min(range(3), key=choices.__getitem__))
            row.append(choices[chosen[-1]])
        costs.append(row)
        moves.append(chosen)
    aligned: list[Aligned] = []
    i, j = len(left), len(right)
    while i or j:
        move = moves[i - 1][j - 1] if i and j else 2 if j else 1
        i -= move != 2
        j -= move != 1
        aligned.append((i if move != 2 else None, j if move != 1 else None))
    return aligned[::-1]


def stitch(texts: list[str], pieces: list[Piece]) -> tuple[str, list[TimedText]]:
    """One text from those of overlapping pieces, and each piece's own part of it.

    The change from one piece to the next is in the middle of the longest run of words that both
    contain about where they overlap. Without such a run nothing is dropped. Words, or characters of
    a language without spaces, are compared without case and punctuation."""
    texts = [" ".join(text.split()) for text in texts]
    characters = sum(len(text) for text in texts)
    words = sum(len(text.split()) for text in texts)
    by_word = characters <= LONG_WORDS * words
    units = [text.split() if by_word else list(text) for text in texts]
    sizes = [sum(len(unit) + by_word for unit in piece) for piece in units]  # characters
    parts = [list(piece) for piece in units]
    edges = [pieces[0][0]]
    for i in range(1, len(pieces)):
        left_start, left_end = pieces[i - 1]
        right_start, right_end = pieces[i]
        shared = max(0, left_end - right_start)
        left_rate = sizes[i - 1] / max(1, left_end - left_start)
        right_rate = sizes[i] / max(1, right_end - right_start)
        expected = shared * (left_rate + right_rate) / 2
        keep, drop, share = _overlap(parts[i - 1], parts[i], expected, by_word)
        parts[i - 1] = parts[i - 1][:keep]
        parts[i] = parts[i][drop:]
        edges.append(right_start + round(shared * share))
    edges.append(pieces[-1][1])
    space = " " if by_word else ""
    timed = [
        (start, end, space.join(part).strip())
        for (start, end), part in zip(itertools.pairwise(edges), parts, strict=True)
    ]
    return space.join(unit for part in parts for unit in part).strip(), timed


def _overlap(
    left: list[str], right: list[str], expected: float, by_word: bool
) -> tuple[int, int, float]:
    """How many units of `left` to keep and of `right` to drop, and the share of the overlap there.

    Each run of equal units aligns the two texts, and so says how many characters they share. Its
    score is its length in characters, minus OFF_PLACE for each character by which the shared number
    differs from the `expected` one, minus UNMATCHED for each shared character that is not in the
    run. Characters of the run beyond the `expected` number count MORE_EVIDENCE only, so that the
    likeliest of the many alignments of "CQ CQ CQ CQ" wins. A run with a negative score is a
    coincidence."""
    left_keys = [_key(unit) for unit in left]
    right_keys = [_key(unit) for unit in right]
    # Characters before each unit.
    left_ends = np.cumsum([0, *(len(unit) + by_word for unit in left)])
    right_ends = np.cumsum([0, *(len(unit) + by_word for unit in right)])
    best = (0.0, 0)
    result = (len(left), 0, 0.5)
    # runs[j + 1]: length of the run that ends at left[i] and right[j]
    runs = [0] * (len(right) + 1)
    for i, left_key in enumerate(left_keys):
        previous = runs
        runs = [0] * (len(right) + 1)
        for j, right_key in enumerate(right_keys):
            if left_key != right_key:
                continue
            run = previous[j] + 1
            runs[j + 1] = run
            length = int(right_ends[j + 1] - right_ends[j + 1 - run])
            shared = int(right_ends[j + 1] + left_ends[-1] - left_ends[i + 1])
            score = min(length, expected) + MORE_EVIDENCE * max(0.0, length - expected)
            score -= OFF_PLACE * abs(shared - expected) + UNMATCHED * (shared - length)
            if (score, length) > best:
                best = (score, length)
                half = run // 2
                drop = j + 1 - half
                result = (i + 1 - half, drop, float(right_ends[drop]) / shared)
    return result


def _key(unit: str) -> str:
    return "".join(character for character in unit.casefold() if character.isalnum()) or unit


def unless_silent(decode: Callable[..., list[dict]], nothing: dict) -> Callable[..., list[dict]]:
    """`decode(waveforms, ...)` that returns a copy of `nothing` for digital silence."""

    def records_of(waveforms: list[Tensor], *rest) -> list[dict]:
        audible = [
            len(waveform) > 0 and float(waveform.abs().max()) > SILENT for waveform in waveforms
        ]
        chosen = list(itertools.compress(waveforms, audible))
        records = iter(decode(chosen, *rest) if chosen else [])
        return [next(records) if is_audible else dict(nothing) for is_audible in audible]

    return records_of


def moved(records: list[dict], pieces: list[Piece]) -> dict[str, list[dict]]:
    """The timed parts in the records of a recording's pieces, with times in the recording."""
    whole: dict[str, list[dict]] = {}
    for record, (begin, _) in zip(records, pieces, strict=True):
        shift = begin / SAMPLE_RATE
        for name, parts in record.items():
            if name not in PARTS:
                continue
            shifted = whole.setdefault(name, [])
            for part in parts:
                start = round(part["start"] + shift, 3)
                end = round(part["end"] + shift, 3)
                shifted.append({**part, "start": start, "end": end})
    return whole


def by_text(
    join: Callable[[list[str], list[Piece]], tuple[str, list[TimedText]]],
) -> Callable[[list[dict], list[Piece]], JoinedTexts]:
    """Joins records by their texts; their timed parts follow each other."""

    def joined(records: list[dict], pieces: list[Piece]) -> JoinedTexts:
        text, timed = join([record["text"] for record in records], pieces)
        return JoinedTexts(text, timed, moved(records, pieces))

    return joined


@dataclass(frozen=True)
class Cutting:
    """A way to decode long recordings: `cut(waveform, sample_rate, max_seconds)` returns pieces,
    and `join(records, pieces)` what the records of the pieces say together."""

    cut: Callable[[Tensor, int, float], list[Piece]]
    join: Callable[[list[dict], list[Piece]], JoinedTexts]


BY_SILENCES = Cutting(cut_at_silences, by_text(put_together))
BY_PAUSES = Cutting(functools.partial(cut_at_silences, early=True), by_text(put_together))
BY_OVERLAP = Cutting(overlapping_pieces, by_text(stitch))


def by_length(longest: float, otherwise: Cutting = BY_SILENCES) -> Cutting:
    """How recordings are cut for a model of speech that has heard at most so many seconds:
    `otherwise`, unless these are short clips."""
    return BY_PAUSES if longest < SHORT_CLIPS else otherwise
