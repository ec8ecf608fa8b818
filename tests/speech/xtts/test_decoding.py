"""Speaking with XTTS: sentences, latents, sampling, ends of clips. The GPT is a tiny one in
float64, with the interface of the recipe's."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.errors import RunError, UsageError
from speech.xtts import inference
from speech.xtts.inference import Sampling, sample, split_sentences

CODES, START, STOP = 20, 20, 21
CONFIG = {
    "text_positions": 12, "mel_positions": 40, "audio_tokens": 22, "codes": CODES,
    "start_text": 9, "stop_text": 0, "start_audio": START, "stop_audio": STOP,
}  # fmt: skip
GREEDY = Sampling(top_k=1, repetition_penalty=1.0, max_codes=20)
RATE = 22_050


class TinyGPT(nn.Module):
    """Two layers of causal attention with a cache, final norm, learned positions, and weights so
    large that every token matters. `stop` is the bias of STOP."""

    def __init__(self, seed: int = 0, stop: float = 2.0, width: int = 8, heads: int = 2):
        super().__init__()
        torch.manual_seed(seed)
        self.heads, self.calls = heads, []
        self.text, self.text_positions = (
            nn.Embedding(10, width),
            nn.Embedding(CONFIG["text_positions"], width),
        )
        self.mel, self.mel_positions = (
            nn.Embedding(22, width),
            nn.Embedding(CONFIG["mel_positions"], width),
        )
        self.layers = nn.ModuleList(
            nn.ModuleList(
                (nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width))
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 22)
        self.double()
        for embedding in (self.text, self.mel, self.mel_positions):
            embedding.weight.data *= 3
        for linear in (*(linear for layer in self.layers for linear in layer), self.head):
            linear.weight.data *= 3
        self.head.bias.data[STOP] = stop

    def condition(self, mels):
        return mels.mean(2)[:, None].repeat(1, 32, 1) * torch.arange(1, 33)[:, None]

    def embed_text(self, ids):
        return self.text(ids) + self.text_positions(torch.arange(ids.shape[1]))

    def embed_mel(self, codes, first):
        return self.mel(codes) + self.mel_positions(torch.arange(first, first + codes.shape[1]))

    def run(self, x, cache=None):
        self.calls.append(len(x))
        mask = torch.ones(
            x.shape[1], x.shape[1] + (cache[0][0].shape[2] if cache else 0), dtype=torch.bool
        )
        mask = mask.tril(mask.shape[1] - mask.shape[0])
        kept = []
        for number, (qkv, out, mlp) in enumerate(self.layers):
            q, k, v = (
                part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, 2)
            )
            if cache:
                k, v = (
                    torch.cat([old, new], 2) for old, new in zip(cache[number], (k, v), strict=True)
                )
            kept.append((k, v))
            x = x + out(
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
            )
            x = x + F.gelu(mlp(x))
        return self.norm(x), kept

    def mel_logits(self, hidden):
        return self.head(hidden)


class Ending(TinyGPT):
    """Speaks code 3, with a share for STOP that grows with `growth` for each code: the likeliest
    after `length` codes."""

    def __init__(self, length: int, growth: float = 1.0):
        super().__init__()
        self.length, self.growth = length, growth
        self.said = 0

    def run(self, x, cache=None):
        self.said = 0 if cache is None else self.said + 1
        return super().run(x, cache)

    def mel_logits(self, hidden):
        logits = torch.zeros(*hidden.shape[:2], 22, dtype=torch.float64)
        logits[..., 3] = 20.0
        logits[..., STOP] = 20.0 + self.growth * (self.said - self.length + 0.5)
        return logits


def voice(seed: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(
        1, 32, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def without_cache(model, tokens, settings, numbers) -> tuple[list[int], torch.Tensor]:
    """Sampling by a full forward at every step, with transformers' processors."""
    text = model.embed_text(torch.tensor([[CONFIG["start_text"], *tokens, CONFIG["stop_text"]]]))
    codes = []
    for number in numbers:
        mel = model.embed_mel(torch.tensor([[START, *codes]]), 0)
        hidden = model.run(torch.cat([voice(), text, mel], 1))[0][:, text.shape[1] + 32 :]
        logits = model.mel_logits(hidden)[:, -1]
        logits[:, START] = -math.inf
        scores = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)(
            torch.tensor([codes]).long(), logits
        )
        scores = TemperatureLogitsWarper(settings.temperature)(None, scores)
        scores = TopKLogitsWarper(settings.top_k)(None, scores)
        scores = TopPLogitsWarper(settings.top_p)(None, scores)
        total = scores.softmax(1).cumsum(1)[0].tolist()
        code = next(token for token, share in enumerate(total) if share > number * total[-1])
        if STOP in (code, int(logits.argmax())):
            break
        codes.append(code)
    return codes, hidden[0]


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [GREEDY, Sampling(seed=3), Sampling(1.5, 12, 0.95, 2.0, seed=5)]
)
@pytest.mark.parametrize("model_seed", [0, 1, 2])
def test_the_cache_changes_nothing(settings, model_seed):
    model = TinyGPT(model_seed)
    generator = torch.Generator().manual_seed(settings.seed)
    numbers = torch.rand(
        2, min(39, settings.max_codes), dtype=torch.float64, generator=generator
    ).tolist()
    for tokens in ([1, 2, 3], [4], [5, 6, 7, 8, 1]):
        [speech] = sample(model, CONFIG, voice(), [tokens], settings)
        codes, hidden = without_cache(model, tokens, settings, numbers[speech.draws - 1])
        assert speech.codes.tolist() == codes
        assert len(speech.latents) == len(codes) + speech.ended
        torch.testing.assert_close(speech.latents, hidden, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [GREEDY, Sampling(seed=1), Sampling(1.2, 0, 1.0, 1.0, seed=4)])
