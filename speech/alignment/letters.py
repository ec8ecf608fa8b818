"""What a recogniser's tokens spell, and a text in its tokens."""

import unicodedata
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import numpy as np

HOLE = -1  # in place of letters that the vocabulary lacks: they are heard as something else


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a CTC model."""

    spellings: list[str]  # by number; the blank's is empty
    blank: int
    # with HOLE where a text has letters or digits that no token spells
    encode: Callable[[str], list[int]]


def of_characters(index: dict[str, int], blank: int, size: int, letters=None) -> Vocabulary:
    """The vocabulary of a model with `size` outputs, whose characters or units have an `index`."""
    spellings = [""] * size
    for character, number in index.items():
        spellings[number] = character
    cut = letters.cut if letters else list
    return Vocabulary(spellings, blank, lambda text: encode(cut(text), index))


def of_pieces(pieces: list[str], space: str, blank: int, unknown: int, encode) -> Vocabulary:
    """The vocabulary of a model whose `pieces` have several characters, with `space` for a space.
    `encode(text)` returns numbers of pieces, `unknown` for what they cannot write. The blank is the
    last."""
    bare = [piece.replace(space, "") for piece in pieces]
    letters = {piece for piece in bare if len(piece) == 1}

    def with_holes(text: str) -> list[int]:
        numbers: list[int] = []
        written = (
            in_known_case(c, letters) or (c if is_letter(c) or c == " " else "") for c in text
        )
        for number in encode("".join(written)):
            if number != unknown:
                numbers.append(number)
            elif numbers[-1:] != [HOLE]:
                numbers.append(HOLE)
        return numbers

    spellings = [piece.replace(space, " ") for piece in pieces]
    spellings[unknown] = ""
    return Vocabulary([*spellings, ""], blank, with_holes)


def encode(text: Iterable[str], index: dict[str, int]) -> list[int]:
    """The tokens of a text, by its characters or units. A letter that `index` has in the other case
    only is written in that one, runs of letters that it lacks become a HOLE, other characters
    nothing."""
    tokens: list[int] = []
    for character in text:
        if known := in_known_case(character, index):
            tokens.append(index[known])
        elif is_letter(character[0]) and tokens[-1:] != [HOLE]:
            tokens.append(HOLE)
    return tokens


def in_known_case(character: str, known: Container[str]) -> str:
    """A character as it is known: itself or in the other case; "" if it is not known."""
    forms = (character, character.lower(), character.upper())
    return next((form for form in forms if form in known), "")


def edge_numbers(text: str, vocabulary: Vocabulary) -> tuple[str, str, str]:
    """The numbers that a text begins with, the rest, and those that it ends with, as far as no
    token spells them: those of verses, items and notes are not read, those of sentences are."""
    words = text.split()
    lacks = [is_number(word) and HOLE in vocabulary.encode(word) for word in words]
    if all(lacks):
        return "", text, ""
    first, last = lacks.index(False), len(words) - lacks[::-1].index(False)
    return " ".join(words[:first]), " ".join(words[first:last]), " ".join(words[last:])


def is_number(word: str) -> bool:
    """Whether a word consists of digits and punctuation."""
    signs = [character for character in word if is_letter(character)]
    return bool(signs) and all(unicodedata.category(sign)[0] == "N" for sign in signs)


def is_letter(character: str) -> bool:
    """Whether it is heard: a letter, a mark, a digit or a symbol, and not punctuation."""
    return unicodedata.category(character)[0] in "LMN"


def spelt(tokens: np.ndarray, spellings: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The letters (N,) of tokens, as numbers of characters in lower case, and for each the place of
    its token. A HOLE is a letter that equals no other."""
    letters: list[int] = []
    places: list[int] = []
    for place, token in enumerate(tokens.tolist()):
        codes = [0]
        if token != HOLE:
            codes = [ord(c) for c in spellings[token].lower() if is_letter(c)]
        letters += codes
        places += [place] * len(codes)
    return np.array(letters, np.int64), np.array(places, np.int64)
