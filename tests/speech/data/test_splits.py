"""Checked splits: the data flags, held-out data, and rows that are cut by their segment times."""

import json
import math

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from common import options
from common.errors import DataError, UsageError
from common.options import Parser
from speech.data import splits
from speech.data.loading import Checks, load_corpus
from speech.data.splits import load_splits, read_manifests
from speech.signal.audio import read_utterance
from speech.writing.text import normalise

GOOD = {"audio_filepath": "good.wav", "text": "बरें"}

# --- flags ----------------------------------------------------------------------------------------


def parse(*flags):
    parser = Parser("test")
    splits.add_arguments(parser)
    options.add_arguments(parser)
    args = parser.parse_args(["--seed", "3", *flags])
    args.log_dir = splits.Path("logs")
    return args


def checks(*flags):
    return splits.resolve(parse(*flags)).checks


def test_the_flags_become_checks():
    assert checks() == Checks(cache_dir=splits.Path("logs/cache"), seed=3)
    flags = (
        "--min_duration 0.5 --max_duration 9 --audio_root a --max_samples 4 --strict_data"
        " --use_chunking --cache_audio b"
    )
    assert checks(*flags.split()) == Checks(
        min_duration=0.5,
        max_duration=9,
        audio_root="a",
        cache_dir=splits.Path("logs/cache"),
        cache_audio="b",
        use_chunking=True,
        max_samples=4,
        strict=True,
        seed=3,
    )
    before = splits.RunInfo(["a1", "b2"], longest=1.0, demo=True)
    assert splits.resolve(parse(), before).checks.held_out == ("a1", "b2")
    assert splits.resolve(parse(), for_synthesis=True).checks.for_synthesis
    assert not checks().listen  # the demo's audio is known
    for manifest_flag in ("--train_manifest", "--test_manifest"):
        assert checks(manifest_flag, "m.json").listen
        assert not checks(manifest_flag, "m.json", "--no_check_audio").listen
    skipping = ([], ["--skip_bad_audio"], ["--check_data"])
    assert [checks(*flags).skip_bad_audio for flags in skipping] == [False, True, True]


def test_a_check_leaves_no_cache_in_the_current_folder():
    flags = ["--train_manifest", "a.json", "--check_data"]
    assert splits.resolve(parse(*flags)).checks.cache_dir is None
    assert splits.resolve(parse(*flags, "--output_dir", "run")).checks.cache_dir


def test_evaluation_reads_the_test_set_alone():
    paths = {"train": ["a.json", "a.csv"], "val": ["b.json"], "test": ["c.json"]}
    flags = [word for name, path in paths.items() for word in (f"--{name}_manifest", *path)]
    assert splits.resolve(parse(*flags)).manifests == paths
    assert splits.resolve(parse(*flags, "--evaluate")).manifests == {"test": ["c.json"]}
    args = parse("--evaluate", "--min_duration", "40")
    args.long = "d.json"
    data = splits.resolve(args)
    assert data.manifests == {"long": ["d.json"]}
    assert data.checks.listen and data.checks.max_duration == splits.LONGEST_RECORDING
    held_out = splits.resolve(parse("--train_manifest", "a.json", "--evaluate"))
    assert held_out.manifests == {"train": ["a.json"]}


@pytest.mark.parametrize("flags", [["--dry_run", "8GB"], ["--dry_run"], ["--verify_gpu"]])
def test_a_planned_run_keeps_no_cache_and_does_not_listen(flags):
    given = ["--train_manifest", "a.json", "--cache_audio", "b"]
    assert checks(*given).listen and checks(*given).cache_audio == "b"
    planned = splits.resolve(parse(*given, *flags))
    assert planned.planned and not planned.checks.listen
    assert planned.checks.cache_dir is planned.checks.cache_audio is None


def test_without_manifests_there_is_a_demo_a_stand_in_or_an_error(
    tmp_path, wav, json_lines, capsys
):
    def demo():
        return {split: manifest(tmp_path, wav, json_lines, 4) for split in ("train", "val")}

    corpora = load_splits(splits.resolve(parse()), normalise, demo)
    assert list(corpora) == ["train", "val"] and len(corpora["train"]) == 4
    assert "no --train_manifest: using the demo corpus" in capsys.readouterr().out
    planned = splits.resolve(parse("--dry_run"))
    stood_in = load_splits(planned, normalise, demo, lambda: splits.stand_in(3.0))
    assert set(stood_in["train"].seconds) == {3.0}
    own = splits.RunInfo([], longest=1.0, demo=False)
    with pytest.raises(UsageError, match="trained on other data than the demo corpus"):
        load_splits(splits.resolve(parse(), own), normalise, demo)
    assert "using the demo corpus" not in capsys.readouterr().out
    assert load_splits(splits.resolve(parse("--dry_run"), own), normalise, demo, lambda: stood_in)
    with pytest.raises(UsageError, match="there are no data: give --train_manifest"):
        load_splits(splits.resolve(parse()), normalise, stand_in=lambda: splits.stand_in(3.0))


