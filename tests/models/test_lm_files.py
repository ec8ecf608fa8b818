"""The language model's files beside an export: names of tokens, the condition, the model card."""

import json
from types import SimpleNamespace

import pytest

from models import card, lm_files
from speech.writing.text import CharTokenizer

LETTERS = CharTokenizer([" ", *"ab|"])
# Whole words, as BPE has them: none of its pieces is a space alone.
WORDS = SimpleNamespace(
    size=4,
    unknown=0,
    pieces=["<unk>", "\u2581a", "b", "|"],
    spaces=set(),
    encode=lambda text: [1 if c == "a" else 2 for c in text],
    decode=lambda tokens: "".join("  ab"[token] for token in tokens),
)
FORM = card.Form("onnx", card.RECOGNITION, "Conformer", "use of FOLDER")


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "texts.txt").write_text("ab a\nb a\n")
    (tmp_path / "best.json").write_text(json.dumps({"language_model_helps": True}))
    return tmp_path / "best.safetensors"


def unigrams(text: str) -> set[str]:
    lines = text.split("\\1-grams:\n")[1].split("\n\n")[0].splitlines()
    return {line.split("\t")[1] for line in lines}


def test_nemo_numbers_tokens_with_characters(weights):
    names = lm_files.for_nemo(LETTERS)
    assert names.names == {0: "d", 1: "e", 2: "f", 3: "g", 4: "h"}
    texts, form = lm_files.beside(weights, names, FORM)
    assert [*texts] == ["lm.arpa"]
    assert unigrams(texts["lm.arpa"]) == {*"defgh", "<s>", "</s>", "<unk>"}
    assert 'ngram_lm_model = "FOLDER/lm.arpa"' in form.with_lm


def test_torchaudio_gets_the_names_of_all_outputs(weights):
    names = lm_files.for_torchaudio(LETTERS, [*LETTERS.pieces, "<blk>"], 5)
    texts, form = lm_files.beside(weights, names, FORM)
    # The bar that is a letter has another name than the space.
    assert texts["lm_tokens.txt"].splitlines() == ["<unk>", "|", "a", "b", "<4>", "<blk>"]
    assert unigrams(texts["lm.arpa"]) == {*"|ab", "<4>", "<s>", "</s>", "<unk>"}
    assert 'lm_dict="FOLDER/lm_tokens.txt"' in form.with_lm  # without it torchaudio mixes them up
    assert 'blank_token="<blk>"' in form.with_lm and 'sil_token="|"' in form.with_lm


def test_a_model_without_a_space_alone_has_no_silence(weights):
    names = lm_files.for_torchaudio(WORDS, ["<unk>", "\u2581a", "b", "|", "a b", "a b", "<blk>"], 6)
    assert names.lines == ("<unk>", "|a", "b", "<3>", "ab", "<5>", "<blk>")
    assert 'sil_token="<blk>"' in names.use
    texts, _ = lm_files.beside(weights, names, FORM)
    assert "\t<s> |a" in texts["lm.arpa"] and "|a </s>" in texts["lm.arpa"]


@pytest.mark.parametrize("missing", ["texts", "answer", "help", "weights"])
def test_nothing_is_written_of_a_model_that_is_not_known_to_help(weights, missing):
    if missing == "texts":
        (weights.parent / "texts.txt").write_text("\n")
    elif missing == "help":
        (weights.parent / "best.json").write_text(json.dumps({"language_model_helps": False}))
    elif missing == "answer":
        (weights.parent / "best.json").write_text("{}")
    else:
        weights = None
    assert lm_files.beside(weights, lm_files.for_nemo(LETTERS), FORM) == ({}, FORM)


def test_the_card_says_how_it_is_used(weights):
    _, form = lm_files.beside(weights, lm_files.for_nemo(LETTERS), FORM)
    about = card.About("konkani_conformer")
    assert "language model" not in card.readme("mine", about, FORM)
    text = card.readme("mine", about, form)
    section = text.split("## Use with the language model")[1]
    assert 'ngram_lm_model = "mine/lm.arpa"' in section
    assert section.count("```") == 2
