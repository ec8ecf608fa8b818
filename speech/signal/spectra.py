"""Mel filters, mel spectrograms, resampling, and waveforms of spectra, as torchaudio 2.11 defines
them. That was its last version, and it refuses torch 2.15."""

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

# The band-limited interpolation of `resample`: zero crossings on each side, and the share of the
# lower Nyquist frequency that stays.
CROSSINGS = 6
ROLLOFF = 0.99
TINY = 1e-16  # beside the magnitude of a frequency bin
# Of `linear_spectrum`.
INVERSION_STEPS = 50
SMALLEST = 1e-10  # value of a frequency bin; a bin at 0 would stay there


def mel_of(hertz: Tensor, scale: str) -> Tensor:
    """Mel: "htk" (O'Shaughnessy 1987), or "slaney" (Auditory Toolbox), linear below 1 kHz."""
    if scale == "htk":
        return 2595 * torch.log10(1 + hertz / 700)
    above = 15 + 27 * torch.log(hertz.clamp_min(1e-3) / 1000) / math.log(6.4)
    return torch.where(hertz < 1000, 3 * hertz / 200, above)


def hertz_of(mel: Tensor, scale: str) -> Tensor:
    """The inverse of `mel_of`."""
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return torch.where(mel < 15, 200 * mel / 3, 1000 * torch.exp((mel - 15) * math.log(6.4) / 27))


def mel_filters(
    bins: int,
    highest: float,
    bands: int,
    sample_rate: int,
    scale: str = "htk",
    has_equal_area: bool = False,
) -> Tensor:
    """Triangular filters (bins, bands) from 0 to `highest` Hz over the `bins` of a real FFT, on the
    CPU, in the default type. A triangle reaches 1, or with `has_equal_area` has the area 1 over
    Hz. Computed in fp64, because fp32 loses up to 2e-5 of a narrow filter's weight."""
    with torch.device("cpu"):  # a model on the device "meta" has no values
        frequencies = torch.linspace(0, sample_rate // 2, bins, dtype=torch.float64)
        ends = mel_of(torch.tensor([0.0, highest], dtype=torch.float64), scale)
        points = torch.linspace(ends[0].item(), ends[1].item(), bands + 2, dtype=torch.float64)
        low, middle, high = hertz_of(points, scale).unfold(0, bands, 1)
    rising = (frequencies[:, None] - low) / (middle - low)
    falling = (high - frequencies[:, None]) / (high - middle)
    filters = torch.minimum(rising, falling).clamp_min(0)
    if has_equal_area:
        filters = filters * (2 / (high - low))
    return filters.to(torch.get_default_dtype())


class MelSpectrogram(nn.Module):
    """Waveforms (B, T) to the power (B, M, T // hop + 1) in mel bands. Frames are centred, with
    mirrored ends, so T must exceed n_fft / 2. The buffers have the names of torchaudio's, which
    released models have in their files."""

    def __init__(self, n_fft: int, hop: int, window: Tensor, filters: Tensor):
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.spectrogram = nn.Module()
        self.spectrogram.register_buffer("window", window)
        self.mel_scale = nn.Module()
        self.mel_scale.register_buffer("fb", filters)

    def forward(self, waveforms: Tensor) -> Tensor:
        window = self.spectrogram.window
        spectrum = torch.stft(
            waveforms, self.n_fft, self.hop, len(window), window, return_complex=True
        )
        return (spectrum.abs().square().transpose(1, 2) @ self.mel_scale.fb).transpose(1, 2)


@functools.lru_cache(maxsize=32)
def resampling_filters(source: int, target: int) -> tuple[Tensor, int]:
    """The filters (target, 1, K) from `source` to `target` samples, which have no common divisor,
    in fp64, and how many samples they reach back."""
    rate = ROLLOFF * min(source, target)  # zero crossings in `source` samples
    reach = math.ceil(CROSSINGS * source / rate)
    heard = torch.arange(-reach, reach + source, dtype=torch.float64, device="cpu") / source
    made = torch.arange(target, dtype=torch.float64, device="cpu") / target
    x = (rate * (heard - made[:, None])).clamp(-CROSSINGS, CROSSINGS)
    window = torch.cos(x * math.pi / (2 * CROSSINGS)).square()
    return (torch.sinc(x) * window * rate / source)[:, None], reach


def resample(waveform: Tensor, source: int, target: int) -> Tensor:
    """(T,) at `source` Hz to (ceil(T target / source),) at `target` Hz, by sinc functions under a
    Hann window (Smith, Digital Audio Resampling)."""
    divisor = math.gcd(source, target)
    source, target = source // divisor, target // divisor
    if source == target:
        return waveform
    filters, reach = resampling_filters(source, target)
    padded = nn.functional.pad(waveform, (reach, reach + source))
    made = _filtered(padded, filters, source)
    return made[: math.ceil(target * len(waveform) / source)]


def resampled(pieces: Iterable[Tensor], source: int, target: int) -> Iterator[Tensor]:
    """`resample` of pieces (T,) of a waveform, in others; the rates have no common divisor."""
    if source == target:
        yield from pieces
        return
    filters, reach = resampling_filters(source, target)
    kept = torch.zeros(reach)
    heard = made = 0
    for piece in pieces:
        heard += len(piece)
        kept = torch.cat([kept, piece])
        blocks = (len(kept) - filters.shape[2]) // source + 1
        if blocks > 0:
            yield _filtered(kept, filters, source)
            kept = kept[blocks * source :]
            made += blocks * target
    kept = nn.functional.pad(kept, (0, reach + source))
    yield _filtered(kept, filters, source)[: math.ceil(target * heard / source) - made]


def _filtered(padded: Tensor, filters: Tensor, source: int) -> Tensor:
    made = nn.functional.conv1d(padded[None, None], filters.to(padded), stride=source)
    return made[0].t().flatten()


def linear_spectrum(bands: Tensor, filters: Tensor, inverse: Tensor | None = None) -> Tensor:
    """The spectrum (..., N, F), at least 0, of power or of magnitude, whose sums over `filters`
    (N, M) are nearest to `bands` (..., M, F): the pseudo-inverse of the filters' transpose, which
    may be given, improved by multiplicative updates (Lee and Seung 2000)."""
    transposed = filters.t()
    inverse = torch.linalg.pinv(transposed) if inverse is None else inverse
    spectrum = (inverse @ bands).clamp_min(SMALLEST)
    target = filters @ bands
    for _ in range(INVERSION_STEPS):
        spectrum = spectrum * target / (filters @ (transposed @ spectrum)).clamp_min(SMALLEST**2)
    return spectrum


def griffin_lim(power: Tensor, window: Tensor, hop: int, steps: int, momentum: float) -> Tensor:
    """The waveform (hop (F - 1),) whose spectrum is near to `power` (N, F) in magnitude (Griffin
    and Lim 1984, with the momentum of Perraudin et al. 2013). Phases begin at 0."""
    n_fft = 2 * (len(power) - 1)
    settings = {"n_fft": n_fft, "hop_length": hop, "win_length": len(window), "window": window}
    magnitude = power.sqrt()
    phases = torch.complex(torch.ones_like(magnitude), torch.zeros_like(magnitude))
    earlier_spectrum = torch.zeros_like(phases)
    for _ in range(steps):
        waveform = torch.istft(magnitude * phases, **settings)
        spectrum = torch.stft(waveform, **settings, return_complex=True)
        phases = spectrum - earlier_spectrum * (momentum / (1 + momentum))
        phases = phases / (phases.abs() + TINY)
        earlier_spectrum = spectrum
    return torch.istft(magnitude * phases, **settings)
