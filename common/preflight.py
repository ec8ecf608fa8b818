"""`--verify_gpu`: checks in seconds what a run needs of this machine. Each check prints pass, FAIL
or skip."""

import argparse
import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import checkpoint, compiling, device, gpu, lora, offload, optim
from common.device import Setup
from common.errors import RunError, UsageError, cannot_write, first_line
from common.ranks import Ranks, torchrun

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
BACKENDS = {  # torch's names
    "flash": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def verify(args, model: torch.nn.Module, plan: Callable[[], tuple[int, str]] | None = None) -> int:
    """Prints a line for each check of what a run with these flags needs, and returns the exit
    status: 1 if one fails. `plan()`: the bytes that must be free for the longest micro-batch, and
    the verdict. Nothing is written."""
    wanted = args.device.replace("auto", "cuda")  # not the CPU instead
    on_gpu = argparse.Namespace(**{**vars(args), "device": wanted})
    try:
        setup = device.setup(on_gpu, quiet=True)
        found = check_gpu(setup)
    except UsageError as error:
        setup = Setup()
        found = FAIL, str(error)
    needs_gpu = {"memory", "attention", "precision" if found[0] == FAIL else ""}
    checks = {
        "GPU": lambda: found,
        "memory": lambda: check_memory(setup, *plan()),
        "precision": lambda: check_precision(args, setup),
        "attention": lambda: check_attention(setup),
        "torch.compile": lambda: check_compile(args, setup),
        "disk": lambda: check_disk(args, model),
    }
    failed = False
    for name, check in checks.items():
        status, reason = SKIP, "there is no GPU to check"
        if setup.device.type == "cuda" or name not in needs_gpu:
            try:
                status, reason = check()
            except (RuntimeError, OSError) as error:
                status, reason = FAIL, f"it does not work here: {first_line(error)}"
        print(f"{status}  {name}: {reason}")
        failed |= status == FAIL
    return int(failed)


def check_gpu(setup: Setup) -> tuple[str, str]:
    if setup.device.type != "cuda":
        return SKIP, "--device cpu"
    name = torch.cuda.get_device_name(setup.device)
    major, minor = torch.cuda.get_device_capability(setup.device)
    driver = "unknown"
    with contextlib.suppress(Exception):  # NVML is missing or does not know this GPU
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    versions = f"driver {driver}, torch for CUDA {torch.version.cuda}"
    return PASS, f"{name}, compute capability {major}.{minor}, {versions}"


def check_memory(setup: Setup, needed: int, verdict: str) -> tuple[str, str]:
    """Whether the plan fits into the memory that is free now."""
    free, total = torch.cuda.mem_get_info(setup.device)
    text = (
        f"{size(free)} of {size(total)} free; the run is predicted to take {size(needed)}:"
        f" {verdict}"
    )
    if others := gpu.gpu_processes():
        text += f"; also on this GPU: {others}"
    if verdict == "does not fit" or free < needed:
        return FAIL, f"{text}: --dry_run says what it is made of, and what helps"
    return PASS, text


def check_precision(args, setup: Setup) -> tuple[str, str]:
    """Whether a product under autocast has the type of the run."""
    capability = None
    if setup.device.type == "cuda":
        capability = torch.cuda.get_device_capability(setup.device)
    wanted = device.pick_dtype(args.mixed_precision, capability)[1]
    matrix = torch.ones(16, 16, device=setup.device)
    with setup.autocast():
        dtype = (matrix @ matrix).dtype
    status = PASS if dtype is (setup.dtype or torch.float32) else FAIL
    return status, f"{wanted}; a product of matrices is {str(dtype).removeprefix('torch.')}"


def check_attention(setup: Setup) -> tuple[str, str]:
    """Which back ends of scaled_dot_product_attention work here, forward and backward, without and
    with a mask."""
    q = torch.ones(2, 2, 16, 64, device=setup.device, dtype=setup.dtype, requires_grad=True)
    works = {}
    for mask in (None, torch.ones(2, 1, 1, 16, device=setup.device, dtype=torch.bool)):
        for name, kernel in BACKENDS.items():
            with (
                warnings.catch_warnings(),
                sdpa_kernel(getattr(SDPBackend, kernel)),
                contextlib.suppress(RuntimeError),
            ):
                # Torch explains at length why it did not use the other back ends.
                warnings.simplefilter("ignore")
                F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()
                works.setdefault(mask is None, []).append(name)
    if len(works) < 2:
        return FAIL, "no back end of scaled_dot_product_attention computes on this GPU"
    only = ""
    if works[False] == ["math"]:
        only = " (math alone: memory grows with the square of the length)"
    return PASS, f"{', '.join(works[True])}; with a padding mask: {', '.join(works[False])}{only}"


def check_compile(args, setup: Setup) -> tuple[str, str]:
    if not args.torch_compile and setup.device.type != "cuda":
        return SKIP, "not asked for (--torch_compile)"
    if problem := compiling.compile_problem(setup.device):
        return FAIL if args.torch_compile else SKIP, problem
    return PASS, f"a tiny function was compiled for {setup.device}"


def check_disk(args, model: torch.nn.Module) -> tuple[str, str]:
    """Whether `--keep_last` + 1 checkpoints, and the best weights twice, fit on the disk. What they
    replace counts as free."""
    folder = args.checkpoint_dir
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return FAIL, f"cannot write in {existing}; choose another --output_dir"
    weights = 4 * sum(tensor.numel() for tensor in lora.saved_state(model).values())
    # With the states, also if they are in host memory.
    each = weights + optim.state_bytes(model, args.optimizer)
    needed = (args.keep_last + 1) * each + 2 * weights
    replaced = [*checkpoint.list_checkpoints(folder), *folder.glob("best.safetensors")]
    own = replaced if checkpoint.continues(args.resume, folder) else []
    free = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in own)
    need = f"{args.keep_last} + 1 checkpoints of {size(each)} and the best weights, {size(needed)}"
    if free < needed:
        advice = "lower --keep_last, or choose another --output_dir"
        return FAIL, f"{size(free)} free for {need}; {advice}"
    return PASS, f"{size(free)} free for {need}"


