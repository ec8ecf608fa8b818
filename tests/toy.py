"""The shortest use of `common`: a network learns which values of a random sequence are higher than
the one before. `python -m tests.toy --num_epochs 100 --learning_rate 1e-2` runs it; the tests of
`common` replace parts of it."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from common import batches, device, errors, options
from common.loop import Task, begin, finish, train

RECIPE, LOSS_WEIGHTS = "toy", {"first": 0.3, "rising": 0.7}
SHORT = (
    "--device cpu --dataloader_num_workers 0 --no_tensorboard --num_epochs 1 --warmup_steps 2"
    " --log_every 1 --save_every 0"
)


def make_args(folder, *flags: str):
    """The flags of a short run with its results in `folder`. A later flag replaces an earlier
    one."""
    parser = options.Parser(__doc__)
    options.add_arguments(parser)
    parser.add_argument(
        "--dropout", type=options.SHARE, default=0.0, metavar="P", help="in every layer (0.0)"
    )
    args = parser.parse_args(["--output_dir", str(folder), *SHORT.split(), *flags])
    options.resolve(args, is_demo=False, demo_steps=0)
    return args


class Sequences(list):
    """A data set: sequences of 3 to 20 values. Labels: is a value higher than the one before (the
    first: than 0)?"""

    def __init__(self, count: int = 13, seed: int = 0):
        random = np.random.default_rng(seed)
        for number in range(count):
            values = torch.from_numpy(random.normal(size=random.integers(3, 21)))
            labels = (values.diff(prepend=values.new_zeros(1)) > 0).long()
            self.append({"name": f"item {number}", "values": values, "labels": labels})

    def seconds(self, epoch: int) -> np.ndarray:
        return np.array([len(item["values"]) / 10 for item in self])

    def item(self, index: int, epoch: int) -> dict:
        return self[index]

    def fingerprint(self) -> str:
        return f"{len(self)} sequences"


def collate(items: list[dict]) -> dict:
    batch = {
        "names": [item["name"] for item in items],
        "seconds": [len(item["values"]) / 10 for item in items],
    }
    batch["values"], batch["values_lengths"] = batches.pad([item["values"] for item in items])
    batch["labels"], batch["labels_lengths"] = batches.pad([item["labels"] for item in items], -100)
    batch["counts"] = {
        "first": len(items),
        "rising": int(batch["labels_lengths"].sum()) - len(items),
    }
    return batch


class Layer(nn.Sequential):
    def __init__(self, width: int, dropout: float):
        super().__init__(nn.Conv1d(width, width, 3, padding=1), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return x + super().forward(
            x.masked_fill(padding, 0)
        )  # as the convolution sees the ends of a lone sequence


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 8, layers: int = 2):
        super().__init__()
        self.input = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.output = nn.Conv1d(width, 2, 1)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """(B, T) values and (B,) lengths to (B, 2, T) logits."""
        padding = torch.arange(values.shape[1], device=values.device) >= lengths[:, None]
        x = self.input(values[:, None].to(self.input.weight.dtype))
        for layer in self.layers:
            x = layer(x, padding[:, None])
        return self.output(x)


def compute_loss(model: Network, batch: dict) -> dict[str, torch.Tensor]:
    logits, labels = device.upcast(model(batch["values"], batch["values_lengths"])), batch["labels"]
    first = nn.functional.cross_entropy(logits[:, :, 0], labels[:, 0], reduction="sum")
    rising = nn.functional.cross_entropy(logits[:, :, 1:], labels[:, 1:], reduction="sum")
    return {"first": first, "rising": rising}


def evaluate(model: Network, eval_batches) -> dict[str, tuple[float, float]]:
    sums, counts = Counter(), Counter()
    for batch in eval_batches:
        sums.update(
            compute_loss(model, next(batches.to_device([batch], model.output.weight.device)))
        )
        counts.update(batch["counts"])
    return {name: (float(sums[name]), counts[name]) for name in LOSS_WEIGHTS}


def run(
    args, model=None, data=None, setup=None, report_results=None, **changes
) -> tuple[nn.Module, dict]:
    """Trains as a recipe does and returns the model and the progress. `changes` replace parts of
    the task."""
    begun = begin(args, RECIPE)
    begun = replace(begun, setup=setup or begun.setup)
    model, data = model or Network(args.dropout).double(), data or Sequences()
    task = Task(RECIPE, compute_loss, LOSS_WEIGHTS, evaluate, {"recipe": RECIPE}, metric="rising")
    task = replace(task, checkpointed=(Layer,), compiled=(Layer,), **changes)
    global_batches = batches.GlobalBatches(args, data, collate, begun.setup)
    eval_batches = batches.EvalBatches(args, Sequences(5, seed=1), collate, begun.setup)
    progress = train(args, begun, model, task, global_batches, eval_batches)
    if report_results:
        finish(args, begun, model, task, eval_batches, report_results)
    return model, progress


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


if __name__ == "__main__":
    errors.exit_with_one_line(lambda: run(make_args("toy", *sys.argv[1:]), report_results=print))
