"""Parakeet-TDT's weights on disk: NVIDIA's `.nemo` archives and Hugging Face folders
(`parakeet_tdt`)."""

import gzip
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

import torch
import yaml

from common import checkpoint, files
from common.errors import UsageError, first_line
from speech import model_files
from speech.audio import SAMPLE_RATE
from speech.parakeet import tokenizer
from speech.parakeet.features import FLOOR, HOP, N_FFT, PRE_EMPHASIS, WINDOW, MelFeatures

YAML, CKPT = "model_config.yaml", "model_weights.ckpt"
TOKENIZER = r"(?:.+_)?tokenizer\.model"
TEXT_BYTES = (
    1 << 22
)  # of the yaml and of a SentencePiece model; those of 8,192 pieces have less than 1 MiB
MEMBERS = 200  # of an archive; NeMo writes six
INFLATED = 8  # the most bytes that a byte of a gzip archive may unpack to: weights hardly shrink
DEPTH = 50  # of the yaml; libyaml's loader crashes at some thousands
ENTRIES = 1 << 18  # a hybrid with 8,192 pieces has some 25,000
DIGITS = 1000  # Python does not print numbers of more than 4,300
COUNTER = "num_batches_tracked"
LOSS = {
    "sigma": 0.02,
    "omega": 0.1,
    "reduction": "mean",
}  # of the released models; Hugging Face's form has none
REDUCTIONS = ("mean", "mean_batch", "mean_volume", "sum")
# A schema for `checkpoint.mismatch`. `vocabulary` is without the blank; `ctc`: a CTC head beside
# the transducer.
CONFIG = {
    "num_mel_bins": range(1, 513),
    "d_model": range(4, 8193, 2),
    "layers": range(1, 129),
    "heads": range(1, 129),
    "ffn": range(1, (1 << 16) + 1),
    "kernel": range(1, 256, 2),
    "subsampling": {2, 4, 8},
    "channels": range(1, 4097),
    "biases": bool,
    "scale_input": bool,
    "prediction_width": range(1, 8193),
    "prediction_layers": range(1, 17),
    "joint_width": range(1, 8193),
    "vocabulary": range(1, 200_001),
    "max_symbols": range(1, 1001),
    "durations": lambda values: (
        type(values) is list
        and len(values) <= 64
        and all(checkpoint.within(value, range(1001)) for value in values)
        and len(set(values)) == len(values)
        and max(values) > 0
    ),
    "ctc": bool,
}
# Where the forms say it, and the value that counts if they do not; None: they must.
NEMO = {
    "num_mel_bins": ("encoder.feat_in", None),
    "d_model": ("encoder.d_model", None),
    "layers": ("encoder.n_layers", None),
    "heads": ("encoder.n_heads", 4),
    "kernel": ("encoder.conv_kernel_size", 31),
    "subsampling": ("encoder.subsampling_factor", 4),
    "channels": ("encoder.subsampling_conv_channels", -1),
    "biases": ("encoder.use_bias", True),
    "scale_input": ("encoder.xscaling", True),
    "prediction_width": ("decoder.prednet.pred_hidden", None),
    "joint_width": ("joint.jointnet.joint_hidden", None),
    "prediction_layers": ("decoder.prednet.pred_rnn_layers", None),
    "durations": ("loss.tdt_kwargs.durations", None),
    "max_symbols": ("decoding.greedy.max_symbols", 10),
}
HF = {
    "num_mel_bins": ("encoder_config.num_mel_bins", 80),
    "d_model": ("encoder_config.hidden_size", 1024),
    "layers": ("encoder_config.num_hidden_layers", 24),
    "heads": ("encoder_config.num_attention_heads", 8),
    "ffn": ("encoder_config.intermediate_size", 4096),
    "kernel": ("encoder_config.conv_kernel_size", 9),
    "subsampling": ("encoder_config.subsampling_factor", 8),
    "channels": ("encoder_config.subsampling_conv_channels", 256),
    "biases": ("encoder_config.attention_bias", True),
    "scale_input": ("encoder_config.scale_input", True),
    "prediction_width": ("decoder_hidden_size", 640),
    "prediction_layers": ("num_decoder_layers", 2),
    "durations": ("durations", [0, 1, 2, 3, 4]),
    "max_symbols": ("max_symbols_per_step", 10),
}
# Settings that the network here has in one form only; `...` stands for a missing key.
NEMO_FIXED = {
    "loss.loss_name": ("tdt",),
    "preprocessor.sample_rate": (SAMPLE_RATE, ...),
    "preprocessor.window_size": (WINDOW / SAMPLE_RATE,),
    "preprocessor.window_stride": (HOP / SAMPLE_RATE, ...),
    "preprocessor.n_window_size": (WINDOW, None, ...),
    "preprocessor.n_window_stride": (HOP, None, ...),
    "preprocessor.window": ("hann", ...),
    "preprocessor.normalize": ("per_feature", ...),
    "preprocessor.n_fft": (N_FFT, None, ...),
    "preprocessor.preemph": (PRE_EMPHASIS, ...),
    "preprocessor.lowfreq": (0, None, ...),
    "preprocessor.highfreq": (8000, None, ...),
    "preprocessor.log": (True, ...),
    "preprocessor.log_zero_guard_type": ("add", ...),
    "preprocessor.log_zero_guard_value": (FLOOR, ...),
    "preprocessor.exact_pad": (False, ...),
    "preprocessor.mag_power": (2.0, ...),
    "preprocessor.mel_norm": ("slaney", ...),
    "preprocessor.frame_splicing": (1, ...),
    "preprocessor.pad_value": (0, ...),
    "encoder.subsampling": ("dw_striding",),
    "encoder.causal_downsampling": (False, ...),
    "encoder.reduction": (None, ...),
    "encoder.reduction_factor": (1, None, ...),
    "encoder.self_attention_model": ("rel_pos", ...),
    "encoder.att_context_size": ([-1, -1], [[-1, -1]], None, ...),
    "encoder.att_context_style": ("regular", ...),
    "encoder.untie_biases": (True, ...),
    "encoder.conv_norm_type": ("batch_norm", ...),
    "encoder.conv_context_size": (None, ...),
    "encoder.conv_context_style": ("regular", ...),
    "decoder.normalization_mode": (None, ...),
    "decoder.blank_as_pad": (True, ...),
    "joint.jointnet.activation": ("relu",),
    "tokenizer.type": ("bpe", "BPE"),
    **{
        f"{part}._target_": (f"nemo.collections.asr.modules.{name}", ...)
        for part, name in {
            "preprocessor": "AudioToMelSpectrogramPreprocessor",
            "encoder": "ConformerEncoder",
            "decoder": "RNNTDecoder",
            "joint": "RNNTJoint",
            "aux_ctc.decoder": "ConvASRDecoder",
        }.items()
    },
}
HF_FIXED = {
    "hidden_act": ("relu", ...),
    "encoder_config.hidden_act": ("silu", ...),
    "encoder_config.subsampling_conv_kernel_size": (3, ...),
    "encoder_config.subsampling_conv_stride": (2, ...),
}
FEATURES = {  # of ParakeetFeatureExtractor
    "sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": N_FFT, "win_length": WINDOW,
    "preemphasis": PRE_EMPHASIS, "padding_value": 0.0,
}  # fmt: skip
NAMES = {  # parts of names: NeMo's to Hugging Face's
    "encoder.pre_encode.conv.": "encoder.subsampling.layers.",
    "encoder.pre_encode.out.": "encoder.subsampling.linear.",
    ".conv.batch_norm.": ".conv.norm.",
    ".self_attn.linear_q.": ".self_attn.q_proj.",
    ".self_attn.linear_k.": ".self_attn.k_proj.",
    ".self_attn.linear_v.": ".self_attn.v_proj.",
    ".self_attn.linear_out.": ".self_attn.o_proj.",
    ".self_attn.linear_pos.": ".self_attn.relative_k_proj.",
    ".self_attn.pos_bias_u": ".self_attn.bias_u",
    ".self_attn.pos_bias_v": ".self_attn.bias_v",
    "decoder.prediction.embed.": "decoder.embedding.",
    "decoder.prediction.dec_rnn.lstm.": "decoder.lstm.",
    "joint.enc.": "encoder_projector.",
    "joint.pred.": "decoder.decoder_projector.",
    "joint.joint_net.2.": "joint.head.",
    "ctc_decoder.decoder_layers.0.": "ctc_head.",
}
NAMES_BACK = {hf: nemo for nemo, hf in NAMES.items()}
FEATURIZER = "preprocessor.featurizer."  # NeMo's window (400,) and mel filters (1, bins, 257)
HEADS = ("joint.joint_net.1.", "joint.joint_net.2.")  # NeMo's joint without and with dropout


