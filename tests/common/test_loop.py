"""The loop's contract: exact accumulation, recovery from out of memory, bad global batches kept
out, fp16's scaler, signals."""

import copy
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from common import checkpoint, files, optim, report, update
from common.batches import to_device
from common.device import LossScale, Setup
from common.engine import run_global_batch
from common.errors import DataError, Planned, RunError, Stopped, UsageError
from common.evaluation import mean_values
from common.limits import cut_to_fit, length_bucket
from common.loop import Run, begin, finish
from common.parts import offload
from common.ranks import Ranks
from common.saving import made_by
from speech.signal import augment
from tests import small

DRAW = report.Report.draw  # before conftest.py replaces it
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def cut(batch_size: int, accumulation: int) -> tuple[str, ...]:
    return "--batch_size", str(batch_size), "--gradient_accumulation_steps", str(accumulation)


def network(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0
) -> small.Network:
    torch.manual_seed(seed)
    return small.Network(dropout).to(dtype)


def gradient_of(
    model, items: list[dict], sizes: list[int], loss_scale=None, without: str = ""
) -> torch.Tensor:
    """The gradient of one global batch in micro-batches of `sizes` items; the term `without` has no
    targets."""
    model.zero_grad()
    rest = iter(items)
    micro_batches = [small.collate([next(rest) for _ in range(size)]) for size in sizes]
    totals = {
        name: sum(batch["counts"][name] for batch in micro_batches)
        for name in small.LOSS_WEIGHTS
        if name != without
    }
    outcome = run_global_batch(
        model,
        micro_batches,
        {without: 0} | totals,
        small.compute_loss,
        small.LOSS_WEIGHTS,
        Setup(),
        loss_scale,
    )
    assert outcome.failed is None and not outcome.stopped
    return torch.nn.utils.parameters_to_vector(p.grad for p in model.parameters())


def metrics(args) -> list[dict]:
    return [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]


def newest(args) -> checkpoint.Saved:
    return checkpoint.resume("auto", args.checkpoint_dir, small.RECIPE)


# --- accumulation ---------------------------------------------------------------------------------

CUTS = ([4, 4], [2, 2, 2, 2], [1] * 8, [5, 3], [1, 7])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_gradient_does_not_depend_on_how_a_global_batch_is_cut(dtype, tolerance):
    model, items = network(dtype=dtype), small.Waveforms(8)
    whole = gradient_of(model, items, [8])
    assert whole.norm() > 0
    for sizes in CUTS:
        assert small.relative(gradient_of(model, items, sizes), whole) < tolerance


def test_padding_would_be_seen_if_it_were_not_masked(monkeypatch):
    forward = small.Layer.forward
    monkeypatch.setattr(
        small.Layer, "forward", lambda self, x, padding: forward(self, x, torch.zeros_like(padding))
    )
    model, items = network(), small.Waveforms(8)
    whole = gradient_of(model, items, [8])
    assert all(small.relative(gradient_of(model, items, sizes), whole) > 1e-4 for sizes in CUTS)


def test_gradient_is_the_mean_over_targets_and_not_over_micro_batches():
    model, items = network(), small.Waveforms(5)
    counts = dict.fromkeys(small.LOSS_WEIGHTS, 0)
    sums = dict.fromkeys(small.LOSS_WEIGHTS, 0.0)
    for item in items:  # one by one, without padding
        batch = small.collate([item])
        for name, value in small.compute_loss(
            model, next(to_device([batch], torch.device("cpu")))
        ).items():
            sums[name] = sums[name] + value
            counts[name] += batch["counts"][name]
    loss = sum(small.LOSS_WEIGHTS[name] * sums[name] / counts[name] for name in sums)
    expected = torch.nn.utils.parameters_to_vector(
        torch.autograd.grad(loss, list(model.parameters()))
    )
    assert small.relative(gradient_of(model, items, [3, 2]), expected) < 1e-10


def test_a_term_without_targets_in_a_global_batch_adds_nothing():
    model, items = network(), small.Waveforms(5)
    parts = [gradient_of(model, items, [3, 2], without=name) for name in small.LOSS_WEIGHTS]
    assert all(torch.isfinite(part).all() and part.norm() > 0 for part in parts)
    assert small.relative(sum(parts), gradient_of(model, items, [3, 2])) < 1e-10


def test_a_global_batch_without_any_target_changes_nothing_and_ends_nothing():
    model = network()
    batch = small.collate(list(small.Waveforms(2)))
    outcome = run_global_batch(
        model, [batch], {"first": 0, "ctc": 0}, small.compute_loss, small.LOSS_WEIGHTS, Setup()
    )
    assert outcome.failed is None and all(p.grad is None for p in model.parameters())


def test_a_term_without_a_weight_is_not_trained(tmp_path):
    def compute_loss(model, batch):
        return small.compute_loss(model, batch) | {"extra": 1e6 * model.output.weight.sum()}

    reference, _ = small.run(small.make_args(tmp_path / "a"))
    model, _ = small.run(small.make_args(tmp_path / "b"), compute_loss=compute_loss)
    assert torch.equal(small.weights(model), small.weights(reference))


@pytest.mark.parametrize("batch_size, accumulation", [(8, 1), (4, 2), (1, 8)])
def test_training_ends_with_the_same_weights_however_global_batches_are_cut(
    tmp_path, batch_size, accumulation
):
    reference, _ = small.run(small.make_args(tmp_path / "a", *cut(2, 4)))
    model, progress = small.run(small.make_args(tmp_path / "b", *cut(batch_size, accumulation)))
    assert progress.step == 2 and progress.utterances == 13  # 8 and the partial global batch of 5
    assert small.relative(small.weights(model), small.weights(reference)) < 1e-10


def test_a_limit_of_padded_seconds_changes_only_the_cut(tmp_path):
    sizes = []

    def compute_loss(model, batch):
        sizes.append(len(batch["names"]))
        return small.compute_loss(model, batch)

    reference, _ = small.run(small.make_args(tmp_path / "a", *cut(8, 1)))
    model, _ = small.run(
        small.make_args(tmp_path / "b", *cut(8, 1), "--max_batch_seconds", "4"),
        compute_loss=compute_loss,
    )
    assert max(sizes) < 8
    assert small.relative(small.weights(model), small.weights(reference)) < 1e-10


def test_gradient_checkpointing_changes_no_bit(tmp_path):
    reference, _ = small.run(small.make_args(tmp_path / "a", "--dropout", "0.3"))
    model, _ = small.run(
        small.make_args(tmp_path / "b", "--dropout", "0.3", "--gradient_checkpointing")
    )
    assert torch.equal(small.weights(model), small.weights(reference))
    assert all("forward" in vars(layer) for layer in model.layers)


def test_a_run_learns(tmp_path):
    flags = ("--num_epochs", "40", "--learning_rate", "1e-2", "--eval_every", "20")
    _, progress = small.run(small.make_args(tmp_path, *flags))
    results = [result for _, result in progress.evaluations]
    assert progress.step == 80 and len(results) == 4 and results[-1] < results[0] / 2


# --- the beginning and the end --------------------------------------------------------------------


