"""The page on which a person listens to the cuts: one file, in which a text runs nothing."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from speech.alignment import page

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script> <img src=x onerror=alert(1)>",
    "\u2028 \" ' ` ${alert(1)} \\u003c",
]


class Elements(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.scripts = []
        self.links = []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.links += [value for key, value in attributes if key in ("src", "href")]

    def handle_data(self, text):
        if self.names and self.names[-1] == "script" and text.strip():
            self.scripts.append(text)


def rows() -> list[dict]:
    names = ["tape.wav", "a #1?.mp3", "../javascript:x.wav"]
    return [
        {
            "audio_filepath": name,
            "offset": 1.5 * i,
            "duration": 1.25,
            "text": text,
            "confidence": [-0.2, -0.9, -0.4][i],
        }
        for i, (name, text) in enumerate(zip(names, HOSTILE, strict=True))
    ]


def parsed() -> tuple[Elements, dict, str]:
    html = page.review(rows(), "a<b>.json")
    elements = Elements()
    elements.feed(html)
    return elements, json.loads(elements.scripts[0]), html


def test_texts_are_data_and_the_worst_comes_first():
    elements, data, html = parsed()
    assert elements.names.count("script") == 2 and "img" not in elements.names
    assert elements.links == [] and "http" not in html.replace("http-equiv", "")
    shown = data["rows"]
    assert [row["place"] for row in shown] == [1, 2, 0]
    assert [row["text"] for row in shown] == [HOSTILE[1], HOSTILE[2], HOSTILE[0]]
    assert [row["source"] for row in shown] == [
        "a%20%231%3F.mp3", "../javascript%3Ax.wav", "tape.wav"
    ]  # fmt: skip
    assert data["name"] == "a<b>.json"


def test_only_the_pages_own_script_may_run():
    elements, _, html = parsed()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1]
    digest = hashlib.sha256(elements.scripts[1].encode()).digest()
    assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert "default-src 'none'" in policy and "script-src 'unsafe" not in policy


# A document, a player and a store, as much of them as the page uses.
BROWSER = """
const handlers = {};
const made = [];
function element(name) {
  return { name, children: [], className: "", textContent: "", value: "",
    append(child) { this.children.push(child); },
    addEventListener(kind, does) { (this.on ??= {})[kind] = does; },
    click() { this.on?.click?.(); } };
}
const known = { list: element("main"), count: element("span"), save: element("button"),
  data: { textContent: require("fs").readFileSync(0, "utf-8") } };
globalThis.document = { getElementById: (id) => known[id],
  createElement: (name) => { const one = element(name); made.push(one); return one; } };
globalThis.localStorage = { getItem: () => null, setItem: () => {} };
globalThis.Audio = class { play() { return Promise.resolve(); } };
globalThis.setInterval = () => {};
globalThis.Blob = class { constructor(parts) { this.parts = parts; } };
globalThis.URL = { createObjectURL: (blob) => { known.saved = blob.parts.join(""); return ""; } };
SCRIPT
const [first, second] = known.list.children;
const texts = first.children.find((one) => one.name === "textarea");
texts.value = " mended ";
texts.on.input();
second.children.filter((one) => one.name === "button")[2].click();
known.save.click();
process.stdout.write(known.saved);
"""


@pytest.mark.skipif(not shutil.which("node"), reason="the script runs in node, which is not here")
def test_what_is_saved():
    elements, _, _ = parsed()
    program = BROWSER.replace("SCRIPT", elements.scripts[1].replace('"use strict";', ""))
    ran = subprocess.run(
        ["node", "-e", program], input=elements.scripts[0], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    saved = [json.loads(line) for line in ran.stdout.splitlines()]
    expected = rows()
    expected[1]["text"] = "mended"  # the worst
    assert saved == [expected[0], expected[1]]  # the third, which is shown second, is rejected
