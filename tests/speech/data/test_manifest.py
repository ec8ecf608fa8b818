"""Manifests: formats, audio paths, columns, the header cache, and hostile lines and files."""

import csv
import gzip
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from speech.data import columns, headers, manifest
from speech.data.loading import TOO_LITTLE
from speech.data.splits import Checks, load_corpus, report_rejections
from speech.writing.text import normalise

GOOD = {"audio_filepath": "good.wav", "text": "बरें"}


def load(path, **checks):
    return load_corpus(str(path), normalise, Checks(**checks))


def loaded(folder, content: str | bytes, name: str = "m.csv", **checks):
    """What a manifest with this content is read as."""
    content = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(content)
    return load(folder / name, **checks)


def rows(corpus):
    columns = (corpus.paths, corpus.texts, corpus.speakers, corpus.languages, corpus.seconds)
    return [(*row, float(seconds)) for *row, seconds in zip(*columns, strict=True)]


# --- families -------------------------------------------------------------------------------------

TEXTS = ["हांव कोंकणी, उलयता", 'she said "no", twice', "plain"]
NAMED = list(zip("abc", TEXTS, ("s0", "s1", "s2"), strict=True))
JSON_ROWS = [
    {"audio_filepath": f"{n}.wav", "text": t, "duration": 1.0, "speaker": s, "lang": "kok"}
    for n, t, s in NAMED
]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in JSON_ROWS)


def as_csv(header, table):
    out = io.StringIO()
    csv.writer(out).writerows([header, *table])
    return out.getvalue()


def lines_of(form: str) -> str:
    """A line of this form for each of NAMED."""
    return "".join(form.format(n=n, t=t, s=s, T=t.upper()) + "\n" for n, t, s in NAMED)


AUDIOFOLDER = as_csv(["file_name", "transcription"], [[f"{n}.wav", t] for n, t, _ in NAMED])
COMMON_VOICE = "client_id\tpath\tsentence\tup_votes\tlocale\n"
FAMILIES = {  # name: (file name, content, folder of the audio, speakers, languages)
    "nemo": ("m.json", JSON_LINES, "", True, True),
    "json list": ("m.json", json.dumps(JSON_ROWS, indent=1), "", True, True),
    "json lines by content": ("m.txt", JSON_LINES, "", True, True),
    "bars": (
        "m.csv", "audio_file|text|speaker_name\n" + lines_of("{n}.wav|{t}|{s}"), "", True, False
    ),
    "audiofolder": ("metadata.csv", AUDIOFOLDER, "", False, False),
    "common voice": (
        "train.tsv", COMMON_VOICE + lines_of("{s}\t{n}.wav\t{t}\t2\tkok"), "clips", True, True
    ),
    "ljspeech": ("metadata.csv", lines_of("{n}|{T}|{t}"), "wavs", False, False),
    "ljspeech of two columns": ("metadata.csv", lines_of("{n}|{t}"), "wavs", False, False),
}  # fmt: skip


def test_target_lang_is_the_language_of_a_row_that_has_several(tmp_path, wav, json_lines):
    keys = {"lang": "w", "language": "x", "locale": "y", "target_lang": "z"}
    row = {"audio_filepath": wav(tmp_path / "a.wav"), "text": "a"}
    lines = [{**row, **keys}, {**row, "target_lang": "z"}, {**row, "lang": "w", "locale": "y"}]
    assert list(load(json_lines(tmp_path / "m.json", lines))[0].languages) == ["z", "z", "w"]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read(tmp_path, wav, family, mark, ends):
    name, content, folder, has_speakers, has_languages = FAMILIES[family]
    paths = [wav(tmp_path / folder / f"{n}.wav") for n in "abc"]
    (tmp_path / name).write_bytes(
        (mark + content.replace("\r\n", "\n").replace("\n", ends)).encode()
    )
    corpus, rejected = load(tmp_path / name)
    assert rejected.counts == {} and rejected.repeated == 0
    assert rows(corpus) == [
        (path, text, f"s{i}" if has_speakers else "", "kok" if has_languages else "", 1.0)
        for i, (path, text) in enumerate(zip(paths, TEXTS, strict=True))
    ]


