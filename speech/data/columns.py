"""The rows of a manifest in columns: strings in one buffer, numbers in arrays."""

import hashlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace

import numpy as np

from common.errors import DataError

EXAMPLES = 3  # of each reason in the table of rejections
EXAMPLE_LENGTH = 1000  # characters
MOST_NAMES = 10  # lines of the table of speakers, and of that of languages
NAME_LENGTH = 60  # characters there
# Seconds: of the widths of a histogram's bins, the smallest that makes at most MOST_BINS is taken.
BIN_WIDTHS = [first * 10.0**power for power in range(-2, 5) for first in (1, 2, 5)]
MOST_BINS = 15
# What helps, by the beginning of a reason.
ADVICE = {
    "file is missing": "paths are relative to the manifest's folder or, if given, --audio_root",
    "line is not UTF-8": "save the manifest as UTF-8",
    "no audio path": "name its key or column audio_filepath, audio_file, file_name or path",
    "no text field": "name it text, transcription, sentence or transcript, or by --text_column",
    "line is not valid JSON": "write one object per line, each key once",
    "line has more cells": "a text with commas needs quotes",
    "longer than": "cut the recordings: --transcribe FILE --piece_seconds S of a recogniser writes"
    " a manifest of shorter pieces to correct; or give their segments' times, with --use_chunking",
    "text is empty": "transcribe these, or leave the rows out",
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Strings:
    """A column of strings in one buffer. It takes about 60 bytes per row less than Python objects,
    and worker processes do not copy it when they count references."""

    def __init__(self, values: Iterable[str] = ()):
        self.buffer = bytearray()
        self.ends = array("q", [0])
        for value in values:
            self.append(value)

    def append(self, value: str) -> None:
        self.buffer += value.encode("utf-8", "surrogateescape")
        self.ends.append(len(self.buffer))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]  # negative ones, too; raises IndexError
        start, end = self.ends[index], self.ends[index + 1]
        return self.buffer[start:end].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        for start, end in itertools.pairwise(self.ends):
            yield self.buffer[start:end].decode("utf-8", "surrogateescape")

    def empty(self) -> np.ndarray:
        """(N,), True for empty strings."""
        return np.diff(self.ends) == 0

    def longer(self, length: int) -> np.ndarray:
        """(N,), True for strings of more than `length` characters."""
        is_longer = np.diff(self.ends) > length  # in bytes
        for i in np.flatnonzero(is_longer).tolist():
            is_longer[i] = len(self[i]) > length
        return is_longer

    def select(self, indices: np.ndarray) -> "Strings":
        """The strings at `indices` (N,), in that order."""
        chosen = Strings()
        ends = np.array(self.ends)
        for start, end in zip(ends[indices].tolist(), ends[indices + 1].tolist(), strict=True):
            chosen.buffer += self.buffer[start:end]
            chosen.ends.append(len(chosen.buffer))
        return chosen


class Codes:
    """A column with few distinct strings: `names`, and an index into them per row."""

    def __init__(self, values: Iterable[str] = ()):
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        self.codes = array("i")
        for value in values:
            self.append(value)

    def append(self, value: str) -> None:
        number = self.numbers.setdefault(value, len(self.names))
        if number == len(self.names):
            self.names.append(value)
        self.codes.append(number)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> str:
        return self.names[self.codes[index]]

    def __iter__(self) -> Iterator[str]:
        return (self.names[code] for code in self.codes)

    def select(self, indices: np.ndarray) -> "Codes":
        """The strings at `indices` (N,), in that order."""
        return Codes(self.names[code] for code in np.array(self.codes)[indices].tolist())


def printable(text: str) -> str:
    """A text of a data set as a part of one line: control characters become escapes."""
    text = CONTROL.sub(lambda match: repr(match[0])[1:-1], text[: EXAMPLE_LENGTH + 1])
    return text if len(text) <= EXAMPLE_LENGTH else text[:EXAMPLE_LENGTH] + "..."


def advice(reason: str) -> str:
    """Advice against a reason, in parentheses, or ""."""
    known = [text for start, text in ADVICE.items() if reason.startswith(start)]
    return f" ({known[0]})" if known else ""


