"""The guard before a page of gradio's, over HTTP on a real port. Each test fails if the line of the
guard that it is about is taken away: gradio alone answers almost all of these requests."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tests.webui.locks import wait_for
from webui import app as page_app
from webui import guard
from webui.places import Places
from webui.tabs import events

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token"
ROOM = 1_000_000  # bytes
SESSION = "session"


def settings_of(folder: Path, **changes) -> guard.GuardSettings:
    values = {
        "host": "127.0.0.1",
        "port": 7860,
        "token": TOKEN,
        "temporary": folder,
        "kept": (folder,),
        "bytes_kept": ROOM,
    }
    return guard.GuardSettings(**{**values, **changes})


def echo_page() -> gr.Blocks:
    with gr.Blocks(analytics_enabled=False) as page:
        given = gr.File(label="Given")
        back = gr.File(label="Back")
        button = gr.Button("Echo")
        events.on(button.click, lambda path: path, given, back)
    return page


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A page with one event, which gives a file back, behind the guard; `address`, `temporary`,
    `data`, `runs`."""
    folder = tmp_path_factory.mktemp("server")
    temporary = folder / "runs" / ".page-test"
    temporary.mkdir(parents=True)
    (folder / "data").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(temporary))
        listener = page_app.listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        uploads = folder / "runs" / "uploads"
        settings = settings_of(temporary, port=port, kept=(temporary, uploads))
        places = Places(folder / "data", folder / "runs")
        app = page_app.make_app(echo_page(), places, settings)
        serving = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="critical"))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
        thread.start()
        while not serving.started:
            time.sleep(0.01)
        yield SimpleNamespace(
            address=f"http://127.0.0.1:{port}",
            port=port,
            temporary=temporary,
            data=folder / "data",
            runs=folder / "runs",
            uploads=uploads,
        )
        serving.should_exit = True
        serving.force_exit = True
        thread.join()


@pytest.fixture
def stranger(server):
    """Somebody without the token."""
    with httpx.Client(base_url=server.address, timeout=30) as client:
        yield client


@pytest.fixture
def user(server):
    """Somebody who came in by the printed address."""
    with httpx.Client(base_url=server.address, timeout=30) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


def one_line(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text[:300]
    if answer.headers["content-type"] == "application/json":  # to an event, whose page shows it
        return answer.json()["detail"]
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.count("\n") == 1
    return answer.text


def send_event(client: httpx.Client, file) -> httpx.Response:
    body = {"data": [file], "fn_index": 0, "session_hash": SESSION}
    return client.post("/gradio_api/queue/join", json=body)


def result_of(client: httpx.Client) -> dict:
    """The output of an event that was sent."""
    address = f"/gradio_api/queue/data?session_hash={SESSION}"
    with client.stream("GET", address) as answer:
        for line in answer.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line else {}
            if message.get("msg") == "process_completed":
                assert message["success"], message
                return message["output"]["data"][0]
    raise AssertionError("no result")


def file_data(path) -> dict:
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}}


def upload(client: httpx.Client, size: int, **headers) -> httpx.Response:
    files = {"files": ("a.wav", b"x" * size)}
    return client.post("/gradio_api/upload", files=files, headers=headers)


# --- who may ask ----------------------------------------------------------------------------------


def test_the_token_of_the_address_becomes_a_cookie(stranger, server):
    answer = stranger.get("/", params={"token": TOKEN})
    assert answer.status_code == 200 and 'location.replace("./")' in answer.text
    words = answer.headers["set-cookie"].lower().split("; ")
    assert words[0] == f"speech_page_{server.port}={TOKEN}"
    assert {"httponly", "samesite=strict", "path=/"} <= set(words)
    page = stranger.get("/")
    assert page.status_code == 200 and "gradio_config" in page.text


