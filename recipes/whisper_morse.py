"""Morse decoding: Whisper trained on synthetic contest and everyday Morse, which is made while it
trains.

    python recipes/whisper_morse.py                           # no data needed: a small model, on easy conditions
    python recipes/whisper_morse.py --model_dir whisper-small --conditions contest_good contest_moderate wide --max_steps 20000
    python recipes/whisper_morse.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: clips that the worker processes make from (seed, number), see speech/morse/synthesis.py; or a
folder of recordings, --data_dir DIR, with metadata.csv (id, audio_file, text, contest_type, ...),
which --write_dataset DIR N writes; or manifests, as in the other recipes. At the end the errors by
condition, contest, speed and SNR are printed and kept in evaluation.json. Every SNR is stated in
2,500 Hz.

--model_dir takes a Hugging Face folder, --model_file OpenAI's .pt with its tokenizer beside it;
--from_scratch --model_size base trains a model whose tokens are Morse's symbols. --export DIR
writes a folder that transformers' WhisperForConditionalGeneration and pipeline load. --dry_run 8GB
predicts a run's memory.

Memory: --dry_run 8GB predicts what a run needs, without a GPU. Expect a character error rate of
about 2 % on the demo's held-out clips (15-28 WPM, 450-900 Hz, 0-20 dB) after its 1,100 updates (two
CPU cores: seven minutes).

Sources: Whisper (Radford et al. 2022); ITU-R M.1677 (codes and timing); the contests' own rules
(exchanges); SpecAugment (Park et al. 2019) with the masks of WeNet's Whisper recipe.
"""

import functools
import math
import os
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
from common.errors import DataError, UsageError, exit_with_one_line
from common.loop import Task, begin, finish, train
from common.report import check_folder
from speech import metrics, recogniser, splits
from speech.audio import SAMPLE_RATE, change_speed, speed_factors
from speech.features import random_masks
from speech.morse import scores
from speech.morse.alphabet import SYMBOLS, normalise
from speech.morse.recordings import (
    DATASET_MIX,
    MOST_CLIPS,
    Recordings,
    from_corpus,
    read_splits,
    write_dataset,
)
from speech.morse.scores import for_scoring
from speech.morse.synthesis import CHOICE, CONDITIONS, LIMITS, LONGEST, Synthetic, choose_conditions
from speech.recogniser import SPEEDS, decode_set
from speech.whisper import decoding, formats
from speech.whisper import start as starts
from speech.whisper.model import FRAME, LAYERS, Whisper, alignment_loss, ctc_loss, token_loss
from speech.whisper.tokenizer import WhisperTokenizer, make_tokenizer, train_symbols

