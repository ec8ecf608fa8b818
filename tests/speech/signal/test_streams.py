"""Sound by FFmpeg's libraries: MP3 of every kind, joined files, WAVs whose sizes are wrong, videos.

Nothing here is compared with what libsndfile says of an MP3: the reference is what was encoded, and
a count of its frames."""

import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch

from speech.data import headers
from speech.signal import audio, streams

RATE = 22_050


def speech(seconds: float, rate: int = RATE) -> np.ndarray:
    """(T,) loud and quiet by turns, so that a varying bit rate varies."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal(len(time))
    loud = np.sin(2 * np.pi * 0.2 * time) > 0
    return (0.2 * np.sin(2 * np.pi * 210 * time) + 0.1 * loud * noise).astype(np.float32)


def encoded(path: Path, seconds: float, rate: int = RATE, **options) -> bytes:
    soundfile.write(path, speech(seconds, rate), rate, **options)
    return path.read_bytes()


def frames_of(mp3: bytes) -> list[int]:
    """Where the frames begin in an MP3 of layer III without tags."""
    bits = {1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)}
    bits[0] = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
    places = [0]
    while places[-1] < len(mp3):
        head = mp3[places[-1] :]
        first = head[1] >> 3 & 1
        rate = (44_100, 48_000, 32_000)[head[2] >> 2 & 3] // (1 if first else 2)
        size = (144 if first else 72) * 1000 * bits[first][head[2] >> 4] // rate
        places.append(places[-1] + size + (head[2] >> 1 & 1))
    return places


def bare(mp3: bytes) -> bytes:
    """Without the frame that states the length."""
    assert b"Xing" in mp3[:200] or b"Info" in mp3[:200]
    return mp3[frames_of(mp3)[1] :]


def id3(picture: bytes) -> bytes:
    size = len(picture) + 10
    sizes = bytes(size >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + sizes + b"APIC" + struct.pack(">I", len(picture)) + b"\0\0" + picture


def kinds_of(mp3: bytes) -> dict[str, bytes]:
    picture = np.random.default_rng(1).integers(0, 255, 20_000, np.uint8).tobytes()
    return {
        "with a length frame": mp3,
        "without": bare(mp3),
        "tags": id3(picture) + mp3 + b"TAG" + bytes(125),
        "without, tags": id3(picture) + bare(mp3) + b"TAG" + bytes(125),
        "joined": mp3 + mp3,
        "joined, tags": mp3 + b"TAG" + bytes(125) + id3(b"\0" * 500) + mp3,
        "without, joined": bare(mp3) + bare(mp3),
        "without, cut": bare(mp3)[: frames_of(bare(mp3))[100] + 20],
    }


SECONDS = {"joined": 14.0, "joined, tags": 14.0, "without, joined": 14.0}
SECONDS["without, cut"] = 100 * 576 / RATE


@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
def test_mp3_is_read_to_its_end(tmp_path, mode):
    mp3 = encoded(tmp_path / "a.mp3", 7.0, bitrate_mode=mode, compression_level=0.5)
    for kind, content in kinds_of(mp3).items():
        path = tmp_path / f"{kind}.mp3"
        path.write_bytes(content)
        seconds, fault = headers.probe(str(path))
        waveform, rate = audio.read_at_its_rate(str(path))
        in_pieces = torch.cat(list(audio.read_in_pieces(str(path), RATE)))
        assert (fault, rate) == ("", RATE), kind
        assert seconds == pytest.approx(len(waveform) / RATE, abs=1e-6), kind
        # Encoders add up to two frames at the start and one at the end of each.
        assert 0 <= seconds - SECONDS.get(kind, 7.0) < 6 * 576 / RATE, kind
        assert torch.equal(in_pieces, waveform), kind
        for offset in (0.3, seconds - 0.7):  # at random places, the same samples
            part = audio.read_audio(str(path), RATE, offset, 0.5)
            first = round(offset * RATE)
            assert torch.equal(part, waveform[first : first + RATE // 2]), (kind, offset)


def test_damage_within_an_mp3_is_named(tmp_path):
    mp3 = encoded(tmp_path / "a.mp3", 5.0)
    place = frames_of(mp3)[50]
    (tmp_path / "a.mp3").write_bytes(mp3[:place] + bytes(3000) + mp3[place + 3000 :])
    with pytest.raises(audio.BadAudio, match=r"a\.mp3 is truncated or damaged at byte \d+$"):
        audio.read_audio(str(tmp_path / "a.mp3"), RATE)


def test_joined_mp3_of_two_rates_is_refused(tmp_path):
    both = encoded(tmp_path / "a.mp3", 1.0) + encoded(tmp_path / "b.mp3", 1.0, 44_100)
    (tmp_path / "a.mp3").write_bytes(both)
    with pytest.raises(audio.BadAudio, match=r"a\.mp3 changes its sample rate"):
        audio.read_audio(str(tmp_path / "a.mp3"), RATE)


@pytest.mark.parametrize(
    ("name", "options"), [("a.ogg", {}), ("a.opus", {"format": "OGG", "subtype": "OPUS"})]
)
@pytest.mark.parametrize("seconds", [(3.0, 3.0), (5.0, 0.4)])
def test_chained_ogg_is_read_to_its_end(tmp_path, name, options, seconds):
    rate = 16_000
    path = tmp_path / name
    path.write_bytes(b"".join(encoded(path, each, rate, **options) for each in seconds))
    waveform = audio.read_audio(str(path), rate)
    assert len(waveform) / rate == pytest.approx(sum(seconds), abs=0.05)
    assert headers.probe(str(path))[0] == pytest.approx(len(waveform) / rate, abs=1e-3)
    part = audio.read_audio(str(path), rate, 2.5, 2.7)  # beyond the seam, or before it
    torch.testing.assert_close(part[50:-50], waveform[40_050:83_150], rtol=0, atol=2e-3)


@pytest.mark.parametrize("tag", [b"", id3(b"\0" * 500)])
def test_joined_flac_is_refused(tmp_path, tag):
    flac = encoded(tmp_path / "a.flac", 1.0)
    (tmp_path / "a.flac").write_bytes(tag + flac + encoded(tmp_path / "b.flac", 0.3))
    assert headers.probe(str(tmp_path / "a.flac"))[1] == headers.CONTINUES
    (tmp_path / "a.flac").write_bytes(tag + flac)
    assert headers.probe(str(tmp_path / "a.flac")) == (1.0, "")


def test_a_flac_of_unknown_length_is_read(tmp_path):
    data = bytearray(encoded(tmp_path / "a.flac", 2.0))
    data[21] &= 0xF0  # 36 bits of STREAMINFO: an encoder writes 0 to a pipe
    data[22:26] = bytes(4)
    (tmp_path / "a.flac").write_bytes(data)
    assert headers.probe(str(tmp_path / "a.flac")) == (2.0, "")


def wav_head(stated: int, form: bytes = b"RIFF") -> bytes:
    return struct.pack(
        "<4sI8sIHHIIHH4sI", form, min(stated + 36, 2**32 - 1), b"WAVEfmt ", 16, 1, 1, 16_000,
        32_000, 2, 16, b"data", stated,
    )  # fmt: skip


PCM = (speech(2.0, 16_000) * 32_767).astype("<i2").tobytes()
LIST = b"LIST" + struct.pack("<I", 20_000) + bytes(20_000)
WAVS = {
    "sound": (wav_head(len(PCM)) + PCM, 2.0),
    "texts behind the sound": (wav_head(len(PCM)) + PCM + LIST, 2.0),
    "from a pipe": (wav_head(2**32 - 1) + PCM, 2.0),
    "never closed": (wav_head(0) + PCM, headers.CONTINUES),
    "closed long before": (wav_head(16_000) + PCM, headers.CONTINUES),
    "joined": (2 * (wav_head(len(PCM)) + PCM), "audio is unreadable"),
}


@pytest.mark.parametrize("kind", WAVS)
def test_a_wav_is_read_to_its_end_or_refused(tmp_path, kind):
    content, expected = WAVS[kind]
    (tmp_path / "a.wav").write_bytes(content)
    seconds, fault = headers.probe(str(tmp_path / "a.wav"))
    assert (fault or seconds) == expected
    if fault:
        with pytest.raises(audio.BadAudio, match=r"a\.wav cannot be used: audio"):
            audio.read_audio(str(tmp_path / "a.wav"), 16_000)
    else:
        assert len(audio.read_audio(str(tmp_path / "a.wav"), 16_000)) == 32_000


@pytest.mark.parametrize("stated", [320_000, 2**32 - 1])
def test_a_wav_beyond_four_gibibytes_is_refused(tmp_path, stated):
    with open(tmp_path / "a.wav", "wb") as file:  # sparse
        file.write(wav_head(stated) + PCM)
        file.truncate(2**32 + 320_044)
    assert headers.probe(str(tmp_path / "a.wav"))[1] == headers.CONTINUES


def made(path: Path, codec: str, seconds: float = 6.0, rate: int = 16_000) -> Path:
    """A file that libsndfile does not know."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(speech(seconds, rate)[None], "fltp", "mono")
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.format.name, "mono", rate, frame_size=size)
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.m4a", "aac"), ("b.m4a", "alac"), ("a.aac", "aac"), ("a.webm", "libopus"), ("a.ts", "aac")],
)
def test_other_formats_and_their_parts(tmp_path, name, codec):
    rate = 48_000 if codec == "libopus" else 16_000
    path = str(made(tmp_path / name, codec, rate=rate))
    seconds, fault = headers.probe(path)
    waveform, own_rate = audio.read_at_its_rate(path)
    assert not fault and own_rate == rate and seconds == len(waveform) / rate
    assert seconds == pytest.approx(6.0, abs=0.15)
    for offset in (0.2, 3.3, 4.4):
        part = audio.read_audio(path, rate, offset, 1.0)
        first = round(offset * rate)
        # Matroska's times are whole milliseconds.
        ways = [waveform[first + n : first + n + rate] for n in range(-48, 49)]
        assert min(float((part - way).abs().max()) for way in ways) < 2e-3, offset


