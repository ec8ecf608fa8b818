"""Copies of .eaf with new tiers: what was there stays, byte for byte; pympi reads all of it."""

import codecs
import re

import pytest
from pympi import Elan

from common.errors import DataError
from speech.data.annotations import adding, elan, writing

# What a person, ELAN and other programs write; `unknown` is of no program.
CONTENT = """<?xml version="1.0" encoding="UTF-8"?>
<!-- by hand -->
<ANNOTATION_DOCUMENT AUTHOR='Anna' DATE="2017-07-06T13:35:23+10:00" FORMAT="3.0" VERSION="3.0"
    xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
    xsi:noNamespaceSchemaLocation="http://www.mpi.nl/tools/elan/EAFv3.0.xsd">
    <LICENSE LICENSE_URL=""/>
    <HEADER MEDIA_FILE="" TIME_UNITS="milliseconds">
        <MEDIA_DESCRIPTOR MEDIA_URL="file:///C:/of%20mine/a.wav" MIME_TYPE="audio/x-wav"/>
        <MEDIA_DESCRIPTOR MEDIA_URL="file:///x/b.mp4" RELATIVE_MEDIA_URL='./gone.mp4'
            MIME_TYPE="video/mp4"/>
        <LINKED_FILE_DESCRIPTOR LINK_URL="file:///x/a.csv" RELATIVE_LINK_URL="../a &amp; b.csv"
            MIME_TYPE="unknown"/>
        <PROPERTY NAME="note">1 &lt; 2</PROPERTY>
        <PROPERTY NAME="lastUsedAnnotationId">7</PROPERTY>
    </HEADER>
    <TIME_ORDER><TIME_SLOT TIME_SLOT_ID="ts1" TIME_VALUE="0"/><TIME_SLOT TIME_SLOT_ID="ts2"/>
        <TIME_SLOT TIME_SLOT_ID="ts3" TIME_VALUE="900"/></TIME_ORDER>
    <TIER LINGUISTIC_TYPE_REF="phrase" PARTICIPANT="É &amp; B" TIER_ID="tx@B" ANNOTATOR="me">
        <ANNOTATION>
            <ALIGNABLE_ANNOTATION ANNOTATION_ID="a1" TIME_SLOT_REF1="ts1" TIME_SLOT_REF2="ts2">
                <ANNOTATION_VALUE>café  &#233;</ANNOTATION_VALUE>
            </ALIGNABLE_ANNOTATION>
        </ANNOTATION>
        <ANNOTATION>
            <ALIGNABLE_ANNOTATION ANNOTATION_ID="a12" TIME_SLOT_REF1="ts2" TIME_SLOT_REF2="ts3">
                <ANNOTATION_VALUE></ANNOTATION_VALUE>
            </ALIGNABLE_ANNOTATION>
        </ANNOTATION>
    </TIER>
    <unknown such="one"/>
    <LINGUISTIC_TYPE LINGUISTIC_TYPE_ID="phrase" TIME_ALIGNABLE="true"/>{more}
    <LOCALE LANGUAGE_CODE="en"/>
</ANNOTATION_DOCUMENT>
"""
DRAFTS = adding.NewTier("tx@B-draft", "draft", "tx@B", "É & B", [("a1", "ŋaka <b>"), ("a12", "é")])
DOUBTS = adding.NewTier("tx@B-doubtful", "doubtful", "tx@B", "É & B", [("a12", "? é")])


@pytest.fixture
def source(tmp_path):
    """An .eaf in a folder of its own, beside whose folder there is a table."""
    (tmp_path / "a & b.csv").write_text("")
    path = tmp_path / "tapes" / "a.eaf"
    path.parent.mkdir()
    (path.parent / "a.wav").write_bytes(b"")
    path.write_text(CONTENT.replace("{more}", ""), encoding="utf-8")
    return path


def added(source, *tiers, folder="copies/of"):
    target = source.parent.parent / folder / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    before = source.read_bytes()
    adding.write(source, target, tiers)
    assert source.read_bytes() == before
    return target


def test_all_that_was_there_is_in_the_copy_byte_for_byte(source):
    copy = added(source, DRAFTS, DOUBTS).read_text(encoding="utf-8")
    for insertion in (
        r'<TIER LINGUISTIC_TYPE_REF="(draft|doubtful)".*?</TIER>\n    ',
        r'<LINGUISTIC_TYPE CONSTRAINTS="Symbolic_Association".*?/>\n    ',
        r'<CONSTRAINT DESCRIPTION="1-1 .*?/>\n    ',
        r' RELATIVE_MEDIA_URL="./../../tapes/a.wav"',
    ):
        copy, count = re.subn(insertion, "", copy, flags=re.DOTALL)
        assert count
    before = source.read_text(encoding="utf-8")
    before = before.replace('"../a &amp; b.csv"', '"./../../a &amp; b.csv"')
    assert copy == before.replace('Id">7<', 'Id">15<')


