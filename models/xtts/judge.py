"""How well sentences that were spoken are understood: the character error rate of a recogniser that
another recipe has trained."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import soundfile

from common import checkpoint, options
from common.errors import RunError, UsageError
from models.xtts.speaking import KINDS, clip_name
from speech.writing import metrics
from speech.writing.text import NAMES, in_lower_case

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # the judge is one process

# Commands that speak no held-out sentences, and rows for common.options: flags that exclude them.
ELSEWHERE = ("synthesize", "show_text", "check_data")
HELD_OUT = "the first is for held-out sentences, after training or with --evaluate"
EXCLUDES = (
    *((flag, command, HELD_OUT) for flag in ("judge", "speak_held_out") for command in ELSEWHERE),
    ("judge", "speak_held_out 0", "there would be nothing to judge; leave one of them out"),
)


def add_arguments(group) -> None:
    group.add_argument(
        "--judge",
        type=options.path,
        metavar="FILE",
        help=(
            "weights of a recogniser that another recipe has trained (best.safetensors): print its"
            " error rate on the sentences that are spoken after training, or with --evaluate"
        ),
    )


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
