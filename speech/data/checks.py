"""Checks of the speech that a TTS model learns from: rates, speakers, what training and evaluation
share."""

import os
import unicodedata
from collections.abc import Callable, Iterator

import numpy as np

from speech.data.columns import Corpus, Rejections, report_rejections

RATED_CLIPS = 20  # of a speaker, at least: fewer do not say how fast the speaker talks
DEVIATIONS = 3.0  # from the median, at most
NORMAL = 1.4826  # standard deviations in a median absolute deviation of normal data
# Of the logarithm of a rate: otherwise clips of a very even speaker would be rejected.
LEAST_DEVIATION = 0.15
SHORT_CLIP = 2.0  # seconds
SHORT_TOLERANCE = 2.0  # rates of short clips vary about twice as much
LITTLE_SPEECH = 6.0  # seconds of a speaker: less does not define a voice
LITTLE_DATA = 180.0  # seconds of a training set

Fault = Callable[[Corpus, int], tuple[str, str] | None]  # (reason, details) to reject an utterance


def check_speech(
    sets: dict[str, Corpus], strict: bool, fault: Fault | None = None
) -> dict[str, Corpus]:
    """The sets without the utterances that harm the training of a TTS model: those that
    `fault(corpus, index)` rejects with (reason, details), those spoken much faster or slower than
    their speaker's others, and in "train" speakers with hardly any speech. Prints a table for each
    set and a description of "train". Raises `DataError` if a set is empty then, or if `strict` and
    anything was rejected."""
    tables = {name: Rejections() for name in sets}
    checked = {}
    for name, corpus in sets.items():
        problems: dict[int, tuple[str, str]] = {}
        if fault:
            for index in range(len(corpus)):
                problem = fault(corpus, index)
                if problem:
                    problems[index] = problem
        problems = speaking_rate(corpus) | problems
        corpus = _without(corpus, problems, tables[name])
        if name == "train":
            corpus = _without(corpus, little_speech(corpus), tables[name])
        checked[name] = corpus
    if "train" in checked:
        for name in checked.keys() & {"val", "test"}:
            overlap(checked["train"], checked[name], tables[name])
    for name, corpus in checked.items():
        if tables[name].total or tables[name].notes:
            report_rejections(
                f"{name} set, checked as speech", corpus.seconds, tables[name], strict
            )
    if "train" in checked:
        describe(checked["train"])
    return checked


def _without(corpus: Corpus, problems: dict[int, tuple[str, str]], rejected: Rejections) -> Corpus:
    """The corpus without the utterances in `problems`, which are added to `rejected`."""
    for index in sorted(problems):
        reason, details = problems[index]
        rejected.add(reason, f"{corpus.where(index)}: {details}")
    if not problems:
        return corpus
    return corpus.select(np.setdiff1d(np.arange(len(corpus)), list(problems)))


def letters(text: str) -> int:
    """The number of letters and marks in a text."""
    return sum(unicodedata.category(character)[0] in "LM" for character in text)


def script(text: str) -> str:
    """The script of the first letter of a text, by its name in Unicode; "" without letters."""
    for character in text:
        if character.isalpha():
            return unicodedata.name(character, "").split(" ")[0]
    return ""


def speaking_rate(corpus: Corpus) -> dict[int, tuple[str, str]]:
    """{index: (reason, details)} of clips with far more or fewer letters a second than their
    speaker's others, which often means that the text is not the one that is spoken. Rates are
    compared by their logarithms, to the median of a speaker with at least RATED_CLIPS clips in the
    same language and script, because a letter of one script is a syllable in another. Clips under
    SHORT_CLIP seconds vary more and are allowed to. `corpus.read`, where there is one, has numbers
    in words."""
    problems = {}
    counts = np.array([letters(text) for text in corpus.read or corpus.texts], dtype=float)
    scripts = np.unique([script(text) for text in corpus.texts], return_inverse=True)[1]
    columns = (scripts, corpus.languages.codes, corpus.speakers.codes)
    keys = np.array([np.array(column, dtype=np.int64) for column in columns])
    rated = np.flatnonzero((counts > 0) & (corpus.seconds > 0))
    rated = rated[np.lexsort(keys[:, rated])]
    borders = np.flatnonzero(np.diff(keys[:, rated]).any(0)) + 1
    for rows in np.split(rated, borders):
        if len(rows) < RATED_CLIPS:
            continue
        rates = np.log(counts[rows] / corpus.seconds[rows])
        median = float(np.median(rates))
        deviation = max(NORMAL * float(np.median(np.abs(rates - median))), LEAST_DEVIATION)
        tolerance = np.where(corpus.seconds[rows] < SHORT_CLIP, SHORT_TOLERANCE, 1.0)
        limits = DEVIATIONS * deviation * tolerance
        for i in np.flatnonzero(np.abs(rates - median) > limits).tolist():
            details = (
                f"{np.exp(rates[i]):.1f} letters a second, the speaker's median is"
                f" {np.exp(median):.1f}"
            )
            problems[int(rows[i])] = (
                "speaking rate is far from the speaker's: is the text what is spoken?",
                details,
            )
    return problems


def little_speech(train: Corpus) -> dict[int, tuple[str, str]]:
    """{index: (reason, details)} of the clips of speakers with less than LITTLE_SPEECH seconds;
    none if no other speaker would be left."""
    totals = train.seconds_by(train.speakers)
    few = {speaker for speaker, seconds in totals.items() if seconds < LITTLE_SPEECH}
    if few and len(few) == len(totals):
        print(
            f"warning: no speaker has {LITTLE_SPEECH:g} s of speech for training: expect an"
            " unstable voice"
        )
        return {}
    reason = f"speaker has less than {LITTLE_SPEECH:g} s of speech"
    return {
        index: (reason, f"{speaker or 'without a name'}, {totals[speaker]:.1f} s")
        for index, speaker in enumerate(train.speakers)
        if speaker in few
    }


def overlap(train: Corpus, other: Corpus, rejected: Rejections, name: str = "training") -> None:
    """Notes in `rejected` the utterances of an evaluation set with the audio (file, offset and
    channel) of a training utterance, or with its text unless the sets share their texts by design.
    `name`: of the set `train`."""

    def places(corpus: Corpus) -> Iterator[tuple[str, float, float]]:
        offsets, _, channels = corpus.places().tolist()
        return zip(map(os.path.abspath, corpus.paths), offsets, channels, strict=True)

    heard = set(places(other)).intersection(places(train))  # the larger set is not kept in memory
    read = set()
    if not other.repeats_texts:
        read = set(other.texts).intersection(train.texts)
    for index, (place, text) in enumerate(zip(places(other), other.texts, strict=True)):
        if place in heard:
            rejected.note(f"audio is in the {name} set, too", other.where(index))
        elif text in read:
            rejected.note(f"text is in the {name} set, too", f"{other.where(index)}: {text[:60]}")


def describe(train: Corpus) -> None:
    """Prints how much speech there is, and warnings about what the training set lacks."""
    count = len(set(train.speakers))
    speakers = "1 speaker" if count == 1 else f"{count} speakers"
    print(f"training speech: {train.seconds.sum() / 60:.1f} min of {speakers}")
    if train.seconds.sum() < LITTLE_DATA:
        print(
            f"warning: less than {LITTLE_DATA / 60:g} minutes of training speech: the voice will"
            " hardly be learned"
        )
    if not (train.seconds < SHORT_CLIP).any():
        print(
            f"warning: no clip is under {SHORT_CLIP:g} s: the model will add noise to short texts"
        )
