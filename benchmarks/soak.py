"""A long run on short data: resident memory and open files of the trainer and its data worker must
stay flat.

    python benchmarks/soak.py [--global batches 2000]

Prints both every twentieth of the run; the last half's growth decides the exit status."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "konkani_conformer.py"


def tree(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in tree(int(child)))]


def usage(pid: int) -> tuple[float, int]:
    """Resident MiB and open files of a process tree."""
    resident = files = 0
    for process in tree(pid):
        resident += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        files += len(os.listdir(f"/proc/{process}/fd"))
    return resident / 2**20, files


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--global batches", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for number in range(64):
            random = np.random.default_rng(number)
            soundfile.write(
                f"{folder}/{number}.wav",
                random.normal(0, 0.1, random.integers(8000, 24000)),
                16_000,
            )
            lines.append(
                json.dumps({"audio_filepath": f"{number}.wav", "text": "abc"[: 1 + number % 3]})
            )
        Path(folder, "train.json").write_text("\n".join(lines))
        command = [
            sys.executable,
            str(RECIPE),
            "--train_manifest",
            f"{folder}/train.json",
            "--device",
            "cpu",
            "--d_model",
            "32",
            "--encoder_layers",
            "1",
            "--decoder_layers",
            "1",
            "--max_steps",
            str(args.global_batches),
            "--output_dir",
            folder,
            "--eval_every",
            "200",
            "--save_every",
            "200",
            "--dataloader_num_workers",
            "1",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        metrics, seen, rows = Path(folder, "logs", "metrics.jsonl"), 0, []
        print("| update | resident, MiB | open files |\n|---|---|---|")
        while process.poll() is None:
            time.sleep(0.2)
            try:
                step = json.loads(metrics.read_text().splitlines()[-1])["step"]
                if step >= seen + args.global_batches // 20 and len(tree(process.pid)) > 1:
                    seen, row = step, (step, *usage(process.pid))
                    rows.append(row)
                    print(f"| {row[0]} | {row[1]:.0f} | {row[2]} |", flush=True)
            except (OSError, IndexError, ValueError):
                continue
        if process.returncode:
            sys.exit(process.stderr.read())
        half = [row for row in rows if row[0] >= args.global_batches // 2]
        growth = half[-1][1] - half[0][1], half[-1][2] - half[0][2]
        print(f"second half: {growth[0]:+.0f} MiB, {growth[1]:+d} open files")
        sys.exit(growth[0] > 50 or growth[1] > 5)
