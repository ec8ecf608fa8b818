"""Parameter groups, optimizers, learning-rate schedules, and optimizer states that other optimizers
can load."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common import lora
from common.errors import RunError, UsageError, first_line, require
from common.offload import LEVELS, Offload, OffloadedAdamW
from common.ranks import Ranks
from common.sharding import own_rows

BETAS = (0.9, 0.98)  # Vaswani et al. 2017, section 5.3
EPSILON = 1e-9  # Vaswani et al. 2017, section 5.3
# In 8 bits, second moments below 1.6e-7 of the largest in their block become zero, and epsilon
# alone divides the first moment. The largest step is then 341 learning rates at 1e-9, and 1.05 at
# 1e-6: test_largest_step.
EPSILON_8BIT = 1e-6
SMALLEST_8BIT = 4096  # values: bitsandbytes keeps smaller tensors' states in 32 bits
BLOCK = 256  # values that share a scale in bitsandbytes' 8-bit states
NAMES = {  # of the states in checkpoints, which are torch's, and in bitsandbytes
    "exp_avg": "state1", "exp_avg_scales": "absmax1", "exp_avg_table": "qmap1",
    "exp_avg_sq": "state2", "exp_avg_sq_scales": "absmax2", "exp_avg_sq_table": "qmap2",
}  # fmt: skip
AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class NewRows:
    """Rows of weights that were drawn at random in a model whose other weights are trained, such as
    the embeddings of new tokens: {parameter name: row numbers}. They have a peak learning rate of
    their own, on the schedule of all. It is at least that of the other weights."""

    rows: dict[str, Sequence[int]]
    learning_rate: float


@dataclass(frozen=True)
class Frozen:
    """A part of a model that the first `steps` updates leave as it is: the parameters whose names
    begin with `prefix`. None: as many updates as the warm-up has."""

    prefix: str
    steps: int | None = None


def _embedding_weights(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    return {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, decay_embeddings: bool = True
) -> list[dict]:
    """Two groups: matrices and filters have weight decay; norms, biases and scalars (at most one
    dimension) have none, nor have embeddings without `decay_embeddings`. Frozen parameters are in
    neither. Raises `UsageError` if all are."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(
            f"every parameter of {type(model).__name__} is frozen: there is nothing to train"
        )
    spared = {p for p in trained if p.dim() <= 1}
    if not decay_embeddings:
        spared |= _embedding_weights(model)
    decayed = {"params": [p for p in trained if p not in spared], "weight_decay": weight_decay}
    others = {"params": [p for p in trained if p in spared], "weight_decay": 0.0}
    return [group for group in (decayed, others) if group["params"]]


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """The numbers of all and of trained parameters. Tied parameters count once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def make_optimizer(
    model: torch.nn.Module,
    learning_rate: float,
    weight_decay: float = 0.01,
    kind: str = "adamw",
    offload: Offload | None = None,
    decay_embeddings: bool = True,
    betas: tuple = BETAS,
    new_rows: NewRows | None = None,
) -> torch.optim.Optimizer:
    """AdamW: torch's fused kernel, bitsandbytes' 8-bit states (`kind` "adamw_8bit"), or the update
    on the host (`offload`), which several ranks divide. The states are allocated here, so the first
    update needs no additional memory. `new_rows` learn at a rate of their own. Raises `UsageError`
    if all parameters are frozen, `RunError` if bitsandbytes does not work."""
    groups = parameter_groups(model, weight_decay, decay_embeddings)
    groups = slow_down_whole(groups, lora.weights_of(model), learning_rate)
    settings = {"lr": learning_rate, "betas": betas}
    if offload:
        optimizer = OffloadedAdamW(groups, offload, **settings, eps=EPSILON)
    elif kind == "adamw_8bit":
        library = load_bitsandbytes(groups[0]["params"][0].device)
        optimizer = library.optim.AdamW8bit(groups, **settings, eps=EPSILON_8BIT)
    else:
        optimizer = torch.optim.AdamW(groups, **settings, eps=EPSILON, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    make_states(optimizer, model)
    if new_rows is not None:
        speed_up(optimizer, model, new_rows)
    if offload and offload.ranks.size > 1:
        optimizer.register_step_post_hook(OffloadedAdamW.share)
    return optimizer


def slow_down_whole(groups: list[dict], adapters: set, learning_rate: float) -> list[dict]:
    """Groups in which what is trained whole beside `adapters` has the rate of full fine-tuning."""
    if not adapters:
        return groups
    parts = []
    for group in groups:
        beside = [p for p in group["params"] if p in adapters]
        whole = [p for p in group["params"] if p not in adapters]
        parts.append({**group, "params": beside})
        parts.append({**group, "params": whole, "lr": learning_rate / lora.RATE})
    return [part for part in parts if part["params"]]


def speed_up(optimizer: torch.optim.Optimizer, model: torch.nn.Module, new_rows: NewRows) -> None:
    """Makes `new_rows` learn at their own rate, in every kind of optimizer. Frozen parameters stay
    as they are.

    AdamW's step is w - rate * (decay * w + u), and u depends on the gradients alone. So the rows
    are zero during a step, which leaves -rate * u of them, to the last digits. A step with another
    rate follows from it."""
    groups = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    chosen = []
    for name, rows in new_rows.rows.items():
        parameter = model.get_parameter(name)
        weight, first = own_rows(full_values(optimizer, parameter))
        rows = [row - first for row in rows if first <= row < first + len(weight)]
        places = torch.tensor(rows, dtype=torch.long, device=weight.device)
        chosen += [(group, p, weight, places) for group, p in groups if p is parameter]
    before = []

    @torch.no_grad()
    def take_out(*arguments) -> None:
        present = gradients(optimizer)
        for group, p, weight, places in chosen:
            if p in present:
                before.append((group, p, weight, places, weight[places]))
                weight[places] = 0.0

    @torch.no_grad()
    def put_back(*arguments) -> None:
        while before:
            group, p, weight, places, values = before.pop()
            ratio = max(1.0, new_rows.learning_rate / group["initial_lr"])
            decay = ratio * group["lr"] * group["weight_decay"]
            weight[places] = values * (1 - decay) + ratio * weight[places]
            if weight.dtype != p.dtype:
                p[places.to(p.device)] = weight[places].to(p)

    optimizer.register_step_pre_hook(take_out)
    optimizer.register_step_post_hook(put_back)


def gradients(
    optimizer: torch.optim.Optimizer, missing: Sequence[torch.nn.Parameter] = ()
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The gradients of this update, on the device or on the host, in the order of the parameters.
    The `missing` ones get zeros."""
    for p in missing:
        p.grad = torch.zeros_like(p)
    if isinstance(optimizer, OffloadedAdamW):
        return optimizer.gradients()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: p.grad for p in parameters if p.grad is not None}


