"""The memory that FSDP2 keeps on one of several GPUs, by hooks at the places of its own.

torch 2.11's `fully_shard`, with fp32 parameters and its usual policies, on the layers and on the
root, which has all other parameters. A *group* is what one of them has. For each group there are:

    always                          its shards: the rows of every parameter / ranks, rounded up
    before its forward              the buffer of the all-gather, as large as all shards together;
                                    the buffer of the layer before it is freed after that
    during its forward              that buffer, until the next layer's replaces it, and the whole
                                    parameters
    before its backward             the same two; the buffer is freed when it has been copied
    during its backward             the whole parameters, their gradients as they come, the buffer
                                    of the next layer in backward, whose all-gather has begun, and
                                    the input of the reduce-scatter of the layer before
    after its backward              whole gradients and the input of their reduce-scatter, which
                                    stays until the next; its output, the shards of the gradients,
                                    stays after the first micro-batch, and is added to them later

The root's parameters stay whole from forward to the end of backward. Here they are whole always,
which changes no peak. FSDP2 is strict about streams: a tensor is freed when the program frees it,
so the allocator counts what is counted here. NCCL's own buffers are an allowance in cards.py."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from dry_run.fake_tensors import FakeTensors, replaced, tensors_in


def shard_numel(parameter: Tensor, ranks: int) -> int:
    """The values of a parameter's shard on the first rank, which is nowhere larger."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(1, rows))


def shard_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    return sum(shard_numel(p, ranks) * p.element_size() for p in parameters)


class _After(torch.autograd.Function):
    """The same tensors. Their backward calls `then`, when the gradients of all have come."""

    @staticmethod
    def forward(ctx, then: Callable, *tensors: Tensor) -> tuple:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple:
        ctx.then()
        return None, *gradients


class Group:
    """The parameters of a layer or of the root. Keys of what they hold at the moment, or None."""

    def __init__(self, parameters: list[nn.Parameter], ranks: int):
        self.parameters = parameters
        self.full = ranks * shard_bytes(parameters, ranks)
        self.buffer: int | None = None  # of the all-gather
        self.whole: int | None = None  # parameters
        self.gradients: int | None = None  # shards
        self.places: list[int] = []  # in the order of forward
        self.in_backward = False


class Sharding:
    """The groups of a model, and what FSDP2 does for them at each hook."""

    def __init__(self, fakes: FakeTensors, model: nn.Module, layers: tuple[type, ...], ranks: int):
        self.fakes = fakes
        self.ranks = ranks
        self.groups: dict[nn.Module, Group] = {}
        left = dict.fromkeys(model.parameters())
        for layer in reversed(list(model.modules())):  # inner ones first
            if isinstance(layer, layers) and layer is not model:
                own = [p for p in layer.parameters() if p in left]
                self.groups[layer] = Group(own, ranks)
                for p in own:
                    del left[p]
        self.root = Group(list(left), ranks)
        self.order: list[Group] = []  # of forward
        self.last: int | None = None  # the buffer that forward has not freed yet
        self.reduced: int | None = None  # the input of the last reduce-scatter
        self.is_awaited = False  # the end of a backward pass

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, parameters count as shards, and as a whole where FSDP2 has gathered them."""
        fakes = self.fakes
        every = [*self.groups.values(), self.root]
        parameters = [p for group in every for p in group.parameters]
        sizes = [fakes.weigh(p, 0) if p.numel() else 0 for p in parameters]
        shards = fakes.hold(shard_bytes(parameters, self.ranks), "weights")
        self.root.whole = fakes.hold(self.root.full, "weights")
        hooks = []
        for layer, group in self.groups.items():
            hooks += self.hooks(layer, group)
        # The root's output is not known here. Its backward is the first of all.
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            held = [shards, self.last, self.reduced]
            for group in every:
                held += [group.buffer, group.whole, group.gradients]
            for key in held:
                self.free(key)
            for p, size in zip(parameters, sizes, strict=True):
                if p.numel():
                    fakes.weigh(p, size)

    def hooks(self, layer: nn.Module, group: Group) -> list:
        def before(module, args: tuple, named: dict) -> tuple:
            self.before_forward(group)
            if not torch.is_grad_enabled():
                return args, named
            found = {id(t): t for t in tensors_in([*args, *named.values()]) if t.requires_grad}
            if not found:
                return args, named
            passed = _After.apply(lambda: self.after_backward(group), *found.values())
            new = dict(zip(found, passed, strict=True))

            def swap(value):
                return (
                    replaced(value, lambda t: new.get(id(t), t)) if tensors_in([value]) else value
                )

            return tuple(map(swap, args)), {name: swap(value) for name, value in named.items()}

        def after(module, args, output) -> None:
            self.after_forward(group)
            outputs = tensors_in([output]) if torch.is_grad_enabled() else []
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self.before_backward(group))

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after),
        ]

    # --- what FSDP2 does ---

    def free(self, key: int | None) -> None:
        if key is not None:
            self.fakes.release(key)

    def gather(self, group: Group) -> None:
        """The all-gather of a group begins, unless it has begun."""
        if group.whole is None and group.buffer is None:
            group.buffer = self.fakes.hold(group.full, "temporary")

    def copy_out(self, group: Group) -> None:
        """The parameters of a group are whole."""
        if group.whole is None:
            group.whole = self.fakes.hold(group.full, "weights")

    def reshard(self, group: Group) -> None:
        self.free(group.whole)
        group.whole = None

    def before_forward(self, group: Group) -> None:
        self.gather(group)
        if group.buffer is not None:
            self.free(self.last)
            self.copy_out(group)
            self.last = group.buffer
            group.buffer = None

    def after_forward(self, group: Group) -> None:
        if torch._C._current_autograd_node() is None:  # or it is a recomputation
            self.reshard(group)
            group.places.append(len(self.order))
            self.order.append(group)

    def before_backward(self, group: Group) -> None:
        if group.in_backward:
            return
        group.in_backward = True
        if not self.is_awaited:
            self.is_awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)
        self.free(self.last)  # of the root's backward: the last layer's
        self.last = None
        self.gather(group)
        self.copy_out(group)
        self.free(group.buffer)
        group.buffer = None
        if group.places and (place := group.places.pop()) > 0:
            self.gather(self.order[place - 1])

    def after_backward(self, group: Group) -> None:
        group.in_backward = False
        if group is not self.root:
            self.reshard(group)
        reduced = [p for p in group.parameters if p.grad is not None]
        if not reduced:
            return
        self.free(self.reduced)
        shards = shard_bytes(reduced, self.ranks)
        self.reduced = self.fakes.hold(self.ranks * shards, "temporary")
        for p in reduced:
            if block := self.fakes.block_of(p.grad):
                block.part = "gradients"
            p.grad = None
        output = self.fakes.hold(shards, "gradients")
        if group.gradients is None:
            group.gradients = output
        else:
            self.free(output)

    def end_of_backward(self) -> None:
        """The root's gradients, and those of layers whose inputs have none."""
        self.is_awaited = False
        self.reshard(self.root)
        for group in (self.root, *self.groups.values()):
            self.after_backward(group)
            self.free(group.buffer)
            group.buffer = None
            group.places.clear()
        self.order.clear()
        self.free(self.reduced)
        self.reduced = None
        self.copy_out(self.root)
