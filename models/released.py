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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common import checkpoint, options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.parts import lora
from models import card, model_files, peft_files

MODELS = ("model_dir", "model_file")  # flags that name released weights
GOALS = ("train_manifest", "from_scratch", "max_steps", "num_epochs", "dry_run", "verify_gpu")

EXPORTS = ("export", "export_adapter")  # flags that name a folder which is replaced
WRITTEN = ("checkpoint_dir", "log_dir", "output_dir", "cache_audio")  # other folders of a command

ADAPTING = ("lora", "lora_targets", "lora_alpha")
TARGETS = ("linear", "attention", "q,v")  # choices of --lora_targets

LEAVE_OUT = (
    "leave it out to continue, or start a new run with another --output_dir, or from the weights"
    " that fit with --init_from in place of --resume"
)
FROM_SCRATCH = (
    "leave it out to take that model, or add --from_scratch to make a new one, which takes the"
    " weights that fit"
)

# Rows for common.options: flags that exclude each other.
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
    ("from_scratch", options.COMMAND, options.TRAINS),
    *((flag, options.COMMAND, options.TRAINS) for flag in ADAPTING),
    ("adapter", "resume", "both name weights to use; leave one of them out"),
    ("lora", "sharded", "shards are of a model that is trained; leave one of them out"),
    ("lora", "use_cpu_offload", "adapters and their states are small; leave the second out"),
)
# Rows for common.options: flags that need another one.
NEEDS = (
    (
        "lora",
        (*MODELS, "resume", "init_from", "dry_run", "verify_gpu"),
        "a random model cannot stay as it is",
    ),
    ("lora_targets", ("lora",), ""),
    ("lora_alpha", ("lora",), ""),
)


@dataclass(frozen=True)
class Forms:
    """The forms in which a family of models is released and exported, for help and messages."""

    family: str  # "Whisper"
    folder: str  # the folder that --model_dir takes: "a Hugging Face folder"
    file: str  # the file that --model_file takes; empty if the recipe has no such flag
    exported: str  # what loads an export: "for transformers, with OpenAI's model.pt"
    fetch: str  # the command that fetches a released model
    peft: bool = True  # whether peft knows such a model


@dataclass(frozen=True)
class Origin:
    """Where the model starts, as the flags ask.

    `path` is the folder or file of released weights, which the flag `flag` names, or None.
    `may_be_random` says whether the weights may be random if there is no checkpoint. `size` is the
    configuration of --model_size `size_name`, and None for a released model. `export` is the folder
    to export to, or None. `adapters`: of --lora, or of the adapters of peft's that --init_from
    names. `adapter`: the file or folder of --adapter, or that folder. `export_adapter`: the folder
    of that flag. `given` are the names of the flags on the command line."""

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
    adapters: lora.Settings | None = None
    adapter: str | None = None
    export_adapter: str | None = None


