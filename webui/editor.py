"""The editor of a table's texts: its page, what it sends, and the question which tier has them."""

import html
import os
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.errors import Failure
from speech.alignment import page
from speech.data.annotations.rows import READERS, UnclearTier, files_of, has_texts
from webui import corrections, take_home, views
from webui.corrections import Table
from webui.places import Places

SAVED = (
    "Each text is saved in {file} as you type, on this computer. The table that it is made of stays"
    " as it is. Check and training on the Data tab take these texts; those that are left out are not"
    " trained on."
)
WHICH = (
    "Which tier has the texts? Take the one with what was said, in the writing that a recogniser"
    " should learn; not the one with glosses, translations, sounds or numbers. On the Data tab,"
    " write its name into the field tier (in quotes if it has a space)."
)


def table_of(places: Places, name: str, tier: str = "") -> Table:
    """The table that somebody has chosen. Raises `UsageError`."""
    return Table(places.table(name), tier)


def address(places: Places, table: Table, form: str = "") -> str:
    """The address of the editor of a table, or of its texts to take home in a form."""
    words = {"table": places.name(table.path), "tier": table.tier, "form": form}
    words = {key: word for key, word in words.items() if word}
    return ("home?" if form else "editor?") + urlencode(words, errors="replace")


def links_home(places: Places, table: Table) -> str:
    """Links to the texts in all forms, as HTML."""
    links = []
    for form in take_home.FORMS:
        link = html.escape(address(places, table, form))
        links.append(f'<a href="{link}" download>{form}</a>')
    return f"Take the texts home: {', '.join(links)}."


def routes(places: Places) -> list[Route]:
    """`GET /editor?table=&tier=`, `GET /home?table=&tier=&form=`, and `POST /texts` with {"table",
    "tier", "changes"}."""

    def named(request: Request) -> Table:
        query = request.query_params
        return table_of(places, query.get("table", ""), query.get("tier", ""))

    def home(request: Request) -> Response:
        try:
            name, content = take_home.taken(places, named(request), request.query_params["form"])
        except (Failure, KeyError) as failure:
            return PlainTextResponse(f"{failure}\n", 404)
        disposition = f"attachment; filename*=utf-8''{quote(name, errors='replace')}"
        headers = {"Content-Disposition": disposition, "Cache-Control": "no-store"}
        return Response(content, headers=headers, media_type="application/octet-stream")

    def shown(request: Request) -> Response:
        try:
            table = named(request)
            corrections.check_writable(places, table)
            try:
                content = _page(places, table)
            except UnclearTier:
                content = _question(places, table)
        except Failure as failure:
            return PlainTextResponse(f"{failure}\n", 404)
        return HTMLResponse(content, headers={"Cache-Control": "no-store"})

    def save(event: dict) -> list[dict]:
        table = table_of(places, str(event["table"]), str(event.get("tier", "")))
        answers = corrections.replace(places, table, event["changes"])
        return [{**each, "rows": list(map(_text, each["rows"]))} for each in answers]

    async def saved(request: Request) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(save, await request.json()))
        except Failure as failure:
            return PlainTextResponse(str(failure), 400)
        except (KeyError, TypeError, ValueError):
            return PlainTextResponse("this is no change of texts", 400)

    return [
        Route("/editor", shown),
        Route("/home", home),
        Route("/texts", saved, methods=["POST"]),
    ]


def _text(row: dict) -> dict:
    """What the editor knows of a row."""
    keys = ("number", "offset", "duration", "confidence")
    shown = {key: row[key] for key in keys if isinstance(row.get(key), int | float)}
    return {**shown, "text": corrections.text_in(row), "edited": row.get("edited", "")}


def _page(places: Places, table: Table) -> str:
    rows, left_out = corrections.texts_of(table, places)
    name = places.name(table.path)
    folder = table.corrected.parent
    sounds = {each["audio_filepath"]: None for each in rows}
    sounds = {path: _sound(places, folder / path) for path in sounds}
    shown = []
    for row in rows:
        own, source = sounds[row["audio_filepath"]]
        speaker = f", {row['speaker']}" if row.get("speaker") else ""
        shown.append({**_text(row), "name": f"{row.get('from', own)}{speaker}", "source": source})
    about = html.escape(SAVED.format(file=places.name(table.corrected)))
    about += f"</p><p>{links_home(places, table)}"
    if left_out:
        about += f"</p><p><b>Not in this list: {views.text(left_out)}</b>"
    key = f"{table.corrected} {os.stat(folder).st_ino}"  # a later table of this name is another one
    sent = {"table": name, "tier": table.tier}
    data = {"rows": shown, "key": key, "address": "texts", "table": sent}
    return page.editor(data, name, about, "Save")


def _sound(places: Places, path: Path) -> tuple[str, str]:
    """The name of a recording as its owner knows it, and its address."""
    path = Path(os.path.normpath(path))
    try:
        file = places.file(path)
    except Failure:
        return f"{path.name} (the file is missing)", ""
    return places.own_name(file), "audio?" + urlencode({"path": str(file)}, errors="replace")


def _question(places: Places, table: Table) -> str:
    """A page with the tiers of the first file to choose from."""
    path = files_of(table.path)[0]
    rows = []
    for tier in filter(has_texts, READERS[path.suffix.lower()](path).tiers):
        link = html.escape(address(places, Table(table.path, tier.name)))
        texts = [each.text for each in tier.annotations if each.text]
        cells = [tier.kind, tier.participant, str(len(texts)), " / ".join(texts[:3])[:100]]
        rows.append([f'<a href="{link}">{views.text(tier.name)}</a>', *map(views.text, cells)])
    listed = views.table(["tier", "type", "speaker", "texts", "such as"], rows)
    style = f"{page.STYLE} td, th {{ padding: .3rem .8rem .3rem 0; text-align: left; }}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Tiers</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style><h1>{views.text(places.own_name(path))}</h1><p>{WHICH}</p>{listed}"
    )
