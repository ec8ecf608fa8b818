"""Which texts a language model is made of, and where it is used."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from common import options, saving
from common.device import Setup
from common.errors import UsageError
from speech.decoding import language_model, results
from speech.decoding.language_model import LanguageModelFlags
from speech.decoding.long import BY_OVERLAP, BY_SILENCES
from speech.decoding.names import NAME_BONUS, are_names
from speech.decoding.recogniser import DecodingOptions
from speech.decoding.transcribing import transcribe_files
from speech.signal.audio import SAMPLE_RATE
from speech.writing.text import NAMES, CharTokenizer, for_scoring

TOKENIZER = CharTokenizer([" ", *"abcdefgh"])
TOKENS = language_model.tokens_of(TOKENIZER)


def rows(*hypotheses: str) -> list[dict]:
    references = ("ab cd", "ef gh")
    return [
        {"reference": reference, "hypothesis": hypothesis}
        for reference, hypothesis in zip(references, hypotheses, strict=True)
    ]


@pytest.fixture
def folder(tmp_path):
    """The folder of weights with their texts."""
    (tmp_path / "texts.txt").write_text("ab cd\n\n  ab ef \n")
    (tmp_path / "best.json").write_text('{"step": 3}')
    return tmp_path


def likelihood(lm, text: str) -> float:
    model = lm.used().model
    state, total = model.start, 0.0
    for token in TOKENIZER.encode(text):
        log_prob, state = model.step(state, token)
        total += log_prob
    return total


def test_the_texts_beside_the_weights_are_its_texts(folder):
    lm = language_model.make(LanguageModelFlags(), TOKENS, folder)
    assert likelihood(lm, "ab cd") > likelihood(lm, "gh fe")
    (folder / "texts.txt").write_text("gh fe\n")  # anybody can change them
    lm = language_model.make(LanguageModelFlags(), TOKENS, folder)
    assert likelihood(lm, "gh fe") > likelihood(lm, "ab cd")


def test_other_texts_are_added_and_held_out_sentences_left_out(folder, tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("gh fe\nxyz gh\nab ef\nab ab ab ab ab\n")
    lm = language_model.make(
        LanguageModelFlags(lm_text=[str(book)]), TOKENS, folder, held_out=["ab ef", "hh"]
    )
    assert likelihood(lm, "gh fe") > likelihood(lm, "ab ef")
    assert "language model of all texts: 2 held-out sentences are left out" in (
        capsys.readouterr().out
    )


def test_held_out_sentences_are_found_in_a_book(folder, tmp_path, capsys):
    """However it is punctuated, also inside of a line; a short one only alone."""
    book = tmp_path / "book.txt"
    book.write_text(
        "12 Gh, fe; gh ab! cd\nHh.\nhh gh\nef fe gh ab cd hh ab cd ef\n" + "cd ef gh ab\n" * 9
    )
    flags = LanguageModelFlags(lm_text=[str(book)])
    language_model.make(flags, TOKENS, folder, held_out=["gh fe gh ab", "hh", "x"])
    assert "of all texts: 2 held-out sentences are left out" in capsys.readouterr().out
    assert not language_model.has_sentence("कि", {"की"}, [])  # marks are letters


def test_lines_that_somebody_has_added_stay_when_weights_are_saved_again(tmp_path):
    path = tmp_path / "texts.txt"
    assert saving.with_added_lines(path, "one\ntwo\n") == "one\ntwo\n"
    path.write_text("one\nmine\ntwo", encoding="utf-8-sig")
    assert saving.with_added_lines(path, "one\ntwo\n") == "one\ntwo\nmine\n"


def test_sentences_that_are_said_again_and_again_are_kept(folder, capsys):
    held_out = ["ab cd", "ab ef", "hh"]
    lm = language_model.make(LanguageModelFlags(), TOKENS, folder, held_out)
    assert likelihood(lm, "ab ef") > likelihood(lm, "gh fe")
    assert "most held-out sentences are training texts" in capsys.readouterr().out


def test_without_texts_there_is_none(tmp_path):
    assert language_model.make(LanguageModelFlags(), TOKENS, tmp_path) is None
    assert language_model.make(LanguageModelFlags(), TOKENS, None) is None
    with pytest.raises(UsageError, match=r"--lm on: there is no texts\.txt .* --lm_text"):
        language_model.make(LanguageModelFlags(lm="on"), TOKENS, tmp_path)


def test_it_can_be_turned_off(folder):
    assert language_model.make(LanguageModelFlags(lm="off"), TOKENS, folder) is None


@pytest.mark.parametrize("helps", [True, False])
def test_the_held_out_set_decides_and_the_answer_is_kept(folder, helps, capsys):
    lm = language_model.make(LanguageModelFlags(), TOKENS, folder)
    decoded = []

    def rows_of(fusion):
        decoded.append(fusion)
        return rows("ab cd", "ef gh" if bool(fusion) == helps else "ef hh")

    fusion = lm.used()
    assert (lm.judged(rows_of, "val") is fusion) == helps
    assert decoded == [None, fusion]
    answer = "that of the training texts" if helps else "off"
    assert f"it is {answer}\n" in capsys.readouterr().out
    assert language_model.kept(folder) is helps
    assert json.loads((folder / "best.json").read_text())["step"] == 3
    again = language_model.make(LanguageModelFlags(), TOKENS, folder)
    assert (again.judged(pytest.fail, "val") is not None) == helps
    assert (language_model.in_search(LanguageModelFlags(), TOKENS, folder) is not None) == helps
    assert ("it did not help the held-out set" in capsys.readouterr().err) != helps
    assert language_model.make(LanguageModelFlags(lm="on"), TOKENS, folder).used() is not None
    (folder / "texts.txt").write_text("gh fe\n")
    assert language_model.kept(folder) is None  # nothing is known of other texts


def test_the_held_out_set_decides_about_further_texts_alone(folder, tmp_path, capsys):
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("hh gg hh gg hh gg\n")
    lm = language_model.make(LanguageModelFlags(lm_text=[str(foreign)]), TOKENS, folder)
    own, every = (made() for made in lm.choices.values())

    def rows_of(fusion):
        return rows("ab cd", {None: "eh hh", own: "ef gh", every: "ef hh"}[fusion])

    assert lm.judged(rows_of, "val") is own
    assert "  it is that of the training texts\n" in capsys.readouterr().out
    assert language_model.kept(folder) is True  # of the training texts
    flags = LanguageModelFlags(lm_text=[str(foreign)])
    assert language_model.in_search(flags, TOKENS, folder) is not None
    assert "whether --lm_text helps is not known" in capsys.readouterr().err


def test_models_are_compared_and_published_without_it(folder, tmp_path, monkeypatch, capsys):
    """What else is compared with the rows, and most of those who load an export, have none."""
    corpus = SimpleNamespace(texts=["gh", "fe"], languages=None)
    batches = SimpleNamespace(dataset=SimpleNamespace(data=SimpleNamespace(corpus=corpus)))
    batches.dataset.languages = None
    batches.whole = lambda: batches
    monkeypatch.setattr(results, "decode_texts", lambda model, decode, _: decode(model))

    def decode(model, fusion=None):
        return [{**row, "seconds": 1} for row in rows("ab cd", "ef gh" if fusion else "ef hh")]

    how = DecodingOptions(log_dir=tmp_path)
    found, _ = results.report(
        how, None, decode, {"val": batches}, "best", tokens=TOKENS, folder=folder
    )
    assert [row["hypothesis"] for row in found] == ["ab cd", "ef hh"]
    results.print_improvement(found, found, "base", how)
    assert (
        "compared to base, both without a language model, on the same 2" in capsys.readouterr().out
    )
    noted = results.read_results(tmp_path)
    wer = [
        noted[key][NAMES[for_scoring]]["wer"]["rate"] for key in ("rates", "without_lm", "before")
    ]
    assert wer == [0, 0.25, 0.25]


def test_a_list_of_names_is_in_every_search(folder, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("Fee\ngab  eñd\n")  # the model knows no capitals
    flags = LanguageModelFlags(lm_text=[str(names)])
    lm = language_model.make(flags, TOKENS, folder)
    said = capsys.readouterr().err
    assert "names.txt is a list of 2 names" in said and "left out or replaced: ñ x 1" in said
    chosen = lm.judged(lambda fusion: rows("ab cd", "ef hh" if fusion else "ef gh"), "val")
    assert chosen.fusion is None and language_model.kept(folder) is False
    for name in ("fee", "gab ed"):
        state, total = chosen.start, 0.0
        for token in TOKENIZER.encode(name):
            added, state = chosen.step(state, token)
            total += added
        assert total + chosen.end(state) == len(name) * NAME_BONUS
    alone = language_model.make(flags, TOKENS, None)  # a released model
    assert alone.used().fusion is None
    assert alone.judged(pytest.fail, "val").fusion is None


@pytest.mark.parametrize(
    "lines", [["a b c d e"], ["x" * 41], ["a"] * 2001], ids=["words", "letters", "lines"]
)
def test_longer_lines_and_more_of_them_are_a_text(lines):
    assert not are_names(lines)
    assert are_names([line[:3] for line in lines[:2000]])


def test_other_texts_are_prepared_as_those_of_the_training(folder, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("g'h fe ab cd ef\n")
    tokens = language_model.tokens_of(TOKENIZER, lambda text: text.replace("'", " "))
    lm = language_model.make(LanguageModelFlags(lm_text=[str(book)]), tokens, folder)
    assert likelihood(lm, "g h fe") > likelihood(lm, "gh fe")


@pytest.mark.parametrize("content", ["", "[]", '{"language_model": 3}', None])
def test_an_answer_that_is_not_sound_is_none(folder, content):
    if content is None:
        (folder / "best.json").unlink()
    else:
        (folder / "best.json").write_text(content)
    assert language_model.kept(folder) is None
    language_model.keep(folder, True)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file"),
        (b" \n", "it has no text"),
        (b"caf\xe9", "it is not UTF-8"),
        (b'{"audio_filepath": "a.wav", "text": "ab"}', "it is a manifest"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_before_training(tmp_path, content, message):
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    parser = options.Parser("")
    language_model.add_arguments(parser)
    with pytest.raises(UsageError, match=rf"--lm_text.*book\.txt: {message}"):
        language_model.resolve(parser.parse_args(["--lm_text", str(path)]))


def test_of_very_many_texts_a_part_is_kept(monkeypatch):
    texts = [f"{number:04}" for number in range(1000)]
    assert language_model.as_file(texts)["texts.txt"].split() == texts
    monkeypatch.setattr(language_model, "MOST_CHARACTERS", 1000)
    assert language_model.as_file(texts)["texts.txt"].split() == texts[::4]
    assert language_model.as_file([]) == {"texts.txt": ""}


def test_pieces_of_a_recording_begin_where_the_one_before_ended(folder, tmp_path, capsys):
    """But those that overlap, and another recording, begin anew."""
    (folder / "texts.txt").write_text("abc def\n")
    fusion = language_model.in_search(LanguageModelFlags(), TOKENS, folder)
    after = [fusion.start]
    for token in TOKENIZER.encode("abc def "):
        after.append(fusion.step(after[-1], token)[1])
    assert after[4] != after[0]
    speech = np.random.default_rng(1).normal(size=SAMPLE_RATE)
    recording = np.concatenate([speech, np.zeros(SAMPLE_RATE // 2), speech])
    for name in ("a.wav", "b.wav"):
        soundfile.write(tmp_path / name, 0.1 * recording, SAMPLE_RATE)

    def starts(cutting) -> list[int]:
        heard = []

        def decode(batch):
            heard.extend([fusion.start] * len(batch["audio"]))
            return ["" if len(heard) == 3 else "abc"] * len(batch["audio"])

        names = [str(tmp_path / "a.wav"), str(tmp_path / "b.wav")]
        how = DecodingOptions(transcribe=names)
        transcribe_files(how, decode, Setup(), 1.5, cutting, fusion=fusion)
        return heard

    assert starts(BY_SILENCES) == [after[0], after[4], after[0], after[0]]
    fusion.restart()
    assert set(starts(BY_OVERLAP)) == {after[0]}
    assert "abc" in capsys.readouterr().out
