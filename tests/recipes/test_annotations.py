"""Recordings with files of ELAN and Praat in a training that is resumed. How they are read:
tests/speech/data/annotations."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from praatio import textgrid
from pympi import Elan

from recipes import template
from tests.recipes import runs

SHORT = (*runs.SHORT, "--save_every", "1", "--eval_every", "1")
PAUSE = 0.5  # seconds between clips


def joined(manifest: str, path: Path) -> list[tuple[float, float, str]]:
    """Writes all clips of a manifest as one recording, and returns their times and texts."""
    pieces, parts = [], []
    at = 0
    for line in Path(manifest).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        samples, rate = soundfile.read(Path(manifest).parent / row["audio_filepath"])
        step = rate // 50  # 20 ms: ELAN's times are whole milliseconds
        samples = samples[: len(samples) // step * step]
        end = at + len(samples)
        parts.append((round(at / rate, 3), round(end / rate, 3), row["text"]))
        pieces += [samples, np.zeros(round(PAUSE * rate))]
        at = end + round(PAUSE * rate)
    soundfile.write(path, np.concatenate(pieces), rate)
    return parts


@pytest.fixture(scope="module")
def recordings(konkani, tmp_path_factory):
    """A folder with train.eaf, of two speakers, val.TextGrid in UTF-16, and
    JSON Lines of the same utterances."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in ("train", "val"):
        parts = joined(konkani[name], folder / f"{name}.wav")
        rows = [
            {
                "audio_filepath": f"{name}.wav",
                "offset": a,
                "duration": round(b - a, 6),
                "text": text,
            }
            for a, b, text in parts
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        if name == "train":
            write_eaf(folder / "train.eaf", parts)
        else:
            grid = textgrid.Textgrid()
            grid.addTier(textgrid.IntervalTier("text", parts, 0, parts[-1][1] + PAUSE))
            grid.save(str(folder / "val.TextGrid"), "long_textgrid", includeBlankSpaces=True)
            text = (folder / "val.TextGrid").read_text(encoding="utf-8")
            (folder / "val.TextGrid").write_text(text, encoding="utf-16")
    return folder


def write_eaf(path: Path, parts: list[tuple[float, float, str]]) -> None:
    file = Elan.Eaf()
    file.remove_tier("default")
    for number, who in enumerate(("Anna", "Berta")):
        file.add_tier(f"tx@{who}", part=who)
        for start, end, text in parts[number::2]:
            file.add_annotation(f"tx@{who}", round(1000 * start), round(1000 * end), text)
    file.add_linked_file("file:///D:/tapes/train.wav", relpath="./train.wav")
    file.to_file(str(path))


def flags(recordings, train: str, val: str) -> list[str]:
    return ["--train_manifest", recordings / train, "--val_manifest", recordings / val]


def test_training_and_resuming_are_those_of_a_manifest_to_the_bit(recordings, tmp_path):
    data = [*flags(recordings, "*.eaf", "val.TextGrid"), "--tier", "tx@*", "text"]
    runs.ran(template, *data, *SHORT, "--max_steps", "1", "--output_dir", tmp_path / "a")
    runs.ran(template, *data, *SHORT, "--resume", "auto", "--output_dir", tmp_path / "a")
    same = flags(recordings, "train.jsonl", "val.jsonl")
    runs.ran(template, *same, *SHORT, "--max_steps", "1", "--output_dir", tmp_path / "b")
    runs.ran(template, *same, *SHORT, "--resume", "auto", "--output_dir", tmp_path / "b")
    runs.assert_same_state(*(runs.newest(tmp_path / name, template) for name in "ab"))
