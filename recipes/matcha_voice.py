"""A voice of one's own: Matcha-TTS learns one speaker, or several, from an hour or more of
recordings on a small GPU, from the characters of any language. The voice belongs to the person who
made it: no weights, data or programs of others are in it unless a flag names them.

    python recipes/matcha_voice.py   # without data: a small model learns to speak synthetic Amharic
    python recipes/matcha_voice.py --train_manifest metadata.csv --language de --resume auto
    python recipes/matcha_voice.py --synthesize "ሰላም እናት" --output out.wav --resume checkpoints/best.safetensors

Data: CSV with the header audio_file|text|speaker_name, JSON Lines, or LJSpeech's metadata.csv; any
sample rate; clips of 0.2 to 15 s. --check_data says what is wrong with them. Each speaker of the
manifest gets a vector of their own.

--export DIR writes voice.onnx, which Piper, Home Assistant and sherpa-onnx speak with.

Memory: weights, gradients and AdamW's states of the 18 million parameters take 0.3 GiB, and 16
clips of 8 s about 2 GiB. run_matcha_voice.sh has presets from 4 GB. Expect speech of the demo's
held-out sentences in which a recogniser has a character error rate of 6 to 10 % (6.5 minutes of a
CPU's time).

Sources: Matcha-TTS (Mehta et al. 2024), flow matching (Lipman et al. 2023), monotonic alignment
search (Kim et al. 2020), Griffin and Lim (1984), Vocos (Siuzdak 2024). Written
from these and from the names and shapes of the released checkpoints.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch

from common import checkpoint, device, memory, optim, options
from common.batches import EvalBatches, GlobalBatches, pad
from common.device import upcast
from common.errors import DataError, exit_with_one_line
from common.layers import finite_layers
from common.loop import Run, Task, begin, finish, train
from common.options import ALONE, USUAL, flag
from models import card, released
from models.matcha import alignment, decoding, held_out, mels, start, texts, vocoder_training
from models.matcha.decoding import SpeakingSettings, Voice
from models.matcha.mels import HOP, SAMPLE_RATE, LogMel, frame_count, with_edges
from models.matcha.model import CHECKPOINTED, COMPILED, Matcha
from models.matcha.start import Family, MatchaOptions, ModelInfo
from models.matcha.texts import speaker_numbers
from models.matcha.tokenizer import Tokens
from models.matcha.vocoder import GriffinLim, Vocos
from speech.data import checks, demo, splits
from speech.data.columns import Corpus
from speech.data.splits import RunInfo
from speech.decoding import judge
from speech.signal.audio import read_utterance
from speech.signal.features import valid_mask
from speech.writing import reading, text

RECIPE = Path(__file__).stem
LOSS_WEIGHTS = {"duration": 1.0, "prior": 1.0, "flow": 1.0}
SIGMA = 1e-4  # deviation of the noise that is left at the end of the flow
BETAS = (0.9, 0.999)
MAX_SECONDS = 15.0  # of a clip
MIN_SECONDS = 0.2
FITTED = 200  # utterances, for the statistics of the mel frames
DEMO_SIZES = {"train": 1200, "val": 100}  # sentences
DEMO_VOICES = demo.AMHARIC_VOICES[:1]
DEMO_MANNER = demo.Manner(rate=(170, 170), pitch=(50, 50), words=(1, 4), trimmed=True)
DEMO_STEPS = 1000  # updates without data
FULL_DEMO_STEPS = 200  # of a full size, which only shows that it works
USUAL_STEPS = 40_000  # with data, from random weights
# Rows for `Parser.refuse`.
NEEDS = [(name, ("synthesize",), "") for name in ("output", "speed", "temperature", "speaker")]


@dataclass(frozen=True)
class Flags:
    """Flags of speaking."""

    # fmt: off
    synthesize: list[str] | None = flag(
        None, None, "TEXT",
        "speak texts, or a file with a text in each line, with the weights of --resume",
        USUAL, ALONE, nargs="+")
    output: str = flag(
        options.file, "speech.wav", "FILE",
        "the wav; several texts get numbers (speech.wav)", USUAL)
    speed: float = flag(options.number(float, 0.25, 4.0), 1.0, "X", "2 is twice as fast (1)", USUAL)
    temperature: float = flag(
        options.number(float, 0.0, 2.0), decoding.TEMPERATURE, "X",
        "of the noise that the speech is made of; 0: always the same (0.3)")
    speaker: str | None = flag(
        None, None, "NAME", "the manifest's name (who spoke most in training)")


def add_arguments(parser) -> None:
    start.add_arguments(parser)
    options.add_record(parser, "speaking", Flags)
    parser.refuse((), NEEDS)
    limits = {"max_duration": MAX_SECONDS, "min_duration": MIN_SECONDS}
    splits.add_arguments(parser, allow_unknown=True, **limits)
    options.add_arguments(
        parser,
        batch_size=16,
        gradient_accumulation_steps=1,
        num_epochs=(None, f"those of {USUAL_STEPS:,} updates; fine-tuning by the hours of speech"),
        learning_rate=(
            None,
            "1e-3 for the demo's size, 5e-4 for others, 1e-4 for released weights",
        ),
        max_grad_norm=5.0,
    )


def resolve(args) -> MatchaOptions:
    is_demo = not args.train_manifest
    steps = FULL_DEMO_STEPS if args.model_size in ("full", "large") else DEMO_STEPS
    usual = None if args.model_file or args.init_from else USUAL_STEPS
    options.resolve(args, is_demo, steps, usual_steps=usual)
    return start.resolve(args, is_demo)


# --- data -----------------------------------------------------------------------------------------


def read_data(asked: MatchaOptions, earlier_run: RunInfo | None = None) -> dict[str, Corpus]:
    """The corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is given.
    What `earlier_run`, which is resumed or used, held out is held out again."""
    folder = Path(asked.output_dir) / "data" / "amharic_voice"
    words = demo.AMHARIC_WORDS
    return splits.load_splits(
        splits.again(asked.data, earlier_run),
        text.normalise,
        demo=lambda: demo.speech_corpus(folder, words, DEMO_VOICES, DEMO_SIZES, manner=DEMO_MANNER),
        stand_in=lambda: splits.stand_in(asked.max_duration),
    )


def check_corpora(
    asked: MatchaOptions, corpora: dict[str, Corpus], language: str
) -> dict[str, Corpus]:
    """The corpora, with what the voice reads of their texts, without what harms the training. A
    demo and a dry run's stand-in are as they should be."""
    texts.read_corpora(corpora, language)
    if not asked.data.manifests:
        return corpora

    def fault(corpus: Corpus, index: int) -> tuple[str, str] | None:
        tokens = 2 * len(corpus.read[index]) + 3
        frames = frame_count(int(corpus.seconds[index] * SAMPLE_RATE))
        if frames < tokens:
            reason = "the text is too long for its clip, which has a frame of 12 ms for each token"
            return reason, f"{tokens} tokens in {frames} frames"
        return reading.fault(corpus.read[index], language)

    return checks.check_speech(corpora, asked.strict_data, fault)


