"""A manifest to a corpus of checked utterances: lengths, texts, segment times and sound. What
cannot be used is rejected with a reason."""

import bisect
import contextlib
import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.errors import DataError
from speech.data.columns import Codes, Corpus, Rejections, Segments, Strings, printable
from speech.data.headers import END_TOLERANCE, Unusable, open_sound, probe_all
from speech.data.manifest import Checks, has_lines, read_manifest

# Seconds: END_TOLERANCE of whole files, whose duration is often rounded to a second.
FILE_TOLERANCE = 0.5
# Seconds: durations of whole files are often cut to one.
ROUNDED_DOWN = 1.0
WHOLE = "duration in the manifest is rounded down: the whole file is read"
TOO_LITTLE = (
    "duration in the manifest is shorter than the file by a second or more (correct it or leave it"
    " out; for a part, add its offset, which may be 0)"
)
# Seconds: a segment that is shorter is joined with the next one, unless the gap is longer.
SHORT_SEGMENT, SHORT_GAP = 1.0, 0.5
MICROSECOND = 1e-6  # rounding error of time differences, seconds
FASTEST_SPEECH = 100  # characters per second, more than anyone says
MOST_CHARACTERS = 10_000  # of a text; FASTEST_SPEECH per second if --max_duration is over 100 s


class Rows:
    """The rows of the manifests `paths`, with numbers of lines `before` each, while they are
    checked. `keep` (N,) marks what is not rejected, `file_of` (N,) is a row's file in `files`."""

    def __init__(self, paths: list[str], before: list[int], corpus: Corpus, rejected: Rejections):
        codes = Codes(corpus.paths)
        self.paths = paths
        self.before = before
        self.corpus = corpus
        self.rejected = rejected
        self.files = codes.names
        self.file_of = np.array(codes.codes, dtype=np.int64)
        self.keep = np.ones(len(corpus), dtype=bool)

    def example(self, row: int) -> str:
        """Where a row is in its manifest, and its audio."""
        line = int(self.corpus.lines[row])
        place = bisect.bisect_left(self.before, line) - 1
        path = self.paths[place]
        where = self.corpus.where(row)  # annotations and pairs are found by their audio alone
        return f"{path}:{line - self.before[place]}: {where}" if has_lines(path) else where

    def length(self, row: int) -> str:
        seconds = self.corpus.seconds[row]
        return "" if np.isnan(seconds) else f" ({seconds:.2f} s)"

    def reject(self, row: int, reason: str, details: str = "") -> None:
        self.rejected.add(reason, self.example(row) + details)
        self.keep[row] = False

    def reject_all(self, bad: np.ndarray, reason: str) -> None:
        """Rejects the rows marked in `bad` (N,) that are not rejected yet."""
        for row in np.flatnonzero(bad & self.keep).tolist():
            self.reject(row, reason, self.length(row))

    def become(self, corpus: Corpus, sources: np.ndarray) -> None:
        """Continues with the rows of `corpus`, which were made from the rows `sources` (M,)."""
        self.corpus = corpus
        self.file_of = self.file_of[sources]
        self.keep = np.ones(len(corpus), dtype=bool)

    def drop_rejected(self) -> None:
        if not self.keep.all():
            kept = np.flatnonzero(self.keep)
            self.become(self.corpus.select(kept), kept)


def load_corpus(
    path: str | Sequence[str], normalise: Callable[[str], str], checks: Checks
) -> tuple[Corpus, Rejections]:
    """The usable utterances of a manifest or of several, and what was rejected.

    An utterance is usable if its file's header can be read, its duration is within the limits, and
    it has what `checks.needs`. With `checks.use_chunking`, longer rows are cut by their segment
    times. With `checks.listen`, its audio can also be decoded and is not silent. Raises `DataError`
    for audio that cannot be decoded unless `checks.skip_bad_audio`."""
    segments = Segments(checks.use_chunking)
    rows = read_rows(path, normalise, segments, checks)
    check_files(rows, checks)
    check_lengths(rows, segments, checks)
    if checks.needs == "text":
        rows.reject_all(rows.corpus.texts.empty(), "text is empty")
    longest_text = most_characters(checks)
    if not checks.drafted and rows.corpus.drafted is not None:
        rows.reject_all(rows.corpus.drafted, "a recogniser wrote the text, which can judge none")
    rows.reject_all(
        rows.corpus.texts.longer(longest_text), f"text is longer than {longest_text} characters"
    )
    rows.drop_rejected()
    if checks.listen:
        check_sound(rows, checks)
    rows.rejected.repeated = count_repeated(rows.file_of, rows.corpus)
    return rows.corpus, rows.rejected


