"""Languages of a model with a prompt: names, slots, tags, and languages that are new."""

import numpy as np
import pytest
import torch

from common.errors import DataError, UsageError
from models.parakeet import languages
from models.parakeet.languages import AUTO, AUTO_SHARE, SLOTS
from models.parakeet.tokenizer import ParakeetTokenizer, make_tokenizer
from speech.data.columns import Codes, Corpus, Strings
from speech.decoding import timed
from tests.models.pieces import train_pieces

NAMES = {"en-US": 0, "en": 0, "de-DE": 9, "fi-FI": 26, "es-ES": 2, "es-US": 3, AUTO: 101}
TEXTS = ("Hello you.", "Guten Tag", "Was?", "So.", "no")


def tokenizer(symbols=("<de-DE>", "<en-US>"), kind: str = "user_defined_symbols"):
    lines = ["hello you. guten tag was? so. no Hello Guten Tag Was? So."] * 9
    model = train_pieces(lines, vocab_size=40, model_type="bpe", **{kind: list(symbols)})
    return make_tokenizer({"sentencepiece": model.hex()}, 40)


TOKENIZER = tokenizer()


def corpus(rows: list[str], path: str = "a.wav") -> Corpus:
    count = len(rows)
    return Corpus(
        paths=Strings([path] * count),
        texts=Strings(TEXTS[row % len(TEXTS)] for row in range(count)),
        seconds=np.ones(count),
        offsets=np.zeros(count),
        durations=np.ones(count),
        speakers=Codes([""] * count),
        languages=Codes(rows),
        lines=np.arange(count),
    )


def test_the_usual_slots_are_those_of_transformers():
    from transformers.models.nemotron3_5_asr import processing_nemotron3_5_asr as theirs

    assert theirs.DEFAULT_PROMPT_DICTIONARY == SLOTS


def test_rows_have_the_slots_of_their_languages():
    rows = ["de-DE", "", "en", AUTO]
    prompts = languages.prompts(corpus(rows), NAMES, "fi-FI", TOKENIZER)
    assert [prompts.slot(row) for row in range(4)] == [9, 26, 0, 101]
    stand_in = languages.prompts(corpus(["", ""], path=""), NAMES, None, TOKENIZER)
    assert stand_in.slot(1) == 101


@pytest.mark.parametrize(
    "row, message",
    [
        ("de-de", r"a.wav and 1 other utterances are in 'de-de', .*nearest are de-DE"),
        ("deu", "are in 'deu', .*nearest are de-DE"),
        ("en_GB", "nearest are en-US, en"),
        ("", "have no language, .*: add --language NAME"),
    ],
)
def test_languages_that_the_model_does_not_know_are_refused(row, message):
    with pytest.raises(DataError, match=message):
        languages.prompts(corpus(["en", row, row]), NAMES, None, TOKENIZER)


def test_a_share_of_the_training_utterances_is_told_nothing():
    prompts = languages.prompts(corpus(["de-DE"]), NAMES, None, TOKENIZER)
    random = np.random.default_rng(0)
    drawn = [prompts.slot(0, random) for _ in range(1000)]
    assert set(drawn) == {9, 101} and drawn.count(101) / 1000 == pytest.approx(AUTO_SHARE, abs=0.05)
    without = languages.prompts(corpus(["de-DE"]), {"de-DE": 9}, None, TOKENIZER)
    assert {without.slot(0, random) for _ in range(20)} == {9}


@pytest.mark.parametrize("kind", ["user_defined_symbols", "control_symbols"])
def test_tags_end_sentences_and_are_no_part_of_a_text(kind):
    made = tokenizer(("<de-DE>", "<en-US>"), kind)
    german, english = (made.pieces.index(f"<{name}>") for name in ("de-DE", "en-US"))
    assert made.tags == {"de-DE": german, "en-US": english}
    rows = ["en", "de-DE", "de-DE", "fi-FI", AUTO]
    prompts = languages.prompts(corpus(rows), NAMES, None, made)
    assert [prompts.tag(row) for row in range(5)] == [[english], [], [german], [], []]
    tokens = [*made.encode("Was? So."), german]
    assert made.decode(tokens) == "Was? So."
    heard = [timed.Token(piece, frame, 1) for frame, piece in enumerate(tokens)]
    result = timed.transcript(heard, made, 0.08, 50)
    without = timed.transcript(heard[:-1], made, 0.08, 50)
    assert result == without and result["text"] == "Was? So."


def test_a_tag_within_a_text_is_left_out_too():
    german = TOKENIZER.tags["de-DE"]
    tokens = [*TOKENIZER.encode("So."), german, *TOKENIZER.encode("Was?")]
    assert timed.text_of([timed.Token(t, 0, 1) for t in tokens], TOKENIZER) == "So. Was?"


def test_other_vocabularies_have_no_tags():
    made = tokenizer(())
    assert isinstance(made, ParakeetTokenizer) and made.tags == {}


def test_a_new_language_begins_in_a_free_slot_as_another_one():
    columns = torch.arange(24.0).view(2, 12)  # two inputs, ten slots
    names = {"en-US": 0, "fi-FI": 3, "fi": 3}
    found, new = languages.with_new(names, columns, 10, "se-NO", "fi")
    assert found == {**names, "se-NO": 1} and names == {"en-US": 0, "fi-FI": 3, "fi": 3}
    assert torch.equal(new[:, 3], columns[:, 5]) and not torch.equal(new, columns)
    rest = [column for column in range(12) if column != 3]
    assert torch.equal(new[:, rest], columns[:, rest])


@pytest.mark.parametrize(
    "name, like, slots, message",
    [
        ("fi-FI", "en-US", 10, "knows this language already"),
        ("se-NO", "Fi", 10, "--like Fi: .*nearest are fi-FI"),
        ("se-NO", "fi-FI", 2, "all 2 slots"),
    ],
)
def test_new_languages_that_cannot_be(name, like, slots, message):
    names = {"en-US": 0, "fi-FI": 1}
    with pytest.raises(UsageError, match=message):
        languages.with_new(names, torch.zeros(2, 2 + slots), slots, name, like)
