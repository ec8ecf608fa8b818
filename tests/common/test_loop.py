"""The loop's contract: exact accumulation, recovery from out of memory, bad global batches kept out,
fp16's scaler, signals."""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from common import checkpoint, files, report
from common.batches import to_device
from common.device import Ranks, Setup
from common.errors import DataError, RunError, Stopped, UsageError
from common.loop import Run, begin, cut_to_fit, finish, length_bucket, run_global_batch
from tests import toy

DRAW = report.Report.draw  # before conftest.py replaces it
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def cut(batch_size: int, accumulation: int) -> tuple[str, ...]:
    return "--batch_size", str(batch_size), "--gradient_accumulation_steps", str(accumulation)


def network(dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> toy.Network:
    torch.manual_seed(seed)
    return toy.Network(dropout).to(dtype)


def window_gradient(
    model, items: list[dict], sizes: list[int], scaler=None, without: str = ""
) -> torch.Tensor:
    """The gradient of one global batch in micro-batches of `sizes` items; the term `without` has no
    targets."""
    model.zero_grad()
    rest = iter(items)
    micro_batches = [toy.collate([next(rest) for _ in range(size)]) for size in sizes]
    totals = {
        name: sum(batch["counts"][name] for batch in micro_batches)
        for name in toy.LOSS_WEIGHTS
        if name != without
    }
    outcome = run_global_batch(
        model,
        micro_batches,
        {without: 0} | totals,
        toy.compute_loss,
        toy.LOSS_WEIGHTS,
        Setup(),
        scaler,
    )
    assert outcome.failed is None and not outcome.stopped
    return torch.nn.utils.parameters_to_vector(p.grad for p in model.parameters())


def metrics(args) -> list[dict]:
    return [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]


def newest(args) -> dict:
    return checkpoint.resume("auto", args.checkpoint_dir, toy.RECIPE)


# --- accumulation ---------------------------------------------------------------------------------

CUTS = ([4, 4], [2, 2, 2, 2], [1] * 8, [5, 3], [1, 7])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_gradient_does_not_depend_on_how_a_window_is_cut(dtype, tolerance):
    model, items = network(dtype=dtype), toy.Sequences(8)
    whole = window_gradient(model, items, [8])
    assert whole.norm() > 0
    for sizes in CUTS:
        assert toy.relative(window_gradient(model, items, sizes), whole) < tolerance


def test_padding_would_be_seen_if_it_were_not_masked(monkeypatch):
    monkeypatch.setattr(
        toy.Layer, "forward", lambda layer, x, padding: x + torch.nn.Sequential.forward(layer, x)
    )
    model, items = network(), toy.Sequences(8)
    whole = window_gradient(model, items, [8])
    assert all(toy.relative(window_gradient(model, items, sizes), whole) > 1e-4 for sizes in CUTS)


def test_gradient_is_the_mean_over_targets_and_not_over_micro_batches():
    model, items = network(), toy.Sequences(5)
    counts = dict.fromkeys(toy.LOSS_WEIGHTS, 0)
    sums = dict.fromkeys(toy.LOSS_WEIGHTS, 0.0)
    for item in items:  # one by one, without padding
        batch = toy.collate([item])
        for name, value in toy.compute_loss(
            model, next(to_device([batch], torch.device("cpu")))
        ).items():
            sums[name] = sums[name] + value
            counts[name] += batch["counts"][name]
    loss = sum(toy.LOSS_WEIGHTS[name] * sums[name] / counts[name] for name in sums)
    expected = torch.nn.utils.parameters_to_vector(
        torch.autograd.grad(loss, list(model.parameters()))
    )
    assert toy.relative(window_gradient(model, items, [3, 2]), expected) < 1e-10


def test_a_term_without_targets_in_a_window_adds_nothing():
    model, items = network(), toy.Sequences(5)
    parts = [window_gradient(model, items, [3, 2], without=name) for name in toy.LOSS_WEIGHTS]
    assert all(torch.isfinite(part).all() and part.norm() > 0 for part in parts)
    assert toy.relative(sum(parts), window_gradient(model, items, [3, 2])) < 1e-10


def test_a_window_without_any_target_changes_nothing_and_ends_nothing():
    model = network()
    batch = toy.collate(list(toy.Sequences(2)))
    outcome = run_global_batch(
        model, [batch], {"first": 0, "rising": 0}, toy.compute_loss, toy.LOSS_WEIGHTS, Setup()
    )
    assert outcome.failed is None and all(p.grad is None for p in model.parameters())


def test_a_term_without_a_weight_is_not_trained(tmp_path):
    def compute_loss(model, batch):
        return toy.compute_loss(model, batch) | {"extra": 1e6 * model.output.weight.sum()}

    reference, _ = toy.run(toy.make_args(tmp_path / "a"))
    model, _ = toy.run(toy.make_args(tmp_path / "b"), compute_loss=compute_loss)
    assert torch.equal(toy.weights(model), toy.weights(reference))


@pytest.mark.parametrize("batch_size, accumulation", [(8, 1), (4, 2), (1, 8)])
def test_training_ends_with_the_same_weights_however_windows_are_cut(
    tmp_path, batch_size, accumulation
):
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *cut(2, 4)))
    model, progress = toy.run(toy.make_args(tmp_path / "b", *cut(batch_size, accumulation)))
    assert (
        progress["step"] == 2 and progress["utterances"] == 13
    )  # 8 and the partial global batch of 5
    assert toy.relative(toy.weights(model), toy.weights(reference)) < 1e-10


