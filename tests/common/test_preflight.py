"""The pre-flight check, on this machine and on GPUs that are made up."""

import contextlib
import re
import shutil
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from common import checkpoint, cuda, saving
from common.device import Setup
from common.errors import RunError
from common.parts import compiling, offload, preflight, utilisation
from common.ranks import Ranks
from tests import small

NAMES = ["GPU", "memory", "precision", "attention", "torch.compile", "disk"]
MILLION = 1_000_000
CUDA = torch.device("cuda", 0)
FITS = int(6.5 * 2**30), "fits"


def arguments(folder, *flags: str):
    return small.make_args(folder, "--device", "auto", "--dataloader_num_workers", "auto", *flags)


def with_parameters(count: int) -> torch.nn.Module:
    """A model of so many parameters, without values."""
    return torch.nn.Linear(count, 1, bias=False, device="meta")


def verified(capsys, args, plan=FITS):
    """(exit status, {name: (status, reason)})."""
    status = preflight.verify(args, with_parameters(73 * MILLION), lambda: plan)
    lines = capsys.readouterr().out.splitlines()
    table = {line[6:].split(": ")[0]: (line[:4], line.split(": ", 1)[1]) for line in lines}
    assert list(table) == NAMES
    assert {line[:6] for line in lines} <= {"pass  ", "FAIL  ", "skip  "}
    return status, table


