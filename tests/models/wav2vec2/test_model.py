"""The wav2vec 2.0 network against transformers' in float64, its masks, skipped layers and types."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import itertools
import statistics

import numpy as np
import pytest
import torch
from torch import nn
from transformers import HubertForCTC, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC
from transformers.models.wav2vec2 import modeling_wav2vec2

from models.wav2vec2 import formats, scratch, settings
from models.wav2vec2.model import Wav2Vec2, frames, normalised, shortest
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import span_mask
from tests.models.wav2vec2.test_formats import GROUP, LAYER, peer, saved

SAMPLES = (16_000, 401, 400, 9999, 52_345)
KINDS = {
    "layer": (Wav2Vec2ForCTC, LAYER),
    "group": (Wav2Vec2ForCTC, GROUP),
    "hubert": (HubertForCTC, {**GROUP, "feat_proj_layer_norm": False}),
    "adapters": (Wav2Vec2ForCTC, {**LAYER, "adapter_attn_dim": 3}),
}


def pair(name: str, folder) -> tuple[nn.Module, Wav2Vec2]:
    """A model of transformers' with random weights, and the same model here, in float64."""
    kind, changes = KINDS[name]
    theirs = peer(kind, **changes)
    weights, config, _ = formats.read_model(saved(folder, theirs))
    model = Wav2Vec2(config)
    model.load_state_dict(weights)
    return theirs.double(), model.double().eval()


def clips(*samples: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in samples]


def batch_of(audio: list[torch.Tensor], **others) -> dict:
    """Beyond its end a waveform has noise, which nothing may see but the convolutions."""
    lengths = torch.tensor([len(each) for each in audio])
    padded = nn.utils.rnn.pad_sequence(audio, batch_first=True, padding_value=0.7)
    return {"audio": padded, "audio_lengths": lengths, "audio_lengths_host": lengths, **others}


def logits(model: Wav2Vec2, batch: dict) -> list[torch.Tensor]:
    """Those of the valid frames of each utterance."""
    encoded, counts = model.encode(batch)
    return [model.lm_head(row[:count]) for row, count in zip(encoded, counts, strict=True)]


