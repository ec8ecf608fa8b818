"""A page in one file, without a network, on which a person hears each utterance beside its text,
the least certain first, and accepts, mends or rejects it."""

import base64
import hashlib
import html
import json
from urllib.parse import quote

BEGINS = b"<!doctype html>\n<!-- speech-recipes --align -->"

STYLE = """
body { font: 16px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 60rem; }
header { background: #fff; border-bottom: 1px solid #999; padding: .5rem; }
header { position: sticky; top: 0; }
.row { align-items: center; display: flex; flex-wrap: wrap; gap: .5rem; padding: .4rem; }
.row textarea { flex: 1 1 20rem; font: inherit; min-width: 0; }
.row small { color: #555; overflow-wrap: anywhere; width: 11rem; }
.accepted { background: #e2f4e2; }
.mended { background: #e2ecf8; }
.rejected { background: #f4e2e2; }
button { font: inherit; padding: .2rem .6rem; }
@media (max-width: 40rem) {
  body { margin: 0; }
  .row textarea { flex-basis: 100%; min-height: 4.5rem; }
  .row small { flex: 1; width: auto; }
  button { min-height: 2.75rem; min-width: 4rem; }
}
"""

# Texts come in as values of text areas and as textContent, so they cannot become HTML.
SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows;
const key = "align " + data.digest;
const player = new Audio();
player.preload = "none";
let end = Infinity;
let states = {};
try { states = JSON.parse(localStorage.getItem(key)) || {}; } catch (error) { states = {}; }

function make(name, text, parent) {
  const element = document.createElement(name);
  element.textContent = text;
  parent.append(element);
  return element;
}

function remember() {
  try { localStorage.setItem(key, JSON.stringify(states)); } catch (error) { /* a full disk */ }
  const counts = { accepted: 0, mended: 0, rejected: 0 };
  for (const state of Object.values(states)) counts[state.what] += 1;
  document.getElementById("count").textContent =
    `${rows.length} utterances, ${counts.accepted} accepted, ${counts.mended} mended,` +
    ` ${counts.rejected} rejected`;
}

function play(row) {
  end = row.offset + row.duration;
  player.src = `${row.source}#t=${row.offset},${end}`;
  player.play().catch((error) => {
    document.getElementById("count").textContent = `${row.audio_filepath}: ${error.message}`;
  });
}

// The event "timeupdate" comes four times a second: the next word would be heard.
setInterval(() => {
  if (player.currentTime >= end) player.pause();
}, 20);

function show(row, number) {
  const line = make("div", "", document.getElementById("list"));
  const text = document.createElement("textarea");
  const mark = (what) => {
    if (what) states[number] = { what, text: text.value };
    line.className = `row ${states[number] ? states[number].what : ""}`;
    remember();
  };
  make("button", "Play", line).addEventListener("click", () => play(row));
  make("small", `${row.audio_filepath} ${row.offset.toFixed(1)} s, confidence ` +
    `${row.confidence}`, line);
  text.value = states[number] ? states[number].text : row.text;
  text.dir = "auto";
  text.rows = Math.ceil(row.text.length / 60);
  text.addEventListener("input", () => mark("mended"));
  line.append(text);
  make("button", "Accept", line).addEventListener("click", () => {
    mark(text.value === row.text ? "accepted" : "mended");
  });
  make("button", "Reject", line).addEventListener("click", () => mark("rejected"));
  mark(null);
}

document.getElementById("save").addEventListener("click", () => {
  const kept = [];
  rows.forEach((row, number) => {
    const state = states[number] || { what: "", text: row.text };
    if (state.what === "rejected" || !state.text.trim()) return;
    const { source, place, ...record } = row;
    kept.push([place, JSON.stringify({ ...record, text: state.text.trim() })]);
  });
  kept.sort((one, other) => one[0] - other[0]);
  const lines = kept.map((each) => each[1] + "\\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines], { type: "application/json" }));
  link.download = data.name;
  link.click();
});

rows.forEach(show);
remember();
"""


def review(utterances: list[dict], name: str) -> str:
    """The page, in HTML, of utterances {"audio_filepath", "offset", "duration", "text",
    "confidence"} whose paths are relative to the page's folder. `name`: that of the file that the
    page saves."""
    rows = []
    for place, row in enumerate(utterances):
        source = quote(row["audio_filepath"].encode("utf-8", "surrogateescape"))
        rows.append({**row, "source": source, "place": place})
    rows.sort(key=lambda row: row["confidence"])
    content = json.dumps(utterances, ensure_ascii=True)
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    data = json.dumps({"rows": rows, "name": name, "digest": digest}, ensure_ascii=True)
    data = data.replace("<", "\\u003c")  # no text can end the element that it is in
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline';"
        " media-src 'self' file: blob:"
    )
    return f"""{BEGINS.decode()}
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(name)}</title><style>{STYLE}</style></head><body>
<header><button id="save">Save the corrected manifest</button> <span id="count"></span><br>
<small>The least certain first. What you do not touch is kept as it is. Put the saved file in this
page's folder.</small></header>
<main id="list"></main>
<script type="application/json" id="data">{data}</script>
<script>{SCRIPT}</script></body></html>
"""
