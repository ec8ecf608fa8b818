"""Processor time of a stream for each second of audio, and the delay of its words.

    python benchmarks/streaming.py                      # Nemotron's size, random weights, one thread
    python benchmarks/streaming.py --size demo --threads 2
    python benchmarks/streaming.py --resume best.safetensors --audio recording.wav    # words, too

For each look-ahead the model hears WARM_UP seconds first, so that it sees as many frames before a
chunk as it ever will. Then SECONDS of noise are timed, of which random weights write nothing, or
all of the recording. `step` is the
longest time from the samples of a chunk to its words. The delay of a word is audio time, from its
end, as the model says, until it is printed. The time of a step is not in it, nor how long after a
sound the model writes it."""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import torch

from recipes.parakeet_tdt import RECIPE
from speech.audio import SAMPLE_RATE, read_audio
from speech.parakeet import decoding, live, settings, start
from speech.parakeet.features import HOP
from speech.parakeet.model import Parakeet
from speech.parakeet.streaming import Stream

WARM_UP = 6.0  # seconds
SECONDS = 4.0
STREAMING = {"left": 56, "lookaheads": [3, 0, 1, 6, 13]}


def random_model(size: str) -> Parakeet:
    """With a causal encoder; the demo's size becomes one that streams."""
    config = {**settings.SIZES[size], "kind": "rnnt", "durations": [], "streaming": STREAMING}
    torch.manual_seed(0)
    model = Parakeet(config).eval()
    with torch.no_grad():
        model.joint.head.bias[model.blank] += 100.0  # random weights write at every frame
    return model


def timed(model: Parakeet, lookahead: int, audio: torch.Tensor) -> tuple[float, float, float]:
    """Processor time and time of the clock for a second of audio, and the longest step."""
    stream = Stream(model, lookahead)
    noise = 0.05 * torch.randn(round(WARM_UP * SAMPLE_RATE))
    stream.push(noise)
    longest = 0.0
    processor, begin = time.process_time(), time.monotonic()
    for samples in audio.split(HOP):
        now = time.monotonic()
        stream.push(samples)
        longest = max(longest, time.monotonic() - now)
    seconds = len(audio) / SAMPLE_RATE
    return (
        (time.process_time() - processor) / seconds,
        (time.monotonic() - begin) / seconds,
        longest,
    )


def delays(model: Parakeet, tokenizer, lookahead: int, audio: torch.Tensor) -> list[float]:
    """Seconds from the end of each word to its printing."""
    stream = Stream(model, lookahead)
    printed: list[tuple[int, float]] = []  # characters so far, and when
    rows: list[dict] = []
    text = []

    def show(part: str) -> None:
        text.append(part)
        printed.append((len("".join("".join(text).split())), stream.samples / SAMPLE_RATE))

    frame_seconds = decoding.frame_samples(model.config) / SAMPLE_RATE
    lines = live.Lines(tokenizer, frame_seconds, show, rows.append)
    for samples in audio.split(HOP):
        lines.add(stream.push(samples), stream.encoder.frames)
    lines.add(stream.finish(), stream.encoder.frames)
    lines.finish(stream.encoder.frames)
    found = []
    characters = 0
    for word in (word for row in rows for word in row["words"]):
        characters += len("".join(word["text"].split()))
        when = next(seconds for count, seconds in printed if count >= characters)
        found.append(when - word["end"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=settings.SIZES, default="nemotron")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume")
    parser.add_argument("--audio")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    audio = 0.05 * torch.randn(round(SECONDS * SAMPLE_RATE))
    tokenizer = None
    if args.resume:
        from common import checkpoint

        info, weights = start.saved_model(checkpoint.read_weights(args.resume, RECIPE, "--resume"))
        model = start.make_model(info, weights).eval()
        tokenizer = start.tokenizer_of(info)
        audio = read_audio(args.audio, SAMPLE_RATE)
    else:
        model = random_model(args.size)
    frame = 1000 * decoding.frame_samples(model.config) // SAMPLE_RATE
    print("| chunk, ms | processor, s | clock, s | longest step, s | delay of words, s |")
    print("| --- | --- | --- | --- | --- |")
    for lookahead in sorted(model.config["streaming"]["lookaheads"]):
        processor, clock, step = timed(model, lookahead, audio)
        words = ""
        if tokenizer:
            found = delays(model, tokenizer, lookahead, audio)
            words = f"{statistics.median(found):.2f} (at most {max(found):.2f})"
        cells = f"{frame * (lookahead + 1)} | {processor:.3f} | {clock:.3f} | {step:.3f} | {words}"
        print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
