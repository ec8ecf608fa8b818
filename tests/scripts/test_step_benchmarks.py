"""The benchmark of a training step makes a step of every row with the recipes as they are now."""

import argparse
import json
import math
import sys

import pytest

from benchmarks import step
from models.whisper import formats as whisper_formats
from models.xtts import formats

SMALL = {
    "konkani": {"size": "minimal", "clips": 1, "seconds": 1.0, "characters": 5},
    "whisper": {"size": "tiny", "clips": 2, "shortest": 0.5, "seconds": 1.0},
    "parakeet": {"layers": 1, "width": 128, "vocabulary": 64, "clips": 2, "seconds": 1.0},
    "matcha": {"size": "demo", "clips": 2, "seconds": 1.0},
    "xtts": {"layers": 1, "clips": 2, "seconds": 1.0},
}
SMALL_XTTS = formats.make_config(
    16, 1, 2, text_tokens=6681, codes=32, code_dim=16, dvae_hidden=16, latents=4
)
ROWS = [
    *(("konkani", row) for row in ("baseline", "ours")),
    ("matcha", "ours"),
    ("matcha", "without the alignment search"),
    ("parakeet", "transformers"),
    ("parakeet", "ours, gradient checkpointing"),
    ("whisper", "transformers, 30 s"),
    ("whisper", "ours, in two micro-batches"),
    ("xtts", "baseline"),
    ("xtts", "+ gradient checkpointing"),
    ("xtts", "SDPA, padded rows"),
]


def arguments(recipe: str) -> argparse.Namespace:
    words = [recipe, "--steps", "1", "--threads", "1"]
    for flag, value in SMALL[recipe].items():
        words += [f"--{flag}", str(value)]
    return step.make_parser().parse_args(words)


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    tiny = whisper_formats.SIZES["tiny"]
    width = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    monkeypatch.setitem(whisper_formats.SIZES, "tiny", {**tiny, **width, **heads})
    monkeypatch.setattr(formats, "RELEASED", SMALL_XTTS)
    search = step.matcha_voice.alignment.search
    monkeypatch.setattr(step.matcha_voice.alignment, "search", search)
    monkeypatch.setattr(step.xtts_amharic, "place", step.xtts_amharic.place)  # restored afterwards


@pytest.mark.parametrize(("recipe", "row"), ROWS)
def test_a_step_of_each_recipe_and_its_peer(capsys, recipe, row):
    step.measure(arguments(recipe), row)
    result = json.loads(capsys.readouterr().out)
    assert math.isfinite(result["loss"]) and result["trained"] > 0
    assert len(result["seconds"]) == len(result["processor"]) == 1


def test_a_table_has_ratios_to_the_first_row_and_names_a_loss_that_differs(capsys, monkeypatch):
    base = {"seconds": [2.0, 4.0], "processor": [6.0], "bytes": 2**30, "trained": 1e6, "loss": 3.0}
    ours = {**base, "seconds": [1.0], "processor": [2.0], "bytes": 2**29, "loss": 3.1}
    found = {"transformers": [base, base], "ours": [ours], "ours, 8-bit AdamW": []}
    assert step.print_table(arguments("parakeet"), found) == ["ours"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "| ours | 1.0 M | 1.00 | 2.00 | 0.50 | 3.00 | 3.00 | 0.50 | 3.100000 |"
    assert lines[4] == "| ours, 8-bit AdamW | does not fit |"


def test_a_row_that_fails_has_no_result(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", "raise SystemExit(1)"])
    args = step.make_parser().parse_args(["konkani", "--runs", "1"])
    assert step.run_rows(args) == {"baseline": [], "ours": []}
