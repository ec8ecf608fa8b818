"""Ways of reading a long recording with a Parakeet model: the character error rate (CER) of a
demo's held-out clips, joined with pauses to one recording, that is cut at the first pauses, at the
quietest places, or into overlapping windows that are joined by time.

    python recipes/parakeet_tdt.py --output_dir demo                                # clips of 3 s
    python benchmarks/long_recordings.py --demo demo --join joined                   # longer ones
    python recipes/parakeet_tdt.py --from_scratch --model_size demo --output_dir longer \
        --init_from demo/checkpoints/best.safetensors --train_manifest joined/train.json \
        --val_manifest joined/val.json --max_steps 240 --gradient_accumulation_steps 1 \
        --learning_rate 1e-3 --no_spec_augment --no_speed_perturbation
    python benchmarks/long_recordings.py --demo demo --run demo
    python benchmarks/long_recordings.py --demo demo --run longer
"""

import argparse
import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch

from benchmarks.joined_clips import cer, spoken_clips
from common import checkpoint
from common.device import Setup
from common.errors import exit_with_one_line
from recipes.parakeet_tdt import RECIPE, make_model
from speech import long, recogniser, text
from speech.audio import SAMPLE_RATE, int16, read_audio, write_wav
from speech.long import Cutting
from speech.parakeet import decoding, start, windows
from speech.splits import RunInfo

PAUSES = (0.0, 0.1, 0.35, 1.0)  # seconds between two clips
LONGEST = 12.0  # seconds of joined training clips
CLIPS = 200


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * SAMPLE_RATE), dtype=np.int16)


def join_clips(demo: Path, folder: Path) -> None:
    """Writes the demo's training and validation clips, joined to utterances of 2 to LONGEST
    seconds with pauses of any length between them."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for split in ("train", "val"):
        (manifest,) = demo.glob(f"data/*_demo/{split}.json")
        rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
        lines = []
        while rows:
            target = random.uniform(2, LONGEST) * SAMPLE_RATE
            samples, texts = silence(0), []
            while rows and len(samples) < target:
                path = str(manifest.parent / rows[-1]["audio_filepath"])
                clip = int16(read_audio(path, SAMPLE_RATE))
                if len(samples) + len(clip) > LONGEST * SAMPLE_RATE:
                    break
                samples = np.concatenate([samples, clip, silence(random.choice(PAUSES))])
                texts.append(rows.pop()["text"])
            name = f"{split}_{len(lines):05}.wav"
            write_wav(folder / name, samples[: int(LONGEST * SAMPLE_RATE)], SAMPLE_RATE)
            line = {"audio_filepath": name, "text": " ".join(texts)}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        (folder / f"{split}.json").write_text("".join(lines), encoding="utf-8")


def compare(demo: Path, run: Path) -> None:
    """Prints the error rates of all ways, for recordings with shorter and longer pauses."""
    weights = run / "checkpoints" / "best.safetensors"
    saved = checkpoint.read_weights(weights, RECIPE)
    info, run_info = checkpoint.read_infos(saved, start.ModelInfo, RunInfo)
    model = make_model(info, saved.model).eval()
    tokenizer = start.tokenizer_of(info)
    ways = {
        "first pauses": long.BY_PAUSES,
        "quietest places": long.BY_SILENCES,
        "windows": windows.by_time(model, tokenizer),
    }
    decode = functools.partial(decoding.transcripts, model, tokenizer)
    records_of = recogniser.decoder(decode, Setup(), long.PARTS)

    def read(waveform: torch.Tensor, cutting: Cutting) -> str:
        pieces = cutting.cut(waveform, SAMPLE_RATE, run_info.longest)
        records = []
        for first in range(0, len(pieces), 8):
            records += records_of([waveform[a:b] for a, b in pieces[first : first + 8]], "")
        return cutting.join(records, pieces).text

    clips = spoken_clips(demo, CLIPS)
    reference = [" ".join(transcript for _, transcript in clips)]
    print(f"trained on clips of up to {run_info.longest:.1f} s; {len(clips)} clips; CER")
    print("| pause, s |" + "".join(f" {name} |" for name in ways))
    for pause in PAUSES:
        parts = [part for samples, _ in clips for part in (samples, silence(pause))]
        waveform = torch.from_numpy(np.concatenate(parts) / np.float32(2**15))
        cells = []
        for cutting in ways.values():
            with torch.no_grad():
                rate = cer(reference, [read(waveform, cutting)], normalised)
            cells.append(f" {rate:.2f} % |")
        print(f"| {pause:g} |" + "".join(cells), flush=True)


def normalised(transcript: str) -> str:
    return text.for_scoring(transcript).lower()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, required=True, help="the --output_dir of the demo")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--join", type=Path, metavar="DIR", help="write joined training clips")
    what.add_argument("--run", type=Path, help="the --output_dir of the model that reads")
    args = parser.parse_args()
    exit_with_one_line(
        lambda: join_clips(args.demo, args.join) if args.join else compare(args.demo, args.run)
    )
