"""The editor's page, and what it sends."""

import csv
import io
import json
import re
import signal
import time
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from speech.alignment import page
from speech.data.annotations import elan, lines, praat
from speech.data.loading import Checks, load_corpus
from tests.webui.test_app import started
from tests.webui.test_browser import picture
from webui import editor

WAIT = 180  # seconds
HARMFUL = "</script><img src=x onerror=alert(1)>"
EAF = """<ANNOTATION_DOCUMENT><HEADER/><TIME_ORDER><TIME_SLOT TIME_SLOT_ID="a" TIME_VALUE="100"/>
<TIME_SLOT TIME_SLOT_ID="b" TIME_VALUE="900"/></TIME_ORDER>{}</ANNOTATION_DOCUMENT>"""
TIER = """<TIER TIER_ID="{0}"><ANNOTATION><ALIGNABLE_ANNOTATION ANNOTATION_ID="{0}"
TIME_SLOT_REF1="a" TIME_SLOT_REF2="b"><ANNOTATION_VALUE>{0} says</ANNOTATION_VALUE>
</ALIGNABLE_ANNOTATION></ANNOTATION></TIER>"""


@pytest.fixture
def client(here):
    return TestClient(Starlette(routes=editor.routes(here)))


def data_of(html: str) -> dict:
    """What the page has for its script."""
    found = []

    class Reader(HTMLParser):
        is_data = False

        def handle_starttag(self, name, attributes):
            self.is_data = ("id", "data") in attributes
            assert name != "img"

        def handle_data(self, text):
            if self.is_data and text.strip():
                found.append(json.loads(text))

    Reader().feed(html)
    (data,) = found
    return data


def test_texts_have_their_own_names(client, here, wav, tmp_path):
    """Of two dropped recordings with a table: the names are those of the person's files."""
    table = tmp_path / "t.csv"
    table.write_text(f"audio_file|text|speaker\ntape 1.wav|{HARMFUL}|Ann\n{HARMFUL}.wav|two|Ben\n")
    names = ["tape 1.wav", f"{HARMFUL}.wav", "t.csv"]
    clip = wav(tmp_path / "x.wav")
    here.save_upload([clip, clip, str(table)], names)
    data = data_of(client.get("/editor?table=uploads/1/manifest.jsonl").text)
    shown = [row["name"] for row in data["rows"]]
    assert shown == ["tape 1.wav, Ann", "script><img src=x onerror=alert(1)>.wav, Ben"]
    change = {"numbers": [1], "known": [["two"]], "rows": [{"text": "zwei", "edited": "done"}]}
    answer = client.post(data["address"], json={**data["table"], "changes": [change]})
    assert answer.json() == [{"rows": [{"number": 1, "text": "zwei", "edited": "done"}]}]
    data = data_of(client.get("/editor?table=uploads/1/manifest.jsonl").text)
    assert [row["edited"] for row in data["rows"]] == ["", "done"]


def test_a_tier_is_asked_for(client, here, wav, tmp_path):
    eaf = tmp_path / "x.eaf"
    eaf.write_text(EAF.format(TIER.format("Anna") + TIER.format("Ben")))
    here.save_upload([wav(tmp_path / "a.wav"), str(eaf)], ["talk.wav", "talk.eaf"])
    address = "/editor?table=uploads/1/upload-0001.0.eaf"
    question = client.get(address).text
    assert "Which tier has the texts?" in question and "talk.eaf" in question
    assert 'href="editor?table=uploads%2F1%2Fupload-0001.0.eaf&amp;tier=Ben"' in question
    data = data_of(client.get(f"{address}&tier=Ben").text)
    assert [row["text"] for row in data["rows"]] == ["Ben says"]


