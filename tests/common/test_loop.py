"""The loop's contract: exact accumulation, recovery from out of memory, bad global batches kept
out, fp16's scaler, signals."""

import copy
import json
import os
import random
import re
import signal
import sys

import numpy as np
import pytest
import torch

from common import checkpoint, files, loop, report, update
from common.batches import to_device
from common.device import LossScale, Setup
from common.engine import run_global_batch
from common.errors import DataError, Planned, RunError, Stopped, UsageError
from common.evaluation import mean_values
from common.limits import carry_over, cut_to_fit, length_bucket
from common.loop import Run, begin, finish
from common.parts import offload
from common.ranks import Ranks
from common.saving import made_by
from speech.signal import augment
from tests import small

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


def trained(folder, *flags: str, **changes) -> tuple:
    """The model and the progress of a run in `folder`. `changes`: see `small.run`."""
    return small.run(small.make_args(folder, *flags), **changes)


def are_equal(model, other) -> bool:
    return torch.equal(small.weights(model), small.weights(other))


def gradient_of(
    model, items: list[dict], sizes: list[int], loss_scale=None, without: str = ""
) -> torch.Tensor:
    """The gradient of one global batch in micro-batches of `sizes` items; the term `without` has no
    targets."""
    model.zero_grad()
    rest = iter(items)
    micro_batches = [small.collate([next(rest) for _ in range(size)]) for size in sizes]
    totals = {without: 0}
    for name in small.LOSS_WEIGHTS:
        if name != without:
            totals[name] = sum(batch["counts"][name] for batch in micro_batches)
    outcome = run_global_batch(
        model,
        micro_batches,
        totals,
        small.compute_loss,
        small.LOSS_WEIGHTS,
        Setup(),
        loss_scale,
    )
    assert outcome.failed is None and not outcome.stopped
    return torch.nn.utils.parameters_to_vector(p.grad for p in model.parameters())


def newest(args) -> checkpoint.Saved:
    return small.newest(args.checkpoint_dir.parent)


def watched(names: list[str]):
    """compute_loss that notes the names of its utterances."""

    def compute_loss(model, batch):
        names.extend(batch["names"])
        return small.compute_loss(model, batch)

    return compute_loss


def changing(change):
    """compute_loss whose terms are changed by `change(number of the call, model, batch, terms)`."""
    calls = []

    def compute_loss(model, batch):
        calls.append(1)
        terms = small.compute_loss(model, batch)
        change(len(calls), model, batch, terms)
        return terms

    return compute_loss


def scripted(*values: float | None):
    """An `evaluate` that returns these results one after the other; None has no denominator."""
    results = iter((0.0, 0) if value is None else (value, 1.0) for value in values)
    return lambda model, eval_batches: {"ctc": next(results)}


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_gradient_is_the_mean_over_targets_however_a_global_batch_is_cut(dtype, tolerance):
    model, items = network(dtype=dtype), small.Waveforms(8)
    counts = dict.fromkeys(small.LOSS_WEIGHTS, 0)
    sums = dict.fromkeys(small.LOSS_WEIGHTS, 0.0)
    for item in items:  # one by one, without padding
        batch = small.collate([item])
        terms = small.compute_loss(model, next(to_device([batch], torch.device("cpu"))))
        for name, value in terms.items():
            sums[name] = sums[name] + value
            counts[name] += batch["counts"][name]
    loss = sum(small.LOSS_WEIGHTS[name] * sums[name] / counts[name] for name in sums)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.nn.utils.parameters_to_vector(gradients)
    for sizes in ([8], [4, 4], [1] * 8, [5, 3], [1, 7]):
        assert small.relative(gradient_of(model, items, sizes), expected) < tolerance


def test_a_term_without_targets_in_a_global_batch_adds_nothing():
    model, items = network(), small.Waveforms(5)
    parts = [gradient_of(model, items, [3, 2], without=name) for name in small.LOSS_WEIGHTS]
    assert all(torch.isfinite(part).all() and part.norm() > 0 for part in parts)
    assert small.relative(sum(parts), gradient_of(model, items, [3, 2])) < 1e-10
    model.zero_grad()
    batch = small.collate(items)
    run_global_batch(
        model, [batch], {"first": 0, "ctc": 0}, small.compute_loss, small.LOSS_WEIGHTS, Setup()
    )
    assert all(p.grad is None for p in model.parameters())


def test_a_term_without_a_weight_is_not_trained(tmp_path):
    def add(number, model, batch, terms):
        terms["extra"] = 1e6 * model.output.weight.sum()

    reference, _ = trained(tmp_path / "a")
    model, _ = trained(tmp_path / "b", compute_loss=changing(add))
    assert are_equal(model, reference)


# --- the beginning and the end --------------------------------------------------------------------