def test_a_batch_of_different_lengths_equals_one_by_one(settings):
    generator = torch.Generator().manual_seed(0)
    sentences = [
        torch.randint(1, 9, (1 + number % 3,), generator=generator).tolist() for number in range(27)
    ]
    model = TinyGPT()
    together = sample(model, CONFIG, voice(), sentences, settings)
    assert (
        max(model.calls) == inference.ROWS and len({len(speech.codes) for speech in together}) > 3
    )
    for tokens, speech in zip(sentences, together, strict=True):
        [alone] = sample(model, CONFIG, voice(), [tokens], settings)
        assert (alone.codes.tolist(), alone.ended, alone.draws) == (
            speech.codes.tolist(),
            speech.ended,
            speech.draws,
        )
        torch.testing.assert_close(alone.latents, speech.latents, rtol=0, atol=1e-12)


def test_a_seed_makes_it_repeatable():
    model, sentences = TinyGPT(stop=0.0), [[1, 2], [3, 4, 5]]
    runs = {
        seed: [
            [
                speech.codes.tolist()
                for speech in sample(model, CONFIG, voice(), sentences, Sampling(1.5, seed=seed))
            ]
            for _ in range(2)
        ]
        for seed in range(4)
    }
    assert all(first == second for first, second in runs.values())
    assert len({str(first) for first, _ in runs.values()}) == 4


def test_nothing_but_codes_is_drawn():
    """START and the tokens beyond the codes are likeliest, and are neither codes nor an end."""

    class Astray(TinyGPT):
        def mel_logits(self, hidden):
            logits = super().mel_logits(hidden)
            logits[..., [START, 18, 19]] += 50.0
            return logits

    speeches = sample(
        Astray(stop=-3.0),
        CONFIG | {"codes": 18},
        voice(),
        [[1, 2], [3]],
        Sampling(3.0, 0, 1.0, 1.0),
    )
    codes = [code for speech in speeches for code in speech.codes.tolist()]
    assert len(codes) > 10 and max(codes) < 18


@pytest.mark.parametrize("length", [0, 1, 7])
def test_it_ends_where_stop_is_the_likeliest_whatever_is_drawn(length, capsys):
    """STOP leads by so little that half of the draws would miss it."""
    for seed in range(8):
        settings = Sampling(1.0, 2, 1.0, 1.0, seed=seed)
        [speech] = sample(Ending(length, growth=1e-9), CONFIG, voice(), [[1]], settings)
        assert speech.ended and speech.draws == 1 and len(speech.codes) <= length
        assert speech.latents.shape == (len(speech.codes) + 1, 8)
        if length == 0:
            assert speech.codes.shape == (0,) and speech.codes.dtype == torch.long
    greedy = sample(Ending(length), CONFIG, voice(), [[1], [2]], GREEDY)
    assert [speech.codes.tolist() for speech in greedy] == [[3] * length] * 2
    assert not capsys.readouterr().out


