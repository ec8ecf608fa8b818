"""What a Parakeet model can be, and what the families of released models call it: the keys and
fixed settings of NVIDIA's model_config.yaml and of Hugging Face's config.json, names of tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common import records
from common.errors import UsageError
from common.records import MISSING
from speech.audio import SAMPLE_RATE
from speech.parakeet.features import FLOOR, HOP, N_FFT, PRE_EMPHASIS, WINDOW

# --- configurations -------------------------------------------------------------------------------


def _are_durations(values) -> bool:
    if type(values) is not list or not 0 < len(values) <= 64:
        return False
    if not all(records.is_within(value, range(1001)) for value in values):
        return False
    return len(set(values)) == len(values) and max(values) > 0


def _are_lookaheads(values) -> bool:
    if type(values) is not list or not 0 < len(values) <= 64:
        return False
    return len(set(values)) == len(values) and all(
        records.is_within(value, range(1001)) for value in values
    )


# A schema for `records.mismatch`. `vocabulary` is without the blank; `ctc`: a CTC head beside the
# transducer; `kind`: what is decoded, TDT if it is missing; `streaming`: a causal encoder without
# normalised features, whose attention sees chunks of one of the `lookaheads` (the first if none is
# named) + 1 frames, and `left` frames before a chunk; `prompts`: a layer that is told the language.
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
    "durations": _are_durations,
    "ctc": bool,
    "kind?": {"tdt"},
    "streaming?": {"left": range(1, 10_001), "lookaheads": _are_lookaheads},
    "prompts?": {"slots": range(1, 4097), "width": range(1, 65_537)},
}


def make_config(
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


SIZES = {  # the demo's texts are short words, letter by letter
    "demo": make_config(144, 4, 4, (192, 1), num_mel_bins=80, channels=64, subsampling=4),
    "110m": make_config(
        512, 17, 8, (640, 1), num_mel_bins=80, biases=True, scale_input=True, ctc=True
    ),
    "0.6b": make_config(1024, 24, 8, (640, 2), 8192),
}


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no Parakeet can have."""
    if reason := records.mismatch(config, CONFIG, "its configuration"):
        raise UsageError(f"{path}: {reason}, which is out of range for Parakeet")
    if config["d_model"] % config["heads"]:
        raise UsageError(f"{path}: heads does not divide d_model")


# --- keys of both forms ---------------------------------------------------------------------------
# By a configuration's names: the key, and the value if the key is missing; None: it must be there.

NEMO_ENCODER = {
    "num_mel_bins": ("encoder.feat_in", None),
    "d_model": ("encoder.d_model", None),
    "layers": ("encoder.n_layers", None),
    "heads": ("encoder.n_heads", 4),
    "kernel": ("encoder.conv_kernel_size", 31),
    "subsampling": ("encoder.subsampling_factor", 4),
    "channels": ("encoder.subsampling_conv_channels", -1),
    "biases": ("encoder.use_bias", True),
    "scale_input": ("encoder.xscaling", True),
}
NEMO_TRANSDUCER = {
    "prediction_width": ("decoder.prednet.pred_hidden", None),
    "joint_width": ("joint.jointnet.joint_hidden", None),
    "prediction_layers": ("decoder.prednet.pred_rnn_layers", None),
    "max_symbols": ("decoding.greedy.max_symbols", 10),
}
HF_ENCODER = {
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
}
HF_TRANSDUCER = {
    "prediction_width": ("decoder_hidden_size", 640),
    "prediction_layers": ("num_decoder_layers", 2),
    "max_symbols": ("max_symbols_per_step", 10),
}


# --- settings that the network here has in one form only, with their accepted values --------------


def _classes(parts: dict[str, str]) -> dict[str, tuple]:
    return {
        f"{part}._target_": (f"nemo.collections.asr.modules.{name}", MISSING)
        for part, name in parts.items()
    }


