"""Sampling with XTTS."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.errors import RunError
from models.xtts import decoding, formats
from models.xtts.decoding import Sampling, sample
from models.xtts.model import GPT

CODES, START, STOP = 20, 20, 21  # ids; the first is a number
CONFIG = formats.make_config(
    16, 2, 2, 10, CODES, text_positions=12, mel_positions=40, start_text=9, perceiver_heads=2
)
GREEDY = Sampling(top_k=1, repetition_penalty=1.0, max_codes=20)


class TinyGPT(GPT):
    """In float64, with weights so large that every token matters. `stop` is the bias of STOP.
    `calls` are the rows of each call."""

    def __init__(self, seed: int = 1, stop: float = 1.0):
        torch.manual_seed(seed)
        super().__init__(CONFIG)
        self.double().requires_grad_(False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5)
        nn.init.normal_(self.mel_embedding.weight, std=3)
        nn.init.normal_(self.mel_pos_embedding["emb"].weight, std=3)
        self.mel_head.bias[STOP] = stop
        self.calls = []

    def run(self, x, cache=None, heard=None):
        self.calls.append(len(x))
        return super().run(x, cache, heard)


class Ending(TinyGPT):
    """Speaks code 3, with a share for STOP that grows with `growth` for each code: the likeliest
    after `length` codes."""

    def __init__(self, length: int, growth: float = 1.0):
        super().__init__()
        self.length, self.growth = length, growth
        self.said = 0

    def run(self, x, cache=None, heard=None):
        self.said = 0 if cache is None else self.said + 1
        return super().run(x, cache, heard)

    def mel_logits(self, hidden):
        logits = torch.zeros(*hidden.shape[:2], 22, dtype=torch.float64)
        logits[..., 3] = 20.0
        logits[..., STOP] = 20.0 + self.growth * (self.said - self.length + 0.5)
        return logits


def voice() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 32, CONFIG["d_model"], dtype=torch.float64, generator=generator)


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
    assert max(model.calls) == decoding.ROWS and len({len(speech.codes) for speech in together}) > 3
    for tokens, speech in zip(sentences, together, strict=True):
        [alone] = sample(model, CONFIG, voice(), [tokens], settings)
        assert torch.equal(alone.codes, speech.codes)
        assert (alone.ended, alone.draws) == (speech.ended, speech.draws)
        torch.testing.assert_close(alone.latents, speech.latents, rtol=0, atol=1e-12)


def test_nothing_but_codes_is_drawn():
    """START and the tokens beyond the codes are likeliest, and are neither codes nor an end."""

    class Astray(TinyGPT):
        def mel_logits(self, hidden):
            logits = super().mel_logits(hidden)
            logits[..., [START, 18, 19]] += 50.0
            return logits

    model, config = Astray(stop=-3.0), CONFIG | {"codes": 18}
    speeches = sample(model, config, voice(), [[1, 2], [3]], Sampling(3.0, 0, 1.0, 1.0))
    codes = [code for speech in speeches for code in speech.codes.tolist()]
    assert len(codes) > 10 and max(codes) < 18


@pytest.mark.parametrize("length", [0, 1, 7])
def test_it_ends_where_stop_is_the_likeliest_whatever_is_drawn(length, capsys):
    """STOP leads by so little that half of the draws would miss it."""
    for seed in range(8):
        settings = Sampling(1.0, 2, 1.0, 1.0, seed=seed)
        [speech] = sample(Ending(length, growth=1e-9), CONFIG, voice(), [[1]], settings)
        assert speech.ended and speech.draws == 1 and len(speech.codes) <= length
        assert speech.latents.shape == (len(speech.codes) + 1, CONFIG["d_model"])
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

    lengths = []
    for seed in range(20):
        settings = Sampling(1.0, seed=seed, top_p=1.0)
        lengths.append(len(sample(Close(), CONFIG, voice(), [[1]], settings)[0].codes))
    assert max(lengths) > 2 and min(lengths) == 0


def test_a_sentence_without_an_end_is_drawn_once_more(capsys):
    """A model that ends only in its second draw, and one that never does."""

    class Second(Ending):
        def run(self, x, cache=None, heard=None):
            self.prefills = getattr(self, "prefills", 0) + (cache is None)
            self.length = 4 if self.prefills > 1 else 1000
            return super().run(x, cache, heard)

    settings = Sampling(top_k=1, repetition_penalty=1.0, max_codes=10)
    [speech] = sample(Second(1000), CONFIG, voice(), [[1]], settings)
    assert speech.ended and speech.draws == 2 and speech.codes.tolist() == [3] * 4
    assert "reached the limit of 10 codes and was drawn once more" in capsys.readouterr().out
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
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(2, 15, dtype=torch.float64, generator=generator).tolist()
    whole = Sampling(2.0, 22, 1.0, 1.0)
    for tokens, speech in zip(sentences, speeches, strict=True):
        expected = without_cache(model, tokens, whole, numbers[speech.draws - 1])[0]
        assert speech.codes.tolist() == expected
        first = without_cache(model, tokens, whole, numbers[0])[0]
        assert (len(first) == 15) == (speech.draws == 2)


def test_the_positions_of_the_model_are_a_limit_too():
    settings = Sampling(top_k=1, repetition_penalty=1.0)
    [speech] = sample(Ending(1000), CONFIG, voice(), [[1]], settings)
    assert len(speech.codes) == CONFIG["mel_positions"] - 1
    assert Sampling().max_codes == 602


def test_bad_input_is_one_line():
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
    result = decoding.filter_logits(logits, seen, Sampling(temperature, top_k, top_p, penalty))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_draws_have_the_frequencies_of_the_probabilities():
    probabilities = torch.tensor([[0.1, 0.0, 0.6, 0.3]], dtype=torch.float64)
    drawn = [
        int(decoding.pick(probabilities.log(), (number + 0.5) / 1000)) for number in range(1000)
    ]
    assert [drawn.count(token) for token in range(4)] == [100, 0, 600, 300]
