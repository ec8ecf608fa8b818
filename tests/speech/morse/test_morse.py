"""Morse: synthesis against a decoder and measurements written here, data sets, and scores."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, RunError
from speech.data.splits import Checks, draw, load_corpus, report_checked
from speech.morse import alphabet, recordings, scores, synthesis, texts
from speech.morse.synthesis import Choice
from tests.speech.morse.sets import write_set

RATE = 16_000
# The code as a tree: a dit goes to 2 i, a dah to 2 i + 1, from 1 on; _ is no character.
TREE = "__ETIANMSURWDKGOHVF_L_PJBXCYZQ__54_3É__2&_+____16=/___(_7___8_90"
SIX = {
    "..--..": "?",
    "-....-": "-",
    ".----.": "'",
    ".-..-.": '"',
    ".-.-.-": ".",
    ".--.-.": "@",
    "-.--.-": ")",
    "--..--": ",",
    "---...": ":",
    "...-.-": "<SK>",
    "........": "<HH>",
}
CALL = re.compile(
    r"([A-Z0-9]{1,3}/)?([A-Z]{1,2}|[0-9][A-Z]|[A-Z][0-9])[0-9]{1,3}[A-Z]{1,3}(/(P|M|MM|QRP|[0-9]))?"
)
CLEAN = dataclasses.replace(synthesis.CONDITIONS["clean"], noise_only=0.0)
DRY = dataclasses.replace(CLEAN, snr_db=(90, 90), jitter=(0, 0))


def character(code: str) -> str:
    if code in SIX:
        return SIX[code]
    place = 1
    for element in code:
        place = 2 * place + (element == "-")
    label = TREE[place] if place < len(TREE) else "_"
    return "<AS>" if label == "&" else label


def marks_and_gaps(amplitude: np.ndarray) -> np.ndarray:
    """Lengths in samples of mark, gap, mark ... at half the amplitude, linearly interpolated."""
    above = amplitude > 0.5
    before = np.flatnonzero(above[1:] != above[:-1])
    low, high = amplitude[before].astype(float), amplitude[before + 1]
    return np.diff(before + (0.5 - low) / (high - low))


# --- text -----------------------------------------------------------------------------------------

EXCHANGES = {
    "CQWW": r"(5NN|599|ENN) [0-4TNA]?[0-9TNA]",
    "CQWPX": r"(5NN|599|ENN) [0-9TNA]{1,4}",
    "ARRLDX": r"(5NN|599|ENN) ([A-Z]{2}|KW|K|ATT|[15]TT|[0-9]+)",
    "FIELD_DAY": r"([1-9]|1[0-5])[A-F] [A-Z]{2,3}",
    "NAQP": r"[A-ZÉ]+ [A-Z]{2}",
    "SWEEPSTAKES": rf"[0-9TNA]{{1,4}} [QABUMS] {CALL.pattern} [0-9TNA]{{2}} [A-Z]{{2,3}}",
    "SPRINT": rf"{CALL.pattern} {CALL.pattern} [0-9TNA]{{1,4}} [A-ZÉ]+ [A-Z]{{2}}",
    "IARU": r"(5NN|599|ENN) ([0-9TNA]{2}|[A-Z]+|R[123])",
}


def test_every_text_can_be_sent_and_contains_its_exchange():
    random = np.random.default_rng(0)
    heard = set()
    for number in range(3000):
        contest = tuple(texts.CONTESTS)[number % 8]
        sample_type = texts.CONTEST_SAMPLES[number // 8 % 5]
        text, calls, exchange = texts.contest_text(random, contest, sample_type)
        assert re.fullmatch(EXCHANGES[contest], exchange), (contest, exchange)
        if sample_type in ("full_qso", "exchange"):
            assert f" {exchange} " in f" {text} "
        if number % 3 == 0:
            text, calls = texts.everyday_text(random)
        for call in calls:
            assert CALL.fullmatch(call) and alphabet.CALLSIGN.fullmatch(call), call
        assert text == alphabet.normalise(text) and text, text
        heard |= set(alphabet.symbols(text))
    assert heard == set(alphabet.SYMBOLS)


def test_callsigns_are_distinguished_from_similar_words():
    calls = "K1A W1AW KH6/W1AW DL50ABC 9A1AA/P 4X4ABC VP5/F6XYZ R1/G3A S57XX/QRP"
    others = "5NN FN31PR FN31 12A IC7300 K3 599 TEST 1TT K1? A/B R3 3A"
    assert recordings.find_callsigns(f"{calls} {others}") == calls.split()


# --- keying and channel ---------------------------------------------------------------------------


@pytest.mark.parametrize("label", alphabet.MORSE)
def test_every_character_and_its_exact_timing(label):
    assert character(alphabet.MORSE[label]) == label
    unit = 1.2 / 23
    runs = synthesis.keying(f"{label}{label} T") * unit
    amplitude = synthesis.envelope(runs, 0.1, int((runs.sum() + 0.2) * RATE))
    lengths = marks_and_gaps(amplitude) / RATE / unit
    marks = [1 if element == "." else 3 for element in alphabet.MORSE[label]]
    code = [length for mark in marks for length in (mark, 1)][:-1]
    sample = 1 / RATE / unit
    np.testing.assert_allclose(lengths, [*code, 3, *code, 7, 3], atol=1.5 * sample)


def test_farnsworth_stretches_gaps_between_characters_only():
    plain, slow = synthesis.keying("PARIS 73"), synthesis.keying("PARIS 73", 1.5)
    wider = [x * 1.5 if i % 2 and x > 1 else x for i, x in enumerate(plain)]
    np.testing.assert_array_equal(slow, wider)
    # 50 with the gap after it: the word that speeds are stated in.
    assert synthesis.keying("PARIS").sum() == 43


@pytest.mark.parametrize(
    "fading",
    [
        {},
        {"qsb_depth": (0.7, 0.7), "multipath": (0.005, 0.005)},
        {"crashes": (0.0, 0.0), "chirp": (30, 30), "drift": (60, 60)},
    ],
)
def test_the_measured_snr(fading):
    """From the noise's density at 3 to 8 kHz, the station's energy around its tone, and the
    duration of the text's marks."""
    plain = {"jitter": (0, 0), "sample_types": ("full_qso",), "wpm": (18, 25)}
    for index, wanted in enumerate((-8.0, 0.0, 6.0, 15.0)):
        conditions = dataclasses.replace(CLEAN, snr_db=(wanted, wanted), **plain, **fading)
        sample = synthesis.synthesise(4, index, conditions)
        spectrum = np.abs(np.fft.rfft(sample.audio.astype(float))) ** 2
        energy = spectrum * 2 / len(sample.audio) / RATE  # J per bin
        frequencies = np.fft.rfftfreq(len(sample.audio), 1 / RATE)
        bin_width = RATE / len(sample.audio)
        noise = energy[frequencies > 3000].mean() / sample.seconds / bin_width  # W/Hz
        near = np.abs(frequencies - sample.tone) < 150
        station = energy[near].sum() - noise * near.sum() * bin_width * sample.seconds
        marks = synthesis.keying(sample.text)[::2]
        # An edge's energy is that of 3/8 of its 5 ms, not of a half.
        keyed = marks.sum() * 1.2 / sample.wpm - len(marks) * 2 * 0.005 / 8
        measured = 10 * np.log10(station / keyed / (noise * 2500))
        assert abs(measured - wanted) < 0.5 and sample.snr_db == wanted


