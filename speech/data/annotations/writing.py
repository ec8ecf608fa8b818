"""The one writer of files of annotations, which ELAN, Praat and players of subtitles open.

A row is an utterance {"start", "end", "text"} in seconds of its recording. It may have a "speaker";
the "draft" that a model wrote in place of its text; a "confidence" from 0 to 1; "words" {"start",
"end", "text"} of this text, which may have a "confidence", too; and, without words, "doubtful", if
another measure than the confidence says so."""

import itertools
import mimetypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from speech.data.annotations.document import DRAFT, UTTERANCES
from speech.writing import subtitles

DOUBTFUL, WORDS, CONFIDENCE = "doubtful", "words", "confidence"  # other tiers
DOUBT = 0.5  # what has less confidence is doubtful
DOUBT_MARK = "?"  # how the texts of DOUBTFUL begin: a person searches for it
SAME = 0.02  # seconds by which rows of a tier may overlap: a frame of a model
INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML
INCLUDED, ASSOCIATED = "Included_In", "Symbolic_Association"
CONSTRAINTS = {  # ELAN's own descriptions
    INCLUDED: "Time alignable annotations within the parent annotation's time interval, gaps are"
    " allowed",
    ASSOCIATED: "1-1 association with a parent annotation",
}
TYPES = {  # of tiers in ELAN, and their constraints
    UTTERANCES: None,
    DRAFT: ASSOCIATED,
    DOUBTFUL: ASSOCIATED,
    WORDS: INCLUDED,
    CONFIDENCE: INCLUDED,  # not below WORDS: pympi reads no association with an included tier
}
SCHEMA = {
    "xmlns:xsi": "http://www.w3.org/2001/XMLSchema-instance",
    "xsi:noNamespaceSchemaLocation": "http://www.mpi.nl/tools/elan/EAFv3.0.xsd",
}
# How our files begin. ELAN and Praat save the same contents with other beginnings: a file that a
# person has saved is known by that.
BEGINNINGS = {
    ".eaf": b'<?xml version="1.0" encoding="UTF-8"?>\n<ANNOTATION_DOCUMENT xmlns:xsi=',
    ".textgrid": b'File type = "ooTextFile"\nObject class = "TextGrid"\n\n0.000\n',
    **{suffix: form.begins for suffix, form in subtitles.FORMATS.items()},
}


class Span(NamedTuple):
    """A text from `start` to `end`, in milliseconds."""

    start: int
    end: int
    text: str


@dataclass
class Track:
    """A tier to write. `kind`: a key of TYPES, `parent`: the name of the tier that it depends on.
    Spans with a parent in ASSOCIATED have the times of one of the parent's spans."""

    name: str
    kind: str
    parent: str = ""
    speaker: str = ""
    spans: list[Span] = field(default_factory=list)


def content(path: Path, rows: Sequence[dict], audio: str | Path, seconds: float = 0.0) -> str:
    """The content of the file of `rows` at `path`, whose suffix says its form: a key of BEGINNINGS,
    also in capitals. `audio` is the recording, which an .eaf names absolutely and relative to
    `path`; `seconds` is its length, which a TextGrid has."""
    suffix = path.suffix.lower()
    if suffix in subtitles.FORMATS:
        return subtitles.FORMATS[suffix].whole(*map(as_transcript, _lanes(rows).values()))
    tracks = tracks_of(rows)
    return eaf(tracks, Path(audio), path) if suffix == ".eaf" else textgrid(tracks, seconds)


def as_transcript(rows: Sequence[dict]) -> dict:
    """The rows as the transcript of a recording, with words if all rows with a text have them."""
    rows = [row for row in sorted(rows, key=_times) if row["text"].strip()]
    transcript = {"text": " ".join(row["text"] for row in rows), "segments": rows}
    if rows and all(row.get("words") for row in rows):
        transcript["words"] = [word for row in rows for word in row["words"]]
    return transcript


def tracks_of(rows: Sequence[dict]) -> list[Track]:
    """The tiers of rows: for each speaker the utterances, and what depends on them. Utterances of a
    speaker that overlap are in several tiers, because ELAN and Praat allow no overlap in one."""
    has_words = any(row.get("words") for row in rows)
    lanes = _lanes(rows) or {("", 1): []}
    tracks = []
    for (speaker, number), lane in lanes.items():
        name = (f"@{speaker}" if speaker else "") + (f" ({number})" if number > 1 else "")
        utterances = Track(UTTERANCES + name, UTTERANCES, speaker=speaker)
        draft = Track(DRAFT + name, DRAFT, utterances.name, speaker)
        doubtful = Track(DOUBTFUL + name, DOUBTFUL, utterances.name, speaker)
        words = Track(WORDS + name, WORDS, utterances.name, speaker)
        confidence = Track(CONFIDENCE + name, CONFIDENCE, utterances.name, speaker)
        least = [max(1, len(row.get("words", ()))) for row in lane]
        for row, (start, end) in zip(lane, fitted(lane, least), strict=True):
            parts = row.get("words", [])
            spans = fitted(parts, [1] * len(parts), start, end)
            timed = [
                Span(*span, one_line(part["text"])) for part, span in zip(parts, spans, strict=True)
            ]
            utterances.spans.append(Span(start, end, one_line(row["text"])))
            words.spans += timed
            if "draft" in row:
                draft.spans.append(Span(start, end, one_line(row["draft"])))
            if doubts := doubts_in(row):
                doubtful.spans.append(Span(start, end, one_line(doubts)))
            judged, judged_spans = (parts, timed) if has_words else ([row], utterances.spans[-1:])
            for part, span in zip(judged, judged_spans, strict=True):
                if "confidence" in part:
                    text = f"{part['confidence']:.2f}"
                    confidence.spans.append(span._replace(text=text))
        others = (draft, doubtful, words, confidence)
        tracks += [utterances, *(track for track in others if track.spans)]
    return tracks


