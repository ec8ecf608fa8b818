"""Whisper's probabilities to text: greedy, sampling and beam search with the key/value cache; the fallback to higher
temperatures; loops cut.

The searches take the encoder's (B, T, D), its mask (B, 1, 1, T) or None, and the prompt from <|startoftranscript|> on.
Log-probabilities are those after suppression, as in openai/whisper."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.device import upcast
from speech.whisper.model import Cache, Whisper

MOST = 224  # tokens: what the released models were trained to give for 30 s
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
CHECK_EVERY = {"cuda": 8}  # steps between two looks at which rows have ended (1 elsewhere): each waits for the device
LOOP_REPEATS, LOOP_SPAN = 4, 40  # see cut_loops


@dataclass
class Hypothesis:
    """`tokens` without prompt and end; `log_probability` of them and, where it is `ended`, of the end, summed;
    `no_speech`: probability of silence, None where the vocabulary has no token for it."""

    tokens: list[int]
    log_probability: float
    ended: bool
    no_speech: float | None = None

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.log_probability / max(1, len(self.tokens) + self.ended)


@dataclass
class Decoded:
    """What `decode` found for one utterance. `text` is empty where it is silent, and has no loops; `tokens`,
    `log_probability` (per token) and `compression_ratio` are of the search's own result."""

    text: str
    tokens: list[int]
    log_probability: float
    compression_ratio: float
    temperature: float
    no_speech: float | None


@torch.no_grad()
def greedy(
    model: Whisper, encoded: torch.Tensor, mask: torch.Tensor | None, prompt: Sequence[int], end: int,
    most: int = MOST, suppress: Sequence[int] = (), suppress_first: Sequence[int] = (), no_speech: int | None = None,
) -> list[Hypothesis]:  # fmt: skip
    """The most probable token at each step, for each utterance. `most`: tokens, cut to the model's positions.
    `suppress`: tokens never taken; `suppress_first`: not as the first one. `no_speech`: the token whose probability
    after the prompt's first token tells silence."""

    def pick(logits: torch.Tensor, step: int) -> torch.Tensor:
        return logits.argmax(-1)

    return _extend(model, encoded, mask, prompt, end, most, suppress, suppress_first, no_speech, 1, pick)