@pytest.mark.parametrize("name", synthesis.CONDITIONS)
def test_every_clip_keeps_to_its_conditions(name):
    conditions = synthesis.CONDITIONS[name]
    seen = set()
    for index in range(40):
        sample = synthesis.synthesise(5, index, conditions)
        audio = sample.audio
        assert audio.dtype == np.float32 and audio.ndim == 1 and np.isfinite(audio).all()
        assert 0.05 < np.abs(audio).max() < 1 and sample.seconds < 30
        assert sample.condition == name and sample.sample_type in conditions.sample_types
        assert set(alphabet.symbols(sample.text)) <= set(alphabet.SYMBOLS)
        assert (sample.contest_type == "NONE") == (sample.sample_type == "words")
        for call in sample.callsigns:
            assert call in sample.text.split() and CALL.fullmatch(call)
        assert not sample.exchange or f" {sample.exchange} " in f" {sample.text} "
        for value, (low, high) in ((sample.wpm, conditions.wpm), (sample.tone, conditions.tone)):
            assert low <= value <= high
        assert sample.is_noise_only == (not sample.text) == bool(np.isnan(sample.snr_db))
        seen.add(sample.sample_type)
    assert len(seen) > 3


@given(
    seed=st.integers(0, 2**40),
    longest=st.floats(6, 29),
    wpm=st.floats(8, 60),
    farnsworth=st.floats(1, 2),
    sample_type=st.sampled_from(texts.SAMPLE_TYPES),
)
def test_texts_are_cut_to_the_length(seed, longest, wpm, farnsworth, sample_type):
    conditions = dataclasses.replace(
        DRY,
        longest=longest,
        wpm=(wpm, wpm),
        farnsworth=(farnsworth,) * 2,
        sample_types=(sample_type,),
    )
    sample = synthesis.synthesise(seed, 0, conditions)
    assert 0 < sample.seconds <= longest + 0.1
    assert sample.text and sample.text == alphabet.normalise(sample.text)
    units = np.cumsum(synthesis.keying(sample.text, farnsworth))[-1]
    assert units * 1.2 / wpm + 0.2 < sample.seconds + 0.1


