"""Files of annotations as rows of a manifest: which files a name stands for, which of their tiers
are taken, and what is left out."""

import codecs
import contextlib
import glob
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from common.errors import DataError, UsageError, first_line
from speech.data.annotations import elan, lines, praat
from speech.data.annotations.document import DRAFT, OWN_TIER, UTTERANCES, Annotation, Media, Tier
from speech.data.columns import Rejections, printable
from speech.data.finding import comparable, find_audio, listed, matching
from speech.data.headers import AUDIO_SUFFIXES

Spans = list[tuple[float, float]]  # starts and ends in seconds

READERS = {
    ".eaf": elan.read,
    ".textgrid": praat.read,
    ".txt": lines.read_labels,
    ".srt": lines.read_subtitles,
    ".vtt": lines.read_subtitles,
}
WITH_TIERS = (".eaf", ".textgrid")
NAMES = ".eaf, .TextGrid, .srt, .vtt, or Audacity's labels in .txt"
# Of other programs, by suffix: which of them has the way to ELAN.
ELAN = "open it in ELAN (File, Import)"
OTHERS = {
    ".cha": ("a CHAT transcript", ELAN),
    ".trs": ("Transcriber's", ELAN),
    ".flextext": ("FLEx's", ELAN),
    ".exb": ("EXMARaLDA's", "open it in EXMARaLDA's Partitur-Editor (File, Export, ELAN)"),
}
TOOLBOX = b"\\_sh "  # how its files begin, whatever their names
OVERLAP = 0.1  # seconds: with less, nobody hears two voices
LISTED = 20  # tiers that were taken
SAMPLE = 30  # characters of a text in a message


class UnclearTier(UsageError):
    """It is not clear which tier of a file has the texts."""


@dataclass
class Taken:
    """What was read of files of annotations. `tiers`: how many annotations of each were taken;
    `missing`: those that are wanted and that no file has; `drafted`: how many texts a model
    drafted, `changed`: how many of these differ from the draft."""

    missing: set[str]
    files: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    points: int = 0
    drafted: int = 0
    changed: int = 0

    def described(self) -> str:
        words = ["1 file" if self.files == 1 else f"{self.files} files"]
        if any(self.tiers):
            named = [f"{printable(name)} ({n})" for name, n in self.tiers.most_common(LISTED)]
            more = len(self.tiers) - len(named)
            words.append(f"tiers {', '.join(named)}" + (f" and {more} more" if more else ""))
        if self.files and self.missing:
            words.append(f"no tier is called {printable(', '.join(sorted(self.missing)))}")
        if self.empty:
            words.append(f"without text, left out: {self.empty}")
        if self.points:
            words.append(f"points without duration, left out: {self.points}")
        if self.drafted:
            words.append(f"changed since a model drafted them: {self.changed} of {self.drafted}")
        return "; ".join(words)


def files_of(path: Path) -> list[Path]:
    """The files of annotations that a name or a pattern stands for, sorted; [] for the name of
    anything else. Raises `UsageError` for a pattern of no files or of others."""
    found = matching(path)
    if found is None:
        refuse_others(path)
        return [path] if is_annotations(path) else []
    if not found:
        raise UsageError(f"manifest {path}: no file has such a name")
    for each in found:
        refuse_others(each)
    other = next((each for each in found if not is_annotations(each)), None)
    if other:
        raise UsageError(f"manifest {path}: a pattern stands for {NAMES}, and {other} is none")
    return found


def refuse_others(path: Path) -> None:
    """Raises `UsageError` for a file of annotations that ELAN reads, and this project does not."""
    program, way = OTHERS.get(path.suffix.lower(), ("", ""))
    if not program and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if file.read(64).removeprefix(codecs.BOM_UTF8).startswith(TOOLBOX):
                program, way = "Toolbox's", ELAN
    if program:
        raise UsageError(f"manifest {path}: this file is {program}; {way} and save it as .eaf")


