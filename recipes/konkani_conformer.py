"""Konkani speech recognition: a small Conformer with a CTC head and an attention decoder, trained from scratch.

    python recipes/konkani_conformer.py                       # no data needed: makes a demo corpus of synthetic speech
    python recipes/konkani_conformer.py --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/konkani_conformer.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "हांव घर वचता"}, CSV/TSV with a header, or LJSpeech's metadata.csv;
any sample rate; utterances of up to 30 s. Any language: characters are taken from the training text.

Memory: the T4's preset (micro-batch 2 x accumulation 4, d 192, 8+4 layers) is predicted to need 0.35 GiB beside CUDA's own
at 30 s an utterance (benchmarks/konkani_memory.py). Expect a character error rate below 1 % on the demo's held-out
sentences after its 600 updates (two CPU cores: three to four minutes); synthetic speech proves the mechanics, not a real-world error rate.

Sources: Conformer (Gulati et al. 2020); rotary positions in it (Li et al. 2021, "Conformer-based End-to-end Speech
Recognition With Rotary Position Embedding"); joint CTC/attention (Watanabe et al. 2017); SpecAugment (Park et al. 2019).
"""

import functools
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import batches, checkpoint, compiling, device, memory, optim, options, report
from common.device import upcast
from common.errors import DataError, UsageError, exit_with_one_line
from common.loop import train
from speech import audio, demo, metrics, text
from speech import recogniser as results
from speech.columns import Corpus
from speech.corpus import drop, load_splits
from speech.features import FeatureNorm, LogMel, frames, random_masks, spec_augment, valid_mask
from speech.search import CTCPrefixScores, autoregressive_beam, ctc_prefix_beam

RECIPE = "konkani_conformer"
SAMPLE_RATE = 16_000  # Hz
N_MELS = 80
LOSS_WEIGHTS = {"ctc": 0.3, "attention": 0.7}
SPEEDS = (0.9, 1.0, 1.1)
FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH = 2, 27 / 80  # share of the bands
TIME_MASKS, TIME_MASK_WIDTH = 5, 0.05  # share of the utterance
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 600
HELD_OUT, MOST_HELD_OUT = 0.05, 200  # of the training data, where no --val_manifest is given
NORM_UTTERANCES = 500  # for the statistics of --cmvn global
SHAPE = {
    "d_model": 192,
    "encoder_layers": 8,
    "decoder_layers": 4,
    "attention_heads": 4,
    "subsampling": 4,
    "cmvn": "global",
}


def add_arguments(parser) -> None:
    # fmt: off
    model = parser.add_argument_group("model (its shape comes from the checkpoint when resuming)")
    model.add_argument("--d_model", type=options.POSITIVE, metavar="N", help="width (192)")
    model.add_argument("--encoder_layers", type=options.POSITIVE, metavar="N", help="Conformer blocks (8)")
    model.add_argument("--decoder_layers", type=options.POSITIVE, metavar="N", help="Transformer decoder layers (4)")
    model.add_argument("--attention_heads", type=options.POSITIVE, metavar="N", help="heads in every attention (4)")
    model.add_argument("--subsampling", type=int, choices=[4, 8], help="frames of 10 ms in an encoder frame (4)")
    model.add_argument("--cmvn", choices=["global", "utterance"], help="feature normalisation: training-set statistics, or each utterance's own (global)")
    model.add_argument("--dropout", type=options.SHARE, default=0.1, metavar="P", help="(0.1)")
    model.add_argument("--label_smoothing", type=options.SHARE, default=0.1, metavar="P", help="of the attention decoder's targets (0.1)")
    data = parser.add_argument_group("text and augmentation")
    data.add_argument("--test_manifest", type=options.path, metavar="FILE", help="for the figures at the end (the evaluation set)")
    data.add_argument("--tokenizer", choices=["char", "bpe"], default="char", help="SentencePiece units, trained on the training text (char)")
    data.add_argument("--vocab_size", type=options.POSITIVE, default=500, metavar="N", help="pieces of --tokenizer bpe (500)")
    data.add_argument("--vocab_file", type=options.path, metavar="FILE", help="characters from a vocab.json with char2idx, instead of a trained tokenizer")
    data.add_argument("--spec_augment", action=options.OnOff, help="mask bands and spans of the features (on; off for the demo)")
    data.add_argument("--speed_perturbation", action=options.OnOff, help="play at 0.9, 1.0 or 1.1 times the speed (on; off for the demo)")
    use = parser.add_argument_group("decoding and use")
    use.add_argument("--decoding", choices=["greedy", "rescore", "beam"], default="rescore", help="for the figures at the end and --transcribe: CTC's best path, CTC's n-best rescored by the decoder, or the decoder's beam with CTC (rescore)")
    use.add_argument("--beam_size", type=options.POSITIVE, default=10, metavar="N", help="hypotheses of rescore and beam (10)")
    use.add_argument("--average_checkpoints", type=options.POSITIVE, metavar="N", help="average the weights of N checkpoints at the end, and use them where they are not worse")
    use.add_argument("--average_by", choices=["last", "best"], default="last", help="which checkpoints to average: the newest, or those that evaluated best (last)")
    use.add_argument("--transcribe", nargs="+", type=options.path, metavar="PATH", help="transcribe files and folders with the weights of --resume (CHECKPOINT_DIR/best.safetensors)")
    use.add_argument("--output", type=options.path, metavar="FILE", help="write transcripts there as JSON Lines")
    # fmt: on


