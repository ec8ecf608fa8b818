"""Hugging Face's Parquet, imported once: audio files and a manifest.

    python -m speech.data.parquet "data/train-*.parquet" FOLDER

The bytes of row 17 of the first file become FOLDER/00000/000017.wav (or another suffix, by their
format), and FOLDER/manifest.jsonl has its other columns, except lists and bytes. Rows count from
0. FOLDER is written aside and renamed. A command that is run again begins anew."""

import argparse
import glob
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from common.errors import DataError, UsageError, exit_with_one_line, first_line, require, writing
from common.files import require_file
from speech.data.columns import Rejections, printable
from speech.data.fields import END_KEYS, START_KEYS, UNITS
from speech.data.folders import write_folder
from speech.data.headers import audio_suffix

MANIFEST = "manifest.jsonl"
SOURCE = "source_"  # before the names of columns that say where a clip was in a recording
NESTED = ("segments", "label")  # columns that may hold lists; others of lists are left out
BINARY_NAMES = ("wav", "bytes")  # and all with "audio": of columns that are bytes alone
# What repeats itself takes next to nothing in a file. A file may have so many bytes of rows for
# each of its own, or few.
INFLATED = 100
FEW_BYTES = 64 << 20
NOT_AUDIO = "row is not audio that can be read here"
NO_BYTES = "row has no bytes of audio"


def shards(patterns: list[str]) -> list[str]:
    """The files that names and patterns stand for. Raises `UsageError` if there are none."""
    files = []
    for pattern in patterns:
        is_name = os.path.exists(pattern) or not glob.has_magic(pattern)
        matches = [pattern] if is_name else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UsageError(f"{pattern}: no file has such a name")
        files += [str(require_file(path)) for path in matches]
    return files


def rows(path: str) -> Iterator[tuple[bytes | None, dict]]:
    """(audio, other columns by their names in lower case) of each row of a file. Raises `DataError`
    that names the file if it is damaged, has no audio, or has far more content than its size."""
    arrow = require("pyarrow", "reading Parquet")
    parquet = require("pyarrow.parquet", "reading Parquet")
    most = max(FEW_BYTES, INFLATED * os.path.getsize(path))
    total = 0
    try:
        with parquet.ParquetFile(path) as file:
            audio, others = columns(path, file.schema_arrow)
            for number in range(file.num_row_groups):
                if file.metadata.row_group(number).total_byte_size > most:
                    raise DataError(f"{path}: a row group is far larger than its file")
                for batch in file.iter_batches(1, [number], [audio, *others.values()]):
                    total += batch.nbytes
                    if total > most:
                        raise DataError(f"{path}: its rows have far more bytes than the file")
                    (row,) = batch.to_pylist()
                    content = row[audio.removesuffix(".bytes")]
                    content = content["bytes"] if isinstance(content, dict) else content
                    yield content, {key: row[column] for key, column in others.items()}
    except (OSError, ValueError, LookupError, MemoryError, arrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path} is not Parquet that can be read: {reason}") from None


def columns(path: str, schema) -> tuple[str, dict[str, str]]:
    """The column of the bytes of audio as pyarrow names it ("audio.bytes", or "wav"), and the
    others that are written, by their names in lower case. Raises `DataError`."""
    types = require("pyarrow", "reading Parquet").types
    audio_columns = {}
    for column in schema:
        name = column.name.lower()
        is_bytes = types.is_binary(column.type) or types.is_large_binary(column.type)
        if is_bytes and ("audio" in name or name in BINARY_NAMES):
            audio_columns[name] = column.name
        elif types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            audio_columns[name] = f"{column.name}.bytes"
    if len(audio_columns) > 1 and "audio" not in audio_columns:
        raise DataError(
            f"{path}: which of {printable(', '.join(audio_columns))} is audio? Call it audio"
        )
    if not audio_columns:
        present = ", ".join(f"{column.name}: {column.type}" for column in schema)
        raise DataError(
            f"{path} has no column of audio, as audio: struct<bytes: binary, path: string> or"
            f" audio: binary; it has {printable(present)[:300] or 'no columns'}"
        )
    chosen = audio_columns.get("audio") or next(iter(audio_columns.values()))
    others = {}
    for column in schema:
        name = column.name.lower()
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        is_text = types.is_string(kind) or types.is_large_string(kind)
        if name in NESTED or is_text or types.is_primitive(kind):
            if is_place(name):
                name = f"{SOURCE}{name}"
            if name in others:
                raise DataError(f"{path}: two of its columns are called {printable(name)}")
            others[name] = column.name
    return chosen, others


def is_place(name: str) -> bool:
    """Whether a column says where a clip was in another recording."""
    plain = re.sub(r"[\W_]", "", name)
    return any(plain.removesuffix(unit) in (*START_KEYS, *END_KEYS) for unit in ("", *UNITS))


def changes_of(path: str) -> str:
    """The columns of a file that are not written, or get another name."""
    schema = require("pyarrow.parquet", "reading Parquet").read_schema(path)
    audio, others = columns(path, schema)
    kept = {audio.removesuffix(".bytes"), *others.values()}
    said = ""
    if lists := ", ".join(name for name in schema.names if name not in kept):
        said += f"; columns left out: {lists}"
    if places := ", ".join(name for name in others if name.startswith(SOURCE)):
        said += f"; the audio of a row is the clip itself, so its place elsewhere is in {places}"
    return printable(said)


def write(folder: Path, files: list[str], rejected: Rejections) -> int:
    """Writes the rows of all files into an empty folder, and returns their number. A row that is
    not audio is added to `rejected`. Raises `DataError` if nothing is left."""
    count = 0
    with open(folder / MANIFEST, "w", encoding="ascii") as manifest:
        for number, path in enumerate(files):
            place = folder / f"{number:05}"
            place.mkdir()
            for row, (content, others) in enumerate(rows(path)):
                new = place / f"{row:06}"
                new.write_bytes(content or b"")
                suffix = audio_suffix(new)
                if not suffix:
                    new.unlink()
                    rejected.add(NOT_AUDIO if content else NO_BYTES, f"{path} row {row}")
                    continue
                new.rename(f"{new}{suffix}")
                entry = {"audio_filepath": f"{number:05}/{new.name}{suffix}", **others}
                manifest.write(json.dumps(entry, default=str) + "\n")
                count += 1
            print(f"{path}: {count} utterances so far{changes_of(path)}", flush=True)
    if not count:
        reasons = "; ".join(rejected.counts)
        raise DataError(f"{files[0]}: nothing of this can be used: {reasons or 'it has no rows'}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m speech.data.parquet",
        description="Audio files and a manifest of Hugging Face's Parquet files.",
        allow_abbrev=False,
    )
    parser.add_argument("parquet", nargs="+", help='files, or quoted patterns: "data/*.parquet"')
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args()
    files = shards(args.parquet)
    rejected = Rejections()
    made_from = {"made_by": "speech.data.parquet", "files": files}
    with writing(args.folder, "folder"):
        write_folder(args.folder, lambda folder: write(folder, files, rejected), made_from)
    if rejected.total:
        print(f"{rejected.total} rows left out:\n{rejected.table()}")
    print(f"--train_manifest {args.folder / MANIFEST}")


if __name__ == "__main__":
    exit_with_one_line(main)
