"""Another model on the same data (--compare_to), and whole recordings (--timestamps, --long)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from common import checkpoint, memory, options
from common.options import OnOff, flag
from models import released
from models.whisper import start, timed
from models.whisper.decoding import Search
from models.whisper.model import Whisper
from models.whisper.tokenizer import WhisperTokenizer

# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
MANIFESTS = ("train_manifest", "val_manifest", "test_manifest")
EXCLUDES = (
    ("compare_to", "transcribe", "files to transcribe have no reference; leave the first out"),
    ("timestamps", "piece_seconds", "the second cuts recordings to train on; leave one out"),
    *(("long", manifest, "their results are apart; leave one out") for manifest in MANIFESTS),
)
NEEDS = (("timestamps", ("transcribe",), ""), ("long", ("evaluate",), ""))


@dataclass(frozen=True)
class ComparingFlags:
    """Flags of a baseline, and of whole recordings."""

    # fmt: off
    compare_to: str | None = flag(
        options.path, None, "PATH",
        "a baseline for the results at the end: a Hugging Face folder, OpenAI's .pt, or weights of"
        " this recipe")
    timestamps: bool = flag(
        OnOff, False, None, "transcribe in segments with times, by the model's time tokens (off)")
    long: str | None = flag(
        options.path, None, "FILE",
        "evaluate on this manifest of whole recordings of any length, decoded in segments with"
        " times")


def add_arguments(parser, group) -> None:
    options.add_record(parser, group, ComparingFlags)
    parser.refuse(EXCLUDES, NEEDS)


def check(asked: start.WhisperOptions, recipe: str, path: str, told: str = "") -> WhisperTokenizer:
    """Raises `UsageError` if the model at `path` cannot be read, or has no times where they are
    needed: before the training, not after it. Returns its tokenizer. `told`: the language of the
    model that is compared, if it is known."""
    with torch.device("meta"):
        info, _ = read(asked, recipe, path, told)
    tokenizer, search = start.make_search(asked, info)
    if asked.long:
        timed.make_search(tokenizer, search, f"--compare_to {path}")
    return tokenizer


def read(
    asked: start.WhisperOptions, recipe: str, path: str, told: str
) -> tuple[start.ModelInfo, dict[str, torch.Tensor]]:
    """A model, released or of a run of `recipe`, and its weights. A released one is in the language
    of --language, else in the one that is `told`. Raises `UsageError`."""
    name = Path(path).name
    if name.endswith(".safetensors") or name.startswith("checkpoint_step_"):
        saved = checkpoint.read_weights(path, recipe, "--compare_to")
        family = start.Family(asked)
        return family.check_saved(saved), family.whole_weights(saved)
    released.require_source(path, "--compare_to", start.FORMS)
    if not asked.origin.path:  # then --tokenizer_file is not a released model's
        asked = dataclasses.replace(asked, tokenizer_file=None)
    return start.read_released(
        dataclasses.replace(asked, language=told if asked.language is None else asked.language),
        path,
    )


def baseline(
    asked: start.WhisperOptions, recipe: str, path: str, model: Whisper, own: start.ModelInfo
) -> tuple[Whisper, tuple[WhisperTokenizer, Search]]:
    """The model at `path` on the device of `model`, which is moved to the host, and its search.
    `own`: the record of `model`. Raises `UsageError` and `RunError`."""
    asked = dataclasses.replace(asked, task=own.tokenizer["task"])
    info, weights = read(asked, recipe, path, own.tokenizer["language"])
    other = start.make_model(info, weights=weights).eval()
    memory.replace_on_device(model, other)
    return other, start.make_search(asked, info)
