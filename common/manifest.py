"""Reading manifests into columns, and checking once, before training, what could fail in the middle of it."""

import contextlib
import csv
import hashlib
import json
import math
import os
import re
import shutil
import stat
import subprocess
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import TextIO

import numpy as np
import soundfile

from common.errors import DataError, UsageError

AUDIO_KEYS = ("audio_filepath", "audio_file", "file_name", "path", "audio", "wav", "filename")
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("lang", "language", "locale")
EXAMPLES = 3  # of each reason in the rejection table
END_TOLERANCE = 0.1  # seconds by which rounded times may miss a file's end
FILE_TOLERANCE = 0.5  # the same for a whole file, whose duration is often rounded to a second
UNKNOWN_LENGTH = 1 << 60  # frames: what libsndfile reports for a FLAC stream that was never closed
UNCLOSED = 0x7FFF0000  # bytes: from here up a chunk's size means that its writer did not know it
THREADS = 16  # for looking at files: they wait for the disk or the network, not for the processor
MANY_FILES = 20_000  # looking at more of them is announced
SEGMENT_OVERLAP = 1e-3  # seconds by which rounded times of a segment may reach back into the one before it
MICROSECOND = 1e-6  # what differences of times may be off by


class Strings:
    """A column of strings in one buffer: some 60 bytes a row less than Python objects, and nothing for worker
    processes to copy when they only count references."""

    def __init__(self, values: Iterable[str] = ()):
        self.buffer, self.ends = bytearray(), array("q", [0])
        for value in values:
            self.append(value)

    def append(self, value: str) -> None:
        self.buffer += value.encode("utf-8", "surrogateescape")
        self.ends.append(len(self.buffer))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        return self.buffer[self.ends[index] : self.ends[index + 1]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def empty(self) -> np.ndarray:
        """(N,), True where the string is empty."""
        return np.diff(self.ends) == 0

    def select(self, indices: np.ndarray) -> "Strings":
        chosen, ends = Strings(), np.array(self.ends)
        for start, end in zip(ends[indices].tolist(), ends[indices + 1].tolist(), strict=True):
            chosen.buffer += self.buffer[start:end]
            chosen.ends.append(len(chosen.buffer))
        return chosen


class Codes:
    """A column of few distinct strings: `names`, and one of their numbers a row."""

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
        return Codes(self.names[code] for code in np.array(self.codes)[indices].tolist())


@dataclass
class Rejections:
    """What was left out: a count and a few examples for every reason. `repeated` counts lines that were not: they name
    the audio of an earlier one."""

    repeated: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(example)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def table(self) -> str:
        rows = []
        for reason, count in sorted(self.counts.items(), key=lambda pair: -pair[1]):
            rows.append(f"  {count:7}  {reason}")
            rows += [f"           {example}" for example in self.examples[reason]]
        return "\n".join(rows)


@dataclass
class Corpus:
    """Utterances in columns. `seconds`: the length that will be read; `offsets` and `durations` in seconds (duration
    NaN: to the end of the file); `lines`: where in the manifest."""

    paths: Strings
    texts: Strings
    seconds: np.ndarray
    offsets: np.ndarray
    durations: np.ndarray
    speakers: Codes
    languages: Codes
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, index: int) -> str:
        """An utterance in words, for messages."""
        offset = self.offsets[index]
        return self.paths[index] + (f" at {offset:.2f} s" if offset else "")

    def select(self, indices: np.ndarray) -> "Corpus":
        """The utterances at `indices`, in that order."""
        indices = np.asarray(indices, dtype=np.int64)
        return Corpus(self.paths.select(indices), self.texts.select(indices), self.seconds[indices], self.offsets[indices],
                      self.durations[indices], self.speakers.select(indices), self.languages.select(indices),
                      self.lines[indices])  # fmt: skip

    def fingerprint(self) -> str:
        """Changes when the utterances, their texts or their order do."""
        digest = hashlib.sha1(self.seconds.tobytes() + self.offsets.tobytes())
        for column in (self.paths, self.texts):
            digest.update(column.buffer)
            digest.update(column.ends)
        return digest.hexdigest()[:16]


