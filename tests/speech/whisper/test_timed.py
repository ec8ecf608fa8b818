"""Whisper's decoding with times: against openai/whisper and transformers on the same random weights,
and rule by rule."""

import dataclasses
import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import whisper

from common.errors import UsageError
from speech.audio import SAMPLE_RATE
from speech.whisper import decoding, formats, timed
from speech.whisper.model import FRAME, Whisper
from speech.whisper.tokenizer import read_tokenizer, train_bpe

CONFIG = {**formats.make_config(32, (1, 1), 2), "vocab_size": 51_865}
TIMES = range(50_364, 51_865)
EOS = 50_257
# Of whisper.transcribe: one greedy pass, whatever it gives.
ONE_PASS = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
    "language": "vi",
    "suppress_tokens": [EOS + 1],
    "fp16": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """The released one, which the package of openai/whisper brings."""
    assets = Path(whisper.__file__).parent / "assets"
    return read_tokenizer(assets / "multilingual.tiktoken", "vi", CONFIG["vocab_size"])


@functools.cache
def make_model(seed: int, no_speech: float = 0.0) -> Whisper:
    """Random weights so large that tokens depend on the audio. About as often as a text token, one
    of the 1501 times is likely, and the end of text follows after a few tokens."""
    torch.manual_seed(seed)
    model = Whisper(CONFIG).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        embedding = model.decoder.embed_tokens.weight
        embedding[EOS + 1 : TIMES.start] *= 0.1  # nobody suppresses all special tokens alike
        embedding[EOS] *= 3
    return model.requires_grad_(False)


def noise(seconds: float, seed: int) -> torch.Tensor:
    """Noise that changes its level three times a second."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.rand(1, 1, round(3 * seconds), generator=generator)
    count = round(seconds * SAMPLE_RATE)
    level = F.interpolate(levels, count, mode="linear")[0, 0]
    return 0.1 * level * torch.randn(count, generator=generator)


def read_as_others(monkeypatch, waveform: torch.Tensor) -> None:
    """One greedy pass over the features that they compute: of the whole recording, cut into windows,
    the last of which is filled with zeros. Loops stay."""
    features = whisper.audio.log_mel_spectrogram(waveform, padding=30 * SAMPLE_RATE)

    def encode(model, window):
        begin = window.storage_offset() // 160
        part = features[:, begin : begin + len(window) // 160]
        return model.encoder(F.pad(part, (0, 3000 - part.shape[1]))[None]), None

    monkeypatch.setattr(timed, "_encode", encode)
    monkeypatch.setattr(decoding, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(decoding, "NO_SPEECH_THRESHOLD", 2.0)
    monkeypatch.setattr(decoding, "cut_loops", lambda text: text)


def search_of(tokenizer, **changed) -> decoding.Search:
    search = decoding.make_search(tokenizer, {}, CONFIG["vocab_size"])
    return dataclasses.replace(timed.make_search(tokenizer, search), **changed)


def rows(segments) -> list[tuple[float, float, str]]:
    return [
        (round(float(part["start"]), 2), round(float(part["end"]), 2), part["text"].strip())
        for part in segments
        if part["text"].strip()
    ]


def theirs(model: Whisper) -> whisper.model.Whisper:
    dims = whisper.model.ModelDimensions(**formats.config_to_dims(CONFIG))
    other = whisper.model.Whisper(dims)
    other.load_state_dict(formats.hf_to_openai(model.state_dict()))
    return other.eval()


# --- against the stock programs -------------------------------------------------------------------


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("seed", [2, 5])
def test_the_same_segments_as_openai_whisper(seed, context, tokenizer, monkeypatch):
    if not context:
        monkeypatch.setattr(timed, "CONTEXT_TEMPERATURE", -1.0)
    model = make_model(seed)
    waveform = noise(100, seed)
    read_as_others(monkeypatch, waveform)
    ours = timed.transcribe(model, tokenizer, search_of(tokenizer), waveform)
    result = whisper.transcribe(
        theirs(model), waveform, condition_on_previous_text=context, **ONE_PASS
    )
    assert rows(ours["segments"]) == rows(result["segments"])
    assert len(ours["segments"]) > 3
    assert ours["text"].split() == result["text"].split()


def test_windows_that_are_silent_are_skipped_as_in_openai_whisper(tokenizer, monkeypatch):
    """With a threshold between the windows' probabilities of silence."""
    model = make_model(2)
    waveform = noise(100, 2)
    read_as_others(monkeypatch, waveform)
    search = search_of(tokenizer)
    whole = timed.transcribe(model, tokenizer, search, waveform)
    thresholds = {"no_speech_threshold": 1e-9, "logprob_threshold": -2.5}
    monkeypatch.setattr(decoding, "NO_SPEECH_THRESHOLD", thresholds["no_speech_threshold"])
    monkeypatch.setattr(decoding, "LOG_PROBABILITY_THRESHOLD", thresholds["logprob_threshold"])
    ours = timed.transcribe(model, tokenizer, search, waveform)
    result = whisper.transcribe(theirs(model), waveform, **{**ONE_PASS, **thresholds})
    print(rows(whole["segments"]), rows(ours["segments"]))
    assert rows(ours["segments"]) == rows(result["segments"])
    assert 0 < len(ours["segments"]) != len(whole["segments"])


@pytest.mark.parametrize("seed", [2,3,4, 5])
def test_the_same_segments_as_transformers(seed, tokenizer, monkeypatch):
    monkeypatch.setattr(timed, "CONTEXT_TEMPERATURE", -1.0)
    model = make_model(seed)
    waveform = noise(100, seed)
    read_as_others(monkeypatch, waveform)
    ours = timed.transcribe(model, tokenizer, search_of(tokenizer), waveform)
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), EOS)
    other = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**CONFIG, **special, decoder_start_token_id=tokenizer.start)
    ).eval()
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    other.load_state_dict(weights)
    settings = formats.generation_settings(CONFIG, tokenizer, None)
    settings["max_initial_timestamp_index"] = timed.FIRST_TIME
    other.generation_config = transformers.GenerationConfig(**settings)
    features = whisper.audio.log_mel_spectrogram(waveform)[None]
    result = other.generate(
        features, return_timestamps=True, return_segments=True, condition_on_prev_tokens=False
    )
    segments = result["segments"][0]
    for part in segments:
        part["text"] = tokenizer.decode(part["tokens"].tolist())
    assert rows(ours["segments"]) == rows(segments)
    assert len(ours["segments"]) > 3
