"""Hugging Face's Parquet: a row is a recording, with its bytes in one column and its text in
another.

The audio of a row has a name like that of a file, `shards/train-0.parquet row 17` (rows count from
0), which a corpus keeps as its path. Bytes are read when they are needed, with the row group that
they are in: pyarrow reads nothing smaller."""

import bisect
import contextlib
import functools
import glob
import io
import itertools
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from common.errors import DataError, Failure, UsageError, first_line, require
from common.files import require_file
from speech.columns import printable

SUFFIX = ".parquet"
ROW = " row "  # between the file and the number in the name of a row
BINARY_NAMES = ("wav", "bytes")  # and all with "audio": of columns that are bytes alone
OPEN_FILES = 32  # that a thread keeps open
BATCH = 256  # rows whose texts are read at once
GROUP_BYTES = 4 << 30  # of audio in a row group: a reader keeps all of it in memory
INFLATED = 100  # bytes in a row group for each of the file, unless they are few
SLOW_BYTES = 64 << 20  # a row group of more audio gets a note
GOOD_ROWS = 16  # in a row group


def is_parquet(manifest: str | os.PathLike) -> bool:
    """Whether a manifest is Parquet by its name, or a pattern, which stands for Parquet files."""
    name = os.fspath(manifest)
    return name.lower().endswith(SUFFIX) or (glob.has_magic(name) and not os.path.exists(name))


def row_of(path: str) -> tuple[str, int] | None:
    """(file, row) of the name of a row; None for other paths."""
    file, between, row = path.rpartition(ROW)
    if between and row.isdecimal() and row.isascii() and file.lower().endswith(SUFFIX):
        return file, int(row)
    return None


def name_of(file: str, row: int) -> str:
    return f"{file}{ROW}{row}"


def file_of(path: str) -> str:
    """The file on disk that has the audio `path`: itself, or the Parquet file of a row."""
    row = row_of(path)
    return row[0] if row else path


def shards(manifest: str | os.PathLike) -> list[str]:
    """The files that a manifest stands for, as absolute paths in the order of their names: a file,
    or those that match a pattern. Raises `UsageError` if there are none."""
    name = os.fspath(manifest)
    if os.path.exists(name) or not glob.has_magic(name):
        return [os.path.abspath(require_file(name, "manifest"))]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise UsageError(f"manifest {name}: no file has such a name")
    return [os.path.abspath(require_file(path, "manifest")) for path in found]


@dataclass(frozen=True)
class Shard:
    """An open file. `firsts`: the first row of each row group, and at the end the number of rows.
    `content` and `path`: pyarrow's names of the columns of the audio's bytes and of its path, "" if
    there is none. `names`: all columns, by their names in lower case. `leaf`: the number of
    `content` among the columns of a row group. `most`: bytes that a row group may have."""

    file: object
    firsts: list[int]
    content: str
    path: str
    names: dict[str, str]
    leaf: int
    most: int

    def group_of(self, row: int) -> int:
        return bisect.bisect_right(self.firsts, row) - 1

    def group_bytes(self, group: int) -> int:
        """What a row group takes in memory, which is audio for the most part."""
        return self.file.metadata.row_group(group).total_byte_size


class _Opened(threading.local):
    """What a thread has open: the files that it used last, by name, size and time, and the audio of
    the row group that it read last. (A forked process has a copy. Files are read by `pread`, so
    both can use them.)"""

    def __init__(self):
        self.shards: OrderedDict[tuple, Shard] = OrderedDict()
        self.group: tuple = ()
        self.audio = None


_opened = _Opened()


def open_shard(path: str) -> Shard:
    """An open Parquet file. Raises `DataError` that names it if it cannot be read, and `RunError`
    without pyarrow."""
    return _open(path)[1]