def test_args_are_read_only_once_a_run_has_begun(tmp_path):
    args = small.make_args(tmp_path)
    args.batch_size = 3
    run = begin(args, small.RECIPE)
    assert (run.resumed, run.initial, run.setup.device.type) == (None, None, "cpu")
    with pytest.raises(
        AttributeError, match=r"args\.batch_size: the flags are read-only once a run has begun"
    ):
        args.batch_size = 4
    with pytest.raises(AttributeError, match="read-only"):
        args.invented = 1
    assert args.batch_size == 3


def test_a_run_holds_the_lock_of_its_folder(tmp_path):
    args = small.make_args(tmp_path)
    run = begin(args, small.RECIPE)
    assert (args.checkpoint_dir / ".lock").read_text() == str(os.getpid()) and not run.locks[
        0
    ].closed


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    args = small.make_args(tmp_path / "file" / "below", "--resume", "no such file")
    with pytest.raises(RunError, match=r"cannot write in .*choose another --output_dir"):
        begin(args, small.RECIPE)


def test_the_weighted_loss_may_be_the_metric(tmp_path):
    args = small.make_args(tmp_path, "--max_steps", "2")
    reported = []
    _, progress = small.run(args, metric="loss", report_results=reported.append)
    assert len(reported) == 1 and 0 < progress.best < 10


def test_best_json_says_how_the_weights_came_about(tmp_path, monkeypatch):
    args = small.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1")
    small.run(args, setup=Setup())
    best = json.loads((args.checkpoint_dir / "best.json").read_text())
    assert [step for step, _ in best["evaluations"]] == [*range(1, best["step"] + 1)]
    noted = best["made_by"]
    assert noted["command"] is None and noted["device"] == "CPU"
    assert noted["versions"]["torch"] == torch.__version__
    monkeypatch.setattr(sys, "argv", ["/there/recipes/template.py", "--train_manifest", "a b.json"])
    monkeypatch.setenv("PRESET_TIER", "t4")
    noted = made_by("template", Setup(), "whisper-base")
    assert noted["command"] == "python recipes/template.py --train_manifest 'a b.json'"
    assert (noted["tier"], noted["base"]) == ("t4", "whisper-base")


def test_the_base_of_a_run_stays_known(tmp_path):
    """Also if later commands do not name it."""
    values = iter(range(20, 0, -1))  # every evaluation is the best so far

    def evaluate(model, eval_batches):
        return {"ctc": (float(next(values)), 1.0)}

    def run(name, steps, *flags, base=None):
        length = ("--max_steps", steps, "--num_epochs", "9", "--eval_every", "1")
        args = small.make_args(tmp_path / name, *length, *flags)
        args.model_file = base
        small.run(args, setup=Setup(), evaluate=evaluate)
        return args.checkpoint_dir

    def noted(folder):
        best = json.loads((folder / "best.json").read_text())
        return best["step"], best["made_by"]["base"]

    first = run("a", "1", base="base.pt")
    assert noted(first) == (1, "base.pt")
    for steps in (2, 3):
        assert noted(run("a", str(steps), "--resume", "auto")) == (steps, "base.pt")
    for name, start in (("b", "best.safetensors"), ("c", "checkpoint_step_00000003.pt")):
        assert noted(run(name, "1", "--init_from", str(first / start))) == (1, "base.pt")
    assert noted(run("d", "1", "--init_from", str(first / start), base="other")) == (1, "other")
    (first / "best.json").write_text("{")
    assert noted(run("e", "1", "--init_from", str(first / "best.safetensors"))) == (1, None)


def test_a_checkpoint_has_the_flags_of_its_run(tmp_path):
    args = small.make_args(tmp_path, "--max_steps", "1", "--bf16")
    small.run(args, setup=Setup())
    saved = newest(args).state["args"]
    assert saved.keys() == vars(args).keys() - {"given", "commands"}
    assert (saved["max_steps"], saved["mixed_precision"], saved["resume"]) == (1, "bf16", None)
    assert saved["log_dir"] == str(args.log_dir)


def test_init_from_starts_a_new_run_from_saved_weights(tmp_path):
    first = small.make_args(tmp_path / "a")
    small.run(first)
    best = first.checkpoint_dir / "best.safetensors"
    saved = checkpoint.read_weights(best, small.RECIPE).model
    starts = []

    def compute_loss(model, batch):
        starts.append({name: value.clone() for name, value in model.state_dict().items()})
        return small.compute_loss(model, batch)

    args = small.make_args(tmp_path / "b", "--init_from", str(best))
    _, progress = small.run(args, model=network(seed=5), compute_loss=compute_loss)
    assert all(torch.equal(value, starts[0][name]) for name, value in saved.items())
    assert progress.step == 2 and len(progress.evaluations) == 1


def test_the_peak_learning_rate_is_the_flags_or_else_the_tasks(tmp_path):
    def rates(name, **changes):
        args = small.make_args(tmp_path / name, "--lr_schedule", "constant", "--warmup_steps", "0")
        args.learning_rate = changes.pop("flag", None)
        small.run(args, **changes)
        return {
            line["train/learning_rate"] for line in metrics(args) if "train/learning_rate" in line
        }

    assert rates("a", flag=2e-3, learning_rate=5e-4) == {2e-3}
    assert rates("b", learning_rate=5e-4) == {5e-4}


class Reported:
    """A `report_results` that keeps which weights it was told of. It must be called in evaluation,
    without gradients."""

    def __init__(self, model):
        self.model, self.weights = model, None

    def __call__(self, weights: str) -> None:
        assert not torch.is_grad_enabled() and not self.model.training
        self.weights = weights


def scripted(*values: float):
    """An `evaluate` that returns these results one after the other."""
    results = iter(values)
    return lambda model, eval_batches: {"ctc": (next(results), 1.0)}


def test_finish_reports_the_best_weights_and_the_peak_of_memory(tmp_path, capsys):
    model = network()
    args = small.make_args(tmp_path, *cut(2, 2), "--eval_every", "1", "--save_every", "1")
    reported = Reported(model)
    small.run(args, model=model, evaluate=scripted(4.0, 2.0, 3.0, 5.0), report_results=reported)
    assert reported.weights == "weights of the best evaluation"
    path = args.checkpoint_dir / "checkpoint_step_00000002.pt"
    second = checkpoint.read(path, small.RECIPE).model
    assert all(torch.equal(value, second[name]) for name, value in model.state_dict().items())
    *_, places, memory = capsys.readouterr().out.splitlines()
    assert (
        places == f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves and all results:"
        f" {args.log_dir}"
    )
    assert re.fullmatch(r"memory: peak \d+\.\d\d GiB resident, total \d+\.\d\d GiB", memory)


def test_the_optimizer_is_gone_when_finish_evaluates(tmp_path, monkeypatch):
    """Also if something refers to it that it refers to. Its states are twice as large as the
    weights."""
    optimizers = []
    make_optimizer = optim.make_optimizer

    def watched(*inputs):
        optimizer = make_optimizer(*inputs)
        optimizer.itself = optimizer
        optimizers.append(weakref.ref(optimizer))
        return optimizer

    def report_results(weights: str) -> None:
        left.extend(optimizer() for optimizer in optimizers)

    left = []
    monkeypatch.setattr(optim, "make_optimizer", watched)
    gc.disable()
    try:
        small.run(small.make_args(tmp_path, *cut(2, 2)), report_results=report_results)
    finally:
        gc.enable()
    assert left == [None]