class Segments:
    """Segment times and texts of a manifest's rows in columns. `wanted` is what `--use_chunking` says; where it does not,
    only which rows have segments is kept. Times are in seconds from the row's offset, `problems` says of each row why its
    segments cannot be used ("" if they can)."""

    def __init__(self, wanted: bool):
        self.wanted = wanted
        self.there = bytearray()  # one number a row
        self.ends, self.problems = array("q", [0]), Codes()
        self.starts, self.stops, self.texts = array("d"), array("d"), Strings()

    def append(self, given: bool, found: list[tuple[float, float, str]], problem: str) -> None:
        self.there.append(given)
        if self.wanted:
            for start, stop, text in found:
                self.starts.append(start)
                self.stops.append(stop)
                self.texts.append(text)
            self.ends.append(len(self.starts))
            self.problems.append(problem)

    def row(self, index: int) -> list[tuple[float, float, str]]:
        """(start, stop, text) of a row's segments."""
        return [(self.starts[i], self.stops[i], self.texts[i]) for i in range(self.ends[index], self.ends[index + 1])]


# --- the families of manifests ---------------------------------------------------------------------------------------


def parse(path: Path, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    """(line number, row) of a manifest, its family told by extension and header: JSON Lines or a JSON list, CSV/TSV
    with a header, LJSpeech. Lines that cannot be read are added to `rejected`."""
    try:
        with open(path, "rb") as binary:
            start = binary.read(4096)
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}") from None
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"manifest {path} is UTF-16: save it as UTF-8")
    if start[:4] == b"PK\3\4" or b"\0" in start:
        raise DataError(f"manifest {path} is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)")
    # Read line by line: a manifest of millions of lines would take gigabytes as one string.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        first = next((line for line in file if line.strip()), "").strip()
        file.seek(0)
        if first.startswith("["):
            try:
                rows = json.load(file)
            except (ValueError, RecursionError) as error:
                raise DataError(f"manifest {path} is not valid JSON: {error}") from None
            yield from enumerate(rows, 1)
        elif first.startswith("{") or path.suffix in (".json", ".jsonl"):
            yield from _parse_json_lines(path, file, rejected)
        elif first:
            yield from _parse_table(path, file, first, rejected)


def _parse_json_lines(path: Path, file: TextIO, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            rejected.add("line is not valid JSON", f"{path}:{number}: {getattr(error, 'msg', error)}")


def _parse_table(path: Path, file: TextIO, first: str, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    csv.field_size_limit(1 << 24)
    # Only commas come with quotes. `strict`: an unclosed quote must not swallow the lines after it unseen.
    dialects = {
        delimiter: {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE, "strict": True}
        for delimiter in "|\t,"
    }  # fmt: skip
    header, delimiter = _find_header(first, dialects)
    if not header and "|" not in first:
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of {', '.join(AUDIO_KEYS)}); it has: {first[:100]!r}"
        )
    reader, is_first = csv.reader(file, **dialects[delimiter]), True
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            rejected.add("line is not valid CSV", f"{path}:{begin}: {error}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header and is_first:
            is_first = False
        elif header:
            yield begin, dict(zip(header, cells, strict=False))
        elif len(cells) >= 2:  # LJSpeech: name | text | normalised text
            name = cells[0] if re.search(r"\.[A-Za-z]\w{1,3}$", cells[0]) else cells[0] + ".wav"
            yield begin, {"audio_file": name, "text": cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]}
        else:
            rejected.add("line has too few columns", f"{path}:{begin}")


def _find_header(first: str, dialects: dict[str, dict]) -> tuple[list[str], str]:
    """The names in a table's first line and its delimiter; no names where none is an audio column. (Counting
    delimiters would not do: the sentences of LJSpeech hold more commas than its lines bars.)"""
    found: list[str] = []
    best = "|"
    for delimiter, dialect in dialects.items():
        try:
            names = [cell.strip().lower() for cell in next(csv.reader([first], **dialect), [])]
        except csv.Error:
            continue
        if len(names) > len(found) and any(key in names for key in AUDIO_KEYS):
            found, best = names, delimiter
    return found, best


