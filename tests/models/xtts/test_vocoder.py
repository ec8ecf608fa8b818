"""XTTS's HiFiGAN and speaker encoder, against coqui-tts and by properties that hold for any
weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from models.xtts.vocoder import HifiDecoder
from tests.models.xtts.small import FIXTURES, coquis


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiny_decoder() -> HifiDecoder:
    """With statistics and scales that are not those of a new network, so that an omitted one is
    seen."""
    torch.manual_seed(0)
    decoder = HifiDecoder(
        d_model=12, channels=32, speaker=24, filters=(8, 8, 16, 16), blocks=(2, 1, 1, 1)
    )
    for module in decoder.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    with torch.no_grad():
        for parameter in decoder.waveform_decoder.parameters():
            parameter *= 2.0
    return decoder


def reference_decoder() -> HifiDecoder:
    sizes = json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))["sizes"]
    decoder = HifiDecoder(
        d_model=sizes["d_model"],
        channels=sizes["vocoder_initial"],
        speaker=sizes["speaker_dim"],
        filters=sizes["speaker_filters"],
        blocks=sizes["speaker_layers"],
    )
    weights = coquis("hifigan_decoder").items()
    decoder.load_state_dict({name.removeprefix("hifigan_decoder."): w for name, w in weights})
    return decoder


def test_waveforms_are_those_of_coqui():
    decoder, cases = reference_decoder(), load_file(FIXTURES / "hifigan_decoder_cases.safetensors")
    latents, speaker = cases["latents"], cases["speaker"]
    torch.testing.assert_close(decoder(latents, speaker), cases["waveform"], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        decoder(latents[:1, :3], speaker[:1]), cases["waveform_of_one"], rtol=0, atol=1e-4
    )
    assert cases["waveform"].std() > 0.01


def test_speaker_vectors_are_those_of_coqui():
    cases = load_file(FIXTURES / "hifigan_decoder_cases.safetensors")
    vectors = reference_decoder().speaker_vector(cases["clips"] / 32_768)
    atol = 1e-4 * float(cases["speaker_vector"].abs().max())
    torch.testing.assert_close(vectors, cases["speaker_vector"], rtol=0, atol=atol)
    assert (vectors[0] - vectors[1]).abs().max() > 0.01


def test_the_speaker_encoders_own_features_are_those_of_coqui():
    """Files hold the filters and the window, too, so that weights of a new network need the right
    ones."""
    weights = load_file(FIXTURES / "hifigan_decoder.safetensors")
    spectrogram = tiny_decoder().speaker_encoder.torch_spec.state_dict()
    assert len(spectrogram) == 3
    for name, tensor in spectrogram.items():
        expected = weights[f"hifigan_decoder.speaker_encoder.torch_spec.{name}"].float()
        # The edges of the filters, up to 8 kHz in fp32, are rounded by 1e-5 of a filter's width.
        atol = 3e-5 * float(expected.abs().max())
        torch.testing.assert_close(tensor, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("codes", "frames"), [(1, 4), (2, 8), (7, 30), (30, 130)])
def test_codes_become_frames_of_256_samples_at_24_khz(codes, frames):
    waveforms = tiny_decoder()(normal(2, codes, 12), normal(2, 24))
    assert waveforms.shape == (2, 256 * frames) and frames == int(4 * codes * 24_000 / 22_050)
    assert waveforms.abs().max() <= 1 and waveforms.std() > 0.01 and not waveforms.requires_grad


def test_waveforms_and_speaker_vectors_stay_in_fp32_under_autocast():
    decoder = tiny_decoder()
    latents = normal(1, 6, 12)
    speaker = normal(1, 24)
    clip = normal(1, 4_800)
    with torch.autocast("cpu", torch.bfloat16):
        waveform, vector = decoder(latents, speaker), decoder.speaker_vector(clip)
        of_narrow = decoder(latents.bfloat16(), speaker.bfloat16())
    assert waveform.dtype == vector.dtype == of_narrow.dtype == torch.float32
    assert torch.equal(waveform, decoder(latents, speaker))
    assert torch.equal(vector, decoder.speaker_vector(clip))
    assert torch.equal(of_narrow, decoder(latents.bfloat16().float(), speaker.bfloat16().float()))


@pytest.mark.parametrize("samples", [257, 4_800, 16_001])
def test_speaker_vectors_have_length_1_and_are_those_of_each_clip(samples):
    decoder, clips = tiny_decoder().double(), 0.1 * normal(2, samples).double()
    vectors = decoder.speaker_vector(clips)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(vectors[1:], decoder.speaker_vector(clips[1:]), rtol=0, atol=1e-10)
    assert (vectors[0] - vectors[1]).abs().max() > 1e-5 and not vectors.requires_grad


def test_digital_silence_has_a_finite_speaker_vector():
    assert tiny_decoder().speaker_vector(torch.zeros(1, 4_800)).isfinite().all()


def test_training_mode_does_not_reach_the_speaker_encoder():
    decoder, clip = tiny_decoder(), normal(1, 4_800)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    expected = decoder.eval().speaker_vector(clip)
    decoder.train()
    assert torch.equal(decoder.speaker_vector(clip), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in decoder.state_dict().items())