@pytest.mark.parametrize(
    ("path", "cookie"),
    [
        *((path, "") for path in ("/", "/?token=", "/?token=wrong", "/theme.css", "/audio")),
        ("/gradio_api/file=/etc/passwd", ""),
        ("/", "speech_page_{port}=wrong"),
        ("/", "speech_page_{port}="),
        ("/", "speech_page_{port}=a-toke\u00f1"),
        ("/", "speech_page_1{port}=a-token"),  # of another page on this host
    ],
)
def test_without_the_token_nothing_answers(stranger, server, path, cookie):
    headers = {"Cookie": cookie.format(port=server.port).encode()} if cookie else {}
    answer = stranger.get(path, headers=headers)
    assert "open the address with the token" in one_line(answer, 403)
    assert "set-cookie" not in answer.headers
    one_line(upload(stranger, 1, **headers), 403)


def test_cookies_of_other_programs_do_not_hide_ours(stranger, server):
    cookie = f'other={{"a": 1}}; =; b="; speech_page_{server.port}={TOKEN}'
    assert stranger.get("/", headers={"Cookie": cookie}).status_code == 200


@pytest.mark.parametrize(
    "host",
    "example.com example.com:{port} 127.0.0.1 127.0.0.1:1 10.0.0.1:{port} [::2]:{port} {port}"
    " localhost.evil.com:{port} 127.0.0.1:{port}@evil.com".split(),
)
def test_foreign_names_of_the_host_are_refused(user, server, host):
    """A foreign site can give its own name the address of this machine."""
    answer = user.get("/", headers={"Host": host.format(port=server.port)})
    assert "does not answer as" in one_line(answer, 403)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "[::1]"])
def test_names_of_this_machine_are_its_own(user, server, name):
    cookie = {"Cookie": f"speech_page_{server.port}={TOKEN}"}  # httpx keeps cookies for one host
    headers = {"Host": f"{name}:{server.port}", **cookie}
    assert user.get("/", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["https://example.com", "http://127.0.0.1:1", "http://localhost", "null", "", "file://"],
)
def test_what_foreign_sites_send_is_refused(user, server, origin):
    headers = {"Origin": origin}
    expected = "the page takes nothing from other sites"
    before = sorted(server.temporary.rglob("*"))
    assert expected in one_line(upload(user, 10, **headers), 403)
    assert sorted(server.temporary.rglob("*")) == before
    body = {"data": [None], "fn_index": 0, "session_hash": SESSION}
    answer = user.post("/gradio_api/queue/join", json=body, headers=headers)
    assert expected in one_line(answer, 403)
    assert expected in one_line(user.get("/", headers=headers), 403)


def test_what_the_page_sends_is_taken(user, server):
    headers = {"Origin": server.address, "Sec-Fetch-Site": "same-origin"}
    assert upload(user, 10, **headers).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_requests_that_another_site_began_are_refused(user, stranger, site):
    navigation = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for headers in ({}, navigation):
        answer = user.get("/", headers={"Sec-Fetch-Site": site, **headers})
        assert "nothing from other sites" in one_line(answer, 403)
    # Only a link to the printed address may stand elsewhere, and not in a frame or a picture there.
    came = stranger.get(
        "/", params={"token": TOKEN}, headers={"Sec-Fetch-Site": site, **navigation}
    )
    assert came.status_code == 200
    for changed in ({"Sec-Fetch-Dest": "iframe"}, {"Sec-Fetch-Mode": "no-cors"}):
        headers = {"Sec-Fetch-Site": site, **navigation, **changed}
        one_line(stranger.get("/", params={"token": TOKEN}, headers=headers), 403)
    headers = {"Sec-Fetch-Site": site, **navigation}
    one_line(stranger.get("/theme.css", params={"token": TOKEN}, headers=headers), 403)


def test_websockets_are_refused(tmp_path):
    client = TestClient(guard.Guard(None, settings_of(tmp_path)))
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/"):
        pass
    assert refused.value.code == 1008


@pytest.mark.parametrize(
    "path", ["/", "/theme.css", "/gradio_api/info", "/gradio_api/file=/etc/passwd", "/static/none"]
)
def test_headers_of_every_answer(user, stranger, path):
    for client in (user, stranger):
        headers = client.get(path).headers
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        (policy,) = headers.get_list("content-security-policy")
        words = dict(part.split(" ", 1) for part in policy.split("; "))
        assert words["default-src"] == words["frame-ancestors"] == "'none'"
        assert "unsafe-eval" not in policy and "http" not in policy and "*" not in policy


