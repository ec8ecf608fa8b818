"""Morse as it is heard: keying, channel and receiver, made from (seed, number) alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speech.audio import SAMPLE_RATE
from speech.morse.alphabet import MORSE, symbols
from speech.morse.texts import (
    CONTEST_SAMPLES,
    CONTESTS,
    NO_CONTEST,
    contest_text,
    everyday_text,
    pick,
    random_groups,
)

BLOCK = 64  # samples: frequency, fading and gain are set every 4 ms
EDGE = 80  # samples of a raised-cosine edge: 5 ms
SNR_BANDWIDTH = 2_500  # Hz
CLIP_UNIT = 25 * BLOCK  # samples: clips are whole tenths of a second
CHIRP_SECONDS = 0.02  # in which a chirping transmitter's frequency settles, to 1/e


@dataclass(frozen=True)
class Conditions:
    """What a clip is drawn from, evenly within each range. The station to be read is the loudest: the levels of
    `interferers` are relative to it."""

    name: str
    wpm: tuple[float, float] = (15, 40)  # words (PARIS) a minute, by the characters' own length
    tone: tuple[float, float] = (600, 800)  # Hz
    snr_db: tuple[float, float] = (20, 30)  # in 2,500 Hz; see `synthesise`
    jitter: tuple[float, float] = (0.02, 0.08)  # standard deviation of an element's or gap's length, as a share of it
    farnsworth: tuple[float, float] = (1.0, 1.0)  # gaps between characters and words, times the standard's
    qsb_hz: tuple[float, float] = (0.1, 0.5)  # fading's frequency
    qsb_depth: tuple[float, float] = (0.0, 0.0)  # share of the amplitude that fading takes away
    interferers: tuple[int, int] = (0, 0)  # other stations
    interferer_db: tuple[float, float] = (-25, -6)
    crashes: tuple[float, float] = (0.0, 0.0)  # of static, a second
    drift: tuple[float, float] = (0.0, 0.0)  # Hz over the clip, up or down
    chirp: tuple[float, float] = (0.0, 0.0)  # Hz by which an element's start is high or low
    multipath: tuple[float, float] = (0.0, 0.0)  # seconds by which a second path is longer
    agc: float = 0.0  # share of the clips whose receiver controls its gain
    filters: tuple[int, ...] = (0,)  # Hz, widths of the receiver's filter; 0: none
    noise_only: float = 0.05  # share of the clips without a station
    longest: float = 29.0  # seconds; texts are cut to it, but for their first symbol
    silence: tuple[float, float] = (0.1, 0.6)  # seconds before, and after
    sample_types: tuple[str, ...] = (*CONTEST_SAMPLES, "words")  # equally likely; repeat one for more of it
    characters: tuple[int, int] = (1, 20)  # symbols of the sample type "characters"
    alphabet: tuple[str, ...] = tuple(MORSE)  # of the sample type "characters"


_FADING = {"qsb_depth": (0.1, 0.7), "multipath": (0.0, 0.005), "drift": (0.0, 30.0), "chirp": (0.0, 15.0)}
CONDITIONS = {
    conditions.name: conditions
    for conditions in (
        Conditions("clean", snr_db=(30, 40), jitter=(0.0, 0.02)),
        Conditions("contest_good", snr_db=(18, 22), qsb_depth=(0.0, 0.3), interferers=(0, 1), agc=0.5, filters=(0, 500)),
        Conditions("contest_moderate", snr_db=(13, 17), interferers=(0, 3), crashes=(0.0, 0.2), agc=0.5, filters=(0, 250, 500), **_FADING),
        Conditions("contest_poor", snr_db=(8, 12), interferers=(2, 5), interferer_db=(-20, -3), crashes=(0.1, 0.5), agc=0.7, filters=(0, 250, 500), **_FADING),
        Conditions("dx_expedition", snr_db=(8, 18), interferers=(3, 5), interferer_db=(-15, -2), crashes=(0.0, 0.2), agc=0.7, filters=(250, 500), **_FADING),
        Conditions("wide", wpm=(10, 45), tone=(300, 1200), snr_db=(-12, 20), farnsworth=(1.0, 1.5), interferers=(0, 3), crashes=(0.0, 0.5),
                   agc=0.5, filters=(0, 0, 250, 500), **{**_FADING, "drift": (0.0, 100.0)}),
        Conditions("demo", wpm=(15, 28), tone=(450, 900), snr_db=(0, 20)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A clip: `audio` (T,) float32 at 16 kHz within -1 and 1; `text` as it is sent, with the callsigns and the exchange
    among its words; `spans` (N, 2) seconds of its symbols, spaces apart; `snr_db` is NaN where there is no station."""

    audio: np.ndarray
    text: str
    spans: np.ndarray
    callsigns: tuple[str, ...]
    exchange: str
    contest_type: str
    sample_type: str
    condition: str
    wpm: float
    tone: float
    snr_db: float
    is_noise_only: bool

    @property
    def seconds(self) -> float:
        return len(self.audio) / SAMPLE_RATE


