"""What becomes of texts before anything is learned from them: the characters that are left out or
replaced are counted."""

import unicodedata
from collections import Counter
from collections.abc import Callable

from speech.data.columns import printable
from speech.writing.unknown import named

SHOWN = 60  # characters of an example


class Changes:
    """The function `change` on texts, as one that counts what it changes. Spaces, and the ways in
    which Unicode composes the same letter, are no changes."""

    def __init__(self, change: Callable[[str], str]):
        self.change = change
        self.total = 0
        self.changed = 0
        self.lost: Counter[str] = Counter()
        self.recased = 0  # letters in another case
        self.example: tuple[str, str] | None = None

    def __call__(self, text: str) -> str:
        after = self.change(text)
        self.total += 1
        if after != text:
            self._note(" ".join(unicodedata.normalize("NFC", text).split()), after)
        return after

    def _note(self, before: str, after: str) -> None:
        if before == after:
            return
        self.changed += 1
        lost = Counter(before) - Counter(after)
        gained = Counter(after) - Counter(before)
        lost.pop(" ", None)
        for character in [each for each in lost if each.swapcase() in gained]:
            self.recased += lost.pop(character)
        if lost and not self.lost:
            self.example = before, after
        self.lost += lost
        self.example = self.example or (before, after)

    def report(self) -> str:
        """What was changed in how many of the texts, with an example; "" if nothing was."""
        if not self.changed:
            return ""
        done = []
        if self.lost:
            done.append(f"left out or replaced: {named(self.lost)}")
        if self.recased:
            done.append(f"letters in the other case x {self.recased:,}")
        pairs = enumerate(zip(*self.example, strict=False))
        differs = next((place for place, (a, b) in pairs if a != b), 0)
        first = max(0, differs - SHOWN // 3)
        before, after = (printable(text[first : first + SHOWN]) for text in self.example)
        return (
            f"texts: {self.changed:,} of {self.total:,} are changed before they are used;"
            f" {'; '.join([*done, f'`{before}` becomes `{after}`'])}"
        )
