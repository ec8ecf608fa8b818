"""Where a model starts: at a checkpoint, at released weights, or at random ones. For all recipes
that can start from a released model.

    # What the flags ask for
    origin = released.resolve(args, FORMS, SIZES, "base", is_demo)
    # The model to train
    info, weights = released.choose(origin, family, run.resumed, run.initial, create)
    # The model to evaluate, use or export
    info, weights, saved = released.use(origin, family, RECIPE)
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import checkpoint, options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.options import TRAINS, USUAL, OnOff, flag
from models import model_files

MODELS = ("model_dir", "model_file")  # flags that name released weights
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
    """Where the model starts, as the flags ask.

    `path` is the folder or file of released weights, which the flag `flag` names, or None.
    `may_be_random` says whether the weights may be random if there is no checkpoint. `size` is the
    configuration of --model_size `size_name`, and None for a released model. `export` is the folder
    to export to, or None. `adapters` and `adapter`: see `adapters.resolve`. `export_adapter`: the
    folder of that flag. `given` are the names of the flags on the command line."""

    given: frozenset[str]
    path: str | None
    flag: str
    from_scratch: bool
    may_be_random: bool
    size_name: str | None
    size: dict | None
    resume: str | None
    checkpoint_dir: Path
    export: str | None
    forms: Forms
    adapters: Any = None
    adapter: str | None = None
    export_adapter: str | None = None


@dataclass(frozen=True)
class Family:
    """A family of models, as `choose` and `use` need it. `info` stands for a `ModelInfo`.

    `read(path)` returns the info and the weights of a released model; `network(info)` makes the
    network with random weights. `check(info, name)` raises `UsageError` if the parts of an info
    that was saved contradict each other; `name` is the file's. `conflicts(info, saved)` lists the
    flags that contradict a checkpoint, each with what the checkpoint has instead; see
    `conflicts`. `layers(info, targets)`: the `lora.Layers` that --lora_targets means.
    `base(path)`: the weights that `read` returns, if no flag has to say what the info needs.

    What a family with --export_adapter has besides: `about(info, about)` completes a `card.About`;
    `export(info, weights, about)` writes --export; `adapter_card` is the `card.Form` of its
    adapters, by the info; `prefix(info)`: what the names of transformers' model begin with in
    addition to these, but those that are trained whole beside adapters."""

    model_info: type
    read: Callable[[str], tuple[Any, dict[str, torch.Tensor]]]
    network: Callable[[Any], torch.nn.Module]
    check: Callable[[Any, str], None]
    conflicts: Callable[[Any, Saved], list[str]]
    layers: Callable[[Any, str], Any]
    about: Callable[[Any, Any], Any] | None = None
    export: Callable[[Any, dict[str, torch.Tensor], Any], None] | None = None
    adapter_card: Callable[[Any], Any] | None = None
    prefix: Callable[[Any], str] = lambda info: ""
    base: Callable[[str], dict[str, torch.Tensor]] | None = None


# --- flags ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flags:
    """Flags that say where a model starts."""

    # fmt: off
    model_dir: str | None = flag(
        options.path, None, "DIR", "fine-tune a released model; without training, use it", USUAL)
    model_file: str | None = flag(options.path, None, "FILE", "the same for a file", USUAL)
    from_scratch: bool = flag(
        OnOff, False, None, "train all weights from random ones (on for the demo)", USUAL, TRAINS)
    model_size: str | None = flag(None, None, None, "shape of a model from scratch ()", USUAL)
    export: str | None = flag(
        options.path, None, "DIR",
        "write the weights for other programs", USUAL)
    # fmt: on


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
        Flags,
        model_dir={"help": folder},
        model_file=file,
        from_scratch=scratch,
        model_size=size,
        export={"help": export},
    )


def path_of(args) -> str | None:
    """The folder or file of released weights that a flag names."""
    return args.model_dir or getattr(args, "model_file", None)


def resolve(args, forms: Forms, sizes: dict[str, dict], usual_size: str, is_demo: bool) -> Origin:
    """Checks the flags that say where the model starts, and fills in --model_size. `sizes` are the
    names of model sizes and their configurations. A demo starts at random weights, and a command
    that does not train needs none. Raises `UsageError`."""
    from models import adapters

    path = path_of(args)
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
    settings, adapter = adapters.resolve(args)
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
        adapter=adapter,
        export_adapter=getattr(args, "export_adapter", None),
    )


def require_exports(flags: dict, inputs: list[str]) -> None:
    """Raises `UsageError` or `RunError` if a folder of EXPORTS cannot be written, or if it is, or
    holds, another place that the command writes, or one of its `inputs`: now, not after hours of
    training. `flags`: the values of the command line, by name."""
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


def fetching(path: str, forms: Forms) -> str:
    """The command that fetches a model; of the family's models the one that `path` names."""
    fetch = forms.fetch
    usual = fetch.rpartition(" ")[2]
    asked = Path(path).name
    is_family = asked.split("-")[0] == usual.split("-")[0] and f"/{usual} " in fetch
    if is_family and re.fullmatch(r"[\w.-]+", asked):
        fetch = fetch.replace(usual, asked)
    beside = Path(sys.executable).with_name("hf")  # .venv/bin is not in the shell's PATH
    return fetch.replace("hf ", f"{os.path.relpath(beside)} ", 1) if beside.exists() else fetch


