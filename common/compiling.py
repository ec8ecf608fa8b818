"""torch.compile of a model's repeated layers: a trial before training, a bound on the number of graphs, their count."""

import functools
import time
from collections import Counter

import torch

from common.errors import UsageError

# Graphs of a kind of layer for every length that its input can have: the full micro-batch, an epoch's last one, and the
# halves that out-of-memory may leave.
BATCH_SIZES = 4
FEW = 8  # graphs of a kind of layer with symbolic lengths: with and without a mask, of one utterance and of several

graphs: Counter[str] = Counter()  # compiled so far in this process, by kind of layer
limits: dict[str, int] = {}  # the most that are kept of each


def compile_problem(device: torch.device) -> str | None:
    """Why torch.compile cannot be used on a device, found by compiling something tiny: one line with what would help;
    None if it can."""
    factor = 1 + time.time_ns() % 10**9 / 1e9  # a kernel that no cache holds: it must be compilable here and now

    def trial(x: torch.Tensor) -> torch.Tensor:
        return (x * factor).sin().sum()

    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(trial)(x).backward()
    except Exception as error:  # of many types, from torch's, Triton's and the compiler's side
        # What went wrong follows the type that wraps it.
        said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if device.type == "cuda":
            tools = "triton (it comes with torch's Linux wheels) and a C compiler with Python's headers: sudo apt install gcc python3-dev"
        else:
            tools = "a C++ compiler: sudo apt install g++"
        return f"torch.compile does not work on {device} ({said[0][:200]}); it needs {tools}"
    return None


def compile_layers(
    model: torch.nn.Module, kinds: tuple[type, ...], shapes: int | None = None, backend: str = "inductor"
) -> None:
    """Compiles the forward of every module of `kinds`, once for all modules of a kind; call it before
    `memory.checkpoint_layers`, on the model as it will be trained (device, frozen parameters). Names of parameters and
    buffers stay as they are. While `model` is evaluated its layers run as they were: decoding has a new length at every
    step. Rounding differs from the layers' own; nothing else does.

    `shapes`: how many lengths the input can have (`batches.quantise`). Each then has its own graph, the fastest there
    is, and the bound holds: what comes in more shapes than that, several batch sizes included, runs uncompiled from
    there on. None: lengths are symbols, a few graphs do for all.

    Raises `UsageError` where there is no such layer, or nothing to compile it with."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise UsageError(f"--torch_compile: {type(model).__name__} has no layer of the kinds it applies to")
    if any("forward" in vars(layer) for layer in layers):
        raise ValueError("compile_layers comes before checkpoint_layers, or torch.compile would see the recomputation")
    problem = compile_problem(next(model.parameters()).device) if backend == "inductor" else None
    if problem:
        raise UsageError(f"--torch_compile: {problem}; or leave the flag out")
    from torch._dynamo import config, lookup_backend  # seconds, which only a run that compiles has to spend

    limit = FEW if shapes is None else BATCH_SIZES * shapes
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit * len(kinds))
    compiled = {}
    for kind in {type(layer): None for layer in layers}:
        limits[kind.__name__] = limit
        counted = functools.partial(_counted, kind.__name__, lookup_backend(backend))
        compiled[kind] = torch.compile(kind.forward, dynamic=shapes is None, backend=counted)
    for layer in layers:
        layer.forward = functools.partial(_run, model, compiled[type(layer)], layer)


def _run(model: torch.nn.Module, compiled, layer: torch.nn.Module, *inputs, **named):
    # By the model's mode and not the layer's own: a frozen encoder may be in eval mode while the rest trains.
    return (compiled if model.training else type(layer).forward)(layer, *inputs, **named)


def _counted(kind: str, backend, graph, inputs, **options):
    graphs[kind] += 1
    return backend(graph, inputs, **options)


def summary() -> str:
    """How many graphs were compiled, and of which kinds there were more shapes than are kept; empty where nothing was
    compiled."""
    if not graphs:
        return ""
    counts = ", ".join(f"{count} of {kind}" for kind, count in sorted(graphs.items()))
    text = f"torch.compile: {graphs.total()} graphs ({counts})"
    full = full_kinds()
    return text + (f"; no more are kept of {', '.join(full)}: other shapes run uncompiled" if full else "")


def full_kinds() -> list[str]:
    """The kinds of layer of which no more graphs will be compiled."""
    return sorted(kind for kind, count in graphs.items() if count >= limits.get(kind, count + 1))
