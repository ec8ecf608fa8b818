"""Konkani speech recognition: a small Conformer with a CTC head and an attention decoder, trained
from scratch.

    python recipes/konkani_conformer.py                       # no data needed: makes a demo corpus of synthetic speech
    python recipes/konkani_conformer.py --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/konkani_conformer.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "हांव घर वचता"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 30 s. Any language: the characters are
taken from the training text.

Memory: the T4's preset (micro-batch 2 x accumulation 4, d 192, 8+4 layers) is predicted to need
0.46 GiB beside CUDA's own at 33.3 s an utterance; --dry_run 8GB predicts any command. Expect a
character error rate below 1 % on the demo's held-out sentences after its 600 updates (two CPU
cores: three to four minutes). Synthetic speech proves the mechanics, not a real-world error rate.

Sources: Conformer (Gulati et al. 2020); rotary positions in it (Li et al. 2021, "Conformer-based
End-to-end Speech Recognition With Rotary Position Embedding"); joint CTC/attention (Watanabe et al.
2017); SpecAugment (Park et al. 2019).
"""

import functools
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: F401  first, because a signal while torch is imported would be a traceback

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import checkpoint, device, optim, options, records
from common.batches import EvalBatches, GlobalBatches, pad
from common.device import upcast
from common.errors import DataError, UsageError, exit_with_one_line
from common.loop import Task, begin, finish, train
from common.report import check_folder
from speech import demo, metrics, recogniser, splits, text
from speech.audio import SAMPLE_RATE, change_speed, read_utterance, speed_factors
from speech.columns import Corpus
from speech.features import FeatureNorm, LogMel, frames, random_masks, spec_augment, valid_mask
from speech.layers import lean_chain
from speech.model_files import require_room
from speech.recogniser import SPEEDS, decode_set
from speech.search import joint_beam, rescored_beam

RECIPE = "konkani_conformer"
N_MELS = 80
LOSS_WEIGHTS = {"ctc": 0.3, "attention": 0.7}
BEAM_SIZE = 10
FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH = 2, 27 / 80  # share of the bands
TIME_MASKS, TIME_MASK_WIDTH = 5, 0.05  # share of the utterance
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 600
NORM_UTTERANCES = 500  # for the statistics of --cmvn global
SHAPE = {  # what the checkpoint decides when resuming
    "d_model": 192,
    "encoder_layers": 8,
    "decoder_layers": 4,
    "attention_heads": 4,
    "subsampling": 4,
    "cmvn": "global",
}
CONFIG = {  # what a configuration in a checkpoint must be
    "d_model": range(2, 8193),
    "encoder_layers": range(1, 129),
    "decoder_layers": range(1, 129),
    "attention_heads": range(1, 129),
    "subsampling": {4, 8},
    "cmvn": {"global", "utterance"},
    "vocabulary": range(1, 1 << 20),
}
TOKENIZER = (
    {"kind": {"sentencepiece"}, "model": str},
    {"kind": {"vocab_file"}, "characters": [str]},
)
NEEDS = (
    ("beam_size", ("decoding rescore", "decoding beam"), ""),
    ("vocab_size", ("tokenizer bpe",), ""),
)


@dataclass(frozen=True)
class ModelInfo:
    """What it takes to rebuild the model. `asked`: the flags that its tokens were made by."""

    config: Annotated[dict, CONFIG]
    tokenizer: Annotated[dict, TOKENIZER]
    asked: dict


@dataclass(frozen=True)
class RunInfo:
    """What else later commands must know: the keys of the held-out utterances, and the seconds of
    the longest training utterance."""

    held_out: list[str]
    longest: float