def test_a_cut_recording_of_a_phone_is_refused(tmp_path):
    m4a = made(tmp_path / "a.m4a", "aac")
    m4a.write_bytes(m4a.read_bytes()[:-1000])  # its index was at the end
    assert headers.probe(str(m4a))[1] == "audio is unreadable"


@pytest.mark.parametrize(
    "name", ["-v", "|true", "http:a.m4a", "concat:a|b", "file:a.m4a", "a b\n.m4a", "~", "$HOME"]
)
def test_any_file_name_is_a_plain_name(tmp_path, monkeypatch, name):
    made(tmp_path / "a.m4a", "aac", 1.0).rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert len(audio.read_audio(name, 16_000)) > 15_000


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {}\n",
    ],
)
def test_no_playlist_reads_another_file(tmp_path, playlist):
    other = made(tmp_path / "other.ts", "aac", 1.0)
    assert len(audio.read_audio(str(other), 16_000)) > 15_000
    (tmp_path / "a.m4a").write_text(playlist.format(other.name))
    assert headers.probe(str(tmp_path / "a.m4a"))[1] == "audio is unreadable"


def test_every_kind_of_samples_becomes_the_mean_of_the_channels():
    levels = np.array([[0.5, -0.25], [0.25, 0.25]], np.float32)  # (channel, time)
    for name, scale in (("u8", 128), ("s16", 2**15), ("s32", 2**31), ("flt", 1), ("dbl", 1)):
        samples = levels * scale + (128 if name == "u8" else 0)
        for planar in (True, False):
            layout = samples if planar else samples.T.reshape(1, -1)
            form = name + ("p" if planar else "")
            kind = {"u8": "u1", "s16": "i2", "s32": "i4", "flt": "f4", "dbl": "f8"}[name]
            frame = av.AudioFrame.from_ndarray(layout.astype(kind), form, "stereo")
            assert streams._mono(frame, None).tolist() == [0.375, 0.0], form
            assert streams._mono(frame, 1).tolist() == [0.25, 0.25], form