def require_source(path: str, flag: str, forms: Forms) -> None:
    """Raises `UsageError` if there is nothing at this path, or a file in place of a folder."""
    if not os.path.exists(path):
        fetch = flag == "--model_file" and forms.fetch_file
        raise UsageError(
            f"{flag} {path}: no such file or folder, and nothing is downloaded here; fetch a model"
            f" with: {fetch or fetching(path, forms)}"
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


# --- the model ------------------------------------------------------------------------------------


def choose(
    origin: Origin,
    family: Family,
    resumed: Saved | None,
    initial: Saved | None,
    create: Callable[[], Any],
) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """The info of the model to be trained, and the weights that it starts with: released ones, or
    None if they are random or the loop loads them. `resumed` is the checkpoint that the run
    resumes, `initial` that of --init_from, whose model is taken if no flag names another.
    `create()` makes the info of a new model. Raises `UsageError`."""
    if resumed:
        info = read_info(origin, family, resumed)
        if not resumed.adapters:
            return info, None
        from models import adapters

        return info, adapters.frozen_base(origin, family, info, resumed)
    if initial and (initial.adapters or origin.adapters):
        from models import adapters

        adapters.match_initial(origin, family, initial)
    if origin.path:
        return family.read(origin.path)
    if initial and not origin.may_be_random:
        advice = FROM_SCRATCH if origin.forms.scratch else TAKE
        return read_info(origin, family, initial, advice), None
    if not origin.may_be_random:  # which is known only when --resume auto has found no checkpoint
        raise UsageError(
            "there is no checkpoint to resume from, and nothing says where the model starts: add"
            f" {origin.forms.ways()}"
        )
    info = create()
    shapes = checkpoint.shapes_of(lambda: family.network(info))
    model_files.require_room(sum(map(math.prod, shapes.values())))
    return info, None


def use(
    origin: Origin, family: Family, recipe: str
) -> tuple[Any, dict[str, torch.Tensor], Saved | None]:
    """A model that is not trained further: its info and weights, and the checkpoint that they are
    from, None for a released model. The model is that of --model_dir or --model_file, of --resume,
    or of the best evaluation. Raises `UsageError`."""
    if has_foreign_adapter(origin):
        from models import adapters

        return *adapters.with_foreign(origin, family), None
    if origin.path and not (origin.resume or origin.adapter):
        info, weights = family.read(origin.path)
        return info, weights, None
    named = origin.adapter or origin.resume
    saved = checkpoint.weights_to_use(named, origin.checkpoint_dir, recipe)
    if origin.adapter and not saved.adapters:
        raise UsageError(f"--adapter {origin.adapter}: it has no adapters; name it with --resume")
    return read_info(origin, family, saved), whole_weights(origin, family, saved), saved


def has_foreign_adapter(origin: Origin) -> bool:
    """Whether --adapter names a folder of peft's."""
    if origin.adapter is None:
        return False
    from models import peft_files

    return peft_files.is_adapter(origin.adapter)


def weights_file(origin: Origin) -> Path | None:
    """The file of the weights of `use`; None for a released model."""
    named = origin.adapter or origin.resume
    if has_foreign_adapter(origin) or (origin.path and not named):
        return None
    return checkpoint.path_to_use(named, origin.checkpoint_dir)


def read_run_info(kind: type, saved: Saved | None):
    """The `RunInfo`, a dataclass `kind`, of the run that saved a checkpoint; None without one.
    Raises `UsageError`."""
    if saved is None:
        return None
    return records.read(kind, saved.run_info, saved.path)


def read_info(origin: Origin, family: Family, saved: Saved, advice: str = LEAVE_OUT):
    """The `ModelInfo` of a checkpoint. Raises `UsageError` if it does not fit the checkpoint's
    weights, and for flags that contradict it: otherwise `--resume auto` in a script would continue
    an earlier demo and ignore the model that the flags name. `advice` ends that message."""
    info = check_saved(family, saved, origin.forms.family)
    found = family.conflicts(info, saved)
    if origin.adapters:
        from models import adapters

        found += adapters.conflicts(origin, saved)
    if found:
        raise UsageError(f"{', '.join(found)} conflicts with the checkpoint: {advice}")
    return info


def check_saved(family: Family, saved: Saved, name: str):
    """The `ModelInfo` of a checkpoint, if it and the weights are of one model. Otherwise a damaged
    info could ask for a model of any size. Raises `UsageError`."""
    info = records.read(family.model_info, saved.model_info, saved.path)
    family.check(info, str(saved.path))

    def make() -> torch.nn.Module:
        network = family.network(info)
        if saved.adapters:
            from models import adapters

            adapters.attach_saved(network, family, info, saved)
        return network

    model_files.check_shapes(saved.model, checkpoint.shapes_of(make), saved.path, name)
    return info


def trained_weights(
    origin: Origin, family: Family, model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """The weights of a model after training, without adapters. Raises `UsageError`."""
    if checkpoint.partial_of(model) is None:
        return model.state_dict()
    from models import adapters

    return adapters.merged_after_training(origin, family, model)


def whole_weights(origin: Origin, family: Family, saved: Saved) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, without adapters. Raises `UsageError`."""
    if not saved.adapters:
        return saved.model
    from models import adapters

    return adapters.merged(origin, family, saved)


def conflicts(origin: Origin, info: Any, sized: Iterable[str]) -> list[str]:
    """The flags of `origin` that contradict a checkpoint with this info, each with what the
    checkpoint has. `sized` are the names in its configuration that tell sizes apart."""
    found = []
    if "model_size" in origin.given:
        differing = [name for name in sized if origin.size[name] != info.config[name]]
        if differing:
            has = ", ".join(f"{name} {info.config[name]}" for name in sized)
            found.append(f"--model_size {origin.size_name} (the checkpoint has {has})")
    if origin.path and not info.pretrained:
        found.append(f"{origin.flag} {origin.path} (the checkpoint's model began from scratch)")
    if origin.from_scratch and info.pretrained:
        ways = "--model_dir or --model_file" if origin.forms.file else "--model_dir"
        found.append(
            "--from_scratch (the checkpoint's model began from released weights; a script adds this"
            f" flag if there is no {ways}: give the one of the first command)"
        )
    return found
