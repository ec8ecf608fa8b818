"""Whisper's weights on disk: reads Hugging Face folders and OpenAI's `.pt`, converts between them, and exports."""

import errno
import json
import math
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import checkpoint, files
from common.errors import UsageError, cannot_write, first_line
from speech.audio import SAMPLE_RATE
from speech.folders import require_replaceable, write_folder
from speech.whisper.model import FRAME, HOP, N_FFT

FFN = 4  # width of the feed-forward layers in units of d_model, in every released model
EXPORTED = "speech-recipes"  # in made_from.json and config.json of an export
POINTER = b"version https://git-lfs"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Names in Hugging Face's config.json to those in OpenAI's `dims`, which imply feed-forward layers of FFN * d_model.
DIMS = {
    "num_mel_bins": "n_mels", "max_source_positions": "n_audio_ctx", "d_model": "n_audio_state",
    "encoder_attention_heads": "n_audio_head", "encoder_layers": "n_audio_layer", "vocab_size": "n_vocab",
    "max_target_positions": "n_text_ctx", "decoder_attention_heads": "n_text_head", "decoder_layers": "n_text_layer",
}  # fmt: skip
# A schema for `checkpoint.mismatch`. The largest released model has 32 + 32 layers of 1280; damaged files ask for billions.
CONFIG = {
    "num_mel_bins": range(1, 513), "max_source_positions": range(1, 1 << 16), "d_model": range(4, 8193, 2),
    "vocab_size": range(1, 200_001), "max_target_positions": range(8, 1 << 16),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), range(1, 129)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), range(1, 129)),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), range(1, (1 << 16) + 1)),
}  # fmt: skip
IN_LAYERS = {  # tensors inside a layer: Hugging Face's name to OpenAI's
    "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln", "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0",
    "fc2": "mlp.2", "final_layer_norm": "mlp_ln",
}  # fmt: skip
OUTSIDE = {  # the other tensors
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias", "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}  # fmt: skip
IN_LAYERS_BACK = {openai: hf for hf, openai in IN_LAYERS.items()}
OUTSIDE_BACK = {openai: hf for hf, openai in OUTSIDE.items()}


def shape(
    d_model: int, layers: tuple[int, int], heads: int, mels: int = 80, vocabulary: int = 51_865
) -> dict[str, int]:
    """A configuration with the proportions of the released models. `layers`: the encoder's and the decoder's."""
    return {
        "num_mel_bins": mels, "max_source_positions": 1500, "d_model": d_model, "encoder_attention_heads": heads,
        "encoder_layers": layers[0], "vocab_size": vocabulary, "max_target_positions": 448,
        "decoder_attention_heads": heads, "decoder_layers": layers[1], "encoder_ffn_dim": FFN * d_model,
        "decoder_ffn_dim": FFN * d_model,
    }  # fmt: skip


SIZES = {  # of the released multilingual models
    "tiny": shape(384, (4, 4), 6),
    "base": shape(512, (6, 6), 8),
    "small": shape(768, (12, 12), 12),
    "medium": shape(1024, (24, 24), 16),
    "large-v2": shape(1280, (32, 32), 20),
    "large-v3": shape(1280, (32, 32), 20, 128, 51_866),
    "turbo": shape(1280, (32, 4), 20, 128, 51_866),
}


def expected_shapes(config: dict[str, int], ctc_tokens: int = 0) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its Hugging Face name without `model.`. `ctc_tokens` as in `Whisper`."""
    d = config["d_model"]
    shapes = {}

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (d,)

    for i, channels in ((1, config["num_mel_bins"]), (2, d)):
        shapes[f"encoder.conv{i}.weight"] = (d, channels, 3)
        shapes[f"encoder.conv{i}.bias"] = (d,)
    shapes["encoder.embed_positions.weight"] = (config["max_source_positions"], d)
    shapes["decoder.embed_tokens.weight"] = (config["vocab_size"], d)
    shapes["decoder.embed_positions.weight"] = (config["max_target_positions"], d)
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for i in range(config[f"{side}_layers"]):
            layer = f"{side}.layers.{i}"
            for attention in attentions:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    linear(f"{layer}.{attention}.{projection}", d, d, bias=projection != "k_proj")
                norm(f"{layer}.{attention}_layer_norm")
            linear(f"{layer}.fc1", config[f"{side}_ffn_dim"], d)
            linear(f"{layer}.fc2", d, config[f"{side}_ffn_dim"])
            norm(f"{layer}.final_layer_norm")
        norm(f"{side}.layer_norm")
    if ctc_tokens:
        linear("ctc_head", ctc_tokens + 1, d)
    return shapes


# --- between the two forms -------------------------------------------------------------------------------------------


def _rename(name: str, outside: dict[str, str], layers: tuple[str, str], in_layers: dict[str, str]) -> str:
    if name in outside:
        return outside[name]
    match = re.fullmatch(rf"(encoder|decoder)\.{layers[0]}\.(\d+)\.(.+)\.(weight|bias)", name)
    if not match or match[3] not in in_layers:
        return name
    return f"{match[1]}.{layers[1]}.{match[2]}.{in_layers[match[3]]}.{match[4]}"


def hf_to_openai(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors to OpenAI's names. Names without a counterpart are kept."""
    return {_rename(name, OUTSIDE, ("layers", "blocks"), IN_LAYERS): tensor for name, tensor in state.items()}


