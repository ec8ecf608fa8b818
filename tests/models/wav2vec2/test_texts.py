"""Texts are prepared as MMS's were, and as a vocabulary asks."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.wav2vec2.texts import Style, prepare, style_of
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from tests.models.wav2vec2.small import characters_state, sentencepiece_state

OWN = Style()
OMNI = style_of(Wav2Vec2Tokenizer(sentencepiece_state(["abc'-1.,ABCहिं\u200d\u0f0b\u064b"])))


def style_with(characters: str, lower: bool = False) -> Style:
    return style_of(Wav2Vec2Tokenizer(characters_state(characters, lower=lower)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello,  World!", "hello world"),
        ("ﬁne １２ Ａ", "fine a"),
        ("In 1990 (Sam 23:17) he (who) left", "in he who left"),
        ("(a (3) b) 1,000 2nd", "a b 2nd"),
        ("don’t don´t don`t 'yan ’yan ‘quoted’ 5' -", "don't don't don't 'yan 'yan quoted"),
        ("well-known well‑known - well- 5-6", "well-known well-known well"),
        ("क्\u200dष हिंदी।", "क्\u200dष हिंदी"),
        ("ཀ་ཁ།", "ཀ་ཁ"),
        ("كِتَاب", "كتاب"),
        ("50 % of a|b_c €5", "of a b c"),
        ("Ştefan İ", "ştefan i\u0307"),
        ("ngw'ana e\u0301", "ngw'ana \u00e9"),
        ("", ""),
    ],
)
def test_omniasr(text, expected):
    assert prepare(text, OMNI) == expected


def test_joiners_and_apostrophes_that_the_vocabulary_lacks_go():
    style = style_of(Wav2Vec2Tokenizer(sentencepiece_state(["abc"])))
    assert prepare("क्\u200dष don't a-b", style) == "क्ष don t a b"
    assert prepare("क्\u200dष don't a-b", OWN) == "क्\u200dष don't a-b"


def test_a_vocabulary_says_how_its_model_writes():
    assert prepare("Don't go, 12.", style_with("abdot'")) == "don't go"
    assert prepare("Don't go, 12.", style_with("ABDOT'")) == "DON'T GO"
    assert prepare("Don't go, 12.", style_with("ABDOT'", lower=True)) == "don't go"
    assert prepare("Don't go, 12.", style_with("aAb,1")) == "Don t go, 12"
    assert prepare("हिंदी! (1)", style_with("हिंदी")) == "हिंदी"
    assert prepare("½ ①", style_with("½")) == "½ ①"  # no NFKC
    assert prepare("a ’ b’s", style_with("ab’s")) == "a ’ b’s"


@pytest.mark.parametrize("style", [OMNI, OWN, style_with("abc.,'"), style_with("ABC-é\u200d")])
@given(text=st.text(st.sampled_from("aBcÀéßƙ'’-.,()1٣½´ \t\u200d\u0301\u064bहिंİǅ。·་")))
def test_what_is_prepared_is_prepared(style, text):
    once = prepare(text, style)
    assert prepare(once, style) == once == " ".join(once.split())
    assert unicodedata.is_normalized(style.form, once)
    if style.spells_numbers:
        assert not any(map(str.isdecimal, once.split()))
    found = {character for character in once if unicodedata.category(character)[0] in "PS"}
    assert found <= {*style.marks, *style.in_words}


LATIN = "abcxyzéñ"


@given(st.lists(st.text(st.sampled_from(LATIN + LATIN.upper() + "0123456789"), min_size=1)))
def test_words_are_mms_words(words):
    """Of letters and digits, in which no approximation is made."""
    text = " ".join(words)
    digits = re.sub(r"^[0-9]+(?=\s)|(?<=\s)[0-9]+(?=\s)|(?<=\s)[0-9]+$|^[0-9]+$", " ", text.lower())
    assert prepare(text, OMNI) == " ".join(digits.split())


@pytest.mark.parametrize("text", ["ə˩kʰɯ˩-lɑ˥", "wà:ke k’ kʼ", "ma³¹ wa꞉ke", "Ab, 12 ½"])
def test_texts_of_a_vocabulary_of_ones_own_stay_as_they_are(text):
    assert prepare(f" {text}\u200b", None) == text


def test_tone_letters_and_modifier_letters_are_no_punctuation():
    assert prepare("Ə˩kɯ˩-lɑ˥, wa꞉ke", style_with("əkɯlɑwe")) == "ə˩kɯ˩ lɑ˥ wa꞉ke"
    assert prepare("kʰ kʼ", style_with("kʰʼ")) == "kʰ kʼ"
