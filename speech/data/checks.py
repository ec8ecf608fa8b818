"""Checks of checked utterances before training: speaking rates, texts, speakers, what training and
evaluation share. What harms a voice is rejected; a recogniser's report notes it."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from speech.data import census
from speech.data.census import Census, take_census
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
FAR = 5.0  # deviations of a rate from a recogniser's set, whose speakers differ
# Seconds of a recogniser's training set: with less, a model from scratch learns nothing that is of
# use, and a released one drafts.
LITTLE_FROM_SCRATCH = 7200.0
LITTLE_TO_TUNE = 600.0
# [beep], <unk>, {breath}, (unintelligible), *cough*, +++, notes of music: marks of a transcriber
MARKS = re.compile(r"\[[^\]]+\]|<[^<>]+>|\{[^{}]+\}|\([^()]*\)|\*[^*\s]+\*|\+\++|[\u2669-\u266f]")

Fault = Callable[[Corpus, int], tuple[str, str] | None]  # (reason, details) to reject an utterance


def check_speech(sets: dict[str, Corpus], strict: bool, fault: Fault) -> dict[str, Corpus]:
    """The sets without the utterances that harm the training of a TTS model: those that
    `fault(corpus, index)` rejects with (reason, details), those spoken much faster or slower than
    their speaker's others, and in "train" speakers with hardly any speech. Prints a table for each
    set and a description of "train". Raises `DataError` as `report_rejections` does."""
    tables = {name: Rejections() for name in sets}
    checked = {}
    for name, corpus in sets.items():
        problems = speaking_rate(corpus)
        for index in range(len(corpus)):
            if problem := fault(corpus, index):
                problems[index] = problem
        checked[name] = corpus.without(problems, tables[name])
    if "train" in checked:
        few = little_speech(checked["train"])
        checked["train"] = checked["train"].without(few, tables["train"])
        for name in checked.keys() & {"val", "test"}:
            overlap(checked["train"], checked[name], tables[name])
    for name, corpus in checked.items():
        note_marks(corpus, tables[name])
        if tables[name].total or tables[name].notes:
            report_rejections(
                f"{name} set, checked as speech", corpus.seconds, tables[name], strict
            )
    if "train" in checked:
        describe(checked["train"])
        counted = take_census(checked["train"].texts)
        print(census.letters_line(counted.counts))
        if line := census.mixed_line([(checked["train"].texts, counted)]):
            print(line)
    return checked


def speaking_rate(corpus: Corpus) -> dict[int, tuple[str, str]]:
    """{index: (reason, details)} of clips with far more or fewer letters a second than their
    speaker's others, which often means that the text is not the one that is spoken. Rates are
    compared within a language and a script, because a letter of one script is a syllable in
    another. `corpus.read`, where there is one, has numbers in words."""
    counted = take_census(corpus.texts)
    letters = take_census(corpus.read).letters if corpus.read else counted.letters
    columns = (counted.scripts, corpus.languages.codes, corpus.speakers.codes)
    distances, medians = rate_distances(corpus, letters, columns)
    reason = "speaking rate is far from the speaker's: is the text what is spoken?"
    problems = {}
    for row in np.flatnonzero(distances > DEVIATIONS).tolist():
        rate = letters[row] / corpus.seconds[row]
        details = f"{rate:.1f} letters a second, the speaker's median is {medians[row]:.1f}"
        problems[row] = (reason, details)
    return problems


def rate_distances(
    corpus: Corpus, letters: np.ndarray, columns: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """How far (N,) the `letters` (N,) a second of each clip are from the median of the clips with
    the same numbers in `columns`, and these medians (N,). Distances are those of logarithms, in
    deviations; 0 for fewer than RATED_CLIPS clips, whose median is NaN. Clips under SHORT_CLIP
    seconds vary more and are allowed to."""
    distances = np.zeros(len(corpus))
    medians = np.full(len(corpus), np.nan)
    keys = np.array([np.array(column, dtype=np.int64) for column in columns])
    rated = np.flatnonzero((letters > 0) & (corpus.seconds > 0))
    rated = rated[np.lexsort(keys[:, rated])]
    borders = np.flatnonzero(np.diff(keys[:, rated]).any(0)) + 1
    for rows in np.split(rated, borders):
        if len(rows) < RATED_CLIPS:
            continue
        rates = np.log(letters[rows] / corpus.seconds[rows])
        median = float(np.median(rates))
        deviation = max(NORMAL * float(np.median(np.abs(rates - median))), LEAST_DEVIATION)
        tolerance = np.where(corpus.seconds[rows] < SHORT_CLIP, SHORT_TOLERANCE, 1.0)
        distances[rows] = np.abs(rates - median) / (deviation * tolerance)
        medians[rows] = np.exp(median)
    return distances, medians


def little_speech(train: Corpus) -> dict[int, tuple[str, str]]:
    """{index: (reason, details)} of the clips of speakers with less than LITTLE_SPEECH seconds;
    none if no other speaker would be left."""
    totals = train.seconds_by(train.speakers)
    few = {speaker for speaker, seconds in totals.items() if seconds < LITTLE_SPEECH}
    if few and len(few) == len(totals):
        print(f"warning: no speaker has {LITTLE_SPEECH:g} s of speech: expect an unstable voice")
        return {}
    reason = f"speaker has less than {LITTLE_SPEECH:g} s of speech"
    return {
        index: (reason, f"{speaker or 'without a name'}, {totals[speaker]:.1f} s")
        for index, speaker in enumerate(train.speakers)
        if speaker in few
    }


def overlap(train: Corpus, other: Corpus, rejected: Rejections, name: str = "training") -> None:
    """Notes in `rejected` what an evaluation set shares with `train`, the set `name`: audio (file,
    offset and channel), or a text unless the sets share their texts by design."""

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


# --- a recogniser's sets --------------------------------------------------------------------------


def report_texts(sets: dict[str, Corpus], from_scratch: bool = False) -> None:
    """Prints what is worth a look in the texts and speakers of a recogniser's sets: nothing is
    rejected. `from_scratch`: a model with random weights will learn from them."""
    censuses = {name: take_census(corpus.texts) for name, corpus in sets.items()}
    for name, corpus in sets.items():
        note_rows(name, corpus, censuses[name], sets.get("train"))
        for line in lines_of(corpus, censuses[name]):
            print(f"{name} set: {line}")
        if name in ("val", "test") and "train" in sets:
            note_speakers(sets["train"], corpus, name)
    counts: Counter[str] = Counter()
    for each in censuses.values():
        counts.update(each.counts)
    if counts:
        print(census.letters_line(counts))
    for pair in census.look_alikes(counts):
        print(f"characters that look alike: {pair}: is one of them typed for the other?")
    pairs = [(corpus.texts, censuses[name]) for name, corpus in sets.items()]
    if line := census.mixed_line(pairs):
        print(line)
    if "train" in sets:
        note_little(sets["train"], from_scratch)


def note_marks(corpus: Corpus, rows: Rejections) -> None:
    """Notes texts with marks of a transcriber."""
    for index, text in enumerate(corpus.texts):
        if found := MARKS.search(text):
            example = f"{corpus.where(index)}: {found[0][:60]}"
            rows.note("text in brackets is taken as it is written", example)


def note_rows(name: str, corpus: Corpus, counted: Census, train: Corpus | None) -> None:
    """Prints rows with marks of a transcriber, an odd rate, or what the training set has, too."""
    rows = Rejections()
    note_marks(corpus, rows)
    columns = (counted.scripts, corpus.languages.codes)
    distances, medians = rate_distances(corpus, counted.letters, columns)
    for index in np.flatnonzero(distances > FAR).tolist():
        letters, seconds = counted.letters[index], corpus.seconds[index]
        rows.note(
            "far too many or too few letters for the seconds: is the text what is spoken?",
            f"{corpus.where(index)}: {letters} letters in {seconds:.2f} s, the median is"
            f" {medians[index]:.1f} a second: {corpus.texts[index][:60]}",
        )
    if name in ("val", "test") and train is not None:
        overlap(train, corpus, rows)
    if rows.notes:
        print(rows.noted(f"{name} set"))


def lines_of(corpus: Corpus, counted: Census) -> Iterator[str]:
    """What there is to say of the texts of a set as a whole."""
    codes = census.no_words(corpus.texts, counted.letters)
    if codes:
        yield (
            f"texts that many rows share, or without words: {census.named_texts(codes)}: is this"
            " what is said? If not, leave these rows out"
        )
    columns = (counted.scripts, corpus.languages.codes)
    _, medians = rate_distances(corpus, counted.letters, columns)
    rows = np.flatnonzero(medians > 0)
    if len(rows):
        expected = np.log(counted.letters[rows] / medians[rows])
        if line := census.shift_line(corpus, expected, rows):
            yield line


def note_speakers(train: Corpus, other: Corpus, name: str) -> None:
    """Says how many speakers of an evaluation set are in the training set, too."""
    heard = {*train.speakers} - {""}
    speakers = {*other.speakers} - {""}
    if len(heard) > 1 and (both := heard & speakers):
        known = f"{len(both)} of its {len(speakers)} speakers are in the training set, too"
        print(f"{name} set: {known}: its error rates are those of known voices")


def note_little(train: Corpus, from_scratch: bool) -> None:
    """Warns of too little speech to learn from."""
    seconds = train.seconds.sum()
    spoken = f"warning: {seconds / 60:.3g} minutes of training speech"
    if from_scratch and seconds < LITTLE_FROM_SCRATCH:
        print(
            f"{spoken} are too few for a model from scratch: begin with a released one, which has"
            " learned from others (docs/your_language.md, 4)"
        )
    elif not from_scratch and seconds < LITTLE_TO_TUNE:
        print(f"{spoken} are few: the model will write drafts, to correct and to train on")


# --- voices ---------------------------------------------------------------------------------------


def describe(train: Corpus) -> None:
    """Prints how much speech there is, and warnings about what the training set lacks."""
    count = len(set(train.speakers))
    speakers = "1 speaker" if count == 1 else f"{count} speakers"
    print(f"training speech: {train.seconds.sum() / 60:.1f} min of {speakers}")
    if train.seconds.sum() < LITTLE_DATA:
        minutes = f"{LITTLE_DATA / 60:g} minutes of training speech"
        print(f"warning: less than {minutes}: the voice will hardly be learned")
    if not (train.seconds < SHORT_CLIP).any():
        print(
            f"warning: no clip is under {SHORT_CLIP:g} s: the model will add noise to short texts"
        )
