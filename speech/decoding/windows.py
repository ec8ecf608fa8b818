"""Long recordings in overlapping windows whose tokens are joined by time."""

import functools
import itertools
from dataclasses import replace

from speech.decoding.long import (
    Cutting,
    JoinedTexts,
    Piece,
    TimedText,
    Unit,
    overlapping_pieces,
    seams,
)
from speech.decoding.timed import Token, begins_word, segments, text_of, transcript
from speech.signal.audio import SAMPLE_RATE

PAUSE = 1.0  # seconds: a segment of a long recording ends here, too


def by_time(tokenizer, step: int) -> Cutting:
    """How a model with frames of any length reads long recordings. The recording's words are made
    from all of its tokens, as in one pass. `step`: samples of a frame."""
    cut = functools.partial(overlapping_pieces, step=step)
    return Cutting(cut, functools.partial(join, tokenizer, step))


def join(tokenizer, step: int, records: list[dict], pieces: list[Piece]) -> JoinedTexts:
    """The joined records for windows, each a `timed.transcript` with its "tokens" and number of
    "frames". `step`: samples of a frame, at multiples of which the windows begin."""
    heard = []
    frames = 0
    for record, (begin, _) in zip(records, pieces, strict=True):
        tokens = record.get("tokens", ())  # silence has none
        frames = max(frames, begin // step + record.get("frames", 0))
        heard.append([replace(token, frame=begin // step + token.frame) for token in tokens])
    seconds = step / SAMPLE_RATE
    units = []
    for tokens in heard:
        units.append(
            [
                Unit(token.piece, token.frame * seconds, begins_word(token.piece, tokenizer))
                for token in tokens
            ]
        )
    edges = [(begin / SAMPLE_RATE, end / SAMPLE_RATE) for begin, end in pieces]
    ranges = seams(units, edges)
    kept = [tokens[a:b] for tokens, (a, b) in zip(heard, ranges, strict=True)]
    whole = transcript(in_order(kept), tokenizer, seconds, frames)
    if len(pieces) > 1:
        whole["segments"] = segments(whole["words"], whole["text"], PAUSE)
    texts = [text_of(tokens, tokenizer) for tokens in kept]
    return JoinedTexts(whole.pop("text"), shares(texts, kept, step, pieces), whole)


def in_order(windows: list[list[Token]]) -> list[Token]:
    """The tokens of all windows, in whose overlap times differ a little: none begins before the
    one before it, and the last of a window lasts no longer than to the next one."""
    tokens: list[Token] = []
    for window in windows:
        if tokens and window:
            room = max(0, window[0].frame - tokens[-1].frame)
            tokens[-1] = replace(tokens[-1], duration=min(tokens[-1].duration, room))
        for token in window:
            first = tokens[-1].frame if tokens else 0
            tokens.append(replace(token, frame=max(token.frame, first)))
    return tokens


def shares(
    texts: list[str], kept: list[list[Token]], step: int, pieces: list[Piece]
) -> list[TimedText]:
    """Each window's share of the recording, in samples: from its first token, or from the middle
    of the overlap if that lies elsewhere."""
    cuts = [pieces[0][0]]
    for tokens, (_, end), (begin, _) in zip(kept[1:], pieces, pieces[1:], strict=False):
        first = tokens[0].frame * step if tokens else -1
        cuts.append(first if begin <= first <= end else (begin + end) // 2)
    cuts.append(pieces[-1][1])
    return [(a, b, text) for (a, b), text in zip(itertools.pairwise(cuts), texts, strict=True)]
