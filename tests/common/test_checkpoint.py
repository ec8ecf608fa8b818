"""Checkpoints are atomic and rotated; hostile files are refused, damaged ones reported; the disk may be full."""

import json
import os
import pickle
import shutil
import subprocess

import pytest
import torch

from common import checkpoint, optim
from common.errors import RunError, UsageError
from tests import toy

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
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_a_pickle_payload_is_refused_and_never_run(tmp_path, write):
    path = tmp_path / "evil.pt"
    write({"format": checkpoint.FORMAT, "recipe": "r", "x": Payload(tmp_path / "ran")}, path)
    with pytest.raises(UsageError, match=r"refused|is not a checkpoint of this project"):
        checkpoint.resume(str(path), tmp_path, "r")
    with pytest.raises(UsageError):
        checkpoint.read_weights(path, "r")
    assert not (tmp_path / "ran").exists()


def test_what_is_not_a_checkpoint_is_answered_in_one_line(tmp_path):
    torch.save({"model_state_dict": {}, "epoch": 15}, tmp_path / "checkpoint_epoch_15.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    torch.save({"model_state_dict": {}}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "notes.txt").write_text("hello")
    save(tmp_path, 7)
    for name, message in [
        ("checkpoint_epoch_15.pt", "is not a checkpoint of this project .it holds: model_state_dict, epoch"),
        ("tensor.pt", "is not a checkpoint of this project .it holds: Tensor"),
        ("legacy.pt", "is not a checkpoint of this project"),
        ("notes.txt", "is not a checkpoint of this project"),
        ("missing.pt", r"no such file; there is .*checkpoint_step_00000007\.pt"),
        ("", "it is a folder"),
        ("best.safetensors", "--init_from"),
    ]:
        with pytest.raises(UsageError, match=message) as caught:
            checkpoint.resume(str(tmp_path / name), tmp_path, "r")
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"saved by recipes/r\.py, not by recipes/other\.py"):
        checkpoint.resume("auto", tmp_path, "other")


def test_auto_starts_a_new_run_if_there_is_no_checkpoint(tmp_path, capsys):
    assert checkpoint.resume("auto", tmp_path / "nowhere", "r") is None
    assert "starting a new run" in capsys.readouterr().out


def lock_elsewhere(folder) -> str:
    """Tries to lock the folder in another process, which does not inherit record locks, and returns the error or ""."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            checkpoint.lock_folder(folder)
        except RunError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        reason = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return reason


def test_a_second_run_on_the_same_folder_is_told_so(tmp_path):
    lock = checkpoint.lock_folder(tmp_path)
    assert f"{tmp_path} is in use by another run (process {os.getpid()})" in lock_elsewhere(tmp_path)
    lock.close()
    assert lock_elsewhere(tmp_path) == ""


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
    model, other = toy.Network(), toy.Network()
    metadata = {"recipe": toy.RECIPE, "config": {"width": 8}, "tokenizer": {"characters": ["ह", "ा"]}}
    path = tmp_path / "best.safetensors"
    checkpoint.save_weights(path, model, metadata, {"cer": 0.5})
    assert json.loads(path.with_suffix(".json").read_text()) == {"cer": 0.5}
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # as the umask says
    tensors, read = checkpoint.read_weights(path, toy.RECIPE)
    assert not torch.equal(toy.weights(other), toy.weights(model))
    other.load_state_dict(tensors)
    assert read == metadata and torch.equal(toy.weights(other), toy.weights(model))
    shutil.copy(path, tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 1000)
    for name in ("cut.safetensors", "missing.safetensors"):
        with pytest.raises(UsageError):
            checkpoint.read_weights(tmp_path / name, toy.RECIPE)
    with pytest.raises(UsageError, match=r"saved by recipes/toy\.py, not by recipes/other\.py"):
        checkpoint.read_weights(path, "other")


def test_weights_to_use_are_those_of_resume_or_the_best(tmp_path):
    args = toy.make_args(tmp_path)
    with pytest.raises(UsageError, match=r"no weights at .*best\.safetensors: train first, or name them with --resume"):
        checkpoint.weights_to_use(args, toy.RECIPE)
    args.checkpoint_dir.mkdir()
    models = {name: toy.Network() for name in ("best", "other")}
    for name, model in models.items():
        checkpoint.save_weights(args.checkpoint_dir / f"{name}.safetensors", model, {"recipe": toy.RECIPE}, {})
    other = str(args.checkpoint_dir / "other.safetensors")
    for flags, name in (((), "best"), (("--resume", "auto"), "best"), (("--resume", other), "other")):
        tensors, _ = checkpoint.weights_to_use(toy.make_args(tmp_path, *flags), toy.RECIPE)
        assert torch.equal(tensors["output.weight"], models[name].output.weight)


def test_init_from_takes_what_fits(tmp_path, capsys):
    model = toy.Network()
    checkpoint.save_weights(tmp_path / "a.safetensors", model, {"recipe": toy.RECIPE}, {})
    larger = toy.Network(layers=3)
    larger.output = torch.nn.Conv1d(8, 5, 1)
    tensors, _ = checkpoint.read_weights(tmp_path / "a.safetensors", toy.RECIPE)
    checkpoint.initialise(larger, tensors, "a.safetensors")
    assert torch.equal(larger.layers[0][0].weight, model.layers[0][0].weight)
    new = "layers.2.0.bias, layers.2.0.weight, output.bias, output.weight"
    assert capsys.readouterr().out == f"initialised 6 of 10 tensors from a.safetensors; new: {new}\n"
    with pytest.raises(UsageError, match="none of its"):
        checkpoint.initialise(torch.nn.Linear(2, 2), tensors, "a.safetensors")
    with pytest.raises(UsageError, match=r"do not fit this model \(Missing key.*--init_from") as caught:
        checkpoint.load_weights(larger, tensors)
    assert "\n" not in str(caught.value)


def test_optimizer_states_exist_from_the_start_and_survive_regrouping():
    model = toy.Network()
    before = toy.weights(model)
    optimizer = optim.make_optimizer(model, 1e-3)
    assert torch.equal(toy.weights(model), before)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert all((id(p) in decayed) == (p.dim() > 1) for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = optim.optimizer_state(optimizer, model)
    fresh = optim.make_optimizer(model, 1e-3)
    fresh.param_groups.reverse()
    optim.load_optimizer_state(fresh, model, saved)
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            assert torch.equal(fresh.state[p][key], value)
    assert set(saved) == set(dict(model.named_parameters()))


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
