"""Subtitles in SubRip's and WebVTT's format from the timed parts of a transcript."""

import itertools
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace

from speech.text import SENTENCE_ENDS, in_unspaced, spaces_before

LINE = 42  # characters in a line at most; those that are twice as wide count twice
SECONDS = 6.0  # a subtitle made of words at most
PAUSE = 1.0  # seconds, ends a subtitle
SHORTEST = 0.1  # seconds: a word can begin and end at once, and programs refuse such a subtitle
# What a break costs, against 1 for each subtitle and the square of the share of it that is full.
SHORT_PAUSE = 0.3  # seconds
AFTER_SENTENCE, AFTER_MARK, AFTER_WORD, WITHIN_TEXT = 0.0, 0.1, 0.3, 0.4
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
    """What no line break divides: its text with the `space` before it, and its time in seconds.
    `ends`: a subtitle ends after it."""

    text: str
    start: float
    end: float
    space: str = " "
    ends: bool = False


def cues(row: dict) -> list[dict]:
    """The subtitles {"start", "end", "text"} of a transcript, of its words or, without words, of
    its segments: at most two lines of LINE characters. They end with sentences and segments, at
    pauses, and where they would be too long: there after a comma or at a short pause if possible,
    and so that none is much shorter than the others. They do not overlap, and none is shorter than
    SHORTEST: one that is begins or ends later."""
    if "words" in row:
        atoms = _of_words(row["words"], row["text"])
        most = SECONDS
    else:
        atoms = [atom for part in row["segments"] for atom in _of_segment(part)]
        most = float("inf")
    groups = []
    run: list[Atom] = []
    for atom in atoms:
        run.append(atom)
        if atom.ends:
            groups += _divided(run, most)
            run = []
    groups += _divided(run, most)
    result: list[dict] = []
    for group, following in itertools.zip_longest(groups, groups[1:]):
        start = max(group[0].start, result[-1]["end"] if result else 0.0)
        end = max(atom.end for atom in group)
        if following:
            end = min(end, following[0].start)
        end = max(end, round(start + SHORTEST, 3))
        result.append({"start": start, "end": end, "text": "\n".join(_lines(group))})
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


def _joined(atoms: list[Atom]) -> str:
    return "".join(atom.space + atom.text for atom in atoms).strip()


def _break_cost(before: Atom, after: Atom) -> float:
    if before.text.endswith(SENTENCE_ENDS):
        return AFTER_SENTENCE
    is_marked = unicodedata.category(before.text[-1])[0] == "P"
    is_phrase = in_unspaced(before.text[-1]) and after.space
    if is_marked or is_phrase or after.start - before.end > SHORT_PAUSE:
        return AFTER_MARK
    return AFTER_WORD if after.space else WITHIN_TEXT


def _divided(atoms: list[Atom], most: float) -> list[list[Atom]]:
    """Divides atoms into subtitles of at most `most` seconds and two lines, at the least cost."""
    count = len(atoms)
    widths = [len(atom.space) + _width(atom.text) for atom in atoms]
    ends = [0, *itertools.accumulate(widths)]  # of the atoms, and the spaces before them
    begins = [end + len(atom.space) for end, atom in zip(ends, atoms, strict=False)]
    fits = [count] * (count + 1)  # where the longest line ends that begins at an atom
    for i in range(count - 1, -1, -1):
        fits[i] = fits[i + 1] if i + 1 < count else count
        while ends[fits[i]] - begins[i] > LINE and fits[i] > i + 1:
            fits[i] -= 1
    best = [0.0] + [math.inf] * count
    first = [0] * (count + 1)  # of the subtitle that ends before an atom
    for i, atom in enumerate(atoms):
        for j in range(i + 1, fits[fits[i]] + 1):
            if j > i + 1 and atoms[j - 1].end - atom.start > most:
                break
            cost = best[i] + 1 + ((ends[j] - begins[i]) / (2 * LINE)) ** 2
            if j < count:
                cost += _break_cost(atoms[j - 1], atoms[j])
            if cost < best[j]:
                best[j] = cost
                first[j] = i
    groups = []
    while count:
        groups.append(atoms[first[count] : count])
        count = first[count]
    return groups[::-1]


def _lines(atoms: list[Atom]) -> list[str]:
    """One line, or two about equally long ones."""
    whole = _joined(atoms)
    if _width(whole) <= LINE:
        return [whole]
    best = (math.inf, [whole])
    for place in range(1, len(atoms)):
        lines = [_joined(atoms[:place]), _joined(atoms[place:])]
        top, bottom = map(_width, lines)
        if max(top, bottom) <= LINE:
            uneven = (abs(top - bottom) / LINE) ** 2 / 2
            best = min(best, (uneven + _break_cost(atoms[place - 1], atoms[place]), lines))
    return best[1]