@pytest.mark.parametrize("last", ["a.wav,five", 'a.wav,five"', 'a.wav,"five'])
def test_an_unclosed_quote_does_not_swallow_lines(tmp_path, wav, last):
    wav(tmp_path / "a.wav")
    content = f'file_name,transcription\na.wav,one\na.wav,"two\na.wav,three\n\na.wav,four\n{last}\n'
    corpus, rejected = loaded(tmp_path, content)
    used = ["one", "three", "four", *(["five"] if '"' not in last else [])]
    assert list(corpus.texts) == used
    assert rejected.counts == {"line is not valid CSV": 5 - len(used)}
    place = rejected.examples["line is not valid CSV"][0]
    assert place == f"{tmp_path}/m.csv:3: unexpected end of data"


def any_wav(tmp_path_factory) -> Path:
    """A folder with any.wav of half a second."""
    folder = tmp_path_factory.getbasetemp() / "any"  # without the files of other tests below it
    folder.mkdir(exist_ok=True)
    soundfile.write(folder / "any.wav", np.zeros(8000), 16_000)
    return folder


TABLES = {  # name: (content, texts and speakers that are used, reasons for the rest)
    "a comma in the text before the speaker": (
        "audio_file,text,speaker\na.wav,one,s\na.wav,ab, bab abba,s\n",
        [("one", "s")],
        {"line has more cells than the header": 1},
    ),
    "a comma in the text instead of the speaker": (
        "audio_file,text,speaker\na.wav,one,s\na.wav,ab, bab abba\n",
        [("one", "s")],
        {"the cell after the text begins with a space (a text with commas needs quotes)": 1},
    ),
    "spaces after every comma": (
        "audio_file, text, speaker\na.wav, one, s\na.wav, two,s\n",
        [("one", "s"), ("two", "s")],
        {},
    ),
    "bars, too many and too few": (
        "audio_file|text|speaker\na.wav|one|s\na.wav|two\na.wav|three|s|\na.wav|fo|ur|s\n",
        [("one", "s")],
        {"line has fewer cells than the header": 1, "line has more cells than the header": 2},
    ),
    "an index without a name": ("\tpath\tsentence\n0\ta.wav\tone\n", [("one", "")], {}),
    "only separators": (
        "audio_file,text\n,\n,,\n \na.wav,one\n",
        [("one", "")],
        {"no audio path": 1, "line has more cells than the header": 1},
    ),
    "a text of several lines that is no row": (
        'audio_file,text,speaker\na.wav,"o\n\n""n"" \ne",s\na.wav,two,s\n',
        [('o "n" e', "s"), ("two", "s")],
        {},
    ),
    "text first": ('text,path\n"o\nne",a.wav\ntwo,a.wav\n', [("o ne", ""), ("two", "")], {}),
    "a text of several lines of which one looks like a row": (
        'audio_file,text\na.wav,"o\nn, e"\na.wav,two\n',
        [("two", "")],
        {"line is not valid CSV": 2},
    ),
    "a file name in a text of several lines": (
        'text,n,path\n"one,a.wav\ntwo",0,a.wav\n',
        [],
        {"line is not valid CSV": 2},
    ),
    "two quotes that were forgotten": (
        'text,n,path\n"one,1,a.wav\ntwo",2,a.wav\n"three",3,a.wav\n',
        [("three", "")],
        {"line is not valid CSV": 2},
    ),
    "another header": (
        "path,text,speaker\na.wav,one,s\n\ufeffpath,speaker,text\na.wav,t,two\n",
        [("one", "s"), ("two", "t")],
        {"line is another header": 1},
    ),
    "more columns from here on": (
        "path|text\na.wav|one\nspeaker|path|text\ns|a.wav|two\n",
        [("one", ""), ("two", "s")],
        {"line is another header": 1},
    ),
    "a header without a text": ("path,speaker\na.wav,s\n", [], {"no text field": 1}),
    "unusual white space": (
        "path,text\na.wav,o\u2028n\x0be\na.wav,t\x85w\x1co\na.wav,th\rree\n",
        [("o n e", ""), ("t w o", ""), ("th ree", "")],
        {},
    ),
    "only carriage returns": (
        'path,text\ra.wav,one\r\ra.wav,"t\rwo"\r',
        [("one", ""), ("t wo", "")],
        {},
    ),
    "carriage returns in JSON": (
        '{"path": "a.wav",\r "text": "one"}\n{"path": "a.wav", "text": "t\u2028w\x85o"}\n',
        [("one", ""), ("t w o", "")],
        {},
    ),
    "byte-order marks in JSON": (
        '{"path": "a.wav", "text": "one"}\n\ufeff{"path": "a.wav", "text": "two"}\n\ufeff\n',
        [("one", ""), ("two", "")],
        {},
    ),
    "LJSpeech, too many": (
        "a|one|one|\na|two|two\na.wav\n",
        [("two", "")],
        {"line has more cells than the header": 1, "line has fewer cells than the header": 1},
    ),
    "LJSpeech before a header": (
        "a|one\naudio_file|text|speaker\na.wav|two|s\n",
        [("one", ""), ("two", "s")],
        {"line is another header": 1},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_used_as_written_or_counted(tmp_path, wav, name):
    content, used, reasons = TABLES[name]
    wav(tmp_path / "a.wav")
    corpus, rejected = loaded(tmp_path, content, "m.txt")
    assert list(zip(corpus.texts, corpus.speakers, strict=True)) == used
    assert rejected.counts == reasons


@pytest.mark.parametrize(
    "header", ["path,text,text", "path\tTEXT\ttext", "path,text\n\npath,text,text"]
)
def test_a_column_that_is_there_twice_is_an_error(tmp_path, header):
    line = len(header.splitlines())
    with pytest.raises(DataError, match=f"m.csv:{line}: its header has two columns called text"):
        loaded(tmp_path, header + "\n")


LJSPEECH = [
    (
        'LJ001-0007|the Gutenberg, or "forty-two line Bible" of about 1455,|the Gutenberg, or'
        ' "forty-two line Bible" of about fourteen fifty-five,'
    ),
    "LJ001-0045|1469, 1470;|fourteen sixty-nine, fourteen seventy;",
    "LJ001-0002|in being comparatively modern.|in being comparatively modern.",
    "LJ006-0206|Mr. Smith|Mister Smith",
    "LJ007-0001|£5 10s.|five pounds, ten shillings.",
    "a.wav|Да!|да!",
    "a|१४५५|१४५५",
]
SPEAKERS = [
    ("a.wav", "हांव घर वचता", "asha"),
    ("a", "one two", "s1"),
    ("a", "asha speaks", "asha"),
    ("a", "p225", "baba jana shule"),
]


def test_ljspeech_is_told_from_a_table_with_speakers(tmp_path, wav):
    wav(tmp_path / "a.wav")
    for line in LJSPEECH:
        wav(tmp_path / "wavs" / f"{line.split('|')[0].removesuffix('.wav')}.wav")
    normalised = [line.split("|")[2] for line in LJSPEECH]
    corpus, rejected = loaded(tmp_path, "\n".join([*LJSPEECH, "a|hardly|any", "a|empty|"]))
    assert list(corpus.texts) == [*normalised, "empty"]
    assert rejected.counts == {"third cell is not the second, normalised": 1}
    header = "audio_file|text|normalized_text\n"
    assert list(loaded(tmp_path, header + "\n".join(LJSPEECH))[0].texts) == normalised


@pytest.mark.parametrize("row", SPEAKERS)
def test_a_third_cell_that_is_not_normalised_is_asked_for(tmp_path, wav, row):
    """What the question advises is read as it says."""
    wav(tmp_path / "a.wav")
    table = "\n".join(["|".join(row)] * 3)
    _, second, third = row
    question = f"the text {third!r} of the speaker {second!r}, or the text {second!r}"
    with pytest.raises(DataError, match=question) as error:
        loaded(tmp_path, table)
    orders = re.findall(r"audio_file\|\S+", str(error.value))
    for order, read in zip(orders, [(third, second), (second, third)], strict=True):
        corpus, _ = loaded(tmp_path, f"{order}\n{table}")
        assert (corpus.texts[0], corpus.speakers[0]) == read


words = st.text(st.sampled_from("ab\"', ए\r\u2028"), max_size=8)
SPOILT = {  # by the family of a row: what spoils it, and rows that are nothing
    "json": ["{line}{line}", "[{line}]", '{{"text": "b", "text": "c"}}', "{{}}", " "],
    "comma": ["{line},x", "any.wav", 'any.wav,"x', 'any.wav,x"y,s', ",,,,", " "],
    "tab": ["{line}\tx", "any.wav", "\t\t\t\t", " "],
    "bar": ["{line}|x", "any.wav", "||||", " "],
}
DELIMITERS = {"comma": ",", "tab": "\t", "bar": "|"}


def written(family: str, text: str, speaker: str) -> str:
    """A row as a correct program writes it."""
    if family == "json":
        row = {"audio_file": "any.wav", "text": text, "speaker": speaker}
        return json.dumps(row, ensure_ascii=False)
    if family == "comma" and not text.isalnum():
        text = '"' + text.replace('"', '""') + '"'
    return DELIMITERS[family].join(["any.wav", text, speaker])


@given(
    texts=st.lists(st.tuples(words, st.integers(0, 12)), min_size=1, max_size=10),
    family=st.sampled_from(list(SPOILT)),
)
def test_every_line_is_used_as_written_or_counted(tmp_path_factory, texts, family):
    folder = any_wav(tmp_path_factory)
    lines = [] if family == "json" else [DELIMITERS[family].join(["audio_file", "text", "speaker"])]
    header = len(lines)
    expected = {}
    for number, (text, spoils) in enumerate([("", 99), *texts]):
        text = f"w{number}" + text.replace("\r", "\n" if family in ("json", "comma") else "\r")
        row = written(family, text, f"s{number}")
        if spoils < len(SPOILT[family]):
            row = SPOILT[family][spoils].format(line=row)
        else:
            expected[len(lines) + 1] = (normalise(text), f"s{number}")
        lines += row.split("\n")
    corpus, rejected = loaded(folder, "".join(line + "\n" for line in lines), f"{family}.txt")
    used = zip(corpus.lines.tolist(), corpus.texts, corpus.speakers, strict=True)
    used = {line: (text, speaker) for line, text, speaker in used}
    assert {line: expected[line] for line in used} == used
    if family != "comma":  # of which a text of several lines may look like rows
        assert used == expected
        assert len(used) + rejected.total == sum(bool(line.strip()) for line in lines) - header


def test_an_example_is_one_line_of_limited_length(tmp_path, json_lines):
    bad = [
        {"audio_filepath": name, "text": "a"} for name in ("a\n\x1b[2J\u2028b.wav", "x" * 100_000)
    ]
    _, rejected = load(json_lines(tmp_path / "m.json", bad))
    shown = rejected.examples["file is missing"]
    assert shown[0] == f"{tmp_path}/m.json:1: {tmp_path}/a\\n\\x1b[2J\\u2028b.wav"
    assert len(shown[1]) == columns.EXAMPLE_LENGTH + 3 and len(rejected.table().splitlines()) == 3


def test_segments_speakers_and_numbers_as_text(tmp_path, wav, json_lines):
    path = wav(tmp_path / "long.wav", 5.0)
    row = {"audio_filepath": "long.wav", "speaker": 0, "offset": "1.5", "duration": 2, "text": 7}
    corpus, _ = load(json_lines(tmp_path / "m.json", [row, {**row, "offset": 4, "duration": None}]))
    assert rows(corpus) == [(path, "7", "0", "", 2.0), (path, "7", "0", "", 1.0)]
    assert corpus.offsets.tolist() == [1.5, 4.0]
    assert corpus.durations[0] == 2.0 and np.isnan(corpus.durations[1])
    assert corpus.where(0) == f"{path} at 1.50 s"


text_of_a_line = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    texts=st.lists(text_of_a_line, min_size=1, max_size=8), family=st.sampled_from(["json", "csv"])
)
def test_any_text_survives(tmp_path_factory, texts, family):
    """JSON and quoted CSV carry any text. It is read in its normal form, and rejected if that is
    empty."""
    folder = any_wav(tmp_path_factory)
    if family == "json":
        entries = ({"audio_filepath": "any.wav", "text": text} for text in texts)
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in entries)
    else:
        texts = [text.replace("\0", "") for text in texts]
        # A line of a text with as many commas as a row is taken for one.
        texts = [text.replace(",", "") if "\n" in text else text for text in texts]
        content = as_csv(["path", "sentence"], [["any.wav", text] for text in texts])
    corpus, rejected = loaded(folder, content, f"any.{family}")
    kept = [normalise(text) for text in texts]
    assert list(corpus.texts) == [text for text in kept if text]
    assert rejected.counts == ({"text is empty": kept.count("")} if "" in kept else {})
    assert rejected.repeated == max(0, len(corpus) - 1)


