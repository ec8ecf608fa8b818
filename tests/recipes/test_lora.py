"""--lora in the recipes: what is trained, saved, merged and refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from common import lora
from recipes import whisper_vietnamese as vietnamese
from speech.whisper import formats
from tests.recipes.runs import newest, ran, refused
from tests.recipes.test_whisper import data_flags, released  # noqa: F401  a fixture

STEPS = (
    "--batch_size 2 --gradient_accumulation_steps 2 --log_every 1 --save_every 2 --lora 3".split()
)


@pytest.fixture(scope="module")
def base(released):  # noqa: F811
    return released / "hf"


@pytest.fixture(scope="module")
def trained(base, spoken, tmp_path_factory):
    """The folder and the stdout of a run of four updates."""
    folder = tmp_path_factory.mktemp("adapters")
    flags = [*data_flags(spoken), *STEPS, "--model_dir", base, "--max_steps", "4"]
    out = ran(vietnamese, *flags, "--output_dir", folder, "--export", folder / "exported")
    return folder, out


def test_adapters_are_trained_and_saved_alone(trained, base):
    folder, out = trained
    assert "adapters of rank 3 beside 16 layers (linear): 0.00 M parameters" in out
    state = newest(folder, vietnamese)
    assert all(name.endswith(("lora_A", "lora_B")) for name in state.model)
    assert len(state.model) == 2 * 16 and state.lora["rank"] == 3 and state.lora["alpha"] == 6.0
    weights = formats.read_model(base)[0]
    assert state.lora["name"] == "hf"
    assert state.lora["base"] == lora.fingerprint(weights, lora.Layers([]))
    assert all(tensor.abs().sum() > 0 for tensor in state.model.values())
    with safe_open(folder / "checkpoints" / "best.safetensors", "pt") as file:
        assert json.loads(file.metadata()["lora"]) == state.lora


def test_a_resumed_run_ends_with_the_same_bits(trained, base, spoken, tmp_path):
    flags = [*data_flags(spoken), *STEPS, "--model_dir", base, "--output_dir", tmp_path]
    ran(vietnamese, *flags, "--max_steps", "2", "--lr_schedule", "constant")
    out = ran(
        vietnamese, *flags, "--max_steps", "4", "--resume", "auto", "--lr_schedule", "constant"
    )
    assert "resuming from" in out
    flags[-1] = tmp_path / "whole"
    ran(vietnamese, *flags, "--max_steps", "4", "--lr_schedule", "constant")
    once, twice = newest(tmp_path / "whole", vietnamese), newest(tmp_path, vietnamese)
    assert once.model.keys() == twice.model.keys()
    assert all(torch.equal(once.model[name], twice.model[name]) for name in once.model)


def test_an_export_has_the_merged_weights(trained, base, tmp_path):
    folder, _ = trained
    best = folder / "checkpoints" / "best.safetensors"
    adapters, released_weights = load_file(best), formats.read_model(base)[0]
    exported = formats.read_model(folder / "exported")[0]
    changed = 0
    for name, weight in released_weights.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A" in adapters:
            product = adapters[f"{layer}.lora_B"] @ adapters[f"{layer}.lora_A"]
            assert torch.allclose(exported[name], weight + 2.0 * product, atol=1e-7)
            changed += not torch.equal(exported[name], weight)
        else:
            assert torch.equal(exported[name], weight), name
    assert changed == 16
    again = ["--resume", best, "--model_dir", base, "--output_dir", tmp_path]
    ran(vietnamese, *again, "--export", tmp_path / "again")
    for name, weight in formats.read_model(tmp_path / "again")[0].items():
        assert torch.equal(weight, exported[name])


def test_weights_are_used_with_their_base(trained, base, spoken, tmp_path):
    folder, at_the_end = trained
    best = folder / "checkpoints" / "best.safetensors"
    use = ["--evaluate", "--test_manifest", spoken["test"], "--output_dir", tmp_path]
    out = ran(vietnamese, *use, "--resume", best, "--model_dir", base)

    def rates(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("WER", "CER"))]

    assert rates(out) and rates(out) == rates(at_the_end)
    status, err = refused(vietnamese, *use, "--resume", best)
    assert status == 2 and "--model_dir" in err and "hf" in err
    status, err = refused(vietnamese, *use, "--resume", best, "--model_dir", folder / "exported")
    assert status == 2 and "has adapters for hf" in err and "other weights" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lora 4 --from_scratch", "--lora"),
        ("--lora 4 --model_dir {base} --sharded", "--sharded"),
        ("--lora 4 --model_dir {base} --use_cpu_offload", "--use_cpu_offload"),
        ("--lora_alpha 3 --model_dir {base}", "--lora"),
        ("--lora 0 --model_dir {base}", "--lora"),
        ("--lora 4 --transcribe a.wav --model_dir {base}", "--lora"),
        ("--lora 4 --resume {best} --model_dir {base}", "--init_from"),
    ],
)
def test_what_does_not_go_together(flags, words, base, trained, spoken, tmp_path):
    best = trained[0] / "checkpoints" / "best.safetensors"
    flags = flags.format(base=base, best=best).split()
    status, err = refused(vietnamese, *data_flags(spoken)[:2], *flags, "--output_dir", tmp_path)
    assert status == 2 and words in err
