"""Memory: activation checkpointing, what counts as out of memory, statistics, how busy the GPU is and with whom."""

import functools
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch.utils.checkpoint import checkpoint

from common.batches import split_batch
from common.errors import RunError, UsageError

# What cuDNN, cuBLAS and the CPU's allocator say when memory is short, instead of raising torch.OutOfMemoryError.
OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",
    "Unable to find a valid cuDNN algorithm",
    "unable to find an engine to execute this computation",
    "can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device (or the host) has too little memory for what was asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def free_memory(device: torch.device) -> None:
    """Gives back what a failed attempt left behind: reference cycles, then the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def split_on_oom(function: Callable[[dict], object], batch: dict, device: torch.device) -> list:
    """`[function(batch)]`, or where that runs out of memory, the results for its halves. Raises `RunError` naming the
    utterance where one alone does not fit. For evaluation: `function` must be repeatable."""
    try:
        return [function(batch)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().split("\n")[0]
    free_memory(device)  # outside the handler, whose traceback keeps the tensors alive
    size = len(batch["names"])
    if size == 1:
        raise RunError(f"{batch['names'][0]} does not fit into memory, not even alone and without gradients ({reason})")
    return [result for piece in split_batch(batch, (size + 1) // 2) for result in split_on_oom(function, piece, device)]


def checkpoint_layers(model: torch.nn.Module, kinds: tuple[type, ...]) -> None:
    """Recomputes the activations of every module of `kinds` in backward instead of keeping them. Loss and gradients
    stay the same, dropout included (its generator is replayed). Raises `UsageError` where there is none: an option that
    does nothing is worse than an error."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise UsageError(f"--gradient_checkpointing: {type(model).__name__} has no layer of the kinds it applies to")
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer, layer.forward)


def _recomputed(layer: torch.nn.Module, forward, *inputs):
    if layer.training and torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False)
    return forward(*inputs)


def memory_used(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU since the start, the resident memory of this process otherwise. Reads
    counters on the host only."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


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
