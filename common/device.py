"""Device and precision of a run: allocator settings, device, 16-bit type, backend switches, seeds,
torchrun's ranks."""

import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UsageError
from common.gpu import cuda_problem

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def set_allocator(conf: str) -> None:
    """Configures the CUDA allocator, under both names that torch versions read. Call it before CUDA
    starts. A value in the environment, even an empty one, takes precedence. (torch 2.9's allocator
    ignores the new name, pytorch#183387; 2.8 to 2.11 print one warning about the old name.)"""
    conf = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), conf)
    for name in ALLOCATOR_VARIABLES:
        os.environ.setdefault(name, conf)


def torchrun(name: str, default: int) -> int:
    """A number that torchrun sets in the environment. Raises `UsageError`."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}: use torchrun, or unset it")
    return int(text)


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
    problem = cuda_problem(index)
    if problem is None:
        return torch.device("cuda", index)
    # One rank on the CPU and the others on GPUs would wait for each other forever.
    if wanted != "auto" or (index and cuda_problem(0) is None):
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


@dataclass
class Ranks:
    """The ranks of a torchrun job, or the only process. gloo reduces numbers, the device's backend
    gradients."""

    rank: int = 0
    size: int = 1
    host_group: object = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def reduce(self, values, op: str = "sum") -> list:
        """Element-wise sum ("sum") or maximum ("max") over the ranks of a list of numbers, in int64
        or float64."""
        if self.size == 1:
            return list(values)
        dtype = torch.float64 if any(isinstance(value, float) for value in values) else torch.int64
        tensor = torch.tensor(values, dtype=dtype)
        dist.all_reduce(
            tensor,
            op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX,
            group=self.host_group,
        )
        return tensor.tolist()

    def gather(self, value) -> list:
        """The `value` of every rank, on every rank. It must be picklable."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def sum_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Sums each tensor over the ranks, in place: on a GPU by the device's backend, on the host
        by gloo."""
        self._in_place(tensors, [dist.all_reduce] * len(tensors))

    def share_tensors(self, tensors: list[torch.Tensor], owners: list[int]) -> None:
        """Sets each tensor to the values that it has on the rank that owns it, by the same
        backends."""
        self._in_place(tensors, [partial(dist.broadcast, src=owner) for owner in owners])

    def _in_place(self, tensors: list[torch.Tensor], collectives: list[Callable]) -> None:
        """Starts a collective on each tensor, and waits for all of them."""
        # What belongs to a channels_last convolution is not contiguous, so a copy is transferred.
        copies = [tensor.contiguous() for tensor in tensors]
        transfers = []
        for tensor, collective in zip(copies, collectives, strict=True):
            group = None if tensor.is_cuda else self.host_group
            transfers.append(collective(tensor, group=group, async_op=True))
        for transfer in transfers:
            transfer.wait()
        for tensor, copied in zip(tensors, copies, strict=True):
            if copied is not tensor:
                tensor.copy_(copied)


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
        """What a checkpoint keeps."""
        return {"scale": self.value, "_growth_tracker": self.updates}

    def load_state_dict(self, saved: dict) -> None:
        self.value = float(saved["scale"])
        self.updates = int(saved["_growth_tracker"])


def start_ranks(device: torch.device) -> Ranks:
    """Joins the job that torchrun describes in the environment; one rank without torchrun. Raises
    `UsageError`."""
    size = torchrun("WORLD_SIZE", 1)
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except ValueError as error:  # a scheduler sets WORLD_SIZE alone
            raise UsageError(
                f"WORLD_SIZE is {size}, but {error}: use torchrun, or unset WORLD_SIZE"
            ) from None
    host_group = dist.new_group(backend="gloo") if device.type == "cuda" else None
    return Ranks(dist.get_rank(), size, host_group)


def setup(args, quiet: bool = False) -> Setup:
    """Chooses device, precision and data workers and prints why, starts the ranks, and sets backend
    switches and seeds. `quiet` keeps stdout free for results. Raises `UsageError` if --device
    cannot be used."""
    set_allocator(args.allocator_conf)
    if args.deterministic:
        # cuBLAS reads it when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torchrun("WORLD_SIZE", 1) > 1 and torchrun("RANK", 0) > 0:
        # Only the first rank prints. Errors still reach stderr.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    device = pick_device(args.device, quiet)
    ranks = start_ranks(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    dtype, reason = pick_dtype(args.mixed_precision, capability)
    name = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        name = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.1f} GiB"
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.backends.cudnn.benchmark = args.cudnn_benchmark and not args.deterministic
        # cuDNN's attention builds a plan for every new shape, and batches of different lengths have
        # different shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not quiet:
        several = f", {ranks.size} ranks" if ranks.size > 1 else ""
        print(f"device: {device} ({name}{several}); precision: {reason}")
    if args.deterministic:
        torch.backends.cudnn.deterministic = True
        # CTC's backward has no deterministic kernel on CUDA, so a warning has to be enough.
        torch.use_deterministic_algorithms(True, warn_only=True)
    seed_everything(args.seed)
    workers = pick_workers(args.dataloader_num_workers, device, quiet)
    keeps_copies = args.use_cpu_offload in (None, "states")
    return Setup(device, dtype, ranks, workers, keeps_copies)


def pick_workers(wanted: int | str, device: torch.device, quiet: bool = False) -> int:
    """The number of data workers. `auto`: one if the CPU trains, otherwise one per core and at most
    four."""
    if wanted != "auto":
        return wanted
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    workers = 1 if device.type == "cpu" else min(4, cores)
    if not quiet:
        print(f"data workers: {workers} (auto: {cores} cores, training on {device.type})")
    return workers


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict:
    """The state of every random generator, in types that `torch.load(weights_only=True)` reads."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [
            kind,
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict, device: torch.device) -> None:
    """Restores what `rng_state` returned. A state that was saved on a CPU does not change CUDA's
    generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def upcast(x: torch.Tensor) -> torch.Tensor:
    """A 16-bit tensor in fp32. fp32 and float64 are returned unchanged, so that tests can run in
    float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
