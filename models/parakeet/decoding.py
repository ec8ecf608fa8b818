"""Greedy decoding of a transducer or a CTC head in batches, and the times of words and segments."""

import itertools
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.parakeet.model import Parakeet
from models.parakeet.tokenizer import SPACE, ParakeetTokenizer
from speech.signal.audio import SAMPLE_RATE
from speech.signal.nemo_features import HOP
from speech.writing.text import SENTENCE_ENDS, in_unspaced, spaces_before


@dataclass(frozen=True)
class Token:
    """A piece, its first encoder frame, and how many frames the model says it lasts: 1 in RNN-T,
    which does not say it, and the frames that have the piece in CTC."""

    piece: int
    frame: int
    duration: int


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
) -> list[list[Token]]:
    """The likeliest token at every frame, and the likeliest duration to the next one, for each of
    (B, T, J).

    `joint(encoded (B, J), predicted (B, J))` returns logits (B, V + 1 + D): tokens, blank,
    durations. `step(tokens (B,), state)` returns the prediction network's output (B, J) and state,
    a tuple of (L, B, H); tokens and state are None at the start. Only labels move the prediction
    network. A blank lasts at least a frame. Without `durations` (RNN-T) a label stays in its frame.
    After `max_symbols` labels in a frame, the next frame follows. With `memory`, the recordings go
    on where it ended, and it is brought up to date."""
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
    active = frame < ends
    while bool(active.any()):
        logits = joint(encoded[rows, frame.clamp_max(encoded.shape[1] - 1)], predicted)
        blank = logits.shape[1] - len(durations) - 1
        token = logits[:, : blank + 1].argmax(1)
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


@torch.no_grad()
def greedy_ctc(log_probs: torch.Tensor, lengths: list[int]) -> list[list[Token]]:
    """The likeliest tokens of log-probabilities (B, T, V + 1): runs of a piece are one token, and
    blanks, the last column, are left out."""
    blank = log_probs.shape[2] - 1
    hypotheses = []
    for row, length in zip(log_probs.argmax(2).tolist(), lengths, strict=True):
        hypotheses.append(_runs(row[:length], blank))
    return hypotheses


def _runs(path: list[int], blank: int) -> list[Token]:
    """The tokens of a path of frames."""
    tokens = []
    frame = 0
    for piece, run in itertools.groupby(path):
        count = len(list(run))
        if piece != blank:
            tokens.append(Token(piece, frame, count))
        frame += count
    return tokens


def decode(
    model: Parakeet,
    encoded: torch.Tensor,
    frames: list[int],
    memory: Memory | None = None,
) -> list[list[Token]]:
    """The tokens of every utterance of the encoder's output (B, T, D), with their times.
    `memory`: as in `greedy`."""
    if model.decodes_ctc:
        return greedy_ctc(model.ctc_log_probs(encoded), frames)

    def step(tokens: torch.Tensor | None, state: tuple | None) -> tuple[torch.Tensor, tuple]:
        if tokens is None:
            tokens = torch.full((len(encoded),), model.blank, device=encoded.device)
        predicted, state = model.decoder(tokens[:, None], state)
        return predicted[:, 0], state

    projected = model.encoder_projector(encoded)
    most = model.config["max_symbols"]
    durations = model.joint.durations
    return greedy(step, model.joint.logits, projected, frames, durations, most, memory)


def frame_samples(config: dict) -> int:
    """Samples of an encoder frame."""
    return config["subsampling"] * HOP


def transcripts(model: Parakeet, tokenizer: ParakeetTokenizer, batch: dict) -> list[dict]:
    """The `transcript` of every utterance of a batch, with its "tokens" and number of "frames"."""
    encoded, frames = model.encode(batch)
    frame_seconds = frame_samples(model.config) / SAMPLE_RATE
    results = []
    for tokens, count in zip(decode(model, encoded, frames), frames, strict=True):
        timed = transcript(tokens, tokenizer, frame_seconds, count)
        results.append({**timed, "tokens": tokens, "frames": count})
    return results


