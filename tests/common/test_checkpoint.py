"""Checkpoints: atomic, refused where hostile, reported where damaged, rotated, and the disk may be full."""

import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch

from common import checkpoint, optim
from common.errors import RunError, UsageError
from recipes import konkani_conformer as recipe
from tests import tiny

CONTENT = {"recipe": "r", "model": {"w": torch.arange(5000.0)}, "progress": {"step": 1}}


def save(folder, step):
    return checkpoint.save(folder, step, {**CONTENT, "progress": {"step": step}}, keep_last=3)


def test_round_trip_and_rotation(tmp_path):
    (tmp_path / "best.safetensors").write_bytes(b"kept")
    for step in (1, 20, 3, 100, 50):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == [
        f"checkpoint_step_{n:08d}.pt" for n in (100, 50, 20)
    ]
    assert (tmp_path / "best.safetensors").exists() and not list(tmp_path.glob("*.tmp"))
    content = checkpoint.read(tmp_path / "checkpoint_step_00000100.pt", "r")
    assert torch.equal(content["model"]["w"], CONTENT["model"]["w"])


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    else:  # one bit of a tensor
        position = data.index(torch.arange(5000.0).numpy().tobytes()[4000:4400]) + 100
        data[position] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "bit flipped", "empty", "zeros"])
def test_a_damaged_newest_file_is_reported_and_the_one_before_it_is_used(tmp_path, capsys, how):
    for step in (1, 2):
        save(tmp_path, step)
    damage(tmp_path / "checkpoint_step_00000002.pt", how)
    assert checkpoint.resume("auto", tmp_path, "r")["progress"]["step"] == 1
    assert "checkpoint_step_00000002.pt is damaged" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"checkpoint_step_00000002\.pt is damaged.*--resume auto"):
        checkpoint.resume(str(tmp_path / "checkpoint_step_00000002.pt"), tmp_path, "r")


class Payload:
    def __reduce__(self):
        return os.system, ("touch /tmp/payload-ran",)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_a_pickle_payload_is_refused_and_never_run(tmp_path, write):
    path = tmp_path / "evil.pt"
    write({"format": checkpoint.FORMAT, "recipe": "r", "x": Payload()}, path)
    with pytest.raises(UsageError, match=r"refused|no checkpoint of this project"):
        checkpoint.resume(str(path), tmp_path, "r")
    with pytest.raises(UsageError):
        checkpoint.read_weights(path, "r")
    assert not os.path.exists("/tmp/payload-ran")


def test_what_is_no_checkpoint_is_answered_in_one_line(tmp_path):
    torch.save({"model_state_dict": {}, "epoch": 15}, tmp_path / "checkpoint_epoch_15.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    torch.save({"model_state_dict": {}}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "notes.txt").write_text("hello")
    save(tmp_path, 7)
    for name, message in [
        ("checkpoint_epoch_15.pt", "no checkpoint of this project .it holds: model_state_dict, epoch"),
        ("tensor.pt", "no checkpoint of this project .it holds: Tensor"),
        ("legacy.pt", "no checkpoint of this project"),
        ("notes.txt", "no checkpoint of this project"),
        ("missing.pt", r"no such file; there is .*checkpoint_step_00000007\.pt"),
        ("", "it is a folder"),
        ("best.safetensors", "--init_from"),
    ]:
        with pytest.raises(UsageError, match=message) as caught:
            checkpoint.resume(str(tmp_path / name), tmp_path, "r")
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"saved by recipes/r\.py, not by recipes/other\.py"):
        checkpoint.resume("auto", tmp_path, "other")


def test_auto_starts_anew_where_there_is_nothing(tmp_path, capsys):
    assert checkpoint.resume("auto", tmp_path / "nowhere", "r") is None
    assert "starting anew" in capsys.readouterr().out


def test_a_second_run_on_the_same_folder_is_told_so(tmp_path):
    lock = checkpoint.lock_folder(tmp_path)
    code = f"import sys; sys.path.insert(0, '.'); from pathlib import Path; from common import checkpoint; checkpoint.lock_folder(Path({str(tmp_path)!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"in use by another run (process {os.getpid()})" in result.stderr
    lock.close()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_stale_temporary_files_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / "checkpoint_step_00000009.pt.tmp").write_bytes(b"half")
    checkpoint.lock_folder(tmp_path).close()
    assert not list(tmp_path.glob("*.tmp"))


