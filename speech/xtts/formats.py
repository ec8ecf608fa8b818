"""XTTS-v2's weights on disk: reads and writes Coqui's folders (model.pth, config.json, vocab.json,
dvae.pth, mel_stats.pth).

The weights are groups of tensors: `gpt` (names without the leading `gpt.`), `hifigan_decoder`
(vocoder and speaker encoder; empty if the weights have none), `dvae`, and the tensor
`mel_stats`."""

import json
import os
import re
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, files
from common.errors import UsageError
from speech import model_files
from speech.audio import write_wav
from speech.folders import read_made_from
from speech.xtts.codec import DVAE
from speech.xtts.vocabulary import MOST_TOKENS, Vocabulary
from speech.xtts.vocoder import HifiDecoder

FILES = ("model.pth", "config.json", "vocab.json", "dvae.pth", "mel_stats.pth")
MODEL, DESCRIPTION, VOCAB, DVAE_FILE, MEL_STATS = FILES
LICENCE_FILE = "LICENSE.txt"
LICENCE = (
    "These weights derive from Coqui's XTTS-v2. The Coqui Public Model License 1.0.0"
    " (https://coqui.ai/cpml) allows non-commercial use only, of the weights and of the speech that"
    " they make."
)
# What Coqui's model.pth may hold besides tensors. A stub takes the place of each class.
PICKLED = (
    "TTS.tts.configs.xtts_config.XttsConfig", "TTS.tts.configs.xtts_config.XttsArgs",
    "TTS.tts.configs.xtts_config.XttsAudioConfig", "TTS.tts.models.xtts.XttsArgs",
    "TTS.tts.models.xtts.XttsAudioConfig", "TTS.config.shared_configs.BaseDatasetConfig",
)  # fmt: skip
COUNTER = "num_batches_tracked"
IGNORED = re.compile(
    # copies that Coqui's inference makes
    r"gpt\.(gpt_inference|gpt\.wte)\..*|gpt\.gpt\.h\.\d+\.attn\.(masked_)?bias"
    r"|torch_mel_spectrogram_(dvae|style_encoder)\..*|dvae\.discrete_loss\..*"  # of its trainer
)
OLD_WEIGHT_NORM = re.compile(r"\.weight_([gv])$")

# A schema for `checkpoint.mismatch`. `codes`: size of the DVAE's codebook; `hifigan`: a vocoder and
# a speaker encoder.
CONFIG = {
    "d_model": range(8, 8193, 4),
    **dict.fromkeys(("layers", "heads", "perceiver_heads"), range(1, 129)),
    **dict.fromkeys(
        ("text_positions", "mel_positions", "dvae_hidden", "code_dim"), range(4, 1 << 14)
    ),
    **dict.fromkeys(("text_tokens", "audio_tokens"), range(4, MOST_TOKENS + 1)),
    "codes": range(2, MOST_TOKENS),
    **dict.fromkeys(("start_text", "stop_text", "start_audio", "stop_audio"), range(MOST_TOKENS)),
    **dict.fromkeys(("latents", "mel_channels", "perceiver_head_dim"), range(1, 1025)),
    "hifigan": bool,
}
# Sizes that Coqui's code has as constants.
CONSTANT = {"latents": 32, "mel_channels": 80, "perceiver_heads": 8, "perceiver_head_dim": 64}
CONDITIONING_BLOCKS, PERCEIVER_LAYERS = 6, 2
# Of a layer: name, width in and out in units of d_model.
PROJECTIONS = (
    ("attn.c_attn", 1, 3),
    ("attn.c_proj", 1, 1),
    ("mlp.c_fc", 1, 4),
    ("mlp.c_proj", 4, 1),
)
# Keys of `model_args` in config.json, what is added to their values, and Coqui's defaults.
ARGS = {
    "layers": ("gpt_layers", 0, 30),
    "d_model": ("gpt_n_model_channels", 0, 1024),
    "heads": ("gpt_n_heads", 0, 16),
    "text_positions": ("gpt_max_text_tokens", 2, 402),
    "mel_positions": ("gpt_max_audio_tokens", 3, 605),
    "audio_tokens": ("gpt_num_audio_tokens", 0, 8194),
    "start_audio": ("gpt_start_audio_token", 0, 8192),
    "stop_audio": ("gpt_stop_audio_token", 0, 8193),
}
FIXED = {  # settings that the network here has in one form only
    "gpt_use_perceiver_resampler": True, "gpt_code_stride_len": 1024, "input_sample_rate": 22_050,
    "output_sample_rate": 24_000, "output_hop_length": 256, "d_vector_dim": 512,
    "cond_d_vector_in_each_upsampling_layer": True,
}  # fmt: skip