def text_of(tokens: list[Token], tokenizer) -> str:
    """The text of an utterance, with single spaces."""
    return " ".join(tokenizer.decode([token.piece for token in tokens]).split())


def transcript(tokens: list[Token], tokenizer, frame_seconds: float, frames: int) -> dict:
    """The text of an utterance of `frames` encoder frames, and its `words` and `segments` as lists
    of {"start", "end", "text"} in seconds.

    Words, segments and times are NeMo's: punctuation takes no time, although the model predicts a
    duration for it; it ends when the token before it ends. A segment ends with a sentence. Unlike
    in NeMo, a piece of a script without spaces is a word, nothing ends after the utterance,
    punctuation at the start of a word belongs to that word, and punctuation between spaces belongs
    to the word before it."""
    tokens = [token for token in tokens if not tokenizer.is_tag(token.piece)]
    timed: list[dict] = []
    for word in _words(tokens, tokenizer, frames):
        start = word["start"] * frame_seconds
        end = word["end"] * frame_seconds
        text = tokenizer.decode(word["pieces"]).strip()
        is_unknown = tokenizer.unknown in word["pieces"]
        if timed and is_mark("".join(text.split())) and not is_unknown:
            timed[-1]["end"] = round(end, 3)
            timed[-1]["text"] += f" {text}"
        elif text:
            timed.append({"start": round(start, 3), "end": round(max(start, end), 3), "text": text})
    text = text_of(tokens, tokenizer)
    return {"text": text, "words": timed, "segments": segments(timed, text)}


def _words(tokens: list[Token], tokenizer, frames: int) -> list[dict]:
    """Words as {"start", "end", "pieces"}, in encoder frames."""
    words: list[dict] = []
    end = 0
    for token in tokens:
        piece = tokenizer.pieces[token.piece]
        if not words or not is_mark(piece.removeprefix(SPACE)):
            end = min(token.frame + token.duration, frames)
        begins = begins_word(token.piece, tokenizer)
        if words and tokenizer.spaces.issuperset(words[-1]["pieces"]):
            begins = piece.startswith(SPACE) or token.piece == tokenizer.unknown
        if not words or begins:
            words.append({"start": token.frame, "pieces": []})
        elif tokenizer.delimiters.issuperset(words[-1]["pieces"]):
            words[-1]["start"] = token.frame
        words[-1]["pieces"].append(token.piece)
        words[-1]["end"] = end
    return words


def begins_word(piece: int, tokenizer) -> bool:
    """Whether a word begins with the piece: after a space, or anywhere in a script that has none
    between words."""
    text = tokenizer.pieces[piece]
    # The unknown token is decoded with spaces.
    is_letter = unicodedata.category(text[0])[0] == "L"
    return (
        text.startswith(SPACE) or piece == tokenizer.unknown or (is_letter and in_unspaced(text[0]))
    )


def is_mark(text: str) -> bool:
    """Whether a text is punctuation alone."""
    return bool(text) and all(unicodedata.category(character)[0] == "P" for character in text)


def segments(words: list[dict], text: str, pause: float = math.inf) -> list[dict]:
    """Joins the words of `text` to sentences, which also end at a pause longer than `pause`
    seconds."""
    result = []
    sentence = ""
    gaps = spaces_before([word["text"] for word in words], text)
    for number, (word, gap) in enumerate(zip(words, gaps, strict=True)):
        if not sentence:
            start = word["start"]
            gap = ""
        sentence += gap + word["text"]
        following = words[number + 1 : number + 2]
        pauses = following and following[0]["start"] - word["end"] > pause
        if not following or pauses or word["text"].endswith(SENTENCE_ENDS):
            result.append({"start": start, "end": word["end"], "text": sentence})
            sentence = ""
    return result
