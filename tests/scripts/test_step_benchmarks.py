"""The benchmarks of a training step make a step with the recipes as they are now."""

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import xtts_step
from recipes import xtts_amharic as recipe
from speech.xtts import formats


@pytest.mark.parametrize("options", [(), ("checkpoint", "sdpa"), ("sdpa", "padded")], ids="-".join)
def test_a_step_of_xtts(monkeypatch, options):
    small = formats.shape(16, 1, 2, 6681, 32, code_dim=16, dvae_hidden=16, latents=4)
    monkeypatch.setitem(formats.SIZES, "full", small)
    monkeypatch.setattr(recipe, "place", recipe.place)  # restored after the padded rows
    args = SimpleNamespace(layers=1, clips=2, seconds=1.0)
    step = xtts_step.make_step(args, options, torch.device("cpu"))
    losses = [step() for _ in range(2)]
    assert all(map(math.isfinite, losses)) and losses[0] != losses[1]
