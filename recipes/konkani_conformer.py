"""Konkani speech recognition: a small Conformer with a CTC head and an attention decoder, trained
from scratch.

    python recipes/konkani_conformer.py      # no data needed: makes a demo corpus of synthetic speech
    python recipes/konkani_conformer.py --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/konkani_conformer.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "हांव घर वचता"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 30 s. Any language: the characters are
taken from the training text, or the letters from an orthography profile (--profile).

Long recordings with their text: --align tape.wav book.txt --output aligned.json cuts utterances to
train on (docs/aligning.md).

Other programs: --export DIR writes a CTC model for sherpa-onnx (phones) and onnx-asr.

Memory: the T4's preset (micro-batch 2 x accumulation 4, d 192, 8+4 layers) is predicted to need
0.46 GiB beside CUDA's own at 33.3 s an utterance; --dry_run 8GB predicts any command. Expect a
character error rate below 1 % on the demo's held-out sentences after its 600 updates (two CPU
cores: three to four minutes). Synthetic speech proves the mechanics, not a real-world error rate.

Sources: Conformer (Gulati et al. 2020); rotary positions in it (Li et al. 2021, "Conformer-based
End-to-end Speech Recognition With Rotary Position Embedding"); joint CTC/attention (Watanabe et al.
2017); CTC in the middle of the encoder (Lee and Watanabe 2021); SpecAugment (Park et al. 2019).
"""

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import checkpoint, device, optim, options
from common.batches import EvalBatches, GlobalBatches, pad
from common.device import upcast
from common.errors import UsageError, exit_with_one_line
from common.layers import lean_chain, quieten_branches
from common.loop import Run, Task, begin, finish, train
from common.options import TRAINS, USUAL, flag
from common.report import check_folder
from models import card, lm_files, model_files, onnx_files, released
from speech.alignment import command as alignment
from speech.alignment.letters import of_characters
from speech.data import demo, feasible, splits
from speech.data.columns import Corpus
from speech.data.utterances import SPEEDS, AugmentedUtterances
from speech.decoding import language_model, recogniser, results, timed, transcribing, windows
from speech.decoding.long import PARTS, by_length
from speech.decoding.ngram import Fusion
from speech.decoding.search import joint_beam, rescored_beam
from speech.signal import nemo_features
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.signal.features import random_masks, spec_augment, valid_mask
from speech.writing import alphabet, metrics, text
from speech.writing.alphabet import Characters

RECIPE = Path(__file__).stem
CARD = card.Form(
    library="onnx",
    task=card.RECOGNITION,
    family="Conformer",
    use=onnx_files.USE.replace("TYPE", "nemo-conformer-ctc"),
)
N_MELS = 80
# With 0.3 for CTC, as is usual for large corpora, the decoder's gradients drown CTC's in the
# encoder: on 4 hours of Mboshi it could align nothing after 800 updates of 8 clips. With 0.7 it
# could after 300. A part of this is a loss in the middle of the encoder, whose lower half learns
# sooner with it: after 2,184 updates a twelfth fewer letters were wrong.
LOSS_WEIGHTS = {"ctc": 0.49, "attention": 0.3, "middle_ctc": 0.21}
SEARCH_WEIGHTS = {"ctc": 0.3, "attention": 0.7}
FUSED_WEIGHTS = {"ctc": 0.5, "attention": 0.5}  # with a language model, which is a part of CTC's
BEAM_SIZE = 10
FREQUENCY_MASKS = 2
FREQUENCY_MASK_WIDTH = 27 / 80  # share of the bands, at most
TIME_MASKS = 5
TIME_MASK_WIDTH = 0.05  # share of the utterance, at most
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 600
DEMO_WARMUP = 0.2  # share of its updates: with a tenth, as usual, it starts to learn too late

DEFAULTS = {  # of the flags that a checkpoint decides
    "d_model": 192,
    "encoder_layers": 8,
    "decoder_layers": 4,
    "attention_heads": 4,
    "subsampling": 4,
}
CONFIG = {  # the values of these flags that a checkpoint may have
    "d_model": range(2, 8193),
    "encoder_layers": range(1, 129),
    "decoder_layers": range(1, 129),
    "attention_heads": range(1, 129),
    "subsampling": {4, 8},
}
NEW_VOCABULARY = (
    "leave --vocab_file out, or start a new run with another --output_dir (--init_from takes the"
    " weights that fit): its characters are its training texts'"
)
LAYERS = options.number(int, 1, 128)
# Rows for `Parser.refuse`.
EXCLUDES = (
    ("transcribe", "export", "give one of them"),
    ("profile", "vocab_file", "both say what the letters are; give one of them"),
    *(
        (f"decoding {other}", wish, "a language model is a part of --decoding rescore")
        for other in ("greedy", "beam")
        for wish in ("lm on", "lm_text")
    ),
)
NEEDS = (("beam_size", ("decoding rescore", "decoding beam"), ""),)


