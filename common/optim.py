"""Optimizer kinds, parameter groups, learning-rate schedules, and states that survive a change of the kind."""

import logging
import math

import torch
from torch.optim.adamw import adamw

from common.errors import RunError, UsageError, require

EPSILON = 1e-9  # Vaswani et al. 2017, section 5.3
# 8-bit second moments below 1.6e-7 of the largest of their block are zero, so that epsilon alone may divide the first.
# With bitsandbytes' rounding on CUDA emulated and gradients of 1e-3 to 1e-9 in a block, the largest step was 341 learning
# rates at 1e-9, 39 at bitsandbytes' own 1e-8 and 1.05 at 1e-6, in 32 bits 1.03: test_optim.py's test_largest_step.
EPSILON_8BIT = 1e-6
BLOCK = 256  # values that share a scale in bitsandbytes' 8-bit states
AVERAGES = (("exp_avg", 1), ("exp_avg_sq", 2))  # torch's names for the states, and bitsandbytes' numbers
OFFLOAD_BUCKET = 2**24  # bytes of weights, and as many of gradients, on their way between device and host at a time


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices and filters with weight decay; norms, biases and scalars (one dimension or none) without.
    Frozen parameters are in neither, and so have no states, are not reduced over ranks and not clipped. Raises
    `UsageError` where all are frozen."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f"every parameter of {type(model).__name__} is frozen: there is nothing to train")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trained) numbers in the parameters; what is tied counts once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def make_optimizer(model: torch.nn.Module, args, betas: tuple[float, float] = (0.9, 0.98)) -> torch.optim.Optimizer:
    """AdamW as `--optimizer` and `--use_cpu_offload` ask: torch's fused kernel, bitsandbytes' 8-bit states, or states in
    host memory. The states are made here, before the first window: they cannot be what runs out of memory later."""
    groups, settings = parameter_groups(model, args.weight_decay), {"lr": args.learning_rate, "betas": betas}
    if args.use_cpu_offload:
        optimizer = OffloadedAdamW(groups, **settings, eps=EPSILON)
    elif args.optimizer == "adamw_8bit":
        library = load_bitsandbytes(groups[0]["params"][0].device)
        optimizer = library.optim.AdamW8bit(groups, **settings, eps=EPSILON_8BIT)
    else:
        optimizer = torch.optim.AdamW(groups, **settings, eps=EPSILON, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    make_states(optimizer, model)
    return optimizer


def load_bitsandbytes(device: torch.device):
    """Imports and returns bitsandbytes. Raises `RunError` where it is not there, or cannot update on this device: of
    that it says nothing before the first step."""
    # Else it warns on some CPUs that it lacks a 4-bit kernel, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    library = require("bitsandbytes", "--optimizer adamw_8bit")
    trial = torch.nn.Parameter(torch.zeros(4096, device=device))  # the smallest with 8-bit states
    trial.grad = torch.zeros_like(trial)
    try:
        library.optim.AdamW8bit([trial]).step()
    except RuntimeError as error:  # NotImplementedError is one
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
        raise RunError(
            f"--optimizer adamw_8bit: bitsandbytes {library.__version__} does not work on {device} ({reason}): try "
            "`pip install -U bitsandbytes`, or use --use_cpu_offload"
        ) from None
    return library


def make_states(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Allocates every state as the optimizer's first step would, and counts no step. The 8-bit kind keeps 32 bits for
    tensors below 4096 values (bitsandbytes' rule) and for embeddings, whose rows have gradients of very unlike sizes
    (its author's advice: github.com/huggingface/transformers/issues/14819)."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    on_host = {"device": "cpu", "memory_format": torch.contiguous_format}
    where = on_host if isinstance(optimizer, OffloadedAdamW) else {}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if isinstance(optimizer, (torch.optim.AdamW, OffloadedAdamW)):
                averages = {key: torch.zeros_like(p, **where) for key, _ in AVERAGES}
                step = torch.zeros((), dtype=torch.float32, device=averages["exp_avg"].device)
                optimizer.state[p] = {"step": step, **averages}
            elif p in embeddings:
                averages = {key: torch.zeros_like(p, dtype=torch.float32) for key in ("state1", "state2")}
                optimizer.state[p] = {"step": 0, **averages}
            else:
                optimizer.init_state(group, p, group_index, index)


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with its states in host memory (8 bytes a weight in fp32) and its update on the host, by the CPU kernel of
    torch.optim.AdamW(fused=True). The weights live on the device alone: nothing there can be stale.

    `step` takes the gradients as they are then (unscaled, clipped) and moves buckets through two slots of pinned memory:
    while one is updated, the next arrives and the one before returns. All copies are on the current stream, where
    nothing else runs meanwhile; it orders them after the backward pass, before the next forward pass, and a slot's
    refilling after its return. The host reads and writes a slot only between the arrival that it waits for and the
    return that it starts. Contiguous weights on the CPU are updated where they are."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.device = parameters[0].device  # of all of them
        self.in_place = self.device.type == "cpu" and all(p.is_contiguous() for p in parameters)
        size = max(OFFLOAD_BUCKET, *(aligned(torch.atleast_1d(p)[:1].nbytes) for p in parameters))
        pinned = self.device.type == "cuda"
        # Two slots, each of memory for weights and for gradients.
        count = 0 if self.in_place else 4
        memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
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
        """Yields (group, pieces) of at most a slot's size. A piece is views of some rows (whatever the strides) of a
        weight, its gradient and averages, with its own copy of the step's number, which the update raises."""
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
        """Starts to copy weights and gradients into the slot; returns them there and the event of their arrival."""
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
        """Waits for a bucket, updates it on the host and starts its weights' way back."""
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
    """`size` in bytes, up to a whole cache line: any type of number may start there."""
    return -(-size // 64) * 64


def optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict:
    """States by parameter name, so that they survive another order, grouping or kind: {name: {"step", "exp_avg",
    "exp_avg_sq"}}; an average in 8 bits is uint8 and has its scales and its table of 256 values beside it. The tensors
    are the optimizer's own: write them before the next step."""
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
    """Copies saved states into the optimizer's, whichever kind wrote them: exactly, but for 32 bits that become 8. Rates
    and decay stay as the command line has them. A parameter that was not trained before (frozen, or new), or had another
    shape, keeps its fresh state; the saved state of one that is frozen now is left out, and so will be missing where a
    later run trains it again. How many of both is printed."""
    trained = fresh = left_out = 0
    for name, p in model.named_parameters():
        if p not in optimizer.state:
            left_out += name in saved
            continue
        state, entry = optimizer.state[p], saved.get(name)
        trained += 1
        if entry is None or entry["exp_avg"].shape != p.shape:
            fresh += 1
            continue
        for key, number in AVERAGES:
            held = state[key] if key in state else state[f"state{number}"]
            values, scales = entry[key], entry.get(f"{key}_scales")
            if held.dtype == torch.uint8:
                if scales is None:
                    values, scales = quantize(values, state[f"qmap{number}"].cpu())
                state[f"absmax{number}"].copy_(scales)
            elif scales is not None:
                values = dequantize(values, scales, entry[f"{key}_table"])
            held.copy_(values)
        if torch.is_tensor(state["step"]):
            state["step"].copy_(entry["step"])
        else:
            state["step"] = int(entry["step"])
    if fresh:
        print(
            f"optimizer: {fresh} of {trained} parameters start with fresh states "
            "(the checkpoint has none for them, or of another shape)"
        )
    if left_out:
        print(
            f"optimizer: {left_out} parameters that the checkpoint trained are frozen now: their states are left out, and "
            "start fresh if they are trained again"
        )


def quantize(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blockwise 8 bits as bitsandbytes holds them: the index of the nearest of the table's 256 ascending values (in
    [-1, 1]) times the block's largest magnitude. Returns (codes of the values' shape, uint8; scales, one a block). Not
    bitsandbytes' own function, which on a CPU makes whatever is below 1.6e-5 of the largest, 0 too, that much (0.50.2)."""
    flat = values.reshape(-1).to(table.dtype)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return codes.view(-1)[: len(flat)].view(values.shape), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What blockwise 8-bit `codes` stand for, in fp32."""
    values = table[codes.reshape(-1).long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]
    return values.view(codes.shape)


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
