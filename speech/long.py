"""Long recordings: cut at silences, or read in overlapping windows whose texts are stitched."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

SILENCE_FRAME = 0.02  # seconds: the resolution at which long files are cut


OVERLAP = 5.0  # seconds shared by neighbouring windows of a long recording
SILENT = 1e-4  # peak amplitude, three steps of 16 bits: digital silence, in which Whisper imagines words
OFF_PLACE, MORE_EVIDENCE, UNMATCHED = 0.1, 0.09, 0.1  # weights of characters, see _overlap
LONG_WORDS = 15  # characters: where words are longer on average, the language writes no spaces


Piece = tuple[int, int]  # start and end, in samples


def put_together(texts: list[str], pieces: list[Piece]) -> tuple[str, list[tuple[int, int, str]]]:
    """The text of pieces that do not overlap, and (start, end, text) of each."""
    return " ".join(filter(None, texts)), [(a, b, text) for (a, b), text in zip(pieces, texts, strict=True)]


def cut_at_silences(waveform: torch.Tensor, sample_rate: int, longest: float) -> list[tuple[int, int]]:
    """(start, end) samples of pieces of (T,), each at most `longest` seconds, cut where it is quietest in the second
    half of each piece."""
    limit = int(longest * sample_rate)
    frame = min(round(SILENCE_FRAME * sample_rate), limit // 2)
    pieces, start = [], 0
    while len(waveform) - start > limit:
        span = waveform[start + limit // 2 : start + limit]
        span = span[: len(span) // frame * frame].reshape(-1, frame)
        # Smoothed over 0.2 s, so that the gap between words wins over a plosive's closure.
        energy = nn.functional.avg_pool1d(span.square().mean(1)[None, None], 11, 1, 5, count_include_pad=False)[0, 0]
        cut = start + limit // 2 + (int(energy.argmin()) * frame + frame // 2)
        pieces.append((start, cut))
        start = cut
    return [*pieces, (start, len(waveform))]


def overlapping_windows(
    waveform: torch.Tensor, sample_rate: int, longest: float, overlap: float = OVERLAP
) -> list[tuple[int, int]]:
    """(start, end) samples of windows over (T,), each at most `longest` seconds, as equal as can be, neighbours sharing
    `overlap` seconds (at most a third of `longest`)."""
    limit = int(longest * sample_rate)
    shared = min(int(overlap * sample_rate), limit // 3)
    total = len(waveform)
    count = max(1, -(-(total - shared) // (limit - shared)))
    edges = [round((total - shared) * i / count) for i in range(count + 1)]
    return [(a, b + shared if count > 1 else total) for a, b in itertools.pairwise(edges)]


def unless_silent(decode: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`decode(waveforms, ...)`, which is asked for those that are more than digital silence only; these have no text."""

    def texts_of(waveforms: list[torch.Tensor], *rest) -> list[str]:
        heard = [len(w) > 0 and float(w.abs().max()) > SILENT for w in waveforms]
        texts = iter(
            decode([w for w, audible in zip(waveforms, heard, strict=True) if audible], *rest) if any(heard) else []
        )
        return [next(texts) if audible else "" for audible in heard]

    return texts_of


def stitch(texts: list[str], windows: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int, str]]]:
    """One text from those of overlapping `windows` (start, end), and each window's part in it, (start, end, text), which
    do not overlap. Neighbours change over in the middle of the longest run of words that both have and that lies
    about where the overlap should be; where there is none, nothing is dropped. Words are compared without case and
    punctuation; languages that write no spaces are compared by characters."""
    texts = [" ".join(text.split()) for text in texts]
    letters, words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
    by_word = letters <= LONG_WORDS * words
    units = [text.split() if by_word else list(text) for text in texts]
    parts, cuts = [list(part) for part in units], [windows[0][0]]
    for number in range(1, len(windows)):
        (before, last), (first, after) = windows[number - 1 : number + 1]
        shared = max(0, last - first)
        sizes = [sum(len(unit) + by_word for unit in units[n]) for n in (number - 1, number)]
        expected = shared * (sizes[0] / max(1, last - before) + sizes[1] / max(1, after - first)) / 2
        keep, drop, share = _overlap(parts[number - 1], parts[number], expected, by_word)
        parts[number - 1], parts[number] = parts[number - 1][:keep], parts[number][drop:]
        cuts.append(first + round(shared * share))
    cuts.append(windows[-1][1])
    space = " " if by_word else ""
    joined = [space.join(part).strip() for part in parts]
    rows = list(zip(cuts[:-1], cuts[1:], joined, strict=True))
    return space.join(unit for part in parts for unit in part).strip(), rows


def _overlap(left: list[str], right: list[str], expected: float, by_word: bool) -> tuple[int, int, float]:
    """How many units of `left` to keep, how many of `right` to drop, and at what share of the overlap that is.

    Each run of equal units aligns the two texts, and says how many characters they share. Its score is its length, of
    which only the `expected` number counts in full, so that of the many alignments of "CQ CQ CQ CQ" the likeliest wins;
    less OFF_PLACE for each character that the texts share more or fewer than `expected`, and UNMATCHED for each of
    those that are not in the run. What scores below 0 is chance."""
    a, b = [_key(unit) for unit in left], [_key(unit) for unit in right]
    before = np.cumsum([0, *(len(unit) + by_word for unit in right)])  # characters
    behind = np.cumsum([0, *(len(unit) + by_word for unit in left)])
    best, result = (0.0, 0), (len(left), 0, 0.5)
    runs = [0] * (len(b) + 1)
    for i, unit in enumerate(a):
        previous, runs = runs, [0] * (len(b) + 1)
        for j, other in enumerate(b):
            if unit != other:
                continue
            runs[j + 1] = run = previous[j] + 1
            length = int(before[j + 1] - before[j + 1 - run])
            shared = int(before[j + 1] + behind[-1] - behind[i + 1])
            score = min(length, expected) + MORE_EVIDENCE * max(0.0, length - expected)
            score -= OFF_PLACE * abs(shared - expected) + UNMATCHED * (shared - length)
            if (score, length) > best:
                best, half = (score, length), run // 2
                drop = j + 1 - half
                result = (i + 1 - half, drop, float(before[drop]) / shared)
    return result


def _key(unit: str) -> str:
    return "".join(character for character in unit.casefold() if character.isalnum()) or unit
