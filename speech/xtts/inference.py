"""Speaking with XTTS: sentences of a text, latents of a voice, sampling with a key/value cache, and
the ends of clips."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.errors import RunError, UsageError
from speech.xtts.codec import SAMPLE_RATE

# A text is cut after ends of sentences, after commas and between words. Marks and quotes that
# follow stay with what they end. Marks within 3.5, 1,000 and 12:30 do not count. Two Ethiopic word
# spaces or two colons are often typed for ።.
END = r"(?:[።፧፨!?…؟।。！？]|፡፡|::|(?<!\.)\.+(?![\w.]))"
CUTS = tuple(
    re.compile(pattern)
    for pattern in (
        END + r"""(?:["')\]»”’]|\s*(?:""" + END + r"|[)\]»”’]))*\s*",
        r"""(?:[፣፤፥፦،؛，、；：–—]|[,;:](?!\w))+["')\]»”’]*\s*""",
        r"[\s፡]+",
    )
)

REFERENCE_SECONDS = 30  # of each reference clip, as in Coqui's configuration of the released model
CHUNK_SECONDS = 4
SHORTEST_SECONDS = 0.33  # shorter chunks are ignored, as in Coqui's code

MAX_CODES = 602  # of a sentence, 28 s; as in Coqui's code
ROWS = 8  # sentences that are sampled at once; a full-size model's cache takes 0.2 GB each in fp32

FRAME_SECONDS = 0.01
QUIET = 0.01  # level of a frame relative to the loudest one (-40 dB)
SILENT = 1e-4  # level of a frame that is quiet in any clip (-80 dB of full scale)
QUIET_SECONDS = 0.3  # that are kept at the end; a natural end has 0.12 to 0.18 s
FADE_SECONDS = 0.005


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn. `top_k=1` is greedy; `top_k=0`, `top_p=1` and `repetition_penalty=1`
    change nothing."""

    temperature: float = 0.75
    top_k: int = 50
    top_p: float = 0.85
    repetition_penalty: float = 5.0
    seed: int = 0
    max_codes: int = MAX_CODES


GREEDY = Sampling(top_k=1, top_p=1.0, repetition_penalty=1.0)


@dataclass(frozen=True)
class Speech:
    """A sentence as the GPT speaks it: `codes` (N,), and `latents` (N + 1, d) for the vocoder, or
    (N, d) if it has not `ended` at STOP. `draws` is 2 if it was drawn again."""

    codes: torch.Tensor
    latents: torch.Tensor
    ended: bool
    draws: int = 1


# --- text -----------------------------------------------------------------------------------------


def split_sentences(text: str, most_tokens: int, count: Callable[[str], int]) -> list[str]:
    """The sentences of `text`. One with more than `most_tokens`, as `count(piece)` says, is cut
    after commas, else between words, else within a word, into pieces as long as possible. Nothing
    but white space is changed or lost. Raises `UsageError` if a single character has too many
    tokens."""
    sentences = _cut(CUTS[0], " ".join(text.split()))
    pieces = [
        piece for sentence in sentences for piece in _fit(sentence, most_tokens, count, CUTS[1:])
    ]
    return [piece.strip() for piece in pieces if piece.strip()]


def _cut(pattern: re.Pattern, text: str) -> list[str]:
    """The parts of `text`, each with at least a letter or a digit if `text` has any."""
    parts, start, read = [], 0, 0
    for match in pattern.finditer(text):
        if re.search(r"\w", text[read : match.end()]):
            parts.append(text[start : match.end()])
            start = match.end()
        read = match.end()
    if not parts or re.search(r"\w", text[start:]):
        return [*parts, text[start:]]
    return [*parts[:-1], parts[-1] + text[start:]]


def _fit(
    text: str, most_tokens: int, count: Callable[[str], int], cuts: tuple[re.Pattern, ...]
) -> list[str]:
    if count(text.strip()) <= most_tokens:
        return [text]
    if len(text) == 1:
        raise UsageError(
            f"the character {text!r} has more than {most_tokens} tokens: use another vocabulary"
        )
    pieces, piece = [], ""
    for part in _cut(cuts[0], text) if cuts else text:
        if count((piece + part).strip()) <= most_tokens:
            piece += part
            continue
        if piece:
            pieces.append(piece)
        *rest, piece = _fit(part, most_tokens, count, cuts[1:])
        pieces += rest
    return [*pieces, piece]


# --- voice ----------------------------------------------------------------------------------------


@torch.no_grad()
def latents(
    model, mel: Callable[[torch.Tensor], torch.Tensor], waveforms: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Conditioning latents (1, 32, d) of a voice from waveforms (T,) at 22.05 kHz: the mean over
    chunks of 4 s of the first 30 s of each. `mel` maps (1, T) to "conditioning" features (1, M, F).
    A remainder of at least 0.33 s is a chunk, too, and is not padded; a shorter one is ignored, as
    in Coqui's code. Raises `UsageError` if there is no chunk."""
    chunks = [
        chunk
        for waveform in waveforms
        for chunk in waveform[: REFERENCE_SECONDS * SAMPLE_RATE].split(CHUNK_SECONDS * SAMPLE_RATE)
        if len(chunk) >= SHORTEST_SECONDS * SAMPLE_RATE
    ]
    if not chunks:
        raise UsageError(
            f"the reference audio is shorter than {SHORTEST_SECONDS} s: give a longer --speaker_wav"
        )
    return torch.stack([model.condition(mel(chunk[None])) for chunk in chunks]).mean(0)


