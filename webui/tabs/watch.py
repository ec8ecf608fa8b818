"""The Runs tab: the list of runs, and what is known of one or two of them while they train."""

import functools
from collections.abc import Callable

import gradio as gr

from common.errors import Failure, UsageError
from common.report import ERROR_RATES
from webui import outputs, progress, runs, views
from webui.context import Context
from webui.runs import Run
from webui.tabs.choice import one_of
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared

SECONDS = 2.0  # between two looks at the disk
NONE = "none"
OVER = ("finished", "stopped", "failed", "killed", "untouched")  # of runs that do not run


def build(context: Context, shared: Shared) -> None:
    folder = context.places.runs
    listed = gr.Markdown(**HTML)
    clicked = gr.Textbox(visible="hidden", elem_id="clicked-run")  # a script of the page fills it
    with gr.Row():
        chosen = gr.Dropdown([], label="Run", info="what is shown below", min_width=200)
        other = gr.Dropdown(
            [NONE], value=NONE, label="Compare with", info="a second run in the same plots"
        )
    status = gr.Markdown(**HTML)
    with gr.Row():
        stop = gr.Button("Stop and save", interactive=False, min_width=140)
        resume = gr.Button("Resume", interactive=False, min_width=140)
        take = gr.Button("New run with these settings", interactive=False, min_width=140)
    plots = gr.Markdown(**HTML)
    log = gr.Markdown(**HTML)

    def choose(wanted: str, name: str | None, second: str) -> tuple:
        return _choices(runs.list_runs(folder), wanted, name, second)

    def look(name: str | None, second: str) -> tuple:
        return _look(runs.list_runs(folder), name, second)

    def continue_it(run: Run) -> None:
        context.release_gpu(run.words)
        runs.resume(run, context.places, context.recipes)

    def act(action, name: str | None, second: str) -> tuple:
        action(context.run(name))
        return look(name, second)

    def click(name: str, *before: str) -> tuple:
        return ("", *choose(name, *before), name) if name else (gr.skip(),) * 4

    both = [chosen, other]
    shown = [listed, status, plots, log, stop, resume, take]
    for trigger in (gr.Timer(SECONDS).tick, chosen.change, other.change):
        on(trigger, look, both, shown, show_progress="hidden")
    follow = {"show_progress": "hidden"}
    on(chosen.input, lambda name, second: choose(name, name, second)[1], both, other, **follow)
    on(chosen.input, lambda name: name, chosen, shared.chosen)
    on(clicked.change, click, [clicked, *both], [clicked, *both, shared.chosen], **follow)
    on(shared.tab.select, choose, [shared.chosen, *both], both)
    on(stop.click, lambda *names: act(runs.stop, *names), both, shown)
    on(resume.click, lambda *names: act(continue_it, *names), both, shown)
    on(
        take.click,
        lambda name: (context.run(name).settings, gr.Tabs(selected="train")),
        chosen,
        [shared.settings, shared.tabs],
    )
    _several(context, choose, both)


def _several(context: Context, choose: Callable[..., tuple], both: list[gr.Dropdown]) -> None:
    """Several runs that are stopped or removed at once. After a removal, `both` dropdowns of
    `build` are what `choose` makes of them."""
    with gr.Accordion("Stop or remove several runs", open=False):
        several = gr.Dropdown(
            [],
            multiselect=True,
            label="Runs",
            info="of removed ones the weights, logs, drafts and uploads are deleted",
        )
        with gr.Row():
            stop = gr.Button("Stop and save them", min_width=140)
            remove = gr.Button("Remove them for good", variant="stop", min_width=140)

    def names() -> gr.Dropdown:
        return gr.Dropdown(choices=[run.name for run in runs.list_runs(context.places.runs)])

    def act(action: Callable[[Run], None], names: list[str] | None) -> None:
        """Those that cannot be stopped or removed are named after the others were."""
        if not names:
            raise UsageError("choose the runs first")
        failures = []
        for name in names:
            try:
                action(context.run(name))
            except Failure as failure:
                failures.append(str(failure))
        if failures:
            raise UsageError("; ".join(failures))

    on(several.focus, names, None, several, show_progress="hidden")
    on(stop.click, lambda names: act(runs.stop, names), several)
    removal = functools.partial(runs.remove, places=context.places)
    removed = on(remove.click, lambda names: act(removal, names), several)
    on(removed.then, lambda *before: ([], *choose("", *before)), both, [several, *both])