@dataclass(frozen=True)
class Family:
    """A family of models, as `choose` and `use` need it. `info` stands for a `ModelInfo`.

    `read(path)` returns the info and the weights of a released model; `network(info)` makes the
    network with random weights. `check(info, name)` raises `UsageError` if the parts of an info
    that was saved contradict each other; `name` is the file's. `conflicts(info, saved)` lists the
    flags that contradict a checkpoint, each with what the checkpoint has instead; see
    `conflicts`. `layers(info, targets)`: the layers that --lora_targets means. `prefix`: what the
    names of transformers' model begin with in addition to these; None if there is no such model."""

    model_info: type
    read: Callable[[str], tuple[Any, dict[str, torch.Tensor]]]
    network: Callable[[Any], torch.nn.Module]
    check: Callable[[Any, str], None]
    conflicts: Callable[[Any, Saved], list[str]]
    layers: Callable[[Any, str], lora.Layers]
    prefix: str | None = None


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser, forms: Forms, sizes: Iterable[str], usual_size: str):
    """Adds the flags that say where a model starts, and --export. `sizes` are the choices of
    --model_size; the first is the demo's, and `usual_size` is the default with data. Returns the
    group of flags, so that a family can add its own to it."""
    sizes = list(sizes)
    group = parser.add_argument_group(
        "model: where it starts (its shape comes from the checkpoint when resuming)"
    )
    options.add_rows(
        group,
        ("model_dir", options.path, None, "DIR",
         f"fine-tune {forms.family}, {forms.folder}; without training, use it"),
    )  # fmt: skip
    if forms.file:
        options.add_rows(
            group, ("model_file", options.path, None, "FILE", f"the same for {forms.file}")
        )
        parser.usual("model_file")
    options.add_rows(
        group,
        ("from_scratch", options.OnOff, False, None,
         "train all weights from random ones (on for the demo)"),
        ("model_size", sizes, None, None,
         f"shape of a model from scratch ({sizes[0]}, without data; {usual_size} with data)"),
        ("export", options.path, None, "DIR",
         f"write the weights as a folder {forms.exported}; after training, or alone with --resume"
         " PATH or --model_dir"),
    )  # fmt: skip
    parser.usual("model_dir", "from_scratch", "model_size", "export")
    add_lora_arguments(parser, forms.peft)
    return group


def add_lora_arguments(parser, has_peft: bool) -> None:
    group = parser.add_argument_group("low-rank adapters, in place of training all weights")
    options.add_rows(
        group,
        ("lora", options.number(int, 1, lora.MOST_RANK), None, "RANK",
         "train adapters of this rank beside a released model, whose weights stay as they are, on"
         " the GPU in 16 bits (off; 8 to 32 are usual)"),
        ("lora_targets", TARGETS, None, None,
         "which layers get adapters: all linear ones, those of attention, or two of these"
         f" ({TARGETS[0]})"),
        ("lora_alpha", options.number(float, 0.0, lora.MOST_ALPHA), None, "X",
         "adapters count X / RANK times (twice RANK)"),
        ("adapter", options.path, None, "PATH",
         "without training, use --model_dir with these adapters: best.safetensors of a run, or a"
         " folder of peft's"),
    )  # fmt: skip
    if has_peft:
        options.add_rows(
            group,
            ("export_adapter", options.path, None, "DIR",
             "write the adapters for peft and transformers; after training, or alone with --resume"
             " PATH"),
        )  # fmt: skip
    parser.usual("lora")


def resolve(args, forms: Forms, sizes: dict[str, dict], usual_size: str, is_demo: bool) -> Origin:
    """Checks the flags that say where the model starts, and fills in --model_size. `sizes` are the
    names of model sizes and their configurations. A demo starts at random weights, and a command
    that does not train needs none. Raises `UsageError`."""
    path = args.model_dir or getattr(args, "model_file", None)
    flag = "--model_dir" if args.model_dir else "--model_file"
    ways = f"--model_dir DIR ({forms.folder}), "
    if forms.file:
        ways += f"--model_file FILE ({forms.file}), "
    ways += "or --from_scratch"
    is_command = any(options.is_on(vars(args), name) for name in args.commands)
    trains = options.plans(args) or not is_command
    starts_somewhere = path or args.from_scratch or is_demo or args.resume or args.init_from
    if trains and not starts_somewhere:
        raise UsageError(f"training needs a model to start from: add {ways}")
    if args.adapter and not path:
        raise UsageError(f"--adapter {args.adapter}: name the released model that it is for, too")
    if path:
        require_source(path, flag, forms)
    require_exports(vars(args), options.paths_in(args, *EXPORTS))
    if not path and args.model_size is None:
        args.model_size = next(iter(sizes)) if is_demo else usual_size
    settings = adapter_settings(args.lora, args.lora_alpha, args.lora_targets, args.init_from)
    adapter = args.adapter
    if peft_files.is_adapter(args.init_from):  # no file of a run, which the loop would read
        adapter = args.init_from
        args.init_from = None
    return Origin(
        given=args.given,
        path=path,
        flag=flag,
        from_scratch=args.from_scratch,
        may_be_random=args.from_scratch or (is_demo and not path and not args.init_from),
        size_name=args.model_size,
        size=sizes.get(args.model_size),
        resume=args.resume,
        checkpoint_dir=args.checkpoint_dir,
        export=args.export,
        forms=forms,
        adapters=settings,
        adapter=adapter,
        export_adapter=getattr(args, "export_adapter", None),
    )