def shape(d_model: int, layers: int, heads: int, text_tokens: int, codes: int, **others) -> dict:
    """A configuration with the proportions of the released model. `others` replace further
    values."""
    config = {
        "layers": layers,
        "d_model": d_model,
        "heads": heads,
        "text_positions": 404,
        "mel_positions": 608,
        "text_tokens": text_tokens,
        "audio_tokens": codes + 2,
        "start_text": 261,
        "stop_text": 0,
        "start_audio": codes,
        "stop_audio": codes + 1,
        **CONSTANT,
        "codes": codes,
        "code_dim": 512,
        "dvae_hidden": 512,
        "hifigan": True,
    }
    return {**config, **others}


SIZES = {
    "demo": shape(
        128,
        4,
        2,
        512,
        512,
        latents=8,
        perceiver_heads=2,
        code_dim=64,
        dvae_hidden=128,
        hifigan=False,
    ),
    "full": shape(1024, 30, 16, 6681, 1024),
}


def expected_shapes(config: dict) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every tensor of the groups `gpt`, `hifigan_decoder` and `dvae`, by name."""
    with torch.device("meta"):
        dvae = DVAE(config)
        vocoder = HifiDecoder(config["d_model"]) if config["hifigan"] else torch.nn.Module()
    parts = {"hifigan_decoder": vocoder, "dvae": dvae}
    shapes = {
        group: {name: (*t.shape,) for name, t in part.state_dict().items()}
        for group, part in parts.items()
    }
    return {"gpt": _gpt_shapes(config), **shapes}


def _gpt_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    d, shapes = config["d_model"], {}

    def tensor(name: str, *size: int, bias: int = 0) -> None:
        shapes[f"{name}.weight"] = size
        if bias:
            shapes[f"{name}.bias"] = (bias,)

    tensor("conditioning_encoder.init", d, config["mel_channels"], 1, bias=d)
    for i in range(CONDITIONING_BLOCKS):
        block = f"conditioning_encoder.attn.{i}"
        tensor(f"{block}.norm", d, bias=d)
        tensor(f"{block}.qkv", 3 * d, d, 1, bias=3 * d)
        tensor(f"{block}.proj_out", d, d, 1, bias=d)
    width, inner = config["perceiver_heads"] * config["perceiver_head_dim"], 8 * d // 3
    shapes["conditioning_perceiver.latents"] = (config["latents"], d)
    shapes["conditioning_perceiver.norm.gamma"] = (d,)
    for i in range(PERCEIVER_LAYERS):
        attention, feed_forward = (f"conditioning_perceiver.layers.{i}.{part}" for part in (0, 1))
        tensor(f"{attention}.to_q", width, d)
        tensor(f"{attention}.to_kv", 2 * width, d)
        tensor(f"{attention}.to_out", d, width)
        tensor(f"{feed_forward}.0", 2 * inner, d, bias=2 * inner)
        tensor(f"{feed_forward}.2", d, inner, bias=d)
    for kind, tokens in (("text", config["text_tokens"]), ("mel", config["audio_tokens"])):
        tensor(f"{kind}_embedding", tokens, d)
        tensor(f"{kind}_pos_embedding.emb", config[f"{kind}_positions"], d)
        tensor(f"{kind}_head", tokens, d, bias=tokens)
    for i in range(config["layers"]):
        layer = f"gpt.h.{i}"
        for norm in ("ln_1", "ln_2"):
            tensor(f"{layer}.{norm}", d, bias=d)
        for name, rows, columns in PROJECTIONS:
            tensor(f"{layer}.{name}", rows * d, columns * d, bias=columns * d)  # stored (in, out)
    for norm in ("gpt.ln_f", "final_norm"):
        tensor(norm, d, bias=d)
    return shapes


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no XTTS can have."""
    reason = checkpoint.mismatch(config, CONFIG, "its configuration")
    if reason is None:
        codes = config["codes"]
        if config["d_model"] % config["heads"]:
            reason = "heads does not divide d_model"
        elif max(config["start_text"], config["stop_text"]) >= config["text_tokens"]:
            reason = "START or STOP of the text is not one of its tokens"
        elif (config["audio_tokens"], {config["start_audio"], config["stop_audio"]}) != (
            codes + 2,
            {codes, codes + 1},
        ):
            reason = "the audio tokens are not the codes, START and STOP"
    if reason:
        raise UsageError(f"{path}: {reason}, which no XTTS-v2 has")


