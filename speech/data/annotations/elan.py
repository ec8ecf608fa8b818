"""ELAN's .eaf: tiers in XML, whose annotations have times or those of the annotations that they
depend on."""

import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

import numpy as np

from common.errors import DataError
from speech.data.annotations.document import (
    Annotation,
    Document,
    Media,
    Tier,
    opened,
)

TIER_KEYS = ("TIER_ID", "PARTICIPANT", "PARENT_REF", "LINGUISTIC_TYPE_REF")  # as in `Tier`
LEVELS = 50  # of tiers that depend on each other, at most
LONGEST_TEXT = 1 << 20  # characters of an annotation, more than anyone says


class Timed(NamedTuple):
    """An annotation between two time slots."""

    name: str
    first: str
    last: str
    text: str


class Dependent(NamedTuple):
    """An annotation with the times of its `parent`. It follows `previous`, "" for the first one of
    a parent."""

    name: str
    parent: str
    previous: str
    text: str


@dataclass
class Raw:
    """A tier as it is written."""

    tier: Tier
    timed: list[Timed] = field(default_factory=list)
    dependent: list[Dependent] = field(default_factory=list)


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

    def read(self) -> None:
        """Reads the file. Raises `DataError` and `UsageError`."""
        try:
            with opened(self.path) as file:
                self.parser.ParseFile(file)
        except expat.ExpatError as error:
            reason = expat.errors.messages[error.code]
            raise DataError(f"{self.path}:{error.lineno}: it is not sound XML: {reason}") from None

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
                    attributes.get("MEDIA_URL", ""),
                    attributes.get("RELATIVE_MEDIA_URL", ""),
                    self.seconds(attributes.get("TIME_ORIGIN", "0")),
                )
            )
        elif element == "TIME_SLOT":
            value = self.seconds(attributes.get("TIME_VALUE", "nan"))
            self.slots[attributes.get("TIME_SLOT_ID", "")] = value
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
    """The content of an .eaf. Raises `UsageError`, and `DataError` that names the line if it is
    damaged or not ELAN's."""
    reader = Reader(path)
    reader.read()
    times: dict[str, tuple[float, float]] = {}  # of annotations, by their names
    for raw in reader.tiers:
        places = slot_times(raw.timed, reader.slots)
        for each in raw.timed:
            start, end = places.get(each.first, math.nan), places.get(each.last, math.nan)
            times[each.name] = start, end
            raw.tier.annotations.append(Annotation(start, end, each.text))
    links = {each.name: each for raw in reader.tiers for each in raw.dependent}
    for raw in reader.tiers:
        for parent, text in joined(path, raw.dependent, links).items():
            start, end = times.get(parent, (math.nan, math.nan))
            raw.tier.annotations.append(Annotation(start, end, text))
    tiers = {raw.tier.name: raw.tier for raw in reader.tiers}
    for tier in tiers.values():
        tier.participant = participant(tier, tiers)
    media = [
        Media(local_path(url), local_path(relative, relative=True), origin)
        for url, relative, origin in reader.media
    ]
    return Document([raw.tier for raw in reader.tiers], media)


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


def joined(path: Path, annotations: list[Dependent], links: dict[str, Dependent]) -> dict[str, str]:
    """{name of an annotation with times: text} of a tier without times of its own. All texts that
    depend on one are joined in their order: nobody has said when each of them begins. `links`: the
    dependent annotations of all tiers, by their names."""
    result: dict[str, str] = {}
    texts = {each.name: each for each in annotations}
    for _ in range(LEVELS):
        if not texts:
            return result
        children: dict[str, list[Dependent]] = {}
        for each in texts.values():
            children.setdefault(each.parent, []).append(each)
        texts = {}
        for parent, group in children.items():
            text = " ".join(filter(None, (each.text for each in in_order(group))))
            if parent in links:
                texts[parent] = links[parent]._replace(text=text)
            else:
                result[parent] = text
    raise DataError(f"{path}: annotations depend on each other in a circle")


def in_order(group: list[Dependent]) -> list[Dependent]:
    """The annotations of one parent as each follows its `previous`; as they stand if that leaves
    one out."""
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
