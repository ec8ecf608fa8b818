"""Reading manifests into columns, and checking once, before training, what could fail in the middle of it."""

import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

from common.errors import DataError, UsageError

AUDIO_KEYS = ("audio_filepath", "audio_file", "file_name", "path", "audio", "wav", "filename")
TEXT_KEYS = ("text", "transcription", "sentence", "transcript", "normalized_text")
SPEAKER_KEYS = ("speaker", "speaker_name", "client_id", "speaker_id")
LANGUAGE_KEYS = ("lang", "language", "locale")
EXAMPLES = 3  # of each reason in the rejection table
END_TOLERANCE = 0.1  # seconds by which a manifest's rounded times may miss the file's


class Strings:
    """A column of strings in one buffer: some 60 bytes a row less than Python objects, and nothing for worker
    processes to copy when they only count references."""

    def __init__(self, values: Iterable[str]):
        encoded = [value.encode("utf-8", "surrogateescape") for value in values]
        self.ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self.buffer = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        return self.buffer[self.ends[index] : self.ends[index + 1]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class Codes:
    """A column of few distinct strings."""

    def __init__(self, values: Iterable[str]):
        self.names: list[str] = []
        seen: dict[str, int] = {}
        self.codes = np.array([seen.setdefault(v, len(seen)) for v in values], dtype=np.int32)
        self.names = list(seen)

    def __getitem__(self, index: int) -> str:
        return self.names[self.codes[index]]

    def __iter__(self) -> Iterator[str]:
        return (self.names[code] for code in self.codes)


@dataclass
class Rejections:
    """What was left out: a count and a few examples for every reason."""

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
        indices = np.asarray(indices)
        take = lambda column: type(column)(column[i] for i in indices.tolist())  # noqa: E731
        return Corpus(take(self.paths), take(self.texts), self.seconds[indices], self.offsets[indices], self.durations[indices],
                      take(self.speakers), take(self.languages), self.lines[indices])  # fmt: skip

    def fingerprint(self) -> str:
        """Changes when the utterances, their texts or their order do."""
        digest = hashlib.sha1(self.seconds.tobytes() + self.offsets.tobytes())
        for column in (self.paths, self.texts):
            digest.update(column.buffer.tobytes())
        return digest.hexdigest()[:16]


def make_corpus(rows: Iterable[tuple]) -> Corpus:
    """A corpus from (path, text, seconds, offset, duration, speaker, language, line) tuples."""
    columns = list(zip(*rows, strict=True)) or [()] * 8
    paths, texts, seconds, offsets, durations, speakers, languages, lines = columns
    numbers = [np.array(column, dtype=np.float64) for column in (seconds, offsets, durations)]
    return Corpus(
        Strings(paths), Strings(texts), *numbers, Codes(speakers), Codes(languages), np.array(lines, dtype=np.int64)
    )


# --- the families of manifests ---------------------------------------------------------------------------------------


def parse(path: Path, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    """(line number, row) of a manifest, its family told by extension and header: JSON Lines or a JSON list, CSV/TSV
    with a header, LJSpeech. Lines that cannot be read are added to `rejected`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}") from None
    if data[:2] == b"PK" or b"\0" in data[:4096]:
        raise DataError(f"manifest {path} is not a text file (JSON Lines, CSV/TSV or LJSpeech metadata.csv)")
    text = data.decode("utf-8-sig", "surrogateescape")
    first = next((line for line in text.splitlines() if line.strip()), "").lstrip()
    if first.startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise DataError(f"manifest {path} is not valid JSON: {error}") from None
        yield from ((number, row) for number, row in enumerate(rows, 1))
    elif first.startswith("{") or path.suffix in (".json", ".jsonl"):
        yield from _parse_json_lines(path, text, rejected)
    else:
        yield from _parse_table(path, text, first, rejected)


def _parse_json_lines(path: Path, text: str, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            rejected.add("line is not valid JSON", f"{path}:{number}: {error}")
            continue
        yield number, row


def _parse_table(path: Path, text: str, first: str, rejected: Rejections) -> Iterator[tuple[int, dict]]:
    delimiter = max("|\t,", key=first.count) if any(d in first for d in "|\t,") else "|"
    quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    csv.field_size_limit(1 << 24)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    header = [cell.strip().lower() for cell in next(csv.reader([first], delimiter=delimiter, quoting=quoting))]
    has_header = any(key in header for key in AUDIO_KEYS)
    if not has_header and delimiter != "|":
        raise DataError(
            f"manifest {path}: its first line names no audio column (one of {', '.join(AUDIO_KEYS)}); it has: {first[:100]}"
        )
    seen_header = False
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        if has_header and not seen_header:
            seen_header = True
            continue
        if has_header:
            yield reader.line_num, dict(zip(header, cells, strict=False))
        elif len(cells) >= 2:  # LJSpeech: name | text | normalised text
            name = cells[0] if Path(cells[0]).suffix else cells[0] + ".wav"
            yield (
                reader.line_num,
                {"audio_file": name, "text": cells[2] if len(cells) > 2 and cells[2].strip() else cells[1]},
            )
        else:
            rejected.add("line has too few columns", f"{path}:{reader.line_num}")


def _first(row: dict, keys: tuple[str, ...]):
    return next((row[key] for key in keys if row.get(key) not in (None, "")), None)


def find_audio(name: str, manifest: Path, audio_root: str | None) -> str:
    """Where a manifest's audio path leads: absolute, or relative to `audio_root` or the manifest's folder (or, as Common
    Voice and LJSpeech have it, to `clips/` or `wavs/` there). With `audio_root`, an absolute path that does not exist is
    looked up by its last components: manifests travel between machines."""
    base = Path(audio_root) if audio_root else manifest.parent
    path = Path(name)
    if path.is_absolute():
        if not audio_root or path.exists():
            return name
        for start in range(1, len(path.parts)):
            candidate = base.joinpath(*path.parts[start:])
            if candidate.exists():
                return str(candidate)
        return str(base / path.name)
    for folder in (base, base / "clips", base / "wavs", base / "audio"):
        if (folder / path).exists():
            return str(folder / path)
    return str(base / path)


def read_manifest(
    path: str, rejected: Rejections, normalise: Callable[[str], str], audio_root: str | None = None
) -> Corpus:
    """A manifest's rows, texts normalised, audio not looked at yet (`seconds` is NaN). Raises `UsageError` where the
    manifest is missing, `DataError` where it is none."""
    manifest, rows = Path(path), []
    number = 0
    for number, row in parse(manifest, rejected):
        where = f"{path}:{number}"
        if not isinstance(row, dict):
            rejected.add("line is not an object", where)
            continue
        audio, text = _first(row, AUDIO_KEYS), _first(row, TEXT_KEYS)
        if not isinstance(audio, str) or "\0" in audio:
            rejected.add("no audio path", where)
            continue
        if text is None and not any(key in row for key in TEXT_KEYS):
            rejected.add("no text field", where)
            continue
        text = str(text or "")
        if not _is_utf8(text) or not _is_utf8(audio):
            rejected.add("line is not UTF-8", where)
            continue
        try:
            offset = float(row.get("offset") or 0.0)
            duration = float(row.get("duration") or np.nan)
        except (TypeError, ValueError):
            rejected.add("offset or duration is no number", where)
            continue
        if offset < 0 or duration < 0 or offset == np.inf:
            rejected.add("offset or duration is negative", where)
            continue
        rows.append((find_audio(audio, manifest, audio_root), normalise(text), np.nan, offset, duration,
                     str(_first(row, SPEAKER_KEYS) or ""), str(_first(row, LANGUAGE_KEYS) or ""), number))  # fmt: skip
    if not rows and not rejected.total:
        raise DataError(f"manifest {path} is empty")
    return make_corpus(rows)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


# --- what the files say ----------------------------------------------------------------------------------------------


def probe(path: str) -> tuple[float, str]:
    """Length in seconds by the file's header, and why it cannot be used ("" if it can)."""
    try:
        status = os.stat(path)
    except OSError:
        return np.nan, "file is missing"
    except ValueError:
        return np.nan, "no valid path"
    if os.path.isdir(path):
        return np.nan, "not a file but a folder"
    if status.st_size == 0:
        return np.nan, "file is empty"
    try:
        info = soundfile.info(path)
        return info.frames / info.samplerate, "" if info.frames else "audio is empty"
    except (OSError, soundfile.LibsndfileError):
        return _probe_with_ffmpeg(path)


def _probe_with_ffmpeg(path: str) -> tuple[float, str]:
    if not shutil.which("ffprobe"):
        return np.nan, "audio is unreadable (for libsndfile; ffmpeg is not installed)"
    command = ["ffprobe", "-v", "error", "-show_entries", "format=duration", "-of", "csv=p=0", path]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout), ""
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return np.nan, "audio is unreadable (for libsndfile and ffmpeg)"


def probe_all(paths: Strings, cache: Path | None) -> tuple[np.ndarray, list[str]]:
    """`probe` for every path, in parallel, each distinct file once. What an earlier run found is kept in `cache` and
    used for files whose size and time are the same."""
    names = list(paths)
    distinct = list(dict.fromkeys(names))
    stamps = np.zeros((len(distinct), 3), dtype=np.int64)  # hash of the path, size, time in nanoseconds
    for row, name in enumerate(distinct):
        try:
            status = os.stat(name)
            stamps[row] = (
                int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=7).digest(), "big"),
                status.st_size,
                status.st_mtime_ns,
            )
        except (OSError, ValueError):
            continue
    seconds = np.full(len(distinct), np.nan)
    reasons = [""] * len(distinct)
    known = _read_cache(cache)
    todo = []
    for row, stamp in enumerate(map(tuple, stamps.tolist())):
        if stamp in known and stamp[0]:
            seconds[row] = known[stamp]
        else:
            todo.append(row)
    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        for row, (length, reason) in zip(
            todo, pool.map(probe, (distinct[row] for row in todo), chunksize=64), strict=True
        ):
            seconds[row], reasons[row] = length, reason
    good = np.array([not reason for reason in reasons]) & (stamps[:, 0] != 0)
    if cache and todo:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{cache}.{os.getpid()}", "wb") as file:
                np.savez(file, stamps=stamps[good], seconds=seconds[good])
            os.replace(f"{cache}.{os.getpid()}", cache)
        except OSError:
            pass  # a cache that cannot be written costs time, nothing else
    row_of = {name: row for row, name in enumerate(distinct)}
    rows = [row_of[name] for name in names]
    return seconds[rows], [reasons[row] for row in rows]


