"""Parameter groups, AdamW and its states in checkpoints, learning-rate schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

BETAS = (0.9, 0.98)  # Vaswani et al. 2017, section 5.3
EPSILON = 1e-9  # Vaswani et al. 2017, section 5.3
NAMES = {  # of the states in checkpoints, which are torch's, and in bitsandbytes
    "exp_avg": "state1", "exp_avg_scales": "absmax1", "exp_avg_table": "qmap1",
    "exp_avg_sq": "state2", "exp_avg_sq_scales": "absmax2", "exp_avg_sq_table": "qmap2",
}  # fmt: skip
AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamWSettings:
    """A recipe's settings of AdamW. Without `decay_embeddings`, embeddings have no weight decay."""

    betas: tuple[float, float] = BETAS
    decay_embeddings: bool = True


def embedding_weights(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights of all embeddings of a model."""
    return {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, settings: AdamWSettings = AdamWSettings()
) -> list[dict]:
    """Two groups: matrices and filters have weight decay; norms, biases and scalars (at most one
    dimension) have none, nor have embeddings without `settings.decay_embeddings`. Frozen parameters
    are in no group."""
    trained = [p for p in model.parameters() if p.requires_grad]
    spared = {p for p in trained if p.dim() <= 1}
    if not settings.decay_embeddings:
        spared |= embedding_weights(model)
    decayed = [p for p in trained if p not in spared]
    others = [p for p in trained if p in spared]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """The numbers of all and of trained parameters. Tied parameters count once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def make_optimizer(
    groups: list[dict],
    model: torch.nn.Module,
    learning_rate: float,
    kind: str = "adamw",
    settings: AdamWSettings = AdamWSettings(),
) -> torch.optim.Optimizer:
    """AdamW of the parameter `groups` of a model: torch's fused kernel, or with `kind` "adamw_8bit"
    bitsandbytes' 8-bit states. The states are allocated here, so the first update needs no
    additional memory. Raises `RunError` if bitsandbytes does not work."""
    if kind == "adamw_8bit":
        from common.parts import eight_bit

        optimizer = eight_bit.make_optimizer(
            groups, embedding_weights(model), learning_rate, settings.betas
        )
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=learning_rate, betas=settings.betas, eps=EPSILON, fused=True
        )
        for group in groups:
            for p in group["params"]:
                optimizer.state[p] = zero_state(p.detach())
    note_rates(optimizer)
    return optimizer