def _first(row: dict, keys: tuple[str, ...]):
    for key in keys:
        value = row.get(key)
        if value is not None and value != "":
            return value
    return None


def find_audio(name: str, folder: str, audio_root: str | None = None) -> str:
    """Where a manifest's audio path leads: absolute, or relative to `audio_root` or the manifest's `folder` (or, as
    Common Voice and LJSpeech have it, to `clips/` or `wavs/` there). With `audio_root`, an absolute path that does not
    exist is looked up by its last components: manifests travel between machines (Windows' separators included)."""
    base, exists = audio_root or folder, os.path.exists  # (pathlib's raises for a name that is too long)
    if exists(found := os.path.join(base, name)):  # an absolute name stays what it is
        return found
    posix = PureWindowsPath(name).as_posix() if "\\" in name else name
    parts = [part for part in posix.split("/") if part]
    is_absolute = posix.startswith("/") or posix[1:3] == ":/"
    if is_absolute and not audio_root:
        return name
    if is_absolute:
        places = [os.path.join(base, *parts[start:]) for start in range(len(parts))] or [name]
    else:
        places = [os.path.join(base, inside, *parts) for inside in ("clips", "wavs", "audio", "")]
    return next(filter(exists, places), places[-1])


def read_manifest(
    path: str,
    rejected: Rejections,
    normalise: Callable[[str], str],
    audio_root: str | None = None,
    needs_text: bool = True,
    segments: Segments | None = None,
) -> Corpus:
    """A manifest's rows, texts normalised, audio not looked at yet (`seconds` is NaN); their segments are added to
    `segments`. Raises `UsageError` where the manifest is missing, `DataError` where it is none."""
    if audio_root and not os.path.isdir(audio_root):
        raise UsageError(f"--audio_root {audio_root}: no such folder")
    audio, texts, speakers, languages = Codes(), Strings(), Codes(), Codes()
    offsets, durations, lines = array("d"), array("d"), array("q")
    for number, row in parse(Path(path), rejected):
        given, parts, problem = isinstance(row, dict) and bool(row.get("segments")), [], ""
        if given and segments and (segments.wanted or not any(key in row for key in TEXT_KEYS)):
            try:
                parts = [(*times, normalise(text)) for *times, text in _segments(row["segments"], needs_text)]
            except ValueError as why:
                problem = str(why)
        try:
            if (parts or problem) and not any(key in row for key in TEXT_KEYS):
                if problem:
                    raise ValueError(problem)
                row = {**row, "text": " ".join(text for *_, text in parts if text)}
            name, text, offset, duration, speaker, language = _fields(row, needs_text)
        except ValueError as why:
            rejected.add(str(why), f"{path}:{number}")
            continue
        audio.append(name)
        texts.append(normalise(text))
        speakers.append(speaker)
        languages.append(language)
        offsets.append(offset)
        durations.append(duration)
        lines.append(number)
        if segments:
            segments.append(given, parts, problem)
    if not lines and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    folder = os.path.dirname(path)
    found: list[str] = []
    for part in _by_threads(lambda names: [find_audio(name, folder, audio_root) for name in names], audio.names):
        found += part
    paths = Strings(found[code] for code in audio.codes)
    return Corpus(paths, texts, np.full(len(lines), np.nan), np.array(offsets), np.array(durations), speakers, languages,
                  np.array(lines))  # fmt: skip