def adapter_settings(
    rank: int | None, alpha: float | None, targets: str | None, init_from: str | None
) -> lora.Settings | None:
    """What --lora asks for, or what the adapters of peft's have that --init_from names. Raises
    `UsageError`."""
    if peft_files.is_adapter(init_from):
        settings = peft_files.read_settings(init_from)
        if rank not in (None, settings.rank) or alpha not in (None, settings.alpha) or targets:
            raise UsageError(
                f"--init_from {init_from} brings adapters of rank {settings.rank} and alpha"
                f" {settings.alpha:g} beside layers of its choice: leave out --lora, --lora_alpha"
                " and --lora_targets"
            )
        return settings
    return lora.Settings(rank, alpha or 2.0 * rank, targets or TARGETS[0]) if rank else None


def require_exports(flags: dict, inputs: list[str]) -> None:
    """Raises `UsageError` or `RunError` if a folder of EXPORTS cannot be written, or if it is, or
    holds, another place that the command writes, or one of its `inputs`: now, not after hours of
    training. `flags`: the values of the command line, by name."""
    places = {name: flags.get(name) for name in (*EXPORTS, *WRITTEN)}
    for flag in EXPORTS:
        if not (export := places[flag]):
            continue
        model_files.require_export(export)
        others = [place for name, place in places.items() if place and name != flag]
        for other in (*others, *inputs):
            refuse_overlap(export, other, f"--{flag}")


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
        raise UsageError(
            f"{flag} {path}: no such file or folder, and nothing is downloaded here; fetch a model"
            f" with: {fetching(path, forms)}"
        )
    is_folder = os.path.isdir(path)
    if flag == "--model_dir" and not is_folder:
        advice = "a file: use --model_file" if forms.file else "a file: name its folder"
        raise UsageError(f"{flag} {path}: it is {advice}")
    if flag == "--model_file" and is_folder:
        raise UsageError(f"{flag} {path}: it is a folder: use --model_dir")


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
        adapters = saved_adapters(family, info, resumed)
        base = read_base(origin, family, adapters, resumed.path)
        return info, {**base, **lora.without_adapters(resumed.model)}
    if initial:
        match_initial(origin, family, initial)
    if origin.path:
        return family.read(origin.path)
    if initial and not origin.may_be_random:
        return read_info(origin, family, initial, FROM_SCRATCH), None
    if not origin.may_be_random:  # which is known only when --resume auto has found no checkpoint
        ways = "--model_dir, --model_file" if origin.forms.file else "--model_dir"
        raise UsageError(
            "there is no checkpoint to resume from, and nothing says where the model starts: add"
            f" {ways} or --from_scratch"
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
    if peft_files.is_adapter(origin.adapter):
        return *with_foreign_adapter(origin, family), None
    if origin.path and not (origin.resume or origin.adapter):
        info, weights = family.read(origin.path)
        return info, weights, None
    named = origin.adapter or origin.resume
    saved = checkpoint.weights_to_use(named, origin.checkpoint_dir, recipe)
    if origin.adapter and not saved.adapters:
        raise UsageError(f"--adapter {origin.adapter}: it has no adapters; name it with --resume")
    return read_info(origin, family, saved), whole_weights(origin, family, saved), saved


def weights_file(origin: Origin) -> Path | None:
    """The file of the weights of `use`; None for a released model."""
    named = origin.adapter or origin.resume
    if peft_files.is_adapter(origin.adapter) or (origin.path and not named):
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
    found = family.conflicts(info, saved) + adapter_conflicts(origin, saved)
    if found:
        raise UsageError(f"{', '.join(found)} conflicts with the checkpoint: {advice}")
    return info


def check_saved(family: Family, saved: Saved, name: str):
    """The `ModelInfo` of a checkpoint, if it and the weights are of one model. Otherwise a damaged
    info could ask for a model of any size. Raises `UsageError`."""
    info = records.read(family.model_info, saved.model_info, saved.path)
    family.check(info, str(saved.path))
    expected = checkpoint.shapes_of(lambda: saved_network(family, info, saved))
    model_files.check_shapes(saved.model, expected, saved.path, name)
    return info


# --- adapters -------------------------------------------------------------------------------------


def adapter_record(saved: Saved) -> dict:
    """The record of the adapters that a checkpoint has (`lora.SAVED`). Raises `UsageError`."""
    if reason := records.mismatch(saved.adapters, lora.SAVED, "its record of adapters"):
        raise UsageError(f"{saved.path} is damaged: {reason}")
    return saved.adapters


def saved_adapters(family: Family, info: Any, saved: Saved) -> lora.Adapters:
    """The adapters of a checkpoint. Raises `UsageError` if they are for other layers."""
    record = adapter_record(saved)
    layers = family.layers(info, TARGETS[0])
    if unknown := set(record["layers"]) - set(layers.adapted):
        raise UsageError(f"{saved.path}: no adapter can be beside {min(unknown)[:80]!r} here")
    settings = lora.Settings(record["rank"], record["alpha"], record["targets"])
    layers = replace(layers, adapted=record["layers"])
    return lora.Adapters(settings, layers, record["base"], record["name"])


def adapt(
    origin: Origin,
    family: Family,
    info: Any,
    model: torch.nn.Module,
    base: dict[str, torch.Tensor] | None,
    resumed: Saved | None,
    initial: Saved | None,
    seed: int,
) -> None:
    """Adds adapters to a released model with the weights `base`: those of the checkpoint that the
    run resumes, those of --init_from, or what --lora asks for, which frozen layers do not get.
    Prints what is trained. Raises `UsageError`."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    found = {}
    saved = resumed or (initial if origin.adapters else None)
    if saved and saved.adapters:
        adapters = saved_adapters(family, info, saved)
        if saved is initial:
            check_base(origin, adapters, lora.fingerprint(base or {}, adapters.layers), saved.path)
    elif origin.adapters and not resumed:
        if not origin.path and not next(model.parameters()).is_meta:  # as in a planned run
            raise UsageError(
                "--lora: adapters are for a released model; name it with --model_dir or"
                " --model_file"
            )
        adapters, found = new_adapters(origin, family, info, base, frozen)
    elif origin.export_adapter:
        raise UsageError("--export_adapter writes adapters, and this run trains none: add --lora")
    else:
        return
    if stuck := [name for name in adapters.layers.adapted if f"{name}.weight" in frozen]:
        raise UsageError(
            f"{len(stuck)} of {len(adapters.layers.adapted)} adapters are beside frozen layers:"
            " leave out the flag that freezes them"
        )
    lora.attach(model, adapters, seed)
    if found:
        model.load_state_dict(found, strict=False)
    print(lora.describe(model))


def new_adapters(
    origin: Origin,
    family: Family,
    info: Any,
    base: dict[str, torch.Tensor] | None,
    frozen: set[str],
) -> tuple[lora.Adapters, dict[str, torch.Tensor]]:
    """What --lora asks for beside layers that are not `frozen`, or the adapters of peft's that
    --init_from names, with their values. Raises `UsageError`."""
    found = {}
    layers = family.layers(info, origin.adapters.targets)
    if origin.adapter:
        found, layers = foreign_layers(origin, family, info)
    else:
        trained = [name for name in layers.adapted if f"{name}.weight" not in frozen]
        layers = replace(layers, adapted=trained)
    name = os.path.basename(os.path.abspath(origin.path or ""))
    fingerprint = lora.fingerprint(base or {}, layers)
    return lora.Adapters(origin.adapters, layers, fingerprint, name), found


def check_base(origin: Origin, adapters: lora.Adapters, found: str, path: Path) -> None:
    """Raises `UsageError` if the adapters in a file are for other weights than those with the
    fingerprint `found`, which is empty in a dry run."""
    if found and adapters.base != found:
        raise UsageError(
            f"{path} has adapters for {adapters.name}, and {origin.flag} {origin.path} has other"
            f" weights (SHA-256 {found[:12]} instead of {adapters.base[:12]})"
        )


def usual_adapters(family: Family, info: Any, rank: int) -> lora.Adapters:
    """What --lora adds to such a model; the weights that it goes with are not known."""
    settings = lora.Settings(rank, 2.0 * rank, TARGETS[0])
    return lora.Adapters(settings, family.layers(info, settings.targets), "", "")


def saved_network(family: Family, info: Any, saved: Saved) -> torch.nn.Module:
    """The network of a checkpoint, with its adapters."""
    network = family.network(info)
    if saved.adapters:
        lora.attach(network, saved_adapters(family, info, saved), seed=0)
    return network


def adapter_conflicts(origin: Origin, saved: Saved) -> list[str]:
    """The flags that contradict the adapters of a checkpoint, each with what it has."""
    asked = origin.adapters
    if asked is None:
        return []
    if saved.adapters is None:
        return [f"--lora {asked.rank} (the checkpoint has no adapters)"]
    has = adapter_record(saved)
    values = {"lora": (asked.rank, has["rank"])}
    values["lora_targets"] = (asked.targets, has["targets"])
    values["lora_alpha"] = (asked.alpha, has["alpha"])
    return [
        f"--{flag} {wanted} (the checkpoint has {found})"
        for flag, (wanted, found) in values.items()
        if flag in origin.given and wanted != found
    ]


def match_initial(origin: Origin, family: Family, initial: Saved) -> None:
    """Merges the adapters of --init_from into its weights, if the run has none. Raises
    `UsageError`, also if they are not those that the flags ask for."""
    if initial.adapters:
        check_saved(family, initial, origin.forms.family)
    if initial.adapters and not origin.adapters:
        merged = whole_weights(origin, family, initial)
        initial.model.clear()
        initial.model.update(merged)
    elif origin.adapters and not initial.adapters:
        raise UsageError(
            f"--lora and --init_from {initial.path}: all of its weights were trained; export it,"
            " and give the export as the released model"
        )
    elif found := adapter_conflicts(origin, initial):
        raise UsageError(
            f"{', '.join(found)}: --init_from {initial.path} keeps its adapters' shape"
        )


def read_base(
    origin: Origin, family: Family, adapters: lora.Adapters, path: Path
) -> dict[str, torch.Tensor]:
    """The released weights that the adapters of the checkpoint at `path` are for. Raises
    `UsageError` if the flags name no weights or others."""
    if origin.path is None:
        raise UsageError(
            f"{path} has adapters (--lora) for a released model: name it with --model_dir or"
            f" --model_file; its name was {adapters.name}"
        )
    _, base = family.read(origin.path)
    check_base(origin, adapters, lora.fingerprint(base, adapters.layers), path)
    return base


def with_foreign_adapter(origin: Origin, family: Family) -> tuple[Any, dict[str, torch.Tensor]]:
    """A released model with the adapters of peft's that --adapter names: its info and weights.
    Raises `UsageError`."""
    info, base = family.read(origin.path)
    found, layers = foreign_layers(origin, family, info)
    settings = peft_files.read_settings(origin.adapter)
    return info, merge(base, found, lora.Adapters(settings, layers, "", ""), origin.adapter)


def foreign_layers(
    origin: Origin, family: Family, info: Any
) -> tuple[dict[str, torch.Tensor], lora.Layers]:
    """The tensors of adapters of peft's, and the layers that they are for. Raises `UsageError` if
    they do not fit the model."""
    path = origin.adapter
    settings, found = peft_files.read_settings(path), peft_files.read(path, family.prefix or "")
    layers = family.layers(info, settings.targets)
    ending = f".{lora.A}"
    adapted = [name.removesuffix(ending) for name in found if name.endswith(ending)]
    if unknown := [name for name in adapted if name not in layers.adapted]:
        raise UsageError(f"{path}: no adapter can be beside {unknown[0][:80]!r} here")
    if not adapted:
        raise UsageError(f"{path} has no adapters")
    layers = replace(layers, adapted=adapted)
    with torch.device("meta"):
        network = family.network(info)
        lora.attach(network, lora.Adapters(settings, layers, "", ""), seed=0)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in network.state_dict().items()
        if name in trained and (name in found or name.endswith((lora.A, lora.B)))
    }
    model_files.check_shapes(found, expected, path, "adapter of the")
    return found, layers


def exports_adapter_only(origin: Origin) -> bool:
    """Whether all that is asked for is --export_adapter of saved weights."""
    return exports_only(origin) and not origin.export and "evaluate" not in origin.given


def export_adapter(
    origin: Origin, family: Family, about: card.About, form_of: Callable[[Any], card.Form]
) -> None:
    """--export_adapter of the adapters that a run has saved, with a model card, whose form follows
    from the model's info. Raises `UsageError` and `RunError`."""
    path = about.weights
    if path is None:
        raise UsageError("--export_adapter writes the adapters of a run: name them with --resume")
    saved = checkpoint.read_weights(path, about.recipe)
    if not saved.adapters:
        raise UsageError(
            f"--export_adapter: {path} has no adapters; --export writes the whole model"
        )
    info = check_saved(family, saved, origin.forms.family)
    adapters = saved_adapters(family, info, saved)
    text = card.readme(Path(origin.export_adapter).resolve().name, about, form_of(info))
    names = peft_files.write(origin.export_adapter, saved.model, adapters, family.prefix, text)
    print(f"adapters exported to {origin.export_adapter}: {', '.join(names)}")


def trained_weights(
    origin: Origin, family: Family, model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """The weights of a model after training. Its adapters are merged into the released weights as
    they are in their file, because those of the model may have 16 bits. Raises `UsageError`."""
    adapters = lora.adapters_of(model)
    if not adapters:
        return model.state_dict()
    _, base = family.read(origin.path)
    trained = {name: tensor.cpu() for name, tensor in checkpoint.state_of(model).items()}
    return lora.merge(base, trained, adapters)


def whole_weights(origin: Origin, family: Family, saved: Saved) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint; adapters are merged into the released weights. Raises
    `UsageError`."""
    if not saved.adapters:
        return saved.model
    info = records.read(family.model_info, saved.model_info, saved.path)
    adapters = saved_adapters(family, info, saved)
    base = read_base(origin, family, adapters, saved.path)
    return merge(base, saved.model, adapters, saved.path)


def merge(
    base: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    adapters: lora.Adapters,
    path: str | Path,
) -> dict[str, torch.Tensor]:
    """`lora.merge`. Raises `UsageError` if the adapters in the file at `path` overflow."""
    merged = lora.merge(base, found, adapters)
    if any(tensor.is_meta for tensor in base.values()):  # as in a planned run
        return merged
    return checkpoint.check_tensors(merged, path)


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
        found.append("--from_scratch (the checkpoint's model began from released weights)")
    return found
