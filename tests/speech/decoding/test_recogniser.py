"""Transcripts of files whose decoder returns records with timed parts, or plain texts; results."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from common.device import Setup
from speech.data.columns import Codes
from speech.decoding import recogniser, results, transcribing, transcripts
from speech.morse import scores
from speech.signal.audio import SAMPLE_RATE
from speech.writing import metrics
from speech.writing.text import for_scoring, in_lower_case

LONGEST = 4.0  # seconds of a piece
# The words of a recording, (start, end) in seconds. The silence in the middle is longer than two
# pieces.
WORDS = [
    (0.5, 1.25),
    (1.5, 2.0),
    (2.5, 3.5),
    (4.0, 5.0),
    (15.125, 16.0),
    (16.5, 17.75),
    (18.0, 19.5),
    (20.0, 20.25),
]
SECONDS = 20.5


@pytest.fixture
def spoken(tmp_path):
    """A recording with word `i` at the amplitude (i + 1) / 16."""
    waveform = np.zeros(int(SECONDS * SAMPLE_RATE), dtype=np.float32)
    for i, (start, end) in enumerate(WORDS):
        waveform[int(start * SAMPLE_RATE) : int(end * SAMPLE_RATE)] = (i + 1) / 16
    soundfile.write(tmp_path / "spoken.wav", waveform, SAMPLE_RATE)
    return str(tmp_path / "spoken.wav")


def heard(waveform: torch.Tensor) -> list[dict]:
    """The words of a piece, with their times in it."""
    words = []
    for number in sorted({round(16 * value) for value in waveform.unique().tolist()} - {0}):
        samples = (waveform * 16).round().eq(number).nonzero()
        start, end = int(samples[0]) / SAMPLE_RATE, (int(samples[-1]) + 1) / SAMPLE_RATE
        words.append({"start": start, "end": end, "text": f"w{number}"})
    return words


class Decoder:
    """Decodes to records, or with `plain` to texts. Remembers the number of pieces of each
    batch."""

    def __init__(self, plain: bool = False):
        self.plain = plain
        self.sizes = []

    def __call__(self, batch: dict) -> list[str | dict]:
        self.sizes.append(len(batch["audio"]))
        records = []
        for waveform, length in zip(batch["audio"], batch["audio_lengths"], strict=True):
            assert length <= LONGEST * SAMPLE_RATE
            words = heard(waveform[:length])
            text = " ".join(word["text"] for word in words)
            segment = {"start": words[0]["start"], "end": words[-1]["end"], "text": text}
            records.append(
                text if self.plain else {"text": text, "words": words, "segments": [segment]}
            )
        return records


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def transcribe(paths: list[str], decode: Decoder, output=None) -> None:
    how = recogniser.DecodingOptions(
        transcribe=paths, output=str(output) if output else None, batch_size=2
    )
    transcribing.transcribe_files(how, decode, Setup(), LONGEST)


def test_words_and_segments_have_times_in_the_recording(spoken, tmp_path):
    decode = Decoder()
    transcribe([spoken], decode, tmp_path / "out.jsonl")
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert list(row) == ["file", "text", "seconds", "pieces", "words", "segments"]
    assert (row["file"], row["seconds"]) == (spoken, SECONDS)
    expected = [
        {"start": start, "end": end, "text": f"w{i + 1}"} for i, (start, end) in enumerate(WORDS)
    ]
    assert row["words"] == expected and row["text"] == "w1 w2 w3 w4 w5 w6 w7 w8"
    # Pieces without a sound are not decoded, and have no parts.
    pieces = row["pieces"]
    audible = [piece for piece in pieces if piece["text"]]
    assert (
        len(pieces) - len(audible) >= 2
        and sum(decode.sizes) == len(audible) >= 4
        and max(decode.sizes) == 2
    )
    assert [segment["text"] for segment in row["segments"]] == [piece["text"] for piece in audible]
    for piece, segment in zip(audible, row["segments"], strict=True):
        words = [
            word
            for word in expected
            if piece["start"] <= word["start"] and word["end"] <= piece["end"]
        ]
        times = {"start": words[0]["start"], "end": words[-1]["end"]}
        assert segment == {**times, "text": " ".join(word["text"] for word in words)}


def test_plain_texts_have_no_parts(spoken, tmp_path):
    transcribe([spoken], Decoder(), tmp_path / "records.jsonl")
    transcribe([spoken], Decoder(plain=True), tmp_path / "plain.jsonl")
    (record,), (plain,) = rows_of(tmp_path / "records.jsonl"), rows_of(tmp_path / "plain.jsonl")
    assert list(plain) == ["file", "text", "seconds", "pieces"] and plain.items() <= record.items()


# --- results --------------------------------------------------------------------------------------

TEXTS = {
    "vi": [("Hôm nay trời đẹp.", "hôm nay trời dẹp"), ("Xin chào!", "xin chào")],
    "kok": [("हांव घर वचता", "हांव घर वचता"), ("तूं कसो आसा", "तूं कसो आसां")],
}


def printed(language, tmp_path, capsys, normalise=for_scoring, **how):
    """The lines that are printed before the examples, and the rows of transcripts.jsonl."""
    rows = [
        {"file": f"{i}.wav", "seconds": 1.0, "reference": said, "hypothesis": heard, "index": i}
        for i, (said, heard) in enumerate(TEXTS[language])
    ]
    how = recogniser.DecodingOptions(log_dir=tmp_path, **how)
    results.print_results(rows, "test set", how, normalise)
    lines = capsys.readouterr().out.strip().split("\n  reference:")[0].splitlines()
    return lines, rows_of(tmp_path / "transcripts.jsonl")


def heads(lines):
    """The names of the readings, and the first number of each error rate."""
    return [line.split()[1] if line[:3] in ("WER", "CER") else line for line in lines[2:]]


def test_results_keep_the_recipes_reading_and_add_one_in_lower_case(tmp_path, capsys):
    lines, rows = printed("vi", tmp_path, capsys)
    own, lower = "case kept, no punctuation", "lower case, no punctuation"
    assert heads(lines) == [f"{own}:", "50.00", "12.50", f"{lower}:", "16.67", "4.17"]
    assert rows[0]["errors"] == {
        own: {"words": [2, 4], "characters": [2, 16]},
        lower: {"words": [1, 4], "characters": [1, 16]},
    }
    lines, rows = printed("vi", tmp_path, capsys, in_lower_case)
    assert heads(lines) == ["16.67", "4.17"] and list(rows[0]["errors"]) == [lower]
    lines, rows = printed("kok", tmp_path, capsys)
    assert lines[-1] == f"{lower}: the same"
    lines, rows = printed("kok", tmp_path, capsys, scores.for_scoring)
    assert len(lines) == 4 and list(rows[0]["errors"]) == ["as sent"]


def test_a_set_of_several_languages_has_the_error_rates_of_each(tmp_path, capsys):
    pairs = [("a b", "a b"), ("a b", "a"), ("c d", "x d"), ("e", "e")]
    rows = [
        {"file": f"{i}", "seconds": 1.0, "reference": said, "hypothesis": heard, "index": 3 - i}
        for i, (said, heard) in enumerate(pairs)
    ]
    how = recogniser.DecodingOptions(log_dir=tmp_path)
    results.print_results(rows, "test set", how, languages=Codes(["", "vi", "kok", "kok"]))
    out = capsys.readouterr().out
    lines = out[out.index("by language:") :].splitlines()[2:5]
    assert [" ".join(line.split()[:5]) for line in lines] == [
        "(no language given) 1 0.00",
        "kok 2 25.00 (0.00 to",
        "vi 1 50.00 - 33.33",
    ]
    noted = json.loads((tmp_path / "results.json").read_text())["languages"]
    assert {name: each["utterances"] for name, each in noted.items()} == {"": 1, "kok": 2, "vi": 1}
    assert noted["kok"]["wer"]["errors"] == 1 and noted["kok"]["wer"]["length"] == 4
    languages = [row["language"] for row in rows_of(tmp_path / "transcripts.jsonl")]
    assert languages == ["kok", "kok", "vi", ""]
    results.print_results(rows, "test set", how, languages=Codes(["vi"] * 4))
    assert "by language" not in capsys.readouterr().out
    assert "languages" not in json.loads((tmp_path / "results.json").read_text())


def test_an_interval_can_be_computed_from_the_file(tmp_path, capsys):
    lines, rows = printed("vi", tmp_path, capsys)
    pairs = [row["errors"]["case kept, no punctuation"]["words"] for row in rows]
    errors = [metrics.Errors(substitutions=wrong, length=length) for wrong, length in pairs]
    (ends,) = metrics.intervals([errors])
    assert metrics.shown(ends).strip() in lines[3]


def test_whispers_normaliser_warns_of_scripts_that_it_breaks(tmp_path, capsys):
    whisper = "Whisper's multilingual normaliser"
    lines, _ = printed("vi", tmp_path, capsys, normaliser="whisper")
    assert heads(lines)[-3:] == [f"{whisper}:", "16.67", "4.17"] and "warning" not in "".join(lines)
    lines, rows = printed("kok", tmp_path, capsys, normaliser="whisper")
    assert "warning: Whisper's multilingual normaliser" in lines[1] and "37 % of its" in lines[1]
    # The mark that is wrong is not compared.
    assert lines[-2].split()[1] == "0.00" and rows[1]["errors"][whisper]["words"][0] == 0


def test_an_improvement_has_the_readings_of_the_results(tmp_path, capsys):
    rows = [{"reference": said, "hypothesis": heard} for said, heard in TEXTS["vi"]]
    before = [{**row, "hypothesis": ""} for row in rows]
    printed("vi", tmp_path, capsys)
    results.print_improvement(before, rows, "other", recogniser.DecodingOptions(log_dir=tmp_path))
    lines = capsys.readouterr().out.splitlines()
    noted = results.read_results(tmp_path)
    assert noted["title"] == "test set"
    rates = [noted[key]["lower case, no punctuation"]["wer"] for key in ("before", "rates")]
    assert [(each["errors"], each["length"]) for each in rates] == [(6, 6), (1, 6)]
    assert (rates[1]["rate"], rates[1]["low"]) == (1 / 6, 0)
    assert (
        lines[0] == "compared to other on the same 2 utterances:"
        and lines[5] == "lower case, no punctuation:"
    )
    assert lines[3].split()[:3] == ["WER", "100.00%", "50.00%"]
    assert lines[6].split()[:3] == ["WER", "100.00%", "16.67%"]


def test_an_export_finds_the_results_of_its_own_weights(tmp_path):
    weights, others = tmp_path / "best.safetensors", tmp_path / "others.safetensors"
    assert results.results_of(tmp_path, weights, are_new=False) is None
    rows = [{"file": "a", "seconds": 1.0, "reference": "a", "hypothesis": "a", "index": 0}]
    results.print_results(rows, "test set", recogniser.DecodingOptions(log_dir=tmp_path))
    weights.write_bytes(b"1")
    others.write_bytes(b"1")
    assert results.results_of(tmp_path, weights, are_new=False) is None
    found = results.results_of(tmp_path, weights, are_new=True)
    assert found["title"] == "test set"
    assert results.results_of(tmp_path, weights, are_new=False) == found
    assert results.results_of(tmp_path, others, are_new=False) is None
    weights.write_bytes(b"22")
    assert results.results_of(tmp_path, weights, are_new=False) is None


def test_transcripts_name_recordings_relative_to_their_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    transcripts.write(Path("out/a.jsonl"), [{"file": "b/a.wav"}, {"file": "/c.wav"}])
    rows = map(json.loads, Path("out/a.jsonl").read_text().splitlines())
    assert [row["file"] for row in rows] == ["../b/a.wav", "/c.wav"]


def test_augmentation_follows_what_is_written_and_what_is_learned_by_heart():
    share = recogniser.augmented_share
    assert [share(cer, 0, False) for cer in (1.2, 0.5, 0.45, 0.25, 0.0)] == [0, 0, 0.1, 0.5, 1]
    assert (
        share(0.5, 0, True) == 0.2 and share(0.5, 0.2, True) == 0.4 and share(0.1, 0, True) == 0.8
    )
    assert share(0.5, 0.9, True) == 1
    assert share(0.8, 0.2, True) == 0  # it writes nothing yet
