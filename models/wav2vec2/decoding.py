"""Decoding of the CTC head, with times: greedy, or in a beam with a language model.

CTC says most pieces in one or two frames, in which they begin: a piece lasts one frame longer than
that, or until the next one."""

from dataclasses import replace
from itertools import pairwise

import torch

from models.wav2vec2.model import Wav2Vec2, frame_samples
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from speech.decoding import timed
from speech.decoding.ngram import Fusion
from speech.decoding.timed import Token, beam_ctc, greedy_ctc
from speech.signal.audio import SAMPLE_RATE


def decode(
    model: Wav2Vec2, encoded: torch.Tensor, frames: list[int], fusion: Fusion | None = None
) -> list[list[Token]]:
    """The tokens of every utterance of the encoder's output (B, T, D), with their times and
    log-probabilities: the likeliest at every frame, or the best with a language model."""
    log_probs = model.ctc_log_probs(encoded)
    if fusion:
        hypotheses = beam_ctc(log_probs, frames, model.blank, fusion)
    else:
        hypotheses = greedy_ctc(log_probs, frames, model.blank)
    return [longer(tokens, count) for tokens, count in zip(hypotheses, frames, strict=True)]


def longer(tokens: list[Token], frames: int) -> list[Token]:
    """The tokens of an utterance of so many frames, each a frame longer if there is room."""
    starts = [*(token.frame for token in tokens), frames]
    rooms = [following - start for start, following in pairwise(starts)]
    return [
        replace(token, duration=min(token.duration + 1, room))
        for token, room in zip(tokens, rooms, strict=True)
    ]


@torch.no_grad()
def transcripts(
    model: Wav2Vec2, tokenizer: Wav2Vec2Tokenizer, batch: dict, fusion: Fusion | None = None
) -> list[dict]:
    """The `timed.transcripts` of a batch."""
    encoded, frames = model.encode(batch)
    seconds = frame_samples(model.config) / SAMPLE_RATE
    return timed.transcripts(decode(model, encoded, frames, fusion), frames, tokenizer, seconds)
