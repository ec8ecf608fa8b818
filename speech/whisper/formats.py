"""Whisper's weights on disk: Hugging Face folders and OpenAI's `.pt`, read, converted into each other, and exported."""

import json
import math
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import UsageError, cannot_write

SAMPLE_RATE, N_FFT, HOP = 16_000, 400, 160  # Hz, samples, samples
FRAMES_PER_POSITION = 2  # the second convolution's stride
FFN = 4  # width of the feed-forward layers in units of d_model, in every released model
EXPORTED = "speech-recipes"  # marks folders that `export` may replace
POINTER = b"version https://git-lfs"

# Hugging Face's name in config.json to OpenAI's in `dims`. Both widths are one in Hugging Face's, ffn is FFN * width.
DIMS = {
    "num_mel_bins": "n_mels", "max_source_positions": "n_audio_ctx", "d_model": "n_audio_state",
    "encoder_attention_heads": "n_audio_head", "encoder_layers": "n_audio_layer", "vocab_size": "n_vocab",
    "max_target_positions": "n_text_ctx", "decoder_attention_heads": "n_text_head", "decoder_layers": "n_text_layer",
}  # fmt: skip
CONFIG = (*DIMS, "encoder_ffn_dim", "decoder_ffn_dim")
MODULES = {  # Hugging Face to OpenAI, inside a layer
    "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln", "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0",
    "fc2": "mlp.2", "final_layer_norm": "mlp_ln",
}  # fmt: skip
OUTSIDE = {  # and outside the layers
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight", "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias", "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}  # fmt: skip
MODULES_BACK = {theirs: ours for ours, theirs in MODULES.items()}
OUTSIDE_BACK = {theirs: ours for ours, theirs in OUTSIDE.items()}


def shape(
    d_model: int, layers: tuple[int, int], heads: int, mels: int = 80, vocabulary: int = 51_865
) -> dict[str, int]:
    """A configuration with the proportions of the released models; `layers`: of the encoder and of the decoder."""
    return {
        "num_mel_bins": mels, "max_source_positions": 1500, "d_model": d_model, "encoder_attention_heads": heads,
        "encoder_layers": layers[0], "vocab_size": vocabulary, "max_target_positions": 448,
        "decoder_attention_heads": heads, "decoder_layers": layers[1], "encoder_ffn_dim": FFN * d_model,
        "decoder_ffn_dim": FFN * d_model,
    }  # fmt: skip


SIZES = {  # the released multilingual models
    "tiny": shape(384, (4, 4), 6),
    "base": shape(512, (6, 6), 8),
    "small": shape(768, (12, 12), 12),
    "medium": shape(1024, (24, 24), 16),
    "large-v2": shape(1280, (32, 32), 20),
    "large-v3": shape(1280, (32, 32), 20, 128, 51_866),
    "turbo": shape(1280, (32, 4), 20, 128, 51_866),
}


def expected_shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model of this configuration, by its Hugging Face name without `model.`."""
    d, shapes = config["d_model"], {}

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (d,)

    for i, channels in ((1, config["num_mel_bins"]), (2, d)):
        shapes[f"encoder.conv{i}.weight"], shapes[f"encoder.conv{i}.bias"] = (d, channels, 3), (d,)
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
    return shapes


# --- between the two forms -------------------------------------------------------------------------------------------


def _rename(name: str, outside: dict[str, str], layers: tuple[str, str], modules: dict[str, str]) -> str:
    if name in outside:
        return outside[name]
    found = re.fullmatch(rf"(encoder|decoder)\.{layers[0]}\.(\d+)\.(.+)\.(weight|bias)", name)
    if not found or found[3] not in modules:
        return name
    return f"{found[1]}.{layers[1]}.{found[2]}.{modules[found[3]]}.{found[4]}"


def hf_to_openai(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by OpenAI's names. Names without a counterpart stay as they are."""
    return {_rename(name, OUTSIDE, ("layers", "blocks"), MODULES): tensor for name, tensor in state.items()}


def openai_to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by Hugging Face's names without `model.`."""
    return {_rename(name, OUTSIDE_BACK, ("blocks", "layers"), MODULES_BACK): tensor for name, tensor in state.items()}


