"""Low-rank adapters (LoRA, Hu et al. 2021). The weights of a model stay as they are, on the GPU in
16 bits. Beside chosen linear layers, y = W x + b, two small matrices are trained in fp32:
y = W x + b + (alpha / rank) B A x.

    attach(model, layers, settings, seed)      # freezes the model and adds A and B
    lower(model, torch.bfloat16)               # the frozen weights in 16 bits
    trained = trained_state(model)             # what a checkpoint holds
    weights = merge(weights, trained, settings)    # W + (alpha / rank) B A, in fp32

An adapted layer keeps its type and the names of its weights; `lora_A` (rank, inputs) and `lora_B`
(outputs, rank) come beside them. A hook adds their product, so code that takes the weight of a
layer past its call has to add `product` itself."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

A = "lora_A"
B = "lora_B"
# What is kept in 16 bits where it is frozen. Norms and recurrent layers stay in fp32.
LOWERED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Settings:
    """`targets` names the layers that have adapters: what a family of models makes of it."""

    rank: int
    alpha: float
    targets: str

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


# --- layers ---------------------------------------------------------------------------------------


def is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, A)


def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """(..., outputs) what the adapter of a layer adds for the input `x` (..., inputs)."""
    return F.linear(F.linear(x, layer.lora_A), layer.lora_B) * layer.lora_scale


def add_product(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return output + product(layer, inputs[0])


def attach(
    model: nn.Module,
    layers: Sequence[str],
    settings: Settings,
    seed: int,
    whole: Iterable[str] = (),
) -> None:
    """Freezes `model` and adds an adapter to each of its `layers`, by their names. A is random and B
    zero, so the model computes what it did. Parameters whose name begins with one of `whole` are
    trained as they are."""
    whole = tuple(whole)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(whole) if whole else False
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(layers):
        layer = model.get_submodule(name)
        outputs, inputs = shape_of(layer)
        # As torch initialises a linear layer.
        first = torch.rand(settings.rank, inputs, generator=generator, device="cpu")
        first = (2 * first - 1) / math.sqrt(inputs)
        device = layer.weight.device
        layer.register_parameter(A, nn.Parameter(first.to(device)))
        layer.register_parameter(
            B, nn.Parameter(torch.zeros(outputs, settings.rank, device=device))
        )
        layer.lora_scale = settings.scale
        layer.register_forward_hook(add_product)


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a layer. GPT-2's Conv1D, whose weight is transposed, is no nn.Linear."""
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, nn.Linear) else (second, first)


def lower(model: nn.Module, dtype: torch.dtype, kept: Iterable[str] = ()) -> None:
    """Stores the frozen weights and biases of linear layers, convolutions and embeddings as `dtype`,
    which autocast would cast them to. `kept`: how the names of those end that are added to
    activations in fp32, such as learned positions."""
    kept = tuple(kept)
    for name, module in model.named_modules():
        if not isinstance(module, LOWERED) and not is_adapted(module):
            continue
        if kept and name.endswith(kept):
            continue
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


# --- weights --------------------------------------------------------------------------------------


def trained_state(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the `state` of a model what training changes: trained parameters, and buffers."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def merge(
    weights: dict[str, torch.Tensor],
    trained: dict[str, torch.Tensor],
    settings: Settings,
    transposed: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """The weights of a model without adapters that computes the same: of the released `weights`,
    those that have an adapter in `trained` with its product, in fp32, and those that `trained` has
    itself. `transposed`: how the names of layers end whose weights are (inputs, outputs)."""
    merged = {**weights}
    for name, tensor in trained.items():
        layer, _, part = name.rpartition(".")
        if part == B:
            continue
        if part != A:
            merged[name] = tensor
            continue
        weight = weights[f"{layer}.weight"].float()
        change = settings.scale * (trained[f"{layer}.{B}"].float() @ tensor.float())
        if transposed and layer.endswith(transposed):
            change = change.t()
        merged[f"{layer}.weight"] = weight + change
    return merged


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes and fp32 values: the same whatever the type that a file has."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if tensor.is_floating_point():
            tensor = tensor.float()
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
