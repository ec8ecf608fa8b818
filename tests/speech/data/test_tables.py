"""Tables as people write them: times and channels of parts, columns of texts, quotes, names without
ending, pairs, and several tables of one set."""

import csv
import unicodedata

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from speech.data.loading import WHOLE, Checks, load_corpus
from speech.signal.audio import read_utterance


def load(path, **checks):
    names = [str(each) for each in path] if isinstance(path, list) else str(path)
    return load_corpus(names, str.strip, Checks(**checks))


@pytest.fixture
def talk(tmp_path, wav):
    """A table with these lines, beside talk.wav of 12 s."""
    wav(tmp_path / "talk.wav", 12.0)

    def write(*lines: str, name: str = "m.csv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    return write


# --- times and channels ---------------------------------------------------------------------------

PARTS = [(0.0, 2.5), (3.0, 4.25), (8.5, 11.5)]


@pytest.mark.parametrize(
    ("names", "factor"),
    [
        ("start,end", 1),
        ("Begin,Stop", 1000),
        ("start_ms,end_ms", 1000),
        ("Start Time (s),End Time (s)", 1),
        ("offset,duration", 1000),
        ("begin,duration", 1),
        ("start,end,duration", 1),
    ],
)
def test_times_of_a_part_by_any_name_and_in_milliseconds(talk, names, factor):
    lines = [f"path,sentence,{names}"]
    for start, end in PARTS:
        second = end - start if "duration" in names.split(",")[1] else end
        more = ",12.0" if names.count(",") > 1 else ""  # of the whole recording
        lines.append(f"talk.wav,a,{start * factor:g},{second * factor:g}{more}")
    corpus, rejected = load(talk(*lines))
    assert list(zip(corpus.offsets, corpus.offsets + corpus.durations, strict=True)) == PARTS
    assert not rejected.total and not rejected.repeated
    assert ("in milliseconds: " in rejected.source) == (factor == 1000 and "ms" not in names)


def test_times_of_another_unit_are_refused_and_bad_ones_counted(talk):
    samples = talk("path,text,start,end", "talk.wav,a,16000,80000", "talk.wav,b,80000,190000")
    with pytest.raises(DataError, match="neither seconds nor milliseconds: 190000 in a file of 12"):
        load(samples)
    corpus, rejected = load(
        talk("path,text,start,end", "talk.wav,a,1,2", "talk.wav,b,3,", "talk.wav,c,4,4")
    )
    assert list(corpus.texts) == ["a"]
    reasons = {"only one of start and end is given": 1, "end is not after start": 1}
    assert rejected.counts == reasons


def test_times_on_a_clock_and_with_commas(talk):
    lines = ["path;text;Begin Time - hh:mm:ss.ms;end", "talk.wav;a;00:01,5;0:00:02.25"]
    corpus, rejected = load(talk(*lines, "talk.wav;b;3,5;4", "talk.wav;c;1_0;11"))
    assert corpus.offsets.tolist() == [1.5, 3.5] and corpus.seconds.tolist() == [0.75, 0.5]
    assert rejected.counts == {"begin time - hh:mm:ss.ms is not a number": 1}


@pytest.mark.parametrize("names", ["start,duration_ms", "start,end_ms", "start_s,end_ms"])
def test_times_in_two_units_are_not_guessed(talk, names):
    _, rejected = load(talk(f"path,text,{names}", "talk.wav,a,2.0,4000"))
    (reason,) = rejected.counts
    assert reason.startswith(f"{' and '.join(names.split(','))} have different units: write")


def test_a_row_whose_times_were_forgotten_is_not_the_whole_recording(talk):
    corpus, rejected = load(talk("path,text,start,end", "talk.wav,a,2,4", "talk.wav,b,,"))
    assert list(corpus.texts) == ["a"]
    assert list(rejected.counts) == [
        "its cells of times are empty, and other rows of its file have times"
    ]
    assert load(talk("path,text,start,end", "talk.wav,b,,"))[0].seconds.tolist() == [12.0]


@pytest.mark.parametrize(
    ("stated", "kept", "noted"), [("11", 1, 1), ("12", 1, 0), ("11000", 1, 1), ("0.0", 0, 0)]
)
def test_a_duration_that_is_rounded_down_cuts_no_file(talk, wav, stated, kept, noted):
    wav(talk("path,text,duration", f"talk.wav,a,{stated}").parent / "talk.wav", 11.9)
    if stated == "12":
        stated = "11.9"
    corpus, rejected = load(talk("path,text,duration", f"talk.wav,a,{stated}"))
    assert len(corpus) == kept and corpus.seconds.tolist() == [11.9] * kept
    assert (rejected.notes.counts if rejected.notes else {}) == ({WHOLE: 1} if noted else {})
    corpus, _ = load(talk("path,text,offset,duration", "talk.wav,a,0,11"))
    assert corpus.seconds.tolist() == [11.0]


def test_each_row_has_its_channel(tmp_path, talk):
    soundfile.write(tmp_path / "call.wav", np.array([[0.5, -0.25]] * 16_000), 16_000)
    rows = ["0,a", "1,b", "average,c", ",d"]
    table = talk("path,channel,text", *(f"call.wav,{row}" for row in rows))
    corpus, rejected = load(table, cache_audio=str(tmp_path / "cache"))
    levels = [float(read_utterance(corpus, row, 16_000)[9]) for row in range(4)]
    assert levels == pytest.approx([0.5, -0.25, 0.125, 0.125], abs=1e-3)
    assert rejected.repeated == 1 and corpus.where(1).endswith("call.wav, channel 1")
    with pytest.raises(DataError, match=r"has 2 channels, and .* channel 2: they are counted from"):
        load(talk("path,channel,text", "call.wav,1,a", "call.wav,2,b"))
    _, rejected = load(talk("path,channel,text", "call.wav,left,a", "call.wav,0,a"))
    assert list(rejected.counts) == ['channel is neither a number from 0 on nor "average"']


# --- columns --------------------------------------------------------------------------------------


def test_one_column_has_the_texts_of_a_table(talk):
    lines = ["path,text,transcription", "talk.wav,,draft", "talk.wav,word,draft"]
    with pytest.raises(UsageError) as error:
        load(talk(*lines))
    readings = "which column has the texts, text ('') or transcription ('draft')? Add --text_column"
    assert readings in str(error.value)
    corpus, rejected = load(talk(*lines), text_column="text")
    assert list(corpus.texts) == ["word"] and rejected.counts == {"text is empty": 1}
    assert rejected.source == "columns used: path (audio), text; not used: transcription"
    with pytest.raises(UsageError, match="has no such column, but path, text, transcription"):
        load(talk(*lines), text_column="sentence")
    rows = ['{"path": "talk.wav", "text": "a"}', '{"path": "talk.wav", "sentence": "b"}']
    with pytest.raises(UsageError, match=r"text \(1 rows\) or sentence \(1 rows\)"):
        load(talk(*rows, name="m.json"))


def test_cells_below_no_name_are_named(talk):
    lines = [";file_name;text;;", "0;talk.wav;hello;there you;", "1;talk.wav;good;;"]
    _, rejected = load(talk(*lines))
    assert rejected.source == "columns used: file_name (audio), text; not used: column 4"


def test_a_table_without_a_header_that_has_many_cells_needs_one(talk):
    with pytest.raises(DataError, match=r"its rows have 4 cells. Add .* audio_file\|text\|normal"):
        load(talk("talk.wav|a|a|1.5", "talk.wav|b|b|2"))


def test_a_bar_in_a_text_makes_no_table_of_bars(talk):
    texts = ["वह घर गया |", "कब?", "हम | तुम | वे |"]
    corpus, _ = load(talk(*(f"talk.wav\t{text}" for text in texts)))
    assert list(corpus.texts) == texts


def test_spaces_and_unicode_forms_make_no_other_speaker(talk):
    names = ["é la", " e\u0301  la "]
    corpus, _ = load(
        talk("path | text | speaker ", *(f"talk.wav | word |{name}" for name in names))
    )
    assert set(corpus.speakers) == {"é la"} and list(corpus.texts) == ["word"] * 2


# --- quotes and line breaks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        (['"""a"""', '"he ""b"" c"', "d"], ['"a"', 'he "b" c', "d"]),  # a spreadsheet's
        (['"a"', '"b c"', '"d"'], ["a", "b c", "d"]),  # around all
        (['"a"', 'he "b" c', "d"], ['"a"', 'he "b" c', "d"]),  # Common Voice's
        (['"a" b', "c", "d"], ['"a" b', "c", "d"]),
        (['"a"', "c", "d"], ['"a"', "c", "d"]),
        (['"a', "c", 'd"'], ['"a', "c", 'd"']),
        (['"a, b"', "c", '"d, ""e"""'], ["a, b", "c", 'd, "e"']),  # Excel's
        (['"a, b"', "c, d", "e"], ['"a, b"', "c, d", "e"]),
    ],
)
@pytest.mark.parametrize("delimiter", ["\t", "|"])
def test_whose_quotes_they_are_is_told_by_the_table(talk, cells, texts, delimiter):
    rows = [delimiter.join(("talk.wav", cell)) for cell in cells]
    corpus, _ = load(talk(delimiter.join(("path", "sentence")), *rows))
    assert list(corpus.texts) == texts


