"""A copy of an .eaf with tiers beside those that it has. What was there stays as it is written,
byte for byte, but for the paths of media relative to the file, which another folder changes, the
number of the last annotation, from which ELAN counts on, and the names of tiers whose texts are
replaced by newer ones."""

import bisect
import codecs
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from common import files
from common.errors import DataError
from speech.data.annotations import writing
from speech.data.annotations.document import OWN_TIER

ORDER = (  # of elements in the root, by ELAN's schema
    *("LICENSE", "HEADER", "TIME_ORDER", "TIER", "LINGUISTIC_TYPE", "LOCALE", "LANGUAGE"),
    *("CONSTRAINT", "CONTROLLED_VOCABULARY", "LEXICON_REF", "REF_LINK_SET", "EXTERNAL_REF"),
)
RELATIVE = {  # attributes with paths that are relative to the file, and with absolute ones
    "MEDIA_DESCRIPTOR": ("RELATIVE_MEDIA_URL", "MEDIA_URL"),
    "LINKED_FILE_DESCRIPTOR": ("RELATIVE_LINK_URL", "LINK_URL"),
}
ENCODING = re.compile(rb"""<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)["']""")
LAST_NUMBER = re.compile(rb"(<PROPERTY\b[^>]*>\s*)\d+")
NUMBER = re.compile(r"a(\d+)")  # how ELAN calls annotations
SLOT = re.compile(r"ts(\d+)")  # and slots of time
EARLIER = "earlier {}"  # the name of a tier of utterances when there are newer ones


@dataclass(frozen=True)
class NewTier:
    """A tier to add, `name`, of a `kind` of `writing.TYPES`: `texts` of annotations of the tier
    `parent`, by their names in the file. `speaker` is the parent's."""

    name: str
    kind: str
    parent: str
    speaker: str
    texts: Sequence[tuple[str, str]]


@dataclass
class Written:
    """Where the elements of a file in UTF-8 begin, and which names it has."""

    # (element, byte, attributes) of those in the root and of RELATIVE
    starts: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)
    # (milliseconds, byte) of the slots with a time, sorted
    slots: list[tuple[float, int]] = field(default_factory=list)
    # {name: byte} of the root's end tag, and of the last end tag of each name in the root
    ends: dict[str, int] = field(default_factory=dict)
    last: int = 0  # the highest number of an annotation
    last_slot: int = 0  # and of a slot
    number: int | None = None  # the byte of the PROPERTY that has it

    def names(self, element: str, attribute: str) -> set[str]:
        return {each[2].get(attribute, "") for each in self.starts if each[0] == element}

    def place_for(self, element: str) -> int:
        """The byte where a new element goes: before those that follow it by ELAN's schema."""
        following = ORDER[ORDER.index(element) + 1 :]
        places = (start for name, start, _ in self.starts if name in following)
        return next(places, self.ends["ANNOTATION_DOCUMENT"])

    def place_for_slot(self, time: float) -> int:
        """The byte where a slot of this time goes: before the first later one."""
        later = bisect.bisect(self.slots, (time, math.inf))
        return self.slots[later][1] if later < len(self.slots) else self.ends["TIME_ORDER"]


def parsed(content: bytes) -> Written:
    """Where the elements of an .eaf in UTF-8 are. `elan.Reader` has checked the file."""
    written = Written()
    parser = expat.ParserCreate("utf-8")
    path: list[str] = []

    def begin(element: str, attributes: dict[str, str]) -> None:
        if len(path) == 1 or element in RELATIVE:
            written.starts.append((element, parser.CurrentByteIndex, attributes))
        if element == "PROPERTY" and attributes.get("NAME") == "lastUsedAnnotationId":
            written.number = parser.CurrentByteIndex
        if number := NUMBER.fullmatch(attributes.get("ANNOTATION_ID", "")):
            written.last = max(written.last, int(number[1]))
        if number := SLOT.fullmatch(attributes.get("TIME_SLOT_ID", "")):
            written.last_slot = max(written.last_slot, int(number[1]))
        if element == "TIME_SLOT" and "TIME_VALUE" in attributes:
            written.slots.append((float(attributes["TIME_VALUE"]), parser.CurrentByteIndex))
        path.append(element)

    def end(element: str) -> None:
        path.pop()
        if len(path) < 2:
            written.ends[element] = parser.CurrentByteIndex

    parser.StartElementHandler = begin
    parser.EndElementHandler = end
    parser.Parse(content, True)
    written.slots.sort()
    return written


