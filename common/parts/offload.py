"""Host memory in place of GPU memory: the levels of --use_cpu_offload.

    level       on the GPU                                   on the host, bytes per trained weight
    states      weights, gradients                           AdamW's states: 8
    gradients   weights, a gradient while it is computed     states, sums of gradients: 12
    weights     16-bit copies of most weights, and gradients states, sums, fp32 weights: 16

The update is computed on the host in every level. A level changes no bit on a CPU: gradients are
added in the same order and type, and a 16-bit copy is what autocast would make of the weight.

Several ranks divide the states and the update, not the sums and the fp32 weights. All ranks of a
job are one such group, also on several machines."""

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim.adamw import adamw

from common import optim
from common.engine import Engine
from common.errors import RunError
from common.memory import size
from common.ranks import Ranks, torchrun

BYTES = {"states": 8, "gradients": 12, "weights": 16}  # on the host for a trained weight
SLOT = 2**24  # bytes of weights, and as many of gradients, that are copied at a time


def castable(model: torch.nn.Module, layers: tuple[type, ...]) -> list[torch.nn.Parameter]:
    """The parameters that autocast casts once in a pass: weight and bias of the linear and
    convolution layers inside the modules of the types `layers`. Gradients of several uses are added
    in fp32, which 16-bit gradients are not. So these are left out: parameters that other modules
    have, too, and types of which there is one module, such as a front end that runs for a few
    utterances at a time."""
    uses = Counter()
    kinds = Counter()
    for module in model.modules():
        kinds[type(module)] += 1
        uses.update(p for p in module._parameters.values() if p is not None)
    inside = {}
    for layer in model.modules():
        if isinstance(layer, layers) and kinds[type(layer)] > 1:
            inside |= dict.fromkeys(layer.modules())
    parameters = []
    for module in inside:
        own = [module._parameters.get(name) for name in ("weight", "bias")]
        if isinstance(module, torch.nn.Embedding) or own[0] is None or own[0].dim() < 2:
            continue
        parameters += [p for p in own if p is not None and uses[p] == 1]
    return parameters


def host_bytes(model: torch.nn.Module, level: str | None, ranks: int = 1) -> int:
    """Bytes in host memory that a level takes, the mean of so many ranks; 0 without a level."""
    if level not in BYTES:
        return 0
    states = BYTES["states"]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained * states // ranks + trained * (BYTES[level] - states)


@dataclass(frozen=True)
class Offload:
    """The state on the host: the level, the fp32 values of the parameters that have 16 bits on the
    GPU, and the ranks that divide the states and the update."""

    level: str
    masters: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)


def begin(
    level: str,
    model: torch.nn.Module,
    layers: tuple[type, ...],
    dtype: torch.dtype | None,
    ranks: Ranks | None = None,
) -> Offload:
    """Prepares a model, while it is on the host, for a level of --use_cpu_offload. With "weights"
    and autocast's `dtype`, its castable parameters get 16 bits; without autocast that level is like
    "gradients". The model's `state_dict` still has the fp32 values, and `load_state_dict` sets
    them. `ranks` divide the update (None: this process is the only one)."""
    masters = {}
    if level == "weights" and dtype is None:
        print("--use_cpu_offload weights: without mixed precision it is the same as gradients")
    elif level == "weights":
        for p in castable(model, layers):
            masters[p] = p.data.contiguous()
            p.data = p.data.to(dtype)  # in the same order in memory, such as channels_last

        def save(module, state: dict, prefix: str, metadata) -> None:
            for name, p in model.named_parameters(remove_duplicate=False):
                if p in masters:
                    state[name] = masters[p]

        def load(module, state: dict, *rest) -> None:
            for name, p in model.named_parameters(remove_duplicate=False):
                if p in masters and name in state and state[name].shape == p.shape:
                    masters[p].copy_(state[name])

        model.register_state_dict_post_hook(save)
        model.register_load_state_dict_pre_hook(load)
        if masters:
            share = sum(p.numel() for p in masters) / sum(p.numel() for p in model.parameters())
            print(f"{share:.0%} of the weights are on the device in 16 bits")
    return Offload(level, masters, ranks or Ranks())


class Offloaded(Engine):
    """The engine of --use_cpu_offload. Several ranks divide the update."""

    is_divided = True

    def place(self) -> None:
        level = self.args.use_cpu_offload
        ranks = self.setup.ranks
        self.on_host = begin(level, self.model, self.task.checkpointed, self.setup.dtype, ranks)
        super().place()
        require_host_memory(self.model, level, ranks)

    def make_optimizer(self) -> None:
        self.optimizer = make_optimizer(
            self.groups(), self.network, self.learning_rate(), self.on_host, self.task.adamw
        )

    def gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        return self.optimizer.gradients()

    def step(self) -> None:
        self.optimizer.step()
        if self.setup.ranks.size > 1:
            self.optimizer.share()

    def values(self, p: torch.nn.Parameter) -> torch.Tensor:
        return self.optimizer.full(p)

    def optimizer_state(self) -> dict:
        return whole_state(self.optimizer, self.network, self.setup.ranks)


