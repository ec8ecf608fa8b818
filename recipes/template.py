"""The smallest complete recipe: a recogniser of characters by CTC, to copy and adapt.

    python recipes/template.py                       # no data needed: makes a demo corpus of synthetic speech
    python recipes/template.py --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/template.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "हांव घर वचता"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 30 s. Any language: the characters are
taken from the training text, or the letters from an orthography profile (--profile).

Memory: utterances of 30 s are predicted to need 0.7 GiB, CUDA's own 0.5 GiB among them; --dry_run
8GB predicts any command. Expect a character error rate of 1 to 2 % on the demo's held-out sentences
after its 400 updates (two CPU cores: one minute). Synthetic speech proves the mechanics, not a
real-world error rate.

Sources: CTC (Graves et al. 2006); gated convolutions (Dauphin et al. 2017).
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import checkpoint, device, options
from common.batches import EvalBatches, GlobalBatches, pad
from common.device import upcast
from common.errors import exit_with_one_line
from common.loop import Task, begin, finish, train
from common.options import TRAINS, flag
from common.report import check_folder
from speech.data import feasible, splits
from speech.data.columns import Corpus
from speech.decoding import language_model, recogniser, results
from speech.decoding.ngram import Fusion
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.signal.features import FeatureNorm, LogMel, frames, valid_mask
from speech.writing import alphabet, metrics
from speech.writing.alphabet import Characters

RECIPE = Path(__file__).stem
LOSS_WEIGHTS = {"ctc": 1.0}
N_MELS = 80
SUBSAMPLING = 4  # frames of 10 ms that the network takes together
WIDTH = 128
LAYERS = 4
KERNEL = 9  # of the convolutions: 0.36 s
FIT_UTTERANCES = 200  # for the statistics of the features
DEMO_SIZES = {"train": 1200, "val": 100}  # utterances
DEMO_STEPS = 400
NEW_CHARACTERS = "start a new run with another --output_dir: its characters are its training texts'"


@dataclass(frozen=True)
class ModelInfo:
    """The record from which the model is rebuilt, saved with its weights."""

    width: Annotated[int, range(1, 8193)]
    layers: Annotated[int, range(1, 129)]
    characters: list[str]
    letters: list[list[str]] = field(default_factory=list)  # rows of an orthography profile


@dataclass(frozen=True)
class Flags:
    """Flags of the model."""

    dropout: float = flag(options.SHARE, 0.1, "P", "dropout in all layers (0.1)", TRAINS)


def add_arguments(parser) -> None:
    splits.add_arguments(parser, allow_unknown=True)
    recogniser.add_arguments(parser, augments=None)
    language_model.add_arguments(parser)
    alphabet.add_arguments(parser)
    options.add_record(parser, "model", Flags)
    options.add_arguments(parser)


def resolve(args) -> recogniser.DecodingOptions:
    is_demo = not args.train_manifest
    options.resolve(args, is_demo, DEMO_STEPS)
    return recogniser.resolve(args, is_demo)


def read_data(
    args, letters: Characters, earlier_run: splits.RunInfo | None = None
) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What `earlier_run`, which is resumed or used, held out is held out again. Texts are
    prepared as their `letters` ask for it. Those that are too long for their audio are not trained
    on."""
    from speech.data import demo

    folder = Path(args.output_dir) / "data" / "template_demo"
    corpora = splits.load_splits(
        splits.resolve(args, earlier_run),
        letters.prepare,
        demo=lambda: demo.speech_corpus(
            folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES
        ),
        stand_in=lambda: splits.stand_in(args.max_duration),
    )

    def frames_of(seconds: float) -> int:
        return encoder_frames(int(seconds * SAMPLE_RATE))

    return feasible.without_infeasible(corpora, frames_of, args.strict_data, letters.cut)


def letters_of(args, info: ModelInfo | None) -> Characters:
    """What a letter is by a checkpoint, or by --profile."""
    return alphabet.choose(args.profile, None if info is None else info.letters)


def check_texts(args, corpora: dict[str, Corpus], info: ModelInfo) -> None:
    """Prints which characters the model lacks. Raises `DataError` if they are many."""
    letters = alphabet.choose(None, info.letters)
    letters.check(corpora, info.characters, args.allow_unknown, NEW_CHARACTERS)


def encoding(info: ModelInfo) -> Callable[[str], list[int]]:
    """The function that returns the tokens of a text, by `encode`."""
    numbers = {character: token for token, character in enumerate(info.characters)}
    return functools.partial(encode, numbers, alphabet.choose(None, info.letters).cut)


def encode(numbers: dict[str, int], cut: Callable[[str], list[str]], transcript: str) -> list[int]:
    """The tokens of a text; the blank, which is no character's, stands for what the model lacks."""
    return [numbers.get(letter, len(numbers)) for letter in cut(transcript)]


