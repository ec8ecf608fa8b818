"""Configurations of wav2vec 2.0 models, the sizes of omniASR, and the names of its tensors."""

from pathlib import Path

from common import records
from common.errors import UsageError

# --- configurations -------------------------------------------------------------------------------


def _is_epsilon(value) -> bool:
    return type(value) is float and 0 < value < 1


WIDTH = range(1, 16_385)
LAYERS = range(1, 257)
KERNEL = range(1, 1025)
# A schema for `records.mismatch`, with the keys of transformers' config.json. What it does not
# have: `vocabulary`, the rows of the CTC head (0: the model is self-supervised and has none yet);
# `blank`, one of them; `do_normalize` and `normalize_eps`: whether each waveform is normalised, and
# what is added to its variance.
CONFIG = {
    "model_type": {"wav2vec2", "hubert"},
    "feat_extract_norm": {"layer", "group"},
    "do_stable_layer_norm": bool,
    "conv_bias": bool,
    "conv_dim": [WIDTH],
    "conv_kernel": [KERNEL],
    "conv_stride": [KERNEL],
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": LAYERS,
    "intermediate_size": range(1, (1 << 16) + 1),
    "num_conv_pos_embeddings": KERNEL,
    "num_conv_pos_embedding_groups": KERNEL,
    "layer_norm_eps": _is_epsilon,
    "adapter_attn_dim": (type(None), WIDTH),
    "vocabulary": range(200_001),
    "blank": range(200_000),
    "do_normalize": bool,
    "normalize_eps": _is_epsilon,
    "feat_proj_layer_norm": bool,  # which only HuBERT may lack
}
MOST_CONVOLUTIONS = 16
BASE = {  # what a config.json means that lacks a key
    "feat_extract_norm": "group",
    "do_stable_layer_norm": False,
    "conv_bias": False,
    "conv_dim": [512] * 7,
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
    "conv_stride": [5, 2, 2, 2, 2, 2, 2],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_conv_pos_embeddings": 128,
    "num_conv_pos_embedding_groups": 16,
    "layer_norm_eps": 1e-5,
    "adapter_attn_dim": None,
}
HF_EPSILON = 1e-7  # `normalize_eps` in transformers
META_EPSILON = 1e-5  # and in fairseq2


def make_config(width: int, layers: int, heads: int = 16, **others) -> dict:
    """A configuration with the proportions of omniASR, without a head, and `others`."""
    config = {
        "model_type": "wav2vec2",
        **BASE,
        "feat_extract_norm": "layer",
        "do_stable_layer_norm": True,
        "conv_bias": True,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocabulary": 0,
        "blank": 0,
        "do_normalize": True,
        "normalize_eps": META_EPSILON,
        "feat_proj_layer_norm": True,
    }
    return {**config, **others}


# omniASR by width and layers. Its files do not tell the heads, which are 16 in every size.
OMNI = {
    "300m": make_config(1024, 24),
    "1b": make_config(1280, 48),
    "3b": make_config(2048, 60),
    "7b": make_config(2048, 128),
}
# A model from scratch of omniASR's sizes has as many rows as its head, so that a plan without
# weights is that of a released model.
SIZES = {
    # Its first convolution is as long as a window of a spectrum, so that it can begin as a filter
    # bank (scratch.py). Seven short convolutions need more than the demo's data to become one.
    "demo": make_config(
        144,
        4,
        4,
        conv_dim=[160, 144, 144],
        conv_kernel=[256, 3, 3],
        conv_stride=[80, 2, 2],
        num_conv_pos_embeddings=64,
    ),
    "300m": {**OMNI["300m"], "vocabulary": 10_288},
    "1b": {**OMNI["1b"], "vocabulary": 10_288},
}


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no such network can have."""
    if reason := records.mismatch(config, CONFIG, "its configuration"):
        raise UsageError(f"{path}: {reason}, which is out of range for wav2vec 2.0")
    lengths = {len(config[key]) for key in ("conv_dim", "conv_kernel", "conv_stride")}
    if len(lengths) > 1 or not 0 < max(lengths) <= MOST_CONVOLUTIONS:
        raise UsageError(
            f"{path}: conv_dim, conv_kernel and conv_stride must be lists of the same length, 1 to"
            f" {MOST_CONVOLUTIONS}"
        )
    for key in ("num_attention_heads", "num_conv_pos_embedding_groups"):
        if config["hidden_size"] % config[key]:
            raise UsageError(f"{path}: {key} does not divide hidden_size")
    if config["adapter_attn_dim"] and not config["do_stable_layer_norm"]:
        raise UsageError(f"{path}: adapter_attn_dim needs do_stable_layer_norm")
    if config["vocabulary"] and config["blank"] >= config["vocabulary"]:
        raise UsageError(f"{path}: the blank {config['blank']} is beyond the vocabulary")


# --- Hugging Face's form --------------------------------------------------------------------------

FIXED = {  # settings that the network here has in one form only
    "hidden_act": "gelu",
    "feat_extract_activation": "gelu",
    "add_adapter": False,  # strided convolutions after the encoder
    "conv_pos_batch_norm": False,
}
PREFIXES = ("wav2vec2.", "hubert.")  # of all names but those of the head
# The positional convolution's weight norm has other names since PyTorch 2.1.
WEIGHT_NORM = {
    ".conv.parametrizations.weight.original0": ".conv.weight_g",
    ".conv.parametrizations.weight.original1": ".conv.weight_v",
}
PRETRAINING = ("quantizer.", "project_q.", "project_hid.")  # parts that only self-training needs

# --- omniASR's form -------------------------------------------------------------------------------

PARTS = ("encoder_frontend.", "encoder.", "final_proj.", "masker.")  # how names begin
# Parts of names: fairseq2's to those of the network here.
NAMES = {
    "encoder_frontend.feature_extractor.layers.": "feature_extractor.conv_layers.",
    "encoder_frontend.post_extract_layer_norm.": "feature_projection.layer_norm.",
    "encoder_frontend.model_dim_proj.": "feature_projection.projection.",
    "encoder_frontend.pos_encoder.": "encoder.pos_conv_embed.",
    ".self_attn_layer_norm.": ".layer_norm.",
    ".self_attn.output_proj.": ".attention.out_proj.",
    ".self_attn.": ".attention.",
    ".ffn_layer_norm.": ".final_layer_norm.",
    ".ffn.inner_proj.": ".feed_forward.intermediate_dense.",
    ".ffn.output_proj.": ".feed_forward.output_dense.",
    "final_proj.": "lm_head.",
    "masker.temporal_mask_embed": "masked_spec_embed",
}
SELF_SUPERVISED = ("quantizer.", "final_target_proj.")  # a file with these has no head:
THEIRS = "final_proj."  # it belongs to them then
TOKENIZERS = {  # the tokenizer's file by the rows of the head
    9812: "omniASR_tokenizer.model",
    10_288: "omniASR_tokenizer_written_v2.model",
}
PUBLISHED = "https://dl.fbaipublicfiles.com/mms/"  # where Meta has these files
