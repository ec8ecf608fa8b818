"""Whisper's decoding: against transformers, against searches that recompute everything, and by its
properties."""

import dataclasses
import itertools
import os
from collections import Counter
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from models.whisper import decoding, formats
from models.whisper.decoding import Search
from models.whisper.model import Whisper
from speech.decoding import long
from speech.signal.features import valid_mask
from tests.models.whisper.test_formats import peer

CONFIG = {
    **formats.make_config(16, (1, 2), 2, 8, 40),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    "max_source_positions": 50,
    "max_target_positions": 48,
}
NO_SPEECH, NO_TIMESTAMPS, TASK, EOS, START, LANGUAGE = range(34, 40)
PROMPT = [START, LANGUAGE, TASK, NO_TIMESTAMPS]
SEARCH = Search(PROMPT, EOS)


def make_model(seed=0, eos=EOS, **changed):
    """With weights so large that the tokens depend on the audio and on earlier tokens, and that eos
    sometimes follows."""
    torch.manual_seed(seed)
    model = Whisper({**CONFIG, **changed}).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        model.decoder.embed_tokens.weight[eos] *= 2
    return model.requires_grad_(False)


def inputs(model, count, seed=0, lengths=None):
    """Encoded random features of `count` utterances and their mask."""
    generator = torch.Generator().manual_seed(seed)
    frames = 2 * model.config["max_source_positions"]
    features = 2 * torch.randn(
        count, CONFIG["num_mel_bins"], frames, generator=generator, dtype=torch.float64
    )
    if lengths is None:
        return model.encoder(features), None
    lengths = torch.tensor(lengths)
    encoded = model.encoder(features, lengths)
    return encoded, valid_mask((lengths + 1) // 2, encoded.shape[1])[:, None, None, :]


def log_probs(model, encoded, mask, tokens):
    """(U + 1, V) of the tokens after the prompt and after each of `tokens`, computed without a
    cache."""
    x = model.decoder(torch.tensor([PROMPT + list(tokens)]), encoded, mask)
    return model.logits(x[0, len(PROMPT) - 1 :]).log_softmax(-1)


def tokens_of(hypotheses):
    return [hypothesis.tokens for hypothesis in hypotheses]


# --- against transformers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """The same weights in transformers and here, 50 inputs, and the search for both."""
    model = make_model(3)
    theirs = peer(CONFIG, SimpleNamespace(eos=EOS, start=START)).double()
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    missing = theirs.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["proj_out.weight"] and not missing.unexpected_keys
    features = 2 * torch.randn(50, 8, 100, dtype=torch.float64)
    search = dataclasses.replace(SEARCH, max_new_tokens=32)
    return theirs, model, features, model.encoder(features), search


def transformers_tokens(theirs, features, **options):
    """The search alone, because Whisper's own `generate` never ends with random weights."""
    config = transformers.GenerationConfig(
        max_new_tokens=32,
        eos_token_id=EOS,
        pad_token_id=EOS,
        decoder_start_token_id=START,
        **options,
    )
    prompts = torch.tensor([PROMPT]).expand(len(features), -1)
    with torch.no_grad():
        generated = transformers.GenerationMixin.generate(
            theirs, features, config, decoder_input_ids=prompts
        )
    rows = generated[:, len(PROMPT) :].tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


@pytest.mark.parametrize("suppressed", ["nothing", "everywhere", "at first", "both"])
def test_greedy_is_transformers_own(pair, suppressed):
    """Suppresses the tokens that are generated most often."""
    theirs, model, features, encoded, search = pair
    free = tokens_of(decoding.greedy(model, encoded, None, search))
    often = [token for token, _ in Counter(itertools.chain(*free)).most_common(4)]
    begins = [token for token, _ in Counter(row[0] if row else EOS for row in free).most_common(6)]
    suppress = often * (suppressed in ("everywhere", "both"))
    first = begins * (suppressed in ("at first", "both"))
    options = {"suppress_tokens": suppress or None, "begin_suppress_tokens": first or None}
    expected = transformers_tokens(theirs, features, **options)
    search = dataclasses.replace(search, suppress=suppress, suppress_first=first, beam_size=3)
    tokens = tokens_of(decoding.greedy(model, encoded, None, search))
    assert tokens == expected and (tokens == free) == (suppressed == "nothing")
    lengths = [len(row) for row in expected]
    assert (
        len(set(lengths)) > 5 and max(lengths) == 32 and len({tuple(row) for row in expected}) > 25
    )
    for row in tokens_of(decoding.beam(model, encoded[:10], None, search)):
        assert not set(row) & set(suppress) and (row or [EOS])[0] not in first


@pytest.mark.parametrize("beam_size", [2, 5, 25])
def test_beam_is_transformers_own(pair, beam_size):
    theirs, model, features, encoded, search = pair
    options = {"num_beams": beam_size, "early_stopping": True, "length_penalty": 1.0}
    expected = transformers_tokens(theirs, features[:20], **options)
    search = dataclasses.replace(search, beam_size=beam_size)
    assert tokens_of(decoding.beam(model, encoded[:20], None, search)) == expected


# --- the cache and the batch ----------------------------------------------------------------------


def test_cached_logits_are_those_computed_at_once():
    """Also when rows become beams, beams change places, and utterances leave the batch."""
    model = make_model()
    encoded, mask = inputs(model, 3, lengths=[100, 37, 64])
    random = np.random.default_rng(0)
    kv_cache, logits, _ = decoding._read_prompt(model, encoded, mask, SEARCH)
    utterances, beams = [0, 1, 2], 1
    prefixes = [[] for _ in utterances]
    for step in range(12):
        for row, prefix in enumerate(prefixes):
            place = utterances[row // beams]
            alone = mask[place : place + 1]
            expected = log_probs(model, encoded[place : place + 1], alone, prefix)[-1]
            assert torch.allclose(logits[row].log_softmax(-1), expected, rtol=0, atol=1e-10)
        kept = [0, 2] if step == 6 else range(len(utterances))
        origin = [place * beams + int(random.integers(beams)) for place in kept for _ in range(3)]
        tokens = random.integers(0, 40, len(origin)).tolist()
        narrowed = None if mask is None else mask[torch.tensor(utterances)]
        narrowed = decoding._select(
            kv_cache, narrowed, torch.tensor(origin), list(kept) if step == 6 else None
        )
        prefixes = [[*prefixes[row], token] for row, token in zip(origin, tokens, strict=True)]
        utterances, beams = [utterances[place] for place in kept], 3
        logits = model.logits(
            model.decoder(torch.tensor(tokens)[:, None], encoded, narrowed, kv_cache)[:, -1]
        )


SEARCHES = {
    "greedy": decoding.greedy,
    "sample": lambda *given: decoding.sample(*given, 0.7, torch.Generator().manual_seed(5)),
    "beam": decoding.beam,
}


@pytest.mark.parametrize("every", [1, 8])
@pytest.mark.parametrize("search", SEARCHES)
def test_an_utterance_is_decoded_alike_alone_and_in_a_padded_batch(monkeypatch, search, every):
    monkeypatch.setattr(decoding, "CHECK_EVERY", {"cpu": every})  # as on CUDA
    model = make_model(3)
    lengths = [100, 9, 64, 90, 31, 2, 77, 50]
    generator = torch.Generator().manual_seed(1)
    features = 2 * torch.randn(8, 8, 100, dtype=torch.float64, generator=generator)
    frames = torch.tensor(lengths)
    encoded = model.encoder(features, frames)
    mask = valid_mask((frames + 1) // 2, 50)[:, None, None, :]
    options = Search(PROMPT, EOS, no_speech=NO_SPEECH, max_new_tokens=30, beam_size=4)
    together = SEARCHES[search](model, encoded, mask, options)
    assert len({len(hypothesis.tokens) for hypothesis in together}) > 3
    for row, length in enumerate(lengths):
        features_alone = model.encoder(features[row : row + 1, :, :length])
        (alone,) = SEARCHES[search](model, features_alone, None, options)
        assert alone.tokens == together[row].tokens and alone.ended == together[row].ended
        assert alone.log_probability == pytest.approx(together[row].log_probability, abs=1e-9)
        assert alone.no_speech_probability == pytest.approx(
            together[row].no_speech_probability, abs=1e-10
        )


@pytest.mark.parametrize(("suppress", "every"), [([], 1), ([3, 4, 5], 8)])
@pytest.mark.parametrize("search", SEARCHES)
def test_probabilities_are_those_of_the_tokens(monkeypatch, search, suppress, every):
    monkeypatch.setattr(decoding, "CHECK_EVERY", {"cpu": every})
    model = make_model(3)
    encoded, _ = inputs(model, 20)
    options = Search(PROMPT, EOS, suppress, no_speech=NO_SPEECH, max_new_tokens=25)
    for row, hypothesis in enumerate(SEARCHES[search](model, encoded, None, options)):
        x = model.decoder(torch.tensor([PROMPT + hypothesis.tokens]), encoded[row : row + 1], None)
        logits = model.logits(x[0])
        assert hypothesis.no_speech_probability == pytest.approx(
            float(logits[0].softmax(-1)[NO_SPEECH]), abs=1e-10
        )
        following = logits[len(PROMPT) - 1 :]
        following[:, suppress] = -torch.inf
        following = following.log_softmax(-1)
        tokens = hypothesis.tokens + [EOS] * hypothesis.ended
        assert hypothesis.ended or len(hypothesis.tokens) == 25
        score = float(sum(following[i, token] for i, token in enumerate(tokens)))
        assert hypothesis.log_probability == pytest.approx(score, abs=1e-9)
        assert hypothesis.mean_log_probability == pytest.approx(score / len(tokens), abs=1e-9)


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_what_has_ended_leaves_the_batch(monkeypatch, search):
    model = make_model(3)
    encoded, mask = inputs(model, 12, lengths=[100] * 11 + [60])
    rows, forward = [], model.decoder.forward
    monkeypatch.setattr(
        model.decoder,
        "forward",
        lambda tokens, *rest: rows.append(len(tokens)) or forward(tokens, *rest),
    )
    hypotheses = SEARCHES[search](model, encoded, mask, Search(PROMPT, EOS, max_new_tokens=30))
    if search == "greedy":
        lengths = [len(tokens) for tokens in tokens_of(hypotheses)]
        assert rows[1:] == [
            sum(length > step for length in lengths) for step in range(len(rows) - 1)
        ]
    assert rows[1] > rows[-1]


def test_no_more_tokens_than_the_model_has_positions():
    model = make_model(max_target_positions=11)
    encoded, _ = inputs(model, 3)
    for search in (decoding.greedy, decoding.beam):
        hypotheses = search(model, encoded, None, Search(PROMPT, EOS, [EOS], max_new_tokens=100))
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == [7, 7, 7]
        assert not any(hypothesis.ended for hypothesis in hypotheses)


# --- beam and sampling ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_a_wide_beam_is_exhaustive(seed):
    size, eos, max_new_tokens, prompt = 5, 4, 4, [3]
    model = make_model(seed, vocab_size=size, eos=eos)
    encoded, _ = inputs(model, 2, seed)
    hypotheses = decoding.beam(
        model, encoded, None, Search(prompt, eos, max_new_tokens=max_new_tokens, beam_size=700)
    )
    sequences = [
        [*tokens, last]
        for length in range(max_new_tokens)
        for tokens in itertools.product(range(eos), repeat=length)
        for last in (range(size) if length == max_new_tokens - 1 else [eos])
    ]
    for row, hypothesis in enumerate(hypotheses):
        best = (-np.inf, None)
        for length, group in itertools.groupby(sequences, len):
            tokens = torch.tensor(list(group))
            before = torch.cat([torch.tensor([prompt]).expand(len(tokens), 1), tokens[:, :-1]], 1)
            x = model.decoder(before, encoded[row : row + 1].expand(len(tokens), -1, -1), None)
            chances = model.logits(x).log_softmax(-1).gather(2, tokens[:, :, None])
            scores = chances.sum((1, 2)) / length
            best = max(best, (float(scores.max()), tokens[scores.argmax()].tolist()))
        tokens = best[1][:-1] if best[1][-1] == eos else best[1]
        assert hypothesis.tokens == tokens and hypothesis.ended == (best[1][-1] == eos)
        assert hypothesis.mean_log_probability == pytest.approx(best[0], abs=1e-10)


def test_samples_follow_the_probabilities():
    model = make_model(1, decoder_layers=1)
    encoded, _ = inputs(model, 1)
    suppress, draws, generator = [0, 7, 39], 500, torch.Generator().manual_seed(0)
    search = Search(PROMPT, EOS, suppress, max_new_tokens=1)
    logits = model.logits(model.decoder(torch.tensor([PROMPT]), encoded, None)[0, -1])
    logits[suppress] = -torch.inf
    expected = (logits / 4).softmax(-1)  # flat enough to see the difference
    counts = torch.zeros(40, dtype=torch.float64)
    for _ in range(draws):
        (tokens,) = tokens_of(decoding.sample(model, encoded, None, search, 4.0, generator))
        counts[tokens[0] if tokens else EOS] += 1
    assert counts[suppress].sum() == 0 and expected.max() < 0.5 and (expected > 0.02).sum() > 5
    seen = expected > 0
    chi_square = float(((counts - draws * expected).square() / (draws * expected))[seen].sum())
    assert chi_square < 75  # of 36 degrees of freedom: one in 6,000


# --- fallback -------------------------------------------------------------------------------------

TOKENIZER = SimpleNamespace(decode=lambda tokens: "".join(chr(97 + token) for token in tokens))
GOOD, LOOP, SILENCE = list(range(20)), [1, 2] * 60, [4, 5]


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the searches: `script[row]` lists (tokens, mean log-probability, probability of no
    speech) for each attempt. `encoded` holds the row's number. Returns the calls as (search,
    temperature, rows)."""
    calls = []

    def install(script):
        tried = dict.fromkeys(range(len(script)), 0)

        def fake(name):
            def search(model, encoded, mask, given, temperature=0.0, generator=None):
                assert given.prompt == PROMPT
                rows = [int(row) for row in encoded[:, 0, 0]]
                assert mask is None or mask[:, 0, 0, 0].tolist() == rows
                calls.append((name, temperature, rows))
                hypotheses = []
                for row in rows:
                    tokens, mean, no_speech = script[row][tried[row]]
                    tried[row] += 1
                    total = mean * (len(tokens) + 1)
                    hypotheses.append(decoding.Hypothesis(tokens, total, True, no_speech))
                return hypotheses

            return search

        for name in ("greedy", "sample", "beam"):
            monkeypatch.setattr(decoding, name, fake(name))
        numbers = torch.arange(len(script))
        return numbers[:, None, None].float(), numbers[:, None, None, None]

    return install, calls


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_only_what_failed_is_decoded_again(scripted, method):
    install, calls = scripted
    encoded, mask = install(
        [
            [(GOOD, -0.5, 0.1)],
            [(LOOP, -0.1, 0.1), (LOOP, -0.1, 0.1), (GOOD, -0.9, 0.1)],  # compresses too well, twice
            [(GOOD, -0.99, 0.9)],  # not silent, because it is probable enough
            [(GOOD, -1.5, 0.1), (GOOD, -0.7, 0.1)],  # improbable
            [(SILENCE, -1.5, 0.7)],  # silent
            [(SILENCE, -1.5, None), (GOOD, -0.3, None)],  # a vocabulary without a token for it
            [([], -0.2, 0.1)],  # nothing said
            [(LOOP, -0.5, 0.9), (LOOP, -1.5, 0.9)],  # silent at the second try
        ]
    )
    decoded = decoding.decode(None, TOKENIZER, encoded, mask, Search(PROMPT, EOS, method=method))
    assert calls == [
        (method, 0.0, list(range(8))),
        ("sample", 0.2, [1, 3, 5, 7]),
        ("sample", 0.4, [1]),
    ]
    good = TOKENIZER.decode(GOOD)
    assert [row.text for row in decoded] == [good, good, good, good, "", good, "", ""]
    assert [row.temperature for row in decoded] == [0.0, 0.4, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2]
    assert decoded[1].mean_log_probability == pytest.approx(-0.9)
    assert decoded[4].no_speech_probability == 0.7


def test_after_the_last_temperature_the_best_attempt_is_taken_without_its_loop(scripted):
    install, calls = scripted
    encoded, _ = install(
        [
            [(LOOP, -0.1, 0.1), (GOOD, -2.0, 0.1), (GOOD[:9], -1.7, 0.1)] + [(GOOD, -3.0, 0.1)] * 3,
            [(LOOP, -0.3, 0.1)] * 3 + [([7] * 150, -0.2, 0.1)] + [(LOOP, -0.3, 0.1)] * 2,
        ]
    )
    first, second = decoding.decode(None, TOKENIZER, encoded, None, SEARCH)
    assert [call[1] for call in calls] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert (first.text, first.temperature) == (TOKENIZER.decode(GOOD[:9]), 0.4)
    assert (second.text, second.temperature, second.tokens) == ("h", 0.6, [7] * 150)
    install([[(LOOP, -0.5, 0.1), (GOOD, -0.5, 0.1)], [(SILENCE, -1.5, 0.7)]])
    assert decoding.texts(None, TOKENIZER, encoded, None, SEARCH) == [TOKENIZER.decode(GOOD), ""]


def test_decode_with_a_model(monkeypatch):
    """The same seed gives the same results, and they do not depend on other utterances."""
    monkeypatch.setattr(decoding, "LOG_PROBABILITY_THRESHOLD", -0.3)
    model = make_model(3)
    encoded, mask = inputs(model, 4, lengths=[100, 50, 9, 80])
    search = Search(PROMPT, EOS, no_speech=NO_SPEECH, max_new_tokens=12)
    together = decoding.decode(model, TOKENIZER, encoded, mask, search)
    assert together == decoding.decode(model, TOKENIZER, encoded, mask, search)
    seeded = dataclasses.replace(search, seed=1)
    assert together != decoding.decode(model, TOKENIZER, encoded, mask, seeded)
    assert len({row.temperature for row in together}) > 1
    for row, expected in enumerate(together):
        part = encoded[row : row + 1], mask[row : row + 1]
        (alone,) = decoding.decode(model, TOKENIZER, *part, search)
        assert (alone.text, alone.tokens) == (expected.text, expected.tokens)
        assert alone.temperature == expected.temperature


@pytest.mark.parametrize("texts", [decoding.texts, decoding.greedy_texts])
def test_rows_of_several_languages_are_decoded_as_if_alone(texts):
    model = make_model(3)
    encoded, mask = inputs(model, 4, lengths=[100, 50, 9, 80])
    search = Search(PROMPT, EOS, no_speech=NO_SPEECH, max_new_tokens=12)
    other = {"xx": LANGUAGE - 7}
    tokenizer = SimpleNamespace(
        decode=TOKENIZER.decode,
        in_language=lambda prompt, name: [START, other.get(name, prompt[1]), *prompt[2:]],
    )
    names = ["", "xx", "yy", "xx"]
    together = texts(model, tokenizer, encoded, mask, search, languages=names)
    for row, name in enumerate(names):
        prompt = tokenizer.in_language(PROMPT, name)
        own = dataclasses.replace(search, prompt=prompt)
        part = encoded[row : row + 1], mask[row : row + 1]
        assert texts(model, tokenizer, *part, own) == [together[row]]
    plain = texts(model, tokenizer, encoded, mask, search)
    assert together != plain
    limits = torch.tensor([3, 12, 1, 12])
    if texts is decoding.greedy_texts:
        cut = texts(model, tokenizer, encoded, mask, search, limits, names)
        assert [len(text) <= limit for text, limit in zip(cut, limits, strict=True)] == [True] * 4


def test_texts_of_a_greedy_pass(monkeypatch):
    """They have no loops and are stripped, and there is no fallback."""
    hypotheses = [
        decoding.Hypothesis(tokens, -9.0, True) for tokens in (GOOD, LOOP, [], [0, *SILENCE, 0])
    ]
    monkeypatch.setattr(decoding, "greedy", lambda *given: hypotheses)
    spaced = SimpleNamespace(decode=lambda tokens: TOKENIZER.decode(tokens).replace("a", " "))
    expected = [TOKENIZER.decode(GOOD)[1:], "bc", "", TOKENIZER.decode(SILENCE)]
    assert decoding.greedy_texts(None, spaced, None, None, SEARCH) == expected


def test_a_text_ends_at_its_limit(pair):
    """Of what a search without limits gives, the beginning; other utterances are the same."""
    _, model, _, encoded, search = pair
    free = tokens_of(decoding.greedy(model, encoded, None, search))
    limits = torch.arange(len(encoded)) % 40
    ended = tokens_of(decoding.greedy(model, encoded, None, search, limits))
    assert ended == [row[:limit] for row, limit in zip(free, limits.tolist(), strict=True)]
    assert sum(row != whole for row, whole in zip(ended, free, strict=True)) > 5


def test_limits_follow_the_densest_training_utterance():
    items = [
        {"ctc_tokens": torch.zeros(tokens), "heard": round(seconds * 16_000)}
        for tokens, seconds in ((10, 4.0), (6, 1.5), (0, 2.0))
    ]
    data = type("Data", (), {"__len__": lambda _: 3, "item": lambda _, index, epoch: items[index]})
    rate = decoding.TokenRate([data()], 0)
    assert rate.per_second == pytest.approx(1.25 * 4)
    samples = torch.tensor([1, 16_000, 40_000])
    assert rate.limits(samples).tolist() == [5, 9, 17]
    unknown = decoding.TokenRate([], 0)
    assert unknown.limits(samples).min() > 448


def test_the_search_of_a_model():
    """It suppresses the config's tokens, ids beyond the tokenizer, and timestamps."""
    tokenizer = SimpleNamespace(
        prompt=PROMPT, eos=EOS, no_speech=NO_SPEECH, size=50, times=range(0)
    )
    assert decoding.make_search(tokenizer, {}, 50) == Search(PROMPT, EOS, [], (), NO_SPEECH)
    generation = {"suppress_tokens": [7, 3], "begin_suppress_tokens": [220, EOS]}
    search = decoding.make_search(tokenizer, generation, 52, "beam", 3, 9)
    assert search == Search(
        PROMPT, EOS, [3, 7, 50, 51], [220, EOS], NO_SPEECH, method="beam", beam_size=3, seed=9
    )
    tokenizer.times, tokenizer.size = range(40, 1541), 1541
    generation = {"suppress_tokens": None, "begin_suppress_tokens": None}
    assert decoding.make_search(tokenizer, generation, 1541) == Search(
        PROMPT, EOS, [*range(40, 1541)], (), NO_SPEECH
    )


# --- loops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CQ CQ CQ DE W1AW W1AW W1AW K",
        "0" * 20,
        "rất rất rất vui",
        "CQ " * 9 + "K",
        "QRL? DE W1AW/7 PSE K = " + "CQ TEST DE W1AW/7 " * 3 + "K",
        "không, không, không, không",
        "EEEEEEEE",
    ],
)
def test_what_people_say_again_stays(text):
    assert decoding.cut_loops(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat " * 20, "the cat"),
        ("I saw that " + "the cat " * 20 + "the c", "I saw that the cat"),
        ("T" * 60, "T"),
        ("TU " + "E" * 99 + " K", "TU E K"),
        ("xin chào " + "các bạn nhé " * 9 + "các dì", "xin chào các bạn nhé các dì"),
        ("我" + "不知道" * 30, "我不知道"),
        ("the cat " * 20 + "the dog", "the cat the dog"),
    ],
)
def test_loops_are_cut_to_one(text, expected):
    assert decoding.cut_loops(text.strip()) == expected