def _choices(found: list[Run], wanted: str, name: str | None, second: str) -> tuple:
    """The dropdowns: of all runs `wanted` is chosen, or else the newest unless one is; and of the
    other runs of its recipe, with which it can be compared."""
    recipes = {run.name: run.recipe for run in found}
    first = next((each for each in (wanted, name, *recipes) if each in recipes), None)
    same = [each for each in recipes if each != first and recipes[each] == recipes[first]]
    return one_of(list(recipes), wanted, name), one_of([NONE, *same], None, second)


def _look(found: list[Run], name: str | None, second: str) -> tuple:
    """The table of all runs; state, plots (beside `second`'s) and log of a run; its buttons."""
    states = {run.name: progress.state(run) for run in found}
    rows = [_row(run, states[run.name]) for run in found]
    table = views.table(["run", "state", "began"], rows, "Runs")
    table = f'<div class="stacked">{table}</div>'
    if not found:
        table = "<p>There is no run yet. The Train tab starts one.</p>"
    chosen = next((run for run in found if run.name == name), None)
    if chosen is None:
        return table, "", "", "", *[gr.Button(interactive=False)] * 3
    state = states[chosen.name]
    is_over = state.word in OVER
    shown = [chosen, *(run for run in found if run.name == second != name)]
    file = chosen.folder / outputs.LOG
    whole = f"<p>{views.download(str(file))}</p>" if file.is_file() else ""
    return (
        table,
        _status(chosen, state),
        "" if progress.is_draft(chosen) else _plots(shown),
        f"<div>{views.log(outputs.log(chosen.folder))}{whole}</div>",
        gr.Button(interactive=not is_over and state.word != "stopping"),
        gr.Button(interactive=is_over and state.word != "finished" and bool(chosen.settings)),
        gr.Button(interactive=bool(chosen.settings)),
    )


def _row(run: Run, state: progress.State) -> list[str]:
    """A row of the table. A click on its name shows the run below."""
    name, state_word = views.text(run.name), views.text(state.word)
    button = f'<button class="run" data-run="{name}">{name}</button>'
    return [
        f"{button}<div>{views.text(run.recipe)}</div>",
        f"<b>{state_word}</b><div>{views.text(state.detail)}</div>",
        views.text(views.moment(run.created)),
    ]


def _status(run: Run, state: progress.State) -> str:
    """The state of a run, and its last numbers."""
    numbers = [f"{name}: {value}" for name, value in progress.numbers(run).items()]
    items = "".join(f"<li>{views.text(each)}</li>" for each in numbers)
    name = f"<h3>{views.text(run.name)}</h3>"
    line = f"{name}<p><b>{views.text(state.word)}</b>: {views.text(state.detail)}</p>"
    return f'<div>{line}<ul class="numbers">{items}</ul></div>'


def _plots(shown: list[Run]) -> str:
    """Losses, error rates or other results, and learning rates of one or two runs."""
    metrics = {run.name: outputs.metrics(run.folder) for run in shown}
    names = {key for rows in metrics.values() for row in rows for key in row}
    results = sorted(name for name in names if name.startswith("eval/") and "loss" not in name)
    rates = [name for name in results if name.removeprefix("eval/") in ERROR_RATES]
    parts = [views.curves("Loss", _lines(metrics, ["train/loss", "eval/loss"]))]
    if rates:
        title = "Error rates of the evaluation set, %"
        parts.append(views.curves(title, _lines(metrics, rates, 100)))
    elif results:
        parts.append(views.curves("Evaluation set", _lines(metrics, results)))
    parts.append(views.curves("Learning rate", _lines(metrics, ["train/learning_rate"])))
    return f'<div class="plots">{"".join(parts)}</div>'


def _lines(metrics: dict[str, list[dict]], keys: list[str], scale: float = 1) -> dict:
    """{label: points} of some keys of each run."""
    lines = {}
    for name, rows in metrics.items():
        for key in keys:
            label = key if len(metrics) == 1 else f"{name} {key}"
            points = [(row["step"], scale * row[key]) for row in rows if key in row]
            if points:
                lines[label] = points
    return lines
