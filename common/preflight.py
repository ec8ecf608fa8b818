"""`--verify_gpu`: checks in seconds what a run needs of this machine. Each check prints pass, FAIL or skip."""

import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import batches, checkpoint, compiling, device, gpu
from common.device import Setup
from common.errors import UsageError, first_line

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
WEIGHT = GRADIENT = 4  # bytes: fp32
STATES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}  # bytes of the two averages, including scales
BACKENDS = {  # name: torch's back end, and whether it is enabled
    "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    "math": (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
}


def verify(args, parameters: int, trained: int | None = None) -> int:
    """Checks what a run with these flags needs, prints a line for each check, and returns the exit status: 1 if one has
    failed. `parameters` is the size of the model, `trained` how many of them are not frozen (None: all). Nothing is
    written or downloaded. Call it after `options.resolve`, in place of `device.setup`."""
    trained = parameters if trained is None else trained
    try:
        setup, problem = device.setup(args, quiet=True), None
    except UsageError as error:
        setup = Setup(workers=device.pick_workers(args.dataloader_num_workers, torch.device("cpu"), quiet=True))
        problem = str(error)
    on_gpu, no_gpu = setup.device.type == "cuda", (SKIP, "there is no GPU to check")
    if not on_gpu and args.device != "cpu":
        problem = problem or gpu.cuda_problem()
    results = {
        "GPU": check_gpu(setup, problem),
        "driver": check_driver() if on_gpu else no_gpu,
        "memory": check_memory(args, setup, parameters, trained) if on_gpu else no_gpu,
        "precision": no_gpu if problem else (PASS, device.pick_dtype(args.mixed_precision, setup.device)[1]),
        "mixed precision": check_autocast(setup),
        "attention": check_attention(setup) if on_gpu else no_gpu,
        "torch.compile": check_compile(args, setup),
        "prefetching": check_prefetching(setup),
        "TF32": check_tf32(args, setup) if on_gpu else no_gpu,
        "disk": check_disk(args, parameters, trained),
    }
    for name, (status, reason) in results.items():
        print(f"{status}  {name}: {reason}")
    return int(any(status == FAIL for status, _ in results.values()))


def check_gpu(setup: Setup, problem: str | None) -> tuple[str, str]:
    if problem:
        return FAIL, problem
    if setup.device.type != "cuda":
        return SKIP, "--device cpu"
    major, minor = torch.cuda.get_device_capability(setup.device)
    return PASS, f"{torch.cuda.get_device_name(setup.device)}, compute capability {major}.{minor}"


def check_driver() -> tuple[str, str]:
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    try:
        nvml = gpu.load_nvml()
        version = nvml.nvmlSystemGetDriverVersion()
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        nvml.nvmlShutdown()
    except Exception as error:  # the driver works, because the GPU was found
        return PASS, f"{built} and computes; the driver's version is not known ({error})"
    return PASS, f"{version}, up to CUDA {number // 1000}.{number % 1000 // 10}; {built}"


def check_memory(args, setup: Setup, parameters: int, trained: int) -> tuple[str, str]:
    """Whether weights, gradients and optimizer states fit into the free memory."""
    free, total = torch.cuda.mem_get_info(setup.device)
    states = 0.0 if args.use_cpu_offload else STATES[args.optimizer]
    needed = WEIGHT * parameters + (GRADIENT + states) * trained
    space = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    text = f"{space}; weights, gradients and optimizer states take {size(needed)}"
    if others := gpu.gpu_processes():
        text += f"; also on this GPU: {others}"
    if free <= needed:
        return FAIL, f"{text}: use a smaller model, --optimizer adamw_8bit or --use_cpu_offload"
    return PASS, f"{text}, the rest is for activations"


def check_autocast(setup: Setup) -> tuple[str, str]:
    """Whether a product under autocast has the 16-bit type, and whether fp16 has loss scaling."""
    if setup.dtype is None:
        return SKIP, "fp32 throughout"
    wanted = name_of(setup.dtype)
    try:
        dtype = product_dtype(setup)
    except RuntimeError as error:
        return FAIL, f"a product of matrices in {wanted} does not work: {first_line(error)}"
    if dtype is not setup.dtype:
        return FAIL, f"a product of matrices under autocast is {name_of(dtype)}, not {wanted}"
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
    """Which back ends of scaled_dot_product_attention are enabled and work here, without and with a mask."""
    enabled = {name: kernel for name, (kernel, is_enabled) in BACKENDS.items() if is_enabled()}
    plain = [name for name, kernel in enabled.items() if attention_works(setup, kernel, masked=False)]
    masked = [name for name, kernel in enabled.items() if attention_works(setup, kernel, masked=True)]
    if not plain or not masked:
        return FAIL, "no back end of scaled_dot_product_attention computes on this GPU"
    only = " (math alone: memory grows with the square of the length)" if masked == ["math"] else ""
    return PASS, f"{', '.join(plain)}; with a padding mask: {', '.join(masked)}{only}"


