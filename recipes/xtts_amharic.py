"""XTTS for Amharic: Coqui's XTTS-v2, whose GPT learns a language or a voice from little speech on a
small GPU. The released weights, and all that is tuned from them, are for non-commercial use only
(Coqui Public Model License).

    python recipes/xtts_amharic.py --check_data --train_manifest train.csv --use_amharic_g2p --model_dir XTTS-v2
    python recipes/xtts_amharic.py --model_dir XTTS-v2 --train_manifest train.csv --use_amharic_g2p --resume auto
    python recipes/xtts_amharic.py --synthesize "ሰላም ለዓለም።" --speaker_wav voice.wav --output out.wav --resume checkpoints/best.safetensors

Data: CSV with the header audio_file|text|speaker_name, JSON Lines, or LJSpeech's metadata.csv; any
sample rate; clips of 0.5 to 11.6 s and texts of up to 200 tokens. --check_data says what is wrong
with them. A row may have a language (lang).

--model_dir takes a folder with Coqui's model.pth, config.json, vocab.json, dvae.pth and
mel_stats.pth. Its vocabulary has no Ethiopic letters: --use_amharic_g2p or --extend_vocab. The DVAE
makes the codes that are learned and is frozen, as is the vocoder. --export DIR writes a folder that
Coqui loads.

Memory: weights, gradients and AdamW's states of the 441 million parameters take 6.6 GiB, with
--optimizer adamw_8bit 4.1. --gradient_checkpointing, --sdpa and mixed precision reduce what comes
on top. run_xtts_amharic.sh has presets from 4 GB. Nobody has measured yet what to expect on real
recordings: listen to OUTPUT_DIR/speech.

Sources: XTTS (Casanova et al. 2024), Tortoise (Betker 2023), Perceiver (Jaegle et al. 2021), GPT-2
(Radford et al. 2019). Written from these and from the shapes of the released files; Coqui's code is
not used.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from common.device import upcast
from common.errors import exit_with_one_line
from common.layers import finite_layers
from common.loop import ForPlans, Run, Task, begin, finish, train
from common.options import flag
from common.parts.replay import make_batches
from models import card, new_rows, released
from models.xtts import exports, new_tokens, speaking, start, texts
from models.xtts.codec import SAMPLE_RATE, SAMPLES_PER_CODE, code_count
from models.xtts.decoding import Sampling
from models.xtts.frozen import Frozen
from models.xtts.model import CHECKPOINTED, COMPILED, GPT
from models.xtts.speaking import Synthesiser
from models.xtts.start import ModelInfo, XttsOptions, first_model, known_info, reader_of
from models.xtts.texts import Texts, most_text
from models.xtts.vocoder import OUTPUT_RATE
from speech.data import checks, replay, splits, watching
from speech.data.columns import Corpus
from speech.data.splits import RunInfo
from speech.decoding import judge
from speech.signal.audio import read_utterance
from speech.writing import reading, text

RECIPE = Path(__file__).stem
LOSS_WEIGHTS = {"text": 0.01, "mel": 1.0}
STOPS = 4  # STOP targets after the codes, as the released model was trained
BETAS = (0.9, 0.96)
MAX_SAMPLES = 255_995  # of a clip at 22.05 kHz
MIN_SECONDS = 0.5  # of a clip
FITTED = 64  # utterances that the biases of new tokens are fitted to
# Rows for `Parser.refuse`.
EXCLUDES = (("max_audio_length", "max_duration", "both limit clips; give one"),)


@dataclass(frozen=True)
class Flags:
    """Flags of this recipe alone."""

    # fmt: off
    max_audio_length: int | None = flag(
        options.number(int, SAMPLE_RATE // 2, 600_000), None, "N",
        f"longest clip, samples at 22.05 kHz, in place of --max_duration ({MAX_SAMPLES})")


def add_arguments(parser) -> None:
    start.add_arguments(parser)
    speaking.add_arguments(parser)
    limits = {"max_duration": (MAX_SAMPLES / SAMPLE_RATE, "11.6"), "min_duration": MIN_SECONDS}
    needed = (None, "it has to be given")
    splits.add_arguments(parser, allow_unknown=True, train_manifest=needed, **limits)
    replay.add_arguments(parser)
    watching.add_arguments(parser)
    options.add_arguments(parser, learning_rate=(None, "5e-6"), keep_last=2)
    options.add_record(parser, parser, Flags)
    parser.refuse(EXCLUDES)


def resolve(args) -> XttsOptions:
    options.resolve(args, False, 0)
    if args.max_audio_length:
        args.max_duration = args.max_audio_length / SAMPLE_RATE
    return start.resolve(args, RECIPE)


# --- data -----------------------------------------------------------------------------------------


def read_data(asked: XttsOptions, earlier_run: RunInfo | None = None) -> dict[str, Corpus]:
    """The corpora "train", "val" and, if there is one, "test". What `earlier_run`, which is
    resumed or used, held out is held out again."""
    return splits.load_splits(
        splits.again(asked.data, earlier_run),
        text.normalise,
        stand_in=lambda: splits.stand_in(asked.max_duration, texts.MAX_TEXT),
    )


def check_corpora(
    asked: XttsOptions, corpora: dict[str, Corpus], reader: Texts, config: dict
) -> dict[str, Corpus]:
    """The corpora without what harms the training, and without texts and clips that the model has
    no letters or positions for. A dry run's stand-in is as it should be. Raises `DataError` if the
    vocabulary lacks many characters."""
    if not asked.data.manifests:
        return corpora
    most_codes = config["mel_positions"] - STOPS

    def fault(corpus: Corpus, index: int) -> tuple[str, str] | None:
        reason = reader.fault(corpus.read[index], corpus.languages[index], most_text(config))
        codes = code_count(int(corpus.seconds[index] * SAMPLE_RATE))
        if reason is None and codes > most_codes:
            reason = f"clip is longer than {most_codes} codes", f"{codes} codes"
        return reason

    corpora = checks.check_speech(corpora, asked.strict_data, fault)
    if reader.vocabulary:
        reader.check_unknown(corpora, asked.allow_unknown)
    return corpora


def check_data(asked: XttsOptions) -> None:
    """--check_data, for the model that flags name."""
    info, earlier_run = known_info(asked)
    corpora = read_data(asked, earlier_run)
    reader, config = reader_of(asked, info, earlier_run is None, corpora)
    splits.say_checked(check_corpora(asked, corpora, reader, config))


class Utterances:
    """A set of utterances as the GPT takes them. The conditioning slice, of the clip itself or of
    another one of its speaker, depends on (seed, epoch, index) alone; in evaluation it has the
    middle length and is the beginning of the clip."""

    def __init__(
        self, asked: XttsOptions, corpus: Corpus, vocabulary: Texts, info: ModelInfo, training: bool
    ):
        self.seed = asked.seed
        self.corpus = corpus
        self.vocabulary = vocabulary
        self.training = training
        self.tokens = vocabulary.tokens_of(corpus)
        self.from_other = info.condition == "other"
        self.slice = info.slice
        speakers = np.array(corpus.speakers.codes)
        self.clips = [
            np.flatnonzero(speakers == code) for code in range(len(corpus.speakers.names))
        ]

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def hours(self) -> float:
        return float(self.corpus.seconds.sum()) / 3600

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) what each utterance takes in the GPT, latents, text and codes, as whole seconds of
        codes. It is more than the length of the clip, also for --max_batch_seconds. It is rounded,
        because global batches of utterances with the same number of positions teach less."""
        codes = np.ceil(self.corpus.seconds * SAMPLE_RATE / SAMPLES_PER_CODE)
        positions = codes + [len(tokens) for tokens in self.tokens] + 32
        return np.ceil(positions * SAMPLES_PER_CODE / SAMPLE_RATE)

    def text_length(self, index: int) -> int:
        return len(self.tokens[index])

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), the slice (S,), and the codes (first, last)
        that have no loss, because the slice is made of them."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        codes = code_count(len(waveform))
        random = np.random.default_rng([self.seed, epoch, index])
        shortest, longest = self.slice
        length = (shortest + longest) // 2
        if self.training:
            length = int(random.integers(shortest, longest + 1))
        voice = waveform
        clips = self.clips[self.corpus.speakers.codes[index]]
        is_other = self.from_other and len(clips) > 1
        if is_other:
            step = int(random.integers(1, len(clips))) if self.training else 1
            chosen = clips[(np.searchsorted(clips, index) + step) % len(clips)]
            voice = read_utterance(self.corpus, int(chosen), SAMPLE_RATE)
        if length > len(voice):
            length = len(voice) // 2
        first = int(random.integers(0, len(voice) - length + 1)) if self.training else 0
        heard = first // SAMPLES_PER_CODE, min(codes, (first + length) // SAMPLES_PER_CODE)
        return {
            "audio": waveform,
            "tokens": torch.from_numpy(self.tokens[index]).long(),
            "slice": F.pad(voice[first : first + length], (0, longest - length)),
            "heard": (0, 0) if is_other else heard,
            "codes": codes,
            "language": self.vocabulary.language_of(self.corpus.languages[index]),
            "name": self.corpus.where(index),
            "index": index,
        }


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths, and slices (B, S).
    The targets of a text are its tokens and STOP. The targets of a clip are the codes outside the
    slice, and four STOPs."""
    audio, audio_lengths = pad([item["audio"] for item in items])
    tokens, tokens_lengths = pad([item["tokens"] for item in items])
    heard = [item["heard"] for item in items]
    codes = [item["codes"] for item in items]
    targets = [
        count - (last - first) + STOPS for count, (first, last) in zip(codes, heard, strict=True)
    ]
    return {
        "names": [item["name"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "languages": [item["language"] for item in items],
        "audio": audio,
        "audio_lengths": audio_lengths,
        "tokens": tokens,
        "tokens_lengths": tokens_lengths,
        "slices": torch.stack([item["slice"] for item in items]),
        "heard": heard,
        "codes": codes,
        "counts": {"text": int(tokens_lengths.sum()) + len(items), "mel": sum(targets)},
    }


# --- loss and evaluation --------------------------------------------------------------------------


def place(batch: dict, latents: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Where everything is in the GPT's input. A row has the latents, START and the text, START, the
    codes and three STOPs, without gaps, so that causal attention needs no mask. Returns the places
    (B, L) of a row's positions in the padded latents | text | codes, and for each loss term (2, N):
    the outputs in (B * L,) that have a target, and their targets in (B * U,) of that term."""
    words = [length + 1 for length in batch["tokens_lengths_host"].tolist()]
    sounds = [codes + STOPS for codes in batch["codes"]]
    longest = latents + max(w + s for w, s in zip(words, sounds, strict=True))
    # Nothing attends to the padding, which follows a row.
    places = torch.zeros(len(words), longest, dtype=torch.long)
    chosen = {"text": [], "mel": []}
    for row, (w, s, (first, last)) in enumerate(zip(words, sounds, batch["heard"], strict=True)):
        places[row, : latents + w] = torch.arange(latents + w)
        places[row, latents + w : latents + w + s] = torch.arange(s) + latents + max(words)
        row_begin = row * longest + latents
        tokens = torch.arange(w)
        codes = torch.cat([torch.arange(first), torch.arange(last, s)])
        chosen["text"].append(torch.stack([tokens + row_begin, tokens + row * max(words)]))
        chosen["mel"].append(torch.stack([codes + row_begin + w, codes + row * max(sounds)]))
    return places, {name: torch.cat(pairs, dim=1) for name, pairs in chosen.items()}


