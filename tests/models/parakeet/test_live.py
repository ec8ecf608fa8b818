"""Words of a stream: the text is that of the whole recording, and grows only. Standard input, and
what is written."""

import io
import itertools
import json
import struct

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from models.parakeet import live
from models.parakeet.live import Lines, Written
from speech.decoding import timed
from speech.decoding.timed import Token
from speech.signal import audio
from speech.writing import subtitles
from tests.models.parakeet.test_decoding import BYTES, make

SECONDS = 0.08  # of a frame
WORDS = ["▁so", "▁a", "▁", "▁¿", "ng", "x", ".", ",", "?", "ma", "▁Yes.", "<de-DE>", "▁<fr-FR>"]
TOKENIZER = make(["<unk>", *WORDS, *BYTES])
CHINESE = make(["<unk>", "你", "好", "。", "吗", "▁", "▁a", "，"])


def streamed(tokens: list[Token], ends: list[int], tokenizer=TOKENIZER) -> tuple[list[str], list]:
    """What is shown after each chunk and at the end, and the rows, of tokens that come in chunks
    which end at these frames."""
    shown: list[str] = []
    rows: list[dict] = []
    lines = Lines(tokenizer, SECONDS, lambda text: shown.append(text), rows.append)
    parts = []
    before = 0
    for end in ends:
        lines.add([token for token in tokens if before <= token.frame < end], end)
        parts.append("".join(shown))
        before = end
    lines.finish(before)
    return [*parts, "".join(shown)], rows


@st.composite
def spoken(draw, pieces: int):
    tokens = []
    frame = 0
    for _ in range(draw(st.integers(0, 30))):
        frame += draw(st.sampled_from([0, 1, 1, 2, 3, 8, 20, 200]))
        tokens.append(Token(draw(st.integers(0, pieces - 1)), frame, 1))
    chunk = draw(st.sampled_from([1, 2, 4, 7, 14]))
    return tokens, list(range(chunk, frame + 1 + draw(st.integers(1, 40)) + chunk, chunk))


@given(spoken(len(WORDS) + 1))
def test_the_text_is_that_of_the_whole_and_words_have_its_times(case):
    tokens, ends = case
    parts, rows = streamed(tokens, ends)
    whole = timed.transcript(tokens, TOKENIZER, SECONDS, ends[-1])
    assert parts[-1].split() == whole["text"].split()
    for before, after in itertools.pairwise(parts):
        assert after.startswith(before)
    assert parts[-1].endswith("\n") or not parts[-1]
    assert [word for row in rows for word in row["words"]] == whole["words"]
    for row in rows:
        assert (row["start"], row["end"]) == (row["words"][0]["start"], row["words"][-1]["end"])


@given(spoken(len(CHINESE.pieces)))
def test_a_script_without_spaces(case):
    tokens, ends = case
    parts, _ = streamed(tokens, ends, CHINESE)
    text = timed.text_of(tokens, CHINESE)
    assert "".join(parts[-1].split()) == "".join(text.split())
    for before, after in itertools.pairwise(parts):
        assert after.startswith(before)


def told(row: str) -> list[Token]:
    """Of "piece:frame ..."."""
    pairs = [item.split(":") for item in row.split()]
    return [Token(TOKENIZER.pieces.index(piece), int(frame), 1) for piece, frame in pairs]


def test_a_word_is_shown_when_the_next_begins_or_at_a_pause_or_the_end():
    parts, _ = streamed(told("▁so:0 ng:2 ▁a:4 x:5 .:6"), [1, 3, 5, 7, 9, 10, 11])
    assert parts == ["", "", "song", "song", "song", "song", "song ax.", "song ax.\n"]
    # What comes after a pause still belongs to the word.
    parts, _ = streamed(told("▁so:0 ng:9"), [8, 10, 16])
    assert parts == ["so", "so", "song", "song\n"]


