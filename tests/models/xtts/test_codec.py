"""XTTS's mel features, DVAE and Griffin-Lim, against coqui-tts and by properties that hold for any
weights."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from models.xtts.codec import DVAE, Codebook, Mel, code_count, griffin_lim
from tests.models.xtts.small import FIXTURES, dvae_weights

TINY = {"mel_channels": 80, "dvae_hidden": 16, "codes": 64, "code_dim": 8}
STATS = torch.linspace(1.5, 4.0, 80)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiny_dvae() -> DVAE:
    """Its codebook is what it encodes of noise, so that other noise has many codes."""
    torch.manual_seed(0)
    dvae = DVAE(TINY)
    with torch.no_grad():
        dvae.codebook.embed.copy_(dvae.encoder(normal(1, 80, 256, seed=9))[0])
    return dvae


def tone(hertz: float, samples: int) -> torch.Tensor:
    return 0.2 * torch.sin(2 * math.pi * hertz / 22_050 * torch.arange(samples))


def reference_dvae() -> DVAE:
    """The fixtures' weights, without the statistics of a loss that is off."""
    dvae = DVAE(json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))["sizes"])
    dvae.load_state_dict(dvae_weights())
    return dvae


# --- mel features ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dvae", "conditioning"])
def test_features_are_those_of_coqui(kind):
    cases = load_file(FIXTURES / "mel_cases.safetensors")
    result = Mel(kind, cases["mel_stats"])(cases["waveform"][None, :12_000] / 32_768)
    torch.testing.assert_close(result, cases[f"{kind}_mel"], rtol=0, atol=1e-4)


def test_silence_is_the_floor():
    result = Mel("dvae", STATS)(torch.zeros(1, 2_048))
    torch.testing.assert_close(result, (math.log(1e-5) / STATS)[None, :, None].expand(1, 80, 9))


@pytest.mark.parametrize("kind", ["dvae", "conditioning"])
def test_features_stay_in_fp32_under_autocast(kind):
    mel, waveforms = Mel(kind, STATS), normal(2, 4_000)
    with torch.autocast("cpu", torch.bfloat16):
        result = mel(waveforms)
        of_narrow = mel(waveforms.bfloat16())
    assert result.dtype == of_narrow.dtype == torch.float32
    assert torch.equal(result, mel(waveforms))
    assert torch.equal(of_narrow, mel(waveforms.bfloat16().float()))


# --- DVAE -----------------------------------------------------------------------------------------


def test_codes_and_decoding_are_those_of_coqui():
    dvae, cases = reference_dvae(), load_file(FIXTURES / "dvae_cases.safetensors")
    codes = dvae.codes(cases["mel"])
    assert torch.equal(codes, cases["codes"]) and len(codes.unique()) > 5
    assert torch.equal(dvae.codes(cases["odd_mel"]), cases["odd_codes"])
    # A dozen convolutions in fp32, whose sums every CPU orders in its own way.
    atol = 1e-4 * float(cases["decoded"].abs().max())
    torch.testing.assert_close(dvae.decode(codes), cases["decoded"], rtol=0, atol=atol)


def test_clips_have_the_number_of_codes_that_is_counted():
    """For a whole multiple of 1,024 samples the DVAE returns one code more than is trained on."""
    samples = (1, 1_023, 1_024, 1_025, 6_615, 255_995)
    assert [*map(code_count, samples)] == [1, 1, 1, 2, 7, 250]
    dvae, mel = tiny_dvae(), Mel("dvae", STATS)
    for samples in (1_023, 1_024, 1_025, 6_615, 8_191, 8_192):
        count = dvae.codes(mel(normal(1, samples))).shape[1]
        assert count == code_count(samples) + (samples % 1_024 == 0)


def test_codes_are_the_nearest_vectors():
    torch.manual_seed(1)
    codebook, vectors = Codebook(8, 64), normal(3, 50, 8)
    expected = torch.cdist(vectors.double(), codebook.embed.t().double()).argmin(-1)
    assert torch.equal(codebook.nearest(vectors), expected) and len(expected.unique()) > 30
    codes = torch.arange(64).view(2, 32)
    assert torch.equal(codebook.vectors(codes)[1, 5], codebook.embed[:, 37])
    assert torch.equal(codebook.nearest(codebook.vectors(codes)), codes)


def test_of_equally_near_vectors_the_first_is_taken():
    codebook = Codebook(2, 3)
    codebook.embed.copy_(torch.tensor([[9.0, 1.0, 1.0], [9.0, 0.0, 0.0]]))
    assert codebook.nearest(torch.tensor([[[0.0, 0.0]]])).tolist() == [[1]]


def test_codes_and_decoding_stay_in_fp32_under_autocast():
    dvae, mel = tiny_dvae(), normal(2, 80, 200)
    codes = dvae.codes(mel)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dvae.codes(mel), codes)
        assert torch.equal(dvae.codes(mel.bfloat16()), dvae.codes(mel.bfloat16().float()))
        decoded = dvae.decode(codes)
        vectors = dvae.encoder(mel).transpose(1, 2)
        assert not torch.equal(dvae.codebook.nearest(vectors), codes)  # bf16 would change some
    assert decoded.dtype == torch.float32 and torch.equal(decoded, dvae.decode(codes))


# --- Griffin-Lim ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hertz", [220.0, 1_000.0, 3_500.0])
def test_griffin_lim_brings_a_tone_back(hertz):
    waveform = tone(hertz, 16_384)
    result = griffin_lim(Mel("dvae", STATS)(waveform[None])[0], STATS)
    assert result.shape == (65 * 256,) and result.dtype == torch.float32
    middle = result[4_096:12_288]
    spectrum = torch.fft.rfft(middle * torch.hann_window(8_192)).abs()
    band = (
        35 * (1 + hertz / 700) * 0.64
    )  # Hz, the distance of mel bands there: within one nothing can be told apart
    assert abs(spectrum.argmax().item() * 22_050 / 8_192 - hertz) < max(band, 22)
    level = middle.square().mean() / waveform[4_096:12_288].square().mean()
    assert 0.4 < level < 1.6


def test_griffin_lim_draws_nothing_and_takes_a_single_code():
    mel = tiny_dvae().decode(torch.tensor([[3]]))[0]
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        first = griffin_lim(mel, STATS)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == (1024,) and first.dtype == torch.float32 and first.isfinite().all()
    assert torch.equal(first, griffin_lim(mel, STATS))
