"""Orthography profiles: what a letter is."""

import csv
import json
import random
import unicodedata
from pathlib import Path

import pytest

from common.errors import DataError, UsageError
from speech.alignment.letters import HOLE, of_characters
from speech.decoding import language_model
from speech.writing import metrics, profile
from speech.writing.text import CharTokenizer, normalise
from tests.speech.writing.test_unknown import corpus

# Random profiles and texts: the rows, a text, its segments, and its words in the column Text, as
# `segments` 2.4 gives them: Tokenizer(Profile(...))(text, column=..., errors="replace").
SEGMENTS = Path(__file__).parents[2] / "fixtures" / "profile" / "segments.json"
UNITS = ["a", "b", "á", "ts", "t͡s", "ʰ", "ώ", "\u0301", "\u0323", "ɔ", "˥", "aa", "'"]
HOSTILE = [
    ("", "no column Grapheme, or one twice; its columns are none"),
    ("Grapheme\tText\n", "it has 0 units"),
    ("IPA\tCount\na\t1\n", "its columns are 'IPA', 'Count'"),
    ("Grapheme\tGrapheme\na\tb\n", "or one twice"),
    ("Grapheme\na\nb\na\n", ":4: 'a' is also in line 2"),
    ("Grapheme\ná\na\u0301\n", ":3: 'á' is also in line 2"),
    ("Grapheme\tCount\n\t3\n", ":2: '' is no unit"),
    ("Grapheme\na b\n", ":2: 'a b' is no unit"),
    ("Grapheme\na\u0007\n", "characters that texts never have"),
    (f"Grapheme\n{'a' * 65}\n", "more than 64 characters"),
    ("Grapheme\tText\na\ta\nb\t12\n", ":3: 'b' becomes '12', which is not made of units"),
    ("Grapheme\tText\na\tNULL\n", "it has 0 units"),
    ("Grapheme\tText\na\ta\nb\n", ":3: it has not as many cells"),
    ("Grapheme\tText\na\ta\nb\t\n", ":3: Text is empty: write the unit itself, or NULL"),
    ('Grapheme\tText\na\ta\n"\tx\n', "a quotation mark is written as"),
]


def made(*rows: tuple[str, str]) -> profile.Profile:
    return profile.Profile(rows)


def alone(*units: str) -> profile.Profile:
    return made(*((unit, unit) for unit in units))


def drawn(seed: int) -> tuple[profile.Profile, str]:
    """A random profile, and a text of its units."""
    draw = random.Random(seed)
    units = [profile.composed(unit) for unit in draw.sample(UNITS, 5)]
    text = "".join(draw.choice([*units, " "]) for _ in range(20))
    return alone(*units), text


def decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


@pytest.mark.parametrize("case", json.loads(SEGMENTS.read_text(encoding="utf-8")))
def test_texts_are_cut_and_replaced_as_segments_does_it(case):
    rows, text, segments, words = case
    meaning = {"NULL": "", "SPACE": " "}
    own = made(*((unit, meaning.get(becomes, profile.composed(becomes))) for unit, becomes in rows))
    signs = {" ": "_", **{unit: unit for unit, _ in own.rows}}
    cut = [signs.get(part, "\ufffd") for part in own.cut(normalise(text))]
    assert " ".join(cut) == profile.composed(segments)
    if "\ufffd" not in segments:
        assert own.prepare(text) == words


@pytest.mark.parametrize("seed", range(50))
def test_a_text_of_units_comes_back_in_any_normal_form(seed):
    own, text = drawn(seed)
    prepared = own.prepare(text)
    assert prepared == own.prepare(decomposed(text)) == normalise(text)
    assert profile.composed("".join(own.cut(prepared))) == prepared
    tokenizer = CharTokenizer(own.vocabulary([]), own)
    tokens = tokenizer.encode(prepared)
    if tokenizer.unknown not in tokens:
        assert tokenizer.decode(tokens) == prepared
    else:  # Unicode's order of marks can part a letter from its own one
        assert profile.Outside(tokenizer.characters, own)(prepared)