def note_rates(optimizer: torch.optim.Optimizer) -> None:
    """Keeps the peak rate of each group, which the schedule multiplies."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]


def zero_state(values: torch.Tensor, **placement) -> dict[str, torch.Tensor]:
    """The first state in torch's AdamW of a parameter with these values. `placement`: device and
    memory format, unless they are those of the values."""
    averages = {key: torch.zeros_like(values, **placement) for key in AVERAGES}
    step = torch.zeros((), dtype=torch.float32, device=averages["exp_avg"].device)
    return {"step": step, **averages}


def state_bytes(model: torch.nn.Module, kind: str) -> int:
    """Bytes on the device of the states that `make_states` makes: `kind` "adamw", "adamw_8bit" or
    a level of --use_cpu_offload."""
    trained = {p for p in model.parameters() if p.requires_grad}
    if kind == "adamw":
        return 8 * sum(p.numel() for p in trained)
    if kind == "adamw_8bit":
        from common.parts import eight_bit

        return eight_bit.state_bytes(trained, embedding_weights(model))
    return 0


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[str, dict[str, torch.Tensor]]:
    """The states that this process has by parameter name, independent of order and groups: {name:
    {"step", "exp_avg", "exp_avg_sq"}}. An 8-bit average is uint8, with its scales and its table of
    256 values beside it. The tensors are not copies."""
    saved = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p)
        if state is not None:
            averages = {
                ours: state[key]
                for ours, other in NAMES.items()
                for key in (ours, other)
                if key in state
            }
            saved[name] = {"step": torch.as_tensor(state["step"], dtype=torch.float32), **averages}
    return saved


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    saved: dict,
    rows: Callable[[torch.Tensor], tuple[torch.Tensor, int]] = lambda tensor: (tensor, 0),
) -> None:
    """Copies saved states into an optimizer. `rows(tensor)`: the part that this process has of a
    tensor, and the number of its first row. Learning rate and weight decay stay as the command line
    says. A parameter whose saved state is missing, or has another shape or other bits, starts with
    a fresh state, and the state of a parameter that is now frozen is dropped; the numbers of both
    are printed."""
    own = optimizer_state(optimizer, model)
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    fresh = 0
    frozen = 0
    for name, p in model.named_parameters():
        if p not in trained:
            frozen += name in saved
            continue
        target = own.get(name)  # None: another rank has it
        source = saved.get(name)
        fits = source is not None and source["exp_avg"].shape == p.shape
        if not fits or (target is not None and source.keys() != target.keys()):
            fresh += 1
            continue
        if target is None:
            continue
        for key in target.keys() - {"step"}:
            part, first = rows(target[key])
            values = source[key]
            part.copy_(values[first : first + len(part)] if part.dim() else values)
        step = optimizer.state[p]["step"]
        if torch.is_tensor(step):
            step.copy_(source["step"])
        else:
            optimizer.state[p]["step"] = int(source["step"])
    if fresh:
        print(
            f"optimizer: {fresh} of {len(trained)} parameters start with fresh states: the"
            " checkpoint has none that fit"
        )
    if frozen:
        print(
            f"optimizer: {frozen} parameters with saved states are frozen now: their states are"
            " dropped"
        )


class Schedule:
    """The learning rate as a function of the number of updates: linear warm-up, then `kind`; cosine
    ends at 1 %. A resumed run of another length warms up once more, from the rate that it had: what
    the new length asks for may be a hundred times more, which would undo what was learned."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: str,
        total_steps: int,
        warmup_steps: int | None = None,
    ):
        self.optimizer = optimizer
        self.kind = kind
        self.total = total_steps
        self.given_warmup = warmup_steps
        self.warmup = self.warmup_of(total_steps)
        # A later warm-up: the update after which it begins, its length, the share of the peak rate
        # that it begins with.
        self.again = (0, 0, 0.0)

    def warmup_of(self, steps: int) -> int:
        """The updates of the warm-up before or within so many updates."""
        if self.given_warmup is not None:
            return self.given_warmup
        return min(2000, max(1, steps // 10))

    def factor(self, step: int) -> float:
        """The share of the peak rate for the update that follows `step` updates."""
        begin, length, low = self.again
        if step < begin + length:
            high = self.usual_factor(begin + length)
            return low + (high - low) * (step - begin) / length
        return self.usual_factor(step)

    def usual_factor(self, step: int) -> float:
        """`factor` without a later warm-up."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup) / (step + 1))
        if self.kind == "cosine":
            done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
            return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        return 1.0

    def set(self, step: int) -> None:
        """Sets the rate for the update that follows `step` updates."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.factor(step)

    def state(self) -> dict:
        """The state that `resume` needs."""
        rate = self.optimizer.param_groups[0]["lr"]
        return {"total": self.total, "again": list(self.again), "rate": rate}

    def resume(self, saved: dict | None, step: int) -> bool:
        """Continues the schedule with the `state` that a checkpoint has, after `step` updates.
        Returns whether the run is longer than it was going to be."""
        if not saved:
            return False
        self.again = tuple(saved["again"])
        low = min(1.0, saved["rate"] / self.optimizer.param_groups[0]["initial_lr"])
        jumps = not math.isclose(self.factor(step), low)
        if saved["total"] != self.total and jumps:
            self.again = (step, self.warmup_of(self.total - step), low)
        return self.total > saved["total"]
