"""Whisper's decoding: greedy search, sampling and beam search with a key/value cache, the fallback
to higher temperatures, and the removal of repetition loops.

Every search takes the encoder's output (B, T, D) and its attention mask (B, 1, 1, T), None if
nothing is padded. Log-probabilities are taken after suppression, as in openai/whisper."""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.device import upcast
from models.whisper.model import KVCache, Whisper
from models.whisper.tokenizer import WhisperTokenizer
from speech.data import splits
from speech.signal.audio import SAMPLE_RATE

# The fallback's settings, as in openai/whisper. 0 stands for the search's own method, the others
# are for sampling.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# A text that zlib compresses by a higher ratio repeats itself: it is decoded again.
COMPRESSION_RATIO_THRESHOLD = 2.4
# Mean per token. A text below it is decoded again, unless the utterance is silent.
LOG_PROBABILITY_THRESHOLD = -1.0
# Probability. Above it, and with a log-probability below its threshold, an utterance is silent.
NO_SPEECH_THRESHOLD = 0.6
# Steps between checks for ended rows (1 elsewhere), because each check waits for the GPU.
CHECK_EVERY = {"cuda": 8}
LOOP_REPEATS = 4  # see cut_loops
LOOP_CHARACTERS = 40
RATE_ITEMS = 200  # training utterances whose tokens per second are measured
RATE_MARGIN = 1.25  # of what is held out over the densest of them
SPARE_TOKENS = 4  # that a text of any length may have
NO_LIMIT = 1e6  # tokens


@dataclass(frozen=True)
class Search:
    """The settings of a search."""

    prompt: Sequence[int]  # the decoder's first tokens, from <|startoftranscript|> on
    eos: int
    suppress: Sequence[int] = ()  # tokens that are never generated
    suppress_first: Sequence[int] = ()  # tokens that are not generated directly after the prompt
    # The token whose probability after <|startoftranscript|> is the probability of silence.
    no_speech: int | None = None
    # What the released models were trained to give for 30 s; cut to the model's positions.
    max_new_tokens: int = 224
    method: str = "greedy"  # or "beam"
    beam_size: int = 5
    seed: int = 0  # of the fallback's samples
    start: int = 0  # place of <|startoftranscript|> in the prompt
    # Logits (N, V) and the tokens (N, U) that follow the prompt to logits with -inf for what must
    # not come next.
    rules: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass
class Hypothesis:
    """The result of a search. `decode` adds the text, which has no loops and is empty for silence,
    and the temperature."""

    tokens: list[int]  # without prompt and eos
    log_probability: float  # of all tokens, and of eos if it has ended
    ended: bool
    no_speech_probability: float | None = None  # None: no such token
    text: str = ""
    temperature: float = 0.0

    @property
    def mean_log_probability(self) -> float:
        """Log-probability per token, eos included."""
        return self.log_probability / max(1, len(self.tokens) + self.ended)

    @property
    def is_silent(self) -> bool:
        """Whether nobody speaks: silence is probable, and the text is not."""
        probability = self.no_speech_probability
        is_quiet = probability is not None and probability > NO_SPEECH_THRESHOLD
        return is_quiet and self.mean_log_probability < LOG_PROBABILITY_THRESHOLD

    @property
    def repeats(self) -> bool:
        return compression_ratio(self.text) > COMPRESSION_RATIO_THRESHOLD

    @property
    def has_failed(self) -> bool:
        """Whether `decode` tries the next temperature."""
        is_unlikely = self.mean_log_probability < LOG_PROBABILITY_THRESHOLD
        return (self.repeats or is_unlikely) and not self.is_silent


def make_search(
    tokenizer: WhisperTokenizer,
    generation: dict,
    vocab_size: int,
    method: str = "greedy",
    beam_size: int = 5,
    seed: int = 0,
) -> Search:
    """The search for a model with this tokenizer, generation config and vocabulary. It suppresses
    the config's tokens, ids beyond the tokenizer, and timestamps: they are not trained here, and
    the prompt asks for none."""
    suppress = {*(generation.get("suppress_tokens") or ()), *range(tokenizer.size, vocab_size)}
    suppress |= {*tokenizer.times}
    suppress_first = generation.get("begin_suppress_tokens") or ()
    return Search(
        tokenizer.prompt,
        tokenizer.eos,
        sorted(suppress),
        suppress_first,
        tokenizer.no_speech,
        method=method,
        beam_size=beam_size,
        seed=seed,
    )


