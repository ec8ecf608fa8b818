"""A part of the Data tab: recordings without texts, of which a recogniser writes a draft, and texts
that somebody corrects while listening."""

import functools
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import gradio as gr

from common.errors import Failure, UsageError
from webui import commands, corrections, runs, views
from webui.catalogue import Recipe
from webui.context import Context
from webui.corrections import Text
from webui.places import CORRECTED, DRAFT
from webui.runs import Run
from webui.tabs.choice import Chosen, choose, connect, model_of
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared
from webui.trials import Model

PIECE_SECONDS = "15"  # of a draft: long recordings are cut, at silences
NAME = "draft"
CORRECTING = (
    "Listen, and write what is said. Saved texts are in a new file beside the table, whose name ends"
    f" in {CORRECTED}. It is then the chosen table; the table itself stays as it is."
)
SLOTS = 8  # texts that are shown at once
ABOUT = (
    "<p>A recogniser writes what it hears in each recording. The draft is a run: the Runs tab shows"
    f" it, and its table is RUN/{DRAFT}. Choose that table above, correct its texts, and train"
    " with them.</p>"
)


@dataclass(frozen=True)
class Shown:
    """The content of the editor: a table, the place of its first text, and the texts as they are in
    the table."""

    table: str = ""
    first: int = 0
    texts: tuple[Text, ...] = ()


def build_draft(context: Context, shared: Shared, dropped: list[gr.File], save) -> None:
    """The way from audio to a draft. `save(pairs)` keeps `dropped` files and returns their
    folder."""
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
        recipe, _, model = model_of(context, Chosen(*values))
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


def build_editor(context: Context, table: gr.Dropdown) -> None:
    """Texts of the chosen `table` beside their players, a few at a time."""
    with gr.Accordion("Correct the texts", open=False) as part:
        gr.Markdown(f"<p>{views.text(CORRECTING)}</p>", **HTML)
        shown = gr.State(Shown())
        opened = gr.State(False)  # or a long table would be read whenever it is chosen
        where = gr.Markdown(**HTML)
        slots = []
        for number in range(1, SLOTS + 1):
            with gr.Row(visible=False, elem_classes="correct") as row:
                player = gr.Markdown(**HTML, min_width=160)
                text = gr.Textbox(label=f"Text {number}", lines=1, max_lines=6, scale=3)
            slots += [row, player, text]
        with gr.Row():
            back = gr.Button("Save, and back", min_width=140)
            save = gr.Button("Save", min_width=140)
            ahead = gr.Button("Save, and the next texts", variant="primary", min_width=140)

    def show(name: str | None) -> list:
        if not name:
            return [Shown(), "<p>Choose a table above.</p>", *[gr.skip()] * len(slots)]
        return _texts(context, corrections.begun(context.places.file(name)), 0)

    def follow(name: str | None, opened: bool, now: Shown) -> list:
        """Another table was chosen, or this part has done so after it saved."""
        if not opened or name == now.table:
            return [gr.skip()] * (2 + len(slots))
        return show(name)

    def turn(by: int, now: Shown, *texts: str) -> list:
        if not now.table:
            raise UsageError("there is no table: choose one above")
        changed = [
            (old, new) for old, new in zip(now.texts, texts, strict=False) if old.text != new
        ]
        path = context.places.file(now.table)
        if changed:
            path = corrections.correct(context.places, path, changed)
        name = context.places.name(path)
        page = _texts(context, path, max(0, now.first + by))
        return [*page, gr.Dropdown(choices=_with(context, name), value=name)]

    boxes = slots[2::3]
    editor = [shown, where, *slots]
    on(part.expand, show, table, editor)
    on(part.expand, lambda: True, None, opened, show_progress="hidden")
    on(part.collapse, lambda: False, None, opened, show_progress="hidden")
    on(table.change, follow, [table, opened, shown], editor, show_progress="hidden")
    for button, by in ((back, -SLOTS), (save, 0), (ahead, SLOTS)):
        on(button.click, functools.partial(turn, by), [shown, *boxes], [*editor, table])


def _with(context: Context, name: str) -> list[str]:
    """The tables to choose from, with this one."""
    return sorted({*context.places.manifests(), name})


def _texts(context: Context, table: Path, first: int) -> list:
    """The controls of the editor for a table from its text `first` on."""
    places = context.places
    every = corrections.texts_of(table)
    if first >= len(every):
        first = max(0, len(every) - 1) // SLOTS * SLOTS
    now = Shown(places.name(table), first, tuple(every[first : first + SLOTS]))
    last = first + len(now.texts)
    where = f"{now.table}: texts {first + 1} to {last} of {len(every)}"
    updates = [now, f"<p><b>{views.text(where)}</b></p>"]
    for number in range(SLOTS):
        if number >= len(now.texts):
            updates += [gr.Row(visible=False), "", ""]
            continue
        each = now.texts[number]
        updates += [gr.Row(visible=True), _player(context, each), each.text]
    return updates


def _player(context: Context, text: Text) -> str:
    name = views.text(text.path.rsplit("/", 1)[-1])
    try:
        path = str(context.places.file(text.path))
    except Failure:
        return f"<p>{name}: the file is missing</p>"
    at = f" at {text.offset:.2f} s" if text.offset else ""
    return f"<div>{views.player(path, text.offset, text.seconds)}<div>{name}{at}</div></div>"
