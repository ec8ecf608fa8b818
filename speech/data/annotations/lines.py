"""Annotations without tiers, in lines: Audacity's labels, and subtitles in .srt and .vtt."""

import html
import os
import re
from collections.abc import Sequence
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
TAG = re.compile(
    r"</?(?:[ibuscv]|font|lang|ruby|rt)(?:[.\s][^<>]*)?>|<\d[\d:.]*>|\{\\[^{}]*\}", re.IGNORECASE
)


def is_labels(path: Path) -> bool:
    """Whether a file looks like Audacity's labels: other tables are called .txt, too."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(START).decode("utf-8-sig", "replace")
    except OSError:
        return False
    first = next((line for line in start.splitlines() if line.strip()), "")
    return bool(LABEL.fullmatch(first))


def read_labels(path: Path) -> Document:
    """Audacity's labels: start TAB end TAB text, in seconds. Lines that begin with a backslash have
    the frequencies of the label before them. Raises `UsageError` and `DataError`."""
    tier = Tier()
    faults = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip() or line.startswith("\\"):
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
    """The subtitles of a .srt or .vtt without their tags; who speaks is read from <v NAME>. Raises
    `UsageError` and `DataError`."""
    cues: list[tuple[float, float, list[str]]] = []
    faults = []
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
    if not cues:
        raise DataError(f"{path}: it has no subtitles, such as 00:00:01,200 --> 00:00:02,500")
    tier = Tier()
    for start, end, parts in cues:
        text = " ".join(parts)
        voices = {" ".join(name.split()) for name in VOICE.findall(text)}
        text = TAG.sub("", BREAK.sub(" ", text))
        if is_vtt:
            text = html.unescape(text)
        speaker = voices.pop() if len(voices) == 1 else ""
        tier.annotations.append(Annotation(start, end, " ".join(text.split()), speaker))
    return Document([tier], faults=faults)


def seconds(clock: Sequence[str]) -> float:
    """The seconds of hours, minutes, seconds and a fraction."""
    hours, minutes, whole, fraction = clock
    return 3600 * int(hours) + 60 * int(minutes) + int(whole) + float(f"0.{fraction}")
