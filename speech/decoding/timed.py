"""Tokens with their frames: of a CTC head, and the words and segments that they make up.

The functions take a tokenizer of any family, with `decode`, `is_tag` and four attributes: `pieces`
(strings, with U+2581 for a space), `spaces` (ids of the pieces of spaces alone), `delimiters`
(those that are no part of a word's time) and `parted` (ids that are decoded with spaces around
them)."""

import itertools
import math
import unicodedata
from dataclasses import dataclass, field

import numpy as np
import torch

from common.device import upcast
from speech.alignment import viterbi
from speech.decoding.ngram import Fusion
from speech.decoding.search import LM_BEAM, ctc_prefix_beam
from speech.writing.text import SENTENCE_ENDS, in_unspaced, spaces_before

SPACE = "\u2581"  # in a piece


@dataclass(frozen=True)
class Token:
    """A token with its time."""

    piece: int
    frame: int  # the first one of the encoder
    duration: int  # in frames: 1 in RNN-T, which does not say it; those with the piece in CTC
    log_prob: float | None = field(default=None, compare=False)  # its mean in CTC


@torch.no_grad()
def greedy_ctc(log_probs: torch.Tensor, lengths: list[int], blank: int) -> list[list[Token]]:
    """The likeliest tokens of log-probabilities (B, T, V): runs of a piece are one; no blanks."""
    best, pieces = log_probs.max(2)
    utterances = zip(pieces.tolist(), best.tolist(), lengths, strict=True)
    return [_runs(path[:length], values, blank) for path, values, length in utterances]


def beam_ctc(
    log_probs: torch.Tensor, lengths: list[int], blank: int, fusion: Fusion
) -> list[list[Token]]:
    """The best tokens of log-probabilities (B, T, V) and a language model, as `aligned`."""
    hypotheses = []
    for values, length in zip(upcast(log_probs), lengths, strict=True):
        own = values[:length]
        tokens, _ = ctc_prefix_beam(own.cpu().numpy(), LM_BEAM, blank, fusion)[0]
        hypotheses.append(aligned(own, [*tokens], blank))
    return hypotheses


def aligned(log_probs: torch.Tensor, tokens: list[int], blank: int) -> list[Token]:
    """The tokens of a text where CTC's likeliest path through it has them, by log-probabilities
    (T, V). Searches other than `greedy_ctc` find texts without times."""
    values = upcast(log_probs).cpu().numpy()
    states = viterbi.align(values, np.array(tokens, int), blank).states
    found = []
    for state, run in itertools.groupby(range(len(states)), states.__getitem__):
        if state % 2:
            frames = [*run]
            piece = tokens[state // 2]
            mean = float(values[frames, piece].mean())
            found.append(Token(piece, frames[0], len(frames), mean))
    return found


def _runs(path: list[int], log_probs: list[float], blank: int) -> list[Token]:
    """The tokens of a path of frames, whose pieces have these log-probabilities."""
    tokens = []
    frame = 0
    for piece, run in itertools.groupby(path):
        count = len(list(run))
        if piece != blank:
            mean = sum(log_probs[frame : frame + count]) / count
            tokens.append(Token(piece, frame, count, mean))
        frame += count
    return tokens


def text_of(tokens: list[Token], tokenizer) -> str:
    """The text of an utterance, with single spaces."""
    return " ".join(tokenizer.decode([token.piece for token in tokens]).split())


def transcripts(
    hypotheses: list[list[Token]], frames: list[int], tokenizer, frame_seconds: float
) -> list[dict]:
    """The `transcript` of each utterance, with "tokens" and "frames" for `windows.join`."""
    return [
        {**transcript(tokens, tokenizer, frame_seconds, n), "tokens": tokens, "frames": n}
        for tokens, n in zip(hypotheses, frames, strict=True)
    ]


def transcript(tokens: list[Token], tokenizer, frame_seconds: float, frames: int) -> dict:
    """The text of an utterance of `frames` encoder frames, and its `words` and `segments` as lists
    of {"start", "end", "text"} in seconds. In CTC words also have a "confidence", the geometric
    mean of the probabilities of their tokens.

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
        is_parted = not tokenizer.parted.isdisjoint(word["pieces"])
        if timed and is_mark("".join(text.split())) and not is_parted:
            timed[-1]["end"] = round(end, 3)
            timed[-1]["text"] += f" {text}"
        elif text:
            timed.append({"start": round(start, 3), "end": round(max(start, end), 3), "text": text})
            if values := word["log_probs"]:
                timed[-1]["confidence"] = round(math.exp(sum(values) / len(values)), 3)
    text = text_of(tokens, tokenizer)
    return {"text": text, "words": timed, "segments": segments(timed, text)}


def _words(tokens: list[Token], tokenizer, frames: int) -> list[dict]:
    """Words as {"start", "end", "pieces", "log_probs"}, in encoder frames. Spaces that are no part
    of a word's time are none of its log-probabilities."""
    words: list[dict] = []
    end = 0
    for token in tokens:
        piece = tokenizer.pieces[token.piece]
        if not words or not is_mark(piece.removeprefix(SPACE)):
            end = min(token.frame + token.duration, frames)
        begins = begins_word(token.piece, tokenizer)
        if words and tokenizer.spaces.issuperset(words[-1]["pieces"]):
            begins = piece.startswith(SPACE) or token.piece in tokenizer.parted
        if not words or begins:
            words.append({"start": token.frame, "pieces": [], "log_probs": []})
        elif tokenizer.delimiters.issuperset(words[-1]["pieces"]):
            words[-1]["start"] = token.frame
        words[-1]["pieces"].append(token.piece)
        if token.log_prob is not None and token.piece not in tokenizer.delimiters:
            words[-1]["log_probs"].append(token.log_prob)
        words[-1]["end"] = end
    return words


def begins_word(piece: int, tokenizer) -> bool:
    """Whether a word begins with the piece: after a space, or in a script without them."""
    text = tokenizer.pieces[piece]
    is_letter = unicodedata.category(text[0])[0] == "L"
    is_parted = text.startswith(SPACE) or piece in tokenizer.parted
    return is_parted or (is_letter and in_unspaced(text[0]))


def is_mark(text: str) -> bool:
    """Whether a text is punctuation alone."""
    return bool(text) and all(unicodedata.category(character)[0] == "P" for character in text)


def segments(words: list[dict], text: str, pause: float = math.inf) -> list[dict]:
    """Joins the words of `text` to sentences, which also end at a pause over `pause` seconds."""
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
