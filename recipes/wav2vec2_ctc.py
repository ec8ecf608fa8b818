"""Speech recognition of 1,600 languages and any other: omniASR, XLS-R, MMS, HuBERT and other
wav2vec 2.0 models with CTC, fine-tuned on a small GPU.

    python recipes/wav2vec2_ctc.py                            # no data needed: a small model, on synthetic speech
    python recipes/wav2vec2_ctc.py --model_file omniASR-CTC-300M.pt --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/wav2vec2_ctc.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "nagode sosai"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 20 s, longer ones with --use_chunking
if the manifest has segment times. Texts are prepared as the released model writes, in lower case
and without punctuation (--keep_text leaves them as they are). A vocabulary of one's own takes them
as they are written, or as an orthography profile says (--profile).

--model_file takes omniASR's files (Apache-2.0; they know 1,600 languages), --model_dir a Hugging
Face folder: Wav2Vec2ForCTC, or a self-supervised model, which gets a new head. MMS and what comes
of it are for non-commercial use (CC-BY-NC-4.0). With a model that writes, --transcribe needs no
training. --export DIR --export_format hf|onnx writes what transformers, or sherpa-onnx and
onnx-asr load.

Memory: with 300 million parameters, weights and gradients take 2.4 GiB of the GPU, optimizer
states 2.4, in 8 bits 0.6, and none with --use_cpu_offload. run_wav2vec2_ctc.sh has presets from
4 GB. Expect a character error rate below 3 % on the demo's held-out sentences.

Sources: wav2vec 2.0 (Baevski et al. 2020); XLS-R (Babu et al. 2022); MMS (Pratap et al. 2023);
Omnilingual ASR (Meta 2025); CTC (Graves et al. 2006); LayerDrop (Fan et al. 2020).
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from common import device, memory, optim, options
from common.batches import EvalBatches, GlobalBatches, pad
from common.errors import exit_with_one_line
from common.loop import ForPlans, Run, Task, begin, finish, train
from common.parts import lora
from common.report import check_folder
from models import card, new_rows, released
from models.wav2vec2 import decoding, start, vocabulary
from models.wav2vec2.model import CHECKPOINTED, COMPILED, Wav2Vec2, frame_samples, frames
from models.wav2vec2.scratch import fit_to_data
from models.wav2vec2.start import ModelInfo, Wav2Vec2Options, learning_rate, tokenizer_of
from models.wav2vec2.texts import Style
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from speech.alignment import command as alignment
from speech.alignment.letters import of_characters
from speech.data import demo, feasible, splits
from speech.data.columns import Corpus, Strings
from speech.data.splits import RunInfo
from speech.data.utterances import SPEEDS, AugmentedUtterances
from speech.decoding import language_model, recogniser, results, timed, transcribing, windows
from speech.decoding.long import PARTS, by_length
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.signal.features import span_mask
from speech.writing import metrics, unknown
from speech.writing.profile import Profile

RECIPE = Path(__file__).stem
LOSS_WEIGHTS = {"ctc": 1.0}
MAX_SECONDS = 20.0  # of an utterance; omniASR was trained on up to 30 s
READS_SECONDS = 30.0  # of a piece of a recording, for a released model
TIME_SPAN = 10  # frames of a mask, as in wav2vec 2.0
CHANNEL_SPAN = 64
AT_ONCE = 1 << 22  # log-probabilities that the loss has at a time
FIT_UTTERANCES = 64  # that a model from scratch is fitted to
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 800
RELEASED = RunInfo(
    held_out=[], longest=READS_SECONDS, demo=False
)  # how a released model was trained
NEW_VOCABULARY = "add --vocab extended or --vocab own to a new run with another --output_dir"


def add_arguments(parser) -> None:
    start.add_arguments(parser)
    splits.add_arguments(parser, allow_unknown=True, max_duration=MAX_SECONDS)
    recogniser.add_arguments(parser)
    language_model.add_arguments(parser)
    alignment.add_arguments(parser)
    rates = (
        f"{start.KEPT_HEAD_RATE:g} with a released head, {start.NEW_HEAD_RATE:g} with a new one;"
        f" from scratch {start.SCRATCH_RATE:g}"
    )
    options.add_arguments(parser, learning_rate=(None, rates), weight_decay=0.0, keep_last=2)


def resolve(args) -> Wav2Vec2Options:
    is_demo = not args.train_manifest
    options.resolve(args, is_demo, DEMO_STEPS)
    return start.resolve(args, is_demo)


# --- data -----------------------------------------------------------------------------------------


def read_data(
    asked: Wav2Vec2Options,
    earlier_run: RunInfo | None,
    style: Style | None,
    letters: Profile | None = None,
) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What `earlier_run`, which is resumed or used, held out is held out again. Texts are
    prepared in a model's `style`, or by the profile of the `letters`; None leaves them as they
    are."""

    def make_demo() -> dict[str, str]:
        folder = Path(asked.output_dir) / "data" / "konkani_demo"
        return demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES)

    def stand_in() -> dict[str, Corpus]:
        return splits.stand_in(asked.max_duration)

    data = splits.again(asked.data, earlier_run)
    if style and data.manifests:
        print("texts are prepared as the model writes (--keep_text leaves them as they are)")
    return splits.load_splits(data, start.preparing(style, letters), make_demo, stand_in)


