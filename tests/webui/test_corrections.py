"""Texts that are corrected on the page."""

import json
import threading

import pytest

from common.errors import DataError, UsageError
from speech.data.columns import Rejections, Segments
from speech.data.manifest import Checks, read_manifest
from webui import corrections
from webui.corrections import DONE, LEFT_OUT, Table
from webui.places import CORRECTED, DRAFT


@pytest.fixture
def draft(here, json_lines, wav):
    """What --transcribe writes of a clip, a recording in three pieces, and silence."""
    (here.runs / "one").mkdir()
    files = [wav(here.data / f"{number}.wav", 3) for number in range(3)]
    times = [(0.0, 1.0, "won"), (1.0, 2.0, ""), (2.0, 3.0, "to")]
    pieces = [{"start": start, "end": end, "text": text} for start, end, text in times]
    whole = [{"start": 0.0, "end": 3.0, "text": "helo"}]
    rows = [
        {"file": files[0], "text": "helo", "seconds": 3.0, "pieces": whole},
        {"file": files[1], "text": "won to", "seconds": 3.0, "pieces": pieces, "words": []},
        {"file": files[2], "text": "", "seconds": 3.0, "pieces": []},
    ]
    return Table(here.runs / "one" / json_lines(here.runs / "one" / DRAFT, rows))


def edit(number: int, known: str, **fields) -> dict:
    return {"numbers": [number], "known": [[known]], "rows": [fields]}


def texts(here, table: Table) -> list[str]:
    return [row["text"] for row in corrections.texts_of(table, here)[0]]


def trained(table: Table) -> list[tuple]:
    """(text, offset, duration) that a recipe reads."""
    corpus = read_manifest(str(table.latest), Rejections(), str, Segments(wanted=False), Checks())
    return list(zip(corpus.texts, corpus.offsets.tolist(), corpus.durations.tolist(), strict=True))


def test_a_draft_is_corrected_and_trained_on(here, draft):
    rows, left_out = corrections.texts_of(draft, here)
    assert [row["text"] for row in rows] == ["helo", "won", "", "to", ""] and not left_out
    assert [row.get("offset") for row in rows] == [0, 0, 1, 2, None]
    before = draft.path.read_bytes()
    changes = [edit(0, "helo", text="hello"), edit(2, "", text=" and\n a ", edited=DONE)]
    answers = corrections.replace(here, draft, [*changes, edit(4, "", text="three")])
    assert [each["rows"][0]["text"] for each in answers] == ["hello", "and a", "three"]
    assert draft.latest == draft.path.with_name(CORRECTED) and draft.path.read_bytes() == before
    assert texts(here, draft) == ["hello", "won", "and a", "to", "three"]
    assert trained(draft)[:3] == [("hello", 0, 3), ("won", 0, 1), ("and a", 1, 1)]
    corrections.replace(here, Table(draft.latest), [edit(3, "to", edited=LEFT_OUT)])
    rows, _ = corrections.texts_of(draft, here)
    assert [row.get("edited") for row in rows] == [None, None, DONE, LEFT_OUT, None]
    assert rows[3]["text"] == "" and corrections.text_in(rows[3]) == "to"
    corrections.replace(here, draft, [edit(3, "to", edited="")])
    assert texts(here, draft)[3] == "to"
    assert here.manifests() == [f"one/{CORRECTED}", f"one/{DRAFT}"]


def test_nothing_is_replaced_in_silence(here, draft):
    corrections.replace(here, draft, [edit(0, "helo", text="hello")])
    (answer,) = corrections.replace(here, draft, [edit(0, "helo", text="hallo")])
    assert answer["refused"] and answer["rows"][0]["text"] == "hello"
    answers = corrections.replace(
        here, draft, [edit(9, "", text="x"), edit(0, "helo", edited=DONE)]
    )
    assert [each.get("refused") for each in answers] == [True, None]  # a mark replaces no text
    (answer,) = corrections.replace(here, draft, [edit(0, "helo", offset=1.0)])
    assert answer["refused"]  # its text may have been split
    # An answer was lost: the text is one of those that were typed.
    known = [["helo", "hel", "hello ", "hello you"]]
    again = {"numbers": [0], "known": known, "rows": [{"text": "hello you"}]}
    for _ in range(2):
        (answer,) = corrections.replace(here, draft, [again])
        assert "refused" not in answer and texts(here, draft)[0] == "hello you"


def test_a_text_with_other_spaces_than_single_ones_is_corrected(here, wav):
    (here.runs / "one").mkdir()
    wav(here.runs / "one/a.wav")
    path = here.runs / "one/t.csv"
    path.write_text('file,text\na.wav,"two  spaces "\na.wav,"two\nlines"\na.wav,fixed\u00a0one\n')
    table = Table(path)
    for number, old in enumerate(texts(here, table)):
        (answer,) = corrections.replace(here, table, [edit(number, old, text="new")])
        assert "refused" not in answer, old
    assert texts(here, table) == ["new"] * 3


