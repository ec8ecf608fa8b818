"""The report of a plan: the memory at the peak by kind, where the peak is, and whether it fits on a
card."""

import textwrap
from collections.abc import Sequence

from dry_run.cards import CONTEXT, GIB, MIB, Card, workspace
from dry_run.peak import PARTS, Peak

# Percent of a card that stay free: the caching allocator reserves 3 to 10 % more than is allocated,
# and others use the card.
MARGIN = 10


def needed(peak: Peak, card: Card) -> int:
    """Bytes of the card that a step takes, with workspaces and the context of CUDA."""
    return peak.total + workspace(card) + CONTEXT


def room(card: Card) -> int:
    """Bytes that a step may allocate so that the margin of the card stays free."""
    return card.total * (100 - MARGIN) // 100 - workspace(card) - CONTEXT


def verdict(peak: Peak, card: Card) -> tuple[str, int]:
    """A verdict and its exit status: "fits" (0), "tight" (0) if less than the margin stays free,
    "does not fit" (3)."""
    if peak.total <= room(card):
        return "fits", 0
    return ("tight", 0) if needed(peak, card) <= card.total else ("does not fit", 3)


def describe(peak: Peak, card: Card, what: str, others: Sequence[Peak] = ()) -> str:
    """The report on the plan of `what`. `others`: the peaks of stages that need less."""
    left = card.total - needed(peak, card)
    sizes = {name: peak.parts.get(name, 0) for name in PARTS}
    sizes |= {
        "within operations": peak.kernels,
        "cuBLAS, cuDNN" + ", NCCL" * (card.count > 1): workspace(card),
        "CUDA context": CONTEXT,
        "total": needed(peak, card),
        card.name: card.total,
        "left" if left >= 0 else "missing": abs(left),
    }
    width = max(map(len, sizes))
    lines = [
        f"Dry run: {what}",
        *(f"  {name:<{width}}  {size(count):>10}" for name, count in sizes.items()),
    ]
    place = f"in {peak.module}" if peak.module else "outside any module"
    at = f" ({peak.operator})" if peak.operator else ""
    if peak.stage != "training":  # whose utterances are in the first line
        at += f", with {peak.utterances} utterances at a time"
    lines.append(f"Peak: {size(peak.total)} allocated in {peak.stage}, {peak.phase}, {place}{at}")
    lines += [
        f"In {each.stage}, with {each.utterances} utterances at a time: {size(each.total)}"
        for each in others
    ]
    if peak.host:
        lines.append(on_host(peak, card))
    lines.append(
        f"Verdict: {verdict(peak, card)[0]} (it fits if {MARGIN} % of the card stays free)"
    )
    if peak.guesses:
        lines.append(f"Values that the step reads and that were guessed: {peak.guesses}")
    lines.append(
        "Not planned: cuDNN's choice of algorithms, searches other than greedy, other processes;"
        " hence the margin"
    )
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)


def on_host(peak: Peak, card: Card) -> str:
    """The line on host memory."""
    where = "In host memory, beside the process itself"
    if card.count > 1:
        where = f"In the host memory of a machine with {card.count} GPUs, beside the processes"
        where += " themselves"
    return f"{where}: {size(peak.host)}"


def size(count: int) -> str:
    """Bytes in GiB, or in MiB below 0.1 GiB."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= 0.1 * GIB else f"{count / MIB:.1f} MiB"
