"""Where a run computes, and how: allocator environment, device, 16-bit type, backend switches, seeds, torchrun."""

import contextlib
import os
import random
import re
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UsageError
from common.gpu import cuda_problem

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
REDUCE_BUCKET = 1 << 23  # elements in one all-reduce of gradients: 32 MiB of fp32


def set_allocator(conf: str) -> None:
    """Gives the CUDA allocator its settings under both names that torch versions read; must run before CUDA starts.
    What the environment already sets stays, an empty value included. (torch 2.9's CUDA allocator ignores the new name,
    pytorch#183387; 2.8 to 2.11 print one warning about the old one.)"""
    conf = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), conf)
    for name in ALLOCATOR_VARIABLES:
        os.environ.setdefault(name, conf)


def pick_device(wanted: str, quiet: bool = False) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that works. `auto` falls back to the CPU and says why, on stderr if
    `quiet`."""
    if wanted == "cpu":
        return torch.device("cpu")
    # torch.device() itself takes "cuda:256" for "cuda:0".
    numbered = re.fullmatch(r"cuda:(\d{1,2})", wanted)
    if wanted not in ("auto", "cuda") and not numbered:
        raise UsageError(f"--device {wanted}: it must be auto, cpu, cuda or cuda:N")
    if numbered and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise UsageError(f"--device {wanted}: torchrun's processes need a GPU each, which --device cuda gives them")
    index = int(numbered[1]) if numbered else int(os.environ.get("LOCAL_RANK", 0))
    problem = cuda_problem(index)
    if problem is None:
        return torch.device("cuda", index)
    # With torchrun, one rank on the CPU and the others on GPUs would wait for each other for ever.
    if wanted != "auto" or (index and cuda_problem(0) is None):
        raise UsageError(f"--device {wanted}: {problem}; --device cpu works everywhere")
    print(f"device: cpu (auto: {problem})", file=sys.stderr if quiet else sys.stdout)
    return torch.device("cpu")


def pick_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """`auto`, `fp16`, `bf16` or `no` to autocast's dtype (None: fp32) and the reason in words."""
    if wanted == "no":
        return None, "fp32 (--no_mixed_precision)"
    if device.type != "cuda":
        if wanted == "auto":
            return None, "fp32 (auto: 16-bit types are slower on a CPU)"
        return (torch.float16 if wanted == "fp16" else torch.bfloat16), f"{wanted} (asked for; slow on a CPU)"
    major, minor = torch.cuda.get_device_capability(device)
    if wanted == "auto":
        if major >= 8:
            return torch.bfloat16, f"bf16 (auto: compute capability {major}.{minor})"
        return torch.float16, f"fp16 with loss scaling (auto: compute capability {major}.{minor} has no bf16 units)"
    if wanted == "bf16" and major < 8:
        return (
            torch.bfloat16,
            f"bf16 (asked for; compute capability {major}.{minor} emulates it slowly, fp16 is faster)",
        )
    return (torch.float16 if wanted == "fp16" else torch.bfloat16), f"{wanted} (asked for)"


@dataclass
class Ranks:
    """The processes of a torchrun job, or the only one. Small host values travel by gloo, gradients by the device's
    own backend."""

    rank: int = 0
    size: int = 1
    host_group: object = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def reduce(self, values, op: str = "sum") -> list:
        """Sum or maximum over the ranks of a list of Python numbers (int64 or float64 on the host)."""
        if self.size == 1:
            return list(values)
        exact = torch.float64 if any(isinstance(value, float) for value in values) else torch.int64
        tensor = torch.tensor(values, dtype=exact)
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.host_group)
        return tensor.tolist()

    def gather(self, value) -> list:
        """`value` of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def sum_gradients(self, parameters: list[torch.nn.Parameter], present: list[bool]) -> None:
        """Sums the gradients over the ranks in flat buckets. `present[i]`: some rank has a gradient for parameter i;
        a rank that has none adds zeros."""
        used = [p for p, here in zip(parameters, present, strict=True) if here]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        while used:
            bucket, elements = [], 0
            while used and (not bucket or elements + used[0].numel() <= REDUCE_BUCKET):
                elements += used[0].numel()
                bucket.append(used.pop(0))
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])  # of several types, to one that holds them all
            dist.all_reduce(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(part.view_as(parameter))


@dataclass
class Setup:
    """What every computation of a run shares. `dtype` None means fp32 without autocast."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def autocast(self):
        """The one place that says where autocast applies."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """Loss scaling, which fp16 needs: its gradients would vanish."""
        return torch.amp.GradScaler(self.device.type) if self.dtype is torch.float16 else None


def start_ranks(device: torch.device) -> Ranks:
    """Joins the job that torchrun describes in the environment; one rank without it."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except ValueError as error:  # a scheduler's WORLD_SIZE without the rest
            raise UsageError(
                f"WORLD_SIZE is {size}, but {error}: start several ranks with torchrun, or unset WORLD_SIZE"
            ) from None
    host_group = dist.new_group(backend="gloo") if device.type == "cuda" else None
    return Ranks(dist.get_rank(), size, host_group)


def setup(args, quiet: bool = False) -> Setup:
    """Device, precision, switches, seeds and ranks for a run, each printed with its reason; `quiet` leaves stdout to the
    results. Raises `UsageError` where the device asked for cannot be used."""
    set_allocator(args.allocator_conf)
    if args.deterministic:
        # cuBLAS reads it when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and int(os.environ.get("RANK", 0)) > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  one voice; errors still reach stderr
    device = pick_device(args.device, quiet)
    ranks = start_ranks(device)
    dtype, reason = pick_dtype(args.mixed_precision, device)
    name = (
        f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    if not quiet:
        print(f"device: {device} ({name}{f', {ranks.size} ranks' if ranks.size > 1 else ''}); precision: {reason}")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.backends.cudnn.benchmark = args.cudnn_benchmark and not args.deterministic
        # cuDNN's attention builds a plan for every new shape, and speech has a new shape in every batch.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.deterministic:
        torch.backends.cudnn.deterministic = True
        # CTC's backward on CUDA has no deterministic kernel: a warning then, not an error.
        torch.use_deterministic_algorithms(True, warn_only=True)
    seed_everything(args.seed)
    return Setup(device, dtype, ranks)


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
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict, device: torch.device) -> None:
    """Puts back what `rng_state` returned. A state saved on another kind of device leaves this one's generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def full_fp32(device: torch.device):
    """Without TF32, whose products have 10 bits: too few for the powers that a logarithm follows."""
    before = torch.backends.cuda.matmul.allow_tf32
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = before


def downcast(x: torch.Tensor) -> torch.Tensor:
    """In autocast's type, where that is on. Several layers with the same input would each make and keep a copy of it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def upcast(x: torch.Tensor) -> torch.Tensor:
    """16-bit tensors to fp32; fp32 and float64 stay as they are (a bare `.float()` would spoil exactness tests)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
