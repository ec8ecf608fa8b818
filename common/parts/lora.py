"""Low-rank adapters (LoRA, Hu et al. 2021). The weights of a model stay as they are, on the GPU in
16 bits. Beside chosen linear layers, y = W x + b, two small matrices are trained in fp32:
y = W x + b + (alpha / rank) B A x.

    attach(model, adapters, seed)              # freezes the model and adds A and B
    lower(model, torch.bfloat16)               # the frozen weights in 16 bits
    trained = checkpoint.state_of(model)       # what a checkpoint holds
    weights = merge(weights, trained, adapters)    # W + (alpha / rank) B A, in fp32

An adapted layer keeps its type and the names of its weights; `lora_A` (rank, inputs) and `lora_B`
(outputs, rank) come beside them. A hook adds their product, so code that takes the weight of a
layer past its call has to add the product itself (`layers.with_product`)."""

import hashlib
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common import checkpoint
from common.engine import Engine
from common.layers import LOWERED, product_backward, with_product

A = "lora_A"
B = "lora_B"
MOST_RANK = 4096
USUAL_RANK = 32
MOST_ALPHA = 10_000.0
RATE = 10.0  # of adapters, times that of weights that are trained whole


def is_alpha(value) -> bool:
    """Whether `alpha` may have this value, which is from a file."""
    return type(value) in (int, float) and 0.0 <= value <= MOST_ALPHA


# Of a file with adapters, for `records`.
SAVED = {
    "rank": range(1, MOST_RANK + 1),
    "alpha": is_alpha,
    "targets": str,
    "layers": [str],
    "base": str,
    "name": str,
}


@dataclass(frozen=True)
class LoraSettings:
    """`targets` names the layers that have adapters: what a family of models makes of it."""

    rank: int
    alpha: float
    targets: str

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Layers:
    """The layers of a model, by how their names begin or end."""

    adapted: list[str]  # those that have adapters
    whole: tuple[str, ...] = ()  # how the parameters begin that are trained without adapters
    # How the frozen layers end that stay in fp32, because they compute in it, or are added to
    # activations in fp32.
    kept: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()  # how those end whose weights are (inputs, outputs)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run. `base`: the `fingerprint` of the released weights at `name`."""

    settings: LoraSettings
    layers: Layers
    base: str
    name: str


class Adapted(Engine):
    """The engine of a model with adapters."""

    def place(self) -> None:
        lower(self.model, self.setup.dtype)
        super().place()

    def learning_rate(self) -> float:
        return self.args.learning_rate or rate(self.model, self.task.learning_rate)

    def groups(self) -> list[dict]:
        """Weights that are trained whole beside adapters have the rate of full fine-tuning."""
        adapters = weights_of(self.model)
        parts = []
        for group in super().groups():
            beside = [p for p in group["params"] if p in adapters]
            whole = [p for p in group["params"] if p not in adapters]
            parts.append({**group, "params": beside})
            parts.append({**group, "params": whole, "lr": self.learning_rate() / RATE})
        return [part for part in parts if part["params"]]


# --- layers ---------------------------------------------------------------------------------------


