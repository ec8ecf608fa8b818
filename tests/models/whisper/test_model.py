"""The Whisper model: the same as transformers', and unchanged by padding and memory options."""

import itertools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers

from common import batches
from models.whisper import formats, scratch
from models.whisper import model as whisper
from models.whisper.model import FRAME, LogMel, Whisper, ctc_loss, gpu_lengths, token_loss

CONFIG = {
    **formats.make_config(16, (2, 2), 2, vocabulary=20),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    "max_source_positions": 150,
    "max_target_positions": 12,
}
WEIGHTS = {"attention": 0.7, "ctc": 0.3}
EOS = 19


def make_model(seed=0, dropout=0.0, **changed):
    """In float64, with weights that make every part count."""
    torch.manual_seed(seed)
    model = Whisper({**CONFIG, **changed}, dropout, label_smoothing=0.1, ctc_tokens=EOS).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
            elif parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def make_items(count, seed=0, shortest=3000, longest=48_000):
    """Waveforms of awkward lengths, one of them a full window; texts that contain the id of eos."""
    random = np.random.default_rng(seed)
    items = []
    for number in range(count):
        samples = longest if number == 1 else int(random.integers(shortest, longest))
        text = random.integers(0, EOS + 1, random.integers(0, 8)).tolist()
        text[1:2] = [EOS] * len(text[1:2])
        items.append(
            {
                "audio": torch.from_numpy(
                    random.normal(0, 0.1, samples) * np.linspace(0.1, 1, samples)
                ),
                "tokens": torch.tensor([17, 18, *text]),
                "labels": torch.tensor([18, *text, EOS])[: len(text) + 2],
                "ctc_tokens": torch.tensor(
                    [token for token in text if token != EOS], dtype=torch.long
                ),
            }
        )
    return items


def collate(items):
    batch = {}
    for key, padding in (("audio", 0.0), ("tokens", EOS), ("labels", EOS), ("ctc_tokens", 0)):
        batch[key], batch[f"{key}_lengths"] = batches.pad([item[key] for item in items], padding)
    batch["heard_lengths"] = batch["audio_lengths"]
    batch["names"] = [str(number) for number in range(len(items))]
    batch["seconds"] = [len(item["audio"]) / 16_000 for item in items]
    labels, tokens = int(batch["labels_lengths"].sum()), int(batch["ctc_tokens_lengths"].sum())
    batch["counts"] = {"attention": labels, "ctc": tokens}
    return batch


def compute_loss(model, batch):
    encoded, mask = model.encode(batch)
    return {
        "attention": token_loss(model, batch, encoded, mask),
        "ctc": ctc_loss(model, batch, encoded),
    }


def moved(batch):
    return next(batches.to_device([batch], torch.device("cpu")))