def in_its_letters(corpora: dict[str, Corpus], info: ModelInfo) -> dict[str, Corpus]:
    """The corpora. Those that stand in for data in a plan have letters that the model writes, which
    may have capitals or another script only."""
    train = corpora["train"]
    if train.paths[0] or not info.tokenizer:
        return corpora
    letters = {*"".join(train.texts)} - {" "}
    known = itertools.cycle(
        sorted(each for each in tokenizer_of(info).characters if len(each) == 1)
    )
    table = dict(zip(map(ord, sorted(letters)), known, strict=False))
    texts = Strings(text.translate(table) for text in train.texts)
    return {name: dataclasses.replace(each, texts=texts) for name, each in corpora.items()}


def check_texts(asked: Wav2Vec2Options, corpora: dict[str, Corpus], info: ModelInfo) -> None:
    """Prints which characters the vocabulary lacks, and which it changes. Raises `DataError` if
    many are lacking."""
    tokenizer = tokenizer_of(info)
    how = (asked.allow_unknown, NEW_VOCABULARY, info.own_vocabulary)
    if tokenizer.profile:
        return tokenizer.profile.check(corpora, tokenizer.characters, *how)
    unknown.check_unknown(corpora, tokenizer.lacking, *how)
    unknown.note_rewritten(corpora, tokenizer)


def check_data(asked: Wav2Vec2Options) -> None:
    """--check_data. The texts are compared with the vocabulary of the model that flags name."""
    info = start.given_info(asked, RECIPE)
    letters = asked.letters
    if info and info.tokenizer and asked.vocab is None:
        letters = tokenizer_of(info).profile
    corpora = read_data(asked, None, info.read_style() if info else None, letters)
    tokenizer = None
    if info and info.config["vocabulary"] and asked.vocab in (None, "released"):
        tokenizer = tokenizer_of(info)
        check_texts(asked, corpora, info)
        if asked.origin.path:
            start.Family(asked).require_characters(info, corpora["train"].texts)
    config = info.config if info else asked.origin.size
    corpora = drop_untrainable(asked, corpora, config, tokenizer)
    splits.report_checked(corpora, from_scratch=info is None)


def drop_untrainable(
    asked: Wav2Vec2Options,
    corpora: dict[str, Corpus],
    config: dict,
    tokenizer: Wav2Vec2Tokenizer | None,
) -> dict[str, Corpus]:
    """The corpora, of which the training set is without utterances that no CTC alignment fits, and
    without texts of unknown characters only. A vocabulary that is not made yet (None) has a token
    for each character."""

    def frames_of(seconds: float) -> int:
        return frames(int(seconds * SAMPLE_RATE), config)

    known = (tokenizer.encode, [tokenizer.unknown]) if tokenizer else ()
    return feasible.without_infeasible(corpora, frames_of, asked.strict_data, *known)


