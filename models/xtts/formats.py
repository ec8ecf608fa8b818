"""XTTS-v2's weights on disk: reads and writes Coqui's folders (model.pth, config.json, vocab.json,
dvae.pth, mel_stats.pth).

The weights are groups of tensors: `gpt` (names without the leading `gpt.`), `hifigan_decoder`
(vocoder and speaker encoder; empty if the weights have none), `dvae`, and the tensor
`mel_stats`."""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from common import checkpoint, files, records
from common.errors import UsageError
from models import model_files
from models.xtts.codec import DVAE, SAMPLE_RATE
from models.xtts.model import GPT
from models.xtts.tokenizer import MOST_TOKENS, Vocabulary
from models.xtts.vocoder import HifiDecoder
from speech.data.folders import read_made_from
from speech.signal.audio import write_wav

FILES = ("model.pth", "config.json", "vocab.json", "dvae.pth", "mel_stats.pth")
MODEL, DESCRIPTION, VOCAB, DVAE_FILE, MEL_STATS = FILES
# Of every speaker what the model hears of the voice, and a clip for programs that want one.
VOICES, REFERENCE = "speakers_xtts.pth", "reference.wav"
LICENCE_FILE = "LICENSE.txt"
LICENCE = (
    "These weights derive from Coqui's XTTS-v2. The Coqui Public Model License 1.0.0"
    " (https://coqui.ai/cpml) allows non-commercial use only, of the weights and of the speech that"
    " they make."
)
# Classes that Coqui's model.pth may hold besides tensors. A stub takes the place of each.
PICKLED = (
    "TTS.tts.configs.xtts_config.XttsConfig", "TTS.tts.configs.xtts_config.XttsArgs",
    "TTS.tts.configs.xtts_config.XttsAudioConfig", "TTS.tts.models.xtts.XttsArgs",
    "TTS.tts.models.xtts.XttsAudioConfig", "TTS.config.shared_configs.BaseDatasetConfig",
)  # fmt: skip
COUNTER = "num_batches_tracked"
IGNORED = re.compile(
    r"gpt\.(gpt_inference|gpt\.wte)\..*"  # copies that Coqui's inference makes
    r"|gpt\.gpt\.h\.\d+\.attn\.(masked_)?bias"
    r"|torch_mel_spectrogram_(dvae|style_encoder)\..*"  # parts of its trainer
    r"|dvae\.discrete_loss\..*"
)
FROZEN = ("hifigan_decoder", "dvae", "mel_stats")
GROUPS = ("gpt", *FROZEN)
OLD_WEIGHT_NORM = re.compile(r"\.weight_([gv])$")

SECONDS = range(1, 3601)  # of reference clips
SMALL = range(1, 129)
POSITIONS = range(4, 1 << 14)
TOKENS = range(4, MOST_TOKENS + 1)
# The schema of a configuration. `codes`: size of the DVAE's codebook; `code_dim`: width of its
# vectors.
CONFIG = {
    "d_model": range(8, 8193, 4), "layers": SMALL, "heads": SMALL,
    "text_tokens": TOKENS, "text_positions": POSITIONS,
    "start_text": range(MOST_TOKENS), "stop_text": range(MOST_TOKENS),
    "audio_tokens": TOKENS, "mel_positions": POSITIONS,
    "start_audio": range(MOST_TOKENS), "stop_audio": range(MOST_TOKENS),
    "latents": range(1, 1025), "perceiver_heads": SMALL, "perceiver_head_dim": range(1, 1025),
    "mel_channels": range(1, 1025), "codes": range(2, MOST_TOKENS),
    "code_dim": POSITIONS, "dvae_hidden": POSITIONS,
}  # fmt: skip
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


@dataclass(frozen=True)
class Conditioning:
    """How a voice is heard, in seconds, as config.json says it: at most `max_ref_len` of each
    reference clip, of all clips in a row the first `gpt_cond_len`, in chunks of
    `gpt_cond_chunk_len`. The defaults are the released model's."""

    max_ref_len: Annotated[int, SECONDS] = 30
    gpt_cond_len: Annotated[int, SECONDS] = 30
    gpt_cond_chunk_len: Annotated[int, SECONDS] = 4


