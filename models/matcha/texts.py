"""Texts and speakers of a voice: what is read of each text, and what the voice lacks.

`info` stands for a `ModelInfo` of start.py."""

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from common.errors import DataError, UsageError
from models.matcha.decoding import Voice
from models.matcha.tokenizer import read
from speech.data.columns import Corpus, Strings, printable
from speech.writing import languages, reading
from speech.writing.reading import code_of
from speech.writing.unknown import check_unknown, named, outside

NEW_VOICE = "start a new voice with another --output_dir, from these weights by --init_from"


def read_corpora(corpora: dict[str, Corpus], language: str) -> None:
    """Puts what the voice reads of each text into the corpora. Says in which language, and warns of
    letters that are left out then, and of rows that name another language."""
    print(f"language of the texts: {languages.described(language)}")
    read_here = functools.partial(read, language=language)
    for name, corpus in corpora.items():
        corpus.read = Strings(map(read_here, corpus.texts))
        reading.warn_left_out(name, corpus.texts, read_here, language)
        others = Counter(told for told in corpus.languages if told and code_of(told) != language)
        if others:
            print(f"warning: {name} set: rows name other languages: {dict(others)}")
        speakers = Counter(corpus.speakers)
        if 0 < speakers[""] < len(corpus):
            print(
                f"warning: {name} set: {speakers['']} clips name no speaker: they are taken for one"
                " of their own; fill in the cells of the column"
            )


def speakers_of(corpus: Corpus) -> list[str]:
    """The names of the speakers, those who speak most first."""
    seconds = corpus.seconds_by(corpus.speakers)
    return sorted(seconds, key=lambda name: (-seconds[name], name))


def speaker_numbers(corpus: Corpus, speakers: list[str]) -> np.ndarray:
    """(N,) the row of each utterance's speaker; the first one's for a speaker who is not known."""
    rows = {name: number for number, name in enumerate(speakers)}
    return np.array([rows.get(name, 0) for name in corpus.speakers])


def speaker_of(name: str | None, info) -> int:
    """The row of the speaker of --speaker. Raises `UsageError`."""
    if name is None:
        return 0
    if name not in info.speakers:
        raise UsageError(f"--speaker {name[:40]}: the voice has {listed(info.speakers)}")
    return info.speakers.index(name)


def check_known(corpora: dict[str, Corpus], info, allow_unknown: bool) -> None:
    """Prints which characters of each set the voice lacks, and how many clips are of other
    speakers. Raises `DataError` if characters are many, or if the training set has another
    speaker."""
    texts = {name: replace(corpus, texts=corpus.read) for name, corpus in corpora.items()}
    check_unknown(texts, outside(info.symbols), allow_unknown, NEW_VOICE, is_own=True)
    for name, corpus in corpora.items():
        clips = Counter(corpus.speakers)
        others = sorted(clips.keys() - {*info.speakers})
        # The one speaker of a voice may have another name now; a stand-in's has none.
        if not others or len(info.speakers) == len(clips) == 1 or not corpus.paths[0]:
            continue
        count = sum(clips[speaker] for speaker in others)
        problem = f"{name} set: the voice lacks the speakers of {count} clips: {listed(others)}"
        if name == "train":
            raise DataError(f"{problem}; {NEW_VOICE}")
        print(f"warning: {problem}; they are taken for the one who spoke most")


def listed(speakers: Sequence[str]) -> str:
    """Names of speakers for a message."""
    return ", ".join(printable(name) or "(without a name)" for name in speakers[:20])


def check_texts(texts: Iterable[str], voice: Voice) -> None:
    """Raises `UsageError` for a text of --synthesize that the voice cannot read, and warns of
    characters that it lacks."""
    for text in texts:
        heard = read(text, voice.language)
        if problem := reading.fault(heard, voice.language):
            raise UsageError(f"--synthesize {text[:40]!r}: {': '.join(problem)}")
        lacking = Counter(outside(voice.tokens.numbers)(heard))
        if not any(c.isalnum() for c in heard if c not in lacking):
            letters = "".join(token for token in voice.tokens.numbers if token.isalnum())
            raise UsageError(
                f"--synthesize {text[:40]!r}: the voice has none of its letters, but {letters[:60]}"
            )
        if lacking:
            print(f"warning: {text[:40]!r}: the voice lacks {named(lacking)}", file=sys.stderr)
