"""Morse decoding: Whisper trained on synthetic contest and everyday Morse, which is made while it
trains.

    python recipes/whisper_morse.py                           # no data needed: a small model, on easy conditions
    python recipes/whisper_morse.py --model_dir whisper-small --conditions contest_good contest_moderate wide --max_steps 20000
    python recipes/whisper_morse.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: clips that the worker processes make from (seed, number), see speech/morse/synthesis.py; or a
folder of recordings, --data_dir DIR, with metadata.csv (id, audio_file, text, contest_type, ...);
or manifests, as in the other recipes. At the end the errors by condition, contest, speed and SNR
are printed and kept in evaluation.json. Every SNR is stated in 2,500 Hz.

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

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch
from torch import Tensor

from common import device, options, run_length
from common.batches import EvalBatches, pad
from common.errors import DataError, exit_with_one_line
from common.loop import ForPlans, Run, Task, begin, finish, train
from common.parts.replay import make_batches
from common.report import check_folder
from models import card, released
from models.whisper import decoding, formats, start
from models.whisper.model import FRAME, Whisper, alignment_loss, ctc_loss, token_loss
from models.whisper.padding import Padding, middle_epoch, note_longer_epochs
from models.whisper.start import (
    AUXILIARY_WEIGHT,
    BEAM_SIZE,
    ModelInfo,
    WhisperOptions,
    check_limits,
    input_seconds,
    long_recordings,
    make_search,
    with_longest,
)
from models.whisper.tokenizer import WhisperTokenizer, train_symbols
from speech.data import replay, splits, watching
from speech.data.utterances import AugmentedUtterances
from speech.decoding import recogniser, results, transcribing
from speech.decoding.long import BY_SILENCES
from speech.decoding.recogniser import decode_set, decode_texts
from speech.morse import clips, scores
from speech.morse.alphabet import SYMBOLS
from speech.morse.scores import for_scoring
from speech.morse.synthesis import Choice, Synthetic
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import random_masks
from speech.writing import metrics

RECIPE = Path(__file__).stem
FREQUENCY_MASKS = 2
FREQUENCY_MASK_WIDTH = 10 / 80  # share of the bands
TIME_MASKS = 2
TIME_MASK_WIDTH = 0.05  # share of the utterance
DEMO_STEPS = 1100
SIZES = {"demo": formats.make_config(128, (4, 2), 4), **formats.SIZES}
CARD = {"languages": (), "reading": results.AS_SENT}  # what a model card has of the symbols


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The record of a run for later commands: the data, the epoch from which --pad_share applies,
    and what synthetic clips were drawn from (None: the run trained on recordings)."""

    data: splits.RunInfo
    pad_from: Annotated[int, range(1 << 31)]
    synthesis: Choice | None


def add_arguments(parser) -> None:
    start.add_arguments(parser, SIZES, "en", usual="en", task=options.LEAVE_OUT)
    splits.add_arguments(parser)
    replay.add_arguments(parser)
    watching.add_arguments(parser)
    methods = ("greedy", "beam")
    recogniser.add_arguments(
        parser, methods, "greedy", BEAM_SIZE, normalisers=False, augments=False
    )
    clips.add_arguments(parser)
    rate = (None, "by the model's width, and whether it is fine-tuned")
    epochs = (None, "20,000 updates of synthetic clips; recordings by their hours")
    options.add_arguments(parser, learning_rate=rate, num_epochs=epochs)


def resolve(args) -> tuple[WhisperOptions, clips.ClipOptions]:
    recorded = any(getattr(args, name) for name in clips.RECORDED)
    is_released = any(getattr(args, name) for name in released.MODELS)
    is_demo = not (recorded or is_released or args.from_scratch or args.conditions)
    usual = (None, None) if recorded else (20_000, 1000)  # updates, and between evaluations
    options.resolve(args, is_demo, DEMO_STEPS, *usual)
    # Without augmentation by default: a masked span would take symbols away.
    how = recogniser.resolve(args, is_demo, BEAM_SIZE, augments=False)
    source = clips.resolve(args, is_demo, AUXILIARY_WEIGHT)
    # Released models forbid / = + - : when they decode. In Morse these are sent.
    losses = ("ctc_weight", "alignment_weight")
    asked = start.resolve(args, SIZES, is_demo, how, losses, suppress=False)
    return asked, source


# --- data -----------------------------------------------------------------------------------------


def read_data(
    asked: WhisperOptions, source: clips.ClipOptions, earlier_run: RunInfo | None = None
) -> dict[str, clips.Clips]:
    """The clips "train", "val" and, if there is one, "test". What `earlier_run`, which is
    resumed or used, held out is held out again."""
    data = splits.again(asked.data, earlier_run and earlier_run.data)
    return clips.read(source, data, trains=not asked.evaluate)