# --- sampling -------------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    model, config: dict, voice: torch.Tensor, sentences: Sequence[Sequence[int]], settings: Sampling
) -> list[Speech]:
    """Codes and latents of sentences, given as text tokens without START and STOP, in the voice of
    `latents` (1, 32, d).

    A sentence ends where STOP is drawn or, before the repetition penalty, the most probable token,
    because a draw may miss STOP. A sentence that reaches `max_codes` is drawn once more, and a line
    says so. A seed gives each sentence the same random numbers, whatever it is sampled with.
    Sentences with as many tokens are sampled together. `model` is in evaluation mode. Raises
    `UsageError` for a sentence beyond the text positions, `RunError` for logits that are not
    finite."""
    longest = config["text_positions"] - 2
    for number, tokens in enumerate(sentences, 1):
        if len(tokens) > longest:
            raise UsageError(f"sentence {number} has {len(tokens)} tokens: shorten it to {longest}")
    limit = min(settings.max_codes, config["mel_positions"] - 1)
    generator = torch.Generator().manual_seed(settings.seed)
    numbers = torch.rand(2, limit, dtype=torch.float64, generator=generator).tolist()
    spoken: dict[int, Speech] = {}
    again = list(range(len(sentences)))
    for draw in (1, 2):
        for rows in _batches(again, sentences):
            text = [[config["start_text"], *sentences[row], config["stop_text"]] for row in rows]
            embedded = model.embed_text(torch.tensor(text, device=voice.device))
            prefix = torch.cat([voice.expand(len(rows), -1, -1), embedded], 1)
            results = _extend(model, config, prefix, settings, numbers[draw - 1])
            spoken.update(
                (row, Speech(*result, draw)) for row, result in zip(rows, results, strict=True)
            )
        again = [row for row in again if not spoken[row].ended]
    for row, speech in sorted(spoken.items()):
        if not speech.ended:
            print(
                f"sentence {row + 1} reached the limit of {limit} codes twice: try another --seed"
                " or a shorter sentence"
            )
        elif speech.draws == 2:
            print(f"sentence {row + 1} reached the limit of {limit} codes and was drawn once more")
    return [spoken[row] for row in range(len(sentences))]


