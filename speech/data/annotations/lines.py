"""Annotations without tiers, in lines: Audacity's labels, and subtitles in .srt and .vtt."""

import html
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import DataError
from speech.data.annotations.document import Annotation, Document, Tier, read_text

START = 1 << 16  # bytes of a file that tell whether it has labels
# In some languages a decimal comma is written.
SECONDS = r"[+-]?\d+(?:[.,]\d*)?(?:[eE][+-]?\d+)?"
LABEL = re.compile(rf"({SECONDS})\t({SECONDS})(?:\t(.*))?", re.ASCII)
CLOCK = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})(?:[.,](\d{1,3}))?"
CUE = re.compile(rf"\s*{CLOCK}\s*-->\s*{CLOCK}(?:\s.*)?", re.ASCII)
VOICE = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]+)>")  # who speaks, in a .vtt
BREAK = re.compile(r"<br\s*/?>|\\N", re.IGNORECASE)  # of a line, within it
ENTITY = re.compile(r"&(?:[a-z]\w{1,31}|#\d{1,7}|#x[\da-f]{1,6});", re.IGNORECASE | re.ASCII)
TAG = re.compile(
    r"</?(?:[ibuscv]|font|lang|ruby|rt)(?:[.\s][^<>]*)?>|<\d[\d:.]*>|\{\\[^{}]*\}", re.IGNORECASE
)
NEAR = 0.1  # seconds: with less between them, a subtitle follows the one before it
ROLLS = "line that the subtitle before it shows, too, is read once"
STAYS = "subtitle stays until after the next one begins, and is taken to end there"


@dataclass
class Cue:
    """A subtitle: seconds, lines without tags, who speaks, and how it is written."""

    start: float
    end: float
    lines: list[str]
    speaker: str
    written: str


def is_labels(path: Path) -> bool:
    """Whether a file looks like Audacity's labels: other tables are called .txt, too."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(START).decode("utf-8-sig", "replace")
    except OSError:
        return False
    lines = (line for line in start.splitlines() if line.strip() and not is_frequencies(line))
    first = next(lines, "")
    return bool(LABEL.fullmatch(first))


def is_frequencies(line: str) -> bool:
    """Whether a line has the frequencies of a label, which stands before it."""
    return line.startswith("\\")


def read_labels(path: Path) -> Document:
    """Audacity's labels: start TAB end TAB text, in seconds. Raises `UsageError` and `DataError`."""
    tier = Tier()
    faults = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip() or is_frequencies(line):
            continue
        found = LABEL.fullmatch(line)
        if not found:
            faults.append(("line is not a label: start TAB end TAB text", f"{path}:{number}"))
            continue
        start, end = (float(time.replace(",", ".")) for time in found.groups()[:2])
        if start == end:
            tier.points += 1
        else:
            tier.annotations.append(Annotation(start, end, " ".join((found[3] or "").split())))
    return Document([tier], faults=faults)


def read_subtitles(path: Path) -> Document:
    """The subtitles of a .srt or .vtt without their tags; who speaks is read from <v NAME>. Lines
    that roll are read once, and a subtitle that stays ends where the next one begins; notes tell
    where. Raises `UsageError` and `DataError`."""
    faults: list[tuple[str, str]] = []
    cues = [_cue(start, end, lines) for start, end, lines in _parts(path, faults)]
    if not cues:
        raise DataError(f"{path}: it has no subtitles, such as 00:00:01,200 --> 00:00:02,500")
    notes = []
    if roll(cues):
        cues, left_out = unrolled(cues)
        notes += ((ROLLS, f"{path} at {start:.2f} s: {line}") for start, line in left_out)
    for cue, after in itertools.pairwise(cues):
        if cue.start < after.start < cue.end <= after.end and cue.speaker == after.speaker:
            notes.append(
                (STAYS, f"{path}: {cue.start:.2f} to {cue.end:.2f} s: {' '.join(cue.lines)}")
            )
            cue.end = after.start
    annotations = [Annotation(cue.start, cue.end, " ".join(cue.lines), cue.speaker) for cue in cues]
    return Document([Tier(annotations=annotations)], faults=faults, notes=notes)


