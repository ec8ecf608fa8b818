"""Parakeet's weights on disk: NVIDIA's `.nemo` archives and Hugging Face folders."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from common import checkpoint, files, records
from common.errors import UsageError
from common.records import MISSING
from models import model_files
from models.parakeet import archive, nemotron, onnx, tokenizer
from models.parakeet.model import Parakeet
from models.parakeet.settings import (
    CONFIG,
    CTC,
    FAMILIES,
    FEATURES,
    FEATURIZER,
    HEAD,
    HEAD_AFTER_DROPOUT,
    NEMOTRON,
    NEMOTRON_EN,
    NO_TERMS,
    REDUCTIONS,
    RNNT,
    TDT,
    Family,
    check_config,
    family_of,
    is_transducer,
    kind_of,
)
from speech.signal.audio import SAMPLE_RATE
from speech.signal.nemo_features import MelFeatures

COUNTER = "num_batches_tracked"  # the only tensors of integers
NOTE = "prepared.json"  # what extend.py tells training, beside the model


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its Hugging Face name. Takes no memory. Check the
    configuration first: it may come from a file."""
    return checkpoint.shapes_of(lambda: Parakeet(config))


# --- between the two forms ------------------------------------------------------------------------


def _rename(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        if name.startswith(old) or (old.startswith(".") and old in name):
            return name.replace(old, new, 1)
    return name


def nemo_to_hf(state: dict[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """Renames tensors to Hugging Face's names and leaves out NeMo's window and mel filters."""
    renamed = {}
    for name, tensor in state.items():
        if not name.startswith(FEATURIZER):
            renamed[_rename(name.replace(HEAD, HEAD_AFTER_DROPOUT, 1), family.names)] = tensor
    return renamed


def hf_to_nemo(state: dict[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """Renames tensors to NeMo's names for a joint network with dropout."""
    names = {hf: nemo for nemo, hf in family.names.items()}
    return {_rename(name, names): tensor for name, tensor in state.items()}


# --- settings in both forms -----------------------------------------------------------------------


def _value(content, key: str, default=MISSING):
    """The value of a key with dots in nested dicts."""
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return default
        content = content[part]
    return content


def _number(value) -> float:
    """`value` as a number, also if it is text, as yaml reads 1e-05; NaN for anything else."""
    if type(value) not in (int, float, str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _equals(value, accepted) -> bool:
    if value is accepted:
        return True
    if type(accepted) is float:
        return math.isclose(_number(value), accepted, rel_tol=1e-6)
    return type(value) in (type(accepted), float) and value == accepted


def _require(content: dict, fixed: dict[str, tuple], path: Path) -> None:
    """Raises `UsageError` for a setting that the network here does not have."""
    for key, accepted in fixed.items():
        value = _value(content, key)
        if not any(_equals(value, taken) for taken in accepted):
            shown = "missing" if value is MISSING else repr(str(value)[:80])
            takes = " or ".join(repr(str(taken)) for taken in accepted if taken is not MISSING)
            raise UsageError(f"{path}: {key} is {shown}; this recipe's network takes {takes} only")


def _merge(content: dict, changes: dict) -> dict:
    """`content` with the values of `changes` in nested dicts; other keys are kept."""
    merged = dict(content)
    for name, value in changes.items():
        if isinstance(value, dict):
            inner = merged.get(name)
            value = _merge(inner if isinstance(inner, dict) else {}, value)
        merged[name] = value
    return merged


def _nest(values: dict) -> dict:
    """Nested dicts of values by keys with dots."""
    nested = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        nested = _merge(nested, value)
    return nested


# --- reading --------------------------------------------------------------------------------------


def read_model(path: str | Path) -> tuple[dict[str, torch.Tensor], dict, dict]:
    """Weights (fp32, by Hugging Face's names; a hybrid's CTC head is `ctc_head`), configuration and
    extras of a Hugging Face folder, a `.nemo`, or a folder that holds one. Extras: `tokenizer` (see
    tokenizer.py), `source` (the settings that an export keeps), `loss` (a schema is start.LOSS),
    `languages` (the slots of a prompt, by name), and what `read_note` returns. Runs no code in the
    files. Raises `UsageError`."""
    place = _place(path)
    if os.path.isdir(place):
        config, extras = read_settings(path)
        family = family_of(config)
        weights = model_files.read_folder(place, COUNTER)
        weights = {_rename(name, family.hf_names): tensor for name, tensor in weights.items()}
    else:
        with tempfile.TemporaryDirectory() as folder:
            config, extras = read_settings(path, Path(folder))
            family = family_of(config)
            weights = nemo_to_hf(_read_checkpoint(Path(folder, archive.CKPT), place), family)
    model_files.check_shapes(weights, expected_shapes(config), place, family.name)
    return weights, config, extras


def read_settings(path: str | Path, unpacked: Path | None = None) -> tuple[dict, dict]:
    """The configuration and extras of what `read_model` takes, without reading its weights. Those
    of a `.nemo` are copied to the folder `unpacked`, if one is given. Raises `UsageError`."""
    note = read_note(path)
    path = _place(path)
    if os.path.isdir(path):
        config, extras = _read_folder(path)
    else:
        config, extras = _read_nemo(path, unpacked)
    size = len(tokenizer.pieces(extras["tokenizer"]))
    if size != config["vocabulary"]:
        raise UsageError(
            f"{path}: its tokenizer has {size} pieces, but its weights are for"
            f" {config['vocabulary']}"
        )
    if max(note["new_pieces"], default=0) >= size:
        raise UsageError(f"{path}: its {NOTE} has pieces beyond the {size} of the tokenizer")
    return config, {**extras, **note}


def read_note(path: str | Path) -> dict:
    """The note of extend.py in a folder, or beside a `.nemo`: `new_pieces` (ids of pieces that the
    released model does not have) and `base` (its name). Raises `UsageError`."""
    path = Path(path)
    file = (path.parent if path.is_file() else path) / NOTE
    if not file.is_file():
        return {"new_pieces": [], "base": ""}
    content = model_files.read_json(file)
    schema = {"new_pieces": [CONFIG["vocabulary"]], "base": str}
    if reason := records.mismatch(content, schema, file.name):
        raise UsageError(f"{file}: {reason}")
    return {name: content[name] for name in schema}


def read_tokenizer(path: str | Path) -> dict:
    """The tokenizer's state of what `read_model` takes. Raises `UsageError`."""
    path = _place(path)
    if os.path.isdir(path):
        return _read_tokenizer(path)
    members = archive.unpack(path)
    return _sentencepiece(archive.load_yaml(members[archive.YAML], path), members, path)


def _place(path: str | Path) -> Path:
    """A Hugging Face folder, or a `.nemo`, also if only the folder that holds it is named."""
    path = Path(path)
    if os.path.isdir(path) and not (path / "config.json").is_file():
        archives = sorted(path.glob("*.nemo"))
        if len(archives) > 1:
            raise UsageError(
                f"{path} holds {len(archives)} .nemo archives and no config.json: name one of them"
            )
        if archives:
            return archives[0]
    return path


def _read_folder(folder: Path) -> tuple[dict, dict]:
    """The configuration and the extras, but for the note."""
    families = {family.model_type: family for family in FAMILIES}
    content = model_files.read_description(folder, *families)
    family = families[content["model_type"]]
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = model_files.read_json(folder / "generation_config.json")
    processors = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            processors[name] = model_files.read_json(folder / name)
    processor = processors.get("processor_config.json", {})
    config, languages = _hf_config(content, processor, family, folder / "config.json")
    expected = {**FEATURES, "feature_size": config["num_mel_bins"]}
    fixed = {key: (value, MISSING) for key, value in expected.items()}
    for name, settings in processors.items():
        _require(settings.get("feature_extractor", settings), fixed, folder / name)
    source = {"config": content, "generation": generation, "processor": processors}
    loss = dict(family.loss)
    if not is_transducer(config):
        _require(content, {"ctc_loss_reduction": (*REDUCTIONS, MISSING)}, folder / "config.json")
        loss["reduction"] = content.get("ctc_loss_reduction", "mean")
    state = _read_tokenizer(folder)
    return config, {"tokenizer": state, "source": source, "loss": loss, "languages": languages}


def _hf_config(
    content: dict, processor: dict, family: Family, file: Path
) -> tuple[dict, dict[str, int]]:
    """The configuration and the languages in config.json and processor_config.json."""
    _require(content, family.hf_fixed, file)
    values = {}
    for source, keys in ((processor, family.hf_processor), (content, family.hf)):
        values |= {name: _value(source, key, default) for name, (key, default) in keys.items()}
    config, languages = nemotron.nested(values, file)
    biases = (True, MISSING) if config["biases"] else (False,)
    _require(content, {"encoder_config.convolution_bias": biases}, file)
    size = content.get("vocab_size", family.hf_vocabulary + 1)  # with the blank
    config = _of_kind(config, family, ctc=family.kind == "ctc")
    if is_transducer(config):
        config["joint_width"] = config["prediction_width"]
    config["vocabulary"] = size - 1 if type(size) is int else size
    check_config(config, file)
    blank = (config["vocabulary"],)
    if config["vocabulary"] == family.hf_vocabulary:
        blank += (MISSING,)
    _require(content, {family.blank: blank}, file)
    return config, languages


def _of_kind(config: dict, family: Family, ctc: bool) -> dict:
    """`config` with what a family of one kind has in common. The kind "tdt" is not named, as in the
    checkpoints that were saved before there were others."""
    if family.kind != "tdt":
        config = {**config, "kind": family.kind, "durations": []}
    return {**config, "ctc": ctc}


def _read_tokenizer(folder: Path) -> dict:
    """The tokenizer's state."""
    state = {}
    if (folder / "tokenizer.model").is_file():
        state["sentencepiece"] = read_sentencepiece(folder / "tokenizer.model")
    texts = {}
    for name in ("tokenizer.json", *tokenizer.FILES):
        if (folder / name).is_file():
            model_files.refuse_pointer(folder / name)
            texts[name] = files.read_text(folder / name)
    if "tokenizer.json" in texts:
        state["json"] = texts.pop("tokenizer.json")
        state["files"] = texts
    if not state:
        raise UsageError(f"{folder} holds no tokenizer: it needs tokenizer.json or tokenizer.model")
    return state


def read_sentencepiece(file: Path) -> str:
    """A SentencePiece model in hexadecimal, as a state has it. Raises `UsageError`."""
    model_files.refuse_pointer(file)
    if file.stat().st_size > archive.TEXT_BYTES:
        raise UsageError(f"{file} is too large for a SentencePiece model")
    return file.read_bytes().hex()


def _read_nemo(path: Path, unpacked: Path | None) -> tuple[dict, dict]:
    """The same of a `.nemo`."""
    if path.suffix == ".safetensors":
        raise UsageError(f"{path}: give the folder that holds it and config.json, not the file")
    members = archive.unpack(path, unpacked)
    content = archive.load_yaml(members[archive.YAML], path)
    family = _family_of(content)
    config, languages = _nemo_config(content, family, path)
    loss = _nemo_loss(content, config, family, path)
    state = _sentencepiece(content, members, path)
    config["vocabulary"] = len(tokenizer.pieces(state))
    check_config(config, path)
    source = {"yaml": members[archive.YAML].decode()}
    return config, {"tokenizer": state, "source": source, "loss": loss, "languages": languages}


def _read_checkpoint(file: Path, path: Path) -> dict[str, torch.Tensor]:
    """The weights that the `.nemo` at `path` has in this file, by NeMo's names."""
    try:
        return model_files.floats(model_files.read_pickle(file), file, COUNTER)
    except UsageError as error:  # name the archive instead of the temporary file
        raise UsageError(str(error).replace(f"{file.parent}{os.sep}", f"{path}: ")) from None


def _family_of(content: dict) -> Family:
    """The family of an archive with these settings, which are still to be checked."""
    if content.get("joint") is None and _value(content, "decoder.prednet") is MISSING:
        return CTC
    if _value(content, "encoder.causal_downsampling") is True:
        has_prompt = _value(content, "model_defaults.initialize_prompt_feature", False)
        return NEMOTRON if has_prompt else NEMOTRON_EN
    has_durations = _value(content, "joint.num_extra_outputs", 0)
    return TDT if has_durations or _value(content, "loss.loss_name") == "tdt" else RNNT


def _nemo_config(content: dict, family: Family, path: Path) -> tuple[dict, dict[str, int]]:
    """The configuration in NeMo's settings, with a vocabulary of 1 for now, and the languages."""
    _require(content, family.nemo_fixed, path)
    values = {name: _value(content, key, default) for name, (key, default) in family.nemo.items()}
    config, languages = nemotron.nested(values, path)
    has_head = family.kind == "ctc" or isinstance(content.get("aux_ctc"), dict)
    config = _of_kind(config, family, has_head)
    config["vocabulary"] = 1
    d_model = config["d_model"]
    factor = _value(content, "encoder.ff_expansion_factor", 4)
    config["ffn"] = None
    if type(d_model) is int and type(factor) is int:
        config["ffn"] = d_model * factor
    if config["channels"] == -1:
        config["channels"] = d_model
    if is_transducer(config) and config["max_symbols"] is None:
        config["max_symbols"] = 10
    check_config(config, path)
    fixed = {"preprocessor.features": (config["num_mel_bins"],)}
    if config["durations"]:
        fixed["joint.num_extra_outputs"] = (len(config["durations"]),)
    _require(content, fixed, path)
    return config, languages


def _nemo_loss(content: dict, config: dict, family: Family, path: Path) -> dict:
    """The settings of the loss, or NeMo's default, which is not the released models'."""
    loss = dict(NO_TERMS)
    for name, key in family.nemo_loss.items():
        loss[name] = _number(_value(content, key, 0.0))
        if not 0 <= loss[name] <= 1:
            raise UsageError(f"{path}: {key} must be a number from 0 to 1")
    reductions = {"reduction": family.nemo_reduction}
    if is_transducer(config) and config["ctc"]:
        reductions["ctc_reduction"] = "aux_ctc.ctc_reduction"
    for name, key in reductions.items():
        _require(content, {key: (*REDUCTIONS, MISSING)}, path)
        loss[name] = _value(content, key, "mean_batch")
    return loss


def _sentencepiece(content: dict, members: dict[str, bytes], path: Path) -> dict[str, str]:
    """The tokenizer's state. Old archives do not refer to its file."""
    reference = str(_value(content, "tokenizer.model_path", ""))[:200].removeprefix("nemo:")
    models = {name: raw for name, raw in members.items() if name != archive.YAML}
    if reference in models:
        return {"sentencepiece": models[reference].hex()}
    if len(models) == 1:
        (raw,) = models.values()
        return {"sentencepiece": raw.hex()}
    raise UsageError(
        f"{path} lacks the SentencePiece model {reference[:60]!r}, to which its {archive.YAML}"
        " refers"
    )


# --- exporting ------------------------------------------------------------------------------------


def check_form(form: str, config: dict, extras: dict) -> None:
    """Raises `UsageError` if `export` cannot write such a model in this form."""
    pieces = tokenizer.pieces(extras["tokenizer"])
    if form == "nemo":
        nemo_settings(config, pieces, extras)
        tokenizer.sentencepiece_model(extras["tokenizer"])
    elif form == "onnx":
        onnx.check(config)
    else:
        hf_settings(config, pieces, extras)
        tokenizer.hf_files(extras["tokenizer"])


def export(
    folder: str | Path,
    form: str,
    weights: dict[str, torch.Tensor],
    config: dict,
    extras: dict,
    card: dict[str, str] | None = None,
    note: dict | None = None,
) -> list[str]:
    """Writes a folder that `transformers` can load (`form` "hf"), that holds NVIDIA's model.nemo
    ("nemo"), or that sherpa-onnx and onnx-asr load ("onnx"), in fp32, and returns the file names.
    Settings of the fine-tuned model are kept where a form has a place for them. Raises `UsageError`
    and `RunError`; see `model_files.write_export`.

    `weights`: by Hugging Face's names. `extras`: as `read_model` returns them; `source` may be
    empty. `card`: the texts of further files, by their names. `note`: see `read_note`."""
    tensors = model_files.on_host(weights)
    pieces = tokenizer.pieces(extras["tokenizer"])
    if form == "onnx":
        onnx.check(config)
        fill, texts = onnx.prepare(tensors, config, pieces)
    else:
        prepare = _nemo_export if form == "nemo" else _hf_export
        fill, texts = prepare(tensors, config, pieces, extras)
    if note:
        texts[NOTE] = json.dumps(note) + "\n"
    return model_files.write_export(folder, fill, texts | (card or {}))


# The function that writes what is no text in a folder, and the texts of the other files.
Files = tuple[Callable[[Path], object], dict[str, str]]


def _hf_export(
    tensors: dict[str, torch.Tensor], config: dict, pieces: list[str], extras: dict
) -> Files:
    contents = hf_settings(config, pieces, extras)
    texts = {name: json.dumps(content, indent=1) + "\n" for name, content in contents.items()}
    texts.update(tokenizer.hf_files(extras["tokenizer"]))
    family = family_of(config)
    if config["ctc"] and is_transducer(config):
        print(f"no CTC head in the export: Hugging Face's form of {family.name} has none")
        tensors = {n: tensor for n, tensor in tensors.items() if not n.startswith("ctc_head.")}
    names = {ours: theirs for theirs, ours in family.hf_names.items()}
    tensors = {_rename(name, names): tensor for name, tensor in tensors.items()}

    def fill(folder: Path) -> None:
        if model := extras["tokenizer"].get("sentencepiece"):
            (folder / "tokenizer.model").write_bytes(bytes.fromhex(model))
        model_files.save_tensors(tensors, folder)

    return fill, texts


def hf_settings(config: dict, pieces: list[str], extras: dict) -> dict[str, dict]:
    """config.json, generation_config.json and processor_config.json. Raises `UsageError` if Hugging
    Face's model cannot have that shape."""
    family = family_of(config)
    width = config.get("prediction_width")
    joint_width = config.get("joint_width")
    factor = 1 if family.streaming else config["subsampling"]
    if joint_width != width or config["num_mel_bins"] % factor:
        raise UsageError(
            f"no export to Hugging Face's form: joint_width is {joint_width} and"
            f" num_mel_bins is {config['num_mel_bins']}; they must be prediction_width ({width})"
            f" and a multiple of {factor} there"
        )
    source = extras["source"]
    blank = config["vocabulary"]
    pad = blank  # labels end at the padding
    if "<pad>" in pieces and is_transducer(config):
        pad = pieces.index("<pad>")
    old_generation = dict(source.get("generation") or {})
    old_generation.pop("_from_model_config", None)
    generation = {"pad_token_id": pad}
    if is_transducer(config):
        generation["decoder_start_token_id"] = blank
    if config["durations"]:
        outputs = range(blank + 1, blank + 1 + len(config["durations"]))
        generation["suppress_tokens"] = [*outputs]
    processor = {
        "blank_token": "<blank>",
        "decoder_type": kind_of(config),
        "processor_class": family.hf_classes["processor"],
        "feature_extractor": {
            **FEATURES,
            "feature_extractor_type": family.hf_classes["features"],
            "feature_size": config["num_mel_bins"],
            "padding_side": "right",
            "return_attention_mask": True,
        },
    }
    languages = extras.get("languages", {})
    values = nemotron.flat(config, languages)
    processor |= {key: values[name] for name, (key, _) in family.hf_processor.items()}
    processor_before = source.get("processor", {}).get("processor_config.json", {})
    return {
        "config.json": _hf_description(config, values, pad, source.get("config", {})),
        "generation_config.json": {**old_generation, **generation},
        "processor_config.json": _merge(processor_before, processor),
    }


def _hf_description(config: dict, values: dict, pad: int, source: dict) -> dict:
    """config.json: the `source`'s settings with what this model changes. `values`: by the names in
    `Family.hf`."""
    blank = config["vocabulary"]
    family = family_of(config)
    known = {key: values[name] for name, (key, _) in family.hf.items()}
    known.update({key: values[0] for key, values in family.hf_fixed.items()})
    known.update(
        {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "exported_by": model_files.EXPORTED,
            "dtype": "float32",
            "is_encoder_decoder": is_transducer(config),
            "vocab_size": blank + 1,
            "pad_token_id": pad,
            family.blank: blank,
            "encoder_config.model_type": family.hf_classes["encoder"],
            "encoder_config.layerdrop": 0.0,
            "encoder_config.convolution_bias": config["biases"],
            "encoder_config.num_key_value_heads": config["heads"],
        }
    )
    defaults = {
        "activation_dropout": 0.1,
        "attention_dropout": 0.1,
        "dropout": 0.1,
        "dropout_positions": 0.0,
    }
    left_out = ("auto_map", "torch_dtype", "_name_or_path")
    kept = {name: value for name, value in source.items() if name not in left_out}
    return _merge(_merge({"encoder_config": defaults}, kept), _nest(known))


def _nemo_export(
    tensors: dict[str, torch.Tensor], config: dict, pieces: list[str], extras: dict
) -> Files:
    settings = nemo_settings(config, pieces, extras)
    texts = {
        "model_path": ("tokenizer.model", tokenizer.sentencepiece_model(extras["tokenizer"])),
        "vocab_path": ("vocab.txt", "".join(f"{piece}\n" for piece in pieces).encode()),
        "spe_tokenizer_vocab": (
            "tokenizer.vocab",
            "".join(f"{piece}\t0\n" for piece in pieces).encode(),
        ),
    }
    members = {}
    references = {}
    for key, (name, raw) in texts.items():
        name = f"{hashlib.md5(raw).hexdigest()}_{name}"
        members[name] = raw
        references[key] = f"nemo:{name}"
    description = archive.dump_yaml(_merge(settings, {"tokenizer": references}))
    weights = hf_to_nemo(tensors, family_of(config))
    if not _value(settings, "joint.jointnet.dropout", 0):
        weights = {n.replace(HEAD_AFTER_DROPOUT, HEAD): tensor for n, tensor in weights.items()}
    features = MelFeatures(config["num_mel_bins"])
    weights[f"{FEATURIZER}window"] = features.window
    weights[f"{FEATURIZER}fb"] = features.filters.T[None].contiguous()

    def save(file) -> None:
        torch.save(weights, file)

    contents = {archive.YAML: description, **members, archive.CKPT: save}
    return lambda folder: archive.write(folder / "model.nemo", contents), {}


def nemo_settings(config: dict, pieces: list[str], extras: dict) -> dict:
    """model_config.yaml without the tokenizer's files: the source's with what this model changes,
    or a complete one. Raises `UsageError` if NeMo's model cannot have that shape."""
    family = family_of(config)
    source = extras["source"].get("yaml")
    if source:
        content = archive.load_yaml(source.encode(), "the model's source")
    else:
        content = _complete_settings(family)
    if not content.get("validation_ds"):  # which NeMo's transcribe reads
        content["validation_ds"] = {"manifest_filepath": None, "sample_rate": SAMPLE_RATE}
    changes = _nemo_changes(config, pieces, extras)
    is_hybrid = config["ctc"] and is_transducer(config)
    if not source or is_hybrid != isinstance(content.get("aux_ctc"), dict):
        content.pop("aux_ctc", None)
        changes["target"] = family.target
        if is_hybrid:
            changes["target"] = family.hybrid
            changes["aux_ctc.decoder._target_"] = family.nemo_fixed["aux_ctc.decoder._target_"][0]
            changes["aux_ctc.use_cer"] = False
            changes["aux_ctc.ctc_loss_weight"] = 0.3
            changes.setdefault("aux_ctc.ctc_reduction", "mean_batch")
            changes["aux_ctc.decoding.strategy"] = "greedy"
    return _merge(content, _nest(changes))


def _nemo_changes(config: dict, pieces: list[str], extras: dict) -> dict:
    """The settings of a model by NeMo's keys. Lists are copied, because yaml writes a list that it
    has met as a reference."""
    factor, rest = divmod(config["ffn"], config["d_model"])
    if rest:
        raise UsageError(
            f"no export to a .nemo: ffn is {config['ffn']} and must be a multiple of d_model there"
        )
    prompts = config.get("prompts")
    if prompts and prompts["width"] != 2 * config["d_model"]:
        raise UsageError(
            f"no export to a .nemo: the prompt's width is {prompts['width']} and must be twice"
            " d_model there"
        )
    size = config["vocabulary"]
    family = family_of(config)
    loss = extras["loss"]
    values = nemotron.flat(config, extras.get("languages", {}))
    changes = {key: values[name] for name, (key, _) in family.nemo.items()}
    changes["preprocessor.features"] = config["num_mel_bins"]
    changes["encoder.ff_expansion_factor"] = factor
    changes["model_defaults.enc_hidden"] = config["d_model"]
    changes.update({key: [*pieces] for key in family.labels})
    changes.update(dict.fromkeys(family.sizes, size))
    changes.update({key: loss.get(name, 0.0) for name, key in family.nemo_loss.items()})
    changes[family.nemo_reduction] = loss["reduction"]
    if not is_transducer(config):
        changes["decoder.feat_in"] = config["d_model"]
        return changes
    changes["joint.jointnet.encoder_hidden"] = config["d_model"]
    changes["joint.jointnet.pred_hidden"] = config["prediction_width"]
    changes["model_defaults.pred_hidden"] = config["prediction_width"]
    changes["model_defaults.joint_hidden"] = config["joint_width"]
    if durations := config["durations"]:
        changes["joint.num_extra_outputs"] = len(durations)
        changes["decoding.durations"] = [*durations]
        changes["model_defaults.num_tdt_durations"] = len(durations)
        changes["model_defaults.tdt_durations"] = [*durations]
    if config["ctc"]:
        changes["aux_ctc.decoder.feat_in"] = config["d_model"]
        changes["aux_ctc.decoder.num_classes"] = size
        changes["aux_ctc.decoder.vocabulary"] = [*pieces]
        if "ctc_reduction" in loss:
            changes["aux_ctc.ctc_reduction"] = loss["ctc_reduction"]
    return changes


def _complete_settings(family: Family) -> dict:
    """The settings that NeMo's model needs besides its shape."""
    # The sizes in samples say the same as those in seconds; a hybrid's head is added where it is.
    left_out = ("aux_ctc.", "tokenizer.", "encoder.reduction", "encoder.conv_context_style")
    settings = {}
    for key, accepted in family.nemo_fixed.items():
        if not key.startswith(left_out) and "n_window" not in key:
            settings[key] = accepted[0]
    settings.update(family.nemo_usual)
    return _nest(settings)
