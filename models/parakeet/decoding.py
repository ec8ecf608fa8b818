"""Greedy decoding of a transducer or a CTC head in batches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.device import upcast
from models.parakeet.model import Parakeet
from models.parakeet.tokenizer import ParakeetTokenizer
from speech.decoding import timed
from speech.decoding.ngram import Fusion
from speech.decoding.timed import Token, beam_ctc, greedy_ctc
from speech.signal.audio import SAMPLE_RATE
from speech.signal.nemo_features import HOP

LABEL_WEIGHT = 0.3  # of a language model beside a transducer's own choice of a label


@dataclass
class Memory:
    """The state of decoding from one part of a recording for the next one: the prediction network's
    output (B, J) and state after the last label, and the frames (B,) of the next part that the last
    token skips."""

    predicted: torch.Tensor | None = None
    state: tuple | None = None
    skipped: torch.Tensor | None = None


@torch.no_grad()
def greedy(
    step: Callable,
    joint: Callable,
    encoded: torch.Tensor,
    lengths: list[int],
    durations: tuple[int, ...],
    max_symbols: int,
    memory: Memory | None = None,
    fusion: Fusion | None = None,
) -> list[list[Token]]:
    """The likeliest token at every frame, and the likeliest duration to the next one, for each of
    (B, T, J).

    `joint(encoded (B, J), predicted (B, J))` returns logits (B, V + 1 + D): tokens, blank,
    durations. `step(tokens (B,), state)` returns the prediction network's output (B, J) and state,
    a tuple of (L, B, H); tokens and state are None at the start. Only labels move the prediction
    network. A blank lasts at least a frame. Without `durations` (RNN-T) a label stays in its frame.
    After `max_symbols` labels in a frame, the next frame follows. With `memory`, the recordings go
    on where it ended, and it is brought up to date. With `fusion`, a language model helps to choose
    among labels; whether one is written at all, and how long it lasts, is the model's alone, as in
    NeMo."""
    device = encoded.device
    ends = torch.tensor(lengths, device=device)
    steps = torch.tensor(durations, device=device)
    rows = torch.arange(len(lengths), device=device)
    frame = torch.zeros_like(rows)
    symbols = torch.zeros_like(rows)  # labels in this frame
    if memory and memory.predicted is not None:
        predicted, state, frame = memory.predicted, memory.state, memory.skipped
    else:
        predicted, state = step(None, None)
    history = []
    states = [fusion.start if fusion else None] * len(lengths)
    active = frame < ends
    while bool(active.any()):
        logits = joint(encoded[rows, frame.clamp_max(encoded.shape[1] - 1)], predicted)
        blank = logits.shape[1] - len(durations) - 1
        token = logits[:, : blank + 1].argmax(1)
        if fusion:
            token = fused(token, logits[:, :blank], states, fusion)
        duration = torch.zeros_like(token)
        lasts = duration + 1
        if durations:
            lasts = duration = steps[logits[:, blank + 1 :].argmax(1)]
        is_label = active & (token != blank)
        history.append(torch.stack([torch.where(is_label, token, -1), frame, lasts]))
        symbols = torch.where(is_label, symbols + 1, symbols)
        must_move = (token == blank) | (symbols >= max_symbols)
        duration = torch.where(must_move, duration.clamp_min(1), duration)
        symbols = torch.where(duration > 0, 0, symbols)
        frame = frame + duration
        active = frame < ends
        chosen = is_label.nonzero()[:, 0]
        if len(chosen):
            moved, new = step(token[chosen], tuple(part[:, chosen] for part in state))
            predicted = predicted.index_copy(0, chosen, moved)
            pairs = zip(state, new, strict=True)
            state = tuple(part.index_copy(1, chosen, value) for part, value in pairs)
    if memory:
        memory.predicted, memory.state, memory.skipped = predicted, state, frame - ends
    return _by_utterance(history, len(lengths))


def fused(best: torch.Tensor, logits: torch.Tensor, states: list, fusion: Fusion) -> torch.Tensor:
    """The labels (B,) by the logits (B, V) of labels together with a language model, where `best`
    (B,) are no blanks. Brings the language model's `states` up to date."""
    tokens = best.tolist()
    values = upcast(logits).log_softmax(1).cpu().numpy()
    size = logits.shape[1]
    for row, token in enumerate(tokens):
        if token == size or token in fusion.tags:  # which no text has, and which stay
            continue
        scores = values[row] + fusion.labels(states[row], LABEL_WEIGHT, size)
        tokens[row] = int(scores.argmax())
        _, states[row] = fusion.step(states[row], tokens[row])
    return torch.tensor(tokens, device=best.device)


def _by_utterance(history: list[torch.Tensor], batch: int) -> list[list[Token]]:
    """The tokens of each utterance. `history`: for each step (3, B) of pieces (-1: no label),
    frames and durations."""
    hypotheses: list[list[Token]] = [[] for _ in range(batch)]
    if not history:
        return hypotheses
    for pieces, frames, durations in torch.stack(history).tolist():
        for row, hypothesis in enumerate(hypotheses):
            if pieces[row] >= 0:
                hypothesis.append(Token(pieces[row], frames[row], durations[row]))
    return hypotheses


def decode(
    model: Parakeet,
    encoded: torch.Tensor,
    frames: list[int],
    memory: Memory | None = None,
    fusion: Fusion | None = None,
) -> list[list[Token]]:
    """The tokens of every utterance of the encoder's output (B, T, D), with their times. `memory`:
    as in `greedy`; `fusion`: a language model beside it."""
    if model.decodes_ctc and fusion:
        return beam_ctc(model.ctc_log_probs(encoded), frames, model.blank, fusion)
    if model.decodes_ctc:
        return greedy_ctc(model.ctc_log_probs(encoded), frames, model.blank)

    def step(tokens: torch.Tensor | None, state: tuple | None) -> tuple[torch.Tensor, tuple]:
        if tokens is None:
            tokens = torch.full((len(encoded),), model.blank, device=encoded.device)
        predicted, state = model.decoder(tokens[:, None], state)
        return predicted[:, 0], state

    projected = model.encoder_projector(encoded)
    most = model.config["max_symbols"]
    durations = model.joint.durations
    return greedy(step, model.joint.logits, projected, frames, durations, most, memory, fusion)


def frame_samples(config: dict) -> int:
    """Samples of an encoder frame."""
    return config["subsampling"] * HOP


def transcripts(
    model: Parakeet, tokenizer: ParakeetTokenizer, batch: dict, fusion: Fusion | None = None
) -> list[dict]:
    """The `timed.transcripts` of a batch."""
    encoded, frames = model.encode(batch)
    seconds = frame_samples(model.config) / SAMPLE_RATE
    hypotheses = decode(model, encoded, frames, fusion=fusion)
    return timed.transcripts(hypotheses, frames, tokenizer, seconds)