def add_arguments(parser) -> None:
    splits.add_arguments(parser)
    recogniser.add_arguments(parser, ("greedy", "rescore", "beam"), "rescore", BEAM_SIZE)
    model = parser.add_argument_group("model (its shape comes from the checkpoint when resuming)")
    model.add_argument(
        "--d_model", type=options.number(int, 1, 8192), metavar="N", help="width (192)"
    )
    model.add_argument(
        "--encoder_layers",
        type=options.number(int, 1, 128),
        metavar="N",
        help="Conformer blocks (8)",
    )
    model.add_argument(
        "--decoder_layers",
        type=options.number(int, 1, 128),
        metavar="N",
        help="Transformer decoder layers (4)",
    )
    model.add_argument(
        "--attention_heads",
        type=options.number(int, 1, 128),
        metavar="N",
        help="heads in every attention (4)",
    )
    model.add_argument(
        "--subsampling", type=int, choices=[4, 8], help="frames of 10 ms in an encoder frame (4)"
    )
    model.add_argument(
        "--cmvn",
        choices=["global", "utterance"],
        help="feature normalisation: by training-set statistics, or each utterance's own (global)",
    )
    model.add_argument("--dropout", type=options.SHARE, default=0.1, metavar="P", help="(0.1)")
    model.add_argument(
        "--label_smoothing",
        type=options.SHARE,
        default=0.1,
        metavar="P",
        help="label smoothing of the attention decoder's targets (0.1)",
    )
    model.add_argument(
        "--tokenizer",
        choices=["char", "bpe"],
        default="char",
        help="SentencePiece units, trained on the training text (char)",
    )
    model.add_argument(
        "--vocab_size",
        type=options.number(int, 1, 200000),
        metavar="N",
        help="pieces of --tokenizer bpe (500)",
    )
    model.add_argument(
        "--vocab_file",
        type=options.path,
        metavar="FILE",
        help="characters from a vocab.json with char2idx, instead of a trained tokenizer",
    )
    options.add_arguments(parser)


def resolve(args) -> None:
    is_demo = not args.train_manifest
    excludes, needs = (
        recogniser.EXCLUDES,
        (*splits.NEEDS, *recogniser.NEEDS, *NEEDS),
    )
    options.resolve(args, is_demo, DEMO_STEPS, excludes, needs)
    augment = not is_demo or options.plans(args)  # the demo's voices hardly vary
    recogniser.resolve(args, augment, BEAM_SIZE)


def choose_shape(args, saved: dict | None) -> dict:
    """The shape of the model: that of the checkpoint's configuration `saved`, which a flag must not
    contradict; without one the flags', then the defaults. Raises `UsageError`."""
    shape = {**SHAPE, **{name: saved[name] for name in SHAPE if saved}}
    for name in SHAPE:
        value = getattr(args, name)
        if saved and value not in (None, saved[name]):
            conflict = f"--{name} {value} conflicts with the checkpoint, which has {saved[name]}"
            advice = (
                "leave the flag out to continue it, or start a new run with another --output_dir"
            )
            raise UsageError(
                f"{conflict}: {advice}, or from its weights with --init_from in place of --resume"
            )
        shape[name] = shape[name] if value is None else value
    check_heads(shape)
    return shape


def check_heads(config: dict) -> None:
    d, heads = config["d_model"], config["attention_heads"]
    if d % (2 * heads):
        raise UsageError(f"--d_model {d} must be a multiple of twice --attention_heads {heads}")


# --- data -----------------------------------------------------------------------------------------


