"""Phrases that are boosted in greedy decoding: against decoding without them, and the file."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from speech import boosting
from speech.boosting import Phrase, Trie
from speech.parakeet import decoding
from speech.parakeet.tokenizer import make_tokenizer
from speech.text import train_tokenizer

LETTERS = "abc"
STATE = {"sentencepiece": train_tokenizer([f"{LETTERS} {LETTERS}."], "char", 0).model.hex()}
TOKENIZER = make_tokenizer(STATE, 6)  # <unk>, space, three letters and a full stop
SPACE = TOKENIZER.encode("a b")[1]
BLANK = 6


def trie_of(phrases: list[str], weight: float) -> Trie:
    return decoding.phrase_trie([Phrase(each, weight, "f:1") for each in phrases], TOKENIZER)


def logits_of(text: str, strength: float = 2.0) -> torch.Tensor:
    """(T, V + 1): a label and a blank in turn."""
    logits = torch.zeros(2 * len(TOKENIZER.encode(text)), BLANK + 1)
    for number, token in enumerate(TOKENIZER.encode(text)):
        logits[2 * number, token] = strength
        logits[2 * number + 1, BLANK] = 9.0
    return logits


def transducer(logits: torch.Tensor, trie: Trie | None) -> str:
    """The text of logits that do not depend on the labels before; a label and then the next
    frame."""

    def step(tokens, state):
        return torch.zeros(1, 1), (torch.zeros(1, 1, 1),)

    def joint(encoded, predicted):
        return logits[encoded[:, 0].long()]

    frames = torch.arange(len(logits)).float()[:, None]
    if trie:
        found = decoding.boosted(step, joint, frames, (), 1, trie)
    else:
        found = decoding.greedy(step, joint, frames[None], [len(logits)], (), 1)[0]
    return decoding.text_of(found, TOKENIZER)


def ctc(logits: torch.Tensor, trie: Trie | None) -> str:
    log_probs = logits.log_softmax(-1)
    if trie:
        found = decoding.boosted_ctc(log_probs, trie)
    else:
        found = decoding.greedy_ctc(log_probs[None], [len(logits)])[0]
    return decoding.text_of(found, TOKENIZER)


@pytest.mark.parametrize("read", [transducer, ctc])
@pytest.mark.parametrize(
    ("spoken", "phrase", "near", "expected"),
    [
        ("ab bca", "cca", ("b", "c"), "ab cca"),  # b sounds like c
        ("ab bca", "ccb", ("b", "c"), "ab bca"),  # the phrase is not completed
        ("ab bcab", "cca", ("b", "c"), "ab bcab"),  # it would be a part of a word
        ("ab bca.", "cca", ("b", "c"), "ab cca."),  # punctuation ends it
        ("bca ab", "cca ab", ("b", "c"), "cca ab"),  # two words, at the beginning
        ("bca a", "cca ab", ("b", "c"), "bca a"),  # the end takes it back
        ("ab bca", "abb", ("", ""), "ab bca"),
    ],
)
def test_a_phrase_is_written_where_it_is_near(read, spoken, phrase, near, expected):
    logits = logits_of(spoken)
    if near[0]:
        heard, meant = (TOKENIZER.encode(f"a{each}")[1] for each in near)
        for row in logits:
            row[meant] = torch.where(row[heard] == 2.0, 1.5, row[meant])
    assert read(logits, None) == spoken
    assert read(logits, trie_of([phrase], 1.0)) == expected


PHRASES = st.lists(st.text(LETTERS + " ", min_size=1, max_size=5), min_size=1, max_size=4)


@given(PHRASES, st.integers(0, 10**6), st.floats(0.1, 4), st.booleans())
def test_what_differs_has_a_phrase_in_it(phrases, seed, weight, is_ctc):
    phrases = [" ".join(each.split()) for each in phrases if each.split()]
    if not phrases:
        return
    logits = 2 * torch.randn(25, BLANK + 1, generator=torch.Generator().manual_seed(seed))
    logits[:, TOKENIZER.unknown] = -50.0
    read = ctc if is_ctc else transducer
    usual = read(logits, None)
    found = read(logits, trie_of(phrases, weight))
    words = f" {found.replace('.', ' . ')} ".split()
    spaced = f" {' '.join(words)} "
    assert found == usual or any(f" {each} " in spaced for each in phrases)


def test_a_file_of_phrases(tmp_path):
    path = tmp_path / "terms.txt"
    path.write_text("\ufeffab  c\t2.5\n\n a\nb\t 1 \n", encoding="utf-8")
    found = list(boosting.read(str(path), 3.0))
    assert [(each.text, each.weight) for each in found] == [("ab c", 2.5), ("a", 3.0), ("b", 1.0)]
    path.write_text("", encoding="utf-8")
    assert list(boosting.read(str(path), 3.0)) == [] and decoding.phrase_trie([], TOKENIZER) is None
    for text, message in [("a\tx", "1: 'x' is no weight"), ("b\na\t-1", "2: '-1' is no weight")]:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            list(boosting.read(str(path), 3.0))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="it is not UTF-8"):
        list(boosting.read(str(path), 3.0))
    with pytest.raises(DataError, match="No such file"):
        list(boosting.read(str(tmp_path / "gone"), 3.0))


def test_a_phrase_that_cannot_be_written_is_named():
    with pytest.raises(DataError, match="terms:3: 'axb' has characters that the model cannot"):
        decoding.phrase_trie([Phrase("axb", 1.0, "terms:3")], TOKENIZER)
