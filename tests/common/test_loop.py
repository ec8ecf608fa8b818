"""The loop's contract: exact accumulation, out of memory survived, bad windows kept out, fp16's scaler, signals."""

import json
import os
import random
import re
import signal
import sys
import threading
import time
import types

import pytest
import torch

from common import checkpoint, files, gpu, memory, report
from common.device import Setup
from common.errors import RunError, Stopped
from common.loop import cut_to_fit, length_bucket
from recipes import konkani_conformer as recipe
from tests import tiny

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_gradient_does_not_depend_on_how_a_window_is_cut(dtype, tolerance):
    model, items = tiny.make_model(dtype=dtype), tiny.make_items(8, dtype=dtype)
    whole = tiny.window_gradient(model, items, [8])
    assert whole.norm() > 0
    for sizes in ([4, 4], [2, 2, 2, 2], [1] * 8, [5, 3], [1, 7]):
        assert tiny.relative(tiny.window_gradient(model, items, sizes), whole) < tolerance


def test_gradient_is_the_mean_over_targets_and_not_over_micro_batches():
    model, items = tiny.make_model(), tiny.make_items(5)
    counts = {"ctc": 0, "attention": 0}
    sums = {"ctc": 0.0, "attention": 0.0}
    for item in items:  # one by one, nothing padded, added up by hand
        batch = recipe.collate([item])
        moved = next(recipe.batches.to_device([batch], torch.device("cpu")))
        for name, value in recipe.compute_loss(model, moved).items():
            sums[name] = sums[name] + value
            counts[name] += batch["counts"][name]
    loss = sum(recipe.LOSS_WEIGHTS[name] * sums[name] / counts[name] for name in sums)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert tiny.relative(tiny.window_gradient(model, items, [3, 2]), expected) < 1e-10


@pytest.mark.parametrize("flags", [("8", "1"), ("4", "2"), ("1", "8")])
def test_training_ends_with_the_same_weights_however_windows_are_cut(tmp_path, flags):
    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", "--batch_size", "2", "--gradient_accumulation_steps", "4"))
    args = tiny.make_args(tmp_path / "b", "--batch_size", flags[0], "--gradient_accumulation_steps", flags[1])
    model, progress = tiny.run(args)
    assert progress["step"] == 2 and progress["utterances"] == 13  # 8 and the partial window of 5
    assert tiny.relative(tiny.weights(model), tiny.weights(reference)) < 1e-10


def test_padded_cost_cap_changes_nothing_but_the_cut(tmp_path):
    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", "--batch_size", "8", "--gradient_accumulation_steps", "1"))
    args = tiny.make_args(
        tmp_path / "b", "--batch_size", "8", "--gradient_accumulation_steps", "1", "--max_batch_seconds", "2"
    )
    model, _ = tiny.run(args)
    assert tiny.relative(tiny.weights(model), tiny.weights(reference)) < 1e-10


# --- out of memory ---------------------------------------------------------------------------------------------------


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


def failing_loss(chance: float, seed: int, largest: int = 10**9):
    """compute_loss that runs out of memory at random, in forward or backward, and always above `largest` utterances."""
    dice = random.Random(seed)

    def compute_loss(model, batch):
        terms = recipe.compute_loss(model, batch)
        size = len(batch["names"])
        if size > largest or (size > 1 and dice.random() < chance):
            error = dice.choice(OUT_OF_MEMORY)
            if dice.random() < 0.5:
                raise error
            terms["ctc"] = FailingBackward.apply(terms["ctc"], error)
        return terms

    return compute_loss


@pytest.mark.parametrize("seed", range(4))
def test_out_of_memory_at_random_moments_changes_no_weight_and_drops_nothing(tmp_path, seed):
    flags = ("--batch_size", "4", "--gradient_accumulation_steps", "2", "--num_epochs", "4")
    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", *flags))
    model, progress = tiny.run(tiny.make_args(tmp_path / "b", *flags), compute_loss=failing_loss(0.3, seed))
    assert progress["limits"], "nothing was injected"
    assert progress["utterances"] == 4 * 13 and progress["step"] == 8
    assert tiny.relative(tiny.weights(model), tiny.weights(reference)) < 1e-10


