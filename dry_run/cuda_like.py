"""CUDA's choices, imposed on the CPU: the types of autocast, the kernels of attention, dropout and
LSTM."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from dry_run.fake_tensors import CannotPlan, tensors_in

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
# Of operators, in the header.
LISTS = ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE")
# Compute capabilities: what flash attention needs, what memory-efficient attention needs, the
# newest that either knows, and those (with 12.x) on which flash attention lacks a backward of wide
# heads.
FLASH, EFFICIENT, NEWEST = (8, 0), (5, 0), (12, 1)
WITHOUT_WIDE = ((8, 6), (8, 7), (8, 9))
# Compute capability from which 16-bit products take heads of multiples of 8 only.
TENSOR_CORES = (7, 0)
FLASH_HEAD = 256  # widest head of flash attention
# Values for each step and cell that cuDNN's LSTM keeps: an estimate, because cuDNN does not
# document it.
RESERVE = 6
ALIGNMENT = 8  # of the strides of a mask for memory-efficient attention
aten = torch.ops.aten
cast_copies: dict[int, torch.Tensor] = {}  # autocast's cache: 16-bit copies of weights, by their id


def autocast_lists() -> dict[str, list[str]]:
    """The operators that CUDA's autocast runs in 16 bits, in fp32, with an fp32 result, or in their
    inputs' widest type, as "name" or "name.overload". Raises `CannotPlan` if torch does not say."""
    try:
        text = HEADER.read_text(encoding="utf-8")
    except OSError:
        text = ""
    lists = {}
    for name in LISTS:
        found = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", text)
        entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", found[1]) if found else []
        lists[name] = [".".join(filter(None, entry)) for entry in entries]
    if not all(lists.values()):
        raise CannotPlan(
            f"torch {torch.__version__} does not say what CUDA's autocast does: {HEADER} is missing"
            " or has changed"
        )
    lists["PROMOTE"] += ["cat", "stack"]  # registered apart, because they take lists
    return lists