def test_the_receiver():
    random = np.random.default_rng(0)
    noise = random.standard_normal(160_000, dtype=np.float32)
    for width in (250, 500):
        filtered = synthesis.receiver_filter(noise, 700.0, width)
        power = np.abs(np.fft.rfft(filtered)) ** 2 / np.abs(np.fft.rfft(noise)) ** 2
        away = np.abs(np.fft.rfftfreq(160_000, 1 / RATE) - 700)
        assert np.median(power[away < width / 3]) == pytest.approx(1, abs=0.01)
        assert np.median(power[(away > 0.7 * width)]) < 1e-4
        assert filtered.dtype == np.float32 and len(filtered) == len(noise)
    loud = np.concatenate([np.full(16_000, 1.0), np.full(16_000, 0.01)]).astype(np.float32)
    levelled = synthesis.control_gain(loud, 10.0, 1.0)
    assert levelled[8000] == pytest.approx(1, abs=0.01)
    assert levelled[16_100] < 0.02
    assert levelled[-1] > 0.9
    quiet = np.zeros(16_000, dtype=np.float32)
    assert np.isfinite(synthesis.control_gain(quiet, 10.0, 1.0)).all()


def frequency(audio: np.ndarray) -> float:
    """The frequency of a tone, by its first and last rising zero."""
    before = np.flatnonzero((audio[:-1] < 0) & (audio[1:] >= 0))
    zeros = before + audio[before] / (audio[before] - audio[before + 1])
    return (len(zeros) - 1) / (zeros[-1] - zeros[0]) * RATE


