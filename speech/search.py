"""Searches that turn a model's probabilities into token sequences: CTC prefix beam, autoregressive beam, and CTC's part
in the latter."""

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


class CTCPrefixScores:
    """For a beam search token by token: log-probabilities under CTC that the output *begins* with a prefix, for every
    extension of every prefix at once (Watanabe et al. 2017, "Hybrid CTC/Attention Architecture", algorithm 2)."""

    def __init__(self, log_probs: np.ndarray, blank: int):
        self.log_probs, self.blank = log_probs.astype(np.float64), blank
        in_blank = np.cumsum(self.log_probs[:, blank])
        # prefix -> (log-probability of the prefix, alignments that end in its last label (T,), in a blank (T,))
        self.states = {(): (0.0, np.full(len(log_probs), -np.inf), in_blank)}

    def extend(self, prefixes: list[tuple[int, ...]]) -> np.ndarray:
        """(N, V) what each next label adds to the log-probability of each prefix; the blank's column stands for the
        end. Prefixes must be empty or extensions of those of the last call."""
        log_probs, blank = self.log_probs, self.blank
        frames, size = log_probs.shape
        before = np.array([self.states[prefix][0] for prefix in prefixes])
        label, empty = (np.stack([self.states[prefix][i] for prefix in prefixes]) for i in (1, 2))  # (N, T)
        either = np.logaddexp(label, empty)
        start = np.repeat(either[:, :, None], size, axis=2)  # (N, T, V): from where a label may begin at t + 1
        for row, prefix in enumerate(prefixes):
            if prefix:
                start[row, :, prefix[-1]] = empty[row]
        in_label, in_blank = (np.full((len(prefixes), frames, size), -np.inf) for _ in range(2))
        in_label[:, 0] = np.where([[not prefix] for prefix in prefixes], log_probs[0], -np.inf)
        begins = in_label[:, 0].copy()
        for t in range(1, frames):
            in_label[:, t] = np.logaddexp(in_label[:, t - 1], start[:, t - 1]) + log_probs[t]
            in_blank[:, t] = np.logaddexp(in_blank[:, t - 1], in_label[:, t - 1]) + log_probs[t, blank]
            begins = np.logaddexp(begins, start[:, t - 1] + log_probs[t])
        begins[:, blank] = either[:, -1]
        self.states = {
            (*prefix, token): (begins[row, token], in_label[row, :, token], in_blank[row, :, token])
            for row, prefix in enumerate(prefixes) for token in range(size) if token != blank
        }  # fmt: skip
        return begins - before[:, None]


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
