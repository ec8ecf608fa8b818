"""Parakeet's files against transformers: read, export, load; and files that are refused."""

import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
import yaml
from transformers import ParakeetForTDT, ParakeetTDTConfig

from common.errors import Failure, UsageError
from models.parakeet import formats, settings
from tests.models.pieces import train_pieces
from tests.models.whisper.test_formats import LFS, Trap
from tests.peers import same_tensors

LINES = ["the cat sat on the mat", "a dog and a bird", "we ate bread at the table"] * 20
PIECES = train_pieces(LINES, vocab_size=32, model_type="bpe")
PADDED = train_pieces(LINES, vocab_size=32, model_type="bpe", pad_id=2)
SHAPE = {"num_mel_bins": 16, "channels": 8, "ffn": 48, "max_symbols": 7}
CONFIG = settings.make_config(16, 2, 2, (12, 2), 32, durations=[0, 1, 2, 4], **SHAPE)
EXTRAS = {"tokenizer": {"sentencepiece": PIECES.hex()}, "source": {}, "loss": settings.TDT.loss}


def random_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = formats.expected_shapes(config)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: w.abs() if "running_var" in name else w for name, w in weights.items()}
    counters = [name for name in weights if name.endswith("num_batches_tracked")]
    return weights | {name: torch.tensor(1000 + i) for i, name in enumerate(counters)}


def peer(config: dict):
    """transformers' own model with random weights."""
    encoder = {
        hf.split(".")[1]: config[name] for name, (hf, _) in settings.TDT.hf.items() if "." in hf
    }
    encoder |= {"convolution_bias": config["biases"], "model_type": "parakeet_encoder"}
    described = ParakeetTDTConfig(
        vocab_size=config["vocabulary"] + 1,
        blank_token_id=config["vocabulary"],
        pad_token_id=32,
        decoder_hidden_size=config["prediction_width"],
        num_decoder_layers=config["prediction_layers"],
        durations=config["durations"],
        max_symbols_per_step=config["max_symbols"],
        encoder_config=encoder,
    )
    return ParakeetForTDT(described).eval()


def nemo(folder: Path, config: dict = CONFIG, extras: dict = EXTRAS) -> Path:
    formats.export(folder, "nemo", random_weights(config), config, extras)
    return folder / "model.nemo"


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {
            member.name: archive.extractfile(member).read() for member in archive if member.isreg()
        }


def packed(path: Path, members: dict[str, bytes], headers=()) -> Path:
    with tarfile.open(path, "w") as archive:
        for header in headers:
            archive.addfile(header)
        for name, raw in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(raw)
            archive.addfile(header, io.BytesIO(raw))
    return path


def with_yaml(members: dict[str, bytes], change) -> dict[str, bytes]:
    content = yaml.safe_load(members["./model_config.yaml"])
    change(content)
    return {**members, "./model_config.yaml": yaml.safe_dump(content, sort_keys=False).encode()}


# --- the two forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary,count", [(1024, 617_825_926), (8192, 627_008_134)])
def test_the_released_models_have_the_released_numbers_of_parameters(vocabulary, count):
    shapes = formats.expected_shapes({**settings.SIZES["0.6b"], "vocabulary": vocabulary})
    parameters = [s for n, s in shapes.items() if "running" not in n and "tracked" not in n]
    assert sum(int(np.prod(shape)) for shape in parameters) == count


def test_conversions_are_each_others_inverse():
    weights = random_weights({**CONFIG, "ctc": True, "biases": True})
    theirs = formats.hf_to_nemo(weights, settings.TDT)
    assert same_tensors(formats.nemo_to_hf(theirs, settings.TDT), weights) and len(theirs) == len(
        weights
    )
    hf = ("_proj", "subsampling", "embedding", "projector", "joint.head", "conv.norm.", ".bias_u")
    assert not [name for name in theirs if any(part in name for part in hf)]
    assert {
        "encoder.pre_encode.conv.6.bias",
        "encoder.layers.1.conv.batch_norm.running_var",
        "encoder.layers.0.self_attn.pos_bias_u",
        "decoder.prediction.dec_rnn.lstm.bias_hh_l1",
        "joint.joint_net.2.weight",
        "ctc_decoder.decoder_layers.0.bias",
    } <= theirs.keys()
    without_dropout = {
        name.replace("joint_net.2", "joint_net.1"): tensor for name, tensor in theirs.items()
    }
    assert same_tensors(formats.nemo_to_hf(without_dropout, settings.TDT), weights)


