"""Audio that is listened to before training, and transcripts that become data."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from common.device import Setup
from common.errors import DataError
from speech.data import listening
from speech.data.splits import Checks, held_out_keys, load_corpus, read_manifests, report_checked
from speech.decoding import recogniser, transcribing
from speech.decoding.long import BY_OVERLAP
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.writing.text import normalise

RATE = 16_000


def speech(seconds: float = 1.0, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """(T,) like speech: bursts of noise in syllables, with a peak of 1."""
    random = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    noise = np.convolve(random.laplace(size=len(times)), np.hanning(9), "same")
    waveform = noise * (0.02 + np.sin(2 * np.pi * 2 * times) ** 2) * random.uniform(0.9, 1.1)
    return waveform / np.abs(waveform).max()


def tone(frequency: float, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def pad(waveform: np.ndarray, start: float, end: float, rate: int = RATE) -> np.ndarray:
    return np.concatenate([np.zeros(round(start * rate)), waveform, np.zeros(round(end * rate))])


@pytest.fixture
def data(tmp_path, json_lines):
    """data({name: waveform or row}, **options of the file) writes wavs and their manifest, and
    returns its path."""

    def write(clips: dict, rate: int = RATE, suffix: str = "wav", **options) -> str:
        rows = []
        for name, clip in clips.items():
            if not isinstance(clip, dict):
                soundfile.write(tmp_path / f"{name}.{suffix}", clip, rate, **options)
                clip = {"audio_filepath": f"{name}.{suffix}"}
            rows.append({"text": name, **clip})
        return json_lines(tmp_path / "m.json", rows)

    return write


def load(path, **settings):
    return load_corpus(path, normalise, Checks(**{"listen": True, **settings}))


# --- what is measured -----------------------------------------------------------------------------

AUDIBLE = {
    "speech": speech(),
    "faint speech": 0.02 * speech(),
    "loud, quantised coarsely": np.round(speech() * 20) / 20,
    "a tone at full scale": tone(440),
    "a low tone at full scale": tone(20.0),
    "padded": pad(speech(), 0.5, 0.5),
    "one loud click": np.eye(1, RATE)[0],
    "noise": np.random.default_rng(0).uniform(-0.5, 0.5, RATE),
    "an offset": 0.2 + 0.5 * speech(),
    "cut a little": np.clip(1.1 * speech(), -1, 1),
}
CLIPPED = {
    "cut": np.clip(4 * speech(), -1, 1),
    "cut and scaled": 0.3 * np.clip(4 * speech(), -1, 1),
    "cut above": np.clip(4 * speech(), -9, 1) / 9,
    "cut and padded": pad(np.clip(4 * speech(), -1, 1), 0.3, 0.3),
}
SILENT = {
    "digital silence": np.zeros(RATE),
    "an offset alone": np.full(RATE, 0.3),
    "hiss": 0.0005 * speech(),
    "a few samples": np.zeros(20),
}


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_U8", "FLOAT", "ULAW"])
def test_clipped_clips_are_told_from_loud_ones(data, subtype):
    path = data({**AUDIBLE, **CLIPPED}, subtype=subtype)
    corpus, rejected = load(path, for_synthesis=True)
    coarse = {"a tone at full scale", "a low tone at full scale"} if subtype == "ULAW" else set()
    assert set(corpus.texts) == set(AUDIBLE) - coarse  # whose last step is 3 % of full scale
    assert rejected.counts == {"audio is clipped": len(CLIPPED) + len(coarse)}
    everything, kept = load(path)  # a recogniser may learn from clipped speech
    assert len(everything) == len(AUDIBLE) + len(CLIPPED)
    assert not kept.counts and kept.notes.counts == rejected.counts


def test_silent_clips_are_rejected_with_their_level(data, tmp_path):
    path = data({"good": speech(), **SILENT})
    corpus, rejected = load(path, min_duration=0.0)
    assert list(corpus.texts) == ["good"] and rejected.counts == {"audio is silent": 4}
    assert rejected.examples["audio is silent"][0] == (
        f"{path}:2: {tmp_path}/digital silence.wav: at most -200 dB of full scale"
    )


def test_the_measures_of_known_waveforms():
    level, clipped, start, end = listening.measure(pad(0.5 * tone(1000), 0.4, 0.25), RATE)
    assert level == pytest.approx(-9.03, abs=0.01) and clipped == 0
    assert (start, end) == (pytest.approx(0.4), pytest.approx(0.25))
    assert listening.measure(0.1 * tone(1000), RATE)[2:] == (0, 0)
    hiss = np.concatenate(
        [1e-3 * speech(), 0.5 * speech(1, seed=1), 1e-3 * speech()]
    )  # 54 dB below
    assert listening.measure(hiss, RATE)[2:] == (
        pytest.approx(1.0, abs=0.06),
        pytest.approx(1.0, abs=0.06),
    )
    for samples in (1, 7, 159, 161):
        assert np.isfinite(listening.measure(np.full(samples, 0.5), RATE)).all()


@given(st.lists(st.integers(-128, 127), min_size=1, max_size=400), st.sampled_from([8_000, 16_000]))
def test_any_waveform_is_measured(values, rate):
    waveform = np.array(values, dtype=np.float32) / 128
    level, clipped, start, end = listening.measure(waveform, rate)
    assert -200 <= level <= 6.1 and 0 <= clipped <= 1 and start >= 0 and end >= 0
    assert start + end <= 2 * len(waveform) / rate
    flipped = listening.measure(-waveform[::-1], rate)
    assert flipped[1] == clipped


def test_only_the_part_of_a_row_is_heard(data):
    parts = np.concatenate([speech(), np.zeros(RATE), np.clip(4 * speech(), -1, 1)])
    rows = {f"{i}": {"audio_filepath": "a.wav", "offset": i, "duration": 1.0} for i in range(3)}
    path = data({"a": parts, **rows})
    corpus, rejected = load(path, for_synthesis=True)
    assert list(corpus.texts) == ["0"]  # the whole has more than 1 % of clipped samples
    assert rejected.counts == {"audio is clipped": 2, "audio is silent": 1}


# --- silence at the ends --------------------------------------------------------------------------


def test_silence_at_the_ends_is_cut_by_times(data, capsys):
    clips = {
        "long": pad(speech(), 0.5, 0.75),
        "short": pad(speech(), 0.2, 0.25),
        "click": pad(tone(1000, 0.01), 0.5, 0.5),
    }
    row = {"audio_filepath": "long.wav", "offset": 0.1, "duration": 1.0}
    path = data({**clips, "part": row})
    untouched, _ = load(path)
    assert np.isnan(untouched.durations[:3]).all() and untouched.offsets.tolist() == [0, 0, 0, 0.1]
    corpus, rejected = load(path, for_synthesis=True, min_duration=0.32)
    assert list(corpus.texts) == ["long", "short", "part"]
    assert rejected.counts == {"shorter than 0.32 s (--min_duration)": 1}
    assert rejected.notes.counts == {"silence at an end is cut to 0.15 s": 3}
    assert corpus.offsets.tolist() == pytest.approx([0.35, 0, 0.35], abs=0.011)
    assert corpus.seconds.tolist() == pytest.approx([1.3, 1.45, 0.75], abs=0.011)
    assert np.isnan(corpus.durations[1]) and corpus.durations[0] == corpus.seconds[0]
    waveform = read_utterance(corpus, 0, RATE).numpy()
    assert len(waveform) == round(corpus.seconds[0] * RATE) and np.abs(waveform).max() > 0.9
    read_manifests({"test": path}, normalise, Checks(listen=True, for_synthesis=True))
    assert "test set" in (out := capsys.readouterr().out) and "noted (all are used):\n" in out


# --- what cannot be decoded -----------------------------------------------------------------------


def damaged(folder, name="bad.wav"):
    """A file whose header is good and whose samples are not."""
    soundfile.write(folder / name, np.full(RATE, np.nan), RATE, subtype="FLOAT")


@pytest.mark.parametrize("count", [2, 60])
def test_what_cannot_be_decoded_ends_the_reading_or_is_rejected(data, tmp_path, monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    damaged(tmp_path)
    clips = {f"c{i}": speech(0.2, seed=i) for i in range(count)}
    path = data({"bad": {"audio_filepath": "bad.wav"}, **clips})
    advice = r"bad\.wav holds samples that are not finite .*; fix or remove it, or skip"
    with pytest.raises(DataError, match=advice):
        load(path)
    corpus, rejected = load(path, skip_bad_audio=True)
    assert len(corpus) == count and rejected.counts == {"audio cannot be decoded": 1}
    assert len(load(path, listen=False)[0]) == count + 1


# --- threads and the cache ------------------------------------------------------------------------


def test_threads_hear_the_same(data, monkeypatch):
    clips = {f"c{i}": (0.1 + i / 100) * pad(speech(0.3, seed=i), i / 90, 0.1) for i in range(40)}
    clips |= {"silent": np.zeros(RATE), "clipped": CLIPPED["cut"]}
    path = data(clips)
    results = []
    for cores in (1, 2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        measures, faults = listening.listen(load(path, listen=False)[0], None, True)
        assert not faults
        results.append(measures)
    np.testing.assert_array_equal(*results)
    assert np.isfinite(results[0]).all()


@pytest.fixture
def heard(monkeypatch):
    seen = []
    listen = listening.measure_utterance
    monkeypatch.setattr(
        listening,
        "measure_utterance",
        lambda corpus, i: seen.append(corpus.where(i).split("/")[-1]) or listen(corpus, i),
    )
    return seen


def test_an_unchanged_part_is_heard_once(data, tmp_path, heard):
    part = {"audio_filepath": "a.wav", "offset": 0.5, "duration": 0.25}

    def again(time: int, **more):
        path = data({"a": speech(), "part": part, **more})
        os.utime(tmp_path / "a.wav", ns=(0, time))
        heard.clear()
        corpus, rejected = load(path, cache_dir=tmp_path / "cache", for_synthesis=True)
        return sorted(heard), len(corpus), rejected.counts

    assert again(1) == (["a.wav", "a.wav at 0.50 s"], 2, {})
    assert again(1) == ([], 2, {})
    assert again(1, silent=np.zeros(RATE)) == (["silent.wav"], 2, {"audio is silent": 1})
    part["duration"] = 0.3
    assert again(1) == (["a.wav at 0.50 s"], 2, {})
    assert again(5) == (["a.wav", "a.wav at 0.50 s"], 2, {})


def test_other_ranks_wait_for_the_cache(data, tmp_path, heard):
    path = data({"a": speech()})
    (tmp_path / "cache").mkdir()
    with ThreadPoolExecutor(1) as other:
        with listening.locked(tmp_path / "cache"):
            loading = other.submit(load, path, cache_dir=tmp_path / "cache")
            with pytest.raises(StillRunning):
                loading.result(timeout=0.2)
            assert not heard
        assert len(loading.result(timeout=5)[0]) == 1 and heard == ["a.wav"]


def test_what_is_held_out_is_the_same_with_and_without_listening(data, tmp_path):
    clips = {f"c{i}": pad(speech(0.6, seed=i), 0.1 * (i % 6), 0.4) for i in range(30)}
    path = data(clips)
    settings = {"listen": True, "for_synthesis": True}
    first = read_manifests({"train": path}, normalise, Checks(**settings))["val"]
    keys = held_out_keys(first)
    assert (first.offsets > 0).any() and held_out_keys(first.select(np.arange(len(first)))) == keys
    for again in (Checks(held_out=tuple(keys)), Checks(**settings, held_out=tuple(keys), seed=7)):
        assert list(read_manifests({"train": path}, normalise, again)["val"].texts) == list(
            first.texts
        )


def test_a_signal_ends_the_threads(data, monkeypatch):
    path = data({f"c{i}": speech(0.1) for i in range(400)})
    heard = []

    def slow(corpus, index):
        heard.append(index)
        if len(heard) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.005)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(listening, "measure_utterance", slow)
    # A shell that starts the tests in the background has it ignored.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(path)
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert 20 <= len(heard) < 400


# --- transcripts as data --------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_recordings_become_data_in_two_steps(tmp_path, monkeypatch, place):
    """Cut at silences, transcribed, and read as a manifest whose pieces are at most --max_duration
    long."""
    sentences = [pad(0.5 * speech(1.5, seed=i), 0.1, 0.4) for i in range(8)]
    sentences[3] = np.zeros(round(3.5 * SAMPLE_RATE))  # a whole piece of it is silent
    (tmp_path / "rec").mkdir()
    soundfile.write(tmp_path / "rec" / "a.wav", np.concatenate(sentences), SAMPLE_RATE)
    soundfile.write(tmp_path / "rec" / "b.wav", sentences[0], SAMPLE_RATE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    rows = "rows.jsonl" if place == "beside" else "out/rows.jsonl"
    lengths = []

    def decode(batch):
        lengths.extend(batch["audio_lengths"].tolist())
        return [f"piece of {length}" for length in batch["audio_lengths"].tolist()]

    how = recogniser.DecodingOptions(transcribe=["rec"], output=rows, piece_seconds=2.5)
    transcribing.transcribe_files(how, decode, Setup(), 30.0, BY_OVERLAP)
    assert max(lengths) <= 2.5 * SAMPLE_RATE and '"text": ""' in (tmp_path / rows).read_text()
    settings = Checks(listen=True, use_chunking=True, max_duration=2.5, skip_bad_audio=True)
    corpora = read_manifests({"test": rows}, normalise, settings)
    corpus = corpora["test"]
    assert len(corpus) == len(lengths) >= 5 and set(corpus.seconds <= 2.5) == {True}
    for index, text in enumerate(corpus.texts):
        assert text == f"piece of {len(read_utterance(corpus, index, SAMPLE_RATE))}"
    whole, rejected = load_corpus(rows, normalise, Checks(max_duration=30.0))
    assert len(whole) == 2 and not rejected.total and whole.texts[0].startswith("piece of")
    report_checked(corpora)


def test_pieces_are_segments_of_transcripts_alone(tmp_path, data):
    pieces = [{"start": 0, "end": 1, "text": "one"}, {"start": 1, "end": 2, "text": ""}]
    rows = {
        "transcript": {"file": "a.wav", "text": "one", "pieces": pieces, "segments": [5]},
        "tokens": {"audio_filepath": "a.wav", "text": "one", "pieces": ["▁o", "ne"]},
        "nothing": {"file": "a.wav", "text": "", "pieces": pieces[1:]},
        "damaged": {"file": "a.wav", "text": "one", "pieces": [5]},
    }
    soundfile.write(tmp_path / "a.wav", speech(2.0), RATE)
    corpus, rejected = load(data(rows), use_chunking=True, max_duration=1.5)
    assert list(corpus.texts) == ["one"] and corpus.seconds.tolist() == [1.0]
    reason = "longer than 1.5 s (--max_duration), without segment times for --use_chunking"
    assert rejected.counts == {reason: 2, "segments are not a list of objects": 1}
