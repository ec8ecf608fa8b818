"""Morse decoding: Whisper trained on synthetic contest and everyday Morse, made without end while it trains.

    python recipes/whisper_morse.py                           # no data needed: a small model, on easy conditions
    python recipes/whisper_morse.py --model_dir whisper-small --conditions contest_good contest_moderate wide --max_steps 20000
    python recipes/whisper_morse.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: made in the worker processes from (seed, number), see `synthesise`; or a folder of recordings, --data_dir DIR, with
metadata.csv (id, audio_file, text, contest_type, ...), which --write_dataset DIR N writes; or manifests, as in the other
recipes. At the end the errors by
condition, contest, speed and SNR are printed and kept in evaluation.json. Every SNR is stated in 2,500 Hz.

--model_dir takes a Hugging Face folder, --model_file OpenAI's .pt with its tokenizer beside it; --from_scratch
--model_size base trains one whose tokens are Morse's symbols. --export DIR writes what transformers' WhisperForConditionalGeneration
and pipeline load.

Memory: benchmarks/RESULTS.md has what each size is predicted to need. Expect a character error rate of about 2 % on the
demo's held-out clips (15-28 WPM, 450-900 Hz, 0-20 dB) after its 1,100 updates (two CPU cores: seven minutes).

Sources: Whisper (Radford et al. 2022); ITU-R M.1677 (codes and timing); the contests' own rules (exchanges).
"""

import argparse
import dataclasses
import functools
import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import batches, checkpoint, device, optim, options, report
from common.errors import DataError, UsageError, exit_with_one_line
from common.loop import train
from speech import audio, metrics
from speech import recogniser as results
from speech.corpus import load_splits
from speech.morse.alphabet import SYMBOLS, normalise
from speech.morse.recordings import Recordings, from_corpus, read_dataset, write_dataset
from speech.morse.scores import evaluation_tables, for_scoring, print_tables, write_evaluation
from speech.morse.synthesis import CONDITIONS, Conditions, clip_seconds, one_of, synthesise
from speech.whisper import formats as files
from speech.whisper import task
from speech.whisper import tokenizer as text
from speech.whisper.model import FRAME, SAMPLE_RATE, Whisper

RECIPE = "whisper_morse"
DEMO_STEPS = 1100
HELD_OUT, MOST_HELD_OUT = 0.05, 200  # of a manifest, where no --val_manifest is given
EPOCH_CLIPS = 4000
DEMO_CLIPS = 200  # for evaluation, and as many for the figures at the end
SIZES = {"demo": files.shape(128, (4, 2), 4), **files.SIZES}
OF_SYNTHESIS = ("conditions", "wpm", "tone", "snr_db", "clip_seconds", "clips_per_epoch", "eval_clips")  # flags
DRAWN = ("conditions", "wpm", "tone", "snr_db", "clip_seconds")  # flags: kept with the weights, for --evaluate
OF_RECORDINGS = ("max_samples", "cache_audio", "audio_root")
DATASET_MIX = ("clean", "contest_good", "contest_moderate", "contest_poor", "dx_expedition", "wide")


def add_arguments(parser) -> None:
    options.add_shared_arguments(parser, learning_rate=(None, "by the model's width, and whether it is fine-tuned"))
    task.add_arguments(parser, SIZES, language="en")
    # fmt: off
    own = parser.add_argument_group("Morse")
    own.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), metavar="NAME", help=f"what clips are drawn from, each equally likely: {', '.join(CONDITIONS)} (demo; with a model of its own or --from_scratch all but demo)")
    for name, what in (("wpm", "speed, words a minute"), ("tone", "tone, Hz"), ("snr_db", "SNR in 2,500 Hz, dB")):
        own.add_argument(f"--{name}", type=options.number(float, -40), nargs=2, metavar=("LOW", "HIGH"), help=f"{what}, in place of the conditions' own")
    own.add_argument("--clip_seconds", type=options.number(float, 1.0, 29.0), metavar="S", help="longest clip (29; 3 in the demo)")
    own.add_argument("--clips_per_epoch", type=options.POSITIVE, metavar="N", help="synthetic clips in an epoch; every epoch has new ones (4000)")
    own.add_argument("--eval_clips", type=options.POSITIVE, metavar="N", help=f"synthetic clips in the evaluation set, and in the test set ({DEMO_CLIPS})")
    own.add_argument("--alignment_weight", type=options.SHARE, metavar="X", help="share of an auxiliary loss on the encoder, what is being sent in every frame, for synthetic clips from scratch (0.3 there)")
    own.add_argument("--test_manifest", type=options.path, metavar="FILE", help="with --train_manifest, for the figures at the end (the evaluation set)")
    own.add_argument("--data_dir", type=options.path, metavar="DIR", help="train from and evaluate on a folder of recordings with metadata.csv or splits/")
    own.add_argument("--write_dataset", nargs=2, metavar=("DIR", "N"), help="write such a folder with N synthetic clips of --conditions, and end")
    # fmt: on


