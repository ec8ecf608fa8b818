"""Micro-batches that fit into memory: the largest size for each length of utterances, learned from
out-of-memory errors."""

import math
from collections import Counter

import torch

from common.batches import split_batch
from common.progress import Progress

# Utterances whose lengths differ by less than 20 % share a limit of the micro-batch size.
BUCKET_RATIO = 1.2
# For an utterance alone in its micro-batch: another process may have taken the memory for a moment.
TRIES_OF_ONE = 3


def length_bucket(batch: dict) -> int:
    """The length bucket of a batch's longest utterance."""
    return math.ceil(math.log(max(0.1, *batch["seconds"])) / math.log(BUCKET_RATIO))


def cut_to_fit(micro_batches: list[dict], limits: dict[int, int]) -> list[dict]:
    """Cuts micro-batches down to `limits`, which hold for longer utterances, too."""
    pieces = []
    for batch in micro_batches:
        bucket = length_bucket(batch)
        size = len(batch["names"])
        limit = min((limit for known, limit in limits.items() if known <= bucket), default=size)
        pieces += split_batch(batch, limit) if limit < size else [batch]
    return pieces


def carry_over(progress: Progress, device: torch.device) -> None:
    """Keeps the limits of a resumed run on a GPU like the one that has set them, and says so."""
    now = "CPU"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        now = f"{properties.name} {properties.total_memory}"
    if progress.device and progress.device != now:
        progress.limits.clear()
    progress.device = now
    if progress.limits:
        sizes = [
            f"{size} x {BUCKET_RATIO**bucket:.0f} s" for bucket, size in progress.limits.items()
        ]
        print(f"micro-batches that once ran out of memory stay small: at most {', '.join(sizes)}")


def learn_limit(failed: dict, limits: dict[int, int], failures: Counter) -> bool:
    """Halves the limit for this length. False if one utterance failed `TRIES_OF_ONE` times."""
    size = len(failed["names"])
    if size > 1:
        limits[length_bucket(failed)] = size // 2
        return True
    failures[failed["names"][0]] += 1
    return failures[failed["names"][0]] < TRIES_OF_ONE


def lower_limits(limits: dict[int, int], others: dict[int, int]) -> None:
    """Takes over the limits of another rank that are lower."""
    for bucket, size in others.items():
        limits[bucket] = min(size, limits.get(bucket, size))


def out_of_memory(failed: dict, device: torch.device, what: str = "is repeated in") -> str:
    """The message about a micro-batch that did not fit. `what`: what the global batch does now."""
    size = len(failed["names"])
    seconds = max(failed["seconds"])
    text = f"out of memory with {size} x {seconds:.1f} s"
    return f"{text}: the global batch {what} smaller micro-batches{also_on_this_gpu(device)}"


def too_long(failed: dict, reason: str, device: torch.device) -> str:
    """The message about an utterance that does not fit alone, for this `reason`."""
    name = failed["names"][0]
    seconds = failed["seconds"][0]
    problem = f"{name} ({seconds:.1f} s) does not fit into memory even alone ({reason})"
    advice = f"use --gradient_checkpointing, --max_duration {0.9 * seconds:.1f} or a smaller model"
    return f"{problem}: {advice}{also_on_this_gpu(device)}"


def also_on_this_gpu(device: torch.device) -> str:
    """The other processes on the GPU, for a message; empty if there are none."""
    if device.type != "cuda":
        return ""
    from common.parts.utilisation import gpu_processes

    others = gpu_processes()
    return f"; also on this GPU: {others}" if others else ""
