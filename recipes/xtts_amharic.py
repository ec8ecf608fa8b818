"""XTTS for Amharic: Coqui's XTTS-v2, whose GPT learns a language or a voice from little speech on a
small GPU.

    python recipes/xtts_amharic.py --from_scratch   # without data: a small model learns to speak synthetic Amharic
    python recipes/xtts_amharic.py --model_dir XTTS-v2 --train_manifest train.csv --use_amharic_g2p --resume auto
    python recipes/xtts_amharic.py --synthesize "ሰላም ለዓለም።" --speaker_wav voice.wav --output out.wav --resume checkpoints/best.safetensors

Data: CSV with the header audio_file|text|speaker_name, JSON Lines, or LJSpeech's metadata.csv; any
sample rate; clips of 0.5 to 11.6 s and texts of up to 200 tokens. --check_data says what is wrong
with them. A row may have a language (lang).

--model_dir takes a folder with Coqui's model.pth, config.json, vocab.json, dvae.pth and
mel_stats.pth. Its vocabulary has no Ethiopic letters: --use_amharic_g2p or --extend_vocab. The DVAE
makes the codes that are learned and is frozen, as is the vocoder; a model from scratch trains a
small DVAE first. --export DIR writes a folder that Coqui loads.

Memory: weights, gradients and AdamW's states of the 441 million parameters take 6.6 GiB, with
--optimizer adamw_8bit 4.1. --gradient_checkpointing, --sdpa and mixed precision reduce what comes
on top. run_xtts_amharic.sh has presets.

Sources: XTTS (Casanova et al. 2024), Tortoise (Betker 2023), Perceiver (Jaegle et al. 2021), GPT-2
(Radford et al. 2019). Written from these and from the shapes of the released files; Coqui's code is
not used. The released weights have another licence.
"""

import functools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: F401  first, because a signal while torch is imported would be a traceback

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import checkpoint, device, memory, optim, options, preflight
from common.batches import EvalBatches, GlobalBatches, pad, to_device
from common.device import upcast
from common.errors import UsageError, exit_with_one_line
from common.loop import Task, begin, finish, train
from speech import checks, demo, recogniser, splits, text
from speech.audio import int16, read_audio, read_utterance, write_wav
from speech.columns import Corpus
from speech.xtts import codec_training, inference, speaking, texts
from speech.xtts import start as starts
from speech.xtts.codec import SAMPLE_RATE, SAMPLES_PER_CODE, code_count

RECIPE = "xtts_amharic"
LOSS_WEIGHTS = {"text": 0.01, "mel": 1.0}
STOPS = 4  # STOP targets after the codes, as the released model was trained
BETAS = (0.9, 0.96)
MAX_SAMPLES, MIN_SECONDS, DEMO_MIN_SECONDS, MAX_TEXT = (
    255_995,
    0.5,
    0.2,
    200,
)  # of a clip; of a text, tokens
CONDITIONING_BLOCKS, PERCEIVER_LAYERS = 6, 2
PATIENCE = 5  # evaluations without a gain, for released weights
DEMO_SIZES = {"train": 3000, "val": 100}  # sentences
DEMO_MANNER = demo.Manner(
    rate=(170, 170), pitch=(50, 50), words=(1, 4), trimmed=True, in_all_voices=("train",)
)
DEMO_STEPS, FULL_DEMO_STEPS = (
    1600,
    200,
)  # updates without data; a full size only shows that it works


