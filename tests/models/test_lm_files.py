"""The language model's files beside an export: names of tokens, the condition, the model card."""

import re
from types import SimpleNamespace

import pytest

from models import card, lm_files
from speech.decoding import language_model
from speech.decoding.language_model import LanguageModelFlags, tokens_of
from speech.writing.text import CharTokenizer

LETTERS = CharTokenizer([" ", *"ab|"])
# Whole words, as BPE has them: none of its pieces is a space alone.
WORDS = SimpleNamespace(
    size=4,
    unknown=0,
    pieces=["<unk>", "\u2581a", "b", "|"],
    spaces=set(),
    is_tag=lambda token: False,
    encode=lambda text: [1 if c == "a" else 2 for c in text],
    decode=lambda tokens: "".join("  ab"[token] for token in tokens),
)
FORM = card.Form("onnx", card.RECOGNITION, "Conformer", "use of FOLDER")


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "texts.txt").write_text("ab a\nb a\n")
    (tmp_path / "best.json").write_text('{"step": 1}')
    language_model.keep(tmp_path, True)
    return tmp_path / "best.safetensors"


def unigrams(text: str) -> set[str]:
    lines = text.split("\\1-grams:\n")[1].split("\n\n")[0].splitlines()
    return {line.split("\t")[1] for line in lines}


def test_nemo_numbers_tokens_with_characters(weights):
    names = lm_files.for_nemo(tokens_of(LETTERS), LETTERS.size)
    assert names.names == {0: "d", 1: "e", 2: "f", 3: "g", 4: "h"}
    texts, form = lm_files.beside(weights, names, FORM, LanguageModelFlags())
    assert [*texts] == ["lm.arpa"]
    assert unigrams(texts["lm.arpa"]) == {*"defgh", "<s>", "</s>", "<unk>"}
    assert 'ngram_lm_model = "FOLDER/lm.arpa"' in form.with_lm


def test_torchaudio_gets_the_names_of_all_outputs(weights):
    names = lm_files.for_torchaudio(tokens_of(LETTERS), [*LETTERS.pieces, "<blk>"], 5)
    texts, form = lm_files.beside(weights, names, FORM, LanguageModelFlags())
    # The bar that is a letter has another name than the space.
    assert texts["lm_tokens.txt"].splitlines() == ["<unk>", "|", "a", "b", "<4>", "<blk>"]
    assert unigrams(texts["lm.arpa"]) == {*"|ab", "<4>", "<s>", "</s>", "<unk>"}
    assert 'lm_dict="FOLDER/lm_tokens.txt"' in form.with_lm  # without it torchaudio mixes them up
    assert 'blank_token="<blk>"' in form.with_lm and 'sil_token="|"' in form.with_lm


def test_a_model_without_a_space_alone_has_no_silence(weights):
    outputs = ["<unk>", "\u2581a", "b", "|", "a b", "a b", "<blk>"]
    names = lm_files.for_torchaudio(tokens_of(WORDS), outputs, 6)
    assert names.lines == ("<unk>", "|a", "b", "<3>", "ab", "<5>", "<blk>")
    assert 'sil_token="<blk>"' in names.use
    texts, _ = lm_files.beside(weights, names, FORM, LanguageModelFlags())
    assert "\t<s> |a" in texts["lm.arpa"] and "|a </s>" in texts["lm.arpa"]


@pytest.mark.parametrize(
    "missing, reason",
    [
        ("texts", r"there is no texts\.txt"),
        ("answer", "is not known"),
        ("help", "did not help"),
        ("weights", ""),
        ("flag", ""),
    ],
)
def test_nothing_is_written_of_a_model_that_is_not_known_to_help(weights, missing, reason, capsys):
    flags = LanguageModelFlags(lm="off" if missing == "flag" else None)
    if missing == "texts":
        (weights.parent / "texts.txt").write_text("\n")
    elif missing == "help":
        language_model.keep(weights.parent, False)
    elif missing == "answer":
        (weights.parent / "texts.txt").write_text("ab a\nb a\nab\n")  # somebody has added a line
    elif missing == "weights":
        weights = None
    names = lm_files.for_nemo(tokens_of(LETTERS), LETTERS.size)
    assert lm_files.beside(weights, names, FORM, flags) == ({}, FORM)
    said = capsys.readouterr().out
    assert re.fullmatch(rf"lm\.arpa is not exported: .*{reason}.*\n", said) if reason else not said
    if missing in ("answer", "help"):
        texts, _ = lm_files.beside(weights, names, FORM, LanguageModelFlags(lm="on"))
        assert [*texts] == ["lm.arpa"]


def test_the_card_says_how_it_is_used(weights):
    names = lm_files.for_nemo(tokens_of(LETTERS), LETTERS.size)
    _, form = lm_files.beside(weights, names, FORM, LanguageModelFlags())
    about = card.About("konkani_conformer")
    assert "language model" not in card.readme("mine", about, FORM)
    text = card.readme("mine", about, form)
    section = text.split("## Use with the language model")[1]
    assert 'ngram_lm_model = "mine/lm.arpa"' in section
    assert section.count("```") == 2
