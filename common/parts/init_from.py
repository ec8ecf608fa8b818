"""The beginning of a new run with the weights of another one: --init_from."""

import torch
from torch import Tensor

from common import checkpoint
from common.errors import UsageError


def initialise(
    model: torch.nn.Module,
    tensors: dict[str, Tensor],
    path: str,
    vocabulary: checkpoint.Vocabulary | None = None,
) -> None:
    """Copies the tensors whose name and shape fit into `model`, and of those that have a row for
    each token the rows of tokens that both vocabularies have. Raises `UsageError` if none fits."""
    own = model.state_dict()
    copied = ""
    if vocabulary and list(vocabulary.tokens) != list(vocabulary.saved):
        tensors, copied = copy_rows(own, tensors, vocabulary)
    fits = {}
    for name, tensor in tensors.items():
        if name in own and own[name].shape == tensor.shape:
            fits[name] = tensor
    if not fits:
        raise UsageError(f"--init_from {path}: none of its {len(tensors)} tensors fits this model")
    model.load_state_dict(fits, strict=False)
    own = checkpoint.state_of(model)
    new = sorted(set(own) - set(fits))
    text = f"initialised {len(fits)} of {len(own)} tensors from {path}"
    if new:
        text += f"; new: {', '.join(new[:5])}" + (" ..." if len(new) > 5 else "")
    print(text + copied)


def copy_rows(
    own: dict[str, Tensor], tensors: dict[str, Tensor], vocabulary: checkpoint.Vocabulary
) -> tuple[dict[str, Tensor], str]:
    """`tensors` with those of a vocabulary in the shape of the model's `own`: the rows of shared
    tokens are theirs, the others the model's. Also says how many rows are copied."""
    numbers = {token: number for number, token in enumerate(vocabulary.saved)}
    shared = [token in numbers for token in vocabulary.tokens]
    rows = torch.tensor([row for row, is_shared in enumerate(shared) if is_shared])
    sources = torch.tensor([numbers[token] for token in vocabulary.tokens if token in numbers])
    moved = dict(tensors)
    for name in vocabulary.names:
        old = moved.pop(name, None)
        if old is None or name not in own or own[name].shape[1:] != old.shape[1:]:
            continue
        # An embedding can have fewer rows than an output layer.
        is_there = (rows < len(own[name])) & (sources < len(old))
        moved[name] = own[name].clone()
        moved[name][rows[is_there]] = old[sources[is_there]].to(own[name].dtype)
    count = sum(shared)
    text = f"; rows of {count} of {len(shared)} tokens are copied, {len(shared) - count} are new"
    return moved, text
