"""Manifests: formats, audio paths, columns, the header cache, and hostile lines and files."""

import csv
import gzip
import io
import itertools
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from speech.data import columns, finding, headers, manifest
from speech.data.loading import TOO_LITTLE
from speech.data.splits import Checks, load_corpus, report_rejections
from speech.writing.text import normalise

GOOD = {"audio_filepath": "good.wav", "text": "बरें"}


def load(path, **checks):
    return load_corpus(str(path), normalise, Checks(**checks))


def rows(corpus):
    return [
        (
            corpus.paths[i],
            corpus.texts[i],
            corpus.speakers[i],
            corpus.languages[i],
            float(corpus.seconds[i]),
        )
        for i in range(len(corpus))
    ]


# --- families -------------------------------------------------------------------------------------

TEXTS = ["हांव कोंकणी, उलयता", 'she said "no", twice', "plain"]
JSON_ROWS = [
    {
        "audio_filepath": f"{name}.wav",
        "text": text,
        "duration": 1.0,
        "speaker": f"s{i}",
        "lang": "kok",
    }
    for i, (name, text) in enumerate(zip("abc", TEXTS, strict=True))
]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in JSON_ROWS)


def as_csv(header, table):
    out = io.StringIO()
    csv.writer(out).writerows([header, *table])
    return out.getvalue()


FAMILIES = {  # name: (file name, content, folder of the audio, speakers, languages)
    "nemo": ("m.json", JSON_LINES, "", True, True),
    "json list": ("m.json", json.dumps(JSON_ROWS, indent=1), "", True, True),
    "json lines by content": ("m.txt", JSON_LINES, "", True, True),
    "bars": (
        "m.csv",
        "audio_file|text|speaker_name\n"
        + "".join(f"{n}.wav|{t}|s{i}\n" for i, (n, t) in enumerate(zip("abc", TEXTS, strict=True))),
        "",
        True,
        False,
    ),
    "audiofolder": (
        "metadata.csv",
        as_csv(
            ["file_name", "transcription"],
            [[f"{n}.wav", t] for n, t in zip("abc", TEXTS, strict=True)],
        ),
        "",
        False,
        False,
    ),
    "common voice": (
        "train.tsv",
        "client_id\tpath\tsentence\tup_votes\tlocale\n"
        + "".join(
            f"s{i}\t{n}.wav\t{t}\t2\tkok\n"
            for i, (n, t) in enumerate(zip("abc", TEXTS, strict=True))
        ),
        "clips",
        True,
        True,
    ),
    "ljspeech": (
        "metadata.csv",
        "".join(f"{n}|{t.upper()}|{t}\n" for n, t in zip("abc", TEXTS, strict=True)),
        "wavs",
        False,
        False,
    ),
    "ljspeech of two columns": (
        "metadata.csv",
        "".join(f"{n}|{t}\n" for n, t in zip("abc", TEXTS, strict=True)),
        "wavs",
        False,
        False,
    ),
}


def test_target_lang_is_the_language_of_a_row_that_has_several(tmp_path, wav):
    path = wav(tmp_path / "a.wav")
    keys = ["lang", "language", "locale", "target_lang"]
    lines = [
        json.dumps(
            {
                "audio_filepath": path,
                "text": "a",
                **dict(zip(keys[first:], "wxyz"[first:], strict=True)),
            }
        )
        for first in range(4)
    ]
    lines.append(json.dumps({"audio_filepath": path, "text": "a", "lang": "w", "locale": "y"}))
    (tmp_path / "m.json").write_text("\n".join(lines))
    assert list(load(tmp_path / "m.json")[0].languages) == ["z", "z", "z", "z", "w"]


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


def test_the_first_line_of_ljspeech_holds_more_commas_than_bars(tmp_path, wav):
    wav(tmp_path / "wavs" / "LJ001-0001.wav")
    text = (
        "Printing, in the only sense with which we are at present concerned, differs from most if"
        " not from all"
    )
    (tmp_path / "metadata.csv").write_text(f"LJ001-0001|{text}|{text}\n")
    corpus, rejected = load(tmp_path / "metadata.csv")
    assert list(corpus.texts) == [text] and not rejected.total


@pytest.mark.parametrize("delimiter", manifest.QUOTED)
def test_a_quoted_field_may_hold_delimiters_quotes_and_line_breaks(tmp_path, wav, delimiter):
    wav(tmp_path / "a.wav")
    lines = '"file_name","transcription"\r\n"a.wav","one, ""two""\r\nthree"\r\na.wav,four\r\n'
    (tmp_path / "m.csv").write_text(lines.replace(",", delimiter))
    corpus, rejected = load(tmp_path / "m.csv")
    first = 'one, "two" three'.replace(",", delimiter)
    assert list(corpus.texts) == [first, "four"] and not rejected.total
    assert corpus.lines.tolist() == [2, 4]


