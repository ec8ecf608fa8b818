"""Where a run computes, and how: allocator environment, device, 16-bit type, backend switches, seeds, torchrun."""

import os
import random
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UsageError

# What the wheels of each CUDA version were built for; the command is on pytorch.org under "previous versions".
OLD_GPU_BUILD = "the CUDA 12.6 build (compute capability 5.0 to 9.0, driver 525 or newer): pip install 'torch>=2.8,<2.12' 'torchaudio>=2.8,<2.12' with pytorch.org's cu126 index"
REDUCE_BUCKET = 1 << 23  # elements in one all-reduce of gradients: 32 MiB of fp32


def set_allocator(conf: str) -> None:
    """Gives the CUDA allocator its settings under both names that torch versions read; must run before CUDA starts.
    What the environment already sets stays."""
    current = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or conf
    if current:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", current)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", current)


def cuda_problem(index: int = 0) -> str | None:
    """Why CUDA device `index` cannot be used by the installed torch: one line with what would help; None if it can."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"the installed torch {torch.__version__} is a CPU-only build: pip install -r requirements.txt in a fresh environment brings the CUDA one"
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        if "too old" in reason:
            return f"the NVIDIA driver is too old for torch {torch.__version__} (CUDA {torch.version.cuda}): update the driver, or install {OLD_GPU_BUILD}"
        if "no NVIDIA driver" in reason:
            return "there is no NVIDIA driver on this machine (nvidia-smi should list the GPU)"
        return f"CUDA does not start: {reason}"
    if count == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "there is no NVIDIA GPU on this machine" + (
            f" (CUDA_VISIBLE_DEVICES is {hidden!r})" if hidden is not None else ""
        )
    if index >= count:
        return f"there is no cuda:{index}: this machine has {count} (cuda:0 ... cuda:{count - 1})"
    return kernel_problem(
        torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    )


def kernel_problem(name: str, capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Whether a torch built for `architectures` (["sm_75", ..., "compute_120"]) has kernels for a GPU of this compute
    capability: binaries run on later minor versions of the same major one, PTX ("compute_") on everything later."""
    binaries = [divmod(int(a.removeprefix("sm_").rstrip("af")), 10) for a in architectures if a.startswith("sm_")]
    ptx = [divmod(int(a.removeprefix("compute_").rstrip("af")), 10) for a in architectures if a.startswith("compute_")]
    fits = any(b[0] == capability[0] and b[1] <= capability[1] for b in binaries) or any(
        p <= tuple(capability) for p in ptx
    )
    if fits or not architectures:
        return None
    have = f"{name} has compute capability {capability[0]}.{capability[1]}, and torch {torch.__version__} has no kernels for it"
    if binaries and tuple(capability) < min(binaries):
        return f"{have}: install {OLD_GPU_BUILD}"
    return f"{have}: install a newer torch within requirements.txt, built for this GPU (see pytorch.org)"


def pick_device(wanted: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that works. `auto` falls back to the CPU and says why."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted in ("auto", "cuda"):
        index = local_rank
    else:
        try:
            device = torch.device(wanted)
            if device.type != "cuda":
                raise RuntimeError
        except RuntimeError:
            raise UsageError(f"--device {wanted}: it must be auto, cpu, cuda or cuda:N") from None
        index = device.index or 0
    problem = cuda_problem(index)
    if problem is None:
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if wanted != "auto":
        raise UsageError(f"--device {wanted}: {problem}; --device cpu works everywhere")
    print(f"device: cpu (auto: {problem})")
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
        tensor = torch.tensor(values)
        tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
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
            while (
                used
                and used[0].dtype == (bucket or used)[0].dtype
                and (not bucket or elements + used[0].numel() <= REDUCE_BUCKET)
            ):
                elements += used[0].numel()
                bucket.append(used.pop(0))
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
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


def start_ranks(device: torch.device) -> Ranks:
    """Joins the job that torchrun describes in the environment; one rank without it."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    host_group = dist.new_group(backend="gloo") if device.type == "cuda" else None
    return Ranks(dist.get_rank(), size, host_group)


def setup(args, quiet: bool = False) -> Setup:
    """Device, precision, switches, seeds and ranks for a run, each printed with its reason. Raises `UsageError` where
    the device asked for cannot be used."""
    set_allocator(args.allocator_conf)
    if args.deterministic:
        # cuBLAS reads it when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = pick_device(args.device)
    ranks = start_ranks(device)
    if not ranks.first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  one voice; errors still reach stderr
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


def upcast(x: torch.Tensor) -> torch.Tensor:
    """16-bit tensors to fp32; fp32 and float64 stay as they are (a bare `.float()` would spoil exactness tests)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
