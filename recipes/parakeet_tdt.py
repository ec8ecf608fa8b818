"""Parakeet-TDT: NVIDIA's FastConformer transducer with 0.6 billion parameters, fine-tuned whole on
a small GPU.

    python recipes/parakeet_tdt.py                            # no data needed: a small model, on synthetic speech
    python recipes/parakeet_tdt.py --model_file parakeet-tdt-0.6b-v3.nemo --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/parakeet_tdt.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "How are you?"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 20 s, longer ones with --use_chunking
if the manifest has segment times. The text is trained on as it is written: give it the case and
punctuation that the model shall write.

--model_file takes NVIDIA's .nemo archive, --model_dir a Hugging Face folder: Parakeet with TDT,
RNN-T or CTC, hybrids, and Nemotron ASR, which reads 40 languages and can write while it hears
(--stream MS). --from_scratch --model_size 110m makes a new model with a new vocabulary. --export
DIR --export_format hf|nemo|onnx writes what transformers, NeMo, or sherpa-onnx and onnx-asr load.

Memory: weights and gradients of 0.6 billion parameters take 4.7 GiB of the GPU, optimizer states
4.7, in 8 bits 1.2, and none with --use_cpu_offload. run_parakeet_tdt.sh has presets from 4 GB.
Expect a character error rate below 5 % on the demo's held-out sentences.

Sources: FastConformer (Rekesh et al. 2023); TDT (Xu et al. 2023); relative positions (Dai et al.
2019, "Transformer-XL"); SpecAugment (Park et al. 2019). NVIDIA's NeMo defines the model; it need
not be installed.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import device, memory, optim, options
from common.batches import EvalBatches, pad, to_device
from common.errors import UsageError, exit_with_one_line
from common.loop import ForPlans, Run, Task, begin, finish, train
from common.parts import lora
from common.parts.replay import make_batches
from common.report import check_folder
from models import card, new_rows, released
from models.parakeet import decoding, languages, live, start, vocabulary
from models.parakeet.loss import Lattice
from models.parakeet.model import CHECKPOINTED, COMPILED, Parakeet, encoder_frames
from models.parakeet.scratch import fit_to_data
from models.parakeet.settings import kind_of
from models.parakeet.start import ModelInfo, ParakeetOptions, learning_rate, tokenizer_of
from models.parakeet.tokenizer import SPACE, ParakeetTokenizer
from speech.alignment import command as alignment
from speech.alignment.letters import of_pieces
from speech.data import demo, feasible, replay, splits, watching
from speech.data.columns import Corpus
from speech.data.splits import RunInfo
from speech.data.utterances import SPEEDS, AugmentedUtterances
from speech.decoding import language_model, recogniser, results, timed, transcribing, windows
from speech.decoding.long import PARTS, by_length
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.signal.features import random_masks
from speech.writing import metrics, text, unknown

RECIPE = Path(__file__).stem
MAX_SECONDS = 20.0  # of an utterance, as in NVIDIA's fine-tuning
DITHER = 1e-5  # deviation of the noise that a training waveform gets, as in NeMo
FREQUENCY_MASKS = 2
FREQUENCY_MASK_BANDS = 27  # width of a mask
TIME_MASKS = 10
TIME_MASK_WIDTH = 0.05  # share of the utterance
FIT_UTTERANCES = 64  # that a model from scratch is fitted to
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 800
RELEASED = RunInfo(held_out=[], longest=MAX_SECONDS, demo=False)  # how a released model was trained


def add_arguments(parser) -> None:
    start.add_arguments(parser)
    splits.add_arguments(parser, allow_unknown=True, max_duration=MAX_SECONDS)
    replay.add_arguments(parser)
    watching.add_arguments(parser)
    recogniser.add_arguments(parser)
    language_model.add_arguments(parser)
    alignment.add_arguments(parser)
    rates = "fine-tuning 1e-4, or 3e-5 below 20 h of speech; from scratch by the model's width"
    options.add_arguments(parser, learning_rate=(None, rates), weight_decay=1e-3, keep_last=2)


def resolve(args) -> ParakeetOptions:
    is_demo = not args.train_manifest
    options.resolve(args, is_demo, DEMO_STEPS)
    return start.resolve(args, is_demo)


# --- data -----------------------------------------------------------------------------------------


def read_data(asked: ParakeetOptions, earlier_run: RunInfo | None = None) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What `earlier_run`, which is resumed or used, held out is held out again."""

    def make_demo() -> dict[str, str]:
        folder = Path(asked.output_dir) / "data" / "konkani_demo"
        return demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES)

    def stand_in() -> dict[str, Corpus]:
        return splits.stand_in(asked.max_duration)

    data = splits.again(asked.data, earlier_run)
    return splits.load_splits(data, text.normalise, make_demo, stand_in)


