"""Parakeet's export to ONNX in stock sherpa-onnx, onnx-asr and ONNX Runtime."""

import json
import os
import sys

import numpy as np
import onnx as onnx_library
import onnx_asr
import onnxruntime
import pytest
import sherpa_onnx
import torch
from torch import nn

from common.batches import to_device
from common.errors import RunError, UsageError
from models import onnx_files
from models.parakeet import decoding, formats, onnx, settings, start
from models.parakeet.scratch import fit_to_data
from recipes import parakeet_tdt as recipe
from speech.writing.text import train_tokenizer
from tests.peers import texts_in_sherpa

TEXTS = ["dot", "read", "tac"]
TOKENIZER = {"sentencepiece": train_tokenizer(TEXTS, "char", 0).model.hex()}
VOCABULARY = 8  # the unknown piece and seven letters
CONFIG = settings.make_config(
    32, 1, 2, (16, 2), VOCABULARY, num_mel_bins=80, channels=8, subsampling=4
)
EDGES = np.geomspace(200, 7000, 8)  # Hz: bands of noise, one for each letter
EXTRAS = {"tokenizer": TOKENIZER, "source": {}, "loss": settings.TDT.loss}


def clip(text: str, seed: int) -> np.ndarray:
    """A burst of noise in its band for each letter, over noise in all bands."""
    random = np.random.default_rng(seed)
    samples = 0.02 * random.standard_normal(4000 * (len(text) + 1))
    for number, letter in enumerate(text):
        band = "acdeort".index(letter)
        spectrum = np.fft.rfft(random.standard_normal(2400))
        hertz = np.fft.rfftfreq(2400, 1 / 16_000)
        spectrum[(hertz < EDGES[band]) | (hertz > EDGES[band + 1])] = 0
        burst = np.fft.irfft(spectrum, 2400)
        start_at = 4000 * number + 2000
        samples[start_at : start_at + 2400] += 0.2 * burst / burst.std()
    return samples.astype(np.float32)


def clips(first: int) -> list[np.ndarray]:
    return [clip(text, first + number) for number, text in enumerate(TEXTS)]


CLIPS = clips(0)


def batch_of(tokenizer, spoken: list[np.ndarray]) -> dict:
    items = []
    for text, samples in zip(TEXTS, spoken, strict=True):
        tokens = torch.tensor(tokenizer.encode(text))
        item = {"audio": torch.from_numpy(samples), "tokens": tokens, "text": text, "name": text}
        item |= {"plain": False, "index": 0}
        items.append({**item, "factors": {"tdt": 1.0}, "counts": {"tdt": len(tokens)}})
    return next(to_device([recipe.collate(items)], torch.device("cpu")))


