"""ELAN's .eaf: tiers in XML, whose annotations have times or those of the annotations that they
depend on."""

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

import numpy as np

from common.errors import DataError
from speech.data.annotations.document import Annotation, Document, Media, Tier, opened

TIER_KEYS = ("TIER_ID", "PARTICIPANT", "PARENT_REF", "LINGUISTIC_TYPE_REF")  # as in `Tier`
LEVELS = 50  # of tiers that depend on each other, at most
LONGEST_TEXT = 1 << 20  # characters of an annotation, more than anyone says
CHUNK = 1 << 20  # bytes: expat begins an element anew with every chunk of it
LONGEST_ELEMENT = 1 << 24  # bytes of its name and attributes, or of a comment
Key = tuple[int, str]  # an annotation: the number of its tier, and its name there
NO_KEY = -1, ""
NOWHERE = math.nan, math.nan


class Timed(NamedTuple):
    """An annotation between two time slots."""

    name: str
    first: str
    last: str
    text: str


class Dependent(NamedTuple):
    """An annotation with the times of its `parent`: a name in the file, then its key, NO_KEY if it
    is not clear. It follows `previous`, "" for the first one of a parent."""

    name: str
    parent: str | Key
    previous: str
    text: str


class Segment(NamedTuple):
    """An annotation by its name in the file, with its time in seconds."""

    name: str
    start: float
    end: float
    text: str


@dataclass
class Raw:
    """A tier as it is written, and the seconds of `timed`, NaN where they are not clear."""

    tier: Tier
    timed: list[Timed] = field(default_factory=list)
    dependent: list[Dependent] = field(default_factory=list)
    places: list[tuple[float, float]] = field(default_factory=list)


class Reader:
    """What the elements of a file hold. Only an open annotation's text is kept as pieces, so a
    large file is read in little memory besides its annotations."""

    def __init__(self, path: Path):
        self.path = path
        self.slots: dict[str, float] = {}  # seconds, NaN without a value
        self.media: list[Media] = []
        self.tiers: list[Raw] = []
        self.is_document = False
        self.annotation: dict[str, str] = {}
        self.text: list[str] = []
        self.length = 0
        self.is_text = False
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self.begin
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.characters
        # Entities would be declared there: they multiply a text, or name other files.
        self.parser.StartDoctypeDeclHandler = self.refuse_doctype

    def read(self) -> dict[Key, tuple[float, float]]:
        """Reads the file; returns times of annotations. Raises `DataError` and `UsageError`."""
        try:
            with opened(self.path) as file:
                while chunk := file.read(CHUNK):
                    self.parser.Parse(chunk, False)
                    if file.tell() - self.parser.CurrentByteIndex > LONGEST_ELEMENT:
                        self.fail(f"an element has more than {LONGEST_ELEMENT >> 20} MiB")
                self.parser.Parse(b"", True)
        except expat.ExpatError as error:
            reason = expat.errors.messages[error.code]
            raise DataError(f"{self.path}:{error.lineno}: it is not sound XML: {reason}") from None
        except (LookupError, ValueError):  # of Python, which expat asks for an encoding's letters
            self.fail("its encoding is not known; save it as UTF-8")
        times = {}
        for number, raw in enumerate(self.tiers):
            known = slot_times(raw.timed, self.slots)
            for each in raw.timed:  # several may have one name
                place = known.get(each.first, math.nan), known.get(each.last, math.nan)
                raw.places.append(place)
                times[number, each.name] = place
        return times

    def fail(self, reason: str) -> None:
        raise DataError(f"{self.path}:{self.parser.CurrentLineNumber}: {reason}")

    def refuse_doctype(self, *declared) -> None:
        self.fail("it has a DOCTYPE, which ELAN does not write and which is not read")

    def begin(self, element: str, attributes: dict[str, str]) -> None:
        if not self.is_document and element != "ANNOTATION_DOCUMENT":
            self.fail(f"it is not ELAN's: it begins with <{element[:60]}>")
        self.is_document = True
        if element == "HEADER":
            units = attributes.get("TIME_UNITS", "milliseconds")
            if units != "milliseconds":
                self.fail(f"its times are in {units[:60]}; save it with a newer ELAN")
        elif element == "MEDIA_DESCRIPTOR":
            self.media.append(
                Media(
                    local_path(attributes.get("MEDIA_URL", "")),
                    local_path(attributes.get("RELATIVE_MEDIA_URL", ""), relative=True),
                    self.seconds(attributes.get("TIME_ORIGIN", "0")),
                )
            )
        elif element == "TIME_SLOT":
            name = attributes.get("TIME_SLOT_ID", "")
            value = self.seconds(attributes.get("TIME_VALUE", "nan"))
            if self.slots.setdefault(name, value) != value and not math.isnan(value):
                self.fail(f"time slot {name[:60]} has two times")
        elif element == "TIER":
            self.tiers.append(Raw(Tier(*(attributes.get(key, "") for key in TIER_KEYS))))
        elif element in ("ALIGNABLE_ANNOTATION", "REF_ANNOTATION"):
            self.annotation = attributes
            self.text = []
            self.length = 0
        self.is_text = element == "ANNOTATION_VALUE"

    def characters(self, text: str) -> None:
        if self.is_text:
            self.text.append(text)
            self.length += len(text)
            if self.length > LONGEST_TEXT:
                self.fail(f"an annotation has more than {LONGEST_TEXT} characters")

    def end(self, element: str) -> None:
        self.is_text = False
        if element not in ("ALIGNABLE_ANNOTATION", "REF_ANNOTATION"):
            return
        if not self.tiers:
            self.fail("an annotation is outside of the tiers")
        text = " ".join("".join(self.text).split())

        def values(*keys: str) -> list[str]:
            return [self.annotation.get(key, "") for key in ("ANNOTATION_ID", *keys)]

        if element == "REF_ANNOTATION":
            words = values("ANNOTATION_REF", "PREVIOUS_ANNOTATION")
            self.tiers[-1].dependent.append(Dependent(*words, text))
        else:
            words = values("TIME_SLOT_REF1", "TIME_SLOT_REF2")
            self.tiers[-1].timed.append(Timed(*words, text))

    def seconds(self, milliseconds: str) -> float:
        try:
            return float(milliseconds) / 1000
        except ValueError:
            self.fail(f"{milliseconds[:60]!r} is not a time in milliseconds")


