"""`--verify_gpu`: checks in seconds what a run needs of this machine. Each check prints pass, FAIL or skip."""

import contextlib
import os
import shutil
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import batches, checkpoint, compiling, device, gpu
from common.device import Setup
from common.errors import RunError, UsageError, cannot_write, first_line

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
WEIGHT = GRADIENT = 4  # bytes: fp32
STATES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}  # bytes of the two averages, including scales
BACKENDS = {"flash": "FLASH_ATTENTION", "memory-efficient": "EFFICIENT_ATTENTION", "math": "MATH"}  # of torch


def verify(args, parameters: int, trained: int) -> int:
    """Prints a line for each check of what a run with these flags needs, and returns the exit status: 1 if one fails.
    Of the model's `parameters`, `trained` are not frozen. Nothing is written. Call it in place of `device.setup`."""
    args.device = args.device.replace("auto", "cuda")  # auto would fall back to the CPU
    try:
        setup = device.setup(args, quiet=True)
        found = check_gpu(setup)
    except UsageError as error:
        setup = Setup(workers=device.pick_workers(args.dataloader_num_workers, torch.device("cpu"), quiet=True))
        found = FAIL, str(error)
    needs_gpu = {"driver", "memory", "attention", "TF32", "precision" if found[0] == FAIL else ""}
    checks = {
        "GPU": lambda: found,
        "driver": check_driver,
        "memory": lambda: check_memory(args, setup, parameters, trained),
        "precision": lambda: (PASS, device.pick_dtype(args.mixed_precision, setup.device)[1]),
        "mixed precision": lambda: check_autocast(setup),
        "attention": lambda: check_attention(setup),
        "torch.compile": lambda: check_compile(args, setup),
        "prefetching": lambda: check_prefetching(setup),
        "TF32": lambda: check_tf32(args, setup),
        "disk": lambda: check_disk(args, parameters, trained),
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
    major, minor = torch.cuda.get_device_capability(setup.device)
    return PASS, f"{torch.cuda.get_device_name(setup.device)}, compute capability {major}.{minor}"


def check_driver() -> tuple[str, str]:
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    try:
        import pynvml

        pynvml.nvmlInit()
        version, newest = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except Exception as error:  # the driver works, because the GPU was found
        return PASS, f"{built} and computes; the driver's version is not known ({first_line(error)})"
    return PASS, f"{version}, up to CUDA {newest // 1000}.{newest % 1000 // 10}; {built}"


def check_memory(args, setup: Setup, parameters: int, trained: int) -> tuple[str, str]:
    """Whether weights, gradients and optimizer states fit into the free memory."""
    free, total = torch.cuda.mem_get_info(setup.device)
    states = 0.0 if args.use_cpu_offload else STATES[args.optimizer]
    needed = WEIGHT * parameters + (GRADIENT + states) * trained
    text = f"{size(free)} of {size(total)} free; weights, gradients and optimizer states take {size(needed)}"
    if others := gpu.gpu_processes():
        text += f"; also on this GPU: {others}"
    if free <= needed:
        return FAIL, f"{text}: use a smaller model, --optimizer adamw_8bit or --use_cpu_offload"
    return PASS, f"{text}, the rest is for activations"


def check_autocast(setup: Setup) -> tuple[str, str]:
    """Whether a product under autocast has the 16-bit type, and how the loss is scaled."""
    if setup.dtype is None:
        return SKIP, "fp32 throughout"
    matrix, scaler = torch.ones(16, 16, device=setup.device), setup.grad_scaler()
    with setup.autocast():
        dtype = (matrix @ matrix).dtype
    if dtype is not setup.dtype:
        return FAIL, f"a product of matrices under autocast is {dtype}, not {setup.dtype}"
    scaling = f"loss scaling from {scaler.get_scale():g}" if scaler else "which needs no loss scaling"
    return PASS, f"a product of matrices under autocast is {str(dtype).removeprefix('torch.')}, {scaling}"


def check_attention(setup: Setup) -> tuple[str, str]:
    """Which back ends of scaled_dot_product_attention work here, forward and backward, without and with a mask."""
    q = torch.ones(2, 2, 16, 64, device=setup.device, dtype=setup.dtype, requires_grad=True)
    works = {}
    for mask in (None, torch.ones(2, 1, 1, 16, device=setup.device, dtype=torch.bool)):
        for name, kernel in BACKENDS.items():
            with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, kernel)), contextlib.suppress(RuntimeError):
                warnings.simplefilter("ignore")  # torch explains at length why it did not use the other back ends
                F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()
                works.setdefault(mask is None, []).append(name)
    if len(works) < 2:
        return FAIL, "no back end of scaled_dot_product_attention computes on this GPU"
    only = " (math alone: memory grows with the square of the length)" if works[False] == ["math"] else ""
    return PASS, f"{', '.join(works[True])}; with a padding mask: {', '.join(works[False])}{only}"


