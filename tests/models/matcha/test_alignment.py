"""Monotonic alignment search against all paths, and durations in speaking."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.matcha import alignment


def best_path(means: torch.Tensor, mels: torch.Tensor) -> tuple[list[int], float]:
    """The path of the highest probability among all that are monotonic and have every token."""
    density = torch.distributions.Normal(means[None], 1.0).log_prob(mels[:, None]).sum(2)
    frames, tokens = density.shape
    best = None
    for ends in itertools.combinations(range(1, frames), tokens - 1):
        path = np.searchsorted(ends, np.arange(frames), side="right").tolist()
        total = float(density[torch.arange(frames), path].sum())
        if best is None or total > best[1]:
            best = path, total
    return best


@pytest.mark.parametrize("seed", range(3))
def test_the_path_is_the_best_of_all(seed):
    torch.manual_seed(seed)
    tokens, frames = torch.tensor([1, 2, 4, 4, 3]), torch.tensor([5, 2, 4, 9, 7])
    means = torch.randn(5, 4, 80, dtype=torch.float64)
    mels = torch.randn(5, 9, 80, dtype=torch.float64) / 3
    path = alignment.search(means, mels, tokens, frames)
    counts = alignment.durations(path, frames, 4)
    for row, (u, f) in enumerate(zip(tokens.tolist(), frames.tolist(), strict=True)):
        expected, _ = best_path(means[row, :u], mels[row, :f])
        assert path[row, :f].tolist() == expected
        assert counts[row].tolist() == np.bincount(expected, minlength=4).tolist()
        frames_of = alignment.frames_of(means, path)[row, :f]
        assert torch.equal(frames_of, means[row, expected])


def test_the_search_in_fp32_finds_a_path_as_probable():
    torch.manual_seed(0)
    means, mels = torch.randn(3, 40, 80), torch.randn(3, 200, 80) * 2
    tokens, frames = torch.tensor([40, 12, 31]), torch.tensor([200, 150, 31])

    def total(path: torch.Tensor, row: int) -> float:
        chosen = means[row, path[row, : frames[row]]].double()
        return float((chosen - mels[row, : frames[row]].double()).square().sum())

    exact = alignment.search(means.double(), mels.double(), tokens, frames)
    found = alignment.search(means, mels, tokens, frames)
    for row in range(3):
        assert total(found, row) == pytest.approx(total(exact, row), rel=1e-6)
        steps = found[row, : frames[row]].diff()
        assert set(steps.tolist()) <= {0, 1} and found[row, frames[row] - 1] == tokens[row] - 1


def test_a_frame_takes_four_launches():
    """On a GPU a launch takes longer than what it computes."""
    launched = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            is_view = any(each.alias_info for each in function._schema.returns)
            is_written = any(
                each.alias_info and each.alias_info.is_write for each in function._schema.arguments
            )
            if is_written or not is_view:
                launched.append(function)
            return function(*args, **(kwargs or {}))

    lengths = torch.tensor([40, 31]), torch.tensor([200, 150])
    with Launches():
        alignment.search(torch.randn(2, 40, 80), torch.randn(2, 200, 80), *lengths)
    assert 2 * 200 < len(launched) < 4 * 200 + 30


def test_predicted_durations_keep_the_length_of_the_whole():
    log_frames = torch.tensor([[0.5, 1.3, 2.2, 0.9], [1.4, 1.4, 1.4, 1.4]]).log()
    lengths = torch.tensor([4, 3])
    ends = alignment.ends_of(log_frames, lengths, speed=1.0)
    assert ends.tolist() == [[1, 2, 4, 5], [1, 3, 4, 4]]
    assert alignment.path_of(ends, 6).tolist() == [[0, 1, 2, 2, 3, 3], [0, 1, 1, 2, 3, 3]]
    slow = alignment.ends_of(log_frames, lengths, speed=0.5)
    assert slow[:, -1].tolist() == [10, 8]
    silent = alignment.ends_of(torch.full((1, 2), -9.0), torch.tensor([2]), speed=1.0)
    assert silent.tolist() == [[1, 1]]