# --- where paths lead -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, name, root",
    [
        ("my corpus/हांव तूं.wav", "my corpus/हांव तूं.wav", None),
        ("x/a.wav", "x\\a.wav", None),  # of Windows
        ("root/a.wav", "a.wav", "root"),
    ],
)
def test_relative_paths(tmp_path, wav, json_lines, file, name, root):
    path = wav(tmp_path / file)
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": name, "text": "a"}])
    assert list(load(lines, audio_root=root and str(tmp_path / root))[0].paths) == [path]


@pytest.mark.parametrize(
    "name",
    [
        "/data/me/set/x/a.wav",
        "C:\\me\\set\\x\\a.wav",
    ],
)
def test_absolute_paths_of_another_machine(tmp_path, wav, json_lines, name):
    """Their last components are looked up below audio_root; the longest match wins, here x/a.wav
    over a.wav."""
    wav(tmp_path / "root" / "a.wav")
    path = wav(tmp_path / "root" / "x" / "a.wav")
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": name, "text": "a"}])
    corpus, _ = load(lines, audio_root=str(tmp_path / "root"))
    assert list(corpus.paths) == [path]
    os.remove(path)
    corpus, _ = load(lines, audio_root=str(tmp_path / "root"))
    assert list(corpus.paths) == [str(tmp_path / "root" / "a.wav")]
    corpus, rejected = load(lines)
    assert not len(corpus) and rejected.examples == {"file is missing": [f"{lines}:1: {name}"]}


