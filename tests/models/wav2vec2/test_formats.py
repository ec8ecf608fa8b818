"""wav2vec 2.0's files against transformers: read, export, load; and files that are refused."""

import json
import math
import os
import re
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCTC,
    AutoProcessor,
    HubertConfig,
    HubertForCTC,
    HubertModel,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2ForPreTraining,
    Wav2Vec2Model,
)

from common.errors import UsageError
from models.wav2vec2 import formats, settings
from models.wav2vec2.model import Wav2Vec2
from models.wav2vec2.tokenizer import make_tokenizer
from tests.models.wav2vec2.small import sentencepiece_state

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [8] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
LAYER = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
GROUP = {"feat_extract_norm": "group", "do_stable_layer_norm": False, "conv_bias": False}
HUBERT = {**GROUP, "model_type": "hubert"}
PIECES = ["|", "a", "b", "[UNK]", "[PAD]", "é"]
STATE = {
    "kind": "characters",
    "pieces": PIECES,
    "delimiter": "|",
    "blank": 4,
    "unknown": 3,
    "lower": False,
}
TINY = settings.make_config(
    32, 2, conv_dim=[8] * 7, num_conv_pos_embeddings=16, intermediate_size=48
)


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


def write_json(file: Path, content) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def change_json(file: Path, **changes) -> None:
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | changes)


def peer(kind, **changes):
    """A model of transformers' with random weights."""
    torch.manual_seed(0)
    config_class = HubertConfig if kind in (HubertForCTC, HubertModel) else Wav2Vec2Config
    config = config_class(**{**SHAPE, "vocab_size": len(PIECES), "pad_token_id": 4, **changes})
    model = kind(config).eval()
    for parameter in model.parameters():  # all of them, norms and biases, too
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def saved(folder: Path, model) -> Path:
    """The folder that transformers writes for a model, with a tokenizer."""
    model.save_pretrained(folder)
    write_json(folder / "vocab.json", numbered(PIECES))
    told = {"pad_token": "[PAD]", "unk_token": {"content": "[UNK]", "lstrip": True}}
    write_json(folder / "tokenizer_config.json", told)
    write_json(folder / "preprocessor_config.json", {"do_normalize": False})
    write_json(folder / "processor_config.json", {"processor_class": "Wav2Vec2Processor"})
    return folder


def audio() -> torch.Tensor:
    """Noise (1, 9000) between tones."""
    noise = torch.randn(6, 1500, generator=torch.Generator().manual_seed(1))
    noise[::2] = torch.sin(torch.arange(1500) * torch.tensor([[0.03], [0.3], [1.0]]))
    return noise.reshape(1, -1)


def outputs(weights: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    """What the network here makes of `audio` with these weights: log-probabilities, or the
    encoder's frames if there is no head."""
    model = Wav2Vec2(config).eval()
    model.load_state_dict(weights)  # whose names must fit both ways
    lengths = torch.tensor([audio().shape[1]])
    batch = {"audio": audio(), "audio_lengths": lengths, "audio_lengths_host": lengths}
    with torch.no_grad():
        encoded, _ = model.encode(batch)
        return model.ctc_log_probs(encoded) if config["vocabulary"] else encoded


def theirs(model) -> torch.Tensor:
    """The same of a model of transformers'."""
    with torch.no_grad():
        if model.main_input_name == "input_values" and hasattr(model, "lm_head"):
            return model(audio()).logits.log_softmax(-1)
        inner = getattr(model, "wav2vec2", model)
        return inner(audio()).last_hidden_state


def assert_equal(weights: dict[str, torch.Tensor], config: dict, model) -> None:
    torch.testing.assert_close(outputs(weights, config), theirs(model), atol=1e-4, rtol=1e-4)


# --- Hugging Face folders -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, changes",
    [
        (Wav2Vec2ForCTC, GROUP),
        (Wav2Vec2ForCTC, LAYER),
        (Wav2Vec2ForPreTraining, LAYER),
        (Wav2Vec2Model, {**GROUP, "mask_time_prob": 0.0}),  # without a mask's vector
        (HubertForCTC, {**GROUP, "feat_proj_layer_norm": False}),
    ],
)
def test_a_folder_of_transformers_is_read(kind, changes, tmp_path):
    model = peer(kind, **changes)
    weights, config, extras = formats.read_model(saved(tmp_path, model))
    assert_equal(weights, config, model)
    assert config["normalize_eps"] == 1e-7 and not config["do_normalize"]
    has_head = kind in (Wav2Vec2ForCTC, HubertForCTC)
    assert extras["tokenizer"] == (STATE if has_head else {})
    assert config["vocabulary"] == (len(PIECES) if has_head else 0)