def test_the_penalty_for_repetition_does_not_end_a_sentence():
    """Once code 3 was spoken, the penalty makes STOP the most probable, although the model itself
    still prefers code 3."""

    class Close(TinyGPT):
        def mel_logits(self, hidden):
            logits = torch.full((*hidden.shape[:2], 22), -50.0, dtype=torch.float64)
            logits[..., 3] = 0.5
            logits[..., STOP] = 0.4
            return logits

    lengths = [
        len(sample(Close(), CONFIG, voice(), [[1]], Sampling(1.0, seed=seed, top_p=1.0))[0].codes)
        for seed in range(20)
    ]
    assert max(lengths) > 2 and min(lengths) == 0


def test_a_sentence_without_an_end_is_drawn_once_more(capsys):
    """A model that ends only in its second draw, and one that never does."""

    class Second(Ending):
        def run(self, x, cache=None):
            self.prefills = getattr(self, "prefills", 0) + (cache is None)
            self.length = 4 if self.prefills > 1 else 1000
            return super().run(x, cache)

    settings = Sampling(top_k=1, repetition_penalty=1.0, max_codes=10)
    [speech] = sample(Second(1000), CONFIG, voice(), [[1]], settings)
    assert speech.ended and speech.draws == 2 and speech.codes.tolist() == [3] * 4
    assert (
        capsys.readouterr().out
        == "sentence 1 reached the limit of 10 codes and was drawn once more\n"
    )
    [speech] = sample(Ending(1000), CONFIG, voice(), [[1]], settings)
    assert not speech.ended and speech.draws == 2
    assert len(speech.codes) == len(speech.latents) == 10
    assert "sentence 1 reached the limit of 10 codes twice: " in capsys.readouterr().out


def test_the_second_draw_has_other_numbers_and_is_for_those_who_need_it():
    sentences = [[1, 2], [3, 4], [5, 6], [7, 8]]
    model, settings = TinyGPT(stop=1.0), Sampling(2.0, 0, 1.0, 1.0, max_codes=15)
    speeches = sample(model, CONFIG, voice(), sentences, settings)
    again = [number for number, speech in enumerate(speeches) if speech.draws == 2]
    assert 0 < len(again) < 4
    numbers = torch.rand(
        2, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).tolist()
    for tokens, speech in zip(sentences, speeches, strict=True):
        expected = without_cache(
            model, tokens, Sampling(2.0, 22, 1.0, 1.0), numbers[speech.draws - 1]
        )[0]
        assert speech.codes.tolist() == expected
        assert (
            len(without_cache(model, tokens, Sampling(2.0, 22, 1.0, 1.0), numbers[0])[0]) == 15
        ) == (speech.draws == 2)


def test_the_positions_of_the_model_are_a_limit_too():
    [speech] = sample(
        Ending(1000), CONFIG, voice(), [[1]], Sampling(top_k=1, repetition_penalty=1.0)
    )
    assert len(speech.codes) == CONFIG["mel_positions"] - 1
    assert Sampling().max_codes == 602


def test_bad_input_is_one_line():
    with pytest.raises(UsageError, match="sentence 2 has 11 tokens: shorten it to 10"):
        sample(TinyGPT(), CONFIG, voice(), [[1] * 10, [1] * 11], GREEDY)
    with pytest.raises(RunError, match="not finite at code 0"):
        sample(TinyGPT(), CONFIG, voice() * math.nan, [[1]], GREEDY)
    assert sample(TinyGPT(), CONFIG, voice(), [], GREEDY) == []


