"""Measures what a GPU is needed for, and prints it as tables for RESULTS.md, a line as soon as it
is known.

    python benchmarks/on_gpu.py [correctness] [rows] [speed] | tee gpu.md
    python benchmarks/on_gpu.py rows --only run_xtts         # only lines with this in their name
    python benchmarks/on_gpu.py --device cpu                 # small, to see that it works

It needs requirements.txt, and neither network nor data: models have random weights, and recordings
are noise. The first line says what the card is, which kernels of attention work, and what CUDA
takes of its memory. Without words it measures all three:
- correctness: how far the losses of ten updates of each recipe's small model, in each precision,
  are from those of the CPU in fp32; the losses of a run that is killed by SIGKILL and resumed, and
  of one whose memory is made too short in its second update, from those of one that is not; and
  what five updates with each level of --use_cpu_offload change in the weights, from what they
  change without, relative to the change;
- rows: the peak memory of every row of the preset scripts that the card can hold, the tightest
  first, in updates of the longest utterances, under a cap that leaves what the tier's card has;
- speed: utterances a second of each recipe's row for the card, with and without each option that
  saves memory or time, and whether losses stay finite and memory flat.

Every run is a separate process, which is killed if it takes too long."""

import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch

from benchmarks import tier_tables, tiers, trial
from common import cuda, device
from common.options import LEVELS
from common.parts import preflight
from common.report import Report
from dry_run.cards import CONTEXT, GIB, find_card
from speech.data.demo import AMHARIC_WORDS, KONKANI_WORDS, VIETNAMESE_WORDS
from speech.signal.audio import write_wav

SECONDS = 900  # of a process, after which it is killed
EXACT = "--no_mixed_precision --no_tf32".split()
PRECISIONS = {"fp32": EXACT, "bf16": ["--bf16"], "fp16": ["--mixed_precision", "fp16"]}
SHORT_SECONDS = 11.0  # of utterances: what a step takes must be much more than the weights
# Of a run that is killed and resumed. metrics.jsonl has a line every ten updates.
RESUME = "--max_steps 20 --save_every 8".split()
KILLED_AT = 10
TOTAL = 1.03  # a card may have a little less memory than its tier's
LANGUAGE = {"nemotron": ("--language", "auto")}  # the noise has none
SPEED_SECONDS = 15.0  # of updates
WARM_UP = 2  # updates that are not counted
SMALL_ROW = "run_training_memory_optimized.sh 4gb minimal"
SMALL = "--batch_size 2 --gradient_accumulation_steps 2 --max_duration 2".split()


@dataclass(frozen=True)
class Demo:
    """A recipe at a small size. `words`: of its sentences (None: it makes its own data). `script`
    and `size`: the preset whose speed is measured."""

    flags: str
    words: list[str] | None
    script: str
    size: str


DEMOS = {
    "konkani_conformer": Demo(
        "--d_model 128 --encoder_layers 6 --decoder_layers 3 --batch_size 8",
        KONKANI_WORDS,
        "run_training_memory_optimized.sh",
        "original",
    ),
    "whisper_vietnamese": Demo(
        "--from_scratch --model_size demo --batch_size 16 --language vi",
        VIETNAMESE_WORDS,
        "run_whisper_vietnamese.sh",
        "small",
    ),
    "whisper_morse": Demo(
        "--from_scratch --model_size demo --batch_size 24 --clips_per_epoch 96 --eval_clips 8",
        None,
        "run_whisper_morse.sh",
        "small",
    ),
    "parakeet_tdt": Demo(
        "--from_scratch --model_size demo --batch_size 8 --joint_dropout 0",
        KONKANI_WORDS,
        "run_parakeet_tdt.sh",
        "0.6b",
    ),
    "wav2vec2_ctc": Demo(
        "--from_scratch --model_size demo --batch_size 8",
        KONKANI_WORDS,
        "run_wav2vec2_ctc.sh",
        "300m",
    ),
    "xtts_amharic": Demo(
        "--batch_size 8 --speak_held_out 0 --language am",
        AMHARIC_WORDS,
        "run_xtts_amharic.sh",
        "full",
    ),
    "matcha_voice": Demo(
        "--model_size demo --batch_size 8 --speak_held_out 0 --language am",
        AMHARIC_WORDS,
        "run_matcha_voice.sh",
        "full",
    ),
}
# The options whose speed is measured, and the letter of a row that has one already.
VARIANTS = {
    "": ("", []),
    "checkpointing": ("R", ["--gradient_checkpointing"]),
    "8 bits": ("8", ["--optimizer", "adamw_8bit"]),
    "offload of states": ("H", ["--use_cpu_offload", "states"]),
    "offload of gradients": ("G", ["--use_cpu_offload", "gradients"]),
    "offload of weights": ("W", ["--use_cpu_offload", "weights"]),
    "compile": ("", ["--torch_compile"]),
}