def shape(
    d_model: int,
    layers: int,
    heads: int,
    prediction: tuple[int, int],
    vocabulary: int = 1024,
    **others,
) -> dict:
    """A configuration with the proportions of the released models. `prediction`: width and layers
    of the prediction network. `others` replace further values."""
    config = {
        "num_mel_bins": 128,
        "d_model": d_model,
        "layers": layers,
        "heads": heads,
        "ffn": 4 * d_model,
        "kernel": 9,
        "subsampling": 8,
        "channels": 256,
        "biases": False,
        "scale_input": False,
        "prediction_width": prediction[0],
        "prediction_layers": prediction[1],
        "joint_width": prediction[0],
        "vocabulary": vocabulary,
        "durations": [0, 1, 2, 3, 4],
        "max_symbols": 10,
        "ctc": False,
    }
    return {**config, **others}


SIZES = {
    "demo": shape(
        144, 4, 4, (192, 1), num_mel_bins=80, channels=64, subsampling=4
    ),  # short words, letter by letter
    "110m": shape(512, 17, 8, (640, 1), num_mel_bins=80, biases=True, scale_input=True, ctc=True),
    "0.6b": shape(1024, 24, 8, (640, 2), 8192),
}


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its Hugging Face name."""
    d, width, joint, channels = (
        config[name] for name in ("d_model", "prediction_width", "joint_width", "channels")
    )
    ffn, heads, classes = config["ffn"], config["heads"], config["vocabulary"] + 1
    shapes = {}

    def tensor(name: str, *size: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = size
        if bias:
            shapes[f"{name}.bias"] = size[:1]

    bins, index = config["num_mel_bins"], 0
    for stage in range(config["subsampling"].bit_length() - 1):
        tensor(f"encoder.subsampling.layers.{index}", channels, 1, 3, 3)
        if stage:
            tensor(f"encoder.subsampling.layers.{index + 1}", channels, channels, 1, 1)
        index += 3 if stage else 2
        bins = (bins + 1) // 2
    tensor("encoder.subsampling.linear", d, channels * bins)
    vectors = (
        "conv.norm",
        *(f"norm_{part}" for part in ("feed_forward1", "self_att", "conv", "feed_forward2", "out")),
    )
    linear = {
        **{f"feed_forward{i}.linear1": (ffn, d) for i in (1, 2)},
        **{f"feed_forward{i}.linear2": (d, ffn) for i in (1, 2)},
        **{f"self_attn.{part}_proj": (d, d) for part in "qkvo"},
        "conv.pointwise_conv1": (2 * d, d, 1),
        "conv.depthwise_conv": (d, 1, config["kernel"]),
        "conv.pointwise_conv2": (d, d, 1),
    }
    others = {
        "self_attn.relative_k_proj.weight": (d, d),
        "self_attn.bias_u": (heads, d // heads),
        "self_attn.bias_v": (heads, d // heads),
        "conv.norm.running_mean": (d,),
        "conv.norm.running_var": (d,),
        f"conv.norm.{COUNTER}": (),
    }
    for layer in (f"encoder.layers.{i}." for i in range(config["layers"])):
        for part, size in linear.items():
            tensor(layer + part, *size, bias=config["biases"])
        for part in vectors:
            tensor(layer + part, d)
        shapes |= {layer + name: size for name, size in others.items()}
    tensor("encoder_projector", joint, d)
    tensor("decoder.embedding", classes, width, bias=False)
    for i, part in itertools.product(range(config["prediction_layers"]), ("ih", "hh")):
        shapes |= {
            f"decoder.lstm.weight_{part}_l{i}": (4 * width, width),
            f"decoder.lstm.bias_{part}_l{i}": (4 * width,),
        }
    tensor("decoder.decoder_projector", joint, width)
    tensor("joint.head", classes + len(config["durations"]), joint)
    if config["ctc"]:
        tensor("ctc_head", classes, d, 1)
    return shapes


# --- between the two forms ------------------------------------------------------------------------


def _rename(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        if name.startswith(old) or (old.startswith(".") and old in name):
            return name.replace(old, new, 1)
    return name


def nemo_to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors to Hugging Face's names and leaves out NeMo's window and mel filters."""
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(FEATURIZER)}
    return {_rename(name.replace(*HEADS, 1), NAMES): tensor for name, tensor in kept.items()}