# --- Hugging Face's form --------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
def test_a_folder_of_transformers_is_read(biases, tmp_path):
    config = {**CONFIG, "biases": biases, "scale_input": biases}
    model = peer(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(PIECES)
    weights, config_read, extras = formats.read_model(tmp_path)
    assert same_tensors(weights, model.state_dict()) and config_read == config
    assert extras["tokenizer"] == EXTRAS["tokenizer"] and extras["loss"] == settings.TDT.loss
    half = model.half()
    half.save_pretrained(tmp_path)
    weights = formats.read_model(tmp_path)[0]
    counters = {name: w for name, w in weights.items() if w.dtype == torch.int64}
    assert len(counters) == 2
    assert same_tensors(
        weights, {n: w if n in counters else w.float() for n, w in half.state_dict().items()}
    )


@pytest.mark.parametrize("pieces", [PIECES, PADDED])
def test_transformers_uses_an_export_as_it_is(pieces, tmp_path, capsys):
    config, weights = {**CONFIG, "ctc": True}, random_weights({**CONFIG, "ctc": True})
    extras = {**EXTRAS, "tokenizer": {"sentencepiece": pieces.hex()}}
    names = formats.export(tmp_path / "ours", "hf", weights, config, extras)
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "processor_config.json",
    } < {*names}
    assert "no CTC head" in capsys.readouterr().out
    model, report = ParakeetForTDT.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    plain = {name: w for name, w in weights.items() if "ctc" not in name}
    assert same_tensors(model.state_dict(), plain)
    pad = 2 if pieces is PADDED else 32
    assert (model.config.pad_token_id, model.config.blank_token_id) == (pad, 32)
    assert model.config.vocab_size == 33
    assert model.config.encoder_config.layerdrop == 0 and model.config.max_symbols_per_step == 7
    assert model.generation_config.decoder_start_token_id == 32
    assert model.generation_config.suppress_tokens == [33, 34, 35, 36]
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "ours")
    assert type(processor).__name__ == "ParakeetProcessor" and processor.decoder_type == "tdt"
    assert processor.blank_token_id == 32 and processor.tokenizer.pad_token_id == pad
    assert processor.feature_extractor.feature_size == 16
    expected = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    inputs = processor(np.zeros(16_000, "float32"), text="the cat sat", sampling_rate=16_000)
    assert inputs["labels"].tolist() == [expected.encode("the cat sat")]
    assert model(**inputs).loss.isfinite()
    again, config_again, extras_again = formats.read_model(tmp_path / "ours")
    assert same_tensors(again, plain) and config_again == CONFIG
    assert extras_again["tokenizer"]["sentencepiece"] == pieces.hex()
    model.save_pretrained(tmp_path / "theirs")  # transformers writes back everything in it
    (tmp_path / "theirs" / "tokenizer.model").write_bytes(pieces)
    assert same_tensors(formats.read_model(tmp_path / "theirs")[0], plain)


def test_settings_of_a_source_folder_are_kept(tmp_path):
    formats.export(tmp_path / "a", "hf", random_weights(CONFIG), CONFIG, EXTRAS)
    changes = {
        "config.json": {"mood": "good", "encoder_config": {"dropout": 0.3}, "auto_map": {"A": "x"}},
        "generation_config.json": {"max_new_tokens": 77},
        "processor_config.json": {"note": "x"},
        "tokenizer_config.json": {"model_max_length": 99},
    }
    for name, change in changes.items():
        content = formats._merge(json.loads((tmp_path / "a" / name).read_text()), change)
        (tmp_path / "a" / name).write_text(json.dumps(content))
    weights, config, extras = formats.read_model(tmp_path / "a")
    formats.export(tmp_path / "b", "hf", weights, config, extras)
    config, generation, processor, tokens = (
        json.loads((tmp_path / "b" / name).read_text()) for name in changes
    )
    assert config["mood"] == "good" and config["encoder_config"]["dropout"] == 0.3
    assert "auto_map" not in config and generation["max_new_tokens"] == 77
    assert processor["note"] == "x" and tokens["model_max_length"] == 99


@pytest.mark.parametrize(
    "form,changes,expected",
    [
        ("hf", {"joint_width": 10}, "joint_width is 10"),
        ("hf", {"num_mel_bins": 20}, "num_mel_bins is 20"),
        ("nemo", {"ffn": 50}, "ffn is 50"),
    ],
)
def test_shapes_that_a_form_cannot_hold(form, changes, expected, tmp_path):
    config = {**CONFIG, **changes}
    with pytest.raises(UsageError, match=expected):
        formats.export(tmp_path / "ours", form, random_weights(config), config, EXTRAS)
    assert not list(tmp_path.iterdir())


