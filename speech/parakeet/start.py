"""The start of a Parakeet's training and its export: flags, released weights or a configuration
from scratch, learning rate."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from common import checkpoint, options
from common.errors import UsageError
from speech import model_files, recogniser, text
from speech.model_files import require_room
from speech.parakeet import formats
from speech.parakeet.tokenizer import STATE, ParakeetTokenizer, make_tokenizer, pad_pieces

REDUCTIONS = ("mean", "mean_batch", "mean_volume")
SCRATCH_LOSS = {"sigma": 0.02, "omega": 0.1, "reduction": "mean_volume"}
CTC_WEIGHT = 0.3  # share of the CTC head's loss, as in NVIDIA's hybrid models
FINE_TUNING_RATE, CAREFUL_RATE, MANY_HOURS = (
    1e-4,
    3e-5,
    20.0,
)  # NVIDIA's advice for fine-tuning, by hours of speech
SMALL, SMALL_RATE, SCRATCH_RATE = 256, 2e-3, 5e-4  # from scratch: up to this width, and above
SAMPLE = 1000  # training texts that are looked at for the style and for unknown characters

# The schema of the metadata that are kept with the weights, for common.checkpoint.
METADATA = {
    "recipe": str,
    "config": formats.CONFIG,
    "tokenizer": STATE,
    "source": dict,
    "pretrained": bool,
    "held_out?": [str],
    "loss": {
        "sigma": lambda s: 0 <= s < 10,
        "omega": lambda o: 0 <= o <= 1,
        "reduction": set(REDUCTIONS),
        "ctc?": lambda c: 0 <= c <= 1,
    },
    "demo?": bool,
    "longest": lambda seconds: type(seconds) in (int, float) and 0 < seconds < math.inf,
}

TRAINING = (
    "from_scratch",
    "ctc_weight",
    "tdt_sigma",
    "tdt_omega",
    "loss_reduction",
    "joint_dropout",
)
USES = ("transcribe", "evaluate")  # of a trained model
EXCLUDES = (
    *recogniser.MODEL_EXCLUDES,
    *(
        (model, "vocab_size", "a released model has its own vocabulary; leave the second out")
        for model in recogniser.MODELS
    ),
    *((flag, use, options.TRAINS) for flag in (*TRAINING, "vocab_size") for use in USES),
)
NEEDS = (("export_format", ("export",), ""),)


@dataclass(frozen=True)
class Start:
    """Where the model starts, as the flags ask. `given`: the flags on the command line;
    `pretrained`: the folder or file of released weights that the flag `source` names, None from
    scratch; `may_be_random`: whether the weights may be random if there is no checkpoint; `size`:
    the configuration of --model_size; `characters`: whether the tokens of a model from scratch are
    characters; `init_from`: weights of an earlier run, whose model is taken if nothing else names
    one; `loss`: settings that replace the model's own."""

    given: frozenset[str]
    pretrained: str | None
    source: str
    from_scratch: bool
    may_be_random: bool
    size_name: str | None
    size: dict | None
    characters: bool
    vocab_size: int | None
    ctc_weight: float | None
    init_from: str | None
    loss: dict


def add_arguments(parser) -> None:
    names = list(formats.SIZES)
    start = recogniser.add_model_arguments(
        parser,
        names,
        "Parakeet-TDT",
        "NVIDIA's format: parakeet-tdt-0.6b-v3.nemo",
        "in --export_format",
    )
    start.add_argument(
        "--export_format",
        choices=["hf", "nemo"],
        help="form of --export: a folder for transformers, or a folder with NeMo's model.nemo (hf)",
    )
    start.add_argument(
        "--vocab_size",
        type=options.number(int, 2, formats.CONFIG["vocabulary"][-1]),
        metavar="N",
        help=(
            "SentencePiece BPE pieces of a model from scratch (by --model_size; the demo has"
            " characters)"
        ),
    )
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--tdt_sigma",
        type=options.number(float, 0.0, 1.0),
        metavar="X",
        help=(
            "taken from every token's log-probability, which favours longer durations (the model's"
            " own, 0.02)"
        ),
    )
    loss.add_argument(
        "--tdt_omega",
        type=options.SHARE,
        metavar="P",
        help="chance that an utterance has the plain RNN-T loss (the model's own, 0.1)",
    )
    loss.add_argument(
        "--loss_reduction",
        choices=REDUCTIONS,
        help=(
            "the mean over utterances of the loss per label (mean), of the loss (mean_batch), or"
            " over labels (mean_volume) (the model's own)"
        ),
    )
    loss.add_argument(
        "--ctc_weight",
        type=options.SHARE,
        metavar="X",
        help=(
            f"share of a CTC head's loss; from scratch it adds the head ({CTC_WEIGHT} for a model"
            " with a CTC head, else 0)"
        ),
    )
    loss.add_argument(
        "--dropout", type=options.SHARE, default=0.1, metavar="P", help="in the encoder (0.1)"
    )
    loss.add_argument(
        "--joint_dropout",
        type=options.SHARE,
        default=0.2,
        metavar="P",
        help="in the prediction and joint networks (0.2)",
    )


