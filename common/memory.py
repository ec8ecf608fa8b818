"""Activation checkpointing, lean chains of layers, out-of-memory errors, splitting of batches that do not fit, statistics."""

import functools
import gc
import os
import resource
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from common.batches import split_batch
from common.device import downcast
from common.errors import RunError, UsageError, first_line

# Messages of cuDNN, cuBLAS and the CPU's allocator when memory is short. They do not raise torch.OutOfMemoryError.
OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",
    "Unable to find a valid cuDNN algorithm",
    "unable to find an engine to execute this computation",
    "can't allocate memory",
)
SMALL = 1 << 19  # elements; less than that `lean_chain` does not recompute
# The activations that it knows, with their gradients.
ACTIVATIONS = {F.gelu: torch.ops.aten.gelu_backward.default, F.silu: torch.ops.aten.silu_backward.default}
NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host has too little memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def free_memory(device: torch.device) -> None:
    """Frees what a failed attempt left behind: reference cycles, then the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def split_on_oom(function: Callable[[dict], object], batch: dict, device: torch.device) -> list:
    """`[function(batch)]` or, if that runs out of memory, the results for its halves. Raises `RunError` with the name
    of an utterance that does not fit alone. For evaluation: `function` may be called several times for an utterance."""
    try:
        return [function(batch)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    free_memory(device)  # outside the handler, in which the traceback keeps the tensors alive
    size = len(batch["names"])
    if size == 1:
        raise RunError(f"{batch['names'][0]} does not fit into memory even alone and without gradients ({reason})")
    return [result for piece in split_batch(batch, (size + 1) // 2) for result in split_on_oom(function, piece, device)]


def checkpoint_layers(model: torch.nn.Module, kinds: tuple[type, ...]) -> None:
    """Recomputes the activations of every module of `kinds` in backward instead of keeping them. Loss and gradients
    stay the same, also with dropout, whose random state is replayed. Raises `UsageError` if there is no such module."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise UsageError(f"--gradient_checkpointing: {type(model).__name__} has no layer of the kinds it applies to")
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer, layer.forward)


def _recomputed(layer: torch.nn.Module, forward, *inputs):
    if layer.training and torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False)
    return forward(*inputs)


def lean_chain(x: torch.Tensor, *steps: Callable) -> torch.Tensor:
    """The result of `steps` on `x` (..., D): linear layers, each after a LayerNorm, an activation, or both in this order.

    Backward keeps `x` and what the linear layers return, and computes norms and activations again: these are cheap, but
    their results are as large. Values and gradients stay the same to the bit; under autocast norms are in fp32, as CUDA has
    them. The steps run as they are in evaluation, under torch.compile, which recomputes by itself, and on small inputs,
    for which a Python function in backward would take longer than the GPU."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or x.numel() < SMALL:
        for step in steps:
            x = step(x)
        return x
    parts, tensors, norm, activation = [], [], None, None
    for step in steps:
        if isinstance(step, torch.nn.LayerNorm):
            norm = step
        elif isinstance(step, torch.nn.Linear):
            parts.append((norm, activation))
            tensors += downcast(step.weight), downcast(step.bias), norm and norm.weight, norm and norm.bias
            norm = activation = None
        else:
            activation = step
    return _LeanChain.apply(parts, x, *tensors)


class _LeanChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, x, *tensors):
        kept = []
        for (norm, activation), weight, bias in zip(parts, tensors[::4], tensors[1::4], strict=True):
            kept += x, weight
            x = F.linear(_prepare(x, norm, activation)[0].to(weight.dtype), weight, bias)
        ctx.save_for_backward(*kept)
        ctx.parts = parts
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        kept, gradients = ctx.saved_tensors, []
        for (norm, activation), x, weight in reversed(list(zip(ctx.parts, kept[::2], kept[1::2], strict=True))):
            y, normed, *norm_inputs = _prepare(x, norm, activation)
            gradient = gradient.flatten(0, -2)
            of_weight = gradient.t() @ y.to(weight.dtype).flatten(0, -2)
            of_bias, of_scale, of_shift = gradient.sum(0), None, None
            del y  # before its gradient, which is as large
            gradient = (gradient @ weight).view(x.shape).to(normed.dtype)
            if activation:
                gradient = ACTIVATIONS[activation](gradient, normed)
            if norm:
                gradient, of_scale, of_shift = NORM_BACKWARD(gradient, *norm_inputs, norm.weight, norm.bias, [True] * 3)
            gradients[:0] = of_weight, of_bias, of_scale, of_shift
        return None, gradient.to(x.dtype), *gradients


def _prepare(x: torch.Tensor, norm: torch.nn.LayerNorm | None, activation: Callable | None) -> tuple:
    """The input of a linear layer, that of the activation before it, and what the norm's gradient needs."""
    normed, statistics = x, ()
    if norm:
        x = x.to(norm.weight.dtype)
        normed, *statistics = torch.native_layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return activation(normed) if activation else normed, normed, x, x.shape[-1:], *statistics


def memory_used(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, otherwise this process's resident memory. Does not wait for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak(device: torch.device) -> str:
    """One line about the peak of memory (the allocator's on a GPU, resident memory on a CPU) and the device's total."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        peaks = f"{allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} GiB reserved"
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        peaks = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB resident"
    return f"memory: peak {peaks}, total {total / 2**30:.2f} GiB"


def require_room(parameters: int) -> None:
    """Raises `UsageError` if a model of so many fp32 parameters cannot be made on this machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * parameters > total:
        size = f"{parameters / 1e9:.1f} billion parameters take {4 * parameters / 2**30:.0f} GiB"
        raise UsageError(f"the model is too large for this machine: {size}, and it has {total / 2**30:.0f}")
