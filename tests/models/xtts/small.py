"""A small XTTS for tests: the record of a model, and a folder in Coqui's form with random
weights."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.xtts import formats, frozen, start, texts
from models.xtts.model import GPT
from models.xtts.tokenizer import Vocabulary
from models.xtts.vocoder import HifiDecoder
from tests.contract import awake

FIXTURES = Path(__file__).parents[2] / "fixtures" / "xtts"
VOCAB = (FIXTURES / "vocab.json").read_text(encoding="utf-8")
WITHOUT_AM = json.loads(VOCAB)  # as the released one
WITHOUT_AM["added_tokens"] = [
    token for token in WITHOUT_AM["added_tokens"] if token["content"] != "[am]"
]
WITHOUT_AM["model"]["vocab"].pop("[am]")  # the last one
ROWS = len(WITHOUT_AM["model"]["vocab"])
PARTS = {"code_dim": 16, "dvae_hidden": 16}
LATENTS = {"latents": 8, "perceiver_heads": 2, "perceiver_head_dim": 8}
CONFIG = formats.make_config(16, 2, 2, 450, 32, **PARTS, **LATENTS)
RELEASED = formats.make_config(
    16, 2, 2, ROWS, 32, mel_positions=80, text_positions=60, **PARTS,
    start_text=WITHOUT_AM["model"]["vocab"]["[START]"],
)  # fmt: skip


def small_vocoder(d_model: int) -> HifiDecoder:
    return HifiDecoder(d_model, channels=16, speaker=8, filters=(8, 8, 8, 8), blocks=(1, 1, 1, 1))


def use_small_vocoder(patch: pytest.MonkeyPatch) -> None:
    """In place of the released one, whose width is fixed."""
    for module in (formats, frozen):
        patch.setattr(module, "HifiDecoder", small_vocoder)


def make_info(vocab: str = VOCAB, language: str = "am", **text) -> start.ModelInfo:
    """The info of a model that reads as `text` says, the fields of a `TextOptions`."""
    return start.ModelInfo(
        config={**CONFIG, "text_tokens": Vocabulary(vocab).size},
        vocab=vocab,
        language=language,
        carried=False,
        text=texts.TextOptions(**text),
        condition="same",
        slice=start.SLICE,
        settings={},
        licence=False,
        model_dir=None,
        dvae="",
    )


@functools.cache
def coquis(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a file of the fixtures; weights in fp32."""
    tensors = load_file(FIXTURES / f"{name}.safetensors")
    return {key: t.float() if t.is_floating_point() else t for key, t in tensors.items()}


def dvae_weights() -> dict[str, torch.Tensor]:
    """Those of the fixtures' DVAE, whose codes differ between frames."""
    weights = coquis("dvae").items()
    return {name: w for name, w in weights if not name.startswith("discrete_loss.")}


def write_released(folder: Path, seed: int = 0, vocab: dict = WITHOUT_AM) -> Path:
    """A folder in Coqui's form with the licence of released weights. It needs
    `use_small_vocoder`."""
    torch.manual_seed(seed)
    config = {**RELEASED, "text_tokens": len(vocab["model"]["vocab"])}
    groups = {
        "gpt": awake(GPT(config), seed).state_dict(),
        "dvae": {name: w + 0.1 * seed for name, w in dvae_weights().items()},
        "hifigan_decoder": small_vocoder(16).state_dict(),
        "mel_stats": torch.full((80,), 4.0),
    }
    extras = {
        "config": {"languages": ["en", "de"]},
        "vocab": json.dumps(vocab, ensure_ascii=False),
        "licence": True,
    }
    formats.export(folder, groups, config, extras, {})
    return folder
