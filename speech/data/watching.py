"""Watched sets, which are evaluated with the evaluation set, such as a language that a model shall
not forget: the flags, their names among a run's sets, what they share with the training set."""

from dataclasses import dataclass
from pathlib import Path

from common import options
from common.errors import UsageError
from common.options import TRAINS, flag
from speech.data.columns import printable

WATCHED = "watched "  # how the name of a watched set begins
# Rows for `Parser.refuse`.
NEEDS = (
    ("watch_manifest", ("train_manifest",), ""),
    ("stop_when_watched_rises", ("watch_manifest",), ""),
)


@dataclass(frozen=True)
class WatchingFlags:
    """Flags of watched sets."""

    # fmt: off
    watch_manifest: list[str] | None = flag(
        options.path, None, "FILE",
        "further sets to evaluate with the evaluation set, also before training; can be given"
        " several times", TRAINS, action=options.Repeated, nargs="+")
    stop_when_watched_rises: float | None = flag(
        options.RATE, None, "X",
        "end at the first evaluation in which the metric of a watched set is worse than before"
        " training by more than X times its value then, and by more than 0.01 (one point of an"
        " error rate); the best weights are among those before (never)", TRAINS)


def add_arguments(parser) -> None:
    options.add_record(parser, "against forgetting: watched sets", WatchingFlags)
    parser.refuse((), NEEDS)


def resolve(args) -> dict[str, list[str]]:
    """{name of the set: paths} of the flags. Raises `UsageError`."""
    manifests = {}
    for number, path in enumerate(args.watch_manifest):
        place = Path(path)
        name = WATCHED + printable(place.stem)
        if name in manifests:
            name = WATCHED + printable(f"{place.absolute().parent.name}/{place.stem}")
        if name in manifests or path in args.watch_manifest[:number]:
            raise UsageError(
                f"--watch_manifest {path}: one of the same name is given before; rename this one"
            )
        manifests[name] = [path]
    return manifests


def watched(sets: dict, most_rise: float | None):
    """The watched ones of a run's `sets`, for `Task.further`; None if there are none."""
    chosen = {
        name.removeprefix(WATCHED): batches
        for name, batches in sets.items()
        if name.startswith(WATCHED)
    }
    if not chosen:
        return None
    from common.parts.watching import Watched

    return Watched(chosen, most_rise)
