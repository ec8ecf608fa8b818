"""What Whisper recipes do alike: their flags, the model and tokenizer these ask for, utterances to batches, decoding of
sets and files, export."""

import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import batches, checkpoint, compiling, device, memory, optim, options, preflight
from common.errors import DataError, UsageError
from speech import audio, features, long
from speech import recogniser as results
from speech.columns import Corpus
from speech.corpus import drop
from speech.whisper import decoding
from speech.whisper import formats as files
from speech.whisper import tokenizer as text
from speech.whisper.model import CHECKPOINTED, FRAME, SAMPLE_RATE, Whisper, alignment_loss, ctc_loss, token_loss
from speech.whisper.scratch import initialise

SPEEDS = (0.9, 1.0, 1.1)
# WeNet's Whisper recipe: two masks of up to 10 of 80 bands, two of up to 50 frames of a ten-second utterance.
FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH = 2, 10 / 80
TIME_MASKS, TIME_MASK_WIDTH = 2, 0.05
START_UTTERANCES = 32  # that the initial weights of a model from scratch are fitted to
# Seconds: a model that was trained on shorter clips, as the demos are, reads a window's cut words badly, and two or three
# whole ones are too few to stitch by. Long files are cut at silences for it (the Morse demo on clips of 6 to 12 s: CER
# 19 %, by windows 159 %).
LEAST_OVERLAPPED = 10.0
BEAM_SIZE, PAD_SHARE = 5, 0.05
SMALL_RATE = 2e-3  # from scratch, for models narrower than the smallest released one
FINE_TUNING_RATES = {
    384: 3.75e-5,
    512: 2.5e-5,
    768: 1.25e-5,
    1024: 6.25e-6,
    1280: 4.4e-6,
}  # d_model: pre-training's / 40
SHAPE = ("d_model", "encoder_layers", "decoder_layers", "attention_heads")


# --- flags -----------------------------------------------------------------------------------------------------------


def add_arguments(parser, sizes: dict[str, dict], language: str | None) -> None:
    """Flags of both Whisper recipes. `sizes`: names of model sizes to configurations; `language`: the default."""
    # fmt: off
    start = parser.add_argument_group("model: where it starts (its shape comes from the checkpoint when resuming)")
    start.add_argument("--model_dir", type=options.path, metavar="DIR", help="fine-tune a Hugging Face Whisper folder; with --transcribe, --evaluate or --export, use it")
    start.add_argument("--model_file", type=options.path, metavar="FILE", help="the same for OpenAI's form: base.pt")
    start.add_argument("--tokenizer_file", type=options.path, metavar="PATH", help="tokenizer.json, a folder or multilingual.tiktoken (beside the model)")
    start.add_argument("--from_scratch", action=options.OnOff, default=False, help="train all weights, with a vocabulary of its own (on for the demo)")
    start.add_argument("--model_size", choices=list(sizes), help="shape of a model from scratch (demo, without data; base with it)")
    for name, what in zip(SHAPE, ("width", "encoder layers", "decoder layers", "heads of every attention"), strict=True):
        start.add_argument(f"--{name}", type=options.POSITIVE, metavar="N", help=f"{what}, in place of the size's, from scratch")
    start.add_argument("--language", default=language, metavar="CODE", help=f"Whisper's language token ({language})")
    start.add_argument("--freeze_encoder", action=options.OnOff, default=False, help="train the decoder only; 30 s windows, as the encoder is used to (off)")
    regularisation = parser.add_argument_group("losses and augmentation")
    regularisation.add_argument("--dropout", type=options.SHARE, default=0.0, metavar="P", help="(0)")
    regularisation.add_argument("--label_smoothing", type=options.SHARE, default=0.0, metavar="P", help="of the decoder's targets (0)")
    regularisation.add_argument("--ctc_weight", type=options.SHARE, metavar="X", help="share of an auxiliary CTC loss on the encoder, for models from scratch (0.3 from scratch)")
    regularisation.add_argument("--spec_augment", action=options.OnOff, help="mask bands and spans of the features (on; off for the demo)")
    regularisation.add_argument("--speed_perturbation", action=options.OnOff, help="play at 0.9, 1.0 or 1.1 times the speed (on; off for the demo)")
    regularisation.add_argument("--pad_share", type=options.SHARE, metavar="X", help="share of utterances padded to 30 s without a mask from the middle epoch on, so that transformers, which always pads, decodes alike (0.05)")
    regularisation.add_argument("--pad_to_30s", action=options.OnOff, help="pad all to 30 s, in training and decoding (off; on with --freeze_encoder)")
    regularisation.add_argument("--max_target_tokens", type=options.POSITIVE, metavar="N", help="reject longer transcripts, tokens with prompt and end (the decoder's positions)")
    regularisation.add_argument("--use_chunking", action=options.OnOff, default=False, help="cut recordings over --max_duration by the manifest's segment times (off)")
    use = parser.add_argument_group("decoding and use")
    use.add_argument("--decoding", choices=["greedy", "beam"], default="greedy", help="for the figures at the end, --evaluate and --transcribe (greedy)")
    use.add_argument("--beam_size", type=options.POSITIVE, metavar="N", help="hypotheses of --decoding beam (5)")
    use.add_argument("--average_checkpoints", type=options.POSITIVE, metavar="N", help="average the weights of N checkpoints at the end, and use them where they are not worse")
    use.add_argument("--average_by", choices=["last", "best"], help="which checkpoints to average: the newest, or those that evaluated best (last)")
    use.add_argument("--transcribe", nargs="+", type=options.path, metavar="PATH", help="transcribe files and folders with the weights of --resume (CHECKPOINT_DIR/best.safetensors)")
    use.add_argument("--output", type=options.path, metavar="FILE", help="write transcripts there as JSON Lines")
    use.add_argument("--evaluate", action=options.OnOff, default=False, help="only print the figures of the test set, with the same weights")
    use.add_argument("--verify_gpu", action=options.OnOff, default=False, help="check GPU, driver, precision, attention, compiler, prefetching and disk for this run, and end")
    use.add_argument("--export", type=options.path, metavar="DIR", help="write the weights as a folder for transformers, with OpenAI's model.pt; after training, or alone with --resume PATH or --model_dir")
    # fmt: on


