"""Kernels for a GPU, the processes on it, and how busy it is, on machines that are made up."""

import json
import os
import re
import sys
import threading
import time
import types

import pytest
import torch

from common import gpu
from tests import toy

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.11 on PyPI
CUDA_126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
UUID = "5a1c7e9e-0000-1111-2222-333344445555"
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "capability, architectures, words",
    [
        # Binaries run on later minor versions of the same major one.
        ((7, 5), CUDA_13, None), ((8, 0), CUDA_13, None), ((8, 6), CUDA_13, None), ((8, 7), CUDA_13, None),
        ((8, 9), CUDA_13, None), ((9, 0), CUDA_13, None), ((10, 0), CUDA_13, None), ((10, 3), CUDA_13, None),
        ((12, 0), CUDA_13, None), ((12, 1), CUDA_13, None),
        ((6, 1), CUDA_13, "whl/cu126"), ((5, 2), CUDA_13, "whl/cu126"), ((7, 0), CUDA_13, "whl/cu126"),
        ((7, 2), CUDA_13, "whl/cu126"), ((3, 5), CUDA_13, "nor has any version that requirements.txt allows"),
        ((11, 0), CUDA_13, "PyPI's build"), ((6, 1), CUDA_126, None), ((12, 0), CUDA_126, "PyPI's build"),
        ((8, 0), ["sm_86"], "whl/cu126"),
        # PTX is compiled for all later versions when it is loaded.
        ((9, 0), ["compute_90"], None), ((12, 1), ["sm_75", "sm_90", "compute_90"], None), ((13, 0), [*CUDA_13, "compute_120"], None),
        ((6, 1), ["sm_75", "compute_75"], "whl/cu126"),
        ((10, 0), ["sm_90", "sm_100a"], None), ((10, 3), ["sm_100f"], None),
        # AMD's names, or none: nothing is known.
        ((9, 0), ["gfx90a"], None), ((9, 0), [], None),
    ],
)  # fmt: skip
def test_compute_capability_against_the_build(capability, architectures, words):
    problem = gpu.kernel_problem("GTX", capability, architectures)
    if words is None:
        assert problem is None
    else:
        assert f"GTX has compute capability {capability[0]}.{capability[1]}" in problem and words in problem


