"""wav2vec 2.0's weights on disk: Hugging Face folders (also of MMS and HuBERT), which are also
written, and omniASR's fairseq2 files."""

import contextlib
import functools
import os
import re
import warnings
from pathlib import Path

import torch

from common import checkpoint, files
from common.errors import UsageError
from models import model_files
from models.wav2vec2.model import Wav2Vec2
from models.wav2vec2.settings import (
    BASE,
    FIXED,
    HF_EPSILON,
    NAMES,
    OMNI,
    PARTS,
    PREFIXES,
    PRETRAINING,
    PUBLISHED,
    SELF_SUPERVISED,
    THEIRS,
    TOKENIZERS,
    WEIGHT_NORM,
    check_config,
)
from models.wav2vec2.tokenizer import SPACE, UNKNOWN, Wav2Vec2Tokenizer, make_tokenizer
from speech.signal.audio import SAMPLE_RATE

HEAD = "lm_head.weight"
MASK = "masked_spec_embed"
ADAPTER = ".adapter_layer."  # in the names of MMS's adapters
# transformers 5 takes this for the space, whatever tokenizer_config.json says. A letter that is the
# same is exported as one that looks like it.
DELIMITER = "|"
LIKE_IT = "\uff5c\u2223\u23d0"
TOKENS = {  # what a tokenizer_config.json means that lacks a key
    "pad_token": "<pad>",  # the blank
    "unk_token": "<unk>",
    "word_delimiter_token": DELIMITER,
    "do_lower_case": False,
}
MOST_SHOWN = 20  # languages in a message
TOKENIZER_BYTES = 1 << 24  # the largest SentencePiece file


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its name. Takes no memory. Check the configuration
    first: it may come from a file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")  # a head without rows
        return checkpoint.shapes_of(lambda: Wav2Vec2(config))


# --- reading --------------------------------------------------------------------------------------


def read_model(
    path: str | Path, language: str | None = None, tokenizer: str | Path | None = None
) -> tuple[dict[str, torch.Tensor], dict, dict]:
    """Weights (fp32, by the names of the network here), configuration and extras of a Hugging Face
    folder or of a fairseq2 file. Runs no code in the files. Raises `UsageError`.

    `language`: whose adapter an MMS folder gives, by default its own. `tokenizer`: the
    SentencePiece file of a fairseq2 file, by default the one beside it. Extras: `tokenizer` (its
    state, see tokenizer.py; empty for a self-supervised model, whose head has no rows), `language`
    (of the adapter, or empty) and `licence` (the hub's name of it; empty if nothing tells it)."""
    path = Path(path)
    if os.path.isdir(path):
        weights, config, extras = _read_folder(path, language)
    else:
        weights, config, extras = _read_fairseq2(path, tokenizer)
    check_config(config, path)
    if not config["vocabulary"]:
        weights[HEAD] = torch.empty(0, config["hidden_size"])
        weights["lm_head.bias"] = torch.empty(0)
    if MASK not in weights:  # a model that was trained without masks
        weights[MASK] = torch.zeros(config["hidden_size"])
    model_files.check_shapes(weights, expected_shapes(config), path, "wav2vec 2.0")
    return weights, config, extras


# --- a Hugging Face folder ------------------------------------------------------------------------


def _read_folder(folder: Path, language: str | None) -> tuple[dict[str, torch.Tensor], dict, dict]:
    content = model_files.read_description(folder, "wav2vec2", "hubert")
    config = _hf_config(content, folder)
    told = _language(folder, language)
    weights = _ours(model_files.read_folder(folder))
    weights = {name: w for name, w in weights.items() if not name.startswith(PRETRAINING)}
    adapter = language and _adapter_file(folder, language)
    if adapter:
        weights |= _adapter(adapter, config)
    state = {}
    if HEAD in weights:
        config["vocabulary"] = _rows(weights, HEAD)
        state = _characters(folder, told, config["vocabulary"])
        config["blank"] = _checked(state, config["vocabulary"], folder / "vocab.json").blank
    elif "ForCTC" in str(content.get("architectures")):
        raise UsageError(f"{folder} lacks {HEAD!r}: it is not a complete wav2vec 2.0 model")
    licence = licence_of(folder, content)
    return weights, config, {"tokenizer": state, "language": told, "licence": licence}


def _rows(weights: dict[str, torch.Tensor], name: str) -> int:
    return next(iter(weights[name].shape), 0)