def check_arguments(args, is_demo: bool) -> None:
    """Fills in what depends on other flags, after options.resolve. Raises `UsageError` for what contradicts."""
    if args.model_dir and args.model_file:
        raise UsageError("--model_dir and --model_file both say where the model starts: give one of them")
    args.pretrained = args.model_dir or args.model_file
    args.alignment_weight = getattr(args, "alignment_weight", 0.0)
    args.suppress = getattr(args, "suppress", True)
    if args.pretrained and args.from_scratch:
        raise UsageError("--from_scratch starts without the weights of --model_dir or --model_file: leave one out")
    if args.pretrained and (args.model_size or any(getattr(args, name) for name in SHAPE)):
        raise UsageError(f"{args.pretrained} has its own shape: --model_size and {', '.join(f'--{n}' for n in SHAPE)} are for --from_scratch")  # fmt: skip
    if args.pretrained and args.ctc_weight:
        raise UsageError("--ctc_weight is for models from scratch: a released encoder is aligned already, and its vocabulary of 50,257 would need 3 GB of CTC scores a batch")  # fmt: skip
    if args.tokenizer_file and not args.pretrained:
        raise UsageError("--tokenizer_file goes with --model_dir or --model_file: from scratch the tokenizer is made from the training text")  # fmt: skip
    if args.freeze_encoder and not args.pretrained and not args.resume and not args.init_from:
        raise UsageError("--freeze_encoder with random weights would leave the encoder random: it goes with --model_dir or --model_file")  # fmt: skip
    if args.freeze_encoder and args.pad_to_30s is False:
        raise UsageError("--no_pad_to_30s: a frozen encoder only knows 30 s windows; leave one of the two out")
    if args.transcribe and args.evaluate:
        raise UsageError("--transcribe and --evaluate are two things: give one of them")
    if args.transcribe and args.export:
        raise UsageError("--transcribe and --export are two things: give one of them")
    if args.output and not args.transcribe:
        raise UsageError("--output goes with --transcribe")
    if args.beam_size and args.decoding != "beam":
        raise UsageError("--beam_size goes with --decoding beam")
    if args.average_by and not args.average_checkpoints:
        raise UsageError("--average_by goes with --average_checkpoints N")
    if args.pad_share is not None and (args.pad_to_30s or args.freeze_encoder):
        raise UsageError("--pad_share is for variable length: --pad_to_30s and --freeze_encoder pad every utterance")
    if args.export:
        files.may_write(args.export)  # not after hours of training
    using = args.transcribe or args.evaluate
    if not (using or is_demo or args.resume or args.pretrained or args.from_scratch):
        raise UsageError(
            "where does the model start? --model_dir DIR (Hugging Face), --model_file base.pt (OpenAI), or --from_scratch"
        )
    args.may_start_from_scratch = is_demo or args.from_scratch
    args.ctc_asked = bool(args.ctc_weight)
    args.model_size_given = args.model_size is not None
    args.model_size = args.model_size or (None if args.pretrained else "demo" if is_demo else "base")
    args.pad_from = 0  # the epoch, see pad_from_the_middle
    args.pad_share = PAD_SHARE if args.pad_share is None else args.pad_share
    args.pad_to_30s = args.freeze_encoder if args.pad_to_30s is None else args.pad_to_30s
    args.beam_size, args.average_by = args.beam_size or BEAM_SIZE, args.average_by or "last"
    args.ctc_weight = (0.0 if args.pretrained else 0.3) if args.ctc_weight is None else args.ctc_weight
    for flag in ("spec_augment", "speed_perturbation"):  # the demo's voices hardly vary, and its run is short
        setattr(args, flag, not is_demo if getattr(args, flag) is None else getattr(args, flag))


