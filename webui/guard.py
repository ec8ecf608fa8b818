"""Stands before the page: who may ask, what may be asked, and how much may be sent.

Gradio by itself answers any name of the host (so a foreign site may rebind its own name to this
machine), takes events and uploads that a foreign site sends, and has routes that read files and
fetch addresses. `Guard` is an ASGI application around another one, so answers that stream are not
held up."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

# Gradio needs inline scripts and styles, pictures inside them, and addresses (blob:) of what is
# recorded. It evaluates no strings as code, if HTML comes by Markdown alone.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self' 'unsafe-inline'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "media-src 'self' blob:",
        "font-src 'self'",
        "connect-src 'self' blob:",
        "form-action 'none'",
        "base-uri 'self'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# What the page asks for. Gradio has more routes: a description of all events, links that restore
# states, routes that fetch addresses. None of them answers.
GET = set(
    "/ /theme.css /favicon.ico /audio /download /editor /home /gradio_api/app_id /gradio_api/queue/data"
    " /gradio_api/upload_progress".split()
)
GET_BELOW = ("/assets/", "/static/", "/gradio_api/heartbeat/")
FILE = "/gradio_api/file="
UPLOAD = "/gradio_api/upload"
POST = {UPLOAD, "/texts", "/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset"}
EVENT_BYTES = 16 << 20  # of an event; files come by uploads
DRAIN_SECONDS = 5.0  # to read a refused upload, because a browser reads the reason only after that

OLD_TOKEN = (
    "open the address with the token that the page printed when it started;"
    " each start has a new one"
)
ENTERED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Welcome</title>
<noscript>This page needs JavaScript.</noscript><script>location.replace("./")</script></html>"""


@dataclass(frozen=True)
class GuardSettings:
    """`host` and `port` are those that the page listens on, `temporary` is gradio's folder of
    uploads and results. All in `kept` together may have `bytes_kept`; then uploads are refused."""

    host: str
    port: int
    token: str
    temporary: Path
    kept: tuple[Path, ...]
    bytes_kept: int


