"""Runs of the page: processes that outlive it, and what their folders tell. Most tests run a
program that takes the locks of a recipe; one runs recipes/template.py."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UsageError
from speech.data import demo
from tests.webui.locks import held, wait_for
from webui import catalogue, commands, launch, outputs, progress, runs
from webui.places import CORRECTED, Places

ROOT = Path(__file__).resolve().parents[2]
# It trains until there is a file "go", and ends with the status in it. With a file "worker" it has
# another process, which tells if it gets a signal.
PROGRAM = """
import fcntl, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
checkpoints = folder / "checkpoints"
checkpoints.mkdir(exist_ok=True)
lock = open(checkpoints / ".lock", "a+")
while (folder / "early").exists():
    time.sleep(0.005)
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
lock.write(str(os.getpid()))
lock.flush()
if (folder / "worker").exists() and os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: (folder / "worker").write_text("stopped"))
    while os.getppid() != 1 and not (folder / "go").exists():
        time.sleep(0.005)
    os._exit(0)
def stop(number, frame):
    print("signal", number)
    while (folder / "slow").exists():
        time.sleep(0.005)
    (checkpoints / "checkpoint_step_00000012.pt").touch()
    print("stopped by SIGTERM: step 12 is saved in", checkpoints)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("length: 600 updates of 8, 1.0 epochs of 1.0 h", repr(sys.stdin.read()), sys.argv[2:])
print("step 12/600  loss 1.234  lr 1.0e-03  3.5 utterances/s  0.5 GiB  waiting 3%  3 min left",
      file=sys.stderr)
(folder / "trains").write_text(str(os.getpid()))
while not (folder / "go").exists():
    time.sleep(0.005)
status = int((folder / "go").read_text())
print("error: the disk is full" if status == 1 else "the end")
if status < 0:
    os.kill(os.getpid(), -status)
lock.close()
while (folder / "late").exists():
    time.sleep(0.005)
