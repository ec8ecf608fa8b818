"""One training step of our Parakeet-TDT against `transformers.ParakeetForTDT`, from waveforms to
updated weights: time and peak memory on the same clips, with the same weights and the same
optimizer.

    python benchmarks/parakeet_step.py [--layers 4] [--vocabulary 8192] [--clips 4] [--seconds 8] [--threads 1] [--runs 3]
    python benchmarks/parakeet_step.py --device cuda --layers 24 --clips 16 --seconds 15      # bf16 autocast, the allocator's peak

The model has the width of 0.6B and --layers encoder layers. transformers' step is what its training
scripts do: ParakeetFeatureExtractor on the clips (on the CPU), forward with labels, backward,
AdamW; its layer drop and dropouts are off, and so are ours. The clips have --seconds, or if
--ragged a quarter of it to all of it. Every measurement is a process of its own; the first step is
not timed, and its loss is the one in the table."""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import steps
from common import memory, optim
from common.device import Setup
from common.loop import run_global_batch
from recipes.parakeet_tdt import CHECKPOINTED, Parakeet, collate, compute_loss
from speech.audio import SAMPLE_RATE
from speech.parakeet.formats import make_config

SIGMA, TOKENS_A_SECOND = 0.02, 4
SAME_LOSS = 1e-4  # fp32, relative
ROWS = {  # what is measured: the first is the reference
    "transformers": (), "ours": (), "ours, gradient checkpointing": ("checkpoint",),
    "ours, 8-bit AdamW": ("8bit",), "ours, checkpointing, 8-bit AdamW": ("checkpoint", "8bit"),
}  # fmt: skip


def make_clips(args) -> list[dict]:
    """Clips of noise with random transcripts."""
    random, clips = torch.Generator().manual_seed(1), []
    shortest = args.seconds / 4 if args.ragged else args.seconds
    for number, seconds in enumerate(torch.linspace(args.seconds, shortest, args.clips).tolist()):
        tokens = torch.randint(
            3, args.vocabulary, (round(seconds * TOKENS_A_SECOND),), generator=random
        )
        clips.append(
            {
                "audio": torch.randn(int(seconds * SAMPLE_RATE), generator=random) * 0.1,
                "tokens": tokens,
                "plain": False,
                "factor": 1 / len(tokens),
                "count": 1,
                "text": "",
                "name": f"clip {number}",
                "index": number,
            }
        )
    return clips


def make_model(args) -> Parakeet:
    torch.manual_seed(0)
    return Parakeet(make_config(1024, args.layers, 8, (640, 2), args.vocabulary), SIGMA)


def our_step(args, options: list[str], clips: list[dict], where: torch.device):
    """A function that makes an update and returns the loss before it, and the number of weights."""
    model = make_model(args).to(where).train()
    if "checkpoint" in options:
        memory.checkpoint_layers(model, CHECKPOINTED)
    optimizer = optim.make_optimizer(
        model, args.learning_rate, kind="adamw_8bit" if "8bit" in options else "adamw"
    )
    setup = Setup(where, torch.bfloat16 if where.type == "cuda" else None)

    def step() -> torch.Tensor:
        batch = collate(clips)
        outcome = run_global_batch(
            model, [batch], batch["counts"], compute_loss, {"tdt": 1.0}, setup
        )
        if outcome.failed:
            raise SystemExit(f"out of memory: {outcome.reason}")
        optimizer.step()
        optimizer.zero_grad()
        return outcome.sums[0] / len(clips)

    return step, optim.count_parameters(model)


def their_step(args, clips: list[dict], where: torch.device):
    """The same of transformers' model with our weights."""
    from transformers import ParakeetFeatureExtractor, ParakeetForTDT, ParakeetTDTConfig

    blank = args.vocabulary
    encoder = {
        "hidden_size": 1024,
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
    model.load_state_dict(make_model(args).state_dict())
    model.to(where).train()
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.eval()  # ours is frozen
    extractor = ParakeetFeatureExtractor(feature_size=128)
    waveforms = [clip["audio"].numpy() for clip in clips]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True
    )

    def step() -> torch.Tensor:
        features = extractor(waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        labels = torch.nn.utils.rnn.pad_sequence([clip["tokens"] for clip in clips], True, blank)
        inputs = {
            "labels": labels,
            "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=blank),
        }
        inputs = {name: tensor.to(where) for name, tensor in {**features, **inputs}.items()}
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            loss = model(**inputs, sigma=SIGMA, reduction="mean").loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optim.count_parameters(model)


def child(who: str, args) -> None:
    torch.set_num_threads(args.threads)
    device, clips = torch.device(args.device), make_clips(args)
    theirs = who == next(iter(ROWS))
    step, (_, trained) = (
        their_step(args, clips, device) if theirs else our_step(args, ROWS[who], clips, device)
    )
    steps.measure(step, args, trained=trained)


def main(args) -> None:
    import transformers

    found = steps.run(ROWS, args)
    is_gpu = torch.device(args.device).type == "cuda"
    where = (
        f"{torch.cuda.get_device_name(args.device)}, bf16 autocast"
        if is_gpu
        else f"fp32, {args.threads} threads"
    )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {where};"
        f" {args.layers} layers, V={args.vocabulary}, {args.clips} clips of {args.seconds:g}"
        f" s{' and less' * args.ragged}, median of {args.runs} x {args.steps} steps"
    )
    print(
        "| | trained | processor, s | s by the clock | memory, GiB | of the time | of the memory |"
        " loss |\n" + "|---" * 8 + "|"
    )
    reference = None
    for who, runs in found.items():
        if not runs:
            print(f"| {who} | does not fit |")
            continue
        (seconds, used, peak), loss = steps.medians(runs), runs[0]["loss"]
        time_of = seconds if is_gpu else used
        reference = reference or (time_of, peak, loss)
        print(
            f"| {who} | {runs[0]['trained'] / 1e6:.1f} M | {used:.2f} | {seconds:.2f} |"
            f" {peak / 2**30:.2f} | {time_of / reference[0]:.2f} | {peak / reference[1]:.2f} |"
            f" {loss:.5f} |",
            flush=True,
        )
        if not is_gpu and abs(loss / reference[2] - 1) > SAME_LOSS:
            sys.exit(f"error: {who}: its loss differs from {next(iter(ROWS))}'s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    steps.add_arguments(parser, ROWS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
    else:
        main(args)