class Failed(Exception):
    """A process failed. The message is its last line."""


# --- processes ------------------------------------------------------------------------------------


def run(words: list, folder: Path, status: int = 0) -> str:
    """The output of a Python program in `folder`. Raises `Failed` unless it ends so."""
    environment = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as common/env.sh sets it
        "GPUS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    try:
        ran = subprocess.run(
            [sys.executable, "-u", *map(str, words)],  # in the order of its lines
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"it took more than {SECONDS} s and was killed") from None
    if ran.returncode != status:
        raise Failed(f"status {ran.returncode}: {tiers.last_line(ran.stdout.splitlines())}")
    return ran.stdout


def child(request: dict, words: list, folder: Path, status: int = 0) -> str:
    """The last line of this program in another process, where `child_main` does what is asked."""
    words = [Path(__file__), "--child", json.dumps(request), "--", *words]
    return tiers.last_line(run(words, folder, status).splitlines())


def child_main(request: dict, words: list[str]) -> None:
    if "recipe" in request:
        found = trial.run(request["recipe"], words, trial.Wanted(**request["wanted"]))
        print(json.dumps(found))
    elif "kill" in request:
        killed_run(words)
    else:
        print(json.dumps(card_found()))


def killed_run(words: list[str]) -> None:
    """Runs a recipe, and kills it by SIGKILL once it has written its first line of metrics."""
    import runpy

    write = Report.write

    def write_and_die(report: Report, step: int, **values) -> None:
        write(report, step, **values)
        # The log folders of earlier stages are inside of the run's.
        if step == KILLED_AT and report.log_dir.name == "logs":
            os.kill(os.getpid(), signal.SIGKILL)

    Report.write = write_and_die
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def tried(recipe: str, words: list, device: str, **wanted) -> dict:
    """The results of a trial. Raises `Failed`."""
    with tempfile.TemporaryDirectory(prefix="on_gpu_") as folder:
        words = [*words, "--device", device]
        return json.loads(child({"recipe": recipe, "wanted": wanted}, words, Path(folder)))


# --- the card -------------------------------------------------------------------------------------


def card_found() -> dict:
    """What the GPU of this process is. Ends it if there is none."""
    if problem := cuda.cuda_problem():
        sys.exit(f"error: {problem}")
    capability = torch.cuda.get_device_capability()
    setup = device.Setup(torch.device("cuda", 0), device.pick_dtype("auto", capability)[0])
    attention = preflight.check_attention(setup)[1]
    free, total = torch.cuda.mem_get_info()
    bytes_there = torch.cuda.get_device_properties(0).total_memory
    beside = total - free - torch.cuda.memory_reserved()
    line = (
        f"{preflight.check_gpu(setup)[1]}, torch {torch.__version__}; {bytes_there / GIB:.2f} GiB,"
        f" of which CUDA and other programs take {beside / GIB:.2f} beside torch's allocator;"
        f" attention: {attention}"
    )
    return {"bytes": bytes_there, "line": line}