def test_a_tone_can_be_a_unit_beside_its_vowel():
    own = alone("o", "k", "ts", "\u0301")
    assert own.cut("tsókó") == ["ts", "o", "\u0301", "k", "o", "\u0301"]
    tokenizer = CharTokenizer(own.vocabulary([]), own)
    assert tokenizer.decode(tokenizer.encode("tsókó ó")) == "tsókó ó"
    assert tokenizer.pieces[tokenizer.encode("ts")[0]] == "ts"


def test_marks_split_words_vanish_or_become_others():
    own = made(("a", "a"), ("b", "b"), ("A", "a"), ("-", " "), ("!", ""), ("x", "ab"))
    assert own.prepare("Ab-a! x  x?") == "ab a ab ab?"
    assert own.units == ["a", "b"]


@pytest.mark.parametrize("content, message", HOSTILE)
def test_what_is_no_profile_is_refused_in_a_line(content, message, tmp_path):
    path = tmp_path / "p.tsv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as failure:
        profile.read(str(path))
    said = str(failure.value)
    assert said.startswith(f"--profile {path}") and message in said and "\n" not in said


def test_what_excel_writes_is_read(tmp_path, capsys):
    path = tmp_path / "p.tsv"
    path.write_bytes("\ufeffGrapheme\tIPA\tText\r\nts\tʦ\tts\r\n\r\na\u0301\tá\tá\r\n".encode())
    assert profile.read(str(path)) == alone("ts", "á")
    assert "columns used: Grapheme, Text; not used: IPA" in capsys.readouterr().out
    path.write_text("\ufeffts", encoding="utf-16")
    with pytest.raises(UsageError, match="save it as UTF-8"):
        profile.read(str(path))


def test_a_checkpoint_keeps_its_profile(tmp_path):
    path = tmp_path / "p.tsv"
    path.write_text("Grapheme\na\nts\n", encoding="utf-8")
    kept = alone("a", "ts").kept()
    assert profile.choose(str(path), kept) == profile.choose(None, kept) == alone("a", "ts")
    assert profile.choose(None, []) is None and profile.choose(None) is None
    for saved in ([], alone("a").kept()):
        with pytest.raises(UsageError, match="other units than the checkpoint"):
            profile.choose(str(path), saved)
    assert profile.are_rows(kept) and profile.are_rows([])
    for damaged in ([["a", "a"], ["a", "a"]], [["a"]], [["a", 1]], ["aa"]):
        assert not profile.are_rows(damaged)
        with pytest.raises(UsageError, match="damaged"):
            profile.of_rows(damaged)


def test_what_a_profile_lacks_is_named_with_an_example(capsys):
    own = alone("ts", "a")
    texts = ["tsa"] * 40 + ["tsañ at"]
    own.check({"train": corpus(texts)}, own.vocabulary([]), allow=False, advice="")
    out = capsys.readouterr().out
    assert "t x 1" in out and "n x 1" in out and "U+0303 COMBINING TILDE x 1" in out
    assert "lines of the profile for" in out and "t (as in at)" in out and "n (as in tsañ)" in out
    few = {"train": corpus(["tsa", "kiko"])}
    with pytest.raises(DataError, match="add lines to the profile"):
        own.check(few, own.vocabulary([]), allow=False, advice="")


@pytest.mark.parametrize(
    "text, units",
    [
        ("t͡sʰaːn", ["t͡sʰ", "aː", "n"]),
        ("áɔ́", ["á", "ɔ́"]),
        ("ma˩˥", ["m", "a", "˩", "˥"]),
        ("k'a, हां", ["k", "'", "a", ",", "हां"]),
    ],
)
def test_the_first_units_are_letters_with_their_marks(text, units):
    assert profile.clusters(text) == units


def test_tones_can_be_apart_from_the_first():
    assert profile.clusters("áɔ̣̀t͡sã", True) == ["a", "\u0301", "ɔ̣", "\u0300", "t͡s", "ã"]


