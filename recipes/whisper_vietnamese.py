"""Vietnamese speech recognition: Whisper fine-tuned on 8 GB, or trained from scratch.

    python recipes/whisper_vietnamese.py                      # no data needed: makes a demo corpus of synthetic speech
    python recipes/whisper_vietnamese.py --language vi --model_dir whisper-base --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/whisper_vietnamese.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "hôm nay trời đẹp"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 30 s, longer ones with --use_chunking
if the manifest has segment times. The text is trained on as it is written, in NFC: case, tones,
punctuation and numbers stay. --language names its language.

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
from common.errors import DataError, UsageError, exit_with_one_line
from common.loop import ForPlans, Run, Task, begin, finish, train
from common.options import flag
from common.parts.replay import make_batches
from common.report import check_folder
from models import card, released
from models.whisper import comparing, decoding, formats, kept_times, packs, start, timed
from models.whisper.model import Whisper, ctc_loss, token_loss
from models.whisper.padding import Padding, middle_epoch, note_longer_epochs
from models.whisper.start import (
    BEAM_SIZE,
    ModelInfo,
    WhisperOptions,
    check_languages,
    check_limits,
    input_seconds,
    long_recordings,
    make_search,
    read_released,
    say_language,
    with_longest,
)
from models.whisper.tokenizer import TRANSLATE, WhisperTokenizer, spaced, train_bpe
from speech.data import demo, replay, splits, watching
from speech.data.columns import Corpus
from speech.data.utterances import AugmentedUtterances
from speech.decoding import recogniser, recordings, results, transcribing
from speech.decoding.recogniser import decode_set, decode_texts
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.signal.features import random_masks
from speech.writing import chrf, metrics, text
from speech.writing.languages import described
from speech.writing.text import (
    in_lower_case as for_scoring,  # as PhoWhisper's error rates are computed
)

RECIPE = Path(__file__).stem
FREQUENCY_MASKS = 2
FREQUENCY_MASK_WIDTH = 10 / 80  # share of the bands
TIME_MASKS = 2
TIME_MASK_WIDTH = 0.05  # share of the utterance
DEMO_SIZES = {"train": 6000, "val": 100, "test": 200}  # utterances
DEMO_LANGUAGE = "vi"
DEMO_STEPS = 1800
USUAL_TOKENS = 500
DEMO_TOKENS = 320  # with whole syllables as tokens the demo's CER was 62 % instead of 26 %
PROMPT = 4  # tokens before a text
SIZES = {"demo": formats.make_config(144, (4, 2), 4), **formats.SIZES}
READING = text.NAMES[for_scoring]
OWN_VOCABULARY = "trained weights have their own vocabulary; leave the first out"
EXCLUDES = (  # rows for `Parser.refuse`
    *(("vocab_size", model, OWN_VOCABULARY) for model in released.MODELS),
    ("vocab_size", options.COMMAND, OWN_VOCABULARY),
    ("task translate", "long", "translations are scored by utterance; leave the second out"),
)
NEEDS = (("task", (*released.MODELS, "resume"), "a new model hears too little to translate"),)


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The record of a run for later commands: the data, the epoch from which --pad_share applies,
    and what `measure_times` found before the first update (empty: nothing)."""

    data: splits.RunInfo
    pad_from: Annotated[int, range(1 << 31)]
    times_before: list[float]


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of this recipe alone."""

    # fmt: off
    vocab_size: int | None = flag(
        options.number(int, 1, formats.CONFIG["vocab_size"][-1]), None, "N",
        "tokens of a model from scratch: 256 bytes, 9 special tokens and pieces (500; 320 for the"
        " demo)")


def add_arguments(parser) -> None:
    usual = "with your data it has to be given; vi for the demo"
    start.add_arguments(parser, SIZES, None, usual)
    splits.add_arguments(parser)
    replay.add_arguments(parser)
    watching.add_arguments(parser)
    recogniser.add_arguments(parser, ("greedy", "beam"), "beam", BEAM_SIZE)
    own = options.add_record(parser, "Vietnamese", Flags)
    packs.add_arguments(parser, own)
    comparing.add_arguments(parser, own)
    parser.refuse(EXCLUDES, NEEDS)
    rate = (None, "by the model's width, and whether it is fine-tuned")
    options.add_arguments(parser, learning_rate=rate)
    parser.usual("language")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked(WhisperOptions, packs.PackFlags, comparing.ComparingFlags):
    """The request of the flags."""


def resolve(args) -> Asked:
    is_demo = not args.train_manifest
    options.resolve(args, is_demo, DEMO_STEPS)
    how = recogniser.resolve(args, is_demo, BEAM_SIZE, has_times=args.timestamps)
    if args.vocab_size is None:
        args.vocab_size = DEMO_TOKENS if is_demo else USUAL_TOKENS
    language = DEMO_LANGUAGE
    asked = start.resolve(args, SIZES, is_demo, how, demo_language=language, record=Asked)
    if args.compare_to:
        comparing.check(asked, RECIPE, args.compare_to)  # its language may not be known yet
    return asked


# --- data -----------------------------------------------------------------------------------------


def read_data(
    asked: Asked, earlier_run: RunInfo | None = None, times: bool = False
) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What `earlier_run`, which is resumed or used, held out is held out again. With
    `times`, the training set's segments are utterances of their own, because windows of them are
    trained on."""

    def make_demo() -> dict[str, str]:
        folder = Path(asked.output_dir) / "data" / "vietnamese_demo"
        return demo.speech_corpus(folder, demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES, DEMO_SIZES)

    def stand_in() -> dict[str, Corpus]:
        positions = asked.max_target_tokens or SIZES["demo"]["max_target_positions"]
        most_characters = positions - PROMPT  # a token has at least one
        return splits.stand_in(asked.max_duration, most_characters)

    data = splits.again(asked.data, earlier_run and earlier_run.data)
    checks = dataclasses.replace(data.checks, join_segments=not times)
    data = dataclasses.replace(data, checks=checks)
    return splits.load_splits(data, text.normalise, make_demo, stand_in)


