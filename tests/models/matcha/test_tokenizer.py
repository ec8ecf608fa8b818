"""Texts to tokens, as Piper and sherpa-onnx make them."""

import unicodedata

import pytest
import torch

from models.matcha import tokenizer as text
from speech.writing import reading

TEXTS = {
    "am": "ሰላም ለዓለም",
    "vi": "Tôi được ăn phở",
    "hi": "नमस्ते ज़रा",
    "ko": "안녕 하세요",
    "fr": "Où est l'été ?",
}


@pytest.mark.parametrize("language, written", TEXTS.items())
def test_tokens_are_composed_characters_with_blanks_between(language, written):
    read = text.read(written, language)
    assert read == unicodedata.normalize("NFC", read) and read == read.lower()
    symbols = text.symbols_of([read])
    assert symbols[:4] == ["_", "^", "$", " "] and symbols[4:] == sorted(symbols[4:])
    numbers = text.Tokens(symbols).encode(read)
    assert numbers[:2] == [1, 0] and numbers[-2:] == [0, 2] and not any(numbers[1::2])
    assert "".join(symbols[number] for number in numbers[2:-1:2]) == read


def as_programs_do(tokens: text.Tokens, written: str, form: str | None) -> torch.Tensor:
    """What a program makes of a text that it takes as it is typed, or in a form of Unicode."""
    numbers = tokens.map()
    written = unicodedata.normalize(form, written) if form else written
    made = [1, 0]
    for character in written:
        if character in numbers:
            made += [numbers[character], 0]
    return torch.tensor([[*made, 2]])


@pytest.mark.parametrize("language, written", TEXTS.items())
def test_all_programs_read_the_same(language, written):
    tokens = text.Tokens(text.symbols_of(text.read(each, key) for key, each in TEXTS.items()))
    expected = tokens.encode(text.read(written, language))
    composer = text.Composer(tokens)
    for form in (None, "NFD", "NFC"):
        assert composer(as_programs_do(tokens, written, form)).tolist() == [expected]
        assert composer(as_programs_do(tokens, written.upper(), form)).tolist() == [expected]


def test_what_is_read():
    assert text.read("ዋጋው 25 ብር ነው", "am") == text.composed("ዋጋው ሃያ አምስት ብር ነው")
    assert text.read("He has 3_000 £", "en") == "he has three zero zero zero £"
    assert reading.fault("he has 3", "en")[1] == "3 in 'he has 3'"
    assert reading.fault("?!", "en")[0] == "the text has no letters"
    assert reading.fault("yes", "en") is None


def test_what_has_no_token():
    """Marks of letters that are not known are left out, and so are other letters."""
    tokens = text.Tokens(text.symbols_of(["abcé дß"]))
    assert tokens.encode("axb") == tokens.encode("ab")
    assert tokens.encode("ẽ") == tokens.encode("")  # there is no e
    assert tokens.encode("ä") == tokens.encode("a")
    composer = text.Composer(tokens)
    for written in ("axb", "ẽb", "äc", "e", "á"):
        read = as_programs_do(tokens, written, "NFD")
        assert composer(read).tolist() == [tokens.encode(text.composed(written))]
    numbers = tokens.map()
    assert numbers["A"] == numbers["a"] and numbers["Д"] == numbers["д"]
    assert numbers["_"] == 0 and "SS" not in numbers and numbers["ẞ"] == numbers["ß"]


def test_capitals_of_other_languages():
    for form in ("NFC", "NFD"):
        assert text.read(unicodedata.normalize(form, "IŞIK İz"), "tr") == "ışık iz"
    numbers = text.Tokens(text.symbols_of(["iı σς"])).map()
    assert numbers["Σ"] == numbers["σ"] and numbers["I"] == numbers["İ"] == numbers["i"]