def hf_to_nemo(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors to NeMo's names, those of a joint network with dropout."""
    return {_rename(name, NAMES_BACK): tensor for name, tensor in state.items()}


def _value(content, key: str, default=...):
    """The value of a key with dots in nested dicts."""
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return default
        content = content[part]
    return content


def _number(value) -> float:
    """NaN for anything but a number. yaml takes 1e-05 for text."""
    try:
        return float(value) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _is(value, accepted) -> bool:
    if type(accepted) is float:
        return math.isclose(_number(value), accepted, rel_tol=1e-6)
    return type(value) in (type(accepted), float) and value == accepted


def _require(content: dict, fixed: dict[str, tuple], path: Path) -> None:
    """Raises `UsageError` for a setting that the network here does not have."""
    for key, accepted in fixed.items():
        value = _value(content, key)
        if not any(value is each or _is(value, each) for each in accepted):
            shown = "missing" if value is ... else repr(str(value)[:80])
            takes = " or ".join(repr(str(each)) for each in accepted if each is not ...)
            raise UsageError(f"{path}: {key} is {shown}; this recipe's network takes {takes} only")


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no Parakeet can have."""
    if reason := checkpoint.mismatch(config, CONFIG, "its configuration"):
        raise UsageError(f"{path}: {reason}, which is out of range for Parakeet")
    if config["d_model"] % config["heads"]:
        raise UsageError(f"{path}: heads does not divide d_model")


# --- reading --------------------------------------------------------------------------------------


def read_model(path: str | Path) -> tuple[dict[str, torch.Tensor], dict, dict]:
    """Weights (fp32, CPU, by Hugging Face's names; a hybrid's CTC head is `ctc_head`),
    configuration and extras of a Hugging Face folder, a `.nemo`, or a folder that holds one.
    Extras: `tokenizer` (see tokenizer.py), `source` (the settings that an export keeps), `loss`
    (sigma, omega, reduction). Runs no code in the files. Raises `UsageError`."""
    path = Path(path)
    if os.path.isdir(path) and not (path / "config.json").is_file():
        archives = sorted(path.glob("*.nemo"))
        if len(archives) > 1:
            raise UsageError(
                f"{path} holds {len(archives)} .nemo archives and no config.json: name one of them"
            )
        path = archives[0] if archives else path
    weights, config, extras = _read_folder(path) if os.path.isdir(path) else _read_nemo(path)
    model_files.check_shapes(weights, expected_shapes(config), path, "Parakeet-TDT")
    if (size := len(tokenizer.pieces(extras["tokenizer"]))) != config["vocabulary"]:
        raise UsageError(
            f"{path}: its tokenizer has {size} pieces, but its weights are for"
            f" {config['vocabulary']}"
        )
    return weights, config, extras


def _read_folder(folder: Path) -> tuple[dict[str, torch.Tensor], dict, dict]:
    content = model_files.read_description(folder, "parakeet_tdt")
    file = folder / "config.json"
    _require(content, HF_FIXED, file)
    config = {name: _value(content, key, default) for name, (key, default) in HF.items()}
    biases = (True, ...) if config["biases"] else (False,)
    _require(content, {"encoder_config.convolution_bias": biases}, file)
    size = content.get("vocab_size", 8193)
    config |= {
        "joint_width": config["prediction_width"],
        "vocabulary": size - 1 if type(size) is int else size,
    }
    config["ctc"] = False
    check_config(config, file)
    _require(
        content, {"blank_token_id": (config["vocabulary"], *([...] if size == 8193 else []))}, file
    )
    others = {
        name: model_files.read_json(folder / name)
        for name in ("generation_config.json", "processor_config.json", "preprocessor_config.json")
        if (folder / name).is_file()
    }
    generation = others.pop("generation_config.json", None)
    fixed = {
        key: (value, ...)
        for key, value in {**FEATURES, "feature_size": config["num_mel_bins"]}.items()
    }
    for name, settings in others.items():
        _require(settings.get("feature_extractor", settings), fixed, folder / name)
    source = {"config": content, "generation": generation, "processor": others}
    extras = {"tokenizer": _read_tokenizer(folder), "source": source, "loss": dict(LOSS)}
    return model_files.read_folder(folder, COUNTER), config, extras


def _read_tokenizer(folder: Path) -> dict:
    state, texts = {}, {}
    for file in (folder / name for name in ("tokenizer.model", "tokenizer.json", *tokenizer.FILES)):
        if not file.is_file():
            continue
        model_files.refuse_pointer(file)
        if file.name != "tokenizer.model":
            texts[file.name] = files.read_text(file)
        elif file.stat().st_size > TEXT_BYTES:
            raise UsageError(f"{file} is too large for a SentencePiece model")
        else:
            state["sentencepiece"] = file.read_bytes().hex()
    if "tokenizer.json" in texts:
        state |= {"json": texts.pop("tokenizer.json"), "files": texts}
    if not state:
        raise UsageError(f"{folder} holds no tokenizer: it needs tokenizer.json or tokenizer.model")
    return state


class _Stream:
    """An archive that is read forwards up to a size. tarfile trusts sizes in headers, even negative
    and huge ones."""

    def __init__(self, file, limit: int):
        self.file, self.limit = file, limit

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.limit - self.file.tell():
            raise tarfile.ReadError("it holds more than its size allows")
        return self.file.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        if whence or not self.file.tell() - 1 <= position <= self.limit:
            raise tarfile.ReadError("it holds more than its size allows")
        return self.file.seek(position)

    def tell(self) -> int:
        return self.file.tell()


def _unpack(path: Path, folder: Path) -> dict[str, bytes]:
    """Copies the weights of an archive into `folder` and returns the yaml and the SentencePiece
    models by name. Nothing else is kept or written. Raises `UsageError`."""
    model_files.refuse_pointer(path)
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"  # as before NeMo 1.7
            file.seek(0)
            limit = (INFLATED if is_gzip else 1) * path.stat().st_size + (1 << 20)
            stream = _Stream(gzip.GzipFile(fileobj=file) if is_gzip else file, limit)
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                return _read_members(archive, path, folder)
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        RecursionError,
        ValueError,
    ) as error:
        reason = (
            f"{path} is not a .nemo archive, or damaged or cut short ({first_line(error)[:80]}):"
            " fetch it again"
        )
        raise UsageError(reason) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be unpacked in {folder.parent}: {error.strerror or error}"
        ) from None


def _read_members(archive: tarfile.TarFile, path: Path, folder: Path) -> dict[str, bytes]:
    names, members = set(), {}
    for member in archive:
        name = member.name.removeprefix("./")
        reason = None
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            reason = "it lies outside the archive"
        elif (
            member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
            or member.issparse()
        ):
            reason = "it is not a regular file"
        elif name in names or len(names) >= MEMBERS:
            reason = (
                "it is there twice" if name in names else f"there are more than {MEMBERS} files"
            )
        elif is_text := name == YAML or re.fullmatch(TOKENIZER, name):
            reason = f"it has {member.size / 2**20:.0f} MiB" if member.size > TEXT_BYTES else None
        if reason:
            raise UsageError(f"{path} is refused: {name[:60]!r}: {reason}, which NeMo never writes")
        names.add(name)
        if "/" in name or not member.isreg() or not (is_text or name == CKPT):
            continue
        content = archive.extractfile(member)
        if is_text:
            members[name] = content.read()
        else:
            with open(folder / CKPT, "wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
    if YAML not in members or not (folder / CKPT).is_file():
        raise UsageError(
            f"{path} is not a .nemo archive: it lacks {CKPT if YAML in members else YAML}"
        )
    return members


def _load_yaml(raw: bytes | str, path: Path) -> dict:
    """The yaml of a model. Raises `UsageError`, also for references within it, which can make a
    small file huge."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth, reason, content = 0, "it is not a table", None
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if isinstance(event, yaml.AliasEvent) or depth > DEPTH or number > ENTRIES:
                raise yaml.YAMLError("references, deep nesting or too many entries")
            if (
                isinstance(event, yaml.ScalarEvent)
                and not event.style
                and len(event.value) > DIGITS
            ):
                raise yaml.YAMLError("a long number")
        content = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError) as error:
        reason = first_line(error)[:100]
    if not isinstance(content, dict):
        raise UsageError(f"{path}: its {YAML} is refused: {reason}")
    return content


