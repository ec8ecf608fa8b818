"""Where a Whisper starts: its flags, what a checkpoint keeps about it, its learning rate, and its
export."""

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from torch import Tensor

from common import checkpoint, options, records
from common.checkpoint import Saved
from common.errors import DataError, UsageError
from common.options import TRAINS, USUAL, OnOff, flag
from common.parts import lora
from models import adapters, card, released
from models.whisper import decoding, formats, scratch
from models.whisper.model import FRAME, LAYERS, Whisper
from models.whisper.tokenizer import (
    STATE,
    TASKS,
    TRANSLATE,
    WhisperTokenizer,
    in_task,
    language_code,
    make_tokenizer,
    read_tokenizer,
    suppressed,
)
from speech.data import splits
from speech.data.columns import Corpus
from speech.decoding import recogniser
from speech.decoding.long import BY_OVERLAP, BY_PAUSES, SHORT_CLIPS, Cutting
from speech.signal.audio import SAMPLE_RATE
from speech.writing import languages

BEAM_SIZE = 5
PAD_SHARE = 0.05
AUXILIARY_WEIGHT = 0.3  # share of the encoder's own loss, from scratch
# Peak learning rates of fine-tuning by width: a fortieth of pre-training's.
FINE_TUNING_RATES = {384: 3.75e-5, 512: 2.5e-5, 768: 1.25e-5, 1024: 6.25e-6, 1280: 4.4e-6}
SMALL_RATE = 2e-3  # from scratch, for models narrower than the smallest released one
SHAPE = ("d_model", "encoder_layers", "decoder_layers", "attention_heads")
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")  # in generation_config.json
ALIGNED = (
    "a released encoder is aligned already, and its vocabulary of 50,257 would need 3 GB of CTC"
    " scores a batch"
)
FORMS = released.Forms(
    family="Whisper",
    folder="a Hugging Face folder",
    file="OpenAI's base.pt",
    exported="for transformers, with OpenAI's model.pt",
    fetch="hf download openai/whisper-base --local-dir whisper-base",
)
TOKENS = range(formats.CONFIG["vocab_size"][-1])
TRANSLATIONS = """
from transformers import pipeline

translate = pipeline("automatic-speech-recognition", "FOLDER")
print(translate("recording.wav", generate_kwargs={"task": "translate"})["text"])
"""

# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
OWN_SHAPE = "a released model has its own shape; leave one of them out"
FROZEN = "a frozen encoder knows inputs of 30 s only; leave one of them out"
EXCLUDES = (
    *((model, flag, OWN_SHAPE) for model in released.MODELS for flag in SHAPE),
    ("freeze_encoder", "pad_to_30s False", FROZEN),
    ("pad_share", "pad_to_30s", "the second pads every utterance; leave one of them out"),
    ("pad_share", "freeze_encoder", "the second pads every utterance; leave one of them out"),
    ("max_target_tokens", "transcribe", "the first is for texts that are given; leave it out"),
)
NEEDS = (
    (
        "tokenizer_file",
        released.MODELS,
        "from scratch the tokenizer is made from the training text",
    ),
    (
        "freeze_encoder",
        (*released.MODELS, "resume", "init_from", "dry_run"),
        "a random encoder would stay random",
    ),
    ("beam_size", ("decoding beam",), ""),
)


@dataclass(frozen=True)
class ModelInfo:
    """A model's record, from which it is rebuilt."""

    config: Annotated[dict, formats.CONFIG]
    tokenizer: Annotated[dict, STATE]
    # outputs of the additional layer on the encoder, without the blank
    ctc_tokens: Annotated[int, TOKENS]
    # A released model's generation_config.json, with the tokens that are never generated.
    generation: Annotated[dict, {f"{name}?": [TOKENS] for name in SUPPRESSED}]
    # Whether it began with released weights, and so is always evaluated on inputs padded to the
    # longest one, as other programs read it.
    pretrained: bool
    pad_to_30s: bool  # whether it was trained on padded inputs alone, and is evaluated on such, too
    times: bool = False  # whether it was trained with times (--timestamp_share)


