"""What a Whisper starts from and ends as: its flags, released or random weights, metadata, learning
rate, export."""

import argparse
import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, options
from common.errors import DataError, UsageError
from speech import recogniser
from speech.audio import SAMPLE_RATE
from speech.long import BY_SILENCES, BY_WINDOWS, Cutting
from speech.model_files import require_room
from speech.whisper import decoding, formats, scratch
from speech.whisper.model import FRAME, Whisper
from speech.whisper.tokenizer import (
    NO_SPEECH,
    STATE,
    WhisperTokenizer,
    make_tokenizer,
    read_tokenizer,
    special_tokens,
)

BEAM_SIZE, PAD_SHARE = 5, 0.05
AUXILIARY_WEIGHT = 0.3  # share of the encoder's own loss, from scratch
START_UTTERANCES = 32  # to which the initial weights of a model from scratch are fitted
FINE_TUNING_RATES = {
    384: 3.75e-5,
    512: 2.5e-5,
    768: 1.25e-5,
    1024: 6.25e-6,
    1280: 4.4e-6,
}  # pre-training's / 40
SMALL_RATE = 2e-3  # from scratch, for models narrower than the smallest released one
# Seconds. A model that was trained on shorter clips, as the demos are, reads the cut words of a
# window badly, and two or three whole words are too few to stitch by: long files are cut at
# silences for it (the Morse demo on clips of 6 to 12 s: CER 19 %, with windows 159 %).
LEAST_OVERLAPPED = 10.0
SHAPE = ("d_model", "encoder_layers", "decoder_layers", "attention_heads")
SUPPRESSED = (
    "suppress_tokens",
    "begin_suppress_tokens",
)  # in a generation config: tokens that are not generated
OWN_SHAPE = "a released model has its own shape; leave one of them out"
ALIGNED = (
    "a released encoder is aligned already, and its vocabulary of 50,257 would need 3 GB of CTC"
    " scores a batch"
)

# The schema of the metadata that both recipes keep with their weights, for common.checkpoint.
TOKENS = range(formats.CONFIG["vocab_size"][-1])
METADATA = {
    "recipe": str,
    "config": formats.CONFIG,
    "tokenizer": STATE,
    "ctc_tokens": TOKENS,
    "generation": {f"{name}?": [TOKENS] for name in SUPPRESSED},
    "pretrained": bool,
    "pad_to_30s": bool,
    "pad_from": checkpoint.COUNT,
    "held_out?": [str],
    "longest": lambda seconds: (
        type(seconds) in (int, float) and FRAME / SAMPLE_RATE <= seconds < math.inf
    ),
}

TRAINING = ("from_scratch", "freeze_encoder", "ctc_weight", "pad_share", "pad_to_30s")
USES = ("transcribe", "evaluate")  # of a trained model

# Rows for common.options: flags that exclude each other, and flags that need another one.
EXCLUDES = (
    *recogniser.MODEL_EXCLUDES,
    *((model, flag, OWN_SHAPE) for model in recogniser.MODELS for flag in SHAPE),
    (
        "freeze_encoder",
        "pad_to_30s False",
        "a frozen encoder only knows 30 s windows; leave one of them out",
    ),
    ("pad_share", "pad_to_30s", "the second pads every utterance; leave one of them out"),
    ("pad_share", "freeze_encoder", "the second pads every utterance; leave one of them out"),
    ("max_target_tokens", "transcribe", "the first is for texts that are given; leave it out"),
    *((flag, use, options.TRAINS) for flag in TRAINING for use in USES),
)
NEEDS = (
    (
        "tokenizer_file",
        ("model_dir", "model_file"),
        "from scratch the tokenizer is made from the training text",
    ),
    (
        "freeze_encoder",
        ("model_dir", "model_file", "resume", "init_from", "dry_run"),
        "a random encoder would stay random",
    ),
    ("beam_size", ("decoding beam",), ""),
)


