"""Runs of recipes: in this process, in one that a server forks, or as a user starts them, which
takes seconds."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import soundfile
import torch
import torch._dynamo  # the first update of an optimizer would import it, which takes two seconds
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common import checkpoint, options, report
from common.errors import exit_with_one_line
from common.parts import planned as planned_runs
from models.whisper import decoding
from speech.data import splits
from tests import processes
from tests.processes import wait_until  # noqa: F401  tests say runs.wait_until

PLAIN = "--device cpu --dataloader_num_workers 0".split()
TINY = "--d_model 16 --encoder_layers 1 --decoder_layers 1 --attention_heads 2".split()
# it would take half a second
NO_PLOT = "from common import report; report.Report.draw = lambda self, metric: None"
SHORT = "--max_steps 2 --batch_size 2 --gradient_accumulation_steps 1".split()
LANGUAGES = {"whisper_vietnamese": "vi", "matcha_voice": "am", "xtts_amharic": "am"}
OWN = {"--train_manifest", "--train_csv", "--model_dir", "--show_text"}
TELLS = {"--language", "--adapter", "--use_amharic_g2p"}
MAX_NEW_TOKENS = 32  # instead of 224: an untrained model never ends a text


def in_language(recipe, flags: Iterable) -> list[str]:
    """The words of a command line, in which own data or models are in the demo's language, if the
    recipe asks for one that neither the flags nor weights tell."""
    words = list(map(str, flags))
    language = LANGUAGES.get(Path(recipe.__file__).stem)
    tells = any(word.split("=")[0] in TELLS for word in words)
    tells |= "--resume" in words and words[words.index("--resume") + 1] != "auto"
    if language is None or tells or not {*words} & OWN:
        return words
    return [*words, "--language", language]


def parse(recipe, *flags):
    """The flags of a command line, before `resolve`. Later flags replace earlier ones. Without a
    flag of the language model there is none, so that the results are those of one decoding."""
    parser = options.Parser(recipe.__doc__)
    recipe.add_arguments(parser)
    lm = []
    if "--lm" in parser._option_string_actions and not {"--lm", "--lm_text"} & {*map(str, flags)}:
        lm = ["--lm", "off"]
    return parser.parse_args([*PLAIN, *lm, *in_language(recipe, flags)])


def run(recipe, *flags) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of a recipe in this process, without the drawing of
    training.png and with short texts of Whisper."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    make_search = decoding.make_search

    def short_search(*inputs, **named):
        return dataclasses.replace(make_search(*inputs, **named), max_new_tokens=MAX_NEW_TOKENS)

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(report.Report, "draw", lambda self, metric: None))
        stack.enter_context(mock.patch.object(decoding, "make_search", short_search))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.getsignal(number))
        try:
            exit_with_one_line(recipe.main, parse(recipe, *flags))
        except SystemExit as leaving:
            status = leaving.code
    return status or 0, out.getvalue(), err.getvalue()


def ran(recipe, *flags) -> str:
    """The stdout of a run that must succeed."""
    status, out, err = run(recipe, *flags)
    assert status == 0, err
    return out


@contextlib.contextmanager
def one_on_device(network: type[torch.nn.Module]) -> Iterator[list]:
    """Checks that at most one model of this class is on the device at any time. `to` moves a model
    there, and `cpu` to the host, which are the same place in a test. Gives the list of models."""
    placed = []
    there = []

    def to(model, *where, **how):
        placed.append(model)
        there.append(model)
        assert len(there) == 1, "two models at once are on the device"
        return torch.nn.Module.to(model, *where, **how)

    def cpu(model):
        there.remove(model)
        return torch.nn.Module.cpu(model)

    with mock.patch.multiple(network, to=to, cpu=cpu, create=True):
        yield placed


def planned(recipe, *flags) -> SimpleNamespace:
    """What a run with --dry_run is planned for: its model, task, global batches and two collated
    utterances."""
    given = []

    def plan(args, *others) -> int:
        model, task, global_batches = others[-4:-1]
        batch = global_batches.dataset.collate(
            [global_batches.data.item(index, 0) for index in range(2)]
        )
        given.append(
            SimpleNamespace(model=model, task=task, global_batches=global_batches, batch=batch)
        )
        return 0

    with (
        mock.patch.object(planned_runs, "plan", plan),
        mock.patch.object(splits, "STAND_INS", 64),  # each of their texts once
    ):
        ran(recipe, *flags, "--dry_run", "8GB")
    assert all(parameter.is_meta for parameter in given[0].model.parameters())
    assert not any(
        isinstance(value, torch.Tensor) and value.is_meta for value in given[0].batch.values()
    )
    return given[0]


def refused(recipe, *flags) -> tuple[int, str]:
    """The exit status of a run that must fail, and its only line on stderr."""
    status, _, err = run(recipe, *flags)
    assert status and err.startswith("error: ") and err.count("\n") == 1, (status, err)
    return status, err


def command(recipe, *flags) -> list[str]:
    """The command line that does the same in a process of its own, with one data worker."""
    return [
        sys.executable,
        recipe.__file__,
        *PLAIN,
        "--dataloader_num_workers",
        "1",
        *in_language(recipe, flags),
    ]


def start(command: list[str], folder: Path, prelude: str = "", **named) -> processes.Process:
    """Starts a command in `folder`, forked by a server that has imported the libraries, without the
    drawing of training.png."""
    return processes.start(command[1:], folder, prelude=f"{NO_PLOT}\n{prelude}", **named)


def signal_after(step: int, number: signal.Signals) -> str:
    """A prelude that sends the run's process group a signal after an update, as a batch system
    does."""
    return f"""
