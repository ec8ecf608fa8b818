"""torch.compile of a model's repeated layers, after a trial that shows whether it can work here."""

import functools
import time

import torch

from common.errors import UsageError, first_line

# of a kind of layer: with and without a mask, of one utterance and of several; further ones run
# uncompiled
GRAPHS = 8


def compile_problem(device: torch.device) -> str | None:
    """Why torch.compile does not work on a device, and what would help. None if it does."""
    # No cache holds a kernel with this factor, so the compiler must work here and now.
    factor = 1 + time.time_ns() % 10**9 / 1e9
    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda x: (x * factor).sin().sum())(x).backward()
    except Exception as error:  # of many types: torch's, Triton's, the compiler's
        tools = "a C++ compiler: sudo apt install g++"
        if device.type == "cuda":
            tools = "triton, a C compiler, Python's headers: apt install gcc python3-dev"
        reason = first_line(error)[:200]
        return f"torch.compile does not work on {device} ({reason}); it needs {tools}"
    return None


def compile_layers(model: torch.nn.Module, kinds: tuple[type, ...]) -> None:
    """Compiles the forward of every module of `kinds`, once for all modules of a kind, with
    symbolic lengths. Call it when device and frozen parameters are final, before
    `memory.checkpoint_layers`. Evaluation runs uncompiled, because decoding has a new length at
    every step. Only the rounding differs. Raises `UsageError` if this cannot work."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise UsageError(
            f"--torch_compile: {type(model).__name__} has no layer of the kinds it applies to"
        )
    if problem := compile_problem(next(model.parameters()).device):
        raise UsageError(f"--torch_compile: {problem}; or leave the flag out")
    from torch._dynamo import config  # takes seconds, which only a run that compiles should spend

    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    most = max(config.accumulated_recompile_limit, GRAPHS * len(kinds))
    config.accumulated_recompile_limit = most
    types = {type(layer) for layer in layers}
    compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in types}
    for layer in layers:
        layer.forward = functools.partial(_run, model, compiled[type(layer)], layer)


def _run(model: torch.nn.Module, compiled, layer: torch.nn.Module, *inputs, **named):
    # By the model's mode, not the layer's own: a frozen encoder may be in eval mode while the rest
    # trains.
    return (compiled if model.training else type(layer).forward)(layer, *inputs, **named)