def _read_nemo(path: Path) -> tuple[dict[str, torch.Tensor], dict, dict]:
    if path.suffix == ".safetensors":
        raise UsageError(f"{path}: give the folder that holds it and config.json, not the file")
    with tempfile.TemporaryDirectory() as folder:
        members = _unpack(path, Path(folder))
        content = _load_yaml(members[YAML], path)
        _require(content, NEMO_FIXED, path)
        config = {name: _value(content, key, default) for name, (key, default) in NEMO.items()}
        config |= {"ctc": isinstance(content.get("aux_ctc"), dict), "vocabulary": 1}
        d, factor = config["d_model"], _value(content, "encoder.ff_expansion_factor", 4)
        config["ffn"] = d * factor if type(d) is type(factor) is int else None
        config["channels"] = d if config["channels"] == -1 else config["channels"]
        config["max_symbols"] = 10 if config["max_symbols"] is None else config["max_symbols"]
        check_config(config, path)
        fixed = {
            "joint.num_extra_outputs": (len(config["durations"]),),
            "rnnt_reduction": (*REDUCTIONS, ...),
        }
        _require(content, {**fixed, "preprocessor.features": (config["num_mel_bins"],)}, path)
        # What is not given has NeMo's default, not the released models' value.
        loss = {
            name: _number(_value(content, f"loss.tdt_kwargs.{name}", 0.0))
            for name in ("sigma", "omega")
        }
        if name := next((name for name, value in loss.items() if not 0 <= value <= 1), None):
            raise UsageError(f"{path}: loss.tdt_kwargs.{name} must be a number from 0 to 1")
        loss["reduction"] = content.get("rnnt_reduction", "mean_batch")
        state = _sentencepiece(content, members, path)
        try:
            file = Path(folder, CKPT)
            weights = nemo_to_hf(model_files.floats(model_files.read_pickle(file), file, COUNTER))
        except UsageError as error:
            raise UsageError(str(error).replace(f"{folder}{os.sep}", f"{path}: ")) from None
    embedding = weights.get("decoder.embedding.weight")
    if embedding is None or embedding.dim() != 2:
        raise UsageError(
            f"{path} lacks the embedding of a prediction network: it is not a complete Parakeet-TDT"
            " model"
        )
    config["vocabulary"] = size = len(embedding) - 1
    check_config(config, path)
    for key in ("labels", "joint.vocabulary"):
        labels = _value(content, key)
        if isinstance(labels, list) and len(labels) != size:
            raise UsageError(
                f"{path}: {key} has {len(labels)} entries, but its weights are for {size}"
            )
    _require(
        content, {key: (size, -1, ...) for key in ("decoder.vocab_size", "joint.num_classes")}, path
    )
    return (
        weights,
        config,
        {"tokenizer": state, "source": {"yaml": members[YAML].decode()}, "loss": loss},
    )


