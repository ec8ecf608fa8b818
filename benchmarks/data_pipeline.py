"""How fast the data side is: hours of audio per second and core that are read, resampled, augmented
and turned into features; and the share of a training run spent waiting for data.

    python benchmarks/data_pipeline.py [--minutes 10] [--runs 5] [--steps 40]

One core and one thread for the stages (median over runs of the same files, in the page cache); the
share is what a short run of the Konkani recipe itself reports, with its data workers, on the same
audio in pieces of 3 s. The last line is for rows of Parquet in random order, by the rows in a row
group, against files."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import soundfile
import torch

from recipes import konkani_conformer as recipe
from speech import audio, features

FORMATS = {
    "wav, 16 kHz": ("wav", 16_000, 1),
    "wav, 22.05 kHz": ("wav", 22_050, 1),
    "flac, 44.1 kHz stereo": ("flac", 44_100, 2),
}
STAGES = ("read", "resample", "speed perturbation", "log-mel and SpecAugment")
CLIP = 10.0  # seconds


def stages(folder: Path, name: str, minutes: float) -> dict[str, float]:
    """Seconds for each stage over all clips of one format."""
    suffix, rate, channels = FORMATS[name]
    files = []
    for number in range(round(minutes * 60 / CLIP)):
        files.append(folder / f"{rate}_{number}.{suffix}")
        if not files[-1].exists():
            samples = np.random.default_rng(number).normal(0, 0.1, (int(CLIP * rate), channels))
            soundfile.write(files[-1], samples, rate)
    spent = dict.fromkeys(STAGES, 0.0)
    log_mel = features.LogMel(recipe.SAMPLE_RATE)
    norm = features.FeatureNorm(recipe.N_MELS, "utterance")
    random = np.random.default_rng(0)
    for file in files:
        times = [time.perf_counter()]
        waveform = audio.read_audio(str(file), rate)
        times.append(time.perf_counter())
        waveform = audio.resample(waveform, rate, recipe.SAMPLE_RATE)
        times.append(time.perf_counter())
        waveform = audio.change_speed(waveform, 1.1)
        times.append(time.perf_counter())
        lengths = torch.tensor([features.frames(len(waveform), recipe.SAMPLE_RATE)])
        x = norm(log_mel(waveform[None]), lengths)
        bands = features.random_masks(random, 2, 0.3)[None]
        spans = features.random_masks(random, 5, 0.05)[None]
        features.spec_augment(x, lengths, bands, spans)
        times.append(time.perf_counter())
        for number, stage in enumerate(STAGES):
            spent[stage] += times[number + 1] - times[number]
    return spent


def random_rows(folder: Path, group: int, count: int = 2000, reads: int = 50) -> float:
    """Median milliseconds to read and decode a FLAC of 15 s, in random order, from a Parquet file
    with row groups of `group` rows; 0: from files."""
    import pyarrow
    from pyarrow import parquet

    random = np.random.default_rng(0)
    clips = []
    for number in range(16):
        path = folder / f"clip_{number}.flac"
        soundfile.write(path, random.normal(0, 0.05, 15 * 16_000), 16_000)
        clips.append(path.read_bytes())
    names = [str(folder / f"clip_{number}.flac") for number in range(16)]
    if group:
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        schema = pyarrow.schema([("audio", kind)])
        path = folder / f"rows_{group}.parquet"
        # Without a dictionary, which would keep each of the 16 clips once.
        with parquet.ParquetWriter(path, schema, use_dictionary=False) as writer:
            for _ in range(0, count, group):
                part = [{"bytes": clips[row % 16], "path": ""} for row in range(group)]
                writer.write_table(pyarrow.table({"audio": part}, schema))
        names = [f"{path} row {row}" for row in range(count)]
    times = []
    for number in random.integers(0, len(names), reads).tolist():
        started = time.perf_counter()
        audio.read_audio(names[number], 16_000)
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def waiting_share(folder: Path, steps: int) -> tuple[float, float]:
    """(share, utterances a second) of a training run on a CPU, median of what it logged."""
    lines = []
    for number in range(200):
        samples = np.random.default_rng(number).normal(0, 0.1, 3 * 22_050)
        soundfile.write(folder / f"{number}.flac", samples, 22_050)
        lines.append(json.dumps({"audio_filepath": f"{number}.flac", "text": "abc de"}))
    (folder / "train.json").write_text("\n".join(lines))
    paths = ["--train_manifest", str(folder / "train.json"), "--output_dir", str(folder)]
    flags = (
        f"--device cpu --max_steps {steps} --log_every 5 --no_tensorboard --batch_size 8"
        " --gradient_accumulation_steps 1"
    )
    command = [sys.executable, recipe.__file__, *paths, *flags.split()]
    subprocess.run(command, check=True, capture_output=True)
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if "train/loss" in line]
    logged = logged[1:]  # the first holds the workers' start
    share = statistics.median(line["train/data_wait_share"] for line in logged)
    speed = statistics.median(line["train/utterances_per_second"] for line in logged)
    return share, speed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"torch {torch.__version__}, one thread, {common.spinning()}, clips of {CLIP:g} s,"
            f" {args.minutes:g} min, median of {args.runs} runs"
        )
        print(
            f"| source | {' | '.join(STAGES)} | all: hours of audio a second |\n|---|---|---|---|---|---|"
        )
        for name in FORMATS:
            stages(Path(folder), name, args.minutes)  # warm-up: files, filters
            runs = [stages(Path(folder), name, args.minutes) for _ in range(args.runs)]
            rates = []
            for stage in STAGES:
                seconds = statistics.median(run[stage] for run in runs)
                # A format that is not resampled takes no time for it.
                rates.append(f"{args.minutes / 60 / seconds:.1f}" if seconds > 1e-3 else "-")
            total = statistics.median(sum(run.values()) for run in runs)
            line = [name, *rates, f"{args.minutes / 60 / total:.2f}"]
            print(f"| {' | '.join(line)} |", flush=True)
        share, speed = waiting_share(Path(folder), args.steps)
        print(
            f"share of a training run on the CPU spent waiting for data: {share:.1%} at {speed:.1f}"
            " utterances of 3 s a second"
        )
        parts = [f"{random_rows(Path(folder), 0):.1f} ms from a file"]
        parts += [f"{random_rows(Path(folder), n):.1f} in groups of {n}" for n in (16, 100, 1000)]
        print(f"a FLAC of 15 s in random order: {', '.join(parts)}")
