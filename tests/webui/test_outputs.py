"""What a run has written, also when it is damaged, huge or half written."""

import json
import os
from pathlib import Path

from webui import outputs


def test_the_log_is_text(tmp_path):
    data = b"a\r\n 10%\r 20%\r 30%\r\nred \x1b[1;31mtext\x1b[0m\x1b]0;title\x07\n\xff\x00\x07<b>\t\xe1\x88\x80"
    (tmp_path / "run.log").write_bytes(data + b"\n")
    assert outputs.log(tmp_path) == "a\n 30%\nred text\n\ufffd<b>\t\u1200"
    assert outputs.log(tmp_path, 1) == "\ufffd<b>\t\u1200"


def test_a_huge_log_is_read_from_its_end(tmp_path):
    with open(tmp_path / "run.log", "wb") as file:
        file.truncate(1 << 34)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"x" * 100_000 + b"\nlast")
    assert outputs.log(tmp_path) == "x" * outputs.LINE + "...\nlast"
    with open(tmp_path / "run.log", "ab") as file:
        file.write(b"y" * (1 << 20))
    assert outputs.log(tmp_path) == "y" * outputs.LINE + "..."


def write_metrics(folder: Path, lines: list[str], stage: str = "") -> Path:
    logs = folder / "logs" / stage
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "metrics.jsonl").write_text("\n".join(lines))
    return logs / "metrics.jsonl"


def test_metrics_survive_what_a_file_may_have(tmp_path):
    lines = [
        '{"step": 10, "train/loss": 2.5, "train/text": "a", "epoch": 0}',
        '{"step": 10, "eval/cer": 0.5}',
        '{"step": 11, "event": "skipped", "file": "\\"train/x\\"", "reason": "gone"}',
        '{"step": 20, "train/loss": NaN, "train/learning_rate": 1e-3}',
        '{"step": 30, "train/loss": Infinity, "train/big": 1' + "0" * 400 + "}",
        '{"step": 40, "train/loss": 1',
    ]
    write_metrics(tmp_path, lines)
    assert outputs.metrics(tmp_path) == [
        {"step": 10, "train/loss": 2.5, "epoch": 0},
        {"step": 10, "eval/cer": 0.5},
        {"step": 20, "train/learning_rate": 1e-3},
    ]


def test_of_many_metrics_some_are_taken(tmp_path):
    lines = [f'{{"step": {n}, "train/loss": {n / 7}}}' for n in range(1, 100_001)]
    lines[500::1000] = [f'{{"step": {n}, "eval/loss": 1.0}}' for n in range(500, 100_000, 1000)]
    write_metrics(tmp_path, lines)
    rows = outputs.metrics(tmp_path)
    assert outputs.POINTS < len(rows) < 2 * outputs.POINTS + 110
    assert sum("eval/loss" in row for row in rows) == 100
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert rows[-1] == {"step": 100_000, "train/loss": 100_000 / 7}


def test_transcripts(tmp_path):
    assert outputs.transcripts(tmp_path) == []
    (tmp_path / "logs").mkdir()
    row = {"file": "a.wav", "reference": "a", "hypothesis": "b", "words": []}
    lines = [json.dumps(row), "[]", '{"file": 1}', '{"file": "half']
    (tmp_path / "logs" / "transcripts.jsonl").write_text("\n".join(lines))
    assert outputs.transcripts(tmp_path) == [row]