@given(
    st.text("ab 0", max_size=12),
    st.text("ab 0", min_size=1, max_size=12),
    st.integers(1, 50),
    st.text("ab 0", max_size=12),
)
def test_no_loop_survives(before, unit, count, after):
    text = before + unit * count + after
    cut = decoding.cut_loops(text)
    assert decoding.cut_loops(cut) == cut
    loops = [
        cut[i : i + 4 * period]
        for period in range(1, len(cut) // 4 + 1)
        for i in range(len(cut) - max(40, 4 * period) + 1)
        if all(cut[k] == cut[k + period] for k in range(i, i + max(40, 4 * period) - period))
    ]
    assert not loops
    if len(text) < 40:
        assert cut == text
    assert set(cut.split()) <= set(text.split()) or " " not in unit.strip()


# --- long recordings ------------------------------------------------------------------------------


def cut_text(words, times, windows, random, garbled):
    """A recogniser's text of each window. Words cut by its edges, and up to `garbled` more at each
    edge, are wrong or missing."""
    texts = []
    for a, b in windows:
        inside = [i for i, (start, end) in enumerate(times) if start < b and end > a]
        text = []
        for place, i in enumerate(inside):
            from_left = place if windows[0][0] != a else 99
            from_right = len(inside) - 1 - place if windows[-1][1] != b else 99
            cut = times[i][0] < a or times[i][1] > b
            if cut or min(from_left, from_right) < int(random.integers(0, garbled + 1)):
                text += [[], ["xx"], [words[i][: len(words[i]) // 2]]][random.integers(0, 3)]
            else:
                text.append(words[i])
        texts.append(text)
    return texts


@pytest.mark.parametrize("seed", range(4))
def test_stitched_text_is_the_text(seed):
    """Random words, some of them after long pauses, of a small vocabulary: no word is lost and none
    doubled."""
    random = np.random.default_rng(seed)
    vocabulary = [
        "".join(chr(97 + c) for c in random.integers(0, 26, random.integers(1, 9)))
        for _ in range(60)
    ]
    words, times, now = [], [], 0.0
    for _ in range(int(random.integers(1, 500))):
        now += random.exponential(0.1) + (random.uniform(0.5, 2) if random.random() < 0.02 else 0)
        length = random.uniform(0.15, 0.5)
        words.append(vocabulary[random.integers(0, 60)])
        times.append((now * 1000, (now + length) * 1000))
        now += length
    windows = long.overlapping_pieces(torch.zeros(int(now * 1000) + 1), 1000, 30.0)
    texts = [" ".join(text) for text in cut_text(words, times, windows, random, 2)]
    whole, parts = long.stitch(texts, windows)
    assert whole.split() == words
    assert " ".join(text for _, _, text in parts).split() == words
    assert parts[0][0] == 0 and parts[-1][1] == windows[-1][1]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    for a, b, text in parts:  # times are known to within the overlap
        place = [i for i in range(len(words)) if words[i : i + len(text.split())] == text.split()]
        assert not text or any(a - 5000 < times[i][0] < b + 5000 for i in place)


@pytest.mark.parametrize("seed", range(2))
def test_languages_without_spaces_are_stitched_by_characters(seed):
    random = np.random.default_rng(seed)
    words = [chr(0x4E00 + c) for c in random.integers(0, 300, 500)]
    times = [(200 * i, 200 * i + 180) for i in range(500)]
    windows = long.overlapping_pieces(torch.zeros(100_000), 1000, 30.0)
    texts = ["".join(text) for text in cut_text(words, times, windows, random, 1)]
    whole, parts = long.stitch([text.replace("xx", "口") for text in texts], windows)
    assert whole == "".join(words) == "".join(text for _, _, text in parts)


def test_repeated_words_are_aligned_by_time():
    """Ninety CQ, one per second: every alignment fits, so their number is known only from the
    times."""
    windows = long.overlapping_pieces(torch.zeros(90_000), 1000, 30.0)
    texts = [" ".join(["CQ"] * ((b - a) // 1000)) for a, b in windows]
    assert len(windows) == 4
    assert 87 <= len(long.stitch(texts, windows)[0].split()) <= 93


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["", "", ""], ""),
        (["hello there", "", "good bye"], "hello there good bye"),
        (["", "one two", ""], "one two"),
        (
            ["he went into the", "the dog barked and then it was quiet until the morning came", ""],
            "he went into the dog barked and then it was quiet until the morning came",
        ),
        (
            ["we meet at noon, Tuesd", "at noon. Tuesday is fine", ""],
            "we meet at noon. Tuesday is fine",
        ),
    ],
)
def test_stitching_odd_windows(texts, expected):
    whole, parts = long.stitch(texts, [(0, 30), (25, 55), (50, 80)])
    assert whole == expected and " ".join(filter(None, (text for _, _, text in parts))) == expected