def _fields(row, needs_text: bool) -> tuple[str, str, float, float, str, str]:
    """(audio, text, offset, duration, speaker, language) of a row; a duration that is not given is NaN. Raises
    `ValueError` saying what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError("line is not an object")
    audio, text = _first(row, AUDIO_KEYS), _first(row, TEXT_KEYS)
    if not isinstance(audio, str) or "\0" in audio:
        raise ValueError("no audio path")
    if text is None:
        if needs_text and not any(key in row for key in TEXT_KEYS):
            raise ValueError("no text field")
        text = ""
    elif not isinstance(text, str | int):
        raise ValueError("text is no string")
    names = [_first(row, keys) for keys in (SPEAKER_KEYS, LANGUAGE_KEYS)]
    strings = [audio, str(text), *("" if name is None else str(name) for name in names)]
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        raise ValueError("line is not UTF-8") from None
    offset, duration = row.get("offset"), row.get("duration")
    try:
        offset = float(offset) if offset not in (None, "") else 0.0
        duration = float(duration) if duration not in (None, "") else math.nan
    except (TypeError, ValueError, OverflowError):
        offset = math.nan
    if not math.isfinite(offset) or math.isinf(duration):  # a duration of NaN: a table's empty cell, as some write it
        raise ValueError("offset or duration is no number")
    if offset < 0 or duration < 0:
        raise ValueError("offset or duration is negative")
    return strings[0], strings[1], offset, duration, strings[2], strings[3]


def _segments(rows, needs_text: bool) -> list[tuple[float, float, str]]:
    """(start, stop, text) of each of a row's "segments", in seconds from its beginning, to the microsecond: each begins
    where the one before it has ended, or later. Raises `ValueError` saying what is wrong."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("segments are no list of objects")
    found, before = [], 0.0
    for row in rows:
        text = _first(row, TEXT_KEYS)
        if text is None:
            text = ""
            if needs_text and not any(key in row for key in TEXT_KEYS):
                raise ValueError("a segment has no text field")
        if not isinstance(text, str | int):
            raise ValueError("a segment's text is no string")
        try:
            str(text).encode()
        except UnicodeEncodeError:
            raise ValueError("line is not UTF-8") from None
        try:
            start = float(row["start"] if "start" in row else row["offset"])
            stop = float(row["end"]) if "end" in row else start + float(row["duration"])
        except KeyError:
            raise ValueError("a segment has no times (start and end, or offset and duration)") from None
        except (TypeError, ValueError, OverflowError):
            start = stop = math.nan
        if not (math.isfinite(start) and math.isfinite(stop)):
            raise ValueError("a segment's time is no number")
        start, stop = round(start, 6), round(stop, 6)
        if start < 0:
            raise ValueError("a segment's time is negative")
        if stop <= start:
            raise ValueError("a segment ends before it begins")
        if start < before - SEGMENT_OVERLAP or stop <= before:
            raise ValueError("segments overlap, or are not in the order of time")
        found.append((max(start, before), stop, str(text)))
        before = stop
    return found


