"""Files of annotations as manifests: which tier, which files, which audio, and what is said about
what is left out."""

import os
import re

import numpy as np
import pytest
from praatio import textgrid
from pympi import Elan

from common.errors import DataError, Stopped, UsageError
from speech.data import splits
from speech.data.annotations.rows import READERS, files_of
from speech.data.hours import hours_of
from speech.data.loading import Checks, load_corpus
from tests.speech.data.sets import resolved


def elan(path, tiers, media=None, origin=None, **participants):
    """Writes {name: [(start, end, text) in seconds]}, or (parent, {text of the parent: text})."""
    file = Elan.Eaf()
    file.remove_tier("default")
    file.add_linguistic_type("dependent", constraints="Symbolic_Association")
    for name, entries in tiers.items():
        if isinstance(entries, tuple):
            parent, texts = entries
            file.add_tier(name, ling="dependent", parent=parent)
            for start, _, text in tiers[parent]:
                file.add_ref_annotation(name, parent, round(1000 * start), texts[text])
            continue
        file.add_tier(name, part=participants.get(name))
        for start, end, text in entries:
            file.add_annotation(name, round(1000 * start), round(1000 * end), text)
    if media:
        file.add_linked_file(media, relpath=f"./{os.path.basename(media)}", time_origin=origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.to_file(str(path))
    return str(path)


def load(path, **checks):
    return load_corpus(str(path), str, Checks(**checks))


def rows(corpus):
    """(name of the audio, start, seconds, text, speaker) of each utterance."""
    names = [os.path.basename(path) for path in corpus.paths]
    times = (np.round(column, 3).tolist() for column in (corpus.offsets, corpus.seconds))
    return list(zip(names, *times, corpus.texts, corpus.speakers, strict=True))


TALK = [(0.0, 1.5, "one"), (2.0, 3.0, ""), (3.0, 4.5, "two")]
EXPECTED = [("a.wav", 0.0, 1.5, "one"), ("a.wav", 3.0, 1.5, "two")]
SRT = "".join(
    f"{i}\n00:00:0{a:.3f} --> 00:00:0{b:.3f}\n{text}\n\n" for i, (a, b, text) in enumerate(TALK)
)


def praat(path, name="Anna", entries=TALK):
    grid = textgrid.Textgrid()
    grid.addTier(textgrid.IntervalTier(name, [each for each in entries if each[2]], 0, 5))
    grid.save(str(path), "short_textgrid", includeBlankSpaces=True)


LABELS = "".join(f"{a}\t{b}\t{text}\n" for a, b, text in TALK)
WRITERS = {
    "a.eaf": (lambda path: elan(path, {"Anna": TALK}), "Anna", 1),
    "a.TextGrid": (praat, "Anna", 2),
    "a.txt": (lambda path: path.write_text(LABELS), "", 1),
    "a.srt": (lambda path: path.write_text(SRT.replace(".", ",")), "", 1),
    "a.vtt": (lambda path: path.write_text(f"WEBVTT\n\n{SRT}"), "", 1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_is_a_manifest(tmp_path, wav, name):
    wav(tmp_path / "a.wav", 5.0)
    write, speaker, empty = WRITERS[name]
    write(tmp_path / name)
    corpus, rejected = load(tmp_path / name)
    assert rows(corpus) == [(*row, speaker) for row in EXPECTED]
    assert not rejected.total and not rejected.notes
    tiers = "; tiers Anna (2)" if speaker else ""
    assert rejected.source == f"1 file{tiers}; without text, left out: {empty}"
    assert hours_of(tmp_path / name) == pytest.approx(3 / 3600)


# --- which tier -----------------------------------------------------------------------------------

TIERS = {
    "ref@A": [(0.0, 1.0, "A.001"), (2.0, 3.0, "A.002")],
    "tx@A": ("ref@A", {"A.001": "one", "A.002": "two"}),
    "tx@B": [(1.0, 2.0, "three")],
    "notes": [(0.0, 0.5, "")],
}


def texts(path, *tiers):
    corpus, _ = load(path, tiers=tiers)
    return [text for *_, text, _ in rows(corpus)]


def test_tiers_are_chosen_by_names_and_patterns(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    path = elan(tmp_path / "a.eaf", TIERS)
    assert texts(path, "tx@A") == ["one", "two"]
    assert texts(path, "tx@*") == ["one", "three", "two"]
    assert texts(path, "dependent") == texts(path, "depend*") == ["one", "two"]  # a type
    assert texts(path, "tx@B", "ref@A") == ["A.001", "three", "A.002"]
    corpus, rejected = load(path, tiers=("tx@?", "no such"))
    assert list(corpus.texts) == ["one", "three", "two"]
    assert rejected.source == "1 file; tiers tx@A (2), tx@B (1); no tier is called no such"


def typed(path, count, write=elan):
    """A file of `count` speakers with tiers of numbers, of texts and of nothing."""
    tiers = {}
    for who in range(count):
        tiers |= {f"note@{who}": [], f"ref@{who}": TIERS["ref@A"]}
        tiers[f"tx@{who}"] = (f"ref@{who}", {"A.001": "a \\ \x9b b", "A.002": "w" * 40})
    people = {f"ref@{who}": f"Speaker {who}" for who in range(count)}
    return write(path, tiers, **people)


def test_without_a_choice_all_tiers_are_listed_those_with_texts_first(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    path = typed(tmp_path / "a.eaf", 40)
    for tiers in ((), ("no such",)):
        with pytest.raises(UsageError) as caught:
            texts(path, *tiers)
        first, head, *table = str(caught.value).split("\n")
        if tiers:
            assert first == f"--tier no such: there is none such in {path}"
        else:
            assert first == (
                f"{path}: which tier has the texts? Add --tier NAME; a type takes the tiers of all"
                " speakers: --tier dependent"
            )
        assert head.split() == ["tier", "type", "speaker", "texts", "such", "as"]
        assert len(table) == 120
        assert table[0].split() == ["ref@0", "default-lt", "Speaker", "0", "2", "A.001"]
        assert table[40].split()[:6] == ["tx@0", "dependent", "Speaker", "0", "2", "a"]
        assert table[40].endswith("a \\ \\x9b b")  # not doubled, and nothing that a terminal obeys
        assert table[80].split() == ["note@0", "default-lt", "0"]


def test_a_type_of_all_tiers_or_of_one_speaker_is_not_advised(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    for tiers in (TIERS, {"one": TALK, "two": TALK}):
        with pytest.raises(UsageError, match=r"Add --tier NAME\n"):
            texts(elan(tmp_path / "a.eaf", tiers))


def test_a_lone_tier_of_numbers_is_not_taken_without_asking(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    path = elan(tmp_path / "a.eaf", {"ref": TIERS["ref@A"], "tx": []})
    with pytest.raises(UsageError, match=r"are these texts or their numbers\? Add --tier 'ref' if"):
        texts(path)
    assert texts(path, "ref") == ["A.001", "A.002"]


@pytest.mark.parametrize(
    "name, content, way",
    [
        ("a.cha", "@UTF8\n@Begin\n", "a CHAT transcript; open it in ELAN"),
        ("a.TRS", "<Trans/>", "Transcriber's; open it in ELAN"),
        ("a.flextext", "<document/>", "FLEx's; open it in ELAN"),
        ("a.exb", "<basic-transcription/>", "EXMARaLDA's; open it in EXMARaLDA"),
        ("a.txt", "\ufeff\\_sh v3.0  400  Text\n\\ref 1\n", "Toolbox's; open it in ELAN"),
    ],
)
def test_files_of_other_programs_are_refused_with_the_way(tmp_path, name, content, way):
    (tmp_path / name).write_text(content)
    for path in (tmp_path / name, tmp_path / f"*{name[1:]}"):
        with pytest.raises(UsageError) as caught:
            load(path)
        message = str(caught.value)
        assert f"{name}: this file is {way}" in message and "ELAN" in message
        assert message.endswith("and save it as .eaf")


def test_the_only_tier_that_depends_on_no_other_is_taken_if_it_has_words(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    gloss = ("Anna", {"one": "eins", "": "", "two": "zwei"})
    assert texts(elan(tmp_path / "a.eaf", {"Anna": TALK, "gloss": gloss})) == ["one", "two"]
    numbered = {"ref@A": TIERS["ref@A"], "tx@A": TIERS["tx@A"]}
    with pytest.raises(UsageError, match="which tier has the texts"):
        texts(elan(tmp_path / "a.eaf", numbered))


def test_points_are_counted_and_left_out(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    grid = textgrid.Textgrid()
    grid.addTier(textgrid.IntervalTier("words", [(0, 1, "one")], 0, 5))
    grid.addTier(textgrid.PointTier("bells", [(1, "ding"), (2, "dong")], 0, 5))
    path = tmp_path / "a.TextGrid"
    grid.save(str(path), "long_textgrid", includeBlankSpaces=True)
    assert texts(path) == ["one"]
    corpus, rejected = load(path, tiers=("words", "bells"))
    assert len(corpus) == 1
    assert "points without duration, left out: 2" in rejected.source
    with pytest.raises(DataError, match=r"no texts with a duration(.|\n)*  bells  2 points"):
        load(path, tiers=("bells",))


def test_tier_without_files_that_have_tiers_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="--tier: none of the manifests"):
        splits.resolve(resolved("--train_manifest", "a.json", "--tier", "Anna"))
    words = "--train_manifest", "x/*.eaf", "--val_manifest", "v.json", "--tier", "A", "B"
    asked = splits.resolve(resolved(*words, "--tier", "C"))
    assert asked.checks.tiers == ("A", "B", "C")


# --- several files --------------------------------------------------------------------------------


@pytest.fixture
def interviews(tmp_path, wav):
    """Two files and their audio, whose tiers have other names."""
    for name in "ab":
        wav(tmp_path / f"interviews/{name}.wav", 5.0)
        elan(tmp_path / f"interviews/{name}.eaf", {f"tx@{name}": TALK})
    return tmp_path / "interviews"


def test_a_pattern_stands_for_its_files_in_order(interviews):
    pattern = interviews / "*.eaf"
    corpus, rejected = load(pattern)
    assert [row[0] for row in rows(corpus)] == ["a.wav", "a.wav", "b.wav", "b.wav"]
    assert list(corpus.speakers) == ["tx@a", "tx@a", "tx@b", "tx@b"]
    assert rejected.source == "2 files; tiers tx@a (2), tx@b (2); without text, left out: 2"
    assert hours_of(pattern) == pytest.approx(6 / 3600)
    assert len(load(interviews.parent / "**" / "*.eaf")[0]) == 4


def test_a_bad_file_among_several_is_counted(interviews):
    (interviews / "c.eaf").write_text("<ANNOTATION_DOCUMENT>")
    elan(interviews / "no audio.eaf", {"tx@c": TALK})
    (interviews / "d.eaf").symlink_to("d.eaf")
    corpus, rejected = load(interviews / "*.eaf")
    assert len(corpus) == 4
    assert rejected.counts == {"file of annotations cannot be used": 3}
    shown = "\n".join(rejected.examples["file of annotations cannot be used"])
    assert "c.eaf:1: it is not sound XML" in shown
    assert "no audio.eaf: its audio is missing: put no audio.wav (.mp3, .flac ...) into" in shown
    corpus, rejected = load(interviews / "*.eaf", tiers=("tx@b",))
    assert [row[0] for row in rows(corpus)] == ["b.wav", "b.wav"]
    assert rejected.total == 4
    (shown,) = rejected.examples.values()
    assert shown[0] == f"--tier tx@b: there is none such in {interviews}/a.eaf"


def test_a_signal_is_no_bad_file(interviews, monkeypatch):
    def stopped(path):
        raise Stopped("stopped by SIGTERM", 143)

    monkeypatch.setitem(READERS, ".eaf", stopped)
    with pytest.raises(Stopped):
        load(interviews / "*.eaf")


@pytest.mark.parametrize(
    "name, message",
    [
        ("*.TextGrid", r"\*.TextGrid: no file has such a name"),
        ("*", "a pattern stands for .eaf, .TextGrid, .* and .*a.wav is none"),
        (".", "it is a folder; name a table in it or"),
        ("c.eaf", "manifest .*c.eaf: No such file"),
    ],
)
def test_names_that_stand_for_nothing(interviews, name, message):
    with pytest.raises(UsageError, match=message):
        load(interviews / name)


def test_a_file_whose_name_looks_like_a_pattern(tmp_path, wav):
    wav(tmp_path / "a [1].wav", 5.0)
    path = elan(tmp_path / "a [1].eaf", {"Anna": TALK})
    assert len(load(path)[0]) == 2
    assert files_of(tmp_path / "metadata.csv") == []


# --- audio ----------------------------------------------------------------------------------------


def test_the_audio_that_a_file_names_comes_first(tmp_path, wav):
    wav(tmp_path / "talk.wav", 6.0)
    wav(tmp_path / "a.wav", 5.0)
    path = elan(tmp_path / "a.eaf", {"Anna": TALK}, "/elsewhere/talk.wav", origin=500)
    corpus, _ = load(path)
    assert rows(corpus)[0][:3] == ("talk.wav", 0.5, 1.5)
    os.remove(tmp_path / "talk.wav")
    assert rows(load(path)[0])[0][:3] == ("a.wav", 0.5, 1.5)


@pytest.mark.parametrize("audio", ["a.WAV", "a.flac", "a.ogg"])
@pytest.mark.parametrize("name", ["a.srt", "a.kok.srt"])
def test_audio_of_the_same_name_has_any_ending(tmp_path, wav, audio, name):
    wav(tmp_path / audio, 5.0)
    wav(tmp_path / "b.wav", 5.0)
    (tmp_path / name).write_text(SRT)
    assert rows(load(tmp_path / name)[0])[0][0] == audio


def test_audio_in_another_folder(tmp_path, wav):
    """--audio_root, below which a medium is looked for by the last parts of its path."""
    wav(tmp_path / "audio/day 1/talk.wav", 5.0)
    wav(tmp_path / "audio/b.wav", 5.0)
    root = str(tmp_path / "audio")
    path = elan(tmp_path / "a.eaf", {"Anna": TALK}, "file:///D:/tapes/day%201/talk.wav")
    assert rows(load(path, audio_root=root)[0])[0][0] == "talk.wav"
    assert hours_of(tmp_path / "a.eaf", root) == pytest.approx(3 / 3600)
    path = elan(tmp_path / "b.eaf", {"Anna": TALK})
    assert rows(load(path, audio_root=root)[0])[0][0] == "b.wav"
    elan(tmp_path / "new [2]/day 1/talk.eaf", {"Anna": TALK})  # the folders have the same names
    (tmp_path / "new [2]/day 1/talk.srt").write_text(SRT)
    for name in ("*.eaf", "talk.srt"):
        corpus, _ = load(tmp_path / "new [2]/day 1" / name, audio_root=root)
        assert rows(corpus)[0][0] == "talk.wav"
    with pytest.raises(DataError, match=f"put c.wav .* into {root}"):
        load(elan(tmp_path / "c.eaf", {"Anna": TALK}), audio_root=root)


def test_times_are_checked_against_the_audio(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    talk = [(0.0, 1.0, "one"), (4.0, 5.05, "ends late"), (4.5, 6.0, "far"), (7.0, 8.0, "beyond")]
    corpus, rejected = load(elan(tmp_path / "a.eaf", {"Anna": talk}))
    assert rows(corpus)[1][1:4] == (4.0, 1.0, "ends late")
    assert rejected.counts == {"segment ends beyond the file": 2}
    (far, _) = rejected.examples["segment ends beyond the file"]
    assert far == f"{tmp_path}/a.wav at 4.50 s (0.50 s)"


def test_two_files_with_the_texts_of_one_recording_are_asked_about(tmp_path, wav):
    wav(tmp_path / "a.wav", 9.0)
    times = "1\n00:00:0{},100 --> 00:00:0{},900\n{}\n"
    (tmp_path / "a.en.srt").write_text(times.format(1, 2, "one"))
    (tmp_path / "a.fr.srt").write_text(times.format(1, 2, "un"))
    with pytest.raises(UsageError, match=r"which has the texts of .*: a\.en\.srt or a\.fr\.srt\?"):
        load(tmp_path / "*.srt")
    (tmp_path / "a.fr.srt").write_text(times.format(4, 6, "deux"))  # of another part
    assert sorted(load(tmp_path / "*.srt")[0].texts) == ["deux", "one"]


def test_a_second_recording_is_noted(tmp_path, wav):
    for name in "ab":
        wav(tmp_path / f"{name}.wav", 9.0)
    path = elan(tmp_path / "t.eaf", {"Anna": TALK}, "a.wav")
    (before, media, after) = re.split("(<MEDIA_DESCRIPTOR.*?/>)", (tmp_path / "t.eaf").read_text())
    both = f"{before}{media}{media.replace('a.wav', 'b.wav')}{after}"
    (tmp_path / "t.eaf").write_text(both)
    corpus, rejected = load(path)
    assert set(corpus.paths) == {str(tmp_path / "a.wav")}
    assert list(rejected.notes.counts) == [
        "the file names several recordings: its times are taken in one of them"
    ]


def test_overlaps_are_noted_and_used(tmp_path, wav):
    wav(tmp_path / "a.wav", 9.0)
    tiers = {
        "Anna": [(0.0, 3.0, "one"), (3.0, 4.0, "two"), (6.0, 8.0, "three")],
        "Berta": [(1.0, 2.0, "yes"), (3.95, 5.0, "hardly"), (7.0, 8.5, "no")],
    }
    corpus, rejected = load(elan(tmp_path / "a.eaf", tiers, Anna="Anna K."), tiers=("*",))
    assert len(corpus) == 6 and not rejected.total
    assert rejected.notes.counts == {"annotation overlaps another speaker's": 2}
    (examples,) = rejected.notes.examples.values()
    assert examples == [
        f"{tmp_path}/a.wav at 1.00 s: Berta and Anna K.",
        f"{tmp_path}/a.wav at 7.00 s: Berta and Anna K.",
    ]


def test_times_that_cannot_be_are_rejected(tmp_path, wav):
    wav(tmp_path / "a.wav", 5.0)
    path = tmp_path / "a.txt"
    path.write_text("0\t1\tone\n-1\t1\tbefore\n2.004\t2.0021\tback\n1\t2e999\tfar\n")
    corpus, rejected = load(path)
    assert len(corpus) == 1 and rejected.total == 3
    (examples,) = rejected.examples.values()
    assert f"{path}: 2.004 to 2.0021 s: back" in examples