def test_spaces_before_quotes_and_line_breaks_of_other_columns(talk):
    lines = ["path, text, notes", 'talk.wav, "x, ""y""", n', 'talk.wav, z, "one', 'two"']
    corpus, rejected = load(talk(*lines))
    assert list(corpus.texts) == ['x, "y"', "z"] and not rejected.total


word = st.text(st.sampled_from("ab é\"'"), min_size=1, max_size=9).map(str.strip).filter(bool)


@given(
    texts=st.lists(word, min_size=1, max_size=6),
    delimiter=st.sampled_from("\t,;|"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_a_spreadsheet_writes_is_read_back(tmp_path_factory, texts, delimiter, quoting):
    path = tmp_path_factory.getbasetemp() / "sheet.csv"
    soundfile.write(path.with_name("any.wav"), np.zeros(8000), 16_000)
    texts = [*texts, f'x{delimiter}"\ny']  # which needs quotes
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter, quoting=quoting)
        rows.writerows([["path", "speaker", "sentence"], *(["any.wav", "s", t] for t in texts)])
    corpus, rejected = load(path)
    assert list(corpus.texts) == texts and not rejected.total


# --- names of files -------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["", "id|text", "file_name\ttranscription"])
def test_names_without_ending_are_found_in_the_folder_that_has_them(tmp_path, talk, wav, header):
    soundfile.write(wav(tmp_path / "verified" / "a.flac"), np.zeros(16_000), 16_000)
    wav(tmp_path / "verified" / "b.1.wav")
    delimiter = "\t" if "\t" in header else "|"
    lines = [delimiter.join(row) for row in (("a", "x"), ("b.1", "y"))]
    table = talk(*filter(None, [header, *lines]))
    corpus, rejected = load(table)
    assert [path[len(str(tmp_path)) :] for path in corpus.paths] == [
        "/verified/a.flac",
        "/verified/b.1.wav",
    ]
    assert rejected.source.endswith("; audio found in verified/")
    assert list(load(table, audio_root=str(tmp_path / "verified"))[0].texts) == ["x", "y"]
    wav(tmp_path / "raw" / "a.wav")
    with pytest.raises(DataError, match=r"which file is a: .*raw/a.wav or .*verified/a.flac\?"):
        load(table)


def test_paths_of_another_machine_that_end_at_one_file_are_asked_about(tmp_path, talk):
    lines = ["path,text", "/data/anna/talk.wav,a", "D:\\berta\\talk.wav,b"]
    with pytest.raises(
        DataError, match=r"talk\.wav and /data/anna/talk\.wav are both .* --audio_root"
    ):
        load(talk(*lines), audio_root=str(tmp_path))


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
@pytest.mark.parametrize("ending", [".wav", ""])
def test_names_in_the_other_unicode_form_are_found(tmp_path, talk, wav, forms, ending):
    on_disk, in_table = (unicodedata.normalize(form, "bà/đọc") for form in forms)
    path = wav(tmp_path / f"{on_disk}.wav")
    corpus, _ = load(talk("path,text", f"{in_table}{ending},a"))
    assert list(corpus.paths) == [path]


# --- pairs, and several tables --------------------------------------------------------------------


def test_a_folder_of_pairs(tmp_path, wav):
    for name in ("a", "more/b", "lonely"):
        wav(tmp_path / "pairs [1]" / f"{name}.wav")
    folder = tmp_path / "pairs [1]"
    (folder / "a.txt").write_text("\ufeffone\ntwo\n")
    (folder / "more/b.lab").write_text("three")
    (folder / "readme.txt").write_text("no pair")
    corpus, rejected = load(folder)
    assert list(corpus.texts) == ["one\ntwo", "three"]
    assert rejected.source == "2 pairs of audio and text"
    assert rejected.counts == {
        "text has no audio of its name beside it": 1,
        "audio has no text beside it": 1,
    }
    (folder / "a.lab").write_text("other")
    with pytest.raises(UsageError, match=r"which is the text of .*a\.wav: a\.lab or a\.txt\?"):
        load(folder)
    assert list(load(f"{folder}/*.lab")[0].texts) == ["other"]
    (folder / "m.csv").write_text("path,text\n")
    with pytest.raises(UsageError, match=r"it has pairs of audio and text, and m\.csv: name the"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"0 1200000 sil\n1200000 2400000 h\n", "text has times in it"),
        (b"0 46797 She had\n", "text has times in it"),
        (b"#\n 0.1000 125 pau\n 0.2000 125 ao\n", "text has times in it"),
        (b"caf\xe9", "text is not UTF-8"),
        ("привет".encode("utf-16-le"), "text is not UTF-8"),
    ],
)
def test_texts_of_pairs_that_are_none(tmp_path, wav, content, reason):
    for name in "ab":
        wav(tmp_path / f"{name}.wav")
    (tmp_path / "a.lab").write_bytes(content)
    (tmp_path / "b.txt").write_text("10 20 people came")
    corpus, rejected = load(tmp_path)
    assert list(corpus.texts) == ["10 20 people came"]
    assert [each.split(":")[0].split(" (")[0] for each in rejected.counts] == [reason]


