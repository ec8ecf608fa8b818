"""What the page plays and downloads."""

import io
import os

import pytest
import soundfile
from starlette.applications import Starlette
from starlette.testclient import TestClient

from webui import media, views


@pytest.fixture
def client(here):
    return TestClient(Starlette(routes=media.routes(here)))


def seconds_of(content: bytes) -> float:
    samples, rate = soundfile.read(io.BytesIO(content))
    assert rate == media.RATE and samples.ndim == 1
    return len(samples) / rate


@pytest.mark.parametrize("name", ["a.wav", "a b/ख.flac", "a&b#c?.ogg"])
def test_recordings_are_played_from_where_they_lie(client, here, wav, name):
    wav(here.data / name, seconds=2.0, rate=8000)
    for path in (name, str(here.data / name)):
        answer = client.get("/audio", params={"path": path})
        assert answer.status_code == 200 and answer.headers["content-type"] == "audio/wav"
        assert seconds_of(answer.content) == pytest.approx(2.0)
    part = client.get("/audio", params={"path": name, "offset": 0.5, "seconds": 1})
    assert seconds_of(part.content) == pytest.approx(1.0)
    html = views.player(name, 1.5)
    address = html.partition('src="')[2].partition('"')[0].replace("&amp;", "&")
    assert seconds_of(client.get(f"/{address}").content) == pytest.approx(0.5)


def test_long_recordings_are_cut(client, here, wav, monkeypatch):
    monkeypatch.setattr(media, "SECONDS", 1.0)
    wav(here.data / "a.wav", seconds=3.0)
    for given in ({}, {"seconds": 2}):
        answer = client.get("/audio", params={"path": "a.wav", **given})
        assert seconds_of(answer.content) == pytest.approx(1.0)


def test_players_can_move_to_another_place(client, here, wav):
    whole = client.get("/audio", params={"path": wav(here.data / "a.wav")}).content
    for wanted, part in {
        "bytes=0-": whole,
        "bytes=44-99": whole[44:100],
        "bytes=10-": whole[10:],
    }.items():
        answer = client.get("/audio?path=a.wav", headers={"Range": wanted})
        assert answer.status_code == 206 and answer.content == part
        first = len(whole) - len(part) if wanted.endswith("-") else 44
        expected = f"bytes {first}-{first + len(part) - 1}/{len(whole)}"
        assert answer.headers["content-range"] == expected
    for wanted in ("bytes=99999999-", "bytes=-5", "lines=1-2", "bytes=9-1"):
        answer = client.get("/audio?path=a.wav", headers={"Range": wanted})
        assert answer.status_code == 200 and answer.content == whole


@pytest.mark.parametrize("address", ["/audio", "/download"])
def test_nothing_outside_is_read(client, here, tmp_path, wav, address):
    wav(tmp_path / "outside.wav")
    (here.runs / "link.wav").symlink_to(tmp_path / "outside.wav")
    (here.runs / "folder").symlink_to(tmp_path)
    os.mkfifo(here.runs / "pipe.wav")
    for path in [
        "",
        ".",
        "/etc/passwd",
        "../outside.wav",
        f"{here.runs}/../outside.wav",
        "link.wav",
        "folder/outside.wav",
        "pipe.wav",
        "missing.wav",
        "a" * 5000,
        "\0",
        "http://127.0.0.1:1/a.wav",
    ]:
        answer = client.get(address, params={"path": path})
        assert answer.status_code == 404 and answer.text.count("\n") == 1, path
    assert client.get(address).status_code == 404


def test_what_is_no_audio_is_one_line(client, here, wav):
    (here.data / "a.csv").write_text("a,b\n1,2\n")
    wav(here.data / "a.wav")
    queries = ["path=a.csv", "path=a.wav&offset=9", "path=a.wav&seconds=x", "path=a.wav&offset=-1"]
    for query in [*queries, "path=a.wav&seconds=nan", "path=a.wav&offset=inf"]:
        answer = client.get(f"/audio?{query}")
        assert answer.status_code == 404 and answer.text.count("\n") == 1, query
        assert answer.headers["content-type"].startswith("text/plain")


def test_files_of_runs_are_downloaded_and_no_others(client, here, wav):
    (here.runs / "a/export").mkdir(parents=True)
    (here.runs / "a/export/<b>.html").write_text("<script>alert(1)</script>")
    answer = client.get("/download", params={"path": "a/export/<b>.html"})
    assert answer.content == b"<script>alert(1)</script>"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    part = client.get("/download?path=a/export/%3Cb%3E.html", headers={"Range": "bytes=1-6"})
    assert part.status_code == 206 and part.content == b"script"
    wav(here.data / "a.wav")
    assert client.get("/download?path=a.wav").status_code == 404