@dataclass(frozen=True)
class Start:
    """Where the model starts and how it decodes, as the flags ask. `given`: the flags on the
    command line; `pretrained`: the folder or file of released weights that the flag `source` names,
    None from scratch; `may_be_random`: whether the weights may be random if there is no checkpoint;
    `size`: the configuration of --model_size, which the flags in `shape` change; `auxiliary`:
    whether a model from scratch gets an output layer on its encoder, for which the flags in `asked`
    ask; `suppress`: whether the tokens that a released generation config forbids are forbidden here
    too; `vocabulary`: the tokens of a model from scratch whose tokenizer has fewer (None: the
    tokenizer's)."""

    given: frozenset[str]
    pretrained: str | None
    source: str
    tokenizer_file: str | None
    language: str | None
    from_scratch: bool
    may_be_random: bool
    size_name: str | None
    size: dict | None
    shape: dict[str, int]
    vocab_size: int | None
    initialised: bool
    auxiliary: bool
    asked: str
    freeze_encoder: bool
    suppress: bool
    max_target_tokens: int | None
    max_duration: float
    learning_rate: float | None
    decoding: str
    beam_size: int
    seed: int
    vocabulary: int | None = None


def language_code(text: str) -> str:
    """An argparse type: a language code in lower case, as transformers looks it up: vi, kok,
    zh-tw."""
    code = text.lower()
    is_code = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) and 2 <= len(code) <= 20
    if not is_code or f"<|{code}|>" in (*special_tokens(0, (), timestamps=False), *NO_SPEECH):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a language code, such as vi, kok or zh-tw"
        )
    return code


def add_arguments(parser, sizes: dict[str, dict], language: str) -> None:
    """`sizes`: names of model sizes to configurations; `language`: the default."""
    start = recogniser.add_model_arguments(
        parser,
        list(sizes),
        "Whisper",
        "OpenAI's format: base.pt",
        "for transformers, with OpenAI's model.pt",
    )
    start.add_argument(
        "--tokenizer_file",
        type=options.path,
        metavar="PATH",
        help="tokenizer.json, a folder or multilingual.tiktoken (next to the model)",
    )
    for name, what in zip(
        SHAPE,
        ("width", "encoder layers", "decoder layers", "heads of every attention"),
        strict=True,
    ):
        most = formats.CONFIG[name if name in formats.CONFIG else f"encoder_{name}"][-1]
        start.add_argument(
            f"--{name}",
            type=options.number(int, 1, most),
            metavar="N",
            help=f"{what} of a model from scratch (by --model_size)",
        )
    start.add_argument(
        "--language",
        type=language_code,
        default=language,
        metavar="CODE",
        help=f"Whisper's language token ({language})",
    )
    start.add_argument(
        "--freeze_encoder",
        action=options.OnOff,
        default=False,
        help="train the decoder only, at 30 s windows (off)",
    )
    losses = parser.add_argument_group("losses and padding")
    losses.add_argument("--dropout", type=options.SHARE, default=0.0, metavar="P", help="(0)")
    losses.add_argument(
        "--label_smoothing",
        type=options.SHARE,
        default=0.0,
        metavar="P",
        help="label smoothing of the decoder's targets (0)",
    )
    losses.add_argument(
        "--ctc_weight",
        type=options.SHARE,
        metavar="X",
        help=(
            "share of an auxiliary CTC loss on the encoder, for models from scratch (0.3 from"
            " scratch)"
        ),
    )
    losses.add_argument(
        "--pad_share",
        type=options.SHARE,
        metavar="X",
        help=(
            "share of utterances padded to 30 s from the middle epoch on, because transformers"
            " always pads when it decodes (0.05)"
        ),
    )
    losses.add_argument(
        "--pad_to_30s",
        action=options.OnOff,
        help="pad all utterances to 30 s, in training and decoding (off; on with --freeze_encoder)",
    )
    losses.add_argument(
        "--max_target_tokens",
        type=options.number(int, 8, formats.CONFIG["max_target_positions"][-1]),
        metavar="N",
        help="reject longer transcripts, in tokens with prompt and end (the decoder's positions)",
    )


