"""One model divided between the ranks, by torch's FSDP2 (`fully_shard`), for --sharded.

A rank keeps its rows of every weight, gradient and average of AdamW. A layer's whole weights are
there only while the layer computes, those outside of layers from forward to the end of backward.
Every micro-batch adds its gradients up over the ranks, or the sums would be as large as the model.

The recipe's own model has no values meanwhile. What computes is a copy of it, inside of a module
whose forward is all that is done with the copy: the whole weights exist only in there."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from common.device import LossScale
from common.engine import Engine, Outcome, run_global_batch
from common.errors import UsageError
from common.limits import learn_limit, out_of_memory, too_long
from common.parts import processes
from common.parts.offload import begin, castable
from common.ranks import CannotSave, LostRank, Ranks


class InPass(CannotSave):
    """A rank cannot continue while the others wait for its part of the model."""


class Restart(InPass):
    """A job that has to start anew, from its last checkpoint; torchrun --max_restarts does it."""

    status = LostRank.status


class Whole(torch.nn.Module):
    """Calls functions of a model whose weights outside of its layers are whole meanwhile."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[torch.nn.Module], object]):
        return function(self.model)


class Sharded(Engine):
    """The engine of --sharded. The recipe's model loses its values; `inner` computes."""

    is_divided = True

    def place(self) -> None:
        model = self.model
        setup = self.setup
        layers = self.task.checkpointed
        parameters = list(model.parameters())
        for p in parameters:
            p.data = p.data.contiguous()  # which FSDP asks for
        in_16_bits = set(castable(model, layers)) if setup.dtype else set()
        self.dtypes = {
            name: setup.dtype if p in in_16_bits else p.dtype
            for name, p in model.named_parameters()
        }
        self.inner = copy.deepcopy(model, {id(p): p for p in parameters})  # without the parameters
        self.whole = Whole(self.inner)
        mesh = init_device_mesh(setup.device.type, (setup.ranks.size,))
        try:
            for module in reversed(list(self.inner.modules())):  # inner ones first
                if isinstance(module, layers):
                    fully_shard(module, mesh=mesh)
            fully_shard(self.whole, mesh=mesh)
        except ValueError as error:  # such as a parameter without a dimension
            raise UsageError(f"--sharded: {error}") from None
        for module in self.whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum over the ranks
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self.inner.to(setup.device)  # its buffers
        self.empty()
        model.to(setup.device)

    @property
    def network(self) -> torch.nn.Module:
        return self.inner

    def compute(
        self,
        micro_batches: list[dict],
        totals: dict[str, float],
        loss_scale: LossScale | None,
        stop: Callable[[], bool],
        limits: dict[int, int],
    ) -> Outcome:
        """Raises `InPass` or `Restart` if a micro-batch does not fit: others wait for this rank."""
        ranks = self.setup.ranks

        def compute_loss(model: torch.nn.Module, batch: dict) -> dict[str, torch.Tensor]:
            # What is an argument of `whole` would be copied to the device.
            terms = self.whole(lambda inner: self.task.compute_loss(inner, batch))
            if "repeated" in batch:
                terms = {name: 0.0 * term for name, term in terms.items()}
            return terms

        def all_stop() -> bool:
            """All ranks stop after the same micro-batch."""
            return ranks.reduce([int(stop())], "max") != [0]

        with ranks.waiting():
            outcome = run_global_batch(
                self.inner,
                as_many_on_every_rank(micro_batches, ranks),
                totals,
                compute_loss,
                self.task.loss_weights,
                self.setup,
                loss_scale,
                all_stop,
            )
        if outcome.failed:
            raise self.restart_smaller(outcome, limits)
        # A loss without any target, which has no backward pass, leaves weights whole.
        self.whole.reshard()
        return outcome

    def restart_smaller(self, outcome: Outcome, limits: dict[int, int]) -> InPass:
        """The error of a rank that is out of memory: the job has to start anew. The micro-batch
        size that fits is written beside the checkpoints."""
        if len(outcome.failed["names"]) == 1:
            return InPass(too_long(outcome.failed, outcome.reason, self.setup.device))
        learn_limit(outcome.failed, limits, Counter())
        processes.write_limits(self.args.checkpoint_dir, self.setup.ranks, limits)
        problem = out_of_memory(outcome.failed, self.setup.device, "starts anew with")
        return Restart(f"{problem}; torchrun --max_restarts does so, or --resume auto")

    def sum_gradients(self) -> None:
        """FSDP has done it in the backward passes."""

    def norm(self) -> torch.Tensor:
        norm = super().norm()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if not isinstance(tensor, DTensor):
            return tensor, 0
        mesh = tensor.device_mesh
        most = -(-len(tensor) // mesh.size())  # FSDP2 divides the rows as torch.chunk does
        return tensor.to_local(), most * mesh.get_local_rank()

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[torch.nn.Module]:
        self.fill()
        try:
            yield self.model
        finally:
            self.empty()

    @torch.no_grad()
    def fill(self) -> None:
        """Gives the recipe's model its values, on the device: in 16 bits where autocast would cast
        them. All ranks call it."""
        own = dict(self.model.named_parameters())
        with self.setup.ranks.waiting():
            for name, p in self.inner.named_parameters():
                own[name].data = p.full_tensor().to(self.dtypes[name])
        buffers = dict(self.inner.named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name].data

    def empty(self) -> None:
        """Takes the values of the recipe's model away."""
        for p in self.model.parameters():
            p.data = torch.empty(0, dtype=p.dtype, device=self.setup.device)

    def state(self) -> dict[str, torch.Tensor]:
        return whole_tensors(self.inner.state_dict(), self.setup.ranks)

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        states = super().optimizer_state()
        return {name: whole_tensors(each, self.setup.ranks) for name, each in states.items()}

    def end(self) -> None:
        """Leaves a usual model without values. Parameters that had 16 bits in evaluations will have
        them on the device, and their fp32 values stay on the host."""
        shapes = {name: p.shape for name, p in self.inner.named_parameters()}
        dtypes = {name: p.dtype for name, p in self.inner.named_parameters()}
        for name, p in self.model.named_parameters():
            p.data = torch.empty(shapes[name], dtype=dtypes[name])
        if self.setup.dtype:  # one GPU may have no room for all in fp32
            begin("weights", self.model, self.task.checkpointed, self.setup.dtype)


@torch.no_grad()
def whole_tensors(tensors: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Tensors of which each rank may have its rows only as whole ones, on the host of the first
    rank; {} on the others. All ranks call it."""
    whole = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            with ranks.waiting():
                tensor = tensor.full_tensor()
        if ranks.first:
            whole[name] = tensor.cpu()
    return whole


def as_many_on_every_rank(micro_batches: list[dict], ranks: Ranks) -> list[dict]:
    """The micro-batches of this rank and, so that all ranks make the same number of passes,
    repetitions of the last one, which count nothing. A rank without any repeats another rank's."""
    most, none = ranks.reduce([len(micro_batches), int(not micro_batches)], "max")
    repeated = micro_batches[-1:]
    if none:
        repeated = [batches[0] for batches in ranks.gather(repeated) if batches][:1]
    missing = most - len(micro_batches)
    return micro_batches + [{**batch, "repeated": True} for batch in repeated] * missing
