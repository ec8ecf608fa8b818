"""Device and precision of a run: allocator, device, 16-bit type, backend switches, seeds."""

import contextlib
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from common.errors import UsageError
from common.ranks import Ranks, torchrun

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def set_allocator(conf: str) -> None:
    """Configures the CUDA allocator, under both names that torch versions read. Call it before CUDA
    starts. A value in the environment, even an empty one, takes precedence. (torch 2.9's allocator
    ignores the new name, pytorch#183387; 2.8 to 2.11 print one warning about the old name.)"""
    conf = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), conf)
    for name in ALLOCATOR_VARIABLES:
        os.environ.setdefault(name, conf)


def pick_device(wanted: str, quiet: bool = False) -> torch.device:
    """The device for `wanted`: auto, cpu, cuda or cuda:N. `auto` falls back to the CPU and prints
    why, to stderr if `quiet`. Raises `UsageError` if the device cannot be used."""
    if wanted == "cpu":
        return torch.device("cpu")
    numbered = re.fullmatch(r"cuda:(\d{1,2})", wanted)  # torch.device("cuda:256") would be cuda:0
    if wanted not in ("auto", "cuda") and not numbered:
        raise UsageError(f"--device {wanted}: it must be auto, cpu, cuda or cuda:N")
    if numbered and torchrun("LOCAL_WORLD_SIZE", 1) > 1:
        raise UsageError(
            f"--device {wanted}: each process of torchrun needs its own GPU; --device cuda gives"
            " them one"
        )
    index = int(numbered[1]) if numbered else torchrun("LOCAL_RANK", 0)
    from common import cuda

    problem = cuda.cuda_problem(index)
    if problem is None:
        return torch.device("cuda", index)
    # One rank on the CPU and the others on GPUs would wait for each other forever.
    if wanted != "auto" or (index and cuda.cuda_problem(0) is None):
        raise UsageError(f"--device {wanted}: {problem}; --device cpu works everywhere")
    print(f"device: cpu (auto: {problem})", file=sys.stderr if quiet else sys.stdout)
    return torch.device("cpu")


def pick_dtype(wanted: str, capability: tuple[int, int] | None) -> tuple[torch.dtype | None, str]:
    """The autocast dtype (None: fp32) for `wanted` (auto, fp16, bf16 or no) on a GPU of this
    compute capability (None: on a CPU), and the reason as text."""
    if wanted == "no":
        return None, "fp32 (--no_mixed_precision)"
    if capability is None:
        if wanted == "auto":
            return None, "fp32 (auto: 16-bit types are slower on a CPU)"
        return DTYPES[wanted], f"{wanted} (asked for; slow on a CPU)"
    major, minor = capability
    if wanted == "auto":
        if major >= 8:
            return torch.bfloat16, f"bf16 (auto: compute capability {major}.{minor})"
        reason = f"auto: compute capability {major}.{minor} has no bf16 units"
        return torch.float16, f"fp16 with loss scaling ({reason})"
    slow = f"; compute capability {major}.{minor} emulates it slowly, fp16 is faster"
    return DTYPES[wanted], f"{wanted} (asked for{slow if wanted == 'bf16' and major < 8 else ''})"


@dataclass(frozen=True)
class Setup:
    """The device, precision and processes of a run. `dtype` is autocast's (None: fp32 without
    autocast), `workers` the number of data worker processes."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    ranks: Ranks = field(default_factory=Ranks)
    workers: int = 0
    # Whether there is room for a 16-bit copy of every weight while a model decodes.
    keeps_copies: bool = True

    def autocast(self):
        """The autocast context of a forward pass."""
        # The cache would keep a 16-bit copy of every trained weight until the pass ends, also with
        # --gradient_checkpointing, which casts them again. It serves decoding, which uses each
        # weight at every step; training uses it once.
        cached = self.keeps_copies and not torch.is_grad_enabled()
        return torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype is not None, cache_enabled=cached
        )

    def loss_scale(self) -> "LossScale | None":
        """Loss scaling for fp16, whose small gradients would vanish; None for other types."""
        return LossScale() if self.dtype is torch.float16 else None


class LossScale:
    """The factor of the loss under fp16 (Micikevicius et al. 2018, section 3.2), with the rule and
    the saved state of torch.amp.GradScaler. GradScaler would read all gradients once more to find
    out what their norm already tells, and it cannot read those that are on the host."""

    GROWTH, BACKOFF = 2.0, 0.5
    INTERVAL = 2000  # updates without an overflow, after which the factor grows

    def __init__(self, value: float = 65536.0):
        self.value = value
        self.updates = 0  # since the factor has changed

    def update(self, is_finite: bool) -> None:
        """Notes whether all gradients of an update were finite."""
        self.updates += 1
        if not is_finite:
            self.value *= self.BACKOFF
            self.updates = 0
        elif self.updates == self.INTERVAL:
            self.value *= self.GROWTH
            self.updates = 0

    def state_dict(self) -> dict:
        """The state that a checkpoint keeps."""
        return {"scale": self.value, "_growth_tracker": self.updates}

    def load_state_dict(self, saved: dict) -> None:
        self.value = float(saved["scale"])
        self.updates = int(saved["_growth_tracker"])


def setup(args, quiet: bool = False) -> Setup:
    """Chooses device, precision and data workers and prints why, starts the ranks, and sets backend
    switches and seeds. `quiet` keeps stdout free for results. Raises `UsageError` if --device
    cannot be used."""
    set_allocator(args.allocator_conf)
    if torchrun("WORLD_SIZE", 1) > 1 and torchrun("RANK", 0) > 0:
        # Only the first rank prints. Errors still reach stderr.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    device = pick_device(args.device, quiet)
    ranks = Ranks()
    if torchrun("WORLD_SIZE", 1) > 1:
        from common.parts import processes

        ranks = processes.join(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    dtype, reason = pick_dtype(args.mixed_precision, capability)
    name = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        name = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.1f} GiB"
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.backends.cudnn.benchmark = args.cudnn_benchmark
        # cuDNN's attention builds a plan for every new shape, and batches of different lengths have
        # different shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not quiet:
        several = f", {ranks.size} ranks" if ranks.size > 1 else ""
        print(f"device: {device} ({name}{several}); precision: {reason}")
    seed_everything(args.seed)
    workers = pick_workers(args.dataloader_num_workers, device, quiet)
    keeps_copies = args.use_cpu_offload in (None, "states") and not args.sharded
    return Setup(device, dtype, ranks, workers, keeps_copies)


def pick_workers(wanted: int | str, device: torch.device, quiet: bool = False) -> int:
    """The number of data workers. `auto`: one if the CPU trains, else one per core, at most 4."""
    if wanted != "auto":
        return wanted
    cores = processors()
    workers = 1 if device.type == "cpu" else min(4, cores)
    if not quiet:
        print(f"data workers: {workers} (auto: {cores} cores, training on {device.type})")
    return workers


def processors() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict:
    """The state of every random generator, in types that `torch.load(weights_only=True)` reads."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    numbers = torch.from_numpy(keys.astype(np.int64))
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, numbers, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict, device: torch.device) -> None:
    """Restores what `rng_state` returned. A state of a CPU does not change CUDA's generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def upcast(x: torch.Tensor) -> torch.Tensor:
    """A 16-bit tensor in fp32. fp32 and float64, in which tests run, stay as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@contextlib.contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """Turns off TF32, whose 10-bit products are not exact enough for a power spectrum that goes
    through a logarithm, and for the nearest code of a codebook."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn) if device.type == "cuda" else ()
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
