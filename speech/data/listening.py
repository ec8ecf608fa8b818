"""Decodes all audio of a data set once, before training: finds what is silent, clipped or cannot be
decoded, and measures the silence at the ends."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.device import processors
from common.errors import DataError
from speech.data.columns import Codes, Corpus, Rejections
from speech.data.folders import locked
from speech.data.headers import file_stamps, in_threads, recall, remember
from speech.signal.audio import part_of, read_at_its_rate

FRAME = 0.01  # seconds
SILENT_LEVEL = -60.0  # dB of full scale, RMS of the loudest frame: below it a clip is silent
# A frame is silent below either of these.
PAUSE_LEVEL = -80.0  # dB of full scale
PAUSE_DEPTH = 40.0  # dB below the loudest frame
CLIPPED = "audio is clipped"  # a reason
SILENT = "audio is silent"  # a reason
CLIPPED_SHARE = 0.01  # of the samples
CLIPPED_RUN = 3  # samples
CLIPPED_PEAK = 0.1  # amplitude: noise and silence have quieter extremes
NEAR_PEAK = 0.9  # of the peak
LONG_PAUSE = 0.3  # seconds: longer silence at an end is cut
KEPT_PAUSE = 0.15  # seconds of it that stay
MOST_THREADS = 8  # each holds an utterance, which may be long
FEW = 32  # utterances that no threads are started for: they may be recordings of hours
LONG_PASS = 3600.0  # seconds of audio that are announced


def measure(waveform: np.ndarray, rate: int) -> tuple[float, float, float, float]:
    """Of (T,) at `rate` Hz: level of the loudest 10 ms in dB of full scale (RMS, without its mean),
    share of clipped samples, and seconds of silence at the start and at the end."""
    frame = max(1, min(round(FRAME * rate), len(waveform)))
    count = len(waveform) // frame
    frames = waveform[: count * frame].reshape(count, frame)
    levels = 10 * np.log10(frames.var(axis=1, dtype=np.float64) + 1e-20)
    loudest = float(levels.max())
    audible = np.flatnonzero(levels >= max(loudest - PAUSE_DEPTH, PAUSE_LEVEL))
    first, last = (audible[0], audible[-1] + 1) if len(audible) else (count, count)
    at_start = float(first * frame / rate)
    at_end = float((count - last) * frame / rate)
    return loudest, clipped_share(waveform), at_start, at_end


def clipped_share(waveform: np.ndarray) -> float:
    """The share of the samples of (T,) in runs of at least CLIPPED_RUN at the highest or lowest
    value; 0 if there are more samples near these values: a loud tone stays near its peak, while
    clipped speech has its peaks cut off."""
    low, high = float(waveform.min()), float(waveform.max())
    at_peak = np.zeros(len(waveform), dtype=bool)
    near = np.zeros(len(waveform), dtype=bool)
    for peak, signed in ((high, waveform), (-low, -waveform)):
        if peak > CLIPPED_PEAK:
            at_peak |= signed == peak
            near |= signed >= NEAR_PEAK * peak
    edges = np.flatnonzero(np.diff(np.concatenate([[False], at_peak, [False]])))
    lengths = edges[1::2] - edges[::2]
    clipped = int(lengths[lengths >= CLIPPED_RUN].sum())
    return clipped / len(waveform) if 2 * clipped > int(near.sum()) else 0.0


def measure_utterance(corpus: Corpus, index: int) -> tuple[float, float, float, float] | str:
    """`measure` of an utterance at the file's own rate, or why it cannot be decoded."""
    try:
        waveform, rate = read_at_its_rate(corpus.paths[index], *part_of(corpus, index))
    except DataError as error:
        return str(error)
    return measure(waveform.numpy(), rate)


