"""What several tests compare with."""

import math

import numpy as np
import pytest
import torch

try:
    import torchaudio
except (ImportError, RuntimeError):  # its last version refuses torch 2.15
    torchaudio = None
needs_torchaudio = pytest.mark.skipif(torchaudio is None, reason="no torchaudio runs here")


def assert_rounded(ours, theirs, low: torch.dtype | None = None) -> None:
    """That tensors, or None, are those of another way of adding the same terms. Every CPU's
    libraries choose their own order for a product of such and such a form, so they differ by
    roundings: sixteen of `low`, the type in which the products were computed, if it is not
    theirs."""
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None
            continue
        rounding = torch.finfo(low or other.dtype).eps
        assert one.dtype == other.dtype
        assert (one - other).norm() <= 16 * rounding * other.norm()


def same_tensors(first: dict, second: dict) -> bool:
    """Whether tensors by name, or groups of them, are equal, with their types."""
    if first.keys() != second.keys():
        return False
    pairs = [(first[name], second[name]) for name in first]
    return all(
        same_tensors(a, b) if isinstance(a, dict) else torch.equal(a, b) and a.dtype == b.dtype
        for a, b in pairs
    )


def resampled(waveform: np.ndarray, source: int, target: int) -> np.ndarray:
    """(T,) at `target` Hz of (T,) at `source` Hz by the definition: each sample is the sum over all
    samples, weighted by a sinc with six zero crossings on each side under a Hann window."""
    rate = 0.99 * min(source, target)
    made = np.arange(math.ceil(len(waveform) * target / source)) / target
    first = np.floor((made - 6 / rate) * source).astype(int)
    near = first[:, None] + np.arange(math.ceil(12 * source / rate) + 2)
    x = rate * (made[:, None] - near / source)
    weights = np.where(abs(x) < 6, np.sinc(x) * np.cos(math.pi * x / 12) ** 2, 0.0)
    weights[(near < 0) | (near >= len(waveform))] = 0.0
    near = near.clip(0, len(waveform) - 1)
    return (weights * waveform[near]).sum(1) * rate / source


def texts_in_sherpa(recognizer, clips: list[np.ndarray]) -> tuple[list[str], list[str]]:
    """The texts of clips at 16 kHz that sherpa-onnx writes one by one, and as a batch."""

    def streams() -> list:
        made = [recognizer.create_stream() for _ in clips]
        for stream, samples in zip(made, clips, strict=True):
            stream.accept_waveform(16_000, samples)
        return made

    single, together = streams(), streams()
    for stream in single:
        recognizer.decode_stream(stream)
    recognizer.decode_streams(together)
    return tuple([each.result.text.strip() for each in made] for made in (single, together))


def write_texts(texts: dict[str, str], folder) -> None:
    """Writes texts by the names of their files."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