def resolve(args, is_demo: bool) -> Start:
    """Fills in the defaults of these flags and returns what they ask for. Raises `UsageError`."""
    pretrained = args.model_dir or args.model_file
    if args.export:
        model_files.require_export(args.export)  # now, not after hours of training
    args.export_format = args.export_format or "hf"
    if not (
        args.transcribe
        or args.evaluate
        or is_demo
        or args.resume
        or pretrained
        or args.from_scratch
        or args.init_from
    ):
        advice = (
            "add --model_dir DIR (Hugging Face), --model_file model.nemo (NVIDIA), or"
            " --from_scratch"
        )
        raise UsageError(f"training needs a model to start from: {advice}")
    source = "--model_dir" if args.model_dir else "--model_file"
    if pretrained:
        check_place(pretrained, source)  # now, not after all data have been checked
    may_be_random = args.from_scratch or (is_demo and not (pretrained or args.init_from))
    if not pretrained and args.model_size is None:
        args.model_size = "demo" if is_demo else "110m"
    asked = {
        "sigma": args.tdt_sigma,
        "omega": args.tdt_omega,
        "reduction": args.loss_reduction,
        "ctc": args.ctc_weight,
    }
    return Start(
        given=args.given,
        pretrained=pretrained,
        source=source,
        from_scratch=args.from_scratch,
        may_be_random=may_be_random,
        size_name=args.model_size,
        size=formats.SIZES.get(args.model_size),
        characters=args.model_size == "demo" and args.vocab_size is None,
        vocab_size=args.vocab_size,
        ctc_weight=args.ctc_weight,
        init_from=args.init_from,
        loss={name: value for name, value in asked.items() if value is not None},
    )


def check_place(pretrained: str, source: str) -> None:
    """Raises `UsageError` if there is nothing at this path, or a file in place of a folder."""
    if not os.path.exists(pretrained):
        hub = "fetch it with: hf download nvidia/parakeet-tdt-0.6b-v3 --local-dir parakeet"
        raise UsageError(
            f"{source} {pretrained}: no such file or folder, and nothing is downloaded here; {hub}"
        )
    if os.path.isdir(pretrained) != (source == "--model_dir"):
        other = (
            "a folder: use --model_dir" if source == "--model_file" else "a file: use --model_file"
        )
        raise UsageError(f"{source} {pretrained}: it is {other}")


def choose(
    start: Start, resumed: dict | None, texts: Callable[[], Iterable[str]], recipe: str
) -> tuple[dict, dict | None]:
    """The metadata of the model to be trained, and its weights (None: random ones). `resumed` is
    the content of a checkpoint; `texts()` is asked for the training texts if a vocabulary has to be
    made; `recipe` is the name of the recipe, whose weights --init_from takes. Raises
    `UsageError`."""
    if resumed:
        metadata, tensors = dict(resumed["metadata"]), resumed["model"]
        check_resumed(start, metadata)
        check_saved(metadata, tensors)
    elif start.pretrained:
        tensors, metadata = read_pretrained(start)
    elif start.init_from and not start.may_be_random:
        tensors, saved = checkpoint.read_weights(start.init_from, recipe, METADATA, "--init_from")
        check_saved(saved, tensors)
        tensors, metadata = (
            None,
            {name: saved[name] for name in ("config", "tokenizer", "loss", "source", "pretrained")},
        )
    else:
        tensors, metadata = None, from_scratch(start, texts)
    metadata["loss"] = {**metadata["loss"], **start.loss}
    if metadata["loss"]["reduction"] not in REDUCTIONS:
        reason = "its sum over a batch depends on the batch's size"
        raise UsageError(
            f"{start.pretrained}: the model's loss reduction is 'sum', and {reason}; choose a"
            " --loss_reduction"
        )
    if start.ctc_weight and not metadata["config"]["ctc"]:
        raise UsageError(
            f"--ctc_weight {start.ctc_weight:g}: the model has no CTC head; leave it out"
        )
    if metadata["loss"]["omega"] and not {0, 1} <= set(metadata["config"]["durations"]):
        raise UsageError(
            "the RNN-T loss needs the durations 0 and 1, which this model does not have: add"
            " --tdt_omega 0"
        )
    return metadata, tensors


def read_pretrained(start: Start) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights and metadata of a Hugging Face folder or a .nemo archive: the metadata of this
    project's checkpoints."""
    tensors, config, extras = formats.read_model(start.pretrained)
    return tensors, {"config": config, **extras, "pretrained": True}


