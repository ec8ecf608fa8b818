"""The peak of memory of a step, by running the step on fake tensors."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dry_run.cuda_like import cuda_like
from dry_run.fake_tensors import SMALL, FakeTensors
from dry_run.peak import Peak


def modules_in(value, depth: int = 4) -> Iterator[torch.nn.Module]:
    """The modules that a value holds: a module itself, the fields of a record, the items of a
    collection, or what was bound to a function by `functools.partial`."""
    if isinstance(value, torch.nn.Module):
        yield value
        return
    inside = []
    if isinstance(value, functools.partial):
        inside = [*value.args, *value.keywords.values()]
    elif isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, each.name) for each in dataclasses.fields(value)]
    for each in inside if depth else ():
        yield from modules_in(each, depth - 1)


class Plan:
    """Predicts the peak of memory of steps on a GPU of a compute capability (None: on the CPU, as
    it is).

    `parts` hold other modules than the model, of which those weights count that the step uses. All
    weights become fake and stay so: the memory of their values is given back."""

    def __init__(self, capability: tuple[int, int] | None, model: torch.nn.Module, *parts):
        self.capability = capability
        self.fakes = FakeTensors()
        self.modules = list(dict.fromkeys(modules_in((model, *parts))))
        known: dict[int, tuple] = {}
        for module in self.modules:
            empty(module, self.fakes, known)
            if module is model:
                of_model = set(known)
        for key, (emptied, _) in known.items():
            if key not in of_model and key == id(emptied):
                self.fakes.uncount(emptied)

    def measure(
        self, step: Callable[[list[dict]], object], batches: list[dict], states: int = 0
    ) -> Peak:
        """The peak of `step(batches)`, which is forward, backward and perhaps the update. The
        batches are all counted, although the same one may be given twice. `states`: bytes of the
        optimizer's states that are there from the start. Raises `CannotPlan`."""
        fakes = self.fakes
        parameters = [p for module in self.modules for p in module.parameters()]
        with contextlib.ExitStack() as stack:
            fakes.restart()
            held = [fakes.hold(states, "optimizer states")]
            stack.callback(lambda: [fakes.release(key) for key in held])
            moved = [fake_batch(batch, fakes, held) for batch in batches]
            if self.capability:
                stack.enter_context(cuda_like(self.capability))
            stack.enter_context(fakes)
            stack.enter_context(watch_modules(fakes))
            step(moved)
            live = fakes.live.values()
            made = [b for b in live if b.phase == "update" and b.part == "temporary"]
            if made:  # the optimizer's states, which are there from the second step on
                fakes.restart()
                step(moved)
            peak = fakes.result([p.grad for p in parameters if p.grad is not None], made)
        for parameter in parameters:
            parameter.grad = None
        return peak


def empty(module: torch.nn.Module, fakes: FakeTensors, known: dict[int, tuple]) -> None:
    """Makes the parameters and buffers of a module fake. Tied ones stay tied: `known` has the
    fake tensors with their originals by the ids of both."""
    for name, part in module.named_modules():
        fakes.names[id(part)] = name
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or not tensor.numel():
                continue
            if id(tensor) not in known:
                emptied = fakes.like(tensor.detach(), "weights")
                if isinstance(tensor, torch.nn.Parameter):
                    emptied = torch.nn.Parameter(emptied, tensor.requires_grad)
                known[id(tensor)] = known[id(emptied)] = emptied, tensor
            setattr(part, key, known[id(tensor)][0])


def fake_batch(batch: dict, fakes: FakeTensors, held: list[int]) -> dict:
    """A batch on the GPU. Large tensors of floating type become fake. Others keep their values,
    which code may read; their memory is added to `held`."""
    moved = dict(batch)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.numel() > SMALL:
                moved[key] = fakes.like(value, "batch")
            else:
                held.append(fakes.hold(value.nbytes, "batch"))
    return moved


@contextlib.contextmanager
def watch_modules(fakes: FakeTensors) -> Iterator[None]:
    """Tells `fakes` which module's forward we are in, and when an optimizer makes its update."""

    def update(begins: bool) -> Callable:
        return lambda *_: setattr(fakes, "updating", begins)

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(fakes.enter),
        torch.nn.modules.module.register_module_forward_hook(fakes.leave, always_call=True),
        register_optimizer_step_pre_hook(update(True)),
        register_optimizer_step_post_hook(update(False)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
