"""Data sets with labels in place of texts: keywords, and a label for every frame."""

import json

import numpy as np
import pytest
import soundfile

from common.errors import DataError
from speech.data import splits
from speech.data.loading import Checks, load_corpus
from speech.writing.text import normalise

RATE = 16_000
LABELS = Checks(needs="label")


@pytest.fixture
def clips(tmp_path):
    """clips(rows) writes a second of noise for each row, and the manifest; returns its path."""

    def write(rows: list[dict], name: str = "m.json") -> str:
        random = np.random.default_rng(0)
        lines = []
        for number, row in enumerate(rows):
            file = f"{name}-{number}.wav"
            soundfile.write(tmp_path / file, random.uniform(-0.5, 0.5, RATE), RATE)
            lines.append(json.dumps({"audio_filepath": file, **row}) + "\n")
        (tmp_path / name).write_text("".join(lines))
        return str(tmp_path / name)

    return write


def load(path, checks=LABELS):
    return load_corpus(path, normalise, checks)


def labels(corpus) -> list:
    return [corpus.label(index) for index in range(len(corpus))]


def test_labels_are_numbers_strings_and_lists(clips):
    values = [3, -0.5, "yes", "7", [0, 1, 1, 0], ["sil", "speech"], [], "कोंकणी"]
    corpus, rejected = load(clips([{"label": value} for value in values]))
    assert labels(corpus) == values and not rejected.total
    assert list(corpus.texts) == [""] * len(values)
    assert labels(corpus.select([4, 0])) == [[0, 1, 1, 0], 3]


def test_a_table_has_numbers_and_words(tmp_path, clips):
    clips([{}] * 6, "a.json")
    cells = ["3", " -2.5e1", "yes", "nan", "1_000", "007"]
    rows = [f"a.json-{number}.wav,{cell}\n" for number, cell in enumerate(cells)]
    (tmp_path / "m.csv").write_text("file_name,label\n" + "".join(rows))
    corpus, _ = load(str(tmp_path / "m.csv"))
    assert labels(corpus) == [3, -25.0, "yes", "nan", "1_000", 7]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"text": "yes"}, "no label field"),
        ({"label": None}, "label is empty"),
        ({"label": ""}, "label is empty"),
        ({"label": float("nan")}, "label is not finite"),
        ({"label": "\udce9"}, "line is not UTF-8"),
    ],
)
def test_what_is_no_label_is_rejected(clips, row, reason):
    corpus, rejected = load(clips([{"label": 1}, row]))
    assert labels(corpus) == [1] and dict(rejected.counts) == {reason: 1}


@pytest.mark.parametrize("label", [True, {"a": 1}, [[0.2, 0.9], [1.8, 2.3]]])
def test_a_label_of_a_wrong_type_is_an_error(clips, label):
    """The whole table is made for something else: what is left must not be trained on."""
    with pytest.raises(DataError, match=r"label is .*: it must be a number, a string or a list"):
        load(clips([{"label": 1}, {"label": label}]))


def test_silence_may_be_a_class(tmp_path, clips, capsys):
    path = clips([{"label": "noise"}, {"label": "silence"}])
    soundfile.write(tmp_path / "m.json-1.wav", np.zeros(RATE), RATE)
    corpus, rejected = load(path, Checks(needs="label", listen=True))
    assert labels(corpus) == ["noise", "silence"] and not rejected.total
    assert dict(rejected.notes.counts) == {"audio is silent": 1}


def test_pieces_of_a_recording_have_its_label(tmp_path, clips):
    segments = [{"start": start, "end": start + 0.4, "text": "a"} for start in (0.0, 0.5)]
    rows = [{"label": label, "segments": segments} for label in ("yes", [0, 1])]
    corpus, rejected = load(
        clips(rows), Checks(needs="label", use_chunking=True, max_duration=0.45)
    )
    assert labels(corpus) == ["yes", "yes"] and corpus.offsets.tolist() == [0.0, 0.5]
    assert rejected.counts == {"a list of labels cannot be cut (--use_chunking)": 1}


def test_classes_are_in_every_set(clips, capsys):
    rows = [{"label": word, "text": word} for word in ("yes", "no")]
    train, val = clips(rows, "train.json"), clips(rows, "val.json")
    for checks, shared in ((Checks(), 2), (LABELS, 0)):
        corpora = splits.read_manifests({"train": train, "val": val}, normalise, checks)
        capsys.readouterr()
        splits.report_checked(corpora)
        out = capsys.readouterr().out
        assert out.count("text is in the training set, too") == (shared > 0)
        assert "checked: 2 utterances in train, 2 utterances in val can be used" in out
    splits.report_checked(splits.read_manifests({"train": train, "val": train}, normalise, LABELS))
    assert "2  audio is in the training set, too" in capsys.readouterr().out


def test_a_stand_in_has_labels():
    corpus = splits.stand_in(1.0, labels=["yes", "no"])["train"]
    assert labels(corpus)[:3] == ["yes", "no", "yes"]
