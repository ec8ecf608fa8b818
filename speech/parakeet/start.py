"""The start of a Parakeet's training: what this family adds to speech/released.py."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch

from common import checkpoint, options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.parts import lora
from speech import card, onnx_files, recogniser, released
from speech.layers import quieten_branches
from speech.parakeet import formats, live, settings, vocabulary
from speech.parakeet.languages import (
    AUTO,
    COLUMNS,
    NAME,
    USUAL,
    are_names,
    are_slots,
    slot_of,
    with_new,
)
from speech.parakeet.model import Parakeet
from speech.parakeet.tokenizer import STATE, ParakeetTokenizer, make_tokenizer, pieces
from speech.released import Origin

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

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = ("linear1", "linear2", "subsampling.linear", "encoder_projector")
ADAPTED = {"q,v": ("q_proj", "v_proj"), "attention": ATTENTION, "linear": (*ATTENTION, *LINEAR)}
CARDS = {  # by --export_format; NAME, KIND and CLASS stand for the model's
    "hf": card.Form(
        library="transformers",
        task=card.RECOGNITION,
        family="NAME",
        use="""
from transformers import pipeline

print(pipeline("automatic-speech-recognition", "FOLDER")("recording.wav")["text"])
""",
    ),
    "nemo": card.Form(
        library="nemo",
        task=card.RECOGNITION,
        family="NAME",
        use="""
from nemo.collections.asr.models import ASRModel

print(ASRModel.restore_from("FOLDER/model.nemo").transcribe(["recording.wav"]))
""",
    ),
    "onnx": card.Form(
        library="onnx",
        task=card.RECOGNITION,
        family="NAME",
        use=onnx_files.USE.replace("TYPE", "nemo-conformer-KIND"),
    ),
}

PROMPTED = {  # by library: the use of a model that is told the language, here "auto"
    "transformers": """
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

ADAPTER_CARD = dataclasses.replace(
    CARDS["hf"],
    library="peft",
    use="""
from peft import PeftModel
from transformers import CLASS

base = CLASS.from_pretrained("BASE")  # the folder of the base model
model = PeftModel.from_pretrained(base, "FOLDER")
""",
)

FORMS = released.Forms(
    family="Parakeet",
    folder="a Hugging Face folder",
    file="NVIDIA's model.nemo",
    exported="in --export_format",
    fetch="hf download nvidia/parakeet-tdt-0.6b-v3 --local-dir parakeet",
)
TRAINING = (
    "new_language", "ctc_weight", "tdt_sigma", "tdt_omega", "fastemit_lambda", "loss_reduction",
    "joint_dropout",
)  # fmt: skip
LOSS_FLAGS = {  # of one kind of model or two
    "tdt_sigma": ("tdt",),
    "tdt_omega": ("tdt",),
    "fastemit_lambda": ("tdt", "rnnt"),
    "joint_dropout": ("tdt", "rnnt"),
    "ctc_weight": ("tdt", "rnnt"),
}
# Rows for common.options: flags that exclude each other, and flags that need another one.
EXCLUDES = (
    *released.EXCLUDES,
    *vocabulary.EXCLUDES,
    ("transcribe", "export", "give one of them"),
    ("transcribe", "export_adapter", "give one of them"),
    ("stream", "lookahead", "the first says how long the model waits; leave the second out"),
    ("stream", "piece_seconds", "a stream is not cut; leave the second out"),
    ("stream", "decoding ctc", "words as they come are the transducer's; leave the second out"),
    *((flag, options.COMMAND, options.TRAINS) for flag in TRAINING),
)
NEEDS = (
    *released.NEEDS,
    ("adapter", ("transcribe", "evaluate", "export"), "--init_from trains them"),
    ("export_format", ("export",), ""),
    ("stream", ("transcribe",), ""),
    ("new_language", ("like",), ""),
    ("like", ("new_language",), ""),
)
LOSS = {  # a schema of records.mismatch
    "sigma": lambda value: 0 <= value < 10,
    "omega": lambda value: 0 <= value <= 1,
    "fastemit?": lambda value: 0 <= value <= 1,
    "reduction": set(REDUCTIONS),
    "ctc_reduction?": set(REDUCTIONS),
    "ctc?": lambda value: 0 <= value <= 1,
}