# --- Morse text ------------------------------------------------------------------------------------------------------


# --- keying and channel ----------------------------------------------------------------------------------------------


# --- data set on disk ------------------------------------------------------------------------------------------------


# --- clips to batches --------------------------------------------------------------------------------------------------


def conditions_of(args) -> list[Conditions]:
    """The conditions that --conditions names, changed by the flags for single ranges. Raises `UsageError`."""
    changes = {}
    for name in ("wpm", "tone", "snr_db"):
        if limits := getattr(args, name):
            if limits[0] > limits[1]:
                raise UsageError(f"--{name} {limits[0]:g} {limits[1]:g}: the first is to be the lower one")
            changes[name] = tuple(limits)
    if args.wpm and args.wpm[0] < 5:
        raise UsageError(f"--wpm {args.wpm[0]:g}: below 5 words a minute a single character fills a clip")
    if args.tone and not 100 <= args.tone[0] <= args.tone[1] <= 4000:
        raise UsageError("--tone: tones of 100 to 4,000 Hz can be made")
    if args.clip_seconds:
        changes["longest"] = args.clip_seconds
    return [dataclasses.replace(CONDITIONS[name], **changes) for name in args.conditions]


class SyntheticClips:
    """Clips made when they are asked for: number `index` of epoch `epoch`, of one of the conditions. `stream` (0 to 2)
    keeps training, evaluation and test apart."""

    def __init__(self, args, stream: int, count: int):
        self.mix, self.count, self.seed = conditions_of(args), count, 3 * args.seed + stream

    def __len__(self) -> int:
        return self.count

    def drawn(self, index: int, epoch: int) -> tuple[int, int, Conditions]:
        number = epoch * self.count + index
        return self.seed, number, one_of(self.mix, self.seed, number)

    def fingerprint(self) -> str:
        """Tells whether a position in the data means the same as before."""
        return f"{self.seed} {self.count} {self.mix}"

    @functools.lru_cache(maxsize=2)  # noqa: B019  one or two of them live as long as the run
    def seconds(self, epoch: int) -> np.ndarray:
        return np.array([clip_seconds(*self.drawn(index, epoch)) for index in range(self.count)])

    def load(self, index: int, epoch: int) -> tuple[torch.Tensor, str, str, np.ndarray | None]:
        """Waveform, text, name, and the spans of its symbols in seconds."""
        sample = synthesise(*self.drawn(index, epoch))
        return torch.from_numpy(sample.audio), sample.text, f"synthetic clip {self.seed}/{epoch * self.count + index}", sample.spans  # fmt: skip

    def row(self, index: int, hypothesis: str) -> dict:
        """What `evaluation_tables` wants to know of a clip of epoch 0."""
        sample = synthesise(*self.drawn(index, 0))
        return {
            "file": f"synthetic clip {self.seed}/{index}", "reference": sample.text, "hypothesis": hypothesis,
            "condition": sample.condition, "contest_type": sample.contest_type, "sample_type": sample.sample_type,
            "wpm": sample.wpm, "snr_db": sample.snr_db, "is_noise_only": sample.is_noise_only,
            "callsigns": list(sample.callsigns), "exchange": sample.exchange,
        }  # fmt: skip


