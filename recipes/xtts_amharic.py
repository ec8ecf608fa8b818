"""XTTS for Amharic: Coqui's XTTS-v2, whose GPT learns a language or a voice from little speech on a small GPU.

    python recipes/xtts_amharic.py --from_scratch --model_size demo   # random weights, synthetic speech
    python recipes/xtts_amharic.py --model_dir XTTS-v2 --train_manifest train.csv --val_manifest val.csv --resume auto
    python recipes/xtts_amharic.py --synthesize "selam le'alem" --speaker_wav voice.wav --output out.wav --resume checkpoints/best.safetensors

Data: CSV with the header audio_file|text|speaker_name, JSON Lines, or LJSpeech's metadata.csv; any sample rate; clips of 0.5 to
11.6 s and texts of up to 200 tokens. The vocabulary that comes with the weights must have the text's characters.

--model_dir takes a folder with Coqui's model.pth, config.json, vocab.json, dvae.pth and mel_stats.pth. The DVAE makes the codes
that are learned and is frozen, as is the vocoder. --export DIR writes a folder that Coqui loads.

Memory: weights, gradients and AdamW's states of the 441 million parameters take 6.6 GiB, with --optimizer adamw_8bit 4.1.
--gradient_checkpointing, --sdpa and mixed precision reduce what comes on top. run_xtts_amharic.sh has presets.

Sources: XTTS (Casanova et al. 2024), Tortoise (Betker 2023), Perceiver (Jaegle et al. 2021), GPT-2 (Radford et al. 2019). Written
from these and from the shapes of the released files; Coqui's code is not used. The released weights have a licence of their own.
"""

import argparse
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

from common import checkpoint, device, memory, optim, options, preflight
from common.batches import EvalBatches, Windows, pad, to_device
from common.device import upcast
from common.errors import UsageError, exit_with_one_line
from common.loop import Task, begin, finish, train
from speech import corpus as splits
from speech import demo, recogniser, text
from speech.audio import read_audio, read_utterance, write_wav
from speech.columns import Corpus
from speech.xtts import codec, inference
from speech.xtts import start as starts
from speech.xtts.codec import SAMPLE_RATE, SAMPLES_PER_CODE, code_count

RECIPE = "xtts_amharic"
LOSS_WEIGHTS = {"text": 0.01, "mel": 1.0}
STOPS = 4  # STOP targets after the codes, as the released model was trained
SLICE = 66_150, 132_300  # samples: the least and the greatest length of the conditioning slice, 3 and 6 s
MARGIN = 16 * SAMPLES_PER_CODE  # zeros after every clip, so that its codes do not depend on the batch
BETAS = (0.9, 0.96)
MAX_SAMPLES, MIN_SECONDS, MAX_TEXT = 255_995, 0.5, 200  # of a clip, samples and seconds; of a text, tokens
CONDITIONING_BLOCKS, PERCEIVER_LAYERS = 6, 2
PATIENCE = 5  # evaluations without a gain, for released weights
DEMO_SIZES = {"train": 400, "val": 20}  # clips
DEMO_STEPS = 200


