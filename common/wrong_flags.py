"""Flags that do not exist or are written in another way: the hints in argparse's messages."""

import argparse
import difflib
import os
import re

EXPLICIT = re.compile(
    r"argument (--\w+)[^:]*: (?:ignored explicit argument|invalid choice:) '(\w+)'"
)
OFF = {"false", "0", "no", "off"}  # the value of an on/off flag in other projects
ON = {"true", "1", "yes", "on"}
DASHES = "–—"  # which a word processor makes of two hyphens
NO_VALUE = "; on/off flags take no value"

Flags = dict[str, argparse.Action]  # by every name that a flag has


def hint(message: str, flags: Flags, hints: dict[str, str]) -> str:
    """What is added to a message of argparse, or "". `hints`: for flags that do not exist."""
    if message.startswith("unrecognized arguments:"):
        words = message.split(": ", 1)[1].split()
        if not words:
            return (
                "; a word is empty: a variable of the shell that is not set, or a space behind the"
                " backslash at the end of a line"
            )
        unknown = next((word for word in words if word.startswith("-")), "")
        return of_unknown(unknown, flags, hints) if unknown else of_word(words[0])
    if found := EXPLICIT.match(message):
        if name := off(found[1], found[2], flags):
            return f"; did you mean {name}?"
        return NO_VALUE if "ignored" in message else ""
    return ""


def of_unknown(word: str, flags: Flags, hints: dict[str, str]) -> str:
    """The hint for a flag that does not exist, with or without a value: `--x=value`."""
    unknown, _, value = word.partition("=")
    if unknown in hints:
        return f"; {hints[unknown]}"
    near = [flag for flag in flags if flag.startswith(unknown)]
    near = near or difflib.get_close_matches(unknown, flags, n=1, cutoff=0.6)
    if not near:
        return ""
    return f"; did you mean {off(near[0], value, flags) or near[0]}?"


def of_word(word: str) -> str:
    """The hint for a word that no flag takes."""
    if word[0] in DASHES:
        return f"; write two hyphens: --{word.lstrip(DASHES)}"
    if word.lower() in OFF | ON:
        return NO_VALUE
    if os.path.exists(word):
        return "; a pattern of files needs quotes, as in 'files/*.eaf', and one file its flag"
    return (
        "; a name with spaces needs quotes, as in 'my tapes/a.csv'; TIER and SIZE stand before all"
        " flags, after a run_*.sh script only"
    )


def off(flag: str, value: str, flags: Flags) -> str:
    """The flag that switches off what `flag` switches on, if `value` is one of `OFF`; else ""."""
    action = flags.get(flag)
    if action is None or value.lower() not in OFF:
        return ""
    names = [
        name
        for name, other in flags.items()
        if other.dest == action.dest and name.startswith("--no_")
    ]
    return min(names, key=len, default="")
