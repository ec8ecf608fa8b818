"""Audacity's labels and subtitles."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from speech.data.annotations import lines
from speech.writing.subtitles import FORMATS

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z")), min_size=1)
SEGMENTS = st.lists(
    st.tuples(st.integers(0, 9 * 10**6), st.integers(200, 9_000), WORDS), max_size=8
)


def one_line(text):
    return " ".join(text.split())


@given(SEGMENTS, st.sampled_from(".,"), st.sampled_from(["\n", "\r\n"]))
def test_labels_as_audacity_writes_them(tmp_path_factory, segments, point, line_end):
    path = tmp_path_factory.mktemp("labels") / "a.txt"
    written = [(0, 0, "a point"), *((start, start + more, text) for start, more, text in segments)]
    content = ""
    for start, end, text in written:
        times = "\t".join(f"{time / 1000:.6f}".replace(".", point) for time in (start, end))
        content += f"{times}\t{text}{line_end}\\\t100,5\t2000.0{line_end}"
    path.write_bytes(content.encode())
    assert lines.is_labels(path)
    document = lines.read_labels(path)
    (tier,) = document.tiers
    expected = [(a / 1000, b / 1000, one_line(text), "") for a, b, text in written[1:]]
    assert tier.annotations == expected and tier.points == 1 and not document.faults


def test_frequencies_before_the_first_label(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\\\t100.5\t2000\n0.5\t1.5\tone\n\\\t100.5\t2000\n")
    assert lines.is_labels(path)
    document = lines.read_labels(path)
    assert document.tiers[0].annotations == [(0.5, 1.5, "one", "")] and not document.faults


def test_lines_that_are_no_labels_are_counted_with_their_numbers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0.5\t1.5\tone\n\n2.0 3.0 two\nnan\tinf\tthree\n4\t5\n")
    document = lines.read_labels(path)
    assert document.tiers[0].annotations == [(0.5, 1.5, "one", ""), (4, 5, "", "")]
    assert [place for _, place in document.faults] == [f"{path}:3", f"{path}:4"]


@pytest.mark.parametrize(
    "content", ["", "audio_file|text\na.wav|b", "0.5 1.5 a", "a\tb\tc", '{"text": 1}', "1.5\t\t\n"]
)
def test_other_tables_are_no_labels(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text(content)
    assert not lines.is_labels(path)
    assert not lines.is_labels(tmp_path)


@given(SEGMENTS.filter(bool), st.sampled_from([".srt", ".vtt"]))
def test_subtitles_that_this_project_writes(tmp_path_factory, segments, suffix):
    """What `speech.writing.subtitles` writes of a transcript is read with its times and texts; but
    in .srt, where nothing escapes it, what looks like a tag or a letter's name is none of the
    text."""
    path = tmp_path_factory.mktemp("subtitles") / f"a{suffix}"
    at = 0.0
    parts = []
    for _, more, text in segments:
        text = re.sub("[{<&]", "(", text) if suffix == ".srt" else text
        text = text.replace("-->", "").replace("\\", "/")  # \N and \h are a break and a space
        parts.append({"start": at, "end": at + more / 1000, "text": one_line(text) or "a"})
        at = round(at + more / 1000 + 1, 3)
    content = FORMATS[suffix].whole({"segments": parts})
    path.write_text(content, encoding="utf-8")
    document = lines.read_subtitles(path)
    assert not document.faults
    read = document.tiers[0].annotations
    joined = "".join(each.text for each in read)
    assert "".join(joined.split()) == "".join("".join(part["text"] for part in parts).split())
    assert read[0].start == parts[0]["start"]
    assert read[-1].end == pytest.approx(parts[-1]["end"])


def test_a_srt_of_another_program(tmp_path):
    path = tmp_path / "a.srt"
    path.write_bytes(
        "\ufeff1\r\n00:00:01,200 --> 00:00:02,500 X1:40\r\n<i>Good</i> morning,\r\n"
        '<font color="red">{\\an8}Anna</font> &amp; <3 &gt;&#39;&nbsp;&b; AT&T\r\n\r\n'
        "2\r\n01:00:02.5 --> 1:00:04,05\r\n12\r\n3\r\n00:00:05,000 --> 00:00:06,000\r\n\r\n"
        "4\r\n00:00:07:000 --> 00:00:08:000\r\nlost\r\n\r\n"
        "5\r\n00:00:09 --> 00:00:10\r\none<br/>two\\Nthree\r\n".encode()
    )
    document = lines.read_subtitles(path)
    assert document.tiers[0].annotations == [
        (1.2, 2.5, "Good morning, Anna & <3 >' &b; AT&T", ""),
        (3602.5, 3604.05, "12", ""),  # "3" is the number of the next one
        (5, 6, "", ""),
        (9, 10, "one two three", ""),
    ]
    ((_, place),) = document.faults
    assert place.startswith(f"{path}:13: ")


def test_a_vtt_of_another_program(tmp_path):
    path = tmp_path / "a.vtt"
    path.write_text(
        "WEBVTT - a title\n\nSTYLE\n::cue { color: red }\n\nNOTE\nnot\nread\n\n"
        "intro\n00:01.200 --> 00:02.500 align:start\n<v.loud Anna K.>Tea &amp; <b>milk</b></v>\n\n"
        "00:03.000 --> 00:04.000\n<v Anna>Yes</v>\n<v Berta>No</v> <00:03.500><c.x>&lt;so&gt;</c>\n"
    )
    assert lines.read_subtitles(path).tiers[0].annotations == [
        (1.2, 2.5, "Tea & milk", "Anna K."),
        (3, 4, "Yes No <so>", ""),
    ]


def test_lines_of_a_subtitle_after_a_blank_one(tmp_path):
    """Other programs show them, too. YouTube's subtitles begin with a line that is a space."""
    (tmp_path / "a.srt").write_text(
        "1\n00:01.000 --> 00:02.000\none\n\ntwo\n\n2\n00:03.000 --> 00:04.000\n3\n\n"
        "00:05.000 --> 00:06.000\nend\n\n4\n00:00:0"
    )
    (tmp_path / "a.vtt").write_text(
        "WEBVTT\n\n00:01.000 --> 00:02.000\n \none<00:01.500><c> two</c>\n\nNOTE not read\n\n"
        "2\n00:03.000 --> 00:04.000\n3\n\n00:05.000 --> 00:06.000\nend\n"
    )
    for name in ("a.srt", "a.vtt"):
        read = lines.read_subtitles(tmp_path / name).tiers[0].annotations
        assert [each.text for each in read] == ["one two", "3", "end"]