def _sentencepiece(content: dict, members: dict[str, bytes], path: Path) -> dict[str, str]:
    """The tokenizer's state. Old archives do not refer to its file."""
    reference = str(_value(content, "tokenizer.model_path", ""))[:200].removeprefix("nemo:")
    models = [name for name in members if name != YAML]
    name = reference if reference in models else models[0] if len(models) == 1 else None
    if name is None:
        raise UsageError(
            f"{path} lacks the SentencePiece model {reference[:60]!r}, to which its {YAML} refers"
        )
    return {"sentencepiece": members[name].hex()}


# --- exporting ------------------------------------------------------------------------------------


def export(
    folder: str | Path, form: str, weights: dict[str, torch.Tensor], config: dict, extras: dict
) -> list[str]:
    """Writes a folder that `transformers` can load (`form` "hf") or that holds NVIDIA's model.nemo
    ("nemo"), in fp32, and returns the file names. Settings of the fine-tuned model are kept.
    Replaces an empty folder or an earlier export that nobody has changed, and refuses any other.
    Raises `UsageError` and `RunError`.

    `weights`: by Hugging Face's names. `extras`: as `read_model` returns them; `source` may be
    empty."""
    folder = Path(folder)
    check_config(config, "the model to be exported")
    model_files.check_shapes(
        weights, expected_shapes(config), "the model to be exported", "Parakeet-TDT"
    )
    pieces = tokenizer.pieces(extras["tokenizer"])
    if len(pieces) != config["vocabulary"]:
        raise UsageError(
            f"the tokenizer has {len(pieces)} pieces and the model {config['vocabulary']}"
        )
    model_files.require_export(folder)
    kinds = {
        name: torch.float32 if w.is_floating_point() else w.dtype for name, w in weights.items()
    }
    tensors = {name: w.detach().to("cpu", kinds[name]).contiguous() for name, w in weights.items()}
    checkpoint.check_tensors(tensors, "the model to be exported")
    if form == "nemo":
        model, settings = (
            tokenizer.sentencepiece_model(extras["tokenizer"]),
            nemo_settings(config, pieces, extras),
        )
        return model_files.write_export(
            folder, lambda aside: _write_nemo(aside, tensors, settings, model)
        )
    texts = {
        name: json.dumps(c, indent=1) + "\n"
        for name, c in hf_settings(config, pieces, extras).items()
    }
    texts |= tokenizer.hf_files(extras["tokenizer"])
    if config["ctc"]:
        print("no CTC head in the export: Hugging Face's form of Parakeet-TDT has none")
        tensors = {name: w for name, w in tensors.items() if not name.startswith("ctc_head.")}

    def fill(aside: Path) -> None:
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")
        if model := extras["tokenizer"].get("sentencepiece"):
            (aside / "tokenizer.model").write_bytes(bytes.fromhex(model))
        model_files.save_tensors(tensors, aside)

    return model_files.write_export(folder, fill)


