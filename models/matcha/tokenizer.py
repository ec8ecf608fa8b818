"""Texts to the tokens of a voice: the characters of its language, as the programs that speak exported
voices read them.

Piper and sherpa-onnx both make a token of each code point of a text, put a blank between all of
them, and a mark at either end. Piper decomposes letters first (NFD), so this is done here, too.
sherpa-onnx takes letters as they are typed and leaves out those that it has no token for: a composed
letter such as é or ơ has a token of its own beside those of its parts, and training reads half of
the texts composed."""

import unicodedata
from collections.abc import Iterable

from speech.writing import reading

BLANK = "_"
BEGIN = "^"
END = "$"
SPACE = " "
MARKS = (BLANK, BEGIN, END, SPACE)  # the first tokens


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def read(text: str, language: str) -> str:
    """A text as the voice reads it: numbers in words, lower case, decomposed letters, and nothing
    that means a mark."""
    plain = reading.read(text, language).lower()
    for mark in (BLANK, BEGIN, END):
        plain = plain.replace(mark, " ")
    return " ".join(decomposed(plain).split())


def fault(text: str, language: str) -> tuple[str, str] | None:
    """Why what was `read` of a text cannot be trained on, as (reason, details). None if it can."""
    if signs := reading.NOT_IN_WORDS.findall(text):
        return (
            f"numbers or signs that are not read in words in {language}: write them as words",
            f"{' '.join(signs[:20])} in {text[:40]!r}",
        )
    if not any(map(str.isalnum, text)):
        return "the text has no letters", repr(text[:40])
    return None


def symbols_of(read_texts: Iterable[str]) -> list[str]:
    """The tokens of a new voice: the marks, and the characters of what was `read` of its training
    texts, decomposed and composed, in order."""
    characters: set[str] = set()
    for text in read_texts:
        characters.update(text)
        characters.update(composed(text))
    return [*MARKS, *sorted(characters - {*MARKS})]


class Tokens:
    """What was `read` of texts to tokens. Characters that the voice lacks are left out, as the
    programs do."""

    def __init__(self, symbols: list[str]):
        self.symbols = symbols
        self.numbers = {symbol: number for number, symbol in enumerate(symbols)}

    def encode(self, read_text: str) -> list[int]:
        blank = self.numbers[BLANK]
        tokens = [self.numbers[BEGIN], blank]
        for character in read_text:
            if character in self.numbers:
                tokens += [self.numbers[character], blank]
        return [*tokens, self.numbers[END]]

    def map(self) -> dict[str, int]:
        """The token of every character that the programs may be given: also that of the small
        letter for a capital, because Piper changes no case and sherpa-onnx only that of ASCII."""
        numbers = dict(self.numbers)
        for symbol, number in self.numbers.items():
            capital = symbol.upper()
            if len(capital) == 1 and symbol not in MARKS:
                numbers.setdefault(capital, number)
        return numbers