def test_a_file_without_subtitles_is_refused(tmp_path):
    path = tmp_path / "a.srt"
    for content in ("hello\n", "1\n00:00:01:000 --> 00:00:02:000\nhello\n"):
        path.write_text(content)
        with pytest.raises(DataError, match="it has no subtitles"):
            lines.read_subtitles(path)


@pytest.mark.parametrize(
    "text", ["<v" + " " * 200_000, "<v " * 100_000, "{\\" * 100_000, "<" * 200_000]
)
def test_texts_that_look_like_tags_do_not_hang(tmp_path, text, no_hang):
    path = tmp_path / "a.vtt"
    path.write_text(f"00:01.000 --> 00:02.000\n{text}\n\n00:03.000 --> 00:04.000\nend\n")
    assert lines.read_subtitles(path).tiers[0].annotations[1].text == "end"


# Each row: subtitles as (start, end, lines), what is read, and how many notes there are.
TWICE = [(0, 1, "No"), (1, 2, "No"), (2, 3, "No")]
OVER = [(0, 4, "one"), (2, 6, "two"), (4, 8, "three")]
CAPTIONS = {
    "two lines roll": (
        [(0, 2, "a b"), (2.01, 4, "a b\nc"), (4.01, 6, "c\nd"), (9, 10, "d\na b")],
        [(0, 2, "a b"), (2.01, 4, "c"), (4.01, 6, "d"), (9, 10, "a b")],
        3,
    ),
    "three lines roll": (
        [(0, 1, "a"), (1, 2, "a\nb"), (2, 3, "a\nb\nc"), (3, 4, "b\nc\nc")],
        [(0, 1, "a"), (1, 2, "b"), (2, 3, "c"), (3, 4, "c")],
        5,
    ),
    "of a video site, with the times of words": (
        [
            (0, 2, " \na<00:00:01.000><c> b</c>"),
            (2, 2.01, "a b\n "),
            (2.01, 4, "a b\nc<00:00:03.000><c> d</c>"),
            (4, 4.01, "c d\n "),
        ],
        [(0, 2.01, "a b"), (2.01, 4.01, "c d")],
        3,
    ),
    "word by word": (
        [(0, 1, "a"), (1, 2, "a b"), (2, 3, "a b c"), (3, 4, "d"), (4, 5, "d e")],
        [(0, 3, "a b c"), (3, 5, "d e")],
        3,
    ),
    "each word is marked": (
        [(0, 1, "<u>a</u> b"), (1, 2, "a <u>b</u>"), (2, 3, "<u>c</u> d"), (3, 4, "c <u>d</u>")],
        [(0, 2, "a b"), (2, 4, "c d")],
        2,
    ),
    "said twice": (TWICE, TWICE, 0),
    "said again after a pause": (
        [(0, 1, "a"), (1, 2, "a\nb"), (2, 3, "b\nc"), (5, 6, "c")],
        [(0, 1, "a"), (1, 2, "b"), (2, 3, "c"), (5, 6, "c")],
        2,
    ),
    "one line is said again by another": (
        [(0, 1, "a"), (1, 2, "b"), (2, 3, "b\nc"), (3, 4, "d"), (4, 5, "e")],
        [(0, 1, "a"), (1, 2, "b"), (2, 3, "b c"), (3, 4, "d"), (4, 5, "e")],
        0,
    ),
    "they stay": (OVER, [(0, 2, "one"), (2, 4, "two"), (4, 8, "three")], 2),
    "another is said meanwhile": (
        [(0, 9, "long"), (3, 4, "yes"), (9, 10, "end")],
        [(0, 9, "long"), (3, 4, "yes"), (9, 10, "end")],
        0,
    ),
    "two speakers at once": (
        [(0, 4, "<v A>one</v>"), (2, 6, "<v B>two</v>")],
        [(0, 4, "one"), (2, 6, "two")],
        0,
    ),
}


@pytest.mark.parametrize("suffix", [".srt", ".vtt"])
@pytest.mark.parametrize("name", CAPTIONS)
def test_captions_that_roll_or_stay_are_read_once(tmp_path, name, suffix):
    written, expected, notes = CAPTIONS[name]
    path = tmp_path / f"a{suffix}"
    cues = (f"00:{a:06.3f} --> 00:{b:06.3f}\n{text}\n" for a, b, text in written)
    path.write_text("WEBVTT\n\n" * (suffix == ".vtt") + "\n".join(cues))
    document = lines.read_subtitles(path)
    assert [each[:3] for each in document.tiers[0].annotations] == expected
    assert len(document.notes) == notes