def test_what_fits_is_learned_saved_and_used_after_resume(tmp_path):
    flags = ("--batch_size", "8", "--gradient_accumulation_steps", "1")
    sizes = []

    def watched(model, batch):
        sizes.append(len(batch["names"]))
        return failing_loss(0, 0, largest=2)(model, batch)

    args = tiny.make_args(tmp_path, *flags)
    _, progress = tiny.run(args, compute_loss=watched)
    assert min(progress["limits"].values()) == 2
    resumed = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)
    assert resumed["progress"]["limits"] == progress["limits"]
    sizes.clear()
    tiny.run(tiny.make_args(tmp_path, *flags, "--num_epochs", "2"), resumed=resumed, compute_loss=watched)
    assert sizes and max(s for s in sizes[:-10] or sizes) <= 8
    assert sum(size > 2 for size in sizes) <= 2  # shorter buckets may still have to learn it


def test_an_utterance_that_never_fits_is_named_with_its_length(tmp_path):
    items = tiny.make_items(9)
    longest = max(range(9), key=lambda i: len(items[i]["audio"]))

    def compute_loss(model, batch):
        if f"item {longest}" in batch["names"]:
            raise OUT_OF_MEMORY[0]
        return recipe.compute_loss(model, batch)

    args = tiny.make_args(tmp_path)
    with pytest.raises(
        RunError, match=rf"item {longest} \(0\.\d s\) does not fit.*--gradient_checkpointing.*--max_duration"
    ):
        tiny.run(args, items=items, compute_loss=compute_loss)
    # It came first, and what was reached is saved.
    assert checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)["progress"]["step"] == 0


def test_dropout_draws_the_same_again_when_a_window_is_repeated(tmp_path):
    """With dropout the repeated window starts from the same generator: the same micro-batches give the same update."""
    calls = []

    def once(model, batch):
        calls.append(1)
        terms = recipe.compute_loss(model, batch)
        if len(calls) == 3:
            raise OUT_OF_MEMORY[1]
        return terms

    flags = ("--batch_size", "1", "--gradient_accumulation_steps", "8")
    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", *flags), model=tiny.make_model(0.3))
    model, _ = tiny.run(tiny.make_args(tmp_path / "b", *flags), model=tiny.make_model(0.3), compute_loss=once)
    assert torch.equal(tiny.weights(model), tiny.weights(reference))


def test_other_errors_pass_through(tmp_path):
    def broken(model, batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        tiny.run(tiny.make_args(tmp_path), compute_loss=broken)


def test_cut_to_fit_uses_what_shorter_utterances_have_taught():
    batch = recipe.collate(sorted(tiny.make_items(8), key=lambda item: -len(item["audio"])))
    bucket = length_bucket(batch)
    assert [len(b["names"]) for b in cut_to_fit([batch], {bucket - 3: 3})] == [3, 3, 2]
    assert cut_to_fit([batch], {bucket + 1: 1}) == [batch]


def test_evaluation_survives_out_of_memory_and_names_what_never_fits():
    batch = recipe.collate(tiny.make_items(6))
    seen = []

    def decode(piece):
        if len(piece["names"]) > 2:
            raise OUT_OF_MEMORY[2]
        seen.extend(piece["names"])
        return len(piece["names"])

    assert sum(memory.split_on_oom(decode, batch, torch.device("cpu"))) == 6
    assert seen == batch["names"]

    def never(piece):
        raise OUT_OF_MEMORY[0]

    with pytest.raises(RunError, match="item 0 does not fit"):
        memory.split_on_oom(never, batch, torch.device("cpu"))


# --- non-finite losses and fp16 --------------------------------------------------------------------------------------


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


@pytest.mark.parametrize("where", ["audio", "loss", "gradient"])
def test_a_bad_window_never_reaches_the_weights_and_is_listed(tmp_path, where):
    items = tiny.make_items(12)
    flags = ("--batch_size", "2", "--gradient_accumulation_steps", "2")

    def poisoned(model, batch):
        terms = recipe.compute_loss(model, batch)
        if "item 5" in batch["names"]:
            if where == "loss":
                terms["ctc"] = terms["ctc"] * float("nan")
            elif where == "gradient":
                terms["ctc"] = InfiniteGradient.apply(terms["ctc"])
        return terms

    if where == "audio":
        items[5]["audio"] = items[5]["audio"] * float("nan")
    args = tiny.make_args(tmp_path, *flags)
    model, progress = tiny.run(args, items=items, compute_loss=poisoned)
    assert progress["bad_windows"] == 1 and progress["step"] == 2  # of three windows
    assert torch.isfinite(tiny.weights(model)).all()
    lines = [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]
    (listed,) = [line["files"] for line in lines if line.get("event") == "bad_window"]
    assert "item 5" in listed and len(listed) == 4


def test_bad_windows_in_a_row_stop_the_run_and_leave_the_last_checkpoint(tmp_path):
    steps = []

    def later_nan(model, batch):
        terms = recipe.compute_loss(model, batch)
        steps.append(1)
        return {name: value * float("nan") for name, value in terms.items()} if len(steps) > 4 else terms

    args = tiny.make_args(
        tmp_path,
        "--batch_size",
        "2",
        "--gradient_accumulation_steps",
        "1",
        "--save_every",
        "2",
        "--max_bad_windows",
        "3",
    )
    with pytest.raises(RunError, match="3 windows in a row"):
        tiny.run(args, compute_loss=later_nan)
    assert checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)["progress"]["step"] == 4