def read_rows(
    path: str | Sequence[str], normalise: Callable[[str], str], segments: Segments, checks: Checks
) -> Rows:
    """The rows of manifests before they are checked. Adds their segments to `segments`."""
    rejected = Rejections()
    longest_text = most_characters(checks)
    too_long = "." * (longest_text + 1)

    def normalise_short(text: str) -> str:
        # Longer texts are rejected later, and it would take too long to normalise them.
        return normalise(text) if len(text) <= longest_text else too_long

    paths = [path] if isinstance(path, str) else list(path)
    before = []
    sources = []
    corpus = None
    for name in paths:
        part = read_manifest(name, rejected, normalise_short, segments, checks)
        sources.append(rejected.source)
        rejected.source = ""
        before.append(int(corpus.lines.max(initial=0)) if corpus else 0)
        part.lines += before[-1]
        corpus = corpus.with_rows_of(part) if corpus else part
    rejected.source = sources[0]
    if len(sources) > 1:
        named = zip(paths, sources, strict=True)
        rejected.source = "".join(f"\n  {name}: {source}" for name, source in named)
    corpus.cache_audio = checks.cache_audio
    corpus.repeats_texts = checks.needs == "label"
    return Rows(paths, before, corpus, rejected)


def most_characters(checks: Checks) -> int:
    return max(MOST_CHARACTERS, int(FASTEST_SPEECH * checks.max_duration))


def held_out_keys(corpus: Corpus) -> list[str]:
    """A short key of each utterance, which stays the same if the data set moves or grows."""
    offsets = corpus.offsets if corpus.starts is None else corpus.starts
    keys = []
    for path, offset, text in zip(corpus.paths, offsets.tolist(), corpus.texts, strict=True):
        row = repr((path.split(os.sep)[-2:], offset, text)).encode("utf-8", "surrogateescape")
        keys.append(hashlib.blake2b(row, digest_size=8).hexdigest())
    return keys


def check_files(rows: Rows, checks: Checks) -> None:
    """Fills in the lengths by the files' headers. Rejects rows whose files cannot be read or are
    shorter than the manifest says. Raises `DataError` for a channel that a file does not have."""
    corpus = rows.corpus
    seconds, faults = probe_all(rows.files, cache_file(checks, "headers", rows.paths))
    available = seconds[rows.file_of] - corpus.offsets
    missing = np.fmax(corpus.durations, corpus.stated) - available
    corpus.seconds = np.where(
        np.isnan(corpus.durations), available, np.minimum(available, corpus.durations)
    )
    has_fault = np.array([fault != "" for fault in faults], dtype=bool)[rows.file_of]
    for row in np.flatnonzero(has_fault).tolist():
        rows.reject(row, faults[rows.file_of[row]], rows.length(row))
    rows.reject_all(
        corpus.durations < 0, "its cells of times are empty, and other rows of its file have times"
    )
    is_beyond = (available <= 0) | ((corpus.offsets > 0) & (missing > END_TOLERANCE))
    rows.reject_all(is_beyond, "segment ends beyond the file")
    rows.reject_all(
        missing > FILE_TOLERANCE, "file is shorter than its duration in the manifest (truncated?)"
    )
    more = -missing * np.where(np.isnan(corpus.stated), np.nan, 1.0)
    rows.reject_all(more >= ROUNDED_DOWN, TOO_LITTLE)
    for row in np.flatnonzero(rows.keep & (more > END_TOLERANCE)).tolist():
        stated = f"{corpus.stated[row]:g} of {available[row]:.2f} s"
        rows.rejected.note(WHOLE, f"{rows.example(row)}: {stated}")
    check_channels(rows)