NEMO_FEATURES = {
    "preprocessor.sample_rate": (SAMPLE_RATE, MISSING),
    "preprocessor.window_size": (WINDOW / SAMPLE_RATE,),
    "preprocessor.window_stride": (HOP / SAMPLE_RATE, MISSING),
    "preprocessor.n_window_size": (WINDOW, None, MISSING),
    "preprocessor.n_window_stride": (HOP, None, MISSING),
    "preprocessor.window": ("hann", MISSING),
    "preprocessor.normalize": ("per_feature", MISSING),
    "preprocessor.n_fft": (N_FFT, None, MISSING),
    "preprocessor.preemph": (PRE_EMPHASIS, MISSING),
    "preprocessor.lowfreq": (0, None, MISSING),
    "preprocessor.highfreq": (8000, None, MISSING),
    "preprocessor.log": (True, MISSING),
    "preprocessor.log_zero_guard_type": ("add", MISSING),
    "preprocessor.log_zero_guard_value": (FLOOR, MISSING),
    "preprocessor.exact_pad": (False, MISSING),
    "preprocessor.mag_power": (2.0, MISSING),
    "preprocessor.mel_norm": ("slaney", MISSING),
    "preprocessor.frame_splicing": (1, MISSING),
    "preprocessor.pad_value": (0, MISSING),
    **_classes({"preprocessor": "AudioToMelSpectrogramPreprocessor"}),
}
NEMO_ENCODER_FIXED = {
    "encoder.subsampling": ("dw_striding",),
    "encoder.causal_downsampling": (False, MISSING),
    "encoder.reduction": (None, MISSING),
    "encoder.reduction_factor": (1, None, MISSING),
    "encoder.self_attention_model": ("rel_pos", MISSING),
    "encoder.att_context_size": ([-1, -1], [[-1, -1]], None, MISSING),
    "encoder.att_context_style": ("regular", MISSING),
    "encoder.untie_biases": (True, MISSING),
    "encoder.conv_norm_type": ("batch_norm", MISSING),
    "encoder.conv_context_size": (None, MISSING),
    "encoder.conv_context_style": ("regular", MISSING),
    **_classes({"encoder": "ConformerEncoder"}),
}
NEMO_TRANSDUCER_FIXED = {
    "decoder.normalization_mode": (None, MISSING),
    "decoder.blank_as_pad": (True, MISSING),
    "joint.jointnet.activation": ("relu",),
    **_classes(
        {"decoder": "RNNTDecoder", "joint": "RNNTJoint", "aux_ctc.decoder": "ConvASRDecoder"}
    ),
}
NEMO_TOKENIZER = {"tokenizer.type": ("bpe", "BPE")}
HF_ENCODER_FIXED = {
    "encoder_config.hidden_act": ("silu", MISSING),
    "encoder_config.subsampling_conv_kernel_size": (3, MISSING),
    "encoder_config.subsampling_conv_stride": (2, MISSING),
}
HF_TRANSDUCER_FIXED = {"hidden_act": ("relu", MISSING)}
FEATURES = {  # of ParakeetFeatureExtractor
    "sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": N_FFT, "win_length": WINDOW,
    "preemphasis": PRE_EMPHASIS, "padding_value": 0.0,
}  # fmt: skip


# --- names of tensors -----------------------------------------------------------------------------
# Parts of names: NeMo's to those of the network here, which are Hugging Face's.

ENCODER_NAMES = {
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
}
TRANSDUCER_NAMES = {
    "decoder.prediction.embed.": "decoder.embedding.",
    "decoder.prediction.dec_rnn.lstm.": "decoder.lstm.",
    "joint.enc.": "encoder_projector.",
    "joint.pred.": "decoder.decoder_projector.",
    "joint.joint_net.2.": "joint.head.",
    "ctc_decoder.decoder_layers.0.": "ctc_head.",
}
FEATURIZER = "preprocessor.featurizer."  # NeMo's window (400,) and mel filters (1, bins, 257)
# The last layer of NeMo's joint network without and with dropout.
HEAD = "joint.joint_net.1."
HEAD_AFTER_DROPOUT = "joint.joint_net.2."


# --- families -------------------------------------------------------------------------------------

MODELS = "nemo.collections.asr.models"


@dataclass(frozen=True)
class Family:
    """Released models that have the same settings and the same names of tensors.

    name             for messages
    kind             the configuration's
    model_type       in Hugging Face's config.json
    architecture     transformers' class
    target           NeMo's class
    hybrid           NeMo's class with a CTC head beside the transducer
    nemo, hf         keys of a configuration's values in both forms
    nemo_fixed, hf_fixed  settings that must have one of these values
    names            parts of the tensors' names, NeMo's to Hugging Face's
    rows             tensor with a row for each piece and for the blank"""

    name: str
    kind: str
    model_type: str
    architecture: str
    target: str
    hybrid: str
    nemo: dict[str, tuple]
    hf: dict[str, tuple]
    nemo_fixed: dict[str, tuple]
    hf_fixed: dict[str, tuple]
    names: dict[str, str]
    rows: str


TDT = Family(
    name="Parakeet-TDT",
    kind="tdt",
    model_type="parakeet_tdt",
    architecture="ParakeetForTDT",
    target=f"{MODELS}.rnnt_bpe_models.EncDecRNNTBPEModel",
    hybrid=f"{MODELS}.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
    nemo={
        **NEMO_ENCODER,
        **NEMO_TRANSDUCER,
        "durations": ("loss.tdt_kwargs.durations", None),
    },
    hf={**HF_ENCODER, **HF_TRANSDUCER, "durations": ("durations", [0, 1, 2, 3, 4])},
    nemo_fixed={
        "loss.loss_name": ("tdt",),
        **NEMO_FEATURES,
        **NEMO_ENCODER_FIXED,
        **NEMO_TRANSDUCER_FIXED,
        **NEMO_TOKENIZER,
    },
    hf_fixed={**HF_TRANSDUCER_FIXED, **HF_ENCODER_FIXED},
    names={**ENCODER_NAMES, **TRANSDUCER_NAMES},
    rows="decoder.embedding.weight",
)
FAMILIES = (TDT,)


def family_of(config: dict) -> Family:
    """The family of models with such a configuration."""
    kind = config.get("kind", "tdt")
    return next(family for family in FAMILIES if family.kind == kind)


def family_of_folder(model_type: str) -> Family:
    """The family of a Hugging Face folder; a `model_type` is one of `model_types`."""
    return next(family for family in FAMILIES if family.model_type == model_type)


def family_of_archive(content: dict) -> Family:
    """The family of a `.nemo` archive with these settings."""
    return TDT


def model_types() -> Iterable[str]:
    return [family.model_type for family in FAMILIES]
