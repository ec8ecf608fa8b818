"""Subtitles from segments and from words, and the file that they are written to."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.device import Setup
from common.errors import DataError
from speech.decoding import recogniser, transcribing, transcripts
from speech.writing import subtitles

srt = subtitles.FORMATS[".srt"].whole
vtt = subtitles.FORMATS[".vtt"].whole


def test_segments_become_subtitles():
    segments = [
        {"start": 0.0, "end": 59.9996, "text": "hôm nay"},
        {"start": 3725.5, "end": 3726.125, "text": "a < b & c"},
    ]
    row = {"text": "hôm nay a < b & c", "segments": segments}
    assert srt(row) == (
        "1\n00:00:00,000 --> 00:01:00,000\nhôm nay\n\n"
        "2\n01:02:05,500 --> 01:02:06,125\na < b & c\n\n"
    )
    assert vtt(row) == (
        "WEBVTT\n\n00:00:00.000 --> 00:01:00.000\nhôm nay\n\n"
        "01:02:05.500 --> 01:02:06.125\na &lt; b &amp; c\n\n"
    )
    assert srt({"segments": []}) == "" and vtt({"segments": []}) == "WEBVTT\n\n"


def row_of(words: list[tuple[str, float, float]], space: str = " ") -> dict:
    timed = [{"start": start, "end": end, "text": text} for text, start, end in words]
    return {"text": space.join(text for text, _, _ in words), "words": timed, "segments": []}


def test_words_are_grouped_by_sentence_pause_time_and_length():
    spoken = [("one", 0.0), ("two.", 0.5), ("three", 1.0), ("four", 3.0)]  # sentence, pause
    spoken += [("long", 4.0 + number) for number in range(8)]  # six seconds
    spoken += [("x" * 30, 12.0 + number / 10) for number in range(4)]  # two lines
    groups = subtitles.cues(row_of([(text, start, start + 0.1) for text, start in spoken]))
    texts = [group["text"] for group in groups]
    assert texts[:2] == ["one two.", "three"]
    assert " ".join(texts).split() == [text for text, _ in spoken]
    assert all(group["end"] - group["start"] <= subtitles.SECONDS for group in groups)
    assert all(len(line) <= subtitles.LINE for text in texts for line in text.split("\n"))
    assert (groups[0]["start"], groups[0]["end"]) == (0.0, 0.6)
    assert len(groups) < 8


def test_no_subtitle_ends_where_it_begins_or_overlaps_the_next():
    """WebVTT forbids the first. A word of Parakeet can have no length, or end before it begins."""
    words = [("Yes.", 0.8, 0.8), ("No.", 2.0, 1.92), ("Well.", 3.0, 3.4), ("So.", 3.3, 3.3)]
    cues = subtitles.cues(row_of(words))
    assert [(cue["start"], cue["end"]) for cue in cues] == [
        (0.8, 0.9),
        (2.0, 2.1),
        (3.0, 3.3),
        (3.3, 3.4),
    ]
    at_once = [(f"{number}.", 1.0, 1.0) for number in range(3)]
    cues = subtitles.cues(row_of(at_once))
    assert [(cue["start"], cue["end"]) for cue in cues] == [(1.0, 1.1), (1.1, 1.2), (1.2, 1.3)]


SENTENCE = (
    "the old man walked down to the harbour, where the boats lay, and looked at the sea until the"
    " evening came and the lights went on"
)


def test_long_sentences_fill_two_lines():
    words = SENTENCE.split()
    timed = [(word, 0.2 * place, 0.2 * place + 0.2) for place, word in enumerate(words)]
    cues = subtitles.cues(row_of(timed))
    assert [cue["text"] for cue in cues] == [
        "the old man walked down to the harbour,\nwhere the boats lay, and looked at the sea",
        "until the evening came and the lights went\non",
    ]
    times = [(cue["start"], cue["end"]) for cue in cues]
    assert times == [(0.0, pytest.approx(3.4)), (pytest.approx(3.4), pytest.approx(5.2))]


def test_texts_without_spaces():
    """As one segment, and as words that are characters."""
    text = (
        "きょうはとてもいいてんきですから、いっしょにこうえんへいって、おべんとうをたべましょう" * 3
    )
    rows = [{"text": text, "segments": [{"start": 0.0, "end": 30.0, "text": text}]}]
    rows.append(row_of([(each, i / 9, i / 9 + 0.1) for i, each in enumerate(text)], ""))
    for row in rows:
        cues = subtitles.cues(row)
        assert "".join(cue["text"] for cue in cues).replace("\n", "") == text and len(cues) > 2
        assert all(0 < len(line) <= 21 for cue in cues for line in cue["text"].split("\n"))


def test_words_without_spaces_between_them_keep_those_that_are_there():
    words = [("東京は", 0.0, 0.5), ("Tokyo", 0.5, 1.0), ("Tower", 1.0, 1.5), ("です。", 1.5, 2.0)]
    row = {**row_of(words), "text": "東京はTokyo Towerです。"}
    assert [cue["text"] for cue in subtitles.cues(row)] == [row["text"]]


def width(line: str) -> int:
    return len(line.replace("ั", ""))


@given(
    st.lists(
        st.tuples(
            st.text("ab,.!あ、。ัก ", min_size=1, max_size=12), st.floats(-0.2, 3), st.floats(0, 3)
        ),
        max_size=30,
    ),
    st.booleans(),
)
def test_any_words_become_lines_that_fit(spoken, by_word):
    words, now = [], 0.0
    for text, gap, length in spoken:
        if text.strip():
            now = max(0.0, now + gap)
            words.append((text.strip(), now, now + length))
            now += length
    row = row_of(words)
    if not by_word:
        row = {"text": row["text"], "segments": row["words"]}
    cues = subtitles.cues(row)
    said = "".join(row["text"].split())
    assert "".join("".join(cue["text"].split()) for cue in cues) == said
    for cue, following in itertools.pairwise([*cues, None]):
        lines = cue["text"].split("\n")
        assert len(lines) <= 2 and all(lines)
        assert all(width(line) <= subtitles.LINE for line in lines)
        assert cue["end"] - cue["start"] >= subtitles.SHORTEST - 1e-6
        assert following is None or cue["end"] <= following["start"]


def test_words_of_a_recogniser_are_written_and_corrections_kept(wav, tmp_path, capsys):
    path = wav(tmp_path / "a.wav")

    def decode(batch):
        words = [
            {"start": 0.125, "end": 0.5, "text": "hello."},
            {"start": 0.5, "end": 0.75, "text": "bye"},
        ]
        return [{"text": "hello. bye", "words": words, "segments": []} for _ in batch["names"]]

    output = tmp_path / "a.srt"
    how = recogniser.DecodingOptions(transcribe=[path], output=str(output))

    def write() -> str:
        asked = transcripts.output_of(how.output, None, how.transcribe)
        transcripts.check_output(asked, [path])
        transcribing.transcribe_files(how, decode, Setup(), 30.0, parts=("words", "segments"))
        return output.read_text(encoding="utf-8")

    written = write()
    assert written == (
        "1\n00:00:00,125 --> 00:00:00,500\nhello.\n\n2\n00:00:00,500 --> 00:00:00,750\nbye\n\n"
    )
    corrected = written.replace("bye", "Bye")
    output.write_text(corrected, encoding="utf-8")
    assert write() == written
    assert (tmp_path / "a.srt.earlier-1").read_text(encoding="utf-8") == corrected
    assert "are now in" in capsys.readouterr().err


def test_if_nothing_can_be_transcribed_earlier_transcripts_stay(tmp_path):
    (tmp_path / "bad.wav").write_text("no sound")
    output = tmp_path / "good.srt"
    output.write_text("1\nearlier")
    how = recogniser.DecodingOptions(transcribe=[str(tmp_path / "bad.wav")], output=str(output))
    with pytest.raises(DataError, match="1 of 1 files"):
        transcribing.transcribe_files(how, None, Setup(), 30.0)
    assert output.read_text() == "1\nearlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.wav", "good.srt"]
