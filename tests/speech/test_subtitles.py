"""Subtitles from segments and from words, and the file that they are written to."""

from common.device import Setup
from speech import recogniser, subtitles


def test_segments_become_subtitles():
    segments = [
        {"start": 0.0, "end": 59.9996, "text": "hôm nay"},
        {"start": 3725.5, "end": 3726.125, "text": "a < b & c"},
    ]
    row = {"text": "hôm nay a < b & c", "segments": segments}
    assert subtitles.srt(row) == (
        "1\n00:00:00,000 --> 00:01:00,000\nhôm nay\n\n"
        "2\n01:02:05,500 --> 01:02:06,125\na < b & c\n\n"
    )
    assert subtitles.vtt(row) == (
        "WEBVTT\n\n00:00:00.000 --> 00:01:00.000\nhôm nay\n\n"
        "01:02:05.500 --> 01:02:06.125\na &lt; b &amp; c\n\n"
    )
    assert subtitles.srt({"segments": []}) == "" and subtitles.vtt({"segments": []}) == "WEBVTT\n\n"


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