class Utterances(AugmentedUtterances):
    """A set of utterances as the model takes them. The training set is augmented: all of it, or
    with a new head a share, which the loop lets grow. Masks and skipped layers depend on this share
    and (seed, epoch, index) alone."""

    def __init__(
        self,
        asked: Wav2Vec2Options,
        corpus: Corpus,
        tokenizer: Wav2Vec2Tokenizer,
        info: ModelInfo,
        training: bool,
    ):
        super().__init__(asked, corpus, asked.max_duration / min(SPEEDS), training)
        self.asked = asked
        self.tokenizer = tokenizer
        self.config = info.config
        self.masks = start.mask_shares(asked, info)
        self.layer_drop = start.layer_drop(asked, info)

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,); in training also masks over its frames (T',)
        and over channels (D,), and which layers it goes through."""
        asked = self.asked
        transcript = self.corpus.texts[index]
        tokens = self.tokenizer.encode(transcript)
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        augmented = bool(self.augmented(epoch)[index])

        def fits(samples: int) -> bool:
            return feasible.fits(frames(samples, self.config), tokens)

        waveform = self.at_speed(waveform, index, epoch, fits)
        waveform, tokens = self.in_noise(waveform, tokens, index, epoch)
        item = {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "targets": feasible.targets(frames(len(waveform), self.config), tokens),
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }
        random = np.random.default_rng([asked.seed, epoch, index])
        if self.training and asked.spec_augment:
            time, channels = self.masks
            count = frames(len(waveform), self.config)
            width = self.config["hidden_size"]
            item["time_masks"] = augmented * span_mask(random, count, time, TIME_SPAN)
            item["channel_masks"] = augmented * span_mask(random, width, channels, CHANNEL_SPAN)
        if self.training and self.layer_drop:
            draws = random.random(self.config["num_hidden_layers"])
            item["layers"] = torch.from_numpy(draws >= self.layer_drop)
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens (B, U) and perhaps time_masks (B, T'), each with its
    lengths; channel_masks (B, D); layers (B, L), True where an utterance goes through a layer."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
    }
    batch["audio"], batch["audio_lengths"] = pad([item["audio"] for item in items])
    batch["tokens"], batch["tokens_lengths"] = pad([item["tokens"] for item in items])
    if "time_masks" in items[0]:
        masks = [item["time_masks"] for item in items]
        batch["time_masks"], batch["time_masks_lengths"] = pad(masks, False)
        batch["channel_masks"] = torch.stack([item["channel_masks"] for item in items])
    if "layers" in items[0]:
        batch["layers"] = torch.stack([item["layers"] for item in items])
    batch["counts"] = {"ctc": sum(item["targets"] for item in items)}
    return batch


# --- loss -----------------------------------------------------------------------------------------


def ctc_loss(
    model: Wav2Vec2, encoded: Tensor, tokens: Tensor, frames: list[int], lengths: Tensor
) -> Tensor:
    """The sum of the CTC losses of `encoded` (B, T, D). What cannot be aligned was rejected before
    training; an evaluation set is scored whole, so there it may occur."""
    return F.ctc_loss(
        model.ctc_log_probs(encoded).transpose(0, 1),
        tokens,
        frames,
        lengths.tolist(),  # numbers spare CTC each wait for the device
        blank=model.blank,
        reduction="sum",
        zero_infinity=not model.training,
    )


def losses(model: Wav2Vec2, batch: dict, encoded: Tensor, frames: list[int]) -> dict[str, Tensor]:
    """The sum over the batch. With omniASR's 10,288 characters the log-probabilities of a second
    would take 2 MB four times over: utterances follow each other then, and backward computes these
    tensors again."""
    tokens = batch["tokens"]
    lengths = batch["tokens_lengths_host"]
    if encoded.shape[0] * encoded.shape[1] * model.config["vocabulary"] <= AT_ONCE:
        return {"ctc": ctc_loss(model, encoded, tokens, frames, lengths)}
    total = encoded.new_zeros((), dtype=torch.float32)
    for row, count in enumerate(frames):
        utterance = encoded[row : row + 1, :count]
        total = total + recomputed(
            functools.partial(ctc_loss, model),
            utterance,
            tokens[row : row + 1, : lengths[row]],
            [count],
            lengths[row : row + 1],
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return {"ctc": total}


def compute_loss(model: Wav2Vec2, batch: dict) -> dict[str, Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    encoded, frames = model.encode(batch)
    return losses(model, batch, encoded, frames)


# --- evaluation and transcripts -------------------------------------------------------------------


def evaluate(
    tokenizer: Wav2Vec2Tokenizer, model: Wav2Vec2, eval_batches
) -> dict[str, tuple[float, float]]:
    """The loss, CER and WER of greedy decoding, as (numerator, denominator)."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, frames = model.encode(batch)
        hypotheses = decoding.decode(model, encoded, frames)
        texts = [timed.text_of(tokens, tokenizer) for tokens in hypotheses]
        return texts, losses(model, batch, encoded, frames)

    rows, sums = recogniser.decode_set(model, decode_batch, eval_batches, LOSS_WEIGHTS)
    return {**sums, **metrics.score(rows)}


def report_results(
    asked: Wav2Vec2Options,
    info: ModelInfo,
    model: Wav2Vec2,
    evaluation: dict[str, EvalBatches],
    folder: Path | None,
    compares: bool,
    weights: str,
) -> None:
    """Prints the error rates of the test set, or of "val" without one, and examples with the times
    of their words. If it `compares`, also the error rates of the released model that a flag names;
    `model` is then moved to the host. `weights`: which of the `folder` they are, for the title."""
    tokenizer = tokenizer_of(info)
    how = asked.how
    if tokenizer.profile:
        how = dataclasses.replace(how, cut=tokenizer.profile.cut)
    decode = functools.partial(decoding.transcripts, model, tokenizer)
    tokens = start.language_model_tokens(info)
    rows, eval_batches = results.report(
        how, model, decode, evaluation, weights, tokens=tokens, folder=folder
    )
    if compares and asked.origin.path and info.had_head:
        info, untrained = start.Family(asked).released_model()
        memory.replace_on_device(model, untrained)
        decode = functools.partial(decoding.transcripts, untrained, tokenizer_of(info))
        released_rows = recogniser.decode_texts(untrained, decode, eval_batches)
        results.print_improvement(released_rows, rows, asked.origin.path, how)


# --- main -----------------------------------------------------------------------------------------


def trained(
    asked: Wav2Vec2Options, setup: device.Setup
) -> tuple[Wav2Vec2, ModelInfo, RunInfo | None]:
    """The model that is used without training, and what the run that trained it has saved."""
    return start.Family(asked).trained(RECIPE, RunInfo, setup)


def transcribe(asked: Wav2Vec2Options, setup: device.Setup) -> None:
    model, info, earlier_run = trained(asked, setup)
    tokenizer = tokenizer_of(info)
    folder = released.weights_folder(asked.origin)
    fusion = language_model.in_search(asked.how.lm, start.language_model_tokens(info), folder)
    decode = functools.partial(decoding.transcripts, model, tokenizer, fusion=fusion)
    longest = (earlier_run or RELEASED).longest
    cutting = by_length(longest, windows.by_time(tokenizer, frame_samples(info.config)))
    transcribing.transcribe_files(asked.how, decode, setup, longest, cutting, PARTS, fusion)


def recogniser_to_align(asked: Wav2Vec2Options, setup: device.Setup) -> alignment.Recogniser:
    """The model of --align."""
    model, info, earlier_run = trained(asked, setup)
    tokenizer = tokenizer_of(info)

    def log_probs(batch: dict) -> Tensor:
        encoded, _ = model.encode(batch)
        return model.ctc_log_probs(encoded[0])

    return alignment.Recogniser(
        setup,
        log_probs,
        frame=frame_samples(info.config) / SAMPLE_RATE,
        vocabulary=of_characters(
            tokenizer.numbers(), model.blank, tokenizer.size, tokenizer.profile
        ),
        longest=(earlier_run or RELEASED).longest,
    )


@torch.no_grad()
def evaluate_only(asked: Wav2Vec2Options, setup: device.Setup, batches_of: Callable) -> None:
    """--evaluate on the test set, --export, or both, without training.
    `batches_of`: `EvalBatches` with the flags."""
    model, info, earlier_run = trained(asked, setup)
    weights = released.weights_file(asked.origin)
    if asked.evaluate:
        check_folder(asked.log_dir)
        letters = tokenizer_of(info).profile
        corpora = read_data(asked, earlier_run or RELEASED, info.read_style(), letters)
        corpora.pop("train", None)
        check_texts(asked, corpora, info)
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
    asked: Wav2Vec2Options, info: ModelInfo, corpora: dict[str, Corpus]
) -> dict[str, Utterances]:
    """The sets of utterances."""
    tokenizer = tokenizer_of(info)
    return {
        name: Utterances(asked, corpus, tokenizer, info, training=name == "train")
        for name, corpus in corpora.items()
    }