def add_arguments(parser) -> None:
    starts.add_arguments(parser)
    splits.add_arguments(parser)
    options.add_arguments(
        parser,
        learning_rate=(None, "5e-6 for released weights, 2e-3 from scratch"),
        keep_last=2,
        max_duration=(MAX_SAMPLES / SAMPLE_RATE, "11.6"),
        min_duration=MIN_SECONDS,
        early_stopping_patience=(None, f"{PATIENCE} for released weights, else never"),
    )
    own = parser.add_argument_group("XTTS")
    own.add_argument(
        "--sdpa",
        action=options.OnOff,
        default=True,
        help="fused attention; off: all scores in memory (on)",
    )
    own.add_argument(
        "--freeze_layers",
        type=options.COUNT,
        default=0,
        metavar="N",
        help="leave the first N layers of the GPT as they are (0)",
    )
    own.add_argument(
        "--speak_held_out",
        type=options.COUNT,
        metavar="N",
        help=(
            "sentences of the evaluation set to speak after training, in OUTPUT_DIR/speech (2; 20"
            " from scratch)"
        ),
    )
    own.add_argument("--dropout", type=options.SHARE, default=0.1, metavar="P", help="(0.1)")
    own.add_argument(
        "--max_audio_length",
        type=options.number(int, SAMPLE_RATE // 2, 600_000),
        metavar="N",
        help=f"longest clip, samples at 22.05 kHz, in place of --max_duration ({MAX_SAMPLES})",
    )


def resolve(args) -> starts.Start:
    is_demo = not args.train_manifest
    excludes = (
        *starts.EXCLUDES,
        ("max_audio_length", "max_duration", "both limit clips; give one"),
    )
    steps = DEMO_STEPS if args.from_scratch and args.model_size != "full" else FULL_DEMO_STEPS
    options.resolve(args, is_demo, steps, excludes, (*splits.NEEDS, *starts.NEEDS))
    if args.max_audio_length:
        args.max_duration = args.max_audio_length / SAMPLE_RATE
    if is_demo and "min_duration" not in args.given:
        args.min_duration = DEMO_MIN_SECONDS
    if args.early_stopping_patience is None:
        args.early_stopping_patience = 0 if args.from_scratch else PATIENCE
    return starts.resolve(args)


# --- data -----------------------------------------------------------------------------------------


def read_sets(args, saved: dict | None) -> dict[str, Corpus]:
    """The corpora "train", "val" and, if there is one, "test"; synthetic ones if no manifest is
    given. What was held out when the model with the metadata `saved` began is held out again."""
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.evaluate and args.test_manifest:
        paths = {"test": args.test_manifest}
    elif not args.train_manifest and options.plans(args):
        return splits.stand_in(args.max_duration, MAX_TEXT)
    elif not (args.train_manifest or args.test_manifest):
        print("no --train_manifest: using synthetic speech")
        folder = Path(args.output_dir) / "data" / "amharic"
        paths = demo.speech_corpus(
            folder, demo.AMHARIC_WORDS, demo.AMHARIC_VOICES, DEMO_SIZES, manner=DEMO_MANNER
        )
    rules = splits.resolve(args, (saved or {}).get("held_out", ()), for_synthesis=True).checks
    paths = {split: path for split, path in paths.items() if path}
    return splits.read_manifests(paths, text.normalise, rules)


def check_sets(
    args, sets: dict[str, Corpus], reader: texts.Texts | texts.FrontEnd, config: dict
) -> dict[str, Corpus]:
    """The sets without what harms the training, and without texts and clips that the model has no
    letters or positions for."""

    def fault(corpus: Corpus, index: int) -> tuple[str, str] | None:
        words = reader.fault(corpus.texts[index], corpus.languages[index], most_text(config))
        codes, most = (
            code_count(int(corpus.seconds[index] * SAMPLE_RATE)),
            config["mel_positions"] - STOPS,
        )
        return words or (
            (f"clip is longer than {most} codes", f"{codes} codes") if codes > most else None
        )

    is_stand_in = options.plans(args) and not args.train_manifest
    return sets if is_stand_in else checks.check_speech(sets, args.strict_data, fault, reader.read)


def most_text(config: dict) -> int:
    """Tokens of the longest text; START, STOP and two tokens of the language are not counted."""
    return min(MAX_TEXT, config["text_positions"] - 4)


def about_run(args, sets: dict[str, Corpus]) -> dict:
    """What is kept with the weights beside the model: what is held out of the sets that were
    read."""
    held_out = (
        [] if args.val_manifest or not args.train_manifest else splits.held_out_keys(sets["val"])
    )
    return {"recipe": RECIPE, "stage": "gpt", "held_out": held_out}


class Utterances:
    """A set of utterances as the GPT takes them. The conditioning slice, of the clip itself or of
    another one of its speaker, depends on (seed, epoch, index) alone; in evaluation it has the
    middle length and begins with the clip."""

    def __init__(
        self, args, corpus: Corpus, vocabulary: texts.Texts, metadata: dict, training: bool
    ):
        self.args = args
        self.corpus = corpus
        self.vocabulary = vocabulary
        self.training = training
        self.tokens = vocabulary.tokens_of(corpus)
        speakers = np.array(corpus.speakers.codes)
        self.clips = [
            np.flatnonzero(speakers == code) for code in range(len(corpus.speakers.names))
        ]
        self.other = metadata["condition"] == "other"
        self.slice = metadata["slice"]

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def text_length(self, index: int) -> int:
        return len(self.corpus.texts[index])

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) positions of each utterance in the GPT, as whole seconds of codes: the longest of
        them come first. Global batches of utterances with the same number of positions would teach
        less."""
        codes = np.ceil(self.corpus.seconds * SAMPLE_RATE / SAMPLES_PER_CODE)
        return np.ceil(
            (codes + [len(tokens) for tokens in self.tokens] + 32) * SAMPLES_PER_CODE / SAMPLE_RATE
        )

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), the slice (S,), and the codes whose loss is
        left out, (first, last), because the slice is of them."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE)
        random = np.random.default_rng([self.args.seed, epoch, index])
        length = (
            int(random.integers(self.slice[0], self.slice[1] + 1))
            if self.training
            else sum(self.slice) // 2
        )
        voice, clips = waveform, self.clips[self.corpus.speakers.codes[index]]
        if is_other := self.other and len(clips) > 1:
            step = int(random.integers(1, len(clips))) if self.training else 1
            chosen = clips[(np.searchsorted(clips, index) + step) % len(clips)]
            voice = read_utterance(self.corpus, int(chosen), SAMPLE_RATE)
        if length > len(voice):
            length = len(voice) // 2
        begin = int(random.integers(0, len(voice) - length + 1)) if self.training else 0
        codes = code_count(len(waveform))
        first, last = begin // SAMPLES_PER_CODE, min(codes, (begin + length) // SAMPLES_PER_CODE)
        return {
            "audio": waveform,
            "tokens": torch.tensor(self.tokens[index]),
            "slice": F.pad(voice[begin : begin + length], (0, self.slice[1] - length)),
            "heard": (0, 0) if is_other else (first, last),
            "codes": codes,
            "language": self.vocabulary.language_of(self.corpus.languages[index]),
            "name": self.corpus.where(index),
            "index": index,
        }


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths, slices (B, S);
    counts are the numbers of targets of each loss term: the tokens and STOP; the codes that are not
    in the slice, and four STOPs."""
    batch = {
        "names": [item["name"] for item in items],
        "indices": [item["index"] for item in items],
        "heard": [item["heard"] for item in items],
        "codes": [item["codes"] for item in items],
        "languages": [item["language"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "slices": torch.stack([item["slice"] for item in items]),
    }
    for key in ("audio", "tokens"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    targets = [item["codes"] - (item["heard"][1] - item["heard"][0]) + STOPS for item in items]
    batch["counts"] = {"text": int(batch["tokens_lengths"].sum()) + len(items), "mel": sum(targets)}
    return batch


# --- model: names and shapes are those of Coqui's model.pth ---------------------------------------


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as in GPT-2's files."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to (B, T, D), by one fused kernel or, without `sdpa`, by
    `explicit_attention`."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d, self.heads, self.dropout = config["d_model"], config["heads"], dropout
        self.c_attn = Conv1D(d, 3 * d)
        self.c_proj = Conv1D(d, d)
        self.sdpa = True

    def forward(self, x: torch.Tensor, cache: list | None = None) -> torch.Tensor:
        """`cache` holds keys and values (B, H, P, D / H) of earlier positions, and then those of
        all."""
        q, k, v = (
            self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # 3 x (B, H, T, D / H)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            cache[:] = k, v
        dropout, one = (
            self.dropout if self.training else 0.0,
            q.shape[2] == 1,
        )  # one query sees all that is before
        if self.sdpa and (one or q.shape == k.shape):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=not one)
        else:
            y = explicit_attention(q, k, v, dropout)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def explicit_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Causal attention with all scores in memory, (B, H, T, S)."""
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)
    t, s = scores.shape[-2:]
    future = torch.ones(t, s, dtype=torch.bool, device=q.device).triu(1 + s - t)
    shares = upcast(scores.masked_fill(future, -torch.inf)).softmax(-1).to(v.dtype)
    return F.dropout(shares, dropout) @ v


class MLP(nn.Module):
    def __init__(self, d: int, dropout: float):
        super().__init__()
        self.c_fc = Conv1D(d, 4 * d)
        self.c_proj = Conv1D(4 * d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.ln_1 = nn.LayerNorm(d)
        self.attn = Attention(config, dropout)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = MLP(d, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, cache: list | None = None) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), cache))
        return x + self.mlp(self.ln_2(x))


class ConditioningBlock(nn.Module):
    """Attention of mel frames (B, D, F) to each other. The residual is the normalised input, as in
    the released model."""

    def __init__(self, config: dict):
        super().__init__()
        d, self.heads = config["d_model"], config["heads"]
        groups = 32 if d > 64 else 16 if d > 16 else 8
        while d % groups:
            groups //= 2
        self.norm = nn.GroupNorm(groups, d)
        self.qkv = nn.Conv1d(d, 3 * d, 1)
        self.proj_out = nn.Conv1d(d, d, 1)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = (
            self.qkv(x).unflatten(1, (self.heads, 3, -1)).permute(2, 0, 1, 4, 3)
        )  # 3 x (B, H, F, D / H)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y.transpose(-1, -2).flatten(1, 2))


class PerceiverAttention(nn.Module):
    """Attention of latents (B, L, D) over themselves and a context (B, F, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d, inner = config["d_model"], config["perceiver_heads"] * config["perceiver_head_dim"]
        self.heads = config["perceiver_heads"]
        self.to_q = nn.Linear(d, inner, bias=False)
        self.to_kv = nn.Linear(d, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, d, bias=False)

    def forward(self, latents: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        pairs = self.to_kv(torch.cat([latents, context], dim=1)).unflatten(-1, (2, self.heads, -1))
        k, v = pairs.permute(2, 0, 3, 1, 4)
        q = self.to_q(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = x.chunk(2, dim=-1)
        return F.gelu(gate) * x


class RMSNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(upcast(x), dim=-1) * math.sqrt(x.shape[-1]) * self.gamma


class Perceiver(nn.Module):
    """A context (B, F, D) of any length to 32 latents (B, 32, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        inner = int(d * 4 * 2 / 3)
        self.latents = nn.Parameter(torch.empty(config["latents"], d).normal_(std=0.02))
        self.layers = nn.ModuleList()
        for _ in range(PERCEIVER_LAYERS):
            feed_forward = nn.Sequential(nn.Linear(d, 2 * inner), GEGLU(), nn.Linear(inner, d))
            self.layers.append(nn.ModuleList([PerceiverAttention(config), feed_forward]))
        self.norm = RMSNorm(d)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        x = self.latents.expand(len(context), -1, -1)
        for attention, feed_forward in self.layers:
            x = attention(x, context) + x
            x = feed_forward(x) + x
        return self.norm(x)


class Transformer(nn.Module):
    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.h = nn.ModuleList([Block(config, dropout) for _ in range(config["layers"])])
        self.ln_f = nn.LayerNorm(config["d_model"])


class GPT(nn.Module):
    """Text and a voice's latents to audio codes. Names and shapes are those of the files of
    XTTS-v2."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        d = config["d_model"]
        self.config = config
        blocks = [ConditioningBlock(config) for _ in range(CONDITIONING_BLOCKS)]
        first = nn.Conv1d(config["mel_channels"], d, 1)
        self.conditioning_encoder = nn.Sequential(
            OrderedDict(init=first, attn=nn.Sequential(*blocks))
        )
        self.conditioning_perceiver = Perceiver(config)
        self.text_embedding = nn.Embedding(config["text_tokens"], d)
        self.mel_embedding = nn.Embedding(config["audio_tokens"], d)
        self.text_pos_embedding = nn.ModuleDict({"emb": nn.Embedding(config["text_positions"], d)})
        self.mel_pos_embedding = nn.ModuleDict({"emb": nn.Embedding(config["mel_positions"], d)})
        self.dropout = nn.Dropout(dropout)
        self.gpt = Transformer(config, dropout)
        self.final_norm = nn.LayerNorm(d)
        self.text_head = nn.Linear(d, config["text_tokens"])
        self.mel_head = nn.Linear(d, config["audio_tokens"])
        for table in (m for m in self.modules() if isinstance(m, nn.Embedding)):
            nn.init.normal_(table.weight, std=0.02)

    def condition(self, mels: torch.Tensor) -> torch.Tensor:
        """Mels (B, 80, F) of a voice to its latents (B, 32, D)."""
        return self.conditioning_perceiver(self.conditioning_encoder(mels).transpose(1, 2))

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, U) to (B, U, D), with positions."""
        return self.text_embedding(ids) + self.text_pos_embedding["emb"].weight[: ids.shape[1]]

    def embed_mel(self, codes: torch.Tensor, first: int = 0) -> torch.Tensor:
        """(B, n) to (B, n, D), at positions from `first` on."""
        return (
            self.mel_embedding(codes)
            + self.mel_pos_embedding["emb"].weight[first : first + codes.shape[1]]
        )

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings (B, T, D) to hidden states (B, T, D) after the last norm. Attention is
        causal."""
        x = self.dropout(x)
        for block in self.gpt.h:
            x = block(x)
        return self.final_norm(self.gpt.ln_f(x))

    def run(self, x: torch.Tensor, cache: list | None = None) -> tuple[torch.Tensor, list]:
        """The same for positions that follow those in `cache`, which is extended: keys and values
        of each layer."""
        cache = [[] for _ in self.gpt.h] if cache is None else cache
        for block, past in zip(self.gpt.h, cache, strict=True):
            x = block(x, past)
        return self.final_norm(self.gpt.ln_f(x)), cache

    def mel_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return upcast(self.mel_head(hidden))


CHECKPOINTED = (Block, ConditioningBlock, Perceiver)  # recomputed by --gradient_checkpointing
COMPILED = (MLP,)  # compiled by --torch_compile


def make_model(config: dict, weights: dict | None, dropout: float = 0.0) -> GPT:
    """A model with these weights, which become its parameters, or with random ones."""
    if weights is None:
        return GPT(config, dropout)
    with torch.device("meta"):
        model = GPT(config, dropout)
    model.load_state_dict(weights, assign=True)
    return model


def set_up(args, model: GPT, setup: device.Setup) -> None:
    """--sdpa and --freeze_layers. Prints the kernel that attention uses. Raises `UsageError`."""
    if args.freeze_layers > len(model.gpt.h):
        raise UsageError(
            f"--freeze_layers {args.freeze_layers}: the GPT has {len(model.gpt.h)} layers"
        )
    for number, block in enumerate(model.gpt.h):
        block.attn.sdpa = args.sdpa
        block.requires_grad_(number >= args.freeze_layers)
    kernel = "fused" if args.sdpa else "the explicit product (--no_sdpa)"
    if args.sdpa and setup.device.type != "meta":
        d, heads = model.config["d_model"], model.config["heads"]
        q = torch.zeros(
            1, heads, 64, d // heads, device=setup.device, dtype=setup.dtype, requires_grad=True
        )
        choice = torch._fused_sdp_choice(
            q, q, q, dropout_p=args.dropout, is_causal=True
        )  # an index of SDPBackend
        kernel = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}.get(
            choice, f"kernel {choice}"
        )
    print(f"attention: {kernel}")


def first_model(args, setup: device.Setup, metadata: dict, weights: dict | None) -> GPT:
    """The model that training starts with. Raises `RunError` if the disk is too small for its
    checkpoints."""
    device.seed_everything(args.seed)  # whatever was trained before
    model = make_model(metadata["config"], weights, args.dropout)
    set_up(args, model, setup)
    # In a short training a small conditioning encoder, which began at random, unlearns the voices.
    model.conditioning_encoder.requires_grad_(
        metadata["pretrained"] or metadata["config"]["hifigan"]
    )
    parameters, trainable = optim.count_parameters(model)
    preflight.require_disk(args, model)
    print(f"model: {parameters / 1e6:.1f} M parameters, {trainable / 1e6:.1f} M of them trained")
    return model


# --- loss and evaluation --------------------------------------------------------------------------


def place(batch: dict, latents: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each row of the GPT's input has the latents, START and the text, START, the codes and three
    STOPs, without gaps, so that causal attention needs no mask. Returns the places (B, L) of a
    row's positions in latents | text | codes, which are padded, and for each loss term (2, N): the
    outputs in (B * L,) that have a target, and their targets in (B * U,) of that term."""
    words = [length + 1 for length in batch["tokens_lengths_host"].tolist()]
    sounds = [codes + STOPS for codes in batch["codes"]]
    longest = latents + max(w + s for w, s in zip(words, sounds, strict=True))
    places = torch.zeros(
        len(words), longest, dtype=torch.long
    )  # what pads a row is seen by nothing before it
    chosen = {"text": [], "mel": []}
    for row, (w, s, (first, last)) in enumerate(zip(words, sounds, batch["heard"], strict=True)):
        places[row, : latents + w] = torch.arange(latents + w)
        places[row, latents + w : latents + w + s] = torch.arange(s) + latents + max(words)
        begin = row * longest + latents
        text, codes = torch.arange(w), torch.cat([torch.arange(first), torch.arange(last, s)])
        chosen["text"].append(torch.stack([text + begin, text + row * max(words)]))
        chosen["mel"].append(torch.stack([codes + begin + w, codes + row * max(sounds)]))
    return places, {name: torch.cat(pairs, dim=1) for name, pairs in chosen.items()}


def token_losses(
    model: GPT, batch: dict, frozen: starts.Frozen
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The cross-entropies (N,) of text and codes, and the row in the batch (N,) of each."""
    config, where = model.config, batch["audio"].device
    codes, tokens = frozen.codes(batch["audio"]), batch["tokens"]
    counts = torch.tensor(batch["codes"]).to(where, non_blocking=True)
    steps = torch.arange(max(batch["codes"]) + STOPS, device=where)
    sounds = F.pad(codes, (0, STOPS + 1))[:, : len(steps)].masked_fill(
        steps >= counts[:, None], config["stop_audio"]
    )
    words = F.pad(tokens, (0, 1)).masked_fill(
        torch.arange(tokens.shape[1] + 1, device=where) >= batch["tokens_lengths"][:, None],
        config["stop_text"],
    )  # (B, U + 1): the targets; the input is one later
    text_input = F.pad(words, (1, 0), value=config["start_text"])[:, :-1]
    mel_input = F.pad(sounds, (1, 0), value=config["start_audio"])[:, :-1]
    latents = model.condition(frozen.conditioning_mel(batch["slices"]))
    places, chosen = place(batch, latents.shape[1])
    x = torch.cat([latents, model.embed_text(text_input), model.embed_mel(mel_input)], dim=1)
    x = x.gather(1, places.to(where, non_blocking=True)[:, :, None].expand(-1, -1, x.shape[2]))
    hidden = model.hidden(x).flatten(0, 1)
    losses = {}
    for name, head, targets in (("text", model.text_head, words), ("mel", model.mel_head, sounds)):
        outputs, wanted = chosen[name].to(where, non_blocking=True)
        values = F.cross_entropy(
            upcast(head(hidden[outputs])), targets.flatten()[wanted], reduction="none"
        )
        losses[name] = values, outputs // x.shape[1]
    return losses


def compute_loss(model: GPT, batch: dict, frozen: starts.Frozen) -> dict[str, torch.Tensor]:
    """Sums over the batch of the cross-entropies of text and codes; the loop divides by the
    global batch's counts."""
    return {name: values.sum() for name, (values, _) in token_losses(model, batch, frozen).items()}


def evaluate(
    frozen: starts.Frozen, languages: list[str], model: GPT, eval_batches
) -> dict[str, tuple[float, float]]:
    """The losses as (sum, count), also of each of `languages` if there are several."""
    where, endings = (
        next(model.parameters()).device,
        [f"_{each}" for each in languages if len(languages) > 1],
    )
    sums = {name + ending: [0.0, 0] for name in LOSS_WEIGHTS for ending in ("", *endings)}

    def losses_of(batch: dict) -> tuple[list[str], dict]:
        return batch["languages"], token_losses(model, next(to_device([batch], where)), frozen)

    for batch in eval_batches:
        for spoken, losses in memory.split_on_oom(losses_of, batch, where):
            for name, (values, rows) in losses.items():
                for value, row in zip(values.tolist(), rows.tolist(), strict=True):
                    for key in (name, *[f"{name}_{spoken[row]}"] * bool(endings)):
                        sums[key] = [sums[key][0] + value, sums[key][1] + 1]
    return {key: tuple(pair) for key, pair in sums.items()}


# --- the DVAE of a model from scratch -------------------------------------------------------------


def train_dvae(args, sets: dict[str, Corpus], config: dict) -> Path:
    """Trains a DVAE in two runs, without a codebook and then with one that begins with k-means.
    Returns the folder of its weights. Runs that are complete are only read."""
    crops = functools.partial(codec_training.Crops, seed=args.seed, cache=args.cache_audio)
    data = {name: crops(sets[name], training=name == "train") for name in ("train", "val")}
    tensors = None
    for stage, steps in codec_training.STEPS.items():
        own = options.for_stage(
            args,
            stage,
            max_steps=steps,
            learning_rate=1e-3,
            weight_decay=0.0,
            warmup_steps=None,
            eval_every=steps // 4,
            early_stopping_patience=0,
            average_checkpoints=None,
            gradient_checkpointing=False,
            torch_compile=False,
            init_from=None,
        )
        print(f"\nDVAE, {stage}: {own.max_steps} updates")
        run = begin(own, RECIPE, starts.DVAE_METADATA)
        model = codec_training.first_coder(
            config, data["train"], tensors, None if run.resumed else own.seed
        )
        task = Task(
            RECIPE,
            codec_training.compute_loss,
            codec_training.LOSS_WEIGHTS,
            codec_training.evaluate,
            {"recipe": RECIPE, "stage": stage, "config": config, "updates": own.max_steps},
            "l1",
        )
        global_batches = GlobalBatches(own, data["train"], codec_training.collate, run.setup)
        eval_batches = EvalBatches(own, data["val"], codec_training.collate, run.setup)
        train(own, run, model, task, global_batches, eval_batches)
        finish(own, run, model, task, eval_batches, lambda weights: print(f"\nDVAE: {weights}"))
        run.setup.ranks.gather(None)  # the first rank has written the best weights
        tensors = checkpoint.read_weights(own.checkpoint_dir / "best.safetensors", RECIPE)[0]
        del model, task
        memory.free_memory(run.setup.device)
    return own.checkpoint_dir


# --- speaking -------------------------------------------------------------------------------------


def synthesise(args, start: starts.Start) -> None:
    """--synthesize: a wav for each text."""
    setup = device.setup(args, quiet=True)
    model, frozen, vocabulary, metadata = trained(args, start, setup)
    clips = [read_audio(path, SAMPLE_RATE).to(setup.device) for path in args.speaker_wav]
    for path, waveform in zip(args.speaker_wav, clips, strict=True):
        if len(waveform) < inference.SHORTEST_SECONDS * SAMPLE_RATE:
            raise UsageError(
                f"--speaker_wav {path}: it is shorter than {inference.SHORTEST_SECONDS} s"
            )
    settings = inference.Sampling(
        args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed
    )
    lines = [vocabulary.check(line) for line in texts.texts_of(args.synthesize)]
    longest = most_text(metadata["config"])
    with setup.autocast():
        voice = speaking.voice_of(model, frozen, clips)
        for number, line in enumerate(lines):
            waveform = speaking.speak(
                model, frozen, vocabulary.encode, vocabulary.read(line), voice, settings, longest
            )
            path = starts.numbered(args.output, number, len(lines))
            write_wav(path, int16(waveform), frozen.rate)
            print(f"{path}: {len(waveform) / frozen.rate:.2f} s")


def speak_held_out(
    args,
    setup: device.Setup,
    model: GPT,
    frozen: starts.Frozen,
    vocabulary: texts.Texts,
    metadata: dict,
    sets: dict[str, Corpus],
) -> None:
    """Speaks sentences that the model has not learned, each in the voice of a training clip of its
    speaker, and --export."""
    usual, settings = (
        (2, inference.Sampling(seed=args.seed)) if frozen.vocoder else (20, inference.GREEDY)
    )
    count = usual if args.speak_held_out is None else args.speak_held_out
    corpus = sets["val"].select(np.arange(min(count, len(sets["val"]))))
    voices = starts.speakers_of(sets["train"]) if count or args.export else {}
    if args.export:
        starts.export(args.export, model.state_dict(), frozen, metadata, voices)
    if count:
        folder, longest = Path(args.output_dir) / "speech", most_text(model.config)
        frozen.to(setup.device)
        with setup.autocast():
            print(
                speaking.speak_corpus(
                    folder, model, frozen, vocabulary, corpus, voices, settings, longest
                )
            )


# --- main -----------------------------------------------------------------------------------------


def trained(
    args, start: starts.Start, setup: device.Setup
) -> tuple[GPT, starts.Frozen, texts.Texts, dict]:
    """The GPT of --resume, of --model_dir, or of the best evaluation, with what is frozen,
    vocabulary and metadata."""
    if start.model_dir and not args.resume:
        metadata, weights, frozen = starts.choose(start, None)
    else:
        weights, metadata = checkpoint.weights_to_use(args, RECIPE, starts.METADATA)
        metadata, _, frozen = starts.choose(start, {"metadata": metadata, "model": weights})
    model = make_model(metadata["config"], weights).to(setup.device).eval()
    return model, frozen.to(setup.device), texts.Texts(metadata), metadata


def export_only(args, start: starts.Start) -> None:
    setup = device.setup(args)
    model, frozen, _, metadata = trained(args, start, setup)
    starts.export(args.export, model.state_dict(), frozen, metadata, {})


def look_only(args, start: starts.Start) -> None:
    """--show_text, or --check_data."""
    metadata = starts.metadata_of(start)
    sets = read_sets(args, metadata) if args.check_data else {}
    reader = texts.reader_of(metadata, start.text, sets.get("train"), is_new=not start.resume)
    if args.show_text:
        return texts.show(args.show_text, reader, most_text(metadata["config"]))
    splits.say_checked(check_sets(args, sets, reader, metadata["config"]))


def report_results(score: Callable[[], dict], name: str, weights: str) -> None:
    """A line for all languages and, if there are several, one for each."""
    results = score()
    print(f"\n{name} set, {weights} (cross-entropy per token and per code)")
    for language in dict.fromkeys(key.partition("_")[2] for key in results):
        names = {
            key.partition("_")[0]: pair
            for key, pair in results.items()
            if key.partition("_")[2] == language
        }
        values = [f"{name} {total / max(1, count):.3f}" for name, (total, count) in names.items()]
        print(f"  {language or 'all'}: {'  '.join(values)}")


@torch.no_grad()
def evaluate_only(args, start: starts.Start) -> None:
    """--evaluate on the test set, or the evaluation set."""
    setup = device.setup(args)
    model, frozen, vocabulary, metadata = trained(args, start, setup)
    sets = check_sets(args, read_sets(args, metadata), vocabulary, metadata["config"])
    name = "test" if "test" in sets else "val"
    eval_batches = EvalBatches(
        args, Utterances(args, sets[name], vocabulary, metadata, training=False), collate, setup
    )
    score = functools.partial(
        evaluate, frozen, vocabulary.languages_of(sets[name]), model, eval_batches
    )
    with setup.autocast():
        report_results(score, name, "the weights named")


def main(args) -> dict | None:
    start = resolve(args)
    exports = recogniser.exports_only(start.export, start.resume, start.model_dir, start.given)
    goals = {
        look_only: args.show_text or args.check_data,
        synthesise: args.synthesize,
        evaluate_only: args.evaluate,
    }
    for goal, is_wanted in {**goals, export_only: exports}.items():
        if is_wanted:
            return goal(args, start)
    run = begin(args, RECIPE, starts.METADATA)

    read = functools.cache(lambda: read_sets(args, run.resumed and run.resumed["metadata"]))
    make_dvae = None if run.planned else lambda config: train_dvae(args, read(), config)
    metadata, weights, frozen = starts.choose(start, run.resumed, make_dvae)
    added = 0 if run.resumed else texts.extend(metadata, weights, read()["train"].texts, start.text)
    vocabulary = texts.Texts(metadata, is_new=not run.resumed)
    sets = check_sets(args, read(), vocabulary, metadata["config"])
    metadata |= about_run(args, read())
    starts.check_initial(args.init_from, metadata)
    data = {
        name: Utterances(args, sets[name], vocabulary, metadata, name == "train") for name in sets
    }
    model = first_model(args, run.setup, metadata, None if run.resumed else weights)
    if not (run.resumed or run.planned or metadata["pretrained"]):
        starts.fit_conditioning(model, frozen, data["train"])
    del weights

    global_batches = GlobalBatches(args, data["train"], collate, run.setup)
    evaluation = {
        name: EvalBatches(args, data[name], collate, run.setup) for name in data if name != "train"
    }
    frozen.to(run.setup.device, speaking=False)
    scores = {
        name: functools.partial(evaluate, frozen, vocabulary.languages_of(sets[name]))
        for name in evaluation
    }
    losses = functools.partial(scores["val"], model.to(run.setup.device), evaluation["val"])
    texts.fit_new_tokens(model, added, losses, run.setup.ranks.reduce)
    task = Task(
        RECIPE,
        functools.partial(compute_loss, frozen=frozen),
        LOSS_WEIGHTS,
        scores["val"],
        metadata,
        "mel",
        starts.learning_rate(metadata),
        CHECKPOINTED,
        COMPILED,
        evaluate_first=metadata["pretrained"],
        decay_embeddings=False,
        betas=BETAS,
    )
    train(args, run, model, task, global_batches, evaluation["val"])
    name = "test" if "test" in evaluation else "val"
    results = functools.partial(
        report_results, lambda: scores[name](model, evaluation[name].whole()), name
    )
    finish(args, run, model, task, evaluation["val"], results)
    if run.setup.ranks.first:
        speak_held_out(args, run.setup, model, frozen, vocabulary, metadata, sets)
    return {
        "weights": args.checkpoint_dir / "best.safetensors",
        "logs": args.log_dir,
        "export": args.export,
    }


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()) and None)
