"""Which vocabulary a model has, and the rows of its pieces: by brute force."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from models.wav2vec2 import vocabulary
from models.wav2vec2.settings import make_config
from models.wav2vec2.texts import Style, prepare, style_of
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from models.wav2vec2.vocabulary import ROWS, own, row_names, with_new_vocabulary
from tests.models.wav2vec2.small import characters_state, sentencepiece_state

WIDTH = 8
TEXTS = ["abc cab bca", "ab ca"] * 20


@dataclass(frozen=True)
class Info:
    config: dict
    tokenizer: dict
    new_pieces: list[int] = field(default_factory=list)


def released(state: dict) -> tuple[Info, dict[str, torch.Tensor]]:
    tokenizer = Wav2Vec2Tokenizer(state)
    torch.manual_seed(0)
    config = make_config(WIDTH, 1, 2, vocabulary=tokenizer.size, blank=tokenizer.blank)
    shapes = dict(zip(ROWS, [(tokenizer.size, WIDTH), (tokenizer.size,)], strict=True))
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    return Info(config, state), {**weights, "encoder.x": torch.zeros(1)}


STATES = {
    "omniasr": sentencepiece_state(["abceo Ab"], normalization_rule_name="identity"),
    "hf": characters_state("abceoA"),
    "blank last": {**characters_state([*"abceoA", "[PAD]"], unknown=None), "blank": 11},
}


@pytest.mark.parametrize("kind", STATES)
def test_rows_go_with_their_characters(kind):
    info, weights = released(STATES[kind])
    old = row_names(Wav2Vec2Tokenizer(info.tokenizer))
    new, changed = with_new_vocabulary(info, weights, own(["cab dé ŋɔB"]))
    names = row_names(Wav2Vec2Tokenizer(new.tokenizer))
    assert names == ["<blank>", "<unk>", "\u2581", *sorted("cabdéŋɔB")]
    assert (new.config["vocabulary"], new.config["blank"]) == (len(names), 0)
    assert [names[row] for row in new.new_pieces if names[row] != "<unk>"] == ["B", *"déŋɔ"]
    like = {"é": "e", "ɔ": "o", "B": "b"}
    blank = info.config["blank"]
    for name in ROWS:
        assert torch.equal(changed[name][0], weights[name][blank])
        before = {piece: weights[name][row] for row, piece in enumerate(old)}
        spread = weights[name].std(0, correction=0)
        for row, piece in enumerate(names):
            made = changed[name][row]
            if piece in before:
                assert torch.equal(made, before[piece]) and row not in new.new_pieces
                continue
            near = before[like[piece]] if piece in like else weights[name].mean(0)
            if made.dim():
                assert ((made - near).abs() < 5 * vocabulary.NOISE * spread).all()
                assert (made != near).all()
            else:
                assert made == near + vocabulary.BIAS
    assert changed["encoder.x"] is weights["encoder.x"]


@pytest.mark.parametrize("kind", STATES)
def test_an_extended_vocabulary_keeps_all_rows(kind, capsys):
    info, weights = released(STATES[kind])
    tokenizer = Wav2Vec2Tokenizer(info.tokenizer)
    state = vocabulary.extended(tokenizer, ["ŋ ŋ ab é é é | "], None)
    new, changed = with_new_vocabulary(info, weights, state)
    assert new.config["blank"] == tokenizer.blank
    assert new.new_pieces[:2] == [tokenizer.size, tokenizer.size + 1]
    assert Wav2Vec2Tokenizer(new.tokenizer).pieces[tokenizer.size :][:2] == ["é", "ŋ"]
    for name in ROWS:
        assert torch.equal(changed[name][: tokenizer.size], weights[name])
    assert f"rows of {tokenizer.size} are the released model's" in capsys.readouterr().out
    # A row that is new remains so.
    again, _ = with_new_vocabulary(new, changed, own(["éx"]))
    names = row_names(Wav2Vec2Tokenizer(again.tokenizer))
    assert {"é", "x"} <= {names[row] for row in again.new_pieces}
    with pytest.raises(UsageError, match="has all characters"):
        vocabulary.extended(tokenizer, ["ab ceA"], None)


def test_letters_of_a_model_that_writes_capitals_keep_their_rows():
    info, weights = released({**characters_state("ABÉ"), "lower": True})
    new, changed = with_new_vocabulary(info, weights, own(["abé", "eA"]))
    names = row_names(Wav2Vec2Tokenizer(new.tokenizer))
    assert {names[row] for row in new.new_pieces} == {"a", "e"}
    for name in ROWS:
        assert torch.equal(changed[name][names.index("é")], weights[name][7])


def test_a_self_supervised_model_gets_a_head():
    config = make_config(WIDTH, 1, 2)
    weights = {"encoder.x": torch.zeros(1), ROWS[0]: torch.empty(0, WIDTH), ROWS[1]: torch.empty(0)}
    torch.manual_seed(0)
    new, changed = with_new_vocabulary(Info(config, {}), weights, own(["ab"]))
    assert new.config["vocabulary"] == 5 and new.new_pieces == [0, 1, 2, 3, 4]
    assert changed[ROWS[0]].shape == (5, WIDTH) and 0 < changed[ROWS[0]].std() < 0.05
    assert changed[ROWS[1]].argmax() == new.config["blank"] == 0


@pytest.mark.parametrize(
    ("character", "like"),
    [
        ("É", "é"), ("ế", "e"), ("ɓ", "b"), ("Ƙ", "k"), ("ɛ", "e"), ("ł", "l"), ("қ", "к"),
        ("\u0958", "\u0915"), ("あ", None), ("ŋ", None), ("\u0301", None), ("<s>", None),
    ],
)  # fmt: skip
def test_letters_that_look_like_another(character, like):
    known = {*"éebklк\u0915xyz"}
    assert next((each for each in vocabulary.alike(character) if each in known), None) == like


def test_characters_that_are_not_rare_must_be_known():
    tokenizer = Wav2Vec2Tokenizer(characters_state("abc"))
    spells = Style(spells_numbers=True)
    vocabulary.require_characters(TEXTS, tokenizer, spells, False)
    vocabulary.require_characters([*TEXTS, "axb x"], tokenizer, spells, False)
    with pytest.raises(DataError, match="ŋ x 3: add --vocab extended to add them, add --vocab own"):
        vocabulary.require_characters([*TEXTS, "ŋŋŋ é"], tokenizer, spells, False)
    vocabulary.require_characters([*TEXTS, "ŋŋŋ é"], tokenizer, spells, True)
    digits = [*TEXTS, "a2 b2 c2"]
    with pytest.raises(DataError, match="2 x 3: write numbers inside words"):
        vocabulary.require_characters(digits, tokenizer, spells, False)
    with pytest.raises(UsageError, match=r"adds no digits.*2 x 3: write numbers inside words"):
        vocabulary.extended(tokenizer, digits, spells)


@given(st.text(st.sampled_from("aBcÀßƙ'’-.,()12٣½´ \u200d\u0301\u064bहिंİ|")))
@pytest.mark.parametrize("kind", ["hf", "omniasr"])
def test_the_new_vocabulary_prepares_texts_as_the_old_one_did(kind, text):
    """A run that is resumed knows its own vocabulary alone."""
    old = Wav2Vec2Tokenizer(STATES[kind])
    style = style_of(old)
    texts = [prepare(text, style), "zz 2nd"]
    state = vocabulary.extended(old, texts, style)
    assert prepare(text, style_of(Wav2Vec2Tokenizer(state))) == texts[0]


@pytest.mark.parametrize("kind", [None, "omniasr"])
def test_a_bar_in_texts_that_are_kept_is_a_letter(kind):
    """It is often typed for a click or for a danda."""
    texts = ["|ab a"]
    if kind:
        state = vocabulary.extended(Wav2Vec2Tokenizer(STATES[kind]), texts, None)
    else:
        state = own(texts)
    tokenizer = Wav2Vec2Tokenizer(state)
    assert tokenizer.decode(tokenizer.encode("|ab a")) == "|ab a"
    assert tokenizer.lacking("|ab a") == []


def test_digits_are_characters_of_texts_that_are_kept():
    assert own(["a 12"])["pieces"][3:] == ["1", "2", "a"]
