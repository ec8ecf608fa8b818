"""The levels of --use_cpu_offload in every recipe change no bit. XTTS's are in test_xtts.py."""

import pytest

from common import layers
from models.parakeet import model, settings
from models.wav2vec2 import settings as wav2vec2
from recipes import (
    konkani_conformer,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
)
from tests.recipes.runs import TINY, check_levels

TWO = "--encoder_layers 2 --decoder_layers 2".split()
FP16 = ["--mixed_precision", "fp16", "--no_gradient_checkpointing"]
SPOKEN = {
    template: FP16,
    konkani_conformer: [*TINY, *TWO],
    whisper_vietnamese: ["--from_scratch", *TINY, *TWO],
    parakeet_tdt: ["--from_scratch", "--model_size", "demo", *FP16],
    wav2vec2_ctc: ["--from_scratch", "--model_size", "demo", *FP16],
}
TINY_WAV2VEC2 = wav2vec2.make_config(32, 2, 2, conv_dim=[8] * 7, num_conv_pos_embeddings=16)
TINY_PARAKEET = settings.make_config(16, 2, 2, (8, 1), num_mel_bins=16, channels=4, ctc=True)


@pytest.fixture(autouse=True)
def as_large_inputs(monkeypatch):
    """Small inputs are handled as large ones: in lean chains and in pieces."""
    monkeypatch.setattr(layers, "SMALL", 0)
    monkeypatch.setattr(model, "AT_ONCE", 1)


@pytest.fixture(autouse=True)
def narrow_models(monkeypatch):
    """A CPU computes slowly in fp16."""
    monkeypatch.setattr(template, "WIDTH", 16)
    monkeypatch.setitem(settings.SIZES, "demo", TINY_PARAKEET)
    monkeypatch.setitem(wav2vec2.SIZES, "demo", TINY_WAV2VEC2)


@pytest.mark.parametrize("recipe", SPOKEN, ids=lambda recipe: recipe.RECIPE)
def test_a_level_changes_no_bit(recipe, konkani, tmp_path):
    manifests = ["--train_manifest", konkani["train"], "--val_manifest", konkani["val"]]
    check_levels(recipe, tmp_path, *manifests, *SPOKEN[recipe])


def test_a_level_changes_no_bit_of_morse(tmp_path):
    clips = "--clips_per_epoch 8 --eval_clips 3 --clip_seconds 2".split()
    check_levels(whisper_morse, tmp_path, "--from_scratch", *TINY, *TWO, *clips)