def test_finish_evaluates_the_best_weights_also_in_16_bits(tmp_path):
    """Autocast keeps 16-bit copies of weights until its context ends, also of weights that have
    been replaced since."""
    batch = small.collate(small.Waveforms(2))
    stale = []

    def look(model) -> None:
        terms, fresh = (small.compute_loss(m, batch)["ctc"] for m in (model, copy.deepcopy(model)))
        stale.append(not torch.equal(terms, fresh))

    def evaluate(model, eval_batches) -> dict:
        look(model)
        return {"ctc": (1.0, 1.0)}

    args = small.make_args(tmp_path, *cut(2, 2))
    model = network(dtype=torch.float32)
    setup = Setup(dtype=torch.bfloat16)

    def report_results(weights: str) -> None:
        look(model)

    small.run(args, model, setup=setup, evaluate=evaluate, report_results=report_results)
    assert len(stale) >= 2 and not any(stale)


def test_only_error_rates_are_in_per_cent(tmp_path, capsys):
    results = iter([0.25, 0.125])

    def evaluate(model, eval_batches):
        share = next(results)
        return {"cer": (share, 1.0), "ctc": (share, 1.0)}

    flags = (
        "--max_steps",
        "2",
        "--eval_every",
        "1",
    )
    args = small.make_args(tmp_path, *cut(2, 2), *flags)
    small.run(args, evaluate=evaluate, metric="cer", report_results=lambda weights: None)
    output = capsys.readouterr().out
    assert "evaluation at step 2 (epoch 1): cer 12.50 %  ctc 0.125  best so far\n" in output


def test_more_may_be_better(tmp_path, capsys):
    flags = ("--num_epochs", "2", "--eval_every", "1", "--max_steps", "5")
    args = small.make_args(tmp_path, *cut(2, 2), *flags)
    flags = {"metric": "accuracy", "higher_is_better": True}

    def evaluate(model, eval_batches):
        return {"accuracy": (next(results), 1.0)}

    results = iter([0.2, 0.7, 0.5, 0.7, 0.6])
    _, progress = small.run(args, evaluate=evaluate, **flags)
    assert (progress.best, progress.best_step) == (0.7, 2)  # of equal ones the first
    assert progress.evaluations_without_gain == 3
    args = small.make_args(tmp_path / "b", *cut(2, 2), "--eval_every", "1", "--num_epochs", "9")
    args.early_stopping_patience = 2
    results = iter([0.2, 0.7, 0.6, 0.5, 0.9])
    _, progress = small.run(args, evaluate=evaluate, **flags)
    assert progress.step == 4 and progress.best == 0.7


def test_a_ratio_is_divided_as_it_is_and_has_no_value_without_a_denominator():
    task = small.task()
    values = mean_values(task, {"f1": (0.32, 0.8), "recall": (0.0, 0), "cer": (0, 3)})
    assert values == {"f1": pytest.approx(0.4), "cer": 0.0}
    values = mean_values(task, {"first": (2.0, 4), "ctc": (3.0, 0.5)})
    assert values["loss"] == pytest.approx(0.3 * 0.5 + 0.7 * 6.0)


def test_a_metric_without_a_value_is_worse_than_any(tmp_path):
    results = iter([(0.0, 0), (9.0, 1), (0.0, 0), (5.0, 1)])
    args = small.make_args(tmp_path, *cut(2, 2), "--eval_every", "1")
    _, progress = small.run(args, evaluate=lambda *_: {"ctc": next(results)})
    assert (progress.best, progress.best_step) == (5.0, 4)
    assert math.isnan(progress.evaluations[0][1])


def test_a_metric_that_is_not_returned_is_one_line_before_the_first_update(tmp_path):
    expected = "evaluate returns no 'accuracy', which is the metric .*; it returns ctc, first, loss"
    args = small.make_args(tmp_path)
    with pytest.raises(UsageError, match=expected) as error:
        small.run(args, metric="accuracy", trial=True)
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("*.pt"))


def test_the_trial_of_evaluate_changes_nothing(tmp_path):
    flags = (*cut(2, 2), "--dropout", "0.3")
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    seen = []

    def evaluate(model, eval_batches):
        assert not model.training and not torch.is_grad_enabled()
        eval_batches = list(eval_batches)
        seen.append(sum(len(batch["names"]) for batch in eval_batches))
        torch.rand(3)
        return small.evaluate(model, eval_batches)

    model, _ = small.run(small.make_args(tmp_path / "b", *flags), trial=True, evaluate=evaluate)
    assert torch.equal(small.weights(model), small.weights(reference))
    assert seen == [2, 5]


def test_a_model_that_was_fitted_on_the_gpu_is_offloaded_from_the_host(tmp_path, monkeypatch):
    """The fp32 weights of --use_cpu_offload weights would stay on the GPU otherwise."""
    places = []
    moved = torch.nn.Module.cpu
    begin = offload.begin

    def host(model):
        places.append("host")
        return moved(model)

    def begin_offload(*arguments):
        places.append("offload")
        return begin(*arguments)

    monkeypatch.setattr(torch.nn.Module, "cpu", host)
    monkeypatch.setattr(offload, "begin", begin_offload)
    args = small.make_args(tmp_path, "--max_steps", "1", "--use_cpu_offload", "weights")
    small.run(args, fit=lambda model, data: places.append("fitted"))
    assert places == ["fitted", "host", "offload"]


def test_a_failure_in_an_evaluation_loses_no_update(tmp_path):
    def evaluate(model, eval_batches):
        raise ValueError("a fault")

    args = small.make_args(tmp_path, "--max_steps", "3", "--save_every", "0")
    with pytest.raises(ValueError, match="a fault"):
        small.run(args, evaluate=evaluate)
    assert checkpoint.list_checkpoints(args.checkpoint_dir)[0].name == "checkpoint_step_00000002.pt"


def test_only_a_new_model_is_fitted(tmp_path):
    fitted = []

    def fit(model, data):
        fitted.append(len(data))
        torch.nn.init.ones_(model.output.weight)

    seen = []

    def compute_loss(model, batch):
        seen.append(model.output.weight.detach().clone())
        return small.compute_loss(model, batch)

    args = small.make_args(tmp_path / "a", "--max_steps", "1")
    small.run(args, fit=fit, compute_loss=compute_loss)
    assert fitted == [13] and (seen[0] == 1).all()
    small.run(small.make_args(tmp_path / "a", "--max_steps", "2", "--resume", "auto"), fit=fit)
    assert fitted == [13]
    path = checkpoint.list_checkpoints(args.checkpoint_dir)[0]
    seen.clear()
    args = small.make_args(tmp_path / "b", "--max_steps", "1", "--init_from", str(path))
    small.run(args, fit=fit, compute_loss=compute_loss)
    assert fitted == [13, 13] and not (seen[0] == 1).all()  # the saved weights replace the fit
    with pytest.raises(Planned):
        small.run(small.make_args(tmp_path / "c", "--max_steps", "1", "--dry_run", "8GB"), fit=fit)
    assert fitted == [13, 13]