class Guard:
    """Passes to `app` what comes from the page itself. Every other request gets one line."""

    def __init__(self, app: Callable[..., Awaitable], settings: GuardSettings):
        self.app = app
        self.settings = settings
        self.temporary = settings.temporary.resolve()
        self.cookie = f"speech_page_{settings.port}"  # ports of one host share their cookies
        self.uploads = 0  # that are arriving
        self.kept = 0  # bytes, as counted when the first of these began, and theirs

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            send = _with_headers(send)
            answer = self.answer(scope)
            if answer is None:
                await self.pass_on(scope, receive, send)
            else:
                await answer(scope, receive, send)
        else:  # a websocket, which the page does not use
            await send({"type": "websocket.close", "code": 1008})

    def answer(self, scope) -> Response | None:
        """The answer in place of the page, or None for the page itself."""
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        enters = method == "GET" and path == "/" and _same(given, self.settings.token)
        refusal = self.foreign(headers, enters)
        if refusal:
            return _refuse(refusal)
        if enters:
            return self.welcome()
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        if not _same(cookie, self.settings.token):
            return _refuse(OLD_TOKEN, is_event=method == "POST")
        return self.unknown(method, path)

    def foreign(self, headers: Headers, enters: bool) -> str:
        """Why a request does not come from the page itself, or from its address in a browser's bar;
        otherwise "". A request that `enters` with the token may follow a link on another site."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.is_ours(hosts[0]):
            return f"the page does not answer as {' '.join(hosts)[:200] or 'a host without a name'}"
        for origin in headers.getlist("origin"):
            parts = urlsplit(origin) if origin.startswith(("http://", "https://")) else None
            if parts is None or not self.is_ours(parts.netloc):
                return "the page takes nothing from other sites"
        site = headers.get("sec-fetch-site", "none")
        fetched = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        is_navigation = fetched == ("navigate", "document")
        if site not in ("none", "same-origin") and not (enters and is_navigation):
            return "the page takes nothing from other sites"
        return ""

    def is_ours(self, host: str) -> bool:
        """Whether a browser that asks for this `name:port` means this page. Addresses in digits do
        when the page listens to other machines: no foreign site can be called so."""
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:@/?#\s]+)(?::(\d{1,5}))?", host.lower())
        if match is None:
            return False
        name = match[1].strip("[]")
        if int(match[2] or 80) != self.settings.port:
            return False
        if name in ("localhost", "127.0.0.1", "::1", self.settings.host.lower()):
            return True
        return not is_loopback(self.settings.host) and _is_address(name)

    def welcome(self) -> Response:
        """Gives the cookie. No redirect: in a navigation that began on another site, a browser
        would not send a strict cookie to the page behind it."""
        answer = HTMLResponse(ENTERED, headers={"Cache-Control": "no-store"})
        answer.set_cookie(self.cookie, self.settings.token, httponly=True, samesite="strict")
        return answer

    def unknown(self, method: str, path: str) -> Response | None:
        """The answer to what the page does not have or never asks for."""
        if method in ("GET", "HEAD"):
            if path.startswith(FILE):
                if not self.is_temporary(path.removeprefix(FILE)):
                    return _refuse("the page does not serve this file")
            elif path not in GET and not path.startswith(GET_BELOW):
                return _refuse("no such page", 404)
        elif method != "POST" or path not in POST:
            return _refuse("no such page", 404)
        return None

    def is_temporary(self, path: str) -> bool:
        """Whether this is a file of gradio's own folder: an upload, or a result to play."""
        try:
            resolved = Path(path).resolve()
            return resolved.is_relative_to(self.temporary) and resolved.is_file()
        except (OSError, ValueError):  # too long, a zero byte
            return False

    async def pass_on(self, scope, receive, send) -> None:
        """Hands a request to the page. What a proxy says of the address is left out: the browser
        takes the address that it knows."""
        headers = MutableHeaders(scope=scope)
        for name in ("x-forwarded-host", "x-forwarded-proto", "x-forwarded-prefix"):
            del headers[name]
        headers["x-gradio-server"] = "/"
        scope = {**scope, "headers": headers.raw}
        if scope["path"] == "/":
            scope["query_string"] = b""  # gradio would restore a state that it names
        if scope["path"] == UPLOAD:
            await self.upload(scope, receive, send)
            return
        if scope["method"] == "POST":
            event, refusal = self.read_event(await _read(receive, EVENT_BYTES))
            if refusal:
                await refusal(scope, receive, send)
                return
            receive = _replayed(event, receive)
        await self.app(scope, receive, send)

    def read_event(self, body: bytes | None) -> tuple[bytes, Response | None]:
        """An event, and the answer if it is too large, or has files that are not uploads. Gradio
        would copy any file of this machine that an event names to where it can be read, and fetch
        addresses; it checks that only in pages that it launches itself."""
        if body is None:
            return b"", _refuse("this is too much for an event", 413, is_event=True)
        try:
            event = json.loads(body)
            checked = json.dumps(event, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # half of a character, too, is no answer to gradio
            return b"", _refuse("an event is JSON", 400, is_event=True)
        values = [event]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                path = value.get("path")
                if isinstance(path, str) and not self.is_temporary(path):
                    return b"", _refuse(
                        "the file of this event is not an upload: choose it again", is_event=True
                    )
                values += value.values()
            elif isinstance(value, list):
                values += value
        return checked, None

    # --- uploads ---

    async def upload(self, scope, receive, send) -> None:
        """Passes an upload on until, by its stated or its real length, there is no more room."""
        if not self.uploads:
            self.kept = _bytes_below(self.settings.kept)
        stated = Headers(scope=scope).get("content-length", "")
        room = self.settings.bytes_kept - self.kept
        refused = stated.isdigit() and int(stated) > room

        async def counted() -> dict:
            nonlocal refused
            message = await receive()
            self.kept += len(message.get("body", b""))
            refused = refused or self.kept > self.settings.bytes_kept
            return {"type": "http.disconnect"} if refused else message

        async def unless_refused(message: dict) -> None:
            if not refused:
                await send(message)

        self.uploads += 1
        try:
            if refused:
                await _drain(receive)
            else:
                await self.app(scope, counted, unless_refused)
        except Exception:
            if not refused:
                raise
        finally:
            self.uploads -= 1
            self.remove_parts()
        if refused:
            answer = _refuse(
                f"this upload does not fit: {max(0, room) / 1e6:.0f} of "
                f"{self.settings.bytes_kept / 1e6:.0f} MB are left; remove uploads, or start the "
                "page again",
                413,
            )
            await answer(scope, receive, send)

    def remove_parts(self) -> None:
        """Removes what gradio leaves of uploads that did not arrive whole."""
        if self.uploads:
            return
        with contextlib.suppress(OSError), os.scandir(self.temporary) as entries:
            for entry in entries:
                if entry.name.startswith("tmp") and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a page that listens on `host`."""
    return host.lower() == "localhost" or (
        _is_address(host) and ipaddress.ip_address(host).is_loopback
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _refuse(reason: str, status: int = 403, is_event: bool = False) -> Response:
    """`is_event`: the page asks, which shows the reason that it finds in JSON."""
    if is_event:
        return JSONResponse({"detail": reason}, status)
    return PlainTextResponse(f"{reason}\n", status)


def _with_headers(send):
    async def sent(message: dict) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return sent


async def _read(receive, limit: int) -> bytes | None:
    """The whole body of a request, or None if it is longer than `limit` bytes."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            return None
    return body


def _replayed(body: bytes, receive):
    """A `receive` that gives a body that was read already, then what follows."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> dict:
        return messages.pop() if messages else await receive()

    return received


async def _drain(receive) -> None:
    async def drained() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drained(), DRAIN_SECONDS)


def _bytes_below(folders: tuple[Path, ...]) -> int:
    """The bytes of all files below some folders."""
    total = 0
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):  # removed at this moment
                    total += os.lstat(os.path.join(place, name)).st_size
    return total
