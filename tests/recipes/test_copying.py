"""A recipe that somebody copies and renames trains, and continues, as its original does."""

import shutil
import sys
from pathlib import Path

import pytest

from common import checkpoint
from tests.recipes import runs

ROOT = Path(__file__).resolve().parents[2]
SIZES = 'DEMO_SIZES = {"train": 3000, "val": 100, "test": 200}'


@pytest.fixture
def copied(tmp_path):
    """recipes/my_model.py in a copy of the project, with a demo of a few utterances."""
    for folder in ("common", "speech", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (tmp_path / "recipes" / "konkani_conformer.py").read_text(encoding="utf-8")
    for old, new in (
        ('RECIPE = "konkani_conformer"', 'RECIPE = "my_model"'),
        (SIZES, 'DEMO_SIZES = {"train": 8, "val": 2, "test": 2}'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "recipes" / "my_model.py").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_copy_with_its_own_name_trains_and_resumes(copied):
    """As a user runs it: in a process of its own, with a plot and TensorBoard."""

    def finish(*flags: str) -> str:
        process = runs.start([sys.executable, "recipes/my_model.py", *runs.TINY, "--device", "cpu", *flags], copied)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "\r" not in err  # plain lines, because stderr is not a terminal
        assert out.splitlines()[-1].startswith("memory: peak ")
        return out

    out = finish("--max_steps", "2")
    assert "demo corpus: 12 utterances" in out and "test set, " in out and len(runs.error_lines(out)) == 2
    assert (copied / "logs" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert list((copied / "logs").glob("events.*"))
    assert "resuming from checkpoints/checkpoint_step_00000002.pt (step 2)" in finish(
        "--resume", "auto", "--max_steps", "4"
    )
    newest = checkpoint.list_checkpoints(copied / "checkpoints")[0]
    state = checkpoint.read(newest, "my_model")
    assert state["recipe"] == state["metadata"]["recipe"] == "my_model" and state["progress"]["step"] == 4
    assert checkpoint.read_weights(copied / "checkpoints" / "best.safetensors", "my_model")
