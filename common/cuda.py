"""Why a GPU cannot be used, in one line with what would help."""

import os
import re
import sys
import warnings

import torch

from common.errors import first_line

# PyPI's torch 2.11 to 2.15 are built for CUDA 13 and compute capability 7.5 to 12.0; the CUDA 12.6
# builds of 2.8 to 2.11 cover 5.0 to 9.0 (RELEASE.md of pytorch, "CUDA Support Matrix"). pip
# replaces one by the other only with --force-reinstall.
PIP_TORCH = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.8,<2.12'"
CUDA_126 = f"the CUDA 12.6 build: {PIP_TORCH} --index-url https://download.pytorch.org/whl/cu126"


def cuda_problem(index: int = 0) -> str | None:
    """Why the installed torch cannot use CUDA device `index`: one line with what would help. None
    if it can; the device is then the current one."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU-only build; the CUDA one: {PIP_TORCH}"
    try:
        with warnings.catch_warnings():
            # Ten lines about the architecture; kernel_problem says it in one.
            warnings.simplefilter("ignore")
            torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        reason = first_line(error)
        count = 0
        if driver := re.search(r"too old \(found version (\d+)\)", reason):
            # Of the versions of CUDA that the driver supports; 12040 stands for 12.4.
            newest = int(driver[1])
            version = f"{newest // 1000}.{newest % 1000 // 10}"
            # NVIDIA's "Minor Version Compatibility"
            oldest = 525 if torch.version.cuda.startswith("12.") else 580
            instead = f", or install {CUDA_126}" if newest >= 12000 else ""
            return (
                f"the NVIDIA driver supports CUDA {version} at most and is too old for torch"
                f" {torch.__version__}: update it to {oldest} or newer{instead}"
            )
        if "no NVIDIA driver" in reason:
            return "there is no NVIDIA driver on this machine (nvidia-smi should list the GPU)"
        if "No CUDA GPUs" not in reason:
            return f"CUDA does not start: {reason}"
    if index >= count:
        problem = "there is no NVIDIA GPU"
        if count:
            problem = f"there is no cuda:{index}, only {count} GPU{'s' if count > 1 else ''}"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            problem += f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        return problem
    name = torch.cuda.get_device_name(index)
    capability = torch.cuda.get_device_capability(index)
    if problem := kernel_problem(name, capability, torch.cuda.get_arch_list()):
        return problem
    try:  # fails if another process has filled the GPU or uses it exclusively
        torch.cuda.set_device(index)
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        return f"cuda:{index} cannot compute now ({first_line(error)}): see nvidia-smi"
    return None


def kernel_problem(name: str, capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Why a torch built for `architectures` (["sm_75", ..., "compute_120"]) has no kernels for this
    GPU, or None. Binaries ("sm_") run on later minor versions of the same major version, PTX
    ("compute_") on all later versions."""
    # AMD's architectures have other names.
    built = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(architectures))
    versions = [(kind, (int(major), int(minor))) for kind, major, minor in built]
    if not versions or any(
        v <= capability and (kind == "compute" or v[0] == capability[0]) for kind, v in versions
    ):
        return None
    lack = f"torch {torch.__version__} has no kernels for {name}"
    lack += f" (compute capability {capability[0]}.{capability[1]})"
    if capability < (5, 0):
        return f"{lack}, nor has any version that requirements.txt allows"
    if capability < min(version for _, version in versions):
        return f"{lack}; install {CUDA_126}"
    return f"{lack}; install PyPI's build: {PIP_TORCH}"
