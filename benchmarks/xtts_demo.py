"""How well the demo of recipes/xtts_amharic.py speaks: the character error rate (CER) of a
recogniser on its held-out sentences.

    ./run_xtts_amharic.sh cpu                                     # the demo, in runs/xtts_amharic
    python benchmarks/xtts_demo.py --demo_dir runs/xtts_amharic   # about six minutes of one core

The judge is recipes/konkani_conformer.py, trained on the demo's training clips and on Griffin-Lim
copies of some of them (their mel features turned back into sound, without the DVAE), so that it
knows the sound of that method. The last clips of the training set are held back to evaluate the
judge; it never reads the demo's evaluation set. It trains until its own CER is below 5 %.

Three sets are recognised: the held-out recordings (reference), the recordings made anew from their
codes (resynthesis), and the sentences that the GPT spoke (synthesis). Letters that sound alike are
folded into one. The exit status is 1 if the CER of resynthesis is more than 5 points above that of
the reference, or synthesis more than 12 above resynthesis."""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import torch

from common import files, options
from common.errors import RunError, UsageError, cannot_write, exit_with_one_line
from speech import metrics, text
from speech.audio import int16, read_audio, write_wav
from speech.columns import Rejections, Segments
from speech.folders import read_made_from, write_folder
from speech.manifest import read_manifest
from speech.xtts.codec import SAMPLE_RATE, Mel, griffin_lim

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "konkani_conformer.py"
KINDS = ("reference", "resynthesis", "synthesis")
# Points of CER that a kind may be above another one.
LIMITS = {"resynthesis": ("reference", 5.0), "synthesis": ("resynthesis", 12.0)}
HELD_BACK = 100  # clips that evaluate the judge
COPIED = {"train": 150, "val": 30}  # clips with a Griffin-Lim copy, which takes a third of a second
REPEATS = 4  # of each copy in the training set
SHAPE = "--d_model 96 --encoder_layers 4 --decoder_layers 1 --attention_heads 4".split()
TRAINING = (
    "--batch_size 16 --gradient_accumulation_steps 1 --learning_rate 2e-3 --seed 1"
    " --no_spec_augment --no_speed_perturbation --decoding greedy"
).split()
STEPS = 800  # updates of a round
MOST_ROUNDS = 3
MOST_CER = 0.05  # of the judge
SHORT = 2  # words

# Letters that sound alike: rows of seven orders, and the fourth order of ሀ and አ, which sounds like
# their first.
ROWS = {"ሐ": "ሀ", "ኀ": "ሀ", "ኸ": "ሀ", "ሠ": "ሰ", "ዐ": "አ", "ፀ": "ጸ"}
FOLDED = {
    ord(letter) + order: ord(same) + order for letter, same in ROWS.items() for order in range(7)
}
FOLDED |= {
    ord(first) + 3: ord(same)
    for first, same in {**ROWS, "ሀ": "ሀ", "አ": "አ"}.items()
    if same in "ሀአ"
}


def fold(sentence: str) -> str:
    """A sentence with one letter for all that sound alike, and without punctuation."""
    return text.for_scoring(sentence).translate(FOLDED)


def read_rows(manifest: Path) -> list[tuple[str, str]]:
    """(audio path, folded text) of each row of a manifest. Raises `UsageError` and `DataError`."""
    files.require_file(manifest, "there is no finished demo here:")
    corpus = read_manifest(str(manifest), Rejections(), fold, None, Segments(False))
    rows = [
        (str(Path(path).resolve()), sentence)
        for path, sentence in zip(corpus.paths, corpus.texts, strict=True)
    ]
    if missing := [path for path, _ in rows if not Path(path).is_file()]:
        raise UsageError(f"{manifest}: its file {missing[0]} is missing; run the demo again")
    return rows


def read_speech(demo_dir: Path) -> dict[str, list[tuple[str, str]]]:
    """The rows of what the demo has spoken, by kind. Raises `UsageError` if the kinds differ in
    their sentences."""
    speech = {kind: read_rows(demo_dir / "speech" / f"{kind}.csv") for kind in KINDS}
    if len({tuple(sentence for _, sentence in rows) for rows in speech.values()}) > 1:
        raise UsageError(
            f"{demo_dir / 'speech'}: the three manifests differ in their sentences; run the demo"
            " again"
        )
    return speech


def copy_clip(source: str, target: Path) -> None:
    """Writes the clip that Griffin-Lim makes of the mel features of another one."""
    mel_stats = torch.ones(80)
    mel = Mel("dvae", mel_stats)(read_audio(source, SAMPLE_RATE)[None])[0]
    write_wav(target, int16(griffin_lim(mel, mel_stats)), SAMPLE_RATE)


def write_data(demo_dir: Path, folder: Path) -> bool:
    """Writes train.json and val.json of the judge in `folder`, unless they are there. Returns
    whether they were."""
    manifest = demo_dir / "data" / "amharic" / "train.json"
    rows = read_rows(manifest)
    if len(rows) < 2 * HELD_BACK:
        raise UsageError(f"{manifest}: {len(rows)} clips are too few; it needs {2 * HELD_BACK}")
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    made_from = {"rows": digest, "held_back": HELD_BACK, "copied": COPIED, "repeats": REPEATS}
    if read_made_from(folder) == made_from:
        return True

    def fill(aside: Path) -> None:
        for split, part in (("train", rows[:-HELD_BACK]), ("val", rows[-HELD_BACK:])):
            lines = [{"audio_filepath": path, "text": sentence} for path, sentence in part]
            for number, (path, sentence) in enumerate(part[: COPIED[split]]):
                name = f"{split}_{number:03d}.wav"
                copy_clip(path, aside / name)
                repeats = REPEATS if split == "train" else 1
                lines += [{"audio_filepath": name, "text": sentence}] * repeats
            write_json_lines(aside / f"{split}.json", lines)

    try:
        write_folder(folder, fill, made_from)
    except OSError as error:
        raise cannot_write(folder, error, "--judge_dir") from None
    return False