def test_an_absolute_path_that_exists_is_kept(tmp_path, wav, json_lines):
    path = wav(tmp_path / "here" / "a.wav")
    wav(tmp_path / "root" / "a.wav")
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": path, "text": "a"}])
    assert list(load(lines, audio_root=str(tmp_path / "root"))[0].paths) == [path]


def test_audio_root_must_be_a_folder(tmp_path, json_lines):
    with pytest.raises(UsageError) as error:
        load(json_lines(tmp_path / "m.json", [GOOD]), audio_root=str(tmp_path / "none"))
    assert str(error.value) == f"--audio_root {tmp_path}/none: no such folder"


# --- columns --------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=5), max_size=20), st.data())
def test_columns_hold_and_select(values, data):
    indices = np.array(
        data.draw(
            st.lists(st.integers(0, len(values) - 1), max_size=20) if values else st.just([])
        ),
        int,
    )
    if any("\ud800" <= c <= "\udfff" for value in values for c in value):
        return
    for column in (columns.Strings(values), columns.Codes(values)):
        assert list(column) == values and len(column) == len(values)
        assert list(column.select(indices)) == [values[i] for i in indices]
    assert columns.Strings(values).empty().tolist() == [not value for value in values]


def test_fingerprint_sees_texts_their_borders_and_their_order(tmp_path, wav, json_lines):
    def fingerprint(*pairs):
        lines = [{"audio_filepath": wav(tmp_path / n), "text": text} for n, text in pairs]
        return load(json_lines(tmp_path / "m.json", lines))[0].fingerprint()

    sets = [
        [("a.wav", "xy"), ("b.wav", "z")],
        [("a.wav", "x"), ("b.wav", "yz")],
        [("b.wav", "z"), ("a.wav", "xy")],
        [("a.wav", "xy")],
        [("a.wav", "xy"), ("b.wav", "w")],
    ]
    assert len({fingerprint(*pairs) for pairs in sets}) == len(sets)
    assert fingerprint(*sets[0]) == fingerprint(*sets[0])


