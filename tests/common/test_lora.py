"""Low-rank adapters: what they compute, train and save."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from common import checkpoint
from common.parts import lora
from models.xtts.model import Conv1D

SETTINGS = lora.LoraSettings(3, 6.0, "linear")
LAYERS = lora.Layers(["first", "second"], kept=("embed_positions", "embed"), transposed=("second",))
ADAPTERS = lora.Adapters(SETTINGS, LAYERS, base="", name="")
WHOLE = replace(ADAPTERS, layers=replace(LAYERS, whole=("head.",)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.embed_positions = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.first = nn.Linear(8, 12)
        self.second = Conv1D(12, 12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens) + self.embed_positions.weight[: tokens.shape[1]])
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.second(torch.tanh(self.first(x))))


TOKENS = torch.arange(10).view(2, 5)


def make(adapters: lora.Adapters = ADAPTERS) -> Network:
    torch.manual_seed(0)
    model = Network()
    lora.attach(model, adapters, seed=1)
    return model


def move(model: Network) -> Network:
    """The adapters are no longer zero."""
    torch.manual_seed(5)
    for name in LAYERS.adapted:
        nn.init.normal_(model.get_submodule(name).lora_B)
    return model


def test_a_new_adapter_changes_nothing_and_only_adapters_are_trained():
    torch.manual_seed(0)
    before = Network().requires_grad_(False)  # or its convolution might have another kernel
    model = make()
    assert torch.equal(model(TOKENS), before(TOKENS))
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "first.lora_A": 3 * 8,
        "first.lora_B": 12 * 3,
        "second.lora_A": 3 * 12,
        "second.lora_B": 12 * 3,
    }
    assert before.state_dict().keys() == model.state_dict().keys() - trained.keys()
    again = make()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_adapter_keeps_its_input_alone_and_has_the_gradients_of_its_formula(autocast):
    model = move(make())
    layer = model.first
    batch = torch.randn(2, 9, 8)
    kept = []

    def results(run) -> list[torch.Tensor]:
        x = batch.clone().requires_grad_()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y = run(x)
        y.float().square().sum().backward()
        found = [y, x.grad, layer.lora_A.grad, layer.lora_B.grad]
        layer.lora_A.grad = layer.lora_B.grad = None
        return found

    def formula(x: torch.Tensor) -> torch.Tensor:
        plain = nn.functional.linear(x, layer.weight, layer.bias)
        low = nn.functional.linear(x, layer.lora_A)
        return plain + 2.0 * nn.functional.linear(low, layer.lora_B)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if 2 * 9 in (tensor.numel() // tensor.shape[-1], tensor.shape[0]):
            kept.append(tensor.shape[-1])
        return tensor

    wanted = results(formula)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = results(layer)
    assert set(kept) <= {8, 12}  # no (..., rank)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        difference = (a - b).detach().abs().max() / b.detach().abs().max()
        assert difference < (2e-2 if autocast else 1e-6)


def test_merged_weights_compute_the_same():
    model = move(make(WHOLE))
    nn.init.normal_(model.head.weight)
    torch.manual_seed(0)
    released = Network().state_dict()
    trained = checkpoint.state_of(model)
    assert sorted(trained) == [
        "first.lora_A", "first.lora_B", "head.weight", "second.lora_A", "second.lora_B",
    ]  # fmt: skip
    merged = Network()
    merged.load_state_dict(lora.merge(released, trained, WHOLE))
    assert torch.allclose(merged(TOKENS), model(TOKENS), atol=1e-5)
    assert checkpoint.state_of(merged).keys() == merged.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_base_is_what_autocast_makes_of_an_fp32_one(dtype):
    results = []
    for low in (False, True):
        model = move(make(WHOLE))
        if low:
            lora.lower(model, dtype)
        with torch.autocast("cpu", dtype):
            y = model(TOKENS)
        y.float().square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    types = {name: p.dtype for name, p in model.named_parameters()}
    for name in ("conv", "first", "second"):
        assert types.pop(f"{name}.weight") == types.pop(f"{name}.bias") == dtype
    assert set(types.values()) == {torch.float32}  # norm, positions, and all that is trained


def test_the_fingerprint_is_that_of_the_values_that_stay():
    def of(weights: dict, layers: lora.Layers = LAYERS) -> str:
        return lora.fingerprint(weights, layers)

    weights = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(2, dtype=torch.long)}
    first = of(weights)
    assert len(first) == 64 and first == of({"a": weights["a"], "b": weights["b"].half()})
    others = [
        {**weights, "b": weights["b"].view(3, 2)},
        {**weights, "b": weights["b"] + 1},
        {"c": weights["b"], "a": weights["a"]},
    ]
    assert first not in map(of, others)
    assert first == of({**weights, "head.weight": weights["b"]}, WHOLE.layers)
    assert not of({"b": torch.empty(2, device="meta")})
