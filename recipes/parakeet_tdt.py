"""Parakeet-TDT: NVIDIA's FastConformer transducer with 0.6 billion parameters, fine-tuned whole on
a small GPU.

    python recipes/parakeet_tdt.py                            # no data needed: a small model, on synthetic speech
    python recipes/parakeet_tdt.py --model_file parakeet-tdt-0.6b-v3.nemo --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/parakeet_tdt.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "How are you?"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 20 s, longer ones with --use_chunking
if the manifest has segment times. The text is trained on as it is written: give it the case and
punctuation that the model shall write.

--model_file takes NVIDIA's .nemo archive, --model_dir a Hugging Face folder; --from_scratch
--model_size 110m makes a model with a vocabulary of its own. --export DIR --export_format hf|nemo
writes what transformers' ParakeetForTDT and NeMo load.

Memory: weights and gradients of 0.6 billion parameters take 4.7 GiB of the GPU, optimizer states
4.7, in 8 bits 1.2, and on the host none. run_parakeet_tdt.sh has presets from 8 GB. Expect a
character error rate below 5 % on the demo's held-out sentences.

Sources: FastConformer (Rekesh et al. 2023); TDT (Xu et al. 2023); relative positions (Dai et al.
2019, "Transformer-XL"); SpecAugment (Park et al. 2019). NVIDIA's NeMo defines the model; nothing of
it is needed here.
"""

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
from torch import nn

from common import checkpoint, device, optim, options, preflight
from common.batches import EvalBatches, GlobalBatches, pad, to_device
from common.device import upcast
from common.errors import DataError, exit_with_one_line
from common.loop import Task, begin, finish, train
from common.report import check_folder
from speech import demo, metrics, recogniser, splits, text
from speech.audio import SAMPLE_RATE, change_speed, read_utterance, speed_factors
from speech.columns import Corpus
from speech.features import random_masks, spec_augment, valid_mask
from speech.layers import downcast, lean_chain
from speech.parakeet import decoding, features
from speech.parakeet import start as starts
from speech.parakeet.loss import Lattice, tdt_losses
from speech.parakeet.tokenizer import ParakeetTokenizer
from speech.recogniser import SPEEDS, decode_set

RECIPE = "parakeet_tdt"
MAX_SECONDS = 20.0  # of an utterance, as in NVIDIA's fine-tuning
DITHER = 1e-5  # noise added to a training waveform, so that digital silence has finite features
FREQUENCY_MASKS, FREQUENCY_MASK_BANDS = 2, 27
TIME_MASKS, TIME_MASK_WIDTH = 10, 0.05  # share of the utterance
AT_ONCE = 4  # utterances in a subsampling: with all of them it would be the peak of memory
FIT_UTTERANCES = 64  # that a model from scratch is fitted to
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 800
STYLES = {
    "case": 0.3,
    "punctuation": 0.3,
    "digits": 0.05,
}  # differences in the shares of texts that are worth a warning


def add_arguments(parser) -> None:
    starts.add_arguments(parser)
    splits.add_arguments(parser)
    recogniser.add_arguments(parser)
    rate = (
        None,
        "fine-tuning 1e-4, or 3e-5 below 20 h of speech; from scratch by the model's width",
    )
    options.add_arguments(
        parser, learning_rate=rate, weight_decay=1e-3, keep_last=2, max_duration=MAX_SECONDS
    )


def resolve(args) -> starts.Start:
    is_demo = not args.train_manifest
    excludes = (*recogniser.EXCLUDES, *starts.EXCLUDES)
    options.resolve(
        args, is_demo, DEMO_STEPS, excludes, (*splits.NEEDS, *recogniser.NEEDS, *starts.NEEDS)
    )
    recogniser.resolve(args, not is_demo or options.plans(args))  # the demo's voices hardly vary
    return starts.resolve(args, is_demo or args.check_data)


# --- data -----------------------------------------------------------------------------------------