def test_args_are_read_only_once_a_run_has_begun(tmp_path):
    args = small.make_args(tmp_path)
    run = begin(args, small.RECIPE)
    assert (run.resumed, run.initial, run.setup.device.type) == (None, None, "cpu")
    assert (args.checkpoint_dir / ".lock").read_text() == str(os.getpid())
    assert not run.locks[0].closed
    for name in ("batch_size", "invented"):
        with pytest.raises(AttributeError, match=rf"args\.{name}: the flags are read-only once"):
            setattr(args, name, 4)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    args = small.make_args(tmp_path / "file" / "below", "--resume", "no such file")
    with pytest.raises(RunError, match=r"cannot write in .*choose another --output_dir"):
        begin(args, small.RECIPE)


def test_best_json_says_how_the_weights_came_about(tmp_path, monkeypatch):
    args = small.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1")
    _, progress = small.run(args, setup=Setup(), metric="loss")  # which the loop computes
    assert 0 < progress.best < 10
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
    evaluate = scripted(*range(20, 0, -1))  # every evaluation is the best so far

    def run(name, steps, *flags, base=None):
        length = ("--max_steps", steps, "--num_epochs", "9", "--eval_every", "1")
        args = small.make_args(tmp_path / name, *length, *flags)
        args.model_file = base
        small.run(args, setup=Setup(), evaluate=evaluate)
        best = json.loads((args.checkpoint_dir / "best.json").read_text())
        return best["step"], best["made_by"]["base"]

    assert run("a", "1", base="base.pt") == (1, "base.pt")
    for steps in (2, 3):
        assert run("a", str(steps), "--resume", "auto") == (steps, "base.pt")
    first = tmp_path / "a/checkpoints"
    best = ("--init_from", str(first / "best.safetensors"))
    assert run("b", "1", *best) == (1, "base.pt")
    assert run("c", "1", "--init_from", str(first / "checkpoint_step_00000003.pt"))[1] == "base.pt"
    assert run("d", "1", *best, base="other") == (1, "other")
    (first / "best.json").write_text("{")
    assert run("e", "1", *best) == (1, None)


def test_a_checkpoint_has_the_flags_of_its_run(tmp_path):
    args = small.make_args(tmp_path, "--max_steps", "1", "--bf16")
    small.run(args, setup=Setup())
    saved = newest(args).state["args"]
    assert saved.keys() == vars(args).keys() - {"given", "rules"}
    assert (saved["max_steps"], saved["mixed_precision"], saved["resume"]) == (1, "bf16", None)
    assert saved["log_dir"] == str(args.log_dir)


def test_the_peak_learning_rate_is_the_flags_or_else_the_tasks(tmp_path):
    for flag, peak in ((2e-3, 2e-3), (None, 5e-4)):
        args = small.make_args(tmp_path, "--lr_schedule", "constant", "--warmup_steps", "0")
        args.learning_rate = flag
        small.run(args, learning_rate=5e-4)
        lines = [line for line in small.metrics(args) if "train/learning_rate" in line]
        assert {line["train/learning_rate"] for line in lines} == {peak}


def test_finish_reports_the_best_weights_and_the_peak_of_memory(tmp_path, capsys):
    model = network()
    reported = []

    def report_results(weights: str) -> None:
        assert not torch.is_grad_enabled() and not model.training
        reported.append(weights)

    trained(
        tmp_path,
        *(*cut(2, 2), "--eval_every", "1", "--save_every", "1"),
        model=model,
        evaluate=scripted(4.0, 2.0, 3.0, 5.0),
        report_results=report_results,
    )
    assert reported == ["weights of the best evaluation"]
    folder = tmp_path / "checkpoints"
    second = checkpoint.read(folder / "checkpoint_step_00000002.pt", small.RECIPE).model
    assert all(torch.equal(value, second[name]) for name, value in model.state_dict().items())
    *_, places, memory = capsys.readouterr().out.splitlines()
    best = folder / "best.safetensors"
    assert places == f"weights: {best}; curves and all results: {tmp_path / 'logs'}"
    assert re.fullmatch(r"memory: peak \d+\.\d\d GiB resident, total \d+\.\d\d GiB", memory)


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

    model = network(dtype=torch.float32)
    trained(
        tmp_path,
        *cut(2, 2),
        model=model,
        setup=Setup(dtype=torch.bfloat16),
        evaluate=evaluate,
        report_results=lambda weights: look(model),
    )
    assert len(stale) >= 2 and not any(stale)


def test_only_the_first_rank_reports(tmp_path, capsys):
    run = Run(Setup(ranks=Ranks(1, 2)))
    finish(small.make_args(tmp_path), run, None, None, report_results=pytest.fail)
    assert capsys.readouterr() == ("", "")


