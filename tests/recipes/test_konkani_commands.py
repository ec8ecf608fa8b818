"""The Konkani recipe's command lines on a small spoken corpus: train, kill, resume, evaluate,
transcribe, torchrun."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common import checkpoint, options
from common.errors import UsageError
from recipes import konkani_conformer as recipe
from tests.recipes import runs
from tests.recipes.runs import SHORT, TINY, newest, planned, ran, refused, run

LONG = (
    "--max_steps 6 --save_every 1 --eval_every 3 --log_every 2".split()
)  # an epoch and a half of four global batches


@pytest.fixture(scope="module")
def manifests(konkani):
    return ["--train_manifest", konkani["train"], "--val_manifest", konkani["val"]]


@pytest.fixture(scope="module")
def flags(manifests):
    """The flags of a tiny model on the corpus."""
    return [*manifests, *TINY, "--batch_size", "2", "--gradient_accumulation_steps", "2"]


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory):
    """The folder and the stdout of a run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("reference")
    return folder, ran(recipe, *flags, *LONG, "--output_dir", folder)


@pytest.fixture
def best(reference):
    return reference[0] / "checkpoints" / "best.safetensors"


def test_the_configuration_is_the_checkpoints_or_the_flags():
    parser = options.Parser("")
    recipe.add_arguments(parser)

    def config(saved, *command):
        return recipe.choose_config(parser.parse_args(command), saved)

    expected = {**recipe.DEFAULTS, "d_model": 128, "subsampling": 8}
    saved = recipe.ModelInfo(expected, ["a"])
    assert config(None) == recipe.DEFAULTS
    assert config(None, "--d_model", "64") == {**recipe.DEFAULTS, "d_model": 64}
    assert config(saved) == config(saved, "--d_model", "128") == expected
    for flag, value, has in (("d_model", "192", 128), ("subsampling", "4", 8)):
        message = f"--{flag} {value} conflicts with the checkpoint, which has {has}.*--init_from"
        with pytest.raises(UsageError, match=message):
            config(saved, f"--{flag}", value)


@pytest.mark.parametrize(
    "flags, warmup",
    [("", 120), ("--max_steps 50", 10), ("--warmup_steps 7", 7), ("--num_epochs 20", None)],
)
def test_the_demo_warms_up_longer(flags, warmup, tmp_path, monkeypatch):
    given = []

    def train(args, *_):
        given.append(args)
        sys.exit()

    monkeypatch.setattr(recipe, "train", train)
    run(recipe, *TINY, *flags.split(), "--dry_run", "8GB", "--output_dir", tmp_path)
    assert [args.warmup_steps for args in given] == [warmup]
    assert given[0].checkpoint_dir == tmp_path / "checkpoints"


def test_a_resumed_demo_warms_up_as_before():
    args = runs.parse(recipe, "--resume", "auto")
    recipe.resolve(args)
    assert args.warmup_steps == 120


# --- trained, stopped and resumed -----------------------------------------------------------------


def assert_trained_by_two(out: str, folder: Path) -> None:
    assert out.count("evaluation at step 2") == 1 and out.count("WER") == 1
    saved = newest(folder, recipe)
    assert (saved.progress.step, saved.progress.utterances) == (2, 14)
    assert len(saved.state["rng"]) == 2


