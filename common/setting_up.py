"""The beginning of a run: device, locks, the checkpoint to resume, the model where it is trained,
the optimizer, the position in the data, the folders."""

import os

import torch

from common import checkpoint, device, errors, files, limits, memory, optim, options, run_length
from common.batches import EvalBatches, GlobalBatches
from common.device import Setup, set_rng_state
from common.engine import Engine
from common.errors import UsageError
from common.progress import Progress
from common.report import Report, check_folder
from common.saving import base_of
from common.task import Run, Task
from common.training import Training


def begin(args, name: str) -> Run:
    """Starts a run: device and ranks, the locks on its folders, the checkpoint to resume from. From
    here on `args` is read-only. Raises `UsageError` and `RunError`."""
    if options.plans(args):
        from common.parts import planned

        return planned.begin(args, name)
    setup = device.setup(args)
    ranks = setup.ranks
    if args.sharded and ranks.size == 1:
        raise UsageError(
            "--sharded divides a model between several GPUs: GPUS=2 in front of the script, or"
            " torchrun --nproc_per_node 2, starts a process for each"
        )
    if ranks.size > 1:
        from common.parts import machines

        return machines.begin(args, name, setup)
    check_folder(args.log_dir)
    locks = [checkpoint.lock_folder(args.checkpoint_dir)]
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, name)
    initial = checkpoint.read_initial(args.init_from, name, resumed)
    options.freeze(args)
    return Run(setup, resumed, initial, locks)


def prepare_model(args, run: Run, model: torch.nn.Module, task: Task, data) -> Engine:
    """Fits the model to the training set `data` or loads saved weights, and moves it there."""
    if run.resumed:
        checkpoint.load_weights(model, run.resumed.model)
    elif task.fit:
        task.fit(model, data)
        model.cpu()  # a recipe may have fitted it on the GPU; an engine takes it from the host
    if run.initial:
        from common.parts import init_from

        init_from.initialise(model, run.initial.model, args.init_from, task.vocabulary)
    if run.setup.ranks.machines > 1:  # whose processors may have other random numbers
        values = [t for t in model.state_dict().values() if t.is_floating_point()]
        run.setup.ranks.share_tensors(values, [0] * len(values))
    return engine_for(args, model, task, run.setup)


def engine_for(args, model: torch.nn.Module, task: Task, setup: Setup) -> Engine:
    """The engine that the flags ask for. The model is on the host."""
    if args.sharded:
        from common.parts import sharding

        engine = sharding.Sharded(args, model, task, setup)
    elif args.use_cpu_offload:
        from common.parts import offload

        engine = offload.Offloaded(args, model, task, setup)
    elif checkpoint.partial_of(model):
        from common.parts import lora

        engine = lora.Adapted(args, model, task, setup)
    else:
        engine = Engine(args, model, task, setup)
    if args.torch_compile:
        from common.parts import compiling

        compiling.compile_layers(engine.network, task.compiled)
    if args.gradient_checkpointing:
        memory.checkpoint_layers(engine.network, task.checkpointed)
    return engine


def begin_training(
    args,
    run: Run,
    task: Task,
    engine: Engine,
    global_batches: GlobalBatches,
    eval_batches: EvalBatches,
) -> Training:
    """The state of a new run, or of the one that is resumed. Moves an earlier run aside."""
    setup = run.setup
    ranks = setup.ranks
    saved = run.resumed.state if run.resumed else None
    progress = run.resumed.progress if run.resumed else Progress()
    make_optimizer(engine, progress, saved)
    loss_scale = setup.loss_scale()
    limits.carry_over(progress, setup.device)
    if saved and loss_scale and saved["scaler"]:
        loss_scale.load_state_dict(saved["scaler"])
    if task.augmented_share:
        progress.augmented_share = progress.augmented_share if saved else 0.0
        global_batches.augment(progress.augmented_share)
    place_in_data(progress, global_batches)
    if ranks.size > 1 and (saved or run.restarted):
        from common.parts import processes

        processes.share_limits(args.checkpoint_dir, ranks, progress.limits)
    length = run_length.choose(args, global_batches, task.fine_tunes, progress, task.updates)
    print(run_length.describe(length, global_batches))
    progress.stop = task.further is not None and bool(task.further.above_limit(task, progress))
    schedule = optim.Schedule(engine.optimizer, args.lr_schedule, length.total, args.warmup_steps)
    if schedule.resume(progress.schedule, progress.step):
        progress.evaluations_without_gain = 0
    schedule.set(progress.step)
    place_in_random_numbers(args.seed, setup, saved, progress.step)
    progress.base = progress.base or base_of(args, run)
    prepare_folders(args, run, progress, task)
    report = Report(args.log_dir, progress.step, length.total, enabled=ranks.first)
    utilisation = None
    if setup.device.type == "cuda":
        from common.parts.utilisation import GpuUtilisation

        utilisation = GpuUtilisation(setup.device)
    engine.network.train()
    return Training(
        args=args,
        setup=setup,
        task=task,
        length=length,
        engine=engine,
        schedule=schedule,
        loss_scale=loss_scale,
        global_batches=global_batches,
        eval_batches=eval_batches,
        progress=progress,
        report=report,
        utilisation=utilisation,
        last_saved=progress.step if saved else -1,
    )