def gradients(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def loss_and_gradient(model, batch):
    model.zero_grad()
    terms = compute_loss(model, moved(batch))
    loss = sum(WEIGHTS[name] * term for name, term in terms.items())
    loss.backward()
    return float(loss.detach()), gradients(model)


def relative(a, b):
    return float((a - b).norm() / b.norm())


# --- against transformers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        formats.make_config(384, (2, 2), 6, vocabulary=2000),
        {**formats.make_config(512, (2, 2), 8, vocabulary=1000), "max_source_positions": 300},
        {**formats.make_config(320, (3, 3), 5, 128, 4000), "max_source_positions": 300},
    ],
    ids=["tiny", "base", "large-v3"],
)
@torch.no_grad()
def test_outputs_are_transformers_own(config):
    torch.manual_seed(0)
    special = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    theirs = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**config, **special)
    ).eval()
    for name, parameter in theirs.named_parameters():
        if "encoder.embed_positions" not in name:
            parameter += 0.03 * torch.randn_like(parameter)
    ours = Whisper(config).eval()
    weights = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    del weights["proj_out.weight"]
    assert torch.equal(
        weights["encoder.embed_positions.weight"], ours.encoder.embed_positions.weight
    )
    ours.load_state_dict(weights)
    features = torch.randn(1, config["num_mel_bins"], 2 * config["max_source_positions"])
    tokens = torch.randint(0, 1000, (1, 17))
    encoded = theirs.model.encoder(features).last_hidden_state
    assert float((ours.encoder(features) - encoded).abs().max()) < 1e-4
    expected = theirs(encoder_outputs=(encoded,), decoder_input_ids=tokens).logits
    logits = ours.logits(ours.decoder(tokens, encoded, None))
    assert float(expected.abs().max()) > 0.5 and float((logits - expected).abs().max()) < 1e-4
    if config["d_model"] == 320:
        assert float((ours(features, tokens) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_is_the_feature_extractors(n_mels):
    extractor, ours = transformers.WhisperFeatureExtractor(n_mels), LogMel(n_mels, 480_000)
    random = np.random.default_rng(n_mels)
    for samples in (400, 401, 5_000, 16_000, 99_999, 479_520, 479_801, 479_990, 480_000):
        waveform = random.normal(0, 0.1, samples).astype(np.float32)
        waveform[samples // 3 :] *= 1e-4  # below the floor
        waveform += np.sin(np.arange(samples, dtype=np.float32) * 0.3) * (
            np.arange(samples) > samples // 2
        )
        if samples == 5_000:
            waveform[:] = 0
        expected = extractor(waveform, sampling_rate=16_000, return_tensors="pt").input_features[0]
        if samples < 479_000:
            mels = ours(torch.from_numpy(waveform)[None])[0]
            assert mels.shape == (n_mels, samples // 160)
            assert float((mels - expected[:, : mels.shape[1]]).abs().max()) < 1e-5
        size = min(-(-samples // FRAME) * FRAME, 480_000)
        padded = torch.nn.functional.pad(torch.from_numpy(waveform), (0, size - samples))
        mels = ours(padded[None])[0]
        assert mels.shape[1] == size // 160
        assert float((mels - expected[:, : size // 160]).abs().max()) < 1e-5


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 1, 159, 160, 161, 319])
@torch.no_grad()
def test_lengths_around_frames_and_the_grid(odd):
    """An odd number of feature frames ends in the middle of a stride; a multiple of the stride
    alone has no mask."""
    model = make_model()
    items = make_items(3)
    items[0]["audio"] = items[1]["audio"][: FRAME - 160 + odd]
    items[2]["audio"] = items[1]["audio"][: 3200 + odd]
    encoded, _ = model.encode(moved(collate(items)))
    for row in (0, 2):
        alone, _ = model.encode(moved(collate([items[row]])))
        frames = -(-len(items[row]["audio"]) // 320)
        assert float((alone[0, :frames] - encoded[row, :frames]).abs().max()) < 1e-10


def test_what_is_loudest_at_the_very_end_sets_the_floor_alone_too():
    """Its loudest window lies around the utterance's end, and only a longer neighbour in the batch
    would include it."""
    ours, waveform = LogMel(80, 480_000), torch.zeros(FRAME)
    waveform[-60:] = torch.sin(0.4 * torch.arange(60))
    mels = ours(waveform[None])[0]
    beside = ours(torch.nn.functional.pad(waveform, (0, FRAME))[None])[0, :, : mels.shape[1]]
    assert float((mels - beside).abs().max()) < 1e-6


@torch.no_grad()
def test_eos_inside_a_text_counts():
    """Padding has the same id, so a loss masked by id would leave it out."""
    model, items = make_model(), make_items(6)
    model.label_smoothing = 0.0
    expected = 0.0
    for item in items:
        encoded, mask = model.encode(moved(collate([item])))
        logits = model.logits(model.decoder(item["tokens"][None], encoded, mask))[0].log_softmax(-1)
        expected -= sum(float(logits[i, label]) for i, label in enumerate(item["labels"].tolist()))
    assert sum(item["labels"].tolist().count(EOS) > 1 for item in items) >= 3
    assert float(compute_loss(model, moved(collate(items)))["attention"]) == pytest.approx(
        expected, rel=1e-10
    )


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 7, 1000])
def test_the_output_layer_in_pieces_is_the_whole(monkeypatch, rows):
    model, batch = make_model(), collate(make_items(5))
    loss, gradient = loss_and_gradient(model, batch)
    calls = []
    output_loss, weights = whisper.output_loss, set()
    monkeypatch.setattr(whisper, "LOGITS_AT_ONCE", rows * CONFIG["vocab_size"])

    def recorded(weight, x, *rest):
        calls.append(len(x))
        weights.add(id(weight))
        return output_loss(weight, x, *rest)

    monkeypatch.setattr(whisper, "output_loss", recorded)
    again, gradient_again = loss_and_gradient(model, batch)
    assert len(weights) == 1  # cast once for all pieces, not once for each
    assert max(calls) <= rows
    assert again == pytest.approx(loss, rel=1e-12)
    assert relative(gradient_again, gradient) < 1e-12
    with torch.no_grad():
        terms = compute_loss(model, moved(batch))
    assert sum(WEIGHTS[name] * float(term) for name, term in terms.items()) == pytest.approx(
        loss, rel=1e-12
    )


def test_a_frozen_encoder_has_no_dropout():
    """That it learns nothing: tests/recipes/test_whisper.py."""
    batch = collate(make_items(4))
    model = make_model(dropout=0.5)
    model.freeze_encoder()
    assert model.train().decoder.training and not model.encoder.training
    encoded, _ = model.encode(moved(batch))
    assert torch.equal(encoded, model.encode(moved(batch))[0]) and not encoded.requires_grad


# --- a start from nothing -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "d, heads, layers", [(128, 4, 4), (144, 4, 2), (192, 3, 1), (32, 1, 2), (512, 8, 6)]
)
def test_initialised_heads_look_at_their_offsets(d, heads, layers):
    """Without content, position i of each head attends most to i + offset; near neighbours share
    the rest."""
    torch.manual_seed(0)
    shape = formats.make_config(d, (layers, 1), heads, vocabulary=50)
    model = whisper.Whisper({**shape, "max_source_positions": 400})
    scratch.initialise(model, [0.1 * torch.randn(16_000), 0.1 * torch.randn(9_000)])
    places = model.encoder.embed_positions.weight[100:300]
    seen = set()
    for layer in model.encoder.layers:
        attention = layer.self_attn
        x = layer.self_attn_layer_norm(places)
        q, k = (
            attention.split(project(x)[None])[0] for project in (attention.q_proj, attention.k_proj)
        )
        weights = (q @ k.transpose(-1, -2) / (d // heads) ** 0.5).softmax(-1)  # (H, T, T)
        for head in range(heads):
            peaks = weights[head].argmax(-1) - torch.arange(200)
            offset = int(peaks[50:150].median())
            seen.add(offset)
            assert offset != 0 and (peaks[50:150] - offset).abs().float().mean() < 1.5
            near = sum(
                weights[head][torch.arange(60, 140), torch.arange(60, 140) + offset + i]
                for i in range(-6, 7)
            )
            assert near.mean() > 0.5
    assert len(seen) >= min(2, heads) and min(seen) < 0  # of both signs, if there are two


def test_an_initialised_model_listens_before_it_has_learned():
    """The encoder's output differs between inputs, its values are moderate, and the loss begins
    near a uniform guess."""
    torch.manual_seed(0)
    model = whisper.Whisper({**CONFIG, "max_source_positions": 1500})
    waveforms = [0.1 * torch.randn(16_000), 0.2 * torch.sin(torch.arange(16_000) * 0.3)]
    scratch.initialise(model, waveforms)
    with torch.no_grad():
        a, b = (model.encoder(model.log_mel(w[None])) for w in waveforms)
        assert float((a - b).abs().mean()) > 0.1 and float(a.abs().max()) < 20
        logits = model.logits(model.decoder(torch.zeros(1, 3, dtype=torch.long), a, None))
    assert float(logits.abs().max()) < 10


def test_silence_alone_initialises_finitely():
    model = whisper.Whisper({**CONFIG, "max_source_positions": 1500})
    scratch.initialise(model, [torch.zeros(16_000)])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("longest", [480_000, 160_000, 320 * 20])
def test_a_gpu_gets_few_lengths_that_waste_little(longest):
    sizes = gpu_lengths(longest)
    assert len(sizes) == 12
    assert sizes == sorted(sizes)
    assert sizes[-1] == longest
    assert sizes[0] < longest / 16 + FRAME
    assert all(size % FRAME == 0 for size in sizes)
    assert all(after <= 1.29 * before + FRAME for before, after in itertools.pairwise(sizes))
