"""Searches against exhaustive enumeration."""

import itertools
import math

import numpy as np
import pytest
import torch

from speech.decoding.ngram import WORD_WEIGHT, Fusion, NGram, Words
from speech.decoding.search import CTCPrefixScores, autoregressive_beam, ctc_prefix_beam


def all_ctc(log_probs, blank):
    """Every label sequence's probability, by summing over all alignments."""
    frames, size = log_probs.shape
    totals = {}
    for path in itertools.product(range(size), repeat=frames):
        labels = tuple(label for label, _ in itertools.groupby(path) if label != blank)
        score = sum(log_probs[t, label] for t, label in enumerate(path))
        totals[labels] = np.logaddexp(totals.get(labels, -np.inf), score)
    return totals


@pytest.mark.parametrize("seed", range(6))
def test_ctc_prefix_beam_is_exact_with_a_wide_beam(seed):
    random = np.random.default_rng(seed)
    frames, size = int(random.integers(1, 6)), int(random.integers(2, 5))
    log_probs = np.log(random.dirichlet(np.full(size, 0.5), frames))
    blank = int(random.integers(size))
    expected = all_ctc(log_probs, blank)
    beam = ctc_prefix_beam(log_probs, 10_000, blank)
    assert beam[0][0] == max(expected, key=expected.get)
    assert [score for _, score in beam] == sorted((score for _, score in beam), reverse=True)
    for labels, score in beam:
        assert score == pytest.approx(expected.get(labels, -np.inf), abs=1e-9)
    assert np.logaddexp.reduce([score for _, score in beam]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_autoregressive_beam_is_exhaustive_with_a_wide_beam(seed):
    size, end, longest = 4, 3, 4
    table = torch.randn(5, size, size, generator=torch.Generator().manual_seed(seed)).log_softmax(
        -1
    )

    def following(prefixes):
        previous = prefixes[:, -1].clamp_max(size - 1)
        return table[prefixes.shape[1] % 5, previous]

    hypotheses = autoregressive_beam(following, 2, end, 400, longest)
    expected = {}
    for length in range(longest):
        for tokens in itertools.product(range(3), repeat=length):
            prefix, score = [2], 0.0
            for token in (*tokens, end):
                score += float(following(torch.tensor([prefix]))[0, token])
                prefix.append(token)
            expected[tokens] = score / (length + 1)
    complete = {tuple(tokens): score for tokens, score in hypotheses if len(tokens) < longest}
    assert complete.keys() == expected.keys()
    assert all(math.isclose(complete[key], expected[key], abs_tol=1e-5) for key in expected)
    assert [score for _, score in hypotheses] == sorted(
        (score for _, score in hypotheses), reverse=True
    )


@pytest.mark.parametrize("seed", range(6))
def test_ctc_prefix_scores_are_sums_over_all_outputs_that_begin_so(seed):
    random = np.random.default_rng(seed)
    frames, size = int(random.integers(1, 6)), 3
    log_probs = np.log(random.dirichlet(np.full(size, 0.5), frames))
    blank = int(random.integers(size))
    labels = [token for token in range(size) if token != blank]
    whole = all_ctc(log_probs, blank)
    scores, total = CTCPrefixScores(log_probs, blank), {(): 0.0}
    for length in range(frames):
        prefixes = list(itertools.product(labels, repeat=length))
        prefixes = [prefix for prefix in prefixes if total[prefix] > -50]
        for prefix, added in zip(prefixes, scores.extend(prefixes), strict=True):
            for token in range(size):
                if token == blank:
                    expected = whole.get(prefix, -np.inf)
                else:
                    longer = (*prefix, token)
                    expected = np.logaddexp.reduce(
                        [-np.inf, *(v for k, v in whole.items() if k[: length + 1] == longer)]
                    )
                    total[longer] = expected
                assert total[prefix] + added[token] == pytest.approx(expected, abs=1e-9)
        if len(prefixes) < len(labels) ** length:
            break


# --- a language model in the beam -----------------------------------------------------------------


def spaced(tokens) -> str:
    """The text of tokens, of which 0 is the space."""
    return "".join(" abcd"[token] for token in tokens)


@pytest.mark.parametrize("seed", range(6))
def test_the_beam_is_exact_with_a_language_model(seed):
    random = np.random.default_rng(seed)
    frames, size = int(random.integers(1, 6)), int(random.integers(3, 5))
    log_probs = np.log(random.dirichlet(np.full(size, 0.5), frames))
    blank = size - 1
    texts = random.integers(0, blank, (30, 5)).tolist()
    words = Words(map(spaced, texts)) if seed % 2 else None
    model = NGram(texts, blank, mark=0)
    fusion = Fusion(model, weight=0.8, bonus=0.5, decode=spaced, words=words)
    expected = {}
    for labels, score in all_ctc(log_probs, blank).items():
        state = model.start
        for label in labels:
            added, state = fusion.step(state, label)
            score += added
        if words:
            own, last = words.read(spaced(labels), words.start)
            score += WORD_WEIGHT * (own + words.model.step(last, 0)[0] * (last != words.start))
        expected[labels] = score + 0.8 * model.end(state)
    found = ctc_prefix_beam(log_probs, 1000, blank, fusion)
    assert found[0][0] == max(expected, key=expected.get)
    for labels, score in found[:5]:
        assert score == pytest.approx(expected[labels], abs=1e-3)  # without impossible labels


def test_a_language_model_of_no_weight_changes_nothing():
    log_probs = np.log(np.random.default_rng(7).dirichlet(np.full(6, 0.9), 40))
    fusion = Fusion(NGram([[1, 2, 3]], 5, mark=0), weight=0.0, bonus=0.0)
    assert ctc_prefix_beam(log_probs, 6, 5, fusion) == ctc_prefix_beam(log_probs, 6, 5)
