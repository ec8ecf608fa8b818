"""A training step of a recipe, from waveforms to updated weights: time, peak memory and loss,
against a peer or against the step without memory options.

    python benchmarks/step.py konkani  [--size original] [--clips 2] [--seconds 30]
    python benchmarks/step.py whisper  [--size base] [--clips 8] [--shortest 3] [--seconds 12]
    python benchmarks/step.py parakeet [--layers 4] [--clips 4] [--seconds 8] [--ragged]
    python benchmarks/step.py matcha   [--size full] [--clips 4] [--seconds 8]
    python benchmarks/step.py xtts     [--layers 4] [--clips 2] [--seconds 8]
    python benchmarks/step.py whisper --device cuda --size small    # the allocator's peak

The first row of the table is the reference.
- konkani: a model of the shape that the replaced project trained (see plain_conformer.py).
- whisper, parakeet: the model of `transformers` with our weights. Its step is what its training
  scripts do: the feature extractor on the clips (on the CPU), forward with labels, backward, AdamW.
- matcha: ours, and ours with an even path in place of the alignment search, whose share of a step
  this shows;
- xtts: our GPT in fp32 with all attention scores in memory and AdamW's states in fp32; the width is
  that of XTTS-v2, weights are random, those of the frozen DVAE as well.

All steps start from the same waveforms and weights; dropout is off, except in konkani and matcha.
On a GPU they run under bf16 autocast, except xtts, which has a row for it. Every measurement runs
in a separate process; the rows take turns, --runs times. The first step of a process is not timed:
its loss is the one in the table. On a CPU that others use, too, mind the processor time (of all
threads together, which sleep while they wait): the clock's is what the others leave. Memory is that
of the whole process, or on a GPU the allocator's peak."""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks import plain_conformer
from benchmarks.plain_conformer import PlainConformer
from common import memory, optim
from common.device import Setup
from common.engine import run_global_batch
from models.matcha import mels as matcha_mels
from models.matcha import model as matcha
from models.parakeet import model as parakeet
from models.parakeet import settings as parakeet_settings
from models.whisper import formats as whisper_formats
from models.whisper import model as whisper
from models.xtts import codec, frozen
from models.xtts import formats as xtts_formats
from models.xtts import model as xtts
from models.xtts import start as xtts_start
from recipes import konkani_conformer as konkani
from recipes import matcha_voice, parakeet_tdt, whisper_vietnamese, xtts_amharic
from speech.signal.audio import SAMPLE_RATE

SAME_LOSS = 1e-4  # fp32, relative
BF16 = torch.bfloat16
MATCHA_SYMBOLS = 60