def _size(what: str, key: str):
    """A flag of the size of a model from scratch, where it is not --model_size's."""
    kind = options.number(int, 1, formats.CONFIG[key][-1])
    return flag(kind, None, "N", f"{what} of a model from scratch (by --model_size)")


@dataclass(frozen=True)
class StartFlags:
    """Flags of the model, its vocabulary and its language."""

    # fmt: off
    tokenizer_file: str | None = flag(
        options.path, None, "PATH",
        "tokenizer.json, a folder or multilingual.tiktoken (next to the model)")
    d_model: int | None = _size("width", "d_model")
    encoder_layers: int | None = _size("encoder layers", "encoder_layers")
    decoder_layers: int | None = _size("decoder layers", "decoder_layers")
    attention_heads: int | None = _size("heads of every attention", "encoder_attention_heads")
    language: str | None = flag(
        language_code, None, "NAME",
        "the language of the texts, such as sw or Swahili; one without a token borrows that of"
        " another: mdw=ln ()")
    task: str | None = flag(
        TASKS, None, None,
        "what the texts are: what is said in --language, or its translation into another language"
        " (transcribe)")
    freeze_encoder: bool = flag(
        OnOff, False, None, "train the decoder only, with inputs of 30 s (off)", USUAL, TRAINS)


@dataclass(frozen=True)
class TrainingFlags:
    """How the model is trained."""

    # fmt: off
    dropout: float = flag(options.SHARE, 0.0, "P", "dropout in all layers (0)", TRAINS)
    label_smoothing: float = flag(
        options.SHARE, 0.0, "P", "label smoothing of the decoder's targets (0)", TRAINS)
    ctc_weight: float | None = flag(
        options.SHARE, None, "X",
        "share of an auxiliary CTC loss on the encoder of a model from scratch (0.3 there)", TRAINS)
    pad_share: float | None = flag(
        options.SHARE, None, "X",
        "share of utterances padded to 30 s from the middle epoch on, because transformers always"
        " pads when it decodes (0.05)", TRAINS)
    pad_to_30s: bool | None = flag(
        OnOff, None, None,
        "pad all utterances to 30 s, in training and decoding (off; on with --freeze_encoder)",
        TRAINS)
    max_target_tokens: int | None = flag(
        options.number(int, 8, formats.CONFIG["max_target_positions"][-1]), None, "N",
        "reject longer transcripts, in tokens with the prompt (the decoder's positions)")