# --- model -----------------------------------------------------------------------------------------------------------


def shape_from_scratch(args, size: dict, vocabulary: int) -> dict:
    """The configuration of a model from scratch: a size's, changed by the shape flags. Raises `UsageError`."""
    config = {**size, "vocab_size": vocabulary}
    width = config["d_model"] = args.d_model or config["d_model"]
    config["encoder_layers"] = args.encoder_layers or config["encoder_layers"]
    config["decoder_layers"] = args.decoder_layers or config["decoder_layers"]
    heads = args.attention_heads or (config["encoder_attention_heads"] if not args.d_model else max(1, width // 64))
    if width % (2 * heads) or width < 4:
        raise UsageError(f"--d_model {width} must be a multiple of twice --attention_heads {heads}, and at least 4")
    config |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
    return config | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4 * width)


def check_resumed(args, sizes: dict[str, dict], metadata: dict) -> None:
    """Refuses flags that contradict the model of the checkpoint with this metadata: without that a wrapper's --resume auto
    would go on with an earlier demo and leave out the model that was named."""
    saved = metadata["config"]
    given = {name: getattr(args, name) for name in SHAPE if getattr(args, name)}
    own = {**saved, "attention_heads": saved["encoder_attention_heads"]}
    conflicts = [
        f"--{name} {value} (the checkpoint has {own[name]})" for name, value in given.items() if value != own[name]
    ]
    if args.model_size_given and not given:
        size = sizes[args.model_size]
        if any(size[name] != saved[name] for name in ("d_model", "encoder_layers", "decoder_layers")):
            conflicts.append(f"--model_size {args.model_size} (the checkpoint has {saved['d_model']} wide, {saved['encoder_layers']}+{saved['decoder_layers']} layers)")  # fmt: skip
    if args.pretrained and not metadata["pretrained"]:
        conflicts.append(f"{args.pretrained} (the checkpoint's model began from scratch)")
    elif args.pretrained and Path(args.pretrained).is_dir():
        config = files.read_config(Path(args.pretrained))
        if any(config[name] != saved[name] for name in config):
            conflicts.append(f"{args.pretrained} (the checkpoint's model has another shape)")
    if args.from_scratch and metadata["pretrained"]:
        conflicts.append("--from_scratch (the checkpoint's model began from released weights)")
    if args.ctc_asked and not metadata["ctc_tokens"]:
        conflicts.append(f"--ctc_weight {args.ctc_weight:g} (the checkpoint's encoder has no output layer)")
    if conflicts:
        raise UsageError(
            f"{', '.join(conflicts)} conflicts with the checkpoint: leave it out to continue, or start a new run with "
            "another --output_dir, or from the weights that fit with --init_from in place of --resume"
        )


def read_pretrained(
    path: str, tokenizer_file: str | None, language: str | None, suppress: bool = True
) -> tuple[dict, dict]:
    """Weights and metadata of a Hugging Face folder or OpenAI's .pt: the metadata of this project's checkpoints. Without
    `suppress` the tokens that its generation config forbids are allowed."""
    if not Path(path).exists():
        raise UsageError(f"{path}: no such file or folder, and nothing is downloaded here; a model of the hub's first becomes one: hf download openai/whisper-base --local-dir whisper-base")  # fmt: skip
    weights, config, extras = files.read_model(path)
    tokenizer = text.read(tokenizer_file or extras["tokenizer"], language, vocab_size=config["vocab_size"])
    generation = dict(extras["generation"])
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        ids = generation.get(name) or [] if suppress else []
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < config["vocab_size"] for i in ids):
            raise UsageError(f"{path}: {name} in generation_config.json are no token ids of this model")
        generation[name] = ids
    metadata = {
        "config": config, "tokenizer": tokenizer.state(), "generation": generation, "ctc_tokens": 0,
        "pad_to_30s": True, "longest": window_seconds(config), "pretrained": True,
    }  # fmt: skip
    return weights, metadata


