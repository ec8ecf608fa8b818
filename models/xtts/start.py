"""XTTS's part of where a model starts: flags, the record of a model, the model that a training
begins with, its frozen parts."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from common import device, options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.options import TRAINS, USUAL, OnOff, flag
from common.parts import lora
from models import adapters, released
from models.released import Forms, Origin
from models.xtts import cleaners, formats, frozen, new_tokens, speaking, texts
from models.xtts.frozen import Frozen
from models.xtts.model import GPT, Conv1D, attention_kernel, make_model, use_sdpa
from models.xtts.speaking import Synthesiser
from models.xtts.tokenizer import LANGUAGE, Vocabulary, new_vocabulary
from speech.data import splits
from speech.data.columns import Corpus
from speech.data.splits import RunInfo
from speech.decoding import judge
from speech.writing import languages

TUNED_ONLY = "it began from random weights, and this recipe only tunes released ones"
FORMS = Forms(
    family="XTTS-v2",
    folder=f"a folder with Coqui's {', '.join(formats.FILES)}",
    file="",
    exported="that Coqui's XTTS loads",
    fetch="hf download coqui/XTTS-v2 --local-dir XTTS-v2",
    scratch=False,
)
NEEDED = (
    "training needs --train_manifest FILE (clips and their texts) and --model_dir DIR"
    f" ({FORMS.folder}; fetch them with: {FORMS.fetch})"
)
QUERIES = ("attn.c_attn", "to_q", "to_kv")
POSITIONS = ("text_pos_embedding.emb", "mel_pos_embedding.emb")
# Rows of the text embedding.
VERSIONS = {"v2.0.0": 6153, "v2.0.1": 6153, "v2.0.2": 6681, "v2.0.3": 6681}
SLICE = 66_150, 132_300  # the shortest and longest conditioning slice, samples
LEARNING_RATE = 5e-6
NEW_ROWS_RATE = 1e-4  # of tokens that are new

EXCLUDES = (
    ("synthesize", "export", "give one of them"),
    *splits.unused_by("synthesize"),
    ("evaluate", "export", "give one of them"),
    ("show_text", "export", "give one of them"),
)
NEEDS = (("custom_model", ("model_dir",), "it holds the GPT only"),)


@dataclass(frozen=True)
class ModelInfo:
    """The record of a GPT that is saved with its weights."""

    config: dict  # see `formats.CONFIG`
    vocab: str  # text of vocab.json
    language: str  # of rows without a language
    carried: bool  # the language's token follows English's
    text: texts.TextOptions
    condition: Annotated[str, {"same", "other"}]  # --condition
    slice: tuple[int, int]  # the shortest and longest conditioning slice, samples
    settings: dict = field(default_factory=dict)  # config.json of the released model
    licence: bool = False  # the weights derive from Coqui's
    model_dir: str | None = None  # the folder of the frozen parts; None in a plan without one
    dvae: str = ""  # `digest` of the DVAE
    new_tokens: int = 0  # the last ones, which the released vocabulary lacked
    # Earlier versions could begin at random weights. The others have these values.
    pretrained: Annotated[bool, lambda pretrained: pretrained, TUNED_ONLY] = True
    reads_stop: bool = False
    stage: str = "gpt"

    @property
    def new_pieces(self) -> range:
        """The ids of `new_tokens`."""
        size = self.config["text_tokens"]
        return range(size - self.new_tokens, size)


@dataclass(frozen=True)
class StartFlags:
    """Flags of the model that is trained, and of what it hears."""

    # fmt: off
    custom_model: str | None = flag(
        options.optional_path, None, "FILE",
        "take the GPT from an already tuned .pth, and the rest from --model_dir")
    language: str | None = flag(
        None, None, "NAME",
        "language of the texts, such as sw or Swahili; one that the vocabulary lacks gets a token"
        " (that of the rows; am with --use_amharic_g2p)", USUAL)
    condition: str | None = flag(
        ["same", "other"], None, None,
        "the voice comes from the clip that is learned, or from another one of its speaker (same)",
        TRAINS)
    version: str | None = flag(
        list(VERSIONS), None, None, "the version that the weights should have; another is an error")


@dataclass(frozen=True)
class TrainingFlags:
    """Flags of how the GPT is trained, and which parts of it."""

    # fmt: off
    sdpa: bool = flag(OnOff, True, None, "fused attention; off: all scores in memory (on)", TRAINS)
    freeze_layers: int = flag(
        options.COUNT, 0, "N", "leave the first N layers of the GPT as they are (0)", TRAINS)
    dropout: float = flag(options.SHARE, 0.1, "P", "dropout in the GPT (0.1)", TRAINS)


def _other_name(dest: str, kind=None, unit: str | None = None, **settings):
    """The name that a flag has in the project that this recipe replaces."""
    return flag(kind, argparse.SUPPRESS, unit, f"another name of --{dest}", dest=dest, **settings)


@dataclass(frozen=True)
class OtherNameFlags:
    """Flags under the names that they have in the project that this recipe replaces."""

    # fmt: off
    enable_sdpa: bool = _other_name("sdpa", OnOff)
    enable_grad_checkpoint: bool = _other_name("gradient_checkpointing", OnOff)
    enable_mixed_precision: str = _other_name(
        "mixed_precision", action="store_const", const="auto")
    train_csv: list[str] = _other_name("train_manifest", options.path, "FILE", nargs="+")
    eval_csv: list[str] = _other_name("val_manifest", options.path, "FILE", nargs="+")
    output_path: str = _other_name("output_dir", options.path, "DIR")
    grad_acumm: int = _other_name("gradient_accumulation_steps", options.POSITIVE, "N")


@dataclass(frozen=True, kw_only=True)
class XttsOptions(StartFlags, TrainingFlags, splits.Request):
    """The request of the flags. `recipe`: its name in checkpoints; `voices`: of --speaker_wav."""

    origin: Origin
    recipe: str
    text: texts.TextOptions
    voices: list[str]
    held_out: judge.HeldOut


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    group = released.add_arguments(parser, FORMS, (), "")
    options.add_record(parser, group, StartFlags)
    adapters.add_arguments(parser, has_peft=False)
    texts.add_arguments(parser)
    options.add_record(parser, "the GPT in training", TrainingFlags)
    judge.add_arguments(parser, str(speaking.HELD_OUT))
    options.add_record(parser, parser, OtherNameFlags)
    parser.refuse(EXCLUDES, NEEDS)


def resolve_language(args, origin: Origin) -> str | None:
    """The code of the language of the texts, as `languages.resolve` tells it, or
    --use_amharic_g2p. Raises `UsageError`."""
    if args.use_amharic_g2p and args.language is None:
        return texts.AMHARIC
    planned = None if released.exports_only(origin) else texts.AMHARIC
    language = languages.resolve(args, planned)
    if language is None:
        return None
    code = texts.code_of(language)
    if not LANGUAGE.fullmatch(f"[{code}]"):
        raise UsageError(f"--language {language[:40]}: it must be a code such as am or en")
    return code


def resolve(args, recipe: str) -> XttsOptions:
    """Checks these flags and returns what they ask for. Raises `UsageError`."""
    is_command = any(options.is_on(vars(args), name) for name in args.rules.commands)
    if not (is_command or args.train_manifest or args.export):
        raise UsageError(NEEDED)
    # A plan without weights is of a model with the shape of the released one.
    origin = released.resolve(args, FORMS, {}, "", is_demo=options.plans(args))
    language = resolve_language(args, origin)
    if args.extend_vocab and released.exports_only(origin):
        raise UsageError(
            "--extend_vocab is for training, and --export alone trains nothing: add"
            " --train_manifest"
        )
    if args.export and args.speaker_wav:
        speaking.named_clips(args.speaker_wav)  # what is wrong with them is reported now
    return options.read_record(
        XttsOptions,
        args,
        **splits.Request.resolve(args, for_synthesis=True),
        origin=origin,
        recipe=recipe,
        language=language,
        text=texts.resolve(args, language),
        voices=args.speaker_wav or [],
        held_out=judge.resolve(args, released.exports_only(origin)),
    )


# --- the model ------------------------------------------------------------------------------------


class Family(released.Family):
    """XTTS. Text embedding and head, whose tokens may be new, are trained whole beside adapters. A
    layer of GPT-2 has queries, keys and values in one."""

    model_info = ModelInfo
    queries = QUERIES
    attention = (*QUERIES, "attn.c_proj", "to_out")
    linear = ("",)
    whole = ("text_embedding.", "text_head.")
    rows = new_tokens.TEXT_ROWS
    # Of `begin`: the frozen parts, and how many tokens were new in the training texts.
    parts: Frozen
    added: int = 0

    def read(self, path: str) -> tuple[ModelInfo, dict[str, Tensor]]:
        """With a token for the language."""
        asked = self.asked
        groups, config, extras = formats.read_model(path)
        if asked.version and VERSIONS[asked.version] != config["text_tokens"]:
            raise UsageError(
                f"--version {asked.version}: its vocabulary has {VERSIONS[asked.version]} tokens,"
                f" and these weights have {config['text_tokens']}"
            )
        weights = groups["gpt"]
        if asked.custom_model:
            weights = formats.read_custom(asked.custom_model, config)
        info = ModelInfo(
            config=config,
            vocab=extras["vocab"],
            language=told(asked),
            carried=False,
            text=new_text(asked),
            condition=asked.condition or "same",
            slice=SLICE,
            settings=extras["config"],
            licence=extras["licence"] or asked.custom_model is not None,
            model_dir=os.path.abspath(path),
            dvae=frozen.digest(groups["dvae"]),
        )
        return new_tokens.add_language(info, weights)

    def base(self, path: str) -> dict[str, Tensor]:
        return Family(replace(self.asked, language=texts.CARRIER)).read(path)[1]

    def network(self, info: ModelInfo) -> GPT:
        return GPT(info.config)

    def make_model(self, info: ModelInfo, weights, trains: bool = False) -> GPT:
        """Without training of the first layers that --freeze_layers names."""
        model = make_model(info.config, weights, self.asked.dropout if trains else 0.0)
        layers = self.asked.freeze_layers if trains else 0
        if layers > len(model.gpt.h):
            raise UsageError(f"--freeze_layers {layers}: the GPT has {len(model.gpt.h)} layers")
        for block in model.gpt.h[:layers]:
            block.requires_grad_(False)
        return model

    def check(self, info: ModelInfo, name: str) -> None:
        formats.check_config(info.config, name)
        size = Vocabulary(info.vocab).size
        if size != info.config["text_tokens"]:
            raise UsageError(
                f"{name}: the model has {info.config['text_tokens']} text tokens, and its"
                f" vocabulary {size}"
            )

    def conflicts(self, info: ModelInfo, saved: Saved) -> list[str]:
        flags = super().conflicts(info, saved)
        if "lexicon" in self.origin.given and self.asked.text.lexicon != info.text.lexicon:
            flags.append("--lexicon (the checkpoint has other words)")
        return flags

    def saved_flags(self, info: ModelInfo, saved: Saved) -> dict:
        flags = {
            "language": (self.given("language"), info.language),
            "condition": (self.asked.condition, info.condition),
        }
        for name, kept in texts.KEPT.items():
            if name in self.origin.given:
                flags[name] = getattr(self.asked.text, kept), getattr(info.text, kept)
        return flags

    def create(self, source) -> ModelInfo:
        return planned_info(self.asked)

    def begin(self, info: ModelInfo, weights, run, source: Callable[[], dict[str, Corpus]]):
        """The vocabulary is extended for the training texts, which are read as the model reads."""
        if initial := run.initial:
            known = records.read(ModelInfo, initial.model_info, initial.path)
            if info.dvae not in ("", known.dvae):
                raise UsageError(
                    f"--init_from {initial.path}: its model has learned the codes of another DVAE;"
                    " name the same --model_dir"
                )
        self.parts = frozen_parts(self.asked, info)
        corpora = source()
        texts.read_corpora(texts.Texts(info), corpora)
        if not run.resumed:
            learned = corpora["train"].read
            info, weights, self.added = new_tokens.extend(info, weights, learned, self.asked.text)
        device.seed_everything(self.asked.seed)  # the frozen parts have drawn random numbers
        return info, weights

    def layers(self, info: ModelInfo, targets: str) -> lora.Layers:
        with torch.device("meta"):
            model = GPT(info.config)
        adapted = []
        for name, module in model.named_modules():
            is_linear = isinstance(module, Conv1D | nn.Linear)
            is_whole = f"{name}.".startswith(self.whole)
            if is_linear and name.endswith(self.ends(targets)) and not is_whole:
                adapted.append(name)
        transposed = ("c_attn", "c_fc", "c_proj")
        return lora.Layers(adapted, self.whole, POSITIONS, transposed)

    def tokens(self, info: ModelInfo) -> list[str]:
        return Vocabulary(info.vocab).tokens()


def first_model(
    asked: XttsOptions, run, corpora: dict[str, Corpus]
) -> tuple[Synthesiser, ModelInfo, int]:
    """The model that the training `run` (`common.loop.begin`) starts with, with all that it takes
    to use it, its info, and how many tokens were added to its vocabulary for the training texts. It
    reads the texts of the `corpora`. Raises `UsageError`."""
    family = Family(asked)
    info, model = family.first_model(run, lambda: corpora)
    use_sdpa(model, asked.sdpa)
    print(f"attention: {attention_kernel(model, run.setup.device, run.setup.dtype)}")
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"model: {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M of them trained")
    parts = family.parts.to(run.setup.device, speaking=False)
    vocabulary = texts.Texts(info, is_new=not run.resumed)
    return synthesiser_of(info, model, parts, vocabulary), info, family.added


def trained(
    asked: XttsOptions, setup: device.Setup
) -> tuple[Synthesiser, ModelInfo, RunInfo | None]:
    """The model of --model_dir, of --resume, or of the best evaluation, ready to be used, and what
    the run that trained it has saved, which is None for a released one. Raises `UsageError`."""
    model, info, earlier_run = Family(asked).trained(asked.recipe, RunInfo, setup)
    parts = frozen_parts(asked, info).to(setup.device)
    return synthesiser_of(info, model, parts, texts.Texts(info)), info, earlier_run


def synthesiser_of(
    info: ModelInfo, model: GPT, parts: Frozen, vocabulary: texts.Texts
) -> Synthesiser:
    lengths = formats.conditioning(info.settings)
    return Synthesiser(model, parts, vocabulary, texts.most_text(info.config), lengths)


def known_info(asked: XttsOptions) -> tuple[ModelInfo | None, RunInfo | None]:
    """The info of the model that the flags name, if they name one, and what the run that trained it
    has saved, which is None for a released one. Raises `UsageError`."""
    if asked.origin.resume == "auto" or not (asked.origin.resume or asked.origin.path):
        return None, None
    with torch.device("meta"):
        info, _, saved = Family(asked).use(asked.recipe)
    return info, released.read_run_info(RunInfo, saved)


def reader_of(
    asked: XttsOptions, info: ModelInfo | None, is_new: bool, corpora: dict[str, Corpus]
) -> tuple[texts.Texts, dict]:
    """What reads texts as the model `info` does, or will do if it `is_new`, or as any model if it
    is not known; and the model's configuration. It reads the texts of the `corpora`."""
    if info is None:
        is_carried = told(asked) not in cleaners.LANGUAGES
        unknown = replace(planned_info(asked), text=asked.text, vocab="", carried=is_carried)
        reader = texts.Texts(unknown)
        texts.read_corpora(reader, corpora)
        return reader, formats.RELEASED
    texts.read_corpora(texts.Texts(info), corpora)
    if is_new and "train" in corpora:
        info, _, _ = new_tokens.extend(info, None, corpora["train"].read, asked.text)
    return texts.Texts(info, is_new), info.config


