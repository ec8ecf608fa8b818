"""Which recipe is advised."""

import re
from pathlib import Path

import gradio as gr
import pytest

from speech.writing.languages import described
from webui import catalogue
from webui.tabs import which
from webui.tabs.which import LARGE, NONE, SOLD, TEXT, VOICE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "asked, recipe, model, language",
    [
        (("Swahili", 90, TEXT, LARGE), "whisper_vietnamese", "Whisper small", "sw"),
        (("sw", 90, TEXT, NONE), "whisper_vietnamese", "Whisper base", "sw"),
        (("Mboshi", 90, TEXT, LARGE), "wav2vec2_ctc", "omniASR CTC 300M", "mboshi"),
        (("kok", 90, TEXT, LARGE), "whisper_vietnamese", "Whisper small", "kok=mr"),
        (("am", 30, VOICE, LARGE), "xtts_amharic", "XTTS-v2", "am"),
        (("am", 30, SOLD, LARGE), "matcha_voice", "", "am"),
        (("am", 90, VOICE, LARGE), "matcha_voice", "", "am"),
    ],
)
def test_what_is_advised(asked, recipe, model, language):
    advice = which.advise(*asked)
    name = advice.model.name if advice.model else ""
    assert (advice.recipe, name, advice.language) == (recipe, model, language)


def test_too_little_speech_is_said():
    said = " ".join(which.advise("sw", 3, TEXT, NONE).said)
    assert "3 minutes are too little" in said and "Without a GPU" in said
    assert "too little" not in " ".join(which.advise("sw", 10, TEXT, NONE).said)
    assert "too little" not in " ".join(which.advise("sw", 0, TEXT, NONE).said)
    assert "an hour or more" in " ".join(which.advise("sw", 30, SOLD, LARGE).said)


def test_the_pages_say_the_same():
    """The lines that fetch models are those of the recipes' pages, the languages those of the
    guide."""
    recipes = catalogue.find_recipes()
    pages = "".join((ROOT / "recipes").joinpath(f"{name}.md").read_text() for name in recipes)
    for model in (which.SMALL_WHISPER, which.BASE_WHISPER, which.PARAKEET, which.OMNI, which.XTTS):
        for line in model.fetch.removeprefix("cd FOLDER && ").split(" && "):
            assert line.replace("FOLDER/", "") in pages
        assert any(option.name == model.option for option in recipes["wav2vec2_ctc"].options)
    guide = (ROOT / "docs/your_language.md").read_text()
    (named,) = re.findall(r"\*\*Parakeet v3:\*\* ([^.]+)\.", guide)
    ours = {described(code).partition("(")[2].rstrip(")") for code in which.PARAKEETS}
    assert set(re.split(r",\s+", named)) == ours


def test_the_answer_is_put_into_the_form(here, wav):
    (here.data / "whisper-base").mkdir()
    (here.data / "t.csv").write_text(f"audio_file,text\n{wav(here.data / 'a.wav', 90)},one\n")
    given = []
    with gr.Blocks() as page:
        which.build(
            here,
            [gr.Dropdown(), gr.Dropdown()],
            [gr.Dropdown()],
            lambda *v: given.append(v) or [],
        )
    answer, warn = (each.fn for each in page.fns.values())
    said, recipe = answer("Swahili", None, TEXT, NONE, "t.csv", "")
    assert recipe["value"] == "whisper_vietnamese" and "2 minutes are too little" in said
    assert "It is there" in said and "\n" not in said
    values = {"language": "sw", "model_dir": "whisper-base", "model_file": ""}
    assert given == [("whisper_vietnamese", values)]
    said, _ = answer("<b>", 60, TEXT, LARGE, None, None)
    assert f"cd {here.data} &amp;&amp; curl -LO" in said and "1.3 GB" in said
    said = warn("", None, TEXT, NONE, "t.csv", "")
    assert "2 minutes are too little" in said and "does not know" not in said
    assert not warn("", None, TEXT, NONE, "t.cs", "")  # typed so far
