"""Texts to the tokens of a voice: the characters of its language.

Piper and sherpa-onnx both make a token of each code point of a text, put a blank between all of
them, and a mark at either end. But Piper decomposes letters first (NFD), sherpa-onnx 2 composes
them (NFC), and sherpa-onnx 1 takes them as they are typed. A voice learns composed letters. An
exported one also has numbers for their parts, and composes them itself (`Composer`): all three read
the same then."""

import unicodedata
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from speech.writing import reading

BLANK = "_"
BEGIN = "^"
END = "$"
SPACE = " "
CAPITALS = {"İ": "i", "ẞ": "ß"}  # which `upper` does not find
# What `read` makes of other characters, as far as it is one.
TYPED = {"\u2019": "'", "\u2018": "'", "\u2026": "."}
MARKS = (BLANK, BEGIN, END, SPACE)  # the first tokens


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def read(text: str, language: str) -> str:
    """A text as the voice reads it: numbers in words, lower case, composed letters, without signs
    that mean a mark, but for END: `reading.fault` finds a dollar that is in no words."""
    plain = reading.read(composed(text), language).lower()
    for mark in (BLANK, BEGIN):
        plain = plain.replace(mark, " ")
    return " ".join(composed(plain).split())


def symbols_of(read_texts: Iterable[str]) -> list[str]:
    """The tokens of a new voice: the marks, and the characters of what was `read` of its texts."""
    characters = set().union(*read_texts)
    return [*MARKS, *sorted(characters - {*MARKS})]


def pairs_of(symbols: Iterable[str]) -> dict[tuple[str, str], str]:
    """How letters are composed, two characters at a time: {(o, horn): ơ, (ơ, dot below): ợ}."""
    pairs = {}
    for symbol in symbols:
        whole, *marks = decomposed(symbol)
        for mark in marks:
            pair = whole, mark
            whole = composed(whole + mark)
            pairs[pair] = whole
    return pairs


class Tokens:
    """What was `read` of texts to tokens. A letter that the voice lacks is read without its marks
    or, if that does not help, left out, as the programs do. `readable`: what programs have numbers
    for, the tokens and then the parts of letters."""

    def __init__(self, symbols: list[str]):
        self.symbols = symbols
        self.numbers = {symbol: number for number, symbol in enumerate(symbols)}
        self.pairs = pairs_of(symbols)
        parts = {c for pair, whole in self.pairs.items() for c in (*pair, whole)}
        self.readable = [*symbols, *sorted(parts - set(symbols))]

    def encode(self, read_text: str) -> list[int]:
        blank = self.numbers[BLANK]
        tokens = [self.numbers[BEGIN], blank]
        for letter in read_text:
            for character in letter if letter in self.numbers else decomposed(letter):
                if character in self.numbers and character != END:
                    tokens += [self.numbers[character], blank]
        return [*tokens, self.numbers[END]]

    def map(self) -> dict[str, int]:
        """The number of every character that programs may be given: also that of the small letter
        for a capital, because Piper changes no case and sherpa-onnx only that of ASCII."""
        numbers = {character: number for number, character in enumerate(self.readable)}
        for character, number in list(numbers.items()):
            capital = character.upper()
            if capital.lower() == character:  # Σ is the capital of ς, too
                numbers.setdefault(capital, number)
        for capital, small in CAPITALS.items():
            if small in numbers:
                numbers[capital] = numbers[small]
        for typed, read_as in TYPED.items():
            if read_as in numbers:
                numbers.setdefault(typed, numbers[read_as])
        return numbers


class Composer(nn.Module):
    """The numbers (1, N) that a program has made of a text, with blanks between and marks at the
    ends, to the tokens (1, U) that `Tokens.encode` would have made of it, for an ONNX program."""

    def __init__(self, tokens: Tokens):
        super().__init__()
        numbers = {character: number for number, character in enumerate(tokens.readable)}
        self.size = len(tokens.readable)
        self.rows = len(tokens.symbols)
        self.passes = max(len(decomposed(symbol)) for symbol in tokens.symbols) - 1
        codes = [numbers[a] * self.size + numbers[b] for a, b in tokens.pairs]
        wholes = [numbers[whole] for whole in tokens.pairs.values()]
        self.register_buffer("codes", torch.tensor(codes, dtype=torch.long))
        self.register_buffer("wholes", torch.tensor(wholes, dtype=torch.long))

    def forward(self, numbers: Tensor) -> Tensor:
        characters = numbers[0, 2:-1:2]
        for _ in range(self.passes):
            following = torch.cat([characters[1:], characters.new_zeros(1)])
            matches = (characters * self.size + following)[:, None] == self.codes
            is_first = matches.any(1)
            whole = self.wholes[matches.long().argmax(1)]
            # (A program also gives an empty sentence after a mark at the end.)
            is_second = torch.cat([is_first.new_zeros(1), is_first])[:-1]
            characters = torch.where(is_first, whole, characters)[~is_second]
        characters = characters[characters < self.rows]
        spaced = torch.stack([characters, torch.zeros_like(characters)], 1).flatten()
        return torch.cat([numbers[0, :2], spaced, numbers[0, -1:]])[None]
