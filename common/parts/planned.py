"""A run that is only planned, for --dry_run and --verify_gpu: the peak of GPU memory of its step
and of its evaluation, on tensors without values."""

import contextlib
import copy
import functools
import io
import math
import os
import tempfile
from dataclasses import replace

import torch

import dry_run
from common import checkpoint, device, memory, optim, options, run_length
from common.batches import EvalBatches, GlobalBatches
from common.device import Setup
from common.engine import run_global_batch
from common.errors import DataError, RunError, UsageError
from common.evaluation import evaluate
from common.parts import offload
from common.parts.replay import JoinedSets
from common.ranks import Ranks, torchrun
from common.task import Run, Task


def begin(args, name: str) -> Run:
    """`setting_up.begin` of a planned run, with the card or cards that are planned for: None if
    --verify_gpu finds none. Raises `UsageError`."""
    if torchrun("WORLD_SIZE", 1) > 1:
        raise UsageError(
            "--dry_run and --verify_gpu are one process: start them without torchrun; --dry_run"
            " 2x16gb plans for two GPUs"
        )
    if not args.verify_gpu:  # a plan compiles nothing, but torch would make a folder for it
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    card = dry_run.choose_card(args.dry_run, args.device, UsageError)
    if args.sharded and (card is None or card.count == 1):
        raise UsageError("--sharded needs several GPUs: plan for two with --dry_run 2x16gb")
    setup = Setup(torch.device("meta"), ranks=Ranks(size=card.count if card else 1))
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, name)
    initial = checkpoint.read_initial(args.init_from, name, resumed)
    options.freeze(args)
    return Run(setup, resumed, initial, is_planned=True, card=card)


def verify(args, model: torch.nn.Module, needs=None) -> int:
    """`preflight.verify`, which only --verify_gpu needs."""
    from common.parts import preflight

    return preflight.verify(args, model, needs)


def step(model: torch.nn.Module, task: Task, setup: Setup, batches: list[dict]) -> None:
    """The step that is planned: forward and backward of micro-batches."""
    outcome = run_global_batch(
        model, batches, batches[0]["counts"], task.compute_loss, task.loss_weights, setup
    )
    if outcome.failed:
        raise dry_run.CannotPlan(outcome.reason)


def planned_evaluation(
    model: torch.nn.Module, task: Task, setup: Setup, eval_batches: EvalBatches
) -> dry_run.Evaluation:
    """The evaluation that is planned, of all sets, with the last steps of a long search alone."""
    datasets = [eval_batches.dataset]
    if task.further:
        datasets += [batches.dataset for batches in task.further.sets.values()]
    evaluated = copy.copy(datasets[0])
    evaluated.data = JoinedSets([dataset.data for dataset in datasets])
    short_task = replace(task, evaluate=task.plans.last_steps or task.evaluate)

    def evaluate_planned(batches: list[dict], level: str) -> None:
        on_device = replace(setup, keeps_copies=not level)
        with contextlib.redirect_stdout(io.StringIO()):  # the texts are not the model's
            evaluate(on_device, model, short_task, batches)

    longest = dry_run.longest_items(evaluated, 1, DataError)
    return dry_run.Evaluation(evaluate_planned, longest, len(evaluated.data), evaluated.collate)


def attach(args, model: torch.nn.Module, task: Task, setup: Setup) -> str:
    """Adds the usual adapters to a model without any, and returns the flag that does."""
    from common.parts import lora

    lora.attach(model, task.plans.adapters(lora.USUAL_RANK), args.seed)
    lora.lower(model, setup.dtype)
    return f"--lora {lora.USUAL_RANK}"


def plan(
    args,
    run: Run,
    model: torch.nn.Module,
    task: Task,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> int:
    """--dry_run and --verify_gpu: predicts the peak of GPU memory by `run_global_batch` and
    `evaluate` on tensors without values. Prints the answer and returns the exit status. Raises
    `DataError` and `RunError`."""
    card = run.card
    if card is None:
        return verify(args, model)
    ranks = card.count
    setup = Setup(dtype=device.pick_dtype(args.mixed_precision, card.capability)[0])
    has_adapters = checkpoint.partial_of(model) is not None
    if has_adapters:
        from common.parts import lora

        lora.lower(model, setup.dtype)
    length = run_length.choose(args, global_batches, task.fine_tunes, updates=task.updates)
    epochs = math.ceil(length.total / global_batches.per_epoch)
    checkpoint_layers = functools.partial(memory.checkpoint_layers, model, task.checkpointed)
    freeze = functools.partial(task.plans.freeze, model) if task.plans.freeze else None
    adapt = functools.partial(attach, args, model, task, setup)
    planned = dry_run.PlannedRun(
        model=model,
        step=functools.partial(step, model, task, setup),
        items=dry_run.longest_items(global_batches.dataset, epochs, DataError),
        count=math.ceil(len(global_batches.dataset.data) / ranks),
        states=functools.partial(optim.state_bytes, model),
        host=lambda optimizer: ranks * offload.host_bytes(model, optimizer, ranks),
        checkpoint=checkpoint_layers if task.checkpointed else None,
        freeze=freeze,
        collate=global_batches.dataset.collate,
        parts=(task.compute_loss, task.evaluate),
        evaluation=planned_evaluation(model, task, setup, eval_batches),
        castable=functools.partial(offload.castable, model, task.checkpointed),
        halves=setup.dtype,
        compares=task.plans.compares,
        ranks=ranks,
        layers=task.checkpointed,
        adapt=adapt if task.plans.adapters and not has_adapters else None,
    )
    if args.verify_gpu:
        return verify(args, model, lambda: planned.needs(args, card))
    try:
        return planned.answer(args, card, str(setup.dtype or torch.float32))
    except dry_run.CannotPlan as reason:
        raise RunError(f"this run cannot be planned: {reason}") from None