sys.exit(status)
"""
SETTINGS = {"recipe": "program", "tier": "auto", "size": "", "values": {}}


def wait_for_state(run: runs.Run, *words: str) -> progress.State:
    wait_for(lambda: progress.state(run).word in words)
    return progress.state(run)


@pytest.fixture
def folder(tmp_path):
    """An empty folder for runs, beside `PROGRAM`. No run outlives it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = (tmp_path / "runs").resolve()
    folder.mkdir()
    yield folder
    for run in runs.list_runs(folder):
        for process in filter(None, runs.processes(run)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def make(folder: Path, name: str, *words: str, device: str = "cpu") -> runs.Run:
    """A run of `PROGRAM`."""
    script = str(folder.parent / "program.py")
    words = [sys.executable, script, f"--output_dir={folder / name}", f"--device={device}", *words]
    return runs.create(folder, name, SETTINGS, words)


def started(folder: Path, name: str, *files: str, device: str = "cpu") -> runs.Run:
    """A run of `PROGRAM` that trains."""
    run = make(folder, name, device=device)
    for file in files:
        (run.folder / file).touch()
    runs.start(run)
    wait_for((run.folder / "trains").exists)
    return run


def let_go(run: runs.Run, status: int = 0) -> None:
    (run.folder / "go.tmp").write_text(str(status))
    (run.folder / "go.tmp").rename(run.folder / "go")


# --- processes ------------------------------------------------------------------------------------


def test_a_run_trains_and_finishes(folder):
    run = started(folder, "first")
    assert progress.state(run) == progress.State("running", "step 12 of 600, about 3 minutes left")
    assert runs.find(folder, "first").device == "cpu"
    assert "length: 600" in outputs.log(run.folder)  # while it trains
    launcher, recipe = runs.processes(run)
    assert os.getsid(launcher) == os.getsid(recipe) == os.getpgid(recipe) == launcher
    with pytest.raises(UsageError, match="runs already"):
        runs.start(run)
    with pytest.raises(UsageError, match="stop it first"):
        runs.remove(run, Places(folder, folder))
    let_go(run)
    assert wait_for_state(run, "finished").detail == "nothing was saved"
    first, second, *_ = outputs.log(run.folder).split("\n")
    assert first.startswith("=== ") and f"--output_dir={run.folder} --device=cpu" in first
    assert second.endswith("1.0 h '' ['--device=cpu']")
    with pytest.raises(UsageError, match="does not run"):
        runs.stop(run)


def test_a_run_starts_and_ends_without_its_lock(folder):
    run = make(folder, "run")
    (run.folder / "early").touch()
    (run.folder / "late").touch()
    runs.start(run)
    assert progress.state(run) == progress.State("starting", "it loads its libraries")
    (run.folder / "early").unlink()
    wait_for((run.folder / "trains").exists)
    let_go(run)
    wait_for(lambda: runs.processes(run)[1] is None)
    assert progress.state(run).word == "running"
    (run.folder / "late").unlink()
    wait_for_state(run, "finished")


@pytest.mark.parametrize(
    "status, word, detail",
    [
        (1, "failed", "error: the disk is full"),
        (-9, "killed", "the memory of the computer was full; nothing was saved"),
        (-11, "killed", "it was ended by SIGSEGV; nothing was saved"),
    ],
)
def test_a_run_fails(folder, status, word, detail):
    run = started(folder, "run")
    let_go(run, status)
    state = wait_for_state(run, "failed", "killed", "finished")
    assert state.word == word and state.detail.endswith(detail)


def test_stop_lets_the_recipe_save(folder):
    run = started(folder, "run", "slow", "worker")
    runs.stop(run)
    assert wait_for_state(run, "stopping").detail == "it saves its state and ends"
    runs.stop(run)  # a second click changes nothing
    (run.folder / "slow").unlink()
    assert wait_for_state(run, "stopped").detail == "step 12 is saved"
    assert json.loads((run.folder / "ended.json").read_text())["status"] == 143
    assert outputs.log(run.folder).count("signal 15") == 1
    assert (run.folder / "worker").read_text() == ""  # its data workers were not told


def test_a_hangup_ends_nothing(folder):
    run = started(folder, "run")
    for process in runs.processes(run):
        os.kill(process, signal.SIGHUP)
    let_go(run)
    assert wait_for_state(run, "finished", "killed").word == "finished"


def test_runs_on_one_device_wait_in_their_order(folder):
    first = started(folder, "c")
    waiting = [make(folder, name) for name in ("b", "a", "d")]
    for run in waiting:
        runs.start(run)
    assert [wait_for_state(run, "waiting").detail for run in waiting] == ["waits for c"] * 3
    runs.stop(waiting[1])
    assert wait_for_state(waiting[1], "stopped").detail == "nothing was saved"
    runs.stop(first)
    wait_for((waiting[0].folder / "trains").exists)
    wait_for(lambda: progress.state(waiting[2]).detail == "waits for b")
    let_go(waiting[0])
    wait_for((waiting[2].folder / "trains").exists)
    let_go(waiting[2])
    wait_for_state(waiting[2], "finished")
    assert "step 12" not in outputs.log(waiting[1].folder)


def test_what_a_run_waits_for(folder):
    def queue(name: str, device: str, queued: int) -> str:
        run = make(folder, name, device=device)
        runs._write(replace(run, device=device), queued)
        return str(run.folder)

    own = queue("m", "cuda:0", 5)
    on_cpu = queue("cpu", "cpu", 5)
    other = queue("other", "cuda:1", 1)
    later = queue("later", "cuda:0", 6)
    locks = [Path(place, ".lock") for place in (on_cpu, other, later)]
    with held(*locks):
        assert launch.blocker(own) is None
    with held(Path(queue("earlier", "cuda:0", 4), ".lock")):
        assert launch.blocker(own) == "earlier"
    with held(Path(later, ".lock")) as process:
        lock = launch.open_lock(later)
        launch.write_word(lock, process, "running")
        assert launch.blocker(own) == "later"
    with held(folder / "by hand" / "checkpoints" / ".lock"):  # on every GPU
        assert launch.blocker(own) == launch.blocker(other) == "by hand"
        assert launch.blocker(on_cpu) is None
    with held(Path(later, "checkpoints", ".lock")):  # its launch.py was killed
        assert launch.blocker(own) == "later"
    assert launch.blocker(own) is None


def test_a_run_outlives_its_launcher(folder):
    run = started(folder, "run", "slow")
    launcher, recipe = runs.processes(run)
    os.kill(launcher, signal.SIGKILL)
    wait_for(lambda: runs.processes(run) == (None, recipe))
    assert progress.state(run).word == "running"
    with pytest.raises(UsageError, match="runs already"):
        runs.start(run)
    # Another page has not seen it: its launch.py ends, and the run is unharmed.
    words = [sys.executable, "-I", "-S", launch.__file__, str(run.folder)]
    assert subprocess.run(words, timeout=60).returncode == launch.TAKEN
    runs.stop(run)
    assert progress.state(run).word == "stopping"
    (run.folder / "slow").unlink()
    assert wait_for_state(run, "stopped", "killed").detail == "step 12 is saved"


def test_a_lock_is_only_looked_at(tmp_path):
    path = tmp_path / ".lock"
    path.write_text(f"{os.getpid()} running")
    assert launch.holder(path) is None  # a stale file
    assert launch.holder(tmp_path / "none") is None
    with held(path) as process:
        assert launch.holder(path) == launch.holder(path) == process
        with open(path, "a") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert launch.holder(path) == process
        assert launch.read_word(tmp_path, process) == ("", "")  # the text is an earlier run's
    wait_for(lambda: launch.holder(path) is None)


def test_a_command_line_run_is_found_and_stopped(folder):
    (folder / "by hand" / "checkpoints").mkdir(parents=True)
    words = ["-S", str(folder.parent / "program.py"), f"--output_dir={folder}/by hand"]
    with subprocess.Popen([sys.executable, *words], stdin=-3, stdout=-3, stderr=-3) as process:
        run = runs.find(folder, "by hand")
        wait_for((run.folder / "trains").exists)
        assert progress.state(run).word == "running"
        runs.stop(run)
        assert process.wait(60) == 143
    assert progress.state(run) == progress.State(
        "stopped", "step 12 is saved (from a command line)"
    )
    with pytest.raises(UsageError, match="--resume auto"):
        runs.resume(run, Places(folder, folder), {})
    with pytest.raises(UsageError, match="remove its folder"):
        runs.remove(run, Places(folder, folder))


# --- the real recipe ------------------------------------------------------------------------------


START = """
import json, sys, time
from pathlib import Path
from webui import catalogue, commands, runs
from webui.places import Places
folder = Path(sys.argv[1])
recipe = catalogue._read_recipe(catalogue.ROOT / "recipes" / "template.py", None)
settings = json.loads(sys.argv[2])
made = commands.command(Places(folder, folder), recipe, settings, folder / "run")
runs.start(runs.create(folder, "run", settings, made.words))
print("started", flush=True)
time.sleep(600)
"""


def test_the_template_survives_its_page_and_resumes(tmp_path):
    data = demo.speech_corpus(
        tmp_path / "data", demo.KONKANI_WORDS, demo.KONKANI_VOICES[:3], {"train": 14, "val": 4}, 19
    )
    values = {"max_steps": 40, "log_every": 1, "eval_every": 20, "device": "cpu", "batch_size": 1}
    values |= {"gradient_accumulation_steps": 1, "dataloader_num_workers": 0}
    values |= {"train_manifest": data["train"], "val_manifest": data["val"]}
    settings = {"recipe": "template", "values": {key: str(value) for key, value in values.items()}}
    places = Places(tmp_path, tmp_path)
    words = [sys.executable, "-c", START, str(places.runs), json.dumps(settings)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout.readline() == "started\n"
        page.kill()

    run = runs.find(places.runs, "run")
    wait_for(lambda: outputs.metrics(run.folder))
    runs.stop(run)
    state = wait_for_state(run, "stopped", "finished", "failed", "killed")
    assert state.word == "stopped", outputs.log(run.folder)
    step = int(state.detail.split()[1])
    assert 1 <= step < 40 and state.detail == f"step {step} is saved"
    assert json.loads((run.folder / "ended.json").read_text())["status"] == 143
    (run.folder / "ended.json").unlink()
    assert progress.state(run) == state  # by its log

    recipe = catalogue._read_recipe(ROOT / "recipes" / "template.py", None)
    runs.resume(run, places, {"template": recipe})
    state = wait_for_state(run, "finished", "stopped", "failed", "killed")
    assert state.word == "finished" and "cer" in state.detail, outputs.log(run.folder)
    (run.folder / "ended.json").unlink()
    assert progress.state(run) == state
    assert f"(step {step})" in outputs.log(run.folder)
    rows = outputs.metrics(run.folder)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 41))
    assert [row["step"] for row in rows if "eval/cer" in row] == [20, 40]
    assert len(outputs.transcripts(run.folder)) == 4
    assert outputs.weights(run.folder)[0].name == "best.safetensors"
    now = progress.numbers(run)
    assert now["step"] == "40 of 40" and "at step 40" in now["evaluation"], now
    assert runs._recipe_of(run.folder) == "template"


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "ä", "x" * 61, "uploads", "-\n"])
def test_names_that_cannot_be_used(folder, name):
    with pytest.raises(UsageError, match="cannot be used"):
        make(folder, name)


