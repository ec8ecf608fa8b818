"""Files that a run has written into its folder: log, metrics, transcripts and weights. A run may be
writing them. Of a file as much is read as a page shows."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from common.checkpoint import list_checkpoints

LOG = "run.log"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
TRANSCRIPTS = "transcripts.jsonl"
ASIDE = re.compile(r"earlier-\d+")  # folders of what the loop moves aside
LOG_BYTES = 1 << 18  # of the end of a log that are shown
END_BYTES = 1 << 13  # of the end of a file, to tell how far a run is
LINE = 2000  # characters of a line that are shown
POINTS = 1000  # of the curves of training, at least, if there are more
ROWS = 5000  # of transcripts.jsonl
BEGAN = re.compile(r"^=== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d === .*$", re.MULTILINE)  # of an attempt
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\?)?|[@-Z\\-_])")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


# --- the log --------------------------------------------------------------------------------------


def log(folder: Path, lines: int = 200) -> str:
    """The last lines of a run's log, without control characters. Of a progress bar, which writes a
    line again and again, the last state is shown."""
    text = _tail(folder / LOG, LOG_BYTES)
    return "\n".join(text.split("\n")[-lines:])


def attempts(folder: Path) -> list[str]:
    """The end of what a run has printed, one text for each attempt in it, without the lines of
    their commands. The last one is that of the last start."""
    return [text.strip("\n") for text in BEGAN.split(_tail(folder / LOG, END_BYTES))]


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def _tail(path: Path, size: int) -> str:
    """The end of a text file, without control characters and with shortened lines."""
    text = _last_bytes(path, size).decode("utf-8", errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = ESCAPES.sub("", text)
    lines = text.replace("\r\n", "\n").split("\n")
    if "\r" in text:
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    lines = [line if len(line) <= LINE else line[:LINE] + "..." for line in lines]
    return CONTROL.sub("", "\n".join(lines))


def _last_bytes(path: Path, size: int) -> bytes:
    """The last bytes of a file, if possible from the start of a line; b"" if it is unreadable."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(0, length - size))
            data = file.read(size)
    except OSError:
        return b""
    if length > size and b"\n" in data[:-1]:
        data = data[data.index(b"\n") + 1 :]
    return data


# --- metrics and transcripts ----------------------------------------------------------------------


def stage(folder: Path) -> str:
    """The stage that was trained last, such as "vocoder", of a training in several; "" for the main
    one, whose logs and checkpoints have no folder of their own."""
    found = {}
    for path in [folder / "logs", *(folder / "logs").glob("*/")]:
        if not ASIDE.fullmatch(path.name):
            with contextlib.suppress(OSError):
                found[(path / METRICS).stat().st_mtime] = path
    newest = found[max(found)] if found else folder / "logs"
    return "" if newest == folder / "logs" else newest.name


def _logs(folder: Path) -> Path:
    """The folder of the metrics of this stage."""
    return folder / "logs" / stage(folder)


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl, of the stage that was trained last, as {"step": 10, "train/loss":
    2.5, ...}, by their order: all evaluations and, if they are many, a part of the others. Values
    that are not finite are left out, and so are rows about events."""
    lines = list(_lines(_logs(folder) / METRICS))
    evaluated = [n for n, line in enumerate(lines) if b'"eval/' in line]
    trained = [n for n, line in enumerate(lines) if b'"train/' in line]
    every = max(1, len(trained) // POINTS)
    rows = [_finite(lines[n]) for n in sorted({*evaluated, *trained[::every], *trained[-1:]})]
    return [row for row in rows if "step" in row and len(row) > 1]


def last_metrics(folder: Path) -> list[dict]:
    """The last rows of metrics.jsonl, as `metrics` has them."""
    return [_finite(line) for line in _last_bytes(_logs(folder) / METRICS, END_BYTES).split(b"\n")]


def transcripts(folder: Path) -> list[dict]:
    """The rows of transcripts.jsonl, the evaluation set as the best weights read it: "file",
    "reference", "hypothesis"; [] if there are none."""
    rows = []
    for line in _lines(folder / "logs" / TRANSCRIPTS):
        row = _row(line)
        if all(isinstance(row.get(key), str) for key in ("file", "reference", "hypothesis")):
            rows.append(row)
        if len(rows) == ROWS:
            break
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, if there is one."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        yield from file


def _row(line: bytes) -> dict:
    """A line of JSON; {} if it is damaged, or only half written."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _finite(line: bytes) -> dict:
    """The numbers in a line of JSON, without infinity and NaN."""
    return {name: value for name, value in _row(line).items() if is_finite(value)}


def is_finite(value) -> bool:
    """Whether a value of a JSON file is a number, and not one that no plot can show."""
    return isinstance(value, int | float) and abs(value) < 1e100


# --- weights --------------------------------------------------------------------------------------


def weights(folder: Path) -> list[Path]:
    """The weights of a run: the best ones, and its checkpoints, newest first."""
    checkpoints = folder / CHECKPOINTS
    found = [checkpoints / "best.safetensors", *list_checkpoints(checkpoints)]
    return [path for path in found if path.is_file()]
