"""What --transcribe writes beside JSON Lines: files for ELAN and Praat, and copies of .eaf in which the
annotations of a tier were heard."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from pympi import Elan

from common import options
from common.device import Setup
from common.errors import DataError, UsageError
from speech.data import splits
from speech.data.annotations import elan, praat
from speech.decoding import recogniser, transcribing, transcripts
from speech.signal.audio import SAMPLE_RATE


def asked(*words, has_times: bool = True) -> recogniser.DecodingOptions:
    """What a command with these words asks for."""
    parser = options.Parser("test")
    recogniser.add_arguments(parser)
    splits.add_arguments(parser)
    options.add_arguments(parser)
    args = parser.parse_args([str(word) for word in words])
    args.log_dir = Path("logs")
    splits.resolve(args)
    return recogniser.resolve(args, is_demo=False, has_times=has_times)


def louder(batch: dict) -> list[dict]:
    """Hears a waveform's level in tenths as a letter, in a word that is doubtful if it is an a."""
    found = []
    for waveform, length in zip(batch["audio"], batch["audio_lengths"], strict=True):
        letter = "-abcdefghi"[round(10 * float(waveform[:length].abs().max()))]
        seconds = int(length) / SAMPLE_RATE
        word = {"start": 0.0, "end": seconds, "text": letter}
        word["confidence"] = 0.2 if letter == "a" else 0.9
        found.append({"text": letter, "words": [word], "segments": [dict(word)]})
    return found


def run(*words) -> None:
    parts = ("words", "segments")
    transcribing.transcribe_files(asked(*words), louder, Setup(), 30.0, parts=parts)