def test_a_limit_of_padded_seconds_changes_only_the_cut(tmp_path):
    sizes = []

    def compute_loss(model, batch):
        sizes.append(len(batch["names"]))
        return toy.compute_loss(model, batch)

    reference, _ = toy.run(toy.make_args(tmp_path / "a", *cut(8, 1)))
    model, _ = toy.run(
        toy.make_args(tmp_path / "b", *cut(8, 1), "--max_batch_seconds", "4"),
        compute_loss=compute_loss,
    )
    assert max(sizes) < 8
    assert toy.relative(toy.weights(model), toy.weights(reference)) < 1e-10


def test_gradient_checkpointing_changes_no_bit(tmp_path):
    reference, _ = toy.run(toy.make_args(tmp_path / "a", "--dropout", "0.3"))
    model, _ = toy.run(
        toy.make_args(tmp_path / "b", "--dropout", "0.3", "--gradient_checkpointing")
    )
    assert torch.equal(toy.weights(model), toy.weights(reference))
    assert all("forward" in vars(layer) for layer in model.layers)


def test_a_run_learns(tmp_path):
    flags = ("--num_epochs", "40", "--learning_rate", "1e-2", "--eval_every", "20")
    _, progress = toy.run(toy.make_args(tmp_path, *flags))
    results = [result for _, result in progress["evaluations"]]
    assert progress["step"] == 80 and len(results) == 4 and results[-1] < 0.08 < results[0]


# --- the beginning and the end --------------------------------------------------------------------


def test_args_are_read_only_once_a_run_has_begun(tmp_path):
    args = toy.make_args(tmp_path)
    args.batch_size = 3
    run = begin(args, toy.RECIPE)
    assert (run.resumed, run.initial, run.setup.device.type) == (None, None, "cpu")
    with pytest.raises(
        AttributeError, match=r"args\.batch_size: the flags are read-only once a run has begun"
    ):
        args.batch_size = 4
    with pytest.raises(AttributeError, match="read-only"):
        args.invented = 1
    assert args.batch_size == 3


def test_a_run_holds_the_lock_of_its_folder(tmp_path):
    args = toy.make_args(tmp_path)
    run = begin(args, toy.RECIPE)
    assert (args.checkpoint_dir / ".lock").read_text() == str(os.getpid()) and not run.locks[
        0
    ].closed