def cast(value, dtype: torch.dtype):
    """A floating tensor, or every one of a list, in autocast's `dtype`."""
    if isinstance(value, (list, tuple)):
        return type(value)(cast(each, dtype) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if value.dtype in (dtype, torch.float64):
        return value
    is_weight = value.is_leaf and value.requires_grad and not value._is_view()
    is_full = value.dtype is torch.float32
    if not (
        is_weight and is_full and dtype is not torch.float32 and torch.is_autocast_cache_enabled()
    ):
        return value.to(dtype)
    if id(value) not in cast_copies:
        cast_copies[id(value)] = value.to(dtype)
    return cast_copies[id(value)]


def widest(values) -> torch.dtype:
    """fp32 if any floating tensor in `values` is, otherwise autocast's type."""
    kinds = {tensor.dtype for tensor in tensors_in(values)}
    return torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype("cpu")


def under_autocast(operator, kind: str) -> Callable:
    """The kernel of an operator for the dispatch key of autocast, as CUDA's."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if kind == "FP32_SET_OPT_DTYPE":
                names = [argument.name for argument in operator._schema.arguments]
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                is_raised = args[0].is_floating_point() and args[0].dtype is not torch.float64
                if is_raised and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                return operator(**given)
            dtype = torch.float32
            if kind == "LOWER_PRECISION_FP":
                dtype = torch.get_autocast_dtype("cpu")
            elif kind == "PROMOTE":
                dtype = widest((*args, *kwargs.values()))
            args = [cast(value, dtype) for value in args]
            return operator(*args, **{name: cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def kernel_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    capability: tuple[int, int],
) -> str:
    """The kernel of scaled_dot_product_attention that a GPU of this compute capability takes:
    "flash", "efficient" or "math", which keeps all scores. The conditions are those of torch 2.11's
    sdp_utils.cpp, in the same order of preference, without cuDNN's kernel, which is off."""
    head = q.shape[-1]
    is_fused = (
        q.dim() == k.dim() == v.dim() == 4
        and q.dtype == k.dtype == v.dtype
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[2] > 0
        and k.shape[2] > 0
        and k.shape[3] == head
        and (mask is None or mask.stride(-1) == 1)
        and capability <= NEWEST
    )
    strided = any(x.stride(-1) != 1 for x in (q, k, v))
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    has_backward = not (
        trained
        and (capability in WITHOUT_WIDE or capability >= (12, 0))
        and (192 < head <= 224 or (head > 224 and dropout > 0))
    )
    flash = (
        capability >= FLASH
        and mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and v.shape[-1] == head <= FLASH_HEAD
        and (not causal or q.shape[2] == k.shape[2])
        and (head == 1 or not strided)
        and has_backward
    )
    if is_fused and flash:
        return "flash"
    halves = q.dtype is torch.float16 or (q.dtype is torch.bfloat16 and capability >= FLASH)
    alignment = 4 if capability >= FLASH else 1
    if halves and capability >= TENSOR_CORES:
        alignment = 8
    efficient = (
        capability >= EFFICIENT
        and (halves or q.dtype is torch.float32)
        and not strided
        and head > 0
        and v.shape[-1] > 0
        and head % alignment == 0
        and v.shape[-1] % alignment == 0
    )
    return "efficient" if is_fused and efficient else "math"


def attention_for(capability: tuple[int, int]) -> Callable:
    """scaled_dot_product_attention by the kernel that a GPU of this compute capability takes."""

    def attention(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        kernel = "math"  # also of grouped queries, which nothing here uses
        if not enable_gqa:
            kernel = kernel_of(q, k, v, attn_mask, dropout_p, is_causal, capability)
        if kernel == "flash":
            head = q.shape[-1]
            more = -head % 8
            q, k, v = (F.pad(x, (0, more)) if more else x for x in (q, k, v))
            scale = scale or head**-0.5
            out = aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, scale=scale
            )[0]
            return out[..., :head] if more else out
        if kernel == "efficient":
            bias = attn_mask
            if bias is not None:
                if bias.dtype is torch.bool:
                    bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill_(~bias, float("-inf"))
                if any(stride % ALIGNMENT for stride in bias.stride()[:-1]):
                    bias = F.pad(bias, (0, -bias.shape[-1] % ALIGNMENT))[..., : bias.shape[-1]]
                bias = bias.expand(*q.shape[:3], k.shape[2])
            keeps = q.requires_grad or k.requires_grad or v.requires_grad
            return aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, keeps, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's fused kernel, which keeps a mask of one byte a value."""
    return torch.native_dropout(x, p, True)[0] if train and 0 < p < 1 and x.numel() else x


class Lstm(torch.autograd.Function):
    """cuDNN's LSTM of x (T, B, D): it keeps x, its output, cast weights, and a reserve."""

    @staticmethod
    def forward(ctx, x, h, c, layers, batch_first, train, *weights):
        steps, batch = x.transpose(0, 1).shape[:2] if batch_first else x.shape[:2]
        if batch_first:
            x.transpose(0, 1).contiguous()  # a copy that cuDNN reads
        y = x.new_empty(steps, batch, h.shape[-1] * (h.shape[0] // layers))
        kept = [x.new_empty(steps * batch * RESERVE * c.shape[0] * c.shape[-1])] if train else []
        y = y.transpose(0, 1) if batch_first else y
        ctx.save_for_backward(x, h, c, y, *weights, *kept)
        ctx.count = len(weights)
        return y, torch.empty_like(h), torch.empty_like(c)

    @staticmethod
    def backward(ctx, *gradients):
        x, h, c, _, *others = ctx.saved_tensors
        weights = others[: ctx.count]
        flat = x.new_empty(sum(weight.numel() for weight in weights))
        pieces = flat.split([weight.numel() for weight in weights])
        of_weights = [piece.view(w.shape) for piece, w in zip(pieces, weights, strict=True)]
        return *map(torch.empty_like, (x, h, c)), None, None, None, *of_weights


def lstm(x, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first):
    """The kernel of nn.LSTM, cast as CUDA's autocast does."""
    tensors = [x, *states, *weights]
    if torch.is_autocast_enabled("cpu"):
        tensors = cast(tensors, torch.get_autocast_dtype("cpu"))
    return Lstm.apply(*tensors[:3], layers, batch_first, train, *tensors[3:])


@contextlib.contextmanager
def cuda_like(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, the CPU behaves like a GPU of this compute capability where memory depends on it."""
    lists = autocast_lists()
    listed = {name: kind for kind in LISTS for name in lists[kind]}
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("aten::"):
                continue
            short = name.removeprefix("aten::")
            if short in listed:
                packet, _, overload = short.partition(".")
                operator = getattr(getattr(aten, packet), overload or "default")
                library.impl(short, under_autocast(operator, listed[short]), "AutocastCPU")
            elif torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"):
                library.impl(short, torch.library.fallthrough_kernel, "AutocastCPU")
        library.impl("scaled_dot_product_attention", attention_for(capability), "AutogradCPU")
        library.impl("dropout", dropout, "AutogradCPU")
        library.impl("lstm.input", lstm, "AutogradCPU")
        with (
            mock.patch.object(torch.Tensor, "is_cuda", True),
            mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self),
            mock.patch.object(torch, "clear_autocast_cache", cast_copies.clear),
        ):
            yield