def _parts(path: Path, faults: list[tuple[str, str]]) -> list[tuple[float, float, list[str]]]:
    """(start, end, lines as they are written) of each subtitle."""
    cues: list[tuple[float, float, list[str]]] = []
    is_vtt = path.suffix.lower() == ".vtt"
    is_open = False  # whether lines belong to the last one
    for number, line in enumerate(read_text(path).split("\n"), 1):
        times = CUE.fullmatch(line)
        if "-->" in line and is_open and cues[-1][2] and cues[-1][2][-1].strip().isdecimal():
            cues[-1][2].pop()  # the number of the next one
        if times:
            clocks = times.groups("0")
            cues.append((seconds(clocks[:4]), seconds(clocks[4:]), []))
            is_open = True
        elif "-->" in line:
            faults.append(("line is not the times of a subtitle", f"{path}:{number}: {line[:100]}"))
            is_open = False
        elif is_open:
            # After an empty line there may be notes in a .vtt, and only a number in a .srt.
            is_number = line.strip().isdecimal() and cues[-1][2][-1:] == [""]
            is_open = bool(line) if is_vtt else not is_number
            if is_open:
                cues[-1][2].append(line)
    return cues


def _cue(start: float, end: float, lines: list[str]) -> Cue:
    written = BREAK.sub("\n", "\n".join(lines))
    voices = {" ".join(name.split()) for name in VOICE.findall(written)}
    text = ENTITY.sub(lambda found: html.unescape(found[0]), TAG.sub("", written))
    shown = [" ".join(line.split()) for line in text.split("\n")]
    speaker = voices.pop() if len(voices) == 1 else ""
    return Cue(start, end, [line for line in shown if line], speaker, written)


# --- rolling captions: a video site shows each line again above the next one, some word by word ----


def repeated(before: list[str], lines: list[str]) -> int:
    """How many `lines` the one before ends with; the last of them may have more words."""
    for count in range(min(len(before), len(lines)), 0, -1):
        is_last = f"{lines[count - 1]} ".startswith(f"{before[-1]} ")
        if is_last and before[-count:-1] == lines[: count - 1]:
            return count
    return 0


def roll(cues: list[Cue]) -> bool:
    """Whether most subtitles begin with what the one just before it shows. Those that are said
    twice are written in the same way, and nothing is added to them."""
    near = [pair for pair in itertools.pairwise(cues) if pair[1].start - pair[0].end <= NEAR]
    again = [(one, next_) for one, next_ in near if repeated(one.lines, next_.lines)]
    is_other = any(one.written != next_.written for one, next_ in again)
    return is_other and 2 * len(again) >= len(near)


def unrolled(cues: list[Cue]) -> tuple[list[Cue], list[tuple[float, str]]]:
    """Rolling subtitles with each line once, and (start, line) of what is left out."""
    found: list[Cue] = []
    left_out = []
    shown: list[str] = []
    for cue in cues:
        count = repeated(shown, cue.lines)
        new = cue.lines[count:]
        if count and not new and cue.start - found[-1].end > NEAR:  # it is said again
            count, new = 0, cue.lines
        if count:
            left_out += ((cue.start, line) for line in cue.lines[:count])
            found[-1].lines[-1] = cue.lines[count - 1]
        if new or not count:
            found.append(replace(cue, lines=list(new)))
        else:
            found[-1].end = max(found[-1].end, cue.end)
        shown = cue.lines
    return found, left_out


def seconds(clock: Sequence[str]) -> float:
    """The seconds of hours, minutes, seconds and a fraction."""
    hours, minutes, whole, fraction = clock
    return 3600 * int(hours) + 60 * int(minutes) + int(whole) + float(f"0.{fraction}")