def write_json_lines(path: Path, rows: list[dict]) -> None:
    files.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def run_recipe(*words: object) -> None:
    """Runs the recogniser's recipe on one core, where the same command gives the same weights."""
    command = [sys.executable, str(RECIPE), "--device", "cpu", *map(str, words)]
    if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
        raise RunError("the judge's command above failed")


def train_judge(
    judge_dir: Path, has_data: bool, steps: int, most_cer: float = MOST_CER
) -> tuple[float, int]:
    """Trains the judge for `steps` updates, and for as many again while its CER is `most_cer`
    or above.
    Returns its CER and updates. Continues an earlier run if it `has_data` of it. Raises `RunError`
    if the judge does not learn."""
    manifests = [
        f"--{split}_manifest={judge_dir / 'data' / split}.json" for split in ("train", "val")
    ]
    for number in range(1, MOST_ROUNDS + 1):
        resume = ["--resume", "auto"] if has_data or number > 1 else []
        length = ["--max_steps", number * steps, "--eval_every", max(1, steps // 4)]
        run_recipe(*manifests, "--output_dir", judge_dir, *SHAPE, *TRAINING, *length, *resume)
        best = files.read_json(judge_dir / "checkpoints" / "best.json")
        if best["cer"] < most_cer:
            return best["cer"], best["step"]
    raise RunError(
        f"the judge's CER is {100 * best['cer']:.1f} % after {number * steps} updates, above"
        f" {100 * most_cer:.0f} %: it cannot judge speech; give it more --judge_steps"
    )


def recognise(judge_dir: Path, speech: dict[str, list[tuple[str, str]]]) -> dict[str, list[dict]]:
    """Rows {"reference", "hypothesis"} of each kind. A clip without samples has the hypothesis
    ""."""
    manifest = judge_dir / "spoken.json"
    logs = judge_dir / "spoken"
    best = judge_dir / "checkpoints" / "best.safetensors"
    lines = []
    for rows in speech.values():
        lines += [{"audio_filepath": path, "text": sentence} for path, sentence in rows]
    write_json_lines(manifest, lines)
    folders = ["--log_dir", logs, "--output_dir", judge_dir]
    how = "--decoding greedy --no_check_audio --min_duration 0".split()
    run_recipe("--evaluate", "--test_manifest", manifest, "--resume", best, *folders, *how)
    transcripts = {}
    for line in files.read_text(logs / "transcripts.jsonl").splitlines():
        row = json.loads(line)
        transcripts[row["file"]] = fold(row["hypothesis"])
    recognised = {}
    for kind, rows in speech.items():
        recognised[kind] = [
            {"reference": sentence, "hypothesis": transcripts.get(path, "")}
            for path, sentence in rows
        ]
    return recognised


def error_rates(rows: list[dict]) -> list[float]:
    """CER in % of all rows, and of those of one or two words (NaN without any)."""
    short = [row for row in rows if len(row["reference"].split()) <= SHORT]
    return [
        100 * metrics.rate(metrics.score(part)["cer"]) if part else float("nan")
        for part in (rows, short)
    ]


def faults(rates: dict[str, float]) -> list[str]:
    """What is above the limits, given the CER of each kind in %."""
    return [
        f"{kind} is {rates[kind] - rates[base]:.1f} points of CER above {base}; the limit is"
        f" {limit:g}"
        for kind, (base, limit) in LIMITS.items()
        if rates[kind] - rates[base] > limit
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--demo_dir", type=Path, default=Path("runs/xtts_amharic"), help="the demo's --output_dir"
    )
    parser.add_argument(
        "--judge_dir", type=Path, help="for the judge's data and weights (DEMO_DIR/judge)"
    )
    parser.add_argument(
        "--judge_steps",
        type=options.POSITIVE,
        default=STEPS,
        help=f"updates, up to {MOST_ROUNDS} times ({STEPS})",
    )
    return parser.parse_args()


def main(args) -> None:
    torch.set_num_threads(1)
    speech = read_speech(args.demo_dir)
    judge_dir = args.judge_dir or args.demo_dir / "judge"
    has_data = write_data(args.demo_dir, judge_dir / "data")
    cer, step = train_judge(judge_dir, has_data, args.judge_steps)
    rows = recognise(judge_dir, speech)
    rates = {kind: error_rates(rows[kind]) for kind in KINDS}
    short = sum(len(sentence.split()) <= SHORT for _, sentence in speech["reference"])
    print(f"\n| CER, % | {' | '.join(KINDS)} |\n|---|---|---|---|")
    for number, name in enumerate(
        (f"all {len(speech['reference'])} sentences", f"{short} of one or two words")
    ):
        print(f"| {name} | {' | '.join(f'{rates[kind][number]:.1f}' for kind in KINDS)} |")
    print(
        f"\nthe judge's own CER: {100 * cer:.1f} % of {HELD_BACK + COPIED['val']} clips, after"
        f" {step} updates"
    )
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(each.ru_utime + each.ru_stime for each in times) / 60
    print(f"\nprocessor time: {minutes:.1f} min, {common.spinning()}")
    if above := faults({kind: whole for kind, (whole, _) in rates.items()}):
        raise RunError("; ".join(above))


if __name__ == "__main__":
    exit_with_one_line(lambda: main(parse_arguments()))