# --- correctness ----------------------------------------------------------------------------------


def difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    pairs = zip(losses, reference, strict=True)
    return max(abs(value - wanted) / max(abs(wanted), 1e-12) for value, wanted in pairs)


def trial_flags(demo: Demo, seconds: float = 3.0) -> list[str]:
    """The flags of a trial of utterances of so many seconds, which needs no data."""
    longest = "--max_duration" if demo.words else "--clip_seconds"
    flags = [*demo.flags.split(), "--gradient_accumulation_steps", "2", "--dropout", "0"]
    return [*flags, longest, str(seconds), "--dry_run", "8gb"]


def correctness(name: str, where: str) -> list[str]:
    """The cells of a recipe: differences, or why there is none."""
    demo = DEMOS[name]
    is_small = where == "cpu"
    words = trial_flags(demo)
    updates = 2 if is_small else 10

    def losses(device: str, flags: list[str]) -> list[float]:
        return tried(name, [*words, *flags], device, updates=updates, fit=True)["losses"]

    cells = []
    reference = losses("cpu", EXACT)
    for precision, flags in PRECISIONS.items():
        if precision == "fp16" and is_small:
            cells.append("-")  # slow on a CPU
        else:
            cells.append(shown(lambda flags=flags: [difference(losses(where, flags), reference)]))
    cells.append(shown(lambda: resumed(name, where)))
    cells.append(shown(lambda: [short_of_memory(name, where)]))
    cells += offloaded(name, words, where)
    return cells


def shown(measure: Callable[[], list[float]]) -> str:
    try:
        return ", ".join(f"{value:.1e}" for value in measure())
    except Failed as error:
        return str(error)


def resumed(name: str, where: str) -> list[float]:
    """How far the last losses of a run that was killed are from those of one that was not, and how
    far two equal runs are from each other before."""
    demo = DEMOS[name]
    with tempfile.TemporaryDirectory(prefix="on_gpu_") as text:
        folder = Path(text)
        data = []
        if demo.words:
            data = ["--train_manifest", write_noise(folder, demo.words), "--val_manifest"]
            data.append(data[1])
        words = [
            *(ROOT / f"recipes/{name}.py", *demo.flags.split(), "--dropout", 0, *EXACT, *RESUME),
            *("--gradient_accumulation_steps", 1, *data, "--device", where),
        ]
        run([*words, "--output_dir", "whole"], folder)
        cut = [*words, "--output_dir", "cut"]
        child({"kill": True}, cut, folder, status=-signal.SIGKILL)
        before = losses_of(folder / "cut")
        run([*cut, "--resume", "auto"], folder)
        whole, after = losses_of(folder / "whole"), losses_of(folder / "cut")
    return [difference(after, whole), difference(before, whole[: len(before)])]