# --- reading --------------------------------------------------------------------------------------


class _Stub:
    """Holds the attributes of a pickled configuration. It has no code that unpickling could
    call."""


def read_model(folder: str | Path) -> tuple[dict, dict, dict]:
    """Groups of weights (fp32, CPU), configuration and extras of a Coqui folder. Extras: `config`
    (config.json), `vocab` (text of vocab.json), `licence` (whether Coqui's holds, and then it is
    printed). model.pth may be a training checkpoint. Code in the files is never run. Raises
    `UsageError`."""
    folder = Path(folder)
    model, file, vocab = (_require(folder / name) for name in (MODEL, DESCRIPTION, VOCAB))
    description = model_files.read_json(file)
    model_files.refuse_pointer(vocab)
    text = files.read_text(vocab)
    config = _read_config(description, folder, text)
    groups = _read_groups(model, ("gpt", "hifigan_decoder", "dvae", "mel_stats"))
    groups["mel_stats"] = _read_mel_stats(folder, groups["mel_stats"].get(""))
    if not groups["dvae"]:  # a training checkpoint holds it
        groups["dvae"] = _read_groups(_require(folder / DVAE_FILE), ("dvae",), "dvae.")["dvae"]
    for name, tensor in (("code_dim", "codebook.embed"), ("dvae_hidden", "encoder.0.0.weight")):
        if groups["dvae"].get(tensor, torch.tensor(0)).dim():
            config[name] = len(groups["dvae"][tensor])
    config["hifigan"] = bool(groups["hifigan_decoder"])
    check_config(config, folder)
    _check(groups, config, folder)
    licence = os.path.isfile(folder / LICENCE_FILE) or read_made_from(folder) is None
    if licence:
        print(LICENCE)
    return groups, config, {"config": description, "vocab": text, "licence": licence}


def read_custom(path: str | Path, config: dict) -> dict[str, torch.Tensor]:
    """The GPT's weights (fp32, CPU) of a fine-tuned model's .pth, with or without `xtts.` before
    its names and an optimizer. Prints the licence. Raises `UsageError`."""
    path = Path(path)
    weights = _read_groups(path, ("gpt",))["gpt"]
    _check({"gpt": weights}, config, path)
    print(LICENCE)
    return weights


def _require(path: Path) -> Path:
    if not os.path.isfile(path):
        raise UsageError(
            f"{path.parent} lacks {path.name}: a Coqui XTTS-v2 folder has {', '.join(FILES)}"
        )
    return path


def _read_mel_stats(folder: Path, inner: torch.Tensor | None) -> torch.Tensor:
    """mel_stats.pth; `inner`, those of model.pth, if there is no such file. Raises `UsageError` if
    they differ."""
    path = folder / MEL_STATS
    if inner is not None and not os.path.isfile(path):
        return inner
    stats = model_files.floats({MEL_STATS: model_files.read_pickle(_require(path))}, path)[
        MEL_STATS
    ]
    if inner is None or (
        stats.is_meta and stats.shape == inner.shape
    ):  # a planned run's have no values
        return stats
    if stats.shape != inner.shape or not torch.allclose(
        stats, inner, rtol=1e-2
    ):  # model.pth may be in 16 bits
        raise UsageError(
            f"{path}: it differs from the mel_stats in {MODEL}: take both from the same model"
        )
    return stats


