"""What users try: which model and where, transcripts, speech with its history, the utterances that
an evaluation got wrong, and exports."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from common.errors import RunError, UsageError
from webui import catalogue, commands, runs, trials
from webui.context import Context
from webui.tabs import export
from webui.trials import CPU, GPU, Model, Wish


class Models:
    """In place of processes: notes requests, and writes what the recipe would."""

    def __init__(self):
        self.asked = []
        self.text = ""

    def ask(self, recipe: str, words: list[str], model: tuple[str, ...]) -> str:
        self.asked.append((recipe, words, model))
        output = Path(words[words.index("--output") + 1])
        if "--synthesize" in words:
            self.text = Path(words[words.index("--synthesize") + 1]).read_text()
            output.write_bytes(b"speech")
        else:
            output.write_text(json.dumps({"text": "haanv", "words": []}) + "\n")
        return ""


@pytest.fixture
def run(here):
    """A run of the page, with weights."""
    folder = here.runs / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "logs").mkdir()
    for name in ("best.safetensors", "checkpoint_step_00000020.pt"):
        (folder / "checkpoints" / name).write_bytes(b"weights")
    settings = {"recipe": "xtts_amharic", "values": {"train_manifest": "train.csv"}}
    content = {"settings": settings, "words": [], "created": 1.0}
    (folder / "run.json").write_text(json.dumps(content))
    return runs.find(here.runs, "mine")


@pytest.fixture(scope="module")
def recipes():
    return catalogue.find_recipes()


@pytest.fixture
def model(run) -> Model:
    return trials.model_of_run(run, "best.safetensors")


# --- which model, and where -----------------------------------------------------------------------


def test_weights_are_those_of_the_run(run, model):
    weights = run.folder / "checkpoints" / "best.safetensors"
    assert model.words == ("--resume", str(weights))
    step = trials.model_of_run(run, "checkpoint_step_00000020.pt")
    assert step.words[1].endswith("checkpoints/checkpoint_step_00000020.pt")
    for name in ("../../../etc/passwd", "last.pt", "", None):
        with pytest.raises(UsageError, match="choose"):
            trials.model_of_run(run, name)


def test_a_released_model_lies_in_the_folders(here, recipes, tmp_path):
    (here.data / "parakeet").mkdir()
    (here.data / "base.nemo").write_bytes(b"")
    recipe = recipes["parakeet_tdt"]
    words = trials.released_model(here, recipe, "parakeet").words
    assert words == (f"--model_dir={here.data / 'parakeet'}",)
    words = trials.released_model(here, recipe, "base.nemo").words
    assert words == (f"--model_file={here.data / 'base.nemo'}",)
    (here.data / "xtts").mkdir()
    words = trials.released_model(here, recipes["xtts_amharic"], "xtts", " en ").words
    assert words == (f"--model_dir={here.data / 'xtts'}", "--language=en")
    for path in (str(tmp_path), "../x", "/etc"):
        with pytest.raises(UsageError, match="outside of the folders"):
            trials.released_model(here, recipe, path)


def test_the_model_that_a_run_began_from(here, run, recipes):
    recipe = recipes["whisper_vietnamese"]
    assert trials.released_before(here, recipe, run) is None
    values = {"model_dir": "base", "language": "vi", "max_steps": "3"}
    run.settings["values"] = values
    words = (f"--model_dir={here.data / 'base'}", "--language=vi")
    assert trials.released_before(here, recipe, run).words == words
    values["model_dir"] = "/etc"  # a changed run.json
    with pytest.raises(UsageError, match="outside of the folders"):
        trials.released_before(here, recipe, run)


def test_the_gpu_that_trains_is_used_only_if_that_is_allowed(here, run, model, monkeypatch):
    monkeypatch.setattr(runs, "on_gpu", lambda folder: [])
    assert trials.on_device(model, here, GPU, False)[-2:] == ("--device", "cuda")
    monkeypatch.setattr(runs, "on_gpu", lambda folder: [run])
    with pytest.raises(UsageError, match="mine is training on the GPU"):
        trials.on_device(model, here, GPU, False)
    assert trials.on_device(model, here, GPU, True)[-2:] == ("--device", "cuda")
    assert trials.on_device(model, here, CPU, False) == (*model.words, "--device", "cpu")


# --- recordings and speech ------------------------------------------------------------------------


def test_only_audio_is_taken(tmp_path, wav):
    clip = wav(tmp_path / "a.wav")
    assert trials.checked_audio(clip, "recording") == Path(clip)
    (tmp_path / "list.wav").write_text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n")
    for path in (None, "", str(tmp_path / "list.wav")):
        with pytest.raises(UsageError, match="recording"):
            trials.checked_audio(path, "recording")


def test_subtitles(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    words = [{"start": 0.5, "end": 1.0, "text": "haanv"}]
    pieces = [{"start": 0.0, "end": 2.0, "text": "one"}, {"start": 2.0, "end": 3.0, "text": "two"}]
    rows = [
        {"name": "a/../b.wav", "text": "haanv", "words": words, "pieces": pieces},
        {"name": "b.mp3", "text": "one two", "pieces": pieces},
        {"name": "c", "text": "", "pieces": []},
    ]
    files = [Path(path) for path in trials.write_subtitles(rows)]
    assert [file.name for file in files] == ["a_.._b.srt", "b.srt", "c.srt"]
    assert all(file.is_relative_to(tmp_path) for file in files)
    texts = [file.read_text() for file in files]
    assert texts[0] == "1\n00:00:00,500 --> 00:00:01,000\nhaanv\n\n" and texts[2] == ""
    assert "00:00:00,000 --> 00:00:02,000\none" in texts[1] and "2\n00:00:02,000" in texts[1]


def test_time_tokens_are_those_of_released_whispers(here, recipes, model):
    (here.data / "base").mkdir()
    released = trials.released_model(here, recipes["whisper_vietnamese"], "base")
    for name, each, before, expected in (
        ("whisper_vietnamese", released, None, ["--timestamps"]),
        ("whisper_vietnamese", model, released, ["--timestamps"]),
        ("whisper_vietnamese", model, None, []),
        ("konkani_conformer", model, None, []),
    ):
        assert trials.times_of(recipes[name], each, before) == expected


def test_what_was_said_is_kept_with_the_weights(here, run, model):
    models = Models()
    voice = here.data / "voice.wav"
    texts = ["--output=/etc/passwd", "  /etc/passwd ", "ሰላም\nለዓለም"]
    for number, text in enumerate(texts):
        row = trials.speak(models, model, Wish(text, voice, 0.5, number), model.words)
        assert row["file"] == f"000{number + 1}.wav"
        # It is read from a file of our own: never a flag, nor the name of another file.
        assert models.text == " ".join(text.split()) and text not in models.asked[-1][1]
    (run.folder / "spoken" / "history.jsonl").open("a").write('{"file": "0004')
    said = trials.history(model.folder)
    assert [row["text"] for row in said] == ["ሰላም ለዓለም", "/etc/passwd", texts[0]]
    assert said[0]["model"] == "mine, best.safetensors" and said[0]["seed"] == 2
    assert Path(said[0]["path"]).read_bytes() == b"speech"
    with pytest.raises(UsageError, match="no text"):
        trials.speak(models, model, Wish("  \n", voice, 0.5, 1), model.words)


def test_voices_are_uploads_training_clips_and_the_data(here, run, model, wav, tmp_path):
    for name in ("a", "b", "c", "d", "e"):
        wav(here.data / f"{name}.wav", 0.2)
    wav(tmp_path / "outside.wav", 0.2)
    rows = ["audio_file|text|speaker_name", f"{tmp_path / 'outside.wav'}|x|abebe"]
    rows += [f"{name}.wav|ሰላም {name}|abebe" for name in "dcba"] + ["e.wav|ቡና|sara"]
    (here.data / "train.csv").write_text("\n".join(rows) + "\n")
    kept = trials.keep_voice(model, Path(wav(tmp_path / "mine.wav", 0.3)))
    assert kept == trials.keep_voice(model, tmp_path / "mine.wav")
    choices = trials.voices(here, run, model.folder)
    assert [label for label, _ in choices] == [
        f"uploaded: {kept.name}",
        *(f"training: abebe: ሰላም {name}" for name in "dcb"),
        "training: sara: ቡና",
        "a.wav",
    ]
    assert all(here.file(path) for _, path in choices)


def test_sentences_that_a_run_has_spoken(here, run):
    (run.folder / "speech").mkdir()
    for kind in trials.KINDS:
        table = f"audio_file|text|speaker_name\n1_{kind}.wav|ሰላም|abebe\n"
        (run.folder / "speech" / f"{kind}.csv").write_text(table)
    [row] = trials.held_out(here, run)
    assert (row["text"], row["speaker"]) == ("ሰላም", "abebe")
    assert row["synthesis"] == str(run.folder / "speech" / "1_synthesis.wav")


def test_the_worst_utterances_come_first(run):
    rows = [
        {"file": "/a.wav", "reference": "one two", "hypothesis": "one, two.", "seconds": 1.5},
        {"file": "/b at 3.00 s/c.wav", "reference": "one two", "hypothesis": "one too"},
        {"file": "/d.wav at 12.50 s", "reference": "one two", "hypothesis": "six", "seconds": 2},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run.folder / "logs" / "transcripts.jsonl").write_text(lines)
    found = trials.evaluated(run)
    places = [(each.path, each.offset, each.seconds) for each in found]
    assert places == [
        ("/d.wav", 12.5, 2),
        ("/b at 3.00 s/c.wav", 0, None),
        ("/a.wav", 0, 1.5),
    ]
    assert [(e.words.substitutions, e.words.deletions, e.words.total) for e in found] == [
        (1, 1, 2),
        (1, 0, 1),
        (0, 0, 0),
    ]


# --- exports --------------------------------------------------------------------------------------


def test_an_export_is_the_recipes_command(here, run, recipes, monkeypatch):
    context = Context(here, recipes, Models())
    asked = []
    answers = iter([(0, ""), (0, ""), (2, "loading\nerror: there is no such voice\n")])

    def ask(words, seconds):
        asked.append(words)
        Path(words[words.index("--export") + 1]).mkdir()
        return next(answers)

    monkeypatch.setattr(commands, "ask", ask)
    best = run.folder / "checkpoints" / "best.safetensors"
    assert export.export(context, run, "best.safetensors", None) == run.folder / "export-1"
    recipe = str(catalogue.ROOT / "recipes" / "xtts_amharic.py")
    words = [sys.executable, recipe, "--export", str(run.folder / "export-1"), "--resume"]
    assert asked == [[*words, str(best), "--device", "cpu"]]
    run.settings["recipe"] = "parakeet_tdt"
    other = runs.Run(**{**vars(run), "recipe": "parakeet_tdt"})
    export.export(context, other, "best.safetensors", "nemo")
    assert asked[1][3] == str(run.folder / "export-2") and asked[1][-1] == "--export_format=nemo"
    with pytest.raises(RunError, match=r"^there is no such voice$"):
        export.export(context, run, "best.safetensors", None)


def test_exported_files_are_listed(run):
    folder = run.folder / "export-1"
    (folder / "speakers").mkdir(parents=True)
    (folder / "model.pth").write_bytes(b"a" * 1500)
    (folder / "speakers" / "<b>.wav").write_bytes(b"")
    (folder / "LICENSE.txt").write_text("not for <i>sale</i>\n")
    shown = export._exports(run)
    assert "1.5 kB" in shown and "speakers/&lt;b&gt;.wav" in shown
    assert "not for &lt;i&gt;sale&lt;/i&gt;" in shown


def test_every_form_has_the_command_of_the_program_that_reads_it(recipes):
    programs = {
        "konkani_conformer": ("import sherpa_onnx", "onnx-asr nemo-conformer-ctc"),
        "matcha_voice": ("from piper import", "import sherpa_onnx"),
        "parakeet_tdt": ("from transformers import", "from nemo."),
        "wav2vec2_ctc": ("from transformers import", "import sherpa_onnx"),
        "whisper_morse": ("from transformers import",),
        "whisper_vietnamese": ("from transformers import",),
        "xtts_amharic": ("from TTS.",),
    }
    exporting = {name for name, recipe in recipes.items() if "export" in recipe.names}
    assert exporting == set(programs)
    for name, commands_of in programs.items():
        section = export.section_of(recipes[name])
        assert all(command in section for command in commands_of), name
    assert export.section_of(dataclasses.replace(recipes["parakeet_tdt"], page=None)) == ""
