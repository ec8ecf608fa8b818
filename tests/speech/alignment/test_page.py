"""The page on which a person listens to the cuts: one file, in which a text runs nothing."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

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
    assert [row["number"] for row in shown] == [1, 2, 0]
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
