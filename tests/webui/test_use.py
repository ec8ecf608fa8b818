"""Models in use: a loaded model answers as the command does, and its process comes and goes."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from common.errors import RunError
from recipes import konkani_conformer
from speech.data import demo
from tests.recipes import runs
from tests.webui.locks import wait_for
from webui import use

CPU = ("--device", "cpu")
# A recipe whose model is a number.
FAKE = '''"""A recipe that loads a number."""
import os, sys, threading, time
from pathlib import Path

def add_arguments(parser):
    parser.add_argument("--resume")
    parser.add_argument("--sleep", type=float, default=0)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--break", dest="breaks", action="store_true")

def trained(args):
    return int(Path(args.resume).read_text())

def main(args):
    number = trained(args)
    os.write(1, b"noise of a library")
    time.sleep(args.sleep)
    if args.die:
        os.kill(os.getpid(), 9)
    if args.breaks:
        raise ValueError("a bug\\nin two lines")
    if args.leave:
        threading.Timer(0.1, os._exit, (0,)).start()
    print(number, os.getpid())
'''


@pytest.fixture(autouse=True)
def signals():
    """A command's signal handlers are not the tests'."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


# --- results --------------------------------------------------------------------------------------


@pytest.fixture
def recogniser(tmp_path):
    """The weights of a tiny recogniser, and two recordings."""
    folder = tmp_path / "konkani"
    sizes = {"train": 14, "val": 4}
    corpus = demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES[:3], sizes, seed=19)
    flags = ["--train_manifest", corpus["train"], "--val_manifest", corpus["val"], *runs.TINY]
    runs.ran(konkani_conformer, *flags, *runs.SHORT, "--output_dir", folder)
    clips = [
        json.loads(line)["audio_filepath"] for line in Path(corpus["val"]).read_text().splitlines()
    ]
    return folder / "checkpoints" / "best.safetensors", [folder / clip for clip in clips[:2]]


def test_a_kept_model_transcribes_as_the_command_does(recogniser, monkeypatch, tmp_path):
    weights, clips = recogniser
    model = ["--resume", weights, "--lm", "off", *CPU]
    expected = []
    for number, clip in enumerate(clips):
        own = tmp_path / f"own-{number}.json"
        runs.ran(konkani_conformer, "--transcribe", clip, "--output", own, *model)
        expected.append(own.read_bytes())
    trained = mock.Mock(wraps=konkani_conformer.trained)
    trained.__name__ = "trained"
    monkeypatch.setattr(konkani_conformer, "trained", trained)
    outputs = [tmp_path / f"{number}.json" for number in range(4)]
    requests = [
        ["--transcribe", clips[0], "--output", outputs[0], *model],
        ["--transcribe", tmp_path / "gone.wav", "--output", outputs[1], *model],
        ["--transcribe", clips[1], "--output", outputs[2], "--decoding", "greedy", *model],
        ["--transcribe", clips[1], "--output", outputs[3], *model],
        ["--transcribe", clips[1], "--nonsense", *model],
    ]
    words = [list(map(str, request)) for request in requests]
    answers = list(use.serve(konkani_conformer, iter(words)))
    assert [answer["status"] for answer in answers] == [0, 2, 0, 0, 2]
    assert [outputs[0].read_bytes(), outputs[3].read_bytes()] == expected
    assert json.loads(outputs[0].read_text())["text"] is not None
    assert "no such file" in use.error_of(answers[1]["text"])
    assert "--nonsense" in use.error_of(answers[4]["text"])
    assert trained.call_count == 1


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The words that name the fake recipe's model."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "weights").write_text("7")
    return ("--resume", str(tmp_path / "weights"))


@pytest.fixture
def models():
    made = use.Models()
    yield made
    made.close()


def test_one_process_answers_until_the_weights_change(models, fake, tmp_path):
    number, process = models.ask("fake", [], fake).split()
    assert number == "7" and os.getsid(int(process)) == int(process)
    answers = []
    pages = [
        threading.Thread(
            target=lambda: answers.append(models.ask("fake", ["--sleep", "0.1"], fake))
        )
        for _ in range(3)
    ]
    for page in pages:
        page.start()
    for page in pages:
        page.join()
    assert answers == [f"7 {process}\n"] * 3
    (tmp_path / "weights").write_text("8 ")  # another evaluation was better
    number, other = models.ask("fake", [], fake).split()
    assert number == "8" and other != process
    models.close()
    for each in (process, other):
        wait_for(lambda each=each: not Path("/proc", each).exists(), 10)


def test_failures_are_one_line_and_the_next_request_is_served(models, fake):
    with pytest.raises(RunError, match=r"^unrecognized arguments: --nonsense"):
        models.ask("fake", ["--nonsense"], fake)
    before = models.ask("fake", [], fake)
    with pytest.raises(RunError, match="no answer after 0 s"):
        models.ask("fake", ["--sleep", "60"], fake, seconds=0.2)
    with pytest.raises(RunError, match=r"has ended: it was killed, perhaps .* memory"):
        models.ask("fake", ["--die"], fake)
    with pytest.raises(RunError, match=r"^ValueError: a bug$"):
        models.ask("fake", ["--break"], fake)
    assert models.workers == []
    after = models.ask("fake", [], fake)
    assert after.split()[0] == "7" and after != before
    with pytest.raises(RunError, match=r"No module named 'recipes.gone'"):
        models.ask("gone", [], ())


def test_an_idle_process_ends_and_the_next_request_starts_another(models, fake, monkeypatch):
    process = int(models.ask("fake", ["--leave"], fake).split()[1])
    assert models.workers[0].process.wait(10) == 0
    monkeypatch.setattr(models, "_worker", first_the_old_one(models))
    number, other = models.ask("fake", [], fake).split()
    assert number == "7" and int(other) != process


def first_the_old_one(models):
    """`_worker` for a process that ends between the look at it and the request."""
    old = models.workers[0]
    find = models._worker
    answers = iter([(old, False)])
    return lambda recipe, model: next(answers, None) or find(recipe, model)


def test_a_process_without_requests_gives_its_memory_back(fake, tmp_path):
    code = "from webui import use; use.IDLE_SECONDS = 0.2; use.main('fake')"
    request = json.dumps({"words": list(fake)}) + "\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=use.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        process.stdin.write(request)
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert answer["text"] == f"7 {process.pid}\n"
        assert process.wait(10) == 0


def test_a_process_ends_with_its_server(fake):
    process = subprocess.Popen(
        [sys.executable, "-m", "webui.use", "fake"],
        cwd=use.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process.stdin.write(json.dumps({"words": [*fake, "--sleep", "60"]}).encode() + b"\n")
    process.stdin.close()
    assert process.wait(20) == 0
