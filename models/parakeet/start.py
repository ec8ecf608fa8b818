"""The start of a Parakeet's training: what this family adds to models/released.py."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

import torch

from common import options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.layers import quieten_branches
from common.options import TRAINS, USUAL, flag
from models import adapters, card, lm_files, onnx_files, released
from models.model_files import with_weights
from models.parakeet import formats, live, settings, vocabulary
from models.parakeet.languages import AUTO, SLOTS, are_slots, slot_of
from models.parakeet.model import Parakeet
from models.parakeet.tokenizer import STATE, ParakeetTokenizer, make_tokenizer, pieces
from models.released import Origin
from speech.decoding import language_model, recogniser

BRANCH_OUTPUTS = (".linear2", ".o_proj", ".pointwise_conv2")  # for quieten_branches
REDUCTIONS = ("mean", "mean_batch", "mean_volume")
SCRATCH_LOSS = {
    "sigma": 0.02,
    "omega": 0.1,
    "fastemit": 0.0,
    "reduction": "mean_volume",
    "ctc_reduction": "mean_volume",
}
CTC_WEIGHT = 0.3  # share of the CTC head's loss, as in NVIDIA's hybrid models
# Peak learning rates: NVIDIA's advice for fine-tuning depends on the hours of speech; from scratch
# the rate depends on the model's width.
FINE_TUNING_RATE = 1e-4
CAREFUL_RATE = 3e-5
MANY_HOURS = 20.0
SMALL_WIDTH = 256
SMALL_RATE = 2e-3
SCRATCH_RATE = 5e-4

NEMO = """
from nemo.collections.asr.models import ASRModel

print(ASRModel.restore_from("FOLDER/model.nemo").transcribe(["recording.wav"]))
"""
LIBRARIES = {"hf": "transformers", "nemo": "nemo", "onnx": "onnx"}  # by --export_format
PROMPTED = {  # by --export_format: the use of a model that is told the language, here "auto"
    "hf": """
import librosa
from transformers import AutoModel, AutoProcessor

processor = AutoProcessor.from_pretrained("FOLDER")
model = AutoModel.from_pretrained("FOLDER")
audio, rate = librosa.load("recording.wav", sr=16_000)
inputs = processor(audio, sampling_rate=rate, language="auto")
tokens = model.generate(**inputs).sequences
print(processor.batch_decode(tokens, skip_special_tokens=True)[0])
""",
    "nemo": """
from nemo.collections.asr.models import ASRModel
from nemo.collections.asr.models.rnnt_bpe_models_prompt import RNNTPromptTranscribeConfig

