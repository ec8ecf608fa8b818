"""One pass over a global batch, and the engine of a run: what the loop asks of a model in training.

`Engine` has everything on one device. The flags of some parts choose another one (`engine_for` in
`setting_up.py`): parts of the model on the host (`parts.offload`), on other GPUs
(`parts.sharding`), or beside a model that stays as it is (`parts.lora`)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common import checkpoint, device, errors, memory, optim
from common.batches import to_device
from common.device import Setup
from common.task import Task


@dataclass
class Outcome:
    """The result of one pass over a global batch's micro-batches. `sums`: one value per loss term,
    on the device; `failed`: the micro-batch that did not fit."""

    sums: torch.Tensor | None = None
    failed: dict | None = None
    reason: str = ""
    stopped: bool = False


def run_global_batch(
    model: torch.nn.Module,
    micro_batches: list[dict],
    totals: dict[str, float],
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]],
    loss_weights: dict[str, float],
    setup: Setup,
    loss_scale: device.LossScale | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Forward and backward of a global batch, a pure function of its arguments. Gradients add up in
    the parameters.

    `totals` is the number of targets of each term in the whole global batch, on all ranks.
    `compute_loss` and `loss_weights` are a `Task`'s. If a micro-batch runs out of memory, the
    outcome says so; any other error passes through."""
    sums = None
    batches = to_device(micro_batches, setup.device)
    for number in range(len(micro_batches)):
        failure = None
        try:
            batch = next(batches)
            with setup.autocast():
                terms = compute_loss(model, batch)
                # A term that has no weight, or no target in the global batch, adds nothing.
                counted = [name for name in terms if totals.get(name)]
                loss = sum(loss_weights[name] * terms[name] / totals[name] for name in counted)
            if isinstance(loss, torch.Tensor):  # or no term has a target in the whole global batch
                (loss * loss_scale.value if loss_scale else loss).backward()
            detached = torch.stack([terms[name].detach() for name in loss_weights])
            sums = detached if sums is None else sums + detached
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            failure = errors.first_line(error)
        # Here, outside the handler, the traceback no longer keeps the failed step's tensors alive.
        batch = terms = loss = detached = None
        if failure is not None:
            return Outcome(failed=micro_batches[number], reason=failure)
        if stop():
            return Outcome(stopped=True)
    return Outcome(sums=sums)


class Engine:
    """A recipe's model on its device, and its optimizer. All ranks call each method together."""

    # Whether other ranks have a part of the state, so that a rank alone cannot save it.
    is_divided = False

    def __init__(self, args, model: torch.nn.Module, task: Task, setup: Setup):
        self.args = args
        self.model = model
        self.task = task
        self.setup = setup
        self.optimizer: torch.optim.Optimizer | None = None
        self.place()

    def place(self) -> None:
        """Moves the model, which is on the host, to where it is trained."""
        self.model.to(self.setup.device)

    @property
    def network(self) -> torch.nn.Module:
        """The module with the parameters of the optimizer, under the names of the model's."""
        return self.model

    # --- an update ---

    def make_optimizer(self) -> None:
        """Makes the optimizer, with its states."""
        self.optimizer = optim.make_optimizer(
            self.groups(), self.network, self.learning_rate(), self.args.optimizer, self.task.adamw
        )

    def learning_rate(self) -> float:
        """The peak learning rate."""
        return self.args.learning_rate or self.task.learning_rate

    def groups(self) -> list[dict]:
        """The parameter groups of the optimizer."""
        return optim.parameter_groups(self.network, self.args.weight_decay, self.task.adamw)

    def compute(
        self,
        micro_batches: list[dict],
        totals: dict[str, float],
        loss_scale: device.LossScale | None,
        stop: Callable[[], bool],
        limits: dict[int, int],
    ) -> Outcome:
        """`run_global_batch` of the model. `limits`: the sizes of micro-batches that fit."""
        return run_global_batch(
            self.network,
            micro_batches,
            totals,
            self.task.compute_loss,
            self.task.loss_weights,
            self.setup,
            loss_scale,
            stop,
        )

    def gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The gradients of this update that this process has, in the order of the parameters."""
        return {p: p.grad for p in self.parameters() if p.grad is not None}

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def sum_gradients(self) -> None:
        """Adds the gradients up over the ranks. A rank without a gradient adds zeros."""
        ranks = self.setup.ranks
        if ranks.size == 1:
            return
        parameters = self.parameters()
        gradients = self.gradients()
        present = ranks.reduce([int(p in gradients) for p in parameters], "max")
        used = [p for p, is_there in zip(parameters, present, strict=True) if is_there]
        for p in used:
            if p not in gradients:
                p.grad = torch.zeros_like(p)
        gradients = self.gradients()
        ranks.sum_tensors([gradients[p] for p in used])

    def norm(self) -> torch.Tensor:
        """The norm of all gradients, a tensor without dimensions."""
        return torch.nn.utils.get_total_norm(list(self.gradients().values()))

    def step(self) -> None:
        """Updates the weights."""
        self.optimizer.step()

    def values(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The values of a parameter that the update changes."""
        return p.detach()

    def rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The part of a tensor that this rank has, to write to, and its first row."""
        return tensor, 0

    # --- evaluation and files ---

    def evaluated(self) -> contextlib.AbstractContextManager[torch.nn.Module]:
        """A context with the recipe's model and its values, on its device."""
        return contextlib.nullcontext(self.model)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of the model as it is saved, at least on the first rank."""
        return checkpoint.state_of(self.model)

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The states of the optimizer by parameter name, at least on the first rank."""
        return optim.optimizer_state(self.optimizer, self.network)

    def load_optimizer_state(self, saved: dict) -> None:
        """Copies what `optimizer_state` returned, of any engine."""
        optim.load_optimizer_state(self.optimizer, self.network, saved, self.rows)

    def end(self) -> None:
        """Makes the recipe's model a usual one, without values yet, when training has ended."""