class RecordedClips:
    """The same of clips on disk."""

    def __init__(self, args, recordings: Recordings):
        self.recordings, self.row, self.cache = recordings, recordings.row, args.cache_audio

    def __len__(self) -> int:
        return len(self.recordings)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for row in zip(self.recordings.paths, self.recordings.texts, self.recordings.offsets.tolist(), strict=True):
            digest.update(repr(row).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def seconds(self, epoch: int) -> np.ndarray:
        return self.recordings.seconds

    def load(self, index: int, epoch: int) -> tuple[torch.Tensor, str, str, np.ndarray | None]:
        found = self.recordings
        waveform = audio.read_utterance(found, index, SAMPLE_RATE, self.cache)
        return waveform, found.texts[index], found.paths[index], None


def read_clips(args) -> dict[str, SyntheticClips | RecordedClips]:
    """The clips to train on, to evaluate on and to test on."""
    if args.train_manifest or args.test_manifest:
        paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
        if args.evaluate and args.test_manifest:
            paths = {"test": args.test_manifest}
        corpora = load_splits(args, paths, normalise, HELD_OUT, MOST_HELD_OUT)
        return {
            name: RecordedClips(args, from_corpus(corpora[name], f"{name} set", args.strict_data)) for name in corpora
        }
    if not args.data_dir:
        counts = (args.clips_per_epoch, args.eval_clips, args.eval_clips)
        return {name: SyntheticClips(args, stream, count) for stream, (name, count) in enumerate(zip(("train", "val", "test"), counts, strict=True))}  # fmt: skip
    found = read_dataset(args.data_dir, args.log_dir / "cache", args.strict_data)
    for split, recordings in found.items():
        kept = np.flatnonzero((recordings.seconds >= args.min_duration) & (recordings.seconds <= args.max_duration))
        if len(kept) < len(recordings):
            print(f"{split} set: {len(recordings) - len(kept)} clips are shorter than --min_duration or longer than --max_duration {args.max_duration:g} s and left out (a manifest with segment times could be cut: --train_manifest with --use_chunking)")  # fmt: skip
        found[split] = recordings.select(kept)
    if args.max_samples and "train" in found:
        found["train"] = found["train"].select(np.arange(min(args.max_samples, len(found["train"]))))
    named = {"train": "train", "validation": "val", "test": "test"}
    clips = {named[split]: RecordedClips(args, recordings) for split, recordings in found.items() if len(recordings)}
    if "val" not in clips and "test" in clips:
        clips["val"] = clips["test"]
    missing = [name for name in ("train", "val") if name not in clips and not (args.evaluate and name == "train")]
    if missing:
        raise DataError(f"--data_dir {args.data_dir}: no usable clips in {' and '.join(missing)}")
    return clips


def load_item(clips, tokenizer, args, longest: float, blank: int, training: bool, index: int, epoch: int) -> dict:
    """One clip, see `task.make_item`; with `blank` also what its encoder frames say, where the synthesis knows."""
    waveform, sent, name, spans = clips.load(index, epoch)
    item = task.make_item(args, tokenizer, waveform, sent, name, (epoch, index, len(clips)), training, longest)
    if spans is not None and blank:
        tokens = [token for token in item["ctc_tokens"].tolist() if token != tokenizer.encode(" ")[0]]
        item["alignment"] = torch.full((-(-len(waveform) // FRAME),), blank)
        # (Of an evaluation set's text --max_target_tokens may have cut the end.)
        for token, (start, end) in zip(tokens, np.rint(spans * SAMPLE_RATE / FRAME).astype(int), strict=training):
            item["alignment"][start : max(end, start + 1)] = token
    return item


# --- loss and evaluation -----------------------------------------------------------------------------------------------


def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of each loss term, to be divided by the window's counts."""
    return task.losses(model, batch, *model.encode(batch))


def evaluate(
    recogniser: task.Recogniser, names: list[str], model: Whisper, eval_batches
) -> dict[str, tuple[float, float]]:
    """Losses, CER and WER of one greedy pass, as (numerator, denominator)."""
    rows, values = task.decode_set(model, eval_batches, names, recogniser.greedy_texts)
    return {**values, **metrics.score(rows, for_scoring)}


@torch.no_grad()
def final_figures(args, recogniser: task.Recogniser, clips, eval_batches, title: str, setup) -> None:
    """The tables and examples at the end, and evaluation.json."""
    with setup.autocast():
        rows, _ = task.decode_set(recogniser.model, eval_batches, [], recogniser.texts)
    rows = [clips.row(row["index"], row["hypothesis"]) for row in rows]
    results.print_results(rows, title, args.log_dir / "transcripts.jsonl", args.seed, for_scoring)
    tables = evaluation_tables(rows)
    print_tables(tables)
    write_evaluation(tables, args.log_dir / "evaluation.json")


# --- main ----------------------------------------------------------------------------------------------------------------


def start(args, resumed: dict | None) -> tuple[dict, dict | None]:
    """Metadata of the model to be trained, and the weights it starts with (None: random ones)."""
    if resumed:
        task.check_resumed(args, SIZES, resumed["metadata"])
        weights, metadata = resumed["model"], resumed["metadata"]
    elif args.pretrained:
        weights, metadata = task.read_pretrained(args.pretrained, args.tokenizer_file, args.language, args.suppress)
    else:
        tokenizer = text.train_symbols(SYMBOLS, args.language)
        config = task.shape_from_scratch(args, SIZES[args.model_size], tokenizer.size)
        weights, metadata = None, task.metadata_from_scratch(args, config, tokenizer)
    return {**metadata, "recipe": RECIPE, "pad_to_30s": args.pad_to_30s}, weights


def resolve(args) -> None:
    """Fills in what depends on other flags, and refuses what contradicts."""
    if args.train_manifest and args.data_dir:
        raise UsageError("--train_manifest and --data_dir both name recordings: give one of them")
    if args.test_manifest and not (args.train_manifest or args.evaluate):
        raise UsageError("--test_manifest was given without --train_manifest; alone it goes with --evaluate")
    if args.test_manifest and args.data_dir:
        raise UsageError("--test_manifest and --data_dir both name recordings to test on: give one of them")
    if args.use_chunking and not args.train_manifest:
        raise UsageError("--use_chunking cuts recordings by a manifest's segment times: it goes with --train_manifest")
    recorded = args.data_dir or args.train_manifest or args.test_manifest
    is_demo = not (recorded or args.from_scratch or args.model_dir or args.model_file or args.conditions)
    usual = (("num_epochs", 3), 0) if recorded else (("max_steps", 20_000), 1000)
    options.resolve(args, DEMO_STEPS, is_demo, *usual)
    if recorded and args.alignment_weight:
        raise UsageError(
            "--alignment_weight: recordings do not say when each symbol is sent; --ctc_weight needs no times"
        )
    if args.alignment_weight and (args.model_dir or args.model_file):
        raise UsageError("--alignment_weight is for models from scratch: a released encoder is aligned already")
    if args.alignment_weight and args.ctc_weight:
        raise UsageError(
            "--alignment_weight and --ctc_weight train the same output layer of the encoder: give one of them"
        )
    if recorded and any(getattr(args, name) is not None for name in OF_SYNTHESIS):
        raise UsageError(f"{', '.join(f'--{name}' for name in OF_SYNTHESIS)} are for synthetic clips, not for recordings")  # fmt: skip
    if not recorded and any(getattr(args, name) for name in OF_RECORDINGS):
        raise UsageError(f"{', '.join(f'--{name}' for name in OF_RECORDINGS)} are for recordings: --data_dir or --train_manifest")  # fmt: skip
    if args.audio_root and args.data_dir:
        raise UsageError("--audio_root is for --train_manifest: the paths in metadata.csv start at --data_dir")
    aligned = not (recorded or args.model_dir or args.model_file or args.ctc_weight)
    if args.alignment_weight is None:
        args.alignment_weight = 0.3 if aligned else 0.0
    if aligned and args.alignment_weight:
        args.ctc_weight = 0.0
        if args.speed_perturbation:
            raise UsageError("--speed_perturbation would move what --alignment_weight trains on; synthetic clips have speeds of their own: --wpm LOW HIGH")  # fmt: skip
    # Off unless asked for: a masked span takes symbols away, and another speed is drawn anyway.
    for flag in ("spec_augment", "speed_perturbation"):
        setattr(args, flag, bool(getattr(args, flag)))
    args.suppress = False  # released models forbid / = + - : in Morse these are sent
    task.check_arguments(args, is_demo)
    args.conditions_given = args.conditions
    args.synthesis_given = any(getattr(args, name) for name in DRAWN)
    args.clips_per_epoch, args.eval_clips = args.clips_per_epoch or EPOCH_CLIPS, args.eval_clips or DEMO_CLIPS
    args.conditions = args.conditions or (["demo"] if is_demo else [name for name in CONDITIONS if name != "demo"])
    args.clip_seconds = args.clip_seconds or (3.0 if is_demo else None)


def main(args) -> None:
    if args.write_dataset:
        return write_clips(args)
    resolve(args)
    if args.verify_gpu:
        sys.exit(task.verify_gpu(args, SIZES, text.train_symbols(SYMBOLS, args.language).size))
    if args.transcribe:
        return task.transcribe(args, RECIPE)
    setup = device.setup(args)
    if args.evaluate or task.only_exports(args):
        return use(args, setup)
    lock = checkpoint.lock_folder(args.checkpoint_dir) if setup.ranks.first else None  # noqa: F841  held until the end
    report.check_folder(args.log_dir)
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, RECIPE)
    options.resolve_workers(args, setup.device.type == "cpu")

    clips = read_clips(args)
    metadata, weights = start(args, resumed)
    tokenizer, longest = text.make(metadata["tokenizer"]), task.check_limits(args, metadata["config"])
    metadata["longest"] = max(float(clips["train"].seconds(0).max()), metadata.get("longest", 0.0))
    if not (args.data_dir or args.train_manifest):
        metadata["synthesis"] = {name: getattr(args, name) for name in DRAWN}
    blank = tokenizer.end if args.alignment_weight and metadata["ctc_tokens"] else 0
    task.pad_from_the_middle(args, metadata, len(clips["train"]), setup.ranks.size)
    load = functools.partial(load_item, clips["train"], tokenizer, args, longest, blank, True)
    model = task.start_model(args, metadata, weights, load, len(clips["train"])).to(setup.device)
    task.compile_and_checkpoint(args, model)

    def seconds(epoch: int) -> np.ndarray:
        return task.trained_seconds(args, clips["train"].seconds(epoch), longest, epoch)

    windows = batches.Windows(args, seconds, load, task.collate, setup)
    evaluation = {
        name: eval_batches(args, clips[name], tokenizer, longest, blank, setup) for name in clips if name != "train"
    }
    optimizer = optim.make_optimizer(model, args)
    schedule = optim.Schedule(optimizer, args.lr_schedule, windows.total_steps(args), args.warmup_steps)
    recogniser, weights = task.Recogniser(model, metadata, args), task.loss_weights(args, metadata)
    scored = functools.partial(evaluate, recogniser, list(weights))
    train(args, model, optimizer, schedule, windows, evaluation["val"], compute_loss, weights, scored, setup, metadata,
          resumed, clips["train"].fingerprint())  # fmt: skip

    if setup.ranks.first:
        with torch.no_grad(), setup.autocast():
            used = checkpoint.use_best(
                args, model, RECIPE, metadata, lambda: metrics.rate(scored(model, evaluation["val"].whole())["cer"])
            )
        name = "test" if "test" in clips else "val"
        final_figures(args, recogniser, clips[name], evaluation[name].whole(), f"{name} set, {len(clips[name])} clips, decoding: {args.decoding}, {used}", setup)  # fmt: skip
        print(
            f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves, tables and all transcripts: {args.log_dir}"
        )
        if args.export:
            task.export(args, recogniser)


def eval_batches(args, clips, tokenizer, longest: float, blank: int, setup) -> batches.EvalBatches:
    load = functools.partial(load_item, clips, tokenizer, args, longest, blank, False)
    return batches.EvalBatches(args, clips.seconds(0), load, task.collate, setup)


def use(args, setup) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    recogniser = task.recogniser_to_use(args, RECIPE, setup)
    if args.evaluate:
        options.resolve_workers(args, setup.device.type == "cpu")
        report.check_folder(args.log_dir)
        if not (args.synthesis_given or args.data_dir or args.test_manifest or args.train_manifest):
            if "synthesis" not in recogniser.metadata:
                raise UsageError("--evaluate on what? These weights were not trained on synthetic clips: --data_dir, --test_manifest or --conditions")  # fmt: skip
            for name, value in recogniser.metadata["synthesis"].items():  # what it was trained on
                setattr(args, name, value)
        clips = read_clips(args)
        name = "test" if "test" in clips else "val"
        longest = task.check_limits(args, recogniser.metadata["config"])
        found = eval_batches(args, clips[name], recogniser.tokenizer, longest, 0, setup)
        title = f"{name} set, {len(clips[name])} clips, decoding: {args.decoding}"
        final_figures(args, recogniser, clips[name], found, title, setup)
    if args.export:
        task.export(args, recogniser)


def write_clips(args) -> None:
    """--write_dataset DIR N."""
    folder, count = args.write_dataset
    try:
        number = options.POSITIVE(count)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--write_dataset {folder} {count}: {error}") from None
    args.conditions = args.conditions or list(DATASET_MIX)
    workers = args.dataloader_num_workers if args.dataloader_num_workers != "auto" else len(os.sched_getaffinity(0))
    write_dataset(folder, number, args.seed, conditions_of(args), max(1, workers))


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(main, parser.parse_args())