@dataclass(frozen=True, kw_only=True)
class WhisperOptions(StartFlags, TrainingFlags, recogniser.Request):
    """The request of a Whisper recipe's flags."""

    origin: released.Origin  # where the model starts
    vocab_size: int | None
    vocabulary: int | None  # the tokens of a planned run without data; None: the tokenizer's
    auxiliary: dict[str, float]  # the shares of the encoder's auxiliary losses, by flag
    suppress: bool  # the tokens that a released model does not generate


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(
    parser, sizes: dict[str, dict], language: str | None, usual: str, **changes
) -> None:
    """`sizes`: names of model sizes to configurations; `language`: the default, which the help
    calls `usual`; `changes`: as in `options.add_record`."""
    model = released.add_arguments(parser, FORMS, sizes, "base")
    parser.hints["--align"] = "recipes/wav2vec2_ctc.py aligns a recording with its text"
    options.add_record(parser, model, StartFlags, language=(language, usual), **changes)
    adapters.add_arguments(parser, has_peft=True)
    options.add_record(parser, "losses and padding", TrainingFlags)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(
    args,
    sizes: dict[str, dict],
    is_demo: bool,
    how: recogniser.DecodingOptions,
    auxiliary: tuple[str, ...] = ("ctc_weight",),
    suppress: bool = True,
    demo_language: str | None = None,
    record: type = WhisperOptions,
) -> WhisperOptions:
    """Fills in the defaults of these flags and returns what they ask for. `sizes`: as in
    `add_arguments`. `auxiliary`: the flags that give shares to losses of the encoder. `record`:
    the class of what is returned. Raises `UsageError`."""
    origin = released.resolve(args, FORMS, sizes, "base", is_demo)
    if released.exports_only(origin):
        demo_language = None
    language = languages.resolve(args, demo_language, may_tell=bool(origin.path))
    if origin.path and args.ctc_weight:
        raise UsageError(f"--ctc_weight is for models from scratch: {ALIGNED}")
    if args.tokenizer_file and not os.path.exists(args.tokenizer_file):
        raise UsageError(f"--tokenizer_file {args.tokenizer_file}: no such file or folder")
    if args.ctc_weight is None:
        args.ctc_weight = 0.0 if origin.path else AUXILIARY_WEIGHT
    if args.pad_to_30s is None:
        args.pad_to_30s = args.freeze_encoder
    if args.pad_share is None:
        args.pad_share = PAD_SHARE
    if origin.size:
        origin = replace(origin, size=formats.reshape(origin.size, shape_of(args)))
    vocab_size = args.vocab_size if "vocab_size" in args.given else None
    vocabulary = None
    has_data = args.train_manifest or getattr(args, "data_dir", None)
    if options.plans(args) and not has_data:
        # Without data, a released size is planned with the released vocabulary.
        vocabulary = vocab_size
        if vocabulary is None and origin.size_name in formats.SIZES:
            vocabulary = origin.size["vocab_size"]
    return options.read_record(
        record,
        args,
        origin=origin,
        **recogniser.Request.resolve(args, how),
        language=language,
        vocab_size=vocab_size,
        vocabulary=vocabulary,
        auxiliary={name: getattr(args, name) for name in auxiliary},
        suppress=suppress,
    )


def shape_of(flags) -> dict[str, int]:
    """Those of `flags` that change the size of a model from scratch."""
    return {name: getattr(flags, name) for name in SHAPE if getattr(flags, name)}


# --- the model ------------------------------------------------------------------------------------