def test_fp16_overflow_is_skipped_and_the_scale_recovers(tmp_path):
    """fp16 autocast and the GradScaler on the CPU: an infinite gradient halves the scale, and the schedule and the
    step count move only when the optimizer did."""
    calls = []

    def overflowing(model, batch):
        terms = recipe.compute_loss(model, batch)
        calls.append(1)
        if len(calls) in (2, 3):
            terms["ctc"] = InfiniteGradient.apply(terms["ctc"])
        return terms

    args = tiny.make_args(tmp_path, "--batch_size", "2", "--gradient_accumulation_steps", "1")
    model, progress = tiny.run(
        args, model=tiny.make_model(dtype=torch.float32), items=tiny.make_items(12, dtype=torch.float32),
        compute_loss=overflowing, setup=Setup(dtype=torch.float16),
    )  # fmt: skip
    assert torch.isfinite(tiny.weights(model)).all() and progress["bad_windows"] == 0
    saved = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)
    skipped = 6 - progress["step"]  # of six windows; fp16 itself may overflow once more at the initial scale
    assert 2 <= skipped <= 4
    assert saved["scaler"]["scale"] == 65536 / 2**skipped


def test_a_scale_below_one_stops_the_run(tmp_path):
    def overflowing(model, batch):
        return {name: InfiniteGradient.apply(value) for name, value in recipe.compute_loss(model, batch).items()}

    args = tiny.make_args(tmp_path, "--batch_size", "1", "--gradient_accumulation_steps", "1", "--num_epochs", "3")
    with pytest.raises(RunError, match="loss scale fell below 1"):
        tiny.run(
            args, model=tiny.make_model(dtype=torch.float32), items=tiny.make_items(12, dtype=torch.float32),
            compute_loss=overflowing, setup=Setup(dtype=torch.float16),
        )  # fmt: skip


def test_fp16_scaling_gives_the_fp32_gradient(tmp_path):
    model, items = tiny.make_model(dtype=torch.float32), tiny.make_items(4, dtype=torch.float32)
    plain = tiny.window_gradient(model, items, [2, 2])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = tiny.window_gradient(model, items, [2, 2], scaler=scaler) / 1024
    assert tiny.relative(scaled, plain) < 1e-5


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["window", "evaluation"])
def test_a_signal_discards_the_window_saves_and_resumes_to_the_same_weights(tmp_path, number, status, moment):
    flags = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--num_epochs", "2", "--eval_every", "2")
    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", *flags), model=tiny.make_model(0.2))
    calls = []

    def interrupted_loss(model, batch):
        calls.append(1)
        if moment == "window" and len(calls) == 6:  # in the middle of the third window
            os.kill(os.getpid(), number)
        return recipe.compute_loss(model, batch)

    def interrupted_evaluate(model, batches):
        os.kill(os.getpid(), number)
        return tiny.evaluate(model, batches)

    args = tiny.make_args(tmp_path / "b", *flags)
    evaluate = interrupted_evaluate if moment == "evaluation" else tiny.evaluate
    with pytest.raises(Stopped) as stopped:
        tiny.run(args, model=tiny.make_model(0.2), compute_loss=interrupted_loss, evaluate=evaluate)
    assert stopped.value.status == status
    saved = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)
    assert saved["progress"]["step"] in ((2, 3) if moment == "window" else (2,))  # the partial window is shorter
    assert saved["progress"]["last_evaluation"] == (2 if moment == "window" else 0)
    model, _ = tiny.run(args, model=tiny.make_model(0.2, seed=9), resumed=saved)
    assert torch.equal(tiny.weights(model), tiny.weights(reference))


