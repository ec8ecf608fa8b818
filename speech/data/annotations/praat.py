"""Praat's .TextGrid, in its long and in its short form."""

import re
from collections.abc import Iterator
from pathlib import Path

from common.errors import DataError
from speech.data.annotations.document import Annotation, Document, Tier, opened, read_text

# Praat reads free-standing numbers and quoted texts, in which a quote is doubled; everything else,
# such as `intervals [3]:` and `xmin =`, explains them to people. A quote alone is not closed.
TOKEN = re.compile(r'"([^"]*(?:""[^"]*)*)"|(")|!.*|[^\s"]+')
BINARY = b"ooBinaryFile"
NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?", re.ASCII)
SAVE_AS_TEXT = "save it in Praat as a text file or a short text file"
SAVE_AS_UTF_8 = f"{SAVE_AS_TEXT}, with UTF-8 in its text writing preferences"


class Values:
    """The numbers and texts of a file, one after another."""

    def __init__(self, path: Path, content: str):
        self.path = path
        self.content = content
        self.position = 0
        self.values = self._values()

    def _values(self) -> Iterator[str | float]:
        for token in TOKEN.finditer(self.content):
            self.position = token.start()
            if token[1] is not None:
                yield token[1].replace('""', '"')
            elif token[2]:
                self.fail("a quote is not closed")
            elif NUMBER.fullmatch(token[0]):
                yield float(token[0])
        self.position = len(self.content)

    def fail(self, reason: str) -> None:
        line = self.content.count("\n", 0, self.position) + 1
        raise DataError(f"{self.path}:{line}: {reason}")

    def text(self, name: str) -> str:
        value = next(self.values, None)
        if not isinstance(value, str):
            self.missing(name, value)
        return value

    def number(self, name: str) -> float:
        value = next(self.values, None)
        if not isinstance(value, float):
            self.missing(name, value)
        return value

    def missing(self, name: str, value: str | float | None) -> None:
        found = "the end of the file" if value is None else repr(value)[:60]
        self.fail(f"{name} is missing, here is {found}")


def read(path: Path) -> Document:
    """The tiers of a .TextGrid. Raises `UsageError`, and `DataError` that names the line."""
    with opened(path) as file:
        if file.read(len(BINARY)) == BINARY:
            raise DataError(f"{path}: it is a binary TextGrid; {SAVE_AS_TEXT}")
    values = Values(path, read_text(path, SAVE_AS_UTF_8))
    if not str(next(values.values, "")).startswith("ooTextFile"):
        values.fail(f"it is not a TextGrid; {SAVE_AS_TEXT}")
    kind = values.text("the object class")
    if not kind.startswith("TextGrid"):
        values.fail(f"it is a {kind[:60]} and not a TextGrid")
    values.number("the start")
    values.number("the end")
    tiers = [read_tier(values) for _ in range(count(values, "the number of tiers"))]
    more = next(values.values, None)
    if more is not None:
        values.fail(f"there is more than the sizes before it say: {str(more)[:60]}")
    return Document(tiers)


def read_tier(values: Values) -> Tier:
    kind = values.text("the class of a tier")
    if kind not in ("IntervalTier", "TextTier"):
        values.fail(f"{kind[:60]!r} is not a kind of tier")
    tier = Tier(values.text("the name of a tier"))
    values.number("the start of a tier")
    values.number("the end of a tier")
    for _ in range(count(values, "the number of intervals or points")):
        start = values.number("a time")
        if kind == "TextTier":
            values.text("a point's text")
            tier.points += 1
        else:
            end = values.number("an end")
            text = " ".join(values.text("an interval's text").split())
            tier.annotations.append(Annotation(start, end, text))
    return tier


def count(values: Values, name: str) -> int:
    number = values.number(name)
    if number < 0 or not number.is_integer():
        values.fail(f"{name} is {number:g}")
    return int(number)