_ELEMENTS = {label: [units for mark in code for units in ("..-".index(mark) + 1, 1)] for label, code in MORSE.items()}
_RISE = (0.5 - 0.5 * np.cos(np.pi * (np.arange(EDGE) + 0.5) / EDGE)).astype(np.float32)
_EDGES = np.stack([_RISE, _RISE[::-1]])  # key down, key up
_STEPS = np.arange(BLOCK, dtype=np.float32)
_FFT_SIZES = np.array(sorted(2**a * 3**b * 5**c for a in range(5, 20) for b in range(6) for c in range(6)))  # fast ones


def keying(text: str, farnsworth: float = 1.0) -> np.ndarray:
    """Lengths in units (a dit's) of key down, key up, key down ... for a text; begins and ends with the key down."""
    units: list[float] = []
    for word in text.split():
        for label in symbols(word):
            units += _ELEMENTS[label]
            units[-1] = 3 * farnsworth
        units[-1] = 7 * farnsworth
    return np.array(units[:-1])


def fit(random: np.random.Generator, text: str, room: float, farnsworth: float) -> str:
    """The text, or where it takes more than `room` units, some words in the middle of it that do not; of a single word
    that is too long, its beginning."""
    words = text.split()
    ends = np.cumsum([keying(word, farnsworth).sum() + 7 * farnsworth for word in words])  # each with the gap after it
    if not words or ends[-1] - 7 * farnsworth <= room:
        return text
    begins = ends - np.diff(ends, prepend=0)
    first = int(random.integers(1 + np.count_nonzero(ends[-1] - begins > room)) % len(words))
    count = np.count_nonzero(ends[first:] - begins[first] - 7 * farnsworth <= room)
    if count:
        return " ".join(words[first : first + count])
    labels = symbols(words[first])
    while len(labels) > 1 and keying("".join(labels), farnsworth).sum() > room:
        labels.pop()
    return "".join(labels)


