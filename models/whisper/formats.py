"""Whisper's weights on disk: reads Hugging Face folders and OpenAI's `.pt`, converts between them,
and exports."""

import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from common import checkpoint, files, records
from common.errors import UsageError
from models import model_files
from models.whisper.model import FRAME, HOP, N_FFT, Whisper
from speech.signal.audio import SAMPLE_RATE

FFN = 4  # width of the feed-forward layers in units of d_model, in every released model

# Names in Hugging Face's config.json to those in OpenAI's `dims`, which imply feed-forward layers
# of FFN * d_model.
DIMS = {
    "num_mel_bins": "n_mels",
    "max_source_positions": "n_audio_ctx",
    "d_model": "n_audio_state",
    "encoder_attention_heads": "n_audio_head",
    "encoder_layers": "n_audio_layer",
    "vocab_size": "n_vocab",
    "max_target_positions": "n_text_ctx",
    "decoder_attention_heads": "n_text_head",
    "decoder_layers": "n_text_layer",
}
# A schema for `records.mismatch`. The largest released model has 32 + 32 layers of 1280; damaged
# files ask for billions.
CONFIG = {
    "num_mel_bins": range(1, 513),
    "max_source_positions": range(1, 1 << 16),
    "d_model": range(4, 8193, 2),
    "vocab_size": range(1, 200_001),
    "max_target_positions": range(8, 1 << 16),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), range(1, 129)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), range(1, 129)),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), range(1, (1 << 16) + 1)),
}
NAMES = {  # parts of the tensors' names: Hugging Face's to OpenAI's
    "encoder.layers.": "encoder.blocks.",
    "decoder.layers.": "decoder.blocks.",
    ".self_attn.q_proj.": ".attn.query.",
    ".self_attn.k_proj.": ".attn.key.",
    ".self_attn.v_proj.": ".attn.value.",
    ".self_attn.out_proj.": ".attn.out.",
    ".self_attn_layer_norm.": ".attn_ln.",
    ".encoder_attn.q_proj.": ".cross_attn.query.",
    ".encoder_attn.k_proj.": ".cross_attn.key.",
    ".encoder_attn.v_proj.": ".cross_attn.value.",
    ".encoder_attn.out_proj.": ".cross_attn.out.",
    ".encoder_attn_layer_norm.": ".cross_attn_ln.",
    ".fc1.": ".mlp.0.",
    ".fc2.": ".mlp.2.",
    ".final_layer_norm.": ".mlp_ln.",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens.": "decoder.token_embedding.",
    "encoder.layer_norm.": "encoder.ln_post.",
    "decoder.layer_norm.": "decoder.ln.",
}
# Settings of a released generation config that another tokenizer or version of transformers
# replaces.
NOT_KEPT = ("_from_model_config", "transformers_version", "forced_decoder_ids", "language", "task")


def make_config(
    d_model: int, layers: tuple[int, int], heads: int, mels: int = 80, vocabulary: int = 51_865
) -> dict[str, int]:
    """A configuration with the released proportions. `layers`: the encoder's and the decoder's."""
    return {
        "num_mel_bins": mels,
        "max_source_positions": 1500,
        "d_model": d_model,
        "encoder_attention_heads": heads,
        "encoder_layers": layers[0],
        "vocab_size": vocabulary,
        "max_target_positions": 448,
        "decoder_attention_heads": heads,
        "decoder_layers": layers[1],
        "encoder_ffn_dim": FFN * d_model,
        "decoder_ffn_dim": FFN * d_model,
    }


