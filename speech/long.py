"""Long recordings: cut at silences, or into overlapping pieces whose texts are stitched
together."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

SILENCE_FRAME = 0.02  # seconds: resolution of cuts at silences
# Seconds. A model that was trained on shorter clips has never heard a pause between sentences, nor as
# many words as fit into its longest clip, so its pieces end at the first pause.
SHORT_CLIPS = 10.0
SHORTEST_SHARE = 1 / 6  # of the longest piece, before the first pause
PAUSE = 10.0  # energy: a pause is at most so many times as loud as the quietest place
OVERLAP = 5.0  # seconds shared by neighbouring pieces
# Peak amplitude, three steps of 16 bits: digital silence, in which Whisper hallucinates.
SILENT = 1e-4
# Weights of characters, see `_overlap`.
OFF_PLACE = 0.1
MORE_EVIDENCE = 0.09
UNMATCHED = 0.1
# Characters: if words are longer on average, the language is written without spaces.
LONG_WORDS = 15

Piece = tuple[int, int]  # (start, end), samples
TimedText = tuple[int, int, str]  # (start, end, text), samples


def cut_at_silences(
    waveform: torch.Tensor, sample_rate: int, max_seconds: float, early: bool = False
) -> list[Piece]:
    """Pieces of (T,) of at most `max_seconds`. Each ends at the quietest place of the second half
    of the longest piece that is possible, or with `early` at the first pause after a sixth of
    it."""
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
    waveform: torch.Tensor, sample_rate: int, max_seconds: float, overlap: float = OVERLAP
) -> list[Piece]:
    """Pieces of (T,), each at most `max_seconds`, as equal as possible. Neighbours share
    `overlap` seconds, at most a third of `max_seconds`."""
    limit = int(max_seconds * sample_rate)
    shared = min(int(overlap * sample_rate), limit // 3)
    total = len(waveform)
    count = max(1, -(-(total - shared) // (limit - shared)))
    if count == 1:
        return [(0, total)]
    edges = [round((total - shared) * i / count) for i in range(count + 1)]
    return [(start, end + shared) for start, end in itertools.pairwise(edges)]


def stitch(texts: list[str], pieces: list[Piece]) -> tuple[str, list[TimedText]]:
    """One text from those of overlapping pieces, and each piece's part of it; the parts do not
    overlap.

    The change from one piece to the next is in the middle of the longest run of words that both
    contain about where they overlap. Without such a run nothing is dropped. Words are compared
    without case and punctuation, characters instead of words if the language is written without
    spaces."""
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
    """How many units of `left` to keep, how many of `right` to drop, and the share of the overlap
    at that point.

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
    """`decode(waveforms, ...)` that returns a copy of `nothing` for digital silence without
    decoding it."""

    def records_of(waveforms: list[torch.Tensor], *rest) -> list[dict]:
        audible = [
            len(waveform) > 0 and float(waveform.abs().max()) > SILENT for waveform in waveforms
        ]
        chosen = list(itertools.compress(waveforms, audible))
        records = iter(decode(chosen, *rest) if chosen else [])
        return [next(records) if is_audible else dict(nothing) for is_audible in audible]

    return records_of


@dataclass(frozen=True)
class Cutting:
    """A way to decode long recordings: `cut(waveform, sample_rate, max_seconds)` returns pieces,
    and `join(texts, pieces)` the whole text and its parts with their times."""

    cut: Callable[[torch.Tensor, int, float], list[Piece]]
    join: Callable[[list[str], list[Piece]], tuple[str, list[TimedText]]]


BY_SILENCES = Cutting(cut_at_silences, put_together)
BY_PAUSES = Cutting(functools.partial(cut_at_silences, early=True), put_together)
BY_OVERLAP = Cutting(overlapping_pieces, stitch)


def by_length(longest: float) -> Cutting:
    """How recordings are cut for a model of speech that has heard at most so many seconds."""
    return BY_PAUSES if longest < SHORT_CLIPS else BY_SILENCES