def check_channels(rows: Rows) -> None:
    """Raises `DataError` for a missing channel: counted from 1, all rows would have another's."""
    channels = rows.corpus.channels
    last: dict[int, int] = {}
    for row in np.flatnonzero(rows.keep & (channels >= 0)).tolist():
        last[rows.file_of[row]] = max(last.get(rows.file_of[row], 0), int(channels[row]))
    for number, channel in last.items():
        with contextlib.suppress(Unusable), open_sound(rows.files[number]) as file:
            count = file.channels
            if channel >= count:
                raise DataError(
                    f"{printable(rows.files[number])} has {count} channel{'s' * (count > 1)}, and"
                    f" the manifest names its channel {channel}: they are counted from 0"
                )


def check_lengths(rows: Rows, segments: Segments, checks: Checks) -> None:
    """Rejects rows that are too short or too long, with --use_chunking after they are cut."""
    too_long = f"longer than {checks.max_duration:g} s (--max_duration)"
    is_long = rows.corpus.seconds > checks.max_duration
    has_segments = np.array(segments.given, dtype=bool)
    if not checks.use_chunking:
        rows.reject_all(
            is_long & has_segments, f"{too_long}; --use_chunking would use its segment times"
        )
    else:
        rows.reject_all(
            is_long & ~has_segments, f"{too_long}, without segment times for --use_chunking"
        )
        if (rows.keep & is_long).any():
            cut_by_segments(rows, segments, checks.max_duration, checks.join_segments)
    rows.reject_all(rows.corpus.seconds > checks.max_duration, too_long)
    reject_short(rows, checks)


def reject_short(rows: Rows, checks: Checks) -> None:
    rows.reject_all(
        rows.corpus.seconds < checks.min_duration,
        f"shorter than {checks.min_duration:g} s (--min_duration)",
    )


def check_sound(rows: Rows, checks: Checks) -> None:
    """Decodes all audio. Rejects what cannot be decoded, silence (but not for labels: a class may
    be silence), and for synthesis clipped clips, whose ends are also trimmed. A recogniser will
    hear clipped speech, too: it is only noted."""
    from speech.data import listening

    used = set()
    if checks.needs == "label":
        used.add(listening.SILENT)
    if not checks.for_synthesis:
        used.add(listening.CLIPPED)
    measures, undecodable = listening.listen(
        rows.corpus, cache_file(checks, "audio", rows.paths), checks.skip_bad_audio
    )
    for row, reason, details in listening.audio_faults(measures, undecodable):
        if reason in used:
            rows.rejected.note(reason, f"{rows.example(row)}: {details}")
        else:
            rows.reject(row, reason, f": {details}")
    if checks.for_synthesis:
        listening.trim(rows.corpus, np.where(rows.keep[:, None], measures, 0.0), rows.rejected)
        reject_short(rows, checks)
    rows.drop_rejected()


def cache_file(checks: Checks, kind: str, paths: list[str]) -> Path | None:
    """The file that keeps results for the audio of manifests until the next run, or None."""
    if checks.cache_dir is None:
        return None
    names = os.fsencode("\n".join(map(os.path.abspath, paths)))
    return checks.cache_dir / f"{kind}-{hashlib.sha1(names).hexdigest()[:12]}.npz"