def make_optimizer(
    groups: list[dict],
    model: torch.nn.Module,
    learning_rate: float,
    offload: Offload,
    settings: optim.AdamWSettings,
) -> "OffloadedAdamW":
    """AdamW with its update on the host, as `optim.make_optimizer` makes others. A rank has the
    states of the parameters that it updates."""
    optimizer = OffloadedAdamW(
        groups, offload, lr=learning_rate, betas=settings.betas, eps=optim.EPSILON
    )
    optim.note_rates(optimizer)
    for p in optimizer.owners:
        if optimizer.owns(p):
            optimizer.state[p] = optimizer.zero_state(p)
    return optimizer


def whole_state(optimizer: "OffloadedAdamW", model: torch.nn.Module, ranks: Ranks) -> dict:
    """`optim.optimizer_state`, on the first rank with the others' states. All ranks call it."""
    saved = optim.optimizer_state(optimizer, model)
    if ranks.size == 1:
        return saved
    whole = {}
    for name, p in model.named_parameters():
        state = collect(optimizer, p, ranks) if p in optimizer.owners else None
        if state is not None:
            whole[name] = state
    return whole


def collect(optimizer: "OffloadedAdamW", p: torch.nn.Parameter, ranks: Ranks) -> dict | None:
    """On the first rank the state of a parameter, which its owner sends; on the others None."""
    owner = optimizer.owners[p]
    if owner == 0:
        return optimizer.state.get(p)
    if ranks.first:
        state = optimizer.zero_state(p)
        for tensor in state.values():
            ranks.receive(tensor, owner)
        return state
    if owner == ranks.rank:
        for tensor in optimizer.state[p].values():
            ranks.send(tensor, 0)
    return None


def require_host_memory(model: torch.nn.Module, level: str, ranks: Ranks) -> None:
    """Raises `RunError`, on all ranks, if a level takes more host memory than is free for all
    processes of this machine: the system would end the run without a message. Call it when the
    model has left the host, or with "weights" its fp32 values are there."""
    missing = "gradients" if level == "weights" else level
    needed = host_bytes(model, missing, ranks.size) * torchrun("LOCAL_WORLD_SIZE", 1)
    if ranks.first:  # it has the states of all ranks while it writes a checkpoint
        needed += host_bytes(model, "states") - host_bytes(model, "states", ranks.size)
    free = free_host_memory()
    is_short = free is not None and needed > free
    (any_is_short,) = ranks.reduce([int(is_short)], "max")
    if any_is_short:
        is_free = f"{size(free)} are free" if is_short else "the machine of another rank has less"
        raise RunError(
            f"--use_cpu_offload {level} takes {size(needed)} more of host memory, and {is_free}:"
            " end other programs, or take a lower level or --optimizer adamw_8bit"
        )