def write(source: Path, target: Path, tiers: Sequence[NewTier]) -> None:
    """Writes the copy of `source` with these tiers to `target`, aside and then renamed. Their names
    are changed if others have them. Raises `DataError` and `OSError`."""
    content = with_tiers(source.read_bytes(), source, target, tiers)
    files.write_file(target, lambda temporary: temporary.write_bytes(content))


def with_tiers(
    content: bytes,
    source: Path,
    target: Path,
    tiers: Sequence[NewTier],
    tracks: Sequence[writing.Track] = (),
) -> bytes:
    """The `content` of the .eaf `source`, which has slots of time, with these tiers and `tracks`,
    which depend on no tier, for the path `target`. With `tracks`, tiers of utterances that are
    there become EARLIER ones."""
    declared = ENCODING.match(content.removeprefix(codecs.BOM_UTF8))
    if (declared and declared[1].lower() != b"utf-8") or not is_utf_8(content):
        raise DataError(f"{source}: its encoding is not UTF-8; save it with ELAN")
    written = parsed(content)
    changes = moved_links(content, written, source, target)
    earlier = earlier_names(written) if tracks else {}
    changes += renamed_tiers(content, written, earlier)
    slots, names = writing.time_slots(tracks, written.last_slot + 1)
    for name, time in slots:
        place = written.place_for_slot(time)
        changes.append((place, place, xml_of(writing.slot_element(name, time), 2)))
    added, last = added_elements(written, tiers, tracks, names, earlier)
    changes += (
        (written.place_for(each.tag), written.place_for(each.tag), xml_of(each)) for each in added
    )
    if written.number is not None:
        found = LAST_NUMBER.match(content, written.number)
        if found:
            changes.append((found.start(), found.end(), found[1] + str(last).encode()))
    pieces = []
    done = 0
    for start, end, new in sorted(changes, key=lambda change: change[:2]):
        pieces += content[done:start], new
        done = end
    return b"".join([*pieces, content[done:]])


def is_utf_8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def xml_of(element: ElementTree.Element, level: int = 1) -> bytes:
    """An element as ELAN indents it, with the indentation of the one after it."""
    return f"{writing.as_xml(element, level)}\n{'    ' * level}".encode()


def added_elements(
    written: Written,
    tiers: Sequence[NewTier],
    tracks: Sequence[writing.Track],
    slots: dict[tuple[int, int, int], str],
    earlier: dict[str, str],
) -> tuple[list[ElementTree.Element], int]:
    """The elements of the new tiers and tracks, of their types and constraints where they are
    missing; and the highest number of an annotation then. `slots`: of `writing.time_slots`;
    `earlier`: of `earlier_names`."""
    last = written.last
    taken = written.names("TIER", "TIER_ID") - earlier.keys() | {*earlier.values()}
    kinds = dict.fromkeys(each.kind for each in (*tiers, *tracks))
    types = {kind: type_named(written, kind) for kind in kinds}
    known = written.names("LINGUISTIC_TYPE", "LINGUISTIC_TYPE_ID")
    elements = [
        writing.type_element(name, writing.TYPES[kind])
        for kind, name in types.items()
        if name not in known
    ]
    for tier in tiers:
        name = free_name(tier.name, taken)
        taken.add(name)
        element = writing.tier_element(name, types[tier.kind], tier.parent, tier.speaker)
        for number, (parent, text) in enumerate(tier.texts, last + 1):
            writing.add_reference(element, f"a{number}", parent, writing.one_line(text))
        last += len(tier.texts)
        elements.append(element)
    for element in writing.tier_elements(tracks, slots, last + 1):
        element.set("TIER_ID", free_name(element.get("TIER_ID", ""), taken))
        element.set("LINGUISTIC_TYPE_REF", types[element.get("LINGUISTIC_TYPE_REF", "")])
        elements.append(element)
    last += sum(len(track.spans) for track in tracks)
    constraints = {writing.TYPES[kind] for kind in kinds} - {None}
    missing = constraints - written.names("CONSTRAINT", "STEREOTYPE")
    return [*elements, *map(writing.constraint_element, sorted(missing))], last


