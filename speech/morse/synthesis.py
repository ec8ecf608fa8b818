"""Synthetic Morse clips: keying, channel and receiver, a pure function of (seed, number,
conditions)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from common.errors import UsageError
from speech.morse.alphabet import MORSE, symbols
from speech.morse.scores import TAGS
from speech.morse.texts import CONTESTS, NO_CONTEST, SAMPLE_TYPES, contest_text, everyday_text, pick
from speech.signal.audio import SAMPLE_RATE

BLOCK = 64  # samples (4 ms): frequency, fading and gain change from block to block
EDGE = 80  # samples (5 ms) of a raised-cosine edge
SNR_BANDWIDTH = 2_500  # Hz
CLIP_UNIT = 25 * BLOCK  # samples (0.1 s): clip lengths are multiples of it
CHIRP_SECONDS = 0.02  # time constant with which a chirping transmitter's frequency settles
LONGEST = 29.0  # seconds of a clip, so that it fits into Whisper's input
# What clips can be drawn from. Below 5 words a minute a single character fills a clip; at 150 a dit
# is 8 ms, of which the edges are 5. Interferers are up to 400 Hz away from a tone. Beyond these
# SNRs there is only noise, or none.
LIMITS = {"wpm": (5, 150), "tone": (100, 4000), "snr_db": (-40, 100)}


@dataclass(frozen=True)
class Conditions:
    """The ranges from which a clip is drawn, uniformly. The station to be read is the loudest one:
    the levels of `interferers` are relative to it."""

    name: str
    wpm: tuple[float, float] = (15, 40)  # speed of the characters, words (PARIS) per minute
    tone: tuple[float, float] = (600, 800)  # Hz
    snr_db: tuple[float, float] = (20, 30)  # in 2,500 Hz, see `synthesise`
    # Relative standard deviation of the lengths of elements and gaps.
    jitter: tuple[float, float] = (0.02, 0.08)
    farnsworth: tuple[float, float] = (1.0, 1.0)  # factor on the gaps between characters and words
    qsb_hz: tuple[float, float] = (0.1, 0.5)  # frequency of fading
    qsb_depth: tuple[float, float] = (0.0, 0.0)  # share of the amplitude that fading takes away
    interferers: tuple[int, int] = (0, 0)  # number of other stations
    interferer_db: tuple[float, float] = (-25, -6)
    crashes: tuple[float, float] = (0.0, 0.0)  # static crashes per second
    drift: tuple[float, float] = (0.0, 0.0)  # Hz over the clip, up or down
    chirp: tuple[float, float] = (0.0, 0.0)  # Hz by which an element starts too high or too low
    multipath: tuple[float, float] = (0.0, 0.0)  # seconds by which a second path is longer
    agc: float = 0.0  # share of clips with automatic gain control
    filters: tuple[int, ...] = (0,)  # Hz, widths of the receiver's filter; 0: none
    noise_only: float = 0.05  # share of clips without a station
    longest: float = LONGEST  # seconds; texts are shortened to it, to at least one symbol
    silence: tuple[float, float] = (0.1, 0.6)  # seconds before and after the transmission
    # Equally likely; repeat one to make it more frequent.
    sample_types: tuple[str, ...] = SAMPLE_TYPES


# fmt: off
_FADING = {
    "qsb_depth": (0.1, 0.7), "multipath": (0.0, 0.005), "drift": (0.0, 30.0), "chirp": (0.0, 15.0),
}
_TABLE = (
    Conditions("clean", snr_db=(30, 40), jitter=(0.0, 0.02)),
    Conditions("contest_good", snr_db=(18, 22), interferers=(0, 1), agc=0.5, filters=(0, 500),
               qsb_depth=(0.0, 0.3)),
    Conditions("contest_moderate", snr_db=(13, 17), interferers=(0, 3), agc=0.5,
               filters=(0, 250, 500), crashes=(0.0, 0.2), **_FADING),
    Conditions("contest_poor", snr_db=(8, 12), interferers=(2, 5), agc=0.7, filters=(0, 250, 500),
               crashes=(0.1, 0.5), interferer_db=(-20, -3), **_FADING),
    Conditions("dx_expedition", snr_db=(8, 18), interferers=(3, 5), agc=0.7, filters=(250, 500),
               crashes=(0.0, 0.2), interferer_db=(-15, -2), **_FADING),
    Conditions("wide", snr_db=(-12, 20), interferers=(0, 3), agc=0.5, filters=(0, 0, 250, 500),
               crashes=(0.0, 0.5), wpm=(10, 45), tone=(300, 1200), farnsworth=(1.0, 1.5),
               **{**_FADING, "drift": (0.0, 100.0)}),
    Conditions("demo", snr_db=(0, 20), wpm=(15, 28), tone=(450, 900)),
)
# fmt: on
CONDITIONS = {conditions.name: conditions for conditions in _TABLE}


def is_range(name: str) -> Callable[[Sequence[float] | None], bool]:
    """A check of a range (low, high) of "wpm", "tone" or "snr_db" to draw clips from, or None."""
    least, most = LIMITS[name]

    def check(limits: Sequence[float] | None) -> bool:
        if limits is None:
            return True
        low, high = limits
        return least <= low <= high <= most

    return check


@dataclass(frozen=True)
class Choice:
    """What clips are drawn from; None: a condition's own range. It is saved with the weights."""

    # of CONDITIONS, each equally likely
    conditions: Annotated[list[str], lambda names: bool(names) and set(names) <= set(CONDITIONS)]
    wpm: Annotated[list[float] | None, is_range("wpm")] = None
    tone: Annotated[list[float] | None, is_range("tone")] = None
    snr_db: Annotated[list[float] | None, is_range("snr_db")] = None
    clip_seconds: Annotated[float | None, lambda s: s is None or 1 <= s <= LONGEST] = None

    def mix(self) -> list[Conditions]:
        """The conditions. Raises `UsageError` for a range from which no clip can be drawn."""
        changes = {}
        for name, (least, most) in LIMITS.items():
            limits = getattr(self, name)
            if not is_range(name)(limits):
                given = " ".join(f"{limit:g}" for limit in limits)
                limits = f"two numbers from {least} to {most}, the lower one first"
                raise UsageError(f"--{name} {given}: give {limits}")
            if limits:
                changes[name] = tuple(limits)
        if self.clip_seconds:
            changes["longest"] = self.clip_seconds
        return [dataclasses.replace(CONDITIONS[name], **changes) for name in self.conditions]


