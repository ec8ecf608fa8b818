"""Characters that a vocabulary lacks: counted, named, and refused above a share."""

import shlex

import pytest

from common.errors import DataError
from speech.data.columns import Corpus
from speech.writing import text, unknown
from tests.speech.data.test_checks import make_corpus


def corpus(texts: list[str]) -> Corpus:
    return make_corpus([(text, 1.0, "") for text in texts])


LATIN = unknown.outside("abcdefghijklmnopqrstuvwxyz ")


def check(texts: list[str], lacking=LATIN, allow: bool = False) -> None:
    unknown.check_unknown({"training": corpus(texts)}, lacking, allow, "do something else")


def test_nothing_is_said_of_texts_that_can_be_written(capsys):
    check(["hello world", "how are you"])
    assert capsys.readouterr().out == ""


def test_the_share_is_of_characters_and_not_of_texts(capsys):
    check(["a" * 30 + "ñ"] * 10)  # every text, 3.2 % of the characters
    said = "warning: training set: 3.2 % of the characters are outside the vocabulary: ñ x 10\n"
    assert capsys.readouterr().out == said


def test_another_script_is_refused_with_the_advice(capsys):
    with pytest.raises(DataError) as error:
        check(["ሰላም ሰላም", "hello"])
    message = str(error.value)
    assert message.startswith("training set: ") and "\n" not in message
    assert "54.5 % of the characters (ላ x 2, ም x 2, ሰ x 2)" in message
    assert "do something else" in message and "--allow_unknown" in message
    check(["ሰላም ሰላም"], allow=True)
    assert "100.0 %" in capsys.readouterr().out


def test_a_small_evaluation_set_can_have_a_rare_character_if_the_vocabulary_is_the_runs_own(capsys):
    rare = corpus(["hello world", "you ñ"])  # 7 %
    unknown.check_unknown({"val": rare}, LATIN, False, is_own=True)
    assert "ñ x 1" in capsys.readouterr().out
    for sets, is_own in (({"val": rare}, False), ({"train": rare}, True)):
        with pytest.raises(DataError):
            unknown.check_unknown(sets, LATIN, False, is_own=is_own)


def test_invisible_characters_are_named_by_code_point_and_name(capsys):
    check(["a" * 100 + "\u200d\u0301\u00a0\u200b\x07"])
    out = capsys.readouterr().out
    for name in (
        "U+200D ZERO WIDTH JOINER x 1",
        "U+0301 COMBINING ACUTE ACCENT",
        "U+00A0 NO-BREAK SPACE",
        "U+200B ZERO WIDTH SPACE",
        "U+0007 x 1",
    ):
        assert name in out
    assert out.count("\n") == 1 and out.rstrip("\n").isprintable()


def test_capitals_and_punctuation_of_sentences_are_only_warned_about(capsys):
    check(["Is this the way to write a sentence? Yes! It is."] * 5)  # 13 %
    out = capsys.readouterr().out
    assert out.endswith(": I x 10, ! x 5, . x 5, ? x 5, Y x 5\n")


@pytest.mark.parametrize("written", ["HELLO WORLD", "Is this the ሰላ way to write? Yes!"])
def test_capitals_alone_and_letters_beside_them_are_refused(written):
    with pytest.raises(DataError, match="cannot write"):
        check([written] * 5)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_tokenizer_is_asked_for_each_character(kind):
    tokenizer = text.train_tokenizer(["hello world", "how are you"] * 20, kind, 30)
    lacking = unknown.not_encoded(tokenizer)
    assert list(lacking("hello how")) == []
    assert list(lacking("hxllo ሰሰ ?")) == ["x", "ሰ", "ሰ", "?"]


def adds(counts) -> str:
    value = unknown.as_value(counts)
    return value and f"--add {value}"


@pytest.mark.parametrize(
    ("texts", "flag"),
    [
        (["a%b%", "(a) b"], '--add "% ( )"'),
        (['a"$b'], """--add '" $'"""),
        (["a`'\\!"], "--add '! '\"'\"' \\ `'"),
        ([chr(0x4E00 + i) for i in range(101)], ""),  # too many
    ],
)
def test_the_flag_that_adds_characters_is_ready_to_copy(texts, flag, capsys):
    named = {"train": corpus(["a" * 99, *texts]), "val": corpus(["€" * 2])}
    unknown.check_unknown(named, LATIN, True, adds=adds)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("to add them")]
    assert lines == ([f"to add them to the vocabulary: {flag}"] if flag else [])
    if flag:
        value = shlex.split(flag)[1]
        assert set(value.split(" ")) == {c for text in texts for c in text if c not in "ab "}


class Folding:
    """A tokenizer that reads small letters, and knows these alone."""

    unknown = 0

    def encode(self, value: str) -> list[int]:
        return [ord(c) if c.isascii() else 0 for c in value.lower().replace("ʰ", "h")]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def test_characters_that_a_vocabulary_writes_in_another_way_are_named(capsys):
    unknown.note_rewritten({"train": corpus(["kʰa A", "ʰ ሰ"]), "val": corpus(["ab"])}, Folding())
    assert capsys.readouterr().out == (
        "warning: train set: 2 characters are read in another way by the vocabulary: ʰ as h x 2,"
        " A as a x 1\n"
    )