def check_texts(
    asked: ParakeetOptions, corpora: dict[str, Corpus], tokenizer: ParakeetTokenizer, is_own: bool
) -> None:
    """Prints which characters the vocabulary lacks, and which it changes. Raises `DataError` if
    many are lacking."""
    unknown.check_unknown(
        corpora,
        unknown.not_encoded(tokenizer),
        asked.allow_unknown,
        vocabulary.NEW_VOCABULARY,
        is_own,
        functools.partial(vocabulary.adding_command, tokenizer, asked),
    )
    unknown.note_rewritten(corpora, tokenizer)


def check_data(asked: ParakeetOptions) -> None:
    """--check_data. Texts and languages are compared with the model that flags name."""
    info = start.given_info(asked, RECIPE)
    corpora = read_data(asked)
    if info:
        tokenizer = tokenizer_of(info)
        check_texts(asked, corpora, tokenizer, info.own_vocabulary)
        if info.languages:
            for corpus in corpora.values():
                languages.prompts(corpus, info.languages, asked.language, tokenizer)
        corpora = without_infeasible(asked, corpora, info)
    splits.report_checked(corpora, from_scratch=info is None)


def without_infeasible(
    asked: ParakeetOptions, corpora: dict[str, Corpus], info: ModelInfo
) -> dict[str, Corpus]:
    """The corpora. Of utterances with more tokens than frames, a model that has nothing but a CTC
    head learns nothing, and a transducer little: they are left out, or noted."""

    def frames_of(seconds: float) -> int:
        return encoder_frames(int(seconds * SAMPLE_RATE), info.config)

    trained = splits.LEARNED_FROM if kind_of(info.config) == "ctc" else ()
    encode = tokenizer_of(info).encode
    return feasible.without_infeasible(
        corpora, frames_of, asked.strict_data, encode, trained=trained
    )