def _open(path: str) -> tuple[tuple, Shard]:
    """(name, size and time; the open file)."""
    parquet = require("pyarrow.parquet", "reading Parquet")
    try:
        status = os.stat(path)
        key = path, status.st_size, status.st_mtime_ns
        if key not in _opened.shards:
            # Not mapped into memory: a file that becomes shorter would end the process.
            _opened.shards[key] = _described(path, parquet.ParquetFile(path), status.st_size)
    except _failures() as error:
        raise DataError(f"{path} is not Parquet that can be read: {_reason(error)}") from None
    _opened.shards.move_to_end(key)
    if len(_opened.shards) > OPEN_FILES:
        _, oldest = _opened.shards.popitem(last=False)
        oldest.file.close()
    return key, _opened.shards[key]


def _failures() -> tuple[type, ...]:
    """What pyarrow raises for a file that it cannot read."""
    arrow = require("pyarrow", "reading Parquet")
    return OSError, ValueError, LookupError, MemoryError, OverflowError, arrow.ArrowException


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or first_line(error)).rstrip(".")


def _described(path: str, file, size: int) -> Shard:
    schema = file.schema_arrow
    names = [name.strip().lower() for name in schema.names]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: it has two columns called {name}")
    groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    sizes = [group.num_rows for group in groups]
    most = max(SLOW_BYTES, INFLATED * size)
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > most:
        raise DataError(f"{path}: a row group has {largest >> 20} MiB, far more than its file")
    found = {name: _parts(name, column) for name, column in zip(names, schema, strict=True)}
    found = {name: parts for name, parts in found.items() if parts}
    if len(found) > 1 and "audio" not in found:
        raise DataError(f"{path}: which of its columns {', '.join(found)} is audio? Name it audio")
    content, inside = found.get("audio") or next(iter(found.values()), ("", ""))
    firsts = [0, *itertools.accumulate(sizes)]
    leaves = [file.schema.column(number).path for number in range(len(file.schema))]
    leaf = leaves.index(content) if content else -1
    columns = dict(zip(names, schema.names, strict=True))
    return Shard(file, firsts, content, inside, columns, leaf, most)


def _parts(name: str, column) -> tuple[str, str] | None:
    """The columns of bytes and of paths in a column of audio; None for other columns. A binary one
    without such a name may have text."""
    types = require("pyarrow", "reading Parquet").types
    if _is_binary(column.type):
        return (column.name, "") if "audio" in name or name in BINARY_NAMES else None
    if not types.is_struct(column.type):
        return None
    kinds = {part.name: part.type for part in column.type}
    if "bytes" not in kinds or not (_is_binary(kinds["bytes"]) or types.is_null(kinds["bytes"])):
        return None
    has_path = "path" in kinds and _is_string(kinds["path"])
    return f"{column.name}.bytes", f"{column.name}.path" if has_path else ""


def _is_binary(kind) -> bool:
    types = require("pyarrow", "reading Parquet").types
    is_long = types.is_large_binary(kind) or types.is_binary_view(kind)
    return is_long or types.is_binary(kind) or types.is_fixed_size_binary(kind)