def test_texts_are_taken_home(client, here, wav, tmp_path):
    """A file for each recording, under its own name; they are read again."""
    names = ["tape 1.wav", "tape 1.srt", "ärger.wav", "ärger.srt"]
    cues = "1\n00:00:01,000 --> 00:00:02,500\none\n\n2\n00:00:03,000 --> 00:00:04,000\ntwo\n"
    (tmp_path / "t.srt").write_text(cues)
    files = [wav(tmp_path / "a.wav", 5), str(tmp_path / "t.srt")] * 2
    table = here.name(here.save_upload(files, names))
    changes = [
        {"numbers": [0], "known": [["one"]], "rows": [{"text": "eins", "edited": "done"}]},
        {"numbers": [1], "known": [["two"]], "rows": [{"edited": "left out"}]},
    ]
    client.post("/texts", json={"table": table, "changes": changes})
    for form, reader in ((".eaf", elan.read), (".TextGrid", praat.read), (".srt", None)):
        answer = client.get("/home", params={"table": table, "form": form})
        archive = zipfile.ZipFile(io.BytesIO(answer.content))
        assert archive.namelist() == [f"tape 1{form}", f"ärger{form}"]
        archive.extractall(tmp_path / "home")
        for name, first in zip(archive.namelist(), ("eins", "one"), strict=True):
            path = tmp_path / "home" / name
            (tier,) = (reader or lines.read_subtitles)(path).tiers
            found = [(each.start, each.end, each.text) for each in tier.annotations if each.text]
            assert found == [(1, 2.5, first), (3, 4, "two")]
    media = elan.read(tmp_path / "home/ärger.eaf").media
    assert [each.relative for each in media] == ["./ärger.wav"]
    answer = client.get("/home", params={"table": table, "form": ".csv"})
    assert answer.headers["content-disposition"].endswith("''all.csv")
    rows = list(csv.DictReader(io.StringIO(answer.content.decode("utf-8-sig"))))
    assert [row["file"] for row in rows] == ["tape 1.wav"] * 2 + ["ärger.wav"] * 2
    assert [row["edited"] for row in rows] == ["done", "left out", "", ""]
    assert rows[1] == {**rows[1], "begin": "3.000", "end": "4.000", "text": "two"}
    for form in ("", ".exe"):
        assert client.get("/home", params={"table": table, "form": form}).status_code == 404


def test_an_eaf_comes_home_with_all_that_it_had(client, here, wav, tmp_path):
    """The corrected tier is added to the person's files, of which only one was edited."""
    names = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.eaf").write_text(EAF.format(TIER.format("tx") + TIER.format("gloss")))
        names += [f"{name}.wav", f"{name}.eaf"]
    clip = wav(tmp_path / "x.wav")
    here.save_upload([clip, str(tmp_path / "one.eaf"), clip, str(tmp_path / "two.eaf")], names)
    table = {"table": "uploads/1/*.eaf", "tier": "tx"}
    rows = [{"text": "mended", "offset": 0.2, "edited": "done"}]
    client.post(
        "/texts",
        json={**table, "changes": [{"numbers": [0], "known": [["tx says"]], "rows": rows}]},
    )
    answer = client.get("/home", params={**table, "form": ".eaf"})
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    assert archive.namelist() == ["one.eaf", "two.eaf"]
    archive.extractall(tmp_path / "home")
    for name, first in (("one", (0.2, 1.0, "mended")), ("two", (0.1, 0.9, "tx says"))):
        before = elan.read(tmp_path / f"{name}.eaf").tiers
        *kept, new = elan.read(tmp_path / "home" / f"{name}.eaf").tiers
        assert kept == before and new.name == "utterances@tx"
        assert [each[:3] for each in new.annotations] == [pytest.approx(first)]


def test_what_came_home_is_corrected_once_more(client, here, wav, tmp_path):
    """The person's tiers stay; the texts of earlier rounds are in tiers with other names."""
    (tmp_path / "1.eaf").write_text(EAF.format(TIER.format("tx") + TIER.format("gloss")))
    for number, tier in enumerate(["tx", "", "tx"], 1):
        files = [wav(tmp_path / "x.wav"), str(tmp_path / f"{number}.eaf")]
        table = here.name(here.save_upload(files, ["talk.wav", "talk.eaf"]))
        known = [["tx says", f"round {number - 1}"]]
        change = {"numbers": [0], "known": known, "rows": [{"text": f"round {number}"}]}
        about = {"table": table, "tier": tier}
        client.post("/texts", json={**about, "changes": [change]})
        if number == 1:
            about = {"table": next(each for each in here.manifests() if "corrected" in each)}
        answer = client.get("/home", params={**about, "form": ".eaf"})
        assert answer.headers["content-disposition"].endswith("''talk.eaf")
        (tmp_path / f"{number + 1}.eaf").write_bytes(answer.content)
    tiers = {tier.name: tier.annotations for tier in elan.read(tmp_path / "4.eaf").tiers}
    ours = ["earlier utterances@tx", "earlier utterances@tx-2", "utterances@tx"]
    assert {*tiers} == {"tx", "gloss", *ours}
    assert {tiers[name][0].text for name in ours} == {"round 1", "round 2", "round 3"}
    assert tiers["utterances@tx"][0].text == "round 3"


