"""Kernels for a GPU, the processes on it, and how busy it is, on machines that are made up."""

import os
import re
import sys
import types

import pytest
import torch

from common import cuda, loop
from common.parts import utilisation
from tests import small

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.11 on PyPI
CUDA_126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
UUID = "5a1c7e9e-0000-1111-2222-333344445555"
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "capability, architectures, words",
    [
        # Binaries run on later minor versions of the same major one.
        ((7, 5), CUDA_13, None),
        ((10, 3), CUDA_13, None),
        ((6, 1), CUDA_13, "whl/cu126"),
        ((3, 5), CUDA_13, "nor has any version that requirements.txt allows"),
        ((11, 0), CUDA_13, "PyPI's build"),
        ((6, 1), CUDA_126, None),
        ((8, 0), ["sm_86"], "whl/cu126"),
        # PTX is compiled for all later versions when it is loaded.
        ((9, 0), ["compute_90"], None),
        ((12, 1), ["sm_75", "sm_90", "compute_90"], None),
        ((6, 1), ["sm_75", "compute_75"], "whl/cu126"),
        ((10, 0), ["sm_90", "sm_100a"], None),
        # AMD's names, or none: nothing is known.
        ((9, 0), ["gfx90a"], None),
        ((9, 0), [], None),
    ],
)
def test_compute_capability_against_the_build(capability, architectures, words):
    problem = cuda.kernel_problem("GTX", capability, architectures)
    if words is None:
        assert problem is None
    else:
        named = f"no kernels for GTX (compute capability {capability[0]}.{capability[1]})"
        assert named in problem and words in problem


@pytest.mark.parametrize(
    "output, processes",
    [
        (
            "75955, /usr/bin/python3, 14510\n{own}, python, 900\n12, game, [N/A]\n",
            "python3 (pid 75955) 14.2 GiB, game (pid 12) an unknown amount",
        ),
        ("7, a name, with a comma, 512\n", "a name, with a comma (pid 7) 0.5 GiB"),
        ("No devices were found\n", ""),
        ("", ""),
    ],
)
def test_other_processes_on_the_gpu_are_named_and_left_alone(
    tmp_path, monkeypatch, output, processes
):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{output.format(own=os.getpid())}END\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert utilisation.gpu_processes() == processes
    monkeypatch.setenv("PATH", "/nowhere")
    assert utilisation.gpu_processes() == ""


# --- how busy the GPU is --------------------------------------------------------------------------


class FakeNvml(types.ModuleType):
    """Two GPUs, of which CUDA sees the second. Its utilisation rises by a hundredth with every
    reading."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_after: int = 10**9, starts: bool = True):
        super().__init__("pynvml")
        self.fails_after = fails_after
        self.starts = starts
        self.asked = 0

    def nvmlInit(self):
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("Not Found")
        return "second"

    def nvmlDeviceGetUtilizationRates(self, handle):
        assert handle == "second"
        if self.asked >= self.fails_after:
            raise self.NVMLError("Not Supported")
        self.asked += 1
        return types.SimpleNamespace(gpu=self.asked, memory=0)


@pytest.fixture
def nvml(monkeypatch):
    """nvml(...) installs a fake library, and a GPU that CUDA knows by its UUID."""

    def use(uuid: str = UUID, **options) -> FakeNvml:
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        properties = types.SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return fake

    return use


def test_utilisation_is_the_mean_of_the_last_readings_of_the_gpu_in_use(nvml):
    nvml()
    busy = utilisation.GpuUtilisation(CUDA, seconds=0)
    assert busy.problem == "" and busy.mean() is None
    for _ in range(3):
        busy.sample()
    assert busy.mean() == pytest.approx(0.02)
    for _ in range(37):
        busy.sample()
    assert busy.mean() == pytest.approx(sum(range(11, 41)) / 30 / 100)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"starts": False}, "Driver Not Loaded"),
        ({"fails_after": 4}, "Not Supported"),
        ({"uuid": "another"}, "Not Found"),
    ],
)
def test_utilisation_that_cannot_be_read_is_left_out(nvml, options, problem):
    nvml(**options)
    busy = utilisation.GpuUtilisation(CUDA, seconds=0)
    for _ in range(6):
        busy.sample()
    assert busy.problem == f"NVML of the package nvidia-ml-py: {problem}" and busy.mean() is None


def test_utilisation_without_the_library_or_on_a_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    busy = utilisation.GpuUtilisation(CUDA, seconds=0)
    busy.sample()
    assert "nvidia-ml-py" in busy.problem and busy.mean() is None


def test_utilisation_in_the_reports_of_a_run(tmp_path, nvml, monkeypatch, capsys):
    """The run is on the CPU; it believes that its utilisation can be read. Evaluations are not
    sampled."""
    fake, asked = nvml(), []
    begin_training = loop.begin_training

    def with_readings(*arguments):
        training = begin_training(*arguments)
        training.utilisation = utilisation.GpuUtilisation(CUDA, seconds=0)
        return training

    monkeypatch.setattr(loop, "begin_training", with_readings)

    def evaluate(model, eval_batches):
        asked.append(fake.asked)
        results = small.evaluate(model, eval_batches)
        assert fake.asked == asked[-1]
        return results

    flags = "--batch_size 1 --gradient_accumulation_steps 1 --eval_every 5".split()
    args = small.make_args(tmp_path, *flags)
    small.run(args, evaluate=evaluate)
    values = [line.get("train/gpu_utilisation") for line in small.metrics(args)]
    values = [value for value in values if value is not None]
    assert len(values) == 13 and values == sorted(values) and 0 < asked[0] < asked[1] < asked[2]
    assert re.search(r"waiting \d+%  GPU \d+%  ", capsys.readouterr().err)