class Utterances:
    """A set of utterances as the model takes them. Characters that the model does not have are left
    out."""

    def __init__(self, corpus: Corpus, info: ModelInfo):
        self.corpus = corpus
        self.encode = encoding(info)
        self.unknown = len(info.characters)

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        return self.corpus.seconds

    def item(self, index: int, epoch: int) -> dict:
        """One utterance. Whatever is random here depends on (seed, epoch, index) alone."""
        transcript = self.corpus.texts[index]
        tokens = [token for token in self.encode(transcript) if token != self.unknown]
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        return {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "targets": feasible.targets(encoder_frames(len(waveform)), tokens),
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths. batches.py lists the
    keys that a batch must have."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
    }
    batch["audio"], batch["audio_lengths"] = pad([item["audio"] for item in items])
    batch["tokens"], batch["tokens_lengths"] = pad([item["tokens"] for item in items])
    batch["counts"] = {"ctc": sum(item["targets"] for item in items)}
    return batch


def encoder_frames(samples):
    """Frames of the network's output for so many samples at 16 kHz, an int or a tensor."""
    return (frames(samples, SAMPLE_RATE) + SUBSAMPLING - 1) // SUBSAMPLING


class Layer(nn.Module):
    """A gated convolution over time with a residual connection, (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv1d(width, 2 * width, KERNEL, padding=KERNEL // 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = self.norm(x).masked_fill(padding, 0.0)  # or the convolution would see the padding
        y = self.convolution(y.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(F.glu(y, dim=-1))


class Network(nn.Module):
    def __init__(self, info: ModelInfo, dropout: float = 0.0):
        super().__init__()
        self.info = info
        self.characters = info.characters
        self.letters = alphabet.choose(None, info.letters)
        self.blank = len(info.characters)
        self.log_mel = LogMel(SAMPLE_RATE, N_MELS)
        self.feature_norm = FeatureNorm(N_MELS)
        self.input = nn.Linear(SUBSAMPLING * N_MELS, info.width)
        self.layers = nn.ModuleList(Layer(info.width, dropout) for _ in range(info.layers))
        self.norm = nn.LayerNorm(info.width)
        self.output = nn.Linear(info.width, len(info.characters) + 1)

    def forward(self, batch: dict) -> tuple[Tensor, Tensor]:
        """The batch's waveforms to log-probabilities (B, T, V + 1) of the characters and, last, the
        blank; and their lengths (B,) on the host, so that nothing waits for the device."""
        lengths = frames(batch["audio_lengths"], SAMPLE_RATE)
        x = self.feature_norm(self.log_mel(batch["audio"]), lengths)  # (B, F, M), padding is 0
        x = F.pad(x, (0, 0, 0, -x.shape[1] % SUBSAMPLING))
        x = self.input(x.unflatten(1, (-1, SUBSAMPLING)).flatten(2))  # (B, T, D)
        padding = ~valid_mask(encoder_frames(batch["audio_lengths"]), x.shape[1])[:, :, None]
        for layer in self.layers:
            x = layer(x, padding)
        log_probs = upcast(self.output(self.norm(x))).log_softmax(-1)
        return log_probs, encoder_frames(batch["audio_lengths_host"])


def fit(model: Network, data: Utterances) -> None:
    """Sets the statistics of the features from a part of the training set."""
    items = splits.some_items(data, seed=0, count=FIT_UTTERANCES)
    model.feature_norm.measure([model.log_mel(item["audio"][None])[0] for item in items])


def compute_loss(model: Network, batch: dict) -> dict[str, Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    log_probs, lengths = model(batch)
    loss = F.ctc_loss(
        log_probs.transpose(0, 1),
        batch["tokens"],
        lengths.tolist(),  # numbers, for which CTC does not wait for the device
        batch["tokens_lengths_host"].tolist(),
        blank=model.blank,
        reduction="sum",
        zero_infinity=not model.training,  # a held-out text may be too long: see `feasible`
    )
    return {"ctc": loss}


def texts_of(model: Network, batch: dict, fusion: Fusion | None = None) -> list[str]:
    """The most probable character of every frame, repeats merged, blanks removed; or the best text
    together with a language model."""
    log_probs, lengths = model(batch)
    texts = []
    for row, length in zip(log_probs.cpu(), lengths.tolist(), strict=True):
        path = row[:length].argmax(-1).unique_consecutive().tolist()
        if fusion:
            from speech.decoding.search import LM_BEAM, ctc_prefix_beam

            path, _ = ctc_prefix_beam(row[:length].numpy(), LM_BEAM, model.blank, fusion)[0]
        texts.append(text_of(model, path))
    return texts


def text_of(model: Network, path: list[int]) -> str:
    """The text of tokens, without the blanks among them."""
    return model.letters.joined(model.characters[token] for token in path if token != model.blank)


def evaluate(model: Network, eval_batches) -> dict[str, tuple[float, float]]:
    """Loss, CER and WER as (numerator, denominator), which are added up over the GPUs."""
    rows, sums = recogniser.decode_set(
        model,
        lambda batch: (texts_of(model, batch), compute_loss(model, batch)),
        eval_batches,
        LOSS_WEIGHTS,
    )
    return {**sums, **metrics.score(rows)}


def report_results(
    how: recogniser.DecodingOptions,
    model: Network,
    evaluation: dict[str, EvalBatches],
    folder: Path,
    weights: str,
) -> None:
    """Prints error rates and examples of the test set, or of "val" without one, with and without
    the language model. `weights`: which weights of the `folder` the model has, for the title."""
    if model.letters.rows:
        how = replace(how, cut=model.letters.cut)
    decode = functools.partial(texts_of, model)
    tokens = language_model_tokens(model)
    results.report(how, model, decode, evaluation, weights, tokens=tokens, folder=folder)


def language_model_tokens(model: Network) -> language_model.Tokens:
    """The tokens of the language model. The character between its sentences is a space."""
    size = len(model.characters)
    has_space = " " in model.characters
    space = model.characters.index(" ") if has_space else size + 1
    decode = functools.partial(text_of, model)
    encode, prepare = encoding(model.info), model.letters.prepare
    return language_model.Tokens(encode, decode, size + 2, space, has_space, size, prepare)


def trained(args, setup: device.Setup) -> tuple[Network, splits.RunInfo]:
    """The model that is used without training, and what the run that trained it has saved."""
    saved = checkpoint.weights_to_use(args.resume, args.checkpoint_dir, RECIPE)
    model_info, earlier_run = checkpoint.read_infos(saved, ModelInfo, splits.RunInfo)
    checkpoint.check_network(saved, lambda: Network(model_info))
    model = Network(model_info)
    checkpoint.load_weights(model, saved.model)
    return model.to(setup.device).eval(), earlier_run


def transcribe(args, how: recogniser.DecodingOptions) -> None:
    from speech.decoding import transcribing

    setup = device.setup(args, quiet=True)
    model, earlier_run = trained(args, setup)
    folder = checkpoint.path_to_use(args.resume, args.checkpoint_dir).parent
    fusion = language_model.in_search(how.lm, language_model_tokens(model), folder)
    decode = functools.partial(texts_of, model, fusion=fusion)
    transcribing.transcribe_files(how, decode, setup, earlier_run.longest, fusion=fusion)


@torch.no_grad()
def evaluate_only(args, how: recogniser.DecodingOptions) -> None:
    """--evaluate on the test set, without training."""
    setup = device.setup(args)
    model, earlier_run = trained(args, setup)
    check_folder(args.log_dir)
    corpora = read_data(args, letters_of(args, model.info), earlier_run)
    corpora.pop("train", None)
    check_texts(args, corpora, model.info)
    sets = {name: Utterances(corpora[name], model.info) for name in corpora}
    evaluation = {name: EvalBatches(args, sets[name], collate, setup) for name in sets}
    with setup.autocast():
        folder = checkpoint.path_to_use(args.resume, args.checkpoint_dir).parent
        report_results(how, model, evaluation, folder, "the given weights")


def main(args) -> None:
    how = resolve(args)
    if args.check_data:
        return splits.report_checked(read_data(args, letters_of(args, None)), from_scratch=True)
    if args.transcribe:
        return transcribe(args, how)
    if args.evaluate:
        return evaluate_only(args, how)
    run = begin(args, RECIPE)
    model_info, earlier_run = checkpoint.read_infos(run.resumed, ModelInfo, splits.RunInfo)
    letters = letters_of(args, model_info)
    corpora = read_data(args, letters, earlier_run)
    if model_info is None:
        characters = sorted(letters.vocabulary(corpora["train"].texts))
        model_info = ModelInfo(WIDTH, LAYERS, characters, letters.kept())
    check_texts(args, corpora, model_info)
    checkpoint.check_network(run.resumed, lambda: Network(model_info))
    with run.model_device():
        model = Network(model_info, args.dropout)

    sets = {name: Utterances(corpora[name], model_info) for name in corpora}
    global_batches = GlobalBatches(args, sets.pop("train"), collate, run.setup)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    task = Task(
        RECIPE,
        compute_loss,
        LOSS_WEIGHTS,
        evaluate,
        model_info,
        splits.run_info(splits.resolve(args), corpora),
        metric="cer",
        higher_is_better=False,
        fit=fit,
        not_begun=recogniser.not_begun,
        checkpointed=(Layer,),
        reports=results.REPORTS,
        beside=language_model.as_file(corpora["train"].written_texts()),
    )
    train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(report_results, how, model, evaluation, args.checkpoint_dir)
    finish(args, run, model, task, report)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
