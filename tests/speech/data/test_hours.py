"""The hours of a manifest, as the preset scripts ask for them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speech.data import hours

PROGRAM = Path(hours.__file__)


def rows(count: int, **more) -> list[dict]:
    return [{"audio_filepath": f"{n}.wav", "text": "a", **more} for n in range(count)]


def answer(*words) -> tuple[int, str, str]:
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout, result.stderr


def test_durations_are_the_manifests_or_else_the_files(tmp_path, wav, json_lines):
    wav(tmp_path / "0.wav", seconds=3.0)
    wav(tmp_path / "elsewhere/1.wav", seconds=5.0, rate=8000)
    lines = [*rows(2), *rows(3, duration=2.5), *rows(1, duration=None), *rows(1, duration="x")]
    manifest = Path(json_lines(tmp_path / "m.json", [*lines, b"no row", {"text": "a"}]))
    # Twice 0.wav, and 1.wav, which is found in the folder.
    assert hours.hours_of(manifest) * 3600 == pytest.approx(2 * 3.0 + 5.0 + 3 * 2.5)
    there = hours.hours_of(manifest, str(tmp_path / "elsewhere")) * 3600
    assert there == pytest.approx(5.0 + 3 * 2.5)
    json_lines(tmp_path / "ms.json", rows(1, start=500, end=2500))
    assert hours.hours_of(tmp_path / "ms.json") * 3600 == pytest.approx(2.0)
    assert answer(tmp_path / "ms.json", tmp_path / "ms.json")[1] == "small_data 0.0011\n"
    table = tmp_path / "m.csv"
    table.write_text("audio_file|text|speaker_name\n0.wav|a|b\n0.wav|a|b\n")
    assert hours.hours_of(table) * 3600 == pytest.approx(6.0)
    (tmp_path / "splits").mkdir()
    (tmp_path / "metadata.csv").write_text("audio_file,text,duration\na.wav,CQ,9\n")
    assert hours.hours_of(tmp_path) * 3600 == pytest.approx(9.0)
    (tmp_path / "splits/train.csv").write_text("audio_file,text\n0.wav,CQ\n")
    assert hours.hours_of(tmp_path) * 3600 == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (7190, "small_data 2\n"),
        (7210, "medium_data 2\n"),
        (72_000, "large_data 20 or more\n"),
        (30, "small_data 0.0083\n"),
    ],
)
def test_the_word_for_so_many_hours(tmp_path, json_lines, seconds, words):
    manifest = json_lines(tmp_path / "m.json", rows(10, duration=seconds / 10))
    assert answer(manifest) == (0, words, "")


def test_a_part_of_a_manifest(tmp_path, json_lines):
    manifest = json_lines(tmp_path / "m.json", rows(3000, duration=360.0))
    for samples, words in ((10, "small_data 1"), (100, "medium_data 10"), (-1, "large_data 20 or")):
        assert answer(manifest, "--max_samples", samples)[1].startswith(words)


def test_reading_ends_where_the_answer_is_certain(tmp_path):
    line = json.dumps(rows(1, duration=60.0)[0]) + "\n"
    (tmp_path / "m.json").write_text(line * 400_000)
    started = time.process_time()
    assert hours.hours_of(tmp_path / "m.json", enough=20) == pytest.approx(2048 / 60)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("content", [None, b"", b"nothing", b"PK\3\4", b'{"text": "a"}\n'])
def test_what_cannot_be_read_is_not_known(tmp_path, content):
    if content is not None:
        (tmp_path / "m.json").write_bytes(content)
    assert answer(tmp_path / "m.json") == (1, "", "")


def test_torch_and_the_current_folder_are_not_imported(tmp_path, json_lines):
    manifest = json_lines(tmp_path / "m.json", rows(1, duration=9.0))
    for name in ("speech", "common", "numpy", "json", "manifest"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    code = [sys.executable, "-X", "importtime", str(PROGRAM), manifest]
    result = subprocess.run(code, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == "small_data 0.0025\n"
    assert "torch" not in result.stderr and "numpy" in result.stderr