def _read_cache(cache: Path | None) -> dict[tuple, float]:
    try:
        with np.load(cache) as content:
            return dict(zip(map(tuple, content["stamps"].tolist()), content["seconds"].tolist(), strict=True))
    except Exception:  # whatever is wrong with a cache: look again
        return {}


def load_corpus(
    path: str,
    normalise: Callable[[str], str],
    min_duration: float,
    max_duration: float,
    audio_root: str | None = None,
    cache_dir: Path | None = None,
    needs_text: bool = True,
) -> tuple[Corpus, Rejections]:
    """Reads and checks a manifest: what is returned can be read (by its headers), is neither too long nor too short and
    has a text; the rest is in the rejections."""
    rejected = Rejections()
    corpus = read_manifest(path, rejected, normalise, audio_root)
    cache = (
        cache_dir / f"headers-{hashlib.sha1(os.path.abspath(path).encode()).hexdigest()[:12]}.npz"
        if cache_dir
        else None
    )
    lengths, reasons = probe_all(corpus.paths, cache)
    left = lengths - corpus.offsets
    ends = np.where(np.isnan(corpus.durations), left, corpus.durations)
    corpus.seconds = np.minimum(left, ends)
    segment_beyond = (corpus.offsets > 0) & (ends > left + END_TOLERANCE)
    keep = np.ones(len(corpus), dtype=bool)
    for i in range(len(corpus)):
        seconds, reason = corpus.seconds[i], reasons[i]
        if not reason:
            if segment_beyond[i] or left[i] <= 0:
                reason = "segment ends beyond the file"
            elif seconds > max_duration:
                reason = f"longer than {max_duration:g} s (--max_duration)"
            elif seconds < min_duration:
                reason = f"shorter than {min_duration:g} s (--min_duration)"
            elif needs_text and not corpus.texts[i]:
                reason = "text is empty"
        if reason:
            keep[i] = False
            length = "" if np.isnan(seconds) else f" ({seconds:.2f} s)"
            rejected.add(reason, f"{path}:{corpus.lines[i]}: {corpus.where(i)}{length}")
    return corpus.select(np.flatnonzero(keep)) if not keep.all() else corpus, rejected


def report_rejections(name: str, corpus: Corpus, rejected: Rejections, strict: bool) -> None:
    """Prints how much is used and what is not. Raises `DataError` where nothing is left, or with `--strict_data` where
    anything was rejected."""
    hours = float(corpus.seconds.sum()) / 3600
    amount = f"{hours:.2f} h" if hours >= 0.1 else f"{60 * hours:.1f} min"
    print(
        f"{name}: {len(corpus)} utterances, {amount}"
        + (f"; {rejected.total} rejected:\n{rejected.table()}" if rejected.total else "")
    )
    if not len(corpus):
        raise DataError(
            f"{name}: no usable utterance: {'; '.join(f'{n} x {r}' for r, n in rejected.counts.items()) or 'the manifest is empty'}"
        )
    if strict and rejected.total:
        raise DataError(f"{name}: {rejected.total} utterances rejected (--strict_data)")
