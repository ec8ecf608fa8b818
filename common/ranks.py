"""The processes of a run. `Ranks` is the only process of a usual run; `parts/processes.py` has
those of a job that torchrun starts, with the same methods."""

import contextlib
import os

from torch import Tensor

from common.errors import RunError


class CannotSave(RunError):
    """A failure after which the ranks of a run cannot save it together."""


class LostRank(CannotSave):
    """Another rank has ended, or has kept this one waiting for too long."""

    status = 75  # sysexits.h: another attempt may be better; torchrun --max_restarts makes it


def torchrun(name: str, default: int) -> int:
    """A number that torchrun sets in the environment."""
    return int(os.environ.get(name) or default)


class Ranks:
    """The only process of a run, or a stand-in for one of several that are only planned."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def leader(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.first or torchrun("LOCAL_RANK", 0) == 0

    @property
    def machines(self) -> int:
        return torchrun("GROUP_WORLD_SIZE", 1)

    def note_update(self, seconds: float) -> None:
        """Notes how long an update has taken, from which the time limit of later waits follows."""

    def patient(self) -> contextlib.AbstractContextManager:
        """A context in which the other ranks may take long."""
        return contextlib.nullcontext()

    def waiting(self) -> contextlib.AbstractContextManager:
        """A context in which this rank waits. Errors of the connection become `LostRank`."""
        return contextlib.nullcontext()

    def reduce(self, values, op: str = "sum") -> list:
        """The "sum" or "max" over the ranks of each of the numbers, in int64 or float64."""
        return list(values)

    def gather(self, value) -> list:
        """The `value` of every rank, on every rank. It must be picklable."""
        return [value]

    def sum_tensors(self, tensors: list[Tensor]) -> None:
        """Sums each tensor over the ranks, in place."""

    def share_tensors(self, tensors: list[Tensor], owners: list[int]) -> None:
        """Sets each tensor to the values that it has on the rank that owns it."""