def _ours(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames a Hugging Face model's tensors."""
    renamed = {}
    for name, tensor in weights.items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        for theirs, ours in WEIGHT_NORM.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def _hf_config(content: dict, folder: Path) -> dict:
    """The configuration in config.json and in the settings of the waveforms, without a head."""
    file = folder / "config.json"
    for key, value in FIXED.items():
        if content.get(key, value) != value:
            raise UsageError(
                f"{file}: {key} is {str(content[key])[:40]!r}; this recipe's network takes"
                f" {value!r} only"
            )
    config = {key: content.get(key, default) for key, default in BASE.items()}
    config["model_type"] = content["model_type"]
    config["vocabulary"] = 0
    config["blank"] = 0
    waveforms = _waveforms(folder)
    rate = waveforms.get("sampling_rate", SAMPLE_RATE)
    if rate != SAMPLE_RATE:
        raise UsageError(
            f"{folder}: its sampling_rate is {str(rate)[:40]!r}; this recipe takes {SAMPLE_RATE}"
            " only"
        )
    config["do_normalize"] = waveforms.get("do_normalize", True)
    config["normalize_eps"] = HF_EPSILON
    config["feat_proj_layer_norm"] = True
    if content["model_type"] == "hubert":
        config["feat_proj_layer_norm"] = content.get("feat_proj_layer_norm", True)
    check_config(config, file)
    return config


def _waveforms(folder: Path) -> dict:
    """The settings of the feature extractor, of either file that transformers writes."""
    of_processor = _optional(folder / "processor_config.json").get("feature_extractor")
    if isinstance(of_processor, dict):
        return of_processor
    return _optional(folder / "preprocessor_config.json")


def _optional(file: Path) -> dict:
    """The content of a JSON file; empty if there is none."""
    return model_files.read_json(file) if file.is_file() else {}


# --- MMS: a vocabulary and an adapter for each language -------------------------------------------


def _language(folder: Path, asked: str | None) -> str:
    """The language whose vocabulary is read; empty if the folder has one vocabulary only. Raises
    `UsageError` if the folder does not have the one that is asked for."""
    vocabularies = _optional(folder / "vocab.json")
    if not vocabularies or not all(isinstance(value, dict) for value in vocabularies.values()):
        if asked:
            raise UsageError(f"--language {asked}: {folder} has no languages; leave it out")
        return ""
    own = _optional(folder / "tokenizer_config.json").get("target_lang")
    told = asked or str(own)
    names = [name for name in vocabularies if name == own or _adapter_file(folder, name)]
    if told in names:
        return told
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    has = ", ".join(names[:MOST_SHOWN]) + more
    problem = f"--language {asked}: {folder} lacks it" if asked else f"{folder} needs --language"
    raise UsageError(f"{problem}; vocab.json and adapters are there for: {has or 'none'}")


def _adapter_file(folder: Path, language: str) -> Path | None:
    """The file of a language's adapter; None if there is none."""
    for suffix in (".safetensors", ".bin"):
        file = folder / f"adapter.{language}{suffix}"
        if os.path.isfile(file):  # pathlib's own raises for a name that is too long
            return file
    return None


def _adapter(file: Path, config: dict) -> dict[str, torch.Tensor]:
    """A language's adapter layers and head. Raises `UsageError` if some are missing, because those
    of another language would stay."""
    adapter = _ours(model_files.floats(model_files.read_tensors(file), file))
    names = expected_shapes(config)
    needed = {name for name in names if ADAPTER in name or name.startswith("lm_head.")}
    if adapter.keys() != needed:
        name = sorted(adapter.keys() ^ needed)[0]
        problem = "lacks" if name in needed else "has unexpected"
        raise UsageError(f"{file} {problem} {name[:60]!r}: it is not an adapter of this model")
    return adapter


# --- tokenizers -----------------------------------------------------------------------------------


def _characters(folder: Path, language: str, size: int) -> dict:
    """The state of the tokenizer in vocab.json, for a head with `size` rows."""
    file = folder / "vocab.json"
    if not file.is_file():
        raise UsageError(f"{folder} lacks vocab.json, the characters of its head")
    told = _told_tokens(folder)
    kind = told.get("tokenizer_class", "Wav2Vec2CTCTokenizer")
    if kind not in ("Wav2Vec2CTCTokenizer", "Wav2Vec2Tokenizer"):
        raise UsageError(
            f"{folder}: its tokenizer is a {str(kind)[:40]}; this recipe takes"
            " Wav2Vec2CTCTokenizer only"
        )
    vocabulary = model_files.read_json(file)
    vocabulary = vocabulary[language] if language else vocabulary
    ids = list(vocabulary.values())
    if not all(type(number) is int and 0 <= number < size for number in ids):
        raise UsageError(f"{file} is not a vocabulary for the {size} rows of the weights' head")
    if len(set(ids)) < len(ids):
        raise UsageError(f"{file} has two characters with the same number")
    names = {number: piece for piece, number in vocabulary.items()}
    for piece, number in _optional(folder / "added_tokens.json").items():
        if type(number) is int and piece not in vocabulary:
            names.setdefault(number, piece)
    # Rows without a name stand for nothing.
    pieces = [names.get(number, f"<{number}>") for number in range(size)]
    unknown = told["unk_token"]
    if told["pad_token"] not in pieces:
        raise UsageError(
            f"{file} lacks {str(told['pad_token'])[:40]!r}, which is the blank in CTC (pad_token in"
            " tokenizer_config.json)"
        )
    return {
        "kind": "characters",
        "pieces": pieces,
        "delimiter": str(told["word_delimiter_token"]),
        "blank": pieces.index(told["pad_token"]),
        "unknown": pieces.index(unknown) if unknown in pieces else None,
        "lower": told["do_lower_case"] is True,
    }


def _told_tokens(folder: Path) -> dict:
    """The settings of the tokenizer, with tokens as texts."""
    told = dict(TOKENS)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _optional(folder / name).items():
            if isinstance(value, dict):
                value = value.get("content")
            if value is not None:
                told[key] = value
    return told


def _checked(state: dict, size: int, file: Path) -> Wav2Vec2Tokenizer:
    """The tokenizer of a state from `file`, for a head with `size` rows. Raises `UsageError`."""
    try:
        return make_tokenizer(state, size)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _sentencepiece_file(place: Path, size: int, named: str | Path | None) -> Path:
    """The SentencePiece file for a head with `size` rows. `place`: the folder in which it is looked
    for if it is not `named`."""
    usual = TOKENIZERS.get(size)
    if not named and not usual:
        raise UsageError(
            f"{place}: the head has {size} rows, which no tokenizer of omniASR has: name its"
            " SentencePiece file with --tokenizer"
        )
    file = Path(named or place / usual)
    if not file.is_file():
        where = f" (Meta has it at {PUBLISHED}{usual})" if usual else ""
        raise UsageError(
            f"{file} is missing, the tokenizer of these weights: put it there, or name it with"
            f" --tokenizer{where}"
        )
    model_files.refuse_pointer(file)
    if file.stat().st_size > TOKENIZER_BYTES:
        raise UsageError(f"{file} is too large for a SentencePiece model")
    return file


# --- fairseq2's files -----------------------------------------------------------------------------


def _read_fairseq2(
    file: Path, tokenizer: str | Path | None
) -> tuple[dict[str, torch.Tensor], dict, dict]:
    content = model_files.read_pickle(file)
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]  # a checkpoint of fairseq2's trainer has no such key
    is_flat = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not is_flat or "encoder_frontend.model_dim_proj.weight" not in content:
        raise UsageError(
            f"{file} is not a wav2vec 2.0 model in fairseq2's form, as omniASR's are; for a Hugging"
            " Face model give its folder"
        )
    names = list(content)
    if any(name.startswith(SELF_SUPERVISED) for name in names):
        names = [name for name in names if not name.startswith((*SELF_SUPERVISED, THEIRS))]
    others = [name for name in names if not name.startswith(PARTS)]
    if others:
        raise UsageError(
            f"{file} has {others[0][:60]!r}, which is no part of a CTC or self-supervised model:"
            " other models of omniASR (LLM) are not for this recipe"
        )
    weights = model_files.floats({from_fairseq2(name): content[name] for name in names}, file)
    config = _omni_config(weights, file)
    state = {}
    if HEAD in weights:
        config["vocabulary"] = _rows(weights, HEAD)
        pieces = _sentencepiece_file(file.parent, config["vocabulary"], tokenizer)
        state = {"kind": "sentencepiece", "model": pieces.read_bytes().hex()}
        config["blank"] = _checked(state, config["vocabulary"], pieces).blank
    return weights, config, {"tokenizer": state, "language": "", "licence": "apache-2.0"}