def test_a_name_is_that_of_one_run(folder):
    run = make(folder, "a-Z_9")
    assert progress.state(run) == progress.State("untouched", "it was not started yet")
    with pytest.raises(UsageError, match="another name"):
        make(folder, "a-Z_9")
    for name in ("../runs/a-Z_9", "", "none"):
        with pytest.raises(UsageError, match="there is no run"):
            runs.find(folder, name)


def test_the_newest_run_is_first(folder):
    names = ["one", "two", "three"]
    for number, name in enumerate(names):
        run = make(folder, name)
        runs._write(replace(run, created=1e9 + number))
    (folder / "uploads" / "checkpoints").mkdir(parents=True)
    (folder / ".hidden" / "checkpoints").mkdir(parents=True)
    (folder / "other").mkdir()
    (folder / "run.json").write_text("{}")
    assert [run.name for run in runs.list_runs(folder)] == names[::-1]
    assert runs.list_runs(folder / "none") == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"settings": [], "words": [], "created": 1}',
        b"\xff",
    ],
)
def test_a_damaged_run_is_shown_and_can_be_removed(folder, content):
    run = make(folder, "run")
    (run.folder / "run.json").write_bytes(content)
    (run,) = runs.list_runs(folder)
    state = progress.state(run)
    assert state.word == "untouched" and "run.json" in state.detail
    places = Places(folder, folder)
    with pytest.raises(UsageError, match="it cannot be read"):
        runs.resume(run, places, {})
    assert progress.numbers(run) == {} and outputs.log(run.folder) == ""
    runs.remove(run, places)
    assert runs.list_runs(folder) == []