def test_other_processes_on_the_gpu_are_named_and_left_alone(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        f"#!/bin/sh\necho '75955, /usr/bin/python3, 14510'\necho '{os.getpid()}, python, 900'\necho '12, game, [N/A]'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu.gpu_processes() == "python3 (pid 75955) 14.2 GiB, game (pid 12) an unknown amount"
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu.gpu_processes() == ""


# --- how busy the GPU is ---------------------------------------------------------------------------------------------


class FakeNvml(types.ModuleType):
    """Two GPUs, of which CUDA sees the second. Its utilisation rises by a hundredth with every reading."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_after: int = 10**9, unsupported: bool = False, initialises: bool = True):
        super().__init__("pynvml")
        self.fails_after, self.unsupported, self.initialises = fails_after, unsupported, initialises
        self.asked, self.started, self.threads = 0, 0, set()

    def nvmlInit(self):
        if not self.initialises:
            raise self.NVMLError("Driver Not Loaded")
        self.started += 1

    def nvmlShutdown(self):
        self.started -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("Not Found")
        return "second"

    def nvmlDeviceGetUtilizationRates(self, handle):
        assert handle == "second"
        if self.unsupported or self.asked >= self.fails_after:
            raise self.NVMLError("Not Supported")
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        return types.SimpleNamespace(gpu=self.asked % 100, memory=0)


@pytest.fixture
def nvml(monkeypatch):
    """nvml(...) installs a fake library, and a GPU that CUDA knows by its UUID."""

    def use(**options) -> FakeNvml:
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=UUID))
        return fake

    return use


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def sampling() -> list:
    return [thread for thread in threading.enumerate() if thread.name == "gpu utilisation"]


@pytest.fixture
def utilisation():
    """utilisation(...) starts to sample; the thread ends with the test, even if that fails."""
    started = []

    def start(**options) -> gpu.GpuUtilisation:
        started.append(gpu.GpuUtilisation(CUDA, **options))
        return started[-1]

    yield start
    for busy in started:
        busy.close()


def rests(busy: gpu.GpuUtilisation) -> bool:
    before = busy.count
    time.sleep(0.05)
    return busy.count == before


def test_utilisation_is_the_mean_of_the_samples_of_the_gpu_in_use(nvml, utilisation):
    fake = nvml()
    busy = utilisation(seconds=0.005)
    assert busy.problem == "" and busy.mean() is None
    wait_for(lambda: busy.count >= 5)
    assert busy.mean() > 0.01
    with busy.rest():
        wait_for(lambda: rests(busy))  # a sample may be under way
        assert rests(busy)
    before = busy.mean()
    busy.seconds = 60
    wait_for(lambda: rests(busy))
    busy.reset()
    assert busy.mean() >= before  # there is no sample since: the previous mean
    busy.close()
    busy.close()
    assert not sampling() and fake.started == 0 and fake.threads == {"gpu utilisation", "MainThread"}


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"initialises": False}, "NVML does not start: Driver Not Loaded"),
        ({"unsupported": True}, "NVML has no readings for this GPU: Not Supported"),
    ],
)
def test_utilisation_that_cannot_be_read_is_left_out(nvml, utilisation, options, problem):
    fake = nvml(**options)
    busy = utilisation()
    assert busy.problem == problem and busy.mean() is None and not sampling() and fake.started == 0
    busy.reset()
    busy.close()


def test_utilisation_without_the_library_another_gpu_or_a_cpu(nvml, monkeypatch):
    nvml()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="another"))
    assert gpu.GpuUtilisation(CUDA).problem == "NVML has no readings for this GPU: Not Found"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace())
    assert "NVML has no readings" in gpu.GpuUtilisation(CUDA).problem
    assert gpu.GpuUtilisation(torch.device("cpu")).problem == "no NVIDIA GPU"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.GpuUtilisation(CUDA).problem == "the package nvidia-ml-py is not installed"
    assert not sampling()


def test_a_gpu_that_stops_answering_ends_the_samples_and_nothing_else(nvml, utilisation):
    nvml(fails_after=4)
    busy = utilisation(seconds=0.005)
    wait_for(lambda: busy.problem)
    assert busy.problem == "NVML has no more readings for this GPU: Not Supported"
    busy.reset()
    assert busy.mean() is None
    busy.close()
    assert not sampling()


def test_forked_workers_have_no_thread_and_end(nvml, utilisation, no_hang):
    nvml()
    busy = utilisation(seconds=0.001)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(len(sampling()) + (0 if busy.problem == "" else 2))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(sampling()) == 1
    busy.close()


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_utilisation_in_the_reports_of_a_run(tmp_path, nvml, monkeypatch, capsys, ends):
    """The run is on the CPU; it believes that its utilisation can be read."""
    nvml()
    real = gpu.GpuUtilisation
    monkeypatch.setattr(gpu, "GpuUtilisation", lambda device: real(CUDA, seconds=0.002))

    def compute_loss(model, batch):
        time.sleep(0.02)
        if ends == "with an error" and "item 5" in batch["names"]:
            raise ValueError("a defect")
        return toy.compute_loss(model, batch)

    args = toy.make_args(tmp_path, "--batch_size", "1", "--gradient_accumulation_steps", "1", "--dataloader_num_workers", "1")  # fmt: skip
    try:
        toy.run(args, compute_loss=compute_loss)
        assert ends == "well"
    except ValueError:
        assert ends == "with an error"
    assert not sampling()
    lines = [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]
    values = [line["train/gpu_utilisation"] for line in lines if "train/gpu_utilisation" in line]
    assert ends == "with an error" or (len(values) >= 10 and all(0 < value <= 1 for value in values))
    if ends == "well":
        assert re.search(r"waiting \d+%  GPU \d+%  ", capsys.readouterr().err)