@pytest.fixture(autouse=True)
def as_it_was():
    """verify sets switches, as the run that it checks does."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before[0]
    torch.backends.cuda.enable_cudnn_sdp(before[1])


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch, wanted):
    problem = "there is no NVIDIA driver on this machine"
    monkeypatch.setattr(cuda, "cuda_problem", lambda index=0: problem)
    status, table = verified(capsys, arguments(tmp_path, "--device", wanted))
    assert status == 1
    assert table["GPU"][0] == "FAIL" and problem in table["GPU"][1]
    assert [table[name][0] for name in NAMES[1:]] == ["skip"] * 4 + ["pass"]
    assert not list(tmp_path.iterdir())


def test_a_cpu_that_was_asked_for_is_no_failure(tmp_path, capsys):
    for flags, precision in (
        ((), "fp32 (auto: 16-bit types are slower on a CPU); a product of matrices is float32"),
        (("--bf16",), "bf16 (asked for; slow on a CPU); a product of matrices is bfloat16"),
    ):
        status, table = verified(capsys, arguments(tmp_path, "--device", "cpu", *flags))
        assert status == 0 and table["GPU"] == ("skip", "--device cpu")
        assert table["precision"] == ("pass", precision)
        assert table["memory"] == ("skip", "there is no GPU to check")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability, ...) makes up a GPU. What is computed on it is computed on the CPU."""
    ones, kernel = torch.ones, []

    @contextlib.contextmanager
    def sdpa_kernel(chosen):
        kernel[:] = [chosen.name]
        yield

    def make(
        capability=(8, 9),
        free=7.5,
        total=8.0,
        kernels=("FLASH", "EFFICIENT", "MATH"),
        compiles=True,
    ):
        def attention(q, k, v, attn_mask):
            name = kernel[0].removesuffix("_ATTENTION")
            takes_no_mask = name == "FLASH" and attn_mask is not None
            if name not in kernels or takes_no_mask:
                raise RuntimeError("No available kernel")
            return q

        def autocast(self):
            return torch.autocast("cpu", self.dtype, enabled=self.dtype is not None)

        nvml = types.ModuleType("pynvml")
        nvml.nvmlInit = lambda: None
        nvml.nvmlSystemGetDriverVersion = lambda: "580.65.06"
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        in_bytes = int(free * 2**30), int(total * 2**30)
        properties = types.SimpleNamespace(total_memory=in_bytes[1])
        problem = None if compiles else "torch.compile does not work on cuda:0 (no triton)"
        for module, name, replacement in (
            (cuda, "cuda_problem", lambda index=0: None),
            (torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce RTX 5060"),
            (torch.cuda, "get_device_capability", lambda index: capability),
            (torch.cuda, "get_device_properties", lambda index: properties),
            (torch.cuda, "mem_get_info", lambda index: in_bytes),
            (torch, "ones", lambda *shape, device=None, **options: ones(*shape, **options)),
            (torch.version, "cuda", "13.0"),
            (Setup, "autocast", autocast),
            (utilisation, "gpu_processes", lambda: ""),
            (preflight, "sdpa_kernel", sdpa_kernel),
            (F, "scaled_dot_product_attention", attention),
            (compiling, "compile_problem", lambda device: problem),
        ):
            monkeypatch.setattr(module, name, replacement)

    return make


def test_a_gpu_with_everything(tmp_path, capsys, gpu):
    gpu()
    status, table = verified(capsys, arguments(tmp_path, "--torch_compile"))
    assert status == 0 and {line[0] for line in table.values()} == {"pass"}
    reasons = {name: reason for name, (_, reason) in table.items()}
    card = "NVIDIA GeForce RTX 5060, compute capability 8.9, driver 580.65.06, torch for CUDA 13.0"
    assert reasons["GPU"] == card
    found = "7.5 GiB of 8.0 GiB free; the run is predicted to take 6.5 GiB: fits"
    assert reasons["memory"] == found
    found = "bf16 (auto: compute capability 8.9); a product of matrices is bfloat16"
    assert reasons["precision"] == found
    found = "flash, memory-efficient, math; with a padding mask: memory-efficient, math"
    assert reasons["attention"] == found


def test_what_a_gpu_may_lack(tmp_path, capsys, gpu, monkeypatch):
    gpu(free=0.5, kernels=(), compiles=False)
    status, table = verified(capsys, arguments(tmp_path, "--torch_compile"))
    assert status == 1
    for name in ("memory", "attention", "torch.compile"):
        assert table[name][0] == "FAIL", name
    # It was not asked for.
    assert verified(capsys, arguments(tmp_path))[1]["torch.compile"][0] == "skip"
    gpu(kernels=("MATH",))
    monkeypatch.setattr(utilisation, "gpu_processes", lambda: "game (pid 12) 1.0 GiB")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    table = verified(capsys, arguments(tmp_path))[1]
    assert "math alone" in table["attention"][1]
    assert "also on this GPU: game (pid 12) 1.0 GiB" in table["memory"][1]
    assert "driver unknown" in table["GPU"][1]


@pytest.mark.parametrize(
    "needed, word, status",
    [
        (6.5, "fits", "pass"),
        (7.4, "tight", "pass"),
        (7.6, "tight", "FAIL"),
        (7.0, "does not fit", "FAIL"),
    ],
)
def test_the_plan_decides_about_the_memory(tmp_path, capsys, gpu, needed, word, status):
    gpu()  # 7.5 of 8 GiB are free
    table = verified(capsys, arguments(tmp_path), (int(needed * 2**30), word))[1]
    assert table["memory"][0] == status


@pytest.mark.parametrize("kind", [(), ("--optimizer", "adamw_8bit"), ("--use_cpu_offload",)])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_size_of_a_checkpoint_is_predicted(tmp_path, monkeypatch, kind, frozen):
    monkeypatch.setattr(saving, "size", lambda count: f"{count:.0f} bytes")
    args = small.make_args(tmp_path, "--max_steps", "1", "--eval_every", "9", *kind)
    model = small.Network(width=128)
    if frozen:
        model.layers[0].requires_grad_(False)
    small.run(args, model=model, data=small.Waveforms(4))
    (file,) = checkpoint.list_checkpoints(args.checkpoint_dir)
    reason = preflight.check_disk(args, model)[1]
    predicted = int(re.search(r"checkpoints of (\d+) bytes", reason)[1])
    assert predicted == pytest.approx(file.stat().st_size, rel=0.15)


ENOUGH = 3 * 12 * MILLION + 2 * 4 * MILLION  # bytes, for `keep_two` and a million of parameters
NEEDED = "42 MiB free for 2 + 1 checkpoints of 11 MiB and the best weights, 42 MiB"


def disk_of(monkeypatch, free: int) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free, total=1)
    )


