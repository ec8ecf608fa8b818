"""The benchmark that judges the speech of XTTS's demo: its data, its scores and its limits, with a
judge that is a stand-in."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import xtts_demo
from common.errors import RunError, UsageError
from speech import demo

SENTENCES = ["ሥጋ በላ", "ፀሐይ ሰማይ", "ቡና ጠጣ", "ውሃ", "ዳቦ በላ ዛሬ", "ሰው መጣ"]


@pytest.fixture
def spoken(tmp_path, wav, json_lines) -> Path:
    """A demo's folder: six training clips, and three held-out sentences that were spoken."""
    folder = tmp_path / "run"
    rows = []
    for number, sentence in enumerate(SENTENCES):
        wav(folder / f"data/amharic/audio/{number}.wav", 0.2, 22_050)
        rows.append({"audio_filepath": f"audio/{number}.wav", "text": sentence})
    json_lines(folder / "data/amharic/train.json", rows)
    for kind in xtts_demo.KINDS:
        lines = ["audio_file|text|speaker_name"]
        for number, sentence in enumerate(("ነጭ ፀሐይ", "አዲስ ቤት ዛሬ", "ላም")):
            wav(folder / f"speech/{number}_{kind}.wav", 0.1)
            lines.append(f"{number}_{kind}.wav|{sentence}|am")
        (folder / f"speech/{kind}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def small(monkeypatch):
    """Two training clips of which the first is copied, and as many to evaluate on."""
    monkeypatch.setattr(xtts_demo, "HELD_BACK", 2)
    monkeypatch.setattr(xtts_demo, "COPIED", {"train": 1, "val": 1})


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_letters_that_sound_alike_become_one():
    assert xtts_demo.fold("ሐኀኸሃሓኃኻሀ ሁሑኁኹ ህሕኅኽ ሆሖኆኾ") == "ሀሀሀሀሀሀሀሀ ሁሁሁሁ ህህህህ ሆሆሆሆ"
    assert xtts_demo.fold("ሠሥሶ ዐዓአኣ ዕእ ፀጸ ፅጽ።") == "ሰስሶ አአአአ እእ ጸጸ ጽጽ"
    assert xtts_demo.fold("ሀ ሻ ቃ ኸኧ ጠጨ") == "ሀ ሻ ቃ ሀኧ ጠጨ"  # others stay apart


def test_the_words_of_the_demo_stay_different():
    assert len({xtts_demo.fold(word) for word in demo.AMHARIC_WORDS}) == len(demo.AMHARIC_WORDS)


def test_the_judge_trains_on_folded_training_clips_and_copies_and_evaluates_on_others(
    spoken, small, tmp_path
):
    folder = tmp_path / "judge" / "data"
    assert xtts_demo.write_data(spoken, folder) is False
    train, val = (read_lines(folder / f"{split}.json") for split in ("train", "val"))
    assert [row["text"] for row in train] == [*map(xtts_demo.fold, SENTENCES[:4])] + [
        "ስጋ በላ"
    ] * xtts_demo.REPEATS
    assert [row["text"] for row in val] == ["ዳቦ በላ ዛሬ", "ሰው መጣ", "ዳቦ በላ ዛሬ"]
    assert not {row["audio_filepath"] for row in train} & {row["audio_filepath"] for row in val}
    assert all((folder / row["audio_filepath"]).is_file() for row in train + val)
    before = (folder / "train_000.wav").stat().st_mtime_ns
    assert xtts_demo.write_data(spoken, folder) is True
    assert (folder / "train_000.wav").stat().st_mtime_ns == before


def test_a_copy_has_the_mel_features_of_its_clip(tmp_path):
    samples = demo.espeak().say("ሰላም", "am+m1")
    source, copy = tmp_path / "source.wav", tmp_path / "copy.wav"
    xtts_demo.write_wav(source, samples, 22_050)
    xtts_demo.copy_clip(str(source), copy)
    waveforms = [xtts_demo.read_audio(str(path), 22_050) for path in (source, copy)]
    mel = xtts_demo.Mel("dvae", xtts_demo.torch.ones(80))
    first, second = (mel(waveform[None])[0, :, : len(samples) // 256] for waveform in waveforms)
    assert 0 < len(waveforms[1]) - len(samples) <= 256
    assert (first - second).abs().mean() < 0.4 < (first - first.mean()).abs().mean()


def stand_in(monkeypatch, cers: list[float], mistakes: dict[str, str]) -> list[tuple]:
    """Replaces the recipe by a judge whose trainings end with `cers`, and that hears `mistakes`
    {clip: text} and the rest well. A clip whose mistake is None is rejected. Returns the list that
    collects its command lines."""
    calls = []

    def run(*words) -> None:
        calls.append(words := [*map(str, words)])
        if "--evaluate" in words:
            logs = Path(words[words.index("--log_dir") + 1])
            logs.mkdir()
            rows = read_lines(Path(words[words.index("--test_manifest") + 1]))
            heard = [
                (row, mistakes.get(Path(row["audio_filepath"]).name, row["text"])) for row in rows
            ]
            lines = [
                {"file": row["audio_filepath"], "hypothesis": text}
                for row, text in heard
                if text is not None
            ]
            (logs / "transcripts.jsonl").write_text(
                "\n".join(map(json.dumps, lines)), encoding="utf-8"
            )
            return
        folder = Path(words[words.index("--output_dir") + 1]) / "checkpoints"
        folder.mkdir(exist_ok=True)
        summary = {"cer": cers[len(calls) - 1], "step": int(words[words.index("--max_steps") + 1])}
        (folder / "best.json").write_text(json.dumps(summary))

    monkeypatch.setattr(xtts_demo, "run_recipe", run)
    return calls


def judge(monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(
        sys, "argv", ["xtts_demo.py", "--demo_dir", str(folder), "--judge_steps", "7"]
    )
    xtts_demo.main(xtts_demo.parse_arguments())


def test_a_good_demo_gives_a_table(spoken, small, monkeypatch, capsys):
    # The sentences have 6 + 9 + 2 characters. Letters that sound alike are not mistakes.
    calls = stand_in(
        monkeypatch, [0.2, 0.01], {"0_reference.wav": "ነጭ ፀሓይ", "2_synthesis.wav": "ላሞ"}
    )
    judge(monkeypatch, spoken)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| CER, % | reference | resynthesis | synthesis |"
    assert lines[3:5] == [
        "| all 3 sentences | 0.0 | 0.0 | 5.9 |",
        "| 2 of one or two words | 0.0 | 0.0 | 12.5 |",
    ]
    assert lines[6] == "the judge's own CER: 1.0 % of 3 clips, after 14 updates"
    assert ["--resume" in call for call in calls] == [
        False,
        True,
        True,
    ]  # the second continues, the third evaluates
    assert str(spoken / "judge/checkpoints/best.safetensors") in calls[2]


def test_speech_above_a_limit_fails_and_a_rejected_clip_counts_as_silence(
    spoken, small, monkeypatch, capsys
):
    stand_in(
        monkeypatch,
        [0.01],
        {"2_resynthesis.wav": None, "1_synthesis.wav": None, "2_synthesis.wav": None},
    )
    with pytest.raises(
        RunError,
        match=r"^resynthesis is 11\.8 points .* above reference; .* is 5; synthesis is 52\.9 ",
    ):
        judge(monkeypatch, spoken)
    out = capsys.readouterr().out
    assert "| all 3 sentences | 0.0 | 11.8 | 64.7 |" in out and " | 25.0 |\n" in out


def test_limits_are_inclusive():
    rates = {"reference": 1.0, "resynthesis": 6.0, "synthesis": 18.0}
    assert xtts_demo.faults(rates) == []
    assert len(xtts_demo.faults({**rates, "synthesis": 18.5})) == 1
    assert len(xtts_demo.faults({**rates, "resynthesis": 6.5})) == 1


def test_a_judge_that_does_not_learn_is_not_asked(spoken, small, monkeypatch):
    calls = stand_in(monkeypatch, [0.4, 0.3, 0.051], {})
    with pytest.raises(
        RunError, match=r"the judge's CER is 5\.1 % after 21 updates, above 5 %.*--judge_steps"
    ):
        judge(monkeypatch, spoken)
    assert len(calls) == 3


def test_manifests_of_different_sentences_are_refused(spoken):
    manifest = spoken / "speech/synthesis.csv"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("ላም", "ወፍ"), encoding="utf-8")
    with pytest.raises(UsageError, match="differ in their sentences"):
        xtts_demo.read_speech(spoken)


def test_a_missing_file_is_named(spoken):
    (spoken / "speech/1_synthesis.wav").unlink()
    with pytest.raises(UsageError, match=r"synthesis\.csv: its file .*1_synthesis\.wav is missing"):
        xtts_demo.read_speech(spoken)


def test_a_demo_that_is_not_finished_is_named(tmp_path):
    with pytest.raises(
        UsageError, match=r"^there is no finished demo here: .*speech/reference\.csv: No such file"
    ):
        xtts_demo.read_speech(tmp_path)