def test_a_plan_makes_its_model_without_values_and_changes_no_global(tmp_path):
    run = begin(small.make_args(tmp_path, "--dry_run", "8GB"), small.RECIPE)
    assert torch.zeros(1).device.type == "cpu"
    with run.model_device():
        assert small.Network().output.weight.is_meta
    assert torch.zeros(1).device.type == "cpu"
    run = begin(small.make_args(tmp_path), small.RECIPE)
    with run.model_device():
        assert small.Network().output.weight.device.type == "cpu"


def test_a_term_that_compute_loss_does_not_return_is_one_line(tmp_path):
    def compute_loss(model, batch):
        return {"ctc": small.compute_loss(model, batch)["ctc"]}

    with pytest.raises(UsageError, match="compute_loss returns no 'first', a term of loss_weights"):
        small.run(small.make_args(tmp_path), compute_loss=compute_loss)


def test_only_the_first_rank_reports(tmp_path, capsys):
    run = Run(Setup(ranks=Ranks(1, 2)))
    finish(small.make_args(tmp_path), run, None, None, report_results=pytest.fail)
    assert capsys.readouterr() == ("", "")


# --- out of memory --------------------------------------------------------------------------------


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


def failing_loss(chance: float, seed: int, largest: int = 10**9):
    """compute_loss that runs out of memory at random, in forward or backward, and always above
    `largest` utterances."""
    dice = random.Random(seed)

    def compute_loss(model, batch):
        terms = small.compute_loss(model, batch)
        size = len(batch["names"])
        if size > largest or (size > 1 and dice.random() < chance):
            error = dice.choice(OUT_OF_MEMORY)
            if dice.random() < 0.5:
                raise error
            terms["first"] = FailingBackward.apply(terms["first"], error)
        return terms

    return compute_loss


@pytest.mark.parametrize("seed", range(4))
def test_out_of_memory_at_random_moments_changes_no_weight_and_drops_nothing(tmp_path, seed):
    flags = (*cut(4, 2), "--num_epochs", "4")
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    model, progress = small.run(
        small.make_args(tmp_path / "b", *flags), compute_loss=failing_loss(0.3, seed)
    )
    assert progress.limits, "nothing was injected"
    assert progress.utterances == 4 * 13 and progress.step == 8
    assert small.relative(small.weights(model), small.weights(reference)) < 1e-10


def test_what_fits_is_learned_saved_and_used_after_resume(tmp_path):
    sizes = []

    def watched(model, batch):
        sizes.append(len(batch["names"]))
        return failing_loss(0, 0, largest=2)(model, batch)

    args = small.make_args(tmp_path, *cut(8, 1))
    _, progress = small.run(args, compute_loss=watched)
    assert min(progress.limits.values()) == 2
    assert newest(args).progress.limits == progress.limits
    assert sizes.count(8) == 1
    sizes.clear()
    small.run(
        small.make_args(tmp_path, *cut(8, 1), "--num_epochs", "2", "--resume", "auto"),
        compute_loss=watched,
    )
    assert (
        sizes and sum(size > 2 for size in sizes) <= 2
    )  # shorter buckets may still have to learn it


def test_an_utterance_that_never_fits_is_named_with_its_length(tmp_path):
    data = small.Waveforms(9)
    longest = max(range(9), key=lambda number: len(data[number]["audio"]))

    def compute_loss(model, batch):
        if f"item {longest}" in batch["names"]:
            raise OUT_OF_MEMORY[0]
        return small.compute_loss(model, batch)

    args = small.make_args(tmp_path)
    words = rf"item {longest} \(\d\.\d s\) does not fit.*--gradient_checkpointing.*--max_duration"
    with pytest.raises(RunError, match=words):
        small.run(args, data=data, compute_loss=compute_loss)
    # It came first, and the state before it is saved.
    assert newest(args).progress.step == 0


def test_dropout_draws_the_same_again_when_a_global_batch_is_repeated(tmp_path):
    """The repeated global batch starts from the same generator: the same micro-batches give the
    same update."""
    calls = []

    def once(model, batch):
        calls.append(1)
        terms = small.compute_loss(model, batch)
        if len(calls) == 3:
            raise OUT_OF_MEMORY[1]
        return terms

    flags = (*cut(1, 8), "--dropout", "0.3")
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    model, _ = small.run(small.make_args(tmp_path / "b", *flags), compute_loss=once)
    assert torch.equal(small.weights(model), small.weights(reference))
    assert len(calls) == 13 + 3


def counting(model: small.Network) -> small.Network:
    model.register_buffer("seen", torch.zeros(()))
    return model


@pytest.mark.parametrize("trouble", ["out of memory", "not finite"])
def test_buffers_are_as_if_a_failed_attempt_had_never_been(tmp_path, trouble):
    calls = []

    def compute_loss(model, batch):
        calls.append(1)
        model.seen += len(batch["names"])
        terms = small.compute_loss(model, batch)
        if len(calls) == 2 and trouble == "out of memory":
            raise OUT_OF_MEMORY[0]
        if len(calls) == 2:
            terms["first"] = terms["first"] * float("nan")
        return terms

    model, progress = small.run(
        small.make_args(tmp_path, *cut(2, 2)), model=counting(network()), compute_loss=compute_loss
    )
    assert progress.step == (4 if trouble == "out of memory" else 3)
    assert model.seen == progress.utterances == (13 if trouble == "out of memory" else 9)