def _read_config(description: dict, folder: Path, text: str) -> dict:
    """The configuration without what the weights tell. Raises `UsageError`."""
    args = description.get("model_args")
    args = args if isinstance(args, dict) else {}
    for key, expected in FIXED.items():
        value = args.get(key, False if key == "gpt_use_perceiver_resampler" else expected)
        if type(value) not in (int, float, bool) or value != expected:
            raise UsageError(
                f"{folder / DESCRIPTION}: {key} is {str(value)[:20]!r}; XTTS-v2 has {expected} only"
            )
    config = dict(SIZES["full"])
    for name, (key, more, default) in ARGS.items():
        value = args.get(key, default)
        config[name] = value + more if type(value) is int else value
    if args.get("decoder_input_dim", 1024) != config["d_model"]:
        raise UsageError(
            f"{folder / DESCRIPTION}: decoder_input_dim is not gpt_n_model_channels, the width of"
            " the GPT"
        )
    vocabulary = _vocabulary(text, folder)
    config["codes"] = config["audio_tokens"] - 2 if type(config["audio_tokens"]) is int else None
    config |= {
        "text_tokens": vocabulary.size,
        "start_text": vocabulary.start,
        "stop_text": vocabulary.stop,
    }
    check_config(config, folder / DESCRIPTION)
    return config


