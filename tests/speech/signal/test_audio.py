"""Reading audio: rates, formats, segments, bad files, the cache."""

import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, RunError, UsageError
from speech.data import headers
from speech.signal import audio, spectra
from tests.peers import resampled

# --- reading audio --------------------------------------------------------------------------------


def sweep(seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    """(T, channels) of slowly rising tones below 3 kHz, each channel its own."""
    time = np.arange(round(seconds * rate)) / rate
    return np.stack(
        [0.4 * np.sin(2 * np.pi * (300 + 200 * c + 400 * time) * time) for c in range(channels)],
        axis=1,
    )


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_rates_and_channels(tmp_path, rate, channels):
    samples = sweep(0.7, rate, channels)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    waveform = audio.read_audio(str(tmp_path / "a.wav"), 16_000)
    mono = torch.from_numpy(samples.mean(axis=1))
    assert waveform.dtype == torch.float32 and waveform.shape == (round(0.7 * 16_000),)
    exact = mono
    if rate != 16_000:
        exact = torch.from_numpy(resampled(mono.numpy(), rate, 16_000))
    torch.testing.assert_close(waveform.double(), exact, atol=2e-6, rtol=0)
    # And against the same sweep sampled at the target rate, away from the ends.
    direct = torch.from_numpy(sweep(0.7, 16_000, channels).mean(axis=1)).float()
    torch.testing.assert_close(waveform[200:-200], direct[200:-200], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("a.wav", {"subtype": "PCM_U8"}, 2 / 256),
        ("a.wav", {"subtype": "PCM_16"}, 1e-4),
        ("a.wav", {"subtype": "PCM_32"}, 1e-6),
        ("a.wav", {"subtype": "DOUBLE"}, 1e-7),
        ("a.wav", {"subtype": "ULAW"}, 0.02),
        ("a.flac", {"subtype": "PCM_16"}, 1e-4),
        ("a.ogg", {}, 0.05),
        ("a.mp3", {}, 0.05),
        ("a.aiff", {}, 1e-4),
        ("no_suffix", {"format": "WAV"}, 1e-4),
    ],
)
def test_sample_formats(tmp_path, name, options, tolerance):
    samples = sweep(0.5, 16_000)
    soundfile.write(tmp_path / name, samples, 16_000, **options)
    waveform = audio.read_audio(str(tmp_path / name), 16_000)
    torch.testing.assert_close(
        waveform, torch.from_numpy(samples[:, 0]).float(), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
@given(offset=st.floats(0, 1.9), duration=st.none() | st.floats(0.01, 3))
def test_segments_are_parts_of_the_file(tmp_path_factory, suffix, offset, duration):
    path = tmp_path_factory.getbasetemp() / f"segments.{suffix}"
    if not path.exists():
        soundfile.write(path, sweep(2.0, 16_000), 16_000)
    whole = audio.read_audio(str(path), 16_000)
    start = round(offset * 16_000)
    end = len(whole) if duration is None else min(len(whole), start + round(duration * 16_000))
    torch.testing.assert_close(
        audio.read_audio(str(path), 16_000, offset, duration), whole[start:end], atol=1e-6, rtol=0
    )


def terms_of(source: int, target: int, monkeypatch) -> tuple[int, int]:
    """The ratio that `resample` uses, without its filter."""
    terms = []
    monkeypatch.setattr(spectra, "resample", lambda waveform, *pair: terms.append(pair))
    audio.resample(torch.zeros(1), source, target)
    return terms[0] if terms else (1, 1)


def test_the_filter_of_any_rate_is_small_and_exact_for_usual_rates(monkeypatch):
    usual = (1, 8, 11.025, 12, 22.05, 24, 32, 44.1, 48, 96, 192, 768)  # kHz
    for rate in (round(1000 * each) for each in usual):
        source, target = terms_of(rate, 16_000, monkeypatch)
        assert source * 16_000 == target * rate
    low, high = headers.RATES
    for rate in (low, low + 1, 7_999, 15_999, 16_001, high - 1, high, *range(low, high, 4_999)):
        source, target = terms_of(rate, 16_000, monkeypatch)
        assert min(source, target) >= 1 and max(source, target) <= audio.LARGEST_TERM
        assert abs(source / target * 16_000 / rate - 1) <= 6e-4


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_change_speed(factor):
    """A tone of 1000 Hz becomes one of 1000 x factor Hz, and its length is divided by the
    factor."""
    waveform = torch.sin(2 * math.pi * 1000 * torch.arange(16_000) / 16_000)
    changed = audio.change_speed(waveform, np.float32(factor))
    assert len(changed) == math.ceil(16_000 / factor)
    spectrum = torch.fft.rfft(changed * torch.hann_window(len(changed))).abs()
    assert spectrum.argmax() * 16_000 / len(changed) == pytest.approx(1000 * factor, abs=2)


# --- bad audio ------------------------------------------------------------------------------------


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def bad_file(folder: Path, kind: str) -> str:
    """Writes a bad file and returns its path. A kind is a suffix, and what is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix, _, wrong = kind.partition(" ")
    path, rate = folder / f"हांव {wrong}.{suffix}", 16_000
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4 * rate)
    spikes = {"not a number": np.nan, "infinite": 1e300, "too loud": -1e30}
    if wrong == "folder":
        path.mkdir()
    elif wrong == "pipe":
        os.mkfifo(path)
    elif wrong == "text":
        path.write_text("not audio")
    elif wrong == "empty":
        path.touch()
    elif wrong == "samples":
        path.write_bytes(bytes(1000))
    elif wrong == "no samples":
        soundfile.write(path, noise[:0], rate)
    elif wrong in spikes:
        noise[1000] = spikes[wrong]
        soundfile.write(path, noise, rate, subtype="DOUBLE" if wrong == "infinite" else "FLOAT")
    elif wrong.startswith("rate of "):
        write_header(path, int(wrong.split()[2]), 1)
    elif wrong.endswith(" channels"):
        write_header(path, rate, int(wrong.split()[0]))
    elif wrong != "missing":
        opus = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
        soundfile.write(path, noise, rate, **opus)
        data = bytearray(path.read_bytes())
        if wrong == "damaged":
            middle = len(data) // 2
            data[middle : middle + 1000] = bytes(1000)
        elif wrong == "claims days":
            data[21] |= 0x0F
            data[22:26] = b"\xff" * 4
        path.write_bytes(halved(data) if wrong == "cut" else data)
    return str(path)


def write_header(path: Path, rate: int, channels: int) -> None:
    """A WAV of 6000 bytes that states this rate and this number of channels."""
    sizes = (min(rate * 2 * channels, 2**32 - 1), 2 * channels % 65_536, 16)
    form = struct.pack("<IHHIIHH", 16, 1, channels % 65_536, rate, *sizes)
    head = b"RIFF" + struct.pack("<I", 6036) + b"WAVEfmt " + form + b"data"
    path.write_bytes(head + struct.pack("<I", 6000) + bytes(6000))


UNREADABLE = "cannot be used: audio is unreadable"
TRUNCATED = "cannot be used: audio is truncated"
NOT_FINITE = "holds samples that are not finite (NaN or infinity)"
RATE = "cannot be used: sample rate is not between 1000 and 768000 Hz"
BAD_FILES = {
    "wav missing": "cannot be used: file is missing",
    "wav folder": "cannot be used: not a file but a folder",
    "wav pipe": "cannot be used: not a regular file",
    "wav empty": "cannot be used: file is empty",
    "wav text": UNREADABLE,
    "raw samples": UNREADABLE,
    "wav not a number": NOT_FINITE,
    "wav too loud": "holds samples of up to 1e+30, where 1 is full scale",
    "wav no samples": "cannot be used: audio is empty",
    "wav rate of 999": RATE,
    "wav rate of 2147483647": RATE,
    "wav 1000 channels": "cannot be used: audio has more than 64 channels",
    "wav 65535 channels": UNREADABLE,
    "flac cut": "is truncated or damaged: flac decoder lost sync",
    "flac damaged": "is truncated or damaged: unknown error in flac decoder",
    "wav cut": TRUNCATED,
    "aiff cut": TRUNCATED,
    "ogg cut": TRUNCATED,
    "opus cut": TRUNCATED,
}


def in_pieces(path: str, rate: int) -> torch.Tensor:
    return torch.cat(list(audio.read_in_pieces(path, rate)))


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_audio_is_one_line_that_names_the_file(tmp_path, no_hang, kind):
    path = bad_file(tmp_path / "my audio", kind)
    for read in (audio.read_audio, in_pieces):
        with pytest.raises(audio.BadAudio) as error:
            read(path, 16_000)
        assert str(error.value) == f"{path} {BAD_FILES[kind]}"
        assert error.value.path == path


@pytest.mark.parametrize("rate", [16_000, 8_000, 44_100, 48_000, 11_025, 96_000])
def test_a_file_in_pieces_is_the_whole_file(tmp_path, rate):
    for seconds in (0.001, 0.5, 3.21):
        path = tmp_path / f"{seconds}.flac"
        soundfile.write(path, sweep(seconds, rate, 2), rate)
        whole = audio.read_audio(str(path), 16_000)
        pieces = list(audio.read_in_pieces(str(path), 16_000))
        assert all(len(piece) <= 16_000 + 200 for piece in pieces)
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-6)


def test_what_a_header_states_is_checked_before_training_too(tmp_path):
    for kind, reason in BAD_FILES.items():
        if reason.startswith("cannot be used: "):
            fault = headers.probe(bad_file(tmp_path / kind, kind))[1]
            assert f"cannot be used: {fault}" == reason


def test_audio_without_permission_to_read_says_so(tmp_path, wav, monkeypatch):
    path = wav(tmp_path / "a.wav")
    monkeypatch.setattr(headers.os, "access", lambda *mode: False)  # root may read everything
    assert headers.probe(path)[1] == "file cannot be read: Permission denied"
    with pytest.raises(
        audio.BadAudio, match=r"a\.wav cannot be used: file cannot be read: Permission denied$"
    ):
        audio.read_audio(path, 16_000)


def test_a_header_that_claims_days(tmp_path):
    """2^36 samples, 256 GiB: either the memory is refused, or the file ends first."""
    path = bad_file(tmp_path, "flac claims days")
    with pytest.raises(audio.BadAudio) as error:
        audio.read_audio(path, 16_000)
    assert str(error.value).startswith(path + " ")


def test_a_segment_beyond_the_end(tmp_path, wav):
    path = wav(tmp_path / "a.wav")
    with pytest.raises(audio.BadAudio) as error:
        audio.read_audio(path, 16_000, 2.5, 1.0)
    assert str(error.value) == f"{path} is empty from 2.5 s on"


def test_audio_files(tmp_path, wav):
    wanted = [wav(tmp_path / "b" / "x y.wav"), wav(tmp_path / "b" / "z" / "a.flac")]
    (tmp_path / "b" / "c.M4A").write_bytes(b"")
    (tmp_path / "b" / "notes.txt").write_text("")
    (tmp_path / "b" / "folder.wav").mkdir()
    files = audio.audio_files([str(tmp_path / "b"), str(tmp_path / "b" / "notes.txt")])
    assert [str(path) for path in files] == [
        str(tmp_path / "b" / "c.M4A"),
        *wanted,
        str(tmp_path / "b" / "notes.txt"),
    ]
    for name, message in (("none", "no such file"), ("b/folder.wav", "no audio file in")):
        with pytest.raises(UsageError, match=message):
            audio.audio_files([str(tmp_path / name)])


def test_cached_audio_is_the_same_to_the_bit_and_follows_changes(tmp_path, wav):
    path, cache = wav(tmp_path / "a b.wav", 1.0, 22_050), str(tmp_path / "cache")
    for part in ((0.0, None), (0.25, 0.5)):
        expected = audio.read_audio(path, 16_000, *part)
        for _ in range(2):
            assert torch.equal(audio.read_cached(cache, path, 16_000, *part), expected)
    assert len(list(Path(cache).rglob("*.f32"))) == 2
    wav(tmp_path / "a b.wav", 0.5, 22_050)
    assert len(audio.read_cached(cache, path, 16_000)) == 8000


@pytest.mark.parametrize("size", [0, 4, 200, 201, 64_008])
def test_a_damaged_entry_of_the_cache_is_replaced(tmp_path, wav, size):
    path, cache = wav(tmp_path / "a.wav"), tmp_path / "cache"
    expected = audio.read_cached(str(cache), path, 16_000)
    (entry,) = cache.rglob("*.f32")
    good = entry.read_bytes()
    os.truncate(entry, size)
    assert torch.equal(audio.read_cached(str(cache), path, 16_000), expected)
    assert entry.read_bytes() == good


def test_a_cache_that_cannot_be_written_says_so(tmp_path, wav):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"--cache_audio .*file: Not a directory"):
        audio.read_cached(str(tmp_path / "file"), wav(tmp_path / "a.wav"), 16_000)
    with pytest.raises(DataError, match=r"gone\.wav cannot be read: No such file"):
        audio.read_cached(str(tmp_path / "cache"), str(tmp_path / "gone.wav"), 16_000)


def test_one_channel_is_read_alone(tmp_path):
    path = str(tmp_path / "a.wav")
    soundfile.write(path, np.array([[0.5, -0.25]] * 16_000), 16_000)
    for channel, level in ((0, 0.5), (1, -0.25), (None, 0.125)):
        waveform = audio.read_cached(str(tmp_path / "cache"), path, 16_000, 0.2, 0.5, channel)
        assert len(waveform) == 8000 and abs(float(waveform[4000]) - level) < 1e-3
    with pytest.raises(audio.BadAudio, match=r"has no channel 2: it has 2, counted from 0$"):
        audio.read_audio(path, 16_000, channel=2)