# --- NVIDIA's form --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"ctc": True, "biases": True, "scale_input": True}, {"joint_width": 10}]
)
def test_an_archive_is_read_as_it_was_written(changes, tmp_path):
    config = {**CONFIG, **changes}
    path = nemo(tmp_path / "a", config)
    weights, config_read, extras = formats.read_model(path)
    assert same_tensors(weights, random_weights(config)) and config_read == config
    loss = {**settings.TDT.loss, **({"ctc_reduction": "mean_batch"} if config["ctc"] else {})}
    assert extras["tokenizer"] == EXTRAS["tokenizer"] and extras["loss"] == loss
    assert same_tensors(formats.read_model(tmp_path / "a")[0], weights)  # the folder that holds it
    formats.export(tmp_path / "b", "nemo", weights, config_read, extras)
    assert unpacked(path) == unpacked(tmp_path / "b" / "model.nemo")


def test_an_archive_has_nemos_names(tmp_path):
    members = unpacked(nemo(tmp_path / "a", {**CONFIG, "ctc": True}))
    weights = torch.load(io.BytesIO(members["./model_weights.ckpt"]), weights_only=True)
    assert weights["preprocessor.featurizer.window"].equal(torch.hann_window(400, periodic=False))
    filters = transformers.ParakeetFeatureExtractor(feature_size=16).mel_filters
    torch.testing.assert_close(
        weights["preprocessor.featurizer.fb"][0], filters, atol=1e-7, rtol=1e-5
    )
    content = yaml.safe_load(members["./model_config.yaml"])
    for key in ("model_path", "vocab_path", "spe_tokenizer_vocab"):
        assert content["tokenizer"][key].startswith("nemo:")
        assert "./" + content["tokenizer"][key].removeprefix("nemo:") in members
    assert members["./" + content["tokenizer"]["model_path"].removeprefix("nemo:")] == PIECES
    assert content["target"].endswith("EncDecHybridRNNTCTCBPEModel")
    assert len(content["labels"]) == 32
    assert len(content["aux_ctc"]["decoder"]["vocabulary"]) == 32


def test_unknown_settings_are_kept_and_ours_take_precedence(tmp_path):
    def change(content):
        content |= {"mood": {"today": [1, 2]}, "rnnt_reduction": "mean_volume"}
        content["encoder"]["sync_max_audio_length"] = False
        content["joint"]["jointnet"]["dropout"] = 0.0
        content["loss"]["tdt_kwargs"] |= {"sigma": "5e-2", "clamp": 3.0}
        del content["loss"]["tdt_kwargs"]["omega"]

    members = with_yaml(unpacked(nemo(tmp_path / "a")), change)
    before = yaml.safe_load(members["./model_config.yaml"])
    path = packed(tmp_path / "changed.nemo", members)
    weights, config, extras = formats.read_model(path)
    terms = {"sigma": 0.05, "omega": 0.0, "fastemit": 0.0}
    assert extras["loss"] == {**terms, "reduction": "mean_volume"}
    config = {**config, "max_symbols": 5}
    formats.export(tmp_path / "b", "nemo", weights, config, extras)
    written = unpacked(tmp_path / "b" / "model.nemo")
    before["decoding"]["greedy"]["max_symbols"] = 5
    before["loss"]["tdt_kwargs"] |= {"sigma": 0.05, "omega": 0.0}
    assert yaml.safe_load(written["./model_config.yaml"]) == before
    names = torch.load(io.BytesIO(written["./model_weights.ckpt"]), weights_only=True)
    assert "joint.joint_net.1.weight" in names and "joint.joint_net.2.weight" not in names
    assert same_tensors(formats.read_model(tmp_path / "b" / "model.nemo")[0], weights)


@pytest.mark.parametrize("found", [{}, {"validation_ds": None}, {"validation_ds": {"a": True}}])
def test_an_archive_has_the_sections_that_other_programs_read(found, tmp_path):
    """NeMo's transcribe one, whisper.cpp the durations. That of the source stays."""

    def change(content):
        del content["validation_ds"], content["model_defaults"]
        content.update(found)

    members = with_yaml(unpacked(nemo(tmp_path / "a")), change)
    weights, config, extras = formats.read_model(packed(tmp_path / "changed.nemo", members))
    formats.export(tmp_path / "b", "nemo", weights, config, extras)
    for path, kept in ((tmp_path / "a", {}), (tmp_path / "b", found)):
        content = yaml.safe_load(unpacked(path / "model.nemo")["./model_config.yaml"])
        expected = {"manifest_filepath": None, "sample_rate": 16_000}
        assert content["validation_ds"] == (kept.get("validation_ds") or expected)
        defaults = content["model_defaults"]
        assert defaults["tdt_durations"] == [0, 1, 2, 4] and defaults["num_tdt_durations"] == 4


