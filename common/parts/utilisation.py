"""Reports of a run about its GPU: how busy it is, and which other processes use it."""

import collections
import os
import re
import subprocess
import time

import torch

from common.errors import first_line


def gpu_processes() -> str:
    """The other processes on the GPUs, by nvidia-smi: "python3 (pid 75955) 14.2 GiB"."""
    asked = "--query-compute-apps=pid,process_name,used_memory"
    query = ["nvidia-smi", asked, "--format=csv,noheader,nounits"]
    kept = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        table = subprocess.run(query, timeout=10, **kept).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    processes = []
    for pid, path, used in re.findall(r"^(\d+), (.*), (.*)$", table, re.MULTILINE):
        if int(pid) != os.getpid():
            size = f"{int(used) / 1024:.1f} GiB" if used.isdigit() else "an unknown amount"
            processes.append(f"{os.path.basename(path)} (pid {pid}) {size}")
    return ", ".join(processes)


class GpuUtilisation:
    """The share of the time in which the GPU computes. NVML and CUDA number GPUs differently, so
    the GPU is looked up by its UUID. `problem`: why there are no readings."""

    def __init__(self, device: torch.device, seconds: float = 1.0):
        self.device = device
        self.seconds = seconds
        self.due = time.monotonic() + seconds
        self.problem = ""
        self.readings = collections.deque(maxlen=30)
        self.is_told = False

    def sample(self) -> None:
        """Reads the share of the last second, at most once a second, while the run trains."""
        if self.problem or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.seconds
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(
                f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            )
            self.readings.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        except Exception as error:  # no library, no driver, or no readings: a slice has none
            self.problem = f"NVML of the package nvidia-ml-py: {first_line(error)}"
            self.readings.clear()

    def new_problem(self) -> str:
        """Why there are no readings, once; otherwise an empty text."""
        if not self.problem or self.is_told:
            return ""
        self.is_told = True
        return self.problem

    def mean(self) -> float | None:
        """The mean of the last half minute of training; None without a reading."""
        return sum(self.readings) / len(self.readings) if self.readings else None
