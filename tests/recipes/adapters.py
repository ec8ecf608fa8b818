"""What --lora promises, for the tests of each recipe that has it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import peft
import torch
from safetensors.torch import load_file

from common import layers, memory
from common.parts import lora
from tests.peers import assert_rounded
from tests.recipes.runs import newest, ran, refused

STEPS = "--batch_size 2 --gradient_accumulation_steps 1 --log_every 1 --save_every 2".split()
STEPS += ["--lr_schedule", "constant", "--learning_rate", "1e-2"]


def check(
    recipe,
    data: list,
    base: list,
    folder: Path,
    formats: ModuleType,
    transposed: tuple = (),
    in_peft: Callable[[list, Path, Path], None] | None = None,
) -> str:
    """Trains adapters of `recipe` on `data` beside the released weights that the flags `base` name,
    in `folder`, and checks what is saved, resumed, merged and refused. `formats`: those of the
    family. `in_peft(base, merged, adapters)` compares folders in peft. Returns the stdout of the
    training."""

    def read(place: Path) -> dict:
        weights = formats.read_model(place)[0]
        return weights.get("gpt", weights)

    flags = [*data, *base, *STEPS, "--lora", "3"]
    whole = folder / "whole"
    exported = whole / "exported"
    out = ran(recipe, *flags, "--max_steps", "4", "--output_dir", whole, "--export", exported)
    state = newest(whole, recipe)
    assert state.adapters["rank"] == 3
    assert state.adapters["alpha"] == 6.0
    assert len(state.adapters["base"]) == 64
    check_resumed(recipe, flags, folder, state)
    best = whole / "checkpoints" / "best.safetensors"
    check_merged(load_file(best), read(Path(base[-1])), read(exported), transposed)
    last = ["--resume", state.path, "--output_dir", folder / "used"]
    ran(recipe, *last, "--export", folder / "last", *base)
    assert all(tensor.any() for name, tensor in state.model.items() if name.endswith(lora.B))
    check_merged(state.model, read(Path(base[-1])), read(folder / "last"), transposed)
    if in_peft is not None:
        adapter = folder / "peft"
        out_of_export = ran(recipe, *last, "--export_adapter", adapter)
        assert "adapters exported to" in out_of_export
        assert "adapter_model.safetensors" in out_of_export
        in_peft(base, folder / "last", adapter)
    status, err = refused(recipe, *last, "--export", folder / "third")
    assert status == 2 and "--model_dir" in err and Path(base[-1]).name in err
    status, err = refused(recipe, *last, "--export", folder / "third", base[0], folder / "last")
    assert status == 2 and "has adapters for" in err and "other weights" in err
    return out


def check_peft(kind: type, base: list, merged: Path, adapter: Path) -> None:
    """That stock peft makes the merged weights, too. `kind`: the network's class in
    transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing keys
        model = peft.PeftModel.from_pretrained(kind.from_pretrained(base[1]), adapter)
    found = model.merge_and_unload().state_dict()
    for name, tensor in kind.from_pretrained(merged).state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name


def check_resumed(recipe, flags: list, folder: Path, whole) -> None:
    """A run that is stopped after two updates ends with the same bits."""
    parts = [*flags, "--output_dir", folder / "parts"]
    ran(recipe, *parts, "--max_steps", "2")
    ran(recipe, *parts, "--max_steps", "4", "--resume", "auto")
    state = newest(folder / "parts", recipe)
    assert state.model.keys() == whole.model.keys()
    assert all(torch.equal(state.model[name], whole.model[name]) for name in whole.model)
    for name, states in whole.state["optimizer"].items():
        for key, tensor in states.items():
            assert torch.equal(tensor, state.state["optimizer"][name][key])


def check_merged(trained: dict, base: dict, merged: dict, transposed: tuple) -> None:
    """Weights with an adapter have its product, those that were trained whole their values, and all
    others are the released ones."""
    adapted = [name.removesuffix(".lora_A") for name in trained if name.endswith(".lora_A")]
    assert adapted
    for name, weight in merged.items():
        layer = name.removesuffix(".weight")
        if name == f"{layer}.weight" and layer in adapted:
            down, up = trained[f"{layer}.{lora.A}"], trained[f"{layer}.{lora.B}"]
            change = 2.0 * (up @ down)
            expected = base[name] + (change.t() if layer.endswith(transposed) else change)
            assert torch.allclose(weight, expected, atol=1e-6), name
        else:
            expected = trained[name] if name in trained else base[name]
            assert torch.equal(weight, expected.to(weight.dtype)), name


def beside(model: torch.nn.Module, layers: lora.Layers) -> torch.nn.Module:
    """The model with adapters that are not zero, in its type."""
    dtype = next(model.parameters()).dtype
    settings = lora.LoraSettings(2, 4.0, "linear")
    lora.attach(model, lora.Adapters(settings, layers, "", ""), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name in layers.adapted:
        layer = model.get_submodule(name)
        torch.nn.init.normal_(layer.lora_B, std=0.1, generator=generator)
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.to(dtype), layer.lora_B.to(dtype)
    return model


def check_exact(
    make: Callable[[], torch.nn.Module],
    train_on: Callable[[torch.nn.Module, list[int]], object],
    cuts: tuple[list[int], ...],
    checkpointed: tuple[type, ...],
    monkeypatch,
) -> None:
    """Every adapter of the model that `make` returns has a gradient, and no frozen weight; the
    gradient depends neither on how a global batch is cut, as in `cuts`, nor on lean chains, nor on
    checkpointing. `train_on(model, sizes)` runs micro-batches of these sizes."""

    def gradients(model: torch.nn.Module, sizes: list[int]) -> list[torch.Tensor]:
        model.zero_grad()
        train_on(model, sizes)
        for name, p in model.named_parameters():
            assert (p.grad is not None) == p.requires_grad, name
            assert p.grad is None or p.grad.any() or name.endswith(".bias"), name
        return [p.grad for p in model.parameters() if p.grad is not None]

    count = sum(cuts[0])
    whole = gradients(make(), [count])
    for sizes in cuts:
        for a, b in zip(gradients(make(), sizes), whole, strict=True):
            assert (a - b).norm() <= 1e-9 * b.norm() + 1e-15
    monkeypatch.setattr(layers, "SMALL", 1)
    lean = gradients(make(), [count])
    assert_rounded(lean, whole)
    model = make()
    memory.checkpoint_layers(model, checkpointed)
    again = gradients(model, [count])
    assert all(torch.equal(a, b) for a, b in zip(again, lean, strict=True))