def test_old_archives(tmp_path):
    """Without `./`, md5 prefixes and references, the yaml last."""
    members = unpacked(nemo(tmp_path / "a"))
    members = with_yaml(members, lambda content: content["tokenizer"].pop("model_path"))
    old = {"sub/x": b"1"}
    for name, raw in reversed(members.items()):
        old[name.rpartition("_" if "tok" in name else "/")[2]] = raw
    path = packed(tmp_path / "old.nemo", old)
    weights, config, _ = formats.read_model(path)
    assert same_tensors(weights, random_weights(CONFIG)) and config == CONFIG


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    nemo(folder / "nemo")
    formats.export(folder / "hf", "hf", random_weights(CONFIG), CONFIG, EXTRAS)
    return folder


def set_value(key: str, value):
    def change(content):
        *parents, last = key.split(".")
        for parent in parents:
            content = content.setdefault(parent, {})
        if value is ...:
            content.pop(last)
        else:
            content[last] = value

    return change


SETTINGS = [
    ("preprocessor.normalize", "all_features"),
    ("preprocessor.features", 80),
    ("preprocessor._target_", "os.system"),
    ("encoder._target_", "SqueezeformerEncoder"),
    ("encoder.subsampling", "striding"),
    ("encoder.self_attention_model", "rel_pos_local_attn"),
    ("encoder.att_context_size", [128, 128]),
    ("encoder.conv_norm_type", "layer_norm"),
    ("encoder.conv_context_size", "causal"),
    ("encoder.d_model", 2**31),
    ("encoder.n_layers", 10**9),
    ("encoder.n_heads", 3),
    ("encoder.ff_expansion_factor", 1.5),
    ("encoder.subsampling_factor", 16),
    ("joint.jointnet.activation", "tanh"),
    ("joint.num_extra_outputs", 0),
    ("loss.loss_name", "default"),
    ("loss.tdt_kwargs.durations", [0, 0, 1]),
    ("loss.tdt_kwargs.sigma", "x"),
    ("loss.tdt_kwargs.omega", float("nan")),
    ("rnnt_reduction", None),
    ("tokenizer.type", "agg"),
]


@pytest.mark.parametrize("key,value", SETTINGS)
def test_settings_that_the_network_does_not_have(key, value, sound, tmp_path):
    members = with_yaml(unpacked(sound / "nemo" / "model.nemo"), set_value(key, value))
    path = packed(tmp_path / "x.nemo", members)
    with pytest.raises(UsageError) as caught:
        formats.read_model(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    names = {place: name for name, (place, _) in settings.TDT.nemo.items()} | {
        "encoder.ff_expansion_factor": "ffn"
    }
    assert names.get(key, key) in str(caught.value)


def added(*headers):
    """The archive with further empty members in front."""
    return lambda members, path: packed(path, members, headers=headers)


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = ""):
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def replaced(name: str, raw: bytes):
    return lambda members, path: packed(path, {**members, name: raw})


def written(change):
    """The archive's bytes, changed."""

    def spoil(members, path):
        packed(path, members)
        path.write_bytes(change(path.read_bytes()))

    return spoil


def saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def changed_weights(change):
    def spoil(members, path):
        weights = torch.load(io.BytesIO(members["./model_weights.ckpt"]), weights_only=True)
        packed(path, {**members, "./model_weights.ckpt": saved(change(weights))})

    return spoil


def oversized(size: int, kind: bytes = tarfile.REGTYPE):
    """A member whose header claims `size` bytes."""
    header = tarfile.TarInfo("./model_weights.ckpt")
    header.size, header.type = size, kind
    return lambda members, path: path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))


def rename(old: str, new: str):
    return changed_weights(
        lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}
    )


def only(*names: str):
    """The archive with these files alone."""
    return lambda members, path: packed(path, {name: members[name] for name in names})


def without_weights(members, path):
    packed(path, {name: raw for name, raw in members.items() if name != CKPT})


def another_tokenizer(members, path):
    packed(path, {n: PADDED[:-9] if "r.model" in n else raw for n, raw in members.items()})


