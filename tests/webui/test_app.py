"""The page's program as users start it, and the page that is made of all tabs."""

import ast
import contextlib
import functools
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from common.errors import UsageError
from webui import app

STARTING = "starting the page: its address appears here in half a minute\n"
ROOT = Path(__file__).resolve().parents[2]


def environment(**extra) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "GRADIO_TEMP_DIR"}, **extra}


@contextlib.contextmanager
def started(folder: Path, *words: str, **extra):
    """A page of this folder: `process`, and `lines` that it printed when it listened."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "webui/app.py"), "--port", "0", *words],
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        first = process.stdout.readline()
        assert first, process.communicate()[1]
        yield SimpleNamespace(process=process, address=first.strip())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextlib.contextmanager
def entered(address: str):
    """Somebody who opened the printed address."""
    with httpx.Client(base_url=address.partition("?")[0], timeout=30) as client:
        assert client.get(address).status_code == 200
        yield client


def error_of(folder: Path, *words: str) -> str:
    command = [sys.executable, str(ROOT / "webui/app.py"), *words]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


# --- the program ----------------------------------------------------------------------------------


def test_a_page_from_its_start_to_its_end(tmp_path):
    """It prints one line, makes its folders, serves all tabs, and ends soon while a browser is
    connected."""
    with started(tmp_path, GRADIO_ROOT_PATH="/elsewhere", GRADIO_SHARE="True") as page:
        address = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)\?token=[\w-]{32}", page.address)
        (private,) = (tmp_path / "runs").iterdir()
        assert private.stat().st_mode & 0o777 == 0o700 and (tmp_path / "data").is_dir()
        with entered(page.address) as client:
            content = client.get("/").text
            for word in ("Data", "Train", "Runs", "Try", "Export", app.TITLE):
                assert f'"{word}"' in content or f"# {word}" in content
            assert "/elsewhere" not in content and address[1] not in content
            for path in ("/gradio_api/info", "/docs", "/config", "/monitoring"):
                assert client.get(path).status_code == 404
            with client.stream("GET", "/gradio_api/heartbeat/session") as stream:
                assert next(stream.iter_lines()) == "data: ALIVE"
                begun = time.monotonic()
                page.process.send_signal(signal.SIGTERM)
                assert page.process.wait(20) == 0
                assert time.monotonic() - begun < app.END_SECONDS + 2
        assert page.process.communicate() == ("", STARTING)
        assert not private.exists()


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1, port {port}" in error_of(tmp_path, "--port", port)


def test_what_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(UsageError, match=f"--data {name}: there is no such folder"):
            app.check(arguments("--data", name))
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(UsageError, match=f"cannot listen on {host}"):
            app.listen(host, 0)


def arguments(*words: str):
    parser = app.options.Parser("test")
    app.add_arguments(parser)
    return parser.parse_args(words)


def test_files_of_a_page_that_was_killed_are_removed(tmp_path):
    """Those of another page that is open stay."""
    program = (
        "import sys, time; from pathlib import Path; from webui import app\n"
        "print(app.private_folder(Path(sys.argv[1])), flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    theirs = Path(other.stdout.readline().strip())
    (theirs / "a.wav").touch()
    mine = app.private_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([theirs, mine])
    other.kill()
    other.communicate()
    again = app.private_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, again])


def test_gradio_sends_nothing_and_keeps_its_files_in_private(tmp_path, monkeypatch):
    for name in ("GRADIO_SHARE", "GRADIO_ALLOWED_PATHS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "0")
    for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    app.set_environment(tmp_path)
    found = {name: value for name, value in os.environ.items() if name.startswith("GRADIO_")}
    assert found == {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": str(tmp_path)}
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert os.environ["DO_NOT_TRACK"] == "1"


def test_the_environment_is_set_before_gradio_is_imported():
    program = "import sys; from webui import app, guard, media; sys.exit('gradio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]")]
)
def test_the_address_that_is_printed(host, shown):
    settings = SimpleNamespace(host=host, port=7860, token="TOKEN")
    assert app.address(settings) == f"http://{shown}:7860/?token=TOKEN"


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of all tabs, over empty folders."""
    from webui.catalogue import find_recipes
    from webui.context import Context
    from webui.places import Places
    from webui.use import Models

    folder = tmp_path_factory.mktemp("page")
    for name in ("data", "runs"):
        (folder / name).mkdir()
    models = Models()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        yield app.make_page(
            Context(Places(folder / "data", folder / "runs"), find_recipes(), models)
        )
    models.close()


