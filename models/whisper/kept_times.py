"""Whether a model still reads on after one sentence and still knows times: what fine-tuning on
single sentences unlearns. Programs that read long recordings by a Whisper's times lose text then.

It is measured teacher-forced, on packs of several utterances of an evaluation set."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import memory
from common.device import Setup, upcast
from common.errors import DataError
from common.layers import LOWERED
from models.whisper.model import Whisper
from models.whisper.packs import PackedUtterances
from models.whisper.tokenizer import WhisperTokenizer

PACKS = 24
AT_ONCE = 4  # windows of 30 s, which take less memory than most evaluation batches
MUCH = 0.05  # mean probability of an end after an inner utterance
WORSE = 1.5  # times the value before training
POSITIONS = "embed_positions"  # are added to activations in fp32
CURE = (
    "For those, train again from the released model with --timestamp_share 0.25, or 0.5 if it was"
    " 0.25"
)
UNTRAINED = (
    "warning: this model was trained without times (--timestamp_share 0), so segments may be missing"
    f" in long recordings. {CURE}"
)
HIGHER = 1.0  # loss of time tokens above that before training, nats


@dataclass(frozen=True)
class Times:
    """`end` and `most`: the mean and the largest probability that the text ends after an utterance
    that others follow; `loss`: of a time token, in nats; `windows`: on how many it was measured."""

    end: float
    most: float
    loss: float
    windows: int


def batches(data: PackedUtterances, collate: Callable[[list[dict]], dict]) -> Iterator[dict]:
    """Batches of up to PACKS random packs of several utterances, without unreadable audio."""
    layout = data.packs.layout(0)
    several = np.flatnonzero((layout.stop > layout.place) & layout.timed)
    items = []
    for index in np.random.default_rng(0).permutation(several)[:PACKS].tolist():
        try:
            items.append(data.item(index, 0))
        except DataError:
            continue  # the evaluation itself reports it
    for first in range(0, len(items), AT_ONCE):
        yield collate(items[first : first + AT_ONCE])


@contextlib.contextmanager
def in_use(model: Whisper, setup: Setup) -> Iterator[None]:
    """Within it a model on the host evaluates on the device, with its large weights in the type to
    which autocast would cast them: in fp32 they may be too large for it. Afterwards it is as
    before."""
    parameters = {parameter: parameter.data for parameter in model.parameters()}
    is_training = model.training
    for name, module in model.named_modules():
        if setup.dtype and isinstance(module, LOWERED) and not name.endswith(POSITIONS):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(setup.dtype)
    model.to(setup.device).eval()
    try:
        with setup.autocast():
            yield
    finally:
        for parameter, original in parameters.items():
            parameter.data = original
        model.cpu().train(is_training)


@torch.no_grad()
def measure(model: Whisper, tokenizer: WhisperTokenizer, batches: Iterator[dict]) -> Times | None:
    """The `Times` of a model in evaluation mode; None without packs. It hears silence up to its
    longest input, as in the programs that read by times."""
    padded = model.pad_to_longest
    of_batch = functools.partial(of_packs, model, tokenizer)
    ends = []
    losses = []
    count = 0
    model.pad_to_longest = True
    for batch, results in memory.evaluated(of_batch, model, batches):
        count += len(batch["names"])
        for end, loss in results:
            ends += end.tolist()
            losses += loss.tolist()
    model.pad_to_longest = padded
    if not ends:
        return None
    return Times(float(np.mean(ends)), max(ends), float(np.mean(losses)), count)


def of_packs(model: Whisper, tokenizer: WhisperTokenizer, batch: dict) -> tuple[Tensor, Tensor]:
    """For a batch of packs with times: (N,) the probability that the text ends after each inner
    utterance that a whole one follows, and (M,) the loss of each time token."""
    encoded, mask = model.encode(batch)
    x = model.decoder(batch["tokens"], encoded, mask)
    labels = batch["labels"]
    columns = torch.arange(labels.shape[1], device=labels.device)
    is_scored = columns < batch["labels_lengths"][:, None]
    is_scored &= columns >= batch["unscored_lengths"][:, None]
    is_time = is_scored & (labels >= tokenizer.timestamp_begin)
    log_probs = upcast(model.logits(x[is_time])).log_softmax(-1)  # (M, V)
    losses = F.nll_loss(log_probs, labels[is_time], reduction="none")
    ends = torch.zeros(labels.shape, dtype=log_probs.dtype, device=labels.device)
    ends[is_time] = log_probs[:, tokenizer.eos].exp()
    # Between two utterances are the end of the first and the start of the second. Nothing more is
    # written of a second one that the pack cuts, and there an early end loses no text.
    is_inner = is_time[:, :-1] & is_time[:, 1:]
    is_inner[:, :-1] &= labels[:, 2:] != tokenizer.eos
    at_end = ends[:, :-1][is_inner]
    at_start = ends[:, 1:][is_inner]
    return at_end + (1 - at_end) * at_start, losses


def report(now: Times, at_first: Times | None, name: str) -> str:
    """A table of both. `name`: the set's."""
    columns = [now] if at_first is None else [at_first, now]
    heads = ["now"] if at_first is None else ["before", "now"]
    rows = [(f"long recordings, tried on {now.windows} windows of the {name} set", heads)]
    for words, field, form in (
        ("chance that a text ends too early, mean", "end", "{:.1%}"),
        ("chance that a text ends too early, most", "most", "{:.1%}"),
        ("loss of the times that it writes (lower is better)", "loss", "{:.2f}"),
    ):
        rows.append((words, [form.format(getattr(times, field)) for times in columns]))
    width = max(len(words) for words, _ in rows)
    lines = [f"{words:{width}}" + "".join(f"{cell:>9}" for cell in cells) for words, cells in rows]
    return "\n".join(lines)


def warning(now: Times, at_first: Times | None) -> str:
    """A warning if training has made it worse, else ""."""
    if at_first is None:
        return ""
    ends = now.end > max(MUCH, WORSE * at_first.end)
    if not ends and now.loss <= at_first.loss + HIGHER:
        return ""
    what = "read on after a sentence" if ends else "write times"
    return (
        f"warning: the training has made the model worse at this: to {what}. It does no harm to"
        " clips of one sentence, but subtitles, and programs that read long recordings by times,"
        f" will lose sentences. {CURE}"
    )


def at_start(
    model: Whisper, run, past: list[float] | None, measure: Callable[[Whisper], Times | None]
) -> list[float]:
    """The values that `measure(model)` finds of the model on the host that a `run`
    (`common.loop.begin`) will train, for a record that is saved, or found `past` in the run that
    is resumed. Empty with --init_from, whose weights the loop loads later, and in a plan, where
    weights have no values."""
    if past is not None:
        return past
    if run.initial or next(model.parameters()).is_meta:
        return []
    with in_use(model, run.setup):
        return to_list(measure(model))


def to_list(times: Times | None) -> list[float]:
    """For a record that is saved; empty without a measurement."""
    return [] if times is None else list(map(float, astuple(times)))


def from_list(values: list[float]) -> Times | None:
    """The inverse of `to_list`; None for an empty list."""
    if len(values) != 4:
        return None
    return Times(*values[:3], int(values[3]))
