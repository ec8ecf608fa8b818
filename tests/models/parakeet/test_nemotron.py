"""Nemotron's files: those of transformers and NeMo's archive, read, exported and loaded again."""

import io
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoProcessor, Nemotron3_5AsrForRNNT, NemotronAsrStreamingForRNNT

from common.errors import UsageError
from models.parakeet import decoding, formats
from models.parakeet.languages import SLOTS
from models.parakeet.model import Parakeet
from models.parakeet.settings import SIZES, make_config
from models.parakeet.tokenizer import make_tokenizer
from speech.decoding import timed
from tests.models.parakeet.test_formats import packed, unpacked, with_yaml
from tests.models.parakeet.test_model import make_theirs
from tests.models.pieces import train_pieces
from tests.peers import same_tensors

V = 40
CONFIG = {
    **make_config(16, 2, 2, (12, 2), V, num_mel_bins=16, channels=8, ffn=48, max_symbols=7),
    "kind": "rnnt",
    "durations": [],
    "streaming": {"left": 12, "lookaheads": [3, 0, 5]},
    "prompts": {"slots": 9, "width": 32},
}
ENGLISH = {name: value for name, value in CONFIG.items() if name != "prompts"}
NAMES = {"en-US": 0, "de-DE": 1, "de": 1, "auto": 7}


def pieces(lines: list[str], size: int) -> bytes:
    """A SentencePiece model with a tag."""
    how = {"vocab_size": size, "model_type": "bpe", "hard_vocab_limit": False}
    return train_pieces(lines * 20, user_defined_symbols=["<de-DE>"], **how)


PIECES = pieces(["the cat sat on the mat", "a dog and a bird", "we ate bread at the table"], V)
LOSS = {"sigma": 0.0, "omega": 0.0, "fastemit": 0.005, "reduction": "mean_batch"}
EXTRAS = {"tokenizer": {"sentencepiece": PIECES.hex()}, "source": {}, "loss": LOSS}


def extras_of(config: dict) -> dict:
    return {**EXTRAS, "languages": NAMES if "prompts" in config else {}}


def random_weights(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = formats.expected_shapes(config)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict, processor: dict | None):
    model = make_theirs(config, "prompts" in config).float()
    model.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(PIECES)
    if processor is not None:
        (folder / "processor_config.json").write_text(json.dumps(processor))
    return model


PROCESSOR = {"prompt_dictionary": NAMES, "supported_num_lookahead_tokens": [0, 3, 5]}


def test_the_size_has_the_parameters_of_the_released_model():
    shapes = formats.expected_shapes(SIZES["nemotron"])
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 637_997_088
    english = {key: value for key, value in SIZES["nemotron"].items() if key != "prompts"}
    shapes = formats.expected_shapes({**english, "vocabulary": 1024})
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 618_084_865


def test_a_folder_of_transformers_is_read(tmp_path):
    model = write_folder(tmp_path, CONFIG, PROCESSOR)
    weights, config, extras = formats.read_model(tmp_path)
    assert config == CONFIG and extras["languages"] == NAMES and extras["loss"] == LOSS
    theirs = model.state_dict()
    assert len(weights) == len(theirs)
    assert torch.equal(
        weights["encoder.subsampling.layers.5.weight"],
        theirs["encoder.subsampling.layers.1.depthwise_conv.weight"],
    )


