"""What --check_data prints, read again. The texts are those of the real command."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from webui import checked
from webui.places import Places

ROOT = Path(__file__).resolve().parents[2]
RATE = 16_000
HARMFUL = "<img src=x onerror=alert(1)>.wav"


def write(path: Path, seconds: float, level: float = 0.3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).uniform(-level, level, round(seconds * RATE))
    soundfile.write(path, noise, RATE)


def corpus(folder: Path) -> Path:
    """A manifest with a row of every kind: what is right is in the lines 1 to 8."""
    rows = []
    for i in range(6):
        write(folder / f"clips/{i}.wav", 6.5)
        rows.append({"audio_filepath": f"clips/{i}.wav", "text": f"one {'x' * i}"})
        rows[-1] |= {"speaker": "ann" if i else "bob", "lang": "en" if i % 2 else ""}
    for i in range(2):
        write(folder / f"clips/eve{i}.wav", 2.2)
        rows.append({"audio_filepath": f"clips/eve{i}.wav", "text": f"two {i}", "speaker": "eve"})
    write(folder / "silent.wav", 2.0, 0.0)
    write(folder / "short.wav", 0.05)
    write(folder / "long.wav", 31)
    write(folder / HARMFUL, 31)
    write(folder / "whole.wav", 3.0)
    clipped = np.clip(np.sin(np.arange(2 * RATE) * 0.05) * 3, -1, 1)
    soundfile.write(folder / "clipped.wav", clipped, RATE)
    (folder / "noise.wav").write_bytes(b"no audio" * 100)
    (folder / "cut.wav").write_bytes((folder / "whole.wav").read_bytes()[:50_000])
    names = ["silent", "short", "long", HARMFUL.removesuffix(".wav"), "clipped", "noise", "cut"]
    for name in [*names, "gone"]:
        rows.append({"audio_filepath": f"{name}.wav", "text": "one", "speaker": "ann"})
    rows.append({"audio_filepath": "clips/1.wav", "text": "", "offset": 1.5, "duration": 2})
    rows.append({"audio_filepath": "clips/2.wav"})
    rows.append({"audio_filepath": "clips/3.wav", "text": "one", "offset": 9})
    lines = [json.dumps(row) for row in rows]
    lines += ['{"audio_filepath": "clips/4.wav", "text":', lines[0]]
    manifest = folder / "train.jsonl"
    manifest.write_text("\n".join(lines), encoding="utf-8")
    return manifest


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    (folder / "runs").mkdir()
    (folder / "data").mkdir()
    return Places(folder / "data", folder / "runs")


@pytest.fixture(scope="module")
def manifest(here):
    return corpus(here.data)


@pytest.fixture(scope="module")
def check(here, manifest):
    """check(recipe, *flags) is (sections, text, examples) of the recipe's --check_data."""

    def run(recipe: str, *flags) -> tuple:
        words = [sys.executable, ROOT / f"recipes/{recipe}.py", "--check_data", *flags]
        words += ["--train_manifest", manifest, "--output_dir", here.runs / "check"]
        output = subprocess.run(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        text = output.stdout.decode()
        sections = checked.read(text)
        return sections, text, checked.examples_of(sections, here, [manifest])

    return run


@pytest.fixture(scope="module")
def report(check):
    return check("template")


def rejected(sections) -> dict:
    found = [each for each in sections if each.title.endswith(" rejected:")]
    assert all(each.has_reasons for each in found)
    return {row.label: row for each in found for row in each.rows}


def test_every_reason_is_read(report):
    sections, _, _ = report
    counts = {label: row.number for label, row in rejected(sections).items()}
    assert {label.split(" (for libsndfile")[0]: count for label, count in counts.items()} == {
        "longer than 30 s (--max_duration)": 2,
        "audio is silent": 1,
        "shorter than 0.1 s (--min_duration)": 1,
        "audio is unreadable": 1,
        "audio is truncated": 1,
        "file is missing": 1,
        "text is empty": 1,
        "no text field": 1,
        "segment ends beyond the file": 1,
        "line is not valid JSON": 1,
    }
    advice = {label for label, row in rejected(sections).items() if row.advice}
    assert {"file is missing", "text is empty"} <= advice and "audio is silent" not in advice
    noted = [row for each in sections if "noted (" in each.title for row in each.rows]
    assert (1, "audio is clipped") in [(row.number, row.label) for row in noted]
    titles = [each.title for each in sections]
    assert "columns used: audio_filepath (audio), text" in titles[0]
    assert titles[1].endswith("1 repeat the audio of another (all are used); 11 rejected:")
    assert titles[-1] == "checked: 9 utterances in train, 1 utterances in val can be used"
    assert not any(each.title.startswith("error: ") for each in sections)


def test_tables_are_read(report):
    sections, _, _ = report
    tables = {each.title: [(row.number, row.label) for row in each.rows] for each in sections}
    assert tables["minutes by speaker:"] == [(0.6, "ann"), (0.2, "bob"), (0.1, "eve")]
    assert tables["minutes by language:"] == [(0.5, "(no language given)"), (0.3, "en")]
    assert tables["utterances by length:"][0] == (3, "2 to 2.5 s")
    assert tables["utterances by length:"][-1] == (7, "6.5 to 7 s")


def test_examples_can_be_played(report, here):
    sections, _, examples = report
    found = {
        label: [examples[text] for text in row.examples]
        for label, row in rejected(sections).items()
    }
    (silent,) = found["audio is silent"]
    assert silent.text.startswith("line 9: silent.wav: at most -") and silent.seconds == 2.0
    assert silent.path == here.data / "silent.wav"
    long, harmful = found["longer than 30 s (--max_duration)"]
    assert long.text == "line 11: long.wav (31.00 s)" and long.seconds == checked.LONGEST
    assert harmful.path == here.data / HARMFUL
    (empty,) = found["text is empty"]
    assert (empty.offset, empty.seconds) == (1.5, 2.0)
    (without,) = found["no text field"]
    assert without.path == here.data / "clips/2.wav" and without.text == "line 18: clips/2.wav"
    (beyond,) = found["segment ends beyond the file"]
    assert (beyond.offset, beyond.seconds) == (0.0, 6.5)
    for label in ("file is missing", "audio is truncated", "line is not valid JSON"):
        assert found[label][0].path is None and found[label][0].text.startswith(
            ("line 1", "line 2")
        )
    assert all(here.file(each.path) for each in examples.values() if each.path)


def test_examples_outside_are_not_played(report, manifest, tmp_path):
    sections, _, _ = report
    other = Places(tmp_path, tmp_path)
    examples = checked.examples_of(sections, other, [manifest])
    assert not any(example.path for example in examples.values())


def test_a_failure_is_read(check, tmp_path):
    sections, _, _ = check("template", "--max_duration", "0.2")
    assert sections[-1].title.startswith("error: train set (")
    assert "no usable utterance" in sections[-1].title
    assert rejected(sections)  # also then


def test_paths_without_a_line(here, manifest):
    name = here.data / "clips/0.wav"
    table = f"        1  too fast\n           {name} at 1.25 s: 30 letters: a second\n"
    sections = checked.read(f"train set, checked as speech: 1 rejected:\n{table}")
    (example,) = checked.examples_of(sections, here, [manifest]).values()
    assert example.text == "0.wav at 1.25 s: 30 letters: a second"
    assert (example.path, example.offset, example.seconds) == (name, 1.25, 5.25)
    for path in ("/etc/passwd", os.devnull, "x" * 5000):
        sections = checked.read(f"s\n        1  r\n{' ' * 11}{path}: bad\n")
        (example,) = checked.examples_of(sections, here, []).values()
        assert example.path is None and example.text == f"{path}: bad"
    assert math.isclose(checked.read("t:\n      1.5  a")[0].rows[0].number, 1.5)