@pytest.mark.parametrize("last", ["a.wav,five", 'a.wav,five"', 'a.wav,"five'])
def test_an_unclosed_quote_does_not_swallow_lines(tmp_path, wav, last):
    wav(tmp_path / "a.wav")
    (tmp_path / "m.csv").write_text(
        f'file_name,transcription\na.wav,one\na.wav,"two\na.wav,three\n\na.wav,four\n{last}\n'
    )
    corpus, rejected = load(tmp_path / "m.csv")
    used = ["one", "three", "four"] + (["five"] if '"' not in last else [])
    assert list(corpus.texts) == used
    assert rejected.counts == {"line is not valid CSV": 5 - len(used)}
    assert (
        rejected.examples["line is not valid CSV"][0]
        == f"{tmp_path}/m.csv:3: unexpected end of data"
    )


def any_wav(tmp_path_factory) -> Path:
    """A folder with any.wav of half a second."""
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "any.wav").exists():
        samples = np.zeros(8000, dtype=np.int16).tobytes()
        header = struct.pack(
            "<4sI8sIHHIIHH4sI",
            b"RIFF",
            36 + len(samples),
            b"WAVEfmt ",
            16,
            1,
            1,
            16_000,
            32_000,
            2,
            16,
            b"data",
            len(samples),
        )
        (folder / "any.wav").write_bytes(header + samples)
    return folder


