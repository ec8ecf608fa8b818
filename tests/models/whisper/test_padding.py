"""Padding to the longest input: which utterances, how, and what is said of it."""

from types import SimpleNamespace

import numpy as np
import torch

from models.whisper.model import HOP
from models.whisper.padding import Padding, note_longer_epochs
from speech.signal.audio import SAMPLE_RATE


def test_what_is_padded_ends_in_silence_or_in_zeros_for_features():
    padding = Padding(seed=1, count=200, longest=2.0, share=0.3, always=False)
    padding.begin = 3
    assert not padding.padded(2).any() and 40 < padding.padded(3).sum() < 80
    waveform = torch.ones(SAMPLE_RATE)
    limit = 2 * SAMPLE_RATE
    seen = set()
    for index in range(200):
        made = padding.pad(waveform, index, 3)
        is_padded = bool(padding.padded(3)[index])
        assert len(made["audio"]) == (limit if is_padded else SAMPLE_RATE)
        assert made["audio"].sum() == SAMPLE_RATE
        assert padding.lengths(np.ones(200), 3)[index] * SAMPLE_RATE == len(made["audio"])
        assert made["fill_from"] in (limit // HOP, SAMPLE_RATE // HOP)
        seen.add((is_padded, made["fill_from"] == SAMPLE_RATE // HOP))
    assert seen == {(True, True), (True, False), (False, False)}
    always = Padding(seed=1, count=200, longest=2.0, share=0.3, always=True)
    assert always.padded(0).all() and 70 < always.filled(0).sum() < 130


def test_from_which_update_on_epochs_are_longer_is_said(capsys):
    padding = Padding(seed=1, count=100, longest=30.0, share=0.2, always=False)
    data = SimpleNamespace(seconds=lambda epoch: padding.lengths(np.full(100, 2.0), epoch))
    batches = SimpleNamespace(data=data, count=lambda first, last: 13 * (last - first))
    note_longer_epochs(batches, 0)
    padding.begin = 2
    note_longer_epochs(batches, 1)
    assert not capsys.readouterr().out
    note_longer_epochs(batches, 2)
    ratio = data.seconds(2).sum() / data.seconds(1).sum()
    assert f"from update 27 on (--pad_share), an epoch has {ratio:.1f} times" in (
        capsys.readouterr().out
    )
