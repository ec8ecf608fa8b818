"""Searches that turn a model's probabilities into token sequences: CTC prefix beam, autoregressive
beam, and both of them for a model with CTC and a decoder."""

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.batches import pad
from common.device import upcast
from speech.decoding.ngram import Fusion

# Of a search with a language model.
LM_BEAM = 32  # hypotheses
LM_LABELS = 8  # by which a frame extends a prefix
LEAST_LABEL = -12.0  # log-probability of a label that is tried


def ctc_prefix_beam(
    log_probs: np.ndarray, beam_size: int, blank: int, fusion: Fusion | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """At most `beam_size` (label sequence, score), best first, of (T, V) log-probabilities. The
    score is a log-probability, with a language model (`fusion`) the sum of both.

    The probability of a sequence is summed over its alignments (Graves 2012; Hannun et al. 2014):
    every prefix has one score for alignments that end in a blank, and one for those that end in its
    last label. A frame extends prefixes by its `beam_size` best labels; with a language model by
    LM_LABELS of them that are not impossible."""
    # Of each prefix: its score with alignments that end in a blank, and with those that end in a
    # label; what the language model adds, and its state.
    beam: dict[tuple[int, ...], list] = {
        (): [0.0, -math.inf, 0.0, fusion.start if fusion else None]
    }
    most = min(beam_size, LM_LABELS) if fusion else beam_size
    order = np.argpartition(-log_probs, min(most, log_probs.shape[1] - 1), axis=1)
    candidates = order[:, :most]
    for frame, labels in zip(log_probs, candidates, strict=True):
        if fusion:
            labels = labels[frame[labels] > LEAST_LABEL]
        scores: dict[tuple[int, ...], list] = defaultdict(lambda: [-math.inf, -math.inf, 0.0, None])
        for prefix, (in_blank, in_label, added, state) in beam.items():
            either = _log_add(in_blank, in_label)
            same = scores[prefix]
            same[0] = _log_add(same[0], either + float(frame[blank]))
            if prefix:
                same[1] = _log_add(same[1], in_label + float(frame[prefix[-1]]))
            same[2:] = added, state
            for label in labels.tolist():
                if label == blank:
                    continue
                # A label right after itself is the same one, unless there is a blank in between.
                before = in_blank if prefix and label == prefix[-1] else either
                extended = scores[(*prefix, label)]
                extended[1] = _log_add(extended[1], before + float(frame[label]))
                if fusion and extended[3] is None:
                    more, following = fusion.step(state, label)
                    extended[2:] = added + more, following
        best = sorted(scores.items(), key=lambda pair: -_total(*pair[1]))
        beam = dict(best[:beam_size])
    if fusion:
        for prefix, hypothesis in beam.items():
            hypothesis[2] += fusion.end(hypothesis[3], prefix)
    finished = [(prefix, _total(*hypothesis)) for prefix, hypothesis in beam.items()]
    return sorted(finished, key=lambda pair: -pair[1])


def _total(in_blank: float, in_label: float, added: float, _state: int | None) -> float:
    """The score of a hypothesis."""
    return _log_add(in_blank, in_label) + added


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))


def autoregressive_beam(
    next_log_probs: Callable[[Tensor], Tensor],
    bos: int,
    eos: int,
    beam_size: int,
    max_new_tokens: int,
) -> list[tuple[list[int], float]]:
    """Beam search. `next_log_probs` maps prefixes (N, U), which start with `bos`, to
    log-probabilities (N, V) of the next token. Returns (tokens without `bos` and `eos`,
    log-probability per token), best first.

    The search ends when no unfinished hypothesis can become the best, or after `max_new_tokens`,
    when unfinished hypotheses are returned too."""
    prefixes = torch.tensor([[bos]])
    scores = torch.zeros(1)
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_new_tokens + 1):
        totals = scores[:, None] + next_log_probs(prefixes).float().cpu()  # (N, V)
        best, flat = totals.flatten().topk(min(2 * beam_size, totals.numel()))
        rows = flat // totals.shape[1]
        tokens = flat % totals.shape[1]
        unfinished = tokens != eos
        for row, score in zip(rows[~unfinished].tolist(), best[~unfinished].tolist(), strict=True):
            finished.append((prefixes[row, 1:].tolist(), score / length))
        kept = unfinished.nonzero()[:beam_size, 0]
        scores = best[kept]
        prefixes = torch.cat([prefixes[rows[kept]], tokens[kept][:, None]], dim=1)
        finished = sorted(finished, key=lambda pair: -pair[1])[:beam_size]
        # A score can only fall, and is divided by at most `max_new_tokens`.
        if len(finished) == beam_size and finished[0][1] >= float(scores[0]) / max_new_tokens:
            return finished
    for prefix, score in zip(prefixes, scores, strict=True):
        finished.append((prefix[1:].tolist(), float(score) / max_new_tokens))
    return sorted(finished, key=lambda pair: -pair[1])[:beam_size]