@pytest.mark.parametrize("flag", ["--checkpoint_dir", "--log_dir"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(tmp_path, flag):
    (tmp_path / "file").touch()
    args = toy.make_args(
        tmp_path / "run", flag, str(tmp_path / "file" / "below"), "--resume", "no such file"
    )
    with pytest.raises(RunError, match=f"cannot write in .*choose another {flag}"):
        begin(args, toy.RECIPE)


def test_the_weighted_loss_may_be_the_metric(tmp_path):
    args = toy.make_args(
        tmp_path, "--max_steps", "2", "--save_every", "1", "--average_checkpoints", "2"
    )
    reported = []
    _, progress = toy.run(args, metric="loss", report_results=reported.append)
    assert len(reported) == 1 and 0 < progress["best"] < 10


def test_a_checkpoint_has_the_flags_of_its_run(tmp_path):
    args = toy.make_args(tmp_path, "--max_steps", "1", "--bf16")
    toy.run(args, setup=Setup())
    saved = newest(args)["args"]
    assert saved.keys() == vars(args).keys() - {"given"}
    assert (saved["max_steps"], saved["mixed_precision"], saved["resume"]) == (1, "bf16", None)
    assert saved["log_dir"] == str(args.log_dir)


def test_init_from_starts_a_new_run_from_saved_weights(tmp_path):
    first = toy.make_args(tmp_path / "a")
    toy.run(first)
    best = first.checkpoint_dir / "best.safetensors"
    saved, _ = checkpoint.read_weights(best, toy.RECIPE)
    starts = []

    def compute_loss(model, batch):
        starts.append({name: value.clone() for name, value in model.state_dict().items()})
        return toy.compute_loss(model, batch)

    args = toy.make_args(tmp_path / "b", "--init_from", str(best))
    _, progress = toy.run(args, model=network(seed=5), compute_loss=compute_loss)
    assert all(torch.equal(value, starts[0][name]) for name, value in saved.items())
    assert progress["step"] == 2 and len(progress["evaluations"]) == 1


def test_the_peak_learning_rate_is_the_flags_or_else_the_tasks(tmp_path):
    def rates(name, **changes):
        args = toy.make_args(tmp_path / name, "--lr_schedule", "constant", "--warmup_steps", "0")
        args.learning_rate = changes.pop("flag", None)
        toy.run(args, **changes)
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
    return lambda model, eval_batches: {"rising": (next(results), 1.0)}


def test_finish_reports_the_best_weights_and_the_peak_of_memory(tmp_path, capsys):
    model = network()
    args = toy.make_args(tmp_path, *cut(2, 2), "--eval_every", "1", "--save_every", "1")
    reported = Reported(model)
    toy.run(args, model=model, evaluate=scripted(4.0, 2.0, 3.0, 5.0), report_results=reported)
    assert reported.weights == "weights of the best evaluation"
    second = checkpoint.read(args.checkpoint_dir / "checkpoint_step_00000002.pt", toy.RECIPE)[
        "model"
    ]
    assert all(torch.equal(value, second[name]) for name, value in model.state_dict().items())
    *_, places, memory = capsys.readouterr().out.splitlines()
    assert (
        places == f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves and all results:"
        f" {args.log_dir}"
    )
    assert re.fullmatch(r"memory: peak \d+\.\d\d GiB resident, total \d+\.\d\d GiB", memory)


@pytest.mark.parametrize("averaged", [0.5, 1.0, 1.5])
def test_finish_takes_the_average_if_it_is_not_worse(tmp_path, capsys, averaged):
    model = network()
    flags = ("--eval_every", "1", "--save_every", "1", "--average_checkpoints", "2")
    args = toy.make_args(tmp_path, *cut(2, 2), *flags)
    reported = Reported(model)
    results = scripted(
        3.0, 1.0, 2.0, 2.5, 1.0, averaged
    )  # four evaluations, the best weights again, the average
    toy.run(args, model=model, evaluate=results, report_results=reported)
    line = f"average of the checkpoints of steps 4, 3: {averaged:.3f}, best evaluation: 1.000\n"
    assert line in capsys.readouterr().out
    saved = {
        path.stem: checkpoint.read(path, toy.RECIPE)["model"]
        for path in checkpoint.list_checkpoints(args.checkpoint_dir)
    }
    if averaged <= 1:
        assert reported.weights == "averaged weights (averaged.safetensors)"
        mean = {
            name: (saved["checkpoint_step_00000003"][name] + value) / 2
            for name, value in saved["checkpoint_step_00000004"].items()
        }
        assert all(torch.equal(value, mean[name]) for name, value in model.state_dict().items())
        kept, _ = checkpoint.read_weights(args.checkpoint_dir / "averaged.safetensors", toy.RECIPE)
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    else:
        assert reported.weights == "weights of the best evaluation (the average was worse)"
        best = saved["checkpoint_step_00000002"]
        assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
        assert not (args.checkpoint_dir / "averaged.safetensors").exists()


def test_only_error_rates_are_in_per_cent(tmp_path, capsys):
    results = iter(
        [0.25, 0.125, 0.5, 0.25, 0.25]
    )  # two evaluations, the step of the second again, and its average

    def evaluate(model, eval_batches):
        share = next(results)
        return {"cer": (share, 1.0), "rising": (share, 1.0)}

    flags = (
        "--max_steps",
        "2",
        "--eval_every",
        "1",
        "--save_every",
        "1",
        "--average_checkpoints",
        "2",
    )
    args = toy.make_args(tmp_path, *cut(2, 2), *flags)
    toy.run(args, evaluate=evaluate, metric="cer", report_results=lambda weights: None)
    output = capsys.readouterr().out
    assert "evaluation at step 2 (epoch 1): cer 12.50 %  rising 0.125  best so far\n" in output
    assert "average of the checkpoints of steps 2, 1: 25.00 %, best evaluation: 50.00 %\n" in output


def test_only_the_first_rank_reports(tmp_path, capsys):
    run = Run(Setup(ranks=Ranks(1, 2)))
    finish(toy.make_args(tmp_path), run, None, None, None, report_results=pytest.fail)
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
        terms = toy.compute_loss(model, batch)
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
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags))
    model, progress = toy.run(
        toy.make_args(tmp_path / "b", *flags), compute_loss=failing_loss(0.3, seed)
    )
    assert progress["limits"], "nothing was injected"
    assert progress["utterances"] == 4 * 13 and progress["step"] == 8
    assert toy.relative(toy.weights(model), toy.weights(reference)) < 1e-10


def test_what_fits_is_learned_saved_and_used_after_resume(tmp_path):
    sizes = []

    def watched(model, batch):
        sizes.append(len(batch["names"]))
        return failing_loss(0, 0, largest=2)(model, batch)

    args = toy.make_args(tmp_path, *cut(8, 1))
    _, progress = toy.run(args, compute_loss=watched)
    assert min(progress["limits"].values()) == 2
    assert newest(args)["progress"]["limits"] == progress["limits"]
    assert sizes.count(8) == 1
    sizes.clear()
    toy.run(
        toy.make_args(tmp_path, *cut(8, 1), "--num_epochs", "2", "--resume", "auto"),
        compute_loss=watched,
    )
    assert (
        sizes and sum(size > 2 for size in sizes) <= 2
    )  # shorter buckets may still have to learn it


def test_an_utterance_that_never_fits_is_named_with_its_length(tmp_path):
    data = toy.Sequences(9)
    longest = max(range(9), key=lambda number: len(data[number]["values"]))

    def compute_loss(model, batch):
        if f"item {longest}" in batch["names"]:
            raise OUT_OF_MEMORY[0]
        return toy.compute_loss(model, batch)

    args = toy.make_args(tmp_path)
    words = rf"item {longest} \(\d\.\d s\) does not fit.*--gradient_checkpointing.*--max_duration"
    with pytest.raises(RunError, match=words):
        toy.run(args, data=data, compute_loss=compute_loss)
    # It came first, and the state before it is saved.
    assert newest(args)["progress"]["step"] == 0