class Family(released.Family):
    """Whisper."""

    model_info = ModelInfo
    sized = ("d_model", "encoder_layers", "decoder_layers")
    linear = ("fc1", "fc2")
    kept = ("embed_positions",)
    rows = ("decoder.embed_tokens.weight", "ctc_head.weight", "ctc_head.bias")
    peft_class = "WhisperForConditionalGeneration"

    def read(self, path: str) -> tuple[ModelInfo, dict[str, Tensor]]:
        return read_released(self.asked, path)

    def base(self, path: str) -> dict[str, Tensor]:
        return formats.read_model(path)[0]

    def network(self, info: ModelInfo) -> Whisper:
        return make_model(info)

    def make_model(self, info: ModelInfo, weights, trains: bool = False) -> Whisper:
        if not trains:
            return make_model(info, weights=weights)
        asked = self.asked
        model = make_model(info, asked.dropout, asked.label_smoothing, weights)
        if asked.freeze_encoder:
            model.freeze_encoder()
        return model

    def check(self, info: ModelInfo, name: str) -> None:
        formats.check_config(info.config, name)
        tokenizer = make_tokenizer(info.tokenizer)
        tokens = [tokenizer.size - 1]
        for name in SUPPRESSED:
            tokens += info.generation.get(name, [])
        if max(tokens) >= info.config["vocab_size"] or info.ctc_tokens not in (0, tokenizer.eos):
            raise UsageError(f"{name} is damaged: its tokens are not those of its tokenizer")

    def conflicts(self, info: ModelInfo, saved: Saved) -> list[str]:
        asked, origin = self.asked, self.origin
        flags = super().conflicts(info, saved)
        if origin.path and info.pretrained and os.path.isdir(origin.path):
            config = formats.read_config(Path(origin.path))
            if any(info.config[name] != value for name, value in config.items()):
                shape = "the checkpoint's model has another shape"
                flags.append(f"{origin.flag} {origin.path} ({shape})")
        for name, share in asked.auxiliary.items():
            if name in origin.given and share and not info.ctc_tokens:
                flags.append(f"--{name} {share:g} (the checkpoint's encoder has no output layer)")
        if asked.vocab_size and saved.state:
            size = saved.state["args"].get("vocab_size") or asked.vocab_size
            flags += released.differing({"vocab_size": (asked.vocab_size, size)})
        told = make_tokenizer(info.tokenizer)
        if "language" in origin.given and not told.speaks(asked.language):
            flags.append(f"--language {asked.language} (the checkpoint has {told.told})")
        if asked.task not in (None, told.task):
            flags.append(f"--task {asked.task} (the checkpoint has {told.task})")
        if file := asked.tokenizer_file:
            tokenizer = read_tokenizer(file, told.told, info.config["vocab_size"])
            if tokenizer.vocab != info.tokenizer["vocab"]:
                flags.append(f"--tokenizer_file {file} (the checkpoint has another vocabulary)")
        return flags

    def saved_flags(self, info: ModelInfo, saved: Saved) -> dict:
        has = {**info.config, "attention_heads": info.config["encoder_attention_heads"]}
        return {name: (value, has[name]) for name, value in shape_of(self.asked).items()}

    def create(self, source: Callable[[], WhisperTokenizer]) -> ModelInfo:
        """With an auxiliary loss its encoder has an output layer for the text's tokens, which are
        numbered before the special ones."""
        tokenizer = source()
        has_head = any(self.asked.auxiliary.values())
        size = self.asked.vocabulary or tokenizer.size
        return ModelInfo(
            config={**self.origin.size, "vocab_size": size},
            tokenizer=tokenizer.state(),
            ctc_tokens=tokenizer.eos if has_head else 0,
            generation={},
            pretrained=False,
            pad_to_30s=False,
        )

    def begin(self, info: ModelInfo, weights, run, source):
        check_limits(self.asked, info.config)
        return replace(info, pad_to_30s=self.asked.pad_to_30s), weights

    def first_model(self, run, source: Callable) -> tuple[ModelInfo, Whisper]:
        info, model = super().first_model(run, source)
        describe(info, model, self.asked.learning_rate)
        return info, model

    def for_task(self, info: ModelInfo, initial: Saved | None) -> dict:
        """Fields of the loop's `Task` that every Whisper has. `initial`: of --init_from."""
        fit = None
        if not info.pretrained:
            seed = self.asked.seed
            fit = functools.partial(scratch.fit, seed=seed, initialised=initial is not None)
        return {
            "fit": fit,
            "learning_rate": learning_rate(info),
            "checkpointed": LAYERS,
            "compiled": LAYERS,
            "evaluate_first": info.pretrained,
            "fine_tunes": info.pretrained,
            "vocabulary": self.vocabulary(info, initial),
        }

    def tokens(self, info: ModelInfo) -> list[str]:
        """CTC's blank has the number of the end of text."""
        return make_tokenizer(info.tokenizer).tokens

    def prefix(self, info: ModelInfo) -> str:
        return "model."

    def about(self, info: ModelInfo, about: card.About) -> card.About:
        """The language of the texts, unless a recipe names others, and its token."""
        about = super().about(info, about)
        if about.languages is not None:
            return about
        tokenizer = make_tokenizer(info.tokenizer)
        token = f"Whisper's token of {languages.described(tokenizer.language)}"
        note = f"It is trained with {token}." if tokenizer.multilingual else ""
        if tokenizer.spoken != tokenizer.language:
            note = (
                f"Its language has no token in Whisper: it is trained with {token}, and told by it."
            )
        if tokenizer.task == TRANSLATE:
            spoken = languages.described(tokenizer.spoken)
            note += f" It translates speech in {spoken} into the language of its training texts."
        return replace(about, languages=(tokenizer.spoken,), note=note)

    def form(self, info: ModelInfo) -> card.Form:
        use = TRANSLATIONS if info.tokenizer["task"] == TRANSLATE else card.PIPELINE
        return card.Form("transformers", card.RECOGNITION, FORMS.family, use)

    def write(
        self, info: ModelInfo, weights: dict[str, Tensor], texts: dict[str, str]
    ) -> list[str]:
        """A folder for transformers, with OpenAI's model.pt."""
        tokenizer = make_tokenizer(info.tokenizer)
        # An export that is exported again keeps its times.
        times = info.times or bool(info.generation.get("return_timestamps"))
        generation = {**info.generation, "return_timestamps": times}
        folder = self.origin.export
        return formats.export(folder, weights, info.config, tokenizer, generation, texts)