def test_only_a_new_model_is_fitted(tmp_path):
    fitted = []
    seen = []

    def fit(model, data):
        fitted.append(len(data))
        torch.nn.init.ones_(model.output.weight)

    def note(model, batch):
        seen.append(bool((model.output.weight == 1).all()))
        return small.compute_loss(model, batch)

    def run(folder, *flags):
        trained(tmp_path / folder, *flags, fit=fit, compute_loss=note)
        return len(fitted), seen.pop(0)

    assert run("a", "--max_steps", "1") == (1, True)
    seen.clear()
    assert run("a", "--max_steps", "2", "--resume", "auto") == (1, False)
    seen.clear()
    path = tmp_path / "a/checkpoints/checkpoint_step_00000001.pt"
    assert run("b", "--max_steps", "1", "--init_from", str(path)) == (2, False)
    with pytest.raises(Planned):
        run("c", "--max_steps", "1", "--dry_run", "8GB")
    assert fitted == [13, 13]


def test_a_model_that_was_fitted_on_the_gpu_is_offloaded_from_the_host(tmp_path, monkeypatch):
    """The fp32 weights of --use_cpu_offload weights would stay on the GPU otherwise."""
    places = []

    def noted(word: str, function):
        return lambda *inputs: places.append(word) or function(*inputs)

    monkeypatch.setattr(torch.nn.Module, "cpu", noted("host", torch.nn.Module.cpu))
    monkeypatch.setattr(offload, "begin", noted("offload", offload.begin))
    flags = ("--max_steps", "1", "--use_cpu_offload", "weights")
    trained(tmp_path, *flags, fit=lambda model, data: places.append("fitted"))
    assert places == ["fitted", "host", "offload"]


# --- evaluations ----------------------------------------------------------------------------------


def test_error_rates_are_in_per_cent(tmp_path, capsys):
    def evaluate(model, eval_batches):
        return {"cer": (0.125, 1.0), "ctc": (0.125, 1.0)}

    trained(tmp_path, *cut(2, 2), "--max_steps", "2", evaluate=evaluate, metric="cer")
    assert "at step 2 (epoch 1): cer 12.50 %  ctc 0.125  best so far\n" in capsys.readouterr().out


def test_a_ratio_is_divided_as_it_is_and_has_no_value_without_a_denominator():
    task = small.task()
    values = mean_values(task, {"f1": (0.32, 0.8), "recall": (0.0, 0), "cer": (0, 3)})
    assert values == {"f1": pytest.approx(0.4), "cer": 0.0}
    values = mean_values(task, {"first": (2.0, 4), "ctc": (3.0, 0.5)})
    assert values["loss"] == pytest.approx(0.3 * 0.5 + 0.7 * 6.0)


@pytest.mark.parametrize(
    ("patience", "values", "changes", "ended"),
    [  # (updates, best result, its update, evaluations without gain)
        ("0", (0.2, 0.7, 0.5, 0.7, 0.6), {"higher_is_better": True}, (5, 0.7, 2, 3)),
        ("2", (0.2, 0.7, 0.6, 0.5, 0.9), {"higher_is_better": True}, (4, 0.7, 2, 2)),
        ("2", (5.0, 4.0, 4.5, 4.2, 3.0), {}, (4, 4.0, 2, 2)),
        ("2", (1.0, 5.0, 4.0, 0.5, 0.4), {"evaluate_first": True}, (2, 1.0, 0, 2)),
        ("0", (None, 9.0, None, 5.0, 6.0), {}, (5, 5.0, 4, 1)),
    ],
)
def test_what_is_best_and_when_a_run_stops_early(tmp_path, patience, values, changes, ended):
    flags = ("--eval_every", "1", "--max_steps", "5", "--num_epochs", "9")
    _, run = trained(
        tmp_path,
        *(*cut(2, 2), *flags, "--early_stopping_patience", patience),
        evaluate=scripted(*values),
        **changes,
    )
    assert (run.step, run.best, run.best_step, run.evaluations_without_gain) == ended


def test_early_stopping_waits_while_the_loss_falls(tmp_path):
    def evaluate(model, eval_batches):
        error, loss = next(results)
        return {"cer": (error, 1.0), "first": (loss, 1.0), "ctc": (loss, 1.0)}

    flags = ("--eval_every", "1", "--num_epochs", "9", "--early_stopping_patience", "2")
    results = iter([(0.9, 5.0), (1.5, 4.0), (1.4, 3.0), (1.3, 3.5), (1.2, 3.2), (0.1, 1.0)])
    _, progress = trained(tmp_path, *cut(1, 1), *flags, evaluate=evaluate, metric="cer")
    assert progress.step == 5 and (progress.best, progress.best_step) == (0.9, 1)


def test_evaluations_and_their_trial_leave_generators_and_mode_alone(tmp_path):
    seen = []

    def noisy_evaluate(model, eval_batches):
        assert not model.training and not torch.is_grad_enabled()
        eval_batches = list(eval_batches)
        seen.append(sum(len(batch["names"]) for batch in eval_batches))
        torch.rand(100), random.random()
        return small.evaluate(model, eval_batches)

    flags = (*cut(2, 2), "--dropout", "0.2")
    reference, _ = trained(tmp_path / "a", *flags)
    flags = (*flags, "--eval_every", "2")
    model, _ = trained(tmp_path / "b", *flags, trial=True, evaluate=noisy_evaluate)
    assert are_equal(model, reference) and model.training
    assert seen == [2, 5, 5]


