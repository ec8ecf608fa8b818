"""The Konkani recipe's command lines on a small spoken corpus: bad files, transcribing, plans."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes import konkani_conformer as recipe
from tests.recipes import runs
from tests.recipes.runs import SHORT, TINY, planned, ran, run


@pytest.fixture(scope="module")
def flags(manifests):
    """The flags of a tiny model on the corpus."""
    return [*manifests, *TINY, "--batch_size", "2", "--gradient_accumulation_steps", "2"]


@pytest.mark.parametrize(
    "flags, warmup",
    [("", 120), ("--resume auto", 120), ("--max_steps 50", 10), ("--num_epochs 20", None)],
)
def test_the_demo_warms_up_longer(flags, warmup):
    args = runs.parse(recipe, *flags.split())
    recipe.resolve(args)
    assert args.warmup_steps == warmup


# --- data -----------------------------------------------------------------------------------------


def test_a_bad_file_is_named_and_with_skip_bad_audio_listed(konkani, flags, tmp_path):
    audio = tmp_path / "cut off.flac"
    samples, rate = soundfile.read(Path(konkani["train"]).parent / "audio" / "train_00000.wav")
    soundfile.write(audio, samples, rate)
    os.truncate(audio, audio.stat().st_size // 2)
    rows = runs.rows_of(konkani["train"])[:6]
    rows.append({"audio_filepath": str(audio), "text": rows[0]["text"]})
    runs.write_rows(tmp_path / "train.json", rows)
    flags = [*flags, "--train_manifest", tmp_path / "train.json", "--num_epochs", "1"]
    place = ["--output_dir", tmp_path]
    status, _, err = run(recipe, *flags, *place)
    last = err.splitlines()[-1]
    assert status == 1 and last.startswith(f"error: {audio} ") and "--skip_bad_audio" in last
    assert "Traceback" not in err
    assert not (tmp_path / "checkpoints" / "best.safetensors").exists()
    out = ran(recipe, *flags, "--check_data", "--output_dir", tmp_path / "checked")
    assert "1  audio cannot be decoded\n" in out and f"{tmp_path}/train.json:7: {audio}: " in out
    assert out.endswith("can be used\n") and not (tmp_path / "checked" / "checkpoints").exists()
    ran(recipe, *flags, *place, "--skip_bad_audio", "--no_check_audio")
    lines = runs.rows(tmp_path / "logs" / "metrics.jsonl")
    assert [line["file"] for line in lines if line.get("event") == "skipped"] == [str(audio)]


# --- transcribed ----------------------------------------------------------------------------------


def test_transcribe_files_and_folders(flags, konkani, tmp_path):
    """Long recordings: test_parakeet.py."""
    ran(recipe, *flags, *SHORT, "--output_dir", tmp_path)
    audio = sorted((Path(konkani["val"]).parent / "audio").glob("val_*"))[0]
    samples, rate = soundfile.read(audio)
    stereo = tmp_path / "inside" / "stereo.wav"
    stereo.parent.mkdir()
    soundfile.write(stereo, np.stack([samples] * 2, 1), rate)
    (tmp_path / "notes.txt").write_text("not audio")
    transcribe = ["--resume", tmp_path / "checkpoints" / "best.safetensors", "--transcribe"]
    ran(recipe, *transcribe, audio, stereo.parent, "--output", tmp_path / "out.jsonl")
    rows = runs.rows(tmp_path / "out.jsonl")
    assert [row["file"] for row in rows] == [str(audio), str(stereo)]
    assert rows[0]["text"] == rows[1]["text"]
    status, out, err = run(recipe, *transcribe, tmp_path / "notes.txt", stereo)
    assert status == 1 and "notes.txt cannot be used" in err and out.startswith(f"{stereo}\t")


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [[], ["--subsampling", "8"], ["--max_duration", "1"]], ids=" ".join
)
def test_a_plan_without_data_is_of_the_longest_utterances_that_ctc_can_align(flags, tmp_path):
    plan = planned(recipe, *TINY, *flags, "--output_dir", tmp_path)
    assert len(set(plan.global_batches.data.corpus.texts)) == 64
    assert "time_masks" in plan.batch and not list(tmp_path.iterdir())