@dataclass(frozen=True)
class Benchmark:
    """The measurements of a recipe. `flags`: its flags and their defaults. `rows`: options of each
    row. `make_clips(args)` returns the items of a batch, and `make_step(args, options, clips)` the
    model and a function that makes an update and returns the loss before it. In fp32 the rows in
    `same_loss` must have the loss of the first row."""

    flags: dict[str, object]
    rows: dict[str, tuple[str, ...]]
    make_clips: Callable
    make_step: Callable
    same_loss: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The ingredients of a step of ours. `term`: the loss term that the table shows. `layers`:
    those that gradient checkpointing recomputes."""

    model: torch.nn.Module
    collate: Callable
    compute_loss: Callable
    loss_weights: dict[str, float]
    term: str
    layers: tuple = ()
    betas: tuple = optim.BETAS


def our_step(args, options: tuple[str, ...], clips: list[dict], parts: Parts) -> Callable:
    """A step as the loop makes it."""
    device = torch.device(args.device)
    model = parts.model.to(device).train()
    if "checkpoint" in options:
        memory.checkpoint_layers(model, parts.layers)
    kind = "adamw_8bit" if "8bit" in options else "adamw"
    groups = optim.parameter_groups(model, weight_decay=0.01)
    settings = optim.Settings(parts.betas)
    optimizer = optim.make_optimizer(groups, model, args.learning_rate, kind, settings)
    in_bf16 = "bf16" in options or (device.type == "cuda" and "fp32" not in options)
    setup = Setup(device, BF16 if in_bf16 else None)
    pieces = [clips]
    if "halves" in options:
        pieces = [clips[len(clips) // 2 :], clips[: len(clips) // 2]]
    number = list(parts.loss_weights).index(parts.term)

    def step() -> torch.Tensor:
        batches = [parts.collate(piece) for piece in pieces]
        totals = {
            term: sum(batch["counts"][term] for batch in batches) for term in parts.loss_weights
        }
        outcome = run_global_batch(
            model, batches, totals, parts.compute_loss, parts.loss_weights, setup
        )
        if outcome.failed:
            raise SystemExit(f"out of memory: {outcome.reason}")
        optimizer.step()
        optimizer.zero_grad()
        return outcome.sums[number] / totals[parts.term]

    return step


def their_step(args, model: torch.nn.Module, make_inputs: Callable, **settings) -> Callable:
    """A step of a model of transformers, as its training scripts make it. `make_inputs()` computes
    the features and the labels; `settings` are arguments of the forward pass."""
    device = torch.device(args.device)
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, betas=optim.BETAS, eps=1e-9, fused=True
    )

    def step() -> torch.Tensor:
        inputs = {name: tensor.to(device) for name, tensor in make_inputs().items()}
        with torch.autocast(device.type, BF16, enabled=device.type == "cuda"):
            loss = model(**inputs, **settings).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def noise(seconds: float, sample_rate: int, random: torch.Generator | None = None) -> torch.Tensor:
    return torch.randn(int(seconds * sample_rate), generator=random) * 0.1


# --- Konkani --------------------------------------------------------------------------------------

KONKANI_SIZES = {"minimal": (128, 6, 3), "optimized": (192, 8, 4), "original": (256, 12, 6)}
CHARACTERS = 200  # different ones


def konkani_clips(args) -> list[dict]:
    """The same clip of noise several times."""
    tokens = torch.randint(0, CHARACTERS, (args.characters,))
    clip = {
        "audio": noise(args.seconds, konkani.SAMPLE_RATE),
        "tokens": tokens,
        "targets": len(tokens),
        "labels": torch.cat([tokens, torch.tensor([CHARACTERS])]),
        "text": "",
        "name": "clip",
        "index": 0,
    }
    return [clip] * args.clips


def konkani_step(args, options: tuple[str, ...], clips: list[dict]) -> tuple:
    width, encoder, decoder = KONKANI_SIZES[args.size]
    config = {
        **konkani.DEFAULTS,
        "d_model": width,
        "encoder_layers": encoder,
        "decoder_layers": decoder,
        "vocabulary": CHARACTERS,
    }
    if "baseline" in options:
        model = PlainConformer(config, konkani.SAMPLE_RATE, konkani.N_MELS)
        compute_loss = plain_conformer.compute_loss
    else:
        model = konkani.Conformer(config)
        compute_loss = konkani.compute_loss
    parts = Parts(
        model,
        konkani.collate,
        compute_loss,
        konkani.LOSS_WEIGHTS,
        "attention",
        layers=konkani.CHECKPOINTED,
    )
    return model, our_step(args, options, clips, parts)


# --- Whisper --------------------------------------------------------------------------------------

PROMPT = (50258, 50278, 50359, 50363)  # start, Vietnamese, transcribe, no timestamps
END = 50257
TEXT_TOKENS = 50257  # numbered before the special ones
WHISPER_TOKENS_A_SECOND = 3.5


def whisper_clips(args) -> list[dict]:
    """Clips of noise whose lengths are spread evenly, with random transcripts."""
    random = torch.Generator().manual_seed(1)
    clips = []
    lengths = torch.linspace(args.shortest, args.seconds, args.clips).tolist()
    for number, seconds in enumerate(lengths):
        count = round(seconds * WHISPER_TOKENS_A_SECOND)
        tokens = torch.randint(TEXT_TOKENS, (count,), generator=random)
        waveform = noise(seconds, SAMPLE_RATE, random)
        clip = {
            "audio": waveform,
            "tokens": torch.tensor([*PROMPT, *tokens]),
            "labels": torch.tensor([*PROMPT[1:], *tokens, END]),
            "ctc_tokens": tokens[:0],
            "heard": len(waveform),
            "language": "vi",
            "text": "",
            "name": f"clip {number}",
            "index": number,
        }
        clips.append(clip)
    return clips


def whisper_loss(model: whisper.Whisper, batch: dict) -> dict[str, torch.Tensor]:
    return {"attention": whisper.token_loss(model, batch, *model.encode(batch))}


def whisper_step(args, options: tuple[str, ...], clips: list[dict]) -> tuple:
    config = whisper_formats.SIZES[args.size]
    model = whisper.Whisper(config)
    if "transformers" in options:
        return their_whisper(args, config, model.state_dict(), clips)
    if "pad" in options:
        rest = (0, model.longest)
        clips = [{**clip, "audio": F.pad(clip["audio"], rest)[: model.longest]} for clip in clips]
    if "freeze" in options:
        model.freeze_encoder()
    parts = Parts(
        model,
        whisper_vietnamese.collate,
        whisper_loss,
        {"attention": 1.0},
        "attention",
        layers=whisper.LAYERS,
    )
    return model, our_step(args, options, clips, parts)


def their_whisper(args, config: dict, weights: dict, clips: list[dict]) -> tuple:
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    settings = WhisperConfig(
        **config,
        decoder_start_token_id=PROMPT[0],
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(settings)
    weights = {f"model.{name}": tensor for name, tensor in weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or missing not in ([], ["proj_out.weight"]):
        raise SystemExit(f"the weights do not fit: {missing} {unexpected}")
    extractor = WhisperFeatureExtractor(feature_size=config["num_mel_bins"])
    waveforms = [clip["audio"].numpy() for clip in clips]

    def make_inputs() -> dict[str, torch.Tensor]:
        features = extractor(waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        labels = pad_sequence([clip["labels"] for clip in clips], True, -100)
        return {"input_features": features.input_features, "labels": labels}

    return model, their_step(args, model, make_inputs)


# --- Parakeet -------------------------------------------------------------------------------------

SIGMA = 0.02
PARAKEET_TOKENS_A_SECOND = 4


def parakeet_clips(args) -> list[dict]:
    """Clips of noise with random transcripts."""
    random = torch.Generator().manual_seed(1)
    clips = []
    shortest = args.seconds / 4 if args.ragged else args.seconds
    for number, seconds in enumerate(torch.linspace(args.seconds, shortest, args.clips).tolist()):
        count = round(seconds * PARAKEET_TOKENS_A_SECOND)
        tokens = torch.randint(3, args.vocabulary, (count,), generator=random)
        clip = {
            "audio": noise(seconds, SAMPLE_RATE, random),
            "tokens": tokens,
            "plain": False,
            "factors": {"tdt": 1 / len(tokens)},
            "counts": {"tdt": 1},
            "text": "",
            "name": f"clip {number}",
            "index": number,
        }
        clips.append(clip)
    return clips


def parakeet_step(args, options: tuple[str, ...], clips: list[dict]) -> tuple:
    config = parakeet_settings.make_config(
        args.width, args.layers, args.width // 128, (640, 2), args.vocabulary
    )
    model = parakeet.Parakeet(config, SIGMA)
    if "transformers" in options:
        return their_parakeet(args, model.state_dict(), clips)
    parts = Parts(
        model,
        parakeet_tdt.collate,
        parakeet_tdt.compute_loss,
        {"tdt": 1.0},
        "tdt",
        layers=parakeet.CHECKPOINTED,
    )
    return model, our_step(args, options, clips, parts)


def their_parakeet(args, weights: dict, clips: list[dict]) -> tuple:
    from transformers import ParakeetFeatureExtractor, ParakeetForTDT, ParakeetTDTConfig

    blank = args.vocabulary
    encoder = {
        "hidden_size": args.width,
        "intermediate_size": 4 * args.width,
        "num_attention_heads": args.width // 128,
        "num_hidden_layers": args.layers,
        "num_mel_bins": 128,
        "attention_bias": False,
        "convolution_bias": False,
        "scale_input": False,
        "layerdrop": 0.0,
        "dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    config = ParakeetTDTConfig(
        vocab_size=blank + 1, blank_token_id=blank, pad_token_id=blank, encoder_config=encoder
    )
    model = ParakeetForTDT(config)
    model.load_state_dict(weights)
    extractor = ParakeetFeatureExtractor(feature_size=128)
    waveforms = [clip["audio"].numpy() for clip in clips]

    def make_inputs() -> dict[str, torch.Tensor]:
        features = extractor(waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        labels = pad_sequence([clip["tokens"] for clip in clips], True, blank)
        return {
            **features,
            "labels": labels,
            "decoder_input_ids": F.pad(labels, (1, 0), value=blank),
        }

    step = their_step(args, model, make_inputs, sigma=SIGMA, reduction="mean")
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.eval()  # ours is frozen
    return model, step


# --- XTTS -----------------------------------------------------------------------------------------

TEXT_TOKENS_A_SECOND = 12


def xtts_clips(args) -> list[dict]:
    """Clips of noise with random texts: short clips have long texts, so that padded rows have
    gaps."""
    random = torch.Generator().manual_seed(1)
    clips = []
    shortest, longest = xtts_start.SLICE
    lengths = torch.linspace(args.seconds, args.seconds / 2, args.clips).tolist()
    for number, seconds in enumerate(lengths):
        waveform = noise(seconds, codec.SAMPLE_RATE, random)
        count = round((1.5 * args.seconds - seconds) * TEXT_TOKENS_A_SECOND)
        codes = codec.code_count(len(waveform))
        clip = {
            "audio": waveform,
            "tokens": torch.randint(300, 6000, (count,), generator=random),
            "slice": F.pad(waveform[:shortest], (0, longest))[:longest],
            "heard": (0, codes // 2),
            "codes": codes,
            "language": "am",
            "name": f"clip {number}",
            "index": number,
        }
        clips.append(clip)
    return clips


def padded_place(batch: dict, latents: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `xtts_amharic.place`, with the text of every row as long as the longest. Coqui's rows have
    such gaps between the text and the codes."""
    lengths = batch["tokens_lengths_host"].tolist()
    words = max(lengths) + 1
    sounds = max(batch["codes"]) + xtts_amharic.STOPS
    row_length = latents + words + sounds
    chosen = {"text": [], "mel": []}
    for row, length in enumerate(lengths):
        begin = row * row_length + latents
        tokens = torch.arange(length + 1)
        codes = torch.arange(batch["heard"][row][1], batch["codes"][row] + xtts_amharic.STOPS)
        chosen["text"].append(torch.stack([tokens + begin, tokens + row * words]))
        chosen["mel"].append(torch.stack([codes + begin + words, codes + row * sounds]))
    places = torch.arange(row_length).expand(len(lengths), -1).contiguous()
    return places, {name: torch.cat(pairs, dim=1) for name, pairs in chosen.items()}