def is_annotations(path: Path, suffix: str = "") -> bool:
    """Whether a file has annotations, by its suffix, which may be given, or as labels."""
    suffix = (suffix or path.suffix).lower()
    return lines.is_labels(path) if suffix == ".txt" else suffix in READERS


def has_tiers(path: str) -> bool:
    """Whether a name may be that of a file with tiers, or a pattern of such names."""
    return path.lower().endswith(WITH_TIERS) or glob.has_magic(path)


def annotated_rows(
    files: list[Path], tiers: Sequence[str], audio_root: str | None, rejected: Rejections
) -> Iterator[tuple[int, dict]]:
    """(number from 1 on, row) of each annotation with a text in the files; what was taken is said
    in `rejected.source`. `tiers`: names, types or patterns of those to take.

    Of several files, one that cannot be used is added to `rejected`. Raises `DataError` and
    `UsageError` for a single one, and `UnclearTier` if it is not clear which tier to take."""
    taken = Taken(set(tiers))
    number = 0
    spans_of: dict[str, tuple[Path, Spans]] = {}  # the first file of each recording
    for path in files:
        try:
            document = READERS[path.suffix.lower()](path)
            chosen = choose(path, document.tiers, tiers)
            audio, origin = audio_of(path, document.media, audio_root)
        except (DataError, UsageError) as failure:
            if len(files) == 1 or isinstance(failure, UnclearTier):
                raise
            rejected.add("file of annotations cannot be used", first_line(failure))
            continue
        for reason, place in document.faults:
            rejected.add(reason, place)
        for reason, place in document.notes:
            rejected.note(reason, place)
        count_changed(chosen, document.tiers, taken)
        annotations = in_time(path, with_text(chosen, taken), origin, rejected)
        note_overlaps(audio, annotations, rejected)
        note_others(path, document.media, audio, rejected)
        spans = sorted((each.start, each.end) for each in annotations)
        other, before = spans_of.setdefault(audio, (path, spans))
        if other != path and 2 * shared(before, spans) > min(map(length, (before, spans))):
            raise UsageError(
                f"which has the texts of {audio}: {other.name} or {path.name}? Their times are"
                " about the same; name such files by a pattern, such as '*.en.srt'"
            )
        for each in annotations:
            number += 1
            duration = round(each.end - each.start, 6)
            row = {"audio_filepath": audio, "offset": each.start, "duration": duration}
            yield number, {**row, "text": each.text, "speaker": each.speaker}
    rejected.source = taken.described()


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def shared(ours: Spans, theirs: Spans) -> float:
    """The seconds that two sorted lists of spans share."""
    total = 0.0
    first = 0
    for start, end in ours:
        while first < len(theirs) and theirs[first][1] <= start:
            first += 1
        for other_start, other_end in theirs[first:]:
            if other_start >= end:
                break
            total += max(0.0, min(end, other_end) - max(start, other_start))
    return total


def note_others(path: Path, media: Sequence[Media], audio: str, rejected: Rejections) -> None:
    """Notes recordings of the same kind that a file names beside the one that is used."""
    names = {each.path.split("/")[-1] for each in media if _rank(each.path) == _rank(audio)}
    if others := names - {os.path.basename(audio)}:
        reason = "the file names several recordings: its times are taken in one of them"
        rejected.note(reason, f"{path}: {os.path.basename(audio)}, not {', '.join(sorted(others))}")


