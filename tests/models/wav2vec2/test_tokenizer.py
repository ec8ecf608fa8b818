"""Ids and texts are SentencePiece's and transformers', with the exceptions that are named."""

import json
import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import sentencepiece
from transformers import Wav2Vec2CTCTokenizer

from common.errors import UsageError
from models.wav2vec2.tokenizer import SPACE, Wav2Vec2Tokenizer, make_tokenizer, with_added
from tests.models.wav2vec2.small import characters_state, sentencepiece_state

ALPHABETS = ["abcdefgh", "ABC", "àảãäñßÉệộ", "हिंदीकोंकणीांव\u200d", "0123", " '-", "中文é☃", " "]
KNOWN = [alphabet for alphabet in ALPHABETS if alphabet != "ABC"]


def texts(seed: int, count: int = 300, alphabets=ALPHABETS) -> list[str]:
    """Words of random characters, with runs of spaces."""
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        chosen = "".join(generator.sample(alphabets, 3)) + " "
        found.append("".join(generator.choices(chosen, k=generator.randint(0, 30))))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"user_defined_symbols": ["ab"]},
    ],
)
def test_ids_are_those_of_sentencepiece(options):
    state = sentencepiece_state(texts(0, alphabets=KNOWN), **options)
    tokenizer = make_tokenizer(state, Wav2Vec2Tokenizer(state).size)
    peer = sentencepiece.SentencePieceProcessor(model_proto=bytes.fromhex(state["model"]))
    assert (tokenizer.blank, tokenizer.unknown) == (0, 3)
    assert tokenizer.pieces[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    for text in texts(1):
        single = " ".join(text.split())
        expected = peer.encode(single)
        if expected and tokenizer.pieces[expected[0]] == SPACE:
            expected = expected[1:]
        tokens = tokenizer.encode(text)
        assert tokens == expected
        if tokenizer.unknown not in tokens:
            assert tokenizer.decode(tokens) == peer.decode(tokens)
            assert tokenizer.decode(tokens) == peer.normalize(single).replace(SPACE, " ").strip()
    assert tokenizer.encode(" ") == []
    assert tokenizer.lacking("aXb XY") == ["X", "X", "Y"]


def peer_of(state: dict, folder) -> Wav2Vec2CTCTokenizer:
    path = folder / "vocab.json"
    vocab = {piece: number for number, piece in enumerate(state["pieces"])}
    path.write_text(json.dumps(vocab), encoding="utf-8")
    return Wav2Vec2CTCTokenizer(str(path), do_lower_case=state["lower"])


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("longer", [[], ["sch", "ch", "chs"]])
def test_ids_and_texts_are_those_of_transformers(lower, longer, tmp_path):
    characters = sorted(set("".join(KNOWN)) - {" "} | {*"cdsh"})
    if lower:
        characters = sorted({each.upper() for each in characters if len(each.upper()) == 1})
        longer = []  # transformers looks for them before it makes capitals
    state = characters_state([*characters, *longer])
    state["lower"] = lower
    tokenizer = make_tokenizer(state, len(state["pieces"]))
    peer = peer_of(state, tmp_path)
    random_texts = texts(2)
    if longer:
        random_texts = texts(2, alphabets=["cschsh", "sccch", "hxABC", "s"])
        random_texts = [text.replace(" ", "") for text in random_texts]  # it drops those around
    for text in random_texts:
        tokens = tokenizer.encode(text)
        assert tokens == peer(" ".join(text.split())).input_ids
        if tokenizer.unknown not in tokens:
            assert tokenizer.decode(tokens) == peer.decode(tokens, group_tokens=False)
    generator = random.Random(3)
    for _ in range(100):
        tokens = generator.choices([*range(4, tokenizer.size)], k=generator.randint(0, 20))
        expected = peer.decode(tokens, group_tokens=False)
        assert tokenizer.decode(tokens) == " ".join(expected.split())


def test_special_tokens_and_the_delimiter_in_a_text_are_plain_text():
    tokenizer = Wav2Vec2Tokenizer(characters_state("ab<>s"))
    assert tokenizer.encode("a|b a") == [5, 1, 6, 4, 5]
    assert tokenizer.encode("<s>") == [7, 9, 8]
    assert tokenizer.lacking("a|b |") == ["|", "|"]
    assert tokenizer.pieces[4] == SPACE and tokenizer.spaces == tokenizer.delimiters == {4}
    assert tokenizer.decode([0, 5, 1, 2, 3, 4, 4, 6, 4]) == "a\ufffd b"
    assert tokenizer.characters == {*"ab<>s"}


def test_without_an_unknown_token_or_a_space_what_is_unknown_is_left_out():
    state = characters_state("ab", unknown=None)
    assert Wav2Vec2Tokenizer(state).encode("xa x bx") == [5, 4, 6]
    assert Wav2Vec2Tokenizer({**state, "delimiter": " "}).encode("xa x bx") == [5, 6]


def test_a_longer_piece_keeps_the_spaces_around_it():
    tokenizer = Wav2Vec2Tokenizer(characters_state(["a", "ch", "c"]))
    assert tokenizer.encode("a ch ach cc") == [5, 4, 6, 4, 5, 6, 4, 7, 7]
    assert tokenizer.lacking("hch h") == ["h", "h"]


def test_added_characters_follow_the_pieces_whose_ids_stay():
    for state in (sentencepiece_state(["abc ab"]), characters_state("abc")):
        old = Wav2Vec2Tokenizer(state)
        new = Wav2Vec2Tokenizer(with_added(state, ["ŋ", "X"]))
        assert new.pieces == [*old.pieces, "ŋ", "X"] and new.kind == old.kind
        assert (new.blank, new.unknown) == (old.blank, old.unknown)
        assert new.encode("a ŋX?")[-3:] == [old.size, old.size + 1, old.unknown]
        assert new.encode("abc cab?") == old.encode("abc cab?")
        assert new.decode(new.encode("aŋ X")) == "aŋ X"
    with pytest.raises(UsageError, match="reads it as 'fi'"):
        with_added(sentencepiece_state(["abc"]), ["ﬁ"])


CHARACTERS = characters_state("ab")
MODEL = sentencepiece_state(["abc"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({**MODEL, "model": MODEL["model"][:60]}, "unk is not defined"),
        (sentencepiece_state(["abc"], bos_id=-1, pad_id=0, eos_id=1, unk_id=2), "lacks the piece"),
        ({**CHARACTERS, "pieces": ["<pad>", "a", "a"]}, "pieces"),
        ({**CHARACTERS, "pieces": ["<pad>", "\ud800", "a"]}, "pieces"),
        ({**CHARACTERS, "pieces": ["<pad>", "|", SPACE]}, "two pieces for the space"),
        ({**CHARACTERS, "unknown": 0}, "not one of its pieces"),
    ],
)
def test_a_damaged_state_is_refused_in_one_line(state, message):
    with pytest.raises(UsageError) as error:
        Wav2Vec2Tokenizer(state)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_of_another_size_is_refused():
    with pytest.raises(UsageError, match="it has 7 pieces and the model 5"):
        make_tokenizer(CHARACTERS, 5)


def test_changed_bytes_of_a_model_are_refused_or_read():
    generator = random.Random(4)
    model = bytearray.fromhex(MODEL["model"])
    for _ in range(300):
        changed = bytearray(model)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        try:
            tokenizer = Wav2Vec2Tokenizer({**MODEL, "model": changed.hex()})
        except UsageError:
            continue
        assert tokenizer.decode(tokenizer.encode("abc cab")) is not None