def test_dropout_draws_the_same_again_when_a_window_is_repeated(tmp_path):
    """The repeated global batch starts from the same generator: the same micro-batches give the same
    update."""
    calls = []

    def once(model, batch):
        calls.append(1)
        terms = toy.compute_loss(model, batch)
        if len(calls) == 3:
            raise OUT_OF_MEMORY[1]
        return terms

    flags = (*cut(1, 8), "--dropout", "0.3")
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags))
    model, _ = toy.run(toy.make_args(tmp_path / "b", *flags), compute_loss=once)
    assert torch.equal(toy.weights(model), toy.weights(reference))
    assert len(calls) == 13 + 3


def counting(model: toy.Network) -> toy.Network:
    model.register_buffer("seen", torch.zeros(()))
    return model


@pytest.mark.parametrize("trouble", ["out of memory", "not finite"])
def test_buffers_are_as_if_a_failed_attempt_had_never_been(tmp_path, trouble):
    calls = []

    def compute_loss(model, batch):
        calls.append(1)
        model.seen += len(batch["names"])
        terms = toy.compute_loss(model, batch)
        if len(calls) == 2 and trouble == "out of memory":
            raise OUT_OF_MEMORY[0]
        if len(calls) == 2:
            terms["first"] = terms["first"] * float("nan")
        return terms

    model, progress = toy.run(
        toy.make_args(tmp_path, *cut(2, 2)), model=counting(network()), compute_loss=compute_loss
    )
    assert progress["step"] == (4 if trouble == "out of memory" else 3)
    assert model.seen == progress["utterances"] == (13 if trouble == "out of memory" else 9)


def test_other_errors_pass_through(tmp_path):
    def broken(model, batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        toy.run(toy.make_args(tmp_path), compute_loss=broken)


def test_cut_to_fit_uses_what_shorter_utterances_have_taught():
    batch = toy.collate(sorted(toy.Sequences(8), key=lambda item: -len(item["values"])))
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
def test_a_bad_window_never_reaches_the_weights_and_is_listed(tmp_path, place):
    data = toy.Sequences(12)

    def poisoned(model, batch):
        terms = toy.compute_loss(model, batch)
        if "item 5" in batch["names"]:
            if place == "loss":
                terms["first"] = terms["first"] * float("nan")
            elif place == "gradient":
                terms["first"] = InfiniteGradient.apply(terms["first"])
        return terms

    if place == "data":
        data[5]["values"] = data[5]["values"] * float("nan")
    args = toy.make_args(tmp_path, *cut(2, 2))
    model, progress = toy.run(args, data=data, compute_loss=poisoned)
    assert progress["bad_batches"] == 1 and progress["step"] == 2  # of three global batches
    assert torch.isfinite(toy.weights(model)).all()
    (listed,) = [line["files"] for line in metrics(args) if line.get("event") == "bad_batch"]
    assert "item 5" in listed and len(listed) == 4


@pytest.mark.parametrize("save_every", ["0", "2"])
def test_bad_windows_in_a_row_stop_the_run_and_leave_what_was_trained(tmp_path, save_every):
    steps = []

    def later_nan(model, batch):
        terms = toy.compute_loss(model, batch)
        steps.append(1)
        return (
            {name: value * float("nan") for name, value in terms.items()}
            if len(steps) > 4
            else terms
        )

    args = toy.make_args(tmp_path, *cut(2, 1), "--save_every", save_every, "--max_bad_batches", "3")
    with pytest.raises(RunError, match="3 global batches in a row"):
        toy.run(args, compute_loss=later_nan)
    assert newest(args)["progress"]["step"] == 4
    _, progress = toy.run(
        toy.make_args(tmp_path, *cut(2, 1), "--resume", "auto")
    )  # the cause is mended
    assert progress["epoch"] == 1 and progress["utterances"] == 13 - 2 * 2


def fp16_run(args, compute_loss):
    return toy.run(
        args,
        model=network(dtype=torch.float32),
        data=toy.Sequences(12),
        setup=Setup(dtype=torch.float16),
        compute_loss=compute_loss,
    )


def test_fp16_overflow_is_skipped_and_the_scale_recovers(tmp_path):
    """fp16 autocast and the GradScaler on the CPU: an infinite gradient halves the scale, and the
    schedule and the step count move only when the optimizer did."""
    calls = []

    def overflowing(model, batch):
        terms = toy.compute_loss(model, batch)
        calls.append(1)
        if len(calls) in (2, 3):
            terms["first"] = InfiniteGradient.apply(terms["first"])
        return terms

    args = toy.make_args(tmp_path, *cut(2, 1))
    model, progress = fp16_run(args, overflowing)
    assert torch.isfinite(toy.weights(model)).all() and progress["bad_batches"] == 0
    skipped = (
        6 - progress["step"]
    )  # of six global batches; fp16 itself may overflow once more at the initial scale
    assert 2 <= skipped <= 4
    assert newest(args)["scaler"]["scale"] == 65536 / 2**skipped
    assert [line["step"] for line in metrics(args) if "train/loss" in line] == list(
        range(1, progress["step"] + 1)
    )


def test_a_scale_below_one_stops_the_run(tmp_path):
    def overflowing(model, batch):
        return {
            name: InfiniteGradient.apply(value)
            for name, value in toy.compute_loss(model, batch).items()
        }

    with pytest.raises(RunError, match="loss scale fell below 1"):
        fp16_run(toy.make_args(tmp_path, *cut(1, 1), "--num_epochs", "3"), overflowing)
    assert newest(toy.make_args(tmp_path))["progress"]["step"] == 0


def test_fp16_scaling_gives_the_fp32_gradient():
    model, items = network(dtype=torch.float32), toy.Sequences(4)
    plain = window_gradient(model, items, [2, 2])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = window_gradient(model, items, [2, 2], scaler=scaler) / 1024
    assert toy.relative(scaled, plain) < 1e-5


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("moment", ["global_batch", "evaluation"])
def test_a_signal_discards_the_window_saves_and_resumes_to_the_same_weights(
    tmp_path, number, status, moment
):
    flags = (*cut(2, 2), "--num_epochs", "2", "--eval_every", "2", "--dropout", "0.2")
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags))
    calls = []

    def interrupted_loss(model, batch):
        calls.append(1)
        if moment == "global_batch" and len(calls) == 6:  # in the middle of the third global batch
            os.kill(os.getpid(), number)
        return toy.compute_loss(model, batch)

    def interrupted_evaluate(model, eval_batches):
        os.kill(os.getpid(), number)
        return toy.evaluate(model, eval_batches)

    args = toy.make_args(tmp_path / "b", *flags)
    evaluate = interrupted_evaluate if moment == "evaluation" else toy.evaluate
    with pytest.raises(Stopped, match=r"--resume auto") as stopped:
        toy.run(args, compute_loss=interrupted_loss, evaluate=evaluate)
    assert stopped.value.status == status
    progress = newest(args)["progress"]
    assert progress["step"] in (
        (2, 3) if moment == "global_batch" else (2,)
    )  # the partial global batch is shorter
    assert progress["last_evaluation"] == (2 if moment == "global_batch" else 0)
    model, _ = toy.run(
        toy.make_args(tmp_path / "b", *flags, "--resume", "auto"), model=network(0.2, seed=9)
    )
    assert torch.equal(toy.weights(model), toy.weights(reference))


