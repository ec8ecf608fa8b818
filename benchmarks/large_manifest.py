"""Reading and checking a large manifest: time, and the peak memory of the whole process.

python benchmarks/large_manifest.py [--lines 2000000] [--files 200] [--parquet]

With --parquet the audio is in `--files` Parquet files, in row groups of 100 very short clips.
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
from speech.audio import wav
from speech.splits import Checks, load_corpus

GROUP = 100  # rows


def text_of(number: int) -> str:
    return f"हांव घर वचता {number}"


def write_json(folder: str, lines: int, files: int) -> str:
    for number in range(files):
        soundfile.write(f"{folder}/{number}.wav", np.zeros(16_000), 16_000)
    with open(f"{folder}/train.json", "w", encoding="utf-8") as file:
        for number in range(lines):
            row = {
                "audio_filepath": f"{number % files}.wav",
                "text": text_of(number),
                "duration": 1.0,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return f"{folder}/train.json"


def write_parquet(folder: str, lines: int, files: int) -> str:
    import pyarrow
    from pyarrow import parquet

    clip = wav(np.zeros(1_600, np.int16), 16_000)
    kinds = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("audio", kinds), ("text", pyarrow.string())])
    for numbers in np.array_split(np.arange(lines), files):
        with parquet.ParquetWriter(f"{folder}/{numbers[0]:08}.parquet", schema) as writer:
            for first in range(0, len(numbers), GROUP):
                part = numbers[first : first + GROUP].tolist()
                audio = [{"bytes": clip, "path": f"{number}.wav"} for number in part]
                columns = {"audio": audio, "text": [text_of(number) for number in part]}
                writer.write_table(pyarrow.table(columns, schema))
    return f"{folder}/*.parquet"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=2_000_000)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--parquet", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write = write_parquet if args.parquet else write_json
        manifest = write(folder, args.lines, args.files)
        started = time.perf_counter()
        corpus, rejected = load_corpus(manifest, text.normalise, Checks())
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{len(corpus)} utterances, {rejected.total} rejected: {seconds:.0f} s, {peak:.2f} GiB"
        )