def checked(folder, *flags: str, more: int = 0) -> tuple[str, str]:
    args = arguments(folder, "--keep_last", "2", *flags)
    return preflight.check_disk(args, with_parameters(MILLION + more))


def test_disk_space(tmp_path, monkeypatch):
    disk_of(monkeypatch, ENOUGH)
    assert checked(tmp_path) == ("pass", NEEDED)
    status, reason = checked(tmp_path, more=1)
    assert status == "FAIL" and reason.endswith("lower --keep_last, or choose another --output_dir")
    (tmp_path / "file").touch()
    reason = f"cannot write in {tmp_path / 'file'}; choose another --output_dir"
    assert checked(tmp_path / "file" / "below") == ("FAIL", reason)


@pytest.mark.parametrize("name", ["checkpoint_step_00000001.pt", "best.safetensors"])
def test_what_a_resumed_run_replaces_counts_as_free(tmp_path, monkeypatch, name):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / name).write_bytes(bytes(1000))
    disk_of(monkeypatch, ENOUGH - 1000)
    assert checked(tmp_path, "--resume", "auto")[0] == "pass"
    assert checked(tmp_path)[0] == "FAIL"  # a new run keeps it aside


def test_a_run_may_require_the_disk_space(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(5, "Input/output error")

    args = arguments(tmp_path, "--keep_last", "2")
    disk_of(monkeypatch, ENOUGH)
    saving.require_disk(args, with_parameters(MILLION))
    with pytest.raises(RunError) as error:
        saving.require_disk(args, with_parameters(MILLION + 1))
    advice = "lower --keep_last, or choose another --output_dir"
    assert str(error.value) == f"checkpoints in {args.checkpoint_dir}: {NEEDED}; {advice}"
    monkeypatch.setattr(shutil, "disk_usage", fails)
    with pytest.raises(RunError, match=r"^cannot write in .*: Input/output error; choose another"):
        saving.require_disk(args, with_parameters(MILLION))


def test_the_trials_compute_here_too():
    """The checks of a GPU, called on the CPU."""
    status, reason = preflight.check_attention(Setup())
    assert status == "pass" and "math; with a padding mask: " in reason
    assert "memory-efficient" not in reason


def test_too_little_host_memory_is_one_line_before_the_run(monkeypatch):
    """For a level that keeps states and sums of gradients: 12 bytes a trained weight. Two ranks
    have half of the states each, and the first one has all of them while it saves."""
    model = torch.nn.Linear(1000, 1000, bias=False)

    class OfTwo(Ranks):
        def reduce(self, values, op="sum"):
            return list(values)

    for ranks, needed, text in (
        (Ranks(), 12_000_000, "11 MiB"),
        (OfTwo(0, 2), 20_000_000, "19 MiB"),
        (OfTwo(1, 2), 16_000_000, "15 MiB"),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks.size))
        model.requires_grad_(True)
        monkeypatch.setattr(offload, "free_host_memory", lambda needed=needed: needed)
        for level in (None, "states", "gradients", "weights"):
            offload.require_host_memory(model, level, ranks)
        monkeypatch.setattr(offload, "free_host_memory", lambda needed=needed: needed - 1)
        offload.require_host_memory(model, "states", ranks)
        for level in ("gradients", "weights"):
            with pytest.raises(RunError, match=f"--use_cpu_offload {level} takes {text} more"):
                offload.require_host_memory(model, level, ranks)
        model.requires_grad_(False)
        offload.require_host_memory(model, "weights", ranks)