def add_arguments(parser) -> None:
    starts.add_arguments(parser)
    splits.add_arguments(parser)
    # fmt: off
    options.add_arguments(parser, learning_rate=(None, "5e-6 for released weights, 2e-3 from scratch"), keep_last=2, max_duration=(MAX_SAMPLES / SAMPLE_RATE, "11.6"), min_duration=MIN_SECONDS, early_stopping_patience=(None, f"{PATIENCE} for released weights, else never"))
    own = parser.add_argument_group("XTTS")
    own.add_argument("--sdpa", action=options.OnOff, default=True, help="fused attention; off: all scores in memory (on)")
    own.add_argument("--freeze_layers", type=options.COUNT, default=0, metavar="N", help="leave the first N layers of the GPT as they are (0)")
    own.add_argument("--dropout", type=options.SHARE, default=0.1, metavar="P", help="(0.1)")
    hidden = {"default": argparse.SUPPRESS, "help": "another name of the flag without enable_ or of --train_manifest, --val_manifest, --output_dir, --gradient_accumulation_steps"}
    own.add_argument("--enable_sdpa", dest="sdpa", action=options.OnOff, **hidden)
    own.add_argument("--enable_grad_checkpoint", dest="gradient_checkpointing", action=options.OnOff, **hidden)
    own.add_argument("--enable_mixed_precision", dest="mixed_precision", action="store_const", const="auto", **hidden)
    own.add_argument("--train_csv", dest="train_manifest", type=options.path, metavar="FILE", **hidden)
    own.add_argument("--eval_csv", dest="val_manifest", type=options.path, metavar="FILE", **hidden)
    own.add_argument("--output_path", dest="output_dir", type=options.path, metavar="DIR", **hidden)
    own.add_argument("--grad_acumm", dest="gradient_accumulation_steps", type=options.POSITIVE, metavar="N", **hidden)
    own.add_argument("--max_audio_length", type=options.number(int, SAMPLE_RATE // 2, 600_000), metavar="N", help=f"longest clip, samples at 22.05 kHz, in place of --max_duration ({MAX_SAMPLES})")
    # fmt: on


def resolve(args) -> starts.Start:
    is_demo = not args.train_manifest
    excludes = (*splits.EXCLUDES, *starts.EXCLUDES, ("max_audio_length", "max_duration", "both limit clips; give one"))
    options.resolve(args, is_demo, DEMO_STEPS, excludes, (*splits.NEEDS, *starts.NEEDS))
    if args.max_audio_length:
        args.max_duration = args.max_audio_length / SAMPLE_RATE
    start = starts.resolve(args)
    if args.early_stopping_patience is None:
        args.early_stopping_patience = 0 if args.from_scratch else PATIENCE
    return start


# --- data ------------------------------------------------------------------------------------------------------------


def read_sets(args, metadata: dict) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, if there is one, "test"; synthetic ones if no manifest is given, in Latin letters
    for a released vocabulary. What was held out when the model with these metadata began is held out again."""
    checks, normalise = splits.resolve(args, tuple(metadata.get("held_out", ()))), text.normalise
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.evaluate and args.test_manifest:
        paths = {"test": args.test_manifest}
    elif not args.train_manifest:
        print("no --train_manifest: using synthetic speech")
        folder, normalise = (
            Path(args.output_dir) / "data" / "amharic",
            starts.romanise if metadata["pretrained"] else normalise,
        )
        paths = demo.speech_corpus(folder, demo.AMHARIC_WORDS, demo.AMHARIC_VOICES, DEMO_SIZES)
    return splits.load_splits(paths, normalise, checks)


def drop_untrainable(corpus: Corpus, name: str, vocabulary: starts.Texts, config: dict, strict: bool) -> Corpus:
    """Without the utterances whose text or clip is longer than the model has positions for, or whose letters it lacks. Says how
    many of the others have unknown characters, which the model cannot tell apart."""
    longest, unknown = most_text(config), 0

    def fault(index: int) -> tuple[str, str] | None:
        nonlocal unknown
        language = corpus.languages[index]
        tokens = vocabulary.encode(corpus.texts[index], language)[len(vocabulary.encode("", language)) :]
        written = vocabulary.vocabulary.decode([token for token in tokens if token != vocabulary.unknown])
        if not any(character.isalnum() for character in written):
            return "the vocabulary has none of the text's letters", repr(corpus.texts[index][:40])
        if len(tokens) > longest:
            return f"text is longer than {longest} tokens", f"{len(tokens)} tokens"
        unknown += vocabulary.unknown in tokens
        codes = code_count(int(corpus.seconds[index] * SAMPLE_RATE))
        if codes + STOPS > config["mel_positions"]:
            return f"clip is longer than {config['mel_positions'] - STOPS} codes", f"{codes} codes"
        return None

    kept = splits.drop(corpus, name, fault, strict)
    if unknown:
        print(f"warning: {unknown} texts of the {name} have characters that the vocabulary lacks")
    return kept


def most_text(config: dict) -> int:
    """Tokens of the longest text; START, STOP and two tokens of the language are not counted."""
    return min(MAX_TEXT, config["text_positions"] - 4)


def about_run(args, sets: dict[str, Corpus]) -> dict:
    """What is kept with the weights beside the model: what is held out."""
    held_out = [] if args.val_manifest or not args.train_manifest else splits.held_out_keys(sets["val"])
    return {"recipe": RECIPE, "held_out": held_out}


class Utterances:
    """A set of utterances as the GPT takes them. The conditioning slice depends on (seed, epoch, index) alone; in evaluation it
    has the middle length and begins with the clip."""

    def __init__(self, args, corpus: Corpus, vocabulary: starts.Texts, training: bool):
        self.args = args
        self.corpus = corpus
        self.vocabulary = vocabulary
        self.training = training
        self.tokens = [vocabulary.encode(*pair) for pair in zip(corpus.texts, corpus.languages, strict=True)]

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) positions of each utterance in the GPT, in seconds of codes: the longest of them come first."""
        codes = np.ceil(self.corpus.seconds * SAMPLE_RATE / SAMPLES_PER_CODE)
        return (codes + [len(tokens) for tokens in self.tokens] + 32) * SAMPLES_PER_CODE / SAMPLE_RATE

    def item(self, index: int, epoch: int) -> dict:
        """One utterance: waveform (T,), tokens (U,), the slice (S,), and the codes whose loss is left out, (first, last)."""
        waveform = read_utterance(self.corpus, index, SAMPLE_RATE, self.args.cache_audio)
        random = np.random.default_rng([self.args.seed, epoch, index])
        length = int(random.integers(SLICE[0], SLICE[1] + 1)) if self.training else sum(SLICE) // 2
        if length > len(waveform):
            length = len(waveform) // 2
        begin = int(random.integers(0, len(waveform) - length + 1)) if self.training else 0
        codes = code_count(len(waveform))
        first, last = begin // SAMPLES_PER_CODE, min(codes, (begin + length) // SAMPLES_PER_CODE)
        return {
            "audio": waveform, "tokens": torch.tensor(self.tokens[index]),
            "slice": F.pad(waveform[begin : begin + length], (0, SLICE[1] - length)), "heard": (first, last),
            "codes": codes, "name": self.corpus.where(index), "index": index,
        }  # fmt: skip


def collate(items: list[dict]) -> dict:
    """Items to a batch: audio (B, T) and tokens (B, U), each with its lengths, slices (B, S); counts are the numbers of targets
    of each loss term: the tokens and STOP; the codes that are not in the slice, and four STOPs."""
    batch = {
        "names": [item["name"] for item in items],
        "indices": [item["index"] for item in items],
        "heard": [item["heard"] for item in items],
        "codes": [item["codes"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "slices": torch.stack([item["slice"] for item in items]),
    }
    for key in ("audio", "tokens"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    targets = [item["codes"] - (item["heard"][1] - item["heard"][0]) + STOPS for item in items]
    batch["counts"] = {"text": int(batch["tokens_lengths"].sum()) + len(items), "mel": sum(targets)}
    return batch


# --- model: names and shapes are those of Coqui's model.pth -----------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as in GPT-2's files."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to (B, T, D). `sdpa` off computes the product and the softmax one after the other, the
    reference that --no_sdpa asks for."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d, self.heads, self.dropout = config["d_model"], config["heads"], dropout
        self.c_attn = Conv1D(d, 3 * d)
        self.c_proj = Conv1D(d, d)
        self.sdpa = True

    def forward(self, x: torch.Tensor, cache: list | None = None) -> torch.Tensor:
        """`cache` holds keys and values (B, H, P, D / H) of earlier positions, and then those of all."""
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, D / H)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            cache[:] = k, v
        dropout, one = self.dropout if self.training else 0.0, q.shape[2] == 1  # one query sees all that is before
        if self.sdpa and (one or q.shape == k.shape):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=not one)
        else:
            y = explicit_attention(q, k, v, dropout)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def explicit_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
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
    """Attention of mel frames (B, D, F) to each other. The residual is the normalised input, as in the released model."""

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
        q, k, v = self.qkv(x).unflatten(1, (self.heads, 3, -1)).permute(2, 0, 1, 4, 3)  # 3 x (B, H, F, D / H)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y.transpose(-1, -2).flatten(1, 2))


class ConditioningEncoder(nn.Module):
    """Mels (B, 80, F) to (B, D, F)."""

    def __init__(self, config: dict):
        super().__init__()
        self.init = nn.Conv1d(config["mel_channels"], config["d_model"], 1)
        self.attn = nn.Sequential(*[ConditioningBlock(config) for _ in range(CONDITIONING_BLOCKS)])

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        return self.attn(self.init(mels))


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
        k, v = (
            self.to_kv(torch.cat([latents, context], dim=1)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
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
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [PerceiverAttention(config), nn.Sequential(nn.Linear(d, 2 * inner), GEGLU(), nn.Linear(inner, d))]
            )
            for _ in range(PERCEIVER_LAYERS)
        )
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


class Positions(nn.Module):
    def __init__(self, count: int, d: int):
        super().__init__()
        self.emb = nn.Embedding(count, d)


class GPT(nn.Module):
    """Text and a voice's latents to audio codes. Names and shapes are those of the files of XTTS-v2."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        d = config["d_model"]
        self.config = config
        self.conditioning_encoder = ConditioningEncoder(config)
        self.conditioning_perceiver = Perceiver(config)
        self.text_embedding = nn.Embedding(config["text_tokens"], d)
        self.mel_embedding = nn.Embedding(config["audio_tokens"], d)
        self.text_pos_embedding = Positions(config["text_positions"], d)
        self.mel_pos_embedding = Positions(config["mel_positions"], d)
        self.dropout = nn.Dropout(dropout)
        self.gpt = Transformer(config, dropout)
        self.final_norm = nn.LayerNorm(d)
        self.text_head = nn.Linear(d, config["text_tokens"])
        self.mel_head = nn.Linear(d, config["audio_tokens"])
        for module in (
            self.text_embedding,
            self.mel_embedding,
            self.text_pos_embedding.emb,
            self.mel_pos_embedding.emb,
        ):
            nn.init.normal_(module.weight, std=0.02)

    def condition(self, mels: torch.Tensor) -> torch.Tensor:
        """Mels (B, 80, F) of a voice to its latents (B, 32, D)."""
        return self.conditioning_perceiver(self.conditioning_encoder(mels).transpose(1, 2))

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, U) to (B, U, D), with positions."""
        return self.text_embedding(ids) + self.text_pos_embedding.emb.weight[: ids.shape[1]]

    def embed_mel(self, codes: torch.Tensor, first: int = 0) -> torch.Tensor:
        """(B, n) to (B, n, D), at positions from `first` on."""
        return self.mel_embedding(codes) + self.mel_pos_embedding.emb.weight[first : first + codes.shape[1]]

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings (B, T, D) to hidden states (B, T, D) after the last norm. Attention is causal."""
        x = self.dropout(x)
        for block in self.gpt.h:
            x = block(x)
        return self.final_norm(self.gpt.ln_f(x))

    def run(self, x: torch.Tensor, cache: list | None = None) -> tuple[torch.Tensor, list]:
        """The same for positions that follow those in `cache`, which is extended: keys and values of each layer."""
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
        raise UsageError(f"--freeze_layers {args.freeze_layers}: the GPT has {len(model.gpt.h)} layers")
    for number, block in enumerate(model.gpt.h):
        block.attn.sdpa = args.sdpa
        block.requires_grad_(number >= args.freeze_layers)
    kernel = "the explicit product (--no_sdpa)"
    if args.sdpa:
        d, heads = model.config["d_model"], model.config["heads"]
        q = torch.zeros(1, heads, 64, d // heads, device=setup.device, dtype=setup.dtype, requires_grad=True)
        choice = torch._fused_sdp_choice(q, q, q, dropout_p=args.dropout, is_causal=True)  # an index of SDPBackend
        kernel = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}.get(choice, f"kernel {choice}")
    print(f"attention: {kernel}")


def first_model(args, setup: device.Setup, metadata: dict, weights: dict | None) -> GPT:
    """The model that training starts with. Raises `RunError` if the disk is too small for its checkpoints."""
    model = make_model(metadata["config"], weights, args.dropout)
    set_up(args, model, setup)
    parameters, trainable = optim.count_parameters(model)
    preflight.require_disk(args, parameters, trainable)
    print(f"model: {parameters / 1e6:.1f} M parameters, {trainable / 1e6:.1f} M of them trained")
    return model


# --- loss and evaluation ---------------------------------------------------------------------------------------------


@torch.no_grad()
def codes_of(frozen: starts.Frozen, batch: dict) -> torch.Tensor:
    """The codes (B, n) of the batch's waveforms, in fp32. What follows a clip is silence, whatever else is in the batch."""
    return frozen.dvae.codes(frozen.dvae_mel(F.pad(batch["audio"], (0, MARGIN))))


def place(batch: dict, latents: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each row of the GPT's input has the latents, START and the text, START, the codes and three STOPs, without gaps, so that
    causal attention needs no mask. Returns the places (B, L) of a row's positions in latents | text | codes, which are padded,
    and for each loss term (2, N): the outputs in (B * L,) that have a target, and their targets in (B * U,) of that term."""
    words = [length + 1 for length in batch["tokens_lengths_host"].tolist()]
    sounds = [codes + STOPS for codes in batch["codes"]]
    longest = latents + max(w + s for w, s in zip(words, sounds, strict=True))
    places = torch.zeros(len(words), longest, dtype=torch.long)  # what pads a row is seen by nothing before it
    chosen = {"text": [], "mel": []}
    for row, (w, s, (first, last)) in enumerate(zip(words, sounds, batch["heard"], strict=True)):
        places[row, : latents + w] = torch.arange(latents + w)
        places[row, latents + w : latents + w + s] = torch.arange(s) + latents + max(words)
        begin, text, codes = (
            row * longest + latents,
            torch.arange(w),
            torch.cat([torch.arange(first), torch.arange(last, s)]),
        )
        chosen["text"].append(torch.stack([text + begin, text + row * max(words)]))
        chosen["mel"].append(torch.stack([codes + begin + w, codes + row * max(sounds)]))
    return places, {name: torch.cat(pairs, dim=1) for name, pairs in chosen.items()}


def compute_loss(model: GPT, batch: dict, frozen: starts.Frozen) -> dict[str, torch.Tensor]:
    """Sums over the batch of the cross-entropies of text and codes; the loop divides by the window's counts."""
    config, where = model.config, batch["audio"].device
    codes, tokens = codes_of(frozen, batch), batch["tokens"]
    counts = torch.tensor(batch["codes"]).to(where, non_blocking=True)
    steps = torch.arange(max(batch["codes"]) + STOPS, device=where)
    sounds = F.pad(codes, (0, STOPS + 1))[:, : len(steps)].masked_fill(steps >= counts[:, None], config["stop_audio"])
    words = F.pad(tokens, (0, 1)).masked_fill(
        torch.arange(tokens.shape[1] + 1, device=where) >= batch["tokens_lengths"][:, None], config["stop_text"]
    )  # (B, U + 1): the targets; the input is one later
    text_input = F.pad(words, (1, 0), value=config["start_text"])[:, :-1]
    mel_input = F.pad(sounds, (1, 0), value=config["start_audio"])[:, :-1]
    latents = model.condition(frozen.conditioning_mel(batch["slices"]))
    places, chosen = place(batch, latents.shape[1])
    x = torch.cat([latents, model.embed_text(text_input), model.embed_mel(mel_input)], dim=1)
    x = x.gather(1, places.to(where, non_blocking=True)[:, :, None].expand(-1, -1, x.shape[2]))
    hidden = model.hidden(x).flatten(0, 1)
    terms = {}
    for name, head, targets in (("text", model.text_head, words), ("mel", model.mel_head, sounds)):
        outputs, wanted = chosen[name].to(where, non_blocking=True)
        terms[name] = F.cross_entropy(upcast(head(hidden[outputs])), targets.flatten()[wanted], reduction="sum")
    return terms


def evaluate(frozen: starts.Frozen, model: GPT, eval_batches) -> dict[str, tuple[float, float]]:
    """The losses as (sum, count)."""
    where, sums = next(model.parameters()).device, {name: [0.0, 0] for name in LOSS_WEIGHTS}
    for batch in eval_batches:
        for terms in memory.split_on_oom(
            lambda b: compute_loss(model, next(to_device([b], where)), frozen), batch, where
        ):
            for name, value in terms.items():
                sums[name][0] += float(value)
        for name, count in batch["counts"].items():
            sums[name][1] += count
    return {name: tuple(pair) for name, pair in sums.items()}


# --- speaking --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def speak(model: GPT, frozen: starts.Frozen, vocabulary: starts.Texts, transcript: str, voice: list[torch.Tensor],
          settings: inference.Sampling) -> tuple[torch.Tensor, int]:  # fmt: skip
    """A text in the voice of waveforms (T,) at 22.05 kHz: samples (T,) and their rate, 24 kHz with a vocoder, else 22.05."""
    latents = inference.latents(model, frozen.conditioning_mel, voice)
    sentences = inference.split_sentences(
        transcript, most_text(model.config), lambda piece: len(vocabulary.encode(piece))
    )
    spoken = inference.sample(model, model.config, latents, [vocabulary.encode(each) for each in sentences], settings)
    parts, rate = [], frozen.rate
    speaker = frozen.speaker(voice) if frozen.vocoder else None
    for speech in spoken:
        if not len(speech.codes):
            parts.append(latents.new_zeros(0))
        elif frozen.vocoder:
            parts.append(frozen.vocoder(speech.latents[None], speaker)[0])
        else:
            parts.append(codec.griffin_lim(frozen.dvae.decode(speech.codes[None])[0], frozen.dvae_mel.mel_stats))
    return inference.join(parts, rate), rate


def check_text(transcript: str, vocabulary: starts.Texts) -> None:
    """Raises `UsageError` if the model cannot read a text, and warns if there are characters that it cannot read."""
    tokens = vocabulary.encode(transcript)
    written = vocabulary.vocabulary.decode(
        [token for token in tokens[len(vocabulary.encode("")) :] if token != vocabulary.unknown]
    )
    if not any(character.isalnum() for character in written):
        raise UsageError(f"--synthesize: the vocabulary has none of the letters in {transcript[:40]!r}")
    if vocabulary.unknown in tokens:
        print(f"warning: {transcript[:40]!r} has characters that the vocabulary lacks", file=sys.stderr)


def synthesise(args, start: starts.Start) -> None:
    """--synthesize: a wav for each text."""
    setup = device.setup(args, quiet=True)
    model, frozen, vocabulary, _ = trained(args, start, setup)
    voice = [read_audio(path, SAMPLE_RATE).to(setup.device) for path in args.speaker_wav]
    for path, waveform in zip(args.speaker_wav, voice, strict=True):
        if len(waveform) < inference.SHORTEST_SECONDS * SAMPLE_RATE:
            raise UsageError(f"--speaker_wav {path}: it is shorter than {inference.SHORTEST_SECONDS} s")
    settings = inference.Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)
    texts = starts.texts_of(args.synthesize)
    for transcript in texts:
        check_text(transcript, vocabulary)
    for number, transcript in enumerate(texts):
        with setup.autocast():
            waveform, rate = speak(model, frozen, vocabulary, transcript, voice, settings)
        path = starts.numbered(args.output, number, len(texts))
        samples = (waveform.float().clamp(-1, 1) * 32767).round().to(torch.int16).cpu().numpy()
        write_wav(path, samples, rate)
        print(f"{path}: {len(samples) / rate:.2f} s")


# --- main ------------------------------------------------------------------------------------------------------------


def trained(args, start: starts.Start, setup: device.Setup) -> tuple[GPT, starts.Frozen, starts.Texts, dict]:
    """The GPT of --resume, of --model_dir, or of the best evaluation, with what is frozen, vocabulary and metadata."""
    if start.model_dir and not args.resume:
        metadata, weights, frozen = starts.choose(start, None)
    else:
        weights, metadata = checkpoint.weights_to_use(args, RECIPE, starts.METADATA)
        metadata, _, frozen = starts.choose(start, {"metadata": metadata, "model": weights})
    model = make_model(metadata["config"], weights).to(setup.device).eval()
    return model, frozen.to(setup.device), starts.Texts(metadata), metadata


def export_only(args, start: starts.Start) -> None:
    setup = device.setup(args)
    model, frozen, _, metadata = trained(args, start, setup)
    starts.export(args.export, model.state_dict(), frozen, metadata, {})


def report_results(frozen: starts.Frozen, model: GPT, eval_batches, title: str) -> None:
    results = evaluate(frozen, model, eval_batches)
    losses = [f"{term} {total / max(1, count):.3f}" for term, (total, count) in results.items()]
    print(f"\n{title}: {'  '.join(losses)} (cross-entropy per token and per code)")


@torch.no_grad()
def evaluate_only(args, start: starts.Start) -> None:
    """--evaluate on the test set, or the evaluation set."""
    setup = device.setup(args)
    model, frozen, vocabulary, metadata = trained(args, start, setup)
    sets = read_sets(args, metadata)
    name = "test" if "test" in sets else "val"
    corpus = drop_untrainable(sets[name], f"{name} set", vocabulary, metadata["config"], args.strict_data)
    eval_batches = EvalBatches(args, Utterances(args, corpus, vocabulary, training=False), collate, setup)
    with setup.autocast():
        report_results(frozen, model, eval_batches, f"{name} set, the weights named")


def main(args) -> dict | None:
    start = resolve(args)
    if args.verify_gpu:
        sys.exit(preflight.verify(args, *[starts.count_parameters(start)] * 2))
    if args.synthesize:
        return synthesise(args, start)
    if args.evaluate:
        return evaluate_only(args, start)
    if recogniser.exports_only(start.export, start.resume, start.model_dir, start.given):
        return export_only(args, start)
    run = begin(args, RECIPE, starts.METADATA)

    metadata, weights, frozen = starts.choose(start, run.resumed)
    vocabulary = starts.Texts(metadata)
    sets = read_sets(args, metadata)
    for name in sets:
        sets[name] = drop_untrainable(sets[name], f"{name} set", vocabulary, metadata["config"], args.strict_data)
    metadata |= about_run(args, sets)
    data = {name: Utterances(args, sets[name], vocabulary, training=name == "train") for name in sets}
    model = first_model(args, run.setup, metadata, None if run.resumed else weights)
    del weights

    windows = Windows(args, data["train"], collate, run.setup)
    evaluation = {name: EvalBatches(args, data[name], collate, run.setup) for name in data if name != "train"}
    frozen = frozen.to(run.setup.device)
    task = Task(
        RECIPE, functools.partial(compute_loss, frozen=frozen), LOSS_WEIGHTS, functools.partial(evaluate, frozen), metadata,
        "mel", starts.learning_rate(metadata), CHECKPOINTED, COMPILED, evaluate_first=metadata["pretrained"],
        decay_embeddings=False, betas=BETAS,
    )  # fmt: skip
    train(args, run, model, task, windows, evaluation["val"])
    name = "test" if "test" in evaluation else "val"
    finish(args, run, model, task, evaluation["val"], lambda weights: report_results(
        frozen, model, evaluation[name].whole(), f"{name} set, {weights}"
    ))  # fmt: skip
    if args.export and run.setup.ranks.first:
        starts.export(args.export, model.state_dict(), frozen, metadata, starts.speakers_of(sets["train"]))
    return {"weights": args.checkpoint_dir / "best.safetensors", "logs": args.log_dir, "export": args.export}


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: main(parser.parse_args()) and None)
