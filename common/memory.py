"""Activation checkpointing, out-of-memory errors, splitting of batches that do not fit, one model
in another's place, memory statistics."""

import functools
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.checkpoint import checkpoint

from common.batches import split_batch, to_device
from common.errors import RunError, UsageError, first_line

# Messages of cuDNN, cuBLAS and the CPU's allocator when memory is short. They do not raise
# torch.OutOfMemoryError.
OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUFFT_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "Unable to find a valid cuDNN algorithm",
    "can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a"
    " non-contiguous input",
    "unable to find an engine to execute this computation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host has too little memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in OUT_OF_MEMORY_WORDS
    )


def free_memory(device: torch.device) -> None:
    """Frees what a failed attempt left behind: reference cycles, then the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def split_on_oom(function: Callable[[dict], object], batch: dict, device: torch.device) -> list:
    """`[function(batch)]` or, if that runs out of memory, the results for its halves. Raises
    `RunError` with the name of an utterance that does not fit alone. For evaluation: `function` may
    be called several times for an utterance."""
    try:
        return [function(batch)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    free_memory(device)  # outside the handler, in which the traceback keeps the tensors alive
    size = len(batch["names"])
    if size == 1:
        name = batch["names"][0]
        raise RunError(
            f"{name} does not fit into memory even alone and without gradients ({reason})"
        )
    results = []
    for piece in split_batch(batch, (size + 1) // 2):
        results += split_on_oom(function, piece, device)
    return results


def evaluated(
    function: Callable[[dict], object], model: torch.nn.Module, eval_batches: Iterable[dict]
) -> Iterator[tuple[dict, list]]:
    """Each batch, as it is on the host, with what `function(batch on the model's device)` returns:
    one result, or several for parts of the batch, in their order, if it does not fit into memory as
    a whole. A part has no "counts". For a recipe's `evaluate`."""
    device = next(model.parameters()).device

    def on_device(batch: dict) -> object:
        return function(next(to_device([batch], device)))

    for batch in eval_batches:
        yield batch, split_on_oom(on_device, batch, device)


def replace_on_device(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Moves `model` and autocast's 16-bit copies of it off its device, and `other` there: a small
    GPU does not hold two models. Raises `RunError` if `other` does not fit."""
    device = next(model.parameters()).device
    try:
        model.cpu()
        torch.clear_autocast_cache()
        free_memory(device)
        other.to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"the model to compare with does not fit into memory ({first_line(error)}): what was"
            f" trained is saved; end what else uses {device}, and compare with --evaluate"
        ) from None


def checkpoint_layers(model: torch.nn.Module, kinds: tuple[type, ...]) -> None:
    """Recomputes the activations of every module of `kinds` in backward instead of keeping them.
    Loss and gradients stay the same, also with dropout, whose random state is replayed. Raises
    `UsageError` if there is no such module."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    if not layers:
        raise UsageError(
            f"--gradient_checkpointing: {type(model).__name__} has no layer of the kinds it"
            " applies to"
        )
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer, layer.forward)


def _recomputed(layer: torch.nn.Module, forward, *inputs, **named):
    if layer.training and torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False, **named)
    return forward(*inputs, **named)


def memory_used(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, else resident memory. Does not wait for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak(device: torch.device) -> str:
    """A line about the peak of memory (the allocator's, or resident memory) and the total."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        peaks = f"{allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} GiB reserved"
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes
        peaks = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.2f} GiB resident"
    return f"memory: peak {peaks}, total {total / 2**30:.2f} GiB"


def size(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
