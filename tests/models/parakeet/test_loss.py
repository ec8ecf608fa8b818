"""The lean TDT loss against transformers' on the whole joint output, against sums over all paths,
and its memory options."""

import functools
import itertools

import numpy as np
import pytest
import torch

from models.parakeet import loss as losses
from models.parakeet.loss import Lattice, transducer_losses


def random_case(
    seed: int, durations=(0, 1, 2, 3, 4), batch=3, frames=20, labels=12, width=7, vocabulary=9
):
    """(encoded, predicted, weight, bias, targets, frames, labels) with ragged lengths, in
    float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def lengths(low, high):
        drawn = torch.randint(low, high + 1, (batch,), generator=generator)
        drawn[0] = high
        return drawn

    frames, labels = lengths(1, frames), lengths(0, labels)
    outputs = vocabulary + 1 + len(durations)
    tensors = [normal(batch, int(frames.max()), width), normal(batch, int(labels.max()) + 1, width)]
    tensors += [normal(outputs, width), normal(outputs)]
    targets = torch.randint(0, vocabulary, (batch, int(labels.max())), generator=generator)
    return [tensor.requires_grad_() for tensor in tensors], targets, frames, labels


def whole_logits(tensors) -> torch.Tensor:
    encoded, predicted, weight, bias = tensors
    return (encoded[:, :, None] + predicted[:, None]).relu() @ weight.t() + bias


def gradients(value, tensors):
    return torch.autograd.grad(value, tensors)


def assert_close(ours, theirs, tolerance):
    for one, other in zip(ours, theirs, strict=True):
        largest = max(1e-30, float(other.detach().abs().max()))
        assert float((one - other).detach().abs().max()) <= tolerance * largest


def materialised(tensors, targets, frames, labels, durations, sigma, plain) -> torch.Tensor:
    """(B,) losses by the recursion of the paper, cell by cell, on the whole joint output.
    Differentiable."""
    logits = whole_logits(tensors)
    blank = logits.shape[-1] - len(durations) - 1
    tokens = logits[..., : blank + 1].log_softmax(-1)
    steps = logits[..., blank + 1 :].log_softmax(-1)
    result = []
    for b in range(len(logits)):
        t_size, u_size = int(frames[b]), int(labels[b])
        is_plain = plain is not None and bool(plain[b])
        arcs = []  # (frames, log-probability of the duration)
        alpha = {(0, 0): torch.zeros((), dtype=logits.dtype)}

        def duration(t, u, k, of_blank, b=b, is_plain=is_plain):
            if not is_plain:
                return steps[b, t, u, k] - sigma
            return torch.zeros((), dtype=logits.dtype) if durations[k] == int(of_blank) else None

        for t, u in itertools.product(range(t_size + 1), range(u_size + 1)):
            arcs = [alpha[0, 0]] if (t, u) == (0, 0) else []
            for k, d in enumerate(durations):
                if d and (t - d, u) in alpha and (t < t_size or u == u_size):
                    rest = duration(t - d, u, k, True)
                    if rest is not None:
                        arcs.append(alpha[t - d, u] + tokens[b, t - d, u, blank] + rest)
                if t < t_size and (t - d, u - 1) in alpha:
                    rest = duration(t - d, u - 1, k, False)
                    if rest is not None:
                        arcs.append(
                            alpha[t - d, u - 1] + tokens[b, t - d, u - 1, targets[b, u - 1]] + rest
                        )
            if arcs:
                alpha[t, u] = torch.stack(arcs).logsumexp(0)
        result.append(-alpha.get((t_size, u_size), torch.tensor(-torch.inf, dtype=logits.dtype)))
    return torch.stack(result)


class Float64Torch:
    """torch, but `full` makes float64 tensors."""

    full = staticmethod(functools.partial(torch.full, dtype=torch.float64))

    def __getattr__(self, name: str):
        return getattr(torch, name)


def test_equals_the_peer(monkeypatch):
    """Losses and all gradients of 200 random ragged cases, in float64 and in fp32, against
    transformers' loss on the materialised joint."""
    loss_tdt = pytest.importorskip("transformers.loss.loss_tdt")
    random = np.random.default_rng(0)
    monkeypatch.setattr(
        torch.Tensor, "float", lambda tensor: tensor
    )  # the peer casts to fp32: here it computes in float64
    monkeypatch.setattr(loss_tdt, "torch", Float64Torch())
    for seed in range(200):
        durations = ((0, 1, 2, 3, 4), (0, 1, 2))[seed % 2]
        sizes = {"frames": int(random.integers(1, 21)), "labels": int(random.integers(0, 13))}
        tensors, targets, frames, labels = random_case(seed, durations, **sizes)
        sigma, weights = 0.02 * (seed % 3), torch.rand(len(frames), dtype=torch.float64)
        logits = whole_logits(tensors)
        blank = logits.shape[-1] - len(durations) - 1
        parts = logits[..., : blank + 1], logits[..., blank + 1 :]
        spoken = (targets, frames, labels, blank)
        theirs = loss_tdt.tdt_loss(*parts, *spoken, list(durations), sigma, "none")
        their_gradients = gradients((theirs * weights).sum(), tensors)
        for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
            ours_of = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
            ours = transducer_losses(*ours_of, Lattice(targets, frames, labels, durations, sigma))
            assert_close([ours], [theirs], tolerance)
            our_gradients = gradients((ours * weights).sum(), ours_of)
            assert_close(our_gradients, their_gradients, tolerance)


