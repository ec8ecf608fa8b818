"""The encoder of streaming models, against transformers' Nemotron."""

import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import (
    Nemotron3_5AsrConfig,
    Nemotron3_5AsrForRNNT,
    NemotronAsrStreamingConfig,
    NemotronAsrStreamingForRNNT,
)

from models.parakeet import model as network
from models.parakeet.model import Encoder, PromptProjector, relative_positions
from models.parakeet.settings import make_config
from speech.signal.features import valid_mask

LEFT = 12
LOOKAHEADS = (0, 1, 2, 3, 5)  # + 1 divides LEFT
LENGTHS = [241, 240, 239, 97, 8, 1]
SLOTS = 7
SHAPES = {
    "as released": {},
    "biases, scaled, factor 4": {"biases": True, "scale_input": True, "subsampling": 4},
    "other bands, factor 2, kernel 5": {"num_mel_bins": 19, "subsampling": 2, "kernel": 5},
}


def make(**changes) -> dict:
    streaming = {"left": LEFT, "lookaheads": list(LOOKAHEADS)}
    prompts = {"slots": SLOTS, "width": 24}
    config = make_config(16, 2, 2, (8, 2), 6, num_mel_bins=16, channels=4, durations=[])
    return {**config, "streaming": streaming, "prompts": prompts, **changes}


def make_theirs(config: dict, has_prompts: bool):
    """transformers' model with random weights, none of which is zero."""
    streaming = config["streaming"]
    content = {
        "vocab_size": config["vocabulary"] + 1,
        "blank_token_id": config["vocabulary"],
        "decoder_hidden_size": config["prediction_width"],
        "num_decoder_layers": config["prediction_layers"],
        "max_symbols_per_step": config["max_symbols"],
        "encoder_config": {
            "model_type": "nemotron_asr_streaming_encoder",
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["layers"],
            "num_attention_heads": config["heads"],
            "intermediate_size": config["ffn"],
            "conv_kernel_size": config["kernel"],
            "subsampling_factor": config["subsampling"],
            "subsampling_conv_channels": config["channels"],
            "num_mel_bins": config["num_mel_bins"],
            "attention_bias": config["biases"],
            "convolution_bias": config["biases"],
            "scale_input": config["scale_input"],
            "layerdrop": 0.0,
            "sliding_window": streaming["left"] + 1,
            "default_num_lookahead_tokens": streaming["lookaheads"][0],
        },
    }
    torch.manual_seed(0)
    if has_prompts:
        slots, width = config["prompts"]["slots"], config["prompts"]["width"]
        content |= {"num_prompts": slots, "prompt_intermediate_size": width}
        model = Nemotron3_5AsrForRNNT(Nemotron3_5AsrConfig(**content, default_prompt_id=slots - 2))
    else:
        model = NemotronAsrStreamingForRNNT(NemotronAsrStreamingConfig(**content))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    # Both are fp32; theirs is rounded after another operation.
    d = config["d_model"]
    model.encoder.encode_positions.inv_freq = 10_000.0 ** (-torch.arange(0.0, d, 2) / d)
    return model


def our_name(name: str) -> str:
    """Of a tensor of theirs."""
    name = name.replace("subsampling.conv_in.", "subsampling.layers.0.")
    found = re.fullmatch(r"(subsampling\.layers\.)(\d+)\.(depthwise|pointwise)_conv\.(\w+)", name)
    if found is None:
        return name
    start, stage, kind, last = found.groups()
    return f"{start}{2 + 3 * int(stage) + (kind == 'pointwise')}.{last}"


def make_ours(theirs, config: dict) -> Encoder:
    encoder = Encoder(config, 0.0).double().eval()
    weights = theirs.encoder.state_dict()
    encoder.load_state_dict({our_name(name): tensor for name, tensor in weights.items()})
    return encoder


def random_features(lengths: list[int], config: dict) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor(lengths)
    torch.manual_seed(1)
    x = torch.randn(len(lengths), int(lengths.max()), config["num_mel_bins"]).double()
    return x * valid_mask(lengths, x.shape[1])[..., None], lengths


@torch.no_grad()
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_encoder_is_that_of_transformers_for_every_lookahead(changes):
    config = make(**changes)
    theirs = make_theirs(config, has_prompts=False)
    ours = make_ours(theirs, config)
    x, lengths = random_features(LENGTHS, config)
    frames = ours.subsampling.frames(lengths)
    assert frames.tolist() == theirs._get_subsampling_output_length(lengths).tolist()
    mask = valid_mask(lengths, x.shape[1])
    outputs = []
    for lookahead in LOOKAHEADS:
        expected = theirs.encoder(x, mask, num_lookahead_tokens=lookahead).last_hidden_state
        lookaheads = torch.full_like(lengths, lookahead)
        outputs.append(ours(x, lengths, frames.tolist(), lookaheads))
        assert outputs[-1].shape == expected.shape and outputs[-1].std() > 0.1
        for row, count in enumerate(frames.tolist()):
            assert (outputs[-1][row, :count] - expected[row, :count]).abs().max() < 1e-12
    assert torch.equal(ours(x, lengths, frames.tolist()), outputs[0])  # if none is named
    mixed = torch.tensor([LOOKAHEADS[row % 5] for row in range(len(LENGTHS))])
    together = ours(x, lengths, frames.tolist(), mixed)
    for row, count in enumerate(frames.tolist()):
        alone = outputs[row % 5][row, :count]
        assert (together[row, :count] - alone).abs().max() < 1e-12
        assert row > 2 or (together[row, :count] - outputs[row % 5 - 1][row, :count]).norm() > 1e-3


