"""Texts as the released models write them.

omniASR learned texts in NFKC and lower case without punctuation, bracketed numbers and words of
digits. What other models write is seen by their vocabulary. A vocabulary that is made from the
texts has no style: they are taken as they are written.
Source: the preparation of MMS's texts (Pratap et al. 2023), whose lists of characters Unicode's
categories stand for here."""

import functools
import re
import unicodedata
from dataclasses import dataclass

from common.records import mismatch
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from speech.writing.text import JOINERS, is_letter, normalise

# They stay beside a letter: an apostrophe is one in Hausa ('yan), a tsheg ends Tibetan syllables.
BESIDE_LETTERS = frozenset("'\u0f0b")
# They stay between letters: the hyphen, and Hebrew's geresh and gershayim.
BETWEEN_LETTERS = frozenset("-\u05f3\u05f4")
IN_WORDS = BESIDE_LETTERS | BETWEEN_LETTERS
APOSTROPHES = frozenset("\u2018\u2019\u201b`")  # between letters
ACUTE = "\u00b4"  # one more, of which NFKC makes a space and a mark
HYPHEN = "\u2010"
VOWEL_POINTS = "\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652\u0656\u0657"  # Arabic
BRACKETS = re.compile(r"\([^()]*\)")
NEITHER_LETTER_NOR_SPACE = re.compile(r"[^\w\s]|_")  # marks, too


@dataclass(frozen=True)
class Style:
    """How a model writes."""

    form: str = "NFKC"
    case: str = "lower"  # "" for both
    in_words: frozenset[str] = IN_WORDS  # which of these it has
    marks: frozenset[str] = frozenset()  # other punctuation that it has
    spells_numbers: bool = True  # instead of digits
    leaves_out: frozenset[str] = frozenset()  # characters that a text loses

    def record(self) -> dict:
        """The fields as texts, for a checkpoint."""
        return {
            name: "".join(sorted(value)) if isinstance(value, frozenset) else value
            for name, value in vars(self).items()
        }


def read_style(record: dict) -> Style | None:
    """The style of `Style.record`; None if it is empty."""
    if not record:
        return None
    sets = {name: frozenset(record[name]) for name in ("in_words", "marks", "leaves_out")}
    return Style(**{**record, **sets})


def _is_record(value) -> bool:
    return value == {} or not mismatch(value, _RECORD, "it")


_RECORD = {
    "form": {"NFC", "NFKC"},
    "case": {"", "lower", "upper"},
    "in_words": str,
    "marks": str,
    "spells_numbers": bool,
    "leaves_out": str,
}
STYLE = _is_record  # a schema of records.mismatch


def style_of(tokenizer: Wav2Vec2Tokenizer) -> Style:
    """The style of a vocabulary."""
    known = tokenizer.characters
    punctuation = frozenset(filter(_is_punctuation, known))
    in_words = punctuation & IN_WORDS
    if tokenizer.kind == "sentencepiece":  # omniASR
        leaves_out = frozenset(JOINERS) - known | frozenset(VOWEL_POINTS)
        return Style(in_words=in_words, leaves_out=leaves_out)
    case = ""
    if all(character == character.lower() for character in known):
        case = "lower"
    elif all(character == character.upper() for character in known):
        case = "upper"
    is_compatible = all(unicodedata.is_normalized("NFKC", character) for character in known)
    return Style(
        form="NFKC" if is_compatible else "NFC",
        case=case,
        in_words=in_words,
        marks=punctuation - IN_WORDS,
        spells_numbers=not any(map(str.isdecimal, known)),
        leaves_out=frozenset(JOINERS + VOWEL_POINTS) - known,
    )


def prepare(text: str, style: Style | None) -> str:
    """`text` as the model writes it, with single spaces. Letters that the model lacks stay, to be
    counted. With the style None it is only normalised, as it always is."""
    text = normalise(text)
    if style is None:
        return text
    for step in _STEPS:
        text = step(text, style)
    return text


# --- steps ----------------------------------------------------------------------------------------


def _in_form(text: str, style: Style) -> str:
    text = text.replace(ACUTE, "\u2019")
    return " ".join(unicodedata.normalize(style.form, text).split())


def _without_left_out(text: str, style: Style) -> str:
    if not style.leaves_out.intersection(text):
        return text
    text = "".join(character for character in text if character not in style.leaves_out)
    return " ".join(unicodedata.normalize(style.form, text).split())


def _in_case(text: str, style: Style) -> str:
    if not style.case:
        return text
    changed = text.lower() if style.case == "lower" else text.upper()
    return unicodedata.normalize(style.form, changed)


def _without_bracketed_numbers(text: str, style: Style) -> str:
    if not style.spells_numbers or "(" not in text:
        return text
    return " ".join(BRACKETS.sub(_unless_number, text).split())


def _unless_number(match: re.Match) -> str:
    return " " if any(map(str.isdecimal, match[0])) else match[0]


def _without_punctuation(text: str, style: Style) -> str:
    replace = functools.partial(_replaced, style)
    return " ".join(NEITHER_LETTER_NOR_SPACE.sub(replace, text).split())


def _replaced(style: Style, match: re.Match) -> str:
    """What becomes of a mark or punctuation."""
    character = match[0]
    if character in style.marks or not _is_punctuation(character):
        return character
    text, place = match.string, match.start()
    sides = _in_word(text[place - 1 : place]) + _in_word(text[place + 1 : place + 2])
    if character in APOSTROPHES and sides == 2:
        character = "'"
    elif character == HYPHEN:
        character = "-"
    needed = 1 if character in BESIDE_LETTERS else 2
    return character if character in style.in_words and sides >= needed else " "


def _without_digits(text: str, style: Style) -> str:
    if not style.spells_numbers:
        return text
    return " ".join(word for word in text.split() if not word.isdecimal())


_STEPS = (
    _in_form,
    _without_left_out,
    _in_case,
    _without_bracketed_numbers,
    _without_punctuation,
    _without_digits,
)


@functools.cache
def _is_punctuation(character: str) -> bool:
    return all(unicodedata.category(sign)[0] in "PS" and not is_letter(sign) for sign in character)


def _in_word(character: str) -> bool:
    """Whether a character, or none, is a part of a word's letters."""
    return character in (*JOINERS,) or is_letter(character or " ")