def test_an_idle_queue_sleeps(page):
    assert page._queue.sleep_when_free == app.QUEUE_SECONDS


def test_no_event_of_the_page_is_public(page):
    """Except those that draw a part of the page anew, for which gradio has no such setting."""
    assert len(page.fns) > 10
    for function in page.fns.values():
        assert function.api_visibility == "private" or function.renderable, function.name


def test_events_are_made_in_one_place():
    """Also those of parts that are drawn later, which the test above does not see."""
    for path in (ROOT / "webui/tabs").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", "")
            assert name not in ("click", "change", "input", "select", "submit", "tick", "upload"), (
                path
            )


def test_nothing_of_the_page_is_shared_or_evaluated(page):
    """These evaluate strings as code, which the guard's policy forbids, or send to other sites."""
    import gradio as gr

    for block in page.blocks.values():
        kind = type(block)
        assert not isinstance(
            block, gr.HTML | gr.LinePlot | gr.FileExplorer | gr.DuplicateButton
        ), kind
        assert "share" not in (getattr(block, "buttons", None) or ()), kind


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def foreign_site(tmp_path):
    """An address of another site, which serves `tmp_path`."""
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words) -> None:
        pass


ATTACK = """<!doctype html><title>other</title>
<iframe id="frame" src="PAGE"></iframe>
<script>
window.results = {}
const json = {method: "POST", headers: {"Content-Type": "text/plain"}, body: "{}"}
const upload = () => { const f = new FormData(); f.append("files", new Blob(["x"]), "a.wav"); return f }
const tries = {
  event: () => fetch("PAGEgradio_api/queue/join", {...json, mode: "no-cors", credentials: "include"}),
  upload: () => fetch("PAGEgradio_api/upload", {method: "POST", body: upload(), mode: "no-cors",
    credentials: "include"}),
  read: () => fetch("PAGE", {credentials: "include"}).then((r) => r.text()),
}
for (const name in tries) tries[name]().then(() => results[name] = "sent", () => results[name] = "refused")
</script>"""


@pytest.mark.browser
def test_another_site_can_neither_post_nor_frame_the_page(tmp_path, browser, foreign_site):
    with started(tmp_path) as page, browser.new_context() as context:
        address = page.address.partition("?")[0]
        tab = context.new_page()
        problems = []
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(page.address)
        tab.get_by_role("tab", name="Data").wait_for()
        assert tab.url == address and problems == []
        cookie = context.cookies()[0]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"

        statuses = {}
        (tmp_path / "attack.html").write_text(ATTACK.replace("PAGE", address))
        other = context.new_page()
        other.on("response", lambda answer: statuses.setdefault(answer.url, answer.status))
        before = sorted((tmp_path / "runs").rglob("*"))
        for site in (foreign_site, foreign_site.replace("127.0.0.1", "localhost")):
            statuses.clear()
            other.goto(f"{site}attack.html")
            other.wait_for_function("Object.keys(results).length == 3")
            assert set(other.evaluate("Object.values(results)")) == {"refused"}
            frame = other.frames[1]
            assert "gradio" not in frame.content() and not frame.get_by_role("tab").count()
            assert statuses.get(address) == 403, statuses
        assert sorted((tmp_path / "runs").rglob("*")) == before

        # A link on another site to the printed address works, one without the token does not.
        (tmp_path / "link.html").write_text(
            f'<a href="{page.address}">in</a> <a href="{address}">no</a>'
        )
        other.goto(f"{foreign_site.replace('127.0.0.1', 'localhost')}link.html")
        other.get_by_text("in").click()
        other.get_by_role("tab", name="Data").wait_for()
        other.goto(f"{foreign_site.replace('127.0.0.1', 'localhost')}link.html")
        other.get_by_text("no").click()
        other.get_by_text("nothing from other sites").wait_for()
