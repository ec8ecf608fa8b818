"""One model divided between the ranks, by torch's FSDP2 (`fully_shard`), for --sharded.

A rank keeps its rows of every weight, gradient and average of AdamW. A layer's whole weights are
there only while the layer computes, those outside of layers from forward to the end of backward.
Every micro-batch adds its gradients up over the ranks, or the sums would be as large as the model.

The recipe's own model has no values meanwhile. What computes is a copy of it, inside of a module
whose forward is all that is done with the copy: the whole weights exist only in there."""

import copy
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from common.device import Setup
from common.errors import UsageError
from common.offload import begin, castable
from common.ranks import Ranks


class Whole(torch.nn.Module):
    """Calls functions of a model whose weights outside of its layers are whole meanwhile."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[torch.nn.Module], object]):
        return function(self.model)


class Sharded:
    """The shards of a recipe's `model`, which is on the host and loses its values. `layers` are the
    types of the layers that are made whole one at a time. `inner` is the copy that computes; its
    parameters, which have the names of the model's, are for the optimizer."""

    def __init__(self, model: torch.nn.Module, layers: tuple[type, ...], setup: Setup):
        parameters = list(model.parameters())
        for p in parameters:
            p.data = p.data.contiguous()  # which FSDP asks for
        in_16_bits = set(castable(model, layers)) if setup.dtype else set()
        self.dtypes = {
            name: setup.dtype if p in in_16_bits else p.dtype
            for name, p in model.named_parameters()
        }
        self.model = model
        self.layers = layers
        self.dtype = setup.dtype
        self.device = setup.device
        self.ranks = setup.ranks
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

    def compute(self, compute_loss: Callable) -> Callable:
        """A recipe's `compute_loss(model, batch)` for the shards."""

        def compute_sharded(model: torch.nn.Module, batch: dict):
            # What is an argument of `whole` would be copied to the device.
            return self.whole(lambda inner: compute_loss(inner, batch))

        return compute_sharded

    def end_pass(self) -> None:
        """Divides the weights outside of layers again. A loss without any target, which has no
        backward pass, leaves them whole."""
        self.whole.reshard()

    @torch.no_grad()
    def fill(self) -> None:
        """Gives the recipe's model its values, on the device: in 16 bits where autocast would cast
        them. All ranks call it."""
        own = dict(self.model.named_parameters())
        with self.ranks.waiting():
            for name, p in self.inner.named_parameters():
                own[name].data = p.full_tensor().to(self.dtypes[name])
        buffers = dict(self.inner.named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name].data

    def empty(self) -> None:
        """Takes the values of the recipe's model away."""
        for p in self.model.parameters():
            p.data = torch.empty(0, dtype=p.dtype, device=self.device)

    def state(self) -> dict[str, torch.Tensor]:
        """The whole state of the model, on the host of the first rank; {} on the others. All ranks
        call it."""
        return whole_tensors(self.inner.state_dict(), self.ranks)

    def end(self) -> None:
        """Makes the recipe's model a usual one, without values yet, on the host. What had 16 bits
        in evaluations will have them on the device, and its fp32 values stay on the host."""
        shapes = {name: p.shape for name, p in self.inner.named_parameters()}
        dtypes = {name: p.dtype for name, p in self.inner.named_parameters()}
        for name, p in self.model.named_parameters():
            p.data = torch.empty(shapes[name], dtype=dtypes[name])
        if self.dtype:  # one GPU may have no room for all in fp32
            begin("weights", self.model, self.layers, self.dtype)


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


def own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The part of a tensor that this rank has, to read and write, and the number of its first
    row."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    most = -(-len(tensor) // mesh.size())  # FSDP2 divides the rows as torch.chunk does
    return tensor.to_local(), most * mesh.get_local_rank()
