"""Media that the page plays and downloads besides gradio's own files: recordings of manifests, and
files of runs."""

import re

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.errors import Failure, UsageError
from speech.signal.audio import int16, read_audio, wav
from webui.places import Places

RATE = 24_000  # Hz, to listen
SECONDS = 300.0  # of a recording that is played at most


def routes(places: Places) -> list[Route]:
    """`/audio?path=&offset=&seconds=` and `/download?path=`."""

    def audio(request: Request) -> Response:
        query = request.query_params
        try:
            path = places.file(query.get("path", ""))
            offset = _seconds(query.get("offset"), 0.0)
            seconds = min(_seconds(query.get("seconds"), SECONDS), SECONDS)
            content = wav(int16(read_audio(str(path), RATE, offset, seconds)), RATE)
        except Failure as failure:
            return PlainTextResponse(f"{failure}\n", 404)
        return _part(content, request.headers.get("range", ""))

    def download(request: Request) -> Response:
        try:
            path = places.file(request.query_params.get("path", ""))
        except Failure as failure:
            return PlainTextResponse(f"{failure}\n", 404)
        if not path.is_relative_to(places.runs):
            return PlainTextResponse("only files of runs can be downloaded\n", 404)
        return FileResponse(path, filename=path.name, media_type="application/octet-stream")

    return [Route("/audio", audio), Route("/download", download)]


def _seconds(text: str | None, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"'{text}' is not a number of seconds")
    return value


def _part(content: bytes, wanted: str) -> Response:
    """A wav, or the bytes of it that a player asks for when somebody moves to another place."""
    headers = {"Accept-Ranges": "bytes"}
    match = re.fullmatch(r"bytes=(\d{1,12})-(\d{0,12})", wanted)
    start = int(match[1]) if match else 0
    end = min(int((match and match[2]) or len(content)) + 1, len(content))
    if match is None or start >= end:
        return Response(content, media_type="audio/wav", headers=headers)
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
    return Response(content[start:end], 206, media_type="audio/wav", headers=headers)
