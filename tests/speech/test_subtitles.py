"""Subtitles from segments and from words, and the file that they are written to."""

import pytest

from common import options
from common.device import Setup
from common.errors import DataError, UsageError
from speech import recogniser, subtitles

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


def test_words_are_grouped_by_sentence_pause_time_and_length():
    spoken = [("one", 0.0), ("two.", 0.5), ("three", 1.0), ("four", 3.0)]  # sentence, pause
    spoken += [("long", 4.0 + number) for number in range(8)]  # six seconds
    spoken += [("x" * 30, 12.0 + number / 10) for number in range(4)]  # 84 characters
    words = [{"start": start, "end": start + 0.1, "text": text} for text, start in spoken]
    groups = list(subtitles.cues({"words": words, "segments": []}))
    texts = [group["text"] for group in groups]
    assert texts[:2] == ["one two.", "three"]
    assert " ".join(texts) == " ".join(text for text, _ in spoken)
    assert all(group["end"] - group["start"] <= subtitles.SECONDS for group in groups)
    assert all(len(text) <= subtitles.CHARACTERS for text in texts)
    assert (groups[0]["start"], groups[0]["end"]) == (0.0, 0.6)
    assert len(groups) < 8


def test_no_subtitle_ends_where_it_begins():
    """WebVTT forbids it. A word of Parakeet can have no length, or end before it begins."""
    words = [
        {"start": 0.8, "end": 0.8, "text": "Yes."},
        {"start": 2.0, "end": 1.92, "text": "No."},
        {"start": 3.0, "end": 3.4, "text": "Well."},
    ]
    times = [(cue["start"], cue["end"]) for cue in subtitles.cues({"words": words})]
    assert times == [(0.8, 0.9), (2.0, 2.1), (3.0, 3.4)]


def test_words_of_a_recogniser_are_written_and_corrections_kept(wav, tmp_path, capsys):
    path = wav(tmp_path / "a.wav")

    def decode(batch):
        words = [
            {"start": 0.125, "end": 0.5, "text": "hello."},
            {"start": 0.5, "end": 0.75, "text": "bye"},
        ]
        return [{"text": "hello. bye", "words": words, "segments": []} for _ in batch["names"]]

    output = tmp_path / "a.srt"
    how = recogniser.Options(transcribe=[path], output=str(output))

    def write() -> str:
        recogniser.check_output(how.output, [path])
        recogniser.transcribe_files(how, decode, Setup(), 30.0, parts=("words", "segments"))
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
    how = recogniser.Options(transcribe=[str(tmp_path / "bad.wav")], output=str(output))
    with pytest.raises(DataError, match="1 of 1 files"):
        recogniser.transcribe_files(how, None, Setup(), 30.0)
    assert output.read_text() == "1\nearlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.wav", "good.srt"]


@pytest.mark.parametrize("suffix", [".ass", ".LRC", ".sub"])
def test_other_subtitles_are_refused(suffix, tmp_path):
    parser = options.Parser("test")
    recogniser.add_arguments(parser)
    options.add_arguments(parser)
    args = parser.parse_args(["--transcribe", "a.wav", "--output", str(tmp_path / f"a{suffix}")])
    with pytest.raises(UsageError, match=f"{suffix.lower()} cannot be written; name a file .srt"):
        recogniser.resolve(args, is_demo=False, has_times=True)
