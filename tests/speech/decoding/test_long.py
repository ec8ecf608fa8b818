"""Cutting long recordings at silences, silent pieces, and windows joined by time; stitching by text
is tested with Whisper's decoding."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speech.decoding import long


def noise(samples: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


@given(samples=st.integers(1, 40_000), longest=st.floats(0.01, 2.0), seed=st.integers(0, 100))
def test_pieces_cover_the_waveform_and_none_is_too_long(samples, longest, seed):
    pieces = long.cut_at_silences(noise(samples, seed=seed), 8_000, longest)
    assert pieces[0][0] == 0 and pieces[-1][1] == samples
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert all(0 < end - start <= int(longest * 8_000) for start, end in pieces)
    assert all(end - start >= int(longest * 8_000) // 2 for start, end in pieces[:-1])


def test_cuts_lie_in_silence():
    """Words of 1 to 3 s with gaps of 0.4 s between them, over faint noise; within a word closures
    of 0.06 s, which are quieter still but no place to cut."""
    random, rate = np.random.default_rng(0), 16_000
    parts, silent = [], []
    for _ in range(25):
        word = noise(int(random.uniform(1, 3) * rate), seed=int(random.integers(1000)))
        closure = int(random.integers(2000, len(word) - 3000))
        word[closure : closure + 960] = 0
        gap = int(0.4 * rate)
        silent.append((sum(map(len, parts)) + len(word), sum(map(len, parts)) + len(word) + gap))
        parts += [word, 0.001 * noise(gap)]
    waveform = torch.cat(parts)
    pieces = long.cut_at_silences(waveform, rate, 10.0)
    assert len(pieces) > len(waveform) / rate / 10
    for _, cut in pieces[:-1]:
        assert any(start < cut < end for start, end in silent), cut / rate


@pytest.mark.parametrize("level", [0.0, 0.003])
def test_early_cuts_lie_in_the_first_pauses(level):
    """Words of 1 to 2 s with pauses of 0.35 s: every word is a piece, whether the pauses are
    digital silence or have noise."""
    random, rate = np.random.default_rng(0), 16_000
    parts, pauses = [], []
    for _ in range(20):
        parts.append(noise(int(random.uniform(1, 2) * rate), seed=int(random.integers(1000))))
        pauses.append(sum(map(len, parts)))
        parts.append(level * noise(int(0.35 * rate), seed=int(random.integers(1000))))
    pieces = long.BY_PAUSES.cut(torch.cat(parts[:-1]), rate, 4.0)
    assert len(pieces) == 20
    for (_, cut), start in zip(pieces, pauses[:-1], strict=False):
        assert start < cut < start + 0.35 * rate


def test_pieces_are_put_together_with_their_times():
    waveform = noise(50_000)
    pieces = long.BY_SILENCES.cut(waveform, 16_000, 1.0)
    texts = ["", *(f"t{i}" for i in range(1, len(pieces)))]
    joined = long.BY_SILENCES.join([{"text": text} for text in texts], pieces)
    assert joined.text == " ".join(texts[1:]) and joined.parts == {}
    assert joined.pieces == [(*piece, text) for piece, text in zip(pieces, texts, strict=True)]


def test_overlapping_pieces_and_stitching_go_together():
    pieces = long.BY_OVERLAP.cut(noise(50_000), 16_000, 2.0)
    assert pieces[0][1] > pieces[1][0]
    records = [{"text": "one two three four"}, {"text": "three four five"}]
    assert long.BY_OVERLAP.join(records, pieces[:2]).text == "one two three four five"


def test_silent_pieces_are_not_decoded_and_have_a_record_of_their_own():
    nothing, decoded = {"text": ""}, []

    def decode(waveforms, name):
        decoded.append([len(waveform) for waveform in waveforms])
        return [{"text": f"{name} {len(waveform)}", "words": []} for waveform in waveforms]

    records_of = long.unless_silent(decode, nothing)
    silence, faint = torch.zeros(5), torch.full((6,), -2 * long.SILENT)
    records = records_of([silence, noise(3), torch.zeros(0), silence + long.SILENT, faint], "a")
    audible = [{"text": "a 3", "words": []}, {"text": "a 6", "words": []}]
    assert records == [nothing, audible[0], nothing, nothing, audible[1]] and decoded == [[3, 6]]
    records[0].pop("text")  # of this record alone
    assert records[2:4] == [{"text": ""}] * 2 and nothing == {"text": ""}
    assert records_of([silence, torch.zeros(0)], "b") == [nothing] * 2 and len(decoded) == 1


# --- joined by time -------------------------------------------------------------------------------


@given(
    total=st.integers(0, 5000),
    longest=st.integers(40, 400),
    overlap=st.integers(0, 200),
    step=st.integers(1, 9),
)
def test_windows_begin_at_frames(total, longest, overlap, step):
    windows = long.overlapping_pieces(torch.zeros(total), 10, longest / 10, overlap / 10, step)
    assert windows[0][0] == 0 and windows[-1][1] == total
    assert all(0 <= b - a <= longest and a % step == 0 for a, b in windows)
    shared = min(overlap, (longest - step + 1) // 3)
    assert all(left[1] - right[0] == shared for left, right in itertools.pairwise(windows))


Word = tuple[str, float, float]  # text, start, end


def talk(random: np.random.Generator, vocabulary: int) -> list[Word]:
    words, now = [], 0.0
    for _ in range(int(random.integers(1, 400))):
        now += random.exponential(0.1) + (random.uniform(0.5, 9) if random.random() < 0.02 else 0)
        length = random.uniform(0.1, 0.6)
        words.append((f"w{random.integers(vocabulary)}", now, now + length))
        now += length
    return words


def heard(
    words: list[Word], window: tuple[float, float], random: np.random.Generator, unsure: float
) -> list[long.Unit]:
    """What a recogniser hears in a window: times differ a little. A word that is cut, and most of
    those that lie within `unsure` seconds of an edge, are read wrongly or not at all."""
    start, end = window
    units = []
    for text, a, b in words:
        if a >= end or b <= start:
            continue
        is_near = (start and a < start + unsure) or (b > end - unsure and end < words[-1][2])
        if a < start or b > end or (is_near and random.random() < 0.7):
            if random.random() < 0.3:
                continue
            text = str(random.choice(["xx", text[:1]]))
        time = (max(a, start) + min(b, end)) / 2 + random.uniform(-0.04, 0.04)
        units.append(long.Unit(text, time))
    return units


def joined(windows: list[list[long.Unit]], edges: list[tuple[float, float]]) -> list[long.Unit]:
    ranges = long.seams(windows, edges)
    kept = [units[a:b] for units, (a, b) in zip(windows, ranges, strict=True)]
    return list(itertools.chain.from_iterable(kept))


def edges_of(seconds: float, longest: float = 20.0) -> list[tuple[float, float]]:
    pieces = long.overlapping_pieces(torch.zeros(int(100 * seconds) + 1), 100, longest)
    return [(a / 100, b / 100) for a, b in pieces]


@pytest.mark.parametrize("vocabulary", [500, 20, 2])
@pytest.mark.parametrize("seed", range(25))
def test_no_word_is_lost_or_doubled_at_a_seam(seed, vocabulary):
    random = np.random.default_rng(seed)
    words = talk(random, vocabulary)
    edges = edges_of(words[-1][2])
    windows = [heard(words, edge, random, unsure=1.5) for edge in edges]
    assert [unit.key for unit in joined(windows, edges)] == [text for text, _, _ in words]


def test_a_word_at_the_seam_that_one_window_hears_otherwise_is_there_once():
    edges = [(0.0, 20.0), (15.0, 35.0)]
    for shift in (-0.2, 0.0, 0.2):
        left = [long.Unit(*each) for each in (("a", 16.0), ("Tuesd", 17.45), ("b", 18.2))]
        right = [long.Unit(*each) for each in (("a", 16.1), ("Tuesday", 17.45 + shift), ("b", 18))]
        keys = [unit.key for unit in joined([left, right], edges)]
        assert keys in (["a", "Tuesd", "b"], ["a", "Tuesday", "b"])


def test_a_seam_does_not_cut_a_word_in_two():
    """The pieces of one long word lie around the middle; each window reads it in its way."""
    edges = [(0.0, 20.0), (15.0, 35.0)]
    times = [16.0, 17.2, 17.4, 17.6, 18.5]
    begins = [True, True, False, False, True]
    left = [long.Unit(*each) for each in zip("abcde", times, begins, strict=True)]
    right = [long.Unit(*each) for each in zip("aBCDe", times, begins, strict=True)]
    text = "".join(unit.key for unit in joined([left, right], edges))
    assert text in ("abcde", "aBCDe")


def test_empty_windows_are_joined():
    edges = [(0.0, 20.0), (15.0, 35.0), (30.0, 50.0)]
    word = long.Unit("a", 17.0)
    assert joined([[], [], []], edges) == [] and long.seams([[]], edges[:1]) == [(0, 0)]
    assert joined([[word], [], []], edges) == [word]
    assert joined([[], [long.Unit("a", 18.0)], []], edges) == [long.Unit("a", 18.0)]