def check_data(asked: MatchaOptions) -> None:
    """--check_data, as the language of the flags, or of the voice that they name, is read."""
    saved = None
    if not asked.language and asked.init_from:
        saved = checkpoint.read_weights(asked.init_from, RECIPE)
    elif not asked.language:
        saved = checkpoint.newest(asked.origin.resume, asked.origin.checkpoint_dir, RECIPE)
    language = start.language_of(asked, saved)
    splits.say_checked(check_corpora(asked, read_data(asked), language))


class Utterances:
    """A set of utterances as the voice learns them. The noise at which the flow starts and the time
    on its way depend on (seed, epoch, index) alone, in evaluation on (0, 0, index)."""

    def __init__(self, asked: MatchaOptions, corpus: Corpus, info: ModelInfo, training: bool):
        self.corpus = corpus
        self.tokens = Tokens(info.symbols)
        self.speakers = speaker_numbers(corpus, info.speakers)
        self.seed = asked.seed
        self.training = training

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        return self.corpus.seconds

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform with its edges (T + 768,), tokens (U,), the flow's time and noise
        (F, 80)."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        frames = frame_count(len(waveform))
        random = np.random.default_rng(
            [self.seed, epoch, index] if self.training else [0, 0, index]
        )
        time = float(random.random())
        noise = random.standard_normal((frames, mels.BANDS), dtype=np.float32)
        tokens = self.tokens.encode(self.corpus.read[index])
        if frames < len(tokens):
            raise DataError(
                f"{self.corpus.where(index)}: its {len(waveform) / SAMPLE_RATE:.2f} s are too short"
                " for its text"
            )
        return {
            "audio": with_edges(waveform),
            "tokens": torch.tensor(tokens),
            "noise": torch.from_numpy(noise),
            "time": time,
            "speaker": int(self.speakers[index]),
            "name": self.corpus.where(index),
            "index": index,
        }


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens (B, U) and noise (B, F, 80), each with its lengths.
    The targets are the tokens' durations and all values of the frames."""
    batch = {
        "names": [item["name"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [len(item["noise"]) * HOP / SAMPLE_RATE for item in items],
        "times": torch.tensor([item["time"] for item in items]),
        "speakers": torch.tensor([item["speaker"] for item in items]),
    }
    for key in ("audio", "tokens", "noise"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    values = int(batch["noise_lengths"].sum()) * mels.BANDS
    batch["counts"] = {
        "duration": int(batch["tokens_lengths"].sum()),
        "prior": values,
        "flow": values,
    }
    return batch


# --- loss and evaluation --------------------------------------------------------------------------


def compute_loss(model: Matcha, batch: dict, log_mel: LogMel) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts. The duration's is the
    squared error of its logarithm, the prior's the frames' negative log-likelihood under the means
    of their tokens, the flow's the squared error of the velocity."""
    lengths = batch["noise_lengths"]
    valid = valid_mask(lengths, batch["noise"].shape[1])[:, :, None]
    frames = model.normalised(log_mel(batch["audio"])[:, : valid.shape[1]]) * valid
    means, log_frames, vectors = model.encode(
        batch["tokens"], batch["tokens_lengths"], batch["speakers"]
    )
    path = alignment.search(means, frames, batch["tokens_lengths"], lengths)
    durations = alignment.durations(path, lengths, means.shape[1])
    is_token = valid_mask(batch["tokens_lengths"], means.shape[1])
    duration = (log_frames - (1e-8 + durations).log()).square() * is_token

    means = alignment.frames_of(means, path)
    prior = ((frames - means).square() + math.log(2 * math.pi)) / 2 * valid

    noise = batch["noise"]
    time = batch["times"][:, None, None]
    noisy = (1 - (1 - SIGMA) * time) * noise + time * frames
    velocity = model.velocity(noisy, means, batch["times"], lengths, vectors)
    flow = (velocity - (frames - (1 - SIGMA) * noise)).square() * valid
    return {
        "duration": upcast(duration).sum(),
        "prior": upcast(prior).sum(),
        "flow": upcast(flow).sum(),
    }


def evaluate(log_mel: LogMel, model: Matcha, eval_batches) -> dict[str, tuple[float, float]]:
    """The losses as (sum, count), with the same noise each time."""
    sums = {name: (0.0, 0) for name in LOSS_WEIGHTS}
    losses_of = functools.partial(compute_loss, model, log_mel=log_mel)
    for batch, results in memory.evaluated(losses_of, model, eval_batches):
        for name, (total, count) in sums.items():
            added = sum(float(losses[name]) for losses in results)
            sums[name] = total + added, count + batch["counts"][name]
    return sums


def report_results(
    log_mel: LogMel, model: Matcha, evaluation: dict[str, EvalBatches], weights: str
) -> None:
    """Prints the losses on the test set, or on "val" without one. `weights`: which weights the
    model has, for the title."""
    name = "test" if "test" in evaluation else "val"
    results = evaluate(log_mel, model, evaluation[name].whole())
    values = [f"{term} {total / max(1, count):.3f}" for term, (total, count) in results.items()]
    print(f"\n{name} set, {weights}: {'  '.join(values)}")


@torch.no_grad()
def fit(log_mel: LogMel, info: ModelInfo, seed: int, model: Matcha, data: Utterances) -> None:
    """Sets the mean and the deviation of a new model's mel frames. Released weights have theirs."""
    if info.pretrained:
        return
    items = splits.some_items(data, seed, FITTED)
    where = log_mel.window.device
    frames = torch.cat([log_mel(item["audio"][None].to(where)).flatten().cpu() for item in items])
    model.mel_mean.copy_(frames.mean())
    model.mel_std.copy_(frames.std().clamp_min(1e-3))


# --- the vocoder ----------------------------------------------------------------------------------


def train_vocoder(args, info: ModelInfo, run_info: RunInfo, corpus: Corpus, held: Corpus) -> None:
    """Trains a vocoder on the recordings of the voice, in a run of its own beside the voice's."""
    flags = vocoder_training.flags(args.vocoder_steps)
    folder = vocoder_training.FOLDER
    own = options.for_stage(args, folder, **flags, resume=args.resume and "auto")
    config = vocoder_training.size_of(info.config["channels"])
    print(f"\nvocoder: {own.max_steps} updates")
    run = begin(own, RECIPE)
    with run.model_device():
        model = vocoder_training.VocoderInTraining(config)
    task = Task(
        RECIPE,
        vocoder_training.compute_loss,
        vocoder_training.LOSS_WEIGHTS,
        vocoder_training.evaluate,
        vocoder_training.ModelInfo(config),
        run_info,
        metric="mel",
        higher_is_better=False,
        fit=None,
        adamw=optim.AdamWSettings(vocoder_training.BETAS),
    )
    crops, held_crops = (
        vocoder_training.Crops(part, own.seed, part is corpus) for part in (corpus, held)
    )
    global_batches = GlobalBatches(own, crops, vocoder_training.collate, run.setup)
    eval_batches = EvalBatches(own, held_crops, vocoder_training.collate, run.setup)
    train(own, run, model, task, global_batches, eval_batches)
    finish(own, run, model, task, lambda weights: print(f"\nvocoder: {weights}"))


# --- main -----------------------------------------------------------------------------------------


def voice_of(info: ModelInfo, model: Matcha, folder: Path) -> Voice:
    """The voice of a model, with the vocoder that was trained beside it in a folder, if any."""
    vocoder = vocoder_training.read_vocoder(folder, RECIPE) or GriffinLim()
    return Voice(model, Tokens(info.symbols), info.language, info.speakers, vocoder)


def say_vocoder(voice: Voice) -> None:
    """Says that a voice has none, which may not have been copied with its weights."""
    if not isinstance(voice.vocoder, Vocos):
        print(
            "sound: by Griffin and Lim, because no vocoder is beside the weights", file=sys.stderr
        )


def trained(asked: MatchaOptions, setup: device.Setup) -> tuple[Voice, ModelInfo, RunInfo]:
    """The voice that is used without training, and what the run that trained it has saved."""
    model, info, earlier_run = start.Family(asked).trained(RECIPE, RunInfo, setup)
    folder = released.weights_folder(asked.origin)
    return voice_of(info, model, folder), info, earlier_run


def synthesise(
    asked: MatchaOptions, how: Flags, wanted: list[str], outputs: list[Path], setup: device.Setup
) -> None:
    """--synthesize: a wav for each text."""
    voice, info, _ = trained(asked, setup)
    number = texts.speaker_of(how.speaker, info)
    texts.check_texts(wanted, voice)
    say_vocoder(voice)
    settings = SpeakingSettings(how.speed, how.temperature, asked.seed)
    with setup.autocast(), finite_layers():
        spoken = decoding.speak(voice, wanted, settings, [number] * len(wanted))
        for path, waveform in zip(outputs, spoken, strict=True):
            judge.write(path, waveform, SAMPLE_RATE)
            print(f"{path}: {len(waveform) / SAMPLE_RATE:.2f} s")


@torch.no_grad()
def evaluate_only(asked: MatchaOptions, setup: device.Setup, batches_of: Callable) -> None:
    """--evaluate or --export without training. `batches_of`: `EvalBatches` with the flags."""
    voice, info, earlier_run = trained(asked, setup)
    say_vocoder(voice)
    if asked.evaluate:
        corpora = check_corpora(asked, read_data(asked, earlier_run), info.language)
        corpora.pop("train", None)
        texts.check_known(corpora, info, asked.allow_unknown)
        sets = make_sets(asked, info, corpora)
        evaluation = {name: batches_of(sets[name], collate, setup) for name in sets}
        name = "test" if "test" in corpora else "val"
        with setup.autocast():
            report_results(LogMel().to(setup.device), voice.model, evaluation, "the given weights")
            held_out.speak_held_out(asked.held_out, setup, voice, corpora[name])
    weights = released.weights_file(asked.origin)
    start.export(asked, voice, info, card.About(RECIPE, asked.model_file, weights, earlier_run))


def make_sets(
    asked: MatchaOptions, info: ModelInfo, corpora: dict[str, Corpus]
) -> dict[str, Utterances]:
    """The sets of utterances."""
    return {
        name: Utterances(asked, corpus, info, training=name == "train")
        for name, corpus in corpora.items()
    }


def make_task(
    asked: MatchaOptions, run: Run, info: ModelInfo, run_info: RunInfo, log_mel: LogMel
) -> Task:
    """The task, all that the loop knows of this recipe."""
    return Task(
        RECIPE,
        functools.partial(compute_loss, log_mel=log_mel),
        LOSS_WEIGHTS,
        functools.partial(evaluate, log_mel),
        info,
        run_info,
        metric="flow",
        higher_is_better=False,
        fit=functools.partial(fit, log_mel, info, asked.seed),
        learning_rate=start.learning_rate(info),
        checkpointed=CHECKPOINTED,
        compiled=COMPILED,
        adamw=optim.AdamWSettings(BETAS, decay_embeddings=False),
        fine_tunes=info.pretrained or run.initial is not None,
        vocabulary=Family(asked).vocabulary(info, run.initial),
        reports=(
            *held_out.reports(asked.output_dir),
            *vocoder_training.reports(asked.origin.checkpoint_dir),
        ),
    )


def main(args) -> None:
    asked = resolve(args)
    if args.check_data:
        return check_data(asked)
    if args.synthesize:
        wanted = reading.texts_of(args.synthesize)
        outputs = judge.outputs_of(args.output, len(wanted), options.paths_in(args, "output"))
        how = options.read_record(Flags, args)
        return synthesise(asked, how, wanted, outputs, device.setup(args, quiet=True))
    if args.evaluate or released.exports_only(asked.origin):
        return evaluate_only(asked, device.setup(args), functools.partial(EvalBatches, args))
    run = begin(args, RECIPE)
    earlier_run = released.read_run_info(RunInfo, run.resumed)
    language = start.language_of(asked, run.resumed or run.initial)
    corpora = check_corpora(asked, read_data(asked, earlier_run), language)
    info, model = Family(asked).first_model(run, lambda: corpora["train"])
    texts.check_known(corpora, info, asked.allow_unknown)
    start.describe(info, model)

    sets = make_sets(asked, info, corpora)
    global_batches = GlobalBatches(args, sets.pop("train"), collate, run.setup)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    run_info = splits.run_info(asked.data, corpora)
    log_mel = LogMel().to(run.setup.device)
    task = make_task(asked, run, info, run_info, log_mel)
    train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(report_results, log_mel, model, evaluation)
    best = finish(args, run, model, task, report)
    if args.vocoder_steps:
        train_vocoder(args, info, run_info, corpora["train"], corpora["val"])
    if best:  # on the first rank
        voice = voice_of(info, model, args.checkpoint_dir)
        start.export(asked, voice, info, card.About(RECIPE, asked.model_file, best, run_info))
        with run.setup.autocast():
            held_out.draw(asked.log_dir / held_out.PICTURE, voice, corpora["val"])
            held_out.speak_held_out(asked.held_out, run.setup, voice, corpora["val"])


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
