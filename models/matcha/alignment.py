"""Which token each mel frame belongs to: monotonic alignment search (Kim et al. 2020) in training,
predicted durations in speaking."""

import itertools

import torch
from torch import Tensor

from common.device import full_fp32, upcast
from speech.signal.features import valid_mask


@torch.no_grad()
def search(means: Tensor, mels: Tensor, token_lengths: Tensor, frame_lengths: Tensor) -> Tensor:
    """The token (B, F) of each frame, in order and without leaving one out, so that the frames
    (B, F, 80) are the most probable ones under normal distributions of deviation 1 around their
    tokens' means (B, U, 80). An utterance has at least as many frames as tokens. A frame that is
    padding has the last token. Ties stay with the later token. Nothing waits for the device."""
    with torch.autocast(means.device.type, enabled=False), full_fp32(means.device):
        means, mels = upcast(means), upcast(mels)
        # What a frame adds whatever its token is has no influence.
        scores = mels @ means.transpose(1, 2) - means.square().sum(2)[:, None] / 2  # (B, F, U)
    # Of all paths to a token (B, F, U), behind a column for the token before the first. All writes
    # are in place: a launch takes longer than what it computes.
    best = torch.nn.functional.pad(scores, (1, 0), value=-torch.inf)
    best[:, 0, 2:] = -torch.inf
    larger = torch.empty_like(scores[:, 0])
    for before, frame in itertools.pairwise(best.unbind(1)):
        torch.maximum(before[:, :-1], before[:, 1:], out=larger)
        frame[:, 1:].add_(larger)
    moved = best[:, :-1, :-1] > best[:, :-1, 1:]  # whether the frame before has another token
    moved &= valid_mask(frame_lengths, best.shape[1])[:, 1:, None]
    moved = moved.view(torch.int8)  # which can be subtracted
    path = (token_lengths - 1)[:, None].repeat(1, best.shape[1])
    for frame in range(best.shape[1] - 1, 0, -1):
        token = path[:, frame : frame + 1]
        steps = moved[:, frame - 1].gather(1, token)
        torch.sub(token, steps, out=path[:, frame - 1 : frame])
    return path


def durations(path: Tensor, frame_lengths: Tensor, tokens: int) -> Tensor:
    """How many valid frames (B, U) each of the `tokens` has in a path (B, F)."""
    valid = valid_mask(frame_lengths, path.shape[1]).to(torch.float32)
    counts = torch.zeros(len(path), tokens, device=path.device)
    return counts.scatter_add(1, path, valid)


def frames_of(means: Tensor, path: Tensor) -> Tensor:
    """The means (B, U, 80) of the tokens of a path (B, F), as (B, F, 80)."""
    return means.gather(1, path[:, :, None].expand(-1, -1, means.shape[2]))


def ends_of(log_frames: Tensor, lengths: Tensor, speed: float) -> Tensor:
    """Where each token ends (B, U), in frames, by the predicted logarithms (B, U). The running sum
    is rounded: rounding each token, or making it longer as the published code does, would change
    the length of the whole. A text has one frame at least."""
    valid = valid_mask(lengths, log_frames.shape[1])
    frames = (log_frames.exp() / speed).masked_fill(~valid, 0.0)
    return frames.cumsum(1).round().long().clamp_min(1)


def path_of(ends: Tensor, frames: int | Tensor) -> Tensor:
    """The token (B, F) of each of so many frames, by the ends (B, U) of the tokens."""
    positions = torch.arange(frames, device=ends.device)
    path = (ends[:, None] <= positions[None, :, None]).sum(2)
    return path.clamp_max(ends.shape[1] - 1)
