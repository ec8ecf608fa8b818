"""Whisper's decoding with times: against openai/whisper and transformers on the same random
weights, and rule by rule."""

import dataclasses
import functools
import json
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import soundfile
import torch
import torch.nn.functional as F
import transformers
import whisper

from common.errors import UsageError
from models.whisper import decoding, formats, timed
from models.whisper.model import FRAME, Whisper
from models.whisper.tokenizer import (
    WhisperTokenizer,
    joined,
    read_tokenizer,
    special_tokens,
    train_bpe,
)
from recipes import whisper_vietnamese as vietnamese
from speech.decoding.recordings import longest_deletion
from speech.signal.audio import SAMPLE_RATE
from speech.writing import subtitles
from tests.models.whisper.test_formats import peer
from tests.recipes.runs import ran, refused

CONFIG = {**formats.make_config(32, (1, 1), 2), "vocab_size": 51_865}
TIMES = range(50_364, 51_865)
EOS = 50_257
SECONDS = 70.0  # of a recording
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
def make_model(seed: int) -> Whisper:
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
        embedding[:EOS] *= 0.85
        embedding[EOS] *= 2.5
    return model.requires_grad_(False)


def noise(seconds: float, seed: int) -> torch.Tensor:
    """Noise that changes its level three times a second."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.rand(1, 1, round(3 * seconds), generator=generator)
    count = round(seconds * SAMPLE_RATE)
    level = F.interpolate(levels, count, mode="linear")[0, 0]
    return 0.1 * level * torch.randn(count, generator=generator)


def features_of(waveform: torch.Tensor) -> torch.Tensor:
    return whisper.audio.log_mel_spectrogram(waveform, padding=30 * SAMPLE_RATE)


def read_as_others(monkeypatch, waveform: torch.Tensor) -> None:
    """One greedy pass over the features that they compute: of the whole recording, cut into
    windows, the last of which is filled with zeros. Loops stay."""
    features = features_of(waveform)

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
    return dataclasses.replace(timed.make_search(tokenizer, search, "--long"), **changed)


def rows(segments) -> list[tuple[float, float, str]]:
    """Those with text before the end of the recording, which other programs do not look for."""
    result = []
    for part in segments:
        start, end = (min(SECONDS, round(float(part[key]), 2)) for key in ("start", "end"))
        text = " ".join(part["text"].split())
        if text and start < end:
            result.append((start, end, text))
    return result


def theirs(model: Whisper) -> whisper.model.Whisper:
    dims = whisper.model.ModelDimensions(**formats.config_to_dims(CONFIG))
    other = whisper.model.Whisper(dims)
    other.load_state_dict(formats.hf_to_openai(model.state_dict()))
    return other.eval()


# --- against the stock programs -------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "context"), [(1, True), (5, False), (5, True)])
def test_the_same_segments_as_openai_whisper(seed, context, tokenizer, monkeypatch):
    if not context:
        monkeypatch.setattr(timed, "CONTEXT_TEMPERATURE", -1.0)
    model = make_model(seed)
    waveform = noise(SECONDS, seed)
    read_as_others(monkeypatch, waveform)
    ours = timed.transcribe(model, tokenizer, search_of(tokenizer), waveform)
    how = {"condition_on_previous_text": context, **ONE_PASS}
    result = whisper.transcribe(theirs(model), waveform, **how)
    assert rows(ours["segments"]) == rows(result["segments"])
    assert len(ours["segments"]) >= 4
    assert ours["text"] == joined(part["text"] for part in ours["segments"])


def test_windows_without_speech_are_skipped_as_in_openai_whisper(tokenizer, monkeypatch):
    """All texts are improbable, and the threshold is between the windows' probabilities of
    silence."""
    model = make_model(5)
    waveform = noise(SECONDS, 5)
    read_as_others(monkeypatch, waveform)
    search = search_of(tokenizer)
    whole = timed.transcribe(model, tokenizer, search, waveform)
    other = theirs(model)
    segments = other.transcribe(waveform, **ONE_PASS)["segments"]
    silence = [part["no_speech_prob"] for part in segments]
    threshold = (min(silence) + max(silence)) / 2
    monkeypatch.setattr(decoding, "NO_SPEECH_THRESHOLD", threshold)
    monkeypatch.setattr(decoding, "LOG_PROBABILITY_THRESHOLD", 0.0)
    ours = timed.transcribe(model, tokenizer, search, waveform)
    thresholds = {"no_speech_threshold": threshold, "logprob_threshold": 0.0}
    result = whisper.transcribe(other, waveform, **{**ONE_PASS, **thresholds})
    assert rows(ours["segments"]) == rows(result["segments"])
    assert 0 < len(ours["segments"]) < len(whole["segments"])


def test_the_same_segments_as_transformers(tokenizer, monkeypatch):
    monkeypatch.setattr(timed, "CONTEXT_TEMPERATURE", -1.0)
    model = make_model(5)
    waveform = noise(SECONDS, 5)
    read_as_others(monkeypatch, waveform)
    ours = timed.transcribe(model, tokenizer, search_of(tokenizer), waveform)
    other = peer(CONFIG, tokenizer)
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    other.load_state_dict(weights)
    settings = formats.generation_settings(CONFIG, tokenizer, None)
    settings["max_initial_timestamp_index"] = timed.FIRST_TIME
    other.generation_config = transformers.GenerationConfig(**settings)
    features = features_of(waveform)[None, :, : len(waveform) // 160]
    result = other.generate(
        features, return_timestamps=True, return_segments=True, condition_on_prev_tokens=False
    )
    segments = result["segments"][0]
    for part in segments:
        part["text"] = tokenizer.decode(part["tokens"].tolist())
    assert rows(ours["segments"]) == rows(segments)
    assert len(ours["segments"]) >= 4


# --- the rules ------------------------------------------------------------------------------------


def said(kinds: str, random: torch.Generator) -> list[int]:
    """Random tokens: a text token for each "a", a time that is not earlier for each "t"."""
    count = kinds.count("t")
    times = iter(torch.randint(1500, (count,), generator=random).sort().values.tolist())
    texts = iter(torch.randint(EOS, (len(kinds),), generator=random).tolist())
    return [TIMES.start + next(times) if kind == "t" else next(texts) for kind in kinds]


@pytest.mark.parametrize("kinds", ["", "t", "ta", "taa", "tat", "tatt", "tatta", "tattaat"])
def test_the_rules_are_those_of_transformers(kinds):
    random = torch.Generator().manual_seed(0)
    settings = transformers.GenerationConfig(eos_token_id=EOS, bos_token_id=EOS)
    settings.no_timestamps_token_id = TIMES.start - 1
    settings.max_initial_timestamp_index = 50
    processor = transformers.WhisperTimeStampLogitsProcessor(settings, begin_index=3)
    tokens = torch.tensor([said(kinds, random) for _ in range(20)]).long()
    logits = 3 * torch.randn(20, TIMES.stop, generator=random)
    logits[:, TIMES.start - 1] = -torch.inf  # suppressed elsewhere
    logits[::2, : TIMES.start] += 4  # in some rows a text token is more probable than all times
    prompt = torch.full((20, 3), EOS + 1)
    expected = processor(torch.cat([prompt, tokens], 1), logits)
    found = timed.time_rules(TIMES, EOS, logits, tokens)
    assert torch.equal(found, expected)
    allowed = torch.isfinite(found[:, TIMES.start :]).any(1)
    texts = torch.isfinite(found[:, :EOS]).any(1)
    assert allowed.any() == (kinds != "t" and not kinds.endswith("tt"))
    assert texts.any() == (kinds != "" and not kinds.endswith("at"))


def check_lawful(tokens: list[int]) -> None:
    """Segments with text between their times; the last one may lack its end, or its text."""
    assert tokens[0] <= TIMES.start + timed.FIRST_TIME
    kinds = "".join("t" if token in TIMES else "a" for token in tokens)
    assert re.fullmatch("t(a+tt)*(a+t?)?", kinds)
    times = [token for token in tokens if token in TIMES]
    assert times == sorted(times)
    for start, end in zip(times[::2], times[1::2], strict=False):
        assert start < end


def test_every_search_follows_the_rules(tokenizer):
    """Also with a context, whose times are earlier."""
    search = search_of(tokenizer, beam_size=3, max_new_tokens=40)
    model = make_model(1)
    encoded, mask = timed._encode(model, noise(30, 1))
    after = timed.with_context(tokenizer, search, [TIMES.start + 1400, 100, 101], CONFIG)
    hypotheses = []
    for prompted in (search, after):
        inputs = (model, encoded, mask, prompted)
        hypotheses += decoding.greedy(*inputs) + decoding.beam(*inputs)
        generator = torch.Generator().manual_seed(0)
        hypotheses += decoding.sample(*inputs, 0.4, generator)
    for hypothesis in hypotheses:
        check_lawful(hypothesis.tokens)
    assert any(len(hypothesis.tokens) > 5 for hypothesis in hypotheses)


def test_rows_that_wait_for_others_change_nothing(tokenizer, monkeypatch):
    """As on a GPU, where ended texts are looked for at every eighth step only."""
    monkeypatch.setattr(decoding, "TEMPERATURES", (0.0,))
    search = search_of(tokenizer)
    waveform = noise(40, 5)
    expected = timed.transcribe(make_model(5), tokenizer, search, waveform)
    monkeypatch.setitem(decoding.CHECK_EVERY, "cpu", 8)
    assert timed.transcribe(make_model(5), tokenizer, search, waveform) == expected
    assert len(expected["segments"]) > 1


def test_what_a_window_cuts_off_is_decoded_again():
    """Tokens to segments and the place of the next window, in samples."""
    first = TIMES.start
    length = 30 * SAMPLE_RATE
    cut = [first, 1, 2, first + 100, first + 150, 3, first + 1000, first + 1000, 4, 5]
    segments, moved = timed.split(cut, TIMES, length)
    assert segments == [(0, 100 * FRAME, cut[:4]), (150 * FRAME, 1000 * FRAME, cut[4:7])]
    assert moved == 1000 * FRAME  # 4 and 5 come again
    ended = [*cut, first + 1200]  # nobody speaks after it
    segments, moved = timed.split(ended, TIMES, length)
    assert segments[2:] == [(1000 * FRAME, 1200 * FRAME, ended[7:])] and moved == length
    assert timed.split([first, 1, 2], TIMES, length) == ([(0, length, [first, 1, 2])], length)
    segments, moved = timed.split(ended, TIMES, 500 * FRAME)  # a recording ends in the window
    assert [part[:2] for part in segments[1:]] == [(150 * FRAME, 500 * FRAME), (500 * FRAME,) * 2]
    once = [first, 1, first + 7]
    assert timed.split(once, TIMES, length) == ([(0, 7 * FRAME, once)], length)


def test_a_window_that_was_sampled_is_no_context(tokenizer, monkeypatch):
    prompts = []

    def decode(model, tokenizer, encoded, mask, search):
        prompts.append(list(search.prompt))
        number = len(prompts)
        tokens = [TIMES.start, number, TIMES.start + 500, TIMES.start + 500]
        temperature = 0.6 if number == 3 else 0.4
        return [decoding.Hypothesis(tokens, 0.0, True, temperature=temperature)]

    monkeypatch.setattr(decoding, "decode", decode)
    monkeypatch.setattr(timed, "_encode", lambda model, window: (None, None))
    search = search_of(tokenizer)
    timed.transcribe(make_model(1), tokenizer, search, noise(50, 1))
    pairs = [[TIMES.start, number, TIMES.start + 500] for number in (1, 2, 4)]
    previous = tokenizer.previous
    prompt = list(search.prompt)
    assert prompt == tokenizer.prompt[:-1]
    assert prompts == [
        prompt,
        [previous, *pairs[0], *prompt],
        [previous, *pairs[0], *pairs[1], *prompt],
        prompt,
        [previous, *pairs[2], *prompt],
    ]
    half = CONFIG["max_target_positions"] // 2
    long = timed.with_context(tokenizer, search, list(range(1000)), CONFIG)
    assert long.prompt == [previous, *range(1000 - half + 1, 1000), *prompt]
    assert long.prompt[long.start] == tokenizer.start


def test_a_segment_after_the_end_of_the_recording_is_left_out(tokenizer, monkeypatch):
    said = [0, 100, 200, 250, 101, 300]  # texts between times: steps of 20 ms, in 5 s
    tokens = [each if each in (100, 101) else TIMES.start + each for each in said]
    decoded = decoding.Hypothesis(tokens, 0.0, True)
    monkeypatch.setattr(decoding, "decode", lambda *inputs: [decoded])
    monkeypatch.setattr(timed, "_encode", lambda model, window: (None, None))
    found = timed.transcribe(make_model(1), tokenizer, search_of(tokenizer), noise(5, 1))
    assert [(part["start"], part["end"]) for part in found["segments"]] == [(0.0, 4.0)]


def test_digital_silence_is_not_decoded(tokenizer, monkeypatch):
    monkeypatch.setattr(timed, "_encode", lambda *inputs: pytest.fail("silence was decoded"))
    found = timed.transcribe(None, tokenizer, search_of(tokenizer), torch.zeros(0))
    assert found == {"text": "", "segments": []}
    silence = torch.zeros(70 * SAMPLE_RATE)
    found = timed.transcribe(make_model(1), tokenizer, search_of(tokenizer), silence)
    assert found == {"text": "", "segments": []}


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small released model with time tokens, and recordings: two.json lists two whole ones."""
    folder = tmp_path_factory.mktemp("timed")
    plain = train_bpe(["hôm nay trời đẹp", "mẹ đi chợ"], 280, "vi")
    specials = special_tokens(len(plain.vocab), ["vi"], timestamps=True)
    tokenizer = WhisperTokenizer(plain.vocab, plain.merges, specials)
    config = {**formats.make_config(16, (1, 1), 2), "vocab_size": tokenizer.size}
    torch.manual_seed(2)
    model = Whisper(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    model.requires_grad_(False).decoder.embed_tokens.weight[: tokenizer.eos + 1] *= 1.2
    formats.export(folder / "model", model.state_dict(), config, tokenizer, {})
    rows = []
    for name, seconds in (("a", 70), ("b", 33)):
        path = folder / "audio" / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, noise(seconds, seconds).numpy(), SAMPLE_RATE)
        rows.append({"audio_filepath": str(path), "text": f"{name} hôm nay trời đẹp"})
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "two.json").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def one_pass(monkeypatch):
    monkeypatch.setattr(decoding, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(decoding, "NO_SPEECH_THRESHOLD", 2.0)


def test_the_same_segments_are_printed_and_written(folder, tmp_path, one_pass):
    flags = ["--timestamps", "--model_dir", folder / "model", "--transcribe"]
    both = ran(vietnamese, *flags, folder / "audio", "--output", tmp_path / "two.jsonl")
    assert both == ""
    text = (tmp_path / "two.jsonl").read_text(encoding="utf-8")
    recordings = [json.loads(line) for line in text.splitlines()]
    assert [list(row) for row in recordings] == [["file", "text", "seconds", "segments"]] * 2
    segments = recordings[0]["segments"]
    assert len(segments) > 3 and recordings[0]["seconds"] == 70
    assert recordings[0]["text"] == " ".join(part["text"] for part in segments)

    printed = ran(vietnamese, *flags, folder / "audio").splitlines()
    lines = []
    for row in recordings:
        for part in row["segments"]:
            start, end = (subtitles.shown(part[key]) for key in ("start", "end"))
            lines.append(f"{row['file']}\t[{start} --> {end}] {part['text']}")
    assert printed == lines

    one = folder / "audio" / "a.wav"
    for _ in range(2):  # its own subtitles are replaced, and others' are not
        ran(vietnamese, *flags, one, "--output", tmp_path / "a.srt")
        ran(vietnamese, *flags, one, "--output", tmp_path / "a.VTT")
    srt = subtitles.FORMATS[".srt"].whole(recordings[0])
    assert (tmp_path / "a.srt").read_text(encoding="utf-8") == srt
    vtt = subtitles.FORMATS[".vtt"].whole(recordings[0])
    assert (tmp_path / "a.VTT").read_text(encoding="utf-8") == vtt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.VTT", "a.srt", "two.jsonl"]


def test_whole_recordings_are_scored(folder, tmp_path, one_pass):
    flags = ["--evaluate", "--long", folder / "two.json", "--model_dir", folder / "model"]
    flags += ["--export", tmp_path / "exported", "--output_dir", tmp_path]
    out = ran(vietnamese, *flags, "--compare_to", folder / "model")
    table = [line.split() for line in out.splitlines() if line.endswith((".wav", "all"))]
    assert [Path(row[-1]).name for row in table] == ["a.wav", "b.wav", "all"] * 2
    assert [row[5] for row in table[:3]] == ["70.0", "33.0", "103.0"]
    assert [row[2] for row in table[:3]] == ["5", "5", "10"]
    assert table[:3] == table[3:] and "0.0%" in out
    text = (tmp_path / "logs" / "transcripts_long.jsonl").read_text(encoding="utf-8")
    transcripts = [json.loads(line) for line in text.splitlines()]
    assert [row["reference"][0] for row in transcripts] == ["a", "b"]
    assert len(transcripts[0]["segments"]) > 3


def test_recordings_are_listened_to_before_any_is_decoded(folder, tmp_path, one_pass, monkeypatch):
    """The last of three files ends early. No recording is too long, and one is too short."""
    whole = tmp_path / "whole.flac"
    soundfile.write(whole, noise(40, 1).numpy(), SAMPLE_RATE)
    (tmp_path / "cut.flac").write_bytes(whole.read_bytes()[:200_000])
    paths = [folder / "audio" / "b.wav", whole, tmp_path / "cut.flac"]
    rows = [json.dumps({"audio_filepath": str(path), "text": "a"}) + "\n" for path in paths]
    (tmp_path / "three.json").write_text("".join(rows), encoding="utf-8")
    flags = ["--evaluate", "--long", tmp_path / "three.json", "--model_dir", folder / "model"]
    flags += ["--min_duration", 35, "--output_dir", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(timed, "transcribe", lambda *inputs: pytest.fail("decoded already"))
        status, error = refused(vietnamese, *flags)
    assert status == 1 and "cut.flac" in error and "--skip_bad_audio" in error
    out = ran(vietnamese, *flags, "--skip_bad_audio")
    assert "1 whole recordings" in out and "shorter than 35 s" in out


@pytest.mark.parametrize(
    ("reference", "hypothesis", "words"),
    [
        ("a b c d e f", "a b c d e f", 0),
        ("a b c d e f", "", 6),
        ("a b c d e f", "A, x f!", 3),  # b became x
        ("a b c d e f g h", "a d h", 3),
        ("", "a", 0),
    ],
)
def test_the_longest_passage_that_was_dropped(reference, hypothesis, words):
    assert longest_deletion(reference, hypothesis, vietnamese.for_scoring) == words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--transcribe {audio}/a.wav --output {here}/a.srt", "subtitles need times; add --timest"),
        ("--transcribe {audio} --timestamps --output {here}/a.vtt", "it is of one recording"),
        ("--transcribe {audio}/a.wav --timestamps --output {here}/own.srt", "did not write it"),
    ],
)
def test_mistakes(line, message, folder, tmp_path):
    (tmp_path / "own.srt").write_text("Subtitles of mine", encoding="utf-8")
    words = line.format(audio=folder / "audio", here=tmp_path).split()
    status, error = refused(vietnamese, *words, "--model_dir", folder / "model")
    assert status == 2 and message in error
    assert (tmp_path / "own.srt").read_text(encoding="utf-8") == "Subtitles of mine"


def test_a_model_without_time_tokens(folder, tokenizer):
    plain = train_bpe(["hôm nay"], 270, "vi")
    with pytest.raises(UsageError, match="--timestamps: the model has no time tokens"):
        timed.make_search(plain, decoding.make_search(plain, {}, plain.size), "--timestamps")