def check_data(asked: Asked) -> None:
    """--check_data: the data as a training with these flags reads them."""
    read = functools.cache(functools.partial(read_data, asked, None))
    corpora = None
    if asked.origin.path:
        with torch.device("meta"):
            info, _ = read_released(asked, asked.origin.path)
        tokenizer, _ = make_search(asked, info)
        say_language(tokenizer)
        corpora, _ = packs.read_for(asked, info, False, read)
        check_languages(corpora, tokenizer)
    elif asked.language:
        print(f"language of the texts: {described(asked.language)}")
    splits.report_checked(corpora or read(False), from_scratch=asked.origin.may_be_random)


def encode(tokenizer: WhisperTokenizer, times: bool, transcript: str) -> list[int]:
    """The tokens of a text. A released model writes a space before it, also with times."""
    return tokenizer.encode(spaced(transcript) if times else transcript)


class Utterances(AugmentedUtterances):
    """A set of utterances as the model takes them. The training set is augmented, all of it or from
    scratch a share, which the loop lets grow; and it is padded."""

    def __init__(self, asked: Asked, corpus: Corpus, tokenizer, info: ModelInfo, training: bool):
        super().__init__(asked, corpus, input_seconds(info.config), training)
        self.asked = asked
        self.tokenizer = tokenizer
        self.most_tokens = asked.max_target_tokens or info.config["max_target_positions"]
        self.encode = functools.partial(encode, tokenizer, info.times)
        padding = (asked.pad_share, asked.pad_to_30s)
        self.padding = Padding(asked.seed, len(corpus), self.longest, *padding)

    def hours(self) -> float:
        return float(self.corpus.seconds.sum()) / 3600

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        return self.lengths(self.at_speeds(self.corpus.seconds, epoch), epoch)

    def lengths(self, seconds: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) lengths of what takes `seconds` (N,): with silence at the ends, and the longest
        input's if it is padded."""
        seconds = self.with_silence(seconds, epoch)
        return self.padding.lengths(seconds, epoch) if self.training else seconds

    def item(self, index: int, epoch: int) -> dict:
        """One utterance; see `example`."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        limit = round(self.longest * SAMPLE_RATE)
        waveform = self.at_speed(waveform, index, epoch, lambda count: count <= limit)
        transcript = self.corpus.texts[index]
        language = self.corpus.languages[index]
        prompt = self.tokenizer.in_language(self.tokenizer.prompt, language)
        tokens = self.encode(transcript)
        name = self.corpus.where(index)
        item = self.example(index, epoch, waveform, prompt, tokens, transcript, name)
        item["language"] = language
        return item

    def example(
        self,
        index: int,
        epoch: int,
        waveform: Tensor,
        prompt: list[int],
        tokens: list[int],
        transcript: str,
        name: str,
    ) -> dict:
        """An example that the model learns from: waveform (T,), decoder input and labels (U,),
        CTC's targets (S,), masks of SpecAugment."""
        waveform = waveform[: round(self.longest * SAMPLE_RATE)]
        augmented = bool(self.augmented(epoch)[index])
        if self.augmentation and augmented:
            waveform = self.augmentation.apply(waveform, index, epoch)
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
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens and labels (B, U), ctc_tokens (B, S), each with its
    lengths, and for windows unscored_lengths (B,), of the labels without loss; counts are the
    numbers of targets of each loss term."""
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
    batch["languages"] = [item["language"] for item in items]
    if "unscored" in items[0]:
        batch["unscored_lengths"] = torch.tensor([item["unscored"] for item in items])
        batch["counts"]["attention"] -= int(batch["unscored_lengths"].sum())
    return batch


# --- loss and evaluation --------------------------------------------------------------------------


def losses(model: Whisper, batch: dict, encoded: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Sums over the batch of the decoder's cross-entropy and, for a model from scratch, of CTC on
    the encoder, which helps it to align."""
    terms = {"attention": token_loss(model, batch, encoded, mask)}
    if model.ctc_head is not None:
        terms["ctc"] = ctc_loss(model, batch, encoded)
    return terms


