"""Vietnamese speech recognition: Whisper fine-tuned on 8 GB, or trained from scratch.

    python recipes/whisper_vietnamese.py                      # no data needed: makes a demo corpus of synthetic speech
    python recipes/whisper_vietnamese.py --model_dir whisper-base --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/whisper_vietnamese.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "hôm nay trời đẹp"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 30 s, longer ones with --use_chunking
if the manifest has segment times. The text is trained on as it is written, in NFC: case, tones,
punctuation and numbers stay. Any other language: --language.

--model_dir takes a Hugging Face folder, --model_file OpenAI's .pt with its tokenizer beside it;
--from_scratch --model_size base trains a model with a vocabulary made from the text. --export DIR
writes a folder that transformers' WhisperForConditionalGeneration and pipeline load. --dry_run 8GB
predicts a run's memory.

Memory: --dry_run 8GB predicts what a run needs; base trains in 8 GB with 24 clips of 30 s at once
(predicted). Expect a character error rate of 6 to 9 % on the demo's held-out sentences after its
1,800 updates (two CPU cores: seven minutes).

Sources: Whisper (Radford et al. 2022); variable length as in icefall's Whisper recipes; SpecAugment
(Park et al. 2019) with the masks of WeNet's Whisper recipe.
"""

import dataclasses
import functools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: F401  first, because a signal while torch is imported would be a traceback

# isort: split
import numpy as np
import torch
import torch.nn.functional as F

from common import checkpoint, device, options
from common.batches import EvalBatches, GlobalBatches, pad
from common.errors import DataError, exit_with_one_line
from common.loop import Task, begin, finish, train
from common.report import check_folder
from speech import demo, metrics, recogniser, splits, text
from speech.audio import SAMPLE_RATE, change_speed, read_utterance, speed_factors
from speech.columns import Corpus
from speech.features import random_masks
from speech.recogniser import SPEEDS, decode_set
from speech.whisper import decoding, formats
from speech.whisper import start as starts
from speech.whisper.model import LAYERS, Whisper, ctc_loss, token_loss
from speech.whisper.tokenizer import WhisperTokenizer, make_tokenizer, train_bpe

