"""Pieces that ask whether a card computes what the CPU does: losses, kill and resume, exports, and
the levels of --use_cpu_offload. All are at the size of a recipe's demo, on tones."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.bench import ROOT, Bench, Piece, Skipped
from benchmarks.gpu.corpus import write_corpus
from common.options import LEVELS
from speech.data.demo import AMHARIC_WORDS, KONKANI_WORDS, VIETNAMESE_WORDS

UPDATES = 10
KILLED_AT = 5
LEARNING = 400  # updates before an export: until then a model has learned some tones
SENTENCES = {"train": 96, "val": 4}
EXACT = "--no_mixed_precision --no_tf32".split()
PRECISIONS = {"fp32": EXACT, "bf16": ["--bf16"], "fp16": ["--mixed_precision", "fp16"]}


@dataclass(frozen=True)
class Demo:
    """A recipe at its demo's size. `words`: of its sentences (None: it makes its own data).
    `exports`: whether --export writes a folder that --model_dir reads; `transcribes`: else its
    evaluation is compared."""

    recipe: str
    flags: str
    words: list[str] | None
    exports: bool = False
    transcribes: bool = True


DEMOS = {
    "konkani": Demo(
        "konkani_conformer",
        "--d_model 128 --encoder_layers 6 --decoder_layers 3 --batch_size 8",
        KONKANI_WORDS,
    ),
    "vietnamese": Demo(
        "whisper_vietnamese",
        "--from_scratch --model_size demo --batch_size 16 --language vi",
        VIETNAMESE_WORDS,
        exports=True,
    ),
    "morse": Demo(
        "whisper_morse",
        "--from_scratch --model_size demo --batch_size 24 --clip_seconds 2 --clips_per_epoch 96"
        " --eval_clips 8",
        None,
        exports=True,
    ),
    "parakeet": Demo(
        "parakeet_tdt",
        "--from_scratch --model_size demo --batch_size 8 --joint_dropout 0",
        KONKANI_WORDS,
        exports=True,
    ),
    "wav2vec2": Demo(
        "wav2vec2_ctc",
        "--from_scratch --model_size demo --batch_size 8",
        KONKANI_WORDS,
        exports=True,
    ),
    "matcha": Demo(
        "matcha_voice",
        "--model_size demo --batch_size 8 --speak_held_out 0 --language am",
        AMHARIC_WORDS,
        transcribes=False,
    ),
}


def pieces(bench: Bench, kind: str, measure: Callable, seconds: float) -> list[Piece]:
    """The pieces of a kind, one for each recipe."""
    return [
        Piece(f"{kind} {name}", functools.partial(measure, demo=demo), seconds, gib=2.5)
        for name, demo in DEMOS.items()
    ]


class DemoRun:
    """Runs of a demo in a folder of their own: the corpus, its flags, a run's losses."""

    def __init__(self, bench: Bench, demo: Demo, folder: Path):
        self.bench = bench
        self.demo = demo
        self.folder = folder
        self.updates = 2 if bench.is_small else UPDATES
        self.data = []
        sizes = {"train": 16, "val": 2} if bench.is_small else SENTENCES
        # A recipe that makes its own data transcribes these tones.
        words = demo.words or KONKANI_WORDS
        self.manifests = write_corpus(folder / "data", words, sizes)
        if demo.words:
            self.data = ["--train_manifest", self.manifests["train"]]
            self.data += ["--val_manifest", self.manifests["val"]]

    def command(self, output: Path, device: str, *flags) -> list[str]:
        """A training with its results in the folder `output`."""
        words = [
            ROOT / "recipes" / f"{self.demo.recipe}.py",
            *self.demo.flags.split(),
            *("--gradient_accumulation_steps", 1, "--dropout", 0, "--max_steps", self.updates),
            *("--log_every", 1, "--device", device, "--output_dir", output),
            *self.data,
            *flags,
        ]
        return list(map(str, words))

    def run(self, words: list[str], status: tuple = (0,), usual: float = 20, **asked) -> str:
        return self.bench.child({"run": words, **asked}, self.folder, usual, status)


