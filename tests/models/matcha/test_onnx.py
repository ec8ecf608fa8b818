"""Exported voices in onnxruntime, Piper and sherpa-onnx: the same tokens, frames and samples."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.matcha import decoding, onnx
from models.matcha.decoding import SpeakingSettings, Voice
from models.matcha.model import SIZES, Matcha
from models.matcha.tokenizer import Composer, Tokens, read, symbols_of
from models.matcha.vocoder import SIZES as VOCODERS
from models.matcha.vocoder import GriffinLim, Vocos

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

TEXTS = {  # by the language whose numbers are read
    "am": "ሰላም ለዓለም",
    "vi": "Tôi được ăn phở",
    "hi": "नमस्ते दुनिया",
    "ru": "Привет, мир",
    "fr": "Où est l’été",
}
TINY = {**SIZES["demo"], "width": 16, "layers": 1, "inner": 16, "predictor": 16, "channels": 16}


class Echo(nn.Module):
    """The tokens as samples: what is made of a text before the network reads it."""

    def __init__(self, voice: Voice):
        super().__init__()
        self.composer = Composer(voice.tokens)

    def forward(self, numbers, length, scales):
        samples = self.composer(numbers).float() / 1000 + 0 * scales.sum() + 0 * length.sum()
        return samples[:, None]


class Plain(nn.Module):
    """Mel frames as samples, scaled to be in range, in place of a vocoder."""

    def __init__(self):
        super().__init__()
        self.fourier = None

    def forward(self, mels):
        return mels.flatten(1) / 20


def make_voice(speakers: int = 1, vocoder: nn.Module | None = None) -> Voice:
    torch.manual_seed(0)
    symbols = symbols_of([read(text, language) for language, text in TEXTS.items()])
    model = Matcha({**TINY, "symbols": len(symbols), "speakers": speakers}).eval()
    nn.init.normal_(model.encoder.proj_w.proj.weight, 0, 0.05)
    nn.init.constant_(model.encoder.proj_w.proj.bias, 1.0)
    model.mel_mean.fill_(-5.0)
    model.mel_std.fill_(2.0)
    names = [f"speaker {number}" for number in range(speakers)]
    vocoder = vocoder or Vocos(VOCODERS["demo"])
    return Voice(model, Tokens(symbols), "am", names, vocoder)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return make_voice()


@pytest.fixture(scope="module")
def exported(voice, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("voice")
    onnx.fill(folder, voice)
    return folder


@pytest.fixture(scope="module")
def echo(voice, tmp_path_factory) -> Path:
    """A voice that returns its tokens."""
    folder = tmp_path_factory.mktemp("echo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "Graph", Echo)
        onnx.fill(folder, voice)
    return folder


def in_piper(folder: Path, text: str, **settings) -> np.ndarray:
    piper = pytest.importorskip("piper")
    config = piper.SynthesisConfig(normalize_audio=False, **settings)
    chunks = piper.PiperVoice.load(folder / "voice.onnx").synthesize(text, config)
    return np.concatenate([chunk.audio_float_array for chunk in chunks])


def in_sherpa(folder: Path, text: str, speed: float = 1.0) -> np.ndarray:
    sherpa_onnx = pytest.importorskip("sherpa_onnx")
    vits = sherpa_onnx.OfflineTtsVitsModelConfig(
        model=str(folder / "voice.onnx"), tokens=str(folder / "tokens.txt")
    )
    config = sherpa_onnx.OfflineTtsConfig(
        model=sherpa_onnx.OfflineTtsModelConfig(vits=vits, num_threads=1),
        silence_scale=1.0,  # pauses stay
    )
    audio = sherpa_onnx.OfflineTts(config).generate(text, sid=0, speed=speed)
    assert audio.sample_rate == 22_050
    return np.array(audio.samples, dtype=np.float32)


@pytest.mark.parametrize("program", [in_piper, in_sherpa])
@pytest.mark.parametrize("language", TEXTS)
def test_a_program_makes_the_tokens_that_were_learned(program, language, voice, echo):
    text = TEXTS[language]
    heard = np.rint(program(echo, text) * 1000).astype(int).tolist()
    assert heard == voice.tokens.encode(read(text, language))


@pytest.mark.parametrize("program", [in_piper, in_sherpa])
def test_an_empty_sentence_after_a_mark(program, voice, echo):
    """sherpa-onnx gives one."""
    heard = np.rint(program(echo, "Où?") * 1000).astype(int).tolist()
    tokens = voice.tokens.encode("où")
    assert heard[: len(tokens) - 1] == tokens[:-1]
    assert heard[-1] == tokens[-1] and len(heard) in (len(tokens), len(tokens) + 3)


@pytest.mark.parametrize("language", ["am", "fr"])  # a syllabary, and letters with marks
def test_programs_speak_as_long_as_the_model(language, voice, exported):
    text = TEXTS[language]
    tokens = voice.tokens.encode(read(text, language))
    for speed in (1.0, 0.5):
        (mel,) = decoding.mels_of(voice.model, [(tokens, 0)], SpeakingSettings(speed=speed))
        samples = 256 * len(mel)
        assert len(in_piper(exported, text, length_scale=1 / speed)) == samples
        assert len(in_sherpa(exported, text, speed)) == samples


@functools.cache
def session(folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(folder / "voice.onnx")


def run(folder: Path, tokens: list[int], noise: float = 0.0, **others) -> np.ndarray:
    inputs = {
        "input": np.array([tokens]),
        "input_lengths": np.array([len(tokens)]),
        "scales": np.array([noise, 1.0, 0.0], dtype=np.float32),
        **others,
    }
    (samples,) = session(folder).run(["output"], inputs)
    assert samples.shape[:2] == (1, 1)
    return samples[0, 0]


@pytest.mark.parametrize("speakers, rows", [(1, 2), (3, 3)])
def test_the_graph_is_the_model(speakers, rows, tmp_path):
    """Also for one speaker in a model of several, as it is made of a released one. That of a model
    with one has the vocoder, too (below)."""
    voice = make_voice(rows, Plain())
    voice = replace(voice, speakers=voice.speakers[:speakers])
    onnx.fill(tmp_path, voice)
    for number, (language, text) in enumerate(TEXTS.items()):
        tokens = voice.tokens.encode(read(text, language))
        speaker = number % speakers
        others = {"sid": np.array([speaker])} if speakers > 1 else {}
        settings = SpeakingSettings(temperature=0.0, steps=onnx.FLOW_STEPS)
        (mel,) = decoding.mels_of(voice.model, [(tokens, speaker)], settings)
        samples = run(tmp_path, tokens, **others)
        np.testing.assert_allclose(samples * 20, mel.flatten().numpy(), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_graph_has_the_vocoder_and_noise(voice, exported):
    tokens = voice.tokens.encode(read(TEXTS["am"], "am"))
    settings = SpeakingSettings(temperature=0.0, steps=onnx.FLOW_STEPS)
    (mel,) = decoding.mels_of(voice.model, [(tokens, 0)], settings)
    samples = run(exported, tokens)
    np.testing.assert_allclose(samples, voice.vocode(mel).numpy(), rtol=0, atol=1e-4)
    assert len(run(exported, tokens, 0.667)) == len(samples)
    assert np.abs(run(exported, tokens, 0.667) - samples).max() > 1e-4


def test_a_graph_without_a_trained_vocoder_has_each_table_once(tmp_path):
    voice = make_voice(vocoder=GriffinLim(1))
    onnx.fill(tmp_path, voice)
    parameters = sum(p.numel() for p in voice.model.parameters())
    tables = 2 * 1026 * 1024 + 3 * 513 * 80
    assert (tmp_path / "voice.onnx").stat().st_size < 4 * (parameters + tables) + 3_000_000
    tokens = voice.tokens.encode(read(TEXTS["am"], "am"))
    assert np.isfinite(run(tmp_path, tokens)).all()
