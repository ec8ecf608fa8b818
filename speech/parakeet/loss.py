"""The TDT loss of a transducer (Xu et al. 2023, "Efficient Sequence Transduction by Jointly
Predicting Tokens and Durations") without the joint network's (B, T, U + 1, V) output, which takes
gigabytes.

A cell (t, u) of the lattice stands for frame t after u labels. The first pass makes the logits of a
few cells at a time and keeps their normaliser, blank, label and durations. On this small lattice
the forward and backward variables give the loss, and the posterior of every arc. The second pass
makes the logits of the occupied cells again, and turns them into the gradient at once: softmax
times the cell's occupancy, minus the posteriors of the arcs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from common.device import upcast

LEAST_OCCUPANCY = (
    1e-9  # of a cell that takes part in the second pass: what is left out changes gradients by 2e-9
)
CPU_ROWS = 256  # cells of a piece, whose logits stay in the processor's cache
GPU_LOGITS = 1 << 24  # of a piece
FP16_SCALE = (
    1024.0  # for gradients, of which many are too small for fp16; their sum over a row is at most 2
)


@dataclass(frozen=True)
class Lattice:
    """Inputs of the loss besides the network's outputs. `targets` (B, U); on the host their lengths
    `labels` (B,), the numbers of `frames` (B,), and `plain` (B,), which marks utterances with the
    RNN-T loss: token logits alone, no durations, no `sigma`. `durations` are in frames; blank is
    the token before the durations. `dropout` is that of the joint's hidden layer."""

    targets: torch.Tensor
    frames: torch.Tensor
    labels: torch.Tensor
    durations: tuple[int, ...]
    sigma: float = 0.0
    plain: torch.Tensor | None = None
    dropout: float = 0.0
    least_occupancy: float = LEAST_OCCUPANCY


def tdt_losses(
    encoded: torch.Tensor,
    predicted: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lattice: Lattice,
) -> torch.Tensor:
    """(B,) losses, the negative log-likelihoods of the targets, in fp32 or better; infinite if no
    path has the length.

    The joint network's output is relu(encoded (B, T, J) + predicted (B, U + 1, J)) times `weight`
    (K, J) plus `bias` (K,), where K = V + 1 + len(durations): tokens, blank, durations.
    `lattice.least_occupancy` 0 uses every cell in the second pass. Under autocast products are in
    16 bits, sums of exponentials in fp32, and the lattice is in float64. Raises `ValueError`."""
    durations, plain = lattice.durations, lattice.plain
    if plain is not None and bool(plain.any()) and not {0, 1} <= set(durations):
        raise ValueError(f"the RNN-T loss needs the durations 0 and 1, and there are {durations}")
    if len(set(durations)) < len(durations) or max(durations) < 1 or min(durations) < 0:
        raise ValueError(
            f"durations {durations}: they must be distinct, not negative, and one of them positive"
        )
    if int(lattice.frames.min()) < 1 or int(lattice.frames.max()) > encoded.shape[1]:
        raise ValueError(
            "frames: every utterance needs at least one, and at most those in `encoded`"
        )
    if (
        int(lattice.labels.max()) >= predicted.shape[1]
        or int(lattice.labels.max()) > lattice.targets.shape[1]
    ):
        raise ValueError("labels: there are more of them than in `predicted` or `targets`")
    return _TDT.apply(encoded, predicted, weight, bias, lattice, torch.is_grad_enabled())


class _TDT(torch.autograd.Function):
    @staticmethod
    def forward(ctx, encoded, predicted, weight, bias, lattice, trains):
        kind = encoded.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        seed = int(torch.randint(1 << 62, ())) if lattice.dropout else 0
        cells = _Cells(encoded, predicted, weight, bias, lattice, dtype, seed)
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            values = torch.cat(
                [_first_pass(cells, *piece) for piece in cells.pieces()]
            )  # (N, 3 + D)
            grid = values.new_zeros(
                encoded.shape[0] * cells.size, values.shape[1], dtype=torch.float64
            )
            grid = grid.index_copy_(0, cells.index, values.double()).view(*cells.shape, -1)
            losses, posteriors = _sum_paths(grid, cells, trains)
            if trains:
                kept = [
                    values[:, 0].clone(),
                    *(tensor.flatten(0, 2)[cells.index].to(values.dtype) for tensor in posteriors),
                ]
                ctx.save_for_backward(encoded, predicted, weight, bias, *kept)
                ctx.settings = lattice, dtype, seed
        return losses.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, incoming):
        encoded, predicted, weight, bias, *kept = ctx.saved_tensors
        cells = _Cells(encoded, predicted, weight, bias, *ctx.settings)
        with torch.autocast(encoded.device.type, enabled=False):
            return *_second_pass(cells, incoming, *kept), None, None


