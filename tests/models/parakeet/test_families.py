"""RNN-T and CTC models and hybrids against transformers: read, export, logits, losses, texts."""

import dataclasses
import os
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import onnx_asr
import pytest
import sherpa_onnx
import torch
import transformers
import yaml

from common.batches import to_device
from common.errors import UsageError
from models.parakeet import archive, decoding, formats, settings, start
from recipes import parakeet_tdt as recipe
from speech.decoding import timed
from speech.writing.text import train_tokenizer
from tests.peers import texts_in_sherpa

LINES = ["the cat sat on the mat", "a dog and a bird", "we ate bread at the table"] * 10
PIECES = train_tokenizer(LINES, "bpe", 40)
EXTRAS = {"tokenizer": {"sentencepiece": PIECES.model.hex()}, "source": {}}
KINDS = ("rnnt", "ctc")


def make_config(kind: str, ctc: bool, **changes) -> dict:
    """A small model as the released ones of its kind are: biases, scaled input."""
    shape = {"num_mel_bins": 16, "channels": 8, "max_symbols": 4, "ctc": ctc, **changes}
    shape |= {"biases": True, "scale_input": True}
    config = settings.make_config(16, 2, 2, (12, 2), PIECES.size, **shape)
    if kind != "tdt":
        config |= {"kind": kind, "durations": []}
    if kind == "ctc":
        config = {name: value for name, value in config.items() if name not in settings.TRANSDUCER}
    return config