RECIPE = "whisper_morse"
FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH = 2, 10 / 80  # share of the bands
TIME_MASKS, TIME_MASK_WIDTH = 2, 0.05  # share of the utterance
DEMO_STEPS = 1100
EPOCH_CLIPS, EVAL_CLIPS, MOST_EVAL_CLIPS = 4000, 200, 1_000_000
SIZES = {"demo": formats.shape(128, (4, 2), 4), **formats.SIZES}
DRAWN = (
    "conditions",
    "wpm",
    "tone",
    "snr_db",
    "clip_seconds",
)  # flags: kept with the weights, for --evaluate
SYNTHETIC_ONLY = (*DRAWN, "clips_per_epoch", "eval_clips")
# Flags that go with --write_dataset: what the clips depend on, and what every command takes.
WRITING = {
    "write_dataset",
    *DRAWN,
    "seed",
    "dataloader_num_workers",
    "output_dir",
    "log_dir",
    "checkpoint_dir",
    "device",
    "mixed_precision",
    "tensorboard",
}
RECORDED = ("data_dir", "train_manifest", "test_manifest")  # flags that name recordings
RELEASED = ("model_dir", "model_file")
EXCLUDES = (
    ("train_manifest", "data_dir", "both name recordings; give one of them"),
    ("test_manifest", "data_dir", "both name recordings to test on; give one of them"),
    (
        "audio_root",
        "data_dir",
        "the paths in metadata.csv start at --data_dir; leave the first out",
    ),
    (
        "alignment_weight",
        "ctc_weight",
        "both train the same output layer of the encoder; give one of them",
    ),
    *(
        ("alignment_weight", model, "a released encoder is aligned already; leave the first out")
        for model in RELEASED
    ),
    *(
        (flag, source, "the first is for synthetic clips only")
        for flag in SYNTHETIC_ONLY
        for source in RECORDED
    ),
    *(
        (
            "alignment_weight",
            source,
            "recordings do not say when a symbol is sent; give --ctc_weight instead",
        )
        for source in RECORDED
    ),
    *(
        (flag, "transcribe", "the first is for training and --evaluate")
        for flag in (*SYNTHETIC_ONLY, "data_dir")
    ),
    *(("alignment_weight", use, options.TRAINS) for use in starts.USES),
    ("clips_per_epoch", "evaluate", options.TRAINS),
)
METADATA = {**starts.METADATA, "synthesis": (type(None), CHOICE)}
NEEDS = tuple((flag, RECORDED, "") for flag in ("max_samples", "cache_audio", "audio_root"))


def add_arguments(parser) -> None:
    starts.add_arguments(parser, SIZES, language="en")
    splits.add_arguments(parser)
    recogniser.add_arguments(parser, ("greedy", "beam"), "greedy", starts.BEAM_SIZE)
    own = parser.add_argument_group("Morse")
    own.add_argument(
        "--conditions",
        nargs="+",
        choices=list(CONDITIONS),
        metavar="NAME",
        help=(
            f"conditions that clips are drawn from, each equally likely: {', '.join(CONDITIONS)}"
            " (demo; all but demo with a released model or --from_scratch)"
        ),
    )
    for name, what in (
        ("wpm", "speed, words a minute"),
        ("tone", "tone, Hz"),
        ("snr_db", "SNR in 2,500 Hz, dB"),
    ):
        own.add_argument(
            f"--{name}",
            type=options.number(float, *LIMITS[name]),
            nargs=2,
            metavar=("LOW", "HIGH"),
            help=f"{what} (the conditions' own)",
        )
    own.add_argument(
        "--clip_seconds",
        type=options.number(float, 1.0, LONGEST),
        metavar="S",
        help="longest clip; a slow symbol is sent whole (29; 3 in the demo)",
    )
    own.add_argument(
        "--clips_per_epoch",
        type=options.number(int, 1, MOST_CLIPS),
        metavar="N",
        help=f"synthetic clips in an epoch; every epoch has new ones ({EPOCH_CLIPS})",
    )
    own.add_argument(
        "--eval_clips",
        type=options.number(int, 1, MOST_EVAL_CLIPS),
        metavar="N",
        help=f"synthetic clips in the evaluation set, and in the test set ({EVAL_CLIPS})",
    )
    own.add_argument(
        "--alignment_weight",
        type=options.SHARE,
        metavar="X",
        help=(
            "share of an auxiliary loss on the encoder (which symbol is sent in every frame), for"
            " synthetic clips from scratch (0.3 there)"
        ),
    )
    own.add_argument(
        "--data_dir",
        type=options.path,
        metavar="DIR",
        help="train and evaluate on a folder of recordings with metadata.csv or splits/",
    )
    own.add_argument(
        "--write_dataset",
        nargs=2,
        metavar=("DIR", "N"),
        help="write such a folder with N synthetic clips of --conditions, and exit",
    )
    options.add_arguments(
        parser, learning_rate=(None, "by the model's width, and whether it is fine-tuned")
    )