def read_released(asked: WhisperOptions, path: str) -> tuple[ModelInfo, dict[str, Tensor]]:
    """A Hugging Face folder or OpenAI's .pt. Raises `UsageError`."""
    weights, config, extras = formats.read_model(path)
    tokenizer = read_tokenizer(
        asked.tokenizer_file or extras["tokenizer"], asked.language, config["vocab_size"]
    )
    tokenizer = in_task(tokenizer, asked.task)
    generation = dict(extras["generation"])
    if not os.path.isdir(path):  # OpenAI's file has no settings: its program knows them
        generation = suppressed(tokenizer)
    for name in SUPPRESSED:
        ids = generation.get(name) or []
        if records.mismatch(ids, [range(config["vocab_size"])], name):
            raise UsageError(
                f"{path}: {name} in generation_config.json are not token ids of this model"
            )
        generation[name] = ids if asked.suppress else []
    info = ModelInfo(
        config=config,
        tokenizer=tokenizer.state(),
        ctc_tokens=0,
        generation=generation,
        pretrained=True,
        pad_to_30s=True,
    )
    return info, weights


def input_seconds(config: dict) -> float:
    """The longest input of a model with this configuration: 30 s for every released one."""
    return config["max_source_positions"] * FRAME / SAMPLE_RATE


def check_limits(asked: WhisperOptions, config: dict) -> None:
    """Raises `UsageError` if the model has no room for --max_target_tokens or --max_duration."""
    positions = config["max_target_positions"]
    longest = input_seconds(config)
    if asked.max_target_tokens and asked.max_target_tokens > positions:
        raise UsageError(
            f"--max_target_tokens {asked.max_target_tokens}: the decoder has {positions} positions"
        )
    if asked.max_duration > longest:
        raise UsageError(
            f"--max_duration {asked.max_duration:g}: the model's longest input is {longest:g} s;"
            " longer recordings can be cut by the manifest's segment times (--use_chunking)"
        )


def make_model(
    info: ModelInfo,
    dropout: float = 0.0,
    label_smoothing: float = 0.0,
    weights: dict[str, Tensor] | None = None,
) -> Whisper:
    """A model with these weights, or with random ones."""
    model = Whisper(info.config, dropout, label_smoothing, info.ctc_tokens)
    # Other programs pad every input of a released model, however it was fine-tuned.
    model.pad_to_longest = info.pad_to_30s or info.pretrained
    if weights is not None:
        checkpoint.load_weights(model, weights)
    return model


def make_search(asked: WhisperOptions, info: ModelInfo) -> tuple[WhisperTokenizer, decoding.Search]:
    """The tokenizer of a model, and how --decoding searches."""
    tokenizer = make_tokenizer(info.tokenizer)
    how = asked.how
    search = decoding.make_search(
        tokenizer, info.generation, info.config["vocab_size"], how.decoding, how.beam_size, how.seed
    )
    return tokenizer, search


# --- training -------------------------------------------------------------------------------------