def audio_of(
    path: Path, media: Sequence[Media], audio_root: str | None = None
) -> tuple[str, float]:
    """The absolute path of the audio of a file's annotations, and where in it their time begins.

    It is one of the `media` that the file names, sound before video, or a file of the same name
    with another ending (`talk.en.srt` also belongs to `talk.wav`), beside the file or in
    `audio_root`, or there in a folder that is called as the file's. Raises `DataError` if there is
    none."""
    folder = str(path.parent)
    for each in sorted(media, key=lambda one: _rank(one.path)):
        last = each.path.split("/")[-1]
        for name in (each.relative, each.path if audio_root else "", last):
            for written in filter(None, (name, unquote(name))):
                found = find_audio(written, folder, audio_root)
                if os.path.isfile(found):
                    return os.path.abspath(found), each.origin
    stems = path.stem, Path(path.stem).stem
    for place, stem in itertools.product(places_of(path.parent, audio_root), stems):
        if found := listed([place]).stems.get(comparable(stem)):
            audio = min(found, key=_rank)
            # Of several recordings, each has its own origin: it is the one of the same kind.
            of_kind = [each for each in media if _rank(each.path) == _rank(audio)]
            origins = [each.origin for each in (*of_kind, *media)]
            return os.path.abspath(audio), [*origins, 0.0][0]
    names = [each.path.split("/")[-1] for each in media if each.path]
    names = dict.fromkeys([*names, f"{path.stem}.wav (.mp3, .flac ...)"])
    place = audio_root or "its folder, or give the audio's as --audio_root"
    raise DataError(f"{path}: its audio is missing: put {' or '.join(names)[:300]} into {place}")


def places_of(folder: Path, audio_root: str | None) -> list[str]:
    """The folders in which the audio of files in a `folder` may be: itself, or in `audio_root`
    those with the same last names, and itself."""
    if not audio_root:
        return [str(folder)]
    names = folder.absolute().parts[1:]
    below = [os.path.join(audio_root, *names[first:]) for first in range(len(names))]
    return [*filter(os.path.isdir, below), audio_root]


def _rank(path: str) -> int:
    suffix = os.path.splitext(path)[1].lower()
    return AUDIO_SUFFIXES.index(suffix) if suffix in AUDIO_SUFFIXES else len(AUDIO_SUFFIXES)


def choose(path: Path, tiers: list[Tier], wanted: Sequence[str]) -> list[Tier]:
    """The tiers to take: those that are `wanted`, or else those that `writing` calls utterances, or
    the only one with texts, or the only one with texts that depends on no other. Raises
    `UnclearTier` if that may be a wrong one, and `DataError` if none has a text, with a table of
    all."""
    are_named = any(tier.name for tier in tiers)
    table = f"\n{table_of(tiers)}" if are_named else ""
    possible = tiers
    if wanted and are_named:
        possible = [tier for tier in tiers if is_wanted(tier, wanted)]
        if not possible:
            names = printable(", ".join(wanted))
            raise UsageError(f"--tier {names}: there is none such in {path}{table}")
    written = [tier for tier in possible if has_texts(tier)]
    if not written:
        raise DataError(f"{path}: there are no texts with a duration{table}")
    if wanted or not are_named:
        return possible
    if own := [tier for tier in written if OWN_TIER.fullmatch(tier.name)]:
        return own
    upper = [tier for tier in written if not tier.parent]
    if len(written) == 1:
        upper = written
    if len(upper) == 1 and is_prose(upper[0]):
        return upper
    question = "which tier has the texts? Add --tier NAME"
    if len(written) == 1:
        name = printable(written[0].name)
        question = f"are these texts or their numbers? Add --tier '{name}' if they are texts"
    elif kind := kind_of_several(written):
        question += f"; a type takes the tiers of all speakers: --tier {printable(kind)}"
    raise UnclearTier(f"{path}: {question}{table}")


def has_texts(tier: Tier) -> bool:
    return any(each.text for each in tier.annotations)


def kind_of_several(tiers: list[Tier]) -> str:
    """The type that most of the tiers with words have, "" if no two have one, or all have it."""
    kinds = Counter(tier.kind for tier in tiers if tier.kind and is_prose(tier))
    kind, count = next(iter(kinds.most_common(1)), ("", 0))
    return kind if 1 < count < len(tiers) else ""


def is_wanted(tier: Tier, wanted: Sequence[str]) -> bool:
    """Whether a tier is meant by its name, by its type in ELAN, or by a pattern of these."""
    names = [name for name in (tier.name, tier.kind) if name]
    return any(name == each or fnmatchcase(name, each) for name in names for each in wanted)