def _times(row: dict) -> tuple[float, float]:
    return row["start"], row["end"]


def _lanes(rows: Sequence[dict]) -> dict[tuple[str, int], list[dict]]:
    """Rows in the order of time without overlaps, by (speaker, number from 1 on)."""
    lanes: dict[tuple[str, int], list[dict]] = {}
    for row in sorted(rows, key=_times):
        speaker = one_line(row.get("speaker", ""))
        for number in itertools.count(1):
            lane = lanes.setdefault((speaker, number), [])
            if not lane or row["start"] >= lane[-1]["end"] - SAME:
                lane.append(row)
                break
    return lanes


def fitted(
    parts: Sequence[dict], least: list[int], first: int = 0, last: int | None = None
) -> list[tuple[int, int]]:
    """The times of parts that follow each other, in milliseconds between `first` and `last`. Each
    is at least as long as `least` says and none begins before another ends: ELAN and Praat refuse
    what has no duration. There is room for all."""
    edges = [first]
    lengths = []
    for part, length in zip(parts, least, strict=True):
        for time, more in ((part["start"], 0), (part["end"], length)):
            edges.append(max(round(1000 * time), edges[-1] + more))
            lengths.append(more)
    limit = edges[-1] if last is None else last
    for place in reversed(range(1, len(edges))):
        edges[place] = min(edges[place], limit)
        limit = edges[place] - lengths[place - 1]
    return list(zip(edges[1::2], edges[2::2], strict=True))


def doubts_in(row: dict) -> str:
    """A mark and the doubtful words of a row; "" if there is no doubt."""
    judged = [word for word in row.get("words", ()) if "confidence" in word]
    if not judged:
        is_doubtful = row.get("doubtful", row.get("confidence", 1.0) < DOUBT)
        return DOUBT_MARK if is_doubtful else ""
    words = [word["text"] for word in judged if word["confidence"] < DOUBT]
    return " ".join([DOUBT_MARK, *words]) if words else ""


def one_line(text: str) -> str:
    """A text in one line, without the control characters that XML cannot hold."""
    return " ".join(INVALID.sub(" ", text).split())


# --- ELAN -----------------------------------------------------------------------------------------


