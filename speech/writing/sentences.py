"""Texts cut into sentences and, where these are too long, into parts of them."""

import re
from collections.abc import Callable

from common.errors import UsageError

# A text is cut after ends of sentences, after commas and between words. Marks and quotes that
# follow stay with what they end. Marks within 3.5, 1,000 and 12:30 do not count, nor does a full
# stop after a letter that is alone (z. B.) or a number of one or two digits (3. Oktober). Two
# Ethiopic word spaces or two colons are often typed for ።.
ALONE = r"(?<!\b[A-Za-z])(?<!(?<![\w:.,/])\d)(?<!(?<![\w:.,/])\d\d)"
END = rf"(?:[።፧፨!?…؟।。！？]|፡፡|::|(?<!\.){ALONE}\.+(?![\w.]))"
CUTS = tuple(
    re.compile(pattern)
    for pattern in (
        END + r"""(?:["')\]»”’]|\s*(?:""" + END + r"|[)\]»”’]))*\s*",
        r"""(?:[፣፤፥፦،؛，、；：–—]|[,;:](?!\w))+["')\]»”’]*\s*""",
        r"[\s፡]+",
    )
)


def split_sentences(text: str, most_tokens: int, count: Callable[[str], int]) -> list[str]:
    """The sentences of `text`. One with more than `most_tokens`, as `count(piece)` says, is cut
    after commas, else between words, else within a word, into pieces as long as possible. Nothing
    but white space is changed or lost. Raises `UsageError` if a character is too long."""
    pieces = []
    for sentence in _cut(CUTS[0], " ".join(text.split())):
        pieces += _fit(sentence, most_tokens, count, CUTS[1:])
    return [piece.strip() for piece in pieces if piece.strip()]


def _cut(pattern: re.Pattern, text: str) -> list[str]:
    """The parts of `text`, each with at least a letter or a digit if `text` has any."""
    parts = []
    begin = 0  # of the next part
    searched = 0
    for match in pattern.finditer(text):
        if re.search(r"\w", text[searched : match.end()]):
            parts.append(text[begin : match.end()])
            begin = match.end()
        searched = match.end()
    if not parts or re.search(r"\w", text[begin:]):
        return [*parts, text[begin:]]
    return [*parts[:-1], parts[-1] + text[begin:]]


def _fit(
    text: str, most_tokens: int, count: Callable[[str], int], cuts: tuple[re.Pattern, ...]
) -> list[str]:
    """Pieces of `text` that are as long as `most_tokens` allow, cut by the coarsest of `cuts`."""
    if count(text.strip()) <= most_tokens:
        return [text]
    if len(text) == 1:
        raise UsageError(
            f"the character {text!r} has more than {most_tokens} tokens: use another vocabulary"
        )
    pieces = []
    piece = ""
    for part in _cut(cuts[0], text) if cuts else text:
        if count((piece + part).strip()) <= most_tokens:
            piece += part
            continue
        if piece:
            pieces.append(piece)
        *rest, piece = _fit(part, most_tokens, count, cuts[1:])
        pieces += rest
    return [*pieces, piece]
