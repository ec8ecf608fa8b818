"""The benchmark that takes a new language through the recipes: its texts, and what it keeps of a
run."""

import json

import numpy as np
import pytest

from benchmarks import new_language


@pytest.mark.parametrize("is_english", [False, True])
def test_what_is_said_has_neither_numbers_nor_signs(is_english):
    random = np.random.default_rng(1)
    pairs = [new_language.sentence(random, (6, 14), is_english) for _ in range(200)]
    written, said = map(" ".join, zip(*pairs, strict=True))
    assert {"5G", "COVID"} <= set(written.replace("።", " ").split())
    assert '"' in written and "$" in written
    assert all(letter.isalpha() or letter == " " for letter in said)
    assert all(pair[0][-1] in ".?!።" for pair in pairs)


def test_error_rates_ignore_case_and_punctuation_and_are_split_by_language():
    rows = [
        {"reference": "Red sun.", "hypothesis": "red sun"},
        {"reference": "ሰላም ነው!", "hypothesis": "ሰላም"},
    ]
    rates = new_language.error_rates(rows)
    assert rates["wer English"] == rates["cer English"] == 0.0
    assert rates["wer Amharic"] == 50.0 and rates["wer"] == 25.0


def test_what_is_kept_of_a_run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    lines = [
        {"step": 0, "eval/cer": 1.0},
        {"step": 5, "train/loss": 1.0},
        {"step": 6, "eval/cer": 0.5},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "logs" / "metrics.jsonl").write_text(text)
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": 6, "cer": 0.5}')
    (tmp_path / "log.txt").write_text(
        "step 1/6  loss 2  lr 1e-04  3\nstep 5/6  loss 1  lr 2e-05  3\n"
    )
    # A user's flag comes after the preset's.
    words = "--batch_size 4 --gradient_accumulation_steps 4 --batch_size 2".split()
    row = new_language.results_of(tmp_path, words, [{}] * 24)
    assert (row["update"], row["updates"], row["epochs"]) == (8, 6, 2.0)
    assert (row["rate"], row["evaluations"]) == (1e-4, 2)
    assert row["first"]["eval/cer"] == 1.0 and row["best"]["cer"] == 0.5 and "test" not in row


def test_the_table_has_failed_runs_too(tmp_path, capsys):
    row = {"family": "parakeet", "code": ".", "flags": "0.6b", "minutes": 0.1}
    for name in ("as it is", "bpe", "stopped"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    new_language.keep(tmp_path, "stopped", {**row, "status": 143})
    new_language.keep(tmp_path, "as it is", {**row, "status": 1, "message": "error: a | b"})
    done = {"update": 16, "test": {"cer": 4.25}}
    new_language.keep(tmp_path, "bpe", {**row, **done, "status": 0})
    new_language.table(tmp_path)
    printed = capsys.readouterr().out
    assert "| as it is | `0.6b` | error: a / b |" in printed
    assert "| bpe | `0.6b` | 16 | - |" in printed and " 4.25 |" in printed
    assert "stopped" not in printed