def test_other_errors_pass_through(tmp_path):
    def broken(model, batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        small.run(small.make_args(tmp_path), compute_loss=broken)


def test_cut_to_fit_uses_what_shorter_utterances_have_taught():
    batch = small.collate(sorted(small.Waveforms(8), key=lambda item: -len(item["audio"])))
    bucket = length_bucket(batch)
    assert [len(piece["names"]) for piece in cut_to_fit([batch], {bucket - 3: 3})] == [3, 3, 2]
    assert cut_to_fit([batch], {bucket + 1: 1}) == [batch]


# --- non-finite losses and fp16 -------------------------------------------------------------------


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


@pytest.mark.parametrize("place", ["data", "loss", "gradient"])
def test_a_bad_global_batch_never_reaches_the_weights_and_is_listed(tmp_path, place):
    data = small.Waveforms(12)

    def poisoned(model, batch):
        terms = small.compute_loss(model, batch)
        if "item 5" in batch["names"]:
            if place == "loss":
                terms["first"] = terms["first"] * float("nan")
            elif place == "gradient":
                terms["first"] = InfiniteGradient.apply(terms["first"])
        return terms

    if place == "data":
        data[5]["audio"] = data[5]["audio"] * float("nan")
    args = small.make_args(tmp_path, *cut(2, 2))
    model, progress = small.run(args, data=data, compute_loss=poisoned)
    assert progress.bad_batches == 1 and progress.step == 2  # of three global batches
    assert torch.isfinite(small.weights(model)).all()
    (listed,) = [line["files"] for line in metrics(args) if line.get("event") == "bad_batch"]
    assert "item 5" in listed and len(listed) == 4


@pytest.mark.parametrize("save_every", ["0", "2"])
def test_bad_global_batches_in_a_row_stop_the_run_and_leave_what_was_trained(
    tmp_path, save_every, monkeypatch
):
    monkeypatch.setattr(update, "MAX_BAD_BATCHES", 3)
    steps = []

    def later_nan(model, batch):
        terms = small.compute_loss(model, batch)
        steps.append(1)
        return (
            {name: value * float("nan") for name, value in terms.items()}
            if len(steps) > 4
            else terms
        )

    args = small.make_args(tmp_path, *cut(2, 1), "--save_every", save_every)
    with pytest.raises(RunError, match="3 global batches in a row"):
        small.run(args, compute_loss=later_nan)
    assert newest(args).progress.step == 4
    _, progress = small.run(
        small.make_args(tmp_path, *cut(2, 1), "--resume", "auto")
    )  # the cause is mended
    assert progress.epoch == 1 and progress.utterances == 13 - 2 * 2


def fp16_run(args, compute_loss):
    return small.run(
        args,
        model=network(dtype=torch.float32),
        data=small.Waveforms(12),
        setup=Setup(dtype=torch.float16),
        compute_loss=compute_loss,
    )


def test_fp16_overflow_is_skipped_and_the_scale_recovers(tmp_path):
    """fp16 autocast and the loss scale on the CPU: an infinite gradient halves the scale, and the
    schedule and the step count move only when the optimizer did."""
    calls = []

    def overflowing(model, batch):
        terms = small.compute_loss(model, batch)
        calls.append(1)
        if len(calls) in (2, 3):
            terms["first"] = InfiniteGradient.apply(terms["first"])
        return terms

    args = small.make_args(tmp_path, *cut(2, 1))
    model, progress = fp16_run(args, overflowing)
    assert torch.isfinite(small.weights(model)).all() and progress.bad_batches == 0
    skipped = (
        6 - progress.step
    )  # of six global batches; fp16 itself may overflow once more at the initial scale
    assert 2 <= skipped <= 4
    assert newest(args).state["scaler"]["scale"] == 65536 / 2**skipped
    assert [line["step"] for line in metrics(args) if "train/loss" in line] == list(
        range(1, progress.step + 1)
    )


def test_a_scale_below_one_stops_the_run(tmp_path):
    def overflowing(model, batch):
        return {
            name: InfiniteGradient.apply(value)
            for name, value in small.compute_loss(model, batch).items()
        }

    with pytest.raises(RunError, match="loss scale fell below 1"):
        fp16_run(small.make_args(tmp_path, *cut(1, 1), "--num_epochs", "3"), overflowing)
    assert newest(small.make_args(tmp_path)).progress.step == 0


def test_a_run_continues_from_a_scale_below_one(tmp_path):
    """With gradients that are finite now, such as those of a lower learning rate."""

    def overflowing(model, batch):
        terms = small.compute_loss(model, batch)
        return {name: InfiniteGradient.apply(value) for name, value in terms.items()}

    flags = [*cut(1, 1), "--num_epochs", "3"]
    with pytest.raises(RunError, match="loss scale fell below 1"):
        fp16_run(small.make_args(tmp_path, *flags), overflowing)
    args = small.make_args(tmp_path, *flags, "--resume", "auto")
    fp16_run(args, small.compute_loss)
    assert newest(args).progress.step > 10
    assert newest(args).state["scaler"]["scale"] == 0.5


def test_fp16_scaling_gives_the_fp32_gradient():
    model, items = network(dtype=torch.float32), small.Waveforms(4)
    plain = gradient_of(model, items, [2, 2])
    scaled = gradient_of(model, items, [2, 2], loss_scale=LossScale(1024.0)) / 1024
    assert small.relative(scaled, plain) < 1e-5


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("moment", ["global_batch", "evaluation"])
def test_a_signal_discards_the_global_batch_saves_and_resumes_to_the_same_weights(
    tmp_path, number, status, moment
):
    flags = (*cut(2, 2), "--num_epochs", "2", "--eval_every", "2", "--dropout", "0.2")
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    calls = []

    def interrupted_loss(model, batch):
        calls.append(1)
        if moment == "global_batch" and len(calls) == 6:  # in the middle of the third global batch
            os.kill(os.getpid(), number)
        return small.compute_loss(model, batch)

    def interrupted_evaluate(model, eval_batches):
        os.kill(os.getpid(), number)
        return small.evaluate(model, eval_batches)

    args = small.make_args(tmp_path / "b", *flags)
    evaluate = interrupted_evaluate if moment == "evaluation" else small.evaluate
    with pytest.raises(Stopped, match=r"--resume auto") as stopped:
        small.run(args, compute_loss=interrupted_loss, evaluate=evaluate)
    assert stopped.value.status == status
    progress = newest(args).progress
    assert progress.step in (
        (2, 3) if moment == "global_batch" else (2,)
    )  # the partial global batch is shorter
    assert progress.last_evaluation == (2 if moment == "global_batch" else 0)
    model, _ = small.run(
        small.make_args(tmp_path / "b", *flags, "--resume", "auto"), model=network(0.2, seed=9)
    )
    assert torch.equal(small.weights(model), small.weights(reference))


def test_nohup_keeps_a_run_alive(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def hung_up(model, batch):
        os.kill(os.getpid(), signal.SIGHUP)
        return small.compute_loss(model, batch)

    try:
        _, progress = small.run(small.make_args(tmp_path, "--max_steps", "2"), compute_loss=hung_up)
        assert progress.step == 2 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("save_every", ["0", "1"])
def test_a_report_that_cannot_be_written_ends_the_run_after_it_was_saved(
    tmp_path, monkeypatch, save_every
):
    flags = (*cut(2, 1), "--num_epochs", "2", "--save_every", save_every)
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    args = small.make_args(tmp_path / "b", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(report, "open", lambda *_, **__: open("/dev/full", "w"), raising=False)  # noqa: SIM115
        with pytest.raises(
            RunError,
            match=r"cannot write in .*logs: No space left on device; choose another --output_dir",
        ) as error:
            small.run(args)
    assert "\n" not in str(error.value) and newest(args).progress.step == 1
    model, _ = small.run(
        small.make_args(tmp_path / "b", *flags, "--resume", "auto"), model=network(seed=9)
    )
    assert torch.equal(small.weights(model), small.weights(reference))


def test_a_log_folder_that_is_gone_ends_the_run_with_its_best_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(report.Report, "draw", DRAW)
    args = small.make_args(tmp_path)

    def remove(model, batch):
        shutil.rmtree(args.log_dir, ignore_errors=True)
        return small.compute_loss(model, batch)

    with pytest.raises(RunError, match=r"cannot write in .*logs: No such file"):
        small.run(args, compute_loss=remove)
    assert (args.checkpoint_dir / "best.safetensors").exists() and (
        newest(args).progress.epoch == 1
    )


def test_evaluation_leaves_generators_and_mode_alone(tmp_path):
    flags = (*cut(2, 2), "--dropout", "0.2")

    def noisy_evaluate(model, eval_batches):
        assert not model.training and not torch.is_grad_enabled()
        torch.rand(100), random.random()
        return small.evaluate(model, eval_batches)

    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    model, _ = small.run(
        small.make_args(tmp_path / "b", *flags, "--eval_every", "1"), evaluate=noisy_evaluate
    )
    assert torch.equal(small.weights(model), small.weights(reference)) and model.training


def test_early_stopping_counts_evaluations_without_a_better_result(tmp_path):
    args = small.make_args(
        tmp_path, *cut(1, 1), "--eval_every", "2", "--early_stopping_patience", "2"
    )
    _, progress = small.run(args, evaluate=scripted(5.0, 4.0, 4.5, 4.2, 3.0, 2.0))
    assert progress.step == 8 and progress.best == 4.0 and progress.best_step == 4


def test_early_stopping_waits_while_the_loss_falls(tmp_path):
    def evaluate(model, eval_batches):
        error, loss = next(results)
        return {"cer": (error, 1.0), "first": (loss, 1.0), "ctc": (loss, 1.0)}

    flags = ("--eval_every", "1", "--num_epochs", "9", "--early_stopping_patience", "2")
    args = small.make_args(tmp_path, *cut(1, 1), *flags)
    results = iter([(0.9, 5.0), (1.5, 4.0), (1.4, 3.0), (1.3, 3.5), (1.2, 3.2), (0.1, 1.0)])
    _, progress = small.run(args, evaluate=evaluate, metric="cer")
    assert progress.step == 5 and (progress.best, progress.best_step) == (0.9, 1)


def test_the_model_as_it_came_may_be_the_first_candidate(tmp_path):
    flags = (*cut(2, 2), "--dropout", "0.2", "--eval_every", "2")
    reference, usual = small.run(
        small.make_args(tmp_path / "a", *flags), evaluate=scripted(4.0, 3.0)
    )
    args = small.make_args(tmp_path / "b", *flags)
    start = network(0.2)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    model, progress = small.run(args, start, evaluate=scripted(2.0, 4.0, 3.0), evaluate_first=True)
    assert usual.evaluations == [[2, 4.0], [4, 3.0]]
    assert progress.evaluations == [[0, 2.0], *usual.evaluations]
    assert (progress.best, progress.best_step, progress.evaluations_without_gain) == (
        2.0,
        0,
        2,
    )
    best = checkpoint.read_weights(args.checkpoint_dir / "best.safetensors", small.RECIPE).model
    assert all(torch.equal(value, before[name]) for name, value in best.items())
    assert not torch.equal(
        small.weights(model), torch.cat([value.reshape(-1) for value in before.values()])
    )
    reference, _ = small.run(
        small.make_args(tmp_path / "c", *flags), network(0.2), evaluate=scripted(4.0, 3.0)
    )
    assert torch.equal(
        small.weights(model), small.weights(reference)
    )  # the evaluation changes no update


def test_a_task_may_leave_embeddings_without_decay(tmp_path):
    class WithEmbedding(small.Network):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(2, 8)

        def forward(self, batch):
            log_probs, lengths = super().forward(batch)
            return log_probs + 0 * self.embedding.weight.sum(), lengths

    for decays in (True, False):
        model = WithEmbedding().double()
        torch.nn.init.ones_(model.embedding.weight)
        flags = ("--max_steps", "2", "--weight_decay", "0.5")
        small.run(
            small.make_args(tmp_path, *flags),
            model=model,
            adamw=optim.Settings(decay_embeddings=decays),
        )
        assert bool((model.embedding.weight == 1).all()) is not decays


def test_the_first_evaluation_counts_for_early_stopping(tmp_path):
    args = small.make_args(
        tmp_path, *cut(1, 1), "--eval_every", "2", "--early_stopping_patience", "2"
    )
    _, progress = small.run(args, evaluate=scripted(1.0, 5.0, 4.0, 0.5), evaluate_first=True)
    assert progress.step == 4 and progress.best_step == 0


def test_the_first_evaluation_is_made_once_unless_nothing_was_saved(tmp_path):
    flags = (*cut(2, 2), "--max_steps", "2", "--eval_every", "2", "--resume", "auto")

    def killed(model, batch):
        raise SystemExit

    for _ in range(2):  # killed before the first checkpoint, and started again
        with pytest.raises(SystemExit):
            small.run(
                small.make_args(tmp_path, *flags),
                evaluate=scripted(3.0),
                evaluate_first=True,
                compute_loss=killed,
            )

    def stopped(model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return small.compute_loss(model, batch)

    with pytest.raises(Stopped):  # which saves step 0
        small.run(
            small.make_args(tmp_path, *flags),
            evaluate=scripted(3.0),
            evaluate_first=True,
            compute_loss=stopped,
        )
    _, progress = small.run(
        small.make_args(tmp_path, *flags), evaluate=scripted(4.0), evaluate_first=True
    )
    assert progress.evaluations == [[0, 3.0], [2, 4.0]] and progress.best_step == 0


class Augmented(small.Waveforms):
    """Waveforms of which a share becomes shorter and louder in training."""

    augmented_share = 1.0

    def augmented(self, epoch: int) -> np.ndarray:
        return augment.chosen(0, epoch, len(self), self.augmented_share)

    def seconds(self, epoch: int) -> np.ndarray:
        return super().seconds(epoch) - 0.05 * self.augmented(epoch)

    def item(self, index: int, epoch: int) -> dict:
        item = dict(self[index])
        if self.augmented(epoch)[index]:
            item["audio"] = 2 * item["audio"][: -small.SAMPLE_RATE // 20]
        return item


def growing(*shares: float) -> dict:
    """Fields of a task whose evaluations come to these shares one after the other."""
    return {
        "evaluate": scripted(*(1 - share for share in shares)),
        "augmented_share": lambda x: 1 - x,
    }


def test_augmentation_grows_when_an_epoch_begins_and_never_falls(tmp_path, monkeypatch):
    flags = (*cut(2, 2), "--num_epochs", "4", "--eval_every", "3")  # an epoch has 4 updates
    shares = []
    data = Augmented()

    def seen(model, batch):
        shares.append(data.augmented_share)
        return small.compute_loss(model, batch)

    fields = growing(0.0, 0.5, 0.25, 0.75, 1.0, 1.0)
    small.run(small.make_args(tmp_path, *flags, *cut(4, 1)), data=data, compute_loss=seen, **fields)
    # Evaluated after 3, 6, 9, 12, 15 updates. The best of 6 and 9 counts from the 9th on.
    assert shares == [0.0] * 8 + [0.5] * 4 + [0.75] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_whose_augmentation_grows_resumes_to_the_same_bits(tmp_path, workers):
    flags = (*cut(2, 2), "--num_epochs", "3", "--eval_every", "2", "--dropout", "0.2")
    flags += ("--dataloader_num_workers", str(workers), "--save_every", "1", "--keep_last", "20")
    shares = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    reference, progress = small.run(
        small.make_args(tmp_path / "a", *flags), data=Augmented(), **growing(*shares)
    )
    assert progress.augmented_share == 0.6
    for step in (3, 4, 5, 8) if workers == 0 else (4,):
        path = tmp_path / f"a/checkpoints/checkpoint_step_{step:08}.pt"
        args = small.make_args(tmp_path / f"from_{step}", *flags, "--resume", str(path))
        again = network(0.2, seed=9)
        # In another folder, which has no best weights, it evaluates the saved ones again.
        small.run(args, again, Augmented(), **growing(*shares[(step + 1) // 2 - 1 :]))
        assert torch.equal(small.weights(again), small.weights(reference)), step


def test_a_model_that_has_not_begun_says_so_once_after_a_fifth(tmp_path, capsys):
    flags = (*cut(2, 2), "--num_epochs", "3", "--eval_every", "1")
    advice = lambda value: f"advice at {value}" if value > 0.7 else None  # noqa: E731
    values = [0.9 - 0.01 * step for step in range(12)]
    small.run(small.make_args(tmp_path, *flags), evaluate=scripted(*values), not_begun=advice)
    lines = [line for line in capsys.readouterr().out.splitlines() if "advice" in line]
    assert lines == ["advice at 0.88"]  # of 12 updates, the third


def mapped(folder: Path) -> list[bytes]:
    """The files of a folder that this process maps, also deleted ones."""
    return [
        line
        for line in Path("/proc/self/maps").read_bytes().splitlines()
        if os.fsencode(folder) in line
    ]


@pytest.mark.parametrize(
    "flag, name",
    [
        ("--resume", "checkpoint_step_00000004.pt"),
        ("--init_from", "checkpoint_step_00000004.pt"),
        ("--init_from", "best.safetensors"),
    ],
)
def test_a_run_lets_go_of_the_file_that_it_starts_from(tmp_path, monkeypatch, flag, name):
    flags = (
        *cut(2, 2),
        "--num_epochs",
        "2",
        "--dropout",
        "0.2",
        "--keep_last",
        "1",
        "--lr_schedule",
        "constant",
    )
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    args = small.make_args(tmp_path / "b", *flags, "--num_epochs", "1")
    small.run(args)
    path = args.checkpoint_dir / name
    content, held, during = path.read_bytes(), [], []

    def hold(load):
        def held_load(model, tensors, *rest):
            held.append(tensors)  # as the recipes do
            assert mapped(tmp_path)
            load(model, tensors, *rest)

        return held_load

    def watched(model, batch):
        during.append(mapped(tmp_path))
        return small.compute_loss(model, batch)

    for function in ("load_weights", "initialise"):
        monkeypatch.setattr(checkpoint, function, hold(getattr(checkpoint, function)))
    folder = tmp_path / ("b" if flag == "--resume" else "c")
    model, _ = small.run(
        small.make_args(folder, *flags, flag, str(path)), network(0.2, seed=9), compute_loss=watched
    )
    assert held == [{}] and during and not any(during)
    if flag == "--resume":
        assert not path.exists() and torch.equal(small.weights(model), small.weights(reference))
    else:
        assert path.read_bytes() == content


def test_a_signal_during_a_save_lets_it_finish(tmp_path, monkeypatch):
    write_file = files.write_file

    def interrupted(path, write, durable=True):
        if path.suffix == ".pt":
            os.kill(os.getpid(), signal.SIGTERM)
        write_file(path, write, durable)

    args = small.make_args(tmp_path, *cut(2, 2), "--save_every", "2")
    monkeypatch.setattr(files, "write_file", interrupted)
    with pytest.raises(Stopped):
        small.run(args)
    assert newest(args).progress.step == 2 and not list(args.checkpoint_dir.glob("*.tmp"))


# --- resuming -------------------------------------------------------------------------------------


def watched(names: list[str]):
    """compute_loss that notes the names of its utterances."""

    def compute_loss(model, batch):
        names.extend(batch["names"])
        return small.compute_loss(model, batch)

    return compute_loss


@pytest.mark.parametrize(
    ("flags", "count", "message"),
    [
        (cut(1, 3), 13, "the number of utterances in an update has changed"),
        (cut(2, 2), 15, "the training data have changed"),
    ],
)
def test_another_update_and_other_data_start_the_epoch_anew(
    tmp_path, capsys, flags, count, message
):
    small.run(small.make_args(tmp_path, *cut(2, 2), "--max_steps", "2"))
    names = []
    data = small.Waveforms(count)
    args = small.make_args(tmp_path, *flags, "--resume", "auto")
    _, progress = small.run(args, data=data, compute_loss=watched(names))
    assert f"{message} since the checkpoint: epoch 1 starts from its beg" in capsys.readouterr().out
    assert sorted(names) == sorted(item["name"] for item in data) and progress.epoch == 1


def test_resuming_into_another_folder_leaves_best_weights_there_and_another_run_alone(tmp_path):
    old = small.make_args(tmp_path / "old")
    small.run(old)
    (source,) = checkpoint.list_checkpoints(old.checkpoint_dir)
    other = small.make_args(tmp_path / "new", "--batch_size", "1")
    small.run(other)  # another run, in the folder that the resumed one goes to
    before = {path.name for path in other.checkpoint_dir.glob("checkpoint_*")}
    for epochs in ("1", "2"):  # already finished, and continued with no better result than before
        args = small.make_args(tmp_path / "new", "--resume", str(source), "--num_epochs", epochs)
        _, progress = small.run(args, evaluate=scripted(1e9, 1e9))
        assert progress.best == 1e9 and (args.checkpoint_dir / "best.safetensors").exists()
    assert {
        path.name for path in (other.checkpoint_dir / "earlier-1").glob("checkpoint_*")
    } == before


@pytest.mark.parametrize("change", ["seed", "lengths"])
def test_another_order_starts_the_epoch_anew_and_says_so(tmp_path, capsys, change):
    class Faster(small.Waveforms):
        def seconds(self, epoch):
            return super().seconds(epoch) * (np.arange(len(self)) % 3 + 1)

    small.run(small.make_args(tmp_path, *cut(2, 2), "--max_steps", "2"))
    names, other = [], change == "lengths"
    args = small.make_args(
        tmp_path, *cut(2, 2), "--resume", "auto", "--seed", "1" if other else "2"
    )
    _, progress = small.run(
        args, data=Faster() if other else small.Waveforms(), compute_loss=watched(names)
    )
    assert re.search(
        r"the seed, or the length .* changed .*: epoch 1 starts from its beg",
        capsys.readouterr().out,
    )
    assert (
        sorted(names) == sorted(item["name"] for item in small.Waveforms()) and progress.epoch == 1
    )


def test_the_same_order_continues_in_any_epoch(tmp_path, capsys):
    class Perturbed(small.Waveforms):
        def seconds(self, epoch):
            return super().seconds(epoch) * np.random.default_rng(epoch).uniform(
                0.9, 1.1, len(self)
            )

    flags = (*cut(2, 2), "--num_epochs", "3", "--lr_schedule", "constant")
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags), data=Perturbed())
    for steps in range(1, 12, 3):
        model, _ = small.run(
            small.make_args(tmp_path / "b", *flags, "--max_steps", str(steps), "--resume", "auto"),
            data=Perturbed(),
        )
    model, _ = small.run(
        small.make_args(tmp_path / "b", *flags, "--resume", "auto"), data=Perturbed()
    )
    assert "changed since" not in capsys.readouterr().out and torch.equal(
        small.weights(model), small.weights(reference)
    )


def test_an_older_checkpoint_is_resumed_into_another_folder_only(tmp_path):
    args = small.make_args(tmp_path / "a", *cut(2, 2), "--save_every", "2")
    small.run(args)
    older = args.checkpoint_dir / "checkpoint_step_00000002.pt"
    flags = (*cut(2, 2), "--max_steps", "3", "--resume", str(older))
    before = {path: path.read_bytes() for path in args.checkpoint_dir.iterdir()}
    with pytest.raises(UsageError, match=r"_00000004\.pt is newer, .*another --output_dir"):
        small.run(small.make_args(tmp_path / "a", *flags))
    assert before == {path: path.read_bytes() for path in args.checkpoint_dir.iterdir()}
    _, progress = small.run(small.make_args(tmp_path / "b", *flags))
    assert progress.step == 3
    checkpoint.list_checkpoints(args.checkpoint_dir)[0].unlink()
    _, progress = small.run(small.make_args(tmp_path / "a", *flags))
    assert progress.step == 3


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text('{"step": -1}')],
)
def test_best_weights_that_are_gone_are_found_again(tmp_path, damage):
    args = small.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1")
    small.run(args)
    damage(args.checkpoint_dir / "best.json")
    args = small.make_args(tmp_path, "--max_steps", "3", "--eval_every", "9", "--resume", "auto")
    _, progress = small.run(args, evaluate=scripted(9.0, 10.0))
    assert progress.best == 9.0 and checkpoint.best_step(args.checkpoint_dir) == 2


def test_best_weights_of_just_before_a_kill_stay(tmp_path):
    args = small.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1", "--save_every", "1")
    small.run(args)
    checkpoint.list_checkpoints(args.checkpoint_dir)[
        0
    ].unlink()  # killed after evaluating, before saving
    small.run(
        small.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1", "--resume", "auto")
    )
    assert checkpoint.best_step(args.checkpoint_dir) == 2


def test_a_second_run_moves_what_the_first_left_aside(tmp_path):
    reports = ("transcripts.jsonl", "evaluation.json")
    args = small.make_args(tmp_path, "--max_steps", "1")
    for number in range(2):
        small.run(small.make_args(tmp_path, "--max_steps", "1"), reports=reports)
        for name in (*reports, "notes.txt"):
            (args.log_dir / name).write_text(str(number))
    small.run(small.make_args(tmp_path, "--max_steps", "1"), reports=reports)
    for number, folder in enumerate(("earlier-1", "earlier-2")):
        for name in reports:
            assert (args.log_dir / folder / name).read_text() == str(number)
    assert (args.log_dir / "notes.txt").read_text() == "1" and not (
        args.log_dir / "transcripts.jsonl"
    ).exists()


def test_weights_that_vanish_during_a_run_are_named_with_what_to_do(tmp_path, monkeypatch):
    use_best = checkpoint.use_best

    def vanished(folder, *rest):
        (folder / "best.safetensors").unlink()
        return use_best(folder, *rest)

    monkeypatch.setattr(checkpoint, "use_best", vanished)
    with pytest.raises(
        RunError, match=r"best\.safetensors is gone: .*--resume .*checkpoint_step_00000001\.pt"
    ):
        small.run(small.make_args(tmp_path, "--max_steps", "1"), report_results=print)


def test_a_model_that_no_longer_fits_its_checkpoint_is_one_line(tmp_path):
    small.run(small.make_args(tmp_path))
    args = small.make_args(tmp_path, "--resume", "auto")
    with pytest.raises(
        UsageError, match=r"the saved weights do not fit this model .*--init_from"
    ) as error:
        small.run(args, model=small.Network(layers=3).double())
    assert "\n" not in str(error.value)


# --- data that cannot be used ---------------------------------------------------------------------


class WithBadFile(small.Waveforms):
    def item(self, index: int, epoch: int) -> dict:
        if index == 3:
            error = DataError("three.wav is truncated")
            error.path = "three.wav"
            raise error
        return super().item(index, epoch)


def test_a_bad_file_stops_the_run_which_is_saved(tmp_path):
    args = small.make_args(tmp_path, *cut(1, 1))
    with pytest.raises(
        DataError, match=r"three\.wav is truncated; fix or remove it, .* --skip_bad_audio"
    ):
        small.run(args, data=WithBadFile())
    assert 0 <= newest(args).progress.step < 13


@pytest.mark.parametrize("error", [DataError("a.wav is gone"), KeyError("key")], ids=repr)
@pytest.mark.parametrize("place", ["evaluate", "compute_loss"])
def test_a_failure_in_a_recipe_loses_no_update_before_it(tmp_path, place, error):
    """In the second evaluation, or in the middle of an update."""
    flags = (*cut(2, 2), "--num_epochs", "2", "--eval_every", "2", "--dropout", "0.2")
    reference, _ = small.run(small.make_args(tmp_path / "a", *flags))
    calls = []

    def failing(*inputs):
        calls.append(1)
        if len(calls) == {"evaluate": 2, "compute_loss": 9}[place]:
            raise error
        return getattr(small, place)(*inputs)

    args = small.make_args(tmp_path / "b", *flags)
    with pytest.raises(type(error)):
        small.run(args, **{"evaluate": small.evaluate, place: failing})
    assert newest(args).progress.step >= 4
    args = small.make_args(tmp_path / "b", *flags, "--resume", "auto")
    model, _ = small.run(args, model=network(0.2, seed=9))
    assert torch.equal(small.weights(model), small.weights(reference))


@pytest.mark.parametrize("epochs", ["1", "3"])
def test_a_run_without_any_update_says_so(tmp_path, epochs, monkeypatch):
    monkeypatch.setattr(update, "MAX_BAD_BATCHES", 1000)

    def never_finite(model, batch):
        return {
            name: term * float("nan") for name, term in small.compute_loss(model, batch).items()
        }

    with pytest.raises(
        RunError,
        match=r"no update was made: \d+ global batches had a non-finite loss, 0 files were skipped",
    ):
        small.run(small.make_args(tmp_path, "--num_epochs", epochs), compute_loss=never_finite)


def test_bad_files_are_skipped_counted_and_listed_once(tmp_path, capsys):
    args = small.make_args(tmp_path, *cut(1, 1), "--skip_bad_audio", "--num_epochs", "2")
    _, progress = small.run(args, data=WithBadFile())
    assert progress.skipped_files == 2 and progress.step == progress.utterances == 24
    assert capsys.readouterr().out.count("skipped: three.wav is truncated") == 1
    (listed,) = [line for line in metrics(args) if line.get("event") == "skipped"]
    assert (listed["file"], listed["reason"]) == ("three.wav", "three.wav is truncated")