def from_fairseq2(name: str) -> str:
    """The name that a tensor of fairseq2's has in the network here."""
    for theirs, ours in NAMES.items():
        if name.startswith(theirs) or (theirs.startswith(".") and theirs in name):
            return name.replace(theirs, ours, 1)
    return name


def _omni_config(weights: dict[str, torch.Tensor], file: Path) -> dict:
    """The published configuration with width and layers of these weights, without a head."""
    width = _rows(weights, "feature_projection.projection.weight")
    layers = {
        match[1] for name in weights if (match := re.match(r"encoder\.layers\.(\d+)\.", name))
    }
    for config in OMNI.values():
        if (config["hidden_size"], config["num_hidden_layers"]) == (width, len(layers)):
            return dict(config)
    raise UsageError(
        f"{file}: no omniASR has {len(layers)} layers of width {width}, and the file does not tell"
        " how many attention heads they have"
    )


# --- licences -------------------------------------------------------------------------------------


def licence_of(folder: Path, content: dict) -> str:
    """The hub's name of the licence of a Hugging Face folder, whose config.json is `content`; empty
    if nothing tells it. All that derives from MMS is for non-commercial use, whatever its card
    says."""
    card = _metadata(folder)
    names = f"{content.get('_name_or_path')} {folder.resolve().name} {card}".lower()
    if content.get("adapter_attn_dim") or re.search(r"\bmms-\w", names):
        return "cc-by-nc-4.0"
    told = re.search(r"^license: *[\"']?([\w.-]{1,60})", card, re.MULTILINE)
    return told[1] if told else ""


