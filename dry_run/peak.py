"""The result of a plan: the peak of memory, its parts, and where it is."""

from dataclasses import dataclass

PARTS = ("weights", "gradients", "optimizer states", "activations", "temporary", "batch")


@dataclass(frozen=True)
class Peak:
    """The peak of GPU memory in a step of a `stage`, training or evaluation. `parts`: bytes of each
    of PARTS; `kernels`: bytes that a kernel allocates inside itself then; `module` and `phase`
    (forward, backward, recomputation, update): where it is, and the `operator` of torch; `guesses`:
    how often the step read a value that a plan does not have; `utterances`: of the micro-batch or
    batch; `host`: bytes of host memory in place of GPU memory."""

    parts: dict[str, int]
    kernels: int
    module: str
    phase: str
    guesses: int = 0
    operator: str = ""
    utterances: int = 0
    stage: str = "training"
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.kernels
