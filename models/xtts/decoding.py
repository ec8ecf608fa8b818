"""Decoding of XTTS's GPT: codes of sentences, sampled with a key/value cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.errors import RunError

MAX_CODES = 602  # of a sentence, 28 s; as in Coqui's code
ROWS = 8  # sentences that are sampled at once; a full-size model's cache takes 0.2 GB each in fp32


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn. `top_k=1` is greedy; `top_k=0` and 1 for the others change nothing."""

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


@torch.no_grad()
def sample(
    model,
    config: dict,
    voice: torch.Tensor,
    sentences: Sequence[Sequence[int]],
    settings: Sampling,
    texts: Sequence[str] = (),
) -> list[Speech]:
    """Codes and latents of sentences, given as text tokens without START and STOP, in the voice of
    `latents` (1, 32, d).

    A sentence ends where STOP is drawn, or where it is the most probable token before the
    repetition penalty, because a draw may miss it. A sentence that reaches `max_codes` is drawn
    once more, and a message says so, with its text if `texts` are given. A seed gives each sentence
    the same random numbers, whatever it is sampled with. Up to `ROWS` sentences of about the same
    length are sampled together. `model` is in evaluation mode. Raises `RunError` for logits that
    are not finite."""
    limit = min(settings.max_codes, config["mel_positions"] - 1)
    generator = torch.Generator().manual_seed(settings.seed)
    numbers = torch.rand(2, limit, dtype=torch.float64, generator=generator).tolist()
    spoken: dict[int, Speech] = {}
    again = list(range(len(sentences)))
    for draw in (1, 2):
        again.sort(key=lambda row: len(sentences[row]))  # those of similar lengths together
        for rows in (again[first : first + ROWS] for first in range(0, len(again), ROWS)):
            prefixes = []
            for row in rows:
                text = [config["start_text"], *sentences[row], config["stop_text"]]
                embedded = model.embed_text(torch.tensor([text], device=voice.device))
                prefixes.append(torch.cat([voice, embedded], 1))
            results = _extend(model, config, prefixes, settings, numbers[draw - 1])
            for row, result in zip(rows, results, strict=True):
                spoken[row] = Speech(*result, draw)
        again = [row for row in again if not spoken[row].ended]
    for row, speech in sorted(spoken.items()):
        if speech.draws == 2:
            name = repr(texts[row][:40]) if texts else str(row + 1)
            told = "and was drawn once more"
            if not speech.ended:
                told = "twice: try another --seed or a shorter sentence"
            print(f"sentence {name} reached the limit of {limit} codes {told}")
    return [spoken[row] for row in range(len(sentences))]


def _fill_cache(model, prefixes: list[torch.Tensor]) -> tuple[torch.Tensor, list, torch.Tensor]:
    """The last hidden states (B, 1, d) of prefixes (1, T, d), each run alone, their keys and values
    with padding on the left, and which of these (B, T) are not padding."""
    runs = [model.run(prefix) for prefix in prefixes]
    hidden = torch.cat([states[:, -1:] for states, _ in runs])
    lengths = torch.tensor([prefix.shape[1] for prefix in prefixes], device=hidden.device)
    longest = int(lengths.max())
    cache = []
    for layers in zip(*(layers for _, layers in runs), strict=True):
        parts = zip(*layers, strict=True)
        cache.append(
            [
                torch.cat([F.pad(part, (0, 0, longest - part.shape[2], 0)) for part in padded])
                for padded in parts
            ]
        )
    steps = torch.arange(longest, device=hidden.device)
    return hidden, cache, steps >= longest - lengths[:, None]


def _extend(
    model, config: dict, prefixes: list[torch.Tensor], settings: Sampling, numbers: list[float]
) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(codes, latents, ended) for each of `prefixes` (1, T, d), which may differ in length.
    `numbers`: a random number for each step.

    The latents are the GPT's hidden states at START and at the codes, which Coqui's code computes
    in a second pass."""
    batch = len(prefixes)
    device = prefixes[0].device
    stop = config["stop_audio"]
    forbidden = torch.ones(config["audio_tokens"], dtype=torch.bool, device=device)
    forbidden[: config["codes"]] = False
    forbidden[stop] = False
    seen = torch.zeros(batch, len(forbidden), dtype=torch.bool, device=device)
    codes: list[list[int]] = [[] for _ in range(batch)]
    states: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    rows = list(range(batch))  # the rows that have not ended
    start = model.embed_mel(torch.full((1, 1), config["start_audio"], device=device), 0)
    hidden, cache, heard = _fill_cache(model, [torch.cat([each, start], 1) for each in prefixes])
    for step, number in enumerate(numbers):
        logits = model.mel_logits(hidden[:, -1:])[:, 0].double()
        finite = logits.isfinite().all(1)
        logits = logits.masked_fill(forbidden, -torch.inf)
        drawn = pick(filter_logits(logits, seen, settings), number)
        ends = (drawn == stop) | (logits.argmax(1) == stop)
        # one transfer from the device
        values, stops, all_finite = torch.stack([drawn, ends, finite]).tolist()
        if not all(all_finite):
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
            seen = seen[active]
            heard = heard[active]
            drawn = drawn[active]
            cache = [[keys[active], values[active]] for keys, values in cache]
        seen = seen.scatter(1, drawn[:, None], True)
        if step + 1 < len(numbers):
            heard = F.pad(heard, (0, 1), value=True)
            hidden, cache = model.run(model.embed_mel(drawn[:, None], step + 1), cache, heard)
    lines = [torch.tensor(line, dtype=torch.long, device=device) for line in codes]
    return [(lines[row], torch.stack(states[row]), row not in rows) for row in range(batch)]


def filter_logits(logits: torch.Tensor, seen: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """Logits (B, V) after the repetition penalty on tokens in `seen` (B, V), temperature, top-k and
    top-p, in the order and with the results of transformers' processors. Tokens that cannot be
    drawn have -inf."""
    penalty = settings.repetition_penalty
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    logits = torch.where(seen, penalised, logits)
    logits = logits / settings.temperature
    if settings.top_k:
        kth = logits.topk(min(settings.top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if settings.top_p < 1:
        ordered, order = logits.sort(1, descending=True)
        probabilities = ordered.softmax(1)
        # Tokens are left out if the more probable ones reach top_p.
        beyond = probabilities.cumsum(1) - probabilities >= settings.top_p
        # in the order of the vocabulary
        beyond = torch.zeros_like(beyond).scatter(1, order, beyond)
        logits = logits.masked_fill(beyond, -torch.inf)
    return logits


def pick(logits: torch.Tensor, number: float) -> torch.Tensor:
    """The tokens (B,) that a random `number` in [0, 1) draws from the softmax of logits (B, V)."""
    cumulative = logits.softmax(1).cumsum(1)
    return (cumulative <= number * cumulative[:, -1:]).sum(1).clamp_max(logits.shape[1] - 1)