def test_the_transmitter_drifts_and_chirps():
    random, down = np.random.default_rng(0), np.ones(160_000, dtype=np.float32)
    steady = synthesis.transmit(random, down, 1200.0, 0.0, 0.0)
    assert frequency(steady) == pytest.approx(1200, abs=0.01)
    assert np.abs(steady).max() == pytest.approx(1, abs=0.01)
    drifting = synthesis.transmit(random, down, 700.0, -100.0, 0.0)
    ends = [frequency(drifting[:1600]), frequency(drifting), frequency(drifting[-1600:])]
    assert ends == pytest.approx([749.5, 700, 650.5], abs=0.5)
    down[: RATE // 2] = 0
    chirping = synthesis.transmit(random, down, 1000.0, 0.0, 40.0)[RATE // 2 :]
    assert 1025 < frequency(chirping[:160]) < 1040
    assert frequency(chirping[3200:]) == pytest.approx(1000, abs=0.1)


def test_interferers_are_near_the_tone_but_not_on_it():
    for seed in range(20):
        other = synthesis.interferer(np.random.default_rng(seed), 64_000, 700.0)
        assert len(other) == 64_000 and np.abs(other).max() <= 1.001
        spectrum = np.abs(np.fft.rfft(other * np.hanning(64_000))) ** 2
        peak = np.fft.rfftfreq(64_000, 1 / RATE)[spectrum.argmax()]
        assert 50 < abs(peak - 700) < 410


# --- synthetic clips as a data set ----------------------------------------------------------------


@pytest.mark.parametrize("wpm", synthesis.LIMITS["wpm"])
@pytest.mark.parametrize("tone", synthesis.LIMITS["tone"])
@pytest.mark.parametrize("snr_db", synthesis.LIMITS["snr_db"])
def test_clips_at_the_limits_are_sound(wpm, tone, snr_db):
    (wide,) = Choice(["wide"], [wpm] * 2, [tone] * 2, [snr_db] * 2, 1.0).mix()
    sample = synthesis.synthesise(0, 0, dataclasses.replace(wide, noise_only=0.0))
    assert np.isfinite(sample.audio).all() and 0.05 < np.abs(sample.audio).max() < 1 and sample.text
    assert sample.seconds < 7  # a symbol is sent whole, whatever the longest clip


def test_a_synthetic_set_has_new_clips_in_every_epoch():
    other = dataclasses.replace(CLEAN, name="other", longest=4.0)
    mix = [dataclasses.replace(CLEAN, longest=3.0), other]
    clips = synthesis.Synthetic(mix, 6, 30)
    heard = set()
    for epoch in (0, 2):
        for index in range(6):
            waveform, text, name, spans = clips.load(index, epoch)
            number = 6 * epoch + index
            sample = synthesis.synthesise(30, number, synthesis.draw_conditions(mix, 30, number))
            assert waveform.numpy().tobytes() == sample.audio.tobytes() and text == sample.text
            assert name == f"synthetic clip 30/{number}" and np.array_equal(spans, sample.spans)
            assert clips.seconds(epoch)[index] == len(waveform) / RATE
            heard.add(waveform.numpy().tobytes())
    assert len(heard) == 12
    assert {clips.row(index, "")["condition"] for index in range(6)} == {"clean", "other"}
    sets = [synthesis.Synthetic(*each) for each in ((mix, 6, 31), (mix, 5, 30), (mix[:1], 6, 30))]
    assert len({each.fingerprint() for each in (clips, *sets)}) == 4


# --- data set on disk -----------------------------------------------------------------------------

MIX = [
    dataclasses.replace(CLEAN, longest=4.0, wpm=(30, 40), noise_only=0.2),
    synthesis.CONDITIONS["contest_good"],
]


def test_a_data_set_is_read_as_it_was_made(tmp_path):
    made = write_set(tmp_path / "set", 30, MIX)
    parts = recordings.read_splits(tmp_path / "set", Checks(cache_dir=tmp_path / "cache"))
    assert {split: len(part) for split, part in parts.items()} == {"train": 24, "val": 3, "test": 3}
    noise = set()
    for part in parts.values():
        for i in range(len(part)):
            sample = made[int(Path(part.corpus.paths[i]).stem)]
            assert part.seconds(0)[i] == pytest.approx(sample.seconds)
            row = part.row(i, "x")
            for name in ("exchange", "contest_type", "sample_type", "condition", "is_noise_only"):
                assert row[name] == getattr(sample, name)
            assert (row["reference"], row["hypothesis"]) == (sample.text, "x")
            assert row["callsigns"] == list(sample.callsigns)
            for name in ("wpm", "snr_db"):
                assert row[name] == pytest.approx(getattr(sample, name), nan_ok=True)
            noise.add(row["is_noise_only"])
    assert noise == {True, False}


def test_the_splits_that_a_recipe_reads(tmp_path, capsys):
    write_set(tmp_path / "set", 30, MIX)
    whole = recordings.read_splits(tmp_path / "set", Checks())["train"]
    longest = float(np.median(whole.seconds(0)))
    capsys.readouterr()
    checks = Checks(0.1, longest, cache_audio=str(tmp_path / "cache"), max_samples=4)
    splits = recordings.read_splits(tmp_path / "set", checks)
    fits = np.flatnonzero(whole.seconds(0) <= longest)
    train = splits["train"]
    chosen = fits[draw(len(fits), Checks(max_samples=4))]
    assert list(train.corpus.paths) == [whole.corpus.paths[i] for i in chosen]
    assert set(splits) == {"train", "val", "test"}
    message = f"{24 - len(fits)}  longer than {longest:g} s (--max_duration)"
    assert message in capsys.readouterr().out
    for _ in range(2):  # the second time from the cache
        waveform, text, name, spans = train.load(1, 5)
        row = train.row(1, "")
        assert (text, name, spans) == (row["reference"], row["file"], None)
        assert np.array_equal(waveform.numpy(), soundfile.read(name, dtype="float32")[0])
    assert len(list((tmp_path / "cache").rglob("*.f32"))) == 1
    turned = train.select(np.array([3, 2, 1, 0]))
    assert turned.tags == train.tags[::-1] and turned.fingerprint() != train.fingerprint()


def test_the_test_set_is_the_evaluation_set_if_there_is_no_other(other_set):
    folder = other_set(["1,a.wav,E"], name="splits/test.csv")
    splits = recordings.read_splits(folder, Checks())
    assert list(splits) == ["test", "val"] and splits["val"] is splits["test"]
    with pytest.raises(DataError, match=r"no usable utterance: 1 x shorter than 1 s"):
        recordings.read_splits(folder, Checks(min_duration=1.0))


def test_a_manifest_becomes_recordings(tmp_path, wav, json_lines, capsys):
    wav(tmp_path / "a.wav", 2.0)
    rows = [
        {"audio_filepath": "a.wav", "text": "CQ DE K1ABC <SK>", "offset": 0.5, "duration": 1.0},
        {"audio_filepath": "a.wav", "text": "A_B"},
    ]
    corpus = load_corpus(json_lines(tmp_path / "m.json", rows), alphabet.normalise, Checks())[0]
    part = recordings.from_corpus(corpus, "train set", False)
    assert "1  text has characters without a Morse code" in capsys.readouterr().out
    row = part.row(0, "")
    assert (row["callsigns"], row["reference"]) == (["K1ABC"], "CQ DE K1ABC <SK>")
    assert np.isnan(row["wpm"]) and not row["is_noise_only"]
    assert part.seconds(0).tolist() == [1.0] and len(part.load(0, 0)[0]) == RATE
    report_checked({"train": part.corpus})  # --check_data
    assert "checked: 1 utterances in train can be used" in capsys.readouterr().out


@pytest.fixture
def other_set(tmp_path, wav):
    """other_set(rows, header, name): a folder of other origin, with two good files and a table."""

    def write(rows, header="id,audio_file,text", name="metadata.csv"):
        for file in ("a", "b"):
            wav(tmp_path / "audio" / f"{file}.wav", 0.5)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join([header, *rows]) + "\n")
        return tmp_path

    return write


def test_data_sets_of_others(other_set):
    rows = ["a.wav,cq de k1abc <BT> ur 599", "audio/b.wav,"]
    folder = other_set(rows, "audio_file,text", "splits/train.csv")
    header = "id,audio_file,text,is_noise_only,mystery"
    other_set(["1,audio/b.wav,,TRUE,99"], header, "splits/val.csv")
    with pytest.raises(DataError, match=r"1 utterances rejected \(--strict_data\)"):
        recordings.read_splits(folder, Checks(strict=True))
    parts = recordings.read_splits(folder, Checks())
    assert list(parts) == ["train", "val"] and len(parts["train"]) == 1  # b.wav has no text
    row = parts["train"].row(0, "")
    assert (row["reference"], row["callsigns"]) == ("CQ DE K1ABC = UR 599", ["K1ABC"])
    assert parts["train"].seconds(0).tolist() == [0.5] and np.isnan(row["snr_db"])
    row = parts["val"].row(0, "")
    assert row["reference"] == "" and row["is_noise_only"]


def test_a_data_set_without_splits_is_divided_by_its_ids(other_set):
    ids = range(300)
    parts = recordings.read_splits(other_set([f"{i},a.wav,E" for i in ids]), Checks())
    sizes = [len(parts[split]) for split in ("train", "val", "test")]
    assert sum(sizes) == 300 and 210 < sizes[0] < 270 and min(sizes) > 15
    again = recordings.read_splits(other_set([f"{i},b.wav,T" for i in reversed(ids)]), Checks())
    assert [len(again[split]) for split in ("train", "val", "test")] == sizes


LONG = "id,audio_file,text,wpm,duration,is_noise_only,snr_db"


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("id,path,text", ["1,a.wav,E"], "1 x no column audio_file"),
        ("id,audio_file,text", [], "its tables have no rows"),
        ("id,audio_file,text", ["1,,E"], "1 x audio_file is empty"),
        ("id,audio_file,text", ["1,a.wav," + "E" * 10_001], "1 x text is longer than 10000 char"),
        (LONG, ["1,a.wav,E,fast,1,0,3"], "1 x wpm is not a number"),
        (LONG, ["1,a.wav,E,20,1,0,inf"], "1 x snr_db is negative or infinite"),
        (LONG, ["1,a.wav,E,20,1,maybe,1"], "1 x is_noise_only is neither true nor false"),
        (LONG, ["1,a.wav,E,20,9,0,1"], r"1 x file is shorter than its duration in the table"),
        (LONG, ["1,a.wav,E,20,,yes,1"], "1 x noise only, with a text"),
        (LONG, ["1,a.wav,A_B,20,,,1"], "1 x text has characters without a Morse code"),
    ],
)
def test_damaged_tables_are_answered_in_one_line(other_set, header, rows, message):
    with pytest.raises(DataError, match=message) as caught:
        recordings.read_splits(other_set(rows, header), Checks())
    assert "\n" not in str(caught.value)