def test_evaluation_leaves_generators_and_mode_alone(tmp_path):
    flags = ("--batch_size", "2", "--gradient_accumulation_steps", "2")

    def noisy_evaluate(model, batches):
        assert not model.training and not torch.is_grad_enabled()
        torch.rand(100), random.random()
        return tiny.evaluate(model, batches)

    reference, _ = tiny.run(tiny.make_args(tmp_path / "a", *flags), model=tiny.make_model(0.2))
    args = tiny.make_args(tmp_path / "b", *flags, "--eval_every", "1")
    model, _ = tiny.run(args, model=tiny.make_model(0.2), evaluate=noisy_evaluate)
    assert torch.equal(tiny.weights(model), tiny.weights(reference))


def test_early_stopping_counts_evaluations_without_a_better_result(tmp_path):
    results = iter([5.0, 4.0, 4.5, 4.2, 3.0, 2.0])
    args = tiny.make_args(
        tmp_path,
        "--batch_size",
        "1",
        "--gradient_accumulation_steps",
        "1",
        "--eval_every",
        "2",
        "--early_stopping_patience",
        "2",
    )
    _, progress = tiny.run(args, evaluate=lambda model, batches: {"cer": (next(results), 1.0)})
    assert progress["step"] == 8 and progress["best"] == 4.0 and progress["best_step"] == 4


def test_a_signal_during_a_save_lets_it_finish(tmp_path, monkeypatch):
    flags = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--save_every", "2")
    write = files.write_atomically

    def interrupted(path, save):
        if path.suffix == ".pt":
            os.kill(os.getpid(), signal.SIGTERM)
        write(path, save)

    args = tiny.make_args(tmp_path, *flags)
    monkeypatch.setattr(checkpoint, "write_atomically", interrupted)
    with pytest.raises(Stopped):
        tiny.run(args)
    monkeypatch.undo()
    saved = checkpoint.resume("auto", args.checkpoint_dir, recipe.RECIPE)
    assert saved["progress"]["step"] == 2 and not list(args.checkpoint_dir.glob("*.tmp"))