def _is_string(kind) -> bool:
    types = require("pyarrow", "reading Parquet").types
    if types.is_dictionary(kind):
        return _is_string(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def rows(
    manifest: str | os.PathLike, audio_keys: Sequence[str], keys: Sequence[str]
) -> Iterator[tuple[int, dict]]:
    """(number, row) of all files that a manifest stands for, from 1 on. A row has those of its
    columns `keys`, and under "audio" the name of the row or, if it has no bytes, its path. Without
    a column of audio, the columns `audio_keys` may have paths. Raises `UsageError` if there is no
    file, and `DataError` for files that cannot be read or have no audio."""
    number = 0
    files = shards(manifest)
    for path, nulls in zip(files, _null_counts(files), strict=True):
        try:
            for row in _rows(path, nulls, audio_keys, keys):
                number += 1
                yield number, row
        except _failures() as error:
            raise DataError(f"{path} is damaged: {_reason(error)}") from None


def _null_counts(files: list[str]) -> list[list[int]]:
    """How many rows of each row group have no bytes, by the statistics of each of the files; -1 if
    they do not say it. Raises `DataError` for a file that cannot be read."""
    for path in files:
        open_shard(path)  # raises
    counts: list[list[int]] = []
    # In a process, because some damage in statistics makes pyarrow abort, instead of raising.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, _be_quiet) as pool:
        try:
            for count in pool.map(_nulls_of, files):
                counts.append(count)
        except BrokenProcessPool:
            raise DataError(f"{files[len(counts)]} is damaged: pyarrow cannot read it") from None
    return counts


def _be_quiet() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the main process acts on them
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _nulls_of(path: str) -> list[int]:
    shard = open_shard(path)
    counts = []
    for group in range(len(shard.firsts) - 1 if shard.content else 0):
        statistics = shard.file.metadata.row_group(group).column(shard.leaf).statistics
        known = statistics is not None and statistics.has_null_count
        counts.append(statistics.null_count if known else -1)
    return counts


def _rows(
    path: str, nulls: list[int], audio_keys: Sequence[str], keys: Sequence[str]
) -> Iterator[dict]:
    shard = open_shard(path)
    schema = shard.file.schema_arrow
    in_words = {
        name for name, column in shard.names.items() if _is_string(schema.field(column).type)
    }
    audio_keys = [] if shard.content else [key for key in audio_keys if key in in_words]
    names = {key: shard.names[key] for key in [*audio_keys, *keys] if key in shard.names}
    if not shard.content and not audio_keys:
        columns = [f"{column.name}: {column.type}" for column in schema]
        raise DataError(
            f"{path} has no column of audio, as audio: struct<bytes: binary, path: string> or"
            f" audio: binary; it has {printable(', '.join(columns))[:300] or 'no columns'}"
        )
    lacking = _lacking(shard, nulls)
    columns = [*names.values(), *([shard.path] if shard.path and lacking is not None else [])]
    row = 0
    for batch in shard.file.iter_batches(BATCH, columns=columns, use_threads=False):
        if batch.nbytes > shard.most:
            raise DataError(f"{path}: {BATCH} rows have {batch.nbytes >> 20} MiB of text")
        values = {name: _values(batch.column(column)) for name, column in names.items()}
        paths = _paths(batch, shard) if len(columns) > len(names) else [None] * len(batch)
        for place, inside in enumerate(paths):
            content = {name: column[place] for name, column in values.items()}
            if shard.content:
                is_inside = lacking is None or not lacking[row]
                content["audio"] = name_of(path, row) if is_inside else _beside(path, inside)
            else:
                content.update((key, _beside(path, content[key])) for key in audio_keys)
            yield content
            row += 1


def _lacking(shard: Shard, nulls: list[int]) -> np.ndarray | None:
    """(N,) whether a row has no bytes; None if all have. `nulls` of each row group; where they are
    not known, or only some, the bytes are read."""
    lacking = np.zeros(shard.firsts[-1], dtype=bool)
    for group, count in enumerate(nulls):
        part = slice(shard.firsts[group], shard.firsts[group + 1])
        if count == part.stop - part.start:
            lacking[part] = True
        elif count:
            contents = _contents(_read_group(shard, group))
            lacking[part] = [content is None for content in contents]
    return lacking if lacking.any() else None


def _values(column) -> list:
    """The values of a column. Strings that are not UTF-8 have lone surrogates."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(require("pyarrow", "reading Parquet").binary()).to_pylist()
        return [value and value.decode("utf-8", "surrogateescape") for value in values]


def _paths(batch, shard: Shard) -> list:
    name, _, inside = shard.path.rpartition(".")
    return _values(batch.column(name).field(inside))


def _beside(shard: str, path):
    """A path in a file, which may be relative to the file's folder."""
    if not isinstance(path, str) or "\0" in path:
        return path
    beside = os.path.join(os.path.dirname(shard), path)
    return beside if os.path.exists(beside) else path


def place(manifest: str | os.PathLike, number: int) -> str:
    """Where the row `number` of `rows` is, for messages."""
    lasts, files = _counted(os.fspath(manifest))
    nearest = bisect.bisect_left(lasts, number)
    return name_of(files[nearest], number - 1 - (lasts[nearest - 1] if nearest else 0))


@functools.lru_cache(maxsize=4)
def _counted(manifest: str) -> tuple[list[int], list[str]]:
    """The number of the last row of each file, and the files."""
    files = shards(manifest)
    counts = [open_shard(path).firsts[-1] for path in files]
    return list(itertools.accumulate(counts)), files


def advice(manifest: str | os.PathLike) -> str:
    """A note on row groups that make reading slow, or ""."""
    for path in shards(manifest):
        shard = open_shard(path)
        size = shard.group_bytes(0) if shard.content and shard.firsts[-1] else 0
        if size > SLOW_BYTES:
            return (
                f"{path}: its row groups have {shard.firsts[1]} rows, and a row is read with all of"
                f" its group, {size >> 20} MiB; groups of {GOOD_ROWS} rows, or --cache_audio, make"
                " training faster"
            )
    return ""


def read(name: str) -> bytes:
    """The audio of a row, by its name. Raises `ValueError` that says why it cannot be read."""
    path, row = row_of(name)
    try:
        key, shard = _open(path)
    except DataError as error:
        raise ValueError(str(error)) from None
    if not shard.content or row >= shard.firsts[-1]:
        raise ValueError("the file has no such row with audio")
    group = shard.group_of(row)
    try:
        if _opened.group != (key, group):
            _opened.group, _opened.audio = (), None  # before the next one is in memory
            _opened.audio = _read_group(shard, group)
            _opened.group = key, group
        (content,) = _contents(_opened.audio.slice(row - shard.firsts[group], 1))
    except _failures() as error:
        raise ValueError(f"row group cannot be read: {_reason(error)}") from None
    if not content:
        raise ValueError("audio is empty")
    return content


def _read_group(shard: Shard, group: int):
    """The column of audio of a row group. What repeats itself takes next to nothing in a file, and
    what the file says of its size need not be true: it is read in parts until it is too much."""
    size = shard.group_bytes(group)
    if size > GROUP_BYTES:
        raise ValueError(f"it has {size >> 30} GiB, more than {GROUP_BYTES >> 30}")
    size = 0
    parts = []
    for batch in shard.file.iter_batches(GOOD_ROWS, [group], [shard.content], use_threads=False):
        parts.append(batch.column(0))
        size += batch.nbytes
        if size > shard.most:
            raise ValueError(f"it has more than {size >> 20} MiB, far more than its file")
    return require("pyarrow", "reading Parquet").chunked_array(parts)


def _contents(column) -> list[bytes | None]:
    values = column.to_pylist()
    return [value["bytes"] if isinstance(value, dict) else value for value in values]


def source(path: str) -> bytes | io.BytesIO:
    """What `soundfile` opens for an audio path: a file's name or a row's bytes. Raises `ValueError`
    that says why a row cannot be read."""
    if row_of(path):
        return io.BytesIO(read(path))
    return os.fsencode(path)  # soundfile cannot encode names that are not UTF-8


@contextlib.contextmanager
def as_file(path: str) -> Iterator[str]:
    """A file with the audio, for programs that read nothing else. Raises `ValueError` that says why
    a row cannot be read, and `OSError`."""
    if not row_of(path):
        yield path
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(read(path))
        file.flush()
        yield file.name


def by_group(paths: list[str], places: list[int]) -> Iterator[list[int]]:
    """The `places` in `paths`, in parts that are read together: neighbours of a row group."""

    def group(place: int) -> tuple:
        file, row = row_of(paths[place])
        try:
            return file, open_shard(file).group_of(row)
        except Failure:  # `probe` says why
            return file, 0

    return (list(part) for _, part in itertools.groupby(places, key=group))