def learning_rate(info: ModelInfo) -> float:
    """The peak learning rate by the model's width: for fine-tuning a fortieth of pre-training's;
    from scratch that of pre-training, and more for models narrower than the smallest released
    one."""
    width = info.config["d_model"]
    nearest = min(FINE_TUNING_RATES, key=lambda known: abs(known - width))
    if info.pretrained:
        return FINE_TUNING_RATES[nearest]
    if width < min(FINE_TUNING_RATES):
        return SMALL_RATE
    return 40 * FINE_TUNING_RATES[nearest]


def say_language(tokenizer: WhisperTokenizer) -> None:
    """Prints the language of the texts, and whose token stands for it."""
    text = languages.described(tokenizer.spoken)
    what = "speech, which the texts translate" if tokenizer.task == TRANSLATE else "texts"
    if tokenizer.spoken != tokenizer.language:
        text += f", with Whisper's token of {languages.described(tokenizer.language)}"
    print(f"language of the {what}: {text}")


def check_languages(
    corpora: dict[str, Corpus], tokenizer: WhisperTokenizer, baseline: str = ""
) -> None:
    """Prints which languages that rows name are called otherwise by the vocabulary of the model, or
    of a `baseline`. Raises `DataError` for those that it lacks, with the number of their rows."""
    for name, corpus in corpora.items():
        tokens = {told: tokenizer.token_of(told) for told in corpus.languages.names if told}
        counts = Counter(corpus.languages)
        lacking = [f"{told!r} ({counts[told]} rows)" for told in tokens if not tokens[told]]
        if lacking:
            raise DataError(
                f"{name} set: {baseline or 'the model'} has no token for"
                f" {', '.join(lacking[:20])}, which the rows"
                " name as their language: correct the column, or let the language borrow a token,"
                " as --language mdw=ln does"
            )
        renamed = [f"{told} as {code}" for told, code in tokens.items() if told != code]
        if renamed and not baseline:
            print(f"{name} set: languages of rows: {', '.join(renamed[:20])}")


def describe(info: ModelInfo, model: Whisper, given_rate: float | None) -> None:
    """Prints the size of the model and, unless --learning_rate is given, its learning rate."""
    if given_rate is None:
        reason = "fine-tuning at this width" if info.pretrained else "from scratch"
        if lora.adapters_of(model):
            reason = "adapters at this width"
        print(f"learning rate: {lora.rate(model, learning_rate(info)):g} ({reason})")
    say_language(make_tokenizer(info.tokenizer))
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"model: {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M of them trained;"
        f" {info.config['vocab_size']} tokens"
    )


def with_longest(
    info: ModelInfo, data: splits.RunInfo, earlier_run: splits.RunInfo | None
) -> splits.RunInfo:
    """`data` with the longest utterance that a model has been trained on: in this run, or in the
    `earlier_run` that it resumes, or when it was released."""
    released_on = input_seconds(info.config) if info.pretrained else 0.0
    longest = max(data.longest, released_on, earlier_run.longest if earlier_run else 0.0)
    return replace(data, longest=longest)


# --- use ------------------------------------------------------------------------------------------


def long_recordings(
    info: ModelInfo, trained: splits.RunInfo | None, short: Cutting = BY_PAUSES
) -> tuple[float, Cutting]:
    """The longest piece of a long recording, seconds, and how recordings are cut: overlapping, or
    by `short` for a model of short clips, which reads the cut words at the ends of a piece badly,
    and two or three whole words are too few to stitch by (the Morse demo on clips of 6 to 12 s: CER
    19 %, with overlapping pieces 159 %). `trained`: the data that the model was trained on, None
    for a released one. A little more than what it was trained on does no harm, and resampling may
    add a sample to the longest pieces."""
    longest = input_seconds(info.config)
    if trained:
        longest = min(1.05 * trained.longest, longest)
    return longest, BY_OVERLAP if longest >= SHORT_CLIPS else short