def resolve(args) -> starts.Start:
    recorded = any(getattr(args, name) for name in RECORDED)
    released = args.model_dir or args.model_file
    is_demo = not (recorded or released or args.from_scratch or args.conditions)
    excludes = (*recogniser.EXCLUDES, *starts.EXCLUDES, *EXCLUDES)
    needs = (*splits.NEEDS, *recogniser.NEEDS, *starts.NEEDS, *NEEDS)
    usual, eval_every = (("num_epochs", 3), 0) if recorded else (("max_steps", 20_000), 1000)
    options.resolve(args, is_demo, DEMO_STEPS, excludes, needs, usual, eval_every)
    recogniser.resolve(
        args, augment=False, beam_size=starts.BEAM_SIZE
    )  # a masked span would take symbols away
    if args.alignment_weight is None:
        args.alignment_weight = (
            0.0 if recorded or released or args.ctc_weight else starts.AUXILIARY_WEIGHT
        )
    if args.alignment_weight and args.speed_perturbation:
        raise UsageError(
            "--speed_perturbation would move what --alignment_weight trains on; synthetic clips"
            " have their own speeds: --wpm LOW HIGH"
        )
    if args.alignment_weight:
        args.ctc_weight = 0.0
    if args.clips_per_epoch is None:
        args.clips_per_epoch = EPOCH_CLIPS
    if args.eval_clips is None:
        args.eval_clips = EVAL_CLIPS
    if args.conditions is None:
        args.conditions = ["demo"] if is_demo else [name for name in CONDITIONS if name != "demo"]
    if args.clip_seconds is None and is_demo:
        args.clip_seconds = 3.0
    choose_conditions(
        *(getattr(args, name) for name in DRAWN)
    )  # what is wrong with them is reported now
    # Released models forbid / = + - : when they decode. In Morse these are sent.
    return starts.resolve(
        args, SIZES, is_demo or args.check_data, bool(args.alignment_weight) or None, suppress=False
    )


# --- data -----------------------------------------------------------------------------------------


def read_sets(
    args, saved: dict | None, drawn: dict | None = None
) -> dict[str, Synthetic | Recordings]:
    """The clips "train", "val" and "test" to train and evaluate on; at least "val" or "test" for
    --evaluate. What was held out when the model with the metadata `saved` began is held out again.
    `drawn`: values for the flags in DRAWN instead of the command line's."""
    checks = splits.resolve(args, (saved or {}).get("held_out", ())).checks
    if args.data_dir:
        sets = read_splits(args.data_dir, checks)
        missing = [
            name
            for name in ("train", "val")
            if name not in sets and not (args.evaluate and name == "train")
        ]
        if missing:
            raise DataError(
                f"--data_dir {args.data_dir}: no usable clips in {' and '.join(missing)}"
            )
        return sets
    if args.train_manifest or args.test_manifest:
        corpora = splits.read_manifests(splits.resolve(args).manifests, normalise, checks)
        return {
            name: from_corpus(corpora[name], f"{name} set", args.strict_data) for name in corpora
        }
    drawn = drawn or {name: getattr(args, name) for name in DRAWN}
    longest = min(drawn["clip_seconds"] or LONGEST, args.max_duration)
    mix = choose_conditions(*({**drawn, "clip_seconds": longest}[name] for name in DRAWN))
    counts = {"train": args.clips_per_epoch, "val": args.eval_clips, "test": args.eval_clips}
    return {
        name: Synthetic(mix, counts[name], 3 * args.seed + stream)
        for stream, name in enumerate(counts)
    }


def about_run(args, sets: dict[str, Synthetic | Recordings], metadata: dict, ranks: int) -> dict:
    """What is kept with the weights beside the model: how a resumed run pads, what is held out, how
    clips are drawn and long files are cut."""
    clips = sets["train"]
    global_batches = math.ceil(
        len(clips) / (args.batch_size * args.gradient_accumulation_steps * ranks)
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
        "synthesis": (
            {name: getattr(args, name) for name in DRAWN} if isinstance(clips, Synthetic) else None
        ),
        "longest": max(float(clips.seconds(0).max()), metadata.get("longest", 0.0)),
    }