def cut_by_segments(rows: Rows, segments: Segments, max_duration: float, join: bool) -> None:
    """Cuts the rows over `max_duration` into pieces of whole segments, in place.

    With `join`, a piece joins as many consecutive segments as fit, including the gaps between them;
    otherwise each segment with a text is a piece, and short ones are joined. Segments over
    `max_duration`, and rows whose segments cannot be used, are rejected."""
    corpus = rows.corpus
    sources = array("q")
    offsets = array("d")
    durations = array("d")
    texts = Strings()
    is_long = rows.keep & (corpus.seconds > max_duration)
    for row in np.flatnonzero(is_long).tolist():
        parts = segments.row(row)
        length = float(corpus.seconds[row])
        problem, details = segment_fault(corpus, row, segments.problems[row], parts)
        if problem:
            rows.rejected.add(problem, rows.example(row) + details)
            continue
        if join:
            parts = join_segments(parts, max_duration)
        else:
            parts = join_short(parts, max_duration)
        for start, stop, text in parts:
            stop = min(stop, length)
            if stop - start > max_duration + MICROSECOND:
                reason = f"a segment is longer than {max_duration:g} s (--max_duration)"
                details = f", segment from {start:.2f} to {stop:.2f} s"
                rows.rejected.add(reason, rows.example(row) + details)
                continue
            sources.append(row)
            offsets.append(corpus.offsets[row] + start)
            durations.append(min(max(0.0, round(stop - start, 6)), max_duration))
            texts.append(text)
    whole = np.flatnonzero(rows.keep & ~is_long)
    row_of = np.concatenate([whole, np.array(sources, dtype=np.int64)])
    order = np.argsort(row_of, kind="stable")
    row_of = row_of[order]
    all_texts = corpus.texts.select(whole)
    for text in texts:
        all_texts.append(text)
    pieces = replace(
        corpus.select(row_of),
        texts=all_texts.select(order),
        seconds=np.concatenate([corpus.seconds[whole], durations])[order],
        offsets=np.concatenate([corpus.offsets[whole], offsets])[order],
        durations=np.concatenate([corpus.durations[whole], durations])[order],
    )
    rows.become(pieces, row_of)


def segment_fault(
    corpus: Corpus, row: int, problem: str, parts: list[tuple[float, float, str]]
) -> tuple[str, str]:
    """Why a row cannot be cut by its segments, and details. `problem`: what its reader found."""
    if problem:
        return problem, ""
    if isinstance(corpus.label(row), list):
        return "a list of labels cannot be cut (--use_chunking)", ""
    last, length = parts[-1][1], float(corpus.seconds[row])
    if last > length + END_TOLERANCE:
        return "segment times reach beyond the audio", f" ({last:.2f} of {length:.2f} s)"
    return "", ""


def join_segments(
    segments: list[tuple[float, float, str]], max_seconds: float
) -> list[tuple[float, float, str]]:
    """Joins consecutive (start, stop, text), sorted and without overlap, into as few pieces of at
    most `max_seconds` as possible, from the first one on. A longer segment stays alone."""
    pieces: list[tuple[float, float, str]] = []
    for start, stop, text in segments:
        if pieces and stop - pieces[-1][0] <= max_seconds + MICROSECOND:
            first, _, earlier_text = pieces.pop()
            if earlier_text and text:
                text = f"{earlier_text} {text}"
            pieces.append((first, stop, text or earlier_text))
        else:
            pieces.append((start, stop, text))
    return pieces


def join_short(
    segments: list[tuple[float, float, str]], max_seconds: float
) -> list[tuple[float, float, str]]:
    """The (start, stop, text) that have a text, sorted and without overlap. One of less than
    SHORT_SEGMENT seconds, such as a word, is joined with what follows within SHORT_GAP."""
    pieces: list[tuple[float, float, str]] = []
    for start, stop, text in segments:
        if not text:
            continue
        if pieces:
            first, last, earlier_text = pieces[-1]
            is_short = last - first < SHORT_SEGMENT and start - last < SHORT_GAP
            if is_short and stop - first <= max_seconds + MICROSECOND:
                pieces[-1] = (first, stop, f"{earlier_text} {text}")
                continue
        pieces.append((start, stop, text))
    return pieces


def count_repeated(file_of: np.ndarray, corpus: Corpus) -> int:
    """The number of utterances with the same file, times and channel as an earlier one."""
    places = np.concatenate([file_of[None], corpus.places()])
    places = places[:, np.lexsort(places)]
    return int((places[:, 1:] == places[:, :-1]).all(axis=0).sum())
