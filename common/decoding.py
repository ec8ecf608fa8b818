"""Searches that turn a model's probabilities into token sequences: CTC prefix beam, autoregressive beam."""

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch


def ctc_prefix_beam(log_probs: np.ndarray, beam_size: int, blank: int) -> list[tuple[tuple[int, ...], float]]:
    """The most probable label sequences of (T, V) log-probabilities with their log-probabilities, best first, at most
    `beam_size`. A sequence's probability is summed over its alignments (Graves 2012; Hannun et al. 2014): each prefix
    keeps what ends in a blank apart from what ends in its last label. Each frame extends by its `beam_size` best labels."""
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    candidates = np.argpartition(-log_probs, min(beam_size, log_probs.shape[1] - 1), axis=1)[:, :beam_size]
    for frame, labels in zip(log_probs, candidates, strict=True):
        ends: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [-math.inf, -math.inf])
        for prefix, (in_blank, in_label) in beam.items():
            either = _add(in_blank, in_label)
            same = ends[prefix]
            same[0] = _add(same[0], either + float(frame[blank]))
            if prefix:
                same[1] = _add(same[1], in_label + float(frame[prefix[-1]]))
            for label in labels.tolist():
                if label == blank:
                    continue
                # A label again right after itself is the same one, unless a blank stood between.
                before = in_blank if prefix and label == prefix[-1] else either
                longer = ends[(*prefix, label)]
                longer[1] = _add(longer[1], before + float(frame[label]))
        kept = sorted(ends.items(), key=lambda pair: -_add(*pair[1]))[:beam_size]
        beam = {prefix: (scores[0], scores[1]) for prefix, scores in kept}
    return [(prefix, _add(*scores)) for prefix, scores in beam.items()]


def _add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))


def autoregressive_beam(
    next_log_probs: Callable[[torch.Tensor], torch.Tensor], start: int, end: int, beam_size: int, longest: int
) -> list[tuple[list[int], float]]:
    """Beam search: `next_log_probs` maps prefixes (N, U), which begin with `start`, to the log-probabilities (N, V) of
    what follows. Returns finished hypotheses (without `start` and `end`) and their log-probability per token, best
    first. Stops when nothing unfinished can still overtake, or at `longest` tokens, where what is unfinished counts."""
    prefixes, scores, finished = torch.tensor([[start]]), torch.zeros(1), []
    for length in range(1, longest + 1):
        following = next_log_probs(prefixes).float().cpu()  # (N, V)
        total = scores[:, None] + following
        best, flat = total.flatten().topk(min(2 * beam_size, total.numel()))
        rows, tokens = flat // total.shape[1], flat % total.shape[1]
        alive = tokens != end
        for row, score in zip(rows[~alive].tolist(), best[~alive].tolist(), strict=True):
            finished.append((prefixes[row, 1:].tolist(), score / length))
        rows, tokens, scores = rows[alive][:beam_size], tokens[alive][:beam_size], best[alive][:beam_size]
        prefixes = torch.cat([prefixes[rows], tokens[:, None]], dim=1)
        finished = sorted(finished, key=lambda pair: -pair[1])[:beam_size]
        # A score only falls, and is divided by at most `longest`.
        if len(finished) == beam_size and finished[0][1] >= float(scores[0]) / longest:
            return finished
    finished += [(prefix[1:].tolist(), float(score) / longest) for prefix, score in zip(prefixes, scores, strict=True)]
    return sorted(finished, key=lambda pair: -pair[1])[:beam_size]
