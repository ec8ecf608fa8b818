"""Speech of a trained Matcha-TTS: the flow, batches, sentences."""

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import RunError
from models.matcha import decoding
from models.matcha.decoding import SpeakingSettings, Voice
from models.matcha.model import SIZES, Matcha
from models.matcha.tokenizer import Tokens, symbols_of

SENTENCES = ("ab ba.", "c", "abc abc abc cab?")


class Loudness(nn.Module):
    """Mel frames to waveforms of 256 equal samples a frame."""

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        return mels.mean(2).repeat_interleave(256, dim=1)


@pytest.fixture(scope="module")
def voice() -> Voice:
    torch.manual_seed(0)
    symbols = symbols_of(SENTENCES)
    model = Matcha({**SIZES["demo"], "symbols": len(symbols), "speakers": 2}).double().eval()
    nn.init.normal_(model.encoder.proj_w.proj.weight, 0, 0.05)
    return Voice(model, Tokens(symbols), "en", ["a", "b"], Loudness())


def test_euler_follows_the_flow():
    integrate = pytest.importorskip("scipy.integrate")
    matrix = np.array([[-1.0, 2.0], [-3.0, 0.5]])

    def velocity(x, time):
        return x @ torch.from_numpy(matrix).t() + np.sin(3 * time)

    start = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    exact = integrate.solve_ivp(
        lambda t, x: matrix @ x + np.sin(3 * t), (0, 1), start[0].numpy(), rtol=1e-10, atol=1e-10
    ).y[:, -1]
    errors = [
        np.abs(decoding.euler(velocity, start, steps)[0].numpy() - exact).max()
        for steps in (100, 1000)
    ]
    assert errors[1] < 1e-2 and errors[0] / errors[1] == pytest.approx(10, rel=0.1)


def test_sentences_do_not_depend_on_what_they_are_spoken_with(voice):
    rows = [(voice.tokens.encode(text), row % 2) for row, text in enumerate(SENTENCES)]
    together = decoding.mels_of(voice.model, rows, SpeakingSettings())
    for row, mel in zip(rows, together, strict=True):
        (alone,) = decoding.mels_of(voice.model, [row], SpeakingSettings())
        torch.testing.assert_close(alone, mel, rtol=0, atol=1e-6)
    (other,) = decoding.mels_of(voice.model, rows[:1], SpeakingSettings(seed=1))
    assert other.shape == together[0].shape and not torch.allclose(other, together[0])
    (calm,) = decoding.mels_of(voice.model, rows[:1], SpeakingSettings(seed=1, temperature=0.0))
    torch.testing.assert_close(
        calm, decoding.mels_of(voice.model, rows[:1], SpeakingSettings(seed=2, temperature=0.0))[0]
    )


def test_texts_are_cut_into_sentences_and_joined(voice):
    texts = ["ab ba. c", "c", "abc abc abc cab? ab ba. c"]
    spoken = list(decoding.speak(voice, texts, SpeakingSettings(), [0, 1, 0]))
    pause = round(decoding.PAUSE_SECONDS * 22_050)

    def length(sentence: str, speaker: int) -> int:
        row = (voice.tokens.encode(sentence), speaker)
        return 256 * len(decoding.mels_of(voice.model, [row], SpeakingSettings())[0])

    sizes = [length(SENTENCES[0], 0), length("c", 0), length(SENTENCES[2], 0)]
    assert [len(waveform) for waveform in spoken] == [
        sizes[0] + pause + sizes[1],
        length("c", 1),
        sum(sizes) + 2 * pause,
    ]
    assert not spoken[0][sizes[0] : sizes[0] + pause].any()


def short_of_memory(monkeypatch, most: int) -> None:
    """More than so many sentences at once do not fit."""
    mels_of = decoding.mels_of

    def limited(model, rows, settings):
        if len(rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mels_of(model, rows, settings)

    monkeypatch.setattr(decoding, "mels_of", limited)


def test_sentences_that_do_not_fit_together_are_spoken_apart(voice, monkeypatch):
    texts = ["ab ba. c", "abc abc abc cab?", "c"]
    whole = [*decoding.speak(voice, texts, SpeakingSettings())]
    short_of_memory(monkeypatch, 1)
    for apart, together in zip(
        decoding.speak(voice, texts, SpeakingSettings()), whole, strict=True
    ):
        torch.testing.assert_close(apart, together, rtol=0, atol=1e-6)
    short_of_memory(monkeypatch, 0)
    with pytest.raises(
        RunError, match=r"the sentence 'ab ba\.' does not fit into memory even alone"
    ):
        next(decoding.speak(voice, texts, SpeakingSettings()))


def test_untrained_durations_have_a_limit(voice):
    tokens = voice.tokens.encode("abc")
    bias = voice.model.encoder.proj_w.proj.bias
    before = bias.detach().clone()
    nn.init.constant_(bias, 9.0)
    (mel,) = decoding.mels_of(voice.model, [(tokens, 0)], SpeakingSettings(steps=1))
    bias.data.copy_(before)
    assert len(mel) == 50 * len(tokens)
