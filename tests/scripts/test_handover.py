"""The table of exports in stock programs: what it says of texts and of waveforms."""

import numpy as np
import pytest
import soundfile

from benchmarks import handover


def test_rows_belong_to_recipes():
    assert {row.recipe for row in handover.ROWS} == {*handover.UPDATES, handover.XTTS}


def test_texts():
    assert handover.compared(["a  b", "c"], ["a b", "c"]) == "the same texts, 2 of 2"
    assert handover.compared(["a", "d"], ["a", "c"]) == "1 of 2 the same; 'd' for 'c'"
    assert handover.compared(["", ""], ["", ""]).startswith("our own texts are empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda theirs: theirs, "the same waveform, 1 of 1 (1.0 s)"),
        (lambda theirs: 0.9 * theirs, "the same waveform, 0 of 1 (1.0 s)"),
        (lambda theirs: theirs[:-9000], "ours.wav: another length, 0.88 s for 1.00 s"),
        (lambda theirs: np.append(theirs, theirs), "ours.wav: another length, 2.50 s for 1.00 s"),
    ],
)
def test_waveforms(change, message, tmp_path):
    """Ours is what is spoken, without the quiet end, and with a fade."""
    spoken = 0.3 * np.random.default_rng(0).normal(size=24_000).clip(-3, 3)
    files = {"theirs": tmp_path / "theirs.wav", "ours": tmp_path / "ours.wav"}
    theirs = change(np.append(spoken, 0.001 * np.ones(6_000)))
    soundfile.write(files["theirs"], theirs, 24_000, subtype="FLOAT")
    faded = spoken * np.clip((24_000 - np.arange(24_000)) / 120, 0, 1)
    soundfile.write(files["ours"], faded, 24_000)
    found = handover.compared_speech([str(files["theirs"])], [str(files["ours"])])
    assert found.startswith(message), found