# --- evaluation -----------------------------------------------------------------------------------


def row(reference, hypothesis, **more):
    return {
        "file": "a.wav",
        "reference": reference,
        "hypothesis": hypothesis,
        "condition": "clean",
        "contest_type": "CQWW",
        "sample_type": "call",
        "wpm": 20.0,
        "snr_db": 3.0,
        "is_noise_only": False,
        "callsigns": [],
        "exchange": "",
        **more,
    }


ROWS = [
    row("TEST K1ABC K1ABC", "TEST K1ABC K1ABD", callsigns=["K1ABC"], snr_db=-0.1),
    row(
        "K1A W1AW 5NN 14",
        "K1A W1AX 5NN 1 4",
        callsigns=["K1A", "W1AW"],
        exchange="5NN 14",
        wpm=24.9,
        contest_type="IARU",
    ),
    row("5NN 14?", "5nn 14?", exchange="5NN", wpm=25.0, condition="wide", snr_db=4.0),
    row("73 <SK>", "73 <AS>", contest_type="NONE", sample_type="words", snr_db=float("nan")),
    row("", "", is_noise_only=True, snr_db=float("nan")),
    row("", "E", is_noise_only=True, snr_db=float("nan")),
    row("", " ", is_noise_only=True, snr_db=float("nan")),
]