def metadata_from_scratch(args, config: dict, tokenizer) -> dict:
    """Of a model with random weights. The text's tokens are numbered before the special ones: these CTC knows.
    Raises `UsageError` where nobody asked for one."""
    if not args.may_start_from_scratch:  # with --resume auto it is known only now
        raise UsageError("there is no checkpoint to resume from, and nothing says where the model starts: --model_dir DIR, --model_file base.pt, or --from_scratch")  # fmt: skip
    ctc_tokens = tokenizer.end if args.ctc_weight or args.alignment_weight else 0
    return {"config": config, "tokenizer": tokenizer.state(), "generation": {}, "ctc_tokens": ctc_tokens, "pretrained": False}  # fmt: skip


def check_limits(args, config: dict) -> float:
    """The longest window, seconds. Fills in --max_target_tokens. Raises `UsageError` where it or --max_duration is more
    than the model has room for."""
    positions, longest = config["max_target_positions"], window_seconds(config)
    args.max_target_tokens = args.max_target_tokens or positions
    if args.max_target_tokens > positions:
        raise UsageError(f"--max_target_tokens {args.max_target_tokens}: the decoder has {positions} positions")
    if args.max_duration > longest:
        raise UsageError(
            f"--max_duration {args.max_duration:g}: the model's window is {longest:g} s; longer recordings can be cut by "
            "the manifest's segment times (--use_chunking)"
        )
    return longest


def verify_gpu(args, sizes: dict[str, dict], vocabulary: int) -> int:
    """--verify_gpu for the model that these flags ask for; `vocabulary`: tokens of one from scratch. The exit status."""
    if args.pretrained:
        config = files.read_model(args.pretrained)[1]
    else:
        config = shape_from_scratch(args, sizes[args.model_size], vocabulary)
    shapes = files.expected_shapes(config)
    fixed = "encoder." if args.freeze_encoder else "encoder.embed_positions"
    numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(numbers.values())
    return preflight.verify(args, total, total - sum(n for name, n in numbers.items() if name.startswith(fixed)))


def compile_and_checkpoint(args, model: Whisper) -> None:
    """--torch_compile, then --gradient_checkpointing, of the encoder's and decoder's layers."""
    if args.torch_compile:
        compiling.compile_layers(model, CHECKPOINTED)
    if args.gradient_checkpointing:
        memory.checkpoint_layers(model, CHECKPOINTED)


def window_seconds(config: dict) -> float:
    """The longest window that a model of this configuration takes: 30 s, if it is a released one."""
    return config["max_source_positions"] * FRAME / SAMPLE_RATE


def make_model(metadata: dict, dropout: float = 0.0, label_smoothing: float = 0.0) -> Whisper:
    """A Whisper by a checkpoint's metadata, weights still random."""
    model = Whisper(metadata["config"], dropout, label_smoothing, metadata["ctc_tokens"])
    model.pad_to_longest = metadata["pad_to_30s"]
    return model


