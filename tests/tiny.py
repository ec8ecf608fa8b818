"""A tiny Konkani run in memory for the tests of the loop: random waveforms of awkward lengths, a two-layer model in
float64, everything else as the recipe has it."""

import argparse

import numpy as np
import torch

from common import batches, optim, options
from common.device import Setup
from common.loop import train
from recipes import konkani_conformer as recipe

CONFIG = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "attention_heads": 2, "subsampling": 4, "cmvn": "utterance",
    "vocabulary": 7,
}  # fmt: skip


def make_args(folder, *flags: str) -> argparse.Namespace:
    parser = options.Parser("test")
    options.add_shared_arguments(parser)
    recipe.add_arguments(parser)
    base = ["--output_dir", str(folder), "--dataloader_num_workers", "0", "--no_tensorboard", "--device", "cpu",
            "--warmup_steps", "2", "--log_every", "1", "--save_every", "0", "--num_epochs", "1"]  # fmt: skip
    args = parser.parse_args([*base, *flags])
    args.train_manifest = args.val_manifest = "in memory"
    options.resolve(args, demo_steps=10)
    args.subsampling, args.spec_augment, args.speed_perturbation = 4, False, False
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    return args


def make_items(count: int, seed: int = 0, dtype=torch.float64) -> list[dict]:
    """Utterances of 0.3 to 0.8 s with 1 to 4 tokens, none of them infeasible."""
    random = np.random.default_rng(seed)
    items = []
    for number in range(count):
        tokens = random.integers(0, CONFIG["vocabulary"], random.integers(1, 5)).tolist()
        audio = torch.from_numpy(random.normal(0, 0.1, random.integers(4800, 13000))).to(dtype)
        items.append({
            "audio": audio, "tokens": torch.tensor(tokens), "labels": torch.tensor([*tokens, CONFIG["vocabulary"]]),
            "text": "x", "name": f"item {number}",
        })  # fmt: skip
    return items


def make_model(dropout: float = 0.0, dtype=torch.float64, seed: int = 0) -> recipe.Conformer:
    torch.manual_seed(seed)
    return recipe.Conformer(CONFIG, dropout).to(dtype)


def evaluate(model, eval_batches) -> dict:
    """Loss as the error rate: cheap, and it moves."""
    total = count = 0.0
    for batch in eval_batches:
        for moved in batches.to_device([batch], torch.device("cpu")):
            total += float(recipe.compute_loss(model, moved)["attention"])
            count += batch["counts"]["attention"]
    return {"cer": (total, count)}


def run(
    args,
    model=None,
    items=None,
    compute_loss=recipe.compute_loss,
    setup=None,
    resumed=None,
    load=None,
    evaluate=evaluate,
):
    """Trains as the recipe's main does; returns (model, progress)."""
    items = items or make_items(13)
    setup = setup or Setup()
    model = model or make_model()
    load = load or (lambda index, epoch: items[index])
    seconds = np.array([len(item["audio"]) / recipe.SAMPLE_RATE for item in items])
    windows = batches.Windows(args, lambda epoch: seconds, load, recipe.collate, setup)
    evaluation = batches.EvalBatches(args, seconds[:3], lambda index, epoch: items[index], recipe.collate, setup)
    optimizer = optim.make_optimizer(model, args)
    schedule = optim.Schedule(optimizer, args.lr_schedule, windows.total_steps(args), args.warmup_steps)
    metadata = {"recipe": recipe.RECIPE, "config": CONFIG}
    progress = train(
        args, model, optimizer, schedule, windows, evaluation, compute_loss, recipe.LOSS_WEIGHTS, evaluate, setup,
        metadata, resumed, data="tiny",
    )  # fmt: skip
    return model, progress


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def window_gradient(model, items, sizes, setup=None, scaler=None) -> torch.Tensor:
    """The gradient of one window cut into micro-batches of these sizes."""
    from common.loop import run_window

    model.zero_grad()
    micro, start = [], 0
    for size in sizes:
        micro.append(recipe.collate(items[start : start + size]))
        start += size
    totals = {name: sum(batch["counts"][name] for batch in micro) for name in recipe.LOSS_WEIGHTS}
    outcome = run_window(model, micro, totals, recipe.compute_loss, recipe.LOSS_WEIGHTS, setup or Setup(), scaler)
    assert outcome.failed is None
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([g.reshape(-1) for g in gradients])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