def test_what_a_folder_does_not_say_is_as_in_the_released_model(tmp_path):
    write_folder(tmp_path, CONFIG, None)
    with pytest.raises(UsageError, match="prompt_dictionary is not one of names and 9 slots"):
        formats.read_model(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["num_prompts"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config, names = formats._hf_config(content, {}, formats.family_of(CONFIG), tmp_path)
    assert names == SLOTS and config["prompts"]["slots"] == 128
    assert config["streaming"] == {"left": 12, "lookaheads": [3, 0, 1]}


@pytest.mark.parametrize("config", [CONFIG, ENGLISH], ids=["prompts", "english"])
@pytest.mark.parametrize("form", ["hf", "nemo"])
def test_an_export_is_read_as_it_was_written(config, form, tmp_path):
    weights = random_weights(config)
    formats.export(tmp_path / "out", form, weights, config, extras_of(config))
    found, found_config, extras = formats.read_model(tmp_path / "out")
    assert same_tensors(found, weights) and found_config == config
    assert extras["languages"] == extras_of(config)["languages"] and extras["loss"] == LOSS


def waveforms() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(0, 0.1, length).astype(np.float32) for length in (32_000, 16_000, 9_999)]


@torch.no_grad()
@pytest.mark.parametrize("config", [CONFIG, ENGLISH], ids=["prompts", "english"])
def test_transformers_loads_an_export_and_decodes_it_alike(config, tmp_path):
    torch.manual_seed(2)
    ours = Parakeet(config).eval()  # made to write different pieces, and none
    ours.encoder_projector.weight *= 8
    ours.decoder.decoder_projector.weight *= 12
    ours.joint.head.weight *= 4
    ours.joint.head.bias[V] += 7
    if ours.prompt_projector:
        ours.prompt_projector.linear_2.weight *= 4
    weights = ours.state_dict()
    formats.export(tmp_path, "hf", weights, config, extras_of(config))
    kind = Nemotron3_5AsrForRNNT if "prompts" in config else NemotronAsrStreamingForRNNT
    theirs = kind.from_pretrained(tmp_path).eval()
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.supported_num_lookahead_tokens == [3, 0, 5]
    languages = ["de", "auto", "en-US"]
    audio = waveforms()
    tokenizer = make_tokenizer(EXTRAS["tokenizer"], V)
    batch = {
        "audio": torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, audio)), batch_first=True),
        "audio_lengths": torch.tensor([len(each) for each in audio]),
        "prompts": torch.tensor([1, 7, 0]),
    }
    batch["audio_lengths_host"] = batch["audio_lengths"]
    texts = set()
    for lookahead in (3, 0, 5):
        processor.set_num_lookahead_tokens(lookahead)
        ours.encoder.lookahead = lookahead
        encoded, frames = ours.encode(batch)
        hypotheses = decoding.decode(ours, encoded, frames)
        for row, waveform in enumerate(audio):  # in a batch theirs goes on after a row's end
            told = {"language": languages[row]} if "prompts" in config else {}
            inputs = processor(waveform, sampling_rate=16_000, **told)
            output = theirs.generate(**inputs, max_new_tokens=2000)
            expected = [t for t in output.sequences[0].tolist() if t < V]
            assert [token.piece for token in hypotheses[row]] == expected
            texts.add(timed.text_of(hypotheses[row], tokenizer))
    assert len(texts) > 3


def test_an_archive_has_nemos_names_and_settings(tmp_path):
    formats.export(tmp_path, "nemo", random_weights(CONFIG), CONFIG, extras_of(CONFIG))
    members = unpacked(tmp_path / "model.nemo")
    content = yaml.safe_load(members["./model_config.yaml"])
    assert content["target"].endswith("rnnt_bpe_models_prompt.EncDecRNNTBPEModelWithPrompt")
    encoder = content["encoder"]
    assert encoder["att_context_size"] == [[12, 3], [12, 0], [12, 5]]
    assert encoder["causal_downsampling"] is True and encoder["conv_norm_type"] == "layer_norm"
    assert encoder["att_context_style"] == "chunked_limited"
    assert encoder["conv_context_size"] == "causal"
    assert content["preprocessor"]["normalize"] == "NA"
    assert content["model_defaults"]["prompt_dictionary"] == NAMES
    assert content["model_defaults"]["initialize_prompt_feature"] is True
    assert content["model_defaults"]["num_prompts"] == 9
    assert content["rnnt_reduction"] == "mean_batch"
    raw = torch.load(io.BytesIO(members["./model_weights.ckpt"]), weights_only=True)
    for name in (
        "encoder.pre_encode.conv.6.weight",
        "encoder.layers.1.conv.batch_norm.weight",
        "prompt_kernel.0.weight",
        "prompt_kernel.2.bias",
        "joint.joint_net.2.weight",
    ):
        assert name in raw