def test_nohup_keeps_a_run_alive(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def hung_up(model, batch):
        os.kill(os.getpid(), signal.SIGHUP)
        return toy.compute_loss(model, batch)

    try:
        _, progress = toy.run(toy.make_args(tmp_path, "--max_steps", "2"), compute_loss=hung_up)
        assert progress["step"] == 2 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("save_every", ["0", "1"])
def test_a_report_that_cannot_be_written_ends_the_run_after_it_was_saved(
    tmp_path, monkeypatch, save_every
):
    flags = (*cut(2, 1), "--num_epochs", "2", "--save_every", save_every)
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags))
    args = toy.make_args(tmp_path / "b", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(report, "open", lambda *_, **__: open("/dev/full", "w"), raising=False)  # noqa: SIM115
        with pytest.raises(
            RunError,
            match=r"cannot write in .*logs: No space left on device; choose another --log_dir",
        ) as error:
            toy.run(args)
    assert "\n" not in str(error.value) and newest(args)["progress"]["step"] == 1
    model, _ = toy.run(
        toy.make_args(tmp_path / "b", *flags, "--resume", "auto"), model=network(seed=9)
    )
    assert torch.equal(toy.weights(model), toy.weights(reference))


def test_a_log_folder_that_is_gone_ends_the_run_with_its_best_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(report.Report, "draw", DRAW)
    args = toy.make_args(tmp_path)

    def remove(model, batch):
        shutil.rmtree(args.log_dir, ignore_errors=True)
        return toy.compute_loss(model, batch)

    with pytest.raises(RunError, match=r"cannot write in .*logs: No such file"):
        toy.run(args, compute_loss=remove)
    assert (args.checkpoint_dir / "best.safetensors").exists() and newest(args)["progress"][
        "epoch"
    ] == 1


def test_evaluation_leaves_generators_and_mode_alone(tmp_path):
    flags = (*cut(2, 2), "--dropout", "0.2")

    def noisy_evaluate(model, eval_batches):
        assert not model.training and not torch.is_grad_enabled()
        torch.rand(100), random.random()
        return toy.evaluate(model, eval_batches)

    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags))
    model, _ = toy.run(
        toy.make_args(tmp_path / "b", *flags, "--eval_every", "1"), evaluate=noisy_evaluate
    )
    assert torch.equal(toy.weights(model), toy.weights(reference)) and model.training


def test_early_stopping_counts_evaluations_without_a_better_result(tmp_path):
    args = toy.make_args(
        tmp_path, *cut(1, 1), "--eval_every", "2", "--early_stopping_patience", "2"
    )
    _, progress = toy.run(args, evaluate=scripted(5.0, 4.0, 4.5, 4.2, 3.0, 2.0))
    assert progress["step"] == 8 and progress["best"] == 4.0 and progress["best_step"] == 4