@dataclass(frozen=True)
class Sample:
    """A clip."""

    audio: np.ndarray  # (T,) float32 at 16 kHz within -1 and 1
    text: str  # as sent, which contains the callsigns and the exchange
    spans: np.ndarray  # (N, 2) start and end of its symbols other than spaces, seconds
    callsigns: tuple[str, ...]
    exchange: str
    contest_type: str
    sample_type: str
    condition: str
    wpm: float
    tone: float
    snr_db: float  # NaN without a station
    is_noise_only: bool

    @property
    def seconds(self) -> float:
        return len(self.audio) / SAMPLE_RATE


@dataclass(frozen=True)
class Transmission:
    """What is sent in a clip: everything that decides its length, and what is drawn before that."""

    text: str
    callsigns: list[str]
    exchange: str
    contest_type: str
    sample_type: str
    wpm: float
    tone: float
    snr_db: float
    start: float  # seconds before the first key-down
    runs: np.ndarray  # as `keying` returns them, in seconds
    samples: int


_UNITS = {".": 1, "-": 3}  # key-down lengths
_ELEMENTS = {
    label: [units for mark in code for units in (_UNITS[mark], 1)] for label, code in MORSE.items()
}
_RISE = (0.5 - 0.5 * np.cos(np.pi * (np.arange(EDGE) + 0.5) / EDGE)).astype(np.float32)
_EDGES = np.stack([_RISE, _RISE[::-1]])  # key down, key up
_STEPS = np.arange(BLOCK, dtype=np.float32)
# Lengths for which an FFT is fast.
_FFT_SIZES = np.array(
    sorted(2**a * 3**b * 5**c for a in range(5, 20) for b in range(6) for c in range(6))
)