def attention_works(setup: Setup, kernel: SDPBackend, masked: bool) -> bool:
    """Tries forward and backward of a tiny attention."""
    dtype = setup.dtype or torch.float32
    q = torch.ones(2, 2, 16, 64, device=setup.device, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 1, 16, device=setup.device, dtype=torch.bool) if masked else None
    with warnings.catch_warnings(), sdpa_kernel(kernel):
        warnings.simplefilter("ignore")  # torch explains at length why it did not use the other back ends
        try:
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()
        except RuntimeError:
            return False
    return True


def check_compile(args, setup: Setup) -> tuple[str, str]:
    if not args.torch_compile and setup.device.type != "cuda":
        return SKIP, "not asked for (--torch_compile)"
    if problem := compiling.compile_problem(setup.device):
        return (FAIL, problem) if args.torch_compile else (SKIP, f"not asked for, and {problem}")
    hint = "" if args.torch_compile else " (--torch_compile would use it)"
    return PASS, f"a tiny function was compiled for {setup.device}{hint}"


def check_prefetching(setup: Setup) -> tuple[str, str]:
    """Whether worker processes read the data and, on a GPU, copies from pinned memory run on a stream of their own."""
    on_gpu, workers = setup.device.type == "cuda", f"{setup.workers} data worker{'s' if setup.workers != 1 else ''}"
    if not setup.workers:
        return FAIL if on_gpu else SKIP, "--dataloader_num_workers 0: training waits while data are read; try auto"
    if not on_gpu:
        return PASS, workers
    try:
        copy_ahead(setup)
    except RuntimeError as error:
        return FAIL, f"{workers}, but copying from pinned memory does not work: {first_line(error)}"
    return PASS, f"{workers}, pinned memory, and the next micro-batch is copied while one computes"


def copy_ahead(setup: Setup) -> None:
    """Copies two micro-batches to the device as training does."""
    window = batches.Window(0, 0, False, [{"audio": torch.ones(2, 16)} for _ in range(2)]).pin_memory()
    for batch in batches.to_device(window.micro_batches, setup.device):
        if float(batch["audio"].sum()) != 32:
            raise RuntimeError("the copy differs from its source")


def check_tf32(args, setup: Setup) -> tuple[str, str]:
    if not args.tf32:
        return SKIP, "--no_tf32"
    if torch.cuda.get_device_capability(setup.device)[0] < 8:
        return SKIP, "this GPU has no TF32 units (compute capability 8.0 and newer have)"
    if not torch.backends.cuda.matmul.allow_tf32:
        return FAIL, "it was asked for but is not on"
    return PASS, "on for operations in fp32"


def check_disk(args, parameters: int, trained: int) -> tuple[str, str]:
    """Whether `--keep_last` checkpoints and one that is being written, the best weights and their replacement fit on
    the disk. Checkpoints that a resumed run will remove count as free."""
    folder = Path(args.checkpoint_dir)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return FAIL, f"cannot write in {existing}; choose another --checkpoint_dir"
    each = checkpoint_bytes(args, parameters, trained)
    needed = (args.keep_last + 1) * each + 2 * WEIGHT * parameters
    own = checkpoint.list_checkpoints(folder) if checkpoint.continues(args.resume, folder) else []
    free = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in own)
    need = f"{args.keep_last} + 1 checkpoints of {size(each)} and the best weights, {size(needed)}"
    if free < needed:
        return FAIL, f"{size(free)} free for {need}; lower --keep_last, or choose another --checkpoint_dir"
    return PASS, f"{size(free)} free for {need}"


def checkpoint_bytes(args, parameters: int, trained: int) -> int:
    """The size of a checkpoint in bytes: weights and optimizer states, also if a run keeps these in host memory."""
    return int(WEIGHT * parameters + STATES[args.optimizer] * trained)


def size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
