"""Fake tensors, which have no values, on the CPU, and a count of the memory that they would take.

A fake tensor has shape, strides, type and an address, but no memory behind it. `FakeTensors` runs
no kernel on it: an operator's result has the shape that torch's kernels for the device "meta" give.
Everything else is torch's own code: autograd, its accumulation of gradients, checkpointing,
optimizers. So a step on fake tensors allocates and frees what a real one does, in the same order,
in seconds and without a GPU."""

import bisect
import functools
import mmap
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dry_run.kernels import internal_bytes
from dry_run.peak import PARTS, Peak

ROUNDING = 512  # bytes: the CUDA allocator's
# Values: a tensor that is no larger and depends on no fake one is computed, because code reads
# lengths.
SMALL = 1 << 16
ROUNDS = 16  # of a loop that asks whether to continue
READ = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}  # they return a value
CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}
aten = torch.ops.aten
# Views that their schemas do not show.
SAME_MEMORY = {
    aten.lift_fresh.default,
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


class CannotPlan(RuntimeError):
    """The step needs something that a plan does not have; the message says what."""


@dataclass
class AllocatedBlock:
    """A storage: its bytes, its part, and its life, in numbers of allocations and frees."""

    size: int
    part: str
    phase: str
    born: int
    died: float = float("inf")


class Operator:
    """An operator of torch, as a plan has to know it. `kind`: "view" if it returns another shape of
    the same memory or changes that of its input, "in place" if it only changes values of its
    inputs, which are `written`, else "compute"."""

    def __init__(self, function):
        arguments = function._schema.arguments
        self.returns = function._schema.returns
        self.name = function._schema.name
        self.has_device = any(a.name == "device" for a in arguments)
        self.written = [
            (i, a.name) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        # Results that are inputs.
        self.kept = [bool(r.alias_info and r.alias_info.is_write) for r in self.returns]
        if torch.Tag.inplace_view in function.tags or function in SAME_MEMORY:
            self.kind = "view"
        elif self.written:
            self.kind = "in place" if all(self.kept) else "compute"
        else:
            self.kind = "view" if any(r.alias_info for r in self.returns) else "compute"

    def inputs_written(self, args: tuple, kwargs: dict) -> list:
        return [
            args[i] if i < len(args) else kwargs[name]
            for i, name in self.written
            if i < len(args) or name in kwargs
        ]


def tensors_in(values: Iterable) -> list[Tensor]:
    """The tensors among arguments of an operator, and those in lists of them."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def signature(value):
    """A key of all that the shapes of an operator's results depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    return type(value), value


def holders(tensor: Tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def holders_of_a_sum() -> tuple[int, int]:
    """The holders of a gradient that autograd alone holds, while it adds another one to it."""
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is aten.add.Tensor and torch._C._current_autograd_node():
                found.append(holders(args[0]))
            return function(*args, **kwargs or {})

    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True, device="cpu")
        y = 1 * x + 2 * x
    with Watch():
        y.backward()
    return found[0]


def replaced(value, replace: Callable[[Tensor], Tensor]):
    """A value with other tensors, also in lists and tuples."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(each, replace) for each in value)
    return value


class FakeTensors(TorchDispatchMode):
    """While it is active, counts the storages that operators allocate until they are freed, and
    lets no kernel run on fake tensors."""

    def __init__(self):
        super().__init__()
        self.operators: dict[object, Operator] = {}
        # Of operators' results, as tensors of the device "meta".
        self.shapes: dict[tuple, object] = {}
        self.blocks: list[AllocatedBlock] = []
        self.live: dict[int, AllocatedBlock] = {}  # by address
        self.kept: list = []  # tensors of the device "meta", which are weights
        # Weights that count once they are read, by address.
        self.unread: dict[int, AllocatedBlock] = {}
        self.clock = 0  # allocations and frees
        self.now = 0  # bytes
        self.peak = 0
        self.peak_time = 0
        self.peak_internal = 0
        self.guesses = 0
        self.conditions = 0  # that were guessed
        self.names: dict[int, str] = {}  # of modules
        self.stack: list[str] = []  # of names of modules in whose forward we are
        # Autograd's sequence numbers at which the innermost module changed, and to which.
        self.entered: list[int] = []
        self.innermost: list[str] = []
        self.place = ("", "forward")
        self.operator = ""  # of torch
        self.peak_operator = ""
        self.updating = False  # an optimizer makes its update

    def __enter__(self):
        self.alone = holders_of_a_sum()
        return super().__enter__()

    # --- storages ---

    def make(
        self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype, part: str = ""
    ) -> Tensor:
        """A fake tensor of this shape."""
        size = tuple(size)
        stride = tuple(stride)
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        nbytes = (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            memory = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ)
        except (OSError, OverflowError):
            problem = f"no {nbytes / 2**30:.1f} GiB of addresses are left (see ulimit -v)"
            raise CannotPlan(problem) from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        address = flat.data_ptr()
        weakref.finalize(memory, self.freed, address).atexit = False
        self.allocated(address, nbytes, part)
        return flat.view(dtype).as_strided(size, stride)

    def allocated(self, address: int, nbytes: int, part: str) -> None:
        size = -(-nbytes // ROUNDING) * ROUNDING
        self.clock += 1
        self.now += size
        phase = self.locate()[1]
        part = part or ("activations" if phase == "forward" else "temporary")
        block = self.live[address] = AllocatedBlock(size, part, phase, self.clock)
        self.blocks.append(block)
        self.look(0)

    def freed(self, address: int) -> None:
        self.unread.pop(address, None)
        if block := self.live.pop(address, None):
            self.clock += 1
            self.now -= block.size
            block.died = self.clock

    def count(self, results) -> None:
        """Counts the storages of tensors with values, whose keys are no addresses of fake ones."""
        for tensor in tensors_in([results]):
            storage = tensor.untyped_storage()
            key = -storage.data_ptr()
            if storage.nbytes() and key not in self.live:
                self.allocated(key, storage.nbytes(), "")
                weakref.finalize(storage, self.freed, key).atexit = False

    def adopt(self, written: list) -> None:
        """Small tensors with values become fake when a fake one is written to them."""
        for tensor in tensors_in(written):
            if tensor.device.type == "cpu" and tensor.numel() and self.block_of(tensor) is None:
                storage = tensor.untyped_storage()
                self.freed(-storage.data_ptr())  # if it was counted
                self.allocated(storage.data_ptr(), storage.nbytes(), "")
                weakref.finalize(storage, self.freed, storage.data_ptr()).atexit = False

    def hold(self, nbytes: int, part: str) -> int:
        """Counts memory without a fake tensor, until `release` gets the key that is returned."""
        key = -1 - self.clock
        self.allocated(key, nbytes, part)
        return key

    release = freed

    def weigh(self, tensor: Tensor, size: int) -> int:
        """Lets a fake tensor count as `size` bytes. Returns what it counted as."""
        block = self.block_of(tensor)
        before = block.size
        self.now += size - before
        block.size = size
        return before

    def restart(self) -> None:
        """Forgets the peak and what is no longer there."""
        self.blocks = list(self.live.values())
        self.peak = 0
        self.peak_internal = 0
        self.guesses = 0
        self.entered = []
        self.innermost = []
        self.look(0)
        self.peak_time = self.clock

    def look(self, internal: int) -> None:
        """Notes the peak, if this is one."""
        if self.now + internal > self.peak:
            self.peak = self.now + internal
            self.peak_time = self.clock
            self.peak_internal = internal
            self.place = self.locate()
            self.peak_operator = self.operator

    def block_of(self, tensor: Tensor) -> AllocatedBlock | None:
        """The block of a fake tensor, None of another one."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        return self.live.get(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())

    def like(self, tensor: Tensor, part: str, dtype: torch.dtype | None = None) -> Tensor:
        """A fake tensor of the shape of `tensor`, and perhaps of another type."""
        return self.make(tensor.shape, tensor.stride(), dtype or tensor.dtype, part)

    # --- where we are ---

    def locate(self) -> tuple[str, str]:
        """The innermost module and the phase: forward, backward, recomputation (of a checkpointed
        module) or update."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.stack[-1] if self.stack else "", "update" if self.updating else "forward"
        phase = "recomputation" if torch.is_grad_enabled() else "backward"
        if self.stack:
            return self.stack[-1], phase
        position = bisect.bisect_right(self.entered, node._sequence_nr()) - 1
        return self.innermost[position] if 0 <= position < len(self.innermost) - 1 else "", phase

    def enter(self, module: torch.nn.Module, inputs) -> None:
        self.stack.append(self.names.get(id(module), type(module).__name__))
        self.note_change()

    def leave(self, module: torch.nn.Module, inputs, output) -> None:
        self.stack.pop()
        self.note_change()

    def note_change(self) -> None:
        self.entered.append(torch.autograd._get_sequence_nr())
        self.innermost.append(self.stack[-1] if self.stack else "")

    # --- operators ---

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # or torch wraps the method below to hide it from torch.compile, which costs as much as it
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operator = self.operators.get(function)
        if operator is None:
            operator = self.operators[function] = Operator(function)
        self.operator = operator.name
        tensors = tensors_in((*args, *kwargs.values()))
        is_fake = False
        for tensor in tensors:
            if self.unread:
                self.note_read(tensor)
            if tensor.device.type == "meta":
                self.note_weight(tensor)
                is_fake = True
            elif not is_fake:
                is_fake = self.block_of(tensor) is not None
        if operator.kind == "view" or (operator.name in READ and not is_fake):
            return function(*args, **kwargs)
        if operator.name in READ:
            return self.guess(tensors[0].dtype)
        if is_fake and self.adds_in_place(function, args, kwargs):
            return args[0]
        if operator.kind == "in place" and is_fake:
            written = operator.inputs_written(args, kwargs)
            self.adopt(written)
            self.look(internal_bytes(operator.name, tensors, written))
            if not operator.returns:
                return None
            return written[0] if len(operator.returns) == 1 else tuple(written)
        if not is_fake and self.is_small(function, operator, args, kwargs):
            results = function(*args, **kwargs)
            if operator.kind == "compute":
                self.count(results)
            return results
        return self.compute(function, operator, args, kwargs, tensors)

    def guess(self, dtype: torch.dtype) -> float | int | bool:
        """A value that is not known. Every `ROUNDS`th condition does not hold: a loop ends."""
        self.guesses += 1
        if dtype is torch.bool:
            self.conditions += 1
            return self.conditions % ROUNDS != 0
        return 1.0 if dtype.is_floating_point else 1

    def note_weight(self, tensor: Tensor) -> None:
        """Counts a tensor of the device "meta": a frozen part that was not handed to the plan."""
        storage = tensor.untyped_storage()
        key = -storage._cdata
        if key not in self.live:
            self.kept.append(storage)
            size = -(-storage.nbytes() // ROUNDING) * ROUNDING
            self.was_there(key, AllocatedBlock(size, "weights", "", 0))

    def uncount(self, tensor: Tensor) -> None:
        """Counts a fake weight only if it is read: what no step uses stays on the host."""
        block = self.live.pop(tensor.data_ptr())
        self.blocks.remove(block)
        self.now -= block.size
        self.unread[tensor.data_ptr()] = block

    def note_read(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            address = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
            if block := self.unread.pop(address, None):
                self.was_there(address, replace(block, born=0))

    def was_there(self, key: int, block: AllocatedBlock) -> None:
        """Counts a block that was there at every earlier peak."""
        self.live[key] = block
        self.blocks.append(block)
        self.now += block.size
        self.peak += block.size

    def adds_in_place(self, function, args: tuple, kwargs: dict) -> bool:
        """Whether autograd adds two gradients, and the first is nobody else's: it would write the
        sum to its memory, if no mode were active."""
        return (
            function is aten.add.Tensor
            and not kwargs
            and torch._C._current_autograd_node() is not None
            and not torch.is_grad_enabled()
            and isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and args[0].dtype == args[1].dtype
            and aten.is_non_overlapping_and_dense(args[0])
            and holders(args[0]) == self.alone
        )

    def is_small(self, function, operator: Operator, args: tuple, kwargs: dict) -> bool:
        """Whether all results of an operator without fake inputs are small enough to be
        computed."""
        try:
            results = self.on_meta(function, operator, args, kwargs)
        except (NotImplementedError, RuntimeError):
            return True  # its shape depends on values
        return all(r.numel() <= SMALL for r in tensors_in([results]))

    def on_meta(self, function, operator: Operator, args: tuple, kwargs: dict):
        """The results of an operator as tensors of the device "meta"."""
        key = function, signature(args), signature(tuple(kwargs.items()))
        if key not in self.shapes:
            known: dict[int, Tensor] = {}

            def meta(tensor: Tensor) -> Tensor:
                if id(tensor) not in known:
                    known[id(tensor)] = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                    )
                return known[id(tensor)]

            args = replaced(args, meta)
            kwargs = {name: replaced(value, meta) for name, value in kwargs.items()}
            if operator.has_device:
                kwargs |= {"device": torch.device("meta")}
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            self.shapes[key] = function(*args, **kwargs)
        return self.shapes[key]

    def compute(self, function, operator: Operator, args: tuple, kwargs: dict, tensors: list):
        """Fake results of an operator."""
        if special := SPECIAL.get(operator.name):
            results = special(self, *args, **kwargs)
        else:
            try:
                results = self.on_meta(function, operator, args, kwargs)
            except NotImplementedError as error:
                raise CannotPlan(f"torch knows no shapes of {operator.name}: {error}") from None
        if operator.name in CONVOLUTIONS:
            inputs = tensors[1:3] if operator.name.endswith("backward") else tensors[:2]
            results = in_format(results, inputs)
        results = replaced(results, lambda r: self.make(r.shape, r.stride(), r.dtype))
        self.look(internal_bytes(operator.name, tensors, tensors_in([results])))
        if any(operator.kept):
            written = iter(operator.inputs_written(args, kwargs))
            results = tuple(
                next(written) if k else r for k, r in zip(operator.kept, results, strict=True)
            )
        return results

    # --- the result ---

    def result(self, gradients: Iterable[Tensor], states: Iterable[AllocatedBlock] = ()) -> Peak:
        """The peak so far. `gradients` that are still there; `states`: the optimizer's blocks."""
        for block in states:
            block.part = "optimizer states"
        for gradient in gradients:
            if block := self.block_of(gradient):
                block.part = "gradients"
        parts = dict.fromkeys(PARTS, 0)
        for block in self.blocks:
            if block.born <= self.peak_time < block.died:
                parts[block.part] += block.size
        operator = self.peak_operator.removeprefix("aten::")
        return Peak(parts, self.peak_internal, *self.place, self.guesses, operator)


def channels_last(tensor: Tensor) -> bool:
    """Whether torch takes a tensor (B, C, H, W) for one that lies in memory as (B, H, W, C)."""
    if tensor.dim() != 4 or tensor.stride(1) == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        ambiguous = dim == 0 and least == tensor.stride(1)
        if tensor.size(dim) == 0 or tensor.stride(dim) < least or ambiguous:
            return False
        least = tensor.stride(dim) * max(1, tensor.size(dim))
    return True


def in_format(results, inputs: list[Tensor]):
    """The results of a convolution in its memory format, which the device "meta" does not tell."""
    if not any(map(channels_last, inputs)):
        return results
    last = torch.channels_last
    return replaced(
        results, lambda r: torch.empty_like(r, memory_format=last) if r.dim() == 4 else r
    )


def _rows(fakes: FakeTensors, condition: Tensor) -> Tensor:
    """How many values of a mask are true is not known: all of them, which is the most memory."""
    fakes.guesses += 1
    return torch.empty(condition.numel(), condition.dim(), dtype=torch.long, device="meta")


def _unique_consecutive(fakes: FakeTensors, x: Tensor, *rest, **named) -> tuple:
    """How many values differ from the one before is not known: all of them."""
    fakes.guesses += 1
    empty = torch.empty(0, dtype=torch.long, device="meta")
    return torch.empty_like(x, device="meta").flatten(), empty, empty


def _index(fakes: FakeTensors, x: Tensor, indices: list) -> Tensor:
    """Masks count as the positions at which they are true."""
    positions = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            is_known = not index.is_meta and fakes.block_of(index) is None
            positions += (index.nonzero() if is_known else _rows(fakes, index)).unbind(1)
    return aten.index(
        x.to("meta"), [index if index is None else index.to("meta") for index in positions]
    )


def _ctc(
    fakes: FakeTensors, log_probs: Tensor, targets: Tensor, frames, lengths, *rest, **named
) -> tuple:
    """CUDA's kernel keeps log_alpha (B, T, 2 U + 1)."""
    longest = int(max(lengths)) if len(lengths) else 0
    shape = (log_probs.shape[1], log_probs.shape[0], 2 * longest + 1)
    return log_probs.new_empty(shape[0], device="meta"), log_probs.new_empty(shape, device="meta")


def _ctc_backward(
    fakes: FakeTensors, gradient: Tensor, log_probs: Tensor, *rest, **named
) -> Tensor:
    return torch.empty_like(log_probs, device="meta")


SPECIAL = {
    "aten::nonzero": _rows,
    "aten::unique_consecutive": _unique_consecutive,
    "aten::index": _index,
    "aten::_ctc_loss": _ctc,
    "aten::_ctc_loss_backward": _ctc_backward,
}