@dataclass(frozen=True)
class ModelInfo:
    """What is saved with a model's weights: its configuration, its tokenizer's state, its loss's
    settings (`ctc` is the share of the CTC head's loss beside a transducer's, `ctc_reduction` its
    reduction), the settings of the released model that an export keeps, whether it began from
    released weights, and whether its vocabulary is another one than the released model's, apart
    from added pieces. `new_pieces`: the ids of pieces that the released model does not have, which
    learn at a rate of their own. `languages`: the slots of the prompt, by name; `new_languages`:
    those that the released model does not have, and the one that each began as."""

    config: Annotated[dict, settings.CONFIG]
    tokenizer: Annotated[dict, STATE]
    loss: Annotated[dict, LOSS]
    source: dict
    pretrained: bool
    own_vocabulary: bool = False
    new_pieces: list[int] = field(default_factory=list)
    languages: Annotated[dict, are_slots] = field(default_factory=dict)
    new_languages: Annotated[dict, are_names] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What the flags ask for. `origin`: where the model starts. `how`: decoding and transcribing.
    `vocabulary`: its changes. `loss`: settings that replace the model's. `loss_flags`: those of
    LOSS_FLAGS that were given. `export_format`: "hf", "nemo" or "onnx". `decoding`: "transducer",
    "ctc", or None for the model's usual one. `language`: what a model with a prompt is told where
    the data do not say it; `new_language`: a name, and the one of the language that it begins as;
    `lookahead`: frames that a streaming model waits for in evaluation; `stream`: milliseconds, for
    words as they come."""

    origin: Origin
    how: recogniser.Options
    vocabulary: vocabulary.Asked
    loss: dict
    loss_flags: frozenset[str]
    export_format: str
    decoding: str | None
    language: str | None
    new_language: tuple[str, str] | None
    lookahead: int | None
    stream: int | None


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    group = released.add_arguments(parser, FORMS, settings.SIZES, "110m")
    group.add_argument(
        "--export_format",
        choices=["hf", "nemo", "onnx"],
        help=(
            "form of --export: a folder for transformers, one with NeMo's model.nemo, or one for"
            " sherpa-onnx and onnx-asr (hf)"
        ),
    )
    group.add_argument(
        "--decoding",
        choices=["transducer", "ctc"],
        help="which part of a hybrid model writes the text (transducer)",
    )
    vocabulary.add_arguments(parser)
    add_language_arguments(parser)
    add_loss_arguments(parser)


def add_language_arguments(parser) -> None:
    group = parser.add_argument_group("Nemotron: language and streaming")
    group.add_argument(
        "--language",
        metavar="NAME",
        help=(
            "the language of utterances whose manifest has none (lang, language, locale,"
            " target_lang), and of files to transcribe (these: auto), such as fi-FI"
        ),
    )
    group.add_argument(
        "--new_language",
        metavar="xx-YY",
        help="teach a language that the model does not know, in a free slot of its prompt",
    )
    group.add_argument(
        "--like", metavar="NAME", help="the known language that --new_language begins as"
    )
    group.add_argument(
        "--lookahead",
        type=options.number(int, 0, 1000),
        metavar="FRAMES",
        help=(
            "of 80 ms that a streaming model waits for in evaluation and transcripts (the model's"
            " usual one); in training each utterance has one of the model's"
        ),
    )
    group.add_argument(
        "--stream",
        type=options.POSITIVE,
        metavar="MS",
        help=(
            "print the words of --transcribe FILE, or of - (16 kHz mono 16-bit samples on standard"
            " input), as they come, after so many milliseconds: 80, 160, 320, 560 or 1120"
        ),
    )


def add_loss_arguments(parser) -> None:
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--tdt_sigma",
        type=options.number(float, 0.0, 1.0),
        metavar="X",
        help="taken from every token's log-probability; favours long durations (the model's, 0.02)",
    )
    loss.add_argument(
        "--tdt_omega",
        type=options.SHARE,
        metavar="P",
        help="chance that an utterance of TDT has the RNN-T loss (the model's, 0.1)",
    )
    loss.add_argument(
        "--fastemit_lambda",
        type=options.SHARE,
        metavar="X",
        help="FastEmit: a transducer writes labels earlier, 0.001 to 0.01 is usual (the model's)",
    )
    loss.add_argument(
        "--loss_reduction",
        choices=REDUCTIONS,
        help=(
            "the mean over utterances of the loss per label (mean), of the loss (mean_batch), or"
            " over labels (mean_volume) (the model's)"
        ),
    )
    loss.add_argument(
        "--ctc_weight",
        type=options.SHARE,
        metavar="X",
        help=(
            f"share of a CTC head's loss; from scratch it adds the head ({CTC_WEIGHT} for a model"
            " with a CTC head, else 0)"
        ),
    )
    loss.add_argument(
        "--dropout", type=options.SHARE, default=0.1, metavar="P", help="in the encoder (0.1)"
    )
    loss.add_argument(
        "--joint_dropout",
        type=options.SHARE,
        default=0.2,
        metavar="P",
        help="in the prediction and joint networks (0.2)",
    )


def resolve(args, is_demo: bool) -> Options:
    """Fills in the defaults of these flags and returns what they ask for. Raises `UsageError`."""
    origin = released.resolve(args, FORMS, settings.SIZES, "110m", is_demo)
    if origin.path and args.vocab_size and not args.train_tokenizer:
        raise UsageError(
            f"{origin.flag} and --vocab_size: a released model has its own vocabulary; add"
            " --train_tokenizer bpe to make a new one, or leave the second out"
        )
    if args.freeze_encoder_steps and origin.may_be_random and not args.init_from:
        raise UsageError(
            "--freeze_encoder_steps: this run begins with a random encoder, which has to learn;"
            " leave it out"
        )
    if args.new_language and not NAME.fullmatch(args.new_language):
        raise UsageError(f"--new_language {args.new_language}: give it the form of fi-FI")
    loss = {
        "sigma": args.tdt_sigma,
        "omega": args.tdt_omega,
        "fastemit": args.fastemit_lambda,
        "reduction": args.loss_reduction,
        "ctc_reduction": args.loss_reduction,
        "ctc": args.ctc_weight,
    }
    live.check_source(args.transcribe or [], args.stream)
    return Options(
        origin=origin,
        how=recogniser.resolve(args, is_demo, has_times=True),
        vocabulary=vocabulary.resolve(args),
        loss={name: value for name, value in loss.items() if value is not None},
        loss_flags=args.given & LOSS_FLAGS.keys(),
        export_format=args.export_format or "hf",
        decoding=args.decoding,
        language=args.language,
        new_language=(args.new_language, args.like) if args.new_language else None,
        lookahead=args.lookahead,
        stream=args.stream,
    )


# --- the model ------------------------------------------------------------------------------------


def family(asked: Options, resumes: bool = True) -> released.Family:
    """What speech/released.py has to know of Parakeet. `resumes`: see `find_conflicts`."""

    def conflicts(info: ModelInfo, saved: Saved) -> list[str]:
        return find_conflicts(asked, info, resumes)

    return released.Family(ModelInfo, read, network, check, conflicts, adapted_layers, "")


def adapted_layers(info: ModelInfo, targets: str) -> lora.Layers:
    """The layers that --lora_targets means. The prediction and the joint network, which are small,
    are trained whole: their layers are not called in the loss, and a vocabulary may be new."""
    with torch.device("meta"):
        model = network(info)
    adapted = [name for name, _ in model.named_modules() if name.endswith(ADAPTED[targets])]
    whole = ("decoder.", "joint.", "ctc_head.", "prompt_projector.")
    return lora.Layers([name for name in adapted if not name.startswith(whole)], whole)


def read(path: str) -> tuple[ModelInfo, dict[str, torch.Tensor]]:
    """A released model: a Hugging Face folder or a .nemo archive. Raises `UsageError`."""
    weights, config, extras = formats.read_model(path)
    return ModelInfo(config=config, **extras, pretrained=True), weights


def network(info: ModelInfo, dropout: float = 0.0, joint_dropout: float = 0.0) -> Parakeet:
    fastemit = info.loss.get("fastemit", 0.0)  # which older checkpoints do not have
    return Parakeet(info.config, info.loss["sigma"], dropout, joint_dropout, fastemit)


def make_model(
    info: ModelInfo,
    weights: dict[str, torch.Tensor] | None,
    dropout: float = 0.0,
    joint_dropout: float = 0.0,
) -> Parakeet:
    """A model with these weights, which become its parameters, or with random ones."""
    if weights is None:
        model = network(info, dropout, joint_dropout)
        quieten_branches(model.encoder.layers, BRANCH_OUTPUTS)
        return model
    with torch.device("meta"):
        model = network(info, dropout, joint_dropout)
    model.load_state_dict(weights, assign=True)
    # The new weights are not in this order yet.
    model.encoder.subsampling.to(memory_format=torch.channels_last)
    return model


def check(info: ModelInfo, name: str) -> None:
    """Raises `UsageError` if the parts of a saved info contradict each other."""
    formats.check_config(info.config, name)
    slots = info.config.get("prompts", {"slots": 0})["slots"]
    if bool(slots) != bool(info.languages) or slots <= max(info.languages.values(), default=-1):
        raise UsageError(f"{name}: its languages are not those of a prompt with {slots} slots")
    tokenizer_of(info)


def tokenizer_of(info: ModelInfo) -> ParakeetTokenizer:
    return make_tokenizer(info.tokenizer, info.config["vocabulary"])


def makes_tokenizer(asked: Options, resumed: Saved | None, initial: Saved | None) -> bool:
    """Whether `choose` makes a tokenizer from the training texts."""
    origin = asked.origin
    if resumed:
        return False
    if asked.vocabulary.is_new:
        return asked.vocabulary.kind is not None
    return not origin.path and (origin.may_be_random or initial is None)


def given_tokenizer(
    asked: Options, recipe: str, init_from: str | None
) -> tuple[ParakeetTokenizer | None, bool]:
    """The tokenizer that a training begins with, read without the weights of a released model, and
    `ModelInfo.own_vocabulary`. The tokenizer is None if the training texts will make it. Raises
    `UsageError`."""
    origin = asked.origin
    resumed = checkpoint.resume(origin.resume, origin.checkpoint_dir, recipe)
    initial = None
    if init_from:
        initial = checkpoint.read_weights(init_from, recipe, "--init_from")
    if makes_tokenizer(asked, resumed, initial):
        return None, True
    wanted = asked.vocabulary
    is_own = wanted.is_new
    if wanted.file and not resumed:
        state = None
    elif origin.path and not resumed and not (initial and initial.adapters):
        state = formats.read_tokenizer(origin.path)
    else:
        saved = resumed or initial
        info = records.read(ModelInfo, saved.model_info, saved.path)
        state = info.tokenizer
        is_own = info.own_vocabulary
    if not resumed:
        state = vocabulary.new_state(wanted, state)
    return make_tokenizer(state, len(pieces(state))), is_own


def find_conflicts(asked: Options, info: ModelInfo, resumes: bool) -> list[str]:
    """The flags that contradict a checkpoint, each with what the checkpoint has. `resumes`: whether
    its vocabulary must stay."""
    origin = asked.origin
    found = released.conflicts(origin, info, ("d_model", "layers"))
    wanted = asked.vocabulary
    has = info.config["vocabulary"]
    usual = range(has - len(wanted.added), has + 1)
    if (resumes or not wanted.is_new) and wanted.size and wanted.size not in usual:
        found.append(f"--vocab_size {wanted.size} (the checkpoint has {has})")
    if resumes:
        found += vocabulary.conflicts(wanted, info)
    if resumes and asked.new_language and asked.new_language[0] not in info.languages:
        has = "the checkpoint does not know it"
        found.append(f"--new_language {asked.new_language[0]} ({has})")
    if origin.path and info.pretrained:
        theirs, _ = read(origin.path)
        config = {**theirs.config, "vocabulary": info.config["vocabulary"]}
        names = pieces(theirs.tokenizer)
        begins_alike = pieces(info.tokenizer)[: len(names)] == names  # others may be added
        is_same = info.own_vocabulary or begins_alike
        if config != info.config or not is_same:
            has = "the checkpoint's model has another shape or vocabulary"
            found.append(f"{origin.flag} {origin.path} ({has})")
    return found


def choose(
    asked: Options,
    resumed: Saved | None,
    initial: Saved | None,
    texts: Callable[[], Iterable[str]],
) -> tuple[ModelInfo, dict[str, torch.Tensor] | None]:
    """The info of the model to be trained, and the released weights that it starts with, or None.
    `resumed` is the checkpoint that the run resumes, `initial` that of --init_from. `texts()`
    returns the training texts, for the vocabulary of a model from scratch. Raises `UsageError`."""
    info, weights = released.choose(
        asked.origin,
        family(asked, resumes=resumed is not None),
        resumed,
        initial,
        lambda: from_scratch(asked, texts),
    )
    if initial and initial.adapters:  # a flag names the model that its adapters are for
        info, trained = saved_model(initial)
        weights = {**weights, **_copies(lora.without_adapters(trained))}
    if initial:  # what was new in that run has been trained
        info = dataclasses.replace(info, new_pieces=[])
    wanted = asked.vocabulary
    if (wanted.is_new or wanted.added) and not resumed:
        if weights is None and initial and not asked.origin.may_be_random:
            weights = _copies(initial.model)
        if weights is not None:
            state = vocabulary.new_state(wanted, info.tokenizer, texts)
            info, weights = vocabulary.with_new_vocabulary(info, weights, state, wanted.is_new)
    if initial and info.languages:
        before, _ = saved_model(initial)
        info = dataclasses.replace(
            info, languages=before.languages, new_languages=before.new_languages
        )
    if asked.new_language and not resumed:
        info = with_new_language(info, initial.model if initial else weights, *asked.new_language)
        name, like = asked.new_language
        print(f"new language: {name} begins as {like}, in slot {info.languages[name]}")
        if name not in tokenizer_of(info).tags:
            print(f"its sentences end without a tag: --add_tokens '<{name}>' makes one")
    check_export(asked, info)
    return with_loss(info, asked), weights


def _copies(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the default device, which is "meta" for a planned run."""
    device = torch.get_default_device()
    return {name: tensor.to(device, copy=True) for name, tensor in weights.items()}