YAML, CKPT = "./model_config.yaml", "./model_weights.ckpt"
ALLOWS = "more than its size allows"
HOSTILE = {  # damaged tensors: tests/models/whisper/test_formats.py
    "a path above": (added(entry("../escaped")), "escaped.*outside"),
    "an absolute path": (added(entry("/tmp/escaped")), "outside"),
    "a symbolic link": (added(entry("./x", tarfile.SYMTYPE, "/etc/passwd")), "not a regular file"),
    "a hard link": (added(entry(CKPT, tarfile.LNKTYPE, "/etc/passwd")), "not a regular file"),
    "a pipe": (added(entry(YAML, tarfile.FIFOTYPE)), "not a regular file"),
    "a file twice": (added(entry(YAML)), "there twice"),
    "many files": (added(*[entry(f"./{i}") for i in range(300)]), "more than 200"),
    "a pickle": (replaced(CKPT, pickle.dumps(Trap(), protocol=2)), f"{CKPT[2:]} is refused"),
    "a pickle in torch's form": (replaced(CKPT, saved(Trap())), f"x.nemo: {CKPT[2:]} is refused"),
    "a large yaml": (replaced(YAML, bytes(5 << 20)), "5 MiB"),
    "a huge member": (oversized(1 << 50), "cut short"),
    "a huge name": (oversized(1 << 50, tarfile.GNUTYPE_LONGNAME), ALLOWS),
    "a tag": (
        replaced(YAML, b"a: !!python/object/apply:os.system ['echo the file was run']"),
        "yaml",
    ),
    "references": (replaced(YAML, b"a: &a [1]\nb: [*a, *a]\n"), "references, deep"),
    # Some builds of libyaml refuse depth before our own check sees it.
    "deep yaml": (replaced(YAML, b"[" * 100_000), "yaml is refused"),
    "many entries": (replaced(YAML, b"a: [" + b"[]," * 500_000 + b"]"), "too many entries"),
    "a long number": (replaced(YAML, b"a: " + b"9" * 10_000), "refused"),
    "no yaml": (only(CKPT), "lacks model_config.yaml"),
    "no weights": (without_weights, "lacks model_weights.ckpt"),
    "no tokenizer": (only(YAML, CKPT), "lacks the SentencePiece model"),
    "cut short": (written(lambda raw: raw[: len(raw) // 2]), "cut short"),
    "not a tar": (written(lambda raw: b"RIFF" * 500), "not a .nemo archive"),
    "a pointer": (written(lambda raw: LFS), "git lfs pull"),
    "a tensor is missing": (rename("joint.enc.bias", "joint.enc.x"), "lacks 'encoder_projector.b"),
    "another tokenizer": (another_tokenizer, "tokenizer"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_in_one_line(case, sound, tmp_path, capfd, no_hang):
    spoil, expected = HOSTILE[case]
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    spoil(unpacked(sound / "nemo" / "model.nemo"), folder / "x.nemo")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Failure, match=expected) as caught:
        formats.read_model(folder / "x.nemo")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "tokenizer" in case
    assert "the file was run" not in capfd.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before and not os.path.exists("/tmp/escaped")


def rewrite(name: str, key: str, value):
    def spoil(folder):
        content = json.loads((folder / name).read_text())
        set_value(key, value)(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def config(key: str, value):
    return rewrite("config.json", key, value)


def two_archives(folder):
    (folder / "config.json").rename(folder / "a.nemo")
    (folder / "b.nemo").touch()


ENCODER = "encoder_config."
FEATURES = "feature_extractor"
FOLDERS = {
    "another type": (config("model_type", "whisper"), "parakeet_rnnt or"),
    "another activation": (config("hidden_act", "gelu"), "hidden_act is 'gelu'"),
    "another kernel": (config(ENCODER + "subsampling_conv_kernel_size", 5), "is '5'"),
    "other biases": (config(ENCODER + "convolution_bias", True), "convolution_bias is 'True'"),
    "another blank": (config("blank_token_id", 0), "blank_token_id is '0'"),
    "a larger vocabulary": (config("vocab_size", 40), "blank_token_id is '32'"),
    "a huge vocabulary": (config("vocab_size", 10**9), "vocabulary is '999999999'"),
    "more durations": (config("durations", [0, 1, 2, 3, 4]), "joint.head.weight is"),
    "other features": (
        rewrite("processor_config.json", f"{FEATURES}.n_fft", 400),
        "n_fft is '400'",
    ),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "no tokenizer"),
    "a pointer": (lambda f: (f / "tokenizer.model").write_bytes(LFS), "git lfs pull"),
    "two archives": (two_archives, "2 .nemo"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_spoiled_folders_are_refused_in_one_line(case, sound, tmp_path):
    spoil, expected = FOLDERS[case]
    shutil.copytree(sound / "hf", tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(UsageError, match=expected) as caught:
        formats.read_model(tmp_path / "model")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
