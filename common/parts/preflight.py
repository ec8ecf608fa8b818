"""`--verify_gpu`: checks in seconds what a run needs of this machine. Each check prints pass, FAIL
or skip."""

import argparse
import contextlib
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import device, saving
from common.device import Setup
from common.errors import UsageError, first_line
from common.memory import size
from common.parts import compiling, utilisation

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def verify(args, model: torch.nn.Module, plan: Callable[[], tuple[int, str]] | None = None) -> int:
    """Prints a line for each check of what a run with these flags needs, and returns the exit
    status: 1 if one fails. `plan()`: the bytes that must be free for the longest micro-batch, and
    the verdict. Nothing is written."""
    wanted = args.device.replace("auto", "cuda")  # not the CPU instead
    on_gpu = argparse.Namespace(**{**vars(args), "device": wanted})
    try:
        setup = device.setup(on_gpu, quiet=True)
        gpu_check = check_gpu(setup)
    except UsageError as error:
        setup = Setup()
        gpu_check = FAIL, str(error)
    needs_gpu = {"memory", "attention", "precision" if gpu_check[0] == FAIL else ""}
    checks = {
        "GPU": lambda: gpu_check,
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
    text = f"{size(free)} of {size(total)} free; the run is predicted to take {size(needed)}"
    text += f": {verdict}"
    if others := utilisation.gpu_processes():
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
    """Which back ends of scaled_dot_product_attention work, both ways, without and with a mask."""
    q = torch.ones(2, 2, 16, 64, device=setup.device, dtype=setup.dtype, requires_grad=True)
    works = {}
    for mask in (None, torch.ones(2, 1, 1, 16, device=setup.device, dtype=torch.bool)):
        for name, kernel in BACKENDS.items():
            with (
                warnings.catch_warnings(),
                sdpa_kernel(kernel),
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
    fits, reason = saving.disk_space(args, model)
    return PASS if fits else FAIL, reason