def test_the_model_as_it_came_may_be_the_first_candidate(tmp_path):
    flags = (*cut(2, 2), "--dropout", "0.2", "--eval_every", "2")
    reference, usual = trained(
        tmp_path / "a", *flags, model=network(0.2), evaluate=scripted(4.0, 3.0)
    )
    start = network(0.2)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    model, progress = trained(
        tmp_path / "b", *flags, model=start, evaluate=scripted(2.0, 4.0, 3.0), evaluate_first=True
    )
    assert usual.evaluations == [[2, 4.0], [4, 3.0]]
    assert progress.evaluations == [[0, 2.0], *usual.evaluations]
    assert (progress.best, progress.best_step) == (2.0, 0)
    best = checkpoint.read_weights(tmp_path / "b/checkpoints/best.safetensors", small.RECIPE).model
    assert all(torch.equal(value, before[name]) for name, value in best.items())
    assert are_equal(model, reference)  # the evaluation changes no update


def test_the_first_evaluation_is_made_once_unless_nothing_was_saved(tmp_path):
    flags = (*cut(2, 2), "--max_steps", "2", "--eval_every", "2", "--resume", "auto")

    def run(result, compute_loss):
        fields = {"evaluate": scripted(result), "evaluate_first": True}
        return trained(tmp_path, *flags, compute_loss=compute_loss, **fields)[1]

    def killed(model, batch):
        raise SystemExit

    def stopped(model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return small.compute_loss(model, batch)

    for _ in range(2):  # killed before the first checkpoint, and started again
        with pytest.raises(SystemExit):
            run(3.0, killed)
    with pytest.raises(Stopped):  # which saves step 0
        run(3.0, stopped)
    progress = run(4.0, small.compute_loss)
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
    evaluate = scripted(*(1 - share for share in shares))
    return {"evaluate": evaluate, "augmented_share": lambda value, share, overfits: 1 - value}


def test_augmentation_grows_when_an_epoch_begins_and_never_falls(tmp_path):
    shares = []
    data = Augmented()

    def seen(number, model, batch, terms):
        shares.append(data.augmented_share)

    flags = ("--num_epochs", "4", "--eval_every", "3", *cut(4, 1))  # an epoch has 4 updates
    fields = growing(0.0, 0.5, 0.25, 0.75, 1.0, 1.0)
    trained(tmp_path, *flags, data=data, compute_loss=changing(seen), **fields)
    # Evaluated after 3, 6, 9, 12, 15 updates. The best of 6 and 9 counts from the 9th on.
    assert shares == [0.0] * 8 + [0.5] * 4 + [0.75] * 4


def test_augmentation_grows_while_the_held_out_loss_rises(tmp_path):
    told = []

    def share(value: float, share: float, overfits: bool) -> float:
        told.append((value, share, overfits))
        return share + 0.25 * overfits

    def evaluate(model, eval_batches):
        loss = next(losses)
        return {"first": (loss, 1.0), "ctc": (loss, 1.0)}

    losses = iter((0.5, 0.6, 0.4, 0.5, 0.45))
    flags = ("--num_epochs", "5", "--eval_every", "4", *cut(4, 1))  # an epoch has 4 updates
    trained(tmp_path, *flags, data=Augmented(), evaluate=evaluate, augmented_share=share)
    assert told == [(0.5, 0, False), (0.5, 0, True), (0.4, 0.25, False), (0.4, 0.25, True)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_whose_augmentation_grows_resumes_to_the_same_bits(tmp_path, workers):
    flags = (*cut(2, 2), "--num_epochs", "3", "--eval_every", "2", "--dropout", "0.2")
    flags += ("--dataloader_num_workers", str(workers), "--save_every", "1", "--keep_last", "20")
    shares = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    reference, progress = trained(tmp_path / "a", *flags, data=Augmented(), **growing(*shares))
    assert progress.augmented_share == 0.6
    for step in (3, 4, 5, 8) if workers == 0 else (4,):
        resume = ("--resume", str(tmp_path / f"a/checkpoints/checkpoint_step_{step:08}.pt"))
        # In another folder, which has no best weights, it evaluates the saved ones again.
        fields = growing(*shares[(step + 1) // 2 - 1 :])
        model = network(0.2, seed=9)
        folder = tmp_path / f"from_{step}"
        trained(folder, *flags, *resume, model=model, data=Augmented(), **fields)
        assert are_equal(model, reference), step


def test_a_model_that_has_not_begun_says_so_once_after_a_fifth(tmp_path, capsys):
    def advice(value: float) -> str | None:
        return f"advice at {value}" if value > 0.7 else None

    evaluate = scripted(*(0.9 - 0.01 * step for step in range(12)))
    flags = (*cut(2, 2), "--num_epochs", "3", "--eval_every", "1")
    trained(tmp_path, *flags, evaluate=evaluate, not_begun=advice)
    lines = [line for line in capsys.readouterr().out.splitlines() if "advice" in line]
    assert lines == ["advice at 0.88"]  # of 12 updates, the third


# --- out of memory --------------------------------------------------------------------------------


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


@pytest.mark.parametrize("seed", range(4))
def test_out_of_memory_at_random_moments_changes_no_weight_and_drops_nothing(tmp_path, seed):
    dice = random.Random(seed)

    def fail(number, model, batch, terms):
        if len(batch["names"]) > 1 and dice.random() < 0.3:
            error = dice.choice(OUT_OF_MEMORY)
            if dice.random() < 0.5:
                raise error
            terms["first"] = FailingBackward.apply(terms["first"], error)

    flags = (*cut(4, 2), "--num_epochs", "4")
    reference, _ = trained(tmp_path / "a", *flags)
    model, progress = trained(tmp_path / "b", *flags, compute_loss=changing(fail))
    assert progress.limits, "nothing was injected"
    assert progress.utterances == 4 * 13 and progress.step == 8
    assert small.relative(small.weights(model), small.weights(reference)) < 1e-10


def test_what_fits_is_learned_saved_and_used_after_resume(tmp_path):
    sizes = []

    def fail(number, model, batch, terms):
        sizes.append(len(batch["names"]))
        if sizes[-1] > 2:
            raise OUT_OF_MEMORY[0]

    args = small.make_args(tmp_path, *cut(8, 1))
    _, progress = small.run(args, compute_loss=changing(fail))
    assert min(progress.limits.values()) == 2
    assert newest(args).progress.limits == progress.limits
    assert sizes.count(8) == 1
    sizes.clear()
    resume = ("--num_epochs", "2", "--resume", "auto")
    trained(tmp_path, *cut(8, 1), *resume, compute_loss=changing(fail))
    # Shorter buckets may still have to learn it.
    assert sizes and sum(size > 2 for size in sizes) <= 2
    progress.device = "another GPU"
    carry_over(progress, torch.device("cpu"))
    assert not progress.limits and progress.device == "CPU"


def test_an_utterance_that_never_fits_is_named_with_its_length(tmp_path):
    data = small.Waveforms(9)
    longest = max(range(9), key=lambda number: len(data[number]["audio"]))

    def fail(number, model, batch, terms):
        if f"item {longest}" in batch["names"]:
            raise OUT_OF_MEMORY[0]

    args = small.make_args(tmp_path)
    words = rf"item {longest} \(\d\.\d s\) does not fit.*--gradient_checkpointing.*--max_duration"
    with pytest.raises(RunError, match=words):
        small.run(args, data=data, compute_loss=changing(fail))
    # It came first, and the state before it is saved.
    assert newest(args).progress.step == 0


def test_dropout_draws_the_same_again_when_a_global_batch_is_repeated(tmp_path):
    """The repeated global batch starts from the same generator: the same micro-batches give the
    same update."""
    calls = []

    def once(number, model, batch, terms):
        calls.append(number)
        if number == 3:
            raise OUT_OF_MEMORY[1]

    flags = (*cut(1, 8), "--dropout", "0.3")
    reference, _ = trained(tmp_path / "a", *flags)
    model, _ = trained(tmp_path / "b", *flags, compute_loss=changing(once))
    assert are_equal(model, reference)
    assert len(calls) == 13 + 3


@pytest.mark.parametrize("trouble, steps, seen", [("memory", 4, 13), ("not finite", 3, 9)])
def test_buffers_are_as_if_a_failed_attempt_had_never_been(tmp_path, trouble, steps, seen):
    def compute(number, model, batch, terms):
        model.seen += len(batch["names"])
        if number == 2 and trouble == "memory":
            raise OUT_OF_MEMORY[0]
        if number == 2:
            terms["first"] = terms["first"] * float("nan")

    model = network()
    model.register_buffer("seen", torch.zeros(()))
    _, progress = trained(tmp_path, *cut(2, 2), model=model, compute_loss=changing(compute))
    assert progress.step == steps
    assert model.seen == progress.utterances == seen


def test_cut_to_fit_uses_what_shorter_utterances_have_taught():
    batch = small.collate(sorted(small.Waveforms(8), key=lambda item: -len(item["audio"])))
    bucket = length_bucket(batch)
    assert [len(piece["names"]) for piece in cut_to_fit([batch], {bucket - 3: 3})] == [3, 3, 2]
    assert cut_to_fit([batch], {bucket + 1: 1}) == [batch]


# --- non-finite losses and fp16 -------------------------------------------------------------------


def overflow(number, model, batch, terms) -> None:
    for name, value in terms.items():
        terms[name] = InfiniteGradient.apply(value)


@pytest.mark.parametrize("place", ["data", "loss", "gradient"])
def test_a_bad_global_batch_never_reaches_the_weights_and_is_listed(tmp_path, place):
    def poison(number, model, batch, terms):
        if "item 5" in batch["names"] and place == "loss":
            terms["first"] = terms["first"] * float("nan")
        elif "item 5" in batch["names"] and place == "gradient":
            terms["first"] = InfiniteGradient.apply(terms["first"])

    data = small.Waveforms(12)
    if place == "data":
        data[5]["audio"] = data[5]["audio"] * float("nan")
    args = small.make_args(tmp_path, *cut(2, 2))
    model, progress = small.run(args, data=data, compute_loss=changing(poison))
    assert progress.bad_batches == 1 and progress.step == 2  # of three global batches
    assert torch.isfinite(small.weights(model)).all()
    (listed,) = [line["files"] for line in small.metrics(args) if line.get("event") == "bad_batch"]
    assert "item 5" in listed and len(listed) == 4


@pytest.mark.parametrize("save_every", ["0", "2"])
def test_bad_global_batches_in_a_row_stop_the_run_and_leave_what_was_trained(
    tmp_path, save_every, monkeypatch
):
    def later_nan(number, model, batch, terms):
        if number > 4:
            terms["ctc"] = terms["ctc"] * float("nan")

    monkeypatch.setattr(update, "MAX_BAD_BATCHES", 3)
    args = small.make_args(tmp_path, *cut(2, 1), "--save_every", save_every)
    with pytest.raises(RunError, match="3 global batches in a row"):
        small.run(args, compute_loss=changing(later_nan))
    assert newest(args).progress.step == 4
    _, progress = trained(tmp_path, *cut(2, 1), "--resume", "auto")  # the cause is mended
    assert progress.epoch == 1 and progress.utterances == 13 - 2 * 2


@pytest.mark.parametrize("epochs", ["1", "3"])
def test_a_run_without_any_update_says_so(tmp_path, epochs, monkeypatch):
    def never_finite(number, model, batch, terms):
        terms["ctc"] = terms["ctc"] * float("nan")

    monkeypatch.setattr(update, "MAX_BAD_BATCHES", 1000)
    message = r"no update was made: \d+ global batches had a non-finite loss, 0 files were skipped"
    with pytest.raises(RunError, match=message):
        trained(tmp_path, "--num_epochs", epochs, compute_loss=changing(never_finite))


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

    def overflowing(number, *inputs):
        if number in (2, 3):
            overflow(number, *inputs)

    args = small.make_args(tmp_path, *cut(2, 1))
    model, progress = fp16_run(args, changing(overflowing))
    assert torch.isfinite(small.weights(model)).all() and progress.bad_batches == 0
    # Of six global batches. fp16 itself may overflow once more at the initial scale.
    skipped = 6 - progress.step
    assert 2 <= skipped <= 4
    assert newest(args).state["scaler"]["scale"] == 65536 / 2**skipped
    steps = [line["step"] for line in small.metrics(args) if "train/loss" in line]
    assert steps == [*range(1, progress.step + 1)]


def test_a_scale_below_one_stops_the_run_which_may_continue(tmp_path):
    """With gradients that are finite now, such as those of a lower learning rate."""
    flags = (*cut(1, 1), "--num_epochs", "3")
    args = small.make_args(tmp_path, *flags)
    with pytest.raises(RunError, match="loss scale fell below 1"):
        fp16_run(args, changing(overflow))
    assert newest(args).progress.step == 0
    fp16_run(small.make_args(tmp_path, *flags, "--resume", "auto"), small.compute_loss)
    assert newest(args).progress.step > 10
    assert newest(args).state["scaler"]["scale"] == 0.5


def test_fp16_scaling_gives_the_fp32_gradient():
    model, items = network(dtype=torch.float32), small.Waveforms(4)
    plain = gradient_of(model, items, [2, 2])
    scaled = gradient_of(model, items, [2, 2], loss_scale=LossScale(1024.0)) / 1024
    assert small.relative(scaled, plain) < 1e-5


# --- signals and failures -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, status, moment",
    [
        (signal.SIGTERM, 143, "global_batch"),
        (signal.SIGINT, 130, "global_batch"),
        (signal.SIGHUP, 129, "evaluation"),
    ],
)
def test_a_signal_discards_the_global_batch_saves_and_resumes_to_the_same_weights(
    tmp_path, number, status, moment
):
    flags = (*cut(2, 2), "--num_epochs", "2", "--eval_every", "2", "--dropout", "0.2")
    reference, _ = trained(tmp_path / "a", *flags)

    def interrupt(call, *inputs):
        if call == 6:  # in the middle of the third global batch
            os.kill(os.getpid(), number)

    def interrupted(model, eval_batches):
        os.kill(os.getpid(), number)
        return small.evaluate(model, eval_batches)

    fields = {"compute_loss": changing(interrupt)}
    if moment == "evaluation":
        fields = {"evaluate": interrupted}
    args = small.make_args(tmp_path / "b", *flags)
    with pytest.raises(Stopped, match=r"--resume auto") as stopped:
        small.run(args, **fields)
    assert stopped.value.status == status
    progress = newest(args).progress
    steps, evaluated = {"global_batch": ((2, 3), 2), "evaluation": ((2,), 0)}[moment]
    assert progress.step in steps  # the partial global batch is shorter
    assert progress.last_evaluation == evaluated
    model, _ = trained(tmp_path / "b", *flags, "--resume", "auto", model=network(0.2, seed=9))
    assert are_equal(model, reference)


def test_nohup_keeps_a_run_alive(tmp_path):
    def hang_up(*inputs):
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _, progress = trained(tmp_path, "--max_steps", "2", compute_loss=changing(hang_up))
        assert progress.step == 2 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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


@pytest.mark.parametrize("save_every", ["0", "1"])
def test_a_report_that_cannot_be_written_ends_the_run_after_it_was_saved(
    tmp_path, monkeypatch, save_every
):
    flags = (*cut(2, 1), "--num_epochs", "2", "--save_every", save_every)
    reference, _ = trained(tmp_path / "a", *flags)
    args = small.make_args(tmp_path / "b", *flags)
    message = r"cannot write in .*logs: No space left on device; choose another --output_dir"
    with monkeypatch.context() as patch:
        patch.setattr(report, "open", lambda *_, **__: open("/dev/full", "w"), raising=False)  # noqa: SIM115
        with pytest.raises(RunError, match=message) as error:
            small.run(args)
    assert "\n" not in str(error.value) and newest(args).progress.step == 1
    model, _ = trained(tmp_path / "b", *flags, "--resume", "auto", model=network(seed=9))
    assert are_equal(model, reference)


@pytest.mark.parametrize(
    "error", [DataError("a.wav is gone"), RuntimeError("shape mismatch")], ids=repr
)
@pytest.mark.parametrize("place, call", [("evaluate", 2), ("compute_loss", 9)])
def test_a_failure_in_a_recipe_loses_no_update_before_it(tmp_path, place, call, error):
    """In the second evaluation, or in the middle of an update."""
    flags = (*cut(2, 2), "--num_epochs", "2", "--eval_every", "2", "--dropout", "0.2")
    reference, _ = trained(tmp_path / "a", *flags)
    calls = []

    def failing(*inputs):
        calls.append(1)
        if len(calls) == call:
            raise error
        return getattr(small, place)(*inputs)

    args = small.make_args(tmp_path / "b", *flags)
    with pytest.raises(type(error), match=str(error)):
        small.run(args, **{place: failing})
    assert newest(args).progress.step >= 4
    model, _ = trained(tmp_path / "b", *flags, "--resume", "auto", model=network(0.2, seed=9))
    assert are_equal(model, reference)


class WithBadFile(small.Waveforms):
    def item(self, index: int, epoch: int) -> dict:
        if index == 3:
            error = DataError("three.wav is truncated")
            error.path = "three.wav"
            raise error
        return super().item(index, epoch)


def test_a_bad_file_stops_the_run_which_is_saved(tmp_path):
    args = small.make_args(tmp_path, *cut(1, 1))
    message = r"three\.wav is truncated; fix or remove it, .* --skip_bad_audio"
    with pytest.raises(DataError, match=message):
        small.run(args, data=WithBadFile())
    assert 0 <= newest(args).progress.step < 13


def test_bad_files_are_skipped_counted_and_listed_once(tmp_path, capsys):
    args = small.make_args(tmp_path, *cut(1, 1), "--skip_bad_audio", "--num_epochs", "2")
    _, progress = small.run(args, data=WithBadFile())
    assert progress.skipped_files == 2 and progress.step == progress.utterances == 24
    assert capsys.readouterr().out.count("skipped: three.wav is truncated") == 1
    (listed,) = [line for line in small.metrics(args) if line.get("event") == "skipped"]
    assert (listed["file"], listed["reason"]) == ("three.wav", "three.wav is truncated")


class Unmounted(small.Waveforms):
    """A disk that may go away."""

    is_gone = False

    def item(self, index: int, epoch: int) -> dict:
        if self.is_gone:
            error = DataError("Transport endpoint is not connected")
            error.path = f"{index}.wav"
            raise error
        return super().item(index, epoch)


def test_a_disk_that_is_gone_ends_the_run_where_it_was(tmp_path):
    data = Unmounted(24)

    def goes(*inputs):
        data.is_gone = True
        return small.compute_loss(*inputs)

    flags = (*cut(8, 1), "--skip_bad_audio", "--num_epochs")
    with pytest.raises(RunError, match="the last 8 files could not be read: is the disk"):
        trained(tmp_path, *flags, "99", data=data, compute_loss=goes)
    data.is_gone = False
    _, progress = trained(tmp_path, *flags, "2", "--resume", "auto", data=data)
    assert (progress.step, progress.utterances, progress.skipped_files) == (6, 48, 8)


def test_a_checkpoint_is_never_much_older_than_a_free_notebook_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1.0)
    trained(tmp_path, "--max_steps", "2", "--save_every", "500")
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 2
    trained(tmp_path / "b", "--max_steps", "2", "--save_every", "0")
    assert len(list((tmp_path / "b" / "checkpoints").glob("*.pt"))) == 1


# --- resuming -------------------------------------------------------------------------------------


def test_a_run_from_other_weights_continues_when_the_command_is_run_again(tmp_path):
    trained(tmp_path / "first", "--max_steps", "2")
    best = str(tmp_path / "first/checkpoints/best.safetensors")
    flags = ("--init_from", best, "--resume", "auto", "--num_epochs", "9", "--max_steps")
    assert trained(tmp_path / "second", *flags, "2")[1].step == 2
    model, progress = trained(tmp_path / "second", *flags, "4")
    assert progress.step == 4 and not (tmp_path / "second/checkpoints/earlier-1").exists()
    whole, _ = trained(tmp_path / "whole", *flags, "4")
    assert are_equal(model, whole)


class Faster(small.Waveforms):
    def seconds(self, epoch):
        return super().seconds(epoch) * (np.arange(len(self)) % 3 + 1)


@pytest.mark.parametrize(
    ("flags", "data", "message"),
    [
        (cut(1, 3), small.Waveforms(), "the number of utterances in an update has"),
        (cut(2, 2), small.Waveforms(15), "the training data have"),
        (cut(2, 2), Faster(), r"the seed, or the length of .*, has"),
        ((*cut(2, 2), "--seed", "2"), small.Waveforms(), r"the seed, or the length of .*, has"),
    ],
)
def test_what_changes_the_order_starts_the_epoch_anew(tmp_path, capsys, flags, data, message):
    trained(tmp_path, *cut(2, 2), "--max_steps", "2")
    names = []
    fields = {"data": data, "compute_loss": watched(names)}
    _, progress = trained(tmp_path, *flags, "--resume", "auto", **fields)
    message += " changed since the checkpoint: epoch 1 starts from its beginning"
    assert re.search(message, capsys.readouterr().out)
    assert sorted(names) == sorted(item["name"] for item in data) and progress.epoch == 1


def test_an_older_checkpoint_is_resumed_into_another_folder_only(tmp_path):
    args = small.make_args(tmp_path / "a", *cut(2, 2), "--save_every", "2")
    small.run(args)
    older = args.checkpoint_dir / "checkpoint_step_00000002.pt"
    flags = (*cut(2, 2), "--max_steps", "3", "--resume", str(older))
    before = {path: path.read_bytes() for path in args.checkpoint_dir.iterdir()}
    with pytest.raises(UsageError, match=r"_00000004\.pt is newer, .*another --output_dir"):
        trained(tmp_path / "a", *flags)
    assert before == {path: path.read_bytes() for path in args.checkpoint_dir.iterdir()}
    assert trained(tmp_path / "b", *flags)[1].step == 3
    checkpoint.list_checkpoints(args.checkpoint_dir)[0].unlink()
    assert trained(tmp_path / "a", *flags)[1].step == 3


def test_resuming_into_another_folder_leaves_best_weights_there_and_another_run_alone(tmp_path):
    trained(tmp_path / "old")
    (source,) = (tmp_path / "old/checkpoints").glob("*.pt")
    trained(tmp_path / "new", "--batch_size", "1")  # a run in the folder that this one goes to
    folder = tmp_path / "new/checkpoints"
    before = {path.name for path in folder.glob("*.pt")}
    for epochs in ("1", "2"):  # already finished, and continued with no better result than before
        flags = ("--resume", str(source), "--num_epochs", epochs)
        _, progress = trained(tmp_path / "new", *flags, evaluate=scripted(1e9, 1e9))
        assert progress.best == 1e9 and (folder / "best.safetensors").exists()
    assert {path.name for path in (folder / "earlier-1").glob("*.pt")} == before


def test_best_weights_that_are_gone_are_found_again(tmp_path):
    """As those are of which best.json is damaged: tests/common/test_checkpoint.py."""
    trained(tmp_path, "--max_steps", "2", "--eval_every", "1")
    (tmp_path / "checkpoints/best.json").unlink()
    flags = ("--max_steps", "3", "--eval_every", "9", "--resume", "auto")
    _, progress = trained(tmp_path, *flags, evaluate=scripted(9.0, 10.0))
    assert progress.best == 9.0 and checkpoint.best_step(tmp_path / "checkpoints") == 2


def test_best_weights_of_just_before_a_kill_stay(tmp_path):
    flags = ("--max_steps", "2", "--eval_every", "1")
    trained(tmp_path, *flags, "--save_every", "1")
    folder = tmp_path / "checkpoints"
    checkpoint.list_checkpoints(folder)[0].unlink()  # killed after evaluating, before saving
    trained(tmp_path, *flags, "--resume", "auto")
    assert checkpoint.best_step(folder) == 2
