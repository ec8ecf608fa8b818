"""Everything that recognisers do besides learning: flags, decoding a set, transcribing files. Their
results at the end are in results.py."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import memory, options
from common.options import ALONE, TRAINS, USUAL, OnOff, flag
from speech.data import splits
from speech.decoding import language_model
from speech.writing.text import as_whisper

FORMS = ("eaf", "TextGrid", "srt", "vtt", "jsonl")  # of --output_format
MOST_BEAMS = 500  # hypotheses
AUGMENTATIONS = ("spec_augment", "speed_perturbation", "wave_augment")
NOT_BEGUN = 0.75  # CER above which a model has not begun to write
NORMALISERS = {"whisper": as_whisper}  # choices of --normaliser

# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
EXCLUDES = (
    ("noise_dir", "wave_augment False", "with the second no noise is added; leave one of them out"),
    *splits.unused_by("transcribe"),
    ("normaliser", "transcribe", "files to transcribe have no reference; leave the first out"),
)
NEEDS = (
    ("output", ("transcribe", "align"), ""),
    ("output_format", ("output",), "name the folder to write to"),
    ("only_empty", ("transcribe",), ""),
    ("piece_seconds", ("transcribe",), ""),
)


@dataclass(frozen=True)
class AugmentationFlags:
    """Flags of augmentation."""

    # fmt: off
    spec_augment: bool | None = flag(
        OnOff, None, None, "mask bands and spans of the features (on; off for the demo)", TRAINS)
    speed_perturbation: bool | None = flag(
        OnOff, None, None, "play at 0.9, 1.0 or 1.1 times the speed (on; off for the demo)", TRAINS)
    wave_augment: bool | None = flag(
        OnOff, None, None,
        "add silence at the ends and noise, and change the level (on; off for the demo)", TRAINS)
    noise_dir: str | None = flag(
        options.path, None, "DIR",
        "turns --wave_augment on, with the noise in these audio files", TRAINS)


@dataclass(frozen=True)
class DecodingOptions:
    """The flags' settings of decoding and transcribing, None for flags that a recipe lacks, and
    where results are written, the seed that chooses examples, and `Task.augmented_share` of a model
    that cannot write yet, None in a demo and in a recipe that does not augment by default.
    `annotated`: the `annotated.Plan`, if --transcribe names files of annotations. `timestamps`:
    whether transcripts are printed with times. `translates`: whether the texts are in another
    language than the speech. `cut`: of a profile, by which errors are counted in units, too."""

    # fmt: off
    decoding: str | None = flag(None, None, None, "")  # by the recipe's methods
    beam_size: int | None = flag(
        options.number(int, 1, MOST_BEAMS), None, "N", "hypotheses of a beam search ()")
    normaliser: str | None = flag(
        tuple(NORMALISERS), None, None,
        "also print error rates of texts that are normalised as Whisper's reports are (its"
        " multilingual normaliser)")
    transcribe: list[str] | None = flag(
        options.path, None, "PATH",
        "transcribe files and folders with the weights of --resume"
        " (OUTPUT_DIR/checkpoints/best.safetensors)", USUAL, ALONE, nargs="+")
    output: str | None = flag(
        options.path, None, "FILE",
        "write the transcripts to this file: x.jsonl, or of one recording x.eaf (ELAN), x.TextGrid"
        " (Praat), or x.srt or x.vtt if there are times; or to this folder, with --output_format",
        USUAL)
    output_format: str | None = flag(
        FORMS, None, None, "write a file for each recording to the folder --output")
    only_empty: bool = flag(
        None, False, None,
        "with --transcribe x.eaf: hear the annotations without a text only", action="store_true")
    piece_seconds: float | None = flag(
        options.number(float, 1.0), None, "S",
        "cut recordings at silences into pieces of at most S seconds, to train on with"
        " --use_chunking (as long as the model reads)")
    # fmt: on
    annotated: Any = None
    timestamps: bool = False
    translates: bool = False
    cut: Callable[[str], list[str]] | None = None
    batch_size: int = 8
    log_dir: Path = Path("logs")
    seed: int = 0
    augmented_share: Callable[[float, float, bool], float] | None = None
    lm: language_model.LanguageModelFlags = language_model.LanguageModelFlags()


@dataclass(frozen=True, kw_only=True)
class Request(AugmentationFlags, splits.Request):
    """The request of a recogniser's flags. `how`: decoding and transcribing."""

    how: DecodingOptions

    @staticmethod
    def resolve(args, how: DecodingOptions) -> dict:
        """The values of these fields, for `options.read_record`. Raises `UsageError`."""
        return {**splits.Request.resolve(args), "how": how}


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(
    parser,
    methods: tuple[str, ...] = (),
    method: str = "",
    beam_size: int = 0,
    normalisers: bool = True,
    augments: bool | None = True,
) -> None:
    """The flags of a recogniser that decodes by `methods`, `method` by default; without
    --normaliser unless `normalisers`. `augments`: whether it does by default; None: never."""
    if augments is not None:
        usual = {} if augments else dict.fromkeys(AUGMENTATIONS, (None, "off"))
        options.add_record(parser, "augmentation", AugmentationFlags, **usual)
    changes = dict.fromkeys(("decoding", "beam_size"), options.LEAVE_OUT)
    if methods:
        what = f"method for the results at the end, --evaluate and --transcribe ({method})"
        changes = {
            "decoding": {"choices": methods, "default": method, "help": what},
            "beam_size": (None, str(beam_size)),
        }
    if not normalisers:
        changes["normaliser"] = options.LEAVE_OUT
    options.add_record(parser, "decoding and transcribing", DecodingOptions, **changes)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(
    args, is_demo: bool, beam_size: int = 0, augments: bool = True, has_times: bool = False
) -> DecodingOptions:
    """Fills in the defaults of these flags and returns what they ask for, also without those of
    augmentation. Augmentation is on, unless the recipe does not augment by default (`augments`),
    and except in a demo, whose voices hardly vary. A plan without data is of training with
    augmentation. `beam_size` is the default. `has_times`: whether the transcripts have segments
    with times. Raises `UsageError`, and `DataError` for a file in --noise_dir."""
    augment = augments and (not is_demo or options.plans(args))
    if getattr(args, "noise_dir", None):
        from speech.signal.augment import read_noises

        args.wave_augment = True
        read_noises(args.noise_dir)  # what is wrong with it is reported now
    for name in AUGMENTATIONS:
        if getattr(args, name, False) is None:
            setattr(args, name, augment)
    if beam_size and args.beam_size is None:
        args.beam_size = beam_size
    plan = None
    if getattr(args, "transcribe", None):
        from speech.decoding import annotated

        plan = annotated.resolve(args, has_times)
    return options.read_record(
        DecodingOptions,
        args,
        annotated=plan,
        timestamps=getattr(args, "timestamps", False),
        batch_size=args.eval_batch_size,
        log_dir=args.log_dir,
        seed=args.seed,
        augmented_share=augmented_share if augment else None,
        lm=language_model.resolve(args),
    )


