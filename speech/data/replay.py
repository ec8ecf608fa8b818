"""The flags of sets against forgetting: old material that is replayed among the new, and sets that
are watched; their names among a run's sets; what they share with its other sets."""

import itertools
from pathlib import Path

from common import options
from common.errors import UsageError
from speech.data.checks import overlap
from speech.data.columns import Corpus, Rejections, Strings, printable

REPLAY = "replay"
NAMES = {"train": "training", REPLAY: REPLAY}  # in messages
TRAINED = tuple(NAMES)  # the sets that a model learns from
WATCHED = "watched "  # how the name of a watched set begins
FLAGS = ("replay_manifest", "replay_share", "watch_manifest", "stop_when_watched_rises")
# Rows for `common.options`.
EXCLUDES = (*((flag, options.COMMAND, options.TRAINS) for flag in FLAGS),)
NEEDS = (
    ("replay_manifest", ("train_manifest",), ""),
    ("replay_share", ("replay_manifest",), ""),
    ("watch_manifest", ("train_manifest",), ""),
    ("stop_when_watched_rises", ("watch_manifest",), ""),
)


def add_arguments(parser) -> None:
    group = parser.add_argument_group("against forgetting")
    group.add_argument(
        "--replay_manifest",
        type=options.path,
        metavar="FILE",
        help="old material, such as the language that the model knows, to train on beside the new",
    )
    group.add_argument(
        "--replay_share",
        type=options.number(float, 0.0, 1.0, open_low=True),
        default=0.1,
        metavar="S",
        help=(
            "share of the utterances of every update that are old; an epoch is one of the new"
            " material (0.1)"
        ),
    )
    group.add_argument(
        "--watch_manifest",
        type=options.path,
        action=options.Repeated,
        nargs="+",
        metavar="FILE",
        help=(
            "further sets to evaluate with the evaluation set, also before training; can be given"
            " several times"
        ),
    )
    group.add_argument(
        "--stop_when_watched_rises",
        type=options.RATE,
        metavar="X",
        help=(
            "end at the first evaluation in which the metric of a watched set is worse than before"
            " training by more than X times its value then, and by more than 0.01 (one point of an"
            " error rate); the best weights are among those before (never)"
        ),
    )


def resolve(args) -> dict[str, str]:
    """{name of the set: path} of the flags, also of a recipe without them. Raises `UsageError`."""
    found = {}
    if getattr(args, "replay_manifest", None):
        found[REPLAY] = args.replay_manifest
    paths = getattr(args, "watch_manifest", None) or []
    for number, path in enumerate(paths):
        place = Path(path)
        name = WATCHED + printable(place.stem)
        if name in found:
            name = WATCHED + printable(f"{place.absolute().parent.name}/{place.stem}")
        if name in found or path in paths[:number]:
            raise UsageError(
                f"--watch_manifest {path}: it, or one of the same name, is given before; rename the"
                " file or its folder"
            )
        found[name] = path
    return found


def watched(sets: dict, most_rise: float | None):
    """The watched ones of a run's `sets`, for `Task.further`; None if there are none. `most_rise`:
    the value of --stop_when_watched_rises."""
    found = {
        name.removeprefix(WATCHED): each for name, each in sets.items() if name.startswith(WATCHED)
    }
    if not found:
        return None
    from common.parts.watching import Watched

    return Watched(found, most_rise)


def texts(corpora: dict[str, Corpus]) -> Strings:
    """All texts that a model learns from, which a new vocabulary is made of."""
    if REPLAY not in corpora:
        return corpora["train"].texts
    return Strings(itertools.chain(*(corpora[name].texts for name in TRAINED)))


def note_overlaps(corpora: dict[str, Corpus]) -> None:
    """Prints what evaluation sets share with replayed material, and watched sets with all that is
    trained on. (Of the other pairs --check_data tells.)"""
    for name, corpus in corpora.items():
        shared = Rejections()
        for trained in TRAINED:
            is_told_of = trained == REPLAY or name.startswith(WATCHED)
            if trained in corpora and name not in TRAINED and is_told_of:
                overlap(corpora[trained], corpus, shared, NAMES[trained])
        if shared.notes:
            print(shared.noted(f"{name} set"))
