"""The judge of spoken sentences: its command, its table, and a recogniser that really runs."""

import errno
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from common import checkpoint
from common.errors import RunError, UsageError
from recipes import template
from speech.data import splits
from speech.decoding import judge
from speech.decoding.judge import KINDS, clip_name

RECIPES = Path(template.__file__).parent
TEXTS = ["ab ba", "Aab."]
RATE = 16_000


def write_judge(folder: Path, recipe: str = template.RECIPE) -> str:
    """Random weights of the template, which read noise as some letters."""
    torch.manual_seed(2)
    info = template.ModelInfo(width=8, layers=1, characters=list("ab "))
    run_info = splits.RunInfo(held_out=[], longest=5.0, demo=False)
    task = SimpleNamespace(name=recipe, model_info=info, run_info=run_info)
    path = folder / f"{recipe}.safetensors"
    checkpoint.save_weights(path, template.Network(info).state_dict(), task, {})
    return str(path)


@pytest.fixture
def spoken(tmp_path) -> Path:
    """A folder of clips as `speak_corpus` writes them; the second sentence has no samples."""
    folder = tmp_path / "speech"
    folder.mkdir()
    random = np.random.default_rng(5)
    for number in range(len(TEXTS)):
        for kind in KINDS:
            is_silent = (number, kind) == (1, "synthesis")
            samples = random.normal(size=0 if is_silent else RATE) * 0.1
            soundfile.write(folder / clip_name(number, kind), samples, RATE)
    return folder


def test_a_recogniser_hears_the_sentences(spoken, tmp_path):
    path = write_judge(tmp_path)
    clips = [spoken / clip_name(number, kind) for kind in KINDS for number in range(len(TEXTS))]
    heard = judge.transcripts(path, RECIPES, clips, "cpu")
    assert list(heard) == [str(clip) for clip in clips]
    assert [text == "" for text in heard.values()] == [False] * 5 + [True]
    assert set("".join(heard.values())) <= set("ab ")


def test_the_table_and_the_command(spoken, tmp_path, monkeypatch):
    said = {"reference": ["ab ba", "aab"], "resynthesis": ["ab ba", "aa"], "synthesis": ["ab", "x"]}
    commands = []

    def run(command, env, **_):
        commands.append(command)
        assert not set(judge.TORCHRUN) & set(env) and env["PATH"] == os.environ["PATH"]
        rows = [
            {"file": name, "text": said[Path(name).stem[4:]][int(Path(name).name[:3]) - 1]}
            for name in command[3 : command.index("--resume")]
        ]
        output = Path(command[command.index("--output") + 1])
        output.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(judge.subprocess, "run", run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lines = judge.judged(write_judge(tmp_path), RECIPES, spoken, TEXTS, "cpu").splitlines()
    assert "lower case, no punctuation" in lines[0]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["synthesis", "75.00"],  # three deletions and an empty clip, of eight characters
        ["resynthesis", "12.50"],
        ["reference", "0.00"],
    ]
    assert all("(" in line for line in lines[1:])
    assert commands[0][1] == RECIPES / "template.py" and commands[0][-2:] == ["--device", "cpu"]
    assert str(spoken / "002_synthesis.wav") not in commands[0]


def test_what_is_no_judge_is_one_line(spoken, tmp_path, monkeypatch):
    (tmp_path / "text.safetensors").write_text("text")
    with pytest.raises(UsageError, match=r"--judge .*cannot be read"):
        checkpoint.recipe_of(str(tmp_path / "text.safetensors"), "--judge")
    with pytest.raises(UsageError, match=r"--judge .*No such file"):
        checkpoint.recipe_of(str(tmp_path / "nothing"), "--judge")
    (tmp_path / "checkpoint_step_00000002.pt").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"--judge .*0002\.pt: name best\.safetensors of the run"):
        checkpoint.recipe_of(str(tmp_path / "checkpoint_step_00000002.pt"), "--judge")
    with pytest.raises(UsageError, match=r"matcha_voice\.py, its recipe, is not a recogniser"):
        judge.recogniser_of(write_judge(tmp_path, "matcha_voice"), RECIPES)
    with pytest.raises(UsageError, match=r"there is no recipes/other\.py"):
        judge.recogniser_of(write_judge(tmp_path, "other"), RECIPES)
    ended = subprocess.CompletedProcess([], 1, "", "warning: a\nerror: it is damaged\n")
    monkeypatch.setattr(judge.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(RunError, match=r"could not hear the sentences: error: it is damaged"):
        judge.judged(write_judge(tmp_path), RECIPES, spoken, TEXTS, "cpu")


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("voice.wav", "this command reads it"),
        ("mine.wav", "it exists, and this command did not write it"),
        ("speech.mp3", "speech is written as .wav"),
        ("speech", "speech is written as .wav"),
    ],
)
def test_speech_replaces_no_file_of_the_user(tmp_path, output, message):
    voice = tmp_path / "voice.wav"
    for path in (voice, tmp_path / "mine.wav", tmp_path / "many_002.wav"):
        soundfile.write(path, np.zeros(99), RATE)
    with pytest.raises(UsageError, match=f"^--output .*{output}: {message}"):
        judge.outputs_of(str(tmp_path / output), 1, [str(voice)])
    assert judge.outputs_of(str(tmp_path / "new.wav"), 1, []) == [tmp_path / "new.wav"]
    with pytest.raises(UsageError, match=r"many_002\.wav: it exists"):
        judge.outputs_of(str(tmp_path / "many.wav"), 2, [])


def test_earlier_speech_is_replaced_until_somebody_changes_it(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    judge.write(path, torch.zeros(500), RATE)
    judge.write(path, torch.ones(500), RATE)
    written = path.read_bytes()
    assert soundfile.read(path)[0].max() > 0.9
    for content in (written[:-90], written + b"x", written.replace(b"\xff\x7f", b"\0\0", 1), b""):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="it exists"):
            judge.write(path, torch.zeros(9), RATE)
        assert path.read_bytes() == content

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path.write_bytes(written)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="No space left on device"):
        judge.write(path, torch.zeros(9), RATE)
    assert path.read_bytes() == written and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["recordings", "link", "file", "code"])
def test_a_folder_speech_of_somebody_else_stays_where_it_is(tmp_path, kind):
    mine = tmp_path / "speech"
    if kind == "file":
        mine.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        mine.symlink_to("elsewhere")
    else:
        mine.mkdir()
        (mine / ("a.wav" if kind == "recordings" else "__init__.py")).write_text("mine")
    clips = dict.fromkeys(judge.KINDS, (np.zeros(9, np.int16), RATE))
    corpus = SimpleNamespace(texts=["a"], speakers=["b"])
    for _ in range(2):  # the second replaces the first
        assert judge.folder_of(tmp_path) == tmp_path / "speech-2"
        judge.write_corpus(tmp_path / "speech-2", corpus, [clips])
    assert {path.name for path in tmp_path.iterdir()} <= {"speech", "speech-2", "elsewhere"}