def last_steps(search: Search, config: dict) -> Search:
    """A search of two steps after a prompt that is as long as the longest text, so that its cache
    is as large as that of the whole search."""
    prompt = [*search.prompt, *[search.eos] * (_token_limit(config, search) - 2)]
    return replace(search, prompt=prompt, max_new_tokens=2)


@dataclass
class TokenRate:
    """How many tokens an utterance can have, by its length. Without such a limit, a single
    utterance of a hundred whose text does not end adds 16 points to the error rate, and so decides
    which weights are the best; with it, about two. It is measured on the training set, and on
    watched sets, which may be in another language, when it is used first: a dry run need not read
    audio."""

    sets: list
    seed: int

    @functools.cached_property
    def per_second(self) -> float:
        """The rate of the densest of some training utterances, with a margin; no limit if none can
        be read."""
        with torch.autocast("cpu", enabled=False):  # reading may resample
            items = [
                item
                for data in self.sets
                for item in splits.some_items(data, self.seed, RATE_ITEMS)
            ]
        rates = [len(item["ctc_tokens"]) / item["heard"] * SAMPLE_RATE for item in items]
        return RATE_MARGIN * max(rates, default=math.inf)

    def limits(self, samples: Tensor) -> Tensor:
        """(B,) the most tokens of utterances of so many samples (B,)."""
        most = (samples * (self.per_second / SAMPLE_RATE)).clamp_max(NO_LIMIT)
        return most.ceil().long() + SPARE_TOKENS


# --- searches -------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(
    model: Whisper,
    encoded: Tensor,
    mask: Tensor | None,
    search: Search,
    limits: Tensor | None = None,
) -> list[Hypothesis]:
    """The most probable token at each step, for each utterance. `limits` (B,) on the host: after so
    many tokens an utterance ends."""
    if limits is None:
        limits = torch.full((len(encoded),), search.max_new_tokens)
    limits = limits.to(encoded.device, non_blocking=True)

    def pick(logits: Tensor, step: int, active: Tensor) -> Tensor:
        return logits.argmax(-1).masked_fill(limits[active] <= step, search.eos)

    return _extend(model, encoded, mask, search, pick)


@torch.no_grad()
def sample(
    model: Whisper,
    encoded: Tensor,
    mask: Tensor | None,
    search: Search,
    temperature: float,
    generator: torch.Generator,
) -> list[Hypothesis]:
    """Tokens drawn from softmax(logits / temperature); log-probabilities are at temperature 1. The
    CPU `generator` draws one number per step for all utterances, so a result depends neither on the
    batch nor on the device."""
    numbers = torch.rand(search.max_new_tokens, dtype=torch.float64, generator=generator).to(
        encoded.device
    )

    def pick(logits: Tensor, step: int, active: Tensor) -> Tensor:
        cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
        drawn = numbers[step] * cumulative[:, -1:]
        return (cumulative <= drawn).sum(-1).clamp_max(logits.shape[1] - 1)

    return _extend(model, encoded, mask, search, pick)