def test_requests_at_once_lose_nothing(here, draft):
    def write(number: int) -> None:
        for word in range(5):
            known = ["helo", "won", "", "to", ""][number] if not word else str(word - 1)
            corrections.replace(here, draft, [edit(number, known, text=str(word))])

    threads = [threading.Thread(target=write, args=[number]) for number in range(5)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert texts(here, draft) == ["4"] * 5


def test_pieces_are_moved_split_and_joined(here, draft):
    halves = [{"text": "he", "offset": 0, "duration": 1.5}, {"text": "lo", "offset": 1.5}]
    split = {"numbers": [0], "known": [["helo"]], "rows": [halves[0], {**halves[1], "duration": 1}]}
    (answer,) = corrections.replace(here, draft, [split])
    assert [row["number"] for row in answer["rows"]] == [0, 5]
    assert trained(draft)[:3] == [("he", 0, 1.5), ("lo", 1.5, 1), ("won", 0, 1)]
    (answer,) = corrections.replace(here, draft, [split])
    assert answer["refused"]  # its answer was lost: it is not split twice
    joined = {"numbers": [0, 5], "known": [["he"], ["lo"]]}
    joined["rows"] = [{"text": "he lo", "offset": 0.25, "duration": 2}]
    stale = {**joined, "known": [["he"], ["low"]]}
    apart = {**joined, "numbers": [0, 1], "known": [["he"], ["won"]]}
    answers = corrections.replace(here, draft, [stale, apart, joined])
    assert [each.get("refused") for each in answers] == [True, True, None]
    assert trained(draft)[0] == ("he lo", 0.25, 2) and texts(here, draft)[1] == "won"
    for wrong in ({"offset": -1}, {"duration": float("inf")}, {"edited": "x"}, {"text": 3}):
        with pytest.raises(UsageError, match="no change of texts"):
            corrections.replace(here, draft, [edit(0, "he lo", **wrong)])


def test_what_cannot_be_corrected(here, draft, json_lines):
    table = Table(here.data / "t.jsonl")
    json_lines(table.path, [{"audio": "0.wav", "text": "one"}])
    with pytest.raises(UsageError, match="only reads this folder"):
        corrections.replace(here, table, [edit(0, "one", text="two")])
    segments = [{"start": 0, "end": 1, "text": "one"}]
    for row in (
        {"audio": "0.wav", "segments": segments},
        {"audio": "a", "text": "1", "sentence": "2"},
    ):
        json_lines(draft.path, [row])
        with pytest.raises(UsageError, match=r"texts of segments|several columns"):
            corrections.texts_of(draft, here)
    json_lines(draft.path, [{"audio": "0.wav", "text": "one"}, b"{broken", [1], {"text": "none"}])
    rows, left_out = corrections.texts_of(draft, here)
    assert len(rows) == 1 and "line 3" in left_out and "no audio path" in left_out
    draft.corrected.write_text('{"broken')
    with pytest.raises(DataError, match="damaged"):
        corrections.texts_of(draft, here)


def test_an_earlier_form_is_read(here, draft):
    """Corrected tables once had the form of their drafts."""
    draft.corrected.write_bytes(draft.path.read_bytes())
    assert texts(here, draft) == ["helo", "won", "", "to", ""]
    corrections.replace(here, draft, [edit(1, "won", text="one")])
    assert trained(draft)[1] == ("one", 0, 1)


def test_every_table_has_its_own_corrections(here, draft, wav):
    folder = here.runs / "one"
    for name in "ab":
        wav(folder / f"{name}.wav", 3)
        (folder / f"{name}.srt").write_text(f"1\n00:00:00,000 --> 00:00:01,000\n{name}\n")
    (folder / "c.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nits audio is gone\n")
    (folder / "a.csv").write_text(
        "begin_ms,audio_file,transcript,dur_ms,tone\n500,a.wav,c,1500,H\n"
    )
    names = ["draft.jsonl", "a.srt", "b.srt", "*.srt", "a.csv"]
    tables = [Table(folder / name) for name in names]
    tables += [Table(folder / "a.eaf", tier) for tier in ("", "An_na", "An/na")]
    assert len({table.corrected for table in tables}) == 8
    for table in tables[:5]:
        assert table.latest == table.path
        rows, left_out = corrections.texts_of(table, here)
        corrections.replace(
            here, table, [edit(0, rows[0]["text"], text=f"mended {table.path.name}")]
        )
        assert left_out.startswith("file of annotations cannot be used") == ("*" in table.path.name)
    for table in tables[:5]:
        assert texts(here, table)[0] == f"mended {table.path.name}"
    rows, _ = corrections.texts_of(tables[3], here)
    assert [row["from"] for row in rows] == ["a.srt", "b.srt"]
    (row,) = map(json.loads, tables[4].corrected.read_text().splitlines())
    times = {"offset": 0.5, "duration": 1.5}
    assert row == {
        "audio_filepath": "a.wav",
        "text": "mended a.csv",
        **times,
        "tone": "H",
        "number": 0,
    }