def _by_threads(look: Callable[[list], list | np.ndarray], items: list) -> Iterator:
    """`look(part)` for part after part of `items`, in order. In parts: a task for every file would cost more than the
    look at it."""
    size = max(1, min(256, len(items) // (4 * THREADS)))
    parts = (items[i : i + size] for i in range(0, len(items), size))
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(look, parts)


# --- what the files say ----------------------------------------------------------------------------------------------


def probe(path: str) -> tuple[float, str]:
    """Length in seconds by the file's header, and why it cannot be used ("" if it can)."""
    try:
        status = os.stat(path)
    except OSError:
        return np.nan, "file is missing"
    except ValueError:
        return np.nan, "no valid path"
    if stat.S_ISDIR(status.st_mode):
        return np.nan, "not a file but a folder"
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        return np.nan, "not a regular file"
    if status.st_size == 0:
        return np.nan, "file is empty"
    try:
        info = soundfile.info(path)
    except (OSError, TypeError, soundfile.LibsndfileError):  # TypeError: .raw, which has no header
        info = None
    if info is None or info.frames >= UNKNOWN_LENGTH:
        return _probe_with_ffmpeg(path)
    reason = "" if info.frames else "audio is empty"
    return info.frames / info.samplerate, "audio is truncated" if missing_seconds(info) > END_TOLERANCE else reason


def missing_seconds(header) -> float:
    """By how much a WAV, AIFF or AU file is shorter than its header says, by libsndfile's log: it reads what is there
    and says nothing. `header`: a `soundfile.SoundFile`, or what `soundfile.info` returns."""
    found = re.search(r"^\s*(?:data|SSND|Data Size)\s*: (\d+) \(should be (\d+)\)", header.extra_info, re.M)
    stated, there = map(int, found.groups()) if found else (0, 0)
    if stated >= UNCLOSED or stated <= there or not there:
        return 0.0
    return header.frames / header.samplerate * (stated / there - 1)


def _probe_with_ffmpeg(path: str) -> tuple[float, str]:
    if not shutil.which("ffprobe"):
        return np.nan, "audio is unreadable (for libsndfile; ffmpeg with ffprobe is not installed)"
    command = ["ffprobe", "-v", "error", "-show_entries", "format=duration", "-of", "csv=p=0", f"file:{path}"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout), ""
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return np.nan, "audio is unreadable (for libsndfile and ffmpeg)"


def probe_all(paths: list[str], cache: Path | None) -> tuple[np.ndarray, list[str]]:
    """`probe` for every path, in parallel. What an earlier run found is kept in `cache` and used for files whose size
    and time are the same."""
    seconds, reasons = np.full(len(paths), np.nan), [""] * len(paths)
    stamps = np.concatenate([np.zeros((0, 3), dtype=np.int64), *_by_threads(_stamps, paths)])
    known, known_seconds = _read_cache(cache)
    is_known = np.zeros(len(paths), dtype=bool)
    if len(known):
        nearest = np.searchsorted(known[:, 0], stamps[:, 0]).clip(max=len(known) - 1)
        is_known = (known[nearest] == stamps).all(axis=1) & (stamps[:, 0] != 0)
        seconds[is_known] = known_seconds[nearest[is_known]]
    todo = np.flatnonzero(~is_known).tolist()
    if len(todo) > MANY_FILES:
        print(f"looking at {len(todo)} audio files (the next run needs not)", flush=True)
    found = _by_threads(lambda rows: [(row, *probe(paths[row])) for row in rows], todo)
    for row, length, reason in (one for part in found for one in part):
        seconds[row], reasons[row] = length, reason
    if cache and todo:
        good = np.flatnonzero(np.array([not reason for reason in reasons]) & (stamps[:, 0] != 0))
        good = good[np.argsort(stamps[good, 0], kind="stable")]
        _write_cache(cache, stamps[good], seconds[good])
    return seconds, reasons


def _stamps(paths: list[str]) -> np.ndarray:
    """(N, 3) hash of the path, size, time in nanoseconds; zeros where there is no such file."""
    stamps = np.zeros((len(paths), 3), dtype=np.int64)
    for row, path in enumerate(paths):
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        name = int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=7).digest(), "big")
        stamps[row] = name, status.st_size, status.st_mtime_ns
    return stamps