def fit(seed: int, model: Wav2Vec2, data: Utterances) -> None:
    """Fits the random weights of a new model to some training utterances, for `Task.fit`."""
    items = splits.some_items(data, seed, FIT_UTTERANCES)
    if items:
        fit_to_data(model, torch.cat([item["audio"] for item in items]))


def make_task(
    asked: Wav2Vec2Options,
    run: Run,
    info: ModelInfo,
    run_info: RunInfo,
    model: Wav2Vec2,
    texts: Iterable[str],
) -> Task:
    """The task: all that the loop knows of this recipe. `texts`: those of training that a person
    wrote, which are kept for the language model."""
    rate = learning_rate(info)
    millions = optim.count_parameters(model)[0] / 1e6
    print(
        f"model: {millions:.1f} M parameters, {info.config['vocabulary']:,} characters; learning"
        f" rate {asked.learning_rate or lora.rate(model, rate):g}"
    )
    starts_silent = info.has_new_head or not info.pretrained
    rows_rate = start.NEW_HEAD_ROWS_RATE if info.has_new_head else start.NEW_ROWS_RATE
    family = start.Family(asked)
    return Task(
        RECIPE,
        compute_loss,
        LOSS_WEIGHTS,
        functools.partial(evaluate, tokenizer_of(info)),
        info,
        run_info,
        metric="cer",
        higher_is_better=False,
        fit=None if info.pretrained else functools.partial(fit, asked.seed),
        learning_rate=rate,
        checkpointed=CHECKPOINTED,
        reports=results.REPORTS,
        beside=language_model.as_file(texts),
        compiled=COMPILED,
        evaluate_first=info.pretrained and not info.has_new_head,
        fine_tunes=info.pretrained,
        updates=start.updates(info),
        augmented_share=asked.how.augmented_share if starts_silent else None,
        not_begun=recogniser.not_begun,
        new_rows=new_rows.for_task(info.new_pieces, vocabulary.ROWS, model, rows_rate),
        vocabulary=family.vocabulary(info, run.initial),
        plans=ForPlans(
            compares=bool(asked.origin.path) and info.had_head, adapters=family.usual_adapters(info)
        ),
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

    # Texts are read as the model writes, so it is known before the data.
    read = functools.cache(functools.partial(read_data, asked, earlier_run))
    info, model = start.Family(asked).first_model(
        run,
        lambda info: in_its_letters(read(info.read_style(), asked.letters), info)["train"].texts,
    )
    tokenizer = tokenizer_of(info)
    if not asked.spec_augment:
        model.masked_spec_embed.requires_grad_(False)  # no frame becomes it
    corpora = dict(in_its_letters(read(info.read_style(), tokenizer.profile), info))
    check_texts(asked, corpora, info)
    corpora = drop_untrainable(asked, corpora, info.config, tokenizer)
    sets = make_sets(asked, info, corpora)

    global_batches = GlobalBatches(args, sets.pop("train"), collate, run.setup)
    if earlier_run is None and info.pretrained and not info.has_new_head:
        earlier_run = RELEASED
    run_info = splits.run_info(asked.data, corpora, earlier_run)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    task = make_task(asked, run, info, run_info, model, corpora["train"].written_texts())
    train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(
        report_results, asked, info, model, evaluation, args.checkpoint_dir, True
    )
    weights = finish(args, run, model, task, report)
    if weights:  # on the first rank
        measured = results.results_of(asked.log_dir, weights, are_new=True)
        about = card.About(RECIPE, asked.origin.path, weights, run_info, measured)
        start.Family(asked).export(info, model, about)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