def tape(path: Path, *levels: float) -> Path:
    """A recording with a level for each second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.repeat(np.array(levels), SAMPLE_RATE)
    soundfile.write(path, samples, SAMPLE_RATE, subtype="FLOAT")
    return path


@pytest.fixture
def talk(tmp_path):
    """tapes/talk.eaf of three seconds: a tier with a text, an empty annotation and one after the
    end of the audio, glosses below it, and a tier with two texts below each."""
    tape(tmp_path / "tapes" / "talk.wav", 0.1, 0.2, 0.3)
    file = Elan.Eaf()
    file.remove_tier("default")
    file.add_linguistic_type("gloss", constraints="Symbolic_Association")
    file.add_linguistic_type("word", constraints="Symbolic_Subdivision")
    file.add_tier("tx", part="Anna")
    for second, text in enumerate(["told", "", "", "after"]):
        file.add_annotation("tx", 1000 * second, 1000 * second + 1000, text)
    file.add_tier("gl", "gloss", "tx")
    file.add_ref_annotation("gl", "tx", 1500, "gloss")
    file.add_tier("mb", "word", "tx")
    for word in ("one", "two"):
        file.add_ref_annotation("mb", "tx", 500, word)
    file.add_tier("ge", "gloss", "mb")
    file.add_ref_annotation("ge", "mb", 500, "eins")
    path = tmp_path / "tapes" / "talk.eaf"
    file.to_file(str(path))
    return path


def texts_of(path: Path, name: str) -> list[tuple]:
    (tier,) = [tier for tier in elan.read(path).tiers if tier.name == name]
    return [each[:3] for each in tier.annotations]


# --- segments that exist --------------------------------------------------------------------------


def test_the_annotations_of_a_tier_are_heard_beside_what_was_there(talk, tmp_path, capsys):
    before = talk.read_bytes()
    run("--transcribe", tmp_path / "tapes/*.eaf", "--tier", "tx", "--output", tmp_path / "out")
    copy = tmp_path / "out" / "talk.eaf"
    expected = [(0, 1, "a"), (1, 2, "b"), (2, 3, "c")]
    assert texts_of(copy, "tx-draft") == expected
    assert texts_of(copy, "tx-doubtful") == [(0, 1, "? a")]
    assert talk.read_bytes() == before
    tiers, old = elan.read(copy).tiers, elan.read(talk).tiers
    assert tiers[: len(old)] == old
    printed = capsys.readouterr().out
    assert "new tiers tx-draft (3), tx-doubtful (1) in" in printed
    assert "after the end of the recording, left out: 1" in printed


def test_only_the_empty_ones(talk, tmp_path):
    words = ("--transcribe", talk, "--tier", "tx", "--output", tmp_path / "x.eaf")
    run(*words, "--only_empty")
    assert texts_of(tmp_path / "x.eaf", "tx-draft") == [(1, 2, "b"), (2, 3, "c")]


def test_a_tier_below_another_has_its_times_unless_several_share_them(talk, tmp_path, capsys):
    words = ("--transcribe", talk, "--tier", "gl", "mb", "--output", tmp_path / "x.eaf")
    run(*words)
    assert texts_of(tmp_path / "x.eaf", "gl-draft") == [(1, 2, "b")]
    assert "without a time of their own, left out: 2" in capsys.readouterr().out
    for tier in ("mb", "ge"):  # a gloss has its word alone, but the word shares its time
        with pytest.raises(DataError, match="no annotation of the tier has a time of its own"):
            run("--transcribe", talk, "--tier", tier, "--output", tmp_path / "y.eaf")


def test_copies_of_folders(talk, tmp_path):
    for day in ("1", "2"):
        tape(tmp_path / f"tapes/day {day}/talk.wav", 0.1, 0.2, 0.3)
        (tmp_path / f"tapes/day {day}/talk.eaf").write_bytes(talk.read_bytes())
    run("--transcribe", tmp_path / "tapes/**/*.eaf", "--tier", "tx", "--output", tmp_path / "out")
    copies = [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.eaf")]
    assert sorted(copies) == ["day 1/talk.eaf", "day 2/talk.eaf", "talk.eaf"]


def test_a_file_without_audio_is_named_and_the_others_are_heard(talk, tmp_path, capsys):
    other = talk.with_name("other.eaf")
    other.write_bytes(talk.read_bytes())
    words = ("--transcribe", talk, other, "--tier", "tx", "--output", tmp_path / "out")
    with pytest.raises(DataError, match="1 of 2 files could not be transcribed"):
        run(*words)
    assert "other.eaf: its audio is missing" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["talk.eaf"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("{talk} --output {here}/out", r"which tier is to be heard\? Add --tier NAME\n"),
        ("{talk} --output {here}/out --tier no", "--tier no: there is no annotation of such a"),
        ("{talk} --tier tx", "--output: of .eaf, copies are written; name a folder"),
        ("{talk} --tier tx --output {here}/tapes", "this command reads it"),
        ("{talk} --tier tx --output {talk}", "this command reads it"),
        ("{talk} --tier tx --output {here}/x.srt", "copies are written; name a folder"),
        ("{talk} --tier tx --output {here}/x --output_format srt", "copies are written; name a f"),
        ("{talk} {wav} --tier tx --output {here}/x", "files of annotations or recordings, not bot"),
        ("{wav} --tier tx --output {here}/x.jsonl", "--tier: --transcribe names no .eaf"),
        ("{wav} --only_empty", "--only_empty: --transcribe names no .eaf"),
    ],
)
def test_requests_for_copies_that_are_refused(talk, tmp_path, words, message):
    before = talk.read_bytes()
    places = {"talk": talk, "wav": talk.with_suffix(".wav"), "here": tmp_path}
    with pytest.raises(UsageError, match=message):
        asked("--transcribe", *words.format(**places).split())
    assert talk.read_bytes() == before


# --- a file for each recording --------------------------------------------------------------------


@pytest.mark.parametrize("form", recogniser.FORMS)
def test_each_recording_has_a_file_of_its_name(form, tmp_path):
    tapes = tape(tmp_path / "tapes" / "a.wav", 0.1, 0.1).parent
    tape(tapes / "day" / "b.c.wav", 0.2)
    output = tmp_path / "new" / "drafts"
    words = ("--transcribe", tapes, "--output", output, "--output_format", form)
    run(*words)
    run(*words)  # what this command wrote is replaced
    found = sorted(path.relative_to(output) for path in output.rglob(f"*.{form}"))
    assert found == [Path(f"a.{form}"), Path(f"day/b.c.{form}")]
    first = output / f"a.{form}"
    if form == "jsonl":
        row = json.loads(first.read_text(encoding="utf-8"))
        assert row["file"] == str(tapes / "a.wav") and row["text"] == "a"
    if form == "eaf":
        document = elan.read(first)
        assert [tier.name for tier in document.tiers] == [
            *("utterances", "draft", "doubtful"),
            *("words", "confidence"),
        ]
        assert texts_of(first, "utterances") == texts_of(first, "words") == [(0, 2, "a")]
        assert document.media[0].path == str(tapes / "a.wav")
        assert (first.parent / document.media[0].relative).samefile(tapes / "a.wav")
    if form == "TextGrid":
        (tier,) = [tier for tier in praat.read(first).tiers if tier.name == "doubtful"]
        assert tier.annotations == [(0, 2, "? a", "")]


def test_pieces_are_utterances_if_they_were_asked_for(tmp_path):
    path = tape(tmp_path / "a.wav", *[0.1] * 4)
    run("--transcribe", path, "--output", tmp_path / "a.eaf", "--piece_seconds", 2)
    spans = texts_of(tmp_path / "a.eaf", "utterances")
    assert len(spans) > 1 and spans[0][0] == 0 and spans[-1][1] == 4
    assert [text for *_, text in spans] == ["a"] * len(spans)


def test_words_belong_to_the_utterance_of_their_middle():
    words = [{"start": a, "end": b, "text": t} for a, b, t in [(0, 1, "x"), (0.9, 2, "y")]]
    pieces = [{"start": 0, "end": 1, "text": "x"}, {"start": 1, "end": 2, "text": "y"}]
    row = {"text": "x y", "pieces": pieces, "segments": [], "words": words}
    found = transcripts.utterances_of(row, by_piece=False)
    assert [[word["text"] for word in each["words"]] for each in found] == [["x"], ["y"]]
    assert [each["draft"] for each in found] == ["x", "y"]
    row["segments"] = [{"start": 0, "end": 2, "text": "x y"}]
    assert [each["text"] for each in transcripts.utterances_of(row, False)] == ["x y"]
    assert [each["text"] for each in transcripts.utterances_of(row, True)] == ["x", "y"]


def test_what_a_person_has_saved_is_not_replaced(tmp_path):
    path = tape(tmp_path / "a.wav", 0.1)
    words = ("--transcribe", path, "--output", tmp_path / "d", "--output_format", "eaf")
    run(*words)
    file = Elan.Eaf(str(tmp_path / "d" / "a.eaf"))
    file.to_file(str(tmp_path / "d" / "a.eaf"))
    with pytest.raises(UsageError, match="somebody has changed it"):
        asked(*words)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "a.wav --output a.tsv",
            ".tsv cannot be written; name a file .json, .jsonl, .eaf, .TextGrid",
        ),
        ("a.wav --output a.ASS", ".ass cannot be written"),
        ("a.wav a.flac --output x.eaf", "it is of one recording, and 2 are named"),
        ("a.wav a.flac --output x --output_format eaf", "both would be written to x/a.eaf"),
        ("a.wav --output x.eaf --output_format eaf", "with --output_format eaf it is a folder"),
        ("a.wav --output .", "it is a folder; add --output_format eaf"),
        ("a.wav --output new/", "it is a folder; add --output_format eaf"),
        ("a.wav --output none/a.eaf", "name a file in a folder that can be written"),
        ("a.wav --output a.wav/x --output_format eaf", "Not a directory"),
    ],
)
def test_outputs_that_are_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    tape(Path("a.wav"), 0.1)
    soundfile.write("a.flac", np.zeros(10), SAMPLE_RATE)
    with pytest.raises(UsageError, match=message):
        asked("--transcribe", *words.split())


def test_subtitles_need_times_and_annotations_do_not(tmp_path):
    path = tape(tmp_path / "a.wav", 0.1)
    with pytest.raises(UsageError, match="subtitles need times"):
        asked("--transcribe", path, "--output", tmp_path / "a.vtt", has_times=False)
    how = asked("--transcribe", path, "--output", tmp_path / "a.eaf", has_times=False)
    transcribing.transcribe_files(how, lambda batch: ["a b"], Setup(), 30.0)
    assert texts_of(tmp_path / "a.eaf", "utterances") == [(0, 1, "a b")]


def test_a_stream_is_written_as_it_comes():
    output = transcripts.output_of("x.srt", None, None)
    assert list(output.files.values()) == [Path("x.srt")] and output.table is None
    assert transcripts.output_of("x.jsonl", None, None).table == Path("x.jsonl")
    with pytest.raises(UsageError, match=r"a stream is written as .jsonl, .srt or .vtt"):
        transcripts.output_of("x.eaf", None, None)