def _vocabulary(text: str, path: str | Path) -> Vocabulary:
    try:
        return Vocabulary(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_groups(
    path: Path, groups: tuple[str, ...], prefix: str = ""
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of the wanted groups by name. `prefix` is put before the names in the file."""
    with torch.serialization.safe_globals([(_Stub, name) for name in PICKLED]):
        content = model_files.read_pickle(path)
    weights = content.get("model", content) if isinstance(content, dict) else content
    del content  # and with it the optimizer
    if not isinstance(weights, dict):
        raise UsageError(f"{path} holds a {type(weights).__name__}, not weights by name")
    kept, known = {}, ("gpt", "hifigan_decoder", "dvae", "mel_stats")
    for old in list(weights):
        tensor = weights.pop(old)
        name = f"{prefix}{str(old)[:200].removeprefix('xtts.')}"
        name = OLD_WEIGHT_NORM.sub(
            lambda match: f".parametrizations.weight.original{'gv'.index(match[1])}", name
        )
        if IGNORED.fullmatch(name):
            continue
        if name in kept or name.split(".")[0] not in known:
            raise UsageError(
                f"{path}: {str(old)[:60]!r} is"
                f" {'there twice' if name in kept else 'not part of XTTS-v2'}"
            )
        if name.split(".")[0] in groups:
            kept[name] = tensor
    size = sum(
        tensor.numel() * tensor.itemsize
        for tensor in kept.values()
        if isinstance(tensor, torch.Tensor)
    )
    if size > path.stat().st_size:
        raise UsageError(f"{path} is damaged: its tensors share their data")
    kept = model_files.floats(kept, path, COUNTER)
    return {
        group: {
            name[len(group) + 1 :]: w for name, w in kept.items() if name.split(".")[0] == group
        }
        for group in groups
    }


def _check(groups: dict, config: dict, path: str | Path) -> None:
    """Raises `UsageError` if tensors are missing, unexpected or of another shape."""
    embedding = groups["gpt"].get("text_embedding.weight")
    if embedding is not None and embedding.dim() == 2 and len(embedding) != config["text_tokens"]:
        rows = (
            f"its text embedding has {len(embedding)} rows and {VOCAB} {config['text_tokens']}"
            " tokens"
        )
        raise UsageError(f"{path}: {rows}: use the {VOCAB} with which these weights were trained")
    shapes = expected_shapes(config)
    for group, tensors in groups.items():
        if group == "mel_stats":
            tensors, shapes[group] = {group: tensors}, {group: (config["mel_channels"],)}
        model_files.check_shapes(tensors, shapes[group], f"{path} ({group})", "XTTS-v2")


# --- exporting ------------------------------------------------------------------------------------


def export(
    folder: str | Path, groups: dict, config: dict, extras: dict, speakers: dict
) -> list[str]:
    """Writes a folder that Coqui's XTTS loads strictly and speaks with, in fp32, and returns the
    names in it. `speakers`: a reference clip of each, {name: (int16 samples (T,), Hz)}, for
    speakers/NAME.wav. Replaces an earlier export that nobody has changed or an empty folder, and
    refuses any other. Raises `UsageError` and `RunError`.

    `groups` and `extras`: as `read_model` returns them. Settings in `extras["config"]` are kept; it
    may be empty."""
    folder = Path(folder)
    check_config(config, "the model to be exported")
    if not config["hifigan"]:
        raise UsageError(
            "--export: these weights have no vocoder, which Coqui's XTTS needs; a released model"
            " has one"
        )
    if wrong := [name for name, value in CONSTANT.items() if config[name] != value]:
        raise UsageError(
            f"--export: {wrong[0]} is {config[wrong[0]]}; Coqui's XTTS has {CONSTANT[wrong[0]]}"
            " only"
        )
    _check(groups, config, "the model to be exported")
    vocabulary = _vocabulary(extras["vocab"], "the model to be exported")
    expected = (config["text_tokens"], config["start_text"], config["stop_text"])
    if (ids := (vocabulary.size, vocabulary.start, vocabulary.stop)) != expected:
        raise UsageError(
            f"--export: size, START and STOP are {ids} in the vocabulary, but {expected} in the"
            " model"
        )
    model_files.require_export(folder)
    state = {
        f"{group}.{name}": w
        for group in ("gpt", "hifigan_decoder")
        for name, w in groups[group].items()
    }
    parts = {MODEL: state | {"mel_stats": groups["mel_stats"]}, DVAE_FILE: dict(groups["dvae"])}
    parts = {
        file: {name: _plain(w) for name, w in tensors.items()} for file, tensors in parts.items()
    }
    for tensors in parts.values():
        checkpoint.check_tensors(tensors, "the model to be exported")
    contents = {**parts, MODEL: {"model": parts[MODEL]}, MEL_STATS: parts[MODEL]["mel_stats"]}
    texts = {
        DESCRIPTION: json.dumps(settings(config, extras["config"]), indent=2) + "\n",
        VOCAB: extras["vocab"],
    }
    texts |= {LICENCE_FILE: f"{LICENCE}\n"} if extras["licence"] else {}

    def fill(aside: Path) -> None:
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")
        for name, content in contents.items():
            with open(aside / name, "wb") as file:
                torch.save(content, file)
        (aside / "speakers").mkdir()
        for name, (samples, rate) in zip(_file_names(speakers), speakers.values(), strict=True):
            write_wav(aside / "speakers" / f"{name}.wav", np.asarray(samples, np.int16), rate)

    return model_files.write_export(folder, fill)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32 on the CPU. A part of a larger storage is copied, because torch.save would
    write all of it."""
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    tensor = tensor.detach().to("cpu", kind).contiguous()
    return (
        tensor
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        else tensor.clone()
    )


def _file_names(speakers: dict) -> list[str]:
    names = []
    for speaker in speakers:
        name = re.sub(r"[^\w-]+", "_", speaker)[:60] or "speaker"
        while name.casefold() in map(str.casefold, names):
            name += "_"
        names.append(name)
    return names


def settings(config: dict, source: dict) -> dict:
    """config.json: the source's with what this model changes, or one that is complete."""
    inference = {
        "model": "xtts",
        "audio": {"sample_rate": 22_050, "output_sample_rate": 24_000, "dvae_sample_rate": 22_050},
        "languages": ["en"],
        "temperature": 0.75,
        "length_penalty": 1.0,
        "repetition_penalty": 5.0,
        "top_k": 50,
        "top_p": 0.85,
        "num_gpt_outputs": 1,
        "gpt_cond_len": 30,
        "gpt_cond_chunk_len": 4,
        "max_ref_len": 30,
        "sound_norm_refs": False,
    }
    args = source.get("model_args", {})
    shape_args = {key: config[name] - more for name, (key, more, _) in ARGS.items()}
    shape_args |= {
        "gpt_number_text_tokens": config["text_tokens"],
        "gpt_start_text_token": config["start_text"],
        "gpt_stop_text_token": config["stop_text"],
        "decoder_input_dim": config["d_model"],
    }
    return {**inference, **source, "model_args": {**args, **FIXED, **shape_args}}
