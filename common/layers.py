"""Parts of networks: precision inside a model, and chains of layers that keep little for
backward."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.errors import UsageError

# Layers whose weights autocast casts. Norms and recurrent layers stay in fp32.
LOWERED = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d)
SMALL = 1 << 19  # elements of an input for which `lean_chain` recomputes nothing
# The activations of `lean_chain`, with their gradients.
ACTIVATIONS = {
    F.gelu: torch.ops.aten.gelu_backward.default,
    F.silu: torch.ops.aten.silu_backward.default,
}
LARGEST = 1e20  # of a layer's values; a spectrum of the loudest audio has 1e15
EACH = 6  # tensors of a layer in `_LeanChain`
NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


@contextlib.contextmanager
def finite_layers() -> Iterator[None]:
    """Within it a layer that returns NaN, infinity or more than LARGEST when it is used first is an
    error: what is decoded of such values looks like text or speech. Raises `UsageError`."""
    seen = set()

    def check(layer: torch.nn.Module, inputs: tuple, output) -> None:
        if layer in seen or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        seen.add(layer)
        if output.numel() and not float(output.detach().abs().max()) < LARGEST:
            raise UsageError(
                f"the model's values are not finite (in a layer {type(layer).__name__}): its"
                " weights are damaged or not for this network, or 16 bits are too few: try"
                " --no_mixed_precision"
            )

    hook = torch.nn.modules.module.register_module_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def quieten_branches(layers: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Divides the last layer of every residual branch in `layers` by the root of the number of
    branches and sets its bias to zero (GPT-2's initialisation). `names`: how the names of these
    layers end. Otherwise many random layers drown the input in constants, and a decoder learns to
    guess sentences long before it listens: Konkani's demo needs 100 updates instead of 400 until
    the CTC loss is below 1."""
    branches = [module for name, module in layers.named_modules() if name.endswith(names)]
    for module in branches:
        module.weight /= math.sqrt(len(branches))
        if module.bias is not None:
            module.bias.zero_()


def downcast(x: Tensor) -> Tensor:
    """`x` in autocast's type if autocast is on: layers with the same input share one copy."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def lean_chain(x: Tensor, *steps: Callable) -> Tensor:
    """The result of `steps` on `x` (..., D): linear layers, each after a LayerNorm, an activation,
    or both in this order.

    Backward keeps `x` and what the linear layers return, and computes norms and activations again,
    which is cheap. Values and gradients stay the same but for rounding; under autocast norms are in
    fp32, as on CUDA. The steps run one by one in evaluation, under torch.compile, which chooses
    itself what to keep, and for small inputs, for which launching the kernels from Python would
    take longer than the kernels."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or x.numel() < SMALL:
        for step in steps:
            x = step(x)
        return x
    parts = []
    tensors = []
    norm = None
    activation = None
    for step in steps:
        if isinstance(step, torch.nn.LayerNorm):
            norm = step
        elif isinstance(step, torch.nn.Linear):
            parts.append((norm, activation, getattr(step, "lora_scale", None)))
            tensors.append(downcast(step.weight))
            tensors.append(None if step.bias is None else downcast(step.bias))
            tensors.append(norm and norm.weight)
            tensors.append(norm and norm.bias)
            is_adapted = hasattr(step, "lora_A")
            tensors += [downcast(step.lora_A), downcast(step.lora_B)] if is_adapted else [None] * 2
            norm = None
            activation = None
        else:
            activation = step
    return _LeanChain.apply(parts, x, *tensors)


class _LeanChain(torch.autograd.Function):
    """`parts`: the norm and the activation, or None, before each linear layer, and the scale of its
    adapter. `tensors`: weight and bias of each linear layer, those of the norm before it, and its
    adapter's (`common/parts/lora.py`)."""

    @staticmethod
    def forward(ctx, parts, x, *tensors):
        kept = []
        ctx.parts = []
        layers = zip(*(tensors[number::EACH] for number in range(EACH)), strict=True)
        for (norm, activation, scale), layer in zip(parts, layers, strict=True):
            weight, bias, _, _, down, up = layer
            kept += [x, weight, down, up]
            ctx.parts.append((norm, activation, scale, bias is not None))
            inputs = _prepare(x, norm, activation)[0].to(weight.dtype)
            x = F.linear(inputs, weight, bias)
            if down is not None:
                x = with_product(x, inputs, down, up, scale)
        ctx.save_for_backward(*kept)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        gradients = []
        for number in reversed(range(len(ctx.parts))):
            norm, activation, scale, has_bias = ctx.parts[number]
            x, weight, down, up = kept[4 * number : 4 * number + 4]
            of_weight, of_bias, of_scale, of_shift, of_down, of_up = [None] * EACH
            needs_weight, *_ = needed[EACH * number :]
            y, normed, *norm_inputs = _prepare(x, norm, activation)
            gradient = gradient.flatten(0, -2)
            y = y.to(weight.dtype).flatten(0, -2)
            if needs_weight:
                of_weight = gradient.t() @ y
            if has_bias and needed[EACH * number + 1]:
                of_bias = gradient.sum(0)
            of_input = None
            if down is not None:
                of_input, of_down, of_up = product_backward(gradient, y, down, up, scale)
                of_input = of_input.view(x.shape).to(normed.dtype)
            del y  # before its gradient, which is as large
            gradient = (gradient @ weight).view(x.shape).to(normed.dtype)
            if of_input is not None:
                gradient = gradient + of_input
            if activation:
                gradient = ACTIVATIONS[activation](gradient, normed)
            if norm:
                mask = [True, *needed[EACH * number + 2 : EACH * number + 4]]
                gradient, of_scale, of_shift = NORM_BACKWARD(
                    gradient, *norm_inputs, norm.weight, norm.bias, mask
                )
            gradient = gradient.to(x.dtype)
            gradients = [of_weight, of_bias, of_scale, of_shift, of_down, of_up, *gradients]
        return None, gradient, *gradients


def _prepare(x: Tensor, norm: torch.nn.LayerNorm | None, activation: Callable | None) -> tuple:
    """The input of a linear layer, that of the activation, and what the norm's gradient needs."""
    normed = x
    statistics = []
    if norm:
        x = x.to(norm.weight.dtype)
        normed, *statistics = torch.native_layer_norm(
            x, norm.normalized_shape, norm.weight, norm.bias, norm.eps
        )
    y = activation(normed) if activation else normed
    return y, normed, x, x.shape[-1:], *statistics


def with_product(output: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The `output` (..., outputs) of a layer for `x` (..., inputs) and what its adapter adds."""
    low = F.linear(x, down).flatten(0, -2)
    return torch.addmm(output.flatten(0, -2), low, up.t(), alpha=scale).view(output.shape)


def product_backward(
    gradient: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x` (N, inputs), A and B for the `gradient` (N, outputs) of the product."""
    scaled = gradient * scale
    of_up = scaled.t() @ F.linear(x, down)
    scaled = scaled @ up
    return scaled @ down, scaled.t() @ x, of_up
