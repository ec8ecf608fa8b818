"""The files of annotations that are written: read again here, by pympi and by praatio."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from praatio import textgrid
from pympi import Elan

from speech.data.annotations import writing
from speech.data.annotations.rows import READERS, annotated_rows
from speech.data.columns import Rejections

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
CONFIDENCES = st.floats(0, 1)
WORD = {"start": 0.5, "end": 1.0, "text": "li", "confidence": 0.4}


@st.composite
def rows_of_talks(draw):
    """Rows of up to three speakers, which may overlap, some with words, also beyond the row."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 9000))
        row = {"start": start / 1000, "end": (start + draw(st.integers(0, 3000))) / 1000}
        row |= {"text": draw(TEXTS), "speaker": draw(st.sampled_from(["", "Anna", "B & C"]))}
        if draw(st.booleans()):
            row["draft"] = draw(TEXTS)
        if draw(st.booleans()):
            row["confidence"] = draw(CONFIDENCES)
        words = []
        for _ in range(draw(st.integers(0, 3))):
            word = {**WORD, "start": row["start"] + draw(st.floats(-0.5, 1)), "text": draw(TEXTS)}
            words.append({**word, "end": word["start"] + draw(st.floats(0, 1))})
        if words:
            row["words"] = sorted(words, key=lambda word: word["start"])
        rows.append(row)
    return rows


def spans_in(track):
    return [(span.start, span.end, span.text) for span in track.spans]


def write(path, rows, audio, seconds: float = 0.0) -> None:
    path.write_text(writing.content(path, rows, audio, seconds), encoding="utf-8")


@given(rows_of_talks())
def test_every_row_and_word_is_in_a_tier_without_overlaps(rows):
    tracks = {track.name: track for track in writing.tracks_of(rows)}
    for kind, wanted in (
        ("utterances", [row["text"] for row in rows]),
        ("draft", [row["draft"] for row in rows if "draft" in row]),
        ("words", [word["text"] for row in rows for word in row.get("words", [])]),
    ):
        texts = [
            span.text for track in tracks.values() if track.kind == kind for span in track.spans
        ]
        assert sorted(texts) == sorted(map(writing.one_line, wanted))
    for track in tracks.values():
        times = [time for span in track.spans for time in span[:2]]
        assert times == sorted(times)
        assert all(span.start < span.end for span in track.spans)
        if track.parent:
            parents = tracks[track.parent].spans
            for span in track.spans:
                assert any(one.start <= span.start < span.end <= one.end for one in parents)
                if writing.TYPES[track.kind] == writing.ASSOCIATED:
                    assert span[:2] in {one[:2] for one in parents}


@given(rows_of_talks())
def test_pympi_reads_what_is_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("elan") / "a.eaf"
    write(path, rows, path.with_name("b c.wav"))
    tracks = writing.tracks_of(rows)
    file = Elan.Eaf(str(path))
    assert list(file.tiers) == [track.name for track in tracks]
    for track in tracks:
        found = file.get_annotation_data_for_tier(track.name)
        assert sorted(each[:3] for each in found) == sorted(spans_in(track))
        assert file.get_parameters_for_tier(track.name).get("PARENT_REF", "") == track.parent
    (medium,) = file.media_descriptors
    assert medium["MEDIA_URL"] == f"file://{path.with_name('b c.wav')}"
    assert medium["RELATIVE_MEDIA_URL"] == "./b c.wav"


@given(rows_of_talks(), st.floats(0, 20))
def test_praatio_reads_what_is_written(tmp_path_factory, rows, seconds):
    path = tmp_path_factory.mktemp("praat") / "a.TextGrid"
    write(path, rows, "a.wav", seconds)
    tracks = writing.tracks_of(rows)
    grid = textgrid.openTextgrid(str(path), includeEmptyIntervals=True, duplicateNamesMode="error")
    assert list(grid.tierNames) == [track.name for track in tracks]
    ends = [span.end for track in tracks for span in track.spans]
    assert grid.maxTimestamp == max([1, round(1000 * seconds), *ends]) / 1000
    for track in tracks:
        entries = grid.getTier(track.name).entries
        assert entries[0].start == 0 and entries[-1].end == grid.maxTimestamp
        assert all(one.end == two.start for one, two in itertools.pairwise(entries))
        found = {(round(1000 * each.start), round(1000 * each.end), each.label) for each in entries}
        assert found >= set(spans_in(track))