def require_disk(args, model: torch.nn.Module) -> None:
    """Raises `RunError` if `check_disk` fails: a disk must not be full after hours of training."""
    try:
        status, reason = check_disk(args, model)
    except OSError as error:
        raise cannot_write(args.checkpoint_dir, error, "--output_dir") from None
    if status == FAIL:
        raise RunError(f"checkpoints in {args.checkpoint_dir}: {reason}")


def require_host_memory(model: torch.nn.Module, level: str | None, ranks: Ranks) -> None:
    """Raises `RunError`, on all ranks, if a level of --use_cpu_offload takes more host memory than
    is free for all processes of this machine: the system would end the run without a message. Call
    it when the model has left the host, or with "weights" its fp32 values are there."""
    missing = "gradients" if level == "weights" else level
    needed = offload.host_bytes(model, missing, ranks.size) * torchrun("LOCAL_WORLD_SIZE", 1)
    if level and ranks.first:  # it has the states of all ranks while it writes a checkpoint
        needed += offload.host_bytes(model, "states")
        needed -= offload.host_bytes(model, "states", ranks.size)
    free = free_host_memory() if needed else None
    is_short = free is not None and needed > free
    (any_is_short,) = ranks.reduce([int(is_short)], "max")
    if any_is_short:
        is_free = f"{size(free)} are free" if is_short else "the machine of another rank has less"
        raise RunError(
            f"--use_cpu_offload {level} takes {size(needed)} more of host memory, and {is_free}:"
            " end other programs, or take a lower level or --optimizer adamw_8bit"
        )


def free_host_memory() -> int | None:
    """Bytes that programs can still take, with the swap space; None where the system does not say.
    A container's limit is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return 1024 * (kib["MemAvailable"] + kib["SwapFree"]) if "MemAvailable" in kib else None


def size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