import os
from common import report
show = report.Report.progress
def progress(self, step, *values):
    show(self, step, *values)
    if step == {step}:
        os.killpg(0, {number:d})
report.Report.progress = progress
"""


def start_ranks(command: list[str], folder: Path, prelude: str = "") -> list[processes.Process]:
    """Starts a command twice in `folder`, with the environment that torchrun makes for two
    ranks."""
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    return [
        start(command, folder, prelude, environment={**shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start_anew(command: list[str], folder: Path) -> subprocess.Popen:
    """Starts a command in `folder` as a user does, in a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kill(process: processes.Process | subprocess.Popen, may_have_ended: bool = False) -> None:
    """Sends SIGKILL to a process that still runs, but not to its data workers, which notice within
    seconds."""
    process.kill()
    status = process.wait(60)
    assert status == -signal.SIGKILL or (may_have_ended and status == 0), status


def newest(folder: Path, recipe) -> checkpoint.Saved:
    """The newest checkpoint of a run with --output_dir `folder`."""
    return checkpoint.read(checkpoint.list_checkpoints(folder / "checkpoints")[0], recipe.RECIPE)


def write_best(
    path: Path,
    source: str | Path,
    weights: dict | None = None,
    change: Callable = lambda records: None,
) -> None:
    """Copies a best.safetensors with other weights, or with records {"model_info", "run_info"} that
    `change` has changed."""
    with safe_open(source, framework="pt") as file:
        header = file.metadata()
    records = {name: json.loads(header[name]) for name in ("model_info", "run_info")}
    change(records)
    header |= {name: json.dumps(content) for name, content in records.items()}
    save_file(weights or load_file(source), path, header)


def assert_same_state(a: checkpoint.Saved, b: checkpoint.Saved) -> None:
    """That two checkpoints are equal to the bit: position, evaluations, weights, optimizer."""
    assert a.progress == b.progress
    assert a.model.keys() == b.model.keys()
    for name, weight in a.model.items():
        assert torch.equal(weight, b.model[name]), name
    ours, others = a.state["optimizer"], b.state["optimizer"]
    assert ours.keys() == others.keys()
    for name, state in ours.items():
        for key, value in state.items():
            assert torch.equal(value, others[name][key]), (name, key)