@dataclass
class Rejections:
    """How many rows were rejected for each reason, with a few examples."""

    repeated: int = 0  # used rows with the same audio as an earlier one
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: "Rejections | None" = None  # used rows that are worth a note
    source: str = ""  # what was read, if the name of the manifest does not say it

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(printable(example))

    def note(self, reason: str, example: str) -> None:
        """Counts a row that is used."""
        if self.notes is None:
            self.notes = Rejections()
        self.notes.add(reason, example)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def noted(self, name: str) -> str:
        """The notes on the set `name`, to print."""
        return f"{name}: {self.notes.total} noted (all are used):\n{self.notes.table()}"

    def table(self) -> str:
        """A line for each reason, the most frequent first, with its examples below."""
        lines = []
        for reason, count in sorted(self.counts.items(), key=lambda pair: -pair[1]):
            lines.append(f"  {count:7}  {reason}{advice(reason)}")
            lines += [f"           {example}" for example in self.examples[reason]]
        return "\n".join(lines)


def report_rejections(name: str, seconds: np.ndarray, rejected: Rejections, strict: bool) -> None:
    """Prints the size of a set, whose utterances last `seconds` (N,), and what was rejected. Raises
    `DataError` if nothing is left, or if `strict` and anything was rejected."""
    if rejected.source:
        print(f"{name}: {rejected.source}")
    hours = float(seconds.sum()) / 3600
    length = f"{hours:.2f} h" if hours >= 0.1 else f"{60 * hours:.1f} min"
    summary = f"{name}: {len(seconds)} utterances, {length}"
    if rejected.repeated:
        summary += f"; {rejected.repeated} repeat the audio of another (all are used)"
    if rejected.total:
        summary += f"; {rejected.total} rejected:\n{rejected.table()}"
    if rejected.notes:
        summary += f"\n{rejected.noted(name)}"
    print(summary)
    if not len(seconds):
        reasons = "; ".join(
            f"{count} x {reason}{advice(reason)}" for reason, count in rejected.counts.items()
        )
        raise DataError(f"{name}: no usable utterance: {reasons or 'the manifest is empty'}")
    if strict and rejected.total:
        raise DataError(f"{name}: {rejected.total} utterances rejected (--strict_data)")


def describe_utterances(corpora: "Iterable[Corpus]") -> str:
    """Tables of the utterances of all `corpora` together: minutes by speaker and by language, as
    far as rows name them, and how many utterances have which length."""
    corpora = list(corpora)
    lines = []
    for what in ("speaker", "language"):
        totals: Counter[str] = Counter()
        for corpus in corpora:
            totals.update(corpus.seconds_by(getattr(corpus, f"{what}s")))
        if any(totals):
            lines += [f"minutes by {what}:", *_minutes(totals, f"(no {what} given)")]
    seconds = np.concatenate([corpus.seconds for corpus in corpora])
    return "\n".join([*lines, "utterances by length:", *_histogram(seconds)])


def _minutes(totals: Counter[str], nameless: str) -> list[str]:
    """The names with the most seconds, a line each, and one for the sum of the others."""
    ranked = totals.most_common()
    rows = [(seconds, printable(name)[:NAME_LENGTH]) for name, seconds in ranked[:MOST_NAMES]]
    if others := ranked[MOST_NAMES:]:
        rows.append((sum(seconds for _, seconds in others), f"({len(others)} more)"))
    return [f"  {seconds / 60:7.1f}  {name or nameless}" for seconds, name in rows]


def _histogram(seconds: np.ndarray) -> list[str]:
    """A line for each bin, from the first one that is not empty."""
    width = next(width for width in BIN_WIDTHS if seconds.max() < MOST_BINS * width)
    bins = np.bincount((seconds / width + 1e-9).astype(np.int64)).tolist()
    first = next(number for number, count in enumerate(bins) if count)
    return [
        f"  {bins[number]:7}  {number * width:g} to {(number + 1) * width:g} s"
        for number in range(first, len(bins))
    ]