class Utterances:
    """A set of clips as the model takes them. Only the training set is augmented and padded, and
    both depend on (seed, epoch, index) alone."""

    def __init__(self, args, clips, tokenizer: WhisperTokenizer, metadata: dict, training: bool):
        self.args = args
        self.clips = clips
        self.tokenizer = tokenizer
        self.training = training
        self.longest = starts.window_seconds(metadata["config"])
        self.room = (args.max_target_tokens or metadata["config"]["max_target_positions"]) - len(
            tokenizer.prompt
        )
        self.pad_from = metadata.get("pad_from", 0)
        # Only the synthesis knows what is being sent in every frame.
        self.aligned = bool(
            args.alignment_weight and metadata["ctc_tokens"] and isinstance(clips, Synthetic)
        )

    def __len__(self) -> int:
        return len(self.clips)

    def fingerprint(self) -> str:
        return self.clips.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch: after speed perturbation, and the global batch's if an utterance is
        padded."""
        seconds = self.clips.seconds(epoch)
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
        """One clip: waveform (T,), decoder input and labels (U,), CTC's targets (S,), masks of
        SpecAugment; if the synthesis knows it, what each encoder frame says (F,)."""
        args, limit = self.args, round(self.longest * SAMPLE_RATE)
        waveform, transcript, name, spans = self.clips.load(index, epoch)
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
        if self.aligned:
            item["alignment"] = self.alignment(tokens, spans, len(waveform))
        if self.training and self.padded(epoch)[index]:
            item["audio"] = F.pad(
                waveform, (0, limit - len(waveform))
            )  # this silence is heard: it is not masked
        if self.training and args.spec_augment:
            random = np.random.default_rng([args.seed, epoch, index])
            item["frequency_masks"] = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        return item

    def alignment(self, tokens: list[int], spans: np.ndarray, samples: int) -> torch.Tensor:
        """(F,) the token that is sent in each encoder frame, or the blank between tokens. `spans`:
        (N, 2) seconds of the symbols, spaces apart."""
        sent = [token for token in tokens if token != self.tokenizer.encode(" ")[0]]
        frames = torch.full(
            (-(-samples // FRAME),), self.tokenizer.eos
        )  # CTC's blank follows the text's tokens
        # (--max_target_tokens may have cut the end of an evaluation set's text.)
        for token, (start, end) in zip(
            sent, np.rint(spans * SAMPLE_RATE / FRAME).astype(int), strict=self.training
        ):
            frames[start : max(end, start + 1)] = token
        return frames


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
    if "alignment" in items[0]:
        batch["alignment"], batch["alignment_lengths"] = pad(
            [item["alignment"] for item in items], -100
        )
        batch["counts"]["alignment"] = int(batch["alignment_lengths"].sum())
    return batch


# --- loss and evaluation --------------------------------------------------------------------------


def losses(
    model: Whisper, batch: dict, encoded: torch.Tensor, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Sums over the batch of the decoder's cross-entropy and, for a model from scratch, of the
    alignment or CTC on the encoder."""
    terms = {"attention": token_loss(model, batch, encoded, mask)}
    if (
        model.ctc_head is not None and "alignment" in batch
    ):  # from scratch only: it helps the encoder to align
        terms["alignment"] = alignment_loss(model, batch, encoded)
    elif model.ctc_head is not None:
        terms["ctc"] = ctc_loss(model, batch, encoded)
    return terms


def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    return losses(model, batch, *model.encode(batch))