@dataclass(frozen=True)
class ModelInfo:
    """The record from which the model is rebuilt, saved with its weights."""

    config: Annotated[dict, CONFIG]
    characters: list[str]
    letters: list[list[str]] = field(default_factory=list)  # rows of an orthography profile


@dataclass(frozen=True)
class Flags:
    """Flags of the model."""

    # fmt: off
    d_model: int | None = flag(options.number(int, 1, 8192), None, "N", "width (192)", USUAL)
    encoder_layers: int | None = flag(LAYERS, None, "N", "Conformer blocks (8)", USUAL)
    decoder_layers: int | None = flag(LAYERS, None, "N", "Transformer decoder layers (4)")
    attention_heads: int | None = flag(LAYERS, None, "N", "heads in every attention (4)")
    subsampling: int | None = flag(
        int, None, None, "frames of 10 ms in an encoder frame (4)", choices=[4, 8])
    dropout: float = flag(options.SHARE, 0.1, "P", "dropout in all blocks (0.1)", TRAINS)
    label_smoothing: float = flag(
        options.SHARE, 0.1, "P", "of the attention decoder's targets (0.1)", TRAINS)
    vocab_file: str | None = flag(options.path, None, "FILE", "characters in JSON (char2idx)")
    export: str | None = flag(
        options.path, None, "DIR", "CTC model for sherpa-onnx and onnx-asr", USUAL)


def add_arguments(parser) -> None:
    splits.add_arguments(parser, allow_unknown=True)
    recogniser.add_arguments(parser, ("greedy", "rescore", "beam"), "rescore", BEAM_SIZE)
    language_model.add_arguments(parser)
    alignment.add_arguments(parser)
    alphabet.add_arguments(parser)
    options.add_record(parser, "model (the checkpoint decides when resuming)", Flags)
    options.add_arguments(parser)
    parser.refuse(EXCLUDES, NEEDS)
    parser.hints["--features"] = "every model has the features that other programs compute"
    parser.usual("decoding")


def resolve(args) -> recogniser.DecodingOptions:
    is_demo = not args.train_manifest
    options.resolve(args, is_demo, DEMO_STEPS)
    if is_demo and args.max_steps and args.warmup_steps is None:
        args.warmup_steps = round(DEMO_WARMUP * args.max_steps)
    if args.export:
        released.require_exports(vars(args), options.paths_in(args, *released.EXPORTS))
        onnx_files.require_packages("--export")
    return recogniser.resolve(args, is_demo, BEAM_SIZE, has_times=True)


# --- data -----------------------------------------------------------------------------------------


