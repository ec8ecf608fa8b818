"""Initial weights: of a whole Parakeet, or of the pieces of a new vocabulary."""

import torch

from models.parakeet.model import FrozenBatchNorm, Parakeet
from speech.signal.features import valid_mask

RIDGE = 0.1  # of the inputs' mean variance


@torch.no_grad()
def fit_to_data(model: Parakeet, batch: dict) -> None:
    """Fits random weights to a batch of training utterances on the host: the output of the
    subsampling gets mean 0 and deviation 1, or the residual branches would drown it, and BatchNorm
    gets its statistics, layer by layer."""
    model.eval()
    x, lengths, frames = model.mel(batch)
    x = model.encoder.subsample(x, lengths)
    x = x[valid_mask(torch.tensor(frames), x.shape[1])]  # (N, D)
    mean = x.mean(0)
    deviation = (x - mean).std()
    linear = model.encoder.subsampling.linear
    linear.weight /= deviation
    linear.bias.copy_((linear.bias - mean / model.encoder.scale) / deviation)
    norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm)]
    for norm in norms:
        norm.measures = True
    model.encode(batch)
    for norm in norms:
        norm.measures = False
    model.train()


@torch.no_grad()
def fit_new_rows(
    model: Parakeet,
    batch: dict,
    new: list[int],
    shares: torch.Tensor,
    old: dict[str, torch.Tensor],
    pieces: int,
) -> None:
    """Sets the output rows of the pieces `new` by a batch of training utterances on the host: each
    of them has its share, of `shares` (N,), of the probability that the `pieces` of the model,
    whose tensors were `old`, had together. So the model still knows where something is said. (The
    mean of the old rows would not do: a trained row is far below zero wherever its piece is not
    said. It begins with twice the loss of random rows.)"""
    model.eval()
    encoded, frames = model.encode(batch)  # (B, T, D)
    inputs = {}
    if "ctc_head.weight" in old:
        parts = [encoded[row, :count] for row, count in enumerate(frames)]
        inputs["ctc_head"] = torch.cat(parts)
    if "joint.head.weight" in old:
        inputs["joint.head"] = joined(model, batch, encoded, frames)
    for name, x in inputs.items():
        head = model.get_submodule(name)
        weight = old[f"{name}.weight"][:pieces].flatten(1)
        logits = x @ weight.T + old[f"{name}.bias"][:pieces]
        row, bias = regression(x, logits.logsumexp(1))
        head.weight[new] = row.view(1, -1, *[1] * (head.weight.dim() - 2))
        head.bias[new] = bias + shares.log()
    model.train()


def joined(model: Parakeet, batch: dict, encoded: torch.Tensor, frames: list[int]) -> torch.Tensor:
    """(N, J) what the joint network's output layer sees of `encoded` (B, T, D), if the labels are
    said at an even speed."""
    projected = model.encoder_projector(encoded)
    predicted = model.predict(batch["tokens"])  # (B, U + 1, J)
    parts = []
    lengths = batch["tokens_lengths_host"].tolist()
    for row, (count, length) in enumerate(zip(frames, lengths, strict=True)):
        said = torch.arange(count) * (length + 1) // count  # labels so far
        parts.append((projected[row, :count] + predicted[row, said]).relu())
    return torch.cat(parts)


def regression(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row (D,) and bias of a ridge regression of `targets` (N,) on `inputs` (N, D)."""
    mean = inputs.mean(0)
    x = inputs - mean
    covariance = x.T @ x / len(x)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean() + 1e-12)
    row = torch.linalg.solve(covariance, x.T @ (targets - targets.mean()) / len(x))
    return row, targets.mean() - row @ mean
