"""What --transcribe asks for. Of .eaf, the annotations of a tier are heard, and what was heard is
written to a tier below it, in a copy of the file."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from common import options
from common.errors import DataError, RunError, UsageError
from common.files import require_output
from speech.data.annotations import adding, elan, rows, writing
from speech.data.annotations.document import DRAFT, Tier
from speech.data.annotations.rows import UnclearTier
from speech.decoding import transcripts
from speech.signal.audio import SAMPLE_RATE, read_audio
from speech.writing import subtitles

SUFFIX = ".eaf"
TiersToHear = list[tuple[Tier, list[elan.Segment]]]


@dataclass(frozen=True)
class Copy:
    """A file to copy to `target`, and what is heard for it: annotations of `tiers`, with times in
    seconds of `audio`. `unusable`: how many have no times, or those of others."""

    source: Path
    target: Path
    audio: str
    tiers: TiersToHear
    unusable: int


@dataclass(frozen=True)
class Choice:
    """Which annotations are heard: of the tiers `wanted`, all or the empty ones."""

    wanted: tuple[str, ...] = ()
    only_empty: bool = False
    audio_root: str | None = None


@dataclass(frozen=True)
class Plan:
    """The copies to write; `failed` files cannot be used."""

    copies: list[Copy] = field(default_factory=list)
    failed: int = 0


def resolve(args, has_times: bool) -> Plan | None:
    """Checks what --transcribe writes before any work; returns the plan for files of annotations.
    `has_times`: whether transcripts have times. Raises `UsageError` and `DataError`."""
    if is_asked(args.transcribe):
        choice = Choice(tuple(args.tier or ()), args.only_empty, args.audio_root)
        return plan(args.transcribe, args.output, args.output_format, choice)
    if args.tier or args.only_empty:
        flag = "--tier" if args.tier else "--only_empty"
        raise UsageError(f"{flag}: --transcribe names no .eaf, whose annotations have tiers")
    if not args.output:
        return None
    suffix = f".{args.output_format}" if args.output_format else transcripts.suffix_of(args.output)
    if suffix in subtitles.FORMATS and not has_times:
        others = "name a .jsonl, .eaf or .TextGrid file"
        needed = "add --timestamps" if "timestamps" in vars(args) else others
        raise UsageError(f"--output {args.output}: subtitles need times; {needed}")
    paths = None if getattr(args, "stream", None) else args.transcribe
    output = transcripts.output_of(args.output, args.output_format, paths)
    transcripts.check_output(output, options.paths_in(args, "output"))
    return None


def is_asked(paths: Iterable[str]) -> bool:
    """Whether --transcribe names annotations. Raises `UsageError` for audio beside them."""
    paths = list(paths)
    named = [path for path in paths if path.lower().endswith(SUFFIX)]
    if named and len(named) < len(paths):
        raise UsageError(
            f"--transcribe {' '.join(paths)}: name files of annotations or recordings, not both"
        )
    return bool(named)


def plan(paths: list[str], output: str | None, form: str | None, choice: Choice) -> Plan:
    """What --transcribe asks for; names unusable files. Raises `UsageError` and `DataError`."""
    targets = targets_of(sources_of(paths), output, form)
    copies = []
    failed = 0
    for source, target in targets.items():
        try:
            copies.append(copy_of(source, target, choice))
        except (DataError, UsageError) as error:
            if len(targets) == 1 or isinstance(error, UnclearTier):
                raise
            print(f"error: {error}", file=sys.stderr)
            failed += 1
    if not copies:
        raise DataError(f"none of the {failed} files can be used")
    return Plan(copies, failed)


def sources_of(paths: list[str]) -> dict[Path, Path]:
    """The files that are named, and their names below the folder that a pattern begins with."""
    named = {}
    for path in paths:
        folder = Path(path).parent
        while not folder.is_dir():
            folder = folder.parent
        sources = rows.files_of(Path(path))
        named |= {source: source.relative_to(folder) for source in sources}
    return named


def targets_of(sources: dict[Path, Path], output: str | None, form: str | None) -> dict[Path, Path]:
    """The copy of each file, which does not exist. Raises `UsageError`."""
    shown = f"--output {output}: " if output else "--output: "
    if output is None or (form or "eaf") != "eaf":
        raise UsageError(f"{shown}of .eaf, copies are written; name a folder for them")
    if form or transcripts.is_folder(output) or not Path(output).suffix:
        folder = transcripts.folder_of(output, "eaf")
        targets = transcripts.in_folder(folder, "eaf", sources.items())
        for target in targets.values():
            transcripts.make_folder(target.parent)
    elif Path(output).suffix.lower() != SUFFIX or len(sources) > 1:
        raise UsageError(f"{shown}of {len(sources)} .eaf, copies are written; name a folder")
    else:
        targets = dict.fromkeys(sources, Path(output))
    for target in targets.values():
        require_output(target, "--output", sources)
    return targets


def copy_of(source: Path, target: Path, choice: Choice) -> Copy:
    """What is heard of a file. Raises `UsageError`, and `DataError` if there is nothing."""
    all_tiers, media = elan.segments(source)
    chosen = tiers_to_hear(source, all_tiers, choice.wanted)
    audio, origin = rows.audio_of(source, media, choice.audio_root)
    unusable = 0
    tiers = []
    for tier, segments in chosen:
        heard = []
        for each in segments:
            moved = each._replace(start=each.start + origin, end=each.end + origin)
            if choice.only_empty and each.text:
                continue
            if 0 <= moved.start < moved.end < math.inf:
                heard.append(moved)
            else:
                unusable += 1
        if heard:
            tiers.append((tier, heard))
    if not tiers:
        what = "empty annotation" if choice.only_empty else "annotation"
        raise DataError(f"{source}: no {what} of the tier has a time of its own")
    return Copy(source, target, audio, tiers, unusable)


def tiers_to_hear(source: Path, tiers: TiersToHear, wanted: tuple[str, ...]) -> TiersToHear:
    """The tiers that are `wanted`, or the only one with annotations. Raises `UsageError`."""
    possible = [(tier, segments) for tier, segments in tiers if segments]
    if wanted:
        possible = [each for each in possible if rows.is_wanted(each[0], wanted)]
    table = f"\n{rows.table_of([tier for tier, _ in tiers])}"
    if not possible:
        names = f"--tier {' '.join(wanted)}: " if wanted else ""
        raise UsageError(f"{names}there is no annotation of such a tier in {source}{table}")
    if len(possible) > 1 and not wanted:
        raise UnclearTier(f"{source}: which tier is to be heard? Add --tier NAME{table}")
    return possible


def hear(plan: Plan, hear_waveforms: Callable[[str, list[Tensor]], list[dict]]) -> tuple[int, int]:
    """Writes the copies; returns how many files there are, and how many could not be used.
    `hear_waveforms(name, waveforms)` returns the record of each. Raises `RunError`."""
    failed = plan.failed
    for each in plan.copies:
        try:
            waveform = read_audio(each.audio, SAMPLE_RATE)
            new = []
            beyond = 0
            for tier, segments in each.tiers:
                inside = [s for s in segments if s.start * SAMPLE_RATE < len(waveform)]
                beyond += len(segments) - len(inside)
                spans = [(round(s.start * SAMPLE_RATE), round(s.end * SAMPLE_RATE)) for s in inside]
                records = hear_waveforms(each.audio, [waveform[a:b] for a, b in spans])
                new += new_tiers(tier, inside, records)
            if not new:
                raise DataError(f"{each.source}: all annotations are after the end of {each.audio}")
            adding.write(each.source, each.target, new)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            failed += 1
        except OSError as error:
            raise RunError(f"--output {each.target}: {error.strerror}") from None
        else:
            print(summary(each, new, beyond), flush=True)
    return len(plan.copies) + plan.failed, failed


def new_tiers(
    tier: Tier, segments: list[elan.Segment], records: list[dict]
) -> list[adding.NewTier]:
    """The texts that were heard and, where there are any, the doubtful words."""
    names = [segment.name for segment in segments]
    texts = [record["text"] for record in records]
    doubts = [writing.doubts_in(record) for record in records]
    found = []
    for kind, values in ((DRAFT, texts), (writing.DOUBTFUL, doubts)):
        kept = [pair for pair in zip(names, values, strict=True) if kind == DRAFT or pair[1]]
        name = f"{tier.name}-{kind}"
        if kept:
            found.append(adding.NewTier(name, kind, tier.name, tier.participant, kept))
    return found


def summary(each: Copy, new: list[adding.NewTier], beyond: int) -> str:
    """What is written of a file, and how many annotations are left out, `beyond` the audio's end
    or without a time."""
    heard = ", ".join(f"{tier.name} ({len(tier.texts)})" for tier in new)
    rest = f"; without a time of their own, left out: {each.unusable}" if each.unusable else ""
    rest += f"; after the end of the recording, left out: {beyond}" if beyond else ""
    return f"{each.source}: new tiers {heard} in {each.target}{rest}"
