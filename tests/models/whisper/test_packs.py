"""PackedUtterances of several utterances: where they are, what is heard, and what is drawn."""

import functools
import math
import pickle

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.whisper import packs
from models.whisper.packs import Packs
from speech.data.columns import Codes, Corpus, Strings
from speech.signal.audio import SAMPLE_RATE, speed_factors

LONGEST = 30.0
ROOM = 100


def make_corpus(rows: list[tuple[str, float, float, str]]) -> Corpus:
    """Of (path, offset, seconds, speaker), without audio."""
    paths, offsets, seconds, speakers = zip(*rows, strict=True)
    return Corpus(
        paths=Strings(paths),
        texts=Strings(f"text {number}" for number in range(len(rows))),
        seconds=np.array(seconds),
        offsets=np.array(offsets),
        durations=np.array(seconds),
        speakers=Codes(speakers),
        languages=Codes([""] * len(rows)),
        lines=np.arange(1, len(rows) + 1),
    )


def shuffled(seed: int) -> Corpus:
    """Recordings with pauses, long gaps and overlaps, single files, speakers with few and with many
    utterances, in any order."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(int(random.integers(1, 12))):
        speaker = f"speaker {random.integers(4)}"
        begin = 0.0
        for _ in range(int(random.integers(1, 25))):
            begin = max(0.0, begin + random.choice([0.0, 0.5, 3.0, 9.0, -2.0, -0.02]))
            seconds = float(random.choice([0.1, 1.0, 2.3, 7.0, 29.0, 30.0]))
            rows.append((f"{number}.wav", begin, seconds, speaker))
            begin += seconds
    rows += [(f"single {number}.wav", 0.0, 2.0, "alone") for number in range(3)]
    return make_corpus([rows[row] for row in random.permutation(len(rows))])


def make_packs(corpus: Corpus, share: float = 0.5, seed: int = 1, fast: bool = False) -> Packs:
    tokens = np.random.default_rng(0).integers(1, ROOM // 2, len(corpus))
    speeds = None
    if fast:
        speeds = functools.partial(speed_factors, seed, count=len(corpus), factors=(0.9, 1.0, 1.1))
    return Packs(corpus, tokens, share, seed, LONGEST, ROOM, speeds)


@given(st.integers(0, 10_000), st.booleans())
def test_a_window_is_within_its_limits(seed, fast):
    corpus = shuffled(seed)
    data = make_packs(corpus, fast=fast)
    lengths, tokens = data.seconds(2), data.layout(2).tokens
    for index in range(len(data)):
        pack = data.pack(index, 2)
        assert pack.rows[0] == index and len(set(pack.rows)) == len(pack.rows)
        assert pack.seconds / pack.speed == pytest.approx(lengths[index])
        assert lengths[index] <= LONGEST + 1e-6
        assert pack.timed or not pack.cut
        times = [0.0, *(time for span in pack.spans for time in span)]
        assert times[1] <= packs.LONGEST_LEAD and times == sorted(times)
        for row, (start, end) in zip(pack.rows, pack.spans, strict=True):
            assert end - start == pytest.approx(corpus.seconds[row], abs=packs.OVERLAP + 1e-6)
        heard = pack.spans[: len(pack.spans) - pack.cut]
        assert heard[-1][1] <= pack.seconds + 1e-6
        assert not {*pack.before} & {*pack.rows}
        if pack.cut:
            start, end = pack.spans[-1]
            assert pack.seconds < end
            assert start + packs.SHORTEST_CUT - packs.OVERLAP <= pack.seconds + 1e-6
        needed = sum(data.costs[row] for row in pack.rows[: len(heard)]) + pack.cut
        assert needed <= ROOM and tokens[index] == needed - pack.cut
        before = [time for span in pack.spans_before for time in span]
        assert before == sorted(before)


def test_a_window_has_one_language():
    """Its prompt names one."""
    corpus = make_corpus([("a.wav", float(row), 1.0, "anna") for row in range(6)])
    corpus.languages = Codes(["vi", "vi", "en", "en", "en", "vi"])
    data = make_packs(corpus, share=1.0)
    longest = [max(data.pack(row, epoch).rows for epoch in range(20)) for row in range(6)]
    assert all(len({corpus.languages[row] for row in rows}) == 1 for rows in longest)
    assert packs.followed(corpus) == pytest.approx(3 / 6)


@given(st.integers(0, 10_000))
def test_neighbours_are_true_and_have_their_own_times(seed):
    """Against a search of the utterances that follow in the file."""
    corpus = shuffled(seed)
    data = make_packs(corpus, share=1.0)
    paths = list(corpus.paths)
    ends = corpus.offsets + corpus.seconds
    for index in range(len(data)):
        pack = data.pack(index, 0)
        inside = [row for row in (*pack.before, *pack.rows) if paths[row] == paths[index]]
        if pack.recorded:
            assert len(inside) == len(pack.before) + len(pack.rows)
        for first, second in zip(pack.rows, pack.rows[1:], strict=False):
            if pack.recorded:
                gap = corpus.offsets[second] - ends[first]
                assert -packs.OVERLAP - 1e-6 <= gap <= packs.LONGEST_GAP + 1e-6
        if pack.recorded:
            begin = corpus.offsets[index] - pack.spans[0][0]
            ends_before = [end for end in ends[pack.before] if end <= corpus.offsets[index]]
            assert begin >= max(ends_before, default=0.0) - packs.OVERLAP - 1e-6
            for row, (start, _) in zip(pack.rows, pack.spans, strict=True):
                assert start == pytest.approx(corpus.offsets[row] - begin, abs=packs.OVERLAP + 1e-6)
            # Nothing else is heard between them.
            for row in range(len(corpus)):
                if paths[row] == paths[index] and row not in pack.rows:
                    for first, second in zip(pack.rows, pack.rows[1:], strict=False):
                        begins = corpus.offsets[row] >= ends[first] - 1e-6
                        assert not begins or ends[row] > corpus.offsets[second]
        if pack.before and pack.recorded:
            last = pack.before[-1]
            assert corpus.offsets[last] < corpus.offsets[index]
            assert corpus.offsets[index] - ends[last] <= packs.LONGEST_GAP + 1e-6
            assert corpus.offsets[pack.before[0]] >= corpus.offsets[index] - LONGEST - 1e-6


def test_windows_depend_on_seed_epoch_and_utterance_alone():
    corpus = shuffled(3)
    data, other = make_packs(corpus), make_packs(corpus)
    ours = [data.pack(index, epoch) for epoch in (4, 0, 1) for index in range(len(data))]
    other = pickle.loads(pickle.dumps(other))
    theirs = [other.pack(index, epoch) for epoch in (4, 0, 1) for index in range(len(data))]
    assert ours == theirs
    assert ours[: len(data)] != ours[len(data) : 2 * len(data)]
    seeded = make_packs(corpus, seed=2)
    assert [seeded.pack(index, 4) for index in range(len(data))] != ours[: len(data)]


def test_shares_and_lengths_of_many_windows():
    rows = [(f"{row // 50}.wav", row % 50 * 3.1, 2.5, "one") for row in range(4000)]
    data = make_packs(make_corpus(rows), share=0.25)
    data.costs[:] = 3
    layout, lengths = data.layout(0), data.seconds(0)
    assert layout.timed.mean() == pytest.approx(0.25, abs=0.03)
    assert layout.previous.mean() == pytest.approx(packs.PREVIOUS, abs=0.03)
    assert lengths.min() > 2.49 and lengths.max() == pytest.approx(LONGEST)
    alone = (layout.stop == layout.place) & ~layout.timed
    assert 0.35 < alone.mean() < 0.5  # half of those without times, and short packs
    assert (lengths > 27).mean() == pytest.approx(0.625 * packs.FULL, abs=0.08)
    leads = layout.start < layout.line.starts[layout.place]
    assert leads[layout.timed].mean() == pytest.approx(packs.LEADS, abs=0.05)
    assert 0.4 < layout.cut[layout.timed].mean() < packs.OPEN
    assert not layout.cut[~layout.timed].any()
    full = layout.cut & (lengths > LONGEST - 1e-6)
    assert full.any()


def test_speakers_stay_apart_if_they_have_enough_to_say():
    rows = [(f"{row}.wav", 0.0, 2.0, f"speaker {row % 3}") for row in range(60)]
    rows += [(f"few {row}.wav", 0.0, 2.0, f"few {row}") for row in range(5)]
    data = make_packs(make_corpus(rows))
    data.costs[:] = 3
    sizes = []
    before = 0
    for index in range(len(rows)):
        pack = data.pack(index, 0)
        speakers = {rows[row][3] for row in pack.rows}
        assert speakers == {rows[index][3]} or all(name.startswith("few") for name in speakers)
        pauses = [b[0] - a[1] for a, b in zip(pack.spans, pack.spans[1:], strict=False)]
        assert all(packs.PAUSE[0] - 1e-6 <= pause <= packs.PAUSE[1] + 1e-6 for pause in pauses)
        sizes.append(len(pack.rows))
        assert not pack.recorded
        before += len(pack.before)
        assert speakers >= {rows[row][3] for row in pack.before} or index >= 60
    assert max(sizes[:60]) > 5 and max(sizes[60:]) > 2 and before > 60


def test_one_utterance_is_a_window_of_its_own():
    data = make_packs(make_corpus([("a.wav", 0.0, 2.0, "")]))
    longest = 2.0 + packs.LONGEST_LEAD
    assert data.pack(0, 0).rows == [0] and 2.0 <= data.seconds(0)[0] <= longest
    assert packs.followed(make_corpus([("a.wav", 0.0, 2.0, "")])) == 0.0
    pair = make_corpus([("a.wav", 3.0, 2.0, ""), ("a.wav", 0.0, 2.0, ""), ("b.wav", 0.0, 2.0, "")])
    assert packs.followed(pair) == pytest.approx(1 / 3)


@pytest.fixture
def recording(tmp_path):
    """60 s in which utterance n is a constant of (n + 1) / 100 and every pause is noise far below
    it, but for one that is as loud as speech; and the corpus of its utterances."""
    random = np.random.default_rng(0)
    spans = [(0.0, 2.0), (2.5, 6.0), (9.0, 12.0), (14.0, 20.0), (20.5, 27.0), (29.0, 40.0)]
    samples = random.normal(0, 1e-4, 60 * SAMPLE_RATE).astype(np.float32)
    for number, (start, end) in enumerate(spans):
        samples[round(start * SAMPLE_RATE) : round(end * SAMPLE_RATE)] = (number + 1) / 100
    samples[round(12.3 * SAMPLE_RATE) : round(13.7 * SAMPLE_RATE)] = 0.5
    path = str(tmp_path / "recording.wav")
    soundfile.write(path, samples, SAMPLE_RATE, "FLOAT")
    rows = [(path, start, end - start, "") for start, end in spans]
    return make_corpus([rows[row] for row in (3, 0, 5, 1, 4, 2)]), [3, 0, 5, 1, 4, 2]


def test_what_is_heard_where(recording):
    corpus, number = recording
    data = Packs(corpus, np.full(6, 5), 1.0, 1, LONGEST, 100)
    seen = set()
    leads = []
    for epoch in range(12):
        for index in range(6):
            pack = data.pack(index, epoch)
            waveform = packs.read(corpus, pack)
            assert len(waveform) / SAMPLE_RATE == pytest.approx(
                data.seconds(epoch)[index], abs=1e-3
            )
            assert not waveform[0].round(decimals=2) or pack.spans[0][0] == 0
            for row, (start, end) in zip(pack.rows, pack.spans, strict=True):
                middle = round((start + min(end, pack.seconds)) / 2 * SAMPLE_RATE)
                assert float(waveform[middle]) == pytest.approx((number[row] + 1) / 100)
            if pack.recorded:
                loud = waveform.abs() > 0.3  # speech without a text
                assert int(loud.sum()) <= 2 * packs.EDGE * SAMPLE_RATE
                for (_, end), (start, _) in zip(pack.spans, pack.spans[1:], strict=False):
                    middle = round((start + end) / 2 * SAMPLE_RATE)
                    is_loud_one = number[pack.rows[0]] <= 2 and start - end == pytest.approx(2)
                    assert is_loud_one or waveform[middle : middle + 9].any()  # quiet ones stay
                seen.add((len(pack.rows), pack.cut))
                leads.append(pack.spans[0][0])
    assert {(1, False), (2, False), (2, True), (3, False), (3, True)} <= seen
    assert min(leads) == 0 and 1.5 < max(leads) <= packs.LONGEST_LEAD  # of pauses of 2 and 3 s


def test_others_are_heard_after_silence(wav, tmp_path):
    rows = [(wav(tmp_path / f"{row}.wav", 1.5), 0.0, 1.5, "") for row in range(9)]
    corpus = make_corpus(rows)
    corpus.durations[:] = math.nan
    data = Packs(corpus, np.full(9, 5), 1.0, 1, LONGEST, 100)
    pack = max((data.pack(index, 0) for index in range(9)), key=lambda each: len(each.rows))
    waveform = packs.read(corpus, pack)
    for start, end in pack.spans[:-1]:
        first, last = round(start * SAMPLE_RATE), round(end * SAMPLE_RATE)
        assert waveform[first : last - 2].count_nonzero() > 0.99 * (last - first)
        assert not waveform[last + 2 : last + SAMPLE_RATE // 10].any()
    assert isinstance(waveform, torch.Tensor) and waveform.dtype == torch.float32