def test_metrics_by_group():
    tables = scores.evaluation_tables(ROWS)
    whole = tables["all"]["all"]
    assert whole["samples"] == 7
    assert whole["wer"] == (1 + 3 + 0 + 1 + 0 + 1) / 11  # 1 4: a substitution and an insertion
    assert whole["cer"] == (1 + 2 + 0 + 1 + 0 + 1) / (16 + 15 + 7 + 4)  # <SK> is one symbol
    assert (whole["callsigns_right"], whole["callsigns_count"]) == (2 / 3, 3)
    assert (whole["exchanges_right"], whole["exchanges_count"]) == (1 / 2, 2)
    assert (whole["perfect_right"], whole["perfect_count"]) == (1 / 4, 4)
    assert (whole["noise_only_right"], whole["noise_only_count"]) == (2 / 3, 3)
    sizes = {
        table: {name: group["samples"] for name, group in groups.items()}
        for table, groups in tables.items()
    }
    assert sizes == {
        "all": {"all": 7},
        "condition": {"clean": 6, "wide": 1},
        "contest": {"CQWW": 5, "IARU": 1, "NONE": 1},
        "sample type": {"call": 6, "words": 1},
        "speed": {"20 to 25 WPM": 3, "25 to 30 WPM": 1},
        "SNR": {"-4 to 0 dB": 1, "0 to 4 dB": 1, "4 to 8 dB": 1},
    }
    assert tables["contest"]["NONE"]["exchanges_right"] is None


def test_the_tables_are_printed_and_written(tmp_path, capsys):
    tables = scores.evaluation_tables(ROWS)
    scores.print_tables(tables)
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == 6 and blocks[0].split()[:4] == ["%", "samples", "WER", "CER"]
    assert all(len({len(line) for line in block.splitlines()}) == 1 for block in blocks)
    shares = "all 7 54.55 11.90 25.00 66.67 50.00 66.67"
    assert blocks[0].splitlines()[1].split() == shares.split()
    path = tmp_path / "evaluation.json"
    scores.write_evaluation(tables, path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == tables
    with pytest.raises(RunError, match="cannot write"):
        scores.write_evaluation(tables, tmp_path)
    scores.print_tables(scores.evaluation_tables([]))
