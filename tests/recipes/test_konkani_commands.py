"""The user's commands as subprocesses, on a small spoken corpus: train, kill, resume, transcribe, torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import checkpoint
from recipes import konkani_conformer as recipe
from speech import demo

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "konkani_conformer.py")
SMALL = [
    "--d_model",
    "16",
    "--encoder_layers",
    "1",
    "--decoder_layers",
    "1",
    "--attention_heads",
    "2",
    "--device",
    "cpu",
    "--no_tensorboard",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES[:3], {"train": 26, "val": 4})


def command(corpus, *flags):
    return [sys.executable, RECIPE, "--train_manifest", corpus["train"], "--val_manifest", corpus["val"], *SMALL,
            "--batch_size", "2", "--gradient_accumulation_steps", "2", "--dataloader_num_workers", "1", *flags]  # fmt: skip


def run(arguments, folder, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=300, env=environment, **options
    )


def final_state(folder):
    newest = checkpoint.list_checkpoints(folder / "checkpoints")[0]
    return checkpoint.read(newest, recipe.RECIPE)


def assert_same_state(a, b):
    assert a["progress"] == b["progress"]
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for name, state in a["optimizer"].items():
        for key, value in state.items():
            assert torch.equal(value, b["optimizer"][name][key]), (name, key)


LONG = ("--max_steps", "16", "--save_every", "3", "--eval_every", "5")  # two and a third epochs of seven windows


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    result = run(command(corpus, *LONG), folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_a_run_leaves_what_it_promises(reference):
    folder, result = reference
    assert {"best.safetensors", "best.json"} <= {p.name for p in (folder / "checkpoints").iterdir()}
    assert len(checkpoint.list_checkpoints(folder / "checkpoints")) == 5
    assert (folder / "logs" / "training.png").read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/cer" in line] == [5, 10, 15, 16]
    assert any("train/loss" in line and line["train/data_wait_share"] >= 0 for line in lines)
    assert "WER" in result.stdout and "CER" in result.stdout and result.stdout.count("reference:") == 4
    assert "\r" not in result.stderr  # plain lines where stderr is no terminal
    assert len((folder / "logs" / "transcripts.jsonl").read_text().splitlines()) == 4


def test_running_again_goes_on_or_says_it_is_done(reference, corpus, tmp_path):
    folder, _ = reference
    result = run(command(corpus, *LONG, "--resume", "auto", "--checkpoint_dir", str(folder / "checkpoints")), tmp_path)
    assert result.returncode == 0 and "resuming from" in result.stdout and "WER" in result.stdout


def test_conflicting_shape_flags_are_one_line_that_names_init_from(reference, corpus, tmp_path):
    folder, _ = reference
    newest = str(checkpoint.list_checkpoints(folder / "checkpoints")[0])
    result = run([*command(corpus, *LONG, "--resume", newest), "--d_model", "32"], tmp_path)
    assert result.returncode == 2 and "--d_model 32 conflicts" in result.stderr and "--init_from" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def kill_when(process, folder, ready, number=signal.SIGKILL):
    deadline = time.monotonic() + 200
    while not ready(folder) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    return process.wait(60)


def test_killed_twice_in_one_epoch_and_resumed_ends_with_the_same_bits(reference, corpus, tmp_path):
    """SIGKILL once while a checkpoint is being written or just after, once between two; then on to the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = command(corpus, *LONG, "--resume", "auto")
    for step in (9, 12):
        ready = lambda folder, step=step: list((folder / "checkpoints").glob(f"*{step:08d}.pt*"))  # noqa: E731
        process = subprocess.Popen(
            arguments, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert kill_when(process, tmp_path, ready) == -signal.SIGKILL
    result = run(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    assert_same_state(final_state(tmp_path), final_state(reference[0]))
    evaluated = [
        json.loads(line)["step"]
        for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
        if "eval/cer" in line
    ]
    assert evaluated == [5, 10, 15, 16]


def test_sigterm_saves_exits_143_and_resumes_to_the_same_bits(reference, corpus, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = command(corpus, *LONG, "--resume", "auto")
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while (
        not list((tmp_path / "checkpoints").glob("*00000003.pt"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)  # the workers get it too, as from a batch system
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "stopped by SIGTERM" in errors and "--resume auto" in errors
    assert run(arguments, tmp_path).returncode == 0
    assert_same_state(final_state(tmp_path), final_state(reference[0]))


def test_a_bad_file_is_named_and_with_skip_bad_audio_listed(corpus, tmp_path):
    import soundfile

    audio = tmp_path / "cut off.flac"
    samples, rate = soundfile.read(Path(corpus["train"]).parent / "audio" / "train_00000.wav")
    soundfile.write(audio, samples, rate)
    os.truncate(audio, audio.stat().st_size // 2)
    lines = Path(corpus["train"]).read_text().splitlines()
    rows = [json.loads(line) for line in lines[:6]]
    for row in rows:
        row["audio_filepath"] = str(Path(corpus["train"]).parent / row["audio_filepath"])
    rows.append({"audio_filepath": str(audio), "text": rows[0]["text"]})
    manifest = tmp_path / "train.json"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    arguments = command({**corpus, "train": str(manifest)}, "--num_epochs", "1")
    result = run(arguments, tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith(f"error: {audio} ") and "--skip_bad_audio" in result.stderr
    assert "Traceback" not in result.stderr
    result = run([*arguments, "--skip_bad_audio"], tmp_path)
    assert result.returncode == 0, result.stderr
    listed = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["file"] for line in listed if line.get("event") == "skipped"] == [str(audio)]


def test_transcribe_files_folders_and_long_recordings(reference, corpus, tmp_path):
    import numpy as np
    import soundfile

    folder, _ = reference
    audio = Path(corpus["val"]).parent / "audio"
    pieces = [soundfile.read(path)[0] for path in sorted(audio.glob("val_*"))]
    silence = np.zeros(8000)
    long = np.concatenate([np.concatenate([piece, silence]) for piece in pieces * 4])
    soundfile.write(tmp_path / "long.flac", long, 22050)
    (tmp_path / "inside").mkdir()
    soundfile.write(tmp_path / "inside" / "stereo.wav", np.stack([pieces[0]] * 2, 1), 22050)
    (tmp_path / "notes.txt").write_text("no audio")
    best = str(folder / "checkpoints" / "best.safetensors")
    base = [sys.executable, RECIPE, "--device", "cpu", "--resume", best, "--transcribe"]
    result = run([*base, "long.flac", "inside", "--output", "out.jsonl"], tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [Path(row["file"]).name for row in rows] == ["long.flac", "stereo.wav"]
    longest = recipe.checkpoint.read_weights(best, recipe.RECIPE)[1]["longest"]
    assert len(rows[0]["pieces"]) > 4 and all(p["end"] - p["start"] <= longest + 1e-6 for p in rows[0]["pieces"])
    assert rows[0]["pieces"][0]["start"] == 0 and rows[0]["pieces"][-1]["end"] == pytest.approx(rows[0]["seconds"])
    result = run([*base, "notes.txt", "inside/stereo.wav"], tmp_path)
    assert (
        result.returncode == 1
        and "notes.txt cannot be read" in result.stderr
        and "inside/stereo.wav\t" in result.stdout
    )
    result = run([*base, "missing.wav"], tmp_path)
    assert result.returncode == 2 and "missing.wav: no such file" in result.stderr


def test_torchrun_trains_with_two_processes(corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    result = run([*launch, *command(corpus, "--max_steps", "4")[1:]], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("evaluation at step 4") == 1 and result.stdout.count("WER") == 1
    assert final_state(tmp_path)["progress"]["utterances"] in range(26, 33) and len(final_state(tmp_path)["rng"]) == 2