def resolve(
    args,
    sizes: dict[str, dict],
    is_demo: bool,
    auxiliary: bool | None = None,
    suppress: bool = True,
) -> Start:
    """Fills in the defaults of these flags and returns what they ask for. `auxiliary`: whether the
    encoder gets an output layer (None: if --ctc_weight is not 0). Raises `UsageError`."""
    pretrained = args.model_dir or args.model_file
    if pretrained and args.ctc_weight:
        raise UsageError(f"--ctc_weight is for models from scratch: {ALIGNED}")
    if args.export:
        formats.require_export(args.export)  # now, not after hours of training
    if args.tokenizer_file and not os.path.exists(args.tokenizer_file):
        raise UsageError(f"--tokenizer_file {args.tokenizer_file}: no such file or folder")
    if not (
        args.transcribe
        or args.evaluate
        or is_demo
        or args.resume
        or pretrained
        or args.from_scratch
    ):
        raise UsageError(
            "where does the model start? --model_dir DIR (Hugging Face), --model_file base.pt"
            " (OpenAI), or --from_scratch"
        )
    shares = {
        name: getattr(args, name, None)
        for name in ("ctc_weight", "alignment_weight")
        if name in args.given
    }
    if not pretrained and args.model_size is None:
        args.model_size = "demo" if is_demo else "base"
    if args.ctc_weight is None:
        args.ctc_weight = 0.0 if pretrained else AUXILIARY_WEIGHT
    if args.pad_to_30s is None:
        args.pad_to_30s = args.freeze_encoder
    if args.pad_share is None:
        args.pad_share = PAD_SHARE
    vocabulary = None
    if options.plans(args) and not (args.train_manifest or getattr(args, "data_dir", None)):
        # Without data, a released size is planned with the released vocabulary.
        released = (
            sizes[args.model_size]["vocab_size"] if args.model_size not in (None, "demo") else None
        )
        vocabulary = args.vocab_size if "vocab_size" in args.given else released
    return Start(
        given=args.given,
        pretrained=pretrained,
        source="--model_dir" if args.model_dir else "--model_file",
        tokenizer_file=args.tokenizer_file,
        language=args.language,
        from_scratch=args.from_scratch,
        may_be_random=is_demo or args.from_scratch,
        size_name=args.model_size,
        size=sizes.get(args.model_size),
        shape={name: getattr(args, name) for name in SHAPE if getattr(args, name)},
        vocab_size=args.vocab_size if "vocab_size" in args.given else None,
        initialised=bool(args.init_from),
        auxiliary=args.ctc_weight > 0 if auxiliary is None else auxiliary,
        asked=" ".join(f"--{name} {share:g}" for name, share in shares.items() if share),
        freeze_encoder=args.freeze_encoder,
        suppress=suppress,
        max_target_tokens=args.max_target_tokens,
        max_duration=args.max_duration,
        learning_rate=args.learning_rate,
        decoding=args.decoding,
        beam_size=args.beam_size,
        seed=args.seed,
        vocabulary=vocabulary,
    )


def window_seconds(config: dict) -> float:
    """The longest window that a model of this configuration takes: 30 s for every released one."""
    return config["max_source_positions"] * FRAME / SAMPLE_RATE


def check_limits(start: Start, config: dict) -> None:
    """Raises `UsageError` if --max_target_tokens or --max_duration is more than the model has room
    for."""
    positions, longest = config["max_target_positions"], window_seconds(config)
    if start.max_target_tokens and start.max_target_tokens > positions:
        raise UsageError(
            f"--max_target_tokens {start.max_target_tokens}: the decoder has {positions} positions"
        )
    if start.max_duration > longest:
        raise UsageError(
            f"--max_duration {start.max_duration:g}: the model's window is {longest:g} s; longer"
            " recordings can be cut by the manifest's segment times (--use_chunking)"
        )


