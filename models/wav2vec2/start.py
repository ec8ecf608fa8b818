"""The start of a wav2vec 2.0's training: what this family adds to models/released.py."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

import torch

from common import checkpoint, options
from common.checkpoint import Saved
from common.errors import UsageError
from common.options import TRAINS, USUAL, OnOff, flag
from models import adapters, card, lm_files, released
from models.model_files import with_weights
from models.released import Origin
from models.wav2vec2 import formats, onnx, settings, texts, vocabulary
from models.wav2vec2.model import Wav2Vec2
from models.wav2vec2.tokenizer import STATE, Wav2Vec2Tokenizer, make_tokenizer
from speech.data.splits import RunInfo
from speech.decoding import language_model, recogniser
from speech.writing import alphabet, profile
from speech.writing.alphabet import ProfileFlags
from speech.writing.profile import Profile

# Peak learning rates. Meta's advice for omniASR's head is 1e-5. A new head on a self-supervised
# encoder needs more: of published models of XLS-R with an hour of speech, those at 3e-4 write words
# after 400 updates, and one at 3e-5 never does.
KEPT_HEAD_RATE = 1e-5
NEW_ROWS_RATE = 1e-4  # of rows that a kept head gets
NEW_HEAD_RATE = 3e-4
NEW_HEAD_ROWS_RATE = 1e-3  # of a head that is all new
# Updates: the fewest, and those from an hour of speech on. Meta trains omniASR for 5,000; published
# models with a new head become better up to 5,000 and more.
KEPT_HEAD_UPDATES = (1500, 3000)
NEW_HEAD_UPDATES = (3000, 5000)
SCRATCH_RATE = 2e-3
LAYER_DROP = 0.1  # as in omniASR's training
# Shares of frames at which a masked span begins, times its length; and of channels. fairseq's 0.65
# and 0.25 are for longer runs, of 1,600 s an update.
NEW_HEAD_MASKS = (0.1, 0.0)
KEPT_HEAD_MASKS = (0.05, 0.0)

PIPELINE = """
from transformers import pipeline

# a file name needs ffmpeg; an array does not
print(pipeline("automatic-speech-recognition", "FOLDER")("recording.wav")["text"])
"""
FORMS = released.Forms(
    family="wav2vec 2.0",
    folder="a Hugging Face folder",
    file="omniASR's model.pt",
    exported="in --export_format",
    fetch="hf download facebook/wav2vec2-xls-r-300m --local-dir wav2vec2-xls-r-300m",
    fetch_file="curl -L --remote-name-all"
    f" {settings.PUBLISHED}omniASR-CTC-300M.pt {settings.PUBLISHED}omniASR_tokenizer.model",
)
VOCABULARIES = ("released", "extended", "own")
# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
EXCLUDES = (
    ("vocab", "from_scratch", "a new model's vocabulary is its training texts'"),
    ("spec_augment False", "mask_time", "the first turns masks off; leave one of them out"),
    ("spec_augment False", "mask_channels", "the first turns masks off; leave one of them out"),
)
NEEDS = (
    ("export_format", ("export",), ""),
    ("vocab", (*released.MODELS, "resume"), "it changes the vocabulary of a released model"),
    ("language", ("model_dir",), "it is one of MMS's"),
    ("tokenizer", ("model_file",), "it belongs to omniASR's weights"),
)


@dataclass(frozen=True)
class ModelInfo:
    """The record of a model beside its weights."""

    config: Annotated[dict, settings.CONFIG]
    tokenizer: Annotated[dict, STATE]
    style: Annotated[dict, texts.STYLE]  # of `texts.Style`; empty: texts are left as they are
    pretrained: bool  # whether it began from released weights
    licence: str = ""  # of the released weights, by the hub's name
    language: str = ""  # whose adapter MMS gave
    vocab: str = "released"  # of VOCABULARIES
    had_head: bool = True  # whether the released model had one
    new_pieces: list[int] = field(default_factory=list)  # the rows of the head that were new

    def read_style(self) -> texts.Style | None:
        """How texts are prepared, None if they are left as they are."""
        return texts.Style(**self.style) if self.style else None

    @property
    def own_vocabulary(self) -> bool:
        """Whether training texts have made the vocabulary, or a part of it."""
        return bool(self.new_pieces) or not self.pretrained

    @property
    def has_new_head(self) -> bool:
        """Whether all rows of a released model's head are new."""
        return self.pretrained and len(self.new_pieces) == self.config["vocabulary"]


