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
writes a folder that transformers' WhisperForConditionalGeneration and pipeline load.
--timestamp_share 0.25 trains a released model on windows of several utterances, some of them with
times, so that programs which read long recordings by times lose no text.

Memory: --dry_run 8GB predicts what a run needs; base trains in 8 GB with 24 clips of 30 s at once
(predicted). Expect a character error rate of 6 to 9 % on the demo's held-out sentences after its
1,800 updates (two CPU cores: seven minutes).

Sources: Whisper (Radford et al. 2022); variable length as in icefall's Whisper recipes; SpecAugment
(Park et al. 2019) with the masks of WeNet's Whisper recipe.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F

from common import checkpoint, device, memory, options, run_length
from common.batches import EvalBatches, GlobalBatches, pad
from common.errors import DataError, exit_with_one_line
from common.loop import ForPlans, Run, Task, begin, finish, train
from common.report import check_folder
from speech import card, demo, metrics, recogniser, released, replay, splits, text
from speech.audio import SAMPLE_RATE, change_speed, read_utterance, speed_factors
from speech.augment import Augmentation, read_noises
from speech.columns import Corpus
from speech.features import random_masks
from speech.recogniser import SPEEDS, decode_set, decode_texts
from speech.text import in_lower_case as for_scoring  # as PhoWhisper's error rates are computed
from speech.whisper import decoding, formats, kept_times, packs, scratch, start, timed
from speech.whisper.model import HOP, LAYERS, Whisper, ctc_loss, token_loss
from speech.whisper.tokenizer import WhisperTokenizer, train_bpe