def read_data(
    args, config: dict, letters: Characters, earlier_run: splits.RunInfo | None = None
) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What `earlier_run`, which is resumed or used, held out is held out again. Texts are
    prepared as their `letters` ask for it. A planned run without data is of the longest texts that
    CTC can align in a model with this `config`."""
    folder = Path(args.output_dir) / "data" / "konkani_demo"
    words, voices = demo.KONKANI_WORDS, demo.KONKANI_VOICES
    most_tokens = encoder_frames(int(args.max_duration * SAMPLE_RATE), config)
    return splits.load_splits(
        splits.resolve(args, earlier_run),
        letters.prepare,
        demo=lambda: demo.speech_corpus(folder, words, voices, DEMO_SIZES),
        stand_in=lambda: splits.stand_in(args.max_duration, most_tokens),
    )


def check_texts(args, corpora: dict[str, Corpus], tokenizer) -> None:
    """Prints which characters the model lacks. Raises `DataError` if they are many."""
    how = (args.allow_unknown, NEW_VOCABULARY, not args.vocab_file)
    tokenizer.letters.check(corpora, tokenizer.characters, *how)


def encoder_frames(samples, config: dict):
    """Encoder frames of so many samples at 16 kHz, a number or a tensor; at least 1. Only whole
    ones count, because sherpa-onnx reads no others."""
    count = nemo_features.frames(samples) // config["subsampling"]
    return count.clamp_min(1) if isinstance(count, Tensor) else max(1, count)


class Utterances(AugmentedUtterances):
    """A set of utterances as the model takes them. The training set is augmented."""

    def __init__(self, args, corpus: Corpus, tokenizer, config: dict, training: bool):
        super().__init__(args, corpus, args.max_duration / min(SPEEDS), training)
        self.tokenizer = tokenizer
        self.config = config
        self.masks = training and args.spec_augment

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), labels (U + 1,), and masks of SpecAugment."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        transcript = self.corpus.texts[index]
        tokens = self.tokenizer.encode(transcript)
        augmented = bool(self.augmented(epoch)[index])

        def fits(samples: int) -> bool:
            return feasible.fits(encoder_frames(samples, self.config), tokens)

        waveform = self.at_speed(waveform, index, epoch, fits)
        waveform, tokens = self.in_noise(waveform, tokens, index, epoch)
        # One past the text's tokens: the decoder's start and end, and CTC's blank.
        eos = self.tokenizer.size
        item = {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "labels": torch.tensor([*tokens, eos]),
            "targets": feasible.targets(encoder_frames(len(waveform), self.config), tokens),
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }
        if self.masks:
            random = np.random.default_rng([self.seed, epoch, index])
            masks = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["frequency_masks"] = augmented * masks
            item["time_masks"] = augmented * random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens (B, U), labels (B, U + 1) with -100 beyond their end,
    each with its lengths; counts are the numbers of targets of each loss term."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
    }
    for key, padding in (("audio", 0.0), ("tokens", 0), ("labels", -100)):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items], padding)
    if "time_masks" in items[0]:
        batch["frequency_masks"] = torch.stack([item["frequency_masks"] for item in items])
        batch["time_masks"] = torch.stack([item["time_masks"] for item in items])
    targets = sum(item["targets"] for item in items)
    attention = int(batch["labels_lengths"].sum())
    batch["counts"] = {"ctc": targets, "attention": attention, "middle_ctc": targets}
    return batch


# --- network --------------------------------------------------------------------------------------


def rotary_angles(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (T, head_dim / 2) of rotary positions (Su et al. 2021)."""
    frequencies = 10_000.0 ** (
        -torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    )
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (first half, second half) of (B, H, T, D) by its position's angle."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Sequential):
    """Pre-norm feed-forward of 4 d, (B, T, D) to (B, T, D); the residual is the caller's. One
    dropout, on the output: a second one on the wide hidden layer would be the largest tensor that
    backward keeps. The output of SiLU would be as large, so `lean_chain` computes it again in
    backward."""

    def __init__(self, d: int, dropout: float):
        layers = (nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))
        super().__init__(*layers, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        norm, widen, _, narrow, dropout = self
        return dropout(lean_chain(x, norm, widen, F.silu, narrow))


class SelfAttention(nn.Module):
    """Pre-norm self-attention with rotary positions, (B, T, D) to (B, T, D). Attention weights have
    no dropout: with it fused kernels are lost on a CPU."""

    def __init__(self, d: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, angles: tuple, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        qkv = lean_chain(x, self.norm, self.qkv).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, D / H)
        v = v.contiguous()  # a view would keep q and k, too, which backward needs as rotated only
        y = F.scaled_dot_product_attention(
            rotate(q, angles), rotate(k, angles), v, attn_mask=mask, is_causal=causal
        )
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class CrossAttention(nn.Module):
    """Pre-norm attention of (B, U, D) over the encoder's (B, T, D), to (B, U, D)."""

    def __init__(self, d: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor | None) -> Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(encoded).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class Convolution(nn.Module):
    """The Conformer's convolution module, (B, T, D) to (B, T, D). Normalised per frame, not per
    batch: with batches of one or two BatchNorm's statistics are useless."""

    def __init__(self, d: int, kernel: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.enter = nn.Linear(d, 2 * d)
        self.depthwise = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d)
        self.middle_norm = nn.LayerNorm(d)
        self.leave = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = F.glu(lean_chain(x, self.norm, self.enter), dim=-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)  # or the kernel would see what follows the end
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.dropout(lean_chain(x, self.middle_norm, F.silu, self.leave))


class EncoderLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, d: int, heads: int, kernel: int, dropout: float):
        super().__init__()
        self.first = FeedForward(d, dropout)
        self.second = FeedForward(d, dropout)
        self.attention = SelfAttention(d, heads, dropout)
        self.convolution = Convolution(d, kernel, dropout)
        self.norm = nn.LayerNorm(d)

    def forward(
        self, x: Tensor, angles: tuple, mask: Tensor | None, padding: Tensor | None
    ) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, angles, mask)
        x = x + self.convolution(x, padding)
        return self.norm(x + 0.5 * self.second(x))


class DecoderLayer(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float):
        super().__init__()
        self.attention = SelfAttention(d, heads, dropout)
        self.cross = CrossAttention(d, heads, dropout)
        self.feed_forward = FeedForward(d, dropout)

    def forward(self, x: Tensor, encoded: Tensor, angles: tuple, mask: Tensor | None) -> Tensor:
        x = x + self.attention(x, angles, causal=True)
        x = x + self.cross(x, encoded, mask)
        return x + self.feed_forward(x)


def halved(lengths):
    """The lengths, numbers or a tensor, after a convolution with a stride of 2."""
    return (lengths - 1) // 2 + 1


def whole_frames(lengths: Tensor, subsampling: int) -> Tensor:
    """The feature frames that fill encoder frames; all of them if they fill none."""
    whole = lengths // subsampling * subsampling
    return torch.where(whole > 0, whole, lengths)