def read_corpora(args, saved: checkpoint.Saved | None) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What was held out when the model `saved` began is held out again."""
    held_out, shape = (), None
    if saved:
        held_out = records.read(RunInfo, saved.run_info, saved.path).held_out
        shape = records.read(ModelInfo, saved.model_info, saved.path).config
    checks = splits.resolve(args, held_out)
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.test_manifest and (args.evaluate or not args.train_manifest):
        paths = {"test": args.test_manifest}
    elif not args.train_manifest and options.plans(args):
        subsampling = choose_shape(args, shape)["subsampling"]
        return splits.stand_in(
            args.max_duration, encoder_frames(int(args.max_duration * SAMPLE_RATE), subsampling)
        )
    elif not args.train_manifest:
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        folder = Path(args.output_dir) / "data" / "konkani_demo"
        paths = demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES)
    return splits.load_splits(paths, text.normalise, checks)


def make_tokenizer(args, saved: ModelInfo | None, texts):
    """The tokenizer of the model `saved`, which flags must not contradict; or the flags'."""
    own = text.load_vocab_file(args.vocab_file) if args.vocab_file else None
    if not saved:
        return own or text.train_tokenizer(texts, args.tokenizer, args.vocab_size or 500)
    asked = saved.asked
    conflicts = [
        name
        for name in args.given & {"tokenizer", "vocab_size"}
        if getattr(args, name) != asked.get(name)
    ]
    if own and own.state() != saved.tokenizer:
        conflicts.append("vocab_file")
    if conflicts:
        raise UsageError(
            f"--{conflicts[0]} is not what the checkpoint's tokens were made from: leave it out"
        )
    return text.make_tokenizer(saved.tokenizer, saved.config["vocabulary"])


def drop_untrainable(corpus: Corpus, tokenizer, subsampling: int, strict: bool) -> Corpus:
    """Without the utterances that no CTC alignment fits, and those of unknown characters only.
    Other characters outside the vocabulary become its unknown token."""
    unknown = 0

    def fault(index: int) -> tuple[str, str] | None:
        nonlocal unknown
        tokens = tokenizer.encode(corpus.texts[index])
        share = text.unknown_share(tokenizer, tokens)
        unknown += 0 < share < 1
        if share == 1:
            return "text is outside the vocabulary", corpus.texts[index][:60]
        if not ctc_fits(int(corpus.seconds[index] * SAMPLE_RATE), tokens, subsampling):
            size = f"{len(tokens)} tokens in {corpus.seconds[index]:.2f} s"
            return "text is too long for its audio (CTC needs a frame a token)", size
        return None

    kept = splits.drop(corpus, "training set", fault, strict)
    if unknown:
        print(
            f"{unknown} training texts hold characters outside the vocabulary; they train its"
            " unknown token"
        )
    return kept


def encoder_frames(samples: int, subsampling: int) -> int:
    """Encoder frames of so many samples at 16 kHz: 25 ms global batches every 10 ms, then halved two or
    three times."""
    count = frames(samples, SAMPLE_RATE)
    for _ in range(subsampling.bit_length() - 1):
        count = (count - 1) // 2 + 1
    return count


def ctc_fits(samples: int, tokens: list[int], subsampling: int) -> bool:
    """Whether there is an encoder frame for every token, and for the blank between two equal
    ones."""
    repeats = sum(a == b for a, b in itertools.pairwise(tokens))
    return encoder_frames(samples, subsampling) >= len(tokens) + repeats