@pytest.mark.parametrize(
    "durations", [(0, 1, 2, 3, 4), (1, 2), (2, 0, 5), (0, 1), (1,), (4, 3, 2, 1, 0)]
)
def test_any_durations_and_the_plain_loss(durations):
    for seed in range(6):
        tensors, targets, frames, labels = random_case(seed, durations, frames=9, labels=4)
        plain = torch.tensor([True, False, seed % 2 == 0]) if {0, 1} <= set(durations) else None
        theirs = materialised(tensors, targets, frames, labels, durations, 0.05, plain)
        ours = transducer_losses(
            *tensors, Lattice(targets, frames, labels, durations, 0.05, plain, least_occupancy=0)
        )
        has_path = theirs.isfinite()
        assert torch.equal(has_path, ours.isfinite())
        if has_path.any():
            assert_close([ours[has_path]], [theirs[has_path]], 1e-10)
            slopes = [gradients(each[has_path].sum(), tensors) for each in (ours, theirs)]
            assert_close(*slopes, 1e-9)  # an utterance without a path adds nothing


def test_awkward_lengths():
    """One frame, no label, and more labels than the 1,023 of NVIDIA's kernel."""
    for t_size, u_size in ((1, 0), (1, 3), (4, 1500)):
        generator = torch.Generator().manual_seed(1)
        tensors = [
            torch.randn(*shape, generator=generator)
            for shape in ((2, t_size, 3), (2, u_size + 1, 3), (9, 3), (9,))
        ]
        tensors = [tensor.double().requires_grad_() for tensor in tensors]
        targets = torch.randint(0, 3, (2, u_size), generator=generator)
        frames, labels = torch.tensor([t_size, 1]), torch.tensor([u_size, 0])
        ours = transducer_losses(*tensors, Lattice(targets, frames, labels, (0, 1, 2, 3, 4)))
        assert ours.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(ours.sum(), tensors))
        if u_size < 10:
            theirs = materialised(tensors, targets, frames, labels, (0, 1, 2, 3, 4), 0.0, None)
            assert_close([ours], [theirs], 1e-12)


def test_padding_and_pieces_change_nothing(monkeypatch):
    tensors, targets, frames, labels = random_case(11)
    reference = transducer_losses(*tensors, Lattice(targets, frames, labels, (0, 1, 2, 3, 4)))
    expected = gradients(reference.sum(), tensors)
    monkeypatch.setattr(losses, "CPU_ROWS", 5)
    garbage = [
        torch.cat([t, torch.full_like(t[:, :2], 1e3)], dim=1).detach().requires_grad_()
        for t in tensors[:2]
    ]
    wide = torch.cat([targets, targets[:, :1]], dim=1)
    ours = transducer_losses(*garbage, *tensors[2:], Lattice(wide, frames, labels, (0, 1, 2, 3, 4)))
    assert_close([ours], [reference], 1e-13)
    padded = gradients(ours.sum(), [*garbage, *tensors[2:]])
    assert float(padded[0][:, -2:].abs().max()) == 0.0
    assert float(padded[1][:, -2:].abs().max()) == 0.0
    assert_close([padded[0][:, :-2], padded[1][:, :-2], *padded[2:]], expected, 1e-10)


def test_cells_that_are_left_out_do_not_matter():
    tensors, targets, frames, labels = random_case(2, batch=4, frames=40, labels=20, vocabulary=30)
    found = []
    for least in (0.0, losses.LEAST_OCCUPANCY):
        lattice = Lattice(targets, frames, labels, (0, 1, 2, 3, 4), least_occupancy=least)
        found.append(gradients(transducer_losses(*tensors, lattice).sum(), tensors))
    assert_close(found[1], found[0], 1e-7)
    assert not torch.equal(found[0][2], found[1][2])  # some are left out indeed


