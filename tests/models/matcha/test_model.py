"""Matcha-TTS's network against a second one of single utterances, and what it does to padding."""

import pytest
import torch
from torch import nn

from models.matcha.model import SIZES, Matcha, SnakeLayer
from tests.models.matcha import plain

DEMO = {**SIZES["demo"], "symbols": 20, "speakers": 1}


def random_model(speakers: int = 1) -> Matcha:
    """A small model in which every tensor has random values."""
    torch.manual_seed(0)
    model = Matcha({**DEMO, "speakers": speakers}).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.05, 0.2)
    return model


@pytest.mark.parametrize(
    "size, speakers, count",
    [("full", 1, 18_204_193), ("full", 109, 20_857_569), ("large", 1, 50_446_625)],
)
def test_the_parameters_of_the_released_models(size, speakers, count):
    with torch.device("meta"):
        model = Matcha({**SIZES[size], "symbols": 178, "speakers": speakers})
    assert sum(p.numel() for p in model.parameters()) == count
    # 11.01 M of them are the decoder's, of the author's larger one 43.25 M.
    decoder = sum(p.numel() for p in model.decoder.parameters())
    assert size == "full" or round(decoder / 1e6, 2) == 43.25


@pytest.mark.parametrize("speakers", [1, 3])
@torch.no_grad()
def test_padded_utterances_are_those_of_a_second_implementation(speakers):
    model = random_model(speakers)
    weights = model.state_dict()
    lengths = torch.tensor([9, 5])
    tokens = torch.randint(0, 20, (2, 9))
    speaker = torch.tensor([speakers - 1, 0])
    means, log_frames, vectors = model.encode(tokens, lengths, speaker)
    frames = torch.tensor([14, 6])
    noisy, mean_frames = torch.randn(2, 2, 14, 80, dtype=torch.float64)
    time = torch.rand(2, dtype=torch.float64)
    velocity = model.velocity(noisy, mean_frames, time, frames, vectors)
    for row, (length, count) in enumerate(zip(lengths.tolist(), frames.tolist(), strict=True)):
        vector = None if vectors is None else vectors[row]
        expected = plain.encoder(weights, DEMO, tokens[row, :length], vector)
        torch.testing.assert_close(means[row, :length].t(), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(log_frames[row, :length], expected[1], rtol=0, atol=1e-5)
        x = [noisy[row, :count].t(), mean_frames[row, :count].t()]
        if vector is not None:
            x.append(vector[:, None].expand(-1, count))
        expected = plain.velocity(weights, DEMO, torch.cat(x), float(time[row]))
        torch.testing.assert_close(velocity[row, :count].t(), expected, rtol=0, atol=1e-5)


def test_the_snake_keeps_what_its_linear_layer_returns_and_no_copies_in_fp32():
    torch.manual_seed(0)
    layer = SnakeLayer(8, 32)
    x = torch.randn(2, 5, 8)
    kept = []

    def pack(tensor):
        kept.append((tensor.numel(), tensor.dtype))
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert (2 * 5 * 32, torch.float32) not in kept

    def gradients(run) -> list[torch.Tensor]:
        return torch.autograd.grad(run(x).square().sum(), list(layer.parameters()))

    plain = gradients(lambda x: layer.snake(layer.proj(x)))
    assert all(map(torch.equal, gradients(layer), plain))