class Utterances:
    """A set of utterances as the model takes them. Only the training set is augmented, and
    augmentation depends on (seed, epoch, index) alone."""

    def __init__(self, args, corpus: Corpus, tokenizer, subsampling: int, training: bool):
        self.args = args
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.subsampling = subsampling
        self.training = training

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
        return speed_factors(self.args.seed, epoch, len(self.corpus), SPEEDS)

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), labels (U + 1,), and masks of SpecAugment."""
        args, transcript = self.args, self.corpus.texts[index]
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE, args.cache_audio)
        tokens = self.tokenizer.encode(transcript)
        if self.training and args.speed_perturbation:
            changed = change_speed(waveform, float(self.speeds(epoch)[index]))
            if ctc_fits(
                len(changed), tokens, self.subsampling
            ):  # a fast, dense utterance stays as it is
                waveform = changed
        eos = (
            self.tokenizer.size
        )  # one number past the text's: the decoder's start and end, and CTC's blank
        item = {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "labels": torch.tensor([*tokens, eos]),
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }
        if self.training and args.spec_augment:
            random = np.random.default_rng([args.seed, epoch, index])
            item["frequency_masks"] = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
            item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
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
    tokens = int(batch["tokens_lengths"].sum())
    batch["counts"] = {"ctc": tokens, "attention": tokens + len(items)}
    return batch


# --- model ----------------------------------------------------------------------------------------


def rotary_angles(
    length: int, head_dim: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, head_dim / 2) of rotary positions (Su et al. 2021)."""
    frequencies = 10_000.0 ** (
        -torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    )
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns each pair (first half, second half) of (B, H, T, D) by its position's angle; the type
    stays."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Sequential):
    """Pre-norm feed-forward of 4 d, (B, T, D) to (B, T, D); the residual is the caller's. One
    dropout, on the output: a second one on the wide hidden layer would be the largest tensor that
    backward keeps. The output of SiLU would be as large, so `lean_chain` computes it again in
    backward."""

    def __init__(self, d: int, dropout: float):
        super().__init__(
            nn.LayerNorm(d),
            nn.Linear(d, 4 * d),
            nn.SiLU(),
            nn.Linear(4 * d, d),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        self, x: torch.Tensor, angles: tuple, mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
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

    def forward(
        self, x: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(encoded).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class Convolution(nn.Module):
    """The Conformer's convolution module, (B, T, D) to (B, T, D). Normalised per frame, not per
    batch: with batches of one or two BatchNorm's statistics are useless, and accumulation would not
    be exact."""

    def __init__(self, d: int, kernel: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.enter = nn.Linear(d, 2 * d)
        self.depthwise = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d)
        self.middle_norm = nn.LayerNorm(d)
        self.leave = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
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
        self,
        x: torch.Tensor,
        angles: tuple,
        mask: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
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

    def forward(
        self, x: torch.Tensor, encoded: torch.Tensor, angles: tuple, mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.attention(x, angles, causal=True)
        x = x + self.cross(x, encoded, mask)
        return x + self.feed_forward(x)


class Subsampling(nn.Module):
    """Features (B, F, M) to (B, T, D) with F / 4 or F / 8 frames: a strided 3x3 convolution, then
    depthwise-separable ones. What lies beyond each length is zeroed before every convolution, so
    padding changes nothing."""

    CHANNELS = 64

    def __init__(self, n_mels: int, d: int, factor: int):
        super().__init__()
        c, stages = self.CHANNELS, factor.bit_length() - 1
        self.first = nn.Conv2d(1, c, 3, stride=2, padding=1)
        self.depthwise = nn.ModuleList(
            [nn.Conv2d(c, c, 3, stride=2, padding=1, groups=c) for _ in range(stages - 1)]
        )
        self.pointwise = nn.ModuleList([nn.Conv2d(c, c, 1) for _ in range(stages - 1)])
        for _ in range(stages):
            n_mels = (n_mels - 1) // 2 + 1
        self.out = nn.Linear(c * n_mels, d)
        self.norm = nn.LayerNorm(d)
        self.to(memory_format=torch.channels_last)  # twice as fast as (B, C, F, M) in memory

    def forward(
        self, features: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(features[:, None])  # (B, C, F / 2, M / 2)
        lengths = (lengths - 1) // 2 + 1
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            # Masked before the ReLU: backward then keeps one tensor of this size, not two.
            x = F.relu(x.masked_fill(~valid_mask(lengths, x.shape[2])[:, None, :, None], 0.0))
            x = pointwise(depthwise(x))
            lengths = (lengths - 1) // 2 + 1
        return self.norm(self.out(F.relu(x).permute(0, 2, 3, 1).flatten(2))), lengths


CHECKPOINTED = (Subsampling, EncoderLayer, DecoderLayer)  # recomputed by --gradient_checkpointing
COMPILED = (FeedForward, SelfAttention, CrossAttention, Convolution)  # compiled by --torch_compile
BRANCH_OUTPUTS = (".out", ".leave", ".first.3", ".second.3", ".feed_forward.3")


def quieten_branches(layers: nn.ModuleList) -> None:
    """Scales what each residual branch adds by one over the root of the number of branches, without
    a bias (GPT-2's initialisation). Otherwise eight Conformer blocks drown what was heard in
    constants, and the decoder learns to guess sentences long before CTC aligns: on the demo 100
    updates instead of 400 until CTC's loss is below 1."""
    branches = [module for name, module in layers.named_modules() if name.endswith(BRANCH_OUTPUTS)]
    with torch.no_grad():
        for module in branches:
            module.weight /= math.sqrt(len(branches))
            module.bias.zero_()


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
        kernel = 31 if config["subsampling"] == 4 else 15
        self.log_mel = LogMel(SAMPLE_RATE, N_MELS)
        self.feature_norm = FeatureNorm(N_MELS, config["cmvn"])
        self.subsampling = Subsampling(N_MELS, d, config["subsampling"])
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            [EncoderLayer(d, heads, kernel, dropout) for _ in range(config["encoder_layers"])]
        )
        self.ctc_head = nn.Linear(d, self.eos + 1)
        self.embedding = nn.Embedding(self.eos + 1, d)
        nn.init.normal_(
            self.embedding.weight, std=d**-0.5
        )  # tied to the output: std 1 would make it diverge
        self.decoder = nn.ModuleList(
            [DecoderLayer(d, heads, dropout) for _ in range(config["decoder_layers"])]
        )
        self.decoder_norm = nn.LayerNorm(d)
        for layers in (self.encoder, self.decoder):
            quieten_branches(layers)

    def encode(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The batch's waveforms to (B, T, D), the attention mask over T (None where nothing is
        padded) and the lengths on the host."""
        lengths = frames(batch["audio_lengths"], SAMPLE_RATE)
        x = self.feature_norm(self.log_mel(batch["audio"]), lengths)  # (B, F, M)
        if "time_masks" in batch:
            x = spec_augment(x, lengths, batch["frequency_masks"], batch["time_masks"])
        x, lengths = self.subsampling(x, lengths)
        x = self.dropout(x)
        host = torch.tensor(
            [
                encoder_frames(n, self.config["subsampling"])
                for n in batch["audio_lengths_host"].tolist()
            ]
        )
        mask = padding = None
        if int(host.min()) < x.shape[1]:
            valid = valid_mask(lengths, x.shape[1])
            mask, padding = valid[:, None, None, :], ~valid[:, :, None]
        angles = rotary_angles(x.shape[1], self.head_dim, x)
        for layer in self.encoder:
            x = layer(x, angles, mask, padding)
        return x, mask, host

    def decode(
        self, tokens: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits (B, U, V + 1) of the token after each of `tokens` (B, U), the first of which is
        `self.eos`."""
        x = self.dropout(self.embedding(tokens) * math.sqrt(self.config["d_model"]))
        angles = rotary_angles(tokens.shape[1], self.head_dim, x)
        for layer in self.decoder:
            x = layer(x, encoded, angles, mask)
        return F.linear(self.decoder_norm(x), self.embedding.weight)


# --- loss, decoding and evaluation ----------------------------------------------------------------


def losses(
    model: Conformer,
    batch: dict,
    encoded: torch.Tensor,
    mask: torch.Tensor | None,
    lengths: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Sums over the batch of the CTC loss and the decoder's cross-entropy."""
    log_probs = (
        upcast(model.ctc_head(encoded)).log_softmax(-1).transpose(0, 1)
    )  # (T, B, V + 1), in fp32 or better
    # Lengths on the host spare CTC a wait for the device. What cannot be aligned was rejected
    # before training; an evaluation set is scored whole, so there it may occur.
    ctc = F.ctc_loss(
        log_probs,
        batch["tokens"],
        lengths,
        batch["tokens_lengths_host"],
        blank=model.eos,
        reduction="sum",
        zero_infinity=not model.training,
    )
    labels = batch["labels"]  # (B, U + 1)
    start = torch.full_like(labels[:, :1], model.eos)
    logits = model.decode(torch.cat([start, labels[:, :-1].clamp_min(0)], dim=1), encoded, mask)
    attention = F.cross_entropy(
        upcast(logits).flatten(0, 1),
        labels.flatten(),
        ignore_index=-100,
        reduction="sum",
        label_smoothing=model.label_smoothing,
    )
    return {"ctc": ctc, "attention": attention}


def compute_loss(model: Conformer, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    return losses(model, batch, *model.encode(batch))


def ctc_greedy(model: Conformer, encoded: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The best label of every frame, repeats merged, blanks removed."""
    best = model.ctc_head(encoded).argmax(-1).cpu()
    paths = [
        row[:length].unique_consecutive()
        for row, length in zip(best, lengths.tolist(), strict=True)
    ]
    return [path[path != model.eos].tolist() for path in paths]


def decode(
    model: Conformer, encoded: torch.Tensor, lengths: torch.Tensor, method: str, beam_size: int
) -> list[list[int]]:
    """Tokens of every utterance of (B, T, D) by one of --decoding's methods. Both searches mix the
    log-probabilities of CTC and the decoder as the loss does."""
    if method == "greedy":
        return ctc_greedy(model, encoded, lengths)
    search, hypotheses = rescored_beam if method == "rescore" else joint_beam, []
    for row, length in enumerate(lengths.tolist()):
        utterance = encoded[row : row + 1, :length]
        log_probs = upcast(model.ctc_head(utterance[0])).log_softmax(-1)

        def decoder(tokens: torch.Tensor, utterance=utterance) -> torch.Tensor:
            return model.decode(
                tokens.to(utterance.device), utterance.expand(len(tokens), -1, -1), None
            )

        hypotheses.append(search(log_probs, decoder, model.eos, beam_size, LOSS_WEIGHTS))
    return hypotheses


def evaluate(tokenizer, model: Conformer, eval_batches) -> dict[str, tuple[float, float]]:
    """Losses, CER and WER of greedy CTC decoding, as (numerator, denominator)."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, mask, lengths = model.encode(batch)
        texts = [tokenizer.decode(tokens) for tokens in ctc_greedy(model, encoded, lengths)]
        return texts, losses(model, batch, encoded, mask, lengths)

    rows, sums = decode_set(
        decode_batch, eval_batches, next(model.parameters()).device, LOSS_WEIGHTS
    )
    return {**sums, **metrics.score(rows)}


def final_texts(args, tokenizer, model: Conformer, batch: dict) -> list[str]:
    """The texts of a batch by --decoding."""
    encoded, _, lengths = model.encode(batch)
    return [
        tokenizer.decode(tokens)
        for tokens in decode(model, encoded, lengths, args.decoding, args.beam_size)
    ]


def report_results(args, tokenizer, model: Conformer, eval_batches, title: str) -> None:
    """Prints the error rates and examples of a set, decoded by --decoding."""
    device_of_model = next(model.parameters()).device
    rows, _ = decode_set(
        lambda batch: (final_texts(args, tokenizer, model, batch), {}),
        eval_batches,
        device_of_model,
    )
    title = f"{title}, {len(rows)} utterances, decoding: {args.decoding}"
    recogniser.print_results(rows, title, args.log_dir, args.seed)


# --- main -----------------------------------------------------------------------------------------


def make_model(config: dict, *settings: float, weights: dict | None = None) -> Conformer:
    """A model of this configuration. Raises `UsageError` before it takes memory if it would have
    other tensors than the `weights` that it will be given, or does not fit into memory at all."""
    check_heads(config)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Conformer(config).state_dict().items()}
    if weights and shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise UsageError(
            "the saved weights are not those of the model that their metadata describe; --init_from"
            " loads what fits"
        )
    require_room(sum(map(math.prod, shapes.values())))
    return Conformer(config, *settings)


def trained(args, setup: device.Setup) -> tuple[Conformer, object, checkpoint.Saved]:
    """The model and tokenizer of --resume, or of the best evaluation, and what was saved."""
    saved = checkpoint.weights_to_use(args.resume, args.checkpoint_dir, RECIPE)
    info = records.read(ModelInfo, saved.model_info, saved.path)
    tokenizer = text.make_tokenizer(info.tokenizer, info.config["vocabulary"])
    model = make_model(info.config, weights=saved.model)
    checkpoint.load_weights(model, saved.model)
    return model.to(setup.device).eval(), tokenizer, saved


def transcribe(args) -> None:
    setup = device.setup(args, quiet=True)
    model, tokenizer, saved = trained(args, setup)
    texts_of = functools.partial(final_texts, args, tokenizer, model)
    longest = records.read(RunInfo, saved.run_info, saved.path).longest
    longest, _ = recogniser.in_pieces(args.piece_seconds, longest)
    recogniser.transcribe_files(
        args.transcribe, texts_of, setup, longest, args.output, args.eval_batch_size
    )


@torch.no_grad()
def evaluate_only(args) -> None:
    setup = device.setup(args)
    check_folder(args.log_dir)
    model, tokenizer, saved = trained(args, setup)
    corpora = read_corpora(args, saved)
    name = "test" if "test" in corpora else "val"
    data = Utterances(args, corpora[name], tokenizer, model.config["subsampling"], training=False)
    with setup.autocast():
        report_results(
            args, tokenizer, model, EvalBatches(args, data, collate, setup), f"{name} set"
        )


def measure_features(seed: int, model: Conformer, data: Utterances) -> None:
    """Statistics for --cmvn global, from a random part of the training set."""
    measured = []
    for index in np.random.default_rng(seed).permutation(len(data)):
        try:
            waveform = read_utterance(data.corpus, index, SAMPLE_RATE, data.args.cache_audio)
        except DataError:
            continue  # training itself reports it
        measured.append(model.log_mel(waveform[None])[0])
        if len(measured) == NORM_UTTERANCES:
            break
    if measured:
        model.feature_norm.measure(measured)


def main(args) -> None:
    resolve(args)
    if args.check_data:
        return splits.report_checked(read_corpora(args, None))
    if args.transcribe:
        return transcribe(args)
    if args.evaluate:
        return evaluate_only(args)
    run = begin(args, RECIPE)
    saved = None
    if run.resumed:
        saved = records.read(ModelInfo, run.resumed.model_info, run.resumed.path)
    shape = choose_shape(args, saved and saved.config)

    corpora = read_corpora(args, run.resumed)
    tokenizer = make_tokenizer(args, saved, corpora["train"].texts)
    corpora["train"] = drop_untrainable(
        corpora["train"], tokenizer, shape["subsampling"], args.strict_data
    )
    data = {
        name: Utterances(args, corpora[name], tokenizer, shape["subsampling"], name == "train")
        for name in corpora
    }
    config = {**shape, "vocabulary": tokenizer.size}
    with run.model_device():
        model = make_model(
            config, args.dropout, args.label_smoothing, weights=run.resumed and run.resumed.model
        )
    print(
        f"model: {optim.count_parameters(model)[0] / 1e6:.1f} M parameters, {tokenizer.size} text"
        " tokens"
    )

    global_batches = GlobalBatches(args, data["train"], collate, run.setup)
    evaluation = {
        name: EvalBatches(args, data[name], collate, run.setup) for name in data if name != "train"
    }
    held_out = []
    if args.train_manifest and not args.val_manifest:
        held_out = splits.held_out_keys(corpora["val"])
    asked = {"tokenizer": args.tokenizer, "vocab_size": args.vocab_size}
    task = Task(
        RECIPE,
        compute_loss,
        LOSS_WEIGHTS,
        functools.partial(evaluate, tokenizer),
        ModelInfo(config, tokenizer.state(), saved.asked if saved else asked),
        RunInfo(held_out, float(corpora["train"].seconds.max())),
        metric="cer",
        fit=functools.partial(measure_features, args.seed) if shape["cmvn"] == "global" else None,
        checkpointed=CHECKPOINTED,
        compiled=COMPILED,
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
            args, tokenizer, model, evaluation[name].whole(), f"{name} set, {weights}"
        ),
    )


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
