"""Characters of texts that a vocabulary cannot write."""

import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable

from common.errors import DataError
from speech.data.columns import Corpus

MOST = 0.05  # of the characters, above which a set is refused
# Up to here some characters are only warned about: capitals and punctuation, of which sentences do
# not have more (the whole text is in capitals), and rare ones in a small evaluation set.
MOST_TOLERATED = 0.2
NAMED = 20  # characters in a message
MOST_ADDED = 100  # characters in a flag; a script with more asks for another vocabulary

Lacking = Callable[[str], Iterable[str]]


def outside(characters: Iterable[str]) -> Lacking:
    """`lacking` of `check_unknown` for a vocabulary of single characters."""
    known = set(characters)

    def lacking(text: str) -> list[str]:
        if known.issuperset(text):  # almost always
            return []
        return [character for character in text if character not in known]

    return lacking


def not_encoded(tokenizer) -> Lacking:
    """`lacking` of `check_unknown` for a tokenizer with `encode` and the id `unknown`."""
    known: set[str] = set()
    unknown: set[str] = set()

    def lacking(text: str) -> list[str]:
        if known.issuperset(text):  # almost always
            return []
        for character in set(text) - known - unknown:
            is_unknown = tokenizer.unknown in tokenizer.encode(character)
            (unknown if is_unknown else known).add(character)
        # A character without a piece of its own can be a part of longer ones.
        if tokenizer.unknown not in tokenizer.encode(text):
            return []
        return [character for character in text if character in unknown]

    return lacking


def check_unknown(
    corpora: dict[str, Corpus],
    lacking: Lacking,
    allow: bool,
    advice: str = "",
    is_own: bool = False,
    adds: Callable[[Counter[str]], str] | None = None,
) -> None:
    """Prints which characters of each set the vocabulary cannot write, with their counts.
    `lacking(text)` returns those of a text, repeated ones as often as they occur.

    Raises `DataError` if they are more than `MOST` of a set's characters, unless `allow`; `advice`
    says what else can be done. Spaces, punctuation, and capitals whose small letter can be written
    (or the reverse) are only named, unless they and the others are more than `MOST_TOLERATED`. That
    limit also holds for evaluation sets if the vocabulary `is_own`, made from the training texts of
    the run. `adds(counts)` returns the command that adds the characters of the training texts to
    the vocabulary, "" if there is none."""
    for name, corpus in corpora.items():
        if not len(corpus) or not corpus.paths[0]:  # a stand-in's texts are made up
            continue
        counts: Counter[str] = Counter()
        total = 0
        for text in corpus.texts:
            total += len(text) - text.count(" ")
            counts.update(lacking(text))
        if not counts:
            continue
        missing = sum(count for c, count in counts.items() if not c.isspace())
        letters = sum(count for c, count in counts.items() if not _is_style(c, lacking))
        share = missing / max(1, total)
        print(
            f"warning: {name} set: {_share(share)} of the characters are outside the vocabulary:"
            f" {named(counts)}"
        )
        if adds and name == "train" and (command := adds(counts)):
            print(f"to add them to the vocabulary: {command}")
        is_tolerant = is_own and name != "train"
        has_many = letters > MOST * total and not is_tolerant
        if not allow and (has_many or share > MOST_TOLERATED):
            raise DataError(
                f"{name} set: the vocabulary cannot write {_share(share)} of the characters"
                f" ({named(counts, 5)}): {advice or 'correct the texts'}, or add --allow_unknown to"
                " use them as they are"
            )


def note_rewritten(corpora: dict[str, Corpus], tokenizer) -> None:
    """Prints which characters of each set a tokenizer with `encode`, `decode` and the id `unknown`
    writes in another way, as the normalisation of a SentencePiece model does: ʰ as h."""
    as_they_are: set[str] = {" "}
    written: dict[str, str] = {}
    for name, corpus in corpora.items():
        counts: Counter[str] = Counter()
        for text in corpus.texts:
            if as_they_are.issuperset(text):  # almost always
                continue
            for character in set(text) - as_they_are - written.keys():
                tokens = tokenizer.encode(character)
                after = tokenizer.decode(tokens).strip()
                if tokenizer.unknown in tokens or after == character:
                    as_they_are.add(character)
                else:
                    written[character] = after
            counts.update(character for character in text if character in written)
        if counts and corpus.paths[0]:  # a stand-in's texts are made up
            shown_as = [
                f"{shown(character)} as {written[character] or 'nothing'} x {count:,}"
                for character, count in counts.most_common(NAMED)
            ]
            print(
                f"warning: {name} set: {len(counts)} characters are read in another way by the"
                f" vocabulary: {', '.join(shown_as)}"
            )


def as_value(counts: Counter[str]) -> str:
    """Characters as the value of a flag for a shell; "" if they are none, or too many."""
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    ordered = [character for character in ordered if not character.isspace()]
    value = " ".join(ordered)
    if not 0 < len(ordered) <= MOST_ADDED:
        return ""
    return shlex.quote(value) if set('"$`\\!') & set(value) else f'"{value}"'


def shown(character: str) -> str:
    """A character for a message, by its Unicode name if it cannot be seen alone."""
    if unicodedata.category(character)[0] in "CMZ":
        name = unicodedata.name(character, "")
        return f"U+{ord(character):04X} {name}".rstrip()
    return character


def named(counts: Counter[str], most: int = NAMED, show: Callable[[str], str] = shown) -> str:
    """Characters, or what else `show` writes, with their counts, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [f"{show(each)} x {count:,}" for each, count in ordered[:most]]
    if len(ordered) > most:
        parts.append(f"{len(ordered) - most:,} others")
    return ", ".join(parts)


def _is_style(character: str, lacking: Lacking) -> bool:
    """Whether a character is a space, punctuation, or one whose other case can be written."""
    if character.isspace() or unicodedata.category(character)[0] == "P":
        return True
    other = character.swapcase()
    return other != character and not any(lacking(other))


def _share(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 else f"{100 * share:.1g} %"