def told(asked: XttsOptions) -> str:
    """The language of the texts of a released model. Raises `UsageError` if it is not given."""
    if asked.language is None:
        raise UsageError(languages.ASK)
    return asked.language


def planned_info(asked: XttsOptions) -> ModelInfo:
    """The info of a plan without a released model: one with the shape of XTTS-v2. All codes have a
    loss, as with --condition other, so no batch takes more."""
    language = told(asked)
    config = formats.RELEASED
    vocab = new_vocabulary(texts.CHARACTERS, [texts.CARRIER, language], config["text_tokens"])
    return ModelInfo(
        config={**config, "start_text": Vocabulary(vocab).start},
        vocab=vocab,
        language=language,
        carried=language != texts.CARRIER,
        text=new_text(asked),
        condition=asked.condition or "other",
        slice=SLICE,
    )


def new_text(asked: XttsOptions) -> texts.TextOptions:
    """How a new model reads, whose vocabulary is not extended yet."""
    return replace(asked.text, extend_vocab=None, vocab_size=texts.VOCAB_SIZE)


# --- frozen parts ---------------------------------------------------------------------------------


def frozen_parts(asked: XttsOptions, info: ModelInfo) -> Frozen:
    """The parts that the GPT was trained with. Prints their licence. Raises `UsageError`."""
    folder = asked.origin.path or info.model_dir
    if folder is None:
        return frozen.make_frozen(info.config)
    if asked.origin.export:
        released.refuse_overlap(asked.origin.export, folder)
    if not os.path.isdir(folder):
        raise UsageError(
            f"the frozen parts come from {folder}, which is not there: name the folder with"
            " --model_dir"
        )
    groups = formats.read_frozen(folder, info.config)
    if frozen.digest(groups["dvae"]) not in ("", info.dvae):
        raise UsageError(
            "the DVAE is not the one that this GPT learned the codes of: name the same --model_dir"
            " as before"
        )
    if info.licence:
        print(formats.LICENCE)
    return frozen.make_frozen(info.config, groups)