# --- text and data ---------------------------------------------------------------------------------------------------


def read_corpora(args) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, where there is one, "test"; the demo's where no manifest is given."""
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if not args.train_manifest:
        folder = Path(args.output_dir) / "data" / "konkani_demo"
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        paths = demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES)
    return load_splits(args, paths, text.normalise, HELD_OUT, MOST_HELD_OUT)


def make_tokenizer(args, corpus: Corpus, resumed: dict | None):
    if resumed:
        return text.make_tokenizer(resumed["metadata"]["tokenizer"])
    if args.vocab_file:
        return text.load_vocab_file(args.vocab_file)
    return text.train_tokenizer(corpus.texts, args.tokenizer, args.vocab_size)


def drop_untrainable(corpus: Corpus, tokenizer, subsampling: int, strict: bool) -> Corpus:
    """Without the utterances that no CTC alignment fits (fewer encoder frames than tokens and the blanks between equal
    ones), and those of unknown characters only. Characters unknown to the vocabulary become its unknown token."""
    unknown = 0

    def fault(index: int) -> tuple[str, str] | None:
        nonlocal unknown
        tokens = tokenizer.encode(corpus.texts[index])
        share = text.unknown_share(tokenizer, tokens)
        unknown += 0 < share < 1
        if share == 1:
            return "text is outside the vocabulary", corpus.texts[index][:60]
        if not ctc_fits(int(corpus.seconds[index] * SAMPLE_RATE), tokens, subsampling):
            what = f"{len(tokens)} tokens in {corpus.seconds[index]:.2f} s"
            return "text is too long for its audio (CTC needs a frame a token)", what
        return None

    kept = drop(corpus, "training set", fault, strict)
    if unknown:
        print(f"{unknown} training texts hold characters outside the vocabulary; they train its unknown token")
    return kept


def encoder_frames(samples: int, subsampling: int) -> int:
    """Encoder frames of so many samples at 16 kHz: 25 ms windows every 10 ms, then halved two or three times."""
    count = frames(samples, SAMPLE_RATE)
    for _ in range(subsampling.bit_length() - 1):
        count = (count - 1) // 2 + 1
    return count


def ctc_fits(samples: int, tokens: list[int], subsampling: int) -> bool:
    repeats = sum(a == b for a, b in itertools.pairwise(tokens))
    return encoder_frames(samples, subsampling) >= len(tokens) + repeats


def seconds_in_epoch(corpus: Corpus, args, epoch: int) -> np.ndarray:
    """(N,) lengths as they are trained on in an epoch."""
    if not args.speed_perturbation:
        return corpus.seconds
    return corpus.seconds / audio.speed_factors(args.seed, epoch, len(corpus), SPEEDS)