def start_model(args, metadata: dict, weights: dict | None, load: Callable[[int, int], dict], count: int) -> Whisper:
    """The model that training starts with: from `weights`, or from scratch, fitted to the first of the `count`
    utterances that `load(index, epoch)` gives; then what --init_from has that fits."""
    model = make_model(metadata, args.dropout, args.label_smoothing)
    if weights is not None:
        checkpoint.load_weights(model, weights)
    elif args.freeze_encoder and not args.init_from:  # with --resume auto it is known only now
        raise UsageError("--freeze_encoder: there is no checkpoint to resume, and a random encoder would stay random")
    else:
        initialise(model, _some_waveforms(args.seed, load, count))
    if args.init_from:
        checkpoint.initialise(model, checkpoint.read_weights(args.init_from, metadata["recipe"])[0], args.init_from)
    if args.freeze_encoder:
        model.freeze_encoder()
    if args.learning_rate is None:
        width = metadata["config"]["d_model"]
        nearest = min(FINE_TUNING_RATES, key=lambda known: abs(known - width))
        args.learning_rate = FINE_TUNING_RATES[nearest]
        if not metadata["pretrained"]:  # pre-training's own, and more below its smallest width
            args.learning_rate = 40 * args.learning_rate if width >= min(FINE_TUNING_RATES) else SMALL_RATE
        print(f"learning rate: {args.learning_rate:g} ({'fine-tuning at this width' if metadata['pretrained'] else 'from scratch'})")  # fmt: skip
    total, trained = optim.count_parameters(model)
    print(f"model: {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M of them trained; {metadata['config']['vocab_size']} tokens")  # fmt: skip
    return model


def _some_waveforms(seed: int, load: Callable[[int, int], dict], count: int) -> list[torch.Tensor]:
    """A few training utterances without padding."""
    found: list[torch.Tensor] = []
    for index in np.random.default_rng(seed).permutation(count):
        try:
            item = load(int(index), 0)
        except DataError:
            continue  # training itself says what to do about it
        found.append(item["audio"][: item["heard"]])
        if len(found) == START_UTTERANCES:
            break
    return found or [torch.zeros(SAMPLE_RATE)]


# --- utterances to batches -------------------------------------------------------------------------------------------


def drop_untrainable(corpus: Corpus, tokenizer, most: int, strict: bool) -> Corpus:
    """Without the utterances whose decoder input would be longer than `most` tokens."""

    def fault(index: int) -> tuple[str, str] | None:
        tokens = len(tokenizer.prompt) + len(tokenizer.encode(corpus.texts[index]))
        if tokens <= most:
            return None
        return f"text is longer than {most} tokens (--max_target_tokens)", f"{tokens} tokens with the prompt"

    return drop(corpus, "training set", fault, strict)


@functools.lru_cache(maxsize=2)
def _drawn_to_be_padded(seed: int, epoch: int, count: int, share: float) -> np.ndarray:
    return np.random.default_rng([seed, epoch, 11]).random(count) < share


def padded_items(args, epoch: int, count: int) -> np.ndarray:
    """(count,) whether an utterance is padded to the longest window in an epoch."""
    if args.pad_to_30s or epoch < args.pad_from:
        return np.full(count, args.pad_to_30s)
    return _drawn_to_be_padded(args.seed, epoch, count, args.pad_share)


def pad_from_the_middle(args, metadata: dict, utterances: int, ranks: int) -> None:
    """Sets the epoch from which on --pad_share applies, the middle one; a resumed run keeps the one it
    began with. Before the model can read anything, 30 s of mostly silence teach it little and cost as much as ten short
    utterances."""
    per_epoch = math.ceil(utterances / (args.batch_size * args.gradient_accumulation_steps * ranks))
    epochs = min(args.num_epochs or math.inf, (args.max_steps or math.inf) / per_epoch)
    args.pad_from = metadata.setdefault("pad_from", int(epochs / 2))


def trained_seconds(args, seconds: np.ndarray, longest: float, epoch: int) -> np.ndarray:
    """(N,) lengths as they are computed with in an epoch: after speed perturbation, and where padded, the window's."""
    if args.speed_perturbation:
        seconds = np.minimum(seconds / audio.speed_factors(args.seed, epoch, len(seconds), SPEEDS), longest)
    return np.where(padded_items(args, epoch, len(seconds)), longest, seconds)