# --- the beginning of a training from scratch -----------------------------------------------------


def augmented_share(cer: float, share: float, overfits: bool) -> float:
    """`Task.augmented_share` of a model that cannot write yet: what it writes right beyond half of
    the characters, twice, in whole tenths. Nothing until a CER of 45 %, half at 25 %. Before that
    it may learn little speech by heart: then a fifth more at each epoch, if it writes at all."""
    wanted = max(0, math.floor(10 - 20 * cer)) / 10
    if overfits and not_begun(cer) is None:
        wanted = max(wanted, share + 0.2)
    return min(1.0, wanted)


def not_begun(cer: float) -> str | None:
    """`Task.not_begun`. A model that only knows which characters are frequent has a CER of 80 %."""
    if not cer > NOT_BEGUN:
        return None
    return (
        f"the model has not begun to write: {100 * cer:.0f} of 100 characters are wrong. If that"
        " stays so, see with --check_data whether the texts belong to their audio, and try another"
        " --learning_rate or more updates (--max_steps); with less than ten hours of speech,"
        " fine-tune a released model (docs/your_language.md)"
    )


# --- decoding a set -------------------------------------------------------------------------------


def decode_set(
    model: torch.nn.Module,
    decode: Callable[[dict], tuple[list, dict[str, torch.Tensor]]],
    eval_batches: Iterable[dict],
    terms: Iterable[str] = (),
) -> tuple[list[dict], dict[str, tuple[float, float]]]:
    """Decodes batches with `decode(batch on the model's device)`, which returns a hypothesis for
    each utterance and the sums of loss terms. References and hypotheses are texts or any other
    objects. A batch that does not fit into memory is split. Returns a row {"file", "seconds",
    "reference", "hypothesis", "index"} for each utterance, and {loss term: (sum, count)} for each
    of `terms`, zeros if there are no batches: the ranks add these up."""
    rows = []
    sums = dict.fromkeys(terms, (0.0, 0))
    for batch, results in memory.evaluated(decode, model, eval_batches):
        hypotheses = []
        losses = dict.fromkeys(sums, 0.0)
        for decoded, values in results:
            hypotheses += decoded
            for name in losses:
                losses[name] += float(values[name])
        keys = ("names", "seconds", "texts", "indices")
        utterances = zip(*(batch[key] for key in keys), hypotheses, strict=True)
        for name, seconds, reference, index, hypothesis in utterances:
            texts = {"reference": reference, "hypothesis": hypothesis}
            rows.append({"file": name, "seconds": round(seconds, 3), **texts, "index": index})
        for name, value in losses.items():
            total, count = sums[name]
            sums[name] = (total + value, count + batch["counts"][name])
    return rows, sums


def decode_texts(
    model: torch.nn.Module, decode: Callable[[dict], list], eval_batches: Iterable[dict]
) -> list[dict]:
    """The rows of `decode_set` for `decode(batch on the model's device)`, without losses. It
    returns texts, or records with a "text" and timed "words", which the rows have, too."""
    rows, _ = decode_set(model, lambda batch: (decode(batch), {}), eval_batches)
    for row in rows:
        if isinstance(decoded := row["hypothesis"], dict):
            row.update(hypothesis=decoded["text"], words=decoded["words"])
    return rows