@torch.no_grad()
def beam(model: Whisper, encoded: Tensor, mask: Tensor | None, search: Search) -> list[Hypothesis]:
    """Beam search; returns each utterance's best hypothesis by log-probability per token.

    At each step, continuations with eos among an utterance's `beam_size` best are finished
    hypotheses, and the `beam_size` best without eos continue. An utterance is done with `beam_size`
    finished hypotheses, or at `max_new_tokens`, where unfinished ones count, too. This is
    transformers' beam search with early_stopping=True and length_penalty=1."""
    kv_cache, logits, no_speech = _read_prompt(model, encoded, mask, search)
    beam_size = search.beam_size
    vocab_size = logits.shape[1]
    device = encoded.device
    max_new_tokens = _token_limit(model.config, search)
    bias, first_bias = _biases(logits, search)
    rows = torch.arange(len(encoded), device=device).repeat_interleave(beam_size)
    kv_cache.reorder(rows)
    logits = logits[rows]
    # All beams of an utterance start equal, so only the first one counts.
    scores = torch.full((len(encoded), beam_size), -math.inf, dtype=logits.dtype, device=device)
    scores[:, 0] = 0
    prefixes: list[list[int]] = [[] for _ in range(len(rows))]
    finished: list[list[Hypothesis]] = [[] for _ in range(len(encoded))]
    active = list(range(len(encoded)))  # the utterances that are still in the batch
    for step in range(max_new_tokens):
        is_last = step + 1 == max_new_tokens
        log_probs = _allow(logits, bias if step else first_bias, search, prefixes).log_softmax(-1)
        totals = (scores.reshape(-1, 1) + log_probs).view(len(active), -1)  # (N, K V)
        # Twice the beams are enough, because each beam has one continuation with eos.
        best, flat = totals.topk(2 * beam_size)
        # One transfer waits for the device once per step.
        best, flat = torch.stack([best.double(), flat.double()]).tolist()
        kept = []
        origins = []
        kept_scores = []
        for position, utterance in enumerate(active):
            candidates = []
            for score, index in zip(best[position], flat[position], strict=True):
                row, token = divmod(int(index), vocab_size)
                candidates.append((score, position * beam_size + row, token))
            ended, alive = _sort_candidates(candidates, prefixes, search, is_last)
            for hypothesis in ended:
                hypothesis.no_speech_probability = no_speech[utterance]
            finished[utterance] += ended
            if len(finished[utterance]) < beam_size and alive and alive[0][0] > -math.inf:
                kept.append(position)
                origins += [(row, token) for _, row, token in alive[:beam_size]]
                kept_scores.append([score for score, _, _ in alive[:beam_size]])
        if not kept or is_last:
            break
        prefixes = [[*prefixes[row], token] for row, token in origins]
        scores = torch.tensor(kept_scores, dtype=logits.dtype).to(device, non_blocking=True)
        rows, tokens = torch.tensor(origins).T.to(device, non_blocking=True)
        mask = _select(kv_cache, mask, rows, kept if len(kept) < len(active) else None)
        active = [active[position] for position in kept]
        logits = _next_logits(model, tokens, encoded, mask, kv_cache)
    return [
        max(hypotheses, key=lambda hypothesis: hypothesis.mean_log_probability)
        for hypotheses in finished
    ]


def _sort_candidates(
    candidates: list[tuple[float, int, int]],
    prefixes: list[list[int]],
    search: Search,
    is_last: bool,
) -> tuple[list[Hypothesis], list[tuple[float, int, int]]]:
    """One utterance's candidates (score, row, token), best first, as finished hypotheses and as
    candidates that continue. `prefixes`: the tokens of each row."""
    finished = []
    alive = []
    for rank, (score, row, token) in enumerate(candidates):
        ends = token == search.eos
        if (ends or is_last) and rank < search.beam_size and score > -math.inf:
            tokens = prefixes[row] if ends else [*prefixes[row], token]
            finished.append(Hypothesis(tokens, score, ends))
        elif not ends:
            alive.append((score, row, token))
    return finished, alive


def _token_limit(config: dict, search: Search) -> int:
    return min(search.max_new_tokens, config["max_target_positions"] - len(search.prompt))