def draw_conditions(mix: Sequence[Conditions], seed: int, index: int) -> Conditions:
    """The conditions of clip number `index`, each of `mix` equally likely."""
    return pick(np.random.default_rng([seed, index, 1]), mix)


def keying(text: str, farnsworth: float = 1.0) -> np.ndarray:
    """Lengths of key down, key up ... key down for a text, in units (one dit)."""
    units: list[float] = []
    for word in text.split():
        for label in symbols(word):
            units += _ELEMENTS[label]
            units[-1] = 3 * farnsworth
        units[-1] = 7 * farnsworth
    return np.array(units[:-1])


def fit(random: np.random.Generator, text: str, room: float, farnsworth: float) -> str:
    """The text if it takes at most `room` units. Otherwise consecutive words that fit, from a
    random one on, or the beginning of that word if it is too long by itself."""
    words = text.split()
    gap = 7 * farnsworth
    # The end of each word with the gap after it.
    ends = np.cumsum([keying(word, farnsworth).sum() + gap for word in words])
    if not words or ends[-1] - gap <= room:
        return text
    begins = ends - np.diff(ends, prepend=0)
    first = int(random.integers(1 + np.count_nonzero(ends[-1] - begins > room)) % len(words))
    count = np.count_nonzero(ends[first:] - begins[first] - gap <= room)
    if count:
        return " ".join(words[first : first + count])
    labels = symbols(words[first])
    while len(labels) > 1 and keying("".join(labels), farnsworth).sum() > room:
        labels.pop()
    return "".join(labels)