def test_an_earlier_run_is_moved_aside_and_not_lost(tmp_path):
    folder, logs = tmp_path / "c", tmp_path / "l"
    folder.mkdir(), logs.mkdir()
    for number in (1, 2):
        save(folder, number)
        (folder / "best.safetensors").write_bytes(b"x")
        (logs / "metrics.jsonl").write_text("{}\n")
        checkpoint.make_room(folder, logs)
        assert not checkpoint.list_checkpoints(folder)
        assert (folder / f"earlier-{number}" / f"checkpoint_step_{number:08d}.pt").exists()
        assert (logs / f"earlier-{number}" / "metrics.jsonl").exists()
    checkpoint.make_room(folder, logs)
    assert not (folder / "earlier-3").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_checkpoint_before_it_and_says_what_is_missing(tmp_path):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        good = save(tmp_path, 1)
        content = {**CONTENT, "model": {"w": torch.zeros(10**6)}}
        with pytest.raises(RunError, match=r"cannot save .*00000002\.pt: .*MiB free.*unharmed"):
            checkpoint.save(tmp_path, 2, content, keep_last=3)
        with pytest.raises(RunError, match=r"cannot save .*best"):
            checkpoint.save_weights(tmp_path / "best.safetensors", torch.nn.Linear(1000, 1000), {"recipe": "r"}, {})
        assert [p.name for p in tmp_path.iterdir()] == [good.name]
        assert checkpoint.resume("auto", tmp_path, "r")["progress"]["step"] == 1
    finally:
        subprocess.run(["umount", str(tmp_path)])


def test_an_unwritable_folder_is_answered_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write in .*choose another --checkpoint_dir"):
        checkpoint.lock_folder(tmp_path / "file" / "checkpoints")


def test_best_weights_are_one_file_that_rebuilds_the_model(tmp_path):
    model, other = tiny.make_model(dtype=torch.float32), tiny.make_model(dtype=torch.float32, seed=1)
    metadata = {
        "recipe": recipe.RECIPE,
        "config": tiny.CONFIG,
        "tokenizer": {"kind": "vocab_file", "characters": ["ह", "ा"]},
    }
    path = tmp_path / "best.safetensors"
    checkpoint.save_weights(path, model, metadata, {"cer": 0.5})
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # readable by whom the umask says
    tensors, read = checkpoint.read_weights(path, recipe.RECIPE)
    other.load_state_dict(tensors)
    assert read == metadata and torch.equal(tiny.weights(other), tiny.weights(model))
    shutil.copy(path, tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 1000)
    for name in ("cut.safetensors", "missing.safetensors"):
        with pytest.raises(UsageError):
            checkpoint.read_weights(tmp_path / name, recipe.RECIPE)


def test_init_from_takes_what_fits(tmp_path, capsys):
    model = tiny.make_model(dtype=torch.float32)
    checkpoint.save_weights(tmp_path / "a.safetensors", model, {"recipe": recipe.RECIPE, "config": tiny.CONFIG}, {})
    torch.manual_seed(3)
    larger = recipe.Conformer({**tiny.CONFIG, "encoder_layers": 3, "vocabulary": 9})
    tensors, _ = checkpoint.read_weights(tmp_path / "a.safetensors", recipe.RECIPE)
    checkpoint.initialise(larger, tensors, "a.safetensors")
    assert torch.equal(larger.encoder[0].attention.qkv.weight, model.encoder[0].attention.qkv.weight)
    assert "new: ctc_head" in capsys.readouterr().out
    with pytest.raises(UsageError, match="none of its"):
        checkpoint.initialise(torch.nn.Linear(2, 2), tensors, "a.safetensors")
    with pytest.raises(UsageError, match=r"do not fit this model \(Missing key.*--init_from") as caught:
        checkpoint.load_weights(larger, tensors)
    assert "\n" not in str(caught.value)


def test_optimizer_states_exist_from_the_start_and_survive_regrouping(tmp_path):
    model = tiny.make_model(dtype=torch.float32)
    args = tiny.make_args(tmp_path)
    before = tiny.weights(model)
    optimizer = optim.make_optimizer(model, args)
    assert torch.equal(tiny.weights(model), before)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert all((id(p) in decayed) == (p.dim() > 1) for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = optim.optimizer_state(optimizer, model)
    fresh = optim.make_optimizer(model, args)
    fresh.param_groups.reverse()
    optim.load_optimizer_state(fresh, model, saved)
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            assert torch.equal(fresh.state[p][key], value)
    name = dict(model.named_parameters())
    assert set(saved) == set(name)


def test_averaging_the_last_and_the_best(tmp_path):
    for step, value in ((1, 4.0), (2, 1.0), (3, 7.0), (4, 10.0)):
        evaluations = [[1, 0.5], [2, 0.9], [3, 0.1]][:step]
        content = {
            "recipe": "r", "model": {"w": torch.full((3,), value), "n": torch.tensor(step)},
            "progress": {"step": step, "evaluations": evaluations},
        }  # fmt: skip
        checkpoint.save(tmp_path, step, content, keep_last=9)
    last, steps = checkpoint.average(tmp_path, 2, "last", "r")
    assert steps == [4, 3] and torch.equal(last["w"], torch.full((3,), 8.5)) and last["w"].dtype == torch.float32
    best, steps = checkpoint.average(tmp_path, 2, "best", "r")
    assert steps == [3, 1] and torch.equal(best["w"], torch.full((3,), 5.5))
    assert checkpoint.average(tmp_path, 100, "last", "r")[1] == [4, 3, 2, 1]
    with pytest.raises(UsageError, match="keeps no checkpoint"):
        checkpoint.average(tmp_path / "empty", 2, "last", "r")