def full_values(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> torch.Tensor:
    """The values of a parameter that the update changes: its own, or its fp32 values on the
    host."""
    return optimizer.full(p) if isinstance(optimizer, OffloadedAdamW) else p.detach()


def state_bytes(model: torch.nn.Module, kind: str) -> int:
    """Bytes on the device of the states that `make_states` makes: `kind` "adamw", "adamw_8bit" or
    a level of --use_cpu_offload."""
    if kind in LEVELS:
        return 0
    trained = {p for p in model.parameters() if p.requires_grad}
    in_8bit = set()
    if kind == "adamw_8bit":
        large = {p for p in trained if p.numel() >= SMALLEST_8BIT}
        in_8bit = large - _embedding_weights(model)
    in_32bit = trained - in_8bit
    scaled = sum(2 * (p.numel() + 4 * math.ceil(p.numel() / BLOCK)) for p in in_8bit)
    return 8 * sum(p.numel() for p in in_32bit) + scaled


def load_bitsandbytes(device: torch.device):
    """Imports and returns bitsandbytes. Raises `RunError` if it is not installed or a trial step
    fails on `device`."""
    # On some CPUs bitsandbytes warns that it lacks a 4-bit kernel, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    library = require("bitsandbytes", "--optimizer adamw_8bit")
    trial = torch.nn.Parameter(torch.zeros(SMALLEST_8BIT, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        library.optim.AdamW8bit([trial]).step()
    except RuntimeError as error:
        failure = (
            f"--optimizer adamw_8bit: bitsandbytes {library.__version__} does not work on {device}"
        )
        advice = "try `pip install -U bitsandbytes`, or use --use_cpu_offload"
        raise RunError(f"{failure} ({first_line(error)}): {advice}") from None
    return library


def make_states(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Allocates the states as the first step would; those of a divided update on the rank that owns
    the parameter. With 8-bit states, tensors below 4096 values stay in 32 bits, which is
    bitsandbytes' rule, and so do embeddings: github.com/huggingface/transformers/issues/14819, by
    its author."""
    embeddings = _embedding_weights(model)
    for group_index, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if isinstance(optimizer, OffloadedAdamW):
                if optimizer.owns(p):
                    optimizer.state[p] = zero_state(optimizer, p)
            elif isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[p] = zero_state(optimizer, p)
            elif p in embeddings:
                averages = {
                    key: torch.zeros_like(p, dtype=torch.float32) for key in ("state1", "state2")
                }
                optimizer.state[p] = {"step": 0, **averages}
            else:
                optimizer.init_state(group, p, group_index, index)


def zero_state(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict:
    """The first state of a parameter in torch's AdamW, or in the one that updates on the host."""
    on_host = {"device": "cpu", "memory_format": torch.contiguous_format}
    placement = on_host if isinstance(optimizer, OffloadedAdamW) else {}
    values = full_values(optimizer, p)
    averages = {key: torch.zeros_like(values, **placement) for key in AVERAGES}
    step = torch.zeros((), dtype=torch.float32, device=averages["exp_avg"].device)
    return {"step": step, **averages}


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, ranks: Ranks | None = None
) -> dict:
    """The states by parameter name, independent of order, groups and kind: {name: {"step",
    "exp_avg", "exp_avg_sq"}}. An 8-bit average is uint8, with its scales and its table of 256
    values beside it. The tensors are not copies. Without `ranks`, those that this process has. With
    `ranks`, which call it together, the first one gets those that the others have, too."""
    is_divided = isinstance(optimizer, OffloadedAdamW) and ranks is not None
    saved = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p)
        if is_divided and p in optimizer.owners:
            state = collect(optimizer, p, ranks)
        if state is not None:
            averages = {
                ours: state[key]
                for ours, other in NAMES.items()
                for key in (ours, other)
                if key in state
            }
            saved[name] = {"step": torch.as_tensor(state["step"], dtype=torch.float32), **averages}
    return saved


def collect(optimizer: OffloadedAdamW, p: torch.nn.Parameter, ranks: Ranks) -> dict | None:
    """On the first rank the state of a parameter, which the rank that owns it sends; on the others
    None."""
    owner = optimizer.owners[p]
    if owner == 0:
        return optimizer.state.get(p)
    if ranks.first:
        state = zero_state(optimizer, p)
        for tensor in state.values():
            ranks.receive(tensor, owner)
        return state
    if owner == ranks.rank:
        for tensor in optimizer.state[p].values():
            ranks.send(tensor, 0)
    return None


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: dict
) -> None:
    """Copies saved states, of any kind of optimizer, into this one. The copy is exact unless 32
    bits become 8. Learning rate and weight decay stay as the command line says. A parameter
    without a saved state of its shape starts with a fresh state, and the state of a parameter that
    is now frozen is dropped; the numbers of both are printed."""
    own = optimizer_state(optimizer, model)
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    fresh = 0
    frozen = 0
    for name, p in model.named_parameters():
        if p not in trained:
            frozen += name in saved
            continue
        if name not in saved or saved[name]["exp_avg"].shape != p.shape:
            fresh += 1
            continue
        if name not in own:  # another rank has it
            continue
        source = saved[name]
        target = own[name]
        for key in AVERAGES:
            values = source[key]
            scales = source.get(f"{key}_scales")
            if f"{key}_scales" in target:
                if scales is None:
                    values, scales = quantize(values, target[f"{key}_table"].cpu())
                target[f"{key}_scales"].copy_(scales)
            elif scales is not None:
                values = dequantize(values, scales, source[f"{key}_table"])
            part, first = own_rows(target[key])
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


def quantize(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' blockwise 8-bit codes, in the shape of `values`, and scales, the blocks'
    largest magnitudes. A code is the index of the nearest of the table's 256 ascending values in
    [-1, 1]. bitsandbytes' own function (0.50.2) is wrong on a CPU: it raises 0 and all below 1.6e-5
    of the scale to that."""
    flat = values.reshape(-1).to(table.dtype)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return codes.view(-1)[: len(flat)].view(values.shape), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The fp32 values of blockwise 8-bit `codes`, in their shape."""
    values = table[codes.reshape(-1).long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]
    return values.view(codes.shape)


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
        """What `resume` needs."""
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
