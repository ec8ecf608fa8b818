"""--lora in the recipes: what is trained, saved, merged and refused."""

import shutil
import warnings

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.whisper import formats
from recipes import whisper_vietnamese as vietnamese
from tests.recipes import adapters
from tests.recipes.runs import SHORT, newest, ran, refused, write_best
from tests.recipes.test_whisper import data_flags, released  # noqa: F401  a fixture


def data_of(spoken) -> list[str]:
    return data_flags({split: spoken[split] for split in ("train", "val")})


def test_adapters_beside_a_released_whisper(released, spoken, tmp_path):  # noqa: F811
    def in_peft(base: list, merged, folder) -> None:
        """Stock peft and transformers compute what the merged model does."""
        features = torch.randn(1, 80, 3000)
        tokens = torch.tensor([[1, 2, 3, 4]])

        def logits(model) -> torch.Tensor:
            with torch.no_grad():
                return model.eval()(features, decoder_input_ids=tokens).logits

        whisper = transformers.WhisperForConditionalGeneration
        expected = logits(whisper.from_pretrained(merged))
        model = whisper.from_pretrained(base[1])
        plain = logits(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of missing keys
            found = logits(peft.PeftModel.from_pretrained(model, folder))
        assert torch.allclose(found, expected, atol=1e-5)
        assert not torch.allclose(plain, expected, atol=1e-4)
        model = whisper.from_pretrained(base[1])
        model.load_adapter(folder)
        assert torch.equal(logits(model), found)

    data = data_of(spoken)
    base = ["--model_dir", released / "hf"]
    out = adapters.check(vietnamese, data, base, tmp_path, formats, in_peft=in_peft)
    # Queries, keys, values, outputs and two of the feed-forward layer; twice attention in a
    # decoder.
    assert "adapters of rank 3 beside 16 layers (linear): 0.00 M parameters; as released" in out


def test_a_frozen_encoder_has_no_adapters(released, spoken, tmp_path):  # noqa: F811
    data = data_of(spoken)
    flags = ["--model_dir", released / "hf", "--lora", "2", "--lora_targets", "q,v"]
    flags += ["--output_dir", tmp_path, "--freeze_encoder"]
    out = ran(vietnamese, *data, *SHORT, *flags)
    assert "adapters of rank 2 beside 4 layers (q,v)" in out
    state = newest(tmp_path, vietnamese)
    assert len(state.model) == 8 and all(name.startswith("decoder.") for name in state.model)
    ran(vietnamese, *data, *SHORT, *flags, "--resume", "auto", "--max_steps", "3")
    assert len(newest(tmp_path, vietnamese).model) == 8


def test_comparisons(released, spoken, tmp_path):  # noqa: F811
    data = data_of(spoken)
    base = ["--model_dir", released / "hf", "--output_dir", tmp_path]
    ran(vietnamese, *data, *base, *SHORT, "--lora", "2", "--learning_rate", "1e-2")
    best = tmp_path / "checkpoints" / "best.safetensors"
    compared = ["--evaluate", "--test_manifest", spoken["test"], "--compare_to", best]
    out = ran(vietnamese, *compared, *base)
    assert "compared to" in out
    status, err = refused(vietnamese, *compared, *base[2:], "--resume", best)
    assert status == 2 and "--model_dir" in err


@pytest.fixture(scope="module")
def adapted(released, spoken, tmp_path_factory):  # noqa: F811
    """The folder of a run with adapters of rank 3, exported for peft to "peft"."""
    folder = tmp_path_factory.mktemp("adapted")
    data = data_of(spoken)
    flags = ["--model_dir", released / "hf", "--lora", "3", "--output_dir", folder]
    ran(vietnamese, *data, *SHORT, *flags, "--export_adapter", folder / "peft")
    return folder


@pytest.fixture(scope="module")
def other_base(released, tmp_path_factory):  # noqa: F811
    """The same model with another value."""
    folder = shutil.copytree(released / "hf", tmp_path_factory.mktemp("other") / "hf")
    weights = load_file(folder / "model.safetensors")
    weights["model.encoder.layers.0.fc1.weight"][0, 0] += 1.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--from_scratch --resume auto --lora 4", "--model_dir"),
        ("--model_dir {base} --export_adapter {new}", "--lora"),
        ("--model_dir {other} --lora 3 --init_from {best}", "other weights"),
        ("--model_dir {base} --lora 3 --lora_alpha 100 --init_from {best}", "--lora_alpha"),
        ("--model_dir {base} --lora 8 --init_from {best}", "--lora 8"),
        ("--model_dir {base} --lora 3 --freeze_encoder --init_from {best}", "frozen"),
        ("--model_dir {other} --resume {last}", "other weights"),
        ("--resume {last}", "--model_dir"),
        ("--model_dir {base} --use_cpu_offload --resume {last}", "--use_cpu_offload"),
        ("--model_dir {base} --lora 3 --use_cpu_offload --init_from {best}", "use_cpu_offload"),
        ("--model_dir {base} --init_from {peft}", "merge_and_unload"),
    ],
)
def test_what_does_not_fit_the_adapters(
    flags, words, released, adapted, other_base, spoken, tmp_path  # noqa: F811
):  # fmt: skip
    places = {
        "base": released / "hf",
        "other": other_base,
        "best": adapted / "checkpoints" / "best.safetensors",
        "last": adapted / "checkpoints" / "checkpoint_step_00000002.pt",
        "peft": adapted / "peft",
        "new": tmp_path / "new",
    }
    data = data_of(spoken)
    flags = flags.format(**places).split()
    status, err = refused(vietnamese, *data, *SHORT, *flags, "--output_dir", tmp_path / "run")
    assert status == 2 and words in err


def test_damaged_adapters(released, adapted, tmp_path):  # noqa: F811
    use = ["--model_dir", released / "hf", "--export", tmp_path / "out", "--output_dir", tmp_path]
    best = adapted / "checkpoints" / "best.safetensors"
    weights = load_file(best)
    largest = {name: torch.full_like(tensor, 1e30) for name, tensor in weights.items()}
    write_best(tmp_path / "best.safetensors", best, largest)
    status, err = refused(vietnamese, *use, "--adapter", tmp_path / "best.safetensors")
    assert status == 2 and "values that are not finite" in err
    weights.pop(next(name for name in weights if name.endswith("lora_A")))
    write_best(tmp_path / "best.safetensors", best, weights)
    status, err = refused(vietnamese, *use, "--resume", tmp_path / "best.safetensors")
    assert status == 2 and "lacks" in err