def reshape(size: dict, shape: dict[str, int]) -> dict:
    """The configuration of a size, changed by the flags in `shape`. Raises `UsageError`."""
    width = shape.get("d_model", size["d_model"])
    heads = size["encoder_attention_heads"]
    if "d_model" in shape:
        heads = max(1, width // 64)
    heads = shape.get("attention_heads", heads)
    if width % (2 * heads) or width < 4:
        raise UsageError(
            f"--d_model {width} must be a multiple of twice --attention_heads {heads}, and at"
            " least 4"
        )
    return {
        **size,
        "d_model": width,
        "encoder_layers": shape.get("encoder_layers", size["encoder_layers"]),
        "decoder_layers": shape.get("decoder_layers", size["decoder_layers"]),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": FFN * width,
        "decoder_ffn_dim": FFN * width,
    }


SIZES = {  # of the released multilingual models
    "tiny": make_config(384, (4, 4), 6),
    "base": make_config(512, (6, 6), 8),
    "small": make_config(768, (12, 12), 12),
    "medium": make_config(1024, (24, 24), 16),
    "large-v2": make_config(1280, (32, 32), 20),
    "large-v3": make_config(1280, (32, 32), 20, 128, 51_866),
    "turbo": make_config(1280, (32, 4), 20, 128, 51_866),
}


def expected_shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by Hugging Face's names without `model.`."""
    return checkpoint.shapes_of(lambda: Whisper(config))


def check(weights: dict[str, torch.Tensor], config: dict[str, int], path: str | Path) -> None:
    """Raises `UsageError` if tensors are missing, unexpected or of another shape."""
    model_files.check_shapes(weights, expected_shapes(config), path, "Whisper")


# --- between the two forms ------------------------------------------------------------------------


def _renamed(
    state: dict[str, torch.Tensor], parts: Iterable[tuple[str, str]]
) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for old, new in parts:
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def hf_to_openai(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors to OpenAI's names. Names without a counterpart are kept."""
    return _renamed(state, NAMES.items())


def openai_to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors to Hugging Face's names without `model.`."""
    return _renamed(state, [(theirs, ours) for ours, theirs in NAMES.items()])


def config_to_dims(config: dict[str, int]) -> dict[str, int]:
    """OpenAI's `dims`. Raises `UsageError` if OpenAI's model cannot have that shape."""
    widths = {config["encoder_ffn_dim"], config["decoder_ffn_dim"]}
    if widths != {FFN * config["d_model"]}:
        raise UsageError(
            f"OpenAI's form of Whisper has feed-forward layers of {FFN} x d_model only"
        )
    return {
        **{openai: config[hf] for hf, openai in DIMS.items()},
        "n_text_state": config["d_model"],
    }


def dims_to_config(dims: dict[str, int]) -> dict[str, int]:
    """The configuration of OpenAI's `dims`. Raises `KeyError`, `TypeError` and `ValueError`."""
    width = dims["n_text_state"]
    if type(width) is not int or width != dims["n_audio_state"]:
        raise ValueError("encoder and decoder differ in width")
    config = {hf: dims[openai] for hf, openai in DIMS.items()}
    return {**config, "encoder_ffn_dim": FFN * width, "decoder_ffn_dim": FFN * width}


# --- reading --------------------------------------------------------------------------------------


def read_model(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, int], dict]:
    """Weights (fp32, CPU, by Hugging Face's names without `model.`), configuration and extras of a
    Hugging Face folder or of OpenAI's `.pt`. Extras: `generation` (generation_config.json, or
    empty), `tokenizer` (the folder for `tokenizer.read`). Code in the files is never run. Raises
    `UsageError`."""
    path = Path(path)
    generation = {}
    if os.path.isdir(path):
        config = read_config(path)
        if (path / "generation_config.json").is_file():
            generation = model_files.read_json(path / "generation_config.json")
        weights = {
            name.removeprefix("model."): tensor
            for name, tensor in model_files.read_folder(path).items()
        }
    else:
        content = model_files.read_pickle(path)
        if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= set(content):
            raise UsageError(
                f"{path} is not OpenAI's form of Whisper, which has dims and model_state_dict; for"
                " a Hugging Face model give its folder"
            )
        try:
            config = dims_to_config(content["dims"])
        except (KeyError, ValueError, TypeError):
            raise UsageError(f"{path}: its dims are not Whisper's") from None
        check_config(config, path)
        weights = openai_to_hf(model_files.floats(content["model_state_dict"], path))
    output = weights.pop("proj_out.weight", None)
    check(weights, config, path)
    embedding = weights["decoder.embed_tokens.weight"]
    if output is not None and not (output.is_meta or torch.equal(output, embedding)):
        raise UsageError(
            f"{path}: its output layer is not its embedding; Whisper has one matrix for both"
        )
    folder = path if path.is_dir() else path.parent
    return weights, config, {"generation": generation, "tokenizer": folder}


def read_config(folder: Path) -> dict[str, int]:
    """The configuration of a Hugging Face folder. Raises `UsageError`."""
    content = model_files.read_description(folder, "whisper")
    file = folder / "config.json"
    if content.get("activation_function", "gelu") != "gelu" or content.get("scale_embedding"):
        raise UsageError(
            f"{file} asks for another activation or for scaled embeddings, which no released"
            " Whisper has"
        )
    check_config(content, file)
    return {name: content[name] for name in CONFIG}


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no Whisper can have."""
    reason = records.mismatch(config, CONFIG, "its configuration")
    if reason:
        raise UsageError(f"{path}: {reason}, which is out of range for Whisper")
    for side in ("encoder", "decoder"):
        if config["d_model"] % config[f"{side}_attention_heads"]:
            raise UsageError(f"{path}: {side}_attention_heads does not divide d_model")


# --- exporting ------------------------------------------------------------------------------------


def export(
    folder: str | Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, int],
    tokenizer,
    base: dict | None = None,
    card: dict[str, str] | None = None,
) -> list[str]:
    """Writes a folder that `transformers` can load, in fp32, with OpenAI's form of the weights in
    16 bits (`model.pt`), and returns the file names. `model.pt` is left out if OpenAI's model
    cannot have the shape.

    `weights`: by Hugging Face's names without `model.`; `ctc_head.*` is left out. `tokenizer`: a
    `WhisperTokenizer`, whose prompt becomes the default of `generate`. `base`: the generation
    config of the model that was fine-tuned. `card`: the texts of further files, by their names.
    Raises `UsageError` and `RunError`; see `model_files.write_export`."""
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("ctc_head.")}
    tensors = model_files.on_host(weights)
    generation = generation_settings(config, tokenizer, base)
    contents = {
        "config.json": _description(config, generation),
        "generation_config.json": generation,
        "preprocessor_config.json": feature_settings(config),
    }
    texts = {name: files.json_text(content) for name, content in contents.items()}
    fill = functools.partial(_write_weights, tensors, config)
    return model_files.write_export(folder, fill, texts | tokenizer.file_texts() | (card or {}))


def feature_settings(config: dict[str, int]) -> dict:
    """`preprocessor_config.json`. Raises `UsageError` if the longest input is not a whole number of
    seconds, which `WhisperFeatureExtractor` requires."""
    samples = config["max_source_positions"] * FRAME
    if samples % SAMPLE_RATE:
        step = SAMPLE_RATE // math.gcd(SAMPLE_RATE, FRAME)
        raise UsageError(
            f"a model of {config['max_source_positions']} encoder positions cannot be exported:"
            f" transformers needs whole seconds, multiples of {step}"
        )
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": SAMPLE_RATE,
        "n_fft": N_FFT,
        "hop_length": HOP,
        "chunk_length": samples // SAMPLE_RATE,
        "n_samples": samples,
        "nb_max_frames": samples // HOP,
        "dither": 0.0,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def generation_settings(config: dict[str, int], tokenizer, base: dict | None) -> dict:
    """`generation_config.json`: `base`, overridden by this tokenizer's prompt. With
    `return_timestamps` in `base`, `transformers` reads recordings of any length by their times. If
    the model's vocabulary is padded, ids beyond the tokenizer are suppressed: `transformers` takes
    them for timestamps, and generation may never end."""
    kept = {name: value for name, value in (base or {}).items() if name not in NOT_KEPT}
    settings = {
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        **kept,
    }
    settings |= {
        "decoder_start_token_id": tokenizer.start,
        "bos_token_id": tokenizer.eos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.eos,
        "max_length": config["max_target_positions"],
        "is_multilingual": tokenizer.multilingual,
    }
    if tokenizer.no_timestamps is not None:
        settings["no_timestamps_token_id"] = tokenizer.no_timestamps
    if tokenizer.previous is not None:
        settings["prev_sot_token_id"] = tokenizer.previous
    if tokenizer.multilingual:
        settings["lang_to_id"] = {
            f"<|{code}|>": tokenizer.specials[f"<|{code}|>"] for code in tokenizer.languages
        }
        settings["task_to_id"] = {
            task: tokenizer.specials[f"<|{task}|>"] for task in ("transcribe", "translate")
        }
        # The token, because `transformers` understands bare codes only for OpenAI's languages.
        settings |= {"language": f"<|{tokenizer.language}|>", "task": tokenizer.task}
    padding = range(tokenizer.size, config["vocab_size"])
    settings["suppress_tokens"] = sorted({*(settings["suppress_tokens"] or ()), *padding})
    return settings


def _description(config: dict, generation: dict) -> dict:
    """`config.json`."""
    ids = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "exported_by": model_files.EXPORTED,
        **config,
        "num_hidden_layers": config["encoder_layers"],
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "torch_dtype": "float32",
        **{name: generation[name] for name in ids},
        # Older versions of transformers read these here; their defaults would forbid two tokens at
        # the start.
        "suppress_tokens": generation["suppress_tokens"],
        "forced_decoder_ids": None,
        "begin_suppress_tokens": generation["begin_suppress_tokens"],
    }


def _write_weights(tensors: dict[str, torch.Tensor], config: dict, folder: Path) -> None:
    model_files.save_tensors({f"model.{name}": tensor for name, tensor in tensors.items()}, folder)
    try:
        dims = config_to_dims(config)
    except UsageError as reason:
        print(f"no model.pt in the export: {reason}")
        return
    # In 16 bits as OpenAI's files, which whisper.cpp's convert-pt-to-ggml.py takes for granted.
    state = {name: tensor.half() for name, tensor in hf_to_openai(tensors).items()}
    torch.save({"dims": dims, "model_state_dict": state}, folder / "model.pt")