def _merge(content: dict, changes: dict) -> dict:
    """`content` with the values of `changes` in nested dicts; keys that `changes` does not name are
    kept."""
    merged = dict(content)
    for name, value in changes.items():
        inner = merged.get(name)
        merged[name] = (
            _merge(inner if isinstance(inner, dict) else {}, value)
            if isinstance(value, dict)
            else value
        )
    return merged


def _nest(values: dict) -> dict:
    """Nested dicts of values by keys with dots."""
    nested = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        nested = _merge(nested, value)
    return nested


def hf_settings(config: dict, pieces: list[str], extras: dict) -> dict[str, dict]:
    """config.json, generation_config.json and processor_config.json. Raises `UsageError` if Hugging
    Face's model cannot have that shape."""
    width, factor = config["prediction_width"], config["subsampling"]
    if config["joint_width"] != width or config["num_mel_bins"] % factor:
        sizes = (
            f"joint_width is {config['joint_width']} and num_mel_bins is {config['num_mel_bins']}"
        )
        must = f"they must be prediction_width ({width}) and a multiple of {factor} there"
        raise UsageError(f"no export to Hugging Face's form: {sizes}; {must}")
    source, blank = extras["source"], config["vocabulary"]
    pad = pieces.index("<pad>") if "<pad>" in pieces else blank  # labels end at the padding
    defaults = {
        "activation_dropout": 0.1,
        "attention_dropout": 0.1,
        "dropout": 0.1,
        "dropout_positions": 0.0,
    }
    known = {key: config[name] for name, (key, _) in HF.items()} | {
        key: values[0] for key, values in HF_FIXED.items()
    }
    description = _nest(
        known
        | {
            "architectures": ["ParakeetForTDT"],
            "model_type": "parakeet_tdt",
            "exported_by": model_files.EXPORTED,
            "dtype": "float32",
            "is_encoder_decoder": True,
            "vocab_size": blank + 1,
            "blank_token_id": blank,
            "pad_token_id": pad,
            "encoder_config.model_type": "parakeet_encoder",
            "encoder_config.layerdrop": 0.0,
            "encoder_config.convolution_bias": config["biases"],
            "encoder_config.num_key_value_heads": config["heads"],
        }
    )
    kept = {
        n: v
        for n, v in source.get("config", {}).items()
        if n not in ("auto_map", "torch_dtype", "_name_or_path")
    }
    before = {
        n: v for n, v in (source.get("generation") or {}).items() if n != "_from_model_config"
    }
    generation = {
        "decoder_start_token_id": blank,
        "pad_token_id": pad,
        "suppress_tokens": [blank + 1 + i for i in range(len(config["durations"]))],
    }
    processor = {
        "blank_token": "<blank>",
        "decoder_type": "tdt",
        "processor_class": "ParakeetProcessor",
        "feature_extractor": {
            **FEATURES,
            "feature_extractor_type": "ParakeetFeatureExtractor",
            "feature_size": config["num_mel_bins"],
            "padding_side": "right",
            "return_attention_mask": True,
        },
    }
    return {
        "config.json": _merge(_merge({"encoder_config": defaults}, kept), description),
        "generation_config.json": {**before, **generation},
        "processor_config.json": _merge(
            source.get("processor", {}).get("processor_config.json", {}), processor
        ),
    }