RECIPE = "whisper_vietnamese"
FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH = 2, 10 / 80  # share of the bands
TIME_MASKS, TIME_MASK_WIDTH = 2, 0.05  # share of the utterance
DEMO_SIZES = {"train": 6000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 1800
PROMPT = 4  # tokens before a text
SIZES = {"demo": formats.shape(144, (4, 2), 4), **formats.SIZES}
EXCLUDES = (
    *(
        ("vocab_size", model, "a released model has its own vocabulary; leave the first out")
        for model in ("model_dir", "model_file")
    ),
    ("compare_to", "transcribe", "files to transcribe have no reference; leave the first out"),
    *(
        ("vocab_size", use, "trained weights have their own vocabulary; leave the first out")
        for use in starts.USES
    ),
)


def add_arguments(parser) -> None:
    starts.add_arguments(parser, SIZES, language="vi")
    splits.add_arguments(parser)
    recogniser.add_arguments(parser, ("greedy", "beam"), "greedy", starts.BEAM_SIZE)
    own = parser.add_argument_group("Vietnamese")
    own.add_argument(
        "--vocab_size",
        type=options.number(int, 1, formats.CONFIG["vocab_size"][-1]),
        metavar="N",
        help=(
            "tokens of a model from scratch: 256 bytes, 9 special tokens and pieces (500; 320 for"
            " the demo)"
        ),
    )
    own.add_argument(
        "--compare_to",
        type=options.path,
        metavar="PATH",
        help=(
            "a baseline for the results at the end: a Hugging Face folder, OpenAI's .pt, or weights"
            " of this recipe"
        ),
    )
    options.add_arguments(
        parser, learning_rate=(None, "by the model's width, and whether it is fine-tuned")
    )


def resolve(args) -> starts.Start:
    is_demo = not args.train_manifest
    excludes = (*recogniser.EXCLUDES, *starts.EXCLUDES, *EXCLUDES)
    options.resolve(
        args, is_demo, DEMO_STEPS, excludes, (*splits.NEEDS, *recogniser.NEEDS, *starts.NEEDS)
    )
    augment = not is_demo or options.plans(args)  # the demo's voices hardly vary
    recogniser.resolve(args, augment, starts.BEAM_SIZE)
    if args.vocab_size is None:
        # Few, short pieces: with whole syllables as tokens the demo's CER was 62 % instead of 26 %.
        args.vocab_size = 320 if is_demo else 500
    start = starts.resolve(args, SIZES, is_demo or args.check_data)
    if args.compare_to:
        with torch.device(
            "meta"
        ):  # what is wrong with it is reported now, not after hours of training
            read_baseline(args, start)
    return start


def for_scoring(transcript: str) -> str:
    """As PhoWhisper's error rates are computed: NFC, lower case, without punctuation; tones and
    numbers stay."""
    return text.for_scoring(transcript).lower()


# --- data -----------------------------------------------------------------------------------------


def read_sets(args, saved: dict | None) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What was held out when the model with the metadata `saved` began is held out again."""
    checks = splits.resolve(args, (saved or {}).get("held_out", ())).checks
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.test_manifest and (args.evaluate or not args.train_manifest):
        paths = {"test": args.test_manifest}
    elif not args.train_manifest and options.plans(args):
        positions = args.max_target_tokens or SIZES["demo"]["max_target_positions"]
        return splits.stand_in(
            args.max_duration, positions - PROMPT
        )  # a token has at least a character
    elif not args.train_manifest:
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        folder = Path(args.output_dir) / "data" / "vietnamese_demo"
        paths = demo.speech_corpus(
            folder, demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES, DEMO_SIZES
        )
    paths = {split: path for split, path in paths.items() if path}
    return splits.read_manifests(paths, text.normalise, checks)


def drop_untrainable(corpus: Corpus, tokenizer, max_tokens: int, strict: bool) -> Corpus:
    """Without the utterances whose decoder input would be longer than `max_tokens`."""

    def fault(index: int) -> tuple[str, str] | None:
        tokens = len(tokenizer.prompt) + len(tokenizer.encode(corpus.texts[index]))
        if tokens <= max_tokens:
            return None
        return (
            f"text is longer than {max_tokens} tokens (--max_target_tokens)",
            f"{tokens} tokens with the prompt",
        )

    return splits.drop(corpus, "training set", fault, strict)


def about_run(args, sets: dict[str, Corpus], metadata: dict, ranks: int) -> dict:
    """What is kept with the weights beside the model: how a resumed run pads, what is held out, how
    long files are cut."""
    global_batches = math.ceil(
        len(sets["train"]) / (args.batch_size * args.gradient_accumulation_steps * ranks)
    )
    return {
        "recipe": RECIPE,
        "pad_to_30s": args.pad_to_30s,
        "pad_from": metadata.get(
            "pad_from", starts.middle_epoch(global_batches, args.num_epochs, args.max_steps)
        ),
        "held_out": (
            splits.held_out_keys(sets["val"])
            if args.train_manifest and not args.val_manifest
            else []
        ),
        "longest": max(float(sets["train"].seconds.max()), metadata.get("longest", 0.0)),
    }


class Utterances:
    """A set of utterances as the model takes them. Only the training set is augmented and padded,
    and both depend on (seed, epoch, index) alone."""

    def __init__(
        self, args, corpus: Corpus, tokenizer: WhisperTokenizer, metadata: dict, training: bool
    ):
        self.args = args
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.training = training
        self.longest = starts.window_seconds(metadata["config"])
        self.room = (args.max_target_tokens or metadata["config"]["max_target_positions"]) - len(
            tokenizer.prompt
        )
        self.pad_from = metadata.get("pad_from", 0)

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch: after speed perturbation, and the global batch's if an utterance is
        padded."""
        seconds = self.corpus.seconds
        if not self.training:
            return seconds
        if self.args.speed_perturbation:
            seconds = np.minimum(seconds / self.speeds(epoch), self.longest)
        return np.where(self.padded(epoch), self.longest, seconds)

    def speeds(self, epoch: int) -> np.ndarray:
        return speed_factors(self.args.seed, epoch, len(self), SPEEDS)

    def padded(self, epoch: int) -> np.ndarray:
        if self.args.pad_to_30s or epoch < self.pad_from:
            return np.full(len(self), self.args.pad_to_30s)
        return starts.draw_padded(self.args.seed, epoch, len(self), self.args.pad_share)

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), decoder input and labels (U,), CTC's targets (S,), masks of
        SpecAugment."""
        args, limit = self.args, round(self.longest * SAMPLE_RATE)
        transcript, name = self.corpus.texts[index], self.corpus.where(index)
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        if self.training and args.speed_perturbation:
            changed = change_speed(waveform, float(self.speeds(epoch)[index]))
            waveform = changed if len(changed) <= limit else waveform
        waveform, tokens = waveform[:limit], self.tokenizer.encode(transcript)
        if self.training and len(tokens) > self.room:
            raise DataError(
                f"{name}: its text has {len(tokens)} tokens, and --max_target_tokens leaves room"
                f" for {self.room}"
            )
        tokens = tokens[
            : self.room
        ]  # only the loss of an evaluation set is cut short: the whole text is scored
        item = {
            "audio": waveform,
            "tokens": torch.tensor([*self.tokenizer.prompt, *tokens]),
            "labels": torch.tensor([*self.tokenizer.prompt[1:], *tokens, self.tokenizer.eos]),
            "ctc_tokens": torch.tensor(tokens, dtype=torch.long),
            "heard": len(waveform),
            "text": transcript,
            "name": name,
            "index": index,
        }
        if self.training and self.padded(epoch)[index]:
            item["audio"] = F.pad(
                waveform, (0, limit - len(waveform))
            )  # this silence is heard: it is not masked
        if self.training and args.spec_augment:
            random = np.random.default_rng([args.seed, epoch, index])
            item["frequency_masks"] = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens and labels (B, U), ctc_tokens (B, S), each with its
    lengths; counts are the numbers of targets of each loss term."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "heard_lengths": torch.tensor([item["heard"] for item in items]),
    }
    for key in ("audio", "tokens", "labels", "ctc_tokens"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    if "time_masks" in items[0]:
        batch["frequency_masks"] = torch.stack([item["frequency_masks"] for item in items])
        batch["time_masks"] = torch.stack([item["time_masks"] for item in items])
    batch["counts"] = {
        "attention": int(batch["labels_lengths"].sum()),
        "ctc": int(batch["ctc_tokens_lengths"].sum()),
    }
    return batch


# --- loss and evaluation --------------------------------------------------------------------------


def losses(
    model: Whisper, batch: dict, encoded: torch.Tensor, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Sums over the batch of the decoder's cross-entropy and, for a model from scratch, of CTC on
    the encoder."""
    terms = {"attention": token_loss(model, batch, encoded, mask)}
    if model.ctc_head is not None:  # from scratch only: it helps the encoder to align
        terms["ctc"] = ctc_loss(model, batch, encoded)
    return terms