# --- other machines, proxies ----------------------------------------------------------------------


async def anything(scope, receive, send):
    await PlainTextResponse(dict(scope["headers"])[b"x-gradio-server"])(scope, receive, send)


def client_of(folder: Path, name: str, **changes) -> TestClient:
    """Somebody who calls the host by this name."""
    app = guard.Guard(anything, settings_of(folder, **changes))
    return TestClient(app, headers={"Host": name})


@pytest.mark.parametrize(
    ("listens_on", "host", "is_ours"),
    [
        ("0.0.0.0", "192.168.1.5:7860", True),
        ("::", "[fd00::1]:7860", True),
        ("0.0.0.0", "192.168.1.5", False),
        ("0.0.0.0", "evil.com:7860", False),
        ("gpu.lan", "gpu.lan:7860", True),
        ("gpu.lan", "other.lan:7860", False),
        ("127.0.0.2", "127.0.0.2:7860", True),
        ("127.0.0.2", "192.168.1.5:7860", False),
    ],
)
def test_addresses_are_ours_where_other_machines_may_ask(tmp_path, listens_on, host, is_ours):
    client = client_of(tmp_path, host, host=listens_on)
    assert client.get("/", params={"token": TOKEN}).status_code == (200 if is_ours else 403)


def test_a_port_that_browsers_leave_out(tmp_path):
    assert client_of(tmp_path, "localhost", port=80).get("/?token=a-token").status_code == 200


def test_the_page_takes_its_address_from_the_browser(tmp_path):
    """Gradio would believe what a proxy says of it."""
    said = {
        "X-Forwarded-Host": "evil.com",
        "X-Forwarded-Prefix": "/k",
        "X-Gradio-Server": "http://e",
    }
    cookie = {"Cookie": f"speech_page_7860={TOKEN}"}
    headers = {**said, **cookie, "Origin": "http://localhost:7860"}
    assert client_of(tmp_path, "localhost:7860").get("/", headers=headers).text == "/"


# --- what may be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    "/config /config?deep_link=x /docs /redoc /openapi.json /monitoring /monitoring/summary"
    " /gradio_api/info /gradio_api/openapi.json /gradio_api/deep_link?session_hash=x"
    " /gradio_api/mcp /gradio_api/mcp/sse /gradio_api/proxy=https://example.com/x"
    " /gradio_api/file/etc/passwd /gradio_api/runs /gradio_api/token /gradio_api/user"
    " /gradio_api/dev/reload /gradio_api/vibe-code /gradio_api/queue/status /logout"
    " /gradio_api/custom_component/x/client/component/x.js /static/../../../app.py"
    " /webui/app.py /svelte/x".split(),
)  # fmt: skip
def test_what_the_page_does_not_need_does_not_answer(user, path):
    assert user.get(path).status_code == 404


@pytest.mark.parametrize(
    "path",
    "/ /login /gradio_api/run/predict /gradio_api/api/predict /gradio_api/call/x"
    " /gradio_api/component_server /gradio_api/process_recording /gradio_api/vibe-edit"
    " /gradio_api/run-history/connect /gradio_api/stream/x".split(),
)  # fmt: skip
def test_what_nothing_sends_is_not_taken(user, path):
    one_line(user.post(path, json={}), 404)
    for method in ("OPTIONS", "PUT", "DELETE", "PATCH"):
        one_line(user.request(method, "/gradio_api/upload"), 404)