def test_tapes_with_one_name_go_home_with_their_folders(client, here, wav, json_lines):
    (here.runs / "one").mkdir()
    files = [wav(here.data / f"day {day}/a.wav", 2) for day in (1, 2)]
    rows = [{"file": file, "text": file, "pieces": []} for file in files]
    json_lines(here.runs / "one/draft.jsonl", rows)
    answer = client.get("/home", params={"table": "one/draft.jsonl", "form": ".eaf"})
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    assert archive.namelist() == ["day 1/a.eaf", "day 2/a.eaf"]
    assert f"file://{files[1]}" in archive.read("day 2/a.eaf").decode()


def test_recordings_that_are_called_as_copies_were(here, wav, tmp_path):
    """Each file of annotations has its own recording, and the origin of that one."""
    media = '<MEDIA_DESCRIPTOR MEDIA_URL="file:///{}" TIME_ORIGIN="{}"/>'
    files, names = [], []
    for name in ("0001", "0002"):
        head = media.format(f"{name}.mp4", 0) + media.format(f"{name}.wav", 250)
        path = tmp_path / f"{name}.eaf"
        content = EAF.replace("<HEADER/>", f"<HEADER>{head}</HEADER>")
        path.write_text(content.format(TIER.format("tx")))
        files += [str(path), wav(tmp_path / f"{name}.wav", 2)]
        names += [f"{name}.eaf", f"{name}.wav"]
    corpus, _ = load_corpus(str(here.save_upload(files, names)), str, Checks())
    assert [here.own_name(Path(each)) for each in corpus.paths] == ["0001.wav", "0002.wav"]
    assert corpus.offsets.tolist() == pytest.approx([0.35, 0.35])


def test_a_draft_of_whole_files_is_taken_home(client, here, wav, json_lines):
    """One recording without times: its file alone, with the length of the recording."""
    (here.runs / "one").mkdir()
    row = {"file": wav(here.data / "tape.wav", 2), "text": "one", "pieces": []}
    json_lines(here.runs / "one/draft.jsonl", [row])
    answer = client.get("/home", params={"table": "one/draft.jsonl", "form": ".srt"})
    assert answer.headers["content-disposition"].endswith("''tape.srt")
    assert answer.text == "1\n00:00:00,000 --> 00:00:02,000\none\n\n"


def test_what_is_refused(client, here, wav):
    wav(here.data / "a.wav")
    (here.data / "t.csv").write_text("audio_file,text\na.wav,one\n")
    answer = client.get("/editor?table=t.csv")
    assert answer.status_code == 404 and "only reads this folder" in answer.text
    for name in ("", "gone.csv", "../x.csv", "/dev/zero"):
        assert client.get("/editor", params={"table": name}).status_code == 404
    for body in ({}, [], {"table": "t.csv", "changes": 3}, {"table": "gone.csv", "changes": []}):
        assert client.post("/texts", json=body).status_code == 400


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def tabs(browser):
    """Opens pages in one browser; errors of their scripts fail the test."""
    context = browser.new_context(accept_downloads=True)
    context.set_default_timeout(1000 * WAIT)
    problems = []

    def opened(address: str):
        tab = context.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(address)
        return tab

    yield opened
    context.close()
    assert not problems


def until(tab, condition: str) -> None:
    """Waits for a condition of the page's script."""
    end = time.monotonic() + WAIT
    while not tab.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