def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    return losses(model, batch, *model.encode(batch))


def loss_weights(args, metadata: dict) -> dict[str, float]:
    share = args.ctc_weight if metadata["ctc_tokens"] else 0.0
    return {"attention": 1.0 - share, "ctc": share} if share else {"attention": 1.0}


def evaluate(
    tokenizer, search: decoding.Search, terms: dict[str, float], model: Whisper, eval_batches
) -> dict[str, tuple[float, float]]:
    """The losses named in `terms`, CER and WER of one greedy pass, as (numerator, denominator)."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, mask = model.encode(batch)
        return decoding.greedy_texts(model, tokenizer, encoded, mask, search), losses(
            model, batch, encoded, mask
        )

    rows, sums = decode_set(decode_batch, eval_batches, next(model.parameters()).device, terms)
    return {**sums, **metrics.score(rows, for_scoring)}


def final_texts(model: Whisper, tokenizer, search: decoding.Search, batch: dict) -> list[str]:
    """The texts of a batch by --decoding, with the fallback to higher temperatures."""
    return decoding.texts(model, tokenizer, *model.encode(batch), search)


def report_results(
    args, start: starts.Start, model: Whisper, metadata: dict, eval_batches, title: str
) -> None:
    """Prints error rates and examples of a set, decoded by --decoding; with --compare_to also a
    baseline's."""

    def decode_all(model: Whisper, metadata: dict) -> list[dict]:
        texts_of = functools.partial(final_texts, model, *starts.make_search(start, metadata))
        return decode_set(
            lambda batch: (texts_of(batch), {}), eval_batches, next(model.parameters()).device
        )[0]

    rows = decode_all(model, metadata)
    title = f"{title}, {len(rows)} utterances, decoding: {args.decoding}"
    recogniser.print_results(rows, title, args.log_dir, args.seed, for_scoring)
    if args.compare_to:
        weights, theirs = read_baseline(args, start)
        before = decode_all(
            starts.load_model(weights, theirs).to(next(model.parameters()).device), theirs
        )
        table = metrics.improvement_table(before, rows, for_scoring)
        print(f"compared to {args.compare_to} on the same {len(rows)} utterances:\n{table}")


