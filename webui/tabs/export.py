"""The Export tab: a folder that other programs load, made from a run's weights."""

import re
import sys
from pathlib import Path

import gradio as gr

from common.errors import RunError, UsageError
from common.files import read_text
from webui import commands, outputs, trials, views
from webui.catalogue import Recipe
from webui.context import Context
from webui.runs import Run
from webui.tabs.choice import one_of, recipe_of, usable, weights_of
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared
from webui.use import error_of

FORMAT = "export_format"
CONSENT = "consent"
EXPORT_SECONDS = 1800.0
LICENCE = "LICENSE.txt"
MOST_FILES = 200
ABOUT = (
    "An export is a new folder in the run's folder, with the weights in the form of other programs"
    " and nothing of the training. The run stays as it is."
)
NO_FORMS = "{recipe} has no export: no other program has this network."
BEST = (
    "best.safetensors holds the best weights and all that it takes to rebuild the model here,"
    " without anything of the training. It is the file to keep and to pass on:"
)


def build(context: Context, shared: Shared) -> None:
    with gr.Row():
        chosen = gr.Dropdown([], label="Run", info="that has weights", min_width=200)
        weights = gr.Dropdown([], label="Weights", info="of which moment", min_width=200)
        form = gr.Dropdown([], label="Form", info="for which program", visible=False)
    consent = gr.Textbox(label="Whose voice it is", visible=False)
    about = gr.Markdown(**HTML)
    button = gr.Button("Export", variant="primary", visible=False)
    made = gr.Markdown(**HTML)
    with gr.Accordion("How other programs load it", open=True, visible=False) as how:
        page = gr.Markdown(latex_delimiters=[])

    def choices(name: str | None, before: str | None) -> gr.Dropdown:
        return one_of([run.name for run in usable(context)], name, before)

    def look(name: str | None, before: str | None) -> tuple:
        if not name:
            nothing = "<p>There is no run with weights yet: the Train tab starts one.</p>"
            return (nothing, "", "", *[gr.skip()] * 5)
        run = context.run(name)
        weights = weights_of(context, name, before)
        try:
            recipe = recipe_of(context, run.recipe)
        except UsageError as error:  # its weights can be kept all the same
            hidden = [gr.Dropdown(visible=False), gr.Button(visible=False)]
            hidden += [gr.Accordion(visible=False), gr.Textbox(visible=False)]
            return (_kept(run, str(error)), "", "", weights, *hidden)
        section = section_of(recipe)
        button = gr.Button(visible="export" in recipe.names)
        how = gr.Accordion(visible=bool(section))
        texts = _about(run, recipe), _exports(run), section
        return (*texts, weights, _forms(recipe), button, how, _consent(recipe))

    def make(name: str | None, file: str | None, wanted: str | None, said: str | None) -> str:
        run = context.run(name)
        export(context, run, file, wanted, said)
        return _exports(run)

    shown = [about, made, page, weights, form, button, how, consent]
    named = [
        on(shared.tab.select, choices, [shared.chosen, chosen], chosen),
        on(chosen.input, lambda name: name, chosen, shared.chosen),
    ]
    for each in named:
        on(each.then, look, [chosen, weights], shown)
    on(button.click, make, [chosen, weights, form, consent], made)


def export(
    context: Context, run: Run, weights: str | None, form: str | None, consent: str | None = None
) -> Path:
    """Makes a new folder export-N in the run's. Raises `UsageError` or the recipe's own error."""
    recipe = recipe_of(context, run.recipe)
    path = trials.weights_of(run, weights)
    numbers = [folder.name.rpartition("-")[2] for folder in _folders(run)]
    number = max((int(each) for each in numbers), default=0) + 1
    folder = run.folder / f"export-{number}"
    words = [sys.executable, str(recipe.file), "--export", str(folder), "--resume", str(path)]
    words += ["--device", "cpu"]  # the GPU may be training
    if FORMAT in recipe.names and form:
        words += commands.words_of(context.places, recipe.option(FORMAT), form, run.folder)
    if CONSENT in recipe.names and consent:
        words.append(f"--{CONSENT}={' '.join(consent.split())}")
    status, printed = commands.ask(words, EXPORT_SECONDS)
    if status:
        raise RunError(error_of(printed))
    return folder


def section_of(recipe: Recipe) -> str:
    """The section about exports in the recipe's page, as Markdown; "" if there is none."""
    if recipe.page is None:
        return ""
    found = re.search(
        r"^## Export\n(.*?)(?=^## |\Z)", read_text(recipe.page), re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else ""


def _folders(run: Run) -> list[Path]:
    """The exports of a run, the newest first."""
    found = [path for path in run.folder.glob("export-*") if path.name[7:].isdecimal()]
    return sorted(found, key=lambda path: -int(path.name[7:]))


def _forms(recipe: Recipe) -> gr.Dropdown:
    if FORMAT not in recipe.names:
        return gr.Dropdown(choices=[], value=None, visible=False)
    option = recipe.option(FORMAT)
    choices = [choice for choice in option.choices if choice]
    return gr.Dropdown(choices=choices, value=choices[0], info=option.help, visible=True)


def _consent(recipe: Recipe) -> gr.Textbox:
    if CONSENT not in recipe.names:
        return gr.Textbox(visible=False)
    return gr.Textbox(visible=True, info=recipe.option(CONSENT).help)


def _about(run: Run, recipe: Recipe) -> str:
    about = ABOUT if "export" in recipe.names else NO_FORMS.format(recipe=recipe.name)
    return _kept(run, about, f"python recipes/{recipe.name}.py {_use(recipe)} --resume")


def _use(recipe: Recipe) -> str:
    """The flags with which a recipe uses weights."""
    if "transcribe" in recipe.commands:
        return "--transcribe recording.wav"
    if "synthesize" in recipe.commands:
        return '--synthesize "a text"' + (" --speaker_wav voice.wav" if recipe.clones else "")
    return "--evaluate"


def _kept(run: Run, about: str, command: str = "") -> str:
    """The best weights to download, below a text; the command that uses them."""
    best = run.folder / outputs.CHECKPOINTS / "best.safetensors"
    if not best.is_file():
        return f"<p>{views.text(about)}</p>"
    used = f"<pre><code>{views.text(f'{command} {best}')}</code></pre>" if command else ""
    return (
        f"<div><p>{views.text(about)}</p><p>{views.text(BEST)}"
        f" {views.download(str(best))} ({_size(best.stat().st_size)})</p>{used}</div>"
    )


def _exports(run: Run) -> str:
    """The files of each export, with its licence."""
    parts = []
    for folder in _folders(run):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        parts.append(f"<h3>{views.text(folder.name)}</h3>{_files(folder, files[:MOST_FILES])}")
        if folder / LICENCE in files:
            notice = views.text(read_text(folder / LICENCE))
            parts.append(f"<details open><summary>Licence</summary><p>{notice}</p></details>")
    return f"<div>{''.join(parts)}</div>" if parts else ""


def _files(folder: Path, files: list[Path]) -> str:
    rows = []
    for path in files:
        name = views.text(path.relative_to(folder))
        rows.append([name, _size(path.stat().st_size), views.download(str(path))])
    table = views.table(["file", "size", "to keep"], rows, str(folder))
    return f'<div class="stacked">{table}</div>'


def _size(count: int) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