def test_a_pattern_of_texts_with_any_ending(tmp_path, wav):
    wav(tmp_path / "a.wav")
    for ending in ("mb", "mb.cleaned"):
        (tmp_path / f"a.{ending}").write_text(ending)
    assert list(load(f"{tmp_path}/*.mb.cleaned")[0].texts) == ["mb.cleaned"]


def test_several_manifests_are_one_set(tmp_path, talk, wav):
    wav(tmp_path / "pairs/a.wav")
    (tmp_path / "pairs/a.txt").write_text("pair")
    first = talk("path,sentence", *(f"talk.wav,first {row}" for row in range(3)), "none.wav,a")
    second = talk('{"path": "talk.wav", "text": "second"}', '{"path": "no.wav", "text": "b"}')
    second = second.rename(tmp_path / "m.json")
    first = talk("path,sentence", *(f"talk.wav,first {row}" for row in range(3)), "none.wav,a")
    corpus, rejected = load([first, second, tmp_path / "pairs"])
    assert list(corpus.texts) == ["first 0", "first 1", "first 2", "second", "pair"]
    assert rejected.examples["file is missing"] == [
        f"{first}:5: {tmp_path}/none.wav",
        f"{second}:2: {tmp_path}/no.wav",
    ]
    assert f"{second}: columns used: path (audio), text" in rejected.source
