"""Texts cut into sentences and into parts of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from speech.writing.sentences import split_sentences


def bare(text: str) -> str:
    return "".join(text.split())


@given(text=st.text("ab ሰላም።፧፣፤፡.!?,;:»«\"'()3\n\t", max_size=80), most=st.integers(1, 30))
def test_nothing_is_lost_and_every_piece_is_within_the_limit(text, most):
    for count in (len, lambda piece: len(piece.split())):
        pieces = split_sentences(text, most, count)
        assert bare("".join(pieces)) == bare(text)
        assert all(
            piece == " ".join(piece.split()) and 0 < count(piece) <= most for piece in pieces
        )


@given(text=st.text(max_size=60), most=st.integers(2, 40))
def test_any_text_with_a_count_that_is_not_additive(text, most):
    def count(piece):
        """Like a tokenizer that merges pairs of equal characters and adds a language token."""
        tokens, previous = 1, None
        for character in piece:
            previous = None if character == previous else character
            tokens += previous is not None
        return tokens

    pieces = split_sentences(text, most, count)
    assert bare("".join(pieces)) == bare(text)
    assert all(0 < count(piece) <= most for piece in pieces)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("ሰላም ለዓለም።እንዴት ነህ፧ ደህና!", ["ሰላም ለዓለም።", "እንዴት ነህ፧", "ደህና!"]),
        (
            "What? 3.5 and 1,000 at 12:30. Yes... no",
            ["What?", "3.5 and 1,000 at 12:30.", "Yes...", "no"],
        ),
        ("«ሰላም።» አለ። «ደህና ነኝ።»", ["«ሰላም።»", "አለ።", "«ደህና ነኝ።»"]),
        ("ሰላም፡፡ ደህና:: እሺ", ["ሰላም፡፡", "ደህና::", "እሺ"]),
        ('He said "go." "Why?"', ['He said "go."', '"Why?"']),
        ("aa. « b", ["aa.", "« b"]),
        (
            "Am 3. Oktober, z. B. um 9. Ja! 1990. No",
            ["Am 3. Oktober, z. B. um 9. Ja!", "1990.", "No"],
        ),
        ("Vâng ạ. Ở", ["Vâng ạ.", "Ở"]),
        ("?!", ["?!"]),
        ("", []),
        (" \n\t\u00a0", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text, 100, len) == sentences


def test_a_long_sentence_is_cut_at_commas_then_at_spaces_then_by_force():
    assert split_sentences("አበበ በሶ በላ፣ ጫላ ጩቤ ጨበጠ፤ ከበደ ሄደ።", 12, len) == [
        "አበበ በሶ በላ፣",
        "ጫላ ጩቤ ጨበጠ፤",
        "ከበደ ሄደ።",
    ]
    assert split_sentences("አበበ በሶ በላ፣ ጫላ ጩቤ ጨበጠ፤ ከበደ ሄደ።", 25, len) == [
        "አበበ በሶ በላ፣ ጫላ ጩቤ ጨበጠ፤",
        "ከበደ ሄደ።",
    ]
    assert split_sentences("a, b c d, e", 5, len) == ["a,", "b c", "d, e"]
    assert split_sentences("አንድ ሁለት ሦስት", 8, len) == ["አንድ ሁለት", "ሦስት"]
    assert split_sentences("አንድ፡ሁለት፡ሦስት", 8, len) == ["አንድ፡ሁለት፡", "ሦስት"]
    assert split_sentences("abcdefgh", 3, len) == ["abc", "def", "gh"]
    assert split_sentences("ab cdefgh i", 4, len) == ["ab", "cdef", "gh i"]


@pytest.mark.parametrize("unit", [".", "! « ", "?! ", ", ", "» ", "a.", "a b, ", "፡", "::"])
def test_long_texts_take_linear_time(unit, no_hang):
    """Quadratic time would be minutes."""
    pieces = split_sentences(unit * 25_000, 200, len)
    assert bare("".join(pieces)) == bare(unit) * 25_000


def test_a_character_beyond_the_limit_is_refused():
    with pytest.raises(UsageError, match="the character 'b' has more than 2 tokens"):
        split_sentences("ab", 2, lambda piece: 3 * len(piece) if "b" in piece else len(piece))
