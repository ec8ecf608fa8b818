"""The recipes in the contract: for each a tiny model and its data."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from models.matcha import model as matcha
from models.parakeet import settings as parakeet
from models.wav2vec2 import settings as wav2vec2
from models.whisper import decoding
from models.whisper import formats as whisper
from recipes import (
    konkani_conformer,
    matcha_voice,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
    xtts_amharic,
)
from tests.contract import Case
from tests.models.xtts import small as xtts
from tests.recipes import runs
from tests.recipes.runs import TINY

MATCHA = {
    "width": 16, "layers": 1, "heads": 2, "inner": 16, "predictor": 16,
    "channels": 16, "decoder_heads": 2, "decoder_head_dim": 8,
}  # fmt: skip
ENGLISH = ("hello", "the end", "and then", "it's on", "sand", "shell, no", "so", "no")


def make_small(patch: pytest.MonkeyPatch | None = None) -> None:
    """Makes the models of the cases tiny, in this process."""
    patch = patch or pytest.MonkeyPatch()
    make_config = whisper.make_config

    def short_config(*inputs, **named):
        return {**make_config(*inputs, **named), "max_source_positions": 200}  # 4 s in place of 30

    patch.setattr(whisper, "make_config", short_config)
    for recipe in (whisper_morse, whisper_vietnamese):
        patch.setitem(recipe.SIZES, "demo", short_config(32, (1, 1), 2))
    make_search = decoding.make_search

    def short_search(*inputs, **named):
        return dataclasses.replace(make_search(*inputs, **named), max_new_tokens=4)

    patch.setattr(decoding, "make_search", short_search)
    patch.setattr(runs, "MAX_NEW_TOKENS", 4)
    small = parakeet.make_config(16, 2, 2, (8, 1), num_mel_bins=16, channels=4, ctc=True)
    patch.setitem(parakeet.SIZES, "demo", small)
    small = wav2vec2.make_config(80, 2, 2, conv_dim=[8] * 7, num_conv_pos_embeddings=16)
    patch.setitem(wav2vec2.SIZES, "demo", small)
    patch.setitem(matcha.SIZES, "demo", MATCHA)
    xtts.use_small_vocoder(patch)


# --- data -----------------------------------------------------------------------------------------


def manifests(corpus: dict[str, str], folder: Path) -> list:
    return ["--train_manifest", corpus["train"], "--val_manifest", corpus["val"]]


def synthetic(corpus: dict[str, str], folder: Path) -> list:
    """Clips of Morse code, which the recipe makes itself."""
    return "--clips_per_epoch 14 --eval_clips 4 --clip_seconds 2".split()


def in_konkani(corpus: dict[str, str], folder: Path) -> list:
    """The clips with their first words only, which fit a voice's frames."""
    return [*rewritten(corpus, folder, lambda text, _: text.split()[0]), "--language", "kok"]


def in_english(corpus: dict[str, str], folder: Path) -> list:
    """The clips with texts of the vocabulary of a small XTTS in Coqui's form, and that."""
    model = ["--model_dir", xtts.write_released(folder / "model"), "--language", "en"]
    return [*model, *rewritten(corpus, folder, lambda _, number: ENGLISH[number % len(ENGLISH)])]


def rewritten(corpus: dict[str, str], folder: Path, text: Callable[[str, int], str]) -> list:
    """The flags of manifests of the clips with other texts, of one speaker."""
    flags = []
    for split in ("train", "val"):
        lines = Path(corpus[split]).read_text(encoding="utf-8").splitlines()
        rows = []
        for number, row in enumerate(map(json.loads, lines)):
            path = str(Path(corpus[split]).parent / row["audio_filepath"])
            rows.append({**row, "audio_filepath": path, "text": text(row["text"], number)})
            rows[-1]["speaker"] = "one"
        content = "\n".join(map(json.dumps, rows))
        (folder / f"{split}.json").write_text(content, encoding="utf-8")
        flags += [f"--{split}_manifest", folder / f"{split}.json"]
    return flags


# --- recipes --------------------------------------------------------------------------------------

DEMO = "--from_scratch --model_size demo"
WHISPER = f"{DEMO} {' '.join(TINY)}"
CASES = [
    Case(template, "", manifests, draws=False),
    Case(konkani_conformer, " ".join(TINY), manifests, lean=0.972),
    Case(
        whisper_morse,
        WHISPER,
        synthetic,
        limits="--max_duration 3.5",
        reads_export=True,
        lean=0.867,
    ),
    Case(
        whisper_vietnamese,
        WHISPER,
        manifests,
        limits="--max_duration 3.5",
        reads_export=True,
        lean=0.908,
    ),
    Case(
        parakeet_tdt,
        DEMO,
        manifests,
        exact="--dropout 0 --joint_dropout 0",
        reads_export=True,
        lean=0.842,
    ),
    Case(
        wav2vec2_ctc,
        DEMO,
        manifests,
        exact="--dropout 0 --mask_channels 0.3 --layer_drop 0.4",
        reads_export=True,
        lean=0.88,
    ),
    Case(
        xtts_amharic,
        "--speak_held_out 0",
        in_english,
        counts_audio=False,
        reads_export=True,
        transcribes=False,
    ),
    Case(
        matcha_voice,
        "--model_size demo --speak_held_out 0",
        in_konkani,
        counts_audio=False,
        transcribes=False,
    ),
]