def test_the_model_as_it_came_may_be_the_first_candidate(tmp_path):
    flags = (*cut(2, 2), "--dropout", "0.2", "--eval_every", "2")
    reference, usual = toy.run(toy.make_args(tmp_path / "a", *flags), evaluate=scripted(4.0, 3.0))
    args = toy.make_args(tmp_path / "b", *flags)
    start = network(0.2)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    model, progress = toy.run(args, start, evaluate=scripted(2.0, 4.0, 3.0), evaluate_first=True)
    assert usual["evaluations"] == [[2, 4.0], [4, 3.0]]
    assert progress["evaluations"] == [[0, 2.0], *usual["evaluations"]]
    assert (progress["best"], progress["best_step"], progress["evaluations_without_gain"]) == (
        2.0,
        0,
        2,
    )
    best, _ = checkpoint.read_weights(args.checkpoint_dir / "best.safetensors", toy.RECIPE)
    assert all(torch.equal(value, before[name]) for name, value in best.items())
    assert not torch.equal(
        toy.weights(model), torch.cat([value.reshape(-1) for value in before.values()])
    )
    reference, _ = toy.run(
        toy.make_args(tmp_path / "c", *flags), network(0.2), evaluate=scripted(4.0, 3.0)
    )
    assert torch.equal(
        toy.weights(model), toy.weights(reference)
    )  # the evaluation changes no update


def test_a_task_may_leave_embeddings_without_decay(tmp_path):
    class WithEmbedding(toy.Network):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(2, 8)

        def forward(self, values, lengths):
            return super().forward(values, lengths) + 0 * self.embedding.weight.sum()

    for decays in (True, False):
        model = WithEmbedding().double()
        torch.nn.init.ones_(model.embedding.weight)
        flags = ("--max_steps", "2", "--weight_decay", "0.5")
        toy.run(toy.make_args(tmp_path, *flags), model=model, decay_embeddings=decays)
        assert bool((model.embedding.weight == 1).all()) is not decays


def test_the_first_evaluation_counts_for_early_stopping(tmp_path):
    args = toy.make_args(
        tmp_path, *cut(1, 1), "--eval_every", "2", "--early_stopping_patience", "2"
    )
    _, progress = toy.run(args, evaluate=scripted(1.0, 5.0, 4.0, 0.5), evaluate_first=True)
    assert progress["step"] == 4 and progress["best_step"] == 0


def test_the_first_evaluation_is_made_once_unless_nothing_was_saved(tmp_path):
    flags = (*cut(2, 2), "--max_steps", "2", "--eval_every", "2", "--resume", "auto")

    def killed(model, batch):
        raise SystemExit

    for _ in range(2):  # killed before the first checkpoint, and started again
        with pytest.raises(SystemExit):
            toy.run(
                toy.make_args(tmp_path, *flags),
                evaluate=scripted(3.0),
                evaluate_first=True,
                compute_loss=killed,
            )

    def stopped(model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return toy.compute_loss(model, batch)

    with pytest.raises(Stopped):  # which saves step 0
        toy.run(
            toy.make_args(tmp_path, *flags),
            evaluate=scripted(3.0),
            evaluate_first=True,
            compute_loss=stopped,
        )
    _, progress = toy.run(
        toy.make_args(tmp_path, *flags), evaluate=scripted(4.0), evaluate_first=True
    )
    assert progress["evaluations"] == [[0, 3.0], [2, 4.0]] and progress["best_step"] == 0


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
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags))
    args = toy.make_args(tmp_path / "b", *flags, "--num_epochs", "1")
    toy.run(args)
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
        return toy.compute_loss(model, batch)

    for function in ("load_weights", "initialise"):
        monkeypatch.setattr(checkpoint, function, hold(getattr(checkpoint, function)))
    folder = tmp_path / ("b" if flag == "--resume" else "c")
    model, _ = toy.run(
        toy.make_args(folder, *flags, flag, str(path)), network(0.2, seed=9), compute_loss=watched
    )
    assert held == [{}] and during and not any(during)
    if flag == "--resume":
        assert not path.exists() and torch.equal(toy.weights(model), toy.weights(reference))
    else:
        assert path.read_bytes() == content


def test_a_signal_during_a_save_lets_it_finish(tmp_path, monkeypatch):
    write_file = files.write_file

    def interrupted(path, write, durable=True):
        if path.suffix == ".pt":
            os.kill(os.getpid(), signal.SIGTERM)
        write_file(path, write, durable)

    args = toy.make_args(tmp_path, *cut(2, 2), "--save_every", "2")
    monkeypatch.setattr(files, "write_file", interrupted)
    with pytest.raises(Stopped):
        toy.run(args)
    assert newest(args)["progress"]["step"] == 2 and not list(args.checkpoint_dir.glob("*.tmp"))


# --- resuming -------------------------------------------------------------------------------------


def watched(names: list[str]):
    """compute_loss that notes the names of its utterances."""

    def compute_loss(model, batch):
        names.extend(batch["names"])
        return toy.compute_loss(model, batch)

    return compute_loss


def test_another_window_size_continues_the_epoch_with_what_is_left(tmp_path, capsys):
    names = []
    toy.run(toy.make_args(tmp_path, *cut(2, 2), "--max_steps", "2"), compute_loss=watched(names))
    assert len(names) in (5, 8)
    args = toy.make_args(tmp_path, *cut(1, 3), "--resume", "auto")
    _, progress = toy.run(args, compute_loss=watched(names))
    assert re.search(
        r"an update had 4 utterances .* 3: the rest of epoch 1 is cut anew", capsys.readouterr().out
    )
    assert (
        sorted(names) == sorted(item["name"] for item in toy.Sequences()) and progress["epoch"] == 1
    )


