"""Praat's TextGrids: written by praatio in both forms and read here, encodings, damaged files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from praatio import textgrid

from common.errors import DataError
from speech.data.annotations import praat

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)
WORDS = TEXTS.map(str.strip)
TIMES = st.lists(st.integers(0, 10**6), min_size=2, max_size=12, unique=True).map(sorted)


def one_line(text):
    return " ".join(text.split())


@st.composite
def tiers(draw):
    """[(name, [(start, end, text)] or [(time, text)])]: intervals, or points."""
    found = []
    for name in draw(st.lists(WORDS.filter(bool), min_size=1, max_size=3, unique=True)):
        times = [time / 1000 for time in draw(TIMES)]
        if draw(st.booleans()):
            spans = zip(times[::2], times[1::2], strict=False)
            found.append((name, [(a, b, draw(WORDS)) for a, b in spans]))
        else:
            found.append((name, [(time, draw(WORDS)) for time in times]))
    return found


def write(path, written, form="long_textgrid"):
    grid = textgrid.Textgrid()
    for name, entries in written:
        kind = textgrid.IntervalTier if len(entries[0]) == 3 else textgrid.PointTier
        grid.addTier(kind(name, entries, 0, 1001))
    grid.save(str(path), form, includeBlankSpaces=True)


@given(
    tiers(),
    st.sampled_from(["long_textgrid", "short_textgrid"]),
    st.sampled_from("\n \r\n \r".split(" ")),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be"]),
)
def test_tiers_of_praatio_are_read_as_they_were_written(
    tmp_path_factory, written, form, line_end, encoding
):
    path = tmp_path_factory.mktemp("praat") / "a.TextGrid"
    write(path, written, form)
    text = path.read_text(encoding="utf-8")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path.write_bytes((mark + text.replace("\n", line_end)).encode(encoding))
    read = praat.read(path).tiers
    assert [tier.name for tier in read] == [name for name, _ in written]
    for tier, (_, entries) in zip(read, written, strict=True):
        if len(entries[0]) == 2:
            assert tier.points == len(entries) and not tier.annotations
            continue
        expected = [(a, b, one_line(text), "") for a, b, text in entries if one_line(text)]
        assert [each for each in tier.annotations if each.text] == expected


def test_praats_own_form_with_its_comments_and_flags(tmp_path):
    """As Praat 6 writes it, with points; and a comment, which Praat also reads."""
    path = tmp_path / "a.TextGrid"
    path.write_text("""File type = "ooTextFile"
Object class = "TextGrid"

xmin = 0 ! seconds, not 5
xmax = 2.5
tiers? <exists>
size = 2
item []:
    item [1]:
        class = "IntervalTier"
        name = "sentence 1"
        xmin = 0
        xmax = 2.5
        intervals: size = 2
        intervals [1]:
            xmin = 0
            xmax = 1.5e0
            text = "a ""7"" b
c"
        intervals [2]:
            xmin = 1.5
            xmax = 2.5
            text = ""
    item [2]:
        class = "TextTier"
        name = "bell"
        xmin = 0
        xmax = 2.5
        points: size = 1
        points [1]:
            number = 0.75
            mark = "H*"
""")
    sentences, bell = praat.read(path).tiers
    assert sentences.annotations == [(0, 1.5, 'a "7" b c', ""), (1.5, 2.5, "", "")]
    assert bell.points == 1 and not bell.annotations


HEAD = '"ooTextFile"\n"TextGrid"\n0\n2\n<exists>\n'
TIER = '"IntervalTier"\n"words"\n0\n2\n'
DAMAGED = {
    "not Praat's": ("hello", ":1: it is not a TextGrid"),
    "another object": ('"ooTextFile"\n"PitchTier"\n', ":2: it is a PitchTier and not a TextGrid"),
    "truncated": (f'{HEAD}1\n{TIER}2\n0\n1\n"a"\n1\n', "an end is missing, here is the end of the"),
    "an open quote": (f'{HEAD}1\n{TIER}1\n0\n1\n"a\n', ":14: a quote is not closed"),
    "a text for a time": (f'{HEAD}1\n{TIER}1\n"0"\n', ":12: a time is missing, here is '0'"),
    "more than there are": (f"{HEAD}1e300\n", "the class of a tier is missing"),
    "another kind of tier": (f'{HEAD}1\n"Pitch"\n', ":7: 'Pitch' is not a kind of tier"),
    "quotes without end": (HEAD + '"' * 100_001, ":6: the number of tiers is missing"),
    "nothing": ("", "it is empty"),
    "fewer than there are": (
        f'{HEAD}1\n{TIER}1\n0\n1\n"a"\n1\n2\n"b"', ":15: there is more than the sizes before it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_with_their_line(tmp_path, name, no_hang):
    content, message = DAMAGED[name]
    path = tmp_path / "a.TextGrid"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        praat.read(path)
    assert message in str(caught.value) and "a.TextGrid" in str(caught.value)


@pytest.mark.parametrize(
    "content, problem",
    [
        ('"ooTextFile"\n"ä"'.encode("latin-1"), ":2: it is not UTF-8"),
        (b"\xff\xfeabc", ":1: it is not UTF-16"),
        (b"ooBinaryFile\x08TextGrid\xff", ": it is a binary TextGrid"),
    ],
)
def test_other_encodings_are_refused_with_what_to_do_in_praat(tmp_path, content, problem):
    path = tmp_path / "a.TextGrid"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        praat.read(path)
    assert f"a.TextGrid{problem}; save it in Praat as a text file" in str(caught.value)
