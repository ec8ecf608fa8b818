"""Which token each mel frame belongs to: monotonic alignment search (Kim et al. 2020) in training,
predicted durations in speaking."""

import torch

from common.device import upcast
from common.layers import full_fp32
from speech.signal.features import valid_mask


@torch.no_grad()
def search(
    means: torch.Tensor,
    mels: torch.Tensor,
    token_lengths: torch.Tensor,
    frame_lengths: torch.Tensor,
) -> torch.Tensor:
    """The token (B, F) of each frame, in order and without leaving one out, so that the frames
    (B, F, 80) are the most probable ones under normal distributions of deviation 1 around their
    tokens' means (B, U, 80). An utterance has at least as many frames as tokens. A frame that is
    padding has the last token. Ties stay with the later token. Nothing waits for the device."""
    with torch.autocast(means.device.type, enabled=False), full_fp32(means.device):
        means, mels = upcast(means), upcast(mels)
        # What a frame adds whatever its token is has no influence.
        scores = mels @ means.transpose(1, 2) - means.square().sum(2)[:, None] / 2  # (B, F, U)
    tokens = torch.arange(scores.shape[2], device=scores.device)
    best = torch.where(tokens == 0, scores[:, 0], -torch.inf)  # of all paths to a token
    moved = [torch.zeros_like(best, dtype=torch.bool)]  # whether the frame before has another token
    for frame in scores.unbind(1)[1:]:
        before = torch.nn.functional.pad(best[:, :-1], (1, 0), value=-torch.inf)
        moved.append(before > best)
        best = torch.maximum(before, best) + frame
    last = token_lengths - 1
    token = last
    path = []
    for frame in range(len(moved) - 1, -1, -1):
        path.append(token)
        has_moved = moved[frame].gather(1, token[:, None])[:, 0]
        token = torch.where(frame < frame_lengths, token - has_moved.long(), last)
    return torch.stack(path[::-1], dim=1)


def durations(path: torch.Tensor, frame_lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """How many valid frames (B, U) each of the `tokens` has in a path (B, F)."""
    valid = valid_mask(frame_lengths, path.shape[1]).to(torch.float32)
    counts = torch.zeros(len(path), tokens, device=path.device)
    return counts.scatter_add(1, path, valid)


def frames_of(means: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """The means (B, U, 80) of the tokens of a path (B, F), as (B, F, 80)."""
    return means.gather(1, path[:, :, None].expand(-1, -1, means.shape[2]))


def ends_of(log_frames: torch.Tensor, lengths: torch.Tensor, speed: float) -> torch.Tensor:
    """Where each token ends (B, U), in frames, by the predicted logarithms (B, U). The running sum
    is rounded: rounding each token, or making it longer as the published code does, would change
    the length of the whole. A text has one frame at least."""
    valid = valid_mask(lengths, log_frames.shape[1])
    frames = (log_frames.exp() / speed).masked_fill(~valid, 0.0)
    return frames.cumsum(1).round().long().clamp_min(1)


def path_of(ends: torch.Tensor, frames: int | torch.Tensor) -> torch.Tensor:
    """The token (B, F) of each of so many frames, by the ends (B, U) of the tokens."""
    positions = torch.arange(frames, device=ends.device)
    path = (ends[:, None] <= positions[None, :, None]).sum(2)
    return path.clamp_max(ends.shape[1] - 1)
