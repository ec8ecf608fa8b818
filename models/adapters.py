"""Low-rank adapters beside a released model (`common/parts/lora.py`): their flags, which layers
have them, and what checkpoints, exports and folders of the library peft have of them.

    # What the flags ask for, as `released.resolve` keeps it in an `Origin`
    settings = adapters.resolve(args, path)
    # The model to train, when its weights are loaded
    adapters.adapt(family, info, model, weights, run)

`family` stands for a `released.Family`, `origin` for its `released.Origin`."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import checkpoint, options, records
from common.checkpoint import Saved
from common.errors import UsageError
from common.options import TRAINS, USUAL, flag
from common.parts import lora
from models import card, peft_files
from models.model_files import MODELS

TARGETS = ("linear", "attention", "q,v")  # choices of --lora_targets

# Flags that are for a model that is trained whole, and why they are left out.
WHOLE_ONLY = {
    "sharded": "shards are of a model that is trained",
    "use_cpu_offload": "adapters and their states are small",
}
# Rows for `Parser.refuse`.
EXCLUDES = (
    ("adapter", "resume", "both name weights to use; leave one of them out"),
    *(("lora", flag, f"{reason}; leave the second out") for flag, reason in WHOLE_ONLY.items()),
)
NEEDS = (
    (
        "lora",
        (*MODELS, "resume", "init_from", "dry_run", "verify_gpu"),
        "a random model cannot stay as it is",
    ),
    ("adapter", ("transcribe", "synthesize", "evaluate", "export"), "--init_from trains them"),
    ("lora_targets", ("lora",), ""),
    ("lora_alpha", ("lora",), ""),
)


RANKS = options.number(int, 1, lora.MOST_RANK)
ALPHAS = options.number(float, 0.0, lora.MOST_ALPHA)


@dataclass(frozen=True)
class AdapterFlags:
    """Flags of adapters."""

    # fmt: off
    lora: int | None = flag(
        RANKS, None, "RANK",
        "train adapters of this rank beside a released model, whose weights stay as they are, on"
        " the GPU in 16 bits (off; 8 to 32 are usual)", USUAL, TRAINS)
    lora_targets: str | None = flag(
        TARGETS, None, None,
        "which layers get adapters: linear: all linear ones; attention: those of attention; q,v:"
        f" queries and values ({TARGETS[0]})", TRAINS)
    lora_alpha: float | None = flag(
        ALPHAS, None, "X", "adapters count X / RANK times (twice RANK)", TRAINS)
    adapter: str | None = flag(
        options.path, None, "PATH",
        "without training, use --model_dir with these adapters: best.safetensors of a run")
    export_adapter: str | None = flag(
        options.path, None, "DIR",
        "write the adapters for peft and transformers; after training, or alone with --resume PATH")


def add_arguments(parser, has_peft: bool) -> None:
    title = "low-rank adapters, in place of training all weights"
    changes = {} if has_peft else {"export_adapter": options.LEAVE_OUT}
    options.add_record(parser, title, AdapterFlags, **changes)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(args, base: str | None) -> lora.LoraSettings | None:
    """The settings of the adapters that --lora asks for. `base`: the released weights that a flag
    names, if any. Raises `UsageError`."""
    if args.adapter and not base:
        raise UsageError(f"--adapter {args.adapter}: name the released model that it is for, too")
    for name in ("adapter", "init_from"):
        folder = getattr(args, name)
        if folder and (Path(folder) / peft_files.SETTINGS).is_file():
            raise UsageError(
                f"--{name} {folder} has adapters of peft's: merge them there into the released"
                " model (merge_and_unload), and name the result with --model_dir"
            )
    if not args.lora:
        return None
    alpha = args.lora_alpha or 2.0 * args.lora
    return lora.LoraSettings(args.lora, alpha, args.lora_targets or TARGETS[0])


def record_of(saved: Saved) -> dict:
    """The record of the adapters that a checkpoint has (`lora.SAVED`). Raises `UsageError`."""
    if reason := records.mismatch(saved.adapters, lora.SAVED, "its record of adapters"):
        raise UsageError(f"{saved.path} is damaged: {reason}")
    return saved.adapters


def adapters_of(family, info: Any, saved: Saved) -> lora.Adapters:
    """The adapters of a checkpoint. Raises `UsageError` if they are for other layers."""
    record = record_of(saved)
    layers = family.layers(info, TARGETS[0])
    if unknown := set(record["layers"]) - set(layers.adapted):
        raise UsageError(f"{saved.path}: no adapter can be beside {min(unknown)[:80]!r} here")
    settings = lora.LoraSettings(record["rank"], record["alpha"], record["targets"])
    layers = replace(layers, adapted=record["layers"])
    return lora.Adapters(settings, layers, record["base"], record["name"])


def adapt(family, info: Any, model: torch.nn.Module, base: dict[str, Tensor] | None, run) -> None:
    """Adds adapters to a released model with the weights `base`: those of the checkpoint that the
    `run` (`common.loop.begin`) resumes, those of --init_from, or what --lora asks for, which frozen
    layers do not get. Prints what is trained. Raises `UsageError`."""
    origin = family.origin
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    saved = run.resumed or (run.initial if origin.adapters else None)
    if saved and saved.adapters:
        adapters = adapters_of(family, info, saved)
        if saved is run.initial:
            check_base(origin, adapters, lora.fingerprint(base or {}, adapters.layers), saved.path)
    elif origin.adapters and not run.resumed:
        if not origin.path and not next(model.parameters()).is_meta:  # as in a planned run
            raise UsageError(
                "--lora: adapters are for a released model; name it with --model_dir or"
                " --model_file"
            )
        adapters = new(family, info, base, frozen)
    elif origin.export_adapter:
        raise UsageError("--export_adapter writes adapters, and this run trains none: add --lora")
    else:
        return
    for name, reason in WHOLE_ONLY.items():
        if name in origin.given:
            raise UsageError(f"--{name} with adapters: {reason}; leave the flag out")
    if stuck := [name for name in adapters.layers.adapted if f"{name}.weight" in frozen]:
        raise UsageError(
            f"{len(stuck)} of {len(adapters.layers.adapted)} adapters are beside frozen layers:"
            " leave out the flag that freezes them"
        )
    lora.attach(model, adapters, origin.seed)
    print(lora.describe(model))


def new(family, info: Any, base: dict[str, Tensor] | None, frozen: set[str]) -> lora.Adapters:
    """The adapters that --lora asks for beside layers that are not `frozen`."""
    origin = family.origin
    layers = family.layers(info, origin.adapters.targets)
    trained = [name for name in layers.adapted if f"{name}.weight" not in frozen]
    layers = replace(layers, adapted=trained)
    name = os.path.basename(os.path.abspath(origin.path or ""))
    return lora.Adapters(origin.adapters, layers, lora.fingerprint(base or {}, layers), name)


def check_base(origin, adapters: lora.Adapters, fingerprint: str, path: Path) -> None:
    """Raises `UsageError` if the adapters in a file are for other weights than those with the
    `fingerprint`, which is empty in a dry run."""
    if fingerprint and adapters.base != fingerprint:
        raise UsageError(
            f"{path} has adapters for {adapters.name}, and {origin.flag} {origin.path} has other"
            f" weights (SHA-256 {fingerprint[:12]} instead of {adapters.base[:12]})"
        )


def usual(family, info: Any, rank: int) -> lora.Adapters:
    """The adapters that --lora adds to such a model; nothing is known of its weights."""
    settings = lora.LoraSettings(rank, 2.0 * rank, TARGETS[0])
    return lora.Adapters(settings, family.layers(info, settings.targets), "", "")


def conflicts(origin, saved: Saved) -> list[str]:
    """The flags that contradict the adapters of a checkpoint, each with what it has."""
    asked = origin.adapters
    if asked is None:
        return []
    if saved.adapters is None:
        return [f"--lora {asked.rank} (the checkpoint has no adapters)"]
    has = record_of(saved)
    values = {"lora": (asked.rank, has["rank"])}
    values["lora_targets"] = (asked.targets, has["targets"])
    values["lora_alpha"] = (asked.alpha, has["alpha"])
    return [
        f"--{flag} {wanted} (the checkpoint has {saved_value})"
        for flag, (wanted, saved_value) in values.items()
        if flag in origin.given and wanted != saved_value
    ]


def match_initial(family, initial: Saved) -> None:
    """Merges the adapters of --init_from into its weights, if the run has none. Raises
    `UsageError`, also if they are not those that the flags ask for."""
    origin = family.origin
    if initial.adapters:
        family.check_saved(initial)
    if initial.adapters and not origin.adapters:
        weights = merged(family, initial)
        initial.model.clear()
        initial.model.update(weights)
    elif origin.adapters and not initial.adapters:
        raise UsageError(
            f"--lora and --init_from {initial.path}: all of its weights were trained; export it,"
            " and give the export as the released model"
        )
    elif differing := conflicts(origin, initial):
        raise UsageError(
            f"{', '.join(differing)}: --init_from {initial.path} keeps its adapters' shape"
        )


def read_base(family, adapters: lora.Adapters, path: Path) -> dict[str, Tensor]:
    """The released weights that the adapters of the checkpoint at `path` are for. Raises
    `UsageError` if the flags name no weights or others."""
    origin = family.origin
    if origin.path is None:
        raise UsageError(
            f"{path} has adapters (--lora) for a released model: name it with --model_dir or"
            f" --model_file; its name was {adapters.name}"
        )
    base = family.base(origin.path)
    check_base(origin, adapters, lora.fingerprint(base, adapters.layers), path)
    return base


def export(family, about: card.About) -> None:
    """--export_adapter: writes the adapters that a run has saved, with a model card. It needs no
    released weights. Raises `UsageError` and `RunError`."""
    folder = family.origin.export_adapter
    path = about.weights
    if path is None:
        raise UsageError("--export_adapter writes the adapters of a run: name them with --resume")
    saved = checkpoint.read_weights(path, about.recipe)
    if not saved.adapters:
        raise UsageError(
            f"--export_adapter: {path} has no adapters; --export writes the whole model"
        )
    info = family.check_saved(saved)
    adapters = adapters_of(family, info, saved)
    form = family.adapter_form(info)
    text = card.readme(Path(folder).resolve().name, family.about(info, about), form)
    names = peft_files.write(folder, saved.model, adapters, family.prefix(info), text)
    print(f"adapters exported to {folder}: {', '.join(names)}")


def merge(
    base: dict[str, Tensor], tensors: dict[str, Tensor], adapters: lora.Adapters, path: str | Path
) -> dict[str, Tensor]:
    """`lora.merge`. Raises `UsageError` if the adapters in the file at `path` overflow."""
    merged = lora.merge(base, tensors, adapters)
    if any(tensor.is_meta for tensor in base.values()):  # as in a planned run
        return merged
    return checkpoint.check_tensors(merged, path)


def merged(family, saved: Saved) -> dict:
    """The weights of a checkpoint with adapters, which are merged into the released weights. Raises
    `UsageError`."""
    info = records.read(family.model_info, saved.model_info, saved.path)
    adapters = adapters_of(family, info, saved)
    base = read_base(family, adapters, saved.path)
    return merge(base, saved.model, adapters, saved.path)