def test_a_line_ends_with_its_sentence_a_tag_a_pause_and_after_a_while():
    parts, rows = streamed(told("▁so:0 .:1 ▁a:4 ng:5 ▁so:30 ?:31"), [2, 8, 32, 60])
    assert parts == ["", "so.\n", "so.\nang\n", "so.\nang\nso?", "so.\nang\nso?\n"]
    assert [row["text"] for row in rows] == ["so.", "ang", "so?"]
    assert rows[1] == {
        "start": 0.32,
        "end": 0.48,
        "text": "ang",
        "words": [{"start": 0.32, "end": 0.48, "text": "ang"}],
    }
    parts, _ = streamed(told("▁so:0 .:1 <de-DE>:1 ▁a:40"), [2, 41])
    assert parts == ["so.", "so.\n", "so.\na\n"]
    parts, rows = streamed(told("▁so:0 <de-DE>:1 ▁a:2 ▁<fr-FR>:3 ng:4 ▁a:9"), [2, 10])
    assert parts == ["so", "so\nang", "so\nang a\n"]
    many = " ".join(f"▁a:{5 * number}" for number in range(200))
    parts, rows = streamed(told(many), list(range(10, 1010, 10)))
    lengths = [row["end"] - row["start"] for row in rows]
    assert max(lengths) <= live.LONGEST_LINE + 0.4 and min(lengths[:-1]) > live.LONGEST_LINE - 1
    parts, rows = streamed(told("▁so:0 ▁:40 .:40 ▁a:90"), [45, 95])
    assert parts[-1] == "so .\na\n" and rows[0]["words"][0]["text"] == "so ."


def test_bytes_are_shown_when_they_are_a_character():
    a, b = (TOKENIZER.pieces.index(piece) for piece in ("<0xC3>", "<0xA9>"))
    parts, _ = streamed([*told("▁so:0"), Token(a, 1, 1), Token(b, 30, 1)], [20, 40])
    assert parts == ["so", "soé", "soé\n"]


def test_no_more_is_kept_than_a_line():
    rows = []
    lines = Lines(TOKENIZER, SECONDS, lambda text: None, rows.append)
    for start in range(0, 10_000, 10):
        piece = TOKENIZER.pieces.index("▁so" if start % 50 else "▁Yes.")
        lines.add([Token(piece, start, 1)], start + 10)
        assert len(lines.tokens) <= 6
    assert len(rows) > 190


# --- audio ----------------------------------------------------------------------------------------


@pytest.fixture
def piped(monkeypatch):
    """piped(parts): makes these bytes the reads of standard input."""

    def install(parts: list[bytes]) -> None:
        waiting = iter([*parts, b""])
        monkeypatch.setattr(live.os, "isatty", lambda handle: False)
        monkeypatch.setattr(live.os, "read", lambda handle, size: next(waiting))

    return install


def cut(data: bytes, seed: int) -> list[bytes]:
    edges = sorted(np.random.default_rng(seed).integers(1, len(data), 9).tolist())
    parts = [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]
    return [part for part in parts if part]


@pytest.mark.parametrize("header", [False, True])
def test_standard_input_however_it_is_cut(piped, header):
    samples = np.random.default_rng(0).integers(-32768, 32768, 700, dtype=np.int16)
    data = samples.astype("<i2").tobytes()
    if header:
        data = audio.wav(samples, 16_000)
        data = data[:36] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + data[36:] + b"LIST4567 more"
    for seed in range(10):
        piped([data[:13], *cut(data[13:], seed)] if header else cut(data, seed))
        heard = torch.cat(list(live.standard_input()))
        assert torch.equal(heard * 32768, torch.from_numpy(samples.astype(np.float32)))
    if header:  # a program that writes into a pipe does not know the length
        data = data[:48].replace(struct.pack("<I", 1400), b"\xff" * 4) + data[48:-13]
    piped([data + b"\x01"])  # half a sample
    assert len(torch.cat(list(live.standard_input()))) == 700