def with_new_language(
    info: ModelInfo, weights: dict[str, torch.Tensor] | None, name: str, like: str
) -> ModelInfo:
    """`info` with a further language in a free slot, which is filled in `weights`. Raises
    `UsageError`."""
    if not info.languages:
        raise UsageError(f"--new_language {name}: this model is told no language; leave it out")
    if weights is None:
        raise UsageError(
            f"--new_language {name}: a model from scratch knows no {like} to begin with; leave it"
            " out"
        )
    slots = info.config["prompts"]["slots"]
    columns = weights[COLUMNS]
    names, weights[COLUMNS] = with_new(info.languages, columns, slots, name, like)
    new = {**info.new_languages, name: like}
    return dataclasses.replace(info, languages=names, new_languages=new)


def tell(asked: Options, info: ModelInfo, model: Parakeet) -> None:
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
    if info.languages:
        known = AUTO if AUTO in info.languages else next(iter(info.languages))
        name = asked.language or known
        model.prompt = slot_of(name, info.languages, "--language")
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


def from_scratch(asked: Options, texts: Callable[[], Iterable[str]]) -> ModelInfo:
    """A model with random weights and, unless a flag names another one, a vocabulary from
    `texts()`."""
    size = asked.origin.size
    wanted = asked.vocabulary
    if not wanted.is_new:
        is_demo = asked.origin.size_name == "demo" and wanted.size is None
        wanted = dataclasses.replace(wanted, kind="char" if is_demo else "bpe")
    state = vocabulary.new_state(wanted, None, texts, size["vocabulary"])
    has_ctc = size["ctc"]
    if "ctc" in asked.loss:
        has_ctc = asked.loss["ctc"] > 0
    config = {**size, "vocabulary": len(pieces(state)), "ctc": has_ctc}
    settings.check_config(config, "--from_scratch")
    is_tdt = settings.kind_of(config) == "tdt"
    return ModelInfo(
        config=config,
        tokenizer=state,
        loss=SCRATCH_LOSS if is_tdt else settings.family_of(config).loss,
        source={},
        pretrained=False,
        own_vocabulary=True,
        languages=dict(USUAL) if "prompts" in size else {},
    )