@dataclass
class Corpus:
    """Utterances in columns."""

    paths: Strings
    texts: Strings
    seconds: np.ndarray  # their lengths
    offsets: np.ndarray  # their place in the file, in seconds
    durations: np.ndarray  # NaN: to the end
    speakers: Codes
    languages: Codes
    lines: np.ndarray  # in the manifest, those of several one after the other
    labels: Strings | None = None  # in JSON, if labels were asked for
    # Of each utterance in its file, from 0 on, or -1: their average. None: so everywhere.
    channels: np.ndarray | None = None
    stated: np.ndarray | None = None  # durations of whole files in the manifest, NaN without one
    starts: np.ndarray | None = None  # offsets in the manifest, if silence at the start was cut
    cache_audio: str | None = None  # folder of decoded audio
    read: Strings | None = None  # what a synthesis model reads of the texts
    drafted: np.ndarray | None = None  # whether a recogniser wrote the text. None: nowhere
    repeats_texts: bool = False  # training and evaluation share their texts by design

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, index: int) -> str:
        """File, offset and channel of an utterance, for messages."""
        offset = self.offsets[index]
        channel = -1 if self.channels is None else self.channels[index]
        where = self.paths[index] + (f" at {offset:.2f} s" if offset else "")
        return where + (f", channel {channel}" if channel >= 0 else "")

    def places(self) -> np.ndarray:
        """(3, N): offset, duration (-1: to the end of the file) and channel of each utterance."""
        channels = np.full(len(self), -1) if self.channels is None else self.channels
        return np.stack([self.offsets, np.nan_to_num(self.durations, nan=-1.0), channels])

    def written_texts(self) -> Strings:
        """The texts that a person wrote."""
        if self.drafted is None:
            return self.texts
        return self.texts.select(np.flatnonzero(~self.drafted))

    def label(self, index: int) -> int | float | str | list | None:
        """The label of an utterance, None if labels were not asked for."""
        return None if self.labels is None else json.loads(self.labels[index])

    def seconds_by(self, column: Codes) -> dict[str, float]:
        """The seconds of speech by the names in a column, `speakers` or `languages`."""
        codes = np.array(column.codes, dtype=np.int64)
        totals = np.bincount(codes, self.seconds, len(column.names)).tolist()
        return {column.names[code]: totals[code] for code in np.unique(codes).tolist()}

    def select(self, indices: np.ndarray) -> "Corpus":
        """The utterances at `indices`, in that order."""
        indices = np.asarray(indices, dtype=np.int64)
        columns = {}
        for name in (each.name for each in fields(self)):
            column = getattr(self, name)
            if isinstance(column, np.ndarray):
                columns[name] = column[indices]
            elif isinstance(column, (Strings, Codes)):
                columns[name] = column.select(indices)
        return replace(self, **columns)

    def without(self, problems: dict[int, tuple[str, str]], rejected: Rejections) -> "Corpus":
        """The corpus without those in {index: (reason, details)}, which `rejected` gets."""
        for index, (reason, details) in sorted(problems.items()):
            rejected.add(reason, f"{self.where(index)}: {details}")
        if not problems:
            return self
        return self.select(np.setdiff1d(np.arange(len(self)), list(problems)))

    def with_rows_of(self, other: "Corpus") -> "Corpus":
        """The utterances, and then those of `other`, which has the same columns."""
        columns = {}
        for name in (each.name for each in fields(self)):
            column = getattr(self, name)
            more = getattr(other, name)
            if isinstance(column, np.ndarray):
                columns[name] = np.concatenate([column, more])
            elif isinstance(column, (Strings, Codes)):
                columns[name] = type(column)(itertools.chain(column, more))
        return replace(self, **columns)

    def fingerprint(self) -> str:
        """Changes when the utterances, their texts, their labels or their order do, and not when
        they are in another folder."""
        digest = hashlib.sha1(self.seconds.tobytes() + self.offsets.tobytes())
        if self.channels is not None:
            digest.update(self.channels.tobytes())
        for column in (self.texts, self.labels):
            if column is not None:
                digest.update(column.buffer)
                digest.update(column.ends)
        return digest.hexdigest()[:16]


class Segments:
    """Segment times and texts of a manifest's rows, in columns. Times are in seconds from the row's
    offset. `given` says whether a row has segments, `problems` why they cannot be used ("" if they
    can). Unless segments are `wanted` (--use_chunking), only `given` is kept."""

    def __init__(self, wanted: bool):
        self.wanted = wanted
        self.given = bytearray()
        self.problems = Codes()
        self.ends = array("q", [0])  # of each row in the columns below
        self.starts = array("d")
        self.stops = array("d")
        self.texts = Strings()

    def append(self, given: bool, parts: list[tuple[float, float, str]], problem: str) -> None:
        self.given.append(given)
        if self.wanted:
            for start, stop, text in parts:
                self.starts.append(start)
                self.stops.append(stop)
                self.texts.append(text)
            self.ends.append(len(self.starts))
            self.problems.append(problem)

    def row(self, index: int) -> list[tuple[float, float, str]]:
        """(start, stop, text) of each segment of a row."""
        return [
            (self.starts[i], self.stops[i], self.texts[i])
            for i in range(self.ends[index], self.ends[index + 1])
        ]
