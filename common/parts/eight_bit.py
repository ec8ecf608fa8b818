"""AdamW with states in 8 bits, by bitsandbytes, for --optimizer adamw_8bit."""

import logging
import math

import torch

from common.errors import RunError, first_line, require

# In 8 bits, second moments below 1.6e-7 of the largest in their block become zero, and epsilon
# alone divides the first moment. The largest step is then 341 learning rates at 1e-9, and 1.05 at
# 1e-6 (simulated, with gradients of 1e-9 to 1e-3 in a block).
EPSILON = 1e-6
SMALLEST = 4096  # values: bitsandbytes keeps smaller tensors' states in 32 bits
BLOCK = 256  # values that share a scale


def make_optimizer(
    groups: list[dict],
    embeddings: set[torch.nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW of the parameter `groups`, with its states. Tensors below 4096 values
    stay in 32 bits, which is bitsandbytes' rule, and so do the `embeddings`:
    github.com/huggingface/transformers/issues/14819, by its author. Raises `RunError` if
    bitsandbytes does not work."""
    library = load_bitsandbytes(groups[0]["params"][0].device)
    optimizer = library.optim.AdamW8bit(groups, lr=learning_rate, betas=betas, eps=EPSILON)
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if p in embeddings:
                zeros = [torch.zeros_like(p, dtype=torch.float32) for _ in range(2)]
                optimizer.state[p] = {"step": 0, "state1": zeros[0], "state2": zeros[1]}
            else:
                optimizer.init_state(group, p, number, index)
    return optimizer


def state_bytes(trained: set[torch.nn.Parameter], embeddings: set[torch.nn.Parameter]) -> int:
    """Bytes of the states of the parameters `trained`."""
    in_8bit = {p for p in trained if p.numel() >= SMALLEST} - embeddings
    in_32bit = trained - in_8bit
    scaled = sum(2 * (p.numel() + 4 * math.ceil(p.numel() / BLOCK)) for p in in_8bit)
    return 8 * sum(p.numel() for p in in_32bit) + scaled


def load_bitsandbytes(device: torch.device):
    """bitsandbytes. Raises `RunError` if it is not installed or a step fails on `device`."""
    # On some CPUs bitsandbytes warns that it lacks a 4-bit kernel, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    library = require("bitsandbytes", "--optimizer adamw_8bit")
    trial = torch.nn.Parameter(torch.zeros(SMALLEST, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        library.optim.AdamW8bit([trial]).step()
    except RuntimeError as error:
        raise RunError(
            f"--optimizer adamw_8bit: bitsandbytes {library.__version__} does not work on {device}"
            f" ({first_line(error)}): `pip install -U bitsandbytes`, or use --use_cpu_offload"
        ) from None
    return library