def rows(path: str | Path) -> list[dict]:
    """Those of a file of JSON lines: a manifest, transcripts, or logs/metrics.jsonl."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def rows_of(manifest: str) -> list[dict]:
    """The rows of a manifest with whole paths, for a manifest elsewhere."""
    folder = Path(manifest).parent
    return [
        {**row, "audio_filepath": str(folder / row["audio_filepath"])} for row in rows(manifest)
    ]


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Writes a manifest."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_noise(
    folder: Path, texts: Sequence[str], seconds: Sequence[float], rate: int, speakers: int = 1
) -> str:
    """The manifest of clips of noise, whose loudness changes in each at another pace. The speakers
    take turns."""
    random = np.random.default_rng(0)
    rows = []
    for number, (text, length) in enumerate(zip(texts, seconds, strict=True)):
        samples = 0.1 * random.normal(size=round(length * rate))
        samples *= 1 + np.sin(np.arange(len(samples)) / (300 + 400 * number))
        soundfile.write(folder / f"{number}.wav", samples.clip(-1, 1), rate)
        speaker = f"voice {number % speakers}"
        rows.append({"audio_filepath": f"{number}.wav", "text": text, "speaker": speaker})
    return str(write_rows(folder / "train.json", rows))


def error_lines(out: str) -> list[str]:
    """The lines of stdout with WER and CER."""
    return [line for line in out.splitlines() if line.startswith(("WER", "CER"))]


def check_replay(recipe, folder: Path, old: str | Path, watched: str | Path, *flags) -> str:
    """That a run with old utterances and a watched set says so, and that one that goes on in the
    middle of an epoch ends with its bits. Returns the stdout."""
    steps = "--batch_size 2 --gradient_accumulation_steps 2 --max_steps 4 --warmup_steps 1"
    steps += " --eval_every 2 --save_every 1 --keep_last 9 --replay_share 0.3"
    sets = ["--replay_manifest", old, "--watch_manifest", watched]
    flags = [*steps.split(), *sets, *flags, "--learning_rate", "1e-3", "--output_dir"]
    out = ran(recipe, *flags, folder / "whole")
    name = Path(watched).stem
    assert "30 % of each update are old utterances" in out
    assert out.count(f"\n  watched {name}: ") == 3 and out.count(f"\nwatched {name}  ") == 1
    shutil.copytree(folder / "whole", folder / "again")
    (folder / "again" / "checkpoints" / "checkpoint_step_00000004.pt").unlink()
    assert "(step 3)" in ran(recipe, *flags, folder / "again", "--resume", "auto")
    whole, again = (newest(folder / each, recipe) for each in ("whole", "again"))
    assert_same_state(whole, again)
    assert len(whole.progress.parts["watched"][name]) == 3
    assert set(whole.run_info.get("data", whole.run_info)["sets"]) == {"train", "val", "replay"}
    return out


def check_levels(recipe, folder: Path, *flags) -> None:
    """That a run with the fp32 weights on the host, and one that continues it with the gradients
    there, end with the bits of a run without --use_cpu_offload, in every file that they write."""
    steps = "--bf16 --gradient_checkpointing --batch_size 2 --gradient_accumulation_steps 2".split()
    steps += "--max_steps 3 --warmup_steps 1 --eval_every 3 --save_every 2".split()
    plain = folder / "plain"
    other = folder / "other"
    ran(recipe, *steps, *flags, "--learning_rate", "1e-3", "--output_dir", plain)
    for level in (["weights"], ["gradients", "--resume", "auto"]):
        more = ["--use_cpu_offload", *level, "--learning_rate", "1e-3", "--output_dir", other]
        ran(recipe, *steps, *flags, *more)
        assert_same_state(newest(plain, recipe), newest(other, recipe))
        best = [place / "checkpoints" / "best.safetensors" for place in (plain, other)]
        weights, others = [checkpoint.read_weights(path, recipe.RECIPE).model for path in best]
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
        (other / "checkpoints" / "checkpoint_step_00000003.pt").unlink()
