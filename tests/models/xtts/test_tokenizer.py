"""XTTS's vocabulary against the library `tokenizers` and what Coqui's own tokenizer made of the
fixture's texts."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import UsageError
from models.xtts.tokenizer import (
    Vocabulary,
    add_pieces,
    add_tokens,
    learn_merges,
    new_rows,
    new_vocabulary,
)
from tests.models.xtts.small import FIXTURES
from tests.models.xtts.small import VOCAB as TEXT

CASES = json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))["tokens"]
VOCABULARY, PEER = Vocabulary(TEXT), Tokenizer.from_str(TEXT)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"])
def test_ids_are_coquis(case):
    assert VOCABULARY.encode(case["clean"], case["language"]) == case["ids"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["[am]", "[SPACE]", "[START]", "the", "n'", " ", "ሀ", "x", "\n", "[", "ə", "𝒳", "\0"]
        )
    )
)
def test_ids_are_those_of_tokenizers(parts):
    text = "".join(parts)
    ids = VOCABULARY.encode(text, "en")
    assert ids == PEER.encode("[en]" + text.replace(" ", "[SPACE]")).ids
    assert ids[0] == PEER.token_to_id("[en]") and all(0 <= i < VOCABULARY.size for i in ids)


def test_the_row_decides_about_the_language_and_an_unknown_one_is_an_error():
    assert VOCABULARY.encode("the", "de")[1:] == VOCABULARY.encode("the", "en")[1:]
    assert VOCABULARY.encode("the", "de")[0] == PEER.token_to_id("[de]")
    for language in ("xx", "START", "en]"):
        with pytest.raises(UsageError, match="no language"):
            VOCABULARY.encode("the", language)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["[am]", "[SPACE]", "the", " ", "ሀ", "ቡ", "ናቡ", "x", "[", "ж", "𝒳", "1"])
        | st.text(max_size=3)
    )
)
def test_the_characters_that_the_vocabulary_lacks(parts):
    text = "".join(parts)
    lacking = VOCABULARY.lacking(text)
    assert len(lacking) == VOCABULARY.encode(text, "en").count(VOCABULARY.unknown)
    ids = json.loads(TEXT)["model"]["vocab"]
    assert all(character in text and character not in ids for character in lacking)
    for character in {*text}.difference(ids, "[]" + "SPACEam") - {*filter(str.isspace, text)}:
        assert character in lacking or VOCABULARY.encode(character, "en")[1:] == []


# --- larger and new ones --------------------------------------------------------------------------


def test_added_tokens_are_never_split_and_older_ids_stay():
    content = json.loads(TEXT)
    off = content["model"]["vocab"].pop(
        "[am]"
    )  # now it is special, but not in `vocab`, and numbered after it
    content["model"]["vocab"]["off"] = off  # without merges, so no text becomes it
    tokens = ["[ti]", "ሰላም", "off", "[en]", "ሰላም"]
    text = add_tokens(json.dumps(content), tokens)
    larger, peer = Vocabulary(text), Tokenizer.from_str(text)
    before = Vocabulary(json.dumps(content))
    ti, word = before.size, before.size + 1
    assert larger.size == before.size + 2 == max(peer.get_vocab().values()) + 1
    assert larger.encode("[am]on", "en") == before.encode("[am]on", "en")
    assert larger.languages == sorted([*before.languages, "ti"])
    assert larger.encode("ሰላም", "ti") == [ti, word]
    assert larger.encode("offer", "ti") == [ti, off, *VOCABULARY.encode("er", "en")[1:]]
    assert peer.encode("[ti]offer").ids == larger.encode("offer", "ti")
    assert len({*peer.get_vocab().values()}) == len(peer.get_vocab())
    assert larger.encode("on a hen", "en") == VOCABULARY.encode("on a hen", "en")
    older = Tokenizer.from_str(json.dumps(content)).get_vocab()
    assert {token: peer.token_to_id(token) for token in older} == older
    assert add_tokens(text, tokens) == text
    special = {token["content"]: token["special"] for token in json.loads(text)["added_tokens"]}
    assert special["[ti]"] and special["ሰላም"] and special["off"]


def test_a_vocabulary_with_an_id_for_two_tokens_is_not_extended():
    content = json.loads(TEXT)
    content["model"]["vocab"]["off"] = 20
    with pytest.raises(UsageError, match="two of its tokens have one id"):
        add_tokens(json.dumps(content), ["[ti]"])


@pytest.mark.parametrize("form", ["text", "pairs"])
def test_added_pieces_are_merged_and_older_ids_stay(form):
    content = json.loads(TEXT)
    content["model"]["vocab"].pop("[am]")  # now it is special, but not in `vocab`, and would move
    if form == "pairs":
        content["model"]["merges"] = [pair.split(" ") for pair in content["model"]["merges"]]
    # The first is there; "xyz" had no merges.
    merges = [("ለ", "መ"), ("ቡ", "ና"), ("x", "y"), ("xy", "z"), ("ቡና", "ለመ")]
    text = add_pieces(json.dumps(content), ["ቡ", "ና", "ሀ"], merges)
    larger, peer, size = Vocabulary(text), Tokenizer.from_str(text), VOCABULARY.size
    ids = peer.get_vocab()
    assert [ids[token] for token in ("ቡ", "ና", "ቡና", "xy", "ቡናለመ")] == [*range(size, size + 5)]
    assert larger.size == size + 5 and PEER.get_vocab().items() <= ids.items()
    assert larger.encode("ቡናለመ xyz", "am") == [ids["[am]"], ids["ቡናለመ"], ids["[SPACE]"], ids["xyz"]]
    merges = json.loads(text)["model"]["merges"]
    assert len(merges) == len(content["model"]["merges"]) + 4
    assert {type(pair) for pair in merges} == {type(merges[0])}
    assert add_pieces(text, ["ቡ"], [("ቡ", "ና")]) == text
    with pytest.raises(UsageError, match=r"vocab\.json is refused"):
        add_pieces(TEXT, ["\ud800"], [])


def test_merges_are_learned_from_frequencies():
    words = {"ሰላም": 5, "ሰላ": 1, "ቡና": 2, "ቤት": 1}
    merges = learn_merges(words, 100)
    assert merges[0] == ("ሰ", "ላ") and {("ቡ", "ና"), ("ሰላ", "ም")} == {*merges[1:]}, "ቤት occurs once"
    assert learn_merges(words, 1) == merges[:1]
    assert learn_merges({}, 9) == []


def test_a_new_vocabulary():
    text = new_vocabulary("ሀለሐመ ab.ab", ["am", "zh-cn"], 512)
    vocabulary, peer = Vocabulary(text), Tokenizer.from_str(text)
    special = (vocabulary.start, vocabulary.stop, vocabulary.unknown)
    assert vocabulary.size == 512 and special == (261, 0, 1)
    assert vocabulary.languages == ["am", "zh-cn"]
    ids = vocabulary.encode("ሀመ b.q", "am")
    assert ids == peer.encode("[am]ሀመ[SPACE]b.q").ids and ids.count(1) == 1 and len(ids) == 7
    assert [vocabulary.tokens()[i] for i in ids] == ["[am]", *"ሀመ", "[SPACE]", *"b.", "[UNK]"]
    assert Vocabulary(new_vocabulary("ab", ["am"], 7)).size == 7


def test_new_rows_have_the_mean_and_deviation_of_each_column():
    generator = torch.Generator().manual_seed(0)
    mean, deviation = torch.tensor([0.0, 5.0, -1.0]), torch.tensor([1.0, 0.1, 0.0])
    weight = mean + deviation * torch.randn(4000, 3, generator=generator)
    rows = new_rows(weight, 4000, generator)
    assert rows.shape == (4000, 3) and torch.allclose(rows.mean(0), mean, atol=0.08)
    assert torch.allclose(rows.std(0), deviation, atol=0.05)
    bias = new_rows(weight[:, 1], 4000, generator)
    assert bias.shape == (4000,) and abs(bias.mean() - 5) < 0.02 and abs(bias.std() - 0.1) < 0.02
    first, second = (new_rows(weight, 2, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second) and not torch.equal(first[0], first[1])


# --- damage ---------------------------------------------------------------------------------------


def changed(**parts):
    def change(content: dict) -> None:
        for key, value in parts.items():
            if value is ...:
                content.pop(key)
            else:
                content[key] = value

    return change


def model(**parts):
    return lambda content: changed(**parts)(content["model"])


def vocab(**parts):
    return lambda content: changed(**parts)(content["model"]["vocab"])


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DAMAGE = {
    "no model": changed(model=...),
    "no vocab": model(vocab=...),
    "another type": model(type="Unigram"),
    "a negative id": vocab(x=-1),
    "a huge id": vocab(x=1 << 40),
    "no START": lambda c: (c["model"]["vocab"].pop("[START]"), c.update(added_tokens=[])),
    "no UNK": lambda c: c["model"]["vocab"].pop("[UNK]"),
    "another unknown token": model(unk_token="<unk>"),
    "a merge of nothing": model(merges=["a zz"]),
    "dropout": model(dropout=0.5),
    "a prefix": model(continuing_subword_prefix="##"),
    "a pattern": changed(pre_tokenizer=SPLIT),
    "no splitting": changed(pre_tokenizer=None),
    "a normalizer": changed(normalizer={"type": "Lowercase"}),
    "a post-processor": changed(post_processor={"type": "ByteLevel"}),
    "a surrogate": vocab(**{"\ud800": 3}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_vocabulary_is_refused_in_one_line(name):
    content = copy.deepcopy(json.loads(TEXT))
    DAMAGE[name](content)
    with pytest.raises(UsageError, match=r"vocab\.json is refused: [^\n]+$") as refusal:
        Vocabulary(json.dumps(content))
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, TEXT[:-9]])
def test_text_that_is_not_a_vocabulary(text):
    with pytest.raises(UsageError, match=r"vocab\.json is refused: [^\n]+$"):
        Vocabulary(text)