def _read_cache(cache: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """(stamps, seconds), sorted by their first column."""
    try:
        with np.load(cache) as content:
            stamps, seconds = content["stamps"], content["seconds"]
        if stamps.shape == (len(seconds), 3):
            return stamps, seconds
    except Exception:  # whatever is wrong with a cache: look again
        pass
    return np.zeros((0, 3), dtype=np.int64), np.zeros(0)


def _write_cache(cache: Path, stamps: np.ndarray, seconds: np.ndarray) -> None:
    temporary = Path(f"{cache}.{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, stamps=stamps, seconds=seconds)
        os.replace(temporary, cache)
    except OSError:  # a cache that cannot be written costs time, nothing else
        with contextlib.suppress(OSError):
            temporary.unlink()


def load_corpus(
    path: str,
    normalise: Callable[[str], str],
    min_duration: float,
    max_duration: float,
    audio_root: str | None = None,
    cache_dir: Path | None = None,
    needs_text: bool = True,
    use_chunking: bool | None = None,
) -> tuple[Corpus, Rejections]:
    """Reads and checks a manifest: what is returned can be read (by its headers), is neither too long nor too short and
    has a text; the rest is in the rejections. `use_chunking`: rows that are too long are cut by their segment times; None
    for a recipe that has no such flag."""
    rejected, segments = Rejections(), Segments(bool(use_chunking))
    corpus = read_manifest(path, rejected, normalise, audio_root, needs_text, segments)
    name = f"headers-{hashlib.sha1(os.path.abspath(path).encode()).hexdigest()[:12]}.npz"
    files = Codes(corpus.paths)
    lengths, reasons = probe_all(files.names, cache_dir / name if cache_dir else None)
    file_of = np.array(files.codes)
    left = lengths[file_of] - corpus.offsets
    corpus.seconds = np.where(np.isnan(corpus.durations), left, np.minimum(left, corpus.durations))
    short = corpus.durations - left
    keep = np.ones(len(corpus), dtype=bool)

    def reject(bad: np.ndarray, reason: str | None) -> None:
        for i in np.flatnonzero(bad & keep).tolist():
            length = "" if np.isnan(corpus.seconds[i]) else f" ({corpus.seconds[i]:.2f} s)"
            rejected.add(reason or reasons[file_of[i]], f"{path}:{corpus.lines[i]}: {corpus.where(i)}{length}")
        keep[bad] = False

    reject(np.array([reason != "" for reason in reasons], dtype=bool)[file_of], None)
    reject((left <= 0) | ((corpus.offsets > 0) & (short > END_TOLERANCE)), "segment ends beyond the file")
    reject(short > FILE_TOLERANCE, "file is shorter than its duration in the manifest (truncated?)")
    too_long, has_segments = f"longer than {max_duration:g} s (--max_duration)", np.array(segments.there, dtype=bool)
    if use_chunking:
        reject((corpus.seconds > max_duration) & ~has_segments, f"{too_long}, without segment times for --use_chunking")
        if (keep & (corpus.seconds > max_duration)).any():
            corpus, row_of = cut_by_segments(corpus, keep, segments, max_duration, rejected, path)
            file_of, keep = file_of[row_of], np.ones(len(corpus), dtype=bool)
    elif use_chunking is not None:
        hint = f"{too_long}; its segment times would be used by --use_chunking"
        reject((corpus.seconds > max_duration) & has_segments, hint)
    reject(corpus.seconds > max_duration, too_long)
    reject(corpus.seconds < min_duration, f"shorter than {min_duration:g} s (--min_duration)")
    reject(corpus.texts.empty() & needs_text, "text is empty")
    if not keep.all():
        corpus, file_of = corpus.select(np.flatnonzero(keep)), file_of[keep]
    rejected.repeated = count_repeated(file_of, corpus)
    return corpus, rejected


def cut_by_segments(
    corpus: Corpus, keep: np.ndarray, segments: Segments, max_duration: float, rejected: Rejections, path: str
) -> tuple[Corpus, np.ndarray]:
    """The rows to `keep`, those longer than `max_duration` cut into pieces of whole segments, and the row that each came
    from. A piece joins as many consecutive segments as fit, the gaps between them included. Segments that are too long
    alone, and rows whose segments are not within them, are added to `rejected`."""
    sources, offsets, durations, texts = array("q"), array("d"), array("d"), Strings()
    is_long = keep & (corpus.seconds > max_duration)
    for row in np.flatnonzero(is_long).tolist():
        where = f"{path}:{corpus.lines[row]}: {corpus.where(row)}"
        found, length = segments.row(row), float(corpus.seconds[row])
        problem = segments.problems[row]
        if not problem and found[-1][1] > length + END_TOLERANCE:
            problem = "segment times reach beyond the audio"
            where += f" ({found[-1][1]:.2f} of {length:.2f} s)"
        if problem:
            rejected.add(problem, where)
            continue
        for start, stop, text in join_segments(found, max_duration):
            stop = min(stop, length)
            if stop - start > max_duration + MICROSECOND:
                reason = f"a segment is longer than {max_duration:g} s (--max_duration)"
                rejected.add(reason, f"{where}, segment from {start:.2f} to {stop:.2f} s")
                continue
            sources.append(row)
            offsets.append(corpus.offsets[row] + start)
            durations.append(min(max(0.0, round(stop - start, 6)), max_duration))
            texts.append(text)
    whole = np.flatnonzero(keep & ~is_long)
    row_of = np.concatenate([whole, np.array(sources, dtype=np.int64)])
    order = np.argsort(row_of, kind="stable")
    row_of = row_of[order]
    all_texts = corpus.texts.select(whole)
    for text in texts:
        all_texts.append(text)
    seconds, starts, lengths = (
        np.concatenate([column[whole], pieces])[order]
        for column, pieces in ((corpus.seconds, durations), (corpus.offsets, offsets), (corpus.durations, durations))
    )
    return Corpus(corpus.paths.select(row_of), all_texts.select(order), seconds, starts, lengths,
                  corpus.speakers.select(row_of), corpus.languages.select(row_of), corpus.lines[row_of]), row_of  # fmt: skip


def join_segments(found: list[tuple[float, float, str]], most: float) -> list[tuple[float, float, str]]:
    """Consecutive (start, stop, text), ordered and without overlap, joined from the first on into pieces of at most
    `most` seconds, as few as can be; a longer one stays alone, and nothing is joined across it."""
    pieces: list[tuple[float, float, list[str]]] = []
    for start, stop, text in found:
        if pieces and stop - pieces[-1][0] <= most + MICROSECOND:
            begin, _, texts = pieces.pop()
            texts.append(text)
            pieces.append((begin, stop, texts))
        else:
            pieces.append((start, stop, [text]))
    return [(start, stop, " ".join(text for text in texts if text)) for start, stop, texts in pieces]


def count_repeated(file_of: np.ndarray, corpus: Corpus) -> int:
    """Utterances whose file and times an earlier one has too."""
    keys = (file_of, corpus.offsets, np.nan_to_num(corpus.durations, nan=-1))
    order = np.lexsort(keys)
    return int(np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in keys]).sum())