def test_what_a_checkpoint_keeps_about_the_data(tmp_path, wav, json_lines):
    path = manifest(tmp_path, wav, json_lines, 60)
    data = splits.resolve(parse("--train_manifest", path))
    corpora = load_splits(data, normalise)
    kept = splits.run_info(data, corpora)
    assert kept.held_out == splits.held_out_keys(corpora["val"]) and len(kept.held_out) == 6
    assert kept.longest == corpora["train"].seconds.max() and not kept.demo
    data = splits.resolve(parse("--train_manifest", path, "--val_manifest", path))
    assert splits.run_info(data, load_splits(data, normalise)).held_out == []
    of_set = {"utterances": 54, "hours": pytest.approx(54 / 3600), "languages": [], "drafted": 0}
    assert kept.sets["train"] == of_set and kept.sets["val"]["utterances"] == 6
    assert splits.run_info(splits.resolve(parse()), corpora) == splits.RunInfo(
        [], kept.longest, True, kept.sets
    )


def test_the_data_of_a_planned_run_without_data_are_silence_of_the_longest_utterances(capsys):
    corpus = splits.stand_in(11.6)["train"]
    assert "the longest utterances that are taken, 11.6 s" in capsys.readouterr().out
    assert set(corpus.seconds) == {11.6} and len(corpus) == 4096 and len(set(corpus.texts)) == 64
    assert all(text.count(" ") == 45 for text in corpus.texts)  # 4 words a second
    waveform = read_utterance(corpus, 3, 22_050)
    assert waveform.shape == (255_780,) and not waveform.any()
    assert max(map(len, splits.stand_in(30.0, 100)["val"].texts)) <= 100


# --- splits ---------------------------------------------------------------------------------------


def manifest(folder, wav, json_lines, count, name="m.json"):
    wav(folder / "good.wav")
    return json_lines(folder / name, [{**GOOD, "text": f"t{i}"} for i in range(count)])


def read(train: str, **checks):
    return read_manifests({"train": train}, normalise, Checks(**checks))


def test_what_was_held_out_stays_held_out(tmp_path, wav, json_lines, capsys):
    path = manifest(tmp_path / "a", wav, json_lines, 60)
    first = read(path, seed=5)
    held_out, keys = set(first["val"].texts), splits.held_out_keys(first["val"])
    assert len(keys) == 6 and len(set(splits.held_out_keys(first["train"])).union(keys)) == 60
    moved = manifest(tmp_path / "b" / "a", wav, json_lines, 100)  # another place, and new rows
    for seed, count in ((5, None), (6, None), (6, 10), (5, 100)):
        corpora = read(moved, held_out=tuple(keys), seed=seed, max_samples=count)
        rows = splits.draw(100, Checks(seed=seed, max_samples=count))
        assert set(corpora["val"].texts) == held_out and len(rows) == (count or 100)
        assert set(corpora["train"].texts) == {f"t{i}" for i in rows} - held_out
    said = "no --val_manifest: 6 of the 100 training utterances are held out"
    assert said in capsys.readouterr().out
    again = read(path, seed=5, held_out=tuple(keys))
    for split in ("train", "val"):
        assert again[split].fingerprint() == first[split].fingerprint()


def test_a_part_that_is_gone_is_drawn_anew(tmp_path, wav, json_lines, capsys):
    path = manifest(tmp_path, wav, json_lines, 60)
    drawn = read(path, seed=5)
    other = read(path, seed=5, held_out=("0" * 16,))
    assert list(other["val"].texts) == list(drawn["val"].texts)
    said = "the held-out utterances are not in the training set any more: others are drawn"
    assert said in capsys.readouterr().out
    partly = (splits.held_out_keys(drawn["val"])[0], "0" * 16)
    assert len(read(path, seed=6, held_out=partly)["val"]) == 1
    corpora = read_manifests({"train": path, "val": path}, normalise, Checks(held_out=partly))
    assert len(corpora["train"]) == len(corpora["val"]) == 60