def free_host_memory() -> int | None:
    """Bytes that programs can still take, with the swap space; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return 1024 * (kib["MemAvailable"] + kib["SwapFree"]) if "MemAvailable" in kib else None


def divide(parameters: list[torch.nn.Parameter], count: int) -> dict[torch.nn.Parameter, int]:
    """The rank that owns each parameter: the largest first, to the rank that has least."""
    owners = dict.fromkeys(parameters, 0)
    sizes = [0] * count
    for p in sorted(parameters, key=torch.numel, reverse=True):
        owners[p] = sizes.index(min(sizes))
        sizes[owners[p]] += p.numel()
    return owners


class Slot:
    """Pinned memory for a piece of a weight and of its gradient on their way between host and GPU,
    and what the host does when they have arrived. All copies run on the current stream, which
    orders them with forward and backward passes and with each other."""

    def __init__(self, size: int, pinned: bool):
        self.memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self.copied: torch.cuda.Event | None = None  # after the last copy from or to this slot
        self.then: Callable | None = None

    def place(self, number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A part of the slot's memory, 0 for a weight and 1 for a gradient, as a tensor."""
        size = shape.numel() * dtype.itemsize
        return self.memory[number][:size].view(dtype).view(shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts to copy; one of the two is in this slot."""
        target.copy_(source, non_blocking=True)
        on_gpu = target if target.is_cuda else source
        if on_gpu.is_cuda:
            self.copied = torch.cuda.current_stream(on_gpu.device).record_event()

    def fetch(self, number: int, source: torch.Tensor) -> torch.Tensor:
        """Starts to copy a piece from the GPU, and returns its place."""
        place = self.place(number, source.shape, source.dtype)
        self.copy(place, source)
        return place

    def send(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Starts to copy values of the host to a piece of a weight on the GPU, in its type."""
        self.copy(target, self.place(0, target.shape, target.dtype).copy_(values))

    def finish(self) -> None:
        """Waits for the last copy and does what is left to do with the piece in this slot."""
        if self.then is not None:
            if self.copied is not None:
                self.copied.synchronize()
            then = self.then
            self.then = None
            then()


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW by the CPU kernel of torch.optim.AdamW(fused=True), for a level of --use_cpu_offload.
    What is on the GPU passes through two slots: while one piece is updated or added, the next one
    arrives and the previous one returns.

    Every parameter has a rank that owns it. Only that rank has its states and updates it. All ranks
    have the same gradients, and `share` gives them the same values."""

    def __init__(self, groups: list[dict], offload: Offload, **settings):
        super().__init__(groups, settings)
        self.masters = offload.masters
        self.sums: dict[torch.nn.Parameter, torch.Tensor] = {}  # of gradients
        self.summed: set[torch.nn.Parameter] = set()  # those that this update has gradients of
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.ranks = offload.ranks
        self.owners = divide(parameters, self.ranks.size)
        size = max(SLOT, *(torch.atleast_1d(self.full(p))[:1].nbytes for p in parameters))
        self.slots = [Slot(size, pinned=parameters[0].is_cuda) for _ in range(2)]
        self.turns = itertools.cycle(self.slots)
        if offload.level != "states":
            take = weakref.WeakMethod(self.take_gradient)  # or the model would keep the optimizer
            for p in parameters:
                self.sums[p] = torch.zeros(p.shape, dtype=self.full(p).dtype)
                p.register_post_accumulate_grad_hook(lambda p: take()(p))

    def full(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The values of a parameter that the update changes: its own, or those on the host."""
        return self.masters.get(p, p.detach())

    def zero_state(self, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The first state of a parameter."""
        on_host = {"device": "cpu", "memory_format": torch.contiguous_format}
        return optim.zero_state(self.full(p), **on_host)

    def owns(self, p: torch.nn.Parameter) -> bool:
        """Whether this rank has the states of a parameter and updates it."""
        return self.owners[p] == self.ranks.rank

    def gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The gradients of this update, in the order of the parameters. Those that were not made by
        a backward pass are taken from `p.grad`, too."""
        for p in self.sums:
            if p.grad is not None:
                self.take_gradient(p)
        for slot in self.slots:
            slot.finish()
        found = {}
        for group in self.param_groups:
            for p in group["params"]:
                gradient = self.sums[p] if p in self.summed else p.grad
                if gradient is not None:
                    found[p] = gradient
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, also those of a backward pass that has failed."""
        for slot in self.slots:
            slot.then = None
        self.summed.clear()
        super().zero_grad()

    @torch.no_grad()
    def take_gradient(self, p: torch.nn.Parameter) -> None:
        """Adds a complete gradient to its parameter's sum, and frees it. Backward calls it."""
        is_first = p not in self.summed
        self.summed.add(p)
        for total, piece in pieces(self.sums[p], p.grad):
            slot = next(self.turns)
            slot.finish()
            arriving = slot.fetch(1, piece)
            slot.then = functools.partial(total.copy_ if is_first else total.add_, arriving)
        p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = self.gradients()
        for group in self.param_groups:
            for p in group["params"]:
                if p not in gradients or not self.owns(p):
                    continue
                state = self.state[p]
                step = state["step"]
                tensors = p.detach(), self.full(p), gradients[p]
                averages = state["exp_avg"], state["exp_avg_sq"]
                for piece in pieces(*tensors, *averages):
                    slot = next(self.turns)
                    slot.finish()
                    self.fetch(slot, group, p, [*piece, step.clone()])
                step += 1
        for slot in self.slots:
            slot.finish()

    @torch.no_grad()
    def share(self) -> None:
        """Sets every parameter to the values that its owner has. All ranks call it together."""
        values = [self.full(p) for p in self.owners]
        self.ranks.share_tensors(values, list(self.owners.values()))
        for p in self.owners:
            if self.owns(p) or p not in self.masters:
                continue
            for own, weight in pieces(p.detach(), self.full(p)):
                slot = next(self.turns)
                slot.finish()
                slot.then = functools.partial(slot.send, own, weight)
        for slot in self.slots:
            slot.finish()

    def fetch(self, slot: Slot, group: dict, p: torch.nn.Parameter, piece: list) -> None:
        """Starts to copy what the update of a piece needs from the GPU, and leaves the update to
        the slot. `piece`: parameter, full values, gradient, averages and number of the step."""
        own, weight, gradient, *state = piece
        is_master = p in self.masters
        if not is_master:
            weight = slot.fetch(0, own)
        if p not in self.sums:
            gradient = slot.fetch(1, gradient)

        def finish() -> None:
            update(group, weight, gradient, *state)
            if is_master:
                slot.send(own, weight)
            else:
                slot.copy(own, weight)

        slot.then = finish


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of several tensors of one shape, as many as fit into a slot."""
    tensors = [torch.atleast_1d(t) for t in tensors]
    row = max(t[:1].nbytes for t in tensors)
    return zip(*(t.split(max(1, SLOT // row)) for t in tensors), strict=True)


def update(group: dict, weight, gradient, average, square, step) -> None:
    """One step of AdamW on tensors of the host, in place."""
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient],
        [average],
        [square],
        [],
        [step],
        fused=True,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        amsgrad=False,
        maximize=False,
    )
