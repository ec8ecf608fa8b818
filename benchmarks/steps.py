"""What the benchmarks of a training step share: each row of a table is measured in processes
started for it alone, which print seconds and the peak of memory."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import torch


def measure(step: Callable[[], object], args, **more) -> None:
    """Measures in this process. `step()` makes an update and returns the loss before it. Prints a
    line of JSON: seconds by the clock and by the processor of each of `args.steps` steps, the peak
    in bytes, the loss of the first step, and `more`."""
    device = torch.device(args.device)
    is_cuda = device.type == "cuda"

    def measured() -> tuple[float, float, float]:
        """Seconds by the clock, by the processor, and the loss."""
        if is_cuda:
            torch.cuda.synchronize(device)
        started, used = time.perf_counter(), time.process_time()
        loss = float(step())
        if is_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started, time.process_time() - used, loss

    # Optimizer states and, on a GPU, kernels and their workspaces are made in the first step, or
    # the second.
    (_, _, loss), *_ = [measured() for _ in range(3 if is_cuda else 1)]
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds, used, _ = zip(*[measured() for _ in range(args.steps)], strict=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if is_cuda:
        peak = torch.cuda.max_memory_allocated(device)
    print(json.dumps({"seconds": seconds, "processor": used, "bytes": peak, "loss": loss, **more}))


def run(rows: Iterable[str], args, may_fail: bool = True) -> dict[str, list[dict]]:
    """What the processes of each of `rows` have printed; the rows take turns, `args.runs` times.
    With `args.rows` only these and the first, which is the reference. A process that fails, because
    its row does not fit into memory, has no result, unless it may not fail: then
    `CalledProcessError` is raised."""
    first, *others = rows
    found = {first: [], **{row: [] for row in others if not args.rows or row in args.rows}}
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
    }  # else waiting for a thread is work, too
    for _ in range(args.runs):
        for row in found:
            command = [sys.executable, *sys.argv, "--child", row]
            ran = subprocess.run(
                command, check=not may_fail, stdout=subprocess.PIPE, text=True, env=environment
            )
            if ran.returncode == 0:
                found[row].append(json.loads(ran.stdout))
                print(f"{row}: {found[row][-1]}", file=sys.stderr, flush=True)
    return found


def medians(runs: list[dict]) -> tuple[float, float, float]:
    """Seconds by the clock, by the processor, and bytes."""
    seconds, used = (
        statistics.median(x for run in runs for x in run[key]) for key in ("seconds", "processor")
    )
    return seconds, used, statistics.median(run["bytes"] for run in runs)


def add_arguments(parser, rows: Iterable[str], threads: int = 1) -> None:
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--runs", type=int, default=3, help="processes of each row")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each process")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(rows),
        metavar="NAME",
        help="only these rows, and the first",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