@pytest.mark.slow
def test_torchrun_trains_with_two_processes(flags, tmp_path):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        runs.free_port(),
    ]
    process = runs.start_anew(
        [*launch, *runs.command(recipe, *flags, "--num_epochs", "1")[1:]], tmp_path
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_trained_by_two(out, tmp_path)


# --- data -----------------------------------------------------------------------------------------


def test_a_bad_file_is_named_and_with_skip_bad_audio_listed(konkani, flags, tmp_path):
    audio = tmp_path / "cut off.flac"
    samples, rate = soundfile.read(Path(konkani["train"]).parent / "audio" / "train_00000.wav")
    soundfile.write(audio, samples, rate)
    os.truncate(audio, audio.stat().st_size // 2)
    rows = runs.rows_of(konkani["train"])[:6]
    rows.append({"audio_filepath": str(audio), "text": rows[0]["text"]})
    runs.write_rows(tmp_path / "train.json", rows)
    flags = [
        *flags,
        "--train_manifest",
        tmp_path / "train.json",
        "--num_epochs",
        "1",
        "--output_dir",
        tmp_path,
    ]
    status, _, err = run(recipe, *flags)
    assert status == 1
    assert err.splitlines()[-1].startswith(f"error: {audio} ")
    assert "--skip_bad_audio" in err
    assert "Traceback" not in err
    assert not (tmp_path / "checkpoints" / "best.safetensors").exists()
    out = ran(recipe, *flags[:-2], "--check_data", "--output_dir", tmp_path / "checked")
    assert (
        f"1  audio cannot be decoded\n           {tmp_path}/train.json:7: {audio}: {audio} " in out
    )
    assert out.endswith("can be used\n") and not (tmp_path / "checked" / "checkpoints").exists()
    ran(recipe, *flags, "--skip_bad_audio", "--no_check_audio")
    lines = runs.rows(tmp_path / "logs" / "metrics.jsonl")
    assert [line["file"] for line in lines if line.get("event") == "skipped"] == [str(audio)]


def test_long_recordings_are_cut_by_their_segments(konkani, flags, tmp_path):
    pieces, segments, now = [], [], 0.0
    for row in runs.rows_of(konkani["train"]):
        samples, rate = soundfile.read(row["audio_filepath"])
        segments.append({"start": now, "end": now + len(samples) / rate, "text": row["text"]})
        pieces.append(samples)
        now += len(samples) / rate
    soundfile.write(tmp_path / "long.wav", np.concatenate(pieces), rate)
    assert now > 15
    rows = [{"audio_filepath": "long.wav", "segments": segments}]
    manifest = ["--train_manifest", runs.write_rows(tmp_path / "long.json", rows)]
    limit = ["--max_duration", "5"]
    flags = [*flags, *SHORT, *manifest, *limit, "--output_dir", tmp_path]
    status, err = refused(recipe, *flags)
    assert status == 1 and "--use_chunking" in err
    ran(recipe, *flags, "--use_chunking")
    assert 2.5 < newest(tmp_path, recipe).run_info["longest"] <= 5


# --- evaluated and transcribed --------------------------------------------------------------------


def test_transcribe_files_folders_and_long_recordings(best, konkani, tmp_path):
    pieces = [
        soundfile.read(path)[0]
        for path in sorted((Path(konkani["val"]).parent / "audio").glob("val_*"))
    ]
    long = np.concatenate([np.concatenate([piece, np.zeros(8000)]) for piece in pieces * 4])
    soundfile.write(tmp_path / "long.flac", long, 22050)
    (tmp_path / "inside").mkdir()
    stereo = tmp_path / "inside" / "stereo.wav"
    soundfile.write(stereo, np.stack([pieces[0]] * 2, 1), 22050)
    (tmp_path / "notes.txt").write_text("not audio")
    transcribe = ["--resume", best, "--transcribe"]
    ran(
        recipe,
        *transcribe,
        tmp_path / "long.flac",
        stereo.parent,
        "--output",
        tmp_path / "out.jsonl",
    )
    rows = runs.rows(tmp_path / "out.jsonl")
    assert [Path(row["file"]).name for row in rows] == ["long.flac", "stereo.wav"]
    longest = checkpoint.read_weights(best, recipe.RECIPE).run_info["longest"]
    assert len(rows[0]["pieces"]) > 4
    assert all(p["end"] - p["start"] <= longest + 1e-6 for p in rows[0]["pieces"])
    assert rows[0]["pieces"][0]["start"] == 0
    assert rows[0]["pieces"][-1]["end"] == pytest.approx(rows[0]["seconds"])
    status, out, err = run(recipe, *transcribe, tmp_path / "notes.txt", stereo)
    assert status == 1 and "notes.txt cannot be used" in err and out.startswith(f"{stereo}\t")
    status, err = refused(recipe, *transcribe, tmp_path / "missing.wav")
    assert status == 2 and "missing.wav: no such file" in err


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [[], ["--subsampling", "8"], ["--max_duration", "1"]], ids=" ".join
)
def test_a_plan_without_data_is_of_the_longest_utterances_that_ctc_can_align(flags, tmp_path):
    plan = planned(recipe, *TINY, *flags, "--output_dir", tmp_path)
    assert len(set(plan.global_batches.data.corpus.texts)) == 64
    assert "time_masks" in plan.batch and not list(tmp_path.iterdir())