def report_rejections(name: str, corpus: Corpus, rejected: Rejections, strict: bool) -> None:
    """Prints how much is used and what is not. Raises `DataError` where nothing is left, or with `--strict_data` where
    anything was rejected."""
    hours = float(corpus.seconds.sum()) / 3600
    amount = f"{hours:.2f} h" if hours >= 0.1 else f"{60 * hours:.1f} min"
    print(
        f"{name}: {len(corpus)} utterances, {amount}"
        + (f"; {rejected.repeated} repeat the audio of another (all are used)" if rejected.repeated else "")
        + (f"; {rejected.total} rejected:\n{rejected.table()}" if rejected.total else "")
    )
    if not len(corpus):
        raise DataError(
            f"{name}: no usable utterance: {'; '.join(f'{n} x {r}' for r, n in rejected.counts.items()) or 'the manifest is empty'}"
        )
    if strict and rejected.total:
        raise DataError(f"{name}: {rejected.total} utterances rejected (--strict_data)")


def hold_out(corpus: Corpus, share: float, most: int, seed: int) -> tuple[Corpus, Corpus]:
    """Splits off a random part for evaluation: `share` of the utterances, at least one and at most `most`. Raises
    `DataError` where nothing would be left to train on."""
    count = min(most, max(1, round(share * len(corpus))))
    if count >= len(corpus):
        raise DataError("one utterance is too few to hold one out for evaluation: give --val_manifest")
    order = np.random.default_rng(seed).permutation(len(corpus))
    print(f"no --val_manifest: {count} of the {len(corpus)} training utterances are held out")
    return corpus.select(np.sort(order[count:])), corpus.select(np.sort(order[:count]))


def load_splits(
    args, paths: dict[str, str | None], normalise: Callable[[str], str], held_out: float, most_held_out: int
) -> dict[str, Corpus]:
    """The corpora of the splits that have a path, checked and reported as the shared flags ask; `--max_samples` cuts
    "train", and without a "val" a part of "train" is held out."""
    corpora = {}
    for split, path in paths.items():
        if not path:
            continue
        corpus, rejected = load_corpus(
            path, normalise, args.min_duration, args.max_duration, args.audio_root, args.log_dir / "cache",
            use_chunking=getattr(args, "use_chunking", None),
        )  # fmt: skip
        if split == "train" and args.max_samples:
            corpus = corpus.select(np.arange(min(args.max_samples, len(corpus))))
        report_rejections(f"{split} set ({path})", corpus, rejected, args.strict_data)
        corpora[split] = corpus
    if "val" not in corpora and "train" in corpora:
        corpora["train"], corpora["val"] = hold_out(corpora["train"], held_out, most_held_out, args.seed)
    return corpora
