"""Texts to tokens, as Piper and sherpa-onnx make them."""

import unicodedata

import pytest

from models.matcha import tokenizer as text

TEXTS = {
    "am": "ሰላም ለዓለም",
    "vi": "Tôi được ăn phở",
    "hi": "नमस्ते ज़रा",
    "ko": "안녕 하세요",
    "fr": "Où est l'été ?",
}


@pytest.mark.parametrize("language, written", TEXTS.items())
def test_tokens_are_decomposed_characters_with_blanks_between(language, written):
    read = text.read(written, language)
    assert read == unicodedata.normalize("NFD", read) and read == read.lower()
    symbols = text.symbols_of([read])
    assert symbols[:4] == ["_", "^", "$", " "] and symbols[4:] == sorted(symbols[4:])
    tokens = text.Tokens(symbols)
    numbers = tokens.encode(read)
    assert numbers[:2] == [1, 0] and numbers[-2:] == [0, 2] and not any(numbers[1::2])
    assert "".join(symbols[number] for number in numbers[2:-1:2]) == read
    # A composed text loses no letter either.
    short = unicodedata.normalize("NFC", read)
    assert len(tokens.encode(short)) == 2 * len(short) + 3


def test_what_is_read():
    assert text.read("ዋጋው 25 ብር ነው", "am") == text.decomposed("ዋጋው ሃያ አምስት ብር ነው")
    assert text.read("He has 3_000 £", "en") == "he has three zero zero zero £"
    assert text.fault("he has 3", "en")[1] == "3 in 'he has 3'"
    assert text.fault("?!", "en")[0] == "the text has no letters"
    assert text.fault("yes", "en") is None


def test_characters_without_a_token_are_left_out_and_capitals_have_one():
    tokens = text.Tokens(text.symbols_of(["abc дß"]))
    assert tokens.encode("axb") == tokens.encode("ab")
    numbers = tokens.map()
    assert numbers["A"] == numbers["a"] and numbers["Д"] == numbers["д"]
    assert numbers["_"] == 0 and "SS" not in numbers
