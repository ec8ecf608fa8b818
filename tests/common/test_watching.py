"""Watched sets: their lines, the limit, and what a run keeps."""

import json
import math

import pytest

from common.parts import watching
from tests import small
from tests.common.test_loop import cut


def scripted(*values: float):
    """An `evaluate` that returns these values of "ctc", one after the other: at each evaluation
    that of the evaluation set, then those of the watched sets."""
    results = iter(values)
    return lambda model, eval_batches: {"ctc": (next(results), 1.0), "first": (0.0, 1.0)}


def run(folder, values: tuple, *flags, names=("old",), **changes) -> tuple[object, dict]:
    args = small.make_args(folder, *cut(1, 1), "--eval_every", "2", "--max_steps", "8", *flags)
    sets = {name: small.Waveforms(3, seed=2) for name in names}
    return args, small.run(args, evaluate=scripted(*values), watched=sets, **changes)[1]


LIMIT = ("--stop_when_watched_rises", "0.2")


def test_a_line_for_each_set_at_every_evaluation_and_a_table(tmp_path, capsys):
    values = (3.0, 1.0, 2.0, 2.5, 1.5, 2.0, 2.0, 2.5, 1.7, 2.5, 2.0, 2.2, 2.6, 1.6, 2.1)
    args, progress = run(tmp_path, values, names=("old", "digits"))
    out = capsys.readouterr().out
    assert out.count("\n  watched old: ctc ") == out.count("\n  watched digits: ctc ") == 5
    assert progress.parts["watched"] == {
        "old": [[0, 1.0], [2, 1.5], [4, 2.5], [6, 2.0], [8, 1.6]],
        "digits": [[0, 2.0], [2, 2.0], [4, 1.7], [6, 2.2], [8, 2.1]],
    }
    table = out[out.index("\nctc  ") + 1 :].splitlines()[:4]
    assert table[0].split("  ")[0] == "ctc"
    assert [line.split()[-3:] for line in table[1:]] == [
        ["3.000", "2.000", "2.600"],
        ["1.000", "2.500", "1.600"],
        ["2.000", "1.700", "2.100"],
    ]
    assert "best (step 4)" in table[0] and "last (step 8)" in table[0]
    evaluated = [line for line in small.metrics(args) if "eval/ctc" in line]
    values = {line["step"]: line["watched/old/ctc"] for line in evaluated}
    assert values == {0: 1.0, 2: 1.5, 4: 2.5, 6: 2.0, 8: 1.6}
    noted = json.loads((args.checkpoint_dir / "best.json").read_text())
    assert noted["watched"]["old"] == [[0, 1.0], [2, 1.5], [4, 2.5]]


def test_training_ends_at_the_first_evaluation_above_the_limit(tmp_path, capsys):
    _, progress = run(tmp_path, (3.0, 1.0, 2.0, 1.19, 1.0, 1.21), *LIMIT)
    assert progress.step == 4 and (progress.best, progress.best_step) == (2.0, 2)
    out = capsys.readouterr().out
    assert "watched old: ctc 1.210 at step 4, from 1.000 at step 0" in out
    assert "the best weights are those of step 2" in out


def test_without_the_flag_nothing_ends(tmp_path):
    _, progress = run(tmp_path, (3.0, 1.0, 2.0, 9.0, 1.0, 9.0, 0.5, 9.0, 0.4, 9.0))
    assert progress.step == 8 and progress.best_step == 8


@pytest.mark.parametrize(("value", "ends"), [(0.009, False), (0.012, True), (math.nan, True)])
def test_a_value_near_zero_may_rise_by_one_point(tmp_path, value, ends):
    values = (3.0, 0.001, 2.0, value, 1.0, value, 1.0, value, 1.0, value)
    _, progress = run(tmp_path, values, *LIMIT)
    assert (progress.step == 2) is ends


def test_more_may_be_better(tmp_path):
    values = (0.3, 1.0, 0.4, 1.5, 0.5, 0.79, 0.6)
    _, progress = run(tmp_path, values, *LIMIT, higher_is_better=True)
    assert progress.step == 4 and progress.best_step == 2


def test_a_resumed_run_keeps_the_values_before_training_and_may_have_another_limit(tmp_path):
    first = (3.0, 1.0, 2.0, 1.15)
    run(tmp_path, first, *LIMIT, "--max_steps", "2")
    _, progress = run(tmp_path, (1.0, 1.25), *LIMIT, "--resume", "auto")
    assert progress.step == 4 and progress.parts["watched"]["old"] == [
        [0, 1.0],
        [2, 1.15],
        [4, 1.25],
    ]
    _, progress = run(tmp_path, (), *LIMIT, "--resume", "auto")  # it has ended
    assert progress.step == 4
    more = ("--stop_when_watched_rises", "0.5", "--resume", "auto")
    _, progress = run(tmp_path, (1.0, 1.4, 0.9, 1.6), *more)
    assert progress.step == 8 and progress.best_step == 6


def test_a_set_that_is_watched_later_has_no_value_before_training(tmp_path, capsys):
    run(tmp_path, (3.0, 1.0, 2.0, 1.0), "--max_steps", "2")
    values = (1.0, 1.0, 5.0, 1.0, 1.0, 6.1)
    _, progress = run(tmp_path, values, *LIMIT, "--resume", "auto", names=("old", "new"))
    assert progress.step == 6 and progress.parts["watched"]["new"] == [[4, 5.0], [6, 6.1]]
    table = watching.Watched({}).by_step(progress)
    assert table["watched new"]["before"] is None and table["watched new"]["best"] == [4, 5.0]
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["-", "5.000", "6.100"]