def earlier_names(written: Written) -> dict[str, str]:
    """The EARLIER names of the tiers that `writing` calls utterances."""
    taken = written.names("TIER", "TIER_ID")
    names = {}
    for name in sorted(filter(OWN_TIER.fullmatch, taken)):
        names[name] = free_name(EARLIER.format(name), taken)
        taken.add(names[name])
    return names


def renamed_tiers(
    content: bytes, written: Written, names: dict[str, str]
) -> list[tuple[int, int, bytes]]:
    """(start, end, new bytes) where tiers get other `names`."""
    return [
        new_value(content, start, key, names[attributes[key]])
        for element, start, attributes in written.starts
        for key in ("TIER_ID", "PARENT_REF")
        if element == "TIER" and attributes.get(key) in names
    ]


def type_named(written: Written, kind: str) -> str:
    """A type for tiers of a `kind`: that of the file if it has the same constraint."""
    own = {
        (attributes.get("LINGUISTIC_TYPE_ID"), attributes.get("CONSTRAINTS"))
        for element, _, attributes in written.starts
        if element == "LINGUISTIC_TYPE"
    }
    if (kind, writing.TYPES[kind]) in own:
        return kind
    return free_name(kind, written.names("LINGUISTIC_TYPE", "LINGUISTIC_TYPE_ID"))


def free_name(name: str, taken: set[str]) -> str:
    """`name`, with a number if it is taken."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


# --- media ----------------------------------------------------------------------------------------


def moved_links(
    content: bytes, written: Written, source: Path, target: Path
) -> list[tuple[int, int, bytes]]:
    """(start, end, new bytes) of the relative paths of media, as seen from the copy's folder."""
    changes = []
    for element, start, attributes in written.starts:
        if element not in RELATIVE:
            continue
        relative, absolute = RELATIVE[element]
        medium = medium_at(source, attributes.get(relative, ""), attributes.get(absolute, ""))
        url = writing.relative_url(medium, target) if medium else None
        if url is None or url == attributes.get(relative):
            continue
        if relative in attributes:
            changes.append(new_value(content, start, relative, url))
        else:
            place = start + len(f"<{element}")
            changes.append((place, place, f" {relative}={quoteattr(url)}".encode()))
    return changes


def new_value(content: bytes, start: int, attribute: str, text: str) -> tuple[int, int, bytes]:
    """(start, end, new bytes) of an attribute of the element that begins at the byte `start`."""
    value = re.compile(rb"\b" + attribute.encode() + rb"""\s*=\s*("[^"]*"|'[^']*')""")
    found = value.search(content, start)
    return found.start(), found.end(), f"{attribute}={quoteattr(text)}".encode()


def medium_at(source: Path, relative: str, absolute: str) -> Path | None:
    """The file that a relative path, or the name of an absolute one, is beside `source`."""
    names = [relative.removeprefix("file:"), absolute.replace("\\", "/").split("/")[-1]]
    for name in filter(None, names):
        for written in (name, unquote(name)):
            path = Path(os.path.normpath(source.parent / written))
            if path.is_file():
                return path
    return None
