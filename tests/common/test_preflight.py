"""The pre-flight check, on this machine and on GPUs that are made up."""

import contextlib
import os
import re
import shutil
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from common import checkpoint, device, saving
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
    assert list(table) == NAMES and all(
        line[4:6] == "  " and line[:4] in ("pass", "FAIL", "skip") for line in lines
    )
    return status, table


@pytest.fixture(autouse=True)
def as_it_was():
    """verify sets switches, as the run that it checks does."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before[0]
    torch.backends.cuda.enable_cudnn_sdp(before[1])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(
        device, "cuda_problem", lambda index=0: "there is no NVIDIA driver on this machine"
    )


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_without_a_gpu_it_says_so(tmp_path, capsys, no_gpu, wanted):
    status, table = verified(capsys, arguments(tmp_path, "--device", wanted))
    assert status == 1
    assert (
        table["GPU"][0] == "FAIL" and "there is no NVIDIA driver on this machine" in table["GPU"][1]
    )
    for name in ("memory", "precision", "attention", "torch.compile"):
        assert table[name][0] == "skip", name
    assert table["disk"][0] == "pass"
    assert not list(tmp_path.iterdir())


def test_a_cpu_that_was_asked_for_is_no_failure(tmp_path, capsys):
    status, table = verified(capsys, arguments(tmp_path, "--device", "cpu"))
    assert status == 0 and table["GPU"] == ("skip", "--device cpu")
    found = "a product of matrices is"
    assert table["precision"] == (
        "pass",
        f"fp32 (auto: 16-bit types are slower on a CPU); {found} float32",
    )
    status, table = verified(capsys, arguments(tmp_path, "--device", "cpu", "--bf16"))
    assert status == 0 and table["precision"] == (
        "pass",
        f"bf16 (asked for; slow on a CPU); {found} bfloat16",
    )
    assert table["memory"] == ("skip", "there is no GPU to check")


def test_mixed_precision_that_is_not_on_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(Setup, "autocast", lambda self: contextlib.nullcontext())
    args = arguments(tmp_path, "--mixed_precision", "fp16")
    status, reason = preflight.check_precision(args, Setup(dtype=torch.float16))
    assert status == "FAIL" and reason.endswith("; a product of matrices is float32")


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
            if name not in kernels or (
                name == "FLASH" and attn_mask is not None
            ):  # which takes no masks
                raise RuntimeError("No available kernel")
            return q

        nvml = types.ModuleType("pynvml")
        nvml.nvmlInit = lambda: None
        nvml.nvmlSystemGetDriverVersion = lambda: "580.65.06"
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        for module, name, replacement in (
            (device, "cuda_problem", lambda index=0: None),
            (torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce RTX 5060"),
            (torch.cuda, "get_device_capability", lambda index: capability),
            (
                torch.cuda,
                "get_device_properties",
                lambda index: types.SimpleNamespace(total_memory=int(total * 2**30)),
            ),
            (torch.cuda, "mem_get_info", lambda index: (int(free * 2**30), int(total * 2**30))),
            (torch, "ones", lambda *shape, device=None, **options: ones(*shape, **options)),
            (
                Setup,
                "autocast",
                lambda self: torch.autocast("cpu", self.dtype, enabled=self.dtype is not None),
            ),
            (utilisation, "gpu_processes", lambda: ""),
            (preflight, "sdpa_kernel", sdpa_kernel),
            (F, "scaled_dot_product_attention", attention),
            (
                compiling,
                "compile_problem",
                lambda device: (
                    None if compiles else "torch.compile does not work on cuda:0 (no triton)"
                ),
            ),
        ):
            monkeypatch.setattr(module, name, replacement)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return make


def test_a_gpu_with_everything(tmp_path, capsys, gpu):
    gpu()
    status, table = verified(capsys, arguments(tmp_path, "--torch_compile"))
    assert status == 0 and {line[0] for line in table.values()} == {"pass"}
    assert (
        table["GPU"][1]
        == "NVIDIA GeForce RTX 5060, compute capability 8.9, driver 580.65.06, torch for CUDA 13.0"
    )
    assert (
        table["memory"][1] == "7.5 GiB of 8.0 GiB free; the run is predicted to take 6.5 GiB: fits"
    )
    assert (
        table["precision"][1]
        == "bf16 (auto: compute capability 8.9); a product of matrices is bfloat16"
    )
    assert (
        table["attention"][1]
        == "flash, memory-efficient, math; with a padding mask: memory-efficient, math"
    )


def test_an_older_gpu(tmp_path, capsys, gpu):
    gpu((7, 5), 14.5, 15.0, ("EFFICIENT", "MATH"))
    status, table = verified(capsys, arguments(tmp_path))
    assert status == 0 and table["precision"][1].startswith("fp16 with loss scaling")
    assert table["torch.compile"] == ("pass", "a tiny function was compiled for cuda:0")


def test_what_a_gpu_may_lack(tmp_path, capsys, gpu, monkeypatch):
    gpu(free=0.5, kernels=(), compiles=False)
    status, table = verified(capsys, arguments(tmp_path, "--torch_compile"))
    assert status == 1
    for name in ("memory", "attention", "torch.compile"):
        assert table[name][0] == "FAIL", name
    assert (
        verified(capsys, arguments(tmp_path))[1]["torch.compile"][0] == "skip"
    )  # it was not asked for
    gpu(kernels=("MATH",))
    assert "math alone" in verified(capsys, arguments(tmp_path))[1]["attention"][1]
    monkeypatch.setattr(utilisation, "gpu_processes", lambda: "game (pid 12) 1.0 GiB")
    assert (
        "also on this GPU: game (pid 12) 1.0 GiB"
        in verified(capsys, arguments(tmp_path))[1]["memory"][1]
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "driver unknown" in verified(capsys, arguments(tmp_path))[1]["GPU"][1]


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
    assert (
        verified(capsys, arguments(tmp_path), (int(needed * 2**30), word))[1]["memory"][0] == status
    )


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
    assert int(re.search(r"checkpoints of (\d+) bytes", reason)[1]) == pytest.approx(
        file.stat().st_size, rel=0.15
    )


def test_disk_space(tmp_path, monkeypatch):
    args = arguments(tmp_path, "--keep_last", "2", "--resume", "auto")
    free = 3 * 12 * MILLION + 2 * 4 * MILLION
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    assert preflight.check_disk(args, with_parameters(MILLION)) == (
        "pass",
        "42 MiB free for 2 + 1 checkpoints of 11 MiB and the best weights, 42 MiB",
    )
    status, reason = preflight.check_disk(args, with_parameters(MILLION + 1))
    assert status == "FAIL" and reason.endswith("lower --keep_last, or choose another --output_dir")
    args.checkpoint_dir.mkdir()
    (args.checkpoint_dir / "checkpoint_step_00000001.pt").write_bytes(
        bytes(100)
    )  # the run will remove it
    assert preflight.check_disk(args, with_parameters(MILLION + 1))[0] == "pass"
    new_run = arguments(tmp_path, "--keep_last", "2")  # a new run keeps it aside
    assert preflight.check_disk(new_run, with_parameters(MILLION + 1))[0] == "FAIL"
    (tmp_path / "file").touch()
    nowhere = arguments(tmp_path / "file" / "below")
    status, reason = preflight.check_disk(nowhere, with_parameters(1))
    assert (
        status == "FAIL"
        and reason == f"cannot write in {tmp_path / 'file'}; choose another --output_dir"
    )


def test_a_resumed_run_counts_its_best_weights_once(tmp_path, monkeypatch):
    args = arguments(tmp_path, "--keep_last", "2", "--resume", "auto")
    args.checkpoint_dir.mkdir()
    free = 3 * 12 * MILLION + 2 * 4 * MILLION
    (args.checkpoint_dir / "best.safetensors").write_bytes(
        bytes(1000)
    )  # which a better one will replace
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free - 1000))
    assert preflight.check_disk(args, with_parameters(MILLION))[0] == "pass"
    assert (
        preflight.check_disk(arguments(tmp_path, "--keep_last", "2"), with_parameters(MILLION))[0]
        == "FAIL"
    )


def test_a_run_may_require_the_disk_space(tmp_path, monkeypatch):
    args = arguments(tmp_path, "--keep_last", "2")
    free = types.SimpleNamespace(free=3 * 12 * MILLION + 2 * 4 * MILLION)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    saving.require_disk(args, with_parameters(MILLION))
    for problem, reason in (
        (
            lambda: free,
            (
                f"checkpoints in {args.checkpoint_dir}: 42 MiB free for 2 + 1 checkpoints of 11 MiB"
                " and the best weights, 42 MiB; lower --keep_last, or choose another"
                " --output_dir"
            ),
        ),
        (
            lambda: (_ for _ in ()).throw(OSError(5, "Input/output error")),
            (
                f"cannot write in {args.checkpoint_dir}: Input/output error; choose another"
                " --output_dir"
            ),
        ),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, problem=problem: problem())
        with pytest.raises(RunError) as error:
            saving.require_disk(args, with_parameters(MILLION + 1))
        assert str(error.value) == reason


def test_a_check_that_fails_is_a_line(tmp_path, capsys, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    status, table = verified(capsys, arguments(tmp_path, "--device", "cpu"))
    assert status == 1 and table["disk"] == (
        "FAIL",
        "it does not work here: [Errno 5] Input/output error",
    )


def test_the_trials_compute_here_too():
    """The checks of a GPU, called on the CPU."""
    status, reason = preflight.check_attention(Setup())
    assert (
        status == "pass"
        and "math; with a padding mask: " in reason
        and "memory-efficient" not in reason
    )


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


def test_free_host_memory_is_what_the_system_says():
    free = offload.free_host_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free > 0 and free < 10 * total
