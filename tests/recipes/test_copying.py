"""A recipe that somebody copies and renames trains, and continues, as its original does."""

import shutil
import sys
from pathlib import Path

import pytest

from common import checkpoint
from tests.recipes import runs

ROOT = Path(__file__).resolve().parents[2]
SIZES = 'DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}'


def copy_project(folder: Path) -> Path:
    """recipes/my_model.py in a copy of the project, with a demo of a few utterances."""
    for name in ("common", "speech", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "recipes" / "konkani_conformer.py").read_text(encoding="utf-8")
    for old, new in (
        ('RECIPE = "konkani_conformer"', 'RECIPE = "my_model"'),
        (SIZES, 'DEMO_SIZES = {"train": 8, "val": 2, "test": 2}'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "recipes" / "my_model.py").write_text(text, encoding="utf-8")
    return folder


def finish(folder: Path, start, *flags: str) -> str:
    """The stdout of the copied recipe, which must succeed, with TensorBoard."""
    process = start(
        [sys.executable, "recipes/my_model.py", *runs.TINY, "--device", "cpu", *flags], folder
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "\r" not in err  # plain lines, because stderr is not a terminal
    assert out.splitlines()[-1].startswith("memory: peak ")
    return out


def assert_trained(folder: Path, out: str) -> None:
    assert (
        "demo corpus: 12 utterances" in out
        and "test set, " in out
        and len(runs.error_lines(out)) == 2
    )
    assert list((folder / "logs").glob("events.*"))


def assert_resumed(folder: Path, out: str) -> None:
    assert "resuming from checkpoints/checkpoint_step_00000002.pt (step 2)" in out
    newest = checkpoint.list_checkpoints(folder / "checkpoints")[0]
    state = checkpoint.read(newest, "my_model")
    assert (
        state["recipe"] == state["metadata"]["recipe"] == "my_model"
        and state["progress"]["step"] == 4
    )
    assert checkpoint.read_weights(folder / "checkpoints" / "best.safetensors", "my_model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder and the stdout of a copy that was trained."""
    folder = copy_project(tmp_path_factory.mktemp("copy"))
    return folder, finish(folder, runs.start, "--max_steps", "2")


def test_a_copy_with_its_own_name_trains(trained):
    assert_trained(*trained)


def test_a_copy_with_its_own_name_resumes(trained):
    folder, _ = trained
    assert_resumed(folder, finish(folder, runs.start, "--resume", "auto", "--max_steps", "4"))


@pytest.mark.slow
def test_a_copy_in_a_new_interpreter(tmp_path):
    """As a user runs it, with a plot."""
    folder = copy_project(tmp_path)
    assert_trained(folder, finish(folder, runs.start_anew, "--max_steps", "2"))
    assert (folder / "logs" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert_resumed(folder, finish(folder, runs.start_anew, "--resume", "auto", "--max_steps", "4"))