def test_other_data_start_the_epoch_anew(tmp_path, capsys):
    toy.run(toy.make_args(tmp_path, "--max_steps", "1"))
    names = []
    args = toy.make_args(tmp_path, "--resume", "auto")
    toy.run(args, data=toy.Sequences(15), compute_loss=watched(names))
    assert re.search(
        r"training data .*changed.*: epoch 1 starts from its beginning", capsys.readouterr().out
    )
    assert sorted(names) == sorted(item["name"] for item in toy.Sequences(15))


def test_resuming_into_another_folder_leaves_best_weights_there_and_another_run_alone(tmp_path):
    old = toy.make_args(tmp_path / "old")
    toy.run(old)
    (source,) = checkpoint.list_checkpoints(old.checkpoint_dir)
    other = toy.make_args(tmp_path / "new", "--batch_size", "1")
    toy.run(other)  # another run, in the folder that the resumed one goes to
    before = {path.name for path in other.checkpoint_dir.glob("checkpoint_*")}
    for epochs in ("1", "2"):  # already finished, and continued with no better result than before
        args = toy.make_args(tmp_path / "new", "--resume", str(source), "--num_epochs", epochs)
        _, progress = toy.run(args, evaluate=scripted(1e9, 1e9))
        assert progress["best"] == 1e9 and (args.checkpoint_dir / "best.safetensors").exists()
    assert {
        path.name for path in (other.checkpoint_dir / "earlier-1").glob("checkpoint_*")
    } == before


@pytest.mark.parametrize("change", ["seed", "lengths"])
def test_another_order_starts_the_epoch_anew_and_says_so(tmp_path, capsys, change):
    class Faster(toy.Sequences):
        def seconds(self, epoch):
            return super().seconds(epoch) * (np.arange(len(self)) % 3 + 1)

    toy.run(toy.make_args(tmp_path, *cut(2, 2), "--max_steps", "2"))
    names, other = [], change == "lengths"
    args = toy.make_args(tmp_path, *cut(2, 2), "--resume", "auto", "--seed", "1" if other else "2")
    _, progress = toy.run(
        args, data=Faster() if other else toy.Sequences(), compute_loss=watched(names)
    )
    assert re.search(
        r"the seed, or the length .* changed .*: epoch 1 starts from its beg",
        capsys.readouterr().out,
    )
    assert (
        sorted(names) == sorted(item["name"] for item in toy.Sequences()) and progress["epoch"] == 1
    )


def test_the_same_order_continues_in_any_epoch(tmp_path, capsys):
    class Perturbed(toy.Sequences):
        def seconds(self, epoch):
            return super().seconds(epoch) * np.random.default_rng(epoch).uniform(
                0.9, 1.1, len(self)
            )

    flags = (*cut(2, 2), "--num_epochs", "3", "--lr_schedule", "constant")
    reference, _ = toy.run(toy.make_args(tmp_path / "a", *flags), data=Perturbed())
    for steps in range(1, 12, 3):
        model, _ = toy.run(
            toy.make_args(tmp_path / "b", *flags, "--max_steps", str(steps), "--resume", "auto"),
            data=Perturbed(),
        )
    model, _ = toy.run(toy.make_args(tmp_path / "b", *flags, "--resume", "auto"), data=Perturbed())
    assert "changed since" not in capsys.readouterr().out and torch.equal(
        toy.weights(model), toy.weights(reference)
    )


def test_resuming_an_older_checkpoint_is_a_branch_that_auto_follows(tmp_path, capsys):
    """What is newer is moved aside, the new steps survive --keep_last, and the better weights of
    the other branch stay."""
    args = toy.make_args(
        tmp_path,
        *cut(2, 2),
        "--num_epochs",
        "9",
        "--max_steps",
        "6",
        "--save_every",
        "2",
        "--eval_every",
        "2",
    )
    toy.run(args, evaluate=scripted(5.0, 1.0, 2.0))
    (args.checkpoint_dir / "checkpoint_step_00090000.pt").write_bytes(b"of another run")
    best = (args.checkpoint_dir / "best.safetensors").read_bytes()
    older = str(args.checkpoint_dir / "checkpoint_step_00000002.pt")

    def interrupted(model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return toy.compute_loss(model, batch)

    flags = (
        *cut(2, 2),
        "--num_epochs",
        "9",
        "--eval_every",
        "1",
        "--save_every",
        "1",
        "--keep_last",
        "1",
    )
    _, progress = toy.run(
        toy.make_args(tmp_path, *flags, "--max_steps", "3", "--resume", older),
        evaluate=scripted(7.0, 8.0),
    )
    assert "what is newer was moved to abandoned-1/" in capsys.readouterr().out
    aside = args.checkpoint_dir / "abandoned-1"
    assert sorted(map(checkpoint.step_of, aside.glob("checkpoint*"))) == [4, 6, 90000]
    assert (
        (aside / "best.safetensors").read_bytes() == best
        and progress["best"] == 7.0
        and progress["best_step"] == 2
    )
    assert [
        checkpoint.step_of(path) for path in checkpoint.list_checkpoints(args.checkpoint_dir)
    ] == [3]
    with pytest.raises(Stopped, match=r"step 3 is saved .*; --resume auto continues from there"):
        toy.run(
            toy.make_args(tmp_path, *flags, "--max_steps", "6", "--resume", "auto"),
            compute_loss=interrupted,
        )
    assert (
        newest(args)["progress"]["step"] == 3 and not (args.checkpoint_dir / "abandoned-2").exists()
    )


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text('{"step": -1}')],
)
def test_best_weights_that_are_gone_are_found_again(tmp_path, damage):
    args = toy.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1")
    toy.run(args)
    damage(args.checkpoint_dir / "best.json")
    args = toy.make_args(tmp_path, "--max_steps", "3", "--eval_every", "9", "--resume", "auto")
    _, progress = toy.run(args, evaluate=scripted(9.0, 10.0))
    assert progress["best"] == 9.0 and checkpoint.best_step(args.checkpoint_dir) == 2