def test_only_files_of_gradio_are_served(user, server, tmp_path):
    (stored,) = upload(user, 10).json()
    assert user.get(f"/gradio_api/file={stored}").content == b"x" * 10
    (server.data / "a.txt").write_text("of the user")
    (server.temporary / "link").symlink_to("/etc/passwd")
    for path in [
        "/etc/passwd",
        "/proc/self/environ",
        str(ROOT / "webui/app.py"),
        "webui/app.py",
        str(Path.home() / ".bashrc"),
        str(server.data / "a.txt"),
        str(server.temporary / "link"),
        str(server.temporary),
        f"{server.temporary}/../../data/a.txt",
        f"{server.temporary}%2f..%2f..%2fdata%2fa.txt",
        "~/.bashrc",
        "",
        "x" * 5000,
        "%00",
        "http://example.com/x",
        "https:/example.com/x",
        "file:///etc/passwd",
        str(Path(".gradio/cached_examples/x").absolute()),  # gradio by itself serves this folder
    ]:
        assert user.get(f"/gradio_api/file={path}").status_code == 403, path
    (server.temporary / "link").unlink()


def test_an_event_brings_uploads_only(user, server):
    """Gradio would copy the file to where it can be read, or fetch the address."""
    (stored,) = upload(user, 10).json()
    assert send_event(user, file_data(stored)).status_code == 200
    back = result_of(user)
    assert Path(back["path"]).is_relative_to(server.temporary)
    assert user.get(back["url"]).content == b"x" * 10
    for path in ["/etc/passwd", str(ROOT / "webui/app.py"), "http://127.0.0.1:1/a", "a", ""]:
        for file in (file_data(path), [file_data(path)], {"a": [{"b": file_data(path)}]}):
            assert "is not an upload" in send_event(user, file).json()["detail"]
    assert not [path for path in server.temporary.rglob("*") if path.name == "passwd"]


def test_events_that_are_no_json_or_too_large(user, monkeypatch):
    headers = {"Content-Type": "application/json"}
    address = "/gradio_api/queue/join"
    half = b'{"data": ["\\ud800"], "fn_index": 0, "session_hash": "s"}'
    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, half):
        one_line(user.post(address, content=body, headers=headers), 400)
    monkeypatch.setattr(guard, "EVENT_BYTES", 1000)
    assert "too much" in one_line(user.post(address, json={"data": "x" * 1000}), 413)


def test_a_link_restores_no_state(user, server):
    state = server.temporary / "deep_links" / "a"
    state.mkdir(parents=True)
    (state / "state.json").write_text("[]")
    assert '"deep_link_state":"none"' in user.get("/?deep_link=a").text.replace(" ", "")


# --- how much may be sent -------------------------------------------------------------------------


@pytest.fixture
def empty(server):
    """The server with nothing kept."""
    for path in sorted(server.temporary.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return server


def files_of(server) -> list[int]:
    return sorted(path.stat().st_size for path in server.temporary.rglob("*") if path.is_file())


def test_two_uploads_fill_the_room(user, empty):
    assert upload(user, 600_000).status_code == 200
    refused = one_line(upload(user, 500_000), 413)
    assert "this upload does not fit: 0 of 1 MB are left" in refused
    assert files_of(empty) == [600_000]
    assert upload(user, 300_000).status_code == 200


def test_uploads_that_are_kept_with_runs_count(user, empty):
    empty.uploads.mkdir()
    (empty.uploads / "a.wav").write_bytes(b"x" * 900_000)
    one_line(upload(user, 200_000), 413)
    (empty.uploads / "a.wav").unlink()
    assert upload(user, 200_000).status_code == 200


def multipart(size: int):
    """The chunks of an upload whose length is not stated."""
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.wav"\r\n\r\n'
    yield head
    for _ in range(size // 10_000):
        yield b"x" * 10_000
    yield b"\r\n--b--\r\n"


@contextlib.contextmanager
def begun_upload(server, length: int):
    """A connection over which an upload of so many bytes was announced."""
    head = (
        f"POST /gradio_api/upload HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Cookie: speech_page_{server.port}={TOKEN}\r\nContent-Length: {length}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode())
        yield connection


def test_an_upload_that_breaks_off_leaves_nothing(user, empty):
    with begun_upload(empty, 900_000) as connection:
        connection.sendall(b"".join(list(multipart(400_000))[:-1]))
        wait_for(lambda: files_of(empty), 10)
    wait_for(lambda: not files_of(empty), 10)
    assert upload(user, 900_000).status_code == 200