def config_to_dims(config: dict[str, int]) -> dict[str, int]:
    """OpenAI's `dims`. Raises `UsageError` where OpenAI's model cannot have that shape."""
    widths = {config["encoder_ffn_dim"], config["decoder_ffn_dim"]}
    if widths != {FFN * config["d_model"]}:
        raise UsageError(f"OpenAI's form of Whisper has feed-forward layers of {FFN} x d_model only")
    return {**{theirs: config[ours] for ours, theirs in DIMS.items()}, "n_text_state": config["d_model"]}


def dims_to_config(dims: dict[str, int]) -> dict[str, int]:
    """The configuration of OpenAI's `dims`. Raises `KeyError` and `ValueError` for anything else."""
    if dims["n_text_state"] != dims["n_audio_state"]:
        raise ValueError("encoder and decoder of different width")
    config = {ours: int(dims[theirs]) for ours, theirs in DIMS.items()}
    return {**config, **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), FFN * config["d_model"])}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_model(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, int], dict]:
    """Weights (fp32, CPU, by Hugging Face's names without `model.`), configuration and extras of a Hugging Face folder
    or of OpenAI's `.pt`. Extras: `generation` (generation_config.json, or empty), `tokenizer` (where
    `whisper_text.read` may look: the folder). Nothing in the files is run. Raises `UsageError`."""
    path = Path(path)
    if path.is_dir():
        config, generation = read_config(path), {}
        if (path / "generation_config.json").is_file():
            generation = _read_json(path / "generation_config.json")
        weights = _join(_read_tensors(file) for file in _weight_files(path))
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    else:
        content = _read_pickle(path)
        if not {"dims", "model_state_dict"} <= set(content):
            keys = ", ".join(list(map(str, content))[:5])
            raise UsageError(
                f"{path} is not OpenAI's form of Whisper, which holds dims and model_state_dict (it holds: {keys}); "
                "a Hugging Face model is given by its folder"
            )
        try:
            config, generation = _checked(dims_to_config(content["dims"]), path), {}
            weights = openai_to_hf(content["model_state_dict"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: its dims are not Whisper's ({type(error).__name__}: {error})") from None
    weights = _floats(weights, path)
    tied, embedding = weights.pop("proj_out.weight", None), weights.get("decoder.embed_tokens.weight")
    if tied is not None and (embedding is None or tied.shape != embedding.shape or not torch.equal(tied, embedding)):
        raise UsageError(f"{path}: its output layer is not its embedding; Whisper's are one, and so are this project's")
    check(weights, config, path)
    return weights, config, {"generation": generation, "tokenizer": path if path.is_dir() else path.parent}


def check(weights: dict[str, torch.Tensor], config: dict[str, int], path: str | Path) -> None:
    """Raises `UsageError` where tensors are missing, unexpected or of another shape."""
    expected = expected_shapes(config)
    missing, extra = [n for n in expected if n not in weights], [n for n in weights if n not in expected]
    wrong = [n for n in expected if n in weights and tuple(weights[n].shape) != expected[n]]
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"{path}: {name} is {tuple(weights[name].shape)} and its configuration asks for {expected[name]} "
            f"({len(wrong)} such tensors): weights and configuration are of different models"
        )
    for what, names in (("lacks", missing), ("has unexpected", extra)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UsageError(f"{path} {what} {', '.join(names[:3])}{more}: it is no whole, unchanged Whisper model")


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        _refuse_pointer(file)
        raise UsageError(f"{file} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no JSON object")
    return content


def _refuse_pointer(file: Path) -> None:
    with open(file, "rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            raise UsageError(f"{file} is a pointer of Git LFS, not the file: fetch it with `git lfs pull`")


def read_config(folder: Path) -> dict[str, int]:
    """The configuration of a Hugging Face folder. Raises `UsageError`."""
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"{folder} holds no config.json: it is no Hugging Face model folder")
    content = _read_json(file)
    if content.get("model_type") != "whisper":
        raise UsageError(f"{file} describes a model of type {content.get('model_type')}; this recipe takes whisper")
    if content.get("activation_function", "gelu") != "gelu" or content.get("scale_embedding"):
        raise UsageError(f"{file} asks for another activation or for scaled embeddings, which no released Whisper has")
    return _checked(content, file)


def _checked(content: dict, file: Path) -> dict[str, int]:
    for name in CONFIG:
        value = content.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UsageError(f"{file}: {name} is {value}; it must be a positive number")
    config = {name: content[name] for name in CONFIG}
    for side in ("encoder", "decoder"):
        if config["d_model"] % config[f"{side}_attention_heads"]:
            raise UsageError(f"{file}: {side}_attention_heads does not divide d_model")
    return config


def _weight_files(folder: Path) -> list[Path]:
    """A Hugging Face folder's weights, safetensors preferred."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            listed = _read_json(index).get("weight_map")
            shards = sorted(set(listed.values())) if isinstance(listed, dict) else []
            if not shards or any(not isinstance(s, str) or Path(s).name != s for s in shards):
                raise UsageError(f"{index} lists no files of that folder")
            for shard in shards:
                if not (folder / shard).is_file():
                    raise UsageError(f"{folder} lacks {shard}, which {index.name} lists: fetch it, too")
            return [folder / shard for shard in shards]
    other = sorted(p.name for p in folder.glob("*") if p.suffix in (".h5", ".msgpack", ".onnx", ".gguf"))
    there = f" (only {', '.join(other)})" if other else ""
    raise UsageError(
        f"{folder} holds no weights that can be read{there}: it needs model.safetensors or pytorch_model.bin"
    )


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        return _read_pickle(file)
    try:
        with safe_open(str(file), framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  safe_open is no dict
    except (OSError, SafetensorError) as error:
        _refuse_pointer(file)
        raise UsageError(f"{file} is damaged or cut short ({str(error).splitlines()[0]}): fetch it again") from None


def _read_pickle(file: Path) -> dict:
    try:
        # Mapped, so that converting to fp32 does not hold the model twice; older files cannot be mapped.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None
    except Exception as error:  # torch.load wraps whatever it refuses in several types
        _refuse_pointer(file)
        if file.suffix == ".safetensors":
            raise UsageError(f"{file}: give the folder that holds it and config.json, not the file") from None
        with open(file, "rb") as opened:
            cut = opened.read(2) == b"PK" and not zipfile.is_zipfile(file)
        if not cut and ("Unsupported" in str(error) or "weights_only" in str(error)):
            raise UsageError(
                f"{file} is refused: it is no file of torch.save, or holds Python objects, which loading would run"
            ) from None
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise UsageError(f"{file} is damaged or no weights at all ({reason}): fetch it again") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds a {type(content).__name__}, no weights by name")
    return content


def _join(parts: Iterable[dict]) -> dict:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _floats(weights: dict, path: Path) -> dict[str, torch.Tensor]:
    """fp32 copies; each tensor is given up before the next is copied."""
    strange = [name for name, w in weights.items() if not isinstance(w, torch.Tensor) or not w.is_floating_point()]
    if strange:
        raise UsageError(f"{path}: {strange[0]} is no tensor of floating-point numbers; quantised weights are not read")
    return {name: weights.pop(name).to(torch.float32, copy=True).contiguous() for name in list(weights)}


# --- exporting -------------------------------------------------------------------------------------------------------


def export(folder: str | Path, weights: dict[str, torch.Tensor], config: dict[str, int], tokenizer,
           base: dict | None = None, generation: dict | None = None, dtype: torch.dtype = torch.float32) -> list[str]:  # fmt: skip
    """Writes a folder that `transformers` uses as it is, with OpenAI's form of the weights (`model.pt`) in it, and
    returns the file names. `weights` by Hugging Face's names without `model.`; `ctc_head.*` is left out. `tokenizer`: a
    `WhisperTokenizer`, whose prompt becomes the default of `generate`. `base`: the generation config of the model that
    was fine-tuned, carried over; `generation`: settings that go before it, such as `{"suppress_tokens": [],
    "begin_suppress_tokens": []}` for Morse. Written aside and renamed; replaces its own earlier export and nothing
    else. No `model.pt` where OpenAI's model cannot have the shape. Raises `UsageError` and `RunError`."""
    folder = Path(folder).resolve()  # what a link points to is replaced, not the link
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("ctc_head.")}
    check(weights, config, "the model to be exported")
    if tokenizer.size > config["vocab_size"]:
        raise UsageError(f"the tokenizer has {tokenizer.size} tokens and the model {config['vocab_size']}")
    features = feature_settings(config)
    largest = torch.finfo(dtype).max
    beyond = [name for name, tensor in weights.items() if not tensor.abs().max() <= largest]
    if beyond:
        raise UsageError(f"{beyond[0]} has values that {dtype} cannot hold, or that are no numbers: it is not exported")
    tensors = {n: t.detach().to("cpu", dtype, copy=True).contiguous() for n, t in weights.items()}
    try:
        replaced = may_write(folder)
        aside, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
        for rest in (aside, old):
            shutil.rmtree(rest, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            _write(
                aside, tensors, config, features, tokenizer, generation_settings(config, tokenizer, base, generation)
            )
            if replaced:
                folder.rename(old)
            aside.rename(folder)
        finally:
            for rest in (aside, old):
                shutil.rmtree(rest, ignore_errors=True)
    except (SafetensorError, RuntimeError) as error:  # both writers wrap the operating system's errors
        raise cannot_write(folder, OSError(0, str(error).splitlines()[0]), "--export") from None
    except OSError as error:
        raise cannot_write(folder, error, "--export") from None
    return sorted(path.name for path in folder.iterdir())


def may_write(folder: str | Path) -> bool:
    """Whether something stands there that `export` would replace. Raises `UsageError` where it is not ours."""
    folder = Path(folder)
    if not folder.exists():
        return False
    if not folder.is_dir() or (any(folder.iterdir()) and not _ours(folder)):
        raise UsageError(f"--export {folder}: it exists and is no earlier export; choose another folder")
    return True


def _ours(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("exported_by") == EXPORTED
    except (OSError, ValueError, AttributeError):
        return False


def feature_settings(config: dict[str, int]) -> dict:
    """`preprocessor_config.json`. Raises `UsageError` where the encoder's positions are no whole seconds, which
    `WhisperFeatureExtractor` cannot say."""
    samples = config["max_source_positions"] * FRAMES_PER_POSITION * HOP
    if samples % SAMPLE_RATE:
        step = SAMPLE_RATE // math.gcd(SAMPLE_RATE, FRAMES_PER_POSITION * HOP)
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


def generation_settings(config: dict[str, int], tokenizer, base: dict | None, given: dict | None) -> dict:
    """`generation_config.json`: `base`, then this tokenizer's prompt, then `given`. Ids beyond the tokenizer, where the
    model's vocabulary is padded, are suppressed: `transformers` takes them for timestamps, and then may never end."""
    dropped = ("_from_model_config", "transformers_version", "forced_decoder_ids", "language", "task")
    kept = {name: value for name, value in (base or {}).items() if name not in dropped}
    settings = {"suppress_tokens": [], "begin_suppress_tokens": [], "max_initial_timestamp_index": 50, **kept}
    settings |= {
        "decoder_start_token_id": tokenizer.start, "bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end,
        "pad_token_id": tokenizer.end, "max_length": config["max_target_positions"], "return_timestamps": False,
        "is_multilingual": tokenizer.multilingual,
    }  # fmt: skip
    if tokenizer.no_timestamps is not None:
        settings["no_timestamps_token_id"] = tokenizer.no_timestamps
    if "<|startofprev|>" in tokenizer.specials:
        settings["prev_sot_token_id"] = tokenizer.specials["<|startofprev|>"]
    if tokenizer.multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": tokenizer.specials[f"<|{code}|>"] for code in tokenizer.languages}
        settings["task_to_id"] = {task: tokenizer.specials[f"<|{task}|>"] for task in ("transcribe", "translate")}
        # The token itself: the bare code is understood for OpenAI's languages only.
        settings |= {"language": f"<|{tokenizer.language}|>", "task": tokenizer.task}
    settings |= given or {}
    padding = range(tokenizer.size, config["vocab_size"])
    settings["suppress_tokens"] = sorted({*(settings["suppress_tokens"] or ()), *padding})
    return settings


def _write(folder: Path, tensors: dict, config: dict, features: dict, tokenizer, generation: dict) -> None:
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    ids = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    description = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "exported_by": EXPORTED,
        **config, "num_hidden_layers": config["encoder_layers"], "is_encoder_decoder": True,
        "activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True, "use_cache": True,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "torch_dtype": dtype,
        **{name: generation[name] for name in ids},
        # Older versions of transformers read these here; their defaults would forbid two tokens at the start.
        "suppress_tokens": generation["suppress_tokens"], "forced_decoder_ids": None,
        "begin_suppress_tokens": generation["begin_suppress_tokens"],
    }  # fmt: skip
    files = {"config.json": description, "generation_config.json": generation, "preprocessor_config.json": features}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(folder)
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o666)  # its owner's only, else
    try:
        dims = config_to_dims(config)
    except UsageError as reason:
        print(f"no model.pt in the export: {reason}")
        return
    torch.save({"dims": dims, "model_state_dict": hf_to_openai(tensors)}, folder / "model.pt")