def read(path: Path) -> Document:
    """The content of an .eaf. Raises `UsageError`, and `DataError` that names the line."""
    reader = Reader(path)
    times = reader.read()
    dependent = linked(reader.tiers)
    links = {(number, each.name): each for number, tier in enumerate(dependent) for each in tier}
    for raw, annotations in zip(reader.tiers, dependent, strict=True):
        raw.tier.annotations += (
            Annotation(*place, each.text) for each, place in zip(raw.timed, raw.places, strict=True)
        )
        for parent, text in joined(annotations, links):
            raw.tier.annotations.append(Annotation(*times.get(parent, NOWHERE), text))
    tiers = {raw.tier.name: raw.tier for raw in reader.tiers}
    for raw in reader.tiers:
        raw.tier.participant = participant(raw.tier, tiers)
    return Document([raw.tier for raw in reader.tiers], reader.media)


def segments(path: Path) -> tuple[list[tuple[Tier, list[Segment]]], list[Media]]:
    """The tiers of an .eaf with their annotations, each with its own time or that of the one that
    it depends on, NaN if others share that time; and its recordings. Errors are as in `read`."""
    reader = Reader(path)
    times = reader.read()
    dependent = linked(reader.tiers)
    parents = {
        (number, each.name): each.parent for number, tier in enumerate(dependent) for each in tier
    }
    shared = [Counter(each.parent for each in tier) for tier in dependent]
    result = []
    for number, (raw, below) in enumerate(zip(reader.tiers, dependent, strict=True)):
        found = [
            Segment(each.name, *place, each.text)
            for each, place in zip(raw.timed, raw.places, strict=True)
        ]
        for each in below:
            tier, key = number, each.parent
            for _ in range(LEVELS):
                # Also where a gloss has its word alone, but the word shares its time.
                if shared[tier][key] > 1:
                    key = NO_KEY
                if key not in parents:
                    break
                tier, key = key[0], parents[key]
            found.append(Segment(each.name, *times.get(key, NOWHERE), each.text))
        raw.tier.annotations += (Annotation(*each[1:]) for each in found)
        result.append((raw.tier, found))
    return result, reader.media