@dataclass(frozen=True)
class StartFlags:
    """Flags of the model that is read and written."""

    # fmt: off
    export_format: str = flag(
        ("hf", "onnx"), None, None,
        "form of --export: a folder for transformers, or one for sherpa-onnx and onnx-asr (hf)",
        USUAL)
    tokenizer: str | None = flag(
        options.file, None, "FILE", "SentencePiece file of omniASR's weights (the one beside them)")
    language: str | None = flag(
        str, None, "CODE", "whose adapter of an MMS folder is used (the folder's)")


@dataclass(frozen=True)
class TextFlags:
    """Flags of texts and of the vocabulary."""

    # fmt: off
    vocab: str | None = flag(
        VOCABULARIES, None, None,
        "the released model's characters, these with the ones that they lack, or only those of the"
        " training texts (released; own for a model without a head)", USUAL, TRAINS)
    keep_text: bool = flag(
        OnOff, False, None,
        "leave texts as they are, with capitals, punctuation and digits (off: as the released model"
        " writes; a vocabulary of one's own always takes them as they are)", USUAL, TRAINS)


@dataclass(frozen=True)
class RegularisationFlags:
    """Flags of masks and dropout. `train_extractor`: None for a new model only."""

    # fmt: off
    mask_time: float | None = flag(
        options.SHARE, None, "P",
        "about this share of the frames is masked by --spec_augment"
        f" ({KEPT_HEAD_MASKS[0]:g}; {NEW_HEAD_MASKS[0]:g} with a new head)", TRAINS)
    mask_channels: float | None = flag(
        options.SHARE, None, "P",
        f"the same for channels ({KEPT_HEAD_MASKS[1]:g}; {NEW_HEAD_MASKS[1]:g} with a new head)",
        TRAINS)
    layer_drop: float | None = flag(
        options.SHARE, None, "P",
        f"chance that an utterance skips a layer ({LAYER_DROP:g}; from scratch 0)", TRAINS)
    dropout: float = flag(options.SHARE, 0.1, "P", "after attention and feed-forward (0.1)", TRAINS)
    train_extractor: bool | None = flag(
        OnOff, None, None,
        "train the convolutions over the waveform, too (from scratch only), which needs more"
        " memory", TRAINS)


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Options(StartFlags, TextFlags, ProfileFlags, RegularisationFlags, recogniser.Request):
    """The request of the flags. `origin`: where the model starts; `letters`: of --profile."""

    origin: Origin
    letters: Profile | None


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    group = released.add_arguments(parser, FORMS, settings.SIZES, "300m")
    options.add_record(parser, group, StartFlags)
    writing = options.add_record(parser, "text and vocabulary", TextFlags)
    alphabet.add_arguments(parser, writing)
    adapters.add_arguments(parser, has_peft=True)
    options.add_record(parser, "regularisation", RegularisationFlags)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(args, is_demo: bool) -> Wav2Vec2Options:
    """Fills in the defaults of these flags and returns what they ask for. Raises `UsageError`."""
    return options.read_record(
        Wav2Vec2Options,
        args,
        export_format=args.export_format or "hf",
        origin=released.resolve(args, FORMS, settings.SIZES, "300m", is_demo),
        letters=profile.choose(args.profile),
        **recogniser.Request.resolve(args, recogniser.resolve(args, is_demo, has_times=True)),
    )


# --- the model ------------------------------------------------------------------------------------


