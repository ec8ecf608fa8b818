"""AdamW with states in 8 bits, by bitsandbytes, for --optimizer adamw_8bit."""

import logging
import math

import torch

from common.errors import RunError, first_line, require

# In 8 bits, second moments below 1.6e-7 of the largest in their block become zero, and epsilon
# alone divides the first moment. The largest step is then 341 learning rates at 1e-9, and 1.05 at
# 1e-6: test_largest_step.
EPSILON = 1e-6
SMALLEST = 4096  # values: bitsandbytes keeps smaller tensors' states in 32 bits
BLOCK = 256  # values that share a scale


def make_optimizer(
    groups: list[dict],
    embeddings: set[torch.nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW of the parameter `groups`, with its states. Tensors below 4096 values stay
    in 32 bits, which is bitsandbytes' rule, and so do the `embeddings`:
    github.com/huggingface/transformers/issues/14819, by its author. Raises `RunError` if
    bitsandbytes does not work."""
    library = load_bitsandbytes(groups[0]["params"][0].device)
    optimizer = library.optim.AdamW8bit(groups, lr=learning_rate, betas=betas, eps=EPSILON)
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if p in embeddings:
                averages = {
                    key: torch.zeros_like(p, dtype=torch.float32) for key in ("state1", "state2")
                }
                optimizer.state[p] = {"step": 0, **averages}
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
    """Imports and returns bitsandbytes. Raises `RunError` if it is not installed or a trial step
    fails on `device`."""
    # On some CPUs bitsandbytes warns that it lacks a 4-bit kernel, which nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    library = require("bitsandbytes", "--optimizer adamw_8bit")
    trial = torch.nn.Parameter(torch.zeros(SMALLEST, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        library.optim.AdamW8bit([trial]).step()
    except RuntimeError as error:
        failure = (
            f"--optimizer adamw_8bit: bitsandbytes {library.__version__} does not work on {device}"
        )
        advice = "try `pip install -U bitsandbytes`, or use --use_cpu_offload"
        raise RunError(f"{failure} ({first_line(error)}): {advice}") from None
    return library


def converted(source: dict, target: dict) -> dict:
    """The saved state `source` of a parameter in the form of the state `target`, whose scales, if
    it has any, are set."""
    found = dict(source)
    for key in ("exp_avg", "exp_avg_sq"):
        values = source[key]
        scales = source.get(f"{key}_scales")
        if f"{key}_scales" in target:
            if scales is None:
                values, scales = quantize(values, target[f"{key}_table"].cpu())
            target[f"{key}_scales"].copy_(scales)
        elif scales is not None:
            values = dequantize(values, scales, source[f"{key}_table"])
        found[key] = values
    return found


def quantize(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' blockwise 8-bit codes, in the shape of `values`, and scales, the blocks'
    largest magnitudes. A code is the index of the nearest of the table's 256 ascending values in
    [-1, 1]. bitsandbytes' own function (0.50.2) is wrong on a CPU: it raises 0 and all below 1.6e-5
    of the scale to that."""
    flat = values.reshape(-1).to(table.dtype)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return codes.view(-1)[: len(flat)].view(values.shape), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The fp32 values of blockwise 8-bit `codes`, in their shape."""
    values = table[codes.reshape(-1).long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]
    return values.view(codes.shape)
