"""What XTTS reads: front ends, tokens, faults, and the flags about them."""

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from common import options, records
from common.errors import UsageError
from models import released
from models.xtts import cleaners, speaking, start, texts
from models.xtts.tokenizer import Vocabulary
from speech import amharic
from speech.data import splits
from tests.models.xtts.small import VOCAB, make_info

ROWS = Vocabulary(VOCAB).size
PLAIN = texts.TextOptions()
G2P = texts.TextOptions(g2p=True)


def unknown_in(reader: texts.Texts, text: str, language: str | None = None) -> bool:
    return reader.vocabulary.unknown in reader.encode(text, language)


def reading_as(language: str, carried: bool) -> SimpleNamespace:
    """What `Texts` takes of a `ModelInfo`, of a model whose vocabulary is not known."""
    return SimpleNamespace(language=language, text=PLAIN, carried=carried, vocab="")


def parse(*flags) -> object:
    parser = options.Parser("XTTS")
    start.add_arguments(parser)
    speaking.add_arguments(parser)
    splits.add_arguments(parser)
    options.add_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


def resolved(*flags) -> start.XttsOptions:
    args = parse(*flags)
    options.resolve(args, False, 0)
    return start.resolve(args, recipe="xtts_amharic")


# --- reading --------------------------------------------------------------------------------------


def test_amharic_is_read_as_phonemes_which_the_vocabulary_has():
    reader = texts.Texts(make_info(g2p=True))
    read = reader.read("ሰላም")
    assert read == amharic.phonemes("ሰላም", {}, True)
    assert not texts.ETHIOPIC.search(read)
    assert read.startswith("s")
    assert reader.encode("ሰላም") == reader.vocabulary.encode(read, "am")
    assert not unknown_in(reader, "ሰላም")
    assert reader.vocabulary.size == ROWS


def test_numbers_are_written_in_words_and_ethiopic_letters_are_kept():
    reader = texts.Texts(make_info())
    read = reader.read("3 ሰላም።")
    assert (
        read == amharic.spoken("3 ሰላም።") and "3" not in read and "ሰላም" in read and "።" not in read
    )
    assert reader.read('3 "Men".') == "ሦስት men.", (
        "other letters are read as Coqui's code reads them"
    )


@pytest.mark.parametrize("g2p", [True, False])
def test_only_rows_of_the_models_language_are_read_in_it(g2p):
    reader = texts.Texts(make_info(g2p=g2p))
    text = "3 Hens ሰላም።"
    assert reader.read(text, "en") == "three hens ሰላም።" != reader.read(text)
    assert reader.encode(text, "en") == reader.vocabulary.encode("three hens ሰላም።", "en")
    for language in (None, "", "am", "xx", "amh"):  # one that the vocabulary lacks is the model's
        assert reader.read(text, language) == reader.read(text)
        assert reader.encode(text, language) == reader.encode(text)
    assert texts.Texts(make_info(language="de")).read(text) == "drei hens ሰላም።"
    corpus = SimpleNamespace(languages=["en", "", "xx", "de", "am", "en"])
    assert reader.languages_of(corpus) == ["am", "de", "en"] and reader.language_of("xx") == "am"


def test_the_lexicon_and_epenthesis_reach_the_phonemes(monkeypatch):
    calls = []
    monkeypatch.setattr(amharic, "phonemes", lambda *values: calls.append(values) or "x")
    reader = texts.Texts(make_info(g2p=True, epenthesis=False, lexicon={"ሰላም": "səlam"}))
    assert reader.read("ሰላም") == "x" and calls == [("ሰላም", {"ሰላም": "səlam"}, False)]


def test_the_prefix_of_a_language_that_coqui_lacks():
    reader = texts.Texts(replace(make_info(), carried=True))
    vocabulary = reader.vocabulary
    assert reader.encode("no") == vocabulary.encode("[am]no", "en")
    assert reader.encode("no", "de") == vocabulary.encode("no", "de")


@pytest.mark.parametrize(
    ("language", "text", "read"),
    [
        ("xx", "Él “DIJO” «no» ’n… 😀👩\u200d🚀☕\ufe0f ok", "él dijo no 'n... ok"),
        ("xx", "İstanbul IŞIK", "istanbul işik"),
        ("xx", "a^\x07b`", "ab"),
        ("xx", "ગુજરાતી ૧૨", "ગુજરાતી 12"),
        ("fi", "Kello ON 12", "kello on kaksitoista"),
        ("az", "IŞIQ İsti", "ışıq isti"),
        ("xx", "me hon. mr. x", "me hon . mr . x"),
        ("am", "ሰላም “COVID” 😀", "ሰላም covid"),
    ],
)
def test_other_languages_are_written_so_that_coqui_leaves_them(language, text, read):
    reader = texts.Texts(reading_as(language, carried=True))
    assert reader.read(text) == read
    if not re.search("[0-9]", read):
        assert cleaners.clean(f"[{language}]{read}", "en") == f"[{language}]{read}"


@pytest.mark.parametrize(
    ("language", "text", "signs"),
    [
        ("xx", "a 12 & b", ["1", "2", "&"]),
        ("fi", "€5 + ½ m²", ["€", "+", "½", "²"]),
        ("fi", "12", []),
        ("hi", "5 & 6", ["5", "6"]),
        ("en", "5 & 6", []),
        ("ja", "5", []),
    ],
)
def test_what_cannot_be_read_in_words_is_a_fault(language, text, signs):
    reader = texts.Texts(reading_as(language, carried=language == "xx"))
    read = text if language == "ja" else reader.read(text)
    fault = reader.fault(read, None, 100)
    assert (fault is None) == (not signs)
    if signs:
        assert fault[0].startswith("numbers or signs that are not read in words in " + language)
        assert fault[1].startswith(" ".join(signs))


