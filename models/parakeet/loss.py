"""The losses of a transducer, TDT (Xu et al. 2023, "Efficient Sequence Transduction by Jointly
Predicting Tokens and Durations") and RNN-T (Graves 2012), without the joint network's output (B, T,
U + 1, V), which would take gigabytes.

A cell (t, u) of the lattice stands for frame t after u labels. The first pass computes the logits
of a few cells at a time and keeps their normaliser, blank, label and durations. On this small
lattice the forward and backward variables give the loss and the posterior of every arc. The second
pass computes the logits of the occupied cells again and turns them into the gradient at once:
softmax times the cell's occupancy, minus the posteriors of the arcs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.device import upcast

# Occupancy of a cell that takes part in the second pass. Leaving out the other cells changes
# gradients by 2e-9.
LEAST_OCCUPANCY = 1e-9
CPU_ROWS = 256  # cells of a piece, so that their logits stay in the processor's cache
GPU_LOGITS = 1 << 24  # logits of a piece
# Factor of gradients in fp16, where many would be too small. Their sum over a row is at most 2.
FP16_SCALE = 1024.0
RNNT_DURATIONS = (0, 1)  # of a label and of a blank in the RNN-T loss


@dataclass(frozen=True)
class Lattice:
    """Inputs of the loss besides the outputs of the network."""

    targets: Tensor  # (B, U) labels
    frames: Tensor  # (B,) numbers of encoder frames, on the host
    labels: Tensor  # (B,) numbers of labels, on the host
    durations: tuple[int, ...]  # in frames; none for a model that has the RNN-T loss
    sigma: float = 0.0  # is subtracted from the log-probability of every arc
    # (B,) on the host: utterances with the RNN-T loss, which has token logits alone and no sigma
    plain: Tensor | None = None
    # Weight of FastEmit (Yu et al. 2021), which favours labels over blanks: the gradient has the
    # posteriors of labels a second time, this often, and the loss does not.
    fastemit: float = 0.0
    dropout: float = 0.0  # of the joint network's hidden layer
    least_occupancy: float = LEAST_OCCUPANCY  # in the second pass; 0: all cells


def transducer_losses(
    encoded: Tensor, predicted: Tensor, weight: Tensor, bias: Tensor, lattice: Lattice
) -> Tensor:
    """(B,) negative log-likelihoods of the targets, in fp32 or better. A loss is infinite if no
    path has the utterance's length.

    The joint network's output is relu(encoded (B, T, J) + predicted (B, U + 1, J)) times `weight`
    (K, J) plus `bias` (K,), where K = V + 1 + len(durations): tokens, blank, durations. Under
    autocast products are in 16 bits, sums of exponentials in fp32, the lattice is in float64."""
    return _Transducer.apply(encoded, predicted, weight, bias, lattice, torch.is_grad_enabled())


class _Transducer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, encoded, predicted, weight, bias, lattice, trains):
        kind = encoded.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        seed = int(torch.randint(1 << 62, ())) if lattice.dropout else 0
        cells = _Cells(encoded, predicted, weight, bias, lattice, dtype, seed)
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            values = torch.cat([_first_pass(cells, *piece) for piece in cells.pieces()])
            losses, posteriors = _sum_paths(cells.on_grid(values), cells, trains)
            if trains:
                kept = []
                for tensor in posteriors:
                    kept.append(tensor.flatten(0, 2)[cells.index].to(values.dtype))
                normaliser = values[:, 0].clone()  # a view would keep all of `values`
                ctx.save_for_backward(encoded, predicted, weight, bias, normaliser, *kept)
                ctx.settings = (lattice, dtype, seed)
        return losses.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, incoming):
        encoded, predicted, weight, bias, *kept = ctx.saved_tensors
        cells = _Cells(encoded, predicted, weight, bias, *ctx.settings)
        with torch.autocast(encoded.device.type, enabled=False):
            gradients = _second_pass(cells, incoming, *kept)
        return *gradients, None, None


# --- cells ----------------------------------------------------------------------------------------


class _Cells:
    """The N valid cells of a batch, in the order of their `index` into (B, T, U + 1), and the joint
    network on them."""

    def __init__(self, encoded, predicted, weight, bias, lattice: Lattice, dtype, seed: int):
        self.lattice = lattice
        self.device = encoded.device
        self.shape = (len(encoded), encoded.shape[1], predicted.shape[1])  # B, T, U + 1
        self.size = encoded.shape[1] * predicted.shape[1]  # cells of an utterance
        self.encoded = encoded.to(dtype).flatten(0, 1)  # (B T, J)
        self.predicted = predicted.to(dtype).flatten(0, 1)  # (B (U + 1), J)
        self.weight = weight.to(dtype)
        self.bias = bias.to(dtype)
        self.blank = len(bias) - len(lattice.durations) - 1
        self.seed = seed
        self.index = self._index()
        # After the last label any token will do, because its arc is left out.
        columns = predicted.shape[1]
        targets = F.pad(lattice.targets, (0, columns))[:, :columns]
        self.targets = targets.to(self.device, non_blocking=True).flatten()  # (B (U + 1),)
        self.rows = CPU_ROWS  # cells of a piece
        if encoded.is_cuda:
            self.rows = max(1, GPU_LOGITS // max(len(bias), encoded.shape[-1]))

    def _index(self) -> Tensor:
        """(N,) places of the valid cells in (B, T, U + 1). The host knows the lengths, so it need
        not wait for the device to find the cells."""
        widths = self.lattice.labels + 1
        counts = self.lattice.frames * widths
        total = int(counts.sum())
        table = torch.stack([counts.cumsum(0) - counts, widths, counts])
        first, widths, counts = table.to(self.device, non_blocking=True)
        rows = torch.arange(len(counts), device=self.device)
        rows = rows.repeat_interleave(counts, output_size=total)  # (N,) the cells' utterances
        place = torch.arange(total, device=self.device) - first[rows]
        frame = place // widths[rows]
        label = place % widths[rows]
        return rows * self.size + frame * self.shape[2] + label

    def on_grid(self, values: Tensor) -> Tensor:
        """(B, T, U + 1, C) in float64 of the cells' values (N, C), 0 for other cells."""
        cells = self.shape[0] * self.size
        grid = values.new_zeros(cells, values.shape[1], dtype=torch.float64)
        return grid.index_copy_(0, self.index, values.double()).view(*self.shape, -1)

    def pieces(self, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields positions in `index` and their dropout masks, for all cells or for the `chosen`,
        in ascending order. A cell has the same mask in both passes, because both draw the masks of
        all cells."""
        total = len(self.index)
        positions = torch.arange(total, device=self.device) if chosen is None else chosen
        if not self.lattice.dropout:
            for piece in positions.split(self.rows):
                yield piece, None
            return
        generator = torch.Generator(self.device).manual_seed(self.seed)
        edges = [*range(0, total, self.rows), total]  # of the blocks whose masks are drawn together
        bounds = edges  # of the blocks' positions
        if chosen is not None:
            on_device = torch.tensor(edges).to(self.device, non_blocking=True)
            bounds = torch.searchsorted(chosen, on_device).tolist()
        pieces = []
        masks = []
        count = 0
        for block in range(len(edges) - 1):
            start = edges[block]
            stop = edges[block + 1]
            size = (stop - start, self.encoded.shape[1])
            mask = torch.rand(size, device=self.device, generator=generator) >= self.lattice.dropout
            piece = positions[bounds[block] : bounds[block + 1]]
            pieces.append(piece)
            masks.append(mask[piece - start])
            count += len(piece)
            if count and (count >= self.rows or stop == total):
                yield torch.cat(pieces), torch.cat(masks)
                pieces = []
                masks = []
                count = 0

    def places(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of `encoded` and `predicted` (and of `targets`) of the cells at these positions."""
        index = self.index[piece]
        columns = self.shape[2]
        return index // columns, index // self.size * columns + index % columns

    def hidden(self, rows: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        hidden = (self.encoded[rows[0]] + self.predicted[rows[1]]).relu_()
        if mask is None:
            return hidden
        return hidden.mul_(mask).div_(1.0 - self.lattice.dropout)

    def logits(self, hidden: Tensor) -> Tensor:
        return upcast(torch.addmm(self.bias, hidden, self.weight.t()))


def _first_pass(cells: _Cells, piece: Tensor, mask: Tensor | None) -> Tensor:
    """(n, 3 + D) of the cells of a piece: the log of the tokens' normaliser, and log-probabilities
    of blank, label and durations."""
    rows = cells.places(piece)
    logits = cells.logits(cells.hidden(rows, mask))
    blank = logits[:, cells.blank].clone()
    label = logits.gather(1, cells.targets[rows[1]][:, None])[:, 0]
    durations = logits[:, cells.blank + 1 :].log_softmax(1)
    tokens = logits[:, : cells.blank + 1]
    highest = tokens.amax(1)
    # In place, so that there is one tensor of this size.
    normaliser = tokens.sub_(highest[:, None]).exp_().sum(1).log_().add_(highest)
    columns = torch.stack([normaliser, blank - normaliser, label - normaliser], dim=1)
    return torch.cat([columns, durations], dim=1)


# --- lattice --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arcs:
    """Log-probabilities of a batch's arcs in float64, by the cell where they begin; -inf where
    there is no arc. P is the number of positive durations."""

    steps: list[int]  # (P,) the positive durations d, in frames
    places: list[int]  # (P,) their places among all durations
    blanks: Tensor  # (B, T, P, U + 1) of blank: to frame t + d
    labels: Tensor  # (B, T, P, U + 1) of a label: to frame t + d and the next label
    ends: Tensor  # (B, T, P, U + 1) of the last blank, which ends at the utterance's end
    # (B, T, U + 1) of a label with the duration 0, in the same frame; 0: no such arc
    stays: Tensor
    # (B, T, U + 1) sum of the stays below: of coming from label 0 to label u in t
    climb: Tensor
    may_stay: Tensor  # (B, T, U + 1) where there is an arc in `stays`
    zero: int | None  # place of the duration 0 among all durations

    def padded(self) -> Tensor:
        """(B, T + longest duration, U + 2) of -inf, for alpha or beta, and beyond the lattice."""
        batch, frames, labels = self.stays.shape
        shape = (batch, frames + max(self.steps), labels + 1)
        return self.stays.new_full(shape, -torch.inf)


def _sum_paths(grid: Tensor, cells: _Cells, trains: bool) -> tuple[Tensor, list[Tensor]]:
    """(B,) losses of `grid` (B, T, U + 1, 3 + D), which holds the columns of `_first_pass`, and if
    the model `trains`, the results of `_posteriors` with FastEmit."""
    lattice = cells.lattice
    frames = lattice.frames.to(cells.device, non_blocking=True)[:, None, None]
    labels = lattice.labels.to(cells.device, non_blocking=True)[:, None, None]
    plain = torch.zeros_like(frames, dtype=torch.bool)
    if not lattice.durations:
        lattice = replace(lattice, durations=RNNT_DURATIONS)
        grid = F.pad(grid, (0, len(RNNT_DURATIONS)))  # which no plain utterance reads
        plain = ~plain
    elif lattice.plain is not None:
        plain = lattice.plain.to(cells.device, non_blocking=True)[:, None, None]
    t = torch.arange(cells.shape[1], device=cells.device)[:, None]
    u = torch.arange(cells.shape[2], device=cells.device)
    arcs = _arcs(grid, lattice, frames - t, labels - u, plain)
    beta = _beta(arcs)
    total = beta[:, 0, 0]  # (B,) log-likelihoods
    if not trains:
        return -total, []
    # Without a path the posteriors are 0.
    start = _alpha(arcs) - total.where(total.isfinite(), torch.inf)[:, None, None]
    is_valid = (t < frames) & (u <= labels)
    posteriors = _posteriors(arcs, start, beta, is_valid, ~plain, grid[..., 3:])
    occupancy, of_blank, of_label, of_durations = posteriors
    occupancy = occupancy + lattice.fastemit * of_label
    of_label = (1.0 + lattice.fastemit) * of_label
    of_durations = of_durations[..., : len(cells.lattice.durations)]
    return -total, [occupancy, of_blank, of_label, of_durations]


def _arcs(
    grid: Tensor, lattice: Lattice, frames_left: Tensor, labels_left: Tensor, plain: Tensor
) -> _Arcs:
    """The arcs of `grid` (B, T, U + 1, 3 + D). `frames_left` (B, T, 1) and `labels_left` (B, 1,
    U + 1): from a cell to the utterance's end, not positive beyond the last frame and negative
    beyond the last label. `plain` (B, 1, 1): utterances with the RNN-T loss, whose blanks have the
    duration 1 and whose labels have 0."""
    blank = grid[..., 1]
    label = grid[..., 2]
    durations = lattice.durations
    nothing = torch.full((), -torch.inf, dtype=torch.float64, device=grid.device)
    minus_sigma = torch.zeros_like(plain, dtype=torch.float64).masked_fill(~plain, -lattice.sigma)

    def arc(token: Tensor, place: int, of_plain: int, allowed: Tensor) -> Tensor:
        """(B, T, U + 1) of a token with the duration at this place. `of_plain`: the only duration
        that the token has in the RNN-T loss."""
        in_plain = 0.0 if durations[place] == of_plain else nothing
        duration = torch.where(plain, in_plain, grid[..., 3 + place] + minus_sigma)
        return torch.where(allowed, token + duration, nothing)

    places = [place for place, duration in enumerate(durations) if duration > 0]
    steps = [durations[place] for place in places]
    blanks = []
    labels = []
    ends = []
    for place, d in zip(places, steps, strict=True):
        blanks.append(arc(blank, place, 1, (frames_left > d) & (labels_left >= 0)))
        labels.append(arc(label, place, 0, (frames_left > d) & (labels_left > 0)))
        ends.append(arc(blank, place, 1, (frames_left == d) & (labels_left == 0)))
    may_stay = (frames_left > 0) & (labels_left > 0)
    zero = None
    stays = torch.zeros_like(blank)
    if 0 in durations:
        zero = durations.index(0)
        stays = torch.where(may_stay, arc(label, zero, 0, may_stay), 0.0)
    return _Arcs(
        steps,
        places,
        torch.stack(blanks, dim=2),
        torch.stack(labels, dim=2),
        torch.stack(ends, dim=2),
        stays,
        F.pad(stays.cumsum(2)[..., :-1], (1, 0)),
        may_stay,
        zero,
    )


# In both recursions the arcs within a frame are a prefix sum in the log domain, for example
# alpha[u] = climb[u] + logcumsumexp(base - climb)[u], where `base` sums the arcs from other frames.


def _beta(arcs: _Arcs) -> Tensor:
    """(B, T + longest duration, U + 2) log-probabilities of the rest after each cell."""
    _, frames, columns = arcs.stays.shape
    beta = arcs.padded()
    steps = torch.tensor(arcs.steps).to(beta.device, non_blocking=True)
    last = arcs.ends.logsumexp(2)
    for t in range(frames - 1, -1, -1):
        ahead = beta[:, t + steps].unfold(2, columns, 1)  # (B, P, 2, U + 1): at u, at u + 1
        by_blank = (ahead[:, :, 0] + arcs.blanks[:, t]).logsumexp(1)
        by_label = (ahead[:, :, 1] + arcs.labels[:, t]).logsumexp(1)
        base = torch.logaddexp(by_blank, by_label)
        base = torch.logaddexp(base, last[:, t])
        if arcs.zero is not None:
            climb = arcs.climb[:, t]
            base = (base + climb).flip(1).logcumsumexp(1).flip(1) - climb
        beta[:, t, :columns] = base
    return beta


def _alpha(arcs: _Arcs) -> Tensor:
    """(B, T, U + 1) log-probabilities of coming to each cell."""
    _, frames, columns = arcs.stays.shape
    longest = max(arcs.steps)
    alpha = arcs.padded()  # frame t is at t + longest, label u at u + 1
    steps = torch.tensor(arcs.steps).to(alpha.device, non_blocking=True)
    # The arcs by the cell where they end.
    blanks = torch.full_like(arcs.blanks, -torch.inf)
    labels = torch.full_like(arcs.labels, -torch.inf)
    for p, d in enumerate(arcs.steps):
        begin = max(0, frames - d)
        blanks[:, d:, p] = arcs.blanks[:, :begin, p]
        labels[:, d:, p, 1:] = arcs.labels[:, :begin, p, :-1]
    for t in range(frames):
        behind = alpha[:, t + longest - steps].unfold(2, columns, 1)  # at u - 1, at u
        by_blank = (behind[:, :, 1] + blanks[:, t]).logsumexp(1)
        by_label = (behind[:, :, 0] + labels[:, t]).logsumexp(1)
        base = torch.logaddexp(by_blank, by_label)
        if t == 0:
            base[:, 0] = 0.0
        if arcs.zero is not None:
            climb = arcs.climb[:, t]
            base = (base - climb).logcumsumexp(1) + climb
        alpha[:, t + longest, 1:] = base
    return alpha[:, longest:, 1:]


def _posteriors(
    arcs: _Arcs,
    start: Tensor,
    beta: Tensor,
    is_valid: Tensor,
    has_durations: Tensor,
    log_durations: Tensor,
) -> list[Tensor]:
    """For each cell its occupancy, the posteriors of blank and label (B, T, U + 1), and the
    gradient of the duration logits (B, T, U + 1, D).

    `start` (B, T, U + 1): alpha minus the log-likelihood. `beta`: as `_beta` returns it.
    `has_durations` (B, 1, 1): utterances without the RNN-T loss. `log_durations` (B, T, U + 1, D):
    the durations' log-probabilities."""
    _, frames, columns = start.shape
    occupancy = torch.where(is_valid, (start + beta[:, :frames, :columns]).exp(), 0.0)
    of_blank = torch.zeros_like(occupancy)
    of_label = torch.zeros_like(occupancy)
    of_durations = log_durations.exp() * (occupancy * has_durations)[..., None]
    for p, (place, d) in enumerate(zip(arcs.places, arcs.steps, strict=True)):
        after_blank = arcs.blanks[:, :, p] + beta[:, d : d + frames, :columns]
        by_blank = (start + torch.logaddexp(after_blank, arcs.ends[:, :, p])).exp()
        by_label = (start + arcs.labels[:, :, p] + beta[:, d : d + frames, 1:]).exp()
        of_blank += by_blank
        of_label += by_label
        of_durations[..., place] -= (by_blank + by_label) * has_durations
    if arcs.zero is not None:
        by_label = (start + arcs.stays + beta[:, :frames, 1:]).exp()
        by_label = torch.where(arcs.may_stay, by_label, 0.0)
        of_label += by_label
        of_durations[..., arcs.zero] -= by_label * has_durations
    return [occupancy, of_blank, of_label, of_durations]


# --- gradient -------------------------------------------------------------------------------------


def _second_pass(
    cells: _Cells, incoming, normaliser, occupancy, of_blank, of_label, of_durations
) -> list[Tensor]:
    """The gradients of `encoded`, `predicted`, `weight` and `bias`. The incoming gradients (B,)
    count relative to the largest one, which multiplies the sums at the end, so that small ones are
    not lost in 16 bits. `normaliser` to `of_durations`: the first column of `_first_pass` and the
    results of `_posteriors`, (N,) or (N, D)."""
    blank = cells.blank
    exact = normaliser.dtype  # fp32 or float64
    incoming = incoming.to(exact)
    largest = incoming.abs().max()
    share = torch.where(largest > 0, incoming / largest, 0.0)
    chosen = None
    if cells.lattice.least_occupancy > 0:
        chosen = (occupancy > cells.lattice.least_occupancy).nonzero()[:, 0]
    of_encoded = torch.zeros_like(cells.encoded, dtype=exact)
    of_predicted = torch.zeros_like(cells.predicted, dtype=exact)
    of_weight = torch.zeros_like(cells.weight, dtype=exact)
    of_bias = torch.zeros_like(cells.bias, dtype=exact)
    for piece, mask in cells.pieces(chosen):
        rows = cells.places(piece)
        hidden = cells.hidden(rows, mask)
        gradient = cells.logits(hidden)  # the logits become their gradient in place
        tokens = gradient[:, : blank + 1]
        tokens.sub_(normaliser[piece, None]).exp_().mul_(occupancy[piece, None])
        tokens[:, blank] -= of_blank[piece]
        tokens.scatter_add_(1, cells.targets[rows[1]][:, None], -of_label[piece, None])
        gradient[:, blank + 1 :] = of_durations[piece]
        gradient *= share[rows[0] // cells.shape[1], None]
        of_bias += gradient.sum(0)
        if cells.weight.dtype == torch.float16:
            # Sums over thousands of cells can be too large for fp16.
            of_weight.addmm_(gradient.t(), hidden.to(exact))
            scaled = gradient.mul_(FP16_SCALE).to(hidden.dtype)
            of_hidden = (scaled @ cells.weight).to(exact).div_(FP16_SCALE)
            del scaled
        else:
            gradient = gradient.to(hidden.dtype)
            of_weight += gradient.t() @ hidden
            of_hidden = (gradient @ cells.weight).to(exact)
        del gradient, tokens
        of_hidden.mul_(hidden > 0)
        if mask is not None:
            of_hidden.div_(1.0 - cells.lattice.dropout)
        of_encoded.index_add_(0, rows[0], of_hidden)
        of_predicted.index_add_(0, rows[1], of_hidden)
    batch, frames, columns = cells.shape
    of_encoded = of_encoded.view(batch, frames, -1)
    of_predicted = of_predicted.view(batch, columns, -1)
    gradients = [of_encoded, of_predicted, of_weight, of_bias]
    return [gradient.mul_(largest) for gradient in gradients]