def nemo_settings(config: dict, pieces: list[str], extras: dict) -> dict:
    """model_config.yaml without the tokenizer's files: the source's with what this model changes,
    or a complete one. Raises `UsageError` if NeMo's model cannot have that shape."""
    factor, rest = divmod(config["ffn"], config["d_model"])
    if rest:
        raise UsageError(
            f"no export to a .nemo: ffn is {config['ffn']} and must be a multiple of d_model there"
        )
    size, durations, loss = config["vocabulary"], config["durations"], extras["loss"]
    # Copies of the lists, because yaml writes a list that it has met as a reference.
    changes = {key: config[name] for name, (key, _) in NEMO.items()} | {
        "preprocessor.features": config["num_mel_bins"],
        "encoder.ff_expansion_factor": factor,
        "labels": [*pieces],
        "decoder.vocab_size": size,
        "joint.num_classes": size,
        "joint.vocabulary": [*pieces],
        "joint.num_extra_outputs": len(durations),
        "joint.jointnet.encoder_hidden": config["d_model"],
        "joint.jointnet.pred_hidden": config["prediction_width"],
        "decoding.durations": [*durations],
        "model_defaults.enc_hidden": config["d_model"],
        "model_defaults.pred_hidden": config["prediction_width"],
        "model_defaults.joint_hidden": config["joint_width"],
        "loss.tdt_kwargs.sigma": loss["sigma"],
        "loss.tdt_kwargs.omega": loss["omega"],
        "rnnt_reduction": loss["reduction"],
    }
    if config["ctc"]:
        changes |= {
            "aux_ctc.decoder.feat_in": config["d_model"],
            "aux_ctc.decoder.num_classes": size,
            "aux_ctc.decoder.vocabulary": [*pieces],
        }
    source = extras["source"].get("yaml")
    content = _load_yaml(source, Path("the model's source")) if source else _complete_settings()
    if not source or config["ctc"] != isinstance(content.get("aux_ctc"), dict):
        content.pop("aux_ctc", None)
        changes["target"] = "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel"
        if config["ctc"]:
            changes |= {
                "target": (
                    "nemo.collections.asr.models.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel"
                ),
                "aux_ctc.decoder._target_": NEMO_FIXED["aux_ctc.decoder._target_"][0],
                "aux_ctc.use_cer": False,
                "aux_ctc.ctc_loss_weight": 0.3,
                "aux_ctc.ctc_reduction": "mean_batch",
                "aux_ctc.decoding.strategy": "greedy",
            }
    return _merge(content, _nest(changes))