@torch.no_grad()
def sample(
    model: Whisper, encoded: torch.Tensor, mask: torch.Tensor | None, prompt: Sequence[int], end: int,
    temperature: float, generator: torch.Generator, best_of: int = 1, most: int = MOST, suppress: Sequence[int] = (),
    suppress_first: Sequence[int] = (), no_speech: int | None = None,
) -> list[Hypothesis]:  # fmt: skip
    """Tokens drawn from softmax(logits / temperature), the best by log-probability per token of `best_of` tries. The
    log-probabilities are at temperature 1. `generator`, on the CPU, gives one number a step and try, the same for every
    utterance: what one gets depends neither on its batch nor on the device."""
    numbers = torch.rand(most, best_of, dtype=torch.float64, generator=generator).to(encoded.device)

    def pick(logits: torch.Tensor, step: int) -> torch.Tensor:
        below = (logits.double() / temperature).softmax(-1).cumsum(-1)
        drawn = numbers[step].repeat(len(logits) // best_of)[:, None] * below[:, -1:]
        return (below <= drawn).sum(-1).clamp_max(logits.shape[1] - 1)

    found = _extend(model, encoded, mask, prompt, end, most, suppress, suppress_first, no_speech, best_of, pick)
    return [max(found[i : i + best_of], key=lambda one: one.mean) for i in range(0, len(found), best_of)]


@torch.no_grad()
def beam(
    model: Whisper, encoded: torch.Tensor, mask: torch.Tensor | None, prompt: Sequence[int], end: int,
    beam_size: int = 5, most: int = MOST, length_penalty: float = 1.0, suppress: Sequence[int] = (),
    suppress_first: Sequence[int] = (), no_speech: int | None = None,
) -> list[Hypothesis]:  # fmt: skip
    """Beam search, the best hypothesis of each utterance by log-probability / length ** `length_penalty`, the end
    included in both. At each step an end among an utterance's `beam_size` best continuations is a finished hypothesis,
    and the `beam_size` best that do not end go on; at `beam_size` finished ones, or at `most` tokens, where what is
    unfinished counts as it is, the utterance is done. That is transformers' beam search with early_stopping=True."""
    cache, logits, silence = _start(model, encoded, mask, prompt, no_speech)
    count, size, device = len(encoded), logits.shape[1], encoded.device
    most = _most(model, prompt, most)
    bias, bias_first = _bias(logits, suppress), _bias(logits, [*suppress, *suppress_first])
    first = torch.arange(count, device=device).repeat_interleave(beam_size)
    cache.reorder(first)
    logits = logits[first]
    # All beams of an utterance begin alike, so only one counts.
    scores = torch.full((count, beam_size), -math.inf, dtype=logits.dtype, device=device)
    scores[:, 0] = 0
    prefixes: list[list[int]] = [[] for _ in range(count * beam_size)]
    finished: list[list[tuple[float, Hypothesis]]] = [[] for _ in range(count)]
    going = list(range(count))
    for step in range(most):
        following = (logits + (bias if step else bias_first)).log_softmax(-1)
        total = (scores.reshape(-1, 1) + following).view(len(going), -1)  # (N, K V)
        best, flat = total.topk(2 * beam_size)  # enough: each beam has one end
        best, flat = torch.stack([best.double(), flat.double()]).tolist()  # one wait for the device a step
        kept, rows, values = [], [], []
        for place, utterance in enumerate(going):
            alive = []
            for rank, (value, index) in enumerate(zip(best[place], flat[place], strict=True)):
                row, token = divmod(int(index), size)
                row += place * beam_size
                ends = token == end
                if (ends or step + 1 == most) and rank < beam_size and value > -math.inf:
                    hypothesis = Hypothesis(prefixes[row] + [token] * (not ends), value, ends)
                    finished[utterance].append((value / (step + 1) ** length_penalty, hypothesis))
                elif not ends:
                    alive.append((value, row, token))
            if len(finished[utterance]) < beam_size and alive and alive[0][0] > -math.inf:
                kept.append(place)
                rows += [(row, token) for _, row, token in alive[:beam_size]]
                values.append([value for value, _, _ in alive[:beam_size]])
        if not kept or step + 1 == most:
            break
        prefixes = [[*prefixes[row], token] for row, token in rows]
        scores = torch.tensor(values, dtype=logits.dtype).to(device, non_blocking=True)
        origin, tokens = torch.tensor(rows).T.to(device, non_blocking=True)
        mask = _narrow(cache, mask, origin, kept if len(kept) < len(going) else None)
        going = [going[place] for place in kept]
        logits = upcast(model.logits(model.decoder(tokens[:, None], encoded, mask, cache)[:, -1]))
    found = [max(ones, key=lambda pair: pair[0])[1] for ones in finished]
    for hypothesis, probability in zip(found, silence, strict=True):
        hypothesis.no_speech = probability
    return found


def _most(model: Whisper, prompt: Sequence[int], most: int) -> int:
    return min(most, model.config["max_target_positions"] - len(prompt))


def _bias(logits: torch.Tensor, suppress: Sequence[int]) -> torch.Tensor:
    """(V,) of 0, and -inf for what is suppressed."""
    bias = torch.zeros(logits.shape[1], dtype=logits.dtype)
    bias[list(suppress)] = -math.inf
    return bias.to(logits.device)


def _start(model: Whisper, encoded, mask, prompt, no_speech) -> tuple[Cache, torch.Tensor, list[float | None]]:
    """The cache after the prompt, the logits (B, V) that follow it, and each utterance's probability of silence."""
    cache = Cache(len(model.decoder.layers))
    tokens = torch.tensor(list(prompt), device=encoded.device).expand(len(encoded), -1)
    x = model.decoder(tokens, encoded, mask, cache)
    silence = [None] * len(encoded)
    if no_speech is not None:
        silence = upcast(model.logits(x[:, 0])).softmax(-1)[:, no_speech].tolist()
    return cache, upcast(model.logits(x[:, -1])), silence


def _narrow(cache: Cache, mask, rows: torch.Tensor, utterances: list[int] | None) -> torch.Tensor | None:
    """Continues the cache from `rows` and, unless None, for these utterances alone; returns their mask."""
    cache.reorder(rows)
    if utterances is None:
        return mask
    kept = torch.tensor(utterances).to(rows.device, non_blocking=True)
    cache.keep(kept)
    return None if mask is None else mask[kept]


def _extend(
    model: Whisper, encoded, mask, prompt, end: int, most: int, suppress, suppress_first, no_speech, copies: int,
    pick: Callable[[torch.Tensor, int], torch.Tensor],
) -> list[Hypothesis]:  # fmt: skip
    """`copies` hypotheses for each utterance, next to each other, token by token as `pick(logits (N, V), step)` says.
    Utterances whose hypotheses have all ended leave the batch."""
    cache, logits, silence = _start(model, encoded, mask, prompt, no_speech)
    device, most = encoded.device, _most(model, prompt, most)
    bias, bias_first = _bias(logits, suppress), _bias(logits, [*suppress, *suppress_first])
    rows = torch.arange(len(encoded), device=device).repeat_interleave(copies)
    if copies > 1:
        cache.reorder(rows)
        logits = logits[rows]
    tokens = torch.full((len(rows), most), end, device=device)
    sums = torch.zeros(len(rows), dtype=logits.dtype, device=device)
    where = torch.arange(len(rows), device=device)  # the places in `tokens` of the batch's rows
    done = torch.zeros_like(where, dtype=torch.bool)
    every = CHECK_EVERY.get(device.type, 1)
    for step in range(most):
        logits = logits + (bias if step else bias_first)
        following = pick(logits, step)  # what follows an end is cut off below
        score = logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)
        sums[where] += score.masked_fill(done, 0.0)
        tokens[where, step] = following
        done = done | (following == end)
        if step + 1 == most:
            break
        if (step + 1) % every == 0:
            alive = (~done).view(-1, copies).any(1).tolist()
            if not any(alive):
                break
            if not all(alive):
                kept = [place for place, going in enumerate(alive) if going]
                stay = torch.tensor([place * copies + copy for place in kept for copy in range(copies)]).to(device)
                mask = _narrow(cache, mask, stay, kept)
                following, done, where = following[stay], done[stay], where[stay]
        logits = upcast(model.logits(model.decoder(following[:, None], encoded, mask, cache)[:, -1]))
    found = []
    for row, (line, score) in enumerate(zip(tokens.tolist(), sums.tolist(), strict=True)):
        ended = end in line
        found.append(Hypothesis(line[: line.index(end)] if ended else line, score, ended, silence[row // copies]))
    return found


@torch.no_grad()
def decode(
    model: Whisper, tokenizer, encoded: torch.Tensor, mask: torch.Tensor | None, method: str = "greedy",
    beam_size: int = 5, length_penalty: float = 1.0, best_of: int = 1, most: int = MOST, suppress: Sequence[int] = (),
    suppress_first: Sequence[int] = (), temperatures: Sequence[float] = TEMPERATURES, most_compression: float = 2.4,
    least_log_probability: float = -1.0, silence: float = 0.6, seed: int = 0,
) -> list[Decoded]:  # fmt: skip
    """The text of each utterance, by `method` (`greedy` or `beam`) at temperature 0 and by sampling above.

    A result fails where its text compresses by more than `most_compression` or its log-probability per token is below
    `least_log_probability`; the utterances that failed are decoded again at the next temperature. Silence, which is a
    probability of no speech above `silence` together with such a low log-probability, is accepted at once as empty
    text. What fails at every temperature becomes its most probable try, those that do not compress too well first.
    The model must be in evaluation mode."""
    common = {"most": most, "suppress": suppress, "suppress_first": suppress_first, "no_speech": tokenizer.no_speech}
    given = (tokenizer.prompt, tokenizer.end)

    def search(encoded: torch.Tensor, mask: torch.Tensor | None, number: int) -> list[Hypothesis]:
        temperature = temperatures[number]
        if temperature > 0:
            generator = torch.Generator().manual_seed(seed * len(TEMPERATURES) + number)
            return sample(model, encoded, mask, *given, temperature, generator, best_of, **common)
        if method == "beam":
            return beam(model, encoded, mask, *given, beam_size, length_penalty=length_penalty, **common)
        return greedy(model, encoded, mask, *given, **common)

    def is_silent(one: Decoded) -> bool:
        return one.no_speech is not None and one.no_speech > silence and one.log_probability < least_log_probability

    def has_failed(one: Decoded) -> bool:
        poor = one.compression_ratio > most_compression or one.log_probability < least_log_probability
        return poor and not is_silent(one)

    tries: list[list[Decoded]] = [[] for _ in range(len(encoded))]
    failed = list(range(len(encoded)))
    for number, temperature in enumerate(temperatures):
        again = torch.tensor(failed, device=encoded.device)
        found = search(encoded[again], None if mask is None else mask[again], number)
        for row, one in zip(failed, found, strict=True):
            text = tokenizer.decode(one.tokens).strip()
            ratio = compression_ratio(text)
            tries[row].append(Decoded(text, one.tokens, one.mean, ratio, temperature, one.no_speech))
        failed = [row for row in failed if has_failed(tries[row][-1])]
        if not failed:
            break

    def preferred(one: Decoded) -> tuple:
        return not has_failed(one), one.compression_ratio <= most_compression, one.log_probability

    chosen = [max(ones, key=preferred) for ones in tries]
    for one in chosen:
        one.text = "" if is_silent(one) else cut_loops(one.text)
    return chosen


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes the text's UTF-8: above 2.4 it repeats itself. Short texts are below 1."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def cut_loops(text: str, repeats: int = LOOP_REPEATS, span: int = LOOP_SPAN) -> str:
    """Cuts every loop to a single occurrence. A loop is a stretch of at least `span` characters that consists of one
    unit of any length at least `repeats` times in a row (the last may be incomplete). So "CQ CQ CQ", "TEST TEST",
    "5NN 5NN" and twenty zeros stay, and so does a phrase said three times. Words stay whole where the unit has a
    space."""
    while True:
        characters = np.array([ord(character) for character in text])
        for period in range(1, len(text) // repeats + 1):
            differ = np.flatnonzero(characters[period:] != characters[:-period])
            edges = np.concatenate([[-1], differ, [len(text) - period]])
            stretches = np.diff(edges) - 1 + period  # lengths of those with this period
            found = np.flatnonzero(stretches >= max(span, repeats * period))
            if len(found):
                break
        else:
            return text
        start = int(edges[found[0]]) + 1
        after, cut = start + int(stretches[found[0]]), start + period
        space = text.find(" ", cut - 1, cut - 1 + period)
        cut = cut if space < 0 else space
        # What follows the last whole unit stays, unless the text breaks off in it.
        whole = cut + (after - cut - (space >= 0)) // period * period
        text = text[:cut] + (text[whole:] if after < len(text) else "")
