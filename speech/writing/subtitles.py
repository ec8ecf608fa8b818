"""Subtitles in SubRip's and WebVTT's format from the timed parts of a transcript."""

import itertools
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from speech.writing.text import SENTENCE_ENDS, spaces_before

LINE = 42  # characters in a line at most; those that are twice as wide count twice
LINES = 2
SECONDS = 6.0  # a subtitle made of words at most
PAUSE = 1.0  # seconds, ends a subtitle
SHORTEST = 0.1  # seconds: a word can begin and end at once, and programs refuse such a subtitle


def shown(seconds: float, mark: str = ".") -> str:
    """00:01:02.345, with `mark` before the thousandths."""
    thousandths = round(1000 * seconds)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def srt_cue(number: int, part: dict) -> str:
    """The `number`-th subtitle of a .srt file, from 1 on."""
    times = f"{shown(part['start'], ',')} --> {shown(part['end'], ',')}"
    return f"{number}\n{times}\n{part['text']}\n\n"


def vtt_cue(number: int, part: dict) -> str:
    """A subtitle of a .vtt file."""
    text = part["text"].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"{shown(part['start'])} --> {shown(part['end'])}\n{text}\n\n"


@dataclass(frozen=True)
class Format:
    """How a file of subtitles is written: its `head`, then `cue(number, part)` for each subtitle.
    `begins`: the first bytes of a file that has any."""

    head: str
    cue: Callable[[int, dict], str]
    begins: bytes

    def whole(self, *rows: dict) -> str:
        """The file for a transcript, or for several of one recording, whose speakers may speak at
        once."""
        made = itertools.chain.from_iterable(map(cues, rows))
        numbered = enumerate(sorted(made, key=lambda part: part["start"]), start=1)
        return self.head + "".join(self.cue(number, part) for number, part in numbered)


FORMATS = {  # by the suffix of a file's name
    ".srt": Format("", srt_cue, b"1\n"),
    ".vtt": Format("WEBVTT\n\n", vtt_cue, b"WEBVTT\n"),
}


def cues(row: dict) -> list[dict]:
    """The subtitles {"start", "end", "text"} of a transcript, of its words or, without words, of
    its segments: at most two lines of LINE characters, filled from the first on. They end with
    sentences and segments and at pauses. They do not overlap, and last SHORTEST or longer: they may
    begin or end later."""
    by_word = "words" in row
    parts = row["words"] if by_word else row["segments"]
    spaces = itertools.repeat(" ")
    if by_word:
        spaces = spaces_before([part["text"] for part in parts], row["text"])
    made: list[dict] = []
    for number, (part, space) in enumerate(zip(parts, spaces, strict=False)):
        before = parts[number - 1] if number else None
        continues = by_word and before and not _ends(before, part)
        for piece in _pieces(part, space):
            last = made[-1] if made and continues else None
            if last and by_word and piece["end"] - last["start"] > SECONDS:
                last = None
            if last and (text := _added(last["text"], piece["space"], piece["text"])):
                last["text"] = text
                last["end"] = max(last["end"], piece["end"])
            else:
                made.append({key: piece[key] for key in ("start", "end", "text")})
            continues = True
    end = 0.0
    for cue, following in itertools.zip_longest(made, made[1:]):
        if following:
            cue["end"] = min(cue["end"], following["start"])
        cue["start"] = max(cue["start"], end)
        end = max(cue["end"], round(cue["start"] + SHORTEST, 3))
        cue["end"] = end
    return made


def _ends(word: dict, following: dict) -> bool:
    """Whether a subtitle ends after a word."""
    return word["text"].endswith(SENTENCE_ENDS) or following["start"] - word["end"] > PAUSE


def _pieces(part: dict, space: str) -> Iterator[dict]:
    """The words of a word or a segment with the "space" before each. They share its time by their
    numbers of characters. A word that no line holds is divided."""
    length = max(0.0, part["end"] - part["start"])
    total = len("".join(part["text"].split()))
    count = 0
    for word in part["text"].split():
        for text in _divided(word):
            start = part["start"] + length * count / total
            count += len(text)
            end = part["end"] if count == total else part["start"] + length * count / total
            times = {"start": round(start, 3), "end": round(end, 3)}
            yield {"text": text, "space": space, **times}
            space = ""
        space = " "


def _divided(word: str) -> list[str]:
    parts = [""]
    for character in word:
        if _width(parts[-1] + character) > LINE:
            parts.append("")
        parts[-1] += character
    return parts


def _added(text: str, space: str, piece: str) -> str | None:
    """The text of a subtitle with one more piece, or None if there is no room."""
    line = text.split("\n")[-1] + space + piece
    if _width(line) <= LINE:
        return text + space + piece
    return f"{text}\n{piece}" if text.count("\n") < LINES - 1 else None


def _width(text: str) -> int:
    """Characters without combining marks, those that are twice as wide counted twice."""
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.category(each) == "Mn" for each in text)