model = ASRModel.restore_from("FOLDER/model.nemo")
told = RNNTPromptTranscribeConfig(target_lang="auto")
print(model.transcribe(["recording.wav"], override_config=told))
""",
}

FORMS = released.Forms(
    family="Parakeet",
    folder="a Hugging Face folder",
    file="NVIDIA's model.nemo",
    exported="in --export_format",
    fetch="hf download nvidia/parakeet-tdt-0.6b-v3 --local-dir parakeet-tdt-0.6b-v3",
)
# What extend.py does, and this recipe once did.
PREPARED = ("--add_tokens", "--train_tokenizer", "--tokenizer", "--new_language", "--like")
TRANSDUCERS = {"ctc_weight", "joint_dropout"}  # flags for models that have a transducer
# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
EXCLUDES = (
    *(
        (model, "vocab_size", "a released model has its own vocabulary")
        for model in released.MODELS
    ),
    ("stream", "lookahead", "the first says how long the model waits; leave the second out"),
    ("stream", "output_format", "a stream is written to one file; leave the second out"),
    ("stream", "piece_seconds", "a stream is not cut; leave the second out"),
    ("stream", "decoding ctc", "words as they come are the transducer's; leave the second out"),
    ("stream", "lm on", "a stream is decoded without a language model; leave the second out"),
    ("stream", "lm_text", "a stream is decoded without a language model; leave the second out"),
)
NEEDS = (("export_format", ("export",), ""), ("stream", ("transcribe",), ""))
LOSS = {  # a schema of records.mismatch
    "sigma": lambda value: 0 <= value < 10,
    "omega": lambda value: 0 <= value <= 1,
    "fastemit": lambda value: 0 <= value <= 1,
    "reduction": set(REDUCTIONS),
    "ctc_reduction?": set(REDUCTIONS),
    "ctc?": lambda value: 0 <= value <= 1,
}


@dataclass(frozen=True)
class ModelInfo:
    """The record of a model beside its weights."""

    config: Annotated[dict, settings.CONFIG]
    tokenizer: Annotated[dict, STATE]
    loss: Annotated[dict, LOSS]  # `ctc`: the share of the CTC head's beside a transducer's
    source: dict  # settings of the released model that an export keeps
    pretrained: bool  # whether it began from released weights
    # the ids of pieces that extend.py has added, which learn at a rate of their own
    new_pieces: list[int] = field(default_factory=list)
    base: str = ""  # the name of the released model that it was given
    # the slots of the prompt, by name
    languages: Annotated[dict, are_slots] = field(default_factory=dict)

    @property
    def own_vocabulary(self) -> bool:
        """Whether training texts have made the vocabulary, or a part of it."""
        return bool(self.new_pieces) or not self.pretrained


@dataclass(frozen=True)
class StartFlags:
    """Flags of the model that is made, read and written."""

    # fmt: off
    export_format: str = flag(
        ["hf", "nemo", "onnx"], None, None,
        "form of --export: a folder for transformers, one with NeMo's model.nemo, or one for"
        " sherpa-onnx and onnx-asr (hf)", USUAL)
    decoding: str | None = flag(
        ["transducer", "ctc"], None, None,
        "which part of a hybrid model writes the text (transducer)")
    vocab_size: int | None = flag(
        options.number(int, 2, vocabulary.MOST), None, "N",
        "pieces of a model from scratch (by --model_size; demo: characters)", TRAINS)


@dataclass(frozen=True)
class LossFlags:
    """Flags of the loss and of dropout."""

    # fmt: off
    ctc_weight: float | None = flag(
        options.SHARE, None, "X",
        f"share of a CTC head's loss; from scratch it adds the head ({CTC_WEIGHT} for a model with"
        " a CTC head, else 0)", TRAINS)
    dropout: float = flag(options.SHARE, 0.1, "P", "in the encoder (0.1)", TRAINS)
    joint_dropout: float = flag(
        options.SHARE, 0.2, "P", "in the prediction and joint networks (0.2)", TRAINS)


@dataclass(frozen=True)
class NemotronFlags:
    """Flags of models that are told a language and of those that hear a stream. `language`: what a
    model is told where the data do not say it."""

    # fmt: off
    language: str | None = flag(
        None, None, "NAME",
        "the language of utterances whose manifest has none (lang, language, locale, target_lang),"
        " and of files to transcribe (these: auto), such as fi-FI", USUAL)
    lookahead: int | None = flag(
        options.number(int, 0, 1000), None, "FRAMES",
        "of 80 ms that a streaming model waits for in evaluation and transcripts (the model's usual"
        " one); in training each utterance has one of the model's")
    stream: int | None = flag(
        options.POSITIVE, None, "MS",
        "print the words of --transcribe FILE, or of - (16 kHz mono 16-bit samples on standard"
        " input), as they come, after so many milliseconds: 80, 160, 560, 1120, or another number"
        " of the model's")


@dataclass(frozen=True, kw_only=True)
class ParakeetOptions(StartFlags, NemotronFlags, LossFlags, recogniser.Request):
    """The request of the flags. `origin`: where the model starts."""

    origin: Origin


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    group = released.add_arguments(parser, FORMS, settings.SIZES, "110m")
    options.add_record(parser, group, StartFlags)
    adapters.add_arguments(parser, has_peft=True)
    options.add_record(parser, "Nemotron: language and streaming", NemotronFlags)
    options.add_record(parser, "loss", LossFlags)
    parser.refuse(EXCLUDES, NEEDS)
    prepared = f"{vocabulary.COMMAND} makes a model with it, which --model_dir then names"
    parser.hints |= dict.fromkeys(PREPARED, prepared)


def resolve(args, is_demo: bool) -> ParakeetOptions:
    """Fills in the defaults of these flags and returns what they ask for. Raises `UsageError`."""
    origin = released.resolve(args, FORMS, settings.SIZES, "110m", is_demo)
    live.check_source(args.transcribe or [], args.stream)
    return options.read_record(
        ParakeetOptions,
        args,
        export_format=args.export_format or "hf",
        origin=origin,
        **recogniser.Request.resolve(args, recogniser.resolve(args, is_demo, has_times=True)),
    )


# --- the model ------------------------------------------------------------------------------------


class Family(released.Family):
    """Parakeet. The prediction and the joint network, which are small, are trained whole beside
    adapters: their layers are not called in the loss, and a vocabulary may be new."""

    model_info = ModelInfo
    sized = ("d_model", "layers")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    linear = ("linear1", "linear2", "subsampling.linear", "encoder_projector")
    whole = ("decoder.", "joint.", "ctc_head.", "prompt_projector.")
    rows = vocabulary.ROWS

    def read(self, path: str) -> tuple[ModelInfo, dict[str, torch.Tensor]]:
        return read(path)

    def network(self, info: ModelInfo) -> Parakeet:
        return network(info)

    def make_model(self, info: ModelInfo, weights, trains: bool = False) -> Parakeet:
        asked = self.asked
        dropouts = (asked.dropout, asked.joint_dropout) if trains else ()
        model = make_model(info, weights, *dropouts)
        tell(asked, info, model)
        return model

    def check(self, info: ModelInfo, name: str) -> None:
        formats.check_config(info.config, name)
        slots = info.config.get("prompts", {"slots": 0})["slots"]
        if bool(slots) != bool(info.languages) or slots <= max(info.languages.values(), default=-1):
            raise UsageError(f"{name}: its languages are not those of a prompt with {slots} slots")
        tokenizer_of(info)

    def conflicts(self, info: ModelInfo, saved: Saved) -> list[str]:
        flags = super().conflicts(info, saved)
        if self.origin.path and info.pretrained:
            config, theirs = formats.read_settings(self.origin.path)
            if config != info.config or pieces(theirs["tokenizer"]) != pieces(info.tokenizer):
                has = "the checkpoint's model has another shape or vocabulary"
                flags.append(f"{self.origin.flag} {self.origin.path} ({has})")
        return flags

    def saved_flags(self, info: ModelInfo, saved: Saved) -> dict:
        return {"vocab_size": (self.asked.vocab_size, info.config["vocabulary"])}

    def create(self, source: Callable[[], Iterable[str]]) -> ModelInfo:
        """Its vocabulary is made of the training texts."""
        size = self.origin.size
        is_demo = self.origin.size_name == "demo" and self.asked.vocab_size is None
        kind = "char" if is_demo else "bpe"
        state = vocabulary.train_tokenizer(
            source(), kind, self.asked.vocab_size or size["vocabulary"]
        )
        has_ctc = size["ctc"]
        if self.asked.ctc_weight is not None:
            has_ctc = self.asked.ctc_weight > 0
        config = {**size, "vocabulary": len(pieces(state)), "ctc": has_ctc}
        settings.check_config(config, "--from_scratch")
        is_tdt = settings.kind_of(config) == "tdt"
        return ModelInfo(
            config=config,
            tokenizer=state,
            loss=SCRATCH_LOSS if is_tdt else settings.family_of(config).loss,
            source={},
            pretrained=False,
            languages=dict(SLOTS) if "prompts" in size else {},
        )

    def begin(self, info: ModelInfo, weights, run, source):
        """The pieces that --init_from has are trained. The flags change the loss."""
        info = dataclasses.replace(info, new_pieces=self.untrained(info, run.initial))
        self.require_usable(info)
        if is_unified(info):
            print("trained offline only: what this model does in streaming is not looked at")
        return with_loss(info, self.asked), weights

    def require_usable(self, info: ModelInfo) -> None:
        if self.origin.export:
            formats.check_form(self.asked.export_format, info.config, exported(info))

    def tokens(self, info: ModelInfo) -> list[str]:
        return vocabulary.row_names(info)

    def about(self, info: ModelInfo, about: card.About) -> card.About:
        """The licence goes by the name of the released model."""
        return dataclasses.replace(super().about(info, about), base=info.base or about.base)

    def form(self, info: ModelInfo) -> card.Form:
        return self._form(info, self.asked.export_format)

    def lm_names(self, info: ModelInfo) -> lm_files.Names | None:
        tokenizer = tokenizer_of(info)
        tokens = language_model.tokens_of(tokenizer)
        if self.asked.export_format == "nemo":
            return lm_files.for_nemo(tokens, tokenizer.size)
        if settings.is_transducer(info.config):
            return None
        outputs = [*tokenizer.pieces, onnx_files.BLANK]
        return lm_files.for_torchaudio(tokens, outputs, tokenizer.size)

    def adapter_form(self, info: ModelInfo) -> card.Form:
        kind = settings.family_of(info.config)
        use = card.PEFT.replace("CLASS", kind.architecture)
        return dataclasses.replace(self._form(info, "hf"), library="peft", use=use)

    def _form(self, info: ModelInfo, form: str) -> card.Form:
        family = settings.family_of(info.config)
        onnx = onnx_files.USE.replace("TYPE", f"nemo-conformer-{family.kind}")
        uses = {"hf": card.PIPELINE, "nemo": NEMO, "onnx": onnx}
        if info.languages:
            uses |= PROMPTED
        return card.Form(LIBRARIES[form], card.RECOGNITION, family.name, uses[form])

    def write(
        self, info: ModelInfo, weights: dict[str, torch.Tensor], texts: dict[str, str]
    ) -> list[str]:
        form = self.asked.export_format
        return formats.export(self.origin.export, form, weights, info.config, exported(info), texts)


def read(path: str) -> tuple[ModelInfo, dict[str, torch.Tensor]]:
    """A released model: a Hugging Face folder or a .nemo archive. Raises `UsageError`."""
    weights, config, extras = formats.read_model(path)
    return ModelInfo(config=config, **extras, pretrained=True), weights


def network(info: ModelInfo, dropout: float = 0.0, joint_dropout: float = 0.0) -> Parakeet:
    loss = info.loss
    return Parakeet(info.config, loss["sigma"], dropout, joint_dropout, loss["fastemit"])


def make_model(
    info: ModelInfo,
    weights: dict[str, torch.Tensor] | None,
    dropout: float = 0.0,
    joint_dropout: float = 0.0,
) -> Parakeet:
    """A model with these weights, which become its parameters, or with random ones."""
    model = with_weights(lambda: network(info, dropout, joint_dropout), weights)
    if weights is None:
        quieten_branches(model.encoder.layers, BRANCH_OUTPUTS)
    else:
        # The new weights are not in this order yet.
        model.encoder.subsampling.to(memory_format=torch.channels_last)
    return model


def tokenizer_of(info: ModelInfo) -> ParakeetTokenizer:
    return make_tokenizer(info.tokenizer, info.config["vocabulary"])


def given_info(asked: ParakeetOptions, recipe: str) -> ModelInfo | None:
    """The info of the model that a training begins with, read without the weights of a released
    one; None if the training makes it. Raises `UsageError`, also if the flags do not fit it."""
    family = Family(asked)
    if saved := family.first_saved(recipe):
        info = records.read(ModelInfo, saved.model_info, saved.path)
    elif asked.origin.path:
        config, extras = formats.read_settings(asked.origin.path)
        info = ModelInfo(config=config, **extras, pretrained=True)
    else:
        return None
    with torch.device("meta"):
        tell(asked, info, network(info))
    return with_loss(info, asked)


def usual_prompt(info: ModelInfo) -> int:
    """The slot of the prompt if no language is named; 0 for a model without a prompt."""
    first = next(iter(info.languages.values()), 0)
    return info.languages.get(AUTO, first)


def tell(asked: ParakeetOptions, info: ModelInfo, model: Parakeet) -> None:
    """Tells a model which part writes the text, and the language and the look-ahead of batches that
    name none. Raises `UsageError` if it has none."""
    if asked.decoding:
        if (model.ctc_head if asked.decoding == "ctc" else model.joint) is None:
            part = "CTC head" if asked.decoding == "ctc" else "transducer"
            raise UsageError(f"--decoding {asked.decoding}: the model has no {part}; leave it out")
        model.decodes_ctc = asked.decoding == "ctc"
    if asked.language and not info.languages:
        raise UsageError(
            f"--language {asked.language}: this model is told no language; leave it out"
        )
    model.prompt = usual_prompt(info)
    if asked.language:
        model.prompt = slot_of(asked.language, info.languages, "--language")
    if asked.lookahead is not None:
        has = info.config.get("streaming")
        if not has:
            raise UsageError(
                f"--lookahead {asked.lookahead}: this model hears whole utterances; leave it out"
            )
        if asked.lookahead not in has["lookaheads"] and has["left"] % (asked.lookahead + 1):
            raise UsageError(
                f"--lookahead {asked.lookahead}: chunks of {asked.lookahead + 1} frames do not"
                f" divide the {has['left']} frames that this model sees before them; it was trained"
                f" with {', '.join(map(str, sorted(has['lookaheads'])))}"
            )
        model.encoder.lookahead = asked.lookahead


def exported(info: ModelInfo) -> dict:
    """The settings of an export besides weights and configuration."""
    return {
        "tokenizer": info.tokenizer,
        "source": info.source,
        "loss": info.loss,
        "languages": info.languages,
    }


def with_loss(info: ModelInfo, asked: ParakeetOptions) -> ModelInfo:
    """`info` with its loss in training: the model's own, with --ctc_weight. Raises `UsageError`."""
    kind = settings.kind_of(info.config)
    for name in sorted(asked.origin.given & TRANSDUCERS):
        if kind == "ctc":
            model = settings.family_of(info.config).name
            raise UsageError(f"--{name}: a {model} model has no use for it; leave it out")
    loss = dict(info.loss)
    for name in ("reduction", "ctc_reduction"):
        if loss.get(name) == "sum":
            print(
                "the model's loss is a sum over a batch, which would depend on the batch's size:"
                " here it is a mean over labels"
            )
            loss[name] = "mean_volume"
    if not info.config["ctc"] and asked.ctc_weight:
        raise UsageError(
            f"--ctc_weight {asked.ctc_weight:g}: the model has no CTC head; leave it out"
        )
    if loss["omega"] and not {0, 1} <= set(info.config["durations"]):
        print("without the durations 0 and 1 no utterance has the RNN-T loss")
        loss["omega"] = 0.0
    usual = CTC_WEIGHT if info.config["ctc"] else 0.0
    loss["ctc"] = loss.get("ctc", usual) if asked.ctc_weight is None else asked.ctc_weight
    return dataclasses.replace(info, loss=loss)


def is_unified(info: ModelInfo) -> bool:
    """Whether the released model was trained for streaming, too, with the same weights."""
    return "chunked_limited_with_rc" in info.source.get("yaml", "")


def learning_rate(info: ModelInfo, hours: float) -> float:
    """The peak learning rate, by the model's start and the hours of speech."""
    if info.pretrained:
        return FINE_TUNING_RATE if hours >= MANY_HOURS else CAREFUL_RATE
    return SMALL_RATE if info.config["d_model"] <= SMALL_WIDTH else SCRATCH_RATE