def conditioning(settings: dict) -> Conditioning:
    """The conditioning that `settings`, a config.json, ask for. Raises `UsageError`."""
    names = [field.name for field in dataclasses.fields(Conditioning)]
    values = {name: settings[name] for name in names if name in settings}
    return records.read(Conditioning, values, DESCRIPTION)


def make_config(
    d_model: int, layers: int, heads: int, text_tokens: int, codes: int, **others
) -> dict:
    """A configuration with the proportions of the released model, and `others`."""
    config = {
        "d_model": d_model,
        "layers": layers,
        "heads": heads,
        "text_tokens": text_tokens,
        "text_positions": 404,
        "start_text": 261,
        "stop_text": 0,
        "audio_tokens": codes + 2,
        "mel_positions": 608,
        "start_audio": codes,
        "stop_audio": codes + 1,
        "codes": codes,
        "code_dim": 512,
        "dvae_hidden": 512,
        # Coqui's code has these as constants.
        "latents": 32,
        "mel_channels": 80,
        "perceiver_heads": 8,
        "perceiver_head_dim": 64,
    }
    return {**config, **others}


RELEASED = make_config(1024, 30, 16, text_tokens=6681, codes=1024)


def expected_shapes(config: dict) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every tensor of the groups `gpt`, `hifigan_decoder` and `dvae`, by name."""
    with torch.device("meta"):
        vocoder = HifiDecoder(config["d_model"])
        parts = {"gpt": GPT(config), "hifigan_decoder": vocoder, "dvae": DVAE(config)}
    return {
        group: {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()}
        for group, part in parts.items()
    }


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no XTTS can have."""
    if reason := records.mismatch(config, CONFIG, "its configuration") or _contradiction(config):
        raise UsageError(f"{path}: {reason}, which no XTTS-v2 has")


def _contradiction(config: dict) -> str | None:
    codes = config["codes"]
    if config["d_model"] % config["heads"]:
        return "heads does not divide d_model"
    if max(config["start_text"], config["stop_text"]) >= config["text_tokens"]:
        return "START or STOP of the text is not one of its tokens"
    others = {config["start_audio"], config["stop_audio"]}
    if config["audio_tokens"] != codes + 2 or others != {codes, codes + 1}:
        return "the audio tokens are not the codes, START and STOP"
    return None


# --- reading --------------------------------------------------------------------------------------


class _Stub:
    """Holds the attributes of a pickled configuration, without code that unpickling calls."""


def read_model(folder: str | Path) -> tuple[dict, dict, dict]:
    """Groups of weights (fp32, CPU), configuration and extras of a Coqui folder. Extras: `config`
    (config.json), `vocab` (text of vocab.json), `licence` (whether Coqui's holds). model.pth may be
    a training checkpoint. Code in the files is never run. Raises `UsageError`."""
    folder = Path(folder)
    for name in (MODEL, DESCRIPTION, VOCAB):
        _require(folder / name)
    description = model_files.read_json(folder / DESCRIPTION)
    model_files.refuse_pointer(folder / VOCAB)
    text = files.read_text(folder / VOCAB)
    config = _read_config(description, folder, text)
    conditioning(description)
    groups = _read_files(folder, GROUPS)
    for name, tensor in (("code_dim", "codebook.embed"), ("dvae_hidden", "encoder.0.0.weight")):
        if groups["dvae"].get(tensor, torch.tensor(0)).dim():
            config[name] = len(groups["dvae"][tensor])
    check_config(config, folder)
    _check(groups, config, folder)
    licence = os.path.isfile(folder / LICENCE_FILE) or read_made_from(folder) is None
    return groups, config, {"config": description, "vocab": text, "licence": licence}


