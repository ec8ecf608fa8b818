"""Where a model starts: at a checkpoint, at released weights, or at random ones. For all recipes
that can start from a released model.

    origin = released.resolve(args, FORMS, SIZES, "base", is_demo)  # what the flags ask for
    family = start.Family(asked)  # which has this origin
    info, model = family.first_model(run, texts)  # to train
    model, info, before = family.trained(RECIPE, RunInfo, setup)  # to evaluate, use or export
    family.export(info, model, about)
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common import checkpoint, device, options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.options import TRAINS, USUAL, OnOff, flag
from common.parts import lora
from models import adapters, card, lm_files, model_files
from models.model_files import MODELS

GOALS = ("train_manifest", "from_scratch", "max_steps", "num_epochs", "dry_run", "verify_gpu")

EXPORTS = ("export", "export_adapter")  # flags that name a folder which is replaced
WRITTEN = ("checkpoint_dir", "log_dir", "output_dir", "cache_audio")  # other folders of a command

LEAVE_OUT = (
    "leave it out to continue, or start a new run with another --output_dir, or from the weights"
    " that fit with --init_from in place of --resume"
)
TAKE = "leave it out to take that model"
FROM_SCRATCH = f"{TAKE}, or add --from_scratch to make a new one, which takes the weights that fit"

# Rows for `Parser.refuse`: flags that exclude each other.
EXCLUDES = (
    ("model_dir", "model_file", "both say where the model starts; give one of them"),
    *(("transcribe", export, "give one of them") for export in EXPORTS),
    *(
        (model, "from_scratch", "the second starts without released weights; leave one of them out")
        for model in MODELS
    ),
    *(
        (model, "model_size", "a released model has its own shape; leave one of them out")
        for model in MODELS
    ),
)


@dataclass(frozen=True)
class Forms:
    """The forms in which a family of models is released and exported, for help and messages."""

    family: str  # "Whisper"
    folder: str  # the folder that --model_dir takes: "a Hugging Face folder"
    file: str  # the file that --model_file takes; empty if the recipe has no such flag
    exported: str  # what loads an export: "for transformers, with OpenAI's model.pt"
    fetch: str  # the command that fetches a released model
    fetch_file: str = ""  # the one that fetches a file, if `fetch` does not
    scratch: bool = True  # whether a recipe has --from_scratch and --model_size

    def ways(self) -> str:
        """The flags that say where a training starts, for a message."""
        ways = f"--model_dir DIR ({self.folder})"
        if self.file:
            ways += f", --model_file FILE ({self.file})"
        return f"{ways}, or --from_scratch" if self.scratch else ways


@dataclass(frozen=True)
class Origin:
    """Where the model starts, as the flags ask."""

    given: frozenset[str]  # the names of the flags on the command line
    path: str | None  # the folder or file of released weights
    flag: str  # that names it
    may_be_random: bool  # whether the weights may be random if there is no checkpoint
    size_name: str | None  # --model_size
    size: dict | None  # its configuration; None for a released model
    resume: str | None
    checkpoint_dir: Path
    export: str | None  # the folder to export to
    forms: Forms
    from_scratch: bool = False
    adapters: Any = None  # see `adapters.resolve`
    adapter: str | None = None
    export_adapter: str | None = None  # the folder of that flag
    seed: int = 1  # of new adapters


# --- flags ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFlags:
    """Flags that say where a model starts."""

    # fmt: off
    model_dir: str | None = flag(
        options.path, None, "DIR", "fine-tune a released model; without training, use it", USUAL)
    model_file: str | None = flag(options.path, None, "FILE", "the same for a file", USUAL)
    from_scratch: bool = flag(
        OnOff, False, None, "train all weights from random ones (on for the demo)", USUAL, TRAINS)
    model_size: str | None = flag(None, None, None, "shape of a model from scratch ()", USUAL)
    export: str | None = flag(
        options.path, None, "DIR", "write the weights for other programs", USUAL)


def add_arguments(parser, forms: Forms, sizes: Iterable[str], usual_size: str):
    """Adds the flags that say where a model starts, and --export. `sizes` are the choices of
    --model_size; the first is the demo's, and `usual_size` is the default with data. Returns the
    group of flags, so that a family can add its own to it."""
    title = "model: where it starts (its shape comes from the checkpoint when resuming)"
    folder = f"fine-tune {forms.family}, {forms.folder}; without training, use it"
    export = (
        f"write the weights as a folder {forms.exported}; after training, or alone with --resume"
        " PATH or --model_dir"
    )
    file = {"help": f"the same for {forms.file}"} if forms.file else options.LEAVE_OUT
    size = scratch = options.LEAVE_OUT
    if forms.scratch:
        sizes = list(sizes)
        usual = f"{sizes[0]}, without data; {usual_size} with data"
        size = {"choices": sizes, "help": f"shape of a model from scratch ({usual})"}
        scratch = {}
    parser.refuse(EXCLUDES)
    return options.add_record(
        parser,
        title,
        ModelFlags,
        model_dir={"help": folder},
        model_file=file,
        from_scratch=scratch,
        model_size=size,
        export={"help": export},
    )


def resolve(args, forms: Forms, sizes: dict[str, dict], usual_size: str, is_demo: bool) -> Origin:
    """Checks the flags that say where the model starts, and fills in --model_size. `sizes` are the
    names of model sizes and their configurations. A demo starts at random weights, and a command
    that does not train needs none. Raises `UsageError`."""
    path = args.model_dir or getattr(args, "model_file", None)
    flag = "--model_dir" if args.model_dir else "--model_file"
    from_scratch = forms.scratch and args.from_scratch
    is_command = any(options.is_on(vars(args), name) for name in args.rules.commands)
    trains = options.plans(args) or not is_command
    starts_somewhere = path or from_scratch or is_demo or args.resume or args.init_from
    if trains and not starts_somewhere:
        raise UsageError(f"training needs a model to start from: add {forms.ways()}")
    if path:
        require_source(path, flag, forms)
    require_exports(vars(args), options.paths_in(args, *EXPORTS))
    if forms.scratch and not path and args.model_size is None:
        args.model_size = next(iter(sizes)) if is_demo else usual_size
    size_name = args.model_size if forms.scratch else None
    settings = adapters.resolve(args, path)
    return Origin(
        given=args.given,
        path=path,
        flag=flag,
        from_scratch=from_scratch,
        may_be_random=from_scratch or (is_demo and not path and not args.init_from),
        size_name=size_name,
        size=sizes.get(size_name),
        resume=args.resume,
        checkpoint_dir=args.checkpoint_dir,
        export=args.export,
        forms=forms,
        adapters=settings,
        adapter=args.adapter,
        export_adapter=getattr(args, "export_adapter", None),
        seed=args.seed,
    )


def require_exports(flags: dict, inputs: list[str]) -> None:
    """Raises `UsageError` or `RunError` if a folder of EXPORTS cannot be written, or if it is, or
    holds, another place that the command writes, or one of its `inputs`: now, not after hours of
    training. So does --export of a demo that would replace a trained model. `flags`: the values of
    the command line, by name."""
    best = Path(flags["checkpoint_dir"], "best.safetensors")
    goals = {"resume", "init_from", "evaluate", *MODELS, *GOALS}
    if flags["export"] and best.is_file() and not goals & flags["given"]:
        raise UsageError(
            f"--export alone would train the demo, and {best} is there: add --resume {best} to"
            " export it"
        )
    places = {name: flags.get(name) for name in (*EXPORTS, *WRITTEN)}
    for name in EXPORTS:
        if not (export := places[name]):
            continue
        model_files.require_export(export)
        others = [place for other, place in places.items() if place and other != name]
        for other in (*others, *inputs):
            refuse_overlap(export, other, f"--{name}")


def refuse_overlap(export: str, other: str | Path, flag: str = "--export") -> None:
    """Raises `UsageError` if `other` would be lost when an export replaces its folder."""
    if Path(os.path.realpath(other)).is_relative_to(os.path.realpath(export)):
        raise UsageError(
            f"{flag} {export}: this command uses {other}; name a folder of its own for the export"
        )


def fetching(forms: Forms) -> str:
    """The command that fetches a model."""
    beside = Path(sys.executable).with_name("hf")  # .venv/bin is not in the shell's PATH
    fetch = forms.fetch
    return fetch.replace("hf ", f"{os.path.relpath(beside)} ", 1) if beside.exists() else fetch


def require_source(path: str, flag: str, forms: Forms) -> None:
    """Raises `UsageError` if there is nothing at this path, or a file in place of a folder."""
    if not os.path.exists(path):
        fetch = flag == "--model_file" and forms.fetch_file
        raise UsageError(
            f"{flag} {path}: no such file or folder, and nothing is downloaded here; fetch a model"
            f" with: {fetch or fetching(forms)}"
        )
    is_folder = os.path.isdir(path)
    if flag == "--model_dir" and not is_folder:
        advice = "a file: use --model_file" if forms.file else "a file: name its folder"
        raise UsageError(f"{flag} {path}: it is {advice}")
    if flag == "--model_file" and is_folder:
        advice = "use --model_dir" if forms.folder else "name the file in it"
        raise UsageError(f"{flag} {path}: it is a folder: {advice}")


def exports_only(origin: Origin, goals: Iterable[str] = GOALS) -> bool:
    """Whether --export is asked for alone: weights are named, and none of the flags in `goals` asks
    for training. `--resume auto` continues a run."""
    if not (origin.export or origin.export_adapter) or origin.given & set(goals):
        return False
    if origin.resume:
        return origin.resume != "auto"
    return origin.path is not None


def exports_adapter_only(origin: Origin) -> bool:
    """Whether all that is asked for is --export_adapter of saved weights."""
    return exports_only(origin) and not origin.export and "evaluate" not in origin.given


# --- the weights of a command ---------------------------------------------------------------------


def weights_file(origin: Origin) -> Path | None:
    """The file of the weights of `Family.use`; None for a released model."""
    named = origin.adapter or origin.resume
    if origin.path and not named:
        return None
    return checkpoint.path_to_use(named, origin.checkpoint_dir)


def weights_folder(origin: Origin) -> Path | None:
    """The folder of `weights_file`."""
    file = weights_file(origin)
    return file and file.parent


def read_run_info(kind: type, saved: Saved | None):
    """The `RunInfo`, a dataclass `kind`, of the run that saved a checkpoint; None without one.
    Raises `UsageError`."""
    if saved is None:
        return None
    return records.read(kind, saved.run_info, saved.path)


# --- a family -------------------------------------------------------------------------------------


class Family:
    """A family of released models. Each has a subclass, which says what differs: the attributes,
    the methods of the first part, and those of the second part that it overrides.

    `asked`: the record of the family's flags, which has an `origin`. `info` stands for its
    `ModelInfo`. `weights` are {name: tensor}, None if they are random or the loop loads them."""

    model_info: type  # the record of a model beside its weights
    sized: tuple[str, ...] = ()  # the names in a configuration that tell sizes apart
    # How the names of the layers end that --lora_targets means: queries and values; those of
    # attention; and the other linear ones.
    queries: tuple[str, ...] = ("q_proj", "v_proj")
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj")
    linear: tuple[str, ...]
    # Fields of `lora.Layers`.
    whole: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()  # the tensors that have a row for each token
    peft_class = ""  # of transformers, for the card of adapters

    def __init__(self, asked):
        self.asked = asked
        self.origin: Origin = asked.origin

    # What every family says.

    def read(self, path: str) -> tuple[Any, dict[str, torch.Tensor]]:
        """The info and the weights of a released model. Raises `UsageError`."""
        raise NotImplementedError

    def network(self, info) -> torch.nn.Module:
        """The network with random weights."""
        raise NotImplementedError

    def make_model(self, info, weights, trains: bool = False) -> torch.nn.Module:
        """A model with these weights, or random ones. `trains`: with the flags' dropout."""
        raise NotImplementedError

    def create(self, source):
        """The info of a new model. `source`: see `first_model`. Raises `UsageError`."""
        raise NotImplementedError

    def check(self, info, name: str) -> None:
        """Raises `UsageError` if the parts of an info that was saved in the file `name` contradict
        each other."""
        raise NotImplementedError

    def tokens(self, info) -> list[str]:
        """The meaning of each row of `rows`."""
        raise NotImplementedError

    def form(self, info) -> card.Form:
        """The card of --export."""
        raise NotImplementedError

    def write(self, info, weights: dict[str, torch.Tensor], texts: dict[str, str]) -> list[str]:
        """Writes --export with `texts` by the names of their files, the card among them, and
        returns the names of all files."""
        raise NotImplementedError

    # What some families say.

    def conflicts(self, info, saved: Saved) -> list[str]:
        """The flags that contradict a checkpoint, each with what the checkpoint has."""
        origin = self.origin
        flags = []
        has = {name: info.config[name] for name in self.sized}
        if "model_size" in origin.given and not has.items() <= origin.size.items():
            sizes = ", ".join(f"{name} {value}" for name, value in has.items())
            flags.append(f"--model_size {origin.size_name} (the checkpoint has {sizes})")
        if origin.path and not info.pretrained:
            flags.append(f"{origin.flag} {origin.path} (the checkpoint's model began from scratch)")
        if origin.from_scratch and info.pretrained:
            ways = "--model_dir or --model_file" if origin.forms.file else "--model_dir"
            flags.append(
                "--from_scratch (the checkpoint's model began from released weights; a script adds"
                f" this flag if there is no {ways}: give the one of the first command)"
            )
        return flags + differing(self.saved_flags(info, saved))

    def saved_flags(self, info, saved: Saved) -> dict[str, tuple[Any, Any]]:
        """What a checkpoint decides: {flag: (its value if it is given; the checkpoint's)}."""
        return {}

    def given(self, flag: str):
        """The value of a flag that is on the command line, else None."""
        return getattr(self.asked, flag) if flag in self.origin.given else None

    def begin(self, info, weights, run, source) -> tuple[Any, dict[str, torch.Tensor] | None]:
        """The info and weights of a model that is trained, from those of `choose`. `run` and
        `source`: see `first_model`. Raises `UsageError`."""
        return info, weights

    def require_usable(self, info) -> None:
        """Raises `UsageError` for a model that cannot be used or exported as the flags ask."""

    def base(self, path: str) -> dict[str, torch.Tensor]:
        """The weights of `read`, also if no flag says what the info needs."""
        return self.read(path)[1]

    def layers(self, info, targets: str) -> lora.Layers:
        """The layers that --lora_targets means."""
        with torch.device("meta"):
            modules = [name for name, _ in self.network(info).named_modules()]
        ends = self.ends(targets)
        adapted = [n for n in modules if n.endswith(ends) and not n.startswith(self.whole)]
        return lora.Layers(adapted, self.whole, self.kept)

    def ends(self, targets: str) -> tuple[str, ...]:
        """How the names of the layers end that --lora_targets means."""
        if targets == "q,v":
            return self.queries
        return self.attention if targets == "attention" else (*self.attention, *self.linear)

    def prefix(self, info) -> str:
        """What the names in transformers' model begin with in addition to these, but those that are
        trained whole beside adapters."""
        return ""

    def lm_names(self, info) -> lm_files.Names | None:
        """The names of tokens in a program that decodes --export with a language model, if any."""
        return None

    def about(self, info, about: card.About) -> card.About:
        """`about` with what the info knows."""
        return replace(about, is_new=not info.pretrained)

    def adapter_form(self, info) -> card.Form:
        """The card of --export_adapter."""
        use = card.PEFT.replace("CLASS", self.peft_class)
        return replace(self.form(info), library="peft", use=use)

    # What all have in common.

    def first_model(self, run, source: Callable) -> tuple[Any, torch.nn.Module]:
        """The model that a training `run` (`common.loop.begin`) starts with, and its info: that of
        its checkpoint, that of --init_from, a released one, or a new one. It has the adapters that
        the flags ask for. `source`: the recipe's function that returns the training texts, or what
        is made of them, if the vocabulary comes from them. Raises `UsageError` and `DataError`."""
        with run.model_device():
            create = functools.partial(self.create, source)
            info, weights = self.choose(run.resumed, run.initial, create)
            info, weights = self.begin(info, weights, run, source)
            model = self.make_model(info, weights, trains=True)
            adapters.adapt(self, info, model, weights, run)
        return info, model

    def trained(
        self, recipe: str, run_info: type, setup: device.Setup
    ) -> tuple[torch.nn.Module, Any, Any]:
        """A model that is not trained further, its info, and the `run_info` of the run that trained
        it, which is None for a released one. Raises `UsageError`."""
        info, weights, saved = self.use(recipe)
        self.require_usable(info)
        earlier_run = read_run_info(run_info, saved)
        return self.make_model(info, weights).to(setup.device).eval(), info, earlier_run

    def released_model(self) -> tuple[Any, torch.nn.Module]:
        """The released model that a flag names, with its info, on the host. Raises `UsageError`."""
        info, weights = self.read(self.origin.path)
        self.require_usable(info)
        return info, self.make_model(info, weights).eval()

    def choose(
        self, resumed: Saved | None, initial: Saved | None, create: Callable[[], Any]
    ) -> tuple[Any, dict[str, torch.Tensor] | None]:
        """The info of the model to be trained, and the weights that it starts with. `resumed` is
        the checkpoint that the run resumes, `initial` that of --init_from, whose model is taken if
        no flag names another. `create()` makes the info of a new model. Raises `UsageError`."""
        origin = self.origin
        if resumed:
            info = self.read_info(resumed)
            if not resumed.adapters:
                return info, None
            settings = adapters.adapters_of(self, info, resumed)
            base = adapters.read_base(self, settings, resumed.path)
            return info, {**base, **lora.without_adapters(resumed.model)}
        if initial and (initial.adapters or origin.adapters):
            adapters.match_initial(self, initial)
        if origin.path:
            return self.read(origin.path)
        if initial and not origin.may_be_random:
            advice = FROM_SCRATCH if origin.forms.scratch else TAKE
            return self.read_info(initial, advice), None
        if not origin.may_be_random:  # known only when --resume auto has found no checkpoint
            raise UsageError(
                "there is no checkpoint to resume from, and nothing says where the model starts:"
                f" add {origin.forms.ways()}"
            )
        info = create()
        shapes = checkpoint.shapes_of(lambda: self.network(info))
        model_files.require_room(sum(map(math.prod, shapes.values())))
        return info, None

    def first_saved(self, recipe: str) -> Saved | None:
        """The checkpoint that a training with these flags would begin with: that of --resume or, if
        the flags name no other model, that of --init_from. Raises `UsageError`."""
        origin = self.origin
        saved = checkpoint.resume(origin.resume, origin.checkpoint_dir, recipe)
        if self.asked.init_from and not (saved or origin.path or origin.may_be_random):
            saved = checkpoint.read_weights(self.asked.init_from, recipe, "--init_from")
        return saved

    def use(self, recipe: str) -> tuple[Any, dict[str, torch.Tensor], Saved | None]:
        """A model that is not trained further: its info and weights, and the checkpoint that they
        are from, None for a released model. The model is that of --model_dir or --model_file, of
        --resume, or of the best evaluation. Raises `UsageError`."""
        origin = self.origin
        named = origin.adapter or origin.resume
        if origin.path and not named:
            return *self.read(origin.path), None
        saved = checkpoint.weights_to_use(named, origin.checkpoint_dir, recipe)
        if origin.adapter and not saved.adapters:
            raise UsageError(
                f"--adapter {origin.adapter}: it has no adapters; name it with --resume"
            )
        return self.read_info(saved), self.whole_weights(saved), saved

    def read_info(self, saved: Saved, advice: str = LEAVE_OUT):
        """The info of a checkpoint. Raises `UsageError` if it does not fit the checkpoint's
        weights, and for flags that contradict it: otherwise `--resume auto` in a script would
        continue an earlier demo and ignore the model that the flags name. `advice` ends that
        message."""
        info = self.check_saved(saved)
        flags = self.conflicts(info, saved) + adapters.conflicts(self.origin, saved)
        if flags:
            raise UsageError(f"{', '.join(flags)} conflicts with the checkpoint: {advice}")
        return info

    def check_saved(self, saved: Saved):
        """The info of a checkpoint, if it and the weights are of one model. Otherwise a damaged
        info could ask for a model of any size. Raises `UsageError`."""
        info = records.read(self.model_info, saved.model_info, saved.path)
        self.check(info, str(saved.path))

        def make() -> torch.nn.Module:
            network = self.network(info)
            if saved.adapters:
                lora.attach(network, adapters.adapters_of(self, info, saved), seed=0)
            return network

        shapes = checkpoint.shapes_of(make)
        model_files.check_shapes(saved.model, shapes, saved.path, self.origin.forms.family)
        return info

    def whole_weights(self, saved: Saved) -> dict[str, torch.Tensor]:
        """The weights of a checkpoint, without adapters. Raises `UsageError`."""
        return adapters.merged(self, saved) if saved.adapters else saved.model

    def vocabulary(self, info, initial: Saved | None) -> checkpoint.Vocabulary | None:
        """The meanings of the rows of tokens, here and in the weights of --init_from."""
        if initial is None:
            return None
        saved_info = records.read(self.model_info, initial.model_info, initial.path)
        return checkpoint.Vocabulary(self.rows, self.tokens(info), self.tokens(saved_info))

    def untrained(self, info, initial: Saved | None) -> list[int]:
        """Those of `info.new_pieces` that the weights of --init_from have not learned."""
        vocabulary = self.vocabulary(info, initial)
        known = set(vocabulary.saved) if vocabulary else set()
        return [row for row in info.new_pieces if not known or vocabulary.tokens[row] not in known]

    def usual_adapters(self, info) -> Callable[[int], lora.Adapters]:
        """The adapters that --lora adds, by their rank, for the advice of a dry run."""
        return functools.partial(adapters.usual, self, info)

    def export(self, info, model: torch.nn.Module, about: card.About) -> None:
        """--export and --export_adapter, with model cards. Raises `UsageError` and `RunError`."""
        if folder := self.origin.export:
            weights = self.trained_weights(model)
            form = self.form(info)
            texts = {}
            if names := self.lm_names(info):
                texts, form = lm_files.beside(about.weights, names, form, self.asked.how.lm)
            name = Path(folder).resolve().name
            texts[model_files.CARD] = card.readme(name, self.about(info, about), form)
            written = self.write(info, weights, texts)
            print(f"exported to {folder}: {', '.join(written)}")
        if self.origin.export_adapter:
            adapters.export(self, about)

    def export_adapter(self, recipe: str) -> None:
        """--export_adapter alone, without released weights. Raises `UsageError` and `RunError`."""
        adapters.export(self, card.About(recipe, self.origin.path, weights_file(self.origin)))

    def trained_weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The weights of a model after training, without adapters. Raises `UsageError`."""
        if checkpoint.partial_of(model) is None:
            return model.state_dict()
        # Into those of their file, because those of the model may have 16 bits.
        base = self.base(self.origin.path)
        trained = {name: tensor.cpu() for name, tensor in checkpoint.state_of(model).items()}
        return lora.merge(base, trained, lora.adapters_of(model))


def differing(values: dict[str, tuple[Any, Any]]) -> list[str]:
    """The flags whose values differ from those of a checkpoint; see `Family.saved_flags`."""
    return [
        f"--{flag} {value} (the checkpoint has {has})"
        for flag, (value, has) in values.items()
        if value not in (None, has)
    ]
