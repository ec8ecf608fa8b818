"""What XTTS reads: front ends, tokens, faults, and extended vocabularies against the library
`tokenizers`."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common import checkpoint, options
from common.errors import UsageError
from speech import amharic, corpus
from speech.xtts import formats, start, texts
from speech.xtts.vocabulary import MOST_TOKENS, Vocabulary, add_pieces, new_vocabulary

FIXTURES = Path(__file__).parents[2] / "fixtures" / "xtts"
TEXT = (FIXTURES / "vocab.json").read_text(encoding="utf-8")
ROWS = Vocabulary(TEXT).size
TRAINING = ["ሰላም ለሁሉም።", "ሰላም, እንዴት ነህ?", "ለሁሉም ሰላም the end", "ቡና እወዳለሁ"]
PLAIN = {"g2p": False, "epenthesis": True, "lexicon": {}}
KINDS = [("characters", 2000), ("bpe", 40)]


def unknown_in(reader: texts.Texts, text: str, language: str | None = None) -> bool:
    return reader.unknown in reader.encode(text, language)


def make_metadata(vocab: str = TEXT, language: str = "am", **text) -> dict:
    config = {**formats.SIZES["demo"], "text_tokens": Vocabulary(vocab).size}
    return {
        "vocab": vocab,
        "language": language,
        "carried": False,
        "config": config,
        "settings": {},
        "pretrained": True,
        "text": {**PLAIN, **text},
    }


def make_tensors(rows: int = ROWS, width: int = 16, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "text_embedding.weight": torch.randn(rows, width, generator=generator),
        "text_head.weight": (
            scale / math.sqrt(width) * torch.randn(rows, width, generator=generator)
        ),
        "text_head.bias": 0.1 * torch.randn(rows, generator=generator),
    }


def extended(kind: str, size: int, vocab: str = TEXT, training: list[str] = TRAINING) -> dict:
    metadata = make_metadata(vocab)
    texts.extend(metadata, None, training, texts.TextOptions(extend_vocab=kind, vocab_size=size))
    return metadata


def parse(*flags) -> object:
    parser = options.Parser("XTTS")
    start.add_arguments(parser)
    corpus.add_arguments(parser)
    options.add_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


def resolved(*flags) -> start.Start:
    args = parse(*flags)
    options.resolve(args, False, 1, start.EXCLUDES, start.NEEDS)
    return start.resolve(args)


# --- reading --------------------------------------------------------------------------------------


def test_amharic_is_read_as_phonemes_which_the_vocabulary_has():
    reader = texts.Texts(make_metadata(g2p=True))
    read = reader.read("ሰላም")
    assert (
        read == amharic.phonemes("ሰላም", {}, True)
        and not texts.ETHIOPIC.search(read)
        and read.startswith("s")
    )
    assert reader.encode("ሰላም") == reader.vocabulary.encode(read, "am") and not unknown_in(
        reader, "ሰላም"
    )
    assert reader.vocabulary.size == ROWS


def test_numbers_are_written_in_words_and_ethiopic_letters_are_kept():
    reader = texts.Texts(make_metadata())
    read = reader.read("3 ሰላም።")
    assert (
        read == amharic.spoken("3 ሰላም።") and "3" not in read and "ሰላም" in read and "።" not in read
    )
    assert reader.read("3 men.") == "3 men.", "a text without Ethiopic letters is left as it is"


@pytest.mark.parametrize("g2p", [True, False])
def test_only_rows_of_the_models_language_pass_the_front_end(g2p):
    reader = texts.Texts(make_metadata(g2p=g2p))
    text = "3 ሰላም።"
    assert reader.read(text, "en") == text != reader.read(text)
    assert reader.encode(text, "en") == reader.vocabulary.encode(text, "en")
    for language in (None, "", "am", "xx", "amh"):  # one that the vocabulary lacks is the model's
        assert reader.read(text, language) == reader.read(text)
        assert reader.encode(text, language) == reader.encode(text)
    assert texts.Texts(make_metadata(language="de")).read(text) == text
    corpus = SimpleNamespace(languages=["en", "", "xx", "de", "am", "en"])
    assert reader.languages_of(corpus) == ["am", "de", "en"] and reader.language_of("xx") == "am"


def test_the_lexicon_and_epenthesis_reach_the_phonemes(monkeypatch):
    calls = []
    monkeypatch.setattr(amharic, "phonemes", lambda *values: calls.append(values) or "x")
    reader = texts.Texts(make_metadata(g2p=True, epenthesis=False, lexicon={"ሰላም": "səlam"}))
    assert reader.read("ሰላም") == "x" and calls == [("ሰላም", {"ሰላም": "səlam"}, False)]


def test_older_checkpoints_read_text_as_it_is_written():
    metadata = make_metadata()
    del metadata["text"]
    assert texts.Texts(metadata).encode("ሰላም") == texts.Texts(make_metadata()).encode("ሰላም")


def test_the_prefix_of_a_language_that_coqui_lacks():
    metadata = make_metadata()
    reader = texts.Texts({**metadata, "carried": True})
    vocabulary = reader.vocabulary
    assert reader.encode("no") == vocabulary.encode("[am]no", "en") and reader.encode(
        "no", "de"
    ) == vocabulary.encode("no", "de")


def test_faults():
    reader = texts.Texts(make_metadata())
    reason, details = reader.fault("ቡና", None, 100)
    assert reason == "the vocabulary has none of the text's letters" and details == "'ቡና'"
    new = texts.Texts(make_metadata(), is_new=True)
    assert new.fault("ቡና", None, 100)[0] == f"{reason}: --use_amharic_g2p or --extend_vocab"
    assert new.fault("ж", None, 100)[0] == reader.fault("...", None, 100)[0] == reason
    assert reader.fault("hen", None, 3) is None and reader.fault("then", "de", 2) is None
    assert reader.fault("hens", None, 3) == ("text is longer than 3 tokens", "4 tokens")
    assert (
        reader.fault("ቡ a", None, 100) is None
        and unknown_in(reader, "ቡ a")
        and not unknown_in(reader, "a", "de")
    )


def test_a_text_to_speak_is_checked(capsys):
    reader = texts.Texts(make_metadata())
    with pytest.raises(
        UsageError, match=r"^--synthesize: the vocabulary has none of the text's letters: 'ቡና'$"
    ):
        reader.check("ቡና")
    reader.check("the end")
    assert capsys.readouterr().err == ""
    reader.check("aቡ bናቡ")
    assert capsys.readouterr().err == "warning: 'aቡ bናቡ': the vocabulary lacks ቡ ና\n"


def test_show(capsys):
    texts.show(["ሰላም", "the end"], texts.FrontEnd("am", {**PLAIN, "g2p": True}), 200)
    out, err = capsys.readouterr()
    assert out == f"{amharic.phonemes('ሰላም', {}, True)}\nthe end\n" and not err
    texts.show(["ሰቡ", "hens"], texts.Texts(make_metadata()), 3)
    out, err = capsys.readouterr()
    assert out == "ሰቡ\nhens\n"
    assert (
        err
        == "warning: 'ሰቡ': the vocabulary lacks ቡ\nwarning: 'hens': 4 tokens; training takes 3 at"
        " most\n"
    )


def test_texts_of_a_flag(tmp_path):
    (tmp_path / "a.txt").write_text("ሰላም  ለሁሉም\n\nno\n", encoding="utf-8")
    assert texts.texts_of([str(tmp_path / "a.txt")]) == ["ሰላም ለሁሉም", "no"] and texts.texts_of(
        ["a", "b "]
    ) == ["a", "b"]
    with pytest.raises(UsageError, match="--show_text: there is no text"):
        texts.texts_of([" "], "--show_text")


# --- flags ----------------------------------------------------------------------------------------


def test_flags_become_metadata_that_json_keeps(tmp_path):
    (tmp_path / "words.tsv").write_text("ሰላም\tsəlam\n", encoding="utf-8")
    flags = ["--use_amharic_g2p", "--no_epenthesis", "--lexicon", tmp_path / "words.tsv"]
    chosen = resolved("--from_scratch", *flags)
    saved = json.loads(json.dumps(chosen.text.metadata()))
    assert saved == {
        "g2p": True,
        "epenthesis": False,
        "lexicon": amharic.read_lexicon(str(tmp_path / "words.tsv")),
    }
    assert saved["lexicon"]["ሰላም"] == "səlam"
    assert checkpoint.mismatch(saved, texts.SCHEMA, "text") is None
    assert resolved("--from_scratch").text.metadata() == PLAIN
    metadata = json.loads(json.dumps(extended("bpe", 30)))
    assert checkpoint.mismatch(metadata["text"], texts.SCHEMA, "text") is None
    again = texts.Texts(metadata)
    assert again.encode("ሰላም") == texts.Texts(extended("bpe", 30)).encode("ሰላም")


@pytest.mark.parametrize(
    "text", [[], {}, {**PLAIN, "g2p": 1}, {**PLAIN, "lexicon": {"a": 1}}, {**PLAIN, "lexicon": []}]
)
def test_damaged_metadata(text):
    assert checkpoint.mismatch(text, texts.SCHEMA, "text")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--from_scratch", "--lexicon", "x"], "--lexicon goes with --use_amharic_g2p"),
        (["--from_scratch", "--epenthesis"], "--epenthesis goes with --use_amharic_g2p"),
        (["--from_scratch", "--no_epenthesis"], "--no_epenthesis goes with --use_amharic_g2p"),
        (["--from_scratch", "--vocab_size", 9], "--vocab_size goes with --extend_vocab bpe"),
        (
            ["--from_scratch", "--vocab_size", 9, "--extend_vocab", "characters"],
            "--vocab_size goes with --extend_vocab bpe",
        ),
        (
            ["--from_scratch", "--use_amharic_g2p", "--extend_vocab", "bpe"],
            "--extend_vocab and --use_amharic_g2p",
        ),
        (["--from_scratch", "--use_amharic_g2p", "--language", "ti"], "is for Amharic"),
        (["--show_text", "a", "--use_amharic_g2p", "--lexicon", "missing.tsv"], "missing.tsv"),
        (["--show_text", "a", "--extend_vocab", "bpe"], "--extend_vocab and --show_text"),
        (["--show_text", "a", "--evaluate"], "--show_text and --evaluate"),
        (["--evaluate", "--extend_vocab", "bpe"], "--extend_vocab and --evaluate"),
        (
            ["--synthesize", "a", "--speaker_wav", __file__, "--extend_vocab", "bpe"],
            "--extend_vocab and --synthesize",
        ),
        (
            ["--synthesize", "a", "--speaker_wav", __file__, "--use_amharic_g2p"],
            "a checkpoint keeps how it reads",
        ),
        (
            [
                "--synthesize",
                "a",
                "--speaker_wav",
                __file__,
                "--use_amharic_g2p",
                "--model_dir",
                ".",
                "--resume",
                "x",
            ],
            "keeps how it reads",
        ),
    ],
)
def test_flags_that_contradict(flags, message):
    with pytest.raises(UsageError, match=f"{message}[^\n]*$"):
        resolved(*flags)


def test_flags_that_agree():
    speaking = [
        "--synthesize",
        "a",
        "--speaker_wav",
        __file__,
        "--model_dir",
        ".",
        "--use_amharic_g2p",
    ]
    assert resolved(*speaking, "--no_epenthesis").text == texts.TextOptions(
        g2p=True, epenthesis=False
    )
    assert (
        resolved("--from_scratch", "--extend_vocab", "bpe", "--vocab_size", 9).text.vocab_size == 9
    )
    assert resolved("--show_text", "a", "--use_amharic_g2p", "--language", "amh").text.g2p


G2P = {**PLAIN, "g2p": True}


@pytest.mark.parametrize(
    "flags, text, messages",
    [
        (
            ["--use_amharic_g2p"],
            PLAIN,
            ["--use_amharic_g2p (the checkpoint reads text as written)"],
        ),
        (["--use_amharic_g2p"], G2P, []),
        (["--no_use_amharic_g2p"], G2P, ["--no_use_amharic_g2p (the checkpoint reads phonemes)"]),
        ([], {**G2P, "epenthesis": False, "lexicon": {"a": "b"}}, []),
        (
            ["--use_amharic_g2p", "--no_epenthesis"],
            G2P,
            ["--no_epenthesis (the checkpoint has the opposite)"],
        ),
        (
            ["--extend_vocab", "bpe"],
            PLAIN,
            ["--extend_vocab bpe (the checkpoint's vocabulary was not extended)"],
        ),
        (["--extend_vocab", "bpe"], {**PLAIN, "extend_vocab": "bpe", "vocab_size": 2000}, []),
        (
            ["--extend_vocab", "bpe", "--vocab_size", 9],
            {**PLAIN, "extend_vocab": "bpe", "vocab_size": 2000},
            ["--vocab_size 9 (the checkpoint's vocabulary was extended by bpe, 2000 at most)"],
        ),
    ],
)
def test_flags_that_contradict_a_checkpoint(flags, text, messages):
    chosen = resolved("--resume", "auto", *flags)
    assert texts.conflicts(chosen.given, chosen.text, {"text": text}) == messages
    if text == PLAIN:
        assert texts.conflicts(chosen.given, chosen.text, {}) == messages, (
            "a checkpoint without the entry"
        )


def test_a_contradiction_ends_the_resumed_run():
    config = formats.SIZES["demo"]
    metadata = {
        **make_metadata(new_vocabulary(texts.CHARACTERS, ["en", "am"], 512)),
        "config": config,
        "condition": "same",
    }
    tensors = {
        name: torch.zeros(shape) for name, shape in formats.expected_shapes(config)["gpt"].items()
    }
    start.check_resumed(resolved("--resume", "auto"), metadata, tensors)
    with pytest.raises(
        UsageError, match=r"--use_amharic_g2p \(the checkpoint reads text as written\) conflicts"
    ):
        start.check_resumed(resolved("--resume", "auto", "--use_amharic_g2p"), metadata, tensors)


# --- a larger vocabulary --------------------------------------------------------------------------


@pytest.mark.parametrize("kind, size", KINDS)
def test_an_extended_vocabulary(kind, size, capsys):
    metadata, old = extended(kind, size), json.loads(TEXT)["model"]
    reader, model = texts.Texts(metadata), json.loads(metadata["vocab"])["model"]
    count = reader.vocabulary.size - ROWS
    out = f"vocabulary: {count} new tokens ({kind}), {ROWS + count} in all\n"
    assert capsys.readouterr().out == out and metadata["config"]["text_tokens"] == ROWS + count
    assert (
        model["merges"][: len(old["merges"])] == old["merges"]
        and old["vocab"].items() <= model["vocab"].items()
    )
    assert sorted({*model["vocab"].values()} - {*old["vocab"].values()}) == [
        *range(ROWS, ROWS + count)
    ]
    assert [token["content"] for token in json.loads(metadata["vocab"])["added_tokens"]] == [
        token["content"] for token in json.loads(TEXT)["added_tokens"]
    ]
    assert (reader.vocabulary.start, reader.vocabulary.stop) == (
        Vocabulary(TEXT).start,
        Vocabulary(TEXT).stop,
    )
    for text in TRAINING:
        assert not unknown_in(reader, text)
        assert reader.vocabulary.decode(reader.encode(text)) == f"[am]{reader.read(text)}"
    peer = Tokenizer.from_str(metadata["vocab"])
    assert peer.get_vocab() == model["vocab"]
    lengths = [len(reader.encode(word)) for word in ("ሰላም", "ለሁሉም")]
    assert lengths == ([2, 2] if kind == "bpe" else [4, 5]), (
        "a word of BPE is a token after the language's"
    )
    assert metadata["text"] == {**PLAIN, "extend_vocab": kind, "vocab_size": size}


ALPHABET = [
    "the",
    "end",
    "[am]",
    "[SPACE]",
    "an",
    "ə",
    "šən",
    " ",
    "x",
    "1",
    ".",
    "[",
    "é",
    "ж",
    "𝒳",
    "\0",
    "_",
]
MIXED = [*ALPHABET, "ሰ", "ላም", "ለመ", "ሰላም", "፩", "።", "\u135f", "ꬁ"]
LARGER = {}


def larger(kind: str) -> tuple[Vocabulary, Tokenizer]:
    if kind not in LARGER:
        vocab = extended(
            kind, dict(KINDS)[kind], training=[*TRAINING, "abሰላምthe2ላምend abሰላምthe2ላምend"]
        )["vocab"]
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
    pieces = set(json.loads(extended("bpe", 500, training=training)["vocab"])["model"]["vocab"])
    new = pieces - set(json.loads(TEXT)["model"]["vocab"])
    assert "ሰላም" in new and all(amharic.WORD.fullmatch(piece) for piece in new if len(piece) > 1)
    for size in (14, 16, 19):
        assert extended("bpe", size)["config"]["text_tokens"] == ROWS + size
    with pytest.raises(UsageError, match=r"--vocab_size 5 is too few for the \d+ characters"):
        extended("bpe", 5)


def test_a_second_extension_keeps_what_is_there(capsys):
    first = extended("bpe", 30)
    capsys.readouterr()
    second = copy.deepcopy(first)
    texts.extend(
        second, None, TRAINING, texts.TextOptions(extend_vocab="characters", vocab_size=2000)
    )
    assert (
        second["vocab"] == first["vocab"]
        and "no new tokens (characters)" in capsys.readouterr().out
    )


def test_a_model_from_scratch_has_ethiopic_letters_and_phonemes(capsys):
    vocab = new_vocabulary(texts.CHARACTERS, ["en", "am"], formats.SIZES["demo"]["text_tokens"])
    vocabulary = Vocabulary(vocab)
    assert vocabulary.size == 512 and vocabulary.start == 261
    assert not vocabulary.lacking(
        "the quick brown fox jumps over a lazy dog ə č š ž ñ ı ä ' . , ; : ? ! - ሀ ፐ ፼"
    )
    metadata = extended("characters", 2000, vocab)
    assert metadata["vocab"] == vocab and metadata["config"]["text_tokens"] == 512
    assert (
        capsys.readouterr().out
        == "vocabulary: no new tokens (characters): it has those of the training texts\n"
    )


def test_the_most_tokens():
    content = json.loads(TEXT)
    content["model"]["vocab"]["last"] = MOST_TOKENS - 2
    assert Vocabulary(add_pieces(json.dumps(content), ["ቡ"], [])).size == MOST_TOKENS
    with pytest.raises(
        UsageError, match=f"would have {MOST_TOKENS + 1} tokens, and the most is {MOST_TOKENS}"
    ):
        add_pieces(json.dumps(content), ["ቡ", "ና"], [])


@pytest.mark.parametrize("kind, size", KINDS)
def test_new_rows_and_the_old_ones(kind, size):
    tensors, before = make_tensors(), make_tensors()
    metadata = make_metadata()
    texts.extend(metadata, tensors, TRAINING, texts.TextOptions(extend_vocab=kind, vocab_size=size))
    new = metadata["config"]["text_tokens"] - ROWS
    for name in texts.TEXT_ROWS:
        assert torch.equal(tensors[name][:ROWS], before[name]) and len(tensors[name]) == ROWS + new
    for name in texts.TEXT_ROWS[:2]:
        assert ((tensors[name][ROWS:] - before[name].mean(0)).abs() < 5 * before[name].std(0)).all()
        assert len({*map(tuple, tensors[name][ROWS:].tolist())}) == new
    bias, ids = tensors["text_head.bias"], json.loads(metadata["vocab"])["model"]["vocab"]
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


@pytest.mark.parametrize("kind", texts.KINDS)
@pytest.mark.parametrize("form", ["random", "peaked"])
def test_the_first_loss_is_below_a_uniform_guess(kind, form):
    """Outputs of a head with V = 6681 on normalised hidden states. In the peaked one, the
    space and five other tokens have the most of the probability."""
    size, tensors = 6681, make_tensors(6681, scale=0.6)
    if form == "peaked":
        tensors["text_head.bias"][[2, *range(400, 405)]] += 10
    metadata, generator = (
        make_metadata(new_vocabulary("abcdefg.", ["en", "am"], size)),
        torch.Generator().manual_seed(0),
    )
    texts.extend(metadata, tensors, CORPUS, texts.TextOptions(extend_vocab=kind, vocab_size=300))
    reader = texts.Texts(metadata)
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
