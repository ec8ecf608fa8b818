"""The Train, Runs and Export tabs without a browser."""

import gradio as gr
import pytest

from common.errors import UsageError
from webui import catalogue, plans, runs
from webui.context import Context
from webui.tabs import events, export, train, watch
from webui.tabs.shared import Shared

KONKANI = "konkani_conformer"


@pytest.fixture
def context(here):
    return Context(here, {KONKANI: catalogue.find_recipes()[KONKANI]}, None)


def test_start_refuses_until_the_form_shows_what_was_chosen(context, monkeypatch):
    """What a form of `older` settings would start is not what was chosen since."""
    actions = {}

    def on(trigger, action, *_, **__):
        actions[action.__name__] = action
        return gr.Button().click(lambda: None)

    with gr.Blocks(), gr.Tabs() as tabs, gr.Tab("Train") as tab:
        shared = Shared(tabs, tab, gr.State({}), gr.State(""))
        parts = train._parts()
        form = train._form(context, {})
        monkeypatch.setattr(train, "on", on)
        train._connect(context, form, parts, shared, ({}, 3), gr.State())
    values = [KONKANI, "cpu", "", *[""] * len(form.options)]
    chosen = {"recipe": KONKANI, "values": {"train_manifest": "a.csv"}}
    for now in ((chosen, {}, ({}, 3)), (chosen, chosen, (chosen, 4))):
        with pytest.raises(UsageError, match="does not show what was chosen yet"):
            actions["start"]("first", *now, *values)
    assert not runs.list_runs(context.places.runs)
    assert "recipes/konkani_conformer.py" in actions["show"]("", {}, {}, ({}, 3), *values).value


def test_the_panel_names_its_run_and_the_best_weights_can_be_kept(context):
    run = runs.create(context.places.runs, "first", {"recipe": KONKANI}, [])
    table, status, *_ = watch._look([run], "first", watch.NONE)
    assert "<h3>first</h3>" in status and KONKANI in table
    assert "Download" not in export._about(run, context.recipes[KONKANI])
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "best.safetensors").write_bytes(b"x" * 100)
    about = export._about(run, context.recipes[KONKANI])
    assert "Download best.safetensors</a> (100 bytes)" in about and "\n" not in about
    about = export._kept(run, "there is no recipe")  # of a copy that was removed
    assert "there is no recipe" in about and "Download best.safetensors</a>" in about


def test_a_run_is_compared_with_those_of_its_recipe(context):
    for name, recipe in (("a", KONKANI), ("b", KONKANI), ("c", "xtts_amharic")):
        runs.create(context.places.runs, name, {"recipe": recipe}, [])
    found = runs.list_runs(context.places.runs)
    first, other = watch._choices(found, "a", "c", "c")
    assert len(first.choices) == 3 and first.value == "a"
    assert [value for _, value in other.choices] == [watch.NONE, "b"]
    assert other.value == watch.NONE  # another recipe's results mean something else


def test_a_verdict_says_whose_memory_it_is(monkeypatch):
    verdict = plans.Verdict("fits", [], [], [], {}, "")
    monkeypatch.setattr(plans, "this_card", lambda: None)
    said = train._said(verdict, "8gb")
    assert "It fits." in said and "Predicted for 8gb" in said and train.NO_GPU in said
    monkeypatch.setattr(plans, "this_card", lambda: "a card")
    assert train.NO_GPU not in train._said(verdict, "")


def test_messages_name_the_fields():
    said = catalogue.labelled("--train_manifest a.csv: no such file; see --tier")
    assert said == "“Recordings to learn from” (--train_manifest) a.csv: no such file; see --tier"


def test_the_command_that_uses_the_best_weights():
    recipes = catalogue.find_recipes()
    assert export._use(recipes[KONKANI]) == "--transcribe recording.wav"
    assert export._use(recipes["matcha_voice"]) == '--synthesize "a text"'
    cloned = '--synthesize "a text" --speaker_wav voice.wav'
    assert export._use(recipes["xtts_amharic"]) == cloned


def test_messages_end():
    """They are shown as HTML, so what they name is escaped."""
    actions = []

    def fail() -> None:
        raise UsageError("<img src=x>")

    with gr.Blocks():
        events.on(lambda action, *_, **__: actions.append(action), fail)
    with pytest.raises(gr.Error) as caught:
        actions[0]()
    assert 0 < caught.value.duration <= 60 and "<img" not in str(caught.value)
