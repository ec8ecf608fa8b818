"""Subtitles in SubRip's and WebVTT's format from the timed parts of a transcript."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from speech.text import SENTENCE_ENDS

# What a subtitle made of words has at most, and the pause that ends one.
SECONDS = 6.0
CHARACTERS = 84  # two lines
PAUSE = 1.0  # seconds
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

    def whole(self, row: dict) -> str:
        """The file for the transcript `row`."""
        numbered = enumerate(cues(row), start=1)
        return self.head + "".join(self.cue(number, part) for number, part in numbered)


FORMATS = {  # by the suffix of a file's name
    ".srt": Format("", srt_cue, b"1\n"),
    ".vtt": Format("WEBVTT\n\n", vtt_cue, b"WEBVTT\n"),
}
OTHERS = set(
    ".ass .dfxp .itt .lrc .sami .sbv .scc .smi .ssa .stl .sub .ttml".split()
)  # not written


def cues(row: dict) -> Iterator[dict]:
    """The subtitles {"start", "end", "text"} of a transcript: its words in groups, or its
    segments."""
    if "words" not in row:
        yield from row["segments"]
        return
    group: list[dict] = []
    for word in row["words"]:
        if group and _ends(group, word):
            yield _joined(group)
            group = []
        group.append(word)
    if group:
        yield _joined(group)


def _ends(group: list[dict], word: dict) -> bool:
    """Whether a subtitle of the words in `group` ends before `word`."""
    characters = sum(len(each["text"]) + 1 for each in group) + len(word["text"])
    return (
        group[-1]["text"].endswith(SENTENCE_ENDS)
        or word["start"] - group[-1]["end"] > PAUSE
        or word["end"] - group[0]["start"] > SECONDS
        or characters > CHARACTERS
    )


def _joined(group: list[dict]) -> dict:
    text = " ".join(word["text"] for word in group)
    start = group[0]["start"]
    return {"start": start, "end": max(group[-1]["end"], start + SHORTEST), "text": text}
