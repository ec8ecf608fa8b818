"""Watched sets: further sets that are evaluated while a model trains, such as a language that it
shall not forget; how they were before, and how far they may get worse."""

import math
from dataclasses import dataclass

from common.batches import EvalBatches
from common.progress import Progress
from common.report import ERROR_RATES, shown

EVALUATION = "evaluation set"  # its name in tables
SMALLEST_RISE = 0.01  # of a metric, that can end a run: one point of an error rate
KIND = "watched"  # its name in `Progress.parts`, metrics.jsonl and best.json


@dataclass(frozen=True)
class Watched:
    """The sets that a run watches, by name: `Task.further`. `most_rise`: the share of its first
    value by which the metric of one may get worse before the run ends; None: by any."""

    sets: dict[str, EvalBatches]
    most_rise: float | None = None
    kind: str = KIND

    def note(self, task, progress: Progress, values: dict[str, dict[str, float]]) -> list[str]:
        """Notes an evaluation of all sets in the progress, also whether it ends the run. Returns
        lines to print. The first evaluation of a set is the one before the first update if the set
        was watched then."""
        lines = []
        noted = progress.parts.setdefault(KIND, {})
        for name, results in values.items():
            noted.setdefault(name, []).append([progress.step, results.get(task.metric, math.nan)])
            texts = [f"{key} {shown(key, value)}" for key, value in results.items()]
            lines.append(f"  watched {name}: {'  '.join(texts)}")
        above = self.above_limit(task, progress)
        progress.stop = bool(above)
        return lines + above

    def above_limit(self, task, progress: Progress) -> list[str]:
        """A line for each set whose last value is worse than its first one by more than the share
        `most_rise` of that, and by more than SMALLEST_RISE."""
        lines = []
        for name in self.sets if self.most_rise is not None else ():
            values = progress.parts.get(KIND, {}).get(name)
            if not values:  # a run that is resumed begins to watch it
                continue
            (first_step, first), (step, value) = values[0], values[-1]
            worse = first - value if task.higher_is_better else value - first
            allowed = max(self.most_rise * abs(first), SMALLEST_RISE)
            if not worse <= allowed:  # nor NaN
                lines.append(
                    f"watched {name}: {task.metric} {shown(task.metric, value)} at step {step},"
                    f" from {shown(task.metric, first)} at step {first_step}: that is more than"
                    f" --stop_when_watched_rises {self.most_rise:g} allows, and training ends; the"
                    f" best weights are those of step {progress.best_step}; a larger"
                    " --replay_share, a lower --learning_rate or a larger limit let it go on"
                )
        return lines

    def table(self, task, progress: Progress) -> list[str]:
        """`by_step` as lines to print."""
        values_of_sets = self.by_step(progress)
        metric = task.metric.upper() if task.metric in ERROR_RATES else task.metric
        width = max(map(len, [metric, *values_of_sets]))
        last = f"last (step {progress.last_evaluation})"
        heads = ["before training", f"best (step {progress.best_step})", last]
        lines = ["  ".join([metric.ljust(width), *(f"{head:>18}" for head in heads)])]
        for name, values in values_of_sets.items():
            cells = [shown(task.metric, each[1]) if each else "-" for each in values.values()]
            lines.append("  ".join([name.ljust(width), *(f"{cell:>18}" for cell in cells)]))
        return lines

    def by_step(self, progress: Progress) -> dict[str, dict[str, list | None]]:
        """{set: {"before", "best", "last": [step, value]}}: the metric of the evaluation set and of
        each watched set before the first update, with the best weights, and at the end; None where
        a set was not evaluated."""
        steps = {"before": 0, "best": progress.best_step, "last": progress.last_evaluation}
        values_of_sets = {}
        watched = progress.parts.get(KIND, {})
        named = {f"watched {name}": values for name, values in watched.items()}
        for name, values in {EVALUATION: progress.evaluations, **named}.items():
            known = dict(map(tuple, values))
            values_of_sets[name] = {
                what: [step, known[step]] if step in known else None for what, step in steps.items()
            }
        return values_of_sets
