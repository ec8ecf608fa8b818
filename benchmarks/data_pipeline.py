"""How fast the data side is: hours of audio per second and core that are read, resampled, augmented
and turned into features; and the share of a training run spent waiting for data.

    python benchmarks/data_pipeline.py [--minutes 10] [--runs 5] [--steps 40]

One core and one thread for the stages (median over runs of the same files, in the page cache); the
share is what a short run of the Konkani recipe itself reports, with its data workers, on the same
audio in pieces of 3 s."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import konkani_conformer as recipe
from speech import audio, features

FORMATS = {
    "wav, 16 kHz": ("wav", 16_000, 1),
    "wav, 22.05 kHz": ("wav", 22_050, 1),
    "flac, 44.1 kHz stereo": ("flac", 44_100, 2),
}
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
    spent = dict.fromkeys(
        ("read", "resample", "speed perturbation", "log-mel and SpecAugment"), 0.0
    )
    log_mel, norm = (
        features.LogMel(recipe.SAMPLE_RATE),
        features.FeatureNorm(recipe.N_MELS, "utterance"),
    )
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
        masks = (
            features.random_masks(random, 2, 0.3)[None],
            features.random_masks(random, 5, 0.05)[None],
        )
        features.spec_augment(x, lengths, *masks)
        times.append(time.perf_counter())
        for stage, before, after in zip(spent, times, times[1:], strict=False):
            spent[stage] += after - before
    return spent


def waiting_share(folder: Path, steps: int) -> tuple[float, float]:
    """(share, utterances a second) of a training run on a CPU, median of what it logged."""
    lines = []
    for number in range(200):
        samples = np.random.default_rng(number).normal(0, 0.1, 3 * 22_050)
        soundfile.write(folder / f"{number}.flac", samples, 22_050)
        lines.append(json.dumps({"audio_filepath": f"{number}.flac", "text": "abc de"}))
    (folder / "train.json").write_text("\n".join(lines))
    command = [
        sys.executable,
        recipe.__file__,
        "--train_manifest",
        str(folder / "train.json"),
        "--device",
        "cpu",
        "--max_steps",
        str(steps),
        "--log_every",
        "5",
        "--output_dir",
        str(folder),
        "--no_tensorboard",
        "--batch_size",
        "8",
        "--gradient_accumulation_steps",
        "1",
    ]
    subprocess.run(command, check=True, capture_output=True)
    logged = [
        json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    ]
    logged = [line for line in logged if "train/loss" in line][
        1:
    ]  # the first holds the workers' start
    return tuple(
        statistics.median(line[f"train/{key}"] for line in logged)
        for key in ("data_wait_share", "utterances_per_second")
    )


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
            f"torch {torch.__version__}, one thread, clips of {CLIP:g} s, {args.minutes:g} min,"
            f" median of {args.runs} runs"
        )
        print(
            "| source | read | resample | speed perturbation | log-mel and SpecAugment | all: hours"
            " of audio a second |\n|---|---|---|---|---|---|"
        )
        for name in FORMATS:
            stages(Path(folder), name, args.minutes)  # warm-up: files, filters
            runs = [stages(Path(folder), name, args.minutes) for _ in range(args.runs)]
            medians = [statistics.median(run[stage] for run in runs) for stage in runs[0]]
            rates = " | ".join(
                f"{args.minutes / 60 / seconds:.1f}" if seconds > 1e-3 else "-"
                for seconds in medians
            )
            total = statistics.median(sum(run.values()) for run in runs)
            print(f"| {name} | {rates} | {args.minutes / 60 / total:.2f} |", flush=True)
        share, speed = waiting_share(Path(folder), args.steps)
        print(
            f"share of a training run on the CPU spent waiting for data: {share:.1%} at {speed:.1f}"
            " utterances of 3 s a second"
        )
