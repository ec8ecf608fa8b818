"""What the page says of a run: how far it is, and how it has ended."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from common import run_length
from common.report import Report
from tests.webui.locks import held
from tests.webui.test_outputs import write_metrics
from webui import outputs, progress, runs


def make(folder: Path) -> runs.Run:
    """A run that was not started."""
    return runs.create(folder, "run", {"recipe": "program"}, [])


@pytest.mark.parametrize(
    "ended, log, word, detail",
    [
        ('{"status": 0}', "weights: x", "finished", "step 9 is saved"),
        ('{"status": 129}', "", "stopped", "step 9 is saved"),
        ('{"status": 2}', "error: no such flag\n", "failed", "error: no such flag"),
        ('{"status": 3}', "it does not fit", "failed", "it does not fit"),
        ('{"status": 1}', "Traceback\n  a\nKeyError: 1", "failed", "KeyError: 1"),
        ('{"status": 137}', "step", "killed", None),
        ('{"status"', "error: x\n", "failed", "error: x"),
        (None, "error: x", "failed", "error: x"),
        (None, "stopped by SIGTERM: saved", "stopped", "step 9 is saved"),
        (None, "weights: x\npeak: 1 GiB", "finished", "step 9 is saved"),
        (None, "step 9/10", "killed", "it ended without a word; step 9 is saved"),
    ],
)
def test_how_a_run_has_ended(tmp_path, ended, log, word, detail):
    run = make(tmp_path)
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "checkpoint_step_00000009.pt").touch()
    earlier = "=== 2026-01-01 10:00:00 === python\nerror: earlier\n"
    (run.folder / "run.log").write_text(f"{earlier}=== 2026-01-02 10:00:00 === python\n{log}")
    if ended:
        (run.folder / "ended.json").write_text(ended)
    state = progress.state(run)
    assert state.word == word and detail in (None, state.detail)


def test_a_command_line_run_is_known_by_its_weights(tmp_path):
    checkpoints = tmp_path / "xtts.v2" / "checkpoints"
    checkpoints.mkdir(parents=True)
    header = {"recipe": "konkani_conformer"}
    save_file({"a": torch.zeros(1)}, checkpoints / "best.safetensors", metadata=header)
    (checkpoints / "best.json").write_text('{"step": 7, "epoch": 1, "loss": 2.5, "cer": 0.125}')
    (checkpoints / "checkpoint_step_00000009.pt").touch()
    (run,) = runs.list_runs(tmp_path)
    assert (run.name, run.recipe, run.settings) == ("xtts.v2", "konkani_conformer", {})
    assert progress.state(run) == progress.State("stopped", "step 9 is saved (from a command line)")
    names = [path.name for path in outputs.weights(run.folder)]
    assert names == ["best.safetensors", "checkpoint_step_00000009.pt"]
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "transcripts.jsonl").touch()
    best = "best at step 7: 12 of 100 letters wrong (cer 12.50 %), loss 2.500"
    assert progress.state(run) == progress.State("finished", best)


def test_progress_is_read_as_the_report_writes_it(tmp_path, capfd):
    """By metrics.jsonl or the log, whichever is newer."""
    run = make(tmp_path)
    batches = SimpleNamespace(hours=0.5, per_epoch=10, global_batch_size=8, described=lambda: "")
    length = run_length.RunLength(600, None, 600, 100, 5)
    report = Report(run.folder / "logs", 0, 600)
    report.bar, report.last_line = None, -1e9
    report.ends[0] = time.monotonic() - 0.75
    print(run_length.describe(length, batches))
    report.write(100, **{"eval/wer": 0.5, "eval/loss": 3.0, "eval/cer": 0.25})
    values = {"loss": 1.5, "learning_rate": 1e-3, "utterances_per_second": 3.0}
    values |= {"memory_bytes": 2**29, "data_wait_share": 0.1, "gpu_utilisation": 0.5}
    report.write(110, **{f"train/{name}": value for name, value in values.items()})
    later = {"loss": 1.25, "learning_rate": 2e-3, "utterances_per_second": 4.0}
    later |= {"memory_bytes": 2**30, "data_wait_share": 0.2, "gpu_utilisation": 0.75}
    report.progress(120, later)
    report.close()
    out, err = capfd.readouterr()
    (run.folder / "run.log").write_text(f"=== 2026-01-01 10:00:00 === x\n{out}{err}")
    numbers = {
        "step": "120 of 600",
        "loss": "1.250",
        "learning rate": "2.0e-03",
        "utterances/s": "4.0",
        "memory": "1.0 GiB",
        "waiting for data": "20 %",
        "GPU busy": "75 %",
        "evaluation": "25 of 100 letters wrong (cer 25.00 %), 50 of 100 words wrong (wer 50.00 %),"
        " loss 3.000 at step 100",
    }
    assert progress.numbers(run) == numbers
    with held(run.folder / "checkpoints" / ".lock"):
        assert progress.numbers(run) == {**numbers, "time": "about 6 minutes left"}
        assert progress.state(run).detail == "step 120 of 600, about 6 minutes left"
        os.utime(run.folder / "run.log", (0, time.time() - 300))
        assert progress.numbers(run)["time"] == "nothing was printed for 5 minutes"
        (run.folder / "run.log").write_text(f"=== 2026-01-01 10:00:00 === x\n{out}")
        assert progress.numbers(run)["step"] == "110 of 600"
        assert progress.numbers(run)["loss"] == "1.500"
        # It has been started again, and has not come so far.
        (run.folder / "run.log").write_text(f"{out}=== 2026-01-01 11:00:00 === x\nreading a.json")
        assert progress.numbers(run) == {}
        assert progress.state(run).word == "running"
        assert progress.state(run).detail.startswith("it prepares its data")
        with open(run.folder / "run.log", "a") as log:
            log.write("skipped: a.wav\n" * 1000)
        assert progress.state(run) == progress.State("running", "step 110")


def test_the_stage_that_is_trained_is_shown(tmp_path):
    """A vocoder of Matcha has separate folders."""
    run = make(tmp_path)
    write_metrics(run.folder, ['{"step": 8, "train/loss": 1.0}'], "earlier-1")
    os.utime(write_metrics(run.folder, ['{"step": 9, "train/loss": 1.0}'], "first"), (1, 1))
    os.utime(write_metrics(run.folder, ['{"step": 10, "train/loss": 2.0}'], "vocoder"), (2, 2))
    (run.folder / "checkpoints" / "vocoder").mkdir(parents=True)
    (run.folder / "checkpoints" / "vocoder" / "checkpoint_step_00000010.pt").touch()
    (run.folder / "ended.json").write_text('{"status": 143}')
    assert outputs.metrics(run.folder) == [{"step": 10, "train/loss": 2.0}]
    assert progress.numbers(run) == {"stage": "vocoder", "step": "10", "loss": "2.000"}
    assert progress.state(run) == progress.State("stopped", "step 10 of the vocoder is saved")
    with held(run.folder / "checkpoints" / ".lock"):
        assert progress.state(run) == progress.State("running", "vocoder: step 10")
    write_metrics(run.folder, ['{"step": 1, "train/loss": 3.0}'])
    assert outputs.metrics(run.folder) == [{"step": 1, "train/loss": 3.0}]