def _complete_settings() -> dict:
    """What NeMo's model needs besides its shape. Dropout and SpecAugment are those of NVIDIA's
    training."""
    needed = (
        "preprocessor.",
        "encoder.subsampling",
        "encoder.self_attention_model",
        "encoder.att_context_size",
        "encoder.untie_biases",
        "encoder.conv_norm_type",
        "encoder._target_",
        "decoder.",
        "joint.",
        "loss.",
    )
    fixed = {key: values[0] for key, values in NEMO_FIXED.items() if key.startswith(needed)}
    fixed = {
        key: value for key, value in fixed.items() if "n_window" not in key
    }  # the same in seconds
    return _nest(
        fixed
        | {
            "sample_rate": SAMPLE_RATE,
            "preprocessor.dither": 1e-05,
            "preprocessor.pad_to": 0,
            "encoder.dropout": 0.1,
            "encoder.dropout_pre_encoder": 0.1,
            "encoder.dropout_emb": 0.0,
            "encoder.dropout_att": 0.1,
            "encoder.feat_out": -1,
            "encoder.pos_emb_max_len": 5000,
            "decoder.prednet.dropout": 0.2,
            "decoder.prednet.t_max": None,
            "joint.jointnet.dropout": 0.2,
            "joint.log_softmax": None,
            "joint.preserve_memory": False,
            "joint.fuse_loss_wer": True,
            "joint.fused_batch_size": 4,
            "decoding.strategy": "greedy_batch",
            "decoding.model_type": "tdt",
            "tokenizer.dir": "",
            "tokenizer.type": "bpe",
            "loss.tdt_kwargs.fastemit_lambda": 0.0,
            "loss.tdt_kwargs.clamp": -1.0,
            "spec_augment._target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
            "spec_augment.freq_masks": 2,
            "spec_augment.freq_width": 27,
            "spec_augment.time_masks": 10,
            "spec_augment.time_width": 0.05,
        }
    )


def _write_nemo(
    folder: Path, tensors: dict[str, torch.Tensor], settings: dict, model: bytes
) -> None:
    """Writes model.nemo, a plain tar. The weights are written straight into it, so that they need
    no second place."""
    names = hf_to_nemo(tensors)
    if not _value(settings, "joint.jointnet.dropout", 0):
        names = {name.replace(HEADS[1], HEADS[0]): tensor for name, tensor in names.items()}
    features = MelFeatures(settings["preprocessor"]["features"])
    names |= {
        f"{FEATURIZER}window": features.window,
        f"{FEATURIZER}fb": features.filters.T[None].contiguous(),
    }
    pieces = settings["labels"]
    others = {
        "model_path": ("tokenizer.model", model),
        "vocab_path": ("vocab.txt", "\n".join([*pieces, ""]).encode()),
        "spe_tokenizer_vocab": (
            "tokenizer.vocab",
            "".join(f"{piece}\t0\n" for piece in pieces).encode(),
        ),
    }
    members = {
        key: (f"{hashlib.md5(raw).hexdigest()}_{name}", raw) for key, (name, raw) in others.items()
    }
    references = {key: f"nemo:{name}" for key, (name, _) in members.items()}
    content = _merge(settings, {"tokenizer": references})
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)
    with open(folder / "model.nemo", "wb") as file:

        def add(name: str, write) -> None:
            start = file.tell()
            file.write(bytes(tarfile.BLOCKSIZE))
            write(file)
            header = tarfile.TarInfo(f"./{name}")
            header.size = file.tell() - start - tarfile.BLOCKSIZE
            file.write(bytes(-header.size % tarfile.BLOCKSIZE))
            end = file.tell()
            file.seek(start)
            file.write(header.tobuf(tarfile.GNU_FORMAT))
            file.seek(end)

        add(YAML, lambda file: file.write(text.encode()))
        for name, raw in members.values():
            add(name, lambda file, raw=raw: file.write(raw))
        add(CKPT, lambda file: torch.save(names, file))
        file.write(bytes(2 * tarfile.BLOCKSIZE))