def compute_loss(model: Whisper, batch: dict) -> dict[str, Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    encoded, mask = model.encode(batch)
    return losses(model, batch, encoded, mask)


def loss_weights(asked: Asked, info: ModelInfo) -> dict[str, float]:
    """The share of each loss term."""
    if info.ctc_tokens and asked.ctc_weight:
        return {"attention": 1.0 - asked.ctc_weight, "ctc": asked.ctc_weight}
    return {"attention": 1.0}


def evaluate(
    tokenizer: WhisperTokenizer,
    search: decoding.Search,
    rate: decoding.TokenRate,
    terms: dict[str, float],
    model: Whisper,
    eval_batches,
) -> dict[str, tuple[float, float]]:
    """The losses named in `terms`, CER and WER of one greedy pass, or chrF of translations, as
    (numerator, denominator)."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, mask = model.encode(batch)
        limits = rate.limits(batch["audio_lengths_host"])
        spoken = batch.get("languages")
        texts = decoding.greedy_texts(model, tokenizer, encoded, mask, search, limits, spoken)
        return texts, losses(model, batch, encoded, mask)

    rows, sums = decode_set(model, decode_batch, eval_batches, terms)
    if tokenizer.task == TRANSLATE:
        return {**sums, **chrf.in_evaluation(rows)}
    return {**sums, **metrics.score(rows, for_scoring)}


def measure_times(data: Utterances, info: ModelInfo, model: Whisper) -> kept_times.Times | None:
    """Whether a released model reads on after one utterance and knows times, on windows of a few
    utterances of `data`. None for a model without time tokens."""
    if not info.pretrained or data.tokenizer.timestamp_begin is None:
        return None
    info = dataclasses.replace(info, times=True)
    utterances = Utterances(data.asked, data.corpus, data.tokenizer, info, training=False)
    batches = kept_times.batches(packs.PackedUtterances(utterances, share=1.0), collate)
    return kept_times.measure(model, data.tokenizer, batches)


def final_texts(
    model: Whisper, tokenizer: WhisperTokenizer, search: decoding.Search, batch: dict
) -> list[str]:
    """The texts of a batch by --decoding, with the fallback to higher temperatures."""
    encoded, mask = model.encode(batch)
    return decoding.texts(model, tokenizer, encoded, mask, search, batch.get("languages"))


def report_results(
    asked: Asked,
    info: ModelInfo,
    model: Whisper,
    evaluation: dict[str, EvalBatches],
    times_before: list[float],
    weights: str,
) -> None:
    """Prints error rates and examples of the test set, or of "val" without one, decoded by
    --decoding, and what `measure_times` finds now and found before training; with --compare_to also
    a baseline's, for which the model is moved to the host. `weights`: for the title."""
    tokenizer, search = make_search(asked, info)
    decode = functools.partial(final_texts, model, tokenizer, search)
    how = dataclasses.replace(asked.how, translates=tokenizer.task == TRANSLATE)
    rows, eval_batches = results.report(how, model, decode, evaluation, weights, for_scoring)
    measured = "val" if "val" in evaluation else "test"  # as before training
    if times := measure_times(evaluation[measured].dataset.data, info, model):
        first_times = kept_times.from_list(times_before)
        print(kept_times.report(times, first_times, measured))
        if warning := kept_times.warning(times, first_times):
            print(warning)
            results.add(how, warning=warning)
    if asked.compare_to:
        baseline, search = comparing.baseline(asked, RECIPE, asked.compare_to, model, info)
        texts_of = functools.partial(final_texts, baseline, *search)
        theirs = decode_texts(baseline, texts_of, eval_batches)
        results.print_improvement(theirs, rows, asked.compare_to, how, for_scoring)


def report_long(asked: Asked, info: ModelInfo, model: Whisper) -> None:
    """Prints error rates of the whole recordings of --long; with --compare_to also a baseline's,
    for which the model is moved to the host."""
    tokenizer, search = make_search(asked, info)
    if tokenizer.task == TRANSLATE:
        raise UsageError("--long: this model translates, and translations are scored by utterance")
    corpora = splits.load_splits(asked.data, text.normalise)
    check_languages(corpora, tokenizer)
    if path := asked.compare_to:
        check_languages(corpora, comparing.check(asked, RECIPE, path, tokenizer.told), path)
    corpus = corpora["long"]
    rows = timed.decode_corpus(model, tokenizer, search, corpus, "--long")
    title = f"{len(rows)} whole recordings, the given weights, decoding with times"
    print(f"\n{title}: {asked.how.decoding}")
    their_rows = None
    if path:
        baseline, search = comparing.baseline(asked, RECIPE, path, model, info)
        their_rows = timed.decode_corpus(baseline, *search, corpus, f"--compare_to {path}")
    recordings.print_recordings(rows, their_rows, path, asked.how, for_scoring)


# --- main -----------------------------------------------------------------------------------------


def trained(asked: Asked, setup: device.Setup) -> tuple[Whisper, ModelInfo, RunInfo | None]:
    """The model that is used without training, and what the run that trained it has saved."""
    return start.Family(asked).trained(RECIPE, RunInfo, setup)


def transcribe(asked: Asked, setup: device.Setup) -> None:
    model, info, earlier_run = trained(asked, setup)
    tokenizer, search = make_search(asked, info)
    if asked.timestamps:
        search = timed.make_search(tokenizer, search, "--timestamps")
        if earlier_run and info.pretrained and not info.times:
            print(kept_times.UNTRAINED, file=sys.stderr)
        decode = functools.partial(timed.transcripts, model, tokenizer, search)
        transcribing.transcribe_files(asked.how, decode, setup, longest=None, parts=("segments",))
        return
    longest, cutting = long_recordings(info, earlier_run and earlier_run.data)
    texts_of = functools.partial(final_texts, model, tokenizer, search)
    transcribing.transcribe_files(asked.how, texts_of, setup, longest, cutting)


@torch.no_grad()
def evaluate_only(asked: Asked, setup: device.Setup, batches_of: Callable) -> None:
    """--evaluate on the test set or on --long, --export, or both, without training.
    `batches_of`: `EvalBatches` with the flags."""
    model, info, earlier_run = trained(asked, setup)
    if asked.evaluate:
        check_folder(asked.log_dir)
    if asked.long:
        with setup.autocast():
            report_long(asked, info, model)
    elif asked.evaluate:
        corpora = read_data(asked, earlier_run, info.times)
        corpora.pop("train", None)
        is_same = earlier_run and splits.about_sets(corpora).get(
            "val"
        ) == earlier_run.data.sets.get("val")
        times_before = earlier_run.times_before if is_same else []
        sets = make_sets(asked, info, corpora)
        evaluation = {name: batches_of(sets[name], collate, setup) for name in sets}
        with setup.autocast():
            report_results(asked, info, model, evaluation, times_before, "the given weights")
    weights = released.weights_file(asked.origin)
    is_new = bool(asked.evaluate and not asked.long)
    measured = results.results_of(asked.log_dir, weights, is_new)
    data = earlier_run and earlier_run.data
    about = card.About(RECIPE, asked.origin.path, weights, data, measured, reading=READING)
    start.Family(asked).export(info, model, about)


def make_sets(asked: Asked, info: ModelInfo, corpora: dict[str, Corpus]) -> dict[str, Utterances]:
    """The sets of utterances. `corpora` loses what cannot be trained on."""
    check_limits(asked, info.config)
    tokenizer, _ = make_search(asked, info)
    check_languages(corpora, tokenizer)
    if path := asked.compare_to:
        check_languages(corpora, comparing.check(asked, RECIPE, path, tokenizer.told), path)
    most_tokens = asked.max_target_tokens or info.config["max_target_positions"]

    def tokens_of(text: str) -> int:
        return len(tokenizer.prompt) + len(encode(tokenizer, info.times, text))

    sets = {}
    for name, corpus in corpora.items():
        is_trained = name in splits.LEARNED_FROM
        if is_trained:
            about = ("training set" if name == "train" else f"{name} set", tokens_of, most_tokens)
            corpora[name] = splits.drop_long_texts(corpus, *about, asked.strict_data)
        sets[name] = Utterances(asked, corpora[name], tokenizer, info, is_trained)
    return sets


def as_packs(data: Utterances, share: float) -> Utterances | packs.PackedUtterances:
    """The packs that begin with each utterance of a set, if a `share` has times; else the set."""
    if not share:
        return data
    speeds = data.speeds if data.asked.speed_perturbation else None
    return packs.PackedUtterances(data, share, data.asked.seed, speeds)


def about_run(
    asked: Asked,
    info: ModelInfo,
    corpora: dict[str, Corpus],
    middle: int,
    earlier_run: RunInfo | None,
    times_before: list[float],
) -> RunInfo:
    """The record of the run. `middle`: its middle epoch; `earlier_run`: of the resumed run."""
    data = splits.run_info(asked.data, corpora)
    data = with_longest(info, data, earlier_run and earlier_run.data)
    pad_from = earlier_run.pad_from if earlier_run else middle
    return RunInfo(data, pad_from, times_before)


def make_task(
    asked: Asked,
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
    translates = tokenizer.task == TRANSLATE
    return Task(
        RECIPE,
        compute_loss,
        terms,
        functools.partial(evaluate, tokenizer, search, rate, terms),
        info,
        run_info,
        metric="chrf" if translates else "cer",
        higher_is_better=translates,
        augmented_share=None if info.pretrained else asked.how.augmented_share,
        not_begun=None if info.pretrained else recogniser.not_begun,
        reports=results.REPORTS,
        further=watched,
        plans=ForPlans(
            freeze=Whisper.freeze_encoder if info.pretrained else None,
            last_steps=functools.partial(evaluate, tokenizer, last_steps, rate, terms),
            compares=bool(asked.compare_to),
            adapters=family.usual_adapters(info),
        ),
        **family.for_task(info, run.initial),
    )


def main(args) -> None:
    asked = resolve(args)
    if args.check_data:
        return check_data(asked)
    if args.transcribe:
        return transcribe(asked, device.setup(args, quiet=True))
    if released.exports_adapter_only(asked.origin):
        return start.Family(asked).export_adapter(RECIPE)
    if args.evaluate or released.exports_only(asked.origin):
        return evaluate_only(asked, device.setup(args), functools.partial(EvalBatches, args))
    run = begin(args, RECIPE)
    earlier_run = released.read_run_info(RunInfo, run.resumed)

    read = functools.cache(functools.partial(read_data, asked, earlier_run))

    def new_tokenizer() -> WhisperTokenizer:
        corpora = read(False)
        spoken = replay.languages(corpora)
        return train_bpe(replay.texts(corpora), args.vocab_size, asked.language, spoken)

    info, model = start.Family(asked).first_model(run, new_tokenizer)
    corpora, share = packs.read_for(asked, info, earlier_run is not None, read)
    info = dataclasses.replace(info, times=share > 0)
    sets = make_sets(asked, info, corpora)
    measure = functools.partial(measure_times, sets["val"], info)
    times_before = kept_times.at_start(
        model, run, earlier_run and earlier_run.times_before, measure
    )

    learned = {name: sets.pop(name) for name in splits.LEARNED_FROM if name in sets}
    new = as_packs(learned["train"], share)
    old = as_packs(learned[replay.REPLAY], share) if replay.REPLAY in learned else None
    global_batches = make_batches(args, new, collate, run.setup, old)
    steps = run_length.choose(args, global_batches, info.pretrained).total
    middle = middle_epoch(steps, global_batches.per_epoch)
    run_info = about_run(asked, info, corpora, middle, earlier_run, times_before)
    for data in learned.values():
        data.padding.begin = run_info.pad_from
    note_longer_epochs(global_batches, run_info.pad_from)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    task = make_task(asked, run, info, run_info, learned["train"], evaluation)
    progress = train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(report_results, asked, info, model, evaluation, times_before)
    weights = finish(args, run, model, task, report)
    if weights:  # on the first rank
        results.add_watched(asked.how, task.further, progress)
        measured = results.results_of(asked.log_dir, weights, are_new=True)
        about = card.About(
            RECIPE, asked.origin.path, weights, run_info.data, measured, reading=READING
        )
        start.Family(asked).export(info, model, about)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