def test_norwegian_without_quotes_is_a_name(tmp_path):
    names = {**NAMES, "no": 5}
    extras = {**extras_of(CONFIG), "languages": names}
    formats.export(tmp_path, "nemo", random_weights(CONFIG), CONFIG, extras)
    members = unpacked(tmp_path / "model.nemo")
    text = members["./model_config.yaml"].decode()
    assert "'no': 5" in text
    members["./model_config.yaml"] = text.replace("'no': 5", "no: 5").encode()
    file = packed(tmp_path / "other.nemo", members)
    assert formats.read_model(file)[2]["languages"] == names


@pytest.mark.parametrize(
    "part, key, value, message",
    [
        ("encoder", "att_context_size", [[12, 3], [24, 0]], "att_context_size"),
        ("encoder", "att_context_size", [[-1, 3]], "streaming.left is '-1'"),
        ("encoder", "att_context_style", "regular", "att_context_style"),
        ("preprocessor", "normalize", "per_feature", "normalize"),
        ("model_defaults", "prompt_dictionary", {"de": 9}, "prompt_dictionary"),
        ("model_defaults", "prompt_dictionary", {}, "prompt_dictionary"),
        ("model_defaults", "num_prompts", 10**9, "prompt_dictionary"),
        ("model_defaults", "initialize_prompt_feature", False, "unexpected 'prompt_kernel"),
    ],
)
def test_settings_that_the_network_does_not_have(part, key, value, message, tmp_path):
    formats.export(tmp_path, "nemo", random_weights(CONFIG), CONFIG, extras_of(CONFIG))

    def change(content):
        content[part][key] = value

    members = with_yaml(unpacked(tmp_path / "model.nemo"), change)
    with pytest.raises(UsageError, match=message):
        formats.read_model(packed(tmp_path / "spoiled.nemo", members))


def test_one_context_is_a_list_of_one(tmp_path):
    formats.export(tmp_path, "nemo", random_weights(CONFIG), CONFIG, extras_of(CONFIG))

    def change(content):
        content["encoder"]["att_context_size"] = [12, 3]
        content["preprocessor"]["normalize"] = None

    members = with_yaml(unpacked(tmp_path / "model.nemo"), change)
    _, config, _ = formats.read_model(packed(tmp_path / "one.nemo", members))
    assert config["streaming"] == {"left": 12, "lookaheads": [3]}


@pytest.mark.parametrize(
    "changes, form, message",
    [
        ({"prompts": {"slots": 9, "width": 24}}, "nemo", "the prompt's width is 24"),
        ({}, "onnx", "a streaming model"),
    ],
)
def test_shapes_that_a_form_cannot_hold(changes, form, message):
    with pytest.raises(UsageError, match=message):
        formats.check_form(form, {**CONFIG, **changes}, extras_of(CONFIG))


def test_a_hybrid_is_read_and_written_with_its_ctc_head(tmp_path):
    config = {**ENGLISH, "ctc": True}
    weights = random_weights(config)
    extras = extras_of(config)
    formats.export(tmp_path, "nemo", weights, config, extras)
    content = yaml.safe_load(unpacked(tmp_path / "model.nemo")["./model_config.yaml"])
    assert content["target"].endswith("hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel")
    assert content["encoder"]["att_context_style"] == "chunked_limited"
    found, found_config, _ = formats.read_model(tmp_path)
    assert same_tensors(found, weights) and found_config == config


def test_a_streaming_ctc_model_is_refused_by_name_of_a_setting(tmp_path):
    formats.export(tmp_path, "nemo", random_weights(ENGLISH), ENGLISH, extras_of(ENGLISH))
    file = tmp_path / "model.nemo"

    def change(content: dict) -> None:
        content["decoder"] = {"_target_": "nemo.collections.asr.modules.ConvASRDecoder"}
        del content["joint"]

    file = packed(tmp_path / "other.nemo", with_yaml(unpacked(file), change))
    with pytest.raises(UsageError, match="normalize is 'NA'"):
        formats.read_model(file)


@pytest.mark.parametrize("missing", ["kind", "streaming"])
def test_configurations_that_no_model_has(missing):
    config = {name: value for name, value in CONFIG.items() if name != missing}
    with pytest.raises(UsageError):
        formats.check_config(config, "it")