def test_a_corpus_is_read_once(monkeypatch):
    reader = texts.Texts(make_info(g2p=True))
    corpus = SimpleNamespace(texts=["ሰላም", "The END 2"], languages=["", "en-GB"])
    texts.read_corpora(reader, {"train": corpus})
    assert [*corpus.read] == [amharic.phonemes("ሰላም", {}, True), "the end two"]
    monkeypatch.setattr(reader, "read", None)
    tokens = reader.tokens_of(corpus)
    assert [row.tolist() for row in tokens] == [
        reader.vocabulary.encode(corpus.read[0], "am"),
        reader.vocabulary.encode("the end two", "en"),
    ]
    assert reader.fault(corpus.read[1], "en", 100) is None


def test_faults():
    reader = texts.Texts(make_info())
    reason, details = reader.fault("ቡና", None, 100)
    assert reason == "the vocabulary has none of the text's letters" and details == "'ቡና'"
    new = texts.Texts(make_info(), is_new=True)
    assert new.fault("ቡና", None, 100)[0] == f"{reason}: --use_amharic_g2p or --extend_vocab"
    assert new.fault("ж", None, 100)[0] == reason
    for each in (reader, texts.Texts(reading_as("sw", carried=True))):
        assert each.fault("...", None, 100) == ("the text has no letters", "'...'")
        assert each.fault("", None, 100) == ("the text has no letters", "''")
    assert reader.fault("hen", None, 3) is None and reader.fault("then", "de", 2) is None
    assert reader.fault("hens", None, 3) == ("text is longer than 3 tokens", "4 tokens")
    assert reader.fault("ቡ a", None, 100) is None
    assert unknown_in(reader, "ቡ a")
    assert not unknown_in(reader, "a", "de")


def test_a_text_to_speak_is_checked(capsys):
    reader = texts.Texts(make_info())
    with pytest.raises(UsageError, match=r"^--synthesize 'ቡና': .* none of the text's letters"):
        reader.check("ቡና")
    reader.check("the end")
    assert capsys.readouterr().err == ""
    reader.check("aቡ bናቡ")
    assert capsys.readouterr().err == "warning: 'aቡ bናቡ': the vocabulary lacks ቡ x 2, ና x 1\n"


# --- flags ----------------------------------------------------------------------------------------


def kept(text: texts.TextOptions) -> texts.TextOptions:
    """The options as a .safetensors keeps them."""
    return records.read(texts.TextOptions, json.loads(json.dumps(asdict(text))), "it")


def test_json_keeps_the_options(tmp_path):
    (tmp_path / "words.tsv").write_text("ሰላም\tsəlam\n", encoding="utf-8")
    flags = ["--use_amharic_g2p", "--no_epenthesis", "--lexicon", tmp_path / "words.tsv"]
    chosen = resolved("--dry_run=8GB", *flags).text
    lexicon = amharic.read_lexicon(str(tmp_path / "words.tsv"))
    assert chosen == texts.TextOptions(g2p=True, epenthesis=False, lexicon=lexicon)
    assert lexicon["ሰላም"] == "səlam" and kept(chosen) == chosen
    assert resolved("--dry_run=8GB").text == PLAIN == kept(PLAIN)


SPEAKING = f"--synthesize a --speaker_wav {__file__}"
CONTRADICTIONS = [  # words, and a part of the message
    ("--dry_run=8GB --vocab_size 9 --extend_vocab characters", "goes with --extend_vocab bpe"),
    ("--dry_run=8GB --use_amharic_g2p --language ti", "is for Amharic"),
    ("--show_text a --use_amharic_g2p --lexicon missing.tsv", "missing.tsv"),
]


@pytest.mark.parametrize(("words", "message"), CONTRADICTIONS)
def test_flags_that_contradict(words, message):
    with pytest.raises(UsageError, match=f"{message}[^\n]*$"):
        resolved(*words.split())


BPE = replace(PLAIN, extend_vocab="bpe")
OF_A_CHECKPOINT = [  # words, how the checkpoint reads, and a part of the contradiction
    ("--use_amharic_g2p", PLAIN, "--use_amharic_g2p True (the checkpoint has False)"),
    ("--use_amharic_g2p", G2P, None),
    ("--no_use_amharic_g2p", G2P, "--use_amharic_g2p False (the checkpoint has True)"),
    ("", replace(G2P, epenthesis=False, lexicon={"a": "b"}), None),
    ("--use_amharic_g2p --no_epenthesis", G2P, "--epenthesis False (the checkpoint has True)"),
    ("--extend_vocab bpe", PLAIN, "--extend_vocab bpe (the checkpoint has None)"),
    ("--extend_vocab bpe", BPE, None),
    ("--extend_vocab bpe --vocab_size 9", BPE, "--vocab_size 9 (the checkpoint has 2000)"),
]


@pytest.mark.parametrize(("words", "text", "message"), OF_A_CHECKPOINT)
def test_flags_that_contradict_a_checkpoint(words, text, message):
    family = start.Family(resolved("--dry_run=8GB", "--resume", "auto", *words.split()))
    info = SimpleNamespace(language="am", condition="same", text=text)
    found = released.differing(family.saved_flags(info, None))
    assert len(found) == bool(message) and (message or "") in "".join(found)