def exported(info: ModelInfo) -> dict:
    """What an export has besides weights and configuration."""
    return {
        "tokenizer": info.tokenizer,
        "source": info.source,
        "loss": info.loss,
        "languages": info.languages,
    }


def check_export(asked: Options, info: ModelInfo) -> None:
    """Raises `UsageError` if --export is given and its form cannot express this model."""
    if asked.origin.export:
        formats.check_form(asked.export_format, info.config, exported(info))


def saved_model(saved: Saved) -> tuple[ModelInfo, dict[str, torch.Tensor]]:
    """The info and the weights of a checkpoint."""
    return records.read(ModelInfo, saved.model_info, saved.path), saved.model


def rows_by_piece(info: ModelInfo, initial: Saved | None) -> checkpoint.Vocabulary | None:
    """What the rows of the embedding and of the output layers mean, here and in the weights of
    --init_from."""
    if initial is None:
        return None
    before = records.read(ModelInfo, initial.model_info, initial.path)
    tokens = map(vocabulary.row_names, (info, before))
    return checkpoint.Vocabulary(vocabulary.ROWS, *tokens)


def with_loss(info: ModelInfo, asked: Options) -> ModelInfo:
    """`info` with the settings of the loss that the flags ask for. Raises `UsageError`."""
    kind = settings.kind_of(info.config)
    for flag in sorted(asked.loss_flags):
        if kind not in LOSS_FLAGS[flag]:
            name = settings.family_of(info.config).name
            raise UsageError(f"--{flag}: a {name} model has no use for it; leave it out")
    loss = {**info.loss, **asked.loss}
    reductions = [loss["reduction"], loss.get("ctc_reduction")]
    if not {*reductions} <= {*REDUCTIONS, None}:
        raise UsageError(
            f"{asked.origin.path}: the model's loss reduction is 'sum', and its sum over a batch"
            " depends on the batch's size; choose a --loss_reduction"
        )
    if not info.config["ctc"] and asked.loss.get("ctc"):
        raise UsageError(f"--ctc_weight {loss['ctc']:g}: the model has no CTC head; leave it out")
    if loss["omega"] and not {0, 1} <= set(info.config["durations"]):
        raise UsageError(
            "the RNN-T loss needs the durations 0 and 1, which this model does not have: add"
            " --tdt_omega 0"
        )
    loss.setdefault("ctc", CTC_WEIGHT if info.config["ctc"] else 0.0)
    return dataclasses.replace(info, loss=loss)