def test_rows_that_are_there_twice_are_held_out_together_or_as_before(tmp_path, wav, json_lines):
    wav(tmp_path / "good.wav")
    path = json_lines(tmp_path / "m.json", [{**GOOD, "text": f"t{i % 30}"} for i in range(60)])
    first = read(path, seed=5)
    keys = tuple(splits.held_out_keys(first["val"]))
    again = read(path, seed=5, held_out=keys)
    assert again["train"].fingerprint() == first["train"].fingerprint()
    other = read(path, seed=6, held_out=keys)
    assert not set(other["train"].texts) & set(other["val"].texts) and len(other["val"]) == 12


def test_at_least_one_and_at_most_200_utterances_are_held_out(tmp_path, wav, json_lines):
    for count, held_out in ((2, 1), (4100, 200)):
        corpora = read(manifest(tmp_path, wav, json_lines, count))
        assert (len(corpora["train"]), len(corpora["val"])) == (count - held_out, held_out)
    message = "one utterance is too few to hold one out for evaluation: add --val_manifest"
    with pytest.raises(DataError, match=message):
        read(manifest(tmp_path, wav, json_lines, 1))


def test_max_samples_shortens_the_training_set_only(tmp_path, wav, json_lines, capsys):
    path = manifest(tmp_path, wav, json_lines, 40)
    paths = dict.fromkeys(("train", "val", "test"), path)
    drawn = []
    for seed in (1, 2, 1):
        corpora = read_manifests(paths, normalise, Checks(max_samples=6, seed=seed))
        assert [len(corpora[split]) for split in paths] == [6, 40, 40]
        drawn.append([int(text[1:]) for text in corpora["train"].texts])
        assert drawn[-1] == sorted(drawn[-1]) and drawn[-1] != list(range(6))
    assert drawn[0] == drawn[2] != drawn[1]
    assert "--max_samples: 6 of 40 training utterances are taken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, reason", [("0", "0 is out of range"), ("-2", "-2 is out"), ("1.5", "not a whole number")]
)
def test_the_values_of_max_samples(text, reason, capsys):
    assert [parse("--max_samples", each).max_samples for each in ("-1", "5")] == [None, 5]
    with pytest.raises(SystemExit):
        parse("--max_samples", text)
    assert reason in (said := capsys.readouterr().err) and "(-1 means all)" in said


# --- rows with segment times ----------------------------------------------------------------------


def chunked(path, use_chunking=True):
    return load_corpus(str(path), normalise, Checks(max_duration=10.0, use_chunking=use_chunking))


def timed(*times, text="t", **row):
    parts = [{"start": a, "end": b, "text": f"{text}{i}"} for i, (a, b) in enumerate(times)]
    return {"audio_filepath": "long.wav", "text": "all of it", "segments": parts, **row}


@pytest.fixture
def long_wav(tmp_path, wav):
    return wav(tmp_path / "long.wav", 40.0, 8000)


def pieces(corpus):
    return [
        (round(float(o), 3), round(float(d), 3), text)
        for o, d, text in zip(corpus.offsets, corpus.durations, corpus.texts, strict=True)
    ]


def test_a_long_row_is_cut_into_pieces_of_whole_segments(tmp_path, long_wav, wav, json_lines):
    wav(tmp_path / "good.wav", 3.0)
    rows = [
        GOOD,
        timed((0, 4), (4.5, 10), (12, 14.5), (14.5, 20), (30, 40)),
        {**GOOD, "segments": [{"start": 5, "end": 1}]},  # not read, because the row is short
        timed((1, 3), (3, 12), text="u", offset=20),
        {
            "audio_filepath": "long.wav",
            "segments": [
                {"offset": 0.1, "duration": 0.2, "text": "v"},
                {"offset": 35, "duration": 2, "text": " w "},
            ],
        },
    ]
    corpus, rejected = chunked(json_lines(tmp_path / "m.json", rows))
    assert not rejected.total
    assert [(o, d, t) for o, d, t in pieces(corpus) if d == d] == [
        (0, 10, "t0 t1"),
        (12, 8, "t2 t3"),
        (30, 10, "t4"),
        (21, 2, "u0"),
        (23, 9, "u1"),
        (0.1, 0.2, "v"),
        (35, 2, "w"),
    ]
    assert corpus.lines.tolist() == [1, 2, 2, 2, 3, 4, 4, 5, 5]
    assert corpus.seconds.tolist() == pytest.approx([3, 10, 8, 10, 3, 2, 9, 0.2, 2])
    assert corpus.paths[1] == long_wav and corpus.where(2) == f"{long_wav} at 12.00 s"


