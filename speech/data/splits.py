"""The data flags, and the sets that they name: "train", "val" and "test", a part that is held out,
a demo corpus, or the stand-in of a planned run."""

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from common import options
from common.errors import DataError, UsageError
from common.options import BESIDE, USUAL, OnOff, flag
from speech.data.columns import (
    Codes,
    Corpus,
    Rejections,
    Strings,
    describe_utterances,
    report_rejections,
)
from speech.data.loading import MOST_CHARACTERS, Checks, held_out_keys, load_corpus

DRAW = 1  # joins the seed of --max_samples, whose order must not be that of the held-out part
HELD_OUT = 0.05  # share of the training data to evaluate on if there is no --val_manifest
MOST_HELD_OUT = 200  # utterances, at most
# Utterances, at least, but not more than a tenth: of six, an error rate says little, and it chooses
# the weights and the language model.
FEWEST_HELD_OUT = 20
WORDS_PER_SECOND = 4  # of `stand_in`: fast speech
STAND_INS = 4096  # utterances of `stand_in`: no global batch is larger
LONGEST_RECORDING = 24 * 3600.0  # seconds, of a recording of --long
LONGEST_STAND_IN = 600.0  # seconds: who gives more as --max_duration means any length

REPLAY = "replay"  # the set of --replay_manifest
SPLITS = ("train", "val", "test", REPLAY)  # and watched sets, whose names are the user's
LEARNED_FROM = ("train", REPLAY)  # the sets that a model learns from
SET = {
    "utterances": int,
    "hours": (int, float),
    "languages": [str],
    "drafted?": int,
}  # of `RunInfo.sets`

# Rows for `Parser.refuse`.
NEEDS = (
    ("val_manifest", ("train_manifest",), ""),
    ("test_manifest", ("train_manifest", "evaluate", "check_data"), ""),
    ("check_data", ("train_manifest", "test_manifest"), ""),
    ("use_chunking", ("train_manifest", "test_manifest"), ""),
    ("text_column", ("train_manifest", "test_manifest"), ""),
    ("tier", ("train_manifest", "test_manifest", "transcribe"), ""),
)


def unused_by(command: str) -> tuple[tuple[str, str, str], ...]:
    """Rows for `common.options`: flags that exclude a command that reads no manifest."""
    reason = "the second reads no manifest; leave the first out"
    return tuple((f"{split}_manifest", command, reason) for split in ("train", "val", "test"))


@dataclass(frozen=True)
class DataOptions:
    """The request of the data flags."""

    # to read, {split: paths}; none: the demo corpus, or its stand-in in a plan
    manifests: dict[str, list[str]]
    checks: Checks
    planned: bool = False
    had_others: bool = False  # a run that is resumed or used was not trained on the demo corpus


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a recipe reads of the flags that all have, None for those that it lacks."""

    data: DataOptions
    train_manifest: list[str] | None
    evaluate: bool
    init_from: str | None
    output_dir: str
    log_dir: Path
    seed: int
    learning_rate: float | None
    max_duration: float
    use_chunking: bool
    strict_data: bool
    allow_unknown: bool | None
    stop_when_watched_rises: bool | None

    @staticmethod
    def resolve(args, for_synthesis: bool = False) -> dict:
        """The values of these fields, for `options.read_record`. Raises `UsageError`."""
        names = [each.name for each in fields(Request) if each.name != "data"]
        values = {name: getattr(args, name, None) for name in names}
        return {**values, "data": resolve(args, for_synthesis=for_synthesis)}


@dataclass(frozen=True)
class RunInfo:
    """The record of a run's data in its checkpoints."""

    held_out: list[str]  # keys of the utterances that were held out for evaluation
    # Seconds of the longest training utterance. A file from elsewhere must not ask for pieces of
    # recordings without a length.
    longest: Annotated[float, lambda seconds: 0.001 <= seconds < math.inf]
    demo: bool  # whether the run trained on the demo corpus
    # Of SPLITS, by `about_sets`: a model card has them.
    sets: Annotated[dict, {f"{name}?": SET for name in SPLITS}] = field(default_factory=dict)