class Utterances(AugmentedUtterances):
    """A set of utterances as the model takes them. The training set is augmented: all of it, or
    from scratch a share, which the loop lets grow. The loss that a sample has, and the look-ahead,
    depend on (seed, epoch, index) alone."""

    def __init__(
        self,
        asked: ParakeetOptions,
        corpus: Corpus,
        tokenizer: ParakeetTokenizer,
        info: ModelInfo,
        training: bool,
    ):
        super().__init__(asked, corpus, asked.max_duration / min(SPEEDS), training)
        self.asked = asked
        self.tokenizer = tokenizer
        self.omega = info.loss["omega"] if training else 0.0
        self.config = info.config
        self.reductions = reductions(info)
        self.frequency_mask_width = FREQUENCY_MASK_BANDS / info.config["num_mel_bins"]
        self.prompts = None
        if info.languages:
            self.prompts = languages.prompts(corpus, info.languages, asked.language, tokenizer)
        self.lookaheads = []
        if training and "streaming" in info.config:
            self.lookaheads = info.config["streaming"]["lookaheads"]

    def fits(self, samples: int, tokens: list[int]) -> bool:
        """Whether CTC, if there is its loss, can align the tokens with so many samples."""
        if "ctc" not in self.reductions:
            return True
        return feasible.fits(encoder_frames(samples, self.config), tokens)

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), whether it has the plain RNN-T loss, factors
        and counts of its loss terms, masks of SpecAugment, the slot of its language, and the
        look-ahead of its chunks."""
        asked = self.asked
        transcript = self.corpus.texts[index]
        tokens = self.tokenizer.encode(transcript)
        if self.prompts:
            tokens += self.prompts.tag(index)
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        random = np.random.default_rng([asked.seed, epoch, index])
        augmented = bool(self.augmented(epoch)[index])
        waveform = self.at_speed(waveform, index, epoch, lambda count: self.fits(count, tokens))
        if self.augmentation and augmented:
            waveform = self.augmentation.apply(waveform, index, epoch)
        if self.training:
            noise = random.standard_normal(len(waveform), dtype=np.float32)
            waveform = waveform + DITHER * torch.from_numpy(noise)
        item = {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "plain": bool(random.random() < self.omega),
            "factors": {},
            "counts": {},
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }
        for term, reduction in self.reductions.items():
            item["factors"][term] = 1 / max(1, len(tokens)) if reduction == "mean" else 1.0
            item["counts"][term] = len(tokens) if reduction == "mean_volume" else 1
        if not self.fits(len(waveform), tokens):
            item["counts"]["ctc"] = 0  # CTC's loss of it is infinite, and taken as 0
        if self.training and asked.spec_augment:
            width = self.frequency_mask_width
            item["frequency_masks"] = augmented * random_masks(random, FREQUENCY_MASKS, width)
            item["time_masks"] = augmented * random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        if self.prompts:
            item["prompt"] = self.prompts.slot(index, random if self.training else None)
        if self.lookaheads:
            item["lookahead"] = int(random.choice(self.lookaheads))
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths; for each loss term
    factors (B,) of its losses and the number of its targets; prompts (B,) and lookaheads (B,) of a
    model that has some."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "plain": [item["plain"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "counts": {},
    }
    for term in items[0]["counts"]:
        factors = [item["factors"][term] for item in items]
        batch[f"{term}_factors"] = torch.tensor(factors, dtype=torch.float64)
        batch["counts"][term] = sum(item["counts"][term] for item in items)
    batch["audio"], batch["audio_lengths"] = pad([item["audio"] for item in items])
    batch["tokens"], batch["tokens_lengths"] = pad([item["tokens"] for item in items])
    if "time_masks" in items[0]:
        batch["frequency_masks"] = torch.stack([item["frequency_masks"] for item in items])
        batch["time_masks"] = torch.stack([item["time_masks"] for item in items])
    for key in ("prompt", "lookahead"):
        if key in items[0]:
            batch[f"{key}s"] = torch.tensor([item[key] for item in items])
    return batch


# --- loss -----------------------------------------------------------------------------------------


def loss_weights(info: ModelInfo) -> dict[str, float]:
    """The terms of the loss: "tdt" or "rnnt" of a transducer, "ctc" of a CTC head."""
    transducer = kind_of(info.config)
    if transducer == "ctc":
        return {"ctc": 1.0}
    share = info.loss.get("ctc", 0.0)
    return {transducer: 1.0 - share, "ctc": share} if share else {transducer: 1.0}


def reductions(info: ModelInfo) -> dict[str, str]:
    """How each term of the loss is made a mean."""
    by_loss = {kind_of(info.config): info.loss["reduction"]}
    if "ctc" in loss_weights(info) and "ctc" not in by_loss:
        by_loss["ctc"] = info.loss["ctc_reduction"]
    return by_loss


def losses(model: Parakeet, batch: dict, encoded: Tensor, frames: list[int]) -> dict[str, Tensor]:
    """Sums over the batch of the loss of the transducer, if the model has one, and of its CTC head,
    if that is trained. `encoded` (B, T, D) has the `frames` that are valid."""
    counts = torch.tensor(frames)
    lengths = batch["tokens_lengths_host"]
    terms = {}
    if model.joint is not None:
        lattice = Lattice(
            batch["tokens"],
            counts,
            lengths,
            model.joint.durations,
            model.sigma,
            torch.tensor(batch["plain"]),
            model.fastemit,
            model.joint.dropout if model.training else 0.0,
        )
        projected = model.encoder_projector(encoded)
        terms[kind_of(model.config)] = model.joint(
            projected, model.predict(batch["tokens"]), lattice
        )
    if model.trains_ctc:
        terms["ctc"] = F.ctc_loss(
            model.ctc_log_probs(encoded).transpose(0, 1),
            batch["tokens"],
            frames,
            lengths.tolist(),
            blank=model.blank,
            reduction="none",
            zero_infinity=True,
        )
    return {
        name: (losses * batch[f"{name}_factors"].to(losses.dtype)).sum()
        for name, losses in terms.items()
    }


def compute_loss(model: Parakeet, batch: dict) -> dict[str, Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    encoded, frames = model.encode(batch)
    return losses(model, batch, encoded, frames)


# --- evaluation and transcripts -------------------------------------------------------------------


def evaluate(
    tokenizer: ParakeetTokenizer,
    terms: dict[str, float],
    texts: list[str],
    model: Parakeet,
    eval_batches,
) -> dict[str, tuple[float, float]]:
    """The losses named in `terms`, CER and WER of greedy decoding, as (numerator, denominator).
    `texts`: as in `results.warn_of_style`."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, frames = model.encode(batch)
        hypotheses = decoding.decode(model, encoded, frames)
        decoded = [timed.text_of(tokens, tokenizer) for tokens in hypotheses]
        return decoded, losses(model, batch, encoded, frames)

    rows, sums = recogniser.decode_set(model, decode_batch, eval_batches, terms)
    results.warn_of_style(texts, rows)
    return {**sums, **metrics.score(rows)}


