"""The flags of replayed material, and what sets share with it."""

import json

import pytest

from common.errors import UsageError
from speech.data import replay, splits
from speech.data.columns import Strings
from tests.speech.data import sets


def test_what_is_replayed_is_a_set():
    args = sets.parse("--replay_manifest", "old.json")
    assert args.replay_share == 0.1
    assert splits.resolve(args).manifests == {"train": ["t.json"], "replay": ["old.json"]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train_manifest t --replay_share 0.2", "replay_share goes with --replay_manifest"),
        ("--replay_manifest r", "replay_manifest goes with --train_manifest"),
        ("--transcribe a.wav --replay_manifest w", "the first is for training"),
    ],
)
def test_flags_that_make_no_sense(flags, message):
    with pytest.raises(UsageError, match=message):
        sets.resolved(*flags.split())


@pytest.mark.parametrize("value", ["0", "1.1", "nan", "-0.1"])
def test_shares_that_make_no_sense(value):
    with pytest.raises(SystemExit):
        sets.parse("--replay_share", value)


def test_what_evaluation_sets_share_with_old_material_is_told(manifests, capsys):
    sets.read(manifests, train="new", val="both", replay="old")
    out = capsys.readouterr().out
    assert "val set: 1 noted" in out and "audio is in the replay set, too" in out
    sets.read(manifests, train="new", val="val", replay="old")
    assert "noted" not in capsys.readouterr().out


def test_a_vocabulary_is_made_of_all_texts_that_are_trained_on(manifests):
    corpora = sets.read(manifests, train="new", val="val", replay="old")
    texts = replay.texts(corpora)
    assert isinstance(texts, Strings)
    assert sorted(texts) == [
        *(f"new {i}" for i in range(3)),
        *(f"old {i}" for i in range(3)),
    ]
    info = splits.run_info(splits.resolve(sets.parse("--val_manifest", "v")), corpora)
    assert set(info.sets) == {"train", "replay", "val"} and info.longest == 3.0
    assert json.dumps(info.sets)