def test_a_first_profile_counts_and_covers_the_texts(tmp_path):
    texts = ["Kyéma t͡sʰo", '"ɔ́" kyéma', "ma˥"]
    path = tmp_path / "p.tsv"
    path.write_text(profile.first_profile(texts), encoding="utf-8")
    with open(path, encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file, dialect="excel-tab")]
    counted = {row["Grapheme"]: (row["Count"], row["Example"]) for row in rows}
    assert counted["é"] == ("2", "Kyéma") and counted["t͡sʰ"] == ("1", "t͡sʰo")
    assert rows[0]["Grapheme"] == "a" and rows[0]["Name"] == "LATIN SMALL LETTER A"
    own = profile.read(str(path))
    assert not any(profile.Outside([*own.units, " "], own)(text) for text in texts)


def test_a_language_model_counts_units():
    own = alone("ts", "a", "\u0301")
    tokenizer = CharTokenizer(own.vocabulary([]), own)
    tokens = language_model.tokens_of(tokenizer)
    assert tokens.mark == tokenizer.index[" "]
    assert tokens.of("tsá xa") == [tokenizer.index[c] for c in ("ts", "a", "\u0301", " ", "a")]


def test_errors_are_counted_in_units():
    own = alone("ts", "t", "a", "\u0301")
    row = {"reference": "tsá tsa", "hypothesis": "tá tsa"}
    errors = metrics.read_by([row], {"": normalise}, own.cut)[""]
    assert {name: (each[0].total, each[0].length) for name, each in errors.items()} == {
        "wer": (1, 2),
        "cer": (1, 7),
        "uer": (1, 6),
    }
    counted = metrics.errors_of_row({"": errors}, 0)[""]
    assert counted["units"] == [1, 6]
    rates = metrics.rates({"": errors})
    assert "UER    16.67" in metrics.error_table({"": errors}, rates)
    assert "UER    16.67%" in metrics.improvement_table({"": errors}, {"": errors})


@pytest.mark.parametrize("seed", range(10))
def test_errors_in_characters_are_those_in_units_of_one_character(seed):
    draw = random.Random(seed)
    rows = [
        {side: "".join(draw.choices("ab c", k=12)) for side in ("reference", "hypothesis")}
        for _ in range(4)
    ]
    errors = metrics.read_by(rows, {"": normalise}, alone("a", "b", "c").cut)[""]
    assert errors["uer"] == errors["cer"]


def test_an_alignment_spells_units():
    own = alone("ts", "a")
    vocabulary = of_characters({" ": 0, "ts": 1, "a": 2}, 3, 4, own)
    assert vocabulary.encode("tsa tsaka") == [1, 2, 0, 1, 2, HOLE, 2]
    assert vocabulary.spellings == [" ", "ts", "a", ""]


def run(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["profile", *map(str, words)])
        profile.main()


def test_the_command_takes_texts_tables_and_annotations(tmp_path, capsys):
    (tmp_path / "a.mb").write_text("ká tsa\n\nma\n", encoding="utf-8")
    rows = [{"audio_filepath": "gone.wav", "text": "tsa é"}]
    (tmp_path / "t.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subtitles = "1\n00:00:00,000 --> 00:00:01,000\nωa\n"
    (tmp_path / "s.srt").write_text(subtitles, encoding="utf-8")
    output = tmp_path / "p.tsv"
    run(*(tmp_path / name for name in ("a.mb", "t.json", "s.srt")), "--output", output)
    assert capsys.readouterr().out == f"{output}: 8 units of 5 texts\n"
    units = {line.split("\t")[0] for line in output.read_text(encoding="utf-8").splitlines()}
    assert units == {"Grapheme", "k", "á", "t", "s", "a", "m", "é", "ω"}
    for name in (output, tmp_path / "p.txt"):  # it would replace what a person has edited
        with pytest.raises(UsageError, match="name a new file that ends in"):
            run(tmp_path / "a.mb", "--output", name)
    with pytest.raises(UsageError, match="No such file"):
        run(tmp_path / "gone.mb", "--output", tmp_path / "q.tsv")
