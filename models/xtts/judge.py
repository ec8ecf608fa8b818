"""Held-out sentences after a training: they are spoken and, with --judge, transcribed. The error rate
of a recogniser that another recipe has trained says how well they are understood."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch

from common import checkpoint, memory, options
from common.device import Setup
from common.errors import RunError, UsageError
from models.xtts import speaking
from models.xtts.decoding import GREEDY, Sampling
from models.xtts.speaking import KINDS, Synthesiser, clip_name
from speech.data.columns import Corpus
from speech.writing import metrics
from speech.writing.text import NAMES, in_lower_case

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # the judge is one process

# Commands that speak no held-out sentences, and rows for common.options: flags that exclude them.
ELSEWHERE = ("synthesize", "show_text", "check_data")
HELD_OUT = "the first is for held-out sentences, after training or with --evaluate"
EXCLUDES = (
    *((flag, command, HELD_OUT) for flag in ("judge", "speak_held_out") for command in ELSEWHERE),
    ("judge", "speak_held_out 0", "there would be nothing to judge; leave one of them out"),
)


@dataclass(frozen=True)
class HeldOut:
    """The held-out sentences that are spoken: the first `count`, as many as usual if it is None. The
    recogniser at `judge` (or None) transcribes them on `device`."""

    count: int | None
    judge: str | None
    output_dir: str
    device: str
    seed: int


def add_arguments(parser) -> None:
    group = parser.add_argument_group("held-out sentences")
    group.add_argument(
        "--speak_held_out",
        type=options.COUNT,
        metavar="N",
        help=(
            "held-out sentences to speak after training, or with --evaluate, in OUTPUT_DIR/speech"
            " (2; 20 from scratch; with --evaluate 0, unless there is a judge)"
        ),
    )
    group.add_argument(
        "--judge",
        type=options.path,
        metavar="FILE",
        help=(
            "weights of a recogniser that another recipe has trained (best.safetensors): print its"
            " error rate on the sentences that are spoken after training, or with --evaluate"
        ),
    )


def resolve(args, exports_only: bool) -> HeldOut:
    """The held-out sentences that these flags ask for. `exports_only`: this is --export alone. Raises
    `UsageError`."""
    count = args.speak_held_out
    if (args.judge or count) and exports_only:
        flag = "--judge" if args.judge else "--speak_held_out"
        raise UsageError(
            f"{flag} is for sentences that are spoken after training or with --evaluate, and"
            " --export alone speaks none: leave it out"
        )
    if args.judge:
        checkpoint.recipe_of(args.judge, "--judge")
    if args.evaluate and count is None and not args.judge:
        count = 0
    return HeldOut(count, args.judge, args.output_dir, args.device, args.seed)


def speak_held_out(
    asked: HeldOut,
    setup: Setup,
    synthesiser: Synthesiser,
    corpus: Corpus,
    clips: dict[str, tuple[np.ndarray, int]],
) -> None:
    """Speaks the first sentences of `corpus`, each in the voice of its speaker's clip in `clips`, of
    `speaking.speakers_of`, and prints how well the judge understands them."""
    usual, sampling = (2, Sampling(seed=asked.seed)) if synthesiser.frozen.vocoder else (20, GREEDY)
    count = usual if asked.count is None else asked.count
    if not (count and clips):
        return
    corpus = corpus.select(np.arange(min(count, len(corpus))))
    folder = speaking.folder_of(asked.output_dir)
    synthesiser.frozen.to(setup.device)
    with setup.autocast():
        print(speaking.speak_corpus(folder, synthesiser, corpus, clips, sampling))
    if asked.judge:
        synthesiser.model.cpu()
        synthesiser.frozen.to(torch.device("cpu"))
        memory.free_memory(setup.device)  # the judge is another process
        print(judged(asked.judge, RECIPES, folder, list(corpus.texts), asked.device))


def transcripts(path: str, recipes: Path, clips: list[Path], device: str) -> dict[str, str]:
    """The transcript that the recogniser at `path` makes of each clip, by file. `recipes`: their
    folder. A clip without samples has no words. Raises `UsageError` and `RunError`."""
    heard = {str(clip): "" for clip in clips}
    audible = [name for name in heard if soundfile.info(name).frames]
    if not audible:
        return heard
    recipe = checkpoint.recipe_of(path, "--judge")
    script = recipes / f"{recipe}.py"
    if not recipe.isidentifier() or not script.is_file():
        raise UsageError(
            f"--judge {path}: there is no recipes/{recipe[:60]}.py, which has saved it"
        )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "heard.jsonl")
        command = [sys.executable, script, "--transcribe", *audible, "--resume", path]
        command += ["--output", output, "--output_dir", folder, "--device", device]
        environment = {name: text for name, text in os.environ.items() if name not in TORCHRUN}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if ended.returncode:
            reason = (ended.stderr.strip() or f"status {ended.returncode}").splitlines()[-1]
            raise RunError(f"--judge {path}: it could not hear the sentences: {reason}")
        for line in output.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            heard[row["file"]] = row["text"]
    return heard


def judged(path: str, recipes: Path, folder: Path, texts: list[str], device: str) -> str:
    """The CER of the judge on what `speaking.speak_corpus` wrote into `folder` for these sentences,
    as lines to print: on the speech, on the recordings made anew from their codes, and on the
    recordings, which shows how good the judge is."""
    clips = {
        kind: [folder / clip_name(number, kind) for number in range(len(texts))] for kind in KINDS
    }
    every = [clip for each in clips.values() for clip in each]
    heard = transcripts(path, recipes, every, device)
    lines = [f"CER of the judge ({NAMES[in_lower_case]}) with its 95 % interval"]
    for kind in reversed(KINDS):
        hypotheses = [heard[str(clip)] for clip in clips[kind]]
        errors = metrics.errors_of_each(texts, hypotheses, "characters", in_lower_case)
        rate = 100 * sum(errors, metrics.Errors()).rate
        lines.append(f"  {kind:11} {rate:7.2f} % {metrics.shown(metrics.interval(errors)).strip()}")
    return "\n".join(lines)
