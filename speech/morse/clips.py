"""Which Morse clips a run trains on and is evaluated on: the flags, synthetic clips or
recordings."""

from dataclasses import dataclass, replace

from common import options
from common.errors import DataError, UsageError
from common.options import TRAINS, USUAL, flag
from speech.data import splits
from speech.data.splits import LEARNED_FROM
from speech.morse.alphabet import normalise
from speech.morse.recordings import Recordings, from_corpus, read_splits
from speech.morse.synthesis import CONDITIONS, LIMITS, LONGEST, Choice, Synthetic

EPOCH_CLIPS = 4000
EVAL_CLIPS = 200
MOST_CLIPS = 10_000_000
MOST_EVAL_CLIPS = 1_000_000
DEMO_SECONDS = 3.0  # the longest clip of the demo
DRAWN = ("conditions", "wpm", "tone", "snr_db", "clip_seconds")  # flags: what clips are drawn from
SYNTHETIC_ONLY = (*DRAWN, "clips_per_epoch", "eval_clips")
RECORDED = ("data_dir", "train_manifest", "test_manifest")  # flags that name recordings
RELEASED = ("model_dir", "model_file")  # flags that name released weights
GOALS = ("conditions", "data_dir")  # flags that ask for training, see `released.exports_only`
ALIGNED = "a released encoder is aligned already; leave the first out"
NOT_ALIGNED = "recordings do not say when a symbol is sent; give --ctc_weight instead"
# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
EXCLUDES = (
    ("train_manifest", "data_dir", "both name recordings; give one of them"),
    ("test_manifest", "data_dir", "both name recordings to test on; give one of them"),
    ("audio_root", "data_dir", "paths in metadata.csv start at the second; leave the first out"),
    *(
        (flag, source, "the first is for synthetic clips only")
        for flag in SYNTHETIC_ONLY
        for source in RECORDED
    ),
    *(
        (flag, "transcribe", "the first is for training and --evaluate")
        for flag in (*SYNTHETIC_ONLY, "data_dir")
    ),
    ("clips_per_epoch", "evaluate", "the first is for training; leave it out"),
    ("alignment_weight", "ctc_weight", "both train the encoder's output layer; give one of them"),
    *(("alignment_weight", model, ALIGNED) for model in RELEASED),
    *(("alignment_weight", source, NOT_ALIGNED) for source in RECORDED),
)
NEEDS = tuple((flag, RECORDED, "") for flag in ("max_samples", "cache_audio", "audio_root"))

Clips = Synthetic | Recordings


@dataclass(frozen=True)
class ClipOptions:
    """The request of the flags. `named`: whether they name clips; `counts`: synthetic ones."""

    choice: Choice
    named: bool
    counts: dict[str, int]
    data_dir: str | None
    seed: int


def _range(what: str, name: str):
    """The flag of a range that clips are drawn from."""
    kind = options.number(float, *LIMITS[name])
    return flag(kind, None, ("LOW", "HIGH"), f"{what} (the conditions' own)", nargs=2)


@dataclass(frozen=True)
class ClipFlags:
    """Flags of Morse clips."""

    # fmt: off
    conditions: list[str] | None = flag(
        list(CONDITIONS), None, "NAME",
        f"conditions that clips are drawn from, each equally likely: {', '.join(CONDITIONS)}"
        " (demo; all but demo with a released model or --from_scratch)", USUAL, nargs="+")
    wpm: list[float] | None = _range("speed, words a minute", "wpm")
    tone: list[float] | None = _range("tone, Hz", "tone")
    snr_db: list[float] | None = _range("SNR in 2,500 Hz, dB", "snr_db")
    clip_seconds: float | None = flag(
        options.number(float, 1.0, LONGEST), None, "S",
        "longest clip; a slow symbol is sent whole (29; 3 in the demo)")
    clips_per_epoch: int | None = flag(
        options.number(int, 1, MOST_CLIPS), None, "N",
        f"synthetic clips in an epoch; every epoch has new ones ({EPOCH_CLIPS})")
    eval_clips: int | None = flag(
        options.number(int, 1, MOST_EVAL_CLIPS), None, "N",
        f"synthetic clips in the evaluation set, and in the test set ({EVAL_CLIPS})")
    data_dir: str | None = flag(
        options.path, None, "DIR",
        "train and evaluate on a folder of recordings with metadata.csv or splits/", USUAL)
    alignment_weight: float | None = flag(
        options.SHARE, None, "X",
        "share of an auxiliary loss on the encoder (which symbol is sent in every frame), for"
        " synthetic clips from scratch (0.3 there)", TRAINS)


