"""The flags of replayed and watched sets, and what sets share."""

import json

import pytest

from common import options
from common.errors import UsageError
from recipes import parakeet_tdt
from speech.data import replay, splits
from speech.data.columns import Strings
from tests.recipes import runs


def parse(*flags):
    return resolved("--train_manifest", "t.json", *flags)


def resolved(*flags):
    args = runs.parse(parakeet_tdt, "--from_scratch", *flags)
    parakeet_tdt.resolve(args)
    return args


def test_sets_are_called_after_their_files():
    args = parse(
        *("--replay_manifest", "old.json", "--watch_manifest", "a/dev.json"),
        *("--watch_manifest", "b/dev.json"),
    )
    assert args.replay_share == 0.1 and args.stop_when_watched_rises is None
    assert splits.resolve(args).manifests == {
        "train": "t.json",
        "replay": "old.json",
        "watched dev": "a/dev.json",
        "watched b/dev": "b/dev.json",
    }
    watched = replay.watched({"val": 1, "replay": 2, "watched dev": 3}, 0.5)
    assert (watched.sets, watched.most_rise) == ({"dev": 3}, 0.5)
    assert replay.watched({"val": 1}, None) is None


def test_the_same_file_twice_is_refused():
    args = parse("--watch_manifest", "a/dev.json", "--watch_manifest", "a/dev.json")
    with pytest.raises(UsageError, match="it, or one of the same name, is given"):
        splits.resolve(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train_manifest t --replay_share 0.2", "replay_share goes with --replay_manifest"),
        (
            "--train_manifest t --stop_when_watched_rises 0.2",
            "stop_when_watched_rises goes with --watch_manifest",
        ),
        ("--replay_manifest r", "replay_manifest goes with --train_manifest"),
        ("--watch_manifest r", "watch_manifest goes with --train_manifest"),
        ("--evaluate --test_manifest t --watch_manifest w", "the first is for training"),
        ("--transcribe a.wav --replay_manifest w", "the first is for training"),
    ],
)
def test_flags_that_make_no_sense(flags, message):
    _, err = runs.refused(parakeet_tdt, *flags.split())
    assert message in err


@pytest.mark.parametrize("value", ["0", "1.1", "nan", "-0.1"])
def test_shares_that_make_no_sense(value):
    with pytest.raises(SystemExit):
        parse("--replay_share", value)


def test_a_flag_that_is_repeated_has_all_its_values():
    parser = options.Parser("")
    parser.add_argument("--a", action=options.Repeated, nargs="+")
    assert parser.parse_args([]).a is None
    args = parser.parse_args(["--a", "1", "--a", "2", "3"])
    assert args.a == ["1", "2", "3"] and args.given == {"a"}


@pytest.fixture
def manifests(tmp_path, wav, json_lines) -> dict[str, str]:
    """Sets of three, called after a letter; "both" has the first of "old" and one of "other"."""
    rows = {
        name: [
            {"audio_filepath": wav(tmp_path / f"{name}{i}.wav", 1.0 + i), "text": f"{name} {i}"}
            for i in range(3)
        ]
        for name in ("new", "old", "val", "other")
    }
    rows["both"] = [rows["old"][0], rows["other"][1], {**rows["other"][2], "text": "new 1"}]
    return {name: str(json_lines(tmp_path / f"{name}.json", some)) for name, some in rows.items()}


def read(manifests, **sets):
    words = [
        word for name, value in sets.items() for word in (f"--{name}_manifest", manifests[value])
    ]
    data = splits.resolve(resolved(*words))
    return splits.load_splits(data, str)


def test_what_evaluation_sets_share_with_old_material_is_told(manifests, capsys):
    read(manifests, train="new", val="both", replay="old")
    out = capsys.readouterr().out
    assert "val set: 1 noted" in out and "audio is in the replay set, too" in out
    read(manifests, train="new", val="val", replay="old", watch="both")
    out = capsys.readouterr().out
    assert "watched both set: 2 noted" in out and "audio is in the replay set, too" in out
    assert "text is in the training set, too" in out and "val set: 1 noted" not in out
    read(manifests, train="new", val="val", replay="old", watch="other")
    assert "noted" not in capsys.readouterr().out


def test_a_vocabulary_is_made_of_all_texts_that_are_trained_on(manifests):
    corpora = read(manifests, train="new", val="val", replay="old", watch="other")
    texts = replay.texts(corpora)
    assert isinstance(texts, Strings) and sorted(texts) == [
        *(f"new {i}" for i in range(3)),
        *(f"old {i}" for i in range(3)),
    ]
    info = splits.run_info(splits.resolve(parse("--val_manifest", "v")), corpora)
    assert set(info.sets) == {"train", "replay", "val"} and info.longest == 3.0
    assert json.dumps(info.sets)
