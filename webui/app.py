"""The page: data in, training watched, results heard and read, in a browser.

    python webui/app.py                               # prints the address, with its token
    python webui/app.py --data recordings --runs runs --port 7861
    python webui/app.py --host 0.0.0.0                # for other machines, by the same token

It reads only the folders --data and --runs, and writes only in --runs. Trainings are processes of
their own: they continue when the page ends, and the next start finds them.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import options
from common.errors import Stopped, UsageError, exit_with_one_line, writing

DATA = "data"  # made if it is missing, because it is the default
FOLDER = ".page-"  # of gradio's files in --runs: uploads, and results to play
GRACE_SECONDS = 2  # for answers that are being sent when the page ends
END_SECONDS = 5.0  # after which it ends in any case
KEEP_SECONDS = 6 * 3600  # of gradio's files
PULSE_SECONDS = 5.0  # between two events of an open page
QUEUE_SECONDS = 0.05  # between two looks of gradio at its queue; its own 0.001 keep a core busy
# Nothing is sent anywhere, whatever else is set in the environment.
ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
TITLE = "Speech recipes"
STYLE = Path(__file__).with_name("style.css")
# Gradio 6.31 leaves the list of a dropdown open that is left with the Tab key: it sees the key
# after the list is closed, and opens it again.
# A click on a run's name in the table of runs changes the hidden control that follows it.
# A tab from before a restart has the token of that time. Gradio would try to connect for ever.
HEAD = """<script>addEventListener("keydown", (event) => {
  if (event.key === "Tab" && event.target.role === "combobox") event.stopImmediatePropagation()
}, true)
addEventListener("click", (event) => {
  const name = event.target.closest("[data-run]")?.dataset.run
  const box = document.querySelector("#clicked-run textarea")
  if (name && box) {
    box.value = name
    box.dispatchEvent(new Event("input", {bubbles: true}))
  }
})
const ask = window.fetch
window.fetch = async (...words) => {
  const answer = await ask(...words)
  const said = answer.status === 403 ? await answer.clone().text() : ""
  if (said.includes("OLD_TOKEN") && !window.over) {
    window.over = document.body.appendChild(document.createElement("dialog"))
    window.over.textContent = "The page was started again: OLD_TOKEN"
    window.over.showModal()
  }
  return answer
}</script>"""


def add_arguments(parser: options.Parser) -> None:
    parser.add_argument("--port", type=options.number(int, 0, 65535), default=7860, help="7860")
    text = "address to listen on (default: 127.0.0.1, this machine only)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--data", metavar="DIR", default=DATA, help="what may be read (data)")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where runs are kept (runs)")


def main(args) -> None:
    data, runs = check(args)
    listener = listen(args.host, args.port)
    temporary = private_folder(runs)
    try:
        set_environment(temporary)
        print("starting the page: its address appears here in half a minute", file=sys.stderr)
        serve(args, data, runs, listener, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # a thread may be waiting for a model


def check(args) -> tuple[Path, Path]:
    """The folders. Raises `UsageError`, or `RunError` if they cannot be made."""
    data, runs = Path(args.data).absolute(), Path(args.runs).absolute()
    for folder, flag in ((data, "--data"), (runs, "--runs")):
        if flag == "--data" and args.data != DATA and not folder.is_dir():
            raise UsageError(f"--data {args.data}: there is no such folder")
        with writing(folder, flag):
            folder.mkdir(parents=True, exist_ok=True)
    return data, runs


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything slow is done. Raises `UsageError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port or "
            "--host"
        ) from None


def private_folder(runs: Path) -> Path:
    """A new folder for gradio's files, of this user alone. Those of killed pages are removed."""
    for left in runs.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):  # in use
            _lock(left)
            shutil.rmtree(left)
    with writing(runs, "--runs"):
        folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=runs))
    with contextlib.suppress(OSError):  # a file system without locks
        _lock(folder)
    return folder