def envelope(runs: np.ndarray, start: float, samples: int) -> np.ndarray:
    """(samples,) float32 amplitude of keying: `runs` in seconds as `keying` returns them, the first
    key-down at `start`. Edges are raised cosines of 5 ms around it: lengths are exact at half the
    amplitude."""
    edges = np.rint((start + np.concatenate([[0], np.cumsum(runs)])) * SAMPLE_RATE).astype(np.int64)
    state = np.arange(len(edges) + 1, dtype=np.float32) % 2
    amplitude = np.repeat(state, np.diff(edges, prepend=0, append=max(samples, edges[-1] + EDGE)))
    around = edges.reshape(-1, 2, 1) + np.arange(-EDGE // 2, EDGE // 2)
    amplitude[around] = _EDGES
    return amplitude[:samples]


def interpolate(levels: np.ndarray) -> np.ndarray:
    """Values at block boundaries (B + 1,) to float32 samples (B * 64,), linearly."""
    levels = levels.astype(np.float32)
    return (levels[:-1, None] + np.diff(levels)[:, None] * (_STEPS / BLOCK)).ravel()


def oscillator(frequencies: np.ndarray, phase: float) -> np.ndarray:
    """A sine of amplitude 1, (B * 64,) float32, from one frequency per block (B,) in Hz; `phase` in
    turns. At block boundaries it is float64: float32 would lose it in seconds."""
    turns = phase + np.cumsum(frequencies * (BLOCK / SAMPLE_RATE))
    starts = (np.concatenate([[phase], turns[:-1]]) % 1 * 2 * np.pi).astype(np.float32)
    steps = (frequencies * (2 * np.pi / SAMPLE_RATE)).astype(np.float32)
    return np.sin(starts[:, None] + steps[:, None] * _STEPS).ravel()


def transmit(
    random: np.random.Generator, amplitude: np.ndarray, tone: float, drift: float, chirp: float
) -> np.ndarray:
    """A keyed tone (T,) of `amplitude` (T,). Its frequency drifts linearly by `drift` Hz over the
    clip, `tone` in the middle, and every element starts `chirp` Hz off."""
    frequencies = tone + drift * np.linspace(-0.5, 0.5, len(amplitude) // BLOCK)
    if chirp:
        down = amplitude[::BLOCK] > 0.5
        blocks = np.arange(len(down))
        last_up = np.maximum.accumulate(np.where(down, 0, blocks))
        frequencies += (
            chirp * np.exp(-(blocks - last_up - 1) * (BLOCK / SAMPLE_RATE / CHIRP_SECONDS)) * down
        )
    return amplitude * oscillator(frequencies, random.random())


def interferer(random: np.random.Generator, samples: int, tone: float) -> np.ndarray:
    """(samples,) of amplitude 1: a station that repeats a text 60 to 400 Hz away from `tone`."""
    contest = pick(random, tuple(CONTESTS))
    text, _, _ = contest_text(random, contest, pick(random, ("call", "exchange")))
    runs = np.append(keying(text), random.uniform(7, 40)) * (1.2 / random.uniform(15, 40))
    runs = np.tile(runs, int(samples / SAMPLE_RATE / runs.sum()) + 2)[:-1]
    offset = random.integers(EDGE, samples)  # the clip starts here in the station's transmission
    offset = min(offset, int(runs.sum() * SAMPLE_RATE) - samples)
    amplitude = envelope(runs, EDGE / SAMPLE_RATE, offset + samples)[offset:]
    away = random.uniform(60, 400) * pick(random, (-1, 1))
    tone = tone + away if tone + away > 100 else tone - away
    return transmit(random, amplitude, tone, 0.0, 0.0)


def add_noise(random: np.random.Generator, signal: np.ndarray, crashes: float) -> None:
    """Adds white noise of power 1 at 16 kHz, that is SNR_BANDWIDTH / 8000 in 2,500 Hz. In each of
    `crashes` static crashes per second it is 10 to 30 dB louder for some tens of milliseconds."""
    noise = random.standard_normal(len(signal), dtype=np.float32)
    for _ in range(random.poisson(crashes * len(signal) / SAMPLE_RATE)):
        first = random.integers(len(signal))
        decay = random.uniform(0.01, 0.1) * SAMPLE_RATE
        part = noise[first : first + int(5 * decay)]
        fall = np.exp(-np.arange(len(part), dtype=np.float32) / np.float32(decay))
        part *= 1 + 10 ** random.uniform(0.5, 1.5) * fall
    signal += noise


def receiver_filter(audio: np.ndarray, centre: float, width: float) -> np.ndarray:
    """Band-pass of `width` Hz at half the amplitude, with cosine skirts a third as wide."""
    size = int(_FFT_SIZES[np.searchsorted(_FFT_SIZES, len(audio))])
    spectrum = np.fft.rfft(audio, size)
    away = np.abs(np.arange(len(spectrum), dtype=np.float32) * (SAMPLE_RATE / size) - centre)
    spectrum *= 0.5 - 0.5 * np.sin(np.pi * np.clip((away - width / 2) / (width / 3), -0.5, 0.5))
    return np.fft.irfft(spectrum, size)[: len(audio)].astype(np.float32)


def control_gain(audio: np.ndarray, decay: float, strength: float) -> np.ndarray:
    """Automatic gain control: the level rises to a peak at once and falls by `decay` nepers per
    second; the gain is the level to the power of -`strength`."""
    peaks = np.abs(audio.reshape(-1, BLOCK)).max(axis=1)
    fall = np.arange(len(peaks)) * (decay * BLOCK / SAMPLE_RATE)
    level = np.maximum.accumulate(np.log(np.maximum(peaks, 1e-6)) + fall) - fall
    return audio * interpolate(np.exp(-strength * np.append(level[0], level)))


def draw_transmission(random: np.random.Generator, conditions: Conditions) -> Transmission:
    """Draws text, speed, keying and length, before any sound is made."""
    sample_type = pick(random, conditions.sample_types)
    contest_type = NO_CONTEST
    exchange = ""
    callsigns = []
    if sample_type == "words":
        text, callsigns = everyday_text(random)
    else:
        contest_type = pick(random, tuple(CONTESTS))
        text, callsigns, exchange = contest_text(random, contest_type, sample_type)
    wpm = random.uniform(*conditions.wpm)
    tone = random.uniform(*conditions.tone)
    snr_db = random.uniform(*conditions.snr_db)
    jitter = random.uniform(*conditions.jitter)
    farnsworth = random.uniform(*conditions.farnsworth)
    before, after = random.uniform(*conditions.silence, size=2)
    unit = 1.2 / wpm
    text = fit(random, text, (conditions.longest - before - after) / unit, farnsworth)
    runs = keying(text, farnsworth)
    varied = runs * (1 + jitter * random.standard_normal(len(runs)).clip(-3, 3))
    # Jitter does not change the duration of the whole.
    runs = varied * (unit * runs.sum() / varied.sum())
    wanted = int((before + runs.sum() + after) * SAMPLE_RATE / CLIP_UNIT)
    needed = int(np.ceil(((before + runs.sum()) * SAMPLE_RATE + EDGE) / CLIP_UNIT))
    return Transmission(
        text=text,
        callsigns=callsigns,
        exchange=exchange,
        contest_type=contest_type,
        sample_type=sample_type,
        wpm=wpm,
        tone=tone,
        snr_db=snr_db,
        start=before,
        runs=runs,
        samples=max(wanted, needed) * CLIP_UNIT,
    )


def symbol_spans(text: str, start: float, runs: np.ndarray) -> np.ndarray:
    """(N, 2) start and end in seconds of each symbol but spaces, by a `Transmission`."""
    edges = start + np.concatenate([[0], np.cumsum(runs)])
    marks = np.array([len(_ELEMENTS[label]) // 2 for label in symbols(text) if label != " "])
    first = 2 * (np.cumsum(marks) - marks)
    return np.stack([edges[first], edges[first + 2 * marks - 1]], axis=1)


def clip_seconds(seed: int, index: int, conditions: Conditions) -> float:
    """The length of clip number `index`, a hundred times faster than synthesising it."""
    return draw_transmission(np.random.default_rng([seed, index]), conditions).samples / SAMPLE_RATE


def stations(
    random: np.random.Generator, transmission: Transmission, conditions: Conditions
) -> np.ndarray:
    """(T,) float32: the station at its SNR over noise of power 1, with interferers."""
    sign = pick(random, (-1, 1))
    drift = sign * random.uniform(*conditions.drift)
    chirp = sign * random.uniform(*conditions.chirp)
    amplitude = envelope(transmission.runs, transmission.start, transmission.samples)
    audio = transmit(random, amplitude, transmission.tone, drift, chirp)
    depth = random.uniform(*conditions.qsb_depth)
    if depth > 0:
        times = np.arange(transmission.samples // BLOCK + 1) * (BLOCK / SAMPLE_RATE)
        turns = random.uniform(*conditions.qsb_hz) * times + random.random()
        audio *= interpolate(1 - depth * (0.5 + 0.5 * np.cos(2 * np.pi * turns)))
    delay = int(random.uniform(*conditions.multipath) * SAMPLE_RATE)
    if delay > 0:
        audio[delay:] += np.float32(random.uniform(0.1, 0.6)) * audio[:-delay]
    power = np.vdot(audio, audio) / np.vdot(amplitude, amplitude)
    wanted = 10 ** (transmission.snr_db / 10) * SNR_BANDWIDTH / (SAMPLE_RATE / 2)
    audio *= np.float32(np.sqrt(wanted / power))
    low, high = conditions.interferers
    for _ in range(random.integers(low, high + 1)):
        level = np.sqrt(2 * wanted) * 10 ** (random.uniform(*conditions.interferer_db) / 20)
        audio += np.float32(level) * interferer(random, transmission.samples, transmission.tone)
    return audio


def synthesise(seed: int, index: int, conditions: Conditions) -> Sample:
    """Clip number `index`, which depends on the arguments alone.

    SNR: the station's mean power while its key is down, as it arrives (after fading and second
    path), over the power of the white noise in 2,500 Hz; before the receiver's filter and gain
    control, without interferers and crashes."""
    random = np.random.default_rng([seed, index])
    transmission = draw_transmission(random, conditions)
    text = transmission.text
    snr_db = transmission.snr_db
    spans = symbol_spans(text, transmission.start, transmission.runs)
    is_noise_only = bool(random.random() < conditions.noise_only)
    if is_noise_only:
        text = ""
        snr_db = np.nan
        spans = spans[:0]
        audio = np.zeros(transmission.samples, dtype=np.float32)
    else:
        audio = stations(random, transmission, conditions)
    add_noise(random, audio, random.uniform(*conditions.crashes))
    width = pick(random, conditions.filters)
    if width:
        audio = receiver_filter(audio, transmission.tone + random.uniform(-0.1, 0.1) * width, width)
    if random.random() < conditions.agc:
        audio = control_gain(audio, random.uniform(1, 10), random.uniform(0.3, 1.0))
    audio *= np.float32(random.uniform(0.1, 0.95) / max(audio.max(), -audio.min()))
    # `fit` may have removed callsigns or the exchange.
    sent = f" {text} "
    callsigns = [call for call in transmission.callsigns if f" {call} " in sent]
    has_exchange = transmission.exchange and f" {transmission.exchange} " in sent
    return Sample(
        audio=audio,
        text=text,
        spans=spans,
        callsigns=tuple(dict.fromkeys(callsigns)),
        exchange=transmission.exchange if has_exchange else "",
        contest_type=transmission.contest_type,
        sample_type=transmission.sample_type,
        condition=conditions.name,
        wpm=float(transmission.wpm),
        tone=float(transmission.tone),
        snr_db=float(snr_db),
        is_noise_only=is_noise_only,
    )


@functools.lru_cache(maxsize=4)
def _epoch_seconds(mix: tuple[Conditions, ...], count: int, seed: int, epoch: int) -> np.ndarray:
    numbers = range(epoch * count, (epoch + 1) * count)
    return np.array(
        [clip_seconds(seed, number, draw_conditions(mix, seed, number)) for number in numbers]
    )


@dataclass(frozen=True)
class Synthetic:
    """A data set that is synthesised as it is read: `count` clips per epoch, new ones in every
    epoch. Each clip has the conditions of one entry of `mix`. Other seeds share no clip."""

    mix: Sequence[Conditions]
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def text_length(self, index: int) -> int:
        return 0  # texts are not known before the clips are made

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths of an epoch's clips."""
        return _epoch_seconds(tuple(self.mix), self.count, self.seed, epoch)

    def load(self, index: int, epoch: int) -> tuple[torch.Tensor, str, str, np.ndarray]:
        """(waveform (T,), text, name, spans (N, 2) of its symbols in seconds)."""
        number = epoch * self.count + index
        sample = self._synthesise(number)
        name = f"synthetic clip {self.seed}/{number}"
        return torch.from_numpy(sample.audio), sample.text, name, sample.spans

    def row(self, index: int, hypothesis: str) -> dict:
        """A row for `scores.evaluation_tables`, of a clip of epoch 0."""
        sample = self._synthesise(index)
        row = {"file": f"synthetic clip {self.seed}/{index}", "reference": sample.text}
        row["hypothesis"] = hypothesis
        return {**row, **{name: getattr(sample, name) for name in TAGS}}

    def fingerprint(self) -> str:
        """Changes when the clips do, so that a resumed run's position means the same."""
        return f"{self.seed} {self.count} {list(self.mix)}"

    def _synthesise(self, number: int) -> Sample:
        return synthesise(self.seed, number, draw_conditions(self.mix, self.seed, number))
