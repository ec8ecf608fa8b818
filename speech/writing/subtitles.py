"""Subtitles in SubRip's and WebVTT's format from the timed parts of a transcript."""

import itertools
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace

from speech.writing.text import SENTENCE_ENDS, in_unspaced, spaces_before

LINE = 42  # characters in a line at most; those that are twice as wide count twice
LINES = 2
SECONDS = 6.0  # a subtitle made of words at most
PAUSE = 1.0  # seconds, ends a subtitle
SHORTEST = 0.1  # seconds: a word can begin and end at once, and programs refuse such a subtitle
# Characters of scripts without spaces: no line begins with small kana, marks of length, or vowels
# after their consonant (Thai, Lao); none ends with vowels before it, or with a stacking sign.
NOT_FIRST = set("ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮー々ะาำๅๆฯະາຳໆ")
NOT_LAST = set("เแโใไເແໂໃໄ\u1039\u17d2")


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


@dataclass(frozen=True)
class Atom:
    """A piece that no line break divides: its text with the `space` before it, and its time in
    seconds. `ends`: a subtitle ends after it."""

    text: str
    start: float
    end: float
    space: str = " "
    ends: bool = False


@dataclass(frozen=True)
class Group:
    """A subtitle: its lines, and its time in seconds."""

    lines: list[str]
    start: float
    end: float


def cues(row: dict) -> list[dict]:
    """The subtitles {"start", "end", "text"} of a transcript, of its words or, without words, of
    its segments: at most two lines of LINE characters, filled from the first on. They end with
    sentences and segments and at pauses. They do not overlap, and none is shorter than SHORTEST:
    one that is begins or ends later."""
    if "words" in row:
        atoms = _of_words(row["words"], row["text"])
        most = SECONDS
    else:
        atoms = [atom for part in row["segments"] for atom in _of_segment(part)]
        most = float("inf")
    groups: list[Group] = []
    run: list[Atom] = []
    for atom in atoms:
        run.append(atom)
        if atom.ends:
            groups += _divided(run, most)
            run = []
    groups += _divided(run, most)
    result: list[dict] = []
    for group, following in itertools.zip_longest(groups, groups[1:]):
        start = max(group.start, result[-1]["end"] if result else 0.0)
        end = min(group.end, following.start) if following else group.end
        end = max(end, round(start + SHORTEST, 3))
        result.append({"start": start, "end": end, "text": "\n".join(group.lines)})
    return result


def _of_words(words: list[dict], text: str) -> list[Atom]:
    atoms: list[Atom] = []
    gaps = spaces_before([word["text"] for word in words], text)
    for word, gap, following in itertools.zip_longest(words, gaps, words[1:]):
        ends = word["text"].endswith(SENTENCE_ENDS)
        ends |= following is not None and following["start"] - word["end"] > PAUSE
        parts = _shared({**word, "ends": ends}, gap)
        if atoms and parts and not gap and _stays(atoms[-1].text[-1], parts[0].text[0]):
            text = atoms[-1].text + parts[0].text
            if _width(text) <= LINE and not atoms[-1].ends:
                parts[0] = replace(
                    parts[0], text=text, start=atoms[-1].start, space=atoms.pop().space
                )
        atoms += parts
    return atoms


def _of_segment(part: dict) -> list[Atom]:
    """The words of a segment; each has a share of its time by its number of characters."""
    return _shared({**part, "ends": True}, " ")


def _shared(part: dict, space: str) -> list[Atom]:
    """The atoms of a timed text, which share its time by their numbers of characters. The first
    comes after `space`."""
    texts = []
    spaces = []
    for word in part["text"].split():
        divided = _divisible(word)
        texts += divided
        spaces += [" ", *[""] * (len(divided) - 1)]
    ends = list(itertools.accumulate(map(len, texts)))
    length = max(0.0, part["end"] - part["start"])
    times = [part["start"] + length * end / ends[-1] for end in [0, *ends[:-1]]] if ends else []
    times.append(part["end"])
    atoms = []
    for text, gap, (start, end) in zip(texts, spaces, itertools.pairwise(times), strict=True):
        atoms.append(Atom(text, round(start, 3), round(end, 3), gap))
    if atoms:
        atoms[0] = replace(atoms[0], space=space)
        atoms[-1] = replace(atoms[-1], ends=part["ends"])
    return atoms


def _divisible(word: str) -> list[str]:
    """The parts of a word between which a line may break: of a script without spaces, or of a word
    that no line holds."""
    if not any(map(in_unspaced, word)) and _width(word) <= LINE:
        return [word]
    parts = [word[0]]
    for before, character in itertools.pairwise(word):
        if _stays(before, character) and _width(parts[-1] + character) <= LINE:
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def _stays(before: str, character: str) -> bool:
    """Whether no line breaks between two characters, with no space between them."""
    kind = unicodedata.category(character)
    return (
        kind[0] in "MC"
        or kind in ("Pe", "Pf", "Po")
        or unicodedata.category(before) in ("Ps", "Pi")
        or character in NOT_FIRST
        or before in NOT_LAST
        or not (in_unspaced(before) or in_unspaced(character))
    )


def _width(text: str) -> int:
    """Characters, those that are twice as wide counted twice."""
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def _added(lines: list[str], atom: Atom) -> list[str] | None:
    """The lines of a subtitle with one more atom, or None if there is no room."""
    longer = (lines[-1] + atom.space + atom.text).strip()
    if _width(longer) <= LINE:
        return [*lines[:-1], longer]
    return [*lines, atom.text] if len(lines) < LINES else None


def _divided(atoms: list[Atom], most: float) -> list[Group]:
    """Subtitles of at most `most` seconds and two lines, each filled before the next begins."""
    groups: list[Group] = []
    for atom in atoms:
        last = groups[-1] if groups else None
        lines = _added(last.lines, atom) if last and atom.end - last.start <= most else None
        if lines:
            groups[-1] = Group(lines, last.start, max(last.end, atom.end))
        else:
            groups.append(Group([atom.text], atom.start, atom.end))
    return groups
