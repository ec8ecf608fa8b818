"""What a file of annotations holds, whatever its format: tiers of timed texts, and what is said
about its audio."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from common.errors import DataError, UsageError
from common.files import require_file

MOST_BYTES = 1 << 28  # of a file, whose annotations are in memory together: hundreds of hours
UTTERANCES = "utterances"  # the tier with texts in files that this project writes
DRAFT = "draft"  # the tier, and its type in ELAN, of what a model wrote
# Its name if there are several, one for each speaker, and more where a speaker's overlap.
OWN_TIER = re.compile(rf"{UTTERANCES}(?:@(?P<speaker>.+?))?(?: \(\d+\))?")
BYTE_ORDERS = (b"\xff\xfe", b"\xfe\xff")  # begin a file in UTF-16


class Annotation(NamedTuple):
    """A text and its time in seconds, NaN where the file does not tell it."""

    start: float
    end: float
    text: str
    speaker: str = ""


class Media(NamedTuple):
    """A recording that a file names: its path, its path relative to the file ("" if it is not
    known), and the seconds in it at which the time of the annotations begins."""

    path: str
    relative: str
    origin: float


@dataclass
class Tier:
    """A track of annotations. `name` is empty in formats without tiers; `parent`: the tier that it
    depends on, `kind`: its type in ELAN, which tiers of several speakers share. `points`: texts
    without duration, which are only counted."""

    name: str = ""
    participant: str = ""
    parent: str = ""
    kind: str = ""
    annotations: list[Annotation] = field(default_factory=list)
    points: int = 0


@dataclass
class Document:
    """A file of annotations. `faults`: (reason, place) of each line that cannot be read, `notes`:
    of what is read in another way than it is written."""

    tiers: list[Tier]
    media: list[Media] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def opened(path: Path) -> BinaryIO:
    """The open file, if it has a sensible size. Raises `UsageError` and `DataError`."""
    size = require_file(path, "manifest").stat().st_size
    if not size:
        raise DataError(f"{path}: it is empty")
    if size > MOST_BYTES:
        raise DataError(f"{path}: {size >> 20} MiB are too much for a file of annotations")
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}") from None


def read_text(path: Path, advice: str = "save it as UTF-8") -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte-order mark; line ends become "\\n".
    Raises `UsageError`, and `DataError` with the `advice` for other encodings."""
    with opened(path) as file:
        content = file.read()
    encoding = "utf-16" if content[:2] in BYTE_ORDERS else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        name = encoding.removesuffix("-sig").upper()
        raise DataError(f"{path}:{line}: it is not {name}; {advice}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