def test_a_wav_of_another_form_is_refused(piped):
    stereo = io.BytesIO()
    soundfile.write(stereo, np.zeros((100, 2)), 44_100, format="WAV", subtype="PCM_16")
    piped([stereo.getvalue()])
    with pytest.raises(DataError, match="it has 44100 Hz, 2 channels and 16 bits"):
        list(live.standard_input())
    piped([b"RIFF1234WAVEjunk" + struct.pack("<I", 1 << 31), *[b"x" * 65536] * 4])
    with pytest.raises(DataError, match="it begins like a wav file and has no samples"):
        list(live.standard_input())


@pytest.mark.parametrize("form", "AIFF AU CAF FLAC MP3 OGG RF64 W64 AVI ftyp webm".split())
def test_other_files_are_not_taken_for_samples(form, piped):
    data = {"AVI": b"RIFF1234AVI ", "ftyp": b"\0\0\0 ftypM4A ", "webm": b"\x1aE\xdf\xa3" * 3}
    file = io.BytesIO()
    if form not in data:
        samples = np.random.default_rng(0).uniform(-0.5, 0.5, 16_000)
        soundfile.write(file, samples, 16_000, format=form)
    data = data.get(form, file.getvalue())
    piped([data[:3], data[3:]])
    with pytest.raises(
        DataError, match="it is a file of another form than wav; convert it: ffmpeg"
    ):
        next(live.standard_input())


def test_what_can_be_streamed(tmp_path, wav, piped, monkeypatch):
    path = wav(tmp_path / "a.wav")
    piped([])
    live.check_source([path], None)
    live.check_source([path], 80)
    live.check_source(["-"], 80)
    for paths, milliseconds, message in (
        (["-"], None, "standard input is read with --stream"),
        ([path, path], 80, "it reads one recording"),
        ([str(tmp_path)], 80, "it reads one recording"),
        ([str(tmp_path / "b.wav")], 80, "no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            live.check_source(paths, milliseconds)
    monkeypatch.setattr(live.os, "isatty", lambda handle: True)
    with pytest.raises(UsageError, match="nothing is piped in"):
        live.check_source(["-"], 80)


def test_look_aheads_in_milliseconds():
    config = {"subsampling": 8, "streaming": {"left": 56, "lookaheads": [3, 0, 6, 13]}}
    found = {ms: live.lookahead_of(config, ms) for ms in (80, 160, 320, 560, 1120)}
    assert found == {80: 0, 160: 1, 320: 3, 560: 6, 1120: 13}
    with pytest.raises(UsageError, match="this model has 80, 160, 320, 560, 640, 1120"):
        live.lookahead_of(config, 100)
    with pytest.raises(UsageError, match="hears a recording as a whole"):
        live.lookahead_of({"subsampling": 8}, 80)


# --- output ---------------------------------------------------------------------------------------


def test_lines_are_written_as_they_come_and_earlier_ones_kept(tmp_path, capsys):
    rows = []
    for start, text in ((0.0, "so."), (7.5, "a < b.")):
        words = [{"start": start, "end": start + 0.5, "text": text}]
        rows.append({"start": start, "end": start + 0.5, "text": text, "words": words})
    whole = {"text": "so. a < b.", "words": [word for row in rows for word in row["words"]]}
    for name in ("a.jsonl", "a.srt", "a.vtt"):
        path = tmp_path / name
        path.write_text("earlier", encoding="utf-8")
        written = Written(str(path), "-")
        sizes = []
        for row in rows:
            written.write(row)
            sizes.append(path.stat().st_size)
        written.close()
        assert 0 < sizes[0] < sizes[1] == path.stat().st_size
        assert (tmp_path / f"{name}.earlier-1").read_text(encoding="utf-8") == "earlier"
        text = path.read_text(encoding="utf-8")
        if name == "a.jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            assert lines == [{"file": "-", **row} for row in rows]
        else:
            assert text == subtitles.FORMATS[path.suffix].whole(whole)
    assert capsys.readouterr().err.count("the transcripts that were there") == 3


def test_a_slow_machine_is_named_once(capsys):
    for busy in (0.5, 1.5):
        pace = live.Pace()
        for _ in range(60):
            pace.add(busy, 1.0)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "needs 1.5 s for a second of audio" in err
