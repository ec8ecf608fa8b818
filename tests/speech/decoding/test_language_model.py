"""Which texts a language model is made of, and where it is used."""

import json

import numpy as np
import pytest
import soundfile

from common import options, saving
from common.device import Setup
from common.errors import UsageError
from speech.decoding import language_model
from speech.decoding.language_model import LanguageModelFlags
from speech.decoding.long import BY_OVERLAP, BY_SILENCES
from speech.decoding.names import NAME_BONUS, are_names
from speech.decoding.recogniser import DecodingOptions
from speech.decoding.transcribing import transcribe_files
from speech.signal.audio import SAMPLE_RATE
from speech.writing.text import CharTokenizer

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
    assert lm.folder is None  # what is found of these texts is not kept for the weights


def test_held_out_sentences_are_found_in_a_book(folder, tmp_path, capsys):
    """However it is punctuated, also inside of a line; a short one only alone."""
    book = tmp_path / "book.txt"
    book.write_text(
        "12 Gh, fe; gh ab! cd\nHh.\nhh gh\nef fe gh ab cd hh ab cd ef\n" + "cd ef gh ab\n" * 9
    )
    flags = LanguageModelFlags(lm_text=[str(book)])
    language_model.make(flags, TOKENS, folder, held_out=["gh fe gh ab", "hh", "x"])
    assert "of all texts: 2 held-out sentences are left out" in capsys.readouterr().out
    book.write_text('{"audio_filepath": "a.wav", "text": "ab"}\n')
    assert not language_model.has_sentence("कि", {"की"}, [])  # marks are letters
    with pytest.raises(UsageError, match="it is a manifest"):
        language_model.make(flags, TOKENS, folder)


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
    assert json.loads((folder / "best.json").read_text()) == {
        "step": 3,
        "language_model_helps": helps,
    }
    again = language_model.make(LanguageModelFlags(), TOKENS, folder)
    assert (again.used() is not None) == helps
    assert (again.judged(pytest.fail, "val") is not None) == helps
    assert language_model.make(LanguageModelFlags(lm="on"), TOKENS, folder).used() is not None


def test_the_held_out_set_decides_about_further_texts_alone(folder, tmp_path, capsys):
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("hh gg hh gg hh gg\n")
    lm = language_model.make(LanguageModelFlags(lm_text=[str(foreign)]), TOKENS, folder)
    own, every = (made() for made in lm.choices.values())

    def rows_of(fusion):
        return rows("ab cd", {None: "eh hh", own: "ef gh", every: "ef hh"}[fusion])

    assert lm.judged(rows_of, "val") is own
    assert "  it is that of the training texts\n" in capsys.readouterr().out
    assert lm.used() is every  # where nothing is held out


def test_a_list_of_names_is_in_every_search(folder, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("Fee\ngab  ed\n")  # the model knows no capitals
    flags = LanguageModelFlags(lm_text=[str(names)])
    lm = language_model.make(flags, TOKENS, folder)
    assert "names.txt is a list of 2 names" in capsys.readouterr().err
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


@pytest.mark.parametrize("content", ["", "[]", '{"language_model_helps": 3}', None])
def test_an_answer_that_is_not_sound_is_none(folder, content):
    if content is None:
        (folder / "best.json").unlink()
    else:
        (folder / "best.json").write_text(content)
    assert language_model.kept(folder) is None
    language_model.keep(folder, True)


def test_a_missing_text_is_refused(tmp_path):
    parser = options.Parser("")
    language_model.add_arguments(parser)
    with pytest.raises(UsageError, match="--lm_text"):
        language_model.resolve(parser.parse_args(["--lm_text", str(tmp_path / "none.txt")]))


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
