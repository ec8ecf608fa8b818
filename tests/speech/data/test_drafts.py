"""Drafts of a recogniser become training data, and never evaluate."""

import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from common.errors import DataError
from models import card
from speech.data import splits
from speech.data.drafts import confidence
from speech.data.loading import Checks
from speech.data.splits import RunInfo
from speech.writing.text import normalise


def transcript(pieces: list[dict]) -> str:
    words = []
    for each in pieces:
        if "sure" in each:
            words.append({**each, "confidence": each.pop("sure")})
    row = {"file": "tape.wav", "text": "all", "seconds": 8.0, "pieces": pieces, "words": words}
    return json.dumps(row) + "\n"


def piece(number: int, text: str, **more) -> dict:
    return {"start": 2.0 * number, "end": 2.0 * number + 2, "text": text, **more}


def drafts(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "speech.data.drafts", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def tape(tmp_path):
    noise = np.random.default_rng(0).normal(0, 0.1, 8 * 16_000)
    soundfile.write(tmp_path / "tape.wav", noise, 16_000)
    pieces = [
        piece(0, "a b c d e", sure=0.9),
        piece(1, "a b c d f", sure=0.9),
        piece(2, "x", sure=0.7),
        piece(3, ""),
    ]
    (tmp_path / "drafts.jsonl").write_text(transcript(pieces))
    plain = [piece(0, "a b c d e", sure=0.9), piece(1, "a b q d", sure=0.8), piece(2, "x")]
    (tmp_path / "plain.jsonl").write_text(transcript(plain))
    return tmp_path


def test_what_is_sure_is_kept_and_the_rest_is_counted(tape):
    (tape / "new").mkdir()
    flags = ["--min_confidence", 0.8, "--without_lm", tape / "plain.jsonl"]
    output = tape / "new/more.json"
    done = drafts(tape / "drafts.jsonl", *flags, "--output", output)
    assert done.returncode == 0, done.stderr
    for reason in (
        "kept: 1 of 4 pieces, 0.0 minutes",
        "confidence below 0.8: 1 of 4",
        "over 10 % of it is different without the language model: 1 of 4",
        "no speech was heard: 1 of 4",
    ):
        assert reason in done.stdout
    assert json.loads(output.read_text()) == {
        "audio_filepath": "../tape.wav",
        "offset": 0.0,
        "duration": 2.0,
        "text": "a b c d e",
        "confidence": 0.9,
        "drafted": True,
    }
    again = drafts(tape / "drafts.jsonl", *flags, "--output", output)
    assert again.returncode == 2 and "is there already" in again.stderr


@pytest.mark.parametrize(
    "content, message",
    [
        ("{}", "drafts.jsonl:1 is no transcript"),
        (transcript([piece(0, "a")]), "nothing is kept"),
        (transcript([piece(0, "a", sure=0.1)]), "nothing is kept"),
    ],
)
def test_what_gives_nothing_is_one_line(tape, content, message):
    (tape / "drafts.jsonl").write_text(content)
    done = drafts(tape / "drafts.jsonl", "--min_confidence", 0.5, "--output", tape / "more.json")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tape / "more.json").exists()


def manifest(tape, name: str, marks: list[bool]):
    rows = []
    for number, mark in enumerate(marks):
        row = {"audio_filepath": "tape.wav", "offset": number / 2, "duration": 0.5, "text": "a"}
        rows.append(json.dumps({**row, "drafted": True} if mark else row) + "\n")
    (tape / name).write_text("".join(rows))
    return str(tape / name)


def test_drafts_never_evaluate(tape, capsys):
    checks = Checks(listen=False)
    mixed = manifest(tape, "mixed.json", [True] * 10 + [False] * 5)
    for seed in range(5):
        held = splits.read_manifests({"train": mixed}, normalise, Checks(listen=False, seed=seed))
        assert not held["val"].drafted.any() and held["train"].drafted.sum() == 10
        assert len(held["train"].written_texts()) == len(held["train"]) - 10
    corpora = splits.read_manifests({"train": mixed, "test": mixed}, normalise, checks)
    assert len(corpora["test"]) == 5
    assert "a recogniser wrote the text, which can judge none" in capsys.readouterr().out
    sets = splits.about_sets(corpora)
    assert sets["train"]["drafted"] == 10 and sets["test"]["drafted"] == 0
    about = card.About("template", data=RunInfo([], 2.0, False, sets))
    assert "A recogniser wrote the texts of 10 of these utterances." in card.data_table(about)
    drafted = manifest(tape, "drafted.json", [True] * 3)
    with pytest.raises(DataError, match="a recogniser wrote all training texts: add --val_manif"):
        splits.read_manifests({"train": drafted}, normalise, checks)


def test_the_confidence_of_a_piece_is_that_of_its_words():
    words = [
        {"start": 0.0, "end": 1.0, "text": "abc", "confidence": 0.8},
        {"start": 1.9, "end": 2.2, "text": "d", "confidence": 0.4},  # most of it is in the next
        {"start": 2.5, "end": 3.0, "text": "e"},
    ]
    assert confidence(words, 0.0, 2.0) == 0.8
    assert confidence(words, 0.0, 4.0) == 0.7
    assert confidence(words[2:], 0.0, 4.0) is None