def is_unified(info: ModelInfo) -> bool:
    """Whether the released model was trained for streaming, too, with the same weights."""
    return "chunked_limited_with_rc" in info.source.get("yaml", "")


def learning_rate(info: ModelInfo, hours: float) -> float:
    """The peak learning rate, by the model's start and the hours of speech."""
    if info.pretrained:
        return FINE_TUNING_RATE if hours >= MANY_HOURS else CAREFUL_RATE
    return SMALL_RATE if info.config["d_model"] <= SMALL_WIDTH else SCRATCH_RATE


def export_trained(asked: Options, info: ModelInfo, model: Parakeet, about: card.About) -> None:
    """--export and --export_adapter after a training. Raises `UsageError` and `RunError`."""
    if asked.origin.export:
        weights = released.trained_weights(asked.origin, family(asked), model)
        export(asked, info, weights, about)
    if asked.origin.export_adapter:
        export_adapter(asked, about)


def export_adapter(asked: Options, about: card.About) -> None:
    """Writes the adapters of a run for peft. Raises `UsageError` and `RunError`."""
    released.export_adapter(asked.origin, family(asked), about, adapter_card)


def adapter_card(info: ModelInfo) -> card.Form:
    return _of_model(ADAPTER_CARD, info)


def _of_model(form: card.Form, info: ModelInfo) -> card.Form:
    """`form` with the names of this model's family."""
    family = settings.family_of(info.config)
    use = PROMPTED.get(form.library, form.use) if info.languages else form.use
    use = use.replace("CLASS", family.architecture).replace("KIND", family.kind)
    return dataclasses.replace(form, family=family.name, use=use)


def export(
    asked: Options, info: ModelInfo, weights: dict[str, torch.Tensor], about: card.About
) -> None:
    """Writes a trained model to --export in the form of --export_format, with a model card."""
    folder = asked.origin.export
    form = asked.export_format
    about = dataclasses.replace(about, is_new=not info.pretrained)
    text = card.readme(Path(folder).resolve().name, about, _of_model(CARDS[form], info))
    names = formats.export(folder, form, weights, info.config, exported(info), text)
    print(f"exported to {folder}: {', '.join(names)}")
