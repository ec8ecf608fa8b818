"""Our log-mel against transformers' WhisperFeatureExtractor, a clip at a time on one thread: time
and difference.

    python benchmarks/log_mel.py [--seconds 8 3 30] [--runs 15]

The extractor fills every clip up to 30 s; ours computes what the clip is long, and the difference
is over that part. They take turns, five calls each; the median of --runs turns, in processor time
of the thread, which neighbours on the machine disturb less. "ours, 30 s" is ours with the clip
filled up as well: the rest of what ours saves comes from shorter clips."""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers

from speech.whisper.model import SAMPLE_RATE, LogMel

LONGEST = 30 * SAMPLE_RATE
CALLS = 5  # in a row: the first finds the caches full of the other's data


def waveform(seconds: float) -> torch.Tensor:
    """(T,) noise with a tone that comes and goes: not all of it is near its maximum."""
    torch.manual_seed(0)
    times = torch.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    is_on = torch.sin(6 * times) > 0
    return 0.01 * torch.randn(len(times)) + 0.5 * torch.sin(4400 * times) * is_on


def measure(seconds: float, n_mels: int, runs: int) -> tuple[dict[str, float], float]:
    """Median seconds by who, and the largest difference of a feature."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=n_mels)
    log_mel = LogMel(n_mels, LONGEST)
    x = waveform(seconds)
    array = x.numpy()

    def theirs() -> torch.Tensor:
        return extractor(array, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features

    ways = {
        "theirs": theirs,
        "ours": lambda: log_mel(x[None]),
        "padded": lambda: log_mel(F.pad(x, (0, LONGEST - len(x)))[None]),
    }
    times = {who: [] for who in ways}
    results = {}
    with torch.no_grad():
        for _ in range(runs + 1):
            for who, way in ways.items():
                for _ in range(CALLS):
                    started = time.thread_time()
                    results[who] = way()
                    times[who].append(time.thread_time() - started)
    expected = results["theirs"]
    ours = results["ours"]
    difference = max(
        float((ours - expected[..., : ours.shape[-1]]).abs().max()),
        float((results["padded"] - expected).abs().max()),
    )
    medians = {who: statistics.median(found[CALLS:]) for who, found in times.items()}
    return medians, difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, nargs="+", default=[8.0, 3.0, 30.0])
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, one thread,"
        f" {common.spinning()}, processor time, median of {args.runs} x {CALLS} clips"
    )
    print(
        "| clip | mels | transformers, ms | ours, ms | times faster | ours, 30 s, ms | times faster"
        " | largest difference |"
    )
    print("|---" * 8 + "|")
    for n_mels in (80, 128):
        for seconds in args.seconds:
            found, difference = measure(seconds, n_mels, args.runs)
            theirs, ours, padded = (1000 * found[who] for who in ("theirs", "ours", "padded"))
            print(
                f"| {seconds:g} s | {n_mels} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.1f} |"
                f" {padded:.2f} | {theirs / padded:.1f} | {difference:.1e} |",
                flush=True,
            )
