"""Optimizer, parameter groups and learning-rate schedules."""

import math

import torch


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices and filters with weight decay; norms, biases and scalars (one dimension or none) without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: torch.nn.Module, args, betas: tuple[float, float] = (0.9, 0.98)) -> torch.optim.Optimizer:
    """AdamW with its fused kernel. Its states are made here, before the first window: they cannot be what runs out of
    memory later."""
    groups = parameter_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=1e-9, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    make_states(optimizer)
    return optimizer


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the optimizer's states by one step with zero gradients and zero rate, which changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])


def optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict:
    """States by parameter name, so that they survive another order or grouping of the parameters."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: dict) -> None:
    """Copies saved states into the optimizer's. Rates and decay stay as the command line has them; a parameter that
    was not trained before keeps its fresh state."""
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state and name in saved:
            for key, value in optimizer.state[parameter].items():
                value.copy_(saved[name][key])


class Schedule:
    """Learning rate as a function of the number of updates made: linear warm-up, then `kind`. Only `plateau` has a
    state: it halves after `PATIENCE` evaluations without a better result."""

    PATIENCE = 2
    FLOOR = 0.01  # of the peak: where cosine ends

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, total_steps: int, warmup_steps: int | None = None):
        self.optimizer, self.kind, self.total = optimizer, kind, total_steps
        self.warmup = min(2000, max(1, total_steps // 10)) if warmup_steps is None else warmup_steps
        self.plateau_factor, self.evaluations_without_gain = 1.0, 0
        self.set(0)

    def factor(self, step: int) -> float:
        """Share of the peak rate for the update that follows `step` updates."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup) / (step + 1))
        if self.kind == "cosine":
            done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
            return self.FLOOR + (1 - self.FLOOR) * 0.5 * (1 + math.cos(math.pi * done))
        return self.plateau_factor

    def set(self, step: int) -> float:
        """Sets the rate for the next update; called only after an update that was made."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.factor(step)
        return self.optimizer.param_groups[0]["lr"]

    def observe(self, improved: bool) -> None:
        """Tells `plateau` how an evaluation went."""
        self.evaluations_without_gain = 0 if improved else self.evaluations_without_gain + 1
        if self.kind == "plateau" and self.evaluations_without_gain >= self.PATIENCE:
            self.plateau_factor, self.evaluations_without_gain = self.plateau_factor / 2, 0

    def state(self) -> dict:
        return {"plateau_factor": self.plateau_factor, "evaluations_without_gain": self.evaluations_without_gain}

    def load(self, state: dict) -> None:
        self.plateau_factor = state["plateau_factor"]
        self.evaluations_without_gain = state["evaluations_without_gain"]