def xtts_step(args, options: tuple[str, ...], clips: list[dict]) -> tuple:
    config = {**xtts_formats.RELEASED, "layers": args.layers}
    model = xtts.GPT(config)
    xtts.use_sdpa(model, "sdpa" in options)
    fixed = frozen.make_frozen(config).to(torch.device(args.device), speaking=False)
    if "padded" in options:
        xtts_amharic.place = padded_place

    def compute_loss(model: xtts.GPT, batch: dict) -> dict[str, torch.Tensor]:
        return xtts_amharic.compute_loss(model, batch, fixed)

    parts = Parts(
        model,
        xtts_amharic.collate,
        compute_loss,
        xtts_amharic.LOSS_WEIGHTS,
        "mel",
        layers=xtts.CHECKPOINTED,
        betas=xtts_amharic.BETAS,
    )
    return model, our_step(args, options, clips, parts)


# --- Matcha ---------------------------------------------------------------------------------------

CHARACTERS_A_SECOND = 14


def matcha_clips(args) -> list[dict]:
    """Clips of noise with random texts, the last half as long as the first."""
    random = torch.Generator().manual_seed(1)
    clips = []
    lengths = torch.linspace(args.seconds, args.seconds / 2, args.clips).tolist()
    for number, seconds in enumerate(lengths):
        waveform = noise(seconds, matcha_mels.SAMPLE_RATE, random)
        characters = torch.randint(4, MATCHA_SYMBOLS, (round(CHARACTERS_A_SECOND * seconds),))
        tokens = torch.stack([characters, torch.zeros_like(characters)], 1).flatten()
        frames = matcha_mels.frame_count(len(waveform))
        clip = {
            "audio": matcha_mels.with_edges(waveform),
            "tokens": torch.cat([torch.tensor([1, 0]), tokens, torch.tensor([2])]),
            "noise": torch.randn(frames, matcha_mels.BANDS, generator=random),
            "time": 0.5,
            "speaker": 0,
            "name": f"clip {number}",
            "index": number,
        }
        clips.append(clip)
    return clips