# --- the same as transformers ---------------------------------------------------------------------


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_a_ragged_batch_is_what_transformers_makes_of_the_clip_alone(
    name, is_trained, tmp_path
):
    theirs, model = pair(name, tmp_path)
    model.feature_extractor.requires_grad_(is_trained)
    audio = clips(*SAMPLES)
    for clip, row in zip(audio, logits(model, batch_of(audio)), strict=True):
        expected = theirs(clip[None]).logits[0]
        assert row.shape == expected.shape
        torch.testing.assert_close(row, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_transformers(name, tmp_path):
    theirs, model = pair(name, tmp_path)
    audio = clips(9999)
    weights = torch.randn_like(theirs(audio[0][None]).logits[0])
    (theirs(audio[0][None]).logits[0] * weights).sum().backward()
    (logits(model, batch_of(audio))[0] * weights).sum().backward()
    expected = formats._ours({name: p.grad for name, p in theirs.named_parameters()})
    for name, p in model.named_parameters():
        if name == "masked_spec_embed":
            assert p.grad is None
            continue
        torch.testing.assert_close(p.grad, expected[name], atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("name", ["layer", "group"])
def test_masks_are_those_of_transformers(name, tmp_path, monkeypatch):
    """The vector of masked frames, then zeros in masked channels."""
    theirs, model = pair(name, tmp_path)
    audio = clips(9999)
    count, width = frames(9999, model.config), model.config["hidden_size"]
    masks = {count: torch.rand(1, count) < 0.4, width: torch.rand(1, width) < 0.3}
    monkeypatch.setattr(
        modeling_wav2vec2,
        "_compute_mask_indices",
        lambda shape, *others, **named: masks[shape[1]].numpy(),
    )
    for key in ("hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"):
        setattr(theirs.config, key, 0.0)
    theirs.config.mask_time_prob = theirs.config.mask_feature_prob = 0.5
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    expected = theirs.train()(audio[0][None]).logits[0]
    batch = batch_of(audio, time_masks=masks[count], channel_masks=masks[width])
    torch.testing.assert_close(logits(model, batch)[0], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("epsilon", [settings.HF_EPSILON, settings.META_EPSILON])
def test_waveforms_are_normalised_as_by_transformers(epsilon):
    """And, with Meta's epsilon, as by a layer norm."""
    audio = [0.01 * each.float() + 0.3 for each in clips(16_000, 401, 9999)]
    batch = batch_of(audio)
    found = normalised(batch["audio"], batch["audio_lengths"], epsilon)
    if epsilon == settings.HF_EPSILON:
        extractor = Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
        told = extractor([each.numpy() for each in audio], sampling_rate=SAMPLE_RATE, padding=True)
        expected = torch.from_numpy(np.stack(told["input_values"]))
    else:
        rows = [nn.functional.layer_norm(each, each.shape, eps=epsilon) for each in audio]
        expected = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("samples", [1, 399, 400, 719, 720, 16_000, 47_999])
@pytest.mark.parametrize("size", ["300m", "demo"])
def test_frames_are_those_of_the_convolutions(samples, size):
    config = {**settings.SIZES[size], "conv_dim": [2] * len(settings.SIZES[size]["conv_dim"])}
    config |= {"hidden_size": 16, "num_hidden_layers": 0, "num_conv_pos_embeddings": 4}
    model = Wav2Vec2({**config, "vocabulary": 2, "num_attention_heads": 1})
    _, counts = model.encode(batch_of([torch.randn(samples)]))
    convolved = model.features(batch_of([torch.randn(samples)])).shape[1]
    assert counts == [frames(samples, config)] == [convolved]
    assert shortest(settings.SIZES["300m"]) == 400


# --- skipped layers and masks ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layer", "group"])
def test_an_utterance_that_skips_a_layer_is_that_of_a_network_without_it(name, tmp_path):
    _, model = pair(name, tmp_path)
    audio = clips(16_000, 9999, 4000)
    kept = [[True, True], [False, True], [False, False]]
    together = logits(model, batch_of(audio, layers=torch.tensor(kept)))
    layers = list(model.encoder.layers)
    for clip, through, row in zip(audio, kept, together, strict=True):
        model.encoder.layers = nn.ModuleList(itertools.compress(layers, through))
        torch.testing.assert_close(row, logits(model, batch_of([clip]))[0], atol=1e-12, rtol=1e-12)


def test_spans_of_a_mask_cover_what_all_pairs_of_beginnings_do():
    """1.5 spans on average, at different places that are equally likely."""
    size, span, share = 40, 8, 0.3
    masks = [span_mask(np.random.default_rng(seed), size, share, span) for seed in range(4000)]
    starts = range(size - span + 1)
    both = [
        len({*range(a, a + span), *range(b, b + span)})
        for a, b in itertools.combinations(starts, 2)
    ]
    expected = (span + statistics.mean(both)) / 2
    covered = [int(mask.sum()) for mask in masks]
    error = statistics.stdev(covered) / len(covered) ** 0.5
    assert abs(statistics.mean(covered) - expected) < 4 * error
    for mask in masks:
        runs = [
            len(list(group)) for is_masked, group in itertools.groupby(mask.tolist()) if is_masked
        ]
        assert runs and min(runs) >= span


@pytest.mark.parametrize(("size", "share", "covered"), [(30, 0.0, 0), (5, 0.9, 5), (64, 1.0, 64)])
def test_masks_at_their_limits(size, share, covered):
    """An axis shorter than a span is masked as a whole, or not at all."""
    found = {
        int(span_mask(np.random.default_rng(seed), size, share, max(10, size)).sum())
        for seed in range(20)
    }
    assert found <= {0, covered} and covered in found


# --- half precision and a filter bank -------------------------------------------------------------


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite_and_not_for_convolutions_in_fp16(dtype, is_trained, tmp_path):
    _, model = pair("group", tmp_path)
    model.float().feature_extractor.requires_grad_(is_trained)
    batch = batch_of([each.float() for each in clips(*SAMPLES)])
    plain = model.features(batch)
    with torch.autocast("cpu", dtype):
        features = model.features(batch)
        found = logits(model, batch)
    assert all(row.isfinite().all() for row in found) and found[0].dtype == dtype
    assert torch.equal(features, plain) == (dtype == torch.float16)


def test_a_filter_passes_the_frequency_that_it_is_named_by():
    """Pairs are even on the mel scale from 60 Hz to 7.6 kHz, and a pair hears any phase."""
    count, kernel = 72, 256
    bank = scratch.gabor_filters(count, kernel).double()
    power = torch.fft.rfft(bank, 1 << 14).abs().square().view(count, 2, -1).sum(1)
    peaks = power.argmax(1) * SAMPLE_RATE / (1 << 14)
    mels = np.linspace(*(2595 * np.log10(1 + np.array([60.0, 7600.0]) / 700)), count + 2)[1:-1]
    hertz = 700 * (10 ** (mels / 2595) - 1)
    torch.testing.assert_close(peaks.double(), torch.from_numpy(hertz), atol=20.0, rtol=0.01)


def test_a_fitted_filter_bank_returns_values_of_a_deviation_of_one():
    model = Wav2Vec2({**settings.SIZES["demo"], "vocabulary": 5, "num_hidden_layers": 1})
    audio = 0.05 * torch.randn(SAMPLE_RATE, generator=torch.Generator().manual_seed(0)) + 0.2
    scratch.fit_to_data(model, audio)
    heard = (audio - audio.mean()) / audio.std()
    power = model.feature_extractor.conv_layers[0].conv(heard[None, None])[0].square().mean(1)
    pairs = power.view(-1, 2).mean(1)
    torch.testing.assert_close(pairs, torch.ones(len(pairs)), atol=1e-4, rtol=1e-4)
