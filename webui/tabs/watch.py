"""The Runs tab: the list of runs, and what is known of one or two of them while they train."""

import time

import gradio as gr

from common.errors import UsageError
from common.report import ERROR_RATES
from webui import runs, views
from webui.context import Context
from webui.runs import Run
from webui.tabs.events import on
from webui.tabs.shared import Shared

SECONDS = 2.0  # between two looks at the disk
NONE = "none"
LOG_LINES = 200
OVER = ("finished", "stopped", "failed", "killed", "untouched")  # states of runs that do not run


def build(context: Context, shared: Shared) -> None:
    folder = context.places.runs
    listed = gr.Markdown(sanitize_html=False, latex_delimiters=[])
    with gr.Row():
        chosen = gr.Dropdown([], label="Run", info="what is shown below", min_width=200)
        other = gr.Dropdown(
            [NONE], value=NONE, label="Compare with", info="a second run in the same plots"
        )
    status = gr.Markdown(sanitize_html=False, latex_delimiters=[])
    with gr.Row():
        stop = gr.Button("Stop and save", variant="stop", min_width=140)
        resume = gr.Button("Resume", variant="primary", min_width=140)
        take = gr.Button("New run with these settings", min_width=140)
    plots = gr.Markdown(sanitize_html=False, latex_delimiters=[])
    log = gr.Textbox(label="Log", lines=14, max_lines=14, interactive=False, buttons=["copy"])
    with gr.Accordion("Remove a run", open=False):
        typed = gr.Textbox(
            label="Name of the run", info="its weights, its log and its uploaded audio are deleted"
        )
        remove = gr.Button("Remove it for good", variant="stop")
    clock = gr.Timer(SECONDS)

    def choices(name: str, second: str) -> tuple:
        """The dropdowns, with the run `name` or else the newest, and `second` if it is there."""
        names = [run.name for run in runs.list_runs(folder)]
        name = name if name in names else next(iter(names), None)
        second = second if second in names else NONE
        return (
            gr.Dropdown(choices=names, value=name),
            gr.Dropdown(choices=[NONE, *names], value=second),
        )

    def look(name: str | None, second: str) -> tuple:
        found = runs.list_runs(folder)
        shown = [run for run in found if run.name == name]
        shown += [run for run in found if run.name == second and second != name]
        rows = [_row(run) for run in found]
        table = views.table(["run", "recipe", "state", "", "began"], rows, "Runs")
        if not found:
            table = "<p>There is no run yet. The Train tab starts one.</p>"
        if not shown or shown[0].name != name:
            return table, "", "", ""
        return table, _status(shown[0]), _plots(shown), runs.log(shown[0], LOG_LINES)

    def act(action) -> callable:
        def run(name: str | None) -> None:
            action(runs.find(folder, _named(name)))

        return run

    def settings_of(name: str | None) -> tuple:
        run = runs.find(folder, _named(name))
        if not run.settings:
            raise UsageError(f"{run.name} was started from a command line: its settings are there")
        return run.settings, gr.Tabs(selected="train")

    def removed(name: str) -> str:
        runs.remove(runs.find(folder, _named(name)), context.places)
        return ""

    shown = [listed, status, plots, log]
    for trigger in (clock.tick, chosen.change, other.change):
        on(trigger, look, [chosen, other], shown, show_progress="hidden")
    on(shared.tab.select, choices, [shared.chosen, other], [chosen, other])
    on(chosen.input, lambda name: name, chosen, shared.chosen)

    def continue_it(run: Run) -> None:
        runs.resume(run, context.places, context.recipes)

    for button, action in ((stop, runs.stop), (resume, continue_it)):
        on(button.click, act(action), chosen).then(
            look, [chosen, other], shown, api_visibility="private"
        )
    on(take.click, settings_of, chosen, [shared.settings, shared.tabs])
    on(remove.click, removed, typed, typed).then(
        choices, [chosen, other], [chosen, other], api_visibility="private"
    )


def _named(name: str | None) -> str:
    if not name:
        raise UsageError("choose a run first")
    return name


def _row(run: Run) -> list[str]:
    state = runs.state(run)
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
    return [views.text(each) for each in (run.name, run.recipe, state.word, state.detail, began)]


def _status(run: Run) -> str:
    """The state of a run, and its last numbers."""
    state = runs.state(run)
    progress = runs.progress(run)
    numbers = [f"{views.text(name)}: {views.text(value)}" for name, value in progress.items()]
    line = f"<p><b>{views.text(state.word)}</b>: {views.text(state.detail)}</p>"
    return f"<div>{line}<p>{' &nbsp; '.join(numbers)}</p></div>"


def _plots(shown: list[Run]) -> str:
    """Losses, error rates or other results, and learning rates of one or two runs."""
    metrics = {run.name: runs.metrics(run) for run in shown}
    names = {key for rows in metrics.values() for row in rows for key in row}
    results = sorted(name for name in names if name.startswith("eval/") and "loss" not in name)
    rates = [name for name in results if name.removeprefix("eval/") in ERROR_RATES]
    losses = _lines(metrics, ["train/loss", "eval/loss"])
    parts = [views.curves("Loss", losses)]
    if results:
        scale = 100 if rates else 1
        title = "Error rates of the evaluation set, %" if rates else "Evaluation set"
        parts.append(views.curves(title, _lines(metrics, rates or results, scale)))
    parts.append(views.curves("Learning rate", _lines(metrics, ["train/learning_rate"])))
    return f'<div class="plots">{"".join(parts)}</div>'


def _lines(metrics: dict[str, list[dict]], keys: list[str], scale: float = 1) -> dict:
    """{label: points} of some keys of each run."""
    lines = {}
    for name, rows in metrics.items():
        for key in keys:
            points = [
                (row["step"], scale * row[key])
                for row in rows
                if isinstance(row.get(key), int | float)
            ]
            label = key if len(metrics) == 1 else f"{name} {key}"
            if points:
                lines[label] = points
    return lines
