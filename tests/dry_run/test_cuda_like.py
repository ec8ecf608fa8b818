"""CUDA's choices on the CPU: types under autocast, kernels of attention, dropout, LSTM and CTC, and
the CPU as before afterwards."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dry_run.cuda_like import RESERVE, cuda_like, kernel_of
from dry_run.fake_tensors import FakeTensors

AMPERE, TURING = (8, 0), (7, 5)
HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
aten = torch.ops.aten


@contextlib.contextmanager
def gpu(capability: tuple[int, int] = AMPERE):
    """Yields a function that makes fake tensors (as weights if `trained`) on a GPU, and the
    mode."""
    mode = FakeTensors()

    def make(
        *shape: int, dtype: torch.dtype = torch.float32, trained: bool = False
    ) -> torch.Tensor:
        tensor = mode.make(shape, torch.empty(shape, device="meta").stride(), dtype)
        return nn.Parameter(tensor) if trained else tensor

    with cuda_like(capability), mode:
        yield make, mode


def autocast(dtype: torch.dtype = torch.bfloat16, **named):
    return torch.autocast("cpu", dtype, **named)


@HALVES
def test_products_are_in_16_bits(half):
    with gpu() as (make, _), autocast(half):
        x = make(2, 8, 16)
        assert F.linear(x, make(4, 16), make(4)).dtype is half
        assert (x @ make(16, 4)).dtype is half
        assert torch.einsum("btd,de->bte", x, make(16, 4)).dtype is half
        assert F.conv1d(x, make(4, 8, 3)).dtype is half
        assert F.conv2d(x[:, None], make(4, 1, 3, 3)).dtype is half
        assert F.scaled_dot_product_attention(*[make(1, 2, 8, 16)] * 3).dtype is half


@HALVES
def test_sums_and_norms_are_in_fp32(half):
    with gpu() as (make, _), autocast(half):
        x = make(2, 8, 16, dtype=half)
        for y in (
            F.layer_norm(x, (16,), make(16), make(16)),
            x.softmax(-1),
            x.log_softmax(-1),
            x.sum(),
            x.sum(1),
            x.cumsum(1),
            x.exp(),
            F.cross_entropy(x[0], torch.zeros(8, dtype=torch.long)),
            F.group_norm(x, 2),
            torch.stft(make(400), 16, return_complex=True).abs(),
        ):
            assert y.dtype is torch.float32
        assert x.softmax(-1, dtype=torch.float64).dtype is torch.float64
        for y in (F.gelu(x), F.relu(x), x + x, x.float() + x):
            assert y.dtype in (half, torch.float32)
        assert F.gelu(x).dtype is half and (x.float() + x).dtype is torch.float32


def test_what_only_the_cpus_lists_name_keeps_its_type():
    x = torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    with autocast():
        assert F.pad(x, (1, 1), mode="replicate").dtype is torch.float32
    with gpu() as (make, _), autocast():
        padded = F.pad(make(2, 8, 16, dtype=torch.bfloat16), (1, 1), mode="replicate")
        assert padded.dtype is torch.bfloat16


def test_cat_takes_the_widest_type():
    with gpu() as (make, _), autocast():
        half, single = make(4, 4, dtype=torch.bfloat16), make(4, 4)
        assert torch.cat([half, half]).dtype is torch.bfloat16
        assert torch.cat([half, single]).dtype is torch.float32
        assert torch.stack([single, half]).dtype is torch.float32


@pytest.mark.parametrize("cached", [True, False])
def test_weights_are_cast_once_with_the_cache(cached):
    with gpu() as (make, mode):
        x, weight = make(512, 512, dtype=torch.bfloat16, trained=True), make(512, 512, trained=True)
        before, copy = mode.now, 512 * 512 * 2
        with autocast(cache_enabled=cached):
            with torch.no_grad():
                F.linear(x, weight)
            assert mode.now - before == copy * cached
            outputs = [F.linear(x, weight) for _ in range(2)]  # backward keeps the copy
            assert mode.now - before == copy * (2 + (1 if cached else 2))
        del outputs
        assert mode.now == before


def kernels_of(mode: FakeTensors) -> set[str]:
    """The kernels of attention that ran."""
    names = {
        operator.name.removeprefix("aten::_scaled_dot_product_")
        for operator in mode.operators.values()
    }
    return {name for name in names if name.endswith("attention")}


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "kernel"),
    [
        ((8, 0), torch.bfloat16, False, "flash"),
        ((9, 0), torch.float16, False, "flash"),
        ((7, 5), torch.float16, False, "efficient"),
        ((8, 0), torch.bfloat16, True, "efficient"),
        ((8, 0), torch.float32, False, "efficient"),
        ((7, 5), torch.float16, True, "efficient"),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention(capability, dtype, masked, kernel, dropout):
    with gpu(capability) as (make, mode):
        q, k, v = (make(2, 4, length, 32, dtype=dtype, trained=True) for length in (100, 90, 90))
        mask = torch.ones(2, 1, 1, 90, dtype=torch.bool) if masked else None
        before = mode.now
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        assert y.shape == q.shape and kernels_of(mode) == {f"{kernel}_attention"}
        # The output, the sums of the softmax, the mask: not the weights.
        assert mode.now - before < 2 * y.nbytes + 8192
        y.backward(torch.empty_like(y))
        assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


def random_attention(seed: int, device: str, dtypes: tuple) -> tuple:
    """q, k, v, mask, dropout and causal of random shapes, strides and types."""
    random = np.random.default_rng(seed)

    def chance(share: float) -> bool:
        return random.random() < share

    head = int(random.choice([1, 4, 8, 20, 30, 64, 128, 200, 256, 264]))
    batch, heads, queries, keys = (int(n) for n in random.integers(1, 5, 4))
    dtype = dtypes[random.integers(len(dtypes))]
    trained = chance(0.5)

    def make(rows: int, *, head: int = head, heads: int = heads, batch: int = batch):
        order = [0, 1, 3, 2] if chance(0.15) else [0, 1, 2, 3] if chance(0.5) else [0, 2, 1, 3]
        shape = [(batch, heads, rows, head)[dim] for dim in order]
        x = torch.zeros(shape, dtype=dtype, device=device).permute(*np.argsort(order).tolist())
        return x.requires_grad_(trained)

    q, k = make(queries), make(keys, heads=heads + chance(0.1), batch=batch + chance(0.1))
    v = make(keys, heads=k.shape[1], batch=k.shape[0], head=8 if chance(0.1) else head)
    causal, mask = chance(0.3), None
    if not causal and chance(0.5):
        mask = torch.zeros(batch, 1, queries, keys, device=device, dtype=torch.bool)
        if chance(0.3):
            mask = torch.zeros(batch, 1, keys, queries, device=device, dtype=dtype).mT
    return q, k, v, mask, float(random.choice([0.0, 0.1])), causal


def test_the_kernel_of_attention_follows_torchs_rules_for_the_cpu():
    """Which has one fused kernel: for heads of any width, without dropout and for masks of any
    stride; all else is as for a GPU."""
    fused = 0
    for seed in range(400):
        q, k, v, mask, _, causal = random_attention(seed, "cpu", (torch.float32, torch.bfloat16))
        if q.shape[-1] % 8 or q.shape[-1] > 256 or v.shape[-1] % 8:
            continue
        is_fused = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal) == 1
        bias = None if mask is None else torch.zeros(mask.shape, dtype=mask.dtype)
        if q.shape[-1] == v.shape[-1]:
            kernel = kernel_of(q, k, v, bias, 0.0, causal, AMPERE)
            assert (kernel != "math") == is_fused, seed
        fused += is_fused
    assert 50 < fused < 200


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_kernel_of_attention_is_torchs():
    capability = torch.cuda.get_device_capability()
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    kernels = set()
    for seed in range(1000):
        given = random_attention(seed, "cuda", dtypes)
        params = torch.backends.cuda.SDPAParams(*given, False)
        expected = "math"
        if torch.backends.cuda.can_use_flash_attention(params):
            expected = "flash"
        elif torch.backends.cuda.can_use_efficient_attention(params):
            expected = "efficient"
        assert kernel_of(*given, capability) == expected, (seed, given)
        kernels.add(expected)
    assert {"efficient", "math"} <= kernels


def test_attention_of_strided_heads_keeps_all_scores():
    """Fused kernels read the values of a head side by side."""
    with gpu() as (make, mode):
        heads = make(1, 4, 3, 32, 256, dtype=torch.bfloat16, trained=True)
        before = mode.now
        q, k, v = heads.permute(2, 0, 1, 4, 3)
        y = F.scaled_dot_product_attention(q, k, v)
        assert mode.now - before > 4 * 256 * 256 * 4 and not kernels_of(mode)
        del y
        q, k, v = heads.permute(2, 0, 1, 4, 3).contiguous()
        y = F.scaled_dot_product_attention(q, k, v)
        assert y.shape == (1, 4, 256, 32) and kernels_of(mode) == {"flash_attention"}


@pytest.mark.parametrize(
    ("capability", "kernel"), [((8, 0), "flash"), ((8, 9), "efficient"), ((12, 0), "efficient")]
)
def test_wide_heads_have_no_flash_backward_on_some_gpus(capability, kernel):
    q = torch.zeros(1, 2, 4, 224, dtype=torch.bfloat16)
    assert kernel_of(q, q, q, None, 0.0, True, capability) == "flash"
    q.requires_grad_()
    assert kernel_of(q, q, q, None, 0.0, True, capability) == kernel


def test_dropout_keeps_a_mask_of_bytes():
    with gpu() as (make, mode):
        x = make(1024, 1024, trained=True)
        before = mode.now
        y = F.dropout(x, 0.1)
        assert mode.now - before == x.numel() * (4 + 1)
        assert F.dropout(x, 0.0) is not None and F.dropout(x, 0.1, training=False).shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_lstm(batch_first, layers, bidirectional, half):
    batch, steps, width, hidden, directions = 3, 50, 24, 64, 1 + bidirectional
    with gpu() as (make, mode):
        model = nn.LSTM(width, hidden, layers, batch_first=batch_first, bidirectional=bidirectional)
        for name, weight in list(model._parameters.items()):
            model._parameters[name] = nn.Parameter(make(*weight.shape))
        model._init_flat_weights()
        x = make(*((batch, steps) if batch_first else (steps, batch)), width, trained=True)
        before = mode.now
        with autocast(half or torch.bfloat16, enabled=half is not None, cache_enabled=False):
            y, (h, c) = model(x)
        assert y.shape == (*x.shape[:2], directions * hidden) and y.dtype is (half or torch.float32)
        assert h.shape == c.shape == (layers * directions, batch, hidden)
        size = 2 if half else 4
        reserve = batch * steps * hidden * directions * layers * RESERVE * size
        copies = 2 * sum(weight.numel() for weight in model.parameters()) if half else 0
        kept = reserve + copies + y.nbytes + (x.numel() * 2 if half else 0)
        assert kept <= mode.now - before <= 1.1 * kept + 16384  # states and rounding
        y.float().sum().backward()
        assert x.grad.shape == x.shape
        for weight in model.parameters():
            assert weight.grad.shape == weight.shape and weight.grad.dtype is torch.float32
        del y, h, c
        gradients = [x.grad.nbytes, *(weight.grad.nbytes for weight in model.parameters())]
        assert mode.now - before == pytest.approx(sum(gradients), abs=512 * len(gradients))


def test_ctc():
    frames, batch, tokens, longest = 300, 4, 40, 60
    with gpu() as (make, mode):
        logits = make(frames, batch, tokens, trained=True)
        log_probs = logits.log_softmax(-1)
        before = mode.now
        targets = torch.ones(batch, longest, dtype=torch.long)
        lengths = torch.full((batch,), frames), torch.tensor([60, 40, 30, 1])
        loss = F.ctc_loss(log_probs, targets, *lengths, reduction="sum")
        log_alpha = batch * frames * (2 * longest + 1) * 4
        assert log_alpha <= mode.now - before <= log_alpha + 4096
        loss.backward()
        assert logits.grad.shape == logits.shape and mode.peak_internal in (0, log_alpha)


def test_the_cpu_is_as_before_afterwards():
    torch.manual_seed(0)
    x, half = torch.randn(2, 3, 8, 16), torch.bfloat16
    lstm = nn.LSTM(16, 8)

    def results() -> list[torch.Tensor]:
        torch.manual_seed(1)
        with autocast():
            made = [F.layer_norm(x.to(half), (16,)), F.linear(x, x[0, 0]), lstm(x[0])[0]]
        made += [F.dropout(x, 0.5), F.scaled_dot_product_attention(x, x, x, None, 0.5)]
        return [*made, lstm(x[0])[0]]

    before = results()
    with gpu() as (make, _), autocast():
        F.linear(make(4, 4), make(4, 4))
        assert make(4).is_cuda and make(4).pin_memory().shape == (4,)
    after = results()
    assert [y.dtype for y in before] == [y.dtype for y in after]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not x.is_cuda and torch.isfinite(after[3]).all() and after[3].std() > 0
