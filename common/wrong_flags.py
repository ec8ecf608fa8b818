"""Flags that do not exist or are written in another way: the hints in argparse's messages."""

import difflib
import os
from collections.abc import Iterable

VALUES = "false 0 no off true 1 yes on".split()  # of an on/off flag in other projects
DASHES = "–—"  # which a word processor makes of two hyphens
NO_VALUE = "; on/off flags take no value: --x or --no_x"


def hint(message: str, flags: Iterable[str], hints: dict[str, str]) -> str:
    """What is added to a message of argparse, or "". `hints`: for flags that do not exist."""
    if "ignored explicit argument" in message:
        return NO_VALUE
    if not message.startswith("unrecognized arguments:"):
        return ""
    words = message.split(": ", 1)[1].split()
    if not words:
        return (
            "; a word is empty: a variable of the shell that is not set, or a space behind the"
            " backslash at the end of a line"
        )
    unknown = next((word for word in words if word.startswith("-")), "").partition("=")[0]
    if not unknown:
        return of_word(words[0])
    if unknown in hints:
        return f"; {hints[unknown]}"
    near = [flag for flag in flags if flag.startswith(unknown)]
    near = near or difflib.get_close_matches(unknown, flags, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def of_word(word: str) -> str:
    """The hint for a word that no flag takes."""
    if word[0] in DASHES:
        return f"; write two hyphens: --{word.lstrip(DASHES)}"
    if word.lower() in VALUES:
        return NO_VALUE
    if os.path.exists(word):
        return "; a pattern of files needs quotes, as in 'files/*.eaf', and one file its flag"
    return (
        "; a name with spaces needs quotes, as in 'my tapes/a.csv'; TIER and SIZE stand before all"
        " flags, after a run_*.sh script only"
    )