def openai_to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors to Hugging Face's names without `model.`."""
    return {_rename(name, OUTSIDE_BACK, ("blocks", "layers"), IN_LAYERS_BACK): tensor for name, tensor in state.items()}


def config_to_dims(config: dict[str, int]) -> dict[str, int]:
    """OpenAI's `dims`. Raises `UsageError` if OpenAI's model cannot have that shape."""
    widths = {config["encoder_ffn_dim"], config["decoder_ffn_dim"]}
    if widths != {FFN * config["d_model"]}:
        raise UsageError(f"OpenAI's form of Whisper has feed-forward layers of {FFN} x d_model only")
    return {**{openai: config[hf] for hf, openai in DIMS.items()}, "n_text_state": config["d_model"]}


def dims_to_config(dims: dict[str, int]) -> dict[str, int]:
    """The configuration of OpenAI's `dims`, to be checked. Raises `KeyError`, `TypeError` and `ValueError`."""
    if type(dims["n_text_state"]) is not int or dims["n_text_state"] != dims["n_audio_state"]:
        raise ValueError("encoder and decoder differ in width")
    config = {hf: dims[openai] for hf, openai in DIMS.items()}
    return {**config, **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), FFN * dims["n_text_state"])}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_model(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, int], dict]:
    """Weights (fp32, CPU, by Hugging Face's names without `model.`), configuration and extras of a Hugging Face folder
    or of OpenAI's `.pt`. Extras: `generation` (generation_config.json, or empty), `tokenizer` (the folder for
    `tokenizer.read`). Code in the files is never run. Raises `UsageError`."""
    path = Path(path)
    generation = {}
    if os.path.isdir(path):
        config = read_config(path)
        if (path / "generation_config.json").is_file():
            generation = _read_json(path / "generation_config.json")
        weights = {}
        for file in _weight_files(path):
            weights |= _floats(_read_tensors(file), file)
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    else:
        content = _read_pickle(path)
        if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= set(content):
            keys = list(map(str, content))[:5] if isinstance(content, dict) else type(content).__name__
            raise UsageError(
                f"{path} is not OpenAI's form of Whisper, which has dims and model_state_dict (it has {str(keys)[:200]}); "
                "for a Hugging Face model give its folder"
            )
        try:
            config = dims_to_config(content["dims"])
        except (KeyError, ValueError, TypeError):
            raise UsageError(f"{path}: its dims are not Whisper's") from None
        check_config(config, path)
        weights = openai_to_hf(_floats(content["model_state_dict"], path))
    output, embedding = weights.pop("proj_out.weight", None), weights.get("decoder.embed_tokens.weight")
    if output is not None and (embedding is None or not torch.equal(output, embedding)):
        raise UsageError(f"{path}: its output layer is not its embedding; Whisper has one matrix for both")
    check(weights, config, path)
    return weights, config, {"generation": generation, "tokenizer": path if path.is_dir() else path.parent}


def check(weights: dict[str, torch.Tensor], config: dict[str, int], path: str | Path, ctc_tokens: int = 0) -> None:
    """Raises `UsageError` if tensors are missing, unexpected or of another shape. Nothing may be built before: the file's
    tensors bound the memory that its configuration asks for."""
    expected = expected_shapes(config, ctc_tokens)
    missing = [name for name in expected if name not in weights]
    unexpected = [name for name in weights if name not in expected]
    wrong = [name for name in expected if name in weights and tuple(weights[name].shape) != expected[name]]
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"{path}: {name} is {tuple(weights[name].shape)}, but its configuration asks for {expected[name]} "
            f"({len(wrong)} such tensors): weights and configuration belong to different models"
        )
    for problem, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            shown = ", ".join(repr(name[:60]) for name in names[:3])
            raise UsageError(f"{path} {problem} {shown}{more}: it is not a complete, unchanged Whisper model")


def refuse_pointer(file: Path) -> None:
    """Raises `UsageError` for a Git LFS pointer, which a clone without Git LFS has in place of a large file, and for anything
    but a regular file."""
    try:
        with open(files.require_file(file), "rb") as opened:
            is_pointer = opened.read(len(POINTER)) == POINTER
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if is_pointer:
        raise UsageError(f"{file} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")