@pytest.mark.browser
def test_the_door_without_a_server(tabs, wav, tmp_path):
    """The page of --align: what is mended, left out and moved is in the file that it saves."""
    rows = [
        {"audio_filepath": wav(tmp_path / f"{i}.wav", 3), "offset": 0.5, "duration": 2}
        | {"text": f"text {i} {HARMFUL}", "confidence": -0.1 * i}
        for i in range(3)
    ]
    for row in rows:
        row["audio_filepath"] = Path(row["audio_filepath"]).name
    (tmp_path / "a.html").write_text(page.review(rows, "a.json"))
    tab = tabs((tmp_path / "a.html").as_uri())
    boxes = tab.get_by_label("Text", exact=True)
    boxes.nth(0).fill(" mended ")  # of the least certain, the third row
    boxes.nth(1).press("Escape")
    until(tab, "player.currentTime > 0.5")  # it begins there
    tab.get_by_role("button", name="Leave out").nth(1).click()
    boxes.nth(2).focus()
    tab.get_by_label("End").fill("2.25")
    tab.get_by_label("End").press("Tab")
    tab.reload()  # this browser keeps it
    assert boxes.nth(0).input_value() == " mended " and not tab.locator("img").count()
    assert "1 left out" in tab.locator("#count").inner_text()
    with tab.expect_download() as saved:
        tab.get_by_role("button", name="Save the corrected manifest").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    expected = [{**rows[0], "duration": 1.75}, {**rows[2], "text": "mended"}]
    assert [json.loads(line) for line in lines] == expected


COUNT = 30


def upload(here, wav, tmp_path) -> str:
    """Two recordings with fifteen texts each. Returns the table's name."""
    files = []
    for name in "ab":
        cues = (f"{i + 1}\n00:00:{i:02},000 --> 00:00:{i:02},900\n{name}{i}\n" for i in range(15))
        (tmp_path / f"{name}.srt").write_text("\n".join(cues))
        files += [wav(tmp_path / f"{name}.wav", 16), str(tmp_path / f"{name}.srt")]
    return here.name(here.save_upload(files, [Path(each).name for each in files]))


def saved(here) -> dict[int, str]:
    path = here.runs / "uploads/1/all.srt.corrected.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {row["number"]: row["text"] for row in map(json.loads, lines)}


def wait_for_text(here, number: int, wanted: str) -> None:
    end = time.monotonic() + WAIT
    while saved(here).get(number) != wanted:
        assert time.monotonic() < end, (number, wanted, saved(here).get(number))
        time.sleep(0.05)


@pytest.mark.browser
def test_nothing_that_is_typed_is_lost(tabs, here, wav, tmp_path):
    """Reloads, a second tab, and kills of the server between two keys."""
    address = f"editor?table={upload(here, wav, tmp_path)}"
    wanted = {}
    with started(tmp_path) as server:
        base = server.address.split("?")[0]
        port = re.search(r":(\d+)/", base)[1]
        tab = tabs(server.address)
        tab.goto(base + address)

        def write(number: int, text: str, delay: int = 0) -> None:
            box = tab.get_by_label("Text", exact=True).nth(number)
            box.fill("")
            box.press_sequentially(text, delay=delay)
            wanted[number] = text

        write(5, "without a pause, so that a killed browser takes little", delay=60)
        assert len(saved(here)[5]) > 20  # there is no time for a pause before this line
        write(0, "typed and left alone")
        wait_for_text(here, 0, wanted[0])
        write(1, "reloaded after the last key")
        tab.reload()
        write(2, "the tab is closed after the last key")
        tab.close()
        tab = tabs(base + address)
        for number in range(3):
            wait_for_text(here, number, wanted[number])
        write(3, "half of this ")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        tab.get_by_label("Text", exact=True).nth(3).press_sequentially("is typed without a server")
        wanted[3] += "is typed without a server"
        write(4, "and all of this")
        wanted[7] = " ".join(["ሰላም ለዓለም"] * 2500)  # more bytes than a closing tab may send
        tab.get_by_label("Text", exact=True).nth(7).fill(wanted[7])
        tab.get_by_text("the page does not answer").wait_for()
    with started(tmp_path, "--port", port) as server:
        other = tabs(server.address)  # which has the new token; the old tab saves by itself
        for number in (3, 4, 7):
            wait_for_text(here, number, wanted[number])
        tab.get_by_text("all is saved").wait_for()
        other.goto(base + address)
        box = other.get_by_label("Text", exact=True)
        assert box.nth(4).input_value() == wanted[4]
        box.nth(4).fill("theirs")
        wait_for_text(here, 4, "theirs")
        write(4, "mine")  # in the first tab, which does not know that
        tab.get_by_text("there it is: theirs").wait_for()
        assert saved(here)[4] == "theirs"
        tab.get_by_role("button", name="Keep mine").click()
        wait_for_text(here, 4, "mine")
        box.nth(4).fill("later")  # in the other tab, which does not know that
        other.get_by_text("there it is: mine").wait_for()
        other.get_by_text("1 not saved yet (changed elsewhere: text 5)").wait_for()
        other.get_by_role("button", name="Take that").click()
        other.get_by_text("all is saved").wait_for()
        write(6, "a text that the other tab does not see")
        wait_for_text(here, 6, wanted[6])
        other.get_by_role("button", name="Done", exact=True).nth(6).click()
        until(other, f"rows[6].saved === {wanted[6]!r}")  # the mark, and what is there now
        assert box.nth(6).input_value() == wanted[6]
    assert {number: saved(here)[number] for number in wanted} == wanted
    assert len(saved(here)) == COUNT and saved(here)[29] == "b14"