def is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, A)


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters that `attach` has added to a model, or None."""
    return getattr(model, "adapters", None)


def record_of(adapters: Adapters) -> dict:
    """The record of adapters that is saved beside their weights: a `SAVED`."""
    about = {"layers": adapters.layers.adapted, "base": adapters.base, "name": adapters.name}
    return {**asdict(adapters.settings), **about}


class _WithProduct(torch.autograd.Function):
    """`with_product`. Backward computes A x again: kept for each layer, a tensor of this size takes
    a place among the large ones that the next layer needs whole. On a CPU the holes beside it made
    a run with adapters larger than one without."""

    @staticmethod
    def forward(ctx, output, x, down, up, scale):
        ctx.save_for_backward(x, down, up)
        ctx.scale = scale
        return with_product(output, x, down, up, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, down, up = ctx.saved_tensors
        inputs = x.flatten(0, -2)
        of_x, *others = product_backward(gradient.flatten(0, -2), inputs, down, up, ctx.scale)
        return gradient, of_x.view(x.shape), *others, None


def add_product(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """A forward hook."""
    x, down, up = (each.to(output.dtype) for each in (inputs[0], layer.lora_A, layer.lora_B))
    if torch.compiler.is_compiling():  # it chooses itself what to keep
        return with_product(output, x, down, up, layer.lora_scale)
    return _WithProduct.apply(output, x, down, up, layer.lora_scale)


def attach(model: nn.Module, adapters: Adapters, seed: int) -> None:
    """Freezes `model` but for the parameters that are trained whole, and adds adapters to its
    layers. A is random and B zero, so the model computes what it did."""
    settings = adapters.settings
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(adapters.layers.whole)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    model.adapters = adapters
    model.partial = checkpoint.Partial(frozenset(frozen), record_of(adapters))
    generator = torch.Generator("cpu").manual_seed(seed)
    for name in sorted(adapters.layers.adapted):
        layer = model.get_submodule(name)
        outputs, inputs = shape_of(layer)
        down = torch.rand(settings.rank, inputs, generator=generator, device="cpu")
        down = (2 * down - 1) / math.sqrt(inputs)  # as torch initialises a linear layer
        device = layer.weight.device
        layer.register_parameter(A, nn.Parameter(down.to(device)))
        layer.register_parameter(
            B, nn.Parameter(torch.zeros(outputs, settings.rank, device=device))
        )
        layer.lora_scale = settings.scale
        layer.register_forward_hook(add_product)


def rate(model: nn.Module, learning_rate: float) -> float:
    """The peak learning rate of a run that has this one without adapters."""
    return RATE * learning_rate if adapters_of(model) else learning_rate


def weights_of(model: nn.Module) -> set[nn.Parameter]:
    """A and B of all adapters."""
    return {p for name, p in model.named_parameters() if name.rpartition(".")[2] in (A, B)}


def describe(model: nn.Module) -> str:
    """A line about the parts of a model with adapters that are trained, with counts."""
    adapters = adapters_of(model)
    counts = {"adapters": 0, "whole": 0, "frozen": 0}
    for name, parameter in model.named_parameters():
        kind = "whole" if parameter.requires_grad else "frozen"
        if name.rpartition(".")[2] in (A, B):
            kind = "adapters"
        counts[kind] += parameter.numel()
    settings = adapters.settings
    text = (
        f"adapters of rank {settings.rank} beside {len(adapters.layers.adapted)} layers"
        f" ({settings.targets}): {counts['adapters'] / 1e6:.2f} M parameters"
    )
    whole = {n.partition(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    whole &= {name.rstrip(".") for name in adapters.layers.whole}
    if whole:
        names = ", ".join(sorted(whole))
        text += f"; trained whole: {names}, {counts['whole'] / 1e6:.2f} M"
    return f"{text}; as released: {counts['frozen'] / 1e6:.1f} M"


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a layer. GPT-2's Conv1D, whose weight is transposed, is no nn.Linear."""
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, nn.Linear) else (second, first)


def lower(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Stores the frozen weights and biases of linear layers, convolutions and embeddings of a
    model with adapters as autocast's `dtype`. Without either, does nothing."""
    adapters = adapters_of(model)
    if not (adapters and dtype):
        return
    kept = adapters.layers.kept
    for name, module in model.named_modules():
        is_lowered = isinstance(module, LOWERED) or is_adapted(module)
        if is_lowered and not name.endswith(kept):
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)


# --- weights --------------------------------------------------------------------------------------


def merge(
    base: dict[str, Tensor], trained: dict[str, Tensor], adapters: Adapters
) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same: the released weights `base`,
    with the product of the adapters in `trained` added in fp32, and with what was trained whole."""
    merged = {**base, **without_adapters(trained)}
    for name in adapters.layers.adapted:
        down = trained[f"{name}.{A}"].float()
        up = trained[f"{name}.{B}"].float()
        change = adapters.settings.scale * (up @ down)
        if name.endswith(adapters.layers.transposed):
            change = change.t()
        weight = base[f"{name}.weight"].float()
        merged[f"{name}.weight"] = weight + change.to(weight.device)  # which may be "meta"
    return merged


def without_adapters(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that were trained whole."""
    return {name: t for name, t in trained.items() if name.rpartition(".")[2] not in (A, B)}


def fingerprint(base: dict[str, Tensor], layers: Layers) -> str:
    """SHA-256 of released weights, without those that are trained whole: over names, shapes and
    fp32 values, so it is the same whatever the type that a file has. Empty in a dry run, where
    tensors have no values."""
    names = [name for name in base if not name.startswith(layers.whole)]
    if any(base[name].is_meta for name in names):
        return ""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = base[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if tensor.is_floating_point():
            tensor = tensor.float()
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
