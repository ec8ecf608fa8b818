"""How many Morse clips a second one core makes, by condition.

    python benchmarks/morse_synthesis.py [--seconds 8] [--clips 60] [--runs 5]

Clips are of about --seconds: numbers whose clip is within a tenth of it are picked among those
drawn with that limit. The same clips are made --runs times, the conditions taking turns; the
median, in processor time. "8 s clips a second" corrects for what the clips' mean length still
differs."""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import torch

from speech.morse.synthesis import CONDITIONS, Conditions, clip_seconds, synthesise


def pick_clips(conditions: Conditions, seconds: float, count: int) -> list[tuple[int, float]]:
    """Numbers of clips that are about so long, with their lengths."""
    found = []
    for index in itertools.count():
        length = clip_seconds(0, index, conditions)
        if abs(length - seconds) <= 0.1 * seconds:
            found.append((index, length))
        if len(found) == count:
            return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clips", type=int, default=60)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limited = {}
    clips = {}
    for name, conditions in CONDITIONS.items():
        limited[name] = dataclasses.replace(conditions, longest=1.1 * args.seconds)
        clips[name] = pick_clips(limited[name], args.seconds, args.clips)
    rates = {name: [] for name in limited}
    for _ in range(args.runs + 1):
        for name, conditions in limited.items():
            started = time.thread_time()
            for index, _ in clips[name]:
                synthesise(0, index, conditions)
            rates[name].append(len(clips[name]) / (time.thread_time() - started))
    print(
        f"{args.clips} clips of each condition, one core, {common.spinning()}, processor time,"
        f" median of {args.runs} runs"
    )
    print(f"| condition | mean length, s | clips a second | {args.seconds:g} s clips a second |")
    print("|---|---|---|---|")
    for name, found in rates.items():
        mean = statistics.mean(seconds for _, seconds in clips[name])
        rate = statistics.median(found[1:])
        print(f"| {name} | {mean:.2f} | {rate:.0f} | {rate * mean / args.seconds:.0f} |")