def _lock(folder: Path) -> None:
    """Locks a folder until this process ends. Raises `OSError` if another process has it."""
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def set_environment(temporary: Path) -> None:
    """Before gradio is imported, which reads these then."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT, GRADIO_TEMP_DIR=str(temporary))


def serve(args, data: Path, runs: Path, listener: socket.socket, temporary: Path) -> None:
    """Answers until a signal comes."""
    from webui.catalogue import find_recipes
    from webui.context import Context
    from webui.guard import GuardSettings
    from webui.places import UPLOADS, UPLOADS_BYTES, Places
    from webui.use import Models

    places = Places(data, runs)
    models = Models()
    settings = GuardSettings(
        host=args.host,
        port=listener.getsockname()[1],
        token=secrets.token_urlsafe(24),
        temporary=temporary,
        kept=(temporary, places.runs / UPLOADS),
        bytes_kept=UPLOADS_BYTES,
    )
    page = make_page(Context(places, find_recipes(), models))
    try:
        run_server(make_app(page, places, settings), settings, listener)
    finally:
        models.close()


def make_page(context):
    """The tabs, as `gr.Blocks`."""
    import gradio as gr

    from webui.tabs import data, export, train, try_it, watch
    from webui.tabs.events import on
    from webui.tabs.shared import Shared

    tabs_of = [
        ("data", "Data", data),
        ("train", "Train", train),
        ("runs", "Runs", watch),
        ("try", "Try", try_it),
        ("export", "Export", export),
    ]
    with gr.Blocks(
        title=TITLE, analytics_enabled=False, delete_cache=(KEEP_SECONDS // 6, KEEP_SECONDS)
    ) as page:
        gr.Markdown(f"# {TITLE}")
        settings = gr.State({})
        chosen = gr.State("")
        with gr.Tabs() as tabs:
            for name, title, module in tabs_of:
                with gr.Tab(title, id=name) as tab:
                    module.build(context, Shared(tabs, tab, settings, chosen))
        # Gradio forgets an event that begins in the moment in which the stream of an earlier one's
        # results is closed, until any other event opens the stream anew.
        on(gr.Timer(PULSE_SECONDS).tick, lambda: None, show_progress="hidden")
    page._queue.sleep_when_free = QUEUE_SECONDS
    page._queue.progress_update_sleep_when_free = 20 * QUEUE_SECONDS  # no event reports progress
    return page


def make_app(page, places, settings):
    """The guard around the page and the files that it plays."""
    import gradio as gr
    from starlette.applications import Starlette

    from webui import editor, media
    from webui.guard import OLD_TOKEN, Guard

    sizes = ("0.625rem", "0.75rem", "0.875rem", "1rem", "1.125rem", "1.375rem", "1.625rem")
    theme = gr.themes.Base(
        text_size=gr.themes.Size(*sizes, name="text"),  # follows the size that the browser has set
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    ).set(  # enough contrast to be read
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )
    app = gr.mount_gradio_app(
        Starlette(routes=[*media.routes(places), *editor.routes(places)]),
        page,
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,  # of errors that nobody expects: gradio shows them as HTML
        allowed_paths=[],
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme,
        css_paths=[STYLE],
        head=HEAD.replace("OLD_TOKEN", OLD_TOKEN),
    )
    return Guard(app, settings)


def run_server(app, settings, listener: socket.socket) -> None:
    """Prints the address when the page answers. Returns soon after a signal in any case."""
    import uvicorn

    def end() -> None:
        shutil.rmtree(settings.temporary, ignore_errors=True)
        os._exit(0)

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            print(address(settings), flush=True)

        def handle_exit(self, number, frame) -> None:
            # Connections that stay open are cut off, which is no error.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            timer = threading.Timer(END_SECONDS, end)
            timer.daemon = True
            timer.start()
            super().handle_exit(number, frame)

    server = Server(
        uvicorn.Config(
            app,
            ws="none",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, server.handle_exit)
    with contextlib.suppress(Stopped, KeyboardInterrupt):
        server.run(sockets=[listener])


def address(settings) -> str:
    """The page's address with its token."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{settings.port}/?token={settings.token}"


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