def load_item(corpus: Corpus, tokenizer, args, training: bool, index: int, epoch: int) -> dict:
    """One utterance: waveform, tokens, and its augmentation, which depends on (seed, epoch, index) alone."""
    waveform = audio.read_utterance(corpus, index, SAMPLE_RATE, args.cache_audio)
    tokens = tokenizer.encode(corpus.texts[index])
    end = tokenizer.size  # one number past the text's: the decoder's start and end, and CTC's blank
    item = {
        "audio": waveform, "tokens": torch.tensor(tokens, dtype=torch.long), "labels": torch.tensor([*tokens, end]),
        "text": corpus.texts[index], "name": corpus.where(index),
    }  # fmt: skip
    if training and args.speed_perturbation:
        factors = audio.speed_factors(args.seed, epoch, len(corpus), SPEEDS)
        changed = audio.change_speed(waveform, float(factors[index]))
        if ctc_fits(len(changed), tokens, args.subsampling):  # a fast, dense utterance stays as it is
            item["audio"] = changed
    if training and args.spec_augment:
        random = np.random.default_rng([args.seed, epoch, index])
        item["frequency_masks"] = random_masks(random, FREQUENCY_MASKS, FREQUENCY_MASK_WIDTH)
        item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
    return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T), tokens (B, U), labels (B, U + 1) with -100 beyond their end."""
    batch = batches.gather(items, {"audio": 0.0, "tokens": 0, "labels": -100}, SAMPLE_RATE)
    tokens = int(batch["tokens_lengths"].sum())
    batch["counts"] = {"ctc": tokens, "attention": tokens + len(items)}
    return batch


# --- model -----------------------------------------------------------------------------------------------------------


def rotary_angles(length: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, head_dim / 2) of rotary positions (Su et al. 2021)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns each pair (first half, second half) of (B, H, T, D) by its position's angle; the type stays."""
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Sequential):
    """Pre-norm feed-forward of 4 d, (B, T, D) to (B, T, D); the residual is the caller's. One dropout, on the output: a
    second one on the wide hidden layer would be the largest tensor that backward keeps."""

    def __init__(self, d: int, dropout: float):
        super().__init__(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d), nn.Dropout(dropout))


class SelfAttention(nn.Module):
    """Pre-norm self-attention with rotary positions, (B, T, D) to (B, T, D). Attention weights have no dropout: with it
    fused kernels are lost on a CPU."""

    def __init__(self, d: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: torch.Tensor, angles: tuple, mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, D/H)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, attn_mask=mask, is_causal=causal)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class CrossAttention(nn.Module):
    """Pre-norm attention of (B, U, D) over the encoder's (B, T, D), to (B, U, D)."""

    def __init__(self, d: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm, self.q, self.kv, self.out = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(encoded).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class Convolution(nn.Module):
    """The Conformer's convolution module, (B, T, D) to (B, T, D). Normalised per frame, not per batch: with batches of
    one or two BatchNorm's statistics are useless, and accumulation would not be exact."""

    def __init__(self, d: int, kernel: int, dropout: float):
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(d), nn.Linear(d, 2 * d)
        self.depthwise = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d)
        self.middle_norm, self.leave, self.dropout = nn.LayerNorm(d), nn.Linear(d, d), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        x = F.glu(self.enter(self.norm(x)), dim=-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)  # or the kernel would see what follows the end
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.leave(F.silu(self.middle_norm(x))))


class EncoderLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, d: int, heads: int, kernel: int, dropout: float):
        super().__init__()
        self.first, self.second = FeedForward(d, dropout), FeedForward(d, dropout)
        self.attention, self.convolution = SelfAttention(d, heads, dropout), Convolution(d, kernel, dropout)
        self.norm = nn.LayerNorm(d)

    def forward(
        self, x: torch.Tensor, angles: tuple, mask: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, angles, mask)
        x = x + self.convolution(x, padding)
        return self.norm(x + 0.5 * self.second(x))


