"""The flags of replayed and of watched sets, and what these share with the training set."""

import json

import pytest

from common import options
from common.errors import UsageError
from speech.data import replay, splits, watching
from speech.data.columns import Strings
from tests.speech.data import sets


def test_what_is_replayed_is_a_set():
    args = sets.parse("--replay_manifest", "old.json")
    assert args.replay_share == 0.1
    assert splits.resolve(args).manifests == {"train": ["t.json"], "replay": ["old.json"]}


def test_watched_sets_are_called_after_their_files():
    args = sets.parse("--watch_manifest", "a/dev.json", "--watch_manifest", "b/dev.json")
    assert args.stop_when_watched_rises is None
    assert splits.resolve(args).manifests == {
        "train": ["t.json"],
        "watched dev": ["a/dev.json"],
        "watched b/dev": ["b/dev.json"],
    }
    assert watching.watched({"val": 1, "watched dev": 3}, None).sets == {"dev": 3}
    assert watching.watched({"val": 1}, None) is None


def test_a_set_that_is_watched_twice_is_refused():
    with pytest.raises(UsageError, match="same name"):
        sets.parse("--watch_manifest", "a/b.json", "--watch_manifest", "a/b.json")


def test_a_flag_that_is_repeated_has_all_its_values():
    parser = options.Parser("")
    parser.add_argument("--a", action=options.Repeated, nargs="+")
    assert parser.parse_args([]).a is None
    args = parser.parse_args(["--a", "1", "--a", "2", "3"])
    assert args.a == ["1", "2", "3"] and args.given == {"a"}


def test_what_sets_share_with_old_material_or_with_the_training_set_is_told(manifests, capsys):
    sets.read(manifests, train="new", val="both", replay="old")
    out = capsys.readouterr().out
    assert "val set: 1 noted" in out and "audio is in the replay set, too" in out
    corpora = sets.read(manifests, train="new", val="val", watch="both")
    out = capsys.readouterr().out
    assert "watched both set: 1 noted" in out and "text is in the training set, too" in out
    assert "val set: 1 noted" not in out
    info = splits.run_info(splits.resolve(sets.parse("--val_manifest", "v")), corpora)
    assert set(info.sets) == {"train", "val"}
    sets.read(manifests, train="new", val="val", replay="old", watch="other")
    assert "noted" not in capsys.readouterr().out


def test_a_vocabulary_is_made_of_all_texts_that_are_trained_on(manifests):
    corpora = sets.read(manifests, train="new", val="val", replay="old")
    texts = replay.texts(corpora)
    assert isinstance(texts, Strings)
    assert sorted(texts) == [f"{name} {i}" for name in ("new", "old") for i in range(3)]
    info = splits.run_info(splits.resolve(sets.parse("--val_manifest", "v")), corpora)
    assert set(info.sets) == {"train", "replay", "val"} and info.longest == 3.0
    assert json.dumps(info.sets)