def test_pympi_and_our_reader_find_the_new_tiers_below_the_old_one(source):
    target = added(source, DRAFTS, DOUBTS)
    before, after = elan.read(source).tiers, elan.read(target).tiers
    assert after[: len(before)] == before
    draft, doubtful = after[len(before) :]
    assert (draft.name, draft.parent, draft.kind, draft.participant) == (
        *("tx@B-draft", "tx@B", "draft"),
        "É & B",
    )
    assert [each[:3] for each in draft.annotations] == [(0, 0.45, "ŋaka <b>"), (0.45, 0.9, "é")]
    assert [each.text for each in doubtful.annotations] == ["? é"]
    file = Elan.Eaf(str(target))
    assert list(file.tiers) == ["tx@B", "tx@B-draft", "tx@B-doubtful"]
    assert {name: ref[:2] for name, ref in file.tiers["tx@B-draft"][1].items()} == {
        "a13": ("a1", "ŋaka <b>"),
        "a14": ("a12", "é"),
    }
    assert file.linguistic_types["draft"]["CONSTRAINTS"] == "Symbolic_Association"
    assert file.properties[-1] == ("lastUsedAnnotationId", "15")


def test_tiers_with_times_of_their_own(source):
    """Their slots stand in the order of time; what was there is as it was."""
    spans = [writing.Span(100, 500, "one <b>"), writing.Span(900, 1200, "two")]
    tracks = [writing.Track("utterances@É", "utterances", speaker="É", spans=spans)]
    content = source.read_bytes()
    copy = adding.with_tiers(content, source, source, [DRAFTS], tracks).decode()
    values = re.findall(r'ID="(\w+)"(?: TIME_VALUE="(\d+)")?', copy[: copy.index("</TIME_ORDER>")])
    slots = [("ts1", "0"), ("ts2", ""), ("ts4", "100"), ("ts5", "500"), ("ts3", "900")]
    assert values[-7:] == [*slots, ("ts6", "900"), ("ts7", "1200")]
    target = source.with_name("copy.eaf")
    target.write_text(copy, encoding="utf-8")
    before, after = elan.read(source).tiers, elan.read(target).tiers
    assert after[: len(before)] == before
    assert [each[:3] for each in after[-1].annotations] == [
        (0.1, 0.5, "one <b>"),
        (0.9, 1.2, "two"),
    ]
    file = Elan.Eaf(str(target))
    assert list(file.tiers) == ["tx@B", "tx@B-draft", "utterances@É"]
    assert list(file.tiers["utterances@É"][0]) == ["a15", "a16"]
    assert file.linguistic_types["utterances"]["TIME_ALIGNABLE"] == "true"
    assert file.properties[-1] == ("lastUsedAnnotationId", "16")


def test_earlier_tiers_have_names_of_their_own():
    names = ["utterances@A", "utterances@A-2", "earlier utterances@A", "tx"]
    written = adding.Written(starts=[("TIER", 0, {"TIER_ID": name}) for name in names])
    earlier = adding.earlier_names(written)
    assert [*earlier] == names[:2]
    assert len({*names, *earlier.values()}) == 6


def test_elements_are_in_the_order_of_elans_schema(source):
    content = added(source, DRAFTS).read_text(encoding="utf-8")
    names = re.findall(r"^    <(\w+)", content, re.MULTILINE)
    places = [adding.ORDER.index(name) for name in names if name != "unknown"]
    assert places == sorted(places)


def test_names_that_are_taken_get_a_number_and_a_type_is_used_again(source):
    again = added(added(source, DRAFTS), DRAFTS, folder="again")
    assert [tier.name for tier in elan.read(again).tiers] == ["tx@B", "tx@B-draft", "tx@B-draft-2"]
    assert again.read_text(encoding="utf-8").count("<LINGUISTIC_TYPE CON") == 1
    other = '\n    <LINGUISTIC_TYPE LINGUISTIC_TYPE_ID="draft" TIME_ALIGNABLE="true"/>'
    source.write_text(CONTENT.replace("{more}", other), encoding="utf-8")
    assert [tier.kind for tier in elan.read(added(source, DRAFTS)).tiers] == ["phrase", "draft-2"]


def test_a_byte_order_mark_is_kept(source):
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    target = added(source, DRAFTS)
    assert target.read_bytes()[:60] == source.read_bytes()[:60]
    assert [each.text for each in elan.read(target).tiers[-1].annotations] == ["ŋaka <b>", "é"]


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-16", "us-ascii"])
def test_other_encodings_are_refused(source, encoding):
    text = CONTENT.replace("{more}", "").replace("UTF-8", encoding)
    source.write_bytes(text.replace("é", "e").replace("É", "E").encode(encoding))
    with pytest.raises(DataError, match="its encoding is not UTF-8"):
        added(source, DRAFTS)


def test_a_file_in_another_encoding_than_it_says_is_refused(source):
    source.write_bytes(source.read_bytes() + "é".encode("latin-1"))
    with pytest.raises(DataError, match="its encoding is not UTF-8"):
        added(source, DRAFTS)
