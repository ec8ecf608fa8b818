"""recipes/template.py as a user runs it. test_copying.py adapts copies of it."""

import pytest
import torch

from recipes import template
from speech.writing.alphabet import Characters
from tests import contract
from tests.recipes import runs

SHORT = (*runs.SHORT, "--save_every", "1", "--eval_every", "1")


def test_transcribing_gives_a_line_for_each_file(manifests, wav, tmp_path):
    runs.ran(template, *manifests, *SHORT, "--output_dir", tmp_path)
    paths = [wav(tmp_path / f"{name}.wav", 1.5) for name in "ab"]
    out = runs.ran(template, "--transcribe", *paths, "--output_dir", tmp_path)
    assert [line.split("\t")[0] for line in out.splitlines()] == paths


def test_characters_that_the_model_does_not_have_are_left_out(konkani):
    args = runs.parse(template, "--train_manifest", konkani["train"])
    template.resolve(args)
    corpus = template.read_data(args, Characters())["train"]
    first = corpus.texts[0]
    item = template.Utterances(corpus, template.ModelInfo(8, 1, [first[0]])).item(0, 0)
    assert item["tokens"].tolist() == [0] * first.count(first[0]) and item["text"] == first


def test_a_text_that_is_too_long_for_its_audio_is_in_no_loss(wav, json_lines, tmp_path, capsys):
    """It is not trained on, and a held-out one is scored alone."""
    path = wav(tmp_path / "a.wav", 0.6)  # 15 frames
    rows = [{"audio_filepath": path, "text": text} for text in ("ab", "ba" * 9)]
    manifest = json_lines(tmp_path / "dense.json", rows)
    flags = ("--train_manifest", manifest, "--val_manifest", manifest)
    args = runs.parse(template, *flags, "--output_dir", tmp_path)
    template.resolve(args)
    corpora = template.read_data(args, Characters())
    assert list(corpora["train"].texts) == ["ab"] and len(corpora["val"]) == 2
    assert "1  text is too long for its audio (CTC needs a fr" in capsys.readouterr().out
    info = template.ModelInfo(8, 1, ["a", "b"])
    data = template.Utterances(corpora["val"], info)
    model = template.Network(info).eval()
    dense = [data.item(number, 0) for number in (0, 1)]
    with torch.no_grad():
        results = [
            template.evaluate(model, [contract.moved(template, items)])
            for items in (dense, dense[:1])
        ]
    assert results[0]["ctc"] == pytest.approx(results[1]["ctc"])
    assert results[0]["cer"][1] == 2 + 18


def test_what_a_killed_run_left_of_its_reports_is_removed(manifests, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / ".transcripts.jsonl.abcd1234.tmp").write_text("half")
    (logs / ".notes.abcd1234.tmp").write_text("of the user")
    runs.ran(template, *manifests, *SHORT, "--max_steps", "1", "--output_dir", tmp_path)
    assert [path.name for path in logs.glob(".*.tmp")] == [".notes.abcd1234.tmp"]
