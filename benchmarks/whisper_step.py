"""One training step of our Whisper against `transformers.WhisperForConditionalGeneration`, from
waveforms to updated weights: time and peak memory on the same clips, with the same weights and the
same optimizer.

    python benchmarks/whisper_step.py [--size base] [--clips 8] [--shortest 3] [--longest 12] [--threads 2] [--runs 3]
    python benchmarks/whisper_step.py --device cuda --size small        # bf16 autocast, the allocator's peak

transformers' step is what its training scripts do: WhisperFeatureExtractor on the clips (on the
CPU), padded to 30 s, as its model asks, forward with labels whose padding is -100, backward, AdamW.
Ours starts from the waveforms, too. Every measurement runs in a separate process; the rows take
turns, --runs times. On a CPU that others use, too, mind the processor time (of all threads
together, which sleep while they wait): the clock's is what the others leave. The first step of a
process is not timed: its loss is the one in the table. Padded to 30 s both compute the same and
have the same loss; at the clips' own length the loss differs, since the encoder does not see the
padding. Two micro-batches, the longer half and the shorter half, are what the recipes make of
--batch_size 4 --gradient_accumulation_steps 2: the same gradient, less padding."""

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
from recipes.whisper_vietnamese import collate
from speech.whisper.formats import SIZES
from speech.whisper.model import LAYERS, SAMPLE_RATE, Whisper, token_loss

PROMPT, END = (50258, 50278, 50359, 50363), 50257  # start, Vietnamese, transcribe, no timestamps
TEXT_TOKENS = 50257  # numbered before the special ones
TOKENS_A_SECOND = 3.5
SAME_LOSS = 1e-4  # fp32, relative
ROWS = {  # what is measured: the first is the reference
    "transformers, 30 s": (),
    "ours": (),
    "ours, in two micro-batches": ("halves",),
    "ours, 30 s": ("pad",),
    "ours, gradient checkpointing": ("checkpoint",),
    "ours, frozen encoder, 30 s": ("pad", "freeze"),
}


def make_clips(args) -> list[dict]:
    """Clips of noise whose lengths are spread evenly, with random transcripts."""
    random, clips = torch.Generator().manual_seed(1), []
    for number, seconds in enumerate(
        torch.linspace(args.shortest, args.longest, args.clips).tolist()
    ):
        tokens = torch.randint(TEXT_TOKENS, (round(seconds * TOKENS_A_SECOND),), generator=random)
        waveform = torch.randn(int(seconds * SAMPLE_RATE), generator=random) * 0.1
        clips.append(
            {
                "audio": waveform,
                "tokens": torch.tensor([*PROMPT, *tokens]),
                "labels": torch.tensor([*PROMPT[1:], *tokens, END]),
                "ctc_tokens": tokens[:0],
                "heard": len(waveform),
                "text": "",
                "name": f"clip {number}",
                "index": number,
            }
        )
    return clips


def make_model(args) -> Whisper:
    torch.manual_seed(0)
    return Whisper(SIZES[args.size])


def our_step(args, options: list[str], clips: list[dict], where: torch.device):
    """A function that makes an update and returns the loss before it, and the number of weights."""
    model = make_model(args).to(where).train()
    model.pad_to_longest = "pad" in options
    if "freeze" in options:
        model.freeze_encoder()
    if "checkpoint" in options:
        memory.checkpoint_layers(model, LAYERS)
    optimizer = optim.make_optimizer(model, args.learning_rate)
    setup = Setup(where, torch.bfloat16 if where.type == "cuda" else None)

    def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
        return {"attention": token_loss(model, batch, *model.encode(batch))}

    def step() -> torch.Tensor:
        pieces = (
            [clips[len(clips) // 2 :], clips[: len(clips) // 2]] if "halves" in options else [clips]
        )
        batches = [collate(piece) for piece in pieces]
        total = sum(batch["counts"]["attention"] for batch in batches)
        outcome = run_global_batch(
            model, batches, {"attention": total}, compute_loss, {"attention": 1.0}, setup
        )
        if outcome.failed:
            raise SystemExit(f"out of memory: {outcome.reason}")
        optimizer.step()
        optimizer.zero_grad()
        return outcome.sums[0] / total

    return step, optim.count_parameters(model)


def their_step(args, clips: list[dict], where: torch.device):
    """The same of transformers' model with our weights."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    config = SIZES[args.size]
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            **config,
            decoder_start_token_id=PROMPT[0],
            pad_token_id=END,
            bos_token_id=END,
            eos_token_id=END,
            use_cache=False,
        )
    )
    weights = {f"model.{name}": tensor for name, tensor in make_model(args).state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or missing not in ([], ["proj_out.weight"]):
        raise SystemExit(f"the weights do not fit: {missing} {unexpected}")
    model.to(where).train()
    del weights
    extractor = WhisperFeatureExtractor(feature_size=config["num_mel_bins"])
    waveforms = [clip["audio"].numpy() for clip in clips]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01, fused=True
    )

    def step() -> torch.Tensor:
        features = extractor(
            waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt"
        ).input_features
        labels = torch.nn.utils.rnn.pad_sequence([clip["labels"] for clip in clips], True, -100)
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            loss = model(input_features=features.to(where), labels=labels.to(where)).loss
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


def describe(args) -> None:
    import transformers

    gpu = torch.device(args.device).type == "cuda"
    where = (
        f"{torch.cuda.get_device_name(args.device)}, bf16 autocast"
        if gpu
        else f"fp32, {args.threads} threads"
    )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {where}; {args.size},"
        f" {args.clips} clips of {args.shortest:g} to {args.longest:g} s, median of {args.runs} x"
        f" {args.steps} steps"
    )
    print(
        f"| | trained | s a step | processor, s | {'GPU memory' if gpu else 'whole process'}, GiB |"
        " times faster: by the clock | processor | of the memory | loss"
        " |\n|---|---|---|---|---|---|---|---|---|"
    )


def main(args) -> None:
    found = steps.run(ROWS, args, may_fail=False)
    describe(args)
    reference = None
    for who, runs in found.items():
        (seconds, used, peak), loss = steps.medians(runs), runs[0]["loss"]
        reference = reference or (seconds, peak, loss, used)
        print(
            f"| {who} | {runs[0]['trained'] / 1e6:.1f} M | {seconds:.2f} | {used:.2f} |"
            f" {peak / 2**30:.2f} | {reference[0] / seconds:.2f} | {reference[3] / used:.2f} |"
            f" {peak / reference[1]:.2f} | {loss:.6f} |",
            flush=True,
        )
        if who == "ours, 30 s":
            difference = abs(loss / reference[2] - 1)
    if "ours, 30 s" in found:
        same = (
            "the same loss"
            if difference < SAME_LOSS
            else "NOT the same loss"
            if args.device == "cpu"
            else "bf16"
        )
        print(
            f"\nours, 30 s, and transformers': losses differ by {difference:.1e} of their size"
            f" ({same})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--shortest", type=float, default=3.0, help="seconds")
    parser.add_argument("--longest", type=float, default=12.0, help="seconds")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    steps.add_arguments(parser, ROWS, threads=2)
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
    else:
        main(args)
