"""Cutting long recordings at silences, and silent pieces; windows and stitching are tested with
Whisper's decoding."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speech import long


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
    """Words of 1 to 2 s with pauses of 0.35 s: every word is a piece, whether the pauses are digital
    silence or have noise."""
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


def test_what_is_short_enough_stays_whole():
    assert long.cut_at_silences(noise(16_000), 16_000, 1.0) == [(0, 16_000)]


def test_pieces_are_put_together_with_their_times():
    waveform = noise(50_000)
    pieces = long.BY_SILENCES.cut(waveform, 16_000, 1.0)
    texts = ["", *(f"t{i}" for i in range(1, len(pieces)))]
    whole, timed = long.BY_SILENCES.join(texts, pieces)
    assert whole == " ".join(texts[1:])
    assert timed == [(*piece, text) for piece, text in zip(pieces, texts, strict=True)]


def test_overlapping_pieces_and_stitching_go_together():
    pieces = long.BY_OVERLAP.cut(noise(50_000), 16_000, 2.0)
    assert pieces[0][1] > pieces[1][0]
    texts = ["one two three four", "three four five"]
    assert long.BY_OVERLAP.join(texts, pieces[:2])[0] == "one two three four five"


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
