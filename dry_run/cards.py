"""GPUs: how much memory torch sees on them, and what CUDA's libraries keep of it."""

import math
import re
from dataclasses import dataclass, replace

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MOST = 300  # GiB of a GPU: a larger number is the name of a model
# The CUDA context, which torch's allocator does not count: 0.4 to 0.6 GiB by GPU and driver.
CONTEXT = GIB // 2
# Torch's default workspaces of cuBLAS, the second on compute capability 9.x and 10.x.
CUBLAS = 8 * MIB + 128 * KIB
CUBLAS_HOPPER = 32 * MIB
KERNELS = 32 * MIB  # an allowance for cuDNN's workspaces and the buffers of reductions
# An allowance for NCCL, which takes its buffers from the driver, where torch does not count them.
# It is linear in the channels (nccl#986): 544 to 688 MB between A100s with NVLink (nccl#964), of
# which 80 GB have room; cards on PCIe have few channels.
NCCL = 256 * MIB


@dataclass(frozen=True)
class Card:
    """A GPU, or several of them, each with a process of its own."""

    name: str
    total: int  # bytes that torch sees on each
    capability: tuple[int, int]
    count: int = 1


# GiB that torch sees on the smallest usual GPU of a class: the tiers of the preset scripts, then
# single models.
CARDS = tuple(
    Card(name, int(gib * GIB), capability)
    for name, gib, capability in (
        ("4gb", 3.8, (8, 6)),
        ("6gb", 5.8, (8, 6)),
        ("8gb", 7.7, (8, 6)),
        ("12gb", 11.6, (8, 6)),
        ("t4", 14.6, (7, 5)),
        ("16gb", 15.6, (8, 6)),
        ("24gb", 22.0, (8, 6)),
        ("32gb", 31.4, (8, 6)),
        ("a100", 79.1, (8, 0)),
        ("RTX 3060", 11.6, (8, 6)),
        ("RTX 3090", 23.6, (8, 6)),
        ("RTX 4080", 15.6, (8, 9)),
        ("RTX 4090", 23.6, (8, 9)),
        ("RTX 5090", 31.4, (12, 0)),
        ("P100", 15.9, (6, 0)),
        ("V100", 15.8, (7, 0)),
        ("L4", 22.0, (8, 9)),
        ("A10G", 22.0, (8, 6)),
        ("A100-40GB", 39.4, (8, 0)),
        ("A100-80GB", 79.1, (8, 0)),
        ("H100", 79.1, (9, 0)),
        ("H200", 139.7, (9, 0)),
    )
)


def choose_card(text: str | None, device: str, error: type[Exception]) -> Card | None:
    """The card that `text` names, perhaps after the number of them ("2 x 16gb"), or, if it names
    none, the one that `device` names (auto, cpu, cuda, cuda:N); None if `text` is None and no GPU
    is there. Raises an `error` of this type."""
    _, _, index = device.partition(":")
    several = re.fullmatch(r"\s*([1-9]\d{0,4})\s*x(.*)", text or "", re.ASCII | re.IGNORECASE)
    count, name = several.groups() if several else (1, text)
    try:
        card = find_card(name) if name else card_here(int(index) if index.isdecimal() else 0)
    except ValueError as reason:
        raise error(f"--dry_run: {reason}") from None
    if card is None and text is not None:
        raise error("--dry_run: there is no GPU here, so name one, e.g. --dry_run 8GB")
    return card and replace(card, count=int(count))


def find_card(text: str) -> Card:
    """The card of a name in `CARDS` ("8GB" is a tier; case, spaces, hyphens, underscores and the
    maker's words are ignored), or one with a number of GiB ("10", "11.5GiB", "0.05GB"). Raises
    `ValueError`, one line, for anything else."""
    if known := [card for card in CARDS if plain(card.name) == plain(text)]:
        return known[0]
    number = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)[\s_-]*(gi?b)?\s*", text.lower(), re.ASCII)
    if number is None or not 0 < float(number[1]) <= MOST:
        names = ", ".join(card.name for card in CARDS)
        raise ValueError(
            f"{text!r} is not a GPU: give GiB of memory (11.5; at most {MOST}) or one of {names}"
        )
    return Card(f"{float(number[1]):g} GiB", math.ceil(float(number[1]) * GIB), (8, 6))


def plain(name: str) -> str:
    """A name as it is compared. A leading hyphen stays: it is a sign."""
    return re.sub(r"nvidia|geforce|tesla|\s|(?<=\w)[_-]", "", name.lower())


def card_here(index: int = 0) -> Card | None:
    """A visible GPU; None if torch cannot use it."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    return Card(properties.name, properties.total_memory, (properties.major, properties.minor))


def workspace(card: Card) -> int:
    """Bytes that CUDA's libraries keep: cuBLAS and cublasLt a buffer each, an allowance for cuDNN
    and reductions, and one for NCCL between several cards."""
    own = 2 * (CUBLAS_HOPPER if card.capability[0] in (9, 10) else CUBLAS) + KERNELS
    return own + NCCL * (card.count > 1)
