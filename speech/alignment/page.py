"""The editor of texts: a page on which a person hears each utterance beside its text, and accepts,
mends or leaves it out. It is one file without a network for --align; webui/ serves it, too."""

import base64
import hashlib
import html
import json
from pathlib import Path
from urllib.parse import quote

BEGINS = b"<!doctype html>\n<!-- speech-recipes --align -->"
SCRIPT = Path(__file__).with_name("editor.js").read_text(encoding="utf-8")
STYLE = Path(__file__).with_name("editor.css").read_text(encoding="utf-8")
ABOUT = (
    "The least certain first. What you do not touch is kept as it is. Put the saved file in this"
    " page's folder."
)


def review(utterances: list[dict], name: str) -> str:
    """The page, in HTML, of utterances {"audio_filepath", "offset", "duration", "text",
    "confidence"} whose paths are relative to the page's folder. `name`: of the file to save."""
    rows = []
    for number, record in enumerate(utterances):
        source = quote(record["audio_filepath"].encode("utf-8", "surrogateescape"))
        shown = {key: record[key] for key in ("text", "offset", "duration", "confidence")}
        row = {**shown, "number": number, "name": record["audio_filepath"], "source": source}
        rows.append({**row, "record": record})
    rows.sort(key=lambda row: row["confidence"])
    content = json.dumps(utterances, ensure_ascii=True)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    data = {"rows": rows, "name": name, "key": digest}
    return editor(data, name, html.escape(ABOUT), "Save the corrected manifest")


def editor(data: dict, title: str, about: str, save: str) -> str:
    """The page with `data`: {"rows", "key" of what a browser keeps of them, "name" of the file that
    is saved} or, in place of the name, the "address" that changes are sent to, with "table".
    `about`: HTML; `save`: what its button says."""
    content = json.dumps(data, ensure_ascii=True)
    content = content.replace("<", "\\u003c")  # no text can end the element that it is in
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline';"
        " connect-src 'self'; media-src 'self' file: blob:"
    )
    return f"""{BEGINS.decode()}
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>
<header><div><button id="save">{html.escape(save)}</button>
<button id="next">Next that is not done</button>
<label>Show <select id="which"><option>all<option>not done<option>done<option>left out</select></label>
<label>Search <input id="search" type="search" size="12"></label>
<label>Go to <input id="jump" type="number" min="1" placeholder="number"></label>
<label>Speed <select id="speed"><option>0.5<option>0.75<option selected>1<option>1.25<option>1.5
</select></label></div>
<div id="count" role="status"></div><div id="warning" role="alert"></div>
<details><summary>Keys, and what is saved where</summary><p><kbd>Esc</kbd> play or pause,
<kbd>F1</kbd> back two seconds, <kbd>F3</kbd> slower, <kbd>F4</kbd> faster,
<kbd>Ctrl</kbd> <kbd>Enter</kbd> done, and the next, <kbd>Ctrl</kbd> <kbd>Shift</kbd>
<kbd>Enter</kbd> the next, <kbd>Ctrl</kbd> <kbd>S</kbd> save</p>
<p>{about}</p></details></header>
<main id="list"></main>
<div id="tools" class="tools" hidden><canvas id="wave"></canvas>
<label>Begin <input id="begin" type="number" min="0" step="0.05"></label>
<label>End <input id="stop" type="number" min="0" step="0.05"></label>
<button id="split">Split at the red line and the cursor</button>
<button id="join">Join with the next</button></div>
<script type="application/json" id="data">{content}</script>
<script>{SCRIPT}</script></body></html>
"""