def _metadata(folder: Path) -> str:
    """The block of metadata at the beginning of README.md; empty if there is none."""
    with contextlib.suppress(UsageError):
        parts = files.read_text(folder / "README.md").split("---\n")
        if len(parts) > 2 and not parts[0]:
            return parts[1]
    return ""


# --- exporting ------------------------------------------------------------------------------------


def export(
    folder: str | Path,
    weights: dict[str, torch.Tensor],
    config: dict,
    tokenizer: dict,
    card: dict[str, str],
) -> list[str]:
    """Writes a folder that `transformers` can load, in fp32, as `model_files.write_export` does,
    and returns the file names. `weights`: by the names of the network here. `tokenizer`: its state.
    `card`: the texts of further files, by their names. Raises `UsageError` and `RunError`."""
    tensors = {}
    for name, tensor in model_files.on_host(weights).items():
        if not name.startswith("lm_head."):
            name = prefix_of(config) + name
        for theirs, ours in WEIGHT_NORM.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    contents = {
        "config.json": _description(config),
        "preprocessor_config.json": _waveform_settings(config),
        **_tokenizer_files(make_tokenizer(tokenizer, config["vocabulary"])),
    }
    texts = {name: files.json_text(content) for name, content in contents.items()}
    fill = functools.partial(model_files.save_tensors, tensors)
    return model_files.write_export(folder, fill, texts | card)


def prefix_of(config: dict) -> str:
    """How transformers' names begin, but those of the head."""
    return f"{config['model_type']}."


def _description(config: dict) -> dict:
    """config.json"""
    is_hubert = config["model_type"] == "hubert"
    described = {
        "architectures": ["HubertForCTC" if is_hubert else "Wav2Vec2ForCTC"],
        "model_type": config["model_type"],
        "exported_by": model_files.EXPORTED,
        "dtype": "float32",
        **{key: config[key] for key in BASE},
        **FIXED,
        "vocab_size": config["vocabulary"],
        "pad_token_id": config["blank"],
        "bos_token_id": None,
        "eos_token_id": None,
        "ctc_loss_reduction": "mean",
        "ctc_zero_infinity": True,
    }
    if is_hubert:
        described["feat_proj_layer_norm"] = config["feat_proj_layer_norm"]
    return described


def _waveform_settings(config: dict) -> dict:
    """preprocessor_config.json"""
    return {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "processor_class": "Wav2Vec2Processor",
        "feature_size": 1,
        "sampling_rate": SAMPLE_RATE,
        "padding_side": "right",
        "padding_value": 0.0,
        "do_normalize": config["do_normalize"],
        # Models with group norm have learned with padding that they take for silence.
        "return_attention_mask": config["feat_extract_norm"] == "layer",
    }


def _tokenizer_files(tokenizer: Wav2Vec2Tokenizer) -> dict[str, dict]:
    """vocab.json, tokenizer_config.json and special_tokens_map.json. transformers prints the
    unknown token as it is named, so it has the name that is printed here."""
    pieces = list(tokenizer.pieces)
    if DELIMITER in pieces:
        letter = next(sign for sign in LIKE_IT if sign not in pieces)
        pieces[pieces.index(DELIMITER)] = letter
        print(f"the letter | is {letter} in the export: for transformers, | is the space")
    pieces = [DELIMITER if piece == SPACE else piece for piece in pieces]
    special = {"pad_token": pieces[tokenizer.blank], "unk_token": None}
    if tokenizer.unknown is not None:
        pieces[tokenizer.unknown] = UNKNOWN
        special["unk_token"] = UNKNOWN
    special |= {"bos_token": None, "eos_token": None}  # they would be further pieces
    settings = {
        "tokenizer_class": "Wav2Vec2CTCTokenizer",
        "processor_class": "Wav2Vec2Processor",
        **special,
        "word_delimiter_token": DELIMITER,
        "replace_word_delimiter_char": " ",
        "do_lower_case": tokenizer.is_lower,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "vocab.json": {piece: number for number, piece in enumerate(pieces)},
        "tokenizer_config.json": settings,
        "special_tokens_map.json": {key: token for key, token in special.items() if token},
    }