def _read_json(file: Path) -> dict:
    refuse_pointer(file)
    return files.read_json(file)


def read_config(folder: Path) -> dict[str, int]:
    """The configuration of a Hugging Face folder. Raises `UsageError`."""
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    content = _read_json(file)
    if content.get("model_type") != "whisper":
        kind = str(content.get("model_type"))[:40]
        raise UsageError(f"{file} describes a model of type {kind!r}; this recipe takes whisper")
    if content.get("activation_function", "gelu") != "gelu" or content.get("scale_embedding"):
        raise UsageError(f"{file} asks for another activation or for scaled embeddings, which no released Whisper has")
    check_config(content, file)
    return {name: content[name] for name in CONFIG}


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no Whisper can have."""
    if reason := checkpoint.mismatch(config, CONFIG, "its configuration"):
        raise UsageError(f"{path}: {reason}, which is out of range for Whisper")
    for side in ("encoder", "decoder"):
        if config["d_model"] % config[f"{side}_attention_heads"]:
            raise UsageError(f"{path}: {side}_attention_heads does not divide d_model")


def _weight_files(folder: Path) -> list[Path]:
    """A Hugging Face folder's weights, safetensors preferred."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".h5", ".msgpack", ".onnx", ".gguf"))
    only = f" (only {', '.join(others)})" if others else ""
    raise UsageError(
        f"{folder} holds no weights that can be read{only}: it needs model.safetensors or pytorch_model.bin"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UsageError(f"{index} lists no files of that folder")
    shards = [index.parent / name for name in dict.fromkeys(sorted(names))]
    for shard in shards:
        if not os.path.isfile(shard):
            raise UsageError(f"{index.parent} lacks {shard.name[:60]!r}, which {index.name} lists: fetch it, too")
    return shards


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        return _read_pickle(file)
    refuse_pointer(file)
    try:
        with files.utf8(file) as name, safe_open(name, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  safe_open is not a dict
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} is damaged or cut short ({first_line(error)}): fetch it again") from None


def _read_pickle(file: Path):
    refuse_pointer(file)
    if file.suffix == ".safetensors":
        raise UsageError(f"{file}: give the folder that holds it and config.json, not the file")
    return checkpoint.load(file, mmap=True)  # mapped, so that converting to fp32 does not hold the model twice


def _floats(weights, path: Path) -> dict[str, torch.Tensor]:
    """fp32 copies; each tensor is released before the next is copied. Raises `UsageError` for anything but dense, finite
    tensors by name."""
    if not isinstance(weights, dict):
        raise UsageError(f"{path} holds a {type(weights).__name__}, not weights by name")
    for name, w in weights.items():
        if not isinstance(w, torch.Tensor) or w.dtype not in FLOATS or w.is_meta or w.is_nested:
            raise UsageError(
                f"{path}: {str(name)[:60]!r} is not a floating-point tensor; quantised weights cannot be read"
            )
    checkpoint.check_tensors(weights, path)
    wide = [name for name, w in weights.items() if w.dtype == torch.float64]
    floats = {name: weights.pop(name).to(torch.float32, copy=True).contiguous() for name in list(weights)}
    checkpoint.check_tensors({name: floats[name] for name in wide}, path)  # fp32 may be too narrow
    return floats


# --- exporting -------------------------------------------------------------------------------------------------------


def export(
    folder: str | Path, weights: dict[str, torch.Tensor], config: dict[str, int], tokenizer, base: dict | None = None
) -> list[str]:
    """Writes a folder that `transformers` can load, in fp32, with OpenAI's form of the weights (`model.pt`), and
    returns the file names. `model.pt` is left out if OpenAI's model cannot have the shape.

    `weights`: by Hugging Face's names without `model.`; `ctc_head.*` is left out. `tokenizer`: a `WhisperTokenizer`,
    whose prompt becomes the default of `generate`. `base`: the generation config of the model that was fine-tuned.
    Replaces an earlier export that nobody has changed or an empty folder, and refuses any other. Raises `UsageError` and
    `RunError`."""
    folder = Path(folder)
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("ctc_head.")}
    check(weights, config, "the model to be exported")
    if tokenizer.size > config["vocab_size"]:
        raise UsageError(f"the tokenizer has {tokenizer.size} tokens and the model {config['vocab_size']}")
    features = feature_settings(config)
    generation = generation_settings(config, tokenizer, base)
    tensors = {n: t.detach().to("cpu", torch.float32, copy=True).contiguous() for n, t in weights.items()}
    checkpoint.check_tensors(tensors, "the model to be exported")

    def fill(temporary: Path) -> None:
        _write_settings(temporary, config, features, generation)
        tokenizer.save(temporary)
        _write_weights(temporary, tensors, config)

    require_export(folder)
    try:
        write_folder(folder, fill, {"exported_by": EXPORTED})
    except (SafetensorError, RuntimeError) as error:  # both libraries wrap the operating system's errors
        raise cannot_write(folder, OSError(0, first_line(error)), "--export") from None
    except OSError as error:
        raise cannot_write(folder, error, "--export") from None
    return sorted(path.name for path in folder.iterdir())


