"""ELAN's files: written by pympi and read here, times that are not given, dependent tiers, media,
and hostile XML."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pympi import Elan

from common.errors import DataError
from speech.data.annotations import elan

# What XML can hold.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20).filter(
    lambda text: not {"\ufffe", "\uffff"} & set(text)
)
TIMES = st.lists(st.integers(0, 10**7), min_size=2, max_size=12, unique=True).map(sorted)
NAMES = st.lists(TEXTS.filter(str.strip), min_size=1, max_size=3, unique_by=lambda name: name)


def one_line(text):
    return " ".join(text.split())


@st.composite
def tiers(draw):
    """{name: (participant, [(start, end, text)] in milliseconds, gloss of each)}."""
    found = {}
    for name in draw(NAMES):
        times = draw(TIMES)
        spans = [(a, b, draw(TEXTS)) for a, b in zip(times[::2], times[1::2], strict=False)]
        found[name] = draw(TEXTS), spans, [draw(TEXTS) for _ in spans]
    return found


@given(tiers())
def test_tiers_of_pympi_are_read_as_they_were_written(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("elan") / "a.eaf"
    file = Elan.Eaf()
    file.remove_tier("default")
    file.add_linguistic_type("gloss", constraints="Symbolic_Association")
    for number, (name, (participant, spans, glosses)) in enumerate(written.items()):
        file.add_tier(name, part=participant)
        file.add_tier(f"gloss of {number}", ling="gloss", parent=name)
        for (start, end, text), gloss in zip(spans, glosses, strict=True):
            file.add_annotation(name, start, end, text)
            file.add_ref_annotation(f"gloss of {number}", name, start, gloss)
    file.to_file(str(path))
    read = {tier.name: tier for tier in elan.read(path).tiers}
    assert len(read) == 2 * len(written)
    for number, (name, (participant, spans, glosses)) in enumerate(written.items()):
        gloss_tier = read[f"gloss of {number}"]
        assert gloss_tier.parent == name
        assert gloss_tier.participant == read[name].participant == participant
        expected = [(a / 1000, b / 1000, one_line(text), "") for a, b, text in spans]
        assert sorted(read[name].annotations) == sorted(map(tuple, expected))
        expected = [
            (a / 1000, b / 1000, one_line(gloss), "")
            for (a, b, _), gloss in zip(spans, glosses, strict=True)
        ]
        assert sorted(gloss_tier.annotations) == sorted(expected)


def document(body, header="<HEADER/>"):
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ANNOTATION_DOCUMENT>\n'
        f"{header}\n{body}\n</ANNOTATION_DOCUMENT>\n"
    )


def aligned(name, first, last, text):
    return (
        f'<ANNOTATION><ALIGNABLE_ANNOTATION ANNOTATION_ID="{name}" TIME_SLOT_REF1="{first}"'
        f' TIME_SLOT_REF2="{last}"><ANNOTATION_VALUE>{text}</ANNOTATION_VALUE>'
        "</ALIGNABLE_ANNOTATION></ANNOTATION>"
    )


def dependent(name, parent, text, previous=""):
    before = f' PREVIOUS_ANNOTATION="{previous}"' if previous else ""
    return (
        f'<ANNOTATION><REF_ANNOTATION ANNOTATION_ID="{name}" ANNOTATION_REF="{parent}"{before}>'
        f"<ANNOTATION_VALUE>{text}</ANNOTATION_VALUE></REF_ANNOTATION></ANNOTATION>"
    )


def read(tmp_path, content):
    path = tmp_path / "a.eaf"
    path.write_text(content, encoding="utf-8")
    return elan.read(path)


ORDER = """<TIME_ORDER>
<TIME_SLOT TIME_SLOT_ID="ts1" TIME_VALUE="1000"/><TIME_SLOT TIME_SLOT_ID="ts2"/>
<TIME_SLOT TIME_SLOT_ID="other" TIME_VALUE="1100"/><TIME_SLOT TIME_SLOT_ID="ts3"/>
<TIME_SLOT TIME_SLOT_ID="ts4" TIME_VALUE="4000"/><TIME_SLOT TIME_SLOT_ID="ts5"/>
</TIME_ORDER>"""


def test_slots_without_a_value_divide_the_time_of_their_tier(tmp_path):
    words = aligned("a1", "ts1", "ts2", "one") + aligned("a2", "ts2", "ts3", "two")
    words += aligned("a3", "ts3", "ts4", "three") + aligned("a4", "ts4", "ts5", "no end")
    words += aligned("a5", "ts9", "ts4", "no such slot")
    found = read(tmp_path, document(f'{ORDER}<TIER TIER_ID="w">{words}</TIER>')).tiers[0]
    spans = [(each.start, each.end) for each in found.annotations]
    assert spans[:3] == [(1, 2), (2, 3), (3, 4)]
    assert spans[3][0] == 4 and spans[3][1] != spans[3][1]
    assert spans[4][0] != spans[4][0]


def test_texts_of_one_parent_are_joined_in_their_order(tmp_path):
    """Morphemes depend on words and these on an utterance, which alone has times. They stand in
    another order than they follow each other."""
    body = f'{ORDER}<TIER TIER_ID="u">{aligned("u1", "ts1", "ts4", "whole")}</TIER>'
    words = dependent("w2", "u1", "second", "w1") + dependent("w1", "u1", "first")
    body += f'<TIER TIER_ID="w" PARENT_REF="u">{words}</TIER>'
    parts = dependent("m3", "w2", "c") + dependent("m2", "w1", "b", "m1")
    parts += dependent("m1", "w1", "a") + dependent("m9", "nobody", "lost")
    body += f'<TIER TIER_ID="m" PARENT_REF="w">{parts}</TIER>'
    _, words, parts = read(tmp_path, document(body)).tiers
    assert words.annotations == [(1, 4, "first second", "")]
    assert (1, 4, "a b c", "") in parts.annotations
    assert [each.text for each in parts.annotations if each.start != each.start] == ["lost"]


def test_a_long_chain_is_followed(tmp_path):
    count = 20_000
    words = "".join(
        dependent(f"w{i}", "u1", str(i), f"w{i - 1}" if i else "") for i in reversed(range(count))
    )
    body = f'{ORDER}<TIER TIER_ID="u">{aligned("u1", "ts1", "ts4", "x")}</TIER>'
    body += f'<TIER TIER_ID="w" PARENT_REF="u">{words}</TIER>'
    found = read(tmp_path, document(body)).tiers[1].annotations
    assert found[0].text == " ".join(map(str, range(count)))


def shown(tiers):
    """(start, text) of the annotations of each tier, "?" for a time that is not known."""
    return [
        [("?" if each.start != each.start else each.start, each.text) for each in tier.annotations]
        for tier in tiers
    ]


def tier(name, annotations, parent=""):
    above = f' PARENT_REF="{parent}"' if parent else ""
    return f'<TIER TIER_ID="{name}"{above}>{annotations}</TIER>'


ONE, TWO = aligned("a1", "ts1", "ts4", "one"), aligned("a2", "ts4", "ts4", "two")
SAME_NAMES = {
    "as its parent": (
        [("u", ONE + TWO), ("w", dependent("a1", "a1", "x") + dependent("a2", "a2", "y"), "u")],
        [[(1, "one"), (4, "two")], [(1, "x"), (4, "y")]],
    ),
    "in two tiers": (
        [("u", ONE), ("v", TWO.replace("a2", "a1")), ("w", dependent("b", "a1", "x"), "v")],
        [[(1, "one")], [(4, "two")], [(4, "x")]],
    ),
    "in one tier": (
        [("u", ONE + TWO.replace("a2", "a1")), ("w", dependent("b", "a1", "x"), "u")],
        [[(1, "one"), (4, "two")], [("?", "x")]],
    ),
    "in a circle": (
        [("u", ONE), ("w", dependent("b", "c", "x") + dependent("c", "b", "y"), "u")],
        [[(1, "one")], [("?", "x"), ("?", "y")]],
    ),
}


@pytest.mark.parametrize("name", SAME_NAMES)
def test_no_text_is_lost_if_annotations_have_one_name(tmp_path, name):
    """Converters count names anew in each tier, or name an annotation as its parent."""
    tiers, expected = SAME_NAMES[name]
    found = read(tmp_path, document(ORDER + "".join(tier(*each) for each in tiers)))
    assert [sorted(each, key=str) for each in shown(found.tiers)] == expected


def test_a_long_attribute_takes_no_time(tmp_path, no_hang):
    long = f'<TIER TIER_ID="{"x" * (8 << 20)}"><!--{"y" * (8 << 20)}--></TIER>'
    assert len(read(tmp_path, document(long)).tiers[0].name) == 8 << 20


@pytest.mark.parametrize(
    "url, relative, path, beside",
    [
        ("file:///C:/My%20talks/a.wav", "../media/a.wav", "C:/My%20talks/a.wav", "../media/a.wav"),
        ("file:///home/x/a.wav", "file:/a.wav", "/home/x/a.wav", "a.wav"),
        ("/home/x/a.wav", "", "/home/x/a.wav", ""),
        ("C:\\talks\\a.wav", ".\\a.wav", "C:/talks/a.wav", "./a.wav"),
    ],
)
def test_media(tmp_path, url, relative, path, beside):
    header = (
        f'<HEADER TIME_UNITS="milliseconds"><MEDIA_DESCRIPTOR MEDIA_URL="{url}"'
        f' RELATIVE_MEDIA_URL="{relative}" MIME_TYPE="audio/x-wav" TIME_ORIGIN="250"/></HEADER>'
    )
    assert read(tmp_path, document("", header)).media == [(path, beside, 0.25)]


BOMB = """<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">]>
<ANNOTATION_DOCUMENT><TIER TIER_ID="&c;"/></ANNOTATION_DOCUMENT>"""
LATE_FAULT = document(f'{ORDER}\n<TIER TIER_ID="w">\n<ANNOTATION>')
HOSTILE = {
    "entities in entities": (BOMB, ":2: it has a DOCTYPE"),
    "not XML": ("hello", ":1: it is not sound XML: syntax error"),
    "another program's": ("<Transcript/>", ":1: it is not ELAN's: it begins with <Transcript>"),
    "truncated": (LATE_FAULT[:-30], ":10: it is not sound XML"),
    "a word as a time": (
        document('<TIME_SLOT TIME_SLOT_ID="t" TIME_VALUE="soon"/>'),
        ":4: 'soon' is not a time in milliseconds",
    ),
    "no tier": (document(aligned("a", "b", "c", "x")), ":4: an annotation is outside of the tiers"),
    "an unknown encoding": (
        document("").replace("UTF-8", "no-such"), ":1: its encoding is not known; save it as UTF-8",
    ),
    "a comment without end": (
        document(f"<!--{'x' * (17 << 20)}-->"), ":4: an element has more than 16 MiB",
    ),
    "a time slot twice": (
        document(ORDER + '<TIME_SLOT TIME_SLOT_ID="ts1" TIME_VALUE="7"/>'),
        ":8: time slot ts1 has two times",
    ),
    "a text without end": (
        document(f'<TIER TIER_ID="t">{aligned("a", "b", "c", "x" * (1 << 20) + "y")}</TIER>'),
        "more than 1048576 characters",
    ),
    "nothing": ("", "it is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_their_line(tmp_path, name, no_hang):
    content, message = HOSTILE[name]
    with pytest.raises(DataError) as caught:
        read(tmp_path, content)
    assert message in str(caught.value) and "a.eaf" in str(caught.value)
    assert "\n" not in str(caught.value)
