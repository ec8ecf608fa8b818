"""Initial weights for training Parakeet from scratch."""

import torch

from speech.features import valid_mask
from speech.parakeet.model import FrozenBatchNorm, Parakeet


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
