"""Checked splits: every utterance is checked once before training, and rejected ones are reported
by reason."""

import argparse
import hashlib
import os
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import options
from common.errors import DataError, UsageError
from speech.checks import overlap
from speech.columns import Codes, Corpus, Rejections, Segments, Strings, report_rejections
from speech.headers import END_TOLERANCE, probe_all
from speech.listening import CLIPPED, audio_faults, listen, trim
from speech.manifest import read_manifest

HELD_OUT = 0.05  # share of the training data to evaluate on if there is no --val_manifest
MOST_HELD_OUT = 200  # utterances, at most
FILE_TOLERANCE = (
    0.5  # seconds: END_TOLERANCE for whole files, whose duration is often rounded to a second
)
MICROSECOND = 1e-6  # rounding error of time differences, seconds
MOST_CHARACTERS = 10_000  # of a text; if --max_duration is over 100 s, FASTEST_SPEECH for so long
WORDS_PER_SECOND = 4  # of `stand_in`: fast speech
STAND_INS = 4096  # utterances of `stand_in`: no global batch is larger
FASTEST_SPEECH = 100  # characters per second, more than anyone says
DRAW = 1  # joins the seed of --max_samples, whose order must not be that of the held-out part

# Contradictions between flags, as `common.options` refuses them: flags that exclude each other, and
# flags that need one of others: (flag, flags of which one must be given, words to add to the
# message).
NEEDS = (
    ("val_manifest", ("train_manifest",), ""),
    ("test_manifest", ("train_manifest", "evaluate", "check_data"), ""),
    ("check_data", ("train_manifest", "test_manifest"), ""),
    ("use_chunking", ("train_manifest", "test_manifest"), ""),
)


@dataclass(frozen=True)
class Checks:
    """How a manifest is read and checked. Durations are in seconds."""

    min_duration: float = 0.1
    max_duration: float = 30.0
    audio_root: str | None = None  # base of audio paths; None: the manifest's folder
    cache_dir: Path | None = None  # of file headers and audio measures; None: no cache
    cache_audio: str | None = None  # folder of decoded audio; None: no cache
    use_chunking: bool = False
    max_samples: int | None = None  # of the training set; None: all
    strict: bool = False  # raise `DataError` if anything is rejected
    seed: int = 1  # of the held-out part, and of `max_samples`
    held_out: tuple[str, ...] = ()  # `held_out_keys` of the part that an earlier run held out
    listen: bool = False  # decode all audio once, and check it
    skip_bad_audio: bool = False  # reject what cannot be decoded instead of raising `DataError`
    for_synthesis: bool = False  # if `listen`: trim silence at the ends, reject clipped clips


@dataclass(frozen=True)
class DataOptions:
    """What the data flags ask for: the manifests to read, {split: path}, and how to check them.
    Without manifests the data are a recipe's demo corpus or, in a `planned` run, its stand-in."""

    manifests: dict[str, str]
    checks: Checks = Checks()
    planned: bool = False


@dataclass(frozen=True)
class RunInfo:
    """What a checkpoint keeps about the data of its run."""

    held_out: list[str]  # keys of the utterances that were held out for evaluation
    longest: float  # seconds of the longest training utterance
    demo: bool  # whether the run trained on the demo corpus


