"""The kinds of Parakeet models, and their names in the families of released models: the keys and
fixed settings of NVIDIA's model_config.yaml and of Hugging Face's config.json, names of tensors."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from common import records
from common.errors import UsageError
from common.records import MISSING
from speech.signal.audio import SAMPLE_RATE
from speech.signal.nemo_features import FLOOR, HOP, N_FFT, PRE_EMPHASIS, WINDOW

# --- configurations -------------------------------------------------------------------------------


def _are_frames(values) -> bool:
    """Whether these are different numbers of frames, or none."""
    if type(values) is not list or len(values) > 64:
        return False
    are_counts = all(records.is_within(each, range(1001)) for each in values)
    return are_counts and len(set(values)) == len(values)


# A schema for `records.mismatch`. `vocabulary` is without the blank; `ctc`: a CTC head; `kind`:
# what follows the encoder, by default a TDT transducer; `durations`: none but in TDT; `streaming`:
# a causal encoder without normalised features, whose attention sees chunks of one of the
# `lookaheads` (the first if none is named) + 1 frames, and `left` frames before a chunk; `prompts`:
# a layer that is told the language.
KINDS = ("tdt", "rnnt", "ctc")
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
    "vocabulary": range(1, 200_001),
    "durations": lambda values: _are_frames(values) and (not values or max(values) > 0),
    "ctc": bool,
    "kind?": set(KINDS),
    "streaming?": {
        "left": range(1, 10_001),
        "lookaheads": lambda values: _are_frames(values) and values != [],
    },
    "prompts?": {"slots": range(1, 4097), "width": range(1, 65_537)},
}
TRANSDUCER = {  # what a model with a prediction and a joint network has besides
    "prediction_width": range(1, 8193),
    "prediction_layers": range(1, 17),
    "joint_width": range(1, 8193),
    "max_symbols": range(1, 1001),
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
    "nemotron": make_config(
        1024,
        24,
        8,
        (640, 2),
        13_087,
        kind="rnnt",
        durations=[],
        streaming={"left": 56, "lookaheads": [3, 0, 6, 13]},
        prompts={"slots": 128, "width": 2048},
    ),
}


def check_config(config: dict, path: str | Path) -> None:
    """Raises `UsageError` for a configuration that no Parakeet can have."""
    reason = records.mismatch(config, CONFIG, "its configuration")
    if not reason and is_transducer(config):
        reason = records.mismatch(config, TRANSDUCER, "its configuration")
    if reason:
        raise UsageError(f"{path}: {reason}, which is out of range for Parakeet")
    if config["d_model"] % config["heads"]:
        raise UsageError(f"{path}: heads does not divide d_model")
    if bool(config["durations"]) != (kind_of(config) == "tdt"):
        kind = kind_of(config)
        raise UsageError(f"{path}: a model of kind {kind!r} with durations {config['durations']}")
    if not (is_transducer(config) or config["ctc"]):
        raise UsageError(f"{path}: a CTC model without a CTC head")
    families = [family for family in FAMILIES if family.has(config)]
    if not families or (config["ctc"] and is_transducer(config) and not families[0].hybrid):
        raise UsageError(f"{path}: no Nemotron has such an encoder, prompt or CTC head")


def kind_of(config: dict) -> str:
    """One of KINDS."""
    return config.get("kind", "tdt")


def is_transducer(config: dict) -> bool:
    """Whether there are a prediction and a joint network."""
    return kind_of(config) != "ctc"


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
    # The second is offline, too: with these sizes all frames attend to each other.
    "encoder.att_context_style": ("regular", "chunked_limited_with_rc", MISSING),
    "encoder.untie_biases": (True, MISSING),
    "encoder.conv_norm_type": ("batch_norm", MISSING),
    "encoder.conv_context_size": (None, MISSING),
    "encoder.conv_context_style": ("regular", "dcc", MISSING),
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


# --- what NeMo's model needs besides its shape; dropout and SpecAugment are NVIDIA's --------------

NEMO_USUAL = {
    "sample_rate": SAMPLE_RATE,
    "preprocessor.dither": 1e-05,
    "preprocessor.pad_to": 0,
    "encoder.dropout": 0.1,
    "encoder.dropout_pre_encoder": 0.1,
    "encoder.dropout_emb": 0.0,
    "encoder.dropout_att": 0.1,
    "encoder.feat_out": -1,
    "encoder.pos_emb_max_len": 5000,
    "decoding.strategy": "greedy_batch",
    "tokenizer.dir": "",
    "tokenizer.type": "bpe",
    "spec_augment._target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
    "spec_augment.freq_masks": 2,
    "spec_augment.freq_width": 27,
    "spec_augment.time_masks": 10,
    "spec_augment.time_width": 0.05,
}
NEMO_TRANSDUCER_USUAL = {
    "decoder.prednet.dropout": 0.2,
    "decoder.prednet.t_max": None,
    "joint.jointnet.dropout": 0.2,
    "joint.log_softmax": None,
    "joint.preserve_memory": False,
    "joint.fuse_loss_wer": True,
    "joint.fused_batch_size": 4,
}


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
RNNT_LOSSES = ("default", "warprnnt_numba", "warprnnt", "pytorch", "graph_rnnt")
REDUCTIONS = ("mean", "mean_batch", "mean_volume", "sum")
NO_TERMS = {"sigma": 0.0, "omega": 0.0, "fastemit": 0.0}  # of a loss


@dataclass(frozen=True)
class Family:
    """Released models that have the same settings and the same names of tensors."""

    name: str  # for messages
    kind: str  # the configuration's
    model_type: str  # in Hugging Face's config.json
    architecture: str  # transformers' class
    target: str  # NeMo's class
    hybrid: str | None  # NeMo's class with a CTC head beside the transducer, or None
    nemo: dict[str, tuple]  # keys of a configuration's values in both forms
    hf: dict[str, tuple]
    nemo_fixed: dict[str, tuple]  # settings that must have one of these values, in both forms
    hf_fixed: dict[str, tuple]
    names: dict[str, str]  # parts of the tensors' names, NeMo's to Hugging Face's
    labels: tuple[str, ...]  # NeMo's keys of the pieces
    sizes: tuple[str, ...]  # and of their number
    blank: str  # Hugging Face's key of the blank's id
    hf_vocabulary: int  # number of pieces where Hugging Face's form does not say it
    loss: dict  # settings of the loss where a form does not hold them: Hugging Face's
    nemo_loss: dict[str, str]  # NeMo's keys of its numbers, of which each is 0 if it is missing
    nemo_reduction: str  # NeMo's key of its reduction
    nemo_usual: dict  # what NeMo's model needs besides
    hf_classes: dict[str, str]  # Hugging Face's names of the parts beside the model
    streaming: bool = False  # whether the configuration has it
    prompts: bool = False  # whether the configuration has them
    # keys of values in processor_config.json
    hf_processor: dict[str, tuple] = field(default_factory=dict)
    hf_names: dict[str, str] = field(default_factory=dict)  # Hugging Face's to those here

    def has(self, config: dict) -> bool:
        """Whether a model with this configuration is one of the family."""
        found = (kind_of(config), "streaming" in config, "prompts" in config)
        return found == (self.kind, self.streaming, self.prompts)


TDT = Family(
    name="Parakeet-TDT",
    kind="tdt",
    model_type="parakeet_tdt",
    architecture="ParakeetForTDT",
    target=f"{MODELS}.rnnt_bpe_models.EncDecRNNTBPEModel",
    hybrid=f"{MODELS}.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
    nemo={**NEMO_ENCODER, **NEMO_TRANSDUCER, "durations": ("loss.tdt_kwargs.durations", None)},
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
    labels=("labels", "joint.vocabulary"),
    sizes=("decoder.vocab_size", "joint.num_classes"),
    blank="blank_token_id",
    hf_vocabulary=8192,
    loss={"sigma": 0.02, "omega": 0.1, "fastemit": 0.0, "reduction": "mean"},
    nemo_loss={
        "sigma": "loss.tdt_kwargs.sigma",
        "omega": "loss.tdt_kwargs.omega",
        "fastemit": "loss.tdt_kwargs.fastemit_lambda",
    },
    nemo_reduction="rnnt_reduction",
    nemo_usual={
        **NEMO_USUAL,
        **NEMO_TRANSDUCER_USUAL,
        "decoding.model_type": "tdt",
        "loss.tdt_kwargs.clamp": -1.0,
    },
    hf_classes={
        "encoder": "parakeet_encoder",
        "features": "ParakeetFeatureExtractor",
        "processor": "ParakeetProcessor",
    },
)
RNNT = replace(
    TDT,
    name="Parakeet-RNNT",
    kind="rnnt",
    model_type="parakeet_rnnt",
    architecture="ParakeetForRNNT",
    nemo={**NEMO_ENCODER, **NEMO_TRANSDUCER},
    hf={**HF_ENCODER, **HF_TRANSDUCER},
    nemo_fixed={
        **TDT.nemo_fixed,
        "loss.loss_name": (*RNNT_LOSSES, MISSING),
        "joint.num_extra_outputs": (0, None, MISSING),
    },
    loss={**NO_TERMS, "reduction": "mean_volume"},
    nemo_loss={"fastemit": "loss.warprnnt_numba_kwargs.fastemit_lambda"},
    nemo_usual={
        **NEMO_USUAL,
        **NEMO_TRANSDUCER_USUAL,
        "decoding.model_type": "rnnt",
        "loss.warprnnt_numba_kwargs.clamp": -1.0,
    },
)
CTC = replace(
    TDT,
    name="Parakeet-CTC",
    kind="ctc",
    model_type="parakeet_ctc",
    architecture="ParakeetForCTC",
    target=f"{MODELS}.ctc_bpe_models.EncDecCTCModelBPE",
    hybrid=None,
    nemo=NEMO_ENCODER,
    hf=HF_ENCODER,
    nemo_fixed={
        **NEMO_FEATURES,
        **NEMO_ENCODER_FIXED,
        **_classes({"decoder": "ConvASRDecoder"}),
        **NEMO_TOKENIZER,
    },
    hf_fixed=HF_ENCODER_FIXED,
    names={**ENCODER_NAMES, "decoder.decoder_layers.0.": "ctc_head."},
    labels=("decoder.vocabulary",),
    sizes=("decoder.num_classes",),
    blank="pad_token_id",
    hf_vocabulary=1024,
    loss={**NO_TERMS, "reduction": "mean"},
    nemo_loss={},
    nemo_reduction="ctc_reduction",
    nemo_usual=NEMO_USUAL,
)
NEMOTRON_EN = replace(
    RNNT,
    name="Nemotron",
    model_type="nemotron_asr_streaming",
    architecture="NemotronAsrStreamingForRNNT",
    nemo={**RNNT.nemo, "contexts": ("encoder.att_context_size", None)},
    hf={
        **RNNT.hf,
        "window": ("encoder_config.sliding_window", 71),
        "lookahead": ("encoder_config.default_num_lookahead_tokens", 13),
    },
    nemo_fixed={
        **{key: each for key, each in RNNT.nemo_fixed.items() if "att_context_size" not in key},
        "preprocessor.normalize": ("NA", None),
        "encoder.causal_downsampling": (True,),
        "encoder.att_context_style": ("chunked_limited",),
        "encoder.conv_norm_type": ("layer_norm",),
        "encoder.conv_context_size": ("causal",),
    },
    hf_vocabulary=1024,
    # NeMo's reduction where nothing else is named, and FastEmit as in NVIDIA's template.
    loss={**NO_TERMS, "fastemit": 5e-3, "reduction": "mean_batch"},
    streaming=True,
    hf_processor={"lookaheads": ("supported_num_lookahead_tokens", None)},
    hf_names={
        "encoder.subsampling.conv_in.": "encoder.subsampling.layers.0.",
        "encoder.subsampling.layers.0.depthwise_conv.": "encoder.subsampling.layers.2.",
        "encoder.subsampling.layers.0.pointwise_conv.": "encoder.subsampling.layers.3.",
        "encoder.subsampling.layers.1.depthwise_conv.": "encoder.subsampling.layers.5.",
        "encoder.subsampling.layers.1.pointwise_conv.": "encoder.subsampling.layers.6.",
    },
    hf_classes={
        "encoder": "nemotron_asr_streaming_encoder",
        "features": "NemotronAsrStreamingFeatureExtractor",
        "processor": "NemotronAsrStreamingProcessor",
    },
)
NEMOTRON = replace(
    NEMOTRON_EN,
    model_type="nemotron3_5_asr",
    architecture="Nemotron3_5AsrForRNNT",
    target=f"{MODELS}.rnnt_bpe_models_prompt.EncDecRNNTBPEModelWithPrompt",
    hybrid=None,
    nemo={
        **NEMOTRON_EN.nemo,
        "slots": ("model_defaults.num_prompts", 128),
        "languages": ("model_defaults.prompt_dictionary", None),
    },
    hf={
        **NEMOTRON_EN.hf,
        "slots": ("num_prompts", 128),
        "width": ("prompt_intermediate_size", 2048),
        "auto": ("default_prompt_id", 101),
    },
    nemo_fixed={**NEMOTRON_EN.nemo_fixed, "model_defaults.initialize_prompt_feature": (True,)},
    names={
        **NEMOTRON_EN.names,
        "prompt_kernel.0.": "prompt_projector.linear_1.",
        "prompt_kernel.2.": "prompt_projector.linear_2.",
    },
    hf_vocabulary=13_087,
    prompts=True,
    hf_processor={
        **NEMOTRON_EN.hf_processor,
        "slots": ("num_prompts", 128),
        "languages": ("prompt_dictionary", None),
    },
    hf_classes={**NEMOTRON_EN.hf_classes, "processor": "Nemotron3_5AsrProcessor"},
)
FAMILIES = (TDT, RNNT, CTC, NEMOTRON_EN, NEMOTRON)


def family_of(config: dict) -> Family:
    """The family of models with such a configuration."""
    return next(family for family in FAMILIES if family.has(config))