def _biases(logits: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """(V,) of 0, and -inf for suppressed tokens: at every step, and at the first one."""
    bias = torch.zeros(logits.shape[1], dtype=logits.dtype)
    bias[list(search.suppress)] = -math.inf
    first_bias = bias.clone()
    first_bias[list(search.suppress_first)] = -math.inf
    return bias.to(logits.device), first_bias.to(logits.device)


def _allow(
    logits: Tensor, bias: Tensor, search: Search, tokens: Tensor | list[list[int]]
) -> Tensor:
    """Logits (N, V) after the `bias` (V,) and the rules for what may follow the `tokens` (N, U)."""
    logits = logits + bias
    if search.rules is None:
        return logits
    tokens = torch.as_tensor(tokens, dtype=torch.long).to(logits.device, non_blocking=True)
    return search.rules(logits, tokens)


def _read_prompt(
    model: Whisper, encoded: Tensor, mask: Tensor | None, search: Search
) -> tuple[KVCache, Tensor, list[float | None]]:
    """The cache after the prompt, the logits (B, V) of the next token, and each utterance's
    probability of silence."""
    kv_cache = KVCache(len(model.decoder.layers))
    tokens = torch.tensor(list(search.prompt), device=encoded.device).expand(len(encoded), -1)
    x = model.decoder(tokens, encoded, mask, kv_cache)
    no_speech = [None] * len(encoded)
    if search.no_speech is not None:
        at_start = upcast(model.logits(x[:, search.start]))
        no_speech = at_start.softmax(-1)[:, search.no_speech].tolist()
    return kv_cache, upcast(model.logits(x[:, -1])), no_speech


def _next_logits(
    model: Whisper, tokens: Tensor, encoded: Tensor, mask: Tensor | None, kv_cache: KVCache
) -> Tensor:
    """Logits (N, V) after each row's next token (N,)."""
    return upcast(model.logits(model.decoder(tokens[:, None], encoded, mask, kv_cache)[:, -1]))


def _select(
    kv_cache: KVCache, mask: Tensor | None, rows: Tensor, utterances: list[int] | None
) -> Tensor | None:
    """Continues the cache from `rows` and with these utterances, or all; returns their mask."""
    kv_cache.reorder(rows)
    if utterances is None:
        return mask
    kept = torch.tensor(utterances).to(rows.device, non_blocking=True)
    kv_cache.keep(kept)
    return None if mask is None else mask[kept]


def _extend(
    model: Whisper,
    encoded: Tensor,
    mask: Tensor | None,
    search: Search,
    pick: Callable[[Tensor, int, Tensor], Tensor],
) -> list[Hypothesis]:
    """One hypothesis per utterance. Ended ones leave the batch; the next tokens of the others, the
    numbers `active` (N,), are `pick(logits (N, V), step, active)`."""
    kv_cache, logits, no_speech = _read_prompt(model, encoded, mask, search)
    device = encoded.device
    max_new_tokens = _token_limit(model.config, search)
    bias, first_bias = _biases(logits, search)
    tokens = torch.full((len(encoded), max_new_tokens), search.eos, device=device)
    scores = torch.zeros(len(encoded), dtype=logits.dtype, device=device)
    active = torch.arange(len(encoded), device=device)  # the utterances that are still in the batch
    done = torch.zeros_like(active, dtype=torch.bool)
    check_every = CHECK_EVERY.get(device.type, 1)
    for step in range(max_new_tokens):
        this_bias = bias if step else first_bias
        logits = _allow(logits, this_bias, search, tokens[active, :step])
        # Rows that are done continue until the next check; the rest is cut off below.
        following = pick(logits, step, active)
        score = logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)
        scores[active] += score.masked_fill(done, 0.0)
        tokens[active, step] = following
        done = done | (following == search.eos)
        if step + 1 == max_new_tokens:
            break
        if (step + 1) % check_every == 0:
            kept = [position for position, is_done in enumerate(done.tolist()) if not is_done]
            if not kept:
                break
            if len(kept) < len(done):
                rows = torch.tensor(kept).to(device)
                mask = _select(kv_cache, mask, rows, kept)
                following = following[rows]
                done = done[rows]
                active = active[rows]
        logits = _next_logits(model, following, encoded, mask, kv_cache)
    hypotheses = []
    for row, score, probability in zip(tokens.tolist(), scores.tolist(), no_speech, strict=True):
        ended = search.eos in row
        generated = row[: row.index(search.eos)] if ended else row
        hypotheses.append(Hypothesis(generated, score, ended, probability))
    return hypotheses


# --- texts ----------------------------------------------------------------------------------------


def greedy_texts(
    model: Whisper,
    tokenizer: WhisperTokenizer,
    encoded: Tensor,
    mask: Tensor | None,
    search: Search,
    limits: Tensor | None = None,
    languages: list[str] | None = None,
) -> list[str]:
    """Texts of one greedy pass without fallback, which evaluations during training can afford.
    `limits` (B,): the most tokens of each text, see `TokenRate`. `languages` (B): see
    `by_language`."""

    def decoded(search: Search, *inputs) -> list[str]:
        return [
            cut_loops(tokenizer.decode(hypothesis.tokens).strip())
            for hypothesis in greedy(model, *inputs[:2], search, inputs[2])
        ]

    return by_language(decoded, tokenizer, search, languages, (encoded, mask, limits))


def texts(
    model: Whisper,
    tokenizer: WhisperTokenizer,
    encoded: Tensor,
    mask: Tensor | None,
    search: Search,
    languages: list[str] | None = None,
) -> list[str]:
    """Texts of `decode`: by the search's method, with the fallback to higher temperatures.
    `languages` (B): see `by_language`."""

    def decoded(search: Search, *inputs) -> list[str]:
        return [each.text for each in decode(model, tokenizer, *inputs, search)]

    return by_language(decoded, tokenizer, search, languages, (encoded, mask))


