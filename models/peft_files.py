"""Adapters in the form of the library peft: a folder with adapter_config.json and
adapter_model.safetensors, which `PeftModel.from_pretrained` and transformers' `load_adapter` read.

Names there are `base_model.model.` and the name in transformers' model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common import files, records
from common.errors import UsageError
from common.parts import lora
from models import model_files

SETTINGS = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
ROOT = "base_model.model."
# What an adapter may not have here: its product would be another one.
PLAIN = {
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    # Others change the released weights, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
CONTENT = {"peft_type": {"LORA"}, "r": range(1, lora.MOST_RANK + 1), "lora_alpha": lora.is_alpha}


def is_adapter(path: str | Path | None) -> bool:
    """Whether this is a folder of peft's."""
    return path is not None and (Path(path) / SETTINGS).is_file()


def write(
    folder: str | Path, trained: dict[str, Tensor], adapters: lora.Adapters, prefix: str, card: str
) -> list[str]:
    """Writes the adapters, and what was trained whole, of `trained` (`checkpoint.state_of`).
    `prefix`: what transformers' names begin with in addition, but those of what was trained whole,
    such as a head. Returns the file names. Raises `UsageError` and `RunError`."""
    whole = {
        name for name in lora.without_adapters(trained) if name.startswith(adapters.layers.whole)
    }
    tensors = {}
    for name, tensor in trained.items():
        if name.endswith((f".{lora.A}", f".{lora.B}")):
            name = f"{prefix}{name}.weight"
        elif name not in whole:  # a buffer
            continue
        tensors[f"{ROOT}{name}"] = tensor.detach().to("cpu", torch.float32).contiguous()
    modules = sorted({name.rpartition(".")[0] for name in whole})
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": adapters.name,
        "r": adapters.settings.rank,
        "lora_alpha": adapters.settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{prefix}{name}" for name in adapters.layers.adapted],
        "modules_to_save": modules or None,
        "inference_mode": True,
        **{name: known[0] for name, known in PLAIN.items()},
    }

    def fill(aside: Path) -> None:
        text = json.dumps(settings, indent=1) + "\n"
        (aside / SETTINGS).write_text(text, encoding="utf-8")
        file = aside / TENSORS
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o666 & ~files.umask())

    return model_files.write_export(Path(folder), fill, card)


def read_settings(folder: str | Path) -> lora.LoraSettings:
    """The settings of adapters; their layers follow from the tensors. Raises `UsageError`."""
    content = model_files.read_json(Path(folder) / SETTINGS)
    if reason := records.mismatch(content, CONTENT, SETTINGS):
        raise UsageError(f"{folder}: {reason}")
    for name, known in PLAIN.items():
        if content.get(name, known[0]) not in known:
            raise UsageError(f"{folder}: adapters with {name} {content[name]!r} cannot be read")
    for name in ("rank_pattern", "alpha_pattern"):
        if content.get(name):
            raise UsageError(f"{folder}: layers with a rank of their own ({name}) cannot be read")
    return lora.LoraSettings(content["r"], float(content["lora_alpha"]), "linear")


def read(folder: str | Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of adapters, and of what was trained whole, by this project's names. `prefix`: as
    in `write`. Raises `UsageError`."""
    file = Path(folder) / TENSORS
    if not file.is_file():
        raise UsageError(f"{folder} holds no {TENSORS}")
    tensors = model_files.floats(model_files.read_tensors(file), file)
    ours = {}
    for name, tensor in tensors.items():
        is_part = name.endswith((f".{lora.A}.weight", f".{lora.B}.weight"))
        root = ROOT + prefix if is_part else ROOT
        if not name.startswith(root):
            raise UsageError(f"{folder}: the tensor {name[:80]!r} is not one of this model")
        name = name.removeprefix(root)
        ours[name.removesuffix(".weight") if is_part else name] = tensor
    return ours