def read_frozen(folder: str | Path, config: dict) -> dict:
    """The groups of weights that are not trained: `dvae`, `hifigan_decoder` and `mel_stats` (fp32,
    CPU) of the Coqui folder of a model with this configuration. Raises `UsageError`."""
    folder = Path(folder)
    _require(folder / MODEL)
    groups = _read_files(folder, FROZEN)
    _check(groups, config, folder)
    return groups


def read_custom(path: str | Path, config: dict) -> dict[str, torch.Tensor]:
    """The GPT's weights (fp32, CPU) of a fine-tuned model's .pth, with or without `xtts.` before
    its names and an optimizer. Raises `UsageError`."""
    path = Path(path)
    weights = _read_groups(path, ("gpt",))["gpt"]
    _check({"gpt": weights}, config, path)
    return weights


def _read_files(folder: Path, groups: tuple[str, ...]) -> dict:
    """The wanted groups of a folder, the DVAE's and the deviations among them."""
    read = _read_groups(folder / MODEL, groups)
    stats = read["mel_stats"].get("")
    path = folder / MEL_STATS
    if stats is None or os.path.isfile(path):  # model.pth may have them in 16 bits
        content = {MEL_STATS: model_files.read_pickle(_require(path))}
        stats = model_files.floats(content, path)[MEL_STATS]
    if not stats.is_meta and not bool((stats > 0).all()):
        raise UsageError(f"{folder}: its mel_stats are deviations, and some are not above 0")
    read["mel_stats"] = stats
    if not read["dvae"]:  # a training checkpoint holds it
        read["dvae"] = _read_groups(_require(folder / DVAE_FILE), ("dvae",), "dvae.")["dvae"]
    return read


def _require(path: Path) -> Path:
    if not os.path.isfile(path):
        raise UsageError(
            f"{path.parent} lacks {path.name}: a Coqui XTTS-v2 folder has {', '.join(FILES)}"
        )
    return path


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
    config = dict(RELEASED)
    for name, (key, more, default) in ARGS.items():
        value = args.get(key, default)
        # `check_config` refuses values of other types.
        config[name] = value + more if type(value) is int else value
    try:
        vocabulary = Vocabulary(text)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    config["text_tokens"] = vocabulary.size
    config["start_text"] = vocabulary.start
    config["stop_text"] = vocabulary.stop
    config["codes"] = config["audio_tokens"] - 2 if type(config["audio_tokens"]) is int else None
    check_config(config, folder / DESCRIPTION)
    return config


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
    kept = {}
    for old in list(weights):
        tensor = weights.pop(old)
        name = _name_here(f"{prefix}{str(old)[:200].removeprefix('xtts.')}")
        group = name.split(".")[0]
        if IGNORED.fullmatch(name):
            continue
        if name in kept:
            raise UsageError(f"{path}: {str(old)[:60]!r} is there twice")
        if group not in GROUPS:
            raise UsageError(f"{path}: {str(old)[:60]!r} is not part of XTTS-v2")
        if group in groups:
            kept[name] = tensor
    by_group = {group: {} for group in groups}
    for name, tensor in model_files.floats(kept, path, COUNTER).items():
        group, _, inner = name.partition(".")
        by_group[group][inner] = tensor
    return by_group


def _name_here(name: str) -> str:
    """A tensor's name with weight norm as torch spells it today."""
    return OLD_WEIGHT_NORM.sub(
        lambda match: f".parametrizations.weight.original{'gv'.index(match[1])}", name
    )


def _check(groups: dict, config: dict, path: str | Path) -> None:
    """Raises `UsageError` if tensors are missing, unexpected or of another shape."""
    shapes = expected_shapes(config)
    for group, tensors in groups.items():
        if group == "mel_stats":
            tensors = {group: tensors}
            shapes[group] = {group: (config["mel_channels"],)}
        model_files.check_shapes(tensors, shapes[group], f"{path} ({group})", "XTTS-v2")


# --- exporting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Voice:
    """A voice: latents (1, L, d) for the GPT and a speaker vector (1, 512) for the vocoder."""

    latents: torch.Tensor
    speaker: torch.Tensor