def make_item(
    args,
    tokenizer,
    waveform: torch.Tensor,
    transcript: str,
    name: str,
    place: tuple[int, int, int],
    training: bool,
    longest: float,
) -> dict:
    """One utterance: waveform, decoder input, labels, CTC's targets. `place`: (epoch, index, utterances in the epoch);
    in training the augmentation depends on it and the seed alone."""
    limit, (epoch, index, count) = round(longest * SAMPLE_RATE), place
    if training and args.speed_perturbation:
        changed = audio.change_speed(waveform, float(audio.speed_factors(args.seed, epoch, count, SPEEDS)[index]))
        waveform = changed if len(changed) <= limit else waveform
    waveform = waveform[:limit]
    tokens, room = tokenizer.encode(transcript), args.max_target_tokens - len(tokenizer.prompt)
    if len(tokens) > room and training:
        raise DataError(f"{name}: its text has {len(tokens)} tokens, and --max_target_tokens leaves room for {room}")
    tokens = tokens[:room]  # of an evaluation set's only the loss is cut short: the whole text is compared
    item = {
        "audio": waveform, "tokens": torch.tensor([*tokenizer.prompt, *tokens]),
        "labels": torch.tensor([*tokenizer.prompt[1:], *tokens, tokenizer.end]),
        "ctc_tokens": torch.tensor(tokens, dtype=torch.long), "heard": len(waveform), "text": transcript, "name": name, "index": index,
    }  # fmt: skip
    if training:
        if padded_items(args, epoch, count)[index]:
            item["audio"] = F.pad(waveform, (0, limit - len(waveform)))  # silence that is heard: it is not masked
        if args.spec_augment:
            random = np.random.default_rng([args.seed, epoch, index])
            item["frequency_masks"] = features.random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["time_masks"] = features.random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
    return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens and labels (B, U), ctc_tokens (B, S), each with its lengths."""
    padding = dict.fromkeys(("audio", "tokens", "labels", "ctc_tokens"), 0)
    if "alignment" in items[0]:
        padding["alignment"] = -100
    batch = batches.gather(items, padding, SAMPLE_RATE)
    batch["heard_lengths"] = torch.tensor([item["heard"] for item in items])
    batch["indices"] = [item["index"] for item in items]
    batch["counts"] = {"attention": int(batch["labels_lengths"].sum()), "ctc": int(batch["ctc_tokens_lengths"].sum())}
    if "alignment" in batch:
        batch["counts"]["alignment"] = int(batch["alignment_lengths"].sum())
    return batch


# --- decoding --------------------------------------------------------------------------------------------------------


class Recogniser:
    """A model with what decoding it takes: its tokenizer and the tokens that its generation config forbids."""

    def __init__(self, model: Whisper, metadata: dict, args):
        self.model, self.metadata = model, metadata
        self.tokenizer = text.make(metadata["tokenizer"])
        generation = metadata["generation"]
        suppress = {
            *(generation.get("suppress_tokens") or ()),
            *range(self.tokenizer.size, metadata["config"]["vocab_size"]),
        }
        if (first := self.tokenizer.timestamp_begin) is not None:  # not trained here, and the prompt asks for none
            suppress |= {*range(first, first + len(text.TIMESTAMPS))}
        self.options = {
            "suppress": sorted(suppress), "suppress_first": generation.get("begin_suppress_tokens") or (),
        }  # fmt: skip
        self.method, self.beam_size, self.seed = args.decoding, args.beam_size, args.seed

    def texts(self, encoded: torch.Tensor, mask: torch.Tensor | None) -> list[str]:
        """Texts of (B, T, D) by --decoding, with the fallback to higher temperatures."""
        found = decoding.decode(self.model, self.tokenizer, encoded, mask, self.method, self.beam_size, seed=self.seed, **self.options)  # fmt: skip
        return [one.text for one in found]

    def greedy_texts(self, encoded: torch.Tensor, mask: torch.Tensor | None) -> list[str]:
        """Texts of (B, T, D) by one greedy pass: what an evaluation during training can afford."""
        found = decoding.greedy(self.model, encoded, mask, self.tokenizer.prompt, self.tokenizer.end, **self.options)
        return [decoding.cut_loops(self.tokenizer.decode(one.tokens).strip()) for one in found]

    def transcribe_batch(self, batch: dict, setup) -> list[str]:
        (batch,) = batches.to_device([batch], setup.device)
        with setup.autocast():
            return self.texts(*self.model.encode(batch))


def loss_weights(args, metadata: dict) -> dict[str, float]:
    """The terms that are trained: CTC, or the alignment's, has its share, the decoder the rest."""
    for name, share in (("ctc", args.ctc_weight), ("alignment", args.alignment_weight)):
        if metadata["ctc_tokens"] and share:
            return {"attention": 1.0 - share, name: share}
    return {"attention": 1.0}