TABLES = {  # name: (content, texts and speakers that are used, reasons for the rest)
    "a comma in the text": (
        "audio_file,text\na.wav,one\na.wav,ab, bab abba\n",
        [("one", "")],
        {"line has more cells than the header": 1},
    ),
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
    "tabs, too many and too few": (
        "path\tsentence\na.wav\tone\na.wav\na.wav\tthree\t\n",
        [("one", "")],
        {"line has fewer cells than the header": 1, "line has more cells than the header": 1},
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
    "a speaker of several lines": (
        'audio_file,text,speaker\na.wav,one,"s\nt"\n',
        [],
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
    "the same header again": (
        "path,text\na.wav,one\npath,text\na.wav,two\n",
        [("one", ""), ("two", "")],
        {"line is another header": 1},
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
    (tmp_path / "m.txt").write_bytes(content.encode())
    corpus, rejected = load(tmp_path / "m.txt")
    assert (
        list(zip(corpus.texts, corpus.speakers, strict=True)) == used and rejected.counts == reasons
    )


@pytest.mark.parametrize(
    "header",
    [
        "path,text,text",
        "text|audio_file|text",
        "path\tTEXT\ttext",
        "path,text\na.wav,one\npath,text,text",
    ],
)
def test_a_column_that_is_there_twice_is_an_error(tmp_path, header):
    (tmp_path / "m.csv").write_text(header + "\n")
    line = len(header.splitlines())
    with pytest.raises(DataError) as error:
        load(tmp_path / "m.csv")
    assert (
        str(error.value)
        == f"manifest {tmp_path}/m.csv:{line}: its header has two columns called text"
    )


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
    ("a.wav", "1455", "asha"),
    ("a", "1455", "s17"),
    ("a", "asha speaks", "asha"),
    ("a", "asha", "the text of another"),
    ("a", "p225", "baba jana shule"),
]


def test_ljspeech_is_told_from_a_table_with_speakers(tmp_path, wav):
    wav(tmp_path / "a.wav")
    names = [line.split("|")[0].removesuffix(".wav") for line in LJSPEECH]
    for name in names:
        wav(tmp_path / "wavs" / f"{name}.wav")
    lines = [*LJSPEECH[::-1], "a|hardly|any", "a|empty|"]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    corpus, rejected = load(tmp_path / "m.csv")
    assert list(corpus.texts) == [line.split("|")[2] for line in LJSPEECH[::-1]]
    assert rejected.counts == {"third cell is not the second, normalised": 1, "text is empty": 1}
    header = "audio_file|text|normalized_text\n"
    (tmp_path / "m.csv").write_text(header + "\n".join(LJSPEECH))
    assert list(load(tmp_path / "m.csv")[0].texts) == [line.split("|")[2] for line in LJSPEECH]


@pytest.mark.parametrize("row", SPEAKERS)
def test_a_third_cell_that_is_not_normalised_is_asked_for(tmp_path, wav, row):
    """What the question advises is read as it says."""
    wav(tmp_path / "a.wav")
    rows_ = "\n".join(["|".join(row)] * 3)
    (tmp_path / "m.csv").write_text(rows_)
    _, second, third = row
    with pytest.raises(DataError) as error:
        load(tmp_path / "m.csv")
    assert f"the text {third!r} of the speaker {second!r}, or the text {second!r}" in str(
        error.value
    )
    orders = re.findall(r"audio_file\|\S+", str(error.value))
    for order, (text, speaker) in zip(orders, [(third, second), (second, third)], strict=True):
        (tmp_path / "m.csv").write_text(f"{order}\n{rows_}")
        corpus, _ = load(tmp_path / "m.csv")
        assert corpus.texts[0] == text and corpus.speakers[0] == speaker


words = st.text(st.sampled_from("ab\"', ए\r\u2028"), max_size=8)
DAMAGE = [
    "more",
    "fewer",
    "quote first",
    "quote in the middle",
    "header",
    "separators",
    "blank",
    "blank",
    "latin-1",
    "other",
]


def written(family: str, text: str, speaker: str, damage: str) -> str:
    """A row as a correct program writes it, or with this damage."""
    if family == "json":
        row = {"audio_file": "any.wav", "text": text, "speaker": speaker}
        row.update(
            {
                "latin-1": {"speaker": "\udce9"},
                "quote first": {"text": True},
                "header": {"text": [text]},
            }.get(damage, {})
        )
        line = json.dumps(row, ensure_ascii=False)
        return {
            "more": line * 2,
            "fewer": line[:-2],
            "quote in the middle": line.replace(', "text"', ' "text"'),
            "separators": "{}",
            "blank": " ",
            "other": line.replace("{", '{"text": "a", '),
        }.get(damage, line)
    delimiter = {"comma": ",", "tab": "\t", "bar": "|", "ljspeech": "|"}[family]
    if family == "comma":
        text = text if text.isalnum() else '"' + text.replace('"', '""') + '"'
    cells = ["any.wav", text, text.upper() if family == "ljspeech" else speaker]
    if damage == "more":
        cells.append("x")
    elif damage == "fewer":
        cells = cells[:1]
    elif damage == "header" and family != "ljspeech":
        cells = ["audio_file", "text", "speaker"]
    elif damage == "latin-1":
        cells[1] = cells[2] = "\udce9"
    elif damage == "other":
        cells[1:] = [family, "\udce9"]
    elif damage.startswith("quote") and family == "comma":
        cells[1] = f'"{speaker}' if damage == "quote first" else f'{speaker}"x'
    return {"separators": ",,,,|||||" + 4 * "\t|", "blank": " "}.get(damage) or delimiter.join(
        cells
    )


@given(
    texts=st.lists(
        st.tuples(words, st.sampled_from(["", "", "", *DAMAGE])), min_size=1, max_size=10
    ),
    family=st.sampled_from(["json", "comma", "tab", "bar", "ljspeech"]),
)
def test_every_line_is_used_as_written_or_counted(tmp_path_factory, texts, family):
    folder = any_wav(tmp_path_factory)
    header = (
        [written(family, "text", "speaker", "header")] if family in ("comma", "tab", "bar") else []
    )
    lines, expected, harmless = list(header), {}, {"": True, "header": family == "ljspeech"}
    if family != "comma":
        harmless |= dict.fromkeys(("quote first", "quote in the middle"), family != "json")
    for i, (text, damage) in enumerate([("", ""), *texts]):
        if (family, damage) == ("ljspeech", "other"):
            damage = ""  # a table of such rows can be read in two ways, and is asked about
        text, speaker = (
            f"w{i}" + text.replace("\r", "\n" if family in ("json", "comma") else "\r"),
            f"s{i}",
        )
        row = written(family, text, speaker, damage).split("\n")
        if harmless.get(damage):
            kept = (text.upper(), "") if family == "ljspeech" else (text, speaker)
            expected[len(lines) + 1] = (
                normalise(kept[0]),
                kept[1],
                sum(bool(line.strip()) for line in row),
            )
        lines += row
    path = folder / f"{family}.txt"
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
    corpus, rejected = load(path)
    used = dict(
        zip(corpus.lines.tolist(), zip(corpus.texts, corpus.speakers, strict=True), strict=True)
    )
    assert {line: expected[line][:2] for line in used} == used
    total = sum(bool(line.strip()) for line in lines) - len(header)
    assert sum(expected[line][2] for line in used) + rejected.total == total
    if family != "comma":  # of which a text of several lines may look like rows
        assert len(used) == len(expected)


def test_an_open_quote_reads_no_more_than_a_few_lines():
    read = []

    def endless():
        for number in itertools.count(1):
            read.append(number)
            yield number, 'a.wav,"x\n' if number == 1 else "x\n"

    rejected = []
    rows_ = manifest._split(
        endless(), ",", True, ["path", "text"], lambda *reason: rejected.append(reason)
    )
    assert next(rows_) == (2, ["x"])
    assert (
        rejected == [("line is not valid CSV", 1, "unexpected end of data")]
        and len(read) <= manifest.CELL_LINES + 2
    )


@pytest.mark.parametrize("family", ["json", "comma", "bar"])
def test_what_is_beyond_the_longest_line_is_skipped(tmp_path, wav, monkeypatch, family):
    monkeypatch.setattr(manifest, "LINE_LENGTH", 100)
    wav(tmp_path / "a.wav")
    template = {
        "json": '{{"path": "a.wav", "text": "{}"}}',
        "comma": 'a.wav,"{}"',
        "bar": "a.wav|{}",
    }[family]
    room = 100 - len(template.format("")) - 1  # and the line end, in a line of 100 characters
    sizes = [5, room - 1, room, room + 1, 250, 1000, 7]
    lines = {"json": [], "comma": ["path,text"], "bar": ["path|text"]}[family]
    lines += [template.format("x" * size) for size in sizes]
    for end, last in (("\n", ""), ("\r\n", "\r\n"), ("\n", "\n" + "y" * 999), ("\r", "\r")):
        (tmp_path / "m.txt").write_bytes((end.join(lines) + last).encode())
        corpus, rejected = load(tmp_path / "m.txt")
        fits = [size for size in sizes if len(template.format("x" * size)) + len(end) < 100]
        assert list(map(len, corpus.texts)) == [min(size, 10**9) for size in fits]
        assert rejected.counts == {manifest.UNREADABLE: len(sizes) - len(fits) + ("y" in last)}
    (tmp_path / "m.txt").write_bytes(b"x" * 1000)
    corpus, rejected = load(tmp_path / "m.txt")
    assert len(corpus) == 0 and rejected.counts == {manifest.UNREADABLE: 1}


def test_a_line_that_is_too_long_may_be_the_first(tmp_path, wav, monkeypatch):
    monkeypatch.setattr(manifest, "LINE_LENGTH", 100)
    wav(tmp_path / "a.wav")
    (tmp_path / "m.txt").write_text("x" * 1000 + "\npath,text\na.wav,one\n")
    corpus, rejected = load(tmp_path / "m.txt")
    assert list(corpus.texts) == ["one"] and rejected.counts == {manifest.UNREADABLE: 1}


def test_a_json_list_is_read(tmp_path, wav):
    path = wav(tmp_path / "a.wav")
    (tmp_path / "m.json").write_text(
        json.dumps([{"audio_file": path, "text": "one"}, 5, ["a"], None, "a.wav"])
    )
    corpus, rejected = load(tmp_path / "m.json")
    assert list(corpus.texts) == ["one"] and rejected.counts == {"line is not an object": 4}


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
        lines = (
            json.dumps({"audio_filepath": "any.wav", "text": text}, ensure_ascii=False) + "\n"
            for text in texts
        )
        content = "".join(lines)
    else:
        texts = [text.replace("\0", "") for text in texts]
        # A line of a text with as many commas as a row is taken for one.
        texts = [text.replace(",", "") if "\n" in text else text for text in texts]
        content = as_csv(["path", "sentence"], [["any.wav", text] for text in texts])
    (folder / f"any.{family}").write_bytes(content.encode())
    corpus, rejected = load(folder / f"any.{family}")
    kept = [normalise(text) for text in texts]
    assert list(corpus.texts) == [text for text in kept if text]
    assert rejected.counts == ({"text is empty": kept.count("")} if "" in kept else {})
    assert rejected.repeated == max(0, len(corpus) - 1)


# --- where paths lead -----------------------------------------------------------------------------


def test_paths_with_spaces_and_devanagari(tmp_path, wav, json_lines):
    path = wav(tmp_path / "my corpus" / "हांव तूं.wav")
    corpus, _ = load(
        json_lines(
            tmp_path / "my corpus" / "m.json", [{"audio_filepath": "हांव तूं.wav", "text": "a"}]
        )
    )
    assert list(corpus.paths) == [path]


def test_relative_paths_start_at_audio_root(tmp_path, wav, json_lines):
    path = wav(tmp_path / "root" / "a.wav")
    corpus, _ = load(
        json_lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": "a"}]),
        audio_root=str(tmp_path / "root"),
    )
    assert list(corpus.paths) == [path]


@pytest.mark.parametrize(
    "name",
    [
        "/data/me/set/x/a.wav",
        "C:\\me\\set\\x\\a.wav",
        "D:/set/x/a.wav",
        "\\\\host\\share\\x\\a.wav",
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


def test_relative_paths_of_windows(tmp_path, wav, json_lines):
    path = wav(tmp_path / "x" / "a.wav")
    corpus, _ = load(json_lines(tmp_path / "m.json", [{"audio_filepath": "x\\a.wav", "text": "a"}]))
    assert list(corpus.paths) == [path]


def test_an_absolute_path_that_exists_is_kept(tmp_path, wav, json_lines):
    path = wav(tmp_path / "here" / "a.wav")
    wav(tmp_path / "root" / "a.wav")
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": path, "text": "a"}])
    assert list(load(lines, audio_root=str(tmp_path / "root"))[0].paths) == [path]


def test_audio_root_must_be_a_folder(tmp_path, json_lines):
    with pytest.raises(UsageError) as error:
        load(json_lines(tmp_path / "m.json", [GOOD]), audio_root=str(tmp_path / "none"))
    assert str(error.value) == f"--audio_root {tmp_path}/none: no such folder"


@given(st.text(st.sampled_from("/\\.:aC़ "), max_size=12), st.booleans())
def test_any_name_becomes_a_path(tmp_path_factory, name, has_root):
    folder = str(tmp_path_factory.mktemp("empty"))
    path = finding.find_audio(name, folder, folder if has_root else None)
    assert path.startswith(folder) or path == name


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
    for name in "ab":
        wav(tmp_path / f"{name}.wav")

    def fingerprint(*pairs):
        lines = [{"audio_filepath": f"{name}.wav", "text": text} for name, text in pairs]
        return load(json_lines(tmp_path / "m.json", lines))[0].fingerprint()

    prints = [
        fingerprint(*pairs)
        for pairs in [
            [("a", "xy"), ("b", "z")],
            [("a", "x"), ("b", "yz")],
            [("b", "z"), ("a", "xy")],
            [("a", "xy")],
            [("a", "xy"), ("b", "w")],
        ]
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(("a", "xy"), ("b", "z")) == prints[0]


def test_a_file_of_many_segments_is_looked_at_once(tmp_path, wav, json_lines, monkeypatch):
    wav(tmp_path / "a.wav", 2.0)
    seen = []
    monkeypatch.setattr(
        headers, "probe", lambda path, probe=headers.probe: seen.append(path) or probe(path)
    )
    monkeypatch.setattr(
        manifest,
        "find_all",
        lambda *args, find=manifest.find_all: seen.extend(args[0]) or find(*args),
    )
    lines = [
        {"audio_filepath": "a.wav", "text": "a", "offset": i / 100, "duration": 0.5}
        for i in range(100)
    ]
    corpus, rejected = load(json_lines(tmp_path / "m.json", lines))
    assert len(corpus) == 100 and not rejected.total
    assert seen == ["a.wav", str(tmp_path / "a.wav")]


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


@pytest.mark.parametrize("damage", [b"", b"not a zip", "half", "wrong shape", "two columns"])
def test_a_corrupt_cache_is_ignored(tmp_path, wav, json_lines, looked_at, damage):
    wav(tmp_path / "a.wav")
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": "a"}])
    load(lines, cache_dir=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    if damage == "half":
        cache.write_bytes(cache.read_bytes()[: cache.stat().st_size // 2])
    elif damage == "wrong shape":
        np.savez(cache, stamps=np.zeros((2, 2), dtype=np.int64), values=np.zeros((2, 1)))
    elif isinstance(damage, str):
        stamps = np.load(cache)["stamps"]
        np.savez(cache, stamps=stamps, values=np.ones((1, 2)))
    else:
        cache.write_bytes(damage)
    looked_at.clear()
    assert load(lines, cache_dir=tmp_path / "cache")[0].seconds.tolist() == [1.0]
    assert looked_at == ["a.wav"]
    looked_at.clear()
    load(lines, cache_dir=tmp_path / "cache")
    assert looked_at == []


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path, wav, json_lines):
    wav(tmp_path / "a.wav")
    (tmp_path / "file").write_text("")
    lines = json_lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": "a"}])
    assert len(load(lines, cache_dir=tmp_path / "file" / "cache")[0]) == 1


# --- hostile lines --------------------------------------------------------------------------------

DEEP = b'{"a":' * 100_000
HOSTILE_LINES = {
    "malformed": (b'{"audio_filepath": "good.wav", "text": ', "line is not valid JSON"),
    "cut short": (b'{"audio_filepath": "good.wav", "te', "line is not valid JSON"),
    "a list": (b"[1, 2]", "line is not an object"),
    "a number": (b"5", "line is not an object"),
    "too deep": (DEEP, "line is not valid JSON"),
    "null byte": (b'{"audio_filepath": "good.wav", "text": "a\0b"}', manifest.UNREADABLE),
    "two objects": (
        b'{"audio_filepath": "good.wav", "text": "a"}{"audio_filepath": "good.wav", "text": "b"}',
        "line is not valid JSON",
    ),
    "a key twice": (
        b'{"audio_filepath": "good.wav", "text": "a", "text": "b"}',
        "line is not valid JSON",
    ),
    "a key twice inside": (
        b'{"audio_filepath": "good.wav", "text": "a", "more": [{"a": 1, "a": 2}]}',
        "line is not valid JSON",
    ),
    "text is true": ({**GOOD, "text": True}, "text is not a string"),
    "text is a fraction": ({**GOOD, "text": 1.5}, "text is not a string"),
    "text is infinite": (
        b'{"audio_filepath": "good.wav", "text": Infinity}',
        "text is not a string",
    ),
    "text is an object": ({**GOOD, "text": {"text": "a"}}, "text is not a string"),
    "duration is true": ({**GOOD, "duration": True}, "duration is not a number"),
    "duration overflows": ({**GOOD, "duration": "1e999"}, "duration is not a number"),
    "an endless number": (
        b'{"audio_filepath": "good.wav", "text": ' + b"1" * 5000 + b"}",
        "line is not valid JSON",
    ),
    "text of 10,001 characters": (
        {**GOOD, "text": "ए" * 10_001},
        "text is longer than 10000 characters",
    ),
    "text of 5 million characters": ({**GOOD, "text": "a" * 5_000_000}, manifest.UNREADABLE),
    "null byte in the path": (
        b'{"audio_filepath": "good.wav\\u0000", "text": "a"}',
        "no audio path",
    ),
    "path is a number": ({**GOOD, "audio_filepath": 5}, "no audio path"),
    "path is empty": ({**GOOD, "audio_filepath": ""}, "no audio path"),
    "no path": ({"text": "a"}, "no audio path"),
    "no text": ({"audio_filepath": "good.wav"}, "no text field"),
    "text is a list": ({**GOOD, "text": ["a"]}, "text is not a string"),
    "text is not a number": (
        b'{"audio_filepath": "good.wav", "text": NaN}',
        "text is not a string",
    ),
    "empty text": ({**GOOD, "text": ""}, "text is empty"),
    "blank text": ({**GOOD, "text": " \u200b\t "}, "text is empty"),
    "text is null": ({**GOOD, "text": None}, "text is empty"),
    "latin-1": (
        '{"audio_filepath": "good.wav", "text": "café"}'.encode("latin-1"),
        "line is not UTF-8",
    ),
    "latin-1 speaker": (
        '{"audio_filepath": "good.wav", "text": "a", "speaker": "é"}'.encode("latin-1"),
        "line is not UTF-8",
    ),
    "half a surrogate pair": (
        b'{"audio_filepath": "good.wav", "text": "\\ud83d"}',
        "line is not UTF-8",
    ),
    "negative offset": ({**GOOD, "offset": -1}, "offset is negative"),
    "negative duration": ({**GOOD, "duration": -1}, "duration is negative"),
    "duration in words": ({**GOOD, "duration": "long"}, "duration is not a number"),
    "duration is a list": ({**GOOD, "duration": [1]}, "duration is not a number"),
    "duration is huge": ({**GOOD, "duration": 10**400}, "duration is not a number"),
    "duration is infinite": (
        b'{"audio_filepath": "good.wav", "text": "a", "duration": Infinity}',
        "duration is not a number",
    ),
    "offset is not a number": (
        b'{"audio_filepath": "good.wav", "text": "a", "offset": [0]}',
        "offset is not a number",
    ),
    "duration of zero": ({**GOOD, "audio_filepath": "two.wav", "duration": 0}, TOO_LITTLE),
    "offset beyond the end": ({**GOOD, "offset": 7.0}, "segment ends beyond the file"),
    "offset at the end": ({**GOOD, "offset": 1.0}, "segment ends beyond the file"),
    "segment beyond the end": (
        {**GOOD, "offset": 0.5, "duration": 0.7},
        "segment ends beyond the file",
    ),
    "duration beyond the end": (
        {**GOOD, "duration": 1.6},
        "file is shorter than its duration in the manifest (truncated?)",
    ),
    "segment too short": (
        {**GOOD, "offset": 0.2, "duration": 0.05},
        "shorter than 0.1 s (--min_duration)",
    ),
    "very long path": ({**GOOD, "audio_filepath": "a" * 100_000}, "file is missing"),
    "missing": ({**GOOD, "audio_filepath": "none.wav"}, "file is missing"),
    "below a file": ({**GOOD, "audio_filepath": "good.wav/a.wav"}, "file is missing"),
    "a folder": ({**GOOD, "audio_filepath": "folder.wav"}, "not a file but a folder"),
    "a pipe": ({**GOOD, "audio_filepath": "pipe.wav"}, "not a regular file"),
    "empty file": ({**GOOD, "audio_filepath": "empty.wav"}, "file is empty"),
    "no audio in it": ({**GOOD, "audio_filepath": "header.wav"}, "audio is empty"),
    "a millisecond": (
        {**GOOD, "audio_filepath": "click.wav"},
        "shorter than 0.1 s (--min_duration)",
    ),
    "forty minutes": ({**GOOD, "audio_filepath": "long.wav"}, "longer than 30 s (--max_duration)"),
    "truncated wav": ({**GOOD, "audio_filepath": "cut.wav"}, "audio is truncated"),
    "text called wav": (
        {**GOOD, "audio_filepath": "text.wav"},
        "audio is unreadable",
    ),
    "raw samples": (
        {**GOOD, "audio_filepath": "samples.raw"},
        "audio is unreadable",
    ),
}


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
    (tmp_path / "samples.raw").write_bytes(bytes(8000))
    with open(tmp_path / "long.wav", "wb") as file:  # 40 minutes of silence, sparse on disk
        size = 40 * 60 * 8000
        file.write(
            struct.pack(
                "<4sI8sIHHIIHH4sI",
                b"RIFF",
                36 + size,
                b"WAVEfmt ",
                16,
                1,
                1,
                8000,
                8000,
                1,
                8,
                b"data",
                size,
            )
        )
        file.truncate(44 + size)
    return tmp_path


@pytest.mark.parametrize("name", HOSTILE_LINES)
def test_a_hostile_line_is_rejected_and_the_others_are_used(
    hostile_files, json_lines, no_hang, name
):
    line, reason = HOSTILE_LINES[name]
    path = json_lines(
        hostile_files / "m.json", [GOOD, *[{**GOOD, "text": "x" * 5000}] * 2, line, GOOD]
    )
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
    click = f"{path}:8: {hostile_files}/click.wav (0.00 s)"
    assert capsys.readouterr().out.splitlines() == [
        "training set: columns used: audio_filepath (audio), text; not used: none",
        "training set: 1 utterances, 0.0 min; 7 rejected:",
        f"        5  file is missing ({columns.ADVICE['file is missing']})",
        *[f"           {path}:{i + 2}: {hostile_files}/none {i}.wav" for i in range(3)],
        "        1  line is not valid JSON (write one object per line, each key once)",
        f"           {path}:7: Expecting property name enclosed in double quotes",
        "        1  shorter than 0.1 s (--min_duration)",
        f"           {click}",
    ]
    with pytest.raises(DataError) as error:
        report_rejections("training set", corpus.seconds, rejected, strict=True)
    assert str(error.value) == "training set: 7 utterances rejected (--strict_data)"


def test_strict_accepts_a_clean_manifest_and_repeated_lines_are_counted(
    tmp_path, wav, json_lines, capsys
):
    wav(tmp_path / "good.wav", 3.0)
    segment = {**GOOD, "offset": 1.0, "duration": 1.0}
    corpus, rejected = load(
        json_lines(
            tmp_path / "m.json", [GOOD, segment, GOOD, GOOD, segment, {**GOOD, "duration": 1.0}]
        )
    )
    report_rejections("set", corpus.seconds, rejected, strict=True)
    assert len(corpus) == 6 and rejected.repeated == 3
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "set: 6 utterances, 0.2 min; 3 repeat the audio of another (all are used)"
    )


def test_nothing_usable_is_an_error(hostile_files, json_lines):
    path = json_lines(
        hostile_files / "m.json", [{**GOOD, "audio_filepath": "empty.wav"}, b"{", b"{"]
    )
    corpus, rejected = load(path)
    with pytest.raises(DataError) as error:
        report_rejections("set", corpus.seconds, rejected, strict=False)
    assert (
        str(error.value)
        == "set: no usable utterance: 2 x line is not valid JSON (write one object per line, each"
        " key once); 1 x file is empty"
    )


def test_a_header_of_unknown_size_does_not_mean_truncation(tmp_path, wav, json_lines):
    """Encoders that write to a pipe leave 0xFFFFFFFF as the size."""
    data = Path(wav(tmp_path / "good.wav")).read_bytes()
    (tmp_path / "good.wav").write_bytes(data[:40] + b"\xff" * 4 + data[44:])
    corpus, rejected = load(json_lines(tmp_path / "m.json", [GOOD]))
    assert corpus.seconds.tolist() == [1.0] and not rejected.total


# --- hostile manifests ----------------------------------------------------------------------------

AUDIO_COLUMNS = "audio_filepath, audio_file, file_name, path, audio, wav, filename, file, id"
NO_TEXT = "manifest {path} is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)"
NO_HEADER = (
    f"manifest {{path}}: its first line names no audio column (one of {AUDIO_COLUMNS}), as"
    " audio_file,text or audio_file|text do; it has: "
)
HOSTILE_MANIFESTS = {  # name: (file name, content, message)
    "of no bytes": ("m.json", b"", "manifest {path} is empty"),
    "of no bytes, csv": ("m.csv", b"", "manifest {path} is empty"),
    "of white space": ("m.json", b" \n\r\n\t\n", "manifest {path} is empty"),
    "of white space, tsv": ("m.tsv", b" \n\r\n\t\n", "manifest {path} is empty"),
    "a byte-order mark": ("m.json", b"\xef\xbb\xbf", "manifest {path} is empty"),
    "an empty list": ("m.json", b"[]", "manifest {path} is empty"),
    "only a header": ("m.csv", b"path,sentence\n", "manifest {path} is empty"),
    "binary": ("m.json", bytes(range(256)), NO_TEXT),
    "gzip": ("m.json.gz", gzip.compress(json.dumps(GOOD).encode() * 50, mtime=0), NO_TEXT),
    "UTF-32": ("m.json", json.dumps(GOOD).encode("utf-32-be"), NO_TEXT),
    "Kaldi's wav.scp": ("wav.scp", b"utt1 /data/a.wav\n", NO_HEADER + "'utt1 /data/a.wav'"),
    "Kaldi's text": ("text", b"utt1 hello world\n", NO_HEADER + "'utt1 hello world'"),
    "subtitles without audio": (
        "a.srt",
        b"1\n00:00:01,000 --> 00:00:02,000\nhello\n",
        "{path}: its audio is missing: put a.wav (.mp3, .flac ...) into its folder, or give the"
        " audio's as --audio_root",
    ),
    "a key twice in a list": (
        "m.json",
        b'[{"text": "a", "text": "b", "audio_filepath": "good.wav"}]',
        "manifest {path} is not valid JSON: a key is given twice",
    ),
    "a zip": ("m.csv", b"PK\3\4" + b"x" * 100, NO_TEXT),
    "UTF-16": (
        "m.json",
        ("\ufeff" + json.dumps(GOOD)).encode("utf-16-le"),
        "manifest {path} is UTF-16: save it as UTF-8",
    ),
    "a list cut short": (
        "m.json",
        b'[{"audio_filepath": "a.wav"},',
        "manifest {path} is not valid JSON: Expecting value: line 1 column 30 (char 29)",
    ),
    "without header": ("m.csv", b"a.wav,hello\nb.wav,world\n", NO_HEADER + "'a.wav,hello'"),
    "without header, tabs": ("m.tsv", b"a.wav\thello\n", NO_HEADER + r"'a.wav\thello'"),
}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_one_line(tmp_path, name):
    file_name, content, message = HOSTILE_MANIFESTS[name]
    (tmp_path / file_name).write_bytes(content)
    with pytest.raises(DataError) as error:
        load(tmp_path / file_name)
    assert str(error.value) == message.replace("{path}", str(tmp_path / file_name))


def test_a_deep_list_is_one_line(tmp_path, no_hang):
    (tmp_path / "m.json").write_bytes(b"[" * 100_000)
    with pytest.raises(DataError, match=r"^manifest .*m\.json is not valid JSON: .*recursion"):
        load(tmp_path / "m.json")


def test_a_manifest_that_is_missing_or_not_a_file(tmp_path, no_hang):
    os.mkfifo(tmp_path / "pipe.json")
    for path, reason in (
        (tmp_path / "none.json", "No such file or directory"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe.json", "it is not a regular file"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "embedded null byte"),
    ):
        with pytest.raises(UsageError) as error:
            load(path)
        assert str(error.value).startswith(f"manifest {path}: {reason}")


def test_lines_that_cannot_be_parsed_are_rejected(tmp_path, wav):
    wav(tmp_path / "a.wav")
    (tmp_path / "m.tsv").write_bytes(
        b"path\tsentence\na.wav\tone\na.wav\t" + b"x" * (1 << 24) + b"x\na.wav\n\na.wav\tlast\n"
    )
    corpus, rejected = load(tmp_path / "m.tsv")
    assert list(corpus.texts) == ["one", "last"]
    assert rejected.examples == {
        manifest.UNREADABLE: [f"{tmp_path}/m.tsv:3"],
        "line has fewer cells than the header": [f"{tmp_path}/m.tsv:4"],
    }


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


def test_a_text_as_long_as_the_longest_speech_is_used(tmp_path, wav, json_lines):
    wav(tmp_path / "good.wav")
    lines = json_lines(
        tmp_path / "m.json", [{**GOOD, "text": "ए" * 10_000}, {**GOOD, "text": "ए" * 30_000}]
    )
    assert [len(text) for text in load(lines)[0].texts] == [10_000]
    assert [len(text) for text in load(lines, max_duration=300.0)[0].texts] == [10_000, 30_000]


@given(st.binary(max_size=200), st.sampled_from(["m.json", "m.csv", "m.tsv", "metadata.csv"]))
def test_arbitrary_bytes_do_not_end_in_a_traceback(tmp_path_factory, content, name):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        corpus, rejected = load(path)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert len(corpus) == 0 and rejected.total


@given(
    st.lists(
        st.sampled_from(
            [
                '{"',
                '":',
                '"',
                ",",
                "[",
                "]",
                "}",
                "audio_filepath",
                "text",
                "path",
                "|",
                "\t",
                "\n",
                "1e999",
                "NaN",
                "\\ud800",
                "\0",
            ]
        ),
        max_size=25,
    )
)
def test_arbitrary_syntax_does_not_end_in_a_traceback(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "syntax.txt"
    path.write_text("".join(parts))
    try:
        corpus, rejected = load(path)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert len(corpus) == 0 and rejected.total
