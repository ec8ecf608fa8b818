"""The report of --check_data in parts, and the audio of its examples."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import Failure
from speech.data.columns import ADVICE, Rejections, printable
from speech.data.fields import row_fields
from speech.data.finding import find_audio
from speech.data.headers import probe
from speech.data.manifest import has_lines, parse
from webui.places import Places

ROW = re.compile(r"  +([\d.]+)  (.+)")  # what `Rejections.table` prints, and similar tables
EXAMPLE = " " * 11  # begins the lines below a row
REASONS = re.compile(r"\d+ (rejected|noted \(all are used\)):$")  # titles of their tables
PLACE = re.compile(r" at (\d+\.\d\d) s")  # after a path, as `Corpus.where` writes it
LONGEST = 30.0  # seconds that are played of an example


@dataclass(frozen=True)
class Row:
    """A line of a table: a reason with its rows, what helps, and examples; or a name's minutes."""

    number: float
    label: str
    advice: str = ""
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """A line, and the table below it, if there is one."""

    title: str
    rows: list[Row] = field(default_factory=list)

    @property
    def has_reasons(self) -> bool:
        """Whether its rows are reasons why something was rejected, or noted."""
        return bool(REASONS.search(self.title))


@dataclass(frozen=True)
class Example:
    """An example for people: `text`, and the part of a file to play, if there is one."""

    text: str
    path: Path | None = None
    offset: float = 0.0
    seconds: float = 0.0


def read(text: str) -> list[Section]:
    """The lines of a text, with the tables below them."""
    sections: list[Section] = []
    for line in text.splitlines():
        rows = sections[-1].rows if sections else []
        if line.startswith(EXAMPLE) and rows:
            rows[-1].examples.append(line[len(EXAMPLE) :])
        elif (found := ROW.fullmatch(line)) and sections:
            rows.append(Row(float(found[1]), *_without_advice(found[2])))
        elif line.strip():
            sections.append(Section(line.strip()))
    return sections


def _without_advice(label: str) -> tuple[str, str]:
    """A reason, and what helps against it, which is printed in parentheses."""
    for advice in ADVICE.values():
        if label.endswith(f" ({advice})"):
            return label.removesuffix(f" ({advice})"), advice
    return label, ""


def examples_of(
    sections: list[Section], places: Places, manifests: Iterable[Path]
) -> dict[str, Example]:
    """The examples in the sections, with the files in `places` that can be played. Most name a line
    of one of the `manifests`, where the part of the file is found."""
    printed = [text for each in sections for row in each.rows for text in row.examples]
    examples: dict[str, Example] = {}
    for manifest in manifests:
        if not has_lines(str(manifest)):  # whose examples begin with the path of their audio
            continue
        pattern = re.compile(re.escape(printable(str(manifest))) + r":(\d+)(?:: (.*))?")
        found = {text: match for text in printed if (match := pattern.fullmatch(text))}
        lines = {text: (int(match[1]), match[2] or "") for text, match in found.items()}
        rows = _rows(manifest, {number for number, _ in lines.values()})
        for text, (number, rest) in lines.items():
            examples[text] = _of_line(manifest, number, rest, rows.get(number), places)
    for text in printed:
        if text not in examples:
            examples[text] = _of_path(text, places)
    return examples


def _rows(manifest: Path, wanted: set[int]) -> dict[int, dict]:
    """Rows of a manifest by their line numbers."""
    rows = {}
    try:
        for number, row in parse(manifest, Rejections()):
            if number in wanted:
                rows[number] = row
            if number >= max(wanted, default=0):
                break
    except (Failure, OSError):  # it changed since it was checked
        pass
    return rows


def _of_line(manifest: Path, number: int, rest: str, row, places: Places) -> Example:
    """An example in a line of a manifest. `rest`: what is printed behind the line's number."""
    folder = str(manifest.parent)
    try:
        fields = row_fields(row, "")
        path = find_audio(fields.audio, folder)
    except (ValueError, Failure):
        return Example(f"line {number}: {rest}".rstrip(": "))
    shown = printable(path)
    uploaded = places.own_name(Path(path))  # the lines of the user's own table have other numbers
    is_uploaded = uploaded != os.path.basename(path)
    name = printable(uploaded if is_uploaded else os.path.relpath(path, folder))
    place = PLACE.match(rest.removeprefix(shown))
    unit = fields.unit or 1.0
    start = 0.0 if math.isnan(fields.offset) else fields.offset * unit
    offset = float(place[1]) if place else start
    is_whole = abs(offset - start) < 0.01  # and not a piece of the row
    seconds = fields.duration * unit if is_whole else math.nan
    words = rest.replace(shown, name) or name
    words = words if is_uploaded else f"line {number}: {words}"
    return _playable(words, path, offset, seconds, places)


def _of_path(text: str, places: Places) -> Example:
    """An example that begins with the path of its audio."""
    for end in (found.start() for found in re.finditer(r": | at \d|$", text)):
        path = text[:end]
        if os.path.isabs(path):
            place = PLACE.match(text[end:])
            offset = float(place[1]) if place else 0.0
            shown = printable(places.own_name(Path(path))) + text[end:]
            example = _playable(shown, path, offset, math.nan, places)
            if example.path:
                return example
    return Example(text)


def _playable(text: str, path: str, offset: float, seconds: float, places: Places) -> Example:
    """The example with its audio, if that is inside and can be decoded."""
    try:
        file = places.file(path)
    except Failure:
        return Example(text)
    length, fault = probe(str(file))
    if fault:
        return Example(text)
    if offset >= length:
        offset, seconds = 0.0, math.nan
    left = min(length - offset, LONGEST)
    return Example(text, file, offset, left if math.isnan(seconds) else min(seconds, left))