def add_arguments(parser) -> None:
    options.add_record(parser, "Morse clips", ClipFlags)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(args, is_demo: bool, alignment_weight: float) -> ClipOptions:
    """Fills in the defaults of these flags and returns what they ask for. `alignment_weight`: the
    default for synthetic clips from scratch. Raises `UsageError`."""
    is_known = not any(getattr(args, name) for name in (*RECORDED, *RELEASED))
    if args.alignment_weight is None:
        args.alignment_weight = alignment_weight if is_known and not args.ctc_weight else 0.0
    if args.alignment_weight:
        args.ctc_weight = 0.0
    if args.alignment_weight and (args.speed_perturbation or args.wave_augment):
        flag = "speed_perturbation" if args.speed_perturbation else "wave_augment"
        raise UsageError(
            f"--{flag} would move what --alignment_weight trains on; clips have speeds, silence and"
            " noise of their own"
        )
    conditions = [name for name in CONDITIONS if name != "demo"]
    if is_demo:
        conditions = ["demo"]
        if args.clip_seconds is None:
            args.clip_seconds = DEMO_SECONDS
    if args.conditions is None:
        args.conditions = conditions
    if args.clips_per_epoch is None:
        args.clips_per_epoch = EPOCH_CLIPS
    if args.eval_clips is None:
        args.eval_clips = EVAL_CLIPS
    choice = Choice(*(getattr(args, name) for name in DRAWN))
    choice.mix()  # what is wrong with it is reported now
    return ClipOptions(
        choice=choice,
        named=bool(args.given & {*DRAWN, *RECORDED}),
        counts={"train": args.clips_per_epoch, "val": args.eval_clips, "test": args.eval_clips},
        data_dir=args.data_dir,
        seed=args.seed,
    )


def read(source: ClipOptions, data: splits.DataOptions, trains: bool = True) -> dict[str, Clips]:
    """The clips "train", "val" and "test" that exist: of --data_dir, of manifests, or synthetic
    ones. Without `trains`, a training set may be missing. Raises `DataError` and `UsageError`."""
    if source.data_dir:
        sets = read_splits(source.data_dir, data.checks)
        needed = ("train", "val") if trains else ("val",)
        missing = [name for name in needed if name not in sets]
        if missing:
            raise DataError(
                f"--data_dir {source.data_dir}: no usable clips in {' and '.join(missing)}"
            )
        return sets
    if data.manifests:
        corpora = splits.read_manifests(data.manifests, normalise, data.checks)
        return {
            name: from_corpus(corpus, f"{name} set", data.checks.strict)
            for name, corpus in corpora.items()
        }
    longest = min(source.choice.clip_seconds or LONGEST, data.checks.max_duration)
    mix = replace(source.choice, clip_seconds=longest).mix()
    sets = {}
    for stream, (name, count) in enumerate(source.counts.items()):
        sets[name] = Synthetic(mix, count, 3 * source.seed + stream)
    return sets


def as_trained(source: ClipOptions, choice: Choice | None) -> ClipOptions:
    """The clips of --evaluate: those that flags name, or drawn as those that the weights were
    trained on, from `choice` (None: from recordings). Raises `UsageError`."""
    if source.named:
        return source
    if choice is None:
        flags = "--data_dir, --test_manifest or --conditions"
        raise UsageError(f"--evaluate needs a test set with these weights: add {flags}")
    return replace(source, choice=choice)


def run_info(data: splits.DataOptions, sets: dict[str, Clips]) -> splits.RunInfo:
    """The record of these sets in a checkpoint."""
    held_out = []
    if "train" in data.manifests and "val" not in data.manifests:
        held_out = splits.held_out_keys(sets["val"].corpus)
    return splits.RunInfo(
        held_out=held_out,
        longest=max(float(sets[name].seconds(0).max()) for name in LEARNED_FROM if name in sets),
        demo=isinstance(sets["train"], Synthetic),
        sets={
            name: {
                "utterances": len(part),
                "hours": float(part.seconds(0).sum()) / 3600,
                "languages": [],
            }
            for name, part in sets.items()
            if name in splits.SPLITS
        },
    )
