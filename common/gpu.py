"""Why a GPU cannot be used, which processes use it, and how busy it is."""

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

# PyPI's torch 2.11 is built for CUDA 13.0, compute capability 7.5 to 12.0; the CUDA 12.6 builds of 2.8 to 2.11 cover 5.0
# to 9.0 (RELEASE.md of pytorch, "CUDA Support Matrix"). pip takes one for the other unless it is forced.
PIP_TORCH = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.8,<2.12' 'torchaudio>=2.8,<2.12'"
CUDA_126 = f"the CUDA 12.6 build: {PIP_TORCH} --index-url https://download.pytorch.org/whl/cu126"
# The oldest driver for each major version of CUDA (NVIDIA's "Minor Version Compatibility").
OLDEST_DRIVER = {"12": "525", "13": "580"}


def cuda_problem(index: int = 0) -> str | None:
    """Why CUDA device `index` cannot be used by the installed torch: one line with what would help; None if it can,
    and then it is the current device."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"the installed torch {torch.__version__} is a CPU-only build; the CUDA one: {PIP_TORCH}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ten lines about the GPU's architecture: kernel_problem needs one
            torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        reason = str(error).strip().split("\n")[0]
        if "too old" in reason:
            return driver_problem(reason)
        if "no NVIDIA driver" in reason:
            return "there is no NVIDIA driver on this machine (nvidia-smi should list the GPU)"
        if "No CUDA GPUs" not in reason:
            return f"CUDA does not start: {reason}"
        count = 0
    if index >= count:
        missing = f"no cuda:{index}, only {count} GPU{'s' if count > 1 else ''}" if count else "no NVIDIA GPU"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"there is {missing}" + (f" (CUDA_VISIBLE_DEVICES is {hidden!r})" if hidden is not None else "")
    problem = kernel_problem(
        torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    )
    if problem:
        return problem
    try:  # a GPU that another process has filled, or holds for itself, shows it here
        torch.cuda.set_device(index)
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        return f"cuda:{index} cannot compute now ({reason}): nvidia-smi shows which processes use it"
    return None


def driver_problem(reason: str) -> str:
    """What to do about "... driver on your system is too old (found version 12040)": that is CUDA 12.4's driver."""
    found = int((re.search(r"found version (\d+)", reason) or ["", "0"])[1])
    newest = f" supports CUDA {found // 1000}.{found % 1000 // 10} at most and" if found else ""
    needed = OLDEST_DRIVER.get(torch.version.cuda.split(".")[0])
    instead = f", or install {CUDA_126}" if found >= 12000 else ""
    return (
        f"the NVIDIA driver{newest} is too old for torch {torch.__version__}: "
        f"update it{f' to {needed} or newer' if needed else ''}{instead}"
    )


def kernel_problem(name: str, capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Whether a torch built for `architectures` (["sm_75", ..., "compute_120"]) has kernels for a GPU of this compute
    capability: binaries run on later minor versions of the same major one, PTX ("compute_") on everything later."""
    binaries = [divmod(int(a.removeprefix("sm_").rstrip("af")), 10) for a in architectures if a.startswith("sm_")]
    ptx = [divmod(int(a.removeprefix("compute_").rstrip("af")), 10) for a in architectures if a.startswith("compute_")]
    if any(b[0] == capability[0] and b[1] <= capability[1] for b in binaries) or any(p <= capability for p in ptx):
        return None
    if not binaries and not ptx:  # unknown, or AMD's names
        return None
    have = f"{name} has compute capability {capability[0]}.{capability[1]}, for which torch {torch.__version__} has no kernels"
    if capability < (5, 0):
        return f"{have}, nor has any that requirements.txt allows"
    if capability < min(binaries + ptx):
        return f"{have}; install {CUDA_126}"
    return f"{have}; install PyPI's build: {PIP_TORCH}"


def gpu_processes() -> str:
    """The other processes that hold GPU memory, as NVML reports them through nvidia-smi: "python3 (pid 75955) 14.2 GiB".
    Empty where there is none or nothing can be read; nothing is ever killed."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = []
    for row in rows:
        pid, name, used = [cell.strip() for cell in row.split(",")][:3]
        if pid != str(os.getpid()):
            size = f"{int(used) / 1024:.1f} GiB" if used.isdigit() else "an unknown amount"
            found.append(f"{os.path.basename(name)} (pid {pid}) {size}")
    return ", ".join(found)


def load_nvml():
    """NVIDIA's management library, ready for questions. Raises `RuntimeError` saying why it is not."""
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
    """The share of the time in which the GPU computed, as NVML samples it, asked for about once a second by a thread that
    never touches CUDA. `problem` says why there are no figures; that is never an error.

    The GPU is found by its UUID: NVML counts from 0 over all of the machine's, CUDA over those of CUDA_VISIBLE_DEVICES
    in an order of its own. Forked data workers have this object but not its thread."""

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
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.handle = self._find(uuid)
            self.nvml.nvmlDeviceGetUtilizationRates(self.handle)
        except (self.nvml.NVMLError, AttributeError) as error:
            self.problem = f"NVML has no figures for this GPU: {error}"
            self._shut_down()
            return
        self.thread = threading.Thread(target=self._sample, name="gpu utilisation", daemon=True)
        self.thread.start()

    def _find(self, uuid: str):
        """The handle of the GPU that CUDA calls `uuid`; torch leaves out the "GPU-" (or, of a slice, "MIG-")."""
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                return self.nvml.nvmlDeviceGetHandleByUUID(name)
            except self.nvml.NVMLError as error:
                found = error
        raise found

    def _sample(self) -> None:
        while not self.ending.wait(self.seconds):
            if self.resting:
                continue
            try:
                share = self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
            except self.nvml.NVMLError as error:
                self.problem, self.last = f"NVML has no more figures for this GPU: {error}", None
                return
            self.total, self.count = self.total + share, self.count + 1

    def mean(self) -> float | None:
        """Mean since `reset`, or what it was before where nothing has been sampled since; None where nothing ever was."""
        total, count = self.total, self.count
        return total / count if count else self.last

    def reset(self) -> None:
        self.last = None if self.problem else self.mean()
        self.total, self.count = 0, 0

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Without samples: evaluation is no training."""
        self.resting = True
        try:
            yield
        finally:
            self.resting = False

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self.thread is not None:
            self.ending.set()
            self.thread.join(timeout=10)  # NVML answers in milliseconds; one that hangs must not hang the run
            if not self.thread.is_alive():
                self._shut_down()
            self.thread = None

    def _shut_down(self) -> None:
        with suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()