class Subsampling(nn.Module):
    """Features (B, F, M) to (B, T, D) with F / 4 or F / 8 frames: a strided 3x3 convolution, then
    depthwise-separable ones. What lies beyond each length is zeroed before every convolution, so
    padding changes nothing."""

    CHANNELS = 64

    def __init__(self, n_mels: int, d: int, factor: int):
        super().__init__()
        c = self.CHANNELS
        stages = factor.bit_length() - 1
        self.first = nn.Conv2d(1, c, 3, stride=2, padding=1)
        self.depthwise = nn.ModuleList(
            [nn.Conv2d(c, c, 3, stride=2, padding=1, groups=c) for _ in range(stages - 1)]
        )
        self.pointwise = nn.ModuleList([nn.Conv2d(c, c, 1) for _ in range(stages - 1)])
        for _ in range(stages):
            n_mels = halved(n_mels)
        self.out = nn.Linear(c * n_mels, d)
        self.norm = nn.LayerNorm(d)
        self.to(memory_format=torch.channels_last)  # twice as fast as (B, C, F, M) in memory

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(features[:, None])  # (B, C, F / 2, M / 2)
        lengths = halved(lengths)
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            # Masked before the ReLU: backward then keeps one tensor of this size, not two.
            x = F.relu(x.masked_fill(~valid_mask(lengths, x.shape[2])[:, None, :, None], 0.0))
            x = pointwise(depthwise(x))
            lengths = halved(lengths)
        return self.norm(self.out(F.relu(x).permute(0, 2, 3, 1).flatten(2))), lengths


CHECKPOINTED = (Subsampling, EncoderLayer, DecoderLayer)  # recomputed by --gradient_checkpointing
COMPILED = (FeedForward, SelfAttention, CrossAttention)  # compiled by --torch_compile
BRANCH_OUTPUTS = (".out", ".leave", ".first.3", ".second.3", ".feed_forward.3")


class Encoded(NamedTuple):
    """What the encoder makes of a batch: its output (B, T, D), that of its lower half, the
    attention mask over T (None where nothing is padded), and the lengths on the host."""

    frames: Tensor
    middle: Tensor
    mask: Tensor | None
    lengths: Tensor


