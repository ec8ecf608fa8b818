"""Whisper's own decoding of recordings of any length, by time tokens (Radford et al. 2022, section
3.8): a window of 30 s is decoded to segments with times, and the next window begins where the last
whole segment ends. Rules and thresholds are those of openai/whisper."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from common.errors import UsageError
from models.whisper import decoding
from models.whisper.decoding import Search
from models.whisper.model import FRAME, Whisper
from models.whisper.tokenizer import WhisperTokenizer, joined
from speech.data.columns import Corpus
from speech.decoding.long import SILENT
from speech.signal.audio import SAMPLE_RATE, read_utterance

FIRST_TIME = 50  # time tokens, 1 s: no window's first segment begins later
# A window that was sampled at a higher temperature is not the context of the next one.
CONTEXT_TEMPERATURE = 0.5


def make_search(tokenizer: WhisperTokenizer, search: Search, flag: str) -> Search:
    """`search` with times: the prompt asks for them, and of the special tokens only they and the
    end of text are generated. `flag` is what asks for times of this model. Raises `UsageError` for
    a model without time tokens."""
    if tokenizer.timestamp_begin is None:
        raise UsageError(
            f"{flag}: the model has no time tokens; only released models, and those that are"
            " fine-tuned from them, have them"
        )
    times = tokenizer.times
    spoken = {tokenizer.eos, *times}
    return replace(
        search,
        prompt=tokenizer.timed_prompt,
        suppress=sorted({*search.suppress, *tokenizer.specials.values()} - spoken),
        rules=functools.partial(time_rules, times, tokenizer.eos),
    )


def time_rules(times: range, eos: int, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (N, V) with -inf for what must not follow `tokens` (N, U): times come in pairs, one
    before the end of text is enough, they do not decrease, and no segment is empty. The first token
    is a time of at most 1 s. If all times together are more probable than any other token, a time
    follows. `times`: the ids of the time tokens; the text's ids are below `eos`."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_time = (ids >= times.start) & (ids < times.stop)
    if not tokens.shape[1]:
        return logits.masked_fill(~is_time | (ids > times.start + FIRST_TIME), -torch.inf)
    said_time = (tokens >= times.start) & (tokens < times.stop)  # (N, U)
    after_time = said_time[:, -1]
    after_text = torch.zeros_like(after_time)  # whether that time ended a segment
    if tokens.shape[1] > 1:
        after_text = ~said_time[:, -2]
    closed = after_time & after_text
    latest = tokens.masked_fill(~said_time, times.start - 1).amax(1)
    earliest = torch.where(closed, latest, latest + 1)
    forbidden = is_time & ((after_time & ~after_text)[:, None] | (ids < earliest[:, None]))
    forbidden |= (ids < eos) & closed[:, None]
    logits = logits.masked_fill(forbidden, -torch.inf)
    time_mass = logits.masked_fill(~is_time, -torch.inf).logsumexp(-1)
    other = logits.masked_fill(is_time, -torch.inf).amax(-1)
    return logits.masked_fill(~is_time & (time_mass > other)[:, None], -torch.inf)


def transcripts(
    model: Whisper, tokenizer: WhisperTokenizer, search: Search, batch: dict
) -> list[dict]:
    """The records of `transcribe` for a batch of whole recordings (B, T)."""
    lengths = batch["audio_lengths_host"].tolist()
    recordings = zip(batch["audio"], lengths, strict=True)
    return [transcribe(model, tokenizer, search, audio[:length]) for audio, length in recordings]


def decode_corpus(
    model: Whisper, tokenizer: WhisperTokenizer, search: Search, corpus: Corpus, flag: str
) -> list[dict]:
    """A row {"file", "seconds", "reference", "hypothesis", "segments"} for each recording, which
    `flag` asks for. `search` is without times. Raises `UsageError`; see `make_search`."""
    search = make_search(tokenizer, search, flag)
    device = next(model.parameters()).device
    rows = []
    for index in range(len(corpus)):
        waveform = read_utterance(corpus, index, SAMPLE_RATE)
        prompt = tokenizer.in_language(search.prompt, corpus.languages[index])
        own = replace(search, prompt=prompt)
        record = transcribe(model, tokenizer, own, waveform.to(device))
        rows.append(
            {
                "file": corpus.where(index),
                "seconds": round(len(waveform) / SAMPLE_RATE, 3),
                "reference": corpus.texts[index],
                "hypothesis": record["text"],
                "segments": record["segments"],
            }
        )
    return rows


@torch.no_grad()
def transcribe(
    model: Whisper, tokenizer: WhisperTokenizer, search: Search, waveform: torch.Tensor
) -> dict:
    """The "text" of a recording (T,), and its "segments" {"start", "end", "text"} in seconds.
    `search` is that of `make_search`."""
    segments = list(_segments(model, tokenizer, search, waveform))
    return {"text": joined(segment["text"] for segment in segments), "segments": segments}


def _segments(
    model: Whisper, tokenizer: WhisperTokenizer, search: Search, waveform: torch.Tensor
) -> Iterator[dict]:
    """The segments with text of a recording (T,), window after window."""
    times = tokenizer.times
    begin = 0  # of a window, samples
    context: list[int] = []  # what the segments before consist of
    while begin < len(waveform):
        window = waveform[begin : begin + model.longest]
        if float(window.abs().max()) <= SILENT:
            begin += len(window)
            continue
        this_search = with_context(tokenizer, search, context, model.config)
        decoded = decoding.decode(model, tokenizer, *_encode(model, window), this_search)[0]
        if decoded.is_silent:
            begin += len(window)
            continue
        parts, moved = split(decoded.tokens, times, len(window))
        if decoded.temperature > CONTEXT_TEMPERATURE:
            context = []
        for start, end, tokens in parts:
            text = " ".join(decoding.cut_loops(tokenizer.decode(tokens)).split())
            if text and end > start:
                if decoded.temperature <= CONTEXT_TEMPERATURE:
                    context += tokens
                yield {
                    "start": round((begin + start) / SAMPLE_RATE, 3),
                    "end": round((begin + end) / SAMPLE_RATE, 3),
                    "text": text,
                }
        begin += moved


def with_context(
    tokenizer: WhisperTokenizer, search: Search, context: list[int], config: dict
) -> Search:
    """`search` after the last tokens of `context`, in half of the decoder's positions."""
    if not context or tokenizer.previous is None:
        return search
    said_before = [tokenizer.previous, *context[-(config["max_target_positions"] // 2 - 1) :]]
    return replace(search, prompt=[*said_before, *search.prompt], start=len(said_before))


def _encode(model: Whisper, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    length = torch.tensor([len(window)])
    lengths = {"audio_lengths": length.to(window.device), "audio_lengths_host": length}
    return model.encode({"audio": window[None], **lengths})


def split(
    tokens: list[int], times: range, length: int
) -> tuple[list[tuple[int, int, list[int]]], int]:
    """The segments (start, end, tokens with times) in the tokens of a window of `length` samples,
    and by how many samples the next window begins later; times are in samples of the window.

    Two times in a row end one segment and begin another. What follows the last pair is cut off by
    the window's end and decoded again, unless a single time ends it: then nobody speaks after
    it. Without pairs the whole window is one segment. Nothing is said after the window's end."""
    is_time = [token in times for token in tokens]
    edges = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    ends_alone = is_time[-2:] == [False, True]
    if not edges:
        start = (tokens[0] - times.start) * FRAME if is_time[:1] == [True] else 0
        said = [(token - times.start) * FRAME for token in tokens[1:] if token in times]
        end = min(length, said[-1]) if said and said[-1] > start else length
        return [(min(start, end), end, tokens)], length
    if ends_alone:
        edges.append(len(tokens))
    parts = []
    for first, last in zip([0, *edges], edges, strict=False):
        part = tokens[first:last]
        start, end = (min(length, (token - times.start) * FRAME) for token in (part[0], part[-1]))
        parts.append((start, end, part))
    return parts, length if ends_alone else parts[-1][1]