RECIPE = Path(__file__).stem
FREQUENCY_MASKS = 2
FREQUENCY_MASK_WIDTH = 10 / 80  # share of the bands
TIME_MASKS = 2
TIME_MASK_WIDTH = 0.05  # share of the utterance
DEMO_SIZES = {"train": 6000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 1800
USUAL_TOKENS = 500
DEMO_TOKENS = 320  # with whole syllables as tokens the demo's CER was 62 % instead of 26 %
PROMPT = 4  # tokens before a text
PREVIOUS_TOKENS = 223  # of the text before a window, as programs that decode give them
SIZES = {"demo": formats.make_config(144, (4, 2), 4), **formats.SIZES}
MANIFESTS = ("train_manifest", "val_manifest", "test_manifest")
READING = text.NAMES[for_scoring]
NO_TIMES = "a model from scratch has no time tokens"
OWN_VOCABULARY = "trained weights have their own vocabulary; leave the first out"
EXCLUDES = (
    *recogniser.EXCLUDES,
    *replay.EXCLUDES,
    *start.EXCLUDES,
    *(("vocab_size", model, OWN_VOCABULARY) for model in released.MODELS),
    ("vocab_size", options.COMMAND, OWN_VOCABULARY),
    ("timestamp_share", options.COMMAND, options.TRAINS),
    ("compare_to", "transcribe", "files to transcribe have no reference; leave the first out"),
    ("timestamps", "piece_seconds", "the second cuts recordings to train on; leave one out"),
    *(("long", manifest, "their results are apart; leave one out") for manifest in MANIFESTS),
)
NEEDS = (
    *splits.NEEDS,
    *recogniser.NEEDS,
    *replay.NEEDS,
    *start.NEEDS,
    ("timestamps", ("transcribe",), ""),
    ("long", ("evaluate",), ""),
    ("timestamp_share", (*released.MODELS, "resume", "init_from"), NO_TIMES),
)


def add_arguments(parser) -> None:
    start.add_arguments(parser, SIZES, language="vi")
    splits.add_arguments(parser)
    replay.add_arguments(parser)
    recogniser.add_arguments(parser, ("greedy", "beam"), "greedy", start.BEAM_SIZE)
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
        "--timestamp_share",
        type=options.SHARE,
        metavar="S",
        help=(
            "train a released model on windows of several utterances, and this share of them with"
            " times, so that programs which read long recordings lose no text; 0: on single"
            " utterances (0.25 if utterances follow each other in their recordings, else 0)"
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
    own.add_argument(
        "--timestamps",
        action=options.OnOff,
        default=False,
        help="transcribe in segments with times, by the model's time tokens (off)",
    )
    own.add_argument(
        "--long",
        type=options.path,
        metavar="FILE",
        help=(
            "evaluate on this manifest of whole recordings of any length, decoded in segments with"
            " times"
        ),
    )
    rate = (None, "by the model's width, and whether it is fine-tuned")
    options.add_arguments(parser, learning_rate=rate)


def resolve(args) -> start.Options:
    is_demo = not args.train_manifest
    options.resolve(args, is_demo, DEMO_STEPS, EXCLUDES, NEEDS)
    how = recogniser.resolve(args, is_demo, start.BEAM_SIZE, has_times=args.timestamps)
    if args.vocab_size is None:
        args.vocab_size = DEMO_TOKENS if is_demo else USUAL_TOKENS
    origin = released.resolve(args, start.FORMS, SIZES, "base", is_demo)
    asked = start.resolve(args, origin, how)
    if args.compare_to:
        with torch.device("meta"):  # what is wrong with it is reported before the training
            info, _ = read_baseline(asked, args.compare_to)
            if args.long:
                search = start.make_search(asked, info)
                timed.make_search(*search, f"--compare_to {args.compare_to}")
    return asked


# --- data -----------------------------------------------------------------------------------------


def read_data(args, before: start.RunInfo | None = None, times: bool = False) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What the run `before`, which is resumed or used, held out is held out again. With
    `times`, the training set's segments are utterances of their own, because windows of them are
    trained on."""

    def make_demo() -> dict[str, str]:
        folder = Path(args.output_dir) / "data" / "vietnamese_demo"
        return demo.speech_corpus(folder, demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES, DEMO_SIZES)

    def stand_in() -> dict[str, Corpus]:
        positions = args.max_target_tokens or SIZES["demo"]["max_target_positions"]
        most_characters = positions - PROMPT  # a token has at least one
        return splits.stand_in(args.max_duration, most_characters)

    data = splits.resolve(args, before.data.held_out if before else ())
    checks = dataclasses.replace(data.checks, join_segments=not times)
    data = dataclasses.replace(data, checks=checks)
    return splits.load_splits(data, text.normalise, make_demo, stand_in)


def read_for(
    args, info: start.ModelInfo, resumes: bool, read: Callable[[bool], dict[str, Corpus]]
) -> tuple[dict[str, Corpus], float]:
    """The corpora that a training of this model has, and its --timestamp_share. `read`: `read_data`
    by `times`."""
    share = start.timestamp_share(args.timestamp_share, info, resumes)
    corpora = read(share != 0)
    if share is None:
        share = start.usual_share(corpora["train"], args.learning_rate, start.learning_rate(info))
        if not share and args.use_chunking:  # their segments are joined after all
            corpora = read(False)
    return corpora, share


def check_data(args, asked: start.Options) -> None:
    """--check_data: the data as a training with these flags reads them."""
    read = functools.cache(functools.partial(read_data, args, None))
    corpora = None
    if asked.origin.path:
        with torch.device("meta"):
            info, _ = start.read_released(asked, asked.origin.path)
        corpora, _ = read_for(args, info, False, read)
    splits.report_checked(corpora or read(False))


def drop_untrainable(
    args, name: str, corpus: Corpus, tokenizer: WhisperTokenizer, info: start.ModelInfo
) -> Corpus:
    """Without the utterances whose decoder input would be longer than the model's."""
    max_tokens = args.max_target_tokens or info.config["max_target_positions"]
    space = tokenizer.space if info.times else ""

    def fault(index: int) -> tuple[str, str] | None:
        tokens = len(tokenizer.prompt) + len(tokenizer.encode(space + corpus.texts[index]))
        if tokens <= max_tokens:
            return None
        reason = f"text is longer than {max_tokens} tokens (--max_target_tokens)"
        return reason, f"{tokens} tokens with the prompt"

    return splits.drop(corpus, f"{replay.NAMES[name]} set", fault, args.strict_data)


class Utterances:
    """A set of utterances as the model takes them, or of windows that begin with each of them, of
    which a `timestamp_share` has times. Only the training set is augmented and padded, and all of
    this depends on (seed, epoch, index) alone."""

    def __init__(
        self,
        args,
        corpus: Corpus,
        tokenizer: WhisperTokenizer,
        info: start.ModelInfo,
        training: bool,
        timestamp_share: float = 0.0,
    ):
        self.args = args
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.info = info
        self.training = training
        self.longest = start.input_seconds(info.config)
        self.most_tokens = args.max_target_tokens or info.config["max_target_positions"]
        self.room = self.most_tokens - len(tokenizer.prompt)
        # A released model writes it before a text, and keeps doing so if it is trained with times.
        self.space = tokenizer.space if info.times else ""
        self.pad_from = 0  # the epoch from which --pad_share applies
        self.augmentation = None
        by_default = args.wave_augment is None and info.pretrained
        if training and (args.wave_augment or by_default):
            noises = read_noises(args.noise_dir)
            self.augmentation = Augmentation(args.seed, len(corpus), self.longest, noises)
        self.packs = None
        if timestamp_share:
            tokens = np.array([len(self.encode(transcript)) for transcript in corpus.texts])
            speeds = self.speeds if training and args.speed_perturbation else None
            seed = args.seed if training else 0
            self.packs = packs.Packs(
                corpus, tokens, timestamp_share, seed, self.longest, self.room, speeds
            )

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def hours(self) -> float:
        return float(self.corpus.seconds.sum()) / 3600

    def encode(self, transcript: str) -> list[int]:
        return self.tokenizer.encode(self.space + transcript)

    def alone(self) -> "Utterances":
        """The same utterances without windows."""
        other = copy.copy(self)
        other.packs = None
        return other

    def text_length(self, index: int) -> int:
        if self.packs:
            return int(self.packs.plan(0).tokens[index])
        return len(self.corpus.texts[index])

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch: after speed perturbation, with silence at the ends, and the
        longest input's if an utterance is padded."""
        seconds = self.packs.seconds(epoch) if self.packs else self.corpus.seconds
        if not self.training:
            return seconds
        if self.args.speed_perturbation and not self.packs:
            seconds = np.minimum(seconds / self.speeds(epoch), self.longest)
        if self.augmentation:
            seconds = self.augmentation.lengths(seconds, epoch)
        return np.where(self.padded(epoch), self.longest, seconds)

    def speeds(self, epoch: int) -> np.ndarray:
        return speed_factors(self.args.seed, epoch, len(self), SPEEDS)

    def padded(self, epoch: int) -> np.ndarray:
        if self.args.pad_to_30s or epoch < self.pad_from:
            return np.full(len(self), self.args.pad_to_30s)
        return start.draw_padded(self.args.seed, epoch, len(self), self.args.pad_share)

    def filled(self, epoch: int) -> np.ndarray:
        """(N,) which of the padded utterances have zeros for features after their end, as in
        faster-whisper and openai-whisper's `transcribe`: half of them. The others have silence, as
        in transformers and whisper.cpp."""
        share = 1.0 if self.args.pad_to_30s else self.args.pad_share
        return start.draw_padded(self.args.seed, epoch, len(self), share / 2)

    def waveform(self, index: int, epoch: int) -> torch.Tensor:
        """(T,) one utterance in an epoch, without --wave_augment."""
        limit = round(self.longest * SAMPLE_RATE)
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        if self.training and self.args.speed_perturbation:
            changed = change_speed(waveform, float(self.speeds(epoch)[index]))
            if len(changed) <= limit:
                waveform = changed
        return waveform[:limit]

    def item(self, index: int, epoch: int) -> dict:
        """One utterance, or the window that begins with it: waveform (T,), decoder input and labels
        (U,), how many labels at the beginning have no loss, CTC's targets (S,), masks of
        SpecAugment."""
        args = self.args
        limit = round(self.longest * SAMPLE_RATE)
        window = None
        if self.packs:
            window = self.packs.window(index, epoch)
            waveform = change_speed(packs.read(self.corpus, window), window.speed)[:limit]
        else:
            waveform = self.waveform(index, epoch)
        lead = 0.0  # seconds of silence in front
        if self.augmentation:
            lead = float(self.augmentation.ends(len(waveform) / SAMPLE_RATE, epoch, index)[0])
            waveform = self.augmentation.apply(waveform, index, epoch)
        language = self.corpus.languages[index]
        before, rows = [], [index]
        prompt = self.tokenizer.in_language(self.tokenizer.prompt, language)
        if window:
            before, prompt, tokens = self.written(window, lead)
            rows = window.rows[: len(window.rows) - window.cut]
        else:
            tokens = self.encode(self.corpus.texts[index])
        name = self.corpus.where(index)
        if self.training and len(tokens) > self.most_tokens - len(prompt):
            raise DataError(
                f"{name}: its text has {len(tokens)} tokens, and --max_target_tokens leaves room"
                f" for {self.room}"
            )
        # Only the loss of an evaluation set is cut short: the whole text is scored.
        tokens = tokens[: self.most_tokens - len(prompt)]
        decoder_input = [*before, *prompt, *tokens]
        item = {
            "audio": waveform,
            "tokens": torch.tensor(decoder_input),
            "labels": torch.tensor([*decoder_input[1:], self.tokenizer.eos]),
            "ctc_tokens": torch.tensor(tokens, dtype=torch.long),
            "heard": len(waveform),
            "text": self.tokenizer.space.join(self.corpus.texts[row] for row in rows),
            "language": language,
            "name": name,
            "index": index,
        }
        if window:
            item["unscored"] = len(before)
        if self.training:
            item["fill_from"] = limit // HOP
        if self.training and self.padded(epoch)[index]:  # this silence is heard: it is not masked
            item["audio"] = F.pad(waveform, (0, limit - len(waveform)))
            if self.filled(epoch)[index]:
                item["fill_from"] = len(waveform) // HOP
        if self.training and args.spec_augment:
            random = np.random.default_rng([args.seed, epoch, index])
            item["frequency_masks"] = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        return item

    def written(self, window: packs.Window, lead: float) -> tuple[list[int], list[int], list[int]]:
        """A window as tokens: what was said before it, the prompt, and its text. With times, each
        utterance is between the tokens of its start and its end; of one that the window cuts, only
        the start is written, which tells a program where its next window begins."""
        tokenizer = self.tokenizer

        def write(rows: list[int], spans: list[tuple[float, float]], shift: float) -> list[int]:
            tokens = []
            for row, span in zip(rows, spans, strict=True):
                said = self.encode(self.corpus.texts[row])
                if window.timed:
                    first, last = [tokenizer.time(at / window.speed + shift) for at in span]
                    said = [first, *said, last]
                tokens += said
            return tokens

        whole = len(window.rows) - window.cut
        tokens = write(window.rows[:whole], window.spans[:whole], lead)
        if window.cut:
            tokens.append(tokenizer.time(window.spans[-1][0] / window.speed + lead))
        prompt = tokenizer.timed_prompt if window.timed else tokenizer.prompt
        prompt = tokenizer.in_language(prompt, self.corpus.languages[window.rows[0]])
        most = min(PREVIOUS_TOKENS, self.most_tokens - len(prompt) - len(tokens) - 1)
        before = write(window.before, window.spans_before, 0.0)[-max(most, 1) :]
        if before and most > 0:
            before = [tokenizer.previous, *before]
        else:
            before = []
        return before, prompt, tokens


def make_sets(
    args,
    corpora: dict[str, Corpus],
    tokenizer: WhisperTokenizer,
    info: start.ModelInfo,
    share: float,
) -> tuple[dict[str, Utterances], dict[str, Utterances]]:
    """The sets that the model learns from, windows if `share` of them have times, and those that it
    is evaluated on. Of the first, `corpora` loses what cannot be trained on."""
    trained = {}
    others = {}
    for name, corpus in corpora.items():
        if name in replay.TRAINED:
            corpora[name] = drop_untrainable(args, name, corpus, tokenizer, info)
            trained[name] = Utterances(args, corpora[name], tokenizer, info, True, share)
        else:
            others[name] = Utterances(args, corpus, tokenizer, info, training=False)
    return trained, others


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens and labels (B, U), ctc_tokens (B, S), each with its
    lengths, and for windows unscored_lengths (B,), of the labels without loss; counts are the
    numbers of targets of each loss term."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "languages": [item["language"] for item in items],
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
    if "unscored" in items[0]:
        batch["unscored_lengths"] = torch.tensor([item["unscored"] for item in items])
        batch["counts"]["attention"] -= int(batch["unscored_lengths"].sum())
    return batch


# --- loss and evaluation --------------------------------------------------------------------------


def losses(
    model: Whisper, batch: dict, encoded: torch.Tensor, mask: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Sums over the batch of the decoder's cross-entropy and, for a model from scratch, of CTC on
    the encoder, which helps it to align."""
    terms = {"attention": token_loss(model, batch, encoded, mask)}
    if model.ctc_head is not None:
        terms["ctc"] = ctc_loss(model, batch, encoded)
    return terms


def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    encoded, mask = model.encode(batch)
    return losses(model, batch, encoded, mask)


def loss_weights(args, info: start.ModelInfo) -> dict[str, float]:
    """The share of each loss term."""
    if info.ctc_tokens and args.ctc_weight:
        return {"attention": 1.0 - args.ctc_weight, "ctc": args.ctc_weight}
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
        spoken = batch["languages"]
        texts = decoding.greedy_texts(model, tokenizer, encoded, mask, search, limits, spoken)
        return texts, losses(model, batch, encoded, mask)

    rows, sums = decode_set(model, decode_batch, eval_batches, terms)
    return {**sums, **metrics.score(rows, for_scoring)}


def measure_times(data: Utterances, model: Whisper) -> kept_times.Times | None:
    """Whether a released model reads on after one utterance and knows times, on windows of a few
    utterances of `data`. None for a model without time tokens."""
    if not data.info.pretrained or data.tokenizer.timestamp_begin is None:
        return None
    info = dataclasses.replace(data.info, times=True)
    whole = (data.args, data.corpus, data.tokenizer, info)
    windows = Utterances(*whole, training=False, timestamp_share=1.0)
    batches = kept_times.windows(windows, collate, windows.packs.seed)
    return kept_times.measure(model, data.tokenizer, batches)


def measure_and_evaluate(
    data: Utterances, measured: list[float], evaluation, model: Whisper, eval_batches
) -> dict[str, tuple[float, float]]:
    """The `evaluation`. The first one of a run, which the loop makes before the first update, fills
    `measured`, too."""
    if not measured:
        measured += kept_times.to_list(measure_times(data, model))
    return evaluation(model, eval_batches)


def final_texts(
    model: Whisper, tokenizer: WhisperTokenizer, search: decoding.Search, batch: dict
) -> list[str]:
    """The texts of a batch by --decoding, with the fallback to higher temperatures."""
    encoded, mask = model.encode(batch)
    return decoding.texts(model, tokenizer, encoded, mask, search, batch.get("languages"))


def report_results(
    args,
    asked: start.Options,
    info: start.ModelInfo,
    model: Whisper,
    evaluation: dict[str, EvalBatches],
    times_before: list[float],
    weights: str,
) -> None:
    """Prints error rates and examples of the test set, or of "val" without one, decoded by
    --decoding, and what `measure_times` finds now and found before training; with --compare_to also
    a baseline's, for which the model is moved to the host. `weights`: which weights the model has,
    for the title."""
    name = "test" if "test" in evaluation else "val"
    eval_batches = evaluation[name].whole()
    texts_of = functools.partial(final_texts, model, *start.make_search(asked, info))
    rows = decode_texts(model, texts_of, eval_batches)
    title = f"{name} set, {weights}, {len(rows)} utterances, decoding: {args.decoding}"
    languages = eval_batches.dataset.data.corpus.languages
    recogniser.print_results(rows, title, asked.how, for_scoring, languages)
    measured = "val" if "val" in evaluation else "test"  # as before training
    if times := measure_times(evaluation[measured].dataset.data, model):
        before = kept_times.from_list(times_before)
        print(kept_times.report(times, before, measured))
        if warning := kept_times.warning(times, before):
            print(warning)
            recogniser.add_warning(asked.how, warning)
    if args.compare_to:
        baseline, search = baseline_for(model, asked, args.compare_to)
        texts_of = functools.partial(final_texts, baseline, *search)
        theirs = decode_texts(baseline, texts_of, eval_batches)
        recogniser.print_improvement(theirs, rows, args.compare_to, asked.how, for_scoring)


def report_long(
    args, asked: start.Options, info: start.ModelInfo, model: Whisper, weights: str
) -> None:
    """Prints error rates of the whole recordings of --long and what they lose in a row; with
    --compare_to also a baseline's, for which the model is moved to the host."""
    tokenizer, search = start.make_search(asked, info)
    search = timed.make_search(tokenizer, search, "--long")
    corpus = splits.load_splits(splits.resolve(args), text.normalise)["long"]
    rows = timed.decode_corpus(model, tokenizer, search, corpus)
    errors = metrics.read_by(rows, recogniser.readings_of(rows, asked.how, for_scoring))
    print(f"\n{len(rows)} whole recordings, {weights}, decoding with times: {args.decoding}")
    print(metrics.error_table(errors, metrics.rates(errors)))
    print(metrics.recordings_table(rows, for_scoring))
    recogniser.write_rows(rows, asked.how, recogniser.LONG)
    if args.compare_to:
        baseline, (tokenizer, search) = baseline_for(model, asked, args.compare_to)
        search = timed.make_search(tokenizer, search, f"--compare_to {args.compare_to}")
        before = timed.decode_corpus(baseline, tokenizer, search, corpus)
        print(f"{args.compare_to} on the same recordings:")
        print(metrics.recordings_table(before, for_scoring))
        readings = recogniser.readings_of(rows, asked.how, for_scoring, warns=False)
        print(metrics.improvement_table(metrics.read_by(before, readings), errors))


def baseline_for(
    model: Whisper, asked: start.Options, path: str
) -> tuple[Whisper, tuple[WhisperTokenizer, decoding.Search]]:
    """The model of --compare_to on the device of `model`, which is moved to the host, and its
    search."""
    info, weights = read_baseline(asked, path)
    baseline = start.make_model(info, weights=weights).eval()
    memory.replace_on_device(model, baseline)
    return baseline, start.make_search(asked, info)


def read_baseline(asked: start.Options, path: str) -> tuple[start.ModelInfo, dict]:
    """The model of --compare_to and its weights. Raises `UsageError`."""
    name = Path(path).name
    if name.endswith(".safetensors") or name.startswith("checkpoint_step_"):
        saved = checkpoint.read_weights(path, RECIPE, "--compare_to")
        family = start.family(asked)
        info = released.check_saved(family, saved, "Whisper")
        return info, released.whole_weights(asked.origin, family, saved)
    released.require_source(path, "--compare_to", start.FORMS)
    if not asked.origin.path:  # then --tokenizer_file is not a released model's
        asked = dataclasses.replace(asked, tokenizer_file=None)
    return start.read_released(asked, path)


# --- main -----------------------------------------------------------------------------------------


def trained(
    asked: start.Options, setup: device.Setup
) -> tuple[Whisper, start.ModelInfo, start.RunInfo | None]:
    """The model of --model_dir or --model_file, of --resume, or of the best evaluation; the run
    that trained it is None for a released one."""
    info, weights, saved = released.use(asked.origin, start.family(asked), RECIPE)
    model = start.make_model(info, weights=weights).to(setup.device).eval()
    return model, info, released.read_run_info(start.RunInfo, saved)


def transcribe(args, asked: start.Options) -> None:
    setup = device.setup(args, quiet=True)
    model, info, before = trained(asked, setup)
    tokenizer, search = start.make_search(asked, info)
    if args.timestamps:
        search = timed.make_search(tokenizer, search, "--timestamps")
        decode = functools.partial(timed.transcripts, model, tokenizer, search)
        recogniser.transcribe_files(asked.how, decode, setup, longest=None, parts=("segments",))
        return
    longest, cutting = start.long_recordings(info, before and before.data)
    texts_of = functools.partial(final_texts, model, tokenizer, search)
    recogniser.transcribe_files(asked.how, texts_of, setup, longest, cutting)


@torch.no_grad()
def evaluate_only(args, asked: start.Options) -> None:
    """--evaluate on the test set or on --long, --export, or both, without training."""
    if released.exports_adapter_only(asked.origin):
        weights = released.weights_file(asked.origin)
        return start.export_adapter(asked, card.About(RECIPE, asked.origin.path, weights))
    setup = device.setup(args)
    model, info, before = trained(asked, setup)
    if args.long:
        check_folder(args.log_dir)
        with setup.autocast():
            report_long(args, asked, info, model, "the weights named")
    elif args.evaluate:
        check_folder(args.log_dir)
        start.check_limits(asked, info.config)
        corpora = read_data(args, before, info.times)
        tokenizer, _ = start.make_search(asked, info)
        corpora.pop("train", None)
        evaluation = {}
        for name, corpus in corpora.items():
            data = Utterances(args, corpus, tokenizer, info, training=False)
            evaluation[name] = EvalBatches(args, data, collate, setup)
        with setup.autocast():
            is_same = before and splits.about_sets(corpora).get("val") == before.data.sets.get(
                "val"
            )
            times_before = before.times_before if is_same else []
            report_results(args, asked, info, model, evaluation, times_before, "the weights named")
    if args.export or args.export_adapter:
        has_results = args.evaluate and not args.long
        results = recogniser.read_results(args.log_dir) if has_results else None
        weights = released.weights_file(asked.origin)
        data = before and before.data
        about = card.About(RECIPE, asked.origin.path, weights, data, results, reading=READING)
        start.export_trained(asked, info, model, about)


def first_model(
    args, asked: start.Options, run: Run, texts: Callable[[], Iterable[str]]
) -> tuple[start.ModelInfo, Whisper]:
    """The model that training starts with: that of the checkpoint, a released one, or a new one
    with a vocabulary made from the training `texts`."""

    def new_info() -> start.ModelInfo:
        tokenizer = train_bpe(texts(), args.vocab_size, args.language)
        return start.new_info(asked, tokenizer)

    with run.model_device():
        info, weights = released.choose(
            asked.origin, start.family(asked), run.resumed, run.initial, new_info
        )
        info = dataclasses.replace(info, pad_to_30s=args.pad_to_30s)
        start.check_limits(asked, info.config)
        model = start.make_model(info, args.dropout, args.label_smoothing, weights)
    if args.freeze_encoder:
        model.freeze_encoder()
    family = start.family(asked)
    released.adapt(asked.origin, family, info, model, weights, run.resumed, run.initial, args.seed)
    start.describe(info, model, args.learning_rate)
    return info, model


def about_run(
    args,
    info: start.ModelInfo,
    corpora: dict[str, Corpus],
    global_batches: GlobalBatches,
    before: start.RunInfo | None,
) -> start.RunInfo:
    """What is kept with the weights beside the model. `before`: the same of the run that is
    resumed."""
    data = splits.run_info(splits.resolve(args), corpora)
    longest = start.longest_heard(info, data.longest, before and before.data)
    steps = run_length.choose(args, global_batches, info.pretrained).total
    pad_from = start.middle_epoch(steps, global_batches.per_epoch)
    times_before = []
    if before:
        pad_from = before.pad_from
        times_before = before.times_before
    return start.RunInfo(dataclasses.replace(data, longest=longest), pad_from, times_before)


def make_task(
    args,
    asked: start.Options,
    run: Run,
    info: start.ModelInfo,
    run_info: start.RunInfo,
    train_set: Utterances,
    evaluation: dict[str, EvalBatches],
) -> Task:
    """What the loop has to know of this recipe."""
    tokenizer, search = start.make_search(asked, info)
    last_steps = decoding.last_steps(search, info.config)
    watched = replay.watched(args, evaluation)
    heard = [
        train_set.alone(),
        *(each.dataset.data for each in (watched.sets if watched else {}).values()),
    ]
    rate = decoding.TokenRate(heard, args.seed)
    terms = loss_weights(args, info)
    evaluate_set = functools.partial(evaluate, tokenizer, search, rate, terms)
    if not run.resumed:
        val_set = evaluation["val"].dataset.data
        evaluate_set = functools.partial(
            measure_and_evaluate, val_set, run_info.times_before, evaluate_set
        )
    fit = None
    freeze = Whisper.freeze_encoder
    if not info.pretrained:
        fit = functools.partial(scratch.fit, seed=args.seed, initialised=bool(args.init_from))
        freeze = None
    return Task(
        RECIPE,
        compute_loss,
        terms,
        evaluate_set,
        info,
        run_info,
        metric="cer",
        higher_is_better=False,
        fit=fit,
        learning_rate=start.learning_rate(info),
        checkpointed=LAYERS,
        compiled=LAYERS,
        evaluate_first=info.pretrained,
        fine_tunes=info.pretrained,
        vocabulary=start.vocabulary(info, run.initial),
        reports=recogniser.REPORTS,
        plans=ForPlans(
            freeze=freeze,
            last_steps=functools.partial(evaluate, tokenizer, last_steps, rate, terms),
            compares=bool(args.compare_to),
            adapters=functools.partial(released.usual_adapters, start.family(asked), info),
        ),
        further=watched,
    )


def main(args) -> None:
    asked = resolve(args)
    if args.check_data:
        return check_data(args, asked)
    if args.transcribe:
        return transcribe(args, asked)
    if args.evaluate or released.exports_only(asked.origin):
        return evaluate_only(args, asked)
    run = begin(args, RECIPE)
    before = released.read_run_info(start.RunInfo, run.resumed)

    read = functools.cache(functools.partial(read_data, args, before))
    info, model = first_model(args, asked, run, lambda: replay.texts(read(False)))
    corpora, share = read_for(args, info, run.resumed is not None, read)
    tokenizer, _ = start.make_search(asked, info)
    info = dataclasses.replace(info, times=share > 0)
    trained, data = make_sets(args, corpora, tokenizer, info, share)

    train_set, old = trained["train"], trained.get(replay.REPLAY)
    global_batches = replay.global_batches(args, train_set, old, collate, run.setup)
    run_info = about_run(args, info, corpora, global_batches, before)
    for each in trained.values():
        each.pad_from = run_info.pad_from
    evaluation = {name: EvalBatches(args, data[name], collate, run.setup) for name in data}
    task = make_task(args, asked, run, info, run_info, train_set, evaluation)
    progress = train(args, run, model, task, global_batches, evaluation["val"])
    measured = run_info.times_before
    report = functools.partial(report_results, args, asked, info, model, evaluation, measured)
    weights = finish(args, run, model, task, report)
    if run.setup.ranks.first:
        recogniser.add_watched(asked.how, task.further, progress)
        results = recogniser.read_results(args.log_dir)
        about = card.About(
            RECIPE, asked.origin.path, weights, run_info.data, results, reading=READING
        )
        start.export_trained(asked, info, model, about)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
