"""A small task for the tests of `common`: the network and the batches of recipes/template.py, on
short waveforms in memory. Each character is a tone. A second term of the loss is added, so that the
tests have two."""

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from common import checkpoint, checks, loop, optim, options
from common.batches import EvalBatches, to_device
from common.engine import Engine
from common.loop import Task, begin, finish, train
from common.parts import offload
from common.parts.new_rows import NewRows, speed_up
from common.parts.replay import make_batches
from common.progress import Progress
from recipes import template
from recipes.template import SAMPLE_RATE, Layer
from speech.data import replay, watching

__all__ = ["Layer", "Network", "Waveforms", "collate", "compute_loss", "evaluate", "run"]
RECIPE = "small"
LOSS_WEIGHTS = {"first": 0.3, "ctc": 0.7}
CHARACTERS = list("abcd")
SHORT = (
    "--device cpu --dataloader_num_workers 0 --num_epochs 1 --warmup_steps 2"
    " --log_every 1 --save_every 0 --eval_every 0"
)


@dataclass(frozen=True)
class ModelInfo:
    name: str = "small"


@dataclass(frozen=True)
class RunInfo:
    words: tuple[str, ...] = ()


def make_args(folder, *flags: str):
    """The flags of a short run with its results in `folder`. A later flag replaces an earlier
    one."""
    parser = options.Parser(__doc__)
    options.add_arguments(parser)
    replay.add_arguments(parser)
    watching.add_arguments(parser)
    parser.add_argument("--dropout", type=options.SHARE, default=0.0)
    args = parser.parse_args(["--output_dir", str(folder), *SHORT.split(), *flags])
    args.rules.needs.clear()  # the sets are in memory, so that no manifest is named
    options.resolve(args, is_demo=False, demo_steps=0)
    return args


class Waveforms(list):
    """A data set: waveforms of 0.3 to 2 s, in which each character sounds for 0.2 s."""

    def __init__(self, count: int = 13, seed: int = 0):
        random = np.random.default_rng(seed)
        time = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
        for number in range(count):
            length = random.integers(3, 21) * SAMPLE_RATE // 10
            tokens = random.integers(0, len(CHARACTERS), length // len(time))
            tones = [np.sin(2 * np.pi * 400 * (1 + token) * time) for token in tokens]
            audio = random.normal(size=length)
            audio[: len(tones) * len(time)] += 5 * np.concatenate(tones)
            self.append(
                {
                    "name": f"item {number}",
                    "index": number,
                    "audio": torch.from_numpy(audio.astype(np.float32)),
                    "tokens": torch.from_numpy(tokens),
                    "targets": len(tokens),
                    "text": "".join(CHARACTERS[token] for token in tokens),
                }
            )

    def seconds(self, epoch: int) -> np.ndarray:
        return np.array([len(item["audio"]) / SAMPLE_RATE for item in self])

    def item(self, index: int, epoch: int) -> dict:
        return self[index]

    def fingerprint(self) -> str:
        return f"{len(self)} waveforms"


class Network(template.Network):
    def __init__(self, dropout: float = 0.0, width: int = 8, layers: int = 2):
        super().__init__(template.ModelInfo(width, layers, CHARACTERS), dropout)


def collate(items: list[dict]) -> dict:
    batch = template.collate(items)
    batch["counts"]["first"] = len(items)
    return batch


def compute_loss(model: Network, batch: dict) -> dict[str, torch.Tensor]:
    """The template's loss, and the cross-entropy of the first frame and the first character."""
    if "audio_lengths_host" not in batch:
        batch = next(to_device([batch], torch.device("cpu")))
    outputs = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with handle:
        terms = template.compute_loss(model, batch)
    first = nn.functional.nll_loss(outputs[0][:, 0], batch["tokens"][:, 0], reduction="sum")
    return {"first": first, **terms}


def evaluate(model: Network, eval_batches) -> dict[str, tuple[float, float]]:
    sums, counts = Counter(), Counter()
    for batch in eval_batches:
        sums.update(compute_loss(model, batch))
        counts.update(batch["counts"])
    return {name: (float(sums[name]), counts[name]) for name in LOSS_WEIGHTS}


def task(**changes) -> Task:
    made = Task(
        RECIPE,
        compute_loss,
        LOSS_WEIGHTS,
        evaluate,
        ModelInfo(),
        RunInfo(),
        metric="ctc",
        higher_is_better=False,
        fit=None,
    )
    return replace(made, checkpointed=(Layer,), compiled=(Layer,), **changes)


def run(
    args,
    model=None,
    data=None,
    setup=None,
    report_results=None,
    trial=False,
    old=None,
    watched=(),
    **changes,
) -> tuple[nn.Module, Progress]:
    """Trains as a recipe does and returns the model and the progress. `changes` replace parts of
    the task; the data set `old` is replayed, those in `watched` are watched. Without `trial`,
    neither `evaluate` nor the loss is tried before the first update."""
    begun = begin(args, RECIPE)
    begun = replace(begun, setup=setup or begun.setup)
    if model is None:
        with begun.model_device():
            model = Network(args.dropout).double()
    data = data or Waveforms()
    global_batches = make_batches(args, data, collate, begun.setup, old)
    eval_batches = EvalBatches(args, Waveforms(5, seed=1), collate, begun.setup)
    sets = {
        watching.WATCHED + name: EvalBatches(args, each, collate, begun.setup)
        for name, each in dict(watched).items()
    }
    made = task(further=watching.watched(sets, args.stop_when_watched_rises), **changes)
    with contextlib.ExitStack() as patched:
        for where, name in () if trial else ((loop, "try_evaluation"), (checks, "try_loss")):
            patched.enter_context(mock.patch.object(where, name, lambda *_: None))
        progress = train(args, begun, model, made, global_batches, eval_batches)
    if report_results:
        finish(args, begun, model, made, report_results)
    return model, progress


def newest(folder: Path) -> checkpoint.Saved:
    """The last checkpoint of the run in a folder."""
    return checkpoint.resume("auto", folder / "checkpoints", RECIPE)


def metrics(args) -> list[dict]:
    return [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]


def assert_close(a: checkpoint.Saved, b: checkpoint.Saved, tolerance: float = 1e-12) -> None:
    """That two checkpoints have the same position, weights and states, but for the order of
    sums."""
    assert a.progress.step == b.progress.step
    states, others = a.state["optimizer"], b.state["optimizer"]
    assert list(states) == list(others)
    pairs = [(a.model, b.model), *((states[name], others[name]) for name in states)]
    for one, other in pairs:
        assert list(one) == list(other)
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


def optimizer_of(
    model: nn.Module,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.01,
    kind: str = "adamw",
    on_host: offload.Offload | None = None,
    settings: optim.AdamWSettings | None = None,
    rows: NewRows | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of an engine, without a run. `on_host`: of a level of --use_cpu_offload."""
    settings = settings or optim.AdamWSettings()
    groups = optim.parameter_groups(model, weight_decay, settings)
    engine = object.__new__(offload.Offloaded if on_host else Engine)
    engine.model = model
    if on_host:
        engine.optimizer = offload.make_optimizer(groups, model, learning_rate, on_host, settings)
    else:
        engine.optimizer = optim.make_optimizer(groups, model, learning_rate, kind, settings)
    if rows:
        speed_up(engine, rows)
    return engine.optimizer


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