def loss_weights(args, metadata: dict) -> dict[str, float]:
    for name, share in (("ctc", args.ctc_weight), ("alignment", args.alignment_weight)):
        if metadata["ctc_tokens"] and share:
            return {"attention": 1.0 - share, name: share}
    return {"attention": 1.0}


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
    args, start: starts.Start, clips, model: Whisper, metadata: dict, eval_batches, title: str
) -> None:
    """Prints error rates and examples of a set, decoded by --decoding; then tables by condition,
    contest, speed and SNR, which are kept in evaluation.json."""
    texts_of = functools.partial(final_texts, model, *starts.make_search(start, metadata))
    rows, _ = decode_set(
        lambda batch: (texts_of(batch), {}), eval_batches, next(model.parameters()).device
    )
    rows = [clips.row(row["index"], row["hypothesis"]) for row in rows]
    title = f"{title}, {len(rows)} clips, decoding: {args.decoding}"
    recogniser.print_results(rows, title, args.log_dir, args.seed, for_scoring)
    tables = scores.evaluation_tables(rows)
    scores.print_tables(tables)
    scores.write_evaluation(tables, args.log_dir / "evaluation.json")


# --- main -----------------------------------------------------------------------------------------


def trained(args, start: starts.Start, setup: device.Setup) -> tuple[Whisper, dict]:
    """The model of --model_dir or --model_file, of --resume, or of the best evaluation; and its
    metadata."""
    if start.pretrained and not args.resume:
        weights, metadata = starts.read_pretrained(start)
    else:
        weights, metadata = checkpoint.weights_to_use(args, RECIPE, METADATA)
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
    """The set that --evaluate is about, and its name: clips as the weights were trained on, unless
    flags name others."""
    starts.check_limits(start, metadata["config"])
    drawn = None if args.given & {*DRAWN, *RECORDED} else metadata.get("synthesis")
    if not drawn and not args.given & {*DRAWN, *RECORDED}:
        raise UsageError(
            "--evaluate needs a test set, because these weights were not trained on synthetic"
            " clips: add --data_dir, --test_manifest or --conditions"
        )
    sets = read_sets(args, metadata, drawn)
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
                args,
                start,
                data.clips,
                model,
                metadata,
                eval_batches,
                f"{name} set, the weights named",
            )
    if args.export:
        starts.export(args.export, model, metadata)


def write_clips(args) -> None:
    """--write_dataset DIR N."""
    if others := sorted(args.given - WRITING):
        raise UsageError(
            f"--write_dataset and --{others[0]}: the first trains nothing; leave the second out"
        )
    try:
        folder, count = (
            options.path(args.write_dataset[0]),
            options.number(int, 1, MOST_CLIPS)(args.write_dataset[1]),
        )
    except options.argparse.ArgumentTypeError as error:
        raise UsageError(f"--write_dataset {' '.join(args.write_dataset)}: {error}") from None
    mix = choose_conditions(
        args.conditions or DATASET_MIX, args.wpm, args.tone, args.snr_db, args.clip_seconds
    )
    workers, cores = args.dataloader_num_workers, os.cpu_count() or 1
    write_dataset(
        folder, count, args.seed, mix, cores if workers == "auto" else min(workers, cores)
    )


def main(args) -> None:
    if args.write_dataset:
        return write_clips(args)
    start = resolve(args)
    if args.check_data:
        return splits.report_checked(read_sets(args, None))
    if args.transcribe:
        return transcribe(args, start)
    own_data = {"conditions", "data_dir"} & args.given
    if args.evaluate or (
        not own_data
        and recogniser.exports_only(args.export, args.resume, start.pretrained, args.given)
    ):
        return evaluate_only(args, start)
    run = begin(args, RECIPE, METADATA)

    sets = read_sets(args, run.resumed and run.resumed["metadata"])
    metadata, weights = starts.choose(
        start, run.resumed, lambda: train_symbols(SYMBOLS, args.language)
    )
    tokenizer, search = starts.make_search(start, metadata)
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
            args,
            start,
            sets[name],
            model,
            metadata,
            evaluation[name].whole(),
            f"{name} set, {weights}",
        ),
    )
    if args.export and run.setup.ranks.first:
        starts.export(args.export, model, metadata)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
