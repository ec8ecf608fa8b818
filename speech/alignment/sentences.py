"""A book as pieces that may become utterances: sentences, and parts of long ones."""

import itertools
import re
import textwrap
from dataclasses import dataclass

from common import files
from common.errors import DataError
from speech.alignment.letters import is_letter, is_number
from speech.writing.text import SENTENCE_ENDS, in_unspaced, normalise

# Characters: four seconds of an alphabet's, and twelve of Chinese.
LONG = 60  # from which on a sentence is divided at commas
SHORT = 15  # of its parts, at least
LONGEST = 160  # of a part: then it is divided between words
PAUSES = ",;:\u2014\u2013\u055d\u060c\u061b\u1363\u1364\u1365\u1366\u3001\uff0c\uff1b\uff1a"
CLOSING = "\"'\u2019\u201d\u00bb)\\]\u300d\u300f"
# A paragraph's lines are those of an editor, if they are so wide, and this share of them ends where
# the next word had no room.
WIDE = 60  # characters
WRAPPED = 0.9
CUT_WORD = re.compile(r"(?<=\w)(?:([-\u2010])|\u00ad)\n(?=\w)")  # at the end of such a line


def _ends(characters: str) -> re.Pattern:
    """Places after these characters and closing quotes, before a space if the script has any."""
    some = "".join(re.escape(c) for c in characters)
    full = "".join(c for c in characters if in_unspaced(c) or c >= "\uff00")
    return re.compile(rf"(?<=[{some}])[{CLOSING}]*(?=\s)|(?<=[{full}])[{CLOSING}]*(?=.)")


SENTENCES = _ends("".join(SENTENCE_ENDS) + "\u2026")
PARTS = _ends(PAUSES)


@dataclass(frozen=True)
class Piece:
    """A text on one line, and whether a sentence, a verse or a heading ends with it."""

    text: str
    is_end: bool
    numbers: tuple[str, str] = ("", "")  # before and after it, which a recogniser may not write

    def whole(self, with_first: bool = True, with_last: bool = True) -> str:
        """The text with these numbers."""
        before = self.numbers[0] if with_first else ""
        after = self.numbers[1] if with_last else ""
        return " ".join(filter(None, (before, self.text, after)))


def read_book(path: str) -> list[Piece]:
    """The pieces of a text in UTF-8. Raises `UsageError`, and `DataError` if there is no text."""
    pieces = []
    for paragraph in re.split(r"\n[^\S\n]*\n", files.read_text(path)):
        for line in _lines(paragraph):
            for sentence in _with_numbers(_split(normalise(line), SENTENCES)):
                pieces += _parts(sentence) if any(map(is_letter, sentence)) else []
    if not pieces:
        raise DataError(f"{path}: there is no text in it")
    return pieces


def _lines(paragraph: str) -> list[str]:
    """The lines that end on purpose, as verses and headings do; the others are joined."""
    lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
    width = max(map(len, lines), default=0)
    is_full = [
        len(line) + 1 + len(following.split()[0]) > width
        for line, following in itertools.pairwise(lines)
    ]
    if width >= WIDE and sum(is_full) >= WRAPPED * len(is_full):
        return [CUT_WORD.sub(r"\1", "\n".join(lines)).replace("\n", " ")]
    return lines


def _with_numbers(sentences: list[str]) -> list[str]:
    """The sentences of a line, each with the number before it: "1. Go." is no two sentences."""
    joined: list[str] = []
    for sentence in sentences:
        if joined and all(map(is_number, joined[-1].split())):
            joined[-1] = join([joined[-1], sentence])
        else:
            joined.append(sentence)
    return joined


def _split(text: str, ends: re.Pattern) -> list[str]:
    """The parts of a text between the places that `ends` finds."""
    places = [0, *(match.end() for match in ends.finditer(text)), len(text)]
    parts = (text[a:b].strip() for a, b in itertools.pairwise(places))
    return [part for part in parts if part]


def _parts(sentence: str) -> list[Piece]:
    """A sentence in one piece, or a long one in parts."""
    parts = [sentence]
    if len(sentence) > LONG:
        parts = _joined(_split(sentence, PARTS))
    parts = [part for long in parts for part in _between_words(long)]
    return [Piece(part, i == len(parts) - 1) for i, part in enumerate(parts)]


def _joined(parts: list[str]) -> list[str]:
    """Parts of SHORT characters or more."""
    groups = [[parts[0]]]
    size = len(parts[0])  # of the last group
    for part in parts[1:]:
        if min(size, len(part)) < SHORT:
            size += len(_space_after(groups[-1][-1])) + len(part)
            groups[-1].append(part)
        else:
            size = len(part)
            groups.append([part])
    return [join(group) for group in groups]


def _between_words(part: str) -> list[str]:
    """A part, or what it is cut into at spaces, LONGEST characters or fewer each."""
    return textwrap.wrap(part, LONGEST, break_long_words=False, break_on_hyphens=False)


def join(texts: list[str]) -> str:
    """Pieces that follow each other as one text, with spaces where the script has them."""
    return "".join(text + _space_after(text) for text in texts[:-1]) + texts[-1]


def _space_after(text: str) -> str:
    return "" if in_unspaced(text[-1]) or text[-1] >= "\uff00" else " "
