"""Normalisation and tokenizers, over arbitrary text."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.english_normalizer import BasicTextNormalizer

from common.errors import DataError, UsageError
from speech.decoding import results
from speech.writing import text

any_text = st.text(max_size=40)
DEVANAGARI = "".join(chr(c) for c in range(0x0900, 0x0980)) + text.JOINERS
LATIN = "abcdefghijklmnopqrstuvwxyzABCDEéñüßøł0123456789.,;:!?-'\"()"
OTHER = "አማርኛ中文русскийالعربية"
mixed = st.text(st.sampled_from(DEVANAGARI + LATIN + OTHER + "   "), max_size=60)
KONKANI = "हांव कोंकणी उलयता, आनी तूं?"


# --- normalisation --------------------------------------------------------------------------------


@given(any_text | mixed)
def test_whispers_normaliser_is_that_of_transformers(value):
    """Written here, because transformers is not needed to run."""
    normalise = BasicTextNormalizer()
    assert text.as_whisper(value) == normalise(value)
    spoken = f"<|vi|> {value} [music] (laughs) Chào"
    assert text.as_whisper(spoken) == normalise(spoken)


@given(any_text | mixed)
def test_normalise(value):
    normal = text.normalise(value)
    assert text.normalise(normal) == normal
    assert unicodedata.is_normalized("NFC", normal)
    assert normal == normal.strip() and "  " not in normal
    assert all(
        c in text.JOINERS
        or c == " "
        or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        for c in normal
    )
    assert marks(normal) == marks(value)


def marks(value: str) -> list[str]:
    """Combining marks, sorted: if a character between two of them is removed, they take their
    canonical order."""
    return sorted(
        c for c in unicodedata.normalize("NFD", value) if unicodedata.category(c).startswith("M")
    )


@given(any_text | mixed)
def test_for_scoring(value):
    scored = text.for_scoring(value)
    assert text.for_scoring(scored) == scored
    assert text.for_scoring(text.normalise(value)) == scored
    assert unicodedata.is_normalized("NFC", scored)
    left = {c for c in scored if unicodedata.category(c).startswith("P")}
    assert left <= text.IN_WORDS and not left & set(scored[:1] + scored[-1:])
    assert not set(scored) & set(text.JOINERS)
    kept = {"L", "M", "N", "S"}
    before = [c for c in unicodedata.normalize("NFD", value) if unicodedata.category(c)[0] in kept]
    after = [c for c in unicodedata.normalize("NFD", scored) if unicodedata.category(c)[0] in kept]
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize(
    ("value", "normal", "scored"),
    [
        (KONKANI, KONKANI, "हांव कोंकणी उलयता आनी तूं"),
        ("\ufeff a\u00a0b\u2028c\t\nd \u200b", "a b c d", "a b c d"),
        ("e\u0301", "é", "é"),
        ("e\u200b\u0301", "é", "é"),  # removing a character joins what NFC composes
        (
            "क\u095c",
            "क\u0921\u093c",
            "क\u0921\u093c",
        ),  # composed nukta letters are taken apart by NFC
        ("क्\u200dष", "क्\u200dष", "क्ष"),
        ("«Hi», said—she…", "«Hi», said—she…", "Hi said she"),
        ("राम।श्याम॥", "राम।श्याम॥", "राम श्याम"),
        ("a\0b\x1bc\ue000\ud800", "abc", "abc"),
        ("", "", ""),
        ("।", "।", ""),
        ("Ma’a «wà:ke», kʼa ma?a.", "Ma’a «wà:ke», kʼa ma?a.", "Ma'a wà:ke kʼa ma?a"),
        ("ə˩kʰɯ˩-lɑ˥ wa꞉ke 3:30", "ə˩kʰɯ˩-lɑ˥ wa꞉ke 3:30", "ə˩kʰɯ˩ lɑ˥ wa꞉ke 3 30"),
        ("你好?世界", "你好?世界", "你好 世界"),
    ],
)
def test_examples(value, normal, scored):
    assert text.normalise(value) == normal and text.for_scoring(value) == scored


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["char", "bpe", "vocab_file"])
def tokenizer(request, tmp_path_factory):
    characters = DEVANAGARI + LATIN + OTHER + " "
    if request.param == "vocab_file":
        path = tmp_path_factory.mktemp("vocab") / "vocab.json"
        path.write_text(
            json.dumps({"char2idx": {c: i + 4 for i, c in enumerate(dict.fromkeys(characters))}})
        )
        return text.load_vocab_file(str(path))
    words = [characters[i : i + 6].strip() for i in range(len(characters))]
    return text.train_tokenizer(
        [" ".join(words[i : i + 5]) for i in range(len(words))] * 3, request.param, 400
    )


@given(value=mixed)
def test_round_trip(tokenizer, value):
    tokens = tokenizer.encode(value)
    assert tokenizer.decode(tokens) == value
    assert all(0 <= token < tokenizer.size for token in tokens)


@given(value=mixed)
def test_the_characters_of_a_text_are_ordered_as_by_sentencepiece(value):
    """Except the space, which is another character there."""
    if not value.strip():
        return
    theirs = text.train_tokenizer([value], "char", 0).pieces[1:]
    ours = text.characters_of([value])
    assert [c for c in ours if c != " "] == [c for c in theirs if c != "\u2581"]
    assert text.CharTokenizer(ours).decode(text.CharTokenizer(ours).encode(value)) == value


@given(value=st.text(st.sampled_from("ab한국 "), max_size=20))
def test_unknown_characters_decode_to_the_replacement_character(tokenizer, value):
    decoded = tokenizer.decode(tokenizer.encode(value))
    squeezed = decoded
    expected = "".join("\ufffd" if c in "한국" else c for c in value)
    while "\ufffd\ufffd" in expected:  # SentencePiece makes one token of neighbours
        expected = expected.replace("\ufffd\ufffd", "\ufffd")
    while "\ufffd\ufffd" in squeezed:
        squeezed = squeezed.replace("\ufffd\ufffd", "\ufffd")
    assert squeezed == expected


def test_characters_beyond_the_sentences_that_are_kept_are_known(monkeypatch):
    monkeypatch.setattr(text, "MOST_SENTENCES", 101)  # SentencePiece's minimum
    for kind in ("char", "bpe"):
        tokenizer = text.train_tokenizer(["ab ab"] * 150 + ["xyz"], kind, 30)
        assert tokenizer.decode(tokenizer.encode("ax zb")) == "ax zb"


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_no_text_is_an_error(kind):
    with pytest.raises(DataError, match="no tokenizer can be trained: there is no text"):
        text.train_tokenizer([" ", ""], kind, 100)


def test_a_vocabulary_smaller_than_the_alphabet_is_an_error():
    with pytest.raises(UsageError, match=r"--vocab_size 9 is too few for the 8 .* at least 10$"):
        text.train_tokenizer(["abcdefgh"], "bpe", 9)
    assert text.train_tokenizer(["abcdefgh"], "bpe", 10).decode([0]) == "\ufffd"


# --- vocab.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [True, False])
def test_vocab_file_leaves_special_tokens_out(tmp_path, wrapped):
    mapping = {"<pad>": 0, "<unk>": 1, "<sos>": 2, "<eos>": 3, "<blank>": 4, " ": 5, "ह": 7, "ा": 6}
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"char2idx": mapping} if wrapped else mapping), "utf-8-sig")
    tokenizer = text.load_vocab_file(str(path))
    assert tokenizer.characters == [" ", "ा", "ह"] and tokenizer.size == 4
    assert tokenizer.encode("हा ?") == [3, 2, 1, 0]
    assert tokenizer.decode([3, 2, 1, 0]) == "हा \ufffd"


NUMBERS = "it does not map each character to a number of its own"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "it is not valid JSON ("),
        (b'{"char2idx": [1]}', "char2idx is not a JSON object"),
        *(
            (b'{"b": 0, "a": %s}' % value, NUMBERS)
            for value in (b'"x"', b"null", b"1.5", b"NaN", b"1e999", b"-1", b"true", b"0")
        ),
        (b'{"<pad>": 0}', "no single characters in it"),
        (b'{"\\ud800": 0}', "no single characters in it"),
    ],
)
def test_a_bad_vocab_file_is_one_line(tmp_path, content, reason):
    path = tmp_path / "vocab.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        text.load_vocab_file(str(path))
    said = str(error.value)
    assert said.startswith(f"--vocab_file {path}: {reason}") and "\n" not in said


def test_equal_texts_give_equal_tokenizers():
    for kind in ("char", "bpe"):
        first, second = (text.train_tokenizer(["हांव घर", "तूं घर"] * 10, kind, 24) for _ in range(2))
        assert first.model == second.model and b"/tmp" not in first.model


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], (0, 0, 0)),
        (["", " "], (0, 0, 0)),
        (["how are you"], (0, 0, 0)),
        (["How are you?", "fine", "I AM", "7 o'clock"], (0.5, 0.5, 0.25)),
        (["Ça va", "Ελλάδα", "ǅ", "ß"], (0.5, 0, 0)),
        (["हांव घरा वता।", "तूं"], (0, 0.5, 0)),
        (["१२ दीस", "m²", "x+1=2"], (0, 0, 1)),
        (["«oui»", "a-b", "“a”", "a + b", "$5"], (0, 0.6, 0.2)),
    ],
)
def test_style_is_the_share_of_texts_with_capitals_punctuation_and_digits(texts, expected):
    shares = text.style(texts)
    assert tuple(shares.values()) == expected
    assert shares.keys() == results.STYLES.keys() == {"case", "punctuation", "digits"}