class DecoderLayer(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float):
        super().__init__()
        self.attention, self.cross = SelfAttention(d, heads, dropout), CrossAttention(d, heads, dropout)
        self.feed_forward = FeedForward(d, dropout)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, angles: tuple, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(x, angles, causal=True)
        x = x + self.cross(x, encoded, mask)
        return x + self.feed_forward(x)


class Subsampling(nn.Module):
    """Features (B, F, M) to (B, T, D) with F / 4 or F / 8 frames: a strided 3x3 convolution, then depthwise-separable
    ones. What lies beyond each length is zeroed before every convolution, so padding changes nothing."""

    CHANNELS = 64

    def __init__(self, n_mels: int, d: int, factor: int):
        super().__init__()
        c, stages = self.CHANNELS, factor.bit_length() - 1
        self.first = nn.Conv2d(1, c, 3, stride=2, padding=1)
        self.depthwise = nn.ModuleList([nn.Conv2d(c, c, 3, stride=2, padding=1, groups=c) for _ in range(stages - 1)])
        self.pointwise = nn.ModuleList([nn.Conv2d(c, c, 1) for _ in range(stages - 1)])
        for _ in range(stages):
            n_mels = (n_mels - 1) // 2 + 1
        self.out, self.norm = nn.Linear(c * n_mels, d), nn.LayerNorm(d)
        self.to(memory_format=torch.channels_last)  # twice as fast as (B, C, F, M) in memory

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(features[:, None])  # (B, C, F / 2, M / 2)
        lengths = (lengths - 1) // 2 + 1
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            # Masked before the ReLU: backward then keeps one tensor of this size, not two.
            x = F.relu(x.masked_fill(~valid_mask(lengths, x.shape[2])[:, None, :, None], 0.0))
            x = pointwise(depthwise(x))
            lengths = (lengths - 1) // 2 + 1
        return self.norm(self.out(F.relu(x).permute(0, 2, 3, 1).flatten(2))), lengths


CHECKPOINTED = (Subsampling, EncoderLayer, DecoderLayer)  # what --gradient_checkpointing recomputes
COMPILED = (FeedForward, SelfAttention, CrossAttention, Convolution)  # what --torch_compile compiles
BRANCH_OUTPUTS = (".out", ".leave", ".first.3", ".second.3", ".feed_forward.3")


def quieten_branches(layers: nn.ModuleList) -> None:
    """Scales what each residual branch adds by one over the root of the number of branches, without a bias (GPT-2's
    initialisation). Otherwise eight Conformer blocks drown what was heard in constants, and the decoder learns to guess
    sentences long before CTC aligns: on the demo 100 updates instead of 400 until CTC's loss is below 1."""
    branches = [module for name, module in layers.named_modules() if name.endswith(BRANCH_OUTPUTS)]
    with torch.no_grad():
        for module in branches:
            module.weight /= math.sqrt(len(branches))
            module.bias.zero_()


