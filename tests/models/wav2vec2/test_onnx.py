"""wav2vec 2.0's export to ONNX in stock sherpa-onnx and ONNX Runtime.

onnx-asr has the type wav2vec2-ctc in its repository, and in no release up to 0.12: `Reader` does
what it does with the files."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx as onnx_library
import onnxruntime
import pytest
import sherpa_onnx
import torch

from common.errors import UsageError
from models import onnx_files
from models.wav2vec2 import decoding, onnx
from models.wav2vec2.model import Wav2Vec2
from models.wav2vec2.settings import HF_EPSILON, make_config
from models.wav2vec2.tokenizer import SPECIAL, make_tokenizer
from tests.models.wav2vec2.small import characters_state, sentencepiece_state
from tests.models.wav2vec2.test_formats import GROUP

SMALL = {
    "conv_dim": [24, 16, 16],
    "conv_kernel": [10, 8, 4],
    "conv_stride": [5, 8, 8],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
RELEASED = {
    "conv_dim": [16] * 7,
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
    "conv_stride": [5] + [2] * 6,
}
DEMO = {"conv_dim": [16, 14, 14], "conv_kernel": [256, 3, 3], "conv_stride": [80, 2, 2]}
BASE = {**SMALL, **GROUP, "normalize_eps": HF_EPSILON}
HUBERT = {**BASE, "model_type": "hubert", "feat_proj_layer_norm": False}
# Latin letters whose bytes look like pieces of letters.
LATIN = characters_state("abcdeƙơƒ", unknown=None)
OWN = {**characters_state("abcñ"), "pieces": [*"|abcñ", "<unk>", "<pad>"], "unknown": 5, "blank": 6}
MODELS = {  # by name: settings of the network, and the tokenizer
    "omni": (RELEASED, sentencepiece_state(["ab cdeƙơƒ"])),
    "base": (BASE, OWN),
    "hubert": (HUBERT, characters_state("ABÉ", lower=True)),
    "mms": ({**DEMO, "adapter_attn_dim": 4, "normalize_eps": HF_EPSILON}, LATIN),
}
# Samples and loudness of clips. A first frame has 400 samples in released models.
CLIPS = [(1, 1), (300, 0.1), (401, 0.1), (719, 0.1), (720, 0.1), (5321, 0.002), (16_000, 0.05)]
CLIPS += [(52_345, 0.001), (80_000, 0.3)]


def clips() -> list[np.ndarray]:
    """Noises of changing colour, not around 0."""
    random = np.random.default_rng(0)
    made = []
    for samples, loudness in CLIPS:
        noise = random.standard_normal(samples + 400)
        levels = np.repeat(random.uniform(0.1, 1, samples // 1600 + 1), 1600)[:samples]
        smooth = np.convolve(noise, np.ones(9) / 3, "same")[:samples]
        made.append((loudness * (levels * (noise[:samples] + smooth) + 0.2)).astype(np.float32))
    return made


AUDIO = clips()


def batch_of(audio: list[np.ndarray]) -> dict:
    lengths = torch.tensor([len(each) for each in audio])
    rows = torch.nn.utils.rnn.pad_sequence([*map(torch.from_numpy, audio)], batch_first=True)
    return {"audio": rows, "audio_lengths": lengths, "audio_lengths_host": lengths}


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """A folder, and the model whose special pieces are as unlikely as they become there."""
    torch.manual_seed(1)
    settings, state = MODELS[request.param]
    tokenizer = make_tokenizer(state, _size(state))
    config = make_config(
        32, 1, 4, vocabulary=tokenizer.size, blank=tokenizer.blank, **{**SMALL, **settings}
    )
    model = Wav2Vec2(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    torch.nn.init.uniform_(model.encoder.pos_conv_embed.conv.weight_g)
    special = [i for i, piece in enumerate(tokenizer.pieces) if piece in SPECIAL]
    silent = [i for i in special if i not in (tokenizer.blank, tokenizer.unknown)]
    model.lm_head.bias.data[silent] = 3.0
    folder = tmp_path_factory.mktemp("export") / "onnx"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "mms":  # as if it were too large for one file
            patch.setattr(onnx_files, "MOST_BYTES", 0)
        names = onnx.export(folder, model.state_dict(), config, state, {"README.md": "a card"})
    assert ("model.onnx.data" in names) == (request.param == "mms")
    assert model.lm_head.bias[silent].eq(3.0).all()
    model.lm_head.bias.data[silent] = -1e4
    with torch.no_grad():
        rows = decoding.transcripts(model, tokenizer, batch_of(AUDIO))
    texts = [row["text"] for row in rows]
    return SimpleNamespace(folder=folder, names=names, model=model, texts=texts, silent=silent)


def _size(state: dict) -> int:
    return len(state["pieces"]) if state["kind"] == "characters" else 13


@functools.cache
def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def log_probs(folder, audio: list[np.ndarray], name: str = "model.onnx") -> np.ndarray:
    batch = batch_of(audio)
    given = {
        "input_values": batch["audio"].numpy(),
        "input_lengths": batch["audio_lengths"].numpy(),
    }
    (result,) = session(folder / name).run(["logprobs"], given)
    return result


@torch.no_grad()
def test_onnx_runtime_computes_the_same_on_ragged_batches(exported):
    model = exported.model
    for audio in (AUDIO, AUDIO[3:4], AUDIO[-2:]):
        found = log_probs(exported.folder, audio)
        encoded, counts = model.encode(batch_of(audio))
        ours = model.ctc_log_probs(encoded).numpy()
        others = [i for i in range(ours.shape[2]) if i not in exported.silent]
        for row, count in enumerate(counts):
            np.testing.assert_allclose(
                found[row, :count, others], ours[row, :count, others], rtol=0, atol=1e-4
            )
            assert (found[row, count:].argmax(-1) == model.blank).all()
        assert (found[..., exported.silent] < -1000).all()


def recognised_by_sherpa(folder: Path, name: str) -> list[str]:
    recognizer = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
        model=str(folder / name), tokens=str(folder / "tokens.txt")
    )
    streams = [recognizer.create_stream() for _ in AUDIO]
    for stream, samples in zip(streams, AUDIO, strict=True):
        stream.accept_waveform(16_000, samples)
    recognizer.decode_streams(streams)
    return [" ".join(stream.result.text.split()) for stream in streams]


def test_sherpa_onnx_writes_the_same_texts(exported):
    found = recognised_by_sherpa(exported.folder, "model.onnx")
    assert found[2:] == exported.texts[2:]
    assert found[:2] == ["", ""]  # it decodes nothing shorter than 400 samples
    everything = "".join(exported.texts)
    assert len(everything) > 30 and len(set(everything)) > 2


def test_waveforms_without_lengths_have_been_normalised_by_sherpa_onnx(exported):
    graph = session(exported.folder / "model.onnx")
    for samples in AUDIO:
        theirs = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-5)
        (found,) = graph.run(["logprobs"], {"input_values": theirs[None].astype(np.float32)})
        ours = log_probs(exported.folder, [samples])
        spoken = ours > -100
        np.testing.assert_allclose(found[spoken], ours[spoken], rtol=0, atol=5e-5)


class Reader:
    """onnx-asr's greedy decoding of a folder of its type wav2vec2-ctc."""

    def __init__(self, folder: Path):
        self.settings = json.loads((folder / "config.json").read_text())
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.pieces = {int(number): piece for piece, number in (line.split(" ") for line in lines)}
        (self.blank,) = [number for number, piece in self.pieces.items() if piece == "<blk>"]
        self.folder = folder

    def recognize(self, audio: list[np.ndarray]) -> list[str]:
        assert self.settings["model_type"] == "wav2vec2-ctc"
        texts = []
        result = log_probs(self.folder, audio)
        assert result.shape[2] <= len(self.pieces)
        for row, samples in zip(result, audio, strict=True):
            best = row[: len(samples) // self.settings["subsampling_factor"] + 1].argmax(-1)
            best = best[np.diff(best, prepend=self.blank) != 0]
            text = "".join(self.pieces[number] for number in best if number != self.blank)
            texts.append(" ".join(text.replace("\u2581", " ").split()))
        return texts


def test_onnx_asr_would_write_the_same_texts_alone_and_in_a_batch(exported):
    reader = Reader(exported.folder)
    assert reader.recognize(AUDIO) == exported.texts
    assert [reader.recognize([samples])[0] for samples in AUDIO] == exported.texts


def test_the_weight_norm_is_computed_when_the_graph_is_made(exported):
    graph = onnx_library.load(exported.folder / "model.onnx", load_external_data=False).graph
    constants = {each.name for each in graph.initializer}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert len(convolutions) == len(exported.model.config["conv_dim"]) + 1
    assert all(node.input[1] in constants for node in convolutions)


def test_the_card_shows_how_to_use_it(exported, tmp_path, capsys, monkeypatch):
    assert set(exported.names) >= {"README.md", "model.onnx", "model.int8.onnx", "tokens.txt"}
    monkeypatch.setattr("soundfile.read", lambda *path, dtype: (AUDIO[-1], 16_000))
    exec(onnx.USE.replace("FOLDER", str(exported.folder)))
    assert " ".join(capsys.readouterr().out.split()) == exported.texts[-1]


def test_a_model_that_sherpa_onnx_would_decode_wrongly_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"^no export to ONNX: .*do_normalize is false") as error:
        onnx.export(tmp_path / "x", {}, {"do_normalize": False}, LATIN, {})
    assert "\n" not in str(error.value)
