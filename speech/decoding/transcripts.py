"""Transcripts as they leave a command: printed, in the file of --output, or in a file for each
recording."""

import bisect
import filecmp
import functools
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common import files
from common.errors import RunError, UsageError
from speech.data.annotations import writing
from speech.signal.audio import audio_files
from speech.writing import subtitles

TRANSCRIPT = b'{"file": '  # how a line of --output begins
TABLES = (".jsonl", ".json", "")  # suffixes of --output for a line for each recording
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")  # how the names of open files begin


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/stdout, which is not replaced."""
    return str(path).startswith(STREAMS) or (
        path.exists() and not (path.is_file() or path.is_dir())
    )


@dataclass(frozen=True)
class Output:
    """Where transcripts are written: to the file `table`, a line for each recording, or to the file
    of each recording in `files`, in a `folder` if one is named."""

    table: Path | None = None
    files: dict[Path, Path] = field(default_factory=dict)
    folder: Path | None = None


def suffix_of(output: str | Path) -> str:
    """The suffix of --output, in small letters, if it names a form. Raises `UsageError`."""
    suffix = Path(output).suffix.lower()
    if not is_stream(Path(output)) and suffix not in (*TABLES, *writing.BEGINNINGS):
        forms = ".json, .jsonl, .eaf, .TextGrid, .srt or .vtt, or a folder with --output_format"
        raise UsageError(f"--output {output}: {suffix} cannot be written; name a file {forms}")
    return suffix


def is_folder(output: str | Path) -> bool:
    """Whether --output names a folder."""
    return str(output).endswith(("/", "/.", "/..")) or os.path.isdir(output)


def folder_of(output: str, form: str) -> Path:
    """The folder --output of an --output_format. Raises `UsageError`."""
    if Path(output).suffix.lower() in writing.BEGINNINGS and not is_folder(output):
        raise UsageError(f"--output {output}: with --output_format {form} it is a folder; name one")
    return Path(output)


def output_of(output: str, form: str | None, paths: list[str] | None) -> Output:
    """What --output and --output_format ask for, of the files and folders --transcribe; None for
    a stream, which is written as it comes. Raises `UsageError`."""
    if form is None:
        if is_folder(output):
            raise UsageError(f"--output {output}: it is a folder; add --output_format eaf")
        if suffix_of(output) in TABLES:
            return Output(table=Path(output))
        if paths is None and suffix_of(output) not in subtitles.FORMATS:
            raise UsageError(
                f"--output {output}: a stream is written as .jsonl, .srt or .vtt; leave"
                " --stream out"
            )
        if paths is None:
            return Output(files={Path(): Path(output)})
        recordings = audio_files(paths)
        if len(recordings) > 1:
            raise UsageError(
                f"--output {output}: it is of one recording, and {len(recordings)} are named; name"
                " one, or a folder and --output_format"
            )
        return Output(files={recordings[0]: Path(output)})
    named = [
        (recording, recording.relative_to(path) if os.path.isdir(path) else recording.name)
        for path in paths
        for recording in audio_files([path])
    ]
    folder = folder_of(output, form)
    return Output(files=in_folder(folder, form, named), folder=folder)


def in_folder(folder: Path, form: str, named: Iterable[tuple[Path, str | Path]]) -> dict:
    """The file for each recording in a folder. Raises `UsageError` if two have the same one."""
    targets: dict[Path, Path] = {}
    recordings: dict[Path, Path] = {}
    for recording, name in named:
        target = (folder / name).with_suffix(f".{form}")
        other = recordings.setdefault(target, recording)
        if other != recording:
            raise UsageError(f"{other} and {recording}: both would be written to {target}")
        targets[recording] = target
    return targets


def check_output(output: Output, inputs: Iterable[str]) -> None:
    """Raises `UsageError` if --output must not or cannot be written. Makes the folders."""
    inputs = list(inputs)
    if output.table and not is_stream(output.table):
        check_file(output.table, TRANSCRIPT, inputs)
        check_file(partial_of(output.table), TRANSCRIPT, inputs)
    for path in output.files.values():
        if output.folder:
            make_folder(path.parent)
        check_file(path, writing.BEGINNINGS.get(path.suffix.lower(), TRANSCRIPT), inputs)


def make_folder(folder: Path) -> None:
    """Makes a folder of --output. Raises `UsageError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}") from None


def check_file(path: Path, begins: bytes, inputs: Iterable[str]) -> None:
    """`check_output` for one file, whose contents begin so."""
    files.require_output(path, "--output", inputs, functools.partial(begins_with, begins))


def begins_with(beginning: bytes, path: Path) -> bool:
    """Whether a file is empty, or begins as what this project writes does."""
    with open(path, "rb") as file:
        return file.read(len(beginning)) in (b"", beginning)


def partial_of(path: Path) -> Path:
    """Where transcripts are kept if a command ends before its last file."""
    return path.with_name(f"{path.name}.partial")


def show(rows: Iterable[dict], with_names: bool, with_times: bool) -> int:
    """Prints the texts of `rows`, or their segments after their times. Returns their number."""
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
    """Renames transcripts at `path`, which may be corrected, unless `new` equals them. A page still
    ends with .html."""
    if not path.exists() or not path.stat().st_size:
        return
    if new is None or not filecmp.cmp(path, new, shallow=False):
        number = 1
        end = path.suffix if path.suffix == ".html" else ""
        while os.path.lexists(kept := path.with_name(f"{path.name}.earlier-{number}{end}")):
            number += 1
        path.rename(kept)
        print(f"{path}: the transcripts that were there are now in {kept}", file=sys.stderr)


def write(path: Path, rows: Iterable[dict]) -> int:
    """Writes `rows` as JSON Lines, with file names relative to the path's folder unless they are
    absolute, and returns their number. Other transcripts that are there get another name, unless
    there are no rows. What is done when a signal or an error ends the command is kept in
    PATH.partial. A device or a pipe is written to directly."""
    rows = iter(rows)
    if (first := next(rows, None)) is None:
        return 0
    count = 0

    def line_of(row: dict) -> str:
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


def write_files(targets: dict[Path, Path], rows: Iterable[dict], by_piece: bool) -> int:
    """Writes the file of each row as soon as it is there, and returns their number. Earlier ones
    get another name. `by_piece`: see `utterances_of`. Raises `RunError`."""
    count = 0
    for row in rows:
        path = targets[Path(row["file"])]
        suffix = path.suffix.lower()
        if suffix in TABLES:
            write(path, [row])
        elif suffix in subtitles.FORMATS:
            write_whole(path, subtitles.FORMATS[suffix].whole(row))
        else:
            utterances = utterances_of(row, by_piece)
            write_whole(path, writing.content(path, utterances, row["file"], row["seconds"]))
        count += 1
    return count


def write_whole(path: Path, content: str) -> None:
    """Writes a text; another one that is there gets another name. Raises `RunError`."""

    def fill(target: Path) -> None:
        target.write_text(content, encoding="utf-8", errors="backslashreplace")
        keep_earlier(path, target)

    try:
        files.write_file(path, fill)
    except OSError as error:
        raise RunError(f"--output {path}: {error.strerror}") from None


def utterances_of(row: dict, by_piece: bool) -> list[dict]:
    """The rows for `writing` of a transcript: its segments, or its pieces if it has none or they
    were asked for (`by_piece`), with the words that are in them by their middles."""
    parts = row.get("segments")
    if "pieces" in row and (by_piece or not parts):
        parts = row["pieces"]
    utterances = [{**part, "draft": part["text"], "words": []} for part in parts]
    starts = [part["start"] for part in parts]
    for word in row.get("words", ()):
        place = bisect.bisect_right(starts, (word["start"] + word["end"]) / 2) - 1
        utterances[max(0, place)]["words"].append(word)
    return utterances