def test_a_run_from_elsewhere_runs_no_words_of_its_own(folder, monkeypatch):
    """What a user resumes is made of the settings."""
    run = make(folder, "run")
    words = run.words
    runs._write(replace(run, words=["touch", str(folder / "evil")]))
    found = runs.find(folder, "run")
    monkeypatch.setattr(commands, "command", lambda *_: commands.Command(words, []))
    places = Places(folder, folder)
    with pytest.raises(UsageError, match="no recipe"):
        runs.resume(found, places, {})
    runs.resume(found, places, {"program": None})
    assert runs.find(folder, "run").words == [*words, "--resume=auto"]
    wait_for((run.folder / "trains").exists)
    assert not (folder / "evil").exists()


def test_removing_a_run_removes_its_own_uploads(folder):
    places = Places(folder, folder)
    for number in ("1", "2", "12"):
        upload = folder / "uploads" / number
        upload.mkdir(parents=True)
        (upload / "not_used.txt").touch()
    first = make(folder, "first", f"--a={folder}/uploads/1/manifest.jsonl", f"{folder}/uploads/2")
    make(folder, "second", f"--a={folder}/uploads/2/manifest.jsonl", f"{folder}/uploads/12/a.wav")
    (first.folder / "checkpoints").mkdir()
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (first.folder / "checkpoints" / "linked").symlink_to(outside)
    (first.folder / "linked").symlink_to(outside)
    runs.remove(runs.find(folder, "first"), places)
    assert uploads_with_files(folder) == ["12", "2"]
    assert (outside / "kept").exists() and not first.folder.exists()
    corrected = folder / "second" / CORRECTED
    corrected.touch()  # somebody's hours
    with pytest.raises(UsageError, match="texts that somebody has corrected: take them home"):
        runs.remove(runs.find(folder, "second"), places)
    corrected.unlink()
    runs.remove(runs.find(folder, "second"), places)
    assert uploads_with_files(folder) == []


def uploads_with_files(folder) -> list[str]:
    """An empty folder stays, so that its number is not used again."""
    uploads = folder / "uploads"
    return sorted(name for name in os.listdir(uploads) if os.listdir(uploads / name))


# --- devices --------------------------------------------------------------------------------------


def test_device_of_a_command(monkeypatch):
    assert runs.device_of(["--device", "cuda:1", "--device=cpu"]) == "cpu"
    assert runs.device_of(["--device=cpu", "--device", "cuda:1"]) == "cuda:1"
    assert runs.device_of(["--device", "cuda"]) == "cuda:0"
    for has_gpu, device in ((True, "cuda:0"), (False, "cpu")):
        monkeypatch.setattr(runs, "_has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert runs.device_of(["--seed", "1"]) == runs.device_of(["--device", "auto"]) == device


def test_runs_on_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(runs, "_has_gpu", lambda: True)
    for name, device in (("idle", "cuda:0"), ("gpu", "cuda:0"), ("waits", "cuda:0"), ("c", "cpu")):
        runs._write(replace(make(folder, name, device=device), device=device))
    locks = [folder / name / ".lock" for name in ("gpu", "waits", "c")]
    with held(*locks, folder / "by hand" / "checkpoints" / ".lock") as process:
        launch.write_word(launch.open_lock(folder / "waits"), process, "waiting", "gpu")
        assert {run.name for run in runs.on_gpu(folder)} == {"gpu", "by hand"}