def make_optimizer(engine: Engine, progress: Progress, saved: dict | None) -> None:
    """Makes the optimizer of a new run, or of the one that is resumed with the state `saved`. The
    new rows of a run are noted in its progress: a task cannot know those of the run that it
    resumes, which depend on --init_from."""
    engine.make_optimizer()
    if engine.task.new_rows and not saved:
        progress.parts["new_rows"] = engine.task.new_rows.record()
    if record := progress.parts.get("new_rows"):
        from common.parts import new_rows

        new_rows.speed_up(engine, new_rows.NewRows(**record))
    if saved:
        engine.load_optimizer_state(saved["optimizer"])


def place_in_random_numbers(seed: int, setup: Setup, saved: dict | None, step: int) -> None:
    """Sets the random state of this rank to that of the `state` of a checkpoint, if it has one."""
    ranks = setup.ranks
    if saved and len(saved["rng"]) > ranks.rank:
        set_rng_state(saved["rng"][ranks.rank], setup.device)
    elif ranks.size > 1:  # each rank has its own dropout
        torch.manual_seed(seed + 1000 * ranks.rank + step)


def place_in_data(progress: Progress, global_batches: GlobalBatches) -> None:
    """Sets the position for this run's data and global batch size. If one of them or the order of
    the data has changed, the epoch restarts, with a message."""
    data = global_batches.fingerprint()
    size = global_batches.global_batch_size
    changed = ""
    if progress.data not in ("", data):
        changed = "the training data have"
    elif progress.order not in ("", global_batches.order(progress.epoch)):
        changed = "the seed, or the length of the utterances (speed, padding), has"
    if changed:
        progress.origin = [progress.step, progress.epoch]
    elif progress.global_batch_size != size:
        changed = "the number of utterances in an update has"
    if changed:
        progress.counted = [progress.step, progress.epoch]
    if changed and progress.global_batch:
        epoch = f"epoch {progress.epoch + 1}"
        print(f"{changed} changed since the checkpoint: {epoch} starts from its beginning")
        progress.global_batch = 0
    progress.data = data
    progress.global_batch_size = size


def prepare_folders(args, run: Run, progress: Progress, task: Task) -> None:
    """Moves an earlier run in the folders aside. A resumed run without best weights in its folder,
    and a new run with `Task.evaluates_first`, evaluate before the first update."""
    has_best = False
    if run.keeps_folder:
        in_log_dir = [name for name in task.reports if not os.path.isabs(name)]
        files.remove_stale(args.log_dir, "|".join((*checkpoint.LOGS, *in_log_dir)))
        with errors.writing(args.checkpoint_dir, "--output_dir"):
            if run.resumed and run.resumed.path.resolve().parent == args.checkpoint_dir.resolve():
                has_best = checkpoint.best_step(args.checkpoint_dir) >= progress.best_step
            else:
                checkpoint.make_room(args.checkpoint_dir, args.log_dir, task.reports, task.beside)
            if run.setup.ranks.size > 1:
                from common.parts import machines

                machines.mark(args.checkpoint_dir)
    has_best = run.setup.ranks.gather(has_best)[0]
    if not has_best:
        progress.best = None
        progress.last_evaluation = -1 if run.resumed or task.evaluates_first else 0