ORDER = "segments overlap, or are not in the order of time"
NO_TIMES = "a segment has no times (start and end, or offset and duration)"
NO_LIST = "segments are not a list of objects"
BEYOND = "segment times reach beyond the audio"
ONE_TIME = "segment: only one of start and end is given"
NO_NUMBER = "segment: end is not a number"


def segments(*rows) -> dict:
    return timed() | {"segments": [*rows]}


BAD_SEGMENTS = [
    (timed((0, 4), (3, 6)), ORDER),
    (timed((5, 9), (0, 4)), ORDER),
    (timed((4, 4)), "segment: end is not after start"),
    (timed((-1, 4)), "segment: start is negative"),
    (timed((0, math.nan)), ONE_TIME),
    (timed((0, math.inf)), NO_NUMBER),
    (segments({"text": "a"}), NO_TIMES),
    (segments({"text": "a", "start": 1}), NO_TIMES),
    (segments({"start": 1, "end": 2}), "a segment has no text field"),
    (segments({"start": 1, "end": 2, "text": []}), "a segment's text is not a string"),
    (segments("0-4"), NO_LIST),
    (timed((0, 4), (38, 41)), BEYOND),
    (timed((0, 4), (13, 16), offset=5, duration=15), BEYOND),
]


@pytest.mark.parametrize("row, reason", BAD_SEGMENTS)
def test_impossible_segments_are_rejected_by_file_and_line(
    tmp_path, long_wav, json_lines, row, reason
):
    path = json_lines(tmp_path / "m.json", [timed((0, 4)), row, timed((6, 8))])
    corpus, rejected = chunked(path)
    assert rejected.counts == {reason: 1}
    assert rejected.examples[reason][0].startswith(f"{path}:2")
    assert pieces(corpus) == [(0, 4, "t0"), (6, 2, "t0")]


def test_rounding_of_times_is_tolerated(tmp_path, long_wav, json_lines):
    row = timed((0, 1.1), (1.0995, 11.1), (30.05, 40.05))
    row["segments"].insert(2, {"offset": 11.1, "duration": 10.000000001, "text": "x"})
    corpus, rejected = chunked(json_lines(tmp_path / "m.json", [row]))
    assert not rejected.total
    assert pieces(corpus) == [(0, 1.1, "t0"), (1.1, 10, "t1"), (11.1, 10, "x"), (30.05, 9.95, "t2")]
    assert corpus.seconds.max() <= 10.0


@given(data=st.data())
def test_whatever_the_segments_every_text_is_used_once_or_rejected(tmp_path_factory, data):
    """Rows of random segments over one file of 40 s, checked by brute force."""
    folder = tmp_path_factory.getbasetemp() / "segments"
    if not (folder / "long.wav").exists():
        folder.mkdir(exist_ok=True)
        soundfile.write(folder / "long.wav", np.zeros(40 * 8000), 8000)
    rows, number = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        times = sorted(
            data.draw(st.lists(st.integers(0, 400), min_size=2, max_size=14, unique=True))
        )
        parts = []
        for start, end in zip(times[::2], times[1::2], strict=False):
            parts.append({"start": start / 10, "end": end / 10, "text": f"w{number}"})
            number += 1
        rows.append({"audio_filepath": "long.wav", "text": "x", "segments": parts})
    path = folder / "m.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus, rejected = chunked(path)
    kept = [
        part for row in rows for part in row["segments"] if part["end"] - part["start"] <= 10 + 1e-9
    ]
    assert rejected.total == number - len(kept)
    assert " ".join(corpus.texts).split() == [part["text"] for part in kept]
    assert corpus.seconds.max(initial=0) <= 10 and np.array_equal(corpus.seconds, corpus.durations)
    times = {part["text"]: part for part in kept}
    for line in set(corpus.lines.tolist()):
        ends = corpus.offsets + corpus.durations
        here = np.flatnonzero(corpus.lines == line)
        assert (ends[here][:-1] <= corpus.offsets[here][1:] + 1e-9).all()
        for i in here.tolist():
            words = corpus.texts[i].split()
            assert corpus.offsets[i] == pytest.approx(times[words[0]]["start"])
            assert ends[i] == pytest.approx(times[words[-1]]["end"])