def even_path(means, mels, token_lengths, frame_lengths) -> torch.Tensor:
    """In place of the alignment search: all tokens last as long."""
    frames = torch.arange(mels.shape[1], device=mels.device)
    path = frames * token_lengths[:, None] // frame_lengths[:, None]
    return torch.minimum(path, token_lengths[:, None] - 1)


def matcha_step(args, options: tuple[str, ...], clips: list[dict]) -> tuple:
    config = {**matcha.SIZES[args.size], "symbols": MATCHA_SYMBOLS, "speakers": 1}
    model = matcha.Matcha(config, dropout=0.1)
    if "even" in options:
        matcha_voice.alignment.search = even_path
    log_mel = matcha_mels.LogMel().to(torch.device(args.device))
    parts = Parts(
        model,
        matcha_voice.collate,
        functools.partial(matcha_voice.compute_loss, log_mel=log_mel),
        matcha_voice.LOSS_WEIGHTS,
        "flow",
        layers=matcha.CHECKPOINTED,
        betas=matcha_voice.BETAS,
    )
    return model, our_step(args, options, clips, parts)


# --- the table of what differs --------------------------------------------------------------------

BENCHMARKS = {
    "konkani": Benchmark(
        flags={
            "size": "optimized",
            "clips": 2,
            "seconds": 30.0,
            "characters": 200,
            "learning_rate": 1e-4,
            "threads": 2,
        },
        rows={"baseline": ("baseline",), "ours": ()},
        make_clips=konkani_clips,
        make_step=konkani_step,
    ),
    "whisper": Benchmark(
        flags={
            "size": "base",
            "clips": 8,
            "shortest": 3.0,
            "seconds": 12.0,
            "learning_rate": 1e-5,
            "threads": 2,
        },
        rows={
            "transformers, 30 s": ("transformers",),
            "ours": (),
            "ours, in two micro-batches": ("halves",),
            "ours, 30 s": ("pad",),
            "ours, gradient checkpointing": ("checkpoint",),
            "ours, frozen encoder, 30 s": ("pad", "freeze"),
        },
        make_clips=whisper_clips,
        make_step=whisper_step,
        same_loss=("ours, 30 s", "ours, frozen encoder, 30 s"),
    ),
    "parakeet": Benchmark(
        flags={
            "layers": 4,
            "width": 1024,
            "vocabulary": 8192,
            "clips": 4,
            "seconds": 8.0,
            "ragged": False,
            "learning_rate": 1e-5,
            "threads": 1,
        },
        rows={
            "transformers": ("transformers",),
            "ours": (),
            "ours, gradient checkpointing": ("checkpoint",),
            "ours, 8-bit AdamW": ("8bit",),
            "ours, checkpointing, 8-bit AdamW": ("checkpoint", "8bit"),
        },
        make_clips=parakeet_clips,
        make_step=parakeet_step,
        same_loss=(
            "ours",
            "ours, gradient checkpointing",
            "ours, 8-bit AdamW",
            "ours, checkpointing, 8-bit AdamW",
        ),
    ),
    "matcha": Benchmark(
        flags={
            "size": "full",
            "clips": 4,
            "seconds": 8.0,
            "learning_rate": 1e-4,
            "threads": 1,
        },
        rows={
            "ours": (),
            "ours, gradient checkpointing": ("checkpoint",),
            "without the alignment search": ("even",),
        },
        make_clips=matcha_clips,
        make_step=matcha_step,
    ),
    "xtts": Benchmark(
        flags={
            "layers": 4,
            "clips": 2,
            "seconds": 8.0,
            "learning_rate": 5e-6,
            "threads": 1,
        },
        rows={
            "baseline": ("fp32",),
            "+ gradient checkpointing": ("fp32", "checkpoint"),
            "+ SDPA": ("fp32", "sdpa"),
            "+ mixed precision (bf16)": ("bf16",),
            "+ 8-bit AdamW": ("fp32", "8bit"),
            "SDPA, mixed precision": ("sdpa", "bf16"),
            "all": ("checkpoint", "sdpa", "bf16", "8bit"),
            "SDPA, padded rows": ("fp32", "sdpa", "padded"),
        },
        make_clips=xtts_clips,
        make_step=xtts_step,
        same_loss=("+ gradient checkpointing", "+ SDPA", "+ 8-bit AdamW"),
    ),
}