def participant(tier: Tier, tiers: dict[str, Tier]) -> str:
    """Who speaks in a tier, by the nearest of those above it that says so; "" if none does."""
    for _ in range(LEVELS):
        if tier.participant or tier.parent not in tiers:
            break
        tier = tiers[tier.parent]
    return tier.participant


def slot_times(annotations: list[Timed], slots: dict[str, float]) -> dict[str, float]:
    """The times in seconds of the slots of a tier, in the order of its annotations. Slots without a
    value divide the time between their neighbours evenly, as ELAN does; those before the first
    value and after the last one get none."""
    names = dict.fromkeys(
        itertools.chain.from_iterable((each.first, each.last) for each in annotations)
    )
    names = [name for name in names if name in slots]
    values = np.array([slots[name] for name in names])
    known = np.isfinite(values)
    if known.any():
        places = np.arange(len(names))
        values = np.interp(places, places[known], values[known], left=np.nan, right=np.nan)
    return dict(zip(names, values.tolist(), strict=True))


def linked(tiers: list[Raw]) -> list[list[Dependent]]:
    """The dependent annotations of each tier with the keys of their parents. Some programs count
    names anew in each tier: the parent is in the tier above, or it is the only one of its name."""
    numbers = {raw.tier.name: number for number, raw in enumerate(tiers)}
    counts = Counter(
        (number, each.name)
        for number, raw in enumerate(tiers)
        for each in (*raw.timed, *raw.dependent)
    )
    only: dict[str, Key] = {}
    for key in counts:
        only[key[1]] = NO_KEY if key[1] in only else key
    result = []
    for raw in tiers:
        above = numbers.get(raw.tier.parent, -1)
        result.append([])
        for each in raw.dependent:
            key = above, each.parent
            if key not in counts:
                key = only.get(each.parent, NO_KEY)
            result[-1].append(each._replace(parent=key if counts[key] == 1 else NO_KEY))
    return result


def joined(annotations: list[Dependent], links: dict[Key, Dependent]) -> list[tuple[Key, str]]:
    """The texts of a tier without times of its own, as (key of the annotation with times, text).
    All texts that depend on one are joined in their order: nobody has said when each of them
    begins. `links`: the dependent annotations of all tiers. In a circle, texts have NO_KEY."""
    result: list[tuple[Key, str]] = []
    for _ in range(LEVELS):
        children: dict[Key, list[Dependent]] = {}
        for each in annotations:
            children.setdefault(each.parent, []).append(each)
        result += ((NO_KEY, each.text) for each in children.pop(NO_KEY, []))
        annotations = []
        for parent, group in children.items():
            text = " ".join(filter(None, (each.text for each in in_order(group))))
            if parent in links:
                annotations.append(links[parent]._replace(text=text))
            else:
                result.append((parent, text))
    return result + [(NO_KEY, each.text) for each in annotations]


def in_order(group: list[Dependent]) -> list[Dependent]:
    """The annotations of a parent by their `previous`; as they stand if that leaves one out."""
    names = {each.name for each in group}
    following = {each.previous: each for each in group if each.previous in names}
    ordered = []
    for each in group:
        if each.previous in names:
            continue
        while each:
            ordered.append(each)
            each = following.pop(each.name, None)
    return ordered if len(ordered) == len(group) else group


def local_path(url: str, relative: bool = False) -> str:
    """The path in a URL of a medium: file:///C:/talk.wav, file:/talk.wav (relative), ../talk.wav.
    Some versions of ELAN write spaces as they are, others as %20: the file system decides."""
    path = re.sub(r"^file:/*", "" if relative else "/", url.replace("\\", "/"))
    return re.sub(r"^/(?=[A-Za-z]:/)", "", path)