def require_export(folder: str | Path) -> None:
    """Raises `UsageError` if `folder` holds anything but an earlier export, `RunError` if it cannot be written."""
    folder = Path(folder).absolute()
    try:
        require_replaceable(folder)
        parent = next(parent for parent in folder.parents if parent.exists())
        if not os.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not parent.is_dir():
            raise NotADirectoryError
    except UsageError as error:
        raise UsageError(f"--export {error}") from None
    except RuntimeError as error:  # links in a circle
        raise cannot_write(folder, OSError(errno.ELOOP, first_line(error)), "--export") from None
    except OSError as error:
        raise cannot_write(folder, error, "--export") from None


def feature_settings(config: dict[str, int]) -> dict:
    """`preprocessor_config.json`. Raises `UsageError` if the encoder's window is not a whole number of seconds, which
    `WhisperFeatureExtractor` requires."""
    samples = config["max_source_positions"] * FRAME
    if samples % SAMPLE_RATE:
        step = SAMPLE_RATE // math.gcd(SAMPLE_RATE, FRAME)
        raise UsageError(
            f"a model of {config['max_source_positions']} encoder positions cannot be exported: transformers needs "
            f"whole seconds, multiples of {step}"
        )
    return {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"], "sampling_rate": SAMPLE_RATE, "n_fft": N_FFT, "hop_length": HOP,
        "chunk_length": samples // SAMPLE_RATE, "n_samples": samples, "nb_max_frames": samples // HOP, "dither": 0.0,
        "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
    }  # fmt: skip


def generation_settings(config: dict[str, int], tokenizer, base: dict | None) -> dict:
    """`generation_config.json`: `base`, overridden by this tokenizer's prompt. If the model's vocabulary is padded, ids
    beyond the tokenizer are suppressed: `transformers` takes them for timestamps, and generation may never end."""
    dropped = ("_from_model_config", "transformers_version", "forced_decoder_ids", "language", "task")
    kept = {name: value for name, value in (base or {}).items() if name not in dropped}
    settings = {"suppress_tokens": [], "begin_suppress_tokens": [], "max_initial_timestamp_index": 50, **kept}
    settings |= {
        "decoder_start_token_id": tokenizer.start, "bos_token_id": tokenizer.eos, "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.eos, "max_length": config["max_target_positions"], "return_timestamps": False,
        "is_multilingual": tokenizer.multilingual,
    }  # fmt: skip
    if tokenizer.no_timestamps is not None:
        settings["no_timestamps_token_id"] = tokenizer.no_timestamps
    if "<|startofprev|>" in tokenizer.specials:
        settings["prev_sot_token_id"] = tokenizer.specials["<|startofprev|>"]
    if tokenizer.multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": tokenizer.specials[f"<|{code}|>"] for code in tokenizer.languages}
        settings["task_to_id"] = {task: tokenizer.specials[f"<|{task}|>"] for task in ("transcribe", "translate")}
        # The token, because `transformers` understands bare codes only for OpenAI's languages.
        settings |= {"language": f"<|{tokenizer.language}|>", "task": tokenizer.task}
    padding = range(tokenizer.size, config["vocab_size"])
    settings["suppress_tokens"] = sorted({*(settings["suppress_tokens"] or ()), *padding})
    return settings


def _write_settings(folder: Path, config: dict, features: dict, generation: dict) -> None:
    ids = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    description = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "exported_by": EXPORTED,
        **config, "num_hidden_layers": config["encoder_layers"], "is_encoder_decoder": True,
        "activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True, "use_cache": True,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "torch_dtype": "float32",
        **{name: generation[name] for name in ids},
        # Older versions of transformers read these here; their defaults would forbid two tokens at the start.
        "suppress_tokens": generation["suppress_tokens"], "forced_decoder_ids": None,
        "begin_suppress_tokens": generation["begin_suppress_tokens"],
    }  # fmt: skip
    contents = {"config.json": description, "generation_config.json": generation, "preprocessor_config.json": features}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    with files.utf8(folder / "model.safetensors") as name:
        save_file({f"model.{n}": t for n, t in tensors.items()}, name, metadata={"format": "pt"})
    # safetensors makes files that only their owner can read
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o666)
    try:
        dims = config_to_dims(config)
    except UsageError as reason:
        print(f"no model.pt in the export: {reason}")
        return
    torch.save({"dims": dims, "model_state_dict": hf_to_openai(tensors)}, folder / "model.pt")
