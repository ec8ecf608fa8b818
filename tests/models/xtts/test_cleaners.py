"""What XTTS reads in the languages of Coqui, against Coqui's own tokenizer: the table that
tests/fixtures/xtts/make_texts.py made of it, and random texts if it is installed."""

import json
import random
import re

import pytest

from common.errors import RunError
from models.xtts import cleaners, latin
from models.xtts.tokenizer import Vocabulary, add_tokens
from tests.fixtures.xtts import make_texts
from tests.models.xtts.small import FIXTURES, VOCAB

ROWS = json.loads((FIXTURES / "texts.json").read_text(encoding="utf-8"))
LIBRARIES = {cleaners.CHINESE: "pypinyin", cleaners.JAPANESE: "cutlet"}
RANDOM_TEXTS = 300  # of a language


@pytest.fixture(params=list(make_texts.WORDS))
def language(request) -> str:
    if request.param in LIBRARIES:
        pytest.importorskip(LIBRARIES[request.param])
    return request.param


def test_texts_and_tokens_are_coquis(language):
    vocabulary = Vocabulary(add_tokens(VOCAB, [f"[{each}]" for each in make_texts.WORDS]))
    rows = [row for row in ROWS if row[0] == language]
    assert len(rows) == make_texts.COUNT
    for _, text, clean, ids in rows:
        assert cleaners.clean(text, language) == clean, text
        assert vocabulary.encode(clean, language) == [*map(int, ids.split())], text


def test_random_texts_are_coquis(language):
    peer = pytest.importorskip("TTS.tts.layers.xtts.tokenizer").VoiceBpeTokenizer()
    draw = random.Random(1)
    for _ in range(RANDOM_TEXTS):
        text = make_texts.sample(draw, language)
        try:
            expected = peer.preprocess_text(text, language.split("-")[0])
        except Exception:
            continue
        assert cleaners.clean(text, language) == expected, text


def test_every_language_of_coqui_is_read():
    assert set(make_texts.WORDS) == set(cleaners.LANGUAGES)


@pytest.mark.parametrize(
    ("language", "text", "read"),
    [
        ("en", 'He said "Hi" to Dr. Who: $20.50 & 1st, 50%.', "he said hi to doctor who: twenty"
         " dollars, fifty cents and first, fifty percent ."),
        ("tr", "İSTANBUL IŞIK", "istanbul işik"),
        ("de", "1.234,5 Straßen am 3. Mai", "eintausendzweihundertvierunddreißig komma fünf"
         " straßen am dritte mai"),
    ],
)  # fmt: skip
def test_examples(language, text, read):
    assert cleaners.clean(text, language).lower() == read


@pytest.mark.parametrize(
    ("language", "text", "read"),
    [
        ("cs", "5. května", "pět května"),  # num2words lacks Czech ordinals
        ("es", "9" * 60, " ".join(["nueve"] * 60)),
        ("it", "1" * 4400 + ",5", " ".join(["uno"] * 4400) + " cinque"),
        ("hi", "12.5 है", "12.5 है"),  # num2words lacks Hindi
    ],
)
def test_what_makes_coquis_code_fail_is_read(language, text, read):
    assert cleaners.clean(text, language) == read


@pytest.mark.parametrize("language", [each for each in cleaners.LANGUAGES if each not in LIBRARIES])
def test_long_numbers_take_linear_time(language):
    """Without the look-behinds in the patterns this takes minutes."""
    for text in ("7" * 40_000, "1." * 10_000, "$1" * 10_000, "1 234" * 10_000):
        assert cleaners.clean(text, language)


def test_a_missing_library_is_named(monkeypatch):
    def missing(module, purpose):
        raise RunError(f"{purpose} needs the package {module}")

    monkeypatch.setattr(cleaners, "require", missing)
    monkeypatch.setattr(latin, "require", missing)
    with pytest.raises(RunError, match="a text with numbers needs the package num2words"):
        cleaners.clean("5", "en")
    assert cleaners.clean("Five", "en") == "five"
    with pytest.raises(RunError, match="Chinese text needs the package pypinyin"):
        cleaners.clean("书", cleaners.CHINESE)


def test_a_shielded_text_is_left_as_it_is():
    """As Coqui's code reads texts of a language that is carried by English."""
    words = [*cleaners.ABBREVIATIONS["en"], "səlam", "ሰላም", "a", "[am]", "'", ","]
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choice(words) + draw.choice([".", " ", ". ", ""]) for _ in range(6))
        shielded = cleaners.shield(" ".join(text.split()))
        assert cleaners.clean(shielded, "en") == shielded
        assert re.sub(r" (?=\.)", "", shielded) == re.sub(r" (?=\.)", "", " ".join(text.split()))