def random_weights(config: dict, seed: int = 4) -> dict[str, torch.Tensor]:
    """Weights of which a model writes many pieces."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in formats.expected_shapes(config).items():
        tensor = torch.randn(shape, generator=generator) * (1.0 if "head" in name else 0.3)
        if name.endswith("running_var"):
            tensor = tensor.abs() + 0.5
        elif "norm" in name:
            tensor = 1.0 + tensor if name.endswith("weight") else 0.0 * tensor
        elif "subsampling" in name:
            tensor *= 0.1 if name.endswith("bias") else 10.0 if ".linear." in name else 1.0
        elif "projector.weight" in name or "lstm" in name:
            tensor *= 3.0
        weights[name] = torch.tensor(7) if name.endswith("tracked") else tensor
    for name in ("joint.head.bias", "ctc_head.bias"):
        if name in weights:
            weights[name][config["vocabulary"]] += 3.0 if "joint" in name else 1.0  # are usual
    if "decoder.embedding.weight" in weights:
        weights["decoder.embedding.weight"][config["vocabulary"]] = 0.0
    return weights


def extras_of(config: dict) -> dict:
    return {**EXTRAS, "loss": dict(settings.family_of(config).loss)}


def waveforms(*seconds: float) -> list[np.ndarray]:
    """Noise whose loudness and colour change."""
    random = np.random.default_rng(1)
    clips = []
    for length in seconds:
        samples = random.standard_normal(round(16_000 * length)).astype("float32")
        swell = np.sin(np.linspace(0, 40 * length, len(samples))) ** 2
        clips.append(np.convolve(samples, random.standard_normal(9), "same") * swell * 0.1)
    return [clip.astype("float32") for clip in clips]


def batch_of(clips: list[np.ndarray], texts: list[str], info: start.ModelInfo) -> dict:
    tokenizer = start.tokenizer_of(info)
    items = []
    for number, (clip, text) in enumerate(zip(clips, texts, strict=True)):
        tokens = torch.tensor(tokenizer.encode(text), dtype=torch.long)
        item = {"audio": torch.from_numpy(clip), "tokens": tokens, "text": text, "name": text}
        item |= {"plain": False, "index": number, "factors": {}, "counts": {}}
        for term, reduction in recipe.reductions(info).items():
            item["factors"][term] = 1 / max(1, len(tokens)) if reduction == "mean" else 1.0
            item["counts"][term] = len(tokens) if reduction == "mean_volume" else 1
        items.append(item)
    return next(to_device([recipe.collate(items)], torch.device("cpu")))


def asked(**changes) -> start.ParakeetOptions:
    """What a run without flags but these asks for, as far as it matters here."""
    names = [field.name for field in dataclasses.fields(start.ParakeetOptions)]
    usual = {**dict.fromkeys(names), "origin": SimpleNamespace(given=frozenset())}
    return start.ParakeetOptions(**{**usual, **changes})


def peer_of(kind: str, folder):
    family = settings.family_of({"kind": kind})
    model, report = getattr(transformers, family.architecture).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder)


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_with_an_export(kind, tmp_path):
    """Logits in float64, and the texts of greedy decoding, of a ragged batch."""
    config = make_config(kind, kind == "ctc")
    weights = random_weights(config)
    formats.export(tmp_path / "a", "hf", weights, config, extras_of(config))
    theirs, processor = peer_of(kind, tmp_path / "a")
    assert processor.decoder_type == kind
    again, config_again, extras = formats.read_model(tmp_path / "a")
    assert config_again == config and all(again[n].equal(w) for n, w in weights.items())
    info = start.ModelInfo(config, extras["tokenizer"], extras["loss"], {}, True)
    ours = start.make_model(info, again).eval()
    clips = waveforms(1.3, 2.1, 0.7)
    texts = ["the cat sat", "we ate bread", "a dog"]
    batch = batch_of(clips, texts, info)
    inputs = processor(clips, text=texts, sampling_rate=16_000)
    labels, decoder_inputs = inputs.pop("labels"), inputs.pop("decoder_input_ids")
    with torch.no_grad():
        heard = [timed.text_of(t, start.tokenizer_of(info)) for t in decode(ours, batch)]
        for clip, text in zip(clips, heard, strict=True):  # in a batch they go on after the end
            most = {} if kind == "ctc" else {"max_new_tokens": 1000}
            written = theirs.generate(**processor(clip, sampling_rate=16_000), **most)
            sequences = written if kind == "ctc" else written.sequences
            (expected,) = processor.batch_decode(sequences, skip_special_tokens=True)
            assert text == " ".join(expected.split())
        assert len({*"".join(heard)}) > 3
        ours, theirs = ours.double(), theirs.double()
        features, lengths, frames = ours.mel(batch)
        encoded = ours.encoder(features.double(), lengths, frames)
        given = {"input_features": features.double(), "attention_mask": inputs["attention_mask"]}
        if kind == "ctc":
            length = int(batch["tokens_lengths_host"][0])
            assert labels[0, :length].equal(batch["tokens"][0, :length])
            theirs_logits = theirs(**given).logits.log_softmax(-1)
            ours_logits = ours.ctc_log_probs(encoded)
        else:
            theirs_logits = theirs(**given, decoder_input_ids=decoder_inputs).logits
            projected = ours.encoder_projector(encoded)[:, :, None]
            ours_logits = ours.joint.logits(projected, ours.predict(batch["tokens"])[:, None])
        for row, count in enumerate(frames):
            labels_of_row = int(batch["tokens_lengths_host"][row]) + 1
            part = (row, slice(count), slice(labels_of_row) if kind != "ctc" else slice(None))
            difference = (ours_logits[part] - theirs_logits[part]).abs().max()
            assert difference <= 1e-5 * theirs_logits[part].abs().max()  # positions are fp32


def decode(model, batch):
    return decoding.decode(model, *model.encode(batch))


def test_the_ctc_loss_is_that_of_transformers(tmp_path):
    config = make_config("ctc", True)
    formats.export(tmp_path / "a", "hf", random_weights(config), config, extras_of(config))
    theirs, processor = peer_of("ctc", tmp_path / "a")
    weights, _, extras = formats.read_model(tmp_path / "a")
    assert extras["loss"]["reduction"] == "mean"  # as transformers' usual one
    info = start.ModelInfo(config, extras["tokenizer"], extras["loss"], {}, True)
    clips, texts = waveforms(1.3, 2.1), ["the cat sat", "we ate"]
    batch = batch_of(clips, texts, info)
    with torch.no_grad():
        terms = recipe.compute_loss(start.make_model(info, weights).eval(), batch)
        given = processor(clips, text=texts, sampling_rate=16_000)
        del given["decoder_input_ids"]
        expected = theirs(**given).loss
    ours = terms["ctc"] / batch["counts"]["ctc"]
    assert list(terms) == ["ctc"] and float(ours) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_is_read(kind, tmp_path):
    """A folder of transformers' own, whose config.json has what it leaves out at its defaults."""
    config = make_config(kind, kind == "ctc")
    formats.export(tmp_path / "a", "hf", random_weights(config), config, extras_of(config))
    model, processor = peer_of(kind, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    processor.save_pretrained(tmp_path / "b")
    weights, read, _ = formats.read_model(tmp_path / "b")
    assert read == config
    assert all(weights[name].equal(tensor) for name, tensor in model.state_dict().items())


# --- NVIDIA's form --------------------------------------------------------------------------------

HYBRIDS = [("rnnt", False), ("rnnt", True), ("tdt", True), ("ctc", True)]
TARGETS = {
    ("rnnt", False): "EncDecRNNTBPEModel",
    ("rnnt", True): "EncDecHybridRNNTCTCBPEModel",
    ("tdt", True): "EncDecHybridRNNTCTCBPEModel",
    ("ctc", True): "EncDecCTCModelBPE",
}


def settings_of(path) -> dict:
    return yaml.safe_load(archive.unpack(path)[archive.YAML])


@pytest.mark.parametrize("kind,ctc", HYBRIDS)
def test_an_archive_is_read_as_it_was_written(kind, ctc, tmp_path):
    config = make_config(kind, ctc)
    weights = random_weights(config)
    formats.export(tmp_path / "a", "nemo", weights, config, extras_of(config))
    content = settings_of(tmp_path / "a" / "model.nemo")
    assert content["target"].endswith(TARGETS[kind, ctc])
    again, read, extras = formats.read_model(tmp_path / "a")
    assert read == config and all(again[name].equal(tensor) for name, tensor in weights.items())
    formats.export(tmp_path / "b", "nemo", again, read, extras)
    assert settings_of(tmp_path / "b" / "model.nemo") == content


def with_settings(folder, config: dict, change) -> dict:
    """An archive of this configuration with other settings: what is read of it."""
    extras = extras_of(config)
    content = formats.nemo_settings(config, start.pieces(extras["tokenizer"]), extras)
    change(content)
    extras["source"] = {"yaml": archive.dump_yaml(content).decode()}
    formats.export(folder, "nemo", random_weights(config), config, extras)
    return formats.read_model(folder)


def test_settings_of_the_loss_are_the_archives(tmp_path):
    """FastEmit, and the reductions of both losses."""
    config = make_config("rnnt", True)
    loss = {**settings.RNNT.loss, "fastemit": 0.005, "reduction": "mean_batch"}
    extras = {**EXTRAS, "loss": {**loss, "ctc_reduction": "mean"}}
    formats.export(tmp_path / "a", "nemo", random_weights(config), config, extras)
    content = settings_of(tmp_path / "a" / "model.nemo")
    assert content["loss"]["warprnnt_numba_kwargs"]["fastemit_lambda"] == 0.005
    assert content["aux_ctc"]["ctc_reduction"] == "mean"
    assert formats.read_model(tmp_path / "a")[2]["loss"] == extras["loss"]
    info = start.ModelInfo(config, EXTRAS["tokenizer"], extras["loss"], {}, True)
    found = recipe.reductions(start.with_loss(info, asked()))
    assert found == {"rnnt": "mean_batch", "ctc": "mean"}
    assert start.network(info).fastemit == 0.005


@pytest.mark.parametrize("flag", ["joint_dropout", "ctc_weight"])
def test_flags_of_another_kind_are_refused(flag):
    info = start.ModelInfo(
        make_config("ctc", True), EXTRAS["tokenizer"], settings.RNNT.loss, {}, True
    )
    with pytest.raises(UsageError, match=f"--{flag}: a Parakeet-CTC model has no use"):
        start.with_loss(info, asked(origin=SimpleNamespace(given=frozenset([flag]))))


def test_the_offline_half_of_a_unified_model(tmp_path):
    """Its settings of streaming are kept, and change nothing in what is computed here."""
    kept = {
        "att_context_size": [-1, -1],
        "att_chunk_context_size": [[70], [1, 2, 7, 13], [0, 1, 2, 3, 4, 7, 13]],
        "att_context_style": "chunked_limited_with_rc",
        "conv_context_style": "dcc",
    }

    def change(content):
        content["encoder"] |= kept
        content["loss"] = {"loss_name": "default", "offline_loss_weight": 0.3}

    config = make_config("rnnt", False)
    weights, read, extras = with_settings(tmp_path / "a", config, change)
    assert read == config and extras["loss"] == settings.RNNT.loss
    formats.export(tmp_path / "b", "nemo", weights, read, extras)
    content = settings_of(tmp_path / "b" / "model.nemo")
    assert {name: content["encoder"][name] for name in kept} == kept
    assert content["loss"]["offline_loss_weight"] == 0.3
    assert start.is_unified(start.ModelInfo(read, **extras, pretrained=True))
    assert not start.is_unified(start.ModelInfo(read, **{**extras, "source": {}}, pretrained=True))


REFUSED = {
    "another loss": (lambda c: c["loss"].update(loss_name="multiblank_rnnt"), "loss_name"),
    "big blanks": (lambda c: c["joint"].update(num_extra_outputs=2), "loss.loss_name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_transducers_are_refused_in_one_line(case, tmp_path):
    change, expected = REFUSED[case]
    with pytest.raises(UsageError, match=expected) as caught:
        with_settings(tmp_path / "a", make_config("rnnt", False), change)
    assert "\n" not in str(caught.value)


def test_configurations_that_contradict_their_kind():
    for kind, changes in (
        ("tdt", {"durations": []}),
        ("rnnt", {"durations": [0, 1]}),
        ("ctc", {"ctc": False}),
        ("rnnt", {"joint_width": None}),
    ):
        with pytest.raises(UsageError):
            settings.check_config({**make_config(kind, kind == "ctc"), **changes}, "it")
    for kind in settings.KINDS:
        settings.check_config(make_config(kind, True), "it")


# --- other programs -------------------------------------------------------------------------------


def in_sherpa(folder, kind: str) -> sherpa_onnx.OfflineRecognizer:
    if kind == "ctc":
        return sherpa_onnx.OfflineRecognizer.from_nemo_ctc(
            model=str(folder / "model.onnx"), tokens=str(folder / "tokens.txt")
        )
    parts = {part: str(folder / f"{part}.onnx") for part in ("encoder", "decoder", "joiner")}
    return sherpa_onnx.OfflineRecognizer.from_transducer(
        **parts, tokens=str(folder / "tokens.txt"), model_type="nemo_transducer"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_programs_without_torch(kind, tmp_path):
    """onnx-asr writes the same texts. sherpa-onnx, whose features differ a little, loads the files:
    random weights are sure of nothing."""
    config = {**make_config(kind, kind == "ctc"), "num_mel_bins": 80, "layers": 1}
    weights = random_weights(config)
    formats.export(tmp_path / "a", "onnx", weights, config, extras_of(config))
    info = start.ModelInfo(config, EXTRAS["tokenizer"], extras_of(config)["loss"], {}, True)
    clips = waveforms(1.3, 2.1, 0.7)
    batch = batch_of(clips, ["a", "b", "c"], info)
    rows = decode(start.make_model(info, weights).eval(), batch)
    texts = [timed.text_of(tokens, start.tokenizer_of(info)) for tokens in rows]
    model = onnx_asr.load_model(f"nemo-conformer-{kind}", tmp_path / "a")
    heard = model.recognize(clips, sample_rate=16_000)
    assert [" ".join(text.split()) for text in heard] == texts and len({*"".join(texts)}) > 3
    single, _ = texts_in_sherpa(in_sherpa(tmp_path / "a", kind), clips[:1])
    assert single[0]


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,ctc", HYBRIDS)
def test_a_hybrid_writes_with_the_part_that_is_asked_for(kind, ctc):
    config = make_config(kind, ctc)
    info = start.ModelInfo(config, EXTRAS["tokenizer"], settings.RNNT.loss, {}, True)
    model = start.make_model(info, random_weights(config)).eval()
    batch = batch_of(waveforms(1.5), ["a dog"], info)
    usual = decode(model, batch)
    found = {}
    for part in ("transducer", "ctc"):
        options = asked(decoding=part, language=None, lookahead=None)
        has = kind != "ctc" if part == "transducer" else ctc
        if has:
            start.tell(options, info, model)
            found[part] = decode(model, batch)
        else:
            with pytest.raises(UsageError, match=f"--decoding {part}: the model has no"):
                start.tell(options, info, model)
    assert usual == found["ctc" if kind == "ctc" else "transducer"]
    if len(found) == 2:
        assert found["ctc"] != found["transducer"]