def by_language(
    decode: Callable[..., list[str]],
    tokenizer: WhisperTokenizer,
    search: Search,
    languages: list[str] | None,
    inputs: tuple[Tensor | None, ...],
) -> list[str]:
    """The texts of `decode(search, *inputs)` of the B rows of `inputs`, each with the prompt of its
    one of `languages`; with the search's own for all of them if that is None."""
    if languages is None:
        return decode(search, *inputs)
    prompts = [tuple(tokenizer.in_language(search.prompt, each)) for each in languages]
    texts = [""] * len(prompts)
    for prompt in dict.fromkeys(prompts):
        rows = [row for row, each in enumerate(prompts) if each == prompt]
        parts = inputs
        if len(rows) < len(prompts):
            parts = [each if each is None else each[rows] for each in inputs]
        decoded = decode(replace(search, prompt=prompt), *parts)
        for row, text in zip(rows, decoded, strict=True):
            texts[row] = text
    return texts


@torch.no_grad()
def decode(
    model: Whisper,
    tokenizer: WhisperTokenizer,
    encoded: Tensor,
    mask: Tensor | None,
    search: Search,
) -> list[Hypothesis]:
    """Decodes each utterance by `search.method`; utterances that fail are sampled at the next
    temperature, and so on.

    A result fails if its text repeats itself or its log-probability is low (the thresholds are
    above). A silent utterance does not fail; its text is empty. If every temperature fails, the
    result with the highest log-probability is taken, and results that do not repeat themselves have
    priority. The model must be in evaluation mode."""
    attempts: list[list[Hypothesis]] = [[] for _ in range(len(encoded))]
    failed = list(range(len(encoded)))
    for number, temperature in enumerate(TEMPERATURES):
        rows = torch.tensor(failed, device=encoded.device)
        inputs = (model, encoded[rows], None if mask is None else mask[rows], search)
        if temperature > 0:
            generator = torch.Generator().manual_seed(search.seed * len(TEMPERATURES) + number)
            hypotheses = sample(*inputs, temperature, generator)
        elif search.method == "beam":
            hypotheses = beam(*inputs)
        else:
            hypotheses = greedy(*inputs)
        for row, hypothesis in zip(failed, hypotheses, strict=True):
            hypothesis.text = tokenizer.decode(hypothesis.tokens).strip()
            hypothesis.temperature = temperature
            attempts[row].append(hypothesis)
        failed = [row for row in failed if attempts[row][-1].has_failed]
        if not failed:
            break
    chosen = [max(results, key=_preference) for results in attempts]
    for hypothesis in chosen:
        hypothesis.text = "" if hypothesis.is_silent else cut_loops(hypothesis.text)
    return chosen


def _preference(hypothesis: Hypothesis) -> tuple[bool, bool, float]:
    return not hypothesis.has_failed, not hypothesis.repeats, hypothesis.mean_log_probability


def compression_ratio(text: str) -> float:
    """Bytes of the text in UTF-8 per byte after zlib. A text above 2.4 repeats itself."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def cut_loops(text: str) -> str:
    """Cuts every loop to a single occurrence. A loop has at least LOOP_CHARACTERS characters and
    repeats a unit of any length at least LOOP_REPEATS times in a row (the last one may be
    incomplete). So "CQ CQ CQ", "TEST TEST", "5NN 5NN" and twenty zeros stay, and so does a phrase
    said three times. If the unit has a space, words stay whole."""
    while True:
        characters = np.array([ord(character) for character in text])
        for period in range(1, len(text) // LOOP_REPEATS + 1):
            changes = np.flatnonzero(characters[period:] != characters[:-period])
            edges = np.concatenate([[-1], changes, [len(text) - period]])
            lengths = np.diff(edges) - 1 + period  # of the stretches with this period
            loops = np.flatnonzero(lengths >= max(LOOP_CHARACTERS, LOOP_REPEATS * period))
            if len(loops):
                break
        else:
            return text
        start = int(edges[loops[0]]) + 1
        end = start + int(lengths[loops[0]])
        cut = start + period
        space = text.find(" ", cut - 1, cut - 1 + period)
        cut = cut if space < 0 else space
        # What follows the last whole unit stays, unless the text breaks off in it.
        whole = cut + (end - cut - (space >= 0)) // period * period
        text = text[:cut] + (text[whole:] if end < len(text) else "")
