"""`--verify_gpu`: what a run will find on this machine, checked in seconds; a line each with pass, FAIL or skip."""

import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import batches, checkpoint, compiling, device, gpu, options
from common.device import Setup
from common.errors import UsageError

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
WEIGHT = GRADIENT = 4  # bytes: fp32
STATES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}  # bytes of the two averages, scales included
BACKENDS = {  # name: how it is called to torch, and whether it may be used
    "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    "math": (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
}
NO_GPU = "no GPU to ask"


def verify(args, parameters: int, trained: int | None = None) -> int:
    """Prints a line for each thing that a run with these flags needs and returns the exit status: 0, or 1 where one
    fails. `parameters`: numbers in the model; `trained`: those of them that are not frozen (all). Nothing is written,
    nothing is downloaded. Call it after `options.resolve`, in place of `device.setup`."""
    trained = parameters if trained is None else trained
    try:
        setup, problem = device.setup(args, quiet=True), None
    except UsageError as error:
        setup, problem = Setup(), str(error)
    if setup.device.type != "cuda" and args.device != "cpu":
        problem = problem or gpu.cuda_problem()
    lines = {
        "GPU": check_gpu(setup, problem),
        "driver": check_driver(setup),
        "memory": check_memory(args, setup, parameters, trained),
        "precision": check_precision(args, setup, problem),
        "mixed precision": check_autocast(setup),
        "attention": check_attention(setup),
        "torch.compile": check_compile(args, setup),
        "prefetching": check_prefetching(args, setup),
        "TF32": check_tf32(args, setup),
        "disk": check_disk(args, parameters, trained),
    }
    for name, (status, reason) in lines.items():
        print(f"{status}  {name}: {reason}")
    return int(any(status == FAIL for status, _ in lines.values()))


def check_gpu(setup: Setup, problem: str | None) -> tuple[str, str]:
    if problem:
        return FAIL, problem
    if setup.device.type != "cuda":
        return SKIP, "--device cpu"
    major, minor = torch.cuda.get_device_capability(setup.device)
    return PASS, f"{torch.cuda.get_device_name(setup.device)}, compute capability {major}.{minor}"


def check_driver(setup: Setup) -> tuple[str, str]:
    if setup.device.type != "cuda":
        return SKIP, NO_GPU
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    try:
        nvml = gpu.load_nvml()
        version = nvml.nvmlSystemGetDriverVersion()
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        nvml.nvmlShutdown()
    except Exception as error:  # the driver works, or there were no GPU: only its version is not known
        return PASS, f"{built} and computes; the driver's version is not known ({error})"
    return PASS, f"{version}, up to CUDA {number // 1000}.{number % 1000 // 10}; {built}"


def check_memory(args, setup: Setup, parameters: int, trained: int) -> tuple[str, str]:
    """Free memory against what is there before the first activation: weights, gradients, optimizer states."""
    if setup.device.type != "cuda":
        return SKIP, NO_GPU
    free, total = torch.cuda.mem_get_info(setup.device)
    states = 0.0 if args.use_cpu_offload else STATES[args.optimizer]
    needed = WEIGHT * parameters + (GRADIENT + states) * trained
    said = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free; weights, gradients and optimizer states take {size(needed)}"
    others = gpu.gpu_processes()
    said += f"; also on this GPU: {others}" if others else ""
    if free <= needed:
        return FAIL, f"{said}: a smaller model, --optimizer adamw_8bit or --use_cpu_offload need less"
    return PASS, f"{said}, the rest is for activations"


def check_precision(args, setup: Setup, problem: str | None) -> tuple[str, str]:
    if problem:
        return SKIP, NO_GPU
    return PASS, device.pick_dtype(args.mixed_precision, setup.device)[1]


def check_autocast(setup: Setup) -> tuple[str, str]:
    """Whether a product under autocast really has the 16-bit type, and fp16 its loss scaling."""
    if setup.dtype is None:
        return SKIP, "fp32 throughout"
    wanted = name_of(setup.dtype)
    try:
        found = product_dtype(setup)
    except RuntimeError as error:
        return FAIL, f"a product of matrices in {wanted} does not work: {first_line(error)}"
    if found is not setup.dtype:
        return FAIL, f"a product of matrices under autocast is {name_of(found)}, not {wanted}"
    scaler = setup.grad_scaler()
    if setup.dtype is torch.float16 and not (scaler and scaler.is_enabled()):
        return FAIL, "float16 without loss scaling: the gradients would vanish"
    scaling = f", loss scaling from {scaler.get_scale():g}" if scaler else ", which needs no loss scaling"
    return PASS, f"a product of matrices under autocast is {wanted}{scaling}"


def product_dtype(setup: Setup) -> torch.dtype:
    a = torch.ones(16, 16, device=setup.device)
    with setup.autocast():
        return (a @ a).dtype


