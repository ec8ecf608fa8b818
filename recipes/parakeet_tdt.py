"""Parakeet-TDT: NVIDIA's FastConformer transducer with 0.6 billion parameters, fine-tuned whole on
a small GPU.

    python recipes/parakeet_tdt.py                            # no data needed: a small model, on synthetic speech
    python recipes/parakeet_tdt.py --model_file parakeet-tdt-0.6b-v3.nemo --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/parakeet_tdt.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "How are you?"}, CSV/TSV with a header, or
LJSpeech's metadata.csv; any sample rate; utterances of up to 20 s, longer ones with --use_chunking
if the manifest has segment times. The text is trained on as it is written: give it the case and
punctuation that the model shall write.

--model_file takes NVIDIA's .nemo archive, --model_dir a Hugging Face folder; --from_scratch
--model_size 110m makes a model with a vocabulary of its own. --export DIR --export_format hf|nemo
writes what transformers' ParakeetForTDT and NeMo load.

Memory: weights and gradients of 0.6 billion parameters take 4.7 GiB of the GPU, optimizer states
4.7, in 8 bits 1.2, and on the host none. run_parakeet_tdt.sh has presets from 8 GB. Expect a
character error rate below 5 % on the demo's held-out sentences.

Sources: FastConformer (Rekesh et al. 2023); TDT (Xu et al. 2023); relative positions (Dai et al.
2019, "Transformer-XL"); SpecAugment (Park et al. 2019). NVIDIA's NeMo defines the model; nothing of
it is needed here.
"""

import functools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: F401  first, because a signal while torch is imported would be a traceback

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import checkpoint, device, optim, options, preflight
from common.batches import EvalBatches, GlobalBatches, pad, to_device
from common.device import upcast
from common.errors import DataError, exit_with_one_line
from common.loop import Task, begin, finish, train
from common.report import check_folder
from speech import demo, metrics, recogniser, splits, text
from speech.audio import SAMPLE_RATE, change_speed, read_utterance, speed_factors
from speech.columns import Corpus
from speech.features import random_masks, spec_augment, valid_mask
from speech.layers import downcast, lean_chain
from speech.parakeet import decoding, features
from speech.parakeet import start as starts
from speech.parakeet.loss import Lattice, tdt_losses
from speech.parakeet.tokenizer import ParakeetTokenizer
from speech.recogniser import SPEEDS, decode_set

RECIPE = "parakeet_tdt"
MAX_SECONDS = 20.0  # of an utterance, as in NVIDIA's fine-tuning
DITHER = 1e-5  # noise added to a training waveform, so that digital silence has finite features
FREQUENCY_MASKS, FREQUENCY_MASK_BANDS = 2, 27
TIME_MASKS, TIME_MASK_WIDTH = 10, 0.05  # share of the utterance
AT_ONCE = 4  # utterances in a subsampling: with all of them it would be the peak of memory
FIT_UTTERANCES = 64  # that a model from scratch is fitted to
DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 800
STYLES = {
    "case": 0.3,
    "punctuation": 0.3,
    "digits": 0.05,
}  # differences in the shares of texts that are worth a warning


def add_arguments(parser) -> None:
    starts.add_arguments(parser)
    splits.add_arguments(parser)
    recogniser.add_arguments(parser)
    rate = (
        None,
        "fine-tuning 1e-4, or 3e-5 below 20 h of speech; from scratch by the model's width",
    )
    options.add_arguments(
        parser, learning_rate=rate, weight_decay=1e-3, keep_last=2, max_duration=MAX_SECONDS
    )


def resolve(args) -> starts.Start:
    is_demo = not args.train_manifest
    excludes = (*recogniser.EXCLUDES, *starts.EXCLUDES)
    options.resolve(
        args, is_demo, DEMO_STEPS, excludes, (*splits.NEEDS, *recogniser.NEEDS, *starts.NEEDS)
    )
    recogniser.resolve(args, not is_demo or options.plans(args))  # the demo's voices hardly vary
    return starts.resolve(args, is_demo or args.check_data)