def read_baseline(args, start: starts.Start) -> tuple[dict, dict]:
    """Weights and metadata of --compare_to. Raises `UsageError`."""
    path, flag = Path(args.compare_to), "--compare_to"
    if path.suffix == ".safetensors" or path.name.startswith("checkpoint_step_"):
        weights, metadata = checkpoint.read_weights(path, RECIPE, starts.METADATA, flag)
        starts.check_saved(metadata, weights)
        return weights, metadata
    tokenizer = start.tokenizer_file if start.pretrained else None
    theirs = dataclasses.replace(
        start, pretrained=args.compare_to, source=flag, tokenizer_file=tokenizer
    )
    return starts.read_pretrained(theirs)


# --- main -----------------------------------------------------------------------------------------


def trained(args, start: starts.Start, setup: device.Setup) -> tuple[Whisper, dict]:
    """The model of --model_dir or --model_file, of --resume, or of the best evaluation; and its
    metadata."""
    if start.pretrained and not args.resume:
        weights, metadata = starts.read_pretrained(start)
    else:
        weights, metadata = checkpoint.weights_to_use(args, RECIPE, starts.METADATA)
        starts.check_resumed(start, metadata)
    return starts.load_model(weights, metadata).to(setup.device), metadata


def transcribe(args, start: starts.Start) -> None:
    setup = device.setup(args, quiet=True)
    model, metadata = trained(args, start, setup)
    longest, cutting = recogniser.in_pieces(args.piece_seconds, *starts.long_recordings(metadata))
    texts_of = functools.partial(final_texts, model, *starts.make_search(start, metadata))
    recogniser.transcribe_files(
        args.transcribe, texts_of, setup, longest, args.output, args.eval_batch_size, cutting
    )


def test_set(args, start: starts.Start, metadata: dict) -> tuple[str, Utterances]:
    """The set that --evaluate is about, and its name."""
    starts.check_limits(start, metadata["config"])
    sets = read_sets(args, metadata)
    name = "test" if "test" in sets else "val"
    return name, Utterances(
        args, sets[name], make_tokenizer(metadata["tokenizer"]), metadata, training=False
    )


@torch.no_grad()
def evaluate_only(args, start: starts.Start) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    setup = device.setup(args)
    model, metadata = trained(args, start, setup)
    if args.evaluate:
        check_folder(args.log_dir)
        name, data = test_set(args, start, metadata)
        with setup.autocast():
            eval_batches = EvalBatches(args, data, collate, setup)
            report_results(
                args, start, model, metadata, eval_batches, f"{name} set, the weights named"
            )
    if args.export:
        starts.export(args.export, model, metadata)


def main(args) -> None:
    start = resolve(args)
    if args.check_data:
        return splits.report_checked(read_sets(args, None))
    if args.transcribe:
        return transcribe(args, start)
    if args.evaluate or recogniser.exports_only(
        args.export, args.resume, start.pretrained, args.given
    ):
        return evaluate_only(args, start)
    run = begin(args, RECIPE, starts.METADATA)

    sets = read_sets(args, run.resumed and run.resumed["metadata"])
    metadata, weights = starts.choose(
        start, run.resumed, lambda: train_bpe(sets["train"].texts, args.vocab_size, args.language)
    )
    tokenizer, search = starts.make_search(start, metadata)
    max_tokens = args.max_target_tokens or metadata["config"]["max_target_positions"]
    sets["train"] = drop_untrainable(sets["train"], tokenizer, max_tokens, args.strict_data)
    metadata |= about_run(args, sets, metadata, run.setup.ranks.size)
    data = {
        name: Utterances(args, sets[name], tokenizer, metadata, training=name == "train")
        for name in sets
    }
    model = starts.make_model(metadata, args.dropout, args.label_smoothing)
    starts.fill(start, model, weights, data["train"])
    starts.describe(start, model, metadata)

    global_batches = GlobalBatches(args, data["train"], collate, run.setup)
    evaluation = {
        name: EvalBatches(args, data[name], collate, run.setup) for name in data if name != "train"
    }
    terms = loss_weights(args, metadata)
    task = Task(
        RECIPE,
        compute_loss,
        terms,
        functools.partial(evaluate, tokenizer, search, terms),
        metadata,
        learning_rate=starts.learning_rate(metadata),
        checkpointed=LAYERS,
        compiled=LAYERS,
    )
    train(args, run, model, task, global_batches, evaluation["val"])
    name = "test" if "test" in evaluation else "val"
    finish(
        args,
        run,
        model,
        task,
        evaluation["val"],
        lambda weights: report_results(
            args, start, model, metadata, evaluation[name].whole(), f"{name} set, {weights}"
        ),
    )
    if args.export and run.setup.ranks.first:
        starts.export(args.export, model, metadata)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
