"""The first piece: what the card is. As a program it prints this as a line of JSON.

python benchmarks/gpu/card.py cuda"""

import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.backends.cuda import SDPAParams

from common import device
from common.cuda import cuda_problem
from common.parts import preflight
from common.parts.utilisation import gpu_processes

# Peak of dense 16-bit products with sums in fp32, 1e12 operations a second: the makers' data
# sheets. GeForce cards have half of their fp16 peak with sums in fp32.
PEAKS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L4": 121,
    "T4": 65,
    "V100": 125,
    "RTX 5090": 210,
    "RTX 4090": 165,
    "RTX 4080": 97,
    "RTX 3090": 71,
    "RTX 3060": 25,
}
SIDE = 8192  # of the matrices that are multiplied
ATTENTION = {"64": (2, 8, 512, 64), "128": (2, 8, 512, 128)}  # width of a head: (B, H, T, D)
BACKENDS = ("flash", "efficient")  # a run switches cuDNN's off


def known_peak(name: str) -> float | None:
    """The peak of a card by its name, operations a second; None if it is not in the table. "A10"
    is not in "A100"."""
    words = name.replace("-", " ").split()
    for known, peak in PEAKS.items():
        parts = known.split()
        if any(words[at : at + len(parts)] == parts for at in range(len(words))):
            return peak * 1e12
    return None


def products(where: torch.device, dtype: torch.dtype, side: int) -> float:
    """Operations a second of products of matrices."""
    a = torch.randn(side, side, device=where).to(dtype)
    best = 0.0
    for _ in range(5):
        synchronise(where)
        started = time.perf_counter()
        for _ in range(4):
            a @ a
        synchronise(where)
        best = max(best, 4 * 2 * side**3 / (time.perf_counter() - started))
    return best


def synchronise(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def kernels(where: torch.device, dtype: torch.dtype) -> dict[str, list[str]]:
    """The fused kernels that attention can use, by the width of a head, with and without a mask."""
    found = {}
    for width, (rows, heads, length, size) in ATTENTION.items():
        q = torch.randn(rows, heads, length, size, device=where, dtype=dtype, requires_grad=True)
        mask = torch.ones(rows, 1, 1, length, device=where, dtype=torch.bool)
        for name, given in (("", None), (" with a mask", mask.expand(-1, -1, length, -1))):
            parameters = SDPAParams(q, q, q, given, 0.0, False, False)
            found[width + name] = [
                backend
                for backend in BACKENDS
                if getattr(torch.backends.cuda, f"can_use_{backend}_attention")(parameters)
            ]
    return found


def on_gpu() -> dict:
    if problem := cuda_problem():
        raise SystemExit(f"error: {problem}")
    where = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability()
    dtype = device.pick_dtype("auto", capability)[0]
    speeds = {"16-bit": products(where, dtype, SIDE), "fp32": products(where, torch.float32, 4096)}
    reserved = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    setup = device.Setup(where, dtype)
    return {
        "name": name,
        "gib": torch.cuda.get_device_properties(0).total_memory / 2**30,
        "capability": ".".join(map(str, capability)),
        "dtype": str(dtype).removeprefix("torch."),
        "cuda": torch.version.cuda,
        "checked": preflight.check_gpu(setup)[1],
        "context": total - free - reserved,
        "others": gpu_processes(),
        "attention": preflight.check_attention(setup)[1],
        "kernels": kernels(where, dtype),
        "products": speeds,
        "peak": known_peak(name) or speeds["16-bit"],
        "peak is": "the maker's" if known_peak(name) else "measured by products of matrices",
    }


def on_cpu() -> dict:
    speed = products(torch.device("cpu"), torch.float32, 1024)
    return {
        "name": f"CPU {platform.machine()}, {os.cpu_count()} cores",
        "gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "capability": "",
        "dtype": "float32",
        "attention": preflight.check_attention(device.Setup())[1],
        "products": {"fp32": speed},
        "peak": speed,
        "peak is": "measured by products of matrices",
    }


def measure(kind: str) -> dict:
    found = on_gpu() if kind == "cuda" else on_cpu()
    return {**found, "torch": str(torch.__version__), "python": platform.python_version()}


def measured(bench) -> dict:
    """The same in a child, so that on_gpu.py itself takes no memory of the card."""
    with bench.folder() as folder:
        output = bench.child({"run": [__file__, bench.device]}, folder, 40)
    return json.loads(output.strip().splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