def check_attention(setup: Setup) -> tuple[str, str]:
    """Which of scaled_dot_product_attention's back ends are enabled and compute here, without and with a mask."""
    if setup.device.type != "cuda":
        return SKIP, "torch has one choice on a CPU"
    working = {
        masked: [
            name
            for name, (kernel, is_enabled) in BACKENDS.items()
            if is_enabled() and attention_works(setup, kernel, masked)
        ]
        for masked in (False, True)
    }
    if not all(working.values()):
        return FAIL, "no back end of scaled_dot_product_attention computes on this GPU"
    said = f"{', '.join(working[False])}; with a padding mask: {', '.join(working[True])}"
    only = "" if working[True] != ["math"] else " (math alone: memory grows with the square of the length)"
    return PASS, said + only


def attention_works(setup: Setup, kernel: SDPBackend, masked: bool) -> bool:
    """Forward and backward of a tiny attention."""
    dtype = setup.dtype or torch.float32
    q = torch.ones(2, 2, 16, 64, device=setup.device, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 1, 16, device=setup.device, dtype=torch.bool) if masked else None
    with warnings.catch_warnings(), sdpa_kernel(kernel):
        warnings.simplefilter("ignore")  # a page on why each of the others was not used
        try:
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()
        except RuntimeError:
            return False
    return True


def check_compile(args, setup: Setup) -> tuple[str, str]:
    asked = args.torch_compile
    if not asked and setup.device.type != "cuda":
        return SKIP, "not asked for (--torch_compile)"
    problem = compiling.compile_problem(setup.device)
    if problem:
        return (FAIL, problem) if asked else (SKIP, f"not asked for, and {problem}")
    return PASS, f"something tiny was compiled for {setup.device}{'' if asked else ' (--torch_compile would use it)'}"


def check_prefetching(args, setup: Setup) -> tuple[str, str]:
    """Whether batches are read by other processes and, on a GPU, copied from pinned memory on a stream of their own."""
    on_cpu = setup.device.type != "cuda"
    workers = args.dataloader_num_workers
    workers = options.auto_workers(on_cpu)[0] if workers == "auto" else workers
    said = f"{workers} data worker{'s' if workers != 1 else ''}"
    if on_cpu:
        return (PASS, said) if workers else (SKIP, "--dataloader_num_workers 0: the main process reads audio itself")
    if not workers:
        return FAIL, "--dataloader_num_workers 0: the GPU waits while audio is read; auto is one a core, up to 4"
    try:
        copy_ahead(setup)
    except RuntimeError as error:
        return FAIL, f"{said}, but copying from pinned memory does not work: {first_line(error)}"
    return PASS, f"{said}, pinned memory, and the next micro-batch is copied while one computes"


def copy_ahead(setup: Setup) -> None:
    """A micro-batch to the device on the way that training's take."""
    window = batches.Window(0, 0, False, [{"audio": torch.ones(2, 16)} for _ in range(2)]).pin_memory()
    for batch in batches.to_device(window.micro_batches, setup.device):
        if float(batch["audio"].sum()) != 32:
            raise RuntimeError("what arrived is not what was sent")


def check_tf32(args, setup: Setup) -> tuple[str, str]:
    if setup.device.type != "cuda":
        return SKIP, NO_GPU
    if not args.tf32:
        return SKIP, "--no_tf32"
    if torch.cuda.get_device_capability(setup.device)[0] < 8:
        return SKIP, "this GPU has no TF32 units (compute capability 8.0 and newer have)"
    if not torch.backends.cuda.matmul.allow_tf32:
        return FAIL, "asked for, and not on"
    return PASS, "on for what stays in fp32"


def check_disk(args, parameters: int, trained: int) -> tuple[str, str]:
    """Free space where checkpoints go: `--keep_last` of them and the one that is being written, the best weights and
    those that replace them. What a resumed run will remove counts as free."""
    folder = Path(args.checkpoint_dir)
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return FAIL, f"cannot write in {there}; choose another --checkpoint_dir"
    whole, weights = checkpoint_bytes(args, parameters, trained), WEIGHT * parameters
    needed = (args.keep_last + 1) * whole + 2 * weights
    own = checkpoint.list_checkpoints(folder) if checkpoint.continues(args.resume, folder) else []
    free = shutil.disk_usage(there).free + sum(path.stat().st_size for path in own)
    said = (
        f"{size(free)} free for {args.keep_last} + 1 checkpoints of {size(whole)} and the best weights, {size(needed)}"
    )
    if free < needed:
        return FAIL, f"{said}; lower --keep_last, or choose another --checkpoint_dir"
    return PASS, said


def checkpoint_bytes(args, parameters: int, trained: int) -> int:
    """The size of a whole checkpoint: weights, and the optimizer's states wherever they are kept in a run."""
    return int(WEIGHT * parameters + STATES[args.optimizer] * trained)


def size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
