"""Reading and checking a large manifest: time, and the peak memory of the whole process.

python benchmarks/large_manifest.py [--lines 2000000] [--files 200]
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import soundfile

from speech import text
from speech.splits import Checks, load_corpus

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=2_000_000)
    parser.add_argument("--files", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.files):
            soundfile.write(f"{folder}/{number}.wav", np.zeros(16_000), 16_000)
        with open(f"{folder}/train.json", "w", encoding="utf-8") as file:
            for number in range(args.lines):
                row = {
                    "audio_filepath": f"{number % args.files}.wav",
                    "text": f"हांव घर वचता {number}",
                    "duration": 1.0,
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        started = time.perf_counter()
        corpus, rejected = load_corpus(f"{folder}/train.json", text.normalise, Checks())
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{len(corpus)} utterances, {rejected.total} rejected: {seconds:.0f} s, {peak:.2f} GiB"
        )