def export(
    folder: str | Path,
    groups: dict,
    config: dict,
    extras: dict,
    speakers: dict[str, tuple[np.ndarray, Voice]],
    card: str = "",
) -> list[str]:
    """Writes a folder that Coqui's XTTS loads strictly and speaks with, in fp32, and returns the
    names in it. Replaces an empty folder or an earlier export that nobody has changed, and refuses
    any other. Raises `UsageError` and `RunError`.

    `groups` and `extras`: as `read_model` returns them. Settings in `extras["config"]` are kept; it
    may be empty. `speakers` by name: int16 samples (T,) at 22.05 kHz, which become
    speakers/NAME.wav, those of the first also reference.wav, and the voice that the model hears in
    them, which goes into speakers_xtts.pth. `card`: the text of README.md."""
    folder = Path(folder)
    model_files.require_export(folder)
    state = {}
    for group in ("gpt", "hifigan_decoder"):
        state |= {f"{group}.{name}": _plain(tensor) for name, tensor in groups[group].items()}
    state["mel_stats"] = _plain(groups["mel_stats"])
    dvae = {name: _plain(tensor) for name, tensor in groups["dvae"].items()}
    for tensors in (state, dvae):
        checkpoint.check_tensors(tensors, "the model to be exported")
    contents = {MODEL: {"model": state}, DVAE_FILE: dvae, MEL_STATS: state["mel_stats"]}
    description = json.dumps(settings(config, extras["config"]), indent=2)
    texts = {DESCRIPTION: f"{description}\n", VOCAB: extras["vocab"]}
    if extras["licence"]:
        texts[LICENCE_FILE] = f"{LICENCE}\n"

    def fill(aside: Path) -> None:
        for name, content in contents.items():
            with open(aside / name, "wb") as file:
                torch.save(content, file)
        (aside / "speakers").mkdir()
        known = {}
        for name, (samples, voice) in zip(_file_names(speakers), speakers.values(), strict=True):
            if not known:
                write_wav(aside / REFERENCE, samples, SAMPLE_RATE)
            write_wav(aside / "speakers" / f"{name}.wav", samples, SAMPLE_RATE)
            # Coqui's code takes the two values by their order.
            known[name] = {
                "gpt_cond_latent": _plain(voice.latents),
                "speaker_embedding": _plain(voice.speaker)[:, :, None],
            }
        if known:
            with open(aside / VOICES, "wb") as file:
                torch.save(known, file)

    return model_files.write_export(folder, fill, {**texts, model_files.CARD: card})


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32 on the CPU. A part of a storage is copied: torch.save would write all."""
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    tensor = tensor.detach().to("cpu", kind).contiguous()
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if is_whole else tensor.clone()


def _file_names(speakers: dict) -> list[str]:
    names = []
    for speaker in speakers:
        name = re.sub(r"[^\w-]+", "_", speaker)[:60] or "speaker"
        while name.casefold() in map(str.casefold, names):
            name += "_"
        names.append(name)
    return names


def settings(config: dict, source: dict) -> dict:
    """The content of config.json: `source`, or defaults, with this model's shape."""
    defaults = {
        "model": "xtts",
        "audio": {"sample_rate": 22_050, "output_sample_rate": 24_000, "dvae_sample_rate": 22_050},
        "languages": ["en"],
        "temperature": 0.75,
        "length_penalty": 1.0,
        "repetition_penalty": 5.0,
        "top_k": 50,
        "top_p": 0.85,
        "num_gpt_outputs": 1,
        **dataclasses.asdict(Conditioning()),
        "sound_norm_refs": False,
    }
    model_args = source.get("model_args", {})
    shape_args = {key: config[name] - more for name, (key, more, _) in ARGS.items()}
    shape_args |= {
        "gpt_number_text_tokens": config["text_tokens"],
        "gpt_start_text_token": config["start_text"],
        "gpt_stop_text_token": config["stop_text"],
        "decoder_input_dim": config["d_model"],
    }
    return {**defaults, **source, "model_args": {**model_args, **FIXED, **shape_args}}