@torch.no_grad()
def test_every_prompt_gives_the_outputs_of_transformers():
    config = make()
    theirs = make_theirs(config, has_prompts=True)
    ours = PromptProjector(config).double()
    ours.load_state_dict(theirs.prompt_projector.state_dict())
    x, lengths = random_features([97, 33] * SLOTS, config)
    prompts = torch.arange(2 * SLOTS) % SLOTS
    expected = theirs.get_audio_features(
        x, valid_mask(lengths, x.shape[1]), prompt_ids=prompts, num_lookahead_tokens=3
    )
    projected = theirs.encoder_projector(ours(expected.last_hidden_state, prompts))
    assert (projected - expected.pooler_output).abs().max() < 1e-12
    other = ours(expected.last_hidden_state, prompts.roll(1))
    assert (theirs.encoder_projector(other) - projected).abs().min(1).values.max() > 1e-3


@torch.no_grad()
def test_padding_and_other_utterances_change_nothing():
    config = make()
    encoder = make_ours(make_theirs(config, has_prompts=False), config)
    x, lengths = random_features(LENGTHS, config)
    lookaheads = torch.tensor([0, 5, 1, 3, 2, 0])
    frames = encoder.subsampling.frames(lengths).tolist()
    together = encoder(x, lengths, frames, lookaheads)
    assert together.isfinite().all()  # padding, too, or its NaN would reach what is valid
    counts = torch.tensor(frames)
    padding = ~valid_mask(counts, together.shape[1])[:, :, None]
    hidden = network.outside_chunks(lookaheads, LEFT, padding, together.shape[1])
    assert hidden.dtype == torch.bool and not hidden.all(-1).any()  # some kernels' NaN
    for row, (length, count) in enumerate(zip(LENGTHS, frames, strict=True)):
        one = slice(row, row + 1)
        alone = encoder(x[one, :length], lengths[one], [count], lookaheads[one])
        assert alone.shape[1] == count
        assert (together[row, :count] - alone[0]).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_frame_sees_nothing_after_its_chunk_nor_long_before_it(lookahead):
    config = make(layers=1)
    encoder = make_ours(make_theirs(config, has_prompts=False), config)
    x, lengths = random_features([481], config)
    frames = encoder.subsampling.frames(lengths).tolist()
    lookaheads = torch.tensor([lookahead])
    before = encoder(x, lengths, frames, lookaheads)[0]
    x[0, 321:] += 1.0  # frame f sees the features up to 8 f
    changed = (encoder(x, lengths, frames, lookaheads)[0] - before).abs().amax(1) > 1e-9
    first = 41 - 41 % (lookahead + 1)
    assert not changed[:first].any() and changed[first:].all()
    x[0, 321:] -= 1.0
    x[0, :1] += 1.0
    changed = (encoder(x, lengths, frames, lookaheads)[0] - before).abs().amax(1) > 1e-9
    assert changed[LEFT] and not changed[LEFT + lookahead + 10 :].any()


@torch.no_grad()
def test_parts_with_what_came_before_give_the_same_as_all_at_once():
    """What a stream needs: every part, on some frames, with the frames before them."""
    config = make(layers=1)
    encoder = make_ours(make_theirs(config, has_prompts=False), config)
    x, _ = random_features([97], config)
    convolution = encoder.subsampling.layers[0]
    images = x[:, None]
    whole = convolution(images)
    later = convolution.step(images[:, :, 40:79])  # of which the first frame came before
    assert (later - whole[:, :, 21:40]).abs().max() < 1e-12

    y = torch.randn(1, 30, 16).double()
    layer = encoder.layers[0]
    gated = layer.conv.gated(y)
    later = layer.conv.step(gated[:, 20 - layer.conv.before :])
    assert (later - layer.conv(y, None)[:, 20:]).abs().max() < 1e-12

    hidden = network.outside_chunks(torch.tensor([3]), LEFT, None, 30)
    whole = layer.self_attn(y, relative_positions(y, 30, 30), hidden)
    q, k, v = layer.self_attn.projected(y)
    distances = layer.self_attn.distances(relative_positions(y, 4, 16))
    later = layer.self_attn.attend(
        q[:, :, 20:24], k[:, :, 8:24], v[:, :, 8:24], distances, hidden=None
    )
    assert (later - whole[:, 20:24]).abs().max() < 1e-12
