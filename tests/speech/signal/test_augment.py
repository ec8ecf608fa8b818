"""Silence, noise and gain: by (seed, epoch, index) alone, at the levels that are drawn."""

import os

import numpy as np
import pytest
import soundfile
import torch

from common.errors import DataError, UsageError
from speech.signal import augment
from speech.signal.audio import SAMPLE_RATE

COUNT = 60
SPEECH = torch.from_numpy(np.random.default_rng(5).normal(0, 0.1, 16_000).astype(np.float32))
SPEECH[: augment.QUIET] = 0  # so the silence at its ends is digital


def make(**changes) -> augment.Augmentation:
    return augment.Augmentation(**{"seed": 1, "count": COUNT, "longest": 30.0, **changes})


@pytest.fixture
def noise_dir(tmp_path):
    """noise_dir(name=(samples, rate), ...) writes files into a folder and returns its path."""

    def write(**files) -> str:
        for name, (samples, rate) in files.items():
            soundfile.write(tmp_path / f"{name}.wav", samples, rate)
        return str(tmp_path)

    yield write
    augment.read_noises.cache_clear()


def hum(seconds: float, rate: int, hertz: float = 500.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz / rate * np.arange(round(seconds * rate)))


def test_lengths_are_those_of_the_waveforms_and_never_above_the_longest():
    data = make(longest=1.5)
    seconds = np.full(COUNT, 1.0)
    expected = data.lengths(seconds, 2)
    actual = [len(data.apply(SPEECH, index, 2)) / SAMPLE_RATE for index in range(COUNT)]
    assert actual == pytest.approx(expected, abs=2 / SAMPLE_RATE)
    assert max(actual) <= 1.5 and min(actual) == 1.0 and len(set(actual)) > 10
    assert (make(longest=1.0).lengths(seconds, 2) == 1.0).all()
    assert (make(longest=0.5).lengths(seconds, 2) == 1.0).all(), "what is longer is not cut"
    ends = data.ends(np.zeros(COUNT), 2)
    assert 0.5 < (ends == 0).mean() < 0.7 and 1 < ends.max() < 3


@pytest.mark.parametrize("source", ["drawn", "files"])
def test_the_level_of_the_noise_is_the_drawn_one(source, noise_dir, monkeypatch):
    monkeypatch.setattr(augment, "NOISY", 1.0)
    monkeypatch.setattr(augment, "GAIN", (-20.0, -20.0))
    files = {}
    if source == "files":
        files = {"noises": augment.read_noises(noise_dir(a=(hum(5, 16_000), 16_000)))}
    speech = SPEECH.double().square().mean()
    levels = []
    for index in range(10):
        for snr_db in (10.0, 30.0):
            monkeypatch.setattr(augment, "SNR", (snr_db, snr_db))
            mixed = 10 * make(**files).apply(SPEECH, index, 0).double()
            ends = make().ends(1.0, 0, index)
            before, after = (ends * SAMPLE_RATE).astype(int)
            noise = mixed - torch.nn.functional.pad(SPEECH.double(), (before, after))
            levels.append(10 * float((speech / noise.square().mean()).log10()) - snr_db)
    assert levels == pytest.approx([0.0] * 20, abs=0.01)


def test_some_utterances_have_no_noise_and_levels_differ():
    outputs = [make().apply(SPEECH, index, 0) for index in range(COUNT)]
    ends = [int(make().ends(1.0, 0, index)[0] * SAMPLE_RATE) for index in range(COUNT)]
    quiet = [float(out[:n].abs().max()) for out, n in zip(outputs, ends, strict=True) if n > 100]
    silent = sum(level == 0 for level in quiet)
    assert 0 < silent < len(quiet)
    assert max(float(out.abs().max()) for out in outputs) <= 1.0
    peaks = {round(float(out.abs().max()), 3) for out in outputs}
    assert len(peaks) > 30


def test_silence_sounds_like_the_quietest_part():
    """Its level and its spectrum, which here is that of a band."""
    random = np.random.default_rng(3)
    spectrum = np.fft.rfft(random.normal(0, 1, 48_000))
    spectrum[:3_000] = spectrum[6_000:] = 0  # 1 to 2 kHz
    hiss = 0.01 * np.fft.irfft(spectrum)
    speech = np.concatenate([random.normal(0, 0.1, 16_000), hiss, random.normal(0, 0.1, 16_000)])
    tone = augment.room_tone(random, speech.astype(np.float32), 40_000)
    power = np.abs(np.fft.rfft(tone)) ** 2
    inside = power[2_500:5_000].sum() / power.sum()
    assert inside > 0.9 and 0.5 < tone.std() / hiss.std() < 1.1
    assert abs(np.diff([part.std() for part in np.split(tone, 2)])[0]) < 0.2 * tone.std()


