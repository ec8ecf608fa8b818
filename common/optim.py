"""Parameter groups, optimizers, learning-rate schedules, and optimizer states that other optimizers can load."""

import logging
import math

import torch
from torch.optim.adamw import adamw

from common.errors import RunError, UsageError, first_line, require

BETAS = (0.9, 0.98)  # Vaswani et al. 2017, section 5.3
EPSILON = 1e-9  # Vaswani et al. 2017, section 5.3
# In 8 bits, second moments below 1.6e-7 of the largest in their block become zero, and epsilon alone divides the first
# moment. With gradients of 1e-3 to 1e-9 in a block and an emulation of bitsandbytes' rounding on CUDA, the largest step
# was 341 learning rates at 1e-9, 39 at bitsandbytes' default 1e-8, 1.05 at 1e-6 and 1.03 in 32 bits: test_largest_step.
EPSILON_8BIT = 1e-6
BLOCK = 256  # values that share a scale in bitsandbytes' 8-bit states
AVERAGES = (("exp_avg", 1), ("exp_avg_sq", 2))  # torch's names of the states, and bitsandbytes' numbers
OFFLOAD_BUCKET = 2**24  # bytes of weights, and as many of gradients, that are copied to the host at a time


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices and filters have weight decay; norms, biases and scalars (at most one dimension) have none.
    Frozen parameters are in neither. Raises `UsageError` if all are frozen."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f"every parameter of {type(model).__name__} is frozen: there is nothing to train")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """The numbers of all and of trained parameters. Tied parameters count once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def make_optimizer(
    model: torch.nn.Module, learning_rate: float, weight_decay: float = 0.01, kind: str = "adamw", offload: bool = False
) -> torch.optim.Optimizer:
    """AdamW with betas (0.9, 0.98): torch's fused kernel, bitsandbytes' 8-bit states (`kind` "adamw_8bit"), or states
    in host memory (`offload`). The states are allocated here, so the first update needs no additional memory. Raises
    `UsageError` if all parameters are frozen, `RunError` if bitsandbytes does not work."""
    groups, settings = parameter_groups(model, weight_decay), {"lr": learning_rate, "betas": BETAS}
    if offload:
        optimizer = OffloadedAdamW(groups, **settings, eps=EPSILON)
    elif kind == "adamw_8bit":
        library = load_bitsandbytes(groups[0]["params"][0].device)
        optimizer = library.optim.AdamW8bit(groups, **settings, eps=EPSILON_8BIT)
    else:
        optimizer = torch.optim.AdamW(groups, **settings, eps=EPSILON, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    make_states(optimizer, model)
    return optimizer


def load_bitsandbytes(device: torch.device):
    """Imports and returns bitsandbytes. Raises `RunError` if it is not installed or a trial step fails on `device`."""
    # On some CPUs bitsandbytes warns that it lacks a 4-bit kernel, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    library = require("bitsandbytes", "--optimizer adamw_8bit")
    trial = torch.nn.Parameter(torch.zeros(4096, device=device))  # the smallest size that has 8-bit states
    trial.grad = torch.zeros_like(trial)
    try:
        library.optim.AdamW8bit([trial]).step()
    except RuntimeError as error:
        failure = f"bitsandbytes {library.__version__} does not work on {device} ({first_line(error)})"
        advice = "try `pip install -U bitsandbytes`, or use --use_cpu_offload"
        raise RunError(f"--optimizer adamw_8bit: {failure}: {advice}") from None
    return library


def make_states(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Allocates the states that the optimizer's first step would, without making a step. With 8-bit states, tensors
    below 4096 values stay in 32 bits (bitsandbytes' rule), and so do embeddings, whose rows have gradients of very
    different sizes (its author's advice: github.com/huggingface/transformers/issues/14819)."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    on_host = {"device": "cpu", "memory_format": torch.contiguous_format}
    placement = on_host if isinstance(optimizer, OffloadedAdamW) else {}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if isinstance(optimizer, (torch.optim.AdamW, OffloadedAdamW)):
                averages = {key: torch.zeros_like(p, **placement) for key, _ in AVERAGES}
                step = torch.zeros((), dtype=torch.float32, device=averages["exp_avg"].device)
                optimizer.state[p] = {"step": step, **averages}
            elif p in embeddings:
                averages = {key: torch.zeros_like(p, dtype=torch.float32) for key in ("state1", "state2")}
                optimizer.state[p] = {"step": 0, **averages}
            else:
                optimizer.init_state(group, p, group_index, index)


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with its states in host memory (8 bytes per weight in fp32) and its update on the host, with the CPU kernel
    of torch.optim.AdamW(fused=True). The only copy of the weights is on the device.

    `step` moves buckets of weights and gradients through two slots of pinned memory: while one bucket is updated, the
    next one arrives and the previous one returns. All copies run on the current stream, which orders them after the
    backward pass and before the next forward pass, and a slot's next bucket after the return of the previous one. The
    host touches a slot only after it has waited for its arrival and before it starts its return. Contiguous weights on
    the CPU are updated in place."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.device = parameters[0].device
        self.in_place = self.device.type == "cpu" and all(p.is_contiguous() for p in parameters)
        size = max(OFFLOAD_BUCKET, *(aligned(torch.atleast_1d(p)[:1].nbytes) for p in parameters))
        count = 0 if self.in_place else 4  # two slots, each with memory for weights and for gradients
        memory = [torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda") for _ in range(count)]
        self.slots = memory[:2], memory[2:]

    @torch.no_grad()
    def step(self) -> None:
        arriving = None
        for number, (group, pieces) in enumerate(self.buckets()):
            following = group, pieces, *self.fetch(pieces, number % 2)
            if arriving:
                self.update(*arriving)
            arriving = following
        if arriving:
            self.update(*arriving)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] += 1

    def buckets(self):
        """Yields (group, pieces) of at most a slot's size. A piece consists of views of some rows of a weight, its
        gradient and its two averages, and a copy of the step number, which the update increments."""
        for group in self.param_groups:
            pieces, size = [], 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                tensors = [torch.atleast_1d(t) for t in (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"])]
                rows = max(1, OFFLOAD_BUCKET // tensors[0][:1].nbytes)
                for piece in zip(*(t.split(rows) for t in tensors), strict=True):
                    if pieces and size + aligned(piece[0].nbytes) > OFFLOAD_BUCKET:
                        yield group, pieces
                        pieces, size = [], 0
                    pieces.append((*piece, state["step"].clone()))
                    size += aligned(piece[0].nbytes)
            if pieces:
                yield group, pieces

    def fetch(self, pieces: list[tuple], slot: int) -> tuple[list, torch.cuda.Event | None]:
        """Starts to copy weights and gradients into a slot. Returns the copies and the event of their arrival."""
        if self.in_place:
            return [piece[:2] for piece in pieces], None
        on_host, start = [], 0
        for weights, gradients, *_ in pieces:
            places = [memory[start : start + weights.nbytes].view(weights.dtype) for memory in self.slots[slot]]
            pair = zip(places, (weights, gradients), strict=True)
            on_host.append([place.view(source.shape).copy_(source, non_blocking=True) for place, source in pair])
            start += aligned(weights.nbytes)
        return on_host, torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def update(self, group: dict, pieces: list[tuple], on_host: list, arrival: torch.cuda.Event | None) -> None:
        """Waits for a bucket, updates it on the host, and starts to copy its weights back."""
        if arrival is not None:
            arrival.synchronize()
        weights, gradients = zip(*on_host, strict=True)
        sources, _, averages, squares, steps = zip(*pieces, strict=True)
        adamw(list(weights), list(gradients), list(averages), list(squares), [], list(steps), fused=True,
              lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
              weight_decay=group["weight_decay"], amsgrad=False, maximize=False)  # fmt: skip
        for source, updated in zip(sources, weights, strict=True):
            if source is not updated:
                source.copy_(updated, non_blocking=True)


def aligned(size: int) -> int:
    """`size` in bytes, rounded up to a cache line, so that a tensor of any type can follow."""
    return -(-size // 64) * 64


def optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict:
    """The states by parameter name, independent of order, groups and kind: {name: {"step", "exp_avg", "exp_avg_sq"}}.
    An 8-bit average is uint8, with its scales and its table of 256 values beside it. The tensors are not copies."""
    saved = {}
    for name, p in model.named_parameters():
        if p not in optimizer.state:
            continue
        state = optimizer.state[p]
        entry = saved[name] = {"step": torch.as_tensor(state["step"], dtype=torch.float32)}
        for key, number in AVERAGES:
            entry[key] = state[key] if key in state else state[f"state{number}"]
            if entry[key].dtype == torch.uint8:
                entry[f"{key}_scales"], entry[f"{key}_table"] = state[f"absmax{number}"], state[f"qmap{number}"]
    return saved


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: dict) -> None:
    """Copies saved states, of any kind of optimizer, into this one. The copy is exact unless 32 bits become 8. Learning
    rate and weight decay stay those of the command line. A parameter without a saved state of its shape starts with a
    fresh state, and the state of a parameter that is now frozen is dropped; the numbers of both are printed."""
    trained = fresh = dropped = 0
    for name, p in model.named_parameters():
        if p not in optimizer.state:
            dropped += name in saved
            continue
        state, entry = optimizer.state[p], saved.get(name)
        trained += 1
        if entry is None or entry["exp_avg"].shape != p.shape:
            fresh += 1
            continue
        for key, number in AVERAGES:
            average = state[key] if key in state else state[f"state{number}"]
            values, scales = entry[key], entry.get(f"{key}_scales")
            if average.dtype == torch.uint8:
                if scales is None:
                    values, scales = quantize(values, state[f"qmap{number}"].cpu())
                state[f"absmax{number}"].copy_(scales)
            elif scales is not None:
                values = dequantize(values, scales, entry[f"{key}_table"])
            average.copy_(values)
        if torch.is_tensor(state["step"]):
            state["step"].copy_(entry["step"])
        else:
            state["step"] = int(entry["step"])
    if fresh:
        print(f"optimizer: {fresh} of {trained} parameters start with fresh states: the checkpoint has none that fit")
    if dropped:
        print(f"optimizer: {dropped} parameters with saved states are frozen now: their states are dropped")


def quantize(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blockwise 8-bit values in bitsandbytes' format: the index of the nearest of the table's 256 ascending values in
    [-1, 1], and the block's largest magnitude as its scale. Returns codes (uint8, in the shape of `values`) and scales.
    bitsandbytes' own function (0.50.2) is wrong on a CPU: it raises 0 and all below 1.6e-5 of the scale to that."""
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
    """The learning rate as a function of the number of updates: linear warm-up, then `kind`."""

    FLOOR = 0.01  # cosine ends at this share of the peak

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, total_steps: int, warmup_steps: int | None = None):
        self.optimizer, self.kind, self.total = optimizer, kind, total_steps
        self.warmup = min(2000, max(1, total_steps // 10)) if warmup_steps is None else warmup_steps
        self.set(0)

    def factor(self, step: int) -> float:
        """The share of the peak rate for the update that follows `step` updates."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup) / (step + 1))
        if self.kind == "cosine":
            done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
            return self.FLOOR + (1 - self.FLOOR) * 0.5 * (1 + math.cos(math.pi * done))
        return 1.0

    def set(self, step: int) -> None:
        """Sets the rate for the update that follows `step` updates."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.factor(step)