def config_from_scratch(start: Start, vocabulary: int) -> dict:
    """The configuration of a model from scratch: a size's, changed by the shape flags. Raises
    `UsageError`."""
    config, shape = {**start.size, "vocab_size": vocabulary}, start.shape
    width = shape.get("d_model", config["d_model"])
    heads = shape.get("attention_heads")
    if heads is None:
        heads = max(1, width // 64) if "d_model" in shape else config["encoder_attention_heads"]
    if width % (2 * heads) or width < 4:
        raise UsageError(
            f"--d_model {width} must be a multiple of twice --attention_heads {heads}, and at"
            " least 4"
        )
    return {
        **config,
        "d_model": width,
        "encoder_layers": shape.get("encoder_layers", config["encoder_layers"]),
        "decoder_layers": shape.get("decoder_layers", config["decoder_layers"]),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
    }


def check_resumed(start: Start, metadata: dict, vocab_size: int | None = None) -> None:
    """Refuses flags that contradict the model of the checkpoint with this metadata, which was made
    with --vocab_size `vocab_size`. Without that check a script's `--resume auto` would continue an
    earlier demo and ignore the model that was named."""
    saved = metadata["config"]
    values = {**saved, "attention_heads": saved["encoder_attention_heads"]}
    conflicts = [
        f"--{name} {value} (the checkpoint has {values[name]})"
        for name, value in start.shape.items()
        if value != values[name]
    ]
    sized = ("d_model", "encoder_layers", "decoder_layers")
    if (
        "model_size" in start.given
        and not start.shape
        and any(start.size[name] != saved[name] for name in sized)
    ):
        layers = f"{saved['encoder_layers']}+{saved['decoder_layers']} layers"
        conflicts.append(
            f"--model_size {start.size_name} (the checkpoint has {saved['d_model']} wide, {layers})"
        )
    if start.pretrained and not metadata["pretrained"]:
        conflicts.append(
            f"{start.source} {start.pretrained} (the checkpoint's model began from scratch)"
        )
    elif start.pretrained and os.path.isdir(start.pretrained):
        config = formats.read_config(Path(start.pretrained))
        if any(config[name] != saved[name] for name in config):
            conflicts.append(
                f"{start.source} {start.pretrained} (the checkpoint's model has another shape)"
            )
    if start.from_scratch and metadata["pretrained"]:
        conflicts.append("--from_scratch (the checkpoint's model began from released weights)")
    if start.asked and not metadata["ctc_tokens"]:
        conflicts.append(f"{start.asked} (the checkpoint's encoder has no output layer)")
    if start.vocab_size and start.vocab_size != (vocab_size or start.vocab_size):
        conflicts.append(f"--vocab_size {start.vocab_size} (the checkpoint has {vocab_size})")
    if "language" in start.given and start.language != metadata["tokenizer"]["language"]:
        conflicts.append(
            f"--language {start.language} (the checkpoint has {metadata['tokenizer']['language']})"
        )
    if start.tokenizer_file:
        tokenizer = read_tokenizer(
            start.tokenizer_file, metadata["tokenizer"]["language"], saved["vocab_size"]
        )
        if tokenizer.vocab != metadata["tokenizer"]["vocab"]:
            conflicts.append(
                f"--tokenizer_file {start.tokenizer_file} (the checkpoint has another vocabulary)"
            )
    if conflicts:
        raise UsageError(
            f"{', '.join(conflicts)} conflicts with the checkpoint: leave it out to continue, or"
            " start a new run with another --output_dir, or from the weights that fit with"
            " --init_from in place of --resume"
        )


def read_pretrained(start: Start) -> tuple[dict[str, torch.Tensor], dict]:
    """Weights and metadata of a Hugging Face folder or OpenAI's .pt: the metadata of this project's
    checkpoints."""
    weights, config, extras = _read_released(start)
    tokenizer = read_tokenizer(
        start.tokenizer_file or extras["tokenizer"], start.language, vocab_size=config["vocab_size"]
    )
    generation = dict(extras["generation"])
    for name in SUPPRESSED:
        ids = generation.get(name) or []
        if checkpoint.mismatch(ids, [range(config["vocab_size"])], name):
            raise UsageError(
                f"{start.pretrained}: {name} in generation_config.json are not token ids of this"
                " model"
            )
        generation[name] = ids if start.suppress else []
    metadata = {
        "config": config,
        "tokenizer": tokenizer.state(),
        "generation": generation,
        "ctc_tokens": 0,
        "pad_to_30s": True,
        "longest": window_seconds(config),
        "pretrained": True,
    }
    return weights, metadata


def _read_released(start: Start) -> tuple[dict, dict, dict]:
    if not os.path.exists(start.pretrained):
        raise UsageError(
            f"{start.source} {start.pretrained}: no such file or folder, and nothing is downloaded"
            " here; a model of the hub becomes a folder with: hf download openai/whisper-base"
            " --local-dir whisper-base"
        )
    return formats.read_model(start.pretrained)


def choose(
    start: Start, resumed: dict | None, train_tokenizer: Callable
) -> tuple[dict, dict | None]:
    """The metadata of the model to be trained, and its weights (None: random ones). `resumed` is
    the content of a checkpoint; `train_tokenizer()` is asked for the vocabulary of a model from
    scratch. Raises `UsageError`."""
    if resumed:
        metadata, weights = dict(resumed["metadata"]), resumed["model"]
        check_resumed(start, metadata, resumed["args"].get("vocab_size"))
        check_saved(metadata, weights)
    elif start.pretrained:
        weights, metadata = read_pretrained(start)
    else:
        weights, metadata = None, metadata_from_scratch(start, train_tokenizer)
    check_limits(start, metadata["config"])
    return metadata, weights


def metadata_from_scratch(start: Start, train_tokenizer: Callable) -> dict:
    """The metadata of a model with random weights. Raises `UsageError` if the flags do not ask for
    one, which is known only when `--resume auto` has found no checkpoint."""
    if not start.may_be_random:
        raise UsageError(
            "there is no checkpoint to resume from, and nothing says where the model starts:"
            " --model_dir DIR, --model_file base.pt, or --from_scratch"
        )
    if start.freeze_encoder and not start.initialised:
        if torch.get_default_device().type != "meta":
            raise UsageError(
                "--freeze_encoder: there is no checkpoint to resume, and a random encoder would"
                " stay random"
            )
        print(
            "--freeze_encoder is planned for a released model; training needs --model_dir or"
            " --model_file"
        )
    tokenizer = train_tokenizer()
    config = config_from_scratch(start, start.vocabulary or tokenizer.size)
    require_room(sum(map(math.prod, formats.expected_shapes(config).values())))
    return {
        "config": config,
        "tokenizer": tokenizer.state(),
        "generation": {},
        "ctc_tokens": (
            tokenizer.eos if start.auxiliary else 0
        ),  # the text's tokens are numbered before the special ones
        "pretrained": False,
    }


def check_saved(metadata: dict, weights: dict[str, torch.Tensor]) -> None:
    """Raises `UsageError` if a checkpoint's metadata, which fit METADATA, and its weights are not
    those of one model. Without that check, damaged metadata could ask for a model of any size."""
    name, config, tokenizer = (
        "the saved model",
        metadata["config"],
        make_tokenizer(metadata["tokenizer"]),
    )
    formats.check_config(config, name)
    formats.check(weights, config, name, metadata["ctc_tokens"])
    tokens = [
        tokenizer.size - 1,
        *(token for ids in SUPPRESSED for token in metadata["generation"].get(ids, ())),
    ]
    if max(tokens) >= config["vocab_size"] or metadata["ctc_tokens"] not in (0, tokenizer.eos):
        raise UsageError(f"{name} is damaged: its tokens are not those of its tokenizer")


def load_model(weights: dict[str, torch.Tensor], metadata: dict) -> Whisper:
    """A trained model, in evaluation mode. Raises `UsageError` if its file is damaged."""
    check_saved(metadata, weights)
    model = make_model(metadata)
    checkpoint.load_weights(model, weights)
    return model.eval()


def make_model(metadata: dict, dropout: float = 0.0, label_smoothing: float = 0.0) -> Whisper:
    """A Whisper by a checkpoint's metadata, with random weights."""
    model = Whisper(metadata["config"], dropout, label_smoothing, metadata["ctc_tokens"])
    model.pad_to_longest = metadata["pad_to_30s"]
    return model


def fill(start: Start, model: Whisper, weights: dict | None, data) -> None:
    """Gives the model the weights that training starts with: `weights`, or random ones fitted to a
    few utterances of the training set `data`. A planned run's model stays without values. Freezes
    the encoder if --freeze_encoder says so."""
    has_values = not next(model.parameters()).is_meta
    if has_values and weights is not None:
        checkpoint.load_weights(model, weights)
    elif has_values:
        scratch.initialise(model, first_waveforms(data, start.seed))
    if start.freeze_encoder:
        model.freeze_encoder()


def first_waveforms(data, seed: int) -> list[torch.Tensor]:
    """A few training utterances without padding."""
    waveforms: list[torch.Tensor] = []
    for index in np.random.default_rng(seed).permutation(len(data)):
        try:
            item = data.item(int(index), 0)
        except DataError:
            continue  # training itself reports it
        waveforms.append(item["audio"][: item["heard"]])
        if len(waveforms) == START_UTTERANCES:
            break
    return waveforms or [torch.zeros(SAMPLE_RATE)]


def describe(start: Start, model: Whisper, metadata: dict) -> None:
    """Prints the size of the model and, unless --learning_rate is given, its learning rate."""
    if start.learning_rate is None:
        reason = "fine-tuning at this width" if metadata["pretrained"] else "from scratch"
        print(f"learning rate: {learning_rate(metadata):g} ({reason})")
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = metadata["config"]["vocab_size"]
    print(
        f"model: {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M of them trained; {tokens}"
        " tokens"
    )


@functools.lru_cache(maxsize=2)
def draw_padded(seed: int, epoch: int, count: int, share: float) -> np.ndarray:
    """(N,) which utterances are padded to the longest window in an epoch."""
    return np.random.default_rng([seed, epoch, 11]).random(count) < share


def middle_epoch(windows: int, num_epochs: int | None, max_steps: int | None) -> int:
    """The epoch from which --pad_share applies, with so many windows in an epoch. Before the model
    can read anything, 30 s of mostly silence teach it little and cost as much as ten short
    utterances."""
    return int(min(num_epochs or math.inf, (max_steps or math.inf) / windows) / 2)


def make_search(start: Start, metadata: dict) -> tuple[WhisperTokenizer, decoding.Search]:
    """The tokenizer of a model with this metadata, and how --decoding searches."""
    tokenizer, vocab_size = make_tokenizer(metadata["tokenizer"]), metadata["config"]["vocab_size"]
    method, beam_size = start.decoding, start.beam_size
    return tokenizer, decoding.make_search(
        tokenizer, metadata["generation"], vocab_size, method, beam_size, start.seed
    )


def long_recordings(metadata: dict) -> tuple[float, Cutting]:
    """The longest piece of a long recording, seconds, and how recordings are cut. A little more
    than what was trained on does no harm, and resampling may add a sample to the longest pieces."""
    longest = min(1.05 * metadata["longest"], window_seconds(metadata["config"]))
    return longest, BY_WINDOWS if longest >= LEAST_OVERLAPPED else BY_SILENCES


def learning_rate(metadata: dict) -> float:
    """The peak learning rate by the model's width: for fine-tuning a fortieth of pre-training's;
    from scratch that of pre-training, and more for models narrower than the smallest released
    one."""
    width = metadata["config"]["d_model"]
    rate = FINE_TUNING_RATES[min(FINE_TUNING_RATES, key=lambda known: abs(known - width))]
    if metadata["pretrained"]:
        return rate
    return 40 * rate if width >= min(FINE_TUNING_RATES) else SMALL_RATE


def export(folder: str, model: Whisper, metadata: dict) -> None:
    """Writes a trained model as a folder for transformers, with OpenAI's model.pt."""
    tokenizer = make_tokenizer(metadata["tokenizer"])
    names = formats.export(
        folder, model.state_dict(), metadata["config"], tokenizer, metadata["generation"]
    )
    print(f"exported to {folder}: {', '.join(names)}")
