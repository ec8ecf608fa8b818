"""The Konkani recipe's export in stock sherpa-onnx and onnx-asr."""

import json
import sys
from unittest import mock

import numpy as np
import onnx_asr
import pytest
import sherpa_onnx
import torch
import yaml

from common import checkpoint
from common.batches import to_device
from common.errors import RunError
from models import card, model_files, onnx_files
from recipes import konkani_conformer as recipe
from speech.decoding.recogniser import DecodingOptions
from speech.signal.audio import SAMPLE_RATE
from speech.writing.alphabet import Characters
from speech.writing.text import CharTokenizer
from tests.peers import texts_in_sherpa
from tests.recipes import runs

CHARACTERS = [" ", "क", "ा", "b", "\u00a0"]  # as in a --vocab_file
TOKENIZER = CharTokenizer(CHARACTERS, Characters())
SHAPE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "attention_heads": 2}
CONFIG = {**SHAPE, "subsampling": 4}
INFO = recipe.ModelInfo(CONFIG, CHARACTERS)
TEXTS = ["का b", "b", "b का bका क", "कb"]
# Samples before and after the tones; the last clip ends within an encoder frame.
ENDS = [(3000, 4001), (1600, 9000), (801, 2777), (0, 13)]
UPDATES = 160


def clip(text: str, ends, seed: int) -> torch.Tensor:
    """A tone for each character, in a little noise."""
    parts = [np.zeros(ends[0])]
    for token in TOKENIZER.encode(text):
        tone = np.sin(2 * np.pi * 300 * 1.6**token * np.arange(2400) / SAMPLE_RATE)
        parts += [0.3 * tone, np.zeros(1600)]
    parts[-1] = np.zeros(ends[1])
    samples = np.concatenate(parts)
    samples += np.random.default_rng(seed).normal(0, 0.01, len(samples))
    return torch.from_numpy(samples.astype(np.float32))


CLIPS = [clip(text, ends, seed) for seed, (text, ends) in enumerate(zip(TEXTS, ENDS, strict=True))]


def batch_of(texts: list[str], clips: list[torch.Tensor]) -> dict:
    items = []
    for text, audio in zip(texts, clips, strict=True):
        tokens = TOKENIZER.encode(text)
        labels = torch.tensor([*tokens, TOKENIZER.size])
        item = {"audio": audio, "tokens": torch.tensor(tokens), "labels": labels}
        item["targets"] = len(tokens)
        items.append({**item, "text": text, "name": text, "index": 0})
    return next(to_device([recipe.collate(items)], torch.device("cpu")))


def random_batch(random: np.random.Generator) -> dict:
    texts = ["".join(random.choice(CHARACTERS[:4], random.integers(1, 5))) for _ in range(4)]
    clips = [clip(text, random.integers(0, 4000, 2), random.integers(1 << 30)) for text in texts]
    return batch_of(texts, clips)


@pytest.fixture(scope="module")
def trained():
    """A small model that is sure of such texts: the features of other programs differ a little."""
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    model = recipe.make_model(INFO, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(UPDATES):
        batch = random_batch(random)
        optimizer.zero_grad()
        (recipe.compute_loss(model, batch)["ctc"] / batch["counts"]["ctc"]).backward()
        optimizer.step()
    model.eval()
    tokens = recipe.ctc_greedy(model, model.encode(batch_of(TEXTS, CLIPS)))
    assert [TOKENIZER.decode(each) for each in tokens] == TEXTS
    return model


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "onnx"
    args = runs.parse(recipe, "--export", folder)
    about = card.About(recipe.RECIPE, None, folder / "best.safetensors", is_new=True)
    recipe.export(args, DecodingOptions(), TOKENIZER, trained, about)
    return folder


@pytest.mark.parametrize("name", ["model.onnx", "model.int8.onnx"])
def test_sherpa_onnx_writes_the_same_texts(folder, name):
    recognizer = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(
        model=str(folder / name), tokens=str(folder / "tokens.txt")
    )
    clips = [each.numpy() for each in CLIPS]
    assert texts_in_sherpa(recognizer, clips) == (TEXTS, TEXTS)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_onnx_asr_writes_the_same_texts(folder, quantization):
    model = onnx_asr.load_model("nemo-conformer-ctc", folder, quantization=quantization)
    samples = [each.numpy() for each in CLIPS]
    assert [model.recognize(each) for each in samples] == TEXTS
    assert model.recognize(samples) == TEXTS


def test_the_files_say_nothing_of_this_machine_and_8_bits_are_smaller(folder):
    graph = (folder / "model.onnx").read_bytes()
    assert b".py" not in graph and str(runs.__file__).encode() not in graph
    assert (folder / "model.int8.onnx").stat().st_size < len(graph)
    tokens = (folder / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert tokens == ["\ufffd 0", "\u2581 1", "क 2", "ा 3", "b 4", "\u2581 5", "<blk> 6"]
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "nemo-conformer-ctc",
        "features_size": 80,
        "subsampling_factor": 4,
    }


def test_weights_of_a_run_are_exported_without_training(trained, tmp_path, monkeypatch):
    filled = []

    def fill(folder, model, **how):
        filled.append((model, how))
        (folder / "model.onnx").write_bytes(b"graph")

    monkeypatch.setattr(onnx_files, "fill_ctc", fill)
    weights = tmp_path / "best.safetensors"
    run_info = recipe.splits.RunInfo([], 30.0, True)
    about = (recipe.RECIPE, recipe.compute_loss, recipe.LOSS_WEIGHTS, None, INFO, run_info)
    task = recipe.Task(*about, metric="cer", higher_is_better=False, fit=None)
    checkpoint.save_weights(weights, trained.state_dict(), task, {})
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    folder = tmp_path / "export"
    out = runs.ran(
        recipe, "--resume", weights, "--export", folder, "--output_dir", tmp_path, "--lm", "on"
    )
    names = "README.md, lm.arpa, lm_tokens.txt, made_from.json, model.onnx"
    assert f"exported to {folder}: {names}" in out
    outputs = (folder / "lm_tokens.txt").read_text(encoding="utf-8").splitlines()
    assert outputs == ["<unk>", "|", "क", "ा", "b", "<5>", "<blk>"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "onnx"
    assert 'onnx_asr.load_model("nemo-conformer-ctc", "export")' in text
    ((model, how),) = filled
    assert how == {"pieces": TOKENIZER.pieces, "num_mel_bins": 80, "subsampling": 4}
    assert all(torch.equal(w, model.state_dict()[n]) for n, w in trained.state_dict().items())
    status, err = runs.refused(recipe, "--resume", weights, "--export", tmp_path)
    assert status == 2 and "--export" in err


def test_a_file_in_between_that_is_cut_short_is_one_line(tmp_path, monkeypatch):
    """onnx writes it without noticing that the disk is full."""

    def fail(*_, **named):
        raise ValueError("Wire format was corrupt\nmore")

    monkeypatch.setattr("onnxruntime.quantization.quantize_dynamic", fail)
    program = mock.MagicMock()
    with pytest.raises(RunError, match=r"Wire format was corrupt \(is a disk full\?\)") as error:
        model_files.write_export(
            tmp_path / "x", lambda aside: onnx_files.save(program, aside / "a")
        )
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_missing_package_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    places = ("--export", tmp_path / "export", "--output_dir", tmp_path)
    status, err = runs.refused(recipe, *places)
    assert status == 1 and "--export needs the package onnx" in err
