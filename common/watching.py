"""Watched sets: further sets that are evaluated while a model trains, such as a language that it
shall not forget; how they were before, and how far they may get worse."""

from common.report import ERROR_RATES, shown

EVALUATION = "evaluation set"  # its name in tables
SMALLEST_RISE = 0.01  # of a metric, that can end a run: one point of an error rate


def note(progress: dict, name: str, value: float) -> None:
    """Notes a value of the metric of a watched set. The first one is that of its first
    evaluation, before the first update if the set was watched then."""
    progress["watched"].setdefault(name, []).append([progress["step"], value])


def above_limit(task, progress: dict, most_rise: float | None) -> list[str]:
    """A line for each watched set whose last value is worse than its first one by more than the
    share `most_rise` of that, and by more than SMALLEST_RISE. None if `most_rise` is None."""
    lines = []
    for name in task.watched if most_rise is not None else ():
        values = progress["watched"].get(name)
        if not values:  # a run that is resumed begins to watch it
            continue
        (first_step, first), (step, value) = values[0], values[-1]
        worse = first - value if task.higher_is_better else value - first
        allowed = max(most_rise * abs(first), SMALLEST_RISE)
        if not worse <= allowed:  # nor NaN
            lines.append(
                f"watched {name}: {task.metric} {shown(task.metric, value)} at step {step}, from"
                f" {shown(task.metric, first)} at step {first_step}: that is more than"
                f" --stop_when_watched_rises {most_rise:g} allows, and training ends; the best"
                f" weights are those of step {progress['best_step']}; a larger --replay_share, a"
                " lower --learning_rate or a larger limit let it go on"
            )
    return lines


def by_step(progress: dict) -> dict[str, dict[str, list | None]]:
    """{set: {"before", "best", "last": [step, value]}}: the metric of the evaluation set and of
    each watched set before the first update, with the best weights, and at the end; None where a
    set was not evaluated."""
    steps = {"before": 0, "best": progress["best_step"], "last": progress["last_evaluation"]}
    found = {}
    watched = {f"watched {name}": values for name, values in progress["watched"].items()}
    for name, values in {EVALUATION: progress["evaluations"], **watched}.items():
        known = dict(map(tuple, values))
        found[name] = {
            what: [step, known[step]] if step in known else None for what, step in steps.items()
        }
    return found


def table(task, progress: dict) -> list[str]:
    """`by_step` as lines to print; none if no set is watched."""
    if not task.watched:
        return []
    sets = by_step(progress)
    metric = task.metric.upper() if task.metric in ERROR_RATES else task.metric
    width = max(map(len, [metric, *sets]))
    last = f"last (step {progress['last_evaluation']})"
    heads = ["before training", f"best (step {progress['best_step']})", last]
    lines = ["  ".join([metric.ljust(width), *(f"{head:>18}" for head in heads)])]
    for name, values in sets.items():
        cells = [shown(task.metric, each[1]) if each else "-" for each in values.values()]
        lines.append("  ".join([name.ljust(width), *(f"{cell:>18}" for cell in cells)]))
    return lines