def write_noise(folder: Path, words: list[str]) -> Path:
    """A manifest of noise with random texts."""
    random = np.random.default_rng(1)
    lines = []
    for number in range(24):
        text = " ".join(random.choice(words, random.integers(2, 6)))
        samples = random.normal(0, 0.1, 1200 * len(text))
        write_wav(folder / f"{number}.wav", samples, 16_000)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "text": text}) + "\n")
    path = folder / "noise.json"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def losses_of(output: Path) -> list[float]:
    """The training losses in a run's metrics."""
    text = (output / "logs/metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def short_of_memory(name: str, where: str) -> float:
    """How far the losses of a run that runs out of memory are from those of one that does not."""
    words = [*trial_flags(DEMOS[name], 2.0 if where == "cpu" else SHORT_SECONDS), *EXACT]
    whole = tried(name, words, where, updates=4)
    short = tried(name, words, where, updates=4, short_of_memory_at=2)
    if not short["smaller"]:
        raise Failed("memory was not short")
    return difference(short["losses"], whole["losses"])


def offloaded(name: str, words: list[str], where: str) -> list[str]:
    """How far what updates change in the weights with each level of --use_cpu_offload is from what
    they change without; before that, in two runs without."""
    if where == "cpu":  # a GPU has 16 bits by itself
        words = [*words, "--bf16"]
    with tempfile.TemporaryDirectory(prefix="on_gpu_") as folder:

        def weights(*flags: str) -> dict:
            path = Path(folder, "weights.pt")
            wanted = {"updates": 2 if where == "cpu" else 5, "fit": True, "weights": str(path)}
            tried(name, [*words, *flags], where, **wanted)
            return torch.load(path, weights_only=True)

        try:
            reference = weights()
        except Failed as error:
            return [str(error)] * (1 + len(LEVELS))
        choices = [[], *(["--use_cpu_offload", level] for level in LEVELS)]
        return [
            shown(lambda flags=flags: [weights_differ(weights(*flags), reference)])
            for flags in choices
        ]


def weights_differ(found: dict, reference: dict) -> float:
    """The largest difference of a tensor after the updates, relative to what they have changed in
    it, by norms: 1 if one run's updates have nothing to do with the other's."""
    largest = 0.0
    for name, before in reference["before"].items():
        change = float((reference["after"][name].double() - before.double()).norm())
        distance = found["after"][name].double() - reference["after"][name].double()
        if change:
            largest = max(largest, float(distance.norm()) / change)
    return largest


# --- the rows of the preset scripts ---------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a preset script: `cell` is its text in the table, `gib` its predicted peak (0 if
    tiers.json has another row)."""

    script: str
    tier: str
    size: str
    cell: str
    gib: float

    @property
    def name(self) -> str:
        return f"{self.script} {self.tier} {self.size}"

    @property
    def cap(self) -> int:
        """Bytes that the allocator would have on the tier's card."""
        return find_card(self.tier).total - CONTEXT

    def command(self, *more: str) -> tuple[str, list[str]]:
        """The recipe and the words of its plan, as tiers.py plans it. Raises `Failed`."""
        more = (*more, *LANGUAGE.get(self.size, ()))
        try:
            path, *words = tiers.command_of(self.script, self.tier, self.size, self.tier, *more)
        except tiers.NoPlan as error:
            raise Failed(str(error)) from None
        return Path(path).stem, words


def rows_for(total: float) -> list[Row]:
    """The rows that a card of so many bytes can hold, the tightest first."""
    predicted = tier_tables.predictions()
    rows = []
    for script in tier_tables.SCRIPTS:
        for tier, size, cell in tier_tables.planned_rows(tier_tables.read_rows(script)):
            entry = predicted.get(f"{script} {tier} {size}", {})
            gib = entry["gib"] if entry.get("row") == cell else 0.0
            if find_card(tier).total <= TOTAL * total:
                rows.append(Row(script, tier, size, cell, gib))
    return sorted(rows, key=lambda row: -row.gib / row.cap)


def row_cells(row: Row, where: str) -> list[str]:
    """Updates of a row's longest utterances: predicted, allocated, reserved, the cap, remarks."""
    is_small = where == "cpu"
    cap = 0 if is_small else row.cap
    recipe, words = row.command(*(SMALL if is_small else ()))
    measured = tried(recipe, words, where, updates=2 if is_small else 3, cap=cap)
    remark = "out of memory: smaller micro-batches" if measured["smaller"] else ""
    gib = [row.gib * GIB, measured["peak"], measured["reserved"], cap]
    return [row.cell, *(f"{count / GIB:.2f}" for count in gib), remark]


# --- speed ----------------------------------------------------------------------------------------