def test_other_processes_on_the_gpu_are_named_and_left_alone(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        f"#!/bin/sh\necho '75955, /usr/bin/python3, 14510'\necho '{os.getpid()}, python, 900'\necho '12, game, [N/A]'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu.gpu_processes() == "python3 (pid 75955) 14.2 GiB, game (pid 12) an unknown amount"
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu.gpu_processes() == ""


# --- how busy the GPU is ---------------------------------------------------------------------------------------------

UUID = "5a1c7e9e-0000-1111-2222-333344445555"
CUDA = torch.device("cuda", 0)


class FakeNvml(types.ModuleType):
    """Two GPUs, of which CUDA sees the second; utilisation rises by a hundredth with every question."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_after: int = 10**9, unsupported: bool = False, initialises: bool = True):
        super().__init__("pynvml")
        self.fails_after, self.unsupported, self.initialises = fails_after, unsupported, initialises
        self.asked, self.started, self.threads = 0, 0, set()

    def nvmlInit(self):
        if not self.initialises:
            raise self.NVMLError("Driver Not Loaded")
        self.started += 1

    def nvmlShutdown(self):
        self.started -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("Not Found")
        return "second"

    def nvmlDeviceGetUtilizationRates(self, handle):
        assert handle == "second"
        if self.unsupported or self.asked >= self.fails_after:
            raise self.NVMLError("Not Supported")
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        return types.SimpleNamespace(gpu=self.asked % 100, memory=0)


@pytest.fixture
def nvml(monkeypatch):
    """nvml(...): puts a fake library there, and a GPU that CUDA knows by its UUID."""

    def use(**options) -> FakeNvml:
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=UUID))
        return fake

    return use


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def sampling() -> list:
    return [thread for thread in threading.enumerate() if thread.name == "gpu utilisation"]


def test_utilisation_is_the_mean_of_what_nvml_says_of_the_gpu_in_use(nvml):
    fake = nvml()
    busy = gpu.GpuUtilisation(CUDA, seconds=0.005)
    assert busy.problem == "" and busy.mean() is None
    wait_for(lambda: busy.count >= 5)
    assert busy.mean() > 0.01
    with busy.rest():
        time.sleep(0.05)
        before = busy.count
        time.sleep(0.05)
        assert busy.count == before
    before = busy.mean()
    busy.seconds = 60
    time.sleep(0.05)
    busy.reset()
    assert busy.mean() >= before  # nothing since: what it was
    busy.close()
    busy.close()
    assert not sampling() and fake.started == 0 and fake.threads == {"gpu utilisation", "MainThread"}


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"initialises": False}, "NVML does not start: Driver Not Loaded"),
        ({"unsupported": True}, "NVML has no figures for this GPU: Not Supported"),
    ],
)
def test_utilisation_that_cannot_be_read_is_left_out(nvml, options, problem):
    fake = nvml(**options)
    busy = gpu.GpuUtilisation(CUDA)
    assert busy.problem == problem and busy.mean() is None and not sampling() and fake.started == 0
    busy.reset()
    busy.close()


def test_utilisation_without_the_library_another_gpu_or_a_cpu(nvml, monkeypatch):
    nvml()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="another"))
    assert gpu.GpuUtilisation(CUDA).problem == "NVML has no figures for this GPU: Not Found"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace())
    assert "NVML has no figures" in gpu.GpuUtilisation(CUDA).problem
    assert gpu.GpuUtilisation(torch.device("cpu")).problem == "no NVIDIA GPU"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.GpuUtilisation(CUDA).problem == "the package nvidia-ml-py is not installed"
    assert not sampling()


def test_a_gpu_that_stops_answering_ends_the_samples_and_nothing_else(nvml):
    nvml(fails_after=4)
    busy = gpu.GpuUtilisation(CUDA, seconds=0.005)
    wait_for(lambda: busy.problem)
    assert busy.problem == "NVML has no more figures for this GPU: Not Supported"
    busy.reset()
    assert busy.mean() is None
    busy.close()
    assert not sampling()


def test_forked_workers_have_no_thread_and_end(nvml, no_hang):
    nvml()
    busy = gpu.GpuUtilisation(CUDA, seconds=0.001)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(len(sampling()) + (0 if busy.problem == "" else 2))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(sampling()) == 1
    busy.close()


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_utilisation_in_the_reports_of_a_run(tmp_path, nvml, monkeypatch, capsys, ends):
    """The run is on the CPU; it believes that its utilisation can be read."""
    nvml()
    real = gpu.GpuUtilisation
    monkeypatch.setattr(gpu, "GpuUtilisation", lambda device: real(CUDA, seconds=0.002))

    def compute_loss(model, batch):
        time.sleep(0.02)
        if ends == "with an error" and "item 5" in batch["names"]:
            raise ValueError("a defect")
        return recipe.compute_loss(model, batch)

    args = tiny.make_args(tmp_path, "--batch_size", "1", "--gradient_accumulation_steps", "1", "--dataloader_num_workers", "1")  # fmt: skip
    try:
        tiny.run(args, compute_loss=compute_loss)
        assert ends == "well"
    except ValueError:
        assert ends == "with an error"
    assert not sampling()
    lines = [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]
    values = [line["train/gpu_utilisation"] for line in lines if "train/gpu_utilisation" in line]
    assert ends == "with an error" or (len(values) >= 10 and all(0 < value <= 1 for value in values))
    if ends == "well":
        assert re.search(r"waiting \d+%  GPU \d+%  ", capsys.readouterr().err)


def test_the_bar_shows_utilisation_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = []
    for busy in (0.97, None):
        made = report.Report(tmp_path, 0, 10, tensorboard=False)
        made.progress(1, 2.0, 1e-3, 5.0, 2**30, 0.02, busy)
        shown.append(made.bar.desc)
        made.close()
    assert shown[0].endswith("wait 2% GPU 97%") and shown[1].endswith("wait 2%")


def test_resuming_into_another_folder_leaves_best_weights_there_and_another_run_alone(tmp_path):
    old = tiny.make_args(tmp_path / "old")
    tiny.run(old)
    (newest,) = checkpoint.list_checkpoints(old.checkpoint_dir)
    other = tiny.make_args(tmp_path / "new", "--batch_size", "1")
    tiny.run(other)  # another run, in the folder that the resumed one goes to
    stands = {p.name for p in other.checkpoint_dir.glob("checkpoint_*")}
    for epochs in ("1", "2"):  # already finished, and going on with no better result than before
        args = tiny.make_args(tmp_path / "new", "--resume", str(newest), "--num_epochs", epochs)
        resumed = checkpoint.resume(args.resume, args.checkpoint_dir, recipe.RECIPE)
        _, progress = tiny.run(args, resumed=resumed, evaluate=lambda model, batches: {"cer": (1e9, 1.0)})
        assert progress["best"] == 1e9 and (args.checkpoint_dir / "best.safetensors").exists()
    assert {p.name for p in (other.checkpoint_dir / "earlier-1").glob("checkpoint_*")} == stands