def test_shards_old_names_of_the_weight_norm_and_torchs_form_are_read(tmp_path):
    model = peer(Wav2Vec2ForCTC, **LAYER)
    folder = saved(tmp_path, model)
    expected, _, _ = formats.read_model(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    sharded, _, _ = formats.read_model(folder)
    for file in folder.glob("model*"):
        file.unlink()
    old = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("parametrizations.weight.original0", "weight_g")
        old[name.replace("parametrizations.weight.original1", "weight_v")] = tensor
    torch.save(old, folder / "pytorch_model.bin")
    found, _, _ = formats.read_model(folder)
    for weights in (sharded, found):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_missing_keys_mean_wav2vec2_base(tmp_path):
    """And a processor_config.json, as transformers 5 writes it, is read."""
    write_json(tmp_path / "config.json", {"model_type": "wav2vec2"})
    write_json(
        tmp_path / "processor_config.json",
        {"feature_extractor": {"do_normalize": False, "sampling_rate": 16_000}},
    )
    with torch.device("meta"):
        model = Wav2Vec2Model(Wav2Vec2Config())
    save_file(
        {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    weights, config, _ = formats.read_model(tmp_path)
    assert config["feat_extract_norm"] == "group" and not config["do_normalize"]
    assert sum(tensor.numel() for tensor in weights.values()) == 94_371_712


def test_rows_beyond_vocab_json_are_named(tmp_path):
    """transformers' tokenizer adds <s> and </s>, which have rows of the head in many models."""
    folder = saved(tmp_path, peer(Wav2Vec2ForCTC, vocab_size=9))
    write_json(folder / "added_tokens.json", {"<s>": 6, "</s>": 7, "beyond": 9})
    change_json(folder / "tokenizer_config.json", do_lower_case=True)
    _, config, extras = formats.read_model(folder)
    assert extras["tokenizer"]["pieces"] == [*PIECES, "<s>", "</s>", "<8>"]
    assert extras["tokenizer"]["lower"] and config["vocabulary"] == 9


# --- MMS ------------------------------------------------------------------------------------------


def mms(folder: Path) -> Path:
    """A folder with three vocabularies and with the adapters of two languages: its own, deu, and
    amh."""
    model = peer(Wav2Vec2ForCTC, **LAYER, adapter_attn_dim=3)
    saved(folder, model)
    vocabularies = {
        "deu": numbered(PIECES),
        "amh": numbered(["<pad>", "<unk>", "|", "ሀ"]),
        "vie": numbered(["<pad>", "<unk>", "|", "a"]),
    }
    write_json(folder / "vocab.json", vocabularies)
    change_json(folder / "tokenizer_config.json", target_lang="deu")
    for language in ("deu", "amh"):
        rows = len(vocabularies[language])
        adapter = {}
        for name, tensor in model._get_adapters().items():
            shape = [rows, *tensor.shape[1:]] if name.startswith("lm_head") else tensor.shape
            adapter[name] = torch.randn(shape)
        assert len(adapter) == 2 * 6 + 2
        save_file(adapter, folder / f"adapter.{language}.safetensors")
    return folder


def test_an_adapter_of_mms_is_loaded_with_its_head_and_vocabulary(tmp_path):
    folder = mms(tmp_path)
    change_json(folder / "tokenizer_config.json", pad_token="<pad>", unk_token="<unk>")
    weights, config, extras = formats.read_model(folder, "amh")
    model = Wav2Vec2ForCTC.from_pretrained(
        folder, target_lang="amh", ignore_mismatched_sizes=True
    ).eval()
    assert_equal(weights, config, model)
    assert extras["tokenizer"]["pieces"] == ["<pad>", "<unk>", "|", "ሀ"]
    assert (extras["language"], extras["licence"]) == ("amh", "cc-by-nc-4.0")


def test_mms_without_a_language_is_its_own(tmp_path):
    folder = mms(tmp_path)
    weights, config, extras = formats.read_model(folder)
    assert_equal(weights, config, Wav2Vec2ForCTC.from_pretrained(folder).eval())
    assert extras["language"] == "deu" and extras["tokenizer"] == STATE


@pytest.mark.parametrize("language", ["vie", "x" * 300, "../amh"])
def test_a_language_that_is_not_there_lists_those_that_are(language, tmp_path):
    with pytest.raises(UsageError, match=r"for: deu, amh$"):
        formats.read_model(mms(tmp_path), language)


def test_half_an_adapter_is_refused(tmp_path):
    """The other half of another language would stay."""
    file = mms(tmp_path) / "adapter.amh.safetensors"
    adapter = load_file(file)
    del adapter["wav2vec2.encoder.layers.1.adapter_layer.norm.bias"]
    save_file(adapter, file)
    with pytest.raises(
        UsageError, match=r"amh\.safetensors lacks 'encoder\.layers\.1\.adapter_layer"
    ):
        formats.read_model(tmp_path, "amh")


@pytest.mark.parametrize(
    "content, card, licence",
    [
        ({}, "---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ({}, "---\nbase_model:\n- facebook/mms-300m\nlicense: mit\n---\n", "cc-by-nc-4.0"),
        ({"_name_or_path": "facebook/mms-1b"}, "", "cc-by-nc-4.0"),
        ({"adapter_attn_dim": 16}, "---\nlicense: mit\n---\n", "cc-by-nc-4.0"),
        ({}, "# programs-1\nlicense: mit\n", ""),
    ],
)
def test_the_licence(content, card, licence, tmp_path):
    (tmp_path / "README.md").write_text(card)
    assert formats.licence_of(tmp_path, content) == licence


# --- omniASR --------------------------------------------------------------------------------------


def fairseq2_shapes(width: int, layers: int, rows: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an omniASR CTC file, as its model is published."""

    def layer(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    shapes = {}
    for number, kernel in enumerate((10, 3, 3, 3, 3, 2, 2)):
        name = f"encoder_frontend.feature_extractor.layers.{number}"
        shapes |= layer(f"{name}.conv", 512, 512 if number else 1, kernel)
        shapes |= layer(f"{name}.layer_norm", 512)
    shapes |= layer("encoder_frontend.post_extract_layer_norm", 512)
    shapes |= layer("encoder_frontend.model_dim_proj", width, 512)
    shapes["encoder_frontend.pos_encoder.conv.bias"] = (width,)
    shapes["encoder_frontend.pos_encoder.conv.weight_g"] = (1, 1, 128)
    shapes["encoder_frontend.pos_encoder.conv.weight_v"] = (width, width // 16, 128)
    for number in range(layers):
        name = f"encoder.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "output_proj"):
            shapes |= layer(f"{name}.self_attn.{part}", width, width)
        shapes |= layer(f"{name}.self_attn_layer_norm", width)
        shapes |= layer(f"{name}.ffn_layer_norm", width)
        shapes |= layer(f"{name}.ffn.inner_proj", 4 * width, width)
        shapes |= layer(f"{name}.ffn.output_proj", width, 4 * width)
    return shapes | layer("encoder.layer_norm", width) | layer("final_proj", rows, width)


@pytest.mark.parametrize(
    "name, width, layers, rows, tensors, parameters",
    [
        ("300m", 1024, 24, 9812, 423, 325_494_996),
        ("1b", 1280, 48, 9812, 807, 975_065_300),
        ("3b", 2048, 60, 10_288, 999, 3_081_398_960),
    ],
)
def test_the_published_sizes_have_these_tensors(name, width, layers, rows, tensors, parameters):
    """Their numbers of parameters are Meta's."""
    found = fairseq2_shapes(width, layers, rows)
    assert len(found) == tensors and sum(map(math.prod, found.values())) == parameters
    found = {formats.from_fairseq2(each): shape for each, shape in found.items()}
    expected = formats.expected_shapes({**settings.OMNI[name], "vocabulary": rows})
    assert expected.pop("masked_spec_embed") == (width,)
    assert found == expected and settings.OMNI[name]["num_attention_heads"] == 16


TO_FAIRSEQ2 = (
    (r"^wav2vec2\.", ""),
    (r"^feature_extractor\.conv_layers", "encoder_frontend.feature_extractor.layers"),
    (r"^feature_projection\.layer_norm", "encoder_frontend.post_extract_layer_norm"),
    (r"^feature_projection\.projection", "encoder_frontend.model_dim_proj"),
    (r"^encoder\.pos_conv_embed\.conv", "encoder_frontend.pos_encoder.conv"),
    (r"parametrizations\.weight\.original0", "weight_g"),
    (r"parametrizations\.weight\.original1", "weight_v"),
    (r"(layers\.\d+)\.final_layer_norm", r"\1.ffn_layer_norm"),
    (r"(encoder\.layers\.\d+)\.layer_norm", r"\1.self_attn_layer_norm"),
    (r"attention\.out_proj", "self_attn.output_proj"),
    (r"attention\.", "self_attn."),
    (r"feed_forward\.intermediate_dense", "ffn.inner_proj"),
    (r"feed_forward\.output_dense", "ffn.output_proj"),
    (r"^lm_head", "final_proj"),
    (r"^masked_spec_embed", "masker.temporal_mask_embed"),
)


def as_fairseq2(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors by fairseq2's names."""
    state = {}
    for name, tensor in weights.items():
        for pattern, replacement in TO_FAIRSEQ2:
            name = re.sub(pattern, replacement, name)
        state[name] = tensor
    return state


def train_characters(text: str) -> bytes:
    return bytes.fromhex(sentencepiece_state([text] * 20)["model"])


CHARACTERS = train_characters("the cat sat on a mat | é")
ROWS = 4 + len({*"the cat sat on a mat | é"})


@pytest.fixture
def omni(tmp_path, monkeypatch):
    """A model of transformers' as it would be published, and its state by fairseq2's names. The
    tokenizer is beside it."""
    monkeypatch.setitem(settings.OMNI, "tiny", TINY)
    monkeypatch.setitem(settings.TOKENIZERS, ROWS, "tiny.model")
    (tmp_path / "tiny.model").write_bytes(CHARACTERS)
    shape = {"num_attention_heads": 16, "num_conv_pos_embedding_groups": 16}
    model = peer(Wav2Vec2ForCTC, **{**LAYER, **shape, "vocab_size": ROWS, "pad_token_id": 0})
    return model, as_fairseq2(model.state_dict())


def test_an_omniasr_file_is_read(omni, tmp_path):
    model, state = omni
    del state["masker.temporal_mask_embed"]  # as in the released files
    torch.save({"model": state}, tmp_path / "a.pt")
    weights, config, extras = formats.read_model(tmp_path / "a.pt")
    assert config["normalize_eps"] == 1e-5 and config["do_normalize"]
    assert (config["vocabulary"], config["blank"]) == (ROWS, 0)
    assert extras["licence"] == "apache-2.0"
    assert extras["tokenizer"] == {"kind": "sentencepiece", "model": CHARACTERS.hex()}
    assert not weights["masked_spec_embed"].any()
    assert_equal(weights, {**config, "do_normalize": False}, model)


def test_a_self_supervised_omniasr_file_has_no_head(omni, tmp_path):
    model, state = omni
    state |= {
        "quantizer.num_updates": torch.tensor(3),
        "quantizer.entry_proj.weight": torch.zeros(2, 8),
        "final_target_proj.weight": torch.zeros(2, 2),
    }
    torch.save({"model": state}, tmp_path / "a.pt")
    weights, config, extras = formats.read_model(tmp_path / "a.pt")
    assert config["vocabulary"] == 0 and extras["tokenizer"] == {}
    assert torch.equal(weights["masked_spec_embed"], model.wav2vec2.masked_spec_embed)
    assert_equal(weights, {**config, "do_normalize": False}, model.wav2vec2)


def test_a_checkpoint_that_fairseq2_saved_is_read(omni, tmp_path):
    _, state = omni
    torch.save(state, tmp_path / "sdp_00.pt")
    weights, _, _ = formats.read_model(tmp_path / "sdp_00.pt")
    assert torch.equal(weights["lm_head.bias"], state["final_proj.bias"])


def test_a_missing_or_wrong_tokenizer_is_said(omni, tmp_path):
    _, state = omni
    torch.save({"model": state}, tmp_path / "a.pt")
    (tmp_path / "other.model").write_bytes(train_characters("another text"))
    with pytest.raises(UsageError, match=r"other\.model: .*has 13 pieces and the model 16"):
        formats.read_model(tmp_path / "a.pt", tokenizer=tmp_path / "other.model")
    (tmp_path / "tiny.model").unlink()
    with pytest.raises(UsageError, match=r"tiny\.model is missing.*mms/tiny\.model"):
        formats.read_model(tmp_path / "a.pt")


def test_heads_are_not_guessed(omni, tmp_path, monkeypatch):
    _, state = omni
    torch.save({"model": state}, tmp_path / "a.pt")
    monkeypatch.delitem(settings.OMNI, "tiny")
    with pytest.raises(UsageError, match="no omniASR has 2 layers of width 32"):
        formats.read_model(tmp_path / "a.pt")


# --- exports --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, state",
    [
        ({**LAYER, "adapter_attn_dim": 3}, {"kind": "sentencepiece", "model": CHARACTERS.hex()}),
        (LAYER, {**STATE, "pieces": ["|", "A", "B", "?", "[PAD]", "É"], "lower": True}),
        ({**HUBERT, "feat_proj_layer_norm": False}, {**STATE, "delimiter": "é", "unknown": None}),
        ({**LAYER, "model_type": "hubert"}, STATE),
    ],
)
def test_transformers_reads_an_export_and_writes_the_same_text(changes, state, tmp_path):
    torch.manual_seed(3)
    tokenizer = make_tokenizer(state, ROWS if state["kind"] == "sentencepiece" else 6)
    config = {**TINY, **SHAPE, **changes}
    config |= {"vocabulary": tokenizer.size, "blank": tokenizer.blank, "normalize_eps": 1e-7}
    weights = Wav2Vec2(config).state_dict()
    weights = {name: w + 0.1 * torch.randn_like(w) for name, w in weights.items()}
    special = [n for n, piece in enumerate(tokenizer.pieces) if piece in ("<s>", "</s>", "<pad>")]
    # So that the text has several characters, and none that stands for nothing.
    weights["lm_head.bias"] -= outputs(weights, config).mean((0, 1))
    weights["lm_head.bias"][special] = -1000.0
    names = formats.export(tmp_path / "a", weights, config, state, {"README.md": "card"})
    assert {"config.json", "model.safetensors", "vocab.json", "README.md"} <= set(names)
    again, config_again, extras = formats.read_model(tmp_path / "a")
    assert config_again == config and all(torch.equal(again[n], weights[n]) for n in weights)
    read = make_tokenizer(extras["tokenizer"], tokenizer.size)
    letters = [tokenizer.decode([n]).replace("|", "\uff5c") for n in range(read.size)]
    assert [read.decode([n]) for n in range(read.size)] == letters

    model = AutoModelForCTC.from_pretrained(tmp_path / "a").eval()
    assert model.config.model_type == config["model_type"]
    assert_equal(weights, {**config, "do_normalize": False}, model)
    waveform = audio()[0].numpy() + 0.1
    inputs = AutoProcessor.from_pretrained(tmp_path / "a")(
        waveform, sampling_rate=16_000, return_tensors="pt"
    )
    normal = (waveform - waveform.mean()) / np.sqrt(waveform.var() + 1e-7)
    np.testing.assert_allclose(inputs.input_values[0], normal, atol=1e-5)
    with torch.no_grad():
        best = model(**inputs).logits[0].argmax(-1).unique_consecutive().tolist()
    ours = tokenizer.decode(best).replace("|", "\uff5c")  # which is the space there
    # transformers keeps several spaces in a row.
    said = transformers.pipeline("automatic-speech-recognition", str(tmp_path / "a"))(waveform)
    assert " ".join(said["text"].split()) == ours and len(set(ours)) > 2


# --- damaged files: others are in tests/models/whisper/test_formats.py ----------------------------


def settings_with(**changes):
    return lambda folder: change_json(folder / "config.json", **changes)


def tokens_with(**changes):
    return lambda folder: change_json(folder / "tokenizer_config.json", **changes)


def vocabulary_of(content):
    return lambda folder: write_json(folder / "vocab.json", content)


def bytes_of(name: str, raw: bytes):
    return lambda folder: (folder / name).write_bytes(raw)


ROW = torch.zeros(64)
FIRST = "encoder_frontend.model_dim_proj.weight"
REFUSED = {
    "an adapter after the encoder": (settings_with(add_adapter=True), "add_adapter is 'True'"),
    "another activation": (settings_with(hidden_act="relu"), "hidden_act is 'relu'"),
    "a huge convolution": (settings_with(conv_kernel=[10**9] * 7), "out of range"),
    "heads": (settings_with(num_attention_heads=5), "does not divide"),
    "weights of another size": (settings_with(num_hidden_layers=1), "has unexpected"),
    "8 kHz": (bytes_of("preprocessor_config.json", b'{"sampling_rate": 8000}'), "'8000'"),
    "no vocabulary": (lambda folder: (folder / "vocab.json").unlink(), "lacks vocab.json"),
    "a long vocabulary": (vocabulary_of({"[PAD]": 0, "a": 10**12}), "not a vocabulary for"),
    "two of a number": (vocabulary_of({"[PAD]": 0, "a": 1, "b": 1}), "with the same number"),
    "half a pair": (vocabulary_of({"[PAD]": 0, "\ud800": 1}), "tokenizer cannot be used"),
    "no blank": (tokens_with(pad_token=["<pad>"]), "which is the blank"),
    "phonemes": (tokens_with(tokenizer_class="Wav2Vec2PhonemeCTCTokenizer"), "Phoneme"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("sound"), peer(Wav2Vec2ForCTC, **LAYER))


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_folder_is_refused_in_one_line(name, sound, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    damage, reason = REFUSED[name]
    damage(folder)
    with pytest.raises(UsageError) as failure:
        formats.read_model(folder)
    message = str(failure.value)
    assert str(folder) in message and reason in message and "\n" not in message


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"model": {3: torch.zeros(2)}}, "not a wav2vec 2.0 model in fairseq2's form"),
        ({FIRST: torch.zeros(2), "llama_decoder.x": 0}, "has 'llama_decoder.x'"),
        ({FIRST: torch.tensor(1.0)}, "0 layers of width 0"),
        ({FIRST: torch.tensor(math.nan)}, "not finite"),
        ({f"encoder.layers.{n}.bias": ROW for n in range(3)} | {FIRST: ROW}, "share their data"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(content, reason, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UsageError) as failure:
        formats.read_model(tmp_path / "a.pt")
    message = str(failure.value)
    assert "a.pt" in message and reason in message and "\n" not in message