def targets_of(batch: dict, config: dict, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The targets of text (B, U + 1) and clip (B, N + 4), each followed by STOPs."""
    where = batch["audio"].device
    counts = torch.tensor(batch["codes"]).to(where, non_blocking=True)
    steps = torch.arange(max(batch["codes"]) + STOPS, device=where)
    sounds = F.pad(codes, (0, STOPS + 1))[:, : len(steps)]
    sounds = sounds.masked_fill(steps >= counts[:, None], config["stop_audio"])
    words = F.pad(batch["tokens"], (0, 1))
    steps = torch.arange(words.shape[1], device=where)
    words = words.masked_fill(steps >= batch["tokens_lengths"][:, None], config["stop_text"])
    return words, sounds


def token_losses(model: GPT, batch: dict, frozen: Frozen) -> dict[str, tuple[Tensor, Tensor]]:
    """The cross-entropies (N,) of text and codes, and the row in the batch (N,) of each."""
    config = model.config
    words, sounds = targets_of(batch, config, frozen.codes(batch["audio"]))
    # The input is START and the targets, one position later.
    text_input = F.pad(words, (1, 0), value=config["start_text"])[:, :-1]
    mel_input = F.pad(sounds, (1, 0), value=config["start_audio"])[:, :-1]
    latents = model.condition(frozen.conditioning_mel(batch["slices"]))
    places, chosen = place(batch, latents.shape[1])
    x = torch.cat([latents, model.embed_text(text_input), model.embed_mel(mel_input)], dim=1)
    places = places.to(x.device, non_blocking=True)
    x = x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
    hidden = model.hidden(x).flatten(0, 1)
    losses = {}
    for name, head, targets in (("text", model.text_head, words), ("mel", model.mel_head, sounds)):
        outputs, wanted = chosen[name].to(x.device, non_blocking=True)
        wanted = targets.flatten()[wanted]
        # The logits take much memory: no name may keep them.
        values = F.cross_entropy(upcast(head(hidden[outputs])), wanted, reduction="none")
        losses[name] = values, outputs // x.shape[1]
    return losses


def compute_loss(model: GPT, batch: dict, frozen: Frozen) -> dict[str, Tensor]:
    """Sums over the batch of the cross-entropies of text and codes; the loop divides by the
    global batch's counts."""
    return {name: values.sum() for name, (values, _) in token_losses(model, batch, frozen).items()}


def evaluate(
    frozen: Frozen, languages: list[str], model: GPT, eval_batches
) -> dict[str, tuple[float, float]]:
    """The losses as (sum, count). With several `languages` also one for each ("mel_am")."""
    several = len(languages) > 1
    keys = [(name, language) for name in LOSS_WEIGHTS for language in languages if several]
    sums = {name: (0.0, 0) for name in [*LOSS_WEIGHTS, *("_".join(key) for key in keys)]}

    def losses_of(batch: dict) -> tuple[list[str], dict]:
        return batch["languages"], token_losses(model, batch, frozen)

    for _, results in memory.evaluated(losses_of, model, eval_batches):
        for spoken, losses in results:
            for name, (values, rows) in losses.items():
                for row, language in enumerate(spoken):
                    own = values[rows == row].tolist()
                    for key in [name, f"{name}_{language}"] if several else [name]:
                        total, count = sums[key]
                        sums[key] = sum(own, start=total), count + len(own)
    return sums


def report_results(
    synthesiser: Synthesiser, evaluation: dict[str, EvalBatches], weights: str
) -> None:
    """Prints the losses on the test set, or on "val" without one: a line for all languages and, if
    there are several, one for each. `weights`: which weights the model has, for the title."""
    name = "test" if "test" in evaluation else "val"
    eval_batches = evaluation[name].whole()
    languages = synthesiser.texts.languages_of(eval_batches.dataset.data.corpus)
    results = evaluate(synthesiser.frozen, languages, synthesiser.model, eval_batches)
    print(f"\n{name} set, {weights} (cross-entropy per token and per code)")
    lines: dict[str, list[str]] = {}
    for key, (total, count) in results.items():
        term, _, language = key.partition("_")
        lines.setdefault(language or "all", []).append(f"{term} {total / max(1, count):.3f}")
    for language, values in lines.items():
        print(f"  {language}: {'  '.join(values)}")


# --- a new model ----------------------------------------------------------------------------------


@torch.no_grad()
def fit(frozen: Frozen, added: int, seed: int, model: GPT, data: Utterances) -> None:
    """Fits the biases of the `added` tokens of a new model to some training utterances."""
    if not added:
        return
    items = splits.some_items(data, seed, FITTED)
    where = frozen.conditioning_mel.mel_stats.device
    model.to(where)

    def forward() -> None:
        for batch in to_device([collate([item]) for item in items], where):
            token_losses(model, batch, frozen)

    new_tokens.fit_new_tokens(model, added, forward)


# --- main -----------------------------------------------------------------------------------------


def trained(
    asked: XttsOptions, setup: device.Setup
) -> tuple[Synthesiser, ModelInfo, RunInfo | None]:
    """The model that is used without training, and what the run that trained it has saved."""
    return start.trained(asked, setup)


def show_text(asked: XttsOptions, wanted: list[str]) -> None:
    """--show_text, by the model that flags name."""
    info, earlier_run = known_info(asked)
    reader, config = reader_of(asked, info, earlier_run is None, {})
    texts.show(wanted, reader, most_text(config))


def synthesise(
    asked: XttsOptions,
    wanted: list[str],
    sampling: Sampling,
    outputs: list[Path],
    setup: device.Setup,
) -> None:
    """--synthesize: a wav for each text."""
    clips = speaking.read_references(asked.voices, setup.device)
    synthesiser, _, _ = trained(asked, setup)
    lines = [synthesiser.texts.check(line) for line in wanted]
    with setup.autocast(), finite_layers():
        voice = speaking.voice_of(synthesiser, clips)
        spoken = speaking.speak(synthesiser, lines, voice, sampling)
        for path, waveform in zip(outputs, spoken, strict=True):
            judge.write(path, waveform, OUTPUT_RATE)
            print(f"{path}: {len(waveform) / OUTPUT_RATE:.2f} s")


@torch.no_grad()
def evaluate_only(asked: XttsOptions, setup: device.Setup, batches_of: Callable) -> None:
    """--evaluate or --export without training. `batches_of`: `EvalBatches` with the flags."""
    synthesiser, info, earlier_run = trained(asked, setup)
    if asked.evaluate:
        corpora = read_data(asked, earlier_run)
        texts.read_corpora(synthesiser.texts, corpora)
        corpora = check_corpora(asked, corpora, synthesiser.texts, info.config)
        name = "test" if "test" in corpora else "val"
        voices = corpora.pop("train", corpora[name])
        sets = make_sets(asked, corpora, synthesiser.texts, info)
        evaluation = {name: batches_of(sets[name], collate, setup) for name in sets}
        with setup.autocast():
            report_results(synthesiser, evaluation, "the given weights")
        if asked.held_out.speak_held_out != 0:
            clips = speaking.speakers_of(voices)
            speaking.speak_held_out(asked.held_out, setup, synthesiser, corpora[name], clips)
    about = card.About(RECIPE, asked.origin.path, released.weights_file(asked.origin), earlier_run)
    exports.export(asked, setup, info, synthesiser, {}, about)


def make_sets(
    asked: XttsOptions, corpora: dict[str, Corpus], vocabulary: Texts, info: ModelInfo
) -> dict[str, Utterances]:
    """The sets of utterances."""
    sets = {}
    for name, corpus in corpora.items():
        is_trained = name in splits.LEARNED_FROM
        sets[name] = Utterances(asked, corpus, vocabulary, info, is_trained)
    return sets


def make_task(
    asked: XttsOptions,
    run: Run,
    info: ModelInfo,
    run_info: RunInfo,
    synthesiser: Synthesiser,
    first_fit: Callable[[GPT, Utterances], None],
    evaluation: dict[str, EvalBatches],
) -> Task:
    """The task. `first_fit`: what a new model takes from the training data."""
    family = start.Family(asked)
    watched = watching.watched(evaluation, asked.stop_when_watched_rises)
    languages: set[str] = set()
    for batches in (evaluation["val"], *(watched.sets if watched else {}).values()):
        languages.update(synthesiser.texts.languages_of(batches.dataset.data.corpus))
    return Task(
        RECIPE,
        functools.partial(compute_loss, frozen=synthesiser.frozen),
        LOSS_WEIGHTS,
        functools.partial(evaluate, synthesiser.frozen, sorted(languages)),
        info,
        run_info,
        metric="mel",
        higher_is_better=False,
        fit=first_fit,
        adamw=optim.AdamWSettings(BETAS, decay_embeddings=False),
        further=watched,
        plans=ForPlans(adapters=family.usual_adapters(info)),
        learning_rate=start.LEARNING_RATE,
        checkpointed=CHECKPOINTED,
        compiled=COMPILED,
        evaluate_first=True,
        fine_tunes=True,
        new_rows=new_rows.for_task(
            family.untrained(info, run.initial),
            new_tokens.TEXT_ROWS,
            synthesiser.model,
            start.NEW_ROWS_RATE,
        ),
        vocabulary=family.vocabulary(info, run.initial),
        reports=(str(judge.folder_of(asked.output_dir)),),
    )


def main(args) -> None:
    asked = resolve(args)
    if args.show_text:
        return show_text(asked, args.show_text)
    if args.check_data:
        return check_data(asked)
    if args.synthesize:
        wanted = reading.texts_of(args.synthesize)
        spoken = speaking.resolve(args, len(wanted))
        return synthesise(asked, wanted, *spoken, device.setup(args, quiet=True))
    if args.evaluate or released.exports_only(asked.origin):
        return evaluate_only(asked, device.setup(args), functools.partial(EvalBatches, args))
    run = begin(args, RECIPE)
    earlier_run = released.read_run_info(RunInfo, run.resumed)

    corpora = read_data(asked, earlier_run)
    run_info = splits.run_info(asked.data, corpora)
    synthesiser, info, added = first_model(asked, run, corpora)
    corpora = check_corpora(asked, corpora, synthesiser.texts, info.config)
    sets = make_sets(asked, corpora, synthesiser.texts, info)

    new, old = sets.pop("train"), sets.pop(replay.REPLAY, None)
    global_batches = make_batches(args, new, collate, run.setup, old)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    first_fit = functools.partial(fit, synthesiser.frozen, added, asked.seed)
    task = make_task(asked, run, info, run_info, synthesiser, first_fit, evaluation)
    train(args, run, synthesiser.model, task, global_batches, evaluation["val"])
    report = functools.partial(report_results, synthesiser, evaluation)
    weights = finish(args, run, synthesiser.model, task, report)
    if weights:  # on the first rank
        clips = speaking.speakers_of(corpora["train"])
        about = card.About(RECIPE, asked.origin.path, weights, run_info)
        exports.export(asked, run.setup, info, synthesiser, clips, about)
        speaking.speak_held_out(asked.held_out, run.setup, synthesiser, corpora["val"], clips)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