@pytest.mark.parametrize("rows", [4, 1000])
def test_dropout_has_the_same_mask_in_both_passes(rows, monkeypatch):
    """A finite difference of the loss with a fixed seed agrees with the gradient, although the
    second pass has other pieces."""
    monkeypatch.setattr(losses, "CPU_ROWS", rows)
    tensors, targets, frames, labels = random_case(7, batch=2, frames=12, labels=5)
    for least in (0.0, 1e-2):  # the second leaves many cells out, which moves the pieces
        lattice = Lattice(
            targets, frames, labels, (0, 1, 2, 3, 4), dropout=0.3, least_occupancy=least
        )

        def value(*inputs, lattice=lattice):
            torch.manual_seed(0)
            return transducer_losses(*inputs, lattice).sum()

        direction = [torch.randn_like(tensor) for tensor in tensors]
        step = 1e-6
        with torch.no_grad():
            up = value(*(t + step * d for t, d in zip(tensors, direction, strict=True)))
            down = value(*(t - step * d for t, d in zip(tensors, direction, strict=True)))
        pairs = zip(gradients(value(*tensors), tensors), direction, strict=True)
        slope = sum(float((g * d).sum()) for g, d in pairs)
        difference = float(up - down) / (2 * step)
        assert slope == pytest.approx(difference, rel=1e-6 if least == 0.0 else 0.1)
    without = transducer_losses(*tensors, Lattice(targets, frames, labels, (0, 1, 2, 3, 4)))
    assert value(*tensors).item() != pytest.approx(without.sum().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_small_gradients(dtype):
    """Products are in 16 bits, and gradients whose factor is far below fp16's range still
    arrive."""
    tensors, targets, frames, labels = random_case(4, batch=2, vocabulary=40)
    lattice = Lattice(targets, frames, labels, (0, 1, 2, 3, 4))
    exact = gradients(transducer_losses(*tensors, lattice).sum(), tensors)
    singles = [tensor.detach().float().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype):
        ours = transducer_losses(*singles, lattice)
    assert ours.dtype is torch.float32
    for one, other in zip(gradients(ours.sum() * 1e-12, singles), exact, strict=True):
        assert float((one.double() / 1e-12 - other).norm() / other.norm()) < 0.03


# --- RNN-T ----------------------------------------------------------------------------------------


def rnnt_lattice(tensors, targets, frames, labels) -> tuple[torch.Tensor, ...]:
    """(B,) RNN-T losses (Graves 2012) on the whole joint output, cell by cell, and the token
    log-probabilities (B, T, U + 1, V + 1) and occupancies and label posteriors (B, T, U + 1) of
    which FastEmit is made."""
    logits = whole_logits(tensors).log_softmax(-1)
    found = []
    posteriors = []
    for b, lattice in enumerate(logits):
        t_size, u_size = int(frames[b]), int(labels[b])
        alpha = {(0, 0): lattice.new_zeros(())}
        for t, u in itertools.product(range(t_size), range(u_size + 1)):
            arcs = []
            if t:
                arcs.append(alpha[t - 1, u] + lattice[t - 1, u, -1])
            if u:
                arcs.append(alpha[t, u - 1] + lattice[t, u - 1, targets[b, u - 1]])
            if arcs:
                alpha[t, u] = torch.stack(arcs).logsumexp(0)
        total = alpha[t_size - 1, u_size] + lattice[t_size - 1, u_size, -1]
        beta = {(t_size, u_size): lattice.new_zeros(())}
        for t, u in itertools.product(reversed(range(t_size)), reversed(range(u_size + 1))):
            arcs = []
            if (t + 1, u) in beta:
                arcs.append(beta[t + 1, u] + lattice[t, u, -1])
            if u < u_size:
                arcs.append(beta[t, u + 1] + lattice[t, u, targets[b, u]])
            beta[t, u] = torch.stack(arcs).logsumexp(0)
        assert torch.allclose(beta[0, 0], total)
        for t, u in itertools.product(range(t_size), range(u_size)):
            label = alpha[t, u] + lattice[t, u, targets[b, u]] + beta[t, u + 1] - total
            posteriors.append((b, t, u, label.exp().detach()))
        found.append(-total)
    return torch.stack(found), logits, posteriors


@pytest.mark.parametrize("fastemit", [0.0, 0.3])
def test_without_durations_it_is_the_rnnt_loss(fastemit):
    """Losses and all gradients of 200 random ragged cases in float64 against a lattice that is
    written out. FastEmit's gradient is that of the label arcs' log-probabilities with their
    posteriors held fixed (Yu et al. 2021, equations 9 and 10)."""
    random = np.random.default_rng(1)
    for seed in range(200 if not fastemit else 40):
        sizes = {"frames": int(random.integers(1, 13)), "labels": int(random.integers(0, 8))}
        tensors, targets, frames, labels = random_case(seed, (), **sizes)
        weights = torch.rand(len(frames), dtype=torch.float64)
        theirs, logits, posteriors = rnnt_lattice(tensors, targets, frames, labels)
        value = (theirs * weights).sum()
        for b, t, u, posterior in posteriors:
            value = value - fastemit * weights[b] * posterior * logits[b, t, u, targets[b, u]]
        lattice = Lattice(targets, frames, labels, (), fastemit=fastemit, least_occupancy=0.0)
        ours = transducer_losses(*tensors, lattice)
        assert_close([ours], [theirs], 1e-12)
        assert_close(gradients((ours * weights).sum(), tensors), gradients(value, tensors), 1e-11)
