"""--lora in the recipes: what is trained, saved, merged and refused."""

import warnings

import peft
import pytest
import torch
import transformers

from recipes import whisper_vietnamese as vietnamese
from speech.whisper import formats
from tests.recipes import adapters
from tests.recipes.runs import SHORT, newest, ran, refused
from tests.recipes.test_whisper import data_flags, released  # noqa: F401  a fixture


def test_adapters_beside_a_released_whisper(released, spoken, tmp_path):  # noqa: F811
    def read(folder) -> dict:
        return formats.read_model(folder)[0]

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

    data = data_flags({split: spoken[split] for split in ("train", "val")})
    out = adapters.check(
        vietnamese, data, ["--model_dir", released / "hf"], tmp_path, read, peft=in_peft
    )
    # Queries, keys, values, outputs and two of the feed-forward layer; twice attention in a decoder.
    assert "adapters of rank 3 beside 16 layers (linear): 0.00 M parameters; as released" in out


def test_a_frozen_encoder_has_no_adapters(released, spoken, tmp_path):  # noqa: F811
    data = data_flags({split: spoken[split] for split in ("train", "val")})
    flags = ["--model_dir", released / "hf", "--lora", "2", "--lora_targets", "q,v"]
    flags += ["--output_dir", tmp_path, "--freeze_encoder"]
    out = ran(vietnamese, *data, *SHORT, *flags)
    assert "adapters of rank 2 beside 4 layers (q,v)" in out
    state = newest(tmp_path, vietnamese)
    assert len(state.model) == 8 and all(name.startswith("decoder.") for name in state.model)
    ran(vietnamese, *data, *SHORT, *flags, "--resume", "auto", "--max_steps", "3")
    assert len(newest(tmp_path, vietnamese).model) == 8


def test_averages_and_comparisons(released, spoken, tmp_path):  # noqa: F811
    data = data_flags({split: spoken[split] for split in ("train", "val")})
    base = ["--model_dir", released / "hf", "--output_dir", tmp_path]
    steps = [*SHORT, "--save_every", "1", "--average_checkpoints", "2"]
    out = ran(vietnamese, *data, *base, *steps, "--lora", "2", "--learning_rate", "1e-2")
    assert "average of the checkpoints of steps 2, 1" in out
    best = tmp_path / "checkpoints" / "best.safetensors"
    compared = ["--evaluate", "--test_manifest", spoken["test"], "--compare_to", best]
    out = ran(vietnamese, *compared, *base)
    assert "compared to" in out
    status, err = refused(vietnamese, *compared, *base[2:], "--resume", best)
    assert status == 2 and "--model_dir" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lora 4 --from_scratch", "--lora"),
        ("--lora 4 --model_dir {base} --sharded", "--sharded"),
        ("--lora 4 --model_dir {base} --use_cpu_offload", "--use_cpu_offload"),
        ("--lora_alpha 3 --model_dir {base}", "--lora"),
        ("--lora 0 --model_dir {base}", "--lora"),
        ("--lora 4 --transcribe a.wav --model_dir {base}", "--lora"),
    ],
)
def test_what_does_not_go_together(flags, words, released, spoken, tmp_path):  # noqa: F811
    flags = flags.format(base=released / "hf").split()
    status, err = refused(vietnamese, *data_flags(spoken)[:2], *flags, "--output_dir", tmp_path)
    assert status == 2 and words in err