@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(1, 40),
    top_p=st.floats(0.01, 1),
    penalty=st.floats(1, 10),
)
def test_filters_are_those_of_transformers(seed, temperature, top_k, top_p, penalty):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(3, 30, dtype=torch.float64, generator=generator)
    history = torch.randint(0, 30, (3, 8), generator=generator)
    seen = torch.zeros(3, 30, dtype=torch.bool).scatter(1, history, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    expected = TemperatureLogitsWarper(temperature)(None, expected)
    expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    result = inference.filter_logits(logits, seen, Sampling(temperature, top_k, top_p, penalty))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_filters_can_be_off():
    logits = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert inference.filter_logits(
        logits, torch.ones(2, 30, dtype=torch.bool), Sampling(1.0, 0, 1.0, 1.0)
    ).equal(logits)


def test_draws_have_the_frequencies_of_the_probabilities():
    probabilities = torch.tensor([[0.1, 0.0, 0.6, 0.3]], dtype=torch.float64)
    drawn = [
        int(inference.pick(probabilities.log(), (number + 0.5) / 1000)) for number in range(1000)
    ]
    assert [drawn.count(token) for token in range(4)] == [100, 0, 600, 300]


# --- voice ----------------------------------------------------------------------------------------


def chunks_of(*seconds: float) -> list[int]:
    """The lengths of the chunks that are encoded, in samples."""
    lengths = []

    def mel(waveforms):
        lengths.append(waveforms.shape[1])
        return waveforms.mean(1).expand(1, 8, 5)

    waveforms = [torch.ones(round(second * RATE)) for second in seconds]
    assert inference.latents(TinyGPT(), mel, waveforms).shape == (1, 32, 8)
    return lengths


def test_chunks_of_a_reference():
    chunk = 4 * RATE
    assert chunks_of(4) == [chunk]
    assert chunks_of(3.5) == [round(3.5 * RATE)]
    assert chunks_of(9) == [chunk, chunk, RATE]
    assert chunks_of(30) == chunks_of(31) == chunks_of(300) == [chunk] * 7 + [2 * RATE]
    assert chunks_of(8.32) == [chunk, chunk]
    assert chunks_of(8.34) == [chunk, chunk, round(0.34 * RATE)]
    assert chunks_of(5, 0.1, 40) == [chunk, RATE] + [chunk] * 7 + [2 * RATE]
    assert chunks_of(7277 / RATE) == [7277]  # 0.33 s are 7,276.5 samples


def test_latents_are_the_mean_over_chunks_and_files():
    model, generator = TinyGPT(), torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(seconds * RATE, dtype=torch.float64, generator=generator) for seconds in (6, 3)
    )

    def mel(waveforms):
        return waveforms[:, :800].reshape(1, 8, 100) * waveforms.std()

    expected = [
        model.condition(mel(chunk[None]))
        for chunk in (first[: 4 * RATE], first[4 * RATE :], second)
    ]
    result = inference.latents(model, mel, [first, second])
    torch.testing.assert_close(result, sum(expected) / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [(), (0,), (7276,), (7276, 5000)])
def test_a_reference_that_is_too_short_is_refused(samples):
    with pytest.raises(UsageError, match=r"shorter than 0\.33 s: give a longer --speaker_wav"):
        inference.latents(TinyGPT(), None, [torch.ones(count) for count in samples])


# --- text -----------------------------------------------------------------------------------------


def bare(text: str) -> str:
    return "".join(text.split())


@given(text=st.text("ab ሰላም።፧፣፤፡.!?,;:»«\"'()3\n\t", max_size=80), most=st.integers(1, 30))
def test_nothing_is_lost_and_every_piece_is_within_the_limit(text, most):
    for count in (len, lambda piece: len(piece.split())):
        pieces = split_sentences(text, most, count)
        assert bare("".join(pieces)) == bare(text)
        assert all(
            piece == " ".join(piece.split()) and 0 < count(piece) <= most for piece in pieces
        )


@given(text=st.text(max_size=60), most=st.integers(2, 40))
def test_any_text_with_a_count_that_is_not_additive(text, most):
    def count(piece):
        """Like a tokenizer that merges pairs of equal characters and adds a language token."""
        tokens, previous = 1, None
        for character in piece:
            previous = None if character == previous else character
            tokens += previous is not None
        return tokens

    pieces = split_sentences(text, most, count)
    assert bare("".join(pieces)) == bare(text)
    assert all(0 < count(piece) <= most for piece in pieces)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("ሰላም ለዓለም።እንዴት ነህ፧ ደህና!", ["ሰላም ለዓለም።", "እንዴት ነህ፧", "ደህና!"]),
        (
            "What? 3.5 and 1,000 at 12:30. Yes... no",
            ["What?", "3.5 and 1,000 at 12:30.", "Yes...", "no"],
        ),
        ("«ሰላም።» አለ። «ደህና ነኝ።»", ["«ሰላም።»", "አለ።", "«ደህና ነኝ።»"]),
        ("ሰላም፡፡ ደህና:: እሺ", ["ሰላም፡፡", "ደህና::", "እሺ"]),
        ("No! ! ?? Yes ?!", ["No! ! ??", "Yes ?!"]),
        ('He said "go." "Why?"', ['He said "go."', '"Why?"']),
        ("... so", ["... so"]),
        ("a. « b", ["a.", "« b"]),
        ("?!", ["?!"]),
        ("one\n two", ["one two"]),
        ("", []),
        (" \n\t\u00a0", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text, 100, len) == sentences