def is_prose(tier: Tier) -> bool:
    """Whether most texts have letters and no digits: other tiers number the sentences."""
    texts = [each.text for each in tier.annotations if each.text]
    prose = [any(map(str.isalpha, text)) and not any(map(str.isdigit, text)) for text in texts]
    return 2 * sum(prose) > len(texts)


def table_of(tiers: list[Tier]) -> str:
    """A line for each tier, those with texts first, then by their types, with one of its texts."""
    rows = []
    for tier in sorted(tiers, key=lambda tier: (not has_texts(tier), tier.kind)):
        texts = [each.text for each in tier.annotations if each.text]
        count = f"{tier.points} points" if tier.points else str(len(texts))
        example = (
            f"{texts[0][:SAMPLE]}..." if texts and len(texts[0]) > SAMPLE else "".join(texts[:1])
        )
        rows.append([tier.name, tier.kind, tier.participant, count, example])
    rows = [[printable(cell) for cell in row] for row in rows]
    rows.insert(0, ["tier", "type", "speaker", "texts", "such as"])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def with_text(tiers: list[Tier], taken: Taken) -> list[Annotation]:
    """The annotations with a text, with their speakers: the participant of a tier, or its
    name; of a tier that `writing` names, what stands after the @. All are counted in `taken`."""
    found = []
    taken.files += 1
    for tier in tiers:
        taken.missing = {name for name in taken.missing if not is_wanted(tier, [name])}
        taken.points += tier.points
        own = OWN_TIER.fullmatch(tier.name)
        named = own["speaker"] or "" if own else tier.name
        for each in tier.annotations:
            if each.text:
                speaker = each.speaker or tier.participant or named
                found.append(each._replace(speaker=speaker))
                taken.tiers[tier.name] += 1
            else:
                taken.empty += 1
    return found


def count_changed(chosen: list[Tier], tiers: list[Tier], taken: Taken) -> None:
    """Counts the texts of the `chosen` tiers that have a draft, and those that differ from it. The
    draft is in a tier of the type DRAFT below theirs; in a TextGrid, in one with such a name. In a
    tier that `writing` names, every text was drafted, or is a person's change."""
    for tier in chosen:
        is_own = bool(OWN_TIER.fullmatch(tier.name))
        name = tier.name.replace(UTTERANCES, DRAFT, 1) if is_own else None
        below = [
            other
            for other in tiers
            if other.name == name or (other.parent == tier.name and other.kind == DRAFT)
        ]
        drafts = {each[:2]: each.text for other in below for each in other.annotations}
        for each in tier.annotations:
            if each.text and drafts and (is_own or each[:2] in drafts):
                taken.drafted += 1
                taken.changed += drafts.get(each[:2]) != each.text


def in_time(
    path: Path, annotations: list[Annotation], origin: float, rejected: Rejections
) -> list[Annotation]:
    """The annotations by their times in the audio, in which theirs begins at `origin`."""
    usable = []
    for each in annotations:
        start = round(each.start + origin, 6)
        end = round(each.end + origin, 6)
        if 0 <= start < end < math.inf:
            usable.append(each._replace(start=start, end=end))
            continue
        rejected.add(
            "annotation has no times, or ends before it begins, or begins before its audio",
            f"{path}: {round(each.start, 6)} to {round(each.end, 6)} s: {each.text[:SAMPLE]}",
        )
    return sorted(usable)


def note_overlaps(audio: str, annotations: list[Annotation], rejected: Rejections) -> None:
    """Notes those of the sorted `annotations` that begin before another has ended."""
    latest = None  # of the annotations so far, the one that ends last
    for each in annotations:
        if latest and min(each.end, latest.end) - each.start > OVERLAP:
            is_other = each.speaker != latest.speaker
            reason = "annotation overlaps another speaker's" if is_other else "annotations overlap"
            who = f": {each.speaker} and {latest.speaker}" if is_other else ""
            rejected.note(reason, f"{audio} at {each.start:.2f} s{who}")
        if not latest or each.end > latest.end:
            latest = each