def report_results(
    asked: ParakeetOptions,
    info: ModelInfo,
    model: Parakeet,
    evaluation: dict[str, EvalBatches],
    folder: Path | None,
    compares: bool,
    weights: str,
) -> None:
    """Prints the error rates of the test set, or of "val" without one, and examples with the times
    of their words. If it `compares`, also the error rates of the released model that a flag names;
    `model` is then moved to the host. `weights`: which of the `folder` they are, for the title."""
    tokenizer = tokenizer_of(info)
    decode = functools.partial(decoding.transcripts, model, tokenizer)
    tokens = language_model.tokens_of(tokenizer)
    rows, eval_batches = results.report(
        asked.how, model, decode, evaluation, weights, tokens=tokens, folder=folder
    )
    if compares and asked.origin.path:
        info, untrained = start.Family(asked).released_model()
        memory.replace_on_device(model, untrained)
        decode = functools.partial(decoding.transcripts, untrained, tokenizer_of(info))
        released_rows = recogniser.decode_texts(untrained, decode, eval_batches)
        results.print_improvement(released_rows, rows, asked.origin.path, asked.how)


# --- main -----------------------------------------------------------------------------------------


def trained(
    asked: ParakeetOptions, setup: device.Setup
) -> tuple[Parakeet, ModelInfo, RunInfo | None]:
    """The model that is used without training, and what the run that trained it has saved."""
    return start.Family(asked).trained(RECIPE, RunInfo, setup)


def transcribe(asked: ParakeetOptions, setup: device.Setup) -> None:
    model, info, earlier_run = trained(asked, setup)
    tokenizer = tokenizer_of(info)
    if asked.stream:
        return live.transcribe(asked.how, asked.stream, model, tokenizer, setup)
    folder = released.weights_folder(asked.origin)
    tokens = language_model.tokens_of(tokenizer)
    fusion = language_model.in_search(asked.how.lm, tokens, folder)
    decode = functools.partial(decoding.transcripts, model, tokenizer, fusion=fusion)
    longest = (earlier_run or RELEASED).longest
    cutting = by_length(longest, windows.by_time(tokenizer, decoding.frame_samples(model.config)))
    transcribing.transcribe_files(asked.how, decode, setup, longest, cutting, PARTS, fusion)


def recogniser_to_align(asked: ParakeetOptions, setup: device.Setup) -> alignment.Recogniser:
    """The encoder with its CTC head, for --align. Raises `UsageError`."""
    model, info, earlier_run = trained(asked, setup)
    if model.ctc_head is None:
        raise UsageError(
            "--align: the model has no CTC head; take a hybrid or CTC model of Parakeet, or a"
            " model of recipes/wav2vec2_ctc.py"
        )
    tokenizer = tokenizer_of(info)

    def log_probs(batch: dict) -> Tensor:
        encoded, frames = model.encode(batch)
        return model.ctc_log_probs(encoded[:, : frames[0]])[0]

    return alignment.Recogniser(
        setup,
        log_probs,
        frame=decoding.frame_samples(info.config) / SAMPLE_RATE,
        vocabulary=of_pieces(
            tokenizer.pieces, SPACE, model.blank, tokenizer.unknown, tokenizer.encode
        ),
        longest=(earlier_run or RELEASED).longest,
    )


@torch.no_grad()
def evaluate_only(asked: ParakeetOptions, setup: device.Setup, batches_of: Callable) -> None:
    """--evaluate on the test set, --export, or both, without training.
    `batches_of`: `EvalBatches` with the flags."""
    model, info, earlier_run = trained(asked, setup)
    weights = released.weights_file(asked.origin)
    if asked.evaluate:
        check_folder(asked.log_dir)
        corpora = read_data(asked, earlier_run or RELEASED)
        corpora.pop("train", None)
        check_texts(asked, corpora, tokenizer_of(info), info.own_vocabulary)
        sets = make_sets(asked, info, corpora)
        evaluation = {name: batches_of(sets[name], collate, setup) for name in sets}
        with setup.autocast():
            folder = released.weights_folder(asked.origin)
            compares = earlier_run is not None
            report_results(asked, info, model, evaluation, folder, compares, "the given weights")
    measured = results.results_of(asked.log_dir, weights, bool(asked.evaluate))
    about = card.About(RECIPE, asked.origin.path, weights, earlier_run, measured)
    start.Family(asked).export(info, model, about)


def make_sets(
    asked: ParakeetOptions, info: ModelInfo, corpora: dict[str, Corpus]
) -> dict[str, Utterances]:
    """The sets of utterances."""
    tokenizer = tokenizer_of(info)
    return {
        name: Utterances(asked, corpus, tokenizer, info, training=name in splits.LEARNED_FROM)
        for name, corpus in corpora.items()
    }


