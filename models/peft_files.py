"""Adapters in the form of the library peft: a folder with adapter_config.json and
adapter_model.safetensors, which `PeftModel.from_pretrained` and transformers' `load_adapter` read.

Names there are `base_model.model.` and the name in transformers' model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common import files
from common.parts import lora
from models import model_files

SETTINGS = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
ROOT = "base_model.model."
# The variants of LoRA that these adapters are not.
PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "trainable_token_indices": None,
    "init_lora_weights": True,
}


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
        **PLAIN,
    }

    def fill(aside: Path) -> None:
        text = json.dumps(settings, indent=1) + "\n"
        (aside / SETTINGS).write_text(text, encoding="utf-8")
        file = aside / TENSORS
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o666 & ~files.umask())

    return model_files.write_export(Path(folder), fill, card)