# --- the header cache -----------------------------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch):
    seen = []
    monkeypatch.setattr(
        headers,
        "probe",
        lambda path, probe=headers.probe: seen.append(Path(path).name) or probe(path),
    )
    return seen


def test_the_cache_is_used_for_unchanged_files(tmp_path, wav, json_lines, looked_at):
    for name in "abc":
        wav(tmp_path / f"{name}.wav")
    lines = json_lines(
        tmp_path / "m.json",
        [{"audio_filepath": f"{n}.wav", "text": "a"} for n in ("a", "b", "c", "missing")],
    )
    cache = tmp_path / "cache"

    def again():
        looked_at.clear()
        corpus, rejected = load(lines, cache_dir=cache)
        return sorted(looked_at), corpus.seconds.tolist(), rejected.counts

    missing = {"file is missing": 1}
    assert again() == (["a.wav", "b.wav", "c.wav", "missing.wav"], [1, 1, 1], missing)
    assert again() == (["missing.wav"], [1, 1, 1], missing)
    wav(tmp_path / "b.wav", 2.0)  # another size
    assert again() == (["b.wav", "missing.wav"], [1, 2, 1], missing)
    os.utime(tmp_path / "c.wav", ns=(0, 5))  # another time
    assert again() == (["c.wav", "missing.wav"], [1, 2, 1], missing)
    assert again() == (["missing.wav"], [1, 2, 1], missing)
    os.remove(tmp_path / "a.wav")
    assert again() == (["a.wav", "missing.wav"], [2, 1], {"file is missing": 2})
    assert len(list(cache.iterdir())) == 1  # and no temporary file