def test_a_larger_share_has_the_utterances_of_a_smaller_one():
    few, many = (augment.chosen(1, 4, 1000, share) for share in (0.2, 0.6))
    assert not (few & ~many).any() and few.mean() == pytest.approx(0.2, abs=0.04)
    assert augment.chosen(1, 4, 1000, 1.0).all() and not augment.chosen(1, 4, 1000, 0.0).any()
    assert not (many == augment.chosen(1, 5, 1000, 0.6)).all(), "another epoch has others"


@pytest.mark.parametrize("samples", [1, 2, 160])
def test_silence_and_very_short_speech(samples):
    for index in range(20):
        out = make().apply(torch.zeros(samples), index, 0)
        assert not out.any() and len(out) >= samples
        assert make().apply(torch.ones(samples), index, 0).isfinite().all()


def test_drawn_noise_is_between_white_and_pink():
    slopes = []
    for seed in range(40):
        noise = augment.drawn_noise(np.random.default_rng(seed), 1 << 15)
        levels = np.log(np.abs(np.fft.rfft(noise))[1:] ** 2 + 1e-20)
        slopes.append(np.polyfit(np.log(np.arange(1, len(levels) + 1)), levels, 1)[0])
    assert -1.05 < min(slopes) < -0.8 and -0.2 < max(slopes) < 0.05
    assert [len(augment.drawn_noise(np.random.default_rng(0), n)) for n in (1, 2, 999)] == [
        1,
        2,
        999,
    ]


def test_noise_from_files_of_any_kind(noise_dir, capsys):
    """Stereo, another rate, shorter than an utterance: all are read at 16 kHz, and repeated."""
    stereo = np.stack([hum(3, 44_100), hum(3, 44_100)], axis=1)
    folder = noise_dir(a=(stereo, 44_100), b=(hum(0.1, 8_000), 8_000))
    noises = augment.read_noises(folder)
    assert noises.seconds == pytest.approx([3.0, 0.1])
    assert "noise: 2 files, 0.1 min" in capsys.readouterr().out
    random = np.random.default_rng(0)
    parts = [noises.draw(random, 8_000) for _ in range(20)]
    assert {len(part) for part in parts} == {8_000}
    for part in parts:
        loudest = np.argmax(np.abs(np.fft.rfft(part)))
        assert loudest * SAMPLE_RATE / len(part) == pytest.approx(500, abs=10)
    assert len({part.tobytes() for part in parts}) > 5, "from random places"
    data = make(noises=noises)
    assert torch.equal(data.apply(SPEECH, 3, 0), data.apply(SPEECH, 3, 0))
    assert not torch.equal(data.apply(SPEECH, 3, 0), make().apply(SPEECH, 3, 0)) or not torch.equal(
        data.apply(SPEECH, 4, 0), make().apply(SPEECH, 4, 0)
    )


def test_what_cannot_be_used_is_named_at_the_start(noise_dir, tmp_path):
    with pytest.raises(UsageError, match="no audio file in"):
        augment.read_noises(noise_dir())
    with pytest.raises(UsageError, match="no such file or folder"):
        augment.read_noises(str(tmp_path / "missing"))
    folder = noise_dir(good=(hum(1, 16_000), 16_000), silent=(np.zeros(100), 16_000))
    with pytest.raises(DataError, match=r"1 of 2 files cannot be used, .*silent\.wav is silent"):
        augment.read_noises(folder)
    (tmp_path / "silent.wav").write_bytes(b"RIFF, but no more")
    with pytest.raises(DataError, match=r"1 of 2 files .*silent\.wav cannot be used") as error:
        augment.read_noises(folder)
    assert "\n" not in str(error.value)
    (tmp_path / "silent.wav").unlink()
    os.mkfifo(tmp_path / "silent.wav")  # which nobody writes to
    with pytest.raises(DataError, match=r"silent\.wav cannot be used: not a regular file"):
        augment.read_noises(folder)
