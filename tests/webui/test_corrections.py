"""Texts that are corrected on the page."""

import json

import gradio as gr
import pytest

from common.errors import UsageError
from speech.data.columns import Rejections, Segments
from speech.data.manifest import Reading, parse, read_manifest
from webui import corrections
from webui.context import Context
from webui.places import CORRECTED, DRAFT, Places
from webui.tabs import drafts


@pytest.fixture
def here(tmp_path):
    for name in ("data", "runs/one"):
        (tmp_path / name).mkdir(parents=True)
    return Places(tmp_path / "data", tmp_path / "runs")


@pytest.fixture
def draft(here, json_lines, wav):
    """What --transcribe writes of a clip, a recording in three pieces, and silence."""
    files = [wav(here.data / f"{number}.wav", 3) for number in range(3)]
    times = [(0.0, 1.0, "won"), (1.0, 2.0, ""), (2.0, 3.0, "to")]
    pieces = [{"start": start, "end": end, "text": text} for start, end, text in times]
    whole = [{"start": 0.0, "end": 3.0, "text": "helo"}]
    rows = [
        {"file": files[0], "text": "helo", "seconds": 3.0, "pieces": whole},
        {"file": files[1], "text": "won to", "seconds": 3.0, "pieces": pieces, "words": []},
        {"file": files[2], "text": "", "seconds": 3.0, "pieces": []},
    ]
    return here.runs / "one" / json_lines(here.runs / "one" / DRAFT, rows)


def test_a_draft_is_corrected_and_trained_on(here, draft):
    found = corrections.texts_of(draft)
    assert [text.text for text in found] == ["helo", "won", "", "to", ""]
    assert [text.offset for text in found] == [0, 0, 1, 2, 0]
    assert [text.seconds for text in found] == [3, 1, 1, 1, None]
    before = draft.read_bytes()
    changes = [(found[0], "hello"), (found[2], " and\n a "), (found[4], "three")]
    target = corrections.correct(here, draft, changes)
    assert target == draft.with_name(CORRECTED) and draft.read_bytes() == before
    rows = [row for _, row in parse(target, Rejections())]
    assert [row["text"] for row in rows] == ["hello", "won and a to", "three"]
    assert corrections.begun(draft) == target == corrections.begun(target)
    segments = Segments(wanted=True)
    corpus = read_manifest(str(target), Rejections(), str, segments, Reading())
    assert list(corpus.texts) == ["hello", "won and a to", "three"]
    again = corrections.texts_of(target)
    corrections.correct(here, target, [(again[3], "two")])
    assert [text.text for text in corrections.texts_of(target)][3] == "two"
    assert here.manifests() == [f"one/{CORRECTED}", f"one/{DRAFT}"]


def test_nothing_is_replaced_in_silence(here, draft):
    (first, *_, last) = corrections.texts_of(draft)
    target = corrections.correct(here, draft, [(first, "hello")])
    with pytest.raises(UsageError, match="changed meanwhile"):  # another tab is at the draft
        corrections.correct(here, draft, [(last, "three")])
    with pytest.raises(UsageError, match="changed meanwhile"):
        corrections.correct(here, target, [(first, "helo")])
    assert corrections.texts_of(target)[0].text == "hello"


def test_what_cannot_be_corrected(here, draft, json_lines):
    table = here.data / "t.jsonl"
    json_lines(table, [{"audio": "0.wav", "text": "one"}])
    (text,) = corrections.texts_of(table)
    with pytest.raises(UsageError, match="only reads this folder"):
        corrections.correct(here, table, [(text, "two")])
    segments = [{"start": 0, "end": 1, "text": "one"}]
    for row in ({"audio": "0.wav", "segments": segments}, {"text": "one"}, b"{broken", [1]):
        json_lines(draft, [row])
        with pytest.raises(UsageError, match=r"cannot be corrected|texts of segments"):
            corrections.texts_of(draft)


def test_pages_of_texts(here, json_lines, wav):
    """Save and turn, from the first text of a draft to the last."""
    count = drafts.SLOTS + 3
    rows = [{"file": wav(here.data / "a.wav"), "text": f"text {n}"} for n in range(count)]
    json_lines(here.runs / "one" / DRAFT, rows)
    actions = {}
    with gr.Blocks() as page:
        drafts.build_editor(Context(here, {}, None), gr.Dropdown([]))
    for each in page.fns.values():
        actions.setdefault(each.fn.__name__, []).append(each.fn)
    (show,) = actions["show"]
    (follow,) = actions["follow"]
    _, _, ahead = actions["run"]  # of partial functions, which have no names
    now, where, *slots = show(f"one/{DRAFT}")
    assert f"texts 1 to {drafts.SLOTS} of {count}" in where and "<audio" in slots[1]
    texts = [text.text for text in now.texts]
    now, where, *slots, table = ahead(now, "TEXT 0", *texts[1:])
    assert now.table == table.value == f"one/{CORRECTED}" and slots[2] == f"text {drafts.SLOTS}"
    assert [row.visible for row in slots[::3]] == [True] * 3 + [False] * (drafts.SLOTS - 3)
    assert follow(table.value, True, now)[0] == gr.skip() == follow("other", False, now)[0]
    first, *_ = (here.runs / table.value).read_text().splitlines()
    assert json.loads(first)["text"] == "TEXT 0"
    with pytest.raises(gr.Error, match="there is no table"):
        ahead(drafts.Shown(), *texts)


def test_tables_of_one_folder_have_their_own_corrections(here, draft, wav):
    folder = here.runs / "one"
    for name in "ab":
        wav(folder / f"{name}.wav", 3)
        (folder / f"{name}.srt").write_text(f"1\n00:00:00,000 --> 00:00:01,000\n{name}\n")
    (folder / "a.csv").write_text("audio_file,text\na.wav,csv\n")
    tables = [draft, folder / "a.srt", folder / "b.srt", folder / "a.csv"]
    for table in tables:
        assert corrections.begun(table) == table
        (text, *_) = corrections.texts_of(table)
        target = corrections.correct(here, table, [(text, f"mended {table.name}")])
        assert corrections.begun(target) == target
    for table in tables:
        assert corrections.texts_of(corrections.begun(table))[0].text == f"mended {table.name}"


def test_a_table_with_parts_of_files(here, draft, wav):
    wav(here.runs / "one" / "0.wav", 3)
    (here.runs / "one" / "t.csv").write_text(
        "audio_file,transcript,offset,duration\n0.wav,a,1,0.5\n"
    )
    (text,) = corrections.texts_of(here.runs / "one" / "t.csv")
    assert (text.offset, text.seconds, text.text) == (1.0, 0.5, "a")
    target = corrections.correct(here, here.runs / "one" / "t.csv", [(text, "b")])
    row = json.loads(target.read_text())
    assert row == {"audio_file": "0.wav", "transcript": "b", "offset": "1", "duration": "0.5"}
