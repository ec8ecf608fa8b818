"""A part of the Data tab: recordings without texts, of which a recogniser writes a draft."""

import shlex
from dataclasses import replace

import gradio as gr

from common.errors import Failure, UsageError
from webui import commands, runs
from webui.catalogue import Recipe
from webui.context import Context
from webui.places import DRAFT
from webui.runs import Run
from webui.tabs.choice import Choice, choose, connect, model_of
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared
from webui.trials import Model

PIECE_SECONDS = "15"  # of a draft: long recordings are cut, at silences
NAME = "draft"
ABOUT = (
    "<p>A recogniser writes what it hears in each recording. The draft is a run: the Runs tab shows"
    f" it, and its table is RUN/{DRAFT}. Choose that table above, correct its texts, and train"
    " with them.</p>"
)


def build_draft(context: Context, shared: Shared, dropped: list[gr.File], save) -> None:
    """The way from audio to a draft. `save(pairs)` keeps `dropped` files in a folder."""
    places = context.places
    with gr.Accordion("There are no texts yet: write a draft", open=False) as part:
        gr.Markdown(ABOUT, **HTML)
        info = f"with the recordings, in {places.data}; or drop audio files above"
        audio = gr.Dropdown([], label="Folder", info=info, allow_custom_value=True)
        choice = choose(context, "transcribe")
        button = gr.Button("Write a draft", variant="primary")

    def write(name: str | None, some: list, others: list, *values) -> tuple:
        if not (name or some or others):
            raise UsageError("there are no recordings: drop audio files above, or choose a folder")
        recipe, _, model = model_of(context, Choice(*values))
        if "transcribe" not in recipe.commands:
            raise UsageError(f"{recipe.name} does not transcribe: choose a recogniser's weights")
        run = _start(context, recipe, model, name or places.name(save(some + others)))
        return run.name, gr.Tabs(selected="runs")

    connect(context, part.expand, shared.chosen, choice, "transcribe")
    on(part.expand, lambda: gr.Dropdown(choices=places.audio_folders()), None, audio)
    inputs = [audio, *dropped, *choice.all()]
    on(button.click, write, inputs, [shared.chosen, shared.tabs])


def _start(context: Context, recipe: Recipe, model: Model, path: str) -> Run:
    """Starts the run that writes a draft of the audio in a folder. Raises `Failure`."""
    places = context.places
    values = {"transcribe": shlex.quote(path), "output": DRAFT, "piece_seconds": PIECE_SECONDS}
    values |= commands.values_of(recipe, list(model.words))
    settings = {"recipe": recipe.name, "values": values}
    run = runs.create(places.runs, runs.new_name(places.runs, NAME), settings, [])
    try:  # the recipe wants the folder of its output
        words = commands.command(places, recipe, settings, run.folder).words
    except Failure:
        runs.remove(run, places)
        raise
    context.release_gpu(words)
    runs.start(replace(run, words=words))
    return run