def check_compile(args, setup: Setup) -> tuple[str, str]:
    if not args.torch_compile and setup.device.type != "cuda":
        return SKIP, "not asked for (--torch_compile)"
    if problem := compiling.compile_problem(setup.device):
        return FAIL if args.torch_compile else SKIP, problem
    return PASS, f"a tiny function was compiled for {setup.device}"


def check_prefetching(setup: Setup) -> tuple[str, str]:
    """Whether worker processes read the data and, on a GPU, copies from pinned memory run on a stream of their own."""
    on_gpu, workers = setup.device.type == "cuda", f"{setup.workers} data worker{'s' if setup.workers != 1 else ''}"
    if not setup.workers:
        return FAIL if on_gpu else SKIP, "--dataloader_num_workers 0: training waits while data are read; try auto"
    if on_gpu:
        window = batches.Window(0, 0, False, [{"audio": torch.ones(2, 16)} for _ in range(2)]).pin_memory()
        if any(float(batch["audio"].sum()) != 32 for batch in batches.to_device(window.micro_batches, setup.device)):
            return FAIL, "a copy from pinned memory differs from its source"
        workers += ", pinned memory, and the next micro-batch is copied while one computes"
    return PASS, workers


def check_tf32(args, setup: Setup) -> tuple[str, str]:
    if not args.tf32:
        return SKIP, "--no_tf32"
    if torch.cuda.get_device_capability(setup.device)[0] < 8:
        return SKIP, "this GPU has no TF32 units (compute capability 8.0 and newer have)"
    return PASS, "on for operations in fp32"


def check_disk(args, parameters: int, trained: int) -> tuple[str, str]:
    """Whether `--keep_last` + 1 checkpoints, and the best weights twice, fit on the disk. What they replace counts as free."""
    folder = args.checkpoint_dir
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return FAIL, f"cannot write in {existing}; choose another --checkpoint_dir"
    each = WEIGHT * parameters + STATES[args.optimizer] * trained  # with the states, also if they are in host memory
    needed = (args.keep_last + 1) * each + 2 * WEIGHT * parameters
    replaced = [*checkpoint.list_checkpoints(folder), *folder.glob("best.safetensors")]
    own = replaced if checkpoint.continues(args.resume, folder) else []
    free = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in own)
    need = f"{args.keep_last} + 1 checkpoints of {size(each)} and the best weights, {size(needed)}"
    if free < needed:
        return FAIL, f"{size(free)} free for {need}; lower --keep_last, or choose another --checkpoint_dir"
    return PASS, f"{size(free)} free for {need}"


def require_disk(args, parameters: int, trained: int) -> None:
    """Raises `RunError` if `check_disk` fails: for models whose checkpoints take gigabytes."""
    try:
        status, reason = check_disk(args, parameters, trained)
    except OSError as error:
        raise cannot_write(args.checkpoint_dir, error, "--checkpoint_dir") from None
    if status == FAIL:
        raise RunError(f"checkpoints in {args.checkpoint_dir}: {reason}")


def size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