def eaf(tracks: list[Track], audio: Path, path: Path) -> str:
    """The .eaf of tiers, to be written to `path`."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    versions = {"AUTHOR": "", "DATE": now, "FORMAT": "3.0", "VERSION": "3.0"}
    root = ElementTree.Element("ANNOTATION_DOCUMENT", {**SCHEMA, **versions})
    header = _add(root, "HEADER", MEDIA_FILE="", TIME_UNITS="milliseconds")
    _add(
        header,
        "MEDIA_DESCRIPTOR",
        MEDIA_URL=f"file://{os.path.abspath(audio)}",
        MIME_TYPE=mimetypes.guess_type(audio.name)[0] or "audio/*",
        RELATIVE_MEDIA_URL=relative_url(audio, path),
    )
    last = sum(len(track.spans) for track in tracks)
    _add(header, "PROPERTY", NAME="lastUsedAnnotationId").text = str(last)
    slots, names = time_slots(tracks)
    order = _add(root, "TIME_ORDER")
    order.extend(slot_element(*slot) for slot in slots)
    root.extend(tier_elements(tracks, names))
    for kind in dict.fromkeys(track.kind for track in tracks):
        root.append(type_element(kind, TYPES[kind]))
    root.extend(constraint_element(name) for name in CONSTRAINTS)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f"{head}{as_xml(root)}\n"


def time_slots(
    tracks: Sequence[Track], first: int = 1
) -> tuple[list[tuple[str, int]], dict[tuple[int, int, int], str]]:
    """The slots for the edges of spans with times of their own, in the order of time: (name,
    milliseconds) of each; and their names by (track, span, edge). Numbers begin with `first`."""
    edges = sorted(
        (time, number, place, edge)
        for number, track in enumerate(tracks)
        if TYPES[track.kind] != ASSOCIATED
        for place, span in enumerate(track.spans)
        for edge, time in enumerate((span.start, span.end))
    )
    slots = [(f"ts{count}", edge[0]) for count, edge in enumerate(edges, first)]
    return slots, {edge[1:]: name for edge, (name, _) in zip(edges, slots, strict=True)}


def slot_element(name: str, time: int) -> ElementTree.Element:
    """A TIME_SLOT at so many milliseconds."""
    return ElementTree.Element("TIME_SLOT", {"TIME_SLOT_ID": name, "TIME_VALUE": str(time)})


def tier_elements(
    tracks: Sequence[Track], slots: dict[tuple[int, int, int], str], first: int = 1
) -> list[ElementTree.Element]:
    """A TIER for each track, with `slots` of `time_slots`; annotations count from `first` on."""
    ids: dict[tuple[str, int], str] = {}  # of the annotations, by their tier and their start
    numbers = itertools.count(first)
    tiers = []
    for number, track in enumerate(tracks):
        tier = tier_element(track.name, track.kind, track.parent, track.speaker)
        tiers.append(tier)
        for place, span in enumerate(track.spans):
            name = f"a{next(numbers)}"
            ids[track.name, span.start] = name
            if TYPES[track.kind] == ASSOCIATED:
                add_reference(tier, name, ids[track.parent, span.start], span.text)
                continue
            start, end = (slots[number, place, edge] for edge in (0, 1))
            references = {"TIME_SLOT_REF1": start, "TIME_SLOT_REF2": end}
            each = _add(_add(tier, "ANNOTATION"), "ALIGNABLE_ANNOTATION", ANNOTATION_ID=name)
            each.attrib.update(references)
            _add(each, "ANNOTATION_VALUE").text = span.text
    return tiers


def _add(parent: ElementTree.Element, name: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.SubElement(parent, name, attributes)


def tier_element(name: str, kind: str, parent: str, speaker: str) -> ElementTree.Element:
    """An empty TIER of the type `kind`."""
    optional = {"PARENT_REF": parent, "PARTICIPANT": speaker}
    attributes = {"LINGUISTIC_TYPE_REF": kind, **{k: v for k, v in optional.items() if v}}
    return ElementTree.Element("TIER", {**attributes, "TIER_ID": name})


def add_reference(tier: ElementTree.Element, name: str, parent: str, text: str) -> None:
    """Adds an annotation that has the time of the annotation `parent`."""
    attributes = {"ANNOTATION_ID": name, "ANNOTATION_REF": parent}
    each = _add(_add(tier, "ANNOTATION"), "REF_ANNOTATION", **attributes)
    _add(each, "ANNOTATION_VALUE").text = text


def type_element(name: str, constraint: str | None) -> ElementTree.Element:
    """The LINGUISTIC_TYPE of tiers."""
    optional = {"CONSTRAINTS": constraint} if constraint else {}
    alignable = "false" if constraint == ASSOCIATED else "true"
    settings = {"GRAPHIC_REFERENCES": "false", "LINGUISTIC_TYPE_ID": name}
    attributes = {**optional, **settings, "TIME_ALIGNABLE": alignable}
    return ElementTree.Element("LINGUISTIC_TYPE", attributes)


def constraint_element(name: str) -> ElementTree.Element:
    attributes = {"DESCRIPTION": CONSTRAINTS[name], "STEREOTYPE": name}
    return ElementTree.Element("CONSTRAINT", attributes)


def as_xml(element: ElementTree.Element, level: int = 0) -> str:
    """An element as ELAN indents it, `level` steps of four spaces deep."""
    ElementTree.indent(element, "    ", level)
    return ElementTree.tostring(element, encoding="unicode").strip()


def relative_url(audio: Path, path: Path) -> str:
    """The recording as the .eaf at `path` names it relatively, also where folders are links."""
    folder = os.path.realpath(audio.parent)
    return f"./{os.path.relpath(os.path.join(folder, audio.name), os.path.realpath(path.parent))}"


# --- Praat ----------------------------------------------------------------------------------------


def textgrid(tracks: list[Track], seconds: float) -> str:
    """The .TextGrid of tiers, in Praat's short form: intervals without gaps."""
    end = max([1, round(1000 * seconds), *(span.end for track in tracks for span in track.spans)])
    lines = [_seconds(0), _seconds(end), "<exists>", str(len(tracks))]
    for track in tracks:
        intervals = []
        before = 0
        for span in [*track.spans, Span(end, end, "")]:
            if before < span.start:
                intervals.append(Span(before, span.start, ""))
            if span.start < span.end:
                intervals.append(span)
            before = span.end
        lines += ['"IntervalTier"', _quoted(track.name), _seconds(0), _seconds(end)]
        lines.append(str(len(intervals)))
        for start, stop, text in intervals:
            lines += [_seconds(start), _seconds(stop), _quoted(text)]
    head = 'File type = "ooTextFile"\nObject class = "TextGrid"\n\n'
    return head + "".join(f"{line}\n" for line in lines)


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.3f}"


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'