def listen(
    corpus: Corpus, cache: Path | None, skip_bad_audio: bool
) -> tuple[np.ndarray, dict[int, str]]:
    """The measures (N, 4) of every utterance, as `measure` returns them (NaN if it cannot be
    decoded), and by index why utterances cannot be decoded. In threads: decoding and numpy let each
    other run. Results of an earlier run in the file `cache` are used for the same parts of
    unchanged files. Raises `DataError` for what cannot be decoded unless `skip_bad_audio`."""
    faults: dict[int, str] = {}
    if cache:
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
    # One process at a time: other ranks of a run wait, and then find the results.
    with locked(cache.parent) if cache else contextlib.nullcontext():
        stamps = _stamps(corpus)
        measures = recall(cache, stamps, 4)
        todo = np.flatnonzero(np.isnan(measures[:, 0]))
        seconds = float(corpus.seconds[todo].sum())
        if seconds > LONG_PASS:
            advice = "kept for the next run; --no_check_audio skips this"
            print(f"listening to {seconds / 3600:.1f} h of audio once ({advice})", flush=True)
        try:
            with contextlib.closing(_results(corpus, todo)) as results:
                for index, result in results:
                    if not isinstance(result, str):
                        measures[index] = result
                    elif skip_bad_audio:
                        faults[index] = result
                    else:
                        raise DataError(
                            f"{result}; fix or remove it, or skip such files with --skip_bad_audio"
                        )
        finally:
            if cache and len(todo):
                remember(cache, stamps, measures)
    return measures, faults


def _results(corpus: Corpus, rows: np.ndarray) -> Iterator[tuple[int, tuple | str]]:
    """(row, `measure_utterance`) of the rows, in order."""

    def look(part: list[int]) -> list[tuple[int, tuple | str]]:
        return [(row, measure_utterance(corpus, row)) for row in part]

    threads = min(MOST_THREADS, processors())
    if len(rows) < FEW or threads < 2:
        yield from (look([row])[0] for row in rows.tolist())
        return
    for part in in_threads(look, rows.tolist(), threads):
        yield from part


def _stamps(corpus: Corpus) -> np.ndarray:
    """(N, 3) as `file_stamps`, with a hash of file and place in place of the file's."""
    files = Codes(corpus.paths)
    stamps = file_stamps(files.names)[np.array(files.codes, dtype=np.int64)]
    places = corpus.places().T
    for row in np.flatnonzero(stamps[:, 0]).tolist():
        place = stamps[row, 0].tobytes() + places[row].tobytes()
        name = hashlib.blake2b(place, digest_size=7).digest()
        stamps[row, 0] = int.from_bytes(name, "big")
    return stamps


def audio_faults(
    measures: np.ndarray, undecodable: dict[int, str]
) -> Iterator[tuple[int, str, str]]:
    """(row, reason, details) of utterances whose audio cannot be used, by `listen`."""
    levels = measures[:, 0]
    clipped = measures[:, 1]
    is_faulty = (levels < SILENT_LEVEL) | (clipped > CLIPPED_SHARE) | np.isnan(levels)
    for row in np.flatnonzero(is_faulty).tolist():
        if row in undecodable:
            yield row, "audio cannot be decoded", undecodable[row]
        elif levels[row] < SILENT_LEVEL:
            yield row, SILENT, f"at most {max(levels[row], -200.0):.0f} dB of full scale"
        else:
            yield row, CLIPPED, f"{100 * clipped[row]:.1f} % of the samples"


def trim(corpus: Corpus, measures: np.ndarray, rejected: Rejections) -> None:
    """Cuts silence over LONG_PAUSE at an end down to KEPT_PAUSE, and notes it in `rejected`."""
    pauses = measures[:, 2:]
    cuts = np.where(pauses > LONG_PAUSE, pauses - KEPT_PAUSE, 0.0)
    rows = np.flatnonzero(cuts.any(axis=1))
    for row in rows.tolist():
        start, end = pauses[row]
        example = f"{corpus.where(row)}: {start:.2f} s at the start, {end:.2f} s at the end"
        rejected.note(f"silence at an end is cut to {KEPT_PAUSE:g} s", example)
    corpus.starts = corpus.offsets.copy()
    corpus.offsets[rows] = np.round(corpus.offsets[rows] + cuts[rows, 0], 6)
    left = corpus.seconds[rows] - cuts[rows].sum(axis=1)
    corpus.seconds[rows] = np.round(np.maximum(left, 0.0), 6)
    corpus.durations[rows] = corpus.seconds[rows]