@pytest.mark.parametrize("damage", ["none", "half", "another shape"])
def test_a_corrupt_cache_is_ignored(tmp_path, wav, json_lines, looked_at, damage):
    wav(tmp_path / "a.wav")
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": "a"}])
    load(lines, cache_dir=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    if damage == "another shape":
        np.savez(cache, stamps=np.load(cache)["stamps"], values=np.ones((1, 2)))
    else:
        size = cache.stat().st_size // 2 if damage == "half" else 0
        cache.write_bytes(cache.read_bytes()[:size])
    for seen in (["a.wav"], []):
        looked_at.clear()
        assert load(lines, cache_dir=tmp_path / "cache")[0].seconds.tolist() == [1.0]
        assert looked_at == seen


# --- hostile lines --------------------------------------------------------------------------------


def good(**changes) -> dict:
    return {**GOOD, **changes}


def raw(text: str) -> bytes:
    """A line of a good file with this as its text, as JSON."""
    return b'{"audio_filepath": "good.wav", "text": ' + text.encode() + b"}"


NOT_JSON = "line is not valid JSON"
NO_TEXT = "text is not a string"
NO_DURATION = "duration is not a number"
BEYOND = "segment ends beyond the file"
NO_UTF8 = "line is not UTF-8"
HOSTILE_LINES = [
    (raw("")[:-1], NOT_JSON),
    (b"[1, 2]", "line is not an object"),
    (b'{"a":' * 100_000, NOT_JSON),
    (raw('"a\0b"'), manifest.UNREADABLE),
    (raw('"a", "text": "b"'), NOT_JSON),
    (raw("1" * 5000), NOT_JSON),
    (raw("Infinity"), NO_TEXT),
    (good(text=True), NO_TEXT),
    (good(text="ए" * 10_001), "text is longer than 10000 characters"),
    (good(text="a" * 5_000_000), manifest.UNREADABLE),
    (good(text=" \u200b\t "), "text is empty"),
    ({"audio_filepath": "good.wav"}, "no text field"),
    ({"text": "a"}, "no audio path"),
    (good(audio_filepath=""), "no audio path"),
    (good(audio_filepath="good.wav\0"), "no audio path"),
    (raw('"café"').decode().encode("latin-1"), NO_UTF8),
    (raw('"\\ud83d"'), NO_UTF8),
    (good(offset=-1), "offset is negative"),
    (good(offset=[0]), "offset is not a number"),
    (good(duration="long"), NO_DURATION),
    (good(duration=10**400), NO_DURATION),
    (good(audio_filepath="two.wav", duration=0), TOO_LITTLE),
    (good(offset=1.0), BEYOND),
    (good(duration=1.6), "file is shorter than its duration in the manifest (truncated?)"),
    (good(audio_filepath="a" * 100_000), "file is missing"),
    (good(audio_filepath="good.wav/a.wav"), "file is missing"),
    (good(audio_filepath="folder.wav"), "not a file but a folder"),
    (good(audio_filepath="pipe.wav"), "not a regular file"),
    (good(audio_filepath="empty.wav"), "file is empty"),
    (good(audio_filepath="header.wav"), "audio is empty"),
    (good(audio_filepath="click.wav"), "shorter than 0.1 s (--min_duration)"),
    (good(audio_filepath="long.wav"), "longer than 30 s (--max_duration)"),
    (good(audio_filepath="cut.wav"), "audio is truncated"),
    (good(audio_filepath="text.wav"), "audio is unreadable"),
]


@pytest.fixture
def hostile_files(tmp_path, wav):
    """A folder of hostile files, with good.wav of one second."""
    good = Path(wav(tmp_path / "good.wav"))
    wav(tmp_path / "two.wav", 2.0)
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "empty.wav").touch()
    wav(tmp_path / "header.wav", 0.0)
    wav(tmp_path / "click.wav", 0.001)
    (tmp_path / "cut.wav").write_bytes(good.read_bytes()[:16_000])
    (tmp_path / "text.wav").write_text("not audio")
    soundfile.write(tmp_path / "long.wav", np.zeros(40 * 60 * 1000), 1000)
    return tmp_path


