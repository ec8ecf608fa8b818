"""Why a GPU cannot be used, which processes use it, and how busy it is."""

import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from common.errors import first_line

# PyPI's torch 2.11 is built for CUDA 13.0 and compute capability 7.5 to 12.0; the CUDA 12.6 builds of 2.8 to 2.11 cover
# 5.0 to 9.0 (RELEASE.md of pytorch, "CUDA Support Matrix"). pip replaces one by the other only with --force-reinstall.
PIP_TORCH = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.8,<2.12' 'torchaudio>=2.8,<2.12'"
CUDA_126 = f"the CUDA 12.6 build: {PIP_TORCH} --index-url https://download.pytorch.org/whl/cu126"
# The oldest driver for each major version of CUDA (NVIDIA's "Minor Version Compatibility").
OLDEST_DRIVER = {"12": "525", "13": "580"}


def cuda_problem(index: int = 0) -> str | None:
    """Why the installed torch cannot use CUDA device `index`: one line with what would help. None if it can; the device
    is then the current one."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"the installed torch {torch.__version__} is a CPU-only build; the CUDA one: {PIP_TORCH}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ten lines about the architecture; kernel_problem says it in one
            torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        reason = first_line(error)
        if "too old" in reason:
            return driver_problem(reason)
        if "no NVIDIA driver" in reason:
            return "there is no NVIDIA driver on this machine (nvidia-smi should list the GPU)"
        if "No CUDA GPUs" not in reason:
            return f"CUDA does not start: {reason}"
        count = 0
    if index >= count:
        plural = "s" if count > 1 else ""
        missing = f"no cuda:{index}, only {count} GPU{plural}" if count else "no NVIDIA GPU"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"there is {missing}" + (f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else "")
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if problem := kernel_problem(name, capability, torch.cuda.get_arch_list()):
        return problem
    try:  # fails if another process has filled the GPU or uses it exclusively
        torch.cuda.set_device(index)
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        return f"cuda:{index} cannot compute now ({first_line(error)}): nvidia-smi shows which processes use it"
    return None


def driver_problem(reason: str) -> str:
    """Explains torch's "driver on your system is too old (found version 12040)", where 12040 stands for CUDA 12.4."""
    version = int((re.search(r"found version (\d+)", reason) or ["", "0"])[1])
    newest = f" supports CUDA {version // 1000}.{version % 1000 // 10} at most and" if version else ""
    oldest = OLDEST_DRIVER.get(torch.version.cuda.split(".")[0])
    update = f"update it to {oldest} or newer" if oldest else "update it"
    instead = f", or install {CUDA_126}" if version >= 12000 else ""
    return f"the NVIDIA driver{newest} is too old for torch {torch.__version__}: {update}{instead}"


def kernel_problem(name: str, capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Why a torch built for `architectures` (["sm_75", ..., "compute_120"]) has no kernels for this GPU, or None.
    Binaries ("sm_") run on later minor versions of the same major version, PTX ("compute_") on all later versions."""
    binaries = [divmod(int(a.removeprefix("sm_").rstrip("af")), 10) for a in architectures if a.startswith("sm_")]
    ptx = [divmod(int(a.removeprefix("compute_").rstrip("af")), 10) for a in architectures if a.startswith("compute_")]
    if any(b[0] == capability[0] and b[1] <= capability[1] for b in binaries) or any(p <= capability for p in ptx):
        return None
    if not binaries and not ptx:  # a list that is empty or has AMD's names
        return None
    lack = f"{name} has compute capability {capability[0]}.{capability[1]}, for which torch {torch.__version__} has no kernels"
    if capability < (5, 0):
        return f"{lack}, nor has any version that requirements.txt allows"
    if capability < min(binaries + ptx):
        return f"{lack}; install {CUDA_126}"
    return f"{lack}; install PyPI's build: {PIP_TORCH}"


def gpu_processes() -> str:
    """The other processes that hold GPU memory, as nvidia-smi reports them: "python3 (pid 75955) 14.2 GiB". Empty if
    there are none or they cannot be read."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    processes = []
    for row in rows:
        pid, name, used = [cell.strip() for cell in row.split(",")][:3]
        if pid != str(os.getpid()):
            size = f"{int(used) / 1024:.1f} GiB" if used.isdigit() else "an unknown amount"
            processes.append(f"{os.path.basename(name)} (pid {pid}) {size}")
    return ", ".join(processes)


def load_nvml():
    """Initialises and returns NVIDIA's management library. Raises `RuntimeError` if it is missing or does not start."""
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError) as error:
        raise RuntimeError(f"NVML does not start: {error}") from None
    return pynvml


class GpuUtilisation:
    """The share of the time in which the GPU computes, read from NVML about once a second by a thread that never calls
    CUDA. `problem` says why there are no readings, which is not an error.

    The GPU is looked up by its UUID: NVML numbers all GPUs of the machine, CUDA those of CUDA_VISIBLE_DEVICES in its
    own order. Forked data workers inherit this object but not its thread."""

    def __init__(self, device: torch.device, seconds: float = 1.0):
        self.problem, self.seconds = "", seconds
        self.total, self.count, self.last = 0, 0, None
        self.resting, self.ending, self.thread = False, threading.Event(), None
        if device.type != "cuda" or torch.version.cuda is None:
            self.problem = "no NVIDIA GPU"
            return
        try:
            self.nvml = load_nvml()
        except RuntimeError as error:
            self.problem = str(error)
            return
        try:
            self.handle = self._find(str(torch.cuda.get_device_properties(device).uuid))
            self.nvml.nvmlDeviceGetUtilizationRates(self.handle)
        except (self.nvml.NVMLError, AttributeError) as error:
            self.problem = f"NVML has no readings for this GPU: {error}"
            self._shut_down()
            return
        self.thread = threading.Thread(target=self._sample, name="gpu utilisation", daemon=True)
        self.thread.start()

    def _find(self, uuid: str):
        """NVML's handle of a GPU. torch leaves out the UUID's prefix, "GPU-" or, for a slice, "MIG-"."""
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                return self.nvml.nvmlDeviceGetHandleByUUID(name)
            except self.nvml.NVMLError as error:
                failure = error
        raise failure

    def _sample(self) -> None:
        while not self.ending.wait(self.seconds):
            if self.resting:
                continue
            try:
                share = self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
            except self.nvml.NVMLError as error:
                self.problem, self.last = f"NVML has no more readings for this GPU: {error}", None
                return
            self.total, self.count = self.total + share, self.count + 1

    def mean(self) -> float | None:
        """Mean utilisation since `reset` or, without a sample since then, the previous mean; None if there is
        neither."""
        return self.total / self.count if self.count else self.last

    def reset(self) -> None:
        self.last = None if self.problem else self.mean()
        self.total, self.count = 0, 0

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Takes no samples, because the evaluation is not part of the training."""
        self.resting = True
        try:
            yield
        finally:
            self.resting = False

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self.thread is not None:
            self.ending.set()
            self.thread.join(timeout=10)  # NVML answers in milliseconds; if it hangs, the run must not
            if not self.thread.is_alive():
                self._shut_down()
            self.thread = None

    def _shut_down(self) -> None:
        with suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()
