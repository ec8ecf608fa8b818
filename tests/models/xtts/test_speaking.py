"""Speaking: the manifests and files of held-out sentences, voices, similarity, limits; sentences of
a text, latents of reference clips, ends of clips. The GPT says fixed codes."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from torch import nn

from models.xtts import codec, decoding, speaking
from models.xtts.codec import DVAE, SAMPLE_RATE, SAMPLES_PER_CODE, Mel
from models.xtts.decoding import Sampling
from models.xtts.formats import Conditioning
from models.xtts.frozen import Frozen
from models.xtts.speaking import Synthesiser, speakers_of
from models.xtts.vocoder import OUTPUT_RATE
from speech.data.columns import Corpus
from speech.data.splits import Checks, load_corpus, read_manifests
from speech.signal import spectra
from speech.writing.text import normalise
from tests.models.xtts.small import small_vocoder

CONFIG = {"mel_channels": 80, "dvae_hidden": 8, "codes": 12, "code_dim": 4}
WIDTH, KINDS = 8, ("reference", "resynthesis", "synthesis")
# Text, speaker, seconds.
ROWS = (("one|two", "a", 0.6), ("three", "b", 2.5), ("four  five", "a", 1.0), ("six", "c", 0.7))


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """The phases of the resynthesis are not what is tested here."""
    monkeypatch.setattr(codec, "GRIFFIN_LIM_STEPS", 1)
    monkeypatch.setattr(spectra, "INVERSION_STEPS", 1)


class Voices(nn.Module):
    """A GPT whose latents are the mean of the features."""

    def __init__(self):
        super().__init__()
        self.config = {"latents": 3}
        self.heard = []
        self.weight = nn.Parameter(
            torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(0))
        )

    def condition(self, mels: torch.Tensor) -> torch.Tensor:
        self.heard.append(mels)
        return (mels.mean(2) @ self.weight)[:, None].expand(-1, 3, -1)


class Reader:
    def __init__(self):
        self.languages = []

    def read(self, text: str, language: str | None = None) -> str:
        return text

    def encode_read(self, text: str, language: str | None = None) -> list[int]:
        self.languages.append(language)
        return [*text.encode()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("held_out"), ROWS)


def write_corpus(folder: Path, rows: tuple[tuple[str, str, float], ...]) -> Corpus:
    lines, random = ["audio_filepath\ttext\tspeaker\tlang"], np.random.default_rng(0)
    for number, (text, speaker, seconds) in enumerate(rows):
        samples = 0.1 * random.normal(size=round(seconds * SAMPLE_RATE)) * (1 + number)
        soundfile.write(folder / f"{number}.wav", samples.clip(-1, 1), SAMPLE_RATE)
        lines.append(f"{number}.wav\t{text}\t{speaker}\t{'am' if number else 'de'}")
    (folder / "m.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus, _ = load_corpus(str(folder / "m.tsv"), normalise, Checks())
    assert len(corpus) == len(rows)
    return corpus


def make_frozen() -> Frozen:
    torch.manual_seed(0)
    stats = torch.full((80,), 4.0)
    parts = Mel("dvae", stats), Mel("conditioning", stats), DVAE(CONFIG), small_vocoder(WIDTH)
    return Frozen(*parts).to(torch.device("cpu"))


@pytest.fixture
def said(monkeypatch) -> list[tuple]:
    """What the GPT was asked: (latents, sentences, settings); it says 20 codes each time."""
    calls = []

    def sample(model, config, latents, sentences, settings, texts):
        calls.append((latents, sentences, settings))
        speech = decoding.Speech(torch.arange(20) % 12, torch.randn(21, WIDTH), ended=True)
        return [speech] * len(sentences)

    monkeypatch.setattr(decoding, "sample", sample)
    return calls


def spoken(folder: Path, corpus: Corpus, **changes) -> tuple[str, Voices, Reader]:
    model, reader = Voices(), Reader()
    references = changes.get("references") or speakers_of(corpus)
    synthesiser = Synthesiser(model, make_frozen(), reader, 50, Conditioning())
    settings = changes.get("settings", Sampling())
    return speaking.speak_corpus(folder, synthesiser, corpus, references, settings), model, reader


def test_what_is_written_is_read_as_manifests(corpus, said, tmp_path):
    folder = tmp_path / "new" / "speech"
    line, _, reader = spoken(folder, corpus)
    assert line.startswith(f"4 held-out sentences spoken: {folder}/*_synthesis.wav")
    assert {path.name for path in folder.iterdir()} == {
        "made_from.json",
        *(f"{kind}.csv" for kind in KINDS),
        *(f"00{number}_{kind}.wav" for kind in KINDS for number in (1, 2, 3, 4)),
    }
    rates = {**dict.fromkeys(KINDS, SAMPLE_RATE), "synthesis": OUTPUT_RATE}
    sets = read_manifests(
        {kind: str(folder / f"{kind}.csv") for kind in KINDS}, normalise, Checks(strict=True)
    )
    for kind, read in sets.items():
        assert list(read.texts) == ["one two", "three", "four five", "six"]
        assert list(read.speakers) == ["a", "b", "a", "c"]
        for index, path in enumerate(read.paths):
            assert Path(path).name == f"00{index + 1}_{kind}.wav"
            assert soundfile.info(path).samplerate == rates[kind]
    for index in range(4):
        original, copy = (
            soundfile.read(one.paths[index], dtype="int16")[0]
            for one in (corpus, sets["reference"])
        )
        assert len(original) == len(copy) and np.abs(original.astype(int) - copy).max() <= 1
        longer = float(sets["resynthesis"].seconds[index] - corpus.seconds[index]) * SAMPLE_RATE
        assert -1 < longer < SAMPLES_PER_CODE, "it does not end with the recording"
    assert set(reader.languages) == {"de", "am"} and [*said[0][1]] == [[*b"one|two"]]


def test_the_similarity_is_the_mean_cosine(corpus, tmp_path, monkeypatch):
    vectors = {
        True: iter([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [1.0, 0.0]]),
        False: iter([[1.0, 0.0]] * 3),
    }
    monkeypatch.setattr(
        Frozen,
        "speaker",
        lambda self, _, rate=SAMPLE_RATE: torch.tensor([next(vectors[rate == 24_000])]),
    )
    monkeypatch.setattr(speaking, "speak", lambda *_: [torch.full((24_000,), 0.1)])
    assert "speaker similarity: 0.65 " in spoken(tmp_path, corpus)[0]


def test_a_sentence_may_have_twice_the_codes_of_its_recording(corpus, said, tmp_path):
    spoken(tmp_path, corpus, settings=Sampling(top_k=7, seed=3))
    codes = [-(-round(seconds * SAMPLE_RATE) // SAMPLES_PER_CODE) for *_, seconds in ROWS]
    expected = [max(40, 2 * count) for count in codes]
    assert [settings.max_codes for *_, settings in said] == expected and max(expected) > 100
    assert all((settings.top_k, settings.seed) == (7, 3) for *_, settings in said)
    said.clear()
    spoken(tmp_path, corpus, settings=Sampling(max_codes=50))
    assert [settings.max_codes for *_, settings in said] == [min(50, most) for most in expected]


def test_each_speaker_has_one_voice_from_the_references(corpus, said, tmp_path):
    _, model, _ = spoken(tmp_path, corpus)
    assert len(model.heard) == 3
    latents = [latents for latents, *_ in said]
    assert torch.equal(latents[0], latents[2])
    assert not torch.equal(latents[0], latents[1]) and not torch.equal(latents[1], latents[3])
    frozen, model = make_frozen(), Voices()
    clip = speakers_of(corpus)["a"]  # 1.0 s is nearer to 10 s than 0.6 s is
    assert len(clip) == SAMPLE_RATE
    synthesiser = Synthesiser(model, frozen, Reader(), 50, Conditioning())
    voice = speaking.voice_of(synthesiser, [torch.from_numpy(clip) / 32768])
    assert torch.allclose(voice.latents, latents[0])


def test_an_unknown_speaker_gets_the_first_reference(said, tmp_path):
    rows = (("one", "a", 1.0), ("two", "stranger", 1.0), ("three", "", 1.0))
    corpus = write_corpus(tmp_path, rows)
    other = np.full(SAMPLE_RATE, 900, np.int16)
    references = {"a": speakers_of(corpus)["a"], "b": other}
    spoken(tmp_path / "out", corpus, references=references)
    latents = [latents for latents, *_ in said]
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])
    lines = (tmp_path / "out" / "synthesis.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "audio_file|text|speaker_name"
    names = [line.split("|")[2] for line in lines[1:]]
    assert names == ["a", "stranger", "speaker"]


def test_a_sentence_without_codes_is_silent_and_long_texts_are_cut(said, monkeypatch):
    model, frozen = Voices(), make_frozen()
    settings, synthesiser = Sampling(), Synthesiser(model, frozen, Reader(), 9, Conditioning())
    voice = speaking.voice_of(synthesiser, [torch.randn(SAMPLE_RATE) * 0.1])
    assert voice.latents.shape == (1, 3, WIDTH)
    [waveform] = speaking.speak(synthesiser, ["one two. three"], voice, settings)
    sentences, given_settings = said[0][1:]
    assert [bytes(each) for each in sentences] == [b"one two.", b"three"]
    assert given_settings is settings
    [once] = speaking.speak(synthesiser, ["three"], voice, settings)
    assert len(waveform) > 1.5 * len(once) > 0 and waveform.ndim == 1
    nothing = decoding.Speech(torch.zeros(0, dtype=torch.long), torch.zeros(1, WIDTH), ended=True)
    monkeypatch.setattr(decoding, "sample", lambda *_: [nothing])
    [silence] = speaking.speak(synthesiser, ["a"], voice, settings)
    assert not silence.abs().gt(0).any()


def test_samples_beyond_the_range_are_clamped():
    samples = speaking.int16(torch.tensor([0.0, 1.0, -1.0, 3.0, -3.0, 0.5], dtype=torch.float16))
    expected = [0, 32767, -32767, 32767, -32767, 16384]
    assert samples.dtype == np.int16 and samples.tolist() == expected


# --- voice ----------------------------------------------------------------------------------------


class Listener:
    """A GPT whose latents are multiples of the mean of the features."""

    def condition(self, mels: torch.Tensor) -> torch.Tensor:
        return mels.mean(2)[:, None].repeat(1, 32, 1) * torch.arange(1, 33)[:, None]


def chunks_of(seconds: float, limit: int = 30, chunk: int = 4) -> list[int]:
    """The lengths of the chunks that are encoded, in samples."""
    lengths = []

    def mel(waveforms):
        lengths.append(waveforms.shape[1])
        return waveforms.mean(1).expand(1, 8, 5)

    waveform = torch.ones(round(seconds * SAMPLE_RATE))
    limits = Conditioning(gpt_cond_len=limit, gpt_cond_chunk_len=chunk)
    assert speaking.latents_of(Listener(), mel, waveform, limits).shape == (1, 32, 8)
    return lengths


def test_chunks_of_a_reference():
    chunk = 4 * SAMPLE_RATE
    assert chunks_of(4) == [chunk]
    assert chunks_of(3.5) == [round(3.5 * SAMPLE_RATE)]
    assert chunks_of(9) == [chunk, chunk, SAMPLE_RATE]
    assert chunks_of(30) == chunks_of(31) == chunks_of(300) == [chunk] * 7 + [2 * SAMPLE_RATE]
    assert chunks_of(8.32) == [chunk, chunk]
    assert chunks_of(8.34) == [chunk, chunk, round(0.34 * SAMPLE_RATE)]
    assert chunks_of(9, limit=5) == [chunk, SAMPLE_RATE]
    assert chunks_of(9, chunk=6) == [6 * SAMPLE_RATE, 3 * SAMPLE_RATE]
    assert chunks_of(7277 / SAMPLE_RATE) == [7277]  # 0.33 s are 7,276.5 samples


def test_latents_are_the_mean_over_chunks_of_all_clips_in_a_row():
    model, generator = Listener(), torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(seconds * SAMPLE_RATE, dtype=torch.float64, generator=generator)
        for seconds in (6, 3)
    )

    def mel(waveforms):
        return waveforms[:, :800].reshape(1, 8, 100) * waveforms.std()

    # of the first clip 5 s, of both 7 s
    row = torch.cat([first[: 5 * SAMPLE_RATE], second[: 2 * SAMPLE_RATE]])
    expected = [model.condition(mel(chunk[None])) for chunk in row.split(4 * SAMPLE_RATE)]
    frozen = SimpleNamespace(conditioning_mel=mel, speaker=lambda clips: len(clips))
    lengths = Conditioning(max_ref_len=5, gpt_cond_len=7)
    voice = speaking.voice_of(Synthesiser(model, frozen, None, 9, lengths), [first, second])
    assert len(expected) == voice.speaker == 2
    torch.testing.assert_close(voice.latents, sum(expected) / 2, rtol=0, atol=1e-12)


# --- waveforms ------------------------------------------------------------------------------------


def tone(seconds: float, level: float = 0.5) -> torch.Tensor:
    return level * torch.sin(torch.arange(round(seconds * OUTPUT_RATE)) * 0.3)


@pytest.mark.parametrize("noise", [0.0, 0.001])
@pytest.mark.parametrize(("tail", "kept"), [(0.0, 0.0), (0.15, 0.15), (0.9, 0.3)])
def test_quiet_above_a_third_of_a_second_is_cut(noise, tail, kept):
    random = torch.Generator().manual_seed(0)
    quiet = noise * torch.randn(round(tail * OUTPUT_RATE), generator=random)
    waveform = torch.cat([tone(0.5), quiet, tone(0.5), quiet])
    before = waveform.clone()
    result = speaking.finish(waveform)
    speech = len(waveform) - len(quiet)
    assert abs(len(result) - speech - kept * OUTPUT_RATE) <= 0.01 * OUTPUT_RATE  # a frame
    fade = round(0.005 * OUTPUT_RATE)
    assert result[:-fade].equal(waveform[: len(result) - fade])
    assert result[-1] == 0 and waveform.equal(before)


def test_a_soft_voice_is_not_quiet():
    assert len(speaking.finish(tone(2.0, level=0.002))) == 48_000


@pytest.mark.parametrize("level", [0.0, 5e-5])
def test_silence_alone(level):
    assert len(speaking.finish(tone(2.0, level=level))) == round(0.3 * 24_000)


@pytest.mark.parametrize("samples", [0, 1, 119, 120, 121])
def test_very_short_clips(samples):
    result = speaking.finish(torch.ones(samples))
    assert len(result) == samples and result.isfinite().all()
    assert not samples or result[-1] == 0