def test_an_evaluation_just_before_a_kill_is_not_a_branch(tmp_path, capsys):
    args = toy.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1", "--save_every", "1")
    toy.run(args)
    checkpoint.list_checkpoints(args.checkpoint_dir)[
        0
    ].unlink()  # killed after evaluating, before saving
    toy.run(toy.make_args(tmp_path, "--max_steps", "2", "--eval_every", "1", "--resume", "auto"))
    assert (
        "abandoned" not in capsys.readouterr().out
        and checkpoint.best_step(args.checkpoint_dir) == 2
    )


def test_a_second_run_moves_what_the_first_left_aside(tmp_path):
    args = toy.make_args(tmp_path, "--max_steps", "1")
    for number in range(2):
        toy.run(toy.make_args(tmp_path, "--max_steps", "1"))
        for name in ("transcripts.jsonl", "evaluation.json", "notes.txt"):
            (args.log_dir / name).write_text(str(number))
    toy.run(toy.make_args(tmp_path, "--max_steps", "1"))
    for number, folder in enumerate(("earlier-1", "earlier-2")):
        for name in ("transcripts.jsonl", "evaluation.json"):
            assert (args.log_dir / folder / name).read_text() == str(number)
    assert (args.log_dir / "notes.txt").read_text() == "1" and not (
        args.log_dir / "transcripts.jsonl"
    ).exists()


def test_logs_and_checkpoints_that_are_links_are_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    args = toy.make_args(tmp_path, "--max_steps", "1", "--resume", "auto")
    for folder, names in (
        (args.log_dir, ["metrics.jsonl", "training.png"]),
        (args.checkpoint_dir, ["best.safetensors", "best.json", "checkpoint_step_00000001.pt"]),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(tmp_path / "precious")
    toy.run(args)
    assert (tmp_path / "precious").read_text() == "mine" and newest(args)["progress"]["step"] == 1


def test_weights_that_vanish_during_a_run_are_named_with_what_to_do(tmp_path, monkeypatch):
    use_best = checkpoint.use_best

    def vanished(args, *rest):
        (args.checkpoint_dir / "best.safetensors").unlink()
        return use_best(args, *rest)

    monkeypatch.setattr(checkpoint, "use_best", vanished)
    with pytest.raises(
        RunError, match=r"best\.safetensors is gone: .*--resume .*checkpoint_step_00000001\.pt"
    ):
        toy.run(toy.make_args(tmp_path, "--max_steps", "1"), report_results=print)


def test_a_model_that_no_longer_fits_its_checkpoint_is_one_line(tmp_path):
    toy.run(toy.make_args(tmp_path))
    args = toy.make_args(tmp_path, "--resume", "auto")
    with pytest.raises(
        UsageError, match=r"the saved weights do not fit this model .*--init_from"
    ) as error:
        toy.run(args, model=toy.Network(layers=3).double())
    assert "\n" not in str(error.value)


# --- data that cannot be used ---------------------------------------------------------------------


class WithBadFile(toy.Sequences):
    def item(self, index: int, epoch: int) -> dict:
        if index == 3:
            error = DataError("three.wav is truncated")
            error.path = "three.wav"
            raise error
        return super().item(index, epoch)


def test_a_bad_file_stops_the_run_which_is_saved(tmp_path):
    args = toy.make_args(tmp_path, *cut(1, 1))
    with pytest.raises(
        DataError, match=r"three\.wav is truncated; fix or remove it, .* --skip_bad_audio"
    ):
        toy.run(args, data=WithBadFile())
    assert 0 <= newest(args)["progress"]["step"] < 13


@pytest.mark.parametrize(
    "flags", [("--num_epochs", "1"), ("--num_epochs", "3", "--max_bad_batches", "1000")]
)
def test_a_run_without_any_update_says_so(tmp_path, flags):
    def never_finite(model, batch):
        return {name: term * float("nan") for name, term in toy.compute_loss(model, batch).items()}

    with pytest.raises(
        RunError,
        match=r"no update was made: \d+ global batches had a non-finite loss, 0 files were skipped",
    ):
        toy.run(toy.make_args(tmp_path, *flags), compute_loss=never_finite)


def test_bad_files_are_skipped_counted_and_listed_once(tmp_path, capsys):
    args = toy.make_args(tmp_path, *cut(1, 1), "--skip_bad_audio", "--num_epochs", "2")
    _, progress = toy.run(args, data=WithBadFile())
    assert progress["skipped_files"] == 2 and progress["step"] == progress["utterances"] == 24
    assert capsys.readouterr().out.count("skipped: three.wav is truncated") == 1
    (listed,) = [line for line in metrics(args) if line.get("event") == "skipped"]
    assert (listed["file"], listed["reason"]) == ("three.wav", "three.wav is truncated")