def from_scratch(start: Start, texts: Callable[[], Iterable[str]]) -> dict:
    """The metadata of a model with random weights. Raises `UsageError` if the flags do not ask for
    one, which is known only when `--resume auto` has found no checkpoint."""
    if not start.may_be_random:
        raise UsageError(
            "there is no checkpoint to resume from, and nothing says where the model starts:"
            " --model_dir DIR, --model_file model.nemo, or --from_scratch"
        )
    wanted = start.vocab_size or start.size["vocabulary"]
    made = text.train_tokenizer(texts(), "char" if start.characters else "bpe", wanted)
    # A released size has its vocabulary also if the text is too short for so many pieces.
    model = (
        made.model if start.characters or made.size >= wanted else pad_pieces(made.model, wanted)
    )
    size = made.size if start.characters else max(wanted, made.size)
    has_ctc = start.ctc_weight > 0 if start.ctc_weight is not None else start.size["ctc"]
    config = {**start.size, "vocabulary": size, "ctc": has_ctc}
    require_room(sum(map(math.prod, formats.expected_shapes(config).values())))
    state = {"sentencepiece": model.hex()}
    return {
        "config": config,
        "tokenizer": state,
        "loss": SCRATCH_LOSS,
        "source": {},
        "pretrained": False,
    }


def check_resumed(start: Start, metadata: dict) -> None:
    """Refuses flags that contradict the model of the checkpoint with this metadata. Without that
    check a script's `--resume auto` would continue an earlier demo and ignore the model that was
    named."""
    saved, conflicts = metadata["config"], []
    if "model_size" in start.given and any(
        start.size[name] != saved[name] for name in ("d_model", "layers")
    ):
        conflicts.append(
            f"--model_size {start.size_name} (the checkpoint has {saved['d_model']} wide,"
            f" {saved['layers']} layers)"
        )
    if start.vocab_size and start.vocab_size != saved["vocabulary"]:
        conflicts.append(
            f"--vocab_size {start.vocab_size} (the checkpoint has {saved['vocabulary']})"
        )
    if start.from_scratch and metadata["pretrained"]:
        conflicts.append("--from_scratch (the checkpoint's model began from released weights)")
    if start.pretrained and not metadata["pretrained"]:
        conflicts.append(
            f"{start.source} {start.pretrained} (the checkpoint's model began from scratch)"
        )
    elif start.pretrained:
        theirs = read_pretrained(start)[1]
        if (
            theirs["config"] != saved
            or tokenizer_of(theirs).pieces != tokenizer_of(metadata).pieces
        ):
            conflicts.append(
                f"{start.source} {start.pretrained} (the checkpoint's model has another shape or"
                " vocabulary)"
            )
    if conflicts:
        raise UsageError(
            f"{', '.join(conflicts)} conflicts with the checkpoint: leave it out to continue, or"
            " start a new run with another --output_dir, or from the weights that fit with"
            " --init_from in place of --resume"
        )


def check_saved(metadata: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Raises `UsageError` if a checkpoint's metadata, which fit METADATA, and its weights are not
    those of one model. Without that check, damaged metadata could ask for a model of any size."""
    formats.check_config(metadata["config"], "the saved model")
    model_files.check_shapes(
        tensors, formats.expected_shapes(metadata["config"]), "the saved model", "Parakeet"
    )
    tokenizer_of(metadata)


def ctc_weight(metadata: dict) -> float:
    """The share of the CTC head's loss."""
    return metadata["loss"].get("ctc", CTC_WEIGHT) if metadata["config"]["ctc"] else 0.0


def tokenizer_of(metadata: dict) -> ParakeetTokenizer:
    return make_tokenizer(metadata["tokenizer"], metadata["config"]["vocabulary"])


def check_demo(saved: dict | None) -> None:
    """Raises `UsageError` if the weights with these metadata (None: there are none) were not
    trained on the demo corpus."""
    if saved is not None and not saved.get("demo"):
        advice = "add --train_manifest or, with --evaluate, --test_manifest"
        raise UsageError(
            "these weights were trained on other data than the demo corpus, which is used without"
            f" a manifest: {advice}"
        )


def learning_rate(metadata: dict, hours: float) -> float:
    """The peak learning rate, by the model's start and the hours of speech."""
    if metadata["pretrained"]:
        return FINE_TUNING_RATE if hours >= MANY_HOURS else CAREFUL_RATE
    return SMALL_RATE if metadata["config"]["d_model"] <= SMALL else SCRATCH_RATE


def export(folder: str, form: str, tensors: dict[str, torch.Tensor], metadata: dict) -> None:
    """Writes a trained model as a folder for transformers, or with NeMo's model.nemo."""
    extras = {name: metadata[name] for name in ("tokenizer", "source", "loss")}
    names = formats.export(folder, form, tensors, metadata["config"], extras)
    print(f"exported to {folder}: {', '.join(names)}")
