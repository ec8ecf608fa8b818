"""Parakeet's features, against transformers' extractor and by properties that hold for any
input."""

import numpy as np
import pytest
import torch
import transformers

from speech.signal.nemo_features import MelFeatures, frames


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def features_of(waveforms: list[torch.Tensor], n_mels: int = 80, fill: float = 0.0) -> torch.Tensor:
    """(B, F, M) of a batch that is padded with `fill`."""
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    batch = torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True, padding_value=fill)
    return MelFeatures(n_mels).to(batch.dtype)(batch, lengths, int(frames(lengths).max()))


@pytest.mark.parametrize("n_mels", [80, 128])
def test_features_are_those_of_transformers(n_mels):
    waveforms = [noise(length, seed=length).float() for length in (16_000, 8_123, 1_759, 12_801)]
    waveforms[1] *= 0.1
    waveforms[3][:6_000] = 0.0
    extractor = transformers.ParakeetFeatureExtractor(feature_size=n_mels)
    theirs = extractor(
        [waveform.numpy() for waveform in waveforms], sampling_rate=16_000, return_tensors="pt"
    )
    ours = features_of(waveforms, n_mels)
    assert (
        theirs["attention_mask"].sum(1).tolist()
        == [frames(len(waveform)) for waveform in waveforms]
        == [100, 50, 10, 80]
    )
    assert ours.dtype == torch.float32 and ours.shape == (4, 100, n_mels)
    expected = theirs["input_features"][:, :100]
    atol = 5e-5 * float(expected.abs().max())
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)


def test_the_first_and_the_last_frame_are_those_of_the_formula():
    """Frame i is centred on sample 160 i, and zeros surround the waveform."""
    waveform = noise(1_760)
    emphasised = np.append(waveform[:1], waveform[1:] - 0.97 * waveform[:-1])
    padded = np.pad(emphasised, 256)
    window = np.pad(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399), 56)
    power = np.stack(
        [np.abs(np.fft.rfft(window * padded[160 * i :][:512])) ** 2 for i in range(11)]
    )
    x = np.log(power @ MelFeatures(80).filters.double().numpy() + 2.0**-24)
    x = (x - x.mean(0)) / (x.std(0, ddof=1) + 1e-5)
    # The window and the filters are made in fp32.
    np.testing.assert_allclose(features_of([waveform])[0], x, rtol=0, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("fill", [0.0, 0.7])
def test_padding_and_other_utterances_change_nothing(fill):
    waveforms = [noise(length, seed=length) for length in (160, 500, 4_001, 9_600)]
    batch = features_of(waveforms, fill=fill)
    for row, waveform in zip(batch, waveforms, strict=True):
        alone = features_of([waveform])[0]
        torch.testing.assert_close(row[: len(alone)], alone, rtol=0, atol=1e-10)
        assert not row[len(alone) :].any()


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_constant_waveform_has_finite_features(level):
    x = features_of([torch.full((length,), level) for length in (160, 480, 16_000)], 128)
    assert x.isfinite().all() and x.abs().max() < (20 if level else 1)


def test_features_under_autocast_are_those_without_it():
    waveforms = [noise(8_000).float(), noise(5_000, seed=1).float()]
    expected = features_of(waveforms)
    with torch.autocast("cpu", torch.bfloat16):
        x = features_of(waveforms)
    assert x.dtype == torch.float32 and torch.equal(x, expected)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_features_without_normalisation_are_those_of_nemotron(n_mels):
    waveforms = [noise(length, seed=length).float() for length in (16_000, 8_123, 160)]
    waveforms[0][:6_000] = 0.0
    extractor = transformers.NemotronAsrStreamingFeatureExtractor(feature_size=n_mels)
    theirs = extractor(
        [waveform.numpy() for waveform in waveforms], sampling_rate=16_000, return_tensors="pt"
    )
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    batch = torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True, padding_value=0.3)
    ours = MelFeatures(n_mels, normalised=False)(batch, lengths, 100)
    assert theirs["attention_mask"].sum(1).tolist() == frames(lengths).tolist() == [100, 50, 1]
    expected = theirs["input_features"][:, :100]
    atol = 5e-5 * float(expected.abs().max())
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
    assert not ours[1, 50:].any() and ours[0].mean().abs() > 1