# --- data -----------------------------------------------------------------------------------------


def read_sets(args, saved: dict | None) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; the demo's if no manifest is
    given. What was held out when the model with the metadata `saved` began is held out again."""
    checks = splits.resolve(args, (saved or {}).get("held_out", ())).checks
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.test_manifest and (args.evaluate or not args.train_manifest):
        paths = {"test": args.test_manifest}
    elif not args.train_manifest and options.plans(args):
        return splits.stand_in(args.max_duration)
    elif not args.train_manifest:
        starts.check_demo(saved)
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        folder = Path(args.output_dir) / "data" / "konkani_demo"
        paths = demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, DEMO_SIZES)
    paths = {split: path for split, path in paths.items() if path}
    return splits.read_manifests(paths, text.normalise, checks)


def sample_texts(corpus: Corpus, tokenizer: ParakeetTokenizer, seed: int) -> list[str]:
    """A random part of the texts, because millions would take minutes. Says how many hold
    characters that the model cannot write."""
    texts = [
        corpus.texts[int(row)]
        for row in np.random.default_rng(seed).permutation(len(corpus))[: starts.SAMPLE]
    ]
    if unknown := sum(tokenizer.unknown in tokenizer.encode(each) for each in texts):
        share = f"{100 * unknown / len(texts):.1f} % of the training texts"
        print(f"{share} hold characters outside the vocabulary; they become its unknown token")
    return texts


def about_run(args, sets: dict[str, Corpus], metadata: dict) -> dict:
    """What is kept with the weights beside the model: what is held out, and how long files are
    cut."""
    return {
        "recipe": RECIPE,
        "held_out": (
            splits.held_out_keys(sets["val"])
            if args.train_manifest and not args.val_manifest
            else []
        ),
        "longest": max(
            float(sets["train"].seconds.max()),
            metadata.get("longest", MAX_SECONDS * metadata["pretrained"]),
        ),
        "demo": not args.train_manifest,
    }


class Utterances:
    """A set of utterances as the model takes them. Only the training set is augmented, and
    augmentation depends on (seed, epoch, index) alone."""

    def __init__(
        self, args, corpus: Corpus, tokenizer: ParakeetTokenizer, metadata: dict, training: bool
    ):
        self.args = args
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.training = training
        self.omega = metadata["loss"]["omega"] if training else 0.0
        self.reduction = metadata["loss"]["reduction"]
        self.frequency_mask_width = FREQUENCY_MASK_BANDS / metadata["config"]["num_mel_bins"]

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
        return speed_factors(self.args.seed, epoch, len(self), SPEEDS)

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), whether it has the plain RNN-T loss, the
        factor and the count of its loss, masks of SpecAugment."""
        args, transcript = self.args, self.corpus.texts[index]
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        random = np.random.default_rng([args.seed, epoch, index])
        if self.training:
            if args.speed_perturbation:
                waveform = change_speed(waveform, float(self.speeds(epoch)[index]))
            waveform = waveform + DITHER * torch.from_numpy(
                random.standard_normal(len(waveform), dtype=np.float32)
            )
        tokens = self.tokenizer.encode(transcript)
        item = {
            "audio": waveform,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "plain": bool(random.random() < self.omega),
            "factor": 1 / max(1, len(tokens)) if self.reduction == "mean" else 1.0,
            "count": len(tokens) if self.reduction == "mean_volume" else 1,
            "text": transcript,
            "name": self.corpus.where(index),
            "index": index,
        }
        if self.training and args.spec_augment:
            item["frequency_masks"] = random_masks(
                random, FREQUENCY_MASKS, self.frequency_mask_width
            )
            item["time_masks"] = random_masks(random, TIME_MASKS, TIME_MASK_WIDTH)
        return item


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths, factors (B,) of the
    losses; counts are the numbers of targets of each loss term."""
    batch = {
        "names": [item["name"] for item in items],
        "texts": [item["text"] for item in items],
        "indices": [item["index"] for item in items],
        "plain": [item["plain"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "factors": torch.tensor([item["factor"] for item in items], dtype=torch.float64),
    }
    for key in ("audio", "tokens"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    if "time_masks" in items[0]:
        batch["frequency_masks"] = torch.stack([item["frequency_masks"] for item in items])
        batch["time_masks"] = torch.stack([item["time_masks"] for item in items])
    batch["counts"] = {
        "tdt": sum(item["count"] for item in items),
        "ctc": int(batch["tokens_lengths"].sum()),
    }
    return batch


# --- model: names and shapes are those of transformers' ParakeetForTDT ----------------------------


class Subsampling(nn.Module):
    """Features (B, F, M) to (B, T, D) with F / 8 frames (or F / 4, F / 2): a strided 3x3
    convolution, then depthwise-separable ones. What lies beyond each length is zeroed before every
    convolution, so padding changes nothing."""

    def __init__(self, config: dict):
        super().__init__()
        c, n_mels = config["channels"], config["num_mel_bins"]
        self.layers = nn.ModuleList([nn.Conv2d(1, c, 3, stride=2, padding=1), nn.ReLU()])
        for _ in range(config["subsampling"].bit_length() - 2):
            self.layers += [
                nn.Conv2d(c, c, 3, stride=2, padding=1, groups=c),
                nn.Conv2d(c, c, 1),
                nn.ReLU(),
            ]
        for _ in range(config["subsampling"].bit_length() - 1):
            n_mels = (n_mels - 1) // 2 + 1
        self.linear = nn.Linear(c * n_mels, config["d_model"])
        self.to(memory_format=torch.channels_last)  # twice as fast as (B, C, F, M) in memory

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        for layer in self.layers:
            if isinstance(
                layer, nn.ReLU
            ):  # masked before it: backward then keeps one tensor of this size, not two
                x = x.masked_fill(~valid_mask(lengths, x.shape[2])[:, None, :, None], 0.0)
            x = layer(x)
            if getattr(layer, "stride", None) == (2, 2):
                lengths = (lengths - 1) // 2 + 1
        return self.linear(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """(B, T, D) to (B, T, D), after the layer's `norm`. The wide hidden layer has no dropout of its
    own: it would be the largest tensor that backward keeps."""

    def __init__(self, config: dict):
        super().__init__()
        self.linear1 = nn.Linear(config["d_model"], config["ffn"], bias=config["biases"])
        self.linear2 = nn.Linear(config["ffn"], config["d_model"], bias=config["biases"])

    def forward(self, x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        return lean_chain(x, norm, self.linear1, F.silu, self.linear2)


class Attention(nn.Module):
    """Self-attention with relative positions (Dai et al. 2019, section 3.3), (B, T, D) to (B, T,
    D): the scores are (q + u) k + (q + v) r, where r is the projected distance. The second term is
    SDPA's bias."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d, self.heads, self.dropout = config["d_model"], config["heads"], dropout
        self.q_proj = nn.Linear(d, d, bias=config["biases"])
        self.k_proj = nn.Linear(d, d, bias=config["biases"])
        self.v_proj = nn.Linear(d, d, bias=config["biases"])
        self.o_proj = nn.Linear(d, d, bias=config["biases"])
        self.relative_k_proj = nn.Linear(d, d, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(self.heads, d // self.heads))
        self.bias_v = nn.Parameter(torch.zeros(self.heads, d // self.heads))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(-2, -3)  # (..., H, T, D / H)

        x = downcast(x)  # once for three products
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        u, w = (bias[:, None].to(q.dtype) for bias in (self.bias_u, self.bias_v))
        distances = split(
            self.relative_k_proj(positions)
        )  # (H, 2 T - 1, D / H), once for the batch
        scores = (
            (q + w) / math.sqrt(q.shape[-1]) @ distances.transpose(-1, -2)
        )  # (B, H, T, 2 T - 1)
        # Row i begins with the distance T - 1; that of key j is i - j. Shifting each row by one
        # more gives (B, H, T, T).
        b, h, t, wide = scores.shape
        scores = (
            F.pad(scores, (1, 0)).view(b, h, wide + 1, t)[:, :, 1:].reshape(b, h, t, wide)[..., :t]
        )
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :, 0], -torch.inf)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q + u, k, v, attn_mask=scores, dropout_p=dropout)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FrozenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of (B, T, D) with fixed statistics and a trained scale and shift, in fp32.
    Statistics that are trained would depend on padding and on how a global batch is cut, and recomputing
    a layer would count it twice."""

    measures = False  # whether the next input sets the statistics

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        if self.measures:
            frames = x.flatten(0, 1) if padding is None else x[~padding[..., 0]]
            self.running_mean.copy_(frames.mean(0))
            self.running_var.copy_(frames.var(0))
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return ((upcast(x) - self.running_mean) * scale + self.bias).to(x.dtype)


class Convolution(nn.Module):
    """The Conformer's convolution module, (B, T, D) to (B, T, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d, kernel, biases = config["d_model"], config["kernel"], config["biases"]
        self.pointwise_conv1 = nn.Conv1d(d, 2 * d, 1, bias=biases)
        self.depthwise_conv = nn.Conv1d(d, d, kernel, padding=kernel // 2, groups=d, bias=biases)
        self.norm = FrozenBatchNorm(d)
        self.pointwise_conv2 = nn.Conv1d(d, d, 1, bias=biases)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        def pointwise(layer: nn.Conv1d, y: torch.Tensor) -> torch.Tensor:
            return F.linear(y, layer.weight[:, :, 0], layer.bias)

        x = F.glu(pointwise(self.pointwise_conv1, x), dim=-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)  # or the kernel would see what follows the end
        x = self.depthwise_conv(x.transpose(1, 2)).transpose(1, 2)
        return pointwise(self.pointwise_conv2, F.silu(self.norm(x, padding)))


class EncoderLayer(nn.Module):
    """Half feed-forward, attention, convolution, half feed-forward, norm."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.feed_forward1 = FeedForward(config)
        self.self_attn = Attention(config, dropout)
        self.conv = Convolution(config)
        self.feed_forward2 = FeedForward(config)
        self.norm_feed_forward1 = nn.LayerNorm(d)
        self.norm_self_att = nn.LayerNorm(d)
        self.norm_conv = nn.LayerNorm(d)
        self.norm_feed_forward2 = nn.LayerNorm(d)
        self.norm_out = nn.LayerNorm(d)
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        def drop(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(y, self.dropout, self.training)

        x = x + 0.5 * drop(self.feed_forward1(x, self.norm_feed_forward1))
        x = x + drop(self.self_attn(self.norm_self_att(x), positions, padding))
        x = x + drop(self.conv(self.norm_conv(x), padding))
        x = x + 0.5 * drop(self.feed_forward2(x, self.norm_feed_forward2))
        return self.norm_out(x)


def relative_positions(count: int, like: torch.Tensor) -> torch.Tensor:
    """(2 T - 1, D): interleaved sines and cosines of the distances T - 1 ... -(T - 1)."""
    d = like.shape[-1]
    speeds = 10_000.0 ** (-torch.arange(0, d, 2, device=like.device, dtype=torch.float32) / d)
    angles = (
        torch.arange(count - 1, -count, -1, device=like.device, dtype=torch.float32)[:, None]
        * speeds
    )
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(like.dtype)


class Encoder(nn.Module):
    """Features (B, F, M) to (B, T, D)."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.scale = math.sqrt(config["d_model"]) if config["scale_input"] else 1.0
        self.dropout = dropout
        self.subsampling = Subsampling(config)
        self.layers = nn.ModuleList(
            [EncoderLayer(config, dropout) for _ in range(config["layers"])]
        )

    def subsample(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.split(AT_ONCE), lengths.split(AT_ONCE), strict=True)
        return torch.cat([self.subsampling(*piece) for piece in pieces]) * self.scale

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, frames: list[int]) -> torch.Tensor:
        """`lengths` (B,): valid frames of the features, on the device; `frames`: those of the
        result, on the host."""
        x = F.dropout(self.subsample(x, lengths), self.dropout, self.training)
        padding = None
        if min(frames) < x.shape[1]:
            counts = torch.tensor(frames).to(x.device, non_blocking=True)
            padding = ~valid_mask(counts, x.shape[1])[:, :, None]
        positions = relative_positions(x.shape[1], x)
        for layer in self.layers:
            x = layer(x, positions, padding)
        return x


class Prediction(nn.Module):
    """The prediction network: the labels so far (B, U) to (B, U, J). It stays in fp32: it is
    small."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        width, blank, layers = (
            config["prediction_width"],
            config["vocabulary"],
            config["prediction_layers"],
        )
        self.embedding = nn.Embedding(
            blank + 1, width, padding_idx=blank
        )  # blank, which begins a text, stays zero
        self.lstm = nn.LSTM(
            width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
        )
        self.decoder_projector = nn.Linear(width, config["joint_width"])
        self.dropout = dropout

    def forward(
        self, tokens: torch.Tensor, state: tuple | None = None
    ) -> tuple[torch.Tensor, tuple]:
        with torch.autocast(tokens.device.type, enabled=False):
            x, state = self.lstm(self.embedding(tokens), state)
        return self.decoder_projector(F.dropout(x, self.dropout, self.training)), state


class Joint(nn.Module):
    """The joint network's output layer, and the loss on it, which never holds its whole output."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.durations = tuple(config["durations"])
        self.dropout = dropout
        self.head = nn.Linear(config["joint_width"], config["vocabulary"] + 1 + len(self.durations))

    def forward(
        self, encoded: torch.Tensor, predicted: torch.Tensor, lattice: Lattice
    ) -> torch.Tensor:
        """(B,) losses."""
        return tdt_losses(encoded, predicted, self.head.weight, self.head.bias, lattice)

    def logits(self, encoded: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """(B, V + 1 + D) of one cell: tokens, blank, durations."""
        return upcast(self.head((encoded + predicted).relu()))


class Parakeet(nn.Module):
    """FastConformer encoder, LSTM prediction network and joint network; beside them a CTC head if
    the configuration has one. `loss` are the settings of the metadata."""

    def __init__(self, config: dict, loss: dict, dropout: float = 0.0, joint_dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.blank = config["vocabulary"]
        self.sigma = loss["sigma"]
        self.log_mel = features.MelFeatures(config["num_mel_bins"])
        self.encoder = Encoder(config, dropout)
        self.encoder_projector = nn.Linear(config["d_model"], config["joint_width"])
        self.decoder = Prediction(config, joint_dropout)
        self.joint = Joint(config, joint_dropout)
        self.ctc_head = nn.Conv1d(config["d_model"], self.blank + 1, 1) if config["ctc"] else None
        self.trains_ctc = config["ctc"]

    def mel(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The batch's waveforms to features (B, F, M), their lengths, and those of the encoder's
        output on the host."""
        counts = features.frames(batch["audio_lengths_host"])
        lengths = features.frames(batch["audio_lengths"])
        x = self.log_mel(batch["audio"], batch["audio_lengths"], int(counts.max()))  # (B, F, M)
        if "time_masks" in batch:
            x = spec_augment(x, lengths, batch["frequency_masks"], batch["time_masks"])
        for _ in range(self.config["subsampling"].bit_length() - 1):
            counts = (counts - 1) // 2 + 1
        return x, lengths, counts.tolist()

    def encode(self, batch: dict) -> tuple[torch.Tensor, list[int]]:
        """The batch's waveforms to (B, T, D), and the numbers of valid frames on the host."""
        x, lengths, frames = self.mel(batch)
        return self.encoder(x, lengths, frames), frames

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        """The prediction network's output (B, U + 1, J) before the first and after every token of
        (B, U)."""
        return self.decoder(F.pad(tokens, (1, 0), value=self.blank))[0]


BRANCH_OUTPUTS = (".linear2", ".o_proj", ".pointwise_conv2")


@torch.no_grad()
def quieten_branches(layers: nn.ModuleList) -> None:
    """Scales what each residual branch adds by one over the root of the number of branches (GPT-2's
    initialisation). Otherwise many random layers drown what was heard."""
    branches = [module for name, module in layers.named_modules() if name.endswith(BRANCH_OUTPUTS)]
    for module in branches:
        module.weight /= math.sqrt(len(branches))


CHECKPOINTED = (Subsampling, EncoderLayer)  # recomputed by --gradient_checkpointing
COMPILED = (FeedForward, Attention, Convolution)  # compiled by --torch_compile


def make_model(metadata: dict, weights: dict | None, *dropouts: float) -> Parakeet:
    """A model with these weights, which become its parameters, or with random ones."""
    if weights is None:
        model = Parakeet(metadata["config"], metadata["loss"], *dropouts)
        quieten_branches(model.encoder.layers)
        return model
    with torch.device("meta"):
        model = Parakeet(metadata["config"], metadata["loss"], *dropouts)
    model.load_state_dict(weights, assign=True)
    model.encoder.subsampling.to(
        memory_format=torch.channels_last
    )  # which the new weights are not yet
    return model


@torch.no_grad()
def fit_to_data(model: Parakeet, data: Utterances, seed: int) -> None:
    """Fits the initial weights of a model from scratch to a few training utterances: the output of
    the subsampling gets mean 0 and deviation 1, or the residual branches would drown it, and
    BatchNorm gets its statistics, layer by layer."""
    items = []
    for index in np.random.default_rng(seed).permutation(len(data)):
        try:
            items.append(data.item(int(index), 0))
        except DataError:
            continue  # training itself reports it
        if len(items) == FIT_UTTERANCES:
            break
    if not items:
        return
    batch = next(to_device([collate(items)], torch.device("cpu")))
    norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm)]
    model.eval()
    x, lengths, frames = model.mel(batch)
    x = model.encoder.subsample(x, lengths)
    x = x[valid_mask(torch.tensor(frames), x.shape[1])]
    linear, mean = model.encoder.subsampling.linear, x.mean(0)
    deviation = (x - mean).std()
    linear.weight /= deviation
    linear.bias.copy_((linear.bias - mean / model.encoder.scale) / deviation)
    for norm in norms:
        norm.measures = True
    model.encode(batch)
    for norm in norms:
        norm.measures = False
    model.train()


# --- loss, decoding and evaluation ----------------------------------------------------------------


def losses(
    model: Parakeet, batch: dict, encoded: torch.Tensor, frames: list[int]
) -> dict[str, torch.Tensor]:
    """Sums over the batch of the TDT loss and, if the model has a CTC head that is trained, of the
    CTC loss."""
    joint, lengths = model.joint, batch["tokens_lengths_host"]
    lattice = Lattice(
        batch["tokens"],
        torch.tensor(frames),
        lengths,
        joint.durations,
        model.sigma,
        torch.tensor(batch["plain"]),
        joint.dropout if model.training else 0.0,
    )
    tdt = joint(model.encoder_projector(encoded), model.predict(batch["tokens"]), lattice)
    terms = {"tdt": (tdt * batch["factors"].to(tdt.dtype)).sum()}
    if model.trains_ctc:
        log_probs = (
            upcast(model.ctc_head(encoded.transpose(1, 2))).log_softmax(1).permute(2, 0, 1)
        )  # (T, B, V + 1)
        terms["ctc"] = F.ctc_loss(
            log_probs,
            batch["tokens"],
            torch.tensor(frames),
            lengths,
            blank=model.blank,
            reduction="sum",
            zero_infinity=True,
        )
    return terms


def compute_loss(model: Parakeet, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch; the loop divides by the global batch's counts."""
    return losses(model, batch, *model.encode(batch))


def loss_weights(metadata: dict) -> dict[str, float]:
    share = starts.ctc_weight(metadata)
    return {"tdt": 1.0 - share, "ctc": share} if share else {"tdt": 1.0}


def greedy(model: Parakeet, encoded: torch.Tensor, frames: list[int]) -> list[list[decoding.Token]]:
    """The tokens of every utterance of (B, T, D), with their times."""

    def step(tokens: torch.Tensor | None, state: tuple | None) -> tuple[torch.Tensor, tuple]:
        if tokens is None:
            tokens = torch.full((len(encoded),), model.blank, device=encoded.device)
        predicted, state = model.decoder(tokens[:, None], state)
        return predicted[:, 0], state

    durations, most = model.joint.durations, model.config["max_symbols"]
    return decoding.greedy(
        step, model.joint.logits, model.encoder_projector(encoded), frames, durations, most
    )


def records(tokenizer: ParakeetTokenizer, model: Parakeet, batch: dict) -> list[dict]:
    """The texts of a batch with the times of words and segments."""
    seconds = model.config["subsampling"] * features.HOP / SAMPLE_RATE
    encoded, frames = model.encode(batch)
    hypotheses = zip(greedy(model, encoded, frames), frames, strict=True)
    return [decoding.transcript(tokens, tokenizer, seconds, count) for tokens, count in hypotheses]


def evaluate(
    tokenizer: ParakeetTokenizer,
    terms: dict[str, float],
    texts: list[str],
    model: Parakeet,
    eval_batches,
) -> dict[str, tuple[float, float]]:
    """The losses named in `terms`, CER and WER of greedy decoding, as (numerator, denominator).
    `texts`: as in `recogniser.warn_of_style`."""

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        encoded, frames = model.encode(batch)
        hypotheses = greedy(model, encoded, frames)
        texts = [decoding.text_of(tokens, tokenizer) for tokens in hypotheses]
        return texts, losses(model, batch, encoded, frames)

    rows, sums = decode_set(decode_batch, eval_batches, next(model.parameters()).device, terms)
    recogniser.warn_of_style(texts, rows)
    return {**sums, **metrics.score(rows)}


def decode_words(tokenizer: ParakeetTokenizer, model: Parakeet, eval_batches) -> list[dict]:
    """The rows of a decoded set, with the times of their words."""
    words: list[list[dict]] = []

    def decode_batch(batch: dict) -> tuple[list[str], dict]:
        decoded = records(tokenizer, model, batch)
        words.extend(record["words"] for record in decoded)
        return [record["text"] for record in decoded], {}

    rows, _ = decode_set(decode_batch, eval_batches, next(model.parameters()).device)
    return [{**row, "words": parts} for row, parts in zip(rows, words, strict=True)]


def report_results(
    args, start: starts.Start, model: Parakeet, metadata: dict, eval_batches, title: str
) -> None:
    """Prints the error rates of a set and examples with the times of their words; after fine-tuning
    also the error rates of the released model."""
    rows = decode_words(starts.tokenizer_of(metadata), model, eval_batches)
    recogniser.print_results(rows, f"{title}, {len(rows)} utterances", args.log_dir, args.seed)
    if (
        start.pretrained and "longest" in metadata
    ):  # the model has been trained since it was released
        weights, theirs = starts.read_pretrained(start)
        released = make_model(theirs, weights).to(next(model.parameters()).device).eval()
        del weights
        before = decode_words(starts.tokenizer_of(theirs), released, eval_batches)
        print(
            "released model, and trained model, on these"
            f" utterances:\n{metrics.improvement_table(before, rows)}"
        )


# --- main -----------------------------------------------------------------------------------------


def trained(
    args, start: starts.Start, setup: device.Setup
) -> tuple[Parakeet, ParakeetTokenizer, dict]:
    """The model of --model_dir or --model_file, of --resume, or of the best evaluation; its
    tokenizer and metadata."""
    if start.pretrained and not args.resume:
        weights, metadata = starts.read_pretrained(start)
    else:
        weights, metadata = checkpoint.weights_to_use(args, RECIPE, starts.METADATA)
        starts.check_resumed(start, metadata)
        starts.check_saved(metadata, weights)
    return (
        make_model(metadata, weights).to(setup.device).eval(),
        starts.tokenizer_of(metadata),
        metadata,
    )


def transcribe(args, start: starts.Start) -> None:
    setup = device.setup(args, quiet=True)
    model, tokenizer, metadata = trained(args, start, setup)
    records_of = functools.partial(records, tokenizer, model)
    longest, _ = recogniser.in_pieces(args.piece_seconds, metadata.get("longest", MAX_SECONDS))
    recogniser.transcribe_files(
        args.transcribe,
        records_of,
        setup,
        longest,
        args.output,
        args.eval_batch_size,
        parts=("words", "segments"),
    )


@torch.no_grad()
def evaluate_only(args, start: starts.Start) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    setup = device.setup(args)
    model, tokenizer, metadata = trained(args, start, setup)
    if args.evaluate:
        check_folder(args.log_dir)
        sets = read_sets(args, metadata)
        name = "test" if "test" in sets else "val"
        eval_batches = EvalBatches(
            args, Utterances(args, sets[name], tokenizer, metadata, False), collate, setup
        )
        with setup.autocast():
            report_results(
                args, start, model, metadata, eval_batches, f"{name} set, the weights named"
            )
    if args.export:
        starts.export(args.export, args.export_format, model.state_dict(), metadata)


def first_model(args, metadata: dict, weights: dict | None, data: Utterances | None) -> Parakeet:
    """The model that training starts with: with `weights`, or random ones, which are fitted to
    `data` if that is given. Raises `RunError` if the disk is too small for its checkpoints."""
    model = make_model(metadata, weights, args.dropout, args.joint_dropout)
    if data is not None:
        fit_to_data(model, data, args.seed)
    preflight.require_disk(args, model)
    print(f"model: {optim.count_parameters(model)[0] / 1e6:.1f} M parameters, ", end="")
    return model


def main(args) -> None:
    start = resolve(args)
    if args.check_data:
        return splits.report_checked(read_sets(args, None))
    if args.transcribe:
        return transcribe(args, start)
    if args.evaluate or recogniser.exports_only(
        args.export, args.resume, start.pretrained, args.given
    ):
        return evaluate_only(args, start)
    run = begin(args, RECIPE, starts.METADATA)

    read = functools.cache(lambda: read_sets(args, run.resumed and run.resumed["metadata"]))
    metadata, weights = starts.choose(start, run.resumed, lambda: read()["train"].texts, RECIPE)
    sets, tokenizer = (
        read(),
        starts.tokenizer_of(metadata),
    )  # after the model, whose faults are found faster
    sample = sample_texts(sets["train"], tokenizer, args.seed)
    metadata |= about_run(args, sets, metadata)
    data = {
        name: Utterances(args, sets[name], tokenizer, metadata, training=name == "train")
        for name in sets
    }
    is_new, released = not run.resumed, metadata["pretrained"]
    is_fitted = is_new and not (released or run.planned)
    model = first_model(
        args, metadata, weights if is_new else None, data["train"] if is_fitted else None
    )
    del weights  # they are the model's, or the loop loads them
    rate = starts.learning_rate(metadata, float(sets["train"].seconds.sum()) / 3600)
    print(f"{tokenizer.size} pieces; learning rate {args.learning_rate or rate:g}")

    global_batches = GlobalBatches(args, data["train"], collate, run.setup)
    evaluation = {
        name: EvalBatches(args, data[name], collate, run.setup) for name in data if name != "train"
    }
    terms = loss_weights(metadata)
    model.trains_ctc = "ctc" in terms
    sample = sample if released and is_new else []
    task = Task(
        RECIPE,
        compute_loss,
        terms,
        functools.partial(evaluate, tokenizer, terms, sample),
        metadata,
        "wer" if released else "cer",
        rate,
        CHECKPOINTED,
        COMPILED,
        evaluate_first=released,
        decay_embeddings=False,
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
            args, start, model, metadata, evaluation[name].whole(), f"{name} set, {weights}"
        ),
    )
    if args.export and run.setup.ranks.first:
        starts.export(args.export, args.export_format, model.state_dict(), metadata)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()))