@pytest.mark.browser
def test_a_second_tab_saves_what_the_first_one_types(tabs, here, wav, tmp_path):
    """It finds the text in the browser's store; whoever types on in the first tab is not asked."""
    address = f"editor?table={upload(here, wav, tmp_path)}"
    with started(tmp_path) as server:
        first = tabs(server.address)
        first.goto(server.address.split("?")[0] + address)
        first.evaluate("timer = 1")  # it has not sent yet what is typed
        box = first.get_by_label("Text", exact=True).nth(0)
        box.fill("half")
        second = tabs(first.url)
        wait_for_text(here, 0, "half")
        second.get_by_text("all is saved").wait_for()
        first.evaluate("timer = 0")
        box.fill("half of this")
        wait_for_text(here, 0, "half of this")
        first.get_by_text("all is saved").wait_for()
        second.evaluate("timer = 1")
        second.get_by_label("Text", exact=True).nth(1).fill("of a text that goes")
        first.bring_to_front()
        box.focus()
        first.get_by_role("button", name="Join with the next").click()
        until(first, "rows.length === 29")
        second.reload()
        second.get_by_text("split or joined elsewhere: of a text that goes").wait_for()


@pytest.mark.browser
def test_an_hour_of_texts(tabs, here, wav, tmp_path):
    """The keys, the marks, the search; pieces are moved, split and joined."""
    address = f"editor?table={upload(here, wav, tmp_path)}"
    with started(tmp_path) as server:
        tab = tabs(server.address)
        tab.goto(server.address.split("?")[0] + address)
        until(tab, "clip.seconds > 1.8")
        tab.keyboard.press("Control+Enter")
        tab.keyboard.press("Control+Enter")
        until(tab, "player.currentTime > 0.9 && now.number === 2")  # it has played a second before
        tab.keyboard.press("F3")
        assert tab.evaluate("player.playbackRate") == 0.75
        tab.get_by_text("30 texts, 2 done, 0 left out; all is saved").wait_for()
        tab.reload()
        until(tab, "now.number === 2 && clip.seconds > 2.8")  # the first not done
        tab.get_by_label("Show").select_option("done")
        shown = tab.locator(".row").filter(visible=True)
        assert shown.count() == 2
        tab.get_by_label("Show").select_option("all")
        tab.get_by_label("Search").fill("B.SRT")
        assert shown.count() == 15
        tab.get_by_label("Search").fill("")
        box = tab.get_by_label("Text", exact=True)
        box.nth(2).focus()
        wave = tab.locator("#wave").bounding_box()
        across = wave["width"] / 2.9  # a second
        picture(tab, "correct")

        def drag(start: float, end: float) -> None:
            tab.mouse.move(wave["x"] + start * across, wave["y"] + 9)
            tab.mouse.down()
            tab.mouse.move(wave["x"] + end * across, wave["y"] + 9, steps=3)
            tab.mouse.up()

        drag(1.9, 2.2)  # the end of the text; the second 1 is at the left
        until(tab, "Math.abs(now.duration - 1.2) < 0.02 && now.offset === 2")
        until(tab, "clip.seconds > 3.1")
        tab.evaluate("player.currentTime = 1.5")
        box.nth(2).press("Home")
        box.nth(2).press("ArrowRight")
        tab.get_by_role("button", name="Split").click()
        until(tab, "rows.length === 31 && rows[3].text === '2'")
        assert saved(here)[2] == "a" and saved(here)[30] == "2"
        assert tab.evaluate("Math.abs(rows[3].offset - 2.5)") < 0.02
        tab.get_by_role("button", name="Join").click()
        until(tab, "rows.length === 30 && rows[2].text === 'a 2'")
        assert saved(here)[2] == "a 2" and len(saved(here)) == COUNT