class Family(released.Family):
    """wav2vec 2.0. The head, whose vocabulary may be new, is trained whole beside adapters. The
    convolutions compute in fp32 if the rest is in fp16."""

    model_info = ModelInfo
    sized = ("hidden_size", "num_hidden_layers")
    linear = ("intermediate_dense", "output_dense")
    whole = ("lm_head.",)
    kept = (".conv",)
    rows = vocabulary.ROWS
    peft_class = "AutoModelForCTC"

    def read(self, path: str) -> tuple[ModelInfo, dict[str, torch.Tensor]]:
        """A Hugging Face folder or a file of omniASR's."""
        asked = self.asked
        weights, config, extras = formats.read_model(path, asked.language, asked.tokenizer)
        state = extras.pop("tokenizer")
        style = {}
        if state and asked.vocab != "own" and not asked.keep_text:
            style = dataclasses.asdict(texts.style_of(Wav2Vec2Tokenizer(state)))
        return ModelInfo(config, state, style, True, had_head=bool(state), **extras), weights

    def network(self, info: ModelInfo) -> Wav2Vec2:
        return Wav2Vec2(info.config)

    def make_model(self, info: ModelInfo, weights, trains: bool = False) -> Wav2Vec2:
        """The convolutions over the waveform are trained from scratch only, or by the flag."""
        dropout = self.asked.dropout if trains else 0.0
        model = with_weights(lambda: Wav2Vec2(info.config, dropout), weights)
        trains_extractor = self.asked.train_extractor
        if trains_extractor is None:
            trains_extractor = not info.pretrained
        model.feature_extractor.requires_grad_(trains_extractor)
        return model

    def check(self, info: ModelInfo, name: str) -> None:
        settings.check_config(info.config, name)
        tokenizer_of(info)

    def conflicts(self, info: ModelInfo, saved: Saved) -> list[str]:
        asked = self.asked
        flags = super().conflicts(info, saved)
        if asked.keep_text and info.style:
            flags.append("--keep_text (the checkpoint's model was trained on prepared texts)")
        kept = tokenizer_of(info).profile if info.tokenizer else None
        if asked.letters not in (None, kept):
            flags.append(f"--profile {asked.profile} (the checkpoint's model has other units)")
        if self.origin.path and info.pretrained:
            with torch.device("meta"):
                theirs, _ = self.read(self.origin.path)
            of_encoder = settings.CONFIG.keys() - {"vocabulary", "blank"}
            source = f"{self.origin.flag} {self.origin.path}"
            if any(theirs.config[name] != info.config[name] for name in of_encoder):
                flags.append(f"{source} (the checkpoint's model has another shape)")
            elif theirs.language != info.language:
                has = f"the checkpoint's model is of --language {info.language}"
                flags.append(f"{source} in {theirs.language} ({has})")
        return flags

    def saved_flags(self, info: ModelInfo, saved: Saved) -> dict:
        return {"vocab": (self.asked.vocab, info.vocab)}

    def create(self, source: Callable[[ModelInfo], Iterable[str]]) -> ModelInfo:
        """Its vocabulary are the characters of the training texts, which are left as they are."""
        config = dict(self.origin.size)
        empty = ModelInfo(config, {}, {}, pretrained=False, vocab="own")
        state = vocabulary.own(source(empty), self.asked.letters)
        state = vocabulary.padded(state, config["vocabulary"])
        tokenizer = Wav2Vec2Tokenizer(state)
        config |= {"vocabulary": tokenizer.size, "blank": tokenizer.blank}
        settings.check_config(config, "--from_scratch")
        return dataclasses.replace(empty, tokenizer=state)

    def begin(self, info: ModelInfo, weights, run, source: Callable[[ModelInfo], Iterable[str]]):
        """A released model gets the vocabulary that --vocab asks for. The pieces that --init_from
        has are trained."""
        if weights is not None and not run.resumed:
            info, weights = self._with_vocabulary(info, weights, source)
        info = dataclasses.replace(info, new_pieces=self.untrained(info, run.initial))
        self._check_export(info)
        if info.licence.startswith("cc-by-nc"):
            print(f"licence of the released model: {info.licence}, for non-commercial use only")
        return info, weights

    def _with_vocabulary(self, info: ModelInfo, weights, source):
        """A released model with the vocabulary that --vocab asks for. Raises `DataError`."""
        asked = self.asked
        kind = asked.vocab or ("released" if info.config["vocabulary"] else "own")
        if asked.letters and kind != "own":
            raise UsageError("--profile: the model has letters of its own; add --vocab own")
        if not info.config["vocabulary"] and kind != "own":
            raise UsageError(
                f"--vocab {kind}: {asked.origin.path} is a self-supervised model and has no"
                " vocabulary; leave it out"
            )
        read_texts = source(info)
        info = dataclasses.replace(info, vocab=kind)
        if kind == "own":
            state = vocabulary.own(read_texts, asked.letters)
        elif kind == "extended":
            state = vocabulary.extended(tokenizer_of(info), read_texts, info.read_style())
        else:
            self.require_characters(info, read_texts)
            return info, weights
        return vocabulary.with_new_vocabulary(info, weights, state)

    def require_characters(self, info: ModelInfo, texts: Iterable[str]) -> None:
        """Raises `DataError` if a released vocabulary is not one to train with on these texts."""
        allow = self.asked.allow_unknown
        vocabulary.require_characters(texts, tokenizer_of(info), info.read_style(), allow)

    def require_usable(self, info: ModelInfo) -> None:
        if not info.config["vocabulary"]:
            raise UsageError(
                f"{self.origin.path} is a self-supervised model, which writes no text before it is"
                " trained: add --train_manifest"
            )
        self._check_export(info)

    def _check_export(self, info: ModelInfo) -> None:
        if self.origin.export and self.asked.export_format == "onnx":
            onnx.check(info.config)

    def tokens(self, info: ModelInfo) -> list[str]:
        return vocabulary.row_names(tokenizer_of(info))

    def prefix(self, info: ModelInfo) -> str:
        return formats.prefix_of(info.config)

    def about(self, info: ModelInfo, about: card.About) -> card.About:
        licence = {"license": info.licence} if info.licence else None
        return dataclasses.replace(super().about(info, about), licence=licence)

    def form(self, info: ModelInfo) -> card.Form:
        if self.asked.export_format == "onnx":
            return card.Form("onnx", card.RECOGNITION, FORMS.family, onnx.USE)
        return card.Form("transformers", card.RECOGNITION, FORMS.family, PIPELINE)

    def lm_names(self, info: ModelInfo) -> lm_files.Names:
        tokenizer = tokenizer_of(info)
        tokens = language_model_tokens(info)
        return lm_files.for_torchaudio(tokens, tokenizer.pieces, tokenizer.blank)

    def write(
        self, info: ModelInfo, weights: dict[str, torch.Tensor], texts: dict[str, str]
    ) -> list[str]:
        write = formats.export if self.asked.export_format == "hf" else onnx.export
        return write(self.origin.export, weights, info.config, info.tokenizer, texts)