def sample_count(text: str) -> int | None:
    """An argparse type: the value of --max_samples; None, which means all, for -1."""
    if text == "-1":
        return None
    try:
        return options.POSITIVE(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (-1 means all)") from None


def add_arguments(parser) -> None:
    data = parser.add_argument_group("data")
    add = data.add_argument
    add(
        "--train_manifest",
        type=options.path,
        metavar="FILE",
        help="JSON Lines, CSV/TSV with a header, or LJSpeech's metadata.csv (synthetic data)",
    )
    add(
        "--val_manifest",
        type=options.path,
        metavar="FILE",
        help="for evaluation during training (a held-out part of the training data)",
    )
    add(
        "--test_manifest",
        type=options.path,
        metavar="FILE",
        help="for the results at the end (the evaluation set)",
    )
    add(
        "--audio_root",
        type=options.path,
        metavar="DIR",
        help=(
            "base of audio paths, also for absolute paths of another machine (the manifest's"
            " folder)"
        ),
    )
    add(
        "--max_samples",
        type=sample_count,
        metavar="N",
        help=(
            "use only N training utterances, drawn by --seed so that a larger N adds to them; -1 ="
            " all (all)"
        ),
    )
    add(
        "--min_duration",
        type=options.number(float, 0.0),
        default=0.1,
        metavar="S",
        help="reject shorter utterances, seconds (0.1)",
    )
    add(
        "--max_duration",
        type=options.RATE,
        default=30.0,
        metavar="S",
        help="reject longer utterances, seconds (30)",
    )
    add(
        "--strict_data",
        action=options.OnOff,
        default=False,
        help="stop if any utterance is rejected (off)",
    )
    parser.add_command(
        data,
        "--check_data",
        takes_training_flags=True,
        action=options.OnOff,
        default=False,
        help="read and check all data, print what is wrong with them, and exit",
    )
    add(
        "--check_audio",
        action=options.OnOff,
        default=True,
        help=(
            "listen to all audio once before training: reject silent clips, find what cannot be"
            " decoded (on)"
        ),
    )
    add(
        "--use_chunking",
        action=options.OnOff,
        default=False,
        help="cut recordings over --max_duration by the manifest's segment times (off)",
    )
    add(
        "--cache_audio",
        type=options.path,
        metavar="DIR",
        help=(
            "for slow storage: keep decoded audio in this folder, 230 MB per hour at 16 kHz (no"
            " cache)"
        ),
    )


def resolve(args, held_out: Iterable[str] = (), for_synthesis: bool = False) -> DataOptions:
    """What the flags ask for. `held_out`: keys of the utterances that the resumed run held out.
    Raises `UsageError`."""
    if args.min_duration >= args.max_duration:
        raise UsageError(
            f"--min_duration {args.min_duration:g} is not below --max_duration"
            f" {args.max_duration:g}"
        )
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    manifests = {split: path for split, path in paths.items() if path}
    if args.evaluate and args.test_manifest:
        manifests = {"test": args.test_manifest}
    planned = options.plans(args)
    checks = Checks(
        min_duration=args.min_duration,
        max_duration=args.max_duration,
        audio_root=args.audio_root,
        cache_dir=None if planned else Path(args.log_dir) / "cache",
        cache_audio=None if planned else args.cache_audio,
        use_chunking=args.use_chunking,
        max_samples=args.max_samples,
        strict=args.strict_data,
        seed=args.seed,
        held_out=tuple(map(str, held_out)),
        # The demo's audio is known to be good, and a plan needs only the lengths.
        listen=args.check_audio and bool(manifests) and not planned,
        skip_bad_audio=args.skip_bad_audio or args.check_data,
        for_synthesis=for_synthesis,
    )
    return DataOptions(manifests, checks, planned)


def load_splits(
    data: DataOptions,
    normalise: Callable[[str], str],
    demo: Callable[[], dict[str, str]] | None = None,
    stand_in: Callable[[], dict[str, Corpus]] | None = None,
) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; only "test" if only its
    manifest is read. Prints their sizes and what was rejected.

    Without manifests, `demo()` makes the demo corpus and returns its manifests by split, and
    `stand_in()` returns the corpora of a planned run. Raises `UsageError` if there are no data, and
    `DataError` if they cannot be used."""
    manifests = data.manifests
    if not manifests:
        if data.planned and stand_in:
            return stand_in()
        if demo is None:
            raise UsageError("there are no data: give --train_manifest")
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        manifests = demo()
    return read_manifests(manifests, normalise, data.checks)


def read_manifests(
    manifests: dict[str, str], normalise: Callable[[str], str], checks: Checks
) -> dict[str, Corpus]:
    """The checked corpora of `manifests`, {split: path}; prints their sizes and what was rejected.

    `checks.max_samples` shortens "train" to the rows of `draw`. If there is a "train" but no "val",
    a part of these rows is held out: if possible `checks.held_out`, whatever the seed and
    `max_samples` are now. Raises `DataError` and `UsageError`."""
    corpora = {}
    for split, path in manifests.items():
        corpus, rejected = load_corpus(path, normalise, checks)
        if split == "train":
            whole = corpus
            rows = draw(len(whole), checks)
            if len(rows) < len(whole):
                corpus = whole.select(rows)
        report_rejections(f"{split} set ({path})", corpus.seconds, rejected, checks.strict)
        corpora[split] = corpus
    if "train" in corpora and "val" not in corpora:
        corpora["train"], corpora["val"] = hold_out(whole, rows, checks.seed, set(checks.held_out))
    return corpora


def stand_in(seconds: float, most_characters: int = MOST_CHARACTERS) -> dict[str, Corpus]:
    """The corpora "train" and "val" of a planned run without data: silence of `seconds` each, by
    one speaker, with texts of as many short words as are said in that time, cut to
    `most_characters`. They are large enough for every global batch."""
    print(f"no data are given: planned for the longest utterances that are taken, {seconds:.1f} s")
    words = [first + vowel + last for first in "bdfg" for vowel in "aeio" for last in "lmnr"]
    said = max(1, round(WORDS_PER_SECOND * seconds))
    texts = []
    for row in range(len(words)):
        text = " ".join(words[(row + place) % len(words)] for place in range(said))
        texts.append(text[:most_characters].strip())
    count = STAND_INS
    corpus = Corpus(
        paths=Strings([""] * count),
        texts=Strings(texts[row % len(texts)] for row in range(count)),
        seconds=np.full(count, seconds),
        offsets=np.zeros(count),
        durations=np.full(count, seconds),
        speakers=Codes(["speaker"] * count),
        languages=Codes([""] * count),
        lines=np.arange(1, count + 1),
    )
    return {"train": corpus, "val": corpus}


def run_info(data: DataOptions, corpora: dict[str, Corpus]) -> RunInfo:
    """What a checkpoint keeps about the `corpora` of `load_splits(data, ...)`."""
    held_out = "train" in data.manifests and "val" not in data.manifests
    return RunInfo(
        held_out=held_out_keys(corpora["val"]) if held_out else [],
        longest=float(corpora["train"].seconds.max()),
        demo=not data.manifests,
    )


def some_items(data, seed: int, count: int) -> list[dict]:
    """`count` items of a data set, of utterances that are drawn at random, to fit initial weights
    or statistics to. Audio that cannot be read is left out: training itself reports it. There are
    fewer items if `data` has no more."""
    items: list[dict] = []
    for index in np.random.default_rng(seed).permutation(len(data)):
        try:
            items.append(data.item(int(index), 0))
        except DataError:
            continue
        if len(items) == count:
            break
    return items


def report_checked(sets: dict[str, Corpus]) -> None:
    """Ends --check_data of a recogniser: notes what evaluation sets share with the training set,
    and says what can be used."""
    for name, other in sets.items():
        if "train" in sets and name != "train" and not other.repeats_texts:
            shared = Rejections()
            overlap(sets["train"], other, shared)
            if shared.notes:
                print(shared.noted(f"{name} set"))
    say_checked(sets)


def say_checked(sets: dict[str, Corpus]) -> None:
    print(
        "checked:"
        f" {', '.join(f'{len(corpus)} utterances in {name}' for name, corpus in sets.items())} can"
        " be used"
    )


def draw(count: int, checks: Checks) -> np.ndarray:
    """The rows of a training set of `count` that `checks.max_samples` leaves, ascending: the first
    ones of an order that depends on the seed and `count` alone, so that more rows contain every
    smaller choice."""
    if checks.max_samples is None or checks.max_samples >= count:
        return np.arange(count)
    return np.sort(
        np.random.default_rng([checks.seed, DRAW]).permutation(count)[: checks.max_samples]
    )


def load_corpus(
    path: str, normalise: Callable[[str], str], checks: Checks
) -> tuple[Corpus, Rejections]:
    """The usable utterances of a manifest, and what was rejected.

    Usable: the file's header can be read, the duration is within the limits, and there is a text.
    Rows over the maximum are cut by their segment times with `checks.use_chunking`, rejected
    without. With `checks.listen`, the audio is also neither silent nor clipped, and what cannot be
    decoded is a `DataError` unless `checks.skip_bad_audio`."""
    rejected = Rejections()
    segments = Segments(checks.use_chunking)
    most = max(MOST_CHARACTERS, int(FASTEST_SPEECH * checks.max_duration))
    stand_in = "." * (most + 1)  # for texts that would take too long to normalise

    def normalise_short(text: str) -> str:
        return normalise(text) if len(text) <= most else stand_in

    corpus = read_manifest(path, rejected, normalise_short, checks.audio_root, segments)
    corpus.cache_audio = checks.cache_audio
    files = Codes(corpus.paths)
    file_of = np.array(files.codes)
    file_seconds, reasons = probe_all(files.names, cache_file(checks, "headers", path))
    available = file_seconds[file_of] - corpus.offsets
    missing = corpus.durations - available
    corpus.seconds = np.where(
        np.isnan(corpus.durations), available, np.minimum(available, corpus.durations)
    )
    keep = np.ones(len(corpus), dtype=bool)

    def reject(bad: np.ndarray, reason: str | None) -> None:
        for i in np.flatnonzero(bad & keep).tolist():
            length = "" if np.isnan(corpus.seconds[i]) else f" ({corpus.seconds[i]:.2f} s)"
            rejected.add(
                reason or reasons[file_of[i]],
                f"{path}:{corpus.lines[i]}: {corpus.where(i)}{length}",
            )
        keep[bad] = False

    reject(np.array([reason != "" for reason in reasons], dtype=bool)[file_of], None)
    reject(
        (available <= 0) | ((corpus.offsets > 0) & (missing > END_TOLERANCE)),
        "segment ends beyond the file",
    )
    reject(
        missing > FILE_TOLERANCE, "file is shorter than its duration in the manifest (truncated?)"
    )
    too_long = f"longer than {checks.max_duration:g} s (--max_duration)"
    is_long = corpus.seconds > checks.max_duration
    has_segments = np.array(segments.given, dtype=bool)
    if checks.use_chunking:
        reject(is_long & ~has_segments, f"{too_long}, without segment times for --use_chunking")
        if (keep & is_long).any():
            corpus, row_of = cut_by_segments(
                corpus, keep, segments, checks.max_duration, rejected, path
            )
            file_of = file_of[row_of]
            keep = np.ones(len(corpus), dtype=bool)
    else:
        reject(is_long & has_segments, f"{too_long}; --use_chunking would use its segment times")
    reject(corpus.seconds > checks.max_duration, too_long)
    reject(
        corpus.seconds < checks.min_duration,
        f"shorter than {checks.min_duration:g} s (--min_duration)",
    )
    reject(corpus.texts.empty(), "text is empty")
    reject(corpus.texts.longer(most), f"text is longer than {most} characters")
    if not keep.all():
        corpus, file_of = corpus.select(np.flatnonzero(keep)), file_of[keep]
    if checks.listen:
        keep = np.ones(len(corpus), dtype=bool)
        measures, undecodable = listen(
            corpus, cache_file(checks, "audio", path), checks.skip_bad_audio
        )
        for row, reason, details in audio_faults(measures, undecodable):
            example = f"{path}:{corpus.lines[row]}: {corpus.where(row)}: {details}"
            if (
                reason == CLIPPED and not checks.for_synthesis
            ):  # a recogniser will hear such speech, too
                rejected.note(reason, example)
                continue
            rejected.add(reason, example)
            keep[row] = False
        if checks.for_synthesis:
            trim(corpus, np.where(keep[:, None], measures, 0.0), rejected)
            reject(
                corpus.seconds < checks.min_duration,
                f"shorter than {checks.min_duration:g} s (--min_duration)",
            )
        if not keep.all():
            corpus, file_of = corpus.select(np.flatnonzero(keep)), file_of[keep]
    rejected.repeated = count_repeated(file_of, corpus)
    return corpus, rejected


def cache_file(checks: Checks, kind: str, path: str) -> Path | None:
    """Where what is known of the audio of a manifest is kept, if it is."""
    name = f"{kind}-{hashlib.sha1(os.fsencode(os.path.abspath(path))).hexdigest()[:12]}.npz"
    return checks.cache_dir / name if checks.cache_dir else None


def cut_by_segments(
    corpus: Corpus,
    keep: np.ndarray,
    segments: Segments,
    max_duration: float,
    rejected: Rejections,
    path: str,
) -> tuple[Corpus, np.ndarray]:
    """The rows in `keep`, those over `max_duration` cut into pieces of whole segments; and the row
    of each piece.

    A piece joins as many consecutive segments as fit, including the gaps between them. Segments
    over `max_duration`, and rows whose segments reach beyond their audio, are added to
    `rejected`."""
    sources, offsets, durations, texts = array("q"), array("d"), array("d"), Strings()
    is_long = keep & (corpus.seconds > max_duration)
    for row in np.flatnonzero(is_long).tolist():
        example = f"{path}:{corpus.lines[row]}: {corpus.where(row)}"
        parts = segments.row(row)
        length = float(corpus.seconds[row])
        problem = segments.problems[row]
        if not problem and parts[-1][1] > length + END_TOLERANCE:
            problem = "segment times reach beyond the audio"
            example += f" ({parts[-1][1]:.2f} of {length:.2f} s)"
        if problem:
            rejected.add(problem, example)
            continue
        for start, stop, text in join_segments(parts, max_duration):
            stop = min(stop, length)
            if stop - start > max_duration + MICROSECOND:
                reason = f"a segment is longer than {max_duration:g} s (--max_duration)"
                rejected.add(reason, f"{example}, segment from {start:.2f} to {stop:.2f} s")
                continue
            sources.append(row)
            offsets.append(corpus.offsets[row] + start)
            durations.append(min(max(0.0, round(stop - start, 6)), max_duration))
            texts.append(text)
    whole = np.flatnonzero(keep & ~is_long)
    row_of = np.concatenate([whole, np.array(sources, dtype=np.int64)])
    order = np.argsort(row_of, kind="stable")
    row_of = row_of[order]
    all_texts = corpus.texts.select(whole)
    for text in texts:
        all_texts.append(text)
    pieces = replace(
        corpus.select(row_of),
        texts=all_texts.select(order),
        seconds=np.concatenate([corpus.seconds[whole], durations])[order],
        offsets=np.concatenate([corpus.offsets[whole], offsets])[order],
        durations=np.concatenate([corpus.durations[whole], durations])[order],
    )
    return pieces, row_of


def join_segments(
    segments: list[tuple[float, float, str]], max_seconds: float
) -> list[tuple[float, float, str]]:
    """Joins consecutive (start, stop, text), sorted and without overlap, into as few pieces of at
    most `max_seconds` as possible, from the first one on. A longer segment stays alone, and nothing
    is joined across it."""
    pieces: list[tuple[float, float, list[str]]] = []
    for start, stop, text in segments:
        if pieces and stop - pieces[-1][0] <= max_seconds + MICROSECOND:
            first, _, texts = pieces.pop()
            texts.append(text)
            pieces.append((first, stop, texts))
        else:
            pieces.append((start, stop, [text]))
    return [(start, stop, " ".join(filter(None, texts))) for start, stop, texts in pieces]


def count_repeated(file_of: np.ndarray, corpus: Corpus) -> int:
    """The number of utterances with the same file and times as an earlier one."""
    keys = (file_of, corpus.offsets, np.nan_to_num(corpus.durations, nan=-1))
    order = np.lexsort(keys)
    return int(np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in keys]).sum())


def drop(
    corpus: Corpus, name: str, fault: Callable[[int], tuple[str, str] | None], strict: bool
) -> Corpus:
    """The corpus without the utterances for which `fault(index)` returns (reason, details), which
    are reported under `name`."""
    rejected, keep = Rejections(), []
    for index in range(len(corpus)):
        if problem := fault(index):
            reason, details = problem
            rejected.add(reason, f"{corpus.where(index)}: {details}")
        else:
            keep.append(index)
    if rejected.total:
        corpus = corpus.select(np.array(keep, dtype=int))
        report_rejections(name, corpus.seconds, rejected, strict)
    return corpus


def hold_out(whole: Corpus, rows: np.ndarray, seed: int, before: set[str]) -> tuple[Corpus, Corpus]:
    """(training part, evaluation part) of the ascending `rows` of the training set: a random part
    is held out, HELD_OUT of it, at least one utterance and at most MOST_HELD_OUT. If `before` has
    the keys of other utterances, of any row, these are held out instead. Raises `DataError` if
    nothing would be left to train on."""
    count = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(rows))))
    chosen = rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])]
    if before and set(held_out_keys(whole.select(chosen))) != before:
        kept = np.flatnonzero([key in before for key in held_out_keys(whole)])
        if len(kept):
            chosen = kept
        else:
            print(
                "the utterances that were held out before are not in the training set any more:"
                " others are drawn"
            )
    rest = np.setdiff1d(rows, chosen)
    if not len(rest):
        raise DataError(
            "one utterance is too few to hold one out for evaluation: add --val_manifest"
        )
    print(
        f"no --val_manifest: {len(chosen)} of the {len(chosen) + len(rest)} training utterances are"
        " held out"
    )
    return whole.select(rest), whole.select(chosen)


def held_out_keys(corpus: Corpus) -> list[str]:
    """A short key of each utterance, which stays the same if the data set moves or grows."""
    keys = []
    offsets = corpus.offsets if corpus.starts is None else corpus.starts
    for path, offset, text in zip(corpus.paths, offsets.tolist(), corpus.texts, strict=True):
        row = repr((path.split(os.sep)[-2:], offset, text))
        keys.append(
            hashlib.blake2b(row.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        )
    return keys