def losses(output: Path) -> list[float]:
    """The training losses in a run's metrics."""
    text = (output / "logs/metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def difference(found: list[float], reference: list[float]) -> float:
    """The largest relative difference, as far as both have losses."""
    pairs = zip(found, reference, strict=False)
    return max(abs(value - wanted) / max(abs(wanted), 1e-12) for value, wanted in pairs)


def agreement(bench: Bench, demo: Demo) -> dict:
    """The losses of the first updates on the CPU in fp32, and on the device in each precision. All
    updates have the same utterances, so that those that fp16 skips shift nothing."""

    def losses(device: str, flags: list[str]) -> list[float]:
        words = [*trial_flags(demo), *flags]
        updates = 2 if bench.is_small else UPDATES
        tried = bench.trial(demo.recipe, words, 20, device=device, updates=updates, fit=True)
        return tried["losses"]

    found = {"cpu": losses("cpu", EXACT)}
    for name, flags in PRECISIONS.items():
        if name == "fp16" and bench.is_small:
            continue  # slow on a CPU
        found[name] = losses(bench.device, flags)
        found[f"{name} differs by"] = difference(found[name], found["cpu"])
    return found


def resume(bench: Bench, demo: Demo) -> dict:
    """A run that is killed and resumed, against one that is not. The updates before the kill say
    how much two equal runs differ."""
    with bench.folder() as folder:
        run = DemoRun(bench, demo, folder)
        killed_at = 2 if bench.is_small else KILLED_AT
        run.updates = max(run.updates, killed_at + 1)
        flags = [*EXACT, "--save_every", str(killed_at - 1)]
        whole = run.command(folder / "whole", bench.device, *flags)
        run.run(whole)
        cut = run.command(folder / "cut", bench.device, *flags)
        run.run(cut, status=(-9,), kill_after=killed_at)
        before = losses(folder / "cut")
        run.run([*cut, "--resume", "auto"])
        reference, found = losses(folder / "whole"), losses(folder / "cut")
    return {
        "losses": reference,
        "resumed": found,
        "two runs differ by": difference(before, reference[: len(before)]),
        "the resumed one differs by": difference(found, reference),
    }


def export(bench: Bench, demo: Demo) -> dict:
    """The transcripts of a model that was trained on the device, on the device and on the CPU."""
    with bench.folder() as folder:
        run = DemoRun(bench, demo, folder)
        run.updates = 2 if bench.is_small else LEARNING
        flags = ["--export", folder / "export"] if demo.exports else []
        run.run(run.command(folder / "run", bench.device, *EXACT, *flags), usual=60)
        model = ["--resume", folder / "run/checkpoints/best.safetensors"]
        if demo.exports:
            model = ["--model_dir", folder / "export"]
        if demo.transcribes:
            audio = sorted((folder / "data/audio").glob("val_*.wav"))
            task = ["--transcribe", *audio]
        else:
            task = ["--evaluate", "--test_manifest", run.manifests["val"]]
        recipe = ROOT / "recipes" / f"{demo.recipe}.py"
        said = {}
        for device in (bench.device, "cpu"):
            words = [recipe, *task, *model, *EXACT, "--device", device]
            output = run.run(list(map(str, words)))
            said[device] = [line for line in output.splitlines() if is_result(line)]
            said.setdefault("first", said[device])
    return {"device": said["first"], "cpu": said["cpu"], "same": said["first"] == said["cpu"]}


def is_result(line: str) -> bool:
    """Whether a line is a transcript, or has the losses of an evaluation."""
    return "val_" in line or re.search(r"\bflow [\d.]+", line) is not None


def offload(bench: Bench, demo: Demo) -> dict:
    """The changes of five updates with each level of --use_cpu_offload, against those without, and
    in two runs without."""
    import torch

    levels = {"none": [], "none again": []}
    levels |= {level: ["--use_cpu_offload", level] for level in LEVELS}
    if bench.is_small:
        levels.pop("none again")
    weights = {}
    found = {}
    with bench.folder() as folder:
        for name, flags in levels.items():
            path = folder / f"{name}.pt"
            words = [*trial_flags(demo), *flags]
            if bench.is_small:  # a GPU has 16 bits by itself
                words.append("--bf16")
            updates = 2 if bench.is_small else 5
            asked = {"updates": updates, "weights": str(path), "fit": True}
            tried = bench.trial(demo.recipe, words, 20, **asked)
            if "failed" in tried:
                found[name] = tried["failed"]
                continue
            weights[name] = torch.load(path, weights_only=True)
    if "none" not in weights:
        raise Skipped(found["none"])
    for name, state in weights.items():
        if name != "none":
            found[f"{name} differs by"] = weights_differ(state, weights["none"])
    return found


def trial_flags(demo: Demo, seconds: float = 3.0) -> list[str]:
    """The flags of a demo's trial of utterances of so many seconds, which needs no data."""
    flags = [*demo.flags.split(), "--gradient_accumulation_steps", "2", "--dropout", "0"]
    longest = "--max_duration" if demo.words else "--clip_seconds"
    return [*flags, longest, str(seconds), "--dry_run", "8gb"]


def weights_differ(found: dict, reference: dict) -> float:
    """The largest difference of a tensor after the updates, relative to what they have changed in
    it, by norms: 1 if one run's updates have nothing to do with the other's."""
    largest = 0.0
    for name, before in reference["before"].items():
        change = float((reference["after"][name].double() - before.double()).norm())
        difference = found["after"][name].double() - reference["after"][name].double()
        if change:
            largest = max(largest, float(difference.norm()) / change)
    return largest