class Conformer(nn.Module):
    """Encoder, CTC head and attention decoder. Both outputs have `vocabulary` + 1 entries; the last
    is CTC's blank, and the decoder's start and end."""

    def __init__(self, config: dict, dropout: float = 0.1, label_smoothing: float = 0.1):
        super().__init__()
        d, heads = config["d_model"], config["attention_heads"]
        self.config = config
        self.label_smoothing = label_smoothing
        self.eos = config["vocabulary"]
        self.head_dim = d // heads
        self.frame_samples = nemo_features.HOP * config["subsampling"]  # from frame to frame
        kernel = 31 if config["subsampling"] == 4 else 15
        self.log_mel = nemo_features.MelFeatures(N_MELS)
        self.subsampling = Subsampling(N_MELS, d, config["subsampling"])
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            EncoderLayer(d, heads, kernel, dropout) for _ in range(config["encoder_layers"])
        )
        self.ctc_head = nn.Linear(d, self.eos + 1)
        self.embedding = nn.Embedding(self.eos + 1, d)
        # It is also the output layer, which would diverge with a deviation of 1.
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        self.decoder = nn.ModuleList(
            DecoderLayer(d, heads, dropout) for _ in range(config["decoder_layers"])
        )
        self.decoder_norm = nn.LayerNorm(d)
        for layers in (self.encoder, self.decoder):
            quieten_branches(layers, BRANCH_OUTPUTS)

    def features(self, batch: dict) -> tuple[Tensor, Tensor]:
        """Normalised features (B, F, M) and their lengths, up to the last whole encoder frame."""
        samples = batch["audio_lengths"]
        subsampling = self.config["subsampling"]
        host = nemo_features.frames(batch["audio_lengths_host"])
        x = self.log_mel(batch["audio"], samples, int(host.max()))
        longest = int(whole_frames(host, subsampling).max())
        return x[:, :longest], whole_frames(nemo_features.frames(samples), subsampling)

    def encode(self, batch: dict) -> Encoded:
        """The encoder's outputs of the batch's waveforms."""
        x, lengths = self.features(batch)
        if "time_masks" in batch:
            x = spec_augment(x, lengths, batch["frequency_masks"], batch["time_masks"])
        x, lengths = self.subsampling(x, lengths)
        host = encoder_frames(batch["audio_lengths_host"], self.config)
        valid = None
        if int(host.min()) < x.shape[1]:
            valid = valid_mask(lengths, x.shape[1])
        return Encoded(*self.run_encoder(x, valid), host)

    def run_encoder(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The encoder's output (B, T, D), that of its lower half, and the attention mask over T, of
        the subsampling's output `x`. `valid` (B, T): its frames inside utterances, None for all."""
        x = self.dropout(x)
        mask = None
        padding = None
        if valid is not None:
            mask = valid[:, None, None, :]
            padding = ~valid[:, :, None]
        angles = rotary_angles(x.shape[1], self.head_dim, x)
        half = max(1, len(self.encoder) // 2)
        for number, layer in enumerate(self.encoder, 1):
            x = layer(x, angles, mask, padding)
            if number == half:
                middle = x
        return x, middle, mask

    def ctc_log_probs(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised features (B, F, M) with lengths (B,), whose padding may have any values, to
        log-probabilities (B, T, V + 1) and the lengths that are valid. For --export: no line
        depends on values."""
        features = features.masked_fill(~valid_mask(lengths, features.shape[1])[:, :, None], 0.0)
        lengths = whole_frames(lengths, self.config["subsampling"])
        x, lengths = self.subsampling(features, lengths)
        x, _, _ = self.run_encoder(x, valid_mask(lengths, x.shape[1]))
        return self.ctc_head(x).log_softmax(-1), lengths

    def decode(self, tokens: Tensor, encoded: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (B, U, V + 1) of the token after each of `tokens` (B, U), the first `self.eos`."""
        x = self.dropout(self.embedding(tokens) * math.sqrt(self.config["d_model"]))
        angles = rotary_angles(tokens.shape[1], self.head_dim, x)
        for layer in self.decoder:
            x = layer(x, encoded, angles, mask)
        return F.linear(self.decoder_norm(x), self.embedding.weight)


# --- loss, decoding and evaluation ----------------------------------------------------------------


def compute_loss(model: Conformer, batch: dict) -> dict[str, Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    return losses(model, batch, model.encode(batch))


def losses(model: Conformer, batch: dict, encoded: Encoded) -> dict[str, Tensor]:
    """Sums over the batch of the CTC losses and of the decoder's cross-entropy."""
    ctc = ctc_loss(model, batch, encoded.frames, encoded.lengths)
    middle = ctc_loss(model, batch, encoded.middle, encoded.lengths)
    labels = batch["labels"]  # (B, U + 1)
    start = torch.full_like(labels[:, :1], model.eos)
    tokens = torch.cat([start, labels[:, :-1].clamp_min(0)], dim=1)
    logits = model.decode(tokens, encoded.frames, encoded.mask)
    attention = F.cross_entropy(
        upcast(logits).flatten(0, 1),
        labels.flatten(),
        ignore_index=-100,
        reduction="sum",
        label_smoothing=model.label_smoothing,
    )
    return {"ctc": ctc, "attention": attention, "middle_ctc": middle}


def ctc_loss(model: Conformer, batch: dict, frames: Tensor, lengths: Tensor) -> Tensor:
    """Sum over the batch of the CTC loss of `frames` (B, T, D), by the head of the last layer."""
    # (T, B, V + 1), in fp32 or better
    log_probs = upcast(model.ctc_head(frames)).log_softmax(-1).transpose(0, 1)
    # Numbers as lengths spare CTC each wait for the device. What cannot be aligned was rejected
    # before training; an evaluation set is scored whole, so there it may occur.
    return F.ctc_loss(
        log_probs,
        batch["tokens"],
        lengths.tolist(),
        batch["tokens_lengths_host"].tolist(),
        blank=model.eos,
        reduction="sum",
        zero_infinity=not model.training,
    )


def ctc_greedy(model: Conformer, encoded: Encoded) -> list[list[int]]:
    """The best label of every frame, repeats merged, blanks removed."""
    logits = model.ctc_head(encoded.frames)
    hypotheses = timed.greedy_ctc(logits, encoded.lengths.tolist(), model.eos)
    return [[token.piece for token in tokens] for tokens in hypotheses]


def decode(
    model: Conformer, encoded: Encoded, how: recogniser.DecodingOptions, fusion: Fusion | None
) -> list[list[int]]:
    """Tokens of every utterance by one of --decoding's methods. Both searches mix CTC's and the
    decoder's log-probabilities. `fusion`: a language model in "rescore"."""
    if how.decoding == "greedy":
        return ctc_greedy(model, encoded)
    search = joint_beam
    if how.decoding == "rescore":
        search = functools.partial(rescored_beam, fusion=fusion)
    weights = FUSED_WEIGHTS if fusion else SEARCH_WEIGHTS
    hypotheses = []
    for row, length in enumerate(encoded.lengths.tolist()):
        utterance = encoded.frames[row : row + 1, :length]
        log_probs = upcast(model.ctc_head(utterance[0])).log_softmax(-1)
        decoder = functools.partial(decode_prefixes, model, utterance)
        hypotheses.append(search(log_probs, decoder, model.eos, how.beam_size, weights))
    return hypotheses


def decode_prefixes(model: Conformer, utterance: Tensor, tokens: Tensor) -> Tensor:
    """Logits (N, U, V + 1) after `tokens` (N, U), prefixes of one utterance (1, T, D)."""
    return model.decode(tokens.to(utterance.device), utterance.expand(len(tokens), -1, -1), None)


def evaluate(tokenizer, model: Conformer, eval_batches) -> dict[str, tuple[float, float]]:
    """Losses, CER and WER of greedy CTC decoding, as (numerator, denominator)."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded = model.encode(batch)
        texts = [tokenizer.decode(tokens) for tokens in ctc_greedy(model, encoded)]
        return texts, losses(model, batch, encoded)

    rows, sums = recogniser.decode_set(model, decode_batch, eval_batches, LOSS_WEIGHTS)
    return {**sums, **metrics.score(rows)}


def final_texts(
    how: recogniser.DecodingOptions,
    tokenizer,
    model: Conformer,
    batch: dict,
    fusion: Fusion | None = None,
) -> list[str]:
    """The texts of a batch by --decoding."""
    hypotheses = decode(model, model.encode(batch), how, fusion)
    return [tokenizer.decode(tokens) for tokens in hypotheses]


@torch.no_grad()
def timed_texts(
    how: recogniser.DecodingOptions, tokenizer, model: Conformer, fusion: Fusion | None, batch: dict
) -> list[dict]:
    """The texts of a batch by --decoding, with the times at which CTC has them."""
    encoded = model.encode(batch)
    hypotheses = decode(model, encoded, how, fusion)
    log_probs = upcast(model.ctc_head(encoded.frames)).log_softmax(-1)
    frames = encoded.lengths.tolist()
    tokens = [
        timed.aligned(row[:count], hypothesis, model.eos)
        for row, count, hypothesis in zip(log_probs, frames, hypotheses, strict=True)
    ]
    return timed.transcripts(tokens, frames, tokenizer, model.frame_samples / SAMPLE_RATE)


def report_results(
    how: recogniser.DecodingOptions,
    tokenizer,
    model: Conformer,
    evaluation: dict[str, EvalBatches],
    folder: Path,
    weights: str,
) -> None:
    """Prints error rates and examples of the test set, or of "val" without one, with and without
    the language model. `weights`: those of the `folder` that the model has, for the title."""
    if tokenizer.letters.rows:
        how = replace(how, cut=tokenizer.letters.cut)
    decode = functools.partial(final_texts, how, tokenizer, model)
    tokens = language_model_tokens(how, tokenizer)
    results.report(how, model, decode, evaluation, weights, tokens=tokens, folder=folder)


def language_model_tokens(
    how: recogniser.DecodingOptions, tokenizer
) -> language_model.Tokens | None:
    """The tokens of the language model, which is a part of one search only."""
    if how.decoding != "rescore":
        return None
    return language_model.tokens_of(tokenizer, tokenizer.letters.prepare)


# --- set-up ---------------------------------------------------------------------------------------


def choose_config(args, saved: ModelInfo | None) -> dict:
    """The values of the flags in DEFAULTS: those of the checkpoint, which a flag must not
    contradict; without one the given flags, then the defaults. Raises `UsageError`."""
    config = {}
    for name, default in DEFAULTS.items():
        value = getattr(args, name)
        if saved is None:
            config[name] = default if value is None else value
            continue
        config[name] = saved.config[name]
        if value not in (None, config[name]):
            raise UsageError(
                f"--{name} {value} conflicts with the checkpoint, which has {config[name]}: leave"
                " the flag out to continue it, or start a new run with another --output_dir, or"
                " from its weights with --init_from in place of --resume"
            )
    check_heads(config)
    return config


def check_heads(config: dict) -> None:
    d, heads = config["d_model"], config["attention_heads"]
    if d % (2 * heads):
        raise UsageError(f"--d_model {d} must be a multiple of twice --attention_heads {heads}")


def make_tokenizer(
    args, saved: ModelInfo | None, letters: Characters, texts=()
) -> text.CharTokenizer:
    """The tokenizer of the checkpoint, of --vocab_file, or of the `letters` that `texts` have."""
    own = text.load_vocab_file(args.vocab_file, letters) if args.vocab_file else None
    if saved is None:
        return own or text.CharTokenizer(letters.vocabulary(texts), letters)
    if own and own.characters != saved.characters:
        raise UsageError("--vocab_file has other characters than the checkpoint: leave it out")
    return text.CharTokenizer(saved.characters, letters)


def letters_of(args, saved: ModelInfo | None) -> Characters:
    """What a letter is by the checkpoint, or by --profile."""
    return alphabet.choose(args.profile, None if saved is None else saved.letters)


def check_data(args) -> None:
    """--check_data. Texts are compared with the vocabulary that a training would have."""
    saved = checkpoint.resume(args.resume, args.checkpoint_dir, RECIPE)
    model_info, earlier_run = checkpoint.read_infos(saved, ModelInfo, splits.RunInfo)
    config = choose_config(args, model_info)
    letters = letters_of(args, model_info)
    corpora = read_data(args, config, letters, earlier_run)
    texts = corpora["train"].texts if "train" in corpora else ()
    tokenizer = make_tokenizer(args, model_info, letters, texts)
    if tokenizer.characters:
        check_texts(args, corpora, tokenizer)
        corpora = drop_untrainable(args, corpora, tokenizer, config)
    splits.report_checked(corpora, from_scratch=not (saved or args.init_from))


def drop_untrainable(
    args, corpora: dict[str, Corpus], tokenizer, config: dict
) -> dict[str, Corpus]:
    """The corpora, of which the training set is without utterances that no CTC alignment fits, and
    without texts of unknown characters only. Others become the unknown token."""

    def frames_of(seconds: float) -> int:
        return encoder_frames(int(seconds * SAMPLE_RATE), config)

    return feasible.without_infeasible(
        corpora,
        frames_of,
        args.strict_data,
        tokenizer.encode,
        [tokenizer.unknown, *tokenizer.encode(" ")],
    )


def make_sets(args, corpora: dict[str, Corpus], tokenizer, config: dict) -> dict:
    return {
        name: Utterances(args, corpus, tokenizer, config, training=name == "train")
        for name, corpus in corpora.items()
    }


def make_model(
    info: ModelInfo, *settings: float, saved: checkpoint.Saved | None = None
) -> Conformer:
    """A model with random weights. Raises `UsageError` if it does not fit into memory, or if the
    weights of the checkpoint `saved` are not for it."""
    check_heads(info.config)
    config = {**info.config, "vocabulary": len(info.characters) + 1}  # and the unknown one
    checkpoint.check_network(saved, lambda: Conformer(config))
    shapes = checkpoint.shapes_of(lambda: Conformer(config))
    model_files.require_room(sum(map(math.prod, shapes.values())))
    return Conformer(config, *settings)


def trained(args, setup: device.Setup) -> tuple[Conformer, text.CharTokenizer, splits.RunInfo]:
    """The model that is used without training, its tokenizer, and the record of its run."""
    saved = checkpoint.weights_to_use(args.resume, args.checkpoint_dir, RECIPE)
    model_info, earlier_run = checkpoint.read_infos(saved, ModelInfo, splits.RunInfo)
    choose_config(args, model_info)  # refuses flags that contradict it
    model = make_model(model_info, saved=saved)
    checkpoint.load_weights(model, saved.model)
    tokenizer = make_tokenizer(args, model_info, letters_of(args, model_info))
    return model.to(setup.device).eval(), tokenizer, earlier_run


def transcribe(args, how: recogniser.DecodingOptions) -> None:
    setup = device.setup(args, quiet=True)
    model, tokenizer, earlier_run = trained(args, setup)
    folder = checkpoint.path_to_use(args.resume, args.checkpoint_dir).parent
    fusion = language_model.in_search(how.lm, language_model_tokens(how, tokenizer), folder)
    texts_of = functools.partial(timed_texts, how, tokenizer, model, fusion)
    cutting = by_length(earlier_run.longest, windows.by_time(tokenizer, model.frame_samples))
    transcribing.transcribe_files(how, texts_of, setup, earlier_run.longest, cutting, PARTS, fusion)


def recogniser_to_align(args) -> alignment.Recogniser:
    """The encoder with its CTC head, for --align."""
    setup = device.setup(args, quiet=True)
    model, tokenizer, earlier_run = trained(args, setup)

    def log_probs(batch: dict) -> Tensor:
        encoded = model.encode(batch)
        return upcast(model.ctc_head(encoded.frames[0])).log_softmax(-1)

    return alignment.Recogniser(
        setup,
        log_probs,
        frame=model.frame_samples / SAMPLE_RATE,
        vocabulary=of_characters(tokenizer.index, model.eos, model.eos + 1, tokenizer.letters),
        longest=earlier_run.longest,
    )


@torch.no_grad()
def evaluate_only(args, how: recogniser.DecodingOptions) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    setup = device.setup(args)
    model, tokenizer, earlier_run = trained(args, setup)
    weights = checkpoint.path_to_use(args.resume, args.checkpoint_dir)
    if args.evaluate:
        check_folder(args.log_dir)
        corpora = read_data(args, model.config, tokenizer.letters, earlier_run)
        corpora.pop("train", None)
        check_texts(args, corpora, tokenizer)
        sets = make_sets(args, corpora, tokenizer, model.config)
        evaluation = {name: EvalBatches(args, sets[name], collate, setup) for name in sets}
        with setup.autocast():
            report_results(how, tokenizer, model, evaluation, weights.parent, "the given weights")
    measured = results.results_of(args.log_dir, weights, bool(args.evaluate))
    about = card.About(RECIPE, None, weights, earlier_run, measured, is_new=True)
    export(args, how, tokenizer, model, about)


def exports_only(args) -> bool:
    """Whether --export is asked for alone: weights are named, and no flag asks for training."""
    trains = bool(args.given & set(released.GOALS))
    return bool(args.export) and args.resume not in (None, "auto") and not trains


def export(
    args, how: recogniser.DecodingOptions, tokenizer, model: Conformer, about: card.About
) -> None:
    """--export: the encoder with its CTC head, and a model card."""
    if not args.export:
        return
    # Another one, in fp32 on the host: layers of the trained one may be compiled.
    copy = Conformer(model.config)
    copy.load_state_dict(model.state_dict())
    fill = functools.partial(
        onnx_files.fill_ctc,
        model=copy,
        pieces=tokenizer.pieces,
        num_mel_bins=N_MELS,
        subsampling=model.config["subsampling"],
    )
    outputs = [*tokenizer.pieces, onnx_files.BLANK]
    tokens = language_model.tokens_of(tokenizer, tokenizer.letters.prepare)
    names = lm_files.for_torchaudio(tokens, outputs, tokenizer.size)
    texts, form = lm_files.beside(about.weights, names, CARD, how.lm)
    texts[model_files.CARD] = card.readme(Path(args.export).resolve().name, about, form)
    names = model_files.write_export(Path(args.export), fill, texts)
    print(f"exported to {args.export}: {', '.join(names)}")


# --- main -----------------------------------------------------------------------------------------


def describe(model: Conformer) -> None:
    size = optim.count_parameters(model)[0] / 1e6
    print(f"model: {size:.1f} M parameters, {model.eos} text tokens")


def vocabulary(
    characters: list[str], initial: checkpoint.Saved | None
) -> checkpoint.Vocabulary | None:
    """The meanings of the rows of embedding and CTC layer, here and in --init_from."""
    if initial is None:
        return None
    saved_info, _ = checkpoint.read_infos(initial, ModelInfo, splits.RunInfo)
    names = ("embedding.weight", "ctc_head.weight", "ctc_head.bias")
    tokens = ["<unk>", *characters, "<eos>"]
    saved = ["<unk>", *saved_info.characters, "<eos>"]
    return checkpoint.Vocabulary(names, tokens, saved)


def make_task(
    how: recogniser.DecodingOptions,
    run: Run,
    info: ModelInfo,
    run_info: splits.RunInfo,
    tokenizer,
    texts: Iterable[str],
) -> Task:
    """All that the loop knows of this recipe. `texts` are kept for the language model."""
    return Task(
        RECIPE,
        compute_loss,
        LOSS_WEIGHTS,
        functools.partial(evaluate, tokenizer),
        info,
        run_info,
        metric="cer",
        higher_is_better=False,
        fit=None,
        augmented_share=how.augmented_share,
        not_begun=recogniser.not_begun,
        vocabulary=vocabulary(info.characters, run.initial),
        checkpointed=CHECKPOINTED,
        compiled=COMPILED,
        reports=results.REPORTS,
        beside=language_model.as_file(texts),
    )


def main(args) -> None:
    how = resolve(args)
    if args.check_data:
        return check_data(args)
    if args.transcribe:
        return transcribe(args, how)
    if request := alignment.resolve(args):
        return alignment.align_files(request, lambda: recogniser_to_align(args))
    if args.evaluate or exports_only(args):
        return evaluate_only(args, how)
    run = begin(args, RECIPE)
    model_info, earlier_run = checkpoint.read_infos(run.resumed, ModelInfo, splits.RunInfo)
    config = choose_config(args, model_info)
    letters = letters_of(args, model_info)
    corpora = read_data(args, config, letters, earlier_run)
    tokenizer = make_tokenizer(args, model_info, letters, corpora["train"].texts)
    check_texts(args, corpora, tokenizer)
    corpora = drop_untrainable(args, corpora, tokenizer, config)
    model_info = ModelInfo(config, tokenizer.characters, letters.kept())
    with run.model_device():
        model = make_model(model_info, args.dropout, args.label_smoothing, saved=run.resumed)
    describe(model)

    sets = make_sets(args, corpora, tokenizer, config)
    global_batches = GlobalBatches(args, sets.pop("train"), collate, run.setup)
    evaluation = {name: EvalBatches(args, sets[name], collate, run.setup) for name in sets}
    run_info = splits.run_info(splits.resolve(args), corpora)
    task = make_task(how, run, model_info, run_info, tokenizer, corpora["train"].written_texts())
    train(args, run, model, task, global_batches, evaluation["val"])
    report = functools.partial(
        report_results, how, tokenizer, model, evaluation, args.checkpoint_dir
    )
    weights = finish(args, run, model, task, report)
    if weights:  # on the first rank
        measured = results.results_of(args.log_dir, weights, are_new=True)
        about = card.About(RECIPE, None, weights, run_info, measured, is_new=True)
        export(args, how, tokenizer, model, about)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
