"""A long run on short data: resident memory and open files of the trainer and its data worker must
stay flat.

    python benchmarks/soak.py [--updates 2000]

Prints both every twentieth of the run. The exit status is 1 if they grow in the last half."""

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
MOST_MIB = 50  # growth in the second half
MOST_FILES = 5


def tree(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in tree(int(child)))]


def usage(pid: int) -> tuple[float, int]:
    """Resident MiB and open files of a process tree."""
    pages = files = 0
    for process in tree(pid):
        pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        files += len(os.listdir(f"/proc/{process}/fd"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files


def write_corpus(folder: str) -> None:
    """Writes 64 clips of noise, of half a second to one and a half, and train.json."""
    lines = []
    for number in range(64):
        random = np.random.default_rng(number)
        samples = random.normal(0, 0.1, random.integers(8000, 24000))
        soundfile.write(f"{folder}/{number}.wav", samples, 16_000)
        row = {"audio_filepath": f"{number}.wav", "text": "abc"[: 1 + number % 3]}
        lines.append(json.dumps(row))
    Path(folder, "train.json").write_text("\n".join(lines))


def watch(process: subprocess.Popen, folder: str, every: int) -> list[tuple[int, float, int]]:
    """Prints and returns update, resident MiB and open files, about `every` updates, until the run
    has ended."""
    metrics = Path(folder, "logs", "metrics.jsonl")
    rows = []
    seen = 0
    while process.poll() is None:
        time.sleep(0.2)
        try:
            step = json.loads(metrics.read_text().splitlines()[-1])["step"]
            if step >= seen + every and len(tree(process.pid)) > 1:
                rows.append((step, *usage(process.pid)))
                seen = step
                print(f"| {step} | {rows[-1][1]:.0f} | {rows[-1][2]} |", flush=True)
        except (OSError, IndexError, ValueError):
            continue  # nothing is logged yet, or a process has just ended
    return rows


def main(args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder)
        flags = (
            "--device cpu --d_model 32 --encoder_layers 1 --decoder_layers 1 --eval_every 200"
            f" --save_every 200 --dataloader_num_workers 1 --max_steps {args.updates}"
        )
        paths = ["--train_manifest", f"{folder}/train.json", "--output_dir", folder]
        process = subprocess.Popen(
            [sys.executable, str(RECIPE), *paths, *flags.split()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        print("| update | resident, MiB | open files |\n|---|---|---|")
        rows = watch(process, folder, args.updates // 20)
        if process.returncode:
            sys.exit(process.stderr.read())
    half = [row for row in rows if row[0] >= args.updates // 2]
    mib = half[-1][1] - half[0][1]
    files = half[-1][2] - half[0][2]
    print(f"second half: {mib:+.0f} MiB, {files:+d} open files")
    sys.exit(mib > MOST_MIB or files > MOST_FILES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=2000)
    main(parser.parse_args())
