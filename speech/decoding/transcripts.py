"""Transcripts as they leave a command: printed, or in the file of --output, as JSON Lines or
subtitles."""

import filecmp
import functools
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from common import files
from common.errors import RunError
from speech.writing import subtitles

TRANSCRIPT = b'{"file": '  # how a line of --output begins
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")  # how the names of open files begin


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/stdout: it is written to and not
    replaced."""
    return str(path).startswith(STREAMS) or (
        path.exists() and not (path.is_file() or path.is_dir())
    )


def is_subtitles(output: str | Path) -> bool:
    """Whether --output asks for subtitles."""
    return Path(output).suffix.lower() in subtitles.FORMATS


def check_output(output: str, inputs: Iterable[str]) -> None:
    """Raises `UsageError` if --output would replace anything but transcripts, or one of `inputs`,
    or cannot be written."""
    path = Path(output)
    if not is_stream(path):
        begins = TRANSCRIPT
        if is_subtitles(path):
            begins = subtitles.FORMATS[path.suffix.lower()].begins
        is_earlier = functools.partial(begins_with, begins)
        files.require_output(output, "--output", inputs, is_earlier)
        files.require_output(partial_of(path), "--output", inputs, is_earlier)


def begins_with(beginning: bytes, path: Path) -> bool:
    """Whether a file is empty, or begins as what this project writes does."""
    with open(path, "rb") as file:
        return file.read(len(beginning)) in (b"", beginning)


def partial_of(path: Path) -> Path:
    """Where transcripts are kept if a command ends before its last file."""
    return path.with_name(f"{path.name}.partial")


def show(rows: Iterable[dict], with_names: bool, with_times: bool) -> int:
    """Prints the texts of `rows`, or their segments after their times, and returns the number of
    rows."""
    count = 0
    for row in rows:
        lines = [row["text"]]
        if with_times:
            lines = [
                f"[{subtitles.shown(part['start'])} --> {subtitles.shown(part['end'])}]"
                f" {part['text']}"
                for part in row["segments"]
            ]
        for line in lines:
            print(f"{row['file']}\t{line}" if with_names else line, flush=True)
        count += 1
    return count


def keep_earlier(path: Path, new: Path | None = None) -> None:
    """Renames transcripts at `path`, unless they are equal to those in the file `new`, because
    somebody may have corrected them."""
    if not path.exists() or not path.stat().st_size:
        return
    if new is None or not filecmp.cmp(path, new, shallow=False):
        number = 1
        while os.path.lexists(kept := path.with_name(f"{path.name}.earlier-{number}")):
            number += 1
        path.rename(kept)
        print(f"{path}: the transcripts that were there are now in {kept}", file=sys.stderr)


def write(path: Path, rows: Iterable[dict]) -> int:
    """Writes `rows` as JSON Lines, with file names relative to the path's folder unless they are
    absolute, or one row as subtitles if the path's suffix asks for them, and returns their number.
    Other transcripts that are there get another name, unless there are no
    rows. What is done when a signal or an error ends the command is kept in PATH.partial. A device
    or a pipe is written to directly."""
    count = 0
    rows = iter(rows)
    if (first := next(rows, None)) is None:
        return 0

    def line_of(row: dict) -> str:
        if is_subtitles(path):
            return subtitles.FORMATS[path.suffix.lower()].whole(row)
        if not is_stream(path) and not os.path.isabs(row.get("file", "/")):
            row = {**row, "file": os.path.relpath(row["file"], path.parent)}
        return json.dumps(row, ensure_ascii=False) + "\n"

    def fill(target: Path) -> None:
        nonlocal count
        with open(target, "w", encoding="utf-8", errors="backslashreplace") as file:
            try:
                for row in itertools.chain([first], rows):
                    file.write(line_of(row))
                    file.flush()
                    count += 1
            except BaseException:
                if count and target != path:
                    keep_partial(target)
                raise
        if target != path:
            keep_earlier(path, target)

    def keep_partial(target: Path) -> None:
        partial = partial_of(path)
        keep_earlier(partial, target)
        files.write_file(partial, lambda copy: shutil.copyfile(target, copy))
        print(f"the first {count} transcripts are in {partial}", file=sys.stderr)

    try:
        if is_stream(path):
            fill(path)
        else:
            files.write_file(path, fill)
    except OSError as error:
        raise RunError(f"--output {path}: {error.strerror}") from None
    return count
