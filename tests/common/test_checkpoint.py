"""Checkpoints are atomic and rotated; hostile files are refused, damaged ones reported; the disk
may be full."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first update of an optimizer would import it, which takes two seconds
from safetensors.torch import load_file

from common import checkpoint, files, records
from common.device import rng_state
from common.errors import RunError, UsageError
from common.parts import init_from
from common.progress import Progress
from tests import small

WEIGHTS = {"w": torch.arange(5000.0)}


def content(step=1, model=WEIGHTS, **progress):
    """What the loop saves."""
    zeros = torch.zeros_like(model["w"])
    return {
        "recipe": "r",
        "model_info": {"width": 8},
        "run_info": {},
        "adapters": None,
        "model": dict(model),
        "optimizer": {"w": {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros}},
        "scaler": None,
        "args": {},
        "rng": [rng_state(torch.device("cpu"))],
        "progress": {**asdict(Progress()), "step": step, **progress},
    }


def save(folder, step):
    return checkpoint.save(folder, step, content(step), keep_last=3)


def test_round_trip_and_rotation(tmp_path):
    (tmp_path / "best.safetensors").write_bytes(b"kept")
    for step in (1, 20, 3, 100, 50):
        save(tmp_path, step)
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [100, 50, 20]
    save(tmp_path, 2)  # what was just saved is kept, whatever its number
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [100, 50, 2]
    assert (tmp_path / "best.safetensors").exists() and not list(tmp_path.glob("*.tmp"))
    read = checkpoint.read(tmp_path / "checkpoint_step_00000100.pt", "r")
    assert torch.equal(read.model["w"], WEIGHTS["w"])


def test_other_names_in_the_folder_are_not_touched(tmp_path):
    names = ["checkpoint_step_keepthis.pt", "checkpoint_step_1.pt", "notes.tmp", "best.txt"]
    names.append("checkpoint_step_00000001.pt.bak")
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "x.tmp").mkdir()
    checkpoint.lock_folder(tmp_path).close()
    for step in (1, 2, 3, 123_456_789):
        save(tmp_path, step)
    assert checkpoint.resume("auto", tmp_path, "r").progress.step == 123_456_789
    checkpoint.make_room(tmp_path, tmp_path / "logs")
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    assert (tmp_path / "x.tmp").is_dir()


def test_a_position_of_an_earlier_version_is_read(tmp_path):
    for done, size in (([], 4), ([[8, 3]], 0)):  # with another size the epoch will restart
        state = content(global_batch=2, global_batch_size=4, done=done)
        progress = checkpoint.read(checkpoint.save(tmp_path, 1, state, 1), "r").progress
        assert (progress.global_batch, progress.global_batch_size) == (2, size)


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
    assert checkpoint.resume("auto", tmp_path, "r").progress.step == 1
    assert "checkpoint_step_00000002.pt is damaged" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"checkpoint_step_00000002\.pt is damaged.*--resume auto"):
        checkpoint.resume(str(tmp_path / "checkpoint_step_00000002.pt"), tmp_path, "r")


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))]
)
def test_a_pickle_payload_is_refused_and_never_run(tmp_path, write):
    path = tmp_path / "evil.pt"
    write({"format": checkpoint.FORMAT, "recipe": "r", "x": Payload(tmp_path / "ran")}, path)
    with pytest.raises(UsageError, match=r"is refused|is not a file of torch.save"):
        checkpoint.resume(str(path), tmp_path, "r")
    with pytest.raises(UsageError):
        checkpoint.read_weights(path, "r")
    assert not (tmp_path / "ran").exists()


def test_what_is_not_a_checkpoint_is_answered_in_one_line(tmp_path):
    torch.save({"model_state_dict": {}, "epoch": 15}, tmp_path / "checkpoint_epoch_15.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    torch.save(
        {"model_state_dict": {}}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False
    )
    torch.save({"format": "speech-recipes checkpoint 1"}, tmp_path / "older.pt")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "best.safetensors").touch()
    save(tmp_path, 7)
    for name, message in [
        ("checkpoint_epoch_15.pt", "is not a checkpoint of this project"),
        ("tensor.pt", "is not a checkpoint of this project"),
        ("legacy.pt", "is not a checkpoint of this project"),
        ("older.pt", "was saved by another version of this project"),
        ("notes.txt", "is not a file of torch.save"),
        ("missing.pt", "No such file"),
        ("", "it is a folder"),
        ("best.safetensors", "--init_from"),
    ]:
        with pytest.raises(UsageError, match=message) as caught:
            checkpoint.resume(str(tmp_path / name), tmp_path, "r")
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"saved by recipes/r\.py, not by recipes/other\.py"):
        checkpoint.resume("auto", tmp_path, "other")


def lock_elsewhere(folder) -> str:
    """Tries to lock the folder in another process, which does not inherit record locks, and returns
    the error or ""."""
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
    for name in ("checkpoint_step_00000009.pt", "best.safetensors"):  # of a run that was killed
        (tmp_path / f".{name}.ab12cd_9.tmp").write_bytes(b"half")
    lock = checkpoint.lock_folder(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))
    said = f"{tmp_path} is in use by another run (process {os.getpid()})"
    assert said in lock_elsewhere(tmp_path)
    lock.close()
    assert lock_elsewhere(tmp_path) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_checkpoint_before_it_and_says_what_is_missing(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        good = save(tmp_path, 1)
        with pytest.raises(RunError, match=r"cannot save .*00000002\.pt: .*MiB free.*unharmed"):
            checkpoint.save(tmp_path, 2, content(2, {"w": torch.zeros(10**6)}), keep_last=3)
        with pytest.raises(RunError, match=r"cannot save .*best"):
            large = torch.nn.Linear(1000, 1000).state_dict()
            checkpoint.save_weights(tmp_path / "best.safetensors", large, small.task(), {})
        assert [p.name for p in tmp_path.iterdir()] == [good.name]
        assert checkpoint.resume("auto", tmp_path, "r").progress.step == 1
    finally:
        subprocess.run(["umount", str(tmp_path)])


def test_best_weights_are_one_file_that_rebuilds_the_model(tmp_path):
    model, other = small.Network(), small.Network()
    task = small.task(model_info=small.ModelInfo("ह"), run_info=small.RunInfo(("ा", "b")))
    path = tmp_path / "best.safetensors"
    summary = {"cer": 0.5, "command": "--train_manifest \udcff.json"}  # a path that is not UTF-8
    checkpoint.save_weights(path, model.state_dict(), task, summary)
    assert json.loads(path.with_suffix(".json").read_text()) == summary
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # as the umask says
    saved = checkpoint.read_weights(path, small.RECIPE)
    assert not torch.equal(small.weights(other), small.weights(model))
    other.load_state_dict(saved.model)
    assert torch.equal(small.weights(other), small.weights(model)) and saved.state is None
    assert records.read(small.ModelInfo, saved.model_info, saved.path) == task.model_info
    assert records.read(small.RunInfo, saved.run_info, saved.path) == task.run_info
    shutil.copy(path, tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 1000)
    for name in ("cut.safetensors", "missing.safetensors"):
        with pytest.raises(UsageError):
            checkpoint.read_weights(tmp_path / name, small.RECIPE)
    with pytest.raises(UsageError, match=r"saved by recipes/small\.py, not by recipes/other\.py"):
        checkpoint.read_weights(path, "other")


def test_weights_to_use_are_those_of_resume_or_the_best(tmp_path):
    message = r"no weights at .*best\.safetensors: train first, or name them with --resume"
    with pytest.raises(UsageError, match=message):
        checkpoint.weights_to_use(None, tmp_path, small.RECIPE)
    models = {name: small.Network() for name in ("best", "other")}
    for name, model in models.items():
        path = tmp_path / f"{name}.safetensors"
        checkpoint.save_weights(path, model.state_dict(), small.task(), {})
    other = str(tmp_path / "other.safetensors")
    for resume, name in ((None, "best"), ("auto", "best"), (other, "other")):
        saved = checkpoint.weights_to_use(resume, tmp_path, small.RECIPE)
        assert torch.equal(saved.model["output.weight"], models[name].output.weight)


def test_init_from_takes_what_fits(tmp_path, capsys):
    model = small.Network()
    checkpoint.save_weights(tmp_path / "a.safetensors", model.state_dict(), small.task(), {})
    larger = small.Network(layers=3)
    larger.output = torch.nn.Linear(8, 7)
    tensors = checkpoint.read_weights(tmp_path / "a.safetensors", small.RECIPE).model
    init_from.initialise(larger, tensors, "a.safetensors")
    first = larger.layers[0].convolution.weight
    assert torch.equal(first, model.layers[0].convolution.weight)
    new = "layers.2.convolution.bias, layers.2.convolution.weight, layers.2.norm.bias,"
    new += " layers.2.norm.weight, output.bias ..."
    out = capsys.readouterr().out
    assert out == f"initialised 14 of 20 tensors from a.safetensors; new: {new}\n"
    with pytest.raises(UsageError, match="none of its"):
        init_from.initialise(torch.nn.Linear(2, 3), tensors, "a.safetensors")
    message = r"do not fit this model \(Missing key.*--init_from"
    with pytest.raises(UsageError, match=message) as caught:
        checkpoint.load_weights(larger, tensors)
    assert "\n" not in str(caught.value)


class Reader(torch.nn.Module):
    """An embedding, and an output layer with two more rows."""

    def __init__(self, tokens: int, value: float):
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens + 1, 3)
        self.output = torch.nn.Linear(3, tokens + 3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(value + torch.arange(p.numel()).view(p.shape))


ROWS = ("embedding.weight", "output.weight", "output.bias")


@pytest.mark.parametrize(
    "texts, width, count",
    [  # the first texts of the new tokens; those of the old ones are "bc"
        ("cb", 3, "; rows of 5 of 5 tokens are copied, 0 are new"),
        ("cbd", 3, "; rows of 5 of 6 tokens are copied, 1 are new"),
        ("bc", 3, ""),
        ("xb", 7, "; new: embedding.weight; rows of 4 of 5 tokens are copied, 1 are new"),
    ],
)
def test_init_from_copies_rows_by_what_tokens_mean(texts, width, count, capsys):
    old, new = Reader(2, 1000.0), Reader(len(texts), 0.0)
    if width != 3:
        old.embedding = torch.nn.Embedding(3, width)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    tokens = [[*texts, "blank", "0", "1"], ["b", "c", "blank", "0", "1"]]
    vocabulary = checkpoint.Vocabulary(ROWS, *tokens)
    init_from.initialise(new, old.state_dict(), "a.safetensors", vocabulary)
    for name, tensor in new.state_dict().items():
        theirs = old.state_dict()[name]
        for row, token in enumerate(tokens[0][: len(tensor)]):
            expected = before[name][row]
            if token in tokens[1] and tensor[0].shape == theirs[0].shape:
                expected = theirs[tokens[1].index(token)]
            assert torch.equal(tensor[row], expected), (name, token)
    fits = 3 if width == 3 else 2
    out = capsys.readouterr().out
    assert out == f"initialised {fits} of 3 tensors from a.safetensors{count}\n"


# --- files that were damaged or altered -----------------------------------------------------------


def put(place: tuple, value):
    """A function that sets what is at `place` in a content; `...` removes it."""

    def change(content: dict) -> None:
        for key in place[:-1]:
            content = content[key]
        if value is ...:
            del content[place[-1]]
        else:
            content[place[-1]] = value

    return change


NAN = torch.tensor([1.0, float("nan")])
STATE = {"step": torch.tensor(1.0), "exp_avg": torch.ones(5000), "exp_avg_sq": torch.ones(5000)}
ALTERED = [
    put(("run_info",), ...),
    put(("model", "w"), 3),
    put(("model", "w"), NAN),
    put(("model", "w"), torch.ones(1).expand(10**12)),
    put(("model", "w"), torch.ones(2).to_sparse()),
    put(("optimizer",), {"w": {**STATE, "exp_avg": NAN}}),
    put(("model", "w"), torch.ones(5000).to(torch.float8_e4m3fn)),
    put(("model", "w"), torch.ones(5000, device="meta")),
]


@pytest.mark.parametrize("alter", ALTERED, ids=range(len(ALTERED)))
def test_an_altered_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, capsys, alter):
    save(tmp_path, 1)
    altered = content(2)
    altered["optimizer"] = {"w": dict(STATE)}
    path = checkpoint.save(tmp_path, 2, altered, keep_last=3)
    assert checkpoint.resume("auto", tmp_path, "r").progress.step == 2
    alter(altered)
    checkpoint.save(tmp_path, 2, altered, keep_last=3)
    for read in (
        lambda: checkpoint.resume(str(path), tmp_path, "r"),
        lambda: checkpoint.read_weights(path, "r"),
    ):
        with pytest.raises(UsageError, match=r"00000002\.pt( is damaged)?: ") as refused:
            read()
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert checkpoint.resume("auto", tmp_path, "r").progress.step == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_zip_bomb_is_refused_before_it_is_decompressed(tmp_path):
    path = save(tmp_path, 1)
    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name) if "/data/" not in name else bytes(1 << 24))
    with pytest.raises(UsageError, match="is damaged"):
        checkpoint.resume(str(tmp_path / "bomb.pt"), tmp_path, "r")


def test_a_pipe_is_refused_without_waiting(tmp_path, no_hang):
    os.mkfifo(tmp_path / "checkpoint_step_00000001.pt")
    os.mkfifo(tmp_path / "best.safetensors")
    for name in ("checkpoint_step_00000001.pt", "best.safetensors"):
        with pytest.raises(UsageError, match="not a regular file"):
            checkpoint.read_weights(tmp_path / name, "r")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_finite_values_are_told_from_others(dtype):
    """However large they are, and without a temporary tensor."""
    largest = torch.finfo(dtype).max
    for values in ([], [0.0], [largest, -largest], [largest] * 4):
        tensor = torch.tensor(values, dtype=dtype)
        assert checkpoint.check_tensors({"w": tensor}, "file") == {"w": tensor}
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 40, 99):
            tensor = torch.ones(10, 10, dtype=dtype).t()
            tensor[place // 10, place % 10] = value
            with pytest.raises(checkpoint.Damaged, match="'w' has values that are not finite"):
                checkpoint.check_tensors({"w": tensor}, "file")


def is_mapped(path: Path) -> bool:
    return os.fsencode(path.name) in Path("/proc/self/maps").read_bytes()


def test_a_checkpoint_is_mapped_and_never_written_to(tmp_path):
    path = save(tmp_path, 123456)
    written, weights = path.read_bytes(), checkpoint.read_weights(path, "r").model
    assert is_mapped(path)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(5000))
    for load in (checkpoint.load_weights, lambda *given: init_from.initialise(*given, "file")):
        load(model, weights)
        model.w.data += 1
        assert torch.equal(weights["w"], WEIGHTS["w"]) and torch.equal(model.w, WEIGHTS["w"] + 1)
    del weights
    assert not is_mapped(path) and path.read_bytes() == written


@pytest.mark.parametrize(
    "text, step", [('{"step": 7}', 7), ('{"step": "7"}', -1), ("[" * 100_000, -1), ("", -1)]
)
def test_best_json_is_believed_only_if_it_is_sound(tmp_path, text, step):
    (tmp_path / "best.json").write_text(text)
    assert checkpoint.best_step(tmp_path) == -1
    (tmp_path / "best.safetensors").touch()
    assert checkpoint.best_step(tmp_path) == step


# --- earlier runs ---------------------------------------------------------------------------------


def test_an_earlier_run_moves_with_its_folders(tmp_path):
    folder, logs = tmp_path / "c", tmp_path / "l"
    (tmp_path / "precious").mkdir()
    for number in (1, 2):
        for place in (folder, logs / "speech", logs / "mine"):
            place.mkdir(parents=True, exist_ok=True)
            (place / "a").write_text(str(place))
        (logs / "reports").symlink_to(tmp_path / "precious")
        (logs / "metrics.jsonl").touch()
        save(folder, number)
        checkpoint.make_room(folder, logs, ("speech", "reports"))
        assert not checkpoint.list_checkpoints(folder)
        names = [path.name for path in (folder / f"earlier-{number}").iterdir()]
        assert names == [f"checkpoint_step_{number:08}.pt"]
        moved = {path.name: path for path in (logs / f"earlier-{number}").iterdir()}
        assert set(moved) == {"speech", "reports", "metrics.jsonl"}
        assert moved["reports"].is_symlink()
        assert (moved["speech"] / "a").read_text() == str(logs / "speech")
    assert (logs / "mine" / "a").exists() and (tmp_path / "precious").is_dir()
    checkpoint.make_room(folder, logs)
    assert not (folder / "earlier-3").exists()


def test_a_full_disk_takes_the_oldest_checkpoint_and_no_other_fault_does(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, content(step), keep_last=3)
    write = files.write_file

    def fails(number: int):
        def write_file(path, fill, **more):
            if (tmp_path / "checkpoint_step_00000001.pt").exists():
                raise OSError(number, os.strerror(number))
            return write(path, fill, **more)

        return write_file

    monkeypatch.setattr(files, "write_file", fails(errno.EROFS))
    with pytest.raises(RunError, match="Read-only file system"):
        checkpoint.save(tmp_path, 4, content(4), keep_last=3)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 3
    monkeypatch.setattr(files, "write_file", fails(errno.ENOSPC))
    checkpoint.save(tmp_path, 4, content(4), keep_last=3)
    steps = map(checkpoint.step_of, checkpoint.list_checkpoints(tmp_path))
    assert list(steps) == [4, 3, 2]


def test_a_tensor_under_two_names_is_saved_under_both(tmp_path):
    tensor = torch.ones(2, 2)
    path = tmp_path / "best.safetensors"
    checkpoint.save_weights(path, {"a": tensor, "b": tensor}, small.task(), {})
    assert torch.equal(load_file(path)["b"], tensor)
