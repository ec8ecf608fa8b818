"""Pairs as rows of a manifest: recordings, each with its text in a file of the same name beside it,
as Elpis and the Montreal Forced Aligner have them."""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from common.errors import UsageError
from speech.data.annotations.rows import is_annotations
from speech.data.columns import Rejections
from speech.data.finding import TABLES, comparable, listed, matching

SUFFIXES = (".txt", ".lab")
# Control characters, as UTF-16 has them, and what the decoder makes of bytes that are not UTF-8.
NOT_UTF8 = re.compile("[\0-\x08\udc80-\udcff]")
LABEL = re.compile(r"\s*\d+(\.\d+)?\s+\d+(\.\d+)?\s+\S")  # start, end, word
ZEROS = ("0", "0.0", "0.000000")  # where the first label begins
TEXT_BYTES = 1 << 20  # of the text of a recording, at most


def texts_of(name: str) -> list[Path]:
    """The texts beside audio that a folder, with those below it, or a pattern of their names stands
    for, sorted; [] for other names and patterns. Raises `UsageError` for a folder without pairs or
    with a table."""
    if os.path.isdir(name):
        inside = [Path(place, each) for place, _, names in os.walk(name) for each in names]
        texts = sorted(
            path for path in inside if path.suffix.lower() in SUFFIXES and path.is_file()
        )
        if not any(audio for _, audio in paired(texts, None)):
            raise UsageError(
                f"manifest {name}: it is a folder; name a table in it or, of files of annotations, a"
                f" pattern in quotes such as '{name}/*.eaf'; or put each text as a.txt or a.lab"
                f" beside a.wav, or name texts of another ending by a pattern"
            )
        tables = sorted(path for path in inside if path.suffix.lower() in TABLES)
        if tables:
            raise UsageError(
                f"manifest {name}: it has pairs of audio and text, and {tables[0].name}: name the"
                f" table, or a pattern of the texts in quotes, such as '{name}/*{texts[0].suffix}'"
            )
        return texts
    texts = [*filter(Path.is_file, matching(Path(name)) or [])]
    if any(map(is_annotations, texts)) or not any(audio for _, audio in paired(texts, None)):
        return []
    return texts


def paired(texts: list[Path], audio_root: str | None) -> Iterator[tuple[Path, list[str]]]:
    """Each text with the audio of its name: a.wav of a.lab, and also of a.clean.txt."""
    listing = functools.cache(listed)
    for text in texts:
        stems = listing((audio_root or str(text.parent),)).stems
        parts = text.name.split(".")
        names = [comparable(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1)]
        yield text, next((stems[name] for name in names if name in stems), [])


def has_times(content: str) -> bool:
    """Whether every line begins with two numbers, from 0 on or after a line with "#"."""
    lines = content.strip().splitlines()
    has_head = content.startswith("#")
    labels = lines[1:] if has_head else lines
    begins = has_head or (bool(labels) and labels[0].split()[0] in ZEROS)
    return bool(labels) and begins and all(map(LABEL.match, labels))


def paired_rows(
    name: str, texts: list[Path], audio_root: str | None, rejected: Rejections
) -> Iterator[tuple[int, dict]]:
    """(number from 1 on, row) of each of `texts_of(name)` with its audio. Other texts, and audio
    without a text in a folder, are added to `rejected`. Two texts of a recording raise
    `UsageError`."""
    text_of: dict[str, Path] = {}
    for number, (text, audio) in enumerate(paired(texts, audio_root), 1):
        if is_annotations(text):
            rejected.add("file of annotations among pairs (name it by a pattern)", str(text))
        elif not audio:
            rejected.add("text has no audio of its name beside it", str(text))
        elif len(audio) > 1:
            rejected.add("several audio files have the name of the text", ", ".join(audio))
        elif audio[0] in text_of:
            raise UsageError(
                f"manifest {name}: which is the text of {audio[0]}: {text_of[audio[0]].name} or"
                f" {text.name}? Name such texts by a pattern, '{text.parent}/*{text.suffix}'"
            )
        else:
            text_of[audio[0]] = text
            content = text.read_bytes()[: TEXT_BYTES + 1].decode("utf-8-sig", "surrogateescape")
            if NOT_UTF8.search(content):
                rejected.add("text is not UTF-8: save it as UTF-8", str(text))
            elif has_times(content):
                rejected.add(
                    "text has times in it (labels of HTK or TIMIT): keep the words", str(text)
                )
            else:
                yield number, {"audio_filepath": os.path.abspath(audio[0]), "text": content}
    rejected.source = f"{len(text_of)} pairs of audio and text"
    if os.path.isdir(name) and not audio_root:
        stems = listed([place for place, *_ in os.walk(name)]).stems
        for audio in sorted({path for paths in stems.values() for path in paths} - text_of.keys()):
            rejected.add("audio has no text beside it", audio)