@pytest.fixture(scope="module")
def trained():
    """A small model that has learned the three texts. Every update has other clips: sherpa-onnx
    computes features in another way, and a model that knows three clips by heart may not know
    them again there, which depends on how a CPU rounds."""
    torch.manual_seed(0)
    loss = {**settings.TDT.loss, "ctc": 0.0}
    info = start.ModelInfo(CONFIG, TOKENIZER, loss, source={}, pretrained=False)
    model = start.make_model(info, None)
    tokenizer = start.tokenizer_of(info)
    fit_to_data(model, batch_of(tokenizer, CLIPS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    updates = 200
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 2e-2 * min(1, (update + 1) / 20) * (1 - update / updates)
        batch = batch_of(tokenizer, clips(len(TEXTS) * (update + 1)))
        loss = recipe.compute_loss(model, batch)["tdt"] / batch["counts"]["tdt"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    known = batch_of(tokenizer, CLIPS)
    with torch.no_grad():
        texts = [row["text"] for row in decoding.transcripts(model, tokenizer, known)]
    assert texts == TEXTS
    return model


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "onnx"
    formats.export(folder, "onnx", trained.state_dict(), CONFIG, EXTRAS)
    return folder


@pytest.mark.parametrize("kind", ["", ".int8"])
def test_sherpa_onnx_writes_the_same_texts(kind, folder):
    parts = {part: str(folder / f"{part}{kind}.onnx") for part in ("encoder", "decoder", "joiner")}
    recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(
        **parts,
        tokens=str(folder / "tokens.txt"),
        model_type="nemo_transducer",
        feature_dim=CONFIG["num_mel_bins"],
    )
    assert texts_in_sherpa(recognizer, CLIPS) == (TEXTS, TEXTS)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_onnx_asr_writes_the_same_texts(quantization, folder):
    model = onnx_asr.load_model("nemo-conformer-tdt", folder, quantization=quantization)
    assert model.recognize(CLIPS, sample_rate=16_000) == TEXTS
    assert [model.recognize(samples, sample_rate=16_000) for samples in CLIPS] == TEXTS


def test_the_folder_names_its_type_for_onnx_asr(folder):
    settings = json.loads((folder / "config.json").read_text())
    assert settings == {
        "model_type": "nemo-conformer-tdt",
        "features_size": 80,
        "subsampling_factor": 4,
        "max_tokens_per_step": 10,
    }
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "<unk> 0" and lines[-1] == f"<blk> {VOCABULARY}"


def session(path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_the_encoder_takes_any_batch_and_length(trained, folder):
    encoder = session(folder / "encoder-model.onnx")
    for lengths in ([1], [400], [257, 100, 31], [9] * 5):
        features = torch.randn(len(lengths), 80, max(lengths))
        given = {"audio_signal": features.numpy(), "length": np.array(lengths)}
        outputs, counts = encoder.run(None, given)
        expected = trained.encoder.subsampling.frames(torch.tensor(lengths))
        assert counts.tolist() == expected.tolist()
        for row, (length, count) in enumerate(zip(lengths, counts.tolist(), strict=True)):
            alone = features[row : row + 1, :, :length].transpose(1, 2)
            with torch.no_grad():
                ours = trained.encoder(alone, torch.tensor([length]), [count])[0].T
            torch.testing.assert_close(
                torch.tensor(outputs[row, :, :count]), ours, rtol=0, atol=1e-4
            )


def test_labels_move_the_states_as_in_our_decoding(trained, folder):
    decoder = session(folder / "decoder.onnx")
    joiner = session(folder / "joiner.onnx")
    fused = session(folder / "decoder_joint-model.onnx")
    encoded = torch.randn(2, CONFIG["d_model"], 1)
    layers, width = CONFIG["prediction_layers"], CONFIG["prediction_width"]
    states = [np.zeros((layers, 2, width), np.float32)] * 2
    state = None
    for label in ([VOCABULARY, VOCABULARY], [1, 5], [3, 3], [2, 8]):
        targets = np.array(label, np.int32)[:, None]
        given = [targets, np.ones(2, np.int32), *states]
        named = {each.name: value for each, value in zip(decoder.get_inputs(), given, strict=True)}
        predicted, _, *after = decoder.run(None, named)
        (logits,) = joiner.run(
            None, {"encoder_outputs": encoded.numpy(), "decoder_outputs": predicted}
        )
        of_fused = fused.run(["outputs"], {"encoder_outputs": encoded.numpy(), **named})[0]
        with torch.no_grad():
            ours, state = trained.decoder(torch.tensor(label)[:, None], state)
            ours = trained.joint.logits(trained.encoder_projector(encoded[:, :, 0]), ours[:, 0])
        np.testing.assert_allclose(logits[:, 0, 0], ours, rtol=0, atol=1e-4)
        np.testing.assert_allclose(of_fused[:, 0, 0], ours, rtol=0, atol=1e-4)
        states = after


def floats_of(path) -> list[str]:
    """The names of matrices in fp32."""
    weights = onnx_library.load(path).graph.initializer
    matrices = [each for each in weights if len(each.dims) == 2 or [*each.dims[2:]] == [1]]
    assert matrices
    return [each.name for each in matrices if each.data_type == onnx_library.TensorProto.FLOAT]


class Pointwise(nn.Module):
    """A convolution's weight as a matrix, as in the encoder, of a size that the exporter leaves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 100, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[:, :, 0])


def test_all_matrices_have_8_bits(folder, tmp_path):
    assert not floats_of(folder / "encoder-model.int8.onnx")
    graph = onnx_files.Graph(Pointwise(), {"x": (torch.ones(2, 3, 100), {0: "batch"})}, ("y",))
    onnx_files.save(onnx_files.export(graph), tmp_path / "large.onnx")
    assert not floats_of(tmp_path / "large.int8.onnx")


def test_durations_that_other_programs_would_take_for_others_are_refused():
    config = {**CONFIG, "durations": [0, 1, 2, 4]}
    with pytest.raises(UsageError, match=r"^no export to ONNX: .* durations are \[0, 1, 2, 4\]"):
        formats.check_form("onnx", config, EXTRAS)


def test_a_missing_package_is_named_before_a_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        RunError, match=r"^--export_format onnx needs .* onnx onnxscript onnxruntime$"
    ):
        formats.check_form("onnx", CONFIG, EXTRAS)


def test_a_second_name_is_a_copy_where_there_are_no_links(tmp_path, monkeypatch):
    def refuse(*names):
        raise OSError

    (tmp_path / "first").write_text("graph")
    onnx.give_second_name(tmp_path / "first", tmp_path / "link")
    assert os.path.samefile(tmp_path / "first", tmp_path / "link")
    monkeypatch.setattr(os, "link", refuse)
    onnx.give_second_name(tmp_path / "first", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "graph"