def losses(model: Whisper, batch: dict, encoded: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Sums over the batch of the decoder's loss and, where the encoder has its own output layer, of what trains that:
    the alignment where the batch has one, else CTC."""
    terms = {"attention": token_loss(model, batch, encoded, mask)}
    if model.ctc_head is not None and "alignment" in batch:
        terms["alignment"] = alignment_loss(model, batch, encoded)
    elif model.ctc_head is not None:
        terms["ctc"] = ctc_loss(model, batch, encoded)
    return terms


def decode_set(
    model: Whisper, eval_batches: Iterable[dict], names: list[str],
    texts_of: Callable[[torch.Tensor, torch.Tensor | None], list[str]],
) -> tuple[list[dict], dict[str, tuple[float, float]]]:  # fmt: skip
    """`results.decode_set` by `texts_of(encoded, mask)`."""

    def one(batch: dict) -> tuple[list[str], dict]:
        encoded, mask = model.encode(batch)
        terms = losses(model, batch, encoded, mask) if names else {}
        return texts_of(encoded, mask), {name: float(terms[name]) for name in names}

    return results.decode_set(one, eval_batches, names, next(model.parameters()).device)


# --- use -------------------------------------------------------------------------------------------------------------


def recogniser_to_use(args, recipe: str, setup) -> Recogniser:
    """The model for --transcribe, --evaluate and --export: --model_dir's or --model_file's, else that of --resume."""
    if args.pretrained and not args.resume:
        weights, metadata = read_pretrained(args.pretrained, args.tokenizer_file, args.language, args.suppress)
    else:
        weights, metadata = checkpoint.weights_to_use(args, recipe)
    model = make_model(metadata)
    checkpoint.load_weights(model, weights)
    return Recogniser(model.to(setup.device).eval(), metadata, args)


@torch.no_grad()
def transcribe(args, recipe: str) -> None:
    """--transcribe: long files by windows as long as the model was trained on, which overlap, or where these are short, by
    pieces between silences."""
    setup = device.setup(args, quiet=True)
    recogniser = recogniser_to_use(args, recipe, setup)

    def texts_of(waveforms: list[torch.Tensor], name: str) -> list[str]:
        padded, lengths = batches.pad(waveforms)
        batch = {"audio": padded, "audio_lengths": lengths, "names": [name] * len(waveforms)}
        one = functools.partial(recogniser.transcribe_batch, setup=setup)
        return [found for piece in memory.split_on_oom(one, batch, setup.device) for found in piece]

    # A little beyond what was trained on does no harm, and resampling may add a sample to the longest of these.
    longest = min(1.05 * recogniser.metadata["longest"], window_seconds(recogniser.metadata["config"]))
    overlapping = longest >= LEAST_OVERLAPPED
    results.transcribe_files(
        args, long.unless_silent(texts_of), SAMPLE_RATE, longest,
        long.overlapping_windows if overlapping else long.cut_at_silences,
        long.stitch if overlapping else long.put_together,
    )  # fmt: skip


def export(args, recogniser: Recogniser) -> None:
    """--export: the folder for transformers and OpenAI's form."""
    metadata = recogniser.metadata
    names = files.export(args.export, recogniser.model.state_dict(), metadata["config"], recogniser.tokenizer, metadata["generation"])  # fmt: skip
    print(f"exported to {args.export}: {', '.join(names)}")


def only_exports(args) -> bool:
    """Whether --export is asked for alone: of weights that are named, with nothing to train on or for. `--resume auto`
    asks for a run to go on."""
    goal = args.train_manifest or getattr(args, "data_dir", None) or args.length_given or args.from_scratch
    goal = goal or getattr(args, "conditions_given", None)
    named = args.resume != "auto" if args.resume else args.pretrained
    return bool(args.export and named and not goal)
