"""A recogniser's log-probabilities for a whole recording, of the tokens that its text needs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speech.alignment.letters import HOLE
from speech.signal.audio import SAMPLE_RATE, read_in_pieces

WINDOW = 30.0  # seconds that are kept of what the recogniser hears at once
CONTEXT = 3.0  # seconds before and after, heard and not kept
CONTEXT_SHARE = 1 / 6  # of what a recogniser hears at once, at most
ENERGY_FRAME = 0.01  # seconds
QUIETEST = 1e-10  # power: digital silence

LogProbs = Callable[[Tensor], np.ndarray]  # waveform (N,) to (T, V)


@dataclass(frozen=True)
class Emissions:
    """What a CTC model says of a recording."""

    log_probs: np.ndarray  # (T, K) fp16 of K tokens
    column_of: dict[int, int]  # whose columns these are
    best: np.ndarray  # (T,) log-probability of the best of all tokens
    heard: np.ndarray  # (T,) and that token
    frame: float  # seconds of one
    energy: np.ndarray | None = None  # of every ENERGY_FRAME in dB, if it is known

    @property
    def seconds(self) -> float:
        return len(self.best) * self.frame


def collect(
    windows: Iterable[np.ndarray],
    frame: float,
    tokens: np.ndarray,
    blank: int,
    energy: list[np.ndarray] | None = None,
) -> Emissions:
    """The emissions of consecutive `windows` (T, V) of log-probabilities, `frame` seconds each, for
    a text of these `tokens`. `energy` is filled while the windows are read."""
    kept = np.unique(np.append(tokens[tokens != HOLE], blank))
    parts, best, heard = [], [], []
    for log_probs in windows:
        parts.append(log_probs[:, kept].astype(np.float16))
        best.append(log_probs.max(axis=1).astype(np.float16))
        heard.append(log_probs.argmax(axis=1).astype(np.int32))
    return Emissions(
        np.concatenate(parts),
        {int(token): column for column, token in enumerate(kept)},
        np.concatenate(best),
        np.concatenate(heard),
        frame,
        np.concatenate(energy) if energy else None,
    )


def window_for(longest: float) -> tuple[float, float]:
    """Seconds of the window and of the context beside it, for a recogniser that hears `longest`."""
    context = min(CONTEXT, longest * CONTEXT_SHARE)
    return min(WINDOW, longest - 2 * context), context


def windows_of(
    path: str,
    log_probs: LogProbs,
    frame: float,
    energy: list[np.ndarray],
    sizes: tuple[float, float] = (WINDOW, CONTEXT),
) -> Iterator[np.ndarray]:
    """The log-probabilities (T, V) of consecutive windows of a recording, each heard with context
    on both sides. Appends the energy of each window to `energy`. `frame`: seconds of a frame of
    `log_probs`; `sizes`: those of a window and of the context. Little more is in memory."""
    step = round(frame * SAMPLE_RATE)
    window, context = (round(size * SAMPLE_RATE) // step * step for size in sizes)
    pieces = read_in_pieces(path, SAMPLE_RATE)
    held = torch.zeros(0)
    context_before = 0  # samples of `held` that are context
    is_last = False
    while not is_last:
        held, is_last = _filled(held, pieces, context_before + window + context)
        fresh = held[context_before : None if is_last else context_before + window]
        energy.append(_energy(fresh.numpy()))
        first = context_before // step
        result = log_probs(held)
        count = -(-len(fresh) // step) if is_last else window // step
        yield _exactly(result[first : first + count], count)
        dropped = max(0, context_before + window - context)
        held = held[dropped:]
        context_before = context_before + window - dropped


def energy_in(path: str) -> np.ndarray:
    """(N,) the power of each ENERGY_FRAME of a recording, in dB."""
    size = round(ENERGY_FRAME * SAMPLE_RATE)
    parts = []
    rest = np.zeros(0, np.float32)
    for piece in read_in_pieces(path, SAMPLE_RATE):
        samples = np.concatenate([rest, piece.numpy()])
        whole = len(samples) // size * size
        parts.append(_energy(samples[:whole]))
        rest = samples[whole:]
    return np.concatenate([*parts, _energy(rest)])


def _filled(held: Tensor, pieces: Iterator[Tensor], size: int) -> tuple[Tensor, bool]:
    """`held` with further pieces up to `size` samples or more, and whether the recording ends."""
    parts = [held]
    total = len(held)
    while total < size:
        piece = next(pieces, None)
        if piece is None:
            return torch.cat(parts), True
        parts.append(piece)
        total += len(piece)
    return torch.cat(parts), False


def _exactly(log_probs: np.ndarray, count: int) -> np.ndarray:
    """(count, V): recognisers leave out or add a frame at the end of what they hear."""
    if len(log_probs) < count:
        log_probs = np.pad(log_probs, ((0, count - len(log_probs)), (0, 0)), mode="edge")
    return log_probs[:count]


def _energy(samples: np.ndarray) -> np.ndarray:
    """(N,) the power of each ENERGY_FRAME in dB."""
    size = round(ENERGY_FRAME * SAMPLE_RATE)
    whole = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)
    power = np.square(whole).mean(axis=1)
    return (10 * np.log10(power + QUIETEST)).astype(np.float32)