class _Cells:
    """The N valid cells of a batch, in the order of their `index` into (B, T, U + 1), and the joint
    network on them."""

    def __init__(self, encoded, predicted, weight, bias, lattice: Lattice, dtype, seed: int):
        self.lattice = lattice
        self.device = encoded.device
        self.shape = (len(encoded), encoded.shape[1], predicted.shape[1])
        self.size = encoded.shape[1] * predicted.shape[1]
        self.encoded = encoded.to(dtype).flatten(0, 1)
        self.predicted = predicted.to(dtype).flatten(0, 1)
        self.weight = weight.to(dtype)
        self.bias = bias.to(dtype)
        self.blank = len(bias) - len(lattice.durations) - 1
        self.seed = seed
        columns = predicted.shape[1]
        counts = lattice.frames * (lattice.labels + 1)
        # The host knows the lengths, so that it need not wait for the device to find the cells.
        table = torch.stack([counts.cumsum(0) - counts, lattice.labels + 1, counts]).to(
            self.device, non_blocking=True
        )
        starts, widths, counts = table
        rows = torch.arange(len(counts), device=self.device)
        rows = rows.repeat_interleave(
            counts, output_size=int((lattice.frames * (lattice.labels + 1)).sum())
        )
        place = torch.arange(len(rows), device=self.device) - starts[rows]
        self.index = rows * self.size + place // widths[rows] * columns + place % widths[rows]
        # After the last label any token will do, because its arc is left out.
        targets = F.pad(lattice.targets, (0, columns))[:, :columns]
        self.targets = targets.to(self.device, non_blocking=True).flatten()
        self.rows = (
            max(1, GPU_LOGITS // max(len(bias), encoded.shape[-1])) if encoded.is_cuda else CPU_ROWS
        )

    def pieces(
        self, chosen: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yields positions in `index` and their dropout masks, for all cells or for the `chosen`,
        in ascending order. A cell has the same mask in both passes, because both draw the masks of
        all cells."""
        total, dropout = len(self.index), self.lattice.dropout
        everything = torch.arange(total, device=self.device) if chosen is None else chosen
        if not dropout:
            yield from ((piece, None) for piece in everything.split(self.rows))
            return
        generator = torch.Generator(self.device).manual_seed(self.seed)
        starts = bounds = [*range(0, total, self.rows), total]
        if chosen is not None:
            bounds = torch.searchsorted(
                chosen, torch.tensor(starts).to(self.device, non_blocking=True)
            ).tolist()
        waiting, count = [], 0
        for (start, stop), (first, last) in zip(
            itertools.pairwise(starts), itertools.pairwise(bounds), strict=True
        ):
            drawn = (
                torch.rand(
                    stop - start, self.encoded.shape[1], device=self.device, generator=generator
                )
                >= dropout
            )
            piece = everything[first:last]
            waiting.append((piece, drawn[piece - start]))
            count += len(piece)
            if count and (count >= self.rows or stop == total):
                yield tuple(map(torch.cat, zip(*waiting, strict=True)))
                waiting, count = [], 0

    def places(self, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `encoded` and `predicted` (and of `targets`) that belong to the cells at these
        positions."""
        index, columns = self.index[piece], self.shape[2]
        return index // columns, index // self.size * columns + index % columns

    def hidden(
        self, rows: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = (self.encoded[rows[0]] + self.predicted[rows[1]]).relu_()
        return hidden if mask is None else hidden.mul_(mask).div_(1.0 - self.lattice.dropout)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return upcast(torch.addmm(self.bias, hidden, self.weight.t()))


def _first_pass(cells: _Cells, piece: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(n, 3 + D) of some cells: the log of the tokens' normaliser, log-probabilities of blank,
    label and durations."""
    rows = cells.places(piece)
    logits = cells.logits(cells.hidden(rows, mask))
    blank, label = (
        logits[:, cells.blank].clone(),
        logits.gather(1, cells.targets[rows[1]][:, None])[:, 0],
    )
    durations = logits[:, cells.blank + 1 :].log_softmax(1)
    tokens = logits[:, : cells.blank + 1]
    highest = tokens.amax(1)
    normaliser = (
        tokens.sub_(highest[:, None]).exp_().sum(1).log_().add_(highest)
    )  # in place: one tensor of this size
    return torch.cat(
        [torch.stack([normaliser, blank - normaliser, label - normaliser], dim=1), durations], dim=1
    )


def _sum_paths(
    grid: torch.Tensor, cells: _Cells, trains: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(B,) losses of `grid` (B, T, U + 1, 3 + D) and, if the model `trains`, for each cell its
    occupancy, the posteriors of blank and label (B, T, U + 1), and the gradient of the duration
    logits (B, T, U + 1, D)."""
    lattice, (_, t_size, u_size) = cells.lattice, cells.shape
    device, durations = grid.device, lattice.durations
    _, blank, label, log_durations = grid[..., 0], grid[..., 1], grid[..., 2], grid[..., 3:]
    frames = lattice.frames.to(device, non_blocking=True)[:, None, None]
    labels = lattice.labels.to(device, non_blocking=True)[:, None, None]
    t, u = torch.arange(t_size, device=device)[:, None], torch.arange(u_size, device=device)
    plain = torch.zeros_like(frames, dtype=torch.bool)
    if lattice.plain is not None:
        plain = lattice.plain.to(device, non_blocking=True)[:, None, None]
    minus_sigma = torch.zeros_like(frames, dtype=torch.float64).masked_fill(~plain, -lattice.sigma)
    nothing = torch.full((), -torch.inf, dtype=torch.float64, device=device)

    def arc(token: torch.Tensor, k: int, of_plain: int, allowed: torch.Tensor) -> torch.Tensor:
        """Log-probability of a token with the duration k, -inf if it is not allowed. RNN-T's arcs
        have one duration."""
        rest = torch.where(
            plain, 0.0 if durations[k] == of_plain else nothing, log_durations[..., k] + minus_sigma
        )
        return torch.where(allowed, token + rest, nothing)

    # Blank moves in time, a label also within its frame if 0 is a duration. The last arc is a blank
    # that ends at T.
    moves = [(k, d) for k, d in enumerate(durations) if d > 0]
    blanks = torch.stack(
        [arc(blank, k, 1, (t + d < frames) & (u <= labels)) for k, d in moves], dim=2
    )
    jumps = torch.stack(
        [arc(label, k, 0, (t + d < frames) & (u < labels)) for k, d in moves], dim=2
    )  # (B, T, P, U + 1)
    ends = torch.stack(
        [arc(blank, k, 1, (t + d == frames) & (u == labels)) for k, d in moves], dim=2
    )
    stay = torch.zeros_like(blank)
    if 0 in durations:
        allowed = (t < frames) & (u < labels)
        stay = torch.where(allowed, arc(label, durations.index(0), 0, allowed), 0.0)
    # The labels of a frame are a prefix sum in the log domain: alpha[u] = climb[u] +
    # logcumsumexp(base - climb)[u].
    climb = F.pad(stay.cumsum(2)[..., :-1], (1, 0))
    has_stay = 0 in durations

    def within_frame(base: torch.Tensor) -> torch.Tensor:
        return base.logcumsumexp(1) if has_stay else base

    longest, steps = (
        max(durations),
        torch.tensor([d for _, d in moves]).to(device, non_blocking=True),
    )
    beta = nothing.expand(len(grid), t_size + longest, u_size + 1).clone()
    last = ends.logsumexp(2)
    for i in range(t_size - 1, -1, -1):
        ahead = beta[:, i + steps].unfold(2, u_size, 1)  # (B, P, 2, U + 1): at the same u, at u + 1
        base = torch.logaddexp(
            (ahead[:, :, 0] + blanks[:, i]).logsumexp(1),
            (ahead[:, :, 1] + jumps[:, i]).logsumexp(1),
        )
        base = torch.logaddexp(base, last[:, i]) + climb[:, i]
        beta[:, i, :u_size] = within_frame(base.flip(1)).flip(1) - climb[:, i]
    total = beta[:, 0, 0].clone()
    if not trains:
        return -total, []

    alpha = nothing.expand(len(grid), t_size + longest, u_size + 1).clone()
    into_blanks, into_jumps = (nothing.expand_as(blanks).clone() for _ in range(2))
    for p, (_, d) in enumerate(moves):
        into_blanks[:, d:, p] = blanks[:, : max(0, t_size - d), p]
        into_jumps[:, d:, p, 1:] = jumps[:, : max(0, t_size - d), p, :-1]
    for i in range(t_size):
        behind = alpha[:, i + longest - steps].unfold(2, u_size, 1)  # at u - 1, at the same u
        base = torch.logaddexp(
            (behind[:, :, 1] + into_blanks[:, i]).logsumexp(1),
            (behind[:, :, 0] + into_jumps[:, i]).logsumexp(1),
        )
        if i == 0:
            base[:, 0] = 0.0
        alpha[:, i + longest, 1:] = within_frame(base - climb[:, i]) + climb[:, i]
    del into_blanks, into_jumps
    start = (
        alpha[:, longest:, 1:] - total.where(total.isfinite(), torch.inf)[:, None, None]
    )  # without a path: no gradient
    occupancy = torch.where(
        (t < frames) & (u <= labels), (start + beta[:, :t_size, :u_size]).exp(), 0.0
    )
    of_blank, of_label = torch.zeros_like(occupancy), torch.zeros_like(occupancy)
    of_durations = log_durations.exp() * (occupancy * ~plain)[..., None]
    for p, (k, d) in enumerate(moves):
        by_blank = (
            start
            + torch.logaddexp(blanks[:, :, p] + beta[:, d : d + t_size, :u_size], ends[:, :, p])
        ).exp()
        by_label = (start + jumps[:, :, p] + beta[:, d : d + t_size, 1:]).exp()
        of_blank += by_blank
        of_label += by_label
        of_durations[..., k] -= (by_blank + by_label) * ~plain
    if 0 in durations:
        by_label = torch.where(allowed, (start + stay + beta[:, :t_size, 1:]).exp(), 0.0)
        of_label += by_label
        of_durations[..., durations.index(0)] -= by_label * ~plain
    return -total, [occupancy, of_blank, of_label, of_durations]


def _second_pass(
    cells: _Cells, incoming, normaliser, occupancy, of_blank, of_label, of_durations
) -> tuple:
    """The gradients of `encoded`, `predicted`, `weight` and `bias`. The incoming gradients (B,)
    count relative to the largest one, which multiplies the sums at the end, so that small ones are
    not lost in 16 bits."""
    lattice, blank = cells.lattice, cells.blank
    incoming = incoming.to(normaliser.dtype)
    largest = incoming.abs().max()
    share = torch.where(largest > 0, incoming / largest, 0.0)
    chosen = (
        None
        if lattice.least_occupancy <= 0
        else (occupancy > lattice.least_occupancy).nonzero()[:, 0]
    )
    exact = normaliser.dtype  # fp32 or float64
    of_encoded = torch.zeros_like(cells.encoded, dtype=exact)
    of_predicted = torch.zeros_like(cells.predicted, dtype=exact)
    of_weight = torch.zeros_like(cells.weight, dtype=exact)
    of_bias = torch.zeros_like(cells.bias, dtype=exact)
    is_fp16 = cells.weight.dtype == torch.float16
    scale = FP16_SCALE if is_fp16 else 1.0
    for piece, mask in cells.pieces(chosen):
        rows = cells.places(piece)
        hidden = cells.hidden(rows, mask)
        gradient = cells.logits(hidden)
        tokens = gradient[:, : blank + 1]
        tokens.sub_(normaliser[piece, None]).exp_().mul_(occupancy[piece, None])
        tokens[:, blank] -= of_blank[piece]
        tokens.scatter_add_(1, cells.targets[rows[1]][:, None], -of_label[piece, None])
        gradient[:, blank + 1 :] = of_durations[piece]
        gradient *= share[rows[0] // cells.shape[1], None]
        of_bias += gradient.sum(0)
        if is_fp16:  # sums over thousands of cells can be too large for fp16
            of_weight.addmm_(gradient.t(), hidden.to(exact))
            of_hidden = (gradient.mul_(scale).to(hidden.dtype) @ cells.weight).to(exact).div_(scale)
        else:
            gradient = gradient.to(hidden.dtype)
            of_weight += gradient.t() @ hidden
            of_hidden = (gradient @ cells.weight).to(exact)
        del gradient, tokens
        of_hidden.mul_(hidden > 0)
        if mask is not None:
            of_hidden.div_(1.0 - lattice.dropout)
        of_encoded.index_add_(0, rows[0], of_hidden)
        of_predicted.index_add_(0, rows[1], of_hidden)
    of_encoded, of_predicted = (
        of_encoded.view(*cells.shape[:2], -1),
        of_predicted.view(cells.shape[0], cells.shape[2], -1),
    )
    return tuple(
        gradient.mul_(largest) for gradient in (of_encoded, of_predicted, of_weight, of_bias)
    )
