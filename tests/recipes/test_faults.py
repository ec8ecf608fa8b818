"""Faults as a user meets them, through the Konkani recipe: outputs that would destroy something,
signals, damaged weights. Each is one line and an exit status, and nothing is lost. What needs its
own standard streams or signals runs in a separate process. Altered checkpoints, full disks, other
signals and other orders of the data: tests/common. A model that is too large:
test_refusals.py."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from recipes import konkani_conformer as recipe
from tests import processes
from tests.recipes import runs
from tests.recipes.runs import TINY, newest, ran, refused, rows, run

SHORT = "--max_steps 2 --save_every 1 --batch_size 2 --gradient_accumulation_steps 1 --decoding greedy".split()


@pytest.fixture(scope="module")
def recordings(konkani):
    """The paths of four recordings."""
    return sorted(map(str, Path(konkani["val"]).parent.glob("audio/val_*")))


@pytest.fixture(scope="module")
def training(manifests):
    """The flags of a run of two updates."""
    return [*manifests, *TINY, *SHORT]


@pytest.fixture(scope="module")
def trained(training, tmp_path_factory):
    """The folder of such a run."""
    folder = tmp_path_factory.mktemp("trained")
    ran(recipe, *training, "--output_dir", folder)
    return folder


@pytest.fixture(scope="module")
def best(trained):
    return trained / "checkpoints" / "best.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def start(folder: Path, *flags, **named) -> processes.Process:
    """Starts the recipe in `folder` without data workers."""
    return runs.start(
        [*runs.command(recipe, *flags), "--dataloader_num_workers", "0"], folder, **named
    )


def ended(process: processes.Process) -> tuple[int, str, str]:
    out, err = process.communicate()
    assert "Traceback" not in err, err
    return process.returncode, out, err


# --- --output -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["recording", "weights", "manifest", "folder", "gone/a.jsonl"])
def test_output_replaces_nothing_but_transcripts(target, best, recordings, konkani, tmp_path):
    recording = tmp_path / "a.wav"
    shutil.copy(recordings[0], recording)
    (tmp_path / "folder").mkdir()
    places = {"recording": recording, "weights": best, "manifest": konkani["val"]}
    before = contents(tmp_path), contents(best.parent), Path(konkani["val"]).read_bytes()
    output = places.get(target, tmp_path / target)
    status, err = refused(recipe, "--transcribe", recording, "--resume", best, "--output", output)
    assert status == 2 and f"--output {output}: " in err
    assert before == (contents(tmp_path), contents(best.parent), Path(konkani["val"]).read_bytes())


def test_earlier_transcripts_which_somebody_may_have_corrected_are_kept(best, recordings, tmp_path):
    output = tmp_path / "out.jsonl"
    transcribe = ["--transcribe", recordings[0], "--resume", best, "--output", output]
    for _ in range(2):
        ran(recipe, *transcribe)
        assert [row["file"] for row in rows(output)] == [recordings[0]]
    assert list(tmp_path.iterdir()) == [output]
    first = output.read_text()
    for number in (1, 2):
        output.write_text(corrected := f'{{"file": "a.wav", "text": "corrected {number}"}}\n')
        assert run(recipe, *transcribe)[2].endswith(f"are now in {output}.earlier-{number}\n")
        assert output.read_text() == first
        assert Path(f"{output}.earlier-{number}").read_text() == corrected


def test_output_to_a_device_or_a_pipe(best, recordings, tmp_path):
    transcribe = ["--transcribe", *recordings, "--resume", best, "--output"]
    reading, writing = processes.CONTEXT.Pipe(duplex=False)
    process = start(tmp_path, *transcribe, "/dev/stdout", streams={1: writing})
    writing.close()
    assert ended(process)[0] == 0
    with open(reading.fileno(), "rb", closefd=False) as pipe:
        assert [json.loads(line)["file"] for line in pipe.read().splitlines()] == recordings
    assert ran(recipe, *transcribe, "/dev/null") == "" and Path("/dev/null").is_char_device()
    assert list(tmp_path.iterdir()) == []


def signal_at(recording: str, number: int) -> str:
    """A prelude that sends the command a signal when it reads a recording."""
    return f"""
import os
from speech.decoding import transcribing
read = transcribing.read_audio
def read_audio(path, *rest):
    if path == {recording!r}:
        os.kill(os.getpid(), {number:d})
    return read(path, *rest)
transcribing.read_audio = read_audio
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_transcribing_keeps_what_was_done(best, recordings, tmp_path, number):
    earlier = '{"file": "earlier"}\n'
    (tmp_path / "out.jsonl").write_text(earlier)
    transcribe = ["--transcribe", *recordings, "--resume", best, "--output", "out.jsonl"]
    status, out, err = ended(start(tmp_path, *transcribe, prelude=signal_at(recordings[2], number)))
    assert out == "" and (tmp_path / "out.jsonl").read_text() == earlier
    partial = tmp_path / "out.jsonl.partial"
    if number == signal.SIGKILL:
        assert status == -number and not partial.exists()
        return
    assert status == 128 + number and len(err.splitlines()) == 2
    assert err.splitlines()[0] == "the first 2 transcripts are in out.jsonl.partial"
    assert [row["file"] for row in rows(partial)] == recordings[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.partial"]


def test_a_file_of_the_user_at_the_place_of_partial_transcripts_stays(best, recordings, tmp_path):
    (tmp_path / "out.jsonl.partial").write_text("mine")
    transcribe = ["--transcribe", *recordings, "--resume", best, "--output", "out.jsonl"]
    ended(start(tmp_path, *transcribe, prelude=signal_at(recordings[2], signal.SIGTERM)))
    assert (tmp_path / "out.jsonl.partial").read_text() == "mine"


# --- signals --------------------------------------------------------------------------------------


def test_ctrl_c_saves_the_run_if_it_ends_the_reader_of_its_output_first(training, tmp_path):
    """As in `... | tee log`. Nobody reads what the run says then."""
    reading, writing = processes.CONTEXT.Pipe(duplex=False)
    reading.close()
    interrupt = runs.signal_after(1, signal.SIGINT)
    flags = [*training, "--save_every", "0"]
    start(tmp_path, *flags, prelude=interrupt, streams={1: writing}).communicate()
    assert newest(tmp_path, recipe).progress.step == 1


# --- ranks ----------------------------------------------------------------------------------------


def test_a_rank_that_fails_has_said_why(training, tmp_path):
    """The table of what was rejected is on stdout."""
    command = runs.command(
        recipe, *training, "--min_duration", "9", "--dataloader_num_workers", "0"
    )
    ranks = runs.start_ranks(command, tmp_path)
    results = [ended(process) for process in ranks]
    assert [status for status, *_ in results] == [1, 1]
    assert "14  shorter than 9 s" in results[0][1] and results[1][1] == ""


# --- weights --------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_named(best, recordings, tmp_path):
    weights = load_file(best)
    weights["ctc_head.bias"].fill_(float("nan"))
    path = tmp_path / "best.safetensors"
    runs.write_best(path, best, weights)
    status, err = refused(recipe, "--transcribe", recordings[0], "--resume", path)
    assert status == 2
    assert f"{path}: the tensor 'ctc_head.bias' has values that are not finite" in err