def speed_cells(recipe: str, variant: str, total: float, where: str) -> list[str]:
    """Updates of utterances that are read from files, as a run makes them, of the row of the
    largest tier that the card can hold: utterances a second, the share of waiting for data, GiB at
    the peak, by how many MiB memory grows, and remarks."""
    demo = DEMOS[recipe]
    letter, flags = VARIANTS[variant]
    if where == "cpu":
        cell, words = "demo", [*trial_flags(demo), *flags]
    else:
        place = demo.script, demo.size
        rows = [row for row in rows_for(total) if (row.script, row.size) == place]
        if not rows:
            raise Failed("there is no row for this card")
        row = max(rows, key=lambda row: find_card(row.tier).total)
        if letter and letter in row.cell.split()[3:]:
            raise Failed(f"the row {row.cell} has it already")
        cell = row.cell
        words = row.command(*flags)[1]
    updates = 3 if where == "cpu" else 1000
    wanted = {"updates": updates, "most_seconds": SPEED_SECONDS, "longest": False}
    measured = tried(recipe, words, where, **wanted)
    counted = measured["seconds"][WARM_UP:] or measured["seconds"][-1:]
    waited = measured["waited"][-len(counted) :]
    settled = measured["allocated"][len(measured["allocated"]) // 4 :]
    remark = "" if all(map(math.isfinite, measured["losses"])) else "losses are not finite"
    return [
        cell,
        f"{measured['utterances'] * len(counted) / sum(counted):.2f}",
        f"{sum(waited) / sum(counted):.1%}",
        f"{measured['peak'] / GIB:.2f}",
        f"{(max(settled) - settled[0]) / 2**20:.0f}",
        remark,
    ]


# --- tables ---------------------------------------------------------------------------------------


def tables(args, total: float) -> Iterator[tuple[str, list[str], list[tuple[str, Callable]]]]:
    """The tables that are asked for: title, header, and for each line its name and a function that
    returns its other cells."""
    where = args.device
    if "correctness" in args.parts:
        header = ["recipe", "fp32", "bf16", "fp16", "resumed, two runs", "short memory"]
        header += ["two runs", *LEVELS]
        names = [name for name in DEMOS if name != "xtts_amharic"]  # which has no small size
        lines = [(name, lambda name=name: correctness(name, where)) for name in names]
        yield "Differences of losses, and of weights with --use_cpu_offload", header, lines
    if "rows" in args.parts:
        header = ["row", "micro-batch", "predicted", "allocated", "reserved", "cap, GiB", "remarks"]
        rows = [row for row in rows_for(total) if where != "cpu" or row.name == SMALL_ROW]
        lines = [(row.name, lambda row=row: row_cells(row, where)) for row in rows]
        yield "Peak memory of the rows", header, lines
    if "speed" in args.parts:
        header = ["recipe", "row", "utterances a second", "waiting", "peak, GiB", "grows, MiB"]
        names = ["konkani_conformer"] if where == "cpu" else list(DEMOS)
        lines = []
        for name, variant in itertools.product(names, VARIANTS):
            measure = functools.partial(speed_cells, name, variant, total, where)
            lines.append((f"{name} {variant}".strip(), measure))
        yield "Speed", [*header, "remarks"], lines


PARTS = ("correctness", "rows", "speed")


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="lines with this in their name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small")
    parser.add_argument("--child", type=json.loads, help=SUPPRESS)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.child is not None:
        child_main(args.child, args.parts)
        return
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(PARTS)}")
    args.parts = args.parts or PARTS
    total = math.inf
    if args.device == "cuda":
        try:
            found = json.loads(child({}, [], ROOT))
        except Failed as error:
            sys.exit(str(error).partition(": ")[2])
        total = found["bytes"]
        print(found["line"], flush=True)
    for title, header, lines in tables(args, total):
        print(f"\n{title}\n\n{tier_tables.markdown(header, [])}", flush=True)
        for name, measure in lines:
            if args.only not in name:
                continue
            try:
                cells = measure()
            except Failed as error:
                cells = [str(error)]
            print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