def read_sets(args, saved: dict | None) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What was held out when the model with the metadata `saved` began is held out again."""
    checks = splits.resolve(args, (saved or {}).get("held_out", ())).checks
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.test_manifest and (args.evaluate or not args.train_manifest):
        paths = {"test": args.test_manifest}
    elif not args.train_manifest and options.plans(args):
        return splits.stand_in(args.max_duration)
    elif not args.train_manifest:
        starts.check_demo(saved)
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        folder = Path(args.output_dir) / "data" / "konkani_demo"
        paths = demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES)
    paths = {split: path for split, path in paths.items() if path}
    return splits.read_manifests(paths, text.normalise, checks)


def sample_texts(corpus: Corpus, tokenizer: ParakeetTokenizer, seed: int) -> list[str]:
    """A random part of the texts, because millions would take minutes. Says how many hold
    characters that the model cannot write."""
    texts = [
        corpus.texts[int(row)]
        for row in np.random.default_rng(seed).permutation(len(corpus))[: starts.SAMPLE]
    ]
    if unknown := sum(tokenizer.unknown in tokenizer.encode(each) for each in texts):
        share = f"{100 * unknown / len(texts):.1f} % of the training texts"
        print(f"{share} hold characters outside the vocabulary; they become its unknown token")
    return texts


def about_run(args, sets: dict[str, Corpus], metadata: dict) -> dict:
    """What is kept with the weights beside the model: what is held out, and how long files are
    cut."""
    return {
        "recipe": RECIPE,
        "held_out": (
            splits.held_out_keys(sets["val"])
            if args.train_manifest and not args.val_manifest
            else []
        ),
        "longest": max(
            float(sets["train"].seconds.max()),
            metadata.get("longest", MAX_SECONDS * metadata["pretrained"]),
        ),
        "demo": not args.train_manifest,
    }


class Utterances:
    """A set of utterances as the model takes them. Only the training set is augmented, and
    augmentation depends on (seed, epoch, index) alone."""

    def __init__(
        self, args, corpus: Corpus, tokenizer: ParakeetTokenizer, metadata: dict, training: bool
    ):
        self.args = args
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.training = training
        self.omega = metadata["loss"]["omega"] if training else 0.0
        self.reduction = metadata["loss"]["reduction"]
        self.frequency_mask_width = FREQUENCY_MASK_BANDS / metadata["config"]["num_mel_bins"]

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        if self.training and self.args.speed_perturbation:
            return self.corpus.seconds / self.speeds(epoch)
        return self.corpus.seconds

    def speeds(self, epoch: int) -> np.ndarray:
        return speed_factors(self.args.seed, epoch, len(self), SPEEDS)

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), whether it has the plain RNN-T loss, the
        factor and the count of its loss, masks of SpecAugment."""
        args, transcript = self.args, self.corpus.texts[index]
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        random = np.random.default_rng([args.seed, epoch, index])
        if self.training:
            if args.speed_perturbation:
                waveform = change_speed(waveform, float(self.speeds(epoch)[index]))
            waveform = waveform + DITHER * torch.from_numpy(
                random.standard_normal(len(waveform), dtype=np.float32)
            )
        tokens = self.tokenizer.encode(transcript)
        item = {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "plain": bool(random.random() < self.omega),
            "factor": 1 / max(1, len(tokens)) if self.reduction == "mean" else 1.0,
            "count": len(tokens) if self.reduction == "mean_volume" else 1,
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }
        if self.training and args.spec_augment:
            item["frequency_masks"] = random_masks(
                random, FREQUENCY_MASKS, self.frequency_mask_width
            )
            item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths, factors (B,) of the
    losses; counts are the numbers of targets of each loss term."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "plain": [item["plain"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "factors": torch.tensor([item["factor"] for item in items], dtype=torch.float64),
    }
    for key in ("audio", "tokens"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    if "time_masks" in items[0]:
        batch["frequency_masks"] = torch.stack([item["frequency_masks"] for item in items])
        batch["time_masks"] = torch.stack([item["time_masks"] for item in items])
    batch["counts"] = {
        "tdt": sum(item["count"] for item in items),
        "ctc": int(batch["tokens_lengths"].sum()),
    }
    return batch


# --- loss, decoding and evaluation ----------------------------------------------------------------


def losses(
    model: Parakeet, batch: dict, encoded: torch.Tensor, frames: list[int]
) -> dict[str, torch.Tensor]:
    """Sums over the batch of the TDT loss and, if the model has a CTC head that is trained, of the
    CTC loss."""
    joint, lengths = model.joint, batch["tokens_lengths_host"]
    lattice = Lattice(
        batch["tokens"],
        torch.tensor(frames),
        lengths,
        joint.durations,
        model.sigma,
        torch.tensor(batch["plain"]),
        joint.dropout if model.training else 0.0,
    )
    tdt = joint(model.encoder_projector(encoded), model.predict(batch["tokens"]), lattice)
    terms = {"tdt": (tdt * batch["factors"].to(tdt.dtype)).sum()}
    if model.trains_ctc:
        log_probs = (
            upcast(model.ctc_head(encoded.transpose(1, 2))).log_softmax(1).permute(2, 0, 1)
        )  # (T, B, V + 1)
        terms["ctc"] = F.ctc_loss(
            log_probs,
            batch["tokens"],
            torch.tensor(frames),
            lengths,
            blank=model.blank,
            reduction="sum",
            zero_infinity=True,
        )
    return terms


def compute_loss(model: Parakeet, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    return losses(model, batch, *model.encode(batch))


def loss_weights(metadata: dict) -> dict[str, float]:
    share = starts.ctc_weight(metadata)
    return {"tdt": 1.0 - share, "ctc": share} if share else {"tdt": 1.0}


def greedy(model: Parakeet, encoded: torch.Tensor, frames: list[int]) -> list[list[decoding.Token]]:
    """The tokens of every utterance of (B, T, D), with their times."""

    def step(tokens: torch.Tensor | None, state: tuple | None) -> tuple[torch.Tensor, tuple]:
        if tokens is None:
            tokens = torch.full((len(encoded),), model.blank, device=encoded.device)
        predicted, state = model.decoder(tokens[:, None], state)
        return predicted[:, 0], state

    durations, most = model.joint.durations, model.config["max_symbols"]
    return decoding.greedy(
        step, model.joint.logits, model.encoder_projector(encoded), frames, durations, most
    )


def records(tokenizer: ParakeetTokenizer, model: Parakeet, batch: dict) -> list[dict]:
    """The texts of a batch with the times of words and segments."""
    seconds = model.config["subsampling"] * features.HOP / SAMPLE_RATE
    encoded, frames = model.encode(batch)
    hypotheses = zip(greedy(model, encoded, frames), frames, strict=True)
    return [decoding.transcript(tokens, tokenizer, seconds, count) for tokens, count in hypotheses]


def evaluate(
    tokenizer: ParakeetTokenizer,
    terms: dict[str, float],
    texts: list[str],
    model: Parakeet,
    eval_batches,
) -> dict[str, tuple[float, float]]:
    """The losses named in `terms`, CER and WER of greedy decoding, as (numerator, denominator).
    `texts`: as in `recogniser.warn_of_style`."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, frames = model.encode(batch)
        hypotheses = greedy(model, encoded, frames)
        texts = [decoding.text_of(tokens, tokenizer) for tokens in hypotheses]
        return texts, losses(model, batch, encoded, frames)

    rows, sums = decode_set(decode_batch, eval_batches, next(model.parameters()).device, terms)
    recogniser.warn_of_style(texts, rows)
    return {**sums, **metrics.score(rows)}


def decode_words(tokenizer: ParakeetTokenizer, model: Parakeet, eval_batches) -> list[dict]:
    """The rows of a decoded set, with the times of their words."""
    words: list[list[dict]] = []

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        decoded = records(tokenizer, model, batch)
        words.extend(record["words"] for record in decoded)
        return [record["text"] for record in decoded], {}

    rows, _ = decode_set(decode_batch, eval_batches, next(model.parameters()).device)
    return [{**row, "words": parts} for row, parts in zip(rows, words, strict=True)]


def report_results(
    args, start: starts.Start, model: Parakeet, metadata: dict, eval_batches, title: str
) -> None:
    """Prints the error rates of a set and examples with the times of their words; after fine-tuning
    also the error rates of the released model."""
    rows = decode_words(starts.tokenizer_of(metadata), model, eval_batches)
    recogniser.print_results(rows, f"{title}, {len(rows)} utterances", args.log_dir, args.seed)
    if (
        start.pretrained and "longest" in metadata
    ):  # the model has been trained since it was released
        weights, theirs = starts.read_pretrained(start)
        released = make_model(theirs, weights).to(next(model.parameters()).device).eval()
        del weights
        before = decode_words(starts.tokenizer_of(theirs), released, eval_batches)
        print(
            "released model, and trained model, on these"
            f" utterances:\n{metrics.improvement_table(before, rows)}"
        )


# --- main -----------------------------------------------------------------------------------------


def trained(
    args, start: starts.Start, setup: device.Setup
) -> tuple[Parakeet, ParakeetTokenizer, dict]:
    """The model of --model_dir or --model_file, of --resume, or of the best evaluation; its
    tokenizer and metadata."""
    if start.pretrained and not args.resume:
        weights, metadata = starts.read_pretrained(start)
    else:
        weights, metadata = checkpoint.weights_to_use(args, RECIPE, starts.METADATA)
        starts.check_resumed(start, metadata)
        starts.check_saved(metadata, weights)
    return (
        make_model(metadata, weights).to(setup.device).eval(),
        starts.tokenizer_of(metadata),
        metadata,
    )


def transcribe(args, start: starts.Start) -> None:
    setup = device.setup(args, quiet=True)
    model, tokenizer, metadata = trained(args, start, setup)
    records_of = functools.partial(records, tokenizer, model)
    longest, _ = recogniser.in_pieces(args.piece_seconds, metadata.get("longest", MAX_SECONDS))
    recogniser.transcribe_files(
        args.transcribe,
        records_of,
        setup,
        longest,
        args.output,
        args.eval_batch_size,
        parts=("words", "segments"),
    )


@torch.no_grad()
def evaluate_only(args, start: starts.Start) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    setup = device.setup(args)
    model, tokenizer, metadata = trained(args, start, setup)
    if args.evaluate:
        check_folder(args.log_dir)
        sets = read_sets(args, metadata)
        name = "test" if "test" in sets else "val"
        eval_batches = EvalBatches(
            args, Utterances(args, sets[name], tokenizer, metadata, False), collate, setup
        )
        with setup.autocast():
            report_results(
                args, start, model, metadata, eval_batches, f"{name} set, the weights named"
            )
    if args.export:
        starts.export(args.export, args.export_format, model.state_dict(), metadata)


def first_model(args, metadata: dict, weights: dict | None, data: Utterances | None) -> Parakeet:
    """The model that training starts with: with `weights`, or random ones, which are fitted to
    `data` if that is given. Raises `RunError` if the disk is too small for its checkpoints."""
    model = make_model(metadata, weights, args.dropout, args.joint_dropout)
    if data is not None:
        fit_to_data(model, data, args.seed)
    preflight.require_disk(args, model)
    print(f"model: {optim.count_parameters(model)[0] / 1e6:.1f} M parameters, ", end="")
    return model


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

    read = functools.cache(lambda: read_sets(args, run.resumed and run.resumed["metadata"]))
    metadata, weights = starts.choose(start, run.resumed, lambda: read()["train"].texts, RECIPE)
    sets, tokenizer = (
        read(),
        starts.tokenizer_of(metadata),
    )  # after the model, whose faults are found faster
    sample = sample_texts(sets["train"], tokenizer, args.seed)
    metadata |= about_run(args, sets, metadata)
    data = {
        name: Utterances(args, sets[name], tokenizer, metadata, training=name == "train")
        for name in sets
    }
    is_new, released = not run.resumed, metadata["pretrained"]
    is_fitted = is_new and not (released or run.planned)
    model = first_model(
        args, metadata, weights if is_new else None, data["train"] if is_fitted else None
    )
    del weights  # they are the model's, or the loop loads them
    rate = starts.learning_rate(metadata, float(sets["train"].seconds.sum()) / 3600)
    print(f"{tokenizer.size} pieces; learning rate {args.learning_rate or rate:g}")

    global_batches = GlobalBatches(args, data["train"], collate, run.setup)
    evaluation = {
        name: EvalBatches(args, data[name], collate, run.setup) for name in data if name != "train"
    }
    terms = loss_weights(metadata)
    model.trains_ctc = "ctc" in terms
    sample = sample if released and is_new else []
    task = Task(
        RECIPE,
        compute_loss,
        terms,
        functools.partial(evaluate, tokenizer, terms, sample),
        metadata,
        "wer" if released else "cer",
        rate,
        CHECKPOINTED,
        COMPILED,
        evaluate_first=released,
        decay_embeddings=False,
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
        starts.export(args.export, args.export_format, model.state_dict(), metadata)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