def sample_count(text: str) -> int | None:
    """An argparse type: the value of --max_samples; None, which means all, for -1."""
    if text == "-1":
        return None
    try:
        return options.POSITIVE(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (-1 means all)") from None


@dataclass(frozen=True)
class DataFlags:
    """Flags of data."""

    # fmt: off
    train_manifest: list[str] | None = flag(
        options.path, None, "FILE",
        "JSON Lines, CSV/TSV with a header, LJSpeech's metadata.csv; .eaf, .TextGrid, .srt, .vtt"
        " or Audacity's labels beside their audio, also 'files/*.eaf'; a folder of a.wav with"
        " a.txt; or several of these (synthetic data)", USUAL, nargs="+")
    val_manifest: list[str] | None = flag(
        options.path, None, "FILE",
        "for evaluation during training (a held-out part of the training data)", USUAL, nargs="+")
    test_manifest: list[str] | None = flag(
        options.path, None, "FILE",
        "for the results at the end (the evaluation set)", USUAL, nargs="+")
    audio_root: str | None = flag(
        options.path, None, "DIR",
        "base of audio paths, also of absolute ones of another machine (the manifest's folder)")
    text_column: str | None = flag(
        None, None, "NAME",
        "the column of a table that has the texts (the only one called text, sentence ...)")
    tier: list[str] | None = flag(
        options.Repeated, None, "NAME",
        "the tiers with the texts in .eaf and .TextGrid: names, such as 'tx@*', or a type in ELAN"
        " (the only one)", nargs="+")
    max_samples: int | None = flag(
        sample_count, None, "N",
        "use N training utterances, drawn by --seed: a larger N adds to them; -1 = all (all)")
    min_duration: float = flag(
        options.number(float, 0.0), 0.1, "S", "reject shorter utterances, seconds (0.1)")
    max_duration: float = flag(options.RATE, 30.0, "S", "reject longer utterances, seconds (30)")
    use_chunking: bool = flag(
        OnOff, False, None,
        "cut recordings over --max_duration by the manifest's segment times (off)")
    strict_data: bool = flag(OnOff, False, None, "stop if any utterance is rejected (off)")
    check_data: bool = flag(
        OnOff, False, None, "read and check all data, print what is wrong with them, and exit",
        USUAL, BESIDE)
    check_audio: bool = flag(
        OnOff, True, None, "decode all audio once before training, and reject silent clips (on)")
    cache_audio: str | None = flag(
        options.path, None, "DIR",
        "keep decoded audio in this folder: 230 MB an hour at 16 kHz, 317 at 22 kHz (no cache)")
    allow_unknown: bool = flag(
        OnOff, False, None,
        "also use texts of which the vocabulary lacks over 5 %% of the characters (off)")


def add_arguments(parser, allow_unknown: bool = False, **defaults) -> None:
    """The flags of data, with a recipe's own `defaults`. `allow_unknown`: with the flag for
    `speech.writing.unknown.check_unknown`, for a recipe whose vocabulary can lack characters."""
    if not allow_unknown:
        defaults["allow_unknown"] = options.LEAVE_OUT
    options.add_record(parser, "data", DataFlags, **defaults)
    parser.refuse((), NEEDS)


def resolve(
    args, earlier_run: RunInfo | None = None, for_synthesis: bool = False, needs: str = "text"
) -> DataOptions:
    """The request of the flags. `earlier_run`: the record of the run that is resumed or used, whose
    utterances for evaluation are held out again. `needs`: what every utterance has to have, "text"
    or "label". Raises `UsageError`."""
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    manifests = {split: path for split, path in paths.items() if path}
    if getattr(args, "replay_manifest", None):
        manifests[REPLAY] = [args.replay_manifest]
    if getattr(args, "watch_manifest", None):
        from speech.data import watching

        manifests |= watching.resolve(args)
    max_duration = args.max_duration
    if args.evaluate and args.test_manifest:
        manifests = {"test": args.test_manifest}
    if getattr(args, "long", None):
        manifests = {"long": [args.long]}
        max_duration = LONGEST_RECORDING
    if args.min_duration >= max_duration:
        raise UsageError(
            f"--min_duration {args.min_duration:g} is not below --max_duration {max_duration:g}"
        )
    if args.tier and manifests:
        from speech.data.annotations.rows import has_tiers

        if not any(map(has_tiers, itertools.chain(*manifests.values()))):
            raise UsageError(
                "--tier: none of the manifests is an .eaf or a .TextGrid, which have tiers"
            )
    planned = options.plans(args)
    # A check leaves nothing in the current folder.
    keeps = not planned and not (args.check_data and "output_dir" not in args.given)
    checks = Checks(
        min_duration=args.min_duration,
        max_duration=max_duration,
        audio_root=args.audio_root,
        cache_dir=Path(args.log_dir) / "cache" if keeps else None,
        cache_audio=None if planned else args.cache_audio,
        use_chunking=args.use_chunking,
        max_samples=args.max_samples,
        strict=args.strict_data,
        seed=args.seed,
        # The demo's audio is known to be good, and a plan needs only the lengths.
        listen=args.check_audio and bool(manifests) and not planned,
        skip_bad_audio=args.skip_bad_audio or args.check_data,
        for_synthesis=for_synthesis,
        needs=needs,
        tiers=tuple(args.tier or ()),
        text_column=args.text_column,
    )
    return again(DataOptions(manifests, checks, planned), earlier_run)


def again(data: DataOptions, earlier_run: RunInfo | None) -> DataOptions:
    """The request with what `earlier_run`, which is resumed or used, held out for evaluation."""
    if earlier_run is None:
        return data
    checks = replace(data.checks, held_out=tuple(earlier_run.held_out))
    return replace(data, checks=checks, had_others=not earlier_run.demo)


def load_splits(
    data: DataOptions,
    normalise: Callable[[str], str],
    demo: Callable[[], dict[str, str]] | None = None,
    stand_in: Callable[[], dict[str, Corpus]] | None = None,
) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there are such, "test", "replay" and watched ones;
    only "test" if only its manifest is read. Prints their sizes and what was rejected.

    Without manifests, `demo()` makes the demo corpus and returns its manifests by split, and
    `stand_in()` returns the corpora of a planned run. Raises `UsageError` if there are no data, and
    `DataError` if they cannot be used."""
    manifests = data.manifests
    if not manifests:
        if data.planned and stand_in:
            return stand_in()
        if demo is None:
            raise UsageError(
                "there are no data: give --train_manifest or, with --evaluate, --test_manifest"
            )
        if data.had_others:
            raise UsageError(
                "these weights were trained on other data than the demo corpus, which is used"
                " without a manifest: add --train_manifest or, with --evaluate, --test_manifest"
            )
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        manifests = demo()
    return read_manifests(manifests, normalise, data.checks)


def read_manifests(
    manifests: dict[str, str | list[str]], normalise: Callable[[str], str], checks: Checks
) -> dict[str, Corpus]:
    """The checked corpora of {split: path or paths}; prints their sizes and what was rejected.

    `checks.max_samples` shortens "train" to the rows of `draw`; sets that are only evaluated have
    joined segments, and no text that a recogniser wrote. If there is a "train" but no "val", a part
    of these rows is held out: if possible `checks.held_out`, whatever the seed and `max_samples`
    are now. Raises `DataError` and `UsageError`."""
    from speech.writing.changes import Changes  # a transcription reads no manifests

    corpora = {}
    normalise = Changes(normalise)
    for split, path in manifests.items():
        name = path if isinstance(path, str) else ", ".join(path)
        own = (
            checks if split in LEARNED_FROM else replace(checks, join_segments=True, drafted=False)
        )
        corpora[split], rejected = load_corpus(path, normalise, own)
        seconds = corpora[split].seconds
        report_rejections(f"{split} set ({name})", seconds, rejected, checks.strict)
    if report := normalise.report():
        print(report)
    if whole := corpora.get("train"):
        rows = draw(len(whole), checks)
        if len(rows) < len(whole):
            print(f"--max_samples: {len(rows)} of {len(whole)} training utterances are taken")
            corpora["train"] = whole.select(rows)
        if "val" not in corpora:
            earlier_keys = set(checks.held_out)
            corpora["train"], corpora["val"] = hold_out(whole, rows, checks.seed, earlier_keys)
    note_overlaps(corpora)
    return corpora


def note_overlaps(corpora: dict[str, Corpus]) -> None:
    """Prints what evaluation sets share with replayed material, and watched ones with "train"."""
    for name, corpus in corpora.items():
        shared = Rejections()
        for learned in LEARNED_FROM:
            is_told = learned == REPLAY or name not in SPLITS
            if learned in corpora and name not in LEARNED_FROM and is_told:
                from speech.data.checks import overlap

                title = "training" if learned == "train" else learned
                overlap(corpora[learned], corpus, shared, title)
        if shared.notes:
            print(shared.noted(f"{name} set"))


def stand_in(
    seconds: float, most_characters: int = MOST_CHARACTERS, labels: Sequence = ()
) -> dict[str, Corpus]:
    """The corpora "train" and "val" of a planned run without data: silence of `seconds` each, by
    one speaker, with texts of as many short words as are said in that time, cut to
    `most_characters`, and with `labels` in turn. They are large enough for every global batch.
    Raises `UsageError` for `seconds` over LONGEST_STAND_IN."""
    if seconds > LONGEST_STAND_IN:
        raise UsageError(
            "a plan without data is for utterances of --max_duration, up to"
            f" {LONGEST_STAND_IN:g} s: give --train_manifest, or the length of your longest"
            " utterance"
        )
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
    if labels:
        corpus.labels = Strings(json.dumps(labels[row % len(labels)]) for row in range(count))
    return {"train": corpus, "val": corpus}


def run_info(
    data: DataOptions, corpora: dict[str, Corpus], earlier_run: RunInfo | None = None
) -> RunInfo:
    """The record in a checkpoint of the `corpora` of `load_splits(data, ...)`. `earlier_run`: that
    of the run that is resumed, or of a released model's training, if recordings may later be cut
    into pieces as long as its utterances."""
    held_out = "train" in data.manifests and "val" not in data.manifests
    longest = [float(corpora[name].seconds.max()) for name in LEARNED_FROM if name in corpora]
    if earlier_run:
        longest.append(earlier_run.longest)
    return RunInfo(
        held_out=held_out_keys(corpora["val"]) if held_out else [],
        longest=max(longest),
        demo=not data.manifests,
        sets=about_sets(corpora),
    )


def about_sets(corpora: dict[str, Corpus]) -> dict[str, dict]:
    """{split: its utterances, hours and languages, as far as the manifest has them, and how many
    of its texts a recogniser wrote}, of SPLITS."""
    return {
        name: {
            "utterances": len(corpus),
            "hours": float(corpus.seconds.sum()) / 3600,
            "languages": sorted(filter(None, corpus.languages.names)),
            "drafted": int(np.count_nonzero(corpus.drafted)),
        }
        for name, corpus in corpora.items()
        if name in SPLITS
    }


def some_items(data, seed: int | None, count: int) -> list[dict]:
    """`count` items of a data set, of random utterances, to fit initial weights or statistics to.
    There are fewer if fewer can be read. Data in random order need no `seed`."""
    order = np.arange(len(data))
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(data))
    items = []
    for index in order:
        if len(items) == count:
            break
        with contextlib.suppress(DataError):  # training itself reports it
            items.append(data.item(int(index), 0))
    return items


def report_checked(sets: dict[str, Corpus], from_scratch: bool = False) -> None:
    """Ends --check_data of a recogniser: `checks.report_texts`, and says what can be used."""
    from speech.data.checks import report_texts

    report_texts(sets, from_scratch)
    say_checked(sets)


def say_checked(sets: dict[str, Corpus]) -> None:
    """Prints what there is to train on and to evaluate on."""
    print(describe_utterances(sets.values()))
    counts = ", ".join(f"{len(corpus)} utterances in {name}" for name, corpus in sets.items())
    print(f"checked: {counts} can be used")


def draw(count: int, checks: Checks) -> np.ndarray:
    """The rows of a checked training set of `count` that `checks.max_samples` leaves, ascending.
    They are the first ones of an order of all rows, so that more contain every smaller choice."""
    if checks.max_samples is None or checks.max_samples >= count:
        return np.arange(count)
    order = np.random.default_rng([checks.seed, DRAW]).permutation(count)
    return np.sort(order[: checks.max_samples])


def drop(
    corpus: Corpus, name: str, fault: Callable[[int], tuple[str, str] | None], strict: bool
) -> Corpus:
    """The corpus without the utterances for which `fault(index)` returns (reason, details), which
    are reported under `name`. Raises `DataError` if `strict` and any is, or if all are."""
    rejected = Rejections()
    found = ((index, fault(index)) for index in range(len(corpus)))
    corpus = corpus.without({index: problem for index, problem in found if problem}, rejected)
    if rejected.total:
        report_rejections(name, corpus.seconds, rejected, strict)
    return corpus


def drop_long_texts(
    corpus: Corpus, name: str, tokens_of: Callable[[str], int], most: int, strict: bool
) -> Corpus:
    """`drop` of the utterances whose text has more than `most` tokens (--max_target_tokens)."""

    def fault(index: int) -> tuple[str, str] | None:
        tokens = tokens_of(corpus.texts[index])
        if tokens <= most:
            return None
        reason = f"text is longer than {most} tokens (--max_target_tokens)"
        return reason, f"{tokens} tokens with the prompt"

    return drop(corpus, name, fault, strict)


def hold_out(
    whole: Corpus, rows: np.ndarray, seed: int, earlier_keys: set[str]
) -> tuple[Corpus, Corpus]:
    """(training part, evaluation part) of the ascending `rows` of the training set: a random part
    is held out: HELD_OUT of it, FEWEST_HELD_OUT (of few utterances a tenth) to MOST_HELD_OUT, none
    of them with a text that a recogniser wrote. If `earlier_keys` has the keys of other utterances,
    of any row, these are held out instead. Raises `DataError` if nothing is left."""
    written = rows if whole.drafted is None else rows[~whole.drafted[rows]]
    if not len(written):
        raise DataError("a recogniser wrote all training texts: add --val_manifest")
    fewest = min(FEWEST_HELD_OUT, max(1, len(written) // 10))
    count = min(MOST_HELD_OUT, max(fewest, round(HELD_OUT * len(written))))
    order = np.random.default_rng(seed).permutation(len(written))
    chosen = written[np.sort(order[:count])]
    if earlier_keys and set(held_out_keys(whole.select(chosen))) != earlier_keys:
        kept = np.flatnonzero([key in earlier_keys for key in held_out_keys(whole)])
        if len(kept):
            chosen = kept
        else:
            print("the held-out utterances are not in the training set any more: others are drawn")
    rest = np.setdiff1d(rows, chosen)
    if not len(rest):
        raise DataError(
            "one utterance is too few to hold one out for evaluation: add --val_manifest"
        )
    total = len(chosen) + len(rest)
    print(f"no --val_manifest: {len(chosen)} of the {total} training utterances are held out")
    return whole.select(rest), whole.select(chosen)
