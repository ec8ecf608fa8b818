"""The demo corpus: deterministic, with disjoint splits, and unknown voices raise."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from common.errors import RunError
from speech.data import demo
from tests import processes

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"train": 12, "val": 4}
MAKE = (
    "import sys; from pathlib import Path; from speech.data import demo; "
    f"demo.speech_corpus(Path(sys.argv[1]), demo.KONKANI_WORDS, demo.KONKANI_VOICES, {SIZES})"
)


def make(folder: Path, seed: int = 0) -> None:
    demo.speech_corpus(folder, demo.KONKANI_WORDS, demo.KONKANI_VOICES, SIZES, seed)


def make_in_a_new_process(folder: Path) -> None:
    process = processes.start(["-c", MAKE, folder], ROOT)
    _, err = process.communicate()
    assert process.returncode == 0, err


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows(folder: Path, split: str) -> list[dict]:
    lines = (folder / f"{split}.json").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """As a run makes it: in a new process, in which espeak-ng has not spoken before."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "corpus"
    make_in_a_new_process(folder)
    return folder


def test_the_corpus_is_deterministic_and_its_seed_matters(corpus, tmp_path):
    # Another process, in another second: neither must seed anything.
    make_in_a_new_process(tmp_path / "again")
    again, expected = content(tmp_path / "again"), content(corpus)
    assert [name for name in expected | again if again.get(name) != expected.get(name)] == []
    make(tmp_path / "other", 1)
    folders_ = (corpus, tmp_path / "other")
    first, second = ({row["text"] for row in rows(folder, "train")} for folder in folders_)
    assert first != second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"]


def test_manifests_describe_the_files_and_splits_are_disjoint(corpus):
    texts: dict[str, set] = {}
    for split, size in SIZES.items():
        lines = rows(corpus, split)
        assert len(lines) == size
        for row in lines:
            samples, rate = soundfile.read(corpus / row["audio_filepath"])
            seconds = len(samples) / rate
            assert seconds == pytest.approx(row["duration"], abs=1e-3) and 0.4 < seconds < 10
            assert np.abs(samples).max() > 0.05  # somebody speaks
            words = row["text"].split()
            assert 2 <= len(words) <= 5 and set(words) <= set(demo.KONKANI_WORDS)
            assert row["speaker"] in demo.KONKANI_VOICES
        texts[split] = {row["text"] for row in lines}
        assert len(texts[split]) == size
    assert not texts["train"] & texts["val"]
    assert len({row["speaker"] for row in rows(corpus, "train")}) > 3


@pytest.fixture
def ask(tmp_path):
    """ask(size) asks for a training set of so many utterances in the folder "c"."""

    def make(size: int) -> dict[str, str]:
        return demo.speech_corpus(tmp_path / "c", ["घर", "उदक", "वाट"], ["mr+f2"], {"train": size})

    return make


def test_a_complete_corpus_is_kept_and_an_earlier_one_is_replaced(ask, tmp_path, capsys):
    assert ask(3) == {"train": str(tmp_path / "c" / "train.json")}
    assert "demo corpus: 3 utterances" in capsys.readouterr().out
    number = (tmp_path / "c" / "train.json").stat().st_ino
    ask(3)
    assert (tmp_path / "c" / "train.json").stat().st_ino == number and capsys.readouterr().out == ""
    ask(2)
    assert len(list((tmp_path / "c" / "audio").iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("voice", ["xx", "mr+nobody", "mr+", "", "xx+f2"])
def test_an_unknown_voice_raises(voice):
    espeak = demo.espeak()
    espeak.say("घर", "mr+f2")
    with pytest.raises(RunError, match=re.escape(f"espeak-ng has no voice {voice!r}")):
        espeak.say("घर", voice)


def test_every_voice_of_the_recipe_exists_and_differs():
    espeak = demo.espeak()
    said = {espeak.say("हांव घर उदक", voice).tobytes() for voice in demo.KONKANI_VOICES}
    assert len(said) == len(demo.KONKANI_VOICES)
    slow, fast = (len(espeak.say("हांव घर उदक", "mr", rate)) for rate in (140, 220))
    assert fast < 0.8 * slow


# --- manners --------------------------------------------------------------------------------------


class Recorder:
    """In place of espeak-ng: notes what it should say; a tenth of a second of noise between two of
    silence."""

    sample_rate = 22_050

    def __init__(self):
        self.calls = []

    def say(self, *values) -> np.ndarray:
        self.calls.append(values)
        loud = np.random.default_rng(len(self.calls)).integers(-9000, 9000, 2205)
        loud[[0, -1]] = 9000
        return np.concatenate([np.zeros(2205), loud, np.full(2205, 80)]).astype(np.int16)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(demo, "espeak", lambda: recorder)
    return recorder


def test_recordings_have_silence_and_noise_or_none():
    loud = np.random.default_rng(0).integers(-9000, 9000, 4000).astype(np.int16)
    made = [demo.recorded(loud, 16_000, np.random.default_rng(seed)) for seed in range(100)]
    assert sum(np.array_equal(each, loud) for each in made) > 10, "some are as they were"
    lengths = np.array([len(each) for each in made])
    assert lengths.min() == 4000 and 15_000 < lengths.max() <= 4000 + 2 * 9_600
    noisy = [each for each in made if len(each) > 4100 and np.abs(each[:50]).max() > 0]
    quiet = [each for each in made if len(each) > 4100 and not each[:50].any()]
    assert len(noisy) > 10 and len(quiet) > 10
    power = np.square(loud, dtype=np.float64).mean()
    levels = []
    for each in made:
        if len(each) == len(loud) and not np.array_equal(each, loud):
            noise = np.square(each.astype(float) - loud).mean()
            levels.append(10 * np.log10(power / noise))
    assert len(levels) > 5 and min(levels) > 29.5 and max(levels) < 60.5
    loudest = demo.recorded(np.full(999, 32_767, np.int16), 16_000, np.random.default_rng(3))
    assert loudest.min() >= 0, "what is too loud is cut off, not wrapped"


def test_another_manner(recorder, tmp_path, capsys):
    manner = demo.Manner(rate=(170, 170), pitch=(50, 51), words=(1, 4), trimmed=True)
    given = (tmp_path / "c", demo.AMHARIC_WORDS, demo.AMHARIC_VOICES, SIZES)
    demo.speech_corpus(*given, manner=manner)
    assert {call[2:] for call in recorder.calls} == {(170, 50), (170, 51)}
    assert {len(call[0].split()) for call in recorder.calls} == {1, 2, 3, 4}
    samples, _ = soundfile.read(tmp_path / "c" / "audio" / "val_00003.wav", dtype="int16")
    assert len(samples) == 2205 and samples[0] == samples[-1] == 9000
    assert rows(tmp_path / "c", "val")[3]["duration"] == 0.1
    capsys.readouterr()
    demo.speech_corpus(*given, manner=manner)
    assert len(recorder.calls) == 16 and capsys.readouterr().out == ""  # it is not made again
    demo.speech_corpus(*given)
    assert len(recorder.calls) == 32