@pytest.mark.parametrize("line, reason", HOSTILE_LINES, ids=lambda each: repr(each)[:50])
def test_a_hostile_line_is_rejected_and_the_others_are_used(
    hostile_files, json_lines, no_hang, line, reason
):
    lines = [GOOD, *[good(text="x" * 5000)] * 2, line, GOOD]
    path = json_lines(hostile_files / "m.json", lines)
    corpus, rejected = load(path)
    assert rejected.counts == {reason: 1}
    assert rejected.examples[reason][0].startswith(f"{path}:4")
    assert len(corpus) == 4 and rejected.repeated == 3


def test_every_bad_line_is_counted_and_three_are_shown(hostile_files, json_lines, capsys):
    bad = [{**GOOD, "audio_filepath": f"none {i}.wav"} for i in range(5)]
    path = json_lines(
        hostile_files / "m.json", [GOOD, *bad, b"{", {**GOOD, "audio_filepath": "click.wav"}]
    )
    corpus, rejected = load(path)
    report_rejections("training set", corpus.seconds, rejected, strict=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "training set: 1 utterances, 0.0 min; 7 rejected:"
    assert lines[2] == f"        5  file is missing ({columns.ADVICE['file is missing']})"
    assert lines[3:6] == [
        f"           {path}:{i + 2}: {hostile_files}/none {i}.wav" for i in range(3)
    ]
    assert lines[-1].strip() == f"{path}:8: {hostile_files}/click.wav (0.00 s)"
    with pytest.raises(DataError) as error:
        report_rejections("training set", corpus.seconds, rejected, strict=True)
    assert str(error.value) == "training set: 7 utterances rejected (--strict_data)"


def test_strict_accepts_a_clean_manifest_and_repeated_lines_are_counted(
    tmp_path, wav, json_lines, capsys
):
    wav(tmp_path / "good.wav", 3.0)
    segment = good(offset=1.0, duration=1.0)
    lines = [GOOD, segment, GOOD, GOOD, segment, good(duration=1.0)]
    corpus, rejected = load(json_lines(tmp_path / "m.json", lines))
    report_rejections("set", corpus.seconds, rejected, strict=True)
    assert len(corpus) == 6 and rejected.repeated == 3
    said = "set: 6 utterances, 0.2 min; 3 repeat the audio of another (all are used)\n"
    assert capsys.readouterr().out.endswith(said)


# --- hostile manifests ----------------------------------------------------------------------------

NO_TABLE = "is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)"
NO_HEADER = "its first line names no audio column (one of audio_filepath, audio_file, file_name"
HOSTILE_MANIFESTS = [  # (file name, content, a part of the message)
    ("m.json", b"", "m.json is empty"),
    ("m.tsv", b" \n\r\n\t\n", "is empty"),
    ("m.json", b"[]", "is empty"),
    ("m.csv", b"path,sentence\n", "is empty"),
    ("m.json", bytes(range(256)), NO_TABLE),
    ("m.json.gz", gzip.compress(json.dumps(GOOD).encode() * 50, mtime=0), NO_TABLE),
    ("m.json", ("\ufeff" + json.dumps(GOOD)).encode("utf-16-le"), "is UTF-16: save it as UTF-8"),
    ("text", b"utt1 hello world\n", NO_HEADER),
    ("m.csv", b"a.wav,hello\nb.wav,world\n", NO_HEADER),
    (
        "m.tsv",
        b"a.wav\thello\n",
        r"begin with the name of audio that is there; it has: 'a.wav\thello'",
    ),
    ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\nhello\n", "its audio is missing: put a.wav"),
    ("m.json", b'[{"text": "a", "text": "b"}]', "is not valid JSON: a key is given twice"),
    ("m.json", b'[{"audio_filepath": "a.wav"},', "is not valid JSON: Expecting value: line 1"),
    ("m.json", b"[" * 100_000, "recursion"),
]


@pytest.mark.parametrize("name, content, message", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_one_line(tmp_path, no_hang, name, content, message):
    with pytest.raises(DataError) as error:
        loaded(tmp_path, content, name)
    said = str(error.value)
    assert message in said and str(tmp_path / name) in said and "\n" not in said


def test_a_manifest_that_is_missing_or_not_a_file(tmp_path, no_hang):
    os.mkfifo(tmp_path / "pipe.json")
    for path, reason in (
        (tmp_path / "none.json", "No such file or directory"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe.json", "it is not a regular file"),
    ):
        with pytest.raises(UsageError) as error:
            load(path)
        assert str(error.value).startswith(f"manifest {path}: {reason}")


def test_a_long_text_is_not_normalised(tmp_path, wav, json_lines, no_hang):
    """The order of a million combining marks would take hours: it is sorted by insertion."""
    wav(tmp_path / "good.wav")
    marks = "a" + "\u0301" * 500_000 + "\u0316" * 500_000
    parts = [{"start": 0, "end": 0.5, "text": marks}, {"start": 0.5, "end": 1, "text": "b"}]
    lines = json_lines(
        tmp_path / "m.json", [{**GOOD, "text": marks}, {**GOOD, "text": marks, "segments": parts}]
    )
    assert load(lines)[1].counts == {"text is longer than 10000 characters": 2}
    corpus, rejected = load(lines, use_chunking=True, max_duration=0.6)
    assert list(corpus.texts) == ["b"]
    assert sorted(rejected.counts) == [
        "longer than 0.6 s (--max_duration), without segment times for --use_chunking",
        "text is longer than 10000 characters",
    ]


SYNTAX = [*'",[]}|\t\n\0', '{"', '":', "audio_filepath", "text", "path", "1e999", "NaN", "\\ud800"]
anything = st.binary(max_size=200) | st.lists(st.sampled_from(SYNTAX), max_size=25).map("".join)


@given(anything, st.sampled_from(["m.json", "m.csv", "m.tsv", "m.txt", "metadata.csv"]))
def test_no_content_ends_in_a_traceback(tmp_path_factory, content, name):
    try:
        corpus, rejected = loaded(tmp_path_factory.getbasetemp(), content, name)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert len(corpus) == 0 and rejected.total
