"""Features and augmentation, against transformers and by properties that hold for any input."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.audio_utils import mel_filter_bank, spectrogram

from speech.signal import features as front_end


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050])
@pytest.mark.parametrize("n_mels", [40, 80])
def test_log_mel_is_that_of_transformers(rate, n_mels):
    ours, waveforms = front_end.LogMel(rate, n_mels), noise(3, rate)
    window, hop = round(0.025 * rate), round(0.010 * rate)
    settings = {
        "window": np.hanning(window),
        "frame_length": window,
        "hop_length": hop,
        "fft_length": ours.n_fft,
        "power": 2.0,
        "center": False,
        "mel_filters": mel_filter_bank(ours.n_fft // 2 + 1, n_mels, 0.0, rate / 2, rate),
        "mel_floor": 0.0,
    }
    mel = ours(waveforms)
    assert mel.shape == (3, front_end.frames(rate, rate), n_mels)
    for waveform, rows in zip(waveforms.numpy(), mel.numpy(), strict=True):
        expected = np.log(spectrogram(waveform, **settings).T + front_end.FLOOR)
        np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=1e-4)


@given(samples=st.integers(1, 5000), rate=st.sampled_from([8_000, 16_000, 44_100]))
def test_as_many_frames_as_stated(samples, rate):
    count = front_end.LogMel(rate, 20)(torch.zeros(1, samples)).shape[1]
    assert (
        count
        == front_end.frames(samples, rate)
        == int(front_end.frames(torch.tensor([samples]), rate)[0])
    )
    assert count == max(1, 1 + (samples - round(0.025 * rate)) // round(0.010 * rate))


@given(st.lists(st.integers(1, 6000), min_size=2, max_size=5))
def test_padding_changes_nothing(lengths):
    log_mel, norm = front_end.LogMel(16_000, 80), front_end.FeatureNorm(80)
    waveforms = [noise(length, seed=i) for i, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True)
    frames = front_end.frames(torch.tensor(lengths), 16_000)
    together = log_mel(padded)
    normalised = norm(together, frames)
    for i, waveform in enumerate(waveforms):
        alone = log_mel(waveform[None])
        assert alone.shape[1] == frames[i]
        torch.testing.assert_close(together[i, : frames[i]], alone[0], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(
            normalised[i, : frames[i]], norm(alone, frames[i : i + 1])[0], atol=2e-3, rtol=1e-3
        )
        assert (normalised[i, frames[i] :] == 0).all()


def test_log_mel_is_fp32_under_autocast_and_has_gradients():
    log_mel, waveform = front_end.LogMel(16_000), noise(1, 8000).requires_grad_()
    expected = log_mel(waveform)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mel = log_mel(waveform)
    assert mel.dtype == torch.float32 and torch.equal(mel, expected)
    mel.sum().backward()
    assert waveform.grad.isfinite().all() and waveform.grad.abs().sum() > 0


# --- normalisation --------------------------------------------------------------------------------


def test_a_norm_takes_statistics_once_and_keeps_them_in_the_weights():
    norm, parts = (front_end.FeatureNorm(10), [noise(n, 10, seed=n) * 5 + 2 for n in (50, 80)])
    norm.measure(parts)
    everything = torch.cat(parts)
    normal = norm(everything[None], torch.tensor([130]))[0]
    assert normal.mean(0).abs().max() < 1e-5
    torch.testing.assert_close(normal.std(0, correction=0), torch.ones(10), atol=1e-5, rtol=0)
    other = front_end.FeatureNorm(10)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other(everything[None], torch.tensor([130]))[0], normal)
    assert (norm(everything[None], torch.tensor([7]))[0, 7:] == 0).all()


@pytest.mark.parametrize("features", [torch.ones(1, 10), torch.ones(5, 10)])
def test_statistics_of_one_frame_or_of_silence_are_finite(features):
    norm = front_end.FeatureNorm(10)
    norm.measure([features])
    assert norm(features[None], torch.tensor([len(features)])).isfinite().all()


# --- SpecAugment ----------------------------------------------------------------------------------


def masks(*numbers: int, count: int = 3, widest: float = 0.2) -> torch.Tensor:
    return front_end.random_masks(np.random.default_rng(numbers), count, widest)


def test_masks_are_uniform_in_width_and_place():
    drawn = masks(0, count=20_000, widest=0.3).double()
    width = drawn[:, 1] - drawn[:, 0]
    assert drawn.min() >= 0 and drawn.max() <= 1 and width.min() >= 0 and width.max() <= 0.3 + 1e-6
    assert width.mean() == pytest.approx(0.15, abs=0.005)
    assert width.std() == pytest.approx(0.3 / 12**0.5, abs=0.005)
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn[:, 0].min() < 0.01 and drawn[:, 1].max() > 0.99


def test_the_stated_share_is_masked():
    features, lengths = torch.ones(2, 200, 80), torch.tensor([200, 100])
    time = torch.tensor([[[0.25, 0.5], [0.9, 1.0]], [[0.25, 0.5], [0.0, 0.0]]])
    bands = torch.tensor([[[0.0, 0.5]], [[0.5, 0.75]]])
    masked = front_end.spec_augment(features, lengths, bands, time)
    assert (masked[0, :, :40] == 0).all() and (masked[1, :, 40:60] == 0).all()
    assert (masked[0, 50:100] == 0).all()
    assert (masked[0, 180:] == 0).all()
    assert (masked[1, 25:50] == 0).all()
    assert masked[0].sum() == (200 - 50 - 20) * 40 and masked[1].sum() == (200 - 25) * 60


@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_an_utterance_is_masked_alike_in_any_batch(seed, lengths):
    features, size = noise(len(lengths), max(lengths), 16, seed=seed) + 10, torch.tensor(lengths)
    bands = torch.stack([masks(seed, 0, i, count=2, widest=0.3) for i in range(len(lengths))])
    time = torch.stack([masks(seed, 1, i, count=5, widest=0.1) for i in range(len(lengths))])
    before = features.clone()
    together = front_end.spec_augment(features, size, bands, time)
    assert torch.equal(features, before)
    for i, length in enumerate(lengths):
        alone = front_end.spec_augment(
            features[i : i + 1, :length], size[i : i + 1], bands[i : i + 1], time[i : i + 1]
        )
        assert torch.equal(together[i, :length], alone[0])
        kept = alone != 0
        assert torch.equal(alone[kept], features[i : i + 1, :length][kept])
    assert torch.equal(front_end.spec_augment(features, size, bands[:, :0], time[:, :0]), features)
