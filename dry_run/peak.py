"""The result of a plan: the peak of memory, its parts, and where it is."""

from dataclasses import dataclass

PARTS = ("weights", "gradients", "optimizer states", "activations", "temporary", "batch")


@dataclass(frozen=True)
class Peak:
    """The peak of GPU memory in a step."""

    parts: dict[str, int]  # bytes of each of PARTS
    kernels: int  # bytes that a kernel allocates inside itself then
    module: str
    phase: str  # forward, backward, recomputation, update
    guesses: int = 0  # how often the step read a value that a plan does not have
    operator: str = ""  # of torch
    utterances: int = 0  # of the micro-batch or batch
    stage: str = "training"  # or evaluation
    host: int = 0  # bytes of host memory in place of GPU memory

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.kernels
