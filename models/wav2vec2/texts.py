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

from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from speech.writing.text import JOINERS, is_letter, normalise

# They stay beside a letter: an apostrophe is one in Hausa ('yan), a tsheg ends Tibetan syllables.
BESIDE_LETTERS = "'\u0f0b"
# They stay between letters: the hyphen, and Hebrew's geresh and gershayim.
BETWEEN_LETTERS = "-\u05f3\u05f4"
IN_WORDS = BESIDE_LETTERS + BETWEEN_LETTERS
APOSTROPHES = "\u2018\u2019\u201b`"  # between letters
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
    in_words: str = IN_WORDS  # which of these it has
    marks: str = ""  # other punctuation that it has
    spells_numbers: bool = True  # instead of digits
    leaves_out: str = ""  # characters that a text loses


# Of the fields of a style in a checkpoint, {} for none, a schema of records.mismatch.
STYLE = (
    lambda record: record == {},
    {
        "form": {"NFC", "NFKC"},
        "case": {"", "lower", "upper"},
        "in_words": str,
        "marks": str,
        "spells_numbers": bool,
        "leaves_out": str,
    },
)


def style_of(tokenizer: Wav2Vec2Tokenizer) -> Style:
    """The style of a vocabulary."""
    known = tokenizer.characters
    in_words = "".join(sign for sign in IN_WORDS if sign in known)
    if tokenizer.kind == "sentencepiece":  # omniASR
        joiners = "".join(sign for sign in JOINERS if sign not in known)
        return Style(in_words=in_words, leaves_out=joiners + VOWEL_POINTS)
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
        marks="".join(sorted(filter(_is_punctuation, known - {*IN_WORDS}))),
        spells_numbers=not any(map(str.isdecimal, known)),
        leaves_out="".join(sign for sign in JOINERS + VOWEL_POINTS if sign not in known),
    )


def prepare(text: str, style: Style | None) -> str:
    """`text` as the model writes it, with single spaces. Letters that the model lacks stay, to be
    counted. With the style None it is only normalised, as it always is."""
    text = normalise(text)
    if style is None:
        return text
    text = unicodedata.normalize(style.form, text.replace(ACUTE, "\u2019"))
    text = text.translate(dict.fromkeys(map(ord, style.leaves_out)))
    if style.case:
        text = text.lower() if style.case == "lower" else text.upper()
    text = unicodedata.normalize(style.form, text)
    if style.spells_numbers:
        text = BRACKETS.sub(_unless_number, text)
    words = NEITHER_LETTER_NOR_SPACE.sub(functools.partial(_replaced, style), text).split()
    if style.spells_numbers:
        words = [word for word in words if not word.isdecimal()]
    return " ".join(words)


def _unless_number(match: re.Match) -> str:
    return " " if any(map(str.isdecimal, match[0])) else match[0]


def _replaced(style: Style, match: re.Match) -> str:
    """What becomes of a mark or punctuation."""
    character = match[0]
    if character in style.marks or not _is_punctuation(character):
        return character
    text = match.string
    place = match.start()
    before, after = _in_word(text[place - 1 : place]), _in_word(text[place + 1 : place + 2])
    sides = before + after
    begins = character == "\u2019" and after  # Hausa's \u2019yan: no quotation ends before a word
    if character in APOSTROPHES and (sides == 2 or begins):
        character = "'"
    elif character == HYPHEN:
        character = "-"
    needed = 1 if character in BESIDE_LETTERS else 2
    return character if character in style.in_words and sides >= needed else " "


@functools.cache
def _is_punctuation(character: str) -> bool:
    return all(unicodedata.category(sign)[0] in "PS" and not is_letter(sign) for sign in character)


def _in_word(character: str) -> bool:
    """Whether a character, or none, is a part of a word's letters."""
    return character in (*JOINERS,) or is_letter(character or " ")