class Conformer(nn.Module):
    """Encoder, CTC head and attention decoder. Both outputs have `vocabulary` + 1 entries; the last is CTC's blank, and
    the decoder's start and end."""

    def __init__(self, config: dict, dropout: float = 0.1, label_smoothing: float = 0.1):
        super().__init__()
        d, heads = config["d_model"], config["attention_heads"]
        self.config, self.label_smoothing, self.end = config, label_smoothing, config["vocabulary"]
        self.head_dim = d // heads
        kernel = 31 if config["subsampling"] == 4 else 15
        self.log_mel = LogMel(SAMPLE_RATE, N_MELS)
        self.feature_norm = FeatureNorm(N_MELS, config["cmvn"])
        self.subsampling = Subsampling(N_MELS, d, config["subsampling"])
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList([EncoderLayer(d, heads, kernel, dropout) for _ in range(config["encoder_layers"])])
        self.ctc_head = nn.Linear(d, self.end + 1)
        self.embedding = nn.Embedding(self.end + 1, d)
        nn.init.normal_(self.embedding.weight, std=d**-0.5)  # tied to the output: std 1 would make it diverge
        self.decoder = nn.ModuleList([DecoderLayer(d, heads, dropout) for _ in range(config["decoder_layers"])])
        self.decoder_norm = nn.LayerNorm(d)
        for layers in (self.encoder, self.decoder):
            quieten_branches(layers)

    def encode(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The batch's waveforms to (B, T, D), the attention mask over T (None where nothing is padded) and the lengths
        on the host."""
        lengths = frames(batch["audio_lengths"], SAMPLE_RATE)
        x = self.feature_norm(self.log_mel(batch["audio"]), lengths)  # (B, F, M)
        if "time_masks" in batch:
            x = spec_augment(x, lengths, batch["frequency_masks"], batch["time_masks"])
        x, lengths = self.subsampling(x, lengths)
        x = self.dropout(x)
        host = torch.tensor(
            [encoder_frames(n, self.config["subsampling"]) for n in batch["audio_lengths_host"].tolist()]
        )
        mask = padding = None
        if int(host.min()) < x.shape[1]:
            valid = valid_mask(lengths, x.shape[1])
            mask, padding = valid[:, None, None, :], ~valid[:, :, None]
        angles = rotary_angles(x.shape[1], self.head_dim, x)
        for layer in self.encoder:
            x = layer(x, angles, mask, padding)
        return x, mask, host

    def decode(self, tokens: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Logits (B, U, V + 1) of the token after each of `tokens` (B, U), the first of which is `self.end`."""
        x = self.dropout(self.embedding(tokens) * math.sqrt(self.config["d_model"]))
        angles = rotary_angles(tokens.shape[1], self.head_dim, x)
        for layer in self.decoder:
            x = layer(x, encoded, angles, mask)
        return F.linear(self.decoder_norm(x), self.embedding.weight)


def compute_loss(model: Conformer, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of CTC's and the decoder's loss, to be divided by the window's counts."""
    return losses(model, batch, *model.encode(batch))


def losses(
    model: Conformer, batch: dict, encoded: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    log_probs = upcast(model.ctc_head(encoded)).log_softmax(-1).transpose(0, 1)  # (T, B, V + 1), in fp32 or better
    # Lengths on the host spare CTC a wait for the device. What cannot be aligned was rejected before training; an
    # evaluation set is scored whole, so there it may occur.
    ctc = F.ctc_loss(log_probs, batch["tokens"], lengths, batch["tokens_lengths_host"], blank=model.end, reduction="sum", zero_infinity=not model.training)  # fmt: skip
    labels = batch["labels"]  # (B, U + 1)
    start = torch.full_like(labels[:, :1], model.end)
    logits = model.decode(torch.cat([start, labels[:, :-1].clamp_min(0)], dim=1), encoded, mask)
    attention = F.cross_entropy(upcast(logits).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=model.label_smoothing)  # fmt: skip
    return {"ctc": ctc, "attention": attention}


# --- decoding and evaluation -----------------------------------------------------------------------------------------


def ctc_greedy(model: Conformer, encoded: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The best label of every frame, repeats merged, blanks removed."""
    best = model.ctc_head(encoded).argmax(-1).cpu()
    paths = [row[:length].unique_consecutive() for row, length in zip(best, lengths.tolist(), strict=True)]
    return [path[path != model.end].tolist() for path in paths]


def decode(
    model: Conformer, encoded: torch.Tensor, lengths: torch.Tensor, method: str, beam_size: int
) -> list[list[int]]:
    """Tokens of every utterance of (B, T, D) by one of --decoding's methods."""
    if method == "greedy":
        return ctc_greedy(model, encoded, lengths)
    search = rescored if method == "rescore" else attention_beam
    return [search(model, encoded[row : row + 1, :length], beam_size) for row, length in enumerate(lengths.tolist())]


def rescored(model: Conformer, encoded: torch.Tensor, beam_size: int) -> list[int]:
    """CTC's n best of one utterance (1, T, D), ordered by the loss's own mixture of CTC's and the decoder's
    log-probabilities."""
    log_probs = upcast(model.ctc_head(encoded[0])).log_softmax(-1).cpu().numpy()
    hypotheses = ctc_prefix_beam(log_probs, beam_size, model.end)
    labels, _ = batches.pad([torch.tensor([*tokens, model.end]) for tokens, _ in hypotheses], -100)
    labels = labels.to(encoded.device)  # (N, U + 1)
    inputs = F.pad(labels[:, :-1].clamp_min(0), (1, 0), value=model.end)
    following = upcast(model.decode(inputs, encoded.expand(len(labels), -1, -1), None)).log_softmax(-1)
    attention = -F.nll_loss(following.transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(1)
    ctc = torch.tensor([score for _, score in hypotheses], device=encoded.device)
    best = (LOSS_WEIGHTS["ctc"] * ctc + LOSS_WEIGHTS["attention"] * attention).argmax()
    return list(hypotheses[int(best)][0])


def attention_beam(model: Conformer, encoded: torch.Tensor, beam_size: int) -> list[int]:
    """The decoder's beam search for one utterance (1, T, D), with CTC's prefix probabilities mixed in as in the loss:
    the decoder alone loops and stops too early. At most a token a frame."""
    ctc = CTCPrefixScores(upcast(model.ctc_head(encoded[0])).log_softmax(-1).cpu().numpy(), model.end)

    def following(prefixes: torch.Tensor) -> torch.Tensor:
        logits = model.decode(prefixes.to(encoded.device), encoded.expand(len(prefixes), -1, -1), None)[:, -1]
        attention = upcast(logits).log_softmax(-1).cpu()
        added = torch.from_numpy(ctc.extend([tuple(row[1:]) for row in prefixes.tolist()])).to(attention.dtype)
        return LOSS_WEIGHTS["attention"] * attention + LOSS_WEIGHTS["ctc"] * added

    return autoregressive_beam(following, model.end, model.end, beam_size, encoded.shape[1])[0][0]


def decode_set(model: Conformer, tokenizer, eval_batches, method: str, beam_size: int = 1) -> tuple[list[dict], dict]:
    """Decodes batches: one {"file", "reference", "hypothesis"} an utterance, and {loss term: (sum, count)}."""

    def one(batch: dict) -> tuple[list[str], dict]:
        encoded, mask, lengths = model.encode(batch)
        terms = losses(model, batch, encoded, mask, lengths)
        texts = [tokenizer.decode(tokens) for tokens in decode(model, encoded, lengths, method, beam_size)]
        return texts, {name: float(value) for name, value in terms.items()}

    return results.decode_set(one, eval_batches, LOSS_WEIGHTS, next(model.parameters()).device)


def evaluate(tokenizer, model: Conformer, eval_batches) -> dict[str, tuple[float, float]]:
    """Losses, CER and WER of greedy CTC decoding, as (numerator, denominator)."""
    rows, values = decode_set(model, tokenizer, eval_batches, "greedy")
    return {**values, **metrics.score(rows)}


@torch.no_grad()
def transcribe(args) -> None:
    setup = device.setup(args, quiet=True)
    weights, metadata = checkpoint.weights_to_use(args, RECIPE)
    tokenizer = text.make_tokenizer(metadata["tokenizer"])
    model = Conformer(metadata["config"])
    checkpoint.load_weights(model, weights)
    model.to(setup.device).eval()

    def one(batch: dict) -> list[str]:
        (batch,) = batches.to_device([batch], setup.device)
        with setup.autocast():
            encoded, _, lengths = model.encode(batch)
            return [
                tokenizer.decode(tokens) for tokens in decode(model, encoded, lengths, args.decoding, args.beam_size)
            ]

    def texts_of(waveforms: list[torch.Tensor], name: str) -> list[str]:
        padded, lengths = batches.pad(waveforms)
        batch = {"audio": padded, "audio_lengths": lengths, "names": [name] * len(waveforms)}
        return [found for piece in memory.split_on_oom(one, batch, setup.device) for found in piece]

    results.transcribe_files(args, texts_of, SAMPLE_RATE, metadata["longest"])


# --- main ------------------------------------------------------------------------------------------------------------


def measure_features(model: Conformer, corpus: Corpus, args) -> None:
    """Statistics for --cmvn global, from a random part of the training set."""
    found = []
    for index in np.random.default_rng(args.seed).permutation(len(corpus)):
        try:
            found.append(model.log_mel(audio.read_utterance(corpus, index, SAMPLE_RATE, args.cache_audio)[None])[0])
        except DataError:
            continue  # training itself says what to do about it
        if len(found) == NORM_UTTERANCES:
            break
    if found:
        model.feature_norm.measure(found)


def main(args) -> None:
    options.resolve(args, DEMO_STEPS)
    if args.transcribe:
        return transcribe(args)
    if args.output or (args.test_manifest and not args.train_manifest):
        raise UsageError(
            "--output goes with --transcribe" if args.output else "--test_manifest was given without --train_manifest"
        )
    setup = device.setup(args)
    lock = checkpoint.lock_folder(args.checkpoint_dir) if setup.ranks.first else None  # noqa: F841  held until the end
    report.check_folder(args.log_dir)
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, RECIPE)
    initial = checkpoint.read_weights(args.init_from, RECIPE)[0] if args.init_from else None
    options.resolve_shape(args, SHAPE, resumed["metadata"]["config"] if resumed else None)
    if args.d_model % (2 * args.attention_heads):
        raise UsageError(
            f"--d_model {args.d_model} must be a multiple of twice --attention_heads {args.attention_heads}"
        )
    options.resolve_workers(args, setup.device.type == "cpu")
    for flag in ("spec_augment", "speed_perturbation"):  # the demo's voices hardly vary, and its run is short
        setattr(args, flag, bool(args.train_manifest) if getattr(args, flag) is None else getattr(args, flag))

    corpora = read_corpora(args)
    tokenizer = make_tokenizer(args, corpora["train"], resumed)
    train_set = drop_untrainable(corpora["train"], tokenizer, args.subsampling, args.strict_data)
    config = {**{name: getattr(args, name) for name in SHAPE}, "vocabulary": tokenizer.size}
    model = Conformer(config, args.dropout, args.label_smoothing)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {tokenizer.size} text tokens")
    if args.cmvn == "global" and not resumed:
        measure_features(model, train_set, args)
    if initial:
        checkpoint.initialise(model, initial, args.init_from)
    model.to(setup.device)
    if args.torch_compile:
        compiling.compile_layers(model, COMPILED)
    if args.gradient_checkpointing:
        memory.checkpoint_layers(model, CHECKPOINTED)

    load = functools.partial(load_item, train_set, tokenizer, args, True)
    windows = batches.Windows(args, functools.partial(seconds_in_epoch, train_set, args), load, collate, setup)
    evaluation = {}
    for name in [name for name in corpora if name != "train"]:
        load = functools.partial(load_item, corpora[name], tokenizer, args, False)
        evaluation[name] = batches.EvalBatches(args, corpora[name].seconds, load, collate, setup)
    optimizer = optim.make_optimizer(model, args)
    schedule = optim.Schedule(optimizer, args.lr_schedule, windows.total_steps(args), args.warmup_steps)
    metadata = {
        "recipe": RECIPE,
        "config": config,
        "tokenizer": tokenizer.state(),
        "longest": float(train_set.seconds.max()),
    }
    train(args, model, optimizer, schedule, windows, evaluation["val"], compute_loss, LOSS_WEIGHTS,
          functools.partial(evaluate, tokenizer), setup, metadata, resumed, train_set.fingerprint())  # fmt: skip

    if setup.ranks.first:
        name = "test" if "test" in evaluation else "val"
        with torch.no_grad():
            used = checkpoint.use_best(
                args,
                model,
                RECIPE,
                metadata,
                lambda: metrics.rate(evaluate(tokenizer, model, evaluation["val"].whole())["cer"]),
            )
            rows, _ = decode_set(model, tokenizer, evaluation[name].whole(), args.decoding, args.beam_size)
        title = f"{name} set, {len(rows)} utterances, decoding: {args.decoding}, {used}"
        results.print_results(rows, title, args.log_dir / "transcripts.jsonl", args.seed)
        print(f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves and all transcripts: {args.log_dir}")


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    options.add_shared_arguments(parser)
    add_arguments(parser)
    exit_with_one_line(main, parser.parse_args())