def test_a_long_sentence_is_cut_at_commas_then_at_spaces_then_by_force():
    assert split_sentences("አበበ በሶ በላ፣ ጫላ ጩቤ ጨበጠ፤ ከበደ ሄደ።", 12, len) == [
        "አበበ በሶ በላ፣",
        "ጫላ ጩቤ ጨበጠ፤",
        "ከበደ ሄደ።",
    ]
    assert split_sentences("አበበ በሶ በላ፣ ጫላ ጩቤ ጨበጠ፤ ከበደ ሄደ።", 25, len) == [
        "አበበ በሶ በላ፣ ጫላ ጩቤ ጨበጠ፤",
        "ከበደ ሄደ።",
    ]
    assert split_sentences("a, b c d, e", 5, len) == ["a,", "b c", "d, e"]
    assert split_sentences("አንድ ሁለት ሦስት", 8, len) == ["አንድ ሁለት", "ሦስት"]
    assert split_sentences("አንድ፡ሁለት፡ሦስት", 8, len) == ["አንድ፡ሁለት፡", "ሦስት"]
    assert split_sentences("abcdefgh", 3, len) == ["abc", "def", "gh"]
    assert split_sentences("ab cdefgh i", 4, len) == ["ab", "cdef", "gh i"]


def test_one_very_long_word():
    text = "ሀ" * 3000
    pieces = split_sentences(text, 200, len)
    assert [len(piece) for piece in pieces] == [200] * 15 and "".join(pieces) == text


@pytest.mark.parametrize("unit", [".", "! « ", "?! ", ", ", "» ", "a.", "a b, ", "፡", "::"])
def test_long_texts_take_linear_time(unit, no_hang):
    """Quadratic time would be minutes."""
    pieces = split_sentences(unit * 25_000, 200, len)
    assert bare("".join(pieces)) == bare(unit) * 25_000


def test_a_character_beyond_the_limit_is_refused():
    with pytest.raises(UsageError, match="the character 'b' has more than 2 tokens"):
        split_sentences("ab", 2, lambda piece: 3 * len(piece) if "b" in piece else len(piece))


# --- waveforms ------------------------------------------------------------------------------------


def tone(seconds: float, rate: int = 24_000, level: float = 0.5) -> torch.Tensor:
    return level * torch.sin(torch.arange(round(seconds * rate)) * 0.3)


@pytest.mark.parametrize("rate", [22_050, 24_000])
@pytest.mark.parametrize("noise", [0.0, 0.001])
@pytest.mark.parametrize(
    ("tail", "kept"), [(0.0, 0.0), (0.15, 0.15), (0.3, 0.3), (0.9, 0.3), (5.0, 0.3)]
)
def test_quiet_above_a_third_of_a_second_is_cut(rate, noise, tail, kept):
    random = torch.Generator().manual_seed(0)
    quiet = noise * torch.randn(round(tail * rate), generator=random)
    waveform = torch.cat([tone(0.5, rate), quiet, tone(0.5, rate), quiet])
    before = waveform.clone()
    result = inference.finish(waveform, rate)
    speech = len(waveform) - len(quiet)
    assert abs(len(result) - speech - kept * rate) <= 0.01 * rate  # a frame
    fade = round(0.005 * rate)
    assert result[:-fade].equal(waveform[: len(result) - fade])
    assert result[-1] == 0 and waveform.equal(before)


def test_the_fade_is_a_ramp():
    result = inference.finish(torch.ones(24_000), 24_000)
    assert len(result) == 24_000 and result[-121:-119].tolist() == pytest.approx([1, 1 - 1 / 120])
    assert result.diff()[-120:].tolist() == pytest.approx([-1 / 120] * 120, abs=1e-6)


def test_a_soft_voice_is_not_quiet():
    assert len(inference.finish(tone(2.0, level=0.002), 24_000)) == 48_000


@pytest.mark.parametrize("level", [0.0, 5e-5])
def test_silence_alone(level):
    assert len(inference.finish(tone(2.0, level=level), 24_000)) == round(0.3 * 24_000)


@pytest.mark.parametrize("samples", [0, 1, 2, 119, 120, 121, 240, 241])
def test_very_short_clips(samples):
    result = inference.finish(torch.ones(samples), 24_000)
    assert len(result) == samples and result.isfinite().all()
    assert not samples or result[-1] == 0


def test_join_finishes_every_sentence():
    parts = [torch.cat([tone(0.2), torch.zeros(24_000)]), tone(0.3)]
    joined = inference.join(parts, 24_000)
    assert joined.equal(torch.cat([inference.finish(part, 24_000) for part in parts]))
    assert abs(len(joined) - 0.8 * 24_000) <= 240