def fit(seed: int, model: Parakeet, data: Utterances) -> None:
    """Fits the random weights of a new model to some training utterances, for `Task.fit`."""
    items = splits.some_items(data, seed, FIT_UTTERANCES)
    if items:
        fit_to_data(model, next(to_device([collate(items)], torch.device("cpu"))))


def make_task(
    asked: ParakeetOptions,
    run: Run,
    info: ModelInfo,
    run_info: RunInfo,
    train_set: Corpus,
    model: Parakeet,
    evaluation: dict[str, EvalBatches],
) -> Task:
    """The task: all that the loop knows of this recipe."""
    tokenizer = tokenizer_of(info)
    texts = []
    # Only a released vocabulary can have another style.
    if not info.own_vocabulary and not run.resumed:
        texts = vocabulary.some_texts(train_set, asked.seed)
    rate = learning_rate(info, float(train_set.seconds.sum()) / 3600)
    millions = optim.count_parameters(model)[0] / 1e6
    print(
        f"model: {millions:.1f} M parameters, {tokenizer.size} pieces; learning rate"
        f" {asked.learning_rate or lora.rate(model, rate):g}"
    )
    terms = loss_weights(info)
    family = start.Family(asked)
    return Task(
        RECIPE,
        compute_loss,
        terms,
        functools.partial(evaluate, tokenizer, terms, texts),
        info,
        run_info,
        metric="wer" if info.pretrained else "cer",
        higher_is_better=False,
        fit=None if info.pretrained else functools.partial(fit, asked.seed),
        learning_rate=rate,
        checkpointed=CHECKPOINTED,
        reports=results.REPORTS,
        beside=language_model.as_file(train_set.written_texts()),
        further=watching.watched(evaluation, asked.stop_when_watched_rises),
        compiled=COMPILED,
        evaluate_first=info.pretrained,
        adamw=optim.AdamWSettings(decay_embeddings=False),
        fine_tunes=info.pretrained,
        augmented_share=None if info.pretrained else asked.how.augmented_share,
        not_begun=None if info.pretrained else recogniser.not_begun,
        new_rows=new_rows.for_task(
            info.new_pieces, vocabulary.ROWS, model, vocabulary.NEW_ROWS_RATE
        ),
        vocabulary=family.vocabulary(info, run.initial),
        plans=ForPlans(compares=bool(asked.origin.path), adapters=family.usual_adapters(info)),
    )


def main(args) -> None:
    asked = resolve(args)
    if args.check_data:
        return check_data(asked)
    if args.transcribe:
        return transcribe(asked, device.setup(args, quiet=True))
    if request := alignment.resolve(args):
        return alignment.align_files(
            request, lambda: recogniser_to_align(asked, device.setup(args, quiet=True))
        )
    if released.exports_adapter_only(asked.origin):
        return start.Family(asked).export_adapter(RECIPE)
    if args.evaluate or released.exports_only(asked.origin):
        return evaluate_only(asked, device.setup(args), functools.partial(EvalBatches, args))
    run = begin(args, RECIPE)
    earlier_run = released.read_run_info(RunInfo, run.resumed)

    # A fault of the model is found before all data are checked, unless it needs a new vocabulary.
    read = functools.cache(lambda: read_data(asked, earlier_run))
    info, model = start.Family(asked).first_model(run, lambda: replay.texts(read()))
    model.trains_ctc = "ctc" in loss_weights(info)
    corpora = read()
    check_texts(asked, corpora, tokenizer_of(info), info.own_vocabulary)
    if "ctc" in loss_weights(info):
        corpora = without_infeasible(asked, corpora, info)
    sets = make_sets(asked, info, corpora)

    new, old = sets.pop("train"), sets.pop(replay.REPLAY, None)
    global_batches = make_batches(args, new, collate, run.setup, old)
    if earlier_run is None and info.pretrained:
        earlier_run = RELEASED
    run_info = splits.run_info(asked.data, corpora, earlier_run)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    task = make_task(asked, run, info, run_info, corpora["train"], model, evaluation)
    progress = train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(
        report_results, asked, info, model, evaluation, args.checkpoint_dir, True
    )
    weights = finish(args, run, model, task, report)
    if weights:  # on the first rank
        results.add_watched(asked.how, task.further, progress)
        measured = results.results_of(asked.log_dir, weights, are_new=True)
        about = card.About(RECIPE, asked.origin.path, weights, run_info, measured)
        start.Family(asked).export(info, model, about)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
