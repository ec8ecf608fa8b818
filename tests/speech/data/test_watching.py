"""The flags of watched sets, and what these share with the training set."""

import pytest

from common import options
from common.errors import UsageError
from speech.data import splits, watching
from tests.speech.data import sets


def test_sets_are_called_after_their_files():
    args = sets.parse("--watch_manifest", "a/dev.json", "--watch_manifest", "b/dev.json")
    assert args.stop_when_watched_rises is None
    assert splits.resolve(args).manifests == {
        "train": ["t.json"],
        "watched dev": ["a/dev.json"],
        "watched b/dev": ["b/dev.json"],
    }
    assert watching.watched({"val": 1, "watched dev": 3}, None).sets == {"dev": 3}
    assert watching.watched({"val": 1}, None) is None


def test_the_same_file_twice_is_refused():
    with pytest.raises(UsageError, match="it, or one of the same name, is given"):
        sets.parse("--watch_manifest", "a/dev.json", "--watch_manifest", "a/dev.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--train_manifest t --stop_when_watched_rises 0.2",
            "stop_when_watched_rises goes with --watch_manifest",
        ),
        ("--watch_manifest r", "watch_manifest goes with --train_manifest"),
        ("--evaluate --test_manifest t --watch_manifest w", "the first is for training"),
    ],
)
def test_flags_that_make_no_sense(flags, message):
    with pytest.raises(UsageError, match=message):
        sets.resolved(*flags.split())


def test_a_flag_that_is_repeated_has_all_its_values():
    parser = options.Parser("")
    parser.add_argument("--a", action=options.Repeated, nargs="+")
    assert parser.parse_args([]).a is None
    args = parser.parse_args(["--a", "1", "--a", "2", "3"])
    assert args.a == ["1", "2", "3"] and args.given == {"a"}


def test_what_watched_sets_share_with_the_training_set_is_told(manifests, capsys):
    corpora = sets.read(manifests, train="new", val="val", watch="both")
    out = capsys.readouterr().out
    assert "watched both set: 1 noted" in out and "text is in the training set, too" in out
    assert "val set: 1 noted" not in out
    info = splits.run_info(splits.resolve(sets.parse("--val_manifest", "v")), corpora)
    assert set(info.sets) == {"train", "val"}
    sets.read(manifests, train="new", val="val", watch="other")
    assert "noted" not in capsys.readouterr().out
