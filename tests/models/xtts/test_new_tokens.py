"""Extended vocabularies, against the library `tokenizers`, and the rows and biases of new
tokens."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import UsageError
from models.xtts import new_tokens, start, texts
from models.xtts.tokenizer import Vocabulary, new_vocabulary
from speech import amharic
from tests.models.xtts.small import VOCAB as TEXT
from tests.models.xtts.small import make_info

ROWS = Vocabulary(TEXT).size
TRAINING = ["ሰላም ለሁሉም።", "ሰላም, እንዴት ነህ?", "ለሁሉም ሰላም the end", "ቡና እወዳለሁ"]
KINDS = [("characters", 2000), ("bpe", 40)]


def make_tensors(rows: int = ROWS, width: int = 16, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "text_embedding.weight": torch.randn(rows, width, generator=generator),
        "text_head.weight": (
            scale / math.sqrt(width) * torch.randn(rows, width, generator=generator)
        ),
        "text_head.bias": 0.1 * torch.randn(rows, generator=generator),
    }


def asked(kind: str, size: int) -> texts.TextOptions:
    return texts.TextOptions(extend_vocab=kind, vocab_size=size)


def extended(
    kind: str, size: int, vocab: str = TEXT, training: list[str] = TRAINING
) -> start.ModelInfo:
    return new_tokens.extend(make_info(vocab), None, read(training), asked(kind, size))[0]


def read(written: list[str]) -> list[str]:
    reader = texts.Texts(make_info())
    return [reader.read(text) for text in written]


@pytest.mark.parametrize("kind, size", KINDS)
def test_an_extended_vocabulary(kind, size, capsys):
    info, old = extended(kind, size), json.loads(TEXT)["model"]
    reader, model = texts.Texts(info), json.loads(info.vocab)["model"]
    count = reader.vocabulary.size - ROWS
    assert f": {count} new tokens ({kind}), {ROWS + count} in all" in capsys.readouterr().out
    assert info.config["text_tokens"] == ROWS + count
    assert model["merges"][: len(old["merges"])] == old["merges"]
    assert old["vocab"].items() <= model["vocab"].items()
    assert sorted({*model["vocab"].values()} - {*old["vocab"].values()}) == [
        *range(ROWS, ROWS + count)
    ]
    before = Vocabulary(TEXT)
    assert (reader.vocabulary.start, reader.vocabulary.stop) == (before.start, before.stop)
    assert reader.vocabulary.languages == before.languages
    for text in TRAINING:
        assert reader.vocabulary.unknown not in reader.encode(text)
    peer = Tokenizer.from_str(info.vocab)
    assert peer.get_vocab() == model["vocab"]
    lengths = [len(reader.encode(word)) for word in ("ሰላም", "ለሁሉም")]
    assert lengths == ([2, 2] if kind == "bpe" else [4, 5]), (
        "a word of BPE is a token after the language's"
    )
    assert info.text == asked(kind, size)


ALPHABET = ["the", "end", "[am]", "[SPACE]", "an", "ə", "šən", " ", *"x1.[éж𝒳\0_"]
MIXED = [*ALPHABET, "ሰ", "ላም", "ለመ", "ሰላም", "፩", "።", "\u135f", "ꬁ"]
LARGER = {}


def larger(kind: str) -> tuple[Vocabulary, Tokenizer]:
    if kind not in LARGER:
        training = [*TRAINING, "abሰላምthe2ላምend abሰላምthe2ላምend"]
        vocab = extended(kind, dict(KINDS)[kind], training=training).vocab
        LARGER[kind] = Vocabulary(vocab), Tokenizer.from_str(vocab)
    return LARGER[kind]


@pytest.mark.parametrize("kind, size", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET) | st.text(max_size=4)))
@example(["ab", "2", "the"])
def test_a_text_without_new_characters_keeps_its_tokens(kind, size, parts):
    text = "".join(c for c in "".join(parts) if not texts.ETHIOPIC.match(c) and c != "2")
    assert larger(kind)[0].encode(text, "en") == Vocabulary(TEXT).encode(text, "en")


@pytest.mark.parametrize("kind, size", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(MIXED) | st.text(max_size=4)))
def test_ids_of_an_extended_vocabulary_are_those_of_tokenizers(kind, size, parts):
    vocabulary, peer = larger(kind)
    text = "".join(parts)
    assert vocabulary.encode(text, "am") == peer.encode("[am]" + text.replace(" ", "[SPACE]")).ids


def test_merges_are_of_ethiopic_letters_only_and_the_limit_holds():
    training = ["abሰላምthe2ላምend። abሰላምthe2ላምend፩፪"] * 3
    pieces = set(json.loads(extended("bpe", 500, training=training).vocab)["model"]["vocab"])
    new = pieces - set(json.loads(TEXT)["model"]["vocab"])
    assert "ሰላም" in new and all(amharic.WORD.fullmatch(piece) for piece in new if len(piece) > 1)
    for size in (14, 16, 19):
        assert extended("bpe", size).config["text_tokens"] == ROWS + size
    with pytest.raises(UsageError, match=r"--vocab_size 5 is too few for the \d+ characters"):
        extended("bpe", 5)


def test_a_second_extension_keeps_what_is_there(capsys):
    first = extended("bpe", 30)
    capsys.readouterr()
    second, _, added = new_tokens.extend(first, None, read(TRAINING), asked("characters", 2000))
    assert second.vocab == first.vocab and not added
    assert "no new tokens (characters)" in capsys.readouterr().out


def test_the_vocabulary_of_a_plan_has_ethiopic_letters_and_phonemes(capsys):
    vocab = new_vocabulary(texts.CHARACTERS, ["en", "am"], 512)
    vocabulary = Vocabulary(vocab)
    assert vocabulary.size == 512 and vocabulary.start == 261
    assert not vocabulary.lacking(
        "the quick brown fox jumps over a lazy dog ə č š ž ñ ı ä ' . , ; : ? ! - ሀ ፐ ፼"
    )
    info = extended("characters", 2000, vocab)
    assert info.vocab == vocab and info.config["text_tokens"] == 512
    assert "no new tokens (characters)" in capsys.readouterr().out


@pytest.mark.parametrize("kind, size", KINDS)
def test_new_rows_and_the_old_ones(kind, size):
    given, before = make_tensors(), make_tensors()
    info, tensors, new = new_tokens.extend(make_info(), given, read(TRAINING), asked(kind, size))
    assert new == info.config["text_tokens"] - ROWS > 5
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.items())
    for name in new_tokens.TEXT_ROWS:
        assert torch.equal(tensors[name][:ROWS], before[name]) and len(tensors[name]) == ROWS + new
    for name in new_tokens.TEXT_ROWS[:2]:
        assert ((tensors[name][ROWS:] - before[name].mean(0)).abs() < 5 * before[name].std(0)).all()
        assert len({*map(tuple, tensors[name][ROWS:].tolist())}) == new
    bias, ids = tensors["text_head.bias"], json.loads(info.vocab)["model"]["vocab"]
    if kind == "characters":  # "ላ" occurs thrice, "ቡ" once: with one more for each, 4 to 2
        assert bias[ids["ላ"]] - bias[ids["ቡ"]] == pytest.approx(math.log(4 / 2), abs=1e-5)
    assert bias[ROWS:].exp().sum() < before["text_head.bias"].exp().sum()


# Sentences of eight words of five letters.
CORPUS = [
    " ".join(
        "".join(chr(0x1200 + (i * i + j * k * 7 + k) % 300) for k in range(5)) for j in range(8)
    )
    for i in range(60)
]


@pytest.mark.parametrize(("kind", "form"), [("characters", "random"), ("bpe", "peaked")])
def test_the_first_loss_is_below_a_uniform_guess(kind, form):
    """Outputs of a head with V = 6681 on normalised hidden states. In the peaked one, the
    space and five other tokens have the most of the probability."""
    size, tensors = 6681, make_tensors(6681, scale=0.6)
    if form == "peaked":
        tensors["text_head.bias"][[2, *range(400, 405)]] += 10
    info = make_info(new_vocabulary("abcdefg.", ["en", "am"], size))
    generator = torch.Generator().manual_seed(0)
    info, tensors, _ = new_tokens.extend(info, tensors, read(CORPUS), asked(kind, 300))
    reader = texts.Texts(info)
    targets = torch.tensor(
        [token for text in CORPUS for token in (*reader.encode(text), reader.vocabulary.stop)]
    )
    hidden = F.layer_norm(torch.randn(len(targets), 16, generator=generator), (16,))
    loss = F.cross_entropy(
        F.linear(hidden, tensors["text_head.weight"], tensors["text_head.bias"]), targets
    )
    assert loss < math.log(size) - 0.3
    drawn = make_tensors(reader.vocabulary.size, scale=0.6)["text_head.bias"]
    tensors["text_head.bias"][size:] = drawn[size:]
    worse = F.cross_entropy(
        F.linear(hidden, tensors["text_head.weight"], tensors["text_head.bias"]), targets
    )
    assert worse > math.log(size), "rows drawn like the old ones do worse than a guess"


@pytest.mark.parametrize("language", ["am", "de", "xx"])
@pytest.mark.parametrize("kind", texts.KINDS)
def test_what_coqui_never_reads_becomes_no_token(kind, language):
    written = (
        'COVID ÄÖ "x" “y” «z» 😀 👩\u200d🚀 # & @ % ° + = € ₹ * … — ’ ž ᎒ ق। ሰላም።' + "\ufe0f\u200c"
    )
    reader = texts.Texts(make_info(language=language))
    info = new_tokens.extend(
        make_info(language=language), None, [reader.read(written)] * 3, asked(kind, 300)
    )[0]
    new = {*Vocabulary(info.vocab).tokens()} - {*Vocabulary(TEXT).tokens()}
    assert "ق" in new or language == "am"  # Amharic texts have no other letters
    for character in "".join(new):
        assert character.isalpha() or character in "።።।", new
        assert character == character.lower()


def test_pieces_of_any_script_that_coqui_lacks():
    words = ["გამარჯობა მსოფლიო hello welt", "ᱡᱚᱦᱟᱨ ខ្មែរ ខ្មែរ", "नमस्ते ळ"]
    info = make_info(language="xx")
    info, _, _ = new_tokens.extend(info, None, words * 3, asked("bpe", 300))
    vocabulary = Vocabulary(info.vocab)
    for word in ("გამარჯობა", "ខ្មែរ", "ᱡᱚᱦᱟᱨ"):
        assert len(vocabulary.encode(word, "en")) == 2, "one token after the language's"
    new = {*vocabulary.tokens()} - {*Vocabulary(TEXT).tokens()}
    assert not any(len(token) > 1 for token in new if token[0] in "नमस्तेळabcdefghijklmnopqrstuvwxyz")


def test_the_new_tokens_are_counted():
    info = make_info(language="xx")
    info, _ = new_tokens.add_language(info, None)
    assert info.new_tokens == 1
    info, _, added = new_tokens.extend(info, None, ["გამარჯობა"], asked("characters", 10))
    assert info.new_tokens == 1 + added == 8
    family = start.Family(SimpleNamespace(origin=None))
    assert family.untrained(info, None) == [*range(ROWS, ROWS + 8)]
    assert family.untrained(make_info(), None) == []