class CTCPrefixScores:
    """CTC's part in an autoregressive beam search: log-probabilities that the output *starts with*
    a prefix, for every extension of every prefix at once (Watanabe et al. 2017, "Hybrid
    CTC/Attention Architecture", algorithm 2)."""

    def __init__(self, log_probs: np.ndarray, blank: int):
        self.log_probs = log_probs.astype(np.float64)  # (T, V)
        self.blank = blank
        in_blank = np.cumsum(self.log_probs[:, blank])
        # Of each prefix: its log-probability, and those of its alignments up to each frame that end
        # in its last label (T,) and in a blank (T,).
        self.states = {(): (0.0, np.full(len(log_probs), -np.inf), in_blank)}

    def extend(self, prefixes: list[tuple[int, ...]]) -> np.ndarray:
        """(N, V) what each next label adds to the log-probability of each prefix; the blank's
        column is for the end of the output. Prefixes are empty or extend those of the last call."""
        log_probs = self.log_probs
        blank = self.blank
        frames, size = log_probs.shape
        states = [self.states[prefix] for prefix in prefixes]
        before = np.array([score for score, _, _ in states])
        after_label = np.stack([in_label for _, in_label, _ in states])  # (N, T)
        after_blank = np.stack([in_blank for _, _, in_blank in states])  # (N, T)
        either = np.logaddexp(after_label, after_blank)
        # (N, T, V): before a label that starts at t + 1
        start = np.repeat(either[:, :, None], size, axis=2)
        for row, prefix in enumerate(prefixes):
            if prefix:
                start[row, :, prefix[-1]] = after_blank[row]
        in_label = np.full((len(prefixes), frames, size), -np.inf)
        in_blank = np.full((len(prefixes), frames, size), -np.inf)
        in_label[:, 0] = np.where([[not prefix] for prefix in prefixes], log_probs[0], -np.inf)
        begins = in_label[:, 0].copy()
        for t in range(1, frames):
            in_label[:, t] = np.logaddexp(in_label[:, t - 1], start[:, t - 1]) + log_probs[t]
            either_before = np.logaddexp(in_blank[:, t - 1], in_label[:, t - 1])
            in_blank[:, t] = either_before + log_probs[t, blank]
            begins = np.logaddexp(begins, start[:, t - 1] + log_probs[t])
        begins[:, blank] = either[:, -1]
        self.states = {}
        for row, prefix in enumerate(prefixes):
            for token in range(size):
                if token != blank:
                    state = (begins[row, token], in_label[row, :, token], in_blank[row, :, token])
                    self.states[(*prefix, token)] = state
        return begins - before[:, None]


def rescored_beam(
    log_probs: Tensor,
    decoder: Callable[[Tensor], Tensor],
    eos: int,
    beam_size: int,
    weights: dict,
    fusion: Fusion | None = None,
) -> list[int]:
    """The best of CTC's `beam_size` hypotheses by a mixture of CTC's and the decoder's
    log-probabilities. A language model (`fusion`) is a part of CTC's.

    `log_probs`: (T, V) of CTC, whose blank is `eos`. `decoder` maps tokens (N, U), which begin with
    `eos`, to the logits (N, U, V) of the token after each. `weights`: of "ctc" and "attention"."""
    width = max(beam_size, LM_BEAM) if fusion else beam_size
    hypotheses = ctc_prefix_beam(log_probs.cpu().numpy(), width, eos, fusion)[:beam_size]
    labels, _ = pad([torch.tensor([*tokens, eos]) for tokens, _ in hypotheses], -100)
    labels = labels.to(log_probs.device)  # (N, U + 1)
    inputs = F.pad(labels[:, :-1].clamp_min(0), (1, 0), value=eos)
    following = upcast(decoder(inputs)).log_softmax(-1).transpose(1, 2)
    losses = F.nll_loss(following, labels, ignore_index=-100, reduction="none")
    attention = -losses.sum(1)
    ctc = torch.tensor([score for _, score in hypotheses], device=log_probs.device)
    best = (weights["ctc"] * ctc + weights["attention"] * attention).argmax()
    return list(hypotheses[int(best)][0])


def joint_beam(
    log_probs: Tensor, decoder: Callable[[Tensor], Tensor], eos: int, beam_size: int, weights: dict
) -> list[int]:
    """Beam search of the decoder with CTC's prefix scores, parameters as in `rescored_beam`: the
    decoder alone loops and stops too early. It writes at most a token a frame."""
    ctc = CTCPrefixScores(log_probs.cpu().numpy(), eos)

    def following(prefixes: Tensor) -> Tensor:
        attention = upcast(decoder(prefixes)[:, -1]).log_softmax(-1).cpu()
        added = ctc.extend([tuple(row[1:]) for row in prefixes.tolist()])
        added = torch.from_numpy(added).to(attention.dtype)
        return weights["attention"] * attention + weights["ctc"] * added

    return autoregressive_beam(following, eos, eos, beam_size, len(log_probs))[0][0]