def _batches(rows: list[int], sentences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """At most `ROWS` sentences each, which have the same number of tokens: the GPT attends to all
    that is before."""
    lengths = [len(tokens) for tokens in sentences]
    for _, group in itertools.groupby(sorted(rows, key=lengths.__getitem__), lengths.__getitem__):
        while batch := list(itertools.islice(group, ROWS)):
            yield batch


def _extend(
    model, config: dict, prefix: torch.Tensor, settings: Sampling, numbers: list[float]
) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(codes, latents, ended) for each row of `prefix` (B, T, d), with one random number for each
    step.

    The latents are the GPT's hidden states at START and at the codes, which Coqui's code computes
    in a second pass."""
    batch, device, stop = len(prefix), prefix.device, config["stop_audio"]
    forbidden = torch.ones(config["audio_tokens"], dtype=torch.bool, device=device)
    forbidden[: config["codes"]] = forbidden[stop] = False
    seen = torch.zeros(batch, len(forbidden), dtype=torch.bool, device=device)
    codes: list[list[int]] = [[] for _ in range(batch)]
    states: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    rows, cache = list(range(batch)), None  # the rows that have not ended
    x = torch.cat(
        [prefix, model.embed_mel(torch.full((batch, 1), config["start_audio"], device=device), 0)],
        1,
    )
    for step, number in enumerate(numbers):
        hidden, cache = model.run(x, cache)
        logits = model.mel_logits(hidden[:, -1:])[:, 0].double()
        finite = logits.isfinite().all(1)
        logits = logits.masked_fill(forbidden, -torch.inf)
        drawn = pick(filter_logits(logits, seen, settings), number)
        ends = (drawn == stop) | (logits.argmax(1) == stop)
        values, stops, fine = torch.stack(
            [drawn, ends, finite]
        ).tolist()  # one transfer from the device
        if not all(fine):
            raise RunError(
                f"the GPT's logits are not finite at code {step}: use fp32, or another checkpoint"
            )
        for row, state in zip(rows, hidden[:, -1], strict=True):
            states[row].append(state)
        for row, value, end in zip(rows, values, stops, strict=True):
            if not end:
                codes[row].append(value)
        rows = [row for row, end in zip(rows, stops, strict=True) if not end]
        if not rows:
            break
        if any(stops):
            active = (~ends).nonzero()[:, 0]
            seen, drawn = seen[active], drawn[active]
            cache = [[keys[active], values[active]] for keys, values in cache]
        seen = seen.scatter(1, drawn[:, None], True)
        x = model.embed_mel(drawn[:, None], step + 1)
    lines = [torch.tensor(line, dtype=torch.long, device=device) for line in codes]
    return [(lines[row], torch.stack(states[row]), row not in rows) for row in range(batch)]


def filter_logits(logits: torch.Tensor, seen: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """Logits (B, V) after repetition penalty on tokens in `seen` (B, V), temperature, top-k and
    top-p, in the order and with the results of transformers' processors; -inf for what is not
    drawn."""
    penalty = settings.repetition_penalty
    logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    logits = logits / settings.temperature
    if settings.top_k:
        kth = logits.topk(min(settings.top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if settings.top_p < 1:
        ordered, order = logits.sort(1, descending=True)
        probabilities = ordered.softmax(1)
        beyond = (
            probabilities.cumsum(1) - probabilities >= settings.top_p
        )  # what is more probable suffices
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return logits


def pick(logits: torch.Tensor, number: float) -> torch.Tensor:
    """The tokens (B,) that a random number in [0, 1) draws from softmax of logits (B, V)."""
    cumulative = logits.softmax(1).cumsum(1)
    return (cumulative <= number * cumulative[:, -1:]).sum(1).clamp_max(logits.shape[1] - 1)


# --- waveforms ------------------------------------------------------------------------------------


def finish(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """A waveform (T,) without what is quiet for more than 0.3 s at its end, and with its last 5 ms
    faded out."""
    size = round(FRAME_SECONDS * rate)
    frames = F.pad(waveform, (0, -len(waveform) % size)).view(-1, size)
    levels = frames.square().mean(1).sqrt()
    loud = (levels > max(SILENT, QUIET * float(levels.max()))).nonzero() if len(levels) else levels
    end = (int(loud[-1]) + 1) * size if len(loud) else 0
    waveform = waveform[: end + round(QUIET_SECONDS * rate)].clone()
    fade = min(len(waveform), round(FADE_SECONDS * rate))
    waveform[len(waveform) - fade :] *= torch.linspace(
        1, 0, fade + 1, dtype=waveform.dtype, device=waveform.device
    )[1:]
    return waveform


def join(waveforms: Sequence[torch.Tensor], rate: int) -> torch.Tensor:
    """The finished waveforms (T,) of sentences as one."""
    return torch.cat([finish(waveform, rate) for waveform in waveforms])
