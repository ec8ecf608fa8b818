"""Matcha-TTS's part of where a model starts: flags, the record of a model, released weights."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from common import checkpoint, options
from common.checkpoint import Saved
from common.errors import UsageError
from common.options import TRAINS, USUAL, flag
from models import released
from models.matcha import formats, onnx
from models.matcha.decoding import Voice
from models.matcha.model import CONFIG, SIZES, Matcha, is_possible
from models.matcha.texts import speakers_of
from models.matcha.tokenizer import MARKS, symbols_of
from models.released import Origin
from speech.data import splits
from speech.data.splits import RunInfo
from speech.decoding import judge
from speech.writing import languages
from speech.writing.reading import AMHARIC, code_of

FINE_TUNING_RATE = 1e-4
RATES = {"demo": 1e-3, "full": 5e-4, "large": 5e-4}  # from scratch
DROPOUT = 0.1
EXPORTS_ONLY = "an exported voice is what a training has made of data: it says whose voice it is"

EXCLUDES = (
    ("model_file", "model_size", "a released model has its own shape; leave one of them out"),
    ("model_file", "init_from", "both say where the model starts; give one of them"),
    ("synthesize", "export", "give one of them"),
    *splits.unused_by("synthesize"),
    ("evaluate", "export", "give one of them"),
)
NEEDS = (
    ("export", ("consent",), EXPORTS_ONLY),
    ("consent", ("export",), ""),
    ("model_file", ("train_manifest", "dry_run"), ""),
)


FORMS = released.Forms(
    family="Matcha-TTS",
    folder="",
    file="a released checkpoint",
    exported="that Piper and sherpa-onnx speak with",
    fetch="wget https://github.com/shivammehta25/Matcha-TTS-checkpoints/releases/download/v1.0/"
    "matcha_ljspeech.ckpt",
)


def are_symbols(symbols: list[str]) -> bool:
    """Whether these are the marks and then single characters."""
    return tuple(symbols[: len(MARKS)]) == MARKS and all(len(symbol) == 1 for symbol in symbols)


@dataclass(frozen=True)
class ModelInfo:
    """The record of a model beside its weights. `speakers`: their names, by the rows of vectors."""

    config: Annotated[dict, CONFIG]
    symbols: Annotated[list[str], are_symbols]
    speakers: Annotated[list[str], lambda speakers: len(speakers) > 0]
    language: str
    pretrained: bool  # began from released weights, perhaps by way of --init_from


@dataclass(frozen=True)
class MatchaFlags:
    """Flags of the voice, and where it starts."""

    # fmt: off
    model_size: str | None = flag(
        list(SIZES), None, None, "2.7, 18 or 50 million parameters (demo; full with data)", USUAL)
    model_file: str | None = flag(
        options.path, None, "FILE",
        "fine-tune a released checkpoint, matcha_ljspeech.ckpt or matcha_vctk.ckpt", USUAL, TRAINS)
    language: str | None = flag(
        None, None, "NAME",
        "the language of the texts, such as sw or Swahili: numbers are read in it (with your data"
        " it has to be given; am for the demo)", USUAL)
    dropout: float = flag(
        options.SHARE, DROPOUT, "P",
        "of the encoder; its first layers have five times as much, at most 0.5, and the decoder"
        " half of it (0.1)", TRAINS)
    vocoder_steps: int = flag(
        options.COUNT, 0, "N",
        "updates of a vocoder that is trained on the same recordings afterwards; 0: none, and the"
        " algorithm of Griffin and Lim makes the sound, which is rough (0)", TRAINS)
    export: str | None = flag(
        options.path, None, "DIR",
        "write the voice as a folder that Piper and sherpa-onnx speak with; after training, or"
        " alone with --resume PATH", USUAL)
    consent: str | None = flag(
        None, None, "TEXT",
        "with --export, for its model card: whose voice it is, that they agree, and the licence of"
        " the data", USUAL)


@dataclass(frozen=True, kw_only=True)
class MatchaOptions(MatchaFlags, splits.Request):
    """The request of the flags."""

    origin: Origin
    held_out: judge.HeldOut


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    title = "model (its shape comes from the checkpoint when resuming)"
    options.add_record(parser, title, MatchaFlags)
    judge.add_arguments(parser, "20")
    parser.refuse(EXCLUDES, NEEDS)


def resolve(args, is_demo: bool) -> MatchaOptions:
    """Checks these flags and returns what they ask for. Raises `UsageError`."""
    if args.model_file:
        released.require_source(args.model_file, "--model_file", FORMS)
    if args.consent is not None and not args.consent.strip():
        raise UsageError(
            "--consent: it is empty; say whose voice it is, that they agree, and the licence of the"
            " data"
        )
    if args.export:
        released.require_exports(vars(args), options.paths_in(args, *released.EXPORTS))
        onnx.require_packages()
    size = args.model_size or ("demo" if is_demo else "full")
    origin = Origin(
        given=args.given,
        path=args.model_file,
        flag="--model_file",
        may_be_random=True,
        size_name=size,
        size=SIZES[size],
        resume=args.resume,
        checkpoint_dir=args.checkpoint_dir,
        export=args.export,
        forms=FORMS,
    )
    language = languages.resolve(args, AMHARIC)
    return options.read_record(
        MatchaOptions,
        args,
        **splits.Request.resolve(args, for_synthesis=True),
        origin=origin,
        language=language and code_of(language),
        held_out=judge.resolve(args, released.exports_only(origin)),
    )


# --- the model ------------------------------------------------------------------------------------


class Family(released.Family):
    """Matcha-TTS. Every new voice gets its tokens and speakers from the training set."""

    model_info = ModelInfo
    sized = ("channels",)
    rows = (formats.ROWS,)

    def read(self, path: str) -> tuple[ModelInfo, dict[str, Tensor]]:
        config, weights = formats.read_model(path)
        print(formats.LICENCE)
        return ModelInfo(config, [], [], "", pretrained=True), weights

    def network(self, info: ModelInfo) -> Matcha:
        return Matcha(info.config)

    def make_model(self, info: ModelInfo, weights, trains: bool = False) -> Matcha:
        model = Matcha(info.config, self.asked.dropout if trains else 0.0)
        if weights:
            checkpoint.load_weights(model, weights)
        return model

    def create(self, source) -> ModelInfo:
        config = {**self.origin.size, "symbols": 1, "speakers": 1}
        return ModelInfo(config, [], [], "", pretrained=False)

    def begin(self, info: ModelInfo, weights, run, source):
        if run.resumed:
            return info, weights
        train = source()
        symbols = symbols_of(train.read)
        speakers = speakers_of(train)
        config = {**info.config, "symbols": len(symbols), "speakers": len(speakers)}
        is_released = info.pretrained
        if weights:
            config, weights = formats.adapted(info.config, weights, symbols, len(speakers))
        elif run.initial:
            saved_info = self.check_saved(run.initial)
            is_released = saved_info.pretrained
            if "model_size" not in self.origin.given:
                config = {**saved_info.config, "symbols": len(symbols), "speakers": len(speakers)}
            if saved_info.config["speakers"] > 1:  # without vectors its layers would not fit
                config["speakers"] = max(2, len(speakers))
            if set(saved_info.speakers) == set(speakers):
                speakers = saved_info.speakers  # their vectors are copied by row
        language = language_of(self.asked, run.initial)
        return ModelInfo(config, symbols, speakers, language, is_released), weights

    def check(self, info: ModelInfo, name: str) -> None:
        config = info.config
        if not is_possible(config):
            raise UsageError(f"{name}: no model has the shape that it describes")
        if len(info.symbols) != config["symbols"] or len(info.speakers) > config["speakers"]:
            raise UsageError(f"{name}: its tokens or speakers are not those of its model")

    def saved_flags(self, info: ModelInfo, saved: Saved) -> dict:
        return {"language": (self.given("language"), info.language)}

    def tokens(self, info: ModelInfo) -> list[str]:
        return info.symbols


def language_of(asked: MatchaOptions, saved: Saved | None) -> str:
    """The language of the texts: that of --language, else that of the voice that is `saved`. Raises
    `UsageError`."""
    if asked.language:
        return asked.language
    if saved is None:
        raise UsageError(languages.ASK)
    return checkpoint.read_infos(saved, ModelInfo, RunInfo)[0].language


def learning_rate(info: ModelInfo) -> float:
    """The usual peak rate."""
    if info.pretrained:
        return FINE_TUNING_RATE
    return RATES["demo"] if info.config["channels"] == SIZES["demo"]["channels"] else RATES["full"]


def describe(info: ModelInfo, model: Matcha) -> None:
    size = sum(p.numel() for p in model.parameters()) / 1e6
    speakers = "1 speaker" if len(info.speakers) == 1 else f"{len(info.speakers)} speakers"
    print(f"model: {size:.1f} M parameters, {len(info.symbols)} tokens, {speakers}")


def export(asked: MatchaOptions, voice: Voice, info: ModelInfo, about) -> None:
    """--export."""
    if asked.export:
        onnx.export(asked.export, asked.consent, voice, not info.pretrained, about)