def tokenizer_of(info: ModelInfo) -> Wav2Vec2Tokenizer:
    return make_tokenizer(info.tokenizer, info.config["vocabulary"])


def language_model_tokens(info: ModelInfo) -> language_model.Tokens:
    """The tokens of the language model, whose texts are prepared as those of the training."""
    tokenizer = tokenizer_of(info)
    return language_model.tokens_of(tokenizer, preparing(info.read_style(), tokenizer.profile))


def preparing(style: texts.Style | None, letters: Profile | None) -> Callable[[str], str]:
    """How texts are prepared: in a model's `style`, or by the profile of the `letters`."""
    return letters.prepare if letters else functools.partial(texts.prepare, style=style)


def given_info(asked: Wav2Vec2Options, recipe: str) -> ModelInfo | None:
    """The info of the model that a training begins with; None if it is a new one. Raises
    `UsageError`."""
    family = Family(asked)
    saved = family.first_saved(recipe)
    if asked.origin.path and not saved:
        with torch.device("meta"):
            return family.read(asked.origin.path)[0]
    return checkpoint.read_infos(saved, ModelInfo, RunInfo)[0]


def learning_rate(info: ModelInfo) -> float:
    """The peak learning rate, by the model's start."""
    if not info.pretrained:
        return SCRATCH_RATE
    return NEW_HEAD_RATE if info.has_new_head else KEPT_HEAD_RATE


def updates(info: ModelInfo) -> tuple[int, int]:
    """The length of a fine-tuning, for `Task.updates`."""
    return NEW_HEAD_UPDATES if info.has_new_head else KEPT_HEAD_UPDATES


def mask_shares(asked: Wav2Vec2Options, info: ModelInfo) -> tuple[float, float]:
    """--mask_time and --mask_channels, or what the model's start asks for."""
    usual = NEW_HEAD_MASKS if info.has_new_head else KEPT_HEAD_MASKS
    return tuple(
        default if value is None else value
        for value, default in zip((asked.mask_time, asked.mask_channels), usual, strict=True)
    )


def layer_drop(asked: Wav2Vec2Options, info: ModelInfo) -> float:
    """--layer_drop, or what the model's start asks for."""
    if asked.layer_drop is not None:
        return asked.layer_drop
    return LAYER_DROP if info.pretrained else 0.0