# --- measuring ------------------------------------------------------------------------------------


def measure(args, row: str) -> None:
    """Measures a row in this process. Prints a line of JSON: seconds by the clock and by the
    processor of each step, the peak in bytes, the loss of the first step, and the number of trained
    weights."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    benchmark = BENCHMARKS[args.recipe]
    clips = benchmark.make_clips(args)
    torch.manual_seed(0)
    model, step = benchmark.make_step(args, benchmark.rows[row], clips)
    is_cuda = torch.device(args.device).type == "cuda"

    def timed() -> tuple[float, float, float]:
        """Seconds by the clock, by the processor, and the loss."""
        if is_cuda:
            torch.cuda.synchronize(args.device)
        started = time.perf_counter()
        used = time.process_time()
        loss = float(step())
        if is_cuda:
            torch.cuda.synchronize(args.device)
        return time.perf_counter() - started, time.process_time() - used, loss

    # Optimizer states and, on a GPU, kernels and their workspaces are made in the first step, or
    # the second.
    warm_up = [timed() for _ in range(3 if is_cuda else 1)]
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(args.device)
    steps = [timed() for _ in range(args.steps)]
    if is_cuda:
        peak = torch.cuda.max_memory_allocated(args.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "seconds": [seconds for seconds, _, _ in steps],
        "processor": [used for _, used, _ in steps],
        "bytes": peak,
        "loss": warm_up[0][2],
        "trained": optim.count_parameters(model)[1],
    }
    print(json.dumps(result))


def run_rows(args) -> dict[str, list[dict]]:
    """The results that the processes of each row have printed; the rows take turns, `args.runs`
    times. A process that fails, because its row does not fit into memory, has no result."""
    first, *others = BENCHMARKS[args.recipe].rows
    rows = [first, *(row for row in others if not args.rows or row in args.rows)]
    found = {row: [] for row in rows}
    # Else waiting for a thread is work, too.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    for _ in range(args.runs):
        for row in rows:
            command = [sys.executable, *sys.argv, "--child", row]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
            if ran.returncode == 0:
                found[row].append(json.loads(ran.stdout))
                print(f"{row}: {found[row][-1]}", file=sys.stderr, flush=True)
    return found


def describe(args) -> str:
    """The line above the table: versions, hardware and settings."""
    versions = [f"torch {torch.__version__}"]
    if "transformers" in next(iter(BENCHMARKS[args.recipe].rows)):
        versions.append(f"transformers {version('transformers')}")
    if torch.device(args.device).type == "cuda":
        where = torch.cuda.get_device_name(args.device)
    else:
        where = f"{args.threads} threads, {common.spinning()}"
    flags = [f"--{name} {getattr(args, name)}" for name in BENCHMARKS[args.recipe].flags]
    steps = f"median of {args.runs} x {args.steps} steps"
    return f"{', '.join(versions)}, {where}; {' '.join(flags)}; {steps}"


def print_table(args, found: dict[str, list[dict]]) -> list[str]:
    """Prints the table. Returns the rows whose loss should be that of the first row and is not."""
    print(
        "| | trained | s by the clock | processor, s | memory, GiB | times faster: by the clock |"
        " processor | of the memory | loss |"
    )
    print("|---" * 9 + "|")
    wrong = []
    first = None
    for row, runs in found.items():
        if not runs:
            print(f"| {row} | does not fit |")
            continue
        seconds = statistics.median(x for run in runs for x in run["seconds"])
        used = statistics.median(x for run in runs for x in run["processor"])
        peak = statistics.median(run["bytes"] for run in runs)
        loss = runs[0]["loss"]
        if first is None:
            first = (seconds, used, peak, loss)
        print(
            f"| {row} | {runs[0]['trained'] / 1e6:.1f} M | {seconds:.2f} | {used:.2f} |"
            f" {peak / 2**30:.2f} | {first[0] / seconds:.2f} | {first[1] / used:.2f} |"
            f" {peak / first[2]:.2f} | {loss:.6f} |"
        )
        if row in BENCHMARKS[args.recipe].same_loss and abs(loss / first[3] - 1) > SAME_LOSS:
            wrong.append(row)
    return wrong


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recipes = parser.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    for name, benchmark in BENCHMARKS.items():
        one = recipes.add_parser(name)
        for flag, default in benchmark.flags.items():
            if default is False:
                one.add_argument(f"--{flag}", action="store_true")
            else:
                one.add_argument(f"--{flag}", type=type(default), default=default)
        one.add_argument("--runs", type=int, default=3, help="processes of each row")
        one.add_argument("--steps", type=int, default=2, help="timed steps of each process")
        one.add_argument("--rows", nargs="+", choices=list(benchmark.rows), help="and the first")
        one.add_argument("--device", default="cpu")
        one.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.child:
        measure(args, args.child)
        return
    found = run_rows(args)
    print(describe(args))
    wrong = print_table(args, found)
    if wrong and torch.device(args.device).type == "cpu":
        sys.exit(f"error: not the loss of the first row: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
