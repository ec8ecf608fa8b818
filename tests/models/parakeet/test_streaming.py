"""Streams against the pass over the whole recording."""

import pytest
import torch

from models.parakeet import decoding
from models.parakeet.model import Parakeet
from models.parakeet.settings import make_config
from models.parakeet.streaming import Stream

LEFT = 12
LOOKAHEADS = (0, 1, 2, 3, 5, 4, 13)  # + 1 does not divide LEFT in the last two
CHUNK = 160 * 8


def make(**changes) -> Parakeet:
    """A model with random weights that writes something. A part that is None is left out."""
    config = make_config(16, 2, 2, (8, 2), 6, num_mel_bins=16, channels=4, durations=[0, 1, 2, 4])
    config |= {
        "streaming": {"left": LEFT, "lookaheads": list(LOOKAHEADS)},
        "prompts": {"slots": 7, "width": 24},
        "max_symbols": 3,
        **changes,
    }
    config = {name: value for name, value in config.items() if value is not None}
    torch.manual_seed(0)
    model = Parakeet(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, dtype=parameter.dtype)
    model.prompt = 3
    return model


def noise(samples: int) -> torch.Tensor:
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(1)).double()


@torch.no_grad()
def whole(model: Parakeet, waveform: torch.Tensor, lookahead: int):
    """The encoder's output (T, D) and the tokens of one pass."""
    lengths = torch.tensor([len(waveform)])
    batch = {
        "audio": waveform[None],
        "audio_lengths": lengths,
        "audio_lengths_host": lengths,
        "lookaheads": torch.tensor([lookahead]),
    }
    encoded, frames = model.encode(batch)
    return encoded[0], decoding.decode(model, encoded, frames)[0]


def streamed(model: Parakeet, pieces: list[torch.Tensor], lookahead: int):
    """The same in steps, and how many tokens there were before the end."""
    outputs = []
    stream = Stream(model, lookahead)
    projector = model.prompt_projector or model.encoder_projector
    hook = projector.register_forward_hook(
        lambda _, given, made: outputs.append(made if model.prompt_projector else given[0])
    )
    tokens = []
    for piece in pieces:
        tokens += stream.push(piece)
    early = len(tokens)
    tokens += stream.finish()
    hook.remove()
    return torch.cat(outputs, 1)[0], tokens, early


def assert_same(model: Parakeet, pieces: list[torch.Tensor], lookahead: int):
    encoded, tokens, early = streamed(model, pieces, lookahead)
    expected, expected_tokens = whole(model, torch.cat(pieces), lookahead)
    assert encoded.shape == expected.shape
    assert (encoded - expected).abs().max() < 1e-9
    assert tokens == expected_tokens
    return tokens, early


def cut(waveform: torch.Tensor, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, len(waveform), (12,), generator=generator).sort()[0].tolist()
    return list(waveform.tensor_split(edges))


SHAPES = {
    "as released": {},
    "biases, scaled, factor 4, no prompt": {
        "biases": True, "scale_input": True, "subsampling": 4, "prompts": None,
    },
    "factor 2, kernel 1, other bands": {"subsampling": 2, "kernel": 1, "num_mel_bins": 19},
}  # fmt: skip


CASES = [*((SHAPES["as released"], each) for each in LOOKAHEADS)]
CASES += [(changes, each) for changes in [*SHAPES.values()][1:] for each in (0, 3, 13)]


@pytest.mark.parametrize(("changes", "lookahead"), CASES)
def test_a_stream_that_is_cut_anywhere_equals_one_pass(changes, lookahead):
    model = make(**changes)
    found = 0
    for seed, samples in enumerate([45 * CHUNK, 21 * CHUNK + 999, 16_001]):
        tokens, early = assert_same(model, cut(noise(samples), seed), lookahead)
        assert early >= len(tokens) // 2 or samples < 20_000
        found += len(tokens)
    assert found > 15


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_every_end_of_a_recording(lookahead):
    model = make(layers=1)
    counts = [1, 159, 160, 161, 199, 200, 201, 320]
    counts += [n * CHUNK + k for n in (1, 4) for k in (-1, 0, 1, 39, 40, 199, 200, 201, 320, 480)]
    for count in counts:
        assert_same(model, [noise(count)], lookahead)
    stream = Stream(model, lookahead)
    assert stream.push(torch.zeros(0)) == [] and stream.finish() == []


def test_a_chunk_is_decoded_when_its_last_feature_can_be_made():
    model = make()
    for lookahead in (0, 3):
        stream = Stream(model, lookahead)
        waveform = noise(40 * CHUNK)
        for frame in (lookahead, 2 * lookahead + 1, 3 * lookahead + 2):
            stream.push(waveform[stream.samples : frame * CHUNK + 199])
            assert stream.encoder.frames == frame - lookahead
            stream.push(waveform[stream.samples : frame * CHUNK + 200])
            assert stream.encoder.frames == frame + 1


def kept(value, seen: set) -> tuple[int, int]:
    """Bytes of tensors and numbers of items that an object keeps, without the model's."""
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return 0, 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes(), 1
    items = []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "__dict__"):
        items = list(vars(value).values())
    parts = [kept(item, seen) for item in items]
    return sum(size for size, _ in parts), len(items) + sum(count for _, count in parts)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_what_a_stream_keeps_does_not_grow(lookahead):
    model = make(layers=1)
    stream = Stream(model, lookahead)
    sizes = []
    for _ in range(6):
        stream.push(noise(40 * CHUNK))
        sizes.append(kept(stream, set()))
    assert len(set(sizes[1:])) == 1 and sizes[0][0] > 10_000