def manifest_of(path):
    rejected = Rejections()
    rows = [row for _, row in annotated_rows([path], (), None, rejected)]
    return rows, rejected.source


@pytest.mark.parametrize("name", ["a.eaf", "a.TextGrid"])
def test_what_comes_back_is_a_manifest_and_what_changed_is_counted(name, tmp_path, wav):
    audio = wav(tmp_path / "a.wav")
    folder = tmp_path / "corrected"
    folder.mkdir()
    rows = [
        {"start": 0.0, "end": 1.0, "text": "naka li", "draft": "naka li", "words": [WORD]},
        {"start": 0.5, "end": 1.5, "text": 'a "b"', "draft": "a b", "speaker": "Anna"},
        {"start": 1.5, "end": 2.0, "text": "", "draft": "c", "speaker": "Anna"},
    ]
    path = folder / name
    write(path, rows, audio, 2.0)
    if name == "a.TextGrid":  # which names no audio
        path = path.rename(tmp_path / name)
    read, told = manifest_of(path)
    assert [(row["text"], row["speaker"]) for row in read] == [("naka li", ""), ('a "b"', "Anna")]
    assert [(row["offset"], row["duration"]) for row in read] == [(0.0, 1.0), (0.5, 1.0)]
    assert "tiers utterances (1), utterances@Anna (1)" in told
    assert "without text, left out: " in told
    assert "changed since a model drafted them: 1 of 2" in told


def test_what_is_doubtful_begins_with_a_mark():
    sure = {**WORD, "text": "naka", "confidence": 0.9}
    row = {"start": 0, "end": 2, "text": "naka li", "words": [sure, WORD], "confidence": 0.1}
    assert writing.doubts_in(row) == "? li"
    assert writing.doubts_in({**row, "words": [sure]}) == ""
    assert writing.doubts_in({**row, "words": []}) == "?"
    assert writing.doubts_in({"text": "naka"}) == ""
    tracks = {track.name: track for track in writing.tracks_of([row])}
    assert [span.text for span in tracks["confidence"].spans] == ["0.90", "0.40"]


@pytest.mark.parametrize("suffix", [".srt", ".VTT"])
def test_subtitles_of_rows_are_read_again(suffix, tmp_path):
    rows = [
        {"start": 1.5, "end": 2.0, "text": "bye"},
        {"start": 0.0, "end": 1.0, "text": "hello you"},
        {"start": 2.0, "end": 3.0, "text": " "},
    ]
    path = tmp_path / f"a{suffix}"
    write(path, rows, "a.wav")
    (tier,) = READERS[suffix.lower()](path).tiers
    found = [(each.start, each.end, each.text) for each in tier.annotations]
    assert found == [(0.0, 1.0, "hello you"), (1.5, 2.0, "bye")]
    rows = [{**row, "speaker": "Anna"} for row in rows[:2]]
    rows.append({"start": 0.2, "end": 0.6, "text": "mhm", "speaker": "Berta"})
    write(path, rows, "a.wav")  # nobody's time is cut by another speaker's
    (tier,) = READERS[suffix.lower()](path).tiers
    times = [(each.start, each.end) for each in tier.annotations]
    assert times == [(0.0, 1.0), (0.2, 0.6), (1.5, 2.0)]


@pytest.mark.parametrize("suffix", [".eaf", ".TextGrid", ".srt", ".vtt"])
def test_own_files_begin_as_is_told(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    write(path, [{"start": 0.0, "end": 1.0, "text": "a"}], "a.wav")
    assert path.read_bytes().startswith(writing.BEGINNINGS[suffix.lower()])
    if suffix == ".eaf":
        Elan.Eaf(str(path)).to_file(str(path))
        assert not path.read_bytes().startswith(writing.BEGINNINGS[suffix])
