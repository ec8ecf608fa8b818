"""Whisper's tokenizer against transformers', round trips of any text, and files that are
refused."""

import base64
import json
import os
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tokenizers
import transformers
import whisper
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UsageError
from models.whisper import tokenizer as whisper_tokenizer
from tests.peers import write_texts

MORSE = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789É.,:?'-/()\"=+x@", "<SK>", "<AS>", "<HH>"]
CORPUS = ["xin chào các bạn, tôi là sinh viên", "हांव घर वचता", "Dit is geen zin."] * 20
CORPUS += ["12 máy bay, 3 tàu hỏa"] * 20
ALPHABETS = ["abcdefgh ABC", "àảãáạăằđêếềởưữ ", "हिंदीकोंकणीांव ", "中文字符"]
ALPHABETS += ["0123456789 .,!?'s't", "😀🎉\n\t\u200c "]
SYMBOLS = whisper_tokenizer.train_symbols(MORSE, "en")
BPE = whisper_tokenizer.train_bpe(CORPUS, 420, "vi")


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Multilingual, with runs of spaces, contractions and characters of up to four bytes."""
    draw = random.Random(seed)
    words = [
        "".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 12)))
        for _ in range(4 * count)
    ]
    return [draw.choice(["", " "]).join(draw.choices(words, k=4)) for _ in range(count)]


def tiktoken_file(path, tokenizer, empty: bool = False):
    rows = sorted(tokenizer.vocab.items(), key=lambda pair: pair[1])
    lines = [f"{base64.b64encode(tokenizer.raw[i]).decode()} {i}" for _, i in rows]
    path.write_text("\n".join(lines + ([f"= {len(lines)}"] if empty else [])) + "\n")
    return path


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_makes_the_round_trip(text):
    assert BPE.decode(BPE.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([" ", *MORSE]), max_size=40))
def test_morse_is_one_token_a_symbol(symbols):
    tokens = SYMBOLS.encode("".join(symbols))
    assert len(tokens) == len(symbols)
    assert SYMBOLS.decode(tokens) == "".join(symbols)


def test_characters_outside_the_symbols_are_left_out():
    assert SYMBOLS.decode(SYMBOLS.encode("ABĦc D")) == "AB D"


@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|vi|>b", "<|0.00|>"])
def test_special_tokens_in_a_transcript_are_text(text, tmp_path):
    tiktoken = whisper_tokenizer.read_tokenizer(
        tiktoken_file(tmp_path / "multilingual.tiktoken", BPE), "vi"
    )
    for tokenizer in (BPE, tiktoken):
        tokens = tokenizer.encode(text)
        assert not set(tokens) & set(tokenizer.specials.values())
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("languages,size,transcribe", [(99, 51_865, 50_359), (100, 51_866, 50_360)])
def test_the_released_vocabularies_ids(languages, size, transcribe):
    specials = whisper_tokenizer.special_tokens(
        50_257, whisper_tokenizer.LANGUAGES[:languages], timestamps=True
    )
    wanted = {
        "<|endoftext|>": 50_257,
        "<|en|>": 50_259,
        "<|am|>": 50_334,
        "<|transcribe|>": transcribe,
        "<|startofprev|>": transcribe + 2,
        "<|nospeech|>": transcribe + 3,
        "<|notimestamps|>": transcribe + 4,
        "<|0.00|>": transcribe + 5,
        "<|30.00|>": size - 1,
    }
    assert wanted.items() <= specials.items()
    assert len(set(whisper_tokenizer.LANGUAGES)) == 100
    known = transformers.models.whisper.tokenization_whisper.LANGUAGES
    assert list(known) == whisper_tokenizer.LANGUAGES


def with_language(
    tokenizer, code: str, task: str = "transcribe"
) -> whisper_tokenizer.WhisperTokenizer:
    return whisper_tokenizer.make_tokenizer({**tokenizer.state(), "language": code, "task": task})


@pytest.mark.parametrize("name", ["multilingual", "gpt2"])
def test_what_is_never_generated_is_that_of_openais_program(name):
    file = Path(whisper.__file__).parent / "assets" / f"{name}.tiktoken"
    is_multilingual = name == "multilingual"
    theirs = whisper.tokenizer.get_tokenizer(is_multilingual, num_languages=99)
    ours = whisper_tokenizer.read_tokenizer(file, "vi" if is_multilingual else None)
    special = (theirs.transcribe, theirs.translate, theirs.sot, theirs.sot_prev, theirs.sot_lm)
    tokens = {*theirs.non_speech_tokens, *special, theirs.no_speech}
    assert whisper_tokenizer.suppressed(ours) == {
        "suppress_tokens": sorted(tokens),
        "begin_suppress_tokens": [*theirs.encode(" "), theirs.eot],
    }


def test_a_text_has_a_space_before_it_unless_its_script_has_none():
    """Whatever its token: a row of another language, and a language that borrows one."""
    assert whisper_tokenizer.spaced("đi chậm 3") == " đi chậm 3"
    for text in ("2024年です", "ฉันไป", "ຂ້ອຍ", "ကျွန်တော်"):
        assert whisper_tokenizer.spaced(text) == text
    assert (
        whisper_tokenizer.joined(["he said", "no.", "好", "好。", "yes"]) == "he said no.好好。 yes"
    )


def test_a_translation_has_its_token():
    made = with_language(BPE, BPE.languages[0])
    translating = whisper_tokenizer.in_task(made, "translate")
    place = made.prompt.index(made.specials["<|transcribe|>"])
    assert translating.prompt[place] == made.specials["<|translate|>"]
    assert translating.timed_prompt[place] == translating.prompt[place]
    kept = whisper_tokenizer.make_tokenizer(translating.state())
    assert kept.prompt == translating.prompt == whisper_tokenizer.in_task(kept, None).prompt
    english = whisper_tokenizer.make_tokenizer(
        {**BPE.state(), "multilingual": False, "language": "en"}
    )
    with pytest.raises(UsageError, match="English-only"):
        whisper_tokenizer.in_task(english, "translate")


def three_forms(tmp_path) -> dict[str, whisper_tokenizer.WhisperTokenizer]:
    full = whisper_tokenizer.read_tokenizer(
        tiktoken_file(tmp_path / "multilingual.tiktoken", BPE, empty=True), "vi"
    )
    return {"bpe": BPE, "symbols": SYMBOLS, "full": full}


@pytest.mark.parametrize("form", ["bpe", "symbols", "full"])
def test_transformers_reads_what_save_writes(form, tmp_path):
    tokenizer = three_forms(tmp_path)[form]
    write_texts(tokenizer.file_texts(), tmp_path)
    texts = [*random_texts(100), "CQ CQ DE É5ABC/P K <SK>", "don 't stop .", " ,a"]
    for cls in (
        transformers.WhisperTokenizer,
        transformers.WhisperTokenizerFast,
        transformers.AutoTokenizer,
    ):
        theirs = cls.from_pretrained(tmp_path)
        assert len(theirs) == tokenizer.size
        assert theirs.clean_up_tokenization_spaces is False
        assert theirs.all_special_ids == [
            i for name, i in tokenizer.specials.items() if "." not in name
        ]
        named = ["<|endoftext|>", "<|notimestamps|>", *theirs.all_special_tokens]
        assert [tokenizer.specials[name] for name in named] == theirs.convert_tokens_to_ids(named)
        for text in texts:
            tokens = tokenizer.encode(text)
            assert theirs(text, add_special_tokens=False).input_ids == tokens
            whole = [*tokenizer.prompt, *tokens, tokenizer.eos]
            assert theirs.decode(whole, skip_special_tokens=True) == tokenizer.decode(whole)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    special = {token["content"] for token in tokens if token["special"]}
    assert special == {name for name in tokenizer.specials if "." not in name}
    # The language of the first is not where transformers looks; generation_config.json has it.
    if form != "bpe":
        assert theirs("A").input_ids == [*tokenizer.prompt, *tokenizer.encode("A"), tokenizer.eos]


@pytest.mark.parametrize("form", ["bpe", "symbols", "full"])
@pytest.mark.parametrize(
    "drop", [[], ["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]]
)
def test_read_gives_back_what_save_wrote(form, drop, tmp_path):
    tokenizer = three_forms(tmp_path)[form]
    (tmp_path / "multilingual.tiktoken").unlink()
    write_texts(tokenizer.file_texts(), tmp_path)
    for name in drop:
        (tmp_path / name).unlink()
    again = whisper_tokenizer.read_tokenizer(
        tmp_path, tokenizer.language, vocab_size=tokenizer.size + 3
    )
    assert again.state() == tokenizer.state()


def test_a_folder_that_transformers_saved(tmp_path):
    write_texts(three_forms(tmp_path)["full"].file_texts(), tmp_path)
    transformers.WhisperTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    tokenizer = whisper_tokenizer.read_tokenizer(tmp_path / "again", "vi")
    assert tokenizer.prompt == three_forms(tmp_path)["full"].prompt
    for text in random_texts(50, seed=2):
        assert tokenizer.encode(text) == BPE.encode(text)


def test_added_words_of_a_foreign_tokenizer(tmp_path):
    write_texts(three_forms(tmp_path)["full"].file_texts(), tmp_path)
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens(["covid"])
    theirs.save_pretrained(tmp_path / "again")
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path / "again")
    tokenizer = whisper_tokenizer.read_tokenizer(tmp_path / "again", "vi")
    text = "xin covid chào"
    assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    write_texts(tokenizer.file_texts(), tmp_path)
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)


@pytest.mark.parametrize("languages", [99, 100])
def test_tiktoken_gives_the_ids_of_the_bpe(languages, tmp_path):
    file = tiktoken_file(tmp_path / "multilingual.tiktoken", BPE, empty=True)
    size = len(BPE.vocab) + 1 + 8 + 1501 + languages
    tokenizer = whisper_tokenizer.read_tokenizer(file, "vi", vocab_size=size)
    assert (tokenizer.size, len(tokenizer.languages)) == (size, languages)
    assert tokenizer.merges == BPE.merges
    for text in random_texts(200, seed=3):
        assert tokenizer.encode(text) == BPE.encode(text)
    with pytest.raises(UsageError, match="does not go with"):
        whisper_tokenizer.read_tokenizer(file, "vi", vocab_size=51_865)


def test_the_english_only_models(tmp_path, monkeypatch):
    monkeypatch.setattr(
        whisper_tokenizer, "ENGLISH_ONLY_EOS", len(BPE.vocab)
    )  # as in a small GPT-2
    file = tiktoken_file(tmp_path / "gpt2.tiktoken", BPE)
    tokenizer = whisper_tokenizer.read_tokenizer(file, None)
    assert tokenizer.prompt == [tokenizer.start, tokenizer.no_timestamps]
    write_texts(tokenizer.file_texts(), tmp_path)
    assert whisper_tokenizer.read_tokenizer(tmp_path, None).state() == tokenizer.state()
    assert (
        transformers.WhisperTokenizer.from_pretrained(tmp_path)("a").input_ids[:2]
        == tokenizer.prompt
    )
    with pytest.raises(UsageError, match="English-only"):
        with_language(tokenizer, "vi")


def test_a_language_that_is_not_there(tmp_path):
    tokenizer = three_forms(tmp_path)["full"]
    assert with_language(tokenizer, "hi").prompt[1] == tokenizer.specials["<|hi|>"]
    assert (
        with_language(tokenizer, "hi", "translate").prompt[2] == tokenizer.specials["<|translate|>"]
    )
    with pytest.raises(UsageError, match="mr hi kn") as caught:
        with_language(tokenizer, "kok")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="language xy"):
        with_language(tokenizer, "xy")
    with pytest.raises(UsageError, match="is not given"):
        whisper_tokenizer.read_tokenizer(tmp_path / "multilingual.tiktoken", None)
    with pytest.raises(UsageError, match="task"):
        with_language(tokenizer, "hi", "guess")


def test_what_cannot_be_trained():
    with pytest.raises(UsageError, match="265"):
        whisper_tokenizer.train_bpe(CORPUS, 264, "vi")
    assert whisper_tokenizer.train_bpe([], 265, "vi").size == 265
    for symbol in ("<É>", "A B"):
        with pytest.raises(UsageError, match="ASCII"):
            whisper_tokenizer.train_symbols([symbol], "en")


def unigram() -> str:
    return tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0), ("b", -1.0)], 0)).to_str()


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
NO_LANGUAGE = {"<|endoftext|>": 0, "<|startoftranscript|>": 1}


def of_bpe(merges=(), **more) -> str:
    """A tokenizer.json with these pieces, too."""
    return json.dumps({"model": {"vocab": {**BPE.vocab, **more}, "merges": merges}})


@pytest.mark.parametrize(
    "name,content",
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}, "merges": []}}'),
        ("tokenizer.json", json.dumps({"model": {"vocab": NO_LANGUAGE, "merges": ["a b"]}})),
        ("tokenizer.json", LFS),
        ("tokenizer.json", unigram()),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", of_bpe(zz=10**12)),
        ("tokenizer.json", of_bpe(zz=-1)),
        ("tokenizer.json", of_bpe(zz=3)),
        ("tokenizer.json", of_bpe(**{"\ud800": 400})),
        ("tokenizer.json", of_bpe([[1, 2]], **BPE.specials)),
        ("vocab.json", '{"a": 0}'),
        ("multilingual.tiktoken", "IQ== 0\nIg== 1\n"),
        ("multilingual.tiktoken", "IQ==\n"),
        ("multilingual.tiktoken", LFS),
        ("other.txt", ""),
        ("tokenizer.json", b"\xff\xfe\x00"),
    ],
)
def test_hostile_files_are_refused_in_one_line(name, content, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UsageError) as caught:
            whisper_tokenizer.read_tokenizer(path, "vi")
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
        if content == LFS:
            assert "git lfs pull" in str(caught.value)


def test_a_token_of_thousands_of_bytes_is_refused(tmp_path, no_hang):
    tiktoken_file(tmp_path / "multilingual.tiktoken", BPE)
    with open(tmp_path / "multilingual.tiktoken", "a") as file:
        file.write(f"{base64.b64encode(b'a' * 5000).decode()} {len(BPE.vocab)}\n")
    with pytest.raises(UsageError, match="a token of more than 256 bytes"):
        whisper_tokenizer.read_tokenizer(tmp_path, "vi")


def test_a_tokenizer_of_another_model(tmp_path):
    write_texts(BPE.file_texts(), tmp_path)
    with pytest.raises(UsageError, match="belongs to another model"):
        whisper_tokenizer.read_tokenizer(tmp_path, "vi", vocab_size=300)


def test_related_languages_have_a_token_and_are_near_by_descent_not_by_spelling():
    near = {code for codes in whisper_tokenizer.RELATED.values() for code in codes}
    assert near <= {*whisper_tokenizer.LANGUAGES}
    # Cantonese has a token since large-v3.
    assert {*whisper_tokenizer.RELATED} & {*whisper_tokenizer.LANGUAGES} <= {"yue"}
    assert whisper_tokenizer.RELATED["ti"] == ("am",) and whisper_tokenizer.RELATED["qu"] == ("es",)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> whisper_tokenizer.WhisperTokenizer:
    """A released vocabulary with all languages, to which <|kok|> and another token were added."""
    file = tmp_path_factory.mktemp("many") / "multilingual.tiktoken"
    size = len(BPE.vocab) + 1 + 1609
    state = whisper_tokenizer.read_tokenizer(tiktoken_file(file, BPE, True), "vi", size).state()
    added = {"<|kok|>": size, "<|laugh|>": size + 1}
    return whisper_tokenizer.make_tokenizer({**state, "specials": {**state["specials"], **added}})


@pytest.mark.parametrize(
    ("name", "code"),
    [("English", "en"), ("eng", "en"), ("cmn", "zh"), ("nb-NO", "no"), ("jv", "jw"), ("iw", "he"),
     ("fil", "tl"), ("zh-HK", "yue"), ("vi-VN", "vi"), ("kok-IN", "kok"), ("laugh", None),
     ("mdw", None), ("", None)],
)  # fmt: skip
def test_a_row_has_the_token_of_its_language_however_it_is_written(many, name, code):
    assert many.token_of(name) == code
    prompt = many.in_language(many.prompt, name)
    assert prompt[1] == many.specials[f"<|{code or 'vi'}|>"] and prompt[2:] == many.prompt[2:]


@pytest.mark.parametrize(
    ("told", "spoken", "language"),
    [
        ("kok", "kok", "kok"),
        ("mdw=Lingala", "mdw", "ln"),
        ("jv", "jw", "jw"),
    ],
)
def test_a_language_may_be_added_or_borrow_a_token(many, told, spoken, language):
    made = with_language(many, whisper_tokenizer.language_code(told))
    assert (made.spoken, made.language) == (spoken, language)
    assert made.prompt[1] == many.specials[f"<|{language}|>"] == made.timed_prompt[1]
    copy = whisper_tokenizer.make_tokenizer(made.state())
    assert copy.told == made.told and copy.token_of(spoken) == language and copy.speaks(told)
    assert not copy.speaks("vi") and not copy.speaks("xx=vi")


@pytest.mark.parametrize(
    ("told", "says"),
    [("mdw", "mdw can borrow .* docs/your_language.md lists all; --language mdw=ln"),
     ("gom", r"a related language \(mr hi kn\); --language gom=mr"),
     ("mdw=bem", r"language bem: .*"), (None, "add --language")],
)  # fmt: skip
def test_a_language_without_a_token_is_refused_with_help(many, told, says):
    with pytest.raises(UsageError, match=says):
        whisper_tokenizer.WhisperTokenizer(many.vocab, many.merges, many.specials, language=told)


def test_a_new_vocabulary_has_the_languages_of_its_rows():
    made = whisper_tokenizer.train_bpe(CORPUS, 420, "mdw=ln", ["mdw", "eng", "en-GB", "", "ln"])
    assert made.languages == ["ln", "en"] and made.spoken == "mdw" and made.token_of("mdw") == "ln"
