"""Subtitles from segments and from words."""

from speech import subtitles


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
