"""Devices and precisions on machines that are made up (torch.cuda is replaced), random states, and
two real processes."""

import io
import math
import os
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch

from common import cuda, device
from common.device import Setup
from common.errors import UsageError
from common.parts import processes
from tests import small

CPU = torch.device("cpu")
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.11 on PyPI
# torch's messages.
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed"
    " a driver from http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver"
    " by downloading and installing a new version from the URL:"
    " http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to"
    " install a PyTorch version that has been compiled with your version of the CUDA driver."
)
TORCHRUN = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (*TORCHRUN, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name in device.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


@pytest.fixture
def machine(monkeypatch):
    """machine(capabilities, ...) replaces torch.cuda by that of a machine with these GPUs. Returns
    the list of the indices that are made the current device."""

    def make(
        *capabilities, architectures=CUDA_13, cuda="13.0", starts=None, busy=None
    ) -> list[int]:
        chosen = []

        def start():
            warnings.warn("Found GPU0, which is ten lines of advice", stacklevel=2)
            if starts:
                raise starts

        def ones(*_, **__):
            if busy:
                raise RuntimeError(busy)
            return types.SimpleNamespace(item=lambda: 1.0)

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(device.torch, "ones", ones)
        for name, replacement in {
            "init": start,
            "device_count": lambda: len(capabilities),
            "set_device": chosen.append,
            "get_device_name": lambda index: f"GPU {index}",
            "get_arch_list": lambda: architectures,
            "get_device_capability": lambda which: capabilities[getattr(which, "index", which)],
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        return chosen

    return make


def refusal(wanted: str) -> str:
    """Why a device is refused: one line, exit status 2."""
    with pytest.raises(UsageError) as failure:
        device.pick_device(wanted)
    message = str(failure.value)
    assert "\n" not in message and message.startswith(f"--device {wanted}: ")
    return message


# --- the device -----------------------------------------------------------------------------------


def test_a_gpu_that_works_is_used(machine, recwarn, capsys):
    chosen = machine((7, 5), (8, 9))
    assert device.pick_device("auto") == device.pick_device("cuda") == torch.device("cuda", 0)
    assert device.pick_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [0, 0, 1]
    assert device.pick_device("cpu") == CPU
    assert not recwarn.list and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "wanted", ["mps", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:256", "", "0"]
)
def test_other_devices_are_refused(machine, wanted):
    machine((8, 0))
    assert refusal(wanted).endswith("it must be auto, cpu, cuda or cuda:N")


PROBLEMS = {
    "CPU-only build": (dict(cuda=None), "is a CPU-only build"),
    "no driver": (
        dict(starts=RuntimeError(NO_DRIVER)),
        "there is no NVIDIA driver on this machine",
    ),
    "no GPU": (dict(starts=RuntimeError("No CUDA GPUs are available")), "there is no NVIDIA GPU"),
    "another reason": (
        dict(starts=RuntimeError("CUDA unknown error\nten more lines")),
        "CUDA does not start: CUDA unknown error",
    ),
    "busy": (
        dict(busy="CUDA error: out of memory\nCUDA kernel errors might"),
        "cuda:0 cannot compute now (CUDA error: out of memory): see nvidia-smi",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_wrong_with_the_gpu(machine, capsys, case):
    """`auto` prints it and falls back to the CPU, `cuda` is an error."""
    settings, words = PROBLEMS[case]
    machine((8, 0), **settings)
    assert words in refusal("cuda") and "--device cpu works everywhere" in refusal("cuda")
    assert device.pick_device("auto") == CPU
    out, err = capsys.readouterr()
    assert out.startswith("device: cpu (auto: ") and words in out and out.count("\n") == 1
    assert not err
    # If stdout holds the results (--transcribe), it is printed on stderr.
    assert device.pick_device("auto", quiet=True) == CPU
    assert capsys.readouterr() == ("", out)


@pytest.mark.parametrize(
    "cuda, found, words, build",
    [
        ("13.0", 11040, "supports CUDA 11.4 at most", False),
        ("13.0", 12040, "supports CUDA 12.4 at most", True),
        ("12.8", 11080, "supports CUDA 11.8 at most", False),
    ],
)
def test_an_old_driver(machine, cuda, found, words, build):
    """The CUDA 12.6 build helps only if the driver is one of CUDA 12."""
    machine((7, 5), cuda=cuda, starts=RuntimeError(OLD_DRIVER.format(found)))
    message = refusal("cuda")
    assert words in message and f"update it to {580 if cuda == '13.0' else 525} or newer" in message
    assert ("whl/cu126" in message) == build


def test_an_index_that_is_not_there(machine, monkeypatch):
    machine((8, 0), (8, 0))
    assert "there is no cuda:7, only 2 GPUs;" in refusal("cuda:7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine((8, 0))
    assert "there is no cuda:1, only 1 GPU (CUDA_VISIBLE_DEVICES is '1')" in refusal("cuda:1")


def test_advice_can_be_pasted(machine):
    """The command is for this interpreter. It is forced,
    because pip treats torch 2.11.0 and torch 2.11.0+cu126 as equal."""
    machine((6, 1))
    command = refusal("cuda").split("build: ")[1].split(";")[0]
    assert command.startswith(f"{sys.executable} -m pip install --force-reinstall ")
    assert command.endswith(" --index-url https://download.pytorch.org/whl/cu126")
    assert "'torch>=2.8,<2.12'" in command  # later ones have no build for such a GPU


# --- several ranks --------------------------------------------------------------------------------


def test_torchrun_gives_each_rank_its_gpu(machine, monkeypatch):
    machine((8, 0), (8, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device.pick_device("auto") == device.pick_device("cuda") == torch.device("cuda", 1)
    assert "needs its own GPU; --device cuda gives them" in refusal("cuda:0")


def test_more_ranks_than_gpus_is_an_error_not_a_wait(machine, monkeypatch):
    """If rank 1 were on the CPU and rank 0 on its GPU, each would wait for the other."""
    machine((8, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "there is no cuda:1, only 1 GPU" in refusal("auto")
    machine(starts=RuntimeError(NO_DRIVER))  # without a GPU all ranks are on the CPU
    assert device.pick_device("auto") == CPU


def test_ranks_that_torchrun_did_not_start(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2, but .*torchrun"):
        processes.join(CPU)


def add_up(rank: int) -> None:
    """One of two processes: everything `Ranks` does, checked on both."""
    ranks = processes.join(CPU)
    assert (ranks.rank, ranks.size, ranks.first) == (rank, 2, rank == 0)

    # Exact: counts beyond 2**53, and floats that fp32 would round.
    assert ranks.reduce([2**53 + 1, rank]) == [2**54 + 2, 1]
    assert ranks.reduce([0.1, 1 / 3]) == [0.2, 2 / 3]
    assert ranks.reduce([2**24 + 1, 0.1]) == [2 * (2**24 + 1), 0.2]
    assert ranks.reduce([rank, 5 - rank], "max") == [1, 5]
    assert ranks.reduce([0.1 * rank, -rank], "max") == [0.1, 0.0]
    assert ranks.gather({"rank": rank, "rng": torch.ones(2) * rank})[1]["rank"] == 1


def test_two_ranks(run_ranks):
    run_ranks(add_up)


# --- precision ------------------------------------------------------------------------------------

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "capability, wanted, dtype, reason",
    [
        ((7, 5), "auto", FP16, "7.5"),
        ((8, 0), "auto", BF16, "8.0"),
        ((7, 5), "fp16", FP16, "asked for"),
        ((7, 5), "bf16", BF16, "fp16 is faster"),
        ((8, 9), "bf16", BF16, "asked for"),
        ((7, 5), "no", None, "--no_mixed_precision"),
        (None, "auto", None, "slower on a CPU"),
        (None, "fp16", FP16, "slow on a CPU"),
        (None, "bf16", BF16, "slow on a CPU"),
    ],
)
def test_pick_dtype(machine, capability, wanted, dtype, reason):
    machine(capability)
    picked, why = device.pick_dtype(wanted, capability)
    assert picked is dtype and reason in why


# --- the allocator and the switches ---------------------------------------------------------------


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ["x:1", "x:1"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, ["a:1", "a:1"]),
        ({"PYTORCH_ALLOC_CONF": "b:1"}, ["b:1", "b:1"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, ["a:1", "b:1"]),
    ],
)
def test_set_allocator(monkeypatch, given, expected):
    for name, conf in given.items():
        monkeypatch.setenv(name, conf)
    device.set_allocator("x:1")
    assert [os.environ[name] for name in device.ALLOCATOR_VARIABLES] == expected


def arguments(*flags: str):
    return small.make_args("unused", "--device", "auto", "--allocator_conf", "x:1", *flags)


def test_variables_are_set_before_cuda_starts(machine, monkeypatch):
    seen = []
    machine(starts=RuntimeError(NO_DRIVER))
    before = torch.cuda.init
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(dict(os.environ)) or before())
    device.setup(arguments())
    assert seen[0]["PYTORCH_CUDA_ALLOC_CONF"] == seen[0]["PYTORCH_ALLOC_CONF"] == "x:1"


# --- data workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cores, wanted, kind, expected",
    [
        (6, "auto", "cpu", 1),
        (6, "auto", "cuda", 4),
        (1, "auto", "cuda", 1),
        (6, 0, "cuda", 0),
        (6, 7, "cpu", 7),
    ],
)
def test_pick_workers(monkeypatch, capsys, cores, wanted, kind, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores), raising=False)
    assert device.pick_workers(wanted, torch.device(kind)) == expected
    said = f"data workers: {expected} (auto: {cores} cores, training on "
    out = capsys.readouterr().out
    assert out.startswith(said) if wanted == "auto" else not out
    assert device.pick_workers(wanted, torch.device(kind), quiet=True) == expected
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_evaluation_caches_weights_in_16_bits(dtype):
    for training in (True, False):
        with torch.set_grad_enabled(training), Setup(dtype=dtype).autocast():
            assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is dtype
            assert torch.is_autocast_cache_enabled() != training
    with torch.no_grad(), Setup(dtype=dtype, keeps_copies=False).autocast():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    with Setup().autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level, expected", [(None, True), ("states", True), ("weights", False)])
def test_a_gpu_without_room_for_gradients_has_none_for_copies_of_weights(level, expected):
    flags = ("--use_cpu_offload", level) if level else ()
    args = arguments("--device", "cpu", *flags)
    assert device.setup(args, quiet=True).keeps_copies == expected


# --- random states --------------------------------------------------------------------------------


def draw() -> list:
    arrays = [np.random.rand(3), np.random.randn(1), torch.rand(3), torch.randn(1)]
    return [random.random(), random.gauss(0, 1), *(array.tolist() for array in arrays)]


def test_random_states_survive_a_file(monkeypatch):
    """Python and NumPy draw Gaussian numbers in pairs; the second of a pair is part of the
    state."""
    device.seed_everything(7)
    random.gauss(0, 1), np.random.randn(1), torch.rand(5)
    file = io.BytesIO()
    torch.save({"rng": [device.rng_state(CPU)]}, file)
    expected = draw()
    device.seed_everything(8)
    assert draw() != expected
    file.seek(0)
    state = torch.load(file, weights_only=True)["rng"][0]
    device.set_rng_state(state, CPU)
    assert draw() == expected
    monkeypatch.delattr(torch.cuda, "set_rng_state")
    saved_on_a_gpu = {**state, "cuda": torch.zeros(16, dtype=torch.uint8)}
    device.set_rng_state(saved_on_a_gpu, CPU)
    assert draw() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu():
    chosen = device.pick_device("cuda")
    assert cuda.cuda_problem(chosen.index) is None and torch.cuda.current_device() == chosen.index
    assert f"no cuda:{torch.cuda.device_count()}" in cuda.cuda_problem(torch.cuda.device_count())
    torch.rand(3, device=chosen)
    state = device.rng_state(chosen)
    expected = torch.rand(3, device=chosen)
    device.set_rng_state(state, chosen)
    assert torch.equal(torch.rand(3, device=chosen), expected)


def test_the_loss_scale_follows_torchs_rule():
    """Against torch.amp.GradScaler, over overflows and long runs without one."""
    generator = torch.Generator().manual_seed(0)
    ours = device.LossScale(1024.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    theirs.scale(torch.zeros(()))
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p])
    for update in range(9000):
        overflows = update < 5000 and float(torch.rand((), generator=generator)) < 0.0005
        p.grad = torch.full((1,), math.inf if overflows else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(not overflows)
        assert ours.value == theirs.get_scale(), update
    saved = theirs.state_dict()
    assert ours.value not in (1024.0,) and ours.updates == saved["_growth_tracker"]
    again = device.LossScale()
    again.load_state_dict(saved)
    assert again.state_dict() == ours.state_dict()
