"""Waveforms of mel frames: Fourier transforms, Griffin and Lim's algorithm, Vocos."""

import pytest
import torch

from models.matcha import vocoder_training
from models.matcha.mels import EDGE, HOP, SAMPLE_RATE, LogMel, with_edges
from models.matcha.vocoder import BINS, SIZES, ConvolutionalFourier, Fourier, GriffinLim, Vocos
from tests import contract


def voice_like(frames: int = 40) -> torch.Tensor:
    time = torch.arange(frames * HOP) / SAMPLE_RATE
    voice = sum(torch.sin(2 * torch.pi * 150 * n * time) / n for n in range(1, 20))
    return voice * (1 + torch.sin(2 * torch.pi * 4 * time)) / 10


def test_a_waveform_comes_back_from_its_spectrum():
    waveforms = with_edges(voice_like())[None]
    for fourier in (Fourier(), ConvolutionalFourier()):
        made = fourier(*fourier.spectrum(waveforms))
        assert made.shape == waveforms.shape
        torch.testing.assert_close(made[:, 100:-100], waveforms[:, 100:-100], rtol=0, atol=1e-5)


def test_convolutions_transform_as_fft_does():
    """Also spectra that belong to no waveform, as both vocoders make them."""
    torch.manual_seed(0)
    real, imaginary = torch.randn(2, 2, 7, BINS)
    fourier, convolutions = Fourier(), ConvolutionalFourier()
    waveforms = fourier(real, imaginary)
    inner = slice(100, -100)  # the windows are nearly 0 at the ends
    torch.testing.assert_close(
        convolutions(real, imaginary)[:, inner], waveforms[:, inner], rtol=0, atol=1e-4
    )
    for ours, theirs in zip(
        convolutions.spectrum(waveforms), fourier.spectrum(waveforms), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_the_inverse_is_torchs():
    torch.manual_seed(0)
    spectrum = torch.randn(2, BINS, 9, dtype=torch.complex64)
    spectrum[:, [0, -1]] = spectrum[:, [0, -1]].real + 0j
    window = torch.hann_window(1024)
    theirs = torch.istft(spectrum, 1024, HOP, window=window, center=True)
    ours = Fourier()(spectrum.real.transpose(1, 2), spectrum.imag.transpose(1, 2))
    torch.testing.assert_close(ours[:, 512:-512], theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_griffin_lim_brings_frames_back():
    voice = voice_like()
    frames = LogMel()(with_edges(voice)[None])
    made = GriffinLim()(frames)[0]
    assert made.shape == voice.shape and made.isfinite().all()
    again = LogMel()(with_edges(made)[None])
    loud = frames > frames.max() - 4
    assert (again - frames)[loud].abs().mean() < 0.25
    # Frames stay where they are: the loudness of both rises and falls together.
    levels = [x.unfold(0, HOP, HOP).square().mean(1).sqrt() for x in (voice, made)]
    assert torch.corrcoef(torch.stack(levels))[0, 1] > 0.98


def test_vocos_has_the_size_of_the_released_one():
    with torch.device("meta"):
        model = Vocos(SIZES["full"])
    # 13.5 million with 100 bands, 7 x 20 x 512 weights fewer with 80.
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 13.5
    small = Vocos(SIZES["demo"])
    assert small(torch.randn(2, 9, 80)).shape == (2, 9 * HOP)


def crops(count: int, dtype: torch.dtype) -> list[dict]:
    torch.manual_seed(0)
    size = vocoder_training.CROP + 2 * EDGE
    return [
        {"audio": 0.1 * torch.randn(size, dtype=dtype), "name": f"{number}", "index": number}
        for number in range(count)
    ]


def test_however_an_update_is_cut_its_gradient_is_the_same():
    model = vocoder_training.VocoderInTraining({"width": 8, "layers": 2}).double()
    items = crops(contract.COUNT, torch.float64)
    given = contract.loss_of(vocoder_training, model, items, vocoder_training.LOSS_WEIGHTS)
    contract.check_any_cut(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_16_bits_is_near_that_in_32(dtype):
    model = vocoder_training.VocoderInTraining({"width": 8, "layers": 2})
    batch = vocoder_training.collate(crops(2, torch.float32))
    exact = vocoder_training.compute_loss(model, batch)["mel"]
    with torch.autocast("cpu", dtype=dtype):
        found = vocoder_training.compute_loss(model, batch)["mel"]
    found.backward()
    assert found.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
