"""metrics.jsonl, the progress bar and its plain lines, training.png."""

import json

import matplotlib.pyplot  # noqa: F401  drawing would import it, which takes a second

from common import report

DRAW = report.Report.draw  # before conftest.py replaces it
VALUES = {
    "loss": 2.0,
    "learning_rate": 1e-3,
    "utterances_per_second": 5.0,
    "memory_bytes": 2**30,
    "data_wait_share": 0.02,
    "gpu_utilisation": None,
}


def lines(folder) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_without_a_terminal_there_are_plain_lines_seconds_apart_and_a_last_one(tmp_path, capsys):
    made = report.Report(tmp_path, 4, 10)
    for step in range(5, 11):
        made.progress(step, VALUES)
    made.last_line -= report.PLAIN_SECONDS
    made.progress(7, VALUES)
    made.close()
    out, err = capsys.readouterr()
    assert out == "" and [line.split("  ")[:2] for line in err.splitlines()] == [
        ["step 10/10", "loss 2.000"],
        ["step 7/10", "loss 2.000"],
    ]
    assert "5.0 utterances/s  1.0 GiB  waiting 2%" in err


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    first = report.Report(tmp_path, 0, 10)
    for step in (1, 2, 3):
        first.write(step, event="हांव", value=step)
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "cut sho')
    second = report.Report(tmp_path, 2, 10)
    second.write(3, value=30)
    second.close()
    kept = [{"step": step, "event": "हांव", "value": step} for step in (1, 2)]
    assert lines(tmp_path) == [*kept, {"step": 3, "value": 30}]


def test_training_png_is_drawn_from_the_metrics(tmp_path):
    made = report.Report(tmp_path, 0, 10)
    for step in (1, 2):
        made.write(
            step,
            **{
                "train/loss": 3.0 / step,
                "train/learning_rate": 1e-3,
                "eval/loss": 2.0,
                "eval/accuracy": 0.5,
            },
        )
    DRAW(made, "accuracy")
    made.close()
    assert (tmp_path / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "training.png"]