class Utterances(AugmentedUtterances):
    """A set of utterances as the model takes them. The training set is augmented, all of it or from
    scratch a share, which the loop lets grow; and it is padded."""

    def __init__(
        self, asked: WhisperOptions, corpus: clips.Clips, tokenizer, info: ModelInfo, training: bool
    ):
        super().__init__(asked, corpus, input_seconds(info.config), training)
        self.asked = asked
        self.tokenizer = tokenizer
        self.most_tokens = asked.max_target_tokens or info.config["max_target_positions"]
        # Only the synthesis knows what is being sent in every frame.
        has_head = asked.auxiliary["alignment_weight"] and info.ctc_tokens
        self.aligned = bool(has_head) and isinstance(corpus, Synthetic)
        padding = (asked.pad_share, asked.pad_to_30s)
        self.padding = Padding(asked.seed, len(corpus), self.longest, *padding)

    def hours(self) -> float:
        return float(self.corpus.seconds(0).sum()) / 3600

    def text_length(self, index: int) -> int:
        return self.corpus.text_length(index)

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        seconds = self.at_speeds(self.corpus.seconds(epoch), epoch)
        seconds = self.with_silence(seconds, epoch)
        return self.padding.lengths(seconds, epoch) if self.training else seconds

    def item(self, index: int, epoch: int) -> dict:
        """One clip: waveform (T,), decoder input and labels (U,), CTC's targets (S,), masks of
        SpecAugment; of a synthetic one also what each encoder frame says (F,)."""
        waveform, transcript, name, spans = self.corpus.load(index, epoch)
        limit = round(self.longest * SAMPLE_RATE)
        waveform = self.at_speed(waveform, index, epoch, lambda count: count <= limit)[:limit]
        augmented = bool(self.augmented(epoch)[index])
        if self.augmentation and augmented:
            waveform = self.augmentation.apply(waveform, index, epoch)
        prompt = self.tokenizer.prompt
        tokens = self.tokenizer.encode(transcript)
        room = self.most_tokens - len(prompt)
        if self.training and len(tokens) > room:
            raise DataError(
                f"{name}: its text has {len(tokens)} tokens, and --max_target_tokens leaves room"
                f" for {room}"
            )
        # Only the loss of an evaluation set is cut short: the whole text is scored.
        tokens = tokens[:room]
        decoder_input = [*prompt, *tokens]
        item = {
            "audio": waveform,
            "tokens": torch.tensor(decoder_input),
            "labels": torch.tensor([*decoder_input[1:], self.tokenizer.eos]),
            "ctc_tokens": torch.tensor(tokens, dtype=torch.long),
            "heard": len(waveform),
            "text": transcript,
            "name": name,
            "index": index,
        }
        if self.training:
            item |= self.padding.pad(waveform, index, epoch)
        if self.training and self.asked.spec_augment:
            random = np.random.default_rng([self.asked.seed, epoch, index])
            masks = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["frequency_masks"] = augmented * masks
            item["time_masks"] = augmented * random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        if self.aligned:
            item["alignment"] = self.alignment(tokens, spans, len(waveform))
        return item

    def alignment(self, tokens: list[int], spans: np.ndarray, samples: int) -> Tensor:
        """(F,) the token that is sent in each encoder frame, or the blank between tokens. `spans`:
        (N, 2) seconds of the symbols, spaces apart."""
        space = self.tokenizer.encode(" ")[0]
        sent = [token for token in tokens if token != space]
        blank = self.tokenizer.eos  # CTC's blank follows the text's tokens
        frames = torch.full((-(-samples // FRAME),), blank)
        places = np.rint(spans * SAMPLE_RATE / FRAME).astype(int)
        # (--max_target_tokens may have cut the end of an evaluation set's text.)
        for token, (first, end) in zip(sent, places, strict=self.training):
            frames[first : max(end, first + 1)] = token
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
    if "fill_from" in items[0]:
        batch["fill_from"] = torch.tensor([item["fill_from"] for item in items])
    if "time_masks" in items[0]:
        batch["frequency_masks"] = torch.stack([item["frequency_masks"] for item in items])
        batch["time_masks"] = torch.stack([item["time_masks"] for item in items])
    batch["counts"] = {
        "attention": int(batch["labels_lengths"].sum()),
        "ctc": int(batch["ctc_tokens_lengths"].sum()),
    }
    if "alignment" in items[0]:
        alignments = [item["alignment"] for item in items]
        batch["alignment"], batch["alignment_lengths"] = pad(alignments, -100)
        batch["counts"]["alignment"] = int(batch["alignment_lengths"].sum())
    return batch


# --- loss and evaluation --------------------------------------------------------------------------


def losses(model: Whisper, batch: dict, encoded: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Sums over the batch of the decoder's cross-entropy and, for a model from scratch, of the
    alignment or CTC on the encoder, which helps it to align."""
    terms = {"attention": token_loss(model, batch, encoded, mask)}
    if model.ctc_head is not None and "alignment" in batch:
        terms["alignment"] = alignment_loss(model, batch, encoded)
    elif model.ctc_head is not None:
        terms["ctc"] = ctc_loss(model, batch, encoded)
    return terms


def compute_loss(model: Whisper, batch: dict) -> dict[str, Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    encoded, mask = model.encode(batch)
    return losses(model, batch, encoded, mask)


def loss_weights(asked: WhisperOptions, info: ModelInfo) -> dict[str, float]:
    """The share of each loss term."""
    for name, share in (
        ("ctc", asked.ctc_weight),
        ("alignment", asked.auxiliary["alignment_weight"]),
    ):
        if info.ctc_tokens and share:
            return {"attention": 1.0 - share, name: share}
    return {"attention": 1.0}


def evaluate(
    tokenizer: WhisperTokenizer,
    search: decoding.Search,
    rate: decoding.TokenRate,
    terms: dict[str, float],
    model: Whisper,
    eval_batches,
) -> dict[str, tuple[float, float]]:
    """The losses named in `terms`, CER and WER of one greedy pass, as (numerator, denominator)."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, mask = model.encode(batch)
        limits = rate.limits(batch["audio_lengths_host"])
        texts = decoding.greedy_texts(model, tokenizer, encoded, mask, search, limits)
        return texts, losses(model, batch, encoded, mask)

    rows, sums = decode_set(model, decode_batch, eval_batches, terms)
    return {**sums, **metrics.score(rows, for_scoring)}


def final_texts(
    model: Whisper, tokenizer: WhisperTokenizer, search: decoding.Search, batch: dict
) -> list[str]:
    """The texts of a batch by --decoding, with the fallback to higher temperatures."""
    encoded, mask = model.encode(batch)
    return decoding.texts(model, tokenizer, encoded, mask, search)


def report_results(
    asked: WhisperOptions,
    info: ModelInfo,
    model: Whisper,
    evaluation: dict[str, EvalBatches],
    weights: str,
) -> None:
    """Prints error rates and examples of the test set, or of "val" without one, decoded by
    --decoding; then tables by condition, contest, speed and SNR, which are kept in evaluation.json.
    `weights`: which weights the model has, for the title."""
    name = "test" if "test" in evaluation else "val"
    eval_batches = evaluation[name].whole()
    corpus = eval_batches.dataset.data.corpus
    texts_of = functools.partial(final_texts, model, *make_search(asked, info))
    rows = decode_texts(model, texts_of, eval_batches)
    rows = [
        {**corpus.row(row["index"], row["hypothesis"]), "seconds": row["seconds"]} for row in rows
    ]
    title = f"{name} set, {weights}, {len(rows)} clips, decoding: {asked.how.decoding}"
    results.print_results(rows, title, asked.how, for_scoring)
    tables = scores.evaluation_tables(rows)
    scores.print_tables(tables)
    scores.write_evaluation(tables, asked.log_dir / "evaluation.json")


# --- main -----------------------------------------------------------------------------------------


def trained(
    asked: WhisperOptions, setup: device.Setup
) -> tuple[Whisper, ModelInfo, RunInfo | None]:
    """The model that is used without training, and what the run that trained it has saved."""
    return start.Family(asked).trained(RECIPE, RunInfo, setup)


def transcribe(asked: WhisperOptions, setup: device.Setup) -> None:
    model, info, earlier_run = trained(asked, setup)
    tokenizer, search = make_search(asked, info)
    # Within a word of Morse there are pauses, too.
    longest, cutting = long_recordings(info, earlier_run and earlier_run.data, short=BY_SILENCES)
    texts_of = functools.partial(final_texts, model, tokenizer, search)
    transcribing.transcribe_files(asked.how, texts_of, setup, longest, cutting)


@torch.no_grad()
def evaluate_only(
    asked: WhisperOptions, source: clips.ClipOptions, setup: device.Setup, batches_of: Callable
) -> None:
    """--evaluate on the test set, --export, or both, without training.
    `batches_of`: `EvalBatches` with the flags."""
    model, info, earlier_run = trained(asked, setup)
    if asked.evaluate:
        check_folder(asked.log_dir)
        source = clips.as_trained(source, earlier_run.synthesis if earlier_run else None)
        corpora = read_data(asked, source, earlier_run)
        corpora.pop("train", None)
        sets = make_sets(asked, info, corpora)
        evaluation = {name: batches_of(sets[name], collate, setup) for name in sets}
        with setup.autocast():
            report_results(asked, info, model, evaluation, "the given weights")
    weights = released.weights_file(asked.origin)
    measured = results.results_of(asked.log_dir, weights, bool(asked.evaluate))
    data = earlier_run and earlier_run.data
    about = card.About(RECIPE, asked.origin.path, weights, data, measured, **CARD)
    start.Family(asked).export(info, model, about)


def make_sets(
    asked: WhisperOptions, info: ModelInfo, corpora: dict[str, clips.Clips]
) -> dict[str, Utterances]:
    """The sets of clips."""
    check_limits(asked, info.config)
    tokenizer, _ = make_search(asked, info)
    sets = {}
    for name, corpus in corpora.items():
        is_trained = name in splits.LEARNED_FROM
        sets[name] = Utterances(asked, corpus, tokenizer, info, is_trained)
    return sets


def about_run(
    asked: WhisperOptions,
    info: ModelInfo,
    source: clips.ClipOptions,
    corpora: dict[str, clips.Clips],
    middle: int,
    earlier_run: RunInfo | None,
) -> RunInfo:
    """The record of the run. `middle`: its middle epoch; `earlier_run`: of the resumed run."""
    data = clips.run_info(asked.data, corpora)
    data = with_longest(info, data, earlier_run and earlier_run.data)
    pad_from = earlier_run.pad_from if earlier_run else middle
    synthesis = source.choice if isinstance(corpora["train"], Synthetic) else None
    return RunInfo(data, pad_from, synthesis)


def make_task(
    asked: WhisperOptions,
    run: Run,
    info: ModelInfo,
    run_info: RunInfo,
    train_set: Utterances,
    evaluation: dict[str, EvalBatches],
) -> Task:
    """The task: all that the loop knows of this recipe."""
    tokenizer, search = make_search(asked, info)
    watched = watching.watched(evaluation, asked.stop_when_watched_rises)
    heard = [
        train_set,
        *(batches.dataset.data for batches in (watched.sets if watched else {}).values()),
    ]
    rate = decoding.TokenRate(heard, asked.seed)
    terms = loss_weights(asked, info)
    last_steps = decoding.last_steps(search, info.config)
    family = start.Family(asked)
    return Task(
        RECIPE,
        compute_loss,
        terms,
        functools.partial(evaluate, tokenizer, search, rate, terms),
        info,
        run_info,
        metric="cer",
        higher_is_better=False,
        augmented_share=None if info.pretrained else asked.how.augmented_share,
        not_begun=None if info.pretrained else recogniser.not_begun,
        reports=(*results.REPORTS, "evaluation.json"),
        further=watched,
        plans=ForPlans(
            freeze=Whisper.freeze_encoder if info.pretrained else None,
            last_steps=functools.partial(evaluate, tokenizer, last_steps, rate, terms),
            adapters=family.usual_adapters(info),
        ),
        **family.for_task(info, run.initial),
    )


def main(args) -> None:
    asked, source = resolve(args)
    if args.check_data:
        sets = read_data(asked, source)
        return splits.report_checked({name: part.corpus for name, part in sets.items()})
    if args.transcribe:
        return transcribe(asked, device.setup(args, quiet=True))
    if released.exports_adapter_only(asked.origin):
        return start.Family(asked).export_adapter(RECIPE)
    if args.evaluate or released.exports_only(asked.origin, (*released.GOALS, *clips.GOALS)):
        batches_of = functools.partial(EvalBatches, args)
        return evaluate_only(asked, source, device.setup(args), batches_of)
    run = begin(args, RECIPE)
    earlier_run = released.read_run_info(RunInfo, run.resumed)

    corpora = read_data(asked, source, earlier_run)
    new_tokenizer = functools.partial(train_symbols, SYMBOLS, asked.language)
    info, model = start.Family(asked).first_model(run, new_tokenizer)
    sets = make_sets(asked, info, corpora)

    learned = {name: sets.pop(name) for name in splits.LEARNED_FROM if name in sets}
    new, old = learned["train"], learned.get(replay.REPLAY)
    global_batches = make_batches(args, new, collate, run.setup, old)
    steps = run_length.choose(args, global_batches, info.pretrained).total
    middle = middle_epoch(steps, global_batches.per_epoch)
    run_info = about_run(asked, info, source, corpora, middle, earlier_run)
    for data in learned.values():
        data.padding.begin = run_info.pad_from
    note_longer_epochs(global_batches, run_info.pad_from)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    task = make_task(asked, run, info, run_info, new, evaluation)
    progress = train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(report_results, asked, info, model, evaluation)
    weights = finish(args, run, model, task, report)
    if weights:  # on the first rank
        results.add_watched(asked.how, task.further, progress)
        measured = results.results_of(asked.log_dir, weights, are_new=True)
        about = card.About(RECIPE, asked.origin.path, weights, run_info.data, measured, **CARD)
        start.Family(asked).export(info, model, about)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