def envelope(runs: np.ndarray, start: float, samples: int) -> np.ndarray:
    """(samples,) float32 amplitude of keying: `runs` in seconds as `keying` has them, the first key-down at `start`.
    Edges are raised cosines of 5 ms about the moment of keying, so that lengths are exact at half the amplitude."""
    edges = np.rint((start + np.concatenate([[0], np.cumsum(runs)])) * SAMPLE_RATE).astype(np.int64)
    state = np.arange(len(edges) + 1, dtype=np.float32) % 2
    amplitude = np.repeat(state, np.diff(edges, prepend=0, append=max(samples, edges[-1] + EDGE)))
    around = edges.reshape(-1, 2, 1) + np.arange(-EDGE // 2, EDGE // 2)
    amplitude[around] = _EDGES
    return amplitude[:samples]


def interpolate(levels: np.ndarray) -> np.ndarray:
    """(B + 1,) values at the bounds of blocks to (B * 64,) float32 samples between them, linearly."""
    levels = levels.astype(np.float32)
    return (levels[:-1, None] + np.diff(levels)[:, None] * (_STEPS / BLOCK)).ravel()


def oscillator(frequencies: np.ndarray, phase: float) -> np.ndarray:
    """A sine of amplitude 1, (B * 64,) float32, from (B,) frequencies in Hz, one a block; `phase` in turns. The phase
    is carried in float64 from block to block: float32 would lose it within seconds."""
    turns = phase + np.cumsum(frequencies * (BLOCK / SAMPLE_RATE))
    starts = (np.concatenate([[phase], turns[:-1]]) % 1 * 2 * np.pi).astype(np.float32)
    steps = (frequencies * (2 * np.pi / SAMPLE_RATE)).astype(np.float32)
    return np.sin(starts[:, None] + steps[:, None] * _STEPS).ravel()


def transmit(random: np.random.Generator, amplitude: np.ndarray, tone: float, drift: float, chirp: float) -> np.ndarray:
    """A keyed tone (T,) of `amplitude` (T,), whose frequency drifts evenly by `drift` Hz over the clip about `tone`, and
    starts every element `chirp` Hz off."""
    frequencies = tone + drift * np.linspace(-0.5, 0.5, len(amplitude) // BLOCK)
    if chirp:
        down = amplitude[::BLOCK] > 0.5
        blocks = np.arange(len(down))
        last_up = np.maximum.accumulate(np.where(down, 0, blocks))
        frequencies += chirp * np.exp(-(blocks - last_up - 1) * (BLOCK / SAMPLE_RATE / CHIRP_SECONDS)) * down
    return amplitude * oscillator(frequencies, random.random())


def interferer(random: np.random.Generator, samples: int, tone: float) -> np.ndarray:
    """(samples,) of another station, which calls again and again near `tone`, but not on it. Amplitude 1."""
    text = contest_text(random, pick(random, tuple(CONTESTS)), pick(random, ("call", "exchange")))[0]
    runs = np.append(keying(text), random.uniform(7, 40)) * (1.2 / random.uniform(15, 40))
    runs = np.tile(runs, int(samples / SAMPLE_RATE / runs.sum()) + 2)[:-1]
    offset = random.integers(EDGE, samples)  # of the clip's beginning in the station's transmission
    offset = min(offset, int(runs.sum() * SAMPLE_RATE) - samples)
    amplitude = envelope(runs, EDGE / SAMPLE_RATE, offset + samples)[offset:]
    away = random.uniform(60, 400) * pick(random, (-1, 1))
    tone = tone + away if tone + away > 100 else tone - away
    return transmit(random, amplitude, tone, 0.0, 0.0)


def add_noise(random: np.random.Generator, signal: np.ndarray, crashes: float) -> None:
    """Adds white noise of power 1 at 16 kHz, that is SNR_BANDWIDTH / 8000 in 2,500 Hz, louder by 10 to 30 dB for some
    tens of milliseconds in each of `crashes` static crashes a second."""
    noise = random.standard_normal(len(signal), dtype=np.float32)
    for _ in range(random.poisson(crashes * len(signal) / SAMPLE_RATE)):
        first, decay = random.integers(len(signal)), random.uniform(0.01, 0.1) * SAMPLE_RATE
        part = noise[first : first + int(5 * decay)]
        part *= 1 + 10 ** random.uniform(0.5, 1.5) * np.exp(-np.arange(len(part), dtype=np.float32) / np.float32(decay))
    signal += noise


def receiver_filter(audio: np.ndarray, centre: float, width: float) -> np.ndarray:
    """Band-pass of `width` Hz at half the amplitude; skirts are cosines as wide as a third of that."""
    size = int(_FFT_SIZES[np.searchsorted(_FFT_SIZES, len(audio))])
    spectrum = np.fft.rfft(audio, size)
    away = np.abs(np.arange(len(spectrum), dtype=np.float32) * (SAMPLE_RATE / size) - centre)
    spectrum *= 0.5 - 0.5 * np.sin(np.pi * np.clip((away - width / 2) / (width / 3), -0.5, 0.5))
    return np.fft.irfft(spectrum, size)[: len(audio)].astype(np.float32)


def control_gain(audio: np.ndarray, decay: float, strength: float) -> np.ndarray:
    """Automatic gain control: the level follows the loudest at once and falls by `decay` nepers a second; the gain is
    its power of -`strength`."""
    peaks = np.abs(audio.reshape(-1, BLOCK)).max(axis=1)
    fall = np.arange(len(peaks)) * (decay * BLOCK / SAMPLE_RATE)
    level = np.maximum.accumulate(np.log(np.maximum(peaks, 1e-6)) + fall) - fall
    return audio * interpolate(np.exp(-strength * np.append(level[0], level)))


def plan(random: np.random.Generator, conditions: Conditions) -> dict:
    """What a clip will hold, before any sound is made: text, speed, keying and length."""
    sample_type, contest, exchange = pick(random, conditions.sample_types), NO_CONTEST, ""
    if sample_type == "characters":
        low, high = conditions.characters
        text, callsigns = random_groups(random, random.integers(low, high + 1), conditions.alphabet), []
    elif sample_type == "words":
        text, callsigns = everyday_text(random)
    else:
        contest = pick(random, tuple(CONTESTS))
        text, callsigns, exchange = contest_text(random, contest, sample_type)
    wpm, tone, snr_db = (random.uniform(*limits) for limits in (conditions.wpm, conditions.tone, conditions.snr_db))
    jitter, farnsworth = random.uniform(*conditions.jitter), random.uniform(*conditions.farnsworth)
    before, after = random.uniform(*conditions.silence, size=2)
    unit = 1.2 / wpm
    text = fit(random, text, (conditions.longest - before - after) / unit, farnsworth)
    runs = keying(text, farnsworth)
    varied = runs * (1 + jitter * random.standard_normal(len(runs)).clip(-3, 3))
    runs = varied * (unit * runs.sum() / varied.sum())  # together they last what they would without jitter
    samples = int((before + runs.sum() + after) * SAMPLE_RATE / CLIP_UNIT) * CLIP_UNIT
    samples = max(samples, int(np.ceil(((before + runs.sum()) * SAMPLE_RATE + EDGE) / CLIP_UNIT)) * CLIP_UNIT)
    return {
        "text": text, "callsigns": callsigns, "exchange": exchange, "contest": contest, "sample_type": sample_type, "wpm": wpm,
        "tone": tone, "snr_db": snr_db, "before": before, "runs": runs, "samples": samples,
    }  # fmt: skip


def symbol_spans(text: str, before: float, runs: np.ndarray) -> np.ndarray:
    """(N, 2) seconds in which each symbol of `text`, spaces apart, is sent."""
    edges = before + np.concatenate([[0], np.cumsum(runs)])
    marks = np.array([len(_ELEMENTS[label]) // 2 for label in symbols(text) if label != " "])
    first = 2 * (np.cumsum(marks) - marks)
    return np.stack([edges[first], edges[first + 2 * marks - 1]], axis=1)


def clip_seconds(seed: int, index: int, conditions: Conditions) -> float:
    """How long the clip of a number is; a hundred times faster than making it."""
    return plan(np.random.default_rng([seed, index]), conditions)["samples"] / SAMPLE_RATE


def synthesise(seed: int, index: int, conditions: Conditions) -> Sample:
    """The clip of a number: it depends on the arguments alone, not on what was made before it or where.

    SNR: the station's mean power while its key is down, as it arrives (after fading and second path), over the power
    of the white noise in 2,500 Hz; before the receiver's filter and gain control, without interferers and crashes."""
    random = np.random.default_rng([seed, index])
    planned = plan(random, conditions)
    text, tone, snr_db, samples = (planned[name] for name in ("text", "tone", "snr_db", "samples"))
    spans = symbol_spans(text, planned["before"], planned["runs"])

    is_noise_only = bool(random.random() < conditions.noise_only)
    if is_noise_only:
        text, snr_db, audio, spans = "", np.nan, np.zeros(samples, dtype=np.float32), spans[:0]
    else:
        sign = pick(random, (-1, 1))
        drift, chirp = sign * random.uniform(*conditions.drift), sign * random.uniform(*conditions.chirp)
        amplitude = envelope(planned["runs"], planned["before"], samples)
        audio = transmit(random, amplitude, tone, drift, chirp)
        if (depth := random.uniform(*conditions.qsb_depth)) > 0:
            times = np.arange(samples // BLOCK + 1) * (BLOCK / SAMPLE_RATE)
            turns = random.uniform(*conditions.qsb_hz) * times + random.random()
            audio *= interpolate(1 - depth * (0.5 + 0.5 * np.cos(2 * np.pi * turns)))
        if (delay := int(random.uniform(*conditions.multipath) * SAMPLE_RATE)) > 0:
            audio[delay:] += np.float32(random.uniform(0.1, 0.6)) * audio[:-delay]
        power = np.vdot(audio, audio) / np.vdot(amplitude, amplitude)
        wanted = 10 ** (snr_db / 10) * SNR_BANDWIDTH / (SAMPLE_RATE / 2)
        audio *= np.float32(np.sqrt(wanted / power))
        low, high = conditions.interferers
        for _ in range(random.integers(low, high + 1)):
            level = np.sqrt(2 * wanted) * 10 ** (random.uniform(*conditions.interferer_db) / 20)
            audio += np.float32(level) * interferer(random, samples, tone)
    add_noise(random, audio, random.uniform(*conditions.crashes))
    if width := pick(random, conditions.filters):
        audio = receiver_filter(audio, tone + random.uniform(-0.1, 0.1) * width, width)
    if random.random() < conditions.agc:
        audio = control_gain(audio, random.uniform(1, 10), random.uniform(0.3, 1.0))
    audio *= np.float32(random.uniform(0.1, 0.95) / max(audio.max(), -audio.min()))

    heard = f" {text} "
    return Sample(
        audio, text, spans, tuple(dict.fromkeys(call for call in planned["callsigns"] if f" {call} " in heard)),
        planned["exchange"] if planned["exchange"] and f" {planned['exchange']} " in heard else "", planned["contest"],
        planned["sample_type"], conditions.name, float(planned["wpm"]), float(tone), float(snr_db), is_noise_only,
    )  # fmt: skip


def one_of(mix: Sequence[Conditions], seed: int, index: int) -> Conditions:
    """The conditions of the clip of a number, each of `mix` equally likely."""
    return pick(np.random.default_rng([seed, index, 1]), mix)
