"""Texts that CTC cannot align with their audio."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from speech.data import feasible
from tests.speech.data.test_checks import make_corpus


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 12))
def test_a_finite_loss_is_a_text_that_fits(tokens, frames):
    log_probs = torch.zeros(frames, 1, 4).log_softmax(-1)
    loss = F.ctc_loss(log_probs, torch.tensor([tokens]), [frames], [len(tokens)], blank=3)
    assert feasible.fits(frames, tokens) == bool(torch.isfinite(loss))
    assert feasible.targets(frames, tokens) == len(tokens) * bool(torch.isfinite(loss))


def ten_a_second(seconds: float) -> int:
    return int(10 * seconds)


def test_training_leaves_them_out_and_evaluation_only_says_so(capsys):
    rows = [("abc", 1.0, ""), ("abcdefghijk", 1.0, ""), ("aabb", 0.5, ""), ("?", 1.0, "")]
    corpora = {name: make_corpus(rows) for name in ("train", "replay", "val")}
    found = feasible.without_infeasible(corpora, ten_a_second, False, list, "?")
    assert list(found["train"].texts) == list(found["replay"].texts) == ["abc"]
    assert found["val"] is corpora["val"]
    out = capsys.readouterr().out
    assert "train set: 1 utterances" in out and "/data/1.wav: 11 tokens in 1.00 s" in out
    assert "val set: 2 noted (all are used):" in out and out.count("in no CTC loss") == 1
    kept = feasible.without_infeasible(corpora, ten_a_second, True, trained=())
    assert kept == corpora and "rejected" not in capsys.readouterr().out
    with pytest.raises(DataError, match="strict_data"):
        feasible.without_infeasible(corpora, ten_a_second, True)
    clean = {"train": make_corpus(rows[:1])}
    capsys.readouterr()
    assert feasible.without_infeasible(clean, ten_a_second, True) == clean
    assert capsys.readouterr().out == ""
